"""The tokenizer in the settings of a GGUF file, and ours as such settings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trivium.errors import DataError, RequestError, shown
from trivium.interop.fields import Fields
from trivium.interop.foreign import Say
from trivium.text.adopt import Frame, Roles
from trivium.text.library import byte_alphabet, byte_pieces
from trivium.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, Scored, Spelling, bpe
from trivium.text.tables import byte_level_bpe
from trivium.text.tokenizer import LibraryTokenizer, Tokenizer

_PREFIX = "tokenizer."
_LONGEST = 1024  # characters of a piece: pairs that make a longer one would take too long to find
_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id"}
_FILLING = re.compile(r"\[PAD\d+\]")  # llama.cpp's converter fills a vocabulary up with these

# How a byte-level tokenizer splits a text before it is cut into pieces: llama.cpp's names, and those of text.tables.
SPLITS = {
    **dict.fromkeys(("gpt-2", "gpt2", "default", "phi-2", "mpt", "olmo", "roberta-bpe"), "gpt2"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), "qwen2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "smollm"),
}
_NAMES = {"gpt2": "gpt-2", "llama3": "llama-bpe", "qwen2": "qwen2", "smollm": "smollm"}


def read_text(
    settings: Mapping[str, Any], vocab: int, where: str, *, say: Say
) -> tuple[Tokenizer | None, dict[str, Any]]:
    """The tokenizer of a model with `vocab` ids, or None and a sentence why not; and notes on it."""
    table = {key.removeprefix(_PREFIX): value for key, value in settings.items() if key.startswith(_PREFIX)}
    fields = Fields(table, f"{where}: tokenizer")
    template = table.get("chat_template", "")
    ids = {role: fields.integer(f"ggml.{key}", 0, least=0, most=vocab - 1) for role, key in _ROLES.items()}
    ids = {role: id for role, id in ids.items() if f"ggml.{_ROLES[role]}" in fields}
    notes: dict[str, Any] = {"ids": {role: [id] for role, id in ids.items()}}
    if isinstance(template, str) and template:
        notes["chat_template"] = template
    kind, pre = table.get("ggml.model"), table.get("ggml.pre", "default")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        say(f"{where} has a tokenizer of the kind {shown(kind, 40)}, which trivium does not read from GGUF")
        return None, notes
    if kind == "gpt2" and not (isinstance(pre, str) and pre in SPLITS):
        say(f"{where} has a tokenizer that splits texts by {shown(pre, 40)}, which trivium does not know")
        return None, notes
    if kind == "gpt2" and pre == "default":
        say(f"{where} does not say how its tokenizer splits texts; they are split as GPT-2's are")
    try:
        pieces = _pieces(fields, table, vocab)
        roles, frame = _roles(fields, pieces, ids, kind == "llama" or SPLITS[pre] == "llama3")
        if kind == "llama":
            spelling = Spelling(dummy=fields.flag("ggml.add_space_prefix", True))
            return bpe(pieces, spelling=spelling, roles=roles, frame=frame), notes
        return _byte_level(fields, pieces, SPLITS[pre], roles, frame), notes
    except DataError as error:
        raise DataError(f"{where}: its tokenizer cannot be used: {error}") from None


def _pieces(fields: Fields, table: Mapping[str, Any], vocab: int) -> list[Scored]:
    """Every piece with its score and type, without those that only fill the vocabulary up."""
    tokens = fields.words("ggml.tokens")
    scores = _numbers(table, "ggml.scores", len(tokens), 0.0)
    types = [int(number) for number in _numbers(table, "ggml.token_type", len(tokens), NORMAL)]
    if len(tokens) > vocab:
        raise DataError(f"it has {len(tokens)} pieces for a model of {vocab} ids")
    while tokens and types[-1] in (UNUSED, USER) and _FILLING.fullmatch(tokens[-1]):
        tokens, types = tokens[:-1], types[:-1]
    if len(set(tokens)) < len(tokens) or not all(0 < len(token) <= _LONGEST for token in tokens):
        raise DataError("two of its pieces are the same, or one is empty or too long")
    if not all(NORMAL <= number <= BYTE for number in types):
        raise DataError("its pieces have unknown types")
    rows = zip(tokens, scores, types, strict=False)
    return [Scored(token, score, number) for token, score, number in rows]


def _numbers(table: Mapping[str, Any], name: str, size: int, default: float) -> list[float]:
    """One finite number for each piece."""
    values = table.get(name)
    if values is None:
        return [default] * size
    if not isinstance(values, np.ndarray) or len(values) != size or not np.isfinite(values).all():
        raise DataError(f"{name} does not give a number to each piece")
    numbers: list[float] = values.tolist()
    return numbers


def _roles(fields: Fields, pieces: Sequence[Scored], ids: Mapping[str, int], begins: bool) -> tuple[Roles, Frame]:
    """Which piece does what; `begins` where the kind puts its first piece before every text unless told not to."""

    def spelled(role: str) -> str:
        return pieces[ids[role]].text if ids.get(role, len(pieces)) < len(pieces) else ""

    roles = Roles(begin=spelled("bos"), end=spelled("eos"), pad=spelled("pad"))
    before = fields.flag("ggml.add_bos_token", begins) and roles.begin
    after = fields.flag("ggml.add_eos_token", False) and roles.end
    return roles, Frame((ids["bos"],) if before else (), (ids["eos"],) if after else ())


def _byte_level(fields: Fields, pieces: Sequence[Scored], split: str, roles: Roles, frame: Frame) -> Tokenizer:
    merges = [tuple(line.split(" ")) for line in fields.words("ggml.merges")]
    if not all(len(pair) == 2 for pair in merges):
        raise DataError("its merges are not pairs of pieces")
    special = {piece.text: id for id, piece in enumerate(pieces) if piece.type in (CONTROL, UNKNOWN)}
    added = {piece.text: id for id, piece in enumerate(pieces) if piece.type == USER}
    vocab = {piece.text: id for id, piece in enumerate(pieces)}
    pairs = [(left, right) for left, right in merges]
    return byte_level_bpe(vocab, pairs, specials=special, split=split, roles=roles, frame=frame, added=added)


def write_text(tokenizer: Tokenizer, vocab: int) -> dict[str, Any]:
    """The settings of a tokenizer in a model of `vocab` ids; a RequestError if GGUF cannot express it."""
    if not isinstance(tokenizer, LibraryTokenizer) or tokenizer.size > vocab:
        raise RequestError("GGUF cannot express the tokenizer of this model: there is none, or it has too many ids")
    file = tokenizer.shown()
    write = _writer(file)
    if write is None:
        raise RequestError(
            f"GGUF cannot express a tokenizer of the kind {tokenizer.kind} with these rules; export as hf instead"
        )
    names = ["" for _ in range(tokenizer.size)]
    known = file["model"]["vocab"] | {entry["content"]: entry["id"] for entry in file["added_tokens"]}
    for name, id in known.items():
        names[id] = name
    types = [NORMAL if name else UNUSED for name in names]
    for entry in file["added_tokens"]:
        types[entry["id"]] = CONTROL if entry["special"] else USER
    names = [name or f"[PAD{id}]" for id, name in enumerate(names)]
    table = write(file, names, types)
    missing = range(len(names), vocab)
    table["tokens"] = names + [f"[PAD{id}]" for id in missing]
    table["token_type"] = np.array(types + [UNUSED] * len(missing), np.int32)
    if "scores" in table:
        table["scores"] = np.array([*table["scores"], *(-math.inf for _ in missing)], np.float32).clip(-1e9)
    frame = tokenizer.frame
    table |= {
        "bos_token_id": tokenizer.begin,
        "eos_token_id": tokenizer.end,
        "add_bos_token": frame.before == (tokenizer.begin,),
        "add_eos_token": frame.after == (tokenizer.end,),
    }
    if (pad := tokenizer.specials.get("<pad>", tokenizer.specials.get("[PAD]"))) is not None:
        table["padding_token_id"] = pad
    return {f"{_PREFIX}ggml.{key}": value for key, value in table.items()}


Writer = Callable[[dict[str, Any], list[str], list[int]], dict[str, Any]]


def _writer(file: dict[str, Any]) -> Writer | None:
    """The writer for a tokenizer.json, if there is one."""
    model, decoder = file["model"], file["decoder"] or {"type": ""}
    if model["type"] != "BPE" or model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
        return None
    if decoder["type"] == "ByteLevel":
        return _write_byte_level if _split_of(file) else None
    parts = {part["type"] for part in decoder.get("decoders", [])}
    rules = file["normalizer"] or {"type": ""}
    steps = {step["type"] for step in rules.get("normalizers", [rules])}
    fits = steps <= {"Prepend", "Replace"} and model["byte_fallback"] and "ByteFallback" in parts
    return _write_scored if fits else None


def _split_of(file: dict[str, Any]) -> str:
    """The name of the way in which a byte-level tokenizer splits texts; "" if GGUF has none for it."""
    splits = {"gpt2": "gpt2", "llama3": "llama3", "qwen2": "qwen2", "smollm": "smollm"}
    if not file["model"]["merges"]:
        splits["none"] = "gpt2"  # single bytes, wherever they are split
    bare = {character: byte for byte, character in enumerate(byte_alphabet())}
    for split, name in splits.items():
        known = byte_level_bpe(bare, [], specials={"</s>": 256}, split=split)
        assert isinstance(known, LibraryTokenizer)
        wanted = known.shown()
        same = all(_plain(file[rule]) == _plain(wanted[rule]) for rule in ("normalizer", "pre_tokenizer"))
        if same and bool(file["model"]["ignore_merges"]) == bool(wanted["model"]["ignore_merges"]):
            return _NAMES[name]
    return ""


def _plain(rule: Any) -> Any:
    """A rule of a tokenizer.json without what only concerns offsets."""
    if isinstance(rule, dict):
        return {key: _plain(value) for key, value in rule.items() if key != "trim_offsets"}
    return [_plain(value) for value in rule] if isinstance(rule, list) else rule


def _write_byte_level(file: dict[str, Any], names: list[str], types: list[int]) -> dict[str, Any]:
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in file["model"]["merges"]]
    return {"model": "gpt2", "pre": _split_of(file), "merges": [" ".join(pair) for pair in pairs]}


def _write_scored(file: dict[str, Any], names: list[str], types: list[int]) -> dict[str, Any]:
    """Scores that fall in the order of the merges; types of bytes and of the unknown piece are put in their place."""
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in file["model"]["merges"]]
    rank: dict[str, int] = {}
    for left, right in pairs:
        rank.setdefault(left + right, len(rank))
    raw = set(byte_pieces())
    for id, name in enumerate(names):
        if name in raw:
            types[id] = BYTE
        elif name == file["model"]["unk_token"]:
            types[id] = UNKNOWN
    rules = file["normalizer"] or {"type": ""}
    dummy = any(step["type"] == "Prepend" for step in rules.get("normalizers", [rules]))
    scores = [0.0 if types[id] != NORMAL else -float(rank.get(name, len(rank))) for id, name in enumerate(names)]
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": dummy}
