"""What the `data` and `tokenizer` commands do, apart from their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from trivium.config import Text, assignments, load, read_of, unknown
from trivium.data import shards as data
from trivium.data.config import DataConfig
from trivium.data.pairs import settled
from trivium.data.shards import Shards, Split
from trivium.data.show import Cell, preview
from trivium.data.sources import texts, total_bytes
from trivium.errors import DataError
from trivium.files import exists_already
from trivium.text.kinds import TOKENIZERS
from trivium.text.tokenizer import Tokenizer, open_tokenizer

Tick = Callable[[str, int, int], None]
_CONTEXT = 64


def train_tokenizer(
    paths: Sequence[str],
    kind: str,
    size: int,
    given: Sequence[str],
    tick: Tick,
    config: DataConfig | None = None,
) -> Tokenizer:
    """A new tokenizer of `kind` with settings `given` as key=value, on the training part of some text."""
    if kind not in TOKENIZERS or kind == "file":
        raise unknown("kind of tokenizer", kind, [name for name in TOKENIZERS if name != "file"])
    config = config or DataConfig(paths=tuple(paths), valid=0.0)
    total, done = total_bytes(config.paths), 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        tick("tokenizer", done, total)

    options = TOKENIZERS[kind]
    sized = {"size": size} if "size" in {field.name for field in fields(options)} else {}
    made: Tokenizer = load(options, sized, assignments(given)).build(texts(config, read=read))
    return made


def build(
    out: Path,
    paths: Sequence[str],
    tokenizer: str,
    size: int,
    given: Sequence[str],
    valid: str,
    separator: str,
    field: str,
    say: Callable[[str], None],
    tick: Tick,
) -> str:
    """Shards and their tokenizer in `out`; a sentence about them."""
    layer = {"paths": list(paths), "valid": Text(valid), "separator": separator, "field": field}
    config = settled(load(DataConfig, layer))
    if out.exists():
        raise DataError(exists_already(out))
    known = Path(tokenizer)
    chosen = open_tokenizer(known) if known.exists() else train_tokenizer(paths, tokenizer, size, given, tick, config)
    made = data.build(config, chosen, out, progress=lambda at, of: tick("data", at, of), say=say)
    train, held = len(made.train), len(made.valid)
    return f"{train:,} tokens for training, {held:,} for validation, {chosen.size:,} ids"


def opened(folder: Path) -> tuple[Shards, Tokenizer]:
    """The shards and tokenizer in a folder of shards or in a run."""
    inner = folder / "data" if (folder / "data" / data.MANIFEST).is_file() else folder
    if not (inner / data.MANIFEST).is_file():
        raise DataError(f"{folder} holds no shards; make them with `trivium data build`")
    tokenizer = open_tokenizer(folder)
    return data.open_shards(inner, tokenizer_digest=tokenizer.digest), tokenizer


def shown(folder: Path, context: int, row: int, split: Split) -> list[Cell]:
    """A row of a run as its objective gives it to the model; of shards, or with a `context`, as plain text."""
    if context or not (folder / "config.toml").is_file():
        found, tokenizer = opened(folder)
        return preview(found, tokenizer, context or _CONTEXT, row, split)
    from trivium.training.context import open_context
    from trivium.training.recipe import Recipe

    run = open_context(folder, load(Recipe, read_of(folder)))
    task, rng = run.task, np.random.default_rng(0)
    return preview(run.shards, run.tokenizer, task.length, row, split, lambda rows: task.inputs(rows, rng))
