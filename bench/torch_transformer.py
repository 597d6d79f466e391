"""`torch.nn.Transformer` between an embedding and an output, as its tutorial sets it up: the Transformer of 2017."""

# B pairs, S source tokens, T target tokens, D width, V vocabulary

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.labels import IGNORED
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer
from trivium.parts.options.feedforward import MlpOptions
from trivium.parts.options.norms import LayerNormOptions

SMOOTHING = 0.1


class Output(NamedTuple):
    """What Hugging Face's models give, so that one loop serves both."""

    loss: Tensor | None
    logits: Tensor


class TorchTransformer(nn.Module):
    """Tied embeddings times sqrt(width), sinusoids, post-norm layers without a norm behind the last, no dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        block = _block(config)
        feed, norm = block.feedforward, block.norm
        assert isinstance(feed, MlpOptions)
        assert isinstance(norm, LayerNormOptions)
        shape: dict[str, Any] = {
            "d_model": config.width,
            "nhead": block.attention.heads,
            "dim_feedforward": feed.size(config.site()),
            "dropout": 0.0,
            "layer_norm_eps": norm.eps,
            "batch_first": True,
        }
        encoder, decoder = nn.TransformerEncoderLayer(**shape), nn.TransformerDecoderLayer(**shape)
        self.core = nn.Transformer(
            **shape,
            # nested tensors are for inference alone
            custom_encoder=nn.TransformerEncoder(encoder, config.encoder.layers, enable_nested_tensor=False),
            custom_decoder=nn.TransformerDecoder(decoder, config.decoder.layers),
        )
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.scale = math.sqrt(config.width)
        self.register_buffer("sinusoids", torch.zeros(config.context, config.width))
        self.sinusoids: Tensor

    @classmethod
    @torch.no_grad()
    def like(cls, model: Transformer) -> TorchTransformer:
        """With the weights of ours, beside it on its device."""
        with torch.device(model.device):
            made = cls(model.config)
        own = dict(model.named_parameters())
        made.embedding.weight.copy_(own["embedding.weight"])
        assert model.encoder is not None
        positions = torch.arange(model.config.context, device=model.device)[None]
        nothing = torch.zeros(1, model.config.context, model.config.width, device=model.device)
        made.sinusoids.copy_(model.encoder.embed(nothing, positions)[0])
        for name, parameter in made.core.named_parameters():
            parameter.copy_(torch.cat([own[part] for part in _ours(name)]))
        return made

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Output:
        away_BS = None if attention_mask is None else ~attention_mask
        length = decoder_input_ids.shape[1]
        mask_TT = nn.Transformer.generate_square_subsequent_mask(length, device=input_ids.device)
        hidden_BTD = self.core(
            self._embedded(input_ids),
            self._embedded(decoder_input_ids),
            tgt_mask=mask_TT,
            tgt_is_causal=True,  # padding is at the end, where no real target sees it
            src_key_padding_mask=away_BS,
            memory_key_padding_mask=away_BS,
        )
        logits_BTV = F.linear(hidden_BTD, self.embedding.weight)
        loss = None
        if labels is not None:
            flat = logits_BTV.flatten(0, 1).float()
            loss = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, label_smoothing=SMOOTHING)
        return Output(loss, logits_BTV)

    def _embedded(self, ids_BT: Tensor) -> Tensor:
        result: Tensor = self.embedding(ids_BT) * self.scale + self.sinusoids[: ids_BT.shape[1]]
        return result


def _block(config: ModelConfig) -> Block:
    assert isinstance(config.encoder, Stack)
    assert isinstance(config.encoder.block, Block)
    return config.encoder.block


PARTS = {
    "self_attn": "attention",
    "multihead_attn": "cross",
    "linear1": "feedforward.up",
    "linear2": "feedforward.down",
    "norm1": "around_attention.norm",
}
NORMS = {"encoder": {"norm2": "feedforward"}, "decoder": {"norm2": "cross", "norm3": "feedforward"}}


def _ours(name: str) -> list[str]:
    """Our parameters that one of `torch.nn.Transformer` holds: queries, keys and values are one there."""
    side, _, layer, part, *rest = name.split(".")
    block = f"{side}.blocks.{layer}"
    if part in NORMS[side]:
        return [f"{block}.around_{NORMS[side][part]}.norm.{rest[0]}"]
    if rest[0].startswith("in_proj_"):
        kind = rest[0].removeprefix("in_proj_")
        return [f"{block}.{PARTS[part]}.{which}.{kind}" for which in ("query", "key", "value")]
    if rest[0] == "out_proj":
        return [f"{block}.{PARTS[part]}.out.{rest[1]}"]
    return [f"{block}.{PARTS[part]}.{rest[0]}"]
