"""Post-norm blocks whose norms go by one kernel: fast against plain on the same weights, outputs and gradients.

They need a GPU; the kernels also run in Triton's interpreter (TRITON_INTERPRET=1), slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery import lively, some_ids
from tests.cases import CONTEXT, VOCAB
from tests.fast.compare import narrow
from tests.kernels.launch import DEVICE, needs_gpu, needs_triton
from trivium.fast.block import TwoReaders, _applies, _last_layer
from trivium.fast.choose import FastOptions, fast, for_training
from trivium.fast.linear import is_fast
from trivium.kernels.hardware import INTERPRETED
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer
from trivium.parts.linear import Linear
from trivium.parts.masks import Mask, ScoreMask
from trivium.parts.mixers import Context
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.options.norms import LayerNormOptions, Norm, RMSNormOptions
from trivium.parts.options.residual import PostOptions, PreOptions
from trivium.parts.positions import Positions
from trivium.parts.residual import PostConnection
from trivium.parts.site import Site

BIASED = MultiHeadOptions(bias="all")
RELU = MlpOptions(activation="relu")  # the other kernels of a step take seconds in the interpreter


def stack(**changes: Any) -> Stack:
    return Stack(
        layers=2, block=Block(**{"attention": BIASED, "feedforward": RELU, "residual": PostOptions(), **changes})
    )


# A stack's changes, and the norms that the kernel takes then.
CASES: dict[str, tuple[dict[str, Stack], int]] = {
    "encoder": ({"encoder": stack()}, 4),
    "decoder": ({"decoder": stack(feedforward=GluOptions(bias=True, activation="relu"))}, 4),
    "both": ({"encoder": stack(), "decoder": stack(cross=BIASED)}, 10),
    "no bias": (
        {"encoder": stack(attention=MultiHeadOptions(), feedforward=MlpOptions(bias=False, activation="relu"))},
        4,
    ),
    "variational": ({"encoder": stack(variational_dropout=1e-9)}, 0),
    "dropout": ({"encoder": stack(dropout=1e-9)}, 0),
    "another norm": ({"encoder": stack(norm=RMSNormOptions())}, 0),
    "pre": ({"decoder": stack(residual=PreOptions())}, 0),
}


def model(name: str) -> Transformer:
    """A model in training on the device, plain, whose residual stream is bfloat16."""
    both: dict[str, Any] = {"encoder": NoStack(), "decoder": NoStack(), **CASES[name][0]}
    made = lively(ModelConfig(width=32, context=CONTEXT, vocab=VOCAB, **both)).float().to(DEVICE).train()
    made.residual_dtype = torch.bfloat16
    return made


def quick(plain: Transformer) -> Transformer:
    """The same model, fast."""
    made = deepcopy(plain)
    for_training(made, FastOptions())
    return made


def gradients(one: nn.Module, *, learning: nn.Module | None = None) -> list[Tensor]:
    """Those of all weights of `learning` (None: of the model itself)."""
    made: Any = one
    tokens = some_ids(2, 7).to(DEVICE)
    config: ModelConfig = made.config
    source = {"source": tokens.flip(1)} if config.family == "encoder-decoder" else {}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = made.head.logits(made(tokens, **source).hidden).float().square().mean()
    weights = [weight for weight in (learning or one).parameters() if weight.requires_grad]
    return list(torch.autograd.grad(loss, weights))


def close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    room = 0.06 if INTERPRETED else 0.03  # the interpreter cuts the last bits of bfloat16 off
    most = max(float(one.norm()) for one in theirs)  # the bias of a key has no gradient but dust
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).norm()) <= room * float(other.norm()) + 1e-3 * most


@pytest.fixture(autouse=True)
def _few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter the programs of a kernel run one after another: three show as much as 264."""
    if INTERPRETED:
        from trivium.kernels import parted, postnorm

        monkeypatch.setattr(postnorm, "LAUNCH", postnorm.LAUNCH._replace(parts=3))
        monkeypatch.setattr(parted, "LAUNCH", parted.LAUNCH._replace(parts=3))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every norm by the kernel, whether the gradient of a bias is made there too."""
    from trivium.kernels import postnorm

    found: list[bool] = []
    normed = postnorm.normed

    def noted(x: Tensor, y: Tensor, bias: Tensor | None, *norm: Any) -> tuple[Tensor, Tensor]:
        found.append(bias is not None)
        return normed(x, y, bias, *norm)

    monkeypatch.setattr(postnorm, "normed", noted)
    return found


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_the_gradients_of_the_plain_way(name: str, launched: list[bool]) -> None:
    one = model(name)
    slow, fast = gradients(narrow(one)), gradients(quick(one))
    assert launched == [name != "no bias"] * CASES[name][1]
    close(fast, slow)


@needs_gpu
@pytest.mark.parametrize("name", ["encoder", "decoder", "both", "no bias"])
def test_a_compiled_model_has_the_gradients_of_the_plain_way(name: str, launched: list[bool]) -> None:
    one = model(name)
    other = quick(one)
    torch._dynamo.reset()
    close(gradients(cast(nn.Module, torch.compile(other)), learning=other), gradients(narrow(one)))
    assert launched


@needs_triton
@pytest.mark.parametrize("name", ["encoder", "both"])
def test_all_but_the_first_part_of_each_side_read_two_outputs_of_a_norm(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    outputs = TwoReaders.outputs

    def noted(self: TwoReaders, x: Tensor) -> tuple[Tensor, Tensor]:
        residual, part = outputs(self, x)
        found.append(residual is not part)
        return residual, part

    monkeypatch.setattr(TwoReaders, "outputs", noted)
    gradients(quick(model(name)))
    assert found == [False, True, True, True, False, True, True, True, True, True][: CASES[name][1]]


@needs_triton
def test_a_compiled_model_gives_each_part_its_own_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled block reads the output of the norm before it; a perturbed norm shows which tensor it read."""
    from trivium.kernels import postnorm

    def normed(x: Tensor, y: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float) -> Any:
        total = x + y if bias is None else x + y + (bias - bias.detach())
        result = F.layer_norm(total.float(), weight.shape, weight, shift, eps).to(x.dtype)
        return result, result.view_as(result)

    def told_apart(*given: Any) -> tuple[Tensor, Tensor]:
        residual, part = normed(*given)
        return residual, -part

    one = quick(model("both"))
    monkeypatch.setattr(postnorm, "normed", normed)
    same = gradients(one)
    monkeypatch.setattr(postnorm, "normed", told_apart)
    slow = gradients(one)
    compiled = cast(nn.Module, torch.compile(one, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    fast = gradients(compiled, learning=one)
    torch._dynamo.reset()
    assert any((ours - theirs).abs().max() > 1e-3 for ours, theirs in zip(slow, same, strict=True))
    close(fast, slow)


@needs_triton
def test_a_frozen_bias_and_products_in_float8_keep_their_gradients(launched: list[bool]) -> None:
    """A frozen bias has no gradient; before products in float8 the compiler's way is the faster one."""
    one = quick(model("encoder"))
    blocks = cast(Any, one.encoder).blocks
    blocks[0].attention.out.fp8 = True
    blocks[1].feedforward.down.bias.requires_grad = False
    gradients(one)
    assert launched == [True, True, False]


@needs_triton
def test_what_is_computed_again_goes_the_plain_way(launched: list[bool]) -> None:
    one = model("encoder")
    slow, other = gradients(narrow(one)), quick(one)
    other.recompute = True
    close(gradients(other), slow)
    assert not launched


@pytest.mark.parametrize("kind", ["attention", "mlp", "glu"])
def test_without_bias_grad_the_last_bias_is_a_constant(kind: str) -> None:
    options: Any = {"attention": BIASED, "mlp": MlpOptions(), "glu": GluOptions(bias=True)}[kind]
    part: Any = options.build(Site(width=32, context=CONTEXT))
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.2)
    plain = deepcopy(part)
    fast(part)
    last: Linear = part.out if kind == "attention" else part.down
    assert _last_layer(part) is last
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    mask = ScoreMask(Mask(causal=True), 5, 5, x.device)
    given = (Context(mask=mask, position=Positions(), at=torch.arange(5)[None]),) if kind == "attention" else ()
    found, expected = part(x, *given, bias_grad=False), plain(x, *given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for result in (found, expected):
        result.square().sum().backward()
    ours, theirs = dict(part.named_parameters()), dict(plain.named_parameters())
    without = {name for name, parameter in ours.items() if parameter.grad is None}
    assert without == {"out.bias" if kind == "attention" else "down.bias"}
    for name in ours.keys() - without:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-4, atol=1e-4)


def test_a_part_with_hooks_or_of_another_kind_has_no_last_layer() -> None:
    class Another(nn.Module):
        """What replaces a part may use the bias in its own way."""

    part = MlpOptions().build(Site(width=32, context=4))
    assert _last_layer(part) is None  # a plain part does not know `bias_grad`
    fast(part)
    last = _last_layer(part)
    assert last is not None
    assert is_fast(last)
    handle = part.register_forward_hook(lambda *_: None)
    assert _last_layer(part) is None
    handle.remove()
    last.register_forward_hook(lambda *_: None)
    assert not is_fast(last)
    assert _last_layer(Another()) is None


def connection(norm: Norm | None = None, rate: float = 0.0, width: int = 32) -> PostConnection:
    around = PostOptions().build(Site(width=width, context=4), norm or LayerNormOptions(), rate).to(DEVICE).train()
    assert isinstance(around, PostConnection)
    return around


def stream(width: int = 32, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(1, 4, width, dtype=dtype, device=DEVICE)


REFUSED: dict[str, Callable[[], bool]] = {
    "float32": lambda: _applies(connection(), stream(dtype=torch.float32)),
    "float16": lambda: _applies(connection(), stream(dtype=torch.float16)),
    "wide": lambda: _applies(connection(width=4097), stream(4097)),
    "another norm": lambda: _applies(connection(RMSNormOptions()), stream()),
    "dropout": lambda: _applies(connection(rate=0.1), stream()),
    "all of bfloat16": lambda: _applies(connection().bfloat16(), stream()),
    "another connection": lambda: _applies(
        PreOptions().build(Site(width=32, context=4), LayerNormOptions(), 0.0), stream()
    ),
}


@needs_triton
def test_the_kernel_applies_where_it_computes_what_the_norm_does() -> None:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert _applies(connection(), stream())
        assert _applies(connection(width=4096), stream(4096))
        assert _applies(connection(rate=0.1).eval(), stream())
        with torch.no_grad():
            assert not _applies(connection(), stream())


@pytest.mark.parametrize("why", REFUSED)
def test_and_not_elsewhere(why: str) -> None:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert not REFUSED[why]()
