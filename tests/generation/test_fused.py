"""The fused step and the captured graphs against the plain step and the plain loop.

They need a GPU; the kernels alone also run in Triton's interpreter (TRITON_INTERPRET=1), slowly.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trivium
from tests.generation import tiny
from tests.kernels.launch import DEVICE, GPU, needs_gpu, needs_triton
from trivium.fast.choose import fast, for_inference
from trivium.generation.choosing import Kind
from trivium.generation.engine import Request, Token, stream
from trivium.generation.rows import Row
from trivium.generation.sampling import Sampling
from trivium.generation.slots import Bank
from trivium.generation.speculative import Speculate, speculative
from trivium.interop.quantize import quantize
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block, Parallel
from trivium.models.transformer import Transformer, build
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.cache import LayerCache, SlotMask, Slots
from trivium.parts.masks import ScoreMask
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.options.norms import LayerNormOptions, RMSNormOptions
from trivium.parts.options.positions import (
    AlibiOptions,
    BucketOptions,
    LearnedOptions,
    NoPositionOptions,
    RotaryOptions,
    SinusoidalOptions,
)
from trivium.parts.site import Site

HOPPER = GPU and torch.cuda.get_device_capability() >= (9, 0)

VOCAB, CONTEXT = 300, 200
SHAPES = ((1, 12, 12, 1024, 64), (5, 32, 4, 512, 64), (3, 4, 2, 300, 80))  # batch, heads, groups, longest, size
GREEDY = Sampling(temperature=0)
HEADS = MultiHeadOptions(heads=4, bias="all")
BLOCKS = {
    "gpt2": Block(attention=HEADS, position=LearnedOptions(offset=2)),
    "llama": Block(
        attention=replace(HEADS, groups=2, bias="none"),
        norm=RMSNormOptions(),
        feedforward=GluOptions(hidden=192),
        position=RotaryOptions(),
    ),
    "window": Block(
        attention=replace(HEADS, groups=1, window=37),
        norm=LayerNormOptions(bias=False),
        feedforward=MlpOptions(activation="relu2", bias=False),
        position=RotaryOptions(layout="interleaved", share=0.5),
    ),
    "sinusoidal": Block(
        attention=replace(HEADS, head=24), position=SinusoidalOptions(), feedforward=MlpOptions(activation="gelu")
    ),
}
OTHERS: dict[str, Block | Parallel] = {
    "alibi": Block(attention=HEADS, position=AlibiOptions()),
    "t5": Block(attention=HEADS, position=BucketOptions()),
    "parallel": Parallel(attention=replace(HEADS, groups=2), position=RotaryOptions()),
    "none": Block(attention=replace(HEADS, norm="rms"), position=NoPositionOptions()),
}


def model(block: Block | Parallel, dtype: torch.dtype = torch.float32, width: int = 96) -> Transformer:
    made = build(
        ModelConfig(
            width=width,
            context=CONTEXT,
            vocab=VOCAB,
            embedding=TokenEmbeddingOptions(tie="none"),
            decoder=Stack(layers=3, block=block),
        ),
        seed=1,
    )
    with torch.no_grad():  # a fresh model says little
        for parameter in made.parameters():
            parameter.mul_(3)
    made.to(DEVICE, dtype)
    fast(made)
    return made.eval()


def requests(count: int, sampling: Sequence[Sampling], tokens: int) -> list[Request]:
    return [
        Request(
            ids=tiny.draw(row, 1 + 29 * row % 97, VOCAB),
            tokens=tokens,
            sampling=sampling[row % len(sampling)],
            seed=row,
        )
        for row in range(count)
    ]


def texts_of(tokens: Iterable[Token], count: int) -> list[list[int]]:
    """The ids of every row, in order."""
    rows: list[list[int]] = [[] for _ in range(count)]
    for token in tokens:
        rows[token.row].append(token.id)
    return rows


def others(found: list[list[int]], expected: list[list[int]]) -> int:
    """How many rows differ."""
    return sum(one != other for one, other in zip(found, expected, strict=True))


@needs_triton
@pytest.mark.parametrize("bold", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 80])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_the_fused_step_has_the_scores_of_the_plain_one(
    name: str, dtype: torch.dtype, close: float, rows: int, bold: bool
) -> None:
    if bold and not HOPPER:
        pytest.skip("kernels that start early need a Hopper GPU")
    if not GPU and (rows > 3 or dtype != torch.float32):
        pytest.skip("too slow without a GPU")
    from trivium.generation.fused import recognised

    made = model(BLOCKS[name], dtype)
    assert recognised(made)
    steps_agree(made, rows, close, bold=bold)


@needs_triton
@pytest.mark.parametrize("bold", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_a_fused_step_reads_weights_of_few_bits(name: str, bits: int, rows: int, bold: bool) -> None:
    if bold and not HOPPER:
        pytest.skip("kernels that start early need a Hopper GPU")
    from trivium.generation.fused import recognised

    made = model(BLOCKS[name], width=128).cpu()  # four bits come in pairs of groups of 32
    quantize(made, bits)
    made.to(DEVICE)
    fast(made)
    assert recognised(made)
    steps_agree(made, rows, 2e-5, bold=bold)


@needs_triton
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_weights_that_lie_side_by_side_are_not_copied(name: str) -> None:
    from trivium.generation.fused import Fused

    if not GPU:
        pytest.skip("on a CPU they lie column by column")
    made = model(BLOCKS[name])
    bank = Bank(made, 2, CONTEXT, 0)
    copying = Fused(made, bank.cache, bank.slots, bank.last_B)
    for_inference(made)
    sharing = Fused(made, bank.cache, bank.slots, bank.last_B)
    assert len(copying.copies) > 3
    assert [one.shape for one in sharing.copies] == [sharing.arrived.shape]
    for layer in sharing.layers:
        query = layer.attention.query.weight
        assert isinstance(layer.qkv, Tensor)
        assert layer.qkv.data_ptr() == query.data_ptr()
        query.mul_(0.5)  # is seen without a refresh
    sharing.refresh()
    steps_agree(made, 2, 2e-5, bold=False)


def steps_agree(made: Transformer, rows: int, close: float, *, bold: bool) -> None:
    """Four steps, each by the model itself and by fused kernels."""
    from trivium.generation.fused import Fused

    bank = Bank(made, rows, CONTEXT, 0)
    fused = Fused(made, bank.cache, bank.slots, bank.last_B)
    fused.bold, bank._fused = bold, None
    bank.join(range(rows), [Row(row, wish) for row, wish in enumerate(requests(rows, [GREEDY], 90))])
    for _ in range(4):
        expected = bank.forward()
        for layer in bank.cache.layers:  # what the step has to write is poisoned before
            cast(LayerCache, layer).keys.transpose(1, 2)[bank.slots.rows_B1, bank.slots.places(1)] = 77.0
        found = fused.forward()
        assert float((found - expected).float().norm() / expected.float().norm()) < close
        bank.finish(expected, Kind(False, False, False))


@needs_triton
@pytest.mark.parametrize("part", [2048, 130])  # tokens that are read together
@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_prompts_are_read_into_slots_as_into_a_cache(name: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from trivium.generation.fused import Fused

    monkeypatch.setattr("trivium.generation.slots._PART", part)
    made = model(BLOCKS[name])
    banks = [Bank(made, 4, CONTEXT, 0) for _ in range(2)]
    fused = Fused(made, banks[1].cache, banks[1].slots, banks[1].last_B)
    assert fused.reads(128) == (name != "window")  # prompts of a model with a window are read by its own forward
    if name == "window":
        return
    banks[0]._fused, banks[1]._fused, banks[1]._reads = None, fused, True
    for _ in range(3):  # at once, captured, replayed
        rows = [Row(row, wish) for row, wish in enumerate(requests(3, [GREEDY], 9))]
        for bank in banks:
            bank.join([3, 0, 2], rows)
        assert torch.equal(banks[0].last_B, banks[1].last_B)
        both = [[cast(LayerCache, layer) for layer in bank.cache.layers] for bank in banks]
        for one, other in zip(*both, strict=True):
            for slot, row in zip([3, 0, 2], rows, strict=True):
                held = slice(0, len(row.ids))
                torch.testing.assert_close(one.keys[slot, :, held], other.keys[slot, :, held], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(one.values[slot, :, held], other.values[slot, :, held], rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 33, 64])
def test_products_with_all_that_goes_with_them(rows: int, early: bool) -> None:
    """Against the formulas in float64."""
    from trivium.kernels.batch import product
    from trivium.kernels.step import Scale, multiply

    if early and not HOPPER:
        pytest.skip("kernels that start early need a Hopper GPU")
    arrived = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    for outputs, inputs in ((70, 200), (96, 5000)):
        x, residual = torch.randn(rows, inputs, device=DEVICE), torch.randn(rows, outputs, device=DEVICE)
        weight, gate = torch.randn(2, outputs, inputs, device=DEVICE)
        bias, other = torch.randn(2, outputs, device=DEVICE)
        scale, shift = torch.randn(2, inputs, device=DEVICE)
        wide = [tensor.double() for tensor in (x, weight, bias, gate, other, residual, scale, shift)]
        normed = F.layer_norm(wide[0], (inputs,), wide[6], wide[7]) if rows == 1 else wide[0]
        plain, gates = F.linear(normed, wide[1], wide[2]), F.linear(normed, wide[3], wide[4])
        norm = {"scale": Scale(scale, shift, 1e-5, True)} if rows == 1 else {}
        work: Any = multiply if rows == 1 else partial(product, arrived=arrived)
        found = [
            work(x, weight, bias, activation="gelu-tanh", early=early, **norm),
            work(x, weight, bias, activation="silu", gated=(gate, other), early=early, **norm),
            work(x, weight, bias, residual=residual.clone(), early=early, **norm),
        ]
        expected = [F.gelu(plain, approximate="tanh"), plain * F.silu(gates), plain + wide[5]]
        for one, right in zip(found, expected, strict=True):
            assert float((one.double() - right).norm() / right.norm()) < 1e-5
    assert not arrived.any()


# What a kernel may read before the one in front of it is done: learned numbers, and what earlier steps have written.
LASTING = {"weight", "bias", "gate", "gate_bias", "norm_weight", "norm_bias", "add", "keys", "values", "lengths"}
LASTING |= {"levels", "scales", "gate_scales", "outputs"}  # the last is a number
READERS = {"tl.load", "_fetched", "_gains", "_scales"}  # the last three are narrow's own


@pytest.mark.parametrize("file", ["step", "batch", "decode", "narrow"])
def test_a_kernel_that_starts_early_waits_before_it_reads_or_writes_what_others_do(file: str) -> None:
    tree = ast.parse((Path(trivium.__file__).parent / "kernels" / f"{file}.py").read_text("utf-8"))
    kernels = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != "begun"]
    early = [node for node in kernels if "EARLY" in [argument.arg for argument in node.args.args]]
    assert early
    for kernel in early:
        lines = [ast.unparse(line) for line in kernel.body]
        wait = lines.index("begun(EARLY)")  # for all programs: not inside a branch or a loop
        before = [node for line in kernel.body[:wait] for node in ast.walk(line) if isinstance(node, ast.Call)]
        for call in before:
            does = ast.unparse(call.func)
            assert does not in ("tl.store", "turned"), f"{kernel.name} writes or reads too early"
            assert "atomic" not in does, f"{kernel.name} counts too early"
            if does in READERS:
                named = {node.id for given in call.args for node in ast.walk(given) if isinstance(node, ast.Name)}
                pointers = named & {argument.arg for argument in kernel.args.args if argument.annotation is None}
                assert pointers <= LASTING, f"{kernel.name} reads {pointers} too early"


@needs_gpu
@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("name", [*BLOCKS, *OTHERS])
def test_graphs_write_what_the_plain_loop_on_the_cpu_writes(name: str, count: int) -> None:
    made = model(BLOCKS[name] if name in BLOCKS else OTHERS[name])
    samplings = [
        GREEDY,
        Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2),
        Sampling(temperature=0, repetition_penalty=1.5),
        Sampling(),
    ]
    for wishes in (requests(count, [GREEDY], 60), requests(count, samplings, 60)):
        texts: list[list[list[int]]] = []
        for device in ("cuda", "cpu"):
            made.to(device)
            texts.append(texts_of(stream(made, wishes, end=7, rows=4), count))
        assert others(*texts) <= len(wishes) // 8  # rounding may decide between two equal scores


@needs_gpu
def test_graphs_outlive_the_scratch_of_products_that_the_process_had() -> None:
    """torch.compile frees it when it captures graphs of its own; one row's prompt is read by products that need it."""
    wishes = requests(1, [GREEDY], 20)
    made = model(BLOCKS["gpt2"], torch.bfloat16, width=768)

    def text() -> list[list[int]]:
        return texts_of(stream(made, wishes, end=None), 1)

    before = [text() for _ in range(3)]  # the second captures, the third replays
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 22,), float("nan"), device=DEVICE) for _ in range(64)]
    assert text() == before[-1]
    assert all(bool(other.isnan().all()) for other in others)


@needs_gpu
def test_sources_too_are_decoded_by_graphs() -> None:
    made = tiny.model("t5-small", VOCAB)
    fast(made)
    wishes = [
        Request(ids=(0,), tokens=9, sampling=GREEDY, seed=row, source=tiny.draw(row, 3 + 9 * row, VOCAB))
        for row in range(5)
    ]
    texts = []
    for device in ("cpu", "cuda"):
        made.to(device)
        texts.append(texts_of(stream(made, wishes, end=7, rows=2), len(wishes)))
    assert all(texts[1])
    assert others(*texts) <= 1  # rounding may decide between two equal scores


@needs_gpu
@pytest.mark.parametrize("name", BLOCKS)
def test_speculation_by_graphs_writes_the_greedy_text(name: str) -> None:
    made = model(BLOCKS[name])
    wishes = requests(3, [GREEDY], 90)
    expected = texts_of(stream(made, wishes, end=7), len(wishes))
    guessers: list[Speculate] = ["lookup", model(BLOCKS["llama"])]
    for guesser in guessers:
        found = texts_of(speculative(made, wishes, guesser, end=7), len(wishes))
        assert all(found)
        assert others(found, expected) <= 1  # rounding may decide between two equal scores


def over_slots(query: Tensor, keys: Tensor, values: Tensor, slots: Slots, window: int) -> Tensor:
    """Plain attention with a scale of 0.2 over a mask of what each sequence holds."""
    (heads, new, size), groups, longest = query.shape[1:], keys.shape[1], keys.shape[2]
    part = MultiHeadAttention(MultiHeadOptions(heads=heads, groups=groups), Site(width=heads * size, context=longest))
    part.scale = 0.2
    return part.sdpa(query, keys, values, ScoreMask(SlotMask(slots=slots).within(window), new, longest, query.device))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("window", [0, 50])
def test_the_attention_kernel_is_the_plain_attention(dtype: torch.dtype, new: int, window: int) -> None:
    from trivium.kernels.decode import attend

    if not GPU and dtype == torch.bfloat16:
        pytest.skip("tl.dot of Triton's interpreter multiplies the bits of bfloat16 as integers")
    for batch, heads, groups, longest, size in SHAPES if GPU else SHAPES[2:]:
        slots = Slots(batch, longest, torch.device(DEVICE))
        slots.lengths_B.random_(0, longest - new)
        query = torch.randn(batch, new, heads, size, device=DEVICE, dtype=dtype).transpose(1, 2)
        keys, values = torch.randn(2, batch, groups, longest, size, device=DEVICE, dtype=dtype)
        arrived = torch.zeros(batch, groups, dtype=torch.int32, device=DEVICE)
        for _ in range(3):
            found = attend(query, keys, values, slots.lengths_B, arrived, 0.2, window)
            expected = over_slots(query.float(), keys.float(), values.float(), slots, window)
            error = (found.float() - expected).norm() / expected.norm()
            assert float(error) < (2e-6 if dtype == torch.float32 else 1e-2)
        assert not arrived.any()
