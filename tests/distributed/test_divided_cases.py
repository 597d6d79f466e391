"""The models of the battery divided between two processes: logits, decoding with a cache and gradients of one process.

FSDP2 ("sharded") gives each process one row, tensor parallel ("parallel") both. Float64: what differs is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.battery import lively
from tests.distributed.cases_worker import MORE, NAMED, Found, Kind, Way, measured
from tests.distributed.processes import found_in, once, run

ROUND_OFF = 1e-10  # of float64 sums in another order
SOME = (
    "decoder: biases",
    "decoder: grouped",
    "encoder-decoder: qk-norm",
    "decoder: positions alibi",
    "encoder-decoder: positions t5",
    "decoder: shaw grouped",
    "decoder: positions shaw keys per head",
    "encoder: positions both",
    "decoder: parallel",
    "encoder-decoder: stack tied",
    "llama3-8b",
    *MORE,
)
# Those that tensor parallel refuses, and the word that says why.
REFUSED = {
    "multi-query": "heads",
    "free head sizes": "heads",
    "experts": "feedforward.up_EFD",
    "convolution": "blocks.0.attention",
}


def refused(name: str) -> str:
    return REFUSED.get(name.rsplit(": ", 1)[-1], "")


def check(ranks: list[Any], name: str) -> None:
    """Both processes found, in all ways, what one process finds."""
    expected = measured(lively(NAMED[name].config), NAMED[name])
    for way in get_args(Way):
        for kind in get_args(Kind):
            for number, rank in enumerate(ranks):
                found: Found | str = rank[name, way, kind]
                if isinstance(found, str):
                    assert way == "parallel"
                    assert refused(name)
                    assert refused(name) in found
                    continue
                assert found.keys() == expected.keys()
                for key, tensor in expected.items():
                    own = tensor[number : number + 1] if way == "sharded" and key in ("logits", "cached") else tensor
                    off = float((found[key] - own).abs().max())
                    assert off <= ROUND_OFF * max(1.0, float(own.abs().max())), f"{way} {kind} {key}: off by {off:.3g}"
    assert isinstance(ranks[0][name, "parallel", "plain"], str) == bool(refused(name))


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of the two processes has computed of some cases."""
    return found_in(once(tmp_path_factory, "cases", lambda folder: run("cases_worker", folder, *SOME)))


@pytest.mark.parametrize("name", SOME)
def test_a_divided_model_is_the_whole_one(divided: list[Any], name: str) -> None:
    check(divided, name)


@pytest.mark.full
def test_every_divided_model_is_the_whole_one(tmp_path: Path) -> None:
    others = [name for name in NAMED if name not in SOME]
    run("cases_worker", tmp_path, *others, limit=1800)
    ranks = found_in(tmp_path)
    for name in others:
        check(ranks, name)


def test_cases_differ_where_they_should() -> None:
    """The comparison can fail: another seed gives other numbers."""
    case = NAMED["decoder: grouped"]
    one, other = (measured(lively(case.config, seed=seed), case) for seed in (0, 1))
    assert all(not torch.allclose(one[key], other[key]) for key in ("logits", "cached"))
