"""What a model in training does on text that it does not learn from, in the way of its family.

A decoder continues the recipe's prompt. An encoder guesses one hidden word in each of a few validation sentences. An
encoder-decoder writes from a few validation sources, made by its objective: a sentence to translate, or a text with
sentinels where spans were cut out. The examples are the same at every step, so that they show how it learns.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

import numpy as np

from trivium.data.bucketing import Pairs
from trivium.data.packed import PackedPairs
from trivium.data.packing import RowBatch
from trivium.evaluation import words
from trivium.evaluation.gaps import gap
from trivium.generation.fill import fill
from trivium.generation.sampling import Sampling
from trivium.generation.scorer import Prompt
from trivium.generation.text import complete, stream_text
from trivium.labels import IGNORED
from trivium.objectives.masked import MASK
from trivium.text.framing import frame_of
from trivium.text.tokenizer import Tokenizer
from trivium.training.context import RunContext
from trivium.training.events import Sampled
from trivium.training.job import Job

_EXAMPLES = 3
_TEXT = 20_000  # tokens of the validation text that sentences are drawn from
_ROW = 60  # tokens of a row of text that an encoder-decoder is shown
_TOP = 3  # guesses for a hidden word


def samples(job: Job, context: RunContext) -> Iterator[Sampled]:
    """The samples of this step; none where the validation text offers no example."""
    family = context.recipe.model.family
    if family == "decoder":
        yield _continued(job, context)
    elif family == "encoder":
        yield from _filled(job, context)
    else:
        yield from _written(job, context)


def _continued(job: Job, context: RunContext) -> Sampled:
    wanted = context.recipe.sample
    [[text]] = complete(
        job.model,
        context.tokenizer,
        [wanted.prompt],
        tokens=min(wanted.tokens, context.recipe.model.context - 1),
        sampling=Sampling(temperature=wanted.temperature),
        seed=context.recipe.seed,
    )
    return Sampled(job.step, wanted.prompt, str(text))


def _filled(job: Job, context: RunContext) -> Iterator[Sampled]:
    """The likeliest pieces for a hidden word with their probabilities; of a word of several pieces the best of each."""
    tokenizer = context.tokenizer
    if MASK not in tokenizer.specials:
        return
    literal = tokenizer.piece(tokenizer.specials[MASK])
    ids = [int(id) for id in context.shards.valid.ids[:_TEXT] if id != tokenizer.end]
    text = tokenizer.decode(ids)
    room = context.recipe.model.context - 2  # what a frame leaves
    asked = words.questions([text], words.ranks([text]), count=_EXAMPLES, seed=context.recipe.seed)
    for question in asked:
        sentence, first, last = _excerpt(tokenizer, question.text, question.first, question.last, room)
        found = gap(tokenizer, sentence, first, last)
        if not found.places or len(found.ids) > room:
            continue
        hidden = f"{sentence[:first]}{literal * len(found.places)}{sentence[last:]}"
        [guesses] = fill(job.model, tokenizer, [hidden], top=_TOP)
        if len(guesses) == 1:
            said = ", ".join(f"{_visible(guess)} {guess.probability:.0%}" for guess in guesses[0])
        else:
            said = _visible(tokenizer.decode([guess[0].id for guess in guesses]))
        yield Sampled(job.step, hidden, said, sentence[first:last])


def _excerpt(tokenizer: Tokenizer, text: str, first: int, last: int, room: int) -> tuple[str, int, int]:
    """As many words around those characters as fit the room, and where the characters are in them."""
    begins = [word.start() for word in re.finditer(r"\S+", text) if word.start() < first][::-1]
    ends = [word.end() for word in re.finditer(r"\S+", text) if word.end() > last]
    start, end = first, last
    for left, right in itertools.zip_longest(begins, ends):
        if left is not None and len(tokenizer.encode(text[left:end])) <= room:
            start = left
        if right is not None and len(tokenizer.encode(text[start:right])) <= room:
            end = right
    return text[start:end], first - start, last - start


def _visible(text: str) -> str:
    """A text without the white space around it; in quotes if nothing else is left."""
    return text.strip() or json.dumps(text)


def _written(job: Job, context: RunContext) -> Iterator[Sampled]:
    """What the likeliest tokens make of a source, beside the target that it belongs to."""
    tokenizer, start = context.tokenizer, frame_of("encoder-decoder", context.tokenizer).start
    rng = np.random.default_rng(context.recipe.seed)
    for rows in _rows(context):
        batch = context.task.inputs(rows, rng)
        source = batch.inputs["source"][0]
        if "source_padding" in batch.inputs:
            source = source[batch.inputs["source_padding"][0]]
        labels = batch.targets["labels"][0]
        target = labels[labels != IGNORED].tolist()
        pieces = stream_text(
            job.model,
            tokenizer,
            Prompt(ids=start, source=tuple(source.tolist())),
            tokens=min(context.recipe.sample.tokens, context.recipe.model.context - len(start)),
            sampling=Sampling(temperature=0),
            seed=context.recipe.seed,
        )
        read, wanted = (
            tokenizer.decode([id for id in ids if id != tokenizer.end]) for ids in (source.tolist(), target)
        )
        yield Sampled(job.step, read, "".join(pieces), wanted)


def _rows(context: RunContext) -> Iterator[RowBatch]:
    """A few rows of the validation text, far apart: whole pairs, or the beginning of rows of text."""
    valid = context.valid.pairs if isinstance(context.valid, PackedPairs) else context.valid
    for number in range(min(_EXAMPLES, len(valid))):
        rows = valid.take(np.array([number * len(valid) // _EXAMPLES if len(valid) > _EXAMPLES else number]))
        if isinstance(valid, Pairs):
            yield rows
            continue
        short = min(_ROW, int(rows.lengths[0]))
        if short > 1:
            yield rows._replace(
                ids=rows.ids[:, : short + 1], labels=rows.labels[:, :short], documents=rows.documents[:, :short]
            )
