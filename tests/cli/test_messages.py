"""What the commands print is for people: no temporary names, no Python values, no words of the inside."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from tests.cli.conftest import Call, Outcome
from tests.cli.test_cli import RECIPE
from tests.generation import tiny
from trivium import api
from trivium.checkpoints import format
from trivium.cli.printing import quoted, standard_input
from trivium.cli.render import LiveWatcher, PlainWatcher
from trivium.errors import LONGEST, RequestError, file_error, final_name
from trivium.planner import memory
from trivium.training import calibrate

LONG = "x\x1b\n" * 30_000


@pytest.fixture
def call(invoke: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    monkeypatch.chdir(tmp_path)
    Path("play.txt").write_text("To be, or not to be, that is the question.\n" * 60)
    Path("tiny.toml").write_text(RECIPE)
    return invoke


def clean(outcome: Outcome) -> str:
    """What was said, if it is fit for people."""
    said = outcome.out + outcome.err
    for pattern in (r"\.tmp-", r"\bNone\b", r"\bTrue\b", r"\bFalse\b", r"<class", r"\{'", r"Traceback", r"\bPath\("):
        assert not re.search(pattern, said), (pattern, said)
    return said


def test_a_full_disk_is_told_by_the_name_that_the_file_would_have(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    api.Model(tiny.model("llama-mini", tiny.BYTES, spread=0.5), tiny.BYTES, {}).save("own")

    def full(path: Path, group: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(format, "write_tensors", full)
    outcome = call("import", "own", "there")
    assert outcome.code == 2
    said = clean(outcome)
    assert said == "error: there/model.safetensors: No space left on device; make room, or name another place\n"


def test_an_error_without_a_name_has_none() -> None:
    assert str(file_error(OSError(errno.ENOSPC, "No space left on device"))).startswith("No space left on device; make")
    assert "change who may use it" in str(file_error(PermissionError(errno.EACCES, "Permission denied", "runs/x")))
    assert final_name("runs/.tmp-my-run-12/.tmp-model.json-3") == "runs/my-run/model.json"
    assert final_name("a.tmp-x-1") == "a.tmp-x-1"


def test_a_run_says_where_it_went_on_and_what_to_type_when_it_is_done(call: Call) -> None:
    first = call("train", "tiny.toml", "batch.micro=2")
    assert first.code == 0
    assert "runs/tiny is done; open runs/tiny/report.html, or type: trivium generate runs/tiny 'It was'" in clean(first)
    again = call("train", "runs/tiny", "budget.steps=6", "schedule=wsd", "track=csv")
    said = clean(again)
    assert "resumed at step 4 of 6" in said
    assert "schedule.kind changed from 'cosine' to 'wsd'" in said
    assert "schedule.decay is 0.2 now" in said
    assert "checkpoints/step-" not in said


def test_a_setting_that_the_run_did_not_have_is_refused_without_a_python_value(call: Call) -> None:
    assert call("train", "tiny.toml").code == 0
    said = clean(call("train", "runs/tiny", "tokenizer=bpe"))
    assert "another configuration" in said


def test_wrong_values_are_shown_as_they_were_written(call: Call) -> None:
    Path("wrong.toml").write_text(RECIPE.replace("steps = 4", "steps = true"))
    assert "budget.steps: expects a whole number, not true" in clean(call("config", "wrong.toml"))
    assert "budget.steps: -3 is less than 0" in clean(call("config", "tiny.toml", "budget.steps=-3"))


def test_a_start_that_does_not_fit_names_the_whole_key(call: Call) -> None:
    assert call("train", "tiny.toml").code == 0
    said = clean(call("train", "tiny.toml", "name=two", "start=runs/tiny", "model.decoder.layers=2"))
    assert "model.decoder.layers is 1 there and 2 here" in said
    said = clean(call("train", "tiny.toml", "name=two", "start=runs/tiny", "model.decoder.block.norm=layer"))
    assert "model.decoder.block.norm" in said


def test_special_tokens_and_pieces_are_shown_as_text(call: Call) -> None:
    assert call("tokenizer", "train", "tok.json", "play.txt", "--size", 280).code == 0
    said = clean(call("tokenizer", "show", "tok.json"))
    assert re.search(r"specials +<\|endoftext\|> \d+\n", said)


def test_a_saved_model_shows_its_validation_as_a_score(call: Call) -> None:
    assert call("train", "tiny.toml").code == 0
    assert call("import", "runs/tiny", "saved").code == 0
    said = clean(call("show", "saved"))
    assert re.search(r"validation +\d\.\d{4} bits/byte", said)
    assert "bits_per_byte" not in said


def test_a_candidate_that_nobody_could_see_is_in_quotes(call: Call) -> None:
    assert [quoted(text) for text in ("dog", "\n", " ", "", "\x1b[2J")] == ["dog", '"\\n"', '" "', '""', '"\\u001b[2J"']
    api.Model(tiny.model("bert-mini", tiny.MASKED, spread=0.5), tiny.MASKED, {}).save("encoder")
    out = call("fill", "encoder", "a [MASK] b", "--top", 250).out
    assert '"\\n"' in out
    assert len(out.splitlines()) == 251


def test_usage_lines_have_single_brackets(call: Call) -> None:
    for verb in ("train", "config", "generate", "demo"):
        assert "[[" not in call(verb, "--help").out


@pytest.mark.parametrize(
    "arguments",
    [
        [LONG],
        ["data", LONG],
        ["presets", LONG],
        ["presets", *LONG],
        ["generate", "m", f"--{LONG}"],
        ["generate", "m", "x", "--top-k", LONG],
        ["config", "x.toml", f"--runs={LONG}", f"-{LONG}"],
    ],
    ids=range(7),
)
def test_a_wrong_command_is_not_repeated_at_length(call: Call, arguments: list[str]) -> None:
    outcome = call(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert all(len(line) <= LONGEST + len("Error: ") for line in outcome.err.splitlines())
    assert len(outcome.err.splitlines()) <= 4
    assert outcome.err.startswith("Usage: ")
    assert "Error: " in outcome.err


def test_help_where_nothing_was_typed_is_whole(call: Call) -> None:
    outcome = call()
    assert outcome.code == 2
    assert len(outcome.err) > LONGEST
    assert outcome.err == call("--help").out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["presets"], ["presets", "--json"], ["--version"], ["--help"]])
def test_standard_output_that_is_full_is_named(
    call: Call, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as full:  # closing it fails again
        monkeypatch.setattr(sys, "stdout", full)
        outcome = call(*arguments)
    assert outcome.code == 2
    assert outcome.err == "error: standard output: No space left on device; make room, or name another place\n"


def test_standard_input_that_is_closed_or_broken_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Broken()))
    with pytest.raises(OSError, match="standard input"):
        standard_input()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(RequestError, match="standard input is closed; pipe a text in"):
        standard_input()


def test_what_takes_long_is_named_by_what_is_done(tmp_path: Path) -> None:
    with (tmp_path / "plain").open("w+") as file:
        now = iter([0.0, 10.0, 20.0, 30.0, 40.0, 50.0])
        watching = PlainWatcher(file, clock=lambda: next(now))
        for at in (0, 1, 2):
            watching.tick("tokenizer", at, 2)
    assert "training the tokenizer: 50 %" in (tmp_path / "plain").read_text()
    with (tmp_path / "live").open("w+") as file:
        table = LiveWatcher(Console(file=file, force_terminal=True, width=80))
        with Live(console=table.console, auto_refresh=False, get_renderable=table.draw) as live:
            table.tick("reading weights", 1, 2)
            live.refresh()
    shown = (tmp_path / "live").read_text()
    assert "reading weights" in shown
    assert "reading: " not in shown


def test_examples_of_an_evaluation_are_printed_without_lists(capsys: pytest.CaptureFixture[str]) -> None:
    from trivium.cli.evaluate import _print

    example = {"source": "a dog", "translation": "ein Hund", "references": ["ein Hund", "der Hund"], "right": True}
    _print({"name": "x", "split": "valid", "scores": {}, "signatures": {}, "examples": [example], "looks": 1})
    assert "references: ein Hund | der Hund; right: yes" in capsys.readouterr().out


def test_a_model_larger_than_the_memory_is_loaded_only_if_asked_to_try(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.Model(tiny.model("llama-mini", tiny.BYTES, spread=0.5), tiny.BYTES, {}).save("own")
    monkeypatch.setattr(memory, "free_memory", lambda device: 1)
    generate = ("generate", "own", "a", "--tokens", "1", "--device", "cpu")
    assert call(*generate, "--memory", "try").code == 0
    refused = call(*generate)
    assert refused.code == 2
    assert "are free on cpu; choose a smaller one, or let it try" in refused.err
    assert call(*generate, "--memory", "all").err == "error: memory: 'all' is neither check nor try\n"


def test_a_terminal_shows_the_bar_of_a_stage_until_its_line_is_told() -> None:
    file = io.StringIO()
    watching = LiveWatcher(Console(file=file, force_terminal=True, width=80))
    watching.tick("data", 5, 10)
    watching.console.print(watching.draw())
    assert "encoding the text" in file.getvalue()
    watching.say("data: 300 tokens, 0.3 s")
    file.seek(0)
    file.truncate()
    watching.console.print(watching.draw())
    assert file.getvalue().strip() == "starting"


def test_an_interruption_before_the_run_has_a_folder_says_that_nothing_was_kept(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While some steps are timed, as the second thing after the text was read."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "updates", interrupted)
    outcome = call("train", "tiny.toml", "budget.minutes=1")
    assert outcome.code == 130
    assert clean(outcome).endswith("\nstopped before runs/tiny was made; nothing was kept\n")
    assert not Path("runs").exists()
