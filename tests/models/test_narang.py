"""The parameter counts of the study of Narang et al. (spec: architecture §3-§6), which fix the wiring of many parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import build
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import Tie, TokenEmbeddingOptions
from trivium.parts.options.feedforward import Activation, GluOptions, MlpOptions
from trivium.parts.options.norms import LayerNormOptions, Norm, RMSNormOptions
from trivium.parts.options.positions import BucketOptions


def n0(
    *,
    layers: int = 12,
    heads: int = 12,
    hidden: int = 3072,
    norm: Norm | None = None,
    tie: Tie = "all",
    **places: Any,
) -> ModelConfig:
    """The study's baseline: pre-norm with true LayerNorm, T5 buckets per stack, biases in the feed-forward alone."""
    attention = MultiHeadOptions(heads=heads, head=64, scale="none")
    block = Block(
        attention=attention,
        feedforward=places.pop("feedforward", MlpOptions(hidden=hidden, activation="relu")),
        norm=norm or LayerNormOptions(eps=1e-6),
        position=BucketOptions(),
    )
    return ModelConfig(
        width=768,
        context=512,
        vocab=32_128,
        embedding=TokenEmbeddingOptions(tie=tie),
        encoder=Stack(layers=layers, block=block),
        decoder=Stack(layers=layers, block=replace(block, cross=attention)),
    )


@pytest.mark.parametrize(
    ("config", "count"),
    [
        pytest.param(n0(), 223_043_328, id="baseline"),
        pytest.param(n0(norm=RMSNormOptions()), 222_995_712, id="rms norm"),
        pytest.param(n0(feedforward=GluOptions(hidden=2048, activation="gelu", bias=True)), 223_067_904, id="geglu"),
        pytest.param(n0(tie="inputs"), 247_717_632, id="separate output"),
        pytest.param(n0(tie="output"), 247_717_632, id="separate encoder"),
        pytest.param(n0(tie="none"), 272_391_936, id="untied"),
        pytest.param(n0(layers=24, hidden=1536, heads=6), 223_153_536, id="24 layers"),
        pytest.param(n0(layers=18, hidden=2048, heads=8), 223_098_368, id="18 layers"),
        pytest.param(n0(layers=8, hidden=4608, heads=18), 223_006_848, id="8 layers"),
        pytest.param(n0(layers=6, hidden=6144, heads=24), 222_988_800, id="6 layers"),
    ],
)
def test_the_counts_of_the_study(config: ModelConfig, count: int) -> None:
    assert config.parameters() == count
    assert sum(parameter.numel() for parameter in build(config, device="meta").parameters()) == count


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "elu", "selu", "sigmoid", "softplus"])
def test_an_activation_adds_no_parameter(activation: Activation) -> None:
    assert n0(feedforward=MlpOptions(hidden=3072, activation=activation)).parameters() == 223_043_328
