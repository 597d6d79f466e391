"""`trivium fill`, `translate` and `embed`: a trained model at work on texts from the command line or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from trivium.checkpoints.model_files import require_there
from trivium.cli.printing import Json, is_piped, print_json, quoted, standard_input
from trivium.errors import RequestError, shown


def _there(path: Path) -> Path:
    require_there(path)
    return path


ModelPath = Annotated[
    Path,
    typer.Argument(
        callback=_there,
        help="A run, a saved model, a Hugging Face folder or a .gguf file. RUN/checkpoints/step-N is one checkpoint.",
    ),
]
Texts = Annotated[list[str] | None, typer.Argument(help="The texts; without any (or with -), lines of a pipe.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Fit = Annotated[str, typer.Option(help="check, or try: load a model though it is larger than the memory that is free.")]
Average = Annotated[int, typer.Option(help="Use the mean of the run's newest K checkpoints.", metavar="K")]


def fit(memory: str) -> Literal["check", "try"]:
    """What `--memory` says; `api.load` refuses other words."""
    return cast(Literal["check", "try"], memory)


def fill(
    model: ModelPath,
    texts: Texts = None,
    top: Annotated[int, typer.Option(help="How many candidates for each gap.")] = 5,
    average: Average = 0,
    device: Device = "auto",
    memory: Fit = "check",
    as_json: Json = False,
) -> None:
    """Guess what stands behind each [MASK] of a text, with an encoder such as BERT.

    Example: trivium fill runs/bert "The [MASK] sat on the mat."
    """
    from trivium import api

    given = _given(texts)
    found = api.load(model, device=device, average=average, memory=fit(memory)).fill(given, top=top)
    # one gap gives its candidates, several a list for each
    masks = [each if isinstance(each[0], list) else [each] for each in found]
    if as_json:
        print_json([{"text": text, "masks": [_candidates(c) for c in each]} for text, each in _pairs(given, masks)])
        return
    for text, each in _pairs(given, masks):
        typer.echo(text)
        for number, candidates in enumerate(each, start=1):
            if len(each) > 1:
                typer.echo(f"  gap {number}")
            for candidate in candidates:
                typer.echo(f"  {candidate.probability:7.2%}  {quoted(candidate)}")


def translate(
    model: ModelPath,
    texts: Texts = None,
    beams: Annotated[int, typer.Option(help="Beginnings kept alive in the search; 1 is greedy.")] = 4,
    alpha: Annotated[float, typer.Option(help="Length penalty: 0 prefers short texts, more prefers longer.")] = 0.6,
    coverage: Annotated[float, typer.Option(help="Penalty for source words that got no attention; 0 is off.")] = 0.0,
    n: Annotated[int, typer.Option("-n", help="Print the n best of each, with their scores.")] = 1,
    tokens: Annotated[int, typer.Option(help="At most so many tokens; 0 is 50 more than the source.")] = 0,
    language: Annotated[
        str, typer.Option(help="The language to translate into, for a model with several (opus-mt): fra, deu, ...")
    ] = "",
    ensemble: Annotated[
        list[Path] | None, typer.Option(help="Another model that votes; may be given several times.")
    ] = None,
    average: Average = 0,
    device: Device = "auto",
    memory: Fit = "check",
    as_json: Json = False,
) -> None:
    """Translate texts with an encoder-decoder, by beam search; one line out for each line in.

    Example: trivium translate runs/en-de "A dog runs." or: trivium translate runs/en-de < english.txt > german.txt
    """
    from trivium import api

    given = _given(texts)
    m = api.load(model, device=device, average=average, memory=fit(memory))
    others = [api.load(path, device=device, average=average, memory=fit(memory)) for path in ensemble or []]
    found: list[list[Any]] = []

    def show(best: list[Any]) -> None:
        found.append(best)
        for item in [] if as_json else best:
            line = " ".join(item.splitlines()) if item else ""  # a line for each line, whatever the model writes
            typer.echo(f"{item.score:9.4f}  {line}" if n > 1 else line)
        sys.stdout.flush()

    silent = not sys.stderr.isatty() or (sys.stdout.isatty() and not as_json)  # then the translations show how far
    m.translate(
        given,
        beams=beams,
        alpha=alpha,
        coverage=coverage,
        n=n,
        tokens=tokens,
        ensemble=others,
        language=language,
        tick=_ignore if silent else _progress("translated", time.monotonic),
        each=show,
    )
    if as_json:
        print_json(
            [{"text": text, "best": [_hypothesis(item) for item in each]} for text, each in _pairs(given, found)]
        )


def embed(
    model: ModelPath,
    texts: Texts = None,
    pooling: Annotated[
        str, typer.Option(help="mean: of all its tokens; cls: the [CLS] alone; auto: what a published encoder says.")
    ] = "auto",
    normalise: Annotated[bool, typer.Option("--normalise", help="Scale every vector to length 1.")] = False,
    near: Annotated[str, typer.Option(help="Rank the texts by their cosine with this one instead.")] = "",
    average: Average = 0,
    device: Device = "auto",
    memory: Fit = "check",
    as_json: Json = False,
) -> None:
    """Turn each text into a vector: one line of numbers per text.

    Example: trivium embed runs/bert "A dog runs." "A cat sleeps." --near "A puppy plays."
    """
    from trivium import api

    given = _given(texts)
    m = api.load(model, device=device, average=average, memory=fit(memory))
    if near:
        found = m.neighbours(near, among=given, top=len(given))
        if as_json:
            print_json([{"text": str(item), "similarity": item.similarity} for item in found])
            return
        for item in found:
            typer.echo(f"{item.similarity:8.4f}  {item}")
        return
    if pooling not in ("auto", "mean", "cls"):
        raise RequestError(f"--pooling: {shown(pooling)} is neither mean nor cls (nor auto)")
    tick = _progress("embedded", time.monotonic)
    vectors = m.embed(given, pooling=cast(Any, pooling), normalise=normalise or "auto", tick=tick).tolist()
    if as_json:
        print_json([{"text": text, "vector": vector} for text, vector in _pairs(given, vectors)])
        return
    for vector in vectors:
        typer.echo(" ".join(f"{value:.6g}" for value in vector))


def _given(texts: list[str] | None) -> list[str]:
    """The texts of the command line, or the lines of standard input."""
    if texts and texts != ["-"]:
        return texts
    if not texts and not is_piped():
        raise RequestError("there is no text; add it to the command, or pipe lines into it")
    piped = standard_input()
    if not piped:
        raise RequestError("standard input is empty; pipe at least one line into it")
    # not splitlines: a line separator inside a sentence must not part it from its translation
    return [line.removesuffix("\r") for line in piped.removesuffix("\n").split("\n")]


def _pairs(texts: list[str], answers: list[Any]) -> list[tuple[str, Any]]:
    return list(zip(texts, answers, strict=True))


def _candidates(found: list[Any]) -> list[dict[str, Any]]:
    return [{"piece": str(item), "id": item.id, "probability": item.probability} for item in found]


def _hypothesis(item: Any) -> dict[str, Any]:
    return {
        "text": str(item),
        "score": item.score,
        "logprob": item.logprob,
        "reason": item.reason,
        "ids": item.ids,
    }


def _ignore(done: int, of: int) -> None:
    pass


def _progress(word: str, clock: Callable[[], float]) -> Callable[[int, int], None]:
    """A line on standard error now and then; work of a few seconds needs none."""
    told = clock()

    def tick(done: int, of: int) -> None:
        nonlocal told
        if clock() - told > 3 and done < of:
            told = clock()
            print(f"{word} {done} of {of}", file=sys.stderr, flush=True)

    return tick
