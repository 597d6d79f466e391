"""The copies that comparisons rest on leave nothing out: less than all of theirs in all of ours is no copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.oracle import test_llama
from tests.oracle.copying import copy, renamed
from trivium.errors import CheckpointError, ConfigError
from trivium.interop.architectures import ARCHITECTURES
from trivium.interop.names import Rule
from trivium.models.presets import llama
from trivium.models.transformer import Transformer, build, load_weights

TIED, UNTIED = test_llama.small(tie="all"), test_llama.small(tie="none")
RULES = ARCHITECTURES["llama"].rules(llama.llama(TIED))


def published(shape: llama.Shape) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**test_llama.sizes(shape)))  # type: ignore[no-any-return]


def ours() -> Transformer:
    return build(llama.llama(TIED))


def test_an_output_matrix_that_ours_does_not_have_is_no_copy() -> None:
    # the same tensors in a file could be a copy of the tied matrix, which may go unread
    with pytest.raises(AssertionError, match=r"nobody reads \['lm_head.weight'\]"):
        copy(published(UNTIED), ours(), "llama")


def test_an_output_matrix_that_theirs_does_not_have_is_no_copy() -> None:
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing"):
        copy(published(TIED), build(llama.llama(UNTIED)), "llama")


def test_what_a_file_may_hold_besides_is_no_weight_of_a_model() -> None:
    found = dict(published(TIED).named_parameters()) | {"model.rotary_emb.inv_freq": torch.ones(4)}
    with pytest.raises(AssertionError, match=r"nobody reads \['model.rotary_emb.inv_freq'\]"):
        renamed(found, ours(), RULES)


def test_a_tensor_of_ours_is_not_filled_twice() -> None:
    twice = replace(RULES, table=[*RULES.table, Rule(("decoder.final.weight",), "model.other.weight")])
    found = dict(published(TIED).named_parameters()) | {"model.other.weight": torch.ones(TIED.width)}
    with pytest.raises(AssertionError, match="two of theirs fill one of ours"):
        renamed(found, ours(), twice)


def test_a_tensor_of_theirs_does_not_fill_two_of_ours() -> None:
    norms = ("attention", "feedforward")
    rules = [Rule((f"decoder.blocks.*.around_{part}.norm",), "model.layers.*.input_layernorm") for part in norms]
    table = [*(rule for rule in RULES.table if not rule.theirs.endswith("layernorm")), *rules]
    found = dict(published(TIED).named_parameters())
    kept = {name: tensor for name, tensor in found.items() if "post_attention" not in name}
    with pytest.raises(ConfigError, match=r"around_attention.norm.weight is missing"):
        load_weights(ours(), renamed(kept, ours(), replace(RULES, table=table)))
