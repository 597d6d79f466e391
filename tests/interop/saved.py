"""Models that another library saved, opened here, and what is compared of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests.oracle.copying import near, states
from trivium.interop.folder import open_model
from trivium.interop.hf import export_folder
from trivium.models.transformer import Transformer


def opened(folder: Path) -> Transformer:
    return open_model(folder, tick=lambda what, done, whole: None)[0]


def exported(module: Transformer, folder: Path) -> str:
    """What the export said last."""
    said: list[str] = []
    export_folder(module, None, folder, say=said.append)
    return said[-1]


def alike(mine: Tensor, theirs: Tensor) -> None:
    """Within 1e-5 of the largest number: float32 rounds a small one as its larger neighbours in a sum are rounded.

    What hides in that margin shows in float64, where `exactly` compares.
    """
    near(mine, theirs, 1e-5 * max(1.0, theirs.abs().max().item()))


def exactly(mine: Tensor, theirs: Tensor) -> None:
    """The same function in float64."""
    near(mine, theirs, 1e-9 * max(1.0, theirs.abs().max().item()))


def alike_layers(
    side: nn.Module | None, run: Callable[[], object], theirs: tuple[Tensor, ...], real: Any = slice(None)
) -> None:
    """The states after every layer; the last of theirs is after the final norm, the first is the stack's input."""
    found = states(side, run)
    assert len(found) == len(theirs) > 2
    for mine, expected in zip([*found[:-2], found[-1]], theirs[1:], strict=True):
        alike(mine[real], expected[real])
