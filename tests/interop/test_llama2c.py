"""llama2.c files: the story that stories260K tells, `transformers` on the same weights, and damaged ones."""

# B batch, T tokens

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tests.interop.gguf_models import alive, permuted, quiet
from tests.interop.mutation import mutated, refusal
from tests.oracle.copying import ids, logits, near
from trivium.errors import CheckpointError, DataError
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.interop.foreign import Foreign
from trivium.interop.llama2c import open_llama2c

STORIES = Path(__file__).parents[1] / "assets" / "stories260K"
# From the notes that come with the file: another program's greedy story.
STORY = [1, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338, 401, 396, 267]
TOLD = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)


def opened(path: Path) -> Foreign:
    return open_llama2c(path, say=quiet, tick=quiet)


@pytest.fixture(scope="module")
def stories() -> Foreign:
    return opened(STORIES / "stories260K.bin")


def test_stories260k_tells_its_story_id_for_id(stories: Foreign) -> None:
    request = Request(ids=(1,), tokens=60, sampling=Sampling(temperature=0), seed=0)
    told = [1, *(token.id for token in stream(stories.module, [request], end=1))]
    assert told[: len(STORY)] == STORY
    assert stories.tokenizer is not None
    assert stories.tokenizer.decode(told, skip_specials=True).startswith(TOLD)


def slow_ids(text: str) -> list[int]:
    """llama2.c's way: a space in front, then every two neighbours that make the best known piece are joined."""
    raw = (STORIES / "tok512.bin").read_bytes()
    at, pieces, scores = 4, list[bytes](), list[float]()
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        pieces.append(raw[at + 8 : at + 8 + length])
        scores.append(score)
        at += 8 + length
    known = {piece: id for id, piece in enumerate(pieces)}
    found = []
    for character in " " + text if text else "":
        one = character.encode()
        found += [known[one]] if one in known else [byte + 3 for byte in one]
    while True:
        joined = [known.get(pieces[left] + pieces[right], -1) for left, right in pairwise(found)]
        best = max((id for id in joined if id >= 0), key=lambda id: scores[id], default=-1)
        if best < 0:
            return found
        place = joined.index(best)
        found[place : place + 2] = [best]


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("Once upon a tim,.'\n ébß🙂ther was"), max_size=30))
def test_its_tokenizer_cuts_texts_as_llama2c_does(text: str) -> None:
    tokenizer = opened(STORIES / "stories260K.bin").tokenizer
    assert tokenizer is not None
    assert tokenizer.encode(text) == slow_ids(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_marks_of_a_story_come_only_from_code(stories: Foreign) -> None:
    tokenizer = stories.tokenizer
    assert tokenizer is not None
    assert (tokenizer.size, tokenizer.begin, tokenizer.end) == (512, 1, 1)
    assert tokenizer.frame.before == (1,)
    assert not {0, 1, 2} & set(tokenizer.encode("<s> </s> <unk>"))


def model(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 30,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return alive(LlamaForCausalLM(LlamaConfig(**(sizes | changes))))


def written(theirs: Any, version: int) -> bytes:
    """A file as llama2.c's export.py writes it."""
    config, state = theirs.config, {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}

    def layers(name: str, heads: int = 0) -> list[Any]:
        each = [state[f"model.layers.{layer}.{name}.weight"] for layer in range(config.num_hidden_layers)]
        return [permuted(one, heads) for one in each] if heads else each

    heads, groups = config.num_attention_heads, config.num_key_value_heads
    attention = [*layers("self_attn.q_proj", heads), *layers("self_attn.k_proj", groups)]
    attention += [*layers("self_attn.v_proj"), *layers("self_attn.o_proj")]
    feed = [*layers("mlp.gate_proj"), *layers("mlp.down_proj"), *layers("mlp.up_proj")]
    first, last = layers("input_layernorm"), layers("post_attention_layernorm")
    embedding, final = state["model.embed_tokens.weight"], state["model.norm.weight"]
    output = [] if config.tie_word_embeddings else [state["lm_head.weight"]]
    sign = 1 if version or config.tie_word_embeddings else -1
    sizes = (
        config.hidden_size, config.intermediate_size, config.num_hidden_layers, heads, groups,
        sign * config.vocab_size, config.max_position_embeddings,
    )  # fmt: skip
    head = struct.pack("<7i", *sizes)
    if version:
        head = (struct.pack("<Ii", 0x616B3432, version) + head + bytes([config.tie_word_embeddings])).ljust(256, b"\0")
        order = [*first, *last, final, embedding, *attention, *feed, *output]
    else:
        table = np.full(config.max_position_embeddings * config.hidden_size // heads, 7.0, np.float32)
        order = [embedding, *first, *attention, *last, *feed, final, table, *output]
    return head + b"".join(np.ascontiguousarray(one, np.float32).tobytes() for one in order)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_both_versions_equal_transformers_on_the_same_weights(version: int, tied: bool, tmp_path: Path) -> None:
    theirs = model(tie_word_embeddings=tied)
    (tmp_path / "model.bin").write_bytes(written(theirs, version))
    found = opened(tmp_path / "model.bin")
    tokens_BT = ids(2, 16, 0, 30)
    with torch.no_grad():
        other = theirs(tokens_BT).logits
    near(logits(found.module, tokens_BT), other)
    assert found.module.config.tied == tied
    assert found.tokenizer is None


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    path, whole = tmp_path / "model.bin", written(model(), 1)
    for raw, reason in (
        (written(model(), 2), r"version 2 \(int8\)"),
        (b"PK\x03\x04" + whole, "pickle, which can run code; name a folder with safetensors"),
        (b"\x80\x02" + whole, "pickle"),
        (whole[:-4], "its header asks for"),
        (whole + bytes(4), "its header asks for"),
        (struct.pack("<7i", 24, 20, 3, 5, 2, 30, 16) + whole, "its sizes are"),
        (struct.pack("<7i", 24, 20, 3, 4, 0, 30, 16) + whole, "its sizes are"),
        (b"short", "too short"),
    ):
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match=reason):
            opened(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        opened(tmp_path / "missing.bin")


def test_mutated_files_give_clean_errors(tmp_path: Path, count: Callable[[int, int], int]) -> None:
    seed = random.randrange(2**32) if count(0, 1) else 0
    draw, refused = random.Random(seed), 0
    weights, pieces = (STORIES / "stories260K.bin").read_bytes(), (STORIES / "tok512.bin").read_bytes()
    small = written(model(), 1)
    for round in range(count(200, 10_000)):
        print(f"seed {seed}, round {round}")
        path = tmp_path / "model.bin"
        if draw.random() < 0.5:
            path.write_bytes(mutated(small, draw, front=64))
        else:
            path.write_bytes(weights)
            (tmp_path / "tok512.bin").write_bytes(mutated(pieces, draw, front=len(pieces)))
        sentence = refusal(opened, path)
        assert not sentence or str(tmp_path) in sentence
        assert "\n" not in sentence
        refused += bool(sentence)
    assert refused > count(200, 10_000) // 4


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    shutil.copy(STORIES / "stories260K.bin", tmp_path / "model.bin")
    (tmp_path / "tokenizer.bin").write_bytes((STORIES / "tok512.bin").read_bytes()[:3000])
    with pytest.raises(DataError, match="not the tokenizer of 512 pieces"):
        opened(tmp_path / "model.bin")
