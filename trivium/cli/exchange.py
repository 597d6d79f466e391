"""`trivium import` and `export`: models from and to the rest of the world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from trivium.cli.render import watcher
from trivium.cli.use import Fit, ModelPath, fit
from trivium.errors import RequestError, shown
from trivium.files import exists_already

KINDS = ("hf", "gguf", "onnx", "trivium")
_COMPARED = 200_000  # characters on which bits per byte are compared
_BRIEF = 10_000  # the same without --text


def bring(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder, a .gguf file or a llama2.c .bin file.")],
    out: Annotated[
        Path | None, typer.Argument(help="The folder to save it in, in trivium's own form; models/NAME if left out.")
    ] = None,
    bits: Annotated[int, typer.Option(help="Quantise the weights to 8 or 4 bits; 0 keeps them.")] = 0,
    memory: Fit = "check",
) -> None:
    """Take over a published checkpoint: model.safetensors, model.json and tokenizer.json in one folder.

    Every command opens such files directly, too; importing them checks and hashes everything once.
    Example: trivium import downloads/gpt2 models/gpt2
    """
    from trivium import api
    from trivium.checkpoints.model_files import is_vacant
    from trivium.text.missing import MissingTokenizer

    out = out or Path("models") / (source.resolve().name if source.is_dir() else source.resolve().stem)
    if not is_vacant(out):
        raise RequestError(exists_already(out))
    with watcher() as watch:
        m = api.load(source, device="cpu", bits=bits, memory=fit(memory), say=watch.say, tick=watch.tick)
    if isinstance(m.tokenizer, MissingTokenizer):
        raise RequestError(
            f"{source} has no tokenizer that can be used, and a model is saved with one; put its tokenizer.json there"
        )
    m.save(out)
    typer.echo(f"{out}: a {m.config.family} with {m.config.parameters():,} parameters")


def export(
    model: ModelPath,
    kind: Annotated[str, typer.Argument(help="hf, gguf, onnx, or trivium (with --bits).")],
    out: Annotated[Path, typer.Argument(help="The folder to make, or the .gguf file.")],
    bits: Annotated[int, typer.Option(help="gguf: 32, 16 or 8. trivium: 8 or 4, weights alone.")] = 0,
    text: Annotated[
        Path | None,
        typer.Option(help="The text to compare bits per byte on; else that of the run's validation, or Shakespeare."),
    ] = None,
    average: Annotated[int, typer.Option(help="Use the mean of the run's newest K checkpoints.", metavar="K")] = 0,
    memory: Fit = "check",
) -> None:
    """Write a model for other programs; it is read back and its logits compared before the command says done.

    Example: trivium export runs/demo-gpt hf exported/demo, or: trivium export runs/demo-gpt trivium small --bits 8
    """
    from trivium import api

    if kind not in KINDS:
        raise RequestError(f"export: {shown(kind)} is none of {', '.join(KINDS)}")
    with watcher() as watch:
        m = api.load(model, device="cpu", average=average, memory=fit(memory), say=watch.say, tick=watch.tick)
        if kind == "trivium":
            _smaller(m, model, out, bits, text, watch.say)
            return
        where = m.export(_kind(kind), out, bits=bits or 32, say=watch.say)
    typer.echo(str(where))


def _kind(kind: str) -> Any:
    return kind


def _smaller(m: Any, model: Path, out: Path, bits: int, text: Path | None, say: Callable[[str], None]) -> None:
    """Quantise, save, read back, and print size and bits per byte of both."""
    from trivium.checkpoints.bundle import Bundle
    from trivium.evaluation.likelihood import score_text
    from trivium.interop.quantize import export_bits

    if not bits:
        raise RequestError("export trivium: give --bits 8 or --bits 4; a model that keeps its bits is there already")
    name, sample = _sample(m, model, text)

    def score(module: Any) -> float:
        if m.config.family != "decoder":
            return float("nan")
        say(f"scoring {len(sample):,} characters of {name}")
        return score_text(module, m.tokenizer, sample).bits_per_byte

    found = export_bits(Bundle(m.module, m.tokenizer, m.notes), out, bits, score=score)
    report = found.report
    typer.echo(f"{out}: {report.after / 1e6:,.1f} MB of weights, {report.before / 1e6:,.1f} MB before")
    if m.config.family == "decoder":
        change = found.after - found.before
        typer.echo(f"bits per byte on {name}: {found.before:.4f} before, {found.after:.4f} after ({change:+.4f})")


def _sample(m: Any, model: Path, text: Path | None) -> tuple[str, str]:
    """A text to compare on and its name: the one that is given, the run's own validation text, or some Shakespeare."""
    from trivium.cli.demos.assets import text_of
    from trivium.data.config import DataConfig
    from trivium.data.shards import open_shards
    from trivium.data.sources import texts
    from trivium.records import run_of

    if text is not None:
        found = "".join(texts(DataConfig(paths=(str(text),)), read=lambda count: None))
        return str(text), found[:_COMPARED]
    home = run_of(model) or model
    if (home / "data" / "manifest.json").is_file():
        ids = open_shards(home / "data", tokenizer_digest=m.tokenizer.digest).valid.ids[:_COMPARED]
        found = m.tokenizer.decode([int(id) for id in ids if id != m.tokenizer.end])
        if found:
            return "the run's validation text", found[:_COMPARED]
    return "the last tenth of Tiny Shakespeare", text_of("shakespeare-test.txt.gz")[:_BRIEF]
