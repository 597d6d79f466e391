"""The peers: Hugging Face's model of the same architecture, or `torch.nn.Transformer`, with the same weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from bench.torch_transformer import TorchTransformer
from bench.workloads import CLIP, OPTIM
from trivium.data.batch import Batch
from trivium.errors import RequestError
from trivium.interop.hf import find
from trivium.labels import IGNORED
from trivium.models.config import ModelConfig
from trivium.models.transformer import Transformer, build, weights
from trivium.training.device import autocast
from trivium.training.recipe import Recipe

Inputs = dict[str, Tensor]
Steps = Callable[[int], None]

# the same function as the gelu_new of GPT-2's files, in one kernel and not in eight
FASTER = {"activation_function": "gelu_pytorch_tanh"}


def twins(config: ModelConfig, device: torch.device) -> tuple[Transformer, nn.Module]:
    """Ours and theirs with the same weights; refused unless parameter counts and logits agree."""
    first = build(config, seed=0)
    unsettle(first)
    first = first.to(device).eval()
    return first, twin(first).eval()


@torch.no_grad()
def unsettle(model: nn.Module) -> None:
    """Move gains and biases off their special values, so that one in the wrong place shows."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_((0.02 * torch.randn(parameter.shape, generator=generator)).to(parameter.device))


def twin(model: Transformer) -> nn.Module:
    """The peer of a model beside it on its device; refused unless parameter counts and logits agree."""
    peer = hugging_face(model)
    if peer is None:
        peer = TorchTransformer.like(model)
    if count(model) != count(peer):
        raise SystemExit(f"not the same model: {count(model):,} and {count(peer):,} parameters")
    apart = gap(model, peer)
    most = 1e-5 if model.device.type == "cpu" else 1e-3  # a GPU adds up in other orders
    if not apart <= most:
        raise SystemExit(f"not the same function: logits are up to {apart:.1e} apart")
    return peer


@torch.no_grad()
def hugging_face(model: Transformer) -> nn.Module | None:
    """Hugging Face's model with our weights, by the rules of trivium's exports; None if it has no such architecture."""
    try:
        kind, architecture, table = find(model.config)
    except RequestError:  # the Transformer of 2017 has sinusoids that no class of theirs computes
        return None
    faster = FASTER if kind == "gpt2" else {}
    # a padding id would have no gradient, in their models alone
    nothing = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    settings = transformers.AutoConfig.for_model(**{**nothing, **table, **faster})
    settings._attn_implementation = "sdpa"
    with torch.device(model.device):
        peer: Any = getattr(transformers, table["architectures"][0])(settings)
    rules = architecture.rules(model.config)
    missing, extra = peer.load_state_dict(dict(rules.write(weights(model))), strict=False)
    learned = {name for name, parameter in peer.named_parameters() if parameter.requires_grad}  # sinusoids are not
    wrong = [*extra, *(name for name in missing if name in learned and name not in rules.copies)]
    if wrong:
        raise SystemExit(f"not the same model: {wrong[0]} has no counterpart")
    if kind == "gpt2":
        peer.loss_type = "ForCausalLM"  # what it falls back to anyway, after a warning
    return cast(nn.Module, peer)


def count(model: nn.Module) -> int:
    """Distinct parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@torch.inference_mode()
def gap(model: Transformer, peer: nn.Module) -> float:
    """How far the logits of both are apart at most, on random ids in float32."""
    size = min(64, model.config.context)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(model.config.vocab, (2, 2, size), generator=generator).to(model.device)
    inputs = {"tokens": ids[0]}
    if model.config.family == "encoder-decoder":
        inputs |= {"source": ids[1], "source_padding": torch.ones_like(ids[1], dtype=torch.bool)}
    training = model.training, peer.training
    model.eval()
    peer.eval()
    ours = model.head.logits(model(**inputs).hidden)
    theirs = peer(**translated(Batch(inputs=inputs, targets={}, counts={}))).logits
    model.train(training[0])
    peer.train(training[1])
    return float((ours - theirs).abs().max())


def translated(batch: Batch) -> Inputs:
    """A batch by the names that Hugging Face gives its inputs; `shift_labels` are labels that need no shifting."""
    given, targets = batch.inputs, batch.targets
    labels = targets.get("labels")
    if "where" in targets and labels is not None:
        real = labels != IGNORED
        every = torch.full_like(given["tokens"], IGNORED)
        every.view(-1)[targets["where"][real]] = labels[real]
        return {"input_ids": given["tokens"], "labels": every}
    found = {} if labels is None else {"labels": labels}
    if "source" in given:
        padding = {"attention_mask": given["source_padding"]} if "source_padding" in given else {}
        return {"input_ids": given["source"], "decoder_input_ids": given["tokens"], **padding, **found}
    return {"input_ids": given["tokens"], **found, **({} if labels is None else {"shift_labels": labels})}


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The same fused AdamW with the same two groups."""
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in own if parameter.ndim > 1], "weight_decay": OPTIM.decay},
        {"params": [parameter for parameter in own if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (OPTIM.beta1, OPTIM.beta2)
    return torch.optim.AdamW(groups, lr=OPTIM.rate, betas=betas, eps=OPTIM.eps, fused=True)


def steps(model: nn.Module, recipe: Recipe, batches: Iterator[Inputs]) -> Steps:
    """Updates by the loop that a user of the peer writes: same optimizer, clipping and precision."""
    moves = optimizer(model)
    half: Callable[[], contextlib.AbstractContextManager[object]] = autocast(recipe)
    many = isinstance(model, TorchTransformer)  # shapes
    forward: Callable[..., Any] = model
    if recipe.compile != "off":
        forward = torch.compile(model, dynamic=True if many else None)
    model.train()

    def run(number: int) -> None:
        for _ in range(number):
            with half():
                loss = forward(**next(batches)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            moves.step()
            moves.zero_grad(set_to_none=True)

    return run
