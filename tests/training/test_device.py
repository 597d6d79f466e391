"""What is decided by the machine, and when."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from trivium.errors import ConfigError
from trivium.parts import hardware
from trivium.parts.kernels import fp8
from trivium.training import device
from trivium.training.recipe import Recipe

Make = Callable[..., Recipe]


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "fp32")])
def test_precision_follows_the_instructions_of_the_machine(
    small: Make, monkeypatch: pytest.MonkeyPatch, native: bool, precision: str
) -> None:
    monkeypatch.setattr(device, "native_bf16", lambda _: native)
    assert device.settle(small(precision="auto")).precision == precision


def test_what_the_recipe_says_is_obeyed(small: Make) -> None:
    settled = device.settle(small(precision="fp32", compile="off", threads=1))
    assert (settled.precision, settled.compile, settled.threads, settled.device) == ("fp32", "off", 1, "cpu")
    assert device.settle(settled) == settled


def test_a_narrow_stream_goes_with_narrow_products(small: Make) -> None:
    assert device.settle(small(precision="bf16")).stream == "fp32"  # on a CPU
    assert device.settle(small(precision="bf16", stream="bf16")).stream == "bf16"
    with pytest.raises(ConfigError, match=r"stream: bf16 goes with precision bf16 or fp8, not fp32; try stream=fp32"):
        device.settle(small(precision="fp32", stream="bf16"))


def test_an_unknown_device_has_no_instructions() -> None:
    assert not hardware.native_bf16(torch.device("meta"))


def test_eight_bits_are_refused_where_there_are_none(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"precision: this device has no fp8 products .* try bf16"):
        device.settle(small(precision="fp8"))
    for capability, able in (((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert fp8.available(torch.device("cuda")) == able


def test_bf16_is_refused_on_a_gpu_without_instructions_for_it(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert device.settle(small(device="cuda", precision="auto")).precision == "fp32"
    with pytest.raises(ConfigError, match=r"precision: this GPU has no bf16 instructions .* try fp16"):
        device.settle(small(device="cuda", precision="bf16"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert device.settle(small(device="cuda", precision="auto")).precision == "bf16"


def test_graphs_are_refused_without_a_gpu(small: Make) -> None:
    with pytest.raises(ConfigError, match="compile: graphs are recorded on a GPU"):
        device.settle(small(compile="graphs"))


@pytest.mark.parametrize("threads", [100_000, 10**9])
def test_threads_are_bounded_by_the_machine(small: Make, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """So many end in a segmentation fault or an abort of the process."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(ConfigError, match=rf"threads: {threads} is too many for the 2 cores .* set threads=2, or 0"):
        device.settle(small(threads=threads))
    assert device.settle(small(threads=8)).threads == 8
