"""The one linear layer of the package: it knows its role, so that init, decay and adapters need no name patterns."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from trivium.parts.declared import ZEROS, Declared, matrix
from trivium.parts.roles import Role


class Linear(nn.Linear):
    """`x Wᵀ + b`, [..., inputs] to [..., outputs]: `nn.Linear` with a role, filled by the model's init part."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, role: Role, head: int = 0) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.role: Role = role
        self.head = head  # the size of one head where the outputs are queries: T5 folds its scale into their init

    @property
    def declares(self) -> Mapping[str, Declared]:
        return {"weight": matrix(self.role, self.head), "bias": ZEROS}

    def reset_parameters(self) -> None:
        """Nothing: `init` decides, once, for the whole model."""


def give_bias(layer: nn.Module, bias: Tensor | None) -> None:
    """Let a layer add this bias: a parameter is a parameter of it, any other tensor a buffer, which is not trained."""
    if hasattr(layer, "bias"):
        del layer.bias
    if bias is None or isinstance(bias, nn.Parameter):
        layer.register_parameter("bias", bias)
    else:
        layer.register_buffer("bias", bias)
