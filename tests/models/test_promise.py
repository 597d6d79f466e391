"""The promise over every part: what is hooked, wrapped or replaced on any layer is honoured, plain and fast."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.battery import lively
from tests.cases import CASES, PARTS, Case
from tests.models import promise
from trivium.config import digest
from trivium.fast.choose import FAST, PLAIN, plain
from trivium.models.transformer import weights
from trivium.parts.init import Gpt
from trivium.parts.mixers import Context

FAMILIES = ("llama-mini", "bert-mini", "t5-mini")
DISTINCT = list({digest(replace(case.config, init=Gpt())): case for case in reversed(PARTS)}.values())
# by default every part in one family, each with the others under --full
FIRST = {case.name.split(": ")[-1]: case.name for case in reversed(DISTINCT)}

every = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name in FIRST.values() else pytest.mark.full, id=case.name)
        for case in DISTINCT
    ],
)
one_per_family = pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in FAMILIES], ids=lambda case: case.name
)
floors = pytest.mark.parametrize("floor", promise.FLOORS)
# the plain floor calls its layers by its text: every part there only under --full
fast_floors = pytest.mark.parametrize(
    "floor", [pytest.param(floor, marks=pytest.mark.full if floor == "plain" else ()) for floor in promise.FLOORS]
)
few_ways = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "forward hook" else pytest.mark.full) for way in promise.WAYS]
)


@every
@fast_floors
@few_ways
def test_all_layers_changed_at_once_are_called(case: Case, floor: str, way: str) -> None:
    promise.check_changes(case, floor, way)


@one_per_family
@floors
@pytest.mark.parametrize("way", promise.WAYS)
def test_every_change_of_all_layers_is_honoured(case: Case, floor: str, way: str) -> None:
    promise.check_changes(case, floor, way)


@every
@fast_floors
def test_every_layer_hooked_alone_is_called(case: Case, floor: str) -> None:
    """One product of several layers must not be taken when any of them has a hook."""
    small = Case(name=case.name, config=promise.alone(case.config))
    promise.check_changes(small, floor, "forward hook", alone=True)


@every
@fast_floors
def test_backward_hooks_of_all_layers_change_the_gradients_before_them(case: Case, floor: str) -> None:
    promise.check_backward_hooks(case, floor)


@one_per_family
@floors
def test_a_backward_hook_of_every_layer_alone_changes_the_gradients_before_it(case: Case, floor: str) -> None:
    promise.check_backward_hooks(Case(name=case.name, config=promise.alone(case.config)), floor, alone=True)


@every
@fast_floors
def test_every_module_is_entered_through_its_forward(case: Case, floor: str) -> None:
    promise.check_every_module_is_called(case, floor)


DEFAULT = [("for training", "forward hook")]  # to compile takes seconds


@one_per_family
@pytest.mark.parametrize(
    ("floor", "way"),
    [
        pytest.param(floor, way, marks=() if (floor, way) in DEFAULT else pytest.mark.full)
        for floor in promise.FLOORS
        for way in promise.WAYS
    ],
)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_compiled_model_honours_changes(case: Case, floor: str, way: str, moment: str) -> None:
    promise.check_compiled_hooks(case, floor, way, moment)


@pytest.mark.full  # tests/fast/test_choose.py does it by default, in float64
@every
@pytest.mark.parametrize("floor", ["for training", "for inference"])
def test_a_fast_model_computes_what_the_plain_one_does(case: Case, floor: str) -> None:
    model, _ = promise.fast_is_plain(case, floor)
    assert any(type(module) in PLAIN for module in model.modules())
    assert not any(type(module) in FAST for module in model.modules())


@pytest.mark.full  # tests/fast/test_choose.py does it for some of them by default
@every
def test_plain_takes_all_back(case: Case) -> None:
    """Classes, values, layout and attributes: nothing of the fast floor is left."""
    before = lively(case.config, dtype=torch.float32)
    model = copy.deepcopy(before)
    promise.FLOORS["for training"](model)
    promise.FLOORS["for inference"](model)
    plain(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]
    for ours, theirs in zip(model.modules(), before.modules(), strict=True):
        assert ours.__dict__.keys() == theirs.__dict__.keys()
    own, other = weights(model), weights(before)
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in other)
    assert len({one.data_ptr() for one in own.values()}) == len(own)


def test_the_checks_find_a_layer_that_is_bypassed() -> None:
    """A part that reads the weight of its layer is what the promise forbids."""
    case = next(case for case in CASES if case.name == "decoder: plain")

    class Bypassing(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.up, self.down = part.up, part.down

        def forward(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
            up, down = self.up, self.down
            assert isinstance(up, nn.Module)
            assert isinstance(down, nn.Module)
            result: torch.Tensor = down(nn.functional.gelu(nn.functional.linear(x, up.weight, up.bias)))  # type: ignore[arg-type]
            return result

    def bypass(model: nn.Module) -> None:
        decoder = model.get_submodule("decoder.blocks.0")
        decoder.feedforward = Bypassing(decoder.get_submodule("feedforward"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(promise.FLOORS, "wrong", bypass)
        with pytest.raises(AssertionError):
            promise.check_changes(case, "wrong", "forward hook", alone=True)
        with pytest.raises(AssertionError):
            promise.check_every_module_is_called(case, "wrong")
