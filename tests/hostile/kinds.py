"""Every kind of file that trivium reads: how a whole one is made, how it is spoilt, and what opens it."""

from __future__ import annotations

import contextlib
import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tests.hostile import folders
from tests.hostile.making import (
    STEP,
    chatting,
    corpora,
    evaluated,
    gguf_file,
    in_bits,
    llama2c,
    merges,
    one_recipe,
    published,
    run,
    seal_checkpoint,
    seal_ids,
    seal_manifest,
    seal_shards,
    seal_tokenizer,
    seal_weights,
    spm,
    stories,
    translator,
    wordpieces,
)
from tests.interop.mutation import mutated, spoilt
from tests.oracle.copying import ids
from tests.training.conftest import finish, resume
from trivium import api, report
from trivium.config import write
from trivium.data import shards
from trivium.data.pairs import read_pairs
from trivium.data.show import describe, preview
from trivium.data.sources import pieces
from trivium.errors import TriviumError
from trivium.generation.chat import chat_of
from trivium.handle import Model
from trivium.interop.pooling import pooling
from trivium.records import results_of as results
from trivium.text.published import read_tokenizer
from trivium.text.tokenizer import Tokenizer, open_tokenizer

Spoil = Callable[[bytes, random.Random], bytes]


def nothing(folder: Path) -> None:
    """The file is not sealed."""


class Kind(NamedTuple):
    """A file by its name in a folder that `make` fills."""

    make: Callable[[Path], object]
    name: str
    spoil: Spoil
    use: Callable[[Path], object]  # gets the folder
    few: int = 60  # rounds without --full
    many: int = 30_000  # and with it
    seal: Callable[[Path], None] = nothing  # what a stranger does to make the sums fit again
    writes: bool = False  # whether `use` changes the folder


# How files are spoilt


def binary(front: int) -> Spoil:
    return lambda raw, draw: mutated(raw, draw, front=front)


def lines(raw: bytes, draw: random.Random) -> bytes:
    """JSON lines: one of them spoilt, doubled, moved or gone, or any bytes."""
    every = raw.rstrip(b"\n").split(b"\n")
    at = draw.randrange(len(every))
    match draw.randrange(5):
        case 0:
            return mutated(raw, draw, front=len(raw))
        case 1:
            every.insert(draw.randrange(len(every)), every[at])
        case 2:
            del every[at]
        case _:
            every[at] = spoilt(every[at], draw)
    return b"\n".join(every) + b"\n"


def toml(raw: bytes, draw: random.Random) -> bytes:
    """TOML with values of other types and sizes in it, or any bytes."""
    if draw.random() < 0.3:
        return mutated(raw, draw, front=len(raw))
    table = json.loads(spoilt_table(json.dumps(tomllib.loads(raw.decode())).encode(), draw))
    try:
        return write(table).encode()
    except (TypeError, UnicodeEncodeError, AttributeError):  # what TOML cannot say
        return mutated(raw, draw, front=len(raw))


def spoilt_table(raw: bytes, draw: random.Random) -> bytes:
    """As `spoilt`, but always JSON."""
    while True:
        found = spoilt(raw, draw)
        try:
            json.loads(found)
            return found
        except (ValueError, RecursionError):
            continue


# What opens them


def read(folder: Path) -> None:
    """Everything that a user does first with a model: load, look, a text, one pass."""
    m = api.load(folder, device="cpu", say=said)
    if not (folder.is_file() or (folder / "config.json").exists()):
        api.show(folder)
    passed(m)


def worked(folder: Path) -> None:
    """A saved model, and what is done with its notes: ids that end a text, labels, pooling, a chat template."""
    m = api.load(folder, device="cpu", say=said)
    api.show(folder)
    passed(m)
    works: list[Callable[[], object]] = [
        lambda: m.generate("to be", tokens=2),
        lambda: m.embed("to be"),
        lambda: list(m.chat("to be", tokens=2)),
        lambda: m.classify("to be"),
        lambda: m.labels,
    ]
    for work in works:
        with contextlib.suppress(TriviumError):  # of another family, or too short a context
            work()


def said(text: str) -> None:
    """Sentences that are no errors are short, too."""
    assert len(text) < 2000, text[:200]
    assert text.isprintable(), ascii(text[:200])


def passed(m: Model) -> None:
    context, vocab = m.config.context, m.config.vocab
    tokens_BT = ids(1, min(2, context), 0, vocab)
    with torch.no_grad():
        m.logits(tokens_BT, *([tokens_BT] if m.config.family == "encoder-decoder" else []))
    try:
        texts(m.tokenizer)
        chat_of(m.tokenizer, m.notes)
    except TriviumError:  # no tokenizer, no template
        pass


def texts(tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        return
    found = tokenizer.encode("to be, or not e\u0301 ☃ <s>")
    tokenizer.decode(found)
    for id in found[:3]:
        tokenizer.piece(id)
    tokenizer.spans("to be, or not")


def tokenizer_of(folder: Path) -> None:
    texts(read_tokenizer(folder))


def own_tokenizer(folder: Path) -> None:
    texts(open_tokenizer(folder))


def resumed(folder: Path) -> None:
    """Going on with a run, up to the first event: its checkpoint, its journals and its data have been read then."""
    events = resume(folder).events()
    next(iter(events), None)
    events.close()  # type: ignore[attr-defined]


def ended(folder: Path) -> None:
    """Going on with a run of which all steps are done: the model is delivered, the report written."""
    finish(resume(folder))


def shown(folder: Path) -> None:
    api.show(folder)
    _ = api.Run(folder).best
    report.page(folder)


def seen(folder: Path) -> None:
    """`trivium data stats` and `trivium data show`, of a run's own shards."""
    found, tokenizer = shards.open_shards(folder / "data"), open_tokenizer(folder)
    describe(found, tokenizer)
    preview(found, tokenizer, 16, 0, "train")
    preview(found, tokenizer, 16, 0, "valid")


def corpus(name: str) -> Callable[[Path], None]:
    def use(folder: Path) -> None:
        for _ in pieces([folder / name], separator="", field="text", read=lambda count: None):
            pass

    return use


def table_of_pairs(folder: Path) -> None:
    for _ in read_pairs([folder / "pairs.tsv"], (0, 1), read=lambda count: None):
        pass


def described(folder: Path) -> None:
    """A recipe: read, and written again if it is one."""
    write(api.recipe(folder / "recipe.toml"))


KINDS: dict[str, Kind] = {
    # of other programs
    "safetensors": Kind(published("bert"), "model.safetensors", binary(4000), read),
    "gguf": Kind(gguf_file, "model.gguf", binary(9000), lambda folder: read(folder / "model.gguf"), 40),
    "llama2.c": Kind(llama2c, "model.bin", binary(300), lambda folder: read(folder / "model.bin")),
    "llama2.c tokenizer": Kind(stories, "tok512.bin", binary(7000), lambda folder: read(folder / "model.bin"), 20),
    "config.json of a decoder": Kind(published("llama"), "config.json", spoilt, read),
    "config.json of an encoder": Kind(published("bert"), "config.json", spoilt, read),
    "config.json of an encoder-decoder": Kind(published("t5"), "config.json", spoilt, read),
    "generation_config.json": Kind(published("llama"), "generation_config.json", spoilt, read),
    "tokenizer_config.json": Kind(published("llama"), "tokenizer_config.json", spoilt, read),
    "index": Kind(published("gpt2"), "model.safetensors.index.json", spoilt, read),
    "modules.json": Kind(published("bert"), "modules.json", spoilt, pooling),
    "pooling": Kind(published("bert"), "1_Pooling/config.json", spoilt, pooling),
    "sentence_bert_config.json": Kind(published("bert"), "sentence_bert_config.json", spoilt, pooling),
    "chat template": Kind(chatting, "chat_template.jinja", binary(200), read),
    "tokenizer.json, BPE": Kind(published("llama"), "tokenizer.json", spoilt, tokenizer_of),
    "tokenizer.json, WordPiece": Kind(published("bert"), "tokenizer.json", spoilt, tokenizer_of),
    "tokenizer.json, Unigram": Kind(published("t5"), "tokenizer.json", spoilt, tokenizer_of),
    "SentencePiece": Kind(spm, "spiece.model", binary(7000), tokenizer_of),
    "vocab.txt": Kind(wordpieces, "vocab.txt", binary(200), tokenizer_of),
    "vocab.json": Kind(merges, "vocab.json", spoilt, tokenizer_of),
    "merges.txt": Kind(merges, "merges.txt", binary(200), tokenizer_of),
    "special_tokens_map.json": Kind(merges, "special_tokens_map.json", spoilt, tokenizer_of),
    "added_tokens.json": Kind(merges, "added_tokens.json", spoilt, tokenizer_of),
    # saved models
    "model.json": Kind(folders.saved_model, "model.json", spoilt, worked),
    "model.json of 8 bits": Kind(in_bits, "model.json", spoilt, worked, 30),
    "model.json of an encoder-decoder": Kind(translator, "model.json", spoilt, worked),
    "model.safetensors": Kind(folders.saved_model, "model.safetensors", binary(3000), read, seal=seal_weights),
    "model.safetensors of 8 bits": Kind(in_bits, "model.safetensors", binary(3000), read, seal=seal_weights),
    "own tokenizer.json": Kind(folders.saved_model, "tokenizer.json", spoilt, own_tokenizer, seal=seal_tokenizer),
    "tokenizer.json of a model": Kind(folders.saved_model, "tokenizer.json", spoilt, read, 30, seal=seal_tokenizer),
    # runs
    "config.toml, shown": Kind(run, "config.toml", toml, shown, 30),
    "config.toml, loaded": Kind(run, "config.toml", toml, read, 20),
    "config.toml, resumed": Kind(run, "config.toml", toml, resumed, 15, 3_000, writes=True),
    "manifest of a checkpoint": Kind(run, f"{STEP}/manifest.json", spoilt, read, 30, seal=seal_manifest),
    "tensors of a checkpoint": Kind(run, f"{STEP}/model.safetensors", binary(2500), read, 30, seal=seal_checkpoint),
    "state of a checkpoint": Kind(run, f"{STEP}/state.json", spoilt, resumed, 10, seal=seal_checkpoint, writes=True),
    "optimizer of a checkpoint": Kind(
        run, f"{STEP}/optimizer.safetensors", binary(4000), resumed, 10, seal=seal_checkpoint, writes=True
    ),
    "metrics.jsonl, shown": Kind(run, "metrics.jsonl", lines, shown, 30),
    "metrics.jsonl, at the end": Kind(run, "metrics.jsonl", lines, ended, 5, 1_000, writes=True),
    "events.jsonl": Kind(run, "events.jsonl", lines, resumed, 10, writes=True),
    "samples.jsonl": Kind(run, "samples.jsonl", lines, shown, 30),
    "samples.jsonl, at the end": Kind(run, "samples.jsonl", lines, ended, 5, 1_000, writes=True),
    "env.json": Kind(run, "env.json", spoilt, shown, 30, 3_000),
    "manifest of shards": Kind(run, "data/manifest.json", spoilt, seen, 30, seal=seal_shards),
    "manifest of shards, resumed": Kind(
        run, "data/manifest.json", spoilt, resumed, 10, 3_000, seal=seal_shards, writes=True
    ),
    "token ids": Kind(run, "data/train.bin", binary(100), seen, 30, seal=seal_ids),
    "document starts": Kind(run, "data/train.docs.bin", binary(100), seen, 30, seal=seal_ids),
    "results": Kind(evaluated, "results/a-test.json", spoilt, results),
    # what a user writes
    "recipe": Kind(one_recipe, "recipe.toml", toml, described, 30),
    "text": Kind(corpora, "corpus.txt", binary(200), corpus("corpus.txt")),
    "compressed text": Kind(corpora, "corpus.txt.gz", binary(100), corpus("corpus.txt.gz")),
    "JSON lines": Kind(corpora, "corpus.jsonl", lines, corpus("corpus.jsonl")),
    "pairs": Kind(corpora, "pairs.tsv", binary(100), table_of_pairs),
}
