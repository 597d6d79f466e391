"""Tensors that processes hold together, each a shard of them (DTensor); other tensors are whole everywhere."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> TypeGuard[Any]:
    """Whether processes hold this tensor together."""
    return hasattr(tensor, "full_tensor")  # not isinstance: the import of DTensor takes 0.4 s


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards, which every process then has; each of them must ask. Others as they are."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def own_shard(tensor: Tensor) -> Tensor:
    """The shard of this process, in the same memory; for arithmetic that takes every element by itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def fill(target: Tensor, source: Tensor) -> None:
    """Copy the values of a tensor into another, sharded or not; of a whole one each process takes its shard."""
    if is_sharded(target) and not is_sharded(source):
        from torch.distributed.tensor import distribute_tensor

        here = source.to(target.device)
        # no source rank: every process has read the same file, and none waits for another
        source = distribute_tensor(here, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(source if is_sharded(target) else whole(source))
