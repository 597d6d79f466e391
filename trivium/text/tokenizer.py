"""One protocol over the `tokenizers` library: text to ids and back, with special ids that come only from code.

Every kind lives in a tokenizer.json that the library itself can read; `library` says how each one is set up there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, final

import tokenizers

from trivium.errors import DataError
from trivium.files import write_atomic
from trivium.text.library import END, UNKNOWN, joint_of, kind_of, pieces_of, specials_of, with_specials
from trivium.text.pieces import Joint, Pieces


class Tokenizer(Protocol):
    """Text to ids and back; special ids come only from code."""

    @property
    def kind(self) -> str:
        """The name of the kind: chars, bytes, bpe, word-bpe, wordpiece, unigram or words."""

    @property
    def size(self) -> int:
        """How many ids there are, specials included; they are 0 to size - 1."""

    @property
    def end(self) -> int:
        """The id of <|endoftext|>, which begins and ends every document."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Every special token: its spelling and its id."""

    @property
    def digest(self) -> str:
        """The sha256 of the serialised file, which a checkpoint stores to recognise its tokenizer."""

    @property
    def exact_cut(self) -> bool:
        """Whether a text may be cut anywhere and give the same ids as when encoded whole."""

    @property
    def joint(self) -> Joint:
        """How the bytes of pieces join to a text, for decoding one id at a time."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, never a special one; a text with a lone surrogate is a DataError."""

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, in order, encoded on all cores."""

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The characters of the text, first to last exclusive, that each id of `encode` stands for."""

    def decode(self, ids: Sequence[int], *, skip_specials: bool = False) -> str:
        """The text of some ids: bytes that are not UTF-8 become U+FFFD, specials are spelled out unless skipped."""

    def piece(self, id: int) -> str:
        """A printable name of one id, for showing."""

    def piece_bytes(self, id: int) -> bytes:
        """The bytes that one id stands for, which may be part of a character; none for a special."""

    def starts_word(self, id: int) -> bool:
        """Whether a word begins with this id whatever came before it; so does a special."""

    def ends_word(self, id: int) -> bool:
        """Whether a word ends with this id whatever comes next; a border between two ids is either of the two."""

    def extended(self, spellings: Sequence[str]) -> Tokenizer:
        """The same tokenizer with these special tokens under new ids, in order; those it has keep theirs."""

    def serialise(self) -> str:
        """The JSON text of tokenizer.json."""

    def save(self, path: Path) -> None:
        """Write tokenizer.json to `path`, whole or not at all."""


@final
class LibraryTokenizer:
    """A Tokenizer over one of the library's, which it takes over; a DataError if that one is of another kind."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # The library neither stores this setting in its file nor has it on by default, so that "<|endoftext|>" in a
        # document would end it. Truncation and padding do come from files, and would lose or invent text.
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._vocabulary = inner.get_vocab(with_added_tokens=True)
        if sorted(self._vocabulary.values()) != list(range(len(self._vocabulary))):
            raise DataError("its ids are not 0, 1, 2, ... without holes")
        self._specials = specials_of(inner)
        if END not in self._specials:
            raise DataError(f"it has no special token {END}")
        self._kind = kind_of(inner)
        forged = {id for ids in self.encode_many(list(self._specials)) for id in ids}
        if not forged.isdisjoint(self._specials.values()):
            raise DataError("it takes the spelling of a special token in a text for the token itself")

    @property
    def kind(self) -> str:
        return self._kind

    @property
    def size(self) -> int:
        return len(self._vocabulary)

    @property
    def end(self) -> int:
        return self._specials[END]

    @property
    def specials(self) -> Mapping[str, int]:
        return self._specials

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.serialise().encode()).hexdigest()

    @property
    def exact_cut(self) -> bool:
        return self._kind in ("chars", "bytes")

    @property
    def joint(self) -> Joint:
        return joint_of(self._kind)

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        raw = [utf8(text) for text in texts]
        # Single bytes and characters by table: the library gives the same ids, 20 to 100 times slower.
        if self._kind == "bytes":
            return [list(text) for text in raw]
        if self._kind == "chars":
            table, unknown = self._vocabulary, self._vocabulary[UNKNOWN]
            return [[table.get(character, unknown) for character in text] for text in texts]
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def spans(self, text: str) -> list[tuple[int, int]]:
        utf8(text)
        offsets: list[tuple[int, int]] = self._inner.encode(text, add_special_tokens=False).offsets
        return offsets

    def decode(self, ids: Sequence[int], *, skip_specials: bool = False) -> str:
        return self._pieces.text(ids, skip_specials=skip_specials)

    def piece(self, id: int) -> str:
        name = self._pieces[id].name
        return name if name.isprintable() else name.encode("unicode_escape").decode()

    def piece_bytes(self, id: int) -> bytes:
        return self._pieces[id].raw

    def starts_word(self, id: int) -> bool:
        return self._pieces[id].starts

    def ends_word(self, id: int) -> bool:
        return self._pieces[id].ends

    def extended(self, spellings: Sequence[str]) -> Tokenizer:
        new = [text for text in dict.fromkeys(spellings) if text not in self._specials]
        for text in new:
            # The library would make the piece itself special, under an id that texts already give.
            if not text or text in self._vocabulary:
                raise DataError(
                    f"{text!r} cannot be a special token: it is empty or a piece of text; spell it otherwise"
                )
            utf8(text)
        if not new:
            return self
        return LibraryTokenizer(with_specials(tokenizers.Tokenizer.from_str(self.serialise()), new))

    def serialise(self) -> str:
        return self._inner.to_str(pretty=True)

    def save(self, path: Path) -> None:
        write_atomic(path, self.serialise().encode())

    @cached_property
    def _pieces(self) -> Pieces:
        names = sorted(self._vocabulary, key=self._vocabulary.__getitem__)
        return Pieces(pieces_of(self._kind, names, self._specials), self._specials, self.joint)


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json, or in the folder that holds one; a DataError if it cannot be used."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{file} does not exist; name a tokenizer.json or a folder that holds one") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start}); name a tokenizer.json") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; name a tokenizer.json") from None
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        # The library raises nothing narrower than Exception, and what it did not foresee is not even one.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{file} is not a tokenizer.json ({error}); name another file or train anew") from None
    try:
        return LibraryTokenizer(inner)
    except DataError as error:
        raise DataError(f"{file} cannot be used: {error}; name a file of a kind that trivium trains") from None


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of a text; a DataError if it holds half of a surrogate pair, which no UTF-8 text can."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(
            f"the text has a lone surrogate, U+{code:04X}, at character {error.start}; remove or replace it"
        ) from None
