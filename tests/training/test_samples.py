"""What a run writes while it goes: each family something that can be compared with what would have been right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.training.conftest import create, finish, start
from trivium import api
from trivium.data.bucketing import Pairs
from trivium.errors import RequestError
from trivium.evaluation import results
from trivium.evaluation.tasks import Outcome
from trivium.generation.fill import Filling
from trivium.text.kinds import Bytes
from trivium.training import session
from trivium.training.build_job import build_job
from trivium.training.context import open_context
from trivium.training.events import Said, Sampled, line
from trivium.training.metrics import rows
from trivium.training.recipe import Recipe
from trivium.training.samples import _excerpt, samples

Make = Callable[..., Recipe]
Found = list[dict[str, Any]]


def written(recipe: Recipe, folder: Path) -> tuple[Path, Found]:
    run = start(recipe, folder)
    events = [event for event in finish(run) if isinstance(event, Sampled)]
    found = rows(run.folder / "samples.jsonl")
    assert [(event.step, event.prompt, event.text) for event in events] == [
        (row["step"], row["prompt"], row["text"]) for row in found
    ]
    return run.folder, found


def test_an_encoder_guesses_hidden_words_of_the_validation_text(small: Make, tmp_path: Path) -> None:
    changes = {"model.context": 64, "tokenizer": "bpe", "tokenizer.size": 400, "sample.every": 20}
    folder, found = written(small("encoder", **changes), tmp_path)
    assert {row["step"] for row in found} == {20}
    assert 1 <= len(found) <= 3
    m = api.load(folder, device="cpu")
    valid = m.tokenizer.decode([int(id) for id in open_context(folder, _recipe(folder)).shards.valid.ids])
    flat = " ".join(valid.split())
    for row in found:
        whole = re.sub(r"(\[MASK\])+", row["reference"], row["prompt"])
        assert whole in flat  # the hidden word where the mask is gives the text back
        masks = row["prompt"].count("[MASK]")
        guessed = cast("list[Filling]", m.fill(row["prompt"], top=3))
        if masks == 1:
            assert row["text"].count("%") == 3
            assert guessed[0].strip() in row["text"]
            assert f"{guessed[0].probability:.0%}" in row["text"]


def _evaluated(folder: Path, m: api.Model) -> None:
    """An evaluation of a run, as `trivium eval` records it."""
    outcome = Outcome(
        name="toys",
        split="test",
        metric="bleu",
        score=12.5,
        scores={"bleu": 12.5},
        signatures={},
        settings={},
        data={},
        examples=[],
    )
    results.record(folder, outcome, model=m.module, tokenizer=m.tokenizer, notes={}, date="2026-03-01", seconds=1.0)


def _recipe(folder: Path) -> Recipe:
    from trivium.training.recipes import read_recipe

    return read_recipe(folder / "config.toml")


def test_a_denoising_model_is_shown_texts_whose_spans_give_them_back(small: Make, tmp_path: Path) -> None:
    recipe = small("encoder-decoder", **{"model.context": 64})
    context = create(recipe, tmp_path)
    found = list(samples(build_job(context, 1), context))
    assert len(found) == 3
    text = context.tokenizer.decode([int(id) for id in context.shards.valid.ids if id != context.tokenizer.end])
    for sample in found:
        spans: dict[str, str] = dict(re.findall(r"(<extra_id_\d+>)((?:(?!<extra_id_).)*)", sample.reference, re.DOTALL))
        assert spans
        whole = "".join(spans.get(part, part) for part in map(str, re.split(r"(<extra_id_\d+>)", sample.prompt)))
        assert whole in text
        assert "<extra_id_" not in whole


@pytest.mark.parametrize("pack", [0, 32])
def test_a_translator_is_shown_validation_pairs(small: Make, tmp_path: Path, pack: int) -> None:
    pairs = {f"wort {number} {number * 7}": f"word {number}" for number in range(60)}
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs.items()))
    changes = {"objective": "seq2seq", "data.paths": [], "data.pairs": str(tmp_path / "pairs.tsv"), "data.pack": pack}
    folder, found = written(small("encoder-decoder", **changes), tmp_path)
    valid = Pairs(open_context(folder, _recipe(folder)).shards.valid, 32)
    assert len(valid) >= 3
    last = [row for row in found if row["step"] == 20]
    assert len(last) == 3
    assert len({row["prompt"] for row in last}) == 3
    for row in last:
        assert pairs[row["prompt"]] == row["reference"]
        assert row["prompt"] in [row["prompt"] for row in found if row["step"] == 10]  # the same at every step
    page = (folder / "report.html").read_text()
    assert all(row["reference"] in page for row in last)
    assert "nats per target token" in page
    assert "bits per byte" not in page
    m = api.load(folder / "checkpoints" / "step-00000020", device="cpu")
    _evaluated(folder, m)
    assert "BLEU 12.5 on toys, test" in (folder / "report.html").read_text()
    assert [m.generate(row["prompt"], tokens=5, temperature=0) for row in last] == [row["text"] for row in last]


def test_a_model_with_a_prefix_continues_the_text_that_it_was_given(small: Make, tmp_path: Path) -> None:
    context = create(small("encoder-decoder", objective="prefix"), tmp_path)
    text = context.tokenizer.decode([int(id) for id in context.shards.valid.ids if id != context.tokenizer.end])
    for sample in samples(build_job(context, 1), context):
        assert sample.prompt + sample.reference in text


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_samples_change_nothing_in_the_training(small: Make, tmp_path: Path, kind: str) -> None:
    """With dropout: whatever a sample draws must not be missing from a step."""
    one = start(small(kind, **{"sample.every": 1, "budget.steps": 6}), tmp_path / "one")
    two = start(small(kind, **{"sample.every": 0, "budget.steps": 6}), tmp_path / "two")
    finish(one)
    finish(two)
    losses = [[(row["step"], row["loss"]) for row in rows(run.folder / "metrics.jsonl")] for run in (one, two)]
    assert losses[0] == losses[1]
    assert not rows(two.folder / "samples.jsonl")


def test_without_validation_text_an_encoder_has_no_samples(small: Make, tmp_path: Path) -> None:
    _, found = written(small("encoder", **{"data.valid": 0.0, "budget.steps": 2}), tmp_path)
    assert found == []


def test_a_long_sentence_is_cut_around_its_word() -> None:
    tokenizer, text = Bytes().build([]), "one two three four five six seven"
    first = text.index("four")
    for room in (4, 9, 12, 20, 100):
        part, begin, end = _excerpt(tokenizer, text, first, first + 4, room)
        assert part[begin:end] == "four"
        assert len(part) <= room
        assert part in text
    assert _excerpt(tokenizer, text, first, first + 4, 100)[0] == text
    assert _excerpt(tokenizer, text, first, first + 4, 15)[0] == "three four five"


def test_a_sample_that_fails_ends_no_run(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([RequestError("too long"), torch.OutOfMemoryError("no room")])

    def failing(*_: object) -> Any:
        raise next(errors)

    monkeypatch.setattr(session, "samples", failing)
    said = [event.text for event in finish(start(small(**{"sample.every": 10}), tmp_path)) if isinstance(event, Said)]
    assert [text for text in said if "no sample" in text] == [
        "no sample: too long",
        "no sample: there is not enough memory beside the training; set sample.every=0",
    ]


def test_a_sample_with_a_reference_is_three_lines() -> None:
    assert line(Sampled(3, "a dog", "ein Hund", "der Hund")).splitlines()[1:4] == [
        "given     a dog",
        "written   ein Hund",
        "reference der Hund",
    ]
    assert line(Sampled(3, "To be", " or")).splitlines()[1] == "To be or"
