"""The LLaMA line and its descendants (spec: models §6)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.presets.preset import Preset, rows
from trivium.parts.init import Gpt
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import Tie, TokenEmbeddingOptions
from trivium.parts.options.feedforward import GluOptions
from trivium.parts.options.norms import RMSNormOptions
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.options.residual import PreOptions
from trivium.parts.options.scaling import Llama3, NoScaling, Scaling


class Shape(NamedTuple):
    layers: int
    width: int
    hidden: int
    heads: int
    groups: int
    head: int
    vocab: int
    context: int
    eps: float = 1e-5
    theta: float = 10_000.0
    scaling: Scaling = NoScaling()
    tie: Tie = "none"
    norm: Literal["none", "rms"] = "none"  # of queries and keys
    window: int = 0


LLAMA = {
    "llama-7b": Shape(32, 4096, 11_008, 32, 32, 128, 32_000, 2048, eps=1e-6),
    "llama-13b": Shape(40, 5120, 13_824, 40, 40, 128, 32_000, 2048, eps=1e-6),
    "llama-33b": Shape(60, 6656, 17_920, 52, 52, 128, 32_000, 2048, eps=1e-6),
    "llama-65b": Shape(80, 8192, 22_016, 64, 64, 128, 32_000, 2048),
    "llama2-7b": Shape(32, 4096, 11_008, 32, 32, 128, 32_000, 4096),
    "llama2-13b": Shape(40, 5120, 13_824, 40, 40, 128, 32_000, 4096),
    "llama2-70b": Shape(80, 8192, 28_672, 64, 8, 128, 32_000, 4096),
    "llama3-8b": Shape(32, 4096, 14_336, 32, 8, 128, 128_256, 8192, theta=5e5),
    "llama3-70b": Shape(80, 8192, 28_672, 64, 8, 128, 128_256, 8192, theta=5e5),
}
_8, _32 = Llama3(factor=8), Llama3(factor=32)
SCALED = {
    "llama3.1-405b": Shape(126, 16_384, 53_248, 128, 8, 128, 128_256, 131_072, theta=5e5, scaling=_8),
    "llama3.2-1b": Shape(16, 2048, 8192, 32, 8, 64, 128_256, 131_072, theta=5e5, scaling=_32, tie="all"),
    "llama3.2-3b": Shape(28, 3072, 8192, 24, 8, 128, 128_256, 131_072, theta=5e5, scaling=_32, tie="all"),
}
MISTRAL = {
    "mistral-7b": Shape(32, 4096, 14_336, 32, 8, 128, 32_000, 32_768, window=4096),
    "mistral-7b-v0.3": Shape(32, 4096, 14_336, 32, 8, 128, 32_768, 32_768, theta=1e6),
}
SMOLLM2 = {
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49_152, 8192, theta=1e5, tie="all"),
    "smollm2-360m": Shape(32, 960, 2560, 15, 5, 64, 49_152, 8192, theta=1e5, tie="all"),
    "smollm2-1.7b": Shape(24, 2048, 8192, 32, 32, 64, 49_152, 8192, theta=1.3e5, tie="all"),
}
TINYLLAMA = {"tinyllama-1.1b": Shape(22, 2048, 5632, 32, 4, 64, 32_000, 2048)}


def _qwen3(layers: int, width: int, hidden: int, heads: int, tie: Tie) -> Shape:
    return Shape(layers, width, hidden, heads, 8, 128, 151_936, 40_960, 1e-6, 1e6, tie=tie, norm="rms")


QWEN3 = {
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, "all"),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, "all"),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, "all"),
    "qwen3-8b": _qwen3(36, 4096, 12_288, 32, "none"),
    "qwen3-14b": _qwen3(40, 5120, 17_408, 40, "none"),
    "qwen3-32b": _qwen3(64, 5120, 25_600, 64, "none"),
}
LLAMA_MINI = Shape(6, 256, 704, 8, 2, 32, vocab=0, context=256)


def llama(shape: Shape) -> ModelConfig:
    """Pre-norm with RMSNorm, SwiGLU, rotary positions, no biases."""
    block = Block(
        attention=MultiHeadOptions(
            heads=shape.heads, groups=shape.groups, head=shape.head, norm=shape.norm, window=shape.window
        ),
        feedforward=GluOptions(hidden=shape.hidden),
        norm=RMSNormOptions(eps=shape.eps),
        residual=PreOptions(),
        position=RotaryOptions(theta=shape.theta, scaling=shape.scaling),
    )
    return ModelConfig(
        width=shape.width,
        context=shape.context,
        vocab=shape.vocab,
        embedding=TokenEmbeddingOptions(tie=shape.tie),
        decoder=Stack(layers=shape.layers, block=block),
        init=Gpt(),
    )


MINI: dict[str, Preset] = rows(
    "A LLaMA for a laptop: grouped attention, untied output.", llama, {"llama-mini": LLAMA_MINI}
)

PUBLISHED = {
    **rows("LLaMA: pre-norm decoder, RMSNorm, SwiGLU, rotary positions.", llama, LLAMA),
    **rows("LLaMA with rotary frequencies scaled to 131,072 tokens.", llama, SCALED),
    **rows("Mistral: grouped attention; v0.1 sees 4,096 tokens back.", llama, MISTRAL),
    **rows("SmolLM2: a small tied LLaMA.", llama, SMOLLM2),
    **rows("TinyLlama: LLaMA-2 small, with four key and value heads.", llama, TINYLLAMA),
    **rows("Qwen3: LLaMA with normed queries and keys.", llama, QWEN3),
}
