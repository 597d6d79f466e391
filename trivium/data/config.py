"""The settings of the data place of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from trivium.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which text a run reads and how it falls into documents and a validation part."""

    # Text files, .gz, .xz, .jsonl (also compressed), folders of them, or one folder of built shards.
    paths: tuple[str, ...] = ()
    # A fraction of the documents, or the path of a text that is kept for validation.
    valid: float | str = 0.01
    # Documents inside a file are split here; a form feed splits always.
    separator: str = ""
    # The key of a JSON line that holds the text.
    field: str = "text"

    def __post_init__(self) -> None:
        if isinstance(self.valid, str):
            if not self.valid:
                raise ConfigError("valid: names no path; give a path or a fraction such as 0.01")
        elif not 0 <= self.valid < 1:
            raise ConfigError(f"valid: {self.valid} is not a fraction from 0 up to 1; try 0.01, or name a path")
