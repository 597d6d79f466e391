"""Which weights are decayed, over every model of the battery and every family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.cases import CASES, Case
from tests.optim.steps import YES, gradients
from trivium.models.config import AnyStack, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.optim.adam import AdamStepper
from trivium.optim.groups import trainable
from trivium.optim.options import Adam, AdamW, Muon, Optim, Sgd
from trivium.parts.boundary import SpanBoundaryHead
from trivium.parts.declared import EMBEDDING
from trivium.parts.embeddings import TokenEmbedding
from trivium.parts.linear import Linear
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.positions import BucketOptions, ShawOptions
from trivium.parts.positions.absolute import LearnedPositions
from trivium.parts.positions.relative import BucketPositions, ShawPositions

FAMILIES = {case.config.family: case for case in CASES}
DECAYING: dict[str, Optim] = {
    "adamw": AdamW(),
    "adamw not embeddings": AdamW(decay_embeddings=False),
    "adamw uncorrected": AdamW(correction=False),
    "adam": Adam(decay=0.1),
    "adam not embeddings": Adam(decay=0.1, decay_embeddings=False),
    "sgd": Sgd(decay=0.1),
    "muon": Muon(decay=0.1, adam_decay=0.1),
}
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_family = pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES.keys())


def role(model: nn.Module, name: str) -> str:
    """What a weight is, by the class of the module that has it first."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if model.get_parameter(name).ndim < 2 or isinstance(owner, BucketPositions):
        return "vector"
    if isinstance(owner, TokenEmbedding | LearnedPositions | ShawPositions | SpanBoundaryHead):
        return "embedding"
    assert isinstance(owner, Linear), name
    return "head" if owner.role == "head" else "matrix"


def spread(case: Case) -> Transformer:
    """The case with tables of every kind in it: segments, T5's biases in one layer, Shaw's vectors in the other."""

    def with_tables(stack: AnyStack) -> AnyStack:
        if not isinstance(stack, Stack):
            return stack
        assert isinstance(stack.block, Block)
        variants = {
            "t5": replace(stack.block, position=BucketOptions()),
            "shaw": replace(stack.block, position=ShawOptions()),
        }
        return replace(stack, layers=3, pattern=("", "t5", "shaw"), variants=variants)

    config = case.config
    assert isinstance(config.embedding, TokenEmbeddingOptions)
    return build(
        replace(
            config,
            embedding=replace(config.embedding, segments=2),
            encoder=with_tables(config.encoder),
            decoder=with_tables(config.decoder),
        )
    )


@each
def test_the_groups_hold_every_trainable_weight_exactly_once(case: Case) -> None:
    model = build(case.config)
    optimizer = AdamW(decay=0.1).build(model)
    assert isinstance(optimizer, AdamStepper)
    groups = {
        group["weight_decay"]: {id(parameter) for parameter in group["params"]}
        for group in optimizer.inner.param_groups
    }
    decayed, spared = groups[0.1], groups.get(0.0, set())
    assert not decayed & spared
    assert decayed | spared == {id(parameter) for parameter in model.parameters()}
    assert sum(len(group["params"]) for group in optimizer.inner.param_groups) == len(decayed | spared)


@each
def test_kinds_go_by_role(case: Case) -> None:
    model = build(case.config)
    for weight in trainable(model):
        assert weight.kind == role(model, weight.name), weight.name


@each_family
def test_every_table_is_known_by_what_it_is(case: Case) -> None:
    model = spread(case)
    kinds = {weight.name: weight.kind for weight in trainable(model)}
    assert kinds == {name: role(model, name) for name in kinds}
    assert any(name.endswith("segments") and kind == "embedding" for name, kind in kinds.items())
    assert any(name.endswith("key_table") and kind == "embedding" for name, kind in kinds.items())
    biases = [module.table for module in model.modules() if isinstance(module, BucketPositions)]
    assert biases
    assert all(table.ndim == 2 for table in biases)
    spared = {id(weight.parameter) for weight in trainable(model) if not weight.decayed}
    assert {id(table) for table in biases} <= spared


@each_family
@pytest.mark.parametrize("optim", DECAYING.values(), ids=DECAYING.keys())
def test_one_step_with_zero_gradients_moves_exactly_the_decayed_weights(case: Case, optim: Optim) -> None:
    model = spread(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = optim.build(model)
    gradients(model, 0, 0.0)
    optimizer.step(1.0, YES)
    moved = {name for name, parameter in model.named_parameters() if bool((parameter < 1).all())}
    stayed = {name for name, parameter in model.named_parameters() if bool((parameter == 1).all())}
    spared = {"vector"} if getattr(optim, "decay_embeddings", True) else {"vector", "embedding"}
    assert stayed == {name for name, _ in model.named_parameters() if role(model, name) in spared}
    assert moved | stayed == {name for name, _ in model.named_parameters()}


def test_frozen_weights_are_left_out() -> None:
    model = build(CASES[0].config)
    model.embedding.weight.requires_grad_(False)
    names = [weight.name for weight in trainable(model)]
    assert "embedding.weight" not in names
    assert len(names) == len(list(model.parameters())) - 1


def test_a_tied_matrix_appears_once_and_as_the_embedding_it_is() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = Linear(3, 5, bias=False, role="head")  # met first
            self.embedding = nn.Module()
            self.embedding.declares = {"weight": EMBEDDING, "absent": EMBEDDING}  # type: ignore[assignment]
            self.embedding.weight = self.head.weight
            self.embedding.absent = None  # type: ignore[assignment]

    (weight,) = trainable(Tied())
    assert (weight.name, weight.kind, weight.decayed) == ("head.weight", "embedding", True)
