"""Beam search against exhaustive search, greedy decoding, a slow plain beam and `transformers`."""

# B batch, W source tokens, T target tokens

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from tests.generation import tiny
from tests.generation.host_beam import host_search
from tests.oracle.copying import copy, enliven
from trivium.errors import CheckpointError, RequestError
from trivium.generation.beam import Beam, Found, Search, search
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.generation.scorer import Prompt, Scorer
from trivium.models.presets import t5
from trivium.models.transformer import Transformer, build
from trivium.parts.attention import split_heads
from trivium.parts.mixers import Context

LETTERS, END, PAD = 4, 4, 5  # ids 0 to 3 are text
FAMILIES = {"decoder": "gpt-mini", "encoder-decoder": "t5-mini"}
MODELS = {family: tiny.model(name, 6, context=24) for family, name in FAMILIES.items()}
WIDE = {family: tiny.model(name, 40, context=48, spread=0.5) for family, name in FAMILIES.items()}


def prompt(model: Transformer, seed: int, length: int, vocab: int = LETTERS) -> Prompt:
    ids = tiny.draw(seed, length, vocab)
    return Prompt(ids=ids) if model.config.family == "decoder" else Prompt(ids=(model.config.vocab - 1,), source=ids)


def find(
    model: Transformer | Scorer, prompts: Sequence[Prompt], beam: Beam, tokens: int = 3, end: int | None = END
) -> list[list[Found]]:
    found = [Search(prompt=item, tokens=tokens) for item in prompts]
    vocab = model.vocab if isinstance(model, Scorer) else model.config.vocab
    return search(model, found, beam, end=end, banned=(vocab - 1,))


@torch.no_grad()
def logprobs(model: Transformer, prompt: Prompt, ids: Sequence[int]) -> Tensor:
    """The log-probabilities of every next id at every place: no cache, no batch."""
    inputs: dict[str, Any] = {"source": torch.tensor([prompt.source])} if prompt.source else {}
    hidden = model(torch.tensor([[*prompt.ids, *ids]]), **inputs).hidden[0, len(prompt.ids) - 1 :]
    return model.head.logits(hidden).log_softmax(-1)


def exhaustive(model: Transformer, prompt: Prompt, tokens: int, alpha: float) -> list[tuple[tuple[int, ...], float]]:
    """Every text of at most so many tokens with its score, best first, ended or cut off."""
    every = []
    for length in range(tokens + 1):
        for ids in product(range(LETTERS), repeat=length):
            steps = logprobs(model, prompt, ids)
            total = sum(float(steps[at, id]) for at, id in enumerate(ids))
            if length < tokens:
                every.append((ids, (total + float(steps[-1, END])) / ((6 + length) / 6) ** alpha))
            else:
                every.append((ids, total / ((5 + length) / 6) ** alpha))
    return sorted(every, key=lambda item: -item[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_texts(family: str, alpha: float) -> None:
    model = MODELS[family]
    for seed in range(3):
        wish = prompt(model, seed, 4 + seed)
        every = exhaustive(model, wish, 3, alpha)
        (found,) = find(model, [wish], Beam(beams=(LETTERS + 1) ** 3, alpha=alpha, n=30))
        assert [tuple(item.ids) for item in found] == [ids for ids, _ in every[:30]]
        assert [item.score for item in found] == pytest.approx([score for _, score in every[:30]], abs=1e-5)
        reasons = ["end" if len(ids) < 3 else "length" for ids, _ in every[:30]]
        assert [item.reason for item in found] == reasons
        assert reasons != sorted(reasons)  # some that are cut off are better than some that end


@pytest.mark.parametrize("family", FAMILIES)
def test_one_beam_without_a_penalty_is_greedy(family: str) -> None:
    model = WIDE[family]
    reasons = []
    for seed in range(12):
        wish = prompt(model, seed, 3 + seed % 5, 38)
        request = Request(ids=wish.ids, source=wish.source, tokens=12, sampling=Sampling(temperature=0), seed=0)
        free = [token.id for token in stream(model, [request], end=None, banned=(39,))]
        end = free[seed] if seed % 2 else 39
        tokens = list(stream(model, [request], end=end, banned=(39,)))
        ((found,),) = find(model, [wish], Beam(beams=1, alpha=0.0), tokens=12, end=end)
        assert found.ids == [token.id for token in tokens if token.reason != "end"]
        assert found.reason == tokens[-1].reason
        reasons.append(found.reason)
    assert {"end", "length"} <= set(reasons)


def slowly(model: Transformer, wish: Prompt, beam: Beam, tokens: int, end: int, banned: int) -> list[Found]:
    """Beam search as one would write it down: lists, no cache, no batch, no early end."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[Found] = []
    for length in range(1, tokens + 1):
        grown = []
        for ids, total in live:
            steps = logprobs(model, wish, ids)[-1].tolist()
            grown += [([*ids, id], total + value) for id, value in enumerate(steps) if id != banned]
        grown.sort(key=lambda item: -item[1])
        divisor = ((5 + length) / 6) ** beam.alpha
        finished += [
            Found(ids[:-1], total, total / divisor, "end") for ids, total in grown[: beam.beams] if ids[-1] == end
        ]
        live = [item for item in grown if item[0][-1] != end][: beam.beams]
    finished += [Found(ids, total, total / divisor, "length") for ids, total in live]
    return sorted(finished, key=lambda item: -item.score)[: beam.n]


def near(found: Sequence[Found], expected: Sequence[Found]) -> None:
    assert [item.ids for item in found] == [item.ids for item in expected]
    assert [item.reason for item in found] == [item.reason for item in expected]
    for name in ("logprob", "score"):
        ours = [getattr(item, name) for item in found]
        assert ours == pytest.approx([getattr(item, name) for item in expected], abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 3.0])
def test_a_batch_through_the_cache_with_an_early_end_finds_what_a_slow_plain_beam_finds(
    family: str, alpha: float, count: Callable[[int, int], int]
) -> None:
    """A high alpha prefers long texts: there an early end that is not exact would lose them."""
    model = WIDE[family]
    for seed in range(count(2, 40)):
        wishes = [prompt(model, 10 * seed + row, 1 + 3 * row, 38) for row in range(5)]
        beam = Beam(beams=2 + seed % 4, alpha=alpha, n=2)
        found = find(model, wishes, beam, tokens=9, end=7 + seed)
        for wish, ours in zip(wishes, found, strict=True):
            near(ours, slowly(model, wish, beam, 9, 7 + seed, 39))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    beams=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_a_batch_finds_what_each_text_finds_alone_in_any_order(
    family: str, lengths: list[int], beams: int, seed: int
) -> None:
    model = WIDE[family]
    wishes = [prompt(model, seed + row, length, 38) for row, length in enumerate(lengths)]
    beam = Beam(beams=beams, n=beams)
    together = find(model, wishes, beam, tokens=8, end=3)
    for wish, found in zip(wishes, together, strict=True):
        near(found, find(model, [wish], beam, tokens=8, end=3)[0])
    for ours, theirs in zip(together, find(model, wishes[::-1], beam, tokens=8, end=3)[::-1], strict=True):
        near(ours, theirs)


def t5_pair(seed: int, vocab: int = 50) -> tuple[Any, Transformer]:
    shape = t5.Shape(2, 24, 40, heads=4, head=6)
    config = T5Config(
        vocab_size=vocab, d_model=24, d_ff=40, d_kv=6, num_heads=4, num_layers=2, decoder_start_token_id=0
    )  # fmt: skip
    theirs = T5ForConditionalGeneration(config).eval()
    enliven(theirs, seed=seed, spread=0.4)
    ours = build(replace(t5.v1_0(shape), vocab=vocab)).eval()
    copy(theirs, ours, "t5")
    return theirs, ours


@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("end", [None, 1])
def test_the_n_best_are_those_of_transformers(beams: int, end: int | None, count: Callable[[int, int], int]) -> None:
    """Without a length penalty both rank by log p, texts that end and texts that are cut off alike."""
    reasons = set[str]()
    mixed = 0
    for seed in range(count(3, 30)):
        tokens = (14, 2, 4)[seed % 3]
        theirs, ours = t5_pair(seed)
        lengths = (12, 7, 3)
        rows = [tiny.draw(seed + row, length, 50) for row, length in enumerate(lengths)]
        source_BW = torch.zeros(3, 12, dtype=torch.long)
        for row, ids in enumerate(rows):
            source_BW[row, : len(ids)] = torch.tensor(ids)
        real_BW = torch.arange(12)[None] < torch.tensor(lengths)[:, None]
        with torch.no_grad():
            expected = theirs.generate(
                source_BW,
                attention_mask=real_BW.long(),
                num_beams=beams,
                num_return_sequences=beams,
                length_penalty=0.0,
                early_stopping="never",
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=end,
                pad_token_id=0,
                bad_words_ids=[[0]],
                return_dict_in_generate=True,
                output_scores=True,
            )
        wishes = [Search(prompt=Prompt(ids=(0,), source=ids), tokens=tokens) for ids in rows]
        found = search(ours, wishes, Beam(beams=beams, n=beams, alpha=0.0), end=end, banned=(0,))
        for row, hypotheses in enumerate(found):
            others = [ids.tolist()[1:] for ids in expected.sequences[row * beams : (row + 1) * beams]]
            texts = [ids[: ids.index(end)] if end in ids else ids for ids in others]
            assert [item.ids for item in hypotheses] == texts
            assert [item.reason for item in hypotheses] == ["end" if end in ids else "length" for ids in others]
            order = [item.reason for item in hypotheses]
            reasons |= {*order}
            mixed += order != sorted(order)
            if beams > 1:
                scores = expected.sequences_scores[row * beams : (row + 1) * beams].tolist()
                assert [item.logprob for item in hypotheses] == pytest.approx(scores, abs=1e-4)
    assert reasons == ({"length"} if end is None else {"end", "length"})
    assert mixed or end is None or beams < 5  # a text that is cut off came before one that ends


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_scores_fall_to_the_lower_id_wherever_they_stand(family: str) -> None:
    model = tiny.model(FAMILIES[family], 400, context=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # every id is as likely as any other
    model.embedding.weight.data.fill_(0.0)
    wish = Prompt(ids=(399,), source=(5, 6)) if family == "encoder-decoder" else Prompt(ids=(5, 6))
    (found,) = search(model, [Search(prompt=wish, tokens=2)], Beam(beams=3, n=3, alpha=0.0), end=None, banned=(0, 2))
    assert [item.ids for item in found] == [[1, 1], [1, 3], [1, 4]]
    assert found[0].logprob == pytest.approx(-2 * math.log(400), abs=1e-4)


def test_the_search_ends_as_soon_as_no_live_beam_can_win() -> None:
    model = WIDE["encoder-decoder"]
    wish = prompt(model, 3, 6, 38)
    steps = 0

    def counted(*_: Any) -> None:
        nonlocal steps
        steps += 1

    end = int(logprobs(model, wish, [])[-1][:39].argmax())  # the very first token ends the best text
    handle = model.register_forward_hook(counted)
    ((found,),) = find(model, [wish], Beam(beams=4, alpha=0.0), tokens=40, end=end)
    handle.remove()
    assert (found.ids, found.reason, steps) == ([], "end", 1)


def test_a_longer_text_can_win_by_the_length_penalty() -> None:
    model = WIDE["encoder-decoder"]
    lengths = {}
    for alpha in (0.0, 4.0):
        wishes = [prompt(model, seed, 6, 38) for seed in range(8)]
        found = find(model, wishes, Beam(beams=4, alpha=alpha), tokens=20, end=11)
        lengths[alpha] = sum(len(best.ids) for (best,) in found)
    assert lengths[4.0] > lengths[0.0]


def test_the_text_ends_at_the_context_and_says_so() -> None:
    model = WIDE["decoder"]
    ((found,),) = find(model, [prompt(model, 0, 40, 38)], Beam(beams=2), tokens=100, end=None)
    assert (len(found.ids), found.reason) == (8, "context")  # 48 hold prompt and answer


def test_prompts_of_very_unequal_length_fill_the_context_each_by_itself() -> None:
    """The padding in front of a short prompt must not count as its text."""
    model = WIDE["decoder"]
    wishes = [prompt(model, length, length, 38) for length in (44, 2, 30, 47)]
    together = find(model, wishes, Beam(beams=3, n=3), tokens=100, end=39)
    assert [len(found[0].ids) for found in together] == [4, 46, 18, 1]
    for wish, found in zip(wishes, together, strict=True):
        near(found, find(model, [wish], Beam(beams=3, n=3), tokens=100, end=39)[0])


def added(name: str, context: int) -> Transformer:
    """A decoder whose positions are a table that ends where the context ends."""
    model = build(tiny.shrunk(name, 40, context=context, width=48))
    enliven(model, seed=1, spread=0.5)
    return model.eval()


def test_a_text_that_is_done_at_the_end_of_its_context_does_not_stop_the_others() -> None:
    model, beam = added("gpt2", 16), Beam(beams=3, n=2)
    wishes = [Search(prompt=Prompt(ids=tiny.draw(seed, 2 if seed else 12, 40)), tokens=14) for seed in range(7)]
    found = search(model, wishes, beam, end=None)
    assert [(len(best.ids), best.reason) for best, _ in found] == [(4, "context"), *[(14, "length")] * 6]
    for wish, ours in zip(wishes, found, strict=True):
        near(ours, host_search(Scorer(model), wish, beam, ends=frozenset(), vocab=40, banned=()))


def test_there_may_be_more_beams_than_positions() -> None:
    """All beams of a text stand at one position; tokens of one text that are too many are still refused."""
    model, beam = added("gpt2", 6), Beam(beams=8, n=8)
    assert model.decoder is not None
    for tokens in (3, 4):
        wish = Search(prompt=Prompt(ids=(1, 2)), tokens=tokens)
        (found,) = search(model, [wish], beam, end=3)
        near(found, host_search(Scorer(model), wish, beam, ends=frozenset({3}), vocab=40, banned=()))
    with pytest.raises(RequestError, match="8 tokens are more than the 6 positions of this model"):
        model.decoder.embed(torch.zeros(1, 8, 48), torch.arange(8)[None])


@torch.no_grad()
def attention(model: Transformer, wish: Prompt, ids: Sequence[int]) -> Tensor:
    """How much attention each source token gets from the last layer in all steps, by that layer's own weights."""
    kept: list[tuple[Tensor, Context]] = []
    assert model.decoder is not None
    cross: Any = model.decoder.blocks[-1].cross
    handle = cross.register_forward_pre_hook(lambda _, given: kept.append(given))
    logprobs(model, wish, ids)
    handle.remove()
    x_BTD, ctx = kept[0]
    query = cross.query_norm(split_heads(cross.query(x_BTD), cross.size))
    key = cross.key_norm(split_heads(cross.key(ctx.source), cross.size))
    weights_BHTS: Tensor = cross.weights(query, key, ctx.source_mask)
    return weights_BHTS[0].mean(0).sum(0)


def test_coverage_adds_the_logarithm_of_the_attention_each_source_token_got() -> None:
    model = WIDE["encoder-decoder"]
    wishes = [prompt(model, seed, 4 + 3 * seed, 38) for seed in range(4)]
    beam = Beam(beams=5, n=5, coverage=0.4)
    changed = 0
    for wish, found, plain in zip(
        wishes, find(model, wishes, beam, 10, 9), find(model, wishes, Beam(beams=5, n=5), 10, 9), strict=True
    ):
        for item in found:
            length = len(item.ids) + (item.reason == "end")
            looked = attention(model, wish, item.ids if item.reason == "end" else item.ids[:-1])
            penalty = 0.4 * float(looked.clamp(max=1).log().sum())
            assert item.score == pytest.approx(item.logprob / ((5 + length) / 6) ** 0.6 + penalty, abs=1e-4)
        changed += [item.ids for item in found] != [item.ids for item in plain]
    assert changed  # it ranks otherwise
    assert not any(module._forward_hooks for module in model.modules())


def test_coverage_needs_a_source() -> None:
    with pytest.raises(RequestError, match="coverage: this model looks at no source"):
        find(WIDE["decoder"], [Prompt(ids=(1,))], Beam(coverage=0.2))


def test_models_that_vote_give_the_mean_of_their_probabilities() -> None:
    models = [tiny.model("t5-mini", 40, context=48, spread=0.5, seed=seed) for seed in (1, 2, 3)]
    wishes = [prompt(models[0], seed, 3 + seed, 38) for seed in range(4)]
    for wish, (found,) in zip(wishes, find(Scorer(*models), wishes, Beam(beams=3), 6, 5), strict=True):
        ids = [*found.ids, *([5] if found.reason == "end" else [])]
        mean = torch.stack([logprobs(model, wish, ids).exp() for model in models]).mean(0).log()
        assert found.logprob == pytest.approx(sum(float(mean[at, id]) for at, id in enumerate(ids)), abs=1e-4)


def test_a_model_that_votes_with_itself_changes_nothing() -> None:
    model = WIDE["encoder-decoder"]
    wishes = [prompt(model, seed, 3 + seed, 38) for seed in range(4)]
    for alone, twice in zip(
        find(model, wishes, Beam(beams=3, n=3), 6, 5),
        find(Scorer(model, model), wishes, Beam(beams=3, n=3), 6, 5),
        strict=True,
    ):
        near(twice, alone)


def test_bad_requests_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"beams": 0}, "beams: 0"),
        ({"alpha": -1.0}, "alpha: -1.0"),
        ({"alpha": math.nan}, "alpha: nan"),
        ({"coverage": -0.1}, "coverage: -0.1"),
        ({"n": 5}, "n: 5 is not between 1 and the number of beams, 4"),
    ]
    for options, words in wrong:
        with pytest.raises(RequestError, match=words):
            Beam(**options)
    with pytest.raises(RequestError, match="tokens: 0"):
        Search(prompt=Prompt(ids=(1,)), tokens=0)
    both, decoder = WIDE["encoder-decoder"], WIDE["decoder"]
    with pytest.raises(RequestError, match="the source has 49 tokens, the model reads at most 48"):
        find(both, [prompt(both, 0, 49)], Beam())
    with pytest.raises(RequestError, match="a decoder continues a prompt"):
        find(decoder, [prompt(both, 0, 3)], Beam())
    with pytest.raises(RequestError, match="different families cannot vote"):
        Scorer(both, decoder)
    with pytest.raises(RequestError, match="banned: all 40 ids that could be written are banned"):
        search(decoder, [Search(prompt=Prompt(ids=(1,)), tokens=2)], Beam(), end=0, banned=range(50))


def test_scores_that_are_no_numbers_are_refused() -> None:
    model = tiny.model("t5-mini", 40)
    model.embedding.weight.data[7] = math.nan
    with pytest.raises(CheckpointError, match="not finite"):
        find(model, [prompt(model, 0, 4)], Beam())


def test_nothing_to_search_is_nothing_found() -> None:
    assert find(WIDE["decoder"], [], Beam()) == []
