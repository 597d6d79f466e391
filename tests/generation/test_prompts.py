"""Prompts that are read by fused kernels and captured graphs, with stand-ins for both that run on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.generation import tiny
from tests.generation.test_continuous import CONTEXT, END, GREEDY, MODELS, SAMPLINGS, VOCAB, alone, comparable, small
from trivium.generation import prompts
from trivium.generation.continuous import Engine
from trivium.generation.engine import Request
from trivium.generation.prompts import Joining, Size, tell
from trivium.generation.rows import Row
from trivium.generation.scorer import evaluating
from trivium.generation.slots import Bank
from trivium.models.transformer import Transformer
from trivium.parts.cache import Cache, LayerCache
from trivium.parts.options.positions import LearnedOptions
from trivium.parts.output import SoftmaxOutput


class Reads:
    """Stands for the fused kernels: prompts by the model itself, and their padding is poison in the slots."""

    def __init__(self, bank: Bank) -> None:
        self.cache, self.bank, self.calls = bank.cache, bank, 0

    def reads(self, tokens: int) -> bool:
        return True

    def refresh(self) -> None:
        pass

    copies: tuple[Tensor, ...] = ()

    def read(self, ids_nt: Tensor, ends_n: Tensor, slots_n: Tensor) -> Tensor:
        self.calls += 1
        model, (rows, tokens) = self.bank.model, ids_nt.shape
        cache = model.cache(rows, tokens)
        was = model.training
        hidden = model.eval()(ids_nt, cache=cache).hidden.flatten(0, 1)
        model.train(was)
        for row, end in enumerate((ends_n % tokens).tolist()):
            for layer, read in zip(self.cache.layers, cache.layers, strict=True):
                layer, read = cast(LayerCache, layer), cast(LayerCache, read)
                for kept, new in ((layer.keys, read.keys), (layer.values, read.values)):
                    new[row, :, end + 1 :] = 1e3 if ends_n[row] // tokens == row else new[0, :, end + 1 :]
                    kept[slots_n[row], :, :tokens] = new[row]
        return model.head.logits(hidden[ends_n])

    def forward(self) -> Tensor:
        return self.bank.forward()


class Graph:
    """Stands for a captured graph: the work once more, its result where the first was."""

    def __init__(self, work: Callable[[], Tensor], result: Tensor) -> None:
        self.work, self.result, self.replays = work, result, 0

    def replay(self) -> None:
        self.replays += 1
        self.result.copy_(self.work())


class Records:
    """Stands for the recorder."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong, self.graphs, self.bytes = wrong, cast("list[Graph]", []), 0

    def record(self, work: Callable[[], Tensor], *, warm: int, restore: Callable[[], None]) -> tuple[Graph, Tensor]:
        for _ in range(warm):
            work()
            restore()
        if self.wrong == "fails":
            work()  # as far as it came
            raise torch.OutOfMemoryError("no memory")
        result = work()
        restore()
        self.graphs.append(Graph(work, result))
        if self.wrong == "differs":
            self.graphs[-1].work = lambda: work() + 9
        return self.graphs[-1], result


def armed(bank: Bank, wrong: str = "") -> Any:
    """The bank with stand-ins, as on a GPU."""
    held = cast(Any, bank)
    held._fused, held._recorder, held._read.on = Reads(bank), Records(wrong), True
    return held


def row(index: int, length: int, sampling: int = 0) -> Row:
    ids = tuple((7 * index + 3 * at + at * at) % VOCAB for at in range(length))
    return Row(index, Request(ids=ids, tokens=6, sampling=SAMPLINGS[sampling], seed=index))


def state(bank: Bank) -> list[Tensor]:
    chooser = bank.chooser
    found = [bank.last_B, bank.slots.lengths_B, bank.active_B, bank.ring_RB, bank.count_B]
    return [*found, chooser.drawn_B, chooser.seen_BV, chooser.settings_B5]


def same(bank: Bank, plain: Bank) -> bool:
    return all(map(torch.equal, state(bank), state(plain)))


JOINS = st.lists(  # the lengths of prompts that join together, and how their rows choose
    st.lists(st.tuples(st.integers(1, CONTEXT - 8), st.integers(0, len(SAMPLINGS) - 1)), min_size=1, max_size=3),
    min_size=1,
    max_size=6,
)


@settings(max_examples=15, deadline=None)
@given(joins=JOINS, name=st.sampled_from(("learned", "rotary", "grouped")))
@torch.no_grad()
def test_rows_that_join_by_graphs_go_on_as_those_that_join_plainly(
    joins: list[list[tuple[int, int]]], name: str
) -> None:
    bank, plain = Bank(MODELS[name], 4, CONTEXT, 0), Bank(MODELS[name], 4, CONTEXT, 0)
    armed(bank)
    for number, join in enumerate(joins * 3):  # at once, captured, replayed
        slots = [(number + at) % 4 for at in range(len(join))]
        for one in (bank, plain):
            one.join(slots, [row(number + at, *wish) for at, wish in enumerate(join)])
        assert same(bank, plain)
        with evaluating(MODELS[name]):
            logits = [one.forward()[slots] for one in (bank, plain)]
        torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-9)  # what is behind a prompt is never seen
        assert bank.written == plain.written == bank.count_B[0] == number + 1


@settings(max_examples=10, deadline=None)
@given(
    wishes=st.lists(st.tuples(st.integers(1, CONTEXT - 2), st.integers(0, len(SAMPLINGS) - 1)), min_size=1, max_size=9),
    slots=st.integers(1, 4),
)
def test_a_running_batch_that_reads_by_graphs_writes_what_each_row_writes_alone(
    wishes: list[tuple[int, int]], slots: int
) -> None:
    model = MODELS["rotary"]
    with pytest.MonkeyPatch.context() as patch:
        begin = Bank.__init__

        def init(bank: Bank, *args: Any) -> None:
            begin(bank, *args)
            armed(bank)

        patch.setattr(Bank, "__init__", init)
        model.__dict__.pop("banks", None)
        rows = [row(index, *wish) for index, wish in enumerate(wishes)]
        for _ in range(3):
            engine = Engine(model, end=END, slots=slots)
            found: dict[int, list[Any]] = {engine.submit(one.request): [] for one in rows}
            while engine.busy:
                for token in engine.step():
                    found[token.row].append(token)
            assert [comparable(one) for one in found.values()] == [comparable(alone(model, r.request)) for r in rows]
        model.__dict__.pop("banks", None)


@torch.no_grad()
def test_a_size_is_captured_when_it_comes_again_and_replayed_from_then_on() -> None:
    held = armed(Bank(MODELS["learned"], 2, CONTEXT, 0))
    calls, graphs = [], []
    for length in (3, 4, 5, 20, 6, 20):
        held.join([0], [row(0, length)])
        calls.append(held._fused.calls)
        graphs.append(len(held._recorder.graphs))
    assert graphs == [0, 1, 1, 1, 1, 2]  # up to 16 tokens are one size, up to 24 another
    # the first is read once; capturing is a comparison, a warm-up, a recording, a check and the replay
    assert calls == [1, 6, 7, 8, 9, 14]


@torch.no_grad()
def test_a_prompt_that_is_captured_leaves_one_trace_only() -> None:
    bank, plain = Bank(MODELS["learned"], 2, CONTEXT, 0), Bank(MODELS["learned"], 2, CONTEXT, 0)
    armed(bank)
    for sampling in range(len(SAMPLINGS)):
        for _ in range(2):
            for one in (bank, plain):
                one.join([1], [row(5, 9, sampling)])
            assert same(bank, plain)


def test_scratch_of_products_is_not_held_twice_while_a_prompt_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: told.append("cleared"), raising=False)

    class Noted(Records):
        def record(self, *args: Any, **options: Any) -> tuple[Graph, Tensor]:
            told.append("recorded")
            return super().record(*args, **options)

    def work() -> Tensor:
        told.append("worked")
        return torch.ones(2)

    captures = prompts.Captures(on=True)
    captures.capture("size", torch.zeros(1), work, cast(Any, Noted()), lambda: None)
    assert told[told.index("worked") + 1 :][:2] == ["cleared", "recorded"]
    assert captures.replay("size", torch.zeros(1))


@pytest.mark.parametrize("wrong", ["fails", "differs"])
@torch.no_grad()
def test_prompts_that_cannot_be_captured_are_read_without_graphs(wrong: str) -> None:
    bank, plain = Bank(MODELS["learned"], 2, CONTEXT, 0), Bank(MODELS["learned"], 2, CONTEXT, 0)
    held = armed(bank, wrong)
    calls = []
    for time in range(4):
        for one in (bank, plain):
            if one is bank and time == 1:
                with pytest.warns(UserWarning, match="without graphs: .*(no memory|results differ)"):
                    one.join([1], [row(time, 9, 4)])
            else:
                one.join([1], [row(time, 9, 4)])
        calls.append(held._fused.calls)
        assert same(bank, plain)
    assert not held._read.kept
    assert calls[3] == calls[2] + 1 == calls[1] + 2  # still by the kernels
    assert held._reads


@torch.no_grad()
def test_only_so_many_sizes_stay_captured_and_only_a_much_rarer_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_SIZES", 2)
    held = armed(Bank(MODELS["learned"], 4, CONTEXT, 0))

    def come(*counts: int) -> list[int]:
        for count in counts:
            held.join(range(count), [row(at, 3) for at in range(count)])
        return [size.rows for size, _ in held._read._graphs]

    assert come(1, 2, 1, 2, 1, 1) == [1, 2]
    assert come(4, 1, 2, 4, 1, 2, 4, 1, 2) == [1, 2]  # three in turn: the third is read without a graph
    many = len(held._recorder.graphs)
    assert come(*[4] * 20) == [1, 4]
    assert len(held._recorder.graphs) == many + 1
    replays = [graph.replays for graph in held._recorder.graphs]
    come(1)
    assert [graph.replays for graph in held._recorder.graphs] == [replays[0] + 1, *replays[1:]]


@torch.no_grad()
def test_many_tokens_are_read_as_they_are_and_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivium.generation.slots._CAPTURED", 40)
    held = armed(Bank(MODELS["learned"], 4, CONTEXT, 0))
    shapes, read = [], held._fused.read

    def noted(ids: Tensor, *rest: Tensor) -> Tensor:
        shapes.append(tuple(ids.shape))
        return cast(Tensor, read(ids, *rest))

    held._fused.read = noted
    for _ in range(3):
        held.join([0, 1, 2], [row(at, 15) for at in range(3)])
    assert shapes == [(3, 15)] * 3
    assert not held._read.kept


@given(rows=st.integers(1, 70), tokens=st.integers(1, 3000), longest=st.integers(1, 3000))
@settings(max_examples=200, deadline=None)
def test_sizes_are_few_and_waste_little(rows: int, tokens: int, longest: int) -> None:
    tokens = min(tokens, longest)
    size = Size(rows, tokens).rounded(longest)
    assert rows <= size.rows < 2 * rows
    assert tokens <= size.tokens <= longest
    assert size.tokens - tokens < max(64, tokens / 4)
    assert size.rounded(longest) == size


def test_all_sizes_up_to_a_context_are_some_dozen() -> None:
    assert len({Size(1, tokens).rounded(4096) for tokens in range(1, 4097)}) < 30


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), more=st.integers(0, 3), longer=st.integers(0, 4))
def test_the_device_is_told_each_row_once_and_the_first_as_often_as_needed(
    lengths: list[int], more: int, longer: int
) -> None:
    rows = [row(index, length, index) for index, length in enumerate(lengths)]
    slots = [10 + index for index in range(len(rows))]
    chosen = [[0.5 + index, 2.0**-24, 1e30, float("-inf"), index] for index in range(len(rows))]
    size = Size(len(rows) + more, max(lengths) + longer)
    given = Joining.of(tell(slots, rows, chosen, size), size)
    for at in range(size.rows):
        real = at if at < len(rows) else 0
        end = int(given.ends_n[at])
        assert given.ids_nt[at, : lengths[real]].tolist() == rows[real].ids
        assert not given.ids_nt[at, lengths[real] :].any()
        assert divmod(end, size.tokens) == (real, lengths[real] - 1)
        assert given.slots_n[at] == slots[real]
        assert given.lengths_n[at] == lengths[real]
        assert torch.equal(given.settings_n5[at], torch.tensor(chosen[real]))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), more=st.integers(0, 7), tokens=st.integers(1, 9), most=st.integers(1, 40))
def test_parts_have_every_row_once_and_no_more_tokens_than_they_may(
    rows: int, more: int, tokens: int, most: int
) -> None:
    here = [row(index, 1 + index % tokens) for index in range(rows)]
    size = Size(rows + more, tokens)
    whole = Joining.of(tell(range(rows), here, [[0.0] * 5] * rows, size), size)
    parts = whole.parts(most)
    for ids_nt, ends_n, slots_n in parts:
        assert ids_nt.numel() <= most or len(ids_nt) == 1
        for at, (ids, end, slot) in enumerate(zip(ids_nt, ends_n.tolist(), slots_n.tolist(), strict=True)):
            assert end // tokens == (at if len(parts) > 1 or slot == at else 0)
            assert ids[: end % tokens + 1].tolist() == here[slot].ids
    assert [slot for _, _, slots in parts for slot in slots.tolist()] == [*range(rows), *[0] * more]
    # each reading of a row has scores of its own here: all places of a row get those of the first
    scores = torch.arange(rows + more, dtype=torch.float32)[:, None]
    gathered = whole.gathered(torch.split(scores, [len(ids) for ids, _, _ in parts]))
    first = [0] * more if len(parts) > 1 else list(range(rows, rows + more))
    assert gathered[:, 0].tolist() == [*range(rows), *first]


@pytest.mark.parametrize(
    ("name", "fast"),
    [("learned", False), ("learned", True), ("grouped", True), ("alibi", False), ("t5-small", False)],
)
@torch.no_grad()
def test_prompts_that_are_read_in_parts_are_read_as_they_are_together(
    name: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = name == "t5-small"
    model = tiny.model(name, VOCAB).double() if two else MODELS[name].eval()
    parted, whole = (Bank(model, 8, CONTEXT, 32 if two else 0) for _ in range(2))
    widths: list[int] = []
    cache = Transformer.cache

    def noted(one: Transformer, rows: int, longest: int) -> Cache:
        widths.append(rows * longest)
        return cache(one, rows, longest)

    monkeypatch.setattr(Transformer, "cache", noted)
    for number in range(3):  # at once, captured, replayed
        for bank, most in ((parted, 30), (whole, 4096)):
            if fast and not number:
                armed(bank)
            monkeypatch.setattr("trivium.generation.slots._PART", most)
            monkeypatch.setattr("trivium.generation.slots._LARGE", most)
            widths.clear()
            rows = [row(at + number, 1 + 3 * at, at % len(SAMPLINGS)) for at in range(6)]
            for at, one in enumerate(rows if two else ()):
                one.request = replace(one.request, source=tiny.draw(at, 4 + 5 * at, VOCAB))
            bank.join([5, 0, 3, 1, 7, 2], rows)
            assert (len(widths) > 1 and max(widths) <= 30) == (bank is parted)
        assert same(parted, whole)
    torch.testing.assert_close(parted.forward(), whole.forward(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fast", [False, True])
def test_dropout_is_off_while_prompts_are_read_and_on_again_afterwards(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Transformer = small(LearnedOptions()).train()
    cast(SoftmaxOutput, model.output).dropout = 0.5
    wish = Request(ids=(1, 2, 3), tokens=4, sampling=GREEDY, seed=0)
    begin = Bank.__init__

    def init(bank: Bank, *args: Any) -> None:
        begin(bank, *args)
        if fast:
            armed(bank)

    monkeypatch.setattr(Bank, "__init__", init)
    for _ in range(3):
        drawn = torch.get_rng_state()
        engine = Engine(model, end=END, slots=1)
        engine.submit(wish)
        found = [token for _ in range(9) if engine.busy for token in engine.step()]
        assert all(module.training for module in model.modules())
        assert torch.equal(torch.get_rng_state(), drawn)
        assert comparable(found) == comparable(alone(model, wish))
