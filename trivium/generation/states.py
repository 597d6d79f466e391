"""Whole texts as a model reads them without writing: framed, checked, in batches of about equal length."""

# B texts, T tokens, D width

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trivium.errors import RequestError
from trivium.generation.engine import evaluating
from trivium.generation.scorer import right_padded
from trivium.generation.supports import supports_padding
from trivium.models.transformer import States, Transformer
from trivium.text import framing
from trivium.text.adopt import Frame
from trivium.text.tokenizer import Tokenizer


class Read(NamedTuple):
    """Some texts after the last layer: their numbers, their states [B, T, D], and which of the T are real [B, T]."""

    texts: list[int]
    hidden: Tensor
    real: Tensor


def frame_of(model: Transformer, tokenizer: Tokenizer) -> Frame:
    """What stands around the ids of a text for this model."""
    return framing.frame_of(model.config.family, tokenizer)


def framed(model: Transformer, frame: Frame, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ids as the model reads them, or a sentence that says which text it cannot read."""
    result = []
    for number, ids in enumerate(texts, start=1):
        which = "the text" if len(texts) == 1 else f"text {number}"
        if not ids:
            raise RequestError(f"{which} is empty; give at least one character")
        row = [*frame.before, *ids, *frame.after]
        if len(row) > model.config.context:
            raise RequestError(
                f"{which} has {len(row)} tokens, the model reads at most {model.config.context}; shorten it"
            )
        if not 0 <= min(row) <= max(row) < model.config.vocab:
            raise RequestError(f"{which} has ids outside the model's vocabulary of {model.config.vocab}")
        result.append(row)
    return result


# Tokens that go through the layers together on a CPU. BERT-base on one core of a busy machine: 128 to 768 took about
# the same time, 1,024 a third more. Two cores have not been measured.
_TOKENS = 512


def read(model: Transformer, rows: Sequence[Sequence[int]], *, batch: int = 64) -> Iterator[Read]:
    """The last states of every text, of an encoder-decoder those of its encoder; texts of like length together.

    At most `batch` texts are read at a time.
    """
    tokens = _TOKENS if model.device.type == "cpu" else 0
    even = model.encoder is not None and not supports_padding(model)
    for chunk in _chunks([len(row) for row in rows], batch, tokens, even=even):
        with evaluating(model), torch.inference_mode():
            tokens_BT, real_BT = right_padded([rows[index] for index in chunk], model.device)
            hidden_BTD = _states(model, tokens_BT, real_BT)
        yield Read(chunk, hidden_BTD, torch.ones_like(tokens_BT, dtype=torch.bool) if real_BT is None else real_BT)


def _chunks(lengths: Sequence[int], most: int, tokens: int, *, even: bool) -> Iterator[list[int]]:
    """The numbers of all texts from short to long, at most `most` at a time, and so many `tokens` if that is not 0.

    With `even` only texts of one length come together.
    """
    chunk: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        full = len(chunk) == most or (chunk and tokens and (len(chunk) + 1) * lengths[index] > tokens)
        if full or (chunk and even and lengths[index] != lengths[chunk[0]]):
            yield chunk
            chunk = []
        chunk.append(index)
    if chunk:
        yield chunk


def _states(model: Transformer, tokens_BT: Tensor, real_BT: Tensor | None) -> Tensor:
    if model.config.family == "encoder-decoder":
        return model.encode(tokens_BT, real_BT)
    # behind a causal mask nobody sees the padding at the end
    states: States = model(tokens_BT, padding=real_BT if model.config.family == "encoder" else None)
    return states.hidden


_WHOLE = frozenset(
    {torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64}
)
NUMBERS = _WHOLE | {torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64}

Ids = Tensor | Sequence[Sequence[int]] | Sequence[int]


def logits_of(
    model: Transformer, ids: Ids, target: Ids | None, *, segments: Ids | None, padding: Tensor | None
) -> Tensor:
    """The logits of a model for ids as they are, [B, T, V]; [T, V] for a single row."""
    two = model.config.family == "encoder-decoder"
    if two != (target is not None):
        raise RequestError(
            "an encoder-decoder needs a source and a target: m.logits(source, target)"
            if two
            else f"a model of the {model.config.family} family takes one row of ids and no target"
        )
    first = _tensor(model, ids)
    tokens = first if target is None else _tensor(model, target)
    if first.shape[:-1] != tokens.shape[:-1]:
        raise RequestError(f"a source of shape {list(first.shape)} does not fit a target of {list(tokens.shape)}")
    single = tokens.ndim == 1
    inputs: dict[str, Tensor] = {"source": first} if two else {}
    if segments is not None:
        kinds = model.embedding.segments
        if kinds is None:
            raise RequestError("this model has no segments: leave segments= out")
        inputs["segments"] = _beside("segments", segments, tokens, len(kinds) - 1)
    if padding is not None:
        if not supports_padding(model):
            raise RequestError("padding: a mixer of this model does not obey masks; leave it out, ask for rows alone")
        inputs["source_padding" if two else "padding"] = _beside("padding", padding, first, 1).bool()
    inputs = {name: given[None] if single else given for name, given in inputs.items()}
    with evaluating(model), torch.inference_mode():
        hidden = model(tokens[None] if single else tokens, **inputs).hidden
        result = model.head.logits(hidden)
    return result[0] if single else result


def _beside(name: str, given: Ids, ids: Tensor, most: int) -> Tensor:
    """A number from 0 to `most` for each of the ids."""
    try:
        numbers = torch.as_tensor(given, device=ids.device)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise RequestError(f"{name}: its rows are not equally long; its shape must be that of the ids") from None
    meaning = "1 (or True) at the real ids and 0 at the padding" if name == "padding" else f"numbers from 0 to {most}"
    if not is_plain(numbers):
        raise RequestError(f"{name}: give {meaning}")
    if numbers.shape != ids.shape:
        raise RequestError(f"{name}: its shape must be that of the ids, {list(ids.shape)}")
    whole = numbers.long()  # one of 64 unsigned bits that is too large becomes negative
    exact = numbers.dtype in _WHOLE or bool((whole == numbers).all())
    if not exact or not 0 <= int(whole.min()) <= int(whole.max()) <= most:
        raise RequestError(f"{name}: give {meaning}")
    return whole


def is_plain(tensor: Tensor, dtypes: frozenset[torch.dtype] = NUMBERS) -> bool:
    """Whether torch computes with a tensor as usual: it is of one of these types and neither sparse nor nested."""
    return not tensor.is_nested and tensor.layout == torch.strided and tensor.dtype in dtypes


def _tensor(model: Transformer, ids: Ids) -> Tensor:
    try:
        tokens = torch.as_tensor(ids, device=model.device)
    except (ValueError, TypeError):
        raise RequestError("logits takes rows of ids that are equally long; pad them or ask one by one") from None
    except (RuntimeError, OverflowError):  # what no tensor can be made of, such as None
        raise RequestError("logits takes ids as whole numbers, [T] or [B, T], at least one") from None
    if not is_plain(tokens, _WHOLE) or not tokens.numel() or tokens.ndim not in (1, 2):
        raise RequestError("logits takes ids as whole numbers, [T] or [B, T], at least one")
    tokens = tokens.long()  # one of 64 unsigned bits that is too large becomes negative
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < model.config.vocab:
        raise RequestError(f"an id is outside the model's vocabulary of {model.config.vocab}")
    return tokens
