"""Texts in, the best texts out: beam search for translation and for continuations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from trivium.errors import RequestError
from trivium.generation.beam import Beam, Found, Search, poolable, search
from trivium.generation.checks import TOKENS, require_whole, text_of
from trivium.generation.scorer import Prompt, Scorer
from trivium.generation.text import continued, never, prompt_of
from trivium.models.transformer import Transformer
from trivium.text.stream import TextStream
from trivium.text.tokenizer import Tokenizer

_FIRST, _LARGEST = 4, 1024  # texts of the first portion, and of the largest
BEYOND = 50  # a translation has at most so many tokens more than its source (Vaswani)


class Hypothesis(str):
    """A text that beam search has found: a string that knows its ids, its log-probability and its score."""

    ids: list[int]
    logprob: float  # of all its tokens, the END included
    score: float  # with the penalties for length and coverage: what it was ranked by
    reason: Literal["end", "length", "context"]

    def __new__(cls, text: str, found: Found) -> Hypothesis:
        self = super().__new__(cls, text)
        self.ids, self.logprob, self.score, self.reason = found
        return self


def search_texts(
    model: Transformer | Scorer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    beam: Beam,
    tokens: int = 0,
    language: str = "",
    stop_ids: frozenset[int] = frozenset(),
    rows: int = 0,
    tick: Callable[[int, int], None] = lambda done, of: None,
    each: Callable[[list[Hypothesis]], None] | None = None,
) -> list[list[Hypothesis]]:
    """The `beam.n` best translations (of a decoder: continuations) of each text, best first.

    `tokens` at most, 0 means 50 more than the source has; `language` is the one to translate into, of those that the
    tokenizer has as >>language<<; `stop_ids` end a text as the END id does; `rows` beams are decoded at a time, 0 means
    what suits the device; `tick` hears how many texts are done. With `each` the texts are searched in growing portions,
    and it is called with the best of every text, in the order of the texts, when its portion is done.
    """
    require_whole("tokens", tokens, 0, TOKENS, "0 means 50 more than the source has")
    require_whole("rows", rows, 0, None, "0 means what suits the device")
    text_of("language", language)
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    prompts = [prompt_of(scorer, tokenizer, text, language=language) for text in texts]
    _check(scorer, tokenizer, prompts)
    searches = [Search(prompt=prompt, tokens=tokens or len(prompt.source) + BEYOND) for prompt in prompts]
    together = max(1, (rows or (64 if scorer.device.type == "cpu" else 512)) // beam.beams)
    if not rows and poolable(scorer, searches, beam):
        together = max(1, len(prompts))  # there texts join as others leave
    found: dict[int, list[Found]] = {}
    done = 0

    def more(texts: int) -> None:
        nonlocal done
        done += texts
        tick(done, len(prompts))

    answers: list[list[Hypothesis]] = []
    for window in _windows(len(prompts)) if each is not None else [range(len(prompts))]:
        # equal lengths together need no padding, and end at about the same time
        order = sorted(window, key=lambda index: len(prompts[index].ids + prompts[index].source))
        for first in range(0, len(order), together):
            chunk = order[first : first + together]
            best = search(
                scorer,
                [searches[index] for index in chunk],
                beam,
                end=tokenizer.end,
                stop_ids=stop_ids,
                vocab=tokenizer.size,
                banned=never(tokenizer),
                tick=more,
            )
            found |= zip(chunk, best, strict=True)
        for index in window:
            prompt = prompts[index]
            answers.append([Hypothesis(_text(tokenizer, prompt, item.ids), item) for item in found.pop(index)])
            if each is not None:
                each(answers[-1])
    return answers


def _windows(count: int) -> Iterator[range]:
    """The numbers from 0 to `count` in portions: small ones first, so that somebody who waits sees the first soon."""
    first, size = 0, _FIRST
    while first < count:
        yield range(first, min(first + size, count))
        first, size = first + size, min(2 * size, _LARGEST)


def _check(scorer: Scorer, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> None:
    """All of them before the first is decoded, and of many by its number."""
    for number, prompt in enumerate(prompts, start=1):
        try:
            scorer.check([prompt], min(tokenizer.size, scorer.vocab))
        except RequestError as error:
            raise RequestError(f"text {number}: {error}" if len(prompts) > 1 else str(error)) from None


def _text(tokenizer: Tokenizer, prompt: Prompt, ids: Sequence[int]) -> str:
    stream = TextStream(tokenizer, after=continued(tokenizer, prompt))
    return "".join(map(stream.push, ids)) + stream.finish()
