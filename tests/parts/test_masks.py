"""Masks against the worked rows of the spec and against the definition, pair by pair."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.parts.masks import FLASH, Mask, Resolved

CPU = torch.device("cpu")


def rows(mask: Mask, queries: int, keys: int) -> list[str]:
    dense = mask.dense(queries, keys, CPU)
    assert dense.dtype == torch.bool
    return ["".join(str(int(cell)) for cell in row) for row in dense[0, 0].tolist()]


def test_the_packed_causal_mask_is_the_worked_one() -> None:
    mask = Mask(causal=True, documents=torch.tensor([[1, 1, 1, 2, 2, 0]]))
    assert rows(mask, 6, 6) == ["100000", "110000", "111000", "000100", "000110", "000000"]


def test_the_triangle_is_aligned_to_the_last_key() -> None:
    assert rows(Mask(causal=True), 2, 5) == ["11110", "11111"]
    assert rows(Mask(causal=True), 3, 3) == ["100", "110", "111"]


def test_padding_hides_keys_and_combines_with_the_rest() -> None:
    padding = torch.tensor([[False, True, True, True]])
    assert rows(Mask(padding=padding), 4, 4) == ["0111"] * 4
    assert rows(Mask(causal=True, padding=padding), 4, 4) == ["0000", "0100", "0110", "0111"]
    documents = torch.tensor([[1, 1, 2, 2]])
    assert rows(Mask(causal=True, padding=padding, documents=documents), 4, 4) == ["0000", "0100", "0010", "0011"]


def test_a_target_sees_the_source_of_its_own_number() -> None:
    sources, targets = torch.tensor([[1, 1, 2, 2, 2, 0]]), torch.tensor([[1, 2, 2, 0]])
    mask = Mask(documents=sources, asking=targets)
    assert rows(mask, 4, 6) == ["110000", "001110", "001110", "000000"]
    assert rows(mask, 2, 6) == ["001110", "000000"]  # the last two of four
    real = torch.tensor([[True, False, True, True, False, False]])
    assert rows(Mask(documents=sources, asking=targets, padding=real), 4, 6)[:2] == ["100000", "001100"]


def test_the_cheapest_form_is_chosen() -> None:
    assert Mask().resolve(3, 5, CPU) == Resolved(None, False)
    assert Mask(causal=True).resolve(4, 4, CPU) == Resolved(None, True)
    assert Mask(causal=True).resolve(1, 4, CPU) == Resolved(None, False)
    assert Mask(causal=True).resolve(2, 4, CPU).dense is not None
    assert Mask(padding=torch.ones(1, 1, dtype=torch.bool)).resolve(1, 1, CPU).dense is not None


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_mask_is_the_conjunction_of_its_conditions(data: st.DataObject) -> None:
    keys = data.draw(st.integers(1, 7))
    queries = data.draw(st.integers(1, keys))
    causal = data.draw(st.booleans())
    real = data.draw(st.none() | st.lists(st.booleans(), min_size=keys, max_size=keys))
    documents = data.draw(st.none() | st.lists(st.integers(0, 2), min_size=keys, max_size=keys))
    mask = Mask(
        causal=causal,
        padding=None if real is None else torch.tensor([real]),
        documents=None if documents is None else torch.tensor([documents]),
    )
    dense = mask.dense(queries, keys, CPU).expand(1, 1, queries, keys)
    for query in range(queries):
        i = keys - queries + query
        for j in range(keys):
            allowed = not causal or j <= i
            allowed = allowed and (real is None or real[j])
            allowed = allowed and (documents is None or (documents[i] == documents[j] and documents[i] > 0))
            assert dense[0, 0, query, j].item() == allowed


@settings(max_examples=40, deadline=None)
@given(queries=st.integers(1, 6), more=st.integers(0, 4), causal=st.booleans())
def test_the_cheap_form_attends_as_the_dense_one(queries: int, more: int, causal: bool) -> None:
    keys, generator = queries + more, torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, queries, 4, generator=generator)
    key, value = (torch.randn(1, 2, keys, 4, generator=generator) for _ in range(2))
    mask = Mask(causal=causal)
    cheap = mask.resolve(queries, keys, CPU)
    short = F.scaled_dot_product_attention(query, key, value, attn_mask=cheap.dense, is_causal=cheap.is_causal)
    dense = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.dense(queries, keys, CPU))
    torch.testing.assert_close(short, dense)


def test_the_prefix_mask_is_the_worked_one() -> None:
    mask = Mask(causal=True, prefix=torch.tensor([3]))
    assert rows(mask, 5, 5) == ["11100", "11100", "11100", "11110", "11111"]


def test_each_row_has_a_prefix_of_its_own() -> None:
    dense = Mask(causal=True, prefix=torch.tensor([0, 4])).dense(4, 4, torch.device("cpu"))
    assert torch.equal(dense[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())
    assert bool(dense[1].all())


def test_a_window_counts_the_token_itself() -> None:
    """Mistral: query i sees keys j with i - w < j <= i; an encoder's window reaches as far to either side."""
    assert rows(Mask(causal=True, window=2), 4, 4) == ["1000", "1100", "0110", "0011"]
    assert rows(Mask(window=2), 4, 4) == ["1100", "1110", "0111", "0011"]
    assert rows(Mask(causal=True, window=2), 1, 4) == ["0011"]  # the last of four, with a cache
    assert Mask(causal=True).within(0) == Mask(causal=True)


def test_a_bias_is_added_where_a_key_may_be_seen() -> None:
    bias = torch.arange(8.0).view(1, 2, 2, 2)
    resolved = Mask(causal=True).resolve(2, 2, torch.device("cpu"), bias)
    assert resolved.dense is not None
    assert not resolved.is_causal
    expected = bias.clone()
    expected[..., 0, 1] = float("-inf")
    assert torch.equal(resolved.dense, expected)
    assert Mask().resolve(2, 2, torch.device("cpu"), bias).dense is bias


def drawn(data: st.DataObject, rows: int, queries: int, keys: int) -> Mask:
    """Any mask."""

    def table(length: int, values: st.SearchStrategy[int]) -> torch.Tensor:
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


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bias_and_padding_kept_apart_for_a_gpu_are_the_same_mask(data: st.DataObject) -> None:
    keys = FLASH + data.draw(st.integers(0, 6))
    queries = data.draw(st.integers(1, keys))
    real = torch.rand(2, keys, generator=torch.Generator().manual_seed(keys)) < 0.7
    mask = Mask(causal=data.draw(st.booleans()), padding=real if data.draw(st.booleans()) else None)
    bias = torch.randn(1, 3, queries, keys, requires_grad=True)
    apart = mask.resolve(queries, keys, torch.device("cuda"), bias, torch.bfloat16)
    assert apart.dense is None
    assert apart.bias is not None
    assert apart.bias.dtype == torch.bfloat16
    one = apart.together(queries, keys, CPU)
    two = mask.resolve(queries, keys, CPU, bias.bfloat16())
    assert one.dense is not None
    assert two.dense is not None
    assert not one.is_causal
    assert torch.equal(one.dense, two.dense)


def test_a_gpu_trains_the_targets_of_t5_by_our_kernel() -> None:
    """114 of them, causal: there it was measured to be the faster one."""
    bias = torch.randn(1, 2, 114, 114, requires_grad=True)
    apart = Mask(causal=True).resolve(114, 114, torch.device("cuda"), bias, torch.float32)
    assert apart.bias is bias
    assert apart.is_causal
    assert apart.dense is None


def test_a_constant_bias_and_a_short_one_go_to_sdpa_on_a_gpu_too() -> None:
    gpu = torch.device("cuda")
    for keys, trained in ((FLASH - 1, True), (FLASH, False)):
        bias = torch.randn(1, 2, 3, keys, requires_grad=trained)
        assert Mask().resolve(3, keys, gpu, bias, torch.float32).dense is bias


def test_a_gpu_gets_its_own_forms_only_in_training() -> None:
    gpu, bias = torch.device("cuda"), torch.randn(1, 2, 3, 3)
    with torch.no_grad():
        assert Mask().resolve(3, 3, gpu, bias, torch.float32).dense is bias
    assert Mask(causal=True).resolve(3, 3, gpu) == Resolved(None, True)
    own = torch.randn(4, 2, 3, 3)  # packed rows have positions of their own
    assert Mask().resolve(3, 3, gpu, own, torch.float32).dense is own
