"""Parameters that nobody has filled: found while a model is built, on every device, the meta device too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trivium.errors import ConfigError

_EMPTY = ("aten::empty", "aten::new_empty")  # how the names of all operators begin that make memory without values
_VIEW = torch.Tag.inplace_view
_POINTWISE, _SEEDED = torch.Tag.pointwise, torch.Tag.nondeterministic_seeded
_IS_META: Any = Tensor.is_meta


class Unwritten:
    """The memory that was made without values, until something writes into it.

    A write into a part of it counts: experts may be filled one after another. What is computed from it has no values
    either.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive: an address stands for one storage only

    def __bool__(self) -> bool:
        return bool(self._storages)

    def __contains__(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        return storage is not None and storage._cdata in self._storages and tensor.numel() > 0

    def add(self, tensor: Tensor) -> None:
        if (storage := _storage(tensor)) is not None:
            self._storages[storage._cdata] = storage

    def remove(self, tensor: Tensor) -> None:
        if (storage := _storage(tensor)) is not None:
            self._storages.pop(storage._cdata, None)

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
                f"model: nobody fills the parameter {empty[0]}{more}; fill it in the constructor of its module, or "
                "declare it as a matrix or a table"
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
        kwargs = kwargs or {}
        if _VIEW in func.tags:  # resize_, set_, t_: another look at memory, perhaps at more of it
            return self._looked(func, args, kwargs)
        result = func(*args, **kwargs)
        if func._schema.name.startswith(_EMPTY):
            self._unwritten.add(result)
        elif func._schema.is_mutable:
            targets = list(_written(func, args, kwargs))
            change = (
                self._unwritten.add if self._reads_unwritten(func, args, kwargs, targets) else self._unwritten.remove
            )
            for tensor in targets:
                change(tensor)
        elif self._unwritten and _depends_on_values(func) and self._reads_unwritten(func, args, kwargs, ()):
            for tensor in _tensors([result]):
                self._unwritten.add(tensor)
        return result

    def _looked(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        storage = _storage(args[0])
        before = 0 if storage is None else storage.nbytes()
        result = func(*args, **kwargs)
        after = _storage(args[0])
        if storage is not None and after is not None and after._cdata == storage._cdata and after.nbytes() > before:
            self._unwritten.add(args[0])
        return result

    def _reads_unwritten(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Tensor]
    ) -> bool:
        """Whether a call reads memory without values; it reads its targets if it is `mul_` or the like."""
        if not self._unwritten:
            return False
        # by its name: torch 2.11 has no tag for operators that write in place
        own = () if _POINTWISE in func.tags and func._schema.name.endswith("_") else targets
        given = _tensors([*args, *kwargs.values()])
        return any(tensor in self._unwritten and not any(tensor is target for target in own) for tensor in given)


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


def _depends_on_values(func: Any) -> bool:
    """Whether the values of a result come from those of the arguments: not of `zeros_like`, `new_ones`, `rand_like`."""
    name = func._schema.name
    return not name.endswith("_like") and not name.startswith("aten::new_") and _SEEDED not in func.tags


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results and in their lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None of a sparse one, whose values are tensors of their own."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None
