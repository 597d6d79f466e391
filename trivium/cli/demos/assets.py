"""The texts that the demos learn from and are shown on, carried by the package."""

from __future__ import annotations

import gzip
import hashlib
from importlib.resources import files

ASSETS = files("trivium") / "assets"


def text_of(name: str) -> str:
    """The text in a compressed asset."""
    return gzip.decompress((ASSETS / name).read_bytes()).decode()


def digests(*names: str) -> dict[str, str]:
    """The sha256 of each of some assets, as a results file names what was read."""
    return {name: hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() for name in names}
