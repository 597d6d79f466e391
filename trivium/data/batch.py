"""What one forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The model's inputs by name, the labels, and how many labels are real, known without asking the device."""

    inputs: dict[str, Tensor]
    labels: Tensor
    count: int

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`; to a GPU the copy runs beside the computation."""
        device = torch.device(device)
        inputs = {name: _moved(tensor, device) for name, tensor in self.inputs.items()}
        return Batch(inputs=inputs, labels=_moved(self.labels, device), count=self.count)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        # Only pinned memory is copied asynchronously; torch keeps it alive until the copy has run.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
