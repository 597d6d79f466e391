"""Whole files of every kind for the fuzzer, and what a stranger does to make the sums fit again."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from tests.generation import tiny
from tests.hostile import folders
from tests.interop import gguf_models, test_gguf, test_hostile, test_llama2c
from trivium import api
from trivium.checkpoints import format
from trivium.checkpoints.manifest import seal
from trivium.config import write
from trivium.data import shards
from trivium.errors import TriviumError
from trivium.handle import Model
from trivium.text.tokenizer import open_tokenizer

STEP = "checkpoints/step-00000004"


def published(name: str) -> Callable[[Path], None]:
    """A folder of `transformers` with a tokenizer."""

    def make(folder: Path) -> None:
        torch.manual_seed(0)
        test_hostile.made(name, folder)

    return make


def gguf_file(folder: Path) -> None:
    theirs = test_gguf.small(vocab_size=300, hidden_size=32, num_hidden_layers=1, intermediate_size=32)
    folder.mkdir()
    gguf_models.write(folder / "model.gguf", theirs, kind="Q8_0", change=gguf_models.written_text(300))


def llama2c(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.bin").write_bytes(test_llama2c.written(test_llama2c.model(), 1))


def stories(folder: Path) -> None:
    folder.mkdir()
    shutil.copy(test_llama2c.STORIES / "stories260K.bin", folder / "model.bin")
    shutil.copy(test_llama2c.STORIES / "tok512.bin", folder / "tok512.bin")


def spm(folder: Path) -> None:
    folder.mkdir()
    target = io.BytesIO()
    sentences = ["to be or not to be that is the question", "whether it is nobler in the mind", "ab ba abba"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=target,
        vocab_size=340,
        byte_fallback=True,
        pad_id=3,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    (folder / "spiece.model").write_bytes(target.getvalue())
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "decoder_start_token_id": 3}))


def wordpieces(folder: Path) -> None:
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "to", "be", "##e", ",", "or", "not", "☃"]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


def merges(folder: Path) -> None:
    folder.mkdir()
    letters = [chr(code) for code in range(33, 127)] + ["Ġ"]
    pairs = [("t", "o"), ("b", "e"), ("Ġ", "b"), ("n", "o"), ("no", "t")]
    vocab = {piece: id for id, piece in enumerate([*letters, *map("".join, pairs), "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, pairs)))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(settings))
    (folder / "added_tokens.json").write_text(json.dumps({"<sep>": 100}))


def chatting(folder: Path) -> None:
    published("llama")(folder)
    template = "{% for m in messages %}{{'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>'}}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


def evaluated(folder: Path) -> None:
    (folder / "results").mkdir(parents=True)
    content = {"name": "a", "split": "test", "metric": "bits", "score": 1.5, "looks": 1, "examples": [{"text": "b"}]}
    (folder / "results" / "a-test.json").write_text(json.dumps(content))


def one_recipe(folder: Path) -> None:
    (folder / "recipe.toml").write_text(write(folders.recipe(folder)))


def run(folder: Path) -> None:
    shutil.move(folders.run(folder.with_name("trained"), finished=False), folder)
    rollback = {"kind": "rollback", "step": 9, "found": 9, "trigger": "loss", "why": "a loss of 9", "action": "skip"}
    rollback |= {"checkpoint": "step-00000004", "to": 4, "rows": [90, 96]}
    (folder / "events.jsonl").write_text(json.dumps(rollback) + "\n")
    for path in (folder / "checkpoints").glob("step-*"):
        if path.name not in STEP:  # else a damaged one is skipped for it
            shutil.rmtree(path)


def corpora(folder: Path) -> None:
    folder.mkdir()
    every = [json.dumps({"text": f"line {number} \u2028 of text", "id": number}) for number in range(9)]
    (folder / "corpus.jsonl").write_text("\n".join(every))
    (folder / "corpus.txt").write_text("some text\fmore of it, e\u0301\n" * 9)
    (folder / "corpus.txt.gz").write_bytes(gzip.compress((folder / "corpus.txt").read_bytes()))
    (folder / "pairs.tsv").write_text("a house\tein Haus\n" * 9)


def in_bits(folder: Path) -> None:
    """A saved model with 8-bit weights."""
    folders.saved_model(folder.with_name("floats"))
    api.load(folder.with_name("floats"), device="cpu", bits=8).save(folder)


def translator(folder: Path) -> None:
    Model(tiny.model("t5-small", tiny.DENOISING), tiny.DENOISING, {}).save(folder)


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def seal_weights(folder: Path) -> None:
    facts = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**facts, "weights": hash_of(folder / "model.safetensors")}))


def seal_tokenizer(folder: Path) -> None:
    facts = json.loads((folder / "model.json").read_text())
    try:
        digest = open_tokenizer(folder).digest
    except TriviumError:
        return
    (folder / "model.json").write_text(json.dumps({**facts, "tokenizer": digest}))


def seal_manifest(folder: Path) -> None:
    """A checkpoint's manifest with its own sha256 as the last field."""
    path = folder / STEP / "manifest.json"
    try:
        table = json.loads(path.read_text())
        table.pop("sha256", None)
        path.write_bytes(seal(format._json(table)))
    except (ValueError, AttributeError, RecursionError):
        return


def seal_checkpoint(folder: Path) -> None:
    """The hashes and sizes of a checkpoint's files, and then the seal."""
    path = folder / STEP / "manifest.json"
    table = json.loads(path.read_text())
    table.pop("sha256")
    for name, entry in table["files"].items():
        file = folder / STEP / name
        entry.update(size=file.stat().st_size, sha256=hash_of(file))
    path.write_bytes(seal(format._json(table)))


def seal_shards(folder: Path) -> None:
    path = folder / "data" / "manifest.json"
    try:
        table: Any = json.loads(path.read_text())
        table.pop("sha256", None)
        path.write_text(json.dumps(shards._sealed(table)))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return


def seal_ids(folder: Path) -> None:
    """Sizes and hashes of the token ids; counts that follow from the sizes, so that they are looked at."""
    path = folder / "data" / "manifest.json"
    table: Any = json.loads(path.read_text())
    table.pop("sha256")
    sizes = {"uint16": 2, "uint32": 4}
    for name, entry in table["files"].items():
        file = folder / "data" / name
        entry.update(size=file.stat().st_size, sha256=hash_of(file))
        split, _, docs = name.removesuffix(".bin").partition(".")
        width = 8 if docs else sizes[table["dtype"]]
        table["splits"][split]["documents" if docs else "tokens"] = entry["size"] // width
        table["splits"][split]["sources"] = [0]
    path.write_text(json.dumps(shards._sealed(table)))
