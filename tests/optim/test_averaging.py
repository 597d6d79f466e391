"""Averaged weights against torch's own and closed forms; swaps and resumes bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.optim.steps import NO, YES, same, small
from trivium.errors import CheckpointError, ConfigError
from trivium.models.transformer import weights
from trivium.optim.averaging import Average
from trivium.optim.options import AVERAGES, Ema, NoAverage


def drift(model: nn.Module, seed: int) -> None:
    """Move every weight a little, as a step of training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def scalar(value: float) -> tuple[nn.Module, nn.Parameter]:
    model = nn.ParameterList([nn.Parameter(torch.tensor([value]))])
    return model, next(model.parameters())


def path(options: Ema, values: list[float]) -> Iterator[float]:
    """The average after each step on which a weight, 0 at first, has these values."""
    model, weight = scalar(0.0)
    average = options.build(model)
    for step, value in enumerate(values, start=1):
        with torch.no_grad():
            weight.fill_(value)
        average.follow(average.share(step), YES)
        yield average.tensors()["0"].item()


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999])
def test_the_average_is_torchs_own(decay: float) -> None:
    model = small()
    average = Ema(decay=decay, warmup="none").build(model)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
    reference.update_parameters(model)  # its first update copies
    for step in range(1, 30):
        drift(model, step)
        average.follow(average.share(step), YES)
        reference.update_parameters(model)
    for name, parameter in reference.module.named_parameters():
        torch.testing.assert_close(average.tensors()[name], parameter.detach(), atol=1e-6, rtol=1e-5)


def test_a_constant_is_approached_geometrically() -> None:
    expected = [3 * (1 - 0.9**step) for step in range(1, 21)]
    assert [*path(Ema(decay=0.9, warmup="none"), [3.0] * 20)] == pytest.approx(expected, rel=1e-5)


def test_early_on_less_of_the_old_average_remains() -> None:
    held, expected = 0.0, []
    values = [math.sin(step) for step in range(1, 41)]
    for count, value in enumerate(values, start=1):
        kept = min(0.8, (1 + count) / (10 + count))
        held = kept * held + (1 - kept) * value
        expected.append(held)
    assert [*path(Ema(decay=0.8), values)] == pytest.approx(expected, abs=1e-5)


def test_between_its_updates_an_average_stays() -> None:
    values = [float(step) for step in range(1, 13)]
    seen = [*path(Ema(decay=0.5, every=3, warmup="none"), values)]
    thirds = [*path(Ema(decay=0.5, warmup="none"), values[2::3])]
    assert seen[:2] == [0.0, 0.0]
    assert seen[2:] == [value for value in thirds for _ in range(3)][:10]


def test_an_unhealthy_step_leaves_the_average_bit_for_bit() -> None:
    model = small()
    average = Ema(decay=0.5).build(model)
    drift(model, 0)
    average.follow(average.share(1), YES)
    before = copied(average.tensors())
    drift(model, 1)
    average.follow(average.share(2), NO)
    assert same(before, average.tensors())
    average.follow(average.share(2), YES)
    assert not same(before, average.tensors())


@pytest.mark.parametrize("fails", [False, True])
def test_swapped_weights_come_back_bit_for_bit(fails: bool) -> None:
    model = small()
    average = Ema(decay=0.5).build(model)
    drift(model, 0)
    average.follow(average.share(1), YES)
    own, averaged = copied(weights(model)), copied(average.tensors())
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    try:
        with average.swapped(model):
            assert same(copied(dict(model.named_parameters())), averaged)
            assert memory == [parameter.data_ptr() for parameter in model.parameters()]
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert same(own, weights(model))
    assert same(averaged, average.tensors())
    assert memory == [parameter.data_ptr() for parameter in model.parameters()]


def test_a_resumed_average_continues_bit_for_bit() -> None:
    options, model = Ema(decay=0.9, every=2), small()
    through = options.build(model)
    for step in range(1, 6):
        drift(model, step)
        through.follow(through.share(step), YES)
    saved, weights_then = copied(through.tensors()), copied(weights(model))
    second = small(seed=3)
    resumed = options.build(second)
    second.load_state_dict(weights_then, strict=False)
    resumed.load(saved)
    for step in range(6, 12):
        for each, average in ((model, through), (second, resumed)):
            drift(each, step)
            average.follow(average.share(step), YES)
    assert same(through.tensors(), resumed.tensors())


def test_the_average_holds_every_distinct_trainable_weight_in_float32() -> None:
    tied = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}).to(torch.bfloat16)
    tied["b"].weight = tied["a"].weight
    tied["a"].bias.requires_grad_(False)
    average = Ema(decay=0.999, warmup="none").build(tied)
    assert {name: tensor.dtype for name, tensor in average.tensors().items()} == {
        "a.weight": torch.float32,
        "b.bias": torch.float32,
    }
    with torch.no_grad():
        tied.get_parameter("b.bias").fill_(1.0)
    start = average.tensors()["b.bias"].clone()
    average.follow(average.share(1), YES)  # a share of 0.001 would vanish in bfloat16
    torch.testing.assert_close(average.tensors()["b.bias"], start + 0.001 * (1 - start))


def test_an_average_is_a_copy_of_what_it_was_given() -> None:
    model = small()
    average = Ema().build(model)
    given = copied(average.tensors())
    kept = copied(given)
    average.load(given)
    drift(model, 0)
    average.follow(average.share(1), YES)
    assert same(given, kept)


def test_an_average_begins_again_from_the_weights_that_were_loaded() -> None:
    model = small()
    average = Ema().build(model)
    model.load_state_dict(small(seed=9).state_dict())
    average.reset()
    assert same(average.tensors(), copied(dict(model.named_parameters())))


def test_a_checkpoint_that_does_not_fit_is_refused_and_none_of_it_loaded() -> None:
    average = Ema().build(small())
    before = copied(average.tensors())
    last = [*before][-1]
    given = {name: tensor + 1 for name, tensor in before.items()}
    for wrong, said in (
        ({name: tensor for name, tensor in given.items() if name != last}, f"has no averaged weight {last}"),
        ({**given, last: torch.zeros(2, 2)}, rf"averaged weight {last} has shape \[2, 2\], not"),
    ):
        with pytest.raises(CheckpointError, match=said):
            average.load(wrong)
        assert same(before, average.tensors())


def test_without_an_average_there_is_nothing_to_keep_or_swap() -> None:
    model = small()
    average: Average = NoAverage().build(model)
    own = copied(weights(model))
    average.follow(average.share(1), YES)
    average.reset()
    average.load({})
    with average.swapped(model):
        assert same(own, weights(model))
    assert average.tensors() == {}


def test_impossible_settings_are_refused() -> None:
    for options, said in (({"decay": 1.0}, "decay: 1.0 is not in"), ({"every": 0}, "every: 0 is less than 1")):
        with pytest.raises(ConfigError, match=said):
            Ema(**options)
    assert set(AVERAGES.values()) == {NoAverage, Ema}


def test_a_compiled_average_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, counter = torch.compile, CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", lambda function, **more: compiled(function, backend=counter, **more))
    model = small()
    one, other = Ema(decay=0.9).build(model), Ema(decay=0.9).build(model)
    other.compile()
    for step, healthy in enumerate((YES, NO, YES, YES), 1):
        drift(model, step)
        for average in (one, other):
            average.follow(average.share(step), healthy)
        for name, tensor in one.tensors().items():
            torch.testing.assert_close(other.tensors()[name], tensor, rtol=1e-6, atol=1e-7)
    assert counter.frame_count == 1


def test_more_models_than_the_compiler_has_programs_for_are_averaged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **more: compiled(function, backend="eager", **more))
    for size in range(1, 13):
        model = nn.Linear(size, size)
        average = Ema(decay=0.5, warmup="none").build(model)
        average.compile()
        start = model.weight.detach().clone()
        drift(model, 0)
        average.follow(average.share(1), YES)
        torch.testing.assert_close(average.tensors()["weight"], (start + model.weight.detach()) / 2)
    torch._dynamo.reset()
