"""The page of a run: complete for every family, nothing of it cut in silence, and text that stays text."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_runs import DAMAGE
from trivium import report

ABOUT: dict[str, Any] = {
    "started": "2026-03-01T12:00:00+00:00",
    "preset": "t5-mini, changed",
    "family": "encoder-decoder",
    "parameters": 106192,
    "layers": {"encoder": 3, "decoder": 4},
    "width": 32,
    "context": 64,
    "vocab": 601,
    "tokenizer": "bpe",
    "objective": "seq2seq",
    "data": {
        "form": "pairs",
        "files": ["pairs.tsv"],
        "train": {"documents": 5480, "tokens": 41416, "text_bytes": 79700},
        "valid": {"documents": 520, "tokens": 3870, "text_bytes": 7468},
    },
}
RESULT = {
    "name": "tatoeba",
    "split": "test",
    "metric": "bleu",
    "score": 23.456,
    "scores": {"bleu": 23.456, "chrf": 45.6, "sentences": 1003},
    "signatures": {"bleu": "nrefs:1|case:mixed"},
    "looks": 1,
    "examples": [{"source": "a dog", "translation": "ein Hund", "references": ["der Hund", "ein Hund"], "scores": {}}],
}


def falling(steps: int) -> list[dict[str, Any]]:
    """Losses that fall from log 600 as they do in training."""
    return [
        {"kind": "train", "step": step, "loss": 1.5 + (math.log(600) - 1.5) * step**-0.5, "tokens": 10, "seconds": step}
        for step in range(1, steps + 1)
    ]


def make(folder: Path, rows: list[dict[str, Any]], **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = files.pop("samples", [])
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    for name, content in files.items():
        path = folder / {"about": "about.json", "env": "env.json", "result": "results/tatoeba-test.json"}[name]
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    (folder / "config.toml").write_text('name = "x"\n')
    return folder


class Text(HTMLParser):
    """The text of a page, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def shown(folder: Path) -> str:
    return Text(report.page(folder)).text


def test_the_head_says_what_the_model_is_what_it_read_and_what_to_type(tmp_path: Path) -> None:
    env = {"device": "cpu", "cores": 2, "threads": 1, "torch": "2.13.0", "trivium": "0.1.0"}
    said = shown(make(tmp_path / "runs" / "mine", falling(300), about=ABOUT, env=env))
    for words in (
        "encoder-decoder (t5-mini, changed)",
        "106,192 parameters, 3 encoder and 4 decoder layers, width 32, context 64",
        "bpe, 601 ids",
        "the target of a pair",
        "41,416 tokens in 2,740 pairs, 79.7 kB; from pairs.tsv",
        "3,870 tokens in 260 pairs, 7.5 kB",
        "300 steps, 3,000 tokens learned, 5.0 min, begun 2026-03-01 12:00 UTC",
        "cpu, cores 2, threads 1, torch 2.13.0, trivium 0.1.0",
        "trivium translate runs/mine 'A text.'",
        "trivium train runs/mine budget.steps=600",
        "nats per target token",
    ):
        assert words in said


def test_what_was_not_measured_has_no_column_and_no_heading(tmp_path: Path) -> None:
    masked = [*falling(20), {"kind": "valid", "step": 20, "loss": 2.0, "bits_per_byte": None}]
    said = shown(make(tmp_path / "masked", masked))
    assert "step loss 20 2.0000 best" in said
    assert "bits per byte" not in said
    assert "Samples" not in said
    assert "Evaluation" not in said
    causal = [*falling(20), {"kind": "valid", "step": 20, "loss": 2.0, "bits_per_byte": 1.5}]
    assert "step loss bits per byte 20 2.0000 1.5000 best" in shown(make(tmp_path / "causal", causal))
    assert "Validation" not in shown(make(tmp_path / "blind", falling(20)))


def test_evaluations_are_in_the_page_with_signatures_and_examples(tmp_path: Path) -> None:
    said = shown(make(tmp_path / "run", falling(20), result=RESULT))
    assert "BLEU 23.46 on tatoeba, test" in said
    assert "bleu 23.4560 nrefs:1|case:mixed chrf 45.6000 sentences 1,003" in said
    assert "source translation references a dog ein Hund der Hund | ein Hund" in said


def test_samples_stand_beside_their_references_newest_first(tmp_path: Path) -> None:
    samples = [
        {"step": step, "prompt": f"a dog {step}", "text": f"ein Hund {step}", "reference": "der Hund"}
        for step in (10, 10, 20, 30, 40, 50, 60)
    ]
    said = shown(make(tmp_path / "run", falling(60), samples=samples))
    assert "step 60 given written reference a dog 60 ein Hund 60 der Hund step 50" in said
    assert said.index("step 60 given") < said.index("earlier samples") < said.index("a dog 10")
    free = [{"step": 5, "prompt": "To be", "text": " or not\n"}]
    page = report.page(make(tmp_path / "free", falling(60), samples=free))
    assert "<b>To be</b> or not\n</pre>" in page


def numbers(picture: str, cls: str) -> list[tuple[float, float]]:
    """The points of a line in the units of its axes, by the axes' own labels."""
    found = re.search(rf'<polyline class="{cls}"[^>]* points="([^"]*)"', picture)
    assert found is not None
    labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(end|middle)"[^>]*>([\d.,]+)</text>', picture)
    ys = [(float(y), float(value.replace(",", ""))) for x, y, anchor, value in labels if anchor == "end"]
    xs = [(float(x), float(value.replace(",", ""))) for x, y, anchor, value in labels if anchor == "middle"]
    points = [tuple(map(float, point.split(","))) for point in found[1].split()]
    return [(_on(xs, x), _on(ys, y)) for x, y in points]


def _on(axis: list[tuple[float, float]], at: float) -> float:
    (a, one), (b, two) = axis[0], axis[-1]
    return one + (two - one) * (at - a) / (b - a)


@pytest.mark.parametrize("steps", [50, 1000, 20000])
def test_the_curve_begins_at_the_first_step(tmp_path: Path, steps: int) -> None:
    rows = falling(steps)
    pictures = report.page(make(tmp_path / "run", rows)).split("<figure>")[1:]
    assert len(pictures) == 2
    whole, late = (numbers(picture, "train") for picture in pictures)
    assert "cut off" not in pictures[0]
    assert whole[0][0] == pytest.approx(1, abs=steps / 500)
    assert whole[0][1] == pytest.approx(rows[0]["loss"], rel=0.01)
    assert whole[-1][0] == pytest.approx(steps, rel=0.01)
    assert whole[-1][1] == pytest.approx(rows[-1]["loss"], rel=0.02)
    assert late[0][0] == pytest.approx(steps / 5, rel=0.05)
    assert f"from step {math.ceil(steps / 5):,} on, enlarged" in pictures[1]


def test_a_value_that_is_cut_off_is_said_to_be(tmp_path: Path) -> None:
    rows = falling(1000)
    rows[500]["loss"] = 4000.0
    page = report.page(make(tmp_path / "run", rows))
    assert page.count("the highest value is 4,000, at step 501") == 2
    assert numbers(page.split("<figure>")[1], "train")[0][1] == pytest.approx(rows[0]["loss"], rel=0.01)


def test_a_run_of_one_step_or_none_has_a_page(tmp_path: Path) -> None:
    assert "<svg" in report.page(make(tmp_path / "one", falling(1)))
    assert "No step was finished yet" in shown(make(tmp_path / "none", []))
    same = [{"kind": "train", "step": step, "loss": 2.0} for step in range(1, 40)]
    assert "<svg" in report.page(make(tmp_path / "flat", same))
    strange = [*falling(30), {"kind": "train", "step": 31, "loss": "nan"}, {"kind": "valid", "step": "x", "loss": 1}]
    assert "30 steps" in shown(make(tmp_path / "strange", strange))


EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>&amp;\"'"


def test_text_stays_text_wherever_it_comes_from(tmp_path: Path) -> None:
    about = {**ABOUT, "preset": EVIL, "tokenizer": EVIL, "data": {**ABOUT["data"], "files": [EVIL]}}
    about["layers"] = {EVIL: 3}
    result = {**RESULT, "name": EVIL, "signatures": {"bleu": EVIL}, "scores": {EVIL: 1.0}, "examples": [{EVIL: EVIL}]}
    samples = [{"step": 1, "prompt": EVIL, "text": EVIL, "reference": EVIL}, {"step": 2, "prompt": EVIL, "text": EVIL}]
    name = EVIL.replace("/", "|")
    folder = make(
        tmp_path / name, falling(30), about=about, result=result, samples=samples, env={"device": EVIL, "torch": EVIL}
    )
    (folder / "config.toml").write_text(EVIL)
    page = report.page(folder)
    found = Text(page)
    assert not {"script", "img", "link", "iframe", "object"} & set(found.tags)
    assert "http" not in page
    assert found.text.count("alert('x')") >= 12


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "samples.jsonl", "about.json", "env.json", "results/tatoeba-test.json"]
)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_never_costs_the_page(tmp_path: Path, name: str, damage: str) -> None:
    folder = make(tmp_path / "run", falling(30), about=ABOUT, result=RESULT, env={"device": "cpu"})
    (folder / name).unlink()
    DAMAGE[damage](folder / name)
    assert report.page(folder).endswith("</html>\n")


def test_numbers_beyond_measure_cost_no_page(tmp_path: Path) -> None:
    rows = [*falling(5), {"kind": "train", "step": 6, "loss": 9e299, "seconds": 10**400}]
    folder = make(tmp_path, rows)
    (folder / "results").mkdir(exist_ok=True)
    (folder / "results" / "a.json").write_text(json.dumps({"name": "a", "metric": "b", "looks": 1, "score": 10**400}))
    assert "5 steps" in report.page(folder)
