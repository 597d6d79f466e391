"""Numbers on their way to the host: read in order, waited for only where that must be, every loss by its name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trivium.parts.losses import Loss
from trivium.training.readout import AsyncCopy, ReadOut
from trivium.training.step import StepResult, Update, step_result

ONE = torch.ones(())


def update(step: int, result: StepResult | None = None, **counts: int) -> Update:
    result = result or StepResult(torch.ones(4), {"tokens": "tokens"})
    return Update(step, result, {"tokens": 5, **counts}, 0.1)


def test_numbers_are_read_in_order_and_at_once_where_there_is_nothing_to_wait_for() -> None:
    pending = ReadOut()
    for step in (1, 2, 3):
        result = step_result(ONE * step, ONE / step, torch.tensor(step != 2), {"tokens": Loss(ONE * 10 * step)})
        pending.add(update(step, result))
    found = [(read.update.step, read.loss, read.norm, read.finite, read.losses) for read in pending.read(2)]
    assert found == [
        (1, 1, 1, True, {"tokens": 2}),
        (2, 2, 0.5, False, {"tokens": 4}),
        (3, 3, pytest.approx(1 / 3), True, {"tokens": 6}),
    ]
    assert pending.read() == []


def test_every_loss_is_divided_by_its_own_count() -> None:
    losses = {"tokens": Loss(ONE * 10), "balance": Loss(ONE * 5, weight=0.01), "sentences": Loss(ONE * 6, "sentences")}
    pending = ReadOut()
    pending.add(update(1, step_result(ONE, ONE, ONE > 0, losses), sentences=3))
    pending.add(update(2, step_result(ONE, ONE, ONE > 0, losses), sentences=0))  # no label, and no 0/0
    assert [read.losses for read in pending.read()] == [
        {"tokens": 2.0, "balance": 1.0, "sentences": 2.0},
        {"tokens": 2.0, "balance": 1.0, "sentences": 6.0},
    ]


class Slow(AsyncCopy):
    """A copy from a device that has finished so many steps."""

    def __init__(self, step: int, done: list[int]) -> None:
        super().__init__(torch.ones(4))
        self.step, self.done = step, done

    def has_arrived(self, *, waited: bool = False) -> bool:
        return self.step <= self.done[-1]

    def read(self) -> list[float]:
        self.done.append(max(self.step, self.done[-1]))
        return super().read()


def test_the_host_waits_only_for_what_is_too_long_ago() -> None:
    pending, done = ReadOut(), [0]
    lags = []
    for step in range(1, 30):
        pending._coming.append((update(step), Slow(step, done)))
        if step % 5 == 0:
            done.append(step)  # a device that is fast now and then
        pending.read(2)
        lags.append(len(pending._coming))
    assert max(lags) == 2
    assert lags[4] == 0
    assert [read.update.step for read in pending.read()] == [28, 29]


class Elsewhere(Tensor):
    """Numbers on a device without events, which does all that it has to do when somebody reads one."""

    is_cpu = False


def test_a_device_without_events_is_waited_for_now_and_then() -> None:
    pending = ReadOut()
    read = []
    for step in range(1, 10):
        pending.add(update(step, StepResult(torch.ones(4).as_subclass(Elsewhere), {"tokens": "tokens"})))
        read.append([one.update.step for one in pending.read(2)])
    assert read == [[], [], [1, 2, 3], [], [], [4, 5, 6], [], [], [7, 8, 9]]
