"""ONNX exports: onnxruntime gives our results, or there is no export."""

# B batch, T tokens

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

from tests.battery import lively
from tests.cases import CASES, CONTEXT, Case, shrunk
from tests.generation.tiny import DENOISING, MASKED
from trivium.errors import CheckpointError, RequestError, TriviumError
from trivium.fast.choose import for_inference
from trivium.interop import onnx as exporting
from trivium.interop.onnx import export_onnx
from trivium.models.config import AnyStack, BlockStack, ModelConfig
from trivium.models.presets import PRESETS
from trivium.models.transformer import Transformer
from trivium.objectives.options import PAD
from trivium.parts.quantized import hollow
from trivium.parts.sentence import Pooler
from trivium.text.tokenizer import Tokenizer

pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

ONE_EACH = ("gpt-mini", "bert-base-uncased", "t5-mini", "llama-mini", "gpt2")


class Exported(NamedTuple):
    model: Transformer
    tokenizer: Tokenizer
    folder: Path
    said: list[str]


def thin(config: ModelConfig) -> ModelConfig:
    """The same model with one layer a side: tracing takes seconds a layer.

    Not where layers differ, or where a window makes padding that a second layer must not see.
    """

    def side(stack: AnyStack) -> AnyStack:
        alike = isinstance(stack, BlockStack) and not stack.pattern and not stack.block.attention.window
        return replace(stack, layers=1) if isinstance(stack, BlockStack) and alike else stack

    return replace(config, encoder=side(config.encoder), decoder=side(config.decoder))


def small(name: str, vocab: int = 50) -> Transformer:
    config = replace(thin(shrunk(PRESETS[name]())), vocab=vocab)
    return lively(config, dtype=torch.float32)


def silent(text: str) -> None:
    """Nobody is watching."""


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """By its name a preset made tiny, laid out for decoding as `tv.load` does, and its export; made once.

    The weights of llama-mini lie beside its graph, as if they were large.
    """
    top = tmp_path_factory.mktemp("onnx")

    @cache
    def made(name: str) -> Exported:
        tokenizer = DENOISING if name == "t5-mini" else MASKED
        model, said = small(name, tokenizer.size), list[str]()
        for_inference(model)
        with pytest.MonkeyPatch.context() as patch:
            if name == "llama-mini":
                patch.setattr(exporting, "EXTERNAL", 0)
            export_onnx(model, tokenizer, top / name, say=said.append)
        return Exported(model, tokenizer, top / name, said)

    return made


def drawn(model: Transformer, rows: int, length: int, target: int, seed: int) -> dict[str, Tensor]:
    """Random inputs by the names of the graph; every row has padding of its own length."""
    generator = torch.Generator().manual_seed(seed)

    def ids(below: int, columns: int) -> Tensor:
        return torch.randint(below, (rows, columns), generator=generator)

    family, segments = model.config.family, model.embedding.segments
    given = {"input_ids": ids(model.config.vocab, length)}
    if family != "decoder":
        given["attention_mask"] = (torch.arange(length) <= ids(length, 1)).long()
    if family == "encoder-decoder":
        given["decoder_input_ids"] = ids(model.config.vocab, target)
    elif segments is not None:
        given["token_type_ids"] = ids(len(segments), length)
    return given


def ours(model: Transformer, given: dict[str, Tensor]) -> Tensor:
    """The scores by the model's own methods."""
    real = given["attention_mask"].bool() if "attention_mask" in given else None
    with torch.no_grad():
        if model.config.family == "encoder-decoder":
            states = model(given["decoder_input_ids"], source=given["input_ids"], source_padding=real)
        else:
            states = model(given["input_ids"], padding=real, segments=given.get("token_type_ids"))
        return model.head.logits(states.hidden)


def assert_equal(model: Transformer, folder: Path, rows: int, length: int, target: int, seed: int) -> None:
    given = drawn(model, rows, length, target, seed)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    found = torch.from_numpy(session.run(["logits"], {name: tensor.numpy() for name, tensor in given.items()})[0])
    expected = ours(model, given)
    if model.config.family == "encoder":
        real = given["attention_mask"].bool()
        found, expected = found[real], expected[real]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"seed {seed}: {text}")


@pytest.mark.parametrize("name", ONE_EACH)
def test_onnxruntime_gives_our_logits_at_every_length_and_batch(name: str, exports: Callable[[str], Exported]) -> None:
    made = exports(name)
    for seed, (rows, length, target) in enumerate(((1, 1, 3), (1, CONTEXT, 1), (4, 5, 9), (2, 2, CONTEXT), (5, 11, 4))):
        assert_equal(made.model, made.folder, rows, length, target, seed)


def test_an_export_says_its_largest_difference(exports: Callable[[str], Exported]) -> None:
    said = exports("gpt2").said[-1]
    assert 0 <= float(said.rsplit(" ", 1)[-1]) < 1e-5, said


@pytest.mark.parametrize("name", ONE_EACH[:3])
def test_the_axes_of_a_graph_have_names(name: str, exports: Callable[[str], Exported]) -> None:
    graph = onnx.load(exports(name).folder / "model.onnx").graph
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    batch, vocab = ["batch", "length"], exports(name).model.config.vocab
    expected: dict[str, dict[str, list[Any]]] = {
        "gpt-mini": {"input_ids": batch, "logits": [*batch, vocab]},
        "bert-base-uncased": {
            "input_ids": batch,
            "attention_mask": batch,
            "token_type_ids": batch,
            "logits": [*batch, vocab],
            "sentence_logits": ["batch", 2],
        },
        "t5-mini": {
            "input_ids": batch,
            "attention_mask": batch,
            "decoder_input_ids": ["batch", "target"],
            "logits": ["batch", "target", vocab],
        },
    }
    assert axes == expected[name]


def test_verdicts_on_sentences_come_out_too(exports: Callable[[str], Exported]) -> None:
    model, _, folder, _ = exports("bert-base-uncased")
    given = drawn(model, 3, 7, 0, seed=0)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    inputs = {name: tensor.numpy() for name, tensor in given.items()}
    found = torch.from_numpy(session.run(["sentence_logits"], inputs)[0])
    real, segments = given["attention_mask"].bool(), given["token_type_ids"]
    with torch.no_grad():
        hidden = model(given["input_ids"], padding=real, segments=segments).hidden
        expected = cast(Pooler, model.sentence).logits(hidden)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_weights_are_stored_once(exports: Callable[[str], Exported]) -> None:
    """Attention has a packed copy of its matrices for decoding, and the output is the embedding."""
    made = exports("gpt2")
    size = sum(parameter.nbytes for parameter in made.model.parameters())
    stored = sum(len(tensor.raw_data) for tensor in onnx.load(made.folder / "model.onnx").graph.initializer)
    assert size <= stored < 1.05 * size


def run_readme(folder: Path) -> str:
    """What the example in a README prints, run as it stands."""
    text = (folder / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_of_a_decoder_writes_what_the_model_writes(exports: Callable[[str], Exported]) -> None:
    model, tokenizer, folder, _ = exports("gpt2")
    ids = tokenizer.encode("To be, or not")
    while len(ids) < 2 * CONTEXT:
        ids.append(int(ours(model, {"input_ids": torch.tensor([ids[-CONTEXT:]])})[0, -1].argmax()))
        if ids[-1] == tokenizer.end:
            break
    assert run_readme(folder) == tokenizer.decode(ids, skip_specials=True) + "\n"


@pytest.mark.full
def test_the_readme_of_an_encoder_decoder_writes_what_the_model_writes(exports: Callable[[str], Exported]) -> None:
    model, tokenizer, folder, _ = exports("t5-mini")
    source, target = [*tokenizer.encode("To be, or not"), tokenizer.end], [tokenizer.specials[PAD]]
    while len(target) < 2 * CONTEXT:
        given = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([target[-CONTEXT:]])}
        target.append(int(ours(model, given)[0, -1].argmax()))
        if target[-1] == tokenizer.end:
            break
    assert run_readme(folder) == tokenizer.decode(target, skip_specials=True) + "\n"


@pytest.mark.full
def test_the_readme_of_an_encoder_shows_the_model_s_scores(exports: Callable[[str], Exported]) -> None:
    model, tokenizer, folder, _ = exports("bert-base-uncased")
    text = tokenizer.encode("To be, or not")
    ids = [tokenizer.specials["[CLS]"], *text, tokenizer.specials["[SEP]"]]
    shown = run_readme(folder).splitlines()
    assert shown[0].startswith(f"logits (1, {len(ids)}, {model.config.vocab})")
    first = [float(value) for value in shown[0].split("[[")[1].rstrip("]").split()]
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
    torch.testing.assert_close(torch.tensor(first), ours(model, given)[0, 0, :4], rtol=1e-3, atol=1e-3)


# what the export leaves as it was


def test_a_model_in_bfloat16_is_exported_in_float32_and_stays_as_it_is(tmp_path: Path) -> None:
    model = small("gpt2").to(torch.bfloat16).train()
    export_onnx(model, None, tmp_path / "new" / "graph", say=silent)
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sorted(path.name for path in (tmp_path / "new" / "graph").iterdir()) == ["README.md", "model.onnx"]
    assert_equal(model.float().eval(), tmp_path / "new" / "graph", 2, 9, 0, seed=0)


def test_large_weights_lie_beside_the_graph_and_the_folder_can_be_copied(
    exports: Callable[[str], Exported], tmp_path: Path
) -> None:
    model, _, folder, _ = exports("llama-mini")
    copied = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert 0.9 * size < (copied / "model.onnx.data").stat().st_size < 1.2 * size
    assert_equal(model, copied, 2, 9, 0, seed=0)


# refusals


class Branching(nn.Module):
    """A norm that looks at values to decide what to do."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Airy(nn.Module):
    """A norm with an operation that ONNX has no name for."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.special.airy_ai(x)
        return result


class TwoFaced(nn.Module):
    """A norm that is another one when it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.001 if torch.compiler.is_compiling() else x


def with_norm(norm: nn.Module) -> Transformer:
    model = small("gpt2")
    assert model.decoder is not None
    model.decoder.final = norm
    return model


@pytest.mark.parametrize("norm", [Branching(), Airy()], ids=["branching", "airy"])
def test_a_part_that_cannot_be_exported_is_refused_by_name(norm: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"{type(norm).__name__} at .*decoder.final cannot be exported") as caught:
        export_onnx(with_norm(norm), None, tmp_path / "graph", say=silent)
    assert len(str(caught.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_graph_that_differs_is_refused_and_nothing_is_left_behind(tmp_path: Path) -> None:
    with pytest.raises(TriviumError, match=r"differ from the model's by \d") as caught:
        export_onnx(with_norm(TwoFaced()), None, tmp_path / "graph", say=silent)
    assert caught.value.exit_code == 1
    assert not list(tmp_path.iterdir())


def test_a_graph_that_onnxruntime_cannot_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(graph: exporting.Graph, path: Path, say: Callable[[str], None]) -> None:
        path.write_bytes(b"no graph")

    monkeypatch.setattr(exporting, "_write", torn)
    with pytest.raises(TriviumError, match="onnxruntime cannot run the graph, so nothing was written: ") as caught:
        export_onnx(small("gpt2"), None, tmp_path / "graph", say=silent)
    assert caught.value.exit_code == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["onnx", "onnxscript", "onnxruntime"])
def test_without_its_packages_nothing_is_exported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RequestError, match=rf"needs {name}; type `.* -m pip install {name}`"):
        export_onnx(small("gpt2"), None, tmp_path / "graph", say=silent)
    assert not list(tmp_path.iterdir())


def test_an_export_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    for place in (tmp_path, tmp_path / "kept"):
        with pytest.raises(CheckpointError, match="already exists and is not replaced; name another place"):
            export_onnx(small("gpt2"), None, place, say=silent)
    assert (tmp_path / "kept").read_text() == "mine"


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    model = small("gpt2")
    hollow(model, 8)
    with pytest.raises(RequestError, match="quantised weights; merge them, or export the model it came from"):
        export_onnx(model, None, tmp_path / "graph", say=silent)
    assert not list(tmp_path.iterdir())


def test_a_context_of_a_few_tokens_is_refused(tmp_path: Path) -> None:
    model = lively(replace(thin(shrunk(PRESETS["gpt2"]())), context=3))
    with pytest.raises(RequestError, match="context of 3 is too short"):
        export_onnx(model, None, tmp_path / "graph", say=silent)


# every part


# the draws of an init change no graph
EVERY = [case for case in CASES if ": init " not in case.name]


@pytest.mark.full
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_every_part_can_be_exported(case: Case, tmp_path: Path) -> None:
    model = lively(thin(case.config), dtype=torch.float32)
    export_onnx(model, None, tmp_path / "graph", say=silent)
    session = onnxruntime.InferenceSession(str(tmp_path / "graph" / "model.onnx"))
    if session.get_outputs()[0].name == "logits":
        for rows, length in pairwise(range(1, CONTEXT + 1)):
            assert_equal(model, tmp_path / "graph", rows, length, CONTEXT + 1 - length, seed=length)
