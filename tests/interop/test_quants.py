"""The number formats of GGUF against the `gguf` package, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trivium.interop.quants import FORMATS, OTHERS, dequantise, q8_0

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("number", FORMATS)
def test_every_format_is_read_as_the_gguf_package_reads_it(number: int, count: Callable[[int, int], int]) -> None:
    form, kind = FORMATS[number], gguf.GGMLQuantizationType(number)
    assert (form.numbers, form.size) == gguf.GGML_QUANT_SIZES[kind]
    assert form.name == kind.name
    draw = np.random.default_rng(number)
    for round in range(count(3, 200)):
        raw = draw.integers(0, 256, (7, 5 * form.size), dtype=np.uint8)
        if round == 0:
            raw[:] = np.repeat(np.arange(7, dtype=np.uint8)[:, None] * 42, raw.shape[1], axis=1)
        with np.errstate(all="ignore"):
            theirs = gguf.quants.dequantize(raw, kind)
        ours = np.empty(theirs.size, np.float32)
        dequantise(form, raw, ours)
        finite = np.isfinite(theirs).reshape(-1)  # random scales may be NaN, whose bits mean nothing
        assert finite.sum() > theirs.size // 4
        assert np.array_equal(ours.view(np.uint32)[finite], theirs.reshape(-1).view(np.uint32)[finite])
        assert np.array_equal(np.isfinite(ours), finite)


def test_q8_0_is_written_as_the_gguf_package_writes_it() -> None:
    draw = np.random.default_rng(1)
    values = draw.standard_normal((64, 96)).astype(np.float32) * np.exp(draw.uniform(-8, 8, (64, 1))).astype(np.float32)
    values[3, :32] = 0
    values[4, :32] = np.arange(32) - 15.5  # halves, which must be rounded away from zero
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(q8_0(values).reshape(-1), theirs.reshape(-1))


def test_every_type_of_the_gguf_package_has_its_name_here() -> None:
    names = {number: form.name for number, form in FORMATS.items()} | OTHERS
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: names[number] for number in names} == {number: known[number] for number in names}
