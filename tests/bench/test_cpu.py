"""The benchmark on two cores compares the same work, and says what it compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench import cpu
from trivium.checkpoints import bundle
from trivium.models.transformer import build, weights
from trivium.text.kinds import Bytes


def lines(capsys: pytest.CaptureFixture[str], what: str) -> tuple[str, dict[str, list[float]]]:
    """What the benchmark prints, and the numbers of its table: tokens a second, milliseconds, spread, ratio."""
    cpu.main([*what.split(), "--tiny", "--threads", "1", "--rounds", "2"])
    out = capsys.readouterr().out
    rows = out.split("quartiles\n")[1].splitlines()[:-1]
    return out, {
        row[:12].strip(): [float(cell.strip("%").replace(",", "")) for cell in row[12:].split()[:4]] for row in rows
    }


@pytest.mark.parametrize(
    ("what", "sides"),
    [
        ("train --rows 2", ["trivium", "hf"]),
        ("train --rows 2 --precision bf16", ["trivium", "hf"]),
        ("decode", ["trivium", "hf loop", "hf generate"]),
        ("int8", ["int8", "trivium fp32", "hf loop", "hf generate"]),
        ("embed", ["trivium", "hf in order", "hf sorted"]),
    ],
)
def test_each_prints_its_sides_and_the_machine(what: str, sides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out, found = lines(capsys, what)
    assert list(found) == sides
    assert found[sides[-1]][3] == 1.0  # ratios are over the last
    assert f"torch {torch.__version__}" in out
    assert "1 threads" in out


def test_the_sizes_are_those_of_the_goals() -> None:
    """GPT-2: (vocabulary + context) x width, per layer 12 width² + 13 width, and the final norm."""
    small, large = cpu.USUAL.trained, cpu.USUAL.decoder
    assert small.parameters() == (50_257 + 256) * 384 + 6 * (12 * 384**2 + 13 * 384) + 2 * 384 == 30_044_544
    assert large.parameters() == 124_439_808
    assert cpu.USUAL.encoder.width == 768


def test_what_8_bits_cost_is_told_of_a_trained_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Bytes().build([])
    module = build(cpu.TINY.decoder)  # nothing learned, but its ids are those of bytes
    bundle.save(tmp_path / "model", module.config, weights(module), tokenizer, {})
    (tmp_path / "text").write_text("To be, or not to be. " * 5, encoding="utf-8")
    out, _ = lines(capsys, f"int8 --model {tmp_path / 'model'} --text {tmp_path / 'text'}")
    (told,) = [line for line in out.splitlines() if "bits per byte" in line]
    before, after = (
        float(part.split()[-1]) for part in told.split(" bits per byte")[0:1] + told.split(" with 8 bits")[0:1]
    )
    assert abs(before - after) < 0.01
    assert before > 7  # of a model that knows nothing


def test_sides_that_write_other_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "their_loop", lambda *given: lambda: [[0]])
    with pytest.raises(SystemExit, match="other tokens"):
        cpu.main(["decode", "--tiny", "--threads", "1", "--rounds", "1"])


def test_sides_that_give_other_vectors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    faithful = cpu.their_vectors

    def careless(model: nn.Module, rows: Sequence[Sequence[int]], order: Sequence[int]) -> Tensor:
        return faithful(model, rows, order) + 2e-5

    monkeypatch.setattr(cpu, "their_vectors", careless)
    with pytest.raises(SystemExit, match="apart"):
        cpu.main(["embed", "--tiny", "--threads", "1", "--rounds", "1"])


def test_sentences_have_many_lengths_and_ids_of_the_model() -> None:
    rows = cpu.sentences(cpu.USUAL)
    lengths = [len(row) for row in rows]
    assert len(rows) == cpu.USUAL.sentences
    assert max(lengths) == cpu.LONGEST
    assert min(lengths) < 10
    assert all(0 <= id < cpu.USUAL.encoder.vocab for row in rows for id in row)


def test_the_number_of_threads_is_as_it_was_afterwards() -> None:
    before = torch.get_num_threads()
    with cpu.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
