"""Wrong calls from Python and wrong command lines: an answer, or an error in a sentence; never a traceback."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trivium as tv
from tests.cli.conftest import Call, invoke
from tests.generation import tiny
from tests.hostile import folders
from trivium.config import write
from trivium.errors import LONGEST, TriviumError, shown
from trivium.handle import Model

__all__ = ["invoke"]

SECONDS = 30  # a call that takes longer hangs

# fmt: off
WRONG: list[Any] = [
    None, True, False, 0, 1, 2, -1, -7, 3.5, -0.5, 1e9, 2**31, 2**63, 10**30, 10**5000, float("nan"), float("inf"),
    float("-inf"), "", " ", "x", "[MASK]", "x" * 100_000, "\ud800", "a\0b", "\x1b[2J", "/dev/zero", "/proc/none", "..",
    b"bytes", [], [[]], [None], ["a", 1], [""], (), ("a",), ("a", "b"), {}, {"a": 1}, {1, 2}, range(3), object(),
    lambda *_: None, int, Path("none"), Path("x" * 5000), 1j, np.zeros(3), np.float32(0.5), np.int64(3),
    torch.zeros(3), torch.zeros(2, 2, dtype=torch.long), torch.tensor([10**6]), torch.tensor([-1]), torch.tensor(1),
    torch.zeros(0, dtype=torch.long), torch.zeros(1, 500, dtype=torch.long), torch.zeros(1, 2, 3, dtype=torch.long),
    [0, 1, 2], [[0, 1], [2]], [10**6], [-1], [1.5], [True], ["user"], [{"role": "user"}],
    [{"role": "x", "content": "y"}], [{"role": "user", "content": 3}], [{"role": "user", "content": "hello"}],
]
# fmt: on

# What a caller may give, by the name of the parameter; a call takes some of them, right or wrong.
GENERATION: dict[str, list[Any]] = {
    "tokens": [3], "temperature": [0.0, 1.0], "top_k": [0, 5], "top_p": [0.9], "min_p": [0.1],
    "repetition_penalty": [1.2], "seed": [3], "stop": [["a"]],
}  # fmt: skip
Spec = tuple[dict[str, list[Any]], dict[str, list[Any]]]  # needed and optional parameters
METHODS: dict[str, Spec] = {
    "logits": ({"ids": [[1, 2, 3]]}, {"target": [[1, 2]], "segments": [[0, 0, 0]], "padding": [None]}),
    "generate": (
        {"prompt": ["a", ["a", "b"]]},
        {**GENERATION, "n": [2], "logprobs": [2], "slide": [True], "speculate": ["lookup"]},
    ),
    "stream": ({"prompt": ["a"]}, {**GENERATION, "slide": [True]}),
    "chat": ({"messages": ["hello"]}, GENERATION),
    "translate": (
        {"texts": ["a", ["a", "b"]]},
        {"beams": [2], "alpha": [0.6], "coverage": [0.1], "n": [1], "tokens": [3], "language": [""], "rows": [0]},
    ),
    "search": ({"prompt": ["a"]}, {"tokens": [3], "beams": [2], "alpha": [0.6], "n": [2]}),
    "fill": ({"text": ["a [MASK] b"]}, {"top": [3]}),
    "classify": ({"texts": ["a", ("a", "b")]}, {}),
    "embed": ({"texts": ["a", ["a", "b"]]}, {"pooling": ["mean", "cls"], "normalise": [True]}),
    "embed_word": ({"text": ["a bank"], "word": ["bank"]}, {"occurrence": [0]}),
    "neighbours": ({"text": ["a"]}, {"among": [["a", "b"]], "top": [3]}),
    "score": ({"text": ["to be"]}, {"stride": [2]}),
    "save": ({"folder": ["saved"]}, {}),
    "export": ({"kind": ["hf", "gguf"], "path": ["exported"]}, {"bits": [32, 16]}),
}
FUNCTIONS: dict[str, Spec] = {
    "load": ({"path": ["model", "run", "published"]}, {"device": ["cpu"], "average": [0, 1], "bits": [0, 8]}),
    "show": ({"folder": ["model", "run"]}, {"parts": [()]}),
    "preset": ({"name": ["gpt-mini"]}, {}),
    "build": ({"config": ["gpt-mini"]}, {"device": ["meta"], "seed": [0]}),
    "recipe": ({"source": ["recipe.toml"]}, {"overrides": [{"seed": 1}, {"optim.rate": 0.1}]}),
    "train": (
        {"source": ["recipe.toml", "run"]},
        {"overrides": [{"budget.steps": 1, "name": "other"}], "runs": ["runs"], "data_dir": ["."], "quiet": [True]},
    ),
}


def drawn(name: str, right: list[Any], draw: random.Random) -> Any:
    """A value for a parameter, wrong more often than not; `WRONG` as a key or a value of overrides, too."""
    chance = draw.random()
    if chance < 0.4:
        return draw.choice(right)
    if name == "overrides" and chance < 0.8:
        keys = ["seed", "model", "model.width", "optim", "optim.rate", "data.paths", "budget.steps", "device", "x", ""]
        return {draw.choice(keys): draw.choice(WRONG)}
    return draw.choice(WRONG)


def arguments(spec: Spec, draw: random.Random) -> tuple[list[Any], dict[str, Any]]:
    needed, optional = spec
    given = [drawn(name, right, draw) for name, right in needed.items()]
    if draw.random() < 0.05:
        given = given[:-1] if draw.random() < 0.5 else [*given, draw.choice(WRONG)]
    chosen = {name: drawn(name, right, draw) for name, right in optional.items() if draw.random() < 0.3}
    if draw.random() < 0.05:
        chosen["unknown"] = 1
    return given, chosen


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise AssertionError(f"it takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def described(what: str) -> Iterator[None]:
    """What fails says which call it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise


PYTHONS_OWN = re.compile(
    r"unexpected keyword argument|multiple values for argument|missing \d+ required|takes .*positional arguments? but"
)


def called(work: Callable[[], Any]) -> str:
    """What a call is refused with, if it is; anything but a sentence or Python's own TypeError is raised."""
    try:
        with in_time():
            found = work()
            if hasattr(found, "send"):  # a generator works when it is asked
                for _ in found:
                    pass
        return ""
    except TriviumError as error:
        sentence = str(error)
        assert sentence
        assert all(0 < len(line) <= LONGEST and line.isprintable() for line in sentence.split("\n"))
        return sentence
    except TypeError as error:
        if not PYTHONS_OWN.search(str(error)):
            raise
        return str(error)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a run, a published model, a text and a recipe in it."""
    folders.saved_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("to be, or not to be: that is the question\n" * 40)
    (tmp_path / "recipe.toml").write_text(write(folders.recipe(tmp_path)))
    folders.run(tmp_path / "trained", finished=True).rename(tmp_path / "run")
    models()["decoder"].export("hf", tmp_path / "published", say=lambda text: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def models() -> dict[str, Model]:
    chat = "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}{% endfor %}"
    return {
        "decoder": Model(tiny.model("gpt-mini", tiny.BYTES), tiny.BYTES, {"chat_template": chat}),
        "encoder": Model(tiny.model("bert-mini", tiny.MASKED), tiny.MASKED, {}),
        "encoder-decoder": Model(tiny.model("t5-mini", tiny.DENOISING), tiny.DENOISING, {}),
    }


def abuse(of: object, specs: Mapping[str, Spec], rounds: int, seed: int) -> None:
    """Call what `specs` name with right and wrong arguments; some of them must be refused."""
    refused = 0
    for round in range(rounds):
        draw = random.Random(seed * 1_000_003 + round)
        name = draw.choice(list(specs))
        given, chosen = arguments(specs[name], draw)
        with described(f"seed {seed}, round {round}: {name} {shown(given, 200)} {shown(chosen, 300)}"):
            refused += bool(called(partial(getattr(of, name), *given, **chosen)))
    assert refused > rounds // 3


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_wrong_calls_of_a_model_are_answered_in_a_sentence(
    family: str, workplace: Path, count: Callable[[int, int], int]
) -> None:
    abuse(models()[family], METHODS, count(50, 1_000), random.randrange(2**32) if count(0, 1) else 0)


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_wrong_calls_that_write_a_model_are_answered_in_a_sentence(
    family: str, workplace: Path, count: Callable[[int, int], int]
) -> None:
    writing = {name: METHODS[name] for name in ("save", "export")}
    abuse(models()[family], writing, count(20, 1_000), random.randrange(2**32) if count(0, 1) else 0)


def test_wrong_calls_of_the_package_are_answered_in_a_sentence(
    workplace: Path, count: Callable[[int, int], int]
) -> None:
    abuse(tv, FUNCTIONS, count(50, 1_000), random.randrange(2**32) if count(0, 1) else 0)


# fmt: off
WORDS: Sequence[str] = [
    "", "-", "--", "-1", "0", "1", "3.5", "1e9", "nan", "inf", "99999999999999999999", "x", "x" * 3_000, "☃",
    "a=b", "seed=x", "seed=9" + "9" * 5_000, "model.width=0", "model=gpt9", "optim.rate=nan", "data.paths=[", "=",
    "a..b=1", "\x1b[2J", "/dev/zero", "/dev/null", "/proc/none", "..", ".", "model", "run", "published", "text.txt",
    "recipe.toml", "none", "model/model.json", "run/checkpoints", "run/data", "hf", "gguf", "trivium", "auto", "cpu",
    "cuda:9", "bytes",
]
COMMANDS: dict[str, list[str]] = {
    "train": ["--runs", "--data-dir"],
    "generate": ["--tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--seed", "-n", "--stop", "--json"],
    "fill": ["--top", "--average", "--device", "--json"],
    "translate": ["--beams", "--alpha", "-n", "--tokens", "--json"],
    "embed": ["--pooling", "--device", "--json"],
    "eval": ["--data-dir", "--split", "--stride", "--beams", "--json"],
    "import": ["--bits"],
    "export": ["--bits", "--text", "--average"],
    "chat": ["--system", "--tokens", "--temperature"],
    "presets": ["--json"],
    "config": ["--json"],
    "runs": ["--json"],
    "show": ["--json"],
    "data build": ["--tokenizer", "--size", "--set", "--valid", "--separator", "--field"],
    "data stats": ["--json"],
    "data show": ["--row", "--split", "--context", "--json"],
    "tokenizer train": ["--kind", "--size", "--set"],
    "tokenizer encode": ["--json"],
    "tokenizer show": ["--json"],
    "nothing": ["--help", "--debug"],
}
# fmt: on


def command_line(draw: random.Random) -> list[str]:
    command = draw.choice(list(COMMANDS))
    line = command.split()
    for _ in range(draw.randint(0, 3)):
        line.append(draw.choice(WORDS))
    for option in COMMANDS[command]:
        if draw.random() < 0.25:
            line += [option] if option in ("--json", "--help") else [option, draw.choice(WORDS)]
    return line


def test_wrong_command_lines_are_answered_in_a_sentence(
    workplace: Path, invoke: Call, count: Callable[[int, int], int]
) -> None:
    seed = random.randrange(2**32) if count(0, 1) else 0
    refused = 0
    for round in range(count(50, 1_000)):
        line = command_line(random.Random(seed * 1_000_003 + round))
        with described(f"seed {seed}, round {round}: trivium {shown(line, 400)}"), in_time():
            outcome = invoke(*line, piped="hello\n")
            assert outcome.code in (0, 1, 2), outcome
            assert "Traceback" not in outcome.err
            if outcome.code:
                refused += 1
                said = outcome.err.strip().split("\n")
                assert any(text.startswith(("error: ", "Error: ", "Usage: ")) for text in said), outcome.err
                # what typer says of options is as long as what was typed
                assert all(len(text) <= LONGEST + 10 for text in said if text.startswith("error: "))
            elif "--json" in line and "--" not in line:
                json.loads(outcome.out)
    assert refused > count(50, 1_000) // 3
