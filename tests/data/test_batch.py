from __future__ import annotations

import pytest
import torch

from trivium.data.batch import Batch


def batch() -> Batch:
    labels = torch.tensor([[1, 2, -100], [4, 5, 6]])
    inputs = {"tokens": torch.arange(6).view(2, 3), "prefix": torch.tensor([1, 2])}
    return Batch(inputs=inputs, targets={"labels": labels, "where": torch.arange(2)}, counts={"tokens": 5})


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda"])
def test_a_batch_moves_as_a_whole(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    moved = batch().to(device)
    tensors = {**moved.inputs, **moved.targets}
    assert {name: tensor.device.type for name, tensor in tensors.items()} == dict.fromkeys(
        ("tokens", "prefix", "labels", "where"), device
    )
    assert moved.counts == {"tokens": 5, "sequences": 2}
    if device != "meta":  # where tensors have no values
        again = moved.to(device).to("cpu")
        for name, tensor in {**batch().inputs, **batch().targets}.items():
            assert torch.equal({**again.inputs, **again.targets}[name], tensor)


def test_what_is_pinned_is_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a view with gaps would not run beside the computation."""
    seen: list[bool] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.is_contiguous())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    view = torch.arange(12).view(3, 4)[:, :-1]
    pinned = Batch(inputs={"tokens": view}, targets={"labels": view.t()}, counts={"tokens": 9}).pinned()
    assert seen == [True, True]
    assert torch.equal(pinned.inputs["tokens"], view)
    assert torch.equal(pinned.targets["labels"], view.t())
