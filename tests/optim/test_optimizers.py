"""What every optimizer promises: skipped steps leave no trace, resumes are exact, impossible settings are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.optim.steps import NO, YES, gradients, same, small, snapshot
from trivium.errors import CheckpointError, ConfigError
from trivium.optim.groups import trainable
from trivium.optim.options import OPTIMIZERS, Adafactor, Adam, AdamW, Muon, Optim, Sgd

OPTIMS: dict[str, Optim] = {
    "adamw": AdamW(rate=0.01),
    "adamw uncorrected": AdamW(rate=0.01, correction=False),
    "adam": Adam(rate=0.01, decay=0.01),
    "muon": Muon(rate=0.02, decay=0.1, adam_decay=0.1),
    "sgd": Sgd(rate=0.1, decay=0.1),
    "sgd momentum": Sgd(rate=0.1, momentum=0.9, decay=0.1),
    "sgd nesterov": Sgd(rate=0.1, momentum=0.9, form="nesterov", decay=0.1),
    "adafactor": Adafactor(),
    "adafactor unfactored": Adafactor(factor_from=128),
}
each = pytest.mark.parametrize("optim", OPTIMS.values(), ids=OPTIMS.keys())


def test_every_optimizer_is_tested_here() -> None:
    assert {type(optim) for optim in OPTIMS.values()} == set(OPTIMIZERS.values())


@each
def test_an_unhealthy_step_moves_nothing(optim: Optim) -> None:
    model = small()
    optimizer = optim.build(model)
    for fill in (None, math.nan, math.inf, -math.inf):
        before = snapshot(model, optimizer)
        gradients(model, 1, fill)
        optimizer.step(1.0, NO)
        assert same(before, snapshot(model, optimizer))
        gradients(model, 2)
        optimizer.step(1.0, YES)
        assert not same(before, snapshot(model, optimizer))


@each
def test_a_skipped_step_leaves_no_trace_in_later_ones(optim: Optim) -> None:
    results = []
    for skip in (True, False):
        model = small()
        optimizer = optim.build(model)
        for step in range(4):
            if skip and step in (0, 2):
                gradients(model, 99, math.nan)
                optimizer.step(1.0, NO)
            gradients(model, step)
            optimizer.step(0.5, YES)
        results.append(snapshot(model, optimizer))
    assert same(*results)


@each
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_resumed_optimizer_continues_bit_for_bit(optim: Optim, at: int) -> None:
    through, first = small(), small()
    whole, half = optim.build(through), optim.build(first)
    for step in range(6):
        gradients(through, step)
        whole.step(1.0, YES)
    for step in range(at):
        gradients(first, step)
        half.step(1.0, YES)
    second = small(seed=5)
    second.load_state_dict(first.state_dict())
    resumed = optim.build(second)
    resumed.load({name: tensor.clone() for name, tensor in half.tensors().items()})
    for step in range(at, 6):
        gradients(second, step)
        resumed.step(1.0, YES)
    assert same(snapshot(through, whole), snapshot(second, resumed))


@each
def test_a_loaded_state_is_a_copy(optim: Optim) -> None:
    model = small()
    optimizer = optim.build(model)
    given = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    kept = {name: tensor.clone() for name, tensor in given.items()}
    optimizer.load(given)
    gradients(model, 0)
    optimizer.step(1.0, YES)
    assert same(given, kept)


@each
def test_a_state_of_another_shape_is_refused_by_name(optim: Optim) -> None:
    optimizer = optim.build(small())
    for name in optimizer.tensors():
        given = {**optimizer.tensors(), name: torch.zeros(3, 3, 3)}
        with pytest.raises(CheckpointError, match=rf"for {name.rpartition('.')[0]} has shape \[3, 3, 3\], not \["):
            optimizer.load(given)


def test_a_state_that_does_not_fit_is_not_loaded_in_part() -> None:
    optimizer = AdamW().build(small())
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    given = {name: tensor + 1 for name, tensor in before.items()}
    for last in (torch.zeros(3, 3, 3), None):
        given.popitem()
        wrong = given if last is None else {**given, [*before][-1]: last}
        with pytest.raises(CheckpointError):
            optimizer.load(wrong)
        assert same(before, optimizer.tensors())


@pytest.mark.parametrize("reader", ["adamw", "muon", "sgd momentum", "adafactor"])
@pytest.mark.parametrize("writer", ["adamw", "muon", "sgd", "sgd momentum", "adafactor"])
def test_the_state_of_another_optimizer_is_refused(reader: str, writer: str) -> None:
    if reader != writer:
        with pytest.raises(CheckpointError, match="another optimizer wrote it"):
            OPTIMS[reader].build(small()).load(OPTIMS[writer].build(small()).tensors())


@each
def test_a_factor_of_zero_moves_no_weight(optim: Optim) -> None:
    model = small()
    optimizer = optim.build(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    gradients(model, 0)
    optimizer.step(0.0, YES)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@each
def test_a_step_without_gradients_moves_exactly_the_decayed_weights(optim: Optim) -> None:
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = optim.build(model)
    gradients(model, 0, 0.0)
    optimizer.step(1.0, YES)
    for weight in trainable(model):
        expected = weight.decayed and not isinstance(optim, Adafactor)
        assert bool((weight.parameter < 1).all()) == expected, weight.name
        assert bool((weight.parameter == 1).all()) != expected, weight.name


@each
def test_a_weight_without_a_gradient_is_left_alone_or_only_decayed(optim: Optim) -> None:
    """A head that the objective does not use has no gradient at all."""
    model = small()
    optimizer = optim.build(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients(model, 0)
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.grad = None
    optimizer.step(1.0, YES)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (parameter.ndim < 2), name


@each
def test_a_model_with_nothing_to_train_is_refused(optim: Optim) -> None:
    model = small().requires_grad_(False)
    with pytest.raises(ConfigError, match="every weight is frozen"):
        optim.build(model)
    with pytest.raises(ConfigError, match="every weight is frozen"):
        optim.build(nn.Identity())


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": 0.0}, "rate: 0.0 is not positive"),
        ({"rate": math.nan}, "rate: nan is not positive"),
        ({"decay": -0.1}, "decay: -0.1 is less than 0"),
        ({"beta1": 1.0}, "beta1: 1.0 is not in"),
        ({"beta2": -0.1}, "beta2: -0.1 is not in"),
        ({"momentum": 1.0}, "momentum: 1.0 is not in"),
        ({"adam_rate": 0}, "adam_rate: 0 is not positive"),
        ({"head_rate": 0}, "head_rate: 0 is not positive"),
        ({"iterations": 0}, "iterations: 0 is less than 1"),
        ({"clip": 0.0}, "clip: 0.0 is not positive"),
        ({"factor_from": 0}, "factor_from: 0 is less than 1"),
        ({"form": "nesterov"}, "form: nesterov is a form of momentum, and there is none"),
    ],
)
def test_impossible_settings_are_refused(kind: type[Optim], options: dict[str, float], said: str) -> None:
    if set(options) <= {*kind.__dataclass_fields__}:  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=said):
            kind(**options)
