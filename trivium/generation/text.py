"""Prompts in, text out: whole characters, stop strings, several samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from trivium.errors import RequestError
from trivium.generation.checks import SAMPLES, require_bool, require_whole, texts_of
from trivium.generation.engine import Request, Stream, Token, continuous, stream
from trivium.generation.sampling import Sampling
from trivium.generation.scorer import Prompt, Scorer
from trivium.generation.speculative import Speculate, speculative
from trivium.models.transformer import Transformer
from trivium.objectives.options import PAD
from trivium.text.framing import frame_of
from trivium.text.stream import TextStream
from trivium.text.tokenizer import Tokenizer

Ending = Literal["end", "length", "context", "stop"]
Alternatives = tuple[tuple[int, float], ...]
_SHOWN = 5  # languages in a refusal


class Completion(str):
    """The new text of one prompt, a string that knows how it came about.

    `ids` are the tokens whose text is at least partly in it: the END id is not, and a stop string takes the tokens
    that lie wholly behind the cut with it. `tokens` counts all that were drawn.
    """

    prompt: str
    ids: list[int]
    reason: Ending
    logprobs: list[float] | None  # one per id, or None if they were not asked for
    alternatives: list[Alternatives] | None
    tokens: int

    def __new__(
        cls,
        text: str,
        *,
        prompt: str,
        ids: list[int],
        reason: Ending,
        logprobs: list[float] | None,
        alternatives: list[Alternatives] | None,
        tokens: int,
    ) -> Completion:
        self = super().__new__(cls, text)
        self.prompt = prompt
        self.ids = ids
        self.reason = reason
        self.logprobs = logprobs
        self.alternatives = alternatives
        self.tokens = tokens
        return self


class Transcript:
    """The text of one row as its tokens arrive; it ends before the stop string that is complete first.

    `after` are the ids that it continues: a space between two words may belong to either.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        self.reason: Ending | Literal[""] = ""
        self._stop = tuple(stop)
        self._decoder = TextStream(tokenizer, after=after)
        self._drawn: list[Token] = []
        self._before: list[int] = []  # characters of text before each token
        self._length = 0  # characters of text so far
        self._sent: list[str] = []
        self._held = ""  # may be the beginning of a stop string

    def push(self, token: Token) -> str:
        """The text that is certain now; the last token (`reason` is set then) releases all of it."""
        self._drawn.append(token)
        self._before.append(self._length)
        new = "" if token.reason == "end" else self._decoder.push(token.id)
        if token.reason:
            self.reason = token.reason
            new += self._decoder.finish()
        self._length += len(new)
        text = self._held + new
        cut = first_stop(text, self._stop)
        if cut is not None:
            self.reason = "stop"
            self._length += cut - len(text)
            text = text[:cut]
        keep = 0 if self.reason else _beginning(text, self._stop)
        certain, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._sent.append(certain)
        return certain

    def completion(self, prompt: str, *, logprobs: bool) -> Completion:
        """Everything so far; call it when the row is done."""
        assert self.reason
        kept = [token for token in self._drawn if token.reason != "end"]
        if self.reason == "stop":
            kept = [token for token, before in zip(kept, self._before, strict=False) if before < self._length]
        return Completion(
            "".join(self._sent),
            prompt=prompt,
            ids=[token.id for token in kept],
            reason=self.reason,
            logprobs=[token.logprob for token in kept] if logprobs else None,
            alternatives=[token.alternatives for token in kept] if logprobs else None,
            tokens=len(self._drawn),
        )


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first (of several, the longest); None if there is none.

    Judged by where it is complete, so that the answer does not depend on how the text was cut into tokens.
    """
    found = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]
    return min(found)[1] if found else None


def _beginning(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    sizes = range(longest, 0, -1)
    return next((size for size in sizes if any(word.startswith(text[-size:]) for word in stop)), 0)


def prompt_of(scorer: Scorer, tokenizer: Tokenizer, text: str, *, language: str = "") -> Prompt:
    """What a model reads of a text before it writes: the beginning of a document, or a source and <pad>.

    A source ends in the END id, as it does in training; an empty prompt is a document that is about to begin. What a
    published tokenizer puts around its texts is around them here too. A `language` is the one that a translation is
    to be in, where the special token >>language<< in front of the source says so (opus-mt).
    """
    ids, frame = tokenizer.encode(text), frame_of(scorer.family, tokenizer)
    if scorer.family != "encoder-decoder":
        if language:
            raise RequestError(f"language: a model of the {scorer.family} family cannot translate")
        return Prompt(ids=(*frame.before, *ids) or (tokenizer.begin,))
    ids = [*_towards(tokenizer, text, language), *ids]
    if not frame.start:
        raise RequestError(
            f"the tokenizer has no special token {PAD}, which a decoder with a source starts from; load another"
        )
    return Prompt(ids=frame.start, source=(*frame.before, *ids, *frame.after))


def _towards(tokenizer: Tokenizer, text: str, language: str) -> list[int]:
    """The id of the language to translate into, if one is asked for; a text cannot ask for it by its spelling."""
    known = {name[2:-2]: id for name, id in tokenizer.specials.items() if name[:2] == ">>" and name[-2:] == "<<"}
    mark = re.match(r"\s*>>(.+?)<<", text) if known else None
    if mark and mark[1] in known:
        raise RequestError(
            f"the text begins with >>{mark[1]}<<, which would be translated as text; leave it out and give "
            f'language="{mark[1]}" to translate (--language {mark[1]})'
        )
    if not language:
        return []
    if language not in known:
        some = ", ".join(sorted(known)[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
        has = f"it has {some}" if known else "it has no languages at all, so leave it out"
        raise RequestError(f"language: the tokenizer has no special token >>{language}<<; {has}")
    return [known[language]]


def continued(tokenizer: Tokenizer, prompt: Prompt) -> Sequence[int]:
    """The ids of the text that the new one follows on: none behind a source or at the beginning of a document."""
    return () if prompt.source or {*prompt.ids} <= {tokenizer.begin, tokenizer.end} else prompt.ids


def never(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that are no text: padding. Sentinels may be written, a denoising model answers in them."""
    return frozenset({tokenizer.specials[PAD]} if PAD in tokenizer.specials else ())


def complete(
    model: Transformer | Scorer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int,
    sampling: Sampling,
    seed: int,
    n: int = 1,
    stop: Sequence[str] = (),
    stop_ids: frozenset[int] = frozenset(),
    logprobs: int = 0,
    slide: bool = False,
    rows: int = 64,
    speculate: Speculate | None = None,
) -> list[list[Completion]]:
    """`n` samples for each prompt (for an encoder-decoder: each source), decoded `rows` at a time.

    `stop_ids` end a text as the END id does. With `speculate` rows come one after another, several tokens at once.
    """
    require_whole("n", n, 1, SAMPLES, f"ask for 1 to {SAMPLES:,} samples")
    _check(stop)
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    read = [prompt_of(scorer, tokenizer, prompt) for prompt in prompts]
    wishes = [_request(prompt, tokens, sampling, seed, logprobs, stop_ids) for prompt in read]
    requests = [replace(wish, sample=sample) for wish in wishes for sample in range(n)]
    transcripts = [Transcript(tokenizer, stop, continued(tokenizer, prompt)) for prompt in read for _ in range(n)]
    # all are checked before the first is decoded; equal lengths together need no padding
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].ids + requests[index].source))
    require_bool("slide", slide)
    together = len(order) if continuous(scorer, requests, slide=slide) else rows
    chunks = [order[first : first + together] for first in range(0, len(order), max(together, 1))]
    limits: dict[str, Any] = {"end": tokenizer.end, "vocab": tokenizer.size, "banned": never(tokenizer)}
    begin: Callable[[Sequence[Request]], Stream] = partial(stream, scorer, slide=slide, rows=rows, **limits)
    if speculate is not None:
        if slide:
            raise RequestError("slide: a text that goes on beyond its context cannot be speculated; leave one out")
        begin = partial(speculative, scorer, speculate=speculate, **limits)
    streams = [begin([requests[index] for index in chunk]) for chunk in chunks]
    for chunk, decoding in zip(chunks, streams, strict=True):
        for token in decoding:
            transcript = transcripts[chunk[token.row]]
            transcript.push(token)
            if transcript.reason == "stop":
                decoding.stop(token.row)
    return [
        [transcripts[first * n + sample].completion(prompt, logprobs=logprobs > 0) for sample in range(n)]
        for first, prompt in enumerate(prompts)
    ]


def stream_text(
    model: Transformer | Scorer,
    tokenizer: Tokenizer,
    prompt: str | Prompt,
    *,
    tokens: int,
    sampling: Sampling,
    seed: int,
    stop: Sequence[str] = (),
    stop_ids: frozenset[int] = frozenset(),
    logprobs: int = 0,
    slide: bool = False,
) -> Generator[str, None, Completion]:
    """The text of `complete` piece by piece, never half a character; the generator's return value is the whole.

    A prompt may also come as ids; `stop_ids` end the text as the END id does.
    """
    _check(stop)
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    read = prompt_of(scorer, tokenizer, prompt) if isinstance(prompt, str) else prompt
    request = _request(read, tokens, sampling, seed, logprobs, stop_ids)
    require_bool("slide", slide)
    decoding = stream(scorer, [request], end=tokenizer.end, slide=slide, vocab=tokenizer.size, banned=never(tokenizer))
    transcript = Transcript(tokenizer, stop, continued(tokenizer, read))

    # a second function, so that a bad request is refused when it is made and not at the first piece
    def pieces() -> Generator[str, None, Completion]:
        try:
            for token in decoding:
                text = transcript.push(token)
                if text:
                    yield text
                if transcript.reason:
                    break
        finally:
            decoding.close()
        return transcript.completion(prompt if isinstance(prompt, str) else "", logprobs=logprobs > 0)

    return pieces()


def _request(
    prompt: Prompt, tokens: int, sampling: Sampling, seed: int, logprobs: int, stop_ids: frozenset[int]
) -> Request:
    return Request(
        ids=prompt.ids,
        source=prompt.source,
        tokens=tokens,
        sampling=sampling,
        seed=seed,
        stop_ids=stop_ids,
        logprobs=logprobs,
    )


def _check(stop: Sequence[str]) -> None:
    if isinstance(stop, str):
        raise RequestError(f"stop: {stop!r} is one string; give a list, [{stop!r}]")
    if "" in texts_of("stop", stop):
        raise RequestError('stop: "" is in every text; leave it out')
