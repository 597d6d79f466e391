"""Exactly what the model sees: the numbers of a data set and the tokens of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from trivium.data.batch import Batch
from trivium.data.bucketing import Pairs
from trivium.data.packing import RowBatch, Rows
from trivium.data.pairs import paired
from trivium.data.shards import Shards, Stream
from trivium.data.writing import Split
from trivium.errors import DataError
from trivium.labels import IGNORED
from trivium.text.tokenizer import Tokenizer


class Cell(NamedTuple):
    """One position of a row: the token that goes in, the token to predict ("" if none), and its document.

    `part` is "tokens", or "prefix" for those of them that see each other both ways, or "source" for what an encoder
    reads. Documents are 0 where the model is not told of them.
    """

    position: int
    id: int
    piece: str
    label: str
    document: int
    part: str = "tokens"


def describe(shards: Shards, tokenizer: Tokenizer) -> dict[str, Any]:
    """Documents, tokens and bytes of each split, and of which tokenizer."""
    return {
        "tokenizer": {"kind": tokenizer.kind, "size": tokenizer.size},
        "digest": shards.digest,
        "train": _describe(shards.train),
        "valid": _describe(shards.valid),
    }


def _describe(stream: Stream) -> dict[str, Any]:
    documents = len(stream.starts)
    lengths = np.diff(stream.starts, append=len(stream) - 1) - 1 if documents else np.zeros(1, np.int64)
    text_tokens = int(lengths.sum())
    return {
        "documents": documents,
        "tokens": len(stream),
        "bytes": stream.text_bytes,
        "bytes_per_token": stream.text_bytes / text_tokens if text_tokens else 0.0,
        "longest_document": int(lengths.max()),
        "median_document": float(np.median(lengths)),
    }


def packed(rows: RowBatch) -> Batch:
    """Rows as they are cut from the stream, each token with the next one as its label."""
    inputs = {"tokens": torch.from_numpy(rows.text), "documents": torch.from_numpy(rows.documents)}
    return Batch(
        inputs=inputs, targets={"labels": torch.from_numpy(rows.labels)}, counts={"tokens": int(rows.lengths.sum())}
    )


def preview(
    shards: Shards,
    tokenizer: Tokenizer,
    length: int,
    row: int,
    split: Split,
    inputs: Callable[[RowBatch], Batch] = packed,
) -> list[Cell]:
    """Row number `row` of a split, position by position; `inputs` is what an objective makes of it."""
    rows = (Pairs if paired(shards) else Rows)(shards.train if split == "train" else shards.valid, length)
    if not 0 <= row < len(rows):
        have = f"it has rows 0 to {len(rows) - 1}" if len(rows) else "it is empty"
        raise DataError(f"the {split} text has no row {row} at a context of {length}; {have}")
    return cells(inputs(rows.take(np.array([row]))), tokenizer)


def cells(batch: Batch, tokenizer: Tokenizer) -> list[Cell]:
    """The first row of a batch: what an encoder reads, if there are two sides, then the tokens with their labels.

    Padding that a mask hides from the model is left out.
    """
    tokens = batch.inputs["tokens"][0].tolist()
    labels = _labels(batch, len(tokens))
    documents = batch.inputs["documents"][0].tolist() if "documents" in batch.inputs else [0] * len(tokens)
    prefix = int(batch.inputs["prefix"][0]) if "prefix" in batch.inputs else 0
    shown: list[Cell] = []
    if "source" in batch.inputs:
        for at in _visible(batch, "source", "source_padding"):
            id = int(batch.inputs["source"][0, at])
            shown.append(Cell(at, id, tokenizer.piece(id), "", 0, "source"))
    for at in _visible(batch, "tokens", "padding"):
        label = "" if labels[at] == IGNORED else tokenizer.piece(labels[at])
        part = "prefix" if at < prefix else "tokens"
        shown.append(Cell(at, tokens[at], tokenizer.piece(tokens[at]), label, documents[at], part))
    return shown


def _labels(batch: Batch, length: int) -> list[int]:
    """The label of each position of the first row, spread out again where they were gathered."""
    labels = batch.targets["labels"]
    if "where" not in batch.targets:
        return [int(label) for label in labels[0]]
    spread = [IGNORED] * length
    for at, label in zip(batch.targets["where"].tolist(), labels.tolist(), strict=True):
        if at < length and label != IGNORED:
            spread[at] = label
    return spread


def _visible(batch: Batch, name: str, padding: str) -> list[int]:
    length = batch.inputs[name].shape[1]
    if padding not in batch.inputs:
        return list(range(length))
    return [at for at in range(length) if batch.inputs[padding][0, at]]
