"""The Transformer of 2017, and its block as a decoder beside its modern descendant (spec: models §1, §6)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.presets.preset import Preset, rows
from trivium.parts.init import Xavier
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.options.norms import LayerNormOptions, RMSNormOptions
from trivium.parts.options.positions import RotaryOptions, SinusoidalOptions
from trivium.parts.options.residual import PostOptions, PreOptions


class Shape(NamedTuple):
    layers: int  # of each side
    width: int
    heads: int
    dropout: float


VASWANI = {
    "transformer-base": Shape(6, 512, 8, dropout=0.1),
    "transformer-big": Shape(6, 1024, 16, dropout=0.3),  # 0.1 for English to French
}


def _block(heads: int, dropout: float) -> Block:
    """Post-norm, ReLU, sinusoids, no biases in attention, dropout of sub-layer outputs only."""
    return Block(
        attention=MultiHeadOptions(heads=heads),
        feedforward=MlpOptions(activation="relu"),
        norm=LayerNormOptions(eps=1e-6),  # the paper is silent; tensor2tensor's
        residual=PostOptions(),
        position=SinusoidalOptions(),
        dropout=dropout,
    )


def vaswani(shape: Shape) -> ModelConfig:
    block = _block(shape.heads, shape.dropout)
    return ModelConfig(
        width=shape.width,
        context=512,  # longer than any sentence of WMT; sinusoids have no parameters, so raise it freely
        vocab=37_000,
        embedding=TokenEmbeddingOptions(tie="all", scale="root", dropout=shape.dropout),
        encoder=Stack(layers=shape.layers, block=block),
        decoder=Stack(layers=shape.layers, block=replace(block, cross=block.attention)),
        init=Xavier(),
    )


def _decoder(block: Block) -> ModelConfig:
    return ModelConfig(
        width=768,
        context=512,
        embedding=TokenEmbeddingOptions(scale="root", dropout=0.1),
        decoder=Stack(layers=12, block=block),
        init=Xavier(),
    )


def transformer() -> ModelConfig:
    return _decoder(_block(12, 0.1))


def transformer_pp() -> ModelConfig:
    """Differs from `transformer` in these four places and nowhere else; biases stay, for a fair comparison."""
    gated = GluOptions(hidden=2048, activation="silu", bias=True)  # 2/3 of 4 x width: as many weights as without a gate
    block = _block(12, 0.1)
    return _decoder(
        replace(
            block, feedforward=gated, norm=RMSNormOptions(eps=1e-6), residual=PreOptions(), position=RotaryOptions()
        )
    )


PUBLISHED = {
    **rows("The Transformer (2017): post-norm encoder-decoder, ReLU, sinusoids.", vaswani, VASWANI),
    "transformer": Preset("The block of 2017 as a decoder, to compare with.", transformer),
    "transformer-pp": Preset("The same with pre-norm, RMSNorm, SwiGLU and rotary positions.", transformer_pp),
}
