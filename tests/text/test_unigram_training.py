"""Training of Unigram pieces: every step against brute force, the result against the library and SentencePiece."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, trainers

import trivium
import trivium.text.unigram as training
from trivium.text.kinds import Unigram
from trivium.text.lattice import Floats, Lattice
from trivium.text.library import UNKNOWN, library_unigram
from trivium.text.substrings import LONGEST, FlatWords, frequent_substrings
from trivium.text.tokenizer import LibraryTokenizer, Tokenizer
from trivium.text.unigram import digamma, pruning_losses, train_unigram

Words = dict[str, int]
words_of = st.dictionaries(st.text("abc", min_size=1, max_size=7), st.integers(1, 5), min_size=1, max_size=10)


def characters_of(words: Words) -> list[str]:
    return sorted(set("".join(words)))


def cuts(word: str, pieces: Counter[str] | dict[str, float]) -> Iterator[tuple[str, ...]]:
    """Every way to cut a word into the pieces."""
    for borders in itertools.product([False, True], repeat=len(word) - 1):
        places = [0, *(at + 1 for at, here in enumerate(borders) if here), len(word)]
        parts = tuple(word[first:last] for first, last in itertools.pairwise(places))
        if all(part in pieces for part in parts):
            yield parts


def lattice_of(words: Words, most: int, seed: int) -> tuple[Lattice, dict[str, float]]:
    """A lattice of the characters and some frequent substrings, a part of which was dropped; the pieces' scores."""
    rng = random.Random(seed)
    characters = characters_of(words)
    flat = FlatWords(words, characters)
    found = frequent_substrings(flat, most, ())
    lattice = Lattice(flat, len(characters), found)
    pieces = [*characters, *found.strings(flat.text)]
    kept = [place < len(characters) or rng.random() < 0.7 for place in range(len(pieces))]
    lattice.keep(np.array(kept))
    return lattice, {piece: rng.uniform(-4, -0.1) for piece in itertools.compress(pieces, kept)}


def array(scores: dict[str, float]) -> Floats:
    return np.array([*scores.values()])


def probability(parts: tuple[str, ...], scores: dict[str, float]) -> float:
    return math.exp(sum(scores[part] for part in parts))


@given(words=words_of, most=st.integers(0, 30), seed=st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_expected_counts_are_those_over_all_cuts(words: Words, most: int, seed: int) -> None:
    lattice, scores = lattice_of(words, most, seed)
    expected = dict.fromkeys(scores, 0.0)
    for word, times in words.items():
        every = {parts: probability(parts, scores) for parts in cuts(word, scores)}
        for parts, chance in every.items():
            for part in parts:
                expected[part] += times * chance / sum(every.values())
    found = lattice.expected_counts(array(scores))
    assert found == pytest.approx([expected[piece] for piece in scores], rel=1e-9, abs=1e-12)


@given(words=words_of, most=st.integers(0, 30), seed=st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_pruning_losses_are_those_of_cutting_each_piece_into_others(words: Words, most: int, seed: int) -> None:
    lattice, scores = lattice_of(words, most, seed)
    counts = Counter[str]()
    for word, times in words.items():
        for part in best(word, scores):
            counts[part] += times
    assert lattice.best_counts(array(scores)).tolist() == [counts[piece] for piece in scores]
    expected = []
    for piece in scores:
        if len(piece) == 1:
            expected.append(math.inf)
        elif not counts[piece]:
            expected.append(-math.inf)
        else:
            other = best(piece, {one: score for one, score in scores.items() if one != piece})
            changed = counts[piece] * (len(other) - 1) + counts.total()
            instead = sum(math.log((counts[part] + counts[piece]) / changed) for part in other)
            expected.append(counts[piece] * (math.log(counts[piece] / counts.total()) - instead))
    assert pruning_losses(lattice, array(scores)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def best(word: str, scores: dict[str, float]) -> tuple[str, ...]:
    return max(cuts(word, scores), key=lambda parts: probability(parts, scores))


@given(
    words=st.dictionaries(st.text("ab\0é", min_size=1, max_size=20), st.integers(1, 3), min_size=1, max_size=8),
    most=st.integers(0, 60),
)
@settings(max_examples=80, deadline=None)
def test_first_pieces_are_the_branching_substrings_of_the_highest_count_times_length(words: Words, most: int) -> None:
    reserved = {"ab", "éa"}
    followed: dict[str, Counter[str]] = {}
    for word, times in words.items():
        for first, last in itertools.combinations(range(len(word) + 1), 2):
            if 2 <= last - first <= LONGEST:
                followed.setdefault(word[first:last], Counter())[word[last : last + 1]] += times
    counts = {
        text: next.total()
        for text, next in followed.items()
        if next.total() >= 2 and (len(next) > 1 or "" in next or len(text) == LONGEST) and text not in reserved
    }
    flat = FlatWords(words, characters_of(words))
    found = frequent_substrings(flat, most, reserved)
    expected = sorted(counts, key=lambda text: (-counts[text] * len(text), text))[:most]
    assert found.strings(flat.text) == expected
    assert found.counts.tolist() == [counts[text] for text in expected]


def test_a_piece_of_a_long_word_is_found_at_every_place() -> None:
    # 300 characters of probability 1e-9 each would be 0 without logarithms
    flat = FlatWords({"ab" * 150: 3}, ["a", "b"])
    lattice = Lattice(flat, 2, frequent_substrings(flat, 0, ()))
    assert lattice.expected_counts(np.array([math.log(1e-9)] * 2)).tolist() == [450, 450]


def test_digamma_is_that_of_torch() -> None:
    values = np.concatenate([np.linspace(0.5, 20, 500), np.logspace(0, 12, 100)])
    assert digamma(values) == pytest.approx(torch.digamma(torch.from_numpy(values)).numpy(), rel=1e-8, abs=1e-9)


@cache
def shakespeare() -> list[str]:
    file = Path(trivium.__file__).parent / "assets" / "shakespeare-train.txt.gz"
    return gzip.decompress(file.read_bytes()).decode().split("\n")


@pytest.mark.parametrize(("lines", "size"), [(7000, 1000), pytest.param(40_000, 3000, marks=pytest.mark.full)])
def test_held_out_text_costs_no_more_than_with_the_library_or_sentencepiece(lines: int, size: int) -> None:
    """Every tenth line is held out. With the library's pieces it takes 5 to 10 % more tokens."""
    text = "\n".join(line for place, line in enumerate(shakespeare()[:lines]) if place % 10)
    known = set(text)
    words = [word for line in shakespeare()[:lines:10] for word in line.split() if known.issuperset(word)]
    tokens, score = _measured(Unigram(size=size).build([text]), words)
    for name, other in {"library": _by_library(text, size), "sentencepiece": _by_sentencepiece(text, size)}.items():
        their_tokens, their_score = _measured(other, words)
        assert tokens <= 1.01 * their_tokens, name
        assert score >= 1.01 * their_score, name  # log-probabilities


def _measured(tokenizer: Tokenizer, words: list[str]) -> tuple[int, float]:
    """The tokens of some words and their log-probability."""
    model = json.loads(tokenizer.serialise())["model"]
    ids = [id for word in tokenizer.encode_many(words) for id in word]
    assert model["unk_id"] not in ids
    return len(ids), sum(model["vocab"][id][1] for id in ids)


def _by_library(text: str, size: int) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.Unigram())
    like = library_unigram([], "nfkc", "none")
    inner.normalizer, inner.pre_tokenizer = like.normalizer, like.pre_tokenizer
    trainer = trainers.UnigramTrainer(vocab_size=size - 1, unk_token=UNKNOWN, show_progress=False)
    inner.train_from_iterator([text], trainer)
    learned = json.loads(inner.to_str())["model"]["vocab"]
    scores = [(piece, score) for piece, score in learned if piece != UNKNOWN]
    return LibraryTokenizer(library_unigram(scores, "nfkc", "none"))


def _by_sentencepiece(text: str, size: int) -> Tokenizer:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.split("\n")),
        model_writer=written,
        model_type="unigram",
        vocab_size=size + 1,  # <unk>, <s> and </s> where we have two
        split_by_unicode_script=False,
        split_by_number=False,
        character_coverage=1.0,
        normalization_rule_name="nfkc",
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    scores = [(model.id_to_piece(id), model.get_score(id)) for id in range(3, model.vocab_size())]
    return LibraryTokenizer(library_unigram(scores, "nfkc", "none"))


@pytest.mark.parametrize("size", [100, 500, 1500])
def test_the_size_is_exact_up_to_the_last_piece_that_the_text_has(size: int) -> None:
    assert Unigram(size=size).build(shakespeare()[:2000]).size == size


def test_a_text_without_spaces_is_trained_on_in_parts() -> None:
    syllables = ["ka", "ki", "ku", "ta", "ti", "tu", "ma", "mi", "mu"]
    text = "".join(random.Random(0).choices(syllables, k=20_000))
    scores = dict(train_unigram({text: 1}, characters_of({text: 1}), size=15))
    assert set(scores) == {*"kmtaiu", *syllables}


def test_more_words_than_fit_are_left_out_in_any_order_but_not_their_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "MOST_CHARACTERS", 3000)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=6)) for _ in range(2000)]
    frequent = words[:200] * 5
    digests = set()
    for _ in range(3):
        rng.shuffle(words)
        tokenizer = Unigram(size=300).build([" ".join(frequent), " ".join([*words, "xyz"])])
        assert UNKNOWN not in {tokenizer.piece(id) for id in tokenizer.encode("z y x")}
        digests.add(tokenizer.digest)
    assert len(digests) == 1
    kept = training._training_words(Counter(frequent + words))
    assert sum(map(len, kept)) <= 3000
    assert set(frequent) <= set(kept)
