"""Greedy decoding side by side: the same GPT-2 by trivium and by Hugging Face, same prompts, same tokens."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file, it sees only its own folder

from bench.table import machine, rounds, summary, table
from bench.train import SHAPES, count, twins
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.models.transformer import Transformer, arrange
from trivium.training.device import choose

Texts = list[list[int]]  # the new ids of every prompt


def our_decoding(model: Transformer, prompts: Texts, tokens: int) -> Callable[[], Texts]:
    """The engine behind `generate` and the server; it hands every token to the host as it comes."""
    greedy = Sampling(temperature=0.0)
    requests = [Request(ids=tuple(ids), tokens=tokens, sampling=greedy, seed=0) for ids in prompts]

    def run() -> Texts:
        texts: Texts = [[] for _ in requests]
        for token in stream(model, requests, end=None):
            texts[token.row].append(token.id)
        return texts

    return run


def their_decoding(model: Any, prompts: Texts, tokens: int, device: torch.device) -> Callable[[], Texts]:
    """`generate` with its cache."""
    ids = torch.tensor(prompts, device=device)
    every = torch.ones_like(ids)

    @torch.inference_mode()
    def run() -> Texts:
        whole: Tensor = model.generate(
            ids, attention_mask=every, max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=0
        )
        texts: Texts = whole[:, ids.shape[1] :].tolist()
        return texts

    return run


def their_loop(model: nn.Module, prompts: Texts, tokens: int, device: torch.device) -> Callable[[], Texts]:
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


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--against", choices=["hf", "none"], default="hf", help="none times trivium alone")
    parser.add_argument("--shape", choices=list(SHAPES), default="10m")
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded together")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default=None, help="default: bf16 on cuda, else fp32")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    if args.threads:
        torch.set_num_threads(args.threads)
    shape, device = SHAPES[args.shape], choose(args.device)
    if args.prompt + args.tokens > shape.context:
        raise SystemExit(f"--prompt and --tokens are more than the context of {shape.context}; lower one of them")
    dtype = args.dtype or ("bf16" if device.type == "cuda" else "fp32")
    first, second = twins(shape, device)
    if device.type == "cpu":
        arrange(first)  # as `tv.load` does
    generator = torch.Generator().manual_seed(2)
    prompts: Texts = torch.randint(shape.vocab, (args.batch, args.prompt), generator=generator).tolist()
    sides = {"trivium": our_decoding(first, prompts, args.tokens)}
    if args.against == "hf":
        sides["hf loop"] = their_loop(second, prompts, args.tokens, device)
        sides["hf generate"] = their_decoding(second, prompts, args.tokens, device)
    texts = {name: run() for name, run in sides.items()}
    for name, found in texts.items():
        if found != texts["trivium"]:
            raise SystemExit(f"not the same work: {name} wrote other tokens than trivium")
    if dtype == "bf16":  # after the check: bfloat16 has ties, and which of two equal scores wins is chance
        first.bfloat16()
        second.bfloat16()
    rounds(sides, 1, device, time.perf_counter)  # warm-up
    seconds = rounds(sides, args.rounds, device, time.perf_counter)
    print(f"greedy decoding with a GPT-2 of {count(first):,} parameters ({shape}), {dtype}, eager")
    print(f"{args.batch} x {args.prompt} + {args.tokens} tokens, prompt included in the time; {args.rounds} rounds")
    lines = summary(seconds, tokens=args.batch * args.tokens, steps=args.tokens)
    print(*table(lines, "token"), sep="\n")
    print(machine(device, {"torch": torch.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
