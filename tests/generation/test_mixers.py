"""Token mixers from outside in every way of decoding, against forward passes without a cache, a batch or padding."""

# V vocabulary

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.generation import tiny
from tests.generation.outside import LightConv, Mean, Whole, made
from trivium.errors import ConfigError, RequestError
from trivium.evaluation.likelihood import score_ids
from trivium.generation import supports
from trivium.generation.beam import Beam, Found, Search, search
from trivium.generation.continuous import Engine
from trivium.generation.embed import pooled
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.generation.scorer import Prompt, Scorer
from trivium.generation.speculative import speculative
from trivium.generation.states import logits_of
from trivium.handle import Model
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.parts.mixers import can_roll_back, decoding_of
from trivium.parts.options.attention import MultiHeadOptions

VOCAB, END = 12, 3
GREEDY = Sampling(temperature=0)
STATE = {
    "decoder": made(LightConv()),
    "decoder behind an encoder": made(LightConv(), encoder=MultiHeadOptions(heads=2)),
    "both sides": made(LightConv(), encoder=LightConv()),
    "encoder before attention": made(MultiHeadOptions(heads=2), encoder=LightConv()),
    "mean": made(Mean()),
    "mean behind a mean": made(Mean(), encoder=Mean()),
}
IGNORING = [name for name in STATE if "mean" not in name]  # they do not look at masks
OBEYING = [name for name in STATE if "mean" in name]


def prompts(model: Transformer, lengths: Sequence[int]) -> list[Prompt]:
    drawn = [tiny.draw(7 * row + length, length, VOCAB) for row, length in enumerate(lengths)]
    if model.config.family == "decoder":
        return [Prompt(ids=ids) for ids in drawn]
    return [Prompt(ids=tiny.draw(row, 1 + row % 2, VOCAB), source=ids) for row, ids in enumerate(drawn)]


def requests(model: Transformer, lengths: Sequence[int], sampling: Sampling = GREEDY, tokens: int = 8) -> list[Request]:
    return [
        Request(ids=prompt.ids, source=prompt.source, tokens=tokens, sampling=sampling, seed=row)
        for row, prompt in enumerate(prompts(model, lengths))
    ]


@torch.no_grad()
def scores(model: Transformer, prompt: Prompt, ids: Sequence[int]) -> Tensor:
    """The log-probabilities [V] of what follows, by one pass over the whole text."""
    source: dict[str, Any] = {"source": torch.tensor([prompt.source])} if prompt.source else {}
    hidden = model(torch.tensor([[*prompt.ids, *ids]]), **source).hidden[:, -1]
    return model.head.logits(hidden)[0].log_softmax(-1)


def greedily(model: Transformer, prompt: Prompt, tokens: int) -> list[int]:
    ids: list[int] = []
    for _ in range(tokens):
        ids.append(int(scores(model, prompt, ids).argmax()))
    return ids


def ids_of(tokens: Any, rows: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(rows)]
    for token in tokens:
        found[token.row].append(token.id)
    return found


LENGTHS = (9, 4, 9, 2, 6, 4)


@pytest.mark.parametrize("name", STATE)
def test_a_batch_of_different_lengths_writes_what_whole_passes_say(name: str) -> None:
    model = STATE[name]
    wishes = requests(model, LENGTHS)
    found = ids_of(stream(model, wishes, end=None), len(wishes))
    assert found == [greedily(model, wish.prompt, wish.tokens) for wish in wishes]


@pytest.mark.parametrize("name", STATE)
def test_a_drawn_batch_is_each_alone(name: str) -> None:
    model = STATE[name]
    wishes = requests(model, LENGTHS, Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1))
    together = ids_of(stream(model, wishes, end=END), len(wishes))
    for row, wish in enumerate(wishes):
        assert [token.id for token in stream(model, [wish], end=END)] == together[row]


@pytest.mark.parametrize("name", STATE)
def test_a_text_slides_past_the_context(name: str) -> None:
    model = STATE[name]
    if model.config.family != "decoder":
        pytest.skip("a source does not slide")
    wishes = requests(model, (20, 3), tokens=15)
    found = ids_of(stream(model, wishes, end=None, slide=True), 2)
    for wish, ours in zip(wishes, found, strict=True):
        ids, start = list(wish.ids), 0
        for _ in range(15):
            if len(ids) - start > model.config.context:
                start = len(ids) - model.config.context // 2
            ids.append(int(scores(model, Prompt(ids=tuple(ids[start:])), []).argmax()))
        assert ours == ids[len(wish.ids) :]


def slowly(model: Transformer, prompt: Prompt, beam: Beam, tokens: int) -> list[Found]:
    """Beam search by lists and whole passes."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[Found] = []
    for length in range(1, tokens + 1):
        grown = [
            ([*ids, id], total + value)
            for ids, total in live
            for id, value in enumerate(scores(model, prompt, ids).tolist())
        ]
        grown.sort(key=lambda item: -item[1])
        penalty = ((5 + length) / 6) ** beam.alpha
        ended += [Found(ids[:-1], p, p / penalty, "end") for ids, p in grown[: beam.beams] if ids[-1] == END]
        live = [item for item in grown if item[0][-1] != END][: beam.beams]
    ended += [Found(ids, p, p / penalty, "length") for ids, p in live]
    return sorted(ended, key=lambda item: -item.score)[: beam.n]


def near(found: Sequence[Found], expected: Sequence[Found]) -> None:
    assert [(item.ids, item.reason) for item in found] == [(item.ids, item.reason) for item in expected]
    for name in ("logprob", "score"):
        assert [getattr(item, name) for item in found] == pytest.approx(
            [getattr(item, name) for item in expected], abs=1e-4
        )


@pytest.mark.parametrize("name", STATE)
def test_beams_are_those_of_whole_passes(name: str, count: Callable[[int, int], int]) -> None:
    model = STATE[name]
    for beams, alpha in ((1, 0.0), (3, 0.6), (5, 1.5))[: count(2, 3)]:
        beam = Beam(beams=beams, alpha=alpha, n=min(2, beams))
        wishes = [Search(prompt=prompt, tokens=6) for prompt in prompts(model, LENGTHS)]
        found = search(model, wishes, beam, end=END)
        for wish, ours in zip(wishes, found, strict=True):
            near(ours, slowly(model, wish.prompt, beam, 6))


def test_beams_of_models_that_vote_give_the_mean_of_their_probabilities() -> None:
    models = [made(LightConv(), encoder=MultiHeadOptions(heads=2), seed=seed) for seed in (1, 2)]
    wishes = [Search(prompt=prompt, tokens=5) for prompt in prompts(models[0], (3, 5))]
    for wish, (found,) in zip(wishes, search(Scorer(*models), wishes, Beam(beams=3), end=END), strict=True):
        ids = [*found.ids, *([END] if found.reason == "end" else [])]
        total = 0.0
        for at, id in enumerate(ids):
            each = torch.stack([scores(model, wish.prompt, ids[:at]) for model in models])
            total += float(each.exp().mean(0).log()[id])
        assert found.logprob == pytest.approx(total, abs=1e-4)


def test_coverage_sees_what_beams_as_tokens_show() -> None:
    """Of a model that can be read both ways the scores with coverage are the same, row copies or not."""
    model = tiny.model("t5-mini", 40, context=48, spread=0.5)
    wishes = [Search(prompt=Prompt(ids=(39,), source=tiny.draw(row, 3 + row, 38)), tokens=8) for row in range(4)]
    beam = Beam(beams=4, n=4, coverage=0.4)
    expected = search(model, wishes, beam, end=9, banned=(39,))
    model.register_forward_hook(lambda *_: None)  # which sees every step: rows of the cache are copied instead
    assert not supports.supports_beam_tokens(model)
    for ours, theirs in zip(search(model, wishes, beam, end=9, banned=(39,)), expected, strict=True):
        near(ours, theirs)
    mixed = STATE["decoder behind an encoder"]
    asked = [Search(prompt=prompt, tokens=6) for prompt in prompts(mixed, (5, 3))]
    for found, plain in zip(
        search(mixed, asked, Beam(beams=4, n=4, coverage=0.4), end=END),
        search(mixed, asked, Beam(beams=4, n=4), end=END),
        strict=True,
    ):
        assert all(one.score < one.logprob / Beam().penalty(len(one.ids) + (one.reason == "end")) for one in found)
        assert len(found) == len(plain) == 4


def test_a_hook_on_the_whole_model_is_called_at_every_step_of_a_search() -> None:
    model = copy.deepcopy(tiny.model("gpt-mini", 40, context=24, spread=0.5))
    wish = Search(prompt=Prompt(ids=(1, 2)), tokens=5)
    (expected,) = search(model, [wish], Beam(beams=3, n=3), end=None)
    shapes: list[tuple[int, ...]] = []
    model.register_forward_hook(lambda module, given, result: shapes.append(tuple(given[0].shape)))
    (found,) = search(model, [wish], Beam(beams=3, n=3), end=None)
    near(found, expected)
    assert shapes == [(1, 2), *[(3, 1)] * 4]


@pytest.mark.parametrize("name", IGNORING)
def test_what_needs_masks_or_roll_back_is_refused(name: str) -> None:
    model = STATE[name]
    with pytest.raises(RequestError, match=r"Convolution\) does not obey masks .* use stream"):
        Engine(model, end=None, slots=2)
    assert not supports.supports_pool(model)
    assert not supports.supports_beam_tokens(model)
    assert not supports.supports_slots(model)
    if name == "encoder before attention":
        return  # its decoder can forget
    for draft in ("lookup", STATE["mean"] if model.config.family == "decoder" else STATE["mean behind a mean"]):
        with pytest.raises(RequestError, match=r"speculate: decoder.blocks.0.attention .* leave speculate out"):
            speculative(model, requests(model, (4,)), draft, end=None)
    large = STATE["mean"] if model.config.family == "decoder" else STATE["mean behind a mean"]
    with pytest.raises(RequestError, match=r"speculate: decoder\.blocks\.0\.attention"):
        speculative(large, requests(large, (4,)), model, end=None)


@pytest.mark.parametrize("name", OBEYING)
def test_a_mixer_that_declares_masks_takes_every_way(name: str) -> None:
    model = STATE[name]
    wishes = requests(model, LENGTHS)
    expected = [greedily(model, wish.prompt, wish.tokens) for wish in wishes]
    engine = Engine(model, end=None, slots=2)
    for wish in wishes:
        engine.submit(wish)
    found: list[list[int]] = [[] for _ in wishes]
    while engine.busy:
        for token in engine.step():
            found[token.row].append(token.id)
    assert found == expected
    assert ids_of(speculative(model, wishes, "lookup", end=None), len(wishes)) == expected
    assert supports.supports_beam_tokens(model)


def test_the_encoder_of_a_pool_has_keys_in_the_shape_of_its_decoder() -> None:
    assert supports.supports_pool(tiny.model("t5-mini", 40))
    assert not supports.supports_pool(
        made(MultiHeadOptions(heads=4), encoder=MultiHeadOptions(heads=4))
    )  # crossed by two heads


def test_a_layer_that_looks_at_no_source_is_not_decoded_in_slots() -> None:
    heads = MultiHeadOptions(heads=2)
    crossed = Stack(
        layers=2, block=Block(attention=heads, cross=heads), pattern=("", "alone"), variants={"alone": Block()}
    )
    plain = Stack(layers=1, block=Block(attention=heads))
    model = build(ModelConfig(width=16, context=24, vocab=VOCAB, encoder=plain, decoder=crossed)).eval()
    wishes = requests(model, LENGTHS)
    found = ids_of(stream(model, wishes, end=None), len(wishes))
    assert found == [greedily(model, wish.prompt, wish.tokens) for wish in wishes]
    with pytest.raises(RequestError, match="a layer that does not attend to the source"):
        Engine(model, end=None)
    assert not supports.supports_pool(model)


def test_a_mixer_that_needs_a_whole_text_does_not_decode() -> None:
    model = made(Whole())
    wish = requests(model, (4,))[0]
    words = r'decoder.blocks.0.attention \(MeanOfSeen\) needs a whole text at once \(decoding = "none"\)'
    with pytest.raises(RequestError, match=words):
        stream(model, [wish], end=None)
    with pytest.raises(RequestError, match=words):
        search(model, [Search(prompt=wish.prompt, tokens=3)], Beam(), end=None)
    with pytest.raises(RequestError, match=words):
        speculative(model, [wish], "lookup", end=None)
    with pytest.raises(RequestError, match="does not obey masks"):
        Engine(model, end=None)
    assert score_ids(model, wish.ids, end=0).shape == (4,)  # a whole text
    behind = made(MultiHeadOptions(heads=2), encoder=Whole())
    ids = [token.id for token in stream(behind, requests(behind, (5,)), end=None)]
    assert ids == greedily(behind, requests(behind, (5,))[0].prompt, 8)  # an encoder does not decode


def test_what_is_no_declaration_is_refused() -> None:
    mixer = nn.Identity()
    assert (decoding_of(mixer), can_roll_back(mixer)) == ("state", False)
    mixer.decoding = "masks"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"Identity\.decoding: 'masks' is none of mask, state and none"):
        decoding_of(mixer)


def test_a_block_of_another_package_counts_as_a_state() -> None:
    class Wrapped(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block, self.attention = block, block.attention

        def forward(self, *given: Any) -> Tensor:
            result: Tensor = self.block(*given)
            return result

    model = made(MultiHeadOptions(heads=2))
    assert supports.supports_padding(model)
    expected = ids_of(stream(model, requests(model, LENGTHS), end=None), len(LENGTHS))
    assert model.decoder is not None
    model.decoder.blocks[0] = Wrapped(model.decoder.blocks[0])
    assert not supports.supports_padding(model)
    assert ids_of(stream(model, requests(model, LENGTHS), end=None), len(LENGTHS)) == expected


def test_the_object_m_takes_the_general_way() -> None:
    module = made(LightConv(), vocab=tiny.BYTES.size, context=40)
    model = Model(module, tiny.BYTES, {})
    texts = ["To be", "or", "not to be", "be"]
    found = model.generate(texts, tokens=6, temperature=0.9, seed=3)
    assert found == [model.generate(text, tokens=6, temperature=0.9, seed=3) for text in texts]
    assert "".join(model.stream("or", tokens=6, temperature=0.9, seed=3)) == found[1]
    ((ids, logprob),) = [(best.ids, best.logprob) for best in model.search("or", tokens=4, beams=3, alpha=0.0)]
    prompt = Prompt(ids=tuple(tiny.BYTES.encode("or")))
    end = [] if len(ids) == 4 else [tiny.BYTES.end]
    steps = [float(scores(module, prompt, ids[:at])[id]) for at, id in enumerate([*ids, *end])]
    assert logprob == pytest.approx(sum(steps), abs=1e-4)
    with pytest.raises(RequestError, match="speculate"):
        model.generate("or", speculate="lookup")
    both = Model(made(LightConv(), encoder=LightConv(), vocab=tiny.DENOISING.size, context=40), tiny.DENOISING, {})
    assert both.translate(texts, tokens=5, beams=3) == [both.translate(text, tokens=5, beams=3) for text in texts]


def test_an_encoder_that_ignores_masks_reads_texts_of_one_length_together() -> None:
    model = made(None, encoder=LightConv())
    rows = [tiny.draw(row, length, VOCAB) for row, length in enumerate(LENGTHS)]
    together = pooled(model, rows)
    for row, vector in zip(rows, together, strict=True):
        assert torch.allclose(pooled(model, [row])[0], vector, atol=1e-6)
    two = [[1, 2, 3], [4, 5, 0]]
    with pytest.raises(RequestError, match="padding: a mixer of this model does not obey masks"):
        logits_of(model, two, None, segments=None, padding=torch.tensor([[1, 1, 1], [1, 1, 0]]))
