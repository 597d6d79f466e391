"""What processes that hold one model together agree on; alone, a process agrees with itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from trivium.errors import CheckpointError
from trivium.parts.sharded import is_sharded, whole

_FAILED = -1  # what the first process broadcasts of an error that is not the system's

Groups = Mapping[str, Mapping[str, Tensor]]


def size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0 on."""
    return dist.get_rank() if size() > 1 else 0


def agreed(flag: Tensor) -> Tensor:
    """Whether a flag on the device is true in every process; the host does not wait."""
    if size() == 1:
        return flag
    least = flag.to(torch.int32)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.to(flag.dtype)


def any_sharded(groups: Groups) -> bool:
    """Whether processes hold one of these tensors together."""
    return any(is_sharded(tensor) for group in groups.values() for tensor in group.values())


def gather_on_first(groups: Groups) -> dict[str, dict[str, Tensor]]:
    """The same tensors, whole and on the CPU, in the first process; none of them in the others, which must ask too.

    An error of the first process alone, such as too little memory, is an error in all of them.
    """
    result: dict[str, dict[str, Tensor]] = {}
    problem: BaseException | None = None
    for name, group in groups.items():
        kept = result[name] = {}
        for key, tensor in group.items():  # one after another: the others have room for one, not for all
            full = whole(tensor)
            if rank() == 0 and problem is None:
                try:
                    kept[key] = full.detach().cpu()
                except BaseException as error:
                    problem = error
                    result.clear()  # and go on: the others wait in `whole`
    first_only(lambda: _raise(problem))
    return result


def _raise(problem: BaseException | None) -> None:
    if problem is not None:
        raise problem


def first_only(work: Callable[[], object]) -> None:
    """Let the first process do something for all while the others wait; what fails there is an error in all of them."""
    problem: BaseException | None = None
    status = torch.zeros((), dtype=torch.int64, device=_device())
    if rank() == 0:
        try:
            work()
        except BaseException as error:
            problem = error
            status.fill_((error.errno or errno.EIO) if isinstance(error, OSError) else _FAILED)
    if size() > 1:
        dist.broadcast(status, 0)
    if problem is not None:
        raise problem
    if (number := int(status)) > 0:
        raise OSError(number, os.strerror(number))
    if number == _FAILED:
        raise CheckpointError("the first process could not write for all of them; its own message says why")


def _device() -> torch.device:
    """The device of the tensors that processes exchange: NCCL reads a GPU's memory only."""
    nccl = size() > 1 and "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
