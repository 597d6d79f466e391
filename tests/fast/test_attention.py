"""Fast attention: one product, kernels and fused storage give what the plain layer gives."""

# B batch, T queries, S keys, D width

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal, cast

import pytest
import torch
from torch import Tensor, nn

from tests.fast.compare import as_near, close, context, fast_copy, outcome
from tests.kernels.launch import DEVICE, GPU, needs_triton
from tests.parts.drawing import drawn, random
from trivium.fast.attention import FastAttention
from trivium.fast.choose import for_inference
from trivium.fast.linear import FastLinear
from trivium.fast.masks import FastScoreMask
from trivium.kernels.hardware import INTERPRETED
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.masks import Mask
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.positions import AlibiOptions, BucketOptions, Position, RotaryOptions, ShawOptions
from trivium.parts.positions import Positions
from trivium.parts.site import Site

SITE = Site(width=24, context=16, heads=4, head=6, value=6)
OPTIONS = [
    MultiHeadOptions(heads=4),
    MultiHeadOptions(heads=4, bias="all"),
    MultiHeadOptions(heads=4, bias="inputs", norm="rms"),
    MultiHeadOptions(heads=4, groups=2, bias="all"),
    MultiHeadOptions(heads=4, groups=1),
    MultiHeadOptions(heads=4, head=6, value=10),
    MultiHeadOptions(heads=4, scale="none"),
]
PLACES: list[Position | None] = [None, RotaryOptions(), ShawOptions(distance=2), BucketOptions(), AlibiOptions()]


def made(options: MultiHeadOptions, site: Site = SITE, *, small: float = 0.4) -> MultiHeadAttention:
    part = drawn(options.build(site))
    assert isinstance(part, MultiHeadAttention)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.mul_(small)
    return part


def placed(position: Position | None, options: MultiHeadOptions) -> Positions:
    value = options.value or 6
    return (
        Positions()
        if position is None
        else drawn(position.build(Site(width=24, context=16, heads=4, head=6, value=value)))
    )


def calls(
    plain: nn.Module, fast: nn.Module, mask: Mask, position: Positions | None = None, source: Tensor | None = None
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Both layers, each with the mask of its floor."""
    return (
        lambda x: cast(Tensor, plain(x, context(x, mask, position, None, source))),
        lambda x: cast(Tensor, fast(x, context(x, mask, position, FastScoreMask, source))),
    )


PADDING = torch.tensor([[True] * 7, [False, False, True, True, True, True, True]])


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("position", PLACES, ids=repr)
@pytest.mark.parametrize(
    "mask", [Mask(), Mask(causal=True), Mask(causal=True, padding=PADDING), Mask(causal=True, window=3)], ids=range(4)
)
def test_values_and_gradients_are_those_of_the_plain_layer(
    options: MultiHeadOptions, position: Position | None, mask: Mask
) -> None:
    plain = made(options).double()
    part, x_BTD, scheme = fast_copy(plain), random(2, 7, 24).double(), placed(position, options).double()
    assert type(part) is FastAttention
    slow, quick = calls(plain, part, mask, scheme)
    tables = list(scheme.parameters())
    found, expected = (outcome(way, x_BTD, [*one.parameters(), *tables]) for way, one in ((quick, part), (slow, plain)))
    close(found, expected, 1e-12)
    part.fuse_qkv()
    with torch.no_grad():
        close([quick(x_BTD)], [slow(x_BTD)], 1e-12)
    close(outcome(quick, x_BTD, [*part.parameters(), *tables]), expected, 1e-12)


@pytest.mark.parametrize("bias", ["all", "none"])
@pytest.mark.parametrize("width", [24, 10])
def test_cross_attention_is_that_of_the_plain_layer(bias: Literal["all", "none"], width: int) -> None:
    plain = made(MultiHeadOptions(heads=4, bias=bias), Site(width=24, context=16, source=width)).double()
    part, x_BTD, source_BSD = fast_copy(plain), random(2, 5, 24).double(), random(2, 9, width, seed=1).double()
    assert isinstance(part, FastAttention)
    source_BSD.requires_grad_()
    slow, quick = calls(plain, part, Mask(), None, source_BSD)
    found, expected = (
        outcome(way, x_BTD, [source_BSD, *one.parameters()]) for way, one in ((quick, part), (slow, plain))
    )
    close(found, expected, 1e-12)
    part.fuse_qkv()
    assert (part.fused is None) == (width != 24)
    with torch.no_grad():
        close([quick(x_BTD)], [slow(x_BTD)], 1e-12)


@pytest.mark.parametrize("position", PLACES, ids=repr)
@pytest.mark.parametrize("crossed", [False, True])
def test_on_a_cpu_training_in_bfloat16_is_as_near_to_float64_as_the_plain_layer(
    position: Position | None, crossed: bool
) -> None:
    """It attends in float32 there, whose backward pass is the faster one."""
    site = Site(width=24, context=16, source=24) if crossed else SITE
    options = MultiHeadOptions(heads=4, bias="all")
    plain, scheme = made(options, site), placed(position, options)
    part, x_BTD = fast_copy(plain), random(2, 7, 24)
    source_BSD = random(2, 9, 24, seed=1) if crossed else None
    slow, quick = calls(plain, part, Mask(causal=True), scheme, source_BSD)
    wide, right = copy.deepcopy(plain).double(), copy.deepcopy(scheme).double()
    exact = calls(wide, wide, Mask(causal=True), right, None if source_BSD is None else source_BSD.double())[0]
    results = [
        outcome(way, x, list(one.parameters()), autocast=x.dtype == torch.float32)
        for way, x, one in ((quick, x_BTD, part), (slow, x_BTD, plain), (exact, x_BTD.double(), wide))
    ]
    assert [one.dtype for one in results[0]] == [one.dtype for one in results[1]]
    as_near(results[0], results[1], results[2])


@pytest.mark.parametrize("bias", ["all", "none"])
@pytest.mark.parametrize("groups", [0, 2])
def test_the_fused_storage_holds_the_weights_themselves(bias: Literal["all", "none"], groups: int) -> None:
    part = fast_copy(made(MultiHeadOptions(heads=4, bias=bias, groups=groups)))
    assert isinstance(part, FastAttention)
    before = {name: parameter.detach().clone() for name, parameter in part.named_parameters()}
    part.fuse_qkv()
    fused = part.fused_qkv
    assert fused is not None
    part.fuse_qkv()
    assert part.fused_qkv is fused  # done already
    assert all(torch.equal(parameter, before[name]) for name, parameter in part.named_parameters())
    layers = (part.query, part.key, part.value)
    assert torch.equal(fused.weight, torch.cat([layer.weight for layer in layers]))
    with torch.no_grad():
        part.key.weight.mul_(2)  # in place: the storage sees it
    assert torch.equal(fused.weight, torch.cat([layer.weight for layer in layers]))
    assert part.fused_qkv is fused


def test_the_fused_storage_is_left_where_the_layers_have_other_weights_or_something_around_them() -> None:
    x_BTD, mask = random(2, 5, 24), Mask(causal=True)

    def changed(change: Callable[[MultiHeadAttention], object]) -> FastAttention:
        plain = made(MultiHeadOptions(heads=4, bias="all"))
        part = fast_copy(plain)
        assert isinstance(part, FastAttention)
        part.fuse_qkv()
        slow, quick = calls(plain, part, mask)
        with torch.no_grad():
            before = quick(x_BTD)
            change(plain)
            change(part)
            close([quick(x_BTD)], [slow(x_BTD)], 1e-5)
            assert not torch.allclose(quick(x_BTD), before)
        return part

    def other_weights(part: MultiHeadAttention) -> None:
        part.value.weight = nn.Parameter(random(24, 24, seed=9))

    def other_data(part: MultiHeadAttention) -> None:
        part.query.bias.data = random(24, seed=9)

    def other_layer(part: MultiHeadAttention) -> None:
        part.key = cast(FastLinear, drawn(nn.Linear(24, 24), seed=5))

    def hooked(part: MultiHeadAttention) -> object:
        return part.value.register_forward_hook(lambda module, given, out: out * 2)

    for change in (other_weights, other_data, other_layer, hooked):
        assert changed(change).fused_qkv is None


@pytest.mark.parametrize("gone", ["copied", "moved"])
def test_copies_and_moves_drop_the_fused_storage(gone: str) -> None:
    plain = made(MultiHeadOptions(heads=4, bias="all"))
    part = fast_copy(plain)
    assert isinstance(part, FastAttention)
    for_inference(part)
    assert part.fused_qkv is not None
    other = copy.deepcopy(part) if gone == "copied" else part.to(torch.float64)
    assert other.fused is None
    storages = [layer.weight.untyped_storage().data_ptr() for layer in (other.query, other.key, other.value)]
    assert len(set(storages)) == 3
    assert (part.fused_qkv is not None) == (gone == "copied")
    x_BTD = random(2, 5, 24).to(other.out.weight.dtype)
    slow, quick = calls(plain.to(x_BTD.dtype), other, Mask(causal=True))
    with torch.no_grad():
        close([quick(x_BTD)], [slow(x_BTD)], 1e-6)


WAYS = ["eager", "compiled"]


@needs_triton
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["bare", "no bias", "turned", "normed", "frozen", "grouped", "shaw"])
def test_one_product_has_the_values_and_gradients_of_three(
    case: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, and in bfloat16 with a kernel that lays the gradients together where there is something to gain."""
    from trivium.kernels import parted

    cuts: list[int] = []
    whole = parted.cut

    def counted(packed: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        cuts.append(1)
        return whole(packed, bias, heads)

    monkeypatch.setattr(parted, "cut", counted)
    options = MultiHeadOptions(
        heads=4,
        groups=2 if case == "grouped" else 0,
        bias="none" if case == "no bias" else "all",
        norm="rms" if case == "normed" else "none",
    )
    schemes: dict[str, Position] = {"turned": RotaryOptions(), "shaw": ShawOptions(distance=3)}
    position = schemes.get(case)
    plain = made(options, Site(width=64, context=24, heads=4, head=16, value=16), small=0.2).to(DEVICE).train()
    scheme = Positions()
    if position is not None:
        scheme = drawn(position.build(Site(width=64, context=24, heads=4, head=16, value=16))).to(DEVICE)
    if case == "frozen":
        plain.query.requires_grad_(False)
        plain.key.requires_grad_(False)
        plain.value.requires_grad_(False)
    part, x_BTD = fast_copy(plain), random(2, 24, 64, seed=7).to(DEVICE)
    slow, quick = calls(plain, part, Mask(causal=True), scheme)
    torch._dynamo.reset()
    run = torch.compile(quick, backend="aot_eager", fullgraph=True) if way == "compiled" else quick
    wide = copy.deepcopy(plain).double()
    exact = outcome(
        calls(wide, wide, Mask(causal=True), copy.deepcopy(scheme).double())[0], x_BTD.double(), list(wide.parameters())
    )
    for autocast in (False, True):
        found = outcome(run, x_BTD, list(part.parameters()), autocast=autocast)
        expected = outcome(slow, x_BTD, list(plain.parameters()), autocast=autocast)
        assert [one.dtype for one in found] == [one.dtype for one in expected]
        as_near(found, expected, exact)
        assert bool(cuts) == (autocast and case in ("bare", "shaw"))
    torch._dynamo.reset()


@needs_triton
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_trained_bias_goes_through_our_kernel_with_the_gradients_of_the_plain_layer(
    causal: bool, autocast: bool
) -> None:
    length = 64 if INTERPRETED else 114
    site = Site(width=32, context=128, heads=2, head=16, value=16, causal=causal)
    plain, scheme = (
        made(MultiHeadOptions(heads=2), site, small=0.2).to(DEVICE).train(),
        drawn(BucketOptions().build(site)).to(DEVICE),
    )
    part, x_BTD = fast_copy(plain), random(2, length, 32, seed=7).to(DEVICE)
    padding = torch.arange(length, device=DEVICE).expand(2, -1) < torch.tensor([[length], [length - 9]], device=DEVICE)
    mask = Mask(causal=causal, padding=padding)
    assert cast(FastScoreMask, context(x_BTD, mask, scheme, FastScoreMask).mask).flash
    slow, quick = calls(plain, part, mask, scheme)
    tables = list(scheme.parameters())
    found = outcome(quick, x_BTD, [*part.parameters(), *tables], autocast=autocast)
    expected = outcome(slow, x_BTD, [*plain.parameters(), *tables], autocast=autocast)
    close(found, expected, 3e-2 if autocast else 5e-3 if GPU else 1e-4)
