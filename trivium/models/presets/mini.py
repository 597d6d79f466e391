"""What our own small models of all three families have in common."""

from __future__ import annotations

from trivium.models.options import Block
from trivium.parts.options.attention import MultiHead
from trivium.parts.options.feedforward import Mlp
from trivium.parts.options.norms import RMSNorm
from trivium.parts.options.positions import Position
from trivium.parts.options.residual import Pre


def mini_block(position: Position) -> Block:
    """Pre-norm with RMSNorm, normed queries and keys, squared ReLU, no biases."""
    return Block(
        attention=MultiHead(heads=4, norm="rms"),
        feedforward=Mlp(activation="relu2", bias=False),
        norm=RMSNorm(),
        residual=Pre(),
        position=position,
    )
