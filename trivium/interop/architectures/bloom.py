"""BLOOM: ALiBi, normed embeddings, queries, keys and values fused by head."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trivium.interop.architectures.architecture import Architecture, first_block, like, tie
from trivium.interop.fields import HEADS, Fields
from trivium.interop.names import ByHead, Rule, Rules, same
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.parts.init import Gpt2
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import MlpOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.positions import AlibiOptions
from trivium.parts.options.residual import PreOptions


def _read(fields: Fields, found: Collection[str]) -> ModelConfig:
    fields.only("apply_residual_connection_post_layernorm", False)
    fields.skip("pretraining_tp", "slow_but_exact", "bias_dropout_fusion", "masked_softmax_fusion", "unk_token_id")
    fields.skip("skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "attention_softmax_in_fp32", "n_inner")
    norm = LayerNormOptions(eps=fields.number("layer_norm_epsilon", 1e-5))
    width = fields.integer("n_embed", 64, also="hidden_size")
    block = Block(
        attention=MultiHeadOptions(
            heads=fields.integer("n_head", 8, also="num_attention_heads", most=HEADS),
            bias="all",
            dropout=fields.number("attention_dropout", 0.0, most=1),
        ),
        feedforward=MlpOptions(hidden=4 * width, activation="gelu-tanh"),
        norm=norm,
        residual=PreOptions(),
        position=AlibiOptions(),
        dropout=fields.number("hidden_dropout", 0.0, most=1),
    )
    return ModelConfig(
        width=width,
        context=fields.integer("seq_length", 2048),  # nothing of it is in the weights; BLOOM was trained with 2,048
        vocab=fields.integer("vocab_size", 250_880),
        embedding=TokenEmbeddingOptions(tie=tie(fields, True), norm=norm),
        decoder=Stack(layers=fields.integer("n_layer", 2, also="num_hidden_layers", most=10_000), block=block),
        init=Gpt2(),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    block = first_block(config.decoder)
    heads = like(block.attention, MultiHeadOptions)
    return {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "n_layer": config.decoder.layers,
        "n_head": heads.heads,
        "layer_norm_epsilon": like(block.norm, LayerNormOptions).eps,
        "seq_length": config.context,
        "attention_dropout": heads.dropout,
        "hidden_dropout": block.dropout,
        "tie_word_embeddings": config.tied,
    }


def _rules(config: ModelConfig) -> Rules:
    mine, theirs = "decoder.blocks.*", "transformer.h.*"
    names = {
        "embedding": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        f"{mine}.attention.out": f"{theirs}.self_attention.dense",
        f"{mine}.feedforward.up": f"{theirs}.mlp.dense_h_to_4h",
        f"{mine}.feedforward.down": f"{theirs}.mlp.dense_4h_to_h",
        f"{mine}.around_attention.norm": f"{theirs}.input_layernorm",
        f"{mine}.around_feedforward.norm": f"{theirs}.post_attention_layernorm",
        "decoder.final": "transformer.ln_f",
        "output.project": "lm_head",
    }
    heads = like(config.decoder, Stack).block.attention.heads
    qkv = tuple(f"{mine}.attention.{part}" for part in ("query", "key", "value"))
    return Rules(
        table=[*same(names), Rule(qkv, f"{theirs}.self_attention.query_key_value", ByHead(heads=heads))],
        copies={"lm_head.weight": "transformer.word_embeddings.weight"},
        prefixes=("transformer.",),
    )


ARCHITECTURES = {"bloom": Architecture(_read, _write, _rules)}
