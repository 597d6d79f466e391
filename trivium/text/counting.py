"""Counting the words of texts, between white space or as a normaliser and a pre-split give them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby

import tokenizers

_BATCH = 10_000  # runs split in one call, which returns a list of all their words with offsets


def count_words(texts: Iterable[str]) -> Counter[str]:
    """How often each word between white space occurs."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    return counts


def count_presplit(texts: Iterable[str], inner: tokenizers.Tokenizer, white: str) -> Counter[str]:
    """How often each word occurs after the normaliser and the pre-split of `inner`, applied to each text.

    The pre-split has to split at a space and at every character of `white`, and the normaliser must not join text
    across them. Then it is enough to normalise and split each distinct run between them once.
    """
    runs: Counter[str] = Counter()
    for text in texts:
        for character in white:
            text = text.replace(character, " ")
        if text:
            runs.update(text.split(" "))
    # an empty run is no word, or the mark of a space: the text " " is two empty runs
    words = Counter(dict.fromkeys(_presplit(" ", inner), runs.pop("", 0)))
    ordered = sorted(runs, key=runs.__getitem__)
    for times, group in groupby(ordered, key=runs.__getitem__):
        alike = list(group)
        for start in range(0, len(alike), _BATCH):
            for word in _presplit(" ".join(alike[start : start + _BATCH]), inner):
                words[word] += times
    return +words


def _presplit(text: str, inner: tokenizers.Tokenizer) -> list[str]:
    return [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(inner.normalizer.normalize_str(text))]
