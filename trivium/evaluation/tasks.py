"""The evaluations by name: which files each reads, what it asks of a model, and the scores that come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from trivium.config import at_least
from trivium.data.config import SHARE
from trivium.data.sources import held_out
from trivium.errors import ConfigError, RequestError, shown
from trivium.evaluation import cloze, words
from trivium.evaluation.corpus import Corpus
from trivium.evaluation.denoising import span_loss
from trivium.evaluation.likelihood import Precision, Score, Tick, score_texts
from trivium.evaluation.translation import translate_and_score
from trivium.generation.beam import Beam
from trivium.models.config import Family
from trivium.models.transformer import Transformer
from trivium.text.tokenizer import Tokenizer

Numbers = dict[str, float | int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What may be chosen of an evaluation; each obeys those that it names in `uses`."""

    stride: int = 0  # how far windows move over a long text; 0 means the context, so that they do not overlap
    precision: Precision = "fp32"
    beams: int = 4
    alpha: float = 0.6  # length penalty of beam search
    seed: int = 0  # draws sentences, words and spans
    sentences: int = 5000  # of masked-words

    def __post_init__(self) -> None:
        at_least("stride", self.stride, 0)
        at_least("beams", self.beams, 1)
        at_least("sentences", self.sentences, 1)
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError(f"precision: {self.precision!r} is neither fp32 nor bf16")


class Subject(NamedTuple):
    """What is evaluated, and who hears how far it is."""

    model: Transformer
    tokenizer: Tokenizer
    tick: Tick


class Measured(NamedTuple):
    """The scores, the first of which is what the evaluation is known by; signatures; and some of what was said."""

    scores: Numbers
    signatures: dict[str, str]
    examples: list[dict[str, Any]]


class Evaluation(Protocol):
    """One entry of the table."""

    @property
    def corpus(self) -> str:
        """The corpus that it reads; "" for none."""

    @property
    def families(self) -> tuple[Family, ...]:
        """The families of models that it can ask."""

    @property
    def splits(self) -> tuple[str, ...]:
        """What can be asked for, first what is meant where nothing is."""

    @property
    def uses(self) -> tuple[str, ...]:
        """The settings that it obeys."""

    def measure(self, subject: Subject, data: Corpus, split: str, settings: Settings) -> Measured: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Likelihood:
    """How probable a text is, every token scored once and each document read by itself."""

    corpus: str
    files: Mapping[str, str]  # by split
    unit: Literal["words", "characters", "bytes"]
    # Only what lies behind this share of the characters, as nanoGPT splits its one file.
    behind: float = 0.0

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.files)

    @property
    def uses(self) -> tuple[str, ...]:
        return ("stride", "precision")

    @property
    def families(self) -> tuple[Family, ...]:
        return ("decoder",)

    def measure(self, subject: Subject, data: Corpus, split: str, settings: Settings) -> Measured:
        texts = [text[int(self.behind * len(text)) :] for text in data.documents(self.files[split])]
        score = score_texts(
            subject.model,
            subject.tokenizer,
            texts,
            stride=settings.stride,
            precision=settings.precision,
            tick=subject.tick,
        )
        if self.unit == "words":  # these corpora count the end of every line as a word
            score = replace(score, words=score.words + sum(text.count("\n") for text in texts))
        return Measured(_units(score, self.unit), {}, [])


def _units(score: Score, unit: Literal["words", "characters", "bytes"]) -> Numbers:
    """All that a likelihood can be divided by, first what the corpus is known by."""
    first: dict[str, Numbers] = {
        "words": {"word_perplexity": score.word_perplexity},
        "characters": {"nats_per_character": score.nll / score.characters},
        "bytes": {"bits_per_byte": score.bits_per_byte},
    }
    return first[unit] | {
        "token_perplexity": score.perplexity,
        "word_perplexity": score.word_perplexity,
        "bits_per_byte": score.bits_per_byte,
        "bits_per_character": score.bits_per_character,
        "nll": score.nll,
        "tokens": score.tokens,
        "words": score.words,
        "bytes": score.bytes,
        "characters": score.characters,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """BLEU and chrF of the best translation by beam search; equal sources share their references."""

    corpus: str
    files: Mapping[str, tuple[str, ...]]  # by split: a source and a target, or one file with columns
    columns: tuple[int, int] = (0, 1)
    # One file without splits: the pairs that training keeps for validation by default, chosen by their sources.
    kept: bool = False

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.files)

    @property
    def uses(self) -> tuple[str, ...]:
        return ("beams", "alpha")

    @property
    def families(self) -> tuple[Family, ...]:
        return ("encoder-decoder",)

    def measure(self, subject: Subject, data: Corpus, split: str, settings: Settings) -> Measured:
        pairs = [pair for pair in data.pairs(*self.files[split], columns=self.columns) if all(pair)]
        if self.kept:
            pairs = [pair for pair in pairs if held_out(pair.source, SHARE)]
            references: dict[str, list[str]] = {}
            for source, target in pairs:
                references.setdefault(source, []).append(target)
            asked = list(references.items())
        else:
            asked = [(pair.source, [pair.target]) for pair in pairs]
        if not asked:
            raise RequestError(f"{data.name} has no pairs to translate; look into {', '.join(self.files[split])}")
        found = translate_and_score(
            subject.model,
            subject.tokenizer,
            [source for source, _ in asked],
            [targets for _, targets in asked],
            beam=Beam(beams=settings.beams, alpha=settings.alpha),
            tick=subject.tick,
        )
        scores: Numbers = {name: quality.score for name, quality in found.quality.items()}
        examples = [
            {"source": source, "translation": text, "references": targets}
            for (source, targets), text in zip(asked, found.texts, strict=True)
        ]
        signatures = {name: quality.signature for name, quality in found.quality.items()}
        return Measured(scores | {"sentences": len(asked)}, signatures, examples)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedWords:
    """How often an encoder says exactly the word that was masked in a sentence; see `words` for every rule."""

    corpus: str = "books"
    train: str = "train.txt"
    files: Mapping[str, str]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.files)

    @property
    def uses(self) -> tuple[str, ...]:
        return ("seed", "sentences")

    @property
    def families(self) -> tuple[Family, ...]:
        return ("encoder",)

    def measure(self, subject: Subject, data: Corpus, split: str, settings: Settings) -> Measured:
        texts = data.documents(self.files[split])
        ranked = words.ranks(piece.text for piece in data.runs(self.train))
        asked = words.questions(texts, ranked, count=0, seed=settings.seed)
        found = words.guess(subject.model, subject.tokenizer, asked, count=settings.sentences, tick=subject.tick)
        examples = [
            {"before": text[:first], "word": text[first:last], "after": text[last:], "said": said}
            for (text, first, last, _), said in found.examples
        ]
        return Measured(found.scores, {}, examples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """The loss of giving back what T5's span corruption cut out, per target token."""

    corpus: str = "books"
    files: Mapping[str, str]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.files)

    @property
    def uses(self) -> tuple[str, ...]:
        return ("seed",)

    @property
    def families(self) -> tuple[Family, ...]:
        return ("encoder-decoder", "decoder")

    def measure(self, subject: Subject, data: Corpus, split: str, settings: Settings) -> Measured:
        texts = data.documents(self.files[split])
        found = span_loss(subject.model, subject.tokenizer, texts, seed=settings.seed, tick=subject.tick)
        scores: Numbers = {
            "nats_per_target": found.mean,
            "perplexity": found.perplexity,
            "nll": found.nll,
            "targets": found.targets,
            "rows": found.rows,
            "row": found.row,
        }
        return Measured(scores, {}, [])


@dataclass(frozen=True, kw_only=True, slots=True)
class Cloze:
    """The probes of the CS224N slides."""

    corpus: str = ""
    splits: tuple[str, ...] = ("probes",)
    uses: tuple[str, ...] = ()
    families: tuple[Family, ...] = ("encoder", "decoder")

    def measure(self, subject: Subject, data: Corpus, split: str, settings: Settings) -> Measured:
        tried = cloze.try_probes(subject.model, subject.tokenizer)
        scores: Numbers = {
            "accuracy": sum(each.rank == 1 for each in tried) / len(tried),
            "reciprocal_rank": sum(1 / each.rank for each in tried) / len(tried),
            "probes": len(tried),
        }
        examples = [
            {
                "kind": each.probe.kind,
                "text": each.probe.text,
                "said": each.said,
                "rank": each.rank,
                "place": each.place,
                "scores": each.scores,
            }
            for each in tried
        ]
        return Measured(scores, {}, examples)


def _multi30k(source: str, target: str) -> Translation:
    splits = {"valid": "val", "test": "test_2016_flickr"}
    files = {split: (f"{name}.{source}", f"{name}.{target}") for split, name in splits.items()}
    return Translation(corpus="multi30k", files=files)


def _tatoeba(file: str, columns: tuple[int, int]) -> Translation:
    return Translation(corpus="tatoeba", files={"valid": (file,)}, columns=columns, kept=True)


EVALUATIONS: dict[str, Evaluation] = {
    "ptb": Likelihood(corpus="ptb", files={"valid": "ptb.valid.txt", "test": "ptb.test.txt"}, unit="words"),
    "wikitext-2": Likelihood(
        corpus="wikitext-2", files={"valid": "wiki.valid.tokens", "test": "wiki.test.tokens"}, unit="words"
    ),
    "shakespeare-char": Likelihood(
        corpus="tinyshakespeare", files={"valid": "input.txt"}, unit="characters", behind=0.9
    ),
    "books": Likelihood(corpus="books", files={"valid": "valid.txt"}, unit="bytes"),
    "multi30k-en-de": _multi30k("en", "de"),
    "multi30k-de-en": _multi30k("de", "en"),
    "multi30k-en-fr": _multi30k("en", "fr"),
    "multi30k-fr-en": _multi30k("fr", "en"),
    "tatoeba-en-de": _tatoeba("deu.txt", (0, 1)),
    "tatoeba-de-en": _tatoeba("deu.txt", (1, 0)),
    "tatoeba-en-fr": _tatoeba("fra.txt", (0, 1)),
    "tatoeba-fr-en": _tatoeba("fra.txt", (1, 0)),
    "masked-words": MaskedWords(files={"valid": "valid.txt"}),
    "span": Spans(files={"valid": "valid.txt"}),
    "cloze": Cloze(),
}


def named(name: str) -> Evaluation:
    """The evaluation of this name, or a sentence that lists all there are."""
    if name not in EVALUATIONS:
        raise RequestError(f"there is no evaluation {shown(name)}; there are {', '.join(EVALUATIONS)}")
    return EVALUATIONS[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an evaluation of a model came to, with all that is needed to repeat it."""

    name: str
    split: str
    metric: str
    score: float | int
    scores: Numbers
    signatures: dict[str, str]
    settings: dict[str, Any]
    data: dict[str, str]  # the sha256 of every file that was read
    examples: list[dict[str, Any]]


def evaluate(
    model: Transformer,
    tokenizer: Tokenizer,
    name: str,
    *,
    folder: Path | None = None,
    split: str = "",
    settings: Settings | None = None,
    tick: Tick = lambda done, of: None,
) -> Outcome:
    """Evaluate a model by the evaluation of this name; its files are in `folder`, or in one of its own in there.

    Where no split is named it is validation: the test set is looked at only when asked for by its name.
    """
    settings = settings or Settings()
    evaluation = named(name)
    split = split or evaluation.splits[0]
    if split not in evaluation.splits:
        raise RequestError(f"{name} has no split {shown(split)}; it has {' and '.join(evaluation.splits)}")
    if model.config.family not in evaluation.families:
        raise RequestError(
            f"{name} is for a model of the {' or '.join(evaluation.families)} family; this one is of the "
            f"{model.config.family} family"
        )
    data = Corpus(evaluation.corpus, folder)
    found = evaluation.measure(Subject(model, tokenizer, tick), data, split, settings)
    metric, score = next(iter(found.scores.items()))
    return Outcome(
        name=name,
        split=split,
        metric=metric,
        score=score,
        scores=found.scores,
        signatures=found.signatures,
        settings={key: value for key, value in asdict(settings).items() if key in evaluation.uses},
        data=data.sources,
        examples=found.examples,
    )
