"""What Python shows of the package: names, help, completion, representations, types and sentences."""

from __future__ import annotations

import pydoc
import rlcompleter
import subprocess
import sys
import typing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trivium as tv
from trivium.errors import BusyError, CheckpointError, ConfigError, DataError, RequestError
from trivium.files import Lock
from trivium.handle import Model
from trivium.models.config import Stack
from trivium.models.options import Block
from trivium.objectives.options import Masked
from trivium.parts.options.norms import RMSNormOptions
from trivium.text.kinds import Bytes

SMALL: dict[str, Any] = {
    "name": "small",
    "device": "cpu",
    "threads": 1,
    "model.width": 16,
    "model.context": 16,
    "model.decoder.layers": 1,
    "tokenizer": "bytes",
    "budget.steps": 4,
    "evaluate.every": 2,
    "sample.every": 0,
}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question. " * 40)
    return {**SMALL, "data.paths": str(text)}


def test_names_are_those_of_the_api_and_nothing_else() -> None:
    assert dir(tv) == sorted(tv.__all__)
    assert {"load", "train", "build", "Recipe", "Run"} <= set(dir(tv))
    for name in dir(tv):
        assert getattr(tv, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        tv.lode  # noqa: B018


def test_help_shows_functions_and_classes() -> None:
    text = pydoc.plain(pydoc.render_doc(tv))
    assert "__getattr__" not in text
    for words in ("load(path", "train(source", "class Model", "one workshop for every Transformer"):
        assert words in text


def test_tab_completes_before_torch_is_loaded() -> None:
    code = (
        "import sys, rlcompleter, trivium as tv; c = rlcompleter.Completer({'tv': tv});"
        "print([c.complete('tv.', i) for i in range(40)], 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "tv.load" in found.stdout or "tv.load(" in found.stdout
    completer = rlcompleter.Completer({"tv": tv})
    assert {completer.complete("tv.pres", number) for number in range(2)} == {"tv.preset(", "tv.presets()"}


def test_representations_say_what_a_thing_is(settings: dict[str, Any], tmp_path: Path) -> None:
    run = tv.train(tv.Recipe(), settings, runs=tmp_path / "runs", quiet=True)
    best = run.best
    assert best is not None
    shown = f"<Run {run.path}: 4 steps, best validation {best['bits_per_byte']:.4f} bits/byte at step {best['step']}>"
    assert repr(run) == shown
    m = run.model
    count = sum(parameter.numel() for parameter in m.module.parameters())
    assert repr(m) == f"<Model small, decoder, {count:,} parameters, context 16, <bytes tokenizer, 257 ids>, cpu>"
    score = m.score("To be")
    assert f"bits_per_byte={score.bits_per_byte:.4f}" in repr(score)
    assert f"perplexity={score.perplexity:.4f}" in repr(score)


def test_answers_have_types() -> None:
    for name in ("generate", "translate", "fill", "classify"):
        found = typing.get_overloads(getattr(Model, name))
        assert len(found) >= 2
        for each in [*found, getattr(Model, name)]:
            assert "Any" not in str(each.__annotations__["return"])


def test_a_recipe_in_python_takes_what_a_file_may_say(settings: dict[str, Any]) -> None:
    def made(**values: Any) -> tv.Recipe:
        return tv.Recipe(**values)

    assert made(model="gpt2").model == tv.preset("gpt2")
    assert made(data={"paths": ["a.txt", "b.txt"]}).data.paths == ("a.txt", "b.txt")
    assert made(model="bert-mini", objective="masked").objective == Masked()
    assert made(budget={"minutes": 3}).budget.minutes == 3.0
    assert made(track=["csv"]).track == ("csv",)
    with pytest.raises(ConfigError, match=r"^model: there is no preset 'gpt3'; did you mean"):
        made(model="gpt3")
    with pytest.raises(ConfigError, match=r"^seed: expects a whole number, not 'x'$"):
        made(seed="x")
    with pytest.raises(ConfigError, match=r"^data: expects a table of settings, not None"):
        made(data=None)
    with pytest.raises(ConfigError) as caught:
        made(data={"path": "a.txt"}, clip="much", optim="adamm")
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="width"):
        tv.build("gpt-mini", width="wide")
    with pytest.raises(RequestError, match="prompt: 5 is not a text"):
        Model(tv.build("gpt-mini", width=16, vocab=257), Bytes().build([]), {}).generate(5)  # type: ignore[call-overload]


class Odd:
    def __repr__(self) -> str:
        raise ZeroDivisionError


@dataclass(frozen=True)
class Half:
    """Some of an optimizer's options."""

    rate: float = 0.1

    def build(self, model: nn.Module) -> None: ...


@pytest.mark.parametrize("key", ["data", "budget", "model", "optim", "tokenizer", "spike", "schedule", "objective"])
@pytest.mark.parametrize(
    "value", [b"x", {1}, tv.Model, tv.Recipe, object(), Odd(), bytearray(3), torch.zeros(2), range(3), int, nn.ReLU()]
)
def test_a_recipe_in_python_refuses_what_is_no_part(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: expects a table of settings, not .+"):
        tv.Recipe(**{key: value})
    with pytest.raises(ConfigError, match=rf"^{key}: expects a table of settings, not .+"):
        tv.train(tv.Recipe(), overrides={key: value}, quiet=True)


def test_options_of_another_place_are_no_part() -> None:
    with pytest.raises(ConfigError, match=r"^data: expects a table of settings, not Budget.*; set data\.paths$"):
        tv.Recipe(data=tv.Recipe().budget)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^optim: Half has no states, which every part has here; add it$"):
        tv.Recipe(optim=Half())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^model\.decoder\.block\.norm: Half has no cost, which every part has here"):
        tv.train(tv.Recipe(), overrides={"model.decoder.block.norm": Half()}, quiet=True)
    with pytest.raises(ConfigError, match=r"^variants: expects a table of named variants, not \{1\}$"):
        Stack(variants={1})  # type: ignore[arg-type]


def test_any_object_with_the_members_of_a_part_is_one() -> None:
    class Flat:
        def factor(self, step: float, total: int) -> float:
            return 1.0

    class Passed:
        """One that hands every question on."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    flat, passed = Flat(), Passed(tv.Recipe().optim)
    recipe = tv.Recipe(schedule=flat, optim=passed)
    assert (recipe.schedule, recipe.optim) == (flat, passed)


def test_a_cell_that_is_run_again_resumes_or_replaces(settings: dict[str, Any], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = tv.train(tv.Recipe(), settings, runs=runs, quiet=True)
    weights = (first.path / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r'exists already; .*; here exists="resume" goes on'):
        tv.train(tv.Recipe(), settings, runs=runs, quiet=True)
    resumed = tv.train(tv.Recipe(), settings, runs=runs, exists="resume", quiet=True)
    assert (resumed.path / "model.safetensors").read_bytes() == weights
    other = {**settings, "seed": 1}
    with pytest.raises(DataError, match="does not exist"):
        tv.train(tv.Recipe(), {**other, "data.paths": "none.txt"}, runs=runs, exists="replace", quiet=True)
    assert (first.path / "model.safetensors").read_bytes() == weights  # a new run that cannot begin replaces nothing
    with Lock(first.path), pytest.raises(BusyError):
        tv.train(tv.Recipe(), other, runs=runs, exists="replace", quiet=True)
    replaced = tv.train(tv.Recipe(), other, runs=runs, exists="replace", quiet=True)
    assert (replaced.path / "model.safetensors").read_bytes() != weights
    assert [path.name for path in runs.iterdir()] == ["small"]
    start = {key: value for key, value in other.items() if not key.startswith(("model", "tokenizer"))}
    with pytest.raises(ConfigError, match="lies in the run that is to be replaced"):
        tv.train(tv.Recipe(), {**start, "start": str(first.path)}, runs=runs, exists="replace", quiet=True)
    assert tv.train(tv.Recipe(), {**settings, "name": "new"}, runs=runs, exists="resume", quiet=True).path.name == "new"


def test_a_cell_that_is_run_again_with_other_settings_says_what_it_does(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    again = partial(tv.train, tv.Recipe(), runs=tmp_path / "runs", exists="resume", quiet=True)
    assert again(overrides=settings).metrics == again(overrides=settings).metrics
    run = again(overrides={**settings, "budget.steps": 6})
    assert max(row["step"] for row in run.metrics) == 6
    with pytest.raises(CheckpointError, match=r"model\.width was 16, not 32"):
        again(overrides={**settings, "budget.steps": 6, "model.width": 32})
    wrong: Any
    for wrong, said in ((run.path, "is a run; give the recipe"), ({"data": 1}, "give a recipe")):
        with pytest.raises(RequestError, match=said):
            tv.train(wrong, exists="replace")
    with pytest.raises(RequestError, match="none of refuse, resume and replace"):
        tv.train(tv.Recipe(), settings, exists="bogus")  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnNorm(RMSNormOptions):
    """A part of another package."""


def test_a_run_with_a_part_of_ones_own_gives_its_model(settings: dict[str, Any], tmp_path: Path) -> None:
    mine = {**settings, "model.decoder.block.norm": OwnNorm()}
    run = tv.train(tv.Recipe(), overrides=mine, runs=tmp_path / "runs", quiet=True)
    stack = run.model.config.decoder
    assert isinstance(stack, Stack)
    assert isinstance(stack.block, Block)
    assert isinstance(stack.block.norm, OwnNorm)
    with pytest.raises(CheckpointError, match=r"passed as parts=\[OwnNorm\]"):
        tv.load(run.path)


def test_a_recipe_refuses_an_unknown_name_as_a_file_does_and_shows_what_is_not_default() -> None:
    with pytest.raises(ConfigError, match=r"modle: is not a setting; did you mean model\?"):
        tv.Recipe(modle="gpt2")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"lr: .* optim\.rate"):
        tv.Recipe(lr=5)  # type: ignore[call-arg]
    assert repr(tv.Recipe(seed=3)) == "Recipe(seed=3, model=<decoder, 4 layers of width 256>)"
