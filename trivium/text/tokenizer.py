"""One protocol over the `tokenizers` library: text to ids and back, with special ids that come only from code.

Every kind lives in a tokenizer.json that the library itself can read; `library` says how each one is set up there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, final

import tokenizers

from trivium.errors import DataError, printable, shown
from trivium.files import read_inside, read_regular, write_atomic
from trivium.text import adopt
from trivium.text.adopt import Card, Frame
from trivium.text.charsmap import Charsmap
from trivium.text.library import END, UNKNOWN, guarded, kind_of, parse, specials_of, with_specials
from trivium.text.pieces import Joint, Pieces
from trivium.text.reading import pieces_of, reading_of

LARGEST = 256 << 20  # bytes of a file of a tokenizer; Gemma's tokenizer.json has 33 MB
_STRANGE = "\U0010fffd"


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
        """The id that ends every document: <|endoftext|>, or what a published tokenizer has for it."""

    @property
    def begin(self) -> int:
        """The id that begins every document: `end` again, unless a published tokenizer has another one."""

    @property
    def frame(self) -> Frame:
        """What a published tokenizer puts around a text by itself; nothing for those that we train."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Every special token: its spelling and its id; of a published tokenizer under our spelling too."""

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
    """A Tokenizer over one of the library's, which it takes over; a DataError if that one is of another kind.

    With a card it is one that others trained, adopted.
    """

    def __repr__(self) -> str:
        return f"<{self.kind} tokenizer, {self.size:,} ids>"

    def __init__(self, inner: tokenizers.Tokenizer, card: Card | None = None) -> None:
        # The library neither stores this setting in its file nor has it on by default, so that "<|endoftext|>" in a
        # document would end it. Truncation and padding do come from files, and would lose or invent text.
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._card = card
        self._charsmap: Charsmap | None = None
        self._vocabulary = inner.get_vocab(with_added_tokens=True)
        if card is None:
            if sorted(self._vocabulary.values()) != list(range(len(self._vocabulary))):
                raise DataError("its ids are not 0, 1, 2, ... without holes")
            self._specials = specials_of(inner)
            if END not in self._specials:
                raise DataError(f"it has no special token {END}")
            self._kind, self._reading = kind_of(inner), reading_of(kind_of(inner))
            self._names = sorted(self._vocabulary, key=self._vocabulary.__getitem__)
        else:
            self._specials = card.specials
            self._kind, self._reading = adopt.kind_of_model(inner), adopt.reading(inner)
            self._names = adopt.names(inner, card)
            self._charsmap = Charsmap.read(card.charsmap) if card.charsmap else None
        # with a character that no vocabulary has: an unknown token that is itself unknown shows only here
        probed = guarded(lambda: self.encode_many([*self._specials, f"a {_STRANGE}"]))
        forged = {id for ids in probed for id in ids}
        if not forged.isdisjoint(self._specials.values()):
            raise DataError("it takes the spelling of a special token in a text for the token itself")

    @property
    def kind(self) -> str:
        return self._kind

    @property
    def size(self) -> int:
        return len(self._names)

    @property
    def end(self) -> int:
        return self._specials[self._card.roles.end if self._card else END]

    @property
    def begin(self) -> int:
        return self._specials[self._card.roles.begin] if self._card and self._card.roles.begin else self.end

    @property
    def frame(self) -> Frame:
        return self._card.frame if self._card else Frame()

    @property
    def card(self) -> Card | None:
        """What is known of a tokenizer that others trained."""
        return self._card

    @property
    def specials(self) -> Mapping[str, int]:
        return self._specials

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.serialise().encode()).hexdigest()

    @property
    def exact_cut(self) -> bool:
        return self._card is None and self._kind in ("chars", "bytes")

    @property
    def joint(self) -> Joint:
        return self._reading.joint

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
        spelled = list(texts) if self._charsmap is None else [self._charsmap.spell(text) for text in texts]
        encodings = self._inner.encode_batch_fast(spelled, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def spans(self, text: str) -> list[tuple[int, int]]:
        utf8(text)
        spelled = text if self._charsmap is None else self._charsmap.spell(text)
        offsets: list[tuple[int, int]] = self._inner.encode(spelled, add_special_tokens=False).offsets
        if self._charsmap is None:
            return offsets
        origins = [*self._charsmap.origins(text), (len(text), len(text))]
        return [(origins[first][0], origins[max(first, last - 1)][1]) for first, last in offsets]

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
                    f"{shown(text)} cannot be a special token: it is empty or a piece of text; spell it otherwise"
                )
            utf8(text)
        if not new:
            return self
        if self._card is not None:
            return LibraryTokenizer(*adopt.extend(self._inner, self._card, new, self.size))
        return LibraryTokenizer(with_specials(parse(self.serialise()), new))

    def framed(self, frame: Frame) -> LibraryTokenizer:
        """The same tokenizer, which others trained, with another frame."""
        assert self._card is not None
        return LibraryTokenizer(self._inner, replace(self._card, frame=frame))

    def serialise(self) -> str:
        text = self._inner.to_str(pretty=True)
        return text if self._card is None else f'{{"{adopt.CARD}": {self._card.dump()},{text[1:]}'

    def shown(self) -> dict[str, Any]:
        """The content of tokenizer.json as other programs read it."""
        file: dict[str, Any] = json.loads(self._inner.to_str())
        return file if self._card is None else adopt.shown(self._inner, self._card)

    def save(self, path: Path) -> None:
        write_atomic(path, self.serialise().encode())

    @cached_property
    def _pieces(self) -> Pieces:
        added = self._inner.get_added_tokens_decoder().values()
        spelled = {token.content for token in added if not token.special}
        specials = self._card.spellings if self._card else self._specials
        return Pieces(pieces_of(self._reading, self._names, specials, spelled), self._specials, self.joint)


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json, or in the folder that holds one; a DataError if it cannot be used."""
    folder = path.is_dir()
    file = path / "tokenizer.json" if folder else path
    try:
        # a link that the user names may lead anywhere, one inside a folder may not
        raw = read_inside(path, file.name, LARGEST) if folder else read_regular(file, LARGEST)
        text = raw.decode()
    except FileNotFoundError:
        raise DataError(f"{file} does not exist; name a tokenizer.json or a folder that holds one") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start}); name a tokenizer.json") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; name a tokenizer.json") from None
    card = None
    try:
        if text.startswith(f'{{"{adopt.CARD}"'):
            values = json.loads(text)
            card = values.pop(adopt.CARD)
            adopt.check_ids(values)
            text = json.dumps(values)
        inner = parse(text)
    except (DataError, ValueError, RecursionError) as error:
        raise DataError(
            f"{file} is not a tokenizer.json ({printable(str(error), 200)}); name another file or train anew"
        ) from None
    try:
        return LibraryTokenizer(inner, None if card is None else Card.read(card))
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
