"""The configuration of a model: refusals by dotted key, counts that are those of the built model, exact round trips."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.config import load, overrides, write
from trivium.errors import ConfigError
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.transformer import build, with_vocab
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.options.norms import LayerNormOptions, RMSNormOptions
from trivium.parts.options.output import SoftmaxOptions
from trivium.parts.options.positions import LearnedOptions, NoPositionOptions, RotaryOptions
from trivium.parts.options.residual import PostOptions, PreOptions

BOTH = ModelConfig(
    width=16,
    context=8,
    vocab=9,
    encoder=Stack(layers=1),
    decoder=Stack(layers=2, block=Block(cross=MultiHeadOptions())),
)

blocks = st.builds(
    Block,
    attention=st.builds(
        MultiHeadOptions,
        heads=st.sampled_from([2, 4]),
        groups=st.sampled_from([0, 1, 2]),
        head=st.sampled_from([0, 6]),
        bias=st.sampled_from(["all", "none"]),
        norm=st.sampled_from(["none", "rms"]),
    ),
    feedforward=st.sampled_from(
        [MlpOptions(), MlpOptions(hidden=5, bias=False), GluOptions(hidden=7), GluOptions(bias=True, multiple=8)]
    ),
    norm=st.sampled_from([LayerNormOptions(), LayerNormOptions(bias=False), RMSNormOptions(eps=1e-3)]),
    residual=st.sampled_from([PreOptions(), PostOptions()]),
    position=st.sampled_from(
        [NoPositionOptions(), LearnedOptions(), RotaryOptions(), RotaryOptions(theta=5e5, layout="interleaved")]
    ),
    dropout=st.sampled_from([0.0, 0.1]),
)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any model of any family, with one or two kinds of block on each side."""
    family = draw(st.sampled_from(["encoder", "decoder", "encoder-decoder"]))

    def stack(crossed: bool) -> Stack:
        usual, other = draw(blocks), draw(blocks)
        if crossed:
            usual = replace(usual, cross=MultiHeadOptions(heads=2))
        pattern = draw(st.sampled_from([(), ("", "other"), *([] if crossed else [("other",)])]))
        return Stack(layers=draw(st.integers(1, 3)), block=usual, pattern=pattern, variants={"other": other})

    return ModelConfig(
        width=16,
        context=8,
        vocab=9,
        embedding=draw(st.sampled_from([TokenEmbeddingOptions(), TokenEmbeddingOptions(tie="none", dropout=0.1)])),
        encoder=NoStack() if family == "decoder" else stack(crossed=False),
        decoder=NoStack() if family == "encoder" else stack(crossed=family == "encoder-decoder"),
        output=draw(st.sampled_from([SoftmaxOptions(), SoftmaxOptions(cap=30.0)])),
    )


@settings(max_examples=40, deadline=None)
@given(config=configs())
def test_the_count_is_that_of_the_distinct_tensors(config: ModelConfig) -> None:
    built = sum(parameter.numel() for parameter in build(config, device="meta").parameters())
    assert config.parameters() == built == sum(cost.parameters for cost in config.costs().values())


@settings(max_examples=40, deadline=None)
@given(config=configs())
def test_a_configuration_written_as_toml_reads_back_equal(config: ModelConfig) -> None:
    assert load(ModelConfig, tomllib.loads(write(config))) == config


def test_the_family_follows_from_the_sides() -> None:
    assert ModelConfig().family == "decoder"
    assert ModelConfig(encoder=Stack(), decoder=NoStack()).family == "encoder"
    assert BOTH.family == "encoder-decoder"
    assert BOTH.layers == 3
    with pytest.raises(ConfigError, match="a model needs an encoder, a decoder or both"):
        ModelConfig(decoder=NoStack())


def test_cross_attention_without_a_source_is_refused() -> None:
    crossed = Stack(layers=1, block=Block(cross=MultiHeadOptions()))
    with pytest.raises(ConfigError, match=r"decoder\.block\.cross: only the decoder of an encoder-decoder"):
        ModelConfig(decoder=crossed)
    with pytest.raises(ConfigError, match=r"decoder\.block\.cross: without it the decoder never sees the encoder"):
        ModelConfig(encoder=Stack(layers=1), decoder=Stack(layers=1))
    with pytest.raises(ConfigError, match=r"encoder\.block\.cross"):
        ModelConfig(encoder=crossed, decoder=crossed)


def test_cross_attention_is_counted_apart() -> None:
    split = BOTH.costs()
    assert split["cross"].parameters == 2 * 4 * 16 * 16
    assert split["attention"].parameters == 3 * 4 * 16 * 16
    assert split["norm"].parameters == (2 + 2 * 3 + 2) * 32  # one per sub-layer, one after each stack


def test_every_part_that_cannot_stand_where_it_is_says_so_by_its_key() -> None:
    odd = Block(attention=MultiHeadOptions(heads=5))
    decoder = Stack(block=Block(cross=MultiHeadOptions()), variants={"odd": odd}, pattern=("", "odd"))
    with pytest.raises(ConfigError) as caught:
        ModelConfig(width=16, encoder=Stack(block=odd), decoder=decoder)
    assert caught.value.problems == (
        "encoder.block.attention.heads: width 16 is not divisible by 5; try 4",
        "decoder.variants.odd.attention.heads: width 16 is not divisible by 5; try 4",
    )
    turned = Block(attention=MultiHeadOptions(heads=2, head=3), position=RotaryOptions())
    with pytest.raises(ConfigError, match=r"decoder\.block\.position: .*a head of size 3 cannot be odd"):
        ModelConfig(width=16, decoder=Stack(block=turned))


def test_impossible_sizes_are_refused() -> None:
    for options, said in (
        ({"width": 0}, "width: 0 is less than 1"),
        ({"context": 0}, "context: 0 is less than 1"),
        ({"vocab": -1}, "vocab: -1 is less than 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            ModelConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="layers: 0 is less than 1"):
        Stack(layers=0)
    with pytest.raises(ConfigError, match="dropout"):
        Block(dropout=1.0)


def test_a_pattern_names_variants_over_the_depth() -> None:
    usual, other = Block(), Block(norm=RMSNormOptions())
    stack = Stack(layers=5, block=usual, pattern=("", "other"), variants={"other": other})
    assert stack.blocks() == [usual, other, usual, other, usual]
    with pytest.raises(ConfigError, match="pattern: 'thing' is not among the variants"):
        Stack(pattern=("thing",))


def test_a_vocabulary_left_open_is_filled_in_from_the_tokenizer() -> None:
    assert with_vocab(ModelConfig(), 257).vocab == 257
    assert with_vocab(ModelConfig(vocab=300), 257).vocab == 300
    with pytest.raises(ConfigError, match="256 is smaller than the tokenizer's 257"):
        with_vocab(ModelConfig(vocab=256), 257)
    with pytest.raises(ConfigError, match="the size of the vocabulary is not known yet"):
        build(ModelConfig())


@pytest.mark.parametrize(
    "key",
    [
        "width",
        "context",
        "vocab",
        "decoder.layers",
        "decoder.block.attention.heads",
        "decoder.block.attention.head",
        "decoder.block.attention.window",
        "decoder.block.feedforward.hidden",
        "embedding.segments",
    ],
)
def test_a_number_without_measure_is_refused_at_once(key: str) -> None:
    """A stranger's file may hold any number; none may keep us busy."""
    with pytest.raises(ConfigError, match=f"{key}: 1{'0' * 30} is more than"):
        load(ModelConfig, overrides({key: 10**30}))


def test_far_positions_without_measure_are_refused_at_once() -> None:
    for kind in ("t5", "shaw"):
        with pytest.raises(ConfigError, match=r"distance: .* is more than"):
            load(ModelConfig, overrides({"decoder.block.position": kind, "decoder.block.position.distance": 10**30}))


def test_the_nearest_number_of_heads_is_named() -> None:
    with pytest.raises(ConfigError, match="width 9999991 is not divisible by 4; try 1"):
        load(ModelConfig, overrides({"width": 9_999_991, "decoder.block.attention.heads": 4}))
