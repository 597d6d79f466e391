"""GPT (2018), GPT-2, GPT-3, OPT and our own small decoder (spec: models §2, §3)."""

from __future__ import annotations

from typing import NamedTuple

from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.presets.mini import mini_block
from trivium.models.presets.preset import Preset, rows
from trivium.parts.init import FanIn, Gpt, Gpt2
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import MlpOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.positions import LearnedOptions, RotaryOptions
from trivium.parts.options.residual import PostOptions, PreOptions


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int


GPT = {"gpt": Shape(12, 768, 12)}
GPT2 = {
    "gpt2": Shape(12, 768, 12),
    "gpt2-medium": Shape(24, 1024, 16),
    "gpt2-large": Shape(36, 1280, 20),
    "gpt2-xl": Shape(48, 1600, 25),
}
GPT3 = {
    "gpt3-small": Shape(12, 768, 12),
    "gpt3-medium": Shape(24, 1024, 16),
    "gpt3-large": Shape(24, 1536, 16),
    "gpt3-xl": Shape(24, 2048, 16),  # the paper prints 24 heads of 128, which are not 2048 wide
    "gpt3-2.7b": Shape(32, 2560, 32),
    "gpt3-6.7b": Shape(32, 4096, 32),
    "gpt3-13b": Shape(40, 5120, 40),  # the paper prints a width of 5140, which 40 heads of 128 do not have
    "gpt3-175b": Shape(96, 12_288, 96),
}
OPT = {
    "opt-125m": Shape(12, 768, 12),
    "opt-760m": Shape(24, 1536, 16),
    "opt-1.3b": Shape(24, 2048, 32),
    "opt-2.7b": Shape(32, 2560, 32),
    "opt-6.7b": Shape(32, 4096, 32),
    "opt-13b": Shape(40, 5120, 40),
    "opt-30b": Shape(48, 7168, 56),
    "opt-66b": Shape(64, 9216, 72),
    "opt-175b": Shape(96, 12_288, 96),
}


def _block(shape: Shape, residual: PreOptions | PostOptions) -> Block:
    """Biases everywhere, tanh-GELU, learned positions, dropout 0.1 everywhere."""
    return Block(
        attention=MultiHeadOptions(heads=shape.heads, bias="all", dropout=0.1),
        feedforward=MlpOptions(activation="gelu-tanh"),
        norm=LayerNormOptions(eps=1e-5),
        residual=residual,
        position=LearnedOptions(),
        dropout=0.1,
    )


def gpt(shape: Shape) -> ModelConfig:
    return ModelConfig(
        width=shape.width,
        context=512,
        vocab=40_478,
        embedding=TokenEmbeddingOptions(dropout=0.1),
        decoder=Stack(layers=shape.layers, block=_block(shape, PostOptions())),
        init=Gpt(),
    )


def _pre_norm(shape: Shape, context: int) -> ModelConfig:
    return ModelConfig(
        width=shape.width,
        context=context,
        vocab=50_257,
        embedding=TokenEmbeddingOptions(dropout=0.1),
        decoder=Stack(layers=shape.layers, block=_block(shape, PreOptions())),
        init=Gpt2(),
    )


def gpt2(shape: Shape) -> ModelConfig:
    return _pre_norm(shape, context=1024)


def gpt3(shape: Shape) -> ModelConfig:
    """The dense form: the bands of the alternating sparse layers are unpublished."""
    return _pre_norm(shape, context=2048)


def opt(shape: Shape) -> ModelConfig:
    block = Block(
        attention=MultiHeadOptions(heads=shape.heads, bias="all"),
        feedforward=MlpOptions(activation="relu"),
        norm=LayerNormOptions(eps=1e-5),
        residual=PreOptions(),
        position=LearnedOptions(offset=2),
        dropout=0.1,  # none on embeddings
    )
    return ModelConfig(
        width=shape.width,
        context=2048,
        vocab=50_272,
        decoder=Stack(layers=shape.layers, block=block),
        init=Gpt2(std=0.006),  # the OPT paper, after Megatron
    )


def gpt_mini() -> ModelConfig:
    return ModelConfig(width=256, context=256, decoder=Stack(layers=4, block=mini_block(RotaryOptions())), init=FanIn())


MINI = {"gpt-mini": Preset("Our small decoder: rotary positions, RMSNorm, squared ReLU, no biases.", gpt_mini)}

PUBLISHED = {
    **rows("GPT (2018): post-norm decoder, tanh-GELU, learned positions.", gpt, GPT),
    **rows("GPT-2: pre-norm decoder with a final norm.", gpt2, GPT2),
    **rows("GPT-3, with dense attention in every layer.", gpt3, GPT3),
    **rows("OPT: GPT-3's shapes with ReLU and learned positions from 2 on.", opt, OPT),
}
