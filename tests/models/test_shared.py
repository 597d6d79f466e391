"""Encoder and decoder of the same weights: what is shared, counted, saved and learned once."""

# B batch, T tokens, S source tokens

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.battery import lively, some_ids
from trivium.checkpoints.bundle import open_bundle, save
from trivium.config import load, write
from trivium.errors import ConfigError
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block, Parallel
from trivium.models.transformer import Transformer, build, load_weights, weights
from trivium.parts.options.attention import MultiHead
from trivium.parts.options.feedforward import Glu, Mlp
from trivium.parts.options.positions import Buckets
from trivium.text.kinds import Bytes

BLOCK = Block(attention=MultiHead(bias="all"), position=Buckets(buckets=8, distance=12))
APART = ModelConfig(
    width=32,
    context=16,
    vocab=50,
    encoder=Stack(layers=2, block=BLOCK),
    decoder=Stack(layers=2, block=replace(BLOCK, cross=MultiHead(bias="all"))),
)
SHARED = replace(APART, share="stacks")


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model whose sides share, as those of one whose sides do not."""
    both = dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith("encoder.blocks.") and name.split(".")[3] in ("attention", "feedforward"):
            both[name.replace("encoder", "decoder", 1)] = tensor
    return both


def states(model: Transformer) -> Tensor:
    hidden: Tensor = model(some_ids(2, 6), source=some_ids(2, 7, seed=1)).hidden
    return hidden


def test_it_computes_what_equal_weights_on_both_sides_compute() -> None:
    shared, apart = lively(SHARED), build(APART, seed=1).double().eval()
    load_weights(apart, copies(weights(shared)))
    with torch.no_grad():
        assert torch.equal(states(shared), states(apart))


def test_its_gradients_are_the_sums_of_both_sides() -> None:
    shared, apart = lively(SHARED), build(APART, seed=1).double().eval()
    load_weights(apart, copies(weights(shared)))
    for model in (shared, apart):
        states(model).square().sum().backward()  # type: ignore[no-untyped-call]
    single = dict(apart.named_parameters())
    summed = 0
    for name, parameter in shared.named_parameters():
        expected = cast(Tensor, single[name].grad)
        if name in ("encoder.blocks.0.attention.query.weight", "encoder.blocks.1.feedforward.down.weight"):
            summed += 1
        if name.startswith("encoder.blocks.") and name.split(".")[3] in ("attention", "feedforward"):
            expected = expected + cast(Tensor, single[name.replace("encoder", "decoder", 1)].grad)
        torch.testing.assert_close(parameter.grad, expected)
    assert summed == 2


def test_attention_and_feedforward_are_shared_and_nothing_else() -> None:
    shared = build(SHARED)
    assert shared.encoder is not None
    assert shared.decoder is not None
    mine, yours = ({id(p) for p in side.parameters()} for side in (shared.encoder, shared.decoder))
    names = {name for name, p in shared.named_parameters() if id(p) in mine & yours}
    assert {name.split(".")[3] for name in names} == {"attention", "feedforward"}
    # norms, the tables of relative biases (one looks both ways, the other back) and cross-attention are their own
    own = {name for name, p in shared.named_parameters() if id(p) in yours - mine}
    assert {name.split(".")[1] for name in own} == {"blocks", "positions", "final"}
    assert {name.split(".")[3] for name in own if ".blocks." in name} == {
        "cross",
        "around_attention",
        "around_cross",
        "around_feedforward",
    }


def test_it_is_counted_once_and_costs_the_same_work() -> None:
    assert SHARED.parameters() == sum(parameter.numel() for parameter in build(SHARED).parameters())
    shared, apart = SHARED.costs(), APART.costs()
    for part in ("attention", "feedforward"):
        assert 2 * shared[part].parameters == apart[part].parameters
        assert shared[part].flops == apart[part].flops
    for part in ("cross", "norm", "position", "embedding", "output"):
        assert shared[part] == apart[part]


def test_it_is_saved_once_and_comes_back(tmp_path: Path) -> None:
    model = lively(SHARED, dtype=torch.float32)
    tensors = weights(model)
    assert not [name for name in tensors if name.startswith("decoder.blocks.0.attention.")]
    assert sum(tensor.numel() for tensor in tensors.values()) == SHARED.parameters()
    save(tmp_path, SHARED, tensors, Bytes().build([]), {})
    again = open_bundle(tmp_path).module
    assert again.config == SHARED
    with torch.no_grad():
        assert torch.equal(states(again), states(model))
    other = cast(Any, build(SHARED, seed=5))
    load_weights(other, tensors)
    assert other.encoder.blocks[1].attention is other.decoder.blocks[1].attention


def test_a_cache_keeps_both_uses_apart() -> None:
    model, tokens_BT, source_BS = lively(SHARED), some_ids(2, 6), some_ids(2, 7, seed=1)
    cache = model.cache(2, 6)
    with torch.no_grad():
        whole = model(tokens_BT, source=source_BS).hidden
        first = model(tokens_BT[:, :2], source=source_BS, cache=cache).hidden
        rest = [model(tokens_BT[:, at, None], cache=cache).hidden for at in range(2, 6)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), whole)


def test_the_setting_survives_a_file() -> None:
    assert 'share = "stacks"' in write(SHARED)
    assert load(ModelConfig, {"share": "stacks"}, start=APART) == SHARED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"encoder": NoStack(), "decoder": Stack()}, "share: a model with one side has no second one to share with"),
        ({"encoder": Stack(layers=3, block=BLOCK)}, "share: 3 layers of the encoder and 2 of the decoder cannot be"),
        (
            {"encoder": Stack(layers=2, block=replace(BLOCK, feedforward=Glu()))},
            "differ in their feedforward; set both",
        ),
        ({"encoder": Stack(layers=2, block=replace(BLOCK, attention=MultiHead(heads=8)))}, "differ in their attention"),
        ({"encoder": Stack(layers=2, block=Parallel(attention=BLOCK.attention, feedforward=Mlp()))}, "in their kind"),
    ],
)
def test_sides_that_are_not_alike_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SHARED, **changes)
