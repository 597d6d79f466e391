"""The Transformer of 2017 against `nn.Transformer`, whose two final norms are not the paper's and are taken off."""

# B batch, S source tokens, T target tokens, D width, V vocabulary

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.oracle.copying import TORCH, enliven, ids, logits, near, renamed
from trivium.models.config import ModelConfig, Stack
from trivium.models.presets import PRESETS, transformer
from trivium.models.transformer import Transformer, build, load_weights
from trivium.parts.options.attention import MultiHeadOptions

VOCAB = 67


class Theirs(nn.Module):
    """The library's layers with what the paper puts around them: scaled embeddings, sinusoids, one matrix for all."""

    def __init__(self, shape: transformer.Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, shape.width)
        self.body = nn.Transformer(
            shape.width,
            shape.heads,
            shape.layers,
            shape.layers,
            4 * shape.width,
            0.0,
            layer_norm_eps=1e-6,
            batch_first=True,
        )
        self.body.encoder.norm = self.body.decoder.norm = None

    def enter(self, tokens_BT: Tensor) -> Tensor:
        width = self.embedding.embedding_dim
        table = torch.empty(tokens_BT.shape[1], width, dtype=torch.float64)
        for position in range(len(table)):
            for index in range(0, width, 2):
                angle = position / 10_000 ** (index / width)
                table[position, index], table[position, index + 1] = math.sin(angle), math.cos(angle)
        embedded: Tensor = self.embedding(tokens_BT) * math.sqrt(width)
        return embedded + table.to(embedded.dtype)

    def forward(self, source_BS: Tensor, real_BS: Tensor, target_BT: Tensor) -> Tensor:
        # the library's boolean masks mean the opposite of ours: True = may not attend
        states: Tensor = self.body(
            self.enter(source_BS),
            self.enter(target_BT),
            tgt_mask=torch.ones(target_BT.shape[1], target_BT.shape[1], dtype=torch.bool).triu(1),
            src_key_padding_mask=~real_BS,
            memory_key_padding_mask=~real_BS,
        )
        return states @ self.embedding.weight.T


def with_biases(config: ModelConfig) -> ModelConfig:
    """Biases in attention, as the library has them."""

    def side(stack: object) -> Stack:
        assert isinstance(stack, Stack)
        block = stack.block
        assert isinstance(block.attention, MultiHeadOptions)
        attention = replace(block.attention, bias="all")
        cross = attention if isinstance(block.cross, MultiHeadOptions) else block.cross
        return replace(stack, block=replace(block, attention=attention, cross=cross))  # type: ignore[type-var]

    return replace(config, encoder=side(config.encoder), decoder=side(config.decoder))


def pair(shape: transformer.Shape, *, seed: int, biases: bool) -> tuple[Theirs, Transformer]:
    theirs = Theirs(shape).eval()
    enliven(theirs, seed=seed)
    config = replace(transformer.vaswani(shape), vocab=VOCAB)
    found = renamed(dict(theirs.named_parameters()), build(with_biases(config), device="meta"), TORCH)
    if not biases:
        attention = [name for name in found if name.endswith(".bias") and (".attention." in name or ".cross." in name)]
        for name in attention:
            found.pop(name).zero_()  # a view of theirs, which must be without it too
    ours = build(with_biases(config) if biases else config).eval()
    load_weights(ours, found)
    return theirs, ours


@pytest.mark.parametrize("biases", [False, True], ids=["as the paper", "with attention biases"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", [transformer.Shape(2, 36, 4, 0.1), transformer.Shape(3, 42, 6, 0.3)], ids=str)
def test_logits_equal_those_of_torch(shape: transformer.Shape, seed: int, biases: bool) -> None:
    theirs, ours = pair(shape, seed=seed, biases=biases)
    source_BS, target_BT = ids(3, 13, seed, VOCAB), ids(3, 8, seed + 10, VOCAB)
    real_BS = torch.arange(13)[None] < torch.tensor([[13], [9], [4]])
    theirs.train()  # dropout is 0 there; its fast path of inference pads differently
    with torch.no_grad():
        other = theirs(source_BS, real_BS, target_BT)
    near(logits(ours, target_BT, source=source_BS, source_padding=real_BS), other)


def test_the_library_counts_as_the_specification_says() -> None:
    library = nn.Transformer(512, 8, 6, 6, 2048, batch_first=True, device="meta")
    config = PRESETS["transformer-base"]()
    body = config.parameters() - 37_000 * 512
    assert body == 44_101_632
    biases = with_biases(config).parameters() - config.parameters()
    assert sum(p.numel() for p in library.parameters()) == body + biases + 2 * 2 * 512  # two final norms
    assert with_biases(config).parameters() == 63_082_496
    assert with_biases(PRESETS["transformer-big"]()).parameters() == 214_245_376
