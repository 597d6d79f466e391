"""Sampling against transformers' processors, closed forms and counted draws."""

# B rows, V vocabulary

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trivium.errors import RequestError
from trivium.generation import sampling as module
from trivium.generation.sampling import (
    Sampling,
    Uniforms,
    by_kernel,
    distribution,
    draw,
    heat,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise,
)

# derandomised: where two libraries round apart by one bit, a random example in a thousand runs would find it
PLENTY = settings(max_examples=40, deadline=None, derandomize=True)


def random_logits(seed: int, rows: int = 4, vocab: int = 50) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def theirs(processor: Any, logits: Tensor) -> Tensor:
    """What a processor of transformers that looks at no ids makes of the logits."""
    result: Tensor = processor(None, logits)
    return result


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """The probability of a fit at least this bad (Pearson); rare tokens pooled into one cell."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    observed = torch.cat((counts[~rare], counts[rare].sum()[None])).double()
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
    cells = wanted > 0
    statistic = ((observed - wanted)[cells] ** 2 / wanted[cells]).sum()
    return float(torch.special.gammaincc((cells.sum() - 1).double() / 2, statistic / 2))


@PLENTY
@given(st.integers(0, 10_000), st.integers(1, 60))
def test_top_k_is_that_of_transformers(seed: int, k: int) -> None:
    logits = random_logits(seed)
    torch.testing.assert_close(keep_top_k(logits, k), theirs(TopKLogitsWarper(k), logits), rtol=0, atol=0)


@PLENTY
@given(st.integers(0, 10_000), st.floats(0.01, 0.999))
def test_top_p_is_that_of_transformers(seed: int, p: float) -> None:
    logits = random_logits(seed)
    torch.testing.assert_close(keep_top_p(logits, p), theirs(TopPLogitsWarper(p), logits), rtol=0, atol=0)


@PLENTY
@given(st.integers(0, 10_000), st.floats(0.001, 1.0))
def test_min_p_is_that_of_transformers(seed: int, p: float) -> None:
    logits = random_logits(seed)
    torch.testing.assert_close(keep_min_p(logits, p), theirs(MinPLogitsWarper(p), logits), rtol=0, atol=0)


@PLENTY
@given(st.integers(0, 10_000), st.floats(0.2, 5.0))
def test_the_repetition_penalty_is_that_of_transformers(seed: int, penalty: float) -> None:
    logits = random_logits(seed)
    ids = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter(1, ids, True)
    processor: Any = RepetitionPenaltyLogitsProcessor(penalty)
    torch.testing.assert_close(penalise(logits, seen, penalty), processor(ids, logits.clone()))


@PLENTY
@given(st.integers(0, 10_000), st.floats(0.01, 100.0))
def test_the_temperature_is_that_of_transformers_with_the_highest_logit_at_0(seed: int, temperature: float) -> None:
    logits = random_logits(seed) + 100
    expected = theirs(TemperatureLogitsWarper(temperature), logits - logits.max(-1, keepdim=True).values)
    torch.testing.assert_close(heat(logits, temperature), expected)


@PLENTY
@given(st.integers(0, 10_000))
def test_the_whole_chain_is_that_of_transformers_in_its_order(seed: int) -> None:
    logits = random_logits(seed)
    ids = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter(1, ids, True)
    chain: list[Any] = [
        RepetitionPenaltyLogitsProcessor(1.3),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.03),
    ]
    expected = logits.clone()
    for step in chain:
        expected = step(ids, expected)
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.03, repetition_penalty=1.3)
    torch.testing.assert_close(distribution(logits, seen, sampling), expected.softmax(-1))


def test_top_p_keeps_the_token_that_crosses_and_no_more() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    kept = [(keep_top_p(logits, p) > -math.inf).tolist()[0] for p in (0.01, 0.49, 0.6, 0.76, 0.95)]
    assert kept == [
        [False, True, False, False],
        [False, True, False, False],
        [False, True, False, True],
        [False, True, True, True],
        [True, True, True, True],
    ]


@pytest.mark.parametrize("ids", [2, 4, 8, 32])
def test_top_p_stops_at_a_mass_that_is_reached_exactly(ids: int) -> None:
    """Equal logits, whose probabilities and sums are powers of two: n of them have the mass n / ids, and no more stay.

    The count is that of transformers. Of equal tokens those with the lowest ids stay, on every device.
    """
    logits = torch.zeros(1, ids)
    for kept in range(1, ids):
        expected = [0.0] * kept + [-math.inf] * (ids - kept)
        assert keep_top_p(logits, kept / ids).tolist() == [expected]
        assert int((theirs(TopPLogitsWarper(kept / ids), logits) == 0).sum()) == kept


def test_top_p_keeps_the_whole_tail_at_1_and_the_likeliest_token_at_the_least_p() -> None:
    """In float32 the first token has all the mass here, and the least p is 0."""
    logits = torch.tensor([[-200.0, 0.0, -100.0]])
    assert keep_top_p(logits, 1.0).equal(logits)
    assert keep_top_p(logits, math.ulp(0.0)).tolist() == [[-math.inf, 0.0, -math.inf]]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_k=1), Sampling(temperature=0.7), Sampling(top_k=5), Sampling(top_p=0.8), Sampling(min_p=0.1)],
    ids=str,
)
def test_each_row_is_filtered_for_itself_however_the_rows_are_arranged(sampling: Sampling) -> None:
    logits = random_logits(0, rows=6, vocab=20)
    rows = torch.cat([distribution(row[None], None, sampling) for row in logits])
    assert distribution(logits, None, sampling).equal(rows)
    assert distribution(logits.view(2, 3, 20), None, sampling).equal(rows.view(2, 3, 20))


def test_the_worked_penalty_divides_positive_and_multiplies_negative_scores() -> None:
    result = penalise(torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[True, True, False]]), 2.0)
    assert result.tolist() == [[1.0, -4.0, 1.0]]


def test_nothing_is_drawn_where_one_token_is_chosen() -> None:
    """Then one of equal tokens has all the probability; with two candidates both may be drawn."""
    greedy = [Sampling(temperature=0), Sampling(top_k=1), Sampling(temperature=0, top_k=7)]
    drawn = [Sampling(), Sampling(top_k=2), Sampling(temperature=1e-9), Sampling(top_p=0.01)]
    assert [sampling.greedy for sampling in (*greedy, *drawn)] == [True] * 3 + [False] * 4
    logits = torch.tensor([[1.0, 2.0, 2.0]])
    assert all(distribution(logits, None, sampling).tolist() == [[0.0, 1.0, 0.0]] for sampling in greedy)
    assert distribution(logits, None, Sampling(top_k=2)).tolist() == [[0.0, 0.5, 0.5]]


@PLENTY
@given(st.integers(0, 10_000), st.floats(0, 0.999999))
def test_one_candidate_or_no_heat_is_the_likeliest_token(seed: int, uniform: float) -> None:
    logits = random_logits(seed)
    best = logits.argmax(-1)
    for sampling in (Sampling(top_k=1), Sampling(temperature=0), Sampling(min_p=1.0), Sampling(temperature=1e-40)):
        assert draw(distribution(logits, None, sampling), torch.full((4,), uniform)).equal(best)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.6, top_k=12), Sampling(top_p=0.8), Sampling(min_p=0.05)], ids=str
)
def test_drawn_frequencies_are_the_probabilities(sampling: Sampling) -> None:
    draws = 100_000
    probabilities = distribution(random_logits(3, rows=1), None, sampling)
    uniforms = Uniforms(seed=1, sample=0)
    numbers = torch.tensor([uniforms.next() for _ in range(draws)], dtype=torch.float64)
    ids = draw(probabilities.expand(draws, -1), numbers)
    counts = torch.bincount(ids, minlength=50)
    assert chi_square(counts, probabilities[0]) > 1e-4
    assert not counts[probabilities[0] == 0].any()


def test_the_test_of_frequencies_can_fail() -> None:
    probabilities = torch.full((50,), 0.02)
    skewed = torch.full((50,), 2000)
    skewed[0], skewed[1] = 2500, 1500
    assert chi_square(skewed, probabilities) < 1e-4


def test_a_token_of_probability_zero_is_never_drawn_at_either_end() -> None:
    probabilities = torch.tensor([[0.0, 0.4, 0.0, 0.6, 0.0]])
    ends = torch.tensor([0.0, 1 - 2**-53, 0.4], dtype=torch.float64)
    assert draw(probabilities.expand(3, -1), ends).tolist() == [1, 3, 3]


@given(st.integers(1, 1500), st.integers(0, 2**31), st.floats(0.0, 0.99), st.sampled_from([0, 1 << 16]))
@settings(max_examples=60, deadline=None)
def test_the_draw_is_that_of_one_long_sum(vocab: int, seed: int, empty: float, many: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(7, vocab, generator=generator) * 4
    scores[:, 1:][torch.rand(7, vocab - 1, generator=generator) < empty] = -math.inf
    probabilities, numbers = scores.softmax(-1), torch.rand(7, generator=generator, dtype=torch.float64)
    numbers[:2] = torch.tensor([0.0, 1 - 2**-53])
    with pytest.MonkeyPatch.context() as patch:  # by pieces, or as a CPU does it for few
        patch.setattr(module, "_MANY", many)
        ids = draw(probabilities, numbers)
    total = probabilities.double().cumsum(-1)
    target = numbers * total[:, -1]
    rows = torch.arange(7)
    assert (probabilities[rows, ids] > 0).all()
    # up to the rounding of sums in another order
    assert (total[rows, ids] > target - 1e-12).all()
    assert (total[rows, ids] - probabilities[rows, ids] <= target + 1e-12).all()


def test_the_draw_is_the_inverse_of_the_cumulated_probabilities() -> None:
    probabilities = torch.tensor([[0.25, 0.5, 0.25]])
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999])
    assert draw(probabilities.expand(6, -1), numbers).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("many", [0, 1 << 16])
def test_the_draw_takes_probabilities_as_they_are_rounded(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sum is not always 1: weights of twice or half the size, which is exact, give the same ids."""
    monkeypatch.setattr(module, "_MANY", many)
    probabilities = random_logits(5, rows=200, vocab=600).softmax(-1)
    numbers = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = draw(probabilities, numbers)
    assert ids.shape == (200,)
    for factor in (0.5, 2.0, 1024.0):
        assert draw(probabilities * factor, numbers).equal(ids)


def test_random_numbers_are_the_same_in_every_release() -> None:
    """A seed gives the text that it gave before: written down on 2026-11-17."""
    numbers = Uniforms(0, 0).take(130)
    assert [numbers[at] for at in (0, 63, 64, 129)] == [
        0.9118813809824121,
        0.7295984086477278,
        0.6659834835349501,
        0.05225647614193807,
    ]


def test_random_numbers_depend_on_seed_and_sample_only() -> None:
    def numbers(seed: int, sample: int) -> list[float]:
        uniforms = Uniforms(seed, sample)
        return [uniforms.next() for _ in range(200)]

    first = numbers(5, 0)
    torch.rand(17)
    assert numbers(5, 0) == Uniforms(5, 0).take(200) == first
    others = [numbers(5, 1), numbers(6, 0), numbers(-5, 0), numbers(50, 0)]
    assert all(not set(other) & set(first) for other in others)
    assert all(0 <= number < 1 for number in first)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Sampling(temperature=-1), "temperature"),
        (lambda: Sampling(temperature=math.nan), "temperature"),
        (lambda: Sampling(temperature=math.inf), "temperature"),
        (lambda: Sampling(temperature=1_000_000.5), "temperature"),
        (lambda: Sampling(top_k=-1), "top_k"),
        (lambda: Sampling(top_p=0), "top_p"),
        (lambda: Sampling(top_p=1.1), "top_p"),
        (lambda: Sampling(min_p=-0.1), "min_p"),
        (lambda: Sampling(min_p=1.1), "min_p"),
        (lambda: Sampling(repetition_penalty=0), "repetition_penalty"),
        (lambda: Sampling(repetition_penalty=100.5), "repetition_penalty"),
    ],
)
def test_a_bad_setting_is_refused_by_name(make: Callable[[], Sampling], key: str) -> None:
    with pytest.raises(RequestError, match=f"^{key}: "):
        make()


def test_the_bounds_themselves_are_taken_and_the_defaults_change_nothing() -> None:
    Sampling(temperature=1_000_000, top_k=10**9, top_p=1, min_p=1, repetition_penalty=100)
    Sampling(temperature=0, top_k=0, top_p=math.ulp(0.0), min_p=0, repetition_penalty=0.01)
    assert [Sampling(repetition_penalty=penalty).penalises for penalty in (1, 2, 0.5)] == [False, True, True]
    logits = random_logits(0)
    torch.testing.assert_close(distribution(logits, None, Sampling()), logits.softmax(-1))


def test_on_a_cpu_ranks_are_found_by_sorting() -> None:
    assert by_kernel(random_logits(0)) is False


class Ranking:
    """In the place of the kernel's module, which needs Triton."""

    def __init__(self, what: str) -> None:
        self.what = what

    def ranked(self, logits_nV: Tensor, top_k_n: Tensor, top_p_n: Tensor, min_p_n: Tensor) -> Tensor:
        if self.what == "no compiler":
            raise RuntimeError("no C compiler")
        rows = zip(logits_nV[:, None], top_k_n.tolist(), top_p_n.tolist(), min_p_n.exp().tolist(), strict=True)
        kept = [keep_min_p(keep_top_p(keep_top_k(row, int(k)), p), least) for row, k, p, least in rows]
        return torch.cat(kept) * (2 if self.what == "other numbers" else 1)


@pytest.mark.parametrize("what", ["right", "no compiler", "other numbers"])
def test_a_kernel_that_does_not_do_what_the_sort_does_is_not_used(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trivium.kernels.rank", cast(ModuleType, Ranking(what)))
    proven = module._proven.__wrapped__  # without what it remembers
    if what == "right":
        assert proven(torch.device("cpu")) is True
        return
    with pytest.warns(UserWarning, match="top-k and top-p by sorting") as warned:
        assert proven(torch.device("cpu")) is False
    assert warned[0].filename == __file__  # where it was asked for
