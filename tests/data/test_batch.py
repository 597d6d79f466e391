from __future__ import annotations

import pytest
import torch

from trivium.data.batch import Batch


def batch() -> Batch:
    return Batch(inputs={"ids": torch.arange(6).view(2, 3)}, labels=torch.tensor([[1, 2, -100], [4, 5, 6]]), count=5)


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda"])
def test_a_batch_moves_as_a_whole(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    moved = batch().to(device)
    assert [tensor.device.type for tensor in (*moved.inputs.values(), moved.labels)] == [device] * 2
    assert moved.count == 5
    if device != "meta":  # where tensors have no values
        again = moved.to(device).to("cpu")
        assert torch.equal(again.inputs["ids"], batch().inputs["ids"])
        assert torch.equal(again.labels, batch().labels)
