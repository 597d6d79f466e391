"""What one forward pass takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The model's inputs by name, what the losses compare with, and what their sums are divided by."""

    inputs: dict[str, Tensor]  # keyword arguments of the model
    targets: dict[str, Tensor]  # "labels", and "where" if only some positions are looked at
    # what sums are divided by, on the host; "tokens": the labels that are real; "sequences" is added here
    counts: dict[str, int]
    odd: bool = False  # has a mask for the last row of a text, which other batches of its kind go without

    def __post_init__(self) -> None:
        self.counts.setdefault("sequences", len(next(iter(self.inputs.values()))))

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`; to a GPU the copy runs beside the computation."""
        device = torch.device(device)
        return self._each(lambda tensor: _moved(tensor, device))

    def pinned(self) -> Batch:
        """The same batch in memory that a GPU copies from by itself; getting such memory can take a while."""
        return self._each(_pinned)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        targets = {name: change(tensor) for name, tensor in self.targets.items()}
        return replace(self, inputs=inputs, targets=targets)


def add_counts(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The counts of several batches, by name."""
    found: dict[str, int] = {}
    for counts in several:
        for name, count in counts.items():
            found[name] = found.get(name, 0) + count
    return found


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        # Only pinned memory is copied asynchronously; torch keeps it alive until the copy has run.
        return (tensor if tensor.is_pinned() else _pinned(tensor)).to(device, non_blocking=True)
    return tensor.to(device)


def _pinned(tensor: Tensor) -> Tensor:
    # in one piece: a view with gaps would be put together first, and the host wait for that
    return tensor.contiguous().pin_memory()
