"""Which weights are decayed, over every model of the battery."""

from __future__ import annotations

import pytest

from tests.battery import CASES, Case
from trivium.models.transformer import build
from trivium.optim.groups import trainable
from trivium.optim.optimizers import AdamW, AdamWStepper


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_groups_hold_every_trainable_weight_exactly_once(case: Case) -> None:
    model = build(case.config)
    optimizer = AdamW(decay=0.1).build(model)
    assert isinstance(optimizer, AdamWStepper)
    groups = {
        group["weight_decay"]: {id(parameter) for parameter in group["params"]}
        for group in optimizer.inner.param_groups
    }
    decayed, spared = groups[0.1], groups.get(0.0, set())
    assert not decayed & spared
    assert decayed | spared == {id(parameter) for parameter in model.parameters()}
    assert decayed == {id(parameter) for parameter in model.parameters() if parameter.ndim >= 2}
    assert sum(len(group["params"]) for group in optimizer.inner.param_groups) == len(decayed | spared)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kinds_go_by_role(case: Case) -> None:
    for weight in trainable(build(case.config)):
        if weight.parameter.ndim < 2:
            expected = "vector"
        elif weight.name == "embedding.weight" or weight.name.endswith(".table"):
            expected = "embedding"
        else:
            expected = "head" if weight.name.startswith("output.") else "matrix"
        assert weight.kind == expected, weight.name


def test_frozen_weights_are_left_out() -> None:
    model = build(CASES[0].config)
    model.embedding.weight.requires_grad_(False)
    names = [weight.name for weight in trainable(model)]
    assert "embedding.weight" not in names
    assert len(names) == len(list(model.parameters())) - 1
