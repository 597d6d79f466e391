"""What may stand behind a mask: an encoder's likeliest pieces for every [MASK] of a text."""

# N masks, D width, V vocabulary

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trivium.errors import RequestError
from trivium.generation.checks import require_whole
from trivium.generation.scorer import require_finite
from trivium.generation.states import frame_of, framed, read
from trivium.models.transformer import Transformer
from trivium.objectives.masked import MASK
from trivium.text.tokenizer import Tokenizer

_STAND_IN = "a"  # any letter: where it comes out as pieces of its own, the mask takes their place
_RARE = "\U00013000"  # a letter that no vocabulary has: it comes out as bytes, or as the unknown token


class Filling(str):
    """A piece that may stand behind a mask: a string that knows its id and its probability."""

    id: int
    probability: float

    def __new__(cls, text: str, *, id: int, probability: float) -> Filling:
        self = super().__new__(cls, text)
        self.id = id
        self.probability = probability
        return self


def fill(
    model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], *, top: int = 5, batch: int = 64
) -> list[list[list[Filling]]]:
    """For every text and each of its masks the `top` likeliest pieces, best first, given that all masks are masked."""
    if model.config.family != "encoder":
        raise RequestError(
            f"a model of the {model.config.family} family reads from left to right, it cannot fill a gap; "
            "load an encoder"
        )
    if MASK not in tokenizer.specials:
        raise RequestError(f"the tokenizer has no special token {MASK}: this encoder was not trained to fill gaps")
    require_whole("top", top, 1, None, "ask for at least one piece")
    mask = tokenizer.specials[MASK]
    literal = tokenizer.piece(mask)
    for number, text in enumerate(texts, start=1):
        if literal not in text:
            which = "the text" if len(texts) == 1 else f"text {number}"
            raise RequestError(f"{which} has no {literal} to fill; write it where a piece is missing")
    rows = framed(model, frame_of(model, tokenizer), [masked_ids(tokenizer, text) for text in texts])
    result: list[list[list[Filling]]] = [[] for _ in texts]
    for part in read(model, rows, batch=batch):
        places = [(row, at) for row, text in enumerate(part.texts) for at, id in enumerate(rows[text]) if id == mask]
        row_N, at_N = torch.tensor(places, device=model.device).T
        found = _likeliest(model, tokenizer, part.hidden[row_N, at_N], top)
        for (row, _), fillings in zip(places, found, strict=True):
            result[part.texts[row]].append(fillings)
    for text, masks in zip(texts, result, strict=True):
        for at, before in enumerate(text.split(literal)[:-1]):
            if before[-1:].isspace():  # the space that some pieces begin with is in the text already
                masks[at] = [_unspaced(filling) for filling in masks[at]]
    return result


def _unspaced(filling: Filling) -> Filling:
    text = filling.removeprefix(" ") or str(filling)
    return Filling(text, id=filling.id, probability=filling.probability)


def _likeliest(model: Transformer, tokenizer: Tokenizer, hidden_ND: Tensor, top: int) -> list[list[Filling]]:
    """The best pieces for each place; a special token and the unknown one are no text and never among them.

    A model may have more ids than its tokenizer: they have their share of the probability and are no pieces.
    """
    size = min(tokenizer.size, model.config.vocab)
    barred = sorted(id for id in {*tokenizer.specials.values(), *_unknown(tokenizer)} if id < size)
    with torch.inference_mode():
        logits_NV = model.head.logits(hidden_ND).float()
        require_finite(logits_NV.amax(-1))
        probability_NV = logits_NV.softmax(-1)[:, :size]
        probability_NV = probability_NV.index_fill(1, torch.tensor(barred, device=model.device), -1.0)
        best = probability_NV.topk(min(top, size - len(barred)))
    return [
        [Filling(tokenizer.decode([id]), id=id, probability=p) for id, p in zip(ids, values, strict=True)]
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _unknown(tokenizer: Tokenizer) -> set[int]:
    """The id that stands for what a tokenizer does not know, if it has one."""
    return {id for id in tokenizer.encode(_RARE) if tokenizer.piece_bytes(id).strip() not in _RARE.encode()}


def masked_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text in which each mask literal is one masked piece; every other special spelling is text.

    The literal is the tokenizer's own: [MASK], or what a published tokenizer has for it.

    The text is encoded with a letter in place of every mask, and the letter's piece is masked: so a space goes to the
    word to which it belongs in training. Where the letter grows together with its neighbours ("un[MASK]ed") the
    stretches between the masks are encoded each by itself.
    """
    mask = tokenizer.specials[MASK]
    parts = text.split(tokenizer.piece(mask))
    whole = _STAND_IN.join(parts)
    gaps = {len(_STAND_IN.join(parts[: index + 1])) for index in range(len(parts) - 1)}
    ids, spans = tokenizer.encode(whole), tokenizer.spans(whole)
    held = [gaps.intersection(range(*span)) for span in spans]
    alone = all(whole[first:last].strip() == _STAND_IN for (first, last), gap in zip(spans, held, strict=True) if gap)
    if not alone or set().union(*held) != gaps:
        pieces = [[*tokenizer.encode(part), mask] for part in parts]
        return [id for piece in pieces for id in piece][:-1]
    # a space as a piece of its own may cover the letter too: of several pieces the first becomes the mask
    gone = {at for at in range(1, len(ids)) if held[at] and held[at] == held[at - 1]}
    for at in (at for at, gap in enumerate(held) if gap) if not tokenizer.exact_cut else ():
        for left, right in ((at - 1, at), (at, at + 1)):
            other = left + right - at
            if 0 <= other < len(ids) and not whole[slice(*spans[other])].strip() and _one_word(tokenizer, ids, left):
                gone.add(other)  # a space as a piece of its own, yet part of the masked word
    return [mask if held[at] else id for at, id in enumerate(ids) if at not in gone]


def _one_word(tokenizer: Tokenizer, ids: Sequence[int], at: int) -> bool:
    """Whether no border lies between an id and the next."""
    return not tokenizer.ends_word(ids[at]) and not tokenizer.starts_word(ids[at + 1])
