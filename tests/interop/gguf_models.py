"""Models of `transformers` in GGUF files that the `gguf` package writes, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.oracle.copying import enliven
from trivium.text.library import byte_alphabet

gguf = pytest.importorskip("gguf")

_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def quiet(*args: object) -> None:
    """Nobody watches."""


def permuted(matrix: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter lays out the rows of queries and keys of LLaMA."""
    return (
        matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)
    )


def tensors(theirs: PreTrainedModel, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The weights under their names in GGUF."""
    config: Any = theirs.config
    result = {}
    for key, tensor in theirs.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.numpy().copy()
        if key in _OTHERS:
            result[_OTHERS[key]] = value
            continue
        _, _, layer, *middle, end = key.split(".")
        short = _LAYER[".".join(middle)]
        if name == "llama" and short in ("attn_q", "attn_k"):
            value = permuted(value, config.num_attention_heads if short == "attn_q" else config.num_key_value_heads)
        result[f"blk.{layer}.{short}.{end}"] = value
    return result


def settings(theirs: PreTrainedModel) -> dict[str, Any]:
    """The sizes as llama.cpp's converter writes them."""
    config: Any = theirs.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": head,
    }


def write(
    path: Path,
    theirs: PreTrainedModel,
    name: str = "llama",
    *,
    kind: str = "F32",
    change: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
    leave: str = "",
) -> None:
    """A GGUF file by the `gguf` package; `change` are settings with their full names (None removes one)."""
    writer = gguf.GGUFWriter(path, name)
    table = {f"{name}.{key}": value for key, value in settings(theirs).items()} | dict(change or {})
    for key, value in table.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    number = gguf.GGMLQuantizationType[kind]
    for key, value in (tensors(theirs, name) | dict(extra or {})).items():
        if key == leave:
            continue
        if value.ndim == 1 or kind == "F32":
            writer.add_tensor(key, value)
        else:
            writer.add_tensor(key, gguf.quants.quantize(value, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def alive(theirs: PreTrainedModel, seed: int = 0) -> Any:
    """A model in evaluation mode in which every weight, norms too, says something."""
    enliven(theirs.eval(), seed=seed)
    return theirs


def quantised(theirs: Any, kind: str, name: str = "llama") -> None:
    """Let a model have the matrices that its file holds."""
    number = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 2:
                raw = gguf.quants.quantize(parameter.numpy(), number)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(raw, number).copy()))


def opened_by_transformers(path: Path, patch: pytest.MonkeyPatch) -> Any:
    """The model in a GGUF file as `transformers` reads it."""
    # It asks for accelerate and does without on the CPU.
    patch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *args, **kwargs: True)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def written_text(size: int) -> dict[str, Any]:
    """The settings of a byte-level tokenizer with as many pieces."""
    alphabet = byte_alphabet()
    pieces = [*alphabet, "<|endoftext|>", "<|im_end|>"]
    merges = []
    for left in alphabet[65:]:
        if len(pieces) == size:
            break
        merges.append(f"{left} {alphabet[10]}")
        pieces.append(left + alphabet[10])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3 if id in (256, 257) else 1 for id in range(size)],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }
