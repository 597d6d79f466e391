"""The library's tokenizers as each kind sets them up, and which kind one of them is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from trivium.errors import DataError, printable

END = "<|endoftext|>"
UNKNOWN = "<|unk|>"  # a character that was not seen in training: it comes from text, so it is not among the specials
UNKNOWN_WORD = "[UNK]"  # the same for a whole word of WordPiece
RARE_WORD = "<unk>"  # the same where a corpus of words has put it in the place of its rare words
END_OF_LINE = "<eos>"  # how a line end among words is shown; inside it is the newline, which no word can have
END_OF_WORD = "</w>"  # how the symbol is shown; inside it is the one character that no word can have, a space

Symbol = Literal["separate", "fused"]
Case = Literal["lower", "keep"]
Normal = Literal["nfkc", "identity"]
Fallback = Literal["none", "bytes"]

SPACE = "\u2581"  # SentencePiece's mark for a space
# Where str.split() splits: \s of a regular expression leaves out U+001C to U+001F.
_BLANK = "\u001c-\u0020\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WHITE = f"[\\t-\\r{_BLANK}]"
_WITHIN_LINE = f"[\\t\\v-\\r{_BLANK}]"  # all of it but the newline


def parse(text: str) -> tokenizers.Tokenizer:
    """The library's tokenizer in the text of a tokenizer.json; a DataError with the library's reason if it is none."""
    found: tokenizers.Tokenizer = guarded(lambda: tokenizers.Tokenizer.from_str(text))
    return found


def guarded(do: Callable[[], Any]) -> Any:
    """What the library makes of a file that others wrote; a DataError with its reason if it fails."""
    try:
        return do()
    except BaseException as error:
        # The library raises nothing narrower than Exception, and what it did not foresee is not even one.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(printable(" ".join(str(error).split()), 200)) from None


def with_end(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """`inner` with the special token <|endoftext|>, under the last id if its vocabulary did not have it yet."""
    return with_specials(inner, [END])


def with_specials(inner: tokenizers.Tokenizer, spellings: Iterable[str]) -> tokenizers.Tokenizer:
    """`inner` with these special tokens under new ids, in order."""
    inner.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in spellings])
    return inner


def specials_of(inner: tokenizers.Tokenizer) -> dict[str, int]:
    """The special tokens of a library tokenizer and their ids, by id; without the one that unknown text becomes."""
    unknown = getattr(inner.model, "unk_token", None)
    added = sorted(inner.get_added_tokens_decoder().items())
    return {token.content: id for id, token in added if token.special and token.content != unknown}


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


def library_word_bpe(symbols: Sequence[str], merges: Sequence[tuple[str, str]], symbol: Symbol) -> tokenizers.Tokenizer:
    """The library's BPE over words that end in a space, the symbol: alone at first, or fused with the last letter."""
    vocabulary = {piece: id for id, piece in enumerate([*symbols, UNKNOWN])}
    # An empty suffix is not none: the library would then mark last letters with nothing and find them unknown.
    suffix = {"end_of_word_suffix": " "} if symbol == "fused" else {}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, list(merges), unk_token=UNKNOWN, **suffix))
    single = [normalizers.Replace(tokenizers.Regex(_WHITE + "+"), " "), normalizers.Strip()]
    if symbol == "separate":
        # every word ends in a space, the last one too; an empty text has no word
        single.append(normalizers.Replace(tokenizers.Regex(r"(?<=.)\z"), " "))
    inner.normalizer = normalizers.Sequence(single)
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous" if symbol == "separate" else "removed")
    inner.decoder = decoders.BPEDecoder(suffix=" ")
    return with_end(inner)


def library_words(words: Iterable[str], unknown: str) -> tokenizers.Tokenizer:
    """The library's tokenizer with one id per word between white space, in this order, and one for every newline."""
    vocabulary = {word: id for id, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    within = pre_tokenizers.Split(tokenizers.Regex(_WITHIN_LINE + "+"), "removed")
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated"), within])
    spaced = decoders.Replace(tokenizers.Regex(r"(?<=[^\n])\z"), " ")
    # not decoders.Strip: the library's panics on an empty text
    last = decoders.Replace(tokenizers.Regex(r" \z"), "")
    inner.decoder = decoders.Sequence([spaced, decoders.Fuse(), last])
    return with_end(inner)


def library_wordpiece(pieces: Iterable[str], case: Case, longest: int) -> tokenizers.Tokenizer:
    """The library's WordPiece with BERT's normaliser and pre-split."""
    vocabulary = {piece: id for id, piece in enumerate([*pieces, UNKNOWN_WORD])}
    model = models.WordPiece(vocabulary, unk_token=UNKNOWN_WORD, max_input_chars_per_word=longest)
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.BertNormalizer(lowercase=case == "lower")
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return with_end(inner)


def library_unigram(scores: Sequence[tuple[str, float]], normal: Normal, fallback: Fallback) -> tokenizers.Tokenizer:
    """The library's Unigram with SentencePiece's spaces: a dummy one in front, each the start of a piece."""
    floor = min([-1.0, *(score for _, score in scores)])
    # Bytes and the unknown are pieces like others to the library: a text that spells one out must find its
    # characters cheaper, and they are at most 7.
    never = round(10 * floor, 6)
    extra = [*(byte_pieces() if fallback == "bytes" else ()), UNKNOWN]
    # six decimals: the library reads a longer number back with another last bit, and the file would change its hash
    vocabulary = [*((piece, round(score, 6)) for piece, score in scores), *((piece, never) for piece in extra)]
    model = models.Unigram(vocabulary, unk_id=len(vocabulary) - 1, byte_fallback=fallback == "bytes")
    inner = tokenizers.Tokenizer(model)
    dummy = normalizers.Prepend(SPACE)
    collapse = [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(rf"[\s{SPACE}]+"), " "), normalizers.Strip()]
    inner.normalizer = normalizers.Sequence([*collapse, dummy] if normal == "nfkc" else [dummy])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=True)
    inner.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_end(inner)


def byte_pieces() -> list[str]:
    """The pieces that stand for single bytes where a character is unknown."""
    return [f"<0x{byte:02X}>" for byte in range(256)]


def kind_of(inner: tokenizers.Tokenizer) -> str:
    """The kind of a library tokenizer: bpe is anything byte-level, the others are what we write."""
    vocabulary = inner.get_vocab(with_added_tokens=False)
    if isinstance(inner.model, models.WordLevel):
        characters = [piece for piece in vocabulary if len(piece) == 1]
        if with_specials(library_chars(characters), specials_of(inner)).to_str() == inner.to_str():
            return "chars"
    elif isinstance(inner.model, models.BPE) and isinstance(inner.decoder, decoders.ByteLevel):
        if with_specials(library_bytes(), specials_of(inner)).to_str() == inner.to_str():
            return "bytes"
        if missing := set(byte_alphabet()) - set(vocabulary):
            raise DataError(f"it has no piece for {len(missing)} of the 256 bytes")
        return "bpe"
    shape = _shape(inner)
    for kind, unknown, known in _shapes():
        if shape == known:
            if unknown not in vocabulary:
                raise DataError(f"it has no piece {unknown} for what it does not know")
            if kind == "words":
                _check_words(vocabulary)
            return kind
    raise DataError(f"its {type(inner.model).__name__} model is not of a kind that trivium knows")


def _shapes() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every way in which we set a learned kind up: its name, its unknown piece, and all but what was learned."""
    symbols: tuple[Symbol, ...] = ("separate", "fused")
    cases: tuple[Case, ...] = ("lower", "keep")
    normals: tuple[Normal, ...] = ("nfkc", "identity")
    fallbacks: tuple[Fallback, ...] = ("none", "bytes")
    for symbol in symbols:
        yield "word-bpe", UNKNOWN, _shape(library_word_bpe([], [], symbol))
    for unknown in (UNKNOWN, RARE_WORD):
        yield "words", unknown, _shape(library_words([], unknown))
    for case in cases:
        yield "wordpiece", UNKNOWN_WORD, _shape(library_wordpiece([], case, 1))
    for normal in normals:
        for fallback in fallbacks:
            yield "unigram", UNKNOWN, _shape(library_unigram([], normal, fallback))


def _check_words(vocabulary: Iterable[str]) -> None:
    """Refuse words that no text could give: encode and decode would not agree."""
    others = {word for word in vocabulary if word.split() != [word]}
    if others != {"\n"}:
        raise DataError("its words hold white space or it has none for a line end")


def _shape(inner: tokenizers.Tokenizer) -> dict[str, Any]:
    """Everything in a tokenizer's file but its vocabulary, and the settings that a file is free to choose."""
    file: dict[str, Any] = json.loads(inner.to_str())
    free = {"vocab", "merges", "unk_id", "max_input_chars_per_word"}
    model = {name: value for name, value in file["model"].items() if name not in free}
    model["knows no unknown"] = file["model"].get("unk_id", 0) is None  # such a Unigram fails at the first one
    return {name: file[name] for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")} | {
        "model": model
    }
