"""What the running batch does when something goes wrong, and what it keeps."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch

from tests.generation import tiny
from tests.generation.test_continuous import (
    CONTEXT,
    END,
    GREEDY,
    MODELS,
    SAMPLINGS,
    VOCAB,
    alone,
    comparable,
    drained,
    small,
)
from trivium.fast.cache import KernelCache
from trivium.fast.choose import fast
from trivium.fast.graphs import differ, is_current_gpu, own_scratch
from trivium.generation import text as texts
from trivium.generation.banks import banks_of
from trivium.generation.choosing import Kind
from trivium.generation.continuous import Engine
from trivium.generation.engine import Request, Token, stream
from trivium.generation.rows import Row
from trivium.generation.sampling import Sampling
from trivium.generation.scorer import Scorer
from trivium.generation.slots import Bank
from trivium.models.transformer import Transformer, build
from trivium.parts.cache import LayerCache
from trivium.parts.options.positions import LearnedOptions


def in_slots(model: Transformer) -> Scorer:
    """Decoded in the running batch wherever it can be, not on a GPU only."""
    return Scorer(model, slots="on")


def test_a_text_ends_at_its_stop_string_whoever_decodes_it() -> None:
    model = tiny.model("gpt-mini", tiny.BYTES).double()
    wish: dict[str, Any] = {"tokens": 40, "sampling": Sampling(), "seed": 0, "n": 3}
    plain = texts.complete(model, tiny.BYTES, ["abc"], **wish)[0]
    stops: list[list[str]] = [[], *([text[at : at + 2]] for text in plain for at in (0, 5, 9))]
    found = []
    for reader in (model, in_slots(model)):
        made = [texts.complete(reader, tiny.BYTES, ["abc", "hello"], stop=stop, **wish) for stop in stops]
        found.append([(str(t), t.reason, t.ids, t.tokens) for one in made for several in one for t in several])
    assert {reason for _, reason, _, _ in found[0]} >= {"stop", "length"}
    assert found[0] == found[1]


def test_a_row_that_is_stopped_has_no_more_tokens() -> None:
    wishes = [Request(ids=(1, 2 + row), tokens=12, sampling=GREEDY, seed=0) for row in range(2)]
    running = stream(in_slots(MODELS["learned"]), wishes, end=None)
    rows: list[list[int]] = [[], []]
    for token in running:
        rows[token.row].append(token.id)
        if len(rows[0]) == 3:
            running.stop(0)
    assert [len(row) for row in rows] == [3, 12]


@pytest.mark.parametrize("step", range(1, 6))
def test_decoding_after_an_interrupted_step_is_as_before(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(LearnedOptions())
    wish = Request(ids=(1, 2, 3), tokens=8, sampling=GREEDY, seed=0)
    expected = comparable([*stream(in_slots(model), [wish], end=None)])
    left, advance = step, Bank.advance

    def interrupted(bank: Bank, kind: Kind) -> torch.Tensor:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return advance(bank, kind)

    with monkeypatch.context() as patch:
        patch.setattr(Bank, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(stream(in_slots(model), [wish], end=None))
    assert not banks_of(model)._free
    for _ in range(2):
        assert comparable([*stream(in_slots(model), [wish], end=None)]) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_whose_joining_failed_join_again(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(LearnedOptions())
    wishes = [Request(ids=(1, 2 + row), tokens=5, sampling=sampling, seed=row) for row in range(3)]
    engine = Engine(model, end=END, slots=2)
    for wish in wishes:
        engine.submit(wish)
    with monkeypatch.context() as patch:
        patch.setattr(Bank, "_copy", full)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
    found: dict[int, list[Token]] = {row: [] for row in range(3)}
    for _ in range(20):  # not as long as it is busy: a row without a slot would be so for ever
        for token in engine.step():
            found[token.row].append(token)
    assert not engine.busy
    assert [comparable(found[row]) for row in range(3)] == [comparable(alone(model, wish)) for wish in wishes]
    assert not banks_of(model)._free  # who knows what is in it


def full(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("name", MODELS)
def test_slots_under_autocast_hold_what_the_plain_loop_holds(name: str) -> None:
    model = small(LearnedOptions()).float() if name == "learned" else build(MODELS[name].config, seed=1)
    wish = Request(ids=(1, 2, 3), tokens=8, sampling=GREEDY, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        engine = Engine(model, end=END, slots=1)
        engine.submit(wish)
        assert comparable(list(drained(engine))) == comparable(alone(model, wish))
    assert model.embedding.weight.dtype == torch.float32


def test_a_model_that_has_decoded_is_freed_with_its_last_name() -> None:
    model = small(LearnedOptions())
    engine = Engine(model, end=None, slots=1)
    engine.submit(Request(ids=(1, 2), tokens=2, sampling=GREEDY, seed=0))
    gc.disable()  # by counting alone: on a GPU a cycle holds its memory until somebody looks for it
    try:
        list(drained(engine))
        kept = weakref.ref(next(iter(banks_of(model)._free.values())))
        alive = weakref.ref(model)
        del engine, model
        assert alive() is None
        assert kept() is None
    finally:
        gc.enable()


def test_a_bank_counts_all_that_it_keeps() -> None:
    model = tiny.model("t5-small", VOCAB)
    kept = [Bank(model, slots, longest, source).bytes for slots, longest, source in ((2, 32, 32), (4, 32, 32))]
    config = model.config
    heads = cast(Any, config.decoder).block.attention.heads
    size = cast(Any, model.decoder).cache_shapes[0].key
    layers = cast(Any, config.decoder).layers
    row = layers * heads * size * 2 * 4 * (32 + 32)  # keys and values of the text and of its source
    row += config.vocab + 32 * (8 + 8) + 32  # ids seen, random numbers, positions, which source tokens are real
    small_things = 500  # some numbers of each row
    assert row <= (kept[1] - kept[0]) / 2 <= row + small_things


def test_banks_that_are_too_large_together_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(LearnedOptions())
    banks = banks_of(model)
    made = [banks.take(model, slots, CONTEXT, 0) for slots in (1, 2, 4)]
    monkeypatch.setattr("trivium.generation.banks._BYTES", made[1].bytes + made[2].bytes)
    for bank in made:
        banks.give(bank)
    assert [*banks._free.values()] == made[1:]
    monkeypatch.setattr("trivium.generation.banks._BYTES", 0)
    banks.give(banks.take(model, 1, CONTEXT, 0))
    assert not banks._free


@torch.no_grad()
def test_a_slower_way_forgets_what_was_captured_and_uses_no_kernel() -> None:
    model = small(LearnedOptions()).eval()
    fast(model)
    bank, plain = Bank(model, 2, CONTEXT, 0), Bank(model, 2, CONTEXT, 0)
    held = cast(Any, bank)
    held._fused, bank.kernel = Wrong(True), True
    held._fused.bold = True
    assert all(isinstance(layer, KernelCache) and layer.on for layer in bank.cache.layers)
    ways = 0
    while True:
        held._graphs, held.readings, held._read._graphs = {1: 1}, {1: 1}, {1: (torch.zeros(1), 1)}
        with pytest.warns(UserWarning, match="a slower way is taken: why") if ways < 3 else nullcontext():
            if not bank._retreat("why"):
                break
        assert not held._graphs
        assert not held.readings
        assert not held._read.kept
        ways += 1
    assert ways == 3  # kernels one after another, then the model, then plain attention and plain steps
    assert not any(isinstance(layer, KernelCache) and layer.on for layer in bank.cache.layers)
    held._graphs, kind = {}, Kind(False, False, False)
    for one in (bank, plain):
        one.join([1], [Row(0, Request(ids=(4, 5, 6), tokens=9, sampling=GREEDY, seed=0))])
        for _ in range(4):
            one.step(kind)
    assert torch.equal(bank.ring_RB, plain.ring_RB)


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", True), ("cuda:0", False), ("cpu", False), ("cuda", True)])
def test_graphs_are_for_the_gpu_in_use_only(device: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert is_current_gpu(torch.device(device)) == expected


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 0.001), (torch.bfloat16, 0.1)])
def test_results_are_right_up_to_the_rounding_of_their_dtype(dtype: torch.dtype, error: float) -> None:
    expected = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    assert not differ((expected.float() + noise * error * 0.8).to(dtype), expected)
    assert "differ" in differ((expected.float() + noise * error * 1.2).to(dtype), expected)


def test_a_bank_is_used_again_until_the_weights_lie_elsewhere() -> None:
    model = small(LearnedOptions())
    wish = Request(ids=(1, 2, 3), tokens=3, sampling=GREEDY, seed=0)
    banks = banks_of(model)
    taken = []
    for _ in range(3):
        engine = Engine(model, end=None, slots=1)
        engine.submit(wish)
        list(drained(engine))
        taken.append(next(iter(banks._free.values())))
    assert taken[0] is taken[1] is taken[2]
    model.float()
    engine = Engine(model, end=None, slots=1)
    engine.submit(wish)
    list(drained(engine))
    assert [*banks._free.values()][-1] is not taken[0]


class Wrong:
    """Fused kernels that do not what they should, or nothing at all."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def reads(self, tokens: int) -> bool:
        return True

    def read(self, tokens: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise ValueError("no compiler")
        return torch.randn(len(tokens), VOCAB)


@pytest.mark.parametrize("broken", [False, True])
@torch.no_grad()
def test_kernels_that_read_a_prompt_wrong_are_told_and_not_used(broken: bool) -> None:
    model = small(LearnedOptions()).float().eval()
    bank, plain = Bank(model, 2, CONTEXT, 0), Bank(model, 2, CONTEXT, 0)
    bank._fused = cast(Any, Wrong(broken))
    rows = [Row(0, Request(ids=(4, 5, 6), tokens=3, sampling=GREEDY, seed=0))]
    with pytest.warns(UserWarning, match="no compiler" if broken else "results differ"):
        bank.join([1], rows)
    plain.join([1], rows)
    bank.join([0], rows)  # it is known now, and said once
    assert bank.last_B[1] == bank.last_B[0] == plain.last_B[1]
    ours, theirs = (cast(LayerCache, one.cache.layers[1]) for one in (bank, plain))
    assert torch.equal(ours.keys[1], theirs.keys[1])


@torch.no_grad()
def test_kernels_that_fail_after_they_were_right_are_told_and_not_used() -> None:
    """As a graph that cannot be captured, or a size that does not compile."""
    model = small(LearnedOptions()).float().eval()
    bank, plain = Bank(model, 2, CONTEXT, 0), Bank(model, 2, CONTEXT, 0)
    bank._fused, bank._reads = cast(Any, Wrong(True)), True
    rows = [Row(0, Request(ids=(4, 5, 6), tokens=3, sampling=GREEDY, seed=0))]
    with pytest.warns(UserWarning, match="no compiler"):
        bank.join([1], rows)
    plain.join([1], rows)
    assert bank.last_B[1] == plain.last_B[1]
    assert bank._reads is False


def test_a_bank_that_was_made_in_inference_mode_serves_outside_of_it_too() -> None:
    model = small(LearnedOptions())
    wish = Request(ids=(1, 2, 3), tokens=3, sampling=SAMPLINGS[1], seed=0)
    texts = []
    for inside in (True, False):
        engine = Engine(model, end=None, slots=1)
        engine.submit(wish)
        with torch.inference_mode(inside):
            texts.append([token.id for token in drained(engine)])
    assert texts[0] == texts[1]


def test_scratch_of_products_is_cleared_before_and_after_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: told.append("cleared"), raising=False)

    def capture() -> None:
        with own_scratch():
            told.append("captured")
            raise RuntimeError("no capture")

    with pytest.raises(RuntimeError, match="no capture"):
        capture()
    assert told == ["cleared", "captured", "cleared"]
