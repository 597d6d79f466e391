"""What our own small models of all three families have in common."""

from __future__ import annotations

from trivium.models.options import Block
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.feedforward import MlpOptions
from trivium.parts.options.norms import RMSNormOptions
from trivium.parts.options.positions import Position
from trivium.parts.options.residual import PreOptions


def mini_block(position: Position) -> Block:
    """Pre-norm with RMSNorm, normed queries and keys, squared ReLU, no biases."""
    return Block(
        attention=MultiHeadOptions(heads=4, norm="rms"),
        feedforward=MlpOptions(activation="relu2", bias=False),
        norm=RMSNormOptions(),
        residual=PreOptions(),
        position=position,
    )
