"""A model whose matrices are divided among processes that compute one forward pass together (Shoeybi et al. 2019).

Queries, keys, values and hidden features are divided by columns, the layers that read them by rows: a process has its
own heads and hidden features, and the sum over all processes is the output of the part. Norms, embeddings and outputs
are whole in each. A part whose layers have these roles promises that neither heads nor hidden features meet before the
layer that is divided by rows. The order is: build, choose fast classes, compile, then this.
"""

# H query heads, G key/value heads

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.dropout import _DropoutNd

from trivium.distributed.shard import prepare, refuse_divided
from trivium.errors import RequestError
from trivium.parts.declared import declared
from trivium.parts.linear import Linear
from trivium.parts.positions import Positions
from trivium.parts.roles import Role

Division = Literal["columns", "rows"]
DIVISIONS: dict[Role, Division] = {
    "query": "columns",
    "key": "columns",
    "value": "columns",
    "up": "columns",
    "gate": "columns",
    "attention-out": "rows",
    "down": "rows",
}


class Plan(NamedTuple):
    """How a model is divided."""

    layers: dict[str, Division]  # by the name of a layer
    parts: list[nn.Module]  # those that the layers belong to
    # parameters that every process has whole; it computes what its own heads add to their gradient
    replicated: list[nn.Parameter]
    positions: list[tuple[Positions, int]]  # each with the number of its heads


def plan(model: nn.Module, processes: int) -> Plan:
    """How the blocks of a model are divided among so many processes; a part that cannot be is refused by its name."""
    names = {module: name for name, module in model.named_modules()}
    stacks = [stack for side in ("encoder", "decoder") if (stack := getattr(model, side, None)) is not None]
    blocks = dict.fromkeys(block for stack in stacks for block in _blocks(names[stack], stack))
    inside = {module for block in blocks for module in block.modules()}
    layers = {module: DIVISIONS[module.role] for module in inside if isinstance(module, Linear) and _is_divided(module)}
    parts = {part: name for part, name in names.items() if part in inside and layers.keys() & {*part.children()}}
    for one in declared(model):
        if one.module in inside and one.declared.kind != "vector" and one.module not in layers:
            raise RequestError(
                f"{names[one.module]}.{one.name} is no Linear with a role, so processes cannot divide it; shard the "
                "model instead"
            )
    for block in blocks:
        if not parts.keys() & {*block.modules()}:
            raise RequestError(f"{names[block]} has no layer that processes divide; shard the model instead")
    replicated = [vector for part, name in parts.items() for vector in _check(name, part, processes)]
    positions = [found for stack in stacks for found in _positions(names, stack)]
    replicated += [one for position, _ in positions for one in _acting_on_heads(names[position], position)]
    ordered = {
        name: layers[module] for module, name in names.items() if isinstance(module, Linear) and module in layers
    }
    return Plan(ordered, [*parts], [*dict.fromkeys(replicated)], positions)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the matrices of a model among the processes of a mesh, all of which then read the same data.

    Every process has built the same model.
    """
    refuse_divided(model)
    processes, rank = mesh.size(), mesh.get_local_rank()
    found = plan(model, processes)
    _give_heads(found.positions, processes, rank)
    prepare(model)
    styles: dict[Division, type[Any]] = {"columns": ColwiseParallel, "rows": RowwiseParallel}
    parallelize_module(model, mesh, {name: styles[division]() for name, division in found.layers.items()})
    for part in found.parts:
        part.register_forward_pre_hook(_refuse_dropout)
    for parameter in found.replicated:
        if parameter.requires_grad:
            parameter.register_hook(_Summed(mesh.get_group()))  # type: ignore[no-untyped-call]
    for side in ("encoder", "decoder"):
        stack: Any = getattr(model, side, None)
        if stack is not None:
            stack.cache_shapes = [shape._replace(heads=shape.heads // processes) for shape in stack.cache_shapes]


def _is_divided(layer: Linear) -> bool:
    return layer.role in DIVISIONS


def _blocks(name: str, stack: nn.Module) -> nn.ModuleList:
    blocks = getattr(stack, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not hasattr(stack, "cache_shapes"):
        raise RequestError(
            f"{name} is a stack without a list of blocks, so processes cannot divide it; shard it instead"
        )
    return blocks


def _check(name: str, part: nn.Module, processes: int) -> Iterator[nn.Parameter]:
    """The vectors of a part that act on every head alike; a part that cannot be divided evenly is refused."""
    layers = {layer.role: layer for layer in part.children() if isinstance(layer, Linear)}
    if {DIVISIONS.get(role) for role in layers} != {"columns", "rows"}:
        raise RequestError(
            f"{name} has not both kinds of layers that processes divide, queries, keys, values, up or gate before "
            "attention-out or down; shard the model instead"
        )
    size = layers["query"].head if "query" in layers else 0
    if "query" in layers and not size:
        raise RequestError(f"{name}.query does not say the size of a head, so processes cannot divide its heads")
    for role, layer in layers.items():
        features = layer.out_features if DIVISIONS[role] == "columns" else layer.in_features
        what = f"{features} hidden features"
        if role in ("query", "key") and size:
            features //= size
            what = f"{features} {'query' if role == 'query' else 'key/value'} heads"
        if features % processes:
            raise RequestError(f"{name}: {processes} processes cannot divide {what} evenly; take fewer processes")
    own = {parameter for layer in layers.values() for parameter in layer.parameters()}
    for parameter in part.parameters():
        if parameter not in own:
            if parameter.shape != (size,):
                raise RequestError(f"{name} has a vector for more than one head, which processes cannot divide")
            yield parameter


def _positions(names: dict[nn.Module, str], stack: nn.Module) -> Iterator[tuple[Positions, int]]:
    """The position schemes of a stack, nested ones too, with the heads of the attention that they serve."""
    layers: Any = stack
    for block, index in zip(layers.blocks, layers.position_of, strict=True):
        query = getattr(getattr(block, "attention", None), "query", None)
        if not isinstance(query, Linear):
            raise RequestError(f"{names[block]} has no queries, so processes cannot divide its heads; shard it instead")
        for position in layers.positions[index].modules():
            if isinstance(position, Positions):
                yield position, query.out_features // query.head


def _acting_on_heads(name: str, position: Positions) -> list[nn.Parameter]:
    """The parameters of a scheme that act inside attention, where a process sees its own heads only."""
    nested = [child for child in position.modules() if child is not position and isinstance(child, Positions)]
    others = {parameter for child in nested for parameter in child.parameters()}
    own = [parameter for parameter in position.parameters() if parameter not in others]
    kind = type(position)
    if kind.embed is Positions.embed:
        return own
    if own and any(getattr(kind, way) is not getattr(Positions, way) for way in ("rotate", "bias", "score", "value")):
        raise RequestError(f"{name} adds to embeddings and acts on heads by the same weights, so it cannot be divided")
    return []


def _give_heads(positions: list[tuple[Positions, int]], processes: int, rank: int) -> None:
    """Let position schemes answer for the heads of this process; one that answers for all of them is refused."""
    for position, heads in positions:
        position.own_heads = (rank * heads // processes, heads // processes)
    try:
        for position, heads in positions:
            found = _bias(position)
            if found is not None and found.shape[1] not in (1, heads // processes):
                raise RequestError(
                    f"{type(position).__name__} gives a bias for {found.shape[1]} heads, not for the "
                    f"{heads // processes} of a process; let it ask for `of_own_heads`"
                )
    except BaseException:
        for position, _ in positions:
            position.own_heads = None
        raise


@torch.no_grad()
def _bias(position: Positions) -> Tensor | None:
    """What a scheme adds to the score of a token with itself."""
    like = next(position.parameters(), next(position.buffers(), torch.zeros(())))
    at_BT = torch.zeros(1, 1, dtype=torch.long, device=like.device)
    return position.bias(position.prepare(at_BT, at_BT))


def _refuse_dropout(part: nn.Module, args: Any) -> None:
    """Refuse to train with dropout inside a divided part: all processes would drop the same of their own heads."""
    rates = [value for name, value in vars(part).items() if "dropout" in name]
    rates += [module.p for module in part.modules() if isinstance(module, _DropoutNd)]
    if part.training and any(rates):
        raise RequestError(
            f"{type(part).__name__}: dropout of attention weights and hidden features is the same in all processes of "
            "tensor parallel; set it to 0 to train"
        )


class _Summed:
    """A gradient summed over processes, each of which has the part of its own heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, gradient: Tensor) -> Tensor:
        result = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=self.group)
        return result
