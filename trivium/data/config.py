"""The settings of the data place of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from trivium.config import accept, at_least
from trivium.errors import ConfigError

Shift = Literal["none", "epoch"]

AUTO = "auto"
SHARE, MOST, ENOUGH = 0.01, 0.1, 1 << 16  # what `auto` keeps for validation: of a large text, at most, bytes of a small


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which text, or which pairs of sentences, a run reads, and what of it is kept for validation."""

    ALTERNATIVES: ClassVar = (("paths", "weights"), ("source", "target", "valid_source", "valid_target"), ("pairs",))
    # Text files, .gz, .xz, .jsonl (also compressed), folders of them, or one folder of built shards.
    paths: tuple[str, ...] = ()
    # The share of each path in every stretch of training, whatever its size; () means all text as one.
    weights: tuple[float, ...] = ()
    # Rows are cut at the same places in every epoch, or from the second "epoch" on elsewhere in each.
    shift: Shift = "none"
    # A fraction of the documents (of the different source sentences), or the path of a text kept for validation; auto
    # is 0.01, and more of a small text, so that what is kept says something: 64 KiB, up to a tenth.
    valid: float | str = AUTO
    # Documents inside a file are split here; a form feed splits always.
    separator: str = ""
    # The key of a JSON line that holds the text.
    field: str = "text"
    # Pairs instead of text: two files with a sentence on each line, of which those with one number belong together;
    source: str = ""
    target: str = ""
    # or one file with tabs, and which of its columns (the first is 0) are source and target.
    pairs: str = ""
    columns: tuple[int, int] = (0, 1)
    # Tokens of a row of text, or of the longest side of a pair; 0 means model.context.
    length: int = 0
    # Several pairs in a row of at most so many tokens a side, kept apart by the mask; 0 means each in a row of its own.
    pack: int = 0
    # Two more such files, kept for validation, instead of a fraction; with `pairs` it is `valid` that names one.
    valid_source: str = ""
    valid_target: str = ""

    @property
    def limit(self) -> str:
        """The setting that decides how long a row may be."""
        return "data.length" if self.length else "model.context"

    def __post_init__(self) -> None:
        accept(self)
        at_least("pack", self.pack, 0)
        at_least("length", self.length, 0)
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
        self._check_pairs()

    @property
    def paired(self) -> bool:
        """Whether it names pairs and not text."""
        return bool(self.source or self.pairs)

    @property
    def valid_path(self) -> str:
        """The path of a text kept for validation; empty if a share of the training text is."""
        return self.valid if isinstance(self.valid, str) and self.valid != AUTO else ""

    @property
    def valid_share(self) -> float:
        """The share of the training text that is kept for validation."""
        return 0.0 if self.valid_path else SHARE if isinstance(self.valid, str) else self.valid

    def settled(self, size: int) -> DataConfig:
        """The same with a definite share for `auto`, given the bytes of the training text."""
        if self.valid != AUTO:
            return self
        return replace(self, valid=round(min(MOST, max(SHARE, ENOUGH / max(1, size))), 4))

    def below(self, folder: Path) -> DataConfig:
        """The same with relative paths taken from `folder`: absolute ones are found when a run goes on elsewhere."""

        def found(path: str) -> str:
            return str((folder / path).absolute()) if path else ""

        names = ("source", "target", "pairs", "valid_source", "valid_target")
        changes: dict[str, Any] = {name: found(getattr(self, name)) for name in names}
        valid = found(self.valid_path) if self.valid_path else self.valid
        return replace(self, paths=tuple(map(found, self.paths)), valid=valid, **changes)

    def _check_pairs(self) -> None:
        for one, other in (("source", "target"), ("target", "source")):
            if getattr(self, one) and not getattr(self, other):
                raise ConfigError(f"{other}: data.{one} is one side of pairs; name the file of the other side")
            if getattr(self, f"valid_{one}") and not getattr(self, f"valid_{other}"):
                raise ConfigError(f"valid_{other}: data.valid_{one} is one side of pairs; name the other side too")
        if self.source and self.pairs:
            raise ConfigError(
                "pairs: the pairs come from data.source and data.target, or from data.pairs; leave one out"
            )
        if self.paired and (self.paths or self.weights):
            name = "paths" if self.paths else "weights"
            raise ConfigError(f"{name}: a run reads text or pairs, not both; leave out data.{name}, or the pairs")
        if self.paired and self.shift != "none":
            raise ConfigError("shift: pairs are rows of their own, which are not cut; leave out data.shift")
        if self.valid_source and not self.source:
            raise ConfigError("valid_source: it stands beside data.source; with data.pairs name a file in data.valid")
        if self.source and self.valid_path:
            raise ConfigError("valid: pairs from two files are validated by two; set data.valid_source and _target")
        if len(self.columns) != 2 or min(self.columns) < 0 or self.columns[0] == self.columns[1]:
            raise ConfigError(f"columns: {list(self.columns)} are not two columns, counted from 0; try [0, 1]")
