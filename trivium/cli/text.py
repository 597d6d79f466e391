"""`trivium data …` and `trivium tokenizer …`: text into ids, and a look at both."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trivium.cli.printing import Json, cell, leaves, print_json, print_table, quoted, standard_input
from trivium.errors import RequestError, UserError, shown
from trivium.files import exists_already

data_app = typer.Typer(help="Turn text into shards, and see exactly what a model will see.", no_args_is_help=True)
# not read from the table itself: that would import the library just to print help
KINDS = "chars, bytes, bpe, word-bpe, wordpiece, unigram or words"
Given = Annotated[list[str] | None, typer.Option("--set", help="A setting of the kind, as case=keep; repeatable.")]
tokenizer_app = typer.Typer(help="Train tokenizers and look at them.", no_args_is_help=True)


@data_app.command("build")
def data_build(
    out: Annotated[Path, typer.Argument(help="The folder of shards to make.")],
    paths: Annotated[list[str], typer.Argument(help="Text, .gz, .xz or JSON-lines files, or folders of them.")],
    tokenizer: Annotated[str, typer.Option(help=f"{KINDS}; or a tokenizer.json.")] = "bpe",
    size: Annotated[int, typer.Option(help="Vocabulary size of a new tokenizer that learns pieces.")] = 4096,
    given: Given = None,
    valid: Annotated[str, typer.Option(help="The share kept for validation, or a path.")] = "auto",
    separator: Annotated[str, typer.Option(help="Split documents inside a file here.")] = "",
    field: Annotated[str, typer.Option(help="The key of a JSON line that holds the text.")] = "text",
) -> None:
    """Encode text into memory-mapped shards with a manifest of sizes and hashes."""
    from trivium.cli.render import watcher
    from trivium.cli.shards import build

    with watcher() as watch:
        facts = build(out, paths, tokenizer, size, given or [], valid, separator, field, watch.say, watch.tick)
    typer.echo(f"{out}: {facts}", err=True)


@data_app.command("stats")
def data_stats(
    shards: Annotated[Path, typer.Argument(help="A folder of shards, or a run.")], as_json: Json = False
) -> None:
    """Documents, tokens, bytes and lengths of both splits."""
    from trivium.cli.shards import opened
    from trivium.data.show import describe

    facts = describe(*opened(shards))
    if as_json:
        print_json(facts)
        return
    for name, value in leaves(facts):
        typer.echo(f"{name:<28} {cell(value)}")


@data_app.command("show")
def data_show(
    shards: Annotated[Path, typer.Argument(help="A folder of shards, or a run.")],
    row: Annotated[int, typer.Option(help="Which row.")] = 0,
    split: Annotated[str, typer.Option(help="train or valid.")] = "train",
    context: Annotated[int, typer.Option(help="Tokens of a row of plain text; 0: as a run's objective.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """One row exactly as the model sees it: position, id, piece, label and document."""
    from trivium.cli.shards import shown as cells_of

    if split not in ("train", "valid"):
        raise RequestError(f"--split: {shown(split)} is neither train nor valid")
    cells = cells_of(shards, context, row, "train" if split == "train" else "valid")
    if as_json:
        print_json([shown._asdict() for shown in cells])
        return
    print_table(list(cells[0]._fields), [[cell(value) for value in shown] for shown in cells])


@tokenizer_app.command("train")
def tokenizer_train(
    out: Annotated[Path, typer.Argument(help="The tokenizer.json to write.")],
    paths: Annotated[list[str], typer.Argument(help="Text files or folders.")],
    kind: Annotated[str, typer.Option(help=f"{KINDS}.")] = "bpe",
    size: Annotated[int, typer.Option(help="Vocabulary size of kinds that learn pieces, everything counted.")] = 4096,
    given: Given = None,
) -> None:
    """Train a tokenizer on text."""
    from trivium.cli.render import watcher
    from trivium.cli.shards import train_tokenizer

    if out.exists():
        raise UserError(exists_already(out))
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out.parent} is not a folder; make it first")
    with watcher() as watch:
        made = train_tokenizer(paths, kind, size, given or [], watch.tick)
    made.save(out)
    typer.echo(f"{out}: {made.kind}, {made.size:,} ids", err=True)


@tokenizer_app.command("encode")
def tokenizer_encode(
    tokenizer: Annotated[Path, typer.Argument(help="A tokenizer.json, a run or a folder of shards.")],
    text: Annotated[str, typer.Argument(help="The text; - reads standard input.")],
    as_json: Json = False,
) -> None:
    """The ids and pieces of a text."""
    from trivium.text.tokenizer import open_tokenizer

    opened = open_tokenizer(tokenizer)
    ids = opened.encode(standard_input() if text == "-" else text)
    if as_json:
        print_json({"ids": ids, "pieces": [opened.piece(id) for id in ids]})
    else:
        typer.echo(" ".join(map(str, ids)))
        typer.echo("|".join(opened.piece(id) for id in ids))


@tokenizer_app.command("show")
def tokenizer_show(
    tokenizer: Annotated[Path, typer.Argument(help="A tokenizer.json, a run or a folder of shards.")],
    as_json: Json = False,
) -> None:
    """Kind, size, specials and digest of a tokenizer, and its last pieces."""
    from trivium.text.tokenizer import open_tokenizer

    opened = open_tokenizer(tokenizer)
    last = [opened.piece(id) for id in range(max(0, opened.size - 20), opened.size)]
    facts = {
        "kind": opened.kind,
        "size": opened.size,
        "specials": dict(opened.specials),
        "sha256": opened.digest,
        "last": last,
    }
    if as_json:
        print_json(facts)
        return
    named = [f"{quoted(spelling)} {id}" for spelling, id in opened.specials.items()]
    for name, value in {**facts, "specials": ", ".join(named), "last": " ".join(map(quoted, last))}.items():
        typer.echo(f"{name:<10} {value}")
