"""Banks that nobody uses at the moment, kept with their model: captured graphs are worth keeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import cast

import torch

from trivium.fast.hooks import fingerprint
from trivium.generation.sizes import bucket, close
from trivium.generation.slots import Bank
from trivium.models.stack import PlainStack
from trivium.models.transformer import Transformer

_LEAST = 128  # tokens of a row
_WORTH = 1 << 26  # bytes that a closer size must save: every size has graphs and kernels of its own
_BANKS = 4  # kept for each model, the latest used
_BYTES = 1 << 28  # that they may take together on the CPU; on a GPU an eighth of its memory, if as much is free


class Banks:
    """Those of one model, one for every power of two that its rows' tokens may come to.

    The first is only as large as was asked for; if that proves too small, it has the power of two. So texts of varying
    length, one after another, need two sets of graphs for each at most.
    """

    def __init__(self) -> None:
        self._free: OrderedDict[Hashable, Bank] = OrderedDict()

    def __reduce__(self) -> tuple[type[Banks], tuple[()]]:
        return Banks, ()  # a copied model has other weights, graphs do not follow

    def take(self, model: Transformer, slots: int, longest: int, source: int) -> Bank:
        """A bank with room for that, an old one if its graphs still read the model's weights."""
        whole = _whole(model, longest)
        key = _key(model, slots, whole, source)
        bank = self._free.pop(key, None)
        if bank is not None and bank.longest >= longest:
            bank.refresh()
            return bank
        size = capacity(model, slots, longest) if bank is None else whole
        bank = None  # before the new one is made: only one is in memory
        bank = Bank(model, slots, size, source)
        bank.key = key
        return bank

    def give(self, bank: Bank) -> None:
        """Nobody uses it any more, and no step of it was interrupted; the longest unused are forgotten."""
        bank.leave(range(len(bank.last_B)))
        other = self._free.pop(bank.key, bank)  # two were in use at a time
        self._free[bank.key] = max(bank, other, key=lambda one: one.longest)
        most = _BYTES
        if bank.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(bank.device)
            most = min(free, total // 8)  # a training run needs its memory for itself
        while len(self._free) > _BANKS or sum(kept.bytes for kept in self._free.values()) > most:
            self._free.popitem(last=False)


def banks_of(model: Transformer) -> Banks:
    """Those of this model; they live and die with it."""
    found: Banks = model.__dict__.setdefault("banks", Banks())
    return found


def capacity(model: Transformer, slots: int, longest: int) -> int:
    """The tokens that each of `slots` rows is given room for if it needs `longest`.

    A power of two, or in steps of an eighth of that, at least 128, where that saves much memory.
    """
    whole = _whole(model, longest)
    near = min(max(_LEAST, close(longest, _LEAST)), whole)
    shapes = cast(PlainStack, model.decoder).cache_shapes
    token = sum(shape.heads * (shape.key + shape.value) for shape in shapes) * model.embedding.weight.element_size()
    return near if (whole - near) * slots * token >= _WORTH else whole


def _whole(model: Transformer, longest: int) -> int:
    return min(bucket(longest, _LEAST), model.config.context)


def _key(model: Transformer, slots: int, longest: int, source: int) -> Hashable:
    """What a captured graph depends on: the sizes, autocast, the modules, and where the weights lie and their dtype."""
    places = tuple((tensor.data_ptr(), tensor.dtype) for tensor in (*model.parameters(), *model.buffers()))
    kind = model.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (slots, longest, source, autocast, fingerprint(model), places)
