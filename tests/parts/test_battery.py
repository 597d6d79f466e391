"""Every part kind and every shrunk preset through the battery, and the battery on models that must fail it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import battery
from tests.battery import CASES, PARTS, SHRUNK, Case
from trivium.config import digest, kind_of
from trivium.models.config import ModelConfig, Stack
from trivium.models.presets import PRESETS
from trivium.models.transformer import Transformer
from trivium.parts.attention import ATTENTIONS
from trivium.parts.embeddings import EMBEDDINGS
from trivium.parts.feedforward import ACTIVATIONS, FEEDFORWARDS
from trivium.parts.init import INITS, Gpt
from trivium.parts.masks import Mask
from trivium.parts.norms import NORMS
from trivium.parts.output import OUTPUTS
from trivium.parts.positions import POSITIONS, RotaryPositions
from trivium.parts.residual import RESIDUALS

CAUSAL = [case for case in CASES if case.causal]
# the sizes of GPT-2 shrink to one model, and compiling cares for no init
DISTINCT = list({digest(replace(case.config, init=Gpt())): case for case in reversed(CASES)}.values())
CROSSED = [case for case in CASES if case.crossed]

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_causal = pytest.mark.parametrize("case", CAUSAL, ids=lambda case: case.name)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@every
def test_states_and_logits_have_their_shapes(case: Case) -> None:
    battery.check_shape(case)


@every
def test_outputs_come_in_the_dtype_of_the_weights(case: Case) -> None:
    battery.check_dtype(case)


@every
def test_the_configuration_counts_its_parameters_exactly(case: Case) -> None:
    battery.check_count(case)


@every
def test_a_step_reaches_every_parameter(case: Case) -> None:
    battery.check_gradients(case)


@every_causal
def test_no_gradient_flows_from_a_later_token(case: Case) -> None:
    battery.check_no_leak_by_gradient(case)


@every_causal
def test_a_later_token_changes_nothing_before_it(case: Case) -> None:
    battery.check_no_leak_by_perturbation(case)


@every_causal
def test_decoding_with_a_cache_equals_reading_it_all(case: Case) -> None:
    battery.check_cache(case)


@every
def test_padding_changes_nothing_at_real_tokens(case: Case) -> None:
    battery.check_padding(case)


@pytest.mark.parametrize("case", CROSSED, ids=lambda case: case.name)
def test_padding_of_the_source_changes_nothing(case: Case) -> None:
    battery.check_source_padding(case)


@every
def test_a_batch_of_many_equals_one_at_a_time(case: Case) -> None:
    battery.check_batch(case)


@every
def test_packed_documents_equal_the_documents_alone(case: Case) -> None:
    battery.check_packed(case)


@every
def test_half_precision_stays_near_float32(case: Case) -> None:
    battery.check_half_precision(case)


@every
def test_the_same_seed_gives_the_same_model(case: Case) -> None:
    battery.check_determinism(case)


@every
def test_a_saved_model_comes_back_bit_for_bit(case: Case, tmp_path: Path) -> None:
    battery.check_saved(case, tmp_path / "model")


@every
def test_a_model_laid_out_for_decoding_is_the_same_model(case: Case, tmp_path: Path) -> None:
    battery.check_arranged(case, tmp_path / "model")


@pytest.mark.parametrize("case", DISTINCT, ids=lambda case: case.name)
def test_compiled_equals_eager(case: Case) -> None:
    battery.check_compiled(case, "aot_eager")


INDUCTOR = "llama-mini"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.name == INDUCTOR else pytest.mark.full, id=case.name) for case in DISTINCT],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what importing inductor says of torch itself
def test_compiled_by_inductor_equals_eager(case: Case) -> None:
    battery.check_compiled(case, "inductor")


def used(table: Mapping[str, type[Any]], place: str) -> set[str]:
    """The kinds of a place that some case has."""
    kinds = set()
    for case in PARTS:
        holders: list[Any] = [case.config, *case.blocks()]
        kinds |= {kind_of(getattr(holder, place), table) for holder in holders if hasattr(holder, place)}
    return kinds


@pytest.mark.parametrize(
    ("place", "table"),
    [
        ("attention", ATTENTIONS),
        ("cross", ATTENTIONS),
        ("position", POSITIONS),
        ("norm", NORMS),
        ("residual", RESIDUALS),
        ("feedforward", FEEDFORWARDS),
        ("embedding", EMBEDDINGS),
        ("output", OUTPUTS),
        ("init", INITS),
    ],
)
def test_every_kind_of_every_place_is_in_the_battery(place: str, table: Mapping[str, type[Any]]) -> None:
    assert set(table) <= used(table, place)


def test_every_activation_and_every_preset_is_in_the_battery() -> None:
    blocks = [block for case in PARTS for block in case.blocks()]
    assert {getattr(block.feedforward, "activation", "") for block in blocks} == set(ACTIVATIONS)
    assert [case.name for case in SHRUNK] == list(PRESETS)


def test_every_exemption_is_used_and_has_a_reason() -> None:
    for exempt in battery.EXEMPT:
        assert len(exempt.reason) > 20
        assert any(
            exempt.when(block) and name.endswith(exempt.parameter)
            for case in CASES
            for block in case.blocks()
            for name, _ in Transformer(case.config).named_parameters()
        )


def test_the_leak_checks_find_a_model_that_looks_ahead() -> None:
    peeking = named("encoder")
    with pytest.raises(AssertionError, match="sees"):
        battery.check_no_leak_by_gradient(peeking)
    with pytest.raises(AssertionError, match="sees"):
        battery.check_no_leak_by_perturbation(peeking)


def test_the_cache_check_finds_a_triangle_at_the_wrong_corner(monkeypatch: pytest.MonkeyPatch) -> None:
    def top_left(self: Mask, queries: int, keys: int, device: torch.device) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril()[None, None]

    monkeypatch.setattr(Mask, "dense", top_left)
    with pytest.raises(AssertionError, match="differs by"):
        battery.check_cache(named("rotary halves"))


def test_the_cache_check_finds_positions_that_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RotaryPositions.prepare
    monkeypatch.setattr(RotaryPositions, "prepare", lambda self, at: honest(self, at - at[:, :1]))
    with pytest.raises(AssertionError, match="differs by"):
        battery.check_cache(named("rotary halves"))


def test_the_padding_check_finds_a_mask_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Mask.resolve
    monkeypatch.setattr(Mask, "resolve", lambda self, *sizes: honest(Mask(causal=self.causal), *sizes))
    with pytest.raises(AssertionError, match="differs by"):
        battery.check_padding(named("plain"))
    with pytest.raises(AssertionError, match="differs by"):
        battery.check_packed(named("plain"))


def test_the_gradient_check_finds_a_parameter_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = battery.lively

    def with_a_spare(config: ModelConfig, **options: Any) -> Transformer:
        model = honest(config, **options)
        model.register_parameter("spare", nn.Parameter(torch.ones(2)))
        return model

    monkeypatch.setattr(battery, "lively", with_a_spare)
    with pytest.raises(AssertionError, match="spare has no gradient"):
        battery.check_gradients(named("plain"))


def test_shrinking_keeps_what_makes_a_preset_itself() -> None:
    for name, maker in PRESETS.items():
        large, small = maker(), named(name).config
        assert isinstance(large.decoder, Stack)
        assert isinstance(small.decoder, Stack)
        before, after = large.decoder.block, small.decoder.block
        assert (before.norm, before.residual, before.position) == (after.norm, after.residual, after.position)
        assert type(before.feedforward) is type(after.feedforward)
        assert (large.embedding, large.output, large.init) == (small.embedding, small.output, small.init)
