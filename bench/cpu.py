"""Two CPU cores side by side with Hugging Face: training, decoding, decoding with 8-bit weights, embedding."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

# as a file, it sees only its own folder, and profile.py there before Python's own
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.sort(key=lambda path: Path(path).resolve() == Path(__file__).resolve().parent)

import gzip

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from bench.decode import Texts, our_decoding, their_decoding, their_loop
from bench.peers import count, hugging_face, steps, translated, twin, twins, unsettle
from bench.table import Line, machine, rounds, summary, table, typed
from bench.workloads import CLIP, Workload, dry, run_context
from trivium.api import load
from trivium.fast.choose import for_inference
from trivium.generation.embed import pooled
from trivium.interop.quantize import quantize
from trivium.kernels import levels
from trivium.kernels.hardware import set_allocator, trim_heap
from trivium.models.config import ModelConfig
from trivium.models.presets import bert, gpt
from trivium.models.transformer import build
from trivium.objectives.options import Causal
from trivium.parts.site import NoPart
from trivium.training.build_job import build_job
from trivium.training.loop import updates

CPU = torch.device("cpu")
BATCH = 32  # sentences that a user of Hugging Face gives to its model at once: the default of sentence-transformers
LONGEST = 128


class Sizes(NamedTuple):
    """What is measured; the tiny one is for tests."""

    trained: ModelConfig
    decoder: ModelConfig
    encoder: ModelConfig
    prompt: int
    tokens: int
    sentences: int


def _gpt2(shape: gpt.Shape, vocab: int, context: int) -> ModelConfig:
    return dry(replace(gpt.gpt2(shape), vocab=vocab, context=context))


def _bert(shape: bert.Shape) -> ModelConfig:
    return dry(replace(bert.bert(shape), sentence=NoPart()))


USUAL = Sizes(
    trained=_gpt2(gpt.Shape(6, 384, 6), 50_257, 256),
    decoder=_gpt2(gpt.GPT2["gpt2"], 50_257, 1024),
    encoder=_bert(bert.BERT["bert-base-uncased"]),
    prompt=64,
    tokens=64,
    sentences=128,
)
TINY = Sizes(
    trained=_gpt2(gpt.Shape(2, 64, 2), 300, 32),
    decoder=_gpt2(gpt.Shape(2, 64, 2), 300, 64),
    encoder=_bert(bert.Shape(2, 64, 2, vocab=300)),
    prompt=4,
    tokens=4,
    sentences=6,
)


def train(sizes: Sizes, args: argparse.Namespace) -> list[Line]:
    """Updates by trivium's own loop, and by the loop that a user of Hugging Face writes."""
    workload = Workload(model=sizes.trained, objective=Causal(), rows=args.rows)
    recipe = workload.recipe(device="cpu", precision=args.precision, compiled="off")
    base = run_context(workload, recipe, Path())
    made = build_job(base, sys.maxsize)
    unsettle(made.model)
    peer = twin(made.model)
    rng = np.random.default_rng(0)
    batches = [
        translated(base.task.inputs(base.train.take(np.arange(first, first + args.rows)), rng))
        for first in range(0, 8 * args.rows, args.rows)
    ]
    endless, update = updates(made), steps(peer, recipe, itertools.cycle(batches))

    def ours() -> None:
        set_allocator(keep=True)  # as a run of trivium does
        for _ in itertools.islice(endless, args.steps):
            pass

    def theirs() -> None:
        usual_memory()
        update(args.steps)

    tokens = args.steps * args.rows * sizes.trained.context
    how = f"{args.precision}, eager, AdamW fused, clip {CLIP:g}"
    print(f"training a GPT-2 of {count(made.model):,} parameters, {args.rows} x {sizes.trained.context} tokens, {how}")
    return timed({"trivium": ours, "hf": theirs}, args, tokens=tokens, steps=args.steps)


def usual_memory() -> None:
    """Let the allocator work as in any process; its thresholds are as high as they rise by themselves, 32 MB."""
    set_allocator(keep=False)
    trim_heap()


def decode(sizes: Sizes, args: argparse.Namespace) -> list[Line]:
    """Greedy decoding in float32."""
    first, second = twins(sizes.decoder, CPU)
    for_inference(first)  # as `tv.load` does
    prompts = _prompts(sizes)
    sides = {"trivium": our_decoding(first, prompts, sizes.tokens), **_theirs(second, prompts, sizes)}
    texts = {name: run() for name, run in sides.items()}
    for name, found in texts.items():
        if found != texts["trivium"]:
            raise SystemExit(f"not the same work: {name} wrote other tokens than trivium")
    print(f"greedy decoding with a GPT-2 of {count(first):,} parameters, fp32, eager; {_told(sizes)}")
    return timed(sides, args, tokens=sizes.tokens, steps=sizes.tokens)


def int8(sizes: Sizes, args: argparse.Namespace) -> list[Line]:
    """Greedy decoding with 8-bit weights against float32 ones; what that costs is measured on a trained model."""
    first, second = twins(sizes.decoder, CPU)
    small = deepcopy(first)
    report = quantize(small, 8)
    for model in (first, small):
        for_inference(model)
    prompts = _prompts(sizes)
    sides = {
        "int8": our_decoding(small, prompts, sizes.tokens),
        "trivium fp32": our_decoding(first, prompts, sizes.tokens),
        **_theirs(second, prompts, sizes),
    }
    kernel = "the kernel" if levels.product() else "no C compiler, so floats made for the occasion"
    print(f"greedy decoding with a GPT-2 of {count(second):,} parameters, {_told(sizes)}; 8 bits by {kernel}")
    print(f"weights in memory {report.before / 1e6:.0f} MB as floats, {report.memory / 1e6:.0f} MB with 8 bits")
    if args.model:
        print(bits_per_byte(args.model, args.text))
    return timed(sides, args, tokens=sizes.tokens, steps=sizes.tokens)


def bits_per_byte(path: str, text: str) -> str:
    """What a trained model loses by 8 bits, on a text."""
    read = Path(text).read_text(encoding="utf-8") if text else _shakespeare()
    model = load(path)
    before = model.score(read).bits_per_byte
    quantize(model.module, 8)
    after = model.score(read).bits_per_byte
    return f"{path}: {before:.4f} bits per byte as floats, {after:.4f} with 8 bits ({after - before:+.4f})"


def embed(sizes: Sizes, args: argparse.Namespace) -> list[Line]:
    """One vector for each of many sentences: the mean of their last states."""
    model = build(sizes.encoder, seed=0).eval()
    unsettle(model)
    peer: Any = hugging_face(model)
    for_inference(model)
    rows = sentences(sizes)
    given = list(range(len(rows)))
    ranked = sorted(given, key=lambda index: -len(rows[index]))
    sides: dict[str, Callable[[], Tensor]] = {
        "trivium": lambda: pooled(model, rows),
        "hf in order": lambda: their_vectors(peer.base_model, rows, given),
        "hf sorted": lambda: their_vectors(peer.base_model, rows, ranked),
    }
    vectors = {name: run() for name, run in sides.items()}
    for name, found in vectors.items():
        apart = float((found - vectors["trivium"]).abs().max())
        if not apart <= 1e-5:
            raise SystemExit(f"not the same work: the vectors of {name} are up to {apart:.1e} apart")
    lengths = [len(row) for row in rows]
    middle = f"{min(lengths)} to {max(lengths)}, mean {statistics.mean(lengths):.0f}"
    print(f"embedding {len(rows)} sentences of {middle} tokens, an encoder of {count(model):,} parameters, fp32")
    print(f"hf pads batches of {BATCH}, once in the given order, once sorted by length; ratios over hf sorted")
    return timed(sides, args, tokens=sum(lengths), steps=len(rows))


@torch.inference_mode()
def their_vectors(model: nn.Module, rows: Sequence[Sequence[int]], order: Sequence[int]) -> Tensor:
    """As the users of Hugging Face do it: padded batches with a mask, and the mean over what it leaves."""
    result: list[Tensor] = [torch.empty(0)] * len(rows)
    for first in range(0, len(order), BATCH):
        part = order[first : first + BATCH]
        longest = max(len(rows[index]) for index in part)
        ids = torch.tensor([[*rows[index], *[0] * (longest - len(rows[index]))] for index in part])
        mask = torch.arange(longest) < torch.tensor([len(rows[index]) for index in part])[:, None]
        hidden = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        for index, vector in zip(part, mean, strict=True):
            result[index] = vector
    return torch.stack(result)


def sentences(sizes: Sizes) -> list[list[int]]:
    """Random ids in rows as long as speeches of Shakespeare are, in their order, a third longer than their words."""
    speeches = [speech for speech in _shakespeare().split("\n\n") if speech.strip()][: sizes.sentences]
    rng = random.Random(0)
    most = min(LONGEST, sizes.encoder.context)
    lengths = [min(most, len(speech.split()) * 4 // 3 + 2) for speech in speeches]
    return [[rng.randrange(sizes.encoder.vocab) for _ in range(length)] for length in lengths]


def _shakespeare() -> str:
    return gzip.decompress((files("trivium") / "assets" / "shakespeare-test.txt.gz").read_bytes()).decode()


def _prompts(sizes: Sizes) -> Texts:
    generator = torch.Generator().manual_seed(2)
    prompts: Texts = torch.randint(sizes.decoder.vocab, (1, sizes.prompt), generator=generator).tolist()
    return prompts


def _theirs(model: nn.Module, prompts: Texts, sizes: Sizes) -> dict[str, Callable[[], Texts]]:
    return {
        "hf loop": their_loop(model, prompts, sizes.tokens, CPU),
        "hf generate": their_decoding(model, prompts, sizes.tokens, CPU),
    }


def _told(sizes: Sizes) -> str:
    return f"1 x {sizes.prompt} + {sizes.tokens} tokens, prompt included in the time"


def timed(sides: dict[str, Callable[[], Any]], args: argparse.Namespace, *, tokens: int, steps: int) -> list[Line]:
    """The lines of the table, after a warm-up."""
    rounds(sides, 1, CPU, time.perf_counter)
    return summary(rounds(sides, args.rounds, CPU, time.perf_counter), tokens=tokens, steps=steps)


WHAT: dict[str, tuple[Callable[[Sizes, argparse.Namespace], list[Line]], str]] = {
    "train": (train, "step"),
    "decode": (decode, "token"),
    "int8": (int8, "token"),
    "embed": (embed, "text"),
}


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=list(WHAT))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="train: rows of a batch")
    parser.add_argument("--steps", type=int, default=1, help="train: steps of each side in a round")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="train: of both sides")
    parser.add_argument("--model", default="", help="int8: a trained model, to say what 8 bits cost it")
    parser.add_argument("--text", default="", help="int8: the text for that; default: the package's Shakespeare")
    parser.add_argument("--tiny", action="store_true", help="models of a few thousand weights")
    return parser.parse_args(given)


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    run, step = WHAT[args.what]
    with threads(args.threads):
        lines = run(TINY if args.tiny else USUAL, args)
        print(*table(lines, step), sep="\n")
        print(machine(CPU, {"torch": torch.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    typed(main)
