"""The Triton kernels of beam search against torch; on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1."""

# R rows, V vocabulary, B texts, H query heads, G key/value heads, K beams, S slots, E head size

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU, or Triton's interpreter")

TYPES = (torch.float32, torch.bfloat16)
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("vocab", "width", "count"), [(1000, 1000, 1), (1100, 1111, 8), (5000, 5003, 32), (37, 37, 1)])
@pytest.mark.parametrize("levels", [1, 4, 100_000])
def test_the_best_are_those_of_a_stable_sort(
    dtype: torch.dtype, vocab: int, width: int, count: int, levels: int
) -> None:
    from trivium.kernels.beam import best

    draw = torch.Generator().manual_seed(vocab + levels)
    scores_RV = (torch.randint(-levels, levels + 1, (5, width), generator=draw) / levels * 9).to(dtype)
    shut_V = torch.rand(vocab, generator=draw) < 0.3
    shut_V[3] = False
    expected = scores_RV.float()[:, :vocab].masked_fill(shut_V, -torch.inf)
    order = expected.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    logprobs_RV = scores_RV.float().log_softmax(-1)[:, :vocab].masked_fill(shut_V, -torch.inf)
    found_RC, ids_RC = best(scores_RV.to(DEVICE), shut_V.to(DEVICE), count)
    assert ids_RC.tolist() == order.tolist()
    torch.testing.assert_close(found_RC.cpu(), logprobs_RV.gather(1, order), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
def test_scores_that_are_no_numbers_show_in_what_is_found() -> None:
    from trivium.kernels.beam import best

    scores_RV = torch.zeros(4, 500)
    scores_RV[1, 77], scores_RV[2, 78], scores_RV[3] = torch.nan, torch.inf, -torch.inf
    found_RC, _ = best(scores_RV.to(DEVICE), torch.zeros(500, dtype=torch.bool, device=DEVICE), 2)
    assert found_RC[:, 0].isfinite().tolist() == [True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("heads", "groups", "beams", "size"), [(4, 4, 4, 16), (4, 2, 3, 24), (8, 1, 5, 64), (2, 2, 1, 8)]
)
def test_beams_of_a_text_mix_the_slots_that_each_has_seen(
    dtype: torch.dtype, heads: int, groups: int, beams: int, size: int
) -> None:
    from trivium.kernels.beam import mix, mixable

    draw = torch.Generator().manual_seed(size)
    texts, steps = 3, 30
    query = torch.randn(texts, beams, heads, size, generator=draw).to(DEVICE, dtype).transpose(1, 2)
    keys, values = (
        torch.randn(texts, steps * beams, groups, size, generator=draw).to(DEVICE, dtype).transpose(1, 2)
        for _ in range(2)
    )
    done_B = torch.tensor([0, 17, steps + 3])  # a row that is done may have gone further than is kept
    now_B = done_B.clamp(max=steps - 1)
    seen = torch.rand(texts, beams, steps * beams, generator=draw) < 0.4
    at = torch.arange(steps * beams)
    own = at == (now_B[:, None] * beams + torch.arange(beams))[:, :, None]
    filled = at < ((now_B + 1) * beams)[:, None, None]
    seen = (seen & filled) | own
    assert mixable(query, keys, values)
    mixed = mix(query, keys, values, seen.to(DEVICE), done_B.to(DEVICE), 0.3)
    share = heads // groups
    exact = [one.double().cpu() for one in (query, keys, values)]
    scores = exact[0] @ exact[1].repeat_interleave(share, 1).mT * 0.3
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    expected = weights @ exact[2].repeat_interleave(share, 1)
    error = (mixed.double().cpu() - expected).norm() / expected.norm()
    assert float(error) < (1e-5 if dtype == torch.float32 else 1e-2)
