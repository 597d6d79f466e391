"""How much memory the slots of a model take, and when they are used again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation import tiny
from trivium.generation import banks as module
from trivium.generation.banks import Banks, banks_of, capacity
from trivium.generation.continuous import Engine
from trivium.generation.rows import Request
from trivium.generation.sampling import Sampling
from trivium.generation.slots import Bank
from trivium.models.presets import PRESETS
from trivium.models.transformer import Transformer, build
from trivium.parts.cache import LayerCache

CONTEXT = 4096
MODEL = tiny.model("gpt-mini", 61, context=CONTEXT)


def shapes(name: str, vocab: int) -> Transformer:
    """A preset in bfloat16 that has no memory."""
    config = replace(PRESETS[name](), vocab=vocab)
    return build(config, device="meta").bfloat16()


def cached(bank: Bank) -> int:
    layers = [cast(LayerCache, layer) for layer in bank.cache.layers]
    return sum(one.untyped_storage().nbytes() for layer in layers for one in (layer.keys, layer.values))


# layers, key/value heads, their size; the rest is 64 rows of 128 + 256 tokens, two bytes, keys and values
@pytest.mark.parametrize(
    ("name", "vocab", "layers", "heads", "size"), [("gpt2", 50257, 12, 12, 64), ("tinyllama-1.1b", 32000, 22, 4, 64)]
)
def test_the_cache_of_64_rows_of_384_tokens_has_room_for_no_more(
    name: str, vocab: int, layers: int, heads: int, size: int
) -> None:
    model = shapes(name, vocab)
    bank = Bank(model, 64, capacity(model, 64, 128 + 256), 0)
    assert cached(bank) == 64 * 384 * layers * heads * size * 2 * 2
    small = 65 * vocab + 64 * (384 * 16 + 1000)  # ids seen or shut, random numbers, positions, some of each row
    assert bank.bytes - cached(bank) < small


def test_a_running_batch_asks_for_as_many_tokens_as_its_longest_row_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORTH", 0)
    model = tiny.model("gpt-mini", 61, context=CONTEXT)
    for longest, expected in ((300, 384), (384, 384), (200, 256), (400, 512), (300, 512)):
        engine = Engine(model, end=None, slots=2, longest=longest)
        engine.submit(Request(ids=(1, 2), tokens=3, sampling=Sampling(temperature=0), seed=0))
        while engine.busy:
            engine.step()
        assert [*banks_of(model)._free.values()][-1].longest == expected


def test_a_single_short_row_has_a_power_of_two_since_little_is_saved() -> None:
    assert [capacity(shapes("gpt2", 50257), 1, longest) for longest in (1, 128, 129, 384, 513, 1024)] == [
        128, 128, 256, 512, 1024, 1024
    ]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(longest=st.integers(1, CONTEXT), slots=st.integers(1, 64))
def test_no_row_has_too_little_room_and_much_is_never_wasted(longest: int, slots: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WORTH", 0)
        close = capacity(MODEL, slots, longest)
        assert longest <= close <= CONTEXT
        assert close - longest < max(128, longest / 4)
        assert capacity(MODEL, slots, close) == close
        patch.setattr(module, "_WORTH", 1 << 62)
        whole = capacity(MODEL, slots, longest)
        assert close <= whole == max(128, 2 ** (longest - 1).bit_length())


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=12))
def test_texts_of_varying_length_need_two_banks_for_a_power_of_two_at_most(lengths: list[int]) -> None:
    made: list[int] = []
    banks = Banks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WORTH", 0)
        patch.setattr(module, "_BANKS", 99)
        patch.setattr(module, "_BYTES", 1 << 40)

        def make(_: Transformer, slots: int, longest: int, source: int) -> Empty:
            made.append(longest)
            return Empty(longest)

        patch.setattr(module, "Bank", make)
        for longest in lengths * 2:
            bank = banks.take(MODEL, 2, longest, 0)
            whole = max(128, 2 ** (longest - 1).bit_length())
            assert longest <= bank.longest <= whole
            banks.give(bank)
            assert sum(whole // 2 < one.longest <= whole for one in banks._free.values()) <= 1
    powers = [max(128, 2 ** (size - 1).bit_length()) for size in made]
    assert all(powers.count(power) <= 2 for power in powers)
    assert all(made[at] == power for at, power in enumerate(powers) if power in powers[:at])


class Empty:
    """A bank that holds nothing."""

    def __init__(self, longest: int) -> None:
        self.longest, self.last_B, self.device, self.bytes = longest, torch.zeros(2), torch.device("cpu"), 0

    def leave(self, _: object) -> None: ...

    def refresh(self) -> None: ...


def test_a_bank_that_is_too_small_is_gone_before_a_larger_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORTH", 0)
    alive: list[int] = []

    class Counted(Empty):
        def __init__(self, longest: int) -> None:
            super().__init__(longest)
            assert not alive
            alive.append(longest)

        def __del__(self) -> None:
            alive.remove(self.longest)

    monkeypatch.setattr(module, "Bank", lambda _, slots, longest, source: Counted(longest))
    banks = Banks()
    for longest, expected in ((600, 640), (640, 640), (641, 1024), (520, 1024), (1000, 1024)):
        bank = banks.take(MODEL, 2, longest, 0)
        assert bank.longest == expected
        assert alive == [expected]
        banks.give(bank)
        del bank


def test_of_two_banks_in_use_at_a_time_the_larger_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORTH", 0)
    banks = Banks()
    for order in ((0, 1), (1, 0)):
        both = [cast(Any, banks.take(MODEL, 2, longest, 0)) for longest in (600, 1000)]
        for index in order:
            banks.give(both[index])
        assert [bank.longest for bank in banks._free.values()] == [1024]
