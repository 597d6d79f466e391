"""The LLaMA line and its descendants (spec: models §6)."""

from __future__ import annotations

from trivium.models.config import Block, ModelConfig, Stack
from trivium.parts.attention import MultiHead
from trivium.parts.embeddings import Tokens
from trivium.parts.feedforward import Glu
from trivium.parts.init import Gpt
from trivium.parts.norms import RMSNorm
from trivium.parts.positions import Rotary
from trivium.parts.residual import Pre


def _block(heads: int, groups: int, head: int, hidden: int, eps: float, theta: float) -> Block:
    return Block(
        attention=MultiHead(heads=heads, groups=groups, head=head),
        feedforward=Glu(hidden=hidden),
        norm=RMSNorm(eps=eps),
        residual=Pre(),
        position=Rotary(theta=theta),
    )


def smollm2_135m() -> ModelConfig:
    """SmolLM2 135M: 30 narrow layers, grouped attention, tied."""
    block = _block(heads=9, groups=3, head=64, hidden=1536, eps=1e-5, theta=100_000.0)
    return ModelConfig(width=576, context=8192, vocab=49_152, decoder=Stack(layers=30, block=block), init=Gpt())


def llama_mini() -> ModelConfig:
    """A LLaMA that trains on a laptop: grouped attention, SwiGLU, rotary positions, untied output."""
    block = _block(heads=8, groups=2, head=32, hidden=704, eps=1e-5, theta=10_000.0)
    return ModelConfig(
        width=256, context=256, embedding=Tokens(tie="none"), decoder=Stack(layers=6, block=block), init=Gpt()
    )
