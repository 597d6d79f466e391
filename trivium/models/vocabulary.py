"""A trained model with a larger vocabulary: new ids get new rows, the old ones stay what they were."""

# V ids before, W ids after

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from trivium.errors import RequestError
from trivium.models.transformer import Transformer, empty, load_weights, weights

Rows = Literal["normal", "mean"]


def extend(model: Transformer, size: int, *, rows: Rows = "normal", seed: int = 0) -> Transformer:
    """A copy of `model` with `size` ids: new rows are drawn from N(0, 0.02), or are the mean of the old ones.

    Every tensor with one row per id grows, matrices and biases, encoder and decoder; what is tied stays tied.
    """
    if size < model.config.vocab:
        raise RequestError(f"the model has {model.config.vocab} ids already: its vocabulary cannot become {size}")
    larger = empty(replace(model.config, vocab=size)).to(model.device, model.embedding.weight.dtype)
    generator = torch.Generator().manual_seed(seed)
    old, new = weights(model), weights(larger)
    load_weights(
        larger,
        {
            name: tensor
            if name not in new or tensor.shape == new[name].shape
            else _grown(tensor, size, rows, generator)
            for name, tensor in old.items()
        },
    )
    larger.recompute, larger.residual_dtype = model.recompute, model.residual_dtype
    return larger.train(model.training)


def _grown(old: Tensor, size: int, rows: Rows, generator: torch.Generator) -> Tensor:
    """`old` [V, ...] with rows added up to `size`, W."""
    shape = (size - len(old), *old.shape[1:])
    if rows == "mean":
        added = old.double().mean(dim=0).expand(shape)
    elif old.dim() == 1:
        added = torch.zeros(shape)  # a bias, which training also begins at 0
    else:
        # on the CPU whatever the device: the same seed gives the same rows everywhere
        added = torch.empty(shape).normal_(0, 0.02, generator=generator)
    return torch.cat((old, added.to(old)))
