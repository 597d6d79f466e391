"""Optimizers against worked tables, torch's own, and singular values; skipped steps and resumes bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trivium.errors import CheckpointError, ConfigError
from trivium.models.config import Block, ModelConfig, Stack
from trivium.models.transformer import Transformer, build
from trivium.optim.groups import trainable
from trivium.optim.optimizers import AdamW, Muon, Optim, Optimizer, orthogonal
from trivium.parts.attention import MultiHead
from trivium.parts.embeddings import Tokens
from trivium.parts.linear import Linear

YES, NO = torch.tensor(True), torch.tensor(False)
OPTIMS = [AdamW(rate=0.01), Muon(rate=0.02, decay=0.1, adam_decay=0.1)]
each = pytest.mark.parametrize("optim", OPTIMS, ids=lambda optim: type(optim).__name__)


def single(value: Tensor) -> tuple[nn.Module, nn.Parameter]:
    """A model that is one matrix."""
    layer = Linear(value.shape[1], value.shape[0], bias=False, role="up")
    with torch.no_grad():
        layer.weight.copy_(value)
    (weight,) = layer.parameters()
    return layer, weight


def small(seed: int = 0) -> Transformer:
    block = Block(attention=MultiHead(heads=2, bias="all"))
    config = ModelConfig(
        width=8, context=8, vocab=11, embedding=Tokens(tie="none"), decoder=Stack(layers=2, block=block)
    )
    return build(config, seed=seed)


def gradients(model: nn.Module, seed: int, fill: float | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if fill is not None:
            parameter.grad.fill_(fill)


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **optimizer.tensors()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def walk(optim: AdamW) -> list[float]:
    model, weight = single(torch.ones(1, 1))
    optimizer, path = optim.build(model), []
    for gradient in (1.0, -0.5, 0.25):
        weight.grad = torch.full((1, 1), gradient)
        optimizer.step(1.0, YES)
        path.append(weight.item())
    return path


def test_adamw_walks_the_worked_tables() -> None:
    adam = AdamW(rate=0.1, beta1=0.9, beta2=0.98, eps=1e-9, decay=0)
    assert walk(adam) == pytest.approx([0.900000, 0.873289, 0.839011], abs=1e-6)
    decoupled = AdamW(rate=0.1, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.01)
    assert walk(decoupled) == pytest.approx([0.899000, 0.871467, 0.836553], abs=1e-6)
    # decay added to the gradient instead would give this
    assert walk(decoupled) != pytest.approx([0.900000, 0.872291, 0.837066], abs=1e-4)


def test_adamw_is_torchs_own_over_random_steps() -> None:
    ours, theirs = small(), small()
    optimizer = AdamW(rate=0.01, decay=0.1).build(ours)
    decayed = [parameter for parameter in theirs.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in theirs.parameters() if parameter.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=False,
        foreach=False,
    )
    for step in range(20):
        factor = 1 / (step + 1)
        for group in reference.param_groups:
            group["lr"] = 0.01 * factor
        for model in (ours, theirs):
            gradients(model, step)
        optimizer.step(factor, YES)
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


@each
def test_an_unhealthy_step_moves_nothing(optim: Optim) -> None:
    model = small()
    optimizer = optim.build(model)
    for fill in (None, math.nan, math.inf, -math.inf):
        before = snapshot(model, optimizer)
        gradients(model, 1, fill)
        optimizer.step(1.0, NO)
        assert same(before, snapshot(model, optimizer))
        gradients(model, 2)
        optimizer.step(1.0, YES)
        assert not same(before, snapshot(model, optimizer))


@each
def test_a_skipped_step_leaves_no_trace_in_later_ones(optim: Optim) -> None:
    results = []
    for skip in (True, False):
        model = small()
        optimizer = optim.build(model)
        for step in range(4):
            if skip and step in (0, 2):
                gradients(model, 99, math.nan)
                optimizer.step(1.0, NO)
            gradients(model, step)
            optimizer.step(0.5, YES)
        results.append(snapshot(model, optimizer))
    assert same(*results)


@each
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_resumed_optimizer_continues_bit_for_bit(optim: Optim, at: int) -> None:
    through, first = small(), small()
    whole, half = optim.build(through), optim.build(first)
    for step in range(6):
        gradients(through, step)
        whole.step(1.0, YES)
    for step in range(at):
        gradients(first, step)
        half.step(1.0, YES)
    second = small(seed=5)
    second.load_state_dict(first.state_dict())
    resumed = optim.build(second)
    resumed.load({name: tensor.clone() for name, tensor in half.tensors().items()})
    for step in range(at, 6):
        gradients(second, step)
        resumed.step(1.0, YES)
    assert same(snapshot(through, whole), snapshot(second, resumed))


@each
def test_a_loaded_state_is_a_copy(optim: Optim) -> None:
    model = small()
    optimizer = optim.build(model)
    given = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    kept = {name: tensor.clone() for name, tensor in given.items()}
    optimizer.load(given)
    gradients(model, 0)
    optimizer.step(1.0, YES)
    assert same(given, kept)


def test_the_state_of_another_optimizer_is_refused() -> None:
    adam, muon = AdamW().build(small()), Muon().build(small())
    with pytest.raises(CheckpointError, match="another optimizer wrote it"):
        adam.load(muon.tensors())
    with pytest.raises(CheckpointError, match="another optimizer wrote it"):
        muon.load(adam.tensors())


@each
def test_a_factor_of_zero_moves_no_weight(optim: Optim) -> None:
    model = small()
    optimizer = optim.build(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    gradients(model, 0)
    optimizer.step(0.0, YES)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@each
def test_a_step_without_gradients_moves_exactly_the_decayed_weights(optim: Optim) -> None:
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = optim.build(model)
    gradients(model, 0, 0.0)
    optimizer.step(1.0, YES)
    for weight in trainable(model):
        assert bool((weight.parameter < 1).all()) == weight.decayed, weight.name
        assert bool((weight.parameter == 1).all()) != weight.decayed, weight.name


@pytest.mark.parametrize("shape", [(256, 64), (64, 256)])
def test_the_singular_values_of_a_muon_update_lie_near_one(
    shape: tuple[int, int], count: Callable[[int, int], int]
) -> None:
    for seed in range(count(5, 200)):
        matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))
        values = torch.linalg.svdvals(orthogonal(matrix, 5)[0])
        assert 0.67 <= values.min().item() <= values.max().item() <= 1.15


def test_a_square_muon_update_is_bounded(count: Callable[[int, int], int]) -> None:
    for seed in range(count(5, 200)):
        matrix = torch.randn(1, 128, 128, generator=torch.Generator().manual_seed(seed))
        assert torch.linalg.svdvals(orthogonal(matrix, 5)[0]).max().item() <= 1.21


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
def test_orthogonalising_acts_on_the_singular_values_alone(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = orthogonal(matrices, 5)
    for matrix, result in zip(matrices, results, strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        torch.testing.assert_close(result, left @ values.diag() @ right, atol=1e-5, rtol=1e-5)


def muon_pair(
    value: Tensor, decay: float, scale: str
) -> tuple[nn.Parameter, Optimizer, nn.Parameter, torch.optim.Muon]:
    model, ours = single(value)
    adjust = "match_rms_adamw" if scale == "adamw" else "original"
    optimizer = Muon(rate=0.1, decay=decay, scale="adamw" if scale == "adamw" else "original").build(model)
    theirs = nn.Parameter(value.clone())
    return ours, optimizer, theirs, torch.optim.Muon([theirs], lr=0.1, weight_decay=decay, adjust_lr_fn=adjust)


def test_muon_takes_the_worked_step() -> None:
    ours, optimizer, theirs, reference = muon_pair(torch.eye(2, 3), 0.0, "original")
    for parameter in (ours, theirs):
        parameter.grad = torch.tensor([[1.0, 0, 0], [0, 2.0, 0]])
    optimizer.step(1.0, YES)
    reference.step()  # type: ignore[no-untyped-call]
    assert ours.diagonal().tolist() == pytest.approx([0.8883, 0.9309], abs=1e-2)
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=0)


@pytest.mark.parametrize("scale", ["original", "adamw"])
@pytest.mark.parametrize("shape", [(16, 8), (8, 16)])
def test_muon_is_torchs_own_within_the_rounding_of_bfloat16(shape: tuple[int, int], scale: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, optimizer, theirs, reference = muon_pair(torch.randn(shape, generator=generator), 0.1, scale)
    start = ours.detach().clone()
    for _ in range(5):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        optimizer.step(1.0, YES)
        reference.step()  # type: ignore[no-untyped-call]
    moved, apart = (ours - start).norm(), (ours - theirs).norm()
    assert (apart / moved).item() < 2e-2


def test_muon_moves_hidden_matrices_and_adamw_the_rest() -> None:
    model = small()
    optimizer = Muon(rate=0.5, adam_rate=0.001, head_rate=0.01).build(model)
    kinds = {weight.name: weight.kind for weight in trainable(model)}
    names = optimizer.tensors()
    for name, kind in kinds.items():
        assert (f"{name}.momentum" in names) == (kind == "matrix")
        assert (f"{name}.exp_avg" in names) == (kind != "matrix")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients(model, 0)
    optimizer.step(1.0, YES)
    # the first step of Adam moves every weight by its rate
    for name, parameter in model.named_parameters():
        rate = {"head": 0.01, "embedding": 0.001, "vector": 0.001}.get(kinds[name])
        if rate:
            torch.testing.assert_close(
                (parameter - before[name]).abs(), torch.full_like(parameter, rate), rtol=1e-2, atol=0
            )


def test_muon_needs_a_hidden_matrix() -> None:
    with pytest.raises(ConfigError, match="muon needs hidden matrices"):
        Muon().build(Tokens().build(small().config.site()))


def test_muon_names_the_setting_that_is_wrong() -> None:
    for name in ("adam_rate", "head_rate"):
        with pytest.raises(ConfigError, match=f"{name}: 0 is not positive"):
            Muon(**{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="iterations: 0 is less than 1"):
        Muon(iterations=0)


@pytest.mark.parametrize("optim", [AdamW, Muon])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": 0.0}, "rate: 0.0 is not positive"),
        ({"rate": math.nan}, "rate: nan is not positive"),
        ({"decay": -0.1}, "decay: -0.1 is less than 0"),
        ({"beta1": 1.0}, "beta1: 1.0 is not in"),
        ({"beta2": -0.1}, "beta2: -0.1 is not in"),
    ],
)
def test_impossible_settings_are_refused(optim: type[AdamW] | type[Muon], options: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        optim(**options)  # type: ignore[arg-type]
