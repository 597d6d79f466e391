"""How close translations come to their references: BLEU and chrF by sacrebleu, each with its signature (spec §4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from trivium.errors import RequestError
from trivium.evaluation.likelihood import Tick
from trivium.generation.beam import Beam
from trivium.generation.translation import search_texts
from trivium.models.transformer import Transformer
from trivium.text.tokenizer import Tokenizer


class Quality(NamedTuple):
    """One score of sacrebleu, and the signature without which it compares with nothing."""

    score: float
    signature: str


def quality(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Quality]:
    """Corpus BLEU, cased and lower-cased, and chrF of detokenised texts; every hypothesis has one reference or more."""
    if not hypotheses or len(hypotheses) != len(references) or not all(references):
        raise RequestError(
            f"{len(hypotheses)} translations and {len(references)} references do not fit; each needs at least one"
        )
    # sacrebleu wants the first references of all, then the second ones, and takes None where there is no more; its
    # own types do not know that
    most = max(map(len, references))
    streams: list[list[Any]] = [[given[at] if at < len(given) else None for given in references] for at in range(most)]
    metrics: dict[str, BLEU | CHRF] = {"bleu": BLEU(), "bleu_lc": BLEU(lowercase=True), "chrf": CHRF()}
    found = {}
    for name, metric in metrics.items():
        score = metric.corpus_score(hypotheses, streams).score
        found[name] = Quality(float(score), str(metric.get_signature()))
    return found


class Translated(NamedTuple):
    """What a model made of each source, with the scores of all together."""

    texts: list[str]
    quality: dict[str, Quality]


def translate_and_score(
    model: Transformer,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    beam: Beam,
    tick: Tick = lambda done, of: None,
) -> Translated:
    """The best translation of each source by beam search, on one line, against its references."""
    if model.config.family != "encoder-decoder":
        raise RequestError(f"a model of the {model.config.family} family cannot translate; load an encoder-decoder")
    found = search_texts(model, tokenizer, sources, beam=beam, tick=tick)
    texts = [" ".join(best[0].split()) for best in found]
    return Translated(texts, quality(texts, references))
