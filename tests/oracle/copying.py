"""Weights of other libraries' models in ours, for tests only: the names and transposes of spec models §8."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.models.transformer import Transformer, load_weights


def copy_gpt(theirs: dict[str, Tensor], ours: Transformer, *, first: bool) -> None:
    """GPT-2, or GPT-1 if `first`: other names for the tables, and no final norm."""
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    tokens, positions = ("tokens_embed", "positions_embed") if first else ("wte", "wpe")
    tensors = {
        "embedding.weight": theirs[f"{tokens}.weight"],
        "decoder.positions.0.table": theirs[f"{positions}.weight"],
    }
    if not first:
        _vectors(tensors, "decoder.final", theirs, "ln_f")
    for layer in range(ours.config.layers):
        block, h = f"decoder.blocks.{layer}", f"h.{layer}"
        # stored [in, out] with the columns q|k|v
        packed = zip(
            theirs[f"{h}.attn.c_attn.weight"].T.chunk(3), theirs[f"{h}.attn.c_attn.bias"].chunk(3), strict=True
        )
        for name, (weight, bias) in zip(("query", "key", "value"), packed, strict=True):
            tensors[f"{block}.attention.{name}.weight"], tensors[f"{block}.attention.{name}.bias"] = weight, bias
        matrices = {"attention.out": "attn.c_proj", "feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"}
        for mine, name in matrices.items():
            tensors[f"{block}.{mine}.weight"] = theirs[f"{h}.{name}.weight"].T
            tensors[f"{block}.{mine}.bias"] = theirs[f"{h}.{name}.bias"]
        _vectors(tensors, f"{block}.around_attention.norm", theirs, f"{h}.ln_1")
        _vectors(tensors, f"{block}.around_feedforward.norm", theirs, f"{h}.ln_2")
    load_weights(ours, tensors)


def _vectors(tensors: dict[str, Tensor], mine: str, theirs: dict[str, Tensor], name: str) -> None:
    for kind in ("weight", "bias"):
        tensors[f"{mine}.{kind}"] = theirs[f"{name}.{kind}"]


LLAMA = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
    "around_attention.norm": "input_layernorm",
    "around_feedforward.norm": "post_attention_layernorm",  # it is the norm before the feed-forward network
}


def copy_llama(theirs: dict[str, Tensor], ours: Transformer) -> None:
    """LLaMA and its descendants without QK-norm, tied or not."""
    theirs = {name.removeprefix("model."): tensor for name, tensor in theirs.items()}
    tensors = {"embedding.weight": theirs["embed_tokens.weight"], "decoder.final.weight": theirs["norm.weight"]}
    if ours.config.embedding.tie == "none":
        tensors["output.project.weight"] = theirs["lm_head.weight"]
    for layer in range(ours.config.layers):
        for mine, name in LLAMA.items():
            tensors[f"decoder.blocks.{layer}.{mine}.weight"] = theirs[f"layers.{layer}.{name}.weight"]
    load_weights(ours, tensors)


def enliven(model: torch.nn.Module, *, seed: int, spread: float = 0.15) -> None:
    """Redraw every weight, biases and gains too: fresh models have zeros and ones where a mix-up would not show.

    A wide `spread` makes a model that does not repeat itself.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim == 1 else spread)
            gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(noise + 1 if gain else noise)
