"""Exactly what the model sees: the numbers of a data set and the tokens of a row."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from trivium.data.packing import Rows
from trivium.data.shards import Shards, Split, Stream
from trivium.errors import DataError
from trivium.parts.output import IGNORED
from trivium.text.tokenizer import Tokenizer


class Cell(NamedTuple):
    """One position of a row: the token that goes in, the token to predict ("" if none), and its document."""

    position: int
    id: int
    piece: str
    label: str
    document: int


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


def preview(shards: Shards, tokenizer: Tokenizer, context: int, row: int, split: Split) -> list[Cell]:
    """Row number `row` of a split, position by position."""
    rows = Rows(shards.train if split == "train" else shards.valid, context)
    if not 0 <= row < len(rows):
        have = f"it has rows 0 to {len(rows) - 1}" if len(rows) else "it is empty"
        raise DataError(f"the {split} text has no row {row} at a context of {context}; {have}")
    ids, labels, documents = (array[0].tolist() for array in rows.take(np.array([row])))
    return [
        Cell(at, ids[at], tokenizer.piece(ids[at]), "" if label == IGNORED else tokenizer.piece(label), documents[at])
        for at, label in enumerate(labels)
    ]
