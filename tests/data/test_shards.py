from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trivium.config import dump, load
from trivium.data.config import DataConfig
from trivium.data.shards import Shards, Stream, build, built_shards, changed_sources, open_shards
from trivium.data.sources import held_out
from trivium.errors import DataError
from trivium.text.adopt import Frame
from trivium.text.kinds import Bpe, Bytes
from trivium.text.pieces import Joint
from trivium.text.tokenizer import Tokenizer

ALPHABET = st.characters(exclude_categories=["Cs"], exclude_characters="\f\ufeff")
DOCUMENTS = st.lists(st.text(ALPHABET, min_size=1, max_size=30), min_size=1, max_size=12)


@cache
def bytewise() -> Tokenizer:
    return Bytes().build([])


@cache
def bpe() -> Tokenizer:
    return Bpe(size=300).build(["the naïve don't 1234 " * 50, "the cat sat on the mat " * 50])


def quick(config: DataConfig, tokenizer: Tokenizer, folder: Path, said: list[str] | None = None) -> Shards:
    say = said.append if said is not None else lambda _: None
    return build(config, tokenizer, folder, progress=lambda *_: None, say=say)


def write(folder: Path, documents: Sequence[str], name: str = "a.txt") -> str:
    path = folder / name
    path.write_bytes("\f".join(documents).encode())
    return str(path)


def decoded(stream: Stream, tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each document, checking the layout of the stream on the way."""
    ids = stream.ids.tolist()
    if not ids:
        assert len(stream.starts) == 0
        return []
    assert ids[-1] == tokenizer.end
    assert [at for at, id in enumerate(ids) if id == tokenizer.end] == [*stream.starts.tolist(), len(ids) - 1]
    edges = [*stream.starts.tolist(), len(ids) - 1]
    return [b"".join(map(tokenizer.piece_bytes, ids[start + 1 : stop])) for start, stop in pairwise(edges)]


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, st.sampled_from([bytewise, bpe]))
def test_the_stream_is_the_documents_with_an_end_around_each(
    documents: list[str], tokenizer: Callable[[], Tokenizer]
) -> None:
    assume(any(not text.isspace() for text in documents) and len("".join(documents)) > 40)
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = DataConfig(paths=(write(folder, documents),), valid=0.0)
        shards = quick(config, tokenizer(), folder / "out")
        assert decoded(shards.train, tokenizer()) == [text.encode() for text in documents]
        assert shards.train.text_bytes == sum(len(text.encode()) for text in documents)
        assert shards.train.ids.dtype == np.uint16
        plain = [id for text in documents for id in [tokenizer().end, *tokenizer().encode(text)]]
        assert shards.train.ids.tolist() == [*plain, tokenizer().end]
        assert len(shards.valid) == shards.valid.text_bytes == 0


def test_documents_are_held_out_whole_and_nothing_is_lost(tmp_path: Path) -> None:
    documents = [f"document number {number} " * (number % 5 + 1) for number in range(400)] * 2
    shards = quick(DataConfig(paths=(write(tmp_path, documents),), valid=0.1), bpe(), tmp_path / "out")
    expected = {
        side: [text.encode() for text in documents if held_out(text, 0.1) == (side == "valid")]
        for side in ("train", "valid")
    }
    assert decoded(shards.train, bpe()) == expected["train"]
    assert decoded(shards.valid, bpe()) == expected["valid"]
    assert not set(expected["train"]) & set(expected["valid"])
    assert shards.valid.text_bytes == sum(map(len, expected["valid"])) > 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(ALPHABET, min_size=1, max_size=60), min_size=1, max_size=4),
    st.floats(0.001, 0.6),
    st.sampled_from([bytewise, bpe]),
)
def test_too_few_documents_lose_their_tail_to_validation(
    documents: list[str], fraction: float, tokenizer: Callable[[], Tokenizer]
) -> None:
    assume(len({held_out(text, fraction) for text in documents}) == 1)
    assume(any(not text.isspace() for text in documents))
    with TemporaryDirectory() as name:
        folder, said = Path(name), list[str]()
        config = DataConfig(paths=(write(folder, documents),), valid=fraction)
        try:
            shards = quick(config, tokenizer(), folder / "out", said)
        except DataError:  # too short, which a text with enough on both sides never is
            tokens = sum(len(tokenizer().encode(text)) for text in documents)
            assert min(fraction, 1 - fraction) * (tokens + len(documents)) < 8
            return
        train, valid = decoded(shards.train, tokenizer()), decoded(shards.valid, tokenizer())
        whole = b"".join(text.encode() for text in documents)
        assert b"".join(train + valid) == whole
        assert all(train + valid)
        assert shards.train.text_bytes == sum(map(len, train))
        assert shards.valid.text_bytes == sum(map(len, valid))
        wanted = max(2, fraction * (len(shards.train) + len(shards.valid)))
        assert abs(len(shards.valid) - wanted) <= 4
        assert len(said) == 1
        assert "validation" in said[0]


def test_a_path_names_the_validation_text(tmp_path: Path) -> None:
    paths = write(tmp_path, ["one", "two"], "a.txt"), write(tmp_path, ["three", "one"], "b.txt")
    shards = quick(DataConfig(paths=paths[:1], valid=paths[1]), bytewise(), tmp_path / "out")
    assert decoded(shards.train, bytewise()) == [b"one", b"two"]
    assert decoded(shards.valid, bytewise()) == [b"three", b"one"]
    assert [Path(entry["path"]).name for entry in shards.manifest["sources"]] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(("text", "valid", "message"), [
    ("a", 0.0, "the training text has only 1 token; "),
    ("ab", 0.5, "the training text has only 0 tokens; "),
    ("abcd", "short.txt", "the validation text has only 1 token; "),
    ("abcd", "none.txt", "data.valid: .*none.txt does not exist; "),
])  # fmt: skip
def test_a_text_too_short_is_refused_and_nothing_is_left(
    tmp_path: Path, text: str, valid: float | str, message: str
) -> None:
    write(tmp_path, ["x"], "short.txt")
    valid = str(tmp_path / valid) if isinstance(valid, str) else valid
    config = DataConfig(paths=(write(tmp_path, [text]),), valid=valid)
    with pytest.raises(DataError, match=message):
        quick(config, bytewise(), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "short.txt"]


def test_the_manifest_tells_sizes_and_hashes_that_others_can_check(tmp_path: Path) -> None:
    paths = write(tmp_path, ["some text", "more text"] * 40, "a.txt"), write(tmp_path, ["again"] * 9, "b.txt")
    config = DataConfig(paths=paths, valid=0.3, separator="x")
    reported: list[tuple[int, int]] = []
    build(config, bpe(), tmp_path / "out", progress=lambda *pair: reported.append(pair), say=lambda _: None)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for path, entry in zip(paths, manifest["sources"], strict=True):
        data = Path(path).read_bytes()
        assert entry == {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    total = sum(Path(path).stat().st_size for path in paths)
    assert reported[-1] == (total, total)
    assert reported == sorted(reported)
    assert manifest["tokenizer"] == {"kind": "bpe", "size": bpe().size, "digest": bpe().digest}
    assert load(DataConfig, manifest["config"]) == config
    assert dump(config) == manifest["config"]


class Wide:
    """The byte tokenizer with every id moved up, so that two bytes are not enough."""

    kind, size, end, digest, exact_cut, specials = "wide", 70_000, 69_999, "wide", True, {"<|endoftext|>": 69_999}
    begin, frame = 69_999, Frame()

    def encode(self, text: str) -> list[int]:
        return [byte + 69_000 for byte in text.encode()]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_specials: bool = False) -> str:
        return b"".join(map(self.piece_bytes, ids)).decode(errors="replace")

    def piece(self, id: int) -> str:
        return self.decode([id])

    def piece_bytes(self, id: int) -> bytes:
        return bytes([id - 69_000]) if 69_000 <= id < 69_256 else b""

    joint = Joint()

    def spans(self, text: str) -> list[tuple[int, int]]:
        return [(at, at + 1) for at in range(len(text))]

    def starts_word(self, id: int) -> bool:
        return False

    def ends_word(self, id: int) -> bool:
        return False

    def extended(self, spellings: Sequence[str]) -> Wide:
        return self

    def serialise(self) -> str:
        return "{}"

    def save(self, path: Path) -> None:
        path.write_text(self.serialise())


def test_a_large_vocabulary_gets_four_bytes_per_id(tmp_path: Path) -> None:
    shards = quick(DataConfig(paths=(write(tmp_path, ["wide é text"]),)), Wide(), tmp_path / "out")
    assert shards.train.ids.dtype == np.uint32
    assert b"".join(decoded(shards.train, Wide()) + decoded(shards.valid, Wide())) == "wide é text".encode()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    documents = [f"document {number}" for number in range(60)]
    quick(DataConfig(paths=(write(tmp_path, documents),), valid=0.2), bytewise(), tmp_path / "out")
    return tmp_path / "out"


def test_an_opened_folder_is_the_built_one(shards: Path, tmp_path: Path) -> None:
    opened = open_shards(shards, tokenizer_digest=bytewise().digest, verify=True)
    again = quick(DataConfig(paths=(str(tmp_path / "a.txt"),), valid=0.2), bytewise(), tmp_path / "again")
    assert opened.digest == again.digest
    assert opened.train.ids.tolist() == again.train.ids.tolist()
    other = quick(DataConfig(paths=(str(tmp_path / "a.txt"),), valid=0.3), bytewise(), tmp_path / "other")
    assert opened.digest != other.digest
    assert built_shards(DataConfig(paths=(str(shards),))) == shards
    assert built_shards(DataConfig(paths=(str(tmp_path),))) is None


def test_every_flipped_byte_and_truncation_is_found(
    shards: Path, tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    rng = random.Random(0)
    # the tokenizer is known by its own digest, which open_shards compares
    names = sorted(path.name for path in shards.iterdir() if path.name != "tokenizer.json")
    assert len(names) == 5
    for _ in range(count(200, 5000)):
        path = shards / rng.choice(names)
        whole = path.read_bytes()
        at = rng.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(whole[:at] if rng.random() < 0.2 else damaged)
        # A blank turned into another blank of the manifest's layout means the same.
        if path.name != "manifest.json" or not _same(path.read_bytes(), whole):
            with pytest.raises(DataError, match=r"; (build the shards|update trivium)"):
                open_shards(shards, verify=True)
        path.write_bytes(whole)
    open_shards(shards, verify=True)


def _same(data: bytes, whole: bytes) -> bool:
    try:
        return bool(json.loads(data) == json.loads(whole))
    except ValueError:
        return False


@settings(max_examples=100, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["format", "files", "sha256"]), inner),
    max_leaves=8,
))  # fmt: skip
def test_a_foreign_manifest_gives_a_clean_error(manifest: object) -> None:
    with TemporaryDirectory() as name:
        (Path(name) / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(DataError, match=r"manifest\.json"):
            open_shards(Path(name))


PATHS = [
    *((key,) for key in ("format", "dtype", "tokenizer", "splits", "files", "sources", "config")),
    *(("tokenizer", key) for key in ("kind", "size", "digest")),
    *(("splits", "valid", key) for key in ("tokens", "documents", "text_bytes")),
    *(("files", "train.bin", key) for key in ("size", "sha256")),
    ("splits", "train"),
    ("files", "valid.bin"),
    ("files", "../a.txt"),
]
JSON = st.sampled_from([None, True, -1, 0, 1.5, 10**30, "", "uint32", [], [1], {}, {"size": 1, "sha256": ""}])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PATHS), JSON)
def test_a_manifest_made_up_by_a_stranger_gives_a_clean_error(shards: Path, keys: tuple[str, ...], value: Any) -> None:
    path = shards / "manifest.json"
    whole = path.read_bytes()
    manifest = json.loads(whole)
    del manifest["sha256"]
    place = manifest
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    text = json.dumps(manifest, sort_keys=True, ensure_ascii=False)
    path.write_text(json.dumps({**manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    try:
        opened = open_shards(shards, verify=True)
    except DataError:
        return
    finally:
        path.write_bytes(whole)
    assert keys[-1] in ("config", "text_bytes", "sources", "kind", "size", "digest")
    assert len(opened.train) > 0
    assert len(opened.digest) == 64
    assert changed_sources(opened) == []


def test_another_tokenizer_is_refused(shards: Path) -> None:
    with pytest.raises(DataError, match=r"was built with another tokenizer \(bytes, 257 ids\)"):
        open_shards(shards, tokenizer_digest=bpe().digest)


def test_missing_pieces_are_named(shards: Path, tmp_path: Path) -> None:
    (shards / "valid.docs.bin").unlink()
    with pytest.raises(DataError, match=r"valid\.docs\.bin is missing"):
        open_shards(shards)
    with pytest.raises(DataError, match="is not a folder of built shards"):
        open_shards(tmp_path)


def test_a_newer_format_is_named_as_such(shards: Path) -> None:
    (shards / "manifest.json").write_text('{"format": 2}')
    with pytest.raises(DataError, match="newer trivium"):
        open_shards(shards)


def test_a_source_that_changed_is_named(shards: Path, tmp_path: Path) -> None:
    opened, source = open_shards(shards), tmp_path / "a.txt"
    assert changed_sources(opened) == []
    source.write_bytes(source.read_bytes().replace(b"document 7", b"document 8"))
    assert changed_sources(opened) == [source]
    source.unlink()
    assert changed_sources(opened) == []


def test_an_existing_folder_is_never_overwritten(shards: Path, tmp_path: Path) -> None:
    config = DataConfig(paths=(str(tmp_path / "a.txt"),))
    before = (shards / "manifest.json").read_bytes()
    with pytest.raises(DataError, match="out already exists "):
        quick(config, bytewise(), shards)
    assert (shards / "manifest.json").read_bytes() == before
    with pytest.raises(DataError, match="is a folder of built shards already"):
        quick(DataConfig(paths=(str(shards),)), bytewise(), tmp_path / "new")
    (tmp_path / "bare").mkdir()
    quick(config, bytewise(), tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare")
