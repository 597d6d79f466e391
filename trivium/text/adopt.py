"""Tokenizers that others have trained: their special tokens taken out of reach of texts, and what each one is for.

The library takes the spelling of a special token in a text for the token where the model's vocabulary has it. So every
special token is known to the library under a name that begins with a raw space and a zero, which no word has; its true
spelling stands in a table of ours, in the same tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import tokenizers

from trivium.errors import DataError
from trivium.text.library import byte_alphabet, guarded, parse
from trivium.text.reading import Reading, described

CARD = "trivium"  # the key of our table in a tokenizer.json
HIDDEN = " \0"  # before the name of what texts must not reach
_SCALE = float(1 << 23)  # of Unigram scores: float32 has as many binary digits
_LARGEST_SCORE = 3.5e38  # of a float32
_UNKNOWN = 10.0  # by how much an unknown character is worse than the worst piece
_MOST = 4_000_000  # ids; the largest published vocabulary has 256,000

Added = Mapping[str, Any]  # one entry of "added_tokens" in a tokenizer.json


class Frame(NamedTuple):
    """The ids that a tokenizer puts before and after a text, and those that a decoder behind a source begins with."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    start: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Which special token does what, by its spelling; "" where there is none."""

    begin: str = ""
    end: str = ""
    pad: str = ""
    mask: str = ""
    first: str = ""  # of a text that is to be classified
    separator: str = ""

    def completed(self, known: Collection[str]) -> Roles:
        """Roles that a vocabulary can fill: those it lacks are none, those left open go to the usual spellings."""
        named = {role: spelling if spelling in known else "" for role, spelling in asdict(self).items()}
        for role, spellings in _USUAL.items():
            named[role] = named[role] or next((spelling for spelling in spellings if spelling in known), "")
        if not named["end"]:
            raise DataError("it names no token that ends a text; give eos_token in tokenizer_config.json")
        return Roles(**named)

    def aliases(self) -> dict[str, str]:
        """The spellings under which our objectives ask for a role, and those that this tokenizer has for it."""
        pad = "" if self.pad == self.end else self.pad  # padding is never generated, an end must be
        pairs = {"[MASK]": self.mask, "[CLS]": self.first, "[SEP]": self.separator, "[PAD]": pad, "<pad>": pad}
        return {ours: theirs for ours, theirs in pairs.items() if theirs}


_USUAL = {
    "end": ("</s>", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<eos>", "[SEP]", "[EOS]"),
    "pad": ("<pad>", "[PAD]"),
    "mask": ("[MASK]", "<mask>"),
    "first": ("[CLS]",),
    "separator": ("[SEP]",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What the library's file does not say of an adopted tokenizer."""

    added: tuple[Added, ...]  # the special tokens by id
    roles: Roles
    frame: Frame
    charsmap: str = ""  # SentencePiece's replacements in base64, made before the library sees the text
    unknown: str = ""  # what its publisher calls the token for what it does not know, where the library's file does not

    @property
    def specials(self) -> dict[str, int]:
        """Every special token and its id; our names for a role before theirs, which decoding spells out."""
        real: dict[str, int] = {entry["content"]: entry["id"] for entry in self.added}
        ours = {name: real[theirs] for name, theirs in self.roles.aliases().items() if name not in real}
        return ours | real

    @property
    def spellings(self) -> frozenset[str]:
        """The true spellings of the special tokens."""
        return frozenset(entry["content"] for entry in self.added)

    def dump(self) -> str:
        """The card as JSON."""
        values = {"added": self.added, "roles": asdict(self.roles), "frame": self.frame._asdict()}
        values |= {"charsmap": self.charsmap} | ({"unknown": self.unknown} if self.unknown else {})
        return json.dumps(values, ensure_ascii=False)

    @staticmethod
    def read(values: Any) -> Card:
        """The card in a file, checked."""
        try:
            ids = {name: tuple(values["frame"][name]) for name in Frame._fields}
            roles = Roles(**values["roles"])
            added = tuple({"id": entry["id"], "content": entry["content"]} | entry for entry in values["added"])
            numbers = [*(entry["id"] for entry in added), *(id for row in ids.values() for id in row)]
            unknown = values.get("unknown", "")
            texts = [*(entry["content"] for entry in added), *asdict(roles).values(), values["charsmap"], unknown]
            sound = all(type(id) is int and 0 <= id < _MOST for id in numbers)
            sound = sound and all(isinstance(text, str) for text in texts)
            sound = sound and {spelling for spelling in asdict(roles).values() if spelling} <= set(texts[: len(added)])
        except (AttributeError, TypeError, KeyError, ValueError):
            sound = False
        if not sound or not roles.end:
            raise DataError(f'its table "{CARD}" is damaged')
        return Card(added=added, roles=roles, frame=Frame(**ids), charsmap=values["charsmap"], unknown=unknown)


class Adopted(NamedTuple):
    """A library tokenizer whose special tokens are out of reach, and what they are."""

    inner: tokenizers.Tokenizer
    card: Card


def adopt(
    file: Mapping[str, Any],
    roles: Roles,
    *,
    specials: Collection[str] = (),
    frame: Frame | None = None,
    charsmap: str = "",
    unknown: str = "",
) -> Adopted:
    """A tokenizer.json of any kind; `specials` are special though the file may not say so, as are those with a role.

    Without a `frame` it is what the file's own post-processor puts around a text. `unknown` is the published name of
    the token for what it does not know, which the file may leave out.
    """
    check_ids(file)
    inner = parse(json.dumps(file))
    inner.no_truncation()
    inner.no_padding()
    contents = json.loads(inner.to_str())
    known = inner.get_vocab(with_added_tokens=True)
    roles = roles.completed(known)
    model = contents["model"]
    named = unknown or model.get("unk_token") or ""
    if contents["decoder"] and contents["decoder"]["type"] == "ByteLevel" and set(byte_alphabet()) <= known.keys():
        model["unk_token"] = None  # there is no unknown byte, and the token that is named here is often the end
    unknown = model.get("unk_token") or _name(model, model.get("unk_id"))
    used = {spelling for spelling in asdict(roles).values() if spelling}
    flagged = {entry["content"] for entry in contents["added_tokens"] if entry["special"]}
    special = (flagged | {*specials} | used) & known.keys() - ({unknown} - used)
    entries = {entry["content"]: entry for entry in contents["added_tokens"]}
    added = [entries.get(spelling) or added_token(spelling, known[spelling]) for spelling in special]
    card = Card(
        added=tuple(sorted(({**entry, "special": True} for entry in added), key=lambda entry: int(entry["id"]))),
        roles=roles,
        frame=frame or around(inner),
        charsmap=charsmap,
        unknown=named if named in known and named != unknown else "",
    )
    if model["type"] == "Unigram":
        _scale(model, {entry["id"] for entry in card.added} | {model["unk_id"]})
    return Adopted(_hide(contents, card), card)


def check_ids(file: Mapping[str, Any]) -> None:
    """Refuse a tokenizer.json with an id beyond all reason: the library walks through all that are smaller."""
    model, added = file.get("model"), file.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    ids = list(vocab.values()) if isinstance(vocab, Mapping) else []
    ids += [entry.get("id") for entry in added if isinstance(entry, Mapping)] if isinstance(added, list) else []
    if any(type(id) is not int or not 0 <= id < _MOST for id in ids):
        raise DataError(f"its ids are not between 0 and {_MOST:,}")


def extend(inner: tokenizers.Tokenizer, card: Card, spellings: Sequence[str], first: int) -> Adopted:
    """The same with these special tokens under the ids from `first` on."""
    new = tuple(added_token(spelling, first + place) for place, spelling in enumerate(spellings))
    wider = replace(card, added=(*card.added, *new))
    return Adopted(_hide(json.loads(inner.to_str()), wider), wider)


def added_token(content: str, id: int) -> Added:
    """The entry of a special token in a tokenizer.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": id, "content": content, **flags}


def around(inner: tokenizers.Tokenizer) -> Frame:
    """What a library tokenizer puts before and after a text by itself."""
    found = guarded(lambda: inner.encode("a"))
    marks = found.special_tokens_mask
    before = next((place for place, mark in enumerate(marks) if not mark), len(marks))
    after = next((place for place, mark in enumerate(reversed(marks)) if not mark), 0)
    return Frame(tuple(found.ids[:before]), tuple(found.ids[len(marks) - after :]))


def reading(inner: tokenizers.Tokenizer) -> Reading:
    """How the pieces of an adopted tokenizer become text."""
    decoder = inner.decoder
    # the state of a part is its entry in the file, without the vocabulary that `to_str` would write out
    return described(None if decoder is None else json.loads(decoder.__getstate__()))


def names(inner: tokenizers.Tokenizer, card: Card) -> list[str]:
    """The true name of every id; "" for one that nobody has."""
    known = inner.get_vocab(with_added_tokens=True)
    result = [""] * (1 + max([*known.values(), *(entry["id"] for entry in card.added)]))
    for name, id in known.items():
        result[id] = name.removeprefix(HIDDEN) or name
    for entry in card.added:
        result[entry["id"]] = entry["content"]
    return result


def kind_of_model(inner: tokenizers.Tokenizer) -> str:
    """The kind of an adopted tokenizer, by its model."""
    kinds = {"BPE": "bpe", "WordPiece": "wordpiece", "Unigram": "unigram", "WordLevel": "words"}
    return kinds[type(inner.model).__name__]


def shown(inner: tokenizers.Tokenizer, card: Card) -> dict[str, Any]:
    """The tokenizer.json as the rest of the world writes it: special tokens under their spellings, and added."""
    file: dict[str, Any] = json.loads(inner.to_str())
    model = file["model"]
    true = {HIDDEN + entry["content"]: entry["content"] for entry in card.added}
    if model["type"] == "Unigram":
        unknown = _name(model, model["unk_id"])
        true[unknown] = unknown.removeprefix(HIDDEN)
        worst = min((score for _, score in model["vocab"]), default=0.0)  # that of the hidden ones
        model["vocab"] = [
            [true.get(name, name), 0.0 if score == worst else score / _SCALE] for name, score in model["vocab"]
        ]
    else:
        model["vocab"] = {true.get(name, name): id for name, id in model["vocab"].items()}
    if card.charsmap:
        steps = [{"type": "Precompiled", "precompiled_charsmap": card.charsmap}, *_steps(file["normalizer"])]
        file["normalizer"] = {"type": "Sequence", "normalizers": steps}
    if around(inner)[:2] != card.frame[:2]:
        spelled = {entry["id"]: entry["content"] for entry in card.added}
        file["post_processor"] = post_processor(card.frame, spelled, alike=card.roles.first == "<s>")
    file["added_tokens"] = sorted([*file["added_tokens"], *card.added], key=lambda entry: int(entry["id"]))
    return file


def unknown_of(file: Mapping[str, Any]) -> str:
    """The token for what a tokenizer.json does not know, as its model names it; "" where it knows everything."""
    model = file["model"]
    return str(model.get("unk_token") or _name(model, model.get("unk_id")))


def post_processor(frame: Frame, spelled: Mapping[int, str], *, alike: bool = False) -> dict[str, Any]:
    """The library's post-processor that puts a frame around a text, and around two; `alike`: these as in RoBERTa."""

    def marks(ids: Sequence[int], number: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": spelled[id], "type_id": number}} for id in ids]

    def text(name: str, number: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": number}}

    before, after, _ = frame
    single = [*marks(before, 0), text("A", 0), *marks(after, 0)]
    second = [text("B", 1), *marks(after, 1)]
    if not after:
        second = [*marks(before, 1), *second]  # LLaMA
    elif before and alike:
        second = [*marks(after, 0), text("B", 0), *marks(after, 0)]  # RoBERTa: two ends between, no segments
    specials = {spelled[id]: {"id": spelled[id], "ids": [id], "tokens": [spelled[id]]} for id in (*before, *after)}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *second], "special_tokens": specials}


def _hide(file: dict[str, Any], card: Card) -> tokenizers.Tokenizer:
    """The library's tokenizer with every added token in its model's vocabulary, the special ones out of reach."""
    special = {entry["content"]: entry["id"] for entry in card.added}
    plain = [entry for entry in file["added_tokens"] if entry["content"] not in special]
    model = file["model"]
    wanted = {HIDDEN + spelling: id for spelling, id in special.items()}
    wanted |= {entry["content"]: entry["id"] for entry in plain}
    if model["type"] == "Unigram":
        _hide_scored(model, wanted, special)
    else:
        model["vocab"] = {name: id for name, id in model["vocab"].items() if name not in special} | wanted
    if model["type"] == "BPE":
        never = special.keys() | {model["unk_token"]}
        model["merges"] = [pair for pair in model["merges"] if never.isdisjoint((*pair, "".join(pair)))]
    file["added_tokens"] = plain
    return parse(json.dumps(file))


def _hide_scored(model: dict[str, Any], wanted: Mapping[str, int], special: Mapping[str, int]) -> None:
    """The same for a list of pieces with scores."""
    pieces: list[list[Any]] = model["vocab"]
    floor = min((score for _, score in pieces), default=0.0)
    for id in range(len(pieces), 1 + max(wanted.values(), default=-1)):
        pieces.append([f"{HIDDEN}{id}", floor])
    for name, id in wanted.items():
        pieces[id] = [name, floor]
    unknown = model["unk_id"]
    if unknown is not None and unknown not in special.values():
        pieces[unknown] = [HIDDEN + pieces[unknown][0].removeprefix(HIDDEN), floor]


def _scale(model: dict[str, Any], hidden: Collection[int | None]) -> None:
    """Scores as whole numbers: their sums are exact, so equal ones tie as they do in SentencePiece.

    Scores are float32; the library adds them as float64, where an order of terms wins by the last bit, and reads long
    numbers back with another last bit. It scores the unknown by 10 less than the worst piece: the hidden pieces, which
    no text reaches, carry that over.
    """
    pieces = model["vocab"]
    if not all(abs(score) < _LARGEST_SCORE for _, score in pieces):
        raise DataError("the score of a piece is no float32")
    worst = min((score for id, (_, score) in enumerate(pieces) if id not in hidden), default=0.0)
    unknown = float(round((worst - _UNKNOWN) * _SCALE)) + _UNKNOWN
    model["vocab"] = [
        [name, unknown if id in hidden else float(round(score * _SCALE))] for id, (name, score) in enumerate(pieces)
    ]


def _steps(normalizer: Mapping[str, Any] | None) -> list[Any]:
    if normalizer is None:
        return []
    return list(normalizer["normalizers"]) if normalizer["type"] == "Sequence" else [normalizer]


def _name(model: Mapping[str, Any], id: int | None) -> str:
    return "" if id is None else str(model["vocab"][id][0])
