"""The tokenizers that a recipe can name; each builds itself from the training texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from trivium.config import at_least
from trivium.errors import ConfigError
from trivium.text.bpe import Tie, learn
from trivium.text.counting import count_presplit, count_words
from trivium.text.library import (
    END,
    END_OF_WORD,
    RARE_WORD,
    SPACE,
    UNKNOWN,
    Case,
    Fallback,
    Normal,
    Symbol,
    byte_alphabet,
    byte_pieces,
    library_bytes,
    library_chars,
    library_unigram,
    library_word_bpe,
    library_wordpiece,
    library_words,
    with_end,
)
from trivium.text.tokenizer import LibraryTokenizer, Tokenizer, open_tokenizer, utf8
from trivium.text.unigram import train_unigram
from trivium.text.wordpiece import learn_by_frequency, learn_by_likelihood

WHITE_SPACE = " \t\n\r"  # splits words for every kind that splits them at more than the space
_SMALLEST = 257  # 256 bytes and <|endoftext|>
_LONGEST_WORD = 1000  # a longer run without white space teaches no merges: each one would walk through all of it


class TokenizerOptions(Protocol):
    """The options of a tokenizer."""

    def build(self, texts: Iterable[str]) -> Tokenizer: ...


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
        _sizes(self.size, _SMALLEST, "256 bytes and the end", self.min_count)

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
class Words:
    """One id per word between white space and one, <eos>, for every line end; frequent words have the small ids."""

    min_count: int = 1  # a word seen fewer times is unknown: the corpus' own <unk> if it has that word, or <|unk|>

    def __post_init__(self) -> None:
        at_least("min_count", self.min_count, 1)

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer of the words in `texts`."""
        counts: Counter[str] = Counter()
        for text in _checked(texts):
            counts.update(text.split())
            counts["\n"] += text.count("\n")
        unknown = RARE_WORD if RARE_WORD in counts else UNKNOWN
        kept = {word for word, times in counts.items() if times >= self.min_count} - {END} | {"\n", unknown}
        # by count, so that an adaptive softmax finds the frequent words in its head
        return LibraryTokenizer(library_words(sorted(kept, key=lambda word: (-counts[word], word)), unknown))


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfWordBpe:
    """BPE over words between white space that end in the symbol </w>; equal texts in any order give an equal file."""

    size: int = 4096  # every id: characters, </w>, the merges, <|unk|>, <|endoftext|>; less if the texts are too small
    min_count: int = 2  # a pair seen fewer times is not merged
    symbol: Symbol = "separate"  # a symbol of its own at first, or "fused" with each word's last letter as in GPT-1
    tie: Tie = "pairs"  # which of equally frequent pairs: the first by spelling, or "ids" as the library does

    def __post_init__(self) -> None:
        _sizes(self.size, 4, "a character, </w>, the unknown and the end", self.min_count)

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer whose merges are the most frequent pairs inside the words of `texts`."""
        words = count_words(_checked(texts))
        characters = sorted(set().union(*words))
        # both forms of every character, so that no place in a word makes a known one unknown
        ends = [" "] if self.symbol == "separate" else [character + " " for character in characters]
        alphabet = [*characters, *ends]
        _fits(self.size, len(alphabet) + 2, f"the {len(characters)} characters of the texts")
        ended = {_ended(word, self.symbol): times for word, times in words.items() if len(word) <= _LONGEST_WORD}
        symbols, merges = learn(
            ended,
            alphabet,
            size=self.size - 2,
            min_count=self.min_count,
            tie=self.tie,
            spell={" ": END_OF_WORD},
            reserved={UNKNOWN, END},
        )
        pairs = [(merge.left, merge.right) for merge in merges]
        return LibraryTokenizer(library_word_bpe(symbols, pairs, self.symbol))


@dataclass(frozen=True, kw_only=True, slots=True)
class WordPiece:
    """BERT's pieces: the longest one that fits, then ## continuations; a word that does not come out is [UNK].

    Equal texts in any order give an equal file.
    """

    size: int = 4096  # every id: pieces, [UNK], <|endoftext|>; less if the texts are too small
    min_count: int = 2  # a pair seen fewer times is not merged
    case: Case = "lower"  # "lower" also strips accents
    score: Literal["frequency", "likelihood"] = "frequency"  # of a pair: its count, or over those of its two parts
    longest: int = 100  # characters of a word; a longer one is [UNK] (200 in the original BERT)

    def __post_init__(self) -> None:
        at_least("longest", self.longest, 1)
        _sizes(self.size, 3, "a piece, the unknown and the end", self.min_count)

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer whose pieces are learned from the words of `texts`."""
        words = count_presplit(_checked(texts), library_wordpiece([], self.case, self.longest), WHITE_SPACE)
        learn_pieces = learn_by_likelihood if self.score == "likelihood" else learn_by_frequency
        pieces = learn_pieces(words, size=self.size - 2, min_count=self.min_count, longest=self.longest)
        _fits(self.size, len(pieces) + 2, "the characters of the texts")
        return LibraryTokenizer(library_wordpiece(pieces, self.case, self.longest))


@dataclass(frozen=True, kw_only=True, slots=True)
class Unigram:
    """SentencePiece's pieces: the most probable way to cut a text, each word's space in front of it.

    Equal texts in any order give an equal file.
    """

    size: int = 4096  # every id: pieces, the bytes of a fallback, <|unk|>, <|endoftext|>; less if the texts are small
    normal: Normal = "nfkc"  # compatible forms and single spaces, as T5; or "identity", the text as it is, as LLaMA
    fallback: Fallback = "none"  # an unknown character is <|unk|>, or its "bytes"

    def __post_init__(self) -> None:
        _sizes(self.size, 3 + 256 * (self.fallback == "bytes"), "the pieces that are always there", 1)

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer whose pieces give `texts` the highest probability."""
        always = byte_pieces() if self.fallback == "bytes" else []
        # a space, and what a text needs to spell out the name of a byte or of the unknown without becoming it
        letters = {SPACE, *("".join([UNKNOWN, *always]) if always else "")}
        white = WHITE_SPACE if self.normal == "nfkc" else " "
        words = count_presplit(_checked(texts), library_unigram([], self.normal, self.fallback), white)
        characters = sorted(letters.union(*words))
        room = self.size - len(always) - 2
        _fits(self.size, len(characters) + len(always) + 2, "the characters of the texts")
        scores = train_unigram(words, characters, size=room, reserved={UNKNOWN, END, *always})
        return LibraryTokenizer(library_unigram(scores, self.normal, self.fallback))


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A tokenizer.json that exists already, or a folder that holds one."""

    path: str = ""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer in the file; `texts` is not read."""
        if not self.path:
            raise ConfigError("tokenizer.path: names no file; give a tokenizer.json or a folder that holds one")
        return open_tokenizer(Path(self.path))


TOKENIZERS: dict[str, type[Any]] = {
    "chars": Chars,
    "bytes": Bytes,
    "bpe": Bpe,
    "words": Words,
    "word-bpe": EndOfWordBpe,
    "wordpiece": WordPiece,
    "unigram": Unigram,
    "file": File,
}


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        utf8(text)
        yield text


def _sizes(size: int, least: int, what: str, min_count: int) -> None:
    """Refuse a vocabulary without room for what it always holds, and a count that is none."""
    problems = []
    if size < least:
        problems.append(f"size: {size} is too small for {what}; at least {least}")
    if min_count < 1:
        problems.append(f"min_count: {min_count} is not a count; at least 1")
    if problems:
        raise ConfigError(*problems)


def _fits(size: int, needed: int, what: str) -> None:
    if needed > size:
        raise ConfigError(f"tokenizer.size: {size} is too small for {what}; at least {needed}")


def _ended(word: str, symbol: Symbol) -> tuple[str, ...]:
    return (*word, " ") if symbol == "separate" else (*word[:-1], word[-1] + " ")
