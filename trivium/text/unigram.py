"""Training Unigram pieces (Kudo 2018, as in SentencePiece), with the same result in every process.

The seed pieces are frequent substrings. EM estimates their probabilities, the pieces that cost the least likelihood
are dropped, and so on until the wanted number is left. All sums run in an order that depends on the words alone; the
`tokenizers` library's trainer sums in the order of a hash map and of its threads.
"""

# P pieces, the characters first; K some of the others

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trivium.text.lattice import Floats, Lattice, sums
from trivium.text.substrings import FlatWords, frequent_substrings

SEEDS = 10  # seed pieces for each piece wanted; SentencePiece's 1,000,000 fit held-out text no better
SHRINK = 0.75  # the share of the pieces that a round keeps, after EM_STEPS steps of EM, as in SentencePiece
EM_STEPS = 2
RARE = 0.5  # a piece with a smaller expected count is dropped, as in SentencePiece
LONGEST_WORD = 256  # characters; a longer word is trained on in parts of this length
MOST_CHARACTERS = 1 << 22  # of all distinct words: bounds the memory of training to about 1 GB


def train_unigram(
    words: Mapping[str, int], characters: Sequence[str], *, size: int, reserved: Collection[str] = ()
) -> list[tuple[str, float]]:
    """At most `size` pieces with their log-probabilities, the most probable first; all of the `characters` are there.

    `characters` are sorted and hold every character of the words. No piece is one of the `reserved`.
    """
    parts = _training_words(words)
    if not parts:
        return [(character, math.log(1 / len(characters))) for character in characters]
    flat = FlatWords(parts, characters)
    seeds = frequent_substrings(flat, SEEDS * size, reserved)
    pieces = np.array([*characters, *seeds.strings(flat.text)], object)
    lattice = Lattice(flat, len(characters), seeds)
    counts_C = sums(flat.codes_M, flat.counts_W[flat.word_M].astype(np.float64), len(characters) + 1)[1:]
    scores_P = _m_step(np.concatenate([counts_C, (seeds.counts * seeds.lengths).astype(np.float64)]))
    while True:
        for _ in range(EM_STEPS):
            expected_P = lattice.expected_counts(scores_P)
            kept_P = _drop_rare(expected_P, len(characters), size)
            lattice.keep(kept_P)
            pieces, scores_P = pieces[kept_P], _m_step(expected_P[kept_P])
        if len(pieces) <= size:
            break
        kept_P = _prune(lattice, scores_P, size)
        lattice.keep(kept_P)
        pieces, scores_P = pieces[kept_P], scores_P[kept_P]
    # rounded before they are sorted: as many decimals as the file has
    rounded = (np.round(scores_P, 6) + 0.0).tolist()  # + 0.0: no -0.0
    return sorted(zip(pieces.tolist(), rounded, strict=True), key=lambda each: (-each[1], each[0]))


def pruning_losses(lattice: Lattice, scores_P: Floats) -> Floats:
    """The log-likelihood that dropping each piece costs, if its best segmentation into others takes its place.

    As in SentencePiece: probabilities are relative counts in the most probable segmentations, before and after.
    Infinite for a character, which is never dropped, and minus infinity for a piece that no such segmentation uses.
    """
    counts_P = lattice.best_counts(scores_P)
    losses_P = np.full(len(scores_P), -np.inf)
    losses_P[: lattice.characters] = np.inf
    which_K = lattice.characters + np.flatnonzero(counts_P[lattice.characters :])
    others = lattice.alternatives(which_K, scores_P)
    total, counts_K = counts_P.sum(), counts_P[which_K]
    parts_K = np.bincount(others.rows, minlength=len(which_K))
    more = np.log(counts_P[others.pieces] + counts_K[others.rows])
    instead_K = sums(others.rows, more, len(which_K))
    instead_K -= parts_K * np.log(total + counts_K * (parts_K - 1))
    losses_P[which_K] = counts_K * (np.log(counts_K) - np.log(total) - instead_K)
    return losses_P


def digamma(values: Floats) -> Floats:
    """The derivative of the logarithm of the gamma function at positive values."""
    below = sum(np.where(values + step < 7, 1 / (values + step), 0.0) for step in range(7))
    above = values + np.clip(np.ceil(7 - values), 0, 7) - 0.5
    square = 1 / (above * above)
    series = square * (1 / 24 - square * (7 / 960 - square * (31 / 8064 - square * 127 / 30720)))
    result: Floats = np.log(above) + series - below
    return result


def _prune(lattice: Lattice, scores_P: Floats, size: int) -> NDArray[np.bool_]:
    """Which pieces a round keeps: the most costly ones, a share of SHRINK and only those in use, at least `size`."""
    losses_P = pruning_losses(lattice, scores_P)
    stay = max(size, min(int(SHRINK * len(losses_P)), int(np.count_nonzero(losses_P > -np.inf))))
    kept_P = np.zeros(len(losses_P), bool)
    kept_P[np.lexsort((-scores_P, -losses_P))[:stay]] = True
    return kept_P


def _drop_rare(expected_P: Floats, characters: int, size: int) -> NDArray[np.bool_]:
    """Which pieces are not rare; if fewer than `size` would be left, only the rarest are dropped down to `size`."""
    kept_P = np.ones(len(expected_P), bool)
    spare = len(expected_P) - size
    order = characters + np.argsort(expected_P[characters:], kind="stable")
    rare = order[expected_P[order] < RARE]
    kept_P[rare[:spare] if spare >= 0 else rare] = False
    return kept_P


def _m_step(expected_P: Floats) -> Floats:
    """Log-probabilities by variational Bayes, which prefers few pieces, as in SentencePiece."""
    enough_P = np.maximum(expected_P, RARE)
    scores: Floats = digamma(enough_P) - digamma(enough_P.sum())
    return scores


def _training_words(words: Mapping[str, int]) -> Counter[str]:
    """Long words in parts; only the most frequent ones if there are more than MOST_CHARACTERS."""
    parts: Counter[str] = Counter()
    for word, times in words.items():
        for start in range(0, len(word), LONGEST_WORD):
            parts[word[start : start + LONGEST_WORD]] += times
    if sum(map(len, parts)) <= MOST_CHARACTERS:
        return parts
    # equally frequent ones by a checksum: by spelling, those of the last letters would be missing
    ordered = sorted(parts, key=lambda part: (-parts[part], zlib.crc32(part.encode()), part))
    ends = np.cumsum([len(part) for part in ordered])
    return Counter({part: parts[part] for part in ordered[: int(np.searchsorted(ends, MOST_CHARACTERS, "right"))]})
