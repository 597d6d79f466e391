"""T5 v1.0, v1.1 and our own small encoder-decoder (spec: models §5)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.presets.mini import mini_block
from trivium.models.presets.preset import Preset, rows
from trivium.parts.init import T5, FanIn
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import FeedForward, GluOptions, MlpOptions
from trivium.parts.options.norms import RMSNormOptions
from trivium.parts.options.output import SoftmaxOptions
from trivium.parts.options.positions import BucketOptions
from trivium.parts.options.residual import PreOptions


class Shape(NamedTuple):
    layers: int  # of each side
    width: int
    hidden: int
    heads: int
    head: int


V1_0 = {
    "t5-small": Shape(6, 512, 2048, 8, 64),
    "t5-base": Shape(12, 768, 3072, 12, 64),
    "t5-large": Shape(24, 1024, 4096, 16, 64),
    "t5-3b": Shape(24, 1024, 16_384, 32, 128),
    "t5-11b": Shape(24, 1024, 65_536, 128, 128),
}
V1_1 = {
    "t5v1.1-small": Shape(8, 512, 1024, 6, 64),
    "t5v1.1-base": Shape(12, 768, 2048, 12, 64),
    "t5v1.1-large": Shape(24, 1024, 2816, 16, 64),
    "t5v1.1-xl": Shape(24, 2048, 5120, 32, 64),
    "t5v1.1-xxl": Shape(24, 4096, 10_240, 64, 64),
}


def _t5(
    shape: Shape, feedforward: FeedForward, embedding: TokenEmbeddingOptions, output: SoftmaxOptions, dropout: float
) -> ModelConfig:
    """Pre-norm without biases or score scale; a table of relative biases per side, none across."""
    attention = MultiHeadOptions(heads=shape.heads, head=shape.head, scale="none", dropout=dropout)
    block = Block(
        attention=attention,
        feedforward=feedforward,
        norm=RMSNormOptions(eps=1e-6),
        residual=PreOptions(),
        position=BucketOptions(),
        dropout=dropout,
    )
    return ModelConfig(
        width=shape.width,
        context=512,  # as pretrained; the buckets themselves have no end
        vocab=32_128,
        embedding=embedding,
        encoder=Stack(layers=shape.layers, block=block),
        decoder=Stack(layers=shape.layers, block=replace(block, cross=attention)),
        output=output,
        init=T5(),
    )


def v1_0(shape: Shape) -> ModelConfig:
    """ReLU, one matrix for all three vocabularies, states divided by sqrt(width) before it."""
    feedforward = MlpOptions(hidden=shape.hidden, activation="relu", bias=False, dropout=0.1)
    return _t5(shape, feedforward, TokenEmbeddingOptions(tie="all", dropout=0.1), SoftmaxOptions(scale="root"), 0.1)


def v1_1(shape: Shape) -> ModelConfig:
    """Gated tanh-GELU, an output matrix of its own, no scale, no dropout in pretraining."""
    feedforward = GluOptions(hidden=shape.hidden, activation="gelu-tanh")
    return _t5(shape, feedforward, TokenEmbeddingOptions(tie="inputs"), SoftmaxOptions(), 0.0)


def t5_mini() -> ModelConfig:
    block = mini_block(BucketOptions())
    return ModelConfig(
        width=256,
        context=128,
        encoder=Stack(layers=3, block=block),
        decoder=Stack(layers=3, block=replace(block, cross=block.attention)),
        init=FanIn(),
    )


MINI = {"t5-mini": Preset("Our small encoder-decoder: T5's relative biases, squared ReLU, normed queries.", t5_mini)}

PUBLISHED = {
    **rows("T5 v1.0: pre-norm encoder-decoder, relative biases, ReLU, tied.", v1_0, V1_0),
    **rows("T5 v1.1: gated tanh-GELU, an output matrix of its own.", v1_1, V1_1),
}
