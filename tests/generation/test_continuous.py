"""The running batch against the plain decoding loop: same tokens, whoever else joins and leaves meanwhile."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation import tiny
from trivium.errors import CheckpointError, RequestError
from trivium.fast.cache import KernelCache
from trivium.fast.choose import for_inference
from trivium.generation.choosing import Chooser, Kind
from trivium.generation.continuous import Engine
from trivium.generation.engine import Request, Token, stream
from trivium.generation.rows import Row
from trivium.generation.sampling import Sampling, Uniforms, distribution, draw
from trivium.generation.sizes import bucket
from trivium.generation.slots import Bank
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.cache import Cache, LayerCache, SlotMask, Slots
from trivium.parts.masks import ScoreMask
from trivium.parts.options.attention import MultiHeadOptions, Shape
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.positions import (
    AlibiOptions,
    BothOptions,
    BucketOptions,
    LearnedOptions,
    Position,
    RotaryOptions,
    ShawOptions,
)
from trivium.parts.site import Site

VOCAB, CONTEXT, END = 61, 24, 7
GREEDY = Sampling(temperature=0)
SAMPLINGS = (
    GREEDY,
    Sampling(),
    Sampling(temperature=1.3, top_k=12),
    Sampling(top_p=0.8, min_p=0.01),
    Sampling(temperature=0.7, top_k=30, top_p=0.9, repetition_penalty=1.4),
    Sampling(temperature=0, repetition_penalty=1.7),
)


def small(position: Position, *, groups: int = 0, window: int = 0) -> Transformer:
    attention = MultiHeadOptions(heads=4, groups=groups, bias="all", window=window)
    block = Block(attention=attention, position=position, dropout=0.3)
    config = ModelConfig(
        width=32,
        context=CONTEXT,
        vocab=VOCAB,
        embedding=TokenEmbeddingOptions(tie="none"),
        decoder=Stack(layers=2, block=block),
    )
    model = build(config, seed=1)
    with torch.no_grad():  # a fresh model says little
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.double()  # exact enough that two ways of adding up never choose differently


MODELS = {
    "learned": small(LearnedOptions()),
    "rotary": small(RotaryOptions()),
    "grouped": small(RotaryOptions(), groups=2),
    "multi-query": small(LearnedOptions(), groups=1),
    "window": small(RotaryOptions(), window=5),
    "alibi": small(AlibiOptions()),
    "t5": small(BucketOptions()),
    "shaw": small(ShawOptions(distance=4)),
    "both": small(BothOptions(relative=BucketOptions())),
}


def alone(model: Transformer, request: Request) -> list[Token]:
    return [*stream(model, [request], end=END)]


def comparable(tokens: list[Token]) -> list[tuple[int, str]]:
    return [(token.id, token.reason) for token in tokens]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    ids = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT - 1))
    return Request(
        ids=tuple(ids),
        tokens=draw(st.integers(1, 30)),
        sampling=draw(st.sampled_from(SAMPLINGS)),
        seed=draw(st.integers(0, 3)),
        sample=draw(st.integers(0, 2)),
        stop_ids=frozenset(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))),
    )


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_rows_that_join_and_leave_at_random_have_the_tokens_they_would_have_alone(
    name: str, data: st.DataObject
) -> None:
    model = MODELS[name]
    engine = Engine(
        model, end=END, slots=data.draw(st.integers(1, 4), "slots"), burst=data.draw(st.integers(1, 5), "burst")
    )
    submitted: list[Request] = []
    cancelled: set[int] = set()
    found: dict[int, list[Token]] = {}
    arrivals = data.draw(st.lists(st.lists(requests(), max_size=3), min_size=1, max_size=4), "arrivals")
    while arrivals or engine.busy:
        for request in arrivals.pop(0) if arrivals else []:
            assert engine.submit(request) == len(submitted)
            submitted.append(request)
        if submitted and data.draw(st.integers(0, 9), "cancel") == 0:
            cancelled.add(data.draw(st.integers(0, len(submitted) - 1), "who"))
            engine.cancel(max(cancelled))
        for token in engine.step():
            found.setdefault(token.row, []).append(token)
    for row, request in enumerate(submitted):
        expected, tokens = comparable(alone(model, request)), comparable(found.get(row, []))
        assert tokens == expected or (row in cancelled and tokens == expected[: len(tokens)])


def test_a_source_is_read_once_and_stays_with_its_row() -> None:
    model = tiny.model("t5-small", VOCAB).double()
    wishes = [
        Request(ids=(0,), tokens=9, sampling=SAMPLINGS[row % 3], seed=row, source=tiny.draw(row, 3 + 4 * row, VOCAB))
        for row in range(5)
    ]
    engine = Engine(model, end=END, slots=2, source=32)
    for wish in wishes:
        engine.submit(wish)
    found: dict[int, list[Token]] = {}
    while engine.busy:
        for token in engine.step():
            found.setdefault(token.row, []).append(token)
    assert [comparable(found[row]) for row in range(5)] == [comparable(alone(model, wish)) for wish in wishes]


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_scores_of_every_row_are_those_of_the_whole_text_read_at_once(name: str, loaded: bool) -> None:
    model = MODELS[name].eval()
    read = copy.deepcopy(model)
    if loaded:
        for_inference(read)
    bank = Bank(read, 4, CONTEXT, 0)
    assert all(isinstance(layer, KernelCache) == loaded for layer in bank.cache.layers)
    rows = [
        Row(row, Request(ids=tiny.draw(row, length, VOCAB), tokens=9, sampling=GREEDY, seed=0))
        for row, length in enumerate((3, 11, 6))
    ]
    bank.join([2, 0, 3], rows)
    texts = [list(row.ids) for row in rows]
    for _ in range(6):
        for slot, text in zip([2, 0, 3], texts, strict=True):
            text.append(int(bank.last_B[slot]))
        logits = bank.forward()
        for slot, text in zip([2, 0, 3], texts, strict=True):
            expected = model.head.logits(model(torch.tensor([text])).hidden)[0, -1]
            torch.testing.assert_close(logits[slot], expected, rtol=1e-9, atol=1e-9)
        bank.finish(logits, Kind(False, False, False))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), samplings=st.lists(st.sampled_from(SAMPLINGS), min_size=1, max_size=5))
def test_choosing_by_row_is_choosing_one_by_one(seed: int, samplings: list[Sampling]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(samplings), VOCAB, generator=generator).mul(3).round(decimals=1)  # with ties
    chooser = Chooser(len(samplings), VOCAB, 8, torch.device("cpu"))
    chooser.shut(VOCAB - 1, [3])
    rows = [
        Row(row, Request(ids=tiny.draw(row, 5, VOCAB), tokens=4, sampling=sampling, seed=row))
        for row, sampling in enumerate(samplings)
    ]
    chooser.bring(range(len(rows)), rows)
    chooser.settle(torch.arange(len(rows)), torch.tensor(chooser.settings(rows)))
    uniforms = [Uniforms(row, 0) for row in range(len(rows))]
    seen = torch.zeros(len(rows), VOCAB, dtype=torch.bool)
    for row in rows:
        seen[row.index, torch.tensor(row.ids)] = True
    allowed = logits.clone()
    allowed[:, [3, VOCAB - 1]] = -math.inf
    for _ in range(3):
        ids = chooser.choose(logits, Kind.of(samplings))
        for at, sampling in enumerate(samplings):
            probabilities = distribution(allowed[at : at + 1], seen[at : at + 1], sampling)
            if sampling.greedy:
                assert ids[at] == probabilities.argmax()
            else:
                assert ids[at] == draw(probabilities, torch.tensor([uniforms[at].next()], dtype=torch.float64))
            seen[at, ids[at]] = True


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    new=st.integers(1, 3),
    groups=st.sampled_from((1, 2, 4)),
    window=st.sampled_from((0, 3)),
)
def test_attention_over_slots_is_a_softmax_over_what_each_row_holds(
    lengths: list[int], new: int, groups: int, window: int
) -> None:
    """Against the formula, one row and one query at a time."""
    generator = torch.Generator().manual_seed(len(lengths) * 100 + new)
    slots = Slots(len(lengths), 16, torch.device("cpu"))
    slots.lengths_B.copy_(torch.tensor(lengths))
    query = torch.randn(len(lengths), 4, new, 8, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, len(lengths), groups, 16, 8, generator=generator, dtype=torch.float64)
    mask = ScoreMask(SlotMask(slots=slots).within(window), new, 16, query.device)
    part = MultiHeadAttention(MultiHeadOptions(heads=4, groups=groups), Site(width=32, context=16))
    part.scale = 0.3
    found = part.sdpa(query, keys, values, mask)
    for row, length in enumerate(lengths):
        for head in range(4):
            for at in range(new):
                seen = slice(max(0, length + at + 1 - window) if window else 0, length + at + 1)
                own = head * groups // 4
                weights = (keys[row, own, seen] @ query[row, head, at] * 0.3).softmax(0)
                torch.testing.assert_close(found[row, head, at], weights @ values[row, own, seen])


def test_new_tokens_are_written_behind_each_rows_own_length() -> None:
    slots = Slots(2, 5, torch.device("cpu"))
    slots.lengths_B.copy_(torch.tensor([1, 3]))
    layer = LayerCache(2, 5, Shape(1, 2, 2), torch.device("cpu"), torch.float32, slots)
    cache = Cache([layer], 2, 5, torch.device("cpu"), slots)
    assert cache.place(torch.zeros(2, 2)).tolist() == [[0, 1, 2, 3, 4]]
    layer.append(torch.ones(2, 1, 2, 2), torch.full((2, 1, 2, 2), 2.0), 0)
    assert layer.keys[:, 0, :, 0].tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 1, 1]]
    assert layer.values[:, 0, :, 1].tolist() == [[0, 2, 2, 0, 0], [0, 0, 0, 2, 2]]


def test_banned_and_missing_ids_are_never_written() -> None:
    engine = Engine(MODELS["learned"], end=None, vocab=40, banned=range(30))
    for row in range(6):
        engine.submit(Request(ids=(1, 2), tokens=8, sampling=SAMPLINGS[row % 3], seed=row))
    ids = {token.id for token in drained(engine)}
    assert ids <= set(range(30, 40))


def drained(engine: Engine) -> Iterator[Token]:
    while engine.busy:
        yield from engine.step()


def test_damaged_weights_are_told_in_a_sentence() -> None:
    model = small(LearnedOptions())
    with torch.no_grad():
        next(iter(model.parameters())).fill_(math.nan)
    engine = Engine(model, end=None)
    engine.submit(Request(ids=(1,), tokens=3, sampling=GREEDY, seed=0))
    with pytest.raises(CheckpointError, match="not finite"):
        list(drained(engine))


def test_what_a_row_cannot_hold_is_refused_when_it_is_submitted() -> None:
    engine = Engine(MODELS["learned"], end=None, longest=9)
    wish = Request(ids=(1,) * 9, tokens=3, sampling=GREEDY, seed=0)
    with pytest.raises(RequestError, match="a row holds 9"):
        engine.submit(wish)
    with pytest.raises(RequestError, match="logprobs"):
        engine.submit(replace(wish, ids=(1,), logprobs=2))
    with pytest.raises(RequestError, match="outside the model's vocabulary"):
        engine.submit(replace(wish, ids=(VOCAB,)))
    assert not engine.busy


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_a_bucket_is_the_next_power_of_two(size: int, expected: int) -> None:
    assert bucket(size) == expected


def test_the_settings_of_rows_do_not_follow_the_default_precision() -> None:
    wish = Request(ids=(1, 2, 3), tokens=4, sampling=GREEDY, seed=0)
    expected = comparable(alone(MODELS["rotary"], wish))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        MODELS["rotary"].__dict__.pop("banks", None)
        engine = Engine(MODELS["rotary"], end=END, slots=1)
        engine.submit(wish)
        found = [token for _ in range(9) if engine.busy for token in engine.step()]
    finally:
        torch.set_default_dtype(before)
        MODELS["rotary"].__dict__.pop("banks", None)
    assert comparable(found) == expected
