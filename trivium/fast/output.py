"""The loss over a large vocabulary in chunks: training makes its gradients on the way, a CPU keeps few logits."""

# N positions that are looked at, D width, V vocabulary

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from trivium.fast.linear import is_fast
from trivium.kernels.hardware import working
from trivium.kernels.loss import summed as fused_loss
from trivium.parts.output import MaskedOutput, SoftmaxOutput, VocabularyOutput

# On the CPU the loss goes in chunks of 16 MB of logits: malloc hands blocks above 32 MB back to the system, and then
# every step pays for their pages again (3 % of a step with 10M parameters). Below 256 rows a chunk, adding up the
# gradient of a large output matrix costs more than that.
_CHUNK, _LEAST = 1 << 22, 256


class _Fast(VocabularyOutput):
    """What both outputs override."""

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, smoothing: float = 0.0, *, summed: bool = False
    ) -> Tensor:
        if labels is None or not summed or not self.applies(hidden):
            return super().forward(hidden, labels, smoothing, summed=summed)
        project = self.project
        assert is_fast(project)
        states, weight, bias = self.before(hidden), project.weight, project.bias
        return fused_loss(states, weight, bias, labels, cap=self.cap, smoothing=smoothing, narrow=project.fp8)

    def applies(self, hidden: Tensor) -> bool:
        """Whether the output is its matrix, and gradients need no scale against underflow as they do in float16."""
        return is_fast(self.project) and working(hidden) != torch.float16

    def cross_entropy(self, hidden_ND: Tensor, labels_N: Tensor, smoothing: float) -> Tensor:
        rows = _CHUNK // max(1, getattr(self.project, "out_features", 1))  # of a wrapper nobody knows
        if hidden_ND.device.type != "cpu" or not _LEAST <= rows < len(labels_N):
            return super().cross_entropy(hidden_ND, labels_N, smoothing)
        pairs = zip(torch.split(hidden_ND, rows), torch.split(labels_N, rows), strict=True)
        return torch.cat([super(_Fast, self).cross_entropy(*pair, smoothing) for pair in pairs])


@final
class FastSoftmaxOutput(_Fast, SoftmaxOutput):
    """`SoftmaxOutput` in chunks."""


@final
class FastMaskedOutput(_Fast, MaskedOutput):
    """`MaskedOutput` in chunks."""
