"""Decoders that `transformers` made and saved: opened here, compared layer by layer, exported, opened there again."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    ApertusConfig,
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.oracle.copying import enliven, ids, logits, near, near_states, same_text, states
from trivium.errors import CheckpointError
from trivium.interop.alike import resolved
from trivium.interop.architectures import ARCHITECTURES
from trivium.interop.fields import Fields
from trivium.interop.folder import open_model
from trivium.interop.hf import export_folder
from trivium.models.transformer import Transformer

Draw = random.Random
NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ACTIVATIONS = ["gelu_new", "gelu", "relu", "silu"]


def gpt(draw: Draw) -> dict[str, Any]:
    heads = draw.randint(1, 5)
    return {
        "vocab_size": draw.randint(40, 99),
        "n_positions": draw.randint(44, 70),
        "n_embd": heads * draw.randint(3, 9),
        "n_layer": draw.randint(2, 3),
        "n_head": heads,
        "layer_norm_epsilon": draw.choice([1e-5, 1e-3]),
        "tie_word_embeddings": draw.random() < 0.7,
        **NO_IDS,
    }


def gpt1(draw: Draw) -> PreTrainedConfig:
    return OpenAIGPTConfig(**gpt(draw), afn=draw.choice(["gelu", "relu", "silu"]))


def gpt2(draw: Draw) -> PreTrainedConfig:
    return GPT2Config(
        **gpt(draw),
        n_inner=draw.choice([None, 31]),
        activation_function=draw.choice(ACTIVATIONS),
        scale_attn_weights=draw.random() < 0.7,
    )


def opt(draw: Draw) -> PreTrainedConfig:
    heads = draw.randint(1, 5)
    return OPTConfig(
        vocab_size=draw.randint(40, 99),
        hidden_size=heads * draw.randint(3, 9),
        num_hidden_layers=draw.randint(2, 3),
        ffn_dim=draw.randint(5, 80),
        num_attention_heads=heads,
        max_position_embeddings=draw.randint(44, 70),
        do_layer_norm_before=draw.random() < 0.7,
        activation_function=draw.choice(ACTIVATIONS),
        enable_bias=draw.random() < 0.7,
        tie_word_embeddings=draw.random() < 0.7,
        **NO_IDS,
    )


def neox(draw: Draw) -> PreTrainedConfig:
    heads = draw.randint(1, 4)
    return GPTNeoXConfig(
        vocab_size=draw.randint(40, 99),
        hidden_size=heads * 8 * draw.randint(1, 2),
        num_hidden_layers=draw.randint(2, 3),
        num_attention_heads=heads,
        intermediate_size=draw.randint(5, 80),
        hidden_act=draw.choice(ACTIVATIONS),
        max_position_embeddings=draw.randint(44, 70),
        layer_norm_eps=draw.choice([1e-5, 1e-3]),
        use_parallel_residual=draw.random() < 0.6,
        attention_bias=draw.random() < 0.7,
        tie_word_embeddings=draw.random() < 0.3,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": draw.choice([10_000.0, 300.0]),
            "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]),
        },
        **NO_IDS,
    )


def bloom(draw: Draw) -> PreTrainedConfig:
    heads = draw.randint(1, 6)
    return BloomConfig(
        vocab_size=draw.randint(40, 99),
        hidden_size=heads * draw.randint(3, 9),
        n_layer=draw.randint(2, 3),
        n_head=heads,
        layer_norm_epsilon=draw.choice([1e-5, 1e-3]),
        tie_word_embeddings=draw.random() < 0.7,
        **NO_IDS,
    )


def scaled(draw: Draw) -> dict[str, Any]:
    """Rotary parameters of any kind that we have, trained to 16 tokens so that the whole ramp shows."""
    table: dict[str, Any] = {"rope_theta": draw.choice([10_000.0, 500.0])}
    kind = draw.choice(["default", "linear", "llama3", "yarn"])
    if kind != "default":
        table["factor"] = draw.choice([2.0, 8.0])
    if kind in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = 16
    if kind == "llama3":
        table |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice([2.0, 4.0])}
    if kind == "yarn" and draw.random() < 0.5:
        table |= {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
    return {"rope_type": kind, **table}


def lined(draw: Draw, *, head: bool = True) -> dict[str, Any]:
    groups = draw.randint(1, 3)
    heads = groups * draw.randint(1, 3)
    size = 2 * draw.randint(2, 6)
    return {
        "vocab_size": draw.randint(40, 99),
        "hidden_size": heads * (draw.randint(2, 7) if head else size),
        "intermediate_size": draw.randint(5, 80),
        "num_hidden_layers": draw.randint(2, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": draw.randint(44, 70),
        "rope_parameters": scaled(draw),
        "tie_word_embeddings": draw.random() < 0.5,
        **({"head_dim": size} if head else {}),
        **NO_IDS,
    }


def llama(draw: Draw) -> PreTrainedConfig:
    bias, eps = draw.random() < 0.4, draw.choice([1e-6, 1e-5])
    return LlamaConfig(**lined(draw), attention_bias=bias, mlp_bias=draw.random() < 0.4, rms_norm_eps=eps)


def mistral(draw: Draw) -> PreTrainedConfig:
    return MistralConfig(**lined(draw), sliding_window=draw.choice([None, 5, 9]), rms_norm_eps=1e-5)


def windows(draw: Draw) -> dict[str, Any]:
    return {
        "use_sliding_window": draw.random() < 0.6,
        "sliding_window": draw.choice([4, 7]),
        "max_window_layers": draw.randint(0, 4),
    }


def qwen2(draw: Draw) -> PreTrainedConfig:
    return Qwen2Config(**lined(draw, head=draw.random() < 0.5), **windows(draw))


def qwen3(draw: Draw) -> PreTrainedConfig:
    return Qwen3Config(**lined(draw), **windows(draw), attention_bias=draw.random() < 0.4)


def apertus(draw: Draw) -> PreTrainedConfig:
    bias, activation = draw.random() < 0.4, draw.choice(["relu2", "silu"])
    return ApertusConfig(
        **lined(draw, head=draw.random() < 0.5), attention_bias=bias, hidden_act=activation, rms_norm_eps=1e-6
    )


MADE = [gpt1, gpt2, opt, neox, bloom, llama, mistral, qwen2, qwen3, apertus]


def saved(config: PreTrainedConfig, folder: Path, seed: int, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    enliven(model.eval(), seed=seed)
    model.save_pretrained(folder, **options)
    return model


def opened(folder: Path) -> Transformer:
    return open_model(folder, tick=lambda what, done, whole: None)[0]


def exported(module: Transformer, folder: Path) -> list[str]:
    said: list[str] = []
    export_folder(module, None, folder, say=said.append)
    return said


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_saved_model_gives_the_same_numbers_here_and_there_again(
    make: Callable[[Draw], PreTrainedConfig], tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    first = 0 if count(0, 1) == 0 else random.SystemRandom().randrange(1 << 30)
    for seed in range(first, first + count(2, 20)):
        print("seed", seed)  # pytest shows it when something below fails
        folder = tmp_path / str(seed)
        config = make(random.Random(seed))
        theirs: Any = saved(config, folder / "theirs", seed)
        ours = opened(folder / "theirs")
        tokens_BT = ids(2, 40, seed, config.vocab_size)
        with torch.no_grad():
            expected = theirs(tokens_BT, output_hidden_states=True)
        near(logits(ours, tokens_BT), expected.logits)
        near_states(states(ours.decoder, partial(ours, tokens_BT)), expected.hidden_states)
        same_text(theirs, ours, tokens_BT[:1, :7])
        said = exported(ours, folder / "ours")
        assert f"exported as {same_kind(config)};" in said[-1]
        returned(theirs, folder, tokens_BT, expected.logits)


def same_kind(config: PreTrainedConfig) -> str:
    """The architecture of the export: a Mistral without a window is a LLaMA."""
    plain = config.model_type == "mistral" and config.sliding_window is None
    return "llama" if plain else str(config.model_type)


def returned(theirs: PreTrainedModel, folder: Path, tokens_BT: torch.Tensor, expected: torch.Tensor) -> None:
    """What was exported is what was saved: the same tensors bit for bit, and the same logits."""
    before = load_file(folder / "theirs" / "model.safetensors")
    after = load_file(folder / "ours" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    back = AutoModelForCausalLM.from_pretrained(folder / "ours").eval()
    assert back.config.model_type == same_kind(theirs.config)
    with torch.no_grad():
        assert torch.equal(back(tokens_BT).logits, expected)


@pytest.mark.parametrize(
    "kind", ["gpt2", "openai-gpt", "opt", "gpt_neox", "bloom", "llama", "mistral", "qwen2", "qwen3"]
)
def test_absent_settings_have_the_defaults_of_transformers(kind: str) -> None:
    whole = AutoConfig.for_model(kind).to_dict()
    tables: list[dict[str, Any]] = [{}, whole]
    mine, theirs = (resolved(ARCHITECTURES[kind].read(Fields(table, "file"), ())) for table in tables)
    assert mine == theirs


def test_everything_that_transformers_writes_was_read_or_is_harmless(tmp_path: Path) -> None:
    for number, make in enumerate(MADE):
        folder = tmp_path / str(number)
        saved(make(random.Random(number)), folder, number)
        assert open_model(folder, tick=lambda what, done, whole: None)[1]["ignored"] == [], make.__name__


OLD: list[tuple[Callable[[Draw], PreTrainedConfig], dict[str, Any]]] = [
    (neox, {"rotary_pct": 0.5, "rotary_emb_base": 700}),
    (llama, {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    (llama, {"rope_theta": 700.0, "rope_scaling": None}),
    (llama, {"rope_theta": 700.0, "sliding_window": 4096}),  # no narrower than the context
    (mistral, {"rope_theta": 700.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    (qwen2, {"rope_theta": 700.0, "sliding_window": 9, "use_sliding_window": False, "layer_types": None}),
]


@pytest.mark.parametrize(("make", "settings"), OLD, ids=lambda value: getattr(value, "__name__", ""))
def test_settings_as_older_files_spell_them_mean_the_same(
    make: Callable[[Draw], PreTrainedConfig], settings: dict[str, Any], tmp_path: Path
) -> None:
    saved(make(random.Random(5)), tmp_path, 5)
    path = tmp_path / "config.json"
    table = {name: value for name, value in json.loads(path.read_text()).items() if name != "rope_parameters"}
    path.write_text(json.dumps({**table, **settings}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens_BT = ids(2, 40, 5, table["vocab_size"])
    with torch.no_grad():
        near(logits(opened(tmp_path), tokens_BT), theirs(tokens_BT).logits)


@pytest.mark.parametrize(
    ("make", "settings", "named"),
    [
        (llama, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        (llama, {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        (llama, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale is 0.7"),
        (llama, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.0}}, "_factor is 0.0"),
        (llama, {"rope_parameters": {"rope_type": "default", "extra": 1}}, "extra is"),
        (llama, {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        (llama, {"sliding_window": 5}, "sliding_window is 5"),
        (qwen2, {"use_sliding_window": True, "layer_types": ["chunked_attention"]}, "layer_types is"),
        (qwen3, {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        (opt, {"word_embed_proj_dim": 512}, "word_embed_proj_dim is 512"),
        (opt, {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        (opt, {"_remove_final_layer_norm": True, "do_layer_norm_before": True}, "_remove_final_layer_norm is True"),
        (bloom, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is True"),
        (gpt2, {"add_cross_attention": True}, "add_cross_attention is True"),
        (gpt2, {"num_attention_heads": 99}, "n_head is .*; num_attention_heads is another spelling of it"),
        (llama, {"num_attention_heads": 10_001}, "num_attention_heads is 10001"),
        (apertus, {"hidden_act": "xielu"}, "hidden_act is 'xielu'"),
        (apertus, {"rope_parameters": None}, "rope_parameters is None"),
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else ""),
)
def test_a_setting_that_would_change_the_function_is_refused_by_name(
    make: Callable[[Draw], PreTrainedConfig], settings: dict[str, Any], named: str
) -> None:
    config = make(random.Random(1))
    with pytest.raises(CheckpointError, match=named):
        ARCHITECTURES[config.model_type].read(Fields({**config.to_dict(), **settings}, "file"), ())
