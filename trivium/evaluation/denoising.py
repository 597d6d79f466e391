"""How well a model gives back the spans that were cut out of a text: always the same ones, by a seed."""

# B rows, T target tokens

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trivium.data.packing import Rows
from trivium.data.shards import Stream
from trivium.errors import ConfigError, RequestError
from trivium.evaluation.likelihood import Tick
from trivium.generation.engine import evaluating
from trivium.models.transformer import Transformer
from trivium.objectives.options import Denoise, sentinel
from trivium.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Denoised:
    """The loss of the targets, sentinels and END among them, as in training: the sum in nats, and what it is of."""

    nll: float
    targets: int
    rows: int
    row: int  # tokens of raw text in a row

    @property
    def mean(self) -> float:
        """Nats per target token."""
        return self.nll / self.targets

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean) if self.mean < 709 else math.inf


def span_loss(
    model: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    density: float = 0.15,
    mean_span: float = 3.0,
    seed: int = 0,
    batch: int = 0,
    tick: Tick = lambda done, of: None,
) -> Denoised:
    """The loss of T5's span corruption on the documents, cut into rows as in training; the seed draws all spans."""
    sentinels = next(number for number in itertools.count() if sentinel(number) not in tokenizer.specials)
    if not sentinels:
        raise RequestError(f"the tokenizer has no sentinel {sentinel(0)}: this model was not trained to denoise")
    try:
        options = Denoise(density=density, mean_span=mean_span, sentinels=sentinels)
        task = options.bind(tokenizer, model.config)
    except ConfigError as error:
        raise RequestError(str(error)) from None
    if model.config.family not in options.families:
        raise RequestError(f"a model of the {model.config.family} family cannot write what is missing; load another")
    rows = Rows(_stream(tokenizer, texts), task.length)
    if not len(rows):
        raise RequestError("there is no text to denoise; give at least two tokens")
    batch = batch or (8 if model.device.type == "cpu" else max(1, (1 << 15) // task.length))
    total, targets = 0.0, 0
    rng = np.random.default_rng(seed)  # one for all rows, each of which takes as many draws: the batch does not matter
    with evaluating(model), torch.inference_mode():
        for start in range(0, len(rows), batch):
            numbers = np.arange(start, min(start + batch, len(rows)))
            some = task.inputs(rows.take(numbers), rng).to(model.device)
            total += float(task.loss(model, model(**some.inputs), some.targets)["tokens"].sum.double())
            targets += some.counts["tokens"]
            tick(min(start + batch, len(rows)), len(rows))
    return Denoised(nll=total, targets=targets, rows=len(rows), row=task.length)


def _stream(tokenizer: Tokenizer, texts: Sequence[str]) -> Stream:
    """The documents in a row, an END before each and behind the last."""
    encoded = [[tokenizer.end, *ids] for ids in tokenizer.encode_many(texts) if ids]
    starts = np.cumsum([0, *map(len, encoded)])
    closing = [tokenizer.end] if encoded else []
    return Stream(
        ids=np.fromiter(itertools.chain(*encoded, closing), np.uint32),
        starts=starts[:-1].astype(np.int64),
        text_bytes=sum(len(text.encode()) for text in texts),
    )
