"""A new run that begins with another one's weights: new data, schedule and budget, nothing else changed."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_outside import ScaleNorm
from tests.training.conftest import create, finish, resume, silent, start
from tests.training.test_resume import assert_equal_ends, assert_goes_on_exactly, cut_back, cut_copy
from trivium import config as settings
from trivium.checkpoints import bundle, format
from trivium.errors import CheckpointError, ConfigError
from trivium.interop.quantize import quantize
from trivium.models.transformer import weights
from trivium.text.tokenizer import open_tokenizer
from trivium.training.build_job import build_initial_job, build_job
from trivium.training.loop import updates
from trivium.training.metrics import rows
from trivium.training.recipe import Recipe
from trivium.training.recipes import read_recipe
from trivium.training.run import open_run
from trivium.training.setup import create_run

Make = Callable[..., Recipe]


@pytest.fixture
def first(small: Make, tmp_path: Path) -> Path:
    """A finished run with all its checkpoints."""
    session = start(small(**{"checkpoint.keep": 30, "checkpoint.use": "last"}), tmp_path / "first")
    finish(session)
    return session.folder


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another text."""
    path = tmp_path / "other.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


def bare(folder: Path, text: Path, **changes: Any) -> Recipe:
    """A recipe that leaves model and tokenizer to its start."""
    keys = ("device", "threads", "precision", "batch.rows", "batch.micro", "data.valid", "evaluate.every")
    known = settings.flat(settings.read(_run(folder) / "config.toml"))
    values = {key: known[key] for key in keys}
    values |= {"name": "second", "start": str(folder), "data.paths": [str(text)], "budget.steps": 6, **changes}
    return settings.load(Recipe, settings.overrides(values))


def _run(folder: Path) -> Path:
    return folder if (folder / "config.toml").is_file() else folder.parent.parent


@pytest.mark.parametrize("where", ["run", "checkpoint", "bundle", "unfinished"])
def test_a_new_run_begins_with_the_weights_of_its_start(first: Path, other: Path, tmp_path: Path, where: str) -> None:
    wanted = format.tensors(first / "checkpoints" / "step-00000020", "model")
    named = first
    if where == "checkpoint":
        named = first / "checkpoints" / "step-00000010"
        wanted = format.tensors(named, "model")
    if where == "unfinished":
        (first / "model.json").unlink()
    recipe = bare(named, other, average="ema")
    if where == "bundle":
        named = tmp_path / "saved"
        found = bundle.open_bundle(first)
        bundle.save(named, found.module.config, weights(found.module), found.tokenizer, {})
        recipe = bare(first, other, average="ema", start=str(named))
    context = create(recipe, tmp_path / "second")
    job = build_job(context, 6)
    own = weights(job.model)
    assert own.keys() == wanted.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in wanted.items())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in job.average.tensors().items())
    assert (job.step, job.cursor) == (0, 0)
    assert all(not tensor.any() for tensor in job.optimizer.tensors().values())  # fresh moments
    assert context.recipe.model == settings.load(Recipe, settings.read(first / "config.toml")).model
    assert context.tokenizer.digest == open_tokenizer(first).digest
    list(updates(job))


def test_the_moments_come_too_if_they_are_asked_for(first: Path, other: Path, tmp_path: Path) -> None:
    named = first / "checkpoints" / "step-00000010"
    job = build_job(create(bare(named, other, start_optimizer="keep"), tmp_path / "second"), 6)
    wanted = format.tensors(named, "optimizer")
    own = job.optimizer.tensors()
    assert own.keys() == wanted.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in wanted.items())


def test_one_rule_says_whether_the_start_gives_its_averaged_weights(small: Make, other: Path, tmp_path: Path) -> None:
    """A fresh optimizer begins with the weights for use, a kept one with those that its moments belong to."""
    ema = {"average.kind": "ema", "average.decay": 0.5, "average.warmup": "none"}
    session = start(small(**ema, **{"checkpoint.use": "last"}), tmp_path / "first")
    finish(session)
    last = session.folder / "checkpoints" / "step-00000020"
    raw, averaged = format.tensors(last, "model"), format.tensors(last, "average")
    assert any(not torch.equal(tensor, averaged[name]) for name, tensor in raw.items())
    for number, (named, keep) in enumerate(itertools.product(("run", "checkpoint", "unfinished"), ("fresh", "keep"))):
        if named == "unfinished":
            (session.folder / "model.json").unlink(missing_ok=True)
        recipe = bare(last if named == "checkpoint" else session.folder, other, start_optimizer=keep)
        own = weights(build_job(create(recipe, tmp_path / str(number)), 6).model)
        wanted = raw if keep == "keep" else averaged
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in own.items()), (named, keep)


@pytest.mark.parametrize("where", ["run", "checkpoint"])
def test_a_start_with_parts_from_outside_can_be_begun_with(
    small: Make, other: Path, tmp_path: Path, where: str
) -> None:
    session = start(small(**{"model.decoder.block.norm": ScaleNorm(eps=1e-6), "budget.steps": 5}), tmp_path / "first")
    finish(session)
    named = session.folder if where == "run" else session.folder / "checkpoints" / "step-00000005"
    recipe = bare(named, other)
    with pytest.raises(CheckpointError, match="there is no kind 'ScaleNorm'"):
        open_run(recipe, {}, runs=tmp_path / "second", say=silent, tick=silent)
    second = open_run(recipe, {}, runs=tmp_path / "second", parts=[ScaleNorm], say=silent, tick=silent)
    finish(second)
    assert second.recipe.model == session.recipe.model
    assert rows(second.folder / "metrics.jsonl")[-1]["step"] == 6


@pytest.mark.parametrize(
    ("objective", "added"),
    [("prefix", ["<pad>"]), ("denoise", ["<pad>", *(f"<extra_id_{number}>" for number in reversed(range(100)))])],
)
def test_special_tokens_that_the_start_has_not_are_added_with_new_rows(
    first: Path, other: Path, tmp_path: Path, objective: str, added: list[str]
) -> None:
    """From causal to another objective: old ids and weights stay, new rows are N(0, 0.02) of the seed."""
    told: list[str] = []
    recipe = bare(first, other, objective=objective, seed=3, **{"checkpoint.every": 2.0, "checkpoint.keep": 9})
    session = open_run(recipe, {}, runs=tmp_path / "second", say=told.append, tick=silent)
    known, tokenizer = open_tokenizer(first), session.context.tokenizer
    size = known.size
    assert [tokenizer.specials[spelling] for spelling in added] == [*range(size, size + len(added))]
    assert tokenizer.encode("The fox, <pad>") == known.encode("The fox, <pad>")
    assert any(
        f"needs {len(added)} special token(s)" in text and f"{size} to {size + len(added)}" in text for text in told
    )
    there = settings.load(Recipe, settings.read(first / "config.toml")).model
    assert session.recipe.model == replace(there, vocab=size + len(added))
    old, new = format.read_tensors(first / "model.safetensors"), weights(build_job(session.context, 6).model)
    drawn = torch.empty(len(added), 16).normal_(0, 0.02, generator=torch.Generator().manual_seed(3))
    assert torch.equal(new["embedding.weight"], torch.cat((old["embedding.weight"], drawn)))
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name], tensor) for name, tensor in old.items() if name != "embedding.weight")
    finish(session)
    for step in (0, 4):
        assert_goes_on_exactly(session.folder, step, tmp_path, 6)
    again = start(read_recipe(session.folder / "config.toml"), tmp_path / "again")
    finish(again)
    assert_equal_ends(session.folder, again.folder, 6)


def test_a_decay_may_branch_off_from_any_flat_checkpoint(small: Make, tmp_path: Path) -> None:
    """spec: training §2. A batch is the whole text here, so that both runs see the same data at every step."""
    still = {"model.decoder.block.dropout": 0.0, "model.decoder.block.attention.dropout": 0.0}
    data = {"data.valid": 0.0, "batch.micro": 0, "checkpoint.keep": 30}
    rate = {"schedule.kind": "wsd", "schedule.warmup": 2.0}
    rows_of_text = len(create(small(**still, **data), tmp_path / "count").train)
    whole = {**still, **data, **rate, "batch.rows": rows_of_text}
    straight = start(small(**whole, **{"schedule.decay": 8.0}), tmp_path / "straight")
    finish(straight)
    flat = straight.folder / "checkpoints" / "step-00000010"
    branch = small(
        name="branch",
        start=str(flat),
        start_optimizer="keep",
        **{**whole, "schedule.warmup": 0.0, "schedule.decay": 8.0, "budget.steps": 10},
    )
    session = start(branch, tmp_path / "branch")
    finish(session)
    long, short = (
        [row for row in rows(run.folder / "metrics.jsonl") if row["kind"] == "train"] for run in (straight, session)
    )
    assert [row["rate"] for row in short] == pytest.approx([row["rate"] for row in long[10:]])
    assert [row["loss"] for row in short] == pytest.approx([row["loss"] for row in long[10:]], rel=1e-5)
    assert short[-1]["rate"] == 0


def test_a_run_with_a_start_resumes_exactly_even_without_it(first: Path, other: Path, tmp_path: Path) -> None:
    recipe = bare(
        first, other, **{"budget.steps": 20, "checkpoint.every": 5.0, "checkpoint.keep": 30, "average": "ema"}
    )
    straight = start(recipe, tmp_path / "straight")
    finish(straight)
    for step in (0, 10):
        copy = cut_copy(straight.folder, step, tmp_path)
        if step:
            shutil.rmtree(first)
        finish(resume(copy))
        assert_equal_ends(straight.folder, copy, 20)
    cut_back(copy, 0)
    with pytest.raises(CheckpointError, match="holds no model"):  # nothing to begin with any more
        finish(resume(copy))


def test_the_beginning_is_made_on_the_cpu_and_is_the_same_there(first: Path, other: Path, tmp_path: Path) -> None:
    """A run on a device has no room there for a second one: not even a device is needed to make it."""
    context = create(bare(first, other, average="ema"), tmp_path / "second")
    elsewhere = replace(context, recipe=replace(context.recipe, device="cuda", compile="on"))
    made, wanted = build_initial_job(elsewhere, 7), build_job(context, 7)
    assert (made.step, made.cursor, made.total) == (0, 0, 7)
    sections = made.tensors()
    for name, section in wanted.tensors().items():
        assert sections[name].keys() == section.keys()
        assert all(tensor.device.type == "cpu" for tensor in sections[name].values())
        assert all(torch.equal(sections[name][key], tensor) for key, tensor in section.items())


def test_the_written_recipe_names_a_definite_checkpoint(first: Path, other: Path, tmp_path: Path) -> None:
    (first / "model.json").unlink()
    context = create(bare(first, other), tmp_path / "second")
    assert context.recipe.start == str(first / "checkpoints" / "step-00000020")
    assert settings.read(context.folder / "config.toml")["start"] == context.recipe.start


def refused(recipe: Recipe, runs: Path, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        create_run(recipe, runs, say=silent, tick=silent)
    assert not runs.exists()


def test_what_does_not_fit_is_refused_before_anything_is_made(first: Path, other: Path, tmp_path: Path) -> None:
    runs = tmp_path / "second"
    wider = bare(first, other, **{"model.width": 32})
    refused(wider, runs, ConfigError, "model: it is not that of .* is 16 there and 32 here.*leave model out")
    refused(bare(first, other, tokenizer="chars"), runs, ConfigError, "tokenizer: it is not that of")
    muon = bare(first, other, optim="muon", start_optimizer="keep")
    refused(muon, runs, ConfigError, "start_optimizer: .* was trained with optim=adamw, not muon")
    refused(
        bare(first, other, start=str(tmp_path / "none")),
        runs,
        ConfigError,
        "start: .*none does not exist; name a run, a",
    )
    grown = bare(first, other, objective="denoise", start_optimizer="keep")
    refused(grown, runs, ConfigError, "start_optimizer: the objective needs special tokens .*set start_optimizer=fresh")
    model = settings.flat(settings.read(first / "config.toml")["model"])
    larger = {f"model.{key}": value for key, value in model.items()} | {"model.vocab": 300}
    refused(bare(first, other, **larger), runs, ConfigError, r"model\.vocab: it is 257 in .*, not 300; leave model out")
    saved = tmp_path / "saved"
    found = bundle.open_bundle(first)
    bundle.save(saved, found.module.config, weights(found.module), found.tokenizer, {})
    keep = bare(first, other, start=str(saved), start_optimizer="keep")
    refused(keep, runs, ConfigError, "keeps no optimizer; set start_optimizer=fresh")
    shutil.rmtree(first / "checkpoints")
    refused(bare(first, other, start_optimizer="keep"), runs, CheckpointError, "has no checkpoint yet")


def test_the_same_model_may_be_named_again(first: Path, other: Path, small: Make, tmp_path: Path) -> None:
    recipe = small(name="second", start=str(first), **{"data.paths": [str(other)], "budget.steps": 2})
    session = start(recipe, tmp_path / "second")
    finish(session)
    assert rows(session.folder / "metrics.jsonl")


def test_a_damaged_start_is_refused(first: Path, other: Path, tmp_path: Path) -> None:
    recipe = bare(first, other)
    path = first / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    refused(recipe, tmp_path / "second", CheckpointError, "missing or damaged")


def test_a_start_with_few_bits_is_refused_in_a_sentence(first: Path, other: Path, tmp_path: Path) -> None:
    found = bundle.open_bundle(first)
    quantize(found.module, 8)
    bundle.save(tmp_path / "few", found.module.config, weights(found.module), found.tokenizer, {})
    recipe = replace(bare(first, other), start=str(tmp_path / "few"))
    with pytest.raises(ConfigError, match="have 8 bits, which cannot be trained"):
        create(recipe, tmp_path / "runs")
    assert not (tmp_path / "runs" / "second").exists()
