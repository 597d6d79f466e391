"""GGUF files of the `gguf` package, opened here, against the models of `transformers` that they hold."""

# B batch, T tokens

from __future__ import annotations

import math
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.interop.gguf_models import alive, gguf, quantised, quiet, write, written_text
from tests.interop.mutation import mutated, refusal
from tests.oracle.copying import ids, logits, near
from trivium.errors import CheckpointError
from trivium.interop.architectures.architecture import first_block
from trivium.interop.foreign import Foreign
from trivium.interop.gguf import open_gguf
from trivium.interop.gguf_file import GgufFile
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.options.scaling import Llama3

VOCAB = 61


def opened(path: Path) -> Foreign:
    return open_gguf(path, say=quiet, tick=quiet)


def sizes(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    } | changes


def small(seed: int = 0, **changes: Any) -> Any:
    return alive(LlamaForCausalLM(LlamaConfig(**sizes(**changes))), seed)


def same_logits(theirs: Any, path: Path, seed: int = 0) -> None:
    ours = opened(path).module
    tokens_BT = ids(2, ours.config.context, seed, ours.config.vocab)
    with torch.no_grad():
        other = theirs(tokens_BT).logits
    near(logits(ours, tokens_BT), other)


def test_logits_of_random_llamas_equal_those_of_transformers(tmp_path: Path, count: Callable[[int, int], int]) -> None:
    seed = random.randrange(2**32) if count(0, 1) else 0
    draw = random.Random(seed)
    for round in range(count(3, 25)):
        groups = draw.randint(1, 3)
        heads = groups * draw.randint(1, 3)
        changes = {
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": 2 * draw.randint(1, 9),
            "hidden_size": heads * draw.randint(2, 9),
            "intermediate_size": draw.randint(5, 70),
            "num_hidden_layers": draw.randint(1, 3),
            "tie_word_embeddings": draw.random() < 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([500.0, 1e4, 1e6])},
            "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        }
        print(f"seed {seed}, round {round}: {changes}")
        theirs = small(round, **changes)
        write(tmp_path / "model.gguf", theirs)
        same_logits(theirs, tmp_path / "model.gguf", round)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_quantised_model_computes_what_its_numbers_say(kind: str, tmp_path: Path) -> None:
    theirs = small(hidden_size=64, intermediate_size=96, head_dim=16)
    write(tmp_path / "model.gguf", theirs, kind=kind)
    before = theirs(ids(1, 8, 0, VOCAB)).logits
    quantised(theirs, kind)
    assert not torch.equal(theirs(ids(1, 8, 0, VOCAB)).logits, before)
    same_logits(theirs, tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_of_256_reach_the_rows_they_belong_to(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivium.interop.gguf_file._CHUNK", 3 * 256)  # the last piece is shorter than the others
    number = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[number][1]
    raw = np.random.default_rng(0).integers(0, 60, (VOCAB, size), dtype=np.uint8)  # so that no scale is infinite
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "model.gguf") as file:
        found = np.empty((VOCAB, 256), np.float32)
        file.read("token_embd.weight", found)
    assert np.array_equal(found, gguf.quants.dequantize(raw, number))


@pytest.mark.parametrize("tied", [True, False])
def test_biases_of_qwen2_and_normed_queries_of_qwen3_are_read(tied: bool, tmp_path: Path) -> None:
    second = alive(Qwen2ForCausalLM(Qwen2Config(**sizes(tie_word_embeddings=tied))), 1)
    write(tmp_path / "second.gguf", second, "qwen2")
    same_logits(second, tmp_path / "second.gguf")
    third = alive(Qwen3ForCausalLM(Qwen3Config(**sizes(tie_word_embeddings=tied, head_dim=12, rms_norm_eps=1e-6))), 2)
    write(tmp_path / "third.gguf", third, "qwen3")
    same_logits(third, tmp_path / "third.gguf")


def test_biases_of_a_llama_are_read_too(tmp_path: Path) -> None:
    theirs = small(attention_bias=True)
    write(tmp_path / "model.gguf", theirs)
    same_logits(theirs, tmp_path / "model.gguf")


def test_scaled_frequencies_equal_those_of_transformers(tmp_path: Path) -> None:
    path, base = tmp_path / "model.gguf", {"rope_theta": 500.0}
    theirs = small(rope_parameters=base | {"rope_type": "linear", "factor": 4.0})
    write(path, theirs, change={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    same_logits(theirs, path)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    theirs = small(rope_parameters=base | yarn)
    change = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16,
    }
    write(path, theirs, change=change)
    same_logits(theirs, path)


def test_the_frequencies_of_llama_3_are_recognised_from_their_divisors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs = small(head_dim=32, rope_parameters=rope | {"original_max_position_embeddings": 8192})
    plain = 5e5 ** -(np.arange(0, 32, 2) / 32)
    divisors = plain / theirs.model.rotary_emb.inv_freq.numpy()
    assert divisors.max() > 31
    write(path, theirs, extra={"rope_freqs.weight": divisors.astype(np.float32)})
    ours = opened(path).module
    assert first_block(ours.config.decoder).position == RotaryOptions(theta=5e5, scaling=Llama3(factor=32.0))
    same_logits(theirs, path)
    write(path, theirs, extra={"rope_freqs.weight": np.linspace(1, 5, 16).astype(np.float32)})
    with pytest.raises(CheckpointError, match="is not the scaling of LLaMA 3"):
        opened(path)


def test_every_type_of_value_is_read_as_it_was_written(tmp_path: Path) -> None:
    values = {
        "uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 4_000_000_000, "int32": -5,
        "float32": 0.5, "bool": True, "string": "Grüße", "uint64": 2**63, "int64": -(2**62), "float64": math.pi,
    }  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "any")
    for name, value in values.items():
        getattr(writer, f"add_{name}")(f"a.{name}", value)
    arrays = {"texts": ["a", "", "ß"], "numbers": [1, -2, 3], "fractions": [0.5, 0.25], "flags": [True, False]}
    for name, array in arrays.items():
        writer.add_array(f"b.{name}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "model.gguf") as file:
        assert {name: file.settings[f"a.{name}"] for name in values} == values
        assert {name: list(file.settings[f"b.{name}"]) for name in arrays} == arrays


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("experts", {"llama.expert_count": 8}, "expert_count is 8"),
    ("window", {"llama.attention.sliding_window": 16}, "sliding_window is 16"),
    ("partial rotation", {"llama.rope.dimension_count": 4}, "rope.dimension_count is 4"),
    ("scaling", {"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
    ("a value as text", {"llama.block_count": "two"}, "block_count is 'two'"),
    ("no layers", {"llama.block_count": 0}, "block_count is 0"),
    ("more layers than tensors", {"llama.block_count": 9999}, "other tensors than it holds"),
    ("fewer layers", {"llama.block_count": 1}, "nobody reads the tensor blk.1"),
    ("another width", {"llama.embedding_length": 64}, "token_embd.weight has shape"),
    ("other heads", {"llama.attention.head_count": 8}, "other tensors than it holds"),
    ("other groups", {"llama.attention.head_count_kv": 4}, "attn_k.weight has shape"),
    ("other hidden", {"llama.feed_forward_length": 50}, "has shape"),
    ("heads that do not group", {"llama.attention.head_count_kv": 3}, "cannot share 3 groups"),
    ("groups by layer", {"llama.attention.head_count_kv": [2, 2]}, "head_count_kv is array"),
    ("a negative base", {"llama.rope.freq_base": -1.0}, "rope.freq_base is -1.0"),
    ("a base without end", {"llama.rope.freq_base": math.inf}, "rope.freq_base is inf"),
]


@pytest.mark.parametrize(("change", "reason"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_settings_that_change_the_model_are_refused_by_name(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write(tmp_path / "model.gguf", small(), change=change)
    with pytest.raises(CheckpointError, match=reason) as caught:
        opened(tmp_path / "model.gguf")
    assert str(tmp_path / "model.gguf") in str(caught.value)


def test_a_missing_an_extra_and_an_unread_tensor_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for name in ("blk.1.ffn_up.weight", "token_embd.weight", "output_norm.weight"):
        write(path, small(), leave=name)
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            opened(path)
    write(path, small(), extra={"blk.0.ffn_gate_inp.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match=r"nobody reads the tensor blk.0.ffn_gate_inp.weight"):
        opened(path)
    write(path, small(hidden_size=64, intermediate_size=64), kind="Q5_0")
    with pytest.raises(CheckpointError, match=r"as Q5_0; trivium reads F32, F16"):
        opened(path)


def test_another_architecture_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, small(), "mamba")
    with pytest.raises(CheckpointError, match="'mamba'; trivium reads llama, qwen2, qwen3"):
        opened(path)
    write(path, small())
    raw = path.read_bytes()
    for changed, reason in (
        (b"GGML" + raw[4:], "does not begin with GGUF"),
        (raw[:4] + struct.pack("<I", 1) + raw[8:], "version 1"),
        (raw[:4] + struct.pack(">I", 3) + raw[8:], "byte order"),
        (raw[:8] + struct.pack("<Q", 2**60) + raw[16:], "entries do not fit"),
        (raw[:-1], "is cut off"),
        (raw[:20], "too short"),
        (b"", "too short"),
    ):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=reason):
            opened(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        opened(tmp_path / "missing.gguf")


def record(*values: bytes, tensors: int = 0) -> bytes:
    """A file with these settings, each already spelled."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(values)) + b"".join(values)


def spelled(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def test_what_a_sound_file_never_has_is_refused(tmp_path: Path) -> None:
    path, flag = tmp_path / "model.gguf", spelled("a") + struct.pack("<IB", 0, 1)
    tensor = spelled("t") + struct.pack("<IQIQ", 1, 8, 0, 0)
    for raw, reason in (
        (record(flag, flag), "sets 'a' twice"),
        (record(spelled("a") + struct.pack("<IIQ", 9, 9, 0) + bytes(8)), "array of arrays"),
        (record(spelled("a") + struct.pack("<I", 99) + bytes(8)), "unknown type 99"),
        (record(spelled("a") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(8)), "entries do not fit"),
        (record(spelled("a") + struct.pack("<IIQ", 9, 8, 2**61) + bytes(8)), "entries do not fit"),
        (record(struct.pack("<Q", 2) + b"\xff\xff" + struct.pack("<I", 0) + bytes(8)), "not UTF-8"),
        (record(spelled("general.alignment") + struct.pack("<II", 4, 3) + bytes(8)), "not a power of 2"),
        (record(spelled("general.alignment") + struct.pack("<II", 4, 0) + bytes(8)), "not a power of 2"),
        (record(tensors=2) + tensor + tensor + bytes(64), "holds 't' twice"),
        (record(tensors=2) + tensor + tensor.replace(b"t", b"u", 1) + bytes(96), "overlaps"),
        (record(tensors=1) + spelled("t") + struct.pack("<I5QIQ", 5, 1, 1, 1, 1, 1, 0, 0) + bytes(64), "5 axes"),
        (record(tensors=1) + spelled("t") + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(64), "a shape or a place"),
        (record(tensors=1) + spelled("t") + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(64), "a shape or a place"),
        (record(tensors=1) + spelled("t") + struct.pack("<IQIQ", 1, 8, 0, 5) + bytes(64), "a shape or a place"),
        (record(tensors=1) + spelled("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0) + bytes(64), "is cut off"),
    ):
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match=reason):
            GgufFile(path)


def test_mutated_files_give_clean_errors_in_bounded_memory_and_time(
    tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    seed = random.randrange(2**32) if count(0, 1) else 0
    draw = random.Random(seed)
    path, files = tmp_path / "model.gguf", list[bytes]()
    for kind in ("F32", "Q8_0"):
        theirs = small(vocab_size=300, hidden_size=32, num_hidden_layers=1, intermediate_size=32)
        write(path, theirs, kind=kind, change=written_text(300))
        opened(path)
        files.append(path.read_bytes())
    refused = 0
    tracemalloc.start()
    try:
        for round in range(count(200, 10_000)):
            print(f"seed {seed}, round {round}")
            raw = mutated(draw.choice(files), draw, front=9000)
            path.write_bytes(raw)
            tracemalloc.reset_peak()
            began, before = time.monotonic(), tracemalloc.get_traced_memory()[0]
            sentence = refusal(opened, path)
            assert not sentence or str(path) in sentence
            assert "\n" not in sentence
            refused += bool(sentence)
            assert time.monotonic() - began < 5
            assert tracemalloc.get_traced_memory()[1] - before < 20 * len(raw) + (4 << 20)
    finally:
        tracemalloc.stop()
    assert refused > count(200, 10_000) // 4
