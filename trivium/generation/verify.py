"""One row read in a slot, some tokens at a time: what speculative decoding asks on a GPU, by captured graphs."""

# T tokens at once, V vocabulary

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trivium.generation.banks import banks_of
from trivium.generation.choosing import send
from trivium.generation.rows import Request, Row
from trivium.generation.sampling import Sampling
from trivium.generation.sizes import bucket
from trivium.models.transformer import Transformer


class SlotReader:
    """As `speculative.Reader`; new tokens are filled up to `most`, so that one graph reads any number of them."""

    def __init__(self, model: Transformer, source: Sequence[int], longest: int, most: int) -> None:
        self._model, context = model, model.config.context
        two = min(bucket(len(source), 32), context) if source else 0
        with torch.inference_mode(False), torch.no_grad():  # others will use the bank outside of it
            self._bank = banks_of(model).take(model, 1, min(longest, context), two)
        self._request = Request(ids=(0,), tokens=1, sampling=Sampling(temperature=0), seed=0, source=tuple(source))
        self._most = most
        self._sound = True  # no reading was interrupted
        self.length = 0  # tokens that were read

    @property
    def device(self) -> torch.device:
        return self._bank.device

    def read(self, ids: Sequence[int], count: int) -> Tensor:
        """The scores [count, V] after each of the last `count` tokens; what was read before must be the same still."""
        self._sound = False
        with torch.inference_mode(False), torch.no_grad():
            before = len(ids) - count
            if not self.length and (before or self._request.source):  # the prompt, all but what scores are wanted of
                row = Row(0, self._request)
                row.ids = list(ids[: max(before, 1)])
                self._bank.join([0], [row])
                self.length = before
            scores_TV = self._on(ids[self.length :])
        self._sound = True
        return scores_TV[-count:]

    def _on(self, new: Sequence[int]) -> Tensor:
        """Read these tokens; the scores [T, V] after each."""
        bank = self._bank
        bank.slots.lengths_B.copy_(send([self.length], bank.device))
        fits = self.length + self._most <= bank.longest
        if len(new) == 1:
            bank.last_B.copy_(send(new, bank.device))
            scores_TV = self._replayed(1)
        elif fits and len(new) <= self._most:
            bank.tokens(self._most)[:, : len(new)] = send([new], bank.device)
            scores_TV = self._replayed(self._most)[: len(new)]
        else:
            scores_TV = bank.read_on(send([new], bank.device))[0]
        self.length += len(new)
        return scores_TV.float()

    def _replayed(self, count: int) -> Tensor:
        """The scores of a step that reads one token, or of one that reads several."""
        bank = self._bank

        def several() -> Tensor:
            return bank.read_on(bank.tokens(count))[0]

        fast, plain = (bank.scores, bank.forward) if count == 1 else (several, several)
        if bank.eager:
            return fast()
        if count not in bank.readings:
            bank.readings[count] = bank.recorded(fast, plain, lambda: None)
        graph, scores_TV = bank.readings[count]
        graph.replay()
        return scores_TV

    def forget(self, length: int) -> None:
        """Go back to so many tokens."""
        self.length = min(self.length, length)

    def close(self) -> None:
        """Others may use the slot, unless nobody knows what it holds."""
        if self._sound:
            banks_of(self._model).give(self._bank)
