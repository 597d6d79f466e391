"""The forms of fast masks: each attends as the plain dense one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.launch import DEVICE, GPU, needs_triton
from tests.parts.drawing import random
from trivium.fast.masks import FastScoreMask
from trivium.parts.cache import SlotMask, Slots
from trivium.parts.masks import Mask, ScoreMask

CPU = torch.device("cpu")
FLASH = 64  # keys from which on a trained bias goes to our kernel


def formed(
    mask: Mask, queries: int, keys: int, bias: Tensor | None = None, *, device: str = "cpu", dropout: bool = False
) -> FastScoreMask:
    return FastScoreMask(mask, torch.empty(2, queries, 8, device=device), keys, bias, dropout=dropout)


def test_the_cheapest_form_is_chosen() -> None:
    for mask, queries, keys, causal in ((Mask(), 3, 5, False), (Mask(causal=True), 4, 4, True)):
        form = formed(mask, queries, keys)
        assert (form.causal, form.flash) == (causal, False)
        assert (form.dense() is None) == (not causal)
    assert formed(Mask(causal=True), 1, 4).dense() is None  # one query sees every key
    assert not formed(Mask(causal=True), 1, 4).causal
    for dense in (
        formed(Mask(causal=True), 2, 4),
        formed(Mask(padding=torch.ones(1, 1, dtype=torch.bool)), 1, 1),
        formed(Mask(causal=True, window=2), 4, 4),
        formed(Mask(causal=True, prefix=torch.tensor([2])), 4, 4),
        formed(Mask(causal=True, documents=torch.tensor([[1, 1, 2, 2]])), 4, 4),
    ):
        assert not dense.causal
        assert dense.dense() is not None
    assert formed(Mask(causal=True, window=4), 4, 4).causal  # it hides nothing more


@settings(max_examples=40, deadline=None)
@given(queries=st.integers(1, 6), more=st.integers(0, 4), causal=st.booleans())
def test_the_cheap_form_attends_as_the_dense_one(queries: int, more: int, causal: bool) -> None:
    keys, generator = queries + more, torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, queries, 4, generator=generator)
    key, value = (torch.randn(1, 2, keys, 4, generator=generator) for _ in range(2))
    mask = Mask(causal=causal)
    cheap = formed(mask, queries, keys)
    hidden = None if cheap.causal else cheap.dense()
    short = F.scaled_dot_product_attention(query, key, value, attn_mask=hidden, is_causal=cheap.causal)
    dense = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.dense(queries, keys, CPU))
    torch.testing.assert_close(short, dense)


def drawn(data: st.DataObject, rows: int, queries: int, keys: int) -> Mask:
    """Any mask."""

    def table(length: int, values: st.SearchStrategy[int]) -> Tensor:
        row = st.lists(values, min_size=length, max_size=length)
        return torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))

    numbers, yes = st.integers(0, 3), st.integers(0, 1)
    documents = table(keys, numbers) if data.draw(st.booleans()) else None
    return Mask(
        causal=data.draw(st.booleans()),
        window=data.draw(st.sampled_from([0, 0, 1, 2, 4, 9])),
        prefix=table(1, numbers)[:, 0] if data.draw(st.booleans()) else None,
        padding=table(keys, yes).bool() if data.draw(st.booleans()) else None,
        documents=documents,
        asking=table(queries + 2, numbers) if documents is not None and data.draw(st.booleans()) else None,
    )


def summed(dense: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """What is added to the scores."""
    if dense is None:
        return torch.zeros(shape)
    if dense.is_floating_point():
        return dense.expand(shape)
    return torch.where(dense, 0.0, -math.inf).expand(shape)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_mask_with_any_bias_hides_and_adds_what_the_plain_one_does(data: st.DataObject) -> None:
    keys = data.draw(st.integers(1, 9))
    queries = data.draw(st.integers(1, keys))
    mask = drawn(data, 2, queries, keys)
    bias = None
    if data.draw(st.booleans()):
        bias = random(data.draw(st.sampled_from([1, 2])), 3, queries, keys)
    found = formed(mask, queries, keys, bias).dense()
    expected = ScoreMask(mask, queries, keys, CPU, bias).dense()
    shape = (2, 3, queries, keys)
    assert torch.equal(summed(found, shape), summed(expected, shape))


@pytest.mark.parametrize("biased", [True, False])
def test_sequences_of_different_lengths_see_what_the_plain_mask_shows(biased: bool) -> None:
    slots = Slots(2, 9, CPU)
    slots.lengths_B.copy_(torch.tensor([3, 6]))
    for mask in (SlotMask(slots=slots), SlotMask(slots=slots, window=2)):
        bias = random(1, 3, 2, 9) if biased else None
        found = FastScoreMask(mask, torch.empty(2, 2, 8), 9, bias).dense()
        expected = ScoreMask(mask, 2, 9, CPU, bias).dense()
        assert found is not None
        assert found.is_floating_point()  # attention would make a sum of it in every layer
        assert torch.equal(summed(found, (2, 3, 2, 9)), summed(expected, (2, 3, 2, 9)))


def test_a_bias_is_added_where_a_key_may_be_seen() -> None:
    bias = torch.arange(8.0).view(1, 2, 2, 2)
    form = formed(Mask(causal=True), 2, 2, bias)
    assert not form.causal
    expected = bias.clone()
    expected[..., 0, 1] = float("-inf")
    dense = form.dense()
    assert dense is not None
    assert torch.equal(dense, expected)
    assert formed(Mask(), 2, 2, bias).dense() is bias


@needs_triton
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("queries", [1, 30, FLASH])
def test_bias_and_padding_kept_apart_for_the_kernel_are_the_same_mask(causal: bool, padded: bool, queries: int) -> None:
    real = (random(2, FLASH) < 0.7).to(DEVICE)
    mask = Mask(causal=causal, padding=real if padded else None)
    bias = random(1, 3, queries, FLASH).to(DEVICE).requires_grad_()
    form = formed(mask, queries, FLASH, bias, device=DEVICE)
    assert form.flash
    assert form.causal == (causal and queries > 1)
    assert form.real is mask.padding
    dense, plain = form.dense(), ScoreMask(mask, queries, FLASH, bias.device, bias).dense()
    assert dense is not None
    assert plain is not None
    assert torch.equal(dense, plain)


@needs_triton
def test_the_targets_of_t5_are_trained_by_our_kernel() -> None:
    """114 of them, causal: there it was measured to be the faster one."""
    bias = torch.randn(1, 2, 114, 114, device=DEVICE, requires_grad=True)
    form = formed(Mask(causal=True), 114, 114, bias, device=DEVICE)
    assert form.bias is bias
    assert form.causal
    assert form.flash


@needs_triton
def test_the_kernel_is_for_a_trained_bias_of_many_keys_without_dropout_in_training() -> None:
    def flash(keys: int = FLASH, rows: int = 1, *, trained: bool = True, dropout: bool = False) -> bool:
        bias = torch.randn(rows, 2, 3, keys, device=DEVICE, requires_grad=trained)
        return formed(Mask(), 3, keys, bias, device=DEVICE, dropout=dropout).flash

    assert flash()
    assert not flash(FLASH - 1)
    assert not flash(trained=False)
    assert not flash(rows=2)  # packed rows have positions of their own
    assert not flash(dropout=True)
    with torch.no_grad():
        assert not flash()
    bias = torch.randn(1, 2, FLASH, FLASH, device=DEVICE, requires_grad=True)
    for mask in (
        Mask(documents=torch.ones(2, FLASH, dtype=torch.long, device=DEVICE)),
        Mask(causal=True, window=3),
        Mask(causal=True, prefix=torch.tensor([2, 3], device=DEVICE)),
    ):
        assert not formed(mask, FLASH, FLASH, bias, device=DEVICE).flash


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_gpu_gets_the_bias_in_the_precision_of_its_products_once_for_all_layers() -> None:
    bias = torch.randn(1, 2, 3, 5, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        form = formed(Mask(), 3, 5, bias, device="cuda")
    dense = form.dense()
    assert dense is not None
    assert dense.dtype == torch.bfloat16
