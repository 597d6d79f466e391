"""A parameter that nobody fills is refused by its name, wherever the model is built; one that its part fills is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import trivium as tv
from trivium.errors import ConfigError
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build, empty, load_weights, shapes_of, weights
from trivium.parts.declared import VECTOR, matrix
from trivium.parts.init import Gpt2
from trivium.parts.mixers import Context
from trivium.parts.site import Cost, Site

EXPERTS, HIDDEN = 3, 8


class Experts(nn.Module):
    """One tensor for all experts; the first of them answers."""

    declares: ClassVar = {"up": VECTOR, "down": VECTOR}  # as the constructor fills them

    def __init__(self, width: int, fill: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, width, HIDDEN))
        self.down = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, width))
        with torch.no_grad():
            fill(self.up)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        result: Tensor = (x @ self.up[0]).relu() @ self.down[0]
        return result


class Drawn(Experts):
    declares: ClassVar = {"up": matrix("up"), "down": VECTOR}


class Borrowed(nn.Module):
    """Layers of torch, which fill themselves, and a part that is not used."""

    declares: ClassVar = {"nothing": VECTOR}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, width))
        self.table = nn.Embedding(4, width)
        self.norm = nn.LayerNorm(width)
        self.nothing = nn.Parameter(torch.empty(0, width))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        result: Tensor = self.norm(self.inner(x)) + self.table.weight.mean(0)
        return result


@dataclass(frozen=True, kw_only=True)
class Feed:
    make: Callable[[int], nn.Module] = field(compare=False)

    def build(self, site: Site) -> nn.Module:
        return self.make(site.width)

    def cost(self, site: Site) -> Cost:
        return Cost()


def config(make: Callable[[int], nn.Module], **others: Any) -> ModelConfig:
    block = Block(feedforward=Feed(make=make))
    return replace(ModelConfig(width=16, context=8, vocab=20, decoder=Stack(layers=2, block=block)), **others)


def one_by_one(weight: Tensor) -> None:
    for expert in weight:
        nn.init.xavier_uniform_(expert)


def set_to(target: Any, source: Tensor) -> Any:
    return target.set_(source)


def drawn(width: int) -> nn.Module:
    made = Experts(width, torch.zero_)
    made.up = nn.Parameter(torch.randn(EXPERTS, width, HIDDEN))
    return made


FILLED: dict[str, Callable[[int], nn.Module]] = {
    "in place": lambda width: Experts(width, lambda weight: weight.normal_(0, 0.1)),
    "by nn.init": lambda width: Experts(width, nn.init.kaiming_uniform_),
    "but not on meta": lambda width: Experts(width, nn.init.orthogonal_),
    "cut off": lambda width: Experts(width, nn.init.trunc_normal_),
    "expert by expert": lambda width: Experts(width, one_by_one),
    "by a copy": lambda width: Experts(width, lambda weight: weight.copy_(torch.ones(()))),
    "into an output": lambda width: Experts(
        width, lambda weight: torch.exp(torch.zeros_like(weight), out=weight.detach())
    ),
    "by torch.randn": drawn,
    "by torch.rand_like": lambda width: Experts(width, lambda weight: weight.copy_(torch.rand_like(weight))),
    "and then scaled": lambda width: Experts(width, lambda weight: weight.uniform_().mul_(0.1).clamp_(max=0.05)),
    "beside nothing": lambda width: Experts(
        width, lambda weight: weight.copy_(torch.cat([torch.empty(0, *weight.shape[1:]), torch.ones_like(weight)]))
    ),
    "in memory that shrinks": lambda width: Experts(
        width, lambda weight: set_to(weight, torch.zeros(10_000).resize_(weight.shape))
    ),
    "as a table": lambda width: Drawn(width, lambda weight: None),
    "layers of torch": Borrowed,
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_parameter_that_nobody_fills_is_refused_by_name(device: str) -> None:
    words = (
        r"nobody fills the parameter decoder\.blocks\.0\.feedforward\.up \[3, 16, 8\] \(and 1 more\); "
        r"fill it in the constructor of its module, or declare it as a matrix or a table"
    )
    with pytest.raises(ConfigError, match=words):
        tv.build(config(lambda width: Experts(width, lambda weight: None)), device=device)


COMPUTED: dict[str, Callable[..., Tensor]] = {
    "scaled": lambda *shape: torch.empty(shape) * 0.02,
    "scaled in place": lambda *shape: torch.empty(shape).mul_(0.02),
    "a legacy tensor": lambda *shape: torch.Tensor(*shape),
    "a clone": lambda *shape: torch.empty(shape).clone(),
    "in bf16": lambda *shape: torch.empty(shape).to(torch.bfloat16),
    "in bf16 and back": lambda *shape: torch.empty(shape).bfloat16().float(),
    "expanded": lambda *shape: torch.empty(1, *shape[1:]).expand(shape).contiguous(),
    "stacked": lambda *shape: torch.stack([torch.zeros(shape[1:]), *torch.empty(shape[0] - 1, *shape[1:])]),
    "one of several": lambda *shape: torch.empty(shape).max(0, keepdim=True)[0].repeat(shape[0], 1, 1),
    "copied": lambda *shape: torch.zeros(shape).copy_(torch.empty(shape)),
    "written into an output": lambda *shape: torch.exp(torch.empty(shape), out=torch.zeros(shape)),
    "added": lambda *shape: torch.ones(shape).add_(torch.empty(shape)),
    "grown": lambda *shape: torch.zeros(1).resize_(shape),
    "grown like another": lambda *shape: torch.zeros(1).resize_as_(torch.ones(shape)),
    "the memory of another": lambda *shape: set_to(torch.zeros(1), torch.empty(shape)),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", COMPUTED)
def test_what_is_computed_from_it_is_refused_too(way: str, device: str) -> None:
    class Computed(Experts):
        def __init__(self, width: int) -> None:
            super().__init__(width, torch.zero_)
            self.up = nn.Parameter(COMPUTED[way](EXPERTS, width, HIDDEN))

    with pytest.raises(
        ConfigError, match=r"nobody fills the parameter decoder\.blocks\.0\.feedforward\.up \[3, 16, 8\]"
    ):
        build(config(Computed), device=device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_vector_that_nobody_fills_is_refused_too(device: str) -> None:
    class Scaled(nn.Module):
        declares: ClassVar = {"gain": VECTOR}

        def __init__(self, width: int) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(width).new_empty(width))

        def forward(self, x: Tensor, ctx: Context) -> Tensor:
            return x * self.gain

    with pytest.raises(ConfigError, match=r"decoder\.blocks\.0\.feedforward\.gain \[16\]"):
        build(config(Scaled), device=device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", FILLED)
def test_a_part_may_fill_its_own_parameters(way: str, device: str) -> None:
    model = build(config(FILLED[way]), device=device)
    assert model.device.type == device
    if device == "cpu":
        for name, parameter in model.named_parameters():
            assert parameter.isfinite().all(), name
            assert not parameter.numel() or float(parameter.detach().abs().max()) < 10, name


def test_an_init_from_outside_may_fill_them() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Everything(Gpt2):
        def apply(self, model: nn.Module, **given: Any) -> None:
            Gpt2.apply(self, model, **given)
            for module in model.modules():
                if isinstance(module, Experts):
                    nn.init.constant_(module.up, 0.5)

    @dataclass(frozen=True, kw_only=True)
    class Looking(Everything):
        def apply(self, model: nn.Module, **given: Any) -> None:
            Gpt2.apply(self, model, **given)
            assert float(next(model.parameters()).detach().abs().sum()) > 0  # the meta device cannot say
            Everything.apply(self, model, **given)

    for init in (Everything(), Looking()):
        asked = config(lambda width: Experts(width, lambda weight: None), init=init)
        assert (build(asked).get_parameter("decoder.blocks.1.feedforward.up") == 0.5).all()
        assert build(asked, device="meta").device.type == "meta"


def test_weights_that_come_from_a_file_need_nobody_to_fill_them() -> None:
    """A run of such a part, which was trained all the same, opens as before."""
    asked = config(lambda width: Experts(width, lambda weight: None))
    stored = {name: torch.ones(tensor.shape) for name, tensor in weights(shapes_of(asked)).items()}
    model = empty(asked)
    load_weights(model, stored)
    assert all((parameter == 1).all() for parameter in model.parameters())


def test_what_a_part_draws_depends_on_the_seed_alone() -> None:
    def weights(seed: int) -> list[Tensor]:
        model: Transformer = build(config(drawn), seed=seed)
        return [parameter.detach() for parameter in model.parameters()]

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = weights(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    for one, other in zip(first, weights(0), strict=True):
        assert torch.equal(one, other)
    assert not all(torch.equal(one, other) for one, other in zip(first, weights(1), strict=True))
    model = build(config(drawn), seed=0)
    own = model.get_parameter("decoder.blocks.0.feedforward.up").detach().flatten()
    table = model.embedding.weight.detach().flatten() / 0.02  # drawn first by the init
    assert not torch.allclose(own[:64], table[:64])
