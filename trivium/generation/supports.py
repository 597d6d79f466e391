"""Which ways of decoding are right for a model: every way asks here what the model's token mixers declare.

Padding, slots, beams that are read as tokens of one row and a pool of such rows need mixers that obey masks ("mask").
The others take the general way: sequences of equal length share a batch, and beams copy rows of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from trivium.errors import RequestError
from trivium.fast.hooks import has_hooks
from trivium.models.block import ParallelBlock, StandardBlock
from trivium.models.stack import PlainStack, own_state
from trivium.models.transformer import Transformer
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.mixers import ORDER, Decoding, can_roll_back, decoding_of


class _Mixer(NamedTuple):
    """A module that mixes tokens, and its name in the model."""

    name: str
    module: nn.Module

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"


def _mixers(side: str, stack: PlainStack | None) -> Iterator[_Mixer]:
    """Those of one side; a block of another package is one mixer, which has to declare for all that is inside."""
    for layer, block in enumerate(() if stack is None else stack.blocks):
        name = f"{side}.blocks.{layer}"
        if not isinstance(block, StandardBlock | ParallelBlock):
            yield _Mixer(name, block)
            continue
        yield _Mixer(f"{name}.attention", block.attention)
        cross = getattr(block, "cross", None)
        if cross is not None:
            yield _Mixer(f"{name}.cross", cross)


def _weakest(models: Sequence[Transformer]) -> tuple[Decoding, _Mixer | None]:
    """The weakest declaration of all mixers and whose it is; an encoder's own mixers need not decode."""
    weakest: tuple[Decoding, _Mixer | None] = ("mask", None)
    for model in models:
        read: list[tuple[Decoding, _Mixer]]
        read = [(decoding_of(mixer.module), mixer) for mixer in _mixers("decoder", model.decoder)]
        read += [
            ("mask" if decoding_of(mixer.module) == "mask" else "state", mixer)
            for mixer in _mixers("encoder", model.encoder)
        ]
        for found in read:
            weakest = max(weakest, found, key=lambda one: ORDER.index(one[0]))
    return weakest


def require_decoding(*models: Transformer) -> None:
    """Refuse models that cannot write token by token."""
    decoding, mixer = _weakest(models)
    if decoding == "none":
        raise RequestError(
            f'{mixer} needs a whole text at once (decoding = "none"), so this model cannot write token by token; '
            "build it with another mixer there"
        )


def supports_padding(*models: Transformer) -> bool:
    """Whether sequences of unequal length may share a batch: all mixers obey masks."""
    return _weakest(models)[0] == "mask"


def even_batches(
    models: Sequence[Transformer], lengths: Sequence[tuple[int, ...]], *, padding: bool = True
) -> list[list[int]]:
    """The numbers of the sequences that may share a batch: all of them, or without padding those of equal lengths."""
    if padding and supports_padding(*models):
        return [list(range(len(lengths)))] if lengths else []
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, length in enumerate(lengths):
        alike.setdefault(length, []).append(number)
    return list(alike.values())


def supports_slots(model: Transformer) -> bool:
    """Whether rows of different lengths may stand in one static cache; every layer keeps a source's keys and values."""
    if model.decoder is None or not supports_padding(model):
        return False
    if any(own_state(block) is not None for block in model.decoder.blocks):
        return False
    crosses = [getattr(block, "cross", None) for block in model.decoder.blocks]
    return model.encoder is None or all(isinstance(cross, MultiHeadAttention) for cross in crosses)


def require_slots(model: Transformer) -> None:
    """Refuse, for a running batch, a model whose mixers do not obey masks."""
    decoding, mixer = _weakest([model])
    if decoding != "mask":
        raise RequestError(
            f'{mixer} does not obey masks over its cache (decoding = "{decoding}"), so it is not decoded in slots; '
            "use stream"
        )


def supports_beam_tokens(*models: Transformer) -> bool:
    """Whether the beams of a text may be read as tokens of one row, each seeing only what it continues.

    Decoder and embedding are called directly then: a hook on the whole model would not be.
    """
    whole = all(type(model) is Transformer and not has_hooks(model) for model in models)
    kept = [block for model in models if model.decoder is not None for block in model.decoder.blocks]
    return whole and supports_padding(*models) and all(own_state(block) is None for block in kept)


def supports_pool(*models: Transformer) -> bool:
    """Whether texts may join and leave rows of a beam search: a row keeps sources in the shape of the own cache."""
    return supports_beam_tokens(*models) and all(map(_sources_fit, models))


def _sources_fit(model: Transformer) -> bool:
    if model.decoder is None:
        return False
    crosses = [getattr(block, "cross", None) for block in model.decoder.blocks]
    return all(
        isinstance(cross, MultiHeadAttention) and (cross.groups, cross.size, cross.value_size) == tuple(shape)
        for cross, shape in zip(crosses, model.decoder.cache_shapes, strict=True)
    )


def require_roll_back(*models: Transformer) -> None:
    """Refuse, for speculation, a model that cannot forget guesses it has read."""
    for model in models:
        for mixer in _mixers("decoder", model.decoder):
            if not can_roll_back(mixer.module):
                raise RequestError(
                    f"speculate: {mixer} cannot forget tokens it has read (can_roll_back is not declared); "
                    "leave speculate out"
                )
