"""What is decided by the machine, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trivium.parts import hardware
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


def test_an_unknown_device_has_no_instructions() -> None:
    assert not hardware.native_bf16(torch.device("meta"))


def test_keeping_memory_is_safe_to_ask_for() -> None:
    device.keep_memory(torch.device("cpu"))
    assert torch.zeros(1_000_000).sum() == 0
