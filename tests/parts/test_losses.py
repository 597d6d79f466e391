"""Named losses: how a part's output is told apart, how layers add up, and what is differentiated."""

from __future__ import annotations

import torch

from trivium.parts.losses import Loss, WithLosses, merge, split, total


def test_a_part_without_losses_returns_a_tensor() -> None:
    x = torch.randn(2, 3)
    assert split(x) == (x, {})
    losses = {"balance": Loss(torch.tensor(2.0))}
    assert split(WithLosses(x, losses)) == (x, losses)


def test_equal_names_of_several_layers_add_their_sums() -> None:
    one = {"balance": Loss(torch.tensor(2.0), "tokens", 0.01), "z": Loss(torch.tensor(5.0))}
    other = {"balance": Loss(torch.tensor(3.0), "tokens", 0.01)}
    merged = merge(one, other)
    assert list(merged) == ["balance", "z"]
    assert merged["balance"] == Loss(torch.tensor(5.0), "tokens", 0.01)
    assert one["balance"].sum == 2, "the layers keep theirs"


def test_the_total_divides_every_sum_by_its_own_count() -> None:
    losses = {
        "tokens": Loss(torch.tensor(12.0, requires_grad=True)),
        "sentences": Loss(torch.tensor(3.0, requires_grad=True), "sentences", 0.5),
        "shown": Loss(torch.tensor(99.0), "never counted", 0.0),
    }
    found = total(losses, {"tokens": 6, "sentences": torch.tensor(2.0)})
    assert found.item() == 12 / 6 + 0.5 * 3 / 2
    found.backward()  # type: ignore[no-untyped-call]
    assert losses["tokens"].sum.grad == 1 / 6
    assert losses["sentences"].sum.grad == 0.25
