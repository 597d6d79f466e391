"""Logits for ids as they are: what stands beside the ids is checked at the door; many texts are read in batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.generation import tiny
from tests.oracle.copying import enliven
from trivium.errors import RequestError
from trivium.generation import states
from trivium.generation.states import logits_of, read
from trivium.models.transformer import build
from trivium.parts.options.embeddings import TokenEmbeddingOptions

BERT = build(replace(tiny.shrunk("bert-mini", tiny.MASKED.size), embedding=TokenEmbeddingOptions(segments=2))).eval()
enliven(BERT, seed=1, spread=0.5)
T5 = tiny.model("t5-mini", tiny.DENOISING, spread=0.5)
GPT = tiny.model("gpt-mini", tiny.BYTES)
IDS = torch.tensor([[5, 9, 71, 3, 0, 0], [7, 8, 9, 10, 11, 12]])
REAL = [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    "padding", [REAL, torch.tensor(REAL), torch.tensor(REAL).bool(), torch.tensor(REAL, dtype=torch.float32)]
)
def test_padding_may_be_truth_or_zeros_and_ones(padding: Any) -> None:
    """The oracle is each row alone, without its padding."""
    found = logits_of(BERT, IDS, None, segments=None, padding=padding)
    alone = logits_of(BERT, IDS[0, :4], None, segments=None, padding=None)
    torch.testing.assert_close(found[0, :4], alone, atol=1e-5, rtol=1e-5)
    source = logits_of(T5, IDS, [[1, 2], [3, 4]], segments=None, padding=padding)
    torch.testing.assert_close(
        source[0], logits_of(T5, IDS[0, :4], [1, 2], segments=None, padding=None), atol=1e-5, rtol=1e-5
    )


def test_segments_are_read_and_zero_where_none_are_given() -> None:
    zero = logits_of(BERT, IDS, None, segments=torch.zeros_like(IDS), padding=None)
    assert torch.equal(zero, logits_of(BERT, IDS, None, segments=None, padding=None))
    assert not torch.equal(zero, logits_of(BERT, IDS, None, segments=REAL, padding=None))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"padding": [[1, 1, 2]]}, r"padding: give 1 \(or True\) at the real ids and 0 at the padding"),
        ({"padding": [[1, 1, -1]]}, "padding: give 1"),
        ({"padding": [[0.5, 1, 1]]}, "padding: give 1"),
        ({"padding": [[float("nan"), 1, 1]]}, "padding: give 1"),
        ({"padding": [[1, 1]]}, r"padding: its shape must be that of the ids, \[1, 3\]"),
        ({"padding": [[1, 1, 1], [1]]}, "padding: its rows are not equally long"),
        ({"segments": [[0, 1, 2]]}, "segments: give numbers from 0 to 1"),
        ({"segments": [[0, -1, 0]]}, "segments: give numbers from 0 to 1"),
        ({"segments": [0, 1, 0]}, r"segments: its shape must be that of the ids, \[1, 3\]"),
    ],
)
def test_other_numbers_are_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        logits_of(BERT, [[1, 2, 3]], None, **{"segments": None, "padding": None, **given})


ONES = torch.ones(1, 3, dtype=torch.long)
STRANGE: dict[str, Callable[[], Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([1])]),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(1, 3), 1.0, 0, torch.quint8),
    "bits": lambda: ONES.to(torch.uint8).view(torch.bits8),
    "four bits": lambda: torch.empty(1, 3, dtype=torch.uint4),  # type: ignore[attr-defined]
    "sparse": ONES.to_sparse,
    "sparse rows": ONES.to_sparse_csr,
    "float8": lambda: ONES.to(torch.float8_e4m3fn),
    "complex": lambda: ONES.to(torch.complex64),
    "mkldnn": ONES.float().to_mkldnn,
    "meta": lambda: ONES.to("meta"),
    "too large": lambda: torch.tensor([[2**63, 1, 1]], dtype=torch.uint64),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR", "ignore:.*quantize_per")
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("place", ["ids", "target", "padding", "segments"])
def test_tensors_of_every_kind_are_refused_in_a_sentence(kind: str, place: str) -> None:
    given: dict[str, Any] = {"ids": ONES, "target": None, "segments": None, "padding": None, place: STRANGE[kind]()}
    with pytest.raises(RequestError, match=r"^(padding|segments): |^logits takes ids as whole|outside the model's"):
        logits_of(T5 if place == "target" else BERT, given.pop("ids"), given.pop("target"), **given)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int32])
def test_whole_numbers_of_every_size_are_read(dtype: torch.dtype) -> None:
    real = torch.tensor(REAL)
    expected = logits_of(BERT, IDS, None, segments=real, padding=real)
    given = real.to(dtype)
    assert torch.equal(logits_of(BERT, IDS.to(dtype), None, segments=given, padding=given), expected)


def test_a_model_without_segments_says_so() -> None:
    with pytest.raises(RequestError, match="has no segments"):
        logits_of(GPT, [[1, 2, 3]], None, segments=[[0, 1, 5]], padding=None)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    batch=st.integers(1, 5),
    tokens=st.integers(1, 40),
)
def test_every_text_is_read_once_in_batches_that_are_small_enough(lengths: list[int], batch: int, tokens: int) -> None:
    """The oracle is each text alone."""
    rows = [[(7 * number + at) % 90 for at in range(length)] for number, length in enumerate(lengths)]
    found: dict[int, torch.Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "_TOKENS", tokens)
        for part in read(BERT, rows, batch=batch):
            assert len(part.texts) <= batch
            assert len(part.texts) == 1 or part.real.numel() <= tokens
            for place, number in enumerate(part.texts):
                assert number not in found
                assert int(part.real[place].sum()) == lengths[number]
                found[number] = part.hidden[place, part.real[place]]
    assert len(found) == len(rows)
    (alone,) = read(BERT, [rows[-1]])
    torch.testing.assert_close(found[len(rows) - 1], alone.hidden[0], atol=1e-5, rtol=1e-5)
