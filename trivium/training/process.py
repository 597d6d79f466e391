"""The process of a run: threads, determinism, allocator and compiler are set up, and restored when the run ends."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from trivium.kernels.hardware import set_allocator, trim_heap
from trivium.training.recipe import Recipe

# Set by the compiler whenever it needs them; the second is a folder beside the runs, if it is not the user's own.
_COMPILERS_OWN = ("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TRITON_CACHE_DIR")
_RECOMPILES = 32  # ragged batches: source and target lengths choose between kernels, validation has its own programs


@contextlib.contextmanager
def process_settings(recipe: Recipe, runs: Path) -> Iterator[None]:
    """Set this process up for a run whose folder is below `runs`; everything is restored at the end or on an error."""
    device = torch.device(recipe.device)
    with ExitStack() as undo:
        _keep_random_state(undo, device)
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(recipe.threads or torch.get_num_threads())
        if device.type == "cuda" and device.index is not None:
            undo.callback(torch.cuda.set_device, torch.cuda.current_device())
        set_current_gpu(device)
        if device.type == "cpu":
            undo.enter_context(keep_freed_memory())
        if recipe.deterministic == "on":
            _be_deterministic(undo)
        if recipe.compile != "off":
            _set_up_compiler(undo, runs)
        yield


def set_current_gpu(device: torch.device) -> None:
    """Make a GPU with an index the current one of this thread: graphs, events and pinned memory depend on it."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Let the C allocator keep freed pages: returning them to the system after every step costs 7 % of a CPU run."""
    set_allocator(keep=True)
    try:
        yield
    finally:
        set_allocator(keep=False)
        trim_heap()


def _keep_random_state(undo: ExitStack, device: torch.device) -> None:
    """Every step seeds torch's global generators; a caller's own random numbers go on where they were."""
    undo.callback(torch.set_rng_state, torch.get_rng_state())
    if device.type == "cuda" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # one seed is that of all GPUs
        undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    if torch.backends.mps.is_available():
        undo.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())


def _be_deterministic(undo: ExitStack) -> None:
    """Let a GPU compute the same bits every time; a CPU does so anyway."""
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)
    _set_variable(undo, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS sums in any order
    torch.use_deterministic_algorithms(True)


def _set_up_compiler(undo: ExitStack, runs: Path) -> None:
    """Keep compiled programs beside the runs, unless the user has chosen another place."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    undo.callback(sys.setrecursionlimit, sys.getrecursionlimit())  # the compiler raises it
    for name in _COMPILERS_OWN:
        undo.callback(_restore_variable, name, os.environ.get(name))
    _set_variable(undo, "TORCHINDUCTOR_CACHE_DIR", str((runs / ".compile").resolve()))
    _set_option(undo, dynamo, "recompile_limit", max(dynamo.recompile_limit, _RECOMPILES))
    _set_option(undo, dynamo, "skip_nnmodule_hook_guards", False)  # a hook that is added later is honoured
    # Otherwise a step with an autograd.Function of ours is differentiated anew in every process. The key contains the
    # graphs of both passes, so another version of the function is another entry.
    if hasattr(functorch, "autograd_cache_allow_custom_autograd_functions"):
        _set_option(undo, functorch, "autograd_cache_allow_custom_autograd_functions", True)


def _set_variable(undo: ExitStack, name: str, value: str) -> None:
    """Set an environment variable that the user has not set, until the end of the run."""
    if name not in os.environ:
        os.environ[name] = value
        undo.callback(os.environ.pop, name, None)


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _set_option(undo: ExitStack, options: Any, name: str, value: Any) -> None:
    undo.callback(setattr, options, name, getattr(options, name))
    setattr(options, name, value)
