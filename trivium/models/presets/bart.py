"""BART and Marian: post-norm encoder-decoders with biases (spec: models §8)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.presets.preset import Preset, rows
from trivium.parts.init import Gpt
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import Activation, MlpOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.positions import LearnedOptions, Position, SinusoidalOptions
from trivium.parts.options.residual import PostOptions


class Shape(NamedTuple):
    layers: int  # of each side
    width: int
    heads: int


BART = {"bart-base": Shape(6, 768, 12), "bart-large": Shape(12, 1024, 16)}


def _both(
    shape: Shape,
    *,
    context: int,
    vocab: int,
    activation: Activation,
    position: Position,
    embedding: TokenEmbeddingOptions,
) -> ModelConfig:
    attention = MultiHeadOptions(heads=shape.heads, bias="all", dropout=0.1)
    block = Block(
        attention=attention,
        feedforward=MlpOptions(activation=activation),
        norm=LayerNormOptions(eps=1e-5),
        residual=PostOptions(),
        position=position,
        dropout=0.1,
    )
    return ModelConfig(
        width=shape.width,
        context=context,
        vocab=vocab,
        embedding=embedding,
        encoder=Stack(layers=shape.layers, block=block),
        decoder=Stack(layers=shape.layers, block=replace(block, cross=attention)),
        init=Gpt(),
    )


def bart(shape: Shape) -> ModelConfig:
    embedding = TokenEmbeddingOptions(norm=LayerNormOptions(eps=1e-5), dropout=0.1)
    return _both(
        shape, context=1024, vocab=50_265, activation="gelu", position=LearnedOptions(offset=2), embedding=embedding
    )


def marian() -> ModelConfig:
    """Positions are computed, so that the two tables of published files are no parameters here."""
    embedding = TokenEmbeddingOptions(scale="root", dropout=0.1)
    position = SinusoidalOptions(layout="halves")
    return _both(Shape(6, 512, 8), context=512, vocab=58_101, activation="silu", position=position, embedding=embedding)


PUBLISHED = {
    **rows("BART: post-norm encoder-decoder, erf-GELU, normed embeddings.", bart, BART),
    "marian": Preset("Marian (opus-mt): post-norm encoder-decoder for translation, Swish, sinusoids.", marian),
}
