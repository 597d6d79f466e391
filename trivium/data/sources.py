"""Text files to documents, in pieces small enough that a document of any size streams through bounded memory."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

from trivium.data.config import DataConfig
from trivium.errors import DataError, listed, shown
from trivium.text.tokenizer import Tokenizer

PIECE = 1 << 16  # characters; 16 of them keep two cores busy while the encodings stay near 100 MB
_CHUNK = 1 << 20
_LINE = 1 << 28  # a JSON line has to be held whole, so a file that is one endless line is refused
_HASHED = 4096  # characters of a document that decide its split
_TEXT = (".txt", ".text", ".md", ".jsonl")
COMPRESSED = (".gz", ".xz")

Cut = Literal["anywhere", "white", "space"]
_BORDERS: dict[Cut, re.Pattern[str]] = {
    # A byte-level BPE never joins what these places separate: the GPT-2 pre-split has no match with whitespace behind
    # a non-whitespace character, and its only look-ahead, `\s+(?!\S)`, never reaches past the non-whitespace character
    # that stands before the cut. Python's \S leaves out U+001C to U+001F, the library's does not: the cut takes the
    # stricter. Kinds that drop white space, or part words at it, are as content.
    "white": re.compile(r"(?<=\S)[ \t\r\n]"),
    # SentencePiece's pieces begin at spaces, and only there; the character behind keeps the next piece from being a
    # space alone, which `encoded` could not take away.
    "space": re.compile(r" (?=.)", re.DOTALL),
}


class Piece(NamedTuple):
    """A run of text of one document; `first` and `last` say where the document begins and ends."""

    text: str
    first: bool
    last: bool
    path: Path


class Source(NamedTuple):
    """A file as it was when it was read."""

    path: Path
    size: int
    sha256: str


def files(paths: Iterable[str | Path], *, key: str = "data.paths") -> list[Path]:
    """The files that `paths` name, folders replaced by the text files below them in sorted order."""
    found: list[Path] = []
    for path in map(Path, paths):
        try:
            is_folder = path.is_dir()
        except OSError as error:
            raise DataError(f"{key}: {shown(str(path))}: {error.strerror}; name another file") from None
        if is_folder:
            below = _below(path)
            if not below:
                kinds = ", ".join(_TEXT)
                raise DataError(f"{key}: {path} holds no text files ({kinds}, also .gz or .xz); name another folder")
            found.extend(below)
        elif not path.exists():
            raise DataError(f"{key}: {path} does not exist; name a text file, a folder of them or a .jsonl file")
        elif not path.is_file():
            raise DataError(f"{key}: {path} is not a regular file; write the text to a file first")
        else:
            found.append(path)
    if not found:
        raise DataError(f"{key}: no file is named; try {key}=my.txt")
    for path in found:
        if path.stat().st_size == 0:
            raise DataError(f"{key}: {path} is empty; remove it or name another file")
    return found


def total_bytes(paths: Iterable[str | Path]) -> int:
    """How many bytes `pieces` will report as read."""
    return sum(path.stat().st_size for path in files(paths))


def text_bytes(found: Iterable[Path]) -> int:
    """About how many bytes of text some files hold: a compressed one three times its own."""
    return sum(path.stat().st_size * (3 if path.suffix in COMPRESSED else 1) for path in found)


def pieces(
    paths: Iterable[str | Path],
    *,
    separator: str,
    field: str,
    cut: Cut = "white",
    read: Callable[[int], None],
    done: Callable[[Source], None] | None = None,
    size: int = PIECE,
) -> Iterator[Piece]:
    """Every document of `paths` in pieces of about `size` characters that `cut` says where to end.

    `read` hears how many bytes were consumed, `done` the size and hash of each finished file. A run of 16 pieces that
    offers no place to cut is cut all the same.
    """
    for path in files(paths):
        spoken = False
        with _opened(path, read, done) as stream:
            runs = _lines(stream, path, field) if _is_lines(path) else _split(_text(stream, path), separator)
            for text, first, last in _cut(runs, size, cut):
                spoken = spoken or not text.isspace()
                yield Piece(text, first, last, path)
            if not spoken:
                raise DataError(f"{path} is empty: it holds no text; remove it or name another file")


def cut_for(tokenizer: Tokenizer) -> Cut:
    """Where a document may be cut so that the ids of its pieces join to those of the whole."""
    if tokenizer.exact_cut:
        return "anywhere"
    # A tokenizer that puts a space of its own in front of a text and keeps all the others.
    return "space" if tokenizer.joint.drop == "first" and tokenizer.encode(" ") else "white"


def encoded(tokenizer: Tokenizer, batch: Sequence[Piece], cut: Cut) -> list[list[int]]:
    """The ids of some pieces that were cut so."""
    # The space that the tokenizer puts in front of a later piece stands for the one that it begins with.
    inner = [cut == "space" and not piece.first and len(piece.text) > 1 for piece in batch]
    texts = [piece.text.removeprefix(" ") if later else piece.text for piece, later in zip(batch, inner, strict=True)]
    return tokenizer.encode_many(texts)


def lines(path: Path, *, read: Callable[[int], None], done: Callable[[Source], None] | None = None) -> Iterator[str]:
    """The lines of a file; only a newline ends one, whatever else ends lines in Unicode."""
    offset = 0
    with _opened(path, read, done) as stream:
        for number in itertools.count(1):
            line = stream.readline(_LINE + 1)
            if not line:
                return
            if len(line) > _LINE:
                raise DataError(f"{path}, line {number} is longer than {_LINE >> 20} MiB; put one sentence on each")
            yield _decoded(line, path, number, offset).removesuffix("\n")
            offset += len(line)


def texts(config: DataConfig, *, read: Callable[[int], None]) -> Iterator[str]:
    """The text of the training documents, for training a tokenizer; all of a path that will be cut in two."""
    fraction = config.valid_share
    unseen = []
    for path in config.paths:
        none, kept = True, True
        for piece in pieces([path], separator=config.separator, field=config.field, read=read):
            kept = not held_out(piece.text, fraction) if piece.first else kept
            if kept:
                none = False
                yield piece.text
        if none:
            unseen.append(path)
    one_by_one = config.weights or len(unseen) == len(config.paths)
    least = 0.0 if one_by_one else fraction * total_bytes(config.paths)
    for path in (path for path in unseen if total_bytes([path]) > least):
        for piece in pieces([path], separator=config.separator, field=config.field, read=lambda _: None):
            yield piece.text


def held_out(text: str, fraction: float) -> bool:
    """Does the document that begins with `text` belong to validation? Equal beginnings fall on the same side."""
    digest = hashlib.blake2b(text[:_HASHED].encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _below(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found.extend(Path(parent, name) for name in names if not name.startswith(".") and _is_text(name))
    return sorted(path for path in found if path.is_file())


def _is_text(name: str) -> bool:
    stem, suffix = os.path.splitext(name.lower())
    if suffix not in COMPRESSED:
        return suffix in _TEXT
    inner = os.path.splitext(stem)[1]
    return not inner or inner in _TEXT  # news.gz is text, news.tar.gz is not


def _is_lines(path: Path) -> bool:
    name = path.name.lower()
    return (name[:-3] if name.endswith(COMPRESSED) else name).endswith(".jsonl")


class _Counted(io.RawIOBase):
    """A file on disk that counts and hashes what is read of it."""

    def __init__(self, path: Path, read: Callable[[int], None]) -> None:
        super().__init__()
        self._path, self._read = path, read
        self._file: io.FileIO | None = None
        self._hash, self._size = hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        # Opened late so that a file without permission fails where errors become sentences.
        self._file = self._file or io.FileIO(self._path)
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count = self._file.readinto(view)
        self._hash.update(view[:count])
        self._size += count
        self._read(count)
        return count

    def drain(self) -> None:
        """Read what follows the end of a compressed stream: it belongs to the file's hash."""
        while self.read(_CHUNK):
            pass

    def source(self) -> Source:
        return Source(self._path, self._size, self._hash.hexdigest())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


@contextlib.contextmanager
def _opened(path: Path, read: Callable[[int], None], done: Callable[[Source], None] | None) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed; `done` is told of it once it was read to its end."""
    counted = _Counted(path, read)
    try:
        with counted, _decompressed(counted, path) as stream:
            yield stream
            counted.drain()
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a damaged {path.suffix} file ({error}); compress or copy it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if done is not None:
        done(counted.source())


def _decompressed(counted: _Counted, path: Path) -> IO[bytes]:
    buffered = io.BufferedReader(counted, _CHUNK)
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=buffered, mode="rb"))
    return lzma.LZMAFile(buffered) if path.suffix.lower() == ".xz" else buffered


def _text(stream: IO[bytes], path: Path) -> Iterator[str]:
    """The characters of a UTF-8 stream, newlines untouched, a byte order mark at its start dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, begun = 0, False
    while True:
        chunk = stream.read(_CHUNK)
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, offset - held + error.start) from None
        offset += len(chunk)
        if text:
            yield text if begun else text.removeprefix("\ufeff")
            begun = True
        if not chunk:
            return


def _not_utf8(path: Path, offset: int) -> DataError:
    return DataError(f"{path} is not UTF-8 text (byte {offset}); convert it to UTF-8 or name another file")


def _split(chunks: Iterable[str], separator: str) -> Iterator[str | None]:
    """The text between separators, with None at the end of each document."""
    marks = sorted({"\f", separator} - {""}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, marks)))
    longest, held = len(marks[0]), ""
    for chunk, sight in itertools.chain(((chunk, longest) for chunk in chunks), [("", 1)]):
        held += chunk
        limit = len(held) - sight + 1  # from here on a mark may go on in the next chunk
        start = 0
        for match in pattern.finditer(held):
            if match.start() >= limit:
                break
            yield held[start : match.start()]
            yield None
            start = match.end()
        keep = max(start, limit)
        yield held[start:keep]
        held = held[keep:]
    yield None


def _lines(stream: IO[bytes], path: Path, field: str) -> Iterator[str | None]:
    """The text of each JSON line, with None after each."""
    offset = 0
    for number in itertools.count(1):
        line = stream.readline(_LINE + 1)
        if not line:
            return
        where = f"{path}, line {number}"
        if len(line) > _LINE:
            raise DataError(f"{where} is longer than {_LINE >> 20} MiB; put one JSON object on each line")
        text = _decoded(line, path, number, offset)
        offset += len(line)
        if text.strip():
            yield _member(text, field, where)
            yield None


def _decoded(line: bytes, path: Path, number: int, offset: int) -> str:
    """The text of line `number`, which begins at byte `offset`; a byte order mark at the start of a file is dropped."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, offset + error.start) from None
    return text.removeprefix("\ufeff") if number == 1 else text


def _member(line: str, field: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}); put one JSON object on each line") from None
    if not isinstance(value, dict) or field not in value:
        names = listed(value, 8) if isinstance(value, dict) else ""
        has = f"it has {names}" if names else "it has no keys"
        raise DataError(f"{where} has no key {shown(field)}; set data.field to the key of the text ({has})")
    text = value[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: {shown(field)} is not text; set data.field to the key of the text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{where}: {shown(field)} holds half a surrogate pair, which is no character; remove it"
        ) from None
    return text


def _cut(runs: Iterable[str | None], size: int, cut: Cut) -> Iterator[tuple[str, bool, bool]]:
    """Runs of text as pieces of documents; documents without a character are left out."""
    held, first = "", True
    for run in runs:
        if run is None:
            if held:
                yield held, first, True
            held, first = "", True
            continue
        held = held + run if held else run
        start = 0
        while at := _place(held, start + size, size, cut):
            yield held[start:at], first, False
            start, first = at, False
        held = held[start:]


def _place(text: str, start: int, size: int, cut: Cut) -> int:
    """Where to cut `text` at or after `start`, with at least a character behind the cut; 0 if not yet."""
    if len(text) <= start:
        return 0
    if cut == "anywhere":
        return start
    end = start + 15 * size
    if border := _BORDERS[cut].search(text, start, end):
        return border.start()
    return end if len(text) > end else 0
