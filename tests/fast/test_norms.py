"""The fast RMSNorm against the plain one and the worked numbers."""

from __future__ import annotations

import pytest
import torch

from tests.fast.compare import close, fast_copy, outcome
from tests.parts.drawing import drawn, random
from trivium.fast.norms import FastRMSNorm
from trivium.parts.norms import RMSNorm
from trivium.parts.options.norms import RMSNormOptions
from trivium.parts.site import Site

SITE = Site(width=24, context=8)


@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 5, 24), (2, 3, 4, 24), (0, 24)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_plain_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    plain = drawn(RMSNormOptions(eps=1e-3).build(SITE)).to(dtype)
    norm, x = fast_copy(plain), random(*shape).to(dtype)
    assert type(norm) is FastRMSNorm
    found, expected = (outcome(part, x, list(part.parameters())) for part in (norm, plain))
    if dtype == torch.bfloat16:
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    close(found, expected, 1e-12 if dtype == torch.float64 else 1e-6)
    with torch.no_grad():
        assert torch.equal(norm(x), plain(x))


def test_the_fast_norm_gives_the_worked_numbers() -> None:
    norm = fast_copy(RMSNormOptions(eps=1e-6).build(Site(width=4, context=8)))
    worked = torch.tensor([0.365148, 0.730297, 1.095445, 1.460593])
    torch.testing.assert_close(norm(torch.tensor([1.0, 2.0, 3.0, 4.0])), worked, atol=1e-6, rtol=0)


def test_it_applies_to_eager_steps_in_the_precision_of_its_weight() -> None:
    norm = fast_copy(RMSNorm(24, 1e-6))
    assert isinstance(norm, FastRMSNorm)
    x = random(2, 24)
    assert norm.applies(x)
    assert norm.applies(x.double()) is False
    assert norm.applies(x.bfloat16()) is False
    with torch.no_grad():
        assert not norm.applies(x)


def test_compiled_it_is_one_graph_with_the_values_of_the_plain_norm() -> None:
    plain = drawn(RMSNormOptions().build(SITE))
    norm, x = fast_copy(plain), random(3, 24)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    found, expected = (outcome(call, x, list(norm.parameters())) for call in (compiled, norm))
    close(found, expected, 1e-6)
    torch._dynamo.reset()
