"""Post-norm layers whose stream is forked for one kernel: every gradient is that of the plain way."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trivium.kernels
from tests.battery import lively, some_ids
from tests.cases import CONTEXT, VOCAB
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.stack import PlainStack
from trivium.models.transformer import Transformer
from trivium.parts import residual
from trivium.parts.linear import Linear, lent
from trivium.parts.options.attention import MultiHead
from trivium.parts.options.feedforward import Glu, Mlp
from trivium.parts.options.norms import LayerNorm, Norm, RMSNorm
from trivium.parts.options.residual import Post, Pre
from trivium.parts.residual import Fork, PostConnection
from trivium.parts.site import Site

GPU = torch.cuda.is_available()
BIASED = MultiHead(bias="all")


def stack(**changes: Any) -> Stack:
    return Stack(layers=2, block=Block(**{"attention": BIASED, "residual": Post(), **changes}))


# A stack's changes, and the norms that the kernel takes then.
CASES: dict[str, tuple[dict[str, Stack], int]] = {
    "encoder": ({"encoder": stack()}, 4),
    "decoder": ({"decoder": stack(feedforward=Glu(bias=True))}, 4),
    "both": ({"encoder": stack(), "decoder": stack(cross=BIASED)}, 10),
    "no bias": ({"encoder": stack(attention=MultiHead(), feedforward=Mlp(bias=False))}, 4),
    "lock": ({"encoder": stack(lock=1e-9)}, 0),
    "dropout": ({"encoder": stack(dropout=1e-9)}, 0),
    "pre": ({"decoder": stack(residual=Pre())}, 0),
}


def model(sides: dict[str, Stack]) -> Transformer:
    both: dict[str, Any] = {"encoder": NoStack(), "decoder": NoStack(), **sides}
    return lively(ModelConfig(width=32, context=CONTEXT, vocab=VOCAB, **both)).train()


def gradients(one: Transformer, tokens: Tensor) -> list[Tensor]:
    source = {"source": tokens.flip(1)} if one.encoder is not None and one.decoder is not None else {}
    states = one(tokens, **source)
    loss = one.head.logits(states.hidden).square().mean()
    return list(torch.autograd.grad(loss, [weight for weight in one.parameters() if weight.requires_grad]))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every stream that a norm before it could have forked, whether it is two tensors."""
    found: list[bool] = []
    ends = Fork.ends

    def counted(self: Fork, x: Tensor) -> tuple[Tensor, Tensor]:
        past, into = ends(self, x)
        found.append(past is not into)
        return past, into

    monkeypatch.setattr(Fork, "ends", counted)
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each norm that is forked has a bias lent to it; the kernel's part is played by plain operations."""
    found: list[bool] = []

    def normed(x: Tensor, y: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float) -> Any:
        found.append(bias is not None)
        total = x + y if bias is None else x + y + (bias - bias.detach())
        result = F.layer_norm(total, weight.shape, weight, shift, eps)
        return result, result.view_as(result)

    stub = ModuleType("postnorm")
    stub.__dict__["normed"] = normed
    monkeypatch.setitem(sys.modules, "trivium.kernels.postnorm", stub)
    monkeypatch.setattr(trivium.kernels, "postnorm", stub, raising=False)
    monkeypatch.setattr(PostConnection, "forks", lambda self, x: not self.dropout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_forked_stream_has_the_gradients_of_the_plain_one(
    name: str, calls: list[bool], forked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first part of each side read a stream that comes from a norm."""
    sides, norms = CASES[name]
    one, tokens = model(sides), some_ids(2, 7)
    fast = gradients(one, tokens)
    assert calls == [name != "no bias"] * norms
    assert forked == [False, True, True, True, False, True, True, True, True, True][:norms]
    monkeypatch.setattr(PostConnection, "forks", lambda self, x: False)
    slow = gradients(one, tokens)
    assert len(calls) == norms
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_compiled_model_has_a_forked_stream_too(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler must see that a layer is given what the norm before it has left; here the two are told apart."""
    from trivium.kernels import postnorm

    normed = postnorm.normed

    def told_apart(*given: Any) -> tuple[Tensor, Tensor]:
        past, into = normed(*given)
        return past, -into

    one, tokens = model(CASES["both"][0]), some_ids(2, 7)
    same = gradients(one, tokens)
    monkeypatch.setattr(postnorm, "normed", told_apart)
    slow = gradients(one, tokens)
    fast = gradients(cast(Transformer, torch.compile(one, backend="aot_eager", fullgraph=True)), tokens)
    torch._dynamo.reset()
    assert any((ours - theirs).abs().max() > 1e-3 for ours, theirs in zip(slow, same, strict=True))
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_what_cannot_lend_its_bias_keeps_it(calls: list[bool]) -> None:
    """A frozen bias has no gradient; before products in float8 the compiler's way is the faster one."""
    one, tokens = model(CASES["encoder"][0]), some_ids(2, 7)
    layers = list(cast(PlainStack, one.encoder).blocks)
    cast(Any, layers[0]).attention.out.narrow = True
    cast(Any, layers[1]).feedforward.down.bias.requires_grad = False
    gradients(one, tokens)
    assert calls == [True, True, False]


def test_nothing_is_forked_where_layers_are_computed_again(calls: list[bool]) -> None:
    one, tokens = model(CASES["encoder"][0]), some_ids(2, 7)
    plain = gradients(one, tokens)
    calls.clear()
    cast(PlainStack, one.encoder).recompute = True
    again = gradients(one, tokens)
    assert not calls
    for ours, theirs in zip(again, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


class Elsewhere:
    """A tensor of bfloat16 on a GPU, as far as anybody asks."""

    def __init__(self, kind: str = "cuda", width: int = 32, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.shape, self.dtype = torch.device(kind), (1, 4, width), dtype


REFUSED: dict[str, dict[str, Any]] = {
    "cpu": {"x": Elsewhere("cpu")},
    "float32": {"x": Elsewhere(dtype=torch.float32)},
    "float16": {"x": Elsewhere(dtype=torch.float16)},
    "wide": {"x": Elsewhere(width=4097)},
    "another norm": {"norm": RMSNorm()},
    "dropout": {"rate": 0.1},
    "no gradients": {"grad": False},
    "all of bfloat16": {"kind": torch.bfloat16},
}


def forks(
    x: Elsewhere, norm: Norm | None = None, rate: float = 0.0, kind: torch.dtype = torch.float32, grad: bool = True
) -> bool:
    around = Post().build(Site(width=32, context=4), norm or LayerNorm(), rate).to(kind).train()
    assert isinstance(around, PostConnection)
    with torch.set_grad_enabled(grad):
        return around.forks(cast(Tensor, x))


def test_a_stream_is_forked_where_the_kernel_does_what_the_norm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "FORKED", True)
    assert forks(Elsewhere())
    assert forks(Elsewhere(width=4096))


@pytest.mark.parametrize("why", REFUSED)
def test_and_not_elsewhere(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "FORKED", True)
    assert not forks(**{"x": Elsewhere(), **REFUSED[why]})


def test_without_triton_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "FORKED", False)
    assert not forks(Elsewhere())


def test_a_layer_of_another_kind_keeps_its_bias() -> None:
    class Scaled(Linear):
        """What wraps or replaces a layer may use the bias in its own way."""

    assert lent(Linear(4, 4, bias=True, role="down")) is not None
    assert lent(Scaled(4, 4, bias=True, role="down")) is None
    assert lent(Linear(4, 4, bias=False, role="down")) is None
    assert lent(None) is None


@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("name", ["encoder", "decoder", "both", "no bias"])
def test_the_kernel_gives_the_gradients_of_the_plain_way(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    from trivium.kernels import postnorm

    counted: list[int] = []
    launch = postnorm.launch

    def counting(*given: Any) -> None:
        counted.append(1)
        launch(*given)

    monkeypatch.setattr(postnorm, "launch", counting)
    one, tokens = model(CASES[name][0]).float().cuda(), some_ids(2, 7).cuda()
    for side in (one.encoder, one.decoder):
        if side is not None:
            side.stream = torch.bfloat16

    def found() -> list[Tensor]:
        torch._dynamo.reset()
        run = torch.compile(one) if way == "compiled" else one
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return gradients(cast(Transformer, run), tokens)

    fast = found()
    assert len(counted) == CASES[name][1]
    monkeypatch.setattr(residual, "FORKED", False)
    slow = found()
    assert len(counted) == CASES[name][1]
    most = max(float(theirs.norm()) for theirs in slow)  # the bias of a key has no gradient but dust
    for ours, theirs in zip(fast, slow, strict=True):
        assert ours.dtype == theirs.dtype
        assert float((ours - theirs).norm()) <= 0.03 * float(theirs.norm()) + 1e-3 * most
