"""Training side by side: the same GPT-2 by trivium and by Hugging Face, with the same weights, in one process."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file, it sees only its own folder

from bench.table import machine, rounds, summary, table
from trivium.data.loader import Order
from trivium.data.packing import Rows
from trivium.data.shards import Stream
from trivium.models.block import Block
from trivium.models.config import ModelConfig, Stack
from trivium.models.transformer import Transformer, build
from trivium.optim.optimizers import AdamW
from trivium.optim.schedules import Constant
from trivium.parts.attention import MultiHead
from trivium.text.kinds import Bytes
from trivium.training.device import autocast, choose, settle
from trivium.training.guards import Soundness
from trivium.training.job import Job
from trivium.training.loop import computation, updates
from trivium.training.recipe import BatchConfig, Recipe
from trivium.training.scaling import scaler

OPTIM = AdamW(rate=3e-4)
CLIP = 1.0

# the parts of a block by our names
MATRICES = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.out",
    "feedforward.up",
    "feedforward.down",
)
NORMS = ("around_attention.norm", "around_feedforward.norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of a GPT-2; the heads are of 64."""

    width: int
    layers: int
    vocab: int = 8192
    context: int = 256

    @property
    def heads(self) -> int:
        return self.width // 64


SHAPES = {
    "tiny": Shape(width=64, layers=2, vocab=128, context=32),  # for tests
    "10m": Shape(width=320, layers=6),
    "124m": Shape(width=768, layers=12, vocab=50_257, context=1024),
}


def ours(shape: Shape) -> ModelConfig:
    """The GPT-2 block of trivium: learned positions, LayerNorm, tanh-GELU, biases, tied, no dropout."""
    block = Block(attention=MultiHead(heads=shape.heads, bias="all"))
    stack = Stack(layers=shape.layers, block=block)
    return ModelConfig(width=shape.width, context=shape.context, vocab=shape.vocab, decoder=stack)


def theirs(shape: Shape) -> nn.Module:
    """Hugging Face's GPT-2 of the same shape, set up for speed."""
    config = transformers.GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function="gelu_pytorch_tanh",  # the same function as the default gelu_new, in one kernel
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    model: Any = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it falls back to anyway, after a warning
    return cast(nn.Module, model)


def twins(shape: Shape, device: torch.device) -> tuple[Transformer, nn.Module]:
    """The two models with the same weights; refused unless parameter counts and logits agree."""
    first, second = build(ours(shape), seed=0), theirs(shape)
    # moved off their special values, so that a bias or a gain in the wrong place shows
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in first.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    copy(first, second)
    if count(first) != count(second):
        raise SystemExit(f"not the same model: {count(first):,} and {count(second):,} parameters")
    first, second = first.eval(), second.eval()
    tokens = torch.randint(shape.vocab, (2, shape.context), generator=generator)
    with torch.inference_mode():
        apart = float((first.head.logits(first(tokens).hidden) - second(tokens).logits).abs().max())
    if not apart <= 1e-5:
        raise SystemExit(f"not the same function: logits are up to {apart:.1e} apart")
    return first.to(device), second.to(device)


def count(model: nn.Module) -> int:
    """Distinct parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def copy(source: Transformer, target: nn.Module) -> None:
    """Give Hugging Face's GPT-2 the weights of ours; its Conv1D keeps matrices as [inputs, outputs]."""
    weights = dict(source.named_parameters())
    found: dict[str, Tensor] = {
        "transformer.wte.weight": weights["embedding.weight"],
        "transformer.wpe.weight": weights["decoder.positions.0.table"],
        "transformer.ln_f.weight": weights["decoder.final.weight"],
        "transformer.ln_f.bias": weights["decoder.final.bias"],
    }
    for layer in range(source.config.layers):
        for kind in ("weight", "bias"):
            own: dict[str, Tensor] = {}
            for name in MATRICES + NORMS:
                tensor = weights[f"decoder.blocks.{layer}.{name}.{kind}"]
                own[name] = tensor.mT if tensor.ndim == 2 else tensor
            merged = torch.cat([own[f"attention.{name}"] for name in ("query", "key", "value")], dim=-1)
            renamed = {
                "ln_1": own["around_attention.norm"],
                "attn.c_attn": merged,
                "attn.c_proj": own["attention.out"],
                "ln_2": own["around_feedforward.norm"],
                "mlp.c_fc": own["feedforward.up"],
                "mlp.c_proj": own["feedforward.down"],
            }
            found |= {f"transformer.h.{layer}.{name}.{kind}": tensor for name, tensor in renamed.items()}
    for name, parameter in target.named_parameters():
        parameter.copy_(found.pop(name))
    assert not found


def recipe(
    shape: Shape, *, device: torch.device, dtype: Literal["auto", "fp32", "bf16"], compiled: bool, rows: int
) -> Recipe:
    """What both sides are told."""
    wanted = Recipe(
        model=ours(shape),
        device=str(device),
        precision=dtype,
        compile="on" if compiled else "off",
        clip=CLIP,
        optim=OPTIM,
        schedule=Constant(),
        batch=BatchConfig(rows=rows),
    )
    return settle(wanted)


def our_steps(model: Transformer, plan: Recipe, rows: Rows, number: int) -> Callable[[], None]:
    """`number` updates by trivium's own training loop."""
    task = plan.objective.bind(Bytes().build([]), plan.model)  # its ids do not matter: nothing is masked
    job = Job(
        recipe=plan,
        model=model,
        task=task,
        average=plan.average.build(model),
        scaler=scaler(plan.precision),
        micro=plan.micro,
        optimizer=plan.optim.build(model),
        rows=rows,
        order=Order(len(rows), plan.batch.rows, plan.seed),
        soundness=Soundness(plan.nonfinite, model.device),
        compute=computation(model, task, autocast(plan), plan.compile == "on"),
        total=sys.maxsize,
    )
    endless = updates(job)

    def run() -> None:
        for _ in range(number):
            next(endless)

    return run


def their_steps(model: nn.Module, plan: Recipe, rows: Rows, number: int) -> Callable[[], None]:
    """`number` updates by the loop that a user of Hugging Face writes: same optimizer, groups, clipping and rows."""
    device = torch.device(plan.device)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": OPTIM.decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    betas = (OPTIM.beta1, OPTIM.beta2)
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.rate, betas=betas, eps=OPTIM.eps, fused=True)
    order = Order(len(rows), plan.batch.rows, plan.seed)
    cursor = 0
    half: Callable[[], contextlib.AbstractContextManager[object]] = autocast(plan)
    forward: Callable[..., Any] = torch.compile(model) if plan.compile == "on" else model
    model.train()

    def run() -> None:
        nonlocal cursor
        for _ in range(number):
            tokens = torch.from_numpy(rows.take(order.batch(cursor)).ids[:, :-1]).to(device)
            with half():
                loss = forward(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            cursor += len(tokens)

    return run


def random_rows(shape: Shape, number: int) -> Rows:
    """Rows of random ids: nothing to learn, but speed does not depend on that."""
    ids = np.random.default_rng(0).integers(0, shape.vocab, number * shape.context + 1).astype(np.uint16)
    return Rows(Stream(ids=ids, starts=np.zeros(1, np.int64), text_bytes=len(ids)), shape.context)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--against", choices=["hf", "none"], default="hf", help="none times trivium alone")
    parser.add_argument("--shape", choices=list(SHAPES), default="10m")
    parser.add_argument("--steps", type=int, default=4, help="steps of each side in a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=8, help="rows in a batch")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default=None, help="default: bf16 on cuda, else fp32")
    parser.add_argument("--compile", action="store_true", help="torch.compile on both sides")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    if args.threads:
        torch.set_num_threads(args.threads)
    shape, device = SHAPES[args.shape], choose(args.device)
    plan = recipe(
        shape,
        device=device,
        dtype=args.dtype or ("bf16" if device.type == "cuda" else "fp32"),
        compiled=args.compile,
        rows=args.rows,
    )
    first, second = twins(shape, device)
    rows = random_rows(shape, 64 * args.rows)
    sides = {"trivium": our_steps(first, plan, rows, args.steps)}
    if args.against == "hf":
        sides["hf"] = their_steps(second, plan, rows, args.steps)
    rounds(sides, 2, device, time.perf_counter)  # warm-up: compilation, allocator, moments
    seconds = rounds(sides, args.rounds, device, time.perf_counter)
    tokens = args.steps * args.rows * shape.context
    how = f"{plan.precision}, {'compiled' if args.compile else 'eager'}, AdamW fused, clip {CLIP:g}"
    print(f"training a GPT-2 of {count(first):,} parameters ({shape}), {args.rows} rows a step, {how}")
    print(f"forward, loss, backward, clipping, update; {args.rounds} rounds of {args.steps} steps, sides in turn")
    print(*table(summary(seconds, tokens=tokens, steps=args.steps), "step"), sep="\n")
    print(machine(device, {"torch": torch.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
