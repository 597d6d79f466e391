"""Rows of a beam search that stay where they are, each with a text of its own, and one step for all of them."""

# B rows, K beams of each, N texts that join together, n wanted, L steps, S = L * K slots, W source tokens,
# G key/value heads, E head size, V vocabulary

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast, final

import torch
from torch import Tensor

from trivium.fast.graphs import Arriving, Graphs, to_device_async
from trivium.fast.hooks import any_hooks
from trivium.generation.frontier import Frontier, Rules, frontier, grow
from trivium.generation.lineage import Seen, vote
from trivium.generation.scorer import Scorer
from trivium.models.transformer import Transformer
from trivium.parts.cache import Cache
from trivium.parts.losses import split
from trivium.parts.options.attention import Shape

STEPS, WORDS = 16, 16  # graphs are made for whole multiples of so many steps and source tokens
GRAPHS = 256  # at most: each holds some megabytes of the device


class Wish(NamedTuple):
    """A text to search for: what an encoder-decoder reads, the id it begins with, and tokens at most."""

    source: tuple[int, ...]
    begin: int
    limit: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How much a pool holds."""

    rows: int
    steps: int
    words: int
    wanted: int  # finished texts kept of each


class Read(NamedTuple):
    """The beams that a model reads in a step."""

    ids: Tensor  # [B, K]
    at: Tensor  # [B, K] their positions
    seen: Tensor  # [B, K, S] which slots each may see
    keys_at: Tensor  # [1, S] the positions of those
    places: Tensor  # [B * K] where their own keys and values go, among those of all rows


class _Slots:
    """One layer's keys and values, [B, S, G, E]: each text writes its beams where its own step is."""

    def __init__(self, rows: int, slots: int, words: int, shape: Shape, like: Tensor) -> None:
        self.keys = like.new_zeros(rows, slots, shape.heads, shape.key)
        self.values = like.new_zeros(rows, slots, shape.heads, shape.value)
        self.far_keys = like.new_zeros(rows, shape.heads, words, shape.key)
        self.far_values = like.new_zeros(rows, shape.heads, words, shape.value)


class _Layer:
    """What a layer of the model finds in a step: a part of its slots."""

    def __init__(self, slots: _Slots, words: int, read: Read) -> None:
        rows, _, self._read = read.seen.shape
        self._slots, self._step = slots, read
        self.across = (slots.far_keys[:rows].narrow(2, 0, words), slots.far_values[:rows].narrow(2, 0, words))

    def append(self, key_BGKE: Tensor, value_BGKE: Tensor, start: int) -> tuple[Tensor, Tensor]:
        return self._write(self._slots.keys, key_BGKE), self._write(self._slots.values, value_BGKE)

    def _write(self, kept_BSGE: Tensor, new_BGKE: Tensor) -> Tensor:
        kept_BSGE.flatten(0, 1).index_copy_(0, self._step.places, new_BGKE.transpose(1, 2).flatten(0, 1))
        return kept_BSGE[: len(new_BGKE)].narrow(1, 0, self._read).transpose(1, 2)


class _View:
    """The cache of a step, by what a stack asks of one."""

    def __init__(self, layers: Sequence[_Layer], keys_at_1S: Tensor) -> None:
        self.layers = layers
        self.length = 0
        self._keys_at_1S = keys_at_1S

    def place(self, at_BK: Tensor) -> Tensor:
        return self._keys_at_1S


class _Padded(NamedTuple):
    """A mask over the source."""

    bias: Tensor  # [B, W] 0, or -inf where there is no token

    def within(self, window: int) -> _Padded:
        """The same: a window has no meaning across two texts."""
        return self

    def real(self, queries: int) -> Tensor | None:
        return None

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        return self.bias[:, None, None].expand(-1, 1, queries, -1)


@final
class Pool:
    """Rows for texts on the device. `search` fills them, steps until all are done, and fills them again.

    The models must outlive it: they are not kept alive by it, as the first of them keeps it.
    """

    def __init__(self, scorer: Scorer, rules: Rules, room: Room) -> None:
        self.rules, self.room = rules, room
        self.device, self.vocab = scorer.device, scorer.vocab
        self._models = [weakref.ref(model) for model in scorer.models]
        device, rows, beams = scorer.device, room.rows + 1, rules.beams  # the last one is for nobody
        self.state = frontier([1] * rows, room.steps, rules, room.wanted)
        self.state.done.fill_(True)
        self.fresh = frontier([1], room.steps, rules, room.wanted)
        self.ids_BK = torch.zeros(rows, beams, dtype=torch.long, device=device)
        self.seen_BKS = torch.zeros(rows, beams, room.steps * beams, dtype=torch.bool, device=device)
        self.beams_K = torch.arange(beams, device=device)
        self.slots_S = torch.arange(room.steps * beams, device=device)
        self.rows_B = torch.arange(rows, device=device)
        self.padded: list[Tensor] = []
        self.slots: list[list[_Slots]] = []
        for model in scorer.models:
            weight = model.embedding.weight
            assert model.decoder is not None
            self.padded.append(weight.new_zeros(rows, room.words))
            self.slots.append(
                [_Slots(rows, room.steps * beams, room.words, shape, weight) for shape in model.decoder.cache_shapes]
            )
        self.group = max(1, room.rows // 8)  # texts that join together
        self.given: dict[int, Tensor] = {}  # [N, 4 + W] what they are, by the number of source tokens
        self.graphs = Graphs(device, on=not any_hooks(*scorer.models))
        self.known: set[Hashable] = set()  # the keys of those

    @property
    def models(self) -> list[Transformer]:
        """Those that vote, or the one."""
        return [model for model in (ref() for ref in self._models) if model is not None]

    @property
    def size(self) -> int:
        """Bytes of all that the rows hold."""
        return sum(one.numel() * one.element_size() for one in self._held())

    def _held(self) -> list[Tensor]:
        layers = [layer for slots in self.slots for layer in slots]
        kept = [one for layer in layers for one in (layer.keys, layer.values, layer.far_keys, layer.far_values)]
        return [*self.state, self.ids_BK, self.seen_BKS, *self.padded, *kept]

    def _run(self, key: Hashable, work: Callable[[], None]) -> None:
        """By a graph, as long as there are not too many."""
        if len(self.known) < GRAPHS:
            self.known.add(key)
        if key in self.known:
            self.graphs.run(key, work)
        else:
            work()

    def join(self, rows: Sequence[int], wishes: Sequence[Wish]) -> int:
        """Give texts these rows; how many source tokens there are to look at."""
        words = multiple(max(len(wish.source) for wish in wishes), WORDS, self.room.words)
        filled = [
            [row, len(wish.source), wish.begin, wish.limit, *wish.source, *[0] * (words - len(wish.source))]
            for row, wish in zip(rows, wishes, strict=True)
        ]
        filled += [[self.room.rows, 1, 0, 1, *[0] * words]] * (self.group - len(filled))
        if words not in self.given:
            self.given[words] = torch.zeros(self.group, 4 + words, dtype=torch.long, device=self.device)
        given = self.given[words]
        given.copy_(to_device_async(torch.tensor(filled), self.device))
        self._run(("join", words), lambda: self._join(given))
        return words

    def _join(self, given: Tensor) -> None:
        rows_N, lengths_N, begins_N, limits_N = given[:, :4].unbind(1)
        source_NW = given[:, 4:]
        real_NW = torch.arange(source_NW.shape[1], device=given.device) < lengths_N[:, None]
        for model, padded, slots in zip(self.models, self.padded, self.slots, strict=True):
            cache = model.cache(len(given), 1)
            model(begins_N[:, None], cache=cache, source=source_NW, source_padding=real_NW)
            bias_NW = torch.zeros_like(real_NW, dtype=padded.dtype).masked_fill(~real_NW, -math.inf)
            whole_NW = bias_NW.new_full((len(given), padded.shape[1]), -math.inf)
            whole_NW.narrow(1, 0, bias_NW.shape[1]).copy_(bias_NW)
            padded.index_copy_(0, rows_N, whole_NW)
            for kept, layer in zip(slots, cache.layers, strict=True):
                assert layer.across is not None
                for far, new in zip((kept.far_keys, kept.far_values), layer.across, strict=True):
                    far.narrow(2, 0, new.shape[2]).index_copy_(0, rows_N, new)
        fresh = self.fresh._replace(limit=limits_N, most=self.rules.penalties[limits_N])
        for old, new in zip(self.state, fresh, strict=True):
            old.index_copy_(0, rows_N, new.expand(len(given), *old.shape[1:]).contiguous())
        self.state.done.index_fill_(0, self.rows_B[-1:], True)
        self.seen_BKS.index_fill_(0, rows_N, False)
        self.ids_BK.index_copy_(0, rows_N, begins_N[:, None].expand(-1, self.rules.beams).contiguous())

    def step(self, rows: int, steps: int, words: int) -> None:
        """One more token for the first rows; none of them has taken `steps` yet, nor has more source tokens."""
        steps = multiple(steps, STEPS, self.room.steps)
        self._run((rows, steps, words), lambda: self._step(rows, steps, words))

    def _step(self, rows: int, steps: int, words: int) -> None:
        beams = self.rules.beams
        state = Frontier(*(one[:rows] for one in self.state))
        now_B1 = state.steps.clamp(max=steps - 1)[:, None]  # a row that is done may have gone further
        slots_BK = now_B1 * beams + self.beams_K
        read = Read(
            ids=self.ids_BK[:rows],
            at=now_B1.expand(-1, beams),
            seen=self.seen_BKS[:rows].narrow(2, 0, steps * beams)
            | (self.slots_S[: steps * beams] == slots_BK[:, :, None]),
            keys_at=(self.slots_S[: steps * beams] // beams)[None],
            places=(self.rows_B[:rows, None] * len(self.slots_S) + slots_BK).flatten(),
        )
        scores = [
            _read(model, slots, padded[:rows].narrow(1, 0, words), read)
            for model, slots, padded in zip(self.models, self.slots, self.padded, strict=True)
        ]
        grown, ids_BK, parents_BK = grow(state, self.rules, vote(scores, self.vocab))
        for name in ("live", "score", "logprob", "length", "beam", "steps", "done", "sound"):
            getattr(state, name).copy_(getattr(grown, name))
        seen_BKS = read.seen.gather(1, parents_BK[:, :, None].expand_as(read.seen))
        self.seen_BKS[:rows].narrow(2, 0, steps * beams).copy_(seen_BKS)
        read.ids.copy_(ids_BK)

    def fetch(self, rows: Sequence[int]) -> Arriving:
        """What these rows have come to, on its way to the host."""
        rows_B = to_device_async(torch.tensor(rows), self.device)
        return Arriving([one.index_select(0, rows_B) for one in self.state])

    def move(self, rows: Sequence[int]) -> None:
        """Put these rows first, in this order."""
        rows_B = torch.tensor(rows, device=self.device)
        for one in self._held():
            one[: len(rows)] = one.index_select(0, rows_B)


def multiple(number: int, of: int, most: int) -> int:
    """The next multiple, or the most there is."""
    return min(most, -(-number // of) * of)


def _read(model: Transformer, slots: Sequence[_Slots], padded_BW: Tensor, read: Read) -> Tensor:
    """The scores [B, K, V] of what follows each beam."""
    side = model.decoder
    assert side is not None
    rows, words = padded_BW.shape
    layers = [_Layer(one, words, read) for one in slots]
    x_BKD = model.embedding(read.ids, None, lambda x: side.embed(x, read.at))
    seen = Seen(allowed=read.seen, at=read.at, keys_at=read.keys_at)
    memory = x_BKD.new_empty(rows, words, 0)  # only its length is looked at: keys and values are there
    view, across = _View(layers, read.keys_at), _Padded(padded_BW)
    hidden_BKD, _ = split(side(x_BKD, read.at, seen, cast(Cache, view), memory, across))
    return model.head.logits(hidden_BKD)
