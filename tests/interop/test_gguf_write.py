"""Our models as GGUF: opened by `transformers` and by the `gguf` package, and refused where the format has no word."""

# B batch, T tokens

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.interop.gguf_models import gguf, opened_by_transformers, permuted, quiet
from tests.oracle.copying import enliven, ids, logits, near
from trivium.errors import CheckpointError, RequestError, TriviumError
from trivium.interop import gguf_write
from trivium.interop.alike import differences
from trivium.interop.architectures.architecture import first_block, like
from trivium.interop.gguf import open_gguf
from trivium.interop.gguf_write import Bits, export_gguf
from trivium.interop.proof import Mismatch
from trivium.interop.quants import Format
from trivium.models.config import ModelConfig, Stack
from trivium.models.presets import PRESETS
from trivium.models.presets.llama import Shape, llama
from trivium.models.transformer import Transformer, build
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import GluOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.output import SoftmaxOptions
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.options.residual import SandwichOptions
from trivium.parts.options.scaling import LinearScaling, Llama3, NoScaling, Scaling, Yarn

VOCAB = 71


def small(**changes: Any) -> Shape:
    return Shape(2, 32, 48, 4, 2, 8, VOCAB, 64)._replace(**changes)


def alive(config: ModelConfig, seed: int = 0) -> Transformer:
    model = build(config).eval()
    enliven(model, seed=seed)
    return model


def block(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The configuration with another part in every layer."""
    stack = like(config.decoder, Stack)
    return replace(config, decoder=replace(stack, block=replace(first_block(stack), **changes)))


def exported(model: Transformer, path: Path, bits: Bits = 32) -> str:
    said: list[str] = []
    export_gguf(model, None, path, say=said.append, bits=bits)
    assert len(said) == 1
    return said[0]


def test_transformers_opens_an_export_with_equal_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Callable[[int, int], int]
) -> None:
    seed = random.randrange(2**32) if count(0, 1) else 0
    draw = random.Random(seed)
    for round in range(count(2, 20)):
        groups = draw.randint(1, 3)
        shape = small(
            heads=groups * draw.randint(1, 3),
            groups=groups,
            head=2 * draw.randint(1, 9),
            width=draw.choice([12, 18, 36]) * groups,
            hidden=draw.randint(5, 70),
            layers=draw.randint(1, 3),
            tie=draw.choice(["all", "none"]),
            theta=draw.choice([500.0, 1e4, 1e6]),
            eps=draw.choice([1e-5, 1e-6]),
        )
        if shape.width % shape.heads:  # transformers wants a multiple, though nothing there needs it
            shape = shape._replace(width=4 * shape.heads)
        print(f"seed {seed}, round {round}: {shape}")
        model = alive(llama(shape), round)
        path = tmp_path / f"{round}.gguf"
        assert exported(model, path).endswith("at most 0.0e+00")
        tokens_BT = ids(2, 40, round, VOCAB)
        with torch.no_grad():
            other = opened_by_transformers(path, monkeypatch)(tokens_BT).logits
        near(logits(model, tokens_BT), other)


def test_transformers_opens_qwen2_and_qwen3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = llama(small())
    biased = block(
        plain, attention=replace(like(first_block(plain.decoder).attention, MultiHeadOptions), bias="inputs")
    )
    normed = llama(small(norm="rms", eps=1e-6, head=128, theta=1e6))  # transformers reads no other size of a head there
    for name, config in (("qwen2", biased), ("qwen3", normed)):
        model = alive(config)
        path = tmp_path / f"{name}.gguf"
        exported(model, path)
        tokens_BT = ids(2, 40, 0, VOCAB)
        with torch.no_grad():
            other = opened_by_transformers(path, monkeypatch)(tokens_BT).logits
        near(logits(model, tokens_BT), other)


@pytest.mark.parametrize(
    ("bits", "kind", "least", "most"), [(32, "F32", 0, 0), (16, "F16", 1e-7, 0.02), (8, "Q8_0", 1e-5, 1.0)]
)
def test_the_gguf_package_reads_the_tensors_of_an_export(
    bits: Bits, kind: str, least: float, most: float, tmp_path: Path
) -> None:
    model = alive(llama(small(width=64, hidden=96, head=16)))
    said = float(exported(model, tmp_path / "model.gguf", bits).split()[-1])
    assert least <= said <= most
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == 3 + 9 * 2
    assert reader.fields["general.architecture"].contents() == "llama"
    query = model.get_parameter("decoder.blocks.1.attention.query.weight").detach().numpy()
    stored = found["blk.1.attn_q.weight"]
    assert stored.tensor_type.name == kind
    assert found["blk.1.attn_norm.weight"].tensor_type.name == "F32"
    wanted = gguf.quants.quantize(permuted(query, 4), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(stored.data.view(np.uint8).reshape(-1), wanted.view(np.uint8).reshape(-1))


def test_rows_that_are_no_whole_blocks_stay_float16(tmp_path: Path) -> None:
    exported(alive(llama(small(hidden=40))), tmp_path / "model.gguf", 8)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"


SCALINGS: list[Scaling] = [
    NoScaling(),
    LinearScaling(factor=4),
    Yarn(factor=4, original=16),
    Llama3(factor=8, original=64),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_what_is_read_back_is_the_same_model(scaling: Scaling, layout: Any, tmp_path: Path) -> None:
    config = llama(small(head=16, scaling=scaling))
    config = block(config, position=replace(like(first_block(config.decoder).position, RotaryOptions), layout=layout))
    model = alive(config)
    exported(model, tmp_path / "model.gguf")
    back = open_gguf(tmp_path / "model.gguf", say=quiet, tick=quiet).module
    tokens_BT = ids(2, 64, 0, VOCAB)
    near(logits(back, tokens_BT), logits(model, tokens_BT))
    lost = differences(config, back.config)  # the file has one layout: other rows, the same function
    assert lost == ([] if layout == "halves" else ["decoder.block.position.layout = 'interleaved'"])


PLAIN = llama(small())
REFUSED = {
    "decoder.block.feedforward.kind = 'mlp'": replace(PRESETS["gpt-mini"](), vocab=VOCAB),
    "encoder.": replace(PRESETS["t5-mini"](), vocab=VOCAB),
    "decoder.block.norm.kind = 'layer'": block(PLAIN, norm=LayerNormOptions()),
    "decoder.block.residual.kind = 'sandwich'": block(PLAIN, residual=SandwichOptions()),
    "decoder.block.position.share = 0.5": block(PLAIN, position=RotaryOptions(share=0.5)),
    "decoder.block.position.scaling.high = 8.0": block(PLAIN, position=RotaryOptions(scaling=Llama3(high=8.0))),
    "decoder.block.attention.window = 7": llama(small(window=7)),
    "decoder.block.attention.scale = 'none'": block(PLAIN, attention=MultiHeadOptions(heads=4, scale="none")),
    "decoder.block.feedforward.activation = 'gelu'": block(PLAIN, feedforward=GluOptions(activation="gelu")),
    "embedding.scale = 'root'": replace(PLAIN, embedding=TokenEmbeddingOptions(tie="none", scale="root")),
    "output.cap = 30.0": replace(PLAIN, output=SoftmaxOptions(cap=30.0)),
    "decoder.layer 1": replace(
        PLAIN,
        decoder=Stack(
            layers=2,
            block=first_block(PLAIN.decoder),
            pattern=("", "other"),
            variants={"other": replace(first_block(PLAIN.decoder), feedforward=GluOptions(hidden=64))},
        ),
    ),
}


@pytest.mark.parametrize("part", REFUSED)
def test_a_part_that_the_format_lacks_is_named(part: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        export_gguf(build(REFUSED[part]), None, tmp_path / "model.gguf", say=quiet)
    assert f"GGUF cannot express model.{part}" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_our_small_llama_can_be_exported(tmp_path: Path) -> None:
    exported(alive(replace(PRESETS["llama-mini"](), vocab=VOCAB)), tmp_path / "model.gguf", 16)


def test_an_export_makes_its_folder_and_never_replaces_one_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "model.gguf"
    exported(alive(PLAIN), path)
    whole = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"model\.gguf already exists and is not replaced; name another place"):
        exported(alive(PLAIN, seed=1), path)
    assert path.read_bytes() == whole
    with pytest.raises(CheckpointError, match=r"is a folder; name a file in it, such as .*model.gguf"):
        exported(alive(PLAIN), tmp_path / "new")


def test_an_export_that_does_not_match_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivium.interop.gguf_write._raw", lambda tensor, format: bytes(format.bytes(tensor.numel())))
    with pytest.raises(Mismatch, match="the export does not match") as caught:
        exported(alive(PLAIN), tmp_path / "model.gguf")
    assert caught.value.exit_code == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("bits", "off"), [(16, 2**-9), (8, 1 / 60), (32, 2**-22)])
def test_a_small_block_that_is_off_is_found_beside_a_large_one(
    bits: Bits, off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of small numbers, off by a share of its own that is nothing beside the largest of the tensor."""
    model = alive(PLAIN)
    with torch.no_grad():
        model.embedding.weight.mul_(1e-3)
        model.embedding.weight[0, 0] = 100.0
    exported(model, tmp_path / "good.gguf", bits)
    true = gguf_write._raw

    def spoilt(tensor: Tensor, format: Format) -> memoryview:
        if len(tensor) == VOCAB:
            tensor = tensor.clone()
            tensor[1:] *= 1 + off
        return true(tensor, format)

    monkeypatch.setattr(gguf_write, "_raw", spoilt)
    with pytest.raises(Mismatch, match=r"(token_embd|output)\.weight is off by"):
        exported(model, tmp_path / "bad.gguf", bits)
    assert [path.name for path in tmp_path.iterdir()] == ["good.gguf"]


def test_weights_too_large_for_float16_are_not_written_as_such(tmp_path: Path) -> None:
    model = alive(PLAIN)
    with torch.no_grad():
        model.embedding.weight[3, 3] = 1e6
    with pytest.raises(TriviumError, match=r"token_embd.weight is off by inf"):
        exported(model, tmp_path / "model.gguf", 16)
    exported(model, tmp_path / "model.gguf", 32)
