from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch

from trivium.data.batch import Batch
from trivium.data.config import DataConfig
from trivium.data.packing import RowBatch
from trivium.data.shards import Shards, build
from trivium.data.show import Cell, cells, describe, preview
from trivium.errors import DataError
from trivium.text.kinds import Bytes
from trivium.text.tokenizer import Tokenizer

DOCUMENTS = ["ab", "cdefg", "é"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Bytes().build([])


@pytest.fixture
def shards(tmp_path: Path, tokenizer: Tokenizer) -> Shards:
    (tmp_path / "a.txt").write_text("\f".join(DOCUMENTS))
    config = DataConfig(paths=(str(tmp_path / "a.txt"),), valid=0.0)
    return build(config, tokenizer, tmp_path / "out", progress=lambda *_: None, say=lambda _: None)


def test_the_description_counts_what_is_there(shards: Shards, tokenizer: Tokenizer) -> None:
    lengths = [len(document.encode()) for document in DOCUMENTS]
    told = describe(shards, tokenizer)
    assert told["train"] == {
        "documents": 3,
        "tokens": sum(lengths) + 4,
        "bytes": sum(lengths),
        "bytes_per_token": 1.0,
        "longest_document": max(lengths),
        "median_document": median(lengths),
    }
    assert told["valid"]["tokens"] == told["valid"]["documents"] == told["valid"]["longest_document"] == 0


def test_the_preview_shows_each_position_with_what_it_predicts(shards: Shards, tokenizer: Tokenizer) -> None:
    shown = preview(shards, tokenizer, 5, 0, "train")
    end = tokenizer.piece(tokenizer.end)
    assert [(cell.piece, cell.label, cell.document) for cell in shown] == [
        (end, "a", 1), ("a", "b", 1), ("b", end, 1), (end, "c", 2), ("c", "d", 2),
    ]  # fmt: skip
    assert [cell.position for cell in shown] == list(range(5))
    assert [cell.id for cell in shown][1:3] == tokenizer.encode("ab")
    # The third row has two labels: the second byte of é and the closing END.
    last = preview(shards, tokenizer, 5, 2, "train")
    assert last[1].label == end
    assert last[2:] == [Cell(at, tokenizer.end, end, "", 0) for at in (2, 3, 4)]


def test_gathered_labels_stand_at_the_positions_they_were_gathered_from(tokenizer: Tokenizer) -> None:
    batch = Batch(
        inputs={"tokens": torch.tensor([[*b"abcd"], [*b"efgh"]]), "padding": torch.tensor([[True] * 3 + [False]] * 2)},
        targets={"where": torch.tensor([1, 6, 0]), "labels": torch.tensor([ord("x"), ord("y"), -100])},
        counts={"tokens": 2},
    )
    assert cells(batch, tokenizer) == [
        Cell(0, ord("a"), "a", "", 0), Cell(1, ord("b"), "b", "x", 0), Cell(2, ord("c"), "c", "", 0),
    ]  # fmt: skip


def test_a_source_comes_before_the_tokens_and_a_prefix_is_told_from_the_rest(tokenizer: Tokenizer) -> None:
    batch = Batch(
        inputs={
            "source": torch.tensor([[*b"pqr"]]),
            "source_padding": torch.tensor([[True, True, False]]),
            "tokens": torch.tensor([[*b"ab"]]),
            "prefix": torch.tensor([1]),
        },
        targets={"labels": torch.tensor([[-100, ord("c")]])},
        counts={"tokens": 1},
    )
    assert cells(batch, tokenizer) == [
        Cell(0, ord("p"), "p", "", 0, "source"),
        Cell(1, ord("q"), "q", "", 0, "source"),
        Cell(0, ord("a"), "a", "", 0, "prefix"),
        Cell(1, ord("b"), "b", "c", 0, "tokens"),
    ]


def test_the_preview_shows_what_an_objective_makes_of_a_row(shards: Shards, tokenizer: Tokenizer) -> None:
    def backwards(rows: RowBatch) -> Batch:
        tokens = torch.from_numpy(rows.text).flip(1)
        return Batch(inputs={"tokens": tokens}, targets={"labels": tokens}, counts={"tokens": 5})

    shown = preview(shards, tokenizer, 5, 0, "train", backwards)
    end = tokenizer.piece(tokenizer.end)
    assert [cell.piece for cell in shown] == [cell.label for cell in shown] == ["c", end, "b", "a", end]


def test_a_row_that_does_not_exist_is_told_in_a_sentence(shards: Shards, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"the train text has no row 3 at a context of 5; it has rows 0 to 2"):
        preview(shards, tokenizer, 5, 3, "train")
    with pytest.raises(DataError, match=r"the valid text has no row 0 .*; it is empty"):
        preview(shards, tokenizer, 5, 0, "valid")
