"""How tensor parallel divides a model, and what it refuses before anything is divided: no process is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.battery import lively
from tests.cases import CASES, CONTEXT, VOCAB, WIDTH
from trivium.distributed.tensor_parallel import _give_heads, plan
from trivium.errors import RequestError
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer
from trivium.parts.linear import Linear
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.feedforward import MlpOptions
from trivium.parts.options.positions import AlibiOptions
from trivium.parts.positions import AlibiPositions, Positions
from trivium.parts.quantized import hollow

NAMED = {case.name: case.config for case in CASES}


def small(**places: Any) -> Transformer:
    stack = Stack(layers=1, block=Block(**places))
    return lively(ModelConfig(width=WIDTH, context=CONTEXT, vocab=VOCAB, decoder=stack))


def test_roles_say_how_layers_are_divided() -> None:
    """Megatron's scheme, by hand: inputs of a part by columns, its output by rows."""
    columns = {"attention.query", "attention.key", "attention.value", "feedforward.gate", "feedforward.up"}
    rows = {"attention.out", "feedforward.down"}
    found = plan(lively(NAMED["llama-mini"]), 2).layers
    for layer in range(2):
        for names, division in ((columns, "columns"), (rows, "rows")):
            for name in names:
                assert found.pop(f"decoder.blocks.{layer}.{name}") == division
    assert not found


@pytest.mark.parametrize("name", [name for name in NAMED if name.startswith("encoder-decoder")][::7])
def test_every_matrix_of_a_block_is_divided(name: str) -> None:
    model = lively(NAMED[name])
    found = plan(model, 1).layers
    linears = {part for part in model.modules() if isinstance(part, Linear)}
    divided = {model.get_submodule(name) for name in found}
    assert {layer.role for layer in linears - divided if isinstance(layer, Linear)} <= {"head", "transform"}
    assert len(divided) == len(found)


def without_head_size(model: Transformer) -> None:
    cast(Any, model.decoder).blocks[0].attention.query.head = 0


def with_a_wide_norm(model: Transformer) -> None:
    cast(Any, model.decoder).blocks[0].attention.query_norm = nn.LayerNorm(WIDTH)


def with_a_torch_layer(model: Transformer) -> None:
    cast(Any, model.decoder).blocks[0].feedforward.up = nn.Linear(WIDTH, 4 * WIDTH)


def without_blocks(model: Transformer) -> None:
    model.decoder = cast(Any, nn.Identity())


class Everywhere(Positions):
    """A scheme of one table for the embeddings and the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1))

    def embed(self, x_BTD: Tensor, at_BT: Tensor) -> Tensor:
        return x_BTD + self.table

    def bias(self, prepared: Any) -> Tensor:
        return self.table.view(1, 1, 1, 1)


def with_positions_everywhere(model: Transformer) -> None:
    cast(Any, model.decoder).positions[0] = Everywhere()


REFUSALS: dict[str, tuple[Callable[[Transformer], object], str]] = {
    "quantised": (lambda model: hollow(model, 8), "blocks.0 has no layer"),
    "no head size": (without_head_size, "attention.query does not say the size of a head"),
    "a norm over all heads": (with_a_wide_norm, "attention has a vector for more than one head"),
    "a layer without a role": (with_a_torch_layer, "feedforward.up.weight is no Linear with a role"),
    "a stack of its own kind": (without_blocks, "decoder is a stack without a list of blocks"),
    "one table in two places": (with_positions_everywhere, "positions.0 adds to embeddings and acts on heads"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_divided_is_refused_by_its_name(name: str) -> None:
    model = small(attention=MultiHeadOptions(heads=4, norm="rms"))
    plan(model, 2)
    change, sentence = REFUSALS[name]
    change(model)
    with pytest.raises(RequestError, match=sentence):
        plan(model, 2)


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        ({"attention": MultiHeadOptions(heads=4)}, "3 processes cannot divide 4 query heads"),
        ({"attention": MultiHeadOptions(heads=6, head=4, groups=2)}, "3 processes cannot divide 2 key/value heads"),
        (
            {"attention": MultiHeadOptions(heads=6, head=4), "feedforward": MlpOptions(hidden=40)},
            "3 processes cannot divide 40 hidden",
        ),
    ],
)
def test_an_uneven_division_is_refused(places: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        plan(small(**places), 3)


class AllHeads(AlibiPositions):
    """A scheme from outside that knows nothing of processes."""

    def of_own_heads(self, by_head: Tensor, dim: int) -> Tensor:
        return by_head


def test_positions_answer_for_the_heads_of_a_process_or_are_refused() -> None:
    """ALiBi's slopes of four heads are 2^-2, 2^-4, 2^-6, 2^-8 (Press et al. 2022)."""
    model = small(position=AlibiOptions())
    found = plan(model, 2).positions
    position, heads = found[0]
    assert heads == 4
    for rank, slopes in enumerate(([2.0**-2, 2.0**-4], [2.0**-6, 2.0**-8])):
        _give_heads(found, 2, rank)
        bias_BHTS = position.bias(position.prepare(torch.tensor([[1]]), torch.tensor([[0]])))
        assert bias_BHTS is not None
        assert bias_BHTS.flatten().tolist() == [-slope for slope in slopes]
    cast(Any, model.decoder).positions[0] = AllHeads(4)
    found = plan(model, 2).positions
    with pytest.raises(RequestError, match="AllHeads gives a bias for 4 heads"):
        _give_heads(found, 2, 0)
    assert found[0][0].own_heads is None
