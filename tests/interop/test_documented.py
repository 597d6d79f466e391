"""docs/checkpoints.md lists what opens: the default configuration of each name, small, saved by transformers."""

# B batch, T tokens

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from tests.interop.saved import alike
from tests.oracle.copying import enliven, ids
from trivium import api
from trivium.errors import CheckpointError
from trivium.interop.architectures import ARCHITECTURES

DOCS = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
VOCAB = 120
SIZES: dict[str, int] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
}
# What these names are opened as; all others are language models of the decoder family.
CLASSES = {
    "bert": "BertForPreTraining",
    "distilbert": "DistilBertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
    "camembert": "CamembertForMaskedLM",
    "mpnet": "MPNetForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "marian": "MarianMTModel",
}
REFUSED = {"apertus": "hidden_act is 'xielu'|rms_norm_eps is 1e-05"}  # only as our own export, with squared ReLU


def listed() -> list[str]:
    """The names in the first column of the table under "What opens"."""
    section = DOCS.read_text().partition("## What opens")[2].partition("\n\nA test")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `") and "`model_type`" not in line]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def small(kind: str) -> Any:
    """The default configuration of `transformers` with nothing changed but its sizes and ids."""
    default = AutoConfig.for_model(kind)
    sizes = {name: size for name, size in SIZES.items() if name in default.to_dict()}
    numbers = default.to_dict()
    for name, value in numbers.items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= VOCAB:
            sizes[name] = VOCAB - 1
    return AutoConfig.for_model(kind, **sizes)


def saved(kind: str, folder: Path) -> Any:
    config = small(kind)
    auto = transformers.AutoModelForCausalLM
    model = getattr(transformers, CLASSES[kind])(config) if kind in CLASSES else auto.from_config(config)
    enliven(model.eval(), seed=1)
    model.save_pretrained(folder)
    return model


def test_every_name_that_can_be_read_is_listed_and_no_other() -> None:
    assert sorted(listed()) == sorted(ARCHITECTURES.keys() - REFUSED.keys())
    assert len(listed()) > 15


@pytest.mark.parametrize("kind", listed())
def test_the_default_configuration_of_a_listed_name_gives_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = saved(kind, tmp_path)
    m = api.load(tmp_path, device="cpu", say=lambda text: None)
    tokens_BT = ids(2, 20, 3, VOCAB - 8) + 4  # no id of padding, from which RoBERTa counts its positions
    with torch.no_grad():
        if m.config.family == "encoder-decoder":
            expected = theirs(input_ids=tokens_BT, decoder_input_ids=tokens_BT[:, :9])
            mine = m.logits(tokens_BT, tokens_BT[:, :9])
        else:
            expected = theirs(input_ids=tokens_BT)
            mine = m.logits(tokens_BT)
    alike(mine, expected.prediction_logits if kind == "bert" else expected.logits)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_name_that_is_not_listed_is_refused_by_the_setting(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    with pytest.raises(CheckpointError, match=REFUSED[kind]):
        api.load(tmp_path, device="cpu")
