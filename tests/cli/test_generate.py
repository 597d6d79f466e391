"""`trivium generate`, `translate` and `chat` in a terminal and in a pipe."""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, refused
from tests.generation import tiny
from trivium import api
from trivium.cli import generate as command
from trivium.generation import translation
from trivium.generation.beam import Beam
from trivium.generation.translation import search_texts

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"{number} Hunde und {number % 7} Katzen" for number in range(30)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    api.Model(tiny.model("gpt-mini", tiny.BYTES, spread=0.5), tiny.BYTES, {}).save(folder / "decoder")
    api.Model(tiny.model("t5-mini", tiny.DENOISING, spread=0.5), tiny.DENOISING, {}).save(folder / "both")
    return folder


@pytest.fixture
def call(invoke: Call, monkeypatch: pytest.MonkeyPatch, home: Path) -> Call:
    monkeypatch.chdir(home)
    return invoke


FEW = ("--tokens", 6, "--temperature", 0, "--device", "cpu")


def test_what_is_piped_in_is_the_prompt(call: Call) -> None:
    typed = call("generate", "decoder", "To be", *FEW)
    assert typed.code == 0, typed.err
    assert call("generate", "decoder", *FEW, piped="To be\n") == typed
    assert call("generate", "decoder", "-", *FEW, piped="To be\r\n") == typed
    lines = call("generate", "decoder", *FEW, piped="To be\nor\n\n")
    assert lines.out.startswith("To be\nor\n")  # one text, and only the end of its last line is gone


def test_what_is_piped_in_beside_a_prompt_is_not_dropped_in_silence(home: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"foo\n")
    os.close(write)
    command = [sys.executable, "-m", "trivium", "generate", str(home / "decoder"), "bar", "--tokens", "1"]
    done = subprocess.run(command, stdin=read, capture_output=True, text=True, cwd=ROOT)
    os.close(read)
    assert done.returncode == 0, done.stderr
    assert "what is piped in is not read" in done.stderr


def test_an_empty_pipe_is_an_empty_prompt(call: Call) -> None:
    outcome = call("generate", "decoder", *FEW, piped="")
    assert outcome.code == 0, outcome.err
    assert outcome.out == call("generate", "decoder", "", *FEW).out


def test_at_a_terminal_nothing_is_waited_for(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "is_piped", lambda: False)
    assert call("generate", "decoder", *FEW, piped="not read").out == call("generate", "decoder", "", *FEW).out


def test_several_prompts_have_several_answers_in_order(call: Call) -> None:
    prompts = ["To be", "or not", "that is the question"]
    alone = [call("generate", "decoder", prompt, *FEW).out for prompt in prompts]
    together = call("generate", "decoder", *prompts, *FEW)
    assert together.code == 0, together.err
    assert together.out == "".join(f"--- {prompt}\n{text}" for prompt, text in zip(prompts, alone, strict=True))
    found = json.loads(call("generate", "decoder", *prompts, *FEW, "--json").out)
    assert [answer["prompt"] for answer in found] == prompts
    assert [answer["prompt"] + answer["samples"][0]["text"] + "\n" for answer in found] == alone
    one = json.loads(call("generate", "decoder", "To be", *FEW, "--json").out)
    assert one == found[0]
    twice = call("generate", "decoder", "To be", "or", "-n", 2, *FEW).out
    assert [line for line in twice.splitlines() if line.startswith("---")] == [
        "--- To be (1 of 2)",
        "--- To be (2 of 2)",
        "--- or (1 of 2)",
        "--- or (2 of 2)",
    ]
    refused(call("generate", "decoder", "a", "x" * 90, *FEW), "90 tokens")


def test_translations_come_in_order_and_before_the_last_one_is_done(home: Path) -> None:
    model, tokenizer = tiny.model("t5-mini", tiny.DENOISING, spread=0.5), tiny.DENOISING
    whole = search_texts(model, tokenizer, TEXTS, beam=Beam(beams=2), tokens=6)
    heard: list[tuple[int, str]] = []
    done = 0

    def tick(at: int, of: int) -> None:
        nonlocal done
        done = at

    found = search_texts(
        model, tokenizer, TEXTS, beam=Beam(beams=2), tokens=6, tick=tick,
        each=lambda best: heard.append((done, str(best[0]))),
    )  # fmt: skip
    assert [text for _, text in heard] == [str(best[0]) for best in found] == [str(best[0]) for best in whole]
    assert heard[0][0] == translation._FIRST  # when the first one was told the others were still to come
    assert [at for at, _ in heard] == sorted(at for at, _ in heard)


def test_a_text_that_cannot_be_translated_is_refused_before_the_first_is_printed(call: Call) -> None:
    refused(call("translate", "both", piped="\n".join([*TEXTS, "x" * 90])), "text 31", "91 tokens")


def test_a_reader_that_ends_early_is_no_error(home: Path) -> None:
    """With `| head` the command ends without a complaint when its output is no longer read."""
    text = "\n".join(TEXTS * 20) + "\n"
    line = f"{sys.executable} -m trivium translate {home / 'both'} --tokens 4 --beams 1 --device cpu | head -2"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", line], input=text, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout.count("\n") == 2
    assert done.stderr == ""


def test_progress_is_told_at_a_terminal_only(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[str] = []

    def progress(word: str, clock: Any) -> Any:
        ticks.append(word)
        return lambda done, of: None

    monkeypatch.setattr("trivium.cli.use._progress", progress)
    call("translate", "both", "ein Hund", "--tokens", 2)
    assert ticks == []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    call("translate", "both", "ein Hund", "--tokens", 2)
    assert ticks == ["translated"]


class Talker:
    """A model that says the same to everybody, and is interrupted in the middle of its first answer."""

    tokenizer, notes = tiny.BYTES, {"chat_template": "x"}

    def __init__(self) -> None:
        self.heard: list[list[dict[str, str]]] = []
        self.closed = False

    def chat(self, messages: list[dict[str, str]], **options: Any) -> Iterator[str]:
        self.heard.append([dict(message) for message in messages])
        first = len(self.heard) == 1

        def pieces() -> Iterator[str]:
            try:
                yield "one"
                if first:
                    signal.raise_signal(signal.SIGINT)
                yield " two"
                yield " three"
            except GeneratorExit:
                self.closed = True
                raise

        return pieces()


def test_ctrl_c_ends_an_answer_and_then_the_chat(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    talker, typed = Talker(), iter(["hello", "again"])

    def typing(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(api, "load", lambda *arguments, **options: talker)
    monkeypatch.setattr("trivium.generation.chat.chat_of", lambda *arguments: None)
    monkeypatch.setattr(command, "is_piped", lambda: False)
    monkeypatch.setattr(builtins, "input", typing)
    before = signal.getsignal(signal.SIGINT)
    outcome = call("chat", "decoder")
    assert outcome.code == 130
    assert outcome.out == "one two (stopped)\none two three\n\n"
    assert talker.closed
    assert [message["content"] for message in talker.heard[1]] == ["hello", "one two", "again"]
    assert signal.getsignal(signal.SIGINT) == before


def test_an_export_into_a_run_names_another_place(call: Call, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = home / "runs" / "my"
    api.load(home / "decoder", device="cpu").save(run)
    (run / "config.toml").touch()
    for kind, more in (("hf", ()), ("trivium", ("--bits", 8))):
        outcome = call("export", "decoder", kind, "runs/my", *more)
        refused(outcome, "runs/my already exists and is not replaced", "such as exported/my")
        assert not {"delete", "remove"} & set(outcome.err.split())
    (home / "exported" / "my").mkdir(parents=True)
    refused(call("export", "decoder", "hf", "runs/my"), "such as exported/my-2")
    refused(call("export", "decoder", "hf", "both"), "such as both-2")
    assert sorted(path.name for path in run.iterdir()) == [
        "config.toml",
        "model.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_standard_input_that_is_closed_is_no_pipe(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from trivium.cli.printing import is_piped

    monkeypatch.setattr(sys, "stdin", None)
    assert not is_piped()
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    assert is_piped()
