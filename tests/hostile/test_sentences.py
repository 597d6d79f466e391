"""What a stranger wrote is never repeated at length: every error is short, on one line, and harmless to a terminal."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.cli.conftest import Call, invoke
from tests.faults.test_full_disk import no_file_above
from tests.hostile import folders
from tests.interop.gguf_models import gguf
from trivium import api, records
from trivium.config import assignments, load, overrides, read, write
from trivium.errors import LONGEST, ConfigError, DataError, FileError, TriviumError, file_error, printable, shown
from trivium.interop.fields import Fields
from trivium.interop.load import open_foreign
from trivium.text.tokenizer import open_tokenizer
from trivium.training.machine import Gpu, Machine
from trivium.training.recipe import Recipe

__all__ = ["invoke"]

LONG = "x" * 100_000
NASTY = "\x1b[2J\nerror: \ud800\u202e" * 3
MODEL: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "vocab_size": 90}


def bounded(work: Callable[[], object]) -> str:
    """The sentence with which `work` is refused."""
    with pytest.raises(TriviumError) as caught:
        work()
    check(str(caught.value))
    return str(caught.value)


def check(told: str) -> None:
    lines = told.split("\n")
    assert all(0 < len(line) <= LONGEST for line in lines)
    assert all(line.isprintable() for line in lines)
    assert len(lines) <= 101


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**MODEL)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [LONG, NASTY], ids=["long", "nasty"])
def test_a_key_or_value_of_a_recipe(tmp_path: Path, name: str) -> None:
    quoted = json.dumps(name).replace("\\ud800", "")
    path = tmp_path / "recipe.toml"
    for text in (
        f"{quoted} = 1",
        f"[model]\n{quoted} = 1",
        f"[{quoted}.{quoted}]\na = 1",
        f"name = {quoted}",
        f"seed = {quoted}",
        f"model = {quoted}",
        f"[model]\npreset = {quoted}",
        f"[model.decoder.block]\nnorm = {quoted}",
        f"[model.decoder.block.norm]\nkind = {quoted}",
        f"[model.decoder]\npattern = [{quoted}]",
        f"[data]\npaths = [{quoted}]",
        f"precision = {quoted}",
        f"device = {quoted}",
        f"{quoted} = 1\n{quoted} = 2",
        f"x = {quoted} y",
    ):
        path.write_text(text, encoding="utf-8")
        bounded(lambda: api.train(path, runs=tmp_path / "runs", quiet=True))
    for pair in (name, f"{name}=1", f"seed={name}", f"model.{name}=1", f"optim={name}", f"data.paths={name}"):
        bounded(lambda pair=pair: load(Recipe, assignments([pair, "name=a.b/c"])))  # type: ignore[misc]
    for key in (name, f"model.{name}"):
        bounded(lambda key=key: load(Recipe, overrides({key: name})))  # type: ignore[misc]


DEVICES = ["9" * 5000, "9" * 30, "128", "100", "00", "٣", "²", "-1", "+0", "0x0", "0 ", ""]


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("number", DEVICES, ids=range(len(DEVICES)))
def test_the_number_of_a_device(kind: str, number: str, model: Path, tmp_path: Path, invoke: Call) -> None:
    name = f"{kind}:{number}"
    calls: list[Callable[[], object]] = [
        lambda: api.load(model, device=name),
        lambda: api.build("gpt-mini", vocab=10, device=name),
        lambda: api.train(folders.recipe(tmp_path), overrides={"device": name}),
        lambda: Machine(gpus=(Gpu("one", (8, 0)),), mps=True).device(name),
    ]
    for call in calls:
        assert bounded(call).startswith("device: ")
    told = invoke("generate", model, "a", "--device", name)
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
    check(told.err.strip())


def test_many_problems_are_counted_and_not_all_told(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("".join(f"key{number} = 1\n" for number in range(5_000)))
    told = bounded(lambda: api.recipe(path))
    assert told.split("\n")[-1] == "and 4,900 problems more; correct these first"


NUMBERS = {
    "nested tables": "a = " + "{a=" * 3_000 + "1" + "}" * 3_000,
    "nested lists": "seed = " + "[" * 3_000 + "]" * 3_000,
    "dotted": ".".join(["model"] * 5_000) + " = 1",
    "header": "[model." + ".".join(["model"] * 5_000) + "]\na = 1",
    "a key with many parts": "a." * 50_000 + "a = 1",
    "an integer of 5,000 digits": "seed = " + "9" * 5_000,
    "an integer of 100,000 digits": "seed = 0x" + "f" * 100_000,
    "an integer above 64 bits": "log = 9223372036854775808",
    "a whole number above every float": "clip = 1" + "0" * 400,
    "a whole number of 16,000 digits where a float is expected": "clip = 0x" + "f" * 20_000,
    "a binary number": "[optim]\nrate = 0b" + "1" * 100_000,
    "an integer in a list": "[data]\nweights = [1" + "0" * 400 + "]",
    "a number that becomes text": "name = 0x" + "f" * 20_000,
    "a number that is a kind": "model = 0x" + "f" * 20_000,
    "a deep kind": "[model]\npreset = " + "[" * 300 + "]" * 300,
}


@pytest.mark.parametrize("text", NUMBERS.values(), ids=NUMBERS)
def test_deep_and_large_values_of_a_recipe(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load(Recipe, read(path))
    bounded(lambda: load(Recipe, read(path)))
    pairs = [line.replace(" = ", "=") for line in text.split("\n") if not line.startswith("[")]
    bounded(lambda: load(Recipe, assignments(pairs)))


@pytest.mark.parametrize("key", ["model", "optim", "model.decoder.block.norm", "data.paths", "name", "x"])
def test_deep_overrides_from_python(key: str) -> None:
    deep: dict[str, Any] = {"a": 1}
    for _ in range(3_000):
        deep = {"a": deep}
    endless: dict[str, Any] = {}
    endless["a"] = endless
    for value in (deep, endless):
        told = bounded(lambda value=value: api.train(Recipe(), overrides={key: value}, quiet=True))  # type: ignore[misc]
        assert key in told


LENGTHY = {
    "a long number": "seed = 0x" + "f" * 400_000,
    "a text that does not end": 'name = "' + '\\"' * 200_000,
    "many texts that do not end": '"""\\' * 100_000,
    "keys of 99 parts": (".".join("a" * 99) + "\n") * 1_000,
    "spaces": "name" + " " * 400_000,
}


@pytest.mark.parametrize("text", LENGTHY.values(), ids=LENGTHY)
def test_a_lengthy_recipe_is_read_in_a_time_that_grows_with_its_length(text: str) -> None:
    """Measured: 0.1 s; it was minutes when a pattern looked at each place to the end of the text."""
    began = time.process_time()
    with contextlib.suppress(ValueError):
        records.parse_toml(text)
    assert time.process_time() - began < 3


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


JSONS = {
    "long key": json.dumps({LONG: 1}),
    "long value": json.dumps({"format": LONG, "model_type": LONG, "version": LONG, "config": LONG}),
    "nasty value": json.dumps({"format": 1, "model_type": NASTY, "version": NASTY, "weights": NASTY}),
    "deep": f'{{"format": {deep(100_000)}}}',
    "deep value": f'{{"format": 1, "model_type": {deep(900)}, "model": {deep(900)}}}',
    "an integer of 5,000 digits": '{"format": ' + "9" * 5_000 + "}",
    "a large integer": '{"format": ' + "9" * 4_000 + ', "vocab_size": ' + "9" * 4_000 + "}",
    "a list": f"[{deep(50)}]",
    "a number": "1e999",
    "not JSON": LONG,
    "empty": "",
}


@pytest.mark.parametrize("text", JSONS.values(), ids=JSONS)
def test_json_of_every_kind(text: str, model: Path, published: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(model, tmp_path / "mine"))
    theirs = Path(shutil.copytree(published, tmp_path / "theirs"))
    for folder, name in ((mine, "model.json"), (mine, "tokenizer.json"), (theirs, "config.json")):
        whole = (folder / name).read_text()
        (folder / name).write_text(text)
        bounded(lambda folder=folder: api.load(folder, device="cpu", say=check))  # type: ignore[misc]
        (folder / name).write_text(whole)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        (theirs / name).write_text(text)
        try:
            api.load(theirs, device="cpu", say=check)
        except TriviumError as error:
            check(str(error))
        (theirs / name).unlink()
    (tmp_path / "tokenizer.json").write_text(text)
    bounded(lambda: open_tokenizer(tmp_path / "tokenizer.json"))


def test_values_of_a_card(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    facts = json.loads((folder / "model.json").read_text())
    for name in (LONG, NASTY):
        for change in (
            {"config": {**facts["config"], name: 1}},
            {"config": {**facts["config"], "decoder": {"kind": name}}},
            {"config": {**facts["config"], "width": name}},
            {"config": {**facts["config"], "width": 10**400}},
            {"weights": name},
            {"tokenizer": name},
            {"format": 10**400},
        ):
            (folder / "model.json").write_text(json.dumps({**facts, **change}))
            bounded(lambda: api.load(folder, device="cpu"))


@pytest.mark.parametrize("name", [LONG, NASTY.replace("\ud800", "")], ids=["long", "nasty"])
def test_names_of_tensors(name: str, model: Path, published: Path, tmp_path: Path) -> None:
    tensor = {name: torch.zeros(2)}
    theirs = Path(shutil.copytree(published, tmp_path / "theirs"))
    save_file(tensor, theirs / "model.safetensors")
    bounded(lambda: api.load(theirs, device="cpu"))
    raw = json.dumps({name: {"dtype": name, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (theirs / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
    bounded(lambda: api.load(theirs, device="cpu"))
    os.rename(theirs / "model.safetensors", theirs / "a.safetensors")
    for places in ({"weight_map": {name: "a.safetensors"}}, {"weight_map": {"a": name}}, {"weight_map": {name: name}}):
        (theirs / "model.safetensors.index.json").write_text(json.dumps(places))
        bounded(lambda: api.load(theirs, device="cpu"))
    mine = Path(shutil.copytree(model, tmp_path / "mine"))
    facts = json.loads((mine / "model.json").read_text())
    save_file(tensor, mine / "model.safetensors")
    facts["weights"] = hashlib.sha256((mine / "model.safetensors").read_bytes()).hexdigest()
    (mine / "model.json").write_text(json.dumps(facts))
    assert "is missing" in bounded(lambda: api.load(mine, device="cpu"))


def test_settings_that_nobody_read_are_told_in_few_words(published: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(published, tmp_path / "model"))
    table = json.loads((folder / "config.json").read_text())
    told: list[str] = []
    extra = {LONG: 1, NASTY: 1, **{f"setting{number}": 1 for number in range(1_000)}}
    (folder / "config.json").write_text(json.dumps({**table, **extra}))
    api.load(folder, device="cpu", say=told.append)
    [sentence] = [text for text in told if "were not read" in text]
    check(sentence)
    assert sentence.endswith("more")


@pytest.mark.parametrize("name", [LONG, NASTY.replace("\ud800", "")], ids=["long", "nasty"])
def test_strings_of_a_gguf_file(name: str, tmp_path: Path) -> None:
    for key, architecture, tensor in (
        ("general.name", name, "a"),
        (name, "llama", name),
        ("tokenizer.ggml.model", "llama", name),
        ("llama.rope.scaling.type", "llama", "token_embd.weight"),
    ):
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_string(key, name)
        writer.add_tensor(tensor, np.zeros((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        bounded(lambda path=path: open_foreign(path, say=check, tick=lambda *_: None))  # type: ignore[misc]


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), 10**4000, float("nan"), float("inf"), "9" * 5000, [[]]],
    ids=["1e400", "-1e400", "1e4000", "nan", "inf", "text", "list"],
)
def test_numbers_of_a_published_configuration(value: Any) -> None:
    fields = Fields({"a": value}, "config.json")
    for ask in (lambda: fields.number("a", 1.0), lambda: fields.integer("a", 1), lambda: fields.flag("a", True)):
        check(bounded(ask))


def test_paths_that_a_caller_gives(model: Path) -> None:
    m = api.load(model, device="cpu")
    kind: Any = LONG
    for path in (LONG, "a\0b", "\ud800", "a/" * 40_000 + "b", f"{model}/model.json/x"):
        for work in (
            lambda path=path: api.load(path),
            lambda path=path: api.show(path),
            lambda path=path: api.recipe(path),
            lambda path=path: api.train(path),
            lambda path=path: m.save(path),
            lambda path=path: m.export("hf", path),
            lambda path=path: m.export("gguf", path),
            lambda path=path: m.export(kind, path),
        ):
            bounded(work)


def test_a_refusal_of_the_operating_system_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    m = api.load(folders.saved_model(tmp_path / "model"), device="cpu")
    assert isinstance(file_error(OSError(28, "No space left on device"), "there"), FileError)
    assert "/proc/x" in bounded(lambda: m.save("/proc/x"))
    assert "/proc/x" in bounded(lambda: m.export("hf", "/proc/x"))
    recipe = folders.recipe(tmp_path)
    assert "/proc/x" in bounded(lambda: api.train(recipe, runs="/proc/x", quiet=True))


@pytest.mark.parametrize("limit", [0, 300, 1_000, 20_000])
def test_a_full_disk_before_there_is_a_run_names_a_file_of_it(
    tmp_path: Path, limit: int, invoke: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it was `error: a file: No space left on device`."""
    recipe = folders.recipe(tmp_path)
    (tmp_path / "recipe.toml").write_text(write(recipe))
    monkeypatch.chdir(tmp_path)
    with no_file_above(limit):
        with pytest.raises(FileError, match=r"runs/small.*: File too large"):
            api.train(recipe, runs=tmp_path / "runs", quiet=True)
        outcome = invoke("train", "recipe.toml")
    assert outcome.code == 2
    [line] = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: runs/small")
    assert line.endswith(": File too large")
    assert ".tmp-" not in line
    assert not (tmp_path / "runs").exists()


class Unshown:
    def __repr__(self) -> str:
        raise KeyError("x")


class Wrongly:
    def __repr__(self) -> str:
        return 5  # type: ignore[return-value]


def test_the_helpers_that_cut() -> None:
    assert shown(Unshown()) == "a Unshown"
    assert shown([Wrongly()]) == "a list"
    assert shown("short") == "'short'"
    assert shown(LONG) == f"'{'x' * 76}..."
    assert shown(10**5000) == "a long int"
    assert shown([]) == "[]"
    assert len(shown([LONG])) == 80
    assert printable("plain text, äöü") == "plain text, äöü"
    assert printable("a\x1b[2J\nb") == "a\\x1b[2J\\nb"
    cut = printable("head " + LONG + " tail")
    assert len(cut) == LONGEST
    assert cut.startswith("head x")
    assert cut.endswith("x tail")
    assert len(printable("\n" * 5_000)) == len(printable("\n" * 600)) == LONGEST
    assert str(DataError("one\ntwo")) == "one\\ntwo"
    assert str(ConfigError("one", "two")) == "one\ntwo"
    assert ConfigError("one", "two").sentence == "one; two"
