"""The benchmarks run, compare the same work, and count right."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bench import decode, peers, train
from bench import table as table_module
from bench.measure import Ceilings, ceilings, held, peak, recorded, size
from bench.table import fastest, rounds, summary, table
from bench.torch_transformer import TorchTransformer
from bench.workloads import CLIP, GPT2_10M, TINY, WORKLOADS, dry, marian, row, run_context
from trivium.cli.demos.assets import text_of
from trivium.models.presets import PRESETS
from trivium.models.transformer import Transformer
from trivium.parts.losses import total
from trivium.training.build_job import build_job

CPU = torch.device("cpu")
COLUMNS = ["side", "tokens/s", "ms/step", "TFLOP/s", "ceiling", "GB", "spread", "ratio", "quartiles"]
QUICK = "--device cpu --tiny --threads 1"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def typed(main: Callable[[Sequence[str]], None], line: str) -> None:
    main(line.split())


def told(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], dict[str, list[str]], str]:
    """The heads of the printed table, the cells of its lines by the names of the sides, and all that was printed."""
    out = capsys.readouterr().out
    lines = out.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("side "))
    heads = lines[first].split()
    sides = {}
    for line in lines[first + 1 :]:
        cells = line.split()
        if " to " not in line or len(cells) < len(heads):
            break
        # a name may have two words; behind it are as many cells as heads, and "low to high" is three of them
        name = len(cells) - (len(heads) + 1)
        sides[" ".join(cells[:name])] = cells[name:]
    return heads, sides, out


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few real pairs, so that a tokenizer is made in no time."""
    path = tmp_path_factory.mktemp("pairs") / "few.tsv"
    path.write_text("\n".join(text_of("tatoeba-test.tsv.gz").splitlines()[:300]) + "\n")
    return path


@pytest.mark.parametrize("name", list(TINY))
def test_every_training_workload_prints_its_table(name: str, pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed(train.main, f"{QUICK} --workload {name} --steps 1 --rounds 2 --data {pairs}")
    heads, sides, out = told(capsys)
    assert heads == COLUMNS
    assert list(sides) == ["trivium", "torch eager" if name == "transformer" else "hf"]
    for cells in sides.values():
        assert float(cells[0].replace(",", "")) > 0
        assert float(cells[3].rstrip("%")) > 0
    assert "floor of a step" in out
    assert f"torch {torch.__version__}" in out
    assert "1 threads" in out


@pytest.mark.parametrize("name", ["gpt2", "tinyllama"])
def test_every_decoding_workload_prints_its_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed(decode.main, f"{QUICK} --workload {name} --batch 2 --rounds 2")
    heads, sides, _ = told(capsys)
    assert heads == [{"ms/step": "ms/token", "TFLOP/s": "TB/s"}.get(head, head) for head in COLUMNS]
    assert list(sides) == ["trivium", "hf loop", "hf dynamic", "hf static"]


def test_translation_side_by_side_writes_the_same_texts(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed(decode.main, f"{QUICK} --workload translate --sentences 10 --batch 8 --rounds 1 --data {pairs}")
    _, sides, out = told(capsys)
    assert list(sides) == ["trivium", "hf 8"]
    assert "10 sentences" in out


def test_one_side_can_be_timed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    typed(decode.main, f"{QUICK} --against none --workload gpt2 --prompt 4 --tokens 4 --rounds 1")
    assert list(told(capsys)[1]) == ["trivium"]
    typed(train.main, f"{QUICK} --against none --workload gpt2 --steps 1 --rounds 1")
    assert list(told(capsys)[1]) == ["trivium"]


def test_a_benchmark_runs_as_a_file_though_one_is_called_profile() -> None:
    path = Path(train.__file__).with_name("profile.py")
    asked = [sys.executable, str(path), *QUICK.split(), "--workload", "gpt2", "--steps", "1"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, cwd=path.parent)
    assert done.returncode == 0, done.stderr
    assert "products" in done.stdout


def test_a_precision_that_trivium_has_not_is_refused() -> None:
    with pytest.raises(SystemExit, match="has no int3"):
        TINY["gpt2"].recipe(device="cpu", precision="int3")


def test_workloads_have_the_shapes_of_the_peers() -> None:
    # GPT-2: (vocab + context) x width, per layer 12 width² + 13 width, and the final norm
    expected = (8192 + 256) * 320 + 6 * (12 * 320**2 + 13 * 320) + 2 * 320
    assert GPT2_10M.parameters() == expected == 10_101_760
    # published sizes; GPT-2's vocabulary is padded by 47 ids of its width
    assert WORKLOADS["gpt2"].model.parameters() == 124_439_808 + 47 * 768
    assert WORKLOADS["gpt2-xl"].model.parameters() == 1_557_611_200 + 47 * 1600
    assert WORKLOADS["tinyllama"].model.parameters() == 1_100_048_384
    assert WORKLOADS["bert"].model.parameters() == 109_514_298  # BertForMaskedLM
    assert WORKLOADS["t5"].model.parameters() == 222_903_552


def test_rows_are_as_long_as_those_of_the_peers(tmp_path: Path) -> None:
    for name, wanted in (("t5", (512, 114, 114)), ("bert", (0, 512, 77)), ("gpt2", (0, 1024, 1024))):
        workload = WORKLOADS[name]
        base = run_context(workload, workload.recipe(device="cpu", rows=1), tmp_path, batches=1)
        assert row(base) == wanted


def test_no_workload_has_dropout() -> None:
    assert "dropout=0.1" in repr(PRESETS["gpt2"]())
    for workload in (*WORKLOADS.values(), *TINY.values()):
        assert "dropout=0.1" not in repr(workload.model)
        assert dry(workload.model) == workload.model


@pytest.mark.parametrize("name", ["gpt2", "tinyllama", "bert", "t5", "transformer"])
@pytest.mark.parametrize("part", ["attention.key.weight", "attention.value.weight", "feedforward.up.weight"])
def test_twins_that_are_not_the_same_function_are_refused(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faithful = peers.gap

    def careless(model: Transformer, peer: nn.Module) -> float:
        with torch.no_grad():
            dict(model.named_parameters())[f"{'decoder' if model.decoder else 'encoder'}.blocks.1.{part}"].mul_(1.5)
        return faithful(model, peer)

    monkeypatch.setattr(peers, "gap", careless)
    with pytest.raises(SystemExit, match="not the same function"):
        peers.twins(TINY[name].model, CPU)


def test_a_peer_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "hugging_face", lambda model: nn.Linear(2, 2))
    with pytest.raises(SystemExit, match="110,336 and 6 parameters"):
        peers.twins(TINY["gpt2"].model, CPU)


def test_only_what_hugging_face_lacks_is_measured_against_torch() -> None:
    found = {name: type(peers.twins(workload.model, CPU)[1]) for name, workload in TINY.items()}
    assert [name for name, kind in found.items() if kind is TorchTransformer] == ["transformer"]


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "transformer"])
def test_sides_with_other_losses_are_refused(name: str, pairs: Path, tmp_path: Path) -> None:
    base = run_context(TINY[name], TINY[name].recipe(device="cpu", precision="fp32"), tmp_path, data=str(pairs))
    made = build_job(base, 1)
    peer = peers.twin(made.model)
    train.check_losses(made, base, peer)
    with torch.no_grad():
        made.model.embedding.weight.mul_(2)
    with pytest.raises(SystemExit, match="first losses"):
        train.check_losses(made, base, peer)


def test_sides_that_write_other_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "their_loop", lambda *_: lambda: [[0, 0]])
    with pytest.raises(SystemExit, match="hf loop wrote other tokens"):
        typed(decode.main, f"{QUICK} --workload gpt2 --prompt 4 --tokens 2 --rounds 1")


def test_a_way_of_the_peer_that_fails_is_told_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> Callable[[], decode.Texts]:
        def run() -> decode.Texts:
            raise RuntimeError("no graph")

        return run

    monkeypatch.setattr(decode, "their_loop", broken)
    typed(decode.main, f"{QUICK} --workload gpt2 --rounds 1")
    _, sides, out = told(capsys)
    assert list(sides) == ["trivium", "hf dynamic", "hf static"]
    assert "hf loop failed and is left out: RuntimeError: no graph" in out


def test_what_the_caller_can_mend_is_told_in_a_sentence() -> None:
    with pytest.raises(SystemExit, match="is not a device; try auto"):
        table_module.typed(lambda: typed(train.main, "--tiny --device abacus"))


def test_a_prompt_beyond_the_context_is_refused() -> None:
    with pytest.raises(SystemExit, match="more than the context of 32"):
        typed(decode.main, f"{QUICK} --workload gpt2 --prompt 20 --tokens 20")


def test_the_share_of_equal_tokens_counts_up_to_the_first_difference() -> None:
    assert decode.prefix([[1, 2, 3, 4]], [[1, 2, 0, 4]]) == 0.5
    assert decode.prefix([[1, 2], [3, 4]], [[1, 2], [0, 4]]) == 0.5
    assert decode.prefix([[1, 2]], [[1, 2]]) == 1.0


@pytest.mark.parametrize("name", ["gpt2", "tinyllama", "bert", "t5"])
def test_both_sides_train_to_the_same_weights(name: str, tmp_path: Path) -> None:
    """One batch that both see, so that order and masking cannot differ: only rounding is left."""
    base = run_context(TINY[name], TINY[name].recipe(device="cpu", precision="fp32"), tmp_path, batches=1)
    made = build_job(base, 3)
    before = made.model.embedding.weight.detach().clone()
    peer = peers.twin(made.model)
    batch = base.task.inputs(base.train.take(made.order.batch(0)), np.random.default_rng(0))
    moves = peers.steps(peer, base.recipe, iter([peers.translated(batch)] * 3))
    moves(3)
    optimizer = base.recipe.optim.build(made.model)
    for _ in range(3):
        loss = total(base.task.loss(made.model, made.model(**batch.inputs), batch.targets), batch.counts)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(made.model.parameters(), CLIP)
        optimizer.step(1.0, torch.ones(()))
        made.model.zero_grad()
    theirs = next(tensor for tensor in peer.parameters() if tensor.shape == before.shape).detach()
    ours = made.model.embedding.weight.detach()
    assert float((ours - before).abs().max()) > 1e-4
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_sides_take_turns_and_each_round_is_timed_alone() -> None:
    now = 0.0
    order: list[str] = []

    def lasting(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            now += seconds
            order.append(name)

        return run

    seconds = rounds({"a": lasting("a", 1.0), "b": lasting("b", 3.0)}, 4, CPU, lambda: now)
    assert order == list("abbaabba")
    assert seconds == {"a": [1.0] * 4, "b": [3.0] * 4}


def test_the_table_counts_by_hand() -> None:
    # a machine that slows down by half: the ratio of neighbours stays 2, whatever the medians do
    first, second = summary({"a": [1.0, 2.0, 1.0, 2.0], "b": [2.0, 4.0, 2.0, 4.0]}, tokens=300, steps=10)
    assert first.tokens_per_second == pytest.approx(200.0)
    assert first.milliseconds == 150.0
    assert (first.ratio, first.low, first.high) == (2.0, 2.0, 2.0)
    assert first.spread == pytest.approx(1 / 3)  # quartiles 1 and 2 around 1.5
    assert second.ratio == 1.0


def test_rounds_of_different_sizes_are_compared_by_their_rates() -> None:
    # twice the tokens in twice the time is the same speed
    first, second = summary(
        {"a": [1.0, 2.0], "b": [1.0, 1.0]}, tokens={"a": [100, 200], "b": [50, 50]}, steps=1, against="b"
    )
    assert (first.tokens_per_second, first.spread, first.ratio) == (100.0, 0.0, 2.0)
    assert fastest([first, second], ["a", "b"]) == "a"
    assert fastest([first, second], ["b"]) == "b"


def test_a_table_without_work_has_no_columns_for_it() -> None:
    [head, *_] = table(summary({"a": [1.0]}, tokens=1, steps=1), "step")
    assert head.split() == [column for column in COLUMNS if column not in ("TFLOP/s", "ceiling", "GB")]


def test_what_graphs_keep_is_counted_once_and_nothing_else() -> None:
    """As torch's allocator tells it: tensors are counted already, and freed ones of no graph are anybody's."""
    segments: list[dict[str, Any]] = [
        {"segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 40},
        {"segment_pool_id": (0, 3), "total_size": 1000, "allocated_size": 300},
        {"segment_pool_id": [2, 1], "total_size": 20, "allocated_size": 0},
        {"total_size": 5, "allocated_size": 0},
    ]
    assert recorded(segments) == 720


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the highest mark of memory is read from /proc")
def test_the_peak_of_memory_counts_what_a_side_takes_and_not_what_was_there_before() -> None:
    there = torch.ones(32 << 18)  # 32 MB, not counted
    found = peak(CPU, held(CPU), lambda: torch.ones(64 << 18).sum())
    assert found is not None
    assert 55e6 < found < 90e6  # 64 MB
    assert len(there)


def test_a_side_is_not_charged_for_the_graphs_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, pools = torch.device("cuda"), [{"segment_pool_id": (0, 1), "total_size": 500, "allocated_size": 0}]
    monkeypatch.setattr("bench.measure.wait", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pools)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 70)
    before = held(cuda)
    assert peak(cuda, before, lambda: None) == 30
    own = {"segment_pool_id": (0, 2), "total_size": 9, "allocated_size": 1}
    assert peak(cuda, before, lambda: pools.append(own)) == 38


def test_the_size_of_a_model_is_that_of_its_weights() -> None:
    assert size(nn.Linear(3, 4)) == 4 * (3 * 4 + 4)


def test_ceilings_are_numbers_of_this_machine() -> None:
    found = ceilings(CPU, time.perf_counter, tiny=True)
    assert isinstance(found, Ceilings)
    assert all(1e6 < number < 1e15 for number in found)


def test_a_marian_of_a_few_weights_is_like_the_large_one() -> None:
    small, large = marian(100, tiny=True), marian(100, tiny=False)
    assert small.parameters() < large.parameters()
    assert type(peers.twins(small, CPU)[1]).__name__ == "MarianMTModel"
