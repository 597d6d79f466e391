"""Attention against its formula written out, torch's own module, and itself with repeated weights."""

# B batch, T queries, S keys, H heads, E head size, D width

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.errors import ConfigError
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.masks import Mask, ScoreMask
from trivium.parts.mixers import Context
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.positions import BucketOptions, RotaryOptions, ShawOptions
from trivium.parts.positions import Positions
from trivium.parts.site import Site

SITE = Site(width=24, context=16)
NOTHING, CAUSAL = Mask(), Mask(causal=True)


def random(*shape: int, seed: int = 0) -> Tensor:
    """In float64: what differs is then more than rounding."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(options: MultiHeadOptions, site: Site = SITE, *, seed: int = 0) -> MultiHeadAttention:
    part = cast(MultiHeadAttention, options.build(site).double())
    with torch.no_grad():
        for index, (name, parameter) in enumerate(part.named_parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed + index) * 0.4 + (1.0 if "norm" in name else 0.0))
    return part.eval()


def context(x_BTD: Tensor, mask: Mask = NOTHING, position: Positions | None = None, **given: Any) -> Context:
    """That of a layer without a cache."""
    position, at, length = position or Positions(), torch.arange(x_BTD.shape[1])[None], x_BTD.shape[1]
    prepared = position.prepare(at, at)
    scores = ScoreMask(mask, length, length, x_BTD.device, position.bias(prepared))
    return Context(mask=scores, position=position, prepared=prepared, at=at, **given)


def attend(
    part: nn.Module,
    x_BTD: Tensor,
    mask: Mask = NOTHING,
    position: Positions | None = None,
    source_BSD: Tensor | None = None,
) -> Tensor:
    given: dict[str, Any] = {}
    if source_BSD is not None:
        across = ScoreMask(Mask(), x_BTD.shape[1], source_BSD.shape[1], x_BTD.device)
        given = {"source": source_BSD, "source_mask": across}
    result: Tensor = part(x_BTD, context(x_BTD, mask, position, **given))
    return result


def root(size: int) -> float:
    return 1 / math.sqrt(size)


def naive(
    part: MultiHeadAttention,
    x_BTD: Tensor,
    allowed: Tensor,
    source_BSD: Tensor | None = None,
    scale: Callable[[int], float] = root,
) -> Tensor:
    """softmax(Q K^T / sqrt(E)) V, one head after another, in plain matrix products."""
    memory_BSD = x_BTD if source_BSD is None else source_BSD
    query, key, value = part.query(x_BTD), part.key(memory_BSD), part.value(memory_BSD)
    size, heads, mixed = part.size, query.shape[-1] // part.size, []
    groups = key.shape[-1] // size
    for head in range(heads):
        mine, group = slice(head * size, (head + 1) * size), head // (heads // groups)
        scores_BTS = query[..., mine] @ key[..., group * size : (group + 1) * size].transpose(1, 2) * scale(size)
        scores_BTS = scores_BTS.masked_fill(~allowed, -math.inf)
        mixture_BTS = scores_BTS.exp() / scores_BTS.exp().sum(-1, keepdim=True)
        mixed.append(mixture_BTS @ value.unflatten(-1, (groups, -1))[..., group, :])
    result: Tensor = part.out(torch.cat(mixed, -1))
    return result


@pytest.mark.parametrize("groups", [0, 1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_its_formula_written_out(groups: int, causal: bool) -> None:
    part = made(MultiHeadOptions(heads=4, groups=groups, head=6, bias="all"))
    x_BTD = random(2, 7, 24)
    allowed = torch.ones(7, 7, dtype=torch.bool).tril() if causal else torch.ones(7, 7, dtype=torch.bool)
    with torch.no_grad():
        torch.testing.assert_close(attend(part, x_BTD, CAUSAL if causal else NOTHING), naive(part, x_BTD, allowed))


def test_attention_in_float32_stays_within_its_rounding_of_the_formula() -> None:
    part = made(MultiHeadOptions(heads=4)).float()
    x_BTD = random(2, 7, 24).float()
    with torch.no_grad():
        for layer in (part.query, part.key, part.value, part.out):
            layer.weight.mul_(0.5)
        expected = naive(part, x_BTD, torch.ones(7, 7, dtype=torch.bool).tril())
        torch.testing.assert_close(attend(part, x_BTD, CAUSAL), expected, atol=1e-6, rtol=0)


def test_cross_attention_reads_a_source_of_another_width() -> None:
    part = made(MultiHeadOptions(heads=4), Site(width=24, context=16, source=10))
    x_BTD, source_BSD = random(2, 5, 24), random(2, 9, 10, seed=1)
    everything = torch.ones(5, 9, dtype=torch.bool)
    with torch.no_grad():
        actual = attend(part, x_BTD, source_BSD=source_BSD)
        torch.testing.assert_close(actual, naive(part, x_BTD, everything, source_BSD))
        order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(attend(part, x_BTD, source_BSD=source_BSD[:, order]), actual)


@pytest.mark.parametrize("bias", [True, False])
def test_attention_equals_torchs_own_module_with_the_same_weights(bias: bool) -> None:
    theirs = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True).double().eval()
    ours = made(MultiHeadOptions(heads=4, bias="all" if bias else "none"))
    with torch.no_grad():
        rows = [ours.query, ours.key, ours.value]
        theirs.in_proj_weight.copy_(torch.cat([layer.weight for layer in rows]))
        theirs.out_proj.weight.copy_(ours.out.weight)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([cast(Tensor, layer.bias) for layer in rows]))
            theirs.out_proj.bias.copy_(cast(Tensor, ours.out.bias))
        x_BTD = random(3, 8, 24)
        hidden = torch.ones(8, 8, dtype=torch.bool).triu(1)  # their masks mean the opposite
        expected = theirs(x_BTD, x_BTD, x_BTD, attn_mask=hidden, need_weights=False)[0]
        torch.testing.assert_close(attend(ours, x_BTD, CAUSAL), expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_attention_equals_full_attention_with_repeated_weights(groups: int) -> None:
    few, full = made(MultiHeadOptions(heads=4, groups=groups)), made(MultiHeadOptions(heads=4))
    with torch.no_grad():
        full.query.weight.copy_(few.query.weight)
        full.out.weight.copy_(few.out.weight)
        wrong = []
        for mine, theirs in ((few.key, full.key), (few.value, full.value)):
            heads = mine.weight.view(groups, 6, 24)
            theirs.weight.copy_(heads.repeat_interleave(4 // groups, dim=0).flatten(0, 1))
            wrong.append(heads.repeat(4 // groups, 1, 1).flatten(0, 1))
        x_BTD = random(2, 7, 24)
        actual = attend(few, x_BTD, CAUSAL)
        torch.testing.assert_close(actual, attend(full, x_BTD, CAUSAL))
        if groups > 1:  # groups of neighbouring heads, not every second head
            full.key.weight.copy_(wrong[0])
            full.value.weight.copy_(wrong[1])
            assert (actual - attend(full, x_BTD, CAUSAL)).abs().max() > 1e-2


def test_heads_are_cut_from_the_width_not_from_the_length() -> None:
    part = made(MultiHeadOptions(heads=4))
    x_BTD = random(2, 8, 24)
    with torch.no_grad():
        query, key, value = (layer(x_BTD).view(2, 4, 8, 6) for layer in (part.query, part.key, part.value))
        wrong = part.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        assert (attend(part, x_BTD) - wrong).abs().max() > 1e-2


def test_a_query_with_nothing_to_attend_to_gives_the_bias_alone() -> None:
    part = made(MultiHeadOptions(heads=4, bias="all"))
    padding = torch.tensor([[False, False, True, True]])
    out = attend(part, random(1, 4, 24), Mask(causal=True, padding=padding))
    assert torch.equal(out[0, :2], cast(Tensor, part.out.bias).expand(2, -1))
    out.sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in part.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all()), name


def test_normed_scores_do_not_depend_on_the_scale_of_the_query_weights() -> None:
    normed, plain = made(MultiHeadOptions(heads=4, norm="rms")), made(MultiHeadOptions(heads=4))
    x_BTD = random(2, 7, 24)
    with torch.no_grad():
        before, loose = attend(normed, x_BTD), attend(plain, x_BTD)
        normed.query.weight.mul_(100)
        plain.query.weight.mul_(100)
        torch.testing.assert_close(attend(normed, x_BTD), before, atol=1e-4, rtol=1e-4)
        assert (attend(plain, x_BTD) - loose).abs().max() > 1e-2


def test_queries_are_normed_before_they_are_turned() -> None:
    """Turning keeps the norm, so only a gain that differs between dimensions can tell the order."""
    part = made(MultiHeadOptions(heads=1, head=4, norm="rms"), Site(width=4, context=8))
    rotary = RotaryOptions().build(Site(width=4, context=8, head=4))
    x_BTD, at = random(1, 3, 4), torch.arange(3)[None]
    prepared = rotary.prepare(at, at)
    assert part.query_norm is not None
    assert part.key_norm is not None
    with torch.no_grad():
        query, key = part.query_norm(part.query(x_BTD)), part.key_norm(part.key(x_BTD))
        query, key = (rotary.rotate(tensor[:, None], prepared)[:, 0] for tensor in (query, key))
        weights = (query @ key.transpose(1, 2) / 2).softmax(-1)
        expected = part.out(weights @ part.value(x_BTD))
        torch.testing.assert_close(attend(part, x_BTD, position=rotary), expected)


def test_dropout_acts_in_training_only() -> None:
    part = made(MultiHeadOptions(heads=4, dropout=0.5))
    x_BTD = random(2, 7, 24)
    assert torch.equal(attend(part, x_BTD), attend(part, x_BTD))
    part.train()
    torch.manual_seed(0)
    assert not torch.equal(attend(part, x_BTD), attend(part, x_BTD))


def test_cost_counts_the_parameters_of_every_variant() -> None:
    for options in (
        MultiHeadOptions(heads=4),
        MultiHeadOptions(heads=4, groups=1, bias="all"),
        MultiHeadOptions(heads=3, head=10, norm="rms"),
        MultiHeadOptions(heads=6, groups=2, head=5, bias="all", norm="rms"),
    ):
        for site in (SITE, Site(width=24, context=16, source=10)):
            built = sum(parameter.numel() for parameter in options.build(site).parameters())
            assert options.cost(site).parameters == built


def test_flops_count_matrices_and_the_products_over_the_context() -> None:
    assert MultiHeadOptions(heads=4).cost(Site(width=24, context=10)).flops == 2 * 4 * 24 * 24 + 2 * 2 * 10 * 24


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": 0}, "heads: 0 is less than 1"),
        ({"heads": 4, "groups": 3}, "groups: 4 heads cannot share 3 groups evenly"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_impossible_heads_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MultiHeadOptions(**options)  # type: ignore[arg-type]


def test_a_width_that_heads_do_not_divide_is_refused_with_a_number_that_works() -> None:
    with pytest.raises(ConfigError, match="width 24 is not divisible by 5; try 4"):
        MultiHeadOptions(heads=5).cost(SITE)


@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("value", [3, 10])
def test_values_may_have_a_size_of_their_own(groups: int, value: int) -> None:
    part = made(MultiHeadOptions(heads=4, groups=groups, head=6, value=value, bias="all"))
    assert part.value.out_features == (groups or 4) * value
    assert part.out.in_features == 4 * value
    x_BTD, causal = random(2, 7, 24), torch.ones(7, 7, dtype=torch.bool).tril()
    with torch.no_grad():
        torch.testing.assert_close(attend(part, x_BTD, CAUSAL), naive(part, x_BTD, causal))


def test_without_a_scale_the_scores_are_the_bare_products() -> None:
    part = made(MultiHeadOptions(heads=4, scale="none"))
    x_BTD = random(2, 5, 24) * 0.3
    everything = torch.ones(5, 5, dtype=torch.bool)
    with torch.no_grad():
        expected = naive(part, x_BTD, everything, scale=lambda size: 1.0)
        torch.testing.assert_close(attend(part, x_BTD), expected)
        assert (naive(part, x_BTD, everything) - expected).abs().max() > 1e-2


def test_biases_of_the_inputs_leave_the_output_without_one() -> None:
    part = MultiHeadOptions(heads=4, bias="inputs").build(SITE)
    assert isinstance(part, MultiHeadAttention)
    assert [layer.bias is not None for layer in (part.query, part.key, part.value, part.out)] == [
        True,
        True,
        True,
        False,
    ]


def test_attention_with_its_weights_written_out_is_torchs() -> None:
    """Shaw's values need the weights; with tables of zero both ways must agree, masks and empty rows included."""
    options = MultiHeadOptions(heads=4, groups=2, head=6, value=8)
    part, x_BTD = made(options), random(2, 6, 24)
    shaw = ShawOptions(distance=2).build(Site(width=24, context=16, heads=4, head=6, value=8)).double()
    with torch.no_grad():
        for parameter in shaw.parameters():
            parameter.zero_()
        padding = torch.tensor([[True] * 6, [False, False, True, True, True, True]])
        for mask in (Mask(), Mask(causal=True), Mask(causal=True, padding=padding), Mask(causal=True, window=2)):
            torch.testing.assert_close(attend(part, x_BTD, mask, shaw), attend(part, x_BTD, mask))


def test_a_gradient_through_an_empty_row_is_finite() -> None:
    part = made(MultiHeadOptions(heads=4))
    mask = Mask(causal=True, padding=torch.tensor([[False, True, True]]))
    for position in (ShawOptions(distance=2), BucketOptions()):
        module = position.build(Site(width=24, context=16, heads=4, head=6, value=6)).double()
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        x_BTD = random(1, 3, 24).requires_grad_()
        attend(part, x_BTD, mask, module).square().sum().backward()  # type: ignore[no-untyped-call]
        assert x_BTD.grad is not None
        assert bool(x_BTD.grad.isfinite().all())


def test_a_window_across_two_texts_is_refused() -> None:
    with pytest.raises(ConfigError, match="window: 4 has no meaning across two texts"):
        MultiHeadOptions(window=4).cost(Site(width=24, context=16, source=24))
