"""The mean of a run's newest checkpoints, and the weights that a checkpoint offers for use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trivium.checkpoints import bundle, format
from trivium.checkpoints.store import Store
from trivium.errors import CheckpointError


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(3, 4, generator=generator),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "count": torch.tensor([seed]),
    }


def store(folder: Path, steps: Mapping[int, Mapping[str, Mapping[str, Tensor]]]) -> Store:
    found = Store(folder / "checkpoints", keep=100)
    for step, tensors in steps.items():
        found.save(step, tensors=tensors, documents={})
    return found


def never(text: str) -> None:
    raise AssertionError(text)


def test_the_mean_is_that_of_the_newest_checkpoints_in_the_models_dtype(tmp_path: Path) -> None:
    saved = store(tmp_path, {step: {"model": weights(step)} for step in (10, 20, 30, 40)})
    found, steps = bundle.mean_weights(saved, 3, say=never)
    assert steps == [20, 30, 40]
    for name in ("matrix", "half"):
        exact = torch.stack([weights(step)[name].double() for step in steps]).mean(0)
        assert torch.equal(found[name], exact.to(weights(0)[name].dtype))
    assert found["count"].tolist() == [40]  # a count has no mean: the newest


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_mean_of_equal_weights_is_that_weight_bit_for_bit(tmp_path: Path, count: int) -> None:
    same = weights(7)
    saved = store(tmp_path, {step: {"model": same} for step in (1, 2, 3)})
    found, _ = bundle.mean_weights(saved, count, say=never)
    assert all(torch.equal(found[name], tensor) for name, tensor in same.items())


def test_too_few_checkpoints_are_refused_with_both_numbers(tmp_path: Path) -> None:
    saved = store(tmp_path, {step: {"model": weights(step)} for step in (10, 20)})
    with pytest.raises(CheckpointError, match=r"has 2 whole checkpoints, not 5; .* checkpoint\.keep=5"):
        bundle.mean_weights(saved, 5, say=never)


def test_a_damaged_checkpoint_is_named_and_does_not_count(tmp_path: Path) -> None:
    saved = store(tmp_path, {step: {"model": weights(step)} for step in (10, 20, 30)})
    file = saved.folder / "step-00000020" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    said: list[str] = []
    found, steps = bundle.mean_weights(saved, 2, say=said.append)
    assert steps == [10, 30]
    exact = (weights(10)["matrix"].double() + weights(30)["matrix"].double()) / 2
    assert torch.equal(found["matrix"], exact.float())
    assert len(said) == 1
    assert "step-00000020" in said[0]
    with pytest.raises(CheckpointError, match="has 2 whole checkpoints, not 3"):
        bundle.mean_weights(saved, 3, say=said.append)


def test_checkpoints_of_different_shapes_have_no_mean(tmp_path: Path) -> None:
    saved = store(tmp_path, {1: {"model": weights(1)}, 2: {"model": {**weights(2), "matrix": torch.zeros(2, 2)}}})
    with pytest.raises(CheckpointError, match="holds other weights than"):
        bundle.mean_weights(saved, 2, say=never)


def test_where_a_run_keeps_a_moving_average_that_one_is_for_use(tmp_path: Path) -> None:
    moving = {"matrix": torch.full((3, 4), 0.25)}
    saved = store(tmp_path, {1: {"model": weights(1), "average": moving}, 2: {"model": weights(2)}})
    first, second = (item.path for item in saved.checkpoints())
    found = bundle.weights_in(first, format.verify(first))
    assert torch.equal(found["matrix"], moving["matrix"])
    assert torch.equal(found["half"], weights(1)["half"])
    assert torch.equal(bundle.weights_in(second, format.verify(second))["matrix"], weights(2)["matrix"])
