"""Positions that are added to the embeddings, and what holds for every scheme."""

# B batch, T tokens, S keys, D width, H heads, E head size, n positions

from __future__ import annotations

import copy
import math
from typing import Literal, NamedTuple, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.parts.drawing import drawn, random
from trivium.config import dump, load
from trivium.errors import ConfigError, RequestError
from trivium.parts.options.positions import (
    POSITIONS,
    AlibiOptions,
    BothOptions,
    BucketOptions,
    LearnedOptions,
    NoPositionOptions,
    Position,
    RotaryOptions,
    ShawOptions,
    SinusoidalOptions,
)
from trivium.parts.options.scaling import Yarn
from trivium.parts.positions import LearnedPositions, Positions
from trivium.parts.site import Site

SITE = Site(width=16, context=12, heads=2, head=8, value=8)
Layout = Literal["interleaved", "halves"]
Spacing = Literal["paper", "tensor2tensor"]
EVERY: list[Position] = [
    NoPositionOptions(),
    SinusoidalOptions(),
    SinusoidalOptions(layout="halves", spacing="tensor2tensor"),
    LearnedOptions(),
    LearnedOptions(offset=2),
    ShawOptions(distance=3),
    ShawOptions(distance=2, values="none", tables="per-head"),
    BucketOptions(),
    RotaryOptions(),
    RotaryOptions(share=0.5, scaling=Yarn()),
    AlibiOptions(),
    BothOptions(absolute=LearnedOptions(offset=2)),
    BothOptions(absolute=SinusoidalOptions(), relative=RotaryOptions()),
]
every = pytest.mark.parametrize("options", EVERY, ids=repr)


def filled(options: Position, site: Site = SITE, seed: int = 0) -> Positions:
    """The built scheme with random tables."""
    return drawn(options.build(site), seed)


def table(options: SinusoidalOptions, site: Site = SITE) -> Tensor:
    """What is added to an input of zeros."""
    at_1T = torch.arange(site.context)[None]
    return options.build(site).embed(torch.zeros(1, site.context, site.width), at_1T)[0]


class Inputs(NamedTuple):
    """What a stack and its attention bring along, the same every time."""

    stream: Tensor  # [B, T, D]
    heads: Tensor  # [B, H, T, E]
    weights: Tensor  # [B, H, T, S]


def inputs(rows: int, queries: int, keys: int) -> Inputs:
    return Inputs(
        random(rows, queries, 16), random(rows, 2, queries, 8, seed=1), random(rows, 2, queries, keys, seed=2)
    )


def everything(part: Positions, at_BT: Tensor, keys_at_BS: Tensor, given: Inputs) -> list[Tensor | None]:
    """All that a scheme offers at these positions."""
    prepared = part.prepare(at_BT, keys_at_BS)
    return [
        part.embed(given.stream, at_BT),
        part.rotate(given.heads, prepared),
        part.bias(prepared),
        part.score(given.heads, prepared),
        part.value(given.weights, prepared),
    ]


def assert_same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("relative", [BucketOptions(), AlibiOptions(), RotaryOptions()], ids=repr)
def test_both_is_one_scheme_in_the_embeddings_and_the_other_in_attention(relative: Position) -> None:
    part, at = filled(BothOptions(absolute=LearnedOptions(offset=2), relative=relative)), torch.arange(3, 10)[None]
    table = part.get_parameter("absolute.table")
    alone = relative.build(SITE)
    alone.load_state_dict(part.get_submodule("relative").state_dict())
    given = inputs(1, 7, 7)
    expected = everything(alone, at, at, given)
    expected[0] = given.stream + table[5:12]
    assert_same(everything(part, at, at, given), expected)


# every scheme


def test_every_kind_of_the_table_is_tested_here() -> None:
    assert {type(options) for options in EVERY} == set(POSITIONS.values())


@every
def test_a_scheme_counts_its_parameters_and_names_its_tables(options: Position) -> None:
    part = options.build(SITE)
    assert options.cost(SITE).parameters == sum(parameter.numel() for parameter in part.parameters())
    schemes = [(name, module) for name, module in part.named_modules() if isinstance(module, Positions)]
    named = {
        f"{name}.{table}".lstrip(".")
        for name, scheme in schemes
        for table in scheme.declares
        if getattr(scheme, table) is not None
    }
    assert named == {name for name, _ in part.named_parameters()}
    assert {what.kind for _, scheme in schemes for what in scheme.declares.values()} <= {"position", "bias"}
    assert set(part.state_dict()) == named  # what can be computed is not saved


@pytest.mark.parametrize("options", [options for options in EVERY if options.cost(SITE).parameters], ids=repr)
def test_gradient_reaches_every_table(options: Position) -> None:
    part, at = filled(options), torch.arange(5)[None]
    outputs = [output.square().sum() for output in everything(part, at, at, inputs(1, 5, 5)) if output is not None]
    torch.stack(outputs).sum().backward()  # type: ignore[no-untyped-call]
    for parameter in part.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


@every
def test_a_batch_gives_what_its_rows_give_alone(options: Position) -> None:
    part, given = filled(options), inputs(2, 2, 5)
    at_BT, keys_at_BS = torch.tensor([[3, 4], [0, 7]]), torch.tensor([[0, 1, 2, 3, 4], [9, 0, 1, 0, 7]])
    whole = everything(part, at_BT, keys_at_BS, given)
    for row in range(2):
        only = slice(row, row + 1)
        alone = everything(part, at_BT[only], keys_at_BS[only], Inputs(*(tensor[only] for tensor in given)))
        assert_same([None if output is None else output[only] for output in whole], alone)


@every
def test_the_last_token_alone_gets_what_it_got_among_all(options: Position) -> None:
    """Decoding with a cache: one query, all keys."""
    part, at_1S, given = filled(options), torch.arange(9)[None], inputs(1, 9, 9)
    last = Inputs(given.stream[:, -1:], given.heads[:, :, -1:], given.weights[:, :, -1:])
    whole = everything(part, at_1S, at_1S, given)
    expected = [None if output is None else output[..., -1:, :] for output in whole]
    assert_same(everything(part, at_1S[:, -1:], at_1S, last), expected)


@every
def test_a_model_built_without_memory_finds_its_constants_when_it_gets_some(options: Position) -> None:
    with torch.device("meta"):
        part = options.build(SITE)
    assert all(tensor.device.type == "meta" for tensor in (*part.parameters(), *part.buffers()))
    for buffer, expected in zip(part.to_empty(device="cpu").buffers(), options.build(SITE).buffers(), strict=True):
        assert torch.equal(buffer, expected)


@every
def test_a_rounded_model_keeps_its_constants_and_gives_its_own_dtype(options: Position) -> None:
    exact, at = options.build(SITE), torch.arange(5)[None]
    part = copy.deepcopy(filled(options)).to(torch.bfloat16)
    assert all(torch.equal(*pair) for pair in zip(part.buffers(), exact.buffers(), strict=True))
    x_BHTE = random(1, 2, 5, 8).bfloat16()
    prepared = part.prepare(at, at)
    assert part.embed(random(1, 5, 16).bfloat16(), at).dtype == torch.bfloat16
    assert part.rotate(x_BHTE, prepared).dtype == torch.bfloat16
    assert (bias := part.bias(prepared)) is None or bias.dtype == torch.float32
    assert (score := part.score(x_BHTE, prepared)) is None or score.dtype == torch.bfloat16


@every
def test_compiled_equals_eager(options: Position) -> None:
    part, at, given = filled(options), torch.arange(4, 9)[None], inputs(1, 5, 5)
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    assert_same(compiled(part, at, at, given), everything(part, at, at, given))
    torch.compiler.reset()


@every
def test_options_survive_their_file(options: Position) -> None:
    assert load(type(options), dump(options)) == options
    assert hash(options) == hash(copy.deepcopy(options))


def test_only_shaws_tables_belong_to_one_layer() -> None:
    assert {type(options) for options in EVERY if options.scope == "layer"} == {ShawOptions}


# sinusoidal


def test_the_sinusoid_gives_the_worked_numbers() -> None:
    worked = [
        [0, 1, 0, 1],
        [0.841471, 0.540302, 0.010000, 0.999950],
        [0.909297, -0.416147, 0.019999, 0.999800],
        [0.141120, -0.989992, 0.029996, 0.999550],
    ]
    actual = table(SinusoidalOptions(), Site(width=4, context=4))
    torch.testing.assert_close(actual, torch.tensor(worked), atol=1e-6, rtol=0)


@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("spacing", get_args(Spacing))
def test_the_sinusoid_is_its_formula_in_every_layout_and_spacing(layout: Layout, spacing: Spacing) -> None:
    actual = table(SinusoidalOptions(layout=layout, spacing=spacing), Site(width=10, context=3000))
    for at in (0, 1, 17, 2999):
        for pair in range(5):
            angle = at / 10_000 ** (pair / (5 if spacing == "paper" else 4))
            sine, cosine = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + 5)
            assert actual[at, sine].item() == pytest.approx(math.sin(angle), abs=1e-7)
            assert actual[at, cosine].item() == pytest.approx(math.cos(angle), abs=1e-7)


def test_the_products_of_a_sinusoid_depend_on_the_distance_alone_and_fall_at_first() -> None:
    table_nD = table(SinusoidalOptions(), Site(width=64, context=200)).double()
    torch.testing.assert_close(table_nD.square().sum(-1), torch.full((200,), 32.0).double(), atol=1e-5, rtol=0)
    products = table_nD @ table_nD.T
    for ahead in range(1, 60):
        diagonal = products.diagonal(ahead)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert products[0, :4].diff().max() < 0


def test_a_sinusoid_is_added_and_a_short_one_begins_a_long_one() -> None:
    x_BTD, at = random(2, 3, 16), torch.tensor([[0, 4, 11], [2, 2, 0]])
    part = SinusoidalOptions().build(SITE)
    torch.testing.assert_close(part.embed(x_BTD, at) - x_BTD, table(SinusoidalOptions())[at])
    longer = table(SinusoidalOptions(), Site(width=16, context=40))
    assert torch.equal(longer[:12], table(SinusoidalOptions()))


def test_a_sinusoid_of_two_dimensions_has_one_wavelength() -> None:
    actual = table(SinusoidalOptions(spacing="tensor2tensor"), Site(width=2, context=3))
    torch.testing.assert_close(actual[2], torch.tensor([math.sin(2), math.cos(2)]))


def test_a_sinusoid_refuses_an_odd_width() -> None:
    for ask in (SinusoidalOptions().build, SinusoidalOptions().cost):
        with pytest.raises(ConfigError, match="a width of 5 cannot be odd"):
            ask(Site(width=5, context=4))


# learned


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_add_the_row_of_each_position(offset: int) -> None:
    part = LearnedOptions(offset=offset).build(SITE)
    assert isinstance(part, LearnedPositions)
    assert part.table.shape == (12 + offset, 16)
    with torch.no_grad():
        part.table.copy_(torch.arange(12.0 + offset)[:, None].expand(-1, 16))
    x_BTD, at = random(2, 3, 16), torch.tensor([[0, 4, 11], [2, 2, 0]])
    torch.testing.assert_close(part.embed(x_BTD, at) - x_BTD, (at[..., None] + offset).float().expand(-1, -1, 16))


@settings(max_examples=30, deadline=None)
@given(at=st.lists(st.integers(-20, 40), min_size=1, max_size=15), offset=st.sampled_from([0, 2]), fixed=st.booleans())
def test_a_position_without_a_row_is_refused_and_any_other_is_not(at: list[int], offset: int, fixed: bool) -> None:
    """Also where a row exists by accident: those before the offset are nobody's."""
    part = filled(SinusoidalOptions() if fixed else LearnedOptions(offset=offset))
    x_BTD = torch.zeros(1, len(at), 16)
    if len(at) <= 12 and min(at) >= 0 and max(at) < 12:
        assert part.embed(x_BTD, torch.tensor([at])).shape == x_BTD.shape
    else:
        with pytest.raises(RequestError, match=r"more than the 12 positions|is not one of the 12"):
            part.embed(x_BTD, torch.tensor([at]))


def test_a_negative_offset_is_refused() -> None:
    with pytest.raises(ConfigError, match="offset: -1 is less than 0"):
        LearnedOptions(offset=-1)


# none


def test_no_positions_change_nothing() -> None:
    part, x_BTD = NoPositionOptions().build(SITE), random(1, 3, 16)
    at = torch.tensor([[5, 6, 7]])
    prepared = part.prepare(at, at)
    assert part.embed(x_BTD, at) is x_BTD
    assert part.rotate(x_BTD, prepared) is x_BTD
    assert part.bias(prepared) is part.score(x_BTD, prepared) is part.value(x_BTD, prepared) is None
    assert not part.values
