"""GPT-2's own files give the ids that the rest of the world gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from trivium.text.library import END, with_end
from trivium.text.tokenizer import LibraryTokenizer, Tokenizer, open_tokenizer


@pytest.fixture(scope="module")
def gpt2_files(shared: Path) -> tuple[str, str]:
    folder = shared / "data" / "gpt2-bpe"
    if not folder.is_dir():
        pytest.skip("needs GPT-2's encoder.json and vocab.bpe")
    return str(folder / "encoder.json"), str(folder / "vocab.bpe")


@pytest.fixture(scope="module")
def gpt2(gpt2_files: tuple[str, str]) -> Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*gpt2_files))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return LibraryTokenizer(with_end(inner))


def test_gpt2_has_its_published_size_and_ids(gpt2: Tokenizer) -> None:
    assert (gpt2.kind, gpt2.size, gpt2.end) == ("bpe", 50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert gpt2.piece(995) == "Ġworld"
    assert gpt2.piece_bytes(995) == b" world"


def test_no_piece_crosses_the_pre_split_of_the_example(gpt2: Tokenizer) -> None:
    pieces = [gpt2.piece(id) for id in gpt2.encode("I'll  go, it's 2 a.m.  ok \n")]
    words = ["I", "'ll", "Ġ", "Ġgo", ",", "Ġit", "'s", "Ġ2", "Ġa", ".", "m", ".", "Ġ", "Ġok", "ĠĊ"]
    assert pieces == [*words[:-1], "Ġ", "Ċ"]  # GPT-2 learned no piece for a space before a line's end


def test_random_lines_get_the_ids_of_the_library(
    gpt2: Tokenizer, gpt2_files: tuple[str, str], count: Callable[[int, int], int]
) -> None:
    oracle = tokenizers.ByteLevelBPETokenizer(*gpt2_files)
    rng = random.Random(0)
    lines = ["", *(_line(rng) for _ in range(count(1000, 10_000)))]
    assert gpt2.encode_many(lines) == [oracle.encode(line).ids for line in lines]
    assert list(map(gpt2.decode, gpt2.encode_many(lines))) == lines


def _line(rng: random.Random) -> str:
    choices: list[Callable[[], str]] = [
        lambda: rng.choice(["def f(x):\n\treturn x", "for i in range(10):\n    pass", "don't", " I'LL", "a.m. ", "  "]),
        lambda: chr(rng.randrange(0x20, 0x3000)),
        lambda: chr(rng.randrange(0x1F300, 0x1FAFF)),
        lambda: str(rng.randrange(10 ** rng.randrange(1, 40))),
        lambda: "".join(rng.choices("etaoin shrdlu", k=8)),
    ]
    return "".join(rng.choice(choices)() for _ in range(rng.randrange(12)))


def test_a_saved_gpt2_keeps_its_ids_and_its_end_out_of_texts(gpt2: Tokenizer, tmp_path: Path) -> None:
    gpt2.save(tmp_path / "tokenizer.json")
    again = open_tokenizer(tmp_path / "tokenizer.json")
    assert again.digest == gpt2.digest
    assert again.encode(f"one{END}two") == gpt2.encode(f"one{END}two")
    assert again.end not in again.encode(f"one{END}two")
