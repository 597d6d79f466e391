"""Pairs from files to shards: line by line or from columns, one split by source sentence, nothing lost in silence."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.config import load, overrides
from trivium.data.bucketing import Pairs
from trivium.data.config import DataConfig
from trivium.data.pairs import build, pair_files, paired, read_pairs, training_texts
from trivium.data.shards import Shards, changed_sources, open_shards
from trivium.data.show import preview
from trivium.data.sources import held_out
from trivium.errors import ConfigError, DataError
from trivium.text.kinds import Bpe, Bytes
from trivium.text.tokenizer import Tokenizer

Text = tuple[str, str]
LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\t\ufeff"), min_size=1, max_size=12)
LINES = st.lists(st.tuples(LINE, LINE), min_size=1, max_size=12)
SOME: list[Text] = [("a dog", "ein Hund"), ("a cat", "eine Katze"), ("two dogs", "zwei Hunde")]


def silent(*_: object) -> None:
    """A watcher that does not watch."""


def bytewise() -> Tokenizer:
    return Bytes().build([])


def two_files(folder: Path, texts: Sequence[Text], name: str = "train") -> dict[str, Any]:
    paths = {"source": folder / f"{name}.en", "target": folder / f"{name}.de"}
    for side, path in enumerate(paths.values()):
        path.write_bytes("".join(f"{pair[side]}\n" for pair in texts).encode())
    return {key: str(path) for key, path in paths.items()}


def one_file(folder: Path, texts: Sequence[Text], name: str = "pairs.tsv") -> str:
    path = folder / name
    path.write_bytes("".join(f"{a}\t{b}\tby somebody\n" for a, b in texts).encode())
    return str(path)


def quick(
    config: DataConfig, folder: Path, tokenizer: Tokenizer | None = None, said: list[str] | None = None
) -> Shards:
    say = silent if said is None else said.append
    return build(config, tokenizer or bytewise(), folder, progress=silent, say=say)


def told(shards: Shards, split: str = "train") -> list[Text]:
    """The pairs of a split as text."""
    pairs = Pairs(shards.train if split == "train" else shards.valid, 10_000)
    result = []
    for row in range(len(pairs)):
        batch = pairs.take(np.array([row]))
        sides = [batch.ids[0, :-1][batch.documents[0] == side][1:].tolist() for side in (1, 2)]
        result.append((bytewise().decode(sides[0]), bytewise().decode(sides[1])))
    return result


@settings(max_examples=60, deadline=None)
@given(LINES, st.sampled_from(["", "\r"]))
def test_pairs_come_back_as_they_were_whatever_ends_lines_elsewhere(texts: list[Text], ending: str) -> None:
    """U+2028, U+0085, form feeds and lone returns are no ends of lines: one split there would shift all that follow."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        written = [(a + ending, b + ending) for a, b in texts]
        wanted = [(a.strip(), b.strip()) for a, b in texts if a.strip() and b.strip()]
        if not wanted:
            return
        first = quick(DataConfig(**two_files(folder, written), valid=0.0), folder / "first")
        second = quick(DataConfig(pairs=one_file(folder, texts), valid=0.0), folder / "second")
        assert told(first) == told(second) == wanted
        assert first.digest == second.digest
        assert paired(first)
        assert first.train.text_bytes == sum(len((a + b).encode()) for a, b in wanted)


def test_swapping_the_sides_swaps_every_pair(tmp_path: Path) -> None:
    paths = two_files(tmp_path, SOME)
    turned = {"source": paths["target"], "target": paths["source"]}
    wanted = [(b, a) for a, b in SOME]
    assert told(quick(DataConfig(**paths, valid=0.0), tmp_path / "a")) == SOME
    assert told(quick(DataConfig(**turned, valid=0.0), tmp_path / "b")) == wanted
    tsv = one_file(tmp_path, SOME)
    assert told(quick(DataConfig(pairs=tsv, columns=(1, 0), valid=0.0), tmp_path / "c")) == wanted
    third = told(quick(DataConfig(pairs=tsv, columns=(2, 0), valid=0.0), tmp_path / "d"))
    assert third == [("by somebody", a) for a, _ in SOME]


def test_compressed_files_are_read_and_a_last_line_needs_no_newline(tmp_path: Path) -> None:
    (tmp_path / "a.en.gz").write_bytes(gzip.compress("\ufeffa dog\na cat".encode()))
    (tmp_path / "a.de.xz").write_bytes(lzma.compress(b"ein Hund\neine Katze\n"))
    config = DataConfig(source=str(tmp_path / "a.en.gz"), target=str(tmp_path / "a.de.xz"), valid=0.0)
    assert told(quick(config, tmp_path / "out")) == SOME[:2]


def test_a_pair_with_an_empty_side_is_left_out_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    texts = [("a", "b"), ("", "c"), ("d", " \t "), ("", ""), ("e", "f")]
    shards = quick(DataConfig(**two_files(tmp_path, texts), valid=0.0), tmp_path / "two", said=said)
    assert told(shards) == [("a", "b"), ("e", "f")]
    (tmp_path / "x.tsv").write_text("a\tb\n\tc\nd\t\n\ne\tf\n")
    assert told(quick(DataConfig(pairs=str(tmp_path / "x.tsv"), valid=0.0), tmp_path / "one", said=said)) == told(
        shards
    )
    assert said == ["pairs with an empty side, which are left out: 3"] * 2


@pytest.mark.parametrize("lines", [(3, 2), (2, 3), (5000, 4999)])
def test_files_of_unequal_length_are_refused_with_both_counts(tmp_path: Path, lines: tuple[int, int]) -> None:
    for name, count in zip(("a.en", "a.de"), lines, strict=True):
        (tmp_path / name).write_text("x y\n" * count)
    config = DataConfig(source=str(tmp_path / "a.en"), target=str(tmp_path / "a.de"))
    with pytest.raises(DataError) as refused:
        quick(config, tmp_path / "out")
    assert str(refused.value) == (
        f"{tmp_path}/a.en has {lines[0]:,} lines and {tmp_path}/a.de has {lines[1]:,}: line by line they are no "
        "pairs; name two files that were made together"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.de", "a.en"]


def test_no_source_sentence_lies_in_both_parts(tmp_path: Path) -> None:
    """Tatoeba has several translations of one sentence; the split is that of `held_out`, so it never changes."""
    texts = [(f"sentence {n // 3}", f"Satz {n}") for n in range(600)]
    shards = quick(DataConfig(pairs=one_file(tmp_path, texts), valid=0.2), tmp_path / "out")
    train, valid = told(shards), told(shards, "valid")
    assert {a for a, _ in train}.isdisjoint(a for a, _ in valid)
    assert sorted(train + valid) == sorted(texts)
    assert valid == [pair for pair in texts if held_out(pair[0], 0.2)]
    assert 80 < len(valid) < 160


def test_validation_pairs_may_have_files_of_their_own(tmp_path: Path) -> None:
    train, valid = two_files(tmp_path, SOME), two_files(tmp_path, SOME[:1], "valid")
    config = DataConfig(**train, **{f"valid_{side}": path for side, path in valid.items()})
    shards = quick(config, tmp_path / "two")
    assert (told(shards), told(shards, "valid")) == (SOME, SOME[:1])
    config = DataConfig(pairs=one_file(tmp_path, SOME), valid=one_file(tmp_path, SOME[1:], "valid.tsv"))
    shards = quick(config, tmp_path / "one")
    assert (told(shards), told(shards, "valid")) == (SOME, SOME[1:])


def test_one_tokenizer_is_trained_on_both_sides_of_the_training_pairs(tmp_path: Path) -> None:
    texts = [("the dog " * 3, "der Hund " * 3), ("", "nur rechts")] * 20 + [(f"held {n}", "out") for n in range(50)]
    config = DataConfig(pairs=one_file(tmp_path, texts), valid=0.3)
    seen = list(training_texts(config, read=silent))
    wanted = [side.strip() for pair in texts if all(pair) and not held_out(pair[0].strip(), 0.3) for side in pair]
    assert seen == wanted
    tokenizer = Bpe(size=300).build(seen)
    assert len(tokenizer.encode("the dog der Hund")) < 10
    shards = quick(config, tmp_path / "out", tokenizer)
    with pytest.raises(DataError, match="was built with another tokenizer"):
        open_shards(tmp_path / "out", tokenizer_digest=bytewise().digest)
    assert open_shards(tmp_path / "out", tokenizer_digest=tokenizer.digest, verify=True).digest == shards.digest


def test_a_source_that_changed_is_named(tmp_path: Path) -> None:
    """R11."""
    paths = two_files(tmp_path, SOME)
    shards = quick(DataConfig(**paths, valid=0.0), tmp_path / "out")
    assert changed_sources(shards) == []
    assert sorted(entry["path"] for entry in shards.manifest["sources"]) == sorted(paths.values())
    Path(paths["target"]).write_text("ein Hund\neine Katze\ndrei Hunde\n")
    assert changed_sources(shards) == [Path(paths["target"])]


def test_progress_reaches_the_size_of_all_files(tmp_path: Path) -> None:
    paths = two_files(tmp_path, SOME * 50)
    ticks: list[tuple[int, int]] = []
    build(
        DataConfig(**paths, valid=0.0),
        bytewise(),
        tmp_path / "out",
        progress=lambda at, of: ticks.append((at, of)),
        say=silent,
    )
    size = sum(Path(path).stat().st_size for path in paths.values())
    assert ticks[-1] == (size, size)


CASES: list[tuple[dict[str, Any], str]] = [
    ({"source": "a"}, "data.target: data.source is one side of pairs; name the file of the other side"),
    ({"target": "a"}, "data.source: data.target is one side of pairs; name the file of the other side"),
    ({"source": "a", "target": "b", "pairs": "c"}, "data.pairs: the pairs come from data.source and data.target"),
    ({"source": "a", "target": "b", "paths": ["c"]}, "data.paths: a run reads text or pairs, not both"),
    ({"pairs": "a", "weights": [1.0]}, "data.weights: a run reads text or pairs, not both"),
    ({"pairs": "a", "shift": "epoch"}, "data.shift: pairs are rows of their own, which are not cut"),
    ({"source": "a", "target": "b", "valid_source": "c"}, "data.valid_target: data.valid_source is one side of pairs"),
    ({"pairs": "a", "valid_source": "c", "valid_target": "d"}, "data.valid_source: it stands beside data.source"),
    ({"source": "a", "target": "b", "valid": "c"}, "data.valid: pairs from two files are validated by two"),
    ({"pairs": "a", "columns": [1, 1]}, r"data.columns: \[1, 1\] are not two columns, counted from 0; try \[0, 1\]"),
    ({"pairs": "a", "columns": [1]}, r"data.columns: \[1\] are not two columns"),
    ({"pairs": "a", "columns": [0, -1]}, r"data.columns: \[0, -1\] are not two columns"),
]


@pytest.mark.parametrize(("given_keys", "message"), CASES, ids=[message[:40] for _, message in CASES])
def test_settings_that_do_not_go_together_are_refused(given_keys: dict[str, Any], message: str) -> None:
    from trivium.training.recipe import Recipe

    with pytest.raises(ConfigError, match=message):
        load(Recipe, overrides({f"data.{key}": value for key, value in given_keys.items()}))


def broken(folder: Path, make: Callable[[Path], DataConfig], message: str) -> None:
    folder.mkdir()
    config = make(folder)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(DataError, match=message):
        quick(config, folder / "out")
    assert sorted(path.name for path in folder.iterdir()) == before


def test_files_that_cannot_be_pairs_are_refused_in_a_sentence(tmp_path: Path) -> None:
    def text(folder: Path, content: bytes) -> str:
        (folder / "x.tsv").write_bytes(content)
        return str(folder / "x.tsv")

    broken(tmp_path / "1", lambda f: DataConfig(pairs=str(f / "no")), r"data\.pairs: .*/no does not exist")
    broken(
        tmp_path / "2",
        lambda f: DataConfig(pairs=text(f, b"a\tb\nc\n")),
        r"x\.tsv, line 2 has 1 column between tabs, and data\.columns asks for number 1, counted from 0; mend the line",
    )
    broken(tmp_path / "3", lambda f: DataConfig(pairs=text(f, b"a\tb\nc\t\xff\n")), r"is not UTF-8 text \(byte 6\)")
    broken(tmp_path / "4", lambda f: DataConfig(pairs=text(f, b"\t\n\n")), "there is no pair to learn from")
    broken(
        tmp_path / "5",
        lambda f: DataConfig(pairs=text(f, b"a\tb\n")),
        r"no pair is kept for validation; raise data\.valid, or set it to 0",
    )
    broken(tmp_path / "6", lambda f: DataConfig(pairs=text(f, b"")), "x.tsv is empty")

    def folder_named(folder: Path) -> DataConfig:
        two_files(folder, SOME)
        (folder / "inner").mkdir()
        (folder / "inner" / "a.txt").write_text("a")
        return DataConfig(source=str(folder / "inner"), target=str(folder / "train.de"))

    broken(tmp_path / "7", folder_named, r"data\.source: .*inner is a folder; name a file of sentences")

    def cut(folder: Path) -> DataConfig:
        whole = gzip.compress(b"a\tb\n" * 100_000)
        (folder / "x.tsv.gz").write_bytes(whole[: len(whole) // 2])
        return DataConfig(pairs=str(folder / "x.tsv.gz"))

    broken(tmp_path / "8", cut, r"x\.tsv\.gz is a damaged \.gz file")


def test_a_row_of_pairs_is_shown_as_it_lies_in_the_shards(tmp_path: Path) -> None:
    shards = quick(DataConfig(**two_files(tmp_path, [("ab", "c")]), valid=0.0), tmp_path / "out")
    cells = preview(shards, bytewise(), 10, 0, "train")
    assert [(cell.piece, cell.document) for cell in cells] == [
        ("<|endoftext|>", 1),
        ("a", 1),
        ("b", 1),
        ("<|endoftext|>", 2),
        ("c", 2),
    ]
    with pytest.raises(DataError, match="has no row 1"):
        preview(shards, bytewise(), 10, 1, "train")


def test_tatoeba_is_read_whole(shared: Path) -> None:
    path = shared / "data" / "tatoeba" / "deu.txt.xz"
    if not path.is_file():
        pytest.skip("needs Tatoeba")
    config = DataConfig(pairs=str(path))
    files, none = pair_files(config)
    texts = list(read_pairs(files, config.columns, read=silent))
    assert (len(texts), none) == (169_813, [])
    assert all(source and target for source, target in texts)
    plain = [line.split("\t") for line in lzma.decompress(path.read_bytes()).decode().split("\n")[:-1]]
    assert [(a.strip(), b.strip()) for a, b, *_ in plain] == texts
    valid = {source for source, _ in texts if held_out(source, 0.01)}
    repeated = len(texts) - len({source for source, _ in texts})
    assert repeated > 30_000
    assert 0.005 < len(valid) / len({source for source, _ in texts}) < 0.015
