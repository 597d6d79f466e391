"""Folders of every architecture with one file spoilt: they open or are refused in a sentence, soon and in few bytes."""

# B batch, T tokens

from __future__ import annotations

import json
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors, trainers

from tests.interop.mutation import spoilt
from tests.oracle.copying import ids
from trivium.errors import CheckpointError, ConfigError, DataError, RequestError
from trivium.interop.foreign import Foreign
from trivium.interop.load import open_foreign
from trivium.interop.pooling import pooling

VOCAB = 90
TEXTS = ["to be, or not to be", "that is the question", "whether tis nobler in the mind to suffer"] * 3
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
    **ENDS,
}
TURNED = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "vocab_size": VOCAB, **ENDS}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 6}
SIDES = {"d_model": 16, "max_position_embeddings": 24, "vocab_size": VOCAB, **ENDS, "decoder_start_token_id": 2}
SIDES |= {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
SIDES |= {"encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "forced_eos_token_id": 2}
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", TURNED),
    "llama": ("LlamaForCausalLM", {**SIZES, "rope_parameters": YARN}),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, "num_key_value_heads": 1}),
    "neox": ("GPTNeoXForCausalLM", SIZES),
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB, **ENDS}),
    "opt": ("OPTForCausalLM", {**SIZES, "ffn_dim": 20, "word_embed_proj_dim": 16}),
    "bert": ("BertForMaskedLM", SIZES),
    "roberta": ("RobertaForSequenceClassification", SIZES),
    "distilbert": ("DistilBertModel", {"dim": 16, "hidden_dim": 20, "n_layers": 2, "n_heads": 2, "vocab_size": VOCAB}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2, "vocab_size": VOCAB},
    ),
    "bart": ("BartForConditionalGeneration", SIDES),
    "marian": ("MarianMTModel", {**SIDES, "pad_token_id": VOCAB - 1, "decoder_start_token_id": VOCAB - 1}),
}
SECONDS, BYTES = 4.0, 400 << 20


def made(name: str, folder: Path) -> None:
    """A tiny model of `transformers` with a tokenizer, in two files and with an index where it is named so."""
    kind, sizes = MADE[name]
    model = getattr(transformers, kind)
    model(model.config_class(**sizes)).save_pretrained(
        folder, max_shard_size="8KB" if name in ("gpt2", "t5") else "1GB"
    )
    tokenizer = _tokenizer(name)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    if name == "bert":
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        table = [{"idx": at, "path": path, "type": f"models.{kind}"} for at, (kind, path) in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(table))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))


def _tokenizer(name: str) -> tokenizers.Tokenizer:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    if name == "bert":
        result = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    elif name == "t5":
        result = tokenizers.Tokenizer(models.Unigram())
        result.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False)
    else:
        result = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        result.decoder = tokenizers.decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    result.train_from_iterator(TEXTS, trainer)
    result.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    result = {}
    for name in MADE:
        torch.manual_seed(0)
        result[name] = tmp_path_factory.mktemp("hostile") / name
        made(name, result[name])
    return result


def used(folder: Path) -> list[str]:
    """What reading, pooling settings, a text and one pass say against a folder, after which it was refused."""
    said: list[str] = []
    try:
        found = open_foreign(folder, say=said.append, tick=lambda what, done, whole: None)
        pooling(folder)
        _pass(found)
    except (CheckpointError, DataError, ConfigError, RequestError) as error:
        return [str(error)]
    return [sentence for sentence in said if "without a tokenizer" in sentence]


def _pass(found: Foreign) -> None:
    module, tokenizer = found.module, found.tokenizer
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("to be, or not"))
    tokens_BT = ids(1, min(2, module.config.context), 0, module.config.vocab)
    with torch.no_grad():
        module(tokens_BT, **({"source": tokens_BT} if module.config.family == "encoder-decoder" else {}))


def peak() -> int:
    """The most bytes that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_every_whole_folder_opens(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        assert used(folder) == []
    assert pooling(folders["bert"]) == {"pooling": "mean", "normalize": True, "longest": 20}


@pytest.mark.parametrize("name", MADE)
def test_no_size_of_a_configuration_takes_long_or_much(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Each whole number alone, where no tensor may deny it; those that do not matter may have any value."""
    folder = Path(shutil.copytree(folders[name], tmp_path / name))
    path = folder / "config.json"
    table, before = json.loads(path.read_text()), peak()
    sizes = [key for key, value in table.items() if type(value) is int]
    assert len(sizes) > 5
    for key in [*sizes, "head_dim", "sliding_window"]:
        for value in (9_999_991, 100_000):
            path.write_text(json.dumps({**table, key: value}))
            began = time.monotonic()
            used(folder)
            assert time.monotonic() - began < SECONDS, f"{key} = {value}"
            assert peak() - before < BYTES, f"{key} = {value}"


def test_spoilt_files_of_any_architecture_give_clean_errors_in_bounded_time(
    folders: dict[str, Path], tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    seed = random.randrange(2**32) if count(0, 1) else 0
    draw, refused, before = random.Random(seed), 0, peak()
    copies = {name: Path(shutil.copytree(folder, tmp_path / name)) for name, folder in folders.items()}
    files = [(name, path) for name, folder in copies.items() for path in sorted(folder.rglob("*.json"))]
    kinds = {path.name for _, path in files}
    assert kinds >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "modules.json"}
    assert "model.safetensors.index.json" in kinds
    by_kind = {kind: [(name, path) for name, path in files if path.name == kind] for kind in sorted(kinds)}
    for round in range(count(150, 10_000)):
        name, path = draw.choice(by_kind["config.json" if draw.random() < 0.4 else draw.choice(list(by_kind))])
        whole = path.read_bytes()
        path.write_bytes(spoilt(whole, draw))
        print(f"seed {seed}, round {round}: {path} of {name}")
        began = time.monotonic()
        sentences = used(copies[name])
        assert time.monotonic() - began < SECONDS
        assert not [sentence for sentence in sentences if "\n" in sentence or not sentence]
        refused += bool(sentences)
        path.write_bytes(whole)
    assert refused > count(150, 10_000) // 4
    assert peak() - before < BYTES


@pytest.mark.parametrize(
    ("kind", "name", "opens"),
    [
        ("T5EncoderModel", "t5", "T5ForConditionalGeneration"),
        ("LlamaModel", "llama", "LlamaForCausalLM"),
        ("LlamaForSequenceClassification", "llama", "LlamaForCausalLM"),
        ("BertForTokenClassification", "bert", "BertModel"),
    ],
)
def test_a_model_with_another_head_is_refused_by_its_class(kind: str, name: str, opens: str, tmp_path: Path) -> None:
    model = getattr(transformers, kind)
    model(model.config_class(**MADE[name][1])).save_pretrained(tmp_path)
    (sentence,) = used(tmp_path)
    assert f"config.json calls it {kind}, and trivium opens {opens} there" in sentence
