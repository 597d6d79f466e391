"""The live and the finished texts of a beam search as tensors, and one step of it without asking the host."""

# B texts, K beams, J beams so far (1 at first, then K), R = B * J rows, C candidates of a text, n wanted, L steps,
# V vocabulary, M chunks of it

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128  # ids whose highest score is looked at first


class Rules(NamedTuple):
    """What is the same for every text and step."""

    beams: int
    vocab: int  # ids from here on are never written
    shut: Tensor  # [vocab] True for ids that are never written
    ends: Tensor | None  # ids [any] that end a text
    penalties: Tensor  # [L] what a log-probability is divided by, for each length from 0


class Frontier(NamedTuple):
    """Where the search stands in each text. Of a text that is done nothing changes any more."""

    live: Tensor  # [B, K] log-probabilities of the live beams, best first; -inf where there is none
    cover: Tensor  # [B, K] what coverage would add to the score of each
    score: Tensor  # [B, n] of the best finished texts, best first; -inf where there is none
    logprob: Tensor  # [B, n]
    length: Tensor  # [B, n] tokens of each, its END counted
    beam: Tensor  # [B, n] whose continuation it was
    steps: Tensor  # [B] tokens of the live beams
    done: Tensor  # [B]
    sound: Tensor  # [B] 0, or nan once the scores were not finite
    limit: Tensor  # [B] tokens at most
    most: Tensor  # [B] the penalty at the limit
    ids: Tensor  # [B, L, K] the token of each step
    parents: Tensor  # [B, L, K] the beam before it that it continues


def rules(
    beams: int,
    vocab: int,
    banned: Collection[int],
    ends: Collection[int],
    penalties: Sequence[float],
    device: torch.device,
) -> Rules:
    """The rules of a search on its device; `penalties` are those of the lengths from 0 on."""
    exact = torch.float32 if device.type == "mps" else torch.float64  # Python's own, where the device has them
    shut_V = torch.zeros(vocab, dtype=torch.bool)
    shut_V[sorted(banned)] = True
    ending = torch.tensor(sorted(ends), device=device) if ends else None
    divisors_L = torch.tensor(penalties, dtype=exact, device=device)
    return Rules(beams, vocab, shut_V.to(device), ending, divisors_L)


def frontier(limits: Sequence[int], longest: int, rules: Rules, wanted: int) -> Frontier:
    """The search before its first step: one live beam, the empty text."""
    device, exact, texts = rules.penalties.device, rules.penalties.dtype, len(limits)
    limit_B = torch.tensor(limits, device=device)
    live_BK = torch.full((texts, rules.beams), -math.inf, device=device)
    live_BK[:, 0] = 0
    none_Bn = torch.zeros(texts, wanted, dtype=torch.long, device=device)
    return Frontier(
        live=live_BK,
        cover=torch.zeros_like(live_BK),
        score=torch.full((texts, wanted), -math.inf, dtype=exact, device=device),
        logprob=torch.full((texts, wanted), -math.inf, device=device),
        length=none_Bn,
        beam=none_Bn.clone(),
        steps=torch.zeros_like(limit_B),
        done=torch.zeros(texts, dtype=torch.bool, device=device),
        sound=torch.zeros(texts, device=device),
        limit=limit_B,
        most=rules.penalties[limit_B],
        ids=torch.zeros(texts, longest + 1, rules.beams, dtype=torch.long, device=device),
        parents=torch.zeros(texts, longest + 1, rules.beams, dtype=torch.long, device=device),
    )


def grow(
    state: Frontier, rules: Rules, scores_BJV: Tensor, cover_BJ: Tensor | None = None
) -> tuple[Frontier, Tensor, Tensor]:
    """One more token for every text: the new frontier, the ids [B, K] of its live beams and whom they continue.

    Only the two histories change in place. A text that ends here is ranked by log p / penalty + coverage.
    """
    return advance(state, rules, candidates(scores_BJV, state.live, rules), cover_BJ)


def advance(
    state: Frontier, rules: Rules, found: Candidates, cover_BJ: Tensor | None = None
) -> tuple[Frontier, Tensor, Tensor]:
    """The same from the candidates on."""
    logprob_BC, beam_BC, id_BC = found.logprob, found.beam, found.id
    alive_BC = logprob_BC > -math.inf
    done_B1 = state.done[:, None]
    score_Bn, logprob_Bn, length_Bn, beam_Bn = state.score, state.logprob, state.length, state.beam
    if rules.ends is not None:
        ends_BC = (id_BC[..., None] == rules.ends).any(-1)
        ended_BK = (ends_BC & alive_BC & ~done_B1)[:, : rules.beams]
        alive_BC = alive_BC & ~ends_BC
        if len(rules.ends) > 1:
            ended_BK = _first(ended_BK, beam_BC[:, : rules.beams])
        length_B1 = state.steps[:, None] + 1
        ranked_BK = logprob_BC[:, : rules.beams].to(score_Bn.dtype) / rules.penalties[length_B1]
        if cover_BJ is not None:
            ranked_BK = ranked_BK + cover_BJ.gather(1, beam_BC[:, : rules.beams])
        ranked_BK = ranked_BK.masked_fill(~ended_BK, -math.inf)
        # stable: of equals the one that was found earlier stays first
        best = torch.cat((score_Bn, ranked_BK), 1).sort(dim=1, descending=True, stable=True)
        order_Bn = best.indices[:, : score_Bn.shape[1]]
        score_Bn = best.values[:, : score_Bn.shape[1]]
        logprob_Bn = torch.cat((logprob_Bn, logprob_BC[:, : rules.beams]), 1).gather(1, order_Bn)
        length_Bn = torch.cat((length_Bn, length_B1.expand_as(ended_BK)), 1).gather(1, order_Bn)
        beam_Bn = torch.cat((beam_Bn, beam_BC[:, : rules.beams]), 1).gather(1, order_Bn)
    # the first K that live on, in their order: the places are all different, so that there are no ties
    place_C = torch.arange(logprob_BC.shape[1], device=logprob_BC.device)
    order_BK = torch.where(alive_BC, place_C, place_C + len(place_C)).topk(rules.beams, largest=False).indices
    live_BK = logprob_BC.masked_fill(~alive_BC, -math.inf).gather(1, order_BK)
    parent_BK, id_BK = beam_BC.gather(1, order_BK), id_BC.gather(1, order_BK)
    at_B1K = state.steps[:, None, None].expand(-1, 1, rules.beams)
    state.ids.scatter_(1, at_B1K, id_BK[:, None])
    state.parents.scatter_(1, at_B1K, parent_BK[:, None])
    steps_B = state.steps + ~state.done
    best_B = live_BK[:, 0]
    # no live beam can win: more tokens only lower log p, and at best all of it is divided by the most
    settled_B = best_B.to(score_Bn.dtype) / state.most <= score_Bn[:, -1]
    cover_BK = state.cover
    if cover_BJ is not None:
        cover_BK = torch.where(done_B1, cover_BK, cover_BJ.gather(1, parent_BK))
    grown = Frontier(  # not `_replace`: torch 2.11 compiles that wrongly
        live=torch.where(done_B1, state.live, live_BK),
        cover=cover_BK,
        score=score_Bn,
        logprob=logprob_Bn,
        length=length_Bn,
        beam=beam_Bn,
        steps=steps_B,
        done=state.done | settled_B | (best_B == -math.inf) | (steps_B >= state.limit),
        sound=torch.where(state.done, state.sound, state.sound + found.sound),
        limit=state.limit,
        most=state.most,
        ids=state.ids,
        parents=state.parents,
    )
    return grown, id_BK, parent_BK


class Candidates(NamedTuple):
    """Continuations of each text, best first: at least K of them, those that cannot be at -inf."""

    logprob: Tensor  # [B, C]
    beam: Tensor
    id: Tensor
    sound: Tensor  # [B] 0, or nan if the scores are not finite


def candidates(scores_BJV: Tensor, live_BK: Tensor, rules: Rules) -> Candidates:
    """The best 2 K of every text: K of them live on even if all the others are END.

    With several ids that end a text there are K more for each. Of equals the better beam is first, then the lower id.
    """
    texts, beams, _ = scores_BJV.shape
    count = (1 + max(1, 0 if rules.ends is None else len(rules.ends))) * rules.beams
    own_RC, ids_RC = _best(scores_BJV.flatten(0, 1), rules, count)
    sound_R = own_RC[:, 0] * 0  # nan if it is not finite
    logprob_BJC = own_RC.view(texts, beams, -1) + live_BK[:, :beams, None]
    each = logprob_BJC.shape[2]
    best = logprob_BJC.flatten(1).sort(dim=1, descending=True, stable=True)
    logprob_BC, order_BC = best.values[:, :count], best.indices[:, :count]
    id_BC = ids_RC.view(texts, -1).gather(1, order_BC)
    beam_BC = order_BC.div(each, rounding_mode="floor")
    missing = rules.beams - logprob_BC.shape[1]
    if missing > 0:
        logprob_BC = F.pad(logprob_BC, (0, missing), value=-math.inf)
        beam_BC, id_BC = (F.pad(one, (0, missing)) for one in (beam_BC, id_BC))
    return Candidates(logprob_BC, beam_BC, id_BC, sound_R.view(texts, beams).sum(1))


def _best(scores_RV: Tensor, rules: Rules, count: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the best ids of each row that may be written, and these; the others at -inf."""
    scores_RV = scores_RV.float()
    logprobs_RV = scores_RV.log_softmax(-1)
    scores_RV = scores_RV[:, : rules.vocab].masked_fill(rules.shut, -math.inf)
    values_RC, ids_RC = top(scores_RV, count)
    return logprobs_RV.gather(1, ids_RC).masked_fill(values_RC == -math.inf, -math.inf), ids_RC


def _first(ended_BK: Tensor, beam_BK: Tensor) -> Tensor:
    """Of several ids that end one text only the likeliest: the first of each beam."""
    same_BKK = (beam_BK[:, :, None] == beam_BK[:, None, :]) & ended_BK[:, None, :]
    return ended_BK & ~same_BKK.tril(-1).any(-1)


def top(scores_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest `count` scores of each row and their ids, best first, equal ones by id.

    They lie within the `count` chunks of the vocabulary whose highest scores are the highest: only those are sorted.
    """
    rows, vocab = scores_RV.shape
    count = min(count, vocab)
    whole = vocab // CHUNK
    if whole < 2 * count:
        keys_RC = _keys(scores_RV, torch.arange(vocab, device=scores_RV.device)).topk(count, dim=1).values
    else:
        highest_RM = scores_RV[:, : whole * CHUNK].view(rows, whole, CHUNK).amax(-1)
        if whole * CHUNK < vocab:
            highest_RM = torch.cat((highest_RM, scores_RV[:, whole * CHUNK :].amax(-1, keepdim=True)), 1)
        numbers_M = torch.arange(highest_RM.shape[1], device=scores_RV.device)
        chunks_RC = _numbers(_keys(highest_RM, numbers_M).topk(count, dim=1, sorted=False).values)
        inside = torch.arange(CHUNK, device=scores_RV.device)
        ids_RN = (chunks_RC[:, :, None] * CHUNK + inside).view(rows, -1)
        near_RN = scores_RV.gather(1, ids_RN.clamp(max=vocab - 1)).masked_fill(ids_RN >= vocab, -math.inf)
        keys_RC = _keys(near_RN, ids_RN).topk(count, dim=1).values
    ids_RC = _numbers(keys_RC)
    return scores_RV.gather(1, ids_RC), ids_RC


def _keys(scores: Tensor, numbers: Tensor) -> Tensor:
    """Whole numbers in the order of float32 scores, the lower number first among equals: no two are the same."""
    scores = scores.masked_fill(scores == 0, 0.0)  # there are two zeros, with different bits
    bits = scores.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return ordered * (1 << 32) + (0x7FFFFFFF - numbers)


def _numbers(keys: Tensor) -> Tensor:
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF)
