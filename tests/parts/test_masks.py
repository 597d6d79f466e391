"""Masks against the worked rows of the spec and against the definition, pair by pair."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.parts.masks import Mask, ScoreMask

CPU = torch.device("cpu")


def rows(mask: Mask, queries: int, keys: int) -> list[str]:
    dense = mask.dense(queries, keys, CPU)
    assert dense is not None
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
    dense = mask.dense(queries, keys, CPU)
    if dense is None:
        assert not causal
        assert real is None
        assert documents is None
        return
    dense = dense.expand(1, 1, queries, keys)
    for query in range(queries):
        i = keys - queries + query
        for j in range(keys):
            allowed = not causal or j <= i
            allowed = allowed and (real is None or real[j])
            allowed = allowed and (documents is None or (documents[i] == documents[j] and documents[i] > 0))
            assert dense[0, 0, query, j].item() == allowed


def test_the_prefix_mask_is_the_worked_one() -> None:
    mask = Mask(causal=True, prefix=torch.tensor([3]))
    assert rows(mask, 5, 5) == ["11100", "11100", "11100", "11110", "11111"]


def test_each_row_has_a_prefix_of_its_own() -> None:
    dense = Mask(causal=True, prefix=torch.tensor([0, 4])).dense(4, 4, CPU)
    assert dense is not None
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
    dense = ScoreMask(Mask(causal=True), 2, 2, CPU, bias).dense()
    assert dense is not None
    expected = bias.clone()
    expected[..., 0, 1] = float("-inf")
    assert torch.equal(dense, expected)
    assert ScoreMask(Mask(), 2, 2, CPU, bias).dense() is bias
    assert ScoreMask(Mask(), 2, 2, CPU).dense() is None
