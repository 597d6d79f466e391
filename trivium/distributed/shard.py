"""A model whose weights are divided among processes (FSDP2), each of which reads other data.

The order is: build, choose fast classes, compile, shard. Parameters keep their names and become DTensors, so guards,
clipping, optimizers, averages and checkpoints work as on one process.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from trivium.errors import RequestError
from trivium.parts.sharded import is_sharded

# The methods of a model that read weights beside its own `forward`: by the name of the module, "" the model itself.
# They gather the weights that they read, without a forward pass before; a part without such a method is skipped.
ENTRIES: dict[str, tuple[str, ...]] = {
    "": ("encode",),
    "output": ("forward", "logits", "nll", "loss"),
    "sentence": ("forward", "pooled", "logits"),
    "boundary": ("forward", "states", "nll"),
}


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the parameters of a model among the processes of a mesh, block by block, then all others together.

    Every process has built the same model. Gradients are summed over the processes: a loss is divided by the counts of
    all of them before. Outside of a forward and backward pass every parameter is its shard.
    """
    refuse_divided(model)
    prepare(model)
    for unit in _units(model):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    root = cast(FSDPModule, model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            with torch.inference_mode(False):  # the tensors that gathered weights are written to: training needs them
                module.unshard()
                module.reshard()
    # before: a forward pass with gradients, but without a backward pass, leaves weights gathered
    model.register_forward_pre_hook(lambda *_: _put_back(root), prepend=True)
    model.register_forward_hook(lambda *_: _put_back(root))
    for name, methods in ENTRIES.items():
        place = _find(model, name)
        for method in methods:
            if place is not None and hasattr(place, method):
                _register(root, place, method, f"_enter_{name}_{method}")


def refuse_divided(model: nn.Module) -> None:
    """Refuse a model that is divided already."""
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise RequestError("the model is sharded already; build it anew to divide it in another way")


def prepare(model: nn.Module) -> None:
    """Undo the memory layout of fast decoding."""
    # FSDP2 takes contiguous parameters only; fast modules then drop what they have stored beside their parameters
    model._apply(lambda tensor: tensor.contiguous())  # type: ignore[no-untyped-call]


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """What is gathered at a time: the parts that several blocks share, then the blocks of both sides."""
    sides = [getattr(model, side, None) for side in ("encoder", "decoder")]
    blocks = [block for side in sides for block in getattr(side, "blocks", ())]
    held = Counter(child for block in dict.fromkeys(blocks) for child in block.children())
    yield from (child for child, count in held.items() if count > 1)
    yield from dict.fromkeys(blocks)


def _find(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _register(root: FSDPModule, module: nn.Module, method: str, name: str) -> None:
    """Let a method find the root's weights: it is a forward pass of the root, `name` there, unless called in one.

    The root's weights are in one group with those of embedding and output, which may be tied. A forward pass with
    gradients leaves them gathered for the backward pass.
    """
    own: Callable[..., Any] = getattr(module, method)
    object.__setattr__(root, name, own)
    register_fsdp_forward_method(cast(nn.Module, root), name)
    through: Callable[..., Any] = getattr(root, name)

    @functools.wraps(own)
    def enter(*args: Any, **kwargs: Any) -> Any:
        if not any(is_sharded(parameter) for parameter in module.parameters()):
            return own(*args, **kwargs)
        result = through(*args, **kwargs)
        _put_back(root)
        return result

    setattr(module, method, enter)


def _put_back(root: FSDPModule) -> None:
    """Take back what was gathered where no backward pass will: else weights that are loaded later would not be seen."""
    if not torch.is_grad_enabled():
        root.reshard()
