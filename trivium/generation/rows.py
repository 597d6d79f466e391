"""What decoding is asked for, what it gives, and what one row has come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from trivium.errors import RequestError
from trivium.generation.checks import TOKENS, require_whole
from trivium.generation.sampling import Sampling, Uniforms
from trivium.generation.scorer import Prompt

Reason = Literal["", "end", "length", "context"]

_SEEDS = 2**128


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One row to decode; its tokens depend on nothing else in the batch."""

    ids: tuple[int, ...]  # the prompt, at least one id: an empty one is the END id alone, behind a source it is <pad>
    tokens: int  # new tokens at most
    sampling: Sampling
    seed: int
    sample: int = 0  # the number of this row among several samples of one prompt
    stop_ids: frozenset[int] = frozenset()  # these end the row as the END id does
    logprobs: int = 0  # 0 none; n: the chosen token's and those of the n likeliest others
    source: tuple[int, ...] = ()  # what an encoder-decoder writes from

    def __post_init__(self) -> None:
        if not self.ids:
            raise RequestError("the prompt has no tokens; begin an empty one with the END id")
        require_whole("tokens", self.tokens, 1, TOKENS, f"ask for 1 to {TOKENS:,} new tokens")
        require_whole("logprobs", self.logprobs, 0, None, "0 gives none")
        require_whole("seed", self.seed, -_SEEDS, _SEEDS, "any whole number of 128 bits will do")

    @property
    def prompt(self) -> Prompt:
        """What the model reads before it writes."""
        return Prompt(ids=self.ids, source=self.source)


class Token(NamedTuple):
    """One new token; `reason` is set on a row's last one. With the reason "end" the token is not part of the text."""

    row: int
    id: int
    logprob: float  # of the model itself, before any filter; nan unless the request asks for logprobs
    alternatives: tuple[tuple[int, float], ...]  # (id, logprob) of the likeliest other tokens, best first
    reason: Reason


class Row:
    """What one request has come to."""

    __slots__ = ("done", "ids", "index", "left", "request", "start", "uniforms")

    def __init__(self, index: int, request: Request) -> None:
        self.index = index
        self.request = request
        self.ids = list(request.ids)  # prompt and new tokens
        self.start = 0  # the first id that the model still sees
        self.left = request.tokens
        self.done = False
        self.uniforms = Uniforms(request.seed, request.sample)

    def add(self, id: int, end: int | None, context: int) -> Reason:
        """Take a new token; the reason if it is the last."""
        self.ids.append(id)
        self.left -= 1
        reason: Reason = ""
        if id == end or id in self.request.stop_ids:
            reason = "end"
        elif not self.left:
            reason = "length"
        elif context and len(self.ids) - self.start >= context:
            reason = "context"
        self.done = bool(reason)
        return reason
