"""Two pieces of text, the second of which follows the first or does not (spec: objectives §3).

A row is a window of the stream. One document is drawn from it, each as likely as it has text there, and its text in
the window is cut in two at a place drawn uniformly: A and what follows it. On one half of the rows B is that; on the
other half it is as much text of another document, found by a token drawn uniformly among all that are not of A's
document: drawing documents instead would make a text from a short one a sign of a strange pair. Sentences are not
looked for, of which a stream of ids knows nothing; BERT's own were any stretches of text too.
"""

# B rows, T tokens of a window, C = T + 3 with the frame, K draws for a row

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trivium.data.packing import RowBatch
from trivium.data.shards import Stream
from trivium.errors import DataError
from trivium.objectives.hiding import Draws, Framed, Vocabulary
from trivium.objectives.options import CLASS, PADDING, SEPARATOR

FOLLOWS, STRANGE = 0, 1  # the classes, as BERT numbers them
SHORT = 0.1  # the share of rows with a length drawn uniformly, so that a model meets short inputs too
_DRAWS = 6


class Span(NamedTuple):
    """Tokens of the stream from `start` up to `stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def draws(length: int) -> int:
    """How many random numbers a pair from a window of `length` tokens takes."""
    return _DRAWS + length


def paired(rows: RowBatch, draws_BK: Draws, vocabulary: Vocabulary) -> Framed:
    """`[CLS] A [SEP] B [SEP]` from every row, filled up with [PAD]."""
    if len(rows.stream.starts) < 2:  # whatever the coins say, so that the first batch is refused
        raise DataError(
            "objective.frame: a second text from another document needs at least two documents for training and two "
            "for validation; split the text with data.separator, or set frame=bert"
        )
    count, length = rows.text.shape
    ids_BC = np.full((count, length + 3), vocabulary.ids[PADDING])
    segments_BC = np.zeros_like(ids_BC)
    lengths_B, classes_B = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for row, (number, real) in enumerate(zip(rows.numbers.tolist(), rows.lengths.tolist(), strict=True)):
        window = Span(number * length, number * length + real)
        first, second, classes_B[row] = pair(rows.stream, window, length, draws_BK[row])
        texts = [rows.stream.ids[slice(*span)].tolist() for span in (first, second)]
        whole = [vocabulary.ids[CLASS], *texts[0], vocabulary.ids[SEPARATOR], *texts[1], vocabulary.ids[SEPARATOR]]
        lengths_B[row] = len(whole)
        ids_BC[row, : len(whole)] = whole
        segments_BC[row, first.size + 2 : len(whole)] = 1
    return Framed(ids_BC, lengths_B, segments_BC, classes_B)


def pair(stream: Stream, window: Span, most: int, drawn_K: Draws) -> tuple[Span, Span, int]:
    """A and B, together at most `most` tokens, and the class of the pair."""
    which, cut, coin, elsewhere, short, target = drawn_K[:_DRAWS].tolist()
    document, text = _chunk(stream, window, which)
    split = text.start + (1 + int(cut * (text.size - 1)) if text.size > 1 else text.size)
    first, second = Span(text.start, split), Span(split, text.stop)
    strange = coin >= 0.5 or not second.size
    if strange:
        second = _elsewhere(stream, document, max(1, second.size), elsewhere)
    if short < SHORT:
        most = 2 + int(target * (most - 1))
    return *truncated(first, second, most, drawn_K[_DRAWS:]), STRANGE if strange else FOLLOWS


def truncated(first: Span, second: Span, most: int, coins_K: Draws) -> tuple[Span, Span]:
    """Both, with tokens taken from the longer one, at its front or its back as a coin falls, until `most` are left.

    The second is the longer one of two equals, as in BERT's own code.
    """
    lengths = [first.size, second.size]
    if sum(lengths) > most:
        short = min(lengths)
        half = [most - most // 2, most // 2] if short > most // 2 else [short, most - short]
        lengths = half if short > most // 2 or first.size <= second.size else half[::-1]
    result: list[Span] = []
    for span, left in zip((first, second), lengths, strict=True):
        taken, coins_K = coins_K[: span.size - left], coins_K[span.size - left :]
        start = span.start + int((taken < 0.5).sum())
        result.append(Span(start, start + left))
    return result[0], result[1]


def _chunk(stream: Stream, window: Span, draw: float) -> tuple[int, Span]:
    """A document of the window and its text there, of at least two tokens if any has so much."""
    first = int(np.searchsorted(stream.starts, window.start, side="right")) - 1
    last = int(np.searchsorted(stream.starts, window.stop, side="left"))
    texts = [_text(stream, document) for document in range(first, last)]
    chunks = [Span(max(text.start, window.start), min(text.stop, window.stop)) for text in texts]
    sizes = np.array([max(0, chunk.size) for chunk in chunks])
    sizes = np.where(sizes > 1, sizes, 0) if sizes.max() > 1 else sizes
    index = int(np.searchsorted(np.cumsum(sizes), int(draw * sizes.sum()), side="right"))
    index = min(index, len(chunks) - 1)  # a window that holds nothing but END
    chunk = chunks[index]
    return first + index, Span(chunk.start, max(chunk.start, chunk.stop))


def _elsewhere(stream: Stream, document: int, size: int, draw: float) -> Span:
    """`size` tokens, or all there are, of another document."""
    own = _text(stream, document)
    before, own_size = own.start - 1, own.size + 1  # with the END in front
    place = int(draw * (len(stream) - 1 - own_size))
    place += own_size if place >= before else 0
    text = _text(stream, int(np.searchsorted(stream.starts, place, side="right")) - 1)
    start = max(text.start, min(place, text.stop - size))
    return Span(start, min(start + size, text.stop))


def _text(stream: Stream, document: int) -> Span:
    """Where the text of a document is, without the END in front of it."""
    starts = stream.starts
    stop = int(starts[document + 1]) if document + 1 < len(starts) else len(stream) - 1
    return Span(int(starts[document]) + 1, stop)
