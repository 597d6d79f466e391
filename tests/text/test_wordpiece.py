"""WordPiece: BERT's examples, both ways to learn it, and a vocabulary that the world knows."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import trivium
from trivium.errors import ConfigError
from trivium.text.kinds import WordPiece
from trivium.text.library import END, UNKNOWN_WORD, library_wordpiece
from trivium.text.tokenizer import LibraryTokenizer, Tokenizer, open_tokenizer
from trivium.text.wordpiece import alphabet, learn_by_frequency, learn_by_likelihood, split

PIECES = ["un", "##aff", "##able", "play", "##ing", "a", "##a", ",", "!", "cafe", "東", "京", "[", "]", "unk"]
BERT = LibraryTokenizer(library_wordpiece(PIECES, "lower", 100))
TEXT = ["the cat sat on the mat; the café is naïve, the question is not. " * 8]


def shown(tokenizer: Tokenizer, text: str) -> str:
    return " ".join(map(tokenizer.piece, tokenizer.encode(text)))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("unaffable", "un ##aff ##able"),
        ("unaffablez", "[UNK]"),
        ("playing", "play ##ing"),
        ("Playing,unaffable!", "play ##ing , un ##aff ##able !"),
        ("a" * 100, "a" + " ##a" * 99),
        ("a" * 101, "[UNK]"),
        ("Café CAFE\u0301", "cafe cafe"),
        ("東京", "東 京"),
        ("a\x00\u200da", "a ##a"),
        ("[UNK]", "[ unk ]"),
        ("", ""),
    ],
)
def test_berts_examples(text: str, pieces: str) -> None:
    assert shown(BERT, text) == pieces


def test_the_longest_word_is_an_option() -> None:
    original = LibraryTokenizer(library_wordpiece(PIECES, "lower", 200))
    assert shown(original, "a" * 200) == "a" + " ##a" * 199
    assert shown(original, "a" * 201) == UNKNOWN_WORD
    assert open_again(original).encode("a" * 200) == original.encode("a" * 200)


def open_again(tokenizer: Tokenizer) -> Tokenizer:
    return LibraryTokenizer(tokenizers.Tokenizer.from_str(tokenizer.serialise()))


def test_decoding_joins_words_and_puts_no_space_before_punctuation() -> None:
    assert BERT.decode(BERT.encode("Unaffable ,  playing!")) == "unaffable, playing!"
    assert BERT.decode(BERT.encode("un zzz a")) == "un [UNK] a"


def test_spans_point_into_the_original_text() -> None:
    text = "  Unaffable CAFE\u0301, 東京"
    spelled = [text[first:last] for first, last in BERT.spans(text)]
    assert spelled == ["Un", "aff", "able", "CAFE", ",", "東", "京"]


def test_a_piece_starts_a_word_unless_it_continues_one() -> None:
    starts = {BERT.piece(id) for id in range(BERT.size) if BERT.starts_word(id)}
    assert starts == {*(piece for piece in PIECES if not piece.startswith("##")), UNKNOWN_WORD, END}
    assert {BERT.piece(id) for id in range(BERT.size) if BERT.ends_word(id)} == {END}


words = st.dictionaries(st.text("abc", min_size=1, max_size=7), st.integers(1, 5), min_size=1, max_size=12)


@given(words=words, size=st.integers(1, 40), min_count=st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_likelihood_merges_the_pair_of_the_highest_ratio(words: dict[str, int], size: int, min_count: int) -> None:
    assert learn_by_likelihood(words, size=size, min_count=min_count) == _plain(words, size, min_count, "likelihood")


@given(words=words, size=st.integers(1, 40), min_count=st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_frequency_merges_the_most_frequent_pair(words: dict[str, int], size: int, min_count: int) -> None:
    assert learn_by_frequency(words, size=size, min_count=min_count) == _plain(words, size, min_count, "frequency")


def _plain(words: dict[str, int], size: int, min_count: int, score: str, *, to_tie: bool = False) -> list[str]:
    """count(ab) / (count(a) count(b)) in exact fractions or count(ab), everything counted anew for every merge."""
    cut = {word: list(split(word)) for word in words}
    pieces = alphabet(words)
    while len(pieces) < size:
        single = Counter(dict.fromkeys(pieces, 0))
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in cut.items():
            for piece in parts:
                single[piece] += words[word]
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        scores = {
            pair: Fraction(count, single[pair[0]] * single[pair[1]] if score == "likelihood" else 1)
            for pair, count in pairs.items()
            if count >= min_count
        }
        if not scores:
            break
        best = min(scores, key=lambda pair: (-scores[pair], pair))
        if to_tie and [*scores.values()].count(scores[best]) > 1:
            break
        made = best[0] + best[1].removeprefix("##")
        for word, parts in cut.items():
            out: list[str] = []
            place = 0
            while place < len(parts):
                found = tuple(parts[place : place + 2]) == best
                out.append(made if found else parts[place])
                place += 2 if found else 1
            cut[word] = out
        pieces += [made] if made not in pieces else []
    return pieces


def test_without_ties_frequency_gives_the_merges_of_the_library() -> None:
    """The library breaks ties by ids that it gives in the order of a hash, so only texts without ties compare."""
    rng = random.Random(0)
    merged = 0
    for _ in range(40):
        words = {"".join(rng.choices("abcde", k=rng.randrange(1, 7))): rng.randrange(1, 2000) for _ in range(40)}
        texts = [f"{word} " * times for word, times in words.items()]
        pieces = _plain(words, 60, 2, "frequency", to_tie=True)
        assert pieces == _by_library(texts, len(pieces))
        assert pieces == _learned(WordPiece(size=len(pieces) + 2).build(texts))[:-2]
        merged += len(pieces) - len(alphabet(words))
    assert merged > 400


def test_held_out_text_has_as_many_tokens_as_with_the_library() -> None:
    file = Path(trivium.__file__).parent / "assets" / "shakespeare-train.txt.gz"
    lines = gzip.decompress(file.read_bytes()).decode().split("\n")
    texts = [line for place, line in enumerate(lines) if place % 10]
    ours = WordPiece(size=3000).build(texts)
    library = LibraryTokenizer(library_wordpiece(_by_library(texts, 2998), "lower", 100))
    ours_count, their_count = (len(each.encode(" ".join(lines[::10]))) for each in (ours, library))
    assert ours_count == pytest.approx(their_count, rel=0.003)


def _by_library(texts: list[str], size: int) -> list[str]:
    """The pieces of the library's trainer; characters, which it numbers at random, in our order."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token=UNKNOWN_WORD))
    like = library_wordpiece([], "lower", 100)
    inner.normalizer, inner.pre_tokenizer = like.normalizer, like.pre_tokenizer
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=size, min_frequency=2, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    vocabulary = inner.get_vocab()
    single = [piece for piece in vocabulary if len(piece.removeprefix("##")) == 1]
    merged = sorted(vocabulary.keys() - single, key=vocabulary.__getitem__)
    return [*sorted(single, key=lambda piece: (piece.startswith("##"), piece)), *merged]


def test_a_word_that_is_too_long_to_encode_adds_only_its_characters() -> None:
    words = {"ab" * 60: 50, "cd": 1}
    for learn in (learn_by_frequency, learn_by_likelihood):
        assert learn(words, size=30, min_count=1, longest=100) == ["a", "c", "##a", "##b", "##d", "cd"]


def test_likelihood_prefers_parts_that_are_seldom_apart() -> None:
    # "qu" is rarer than "th", but q is never without u.
    text = ["the that this then than tent hot oath the " * 20 + "quit quiz quay " * 3 + "un up us " * 20]
    likely = [piece for piece in _learned(WordPiece(size=60, score="likelihood").build(text)) if len(piece) == 2]
    frequent = [piece for piece in _learned(WordPiece(size=60).build(text)) if len(piece) == 2]
    assert "qu" in likely
    assert "th" not in likely[: likely.index("qu")]
    assert "th" in frequent
    assert "qu" not in frequent[: frequent.index("th")]


def _learned(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.piece(id) for id in range(tokenizer.size)]


@pytest.mark.parametrize("score", ["frequency", "likelihood"])
def test_every_word_of_the_texts_comes_back_in_lower_case_without_accents(score: str) -> None:
    tokenizer = WordPiece(size=200, score=score).build(TEXT)  # type: ignore[arg-type]
    assert UNKNOWN_WORD not in shown(tokenizer, TEXT[0])
    plain = TEXT[0].strip().replace("é", "e").replace("ï", "i")
    assert tokenizer.decode(tokenizer.encode(TEXT[0])) == plain.replace(";", " ;")  # joined only to .,!?


def test_case_and_accents_can_be_kept() -> None:
    tokenizer = WordPiece(size=200, case="keep").build(["Ärger im Café " * 5])
    assert tokenizer.decode(tokenizer.encode("Café im Ärger")) == "Café im Ärger"


def test_the_size_counts_everything() -> None:
    rng = random.Random(0)
    text = [" ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(2000))]
    for score in ("frequency", "likelihood"):
        assert WordPiece(size=60, score=score).build(text).size == 60
    with pytest.raises(ConfigError, match=r"tokenizer.size: 9 is too small for the characters of the texts; at least"):
        WordPiece(size=9).build(TEXT)
    with pytest.raises(ConfigError, match="longest: 0 is less than 1"):
        WordPiece(longest=0)


def test_training_texts_with_special_spellings_teach_only_their_words() -> None:
    tokenizer = WordPiece(size=300).build([f"{END} [UNK] [PAD] " * 30])
    assert tokenizer.end == tokenizer.size - 1
    assert shown(tokenizer, END) == "< | endoftext | >"
    assert tokenizer.extended(["[PAD]"]).specials["[PAD]"] == tokenizer.size


def test_berts_own_vocabulary_gives_the_ids_of_transformers(shared: Path, count: Callable[[int, int], int]) -> None:
    file = shared / "data" / "bert-vocab" / "vocab.txt"
    if not file.is_file():
        pytest.skip("needs BERT's vocab.txt")
    pieces = file.read_text(encoding="utf-8").splitlines()
    model = tokenizers.BertWordPieceTokenizer(str(file))
    ours = LibraryTokenizer(library_wordpiece((piece for piece in pieces if piece != UNKNOWN_WORD), "lower", 100))
    rng = random.Random(0)
    known = [piece for piece in pieces if piece.isalpha()]
    for _ in range(count(200, 5000)):
        text = " ".join(rng.choice([rng.choice(known), "".join(rng.choices("abcé-'1東\n", k=6))]) for _ in range(8))
        theirs = model.encode(text, add_special_tokens=False)
        assert shown(ours, text).split() == theirs.tokens
        assert ours.spans(text) == theirs.offsets


def test_a_file_of_another_case_opens_as_what_it_is(tmp_path: Path) -> None:
    for case in ("lower", "keep"):
        made = WordPiece(size=100, case=case).build(["Ab ab"] * 3)
        made.save(tmp_path / f"{case}.json")
        again = open_tokenizer(tmp_path / f"{case}.json")
        assert json.loads(again.serialise())["normalizer"]["lowercase"] == (case == "lower")
        assert again.encode("AB Ab") == made.encode("AB Ab")
