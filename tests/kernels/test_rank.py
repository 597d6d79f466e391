"""The kernel that finds ranks without a sort, against the plain filters, which sort; on a GPU or in the interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.launch import DEVICE, GPU, needs_gpu, needs_triton
from trivium.generation.choosing import Chooser, Kind
from trivium.generation.rows import Request, Row
from trivium.generation.sampling import (
    Sampling,
    by_kernel,
    distribution,
    draw,
    heat,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise,
)

pytestmark = needs_triton

Asked = tuple[int, float, float]  # top-k, top-p, min-p


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a smaller table: what takes several tiles there takes some at any size."""
    from trivium.kernels import rank

    if not GPU:
        monkeypatch.setattr(rank, "WIDE", 32)
        monkeypatch.setattr(rank, "TALL", 2)


def drawn(rows: int, vocab: int, seed: int, kind: str = "plain") -> Tensor:
    """Scores whose highest is 0, of several temperatures; the kinds have ties, or ids that cannot be."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=generator) * 3
    x = {"plain": x, "bfloat16": x.bfloat16().float(), "whole": x.round(), "holes": x}[kind]
    if kind == "holes":
        x[torch.rand(rows, vocab, generator=generator) < 0.4] = -math.inf
    x = (x - x.amax(-1, keepdim=True)) / (0.3 + 1.5 * torch.rand(rows, 1, generator=generator))
    return x.to(DEVICE)


def asked_of(rows: int, vocab: int, seed: int) -> list[Asked]:
    """All ways to ask: each filter on or off, few and many ids, little and much mass."""
    generator = torch.Generator().manual_seed(seed)
    ks = [0, vocab, vocab + 7, 1, vocab - 1, *torch.randint(1, vocab, (4,), generator=generator).tolist(), 5, 40]
    ps = [1.0, 1e-9, 0.999, *torch.rand(4, generator=generator).tolist()]
    mins = [0.0, 0.0, 0.02, 1.0, 0.0]
    return [(ks[row % len(ks)], ps[row % len(ps)], mins[row % len(mins)]) for row in range(rows)]


def found(logits: Tensor, asked: list[Asked]) -> Tensor:
    from trivium.kernels.rank import ranked

    settings = [(k, p, math.log(least) if least else -math.inf) for k, p, least in asked]
    return ranked(logits, *torch.tensor(settings, device=DEVICE).unbind(1))


def plain(logits: Tensor, asked: list[Asked]) -> Tensor:
    rows = zip(logits[:, None], asked, strict=True)
    return torch.cat([keep_min_p(keep_top_p(keep_top_k(row, k), p), least) for row, (k, p, least) in rows])


def before(row: Tensor, asked: Asked) -> Tensor:
    """The mass before each id in the order that top-p goes through, in float64."""
    sorted_V, order_V = keep_top_k(row[None], asked[0])[0].sort(descending=True, stable=True)
    mass_V = sorted_V.double().softmax(-1)
    return torch.empty_like(mass_V).scatter(0, order_V, mass_V.cumsum(0) - mass_V)


def same(logits: Tensor, asked: list[Asked]) -> int:
    """Check that the same ids stay, with their bits; the rows that differ at the border of p, where they may."""
    have, want = found(logits, asked), plain(logits, asked)
    differing = (have != want).any(-1).nonzero()[:, 0].tolist()
    for row in differing:
        ids = have[row] != want[row]
        assert (before(logits[row], asked[row])[ids] - asked[row][1]).abs().max() < 1e-6, (row, asked[row])
        assert (have[row, ids].isneginf() ^ want[row, ids].isneginf()).all()
    return len(differing)


@pytest.mark.parametrize("kind", ["plain", "bfloat16", "whole", "holes"])
@pytest.mark.parametrize("vocab", [150, 64])
def test_the_ids_that_stay_are_those_of_a_sort(kind: str, vocab: int) -> None:
    assert same(drawn(11, vocab, vocab, kind), asked_of(11, vocab, 1)) == 0


def test_the_comparison_sees_a_wrong_id(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, asked = drawn(1, 64, 0), [(0, 0.5, 0.0)]
    right = found(logits, asked)
    wrong = right.clone()
    wrong[0, int(logits[0].argmax())] = -math.inf  # far from the border
    monkeypatch.setitem(globals(), "found", lambda logits, asked: right)
    assert same(logits, asked) == 0
    monkeypatch.setitem(globals(), "found", lambda logits, asked: wrong)
    with pytest.raises(AssertionError):
        same(logits, asked)


def test_of_equal_ids_the_first_stay_as_many_as_the_mass_needs() -> None:
    logits = torch.zeros(5, 100, device=DEVICE)
    logits[3:, 1::2] = -1e-3  # behind the even ids, though equal to each other
    logits[:, 7] = -math.inf
    shares = [(0, 0.2049, 0.0), (0, 1e-9, 0.0), (0, 0.995, 0.0), (0, 0.3, 0.0), (0, 0.9, 0.0)]
    kept = [row.nonzero()[:, 0].tolist() for row in found(logits, shares) > -math.inf]
    others = [id for id in range(100) if id != 7]
    assert kept[:3] == [others[:21], [0], others]
    assert kept[3] == list(range(0, 100, 2))[: math.ceil(0.3 * (50 + 49 * math.exp(-1e-3)))]
    odd = math.ceil((0.9 * (50 + 49 * math.exp(-1e-3)) - 50) / math.exp(-1e-3))
    assert set(kept[4]) == {*range(0, 100, 2), *[id for id in others if id % 2][:odd]}


def test_ties_with_the_kth_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 1.0, -0.0, 1.0, 0.0]], device=DEVICE).repeat(4, 1)
    kept = found(logits, [(2, 1.0, 0.0), (3, 1.0, 0.0), (5, 1.0, 0.0), (6, 1.0, 0.0)]) > -math.inf
    assert kept.sum(-1).tolist() == [2, 5, 5, 7]  # both zeros are equal


def test_filters_that_are_off_change_no_bit() -> None:
    logits = drawn(3, 150, 5, "holes")
    assert torch.equal(found(logits, [(0, 1.0, 0.0), (150, 1.0, 0.0), (9999, 1.0, 0.0)]), logits)


def test_scores_of_all_magnitudes_are_ranked() -> None:
    steps = torch.logspace(-44, 38, 60, dtype=torch.float64).float()
    logits = torch.cat((steps, -steps, torch.tensor([0.0, -0.0])))
    logits = logits[torch.randperm(len(logits), generator=torch.Generator().manual_seed(0))].repeat(6, 1).to(DEVICE)
    asked = [(k, 1.0, 0.0) for k in (1, 20, 60, 62, 90)]
    assert same(logits, [*asked, (0, 0.5, 0.0)]) == 0
    assert (
        same(logits.clamp(max=0.0), [(0, p, 0.0) for p in (0.1, 0.5, 0.9)] + [(k, 0.7, 0.0) for k in (9, 70, 99)]) == 0
    )


def test_rows_and_settings_may_lie_apart() -> None:
    from trivium.kernels.rank import ranked

    wide, settings = drawn(4, 200, 3), torch.tensor([[20.0, 0.8, -4.0]] * 4, device=DEVICE)
    expected = plain(wide[:, :150], [(20, 0.8, math.exp(-4.0))] * 4)
    assert torch.equal(ranked(wide[:, :150], *settings.unbind(1)), expected)
    assert torch.equal(ranked(wide[:, :150].T.contiguous().T, *settings.unbind(1)), expected)


def test_a_row_without_finite_scores_ends_and_leaves_the_others_alone() -> None:
    logits = drawn(5, 64, 2)
    logits[1], logits[2, 5], logits[3, 5] = -math.inf, math.nan, math.inf
    asked: list[Asked] = [(9, 0.7, 0.01)] * 5
    have = found(logits, asked)
    assert torch.equal(have[[0, 4]], plain(logits[[0, 4]], asked[:2]))
    assert have[1].isneginf().all()
    assert have[2, 5].isnan()  # what is not a number is still seen


SAMPLINGS = [
    Sampling(top_k=7, top_p=0.8),
    Sampling(temperature=0),
    Sampling(temperature=0.6, top_p=0.9, min_p=0.05),
    Sampling(temperature=1.4, top_k=30, repetition_penalty=1.3),
    Sampling(),
    Sampling(temperature=1e-40, top_k=5),
]


def chooser_of(vocab: int) -> Chooser:
    """One with a row for each sampling; the last id and 3 are shut."""
    chooser = Chooser(len(SAMPLINGS), vocab, 8, torch.device(DEVICE))
    chooser.shut(vocab - 1, [3])
    rows = [Row(at, Request(ids=(1, 2), tokens=8, sampling=one, seed=at)) for at, one in enumerate(SAMPLINGS)]
    chooser.bring(range(len(rows)), rows)
    chooser.settle(torch.arange(len(rows), device=DEVICE), torch.tensor(chooser.settings(rows), device=DEVICE))
    return chooser


def sorted_out(logits: Tensor, one: Sampling, seen: Tensor) -> Tensor:
    """The distribution by the plain filters."""
    logits = penalise(logits, seen, one.repetition_penalty) if one.penalises else logits
    if one.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return plain(heat(logits, one.temperature), [(one.top_k, one.top_p, one.min_p)] * len(logits)).softmax(-1)


def test_a_chooser_draws_the_text_of_the_plain_filters() -> None:
    vocab, steps = 100, 3
    logits, chooser = drawn(len(SAMPLINGS), vocab, 4), chooser_of(100)
    assert by_kernel(logits)
    made = [chooser.choose(logits, Kind.of(SAMPLINGS)).tolist() for _ in range(steps)]
    shut = torch.zeros(vocab, dtype=torch.bool, device=DEVICE)
    shut[[3, vocab - 1]] = True
    for row, one in enumerate(SAMPLINGS):
        seen = torch.zeros(1, vocab, dtype=torch.bool, device=DEVICE)
        seen[0, [1, 2]] = True
        for step in range(steps):
            shares = sorted_out(logits[row, None].masked_fill(shut, -math.inf), one, seen)
            expected = int(draw(shares, chooser.uniforms_BN[row, step, None]))
            assert made[step][row] == expected, (one, step)
            seen[0, expected] = True


def test_distributions_are_those_of_the_plain_filters() -> None:
    logits, seen = drawn(2, 100, 4), torch.zeros(2, 100, dtype=torch.bool, device=DEVICE)
    assert by_kernel(logits)
    for one in SAMPLINGS:
        assert torch.equal(distribution(logits, seen, one), sorted_out(logits, one, seen))


@needs_gpu
@pytest.mark.parametrize("vocab", [50_257, 32_000])
@pytest.mark.parametrize("kind", ["plain", "bfloat16", "holes"])
def test_64_rows_of_a_whole_vocabulary_keep_what_a_sort_keeps(vocab: int, kind: str) -> None:
    for seed in range(4):
        same(drawn(64, vocab, seed, kind), asked_of(64, vocab, seed))


@needs_gpu
def test_a_row_keeps_the_same_whatever_else_is_in_the_batch() -> None:
    logits, asked = drawn(64, 50_257, 9, "bfloat16"), asked_of(64, 50_257, 9)
    together = found(logits, asked)
    assert torch.equal(found(logits, asked), together)
    for row in range(0, 64, 7):
        assert torch.equal(found(logits[row : row + 1], asked[row : row + 1])[0], together[row])


@needs_gpu
def test_a_captured_launch_follows_the_settings() -> None:
    from trivium.kernels.rank import ranked

    logits, settings = drawn(8, 50_257, 1), torch.tensor([[40.0, 0.9, -math.inf]] * 8, device=DEVICE)
    ranked(logits, *settings.unbind(1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = ranked(logits, *settings.unbind(1))
    for seed, k in enumerate((3, 500, 20_000)):
        logits.copy_(drawn(8, 50_257, 20 + seed))
        settings[:, 0] = k
        graph.replay()
        assert torch.equal(kept, found(logits, [(k, settings[0, 1].item(), 0.0)] * 8))
