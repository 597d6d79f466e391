"""R3 and R19 for the three families: the same bits twice, and the same bits after a stop anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.conftest import FAMILIES, create, finish, silent, start
from tests.training.test_resume import assert_equal_ends, assert_goes_on_exactly
from trivium.config import load, overrides
from trivium.data import shards
from trivium.data.batch import Batch
from trivium.data.config import DataConfig
from trivium.errors import ConfigError
from trivium.parts.losses import Losses
from trivium.text.kinds import Bytes
from trivium.text.tokenizer import open_tokenizer
from trivium.training import validate as validation
from trivium.training.build_job import build_job
from trivium.training.loop import updates
from trivium.training.metrics import rows
from trivium.training.recipe import Recipe
from trivium.training.validate import validate

Make = Callable[..., Recipe]
Count = Callable[[int, int], int]
OTHERS = [name for name in FAMILIES if name != "decoder"]
SPECIALS = {"decoder": set(), "encoder": {"[MASK]"}, "encoder-decoder": {"<pad>", "<extra_id_0>"}}
STILL = {
    f"model.{side}.block.{part}": 0.0 for side in ("encoder", "decoder") for part in ("dropout", "attention.dropout")
}


def quiet(kind: str) -> dict[str, float]:
    """No dropout anywhere."""
    sides = ("encoder", "decoder") if kind == "encoder-decoder" else (kind,)
    found = {key: value for key, value in STILL.items() if key.split(".")[1] in sides}
    return found | ({"model.decoder.block.cross.dropout": 0.0} if kind == "encoder-decoder" else {})


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_same_seed_gives_the_same_losses_twice(small: Make, tmp_path: Path, kind: str) -> None:
    """R19."""
    one, two = (start(small(kind, **{"budget.steps": 8}), tmp_path / name) for name in ("one", "two"))
    finish(one)
    finish(two)
    assert_equal_ends(one.folder, two.folder, 8)
    assert len({row["loss"] for row in rows(one.folder / "metrics.jsonl")}) > 8  # losses, not a constant
    written = rows(one.folder / "samples.jsonl")
    assert {row["step"] for row in written} == {8}
    assert all(("reference" in row) == (kind != "decoder") for row in written)


@pytest.mark.parametrize("kind", OTHERS)
def test_resuming_gives_the_same_bits(small: Make, tmp_path: Path, kind: str, count: Count) -> None:
    """R3, with dropout and accumulation, in the middle of an epoch; every step under --full."""
    recipe = small(kind, average="ema", **{"checkpoint.every": 1, "checkpoint.keep": 30})
    straight = start(recipe, tmp_path / "straight")
    finish(straight)
    for step in range(count(7, 1), 21, count(6, 1)):
        assert_goes_on_exactly(straight.folder, step, tmp_path)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_learns_a_text_that_repeats(small: Make, tmp_path: Path, kind: str) -> None:
    """Guessing one of 4 letters costs log 4 = 1.39 nats; in a text that repeats they can be known."""
    text = tmp_path / "letters.txt"
    text.write_text("abcd" * 2000)
    changes = {"optim.rate": 1e-2, "schedule": "constant", "batch.rows": 16, "batch.micro": 0}
    job = build_job(create(small(kind, **quiet(kind), **changes, **{"data.paths": [str(text)]}), tmp_path), 120)
    found = [float(update.loss) for update in updates(job)]
    assert found[0] > 5  # of 257 and more
    assert sum(found[-10:]) / 10 < 0.7


@pytest.mark.parametrize("kind", FAMILIES)
def test_micro_batches_change_the_order_of_sums_only(small: Make, tmp_path: Path, kind: str) -> None:
    """What is masked or cut out does not depend on how many rows go through the model at a time."""
    found = []
    for micro in (1, 4, 6):
        context = create(small(kind, **quiet(kind), **{"batch.micro": micro}), tmp_path / str(micro))
        job = build_job(context, 8)
        trained = [float(update.loss) for update in updates(job)]
        found.append([*trained, validate(job, context.valid, limit=7).loss, job.tokens])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_tokenizer_has_the_special_tokens_of_the_objective(small: Make, tmp_path: Path, kind: str) -> None:
    context = create(small(kind), tmp_path)
    assert set(context.tokenizer.specials) >= SPECIALS[kind]
    assert context.recipe.model.vocab == context.tokenizer.size >= 257 + len(SPECIALS[kind])
    assert open_tokenizer(context.folder).digest == context.tokenizer.digest


@pytest.mark.parametrize("kind", OTHERS)
def test_shards_built_without_special_tokens_serve_all_the_same(
    small: Make, tmp_path: Path, text: Path, kind: str
) -> None:
    """New ids come after the old ones: the run's tokenizer grows, the shards stay as they are."""
    built = tmp_path / "shards"
    config = DataConfig(paths=(str(text),), valid=0.1)
    shards.build(config, Bytes().build([]), built, progress=silent, say=silent)
    straight = start(small(kind, **{"data.paths": [str(built)]}), tmp_path / "straight")
    assert straight.context.tokenizer.size > 257
    finish(straight)
    assert_goes_on_exactly(straight.folder, 15, tmp_path)


def test_only_what_predicts_every_token_is_measured_in_bits_per_byte(small: Make, tmp_path: Path) -> None:
    for kind in FAMILIES:
        context = create(small(kind), tmp_path / kind)
        result = validate(build_job(context, 1), context.valid, limit=0)
        assert (result.bits_per_byte is not None) == (kind == "decoder")
        assert result.loss > 0


@pytest.mark.parametrize(
    ("kind", "objective", "advice"),
    [
        ("encoder", "causal", "set objective=masked"),
        ("encoder-decoder", "causal", "set objective=denoise or objective=prefix"),
        ("decoder", "masked", "set objective=causal or objective=denoise or objective=prefix"),
    ],
)
def test_an_objective_of_another_family_is_refused_by_name(small: Make, kind: str, objective: str, advice: str) -> None:
    with pytest.raises(ConfigError) as refused:
        small(kind, objective=objective)
    assert str(refused.value).startswith(f"objective: {objective} cannot train a model of the {kind} family; {advice}")


@pytest.mark.parametrize(
    ("preset", "objective"), [("gpt-mini", "causal"), ("bert-mini", "masked"), ("t5-mini", "denoise")]
)
def test_our_small_presets_train(text: Path, tmp_path: Path, preset: str, objective: str) -> None:
    side = "encoder" if preset == "bert-mini" else "decoder"
    values = {"name": "x", "model": preset, "model.context": 32, f"model.{side}.layers": 1, "objective": objective}
    more = {"data.paths": [str(text)], "tokenizer.kind": "bytes", "batch.rows": 4, "budget.steps": 3, "device": "cpu"}
    recipe = load(Recipe, overrides(values | more | {"precision": "fp32"}))
    job = build_job(create(recipe, tmp_path), 3)
    found = torch.stack([update.loss for update in updates(job)])
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(("micro", "compiled"), [(2, True), (4000, False)])
def test_few_validation_batches_are_not_compiled_for(
    small: Make, tmp_path: Path, micro: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in evaluation is another program, and so is a last batch with fewer rows."""
    monkeypatch.setattr(validation, "_BATCHES", 10)
    context = create(small(**{"batch.rows": 4000, "batch.micro": micro, "evaluate.every": 1.0}), tmp_path)
    job, seen = build_job(context, 1), list[tuple[str, int]]()
    inner = job.evaluate

    def noted(how: str) -> Callable[[Batch], Losses]:
        def compute(batch: Batch) -> Losses:
            seen.append((how, len(batch.inputs["tokens"])))
            return inner(batch)

        return compute

    job.compute, job.evaluate = noted("compiled"), noted("eager")
    result = validate(job, context.train, limit=35)
    assert sum(count for _, count in seen) == 35
    assert [how for how, _ in seen] == (["compiled"] * 17 + ["eager"] if compiled else ["eager"])
    job.micro = 1
    assert validate(job, context.train, limit=35).loss == pytest.approx(result.loss)
