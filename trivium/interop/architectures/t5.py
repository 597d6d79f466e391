"""T5 v1.0 and v1.1 (Flan-T5 too): pre-norm encoder-decoders without biases, relative positions on both sides."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from trivium.interop.architectures.architecture import Architecture, first_block, like
from trivium.interop.fields import ACTIVATIONS, HEADS, Fields, spelling
from trivium.interop.names import Rules, attention, same
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.parts.init import T5
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import Activation, GluOptions, MlpOptions
from trivium.parts.options.norms import RMSNormOptions
from trivium.parts.options.output import SoftmaxOptions
from trivium.parts.options.positions import BucketOptions
from trivium.parts.options.residual import PreOptions

_FARTHEST = 100_000  # tokens: a table has a row for each, and no tensor of a file says how many


class _Feed(NamedTuple):
    gated: bool
    activation: Activation


_FEEDS = {
    **{name: _Feed(False, act) for name, act in ACTIVATIONS.items()},
    **{f"gated-{name}": _Feed(True, act) for name, act in ACTIVATIONS.items()},
    "gated-gelu": _Feed(True, "gelu-tanh"),  # the published code takes the approximation for this name alone
}
_HEAD = "lm_head.weight"


def _read(fields: Fields, found: Collection[str]) -> ModelConfig:
    fields.skip("decoder_start_token_id", "initializer_factor", "classifier_dropout", "output_past")
    fields.skip("num_hidden_layers")  # another spelling of num_layers, which the tensors prove
    fields.only("is_decoder", False)
    # What is written as "not tied" means "not scaled" in newer files, where a name of its own says so too; the output
    # has a matrix of its own exactly where one is stored, except that v1.0 may have stored the shared one again.
    scaled = fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True))
    rate = fields.number("dropout_rate", 0.1, most=1)
    layers = fields.integer("num_layers", 6, most=10_000)
    block = _block(fields, rate)
    return ModelConfig(
        width=fields.integer("d_model", 512, also="hidden_size"),
        context=fields.integer("n_positions", 512),  # as pretrained: the buckets themselves have no end
        vocab=fields.integer("vocab_size", 32_128),
        embedding=TokenEmbeddingOptions(tie="inputs" if _HEAD in found and not scaled else "all", dropout=rate),
        encoder=Stack(layers=layers, block=block),
        decoder=Stack(
            layers=fields.integer("num_decoder_layers", layers, most=10_000),
            block=replace(block, cross=block.attention),
        ),
        output=SoftmaxOptions(scale="root" if scaled else "none"),
        init=T5(),
    )


def _block(fields: Fields, rate: float) -> Block:
    heads = MultiHeadOptions(
        heads=fields.integer("num_heads", 8, also="num_attention_heads", most=HEADS),
        head=fields.integer("d_kv", 64, also="head_dim", most=HEADS),
        scale="none",
        dropout=rate,
    )
    feed, hidden = fields.choice("feed_forward_proj", "relu", _FEEDS), fields.integer("d_ff", 2048)
    # what the published code makes of that name, and what it computes with where a file says it too
    fields.only("dense_act_fn", *(name for name, act in ACTIVATIONS.items() if act == feed.activation))
    fields.only("is_gated_act", feed.gated)
    if feed.gated:
        feedforward: MlpOptions | GluOptions = GluOptions(hidden=hidden, activation=feed.activation, dropout=rate)
    else:
        feedforward = MlpOptions(hidden=hidden, activation=feed.activation, bias=False, dropout=rate)
    return Block(
        attention=heads,
        feedforward=feedforward,
        norm=RMSNormOptions(eps=fields.number("layer_norm_epsilon", 1e-6)),
        residual=PreOptions(),
        position=BucketOptions(
            buckets=fields.integer("relative_attention_num_buckets", 32),
            distance=fields.integer("relative_attention_max_distance", 128, most=_FARTHEST),
        ),
        dropout=rate,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    block = first_block(config.encoder)
    heads, position = like(block.attention, MultiHeadOptions), like(block.position, BucketOptions)
    gated, feed = isinstance(block.feedforward, GluOptions), block.feedforward
    feedforward = feed if isinstance(feed, GluOptions) else like(feed, MlpOptions)
    activation = "gelu" if gated and feedforward.activation == "gelu-tanh" else spelling(feedforward.activation)
    scaled = like(config.output, SoftmaxOptions).scale == "root"
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab,
        "n_positions": config.context,
        "d_model": config.width,
        "d_kv": heads.head or config.width // heads.heads,
        "d_ff": feedforward.size(config.site()),
        "num_layers": config.encoder.layers,
        "num_decoder_layers": config.decoder.layers,
        "num_heads": heads.heads,
        "relative_attention_num_buckets": position.buckets,
        "relative_attention_max_distance": position.distance,
        "dropout_rate": block.dropout,
        "layer_norm_epsilon": like(block.norm, RMSNormOptions).eps,
        "feed_forward_proj": f"gated-{activation}" if gated else activation,
        "tie_word_embeddings": scaled,
        "scale_decoder_outputs": scaled,
    }


def _side(side: str, gated: bool) -> dict[str, str]:
    mine, theirs, feed = f"{side}.blocks.*", f"{side}.block.*.layer", 1 if side == "encoder" else 2
    names = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
    return {
        f"{side}.positions.0.table": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        **attention(f"{mine}.attention", f"{theirs}.0.SelfAttention", "q k v o"),
        f"{mine}.around_attention.norm": f"{theirs}.0.layer_norm",
        **{f"{mine}.feedforward.{part}": f"{theirs}.{feed}.DenseReluDense.{name}" for part, name in names.items()},
        f"{mine}.around_feedforward.norm": f"{theirs}.{feed}.layer_norm",
        f"{side}.final": f"{side}.final_layer_norm",
    }


def _rules(config: ModelConfig) -> Rules:
    gated = isinstance(first_block(config.encoder).feedforward, GluOptions)
    names = {
        "embedding": "shared",
        **_side("encoder", gated),
        **_side("decoder", gated),
        **attention("decoder.blocks.*.cross", "decoder.block.*.layer.1.EncDecAttention", "q k v o"),
        "decoder.blocks.*.around_cross.norm": "decoder.block.*.layer.1.layer_norm",
        "output.project": "lm_head",
    }
    return Rules(
        table=same(names),
        copies=dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _HEAD), "shared.weight"),
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    )


ARCHITECTURES = {"t5": Architecture(_read, _write, _rules)}
