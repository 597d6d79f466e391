from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.data.packing import Rows
from trivium.data.shards import Stream

END = 9


def stream(documents: list[list[int]]) -> Stream:
    ids: list[int] = []
    starts: list[int] = []
    for document in documents:
        starts.append(len(ids))
        ids += [END, *document]
    ids += [END] * bool(documents)
    return Stream(ids=np.array(ids, np.uint16), starts=np.array(starts, np.int64), text_bytes=0)


DOCUMENTS = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=7), min_size=1, max_size=9)


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.integers(1, 12))
def test_every_token_after_the_first_is_a_label_exactly_once(documents: list[list[int]], context: int) -> None:
    whole = stream(documents)
    rows = Rows(whole, context)
    batch = rows.take(np.arange(len(rows)))
    assert batch.ids.shape == (len(rows), context + 1)
    assert batch.labels.shape == batch.documents.shape == (len(rows), context)
    assert [array.dtype.name for array in batch[:4]] == ["int64", "int64", "int32", "int64"]
    assert batch.numbers.tolist() == list(range(len(rows)))
    assert batch.stream is whole
    labels = batch.labels.ravel()
    assert labels[labels != -100].tolist() == whole.ids[1:].tolist()
    inputs = batch.ids[:, :-1].ravel()
    assert inputs[labels != -100].tolist() == whole.ids[:-1].tolist()
    assert set(inputs[labels == -100].tolist()) <= {END}
    assert (labels == -100).sum() < context


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS, st.integers(1, 12))
def test_the_texts_of_all_rows_are_the_stream_without_its_closing_end(documents: list[list[int]], length: int) -> None:
    whole = stream(documents)
    rows = Rows(whole, length)
    batch = rows.take(np.arange(len(rows)))
    assert batch.text.shape == (len(rows), length)
    texts = [text[:real] for text, real in zip(batch.text.tolist(), batch.lengths.tolist(), strict=True)]
    assert [id for text in texts for id in text] == whole.ids[:-1].tolist()
    assert all(len(text) == length for text in texts[:-1])


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.integers(1, 12), st.randoms(use_true_random=False))
def test_rows_are_what_a_plain_loop_gives(documents: list[list[int]], context: int, rng: Random) -> None:
    flat = [(END if at == 0 else document[at - 1], number) for number, document in enumerate(documents)
            for at in range(len(document) + 1)]  # fmt: skip
    rows = Rows(stream(documents), context)
    numbers = [rng.randrange(len(rows)) for _ in range(5)]
    batch = rows.take(np.array(numbers))
    for place, number in enumerate(numbers):
        part = flat[number * context : (number + 1) * context]
        padding = context - len(part)
        after = [id for id, _ in flat[number * context + 1 : (number + 1) * context + 1]]
        after += [END] * (len(part) - len(after))
        assert batch.ids[place].tolist() == [id for id, _ in part] + [after[-1]] * (not padding) + [END] * (
            padding + (padding > 0)
        )
        assert batch.labels[place].tolist() == after + [-100] * padding
        seen = list(dict.fromkeys(document for _, document in part))
        assert batch.documents[place].tolist() == [seen.index(document) + 1 for _, document in part] + [0] * padding


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.integers(1, 12), st.data())
def test_every_shift_gives_every_token_as_a_label_exactly_once(
    documents: list[list[int]], context: int, data: st.DataObject
) -> None:
    """The oracle is the stream written twice in a row, from which rows are cut from the shift on."""
    whole = stream(documents)
    labels = len(whole) - 1
    shift = data.draw(st.integers(0, context - 1))
    rows = Rows(whole, context, shifts=context)
    assert len(rows) == len(Rows(whole, context))
    batch = rows.take(shift * len(rows) + np.arange(len(rows)))
    twice = [*whole.ids[:-1].tolist(), *whole.ids.tolist(), *whole.ids[1:].tolist() * context]
    start = shift % labels
    found = batch.labels.ravel()
    assert found[found != -100].tolist() == twice[start + 1 : start + 1 + labels]
    assert batch.text.ravel()[found != -100].tolist() == twice[start : start + labels]
    assert np.array_equal(np.where(found == -100, -100, batch.ids[:, 1:].ravel()), found)
    assert batch.begins.tolist() == [(start + row * context) % labels for row in range(len(rows))]
    assert (found == -100).sum() < context
    if shift == 0:
        plain = Rows(whole, context).take(np.arange(len(rows)))
        for name in ("ids", "labels", "documents", "numbers"):
            assert getattr(batch, name).tolist() == getattr(plain, name).tolist()


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.integers(1, 12), st.data())
def test_documents_of_a_shifted_row_are_told_apart_at_every_beginning(
    documents: list[list[int]], context: int, data: st.DataObject
) -> None:
    whole = stream(documents)
    rows = Rows(whole, context, shifts=context)
    shift = data.draw(st.integers(0, context - 1))
    batch = rows.take(shift * len(rows) + np.arange(len(rows)))
    for row in range(len(rows)):
        number, real = 1, int(batch.lengths[row])
        for at, id in enumerate(batch.text[row, :real].tolist()):
            number += at > 0 and id == END  # a beginning, also the one at which the ring closes
            assert batch.documents[row, at] == number
        assert not batch.documents[row, real:].any()


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS, DOCUMENTS, st.integers(1, 12), st.data())
def test_a_ring_is_cut_as_if_it_were_alone(
    one: list[list[int]], two: list[list[int]], context: int, data: st.DataObject
) -> None:
    border = len(stream(one)) - 1
    rows = Rows(stream([*one, *two]), context, shifts=context, rings=(0, border))
    alone = [Rows(stream(documents), context, shifts=context) for documents in (one, two)]
    assert [rows.first(0), rows.first(border), len(rows)] == [0, len(alone[0]), len(alone[0]) + len(alone[1])]
    shift = data.draw(st.integers(0, context - 1))
    batch = rows.take(shift * len(rows) + np.arange(len(rows)))
    parts = [part.take(shift * len(part) + np.arange(len(part))) for part in alone]
    for name in ("ids", "labels", "documents"):
        assert getattr(batch, name).tolist() == [row for part in parts for row in getattr(part, name).tolist()]
    assert batch.begins.tolist() == [*parts[0].begins.tolist(), *(border + parts[1].begins).tolist()]


def test_a_row_behind_the_last_shift_is_an_error() -> None:
    rows = Rows(stream([[1, 2, 3], [4, 5, 6, 7]]), 3, shifts=3)
    rows.take(np.array([8]))
    with pytest.raises(IndexError, match="0 to 8"):
        rows.take(np.array([9]))


def test_a_stream_that_fills_its_rows_exactly_needs_no_padding() -> None:
    rows = Rows(stream([[1, 2, 3], [4, 5, 6, 7]]), 3)  # 10 tokens, 9 labels
    assert len(rows) == 3
    assert -100 not in rows.take(np.arange(3)).labels


def test_an_empty_stream_has_no_rows() -> None:
    rows = Rows(stream([]), 4)
    assert len(rows) == 0
    assert rows.take(np.arange(0)).ids.shape == (0, 5)


@pytest.mark.parametrize("number", [-1, 3])
def test_a_row_that_does_not_exist_is_an_error(number: int) -> None:
    with pytest.raises(IndexError, match="0 to 2"):
        Rows(stream([[1, 2, 3], [4, 5, 6, 7]]), 3).take(np.array([number]))
