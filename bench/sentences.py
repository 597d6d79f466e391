"""Translation for a benchmark: real sources, no end before its time, so that both sides write as many tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.workloads import TINY, WORKLOADS, pairs_of, run_context
from trivium.generation.beam import Beam, Search, poolable, search
from trivium.generation.scorer import Prompt, Scorer
from trivium.models.transformer import Transformer

TOGETHER = 16  # sentences of ours at a time where they cannot join as others leave: 64 beams, as `translate` has it
LONGER = 1.2  # as many times its source has a translation tokens


class Sentences(NamedTuple):
    """Sources by length, and how many tokens the translation of each has."""

    sources: list[list[int]]
    limits: list[int]
    vocab: int
    end: int  # which is never written: random weights would end anywhere

    @property
    def start(self) -> int:
        """The padding, which a decoder begins with: the last id, as in published Marian models."""
        return self.vocab - 1


def sentences(scratch: Path, number: int, *, together: int, tiny: bool, data: str) -> Sentences:
    """Sources of real pairs, the shortest first: a batch of similar lengths has hardly any padding.

    The translations of `together` neighbours are equally long, as those of a batch of the peer are.
    """
    workload = (TINY if tiny else WORKLOADS)["transformer"]
    base = run_context(workload, workload.recipe(device="cpu"), scratch, data=data)
    pairs = pairs_of(base.train)
    assert pairs is not None
    chosen = np.random.default_rng(0).permutation(len(pairs))[:number]
    rows = pairs.take(chosen)
    sizes = pairs.sizes[chosen, 0]
    sources = sorted((rows.ids[at, 1 : 1 + size].tolist() for at, size in enumerate(sizes)), key=len)
    last = [min(at - at % together + together, len(sources)) - 1 for at in range(len(sources))]
    limits = [max(1, round(LONGER * len(sources[at]))) for at in last]
    return Sentences(sources, limits, base.recipe.model.vocab + 1, base.tokenizer.end)


def batches(found: Sentences, size: int) -> list[range]:
    """Neighbours, `size` at a time."""
    return [range(first, min(first + size, len(found.sources))) for first in range(0, len(found.sources), size)]


def our_search(model: Transformer, found: Sentences, beams: int) -> Callable[[], list[list[int]]]:
    """Beam search over all sentences, as `translate` does it: neighbours together."""
    wanted = [
        Search(prompt=Prompt(ids=(found.start,), source=tuple(source)), tokens=limit)
        for source, limit in zip(found.sources, found.limits, strict=True)
    ]

    how = Beam(beams=beams)

    def run() -> list[list[int]]:
        together = len(wanted) if poolable(Scorer(model), wanted, how) else TOGETHER
        texts: list[list[int]] = []
        for part in batches(found, together):
            best = search(model, [wanted[at] for at in part], how, end=found.end, banned=(found.end,))
            texts += [text[0].ids for text in best]
        return texts

    return run


def their_search(
    model: Any, found: Sentences, beams: int, size: int, device: torch.device
) -> Callable[[], list[list[int]]]:
    """`generate` of neighbours; a batch stops at the longest limit in it, and what is beyond its own is cut off."""
    model.generation_config.forced_eos_token_id = None  # else the last token of every text is 0
    filled: list[tuple[Tensor, Tensor, int]] = []
    for part in batches(found, size):
        widest = max(len(found.sources[at]) for at in part)
        ids = torch.full((len(part), widest), found.start)
        for row, at in enumerate(part):
            ids[row, : len(found.sources[at])] = torch.tensor(found.sources[at])
        filled.append((ids.to(device), (ids != found.start).to(device), max(found.limits[at] for at in part)))

    @torch.inference_mode()
    def run() -> list[list[int]]:
        texts: list[list[int]] = []
        for ids, real, limit in filled:
            whole = model.generate(
                ids,
                attention_mask=real,
                num_beams=beams,
                do_sample=False,
                min_new_tokens=limit,
                max_new_tokens=limit,
                eos_token_id=found.end,
                pad_token_id=found.start,
            )
            texts += whole[:, 1:].tolist()
        return [text[:limit] for text, limit in zip(texts, found.limits, strict=True)]

    return run
