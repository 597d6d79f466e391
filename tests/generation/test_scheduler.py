"""The scheduler with a device of plain lists: no sequence is lost, starved, answered twice or mixed up."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.generation.scheduler import Plan, Scheduler


@dataclass
class Held:
    """What a slot of the played device holds."""

    id: int
    read: int = 0


@dataclass
class Device:
    """Carries out plans on plain lists and refuses what no device could do."""

    prompts: dict[int, int]
    slots: list[Held | None]
    drawn: dict[int, int] = field(default_factory=dict)
    began: list[int] = field(default_factory=list)  # in the order of their first piece
    waited: dict[int, int] = field(default_factory=dict)  # rounds from the submission to the first token

    def run(self, plan: Plan) -> None:
        for slot in plan.freed:
            self.slots[slot] = None
        for source, target in plan.moves:
            assert self.slots[source] is not None
            self.slots[target], self.slots[source] = self.slots[source], None
        for piece in plan.pieces:
            assert piece.slot < plan.rows
            assert piece.start < piece.stop
            if piece.start == 0:
                self.slots[piece.slot] = Held(piece.id)
                self.began.append(piece.id)
            held = self.slots[piece.slot]
            assert held is not None
            assert held.id == piece.id
            assert held.read == piece.start
            held.read = piece.stop
            assert piece.last == (piece.stop == self.prompts[piece.id])
            if piece.last:
                self.drawn[piece.id] = 1
        for share in plan.shares:
            held = self.slots[share.slot]
            assert share.slot < plan.rows
            assert 1 <= share.steps <= plan.steps
            assert held is not None
            assert held.id == share.id
            assert held.read == self.prompts[share.id]
            self.drawn[share.id] += share.steps
        assert len({share.slot for share in plan.shares}) == len(plan.shares)
        assert len({piece.slot for piece in plan.pieces}) == len(plan.pieces)


@dataclass(frozen=True)
class Asked:
    """A request of a test: when it comes, its sizes, and after how many of its tokens it leaves (0: at its limit)."""

    round: int
    prompt: int
    tokens: int
    leaves: int


def run(asked: list[Asked], **options: Any) -> tuple[Device, list[Plan], dict[int, int]]:
    """Play all of it; every round is checked. Gives the device, the plans, and the tokens each sequence ended with."""
    scheduler = Scheduler(**options)
    device = Device({id: one.prompt for id, one in enumerate(asked)}, [None] * scheduler.slots)
    coming = sorted(range(len(asked)), key=lambda id: asked[id].round)
    plans: list[Plan] = []
    ended: dict[int, int] = {}
    left: set[int] = set()
    now = 0
    while coming or scheduler.busy:
        while coming and asked[coming[0]].round <= now:
            id = coming.pop(0)
            scheduler.submit(id, asked[id].prompt, asked[id].tokens)
            device.waited[id] = -now
        plan = scheduler.plan()
        assert plan.works or not scheduler.busy or coming
        assert plan.rows <= scheduler.slots
        device.run(plan)
        for id, count in list(device.drawn.items()):
            assert count <= asked[id].tokens
            if device.waited[id] <= 0:
                device.waited[id] += now + 1
            if count == asked[id].tokens:
                ended[id] = count
            elif asked[id].leaves and count >= asked[id].leaves and id not in left:
                scheduler.leave(id)
                left.add(id)
                ended[id] = count
        plans.append(plan)
        now += 1
        assert now < 200_000
    return device, plans, ended


requests = st.builds(
    Asked,
    round=st.integers(0, 30),
    prompt=st.one_of(st.integers(1, 20), st.integers(1, 700)),
    tokens=st.integers(1, 40),
    leaves=st.one_of(st.just(0), st.integers(1, 40)),
)
options = st.fixed_dictionaries(
    {
        "slots": st.sampled_from([1, 2, 3, 8, 64, 512]),
        "chunk": st.sampled_from([2, 16, 64]),
        "whole": st.sampled_from([64, 1000]),
        "burst": st.integers(1, 5),
        "shrinks": st.booleans(),
    }
)


@given(st.lists(requests, min_size=1, max_size=120), options)
@settings(max_examples=60, deadline=None)
def test_every_sequence_is_read_once_and_drawn_to_its_end(asked: list[Asked], options: dict[str, Any]) -> None:
    device, plans, ended = run(asked, **options)
    assert ended.keys() == set(range(len(asked)))
    order = sorted(range(len(asked)), key=lambda id: asked[id].round)
    assert device.began == order  # first come, first served
    for plan in plans:
        read = sum(piece.stop - piece.start for piece in plan.pieces)
        # a sequence that decodes waits for one chunk at most
        decoding = {share.id for share in plan.shares} - {piece.id for piece in plan.pieces}
        assert read <= (options["chunk"] if decoding else options["whole"])


def full_house(**changes: Any) -> tuple[Device, list[Plan], dict[int, int]]:
    """A closed batch of 1,500 sequences of very different lengths in 512 slots."""
    asked = [Asked(0, 1 + (7 * number) % 23, 1 + (number * number) % 97, 0) for number in range(1500)]
    return run(asked, **{"slots": 512, "burst": 1, **changes})


@pytest.mark.parametrize("group", [1, 64])
def test_production_size_loses_nobody_and_shrinks(group: int) -> None:
    device, plans, ended = full_house(group=group, least=16)
    assert len(ended) == 1500
    assert device.drawn == {number: 1 + (number * number) % 97 for number in range(1500)}
    rows = [plan.rows for plan in plans]
    assert rows[0] == 512
    assert rows[-1] <= 32
    assert rows == sorted(rows, reverse=True)
    for plan in plans:
        used = len({share.slot for share in plan.shares} | {piece.slot for piece in plan.pieces})
        if plan.rows > 32 and plan.rows < 512:
            assert used * 2 > plan.rows - 1  # the rows that are computed are never twice those that are needed


def test_an_executor_that_cannot_shrink_keeps_its_rows_and_moves_nobody() -> None:
    _, plans, ended = full_house(shrinks=False)
    assert len(ended) == 1500
    assert {plan.rows for plan in plans} == {512}
    assert not any(plan.moves for plan in plans)


def test_a_group_joins_when_there_are_slots_for_all_of_it() -> None:
    _, plans, _ = full_house(group=64)
    joining = [sum(piece.start == 0 for piece in plan.pieces) for plan in plans]
    assert all(count >= 64 for count in joining[:5] if count)


def test_a_long_prompt_holds_up_nobody_by_more_than_a_chunk() -> None:
    asked = [Asked(0, 10, 200, 0) for _ in range(8)] + [Asked(5, 4000, 5, 0), Asked(6, 10, 5, 0)]
    device, plans, _ = run(asked, slots=64, chunk=512, burst=4)
    reading = [plan for plan in plans if any(piece.id == 8 for piece in plan.pieces)]
    assert all(sum(piece.stop - piece.start for piece in plan.pieces) <= 512 for plan in reading)
    assert len(reading) in (8, 9)
    assert all({share.id for share in plan.shares} >= set(range(8)) for plan in reading)
    assert device.waited[9] <= 2  # a short prompt does not wait for a whole long one


def test_prompts_are_read_whole_where_nobody_decodes() -> None:
    _, plans, _ = run([Asked(0, 4000, 5, 0)], slots=8, chunk=512)
    assert plans[0].pieces[0].stop == 4000


def test_who_does_not_fit_waits_and_is_not_overtaken() -> None:
    held: list[tuple[int, int]] = []

    def fits(rows: int, longest: int) -> bool:
        held.append((rows, longest))
        return rows * longest <= 1000

    asked = [Asked(0, 100, 100, 0), Asked(0, 100, 100, 0), Asked(0, 600, 200, 0), Asked(0, 1, 1, 0)]
    device, _, ended = run(asked, slots=8, fits=fits)
    assert device.began == [0, 1, 2, 3]
    assert len(ended) == 4
    assert device.waited[2] > 90  # until the others had left
    assert held


def test_those_who_leave_while_they_wait_are_never_read() -> None:
    scheduler = Scheduler(slots=1)
    for id in range(3):
        scheduler.submit(id, 2, 5)
    scheduler.leave(1)
    scheduler.leave(7)  # unknown: nothing happens
    began = []
    while scheduler.busy:
        began += [piece.id for piece in scheduler.plan().pieces]
    assert began == [0, 2]


def test_those_whose_round_has_failed_are_first_again_with_all_of_their_tokens() -> None:
    scheduler = Scheduler(slots=2)
    for id in range(3):
        scheduler.submit(id, 4, 2)
    scheduler.plan()
    for id in (1, 0):
        scheduler.leave(id)
        scheduler.submit(id, 4, 2, first=True)
    assert (scheduler.waiting, scheduler.live) == (3, 0)
    drawn: dict[int, int] = {}
    while scheduler.busy:
        plan = scheduler.plan()
        for piece in plan.pieces:
            drawn[piece.id] = drawn.get(piece.id, 0) + piece.last
        for share in plan.shares:
            drawn[share.id] += share.steps
    assert drawn == {0: 2, 1: 2, 2: 2}
    assert list(drawn) == [0, 1, 2]


def test_it_needs_no_torch() -> None:
    code = "import sys, trivium.generation.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
