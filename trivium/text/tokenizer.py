"""One protocol over the `tokenizers` library: text to ids and back, with special ids that come only from code.

Three kinds share it. `chars` has one id per character, `bytes` one per byte, `bpe` merges bytes inside GPT-2's
pre-split words. All three live in a tokenizer.json that the library itself can read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from trivium.errors import DataError, RequestError
from trivium.files import write_atomic

END = "<|endoftext|>"
UNKNOWN = "<|unk|>"  # a character that `chars` has not seen: it comes from text, so it is not among the specials


class Tokenizer(Protocol):
    """Text to ids and back; special ids come only from code."""

    @property
    def kind(self) -> str:
        """The name of the kind: chars, bytes or bpe."""

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

    def encode(self, text: str) -> list[int]:
        """The ids of a text, never a special one; a text with a lone surrogate is a DataError."""

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, in order, encoded on all cores."""

    def decode(self, ids: Sequence[int], *, skip_specials: bool = False) -> str:
        """The text of some ids: bytes that are not UTF-8 become U+FFFD, specials are spelled out unless skipped."""

    def piece(self, id: int) -> str:
        """A printable name of one id, for showing."""

    def piece_bytes(self, id: int) -> bytes:
        """The bytes that one id stands for, which may be part of a character; none for a special."""

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
        added = inner.get_added_tokens_decoder()
        self._specials = {token.content: id for id, token in sorted(added.items()) if token.special}
        if END not in self._specials:
            raise DataError(f"it has no special token {END}")
        self._kind = _kind_of(inner)
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

    def decode(self, ids: Sequence[int], *, skip_specials: bool = False) -> str:
        for id in (min(ids), max(ids)) if len(ids) else ():
            self._known(id)
        return self._inner.decode(list(ids), skip_special_tokens=skip_specials)

    def piece(self, id: int) -> str:
        piece = self._pieces[self._known(id)]
        return piece if piece.isprintable() else piece.encode("unicode_escape").decode()

    def piece_bytes(self, id: int) -> bytes:
        return self._piece_bytes[self._known(id)]

    def serialise(self) -> str:
        return self._inner.to_str(pretty=True)

    def save(self, path: Path) -> None:
        write_atomic(path, self.serialise().encode())

    def _known(self, id: int) -> int:
        # The library drops an id that it does not know without a word.
        if not 0 <= id < self.size:
            raise RequestError(f"there is no id {id}: the tokenizer has {self.size}, from 0 to {self.size - 1}")
        return id

    @cached_property
    def _pieces(self) -> list[str]:
        return sorted(self._vocabulary, key=self._vocabulary.__getitem__)

    @cached_property
    def _piece_bytes(self) -> list[bytes]:
        specials = set(self._specials)
        to_byte = {} if self._kind == "chars" else {character: byte for byte, character in enumerate(byte_alphabet())}
        return [b"" if piece in specials else _bytes_of(piece, to_byte) for piece in self._pieces]


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
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{file} is not a tokenizer.json ({error}); name another file or train anew") from None
    try:
        return LibraryTokenizer(inner)
    except DataError as error:
        raise DataError(f"{file} cannot be used: {error}; name a chars, bytes or byte-level BPE file") from None


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of a text; a DataError if it holds half of a surrogate pair, which no UTF-8 text can."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(
            f"the text has a lone surrogate, U+{code:04X}, at character {error.start}; remove or replace it"
        ) from None


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in the pieces of byte-level kinds."""
    # GPT-2's table: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards.
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in plain)
    shifted = {byte: 256 + place for place, byte in enumerate(others)}
    return [chr(shifted.get(byte, byte)) for byte in range(256)]


def library_chars(characters: Iterable[str]) -> tokenizers.Tokenizer:
    """The library's tokenizer with one id per character, ordered by code point."""
    vocabulary = {character: id for id, character in enumerate(sorted(characters))}
    vocabulary[UNKNOWN] = len(vocabulary)
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return with_end(inner)


def library_bytes() -> tokenizers.Tokenizer:
    """The library's tokenizer in which every byte is its own id."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return with_end(inner)


def with_end(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """`inner` with the special token <|endoftext|>, under the last id if its vocabulary did not have it yet."""
    inner.add_special_tokens([tokenizers.AddedToken(END, special=True, normalized=False)])
    return inner


def _kind_of(inner: tokenizers.Tokenizer) -> str:
    """The kind of a library tokenizer: chars and bytes are exactly what we write, bpe is anything byte-level."""
    vocabulary = inner.get_vocab(with_added_tokens=False)
    if isinstance(inner.model, models.WordLevel):
        characters = [piece for piece in vocabulary if len(piece) == 1]
        if library_chars(characters).to_str() == inner.to_str():
            return "chars"
    elif isinstance(inner.model, models.BPE) and isinstance(inner.decoder, decoders.ByteLevel):
        if library_bytes().to_str() == inner.to_str():
            return "bytes"
        if missing := set(byte_alphabet()) - set(vocabulary):
            raise DataError(f"it has no piece for {len(missing)} of the 256 bytes")
        return "bpe"
    raise DataError(f"its {type(inner.model).__name__} model is not of a kind that trivium knows")


def _bytes_of(piece: str, to_byte: Mapping[str, int]) -> bytes:
    # As the library's decoder: a piece with any character outside the alphabet stands for its own spelling.
    if all(character in to_byte for character in piece):
        return bytes(to_byte[character] for character in piece)
    return piece.encode()
