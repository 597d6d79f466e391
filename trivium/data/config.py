"""The settings of the data place of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trivium.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which text a run reads and how it falls into documents and a validation part."""

    # Text files, .gz, .xz, .jsonl (also compressed), folders of them, or one folder of built shards.
    paths: tuple[str, ...] = ()
    # The share of each path in every stretch of training, whatever its size; () means all text as one.
    weights: tuple[float, ...] = ()
    # A fraction of the documents, or the path of a text that is kept for validation.
    valid: float | str = 0.01
    # Documents inside a file are split here; a form feed splits always.
    separator: str = ""
    # The key of a JSON line that holds the text.
    field: str = "text"

    def __post_init__(self) -> None:
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ConfigError("weights: a weight is not above 0; leave the path out instead")
        if self.weights and len(self.paths) > 1 and len(self.weights) != len(self.paths):
            raise ConfigError(
                f"weights: {len(self.weights)} weights for {len(self.paths)} paths; give one for each of data.paths"
            )
        if isinstance(self.valid, str):
            if not self.valid:
                raise ConfigError("valid: names no path; give a path or a fraction such as 0.01")
        elif not 0 <= self.valid < 1:
            raise ConfigError(f"valid: {self.valid} is not a fraction from 0 up to 1; try 0.01, or name a path")
