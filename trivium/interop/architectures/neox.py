"""GPT-NeoX and Pythia: parallel blocks, rotary positions on part of each head."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trivium.interop.architectures import rope
from trivium.interop.architectures.architecture import Architecture, like, tie
from trivium.interop.fields import ACTIVATIONS, HEADS, Fields, spelling
from trivium.interop.names import ByHead, Rule, Rules, same
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block, Parallel
from trivium.parts.init import Gpt2
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import MlpOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.options.residual import PreOptions


def _read(fields: Fields, found: Collection[str]) -> ModelConfig:
    context = fields.integer("max_position_embeddings", 2048)
    fields.only("is_decoder", False, True)  # it is always causal
    fields.skip("classifier_dropout")
    parts: dict[str, Any] = {
        "attention": MultiHeadOptions(
            heads=fields.integer("num_attention_heads", 64, most=HEADS),
            bias="all" if fields.flag("attention_bias", True) else "none",
            dropout=fields.number("attention_dropout", 0.0, most=1),
        ),
        "feedforward": MlpOptions(
            hidden=fields.integer("intermediate_size", 24_576),
            activation=fields.choice("hidden_act", "gelu", ACTIVATIONS),
        ),
        "norm": LayerNormOptions(eps=fields.number("layer_norm_eps", 1e-5)),
        "position": rope.read(fields, context, theta="rotary_emb_base", share="rotary_pct", part=0.25),
        "dropout": fields.number("hidden_dropout", 0.0, most=1),
    }
    parallel = fields.flag("use_parallel_residual", True)
    block = Parallel(**parts, norms="two") if parallel else Block(**parts, residual=PreOptions())
    return ModelConfig(
        width=fields.integer("hidden_size", 6144),
        context=context,
        vocab=fields.integer("vocab_size", 50_432),
        embedding=TokenEmbeddingOptions(tie=tie(fields, False), dropout=parts["dropout"]),
        decoder=Stack(layers=fields.integer("num_hidden_layers", 44, most=10_000), block=block),
        init=Gpt2(),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    first = like(config.decoder, Stack).blocks()[0]
    block = first if isinstance(first, Parallel) else like(first, Block)
    heads, feedforward = like(block.attention, MultiHeadOptions), like(block.feedforward, MlpOptions)
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.decoder.layers,
        "num_attention_heads": heads.heads,
        "intermediate_size": feedforward.size(config.site()),
        "hidden_act": spelling(feedforward.activation),
        "max_position_embeddings": config.context,
        "layer_norm_eps": like(block.norm, LayerNormOptions).eps,
        "use_parallel_residual": isinstance(block, Parallel),
        "attention_bias": heads.bias == "all",
        "rope_parameters": rope.write(like(block.position, RotaryOptions), partial=True),
        "attention_dropout": heads.dropout,
        "hidden_dropout": block.dropout,
        "tie_word_embeddings": config.tied,
    }


def _rules(config: ModelConfig) -> Rules:
    mine, theirs = "decoder.blocks.*", "gpt_neox.layers.*"
    parallel = isinstance(like(config.decoder, Stack).block, Parallel)
    first, second = ("norm", "feedforward_norm") if parallel else ("around_attention.norm", "around_feedforward.norm")
    names = {
        "embedding": "gpt_neox.embed_in",
        f"{mine}.attention.out": f"{theirs}.attention.dense",
        f"{mine}.feedforward.up": f"{theirs}.mlp.dense_h_to_4h",
        f"{mine}.feedforward.down": f"{theirs}.mlp.dense_4h_to_h",
        f"{mine}.{first}": f"{theirs}.input_layernorm",
        f"{mine}.{second}": f"{theirs}.post_attention_layernorm",
        "decoder.final": "gpt_neox.final_layer_norm",
        "output.project": "embed_out",  # lm_head inside `transformers` 5, which still writes the old name
    }
    heads = like(config.decoder, Stack).block.attention.heads
    qkv = tuple(f"{mine}.attention.{part}" for part in ("query", "key", "value"))
    return Rules(
        table=[*same(names), Rule(qkv, f"{theirs}.attention.query_key_value", ByHead(heads=heads))],
        copies={"lm_head.weight": "embed_out.weight", "embed_out.weight": "gpt_neox.embed_in.weight"},
        ignored=(
            "gpt_neox.layers.*.attention.bias",
            "gpt_neox.layers.*.attention.masked_bias",
            "gpt_neox.layers.*.attention.rotary_emb.inv_freq",
        ),
        prefixes=("gpt_neox.",),
    )


ARCHITECTURES = {"gpt_neox": Architecture(_read, _write, _rules)}
