"""The kinds that a recipe names: what each learns, and that learning again gives the same file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import trivium.text.kinds
from trivium.errors import ConfigError, DataError
from trivium.text.kinds import TOKENIZERS, Bpe, Bytes, Chars, EndOfWordBpe, File, Unigram, WordPiece, Words
from trivium.text.library import END, UNKNOWN


def test_the_table_names_every_kind_and_each_has_defaults() -> None:
    assert {name: cls() for name, cls in TOKENIZERS.items()} == {
        "chars": Chars(),
        "bytes": Bytes(),
        "bpe": Bpe(size=4096, min_count=2),
        "word-bpe": EndOfWordBpe(size=4096, min_count=2, symbol="separate", tie="pairs"),
        "wordpiece": WordPiece(size=4096, min_count=2, case="lower", score="frequency", longest=100),
        "unigram": Unigram(size=4096, normal="nfkc", fallback="none"),
        "words": Words(min_count=1),
        "file": File(path=""),
    }


def test_characters_get_their_ids_by_code_point() -> None:
    chars = Chars().build(["naïve\n", "zebra 😀"])
    seen = sorted(set("naïve\nzebra 😀"))
    assert [chars.decode([id]) for id in range(chars.size)] == [*seen, UNKNOWN, END]


def test_bytes_are_256_ids_and_the_end() -> None:
    tokenizer = Bytes().build([])
    assert (tokenizer.size, tokenizer.end) == (257, 256)
    assert [tokenizer.piece_bytes(id) for id in range(256)] == [bytes([byte]) for byte in range(256)]


def test_pieces_never_cross_a_border_of_the_gpt2_pre_split() -> None:
    # min_count 1 and room enough: every pre-split word of the text becomes one piece, so the pieces show the borders.
    text = "I'll  go, it's 2 a.m.  ok \n"
    tokenizer = Bpe(size=1000, min_count=1).build([text])
    shown = "I|'ll|Ġ|Ġgo|,|Ġit|'s|Ġ2|Ġa|.|m|.|Ġ|Ġok|ĠĊ"
    assert "|".join(map(tokenizer.piece, tokenizer.encode(text))) == shown


def test_the_first_merges_are_the_most_frequent_pairs() -> None:
    # The corpus of the CS224N slides, one word per line: a slow plain count finds the same pairs.
    words = Counter({"low": 5, "lower": 2, "newest": 6, "widest": 3})
    tokenizer = Bpe(size=257 + 4).build([f"{word}\n" * times for word, times in words.items()])
    learned = [tokenizer.piece(id) for id in range(256, tokenizer.size - 1)]
    assert learned == _merges({tuple(word): times for word, times in words.items()}, 4)


def _merges(words: dict[tuple[str, ...], int], wanted: int) -> list[str]:
    learned: list[str] = []
    for _ in range(wanted):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))  # ties here are between single letters only
        learned.append("".join(best))
        words = {_merged(word, best): times for word, times in words.items()}
    return learned


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def test_the_size_counts_everything_and_is_smaller_for_a_small_text() -> None:
    words = [" ".join(f"w{n * n}" for n in range(400))] * 2
    assert Bpe(size=300).build(words).size == 300
    assert Bpe(size=300).build(words).end == 299
    assert Bpe(size=300).build([]).size == 257
    assert Bpe(size=257).build(words).encode("w16") != [ord("w"), ord("1"), ord("6")]  # ids by GPT-2's alphabet
    assert Bpe(size=300, min_count=3).build(["ab ab"]).size == 257
    assert Bpe(size=300, min_count=2).build(["ab ab"]).size == 258


TRAIN = """
import gzip, json, random, sys
from pathlib import Path
import trivium
from trivium.text.kinds import Bpe, Bytes, Chars, EndOfWordBpe, Unigram, WordPiece, Words
order, full = int(sys.argv[1]), sys.argv[2] == "full"
rng = random.Random(0)
if full:
    file = Path(trivium.__file__).parent / "assets" / "shakespeare-train.txt.gz"
    texts = gzip.decompress(file.read_bytes()).decode().split("\\n\\n")
else:
    words = ["".join(rng.choices("abcdeé,", k=rng.randrange(1, 9))) for _ in range(800)]
    texts = [" ".join(rng.choices(words, k=30)) for _ in range(600)]
random.Random(order).shuffle(texts)
size = 3000 if full else 700
kinds = [Chars(), Bytes(), Words(), Bpe(size=size)]
kinds += [EndOfWordBpe(size=size, **given) for given in ({}, {"symbol": "fused"}, {"tie": "ids"})]
for score in ("frequency", "likelihood"):
    kinds += [WordPiece(size=size, score=score, case=case) for case in ("lower", "keep")]
for normal in ("nfkc", "identity"):
    kinds += [Unigram(size=size, normal=normal, fallback=fallback) for fallback in ("none", "bytes")]
print(json.dumps({repr(kind): kind.build(texts).digest for kind in kinds}))
"""


@pytest.mark.parametrize("length", ["short", pytest.param("full", marks=pytest.mark.full)])
def test_every_process_trains_the_same_file_from_the_texts_in_any_order(length: str) -> None:
    """For every kind and variant, whatever seeds its hashes and however many threads the library has."""
    settings = [("0", "1", "true"), ("1", "2", "true"), ("2", "4", "true"), ("3", "3", "false"), ("4", "1", "false")]
    first, *others = (_trained(order, length, *each) for order, each in enumerate([*settings, ("random", "2", "true")]))
    assert len(first) == 15
    for other in others:
        assert other == first


def _trained(order: int, length: str, hashes: str, threads: str, parallel: str) -> dict[str, str]:
    root = str(Path(trivium.text.kinds.__file__).parents[2])
    environment = os.environ | {
        "PYTHONPATH": root,
        "PYTHONHASHSEED": hashes,
        "RAYON_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": parallel,
    }
    command = [sys.executable, "-c", TRAIN, str(order), length]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=300)
    digests: dict[str, str] = json.loads(ended.stdout)
    return digests


def test_another_text_gives_another_digest() -> None:
    assert Bpe(size=300).build(["ab ab"]).digest != Bpe(size=300).build(["ac ac"]).digest
    assert Chars().build(["ab"]).digest != Chars().build(["ac"]).digest


def test_the_spelling_of_the_end_in_a_training_text_is_learned_as_text() -> None:
    tokenizer = Bpe(size=600).build([f"{END} "] * 100)
    assert tokenizer.end not in tokenizer.encode(END)
    assert [tokenizer.piece(id) for id in range(tokenizer.size)].count(END) == 1


@pytest.mark.parametrize(
    "kind", [Chars(), Bpe(), EndOfWordBpe(), WordPiece(), WordPiece(score="likelihood"), Unigram()], ids=repr
)
def test_a_lone_surrogate_in_a_training_text_is_refused(kind: Any) -> None:
    with pytest.raises(DataError, match=r"lone surrogate, U\+D800, at character 3"):
        kind.build(["fine", "bad\ud800"])


def test_a_size_below_the_bytes_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        Bpe(size=256, min_count=0)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["size", "min_count"]


def test_a_file_is_opened_as_it_is(tmp_path: Path) -> None:
    made = Bpe(size=300).build(["to be or not to be"] * 9)
    made.save(tmp_path / "tokenizer.json")
    assert File(path=str(tmp_path)).build(["other text"]).digest == made.digest
    with pytest.raises(ConfigError, match=r"tokenizer.path: names no file"):
        File().build([])


def test_a_generator_of_texts_is_read_once_and_is_enough() -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("abc ", k=50)) for _ in range(50)]
    kinds: list[Any] = [Chars(), Bpe(size=280), Words(), EndOfWordBpe(size=80), WordPiece(size=80), Unigram(size=80)]
    for kind in kinds:
        assert kind.build(text for text in texts).digest == kind.build(texts).digest
