"""What is decided by the machine, and when."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trivium.errors import ConfigError
from trivium.kernels import hardware
from trivium.training import device, machine
from trivium.training.machine import Gpu, Machine
from trivium.training.recipe import Recipe

Make = Callable[..., Recipe]


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "fp32")])
def test_precision_follows_the_instructions_of_the_machine(
    small: Make, monkeypatch: pytest.MonkeyPatch, native: bool, precision: str
) -> None:
    monkeypatch.setattr(device, "native_bf16", lambda _: native)
    assert device.settle(small(precision="auto")).precision == precision
    assert Machine(bf16=native).settle(small(precision="auto")).precision == precision


def test_what_the_recipe_says_is_obeyed(small: Make) -> None:
    settled = device.settle(small(precision="fp32", compile="off", threads=1))
    assert (settled.precision, settled.compile, settled.threads, settled.device) == ("fp32", "off", 1, "cpu")
    assert device.settle(settled) == settled


def test_a_narrow_stream_goes_with_narrow_products(small: Make) -> None:
    assert device.settle(small(precision="bf16")).residual_dtype == "fp32"  # on a CPU
    assert device.settle(small(precision="bf16", residual_dtype="bf16")).residual_dtype == "bf16"
    said = "residual_dtype: bf16 goes with precision bf16 or fp8, not fp32; try residual_dtype=fp32"
    with pytest.raises(ConfigError, match=said):
        device.settle(small(precision="fp32", residual_dtype="bf16"))


def test_an_unknown_device_has_no_instructions() -> None:
    assert not hardware.native_bf16(torch.device("meta"))


def gpu(*capability: int) -> Machine:
    return Machine(gpus=(Gpu("a GPU", (capability[0], capability[1])),), cores=2)


def test_eight_bits_are_refused_where_there_are_none(small: Make) -> None:
    with pytest.raises(ConfigError, match=r"precision: this device has no fp8 products .* try bf16"):
        device.settle(small(precision="fp8"))
    recipe = small(device="cuda", precision="fp8")
    with pytest.raises(ConfigError, match=r"precision: this device has no fp8 products .* try bf16"):
        gpu(8, 6).settle(recipe)
    for capability in ((8, 9), (9, 0)):
        assert gpu(*capability).settle(recipe).precision == "fp8"


def test_bf16_is_refused_on_a_gpu_without_instructions_for_it(small: Make) -> None:
    assert gpu(7, 5).settle(small(device="cuda", precision="auto")).precision == "fp32"
    with pytest.raises(ConfigError, match=r"precision: this GPU has no bf16 instructions .* try fp16"):
        gpu(7, 5).settle(small(device="cuda", precision="bf16"))
    assert gpu(8, 0).settle(small(device="cuda", precision="auto")).precision == "bf16"


def test_a_gpu_is_used_compiled_and_in_bf16(small: Make) -> None:
    found = gpu(9, 0).settle(small(device="auto", precision="auto", threads=0), threads=2)
    assert (found.device, found.precision, found.residual_dtype, found.compile, found.threads) == (
        "cuda", "bf16", "bf16", "on", 2,
    )  # fmt: skip
    assert gpu(9, 0).settle(small(device="cuda:0")).device == "cuda:0"
    for name, match in (("cuda:1", "only 1 of them"), ("mps", "there is no mps here"), ("cdua", "is not a device")):
        with pytest.raises(ConfigError, match=match):
            gpu(9, 0).settle(small(device=name))


def test_what_is_found_without_torch_is_what_torch_finds() -> None:
    assert machine.this_machine() == device.torch_machine()


def test_instructions_of_a_cpu_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor: 0\nflags\t\t: fpu avx512_bf16 sse\nprocessor: 1\nflags: fpu\n")
    monkeypatch.setattr(machine, "_CPUINFO", path)
    assert machine._flags() == {"fpu", "avx512_bf16", "sse"}
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    assert machine._flags() == set()


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
