"""GPT (2018), GPT-2 and our own small decoder (spec: models §2)."""

from __future__ import annotations

from trivium.models.config import Block, ModelConfig, Stack
from trivium.parts.attention import MultiHead
from trivium.parts.embeddings import Tokens
from trivium.parts.feedforward import Mlp
from trivium.parts.init import FanIn, Gpt, Gpt2
from trivium.parts.norms import LayerNorm, RMSNorm
from trivium.parts.output import Softmax
from trivium.parts.positions import Learned, Rotary
from trivium.parts.residual import Post, Pre


def gpt() -> ModelConfig:
    """GPT (2018): post-norm, tanh-GELU, learned positions, dropout 0.1 everywhere."""
    block = Block(
        attention=MultiHead(heads=12, bias="all", dropout=0.1),
        feedforward=Mlp(activation="gelu-tanh"),
        norm=LayerNorm(eps=1e-5),
        residual=Post(),
        position=Learned(),
        dropout=0.1,
    )
    return ModelConfig(
        width=768,
        context=512,
        vocab=40_478,
        embedding=Tokens(dropout=0.1),
        decoder=Stack(layers=12, block=block),
        init=Gpt(),
    )


def _gpt2(width: int, layers: int, heads: int) -> ModelConfig:
    block = Block(
        attention=MultiHead(heads=heads, bias="all", dropout=0.1),
        feedforward=Mlp(activation="gelu-tanh"),
        norm=LayerNorm(eps=1e-5),
        residual=Pre(),
        position=Learned(),
        dropout=0.1,
    )
    return ModelConfig(
        width=width,
        context=1024,
        vocab=50_257,
        embedding=Tokens(dropout=0.1),
        decoder=Stack(layers=layers, block=block),
        init=Gpt2(),
    )


def gpt2() -> ModelConfig:
    """GPT-2 small, 124M."""
    return _gpt2(768, 12, 12)


def gpt2_medium() -> ModelConfig:
    """GPT-2 medium, 355M."""
    return _gpt2(1024, 24, 16)


def gpt2_large() -> ModelConfig:
    """GPT-2 large, 774M."""
    return _gpt2(1280, 36, 20)


def gpt2_xl() -> ModelConfig:
    """GPT-2 XL, 1558M."""
    return _gpt2(1600, 48, 25)


def gpt_mini() -> ModelConfig:
    """Our small decoder for a laptop: rotary positions, RMSNorm, squared ReLU, no biases."""
    block = Block(
        attention=MultiHead(heads=4, norm="rms"),
        feedforward=Mlp(activation="relu2", bias=False),
        norm=RMSNorm(),
        residual=Pre(),
        position=Rotary(),
    )
    return ModelConfig(
        width=256,
        context=256,
        embedding=Tokens(),
        decoder=Stack(layers=4, block=block),
        output=Softmax(),
        init=FanIn(),
    )
