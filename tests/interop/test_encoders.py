"""Encoders of `transformers`, bare or with any head: saved there, opened and compared here, exported, opened there."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.interop.saved import alike, alike_layers, exactly, exported, opened
from tests.oracle.copying import enliven, ids
from trivium.errors import CheckpointError, RequestError
from trivium.interop.hf import find
from trivium.interop.pooling import pooling
from trivium.models.presets import PRESETS
from trivium.models.transformer import Transformer, build
from trivium.parts.options.output import MaskedOutputOptions, NoOutputOptions
from trivium.parts.options.sentence import PoolerOptions
from trivium.parts.sentence import Pooler
from trivium.parts.site import NoPart

Draw = random.Random
ACTIVATIONS = ["gelu", "relu", "gelu_new", "silu"]
# the class, and whether a bare one has a pooler
MADE = [
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertModel",
    "BertModel without pooler",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
    "RobertaModel",
    "XLMRobertaForMaskedLM",
    "CamembertForSequenceClassification",
    "DistilBertForMaskedLM",
    "DistilBertForSequenceClassification",
    "DistilBertModel",
    "MPNetForMaskedLM",
    "MPNetForSequenceClassification",
    "MPNetModel",
]


def settings(name: str, draw: Draw) -> dict[str, Any]:
    """Odd sizes, any activation, tied or not."""
    heads, pad = draw.randint(1, 5), 0 if name.startswith(("Bert", "Distil")) else 1
    sizes: dict[str, Any] = {
        "vocab_size": draw.randint(40, 99),
        "hidden_size": heads * draw.randint(3, 9),
        "num_hidden_layers": draw.randint(2, 3),
        "num_attention_heads": heads,
        "intermediate_size": draw.randint(5, 80),
        "hidden_act": draw.choice(ACTIVATIONS),
        "max_position_embeddings": draw.randint(16, 40),
        "layer_norm_eps": draw.choice([1e-12, 1e-5, 1e-2]),
        "type_vocab_size": draw.randint(1, 3),
        "pad_token_id": pad,
        "tie_word_embeddings": draw.random() < 0.7,
    }
    if "Sequence" in name:
        sizes["num_labels"] = draw.randint(2, 5)
    if name.startswith("MPNet"):
        del sizes["type_vocab_size"]
    if name.startswith("Distil"):
        spelt = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        spelt |= {"intermediate_size": "hidden_dim", "hidden_act": "activation"}
        sizes = {spelt.get(key, key): value for key, value in sizes.items()}
        del sizes["layer_norm_eps"], sizes["type_vocab_size"]
    return sizes


def made(name: str, draw: Draw, seed: int, **changes: Any) -> PreTrainedModel:
    """A model of `transformers` in which every number matters."""
    kind = getattr(transformers, name.split()[0])
    options = {"add_pooling_layer": False} if "without" in name else {}
    config = kind.config_class(**(settings(name, draw) | changes))
    model: PreTrainedModel = kind(config, **options)
    enliven(model.eval(), seed=seed)
    return model


def batch(theirs: Any, seed: int) -> dict[str, Tensor]:
    """Rows of three lengths with padding, as long as the model reads, and segments where it has some."""
    config = theirs.config
    rows = getattr(config, "type_vocab_size", 0)
    length = config.max_position_embeddings - (2 if config.pad_token_id == 1 else 0)
    at_1T = torch.arange(length)[None]
    real_BT = at_1T < torch.tensor([[length], [length // 2], [3]])
    tokens_BT = 2 + ids(3, length, seed, config.vocab_size - 2)
    found = {
        "input_ids": tokens_BT.where(real_BT, torch.tensor(config.pad_token_id)),
        "attention_mask": real_BT.long(),
    }
    return found | ({"token_type_ids": (at_1T >= 5).long().expand(3, -1).clamp(max=rows - 1)} if rows else {})


def heads(module: Transformer, hidden: Tensor) -> list[Tensor]:
    """What each head of ours says: of every token, and of the whole text."""
    result = []
    if isinstance(module.config.output, MaskedOutputOptions):
        result.append(module.head.logits(hidden))
    if module.sentence is not None:
        result.append(cast(Pooler, module.sentence).logits(hidden))
    return result


def said(outputs: Any) -> list[Tensor]:
    """The same of theirs."""
    names = ("prediction_logits", "logits", "seq_relationship_logits", "pooler_output")
    return [outputs[name] for name in names if outputs.get(name) is not None]


@pytest.mark.parametrize("name", MADE)
def test_a_saved_encoder_gives_the_same_numbers_here_and_there_again(
    name: str, tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    first = 0 if count(0, 1) == 0 else random.SystemRandom().randrange(1 << 30)
    for seed in range(first, first + count(1, 20)):
        print("seed", seed)  # pytest shows it when something below fails
        folder = tmp_path / str(seed)
        theirs: Any = made(name, random.Random(seed), seed)
        theirs.save_pretrained(folder / "theirs")
        ours, inputs = opened(folder / "theirs"), batch(theirs, seed)
        real_BT = inputs["attention_mask"].bool()
        with torch.no_grad():
            expected = theirs(**inputs, output_hidden_states=True)
            hidden = compared(ours, inputs, expected.hidden_states)
            for mine, other in zip(heads(ours, hidden), said(expected), strict=True):
                same_scores(mine, other) if mine.ndim == 2 else alike(mine[real_BT], other[real_BT])
        assert theirs.base_model_prefix in exported(ours, folder / "ours")
        returned(theirs, folder, inputs, expected)
        with torch.no_grad():
            expected = theirs.double()(**inputs, output_hidden_states=True).hidden_states[-1]
            hidden = ours.double()(inputs["input_ids"], padding=real_BT, segments=inputs.get("token_type_ids")).hidden
        exactly(hidden[real_BT], expected[real_BT])


def same_scores(mine: Tensor, theirs: Tensor) -> None:
    """A few numbers for each text, which are not the same for every text."""
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert (theirs - theirs[0]).abs().max() > 1e-3


def compared(ours: Transformer, inputs: dict[str, Tensor], theirs: tuple[Tensor, ...]) -> Tensor:
    """Our last states, after every layer was compared with theirs."""
    real_BT, last = inputs["attention_mask"].bool(), list[Tensor]()
    segments = inputs.get("token_type_ids")

    def run() -> None:
        last.append(ours(inputs["input_ids"], padding=real_BT, segments=segments).hidden)

    alike_layers(ours.encoder, run, theirs, real_BT)
    return last[0]


def returned(theirs: PreTrainedModel, folder: Path, inputs: dict[str, Tensor], expected: Any) -> None:
    """What was exported is what was saved: the same tensors bit for bit, and the same numbers from them."""
    before = load_file(folder / "theirs" / "model.safetensors")
    after = load_file(folder / "ours" / "model.safetensors")
    named = {
        name.replace("cls.seq_relationship", "classifier") if "classifier.weight" in after else name: tensor
        for name, tensor in before.items()
    }
    unread = {"cls.predictions.bias", "lm_head.bias"} - after.keys()  # beside a decoder that is not tied
    assert named.keys() - unread == after.keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in after.items())
    settings = json.loads((folder / "ours" / "config.json").read_text())
    again = getattr(transformers, settings["architectures"][0]).from_pretrained(folder / "ours").eval()
    with torch.no_grad():
        found = again(**inputs, output_hidden_states=True)
    assert torch.equal(found.hidden_states[-1], expected.hidden_states[-1])
    if "pooler.dense.weight" in before or "Model" not in type(theirs).__name__:
        assert all(torch.equal(one, other) for one, other in zip(said(found), said(expected), strict=True))


def test_old_spellings_and_stored_copies_are_the_same_model(tmp_path: Path) -> None:
    theirs: Any = made("BertForPreTraining", random.Random(1), 1, tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path)
    new = opened(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    old["bert.embeddings.position_ids"] = torch.arange(30)[None]
    save_file(old, file)
    again = opened(tmp_path)
    tokens_BT = ids(2, 9, 0, 40)
    with torch.no_grad():
        assert torch.equal(again.head.logits(again(tokens_BT).hidden), new.head.logits(new(tokens_BT).hidden))
    old["cls.predictions.decoder.bias"] += 1  # which of the two would be meant?
    save_file(old, file)
    with pytest.raises(CheckpointError, match=r"cls\.predictions\.decoder\.bias"):
        opened(tmp_path)


def test_the_tensors_decide_which_heads_there_are(tmp_path: Path) -> None:
    """Published sentence encoders call themselves MaskedLM and hold the encoder alone, with or without its prefix."""
    theirs: Any = made("MPNetModel", random.Random(2), 2)
    theirs.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "architectures": ["MPNetForMaskedLM"]}))
    bare = opened(tmp_path)
    assert (bare.config.output, bare.config.sentence) == (NoOutputOptions(), PoolerOptions(classes=0))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"mpnet.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert opened(tmp_path).config == bare.config
    with pytest.raises(RequestError, match="no output over the vocabulary"):
        bare.head.logits(torch.zeros(1, bare.config.width))


def test_an_unused_pooler_beside_a_classifier_is_left_out(tmp_path: Path) -> None:
    theirs: Any = made("RobertaForSequenceClassification", random.Random(3), 3, num_labels=3)
    theirs.save_pretrained(tmp_path)
    tensors, width = load_file(tmp_path / "model.safetensors"), theirs.config.hidden_size
    tensors |= {"roberta.pooler.dense.weight": torch.ones(width, width), "roberta.pooler.dense.bias": torch.ones(width)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert opened(tmp_path).config.sentence == PoolerOptions(classes=3)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("BertModel", {"is_decoder": True}, "is_decoder is True"),
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("BertModel", {"hidden_act": "gelu_10"}, "hidden_act is 'gelu_10'"),
        ("BertModel", {"hidden_size": 1 << 40}, "hidden_size is"),
        ("BertModel", {"num_attention_heads": 7}, "not divisible by 7"),
        ("BertModel", {"vocab_size": 17}, r"word_embeddings\.weight has shape"),
        ("BertModel", {"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        (
            "BertForSequenceClassification",
            {"id2label": {str(at): "x" for at in range(9)}},
            r"classifier\.\w+ has shape",
        ),
        ("MPNetModel", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets is 16"),
        ("RobertaModel", {"pad_token_id": 1 << 40}, "pad_token_id is"),
        ("DistilBertModel", {"activation": 3}, "activation is 3"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    made(name, random.Random(4), 4).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, **change}))
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("BertForTokenClassification", "classifier"),
        ("BertForQuestionAnswering", "qa_outputs"),
        ("RobertaForTokenClassification", "classifier"),
        ("DistilBertForQuestionAnswering", "qa_outputs"),
    ],
)
def test_a_head_that_we_do_not_have_is_refused_by_its_tensor(name: str, tensor: str, tmp_path: Path) -> None:
    made(name, random.Random(5), 5).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"nobody reads the tensor {tensor}"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"), [("bert-base-uncased", "BertForPreTraining"), ("roberta-base", "RobertaForMaskedLM")]
)
def test_our_preset_is_what_transformers_publishes(name: str, kind: str) -> None:
    target = find(PRESETS[name]())
    assert target.table["architectures"] == [kind]
    config = getattr(transformers, kind).config_class(**target.table)
    with torch.device("meta"):
        theirs = getattr(transformers, kind)(config)
    assert sum(one.numel() for one in theirs.parameters()) == build(PRESETS[name](), device="meta").config.parameters()


def sentences(folder: Path, mode: str, **more: Any) -> Path:
    """The files that sentence-transformers puts beside a model."""
    steps = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    steps += [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    steps += [{"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]
    (folder / "modules.json").write_text(json.dumps(more.pop("steps", steps)))
    (folder / "1_Pooling").mkdir()
    table = {"word_embedding_dimension": 8, f"pooling_mode_{mode}": True, **more}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(table))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256, "do_lower_case": False}))
    return folder


@pytest.mark.parametrize(("mode", "word"), [("mean_tokens", "mean"), ("cls_token", "cls")])
def test_the_pooling_of_a_sentence_encoder_is_read_from_its_files(mode: str, word: str, tmp_path: Path) -> None:
    assert pooling(tmp_path) == {}
    folder = sentences(tmp_path, mode, pooling_mode_max_tokens=False)
    assert pooling(folder) == {"pooling": word, "normalize": True, "longest": 256}


def test_a_pooling_that_we_do_not_have_is_named(tmp_path: Path) -> None:
    assert pooling(sentences(tmp_path, "max_tokens")) == {
        "unread": ["pooling_mode_max_tokens"],
        "normalize": True,
        "longest": 256,
    }


@pytest.mark.parametrize(
    "steps",
    [
        [{"path": "../1_Pooling", "type": "sentence_transformers.models.Pooling"}],
        [{"path": "/etc", "type": "sentence_transformers.models.Pooling"}],
        [{"path": "missing", "type": "sentence_transformers.models.Pooling"}],
        [{"path": 3, "type": "sentence_transformers.models.Pooling"}],
        {"path": "1_Pooling"},
        [3],
    ],
)
def test_a_broken_list_of_modules_is_refused_in_a_sentence(steps: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sentences(tmp_path, "mean_tokens")
    sentences(folder, "mean_tokens", steps=steps)
    with pytest.raises(CheckpointError, match=r"modules\.json|cannot be read"):
        pooling(folder)


def test_a_bare_model_without_pooler_has_neither_head(tmp_path: Path) -> None:
    made("BertModel without pooler", random.Random(6), 6).save_pretrained(tmp_path)
    config = opened(tmp_path).config
    assert (config.output, config.sentence) == (NoOutputOptions(), NoPart())
