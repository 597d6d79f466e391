"""MPNet: RoBERTa's table of positions and T5's relative biases in one encoder."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trivium.interop.architectures import bert
from trivium.interop.architectures.architecture import Architecture
from trivium.interop.fields import Fields
from trivium.interop.names import attention
from trivium.models.config import ModelConfig
from trivium.parts.options.positions import BothOptions, BucketOptions, LearnedOptions

_OFFSET, _BUCKETS, _DISTANCE = 2, 32, 128  # settings of the published code, whatever config.json says
_BLOCK = "encoder.blocks.*"

_HEADS = bert.ROBERTA._replace(body="mpnet.")
_BODY = {
    "embedding": "embeddings.word_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
    "encoder.positions.0.absolute.table": "embeddings.position_embeddings.weight",
    "encoder.positions.0.relative.table": "encoder.relative_attention_bias.weight",
    **attention(f"{_BLOCK}.attention", "encoder.layer.*.attention.attn", "q k v o"),
    f"{_BLOCK}.around_attention.norm": "encoder.layer.*.attention.LayerNorm",
    f"{_BLOCK}.feedforward.up": "encoder.layer.*.intermediate.dense",
    f"{_BLOCK}.feedforward.down": "encoder.layer.*.output.dense",
    f"{_BLOCK}.around_feedforward.norm": "encoder.layer.*.output.LayerNorm",
}


def _read(fields: Fields, found: Collection[str]) -> ModelConfig:
    fields.only("relative_attention_num_buckets", _BUCKETS)
    position = BothOptions(
        absolute=LearnedOptions(offset=_OFFSET), relative=BucketOptions(buckets=_BUCKETS, distance=_DISTANCE)
    )
    config = bert.usual(fields, vocab=30_527, position=position, offset=_OFFSET, segments=0)
    return bert.headed(config, fields, found, _HEADS, "gelu")


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "mpnet",
        **bert.written(config, "MPNet"),
        **bert.write_usual(config, offset=_OFFSET),
        "relative_attention_num_buckets": _BUCKETS,
    }


ARCHITECTURES = {"mpnet": Architecture(_read, _write, lambda config: bert.rules(config, _HEADS, _BODY))}
