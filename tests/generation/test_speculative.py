"""Speculative decoding: greedy texts are those of plain decoding, drawn ones have the model's distribution."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation import tiny
from tests.generation.test_continuous import CONTEXT, END, MODELS, SAMPLINGS, VOCAB, alone, small
from trivium.errors import RequestError
from trivium.generation.banks import banks_of
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling, distribution
from trivium.generation.slots import Bank
from trivium.generation.speculative import Choose, Lookup, Speculate, settle, speculative
from trivium.generation.text import complete
from trivium.generation.verify import SlotReader
from trivium.models.transformer import Transformer, build
from trivium.parts.options.positions import LearnedOptions

GREEDY = Sampling(temperature=0)
FULL = Sampling()
CHOOSE = Choose(GREEDY, VOCAB, (), lambda: 0.5)


def draft() -> Transformer:
    """One that often agrees with the model, and often does not."""
    made = small(LearnedOptions())
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype), alpha=0.1)
    return made


DRAFTS: dict[str, Speculate] = {"lookup": "lookup", "draft": draft(), "itself": MODELS["learned"]}


@pytest.mark.parametrize("name", DRAFTS)
@settings(max_examples=25, deadline=None)
@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=CONTEXT - 1),
    tokens=st.integers(1, 30),
    sampling=st.sampled_from([wish for wish in SAMPLINGS if wish.greedy]),
    stop=st.integers(0, VOCAB - 1),
)
def test_greedy_texts_are_those_of_plain_decoding(
    name: str, ids: list[int], tokens: int, sampling: Sampling, stop: int
) -> None:
    model = MODELS["learned"]
    wish = Request(ids=tuple(ids), tokens=tokens, sampling=sampling, seed=0, stop_ids=frozenset({stop}))
    found = [*speculative(model, [wish], DRAFTS[name], end=END)]
    expected = alone(model, wish)
    assert [(token.id, token.reason) for token in found] == [(token.id, token.reason) for token in expected]


@pytest.mark.parametrize("speculate", ["lookup", "draft"])
def test_a_source_too_can_be_speculated(speculate: str) -> None:
    model = tiny.model("t5-small", VOCAB).double()
    guesser: Speculate = "lookup" if speculate == "lookup" else tiny.model("t5-small", VOCAB, seed=2).double()
    wishes = [
        Request(ids=(0,), tokens=12, sampling=GREEDY, seed=0, logprobs=2, source=tiny.draw(row, 9, 5))
        for row in range(4)
    ]
    found = sorted(speculative(model, wishes, guesser, end=END))
    expected = sorted(stream(model, wishes, end=END))
    assert [token[:2] for token in found] == [token[:2] for token in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, rel=1e-5)
        assert [id for id, _ in one.alternatives] == [id for id, _ in other.alternatives]


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 999), drawn=st.booleans())
def test_accepting_and_correcting_together_draw_from_the_model(seed: int, drawn: bool) -> None:
    """Over all random numbers, taken on a grid, and all guesses with their probabilities: exactly p."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, 5, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    if not drawn:
        q = torch.eye(5, dtype=torch.float64)[seed % 5]
    grid = [(2 * step + 1) / 50 for step in range(25)]
    total = torch.zeros(5, dtype=torch.float64)
    for guessed in range(5):
        if q[guessed] > 0:
            for pair in itertools.product(grid, grid):
                id, _ = settle(p, guessed, q if drawn else None, iter(pair).__next__)
                total[id] += q[guessed] / len(grid) ** 2
    torch.testing.assert_close(total, p, rtol=0, atol=0.06)


@pytest.mark.parametrize("name", ["lookup", "draft"])
def test_drawn_texts_have_the_distribution_of_the_model(name: str, count: Callable[[int, int], int]) -> None:
    """The pairs of the second and third token over many seeds, against their probabilities by hand (chi squared)."""
    model = tiny.model("gpt-mini", 4, spread=0.4)
    guesser: Speculate = "lookup" if name == "lookup" else tiny.model("gpt-mini", 4, seed=9, spread=0.4)
    sampling, prompt, texts = Sampling(temperature=1.5, top_p=0.95), (0, 1, 2, 0, 1), count(200, 3000)
    wishes = [Request(ids=prompt, tokens=3, sampling=sampling, seed=seed) for seed in range(texts)]
    rows: dict[int, list[int]] = {}
    for token in speculative(model, wishes, guesser, end=None):
        rows.setdefault(token.row, []).append(token.id)
    found = Counter((ids[1], ids[2]) for ids in rows.values())
    expected: dict[tuple[int, int], float] = defaultdict(float)

    @torch.no_grad()
    def likely(text: tuple[int, ...]) -> list[float]:
        logits = model.head.logits(model(torch.tensor([text])).hidden)[:, -1]
        probabilities: list[float] = distribution(logits, None, sampling)[0].tolist()
        return probabilities

    for first, p in enumerate(likely(prompt)):
        for second, q in enumerate(likely((*prompt, first))):
            for third, r in enumerate(likely((*prompt, first, second))):
                expected[second, third] += p * q * r * texts
    assert all(expected[pair] > 0 for pair in found)
    cells = [(found[pair], number) for pair, number in expected.items() if number > 0]
    statistic = sum((seen - number) ** 2 / number for seen, number in cells)
    assert statistic < len(cells) + 5 * (2 * len(cells)) ** 0.5


@settings(max_examples=50, deadline=None)
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=20), source=st.lists(st.integers(0, 2), max_size=6))
def test_a_lookup_is_the_last_place_where_the_same_words_came_before(text: list[int], source: list[int]) -> None:
    lookup = Lookup(source)
    for length in range(1, len(text) + 1):
        ids, whole = text[:length], source + text[:length]
        expected: list[int] = []
        for words in (2, 3):  # the longer agreement wins
            places = [end for end in range(words, len(whole)) if whole[end - words : end] == whole[-words:]]
            if places and len(ids) >= words:
                expected = whole[places[-1] : places[-1] + 4]
        assert lookup.guess(ids, 4, CHOOSE).ids == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["learned", "grouped", "window"])
def test_a_slot_is_read_and_forgotten_as_a_cache_is(name: str, seed: int) -> None:
    """Random reading and going back, against the whole text read anew."""
    model, dice = MODELS[name].eval(), random.Random(seed)
    reader = SlotReader(model, (), CONTEXT, 5)
    text: list[int] = []
    for _ in range(9):
        text += [dice.randrange(VOCAB) for _ in range(dice.randint(1, min(9, CONTEXT - len(text))))]
        wanted = dice.randint(1, len(text) - reader.length)
        with torch.no_grad():
            expected = model.head.logits(model(torch.tensor([text])).hidden)[0, -wanted:]
        torch.testing.assert_close(reader.read(text, wanted), expected.float(), rtol=1e-5, atol=1e-5)
        text = text[: dice.randint(max(1, len(text) - 4), min(len(text), CONTEXT - 1))]
        reader.forget(len(text) - 1)
    reader.close()


def test_a_text_that_repeats_itself_is_read_in_fewer_steps() -> None:
    model = MODELS["learned"]
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    handle = model.register_forward_hook(count)
    wish = Request(ids=(1,), tokens=20, sampling=GREEDY, seed=0)
    written = len([*speculative(model, [wish], model, end=None)])
    handle.remove()
    assert written == 20
    assert steps < 20 + 9  # itself guesses every token; as many more would be needed if each were read alone


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    wish = Request(ids=(1,), tokens=2, sampling=GREEDY, seed=0)
    with pytest.raises(RequestError, match="both need one tokenizer"):
        speculative(MODELS["learned"], [wish], tiny.model("gpt-mini", 50).double(), end=None)
    with pytest.raises(RequestError, match="must be alike"):
        speculative(MODELS["learned"], [wish], tiny.model("t5-small", VOCAB), end=None)


def test_a_source_that_the_draft_cannot_read_is_refused_before_the_first_token() -> None:
    model = tiny.model("t5-small", VOCAB)
    short = build(replace(model.config, context=16), seed=0)
    wish = Request(ids=(0,), tokens=9, sampling=GREEDY, seed=0, source=tiny.draw(0, 9, VOCAB))
    with pytest.raises(RequestError, match="a source has 25 tokens, the draft reads at most 16"):
        speculative(model, [wish, replace(wish, source=tiny.draw(1, 25, VOCAB))], short, end=None)
    assert [*speculative(model, [wish], short, end=None)]


def test_a_slot_whose_reading_was_interrupted_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(LearnedOptions()).eval()
    expected = SlotReader(model, (), CONTEXT, 5).read([1, 2, 3], 1)
    reader = SlotReader(model, (), CONTEXT, 5)
    reader.read([1, 2, 3], 1)
    with monkeypatch.context() as patch:
        patch.setattr(Bank, "scores", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.read([1, 2, 3, 4], 1)
    reader.close()
    assert not banks_of(model)._free
    again = SlotReader(model, (), CONTEXT, 5)
    assert torch.equal(again.read([1, 2, 3], 1), expected)
    again.close()
    assert len(banks_of(model)._free) == 1


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_whole_texts_can_be_speculated() -> None:
    model = tiny.model("gpt-mini", tiny.BYTES).double()
    prompts, wish = ["abcabcab", "to be or not to be"], {"tokens": 20, "sampling": GREEDY, "seed": 0}
    expected = complete(model, tiny.BYTES, prompts, **wish)  # type: ignore[arg-type]
    assert complete(model, tiny.BYTES, prompts, speculate="lookup", **wish) == expected  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="slide"):
        complete(model, tiny.BYTES, prompts, speculate="lookup", slide=True, **wish)  # type: ignore[arg-type]
