"""Parameters that nobody has filled: found while a model is built, on every device, the meta device too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trivium.errors import ConfigError

_EMPTY = ("aten::empty", "aten::new_empty")  # how the names of all operators begin that make memory without values
_IS_META: Any = Tensor.is_meta


class Unwritten:
    """The memory that was made without values, until something writes into it.

    A write into a part of it counts: experts may be filled one after another.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive: an address stands for one storage only

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage

    def remove(self, tensor: Tensor) -> None:
        self._storages.pop(tensor.untyped_storage()._cdata, None)

    def refuse_in(self, model: nn.Module) -> None:
        """Refuse a model with a parameter that has no values."""
        empty = [
            f"{name} {list(parameter.shape)}"
            for name, parameter in model.named_parameters()
            if parameter.numel() and parameter.untyped_storage()._cdata in self._storages
        ]
        if empty:
            more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
            raise ConfigError(
                f"model: nobody fills the parameter {empty[0]}{more}; fill it in the constructor of its module, make "
                "it a Linear or name it in `tables`"
            )


@contextmanager
def tracked() -> Iterator[Unwritten]:
    """`with tracked() as unwritten:` knows the memory of all tensors that are made meanwhile."""
    unwritten = Unwritten()
    with _Questions(unwritten), _Writes(unwritten):
        yield unwritten


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: torch need not import its compiler, which takes seconds, to keep out of its way."""
        return False

    def __init__(self, unwritten: Unwritten) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unwritten = unwritten

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.startswith(_EMPTY):
            self._unwritten.add(result)
        elif func._schema.is_mutable:
            for tensor in _written(func, args, kwargs or {}):
                self._unwritten.remove(tensor)
        return result


class _Questions(TorchFunctionMode):
    """Sees `tensor.is_meta`: an initialiser that asks it writes nothing there (`nn.init.orthogonal_`), and counts."""

    def __init__(self, unwritten: Unwritten) -> None:
        super().__init__()
        self._unwritten = unwritten

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if result is True and getattr(func, "__self__", None) is _IS_META:
            self._unwritten.remove(args[0])
        return result


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call has written into, by the operator's schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        for tensor in given if isinstance(given, list | tuple) else [given]:
            if isinstance(tensor, Tensor):
                yield tensor
