"""A decoding step by few kernels, for the usual decoders: pre-norm, one linear layer after another, no biases.

It computes what `Transformer.forward` does for one new token of every row; models it does not know are left to that.
"""

# B slots, D width

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.fast.attention import FastAttention
from trivium.fast.block import FastBlock
from trivium.fast.cache import KernelCache
from trivium.fast.feedforward import FastGlu, FastMlp
from trivium.fast.hooks import any_hooks
from trivium.fast.linear import FastLinear
from trivium.fast.norms import FastRMSNorm
from trivium.fast.output import FastSoftmaxOutput
from trivium.fast.positions import FastRotaryPositions
from trivium.fast.quantized import FastQuantizedLinear, FastTiedLinear
from trivium.fast.stack import FastStack
from trivium.kernels import narrow, step
from trivium.kernels.batch import product
from trivium.kernels.decode import Turn, mix
from trivium.kernels.prompt import lay
from trivium.models.transformer import Transformer
from trivium.parts.activations import ACTIVATIONS
from trivium.parts.cache import Cache, Slots
from trivium.parts.embeddings import TokenEmbedding
from trivium.parts.linear import Linear
from trivium.parts.norms import LayerNorm
from trivium.parts.positions import LearnedPositions, Positions, SinusoidalPositions
from trivium.parts.quantized import Packed, QuantizedLinear
from trivium.parts.residual import PreConnection

_MOST = 64  # rows for which our own products are faster than the library's

Matrix = Tensor | Packed


class _Layer(NamedTuple):
    """One block by its weights."""

    before_attention: step.Scale
    qkv: Matrix  # the three matrices one below the other
    qkv_bias: Tensor | None
    copied: bool  # whether these two are copies
    out: Linear | QuantizedLinear
    before_feedforward: step.Scale
    up: Linear | QuantizedLinear
    gate: Linear | QuantizedLinear | None
    down: Linear | QuantizedLinear
    activation: str
    attention: FastAttention
    cache: KernelCache
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
            _layer(cast(FastBlock, block), cast(KernelCache, layer), turns[index])
            for block, layer, index in zip(decoder.blocks, cache.layers, decoder.position_of, strict=True)
        ]
        self.final = _scale(decoder.final)
        # scratch of the products: how many programs of each tile are done
        self.arrived = torch.zeros(1 << 16, dtype=torch.int32, device=last_B.device)
        self.bold = False  # kernels start before the ones in front of them are done (Hopper), heads attend alone

    @property
    def copies(self) -> list[Tensor]:
        """The weights that it holds a second time, and its scratch."""
        layers = [layer for layer in self.layers if layer.copied]
        biases = [layer.qkv_bias for layer in layers if layer.qkv_bias is not None]
        return [self.arrived, *(one for layer in layers for one in _tensors(layer.qkv)), *biases]

    def refresh(self) -> None:
        """Copy again what is copied: the weights may have changed where they lie."""
        copies: list[Tensor] = []
        originals: list[Tensor] = []
        for layer in self.layers:
            if not layer.copied:
                continue
            parts = (layer.attention.query, layer.attention.key, layer.attention.value)
            sizes = [part.out_features for part in parts]
            copies += [one for whole in _tensors(layer.qkv) for one in torch.split(whole, sizes)]
            originals += [
                one.detach() for pair in zip(*map(_tensors, map(_matrix, parts)), strict=True) for one in pair
            ]
            if layer.qkv_bias is not None:
                copies += torch.split(layer.qkv_bias, sizes)
                originals += [part.bias.detach() for part in parts]
        if copies:
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
        output = cast(FastSoftmaxOutput, self.output)
        project = output.project
        if output.scale != 1.0 or output.cap or len(x_BD) > _MOST:
            return output.logits(step.norm(x_BD, self.final, early=self.bold))
        if one:
            return self._times(x_BD, _matrix(project), project.bias, scale=self.final)
        return self._times(step.norm(x_BD, self.final, early=self.bold), _matrix(project), project.bias)

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
            packed = F.linear(normed_ND, _whole(layer.qkv, normed_ND), layer.qkv_bias)
            heads = part.query.out_features // part.size
            query, key, value = lay(packed, cache.keys, cache.values, slots_n, tokens, heads, layer.turn)
            mixed_nHTE = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=part.scale, enable_gqa=part.grouped
            )
            mixed_ND = mixed_nHTE.transpose(1, 2).reshape(len(x_ND), -1)
            del normed_ND, packed, query, key, value  # else they would lie beside the hidden layer
            self._leave(layer, x_ND, mixed_ND)
        return cast(FastSoftmaxOutput, self.output).logits(step.norm(x_ND.index_select(0, ends_n), self.final))

    def reads(self, tokens: int) -> bool:
        """Whether `read` takes prompts of so many tokens: windows must be wider."""
        return all(not layer.cache.window or layer.cache.window >= tokens for layer in self.layers)

    def _single(self, layer: _Layer, x_1D: Tensor) -> None:
        """One row: products are reading weights, and everything else is done on the way."""
        packed = self._times(x_1D, layer.qkv, layer.qkv_bias, scale=layer.before_attention)
        mixed = self._mixed(layer, packed)
        self._times(mixed, _matrix(layer.out), layer.out.bias, residual=x_1D)
        gated = None if layer.gate is None else (_matrix(layer.gate), layer.gate.bias)
        up, how = layer.up, {"scale": layer.before_feedforward, "activation": layer.activation, "gated": gated}
        hidden = self._times(x_1D, _matrix(up), up.bias, **how)
        self._times(hidden, _matrix(layer.down), layer.down.bias, residual=x_1D)

    def _several(self, layer: _Layer, x_BD: Tensor) -> None:
        """Several rows: a norm cannot be part of a product any more, all else can."""
        if len(x_BD) > _MOST:
            normed_BD = step.norm(x_BD, layer.before_attention, layer.out.bias)
            mixed = self._mixed(layer, F.linear(normed_BD, _whole(layer.qkv, normed_BD), layer.qkv_bias))
            self._leave(layer, x_BD, mixed)
            return
        normed_BD = step.norm(x_BD, layer.before_attention, early=self.bold)
        mixed = self._mixed(layer, self._times(normed_BD, layer.qkv, layer.qkv_bias))
        self._times(mixed, _matrix(layer.out), layer.out.bias, residual=x_BD)
        normed_BD = step.norm(x_BD, layer.before_feedforward, early=self.bold)
        gated = None if layer.gate is None else (_matrix(layer.gate), layer.gate.bias)
        hidden = self._times(normed_BD, _matrix(layer.up), layer.up.bias, activation=layer.activation, gated=gated)
        self._times(hidden, _matrix(layer.down), layer.down.bias, residual=x_BD)

    def _times(self, x_BK: Tensor, matrix: Matrix, bias: Tensor | None, **how: Any) -> Tensor:
        """The product of at most `_MOST` rows, by the kernel for them."""
        if isinstance(matrix, Packed):
            return narrow.multiply(x_BK, matrix, bias, arrived=self.arrived, early=self.bold, **how)
        if len(x_BK) == 1:
            return step.multiply(x_BK, matrix, bias, early=self.bold, **how)
        return product(x_BK, matrix, bias, self.arrived, early=self.bold, **how)

    def _leave(self, layer: _Layer, x_ND: Tensor, mixed_ND: Tensor) -> None:
        """Many rows from attention on: products go to the library, residuals with them; `out.bias` is in x already."""
        x_ND.addmm_(mixed_ND, _whole(_matrix(layer.out), mixed_ND).t())
        normed_ND = step.norm(x_ND, layer.before_feedforward, layer.down.bias)
        if layer.gate is None:
            hidden = ACTIVATIONS[layer.activation](layer.up(normed_ND))
        else:
            hidden = step.gate(layer.gate(normed_ND), layer.up(normed_ND), layer.activation)
        x_ND.addmm_(hidden, _whole(_matrix(layer.down), hidden).t())

    def _mixed(self, layer: _Layer, packed: Tensor) -> Tensor:
        cache, part = layer.cache, layer.attention
        heads = part.query.out_features // part.size
        held = (cache.keys, cache.values, self.slots.lengths_B, cache.arrived)
        return mix(packed, *held, heads, part.scale, cache.window, layer.turn, early=self.bold, single=self.bold)


def recognised(model: Transformer) -> bool:
    """Whether `Fused` computes what this model does."""
    decoder, embedding, dtype = model.decoder, model.embedding, model.embedding.weight.dtype
    if decoder is None or model.encoder is not None or embedding.segments is not None or embedding.norm is not None:
        return False
    # wrappers and parametrisations are other classes; weights alone say nothing of them, nor of hooks
    if (type(model), type(decoder), type(embedding)) != (Transformer, FastStack, TokenEmbedding) or any_hooks(model):
        return False
    packed = [part for part in model.modules() if isinstance(part, FastQuantizedLinear)]
    levels = {id(tensor) for part in packed for tensor in (part.levels, part.scales)}
    floats = [parameter for parameter in model.parameters() if id(parameter) not in levels]
    if not all(narrow.fits(_packed(part)) for part in packed):
        return False
    if dtype == torch.float64 or any(p.dtype != dtype or not p.is_contiguous() for p in floats):
        return False
    positions = [type(position) for position in decoder.positions]
    known = {Positions, LearnedPositions, SinusoidalPositions, FastRotaryPositions}
    added = [kind for kind in positions if kind in (LearnedPositions, SinusoidalPositions)]
    if not set(positions) <= known or len(added) > 1 or _scale_of(decoder.final) is None:
        return False
    output = model.output
    if type(output) is not FastSoftmaxOutput:
        return False
    if type(output.project) not in (FastLinear, FastQuantizedLinear, FastTiedLinear):
        return False
    return all(_known(block) for block in decoder.blocks)


def _known(block: nn.Module) -> bool:
    if type(block) is not FastBlock or block.cross is not None:
        return False
    for around in (block.around_attention, block.around_feedforward):
        if type(around) is not PreConnection or _scale_of(around.norm) is None:
            return False
    part, network = block.attention, block.feedforward
    if type(network) is not FastMlp and type(network) is not FastGlu:
        return False
    if _name(network) not in step.ACTIVATIONS:
        return False
    if type(part) is not FastAttention or part.query_norm is not None or part.size != part.value_size:
        return False
    linear = [part.query, part.key, part.value, part.out, network.up, network.down]
    linear += [network.gate] if isinstance(network, FastGlu) else []
    share = part.query.out_features // (part.size * part.groups)
    alike = [linear[:3], [network.up, network.gate] if isinstance(network, FastGlu) else []]
    if any(len({getattr(one, "bits", 0) for one in some}) > 1 for some in alike):
        return False
    return all(type(one) in (FastLinear, FastQuantizedLinear) for one in linear) and share <= 64 and part.size <= 256


def _layer(block: FastBlock, cache: KernelCache, turn: Turn | None) -> _Layer:
    part = cast(FastAttention, block.attention)
    network = cast("FastMlp | FastGlu", block.feedforward)
    three, laid = (part.query, part.key, part.value), part.fused_qkv
    if laid is not None and laid.weight.is_contiguous():
        whole: Matrix = laid.weight
        bias = laid.bias
    else:
        laid, whole = None, _together([_matrix(one) for one in three])
        bias = None if part.query.bias is None else torch.cat([one.bias.detach() for one in three])
    return _Layer(
        before_attention=_scale(cast(PreConnection, block.around_attention).norm),
        qkv=whole,
        qkv_bias=bias,
        copied=laid is None,
        out=part.out,
        before_feedforward=_scale(cast(PreConnection, block.around_feedforward).norm),
        up=network.up,
        gate=network.gate if isinstance(network, FastGlu) else None,
        down=network.down,
        activation=_name(network),
        attention=part,
        cache=cache,
        turn=turn,
    )


def _packed(layer: FastQuantizedLinear) -> Packed:
    return Packed(layer.levels.detach(), layer.scales.detach())


def _matrix(layer: nn.Module) -> Matrix:
    return _packed(layer) if isinstance(layer, FastQuantizedLinear) else cast(Tensor, layer.weight).detach()


def _tensors(matrix: Matrix) -> list[Tensor]:
    return list(matrix) if isinstance(matrix, Packed) else [matrix]


def _together(matrices: Sequence[Matrix]) -> Matrix:
    """One below the other; a scale belongs to one output."""
    whole = [torch.cat(parts) for parts in zip(*map(_tensors, matrices), strict=True)]
    return whole[0] if len(whole) == 1 else Packed(*whole)


def _whole(matrix: Matrix, x_NK: Tensor) -> Tensor:
    """The matrix for a product with many rows."""
    return narrow.whole(matrix, x_NK.shape[1], x_NK.dtype) if isinstance(matrix, Packed) else matrix


def _name(network: FastMlp | FastGlu) -> str:
    return next((name for name, function in ACTIVATIONS.items() if function is network.activation), "")


def _scale_of(norm: nn.Module) -> step.Scale | None:
    if type(norm) is LayerNorm:
        return step.Scale(norm.weight.detach(), None if norm.bias is None else norm.bias.detach(), norm.eps, True)
    return step.Scale(norm.weight.detach(), None, norm.eps, False) if type(norm) is FastRMSNorm else None


def _scale(norm: nn.Module) -> step.Scale:
    found = _scale_of(norm)
    assert found is not None
    return found


def _turn(position: Positions) -> Turn | None:
    if not isinstance(position, FastRotaryPositions):
        return None
    return Turn(position.constant, position.strength, position.layout == "interleaved")


def _table(position: nn.Module) -> tuple[Tensor, int] | None:
    if isinstance(position, LearnedPositions):
        return position.table.detach(), position.offset
    return (position.constant, 0) if isinstance(position, SinusoidalPositions) else None
