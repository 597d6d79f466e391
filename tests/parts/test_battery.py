"""Every part kind and every shrunk preset through the battery, and the battery on models that must fail it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import battery, cases
from tests.cases import CASES, PARTS, SHRUNK, Case
from trivium import config as settings
from trivium.config import digest, kind_of
from trivium.errors import ConfigError
from trivium.models.config import BlockStack, ModelConfig
from trivium.models.options import BLOCKS
from trivium.models.presets import PRESETS
from trivium.models.transformer import Transformer
from trivium.parts.activations import ACTIVATIONS
from trivium.parts.init import INITS, Gpt
from trivium.parts.masks import Mask
from trivium.parts.options.attention import ATTENTIONS
from trivium.parts.options.boundary import BOUNDARIES
from trivium.parts.options.embeddings import EMBEDDINGS
from trivium.parts.options.feedforward import FEEDFORWARDS
from trivium.parts.options.norms import NORMS
from trivium.parts.options.output import OUTPUTS
from trivium.parts.options.positions import POSITIONS, RotaryOptions
from trivium.parts.options.residual import RESIDUALS
from trivium.parts.options.scaling import SCALINGS
from trivium.parts.options.sentence import SENTENCES
from trivium.parts.positions import RotaryPositions
from trivium.parts.site import NoPart

CAUSAL = [case for case in CASES if case.causal]
# compiling cares for no init
DISTINCT = list({digest(replace(case.config, init=Gpt())): case for case in reversed(CASES)}.values())
# one compilation takes a second: by default every part in one family, each with the others under --full
FIRST = {case.name.split(": ")[-1]: case.name for case in reversed(DISTINCT)}
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


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name in FIRST.values() else pytest.mark.full, id=case.name)
        for case in DISTINCT
    ],
)
def test_compiled_equals_eager(case: Case) -> None:
    battery.check_compiled(case, "aot_eager")


WIRINGS = ("plain", "post-norm", "sandwich", "parallel", "positions shaw", "glu silu", "positions t5")


@pytest.mark.parametrize(
    ("case", "place"),
    [
        pytest.param(case, place, id=f"{case.name}, {place}")
        for case in PARTS
        if case.name.split(": ")[1] in WIRINGS
        for place in battery.dropouts(case)
    ],
)
def test_the_dropout_of_every_place_acts_in_training_only(case: Case, place: str) -> None:
    battery.check_dropout(case, place)


INDUCTOR = ("llama-mini", "bert-mini", "t5-mini")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name in INDUCTOR else pytest.mark.full, id=case.name)
        for case in DISTINCT
        if case.name in FIRST.values()  # with the others it would take an hour
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what importing inductor says of torch itself
def test_compiled_by_inductor_equals_eager(case: Case) -> None:
    battery.check_compiled(case, "inductor")


def used(table: Mapping[str, type[Any]], place: str) -> set[str]:
    """The kinds of a place that some case has."""
    kinds = set()
    for case in PARTS:
        holders: list[Any] = [case.config, *case.blocks()]
        found = [getattr(holder, place) for holder in holders if hasattr(holder, place)]
        kinds |= {kind_of(part, table) for part in found if not isinstance(part, NoPart)}
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
        ("sentence", SENTENCES),
        ("boundary", BOUNDARIES),
        ("init", INITS),
    ],
)
def test_every_kind_of_every_place_is_in_the_battery(place: str, table: Mapping[str, type[Any]]) -> None:
    assert set(table) <= used(table, place)


def test_every_activation_block_scaling_and_preset_is_in_the_battery() -> None:
    blocks: list[Any] = [block for case in PARTS for block in case.blocks()]
    for table in FEEDFORWARDS.values():
        of_kind: list[Any] = [block.feedforward for block in blocks if isinstance(block.feedforward, table)]
        assert {part.activation for part in of_kind} == set(ACTIVATIONS)
    assert {kind_of(block, BLOCKS) for block in blocks} == set(BLOCKS)
    turned = [block.position for block in blocks if isinstance(block.position, RotaryOptions)]
    assert {kind_of(position.scaling, SCALINGS) for position in turned} == set(SCALINGS)
    assert [case.name for case in SHRUNK] == list(PRESETS)


def test_what_is_out_of_place_is_refused_in_a_sentence() -> None:
    for start, (families, reason) in cases.OUT_OF_PLACE.items():
        assert len(reason) > 20
        if start == "tied":  # means the same as another choice, so there is nothing to refuse
            continue
        for name, places in cases._parts():
            for family in families if name.startswith(start) else ():
                with pytest.raises(ConfigError):
                    cases._model(family, **dict(places))


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
    peeking = named("encoder: plain")
    with pytest.raises(AssertionError, match="sees"):
        battery.check_no_leak_by_gradient(peeking)
    with pytest.raises(AssertionError, match="sees"):
        battery.check_no_leak_by_perturbation(peeking)


def test_the_cache_check_finds_a_triangle_at_the_wrong_corner(monkeypatch: pytest.MonkeyPatch) -> None:
    def top_left(self: Mask, queries: int, keys: int, device: torch.device) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril()[None, None]

    monkeypatch.setattr(Mask, "dense", top_left)
    with pytest.raises(AssertionError, match="differs by"):
        battery.check_cache(named("decoder: positions rotary halves"))


def test_the_cache_check_finds_positions_that_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RotaryPositions.prepare
    monkeypatch.setattr(RotaryPositions, "prepare", lambda self, at, keys: honest(self, at - at[:, :1], keys))
    with pytest.raises(AssertionError, match="differs by"):
        battery.check_cache(named("decoder: positions rotary halves"))


def test_the_padding_check_finds_a_mask_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Mask.dense
    monkeypatch.setattr(Mask, "dense", lambda self, *sizes: honest(Mask(causal=self.causal), *sizes))
    with pytest.raises(AssertionError, match="differs by"):
        battery.check_padding(named("decoder: plain"))
    with pytest.raises(AssertionError, match="differs by"):
        battery.check_packed(named("decoder: plain"))


def test_the_gradient_check_finds_a_parameter_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = battery.lively

    def with_a_spare(config: ModelConfig, **options: Any) -> Transformer:
        model = honest(config, **options)
        model.register_parameter("spare", nn.Parameter(torch.ones(2)))
        return model

    monkeypatch.setattr(battery, "lively", with_a_spare)
    with pytest.raises(AssertionError, match="spare has no gradient"):
        battery.check_gradients(named("decoder: plain"))


def test_shrinking_keeps_what_makes_a_preset_itself() -> None:
    for name, maker in PRESETS.items():
        large, small = maker(), next(case.config for case in SHRUNK if case.name == name)
        for side in ("encoder", "decoder"):
            before, after = getattr(large, side), getattr(small, side)
            assert type(before) is type(after)
            if isinstance(before, BlockStack):
                one, other = settings.flat(before.block), settings.flat(after.block)
                changed = {key.split(".")[-1] for key in one if one[key] != other.get(key)}
                assert changed <= {"heads", "groups", "head", "hidden", "window"}, name
        assert (large.embedding, large.output, large.init) == (small.embedding, small.output, small.init)
