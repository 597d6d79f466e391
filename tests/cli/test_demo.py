"""The demos: three families, each shown on what it never learned from, misses included."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from recipes import make_tatoeba_slice
from tests.cli.conftest import Call, refused
from trivium.cli import demo, render
from trivium.cli.demos import bert, t5
from trivium.cli.main import main
from trivium.evaluation import words
from trivium.generation.beam import Beam
from trivium.training.events import Event, Progress

ASSETS = Path(demo.__file__).resolve().parents[1] / "assets"
SMALL = ("budget.minutes=0", "budget.steps=3", "model.width=16", "device=cpu", "threads=1", "precision=fp32")


def text(name: str) -> str:
    return gzip.decompress((ASSETS / name).read_bytes()).decode()


def pairs(name: str) -> list[list[str]]:
    return [line.split("\t") for line in text(name).split("\n") if line]


def letters(sentence: str) -> str:
    """Another way to forget case and punctuation than those under test."""
    return " ".join("".join(c if c.isalnum() or c == "'" else " " for c in sentence.casefold()).split())


class Shown(NamedTuple):
    """All three demos, trained for a few steps: where they are and what was printed."""

    runs: Path
    out: str
    err: str

    def results(self, family: str, name: str) -> dict[str, Any]:
        found = json.loads((self.runs / f"demo-{family}" / "results" / f"{name}-test.json").read_text())
        assert isinstance(found, dict)
        return found


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    runs = tmp_path_factory.mktemp("demo") / "runs"
    threads = torch.get_num_threads()
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(t5, "BEAM", Beam(beams=1))  # models that never end a sentence keep four beams busy for long
        patch.setattr(sys, "argv", ["trivium", "demo", "--family", "all", "--runs", str(runs), *SMALL])
        with pytest.raises(SystemExit) as ended:
            main()
    torch.set_num_threads(threads)
    assert ended.value.code == 0, err.getvalue()
    return Shown(runs, out.getvalue(), err.getvalue())


def test_all_three_demos_run_one_after_the_other_in_folders_of_their_own(shown: Shown) -> None:
    assert sorted(path.name for path in shown.runs.iterdir()) == ["demo-bert", "demo-gpt", "demo-t5"]
    order = [shown.out.index(word) for word in ("bits per byte", "[MASK]", "BLEU")]
    assert order == sorted(order)
    for family in demo.DEMOS:
        assert (shown.runs / f"demo-{family}" / "report.html").is_file()


def test_a_trained_demo_is_shown_again_without_training_or_another_look(shown: Shown, invoke: Call) -> None:
    before = {path: path.stat().st_mtime_ns for path in shown.runs.rglob("*") if path.is_file()}
    again = invoke("demo", "--family", "all", "--runs", shown.runs)
    assert again.code == 0
    assert again.out == shown.out
    assert "step" not in again.err
    assert again.err.count("is trained already") == 3
    assert {path: path.stat().st_mtime_ns for path in shown.runs.rglob("*") if path.is_file()} == before
    assert shown.results("bert", bert.NAME)["looks"] == shown.results("t5", t5.NAME)["looks"] == 1


def test_words_are_asked_in_the_drawn_order_and_misses_are_printed_too(shown: Shown) -> None:
    told = shown.results("bert", bert.NAME)
    drawn = words.questions(
        [text("shakespeare-test.txt.gz")], words.ranks([text("shakespeare-train.txt.gz")]), count=0, seed=0
    )
    asked = [example["before"] + example["word"] + example["after"] for example in told["examples"]]
    places = {question.text: place for place, question in enumerate(drawn)}
    order = [places[sentence] for sentence in asked]
    assert order == sorted(order)
    assert len(asked) == told["scores"]["sentences"] > 0.8 * min(len(drawn), bert.SENTENCES)
    right = [example["right"] for example in told["examples"]]
    assert sum(right) / len(right) == pytest.approx(told["scores"]["top1"])
    first = told["examples"][: bert.SHOWN]
    marks = [line.strip()[0] for line in shown.out.splitlines() if "said: " in line and "was: " in line]
    assert marks == ["\u2713" if example["right"] else "\u2717" for example in first]
    for example in first:
        assert f"{example['before']}[MASK]{example['after']}" in shown.out
    assert f"{told['scores']['unigram']:.1%}" in shown.out


def test_no_sentence_with_a_hidden_word_is_in_the_training_text(shown: Shown) -> None:
    learned = letters(text("shakespeare-train.txt.gz").replace("'", " ")).split()
    at = defaultdict(list)
    for place, word in enumerate(learned):
        at[word].append(place)
    for example in shown.results("bert", bert.NAME)["examples"][:100]:
        asked = letters((example["before"] + example["word"] + example["after"]).replace("'", " ")).split()
        rarest = min(range(len(asked)), key=lambda index: len(at[asked[index]]))
        starts = [place - rarest for place in at[asked[rarest]]]
        assert not any(learned[max(0, start) : start + len(asked)] == asked for start in starts)


def test_a_sentence_that_was_learned_is_left_out_whatever_its_case_and_line_ends() -> None:
    asked = [
        words.Question(sentence, 0, 1, 1) for sentence in ("I pray thee, stay a while!", "I pray thee, stay a day.")
    ]
    assert bert.unseen(asked, "KING:\nBut I pray\nthee stay: A while.") == asked[1:]
    assert bert.unseen(asked, "Thee stay a day. I pray") == asked


def test_translations_are_printed_as_drawn_with_all_references_scores_and_credit(shown: Shown) -> None:
    told = shown.results("t5", t5.NAME)
    references = defaultdict(list)
    for english, german in pairs("tatoeba-test.tsv.gz"):
        references[english].append(german)
    assert {example["source"]: example["references"] for example in told["examples"]} == references
    for example in told["examples"][: t5.SHOWN]:
        assert f"  {example['source']}\n  said:      {example['translation']}" in shown.out
        assert " | ".join(example["references"]) in shown.out
    sources = [example["source"] for example in told["examples"]]
    assert sources != list(references)  # an order of its own, and not the file's from short to long
    assert told["signatures"]["bleu"] in shown.out
    assert "version:" in told["signatures"]["bleu"]
    assert all(word in shown.out for word in ("tatoeba.org", "manythings.org/anki", "CC BY 2.0"))


def test_no_held_out_english_sentence_is_among_those_to_learn_from() -> None:
    train, test = pairs("tatoeba-train.tsv.gz"), pairs("tatoeba-test.tsv.gz")
    assert len(train) > 20_000
    assert len({english for english, _ in test}) >= make_tatoeba_slice.HELD_OUT
    assert not {letters(english) for english, _ in train} & {letters(english) for english, _ in test}
    assert all(2 <= len(letters(english).split()) <= 7 for english, _ in train + test)


def test_the_slice_keeps_all_spellings_of_a_sentence_on_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tatoeba_slice, "HELD_OUT", 3)
    sentences = [f"{who} {what}" for who in ("I", "you", "they") for what in ("see", "eat ice", "run away")]
    given = [
        (sentence + end, german) for sentence in sentences for end in (".", "!", " ?") for german in ("eins", "zwei")
    ]
    train, test = make_tatoeba_slice.split([*given, ("I", "ich"), ("I see you eat ice they see", "zu lang")])
    assert sorted(train + test) == sorted(given)
    assert len(test) == 3 * 3 * 2
    assert {letters(english) for english, _ in test}.isdisjoint(letters(english) for english, _ in train)


def test_the_slice_is_what_its_script_makes_of_the_original(shared: Path) -> None:
    made = make_tatoeba_slice.split(make_tatoeba_slice.read(shared / "data" / "tatoeba" / "deu.txt.xz"))
    for name, part in zip(("train", "test"), made, strict=True):
        assert [list(pair) for pair in part] == pairs(f"tatoeba-{name}.tsv.gz")


def test_the_assets_are_small_and_carry_their_attribution() -> None:
    assert sum(path.stat().st_size for path in ASSETS.glob("tatoeba-*")) < 1_500_000
    told = (ASSETS / "README.md").read_text()
    assert all(word in told for word in ("tatoeba.org", "www.manythings.org/anki", "CC BY 2.0", "Changed here"))
    for path in ASSETS.iterdir():
        assert path.name in told or path.name == "README.md"


def test_an_interrupted_demo_goes_on_where_it_stopped(
    invoke: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = render.PlainWatcher.event

    def interrupt(self: render.PlainWatcher, event: Event) -> None:
        told(self, event)
        if isinstance(event, Progress) and event.step == 1:  # a second one would end this process at once
            signal.raise_signal(signal.SIGINT)

    settings = [*SMALL, "log=1"]
    with monkeypatch.context() as patch:
        patch.setattr(render.PlainWatcher, "event", interrupt)
        stopped = invoke("demo", "--family", "bert", "--runs", tmp_path, *settings)
    assert stopped.code == 130
    assert stopped.out == ""
    done = invoke("demo", "--family", "bert", "--runs", tmp_path)
    assert done.code == 0, done.err
    assert "1/3" not in done.err
    assert "3/3" in done.err
    assert "3 steps" in done.out


def test_a_wrong_family_is_refused(invoke: Call, tmp_path: Path) -> None:
    outcome = invoke("demo", "--family", "llama", "--runs", tmp_path / "runs")
    refused(outcome, "--family", "'llama'", "gpt, bert, t5 or all")
    assert not (tmp_path / "runs").exists()


def test_a_setting_that_one_of_all_demos_has_not_is_told_before_the_first_begins(invoke: Call, tmp_path: Path) -> None:
    refused(invoke("demo", "--family", "all", "--runs", tmp_path / "runs", "model.decoder.layers=1"), "decoder")
    assert not (tmp_path / "runs").exists()


def test_a_demo_keeps_its_own_text_and_name(invoke: Call, tmp_path: Path) -> None:
    for setting in ("data.paths=mine.txt", "name=mine"):
        refused(invoke("demo", "--runs", tmp_path / "runs", setting), setting.split("=")[0], "trivium train RECIPE")
    assert not (tmp_path / "runs").exists()
