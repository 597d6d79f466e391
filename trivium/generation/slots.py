"""A model's slots: rows of different lengths in caches that stay where they are, and one step for all of them.

On a GPU the step is captured once as a graph and replayed: choosing the token and moving on are part of it, so that
the host only starts steps and reads tokens some steps later.
"""

# B slots, n rows that join, T prompt tokens, S longest length, W source tokens, V vocabulary, R steps that are kept

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from trivium.fast.cache import KernelCache
from trivium.fast.graphs import Landing, Recorder, differ
from trivium.fast.hooks import any_hooks
from trivium.generation.choosing import Chooser, Kind, send
from trivium.generation.prompts import Captures, Joining, Size, tell
from trivium.generation.rows import Row
from trivium.generation.scorer import evaluating, right_padded
from trivium.generation.supports import supports_slots
from trivium.kernels.hardware import TRITON
from trivium.models.stack import PlainStack
from trivium.models.transformer import Transformer
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.cache import Cache, LayerCache, Slots
from trivium.parts.positions import BothPositions, Positions

if TYPE_CHECKING:
    from trivium.generation.fused import Fused

RING = 16  # steps whose tokens are kept until the host has read them
# Kernels that start before the ones in front of them are done: on an H200 GPT-2's step took 210 us instead of 248,
# TinyLlama's 797 instead of 958, and 300 replays gave the same bits.
BOLD = True
_CAPTURED = 16_384  # tokens of prompts at most whose reading is captured: more would hold much memory
_PART = 2048  # tokens that go through the layers together: by count, 8,192 of GPT-2 need 189 MB of scratch, these 47
_LARGE = 8192  # without a graph: the host, which starts kernel after kernel, might not keep up with smaller parts


def direct(model: Transformer) -> bool:
    """Whether a row's length says all about what it sees: attention asks the cache, positions leave scores alone."""
    decoder = cast(PlainStack, model.decoder)
    if not all(isinstance(getattr(block, "attention", None), MultiHeadAttention) for block in decoder.blocks):
        return False  # a mixer of another package looks at the mask
    return all(map(_direct, cast("list[Positions]", list(decoder.positions))))


def _direct(position: Positions) -> bool:
    if isinstance(position, BothPositions):
        return _direct(position.relative)
    kind = type(position)
    return kind.score is Positions.score and kind.bias is Positions.bias and not position.values


def able(model: Transformer) -> bool:
    """Whether a model can be decoded in slots: its mixers obey masks, and it has not windows and biases at once."""
    if model.decoder is None or not supports_slots(model):
        return False
    return direct(model) or not any(model.decoder.windows)


class Bank:
    """The state of `slots` rows of one model, of at most `longest` tokens each, and the steps that move it on.

    It holds the model weakly: the model keeps it.
    """

    def __init__(self, model: Transformer, slots: int, longest: int, source: int) -> None:
        device, decoder = model.device, cast(PlainStack, model.decoder)
        self._model, self.device, self.longest = weakref.ref(model), device, longest
        self.key: Hashable = None  # what its graphs depend on
        # a captured graph would call hooks no more
        self.eager = device.type != "cuda" or any_hooks(model)
        self.slots = Slots(slots, longest, device)
        self.cache = decoder.cache(slots, longest, model.embedding.weight, self.slots)
        kernels = not self.eager and TRITON and all(isinstance(layer, KernelCache) for layer in self.cache.layers)
        self.kernel = kernels and direct(model)
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
        self._read = Captures(on=not self.eager)  # graphs that read prompts
        self._fused: Fused | None = None
        self._reads: bool | None = None  # whether fused kernels read prompts right; None before the first
        if source:
            self._open_sources(slots, source, model.embedding.weight.dtype)
        if kernels and not torch.is_autocast_enabled("cuda"):
            from trivium.generation.fused import Fused, recognised  # triton is not everywhere

            if recognised(model):
                self._fused = Fused(model, self.cache, self.slots, self.last_B)
                self._fused.bold = BOLD and torch.cuda.get_device_capability(device) >= (9, 0)

    @property
    def kernel(self) -> bool:
        """Whether attention goes by the decoding kernel where that fits."""
        return self._kernel

    @kernel.setter
    def kernel(self, on: bool) -> None:
        self._kernel = on
        for layer in self.cache.layers:
            if isinstance(layer, KernelCache):
                layer.on = on

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
        states = self.model(tokens_BT, positions=places_BT, cache=self.cache)
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
        if not self.kernel or any(kind):
            self.finish(logits_BV, kind)
            return logits_BV
        from trivium.kernels.step import move

        state = (self.last_B, self.slots.lengths_B, self.active_B, self.ring_RB, self.count_B)
        early = self._fused is not None and self._fused.bold
        move(logits_BV, self.chooser.shut_V, *state, self.longest, early=early)
        return logits_BV

    def step(self, kind: Kind) -> None:
        """One more token for every row; on a GPU the host does not wait for it."""
        self.written += 1
        if self.eager:
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
        graph, _ = self.recorded(lambda: self.advance(kind), self.forward, self._traceless())
        return graph

    def _traceless(self) -> Callable[[], None]:
        """What brings back all that a step or a joining changes, as it is now."""
        chooser = self.chooser
        state = [self.slots.lengths_B, self.last_B, self.active_B, self.ring_RB, self.count_B]
        state += [chooser.drawn_B, chooser.seen_BV, chooser.settings_B5]
        kept = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)  # keys and values need not: what is real writes the same ones again

        return restore

    def recorded(
        self, work: Callable[[], Tensor], plain: Callable[[], Tensor], restore: Callable[[], None]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of `work` and its scores, by the fastest way whose scores are those of `plain`, up to rounding."""
        kernel, self.kernel = self.kernel, False
        expected = plain()
        self.kernel = kernel
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
        elif self.kernel:
            self.kernel = False
        else:
            return False
        # what was captured with it would read memory that is free now
        self._graphs, self.readings, self._read, self._recorder = {}, {}, Captures(on=self._read.on), Recorder()
        warnings.warn(f"fast decoding does not work here, a slower way is taken: {wrong[:300]}", stacklevel=2)
        return True

    def join(self, slots: Sequence[int], rows: Sequence[Row]) -> None:
        """Read the prompts of new rows together and choose the first token of each, as one step."""
        self.chooser.bring(slots, rows)
        kind = Kind.of([row.request.sampling for row in rows])
        if not self._quickly(slots, rows, kind):
            size = Size.of(rows)
            told = self._told(slots, rows, size)
            given = Joining.of(told.to(self.device, non_blocking=True), size)
            self._seat(given, self._plainly(given.slots_n, rows, _LARGE), kind)
        self.written += 1

    def _told(self, slots: Sequence[int], rows: Sequence[Row], size: Size) -> Tensor:
        told = tell(slots, rows, self.chooser.settings(rows), size)
        return told.pin_memory() if self.device.type == "cuda" else told

    def _seat(self, given: Joining, logits_nV: Tensor, kind: Kind) -> None:
        """Choose the first token of rows whose prompts were read, and let them begin."""
        self.chooser.settle(given.slots_n, given.settings_n5)
        ids_n = self.chooser.choose(logits_nV, kind, given.slots_n)
        self.slots.lengths_B.index_copy_(0, given.slots_n, given.lengths_n)
        self.active_B.index_fill_(0, given.slots_n, 1)
        ids_B = self.last_B.index_copy(0, given.slots_n, ids_n)
        self.last_B.copy_(ids_B.clamp(min=0))
        self._keep(ids_B)

    def _plainly(self, index_n: Tensor, rows: Sequence[Row], most: int) -> Tensor:
        """Read prompts by the model itself into an ordinary cache, and copy that; the scores [n, V] behind them."""
        count = max(1, most // max(max(len(row.ids), len(row.request.source)) for row in rows))
        if len(rows) > count:
            parts = [slice(at, at + count) for at in range(0, len(rows), count)]
            return torch.cat([self._plainly(index_n[part], rows[part], most) for part in parts])
        tokens_nT, _ = right_padded([row.ids for row in rows], self.device)
        cache = self.model.cache(len(rows), tokens_nT.shape[1])
        inputs: dict[str, Any] = {}
        if self.cache.memory_padding is not None:
            inputs["source"], inputs["source_padding"] = right_padded([row.request.source for row in rows], self.device)
        with evaluating(self.model):
            # padding behind a row needs no mask: nothing before it sees it, and what is written later covers it
            states = self.model(tokens_nT, cache=cache, **inputs)
            self._copy(cache, index_n)
            lengths_n = send([len(row.ids) for row in rows], self.device)
            return self.model.head.logits(states.hidden[torch.arange(len(rows), device=self.device), lengths_n - 1])

    def _quickly(self, slots: Sequence[int], rows: Sequence[Row], kind: Kind) -> bool:
        """Read by fused kernels straight into the slots and seat the rows, unless that is known to be wrong."""
        fused, size = self._fused, Size.of(rows).rounded(self.longest)
        small = size.rows * size.tokens <= _CAPTURED
        size = size if small else Size.of(rows)
        if fused is None or self._reads is False or not fused.reads(size.tokens):
            return False
        key, told = (size, kind), self._told(slots, rows, size)
        if self._read.replay(key, told):
            return True
        sent = told.to(self.device, non_blocking=True)
        given = Joining.of(sent, size)

        def read() -> Tensor:
            with evaluating(self.model):  # the output may have a dropout of its own
                scores = [fused.read(*part) for part in given.parts(_PART if small else _LARGE)]
            return given.gathered(scores)

        def work() -> Tensor:
            logits_nV = read()
            self._seat(given, logits_nV, kind)
            return logits_nV

        if small and self._read.worth(key) and self._reads and self._capture_reading(key, sent, work):
            return self._read.replay(key, told)
        try:
            logits_nV = read() if self._reads else self._compared(read, given, rows)
        except Exception as error:  # whatever a compiler may raise
            wrong = f"{type(error).__name__}: {error}"
            warnings.warn(f"fast reading does not work here, a slower way is taken: {wrong[:300]}", stacklevel=2)
            self._reads = False
            return False
        self._reads = True
        self._seat(given, logits_nV, kind)
        return True

    def _compared(self, read: Callable[[], Tensor], given: Joining, rows: Sequence[Row]) -> Tensor:
        """The first prompts both ways, so that what is fast is known to be right."""
        index_n, shortest = given.slots_n[: len(rows)], min(len(row.ids) for row in rows)
        last = _keys_and_values(self.cache)[-1]
        logits_nV = read()
        found = [kept[index_n, :, :shortest].clone() for kept in (last.keys, last.values)]
        expected_nV = self._plainly(index_n, rows, _PART)
        expected = [kept[index_n, :, :shortest] for kept in (last.keys, last.values)]
        for pair in zip([logits_nV[: len(rows)], *found], [expected_nV, *expected], strict=True):
            if wrong := differ(*pair):
                raise RuntimeError(wrong)
        return logits_nV

    def _capture_reading(self, key: Hashable, sent: Tensor, work: Callable[[], Tensor]) -> bool:
        """Whether it is captured now; if that fails, prompts are read without graphs from now on."""
        restore = self._traceless()
        try:
            self._read.capture(key, sent, work, self._recorder, restore)
        except Exception as error:  # memory may be short, or the driver old
            restore()
            warnings.warn(f"prompts are read without graphs: {type(error).__name__}: {str(error)[:300]}", stacklevel=2)
            self._read.on, self._recorder = False, Recorder(self._recorder.bytes)
            return False
        return True

    def _copy(self, cache: Cache, index_n: Tensor) -> None:
        """Bring what an ordinary cache has read to the slots."""
        for layer, read in zip(_keys_and_values(self.cache), _keys_and_values(cache), strict=True):
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
        kept += self._read.kept
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


def _keys_and_values(cache: Cache) -> list[LayerCache]:
    """The layers of a cache: only mixers that keep keys and values are decoded in slots."""
    return cast("list[LayerCache]", cache.layers)
