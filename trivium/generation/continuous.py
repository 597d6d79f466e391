"""Continuous batching: requests join and leave a running batch, each decoded as if it were alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from trivium.errors import CheckpointError, RequestError
from trivium.fast.graphs import Landing, is_current_gpu
from trivium.generation.banks import banks_of
from trivium.generation.choosing import Kind
from trivium.generation.rows import Request, Row, Token
from trivium.generation.scorer import Scorer, evaluating
from trivium.generation.sizes import bucket
from trivium.generation.slots import RING, Bank, able
from trivium.generation.supports import require_slots
from trivium.models.transformer import Transformer
from trivium.parts.sharded import is_sharded

_PREFILL = 32_768  # prompt tokens, padding included, that are read at once


def slotted(scorer: Scorer, requests: Sequence[Request]) -> bool:
    """Whether these can be decoded in slots: one whole model that `able` takes, no log-probabilities.

    On a GPU it must be the one in use.
    """
    if scorer.device.type == "cuda" and not is_current_gpu(scorer.device):
        return False
    if any(is_sharded(parameter) for model in scorer.models for parameter in model.parameters()):
        return False
    one = len(scorer.models) == 1 and scorer.family != "encoder" and able(scorer.models[0])
    return one and not any(request.logprobs for request in requests)


@dataclass(slots=True)
class _Live:
    """A row in a slot; `left` tokens of it are not even under way."""

    row: Row
    slot: int
    left: int


@dataclass(frozen=True, slots=True)
class _Flight:
    """Steps that were started: which tokens of theirs belong to whom."""

    landing: Landing
    first: int  # the number of the first step
    rows: list[tuple[int, Row, int]]  # slot, row, how many steps are its own


class Engine:
    """A running batch of at most `slots` rows: `submit` and `cancel` at any time, `step` for the next tokens.

    A row has at most `longest` tokens with its prompt, 0 means the model's context; a source at most `source`.
    `burst` steps are started at once; their tokens come while the next ones run.
    """

    def __init__(
        self,
        model: Transformer | Scorer,
        *,
        end: int | None,
        slots: int = 64,
        longest: int = 0,
        source: int = 0,
        vocab: int = 0,
        banned: Collection[int] = (),
        burst: int = 4,
    ) -> None:
        self._scorer = model if isinstance(model, Scorer) else Scorer(model)
        if not slotted(self._scorer, ()):
            for one in self._scorer.models:
                require_slots(one)
            raise RequestError(
                "several models, windows together with biases, a layer that does not attend to the source, or a GPU "
                "that is not the one in use: "
                "these are not decoded in slots; use stream"
            )
        if slots < 1 or not 1 <= burst <= RING:
            raise RequestError(f"slots: {slots} is less than 1, or burst: {burst} is not from 1 to {RING}")
        self._model = self._scorer.models[0]
        self._vocab = min(vocab or self._scorer.vocab, self._scorer.vocab)
        self._banned, self._end, self._burst = banned, end, burst
        context = self._scorer.context
        self._longest = min(longest or context, context)
        two = self._scorer.family == "encoder-decoder"
        self._size = (
            bucket(slots),
            self._longest,
            min(bucket(source or context, 32), context) if two else 0,
        )
        self._bank: Bank | None = None
        self._free = list(range(slots))[::-1]
        self._waiting: deque[Row] = deque()
        self._live: dict[int, _Live] = {}  # by id
        self._flights: deque[_Flight] = deque()
        self._next = 0
        self._sound = True  # no step was interrupted: the bank is what it is thought to be

    @property
    def busy(self) -> bool:
        """Whether tokens are still to come."""
        return bool(self._waiting or self._live or self._flights)

    def submit(self, request: Request) -> int:
        """Put a request in the queue; its tokens will have this number as their row."""
        self._scorer.check([request.prompt], self._vocab)
        if request.logprobs:
            raise RequestError("logprobs are not given by the running batch; ask `stream` for them")
        if len(request.ids) >= self._longest:
            raise RequestError(
                f"the prompt has {len(request.ids)} tokens, a row holds {self._longest} with the new ones; shorten it"
            )
        if len(request.source) > self._size[2] > 0:
            raise RequestError(f"the source has {len(request.source)} tokens, a row holds {self._size[2]}; shorten it")
        self._waiting.append(Row(self._next, request))
        self._next += 1
        return self._next - 1

    def cancel(self, id: int) -> None:
        """No more tokens for this request, whatever it has come to."""
        self._waiting = deque(row for row in self._waiting if row.index != id)
        if id in self._live:
            self._release(self._live[id])
        for flight in self._flights:
            for _, row, _ in flight.rows:
                row.done = row.done or row.index == id

    def step(self) -> list[Token]:
        """Start the next steps and return the tokens of earlier ones; empty while nothing has come back yet."""
        sound, self._sound = self._sound, False
        # not inference_mode, even if the caller is in it: what lives from step to step is written outside of it too
        with torch.inference_mode(False), torch.no_grad():
            started = self._admit()
            started = self._launch() or started
        tokens: list[Token] = []
        # one flight stays in the air while the host looks at the one before it
        while self._flights and (not started or len(self._flights) > 1 or self._flights[0].landing.ready()):
            tokens += self._land(self._flights.popleft())
            started = True
        self._sound = sound
        if not self.busy:
            self.close()
        return tokens

    def close(self) -> None:
        """Forget all requests and free the slots."""
        self._waiting.clear()
        self._free += [live.slot for live in self._live.values()]
        self._live.clear()
        self._flights.clear()
        bank, self._bank = self._bank, None
        if bank is not None and self._sound:
            banks_of(self._model).give(bank)
        self._sound = True

    def _admit(self) -> bool:
        """Give free slots to the first of those that wait."""
        if not self._waiting or not self._free:
            return False
        if self._bank is None:
            self._bank = banks_of(self._model).take(self._model, *self._size)
            self._bank.chooser.shut(self._vocab, self._banned)
        while self._waiting and self._free:
            joining: list[_Live] = []
            widest = 0
            while self._waiting and self._free:
                row = self._waiting[0]
                widest = max(widest, len(row.ids), len(row.request.source))
                if joining and widest * (len(joining) + 1) > _PREFILL:
                    break
                left = min(row.left, self._longest - len(row.ids))
                joining.append(_Live(self._waiting.popleft(), self._free.pop(), left))
            first = self._bank.written
            try:
                self._bank.join([live.slot for live in joining], [live.row for live in joining])
            except BaseException:  # they wait again, with all their random numbers
                self._free += [live.slot for live in reversed(joining)]
                self._waiting.extendleft(Row(live.row.index, live.row.request) for live in reversed(joining))
                raise
            self._live |= {live.row.index: live for live in joining}
            self._fly(first, 1, joining)
        return True

    def _launch(self) -> bool:
        """Start some steps for all live rows."""
        if not self._live:
            return False
        assert self._bank is not None
        live = list(self._live.values())
        steps = min(self._burst, max(one.left for one in live))
        kind = Kind.of({one.row.request.sampling for one in live})
        first = self._bank.written
        # a graph was captured without dropout, and going through all modules takes longer than a step
        with nullcontext() if self._bank.ready(kind) else evaluating(self._model):
            for _ in range(steps):
                self._bank.step(kind)
        self._fly(first, steps, live)
        return True

    def _fly(self, first: int, steps: int, live: Sequence[_Live]) -> None:
        """Note whose tokens are under way; who will be full with them leaves its slot to others now."""
        assert self._bank is not None
        rows = [(one.slot, one.row, min(one.left, steps)) for one in live]
        self._flights.append(_Flight(self._bank.read(), first, rows))
        for one in live:
            one.left -= min(one.left, steps)
        self._release(*(one for one in live if not one.left))

    def _release(self, *live: _Live) -> None:
        if not live:
            return
        assert self._bank is not None
        self._bank.leave([one.slot for one in live])
        for one in live:
            del self._live[one.row.index]
            self._free.append(one.slot)

    def _land(self, flight: _Flight) -> list[Token]:
        """The tokens of steps that are over; what was drawn behind a row's end is thrown away."""
        assert self._bank is not None
        ids = flight.landing.wait()
        self._bank.give_back(flight.landing)
        tokens: list[Token] = []
        for step in range(max(count for _, _, count in flight.rows)):
            drawn = ids[(flight.first + step) % RING]
            for slot, row, count in flight.rows:
                if row.done or step >= count:
                    continue
                id = drawn[slot]
                if id < 0:
                    raise CheckpointError(
                        "the model's scores are not finite; its weights are damaged, load an older checkpoint"
                    )
                reason = row.add(id, self._end, self._longest)
                tokens.append(Token(row.index, id, math.nan, (), reason))
                if reason and row.index in self._live:
                    self._release(self._live[row.index])
        return tokens
