"""The rules that rename tensors: both directions, against plain loops, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trivium.errors import CheckpointError
from trivium.interop.names import SAME, ByHead, Columns, Form, Row, Rule, Rules, Turned, same

RULES = Rules(
    table=[
        *same({"embedding": "body.words", "decoder.blocks.*.norm": "body.h.*.LayerNorm", "output.project": "head"}),
        Rule(("decoder.blocks.*.up",), "body.h.*.up", Turned()),
    ],
    copies={"head.weight": "body.words.weight"},
    ignored=("body.h.*.mask",),
    prefixes=("body.",),
)


def own(*, tied: bool = True) -> dict[str, Tensor]:
    names = {"embedding.weight": torch.randn(7, 4)}
    for layer in range(2):
        names[f"decoder.blocks.{layer}.norm.weight"] = torch.randn(4)
        names[f"decoder.blocks.{layer}.norm.bias"] = torch.randn(4)
        names[f"decoder.blocks.{layer}.up.weight"] = torch.randn(6, 4)
    return names if tied else {**names, "output.project.weight": torch.randn(7, 4)}


def theirs(**options: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in RULES.write(own(**options))}


sizes = st.integers(1, 4)


@settings(max_examples=30, deadline=None)
@given(heads=sizes, size=sizes, width=sizes, flat=st.booleans())
def test_every_form_read_back_gives_the_same_tensors(heads: int, size: int, width: int, flat: bool) -> None:
    shape = (heads * size,) if flat else (heads * size, width)
    parts = [torch.randn(shape) for _ in range(3)]
    forms: list[tuple[Form, int]] = [(SAME, 1), (Turned(), 1), (Columns(), 3), (ByHead(heads=heads), 3)]
    for form, taken in [*forms, *([(Row(), 1)] if flat else [])]:
        written = form.write(parts[:taken])
        assert all(map(torch.equal, form.read(written), parts))


def test_heads_are_interleaved_as_in_neox() -> None:
    """By the layout that Megatron wrote: head by head, each with its query, key and value."""
    query, key, value = (torch.randn(6, 5) for _ in range(3))
    expected = [part[head * 2 + row] for head in range(3) for part in (query, key, value) for row in range(2)]
    assert torch.equal(ByHead(heads=3).write([query, key, value]), torch.stack(expected))


def test_columns_are_queries_then_keys_then_values() -> None:
    parts = [torch.full((4, 4), float(number)) for number in range(3)]
    assert Columns().write(parts)[0].tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4


def test_each_file_tensor_fills_ours() -> None:
    mine = own(tied=False)
    plan = RULES.match(theirs(tied=False), mine, "file")
    written = dict(RULES.write(mine))
    filled = {
        name: tensor
        for step in plan.steps
        for name, tensor in zip(step.ours, step.form.read(written[step.source]), strict=True)
    }
    assert filled.keys() == mine.keys()
    assert all(torch.equal(filled[name], mine[name]) for name in mine)


@pytest.mark.parametrize("name", ["words.weight", "body.words.weight", "body.body.words.weight"])
def test_a_prefix_may_be_missing_or_doubled(name: str) -> None:
    found = theirs()
    found[name] = found.pop("body.words.weight")
    assert RULES.match(found, own(), "file").steps[0].source == name


def test_old_spellings_of_a_norm_are_read() -> None:
    found = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): shape
        for name, shape in theirs().items()
    }
    sources = {step.source for step in RULES.match(found, own(), "file").steps}
    assert "body.h.1.LayerNorm.beta" in sources


def test_a_copy_is_compared_where_tied_and_read_where_not() -> None:
    plan = RULES.match({**theirs(), "head.weight": (7, 4)}, own(), "file")
    assert plan.copies == [("head.weight", "body.words.weight")]
    assert RULES.match(theirs(tied=False), own(tied=False), "file").copies == []


def test_a_copy_alone_is_the_original() -> None:
    found = theirs()
    found["head.weight"] = found.pop("body.words.weight")
    plan = RULES.match(found, own(), "file")
    assert plan.steps[0].source == "head.weight"
    assert plan.copies == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"body.h.0.up.weight": None}, r"body\.h\.0\.up\.weight is missing"),
        ({"body.h.2.up.weight": (4, 6)}, r"nobody reads the tensor body\.h\.2\.up\.weight"),
        ({"up\nwe\x1bight": (4, 6)}, r"nobody reads the tensor up\\nwe\\x1bight; this"),
        ({"body.h.1.up.weight": (6, 4)}, r"body\.h\.1\.up\.weight has shape \[6, 4\], not \[4, 6\]"),
        ({"words.weight": (7, 4)}, "are the same tensor"),
        ({"head.weight": (7, 5)}, r"head\.weight has shape \[7, 5\]"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    found = {name: shape for name, shape in {**theirs(), **change}.items() if shape is not None}
    with pytest.raises(CheckpointError, match=named):
        RULES.match(found, own(), "file")


@pytest.mark.parametrize("change", [{"body.h.0.up.weight": None}, {"body.h.2.up.weight": (4, 6)}])
def test_a_hint_says_why_a_tensor_is_missing_or_too_much(change: dict[str, Any]) -> None:
    found = {name: shape for name, shape in {**theirs(), **change}.items() if shape is not None}
    with pytest.raises(CheckpointError, match=r"tensor body\.h\.\d\.up\.weight.*; fetch another"):
        RULES.match(found, own(), "file", hint="fetch another")


def test_masks_stored_beside_the_weights_are_no_weights() -> None:
    plan = RULES.match({**theirs(), "body.h.0.mask": (1, 1), "h.1.mask": (1, 1)}, own(), "file")
    assert len(plan.steps) == len(theirs())
