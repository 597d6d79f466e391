"""The settings of objectives (spec: objectives); `bind` makes them tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from trivium.config import at_least, fraction
from trivium.errors import ConfigError
from trivium.models.config import Family, ModelConfig
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.sentence import PoolerOptions
from trivium.parts.site import NoPart
from trivium.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trivium.objectives.causal import CausalTask
    from trivium.objectives.denoise import DenoiseTask
    from trivium.objectives.masked import MaskedTask
    from trivium.objectives.objective import Task
    from trivium.objectives.prefix import PrefixTask
    from trivium.objectives.seq2seq import Seq2SeqTask
    from trivium.objectives.spans import SpansTask

MASK, CLASS, SEPARATOR, PADDING = "[MASK]", "[CLS]", "[SEP]", "[PAD]"
FRAME = (PADDING, CLASS, SEPARATOR, MASK)
Draw = Literal["text", "all"]


PAD = "<pad>"  # fills up what has no fixed length, and is the first thing that a decoder with a source is given


class Objective(Protocol):
    """The options of an objective; `bind` makes them a task for one tokenizer and one model."""

    @property
    def families(self) -> frozenset[Family]:
        """The families of models that it can train."""

    @property
    def specials(self) -> tuple[str, ...]:
        """The special tokens that it needs, in the order in which a tokenizer is extended by them."""

    def bind(self, tokenizer: Tokenizer, model: ModelConfig) -> Task:
        """The task with its ids looked up and its lengths worked out, or a ConfigError that says what is missing."""


Documents = Literal["join", "mask"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Causal:
    """Logits at position t predict token t+1; every real token counts the same."""

    documents: Documents = "join"  # may attention cross a document's border inside a row?

    @property
    def families(self) -> frozenset[Family]:
        return frozenset({"decoder"})

    @property
    def specials(self) -> tuple[str, ...]:
        return ()

    def bind(self, tokenizer: Tokenizer, model: ModelConfig) -> CausalTask:
        from trivium.objectives.causal import CausalTask

        return CausalTask(length=model.context, documents=self.documents)


def sentinel(number: int) -> str:
    """The spelling of a sentinel."""
    return f"<extra_id_{number}>"


def _check_shares(rate: float, mask: float, random: float) -> None:
    """Refuse shares that are none."""
    if not 0 < rate < 1:
        raise ConfigError(f"rate: {rate} is not between 0 and 1; try 0.15")
    fraction("random", random)
    if not 0 <= mask <= 1 - random + 1e-9:  # .9 and .1 add up to a little more than 1
        raise ConfigError(f"mask: {mask} and random: {random} are more than all; try 0.8 and 0.1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Masked:
    """Tokens chosen at random become [MASK], another token, or stay; each chosen one is predicted from both sides."""

    rate: float = 0.15  # the share of a row that is chosen
    mode: Literal["exact", "bernoulli"] = "exact"  # the same number in every row, or a coin for every token
    unit: Literal["piece", "word"] = "piece"  # what is chosen as a whole
    mask: float = 0.8  # the share of the chosen that becomes [MASK]
    random: float = 0.1  # the share that becomes another token; the rest stays as it is
    draw: Draw = "text"  # where random tokens come from; "all" has the specials too, as BERT did
    max_predictions: int = 0  # at most so many of a row; 0 means no limit
    # Rows as they are cut (RoBERTa's full sentences), each between [CLS] and [SEP], or `[CLS] A [SEP] B [SEP]` with
    # the question whether B follows A, whose mean loss is added to that of the tokens (BERT).
    frame: Literal["none", "bert", "pair"] = "none"
    copies: int = 0  # as many masks as a row ever has, one of them drawn each time (BERT: 10); 0 means a new one

    def __post_init__(self) -> None:
        _check_shares(self.rate, self.mask, self.random)
        at_least("max_predictions", self.max_predictions, 0)
        at_least("copies", self.copies, 0)

    @property
    def families(self) -> frozenset[Family]:
        return frozenset({"encoder"})

    @property
    def specials(self) -> tuple[str, ...]:
        return (MASK,) if self.frame == "none" else FRAME

    def check(self, model: ModelConfig) -> int:
        """The tokens of text in a row; a model that cannot be trained so is refused."""
        frame, least = {"none": (0, 1), "bert": (2, 1), "pair": (3, 2)}[self.frame]
        if self.frame == "pair":
            _check_pairs(model)
        return _room_for_text(model.context, frame, least)

    def bind(self, tokenizer: Tokenizer, model: ModelConfig) -> MaskedTask:
        from trivium.objectives import hiding
        from trivium.objectives.masked import MaskedTask

        return MaskedTask(
            options=self,
            length=self.check(model),
            vocabulary=hiding.vocabulary(tokenizer, self.specials, draw=self.draw, words=self.unit == "word"),
        )


def _room_for_text(context: int, frame: int, least: int) -> int:
    """How many tokens of text fit beside the special ones of a frame."""
    if context < frame + least:
        raise ConfigError(f"model.context: {context} leaves no room for text between [CLS] and [SEP]; try 128")
    return context - frame


def _check_pairs(model: ModelConfig) -> None:
    """Refuse a model that cannot tell A from B, or has nothing to answer with."""
    errors: list[ConfigError] = []
    if not (isinstance(model.embedding, TokenEmbeddingOptions) and model.embedding.segments >= 2):
        errors.append(
            ConfigError("model.embedding.segments: objective.frame=pair has two kinds of segment; set it to 2")
        )
    if not (isinstance(model.sentence, PoolerOptions) and model.sentence.classes == 2):
        errors.append(
            ConfigError(
                "model.sentence: objective.frame=pair asks whether one text follows another; set it to pooler, with "
                "classes=2"
            )
        )
    ConfigError.gather(errors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Spans of whole words become [MASK]s, other tokens, or stay; a token is told by its state and by its borders.

    The mean losses of the two are added. A model without a boundary head has the first alone.
    """

    rate: float = 0.15  # the share of a row's text that is hidden
    stop: float = 0.2  # the chance of a span to end behind each word: lengths are geometric
    longest: int = 10  # words of a span
    mask: float = 0.8  # the share of the spans that becomes [MASK]
    random: float = 0.1  # the share whose tokens become others; the rest stays as it is
    draw: Draw = "text"  # where random tokens come from; "all" has the specials too
    frame: Literal["none", "bert"] = "bert"  # rows as they are cut, or each between [CLS] and [SEP]

    def __post_init__(self) -> None:
        _check_shares(self.rate, self.mask, self.random)
        if not 0 < self.stop < 1:
            raise ConfigError(f"stop: {self.stop} is not between 0 and 1; try 0.2")
        at_least("longest", self.longest, 1)

    @property
    def families(self) -> frozenset[Family]:
        return frozenset({"encoder"})

    @property
    def specials(self) -> tuple[str, ...]:
        return (MASK,) if self.frame == "none" else FRAME

    def check(self, model: ModelConfig) -> int:
        """The tokens of text in a row; a model without room for them is refused."""
        return _room_for_text(model.context, 0 if self.frame == "none" else 2, 1)

    def bind(self, tokenizer: Tokenizer, model: ModelConfig) -> SpansTask:
        from trivium.objectives import hiding
        from trivium.objectives.spans import SpansTask, lengths

        return SpansTask(
            options=self,
            length=self.check(model),
            places=0 if isinstance(model.boundary, NoPart) else model.boundary.rows,
            lengths=lengths(self.stop, self.longest),
            vocabulary=hiding.vocabulary(tokenizer, self.specials, draw=self.draw, words=True),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Denoise:
    """Runs of noise are cut out of a text, a sentinel in each one's place; the targets give them back, each named."""

    noise: Literal["span", "iid"] = "span"  # runs of a given mean length, or a coin for every token
    density: float = 0.15  # the share of noise
    mean_span: float = 3.0  # tokens of a run, for noise="span"
    sentinels: int = 100
    # What a model with one stack, which reads inputs and targets in one row, is judged by and may look at.
    loss_on: Literal["targets", "all"] = "targets"
    attention: Literal["causal", "prefix"] = "causal"

    def __post_init__(self) -> None:
        if not 0 < self.density < 1:
            raise ConfigError(f"density: {self.density} is not between 0 and 1; try 0.15")
        at_least("mean_span", self.mean_span, 1)
        at_least("sentinels", self.sentinels, 1)
        if self.loss_on == "all" and self.attention == "prefix":
            raise ConfigError("loss_on: a prefix that is read both ways cannot be predicted; set loss_on=targets")

    @property
    def families(self) -> frozenset[Family]:
        return frozenset({"encoder-decoder", "decoder"})

    @property
    def specials(self) -> tuple[str, ...]:
        # As in T5 the first sentinel has the largest id.
        return (PAD, *(sentinel(number) for number in reversed(range(self.sentinels))))

    def check(self, model: ModelConfig) -> int:
        """The tokens of text in a row; a model or sentinels that do not suffice are refused."""
        from trivium.objectives.noise_lengths import longest

        return longest(self, model)[0]

    def bind(self, tokenizer: Tokenizer, model: ModelConfig) -> DenoiseTask:
        from trivium.objectives.denoise import bind

        return bind(self, tokenizer, model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """A row is split at a place drawn uniformly; only the tokens behind it are predicted."""

    @property
    def families(self) -> frozenset[Family]:
        return frozenset({"decoder", "encoder-decoder"})

    @property
    def specials(self) -> tuple[str, ...]:
        return (PAD,)

    def bind(self, tokenizer: Tokenizer, model: ModelConfig) -> PrefixTask:
        from trivium.objectives.objective import special
        from trivium.objectives.prefix import PrefixTask

        return PrefixTask(length=model.context, pad=special(tokenizer, PAD), two_sides=model.family != "decoder")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seq2Seq:
    """The decoder is given the target up to each token and predicts that token; both sides end in END."""

    smoothing: float = 0.1  # the share of a label's probability that is spread over the vocabulary; 0 means none
    # uniform: over all of it (torch, Hugging Face); others: over all but the label (Vaswani et al., fairseq).
    smoothing_kind: Literal["uniform", "others"] = "uniform"
    align: int = 1  # both sides are padded to a multiple of this; 8 gives a compiler fewer kinds of shapes

    def __post_init__(self) -> None:
        fraction("smoothing", self.smoothing)
        at_least("align", self.align, 1)

    @property
    def families(self) -> frozenset[Family]:
        return frozenset({"encoder-decoder"})

    @property
    def specials(self) -> tuple[str, ...]:
        return (PAD,)

    def bind(self, tokenizer: Tokenizer, model: ModelConfig) -> Seq2SeqTask:
        vocab = model.vocab or tokenizer.size
        # e over the others is e * V / (V - 1) over all: e / (V - 1) for each, of which the label has its part too
        share = self.smoothing if self.smoothing_kind == "uniform" else self.smoothing * vocab / (vocab - 1)
        if share > 1:
            raise ConfigError(f"objective.smoothing: {self.smoothing} makes a label the least likely id; try 0.1")
        from trivium.objectives.objective import special
        from trivium.objectives.seq2seq import Seq2SeqTask

        return Seq2SeqTask(length=model.context, pad=special(tokenizer, PAD), smoothing=share, align=self.align)


OBJECTIVES: dict[str, type[Objective]] = {
    "causal": Causal,
    "masked": Masked,
    "spans": Spans,
    "denoise": Denoise,
    "prefix": Prefix,
    "seq2seq": Seq2Seq,
}
