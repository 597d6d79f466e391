"""A run as one self-contained page: what it is, how it learned, what it does, and how it was made."""

from trivium.report.curve import curve as curve
from trivium.report.facts import use_of as use_of
from trivium.report.page import page as page
