"""How a sub-layer joins the residual stream (spec: architecture §3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from trivium.parts.dropout import dropout
from trivium.parts.norms import Norm
from trivium.parts.site import Cost, Site


class Connection(Protocol):
    """The two ends of a sub-layer: what it reads, and how its output returns to the stream."""

    def enter(self, x: Tensor) -> Tensor: ...
    def leave(self, x: Tensor, y: Tensor) -> Tensor: ...


class Residual(Protocol):
    """The options of a residual scheme."""

    def build(self, site: Site, norm: Norm, rate: float) -> nn.Module: ...
    def final(self, site: Site, norm: Norm) -> nn.Module: ...
    def cost(self, site: Site, norm: Norm) -> Cost: ...
    def final_cost(self, site: Site, norm: Norm) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Pre:
    """`x + drop(F(norm(x)))` and one norm after the stack: GPT-2, T5, LLaMA."""

    def build(self, site: Site, norm: Norm, rate: float) -> nn.Module:
        return PreConnection(norm.build(site), rate)

    def final(self, site: Site, norm: Norm) -> nn.Module:
        return norm.build(site)

    def cost(self, site: Site, norm: Norm) -> Cost:
        return norm.cost(site)

    def final_cost(self, site: Site, norm: Norm) -> Cost:
        return norm.cost(site)


@dataclass(frozen=True, kw_only=True, slots=True)
class Post:
    """`norm(x + drop(F(x)))` and no final norm: Vaswani, GPT-1, BERT."""

    def build(self, site: Site, norm: Norm, rate: float) -> nn.Module:
        return PostConnection(norm.build(site), rate)

    def final(self, site: Site, norm: Norm) -> nn.Module:
        return nn.Identity()

    def cost(self, site: Site, norm: Norm) -> Cost:
        return norm.cost(site)

    def final_cost(self, site: Site, norm: Norm) -> Cost:
        return Cost()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandwich:
    """`x + norm(drop(F(norm(x))))` and one norm after the stack: CogView, Gemma 2."""

    def build(self, site: Site, norm: Norm, rate: float) -> nn.Module:
        return SandwichConnection(norm.build(site), norm.build(site), rate)

    def final(self, site: Site, norm: Norm) -> nn.Module:
        return norm.build(site)

    def cost(self, site: Site, norm: Norm) -> Cost:
        return norm.cost(site).plus(norm.cost(site))

    def final_cost(self, site: Site, norm: Norm) -> Cost:
        return norm.cost(site)


RESIDUALS: dict[str, type[Residual]] = {"pre": Pre, "post": Post, "sandwich": Sandwich}


class PreConnection(nn.Module):
    def __init__(self, norm: nn.Module, rate: float) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = rate

    def enter(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result

    def leave(self, x: Tensor, y: Tensor) -> Tensor:
        return x + dropout(y, self.dropout, self.training)


class PostConnection(nn.Module):
    def __init__(self, norm: nn.Module, rate: float) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = rate

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.norm(x + dropout(y, self.dropout, self.training))
        return result.to(x.dtype)  # autocast makes every norm float32


class SandwichConnection(nn.Module):
    def __init__(self, before: nn.Module, after: nn.Module, rate: float) -> None:
        super().__init__()
        self.norm = before
        self.after = after
        self.dropout = rate

    def enter(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result

    def leave(self, x: Tensor, y: Tensor) -> Tensor:
        after: Tensor = self.after(dropout(y, self.dropout, self.training))
        return x + after.to(x.dtype)
