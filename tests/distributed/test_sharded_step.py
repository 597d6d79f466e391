"""A step on a model sharded over two processes (FSDP2, gloo): the guard, clipping and the update of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.sharded_worker import BAD, KINDS, STEPS, job, model, walk

Found = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of the two processes has at the end."""
    folder = tmp_path_factory.mktemp("sharded")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.sharded_worker"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder)], cwd=root, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_step_is_the_step_of_one_process(sharded: list[Found], kind: str) -> None:
    expected = walk(job(model(), kind), [0, 1])
    for rank in sharded:
        assert rank[kind].keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(rank[kind][name], tensor, rtol=1e-4, atol=1e-6, equal_nan=True)
    assert all(float(expected[f"norm {step}"]) > 0.1 for step in range(STEPS) if step != BAD)  # all were clipped


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_on_one_rank_moves_the_weights_of_none(sharded: list[Found], kind: str) -> None:
    for rank in sharded:
        found = rank[kind]
        assert [bool(found[f"finite {step}"]) for step in range(STEPS)] == [step != BAD for step in range(STEPS)]
        assert torch.equal(found[f"weight {BAD}"], found[f"weight {BAD - 1}"])
        assert not torch.equal(found[f"weight {BAD + 1}"], found[f"weight {BAD}"])
    for name, tensor in sharded[0][kind].items():
        assert torch.equal(tensor.nan_to_num(), sharded[1][kind][name].nan_to_num())
