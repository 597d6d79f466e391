"""Products with packed weights straight from their levels, by a C program that is built where it runs.

Without a C compiler there is none, and the plain way is taken: the same numbers up to rounding, only later. So it is
with the kernels for a GPU, which `narrow` has.
"""

# R rows, P inputs filled up to whole groups, O outputs

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trivium.kernels.hardware import TRITON

# levels, scales, bias, rows [R, P] -> [R, O]; the number of bits is that of the levels
Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]

COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 60  # a compiler that takes longer is as good as none; here it takes about one


@functools.cache
def product() -> Product | None:
    """The product, built at its first use in a process; None where that cannot be."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    for flags in _ways():
        found = built(compiler, flags)
        if found is not None and _right(found):
            return found
    return None


def _ways() -> Iterator[list[str]]:
    """From fast to safe: threads need those of torch's own OpenMP, which is not there everywhere."""
    for processor in ("-march=native", "-mcpu=native"):
        yield [processor, "-fopenmp"]
        yield [processor]


def built(compiler: str, flags: list[str]) -> Product | None:
    """The program, compiled with these flags in a folder that is gone afterwards; None if that fails."""
    try:
        with tempfile.TemporaryDirectory() as folder, as_file(files("trivium.kernels") / "levels.c") as source:
            parts, library = Path(folder) / "levels.o", Path(folder) / "levels.so"
            # linked without -fopenmp: the names are those of the library that torch has loaded, and so are its threads
            for command in (
                [compiler, "-O3", *flags, "-fPIC", "-c", str(source), "-o", str(parts)],
                [compiler, "-shared", str(parts), "-o", str(library)],
            ):
                subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS)
            return _bound(ctypes.CDLL(str(library)))
    except (OSError, subprocess.SubprocessError):  # no folder to write to is one of them
        return None


def _bound(library: ctypes.CDLL) -> Product:
    pointer, long = ctypes.c_void_p, ctypes.c_long
    for function in (library.product8, library.product4):
        function.argtypes = [pointer, long, long, pointer, pointer, pointer, pointer, long, ctypes.c_int]
        function.restype = None

    def multiply(levels: Tensor, scales: Tensor, bias: Tensor | None, x_RP: Tensor) -> Tensor:
        rows, inputs = x_RP.shape
        outputs = levels.shape[0]
        result_RO = torch.empty(rows, outputs)
        (library.product8 if levels.dtype == torch.int8 else library.product4)(
            _start(x_RP, torch.float32),
            rows,
            inputs,
            _start(levels, levels.dtype),
            _start(scales, torch.bfloat16),
            None if bias is None else _start(bias, torch.float32),
            result_RO.data_ptr(),
            outputs,
            torch.get_num_threads(),
        )
        return result_RO

    return multiply


def _start(tensor: Tensor, dtype: torch.dtype) -> int:
    """Where a tensor begins that the program may read from there on."""
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _right(product: Product) -> bool:
    """Whether it computes what it should: a compiler may not know this processor well."""
    return all(torch.equal(product(*sample.packed, None, sample.x), sample.wanted) for sample in _samples())


@functools.cache
def gpu(index: int) -> bool:
    """Whether the kernels of `narrow` are right on this GPU, tried at the first use in a process."""
    if not TRITON:
        return False
    try:
        from trivium.kernels import narrow  # not above: triton is not everywhere

        return all(_right_there(sample, torch.device("cuda", index), narrow.multiply) for sample in _samples())
    except Exception as error:  # whatever a compiler may raise
        warnings.warn(f"8- and 4-bit weights are slow on this GPU: {type(error).__name__}: {error}", stacklevel=2)
        return False


class _Sample(NamedTuple):
    packed: tuple[Tensor, Tensor]
    x: Tensor  # [R, P]
    wanted: Tensor  # [R, O]


def _samples() -> Iterator[_Sample]:
    """A product with 8 and one with 4 bits, of small whole numbers all along: no rounding."""
    x = (torch.arange(5 * 128) % 11 - 5).float().view(5, 128)
    eight = (torch.arange(3 * 128) * 37 % 255 - 127).to(torch.int8).view(3, 128)
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.25], [4.0, 1.0]])
    yield _Sample((eight, scales.bfloat16()), x, x @ (eight.view(3, 2, 64) * scales[..., None]).view(3, 128).T)
    four = (torch.arange(3 * 128) * 7 % 16 - 8).to(torch.int8).view(3, 128)
    halves = torch.cat([scales, scales.flip(1)], dim=1)
    low, high = four.chunk(2, dim=1)
    packed = (high << 4 | low & 15).view(torch.uint8)
    yield _Sample((packed, halves.bfloat16()), x, x @ (four.view(3, 4, 32) * halves[..., None]).view(3, 128).T)


def _right_there(sample: _Sample, device: torch.device, multiply: Callable[..., Tensor]) -> bool:
    """One row and several have kernels of their own."""
    levels, scales = (tensor.to(device) for tensor in sample.packed)
    x_RP = sample.x.to(device, torch.bfloat16)
    found = (multiply(x_RP[:rows], (levels, scales), None).cpu() for rows in (1, len(x_RP)))
    return all(torch.equal(some, sample.wanted[: len(some)].bfloat16()) for some in found)
