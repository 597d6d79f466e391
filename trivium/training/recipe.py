"""A recipe: every setting of a run as one frozen dataclass. Its TOML file, with all values, repeats the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

from trivium.config import accept, at_least, explained, flat, kind_of, place, preset
from trivium.data.config import DataConfig
from trivium.errors import ConfigError
from trivium.models.config import ModelConfig
from trivium.models.presets import PRESETS
from trivium.objectives.options import OBJECTIVES, Causal, Objective
from trivium.optim.options import AVERAGES, OPTIMIZERS, AdamW, Averaging, NoAverage, Optim
from trivium.optim.schedules import SCHEDULES, Cosine, Schedule
from trivium.parts.options.output import NoOutputOptions
from trivium.text.kinds import TOKENIZERS, Bpe, TokenizerOptions
from trivium.training.spikes import SPIKES, Rollback, Spikes
from trivium.training.timeline import Knot, Timeline

ROWS, TOKENS = 32, 2048  # of a batch, if a recipe says nothing: of text, and of pairs by their longer side


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How much one update sees, and how much of it fits the device at a time."""

    # 0 means 32 rows; pairs that are not packed are then counted in tokens.
    rows: int = 0
    # Pairs of similar lengths instead of a number of rows: at most so many tokens of the longer side, padding too.
    tokens: int = 0
    # Rows (or tokens) per forward pass, gradients are accumulated; 0 means all at once, or less if memory runs out.
    micro: int = 0

    def __post_init__(self) -> None:
        accept(self)
        at_least("rows", self.rows, 0)
        at_least("tokens", self.tokens, 0)
        at_least("micro", self.micro, 0)

    @property
    def size(self) -> int:
        """All of a batch, in rows or in tokens."""
        return self.tokens or self.rows or ROWS

    def settled(self, *, pairs: bool) -> BatchConfig:
        """The same with a definite number of rows; for `pairs` that are not packed also of tokens."""
        if self.rows:
            return self
        return replace(self, rows=ROWS, tokens=TOKENS if pairs and not self.tokens else self.tokens)

    @property
    def unit(self) -> str:
        return "tokens" if self.tokens else "rows"


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How long to train: one of the three. Minutes are a deadline, which the schedule follows by the clock."""

    ALTERNATIVES: ClassVar = (("steps",), ("tokens",), ("minutes", "planned", "knots", "shares", "skipped"))
    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0
    # Written by a run with a budget in minutes, so that its file repeats it: the steps that its schedule counts in, and
    # the share of the run that was over after some steps, and the steps whose validation would have taken too long.
    planned: int = 0
    knots: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    skipped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        accept(self)
        given = [name for name in ("steps", "tokens", "minutes") if getattr(self, name)]
        for name in ("steps", "tokens", "minutes"):
            at_least(name, getattr(self, name), 0)
        if len(given) > 1:
            raise ConfigError(f"{given[1]}: a budget is steps, tokens or minutes, not several; leave {given[0]} out")
        at_least("planned", self.planned, 0)
        rising = all(a < b for a, b in pairwise((0, *self.knots)))
        shares = (0.0, *self.shares, 1.0)
        if len(self.knots) != len(self.shares) or not rising or any(a > b for a, b in pairwise(shares)):
            raise ConfigError("knots: they do not rise together with budget.shares; leave both out")
        if (self.knots or self.skipped) and not (self.minutes and self.planned):
            raise ConfigError("knots: they belong to a budget in minutes; leave them out")

    @property
    def timeline(self) -> Timeline:
        """How far a run is after each step, as far as that is decided."""
        if not self.minutes:
            return Timeline.fixed(self.steps)
        return Timeline(self.planned, [Knot(*pair) for pair in zip(self.knots, self.shares, strict=True)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """When to measure on the validation text: every so many steps, or a share of the run up to 1.0; 0: at the end."""

    every: int | float = 0.1  # 1 is every step, 1.0 the whole run
    rows: int = 0  # at most so many rows; 0 means all, or as many as a tenth of a budget in minutes allows
    patience: int = 0  # stop after so many validations in a row without a new best one; 0 means never

    def __post_init__(self) -> None:
        accept(self)
        at_least("every", self.every, 0)
        at_least("rows", self.rows, 0)
        at_least("patience", self.patience, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """When to save (as `evaluate.every`), how many of the newest to keep, and which one becomes the model."""

    every: int | float = 0.1
    keep: int = 2  # beside the best one, and up to two to go back to from a spike
    use: Literal["best", "last"] = "best"  # by validation loss

    def __post_init__(self) -> None:
        accept(self)
        at_least("every", self.every, 0)
        at_least("keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """When to write a sample while training (as `evaluate.every`), and from which prompt."""

    every: int | float = 0.25
    prompt: str = ""
    tokens: int = 100
    temperature: float = 0.8

    def __post_init__(self) -> None:
        accept(self)
        at_least("every", self.every, 0)
        at_least("tokens", self.tokens, 1)
        at_least("temperature", self.temperature, 0)


# What a recipe that says nothing means, and what a run that starts from another model takes over from there.
DEFAULT = "gpt-mini"
MODEL, TOKENIZER = PRESETS[DEFAULT](), Bpe()


@explained
@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Recipe:
    """Everything that decides a run."""

    name: str = ""  # the run's folder below `runs`; empty means the name of the recipe's file
    seed: int = 0
    device: str = "auto"  # cuda, then mps, then cpu
    # auto is bf16 where the device has instructions for it, else fp32; fp16 scales the loss; fp8 is bf16 with the
    # large matrix products in 8 bits.
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    # Of the residual stream in training: auto is bf16 on cuda with precision bf16 or fp8, which halves the bytes of
    # everything between two matmuls.
    residual_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    # on for cuda, off elsewhere; graphs: whole steps as CUDA graphs, for small models
    compile: Literal["auto", "on", "off", "graphs"] = "auto"
    fast: Literal["on", "off"] = "on"  # off: every module by its plain formulas, to compare or to look inside
    memory: Literal["check", "try"] = "check"  # check: refuse what cannot fit; try: begin all the same
    threads: int = 0  # 0 means as many as torch finds; another number gives other bits
    deterministic: Literal["on", "off"] = "off"  # on: the same bits again on a GPU too, at some cost in speed
    clip: float = 1.0  # the largest gradient norm; 0 means no clipping
    # What to do after a loss or gradient that is not finite.
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    recompute: Literal["none", "blocks"] = "none"  # blocks: keep their inputs only, for one more forward pass
    log: int = 10  # steps between two lines of progress
    track: tuple[Literal["csv", "tensorboard"], ...] = ()  # where the numbers go beside metrics.jsonl
    # A run's folder, a checkpoint in it or a saved model to begin with; model and tokenizer are then its own.
    start: str = ""
    start_optimizer: Literal["fresh", "keep"] = "fresh"  # keep: its moments too, as decaying from a flat phase needs
    model: ModelConfig = preset(PRESETS, MODEL)
    tokenizer: TokenizerOptions = place(TOKENIZERS, TOKENIZER)
    data: DataConfig = DataConfig()
    objective: Objective = place(OBJECTIVES, Causal())
    optim: Optim = place(OPTIMIZERS, AdamW())
    schedule: Schedule = place(SCHEDULES, Cosine())
    average: Averaging = place(AVERAGES, NoAverage())  # of the weights: validated and used instead of the last ones
    spike: Spikes = place(SPIKES, Rollback())
    batch: BatchConfig = BatchConfig()
    budget: Budget = Budget()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoints = Checkpoints()
    sample: Sample = Sample()

    def __repr__(self) -> str:
        """The settings that are not the default ones, and the shape of the model."""
        default = flat(Recipe())
        changed = {key: value for key, value in flat(self).items() if default.get(key) != value}
        shown = [f"{key}={value!r}" for key, value in changed.items() if not key.startswith("model.")]
        shape = f"<{self.model.family}, {self.model.layers} layers of width {self.model.width}>"
        return f"Recipe({', '.join([*shown, f'model={shape}'])})"

    def __post_init__(self) -> None:
        accept(self)
        at_least("clip", self.clip, 0)
        at_least("threads", self.threads, 0)
        at_least("log", self.log, 1)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed: {self.seed} is not a whole number from 0 up to 2**63")
        if self.name.startswith(".") or len(self.name.encode()) > 200 or set(self.name) & set("/\\\0"):
            raise ConfigError(
                f"name: {self.name[:60]!r} must be a plain folder name: short, no slashes, no leading dot"
            )
        left_open = self.start and self.model == MODEL
        if not left_open and self.model.family not in self.objective.families:
            raise ConfigError(_untrainable(self.objective, self.model))
        if not left_open and isinstance(self.model.output, NoOutputOptions):
            kind = kind_of(self.objective, OBJECTIVES)
            raise ConfigError(
                f"model.output: none has no vocabulary, and nothing to learn by objective={kind}; set one"
            )

    @property
    def micro(self) -> int:
        """Rows of one forward pass, or tokens."""
        return min(self.batch.micro or self.batch.size, self.batch.size)


def _untrainable(objective: Objective, model: ModelConfig) -> str:
    able = [name for name, options in OBJECTIVES.items() if model.family in options().families]
    return (
        f"objective: {kind_of(objective, OBJECTIVES)} cannot train a model of the {model.family} family; "
        f"set {' or '.join(f'objective={name}' for name in able)}"
    )


# What a checkpoint depends on: with another value here its weights or its data order would mean something else.
FIXED = (
    "model.",
    "tokenizer.",
    "data.",
    "objective.",
    "optim.kind",
    "average.kind",
    "seed",
    "batch.rows",
    "batch.tokens",
    "name",
    "start",
)
