"""Sentences that belong together: two files line by line, or two columns of one, as documents of shards in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trivium.data import shards
from trivium.data.config import AUTO, DataConfig
from trivium.data.shards import Shards, publish
from trivium.data.sources import Source, files, held_out, lines, text_bytes, texts
from trivium.data.writing import Writer, manifest, writers
from trivium.errors import DataError
from trivium.text.tokenizer import Tokenizer

_BATCH = 2048  # pairs for the tokenizer at a time
Read = Callable[[int], None]
Done = Callable[[Source], None]


class Pair(NamedTuple):
    """Two sentences without the white space around them; one of them may be empty."""

    source: str
    target: str


def pair_files(config: DataConfig) -> tuple[list[Path], list[Path]]:
    """The files of the training and of the validation pairs, two, one or none each; a missing one is a DataError."""
    valid = "valid" if config.pairs and config.valid_path else ""
    train_keys = ["pairs"] if config.pairs else ["source", "target"]
    valid_keys = [valid] if valid else ["valid_source", "valid_target"] if config.valid_source else []
    train, held = ([_file(config, key) for key in keys] for keys in (train_keys, valid_keys))
    return train, held


def read_pairs(paths: list[Path], columns: tuple[int, int], *, read: Read, done: Done | None = None) -> Iterator[Pair]:
    """Every pair of two files, or of two columns of one, in order."""
    if len(paths) == 2:
        return _side_by_side(paths[0], paths[1], read, done)
    return _in_columns(paths[0], columns, read, done)


def training_files(config: DataConfig) -> list[Path]:
    """The files that a run learns from, text or pairs; a missing one is refused."""
    return pair_files(config)[0] if config.paired else files(config.paths)


def settled(config: DataConfig) -> DataConfig:
    """The settings with a definite share for validation."""
    return config.settled(text_bytes(training_files(config))) if config.valid == AUTO else config


def training_texts(config: DataConfig, *, read: Read) -> Iterator[str]:
    """What a tokenizer is trained on: the training text, or both sides of the training pairs, which share it."""
    if not config.paired:
        yield from texts(config, read=read)
        return
    fraction = _fraction(config)
    for pair in read_pairs(pair_files(config)[0], config.columns, read=read):
        if all(pair) and not held_out(pair.source, fraction):
            yield from pair


def build(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    progress: Callable[[int, int], None],
    say: Callable[[str], None],
) -> Shards:
    """Encode the text or the pairs that `config` names into `folder`, which appears whole or not at all."""
    if not config.paired:
        return shards.build(config, tokenizer, folder, progress=progress, say=say)
    return publish(folder, tokenizer, lambda scratch: _Build(config, tokenizer, scratch, progress).run(say))


def paired(made: Shards) -> bool:
    """Whether the documents of some shards are the two sides of pairs in turn."""
    return bool(made.manifest.get("form") == "pairs")


class _Build:
    """One pass over pairs, and the manifest of what came out: sources and targets are documents in turn."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, folder: Path, progress: Callable[[int, int], None]
    ) -> None:
        self.config, self.tokenizer, self.folder, self.progress = config, tokenizer, folder, progress
        self.train_files, self.valid_files = pair_files(config)
        self.fraction = _fraction(config)
        self.sources: list[Source] = []
        self.empty = self.read = 0
        self.total = sum(path.stat().st_size for path in (*self.train_files, *self.valid_files))

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        with writers(self.folder, self.tokenizer) as (train, valid):
            train.mark()
            valid.mark()
            self._encode(self.train_files, lambda pair: valid if held_out(pair.source, self.fraction) else train)
            if self.valid_files:
                self._encode(self.valid_files, lambda _: valid)
        if self.empty:
            say(f"pairs with an empty side, which are left out: {self.empty:,}")
        names = " and ".join(map(str, self.train_files))
        if not train.documents:
            raise DataError(f"{names}: there is no pair to learn from; name more pairs or lower data.valid")
        if not valid.documents and (self.fraction or self.valid_files):
            raise DataError(f"{names}: no pair is kept for validation; raise data.valid, or set it to 0")
        return {**manifest(self.config, self.tokenizer, self.sources, train, valid), "form": "pairs"}

    def _encode(self, paths: list[Path], choose: Callable[[Pair], Writer]) -> None:
        stream = read_pairs(paths, self.config.columns, read=self._tick, done=self.sources.append)
        while batch := list(itertools.islice(stream, _BATCH)):
            sides = [self.tokenizer.encode_many([pair[side] for pair in batch]) for side in (0, 1)]
            for pair, source, target in zip(batch, *sides, strict=True):
                if not (source and target):  # some tokenizers have no id for some characters
                    self.empty += 1
                    continue
                writer = choose(pair)
                for ids, text in zip((source, target), pair, strict=True):
                    writer.begin()
                    writer.add(ids, len(text.encode()))

    def _tick(self, count: int) -> None:
        self.read += count
        self.progress(self.read, self.total)


def _side_by_side(source: Path, target: Path, read: Read, done: Done | None) -> Iterator[Pair]:
    counts = [0, 0]
    sides = (lines(path, read=read, done=done) for path in (source, target))
    for pair in itertools.zip_longest(*sides):
        for side, line in enumerate(pair):
            counts[side] += line is not None
        if None not in pair:
            yield Pair(*(line.strip() for line in pair))
    if counts[0] != counts[1]:
        raise DataError(
            f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}: line by line they are no pairs; "
            "name two files that were made together"
        )


def _in_columns(path: Path, columns: tuple[int, int], read: Read, done: Done | None) -> Iterator[Pair]:
    for number, line in enumerate(lines(path, read=read, done=done), 1):
        cells = line.split("\t")
        if not line.strip():
            yield Pair("", "")
        elif len(cells) <= max(columns):
            raise DataError(
                f"{path}, line {number} has {len(cells)} column{'s' * (len(cells) > 1)} between tabs, and data.columns "
                f"asks for number {max(columns)}, counted from 0; mend the line or set data.columns"
            )
        else:
            yield Pair(*(cells[column].strip() for column in columns))


def _file(config: DataConfig, key: str) -> Path:
    [path, *more] = files([getattr(config, key)], key=f"data.{key}")
    if more or path != Path(getattr(config, key)):
        raise DataError(f"data.{key}: {getattr(config, key)} is a folder; name a file of sentences")
    return path


def _fraction(config: DataConfig) -> float:
    """The share of the training files' source sentences that is kept for validation."""
    return 0.0 if config.valid_source else config.valid_share
