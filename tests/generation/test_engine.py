"""The decoding loop against a slow plain one that reads everything again for every token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.errors import CheckpointError, RequestError
from trivium.generation.engine import Request, Token, stream
from trivium.generation.sampling import Sampling, Uniforms, distribution, draw
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.positions import LearnedOptions, Position, RotaryOptions

VOCAB = 61
GREEDY = Sampling(temperature=0)
LIVELY = Sampling(temperature=1.2, top_k=30, top_p=0.95, min_p=0.001)


def small(position: Position | None = None, *, groups: int = 0) -> Transformer:
    block = Block(
        attention=MultiHeadOptions(heads=4, groups=groups, bias="all"),
        position=position or LearnedOptions(),
        dropout=0.3,
    )
    config = ModelConfig(
        width=32,
        context=24,
        vocab=VOCAB,
        embedding=TokenEmbeddingOptions(tie="none"),
        decoder=Stack(layers=2, block=block),
    )
    model = build(config, seed=1)
    with torch.no_grad():  # a fresh tied model repeats its input, small weights say little
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


MODELS = {
    "learned": small(),
    "rotary": small(RotaryOptions()),
    "grouped": small(RotaryOptions(), groups=2),
    "multi-query": small(LearnedOptions(), groups=1),
}


def request(
    ids: Sequence[int], tokens: int = 8, sampling: Sampling = GREEDY, seed: int = 0, sample: int = 0
) -> Request:
    return Request(ids=tuple(ids), tokens=tokens, sampling=sampling, seed=seed, sample=sample)


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode(
    model: Transformer, requests: Sequence[Request], end: int | None = None, *, slide: bool = False
) -> list[list[int]]:
    """The new ids of every row."""
    rows: list[list[int]] = [[] for _ in requests]
    for token in stream(model, requests, end=end, slide=slide):
        rows[token.row].append(token.id)
    return rows


@torch.no_grad()
def plainly(model: Transformer, request: Request) -> list[int]:
    """The same tokens the slow way: no cache, no batch, no padding."""
    model.eval()
    ids, uniforms = list(request.ids), Uniforms(request.seed, request.sample)
    for _ in range(min(request.tokens, model.config.context - len(ids))):
        logits = model.head.logits(model(torch.tensor([ids])).hidden)[:, -1]
        seen = torch.zeros(1, VOCAB, dtype=torch.bool)
        seen[0, ids] = True
        probabilities = distribution(logits, seen, request.sampling)
        if request.sampling.greedy:
            ids.append(int(probabilities.argmax()))
        else:
            ids.append(int(draw(probabilities, torch.tensor([uniforms.next()], dtype=torch.float64))))
    model.train()
    return ids[len(request.ids) :]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sampling", [GREEDY, LIVELY, replace(LIVELY, repetition_penalty=1.5)], ids=str)
def test_cached_decoding_gives_the_tokens_of_uncached_decoding(name: str, sampling: Sampling) -> None:
    model = MODELS[name]
    for seed in range(4):
        wish = request(prompt(seed, 5), 15, sampling, seed)
        assert decode(model, [wish]) == [plainly(model, wish)]


def test_the_plain_loop_says_something() -> None:
    texts = [plainly(MODELS["rotary"], request(prompt(seed, 5), 15)) for seed in range(4)]
    assert len({tuple(text) for text in texts}) == 4
    assert all(len(set(text)) > 3 for text in texts)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 23), st.integers(1, 30), st.sampled_from([GREEDY, LIVELY, Sampling()])),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 1000),
)
def test_a_batch_of_unequal_prompts_gives_what_each_gives_alone(
    name: str, shapes: list[tuple[int, int, Sampling]], seed: int
) -> None:
    model = MODELS[name]
    wishes = [
        request(prompt(seed + row, length), tokens, sampling, seed, row)
        for row, (length, tokens, sampling) in enumerate(shapes)
    ]
    assert decode(model, wishes) == [plainly(model, wish) for wish in wishes]


def test_the_same_seed_gives_the_same_text_whatever_else_is_in_the_batch() -> None:
    model = MODELS["rotary"]
    wish = request(prompt(1, 6), 12, LIVELY, seed=9)
    others = [request(prompt(row, row + 1), 3 + 2 * row, LIVELY, seed=row) for row in range(7)]
    alone = decode(model, [wish])[0]
    assert decode(model, [*others, wish])[-1] == alone
    assert decode(model, [wish, others[3], wish])[2] == alone
    assert decode(model, [replace(wish, seed=10)])[0] != alone
    assert decode(model, [replace(wish, sample=1)])[0] != alone


def test_rows_that_penalise_and_rows_that_do_not_share_a_batch() -> None:
    model = MODELS["learned"]
    ways = [GREEDY, Sampling(temperature=0, repetition_penalty=3.0), replace(LIVELY, repetition_penalty=1.4), LIVELY]
    wishes = [request(prompt(row, 3 + row), 4 + 5 * row, way, seed=row) for row, way in enumerate(ways)]
    assert decode(model, wishes) == [plainly(model, wish) for wish in wishes]


@pytest.mark.parametrize("sampling", [GREEDY, LIVELY], ids=str)
def test_logprobs_are_those_of_a_full_forward_before_any_filter(sampling: Sampling) -> None:
    model = MODELS["grouped"]
    wishes = [replace(request(prompt(row, 3 + 2 * row), 9, sampling, seed=row), logprobs=row) for row in range(4)]
    rows: list[list[Token]] = [[] for _ in wishes]
    for token in stream(model, wishes, end=None):
        rows[token.row].append(token)
    model.eval()
    for wish, tokens in zip(wishes, rows, strict=True):
        ids = [*wish.ids, *(token.id for token in tokens)]
        with torch.no_grad():
            logprobs = model.head.logits(model(torch.tensor([ids])).hidden)[0].log_softmax(-1)
        for at, token in enumerate(tokens, start=len(wish.ids) - 1):
            if not wish.logprobs:
                assert math.isnan(token.logprob)
                assert token.alternatives == ()
                continue
            assert token.logprob == pytest.approx(float(logprobs[at, token.id]), abs=1e-5)
            others = [id for id in logprobs[at].argsort(descending=True).tolist() if id != token.id]
            assert [id for id, _ in token.alternatives] == others[: wish.logprobs]
            assert [value for _, value in token.alternatives] == pytest.approx(
                logprobs[at, others[: wish.logprobs]].tolist(), abs=1e-5
            )
    model.train()


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    wish = replace(request([3], 1), logprobs=1000)
    (token,) = stream(MODELS["learned"], [wish], end=None)
    assert len(token.alternatives) == VOCAB - 1
    total = math.exp(token.logprob) + sum(math.exp(value) for _, value in token.alternatives)
    assert total == pytest.approx(1, abs=1e-5)


def test_a_row_ends_with_the_reason_for_it() -> None:
    model = MODELS["learned"]
    wish = request(prompt(2, 6), 10)
    free = plainly(model, wish)
    at = next(at for at in range(1, 10) if free[at] not in free[:at])
    for wishes, end in (([wish], free[at]), ([replace(wish, stop_ids=frozenset({free[at]}))], None)):
        tokens = list(stream(model, wishes, end=end))
        assert [token.id for token in tokens] == free[: at + 1]
        assert [token.reason for token in tokens] == [""] * at + ["end"]
    assert [token.reason for token in stream(model, [wish], end=None)] == [""] * 9 + ["length"]


def test_decoding_stops_at_the_context_and_says_so() -> None:
    wishes = [request(prompt(1, 20), 50), request(prompt(2, 4), 50), request(prompt(3, 23), 50)]
    rows: list[list[Token]] = [[], [], []]
    for token in stream(MODELS["learned"], wishes, end=None):
        rows[token.row].append(token)
    assert [len(row) for row in rows] == [4, 20, 1]  # 24 hold prompt and answer
    assert all([token.reason for token in row] == [""] * (len(row) - 1) + ["context"] for row in rows)


@pytest.mark.parametrize("name", ["learned", "rotary"])
def test_sliding_reads_the_last_half_of_the_context_again(name: str) -> None:
    model = MODELS[name].eval()
    wishes = [request(prompt(row, length), 60) for row, length in enumerate((5, 20, 24, 40))]
    slid = decode(model, wishes, slide=True)
    for wish, new in zip(wishes, slid, strict=True):
        seen, ids = list(wish.ids), []
        for _ in range(60):
            seen = seen if len(seen) <= 24 else seen[-12:]
            with torch.no_grad():
                ids.append(int(model.head.logits(model(torch.tensor([seen])).hidden[:, -1]).argmax()))
            seen.append(ids[-1])
        assert new == ids
    model.train()


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    model = MODELS["learned"]
    wish = request([1, 2, 3], 20, Sampling(temperature=5.0))
    assert max(decode(model, [wish])[0]) >= 10
    assert max(token.id for token in stream(model, [wish], end=None, vocab=10)) < 10


def test_a_stopped_row_gives_no_more_tokens_and_the_others_go_on() -> None:
    wishes = [request(prompt(row, 4 + row), 10) for row in range(3)]
    free = decode(MODELS["rotary"], wishes)
    decoding = stream(MODELS["rotary"], wishes, end=None)
    rows: list[list[int]] = [[], [], []]
    for token in decoding:
        rows[token.row].append(token.id)
        if len(rows[0]) == 3:
            decoding.stop(0)
        if len(rows[1]) == 5:
            decoding.stop(1)
    assert rows == [free[0][:3], free[1][:5], free[2]]


def test_decoding_leaves_the_model_and_the_thread_as_they_were() -> None:
    model = MODELS["learned"].train()
    model.embedding.eval()
    before = [module.training for module in model.modules()]
    decoding = stream(model, [request([1, 2], 10)], end=None)
    next(decoding)
    assert not torch.is_inference_mode_enabled()
    assert not any(module.training for module in model.modules())
    decoding.close()
    assert [module.training for module in model.modules()] == before
    assert next(decoding, None) is None
    model.train()


def test_prompts_of_one_length_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["learned"]
    masks: list[bool] = []
    plain = Transformer.forward

    def spy(self: Transformer, tokens: torch.Tensor, **given: torch.Tensor) -> object:
        masks.append("padding" in given)
        return plain(self, tokens, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(Transformer, "forward", spy)
    decode(model, [request(prompt(1, 5), 3), request(prompt(2, 5), 3)])
    assert masks == [False] * 3  # one pass over the prompt, then one per token but the last
    masks.clear()
    decode(model, [request(prompt(1, 5), 6), request(prompt(2, 4), 3)])
    assert masks == [True] * 3 + [False] * 3  # the short row has left


@pytest.mark.parametrize("length", [24, 25, 100])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(length: int) -> None:
    with pytest.raises(RequestError, match=f"the prompt has {length} tokens, the model's context holds 24"):
        stream(MODELS["learned"], [request([1], 1), request([1] * length, 1)], end=None)


def test_what_cannot_be_asked_is_refused_before_anything_is_decoded() -> None:
    with pytest.raises(RequestError, match="tokens: 0"):
        request([1], 0)
    with pytest.raises(RequestError, match="no tokens"):
        request([], 1)
    with pytest.raises(RequestError, match="logprobs: -1"):
        replace(request([1]), logprobs=-1)
    for ids in ([VOCAB], [1, -1]):
        with pytest.raises(RequestError, match="vocabulary of 61"):
            stream(MODELS["learned"], [request(ids)], end=None)


def test_an_encoder_refuses_to_continue_a_text() -> None:
    encoder = ModelConfig(width=8, context=8, vocab=5, encoder=Stack(layers=1), decoder=NoStack())
    with pytest.raises(RequestError, match="an encoder sees both sides"):
        stream(build(encoder), [request([1])], end=None)
    crossed = Stack(layers=1, block=Block(cross=MultiHeadOptions()))
    both = ModelConfig(width=8, context=8, vocab=5, encoder=Stack(layers=1), decoder=crossed)
    with pytest.raises(RequestError, match="source"):
        stream(build(both), [request([1])], end=None)


@pytest.mark.parametrize("sampling", [GREEDY, LIVELY], ids=str)
def test_damaged_weights_end_in_a_sentence(sampling: Sampling) -> None:
    model = small()
    with torch.no_grad():
        model.embedding.weight[7] = math.nan
    with pytest.raises(CheckpointError, match="not finite"):
        decode(model, [request([1, 7], 3, sampling)])


def test_no_requests_give_no_tokens() -> None:
    assert list(stream(MODELS["learned"], [], end=None)) == []
