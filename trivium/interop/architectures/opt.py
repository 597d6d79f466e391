"""OPT: learned positions from the third row on, ReLU, pre-norm (350M: post-norm)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trivium.interop.architectures.architecture import Architecture, first_block, like, tie
from trivium.interop.fields import ACTIVATIONS, HEADS, Fields, spelling
from trivium.interop.names import Rules, attention, same
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.parts.init import Gpt2
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import MlpOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.positions import LearnedOptions
from trivium.parts.options.residual import PostOptions, PreOptions

_EPS = 1e-5  # fixed in `transformers`


def _read(fields: Fields, found: Collection[str]) -> ModelConfig:
    width = fields.integer("hidden_size", 768)
    fields.only("word_embed_proj_dim", width)
    fields.only("layer_norm_elementwise_affine", True)
    before = fields.flag("do_layer_norm_before", True)
    if before:
        fields.only("_remove_final_layer_norm", False)
    fields.skip("_remove_final_layer_norm", "layerdrop", "activation_dropout", "init_std", "prefix")
    bias = fields.flag("enable_bias", True)
    block = Block(
        attention=MultiHeadOptions(
            heads=fields.integer("num_attention_heads", 12, most=HEADS),
            bias="all" if bias else "none",
            dropout=fields.number("attention_dropout", 0.0, most=1),
        ),
        feedforward=MlpOptions(
            hidden=fields.integer("ffn_dim", 3072),
            activation=fields.choice("activation_function", "relu", ACTIVATIONS),
            bias=bias,
        ),
        norm=LayerNormOptions(eps=_EPS),
        residual=PreOptions() if before else PostOptions(),
        position=LearnedOptions(offset=2),
        dropout=fields.number("dropout", 0.1, most=1),
    )
    return ModelConfig(
        width=width,
        context=fields.integer("max_position_embeddings", 2048),
        vocab=fields.integer("vocab_size", 50_272),
        embedding=TokenEmbeddingOptions(tie=tie(fields, True)),
        decoder=Stack(layers=fields.integer("num_hidden_layers", 12, most=10_000), block=block),
        init=Gpt2(std=0.006),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    block = first_block(config.decoder)
    heads, feedforward = like(block.attention, MultiHeadOptions), like(block.feedforward, MlpOptions)
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "word_embed_proj_dim": config.width,
        "num_hidden_layers": config.decoder.layers,
        "ffn_dim": feedforward.size(config.site()),
        "num_attention_heads": heads.heads,
        "max_position_embeddings": config.context,
        "activation_function": spelling(feedforward.activation),
        "do_layer_norm_before": not isinstance(block.residual, PostOptions),
        "enable_bias": heads.bias == "all",
        "dropout": block.dropout,
        "attention_dropout": heads.dropout,
        "tie_word_embeddings": config.tied,
    }


def _rules(config: ModelConfig) -> Rules:
    mine, theirs = "decoder.blocks.*", "model.decoder.layers.*"
    names = {
        "embedding": "model.decoder.embed_tokens",
        "decoder.positions.0.table": "model.decoder.embed_positions.weight",
        **attention(f"{mine}.attention", f"{theirs}.self_attn", "q_proj k_proj v_proj out_proj"),
        f"{mine}.around_attention.norm": f"{theirs}.self_attn_layer_norm",
        f"{mine}.feedforward.up": f"{theirs}.fc1",
        f"{mine}.feedforward.down": f"{theirs}.fc2",
        f"{mine}.around_feedforward.norm": f"{theirs}.final_layer_norm",
        "decoder.final": "model.decoder.final_layer_norm",
        "output.project": "lm_head",
    }
    return Rules(
        table=same(names),
        copies={"lm_head.weight": "model.decoder.embed_tokens.weight"},
        prefixes=("model.", "model.decoder."),
    )


ARCHITECTURES = {"opt": Architecture(_read, _write, _rules)}
