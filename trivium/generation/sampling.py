"""From scores to the next token: pure functions on logits, in the order of the spec (inspection §1).

Repetition penalty, temperature, top-k, top-p, min-p, draw.
"""

# B rows, V vocabulary

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.generation.checks import require_number, require_whole
from trivium.kernels.hardware import can_launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen; the defaults draw from the model's own distribution."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    min_p: float = 0.0  # 0 keeps all
    repetition_penalty: float = 1.0  # above 1 makes tokens that were already seen less likely

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, 0, 1_000_000, "0 is greedy, try 0.8")
        require_whole("top_k", self.top_k, 0, None, "0 keeps every token")
        require_number("top_p", self.top_p, 0, 1, "1 keeps every token", above=True)
        require_number("min_p", self.min_p, 0, 1, "0 keeps every token")
        # beyond these scores could overflow; 1.1 is strong already
        require_number("repetition_penalty", self.repetition_penalty, 0.01, 100, "1 is no penalty")

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always chosen, so that nothing has to be drawn."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1


def penalise(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Positive logits of seen tokens divided by the penalty, negative ones multiplied by it (CTRL)."""
    punished = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, punished, logits_BV)


def heat(logits_BV: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature, shifted so that the highest is 0: a tiny temperature cannot overflow."""
    shifted = logits_BV - logits_BV.amax(-1, keepdim=True)
    return shifted / max(temperature, 1e-30)  # float32 would round anything much smaller to 0


def keep_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """All but the k highest logits set to minus infinity; ties with the k-th stay; 0 keeps all."""
    if not 0 < k < logits_BV.shape[-1]:
        return logits_BV
    least_B1 = logits_BV.topk(k, dim=-1).values[..., -1:]
    return logits_BV.masked_fill(logits_BV < least_B1, -math.inf)


def keep_top_p(logits_BV: Tensor, p: float) -> Tensor:
    """The smallest set with mass at least p, the token that crosses p included; 1 keeps all."""
    if p >= 1:
        return logits_BV
    # stable: which of two equal tokens stays must not depend on the batch or the device
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    mass_BV = sorted_BV.softmax(-1)
    drop_sorted_BV = mass_BV.cumsum(-1) - mass_BV >= p  # the mass before a token already suffices
    drop_sorted_BV[..., 0] = False
    drop_BV = torch.zeros_like(drop_sorted_BV).scatter(-1, order_BV, drop_sorted_BV)
    return logits_BV.masked_fill(drop_BV, -math.inf)


def keep_min_p(logits_BV: Tensor, p: float) -> Tensor:
    """The tokens at least p times as probable as the likeliest one; 0 keeps all."""
    if p <= 0:
        return logits_BV
    least_B1 = logits_BV.amax(-1, keepdim=True) + math.log(p)
    return logits_BV.masked_fill(logits_BV < least_B1, -math.inf)


def by_kernel(logits_BV: Tensor) -> bool:
    """Whether ranks are found without a sort, by `kernels/rank.py`: the same ids stay, up to rounding at p."""
    able = can_launch(logits_BV) and logits_BV.dtype == torch.float32
    return able and _proven(logits_BV.device)


@cache
def _proven(device: torch.device) -> bool:
    """Whether that kernel can be built here and keeps what the sort keeps, tried once."""
    logits_BV = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).mul(3).to(device)
    asked = ((20, 0.9, 0.01), (0, 0.5, 0.0), (7, 1.0, 0.05))
    try:
        from trivium.kernels.rank import ranked  # triton is there with CUDA only

        settings_3B = torch.tensor([(k, p, math.log(least) if least else -math.inf) for k, p, least in asked]).t()
        found_BV = ranked(logits_BV, *settings_3B.to(device))
    except Exception as error:  # whatever a compiler raises: there is another way
        warnings.warn(f"top-k and top-p by sorting: their kernel cannot be used ({error})", stacklevel=2)
        return False
    rows = zip(logits_BV[:, None], asked, strict=True)
    plain = torch.cat([keep_min_p(keep_top_p(keep_top_k(row, k), p), least) for row, (k, p, least) in rows])
    if torch.equal(found_BV, plain):
        return True
    warnings.warn("top-k and top-p by sorting: their kernel keeps other ids here", stacklevel=2)
    return False


def distribution(logits_BV: Tensor, seen_BV: Tensor | None, sampling: Sampling) -> Tensor:
    """The probabilities to draw from; `seen` is True at ids that already occurred, needed only for the penalty."""
    if sampling.penalises:
        assert seen_BV is not None
        logits_BV = penalise(logits_BV, seen_BV, sampling.repetition_penalty)
    if sampling.greedy:
        return F.one_hot(logits_BV.argmax(-1), logits_BV.shape[-1]).to(logits_BV.dtype)
    logits_BV = heat(logits_BV, sampling.temperature)
    if (sampling.top_k or sampling.top_p < 1) and by_kernel(logits_BV):
        from trivium.kernels.rank import ranked  # triton is there with CUDA only

        least = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        asked = (min(sampling.top_k, logits_BV.shape[-1]), sampling.top_p, least)
        return ranked(logits_BV, *(logits_BV.new_full((len(logits_BV),), value) for value in asked)).softmax(-1)
    logits_BV = keep_top_k(logits_BV, sampling.top_k)
    logits_BV = keep_top_p(logits_BV, sampling.top_p)
    return keep_min_p(logits_BV, sampling.min_p).softmax(-1)


# Ids whose probabilities are added up together, where there are many: a sum over all of them at once is one long chain
# on a GPU (114 of 309 us for 64 rows of GPT-2), and took one core of a CPU 0.5 to 0.7 ms for eight rows, not 0.26.
_PIECE, _MANY = 256, 1 << 16


def draw(probabilities_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The ids [B] where each row's cumulated probability passes its uniform number in [0, 1): inverse CDF."""
    rows, vocab = probabilities_BV.shape
    # float32 sums over 50k ids lose the tail; mps has no float64
    wide = torch.float32 if probabilities_BV.device.type == "mps" else torch.float64
    uniform_B1 = uniform_B.to(wide).to(probabilities_BV.device)[:, None]
    if probabilities_BV.device.type == "cpu" and rows * vocab < _MANY:
        total_BV = probabilities_BV.to(wide).cumsum(-1)
        return _passing(total_BV, uniform_B1 * total_BV[:, -1:]).squeeze(-1)
    pieces_BNK = F.pad(probabilities_BV, (0, -vocab % _PIECE)).view(rows, -1, _PIECE)
    total_BN = pieces_BNK.sum(-1, dtype=wide).cumsum(-1)
    target_B1 = uniform_B1 * total_BN[:, -1:]
    piece_B1 = _passing(total_BN, target_B1)
    before_B1 = F.pad(total_BN, (1, 0)).gather(1, piece_B1)
    inside_BK = pieces_BNK.gather(1, piece_B1[..., None].expand(-1, -1, _PIECE))[:, 0].to(wide).cumsum(-1)
    return (piece_B1 * _PIECE + _passing(inside_BK, target_B1 - before_B1)).squeeze(-1)


def _passing(total_BN: Tensor, target_B1: Tensor) -> Tensor:
    """The first place of each row whose running total is more than the target."""
    last_B1 = total_BN[:, -1:]
    # strictly below the whole, however it was rounded: what has no probability is never drawn
    below_B1 = torch.minimum(target_B1, torch.nextafter(last_B1, torch.zeros_like(last_B1)))
    return torch.searchsorted(total_BN, below_B1, right=True)


class Uniforms:
    """The random numbers of one row, a function of (seed, sample) only: whatever else is in the batch."""

    BLOCK = 64  # torch.rand gives other numbers in other sizes, so the size is part of the sequence

    def __init__(self, seed: int, sample: int) -> None:
        # hashed: neighbouring seeds and samples must not give related streams
        mixed = hashlib.sha256(f"sampling {seed}/{sample}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "big"))
        self._ready: list[float] = []

    def next(self) -> float:
        """The next number in [0, 1)."""
        if not self._ready:
            self._ready = torch.rand(self.BLOCK, generator=self._generator, dtype=torch.float64).tolist()
        return self._ready.pop()

    def take(self, count: int) -> list[float]:
        """The next so many."""
        return [self.next() for _ in range(count)]
