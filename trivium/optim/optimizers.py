"""The optimizers by name."""

from __future__ import annotations

from trivium.optim.adafactor import Adafactor
from trivium.optim.adam import Adam, AdamW
from trivium.optim.muon import Muon
from trivium.optim.sgd import Sgd
from trivium.optim.stepper import Optim, Optimizer

__all__ = ["OPTIMIZERS", "Adafactor", "Adam", "AdamW", "Muon", "Optim", "Optimizer", "Sgd"]

OPTIMIZERS: dict[str, type[Optim]] = {
    "adamw": AdamW,
    "muon": Muon,
    "sgd": Sgd,
    "adam": Adam,
    "adafactor": Adafactor,
}
