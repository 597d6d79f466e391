"""Tiny models of the three families, trained nowhere, that say something all the same."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.oracle.copying import enliven
from trivium.models.config import AnyStack, ModelConfig, Stack
from trivium.models.presets import PRESETS
from trivium.models.transformer import Transformer, build
from trivium.text.kinds import Bytes
from trivium.text.tokenizer import Tokenizer

BYTES = Bytes().build([])
MASKED = BYTES.extended(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
BARE = BYTES.extended(["[MASK]"])
DENOISING = BYTES.extended(["<pad>", "<extra_id_1>", "<extra_id_0>"])


def shrunk(name: str, vocab: int, *, context: int = 64, width: int = 32) -> ModelConfig:
    """A preset with two layers of four heads."""

    def side(stack: AnyStack) -> AnyStack:
        return replace(stack, layers=2) if isinstance(stack, Stack) else stack

    config = PRESETS[name]()
    return replace(
        config,
        width=width,
        context=context,
        vocab=vocab,
        encoder=side(config.encoder),
        decoder=side(config.decoder),
    )


def model(
    name: str, tokenizer: Tokenizer | int, *, seed: int = 1, spread: float = 0.3, context: int = 64
) -> Transformer:
    vocab = tokenizer if isinstance(tokenizer, int) else tokenizer.size
    made = build(shrunk(name, vocab, context=context))
    enliven(made, seed=seed, spread=spread)
    return made.eval()


def draw(seed: int, length: int, vocab: int) -> tuple[int, ...]:
    """Random ids."""
    found: list[int] = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tuple(found)
