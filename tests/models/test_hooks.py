"""Hooks, wrappers and parametrisations on any linear layer are honoured, whenever they were added.

The oracle is a second, plain model with the doubled weights written into it, without hooks or wrappers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import register_parametrization

from tests.oracle.copying import enliven
from trivium.fast.attention import FastAttention
from trivium.fast.bf16_copies import Bf16Copies
from trivium.fast.choose import FastOptions, fast, for_inference, for_training
from trivium.fast.hooks import any_hooks, fingerprint, has_hooks
from trivium.fast.linear import fast_layers, is_fast
from trivium.generation.banks import banks_of
from trivium.generation.continuous import Engine
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.parts.linear import Linear
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.feedforward import FeedForward, GluOptions, MlpOptions

VOCAB = 30
GREEDY = Sampling(temperature=0)
IDS = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))


def made(family: str, feed: FeedForward, bias: bool) -> Transformer:
    heads = MultiHeadOptions(heads=2, bias="all" if bias else "none")
    plain = Stack(layers=1, block=Block(attention=heads, feedforward=feed))
    crossed = Stack(layers=1, block=Block(attention=heads, feedforward=feed, cross=heads))
    model = build(
        ModelConfig(
            width=16,
            context=24,
            vocab=VOCAB,
            encoder=NoStack() if family == "decoder" else plain,
            decoder=NoStack() if family == "encoder" else crossed if family == "encoder-decoder" else plain,
        )
    )
    enliven(model, seed=1, spread=0.3)
    return model.eval()


MODELS = {
    "decoder": made("decoder", MlpOptions(), bias=True),
    "gated decoder": made("decoder", GluOptions(hidden=24), bias=False),
    "encoder": made("encoder", MlpOptions(), bias=True),
    "encoder-decoder": made("encoder-decoder", GluOptions(hidden=24), bias=True),
}
LAYERS = [
    (name, path)
    for name, model in MODELS.items()
    for path, module in model.named_modules()
    if isinstance(module, Linear) and not path.startswith("output")
]


class Doubled(nn.Module):
    """A wrapper that shows the weight and bias of the layer inside, as peft's do."""

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.base_layer = layer

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = 2 * self.base_layer(x)
        return result


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def place_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


def wrapped(model: nn.Module, path: str) -> None:
    parent, name = place_of(model, path)
    setattr(parent, name, Doubled(getattr(parent, name)))


def hooked(model: nn.Module, path: str) -> None:
    model.get_submodule(path).register_forward_hook(lambda module, given, result: 2 * result)


def hooked_before(model: nn.Module, path: str) -> None:
    model.get_submodule(path).register_forward_pre_hook(lambda module, given: (2 * given[0],))


def patched(model: nn.Module, path: str) -> None:
    layer: Any = model.get_submodule(path)
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)


def parametrised(model: nn.Module, path: str) -> None:
    register_parametrization(model.get_submodule(path), "weight", Twice())


# what doubles the output of a layer, and whether its bias is doubled with it
WAYS: dict[str, tuple[Callable[[nn.Module, str], None], bool]] = {
    "wrapper": (wrapped, True),
    "forward hook": (hooked, True),
    "forward pre-hook": (hooked_before, False),
    "patched forward": (patched, True),
    "parametrisation": (parametrised, False),
}


def doubled(model: Transformer, path: str, bias: bool) -> Transformer:
    """The same by weights alone, never laid out for decoding."""
    result = copy.deepcopy(model)
    layer = result.get_submodule(path)
    assert isinstance(layer, Linear)
    with torch.no_grad():
        layer.weight.mul_(2)
        if bias and layer.bias is not None:
            layer.bias.mul_(2)
    return result


def states(model: Transformer) -> Tensor:
    source = {"source": IDS.flip(1)} if model.config.family == "encoder-decoder" else {}
    hidden: Tensor = model(IDS, **source).hidden
    return hidden


def written(model: Transformer) -> list[tuple[int, float]]:
    source = tuple(IDS[1].tolist()) if model.config.family == "encoder-decoder" else ()
    wish = Request(ids=tuple(IDS[0].tolist()), tokens=4, sampling=GREEDY, seed=0, logprobs=1, source=source)
    return [(token.id, token.logprob) for token in stream(model, [wish], end=None)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", ["before loading", "after loading", "after a generation"])
def test_every_linear_layer_is_called(way: str, moment: str) -> None:
    change, with_bias = WAYS[way]
    for name, path in LAYERS:
        model, reference = copy.deepcopy(MODELS[name]), doubled(MODELS[name], path, with_bias)
        if moment == "before loading":
            change(model, path)
        for_inference(model)
        if moment == "after a generation" and model.config.family != "encoder":
            written(model)
        if moment != "before loading":
            change(model, path)
        expected = states(reference).detach()
        assert not torch.allclose(states(MODELS[name]), expected, atol=1e-3), path
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                assert torch.allclose(states(model), expected, atol=1e-5), (path, mode)
        if model.config.family != "encoder":
            ours, theirs = written(model), written(reference)
            assert [id for id, _ in ours] == [id for id, _ in theirs], path
            assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], abs=1e-4), path


def test_a_global_hook_is_called() -> None:
    model = copy.deepcopy(MODELS["decoder"])
    for_inference(model)
    layers = [module for module in model.modules() if isinstance(module, Linear) and module.role != "head"]
    called: set[nn.Module] = set()
    handle = register_module_forward_hook(lambda module, given, result: called.add(module))
    try:
        with torch.no_grad():
            states(model)
    finally:
        handle.remove()
    assert called.issuperset(layers)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loaded", [False, True])
def test_gradients_are_those_of_the_changed_layer(way: str, loaded: bool) -> None:
    """On a GPU, and in Triton's interpreter, queries, keys and values are one product unless a layer is changed."""
    change, with_bias = WAYS[way]
    for name, path in LAYERS:
        model, reference = copy.deepcopy(MODELS[name]), doubled(MODELS[name], path, with_bias)
        for_training(model, FastOptions())
        if loaded:
            for_inference(model)
        change(model, path)
        other = next(at for at, _ in model.named_parameters() if at.endswith("around_feedforward.norm.weight"))
        for one in (model, reference):
            states(one).square().sum().backward()  # type: ignore[no-untyped-call]
        ours, theirs = model.get_parameter(other).grad, reference.get_parameter(other).grad
        assert ours is not None
        assert theirs is not None
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4), path


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
def test_the_loss_goes_through_the_output_layer(way: str, tie: bool, chosen: bool) -> None:
    """The fused loss multiplies by the weight itself; a changed layer takes the plain way, gradients included."""
    change, with_bias = WAYS[way]
    model = copy.deepcopy(MODELS["decoder"])
    assert isinstance(model.output.project, Linear)
    if not tie:
        model.output.project.weight = nn.Parameter(model.output.project.weight.detach().clone())
    elif way == "parametrisation":
        pytest.skip("a parametrised weight is no longer the embedding's")
    reference = copy.deepcopy(model)
    if chosen:
        fast(model)
    change(model, "output.project")
    losses = []
    for one, scale in ((model, 1.0), (reference, 2.0)):
        hidden_ND = states(one).flatten(0, 1)
        labels_N = IDS.flatten()
        if scale == 1.0:
            loss = one.head.loss(hidden_ND, labels_N)
        else:
            logits_NV = scale * one.head.logits(hidden_ND)
            loss = nn.functional.cross_entropy(logits_NV, labels_N, reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    ours, theirs = model.decoder, reference.decoder
    assert ours is not None
    assert theirs is not None
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.allclose(mine.grad, other.grad, rtol=1e-3, atol=1e-5)
    assert with_bias or way in ("forward pre-hook", "parametrisation")


@pytest.mark.parametrize("way", WAYS)
def test_fast_paths_of_a_gpu_see_the_change(way: str) -> None:
    """What a GPU asks before it bypasses a layer, as a CPU can show it."""
    model = copy.deepcopy(MODELS["decoder"])
    fast(model)
    part = model.get_submodule("decoder.blocks.0.attention")
    assert isinstance(part, FastAttention)
    assert is_fast(part.out)
    assert fast_layers(part.query, part.out) == (part.query, part.out)
    before = fingerprint(model)
    WAYS[way][0](model, "decoder.blocks.0.attention.out")
    assert not is_fast(part.out)
    assert fast_layers(part.query, part.out) == ()
    assert fingerprint(model) != before
    assert any_hooks(model) == (way in ("forward hook", "forward pre-hook", "patched forward"))


def test_backward_hooks_count_as_hooks() -> None:
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        layer = Linear(3, 4, bias=True, role="up")
        fast(layer)
        handle = getattr(layer, register)(lambda *given: None)
        assert has_hooks(layer)
        assert not is_fast(layer)
        handle.remove()
        assert is_fast(layer)


def test_slots_are_not_used_again_once_a_layer_was_hooked_or_wrapped() -> None:
    """Their graphs, on a GPU, would go on without the change."""
    model = copy.deepcopy(MODELS["decoder"])
    for_inference(model)
    wish = Request(ids=(1, 2, 3), tokens=4, sampling=GREEDY, seed=0)

    def run() -> list[int]:
        engine = Engine(model, end=None, slots=1)
        engine.submit(wish)
        found: list[int] = []
        while engine.busy:
            found += [token.id for token in engine.step()]
        return found

    seen = set()
    for round in range(3):
        if round == 1:
            hooked(model, "decoder.blocks.0.attention.query")
        assert run() == [token.id for token in stream(model, [wish], end=None)]
        seen.add(id([*banks_of(model)._free.values()][-1]))
    assert len(seen) == 2
    wrapped(model, "decoder.blocks.0.feedforward.down")
    assert run() == [token.id for token in stream(model, [wish], end=None)]
    assert len({*seen, id([*banks_of(model)._free.values()][-1])}) == 3


def test_a_hook_on_a_weight_sees_its_gradient_beside_twins() -> None:
    model = copy.deepcopy(MODELS["decoder"])
    for_training(model, FastOptions())
    part = model.get_submodule("decoder.blocks.0.attention")
    assert isinstance(part, FastAttention)
    seen: list[Tensor] = []
    part.out.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    twins = Bf16Copies(model)
    with torch.autocast("cpu", torch.bfloat16), twins.used():
        states(model).square().sum().backward()  # type: ignore[no-untyped-call]
    assert len(seen) == 1
    assert part.out.weight.grad is not None
    assert model.get_parameter("decoder.blocks.0.feedforward.up.weight").grad is None  # that of its twin
