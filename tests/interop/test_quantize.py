"""A quantised model: near the one it was made from, the same in every use, saved as it is, and never trained."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.battery import close, lively, logits, mute, read, some_ids
from tests.cases import CASES, SHRUNK, Case
from trivium.checkpoints import bundle, card
from trivium.checkpoints.bundle import Bundle, open_bundle, save
from trivium.errors import CheckpointError, ConfigError, RequestError
from trivium.files import sha256
from trivium.interop.quantize import Report, export_bits, quantize
from trivium.models.config import ModelConfig
from trivium.models.transformer import Transformer, build, weights
from trivium.models.vocabulary import extend
from trivium.optim.groups import trainable
from trivium.parts.quantized import QuantizedLinear, TiedLinear, bits_in, embeddings, pack, unpack
from trivium.text.kinds import Bytes

UP = "decoder.blocks.0.feedforward.up"
BY_NAME = {case.name: case for case in CASES}
SOME = [
    BY_NAME[name]
    for name in (
        "decoder: plain",
        "decoder: untied",
        "decoder: qk-norm",
        "decoder: free head sizes grouped",
        "decoder: mixed",
        "encoder: masked head",
        "encoder: segments",
        "encoder: sentence head",
        "encoder: boundary head",
        "encoder-decoder: plain",
        "encoder-decoder: untied",
        "encoder-decoder: stack tied",
    )
]
PRESETS = [case for case in SHRUNK if case in CASES]
EVERY = [
    pytest.param(case, id=case.name, marks=() if case in SOME + PRESETS else pytest.mark.full)
    for case in CASES
    if not mute(case.config)
]
some = pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
both = pytest.mark.parametrize("bits", [8, 4])


def quantized(config: ModelConfig, bits: int, dtype: torch.dtype = torch.float32) -> Transformer:
    model = lively(config, dtype=dtype)
    quantize(model, bits)
    return model


def stored(model: Transformer, folder: Path) -> Path:
    save(folder, model.config, weights(model), Bytes().build([]), {"from": "a test"})
    return folder


def difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@both
@pytest.mark.parametrize("case", EVERY)
def test_logits_stay_near_those_of_the_floats(case: Case, bits: int) -> None:
    """At most 4 % and 50 % of their norm: models drawn at random, in which nothing is there to be robust.

    Noise as large as the rounding of 4 bits moves the logits of the most sensitive one (T5 v1.1) by 45 % too.
    """
    model, tokens_BT = lively(case.config, dtype=torch.float32), some_ids(2, 8)
    with torch.no_grad():
        before = logits(model, tokens_BT)
        quantize(model, bits)
        after = logits(model, tokens_BT)
    assert 0 < difference(after, before) < (0.04 if bits == 8 else 0.5)


@both
@some
def test_a_quantised_model_is_the_float_model_of_its_weights(case: Case, bits: int) -> None:
    model, tokens_BT = quantized(case.config, bits, torch.float64), some_ids(2, 8)
    layers = {
        name: layer for name, layer in model.named_modules(remove_duplicate=False) if isinstance(layer, QuantizedLinear)
    }
    dense = {f"{name}.weight": layer.dense() for name, layer in layers.items()}
    levels = {f"{name}.{part}" for name in layers for part in ("levels", "scales")}
    floats = {name: tensor for name, tensor in model.state_dict().items() if name not in levels}
    fresh = build(case.config).double()
    fresh.load_state_dict(floats | dense)  # into a model that was never quantised
    with torch.no_grad():
        close(logits(model, tokens_BT), logits(fresh.eval(), tokens_BT), 1e-9)


@both
@pytest.mark.parametrize("case", [case for case in SOME if case.causal], ids=lambda case: case.name)
def test_with_a_cache_the_logits_are_those_of_one_pass(case: Case, bits: int) -> None:
    model, tokens_BT = quantized(case.config, bits, torch.float64), some_ids(2, 9)
    with torch.no_grad():
        whole = logits(model, tokens_BT)
        cache = model.cache(2, 9)
        pieces = [logits(model, piece_BT, cache=cache) for piece_BT in torch.split(tokens_BT, [4, 1, 1, 3], dim=1)]
    close(torch.cat(pieces, dim=1), whole, 1e-9)


@both
@some
def test_a_row_of_a_batch_gets_what_it_gets_alone(case: Case, bits: int) -> None:
    model, tokens_BT, source = quantized(case.config, bits, torch.float64), some_ids(4, 7), read(case, 4)
    with torch.no_grad():
        together = logits(model, tokens_BT, **source)
        for row in range(4):
            alone = logits(model, tokens_BT[row, None], **{name: tensor[row, None] for name, tensor in source.items()})
            close(alone, together[row, None], 1e-9)


@both
@some
def test_a_saved_model_comes_back_bit_for_bit_and_is_saved_as_the_same_bytes(
    case: Case, bits: int, tmp_path: Path
) -> None:
    model = quantized(case.config, bits)
    again = open_bundle(stored(model, tmp_path / "a")).module
    assert again.config == case.config
    mine, theirs = weights(model), weights(again)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine)
    with torch.no_grad():
        assert torch.equal(logits(model, some_ids(2, 6)), logits(again, some_ids(2, 6)))
    stored(again, tmp_path / "b")
    assert (tmp_path / "a" / bundle.WEIGHTS).read_bytes() == (tmp_path / "b" / bundle.WEIGHTS).read_bytes()
    assert json.loads((tmp_path / "a" / bundle.CARD).read_text())["bits"] == bits


@both
def test_a_model_is_saved_over_the_file_that_it_was_opened_from(bits: int, tmp_path: Path) -> None:
    first = quantized(SOME[0].config, bits)
    expected = {name: tensor.clone() for name, tensor in weights(first).items()}
    opened = open_bundle(stored(first, tmp_path)).module  # its levels still lie in the file
    stored(lively(SOME[1].config, seed=3), tmp_path)  # another model takes its place
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(opened).items())
    with torch.no_grad():
        opened.get_parameter(f"{UP}.levels").zero_()
    stored(first, tmp_path)
    assert all(torch.equal(t, expected[name]) for name, t in weights(open_bundle(tmp_path).module).items())


@both
@some
def test_the_report_counts_the_bytes_of_the_file(case: Case, bits: int, tmp_path: Path) -> None:
    model = lively(case.config, dtype=torch.float32)
    floats = weights(model)
    report = quantize(model, bits)
    tensors = load_file(stored(model, tmp_path) / bundle.WEIGHTS)
    assert report.before == sum(4 * tensor.numel() for tensor in floats.values())
    assert report.after == sum(tensor.nbytes for tensor in tensors.values()) < report.memory < report.before
    # a table that is an output matrix too lies there as floats and, for each such use, as the levels of the file
    uses = sum(isinstance(part, TiedLinear) for part in model.modules())
    assert uses == case.config.tied + (model.boundary is not None)
    beside = sum(tensors[f"embedding.weight.{kind}"].nbytes for kind in ("levels", "scales") if uses)
    assert report.memory == sum(tensor.nbytes for tensor in weights(model).values()) + uses * beside
    assert {f"{name}.levels" for name in report.quantized} < set(tensors)
    assert set(report.kept) == {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}


def test_a_model_of_usual_sizes_shrinks_as_the_bits_say() -> None:
    """A level, and 16 bits of scale for 64 or 32 inputs; the rest is small."""
    sizes = {}
    for bits in (8, 4):
        model = build(replace(BY_NAME["decoder: plain"].config, width=256, vocab=512))
        report = quantize(model, bits)
        sizes[bits] = report.after / report.before
        assert {name.rsplit(".", 1)[-1] for name in report.kept} == {"bias", "weight", "table"}
        assert all("norm" in name or "final" in name for name in report.kept if name.endswith("weight"))
    assert sizes[8] == pytest.approx(8.25 / 32, rel=0.02)
    assert sizes[4] == pytest.approx(4.5 / 32, rel=0.12)  # the embeddings have 8 bits


def test_what_two_stacks_share_is_saved_once(tmp_path: Path) -> None:
    model = quantized(BY_NAME["encoder-decoder: stack tied"].config, 8)
    tensors = load_file(stored(model, tmp_path) / bundle.WEIGHTS)
    assert model.encoder is not None
    assert model.decoder is not None
    up = "blocks.0.feedforward.up"
    assert model.encoder.get_submodule(up) is model.decoder.get_submodule(up)
    assert isinstance(model.encoder.get_submodule(up), QuantizedLinear)
    assert f"encoder.{up}.levels" in tensors
    assert f"decoder.{up}.levels" not in tensors
    back = open_bundle(tmp_path).module
    assert back.encoder is not None
    assert back.decoder is not None
    assert back.encoder.get_submodule(up) is back.decoder.get_submodule(up)


def test_a_tied_output_stays_the_embedding_and_one_of_its_own_gets_8_bits() -> None:
    tied, untied = (quantized(BY_NAME[f"decoder: {name}"].config, 4) for name in ("plain", "untied"))
    assert tied.get_parameter("output.project.weight") is tied.embedding.weight
    project = untied.get_submodule("output.project")
    assert isinstance(project, QuantizedLinear)
    assert project.bits == 8
    assert bits_in(untied) == 4


@both
@some
def test_embeddings_have_only_values_that_8_bits_can_say(case: Case, bits: int) -> None:
    model = quantized(case.config, bits)
    tables = embeddings(model)
    assert "embedding.weight" in tables
    for table in tables.values():
        assert torch.equal(unpack(pack(table, 8), table.shape[1]), table)


def test_a_float_model_is_saved_as_before(tmp_path: Path) -> None:
    facts = json.loads((stored(lively(SOME[0].config), tmp_path) / bundle.CARD).read_text())
    assert facts["format"] == 1
    assert "bits" not in facts


def test_a_trivium_that_knows_only_floats_refuses_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(quantized(SOME[0].config, 8), tmp_path)
    monkeypatch.setattr(card, "FORMAT", 1)
    with pytest.raises(CheckpointError, match=r"written by a newer trivium \(format 2\)"):
        open_bundle(tmp_path)


def resealed(folder: Path, tensors: dict[str, Tensor] | None = None, **facts: Any) -> Path:
    """The folder with other tensors or facts, its hashes right: a stranger's file, not a damaged one."""
    if tensors is not None:
        save_file(tensors, folder / bundle.WEIGHTS)
    told = json.loads((folder / bundle.CARD).read_text()) | facts
    (folder / bundle.CARD).write_text(json.dumps(told | {"weights": sha256(folder / bundle.WEIGHTS)}))
    return folder


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (f"{UP}.levels", None, f"{UP}.levels is missing"),
        (f"{UP}.scales", None, f"{UP}.scales is missing"),
        (f"{UP}.levels", torch.zeros(128, 64), f"{UP}.levels is no torch.int8"),
        (f"{UP}.levels", torch.zeros(128, 63, dtype=torch.int8), f"{UP}.levels has shape"),
        (f"{UP}.weight", torch.zeros(128, 32), f"{UP}.weight is not part"),
        ("embedding.weight.levels", None, "embedding.weight is missing"),
        ("embedding.weight.scales", torch.zeros(50, 2).bfloat16(), "embedding.weight is missing"),
        ("embedding.weight.levels", torch.zeros(50, 64), "embedding.weight is missing"),
    ],
)
def test_levels_that_do_not_fit_are_refused(name: str, tensor: Tensor | None, said: str, tmp_path: Path) -> None:
    stored(quantized(BY_NAME["decoder: plain"].config, 8), tmp_path)
    tensors = load_file(tmp_path / bundle.WEIGHTS)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(CheckpointError, match=said):
        open_bundle(resealed(tmp_path, tensors))


@pytest.mark.parametrize("bits", [0, 5, 16, -8, 8.0, True, "8", None, [8]])
def test_a_card_with_other_bits_is_refused(bits: object, tmp_path: Path) -> None:
    stored(quantized(SOME[0].config, 8), tmp_path)
    with pytest.raises(CheckpointError, match="is not the card of a trivium model"):
        open_bundle(resealed(tmp_path, bits=bits))


def test_a_card_with_the_bits_of_another_file_is_refused(tmp_path: Path) -> None:
    stored(quantized(SOME[0].config, 8), tmp_path)
    with pytest.raises(CheckpointError, match="do not fit the configuration"):
        open_bundle(resealed(tmp_path, bits=4))


@pytest.mark.parametrize("bits", [0, 1, 3, 16, 32, -4])
def test_other_bits_than_8_and_4_are_refused(bits: int) -> None:
    model = lively(SOME[0].config)
    before = {name: tensor.clone() for name, tensor in weights(model).items()}
    with pytest.raises(RequestError, match=f"8 or 4 bits, not {bits}"):
        quantize(model, bits)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(model).items())


def test_a_quantised_model_is_not_quantised_again() -> None:
    with pytest.raises(RequestError, match="has 8-bit weights already"):
        quantize(quantized(SOME[0].config, 8), 4)


@pytest.mark.parametrize("name", ["embedding.weight", f"{UP}.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_and_the_model_is_whole(name: str, value: float) -> None:
    model = lively(SOME[0].config)
    model.get_parameter(name).data[0, 0] = value
    with pytest.raises(RequestError, match=f"{name} holds weights that are not finite"):
        quantize(model, 8)
    assert bits_in(model) == 0


@both
@some
def test_a_quantised_model_cannot_be_trained(case: Case, bits: int) -> None:
    with pytest.raises(ConfigError, match=f"have {bits} bits, which cannot be trained"):
        trainable(quantized(case.config, bits))


def test_a_quantised_vocabulary_does_not_grow() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        extend(quantized(SOME[0].config, 8), 99)


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.full), 4])  # compiling takes seconds
def test_a_copy_on_its_own_compiles_and_gives_the_same(bits: int) -> None:
    model, tokens_BT = quantized(BY_NAME["decoder: qk-norm"].config, bits), some_ids(2, 6)
    copy = deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(copy, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        close(compiled(tokens_BT).hidden, model(tokens_BT).hidden, 1e-5)


@both
def test_an_export_is_read_back_and_scored_before_and_after(bits: int, tmp_path: Path) -> None:
    model, tokens_BT = lively(SOME[0].config, dtype=torch.float32), some_ids(2, 8)
    heard: list[Transformer] = []
    ticks: list[tuple[int, int]] = []

    def score(module: Transformer) -> float:
        heard.append(module)
        with torch.no_grad():
            return float(logits(module, tokens_BT).norm())

    floats = score(model)
    found = Bundle(model, Bytes().build([]), {"run": "x"})
    export = export_bits(found, tmp_path / "out", bits, score=score, tick=lambda what, at, of: ticks.append((at, of)))
    assert export.before == floats
    assert export.after == score(model) != floats
    assert heard[2] is not model  # what was read back
    assert isinstance(export.report, Report)
    assert export.size == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert ticks[-1] == (len(export.report.quantized), len(export.report.quantized))
    assert open_bundle(tmp_path / "out").notes == {"run": "x"}


@pytest.mark.parametrize("name", [bundle.CARD, "config.toml", "config.json", "manifest.json", bundle.WEIGHTS])
def test_an_export_never_takes_the_place_of_a_model(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("kept")
    model = lively(SOME[0].config)
    with pytest.raises(RequestError, match="already exists and is not replaced; name another place"):
        export_bits(Bundle(model, Bytes().build([]), {}), tmp_path, 8, score=lambda module: pytest.fail("scored"))
    assert bits_in(model) == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]
