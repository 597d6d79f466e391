"""The promise of the two floors: hooks, wrappers and replaced children are honoured on every layer, plain and fast.

The oracle is a plain model with the changed numbers written into its weights, without hooks, wrappers or fast classes.
"""

# B batch, T tokens, N labels, D width, O outputs of a layer

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tests.battery import lively, mute, read, some_ids
from tests.cases import Case
from trivium.fast.choose import FastOptions, for_inference, for_training
from trivium.models.config import AnyStack, BlockStack, ModelConfig
from trivium.models.transformer import Transformer
from trivium.parts.linear import Linear
from trivium.parts.norms import LayerNorm, RMSNorm
from trivium.parts.positions import Positions

Change = Callable[[nn.Module, str], None]
Floor = Callable[[nn.Module], None]

FLOORS: dict[str, Floor] = {
    "plain": lambda model: None,
    "for training": lambda model: for_training(model, FastOptions()),
    "for inference": for_inference,
}


def factors(layer: nn.Module) -> Tensor:
    """A number of its own for every output, [O]: a norm behind the layer would swallow one for all."""
    weight = cast(Tensor, layer.weight)
    return torch.linspace(0.5, 1.5, len(weight), dtype=weight.dtype, device=weight.device)


class Scaled(nn.Module):
    """A wrapper that shows the weight and bias of the layer inside, as peft's do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self.base_layer.weight)

    @property
    def bias(self) -> Tensor:
        return cast(Tensor, self.base_layer.bias)

    @property
    def out_features(self) -> int:
        return len(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) * factors(self)
        return result


class Another(nn.Module):
    """A linear layer of a class that the package does not define."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        return result


class GradientDoubled(nn.Module):
    """A wrapper whose input gets twice the gradient; what it computes is the same to the bit."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x.detach() + 2 * (x - x.detach()))
        return result


def put(model: nn.Module, path: str, layer: nn.Module) -> None:
    """Let another layer take this one's place."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)


def wrapped(model: nn.Module, path: str) -> None:
    put(model, path, Scaled(model.get_submodule(path)))


def replaced(model: nn.Module, path: str) -> None:
    """By a layer of another library: torch's own, or for a norm a copy of another class."""
    layer = model.get_submodule(path)
    if not isinstance(layer, Linear):
        other: nn.Module = Another(copy.deepcopy(layer))
        scale_weights(other, "base_layer")
        put(model, path, other)
        return
    weight, bias = layer.weight.detach(), layer.bias
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight * factors(layer)[:, None])
        if bias is not None:
            linear.bias.copy_(bias * factors(layer))
    put(model, path, linear)


def hooked(model: nn.Module, path: str) -> None:
    model.get_submodule(path).register_forward_hook(lambda layer, given, result: result * factors(layer))


def hooked_going_back(model: nn.Module, path: str) -> None:
    model.get_submodule(path).register_full_backward_hook(
        lambda layer, into, out: (2 * cast(tuple[Tensor, ...], into)[0],)
    )


# what scales the outputs of a layer
WAYS: dict[str, Change] = {"forward hook": hooked, "wrapper": wrapped, "replaced child": replaced}


def scale_weights(model: nn.Module, path: str) -> None:
    """The same by weights alone; a tied matrix is tied no more."""
    layer = model.get_submodule(path)
    scale_O = factors(layer)
    with torch.no_grad():
        layer.weight = nn.Parameter(
            cast(Tensor, layer.weight) * scale_O.view(-1, *[1] * (cast(Tensor, layer.weight).ndim - 1))
        )
        bias = getattr(layer, "bias", None)
        if bias is not None:
            layer.bias = nn.Parameter(bias * scale_O) if isinstance(bias, nn.Parameter) else bias * scale_O


def double_gradients(model: nn.Module, path: str) -> None:
    put(model, path, GradientDoubled(model.get_submodule(path)))


def layers(model: nn.Module) -> list[str]:
    """Every layer of every part."""
    kinds = (Linear, LayerNorm, RMSNorm)
    return [path for path, module in model.named_modules() if isinstance(module, kinds)]


def outputs(model: nn.Module, case: Case, tokens_BT: Tensor) -> list[Tensor]:
    """All that a model says of these ids: states, logits and losses of all its heads."""
    made: Any = model
    hidden_BTD: Tensor = made(tokens_BT, **read(case, len(tokens_BT))).hidden
    found = [hidden_BTD]
    if not mute(case.config):
        labels_N = tokens_BT.flatten().roll(-1)
        found += [made.head.logits(hidden_BTD), made.head.nll(hidden_BTD.flatten(0, 1), labels_N)]
        found += [made.head.loss(hidden_BTD.flatten(0, 1), labels_N)]
    if made.sentence is not None:
        found.append(made.sentence.logits(hidden_BTD))
    if made.boundary is not None:
        left_ND, right_ND = hidden_BTD[:, :-2].flatten(0, 1), hidden_BTD[:, 2:].flatten(0, 1)
        places_N = torch.arange(len(left_ND)) % 4
        found.append(made.boundary.nll(left_ND, right_ND, places_N, tokens_BT[:, 1:-1].flatten()))
    return found


def total(found: list[Tensor]) -> Tensor:
    """One number of which every output has a gradient that is its own."""
    return torch.stack([one.double().pow(3).mean() if one.ndim else one.double() for one in found]).sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Those of all parameters, by names without wrappers."""
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        name.replace(".base_layer", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def near(ours: list[Tensor], theirs: list[Tensor], within: float = 2e-4) -> bool:
    """Whether both are the same up to rounding, each by its own size."""
    pairs = [(one.detach(), other.detach()) for one, other in zip(ours, theirs, strict=True)]
    return all(float((one - other).abs().max()) <= within * max(1.0, float(other.abs().max())) for one, other in pairs)


def modes() -> Iterator[Any]:
    yield from (torch.no_grad(), torch.inference_mode(), torch.enable_grad())


def check_changes(case: Case, floor: str, way: str, *, alone: bool = False) -> None:
    """A model whose layers are changed, all at once or each alone, says what the changed weights say, and learns so."""
    tokens_BT = some_ids(2, 6)
    source = lively(case.config, dtype=torch.float32)
    before = outputs(source, case, tokens_BT)
    for paths in [[path] for path in layers(source)] if alone else [layers(source)]:
        model, oracle = copy.deepcopy(source), copy.deepcopy(source)
        FLOORS[floor](model)
        for path in paths:
            WAYS[way](model, path)
            scale_weights(oracle, path)
        expected = outputs(oracle, case, tokens_BT)
        assert not near(before, expected, 1e-3), f"{paths} make no difference"
        for mode in modes():
            with mode:
                assert near(outputs(model, case, tokens_BT), expected), (paths, mode)
        ours = gradients(model, total(outputs(model, case, tokens_BT)))
        theirs = gradients(oracle, total(expected))
        if way != "replaced child":
            _scale_back(theirs, oracle, source, paths)
        assert theirs.keys() <= ours.keys()
        assert near([ours[name] for name in theirs], list(theirs.values()), 1e-3), paths


def _scale_back(found: dict[str, Tensor], oracle: nn.Module, source: nn.Module, paths: list[str]) -> None:
    """Turn the gradients of scaled weights into those of the weights; a tied matrix has the sum of all its uses."""
    owners = {id(parameter): name for name, parameter in source.named_parameters()}
    for path in paths:
        scale_O = factors(oracle.get_submodule(path))
        for leaf, parameter in source.get_submodule(path).named_parameters():
            gradient = found.pop(f"{path}.{leaf}") * scale_O.view(-1, *[1] * (parameter.ndim - 1))
            owner = owners[id(parameter)]
            found[owner] = found[owner] + gradient if owner in found else gradient


def check_backward_hooks(case: Case, floor: str, *, alone: bool = False) -> None:
    """A hook that doubles the gradient behind a layer doubles it for all that lies before."""
    tokens_BT = some_ids(2, 6)
    source = lively(case.config, dtype=torch.float64)  # all layers at once make gradients of very different sizes
    for paths in [[path] for path in layers(source)] if alone else [layers(source)]:
        model, oracle = copy.deepcopy(source), copy.deepcopy(source)
        FLOORS[floor](model)
        for path in paths:
            hooked_going_back(model, path)
        for path in sorted(paths, key=len, reverse=True):
            double_gradients(oracle, path)
        plain = gradients(source, total(outputs(source, case, tokens_BT)))
        ours = gradients(model, total(outputs(model, case, tokens_BT)))
        theirs = gradients(oracle, total(outputs(oracle, case, tokens_BT)))
        assert ours.keys() == theirs.keys()
        assert any(not torch.equal(plain[name], theirs[name]) for name in theirs), f"{paths} make no difference"
        for name, expected in theirs.items():
            worst = float((ours[name] - expected).abs().max())
            assert worst <= 1e-4 * max(1.0, float(expected.abs().max())), (paths, name)


def entered(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that compute something by themselves: all but lists of others and position schemes."""
    apart = (nn.ModuleList, nn.ModuleDict, Positions)
    return {path: module for path, module in model.named_modules() if not isinstance(module, apart)}


def check_every_module_is_called(case: Case, floor: str) -> None:
    """Forward and backward hooks on every module, blocks, stacks and heads too, are called in a pass and its loss."""
    model, tokens_BT = lively(case.config, dtype=torch.float32), some_ids(2, 6)
    FLOORS[floor](model)
    modules, called, gone_back = entered(model), set[str](), set[str]()
    for path, module in modules.items():
        module.register_forward_hook(lambda *_, path=path: called.add(path))
    for mode in modes():
        called.clear()
        with mode:
            outputs(model, case, tokens_BT)
        assert called == set(modules) - _unused(case), mode
    for path, module in modules.items():
        if path:  # what a whole model returns has names, which torch's backward hooks take away
            module.register_full_backward_hook(lambda *_, path=path: gone_back.add(path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # ids have no gradient
        gradients(model, total(outputs(model, case, tokens_BT)))
    assert gone_back == set(modules) - _unused(case) - {""}


def _unused(case: Case) -> set[str]:
    """An output that refuses every use."""
    return {"output"} if mute(case.config) else set()


def check_compiled_hooks(case: Case, floor: str, way: str, moment: str) -> None:
    """A change is honoured by a compiled model, before it was compiled and after it was run."""
    config = replace(case.config, encoder=_shallow(case.config.encoder), decoder=_shallow(case.config.decoder))
    tokens_BT, source = some_ids(2, 6), lively(config, dtype=torch.float32)
    model, oracle = copy.deepcopy(source), copy.deepcopy(source)
    paths = [path for path in layers(source) if path.startswith(("encoder", "decoder"))]
    FLOORS[floor](model)
    torch._dynamo.reset()
    with cast(Any, torch._dynamo.config).patch(skip_nnmodule_hook_guards=False):
        compiled = cast(nn.Module, torch.compile(model, backend="aot_eager"))
        if moment == "after":
            compiled(tokens_BT, **read(case, 2))
        for path in paths:
            WAYS[way](model, path)
            scale_weights(oracle, path)
        expected: Tensor = oracle(tokens_BT, **read(case, 2)).hidden
        found: Tensor = compiled(tokens_BT, **read(case, 2)).hidden
        assert near([found], [expected])
        with torch.no_grad():
            assert near([compiled(tokens_BT, **read(case, 2)).hidden], [expected])
        assert not near([source(tokens_BT, **read(case, 2)).hidden], [expected], 1e-3)
        ours, theirs = gradients(model, total([found])), gradients(oracle, total([expected]))
    table = "embedding.weight"
    assert near([ours[table]], [theirs[table]], 1e-3)


def _shallow(stack: AnyStack) -> AnyStack:
    return replace(stack, layers=1, pattern=(), variants={}) if isinstance(stack, BlockStack) else stack


def alone(config: ModelConfig) -> ModelConfig:
    """As few layers as show all kinds of blocks."""

    def short(stack: AnyStack) -> AnyStack:
        return replace(stack, layers=max(1, len(stack.pattern))) if isinstance(stack, BlockStack) else stack

    return replace(config, encoder=short(config.encoder), decoder=short(config.decoder))


def fast_is_plain(case: Case, floor: str) -> tuple[Transformer, Transformer]:
    """Outputs and gradients of a fast model are those of the plain one; both, to look at further."""
    tokens_BT, source = some_ids(2, 6), lively(case.config, dtype=torch.float32)
    model = copy.deepcopy(source)
    FLOORS[floor](model)
    theirs = outputs(source, case, tokens_BT)
    for mode in modes():
        with mode:
            assert near(outputs(model, case, tokens_BT), theirs), mode
    ours = gradients(model, total(outputs(model, case, tokens_BT)))
    expected = gradients(source, total(theirs))
    assert ours.keys() == expected.keys()
    assert near(list(ours.values()), list(expected.values()), 1e-3)
    return model, source
