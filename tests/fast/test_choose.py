"""Which classes are fast, that they compute what the plain ones do, and that all is taken back."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from tests.battery import lively, logits, mute, read, some_ids
from tests.cases import CASES, Case
from trivium.errors import RequestError
from trivium.fast.attention import FastAttention
from trivium.fast.choose import FAST, PLAIN, FastOptions, chosen, fast, for_inference, for_training, plain
from trivium.fast.linear import FastLinear
from trivium.models.transformer import Transformer
from trivium.parts.linear import Linear
from trivium.parts.quantized import QuantizedLinear, hollow

ROUND_OFF = 1e-10  # of float64 sums in another order
WAYS: dict[str, Callable[[nn.Module], None]] = {
    "fast": fast,
    "for training": lambda model: for_training(model, FastOptions()),
    "for inference": for_inference,
}
ways = pytest.mark.parametrize("way", WAYS)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def stepped(model: Transformer, case: Case) -> dict[str, Tensor]:
    """States, and the gradients of all parameters that have one."""
    model.zero_grad(set_to_none=True)
    hidden: Tensor = model(some_ids(2, 7), **read(case, 2)).hidden
    hidden.pow(3).sum().backward()  # type: ignore[no-untyped-call]
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return {"hidden": hidden.detach(), **found}


def alike(found: dict[str, Tensor], expected: dict[str, Tensor], room: float = ROUND_OFF) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        off = (found[name] - tensor).abs().max().item()
        assert off <= room * max(1.0, tensor.abs().max().item()), f"{name} is off by {off:.3g}"


@pytest.mark.parametrize(("slow", "quick"), FAST.items(), ids=lambda kind: kind.__name__)
def test_a_fast_class_is_a_final_subclass_of_one_plain_class(slow: type[nn.Module], quick: type[nn.Module]) -> None:
    assert issubclass(quick, slow)
    assert getattr(quick, "__final__", False)
    assert not getattr(slow, "__final__", False)
    assert quick.__init__ is slow.__init__  # the same constructor: no parameter of its own
    assert quick.__name__.startswith("Fast")
    assert "__slots__" not in vars(quick)
    assert PLAIN[quick] is slow


def test_no_fast_class_has_a_subclass() -> None:
    gc.collect()  # other tests parametrise layers
    for quick in PLAIN:
        assert not [kind for kind in quick.__subclasses__() if not kind.__name__.startswith("Parametrized")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fast_model_is_the_plain_one(case: Case) -> None:
    """Outputs and gradients in float64, in training, evaluation and after the layout for decoding."""
    slow = lively(case.config)
    expected, tokens_BT = stepped(slow, case), some_ids(2, 7)
    for way, make in WAYS.items():
        model = copy.deepcopy(slow)
        make(model)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in slow.named_parameters()]
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in slow.named_buffers()]
        alike(stepped(model, case), expected)
        with torch.no_grad():
            alike({way: logits(model, tokens_BT)}, {way: logits(slow, tokens_BT)})
            if not mute(case.config):
                states, labels = expected["hidden"].flatten(0, 1), tokens_BT.flatten()
                torch.testing.assert_close(
                    model.head.loss(states, labels).float(), slow.head.loss(states, labels).float()
                )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_module_of_a_plain_type_is_fast_and_plain_again_afterwards(case: Case) -> None:
    model = lively(case.config)
    before = {name: type(module) for name, module in model.named_modules()}
    fast(model)
    for name, module in model.named_modules():
        assert type(module) is FAST.get(before[name], before[name])
    again = {name: id(module) for name, module in model.named_modules()}
    fast(model)  # a second time changes nothing
    assert {name: id(module) for name, module in model.named_modules()} == again
    plain(model)
    assert {name: type(module) for name, module in model.named_modules()} == before


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes, and every tensor with its strides and its place in its storage."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        kept = {key for key in vars(module) if key not in ("_parameters", "_buffers", "_modules")}
        found[name] = (type(module), kept)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        found[f"{name} lies"] = (tensor.stride(), tensor.storage_offset(), alone, tensor.dtype, tensor.requires_grad)
        found[name] = tensor.detach().clone()
    return found


def unchanged(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
        assert same, f"{name}: {found[name]}, not {value}"


SOME = [
    named(name)
    for name in (
        "decoder: biases",
        "decoder: grouped",
        "decoder: glu with bias",
        "encoder: masked head",
        "encoder-decoder: biases",
        "encoder-decoder: stack tied",
        "decoder: mixed",
        "decoder: qk-norm",
    )
]
some = pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)


@ways
@some
def test_plain_restores_classes_attributes_and_storage_bit_for_bit(case: Case, way: str) -> None:
    model = lively(case.config, dtype=torch.float32)
    before, tokens_BT = snapshot(model), some_ids(2, 7)
    with torch.no_grad():
        expected = logits(model, tokens_BT)
    WAYS[way](model)
    with torch.no_grad():
        logits(model, tokens_BT)
    stepped(model, case)
    model.zero_grad(set_to_none=True)
    plain(model)
    unchanged(snapshot(model), before)
    with torch.no_grad():
        assert torch.equal(logits(model, tokens_BT), expected)


def test_plain_takes_back_float8_copies_and_levels() -> None:
    model = lively(named("decoder: biases").config, dtype=torch.float32)
    before = snapshot(model)
    for_training(model, FastOptions(fp8=True))
    layers = [module for module in model.modules() if type(module) is FastLinear]
    assert any(layer.fp8 for layer in layers)
    layers[0].bf16_copy = layers[0].weight.detach().bfloat16()
    plain(model)
    unchanged(snapshot(model), before)
    for name, old in hollow(model, 8).items():
        cast(QuantizedLinear, model.get_submodule(name)).fill(old.weight)
    before = snapshot(model)
    for_inference(model)
    with torch.no_grad():
        logits(model, some_ids(1, 1))
    plain(model)
    unchanged(snapshot(model), before)


@pytest.mark.parametrize("moved", [True, False])
@some
def test_plain_restores_what_was_copied_or_moved_since(case: Case, moved: bool) -> None:
    model = lively(case.config, dtype=torch.float32)
    expected = snapshot(copy.deepcopy(model).double())
    for_inference(model)
    other = (model if moved else copy.deepcopy(model)).double()
    assert all(module.fused is None for module in other.modules() if isinstance(module, FastAttention))
    plain(other)
    unchanged(snapshot(other), expected)


def test_what_was_parametrised_since_is_refused() -> None:
    model = lively(named("decoder: plain").config)
    fast(model)
    layer = next(module for module in model.modules() if type(module) is FastLinear)
    register_parametrization(layer, "weight", Doubled())
    before = [type(module) for module in model.modules()]
    with pytest.raises(RequestError, match="was sharded or parametrised since it became fast"):
        plain(model)
    assert [type(module) for module in model.modules()] == before  # nothing half done
    remove_parametrizations(layer, "weight")
    plain(model)
    assert not any(type(module) in PLAIN for module in model.modules())


def test_what_was_parametrised_or_wrapped_before_stays_plain() -> None:
    model = lively(named("decoder: plain").config)
    assert model.decoder is not None
    attention = cast(FastAttention, model.decoder.blocks[0].attention)
    register_parametrization(attention.query, "weight", Doubled())
    reasons = {name: why for name, _, why in chosen(model)}
    assert reasons["decoder.blocks.0.attention.query"] == "plain: a class of its own"
    assert reasons["decoder.blocks.0.attention.key"] == "plain: fast is off"
    case = named("decoder: plain")
    expected = stepped(model, case)
    for_inference(model)
    assert attention.fused is None
    alike(stepped(model, case), expected)
    reasons = {name: why for name, _, why in chosen(model)}
    assert reasons["decoder.blocks.0.attention.query"] == "plain: a class of its own"
    assert reasons["decoder.blocks.0.attention.key"] == "fast Linear"
    assert reasons["decoder.blocks.0.around_attention.norm"] == "plain: there is no fast class"


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Wrapped(nn.Module):
    """As an adapter does it: another class around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" or name.startswith("_") else getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * 1.5
        return result


class Own(Linear):
    """A class from outside."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


def wrapped(model: nn.Module, name: str) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, Wrapped(model.get_submodule(name)))


def replaced(model: nn.Module, name: str) -> None:
    parent, _, child = name.rpartition(".")
    old = cast(Linear, model.get_submodule(name))
    new = Own(old.in_features, old.out_features, bias=old.bias is not None, role=old.role, head=old.head)
    new.weight, new.bias = old.weight, old.bias
    setattr(model.get_submodule(parent), child, new)


def forward_hooked(model: nn.Module, name: str) -> None:
    model.get_submodule(name).register_forward_hook(lambda module, given, out: out * 1.5)


def pre_hooked(model: nn.Module, name: str) -> None:
    model.get_submodule(name).register_forward_pre_hook(lambda module, given: (given[0] * 1.5,))


def backward_hooked(model: nn.Module, name: str) -> None:
    model.get_submodule(name).register_full_backward_hook(lambda module, into, out: (cast(tuple[Tensor], into)[0] * 3,))


def patched(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    inner = module.forward
    module.forward = lambda x: inner(x) * 1.5


def parametrised(model: nn.Module, name: str) -> None:
    register_parametrization(model.get_submodule(name), "weight", Doubled())


CHANGES: dict[str, Callable[[nn.Module, str], None]] = {
    change.__name__: change
    for change in (wrapped, replaced, forward_hooked, pre_hooked, backward_hooked, patched, parametrised)
}
HOOKED = [
    named(name)
    for name in ("decoder: biases", "decoder: glu with bias", "encoder: masked head", "encoder-decoder: post-norm")
]


@pytest.mark.parametrize("way", ["for training", "for inference"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", HOOKED, ids=lambda case: case.name)
def test_what_is_around_any_layer_is_honoured_whenever_it_came(case: Case, change: str, way: str) -> None:
    """Hooks, wrappers and replaced children on every linear layer, with and without gradients."""
    base = lively(case.config)
    untouched = used(base, case)
    names = [name for name, module in base.named_modules() if type(module) is Linear and ".1." not in name]
    for name in names:
        slow = copy.deepcopy(base)
        CHANGES[change](slow, name)
        expected = used(slow, case)
        assert any(not torch.equal(expected[key], untouched.get(key, expected[key])) for key in expected), name
        before, after = copy.deepcopy(base), copy.deepcopy(base)
        CHANGES[change](before, name)
        WAYS[way](before)
        alike(used(before, case), expected)
        close_losses(before, slow, expected["hidden"])
        WAYS[way](after)
        used(after, case)  # nothing may be remembered of this call
        CHANGES[change](after, name)
        alike(used(after, case), expected)
        close_losses(after, slow, expected["hidden"])


def used(model: Transformer, case: Case) -> dict[str, Tensor]:
    """States, logits with and without gradients, and the gradients of all parameters."""
    model.zero_grad(set_to_none=True)
    tokens_BT = some_ids(2, 7)
    hidden: Tensor = model(tokens_BT, **read(case, 2)).hidden
    scores = model.head.logits(hidden)
    (hidden.pow(3).sum() + scores.square().sum()).backward()  # type: ignore[no-untyped-call]
    found = {name.replace("inner.", ""): one.grad for name, one in model.named_parameters() if one.grad is not None}
    with torch.no_grad():
        return {"hidden": hidden.detach(), "scores": scores.detach(), "logits": logits(model, tokens_BT), **found}


def close_losses(model: Transformer, slow: Transformer, states: Tensor) -> None:
    """The loss and its gradient, which the plain output takes in float32."""
    labels, results = some_ids(2, 7).flatten(), []
    for one in (model, slow):
        hidden = states.flatten(0, 1).detach().requires_grad_()
        loss = one.head.loss(hidden, labels)
        results.append((loss.float().detach(), *torch.autograd.grad(loss, hidden)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
