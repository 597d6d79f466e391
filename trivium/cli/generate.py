"""`trivium generate` and `chat`: text that appears as it is written."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trivium.cli.printing import Json, is_piped, is_waiting, print_json, standard_input
from trivium.cli.render import watcher
from trivium.cli.use import Average, Device, Fit, ModelPath, fit

if TYPE_CHECKING:
    from trivium.api import Model

_LABEL = 60  # characters of a prompt in the line above its text


def generate(
    model: ModelPath,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="The texts to continue, or to write from (encoder-decoder); without any, or with -, what is piped in.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest only; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest with this much mass; 1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop what is less likely than this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: discourage what was said before.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    n: Annotated[int, typer.Option("-n", help="How many samples.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    logprobs: Annotated[int, typer.Option(help="With --json: the n likeliest alternatives of each token.")] = 0,
    slide: Annotated[bool, typer.Option("--slide", help="Go on past the context by forgetting the beginning.")] = False,
    average: Average = 0,
    device: Device = "auto",
    memory: Fit = "check",
    as_json: Json = False,
) -> None:
    """Continue a prompt; the text appears as it is written. An encoder-decoder reads it as a source instead.

    Several prompts are continued together and printed in order.
    Example: trivium generate runs/my "It was" or: echo "It was" | trivium generate runs/my
    """
    from trivium import api

    given = _prompts(prompts or [])
    m = api.load(model, device=device, average=average, memory=fit(memory))
    options: dict[str, Any] = {
        "tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or (),
        "slide": slide,
    }
    if n == 1 and len(given) == 1 and not as_json and not logprobs:
        _stream(m, given[0], options)
        return
    found = [
        each if isinstance(each, list) else [each] for each in m.generate(given, n=n, logprobs=logprobs, **options)
    ]
    if as_json:
        answers = [_answer(text, samples) for text, samples in zip(given, found, strict=True)]
        print_json(answers if len(answers) > 1 else answers[0])
        return
    for text, samples in zip(given, found, strict=True):
        for index, sample in enumerate(samples, start=1):
            if len(given) > 1:
                typer.echo(_label(text) + (f" ({index} of {n})" if n > 1 else ""))
            elif n > 1:
                typer.echo(f"--- {index}")
            typer.echo(_echoed(m, text) + sample)
    if any(sample.reason == "context" for samples in found for sample in samples):
        _context_is_full(m)


def _prompts(given: list[str]) -> list[str]:
    """The prompts of the command line; what is piped in stands for - and for none at all.

    An empty pipe is an empty prompt, as in a batch job, which has no terminal.
    """
    if not given and not is_piped():
        return [""]
    piped = ""
    if not given or "-" in given:
        piped = standard_input()
        piped = piped.removesuffix("\n").removesuffix("\r")  # the end of the last line, which `echo` adds
    elif is_waiting():
        typer.echo("note: what is piped in is not read, since there is a prompt; name - to read it", err=True)
    return [piped if prompt == "-" else prompt for prompt in given or ["-"]]


def _stream(m: Model, prompt: str, options: dict[str, Any]) -> None:
    """Write the text, each piece as soon as it is there."""
    pieces = m.stream(prompt, **options)
    typer.echo(_echoed(m, prompt), nl=False)
    try:
        reason = _written(pieces)
    except KeyboardInterrupt:
        typer.echo()  # the shell's prompt on a line of its own
        raise
    typer.echo()
    if reason == "context":
        _context_is_full(m)


def _context_is_full(m: Model) -> None:
    typer.echo(f"(the model's context of {m.config.context} tokens is full; --slide goes on)", err=True)


def _written(pieces: Generator[str, None, Any]) -> str:
    """Print pieces of text as they come; why they ended."""
    while True:
        try:
            typer.echo(next(pieces), nl=False)
            sys.stdout.flush()
        except StopIteration as end:
            return str(end.value.reason)


def _echoed(m: Model, prompt: str) -> str:
    """What stands in front of the new text: a prompt that it continues, never a source."""
    return "" if m.config.family == "encoder-decoder" else prompt


def _label(prompt: str) -> str:
    text = " ".join(prompt.split())
    return f"--- {text if len(text) <= _LABEL else text[:_LABEL] + '...'}"


def _answer(prompt: str, samples: list[Any]) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "samples": [
            {
                "text": str(sample),
                "reason": sample.reason,
                "ids": sample.ids,
                "logprobs": sample.logprobs,
                "alternatives": sample.alternatives,
            }
            for sample in samples
        ],
    }


def chat(
    model: ModelPath,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    tokens: Annotated[int, typer.Option(help="The longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this total probability.")] = 0.9,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    device: Device = "auto",
    memory: Fit = "check",
) -> None:
    """Talk to a model that was trained for conversations, such as SmolLM2-Instruct.

    Ctrl-C ends an answer; an empty line, Ctrl-D or Ctrl-C where you type ends the chat.
    Example: trivium chat models/smollm2.gguf, or: echo "What is a tram?" | trivium chat models/smollm2.gguf
    """
    from trivium import api
    from trivium.generation.chat import chat_of

    with watcher() as watch:
        m = api.load(model, device=device, memory=fit(memory), say=watch.say, tick=watch.tick)
    chat_of(m.tokenizer, m.notes)  # a model without a template is refused before anybody types
    messages = [{"role": "system", "content": system}] if system else []
    terminal = not is_piped()
    while said := _typed(terminal):
        messages.append({"role": "user", "content": said})
        pieces = m.chat(messages, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed + len(messages))
        messages.append({"role": "assistant", "content": _answered(pieces, terminal)})


def _typed(terminal: bool) -> str:
    """The next message of the user; "" ends the chat."""
    try:
        said = input("> ") if terminal else sys.stdin.readline().rstrip("\n")
    except EOFError:
        return ""
    except KeyboardInterrupt:
        typer.echo()
        raise typer.Exit(128 + signal.SIGINT) from None
    return said if said.strip() else ""


def _answered(pieces: Generator[str, None, Any], terminal: bool) -> str:
    """Print an answer as it is written; on a terminal Ctrl-C ends it where it is, and the conversation goes on."""
    answer = ""
    with _interruption(catch=terminal) as interrupted:
        for piece in pieces:
            answer += piece
            typer.echo(piece, nl=False)
            sys.stdout.flush()
            if interrupted:
                pieces.close()
                typer.echo(" (stopped)", nl=False)
                break
    typer.echo()
    return answer


@contextmanager
def _interruption(*, catch: bool) -> Iterator[list[int]]:
    """A list that is no longer empty after Ctrl-C, which raises nothing the first time."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    if not catch:
        yield seen
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
