"""GPT (2018) and GPT-2: learned positions, matrices stored [in, out]."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trivium.interop.architectures.architecture import Architecture, first_block, like, tie
from trivium.interop.fields import ACTIVATIONS, HEADS, Fields, spelling
from trivium.interop.names import Columns, Rule, Rules, Turned, same
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.parts.init import Gpt, Gpt2
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import Activation, MlpOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.positions import LearnedOptions
from trivium.parts.options.residual import PostOptions, PreOptions

# GPT-1 has a table of its own, in which "gelu" is the approximation
_FIRST: dict[str, Activation] = {"gelu": "gelu-tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
_SUMMARY = [f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")]


def _sizes(fields: Fields, *, context: int, vocab: int) -> dict[str, Any]:
    fields.skip(*_SUMMARY, "n_ctx", "n_special", "predict_special_tokens")
    return {
        "width": fields.integer("n_embd", 768, also="hidden_size"),
        "context": fields.integer("n_positions", context, also="max_position_embeddings"),
        "vocab": fields.integer("vocab_size", vocab),
        "embedding": TokenEmbeddingOptions(tie=tie(fields, True), dropout=fields.number("embd_pdrop", 0.1, most=1)),
    }


def _stack(
    fields: Fields, attention: MultiHeadOptions, feedforward: MlpOptions, residual: PreOptions | PostOptions
) -> Stack:
    block = Block(
        attention=attention,
        feedforward=feedforward,
        norm=LayerNormOptions(eps=fields.number("layer_norm_epsilon", 1e-5)),
        residual=residual,
        position=LearnedOptions(),
        dropout=fields.number("resid_pdrop", 0.1, most=1),
    )
    return Stack(layers=fields.integer("n_layer", 12, also="num_hidden_layers", most=10_000), block=block)


def _heads(fields: Fields) -> MultiHeadOptions:
    return MultiHeadOptions(
        heads=fields.integer("n_head", 12, also="num_attention_heads", most=HEADS),
        bias="all",
        dropout=fields.number("attn_pdrop", 0.1, most=1),
        scale="root" if fields.flag("scale_attn_weights", True) else "none",
    )


def _read(fields: Fields, found: Collection[str]) -> ModelConfig:
    feedforward = MlpOptions(activation=fields.choice("afn", "gelu", _FIRST))
    return ModelConfig(
        **_sizes(fields, context=512, vocab=40_478),
        decoder=_stack(fields, _heads(fields), feedforward, PostOptions()),
        init=Gpt(),
    )


def _read2(fields: Fields, found: Collection[str]) -> ModelConfig:
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    fields.skip("reorder_and_upcast_attn")  # the same sums in another order
    feedforward = MlpOptions(
        hidden=fields.integer("n_inner", 0, least=0),
        activation=fields.choice("activation_function", "gelu_new", ACTIVATIONS),
    )
    return ModelConfig(
        **_sizes(fields, context=1024, vocab=50_257),
        decoder=_stack(fields, _heads(fields), feedforward, PreOptions()),
        init=Gpt2(),
    )


def _write_both(config: ModelConfig) -> dict[str, Any]:
    block = first_block(config.decoder)
    attention = like(block.attention, MultiHeadOptions)
    return {
        "vocab_size": config.vocab,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.decoder.layers,
        "n_head": attention.heads,
        "layer_norm_epsilon": like(block.norm, LayerNormOptions).eps,
        "embd_pdrop": like(config.embedding, TokenEmbeddingOptions).dropout,
        "attn_pdrop": attention.dropout,
        "resid_pdrop": block.dropout,
        "tie_word_embeddings": config.tied,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    activation = like(first_block(config.decoder).feedforward, MlpOptions).activation
    words = {mine: theirs for theirs, mine in reversed(_FIRST.items())}
    return {
        "model_type": "openai-gpt",
        "architectures": ["OpenAIGPTLMHeadModel"],
        **_write_both(config),
        "afn": words.get(activation, "gelu"),
    }


def _write2(config: ModelConfig) -> dict[str, Any]:
    block = first_block(config.decoder)
    feedforward = like(block.feedforward, MlpOptions)
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **_write_both(config),
        "n_inner": feedforward.hidden or None,
        "activation_function": spelling(feedforward.activation),
        "scale_attn_weights": like(block.attention, MultiHeadOptions).scale == "root",
    }


def _rules(tokens: str, positions: str) -> Rules:
    mine, theirs = "decoder.blocks.*", "transformer.h.*"
    names = {
        "embedding": f"transformer.{tokens}",
        "decoder.positions.0.table": f"transformer.{positions}.weight",
        f"{mine}.around_attention.norm": f"{theirs}.ln_1",
        f"{mine}.around_feedforward.norm": f"{theirs}.ln_2",
        "decoder.final": "transformer.ln_f",  # GPT-1 has none, and our post-norm stacks neither
        "output.project": "lm_head",
    }
    qkv = tuple(f"{mine}.attention.{part}" for part in ("query", "key", "value"))
    turned = {
        f"{mine}.attention.out": f"{theirs}.attn.c_proj",
        f"{mine}.feedforward.up": f"{theirs}.mlp.c_fc",
        f"{mine}.feedforward.down": f"{theirs}.mlp.c_proj",
    }
    return Rules(
        table=[
            *same(names),
            Rule(qkv, f"{theirs}.attn.c_attn", Columns()),
            *(Rule((ours,), other, Turned()) for ours, other in turned.items()),
        ],
        copies={"lm_head.weight": f"transformer.{tokens}.weight"},
        ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
        prefixes=("transformer.",),
    )


ARCHITECTURES = {
    "gpt2": Architecture(_read2, _write2, lambda config: _rules("wte", "wpe")),
    "openai-gpt": Architecture(_read, _write, lambda config: _rules("tokens_embed", "positions_embed")),
}
