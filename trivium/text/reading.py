"""What the ids of each kind stand for, and of any tokenizer whose decoder the library can describe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import decoders

from trivium.errors import DataError
from trivium.text.library import END_OF_LINE, END_OF_WORD, SPACE, byte_alphabet, byte_pieces
from trivium.text.pieces import Joint, Piece

Reader = Callable[[str], Piece]


class Reading(NamedTuple):
    """How names of pieces become text: each by itself, and how they join."""

    reader: Callable[[Sequence[str]], Reader]
    joint: Joint


def reading_of(kind: str) -> Reading:
    """The reading of a kind that we train."""
    readings = {
        "chars": Reading(_characters, Joint()),
        "bytes": Reading(_bytewise, Joint()),
        "bpe": Reading(_bytewise, Joint()),
        "words": Reading(_whole, Joint("last")),
        "word-bpe": Reading(lambda names: _ended(" "), Joint("last")),
        "wordpiece": Reading(_wordpieces("##", True), Joint("first", b" ")),
        "unigram": Reading(_marked, Joint("first")),
    }
    return readings[kind]


def described(decoder: Mapping[str, Any] | None) -> Reading:
    """The reading that a decoder in a tokenizer.json describes; a DataError if it is of an unknown sort."""
    if decoder is None:
        return Reading(_whole, Joint("last"))  # what the library does then: a space between pieces
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    sorts = {part["type"]: part for part in parts}
    if "ByteLevel" in sorts:
        return Reading(_bytewise, Joint())
    if part := sorts.get("WordPiece"):
        return Reading(_wordpieces(part["prefix"], part["cleanup"]), Joint("first", b" "))
    if part := sorts.get("BPEDecoder"):
        suffix = part["suffix"]
        return Reading(lambda names: _ended(suffix), Joint("last"))
    if part := sorts.get("Metaspace"):
        return Reading(_marked, Joint() if part["prepend_scheme"] == "never" else Joint("first"))
    if sorts.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        strip = sorts.get("Strip", {"start": 0})
        return Reading(_marked, Joint("first") if strip["start"] else Joint())
    raise DataError(f"its decoder, {' and '.join(sorts)}, is not one that trivium knows")


def pieces_of(
    reading: Reading, names: Sequence[str], specials: Collection[str], spelled: Collection[str] = ()
) -> Iterator[Piece]:
    """What every id stands for; `spelled` are pieces that stand for their own spelling whatever the reading."""
    read = reading.reader(names)
    for name in names:
        if name in specials:
            yield Piece(name, b"", True, True)
        elif name in spelled:
            yield _spaced(name, name.encode())
        else:
            yield read(name)


def _characters(names: Sequence[str]) -> Reader:
    return lambda name: _spaced(name, name.encode())


def _bytewise(names: Sequence[str]) -> Reader:
    to_byte = {character: byte for byte, character in enumerate(byte_alphabet())}

    def read(name: str) -> Piece:
        # As the library's decoder: a piece with any character outside the alphabet stands for its own spelling.
        whole = all(character in to_byte for character in name)
        return _spaced(name, bytes(to_byte[character] for character in name) if whole else name.encode())

    return read


def _spaced(name: str, raw: bytes) -> Piece:
    """A piece of a kind in which white space is text like any other: words lie between it."""
    text = raw.decode("utf-8", "ignore")
    return Piece(name, raw, text[:1].isspace(), text[-1:].isspace())


def _ended(suffix: str) -> Reader:
    def read(name: str) -> Piece:
        return Piece(name.replace(" ", END_OF_WORD), name.replace(suffix, " ").encode(), False, name.endswith(suffix))

    return read


def _whole(names: Sequence[str]) -> Reader:
    def read(name: str) -> Piece:
        return Piece(END_OF_LINE, b"\n", True, True) if name == "\n" else Piece(name, f"{name} ".encode(), True, True)

    return read


def _wordpieces(prefix: str, cleanup: bool) -> Callable[[Sequence[str]], Reader]:
    # The library's decoder says which pieces follow without a space: ## and some punctuation.
    decoder = decoders.WordPiece(prefix=prefix, cleanup=cleanup)

    def read(name: str) -> Piece:
        return Piece(name, decoder.decode(["a", name])[1:].encode(), not name.startswith(prefix), False)

    return lambda names: read


def _marked(names: Sequence[str]) -> Reader:
    pieces = byte_pieces()
    # without the fallback such a name can only be text
    to_byte = {name: bytes([byte]) for byte, name in enumerate(pieces)} if set(pieces) <= set(names) else {}

    def read(name: str) -> Piece:
        raw = to_byte.get(name) or name.replace(SPACE, " ").encode()
        return Piece(name, raw, name.startswith(SPACE), False)

    return read
