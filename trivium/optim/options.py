"""The settings of optimizers and averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from trivium.config import at_least, fraction
from trivium.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from trivium.optim.averaging import Average
    from trivium.optim.stepper import Optimizer


class Optim(Protocol):
    """The options of an optimizer."""

    @property
    def rate(self) -> float: ...
    @property
    def states(self) -> float:
        """How many numbers it keeps for a parameter, at least."""

    def build(self, model: nn.Module) -> Optimizer: ...


def check(rate: float, decay: float, prefix: str = "") -> None:
    """Refuse a rate that does not move the weights and a decay that lets them grow."""
    if not rate > 0:
        raise ConfigError(f"{prefix}rate: {rate} is not positive; try 1e-3")
    at_least(f"{prefix}decay", decay, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay on matrices and embeddings."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    decay_embeddings: bool = True
    correction: bool = True  # of the moments, which start at zero; BERT's has none

    def __post_init__(self) -> None:
        _check(self)

    @property
    def states(self) -> float:
        return 2.0

    def build(self, model: nn.Module) -> Optimizer:
        from trivium.optim.adam import AdamStepper
        from trivium.optim.groups import trainable

        return AdamStepper(self, trainable(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """AdamW except that decay, if any, is added to the gradient (L2), and so shrinks with the second moment."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    decay_embeddings: bool = True
    correction: bool = True

    def __post_init__(self) -> None:
        _check(self)

    @property
    def states(self) -> float:
        return 2.0

    def build(self, model: nn.Module) -> Optimizer:
        from trivium.optim.adam import AdamStepper
        from trivium.optim.groups import trainable

        return AdamStepper(self, trainable(model))


def _check(options: AdamW | Adam) -> None:
    check(options.rate, options.decay)
    at_least("eps", options.eps, 0)
    fraction("beta1", options.beta1)
    fraction("beta2", options.beta2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Muon:
    """Momentum made orthogonal for hidden matrices; embeddings, head and vectors follow AdamW at `adam_rate`."""

    rate: float = 0.02
    momentum: float = 0.95
    decay: float = 0.0
    scale: Literal["original", "adamw"] = "original"  # rate x sqrt(max(1, R/C)), or x 0.2 sqrt(max(R, C))
    iterations: int = 5
    adam_rate: float = 3e-3
    head_rate: float = 3e-3
    adam_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check(self.rate, self.decay)
        check(self.adam_rate, self.adam_decay, "adam_")
        check(self.head_rate, self.adam_decay, "head_")
        at_least("eps", self.eps, 0)
        for name in ("momentum", "beta1", "beta2"):
            fraction(name, getattr(self, name))
        at_least("iterations", self.iterations, 1)

    @property
    def states(self) -> float:
        return 1.0  # at least: vectors and embeddings have two

    def build(self, model: nn.Module) -> Optimizer:
        from trivium.optim.muon import build_muon

        return build_muon(self, model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """A step against the gradient, or against a sum of gradients of which `momentum` remains at each step."""

    rate: float = 0.1
    momentum: float = 0.0
    form: Literal["plain", "nesterov"] = "plain"  # nesterov: the gradient is counted once more
    decay: float = 0.0  # decoupled, on matrices and embeddings

    def __post_init__(self) -> None:
        check(self.rate, self.decay)
        fraction("momentum", self.momentum)
        if self.form == "nesterov" and not self.momentum:
            raise ConfigError("form: nesterov is a form of momentum, and there is none; set momentum=0.9")

    @property
    def states(self) -> float:
        return 1.0 if self.momentum else 0.0

    def build(self, model: nn.Module) -> Optimizer:
        from trivium.optim.groups import trainable
        from trivium.optim.sgd import SgdStepper

        return SgdStepper(self, trainable(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class Adafactor:
    """Steps relative to the size of each weight, from R + C numbers of state for a matrix; no momentum, no decay."""

    rate: float = 0.01  # the plateau of T5's inverse square root; its fine-tuning is constant at 1e-3
    clip: float = 1.0  # the largest root mean square of an update before the rate
    scale: Literal["weight", "none"] = "weight"  # weight: the rate times the root mean square of the weight
    least: float = 1e-3  # what a weight counts for at least, so that zeros can move
    eps: float = 1e-30  # added to squared gradients
    factor_from: int = 1  # both dimensions are at least this long, or a matrix keeps every second moment (T5: 128)

    def __post_init__(self) -> None:
        check(self.rate, 0.0)
        for name in ("clip", "least", "eps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not positive; leave it at its default")
        at_least("factor_from", self.factor_from, 1)

    @property
    def states(self) -> float:
        return 0.0  # rows and columns

    def build(self, model: nn.Module) -> Optimizer:
        from trivium.optim.adafactor import AdafactorStepper
        from trivium.optim.groups import trainable

        return AdafactorStepper(self, trainable(model))


class Averaging(Protocol):
    """The options of an average."""

    def build(self, model: nn.Module) -> Average: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAverage:
    """The weights as they are trained."""

    def build(self, model: nn.Module) -> Average:
        from trivium.optim.averaging import Unaveraged

        return Unaveraged()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ema:
    """An exponential moving average: `decay` of the old average remains at each of its updates."""

    decay: float = 0.999
    every: int = 1  # steps between two updates of the average
    warmup: Literal["ratio", "none"] = "ratio"  # ratio: at most (1 + t) / (10 + t) remains at update t of the average

    def __post_init__(self) -> None:
        fraction("decay", self.decay)
        at_least("every", self.every, 1)

    def remains(self, step: int) -> float:
        """What remains of the old average at `step`: a function of the step alone, so a resume needs nothing else."""
        if step % self.every:
            return 1.0
        count = step // self.every
        return min(self.decay, (1 + count) / (10 + count)) if self.warmup == "ratio" else self.decay

    def build(self, model: nn.Module) -> Average:
        from trivium.optim.averaging import MovingAverage

        return MovingAverage(self, model)


AVERAGES: dict[str, type[Averaging]] = {"none": NoAverage, "ema": Ema}


OPTIMIZERS: dict[str, type[Optim]] = {
    "adamw": AdamW,
    "muon": Muon,
    "sgd": Sgd,
    "adam": Adam,
    "adafactor": Adafactor,
}
