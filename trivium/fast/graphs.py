"""Work that a device does without the host waiting for it: captured graphs, and copies on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

Result = TypeVar("Result")


def is_current_gpu(device: torch.device) -> bool:
    """Whether it is the GPU in use: graphs are captured, events recorded and kernels started there and nowhere else."""
    return device.type == "cuda" and (device.index is None or device.index == torch.cuda.current_device())


def differ(found: Tensor, expected: Tensor) -> str:
    """In what two results differ that should be equal up to rounding; nothing if they do not, or are no numbers."""
    # 22 layers of random weights differ by 0.03 in bfloat16, another order of sums is enough; what is wrong, by 1
    close = {torch.float32: 1e-3, torch.bfloat16: 0.1}.get(found.dtype, 0.03)
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    return "" if error < close or not bool(expected.isfinite().all()) else f"results differ by {error:.2g}"


@contextlib.contextmanager
def own_scratch() -> Iterator[None]:
    """Let a graph that is captured meanwhile have the scratch memory of matrix products in its own pool.

    What there is of it belongs to the process, and torch's compiler frees it when it captures graphs of its own: the
    next replay of ours would write to memory that is another's, or nobody's.
    """
    clear: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)  # not in a CPU's torch
    clear()
    try:
        yield
    finally:
        clear()


@final
class Recorder:
    """Graphs that share their memory: they never run at the same time, and the next one may overwrite a result."""

    def __init__(self, bytes: int = 0) -> None:
        self.bytes = bytes  # of that memory, and what was there before
        self._first: torch.cuda.CUDAGraph | None = None  # the memory is there as long as one graph of it is
        self._side: Any = None  # it is used again on the stream it was used on

    def record(
        self, work: Callable[[], Result], *, warm: int = 0, restore: Callable[[], None] = lambda: None
    ) -> tuple[torch.cuda.CUDAGraph, Result]:
        """A graph of `work`; it runs `warm` times before, so that kernels are compiled, and `restore` after each."""
        here = torch.cuda.current_stream()
        side = self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(warm):
                work()
                restore()
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.stream(here),  # a capture that fails may stay on its own stream
            # what autocast keeps of weights would be gone when the graph runs
            torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False),
            own_scratch(),
            torch.cuda.graph(
                graph,
                pool=None if self._first is None else self._first.pool(),
                stream=side,
                capture_error_mode="thread_local",  # another thread may get memory meanwhile
            ),
        ):
            before = torch.cuda.memory_reserved()
            result = work()
            self.bytes += torch.cuda.memory_reserved() - before
        self._first = self._first or graph
        return graph, result


@final
class Graphs:
    """Work on fixed tensors, by a key: the second time it is captured, from then on replayed.

    On a CPU nothing is captured, nor with `on` false.
    """

    def __init__(self, device: torch.device, *, on: bool = True) -> None:
        self._cuda = device.type == "cuda" and on
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._recorder = Recorder()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do it once."""
        graph = self._graphs.get(key)
        if graph is None:
            if not self._cuda or key not in self._seen:  # libraries set themselves up in the first call
                self._seen.add(key)
                work()
                return
            graph, _ = self._recorder.record(work)
            self._graphs[key] = graph
        graph.replay()


class Landing(NamedTuple):
    """Tokens on their way to the host."""

    tokens: Tensor  # [R, B]: the last R steps of B slots
    event: torch.cuda.Event | None

    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[list[int]]:
        """The last R steps' ids of every slot, by the number of the step modulo R."""
        if self.event is not None:
            self.event.synchronize()
        result: list[list[int]] = self.tokens.tolist()
        return result


@final
class Arriving:
    """Tensors on their way to the host; whoever asks for them waits."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: Any = None
        if tensors[0].device.type != "cuda":
            self._tensors = [one.clone() for one in tensors]
            return
        self._tensors = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors]
        for here, there in zip(self._tensors, tensors, strict=True):
            here.copy_(there, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def get(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
