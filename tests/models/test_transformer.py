"""The three families: symmetries that hold without positions, refusals, dropout, and filling a model with weights."""

# B batch, T tokens, S source tokens

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.battery import CASES, CONTEXT, VOCAB, Case, lively, logits, some_ids
from trivium.errors import ConfigError, RequestError
from trivium.models.config import Block, ModelConfig, NoStack, Stack
from trivium.models.transformer import Transformer, build, load_weights, weights
from trivium.parts.attention import MultiHead
from trivium.parts.embeddings import Tokens
from trivium.parts.feedforward import Mlp
from trivium.parts.positions import Learned, NoPositions, Rotary

ORDER = torch.tensor([3, 0, 6, 1, 5, 2, 4])
BAG = Stack(layers=2, block=Block(position=NoPositions()))
CROSSED = Stack(layers=2, block=Block(cross=MultiHead(), position=Learned()))


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
    for position in (Learned(), Rotary()):
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
    ordered = Stack(layers=2, block=Block(position=Learned()))
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
    for position in (Learned(), Rotary()):
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
    decoder, tokens_BT = lively(named("grouped").config), some_ids(4, 9)
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
    other, turned = Block(feedforward=Mlp(hidden=8)), Block(position=Rotary())
    variants = {"other": other, "turned": turned}
    stack = Stack(layers=4, block=Block(), pattern=("", "other", "turned"), variants=variants)
    decoder = build(ModelConfig(width=16, context=8, vocab=9, decoder=stack)).decoder
    assert decoder is not None
    assert len(decoder.positions) == 2
    assert decoder.position_of == [0, 0, 1, 0]


@pytest.mark.parametrize("place", ["embedding", "block", "attention", "feedforward"])
def test_dropout_in_each_place_acts_in_training_only(place: str) -> None:
    block = Block(
        attention=MultiHead(dropout=0.5 if place == "attention" else 0.0),
        feedforward=Mlp(dropout=0.5 if place == "feedforward" else 0.0),
        dropout=0.5 if place == "block" else 0.0,
    )
    config = ModelConfig(width=16, context=8, vocab=VOCAB, decoder=Stack(layers=1, block=block))
    if place == "embedding":
        config = replace(config, embedding=Tokens(dropout=0.5))
    drawn, tokens_BT = lively(config), some_ids(1, 5)

    def twice() -> bool:
        torch.manual_seed(0)
        return torch.equal(logits(drawn, tokens_BT), logits(drawn, tokens_BT))

    assert twice()
    drawn.train()
    assert not twice()


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_weights_fill_another_model_bit_for_bit(family: str) -> None:
    config = named("plain" if family == "decoder" else "encoder-decoder").config
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
    config = named("plain").config
    target = build(config, seed=2)
    before = {name: tensor.clone() for name, tensor in weights(target).items()}
    with pytest.raises(ConfigError, match=said):
        load_weights(target, wrong(weights(build(config, seed=1)), what))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(target).items())
