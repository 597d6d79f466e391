"""Ids that end a text beside the END id, whoever decodes it."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.generation import tiny
from trivium.generation.sampling import Sampling
from trivium.generation.text import Completion, complete, stream_text

MODELS = {
    "decoder": (tiny.model("gpt-mini", tiny.BYTES, spread=0.5), tiny.BYTES),
    "encoder-decoder": (tiny.model("t5-mini", tiny.DENOISING, spread=0.5), tiny.DENOISING),
}
LIVELY = Sampling(temperature=1.3)
PROMPTS = ["the cat", "a", "and the dog sat"]


@pytest.mark.parametrize("family", MODELS)
def test_a_text_ends_before_the_first_of_several_ids(family: str) -> None:
    """The oracle is the text without them, cut by hand."""
    model, tokenizer = MODELS[family]
    whole = complete(model, tokenizer, PROMPTS, tokens=20, sampling=LIVELY, seed=3, n=2)
    stops = frozenset(samples[0].ids[5 + at] for at, samples in enumerate(whole))
    found = complete(model, tokenizer, PROMPTS, tokens=20, sampling=LIVELY, seed=3, n=2, stop_ids=stops)
    for before, after in zip(chain(*whole), chain(*found), strict=True):
        cut = next((at for at, id in enumerate(before.ids) if id in stops), None)
        assert after.ids == before.ids[:cut]
        assert after.reason == ("end" if cut is not None else before.reason)
    assert [samples[0].reason for samples in found] == ["end"] * len(PROMPTS)
    pieces = stream_text(model, tokenizer, PROMPTS[0], tokens=20, sampling=LIVELY, seed=3, stop_ids=stops)
    streamed = "".join(pieces)
    assert streamed == found[0][0]
    assert isinstance(found[0][0], Completion)
