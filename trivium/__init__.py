"""trivium: one workshop for every Transformer.

`import trivium as tv` gives the functions and classes of `trivium.api`; `dir(tv)` lists them. They are loaded when one
of them is first used, since torch takes seconds to import.

    run = tv.train("my.toml")           train a model from a recipe
    m = tv.load("runs/my")              open a run, a saved or a published model
    m.generate("It was", tokens=50)     and m.stream, m.chat, m.fill, m.translate, m.classify, m.embed, m.score
    tv.build("gpt-mini")                a new module; tv.presets() names the systems
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

from trivium import threads as _threads

__version__ = "0.1.0"

_threads.limit_spinning()  # before torch is loaded

if _typing.TYPE_CHECKING:
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


def __getattr__(name: str) -> _typing.Any:
    if name not in __all__:
        raise AttributeError(f"module 'trivium' has no attribute {name!r}")
    value = getattr(_importlib.import_module("trivium.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
