"""Estimates of memory beside what autograd really keeps, and what the system says is free."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import trivium as tv
from tests.cases import shrunk
from trivium.config import load, overrides
from trivium.errors import RequestError
from trivium.fast.choose import FastOptions, for_training
from trivium.models.config import ModelConfig
from trivium.models.presets import PRESETS
from trivium.models.transformer import build
from trivium.planner import memory
from trivium.planner.memory import Memory, free_host_memory, gigabytes, require_memory, training_memory


def kept_bytes(config: ModelConfig, rows: int, length: int) -> int:
    """What a forward pass keeps for its backward pass, each storage once, weights left out."""
    model = build(config, seed=0)
    for_training(model, FastOptions())  # as a run does
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids = torch.randint(0, config.vocab, (rows, length))
    inputs = {"source": ids} if config.family == "encoder-decoder" else {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, **inputs)
    return sum(found.values())


@pytest.mark.parametrize(
    "name", ["gpt-mini", "llama-mini", "gpt2", "bert-base-uncased", "t5-small", "transformer-base"]
)
def test_activations_are_estimated_within_a_third(name: str) -> None:
    config = replace(shrunk(PRESETS[name]()), width=128, context=64)
    estimate = training_memory(config, tokens=8 * 64, states=2.0)
    real = kept_bytes(config, 8, 64)
    assert 0.6 * real < estimate.activations < 1.2 * real


@pytest.mark.parametrize("position", ["t5", "shaw", "alibi", "rotary"])
def test_positions_that_change_scores_are_counted(position: str) -> None:
    layer = overrides({"decoder.block.position": position, "decoder.layers": 3, "width": 128, "context": 256})
    config = load(ModelConfig, layer, start=replace(PRESETS["gpt-mini"](), vocab=300))
    estimate = training_memory(config, tokens=4 * 256, states=2.0)
    real = kept_bytes(config, 4, 256)
    assert 0.7 * real < estimate.activations < 1.3 * real


def test_rows_shorter_than_the_context_keep_fewer_scores() -> None:
    config = replace(PRESETS["gpt2"](), vocab=300, width=96, context=1024)
    config = load(ModelConfig, overrides({"decoder.layers": 2, "decoder.block.attention.heads": 2}), start=config)
    short = training_memory(config, tokens=8 * 64, states=2.0, length=64)
    real = kept_bytes(config, 8, 64)
    assert 0.6 * real < short.activations < 1.3 * real
    assert short.weights == training_memory(config, tokens=8 * 64, states=2.0).weights


def test_weights_gradients_and_moments_are_exact() -> None:
    config = PRESETS["gpt2"]()
    found = training_memory(config, tokens=0, states=2.0)
    assert found == Memory(4 * 124_439_808, 4 * 124_439_808, 8 * 124_439_808, 0)
    assert found.fixed == found.total == 16 * 124_439_808
    assert str(found) == "2.0 GB (weights 0.5 GB, gradients 0.5 GB, optimizer 1.0 GB, activations 0.0 MB)"


def test_recomputing_blocks_keeps_less() -> None:
    config = PRESETS["gpt2"]()
    usual, again = (training_memory(config, tokens=1024, states=2.0, recompute=how) for how in (False, True))
    assert again.activations < usual.activations / 5


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:   2048 kB\n"}, 2048 * 1024),
        ({"meminfo": "MemAvailable: 2048 kB\n", "max": "max\n", "current": "5\n"}, 2048 * 1024),
        ({"meminfo": "MemAvailable: 2048 kB\n", "max": "1000\n", "current": "400\n"}, 600),
        ({"meminfo": "MemAvailable: 2048 kB\n", "max": "1000\n", "current": "4000\n"}, 0),
        ({"meminfo": "MemAvailable: 2048 kB\n", "max": "99\n", "current": "90\n", "memory.stat": "cache 30\n"}, 39),
        ({"meminfo": "nonsense"}, 0),
        ({}, 0),
    ],
)
def test_free_memory_is_that_of_the_machine_and_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: int
) -> None:
    for name, text in ({"memory.stat": ""} | files).items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUPS", ((tmp_path, "max", "current", "cache"),))
    assert free_host_memory() == free


def test_what_is_larger_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**9)
    require_memory(10**9, "cpu", "it")
    with pytest.raises(
        RequestError,
        match=r'^it needs 1.0 GB for its weights, and 1.0 GB are free on cpu; .*memory="try", --memory try\)$',
    ):
        require_memory(10**9 + 1, "cpu", "it")
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)  # a system that does not say
    require_memory(10**20, "cpu", "it")


def test_bytes_are_said_in_two_units() -> None:
    assert [gigabytes(size) for size in (0, 2_500_000, 10**8, 2.25e11)] == ["0.0 MB", "2.5 MB", "0.1 GB", "225.0 GB"]


def test_building_and_loading_ask_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tv.build("gpt-mini", vocab=300, width=16, overrides={"decoder.layers": 1})
    size = 4 * sum(parameter.numel() for parameter in module.parameters())
    from trivium.handle import Model
    from trivium.text.kinds import Bytes

    Model(module, Bytes().build([]), {}).save(tmp_path / "m")
    monkeypatch.setattr(memory, "free_memory", lambda device: size - 1)
    built = partial(tv.build, module.config)
    loaded = partial(tv.load, tmp_path / "m")
    for attempt in (built, loaded):
        with pytest.raises(RequestError, match=r"needs .* for its weights, and .* are free on cpu"):
            attempt()
        attempt(memory="try")
    assert tv.build("llama3.1-405b", device="meta").config.layers == 126
