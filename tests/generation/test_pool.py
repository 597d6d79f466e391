"""Beam search on the device: its steps against the lists it once kept on the host, its pool of rows against itself."""

# R rows, V vocabulary

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import CASES, Case
from tests.generation import tiny
from tests.generation.host_beam import host_search
from tests.oracle.copying import enliven
from trivium.errors import CheckpointError
from trivium.fast.graphs import Graphs
from trivium.generation import beam as searching
from trivium.generation import pool as pooling
from trivium.generation.beam import Beam, Found, Search, limit, poolable, results, search
from trivium.generation.beams import pools_of, room_for, together
from trivium.generation.frontier import CHUNK, rules, top
from trivium.generation.pool import Pool, Wish
from trivium.generation.scorer import Prompt, Scorer, evaluating
from trivium.generation.translation import search_texts
from trivium.models.transformer import Transformer, build
from trivium.parts.options.output import NoOutputOptions, SoftmaxOptions

VOCAB, BANNED = 300, 293
LIMIT = VOCAB - 2  # ids from there on are never written
NAMES = ("t5-mini", "transformer-base", "gpt-mini")
MODELS = {name: tiny.model(name, VOCAB, context=48, spread=0.5) for name in NAMES}
PAIRS = ("t5-mini", "transformer-base")


def wishes(family: str, seed: int, count: int) -> list[Search]:
    rng = random.Random(seed)
    drawn = [tiny.draw(seed * 100 + row, rng.randint(1, 18), 290) for row in range(count)]
    prompts = [Prompt(ids=ids) if family == "decoder" else Prompt(ids=(0,), source=ids) for ids in drawn]
    return [Search(prompt=prompt, tokens=rng.randint(1, 40)) for prompt in prompts]


def near(found: Sequence[Found], expected: Sequence[Found]) -> None:
    assert [item.ids for item in found] == [item.ids for item in expected]
    assert [item.reason for item in found] == [item.reason for item in expected]
    for name in ("logprob", "score"):
        ours = [getattr(item, name) for item in found]
        assert ours == pytest.approx([getattr(item, name) for item in expected], rel=1e-5, abs=1e-4)


def pooled(
    models: Sequence[Transformer],
    asked: Sequence[Search],
    beam: Beam,
    ends: frozenset[int],
    rows: int,
) -> list[list[Found]]:
    """The way of a GPU, on the CPU: twice, as rows are used again."""
    scorer = Scorer(*models)
    wanted = [Wish(item.prompt.source, 0, limit(item, scorer.context)) for item in asked]
    with torch.inference_mode():
        room = replace(room_for(scorer, wanted, beam.beams, beam.n), rows=rows)
        penalties = beam.penalties(room.steps)
        given = rules(beam.beams, LIMIT, (BANNED,), ends, penalties, scorer.device)
        pool = Pool(scorer, given, room)
        for _ in range(2):
            found: dict[int, list[Found]] = {}
            for texts, state in together(pool, wanted):
                best = results(state, [asked[text] for text in texts], beam)
                assert found.keys().isdisjoint(texts)
                found |= zip(texts, best, strict=True)
    return [found[text] for text in range(len(asked))]


@settings(max_examples=9, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 1000),
    beams=st.integers(1, 6),
    alpha=st.sampled_from([0.0, 0.6, 2.0]),
    many=st.sampled_from([0, 1, 3, 60]),
)
def test_a_search_on_the_device_finds_what_lists_on_the_host_find(
    name: str, seed: int, beams: int, alpha: float, many: int
) -> None:
    scorer = Scorer(MODELS[name])
    beam = Beam(beams=beams, alpha=alpha, n=1 + seed % beams)
    ends = frozenset(range(5, 5 + many))
    asked = wishes(scorer.family, seed, 5)
    found = search(scorer, asked, beam, end=None, stop_ids=ends, vocab=LIMIT, banned=(BANNED,))
    for item, ours in zip(asked, found, strict=True):
        near(ours, host_search(scorer, item, beam, ends=ends, vocab=LIMIT, banned=(BANNED,)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_certain_text_that_is_cut_off_comes_before_an_improbable_one_that_ends(name: str, alpha: float) -> None:
    """Every step writes 7 with probability 1 - e**-27 and ends with e**-27, whatever was read: a closed form."""
    model = build(replace(tiny.shrunk(name, VOCAB, context=48), output=SoftmaxOptions(bias=True))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        logits_V = model.get_parameter("output.project.bias")
        logits_V.fill_(-80.0)
        logits_V[7], logits_V[5] = 0.0, -27.0
    ends, beam = frozenset({5}), Beam(beams=3, n=3, alpha=alpha)
    asked = [replace(item, tokens=6) for item in wishes(Scorer(model).family, 1, 2)]
    ways = [search(model, asked, beam, end=None, stop_ids=ends, vocab=LIMIT, banned=(BANNED,))]
    ways += [pooled([model], asked, beam, ends, 8)] if name in PAIRS else []
    ways += [[host_search(Scorer(model), item, beam, ends=ends, vocab=LIMIT, banned=(BANNED,)) for item in asked]]
    ended = [(-27 / ((5 + length) / 6) ** alpha, length) for length in range(1, 7)]
    ended = sorted(ended, key=lambda one: (-one[0], one[1]))[:2]  # of equals the shorter
    for found in (one for way in ways for one in way):
        assert [(item.ids, item.reason) for item in found] == [
            ([7] * 6, "length"),
            *(([7] * (length - 1), "end") for _, length in ended),
        ]
        assert [item.logprob for item in found] == pytest.approx([0.0, -27.0, -27.0], abs=1e-4)
        assert [item.score for item in found] == pytest.approx([0.0, *(score for score, _ in ended)], abs=1e-4)


@settings(max_examples=7, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(PAIRS),
    seed=st.integers(0, 1000),
    beams=st.integers(1, 5),
    rows=st.sampled_from([1, 8, 32]),
    many=st.sampled_from([0, 1, 60]),
)
def test_texts_that_join_and_leave_rows_find_what_each_finds_alone(
    name: str, seed: int, beams: int, rows: int, many: int
) -> None:
    beam = Beam(beams=beams, n=1 + seed % beams)
    ends = frozenset(range(5, 5 + many))
    asked = wishes("encoder-decoder", seed, 11)
    for item, ours in zip(asked, pooled([MODELS[name]], asked, beam, ends, rows), strict=True):
        (alone,) = search(MODELS[name], [item], beam, end=None, stop_ids=ends, vocab=LIMIT, banned=(BANNED,))
        near(ours, alone)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", PAIRS)
def test_a_gpu_finds_what_the_cpu_finds(name: str) -> None:
    beam, ends, asked = Beam(beams=4, n=2), frozenset(range(5, 40)), wishes("encoder-decoder", 7, 40)
    alike = copy.deepcopy(MODELS[name]).to("cuda")
    for _ in range(3):  # at first without graphs, then capturing them, then replaying
        found = search(alike, asked, beam, end=None, stop_ids=ends, vocab=LIMIT, banned=(BANNED,))
        expected = search(MODELS[name], asked, beam, end=None, stop_ids=ends, vocab=LIMIT, banned=(BANNED,))
        for ours, theirs in zip(found, expected, strict=True):
            near(ours, theirs)


def test_models_vote_in_rows_as_they_do_alone() -> None:
    models = [MODELS["t5-mini"], tiny.model("t5-mini", VOCAB, context=48, spread=0.5, seed=2)]
    beam, ends, asked = Beam(beams=3, n=2), frozenset(range(30)), wishes("encoder-decoder", 3, 9)
    found = pooled(models, asked, beam, ends, 8)
    expected = search(Scorer(*models), asked, beam, end=None, stop_ids=ends, vocab=LIMIT, banned=(BANNED,))
    for ours, theirs in zip(found, expected, strict=True):
        near(ours, theirs)


WRITING = [case for case in CASES if case.causal and not isinstance(case.config.output, NoOutputOptions)]


@pytest.mark.parametrize("case", WRITING, ids=lambda case: case.name)
def test_beams_that_share_a_row_do_not_see_each_other_whatever_the_part(case: Case) -> None:
    """Positions, windows, norms, wirings: each beam must read as if it had a row of its own."""
    model = build(case.config).eval()
    enliven(model, seed=1, spread=0.4)
    vocab = model.config.vocab
    prompts = [
        Prompt(ids=tiny.draw(length, length, vocab))
        if case.config.family == "decoder"
        else Prompt(ids=(1,), source=tiny.draw(length, length, vocab))
        for length in (2, 5)
    ]
    asked, beam, ends = [Search(prompt=prompt, tokens=5) for prompt in prompts], Beam(beams=3, n=3), frozenset({3, 4})
    found = search(model, asked, beam, end=3, stop_ids=ends)
    for item, ours in zip(asked, found, strict=True):
        near(ours, host_search(Scorer(model), item, beam, ends=ends, vocab=vocab, banned=()))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    vocab=st.sampled_from([1, 5, CHUNK, 6 * CHUNK, 6 * CHUNK + 1, 9 * CHUNK - 1, 20 * CHUNK + 7]),
    count=st.integers(1, 9),
    levels=st.sampled_from([1, 2, 5, 1000]),
    seed=st.integers(0, 1000),
)
def test_the_best_ids_are_those_of_a_stable_sort_however_many_are_equal(
    vocab: int, count: int, levels: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores_RV = torch.randint(-levels, levels + 1, (3, vocab), generator=draw) / levels * 1e3
    scores_RV[torch.rand(3, vocab, generator=draw) < 0.3] *= -0.0  # there are two zeros, and they are equal
    scores_RV[torch.rand(3, vocab, generator=draw) < 0.2] = -torch.inf
    best = scores_RV.sort(dim=-1, descending=True, stable=True)
    values, ids = top(scores_RV, count)
    assert ids.tolist() == best.indices[:, :count].tolist()
    assert values.tolist() == best.values[:, :count].tolist()


def test_scores_that_are_no_numbers_are_refused_in_rows_too() -> None:
    model = tiny.model("t5-mini", VOCAB, context=48)
    model.embedding.weight.data[7] = torch.nan
    asked = [Search(prompt=Prompt(ids=(0,), source=(1, 2, 3)), tokens=4)] * 3
    with pytest.raises(CheckpointError, match="not finite"):
        pooled([model], asked, Beam(beams=2), frozenset({2}), 8)


def test_a_model_keeps_its_pool_for_the_next_search_and_no_two_searches_share_one() -> None:
    model = copy.deepcopy(MODELS["t5-mini"])
    scorer = Scorer(model)
    room = room_for(scorer, [Wish((1, 2, 3), 0, 20)], 2, 1)
    with torch.inference_mode():
        given = rules(2, VOCAB, (), (2,), Beam().penalties(room.steps), scorer.device)
        with pools_of(scorer).lent(scorer, given, "a", room) as first:
            with pools_of(scorer).lent(scorer, given, "a", room) as meanwhile:
                assert meanwhile is not first
            assert pools_of(Scorer(copy.deepcopy(model))) is not pools_of(scorer)
        with pools_of(scorer).lent(scorer, given, "a", room) as again:
            assert again is first
        both = Scorer(model, copy.deepcopy(model))  # another one votes
        with pools_of(both).lent(both, given, "a", room) as voted:
            assert voted is not first
        with pools_of(scorer).lent(scorer, given, "a", room) as first:
            pass
        with pytest.raises(KeyError), pools_of(scorer).lent(scorer, given, "a", room):
            raise KeyError
        model.double()  # other weights: a graph would read those that are gone
        with pools_of(scorer).lent(scorer, given, "a", room) as other:
            assert other is not first


def test_a_search_has_rows_for_its_texts_and_not_many_more() -> None:
    scorer = Scorer(MODELS["t5-mini"])
    for texts, rows in ((1, 8), (8, 8), (9, 16), (100, 128), (5000, 512)):
        room = room_for(scorer, [Wish((1, 2, 3), 0, 20)] * texts, 4, 1)
        assert (room.rows, room.steps, room.words) == (rows, 32, 16)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool with four rows."""
    monkeypatch.setattr(searching, "room_for", lambda *given: replace(room_for(*given), rows=4))


def in_rows(model: Transformer | Scorer, asked: Sequence[Search], beam: Beam, banned: Sequence[int] = ()) -> Any:
    """The search in a pool of rows, which only a GPU takes by itself."""
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    with evaluating(*scorer.models), torch.inference_mode():
        return searching._pooled(scorer, asked, beam, frozenset({5}), LIMIT, banned, lambda done: None)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("name", PAIRS)
def test_rows_whose_texts_all_reach_the_last_step_are_used_again(name: str) -> None:
    """There is room for whole multiples of 16 steps: a text that is done there has no next one."""
    scorer, beam, ends = Scorer(MODELS[name]), Beam(beams=3, n=2), frozenset({5})
    asked = [replace(item, tokens=16) for item in wishes("encoder-decoder", 2, 9)]
    found = in_rows(scorer, asked, beam, banned=(BANNED,))
    assert any(len(ours[0].ids) == 16 for ours in found)
    for item, ours in zip(asked, found, strict=True):
        near(ours, host_search(scorer, item, beam, ends=ends, vocab=LIMIT, banned=(BANNED,)))


@pytest.mark.usefixtures("rows")
def test_a_pool_does_not_outlive_its_model_nor_stay_on_a_device_that_the_model_has_left() -> None:
    models = [copy.deepcopy(MODELS["t5-mini"]) for _ in range(2)]
    asked = wishes("encoder-decoder", 1, 3)
    for scorer in (Scorer(models[0]), Scorer(*models)):
        in_rows(scorer, asked, Beam(beams=2))
        pools = pools_of(scorer)
        assert pools.size > 0
    model = weakref.ref(models[0])
    del models, scorer  # by counting alone: nothing runs the collector of cycles for memory of a device
    assert model() is None

    last = copy.deepcopy(MODELS["t5-mini"])
    in_rows(last, asked, Beam(beams=2))
    assert pools_of(Scorer(last)).size > 0
    search(last, asked, Beam(beams=2), end=5)  # on the CPU, where no pool is used
    assert pools_of(Scorer(last)).size == 0


@pytest.mark.usefixtures("rows")
def test_a_pool_makes_no_more_graphs_than_it_may_and_finds_the_same_without(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[Any] = set()
    run = Graphs.run

    def counted(self: Graphs, key: Any, work: Any) -> None:
        made.add((id(self), key))
        run(self, key, work)

    monkeypatch.setattr(Graphs, "run", counted)
    asked, beam = wishes("encoder-decoder", 4, 11), Beam(beams=2)
    model = copy.deepcopy(MODELS["t5-mini"])
    expected = in_rows(model, asked, beam)
    assert len(made) > 2
    made.clear()
    monkeypatch.setattr(pooling, "GRAPHS", 2)
    found = in_rows(copy.deepcopy(model), asked, beam)
    assert len(made) == 2
    for ours, theirs in zip(found, expected, strict=True):
        near(ours, theirs)


def test_only_the_gpu_in_use_has_rows_that_texts_join(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, asked = Scorer(MODELS["t5-mini"]), wishes("encoder-decoder", 1, 2)
    for device, current, able in (("cpu", 0, False), ("cuda:1", 0, False), ("cuda:1", 1, True), ("cuda", 1, True)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        scorer.device = torch.device(device)
        assert poolable(scorer, asked, Beam()) == able
        assert not poolable(scorer, asked, Beam(coverage=0.1))


def test_no_texts_have_no_translations_on_a_gpu_either() -> None:
    scorer = Scorer(MODELS["t5-mini"])
    scorer.device = torch.device("cuda")
    assert search_texts(scorer, tiny.BYTES, [], beam=Beam()) == []


def test_a_search_does_not_get_fewer_rows_because_of_the_pool_that_the_last_one_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scorer = Scorer(copy.deepcopy(MODELS["t5-mini"]))
    asked = [Wish((1, 2, 3), 0, 40)] * 100
    room = room_for(scorer, asked, 2, 1)
    with torch.inference_mode():
        given = rules(2, VOCAB, (), (2,), Beam().penalties(room.steps), scorer.device)
        with pools_of(scorer).lent(scorer, given, "a", room) as pool:
            size = pool.size
    slots = sum(
        one.numel() * one.element_size() for layers in pool.slots for layer in layers for one in vars(layer).values()
    )
    assert slots < size < 2 * slots
    free = int(slots / 0.3 * 1.1)  # just enough for all the rows
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free - size, free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    scorer.device = torch.device("cuda")
    assert room_for(scorer, asked, 2, 1) == room
    pools_of(scorer).clear()
    assert room_for(scorer, asked, 2, 1).rows < room.rows
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100 + size)  # torch has kept it
    assert room_for(scorer, asked, 2, 1) == room
