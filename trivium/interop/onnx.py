"""A model as an ONNX graph with free batch and length, which is kept only if onnxruntime gives our logits with it."""

# B batch, T tokens, S tokens of a source, D width, V vocabulary or classes

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from trivium.errors import CheckpointError, RequestError, pip_install
from trivium.fast.attention import FastAttention
from trivium.files import exists_already, remove, sweep_prepared, sync_file, sync_folder, temporary, write_synced
from trivium.interop.foreign import Say
from trivium.interop.proof import Mismatch
from trivium.models.transformer import Transformer, empty, load_weights, weights
from trivium.objectives.masked import CLASS, SEPARATOR
from trivium.objectives.options import PAD
from trivium.parts.options.output import NoOutputOptions
from trivium.parts.sentence import Pooler
from trivium.text.published import WRITTEN, write_tokenizer
from trivium.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # importing it takes a while
    from torch.export import ExportedProgram

MODEL, TOKENIZER, README = "model.onnx", "tokenizer.json", "README.md"
DATA = f"{MODEL}.data"  # the weights of a large model
OPSET = 20  # LayerNormalization and Gelu are one node each; onnxruntime reads it since 1.17
TOLERANCE = 1e-4  # of a score, or of the largest score of its row where that is above 1
# Bytes of weights from which they lie in a file of their own. A graph's file ends at 2 GB, and writing it takes twice
# its size of memory; beside it the weights are written one by one.
EXTERNAL = 500_000_000
AXES = {"decoder_input_ids": "target"}  # the name of an input's second axis where that is not `length`
MASKED = "`attention_mask` is 1 at real tokens and 0 at padding."
UNMASKED = "Shorter rows of a batch are padded on the right with any id: no token sees a later one."
LONGEST = 1024  # a context up to here is compared whole


def export_onnx(module: Transformer, tokenizer: Tokenizer | None, folder: Path, *, say: Say) -> None:
    """Write `model.onnx`, `tokenizer.json` and a README with a usage example into a new folder.

    The graph is compared with the model in onnxruntime first: the folder appears whole and proven, or not at all.
    """
    _check(module, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep_prepared(folder, (MODEL, DATA, README, *WRITTEN))
    hidden = temporary(folder)
    try:
        hidden.mkdir()
        with _still(_plain(module, say)) as graph:
            _write(graph, hidden / MODEL, say)
            worst, times = _compare(graph, hidden / MODEL)
        if worst > TOLERANCE:
            raise Mismatch(
                f"{folder} was not written: onnxruntime's results differ from the model's by {worst:.1e}, more than "
                f"{TOLERANCE:.0e}; try another version of onnxruntime, or export hf"
            )
        if tokenizer is not None:
            write_tokenizer(tokenizer, hidden)
        write_synced(hidden / README, _readme(graph, tokenizer).encode())
        for path in hidden.iterdir():
            sync_file(path)
        sync_folder(hidden)
        os.rename(hidden, folder)
    finally:
        if hidden.exists():
            remove(hidden)
    sync_folder(folder.parent)
    say(f"onnxruntime agrees on {times} inputs; the largest difference is {worst:.1e}")


def _check(module: Transformer, folder: Path) -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise RequestError(f"an ONNX export needs {' and '.join(missing)}; type `{pip_install(*missing)}`")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(exists_already(folder))
    if module.config.context < 4:  # tracing tells lengths from constants only if both can vary
        raise RequestError(f"a context of {module.config.context} is too short for a graph of any length; 4 is enough")


class Graph(nn.Module):
    """The model as ONNX users know it: their names, integers as masks, scores as outputs."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        self.apart = False  # whether padding is a document of its own

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        if decoder_input_ids is None:
            hidden_BTD = self.model(input_ids, segments=token_type_ids, **self._whom(attention_mask, "")).hidden
        else:
            apart = {"documents": torch.ones_like(decoder_input_ids)} if self.apart else {}
            across = self._whom(attention_mask, "source_")
            hidden_BTD = self.model(decoder_input_ids, source=input_ids, **across, **apart).hidden
        first = hidden_BTD if self.mute else self.model.head.logits(hidden_BTD)
        sentence = self.sentence
        return (first,) if sentence is None else (first, sentence.logits(hidden_BTD))

    def _whom(self, mask_BS: Tensor | None, side: str) -> dict[str, Tensor]:
        """What keeps padding out of sight."""
        if mask_BS is None:
            return {}
        return {f"{side}documents": torch.where(mask_BS > 0, 1, 2)} if self.apart else {f"{side}padding": mask_BS > 0}

    @property
    def mute(self) -> bool:
        """Whether there is no vocabulary to give scores for."""
        return isinstance(self.model.config.output, NoOutputOptions)

    @property
    def sentence(self) -> Pooler | None:
        return cast(Pooler | None, self.model.sentence)

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs, in order."""
        family, names = self.model.config.family, ["input_ids"]
        if family != "decoder":
            names.append("attention_mask")
        if family == "encoder-decoder":
            names.append("decoder_input_ids")
        elif self.model.embedding.segments is not None:
            names.append("token_type_ids")
        return names

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs, in order."""
        names = ["last_hidden_state" if self.mute else "logits"]
        if self.sentence is not None:
            names.append("pooler_output" if self.sentence.classify is None else "sentence_logits")
        return names

    @property
    def windows(self) -> list[int]:
        """How far the layers see that do not see everything."""
        sides = [side for side in (self.model.encoder, self.model.decoder) if side is not None]
        return sorted({window for side in sides for window in side.windows if 0 < window < self.model.config.context})

    def example(self, rows: int, length: int, target: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Random inputs; each row of a masked one has some real tokens and then padding."""

        def draw(below: int, columns: int) -> Tensor:
            return torch.randint(below, (rows, columns), generator=generator)

        vocab, segments = self.model.config.vocab, self.model.embedding.segments
        real_B1 = 1 + draw(length, 1)
        given = {
            "input_ids": draw(vocab, length),
            "attention_mask": (torch.arange(length) < real_B1).long(),
            "token_type_ids": draw(1 if segments is None else len(segments), length),
            "decoder_input_ids": draw(vocab, target),
        }
        return {name: given[name] for name in self.inputs}


def _plain(module: Transformer, say: Say) -> Graph:
    """The model on the CPU in float32: itself if it is so already, else a copy."""
    if module.boundary is not None:
        say("the boundary head is left out: it only serves training")
    if all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in weights(module).values()):
        return Graph(module)
    twin = empty(module.config)
    if weights(module).keys() != weights(twin).keys():
        raise RequestError("this model has adapters or quantised weights; merge them, or export the model it came from")
    say("the export is in float32")
    load_weights(twin, weights(module))
    return Graph(twin)


@contextlib.contextmanager
def _still(graph: Graph) -> Iterator[Graph]:
    """The graph in evaluation mode with every weight in one place only, and its model as it was afterwards."""
    training = graph.model.training
    attentions = [inner for inner in graph.modules() if isinstance(inner, FastAttention)]
    fused = [inner.fused for inner in attentions]
    graph.eval()
    for inner in attentions:
        inner.fused = None  # a copy for decoding, which a graph would hold beside the three matrices
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield graph
    finally:
        graph.model.train(training)
        for inner, kept in zip(attentions, fused, strict=True):
            inner.fused = kept


def _write(graph: Graph, path: Path, say: Say) -> None:
    """Trace the model and save the graph, the weights beside it where they are large."""
    say("tracing the model")
    with _quiet():
        program = _traced(graph)
        try:
            found = torch.onnx.export(
                program,
                dynamo=True,
                input_names=graph.inputs,
                output_names=graph.outputs,
                dynamic_shapes={name: {0: "batch", 1: AXES.get(name, "length")} for name in graph.inputs},
                opset_version=OPSET,
                verbose=False,
            )
        except Exception as error:  # a ConversionError, or whatever its helpers raise
            raise RequestError(_refusal(_unknown(program, error), error)) from error
        assert found is not None
        say("writing the graph")
        size = sum(tensor.nbytes for tensor in weights(graph.model).values())
        found.save(path, external_data=size > EXTERNAL)


def _traced(graph: Graph) -> ExportedProgram:
    """The operations of one forward pass, with free sizes."""
    context = graph.model.config.context
    # Beyond the longest window: a shorter trace would show no window. The two lengths and the rows differ, since
    # sizes that are equal would be taken for one.
    length = min(context, max([8, *(window + 2 for window in graph.windows)]))
    given = graph.example(2, length, length - 1, torch.Generator().manual_seed(0))
    free = torch.export.Dim.DYNAMIC
    shapes = {name: {0: free, 1: free} for name in given}
    # In a window padding may see nothing but padding. Ours is then 0, a graph's not a number, which zero weights do not
    # keep from real tokens; so padding sees padding there.
    graph.apart = bool(graph.windows)
    try:
        return torch.export.export(graph, (), given, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch has no common class for what it cannot trace
        raise RequestError(_refusal(_stuck(graph.model, error), error)) from error
    finally:
        graph.apart = False


def _refusal(part: str, error: Exception) -> str:
    reason = _first_line(error.__cause__ or error)
    return f"{part} cannot be exported to ONNX; use another kind there, or export hf ({reason})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _stuck(model: Transformer, error: Exception) -> str:
    """The innermost part that was running when tracing failed."""
    names = {id(inner): name for name, inner in model.named_modules()}
    found, trace = "the model", error.__traceback__
    while trace is not None:
        inner = trace.tb_frame.f_locals.get("self")
        if id(inner) in names:
            found = f"{type(inner).__name__} at {names[id(inner)] or 'the top'}"
        trace = trace.tb_next
    return found


def _unknown(program: ExportedProgram, error: Exception) -> str:
    """The part that uses the operation which ONNX does not know."""
    operation = re.search(r"target=torch\.ops\.([\w.]+)", str(error.__cause__))
    for node in program.graph.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        if operation and stack and str(node.target) == operation[1]:
            name, kind = stack[-1]
            return f"{str(kind).rsplit('.', 1)[-1]} at {name.split('.', 1)[-1]}"
    return "the model"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter says to its own developers: packages that it could use, names that will go."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _compare(graph: Graph, path: Path) -> tuple[float, int]:
    """The largest difference between onnxruntime's results and ours, and on how many inputs it was sought."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_prepacking", "1")  # a second copy of the weights
    generator, worst = torch.Generator().manual_seed(1), 0.0
    shapes = list(_shapes(graph))
    with _theirs():
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for rows, length, target in shapes:
        given = graph.example(rows, length, target, generator)
        with _theirs():
            found = session.run(graph.outputs, {name: tensor.numpy() for name, tensor in given.items()})
        real_BT = given["attention_mask"] > 0 if graph.model.config.family == "encoder" else None
        pairs = zip(graph(**given), map(torch.from_numpy, found), strict=True)
        worst = max(worst, *(_difference(ours, theirs, real_BT) for ours, theirs in pairs))
    return worst, len(shapes)


@contextlib.contextmanager
def _theirs() -> Iterator[None]:
    """A failure of onnxruntime as one of the export; its errors have no class in common."""
    try:
        yield
    except Exception as error:
        raise Mismatch(f"onnxruntime cannot run the graph, so nothing was written: {_first_line(error)}") from error


def _shapes(graph: Graph) -> Iterator[tuple[int, int, int]]:
    """Rows, length and length of the target of what is compared: single tokens, windows and their ends, long texts."""
    context = graph.model.config.context
    edges = (length for window in graph.windows for length in (window, window + 2))
    lengths = sorted({min(length, context) for length in (1, 2, 7, *edges, context if context <= LONGEST else 256)})
    for rows, length, target in zip(itertools.cycle((1, 3, 2)), lengths, reversed(lengths)):
        yield rows if length <= 64 else 1, length, target


def _difference(ours: Tensor, theirs: Tensor, real_BT: Tensor | None) -> float:
    """The largest difference at real tokens, relative to the largest value of a row where that is above 1."""
    if ours.shape != theirs.shape:
        return math.inf
    if real_BT is not None and ours.dim() == 3:
        ours, theirs = ours[real_BT], theirs[real_BT]
    scale = ours.abs().amax(-1, keepdim=True).clamp(min=1)
    worst = float(((ours - theirs).abs() / scale).max())
    return worst if math.isfinite(worst) else math.inf


def _readme(graph: Graph, tokenizer: Tokenizer | None) -> str:
    """What the folder holds, and how onnxruntime runs it."""
    config = graph.model.config
    inputs = ", ".join(f"`{name}` [batch, {AXES.get(name, 'length')}]" for name in graph.inputs)
    example = "\n".join(_example(graph, tokenizer))
    return (
        f"# {config.family.capitalize()} of {config.parameters():,} parameters as an ONNX graph\n\n"
        f"Inputs, all int64: {inputs}. Outputs, float32: {', '.join(f'`{name}`' for name in graph.outputs)}.\n"
        f"Batch and length are free, up to {config.context} tokens.\n"
        f"{UNMASKED if config.family == 'decoder' else MASKED}\n\n```python\n{example}\n```\n"
    )


def _example(graph: Graph, tokenizer: Tokenizer | None) -> Iterator[str]:
    """A program: of a model that writes, the likeliest token again and again; of others, what they give for a text."""
    context, mark, ids, start = graph.model.config.context, -1, "[0]  # what a tokenizer makes of a text", [0]
    yield "import numpy as np\nimport onnxruntime"
    if tokenizer is not None:
        yield f'from tokenizers import Tokenizer\n\ntokenizer = Tokenizer.from_file("{TOKENIZER}")'
        before, after = _around(graph, tokenizer)
        text = '*tokenizer.encode("To be, or not", add_special_tokens=False).ids'
        ids = f"[{', '.join((*map(str, before), text, *map(str, after)))}]"
        mark, start = tokenizer.end, list(tokenizer.frame.start or (tokenizer.specials.get(PAD, 0),))
    yield f'session = onnxruntime.InferenceSession("{MODEL}")'
    yield f"ids = {ids}"
    written = "ids"
    if "decoder_input_ids" in graph.inputs:
        yield f"target = {start}"
        written = "target"
    rows = {"attention_mask": "[1] * len(ids)", "token_type_ids": "[0] * len(ids)", "decoder_input_ids": "target"}
    given = ", ".join(f'"{name}": {rows.get(name, "ids")}' for name in graph.inputs)
    arrays = f"{{name: np.array([row[-{context}:]]) for name, row in {{{given}}}.items()}}"
    if graph.mute or graph.model.config.family == "encoder":
        yield f"given = {arrays}"
        yield f"for name, values in zip({graph.outputs}, session.run(None, given)):"
        yield "    print(name, values.shape, values[0, ..., :4])"
        return
    yield f"while len({written}) < {min(50, 2 * context)}:"
    yield f"    given = {arrays}"
    yield f'    {written}.append(int(session.run(["logits"], given)[0][0, -1].argmax()))'
    yield f"    if {written}[-1] == {mark}:\n        break"
    yield f"print({written})" if tokenizer is None else f"print(tokenizer.decode({written}))"


def _around(graph: Graph, tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    """What stands before and after a text: a published tokenizer knows, else it is as in our training."""
    family, specials = graph.model.config.family, tokenizer.specials
    if tokenizer.frame.before or tokenizer.frame.after:
        return tokenizer.frame.before, tokenizer.frame.after
    if family == "encoder-decoder":
        return (), (tokenizer.end,)
    if family == "encoder" and CLASS in specials and SEPARATOR in specials:
        return (specials[CLASS],), (specials[SEPARATOR],)
    return (), ()
