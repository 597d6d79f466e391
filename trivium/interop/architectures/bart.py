"""BART and Marian: post-norm encoder-decoders with biases, learned positions or sinusoids."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from trivium.interop.architectures.architecture import Architecture, first_block, like
from trivium.interop.fields import ACTIVATIONS, HEADS, Fields, spelling
from trivium.interop.names import Row, Rule, Rules, attention, same
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.parts.init import Gpt
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import Tie, TokenEmbeddingOptions
from trivium.parts.options.feedforward import MlpOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.output import SoftmaxOptions
from trivium.parts.options.positions import LearnedOptions, Position, SinusoidalOptions
from trivium.parts.options.residual import PostOptions

_OFFSET = 2  # rows before the first position that no text reaches
_BIAS = "final_logits_bias"
_LONGEST = 16_384  # positions of a sinusoid: a table has a row for each, and no tensor of a file says how many
_NORM = LayerNormOptions(eps=1e-5)
# How texts are written by default, and what acts in training alone or repeats another setting.
_UNREAD = (
    *("bad_words_ids", "decoder_start_token_id", "early_stopping", "forced_bos_token_id", "forced_eos_token_id"),
    *("length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beams", "prefix"),
    *("classif_dropout", "classifier_dropout", "decoder_layerdrop", "encoder_layerdrop", "init_std", "num_labels"),
    *("add_bias_logits", "extra_pos_embeddings", "num_hidden_layers", "output_past"),
)


def _read_both(
    fields: Fields, found: Collection[str], position: Position, embedding: TokenEmbeddingOptions, vocab: int
) -> ModelConfig:
    fields.skip(*_UNREAD)
    fields.only("is_decoder", False)
    fields.only("normalize_before", False)
    fields.only("add_final_layer_norm", False)
    rate = fields.number("dropout", 0.1, most=1)
    encoder, decoder = (_side(fields, side, position, rate) for side in ("encoder", "decoder"))
    crossed = replace(first_block(decoder), cross=first_block(decoder).attention)
    scaled = fields.flag("scale_embedding", False)
    return ModelConfig(
        width=fields.integer("d_model", 1024, also="hidden_size"),
        context=fields.integer("max_position_embeddings", 1024),
        vocab=fields.integer("vocab_size", vocab),
        embedding=replace(embedding, scale="root" if scaled else "none", dropout=rate),
        encoder=encoder,
        decoder=replace(decoder, block=crossed),
        output=SoftmaxOptions(bias=_BIAS in found, fixed=_BIAS in found),  # a buffer there
        init=Gpt(),
    )


def _side(fields: Fields, side: str, position: Position, rate: float) -> Stack:
    spelt = "num_attention_heads" if side == "encoder" else ""
    heads = MultiHeadOptions(
        heads=fields.integer(f"{side}_attention_heads", 16, also=spelt, most=HEADS),
        bias="all",
        dropout=fields.number("attention_dropout", 0.0, most=1),
    )
    feedforward = MlpOptions(
        hidden=fields.integer(f"{side}_ffn_dim", 4096),
        activation=fields.choice("activation_function", "gelu", ACTIVATIONS),
        dropout=fields.number("activation_dropout", 0.0, most=1),
    )
    block = Block(
        attention=heads, feedforward=feedforward, norm=_NORM, residual=PostOptions(), position=position, dropout=rate
    )
    return Stack(layers=fields.integer(f"{side}_layers", 12, most=10_000), block=block)


def _write_both(config: ModelConfig) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        block = first_block(stack)
        heads, feedforward = like(block.attention, MultiHeadOptions), like(block.feedforward, MlpOptions)
        result |= {
            f"{side}_layers": stack.layers,
            f"{side}_attention_heads": heads.heads,
            f"{side}_ffn_dim": feedforward.size(config.site()),
            "activation_function": spelling(feedforward.activation),
            "activation_dropout": feedforward.dropout,
            "attention_dropout": heads.dropout,
            "dropout": block.dropout,
        }
    return {
        **result,
        "is_encoder_decoder": True,
        "vocab_size": config.vocab,
        "d_model": config.width,
        "max_position_embeddings": config.context,
        "scale_embedding": like(config.embedding, TokenEmbeddingOptions).scale == "root",
        "tie_word_embeddings": config.tied,
    }


def _rules(config: ModelConfig, *ignored: str) -> Rules:
    names = _side_names("encoder") | _side_names("decoder")
    names |= attention("decoder.blocks.*.cross", "model.decoder.layers.*.encoder_attn", "q_proj k_proj v_proj out_proj")
    names |= {
        "decoder.blocks.*.around_cross.norm": "model.decoder.layers.*.encoder_attn_layer_norm",
        "source_embedding.norm": "model.encoder.layernorm_embedding",
        "embedding.norm": "model.decoder.layernorm_embedding",
        "output.project.weight": "lm_head.weight",
    }
    copies = {}
    if config.one_input:
        names["embedding"] = "model.shared"
        copies = {f"model.{side}.embed_tokens.weight": "model.shared.weight" for side in ("encoder", "decoder")}
    else:
        names |= {
            "embedding": "model.decoder.embed_tokens",
            "source_embedding.weight": "model.encoder.embed_tokens.weight",
        }
        ignored = (*ignored, "model.shared.weight")  # which nothing reads then
    if config.tied:
        copies["lm_head.weight"] = f"{names['embedding']}.weight"
    return Rules(
        table=[*same(names), Rule(("output.project.bias",), _BIAS, Row())],
        copies=copies,
        ignored=("model.encoder.version", "model.decoder.version", *ignored),
        prefixes=("model.",),
    )


def _side_names(side: str) -> dict[str, str]:
    mine, theirs = f"{side}.blocks.*", f"model.{side}.layers.*"
    return {
        f"{side}.positions.0.table": f"model.{side}.embed_positions.weight",
        **attention(f"{mine}.attention", f"{theirs}.self_attn", "q_proj k_proj v_proj out_proj"),
        f"{mine}.around_attention.norm": f"{theirs}.self_attn_layer_norm",
        f"{mine}.feedforward.up": f"{theirs}.fc1",
        f"{mine}.feedforward.down": f"{theirs}.fc2",
        f"{mine}.around_feedforward.norm": f"{theirs}.final_layer_norm",
    }


def _read(fields: Fields, found: Collection[str]) -> ModelConfig:
    fields.only("normalize_embedding", True)
    fields.only("static_position_embeddings", False)
    tie: Tie = "all" if fields.flag("tie_word_embeddings", True) else "none"
    embedding = TokenEmbeddingOptions(tie=tie, norm=_NORM)
    return _read_both(fields, found, LearnedOptions(offset=_OFFSET), embedding, 50_265)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], **_write_both(config)}


# of (one matrix for both inputs, one for the decoder and the output)
_TIES: dict[tuple[bool, bool], Tie] = {(True, True): "all", (False, True): "output", (False, False): "none"}


def _read_marian(fields: Fields, found: Collection[str]) -> ModelConfig:
    fields.only("normalize_embedding", False)
    fields.only("static_position_embeddings", True)
    vocab = fields.integer("vocab_size", 58_101)
    fields.only("decoder_vocab_size", vocab)
    fields.integer("max_position_embeddings", 1024, most=_LONGEST)
    one, tied = fields.flag("share_encoder_decoder_embeddings", True), fields.flag("tie_word_embeddings", True)
    if (one, tied) not in _TIES:
        reason = "with share_encoder_decoder_embeddings trivium does not have that; use another checkpoint"
        raise fields.refusal("tie_word_embeddings", tied, reason)
    return _read_both(
        fields, found, SinusoidalOptions(layout="halves"), TokenEmbeddingOptions(tie=_TIES[one, tied]), vocab
    )


def _write_marian(config: ModelConfig) -> dict[str, Any]:
    # the defaults are ids of a larger vocabulary, which the published code refuses
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        **_write_both(config),
        "decoder_vocab_size": config.vocab,
        "share_encoder_decoder_embeddings": config.one_input,
        "pad_token_id": config.vocab - 1,
        "decoder_start_token_id": config.vocab - 1,
    }


def _rules_marian(config: ModelConfig) -> Rules:
    """The sinusoids that some files have are computed here."""
    return _rules(config, *(f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")))


ARCHITECTURES = {
    "bart": Architecture(_read, _write, _rules),
    "marian": Architecture(_read_marian, _write_marian, _rules_marian),
}
