"""The validation text, every token scored once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.packing import Rows
from trivium.models.transformer import Transformer
from trivium.objectives.causal import Objective


class Result(NamedTuple):
    """Mean loss in nats per token, and bits per byte of text."""

    loss: float
    bits_per_byte: float


@torch.inference_mode()
def validate(
    model: Transformer, objective: Objective, compute: Callable[[Batch], Tensor], rows: Rows, *, limit: int, micro: int
) -> Result:
    """Score up to `limit` rows (0: all) in evaluation mode; the order and the random numbers are fixed."""
    model.eval()
    number = min(len(rows), limit) if limit else len(rows)
    total, count = 0.0, 0
    for start in range(0, number, micro):
        rng = np.random.default_rng(start)
        batch = objective.inputs(rows.take(np.arange(start, min(start + micro, number))), rng)
        total += float(compute(batch.to(model.device)))
        count += batch.count
    loss = total / max(1, count)
    # exact when all rows are scored; with a limit, at the split's own bytes per token
    bytes_per_token = rows.stream.text_bytes / max(1, len(rows.stream) - 1)
    return Result(loss, loss / math.log(2) / bytes_per_token)
