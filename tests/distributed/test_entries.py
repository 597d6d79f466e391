"""A model divided between two processes answers as a whole one does, whichever way it is asked, and is never stale."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.entries_worker import (
    Found,
    by_slots,
    compiled,
    late,
    used,
    whole_model,
    wide,
    without_backward,
)
from tests.distributed.processes import found_in, once, run

ways = pytest.mark.parametrize("way", ["sharded", "parallel"])


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes has found."""
    return found_in(once(tmp_path_factory, "entries", partial(run, "entries_worker")))


def alike(found: Found, expected: Found, within: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        off = float((found[name] - tensor).abs().max())
        assert off <= within * max(1.0, float(tensor.abs().max())), f"{name} is off by {off:.3g}"


@ways
def test_every_entry_finds_the_weights_without_a_forward_pass_before(divided: list[dict[str, Any]], way: str) -> None:
    """`encode`, the output, its losses and the other heads; weights loaded since; generation, then a gradient."""
    expected = used(whole_model)
    for rank in divided:
        alike(rank[way], expected, 1e-9)
    assert float((expected["loaded first"] - expected["loaded second"]).abs().max()) > 1e-3


@ways
def test_fast_layers_leave_divided_weights_to_the_plain_ones(divided: list[dict[str, Any]], way: str) -> None:
    """In sizes for which they have ways of their own, and where they were chosen too late."""
    for rank in divided:
        alike(rank[f"{way} wide"], wide(whole_model), 1e-5)
        alike(rank[f"{way} late"], late(whole_model), 1e-9)


@ways
def test_what_a_divided_model_cannot_do_is_refused(divided: list[dict[str, Any]], way: str) -> None:
    for rank in divided:
        found = rank[f"{way} refusals"]
        assert "sharded" in found["plain"]  # fast classes cannot be taken back
        assert "sharded already" in found["again"]
        assert ("dropout" in found["dropout"]) == (way == "parallel")  # FSDP2's processes read other data
        assert not found["evaluated"]


def test_weights_that_a_pass_has_left_gathered_are_not_used_again(divided: list[dict[str, Any]]) -> None:
    expected = without_backward(whole_model)
    for rank in divided:
        torch.testing.assert_close(rank["without backward"], expected)


@ways
def test_a_divided_model_is_decoded_without_slots(divided: list[dict[str, Any]], way: str) -> None:
    for rank in divided:
        assert rank[f"{way} slots"]["tokens"].tolist() == by_slots(whole_model)["tokens"].tolist()


def test_processes_agree_on_a_loss_and_a_whole_model_asks_nobody(divided: list[dict[str, Any]]) -> None:
    assert [rank["alone"] for rank in divided] == [[True, False, True], [True, False]]


def test_too_little_memory_in_the_first_process_is_an_error_in_all(divided: list[dict[str, Any]]) -> None:
    assert divided[0]["unwritable"] == "MemoryError: no room"
    assert "first process" in divided[1]["unwritable"]


@pytest.mark.full
def test_a_compiled_function_sees_the_divided_model(tmp_path: Path) -> None:
    expected = compiled(whole_model)
    run("entries_worker", tmp_path, "compiled")
    for rank in found_in(tmp_path):
        for way in ("sharded", "parallel"):
            alike(rank[f"{way} compiled"], expected, 1e-5)  # the loss is in float32


def test_outside_of_a_call_every_parameter_is_its_shard(divided: list[dict[str, Any]]) -> None:
    for rank in divided:
        assert all(rank["shards"])
        assert all(rank["kept"].values())


def test_processes_agree_on_a_flag_that_is_true_in_all(divided: list[dict[str, Any]]) -> None:
    assert [rank["agreed"] for rank in divided] == [[True, False, False, False]] * 2


def test_what_fails_in_the_first_process_fails_in_all(divided: list[dict[str, Any]]) -> None:
    assert "nothing" in divided[0]["failed"]  # its own error
    assert "first process" in divided[1]["failed"]
