"""Banks that nobody uses at the moment, kept with their model: captured graphs are worth keeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch

from trivium.generation.slots import Bank
from trivium.models.transformer import Transformer

_BANKS = 4  # kept for each model, the latest used
_BYTES = 1 << 28  # that they may take together on the CPU; on a GPU an eighth of its memory, if as much is free


class Banks:
    """Those of one model."""

    def __init__(self) -> None:
        self._free: OrderedDict[Hashable, Bank] = OrderedDict()

    def __reduce__(self) -> tuple[type[Banks], tuple[()]]:
        return Banks, ()  # a copied model has other weights, graphs do not follow

    def take(self, model: Transformer, slots: int, longest: int, source: int) -> Bank:
        """A bank with room for that, an old one if its graphs still read the model's weights."""
        key = _key(model, slots, longest, source)
        bank = self._free.pop(key, None)
        if bank is None:
            bank = Bank(model, slots, longest, source)
            bank.key = key
        else:
            bank.refresh()
        return bank

    def give(self, bank: Bank) -> None:
        """Nobody uses it any more, and no step of it was interrupted; the longest unused are forgotten."""
        bank.leave(range(len(bank.last_B)))
        self._free[bank.key] = bank
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


def _key(model: Transformer, slots: int, longest: int, source: int) -> Hashable:
    """What a captured graph depends on: the sizes, autocast, and where the weights lie and of what kind they are."""
    places = tuple((tensor.data_ptr(), tensor.dtype) for tensor in (*model.parameters(), *model.buffers()))
    kind = model.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (slots, longest, source, autocast, places)
