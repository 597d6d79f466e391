"""A decoding step by few kernels, for the usual decoders: pre-norm, one linear layer after another, no biases.

It computes what `Transformer.forward` does for one new token of every row; models it does not know are left to that.
"""

# B slots, D width

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.models.block import StandardBlock
from trivium.models.transformer import Transformer
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.cache import Cache, LayerCache, Slots
from trivium.parts.feedforward import ACTIVATIONS, GluFeedForward, MlpFeedForward
from trivium.parts.kernels import step
from trivium.parts.kernels.batch import product
from trivium.parts.kernels.decode import Turn, mix
from trivium.parts.kernels.prompt import lay
from trivium.parts.linear import Linear
from trivium.parts.norms import LayerNormed, RMSNormed
from trivium.parts.output import SoftmaxOutput
from trivium.parts.positions import LearnedPositions, Positions, RotaryPositions, SinusoidalPositions
from trivium.parts.residual import PreConnection

_MOST = 64  # rows for which our own products are faster than the library's


class _Layer(NamedTuple):
    """One block by its weights."""

    before_attention: step.Scale
    qkv: Tensor  # the three matrices one below the other, a copy
    qkv_bias: Tensor | None
    out: Linear
    before_feedforward: step.Scale
    up: Linear
    gate: Linear | None
    down: Linear
    activation: str
    attention: MultiHeadAttention
    cache: LayerCache
    turn: Turn | None


class Fused:
    """The step of one bank; `forward` gives the scores [B, V] after `last` was read."""

    def __init__(self, model: Transformer, cache: Cache, slots: Slots, last_B: Tensor) -> None:
        assert model.decoder is not None
        # not the model itself, which keeps the bank
        self.embedding, self.output, self.slots, self.last_B = model.embedding, model.output, slots, last_B
        self.longest = slots.at_1S.shape[1]
        decoder = model.decoder
        turns = [_turn(cast(Positions, position)) for position in decoder.positions]
        tables = [found for position in decoder.positions if (found := _table(position)) is not None]
        self.table: Tensor | None = tables[0][0] if tables else None
        self.offset = tables[0][1] if tables else 0
        self.layers = [
            _layer(cast(StandardBlock, block), layer, turns[index])
            for block, layer, index in zip(decoder.blocks, cache.layers, decoder.position_of, strict=True)
        ]
        self.final = _scale(decoder.final)
        # scratch of the products: how many programs of each tile are done
        self.arrived = torch.zeros(1 << 16, dtype=torch.int32, device=last_B.device)
        self.bold = False  # kernels start before the ones in front of them are done (Hopper), heads attend alone

    @property
    def copies(self) -> list[Tensor]:
        """The weights that it holds a second time, and its scratch."""
        biases = [layer.qkv_bias for layer in self.layers if layer.qkv_bias is not None]
        return [self.arrived, *(layer.qkv for layer in self.layers), *biases]

    def refresh(self) -> None:
        """Copy again what is copied: the weights may have changed where they lie."""
        copies: list[Tensor] = []
        originals: list[Tensor] = []
        for layer in self.layers:
            parts = (layer.attention.query, layer.attention.key, layer.attention.value)
            sizes = [part.out_features for part in parts]
            copies += torch.split(layer.qkv, sizes)
            originals += [part.weight.detach() for part in parts]
            if layer.qkv_bias is not None:
                copies += torch.split(layer.qkv_bias, sizes)
                originals += [part.bias.detach() for part in parts]
        torch._foreach_copy_(copies, originals)

    def forward(self) -> Tensor:
        """One token of every row."""
        weight, scale, lengths_B = self.embedding.weight, self.embedding.scale, self.slots.lengths_B
        x_BD = step.enter(self.last_B, lengths_B, weight, self.table, self.offset, scale, self.longest, early=self.bold)
        one = len(x_BD) == 1
        for layer in self.layers:
            if one:
                self._single(layer, x_BD)
            else:
                self._several(layer, x_BD)
        output = cast(SoftmaxOutput, self.output)
        project = output.project
        if output.scale != 1.0 or output.cap or len(x_BD) > _MOST:
            return output.logits(step.norm(x_BD, self.final, early=self.bold))
        if one:
            return step.multiply(x_BD, project.weight, project.bias, scale=self.final, early=self.bold)
        return product(
            step.norm(x_BD, self.final, early=self.bold), project.weight, project.bias, self.arrived, early=self.bold
        )

    def read(self, tokens_nT: Tensor, ends_n: Tensor, slots_n: Tensor) -> Tensor:
        """Read prompts into their slots, filled up at the end; the scores [n, V] of what follows `ends`.

        Those are places among all tokens, one prompt after another.
        """
        rows, tokens = tokens_nT.shape
        weight, scale = self.embedding.weight, self.embedding.scale
        at_N = self.slots.at_1S[:, :tokens].expand(rows, tokens).reshape(-1)
        x_ND = step.enter(tokens_nT.flatten(), at_N, weight, self.table, self.offset, scale, self.longest)
        for layer in self.layers:
            part, cache = layer.attention, layer.cache
            normed_ND = step.norm(x_ND, layer.before_attention, layer.out.bias)
            packed = F.linear(normed_ND, layer.qkv, layer.qkv_bias)
            heads = part.query.out_features // part.size
            query, key, value = lay(packed, cache.keys, cache.values, slots_n, tokens, heads, layer.turn)
            mixed_nHTE = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=part.scale, enable_gqa=part.grouped
            )
            mixed_ND = mixed_nHTE.transpose(1, 2).reshape(len(x_ND), -1)
            self._leave(layer, x_ND, mixed_ND)
        return cast(SoftmaxOutput, self.output).logits(step.norm(x_ND.index_select(0, ends_n), self.final))

    def reads(self, tokens: int) -> bool:
        """Whether `read` takes prompts of so many tokens: windows must be wider."""
        return all(not layer.cache.window or layer.cache.window >= tokens for layer in self.layers)

    def _single(self, layer: _Layer, x_1D: Tensor) -> None:
        """One row: products are reading weights, and everything else is done on the way."""
        packed = step.multiply(x_1D, layer.qkv, layer.qkv_bias, scale=layer.before_attention, early=self.bold)
        mixed = self._mixed(layer, packed)
        step.multiply(mixed, layer.out.weight, layer.out.bias, residual=x_1D, early=self.bold)
        gated = None if layer.gate is None else (layer.gate.weight, layer.gate.bias)
        hidden = step.multiply(
            x_1D,
            layer.up.weight,
            layer.up.bias,
            scale=layer.before_feedforward,
            activation=layer.activation,
            gated=gated,
            early=self.bold,
        )
        step.multiply(hidden, layer.down.weight, layer.down.bias, residual=x_1D, early=self.bold)

    def _several(self, layer: _Layer, x_BD: Tensor) -> None:
        """Several rows: a norm cannot be part of a product any more, all else can."""
        if len(x_BD) > _MOST:
            normed_BD = step.norm(x_BD, layer.before_attention, layer.out.bias)
            mixed = self._mixed(layer, F.linear(normed_BD, layer.qkv, layer.qkv_bias))
            self._leave(layer, x_BD, mixed)
            return
        normed_BD = step.norm(x_BD, layer.before_attention, early=self.bold)
        mixed = self._mixed(layer, product(normed_BD, layer.qkv, layer.qkv_bias, self.arrived, early=self.bold))
        product(mixed, layer.out.weight, layer.out.bias, self.arrived, residual=x_BD, early=self.bold)
        normed_BD = step.norm(x_BD, layer.before_feedforward, early=self.bold)
        hidden = product(
            normed_BD,
            layer.up.weight,
            layer.up.bias,
            self.arrived,
            activation=layer.activation,
            gated=None if layer.gate is None else (layer.gate.weight, layer.gate.bias),
            early=self.bold,
        )
        product(hidden, layer.down.weight, layer.down.bias, self.arrived, residual=x_BD, early=self.bold)

    def _leave(self, layer: _Layer, x_ND: Tensor, mixed_ND: Tensor) -> None:
        """Many rows from attention on: products go to the library, residuals with them; `out.bias` is in x already."""
        x_ND.addmm_(mixed_ND, layer.out.weight.t())
        normed_ND = step.norm(x_ND, layer.before_feedforward, layer.down.bias)
        if layer.gate is None:
            hidden = ACTIVATIONS[layer.activation](layer.up(normed_ND))
        else:
            hidden = step.gate(layer.gate(normed_ND), layer.up(normed_ND), layer.activation)
        x_ND.addmm_(hidden, layer.down.weight.t())

    def _mixed(self, layer: _Layer, packed: Tensor) -> Tensor:
        cache, part = layer.cache, layer.attention
        heads = part.query.out_features // part.size
        arrived = cast(Tensor, cache.arrived)
        held = (cache.keys, cache.values, self.slots.lengths_B, arrived)
        return mix(packed, *held, heads, part.scale, cache.window, layer.turn, early=self.bold, single=self.bold)


def recognised(model: Transformer) -> bool:
    """Whether `Fused` computes what this model does."""
    decoder, embedding, dtype = model.decoder, model.embedding, model.embedding.weight.dtype
    if decoder is None or model.encoder is not None or embedding.segments is not None or embedding.norm is not None:
        return False
    if dtype == torch.float64 or any(p.dtype != dtype or not p.is_contiguous() for p in model.parameters()):
        return False
    positions = [type(position) for position in decoder.positions]
    known = {Positions, LearnedPositions, SinusoidalPositions, RotaryPositions}
    added = [kind for kind in positions if kind in (LearnedPositions, SinusoidalPositions)]
    if not set(positions) <= known or len(added) > 1 or _scale_of(decoder.final) is None:
        return False
    return type(model.output) is SoftmaxOutput and all(_known(block) for block in decoder.blocks)


def _known(block: nn.Module) -> bool:
    if type(block) is not StandardBlock or block.cross is not None:
        return False
    for around in (block.around_attention, block.around_feedforward):
        if type(around) is not PreConnection or _scale_of(around.norm) is None:
            return False
    part, network = block.attention, block.feedforward
    if not isinstance(network, MlpFeedForward | GluFeedForward) or _name(network) not in step.ACTIVATIONS:
        return False
    if type(part) is not MultiHeadAttention or part.query_norm is not None or part.size != part.value_size:
        return False
    linear = [part.query, part.key, part.value, part.out, network.up, network.down]
    linear += [network.gate] if isinstance(network, GluFeedForward) else []
    share = part.query.out_features // (part.size * part.groups)
    return all(type(one) is Linear for one in linear) and share <= 64 and part.size <= 256


def _layer(block: StandardBlock, cache: LayerCache, turn: Turn | None) -> _Layer:
    part = cast(MultiHeadAttention, block.attention)
    network = cast("MlpFeedForward | GluFeedForward", block.feedforward)
    three = (part.query, part.key, part.value)
    return _Layer(
        before_attention=_scale(cast(PreConnection, block.around_attention).norm),
        qkv=torch.cat([one.weight.detach() for one in three]),
        qkv_bias=None if part.query.bias is None else torch.cat([one.bias.detach() for one in three]),
        out=part.out,
        before_feedforward=_scale(cast(PreConnection, block.around_feedforward).norm),
        up=network.up,
        gate=network.gate if isinstance(network, GluFeedForward) else None,
        down=network.down,
        activation=_name(network),
        attention=part,
        cache=cache,
        turn=turn,
    )


def _name(network: MlpFeedForward | GluFeedForward) -> str:
    return next((name for name, function in ACTIVATIONS.items() if function is network.activation), "")


def _scale_of(norm: nn.Module) -> step.Scale | None:
    if type(norm) is LayerNormed:
        return step.Scale(norm.weight.detach(), None if norm.bias is None else norm.bias.detach(), norm.eps, True)
    return step.Scale(norm.weight.detach(), None, norm.eps, False) if type(norm) is RMSNormed else None


def _scale(norm: nn.Module) -> step.Scale:
    found = _scale_of(norm)
    assert found is not None
    return found


def _turn(position: Positions) -> Turn | None:
    if not isinstance(position, RotaryPositions):
        return None
    return Turn(position.constant, position.strength, position.layout == "interleaved")


def _table(position: nn.Module) -> tuple[Tensor, int] | None:
    if isinstance(position, LearnedPositions):
        return position.table.detach(), position.offset
    return (position.constant, 0) if isinstance(position, SinusoidalPositions) else None
