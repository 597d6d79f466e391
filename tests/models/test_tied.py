"""Encoder and decoder of the same weights: what is shared, counted, saved and learned once."""

# B batch, T tokens, S source tokens

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from examples.repeated import Repeated
from tests.battery import lively, some_ids
from trivium.checkpoints.bundle import open_bundle, save
from trivium.config import load, write
from trivium.errors import ConfigError
from trivium.models.config import ModelConfig, NoStack, Stack, TiedStack
from trivium.models.options import Block, Parallel
from trivium.models.transformer import Transformer, build, load_weights, weights
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.options.positions import BucketOptions
from trivium.text.kinds import Bytes

BLOCK = Block(attention=MultiHeadOptions(bias="all"), position=BucketOptions(buckets=8, distance=12))
APART = ModelConfig(
    width=32,
    context=16,
    vocab=50,
    encoder=Stack(layers=2, block=BLOCK),
    decoder=Stack(layers=2, block=replace(BLOCK, cross=MultiHeadOptions(bias="all"))),
)
TIED = replace(APART, decoder=TiedStack(layers=2, block=replace(BLOCK, cross=MultiHeadOptions(bias="all"))))


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
    tied, apart = lively(TIED), build(APART, seed=1).double().eval()
    load_weights(apart, copies(weights(tied)))
    with torch.no_grad():
        assert torch.equal(states(tied), states(apart))


def test_its_gradients_are_the_sums_of_both_sides() -> None:
    tied, apart = lively(TIED), build(APART, seed=1).double().eval()
    load_weights(apart, copies(weights(tied)))
    for model in (tied, apart):
        states(model).square().sum().backward()  # type: ignore[no-untyped-call]
    single = dict(apart.named_parameters())
    summed = 0
    for name, parameter in tied.named_parameters():
        expected = cast(Tensor, single[name].grad)
        if name in ("encoder.blocks.0.attention.query.weight", "encoder.blocks.1.feedforward.down.weight"):
            summed += 1
        if name.startswith("encoder.blocks.") and name.split(".")[3] in ("attention", "feedforward"):
            expected = expected + cast(Tensor, single[name.replace("encoder", "decoder", 1)].grad)
        torch.testing.assert_close(parameter.grad, expected)
    assert summed == 2


def test_attention_and_feedforward_are_shared_and_nothing_else() -> None:
    tied = build(TIED)
    assert tied.encoder is not None
    assert tied.decoder is not None
    mine, yours = ({id(p) for p in side.parameters()} for side in (tied.encoder, tied.decoder))
    names = {name for name, p in tied.named_parameters() if id(p) in mine & yours}
    assert {name.split(".")[3] for name in names} == {"attention", "feedforward"}
    # norms, the tables of relative biases (one looks both ways, the other back) and cross-attention are their own
    own = {name for name, p in tied.named_parameters() if id(p) in yours - mine}
    assert {name.split(".")[1] for name in own} == {"blocks", "positions", "final"}
    assert {name.split(".")[3] for name in own if ".blocks." in name} == {
        "cross",
        "around_attention",
        "around_cross",
        "around_feedforward",
    }


def test_it_is_counted_once_and_costs_the_same_work() -> None:
    assert TIED.parameters() == sum(parameter.numel() for parameter in build(TIED).parameters())
    tied, apart = TIED.costs(), APART.costs()
    for part in ("attention", "feedforward"):
        assert 2 * tied[part].parameters == apart[part].parameters
        assert tied[part].flops == apart[part].flops
    for part in ("cross", "norm", "position", "embedding", "output"):
        assert tied[part] == apart[part]


def test_it_is_saved_once_and_comes_back(tmp_path: Path) -> None:
    model = lively(TIED, dtype=torch.float32)
    tensors = weights(model)
    assert not [name for name in tensors if name.startswith("decoder.blocks.0.attention.")]
    assert sum(tensor.numel() for tensor in tensors.values()) == TIED.parameters()
    save(tmp_path, TIED, tensors, Bytes().build([]), {})
    again = open_bundle(tmp_path).module
    assert again.config == TIED
    with torch.no_grad():
        assert torch.equal(states(again), states(model))
    other = cast(Any, build(TIED, seed=5))
    load_weights(other, tensors)
    assert other.encoder.blocks[1].attention is other.decoder.blocks[1].attention


def test_a_cache_keeps_both_uses_apart() -> None:
    model, tokens_BT, source_BS = lively(TIED), some_ids(2, 6), some_ids(2, 7, seed=1)
    cache = model.cache(2, 6)
    with torch.no_grad():
        whole = model(tokens_BT, source=source_BS).hidden
        first = model(tokens_BT[:, :2], source=source_BS, cache=cache).hidden
        rest = [model(tokens_BT[:, at, None], cache=cache).hidden for at in range(2, 6)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), whole)


def test_the_setting_survives_a_file() -> None:
    assert '[decoder]\nkind = "tied"' in write(TIED)
    assert load(ModelConfig, tomllib.loads(write(TIED))) == TIED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"encoder": NoStack(), "decoder": TiedStack()}, r"decoder\.kind: tied shares the blocks of an encoder, and"),
        ({"encoder": TiedStack(layers=2, block=BLOCK)}, r"encoder\.kind: only a decoder is tied to the other side"),
        ({"encoder": Repeated(layers=2, block=BLOCK)}, r"decoder\.kind: tied shares the blocks of an encoder, and"),
        ({"encoder": Stack(layers=3, block=BLOCK)}, r"decoder\.layers: it is tied to 3 layers of the encoder, not 2"),
        (
            {"encoder": Stack(layers=2, block=replace(BLOCK, feedforward=GluOptions()))},
            "those of layer 0 differ in feedforward; set both",
        ),
        (
            {"encoder": Stack(layers=2, block=replace(BLOCK, attention=MultiHeadOptions(heads=8)))},
            "differ in attention",
        ),
        (
            {"encoder": Stack(layers=2, block=Parallel(attention=BLOCK.attention, feedforward=MlpOptions()))},
            "differ in kind",
        ),
    ],
)
def test_sides_that_are_not_alike_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(TIED, **changes)
