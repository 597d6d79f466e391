"""The loss of span corruption against closed forms and a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.generation import tiny
from trivium.data.packing import Rows
from trivium.errors import RequestError
from trivium.evaluation.denoising import _stream, span_loss
from trivium.objectives.noise_lengths import room_for
from trivium.objectives.options import Denoise

TOKENIZER = tiny.BYTES.extended(["<pad>", *(f"<extra_id_{number}>" for number in reversed(range(10)))])
TEXTS = ["To be, or not to be: that is the question. " * 9, "Whether 'tis nobler in the mind to suffer. " * 5]


def test_a_model_that_knows_nothing_pays_the_logarithm_of_the_vocabulary() -> None:
    model = tiny.model("t5-mini", TOKENIZER)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = span_loss(model, TOKENIZER, TEXTS)
    assert found.mean == pytest.approx(math.log(model.config.vocab), rel=1e-6)
    assert found.perplexity == pytest.approx(model.config.vocab, rel=1e-5)


def test_the_targets_are_as_many_as_the_objective_says() -> None:
    model = tiny.model("t5-mini", TOKENIZER)
    found = span_loss(model, TOKENIZER, TEXTS)
    tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    assert found.rows == math.ceil(tokens / found.row)
    full, last = divmod(tokens, found.row)
    options = Denoise(sentinels=10)
    lengths = [found.row] * full + ([last] if last else [])
    assert found.targets == sum(room_for(options, length).targets for length in lengths)


@pytest.mark.parametrize("name", ["t5-mini", "gpt-mini"])
def test_the_loss_is_that_of_a_plain_loop_and_the_batch_does_not_matter(name: str) -> None:
    model = tiny.model(name, TOKENIZER, spread=0.5)
    found = span_loss(model, TOKENIZER, TEXTS, seed=3, batch=8)
    task = Denoise(sentinels=10).bind(TOKENIZER, model.config)
    rows, rng, total = Rows(_stream(TOKENIZER, TEXTS), task.length), np.random.default_rng(3), 0.0
    for number in range(len(rows)):
        batch = task.inputs(rows.take(np.array([number])), rng)
        with torch.no_grad():
            logits = model.head.logits(model(**batch.inputs).hidden)[0].double()
        labels = batch.targets["labels"][0]
        chosen = [(row, int(label)) for row, label in enumerate(labels) if label >= 0]
        total -= sum(float(logits[row].log_softmax(-1)[label]) for row, label in chosen)
    assert found.nll == pytest.approx(total, rel=1e-5)
    assert span_loss(model, TOKENIZER, TEXTS, seed=3, batch=1).nll == pytest.approx(found.nll, rel=1e-6)
    assert span_loss(model, TOKENIZER, TEXTS, seed=4).nll != pytest.approx(found.nll, rel=1e-6)
    assert span_loss(model, TOKENIZER, TEXTS, seed=3).nll == pytest.approx(found.nll, rel=1e-6)


def test_what_cannot_denoise_is_refused() -> None:
    with pytest.raises(RequestError, match="no sentinel <extra_id_0>"):
        span_loss(tiny.model("t5-mini", tiny.BYTES.extended(["<pad>"])), tiny.BYTES.extended(["<pad>"]), TEXTS)
    with pytest.raises(RequestError, match="encoder family"):
        span_loss(tiny.model("bert-mini", TOKENIZER), TOKENIZER, TEXTS)
    with pytest.raises(RequestError, match="no text"):
        span_loss(tiny.model("t5-mini", TOKENIZER), TOKENIZER, [""])
