"""BERT, RoBERTa and our own small encoder (spec: models §4)."""

from __future__ import annotations

from typing import NamedTuple

from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.presets.mini import mini_block
from trivium.models.presets.preset import Preset, rows
from trivium.parts.init import FanIn, Gpt
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import MlpOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.output import MaskedOutputOptions
from trivium.parts.options.positions import LearnedOptions, RotaryOptions
from trivium.parts.options.residual import PostOptions
from trivium.parts.options.sentence import PoolerOptions
from trivium.parts.site import NoPart


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    vocab: int


BASE, LARGE = (12, 768, 12), (24, 1024, 16)

BERT = {
    "bert-base-uncased": Shape(*BASE, vocab=30_522),
    "bert-base-cased": Shape(*BASE, vocab=28_996),
    "bert-large-uncased": Shape(*LARGE, vocab=30_522),
    "bert-large-cased": Shape(*LARGE, vocab=28_996),
}
ROBERTA = {
    "roberta-base": Shape(*BASE, vocab=50_265),
    "roberta-large": Shape(*LARGE, vocab=50_265),
}
SPANBERT = {"spanbert-large-cased": BERT["bert-large-cased"]}


def _encoder(shape: Shape, *, eps: float, segments: int, offset: int, sentence: PoolerOptions | NoPart) -> ModelConfig:
    """Post-norm, erf-GELU, a norm after the sum of token, segment and position, dropout 0.1, N(0, 0.02)."""
    norm = LayerNormOptions(eps=eps)
    block = Block(
        attention=MultiHeadOptions(heads=shape.heads, bias="all", dropout=0.1),
        feedforward=MlpOptions(activation="gelu"),
        norm=norm,
        residual=PostOptions(),
        position=LearnedOptions(offset=offset),
        dropout=0.1,
    )
    return ModelConfig(
        width=shape.width,
        context=512,
        vocab=shape.vocab,
        embedding=TokenEmbeddingOptions(segments=segments, norm=norm, dropout=0.1),
        encoder=Stack(layers=shape.layers, block=block),
        decoder=NoStack(),
        output=MaskedOutputOptions(norm=norm),
        sentence=sentence,
        init=Gpt(),
    )


def bert(shape: Shape) -> ModelConfig:
    """BERT with both pretraining heads: masked tokens and next sentence."""
    return _encoder(shape, eps=1e-12, segments=2, offset=0, sentence=PoolerOptions())


def roberta(shape: Shape) -> ModelConfig:
    """RoBERTa: one kind of segment, no sentence head, positions from 2 on (514 rows for 512 tokens)."""
    return _encoder(shape, eps=1e-5, segments=1, offset=2, sentence=NoPart())


def spanbert(shape: Shape) -> ModelConfig:
    """SpanBERT as it predicts single tokens: its span-boundary head belongs to an objective of its own."""
    return _encoder(shape, eps=1e-12, segments=2, offset=0, sentence=NoPart())


def bert_mini() -> ModelConfig:
    return ModelConfig(
        width=256,
        context=128,
        encoder=Stack(layers=4, block=mini_block(RotaryOptions())),
        decoder=NoStack(),
        output=MaskedOutputOptions(norm=LayerNormOptions()),
        init=FanIn(),
    )


MINI = {"bert-mini": Preset("Our small encoder: rotary positions, pre-norm, BERT's masked head.", bert_mini)}

PUBLISHED = {
    **rows("BERT: post-norm encoder with both pretraining heads.", bert, BERT),
    **rows("RoBERTa: BERT without segments or sentence head, positions from 2 on.", roberta, ROBERTA),
    **rows("SpanBERT: BERT's large cased shape with the masked head alone.", spanbert, SPANBERT),
}
