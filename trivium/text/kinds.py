"""The tokenizers that a recipe can name; each builds itself from the training texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from trivium.errors import ConfigError
from trivium.text.tokenizer import (
    LibraryTokenizer,
    Tokenizer,
    byte_alphabet,
    library_bytes,
    library_chars,
    open_tokenizer,
    utf8,
    with_end,
)

_SMALLEST = 257  # 256 bytes and <|endoftext|>


@dataclass(frozen=True, kw_only=True, slots=True)
class Chars:
    """One id per character of the training texts, by code point; <|unk|> for every other."""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer of the characters in `texts`."""
        seen: set[str] = set()
        for text in _checked(texts):
            seen.update(text)
        return LibraryTokenizer(library_chars(seen))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """The id of a byte is the byte; nothing to learn and nothing unknown."""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer of bytes; `texts` is not read."""
        return LibraryTokenizer(library_bytes())


@dataclass(frozen=True, kw_only=True, slots=True)
class Bpe:
    """Byte-level BPE with GPT-2's pre-split; equal texts in any order give an equal file."""

    size: int = 4096  # every id: 256 bytes, the merges, <|endoftext|> as the last; less if the texts are too small
    min_count: int = 2  # a pair seen fewer times is not merged

    def __post_init__(self) -> None:
        problems = []
        if self.size < _SMALLEST:
            problems.append(f"size: {self.size} is too small for 256 bytes and the end; at least {_SMALLEST}")
        if self.min_count < 1:
            problems.append(f"min_count: {self.min_count} is not a count; at least 1")
        if problems:
            raise ConfigError(*problems)

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer whose merges are the most frequent pairs of `texts`."""
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.size - 1,  # <|endoftext|> comes after: nanoGPT's readers expect it last
            min_frequency=self.min_count,
            initial_alphabet=byte_alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(_checked(texts), trainer)
        return LibraryTokenizer(with_end(inner))


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A tokenizer.json that exists already, or a folder that holds one."""

    path: str = ""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer in the file; `texts` is not read."""
        if not self.path:
            raise ConfigError("tokenizer.path: names no file; give a tokenizer.json or a folder that holds one")
        return open_tokenizer(Path(self.path))


TOKENIZERS: dict[str, type[Any]] = {"chars": Chars, "bytes": Bytes, "bpe": Bpe, "file": File}


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        utf8(text)
        yield text
