"""trivium: one workshop for every Transformer. `import trivium as tv` gives the functions of `trivium.api`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trivium.api import (
        Completion,
        Filling,
        Hypothesis,
        Model,
        Neighbour,
        Recipe,
        Run,
        Score,
        Verdict,
        build,
        load,
        neighbours,
        preset,
        presets,
        recipe,
        show,
        train,
    )

__all__ = [
    "Completion",
    "Filling",
    "Hypothesis",
    "Model",
    "Neighbour",
    "Recipe",
    "Run",
    "Score",
    "Verdict",
    "__version__",
    "build",
    "load",
    "neighbours",
    "preset",
    "presets",
    "recipe",
    "show",
    "train",
]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: `import trivium` and `trivium --help` do without it until something is used
    if name not in __all__:
        raise AttributeError(f"module 'trivium' has no attribute {name!r}")
    return getattr(import_module("trivium.api"), name)
