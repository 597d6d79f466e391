"""The benchmarks run, compare the same work, and count right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn

from bench import decode, train
from bench.table import rounds, summary
from trivium.models.transformer import Transformer

TINY = train.SHAPES["tiny"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def typed(main: Callable[[Sequence[str]], None], line: str) -> None:
    main(line.split())


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The cells of every line of the last table, by its first word."""
    return {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}


def test_the_training_benchmark_prints_both_sides_and_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    typed(train.main, "--device cpu --shape tiny --steps 1 --rounds 2 --rows 2 --threads 1")
    out = capsys.readouterr().out
    sides = [line.split()[0] for line in out.splitlines()[3:5]]
    assert sides == ["trivium", "hf"]
    assert f"torch {torch.__version__}" in out
    assert "1 threads" in out


def test_the_decoding_benchmark_prints_both_sides_and_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    typed(decode.main, "--device cpu --shape tiny --batch 2 --prompt 8 --tokens 6 --rounds 2 --threads 1")
    lines = printed(capsys)
    assert {"trivium", "hf", "side"} <= set(lines)


def test_one_side_can_be_timed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    typed(decode.main, "--device cpu --against none --shape tiny --prompt 4 --tokens 4 --rounds 1 --threads 1")
    lines = printed(capsys)
    assert "trivium" in lines
    assert "hf" not in lines


def test_a_shape_has_the_parameters_of_its_name() -> None:
    # GPT-2: (vocab + context) x width, per layer 12 width² + 13 width, and the final norm
    shape = train.SHAPES["10m"]
    width = shape.width
    expected = (shape.vocab + shape.context) * width + shape.layers * (12 * width**2 + 13 * width) + 2 * width
    assert train.ours(shape).parameters() == expected == 10_101_760


@pytest.mark.parametrize("name", ["attention.key.weight", "attention.value.bias", "around_feedforward.norm.weight"])
def test_twins_that_are_not_the_same_function_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faithful = train.copy

    def careless(source: Transformer, target: nn.Module) -> None:
        faithful(source, target)
        with torch.no_grad():
            dict(source.named_parameters())[f"decoder.blocks.1.{name}"].mul_(1.5)

    monkeypatch.setattr(train, "copy", careless)
    with pytest.raises(SystemExit, match="not the same function"):
        train.twins(TINY, CPU)


def test_sides_that_write_other_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "their_loop", lambda *_: lambda: [[0, 0]])
    with pytest.raises(SystemExit, match="hf loop wrote other tokens"):
        typed(decode.main, "--device cpu --shape tiny --prompt 4 --tokens 2 --rounds 1 --threads 1")


def test_a_prompt_beyond_the_context_is_refused() -> None:
    with pytest.raises(SystemExit, match="more than the context of 32"):
        typed(decode.main, "--device cpu --shape tiny --prompt 20 --tokens 20 --threads 1")


def test_both_sides_train_to_nearly_the_same_weights() -> None:
    # the one difference: Hugging Face shifts the labels itself, so the last token of a row has none
    first, second = train.twins(TINY, CPU)
    before = first.embedding.weight.detach().clone()
    recipe = train.recipe(TINY, device=CPU, dtype="fp32", compiled=False, rows=4)
    rows = train.random_rows(TINY, 64)
    train.our_steps(first, recipe, rows, 3)()
    train.their_steps(second, recipe, rows, 3)()
    theirs = dict(second.named_parameters())["transformer.wte.weight"].detach()
    moved_first, moved_second = (first.embedding.weight.detach() - before).flatten(), (theirs - before).flatten()
    assert torch.cosine_similarity(moved_first, moved_second, dim=0) > 0.9
    assert float(moved_first.norm() / moved_second.norm()) == pytest.approx(1, abs=0.05)


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
    assert (first.tokens_per_second, first.milliseconds) == (200.0, 150.0)
    assert (first.ratio, first.low, first.high) == (2.0, 2.0, 2.0)
    assert first.spread == pytest.approx(1 / 3)  # quartiles 1 and 2 around 1.5
    assert second.ratio == 1.0
