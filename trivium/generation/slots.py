"""A model's slots: rows of different lengths in caches that stay where they are, and one step for all of them.

On a GPU the step is captured once as a graph and replayed: choosing the token and moving on are part of it, so that
the host only starts steps and reads tokens some steps later.
"""

# B slots, n rows that join, T prompt tokens, S longest length, W source tokens, V vocabulary, R steps that are kept

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from trivium.generation.choosing import Chooser, Kind, send
from trivium.generation.graphs import Recorder, differ
from trivium.generation.rows import Row
from trivium.generation.scorer import right_padded
from trivium.models.stack import PlainStack
from trivium.models.transformer import Transformer
from trivium.parts.attention import TRITON, MultiHeadAttention
from trivium.parts.cache import Cache, Slots
from trivium.parts.positions import BothPositions, Positions

if TYPE_CHECKING:
    from trivium.generation.fused import Fused

RING = 16  # steps whose tokens are kept until the host has read them
# Kernels that start before the ones in front of them are done: twice as fast and right in a chain of products on an
# H200, but not yet seen there in a whole step.
BOLD = False
_CAPTURED = 16_384  # tokens of prompts at most whose reading is captured: more would hold much memory
_SIZES = 16  # of prompts whose reading is captured


def direct(model: Transformer) -> bool:
    """Whether positions leave the scores of attention alone, so that a row's length says all about what it sees."""
    return all(map(_direct, cast("list[Positions]", list(cast(PlainStack, model.decoder).positions))))


def _direct(position: Positions) -> bool:
    if isinstance(position, BothPositions):
        return _direct(position.relative)
    kind = type(position)
    return kind.score is Positions.score and kind.bias is Positions.bias and not position.values


def able(model: Transformer) -> bool:
    """Whether a model can be decoded in slots: not one with windows and biases at once."""
    return model.decoder is not None and (direct(model) or not any(model.decoder.windows))


class Landing(NamedTuple):
    """Tokens on their way to the host."""

    tokens: Tensor  # [R, B]
    event: torch.cuda.Event | None

    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[list[int]]:
        """The last R steps' ids of every slot, by the number of the step modulo R."""
        if self.event is not None:
            self.event.synchronize()
        result: list[list[int]] = self.tokens.tolist()
        return result


class Bank:
    """The state of `slots` rows of one model, of at most `longest` tokens each, and the steps that move it on.

    It holds the model weakly: the model keeps it.
    """

    def __init__(self, model: Transformer, slots: int, longest: int, source: int) -> None:
        device, decoder = model.device, cast(PlainStack, model.decoder)
        self._model, self.device, self.longest = weakref.ref(model), device, longest
        self.key: Hashable = None  # what its graphs depend on
        kernels = device.type == "cuda" and TRITON
        self.slots = Slots(slots, longest, device, direct=direct(model), kernel=kernels)
        shapes, dtype = decoder.cache_shapes, model.embedding.weight.dtype
        self.cache = Cache(slots, longest, shapes, device, dtype, self.slots, decoder.windows)
        self.chooser = Chooser(slots, model.config.vocab, longest, device)
        self.last_B = torch.zeros(slots, device=device, dtype=torch.long)  # drawn, but not read by the model yet
        self.active_B = torch.zeros(slots, device=device, dtype=torch.long)
        self.ring_RB = torch.zeros(RING, slots, device=device, dtype=torch.long)
        self.count_B = torch.zeros(slots, device=device, dtype=torch.long)  # steps so far, the same in every row
        self.written = 0  # what `count` is on the device
        self._landings: list[Tensor] = []
        self._recorder = Recorder()
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self.readings: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # graphs that read so many tokens
        self._tokens: dict[int, Tensor] = {}
        self._read: dict[tuple[int, int], tuple[list[Tensor], torch.cuda.CUDAGraph, Tensor] | None] = {}
        self._fused: Fused | None = None
        self._reads: bool | None = None  # whether fused kernels read prompts right; None before the first
        if source:
            self._open_sources(slots, source, dtype)
        if kernels and not torch.is_autocast_enabled("cuda"):
            from trivium.generation.fused import Fused, recognised  # triton is not everywhere

            if recognised(model):
                self._fused = Fused(model, self.cache, self.slots, self.last_B)
                self._fused.bold = BOLD and torch.cuda.get_device_capability(device) >= (9, 0)

    @property
    def model(self) -> Transformer:
        model = self._model()
        assert model is not None
        return model

    def refresh(self) -> None:
        """Before the bank is used again: no step was made, and the weights may have changed where they lie."""
        self.count_B.zero_()
        self.written = 0
        if self._fused is not None:
            self._fused.refresh()

    def _open_sources(self, slots: int, source: int, dtype: torch.dtype) -> None:
        """Room for the keys and values of every row's source; the encoder's output itself is not needed again."""
        for layer, block in zip(self.cache.layers, cast(PlainStack, self.model.decoder).blocks, strict=True):
            part = cast(MultiHeadAttention, block.cross)
            shape = (slots, part.groups, source)
            layer.across = (
                torch.zeros(*shape, part.size, device=self.device, dtype=dtype),
                torch.zeros(*shape, part.value_size, device=self.device, dtype=dtype),
            )
        width = self.model.config.width
        self.cache.memory = torch.zeros(1, 1, 1, device=self.device, dtype=dtype).expand(slots, source, width)
        self.cache.memory_padding = torch.zeros(slots, source, device=self.device, dtype=torch.bool)
        self.cache.memory_padding[:, 0] = True  # an empty slot too must see something: nothing at all gives nan

    def forward(self) -> Tensor:
        """Read the last token of every row; the scores [B, V] of what follows."""
        return self.read_on(self.last_B[:, None])[:, 0]

    def read_on(self, tokens_BT: Tensor) -> Tensor:
        """Read new tokens of every row behind its length; the scores [B, T, V] of what follows each."""
        new = tokens_BT.shape[1]
        places_BT = self.slots.places(new)
        self.cache.length = self.longest - new  # as if every row were full: shapes stay the same at every step
        assert self.slots.direct or new == 1  # a mask from outside has one line for all new tokens
        inputs = {} if self.slots.direct else {"padding": self.slots.at_1S <= places_BT}
        states = self.model(tokens_BT, positions=places_BT, cache=self.cache, **inputs)
        return self.model.head.logits(states.hidden)

    def tokens(self, count: int) -> Tensor:
        """Where graphs that read so many tokens find them, [B, T]."""
        if count not in self._tokens:
            self._tokens[count] = torch.zeros(len(self.last_B), count, device=self.device, dtype=torch.long)
        return self._tokens[count]

    def finish(self, logits_BV: Tensor, kind: Kind) -> None:
        """Choose, keep the tokens for the host, and move every row on."""
        ids_B = self.chooser.choose(logits_BV, kind)
        self.last_B.copy_(ids_B.clamp(min=0))
        self._keep(ids_B)
        lengths_B = self.slots.lengths_B
        lengths_B.copy_((lengths_B + 1).clamp(max=self.longest - 1) * self.active_B)

    def _keep(self, ids_B: Tensor) -> None:
        self.ring_RB.scatter_(0, (self.count_B % RING)[None], ids_B[None])
        self.count_B.add_(1)

    def scores(self) -> Tensor:
        """As `forward`, by the fastest way that is known to be right."""
        return self.forward() if self._fused is None else self._fused.forward()

    def advance(self, kind: Kind) -> Tensor:
        """One more token for every row; the scores that it was chosen by."""
        logits_BV = self.scores()
        if not self.slots.kernel or any(kind):
            self.finish(logits_BV, kind)
            return logits_BV
        from trivium.parts.kernels.step import move

        state = (self.last_B, self.slots.lengths_B, self.active_B, self.ring_RB, self.count_B)
        early = self._fused is not None and self._fused.bold
        move(logits_BV, self.chooser.shut_V, *state, self.longest, early=early)
        return logits_BV

    def step(self, kind: Kind) -> None:
        """One more token for every row; on a GPU the host does not wait for it."""
        self.written += 1
        if self.device.type != "cuda":
            self.advance(kind)
            return
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(kind)
        self._graphs[kind].replay()

    def ready(self, kind: Kind) -> bool:
        """Whether such a step only has to be replayed."""
        return kind in self._graphs

    def _capture(self, kind: Kind) -> torch.cuda.CUDAGraph:
        """Record a step; those before it, in which kernels are compiled and compared, leave no trace."""
        state = [self.slots.lengths_B, self.last_B, self.ring_RB, self.count_B]
        state += [self.chooser.drawn_B, self.chooser.seen_BV]
        kept = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)  # keys and values need not: the real step writes the same ones again

        graph, _ = self.recorded(lambda: self.advance(kind), self.forward, restore)
        return graph

    def recorded(
        self, work: Callable[[], Tensor], plain: Callable[[], Tensor], restore: Callable[[], None]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of `work` and its scores, by the fastest way whose scores are those of `plain`, up to rounding."""
        kernel, self.slots.kernel = self.slots.kernel, False
        expected = plain()
        self.slots.kernel = kernel
        while True:
            try:
                graph, found = self._recorder.record(work, warm=2, restore=restore)
                wrong = ""
                for _ in range(3):
                    graph.replay()
                    wrong = wrong or differ(found, expected)
                    restore()
            except Exception as error:  # whatever a compiler may raise
                if not self._retreat(f"{type(error).__name__}: {error}"):
                    raise
                continue
            if not wrong or not self._retreat(wrong):
                return graph, found

    def _retreat(self, wrong: str) -> bool:
        """Go on by a slower way: kernels one after another, the model without any of ours; False after that."""
        if self._fused is not None and self._fused.bold:
            self._fused.bold = False
        elif self._fused is not None:
            self._fused = None
        elif self.slots.kernel:
            self.slots.kernel = False
        else:
            return False
        # what was captured with it would read memory that is free now
        self._graphs, self.readings, self._read, self._recorder = {}, {}, {}, Recorder()
        warnings.warn(f"fast decoding does not work here, a slower way is taken: {wrong[:300]}", stacklevel=2)
        return True

    def join(self, slots: Sequence[int], rows: Sequence[Row]) -> None:
        """Read the prompts of new rows together and choose the first token of each, as one step."""
        index_n = send(list(slots), self.device)
        self.chooser.join(slots, rows)
        lengths = [len(row.ids) for row in rows]
        kind = Kind.of([row.request.sampling for row in rows])
        fused = self._fused
        if fused is None or self._reads is False or not fused.reads(bucket(max(lengths), 16)):
            logits_nV = self._plainly(index_n, rows)
        else:
            logits_nV = self._quickly(fused, slots, rows)
        ids_n = self.chooser.choose(logits_nV, kind, index_n)
        self.slots.lengths_B[index_n] = send(lengths, self.device)
        self.active_B[index_n] = 1
        self.last_B[index_n] = ids_n.clamp(min=0)
        self._keep(self.last_B.index_copy(0, index_n, ids_n))
        self.written += 1

    def _plainly(self, index_n: Tensor, rows: Sequence[Row]) -> Tensor:
        """Read prompts by the model itself into an ordinary cache, and copy that; the scores [n, V] behind them."""
        tokens_nT, _ = right_padded([row.ids for row in rows], self.device)
        cache = self.model.cache(len(rows), tokens_nT.shape[1])
        inputs: dict[str, Any] = {}
        if self.cache.memory_padding is not None:
            inputs["source"], inputs["source_padding"] = right_padded([row.request.source for row in rows], self.device)
        # padding behind a row needs no mask: nothing before it sees it, and what is written later covers it
        states = self.model(tokens_nT, cache=cache, **inputs)
        self._copy(cache, index_n)
        lengths_n = send([len(row.ids) for row in rows], self.device)
        return self.model.head.logits(states.hidden[torch.arange(len(rows), device=self.device), lengths_n - 1])

    def _quickly(self, fused: Fused, slots: Sequence[int], rows: Sequence[Row]) -> Tensor:
        """As `_plainly`, by fused kernels; the first prompts both ways, so that what is fast is known to be right."""
        index_n, shortest = send(list(slots), self.device), min(len(row.ids) for row in rows)
        last = self.cache.layers[-1]
        try:
            found_nV = self._prompts(fused, slots, rows)
            if self._reads:
                return found_nV
            found = [kept[index_n, :, :shortest].clone() for kept in (last.keys, last.values)]
            wrong = ""
        except Exception as error:  # whatever a compiler may raise
            wrong = f"{type(error).__name__}: {error}"
        expected_nV = self._plainly(index_n, rows)
        if not wrong:
            expected = [kept[index_n, :, :shortest] for kept in (last.keys, last.values)]
            pairs = zip([found_nV, *found], [expected_nV, *expected], strict=True)
            wrong = next(filter(None, (differ(*pair) for pair in pairs)), "")
        if wrong:
            warnings.warn(f"fast reading does not work here, a slower way is taken: {wrong[:300]}", stacklevel=2)
        self._reads = not wrong
        return expected_nV

    def _prompts(self, fused: Fused, slots: Sequence[int], rows: Sequence[Row]) -> Tensor:
        """Read prompts straight into their slots; sizes that come again are captured as a graph."""
        count = bucket(len(rows))
        tokens = min(bucket(max(len(row.ids) for row in rows), 16), self.longest)
        # rows beyond the last repeat the first, in its slot: they write what it writes
        chosen = [*range(len(rows)), *[0] * (count - len(rows))]
        ids = [[*rows[row].ids, *[0] * (tokens - len(rows[row].ids))] for row in chosen]
        given = [
            send(ids, self.device),
            torch.arange(tokens, device=self.device).repeat(count),
            send([len(rows[row].ids) for row in chosen], self.device),
            send([slots[row] for row in chosen], self.device),
        ]
        key = (count, tokens)
        known = self._read.get(key)
        if known is None:
            full = count * tokens > _CAPTURED or sum(map(bool, self._read.values())) >= _SIZES
            if key not in self._read or full or self.device.type != "cuda":
                self._read[key] = None
                return fused.read(*given)[: len(rows)]
            expected_nV = fused.read(*given)
            known = (given, *self._recorder.record(lambda: fused.read(*given), warm=2))
            known[1].replay()
            if wrong := differ(known[2], expected_nV):
                raise RuntimeError(wrong)
            self._read[key] = known
        inputs, graph, logits_nV = known
        for kept, new in zip(inputs, given, strict=True):
            kept.copy_(new)
        graph.replay()
        return logits_nV[: len(rows)]

    def _copy(self, cache: Cache, index_n: Tensor) -> None:
        """Bring what an ordinary cache has read to the slots."""
        for layer, read in zip(self.cache.layers, cache.layers, strict=True):
            layer.keys[index_n, :, : read.keys.shape[2]] = read.keys
            layer.values[index_n, :, : read.values.shape[2]] = read.values
            if layer.across is not None and read.across is not None:
                for kept_BGWE, new_nGwE in zip(layer.across, read.across, strict=True):
                    kept_BGWE[index_n, :, : new_nGwE.shape[2]] = new_nGwE
        if self.cache.memory_padding is not None and cache.memory is not None:
            real_nW = torch.zeros_like(self.cache.memory_padding[: len(index_n)])
            real_nW[:, : cache.memory.shape[1]] = True if cache.memory_padding is None else cache.memory_padding
            self.cache.memory_padding[index_n] = real_nW

    @property
    def bytes(self) -> int:
        """What it keeps on the device: slots and sources, settings, copies of weights, the memory of graphs."""
        parts = (self, self.slots, self.chooser, self.cache, *self.cache.layers)
        kept = [one for part in parts for one in vars(part).values() if isinstance(one, Tensor)]
        kept += [one for layer in self.cache.layers for one in layer.across or ()]
        kept += [one for known in self._read.values() if known is not None for one in known[0]]
        kept += [] if self._fused is None else self._fused.copies
        # by their storage: the encoder's output is one number, expanded
        return self._recorder.bytes + sum(one.untyped_storage().nbytes() for one in kept)

    def leave(self, slots: Sequence[int]) -> None:
        """Rows that are done: their slots idle at length 0 until others join there."""
        self.active_B[send(list(slots), self.device)] = 0

    def read(self) -> Landing:
        """Start to bring the latest tokens to the host."""
        if self.device.type != "cuda":
            return Landing(self.ring_RB.clone(), None)
        host_RB = self._landings.pop() if self._landings else torch.empty(self.ring_RB.shape, dtype=torch.long)
        host_RB = host_RB if host_RB.is_pinned() else host_RB.pin_memory()
        host_RB.copy_(self.ring_RB, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Landing(host_RB, event)

    def give_back(self, landing: Landing) -> None:
        """The host has read these tokens."""
        self._landings.append(landing.tokens)


def bucket(size: int, least: int = 1) -> int:
    """The next power of two: few sizes mean few graphs."""
    return max(least, 1 << (size - 1).bit_length())
