"""What a run is made of: its folder, resolved recipe, tokenizer, shards and task, and the rows of each step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from trivium import config as settings
from trivium.data import shards as data
from trivium.data.bucketing import Buckets, Pairs
from trivium.data.loader import Order, Ordering
from trivium.data.mixing import ordering, training_rows
from trivium.data.packed import Examples, PackedPairs
from trivium.data.packing import Rows
from trivium.data.pairs import paired
from trivium.data.shards import Shards, Stream
from trivium.objectives.objective import Task
from trivium.objectives.options import Seq2Seq
from trivium.renamed import restore_old_keys
from trivium.text.tokenizer import Tokenizer, open_tokenizer
from trivium.training.checks import check_form
from trivium.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The folder, resolved recipe, tokenizer, data and task of a run."""

    folder: Path
    recipe: Recipe
    tokenizer: Tokenizer
    shards: Shards
    task: Task
    spent: float = 0.0  # seconds of the budget that measuring took before the run
    validation: float = 0.0  # seconds of one validation, as measured then
    # Packing takes a while: pairs are packed once, on first use, and shared with all copies that `replace` makes.
    _made: dict[tuple[object, ...], Pairs | PackedPairs] = field(default_factory=dict, repr=False, compare=False)

    @property
    def longest(self) -> int:
        """The tokens of the longest row, of one side."""
        rows = self.train
        if isinstance(rows, PackedPairs):
            return max(rows.widths)
        return int(rows.sizes.max()) if isinstance(rows, Pairs) and len(rows) else self.task.length

    @property
    def train(self) -> Examples:
        """The rows of the training text."""
        stream = self.shards.train
        if paired(self.shards):
            return self._pairs("train", stream, self.recipe.seed)
        return training_rows(stream, self.task.length, self.recipe.data)

    @property
    def valid(self) -> Examples:
        """The rows of the validation text."""
        stream = self.shards.valid
        return self._pairs("valid", stream, 0) if paired(self.shards) else Rows(stream, self.task.length)

    def _pairs(self, split: str, stream: Stream, seed: int) -> Pairs | PackedPairs:
        length, width = self.task.length, self.recipe.data.pack
        key = (split, length, width, seed)
        if key not in self._made:
            pairs = Pairs(stream, length)
            self._made[key] = PackedPairs(pairs, width, seed) if width and len(pairs) else pairs
        return self._made[key]

    def build_order(self) -> Ordering:
        """Which training rows each step sees."""
        rows, batch, seed = self.train, self.recipe.batch, self.recipe.seed
        if isinstance(rows, Rows):
            return ordering(rows, self.recipe.data.weights, batch.rows, seed)
        if isinstance(rows, PackedPairs):
            return Order(len(rows), batch.rows, seed, shifts=rows.shifts, apart=len(rows))
        assert isinstance(self.recipe.objective, Seq2Seq)
        if batch.tokens:
            return Buckets(rows.sizes, batch.tokens, seed, size=batch.rows, align=self.recipe.objective.align)
        return Order(len(rows), batch.rows, seed)

    def tokens_per_step(self) -> float:
        """The labels of an update, on average."""
        rows = self.train
        if isinstance(rows, Rows):
            return self.recipe.batch.rows * rows.length
        order = self.build_order()
        steps = len(order) if isinstance(order, Buckets) else len(rows) / order.size  # of an epoch
        return rows.labels / steps

    @property
    def identity(self) -> str:
        """Equal exactly when a checkpoint of one run means the same to the other."""
        fixed = settings.flat(restore_old_keys(settings.dump(self.recipe)))  # a rename leaves old checkpoints valid
        prefixes = ("model.", "objective.", "optim.kind", "average.kind", "data.weights", "data.shift")
        kept = {key: value for key, value in fixed.items() if key.startswith(prefixes)}
        for name in ("pack", "length"):  # only where they are set: runs from before there were such keys go on
            if value := getattr(self.recipe.data, name):
                kept[f"data.{name}"] = value
        batch = self.recipe.batch
        content = {**kept, "seed": self.recipe.seed, batch.unit: batch.size, "data": self.shards.digest}
        return settings.hashed({**content, "sources": list(self.shards.train.sources)})


def bind_context(folder: Path, recipe: Recipe, tokenizer: Tokenizer, shards: Shards) -> RunContext:
    """The context of a run, with the recipe's objective bound to its tokenizer and model."""
    check_form(recipe, pairs=paired(shards))
    length, model = recipe.data.length, recipe.model
    task = recipe.objective.bind(tokenizer, replace(model, context=length) if length else model)
    return RunContext(folder=folder, recipe=recipe, tokenizer=tokenizer, shards=shards, task=task)


def open_context(folder: Path, recipe: Recipe) -> RunContext:
    """The context of a run whose folder was created before."""
    tokenizer = open_tokenizer(folder)
    built = data.built_shards(recipe.data)
    digest = tokenizer.digest
    if built is not None:  # the run's own tokenizer may have the objective's special tokens in addition
        own = open_tokenizer(built)
        digest = own.digest if with_objective_specials(own, recipe).digest == digest else digest
    shards = data.open_shards(built or folder / "data", tokenizer_digest=digest)
    return bind_context(folder, recipe, tokenizer, shards)


def with_objective_specials(tokenizer: Tokenizer, recipe: Recipe) -> Tokenizer:
    """The tokenizer with the special tokens that the objective needs."""
    specials = recipe.objective.specials
    return tokenizer if tokenizer.specials.keys() >= set(specials) else tokenizer.extended(specials)
