"""The verdict of an encoder's sentence head on texts, or on pairs of texts."""

# B texts, T tokens, C classes

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from trivium.errors import RequestError
from trivium.generation.checks import items_of, texts_of
from trivium.generation.engine import evaluating
from trivium.generation.scorer import right_padded
from trivium.generation.states import frame_of, framed
from trivium.generation.supports import even_batches
from trivium.models.transformer import Transformer
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.sentence import Pooler
from trivium.text.tokenizer import Tokenizer

Text = str | tuple[str, str]


class Verdict(str):
    """The likeliest class of a text, with the probabilities of all of them by name."""

    probabilities: dict[str, float]

    def __new__(cls, label: str, probabilities: dict[str, float]) -> Verdict:
        self = super().__new__(cls, label)
        self.probabilities = probabilities
        return self


def pairs_of(given: object) -> list[Text]:
    """The texts, and pairs of texts, that a caller gave: one of them, or several."""
    several = [given] if isinstance(given, str | tuple) else items_of("texts", given, "a string or a list of strings")
    for item in several:
        if isinstance(item, tuple) and len(item) != 2:
            raise RequestError(f"texts: a pair is a tuple of two texts, not of {len(item)}; give two")
        texts_of("texts", [*item] if isinstance(item, tuple) else [item])
    return cast("list[Text]", several)


def classify(
    model: Transformer, tokenizer: Tokenizer, texts: Sequence[Text], labels: Sequence[str], *, batch: int = 64
) -> list[Verdict]:
    """The class of each text; a pair is read as one row, told apart by segments where the model has them.

    `labels` names the classes; without any they are "0", "1", and so on.
    """
    head = model.sentence
    if not isinstance(head, Pooler) or head.classify is None:
        raise RequestError("this model has no head that classifies texts; load or train one that has")
    classes = head.classify.out_features
    names = [*labels] if len(labels) == classes else [str(number) for number in range(classes)]
    rows, segments = _rows(model, tokenizer, texts)
    lengths = [(len(row),) for row in rows]
    orders = [sorted(alike, key=lengths.__getitem__) for alike in even_batches([model], lengths)]
    chunks = [order[first : first + batch] for order in orders for first in range(0, len(order), batch)]
    result: dict[int, Verdict] = {}
    for chunk in chunks:
        tokens_BT, real_BT = right_padded([rows[number] for number in chunk], model.device)
        segments_BT, _ = right_padded([segments[number] for number in chunk], model.device)
        told = isinstance(model.config.embedding, TokenEmbeddingOptions) and model.config.embedding.segments > 1
        with evaluating(model), torch.inference_mode():
            hidden = model(tokens_BT, padding=real_BT, segments=segments_BT if told else None).hidden
            shares = head.logits(hidden).float().softmax(-1).tolist()
        for number, row in zip(chunk, shares, strict=True):
            known = dict(zip(names, row, strict=True))
            result[number] = Verdict(max(known, key=known.__getitem__), known)
    return [result[number] for number in range(len(rows))]


def _rows(model: Transformer, tokenizer: Tokenizer, texts: Sequence[Text]) -> tuple[list[list[int]], list[list[int]]]:
    """The ids of every text as the model reads them, and the segment of each id."""
    frame = frame_of(model, tokenizer)
    if any(not isinstance(text, str) for text in texts) and not frame.after:
        raise RequestError("this model's tokenizer has nothing to part two texts with; give one text at a time")
    ids, second = [], []
    for text in texts:
        one, *other = [tokenizer.encode(part) for part in ((text,) if isinstance(text, str) else text)]
        if other and not other[0]:
            raise RequestError("the second text of a pair is empty; give one text, or two")
        # RoBERTa parts a pair by two of its ends, BERT by one
        between = [*frame.after] * (
            2 if frame.before == (tokenizer.begin,) and tokenizer.begin != frame.after[0] else 1
        )
        ids.append([*one, *(between + other[0] if other else [])])
        second.append(len(other[0]) if other else 0)
    rows = framed(model, frame, ids)
    after = len(frame.after)
    return rows, [
        [0] * (len(row) - size - after) + [1] * (size + after) if size else [0] * len(row)
        for row, size in zip(rows, second, strict=True)
    ]
