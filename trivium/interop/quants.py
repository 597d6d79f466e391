"""The number formats of GGUF tensors: their blocks as float32, and float32 as some of them."""

# N blocks, B bytes of a block, E numbers of a block

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Format(NamedTuple):
    """Every `numbers` numbers of a row are `size` bytes."""

    name: str
    numbers: int
    size: int
    read: Callable[[Bytes], Floats]  # [N, B] bytes to [N, E] numbers

    def bytes(self, count: int) -> int:
        """How many bytes hold so many numbers."""
        return count // self.numbers * self.size


def dequantise(format: Format, raw: Bytes, into: Floats) -> None:
    """Fill the flat `into` with the numbers that `raw` stands for."""
    raw_NB = np.ascontiguousarray(raw.reshape(-1, format.size))
    with np.errstate(all="ignore"):  # a damaged scale may be infinite: so are its numbers, and that is no warning
        into.reshape(-1, format.numbers)[:] = format.read(raw_NB)


def q8_0(values: Floats) -> Bytes:
    """Numbers, a multiple of 32 of them, as Q8_0: each 32 in steps of their largest / 127."""
    values_NE = values.reshape(-1, 32)
    scale_N1 = np.abs(values_NE).max(axis=1, keepdims=True) / np.float32(127)
    inverse_N1 = np.divide(1, scale_N1, out=np.zeros_like(scale_N1), where=scale_N1 != 0)
    steps_NE = values_NE * inverse_N1
    # half away from zero, as C's roundf; numpy would round to even
    whole_NE = np.trunc(steps_NE + np.copysign(np.float32(0.5), steps_NE)).astype(np.int8)
    return np.concatenate([scale_N1.astype(np.float16).view(np.uint8), whole_NE.view(np.uint8)], axis=1)


def _half(raw_NB: Bytes, start: int) -> Floats:
    """The float16 at a byte of every block, [N, 1]."""
    return np.ascontiguousarray(raw_NB[:, start : start + 2]).view(np.float16).astype(np.float32)


def _shifted(raw: Bytes, shifts: tuple[int, ...], mask: int, width: int) -> Bytes:
    """Each run of `width` bytes once for every shift, masked: low bits of the whole run first."""
    runs = raw.reshape(len(raw), -1, 1, width) >> np.array(shifts, np.uint8)[:, None]
    result: Bytes = (runs & np.uint8(mask)).reshape(len(raw), -1)
    return result


def _f32(raw_NB: Bytes) -> Floats:
    return raw_NB.view(np.float32)


def _f16(raw_NB: Bytes) -> Floats:
    return raw_NB.view(np.float16).astype(np.float32)


def _bf16(raw_NB: Bytes) -> Floats:
    return (raw_NB.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q8_0(raw_NB: Bytes) -> Floats:
    return raw_NB[:, 2:].view(np.int8).astype(np.float32) * _half(raw_NB, 0)


def _q4_0(raw_NB: Bytes) -> Floats:
    steps_NE = _shifted(raw_NB[:, 2:], (0, 4), 15, 16).astype(np.float32) - np.float32(8)
    return _half(raw_NB, 0) * steps_NE


def _q4_1(raw_NB: Bytes) -> Floats:
    return _half(raw_NB, 0) * _shifted(raw_NB[:, 4:], (0, 4), 15, 16).astype(np.float32) + _half(raw_NB, 2)


def _q4_k(raw_NB: Bytes) -> Floats:
    """Eight groups of 32: 4 bits each, a 6-bit scale and a 6-bit minimum per group, two float16 over all."""
    low, mid, high = (raw_NB[:, start : start + 4] for start in (4, 8, 12))
    scale_N8 = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1).astype(np.float32)
    least_N8 = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1).astype(np.float32)
    steps = _shifted(raw_NB[:, 16:], (0, 4), 15, 32).reshape(-1, 8, 32).astype(np.float32)
    scale, least = _half(raw_NB, 0) * scale_N8, _half(raw_NB, 2) * least_N8
    return (scale[..., None] * steps - least[..., None]).reshape(-1, 256)


def _q6_k(raw_NB: Bytes) -> Floats:
    """Sixteen groups of 16: 4 low bits and 2 high bits each, an 8-bit scale per group, a float16 over all."""
    low = _shifted(raw_NB[:, :128], (0, 4), 15, 64)
    high = _shifted(raw_NB[:, 128:192], (0, 2, 4, 6), 3, 32)
    steps = (low | (high << 4)).reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    scale = _half(raw_NB, 208) * raw_NB[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[..., None] * steps).reshape(-1, 256)


# By the number that a GGUF file gives the type.
FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4, _f32),
    1: Format("F16", 1, 2, _f16),
    2: Format("Q4_0", 32, 18, _q4_0),
    3: Format("Q4_1", 32, 20, _q4_1),
    8: Format("Q8_0", 32, 34, _q8_0),
    12: Format("Q4_K", 256, 144, _q4_k),
    14: Format("Q6_K", 256, 210, _q6_k),
    30: Format("BF16", 1, 2, _bf16),
}

# Types that exist and are not read here, so that a refusal can name them.
OTHERS: dict[int, str] = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
