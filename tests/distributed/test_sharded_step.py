"""Training on a model divided among two processes (gloo): the guard, clipping, updates and checkpoints of one process.

FSDP2 ("sharded") gives each process half of a batch, tensor parallel ("parallel") all of it.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.processes import found_in, once, run
from tests.distributed.sharded_worker import (
    BAD_GRADIENTS,
    BAD_LOSS,
    KEPT,
    KINDS,
    MORE,
    STEPS,
    WAYS,
    Found,
    held,
    job,
    model,
    resume,
    walk,
    write,
)
from trivium.checkpoints.bundle import open_bundle, save
from trivium.models.transformer import weights
from trivium.optim.averaging import MovingAverage
from trivium.optim.options import OPTIMIZERS
from trivium.text.kinds import Bytes

ways = pytest.mark.parametrize("way", WAYS)
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process and two of them have saved a run and written down what they found."""

    def work(folder: Path) -> None:
        torch.save(alone_in(folder), folder / "alone.pt")
        run("sharded_worker", folder)

    return once(tmp_path_factory, "sharded", work)


def alone_in(folder: Path) -> dict[str, Found]:
    """The run of one process: at its checkpoint, and some steps later."""
    running = job(model(), KEPT)
    found = {"saved": walk(running, [0, 1])}
    write(running, folder / "one")
    save(folder / "one model", running.model.config, running.weights_for_use(), Bytes().build([]), {})
    (folder / "a file").touch()
    return found | {"after": walk(running, [0, 1], STEPS, STEPS + MORE)}


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Found]:
    """What one process has found."""
    found: dict[str, Found] = torch.load(folder / "alone.pt")
    return found


@pytest.fixture(scope="module")
def divided(folder: Path) -> list[dict[str, Any]]:
    """What each of the two processes has found."""
    return found_in(folder)


def alike(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-7, equal_nan=True), name


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@ways
@kinds
def test_a_step_of_two_processes_is_the_step_of_one(divided: list[dict[str, Any]], kind: str, way: str) -> None:
    expected = walk(job(model(), kind), [0, 1])
    for rank in divided:
        alike(rank[f"{way} {kind}"], expected)
    fine = [step for step in range(STEPS) if step not in (BAD_GRADIENTS, BAD_LOSS)]
    assert all(float(expected[f"norm {step}"]) > 0.1 for step in fine)  # all were clipped


@ways
@kinds
def test_what_is_not_finite_in_one_process_moves_the_weights_of_none(
    divided: list[dict[str, Any]], kind: str, way: str
) -> None:
    bad = (BAD_GRADIENTS, BAD_LOSS)
    for rank in divided:
        found = rank[f"{way} {kind}"]
        assert [bool(found[f"finite {step}"]) for step in range(STEPS)] == [step not in bad for step in range(STEPS)]
        assert bool(found[f"norm {BAD_LOSS}"].isfinite())
        for step in bad:
            assert torch.equal(found[f"weight {step}"], found[f"weight {step - 1}"])
            assert not torch.equal(found[f"weight {step + 1}"], found[f"weight {step}"])
    for name, tensor in divided[0][f"{way} {kind}"].items():
        assert torch.equal(tensor.nan_to_num(), divided[1][f"{way} {kind}"][name].nan_to_num())


@ways
def test_a_checkpoint_of_two_processes_is_one_of_one_process(
    divided: list[dict[str, Any]], folder: Path, way: str
) -> None:
    """Bit for bit; and from there one process goes on as the two do."""
    loaded = resume(job(model(), KEPT), folder / way)
    found = held(loaded)
    same(found, {name: divided[0][f"{way} {KEPT}"][name] for name in found})
    alike(walk(loaded, [0, 1], STEPS, STEPS + MORE), divided[0][f"{way} after"])


@ways
def test_a_checkpoint_of_one_process_is_loaded_by_two(
    divided: list[dict[str, Any]], alone: dict[str, Found], folder: Path, way: str
) -> None:
    """Bit for bit, moments and averages too; what they save again has the same bytes."""
    for rank in divided:
        loaded = rank[f"{way} loaded"]
        same(loaded, {name: alone["saved"][name] for name in loaded})
        alike(rank[f"{way} loaded after"], alone["after"])
    first, again = (next((folder / name).iterdir()) for name in ("one", f"{way} again"))
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in again.iterdir())
    assert {"model.safetensors", "optimizer.safetensors", "average.safetensors"} < set(files)
    for name in files:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name


@ways
def test_a_model_saved_by_two_processes_opens_in_one_and_the_other_way_round(
    divided: list[dict[str, Any]], folder: Path, way: str
) -> None:
    opened = weights(open_bundle(folder / f"{way} model").module)
    averaged = {name: divided[0][f"{way} {KEPT}"][f"average {name}"] for name in opened}
    same(opened, averaged)  # what a user gets is the average
    for rank in divided:
        same(rank[f"{way} opened"], weights(open_bundle(folder / "one model").module))


@ways
def test_a_disk_that_refuses_the_first_process_is_an_error_in_both(divided: list[dict[str, Any]], way: str) -> None:
    for rank in divided:
        assert rank[f"{way} refused"] == errno.ENOTDIR


def test_the_steps_move_what_is_compared() -> None:
    """Every optimizer moves every weight by more than the tolerance, and the average follows."""
    assert {type(options) for options in KINDS.values()} == set(OPTIMIZERS.values())
    for kind in KINDS:
        running = job(model(), kind)
        before = {name: tensor.clone() for name, tensor in weights(running.model).items()}
        walk(running, [0, 1])
        assert isinstance(running.average, MovingAverage)
        for name, tensor in weights(running.model).items():
            assert float((tensor - before[name]).abs().max()) > 1e-5, (kind, name)
            assert not torch.equal(running.average.shadow[name], tensor)
