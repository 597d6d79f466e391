"""Packed equals padded equals alone, in every family: documents in one row are as far apart as in rows of their own."""

# B batch, T tokens, S source tokens, 1 row that holds all of them

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.battery import close, lively, some_ids
from tests.cases import VOCAB
from trivium.errors import RequestError
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer
from trivium.objectives.causal import restarting
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.positions import (
    AlibiOptions,
    BucketOptions,
    LearnedOptions,
    NoPositionOptions,
    Position,
    RotaryOptions,
    ShawOptions,
    SinusoidalOptions,
)

SCHEMES: dict[str, Position] = {
    "none": NoPositionOptions(),
    "learned": LearnedOptions(),
    "sinusoidal": SinusoidalOptions(),
    "rotary": RotaryOptions(),
    "t5": BucketOptions(buckets=8, distance=12),
    "alibi": AlibiOptions(),
    "shaw": ShawOptions(distance=3),
}
FAMILIES = ("encoder", "decoder", "encoder-decoder")
TARGETS, SOURCES = (4, 3, 6), (5, 2, 7)  # tokens of each document; two more of padding


def model(family: str, scheme: str) -> Transformer:
    position = SCHEMES[scheme]
    plain = Stack(layers=2, block=Block(position=position))
    crossed = Stack(layers=2, block=Block(position=position, cross=MultiHeadOptions()))
    return lively(
        ModelConfig(
            width=32,
            context=24,
            vocab=VOCAB,
            encoder=NoStack() if family == "decoder" else plain,
            decoder=NoStack() if family == "encoder" else crossed if family == "encoder-decoder" else plain,
        )
    )


def numbered(sizes: tuple[int, ...]) -> Tensor:
    """The document of each token of one packed row, [1, T]."""
    parts = [torch.full((size,), number) for number, size in enumerate(sizes, 1)]
    return torch.cat([*parts, torch.zeros(2, dtype=torch.int64)])[None]


def packed(family: str) -> dict[str, Tensor]:
    """All documents in one row."""
    documents = numbered(TARGETS)
    inputs = {"tokens": some_ids(1, 15), "documents": documents, "positions": restarting(documents)}
    if family == "encoder-decoder":
        sources = numbered(SOURCES)
        inputs |= {
            "source": some_ids(1, 16, seed=1),
            "source_documents": sources,
            "source_positions": restarting(sources),
        }
    return inputs


def padded(family: str) -> dict[str, Tensor]:
    """A row for each document, filled up with other tokens."""
    whole = packed(family)
    inputs: dict[str, Tensor] = {}
    for side, mask, sizes in (("tokens", "padding", TARGETS), ("source", "source_padding", SOURCES)):
        if side in whole:
            rows = torch.full((3, max(sizes)), 7)
            starts = [sum(sizes[:number]) for number in range(3)]
            for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                rows[row, :size] = whole[side][0, start : start + size]
            inputs[side] = rows
            inputs[mask] = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    return inputs


def states(made: Transformer, inputs: dict[str, Any], row: int = 0) -> Tensor:
    with torch.no_grad():
        hidden: Tensor = made(**inputs).hidden
    assert bool(hidden.isfinite().all())
    return made.head.logits(hidden[row])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_gets_what_it_gets_padded_and_alone(family: str, scheme: str) -> None:
    made, rows = model(family, scheme), padded(family)
    together = states(made, packed(family))
    for number, size in enumerate(TARGETS):
        here = slice(sum(TARGETS[:number]), sum(TARGETS[: number + 1]))
        alone = {"tokens": rows["tokens"][number, None, :size]}
        if family == "encoder-decoder":
            alone["source"] = rows["source"][number, None, : SOURCES[number]]
        expected = states(made, alone)
        close(together[here], expected, 1e-5)
        close(states(made, rows, number)[:size], expected, 1e-5)


# what each input keeps apart, and a document that notices its absence
GUARDS = {
    "encoder": ("documents", "positions"),
    "decoder": ("documents", "positions"),
    "encoder-decoder": ("source_documents", "positions", "source_positions"),
}


@pytest.mark.parametrize(("family", "guard"), [(family, guard) for family in FAMILIES for guard in GUARDS[family]])
def test_without_any_of_its_guards_it_does_not(family: str, guard: str) -> None:
    """With learned positions, which are not the same from another start."""
    made, inputs = model(family, "learned"), packed(family)
    together = states(made, inputs)
    without = states(made, {name: tensor for name, tensor in inputs.items() if name != guard})
    last = slice(sum(TARGETS[:2]), sum(TARGETS))
    assert (without[last] - together[last]).abs().max() > 1e-3


def test_the_decoder_alone_kept_apart_is_not_enough() -> None:
    made, inputs = model("encoder-decoder", "rotary"), packed("encoder-decoder")
    together = states(made, inputs)
    one_source = inputs | {"source_documents": (inputs["source_documents"] > 0).long()}
    one_target = one_source | {"documents": (inputs["documents"] > 0).long()}
    assert (states(made, one_target)[:13] - together[:13]).abs().max() > 1e-3
    # targets 2 and 3 have no source now: nothing to read across is zeros, not an average of everything
    lonely = states(made, one_source)
    assert bool(lonely.isfinite().all())


def test_targets_see_the_source_of_their_own_number_wherever_it_lies() -> None:
    """The order of the sources in their row does not matter."""
    made, inputs = model("encoder-decoder", "rotary"), packed("encoder-decoder")
    order = torch.cat([torch.arange(7, 14), torch.arange(7), torch.arange(14, 16)])
    moved = {name: tensor[:, order] if name.startswith("source") else tensor for name, tensor in inputs.items()}
    close(states(made, moved), states(made, inputs), 1e-9)


@pytest.mark.parametrize("missing", ["documents", "cache"])
def test_packed_sources_need_packed_targets_and_no_cache(missing: str) -> None:
    made, inputs = model("encoder-decoder", "rotary"), packed("encoder-decoder")
    given: dict[str, Any] = {name: tensor for name, tensor in inputs.items() if name != missing}
    if missing == "cache":
        given["cache"] = made.cache(1, 15)
    with pytest.raises(RequestError, match="packed sources need documents= of the targets too, and no cache"):
        made(**given)
