"""The tokenizer in a folder that others published, and ours as they read it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trivium.errors import DataError, RequestError, shown
from trivium.files import json_line, read_inside, write_atomic
from trivium.text import sentencepiece
from trivium.text.adopt import CARD, Frame, Roles, added_token, adopt, around, post_processor, unknown_of
from trivium.text.framing import frame_of
from trivium.text.library import END, parse
from trivium.text.sentencepiece import CONTROL, NORMAL, UNKNOWN, UNUSED, Scored
from trivium.text.tables import byte_level_bpe, suffix_bpe, wordpiece
from trivium.text.tokenizer import LARGEST, LibraryTokenizer, Tokenizer, open_tokenizer

__all__ = ["byte_level_bpe", "read_tokenizer", "wordpiece", "write_tokenizer"]

_SPM = ("tokenizer.model", "spiece.model", "source.spm", "sentencepiece.bpe.model")
_BPE = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_TOKENS = {
    "begin": "bos_token",
    "end": "eos_token",
    "pad": "pad_token",
    "mask": "mask_token",
    "first": "cls_token",
    "separator": "sep_token",
}
_FRAMED = ("roberta", "bart", "mpnet", "longformer", "led")  # a text of theirs stands between <s> and </s>
_SENTINELS = ("t5", "mt5", "umt5", "longt5", "switch_transformers")


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder: tokenizer.json, a vocabulary with merges, BERT's vocab.txt or a SentencePiece model.

    None if the folder has none of these files; a DataError that names the file if it cannot be used.
    """
    said = _Said(folder)
    readers = [
        ("tokenizer.json", _library),
        *((name, _sentencepiece) for name in _SPM),
        *((names[0], _merged) for names in _BPE if os.path.lexists(folder / names[1])),
        ("vocab.txt", _wordpieces),
    ]
    for name, read in readers:
        file = folder / name
        if not os.path.lexists(file):
            continue
        try:
            return read(file, said)
        except DataError as error:
            if str(error).startswith(str(folder)):
                raise
            raise DataError(f"{file} cannot be used: {error}; give the tokenizer.json that goes with it") from None
    return None


WRITTEN = ("tokenizer.json", "special_tokens_map.json", "tokenizer_config.json")


def write_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    *,
    template: str = "",
    frame: Frame | None = None,
    segments: bool = False,
) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json as transformers reads them.

    `template` is the published text of a chat template, `frame` what the model reads around a text (without it, what
    the tokenizer says by itself), and with `segments` the model is told which of two texts an id belongs to.
    Transformers takes the spelling of a special token in a text for the token; all other text has the same ids.
    """
    if not isinstance(tokenizer, LibraryTokenizer):
        raise RequestError("there is no tokenizer to export; put its files beside the model and load it again")
    card = tokenizer.card
    file = (tokenizer.framed(frame) if card and frame else tokenizer).shown()
    if card is None and frame and (frame.before or frame.after):
        file["post_processor"] = post_processor(frame, {id: name for name, id in tokenizer.specials.items()})
    roles = card.roles if card else Roles(begin=END, end=END).completed(tokenizer.specials)
    named = {key: spelling for role, key in _TOKENS.items() if (spelling := asdict(roles)[role])}
    unknown = unknown_of(file) or (card.unknown if card else "")
    tokens = named | ({"unk_token": unknown} if unknown else {})
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= tokens | {"model_input_names": ["input_ids", *["token_type_ids"] * segments, "attention_mask"]}
    settings |= {"chat_template": template} if template else {}
    for name, values in zip(WRITTEN, (file, tokens, settings), strict=True):
        write_atomic(folder / name, json_line(values, indent=2))


class _Said:
    """What the small files beside a tokenizer say of it."""

    def __init__(self, folder: Path) -> None:
        self.config = _object(folder / "config.json")
        self.generating = _object(folder / "generation_config.json")
        self.settings = _object(folder / "special_tokens_map.json") | _object(folder / "tokenizer_config.json")
        legacy = _object(folder / "added_tokens.json")
        listed = self.settings.get("added_tokens_decoder")
        added: dict[str, tuple[int, bool]] = {
            content: (id, True) for content, id in legacy.items() if type(id) is int and id >= 0
        }
        for id, entry in listed.items() if isinstance(listed, dict) else ():
            content = _content(entry)
            if content and id.isdecimal() and len(id) < 10:
                added[content] = (int(id), bool(isinstance(entry, dict) and entry.get("special")))
        self.added = added

    @property
    def sort(self) -> str:
        """The sort of model: "roberta", "t5", ...; "" if nothing says so."""
        named = str(self.settings.get("tokenizer_class", "")).removesuffix("Fast").removesuffix("Tokenizer")
        return str(self.config.get("model_type") or named).lower()

    @property
    def roles(self) -> Roles:
        """The special tokens that the files name."""
        return Roles(**{role: _content(self.settings.get(key)) for role, key in _TOKENS.items()})

    @property
    def specials(self) -> set[str]:
        """Tokens that are special though they have no role."""
        more = [self.settings.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
        listed = [entry for group in more if isinstance(group, list | dict) for entry in _values(group)]
        return {_content(entry) for entry in listed} - {""} | {
            name for name, (_, special) in self.added.items() if special
        }

    def flag(self, key: str, default: bool | None) -> bool | None:
        """A yes or no among the settings."""
        value = self.settings.get(key)
        return value if isinstance(value, bool) else default

    def framed(self, tokenizer: Tokenizer, frame: Frame) -> Frame:
        """A frame with or without begin and end as the settings ask, and what a decoder behind a source begins with."""
        before, after = frame.before, frame.after
        begins = self.flag("add_bos_token", None)
        if begins is not None:
            before = tuple(id for id in before if id != tokenizer.begin)
            before = (tokenizer.begin, *before) if begins else before
        ends = self.flag("add_eos_token", None)
        if ends and after[-1:] != (tokenizer.end,):
            after = (*after, tokenizer.end)
        return Frame(before, after, self.start(tokenizer.size))

    @property
    def two_sided(self) -> bool:
        """Whether the model is an encoder with a decoder."""
        return self.config.get("is_encoder_decoder") is True

    def start(self, size: int) -> tuple[int, ...]:
        """What a decoder behind a source begins with: its start, then what is always the first that it writes.

        As in transformers: the generation settings are asked, where there are none the configuration, and the begin
        of a text is the start of a decoder that names no other.
        """
        table = self.generating or self.config
        firsts = [table.get("decoder_start_token_id"), table.get("bos_token_id") if self.two_sided else None]
        firsts += [self.config.get("decoder_start_token_id")]
        start = next((id for id in firsts if type(id) is int and 0 <= id < size), None)
        forced: Any = table.get("forced_bos_token_id")
        if start is None:
            return ()
        return (start, forced) if type(forced) is int and 0 <= forced < size else (start,)


def _library(file: Path, said: _Said) -> Tokenizer:
    contents = _object(file)
    if CARD in contents:
        return open_tokenizer(file.parent)
    if _ours(said.roles):
        try:
            return _own(contents, said)
        except DataError:
            pass  # of another kind, or with another end
    added = contents.get("added_tokens", [])
    if not isinstance(added, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("content"), str) for entry in added
    ):
        raise DataError(f"{file} has added_tokens that are no list of tokens; fetch it again")
    known = {entry["content"] for entry in added}
    new = [
        {**added_token(name, id), "special": special} for name, (id, special) in said.added.items() if name not in known
    ]
    contents["added_tokens"] = [*added, *sorted(new, key=lambda entry: int(entry["id"]))]
    unknown = _content(said.settings.get("unk_token"))
    tokenizer = LibraryTokenizer(*adopt(contents, said.roles, specials=said.specials, unknown=unknown))
    return tokenizer.framed(said.framed(tokenizer, tokenizer.frame))


def _own(contents: Mapping[str, Any], said: _Said) -> Tokenizer:
    """A tokenizer that we trained and wrote; a DataError if it is none, or frames texts otherwise than ours do."""
    post = contents.get("post_processor")
    framed = isinstance(post, dict) and post.get("type") == "TemplateProcessing"
    tokenizer = LibraryTokenizer(parse(json.dumps({**contents, "post_processor": None} if framed else contents)))
    frame = frame_of("encoder-decoder" if said.two_sided else "encoder", tokenizer)
    other = framed and around(parse(json.dumps(contents)))[:2] != frame[:2]
    if other or said.start(tokenizer.size) not in ((), frame.start):
        raise DataError("it frames texts otherwise")
    return tokenizer


def _ours(roles: Roles) -> bool:
    """Whether a tokenizer.json may be one that we wrote: its end is ours, and every role has our spelling."""
    usual = Roles(begin=END, end=END, pad="<pad>", mask="[MASK]", first="[CLS]", separator="[SEP]")
    named = {role: spelling for role, spelling in asdict(roles).items() if spelling and spelling != "[PAD]"}
    return roles.end == END and named.items() <= asdict(usual).items()


def _merged(file: Path, said: _Said) -> Tokenizer:
    vocab = {name: id for name, id in _object(file).items() if type(id) is int and id >= 0}
    merges = _merges(file.parent / dict(_BPE)[file.name])
    specials = {name: id for name, (id, special) in said.added.items() if special}
    plain = {name: id for name, (id, special) in said.added.items() if not special}
    roles = said.roles
    if "<s>" in vocab and "</s>" in vocab:
        usual = Roles(begin="<s>", end="</s>", pad="<pad>", mask="<mask>")
        framed = said.sort in _FRAMED or "<mask>" in vocab
        usual = replace(usual, first="<s>", separator="</s>") if framed else usual
        roles = Roles(**{role: named or asdict(usual)[role] for role, named in asdict(roles).items()})
        frame = Frame((vocab["<s>"],), (vocab["</s>"],)) if framed else Frame()
        specials |= {name: vocab[name] for name in ("<s>", "<pad>", "</s>", "<mask>") if name in vocab}
    else:
        frame = Frame()
        specials |= {name: vocab[name] for name in (END, *asdict(roles).values()) if name in vocab}
    if any(name.endswith("</w>") for name in vocab):
        return suffix_bpe(vocab, merges, specials=specials, roles=roles)
    split = "qwen2" if said.sort.startswith("qwen") else "gpt2"
    for name, id in plain.items():
        vocab.setdefault(name, id)
    specials = {name: vocab.get(name, id) for name, id in specials.items()}
    tokenizer = byte_level_bpe(vocab, merges, specials=specials, split=split, roles=roles, added=plain)
    return tokenizer.framed(said.framed(tokenizer, frame))


def _wordpieces(file: Path, said: _Said) -> Tokenizer:
    lines = _lines(file)
    vocab = {line: id for id, line in enumerate(lines if lines[-1] else lines[:-1])}
    vocab |= {name: id for name, (id, _) in said.added.items() if name not in vocab}
    roles, ends = said.roles, ("[CLS]", "[SEP]")
    if "[CLS]" not in vocab and {"<s>", "</s>"} <= vocab.keys():  # MPNet
        ends = ("<s>", "</s>")
        usual = Roles(begin="<s>", end="</s>", pad="<pad>", mask="<mask>", first="<s>", separator="</s>")
        roles = Roles(**{role: named or asdict(usual)[role] for role, named in asdict(roles).items()})
    return wordpiece(
        vocab,
        lower=said.flag("do_lower_case", True) is True,
        accents=said.flag("strip_accents", None),
        chinese=said.flag("tokenize_chinese_chars", True) is True,
        specials=said.specials,
        roles=roles,
        frame=Frame((vocab[ends[0]],), (vocab[ends[1]],)) if {*ends} <= vocab.keys() else Frame(),
    )


def _sentencepiece(file: Path, said: _Said) -> Tokenizer:
    model = sentencepiece.read_model(file)
    pieces, roles = list(model.pieces), model.roles
    if file.name == "source.spm":
        pieces = _translated(pieces, _object(file.parent / "vocab.json"))
        roles = Roles(end="</s>", pad="<pad>")
    elif file.name == "sentencepiece.bpe.model":
        if said.sort not in ("xlm-roberta", "xlmroberta"):
            raise DataError(
                f"the ids of a model of the sort {shown(said.sort or 'unknown')} are not those of its pieces"
            )
        pieces = [*(Scored(name, 0.0, CONTROL) for name in ("<s>", "<pad>", "</s>")), Scored("<unk>", 0.0, UNKNOWN)]
        pieces += [*model.pieces[3:], Scored("<mask>", 0.0, CONTROL)]
        roles = Roles(begin="<s>", end="</s>", pad="<pad>", mask="<mask>", first="<s>", separator="</s>")
    if said.sort in _SENTINELS and not any(piece.text.endswith("<extra_id_0>") for piece in pieces):
        extra = said.settings.get("extra_ids", 100)
        count = extra if type(extra) is int and 0 <= extra <= 10_000 else 100
        pieces += [Scored(f"<extra_id_{count - 1 - place}>", 0.0, CONTROL) for place in range(count)]
    for content, (id, special) in sorted(said.added.items(), key=lambda item: item[1]):
        if id == len(pieces):
            pieces.append(Scored(content, 0.0, CONTROL if special else sentencepiece.USER))
    roles = Roles(**{role: named or asdict(roles)[role] for role, named in asdict(said.roles).items()})
    tokenizer = sentencepiece.tokenizer_of(replace(model, pieces=tuple(pieces)), roles=roles)
    return tokenizer.framed(said.framed(tokenizer, _usual_frame(tokenizer, file.name, said)))


def _usual_frame(tokenizer: Tokenizer, name: str, said: _Said) -> Frame:
    """What the sorts of models with SentencePiece put around a text unless their settings say otherwise."""
    if name == "sentencepiece.bpe.model":
        return Frame((tokenizer.begin,), (tokenizer.end,))
    if name == "source.spm" or said.sort in _SENTINELS:
        return Frame((), (tokenizer.end,))
    return Frame((tokenizer.begin,) if tokenizer.begin != tokenizer.end else ())


def _translated(pieces: list[Scored], vocab: Mapping[str, Any]) -> list[Scored]:
    """Marian's ids: a table for two languages, of which only the pieces of the source are found in a text."""
    ids = {name: id for name, id in vocab.items() if type(id) is int}
    if sorted(ids.values()) != list(range(len(ids))) or not ids:
        raise DataError("vocab.json beside it is missing, or its ids are not 0, 1, 2, ...")
    scores = {piece.text: piece for piece in pieces if piece.type == NORMAL}
    marks = {"<unk>": UNKNOWN, "</s>": CONTROL, "<pad>": CONTROL}
    return [
        scores.get(name) or Scored(name, 0.0, CONTROL if name.startswith(">>") else marks.get(name, UNUSED))
        for name in sorted(ids, key=ids.__getitem__)
    ]


def _merges(path: Path) -> list[tuple[str, str]]:
    pairs = [tuple(line.split(" ")) for line in _lines(path) if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise DataError(f"{path} has a line that is not two pieces; restore it from a copy")
    return [(pair[0], pair[1]) for pair in pairs]


def _lines(path: Path) -> list[str]:
    try:
        text = read_inside(path.parent, path.name, LARGEST).decode()
        return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; restore it from a copy") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; restore it from a copy") from None


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not os.path.lexists(path):
        return {}
    try:
        value = json.loads(read_inside(path.parent, path.name, LARGEST).decode())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; restore it from a copy") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path} is not JSON; restore it from a copy") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object; restore it from a copy")
    return value


def _content(entry: Any) -> str:
    """The spelling of a token, which is a string or an object with one."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else ""


def _values(group: list[Any] | dict[str, Any]) -> list[Any]:
    return list(group.values()) if isinstance(group, dict) else group
