"""Files of our own folders that are links out of them, devices, pipes or endless: refused at once, by their name."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile import folders
from tests.training.conftest import finish, resume
from trivium import api, report
from trivium.checkpoints.format import read_tensors, verify
from trivium.checkpoints.store import Store
from trivium.config import read
from trivium.data.shards import open_shards
from trivium.errors import CheckpointError, ConfigError, TriviumError
from trivium.files import Lock
from trivium.models.transformer import weights
from trivium.records import results_of as results
from trivium.text.tokenizer import open_tokenizer

SORTS = ["link", "device", "pipe", "folder", "loop", "endless"]
SECONDS = 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.run(tmp_path_factory.mktemp("run"), finished=False)


def spoil(file: Path, sort: str) -> None:
    """Put something in the place of a file from which it can be read no more, or without end."""
    outside = file.parent.parent / f"outside-{file.name}"
    shutil.copy(file, outside)
    file.unlink()
    if sort == "link":
        file.symlink_to(outside)
    elif sort == "device":
        file.symlink_to("/dev/zero")
    elif sort == "pipe":
        os.mkfifo(file)
    elif sort == "folder":
        file.mkdir()
    elif sort == "loop":
        file.symlink_to(file)
    else:
        with file.open("wb") as content:
            content.truncate(1 << 40)  # a terabyte that takes no space


def refused(work: Callable[[], object]) -> str:
    began = time.monotonic()
    with pytest.raises(TriviumError) as caught:
        work()
    assert time.monotonic() - began < SECONDS
    sentence = str(caught.value)
    assert sentence
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("name", ["model.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_a_saved_model(model: Path, tmp_path: Path, name: str, sort: str) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    spoil(folder / name, sort)
    sentence = refused(lambda: api.load(folder, device="cpu"))
    if name != "model.json" or sort in ("link", "endless"):  # else nothing says that it is a model
        assert name in sentence
    if sort == "link":
        assert "it leads out of its folder" in sentence


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("name", ["config.toml", "tokenizer.json", "manifest.json", "model.safetensors", "state.json"])
def test_a_file_that_an_unfinished_run_is_opened_from(run: Path, tmp_path: Path, name: str, sort: str) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    kept = folder / "checkpoints" / "step-00000004"
    spoil(folder / name if name in ("config.toml", "tokenizer.json") else kept / name, sort)
    for other in Store(folder / "checkpoints").checkpoints()[:-1]:
        shutil.rmtree(other.path)
    refused(lambda: api.load(folder, device="cpu"))
    refused(lambda: finish(resume(folder)))
    if kept.exists() and name not in ("config.toml", "tokenizer.json"):
        assert name in refused(lambda: verify(kept))
        if name == "model.safetensors":
            assert name in refused(lambda: read_tensors(kept / name))


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("name", ["manifest.json", "train.bin", "valid.docs.bin"])
def test_a_file_of_the_token_ids(run: Path, tmp_path: Path, name: str, sort: str) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    spoil(folder / "data" / name, sort)
    refused(lambda: open_shards(folder / "data"))
    refused(lambda: finish(resume(folder)))


@pytest.mark.parametrize("sort", ["link", "device", "folder", "loop", "endless", "pipe"])
def test_the_metrics_of_a_run(run: Path, tmp_path: Path, sort: str) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    secret = folder.parent / "outside-metrics.jsonl"
    spoil(folder / "metrics.jsonl", sort)
    before = secret.read_bytes()
    assert "metrics.jsonl" in refused(lambda: api.show(folder))
    assert "metrics.jsonl" in refused(lambda: api.train(folder, {"budget.steps": 6}, quiet=True))
    assert secret.read_bytes() == before  # nothing was written through the link
    assert "Nothing was measured yet" in report.page(folder)


def test_a_report_shows_no_file_from_outside(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (tmp_path / "secret").write_text("the password")
    for name in ("env.json", "config.toml"):
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "secret")
    assert "the password" not in report.page(folder)
    (folder / "results").mkdir()
    (folder / "results" / "a-test.json").symlink_to(tmp_path / "secret")
    assert results(folder) == [{"name": "a-test", "split": "", "metric": "damaged", "score": None}]


def test_a_lock_does_not_write_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("content")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"), Lock(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "content"


@pytest.mark.parametrize("sort", ["device", "pipe", "folder", "loop", "endless"])
def test_a_recipe_or_tokenizer_that_a_user_names(tmp_path: Path, sort: str) -> None:
    for name, opened in (("recipe.toml", read), ("tokenizer.json", open_tokenizer)):
        (tmp_path / "in").mkdir(exist_ok=True)
        file = tmp_path / "in" / name
        file.write_text("")
        spoil(file, sort)
        assert name in refused(lambda opened=opened, file=file: opened(file))  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"recipe\.toml"):
        api.recipe(tmp_path / "in" / "recipe.toml")


def test_a_user_may_name_links_and_keep_parts_of_a_run_on_another_disk(run: Path, model: Path, tmp_path: Path) -> None:
    """The folder that is named is resolved first, and so are `checkpoints` and `data` inside a run."""
    elsewhere = tmp_path / "disk"
    folder = Path(shutil.copytree(run, elsewhere / "run"))
    for name in ("checkpoints", "data"):
        shutil.move(folder / name, elsewhere / name)
        (folder / name).symlink_to(elsewhere / name)
    (tmp_path / "link").symlink_to(folder)
    assert api.load(tmp_path / "link", device="cpu").notes["step"] == 4
    finish(resume(tmp_path / "link"))
    assert api.show(tmp_path / "link")["state"] == "finished"
    (tmp_path / "recipe.toml").symlink_to(folder / "config.toml")
    assert api.recipe(tmp_path / "recipe.toml").budget.steps == 4
    (tmp_path / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    assert open_tokenizer(tmp_path / "tokenizer.json").size == 257
    inner = Path(shutil.copytree(model, tmp_path / "model"))
    shutil.move(inner / "model.safetensors", inner / "weights")
    (inner / "model.safetensors").symlink_to("weights")  # within the folder
    assert api.load(inner, device="cpu").config.vocab == 257


def test_a_saved_model_opens_from_the_cache_of_the_hub(model: Path, tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "1a2b"
    folder.mkdir(parents=True)
    shutil.copytree(model, blobs)
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(Path("..") / ".." / "blobs" / path.name)
    found = api.load(folder, device="cpu")
    assert len(weights(found.module)) > 5
    (folder / "model.json").unlink()
    (folder / "model.json").symlink_to(tmp_path / "model.json")
    shutil.copy(blobs / "model.json", tmp_path / "model.json")
    with pytest.raises(CheckpointError, match=r"model\.json cannot be read: it leads out of its folder"):
        api.load(folder, device="cpu")
