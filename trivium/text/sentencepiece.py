"""SentencePiece models, BPE and Unigram, on the `tokenizers` library; a reader of `.model` files of our own.

A `.model` file is a protocol buffer: fields of (number, type), read here by hand and bounded by the file itself.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from trivium.errors import DataError
from trivium.files import read_inside
from trivium.text.adopt import HIDDEN, Frame, Roles, added_token, adopt
from trivium.text.library import SPACE
from trivium.text.tokenizer import LibraryTokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
_LARGEST = 64 << 20  # bytes of a file; Gemma's, the largest known, has 4 MB
_MODELS: dict[int, Literal["unigram", "bpe"]] = {1: "unigram", 2: "bpe"}


class Scored(NamedTuple):
    """A piece of a SentencePiece model: its spelling with ▁ for a space, its score and its type."""

    text: str
    score: float
    type: int = NORMAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """How a text is spelled before it is cut into pieces."""

    charsmap: bytes = b""  # SentencePiece's table of replacements; none is the text as it is
    dummy: bool = True  # a space in front of every text
    collapse: bool = False  # runs of spaces become one, those at the ends none
    fallback: bool = True  # a character that is no piece becomes its bytes, where there are pieces for them


LLAMA = Spelling()


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a `.model` file holds."""

    kind: Literal["unigram", "bpe"]
    pieces: tuple[Scored, ...]
    spelling: Spelling
    roles: Roles


def read_model(path: Path) -> Model:
    """The SentencePiece model in a file; a DataError if it is damaged or of a kind that the library cannot express."""
    try:
        return _model(read_inside(path.parent, path.name, _LARGEST))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; name a SentencePiece .model") from None
    except (ValueError, struct.error, OverflowError):
        raise DataError(f"{path} is not a SentencePiece model, or damaged; restore it from a copy") from None
    except _Unknown as error:
        raise DataError(f"{path} cannot be used: {error}; give a tokenizer.json in its place") from None


def bpe(
    pieces: Sequence[Scored],
    *,
    spelling: Spelling = LLAMA,
    roles: Roles | None = None,
    frame: Frame | None = None,
) -> LibraryTokenizer:
    """The tokenizer of SentencePiece's BPE: the neighbours that make the piece with the best score are merged first."""
    pieces = _unmarked(pieces)
    ids = {_reachable(piece): id for id, piece in enumerate(pieces)}
    merges = [[left, right] for left, right in _merges(pieces, ids)]
    unknown = next((piece.text for piece in pieces if piece.type == UNKNOWN), None)
    settings = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": _bytes(pieces, spelling)}
    model = {"type": "BPE", "vocab": ids, "merges": merges, "ignore_merges": False, **settings}
    return _tokenizer(model, pieces, spelling, roles, frame)


def unigram(
    pieces: Sequence[Scored],
    *,
    spelling: Spelling,
    roles: Roles | None = None,
    frame: Frame | None = None,
) -> LibraryTokenizer:
    """The tokenizer of SentencePiece's Unigram: the cut with the best sum of scores."""
    pieces = _unmarked(pieces)
    unknown = next((id for id, piece in enumerate(pieces) if piece.type == UNKNOWN), None)
    if unknown is None:
        raise DataError("it has no piece for what it does not know")
    normal = [piece.score for piece in pieces if piece.type == NORMAL] or [0.0]
    floor, best = min(normal), max(normal)
    # bytes cannot be hidden, the library finds them by name: a text that spells one out must be cheaper in characters
    scores = {BYTE: 20 * floor, UNUSED: floor}
    vocab: list[list[Any]] = [[_reachable(piece), scores.get(piece.type, piece.score)] for piece in pieces]
    for id, piece in enumerate(pieces):
        if piece.type == USER:  # better than any cut of it, as in SentencePiece
            vocab[id][1] = len(piece.text) * best - 0.1
    model = {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": _bytes(pieces, spelling)}
    return _tokenizer(model, pieces, spelling, roles, frame)


def tokenizer_of(model: Model, *, roles: Roles | None = None, frame: Frame | None = None) -> LibraryTokenizer:
    """The tokenizer of a `.model` file."""
    build = bpe if model.kind == "bpe" else unigram
    return build(model.pieces, spelling=model.spelling, roles=roles or model.roles, frame=frame)


def _tokenizer(
    model: Mapping[str, Any], pieces: Sequence[Scored], spelling: Spelling, roles: Roles | None, frame: Frame | None
) -> LibraryTokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = _normalizer(spelling)
    if not any(SPACE in piece.text.lstrip(SPACE) for piece in pieces if piece.type in (NORMAL, USER)):
        # no piece reaches over the end of a word, so words can be cut alone: long texts stay linear
        inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(f"{SPACE}+[^{SPACE}]*"), "isolated")
    strip = [decoders.Strip(" ", 1, 0)] if spelling.dummy else []
    inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    file = json.loads(inner.to_str()) | {"model": dict(model)}
    specials = {piece.text for piece in pieces if piece.type == CONTROL or _sentinel(piece)}
    file["added_tokens"] = [
        dict(added_token(piece.text, id)) for id, piece in enumerate(pieces) if piece.text in specials
    ]
    charsmap = base64.b64encode(spelling.charsmap).decode()
    return LibraryTokenizer(*adopt(file, roles or Roles(), frame=frame or Frame(), charsmap=charsmap))


def _normalizer(spelling: Spelling) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spelling.collapse:
        steps += [
            normalizers.Replace(tokenizers.Regex(r" +"), " "),
            normalizers.Replace(tokenizers.Regex(r"\A | \z"), ""),
        ]
    steps += [normalizers.Prepend(" ")] if spelling.dummy else []
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _merges(pieces: Sequence[Scored], ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Every pair of pieces that makes a third, by the score of that one; first those that the user defined."""
    usable = {piece.text for piece in pieces if piece.type in (NORMAL, USER)}
    score = {piece.text: (piece.type != USER, -piece.score) for piece in pieces}
    for text in sorted(usable, key=lambda text: (score[text], ids[text])):
        cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
        pairs = [(left, right) for left, right in cuts if left in usable and right in usable]
        yield from sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _reachable(piece: Scored) -> str:
    """The name by which the library finds a piece in texts; those out of use it must not find."""
    return HIDDEN + piece.text if piece.type == UNUSED else piece.text


def _bytes(pieces: Sequence[Scored], spelling: Spelling) -> bool:
    return spelling.fallback and sum(piece.type == BYTE for piece in pieces) == 256


def _unmarked(pieces: Sequence[Scored]) -> list[Scored]:
    """The pieces with sentinels under their bare names: some models have a space in front of them."""
    return [piece._replace(text=piece.text.removeprefix(SPACE)) if _sentinel(piece) else piece for piece in pieces]


def _sentinel(piece: Scored) -> bool:
    """Whether a piece that the user of SentencePiece defined is a mark and not text."""
    text = piece.text.removeprefix(SPACE)
    return piece.type == USER and text.startswith("<") and text.endswith(">") and len(text) > 2


class _Unknown(Exception):
    """A model that is sound, and of a sort that the library cannot express."""


Field = tuple[int, int | bytes]


def _fields(data: bytes) -> Iterator[Field]:
    """The fields of a message in the wire format: a whole number, or the bytes of a float, a text or a message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            size, at = _varint(data, at)
        elif not size:
            raise ValueError(wire)
        if size > len(data) - at:
            raise ValueError(size)
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at + place >= len(data):
            raise ValueError(at)
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError(at)


def _model(data: bytes) -> Model:
    pieces: list[Scored] = []
    trainer: dict[int, int | bytes] = {}
    rules: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_message(value)))
        elif number == 2:
            trainer |= _message(value)
        elif number == 3:
            rules |= _message(value)
    if not pieces:
        raise ValueError("no pieces")
    kind = _number(trainer, 3, 1)
    if kind not in _MODELS:
        raise _Unknown("it is a model of whole words or characters, not BPE or Unigram")
    if _number(trainer, 24, 0):
        raise _Unknown("its spaces stand behind the words")
    charsmap = rules.get(2, b"")
    spelling = Spelling(
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        dummy=bool(_number(rules, 3, 1)),
        collapse=bool(_number(rules, 4, 1)),
        fallback=bool(_number(trainer, 35, 0)),
    )

    def spelled(field: int, default: int) -> str:
        # a negative id, ten bytes long on the wire, says that there is none
        id = _number(trainer, field, default)
        return pieces[id].text if id < len(pieces) and pieces[id].type == CONTROL else ""

    roles = Roles(begin=spelled(41, 1), end=spelled(42, 2), pad=spelled(43, 1 << 63))
    return Model(kind=_MODELS[kind], pieces=tuple(pieces), spelling=spelling, roles=roles)


def _piece(fields: Mapping[int, int | bytes]) -> Scored:
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece")
    type = _number(fields, 3, NORMAL)
    if not text or not NORMAL <= type <= BYTE:
        raise ValueError("a piece")
    value: float = struct.unpack("<f", score)[0]
    if value != value or abs(value) == float("inf"):
        raise ValueError("a score")
    return Scored(text.decode(), value, type)


def _message(value: int | bytes) -> dict[int, int | bytes]:
    """The fields of a message, of each the last; those that repeat are of no interest here."""
    if not isinstance(value, bytes):
        raise ValueError("a message")
    return dict(_fields(value))


def _number(fields: Mapping[int, int | bytes], field: int, default: int) -> int:
    value = fields.get(field, default)
    if not isinstance(value, int):
        raise ValueError(field)
    return value
