"""Decoding side by side: the same model by trivium and by Hugging Face, same prompts, same tokens."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

# as a file, it sees only its own folder, and profile.py there before Python's own
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.sort(key=lambda path: Path(path).resolve() == Path(__file__).resolve().parent)

from bench.formulas import decoding_bytes
from bench.measure import Ceilings, ceilings, held, peak, size
from bench.peers import count, twins
from bench.sentences import our_search, sentences, their_search
from bench.table import Line, Work, fastest, machine, rounds, summary, table, typed
from bench.workloads import TINY, WORKLOADS, marian
from trivium.fast.choose import for_inference
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.models.config import ModelConfig
from trivium.models.transformer import Transformer
from trivium.training.device import choose

Texts = list[list[int]]  # the new ids of every prompt
Run = Callable[[], Texts]
TRANSLATE = "translate"
BEAMS = 4


class Side(NamedTuple):
    """A way to decode: the model that it holds, and one round of it."""

    model: nn.Module
    run: Run


class Size(NamedTuple):
    """Tokens of each prompt, and new ones of each."""

    prompt: int
    tokens: int


SIZES = {"gpt2-10m": Size(64, 128), "gpt2": Size(128, 256), "tinyllama": Size(128, 256)}


def our_decoding(model: Transformer, prompts: Texts, tokens: int) -> Run:
    """The engine behind `generate` and the server; it hands every token to the host as it comes."""
    greedy = Sampling(temperature=0.0)
    requests = [Request(ids=tuple(ids), tokens=tokens, sampling=greedy, seed=0) for ids in prompts]

    def run() -> Texts:
        texts: Texts = [[] for _ in requests]
        for token in stream(model, requests, end=None):
            texts[token.row].append(token.id)
        return texts

    return run


def their_decoding(model: Any, prompts: Texts, tokens: int, device: torch.device, cache: str | None = None) -> Run:
    """`generate` with its cache: the usual one that grows, or a "static" one, for which it compiles the step itself."""
    ids = torch.tensor(prompts, device=device)
    every = torch.ones_like(ids)
    how: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    if cache:
        how["cache_implementation"] = cache

    @torch.inference_mode()
    def run() -> Texts:
        whole: Tensor = model.generate(ids, attention_mask=every, **how)
        texts: Texts = whole[:, ids.shape[1] :].tolist()
        return texts

    return run


def their_loop(model: nn.Module, prompts: Texts, tokens: int, device: torch.device) -> Run:
    """Hugging Face's model without `generate`: the bare loop of its documentation, nothing read until the end."""
    ids = torch.tensor(prompts, device=device)

    @torch.inference_mode()
    def run() -> Texts:
        out = model(ids, use_cache=True, logits_to_keep=1)
        new = [out.logits[:, -1].argmax(-1, keepdim=True)]
        while len(new) < tokens:
            out = model(new[-1], past_key_values=out.past_key_values, use_cache=True)
            new.append(out.logits[:, -1].argmax(-1, keepdim=True))
        texts: Texts = torch.cat(new, dim=1).tolist()
        return texts

    return run


def prefix(ours: Texts, theirs: Texts) -> float:
    """The share of tokens before the first one that differs."""
    same = total = 0
    for one, other in zip(ours, theirs, strict=True):
        total += len(one)
        same += next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
    return same / total


def checked(sides: dict[str, Side], device: torch.device) -> dict[str, float | None]:
    """The sides that run and, on the CPU, write the same tokens, with the most memory that each takes.

    A GPU's sums differ, so there it only says how many are the same. A peer's way of decoding that fails is told and
    left out; trivium's must not.
    """
    texts: dict[str, Texts] = {}
    memory: dict[str, float | None] = {}
    for name, side in sides.items():
        others = held(device) - size(side.model)
        try:
            texts[name] = side.run()
            side.run()  # some graphs are recorded at the second time
            memory[name] = peak(device, others, side.run)
        except Exception as error:
            if name == "trivium":
                raise
            print(f"{name} failed and is left out: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    for name, found in texts.items():
        same = prefix(texts["trivium"], found)
        if device.type == "cpu" and same < 1:
            raise SystemExit(f"not the same work: {name} wrote other tokens than trivium")
        if same < 1:
            print(f"{name}: {same:.0%} of the tokens come before the first that differs from trivium's")
    return memory


class Task(NamedTuple):
    """What a round gives: `many` things in `steps` steps, with at least `moved` bytes read for each thing."""

    many: int
    steps: int
    moved: float


def lines(sides: dict[str, Side], task: Task, half: bool, number: int, ceiling: Ceilings) -> list[Line]:
    """The table of `number` rounds."""
    models = {id(side.model): side.model for side in sides.values()}.values()
    ours = sides["trivium"].model
    device = next(ours.parameters()).device
    # once only: each type is compiled anew, and what a model keeps in float32 is made anew, which graphs then lack
    if half and device.type == "cuda":
        _ = [model.bfloat16() for model in models]
    for_inference(ours)  # as `tv.load` does
    memory = checked(sides, device)
    runs = {name: sides[name].run for name in memory}
    if half and device.type != "cuda":  # after the check: bfloat16 has ties, and which of two equals wins is chance
        _ = [model.bfloat16() for model in models]
        for_inference(ours)
        rounds(runs, 1, device, time.perf_counter)  # warm-up of the other type
    seconds = rounds(runs, number, device, time.perf_counter)
    best = fastest(summary(seconds, tokens=task.many, steps=task.steps), list(runs)[1:] or list(runs))

    def work(line: Line) -> Work:
        rate = task.moved * line.tokens_per_second
        return Work(rate, rate / ceiling.bandwidth, memory[line.side])

    plain = summary(seconds, tokens=task.many, steps=task.steps, against=best)
    return [line._replace(work=work(line)) for line in plain]


def decoding(args: argparse.Namespace, device: torch.device, half: bool, ceiling: Ceilings) -> None:
    """Prompts of random ids, continued greedily."""
    model: ModelConfig = (TINY if args.tiny else WORKLOADS)[args.workload].model
    usual = Size(8, 6) if args.tiny else SIZES[args.workload]
    prompt, tokens = args.prompt or usual.prompt, args.tokens or usual.tokens
    if prompt + tokens > model.context:
        raise SystemExit(f"--prompt and --tokens are more than the context of {model.context}; lower one of them")
    first, second = twins(model, device)
    generator = torch.Generator().manual_seed(2)
    prompts: Texts = torch.randint(model.vocab, (args.batch, prompt), generator=generator).tolist()
    sides = {"trivium": Side(first, our_decoding(first, prompts, tokens))}
    if args.against == "hf":
        sides["hf loop"] = Side(second, their_loop(second, prompts, tokens, device))
        sides["hf dynamic"] = Side(second, their_decoding(second, prompts, tokens, device))
        sides["hf static"] = Side(second, their_decoding(second, prompts, tokens, device, "static"))
    moved = decoding_bytes(model, batch=args.batch, length=prompt + tokens / 2, size=2 if half else 4) / args.batch
    told = lines(sides, Task(args.batch * tokens, tokens, moved), half, args.rounds, ceiling)
    print(f"greedy decoding with {args.workload}: {count(first):,} parameters, {'bf16' if half else 'fp32'}")
    print(f"{args.batch} x {prompt} + {tokens} tokens, prompt included in the time; {args.rounds} rounds")
    print(*table(told, "token", unit="TB/s"), sep="\n")
    least = moved * args.batch / ceiling.bandwidth
    print(
        f"floor: {least * 1e3:.3g} ms a step, weights and cache once at {ceiling.bandwidth / 1e12:.3g} TB/s (measured)"
    )


def translating(args: argparse.Namespace, device: torch.device, half: bool, ceiling: Ceilings) -> None:
    """Real sentences by beam search; both sides write as many tokens."""
    sizes = [args.batch] if args.batch > 1 else [16] if device.type == "cpu" else [64, 128, 256]
    with tempfile.TemporaryDirectory() as scratch:
        found = sentences(Path(scratch), args.sentences, together=sizes[0], tiny=args.tiny, data=args.data)
    model = marian(found.vocab, tiny=args.tiny)
    first, second = twins(model, device)
    sides = {"trivium": Side(first, our_search(first, found, BEAMS))}
    if args.against == "hf":
        sides |= {f"hf {size}": Side(second, their_search(second, found, BEAMS, size, device)) for size in sizes}
    length = sum(found.limits) / len(found.limits)
    source = sum(map(len, found.sources)) / len(found.sources)
    # a sentence's own share: its keys and values at every step; the weights are shared by as many as go together
    alone = decoding_bytes(model, batch=BEAMS, length=length / 2, size=2 if half else 4, source=source)
    shared = decoding_bytes(model, batch=0, length=0, size=2 if half else 4)
    many = len(found.sources)
    told = lines(sides, Task(many, many, (alone - shared) * length), half, args.rounds, ceiling)
    print(f"translation by beam search, {BEAMS} beams: {count(first):,} parameters, {'bf16' if half else 'fp32'}")
    print(f"{len(found.sources)} sentences of {source:.1f} tokens, {length:.1f} written; {args.rounds} rounds")
    print(*table(told, "sent.", unit="TB/s", what="sent."), sep="\n")
    print(
        "TB/s: the caches of each sentence's beams alone; the weights, read once a step for a whole batch, come on top"
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=[*SIZES, TRANSLATE], default="gpt2-10m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--against", choices=["hf", "none"], default="hf", help="none times trivium alone")
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded together; translate: sentences, of hf")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of each prompt; 0: the usual")
    parser.add_argument("--tokens", type=int, default=0, help="new tokens of each prompt; 0: the usual")
    parser.add_argument("--sentences", type=int, default=512, help="translate: how many")
    parser.add_argument("--data", default="", help="translate: pairs as FILE.tsv or SOURCE,TARGET")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default=None, help="default: bf16 on cuda, else fp32")
    parser.add_argument("--tiny", action="store_true", help="the workload with a model of a few thousand weights")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    if min(args.batch, args.rounds) < 1:
        raise SystemExit("--batch and --rounds are at least 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    device = choose(args.device)
    half = (args.dtype or ("bf16" if device.type == "cuda" else "fp32")) == "bf16"
    ceiling = ceilings(device, time.perf_counter, tiny=args.tiny)
    (translating if args.workload == TRANSLATE else decoding)(args, device, half, ceiling)
    print(machine(device, {"torch": torch.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    typed(main)
