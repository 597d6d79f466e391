"""The three families: symmetries that hold without positions, refusals, dropout, and filling a model with weights."""

# B batch, T tokens, S source tokens

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.battery import lively, logits, some_ids
from tests.cases import CASES, CONTEXT, VOCAB, Case
from trivium.errors import ConfigError, RequestError
from trivium.fast.choose import fast
from trivium.models.block import StandardBlock
from trivium.models.config import AnyStack, ModelConfig, NoStack, Stack
from trivium.models.options import Block, Parallel
from trivium.models.transformer import Transformer, build, load_weights, weights
from trivium.parts.losses import split
from trivium.parts.masks import Mask, ScoreMask
from trivium.parts.mixers import Context
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.options.positions import LearnedOptions, NoPositionOptions, RotaryOptions
from trivium.parts.options.residual import PostOptions, PreOptions, Residual, SandwichOptions
from trivium.parts.positions import Positions

ORDER = torch.tensor([3, 0, 6, 1, 5, 2, 4])
BAG = Stack(layers=2, block=Block(position=NoPositionOptions()))
CROSSED = Stack(layers=2, block=Block(cross=MultiHeadOptions(), position=LearnedOptions()))


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def model(*, encoder: Stack | None = None, decoder: Stack | None = None) -> Transformer:
    sides = {"encoder": encoder or NoStack(), "decoder": decoder or NoStack()}
    return lively(ModelConfig(width=32, context=CONTEXT, vocab=VOCAB, **sides))  # type: ignore[arg-type]


def test_an_encoder_without_positions_is_permutation_equivariant() -> None:
    tokens_BT = some_ids(2, 7)
    encoder = model(encoder=BAG)
    torch.testing.assert_close(logits(encoder, tokens_BT[:, ORDER]), logits(encoder, tokens_BT)[:, ORDER])


def test_an_encoder_with_positions_is_not() -> None:
    tokens_BT = some_ids(2, 7)
    for position in (LearnedOptions(), RotaryOptions()):
        encoder = model(encoder=Stack(layers=2, block=Block(position=position)))
        assert (logits(encoder, tokens_BT[:, ORDER]) - logits(encoder, tokens_BT)[:, ORDER]).abs().max() > 1e-2


def test_a_causal_decoder_without_positions_can_still_count() -> None:
    tokens_BT = some_ids(2, 7)
    decoder = model(decoder=BAG)
    assert (logits(decoder, tokens_BT[:, ORDER]) - logits(decoder, tokens_BT)[:, ORDER]).abs().max() > 1e-2


def test_an_encoder_sees_both_sides() -> None:
    tokens_BT, changed_BT = some_ids(1, 7), some_ids(1, 7)
    changed_BT[0, 6] = 0 if changed_BT[0, 6] else 1
    encoder = model(encoder=BAG)
    assert ((logits(encoder, tokens_BT) - logits(encoder, changed_BT)).abs().amax(-1) > 1e-4).all()


def test_a_decoder_ignores_the_order_of_a_source_that_its_encoder_gave_no_positions() -> None:
    both, tokens_BT, source_BS = model(encoder=BAG, decoder=CROSSED), some_ids(2, 5), some_ids(2, 7, seed=1)
    real_BS = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])
    expected = logits(both, tokens_BT, source=source_BS, source_padding=real_BS)
    moved = logits(both, tokens_BT, source=source_BS[:, ORDER], source_padding=real_BS[:, ORDER])
    torch.testing.assert_close(moved, expected)
    astray = logits(both, tokens_BT, source=source_BS[:, ORDER], source_padding=real_BS)
    assert (astray - expected).abs().max() > 1e-3


def test_a_decoder_notices_the_order_of_a_source_with_positions() -> None:
    ordered = Stack(layers=2, block=Block(position=LearnedOptions()))
    both, tokens_BT, source_BS = model(encoder=ordered, decoder=CROSSED), some_ids(2, 5), some_ids(2, 7, seed=1)
    first, moved = (logits(both, tokens_BT, source=source) for source in (source_BS, source_BS[:, ORDER]))
    assert (first - moved).abs().max() > 1e-3


def test_an_encoder_decoder_without_a_source_is_refused() -> None:
    with pytest.raises(RequestError, match="an encoder-decoder needs a source"):
        model(encoder=BAG, decoder=CROSSED)(some_ids(1, 3))


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_a_source_that_nothing_reads_is_refused(family: str) -> None:
    alone = model(encoder=BAG) if family == "encoder" else model(decoder=BAG)
    with pytest.raises(RequestError, match=f"the {family} family takes no source"):
        alone(some_ids(1, 3), source=some_ids(1, 3))


def test_more_tokens_than_the_context_are_refused_with_and_without_a_cache() -> None:
    for position in (LearnedOptions(), RotaryOptions()):
        decoder = model(decoder=Stack(layers=1, block=Block(position=position)))
        decoder(some_ids(1, CONTEXT))
        with pytest.raises(RequestError, match="17 tokens are more than the model's context of 16"):
            decoder(some_ids(1, CONTEXT + 1))
        cache = decoder.cache(1, CONTEXT)
        decoder(some_ids(1, CONTEXT), cache=cache)
        with pytest.raises(RequestError, match="17 tokens are more"):
            decoder(some_ids(1, 1), cache=cache)


def test_an_encoder_has_no_cache() -> None:
    with pytest.raises(RequestError, match="an encoder sees its whole input at once"):
        model(encoder=BAG).cache(1, 4)


def test_rows_that_leave_a_cache_do_not_disturb_the_others() -> None:
    decoder, tokens_BT = lively(named("decoder: grouped").config), some_ids(4, 9)
    cache, rows = decoder.cache(4, 9), torch.tensor([3, 1])
    with torch.no_grad():
        logits(decoder, tokens_BT[:, :6], cache=cache)
        cache.keep(rows)
        assert cache.rows == 2
        rest = logits(decoder, tokens_BT[rows, 6:], cache=cache)
        torch.testing.assert_close(rest, logits(decoder, tokens_BT)[rows, 6:])


def test_left_padding_and_a_cache_go_together() -> None:
    decoder, tokens_BT, pads = lively(named("llama-mini").config), some_ids(2, 8), 3
    padded_BT = torch.cat((torch.full((2, pads), 7), tokens_BT), 1)
    at = torch.arange(11).expand(2, -1)
    real_BS, positions = at >= pads, (at - pads).clamp(min=0)
    cache = decoder.cache(2, 11)
    with torch.no_grad():
        pieces = [
            logits(decoder, padded_BT[:, a:b], cache=cache, padding=real_BS[:, :b], positions=positions[:, a:b])
            for a, b in ((0, 7), (7, 8), (8, 11))
        ]
        torch.testing.assert_close(torch.cat(pieces, 1)[:, pads:], logits(decoder, tokens_BT))


def test_layers_with_equal_position_options_share_one_table() -> None:
    other, turned = Block(feedforward=MlpOptions(hidden=8)), Block(position=RotaryOptions())
    variants = {"other": other, "turned": turned}
    stack = Stack(layers=4, block=Block(), pattern=("", "other", "turned"), variants=variants)
    decoder = build(ModelConfig(width=16, context=8, vocab=9, decoder=stack)).decoder
    assert decoder is not None
    assert len(decoder.positions) == 2
    assert decoder.position_of == [0, 0, 1, 0]


@pytest.mark.parametrize("place", ["embedding", "block", "variational", "attention", "feedforward", "hidden", "states"])
def test_dropout_in_each_place_acts_in_training_only(place: str) -> None:
    block = Block(
        attention=MultiHeadOptions(dropout=0.5 if place == "attention" else 0.0),
        feedforward=MlpOptions(
            dropout=0.5 if place == "feedforward" else 0.0, variational_dropout=0.5 if place == "hidden" else 0.0
        ),
        dropout=0.5 if place == "block" else 0.0,
        variational_dropout=0.5 if place == "variational" else 0.0,
    )
    stack = Stack(layers=1, block=block, variational_dropout=0.5 if place == "states" else 0.0)
    config = ModelConfig(width=16, context=8, vocab=VOCAB, decoder=stack)
    if place == "embedding":
        config = replace(config, embedding=TokenEmbeddingOptions(dropout=0.5))
    drawn, tokens_BT = lively(config), some_ids(1, 5)

    def twice() -> bool:
        torch.manual_seed(0)
        return torch.equal(logits(drawn, tokens_BT), logits(drawn, tokens_BT))

    assert twice()
    drawn.train()
    assert not twice()


def test_a_block_loses_the_same_features_in_all_places_of_a_row() -> None:
    block = Block(variational_dropout=0.5, position=NoPositionOptions())
    drawn = lively(ModelConfig(width=64, context=8, vocab=VOCAB, decoder=Stack(layers=1, block=block))).train()
    decoder = drawn.decoder
    assert decoder is not None
    around, seen = cast(StandardBlock, decoder.blocks[0]).around_feedforward, list[Tensor]()
    around.register_forward_hook(lambda _, given, out: seen.append(split(out)[0] - given[0]))  # what the network adds
    logits(drawn, some_ids(3, 8))
    lost_BTD = seen[0] == 0
    assert torch.equal(lost_BTD, lost_BTD[:, :1].expand_as(lost_BTD))
    assert 10 < int(lost_BTD[0, 0].sum()) < 54  # of 64, half on average
    assert not torch.equal(lost_BTD[0], lost_BTD[1])


def test_a_stack_loses_the_same_features_of_its_states_in_all_places_of_a_row() -> None:
    stack = Stack(layers=1, block=Block(feedforward=GluOptions(variational_dropout=0.25)), variational_dropout=0.5)
    drawn = lively(ModelConfig(width=64, context=8, vocab=VOCAB, decoder=stack)).train()
    lost_BTD = drawn(some_ids(3, 8)).hidden == 0
    assert torch.equal(lost_BTD, lost_BTD[:, :1].expand_as(lost_BTD))
    assert 10 < int(lost_BTD[0, 0].sum()) < 54  # of 64, half on average
    assert not torch.equal(lost_BTD[0], lost_BTD[1])


def test_an_encoder_that_loses_features_loses_them_for_the_decoder_too() -> None:
    encoder, decoder = Stack(layers=1, variational_dropout=0.5), Stack(layers=1, block=Block(cross=MultiHeadOptions()))
    drawn = lively(ModelConfig(width=64, context=8, vocab=VOCAB, encoder=encoder, decoder=decoder))
    seen, sides = list[Tensor](), {True: drawn.train, False: drawn.eval}
    assert drawn.encoder is not None
    drawn.encoder.register_forward_hook(lambda module, given, states: seen.append(states))
    for training, switch in sides.items():
        switch()
        drawn(some_ids(3, 8), source=some_ids(3, 5))
        lost_BSD = seen.pop() == 0
        assert torch.equal(lost_BSD, lost_BSD[:, :1].expand_as(lost_BSD))
        assert (10 < int(lost_BSD[0, 0].sum()) < 54) == training


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_weights_fill_another_model_bit_for_bit(family: str) -> None:
    config = named(f"{family}: plain").config
    source, target = build(config, seed=1), build(config, seed=2)
    load_weights(target, weights(source))
    assert all(torch.equal(target.state_dict()[name], tensor) for name, tensor in source.state_dict().items())


def wrong(tensors: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    name = "decoder.final.weight"
    if what == "missing":
        return {key: tensor for key, tensor in tensors.items() if key != name}
    if what == "extra":
        return {**tensors, "decoder.finial.weight": tensors[name]}
    return {**tensors, name: tensors[name][:-1]}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing", "decoder.final.weight is missing"),
        ("extra", "decoder.finial.weight is not part of this model"),
        ("misshapen", r"decoder.final.weight has shape \[31\], not \[32\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_any_is_copied(what: str, said: str) -> None:
    config = named("decoder: plain").config
    target = build(config, seed=2)
    before = {name: tensor.clone() for name, tensor in weights(target).items()}
    with pytest.raises(ConfigError, match=said):
        load_weights(target, wrong(weights(build(config, seed=1)), what))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(target).items())


def test_a_cache_remembers_the_source_and_reads_it_once() -> None:
    model = lively(named("encoder-decoder: biases").config)
    tokens_BT, source_BS = some_ids(3, 6), some_ids(3, 7, seed=4)
    padding_BS = torch.arange(7).expand(3, -1) < torch.tensor([[7], [4], [5]])
    reads: list[int] = []
    assert model.encoder is not None
    model.encoder.register_forward_hook(lambda *_: reads.append(1))
    with torch.no_grad():
        whole = model.head.logits(model(tokens_BT, source=source_BS, source_padding=padding_BS).hidden)
        reads.clear()
        cache = model.cache(3, 6)
        first = model(tokens_BT[:, :2], source=source_BS, source_padding=padding_BS, cache=cache)
        rest = [model(tokens_BT[:, at, None], cache=cache) for at in range(2, 6)]
        hidden = torch.cat([first.hidden, *(states.hidden for states in rest)], 1)
        torch.testing.assert_close(model.head.logits(hidden), whole)
        assert len(reads) == 1


def test_rows_that_leave_a_cache_take_their_source_along() -> None:
    model = lively(named("encoder-decoder: positions t5").config)
    tokens_BT, source_BS = some_ids(4, 6), some_ids(4, 7, seed=4)
    padding_BS = torch.arange(7).expand(4, -1) < torch.tensor([[7], [4], [5], [6]])
    cache, rows = model.cache(4, 6), torch.tensor([3, 1, 1])
    with torch.no_grad():
        whole = model(tokens_BT, source=source_BS, source_padding=padding_BS).hidden
        model(tokens_BT[:, :3], source=source_BS, source_padding=padding_BS, cache=cache)
        cache.keep(rows)
        torch.testing.assert_close(model(tokens_BT[rows, 3:], cache=cache).hidden, whole[rows, 3:])


def test_the_decoder_is_blind_to_the_order_of_a_source_without_positions() -> None:
    """The encoder is then a bag, and cross-attention has no positions of its own."""
    model, order = lively(named("encoder-decoder: positions none").config), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    tokens_BT, source_BS = some_ids(2, 5), some_ids(2, 7, seed=4)
    padding_BS = torch.arange(7).expand(2, -1) < torch.tensor([[7], [5]])
    with torch.no_grad():
        expected = model(tokens_BT, source=source_BS, source_padding=padding_BS).hidden
        mixed = model(tokens_BT, source=source_BS[:, order], source_padding=padding_BS[:, order]).hidden
        torch.testing.assert_close(mixed, expected)
        turned = lively(named("encoder-decoder: positions rotary halves").config)
        before = turned(tokens_BT, source=source_BS).hidden
        assert (turned(tokens_BT, source=source_BS[:, order]).hidden - before).abs().max() > 1e-3


def test_a_prefix_is_seen_by_all_and_only_the_prefix() -> None:
    model, tokens_1T = lively(named("decoder: positions rotary halves").config), some_ids(1, 6)
    changed_1T = tokens_1T.clone()
    changed_1T[0, 2] = (changed_1T[0, 2] + 1) % VOCAB
    with torch.no_grad():
        before, after = (model(ids, prefix=torch.tensor([3])).hidden for ids in (tokens_1T, changed_1T))
        assert bool(((before - after).abs().amax(-1) > 1e-6).all())  # token 2 is in the prefix of 3: all see it
        before, after = (model(ids, prefix=torch.tensor([2])).hidden for ids in (tokens_1T, changed_1T))
        assert torch.equal(before[:, :2], after[:, :2])
        torch.testing.assert_close(model(tokens_1T, prefix=torch.tensor([0])).hidden, model(tokens_1T).hidden)


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_computing_again_gives_the_same_gradients_bit_for_bit(family: str) -> None:
    config = named(f"{family}: plain").config
    results = []
    for recompute in (False, True):
        model = build(_with_dropout(config), seed=3).train()
        model.recompute = recompute
        assert model.recompute == recompute
        torch.manual_seed(7)
        source = {"source": some_ids(2, 7, seed=4)} if family == "encoder-decoder" else {}
        hidden = model(some_ids(2, 6), **source).hidden
        hidden.square().sum().backward()
        results.append([hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) > 10
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("residual", [PreOptions(), PostOptions(), SandwichOptions()])
def test_a_narrow_stream_is_narrow_in_all_blocks_and_in_training_only(residual: Residual) -> None:
    stack = Stack(layers=3, block=Block(residual=residual))
    drawn = build(ModelConfig(width=16, context=8, vocab=VOCAB, decoder=stack), seed=3).train()
    fast(drawn)
    drawn.residual_dtype = torch.bfloat16
    decoder, seen = drawn.decoder, list[torch.dtype]()
    assert decoder is not None
    for block in decoder.blocks:
        block.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        drawn(some_ids(2, 6))
        assert seen == [torch.bfloat16] * 3
        drawn.eval()(some_ids(2, 6))
    drawn.train()(some_ids(2, 6))  # without autocast the weights are float32, and nothing may be narrower
    assert seen[3:] == [torch.float32] * 6


def _with_dropout(config: ModelConfig) -> ModelConfig:
    def dropping(stack: AnyStack) -> AnyStack:
        if not isinstance(stack, Stack):
            return stack
        return replace(stack, block=replace(cast(Block, stack.block), dropout=0.3))

    return replace(config, encoder=dropping(config.encoder), decoder=dropping(config.decoder))


def test_a_parallel_block_adds_what_both_halves_read_from_one_norm() -> None:
    config = replace(
        named("decoder: parallel").config, decoder=Stack(layers=1, block=Parallel(position=NoPositionOptions()))
    )
    model = lively(config)
    assert model.decoder is not None
    x, block = model.embedding(some_ids(1, 4)), cast(Any, model.decoder.blocks[0])
    mask = ScoreMask(Mask(causal=True), 4, 4, x.device)
    ctx = Context(mask=mask, position=Positions(), at=torch.arange(4)[None])
    with torch.no_grad():
        normed = block.norm(x)
        expected = x + block.attention(normed, ctx) + block.feedforward(normed)
        torch.testing.assert_close(model(some_ids(1, 4)).hidden, model.decoder.final(expected))
