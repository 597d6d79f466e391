"""Rows on their way into slots: all that a device is told of them in one copy, and graphs for the sizes that return."""

# n rows that join, t prompt tokens

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from trivium.fast.graphs import Recorder, differ, own_scratch
from trivium.generation.rows import Row
from trivium.generation.sizes import bucket, close

_SIZES = 16  # that are kept captured


class Size(NamedTuple):
    """Rows that are read together, and tokens of each, filled up."""

    rows: int
    tokens: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Size:
        """Just as large as they are."""
        return cls(len(rows), max(len(row.ids) for row in rows))

    def rounded(self, longest: int) -> Size:
        """One of few sizes: rows by powers of two, tokens in steps of at least 64."""
        return Size(bucket(self.rows), min(close(self.tokens, 64), longest))


class Joining(NamedTuple):
    """What the device is told of rows that join; rows beyond the last are the first once more, in its slot."""

    ids_nt: Tensor
    ends_n: Tensor  # the place of each prompt's last token among all tokens
    lengths_n: Tensor
    slots_n: Tensor
    settings_n5: Tensor  # how each chooses

    @classmethod
    def of(cls, told: Tensor, size: Size) -> Joining:
        """The parts of what `tell` has made."""
        rows, tokens = size
        sizes = [rows * tokens, rows, rows, rows, (5 * rows + 1) // 2]
        ids, ends_n, lengths_n, slots_n, settings = torch.split(told, sizes)
        settings_n5 = settings.view(torch.float32)[: 5 * rows].view(rows, 5)
        return cls(ids.view(rows, tokens), ends_n, lengths_n, slots_n, settings_n5)

    def parts(self, most: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Ids, ends and slots of some rows after others, with at most `most` tokens unless a single row has more.

        A row that is there once more is read from its own copy: the first may be in another part.
        """
        rows, tokens = self.ids_nt.shape
        count = max(1, most // tokens)
        if rows <= count:
            return [(self.ids_nt, self.ends_n, self.slots_n)]
        at_n = torch.arange(rows, device=self.ends_n.device) % count
        own_n = self.ends_n % tokens + at_n * tokens
        return list(zip(*(torch.split(one, count) for one in (self.ids_nt, own_n, self.slots_n)), strict=True))

    def gathered(self, scores: Sequence[Tensor]) -> Tensor:
        """The scores [n, V] of all rows out of those of the parts; a row that is there once more has the first's.

        It has been read once more, maybe in a part of another size, where the last bits of its own may be others.
        """
        if len(scores) == 1:
            return scores[0]
        return torch.cat(list(scores)).index_select(0, self.ends_n // self.ids_nt.shape[1])


def tell(slots: Sequence[int], rows: Sequence[Row], settings: Sequence[Sequence[float]], size: Size) -> Tensor:
    """All of it as one row of numbers, on the host."""
    chosen = [*range(len(rows)), *[0] * (size.rows - len(rows))]
    lengths = [len(row.ids) for row in rows]
    numbers, reals = array("q"), array("f")  # several times as fast as a tensor of a list
    for row in chosen:
        numbers.extend(rows[row].ids)
        numbers.extend([0] * (size.tokens - lengths[row]))
    numbers.extend([row * size.tokens + lengths[row] - 1 for row in chosen])
    numbers.extend([lengths[row] for row in chosen])
    numbers.extend([slots[row] for row in chosen])
    for row in chosen:
        reals.extend(settings[row])
    reals.extend([0.0] * (len(reals) % 2))
    whole = torch.frombuffer(numbers, dtype=torch.long)
    return torch.cat((whole, torch.frombuffer(reals, dtype=torch.float32).view(torch.long)))


@final
class Captures:
    """Work on what the device is told, by a key: plain the first time, captured the second, from then on replayed."""

    def __init__(self, *, on: bool) -> None:
        self.on = on  # whether anything is captured
        self._uses: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[Tensor, torch.cuda.CUDAGraph]] = {}

    @property
    def kept(self) -> list[Tensor]:
        """Where graphs find what they are told."""
        return [told for told, _ in self._graphs.values()]

    def replay(self, key: Hashable, told: Tensor) -> bool:
        """Do it by its graph, if there is one."""
        self._uses[key] += 1
        known = self._graphs.get(key)
        if known is None:
            return False
        known[0].copy_(told, non_blocking=True)
        known[1].replay()
        return True

    def worth(self, key: Hashable) -> bool:
        """Whether it should be captured now: it has come before, and there is room or a much rarer one to replace.

        Without "much", more sizes than there is room for would be captured in turn for ever.
        """
        room = len(self._graphs) < _SIZES or self._uses[key] > 2 * self._uses[self._rarest()]
        return self.on and self._uses[key] > 1 and room

    def _rarest(self) -> Hashable:
        return min(self._graphs, key=lambda key: self._uses[key])

    def capture(
        self,
        key: Hashable,
        told: Tensor,
        work: Callable[[], Tensor],
        recorder: Recorder,
        restore: Callable[[], None],
    ) -> None:
        """Record `work` on `told`, and let the rarest go; it must repeat its scores, and leaves no trace."""
        with own_scratch():  # else there is one here and one on the recorder's stream, 32 MiB each on an H200
            expected = work().clone()
            restore()
        graph, found = recorder.record(work, warm=1, restore=restore)
        graph.replay()
        wrong = differ(found, expected)
        restore()
        if wrong:
            raise RuntimeError(wrong)
        while len(self._graphs) >= _SIZES:
            del self._graphs[self._rarest()]
        self._graphs[key] = (told, graph)
