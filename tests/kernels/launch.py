"""Where Triton's kernels are tested: on a GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch

from trivium.kernels import fp8
from trivium.kernels.hardware import INTERPRETED, TRITON

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

needs_triton = pytest.mark.skipif(
    not (TRITON and (GPU or INTERPRETED)), reason="needs Triton, and a GPU or its interpreter"
)
needs_gpu = pytest.mark.skipif(not (TRITON and GPU), reason="needs a GPU and Triton")
needs_fp8 = pytest.mark.skipif(
    not (TRITON and GPU and fp8.available(torch.device("cuda"))),
    reason="needs a GPU with products in float8, and Triton",
)
