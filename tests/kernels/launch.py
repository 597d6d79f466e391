"""Where Triton's kernels are tested: on a GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

from trivium.kernels import fp8
from trivium.kernels.hardware import INTERPRETED, TRITON

GPU = torch.cuda.is_available()
TRITON_VERSION = tuple(map(int, version("triton").split(".")[:2])) if TRITON else (0, 0)
DEVICE = "cuda" if GPU else "cpu"

needs_triton = pytest.mark.skipif(
    not (TRITON and (GPU or INTERPRETED)), reason="needs Triton, and a GPU or its interpreter"
)
needs_gpu = pytest.mark.skipif(not (TRITON and GPU), reason="needs a GPU and Triton")
needs_fp8 = pytest.mark.skipif(
    not (TRITON and GPU and fp8.available(torch.device("cuda"))),
    reason="needs a GPU with products in float8, and Triton",
)


def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch few programs in Triton's interpreter: it is slow, and one then walks over several parts of a tensor."""
    if not INTERPRETED:
        return
    from trivium.kernels import bend, parted, postnorm, rounding

    monkeypatch.setattr(bend, "BACKWARD", bend.BACKWARD._replace(programs=6))
    monkeypatch.setattr(parted, "LAUNCH", parted.Launch(tokens=16, columns=32, parts=3))
    monkeypatch.setattr(postnorm, "LAUNCH", postnorm.Launch(numbers=4096, parts=3))
    monkeypatch.setattr(rounding, "PROCESSORS", 1)
