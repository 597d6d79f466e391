"""BPE and WordPiece from the tables of other programs."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from trivium.errors import DataError
from trivium.text.adopt import Frame, Roles, added_token, adopt
from trivium.text.tokenizer import LibraryTokenizer

Split = Literal["gpt2", "llama3", "qwen2", "smollm", "none"]

# contractions in any case; letters with one sign before them; numbers; other signs with the line ends behind them
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LLAMA3 = _HEAD + r"\p{N}{1,3}" + _TAIL
_QWEN2 = _HEAD + r"\p{N}" + _TAIL


def byte_level_bpe(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    specials: Mapping[str, int],
    split: str,
    roles: Roles | None = None,
    frame: Frame | None = None,
    added: Mapping[str, int] | None = None,
) -> LibraryTokenizer:
    """A byte-level BPE whose texts are first split as those of `split` are; `added` are pieces found before all else.

    Special tokens may stand in `vocab` too, or beyond it.
    """
    if split not in get_args(Split):
        raise DataError(f"the split {split!r} of a byte-level BPE is none of {', '.join(get_args(Split))}")
    whole = {**vocab, **specials, **(added or {})}
    model = {
        "type": "BPE",
        "vocab": whole,
        "merges": [list(pair) for pair in merges],
        "ignore_merges": split == "llama3",  # a word that is a piece is that piece, whatever its merges
    }
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = normalizers.NFC() if split == "qwen2" else None
    inner.pre_tokenizer = _pre_split(split)
    inner.decoder = decoders.ByteLevel()
    # RoBERTa's mask stands for a word with the space before it
    entries = [{**added_token(content, id), "lstrip": content == "<mask>"} for content, id in specials.items()]
    entries += [{**added_token(content, id), "special": False} for content, id in (added or {}).items()]
    return _adopted(inner, model, entries, roles, frame)


def wordpiece(
    vocab: Mapping[str, int],
    *,
    lower: bool,
    accents: bool | None = None,
    chinese: bool = True,
    longest: int = 100,
    specials: Collection[str] = (),
    roles: Roles | None = None,
    frame: Frame | None = None,
) -> LibraryTokenizer:
    """BERT's WordPiece; `accents` says whether they are stripped, None: as `lower` does.

    Without a frame a text stands between [CLS] and [SEP].
    """
    if "[UNK]" not in vocab:
        raise DataError("a WordPiece vocabulary needs the piece [UNK]")
    model = {
        "type": "WordPiece",
        "vocab": dict(vocab),
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": longest,
    }
    inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=accents, handle_chinese_chars=chinese)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    marks = {*specials, "[PAD]", "[CLS]", "[SEP]", "[MASK]"} - {"[UNK]"}
    entries = [added_token(name, id) for name, id in vocab.items() if name in marks]
    if frame is None and {"[CLS]", "[SEP]"} <= vocab.keys():
        frame = Frame((vocab["[CLS]"],), (vocab["[SEP]"],))
    return _adopted(inner, model, entries, roles, frame)


def suffix_bpe(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], *, specials: Mapping[str, int], roles: Roles
) -> LibraryTokenizer:
    """GPT-1's BPE over lower-case words whose last letter carries </w>; <unk>, for what it lacks, ends a text too."""
    if "<unk>" not in vocab:
        raise DataError("a BPE of words needs the piece <unk>")
    model = {
        "type": "BPE",
        "vocab": {**vocab, **specials},
        "merges": [list(pair) for pair in merges],
        "unk_token": "<unk>",
        "end_of_word_suffix": "</w>",
        "fuse_unk": False,
    }
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.BPEDecoder(suffix="</w>")
    entries = [added_token(name, id) for name, id in specials.items() if name != "<unk>"]
    return _adopted(inner, model, entries, roles if roles.end else replace(roles, end="<unk>"), None)


def _pre_split(split: str) -> pre_tokenizers.PreTokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt2", "smollm"))
    if split == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    if split in ("gpt2", "none"):
        return plain
    words = tokenizers.Regex(_LLAMA3 if split == "llama3" else _QWEN2)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), plain])


def _adopted(
    inner: tokenizers.Tokenizer,
    model: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    roles: Roles | None,
    frame: Frame | None,
) -> LibraryTokenizer:
    file = json.loads(inner.to_str()) | {"model": dict(model), "added_tokens": [dict(entry) for entry in entries]}
    return LibraryTokenizer(*adopt(file, roles or Roles(), frame=frame or Frame()))
