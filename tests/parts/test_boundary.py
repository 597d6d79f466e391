"""The boundary head against plain torch, and against its own count."""

# N tokens of spans, D width

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from trivium.errors import ConfigError
from trivium.labels import IGNORED
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.transformer import build, load_weights, weights
from trivium.parts.boundary import SpanBoundaryHead
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.boundary import SpanBoundaryOptions
from trivium.parts.options.norms import RMSNormOptions

CONFIG = ModelConfig(
    width=16,
    context=8,
    vocab=30,
    encoder=Stack(layers=1),
    decoder=NoStack(),
    boundary=SpanBoundaryOptions(rows=3, size=6),
)


def test_it_is_two_normed_layers_over_both_borders_and_the_place() -> None:
    model = build(CONFIG, seed=0)
    head, generator = cast(SpanBoundaryHead, model.boundary), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    left_ND, right_ND = torch.randn(2, 4, 16, generator=generator)
    places_N, labels_N = torch.tensor([0, 1, 2, 0]), torch.tensor([3, 29, 0, IGNORED])
    tensors = {name: tensor.double() for name, tensor in head.named_parameters()}
    x = torch.cat((left_ND, right_ND, tensors["places"][places_N]), 1).double()
    for layer in ("first", "second"):
        x = F.gelu(x @ tensors[f"{layer}.weight"].T + tensors[f"{layer}.bias"])
        x = F.layer_norm(x, (16,), tensors[f"{layer}_norm.weight"], tensors[f"{layer}_norm.bias"], 1e-12)
    logits = x @ model.embedding.weight.double().T + tensors["output.project.bias"]
    expected = F.cross_entropy(logits, labels_N, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(head.nll(left_ND, right_ND, places_N, labels_N).double(), expected, rtol=1e-4, atol=1e-4)
    assert expected[3] == 0


@pytest.mark.parametrize("tie", ["all", "none"])
def test_its_vocabulary_is_the_embedding_and_is_counted_and_saved_once(tie: str) -> None:
    config = replace(CONFIG, embedding=replace(CONFIG.embedding, tie=tie))  # type: ignore[type-var]
    model = build(config, seed=0)
    assert cast(SpanBoundaryHead, model.boundary).output.project.weight is model.embedding.weight  # type: ignore[union-attr]
    assert config.parameters() == sum(parameter.numel() for parameter in model.parameters())
    # a table, two layers with their norms, a bias
    expected = 3 * 6 + (38 * 16 + 16) + (16 * 16 + 16) + 2 * 32 + 30
    assert config.costs()["boundary"].parameters == expected
    other = build(config, seed=1)
    load_weights(other, weights(model))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_its_norm_is_a_place_like_any_other() -> None:
    config = replace(CONFIG, boundary=SpanBoundaryOptions(norm=RMSNormOptions(), activation="relu"))
    model = build(config, seed=0)
    assert config.parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_only_an_encoder_has_one() -> None:
    with pytest.raises(ConfigError, match="boundary: only an encoder has read both sides of a span; set it to none"):
        ModelConfig(width=16, boundary=SpanBoundaryOptions())
    crossed = Stack(layers=1, block=Block(cross=MultiHeadOptions()))
    with pytest.raises(ConfigError, match="boundary: only an encoder"):
        ModelConfig(width=16, encoder=Stack(layers=1), decoder=crossed, boundary=SpanBoundaryOptions())


@pytest.mark.parametrize("options", [{"rows": 0}, {"size": 0}])
def test_impossible_sizes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="0 is less than 1"):
        SpanBoundaryOptions(**options)
