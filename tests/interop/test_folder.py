"""Folders of strangers: what is read, and that nothing else ever happens."""

# B batch, T tokens

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig, LlamaForCausalLM

from tests.oracle.copying import enliven, ids, logits, near
from trivium.errors import CheckpointError
from trivium.interop.fields import Fields
from trivium.interop.folder import open_folder, open_model
from trivium.interop.load import open_foreign
from trivium.models.transformer import Transformer

VOCAB = 61
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": 24, "n_embd": 12, "n_layer": 2, "n_head": 3}
TOKENS_BT = ids(2, 20, 0, VOCAB)


def opened(folder: Path) -> Transformer:
    return open_model(folder, tick=lambda what, done, whole: None)[0]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gpt2")
    model = GPT2LMHeadModel(GPT2Config(**SIZES))
    enliven(model.eval(), seed=0)
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def folder(gpt2: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(gpt2[0], tmp_path / "model"))


def expected(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(TOKENS_BT).logits
    return result


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_shards_with_an_index_are_one_model(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    gpt2[1].save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    near(logits(opened(tmp_path), TOKENS_BT), expected(gpt2[1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32_without_loss(gpt2: tuple[Path, Any], folder: Path, dtype: torch.dtype) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors")
    theirs = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    near(logits(opened(folder), TOKENS_BT), expected(theirs))


def test_a_model_saved_without_its_head_is_whole_where_the_head_is_tied(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    bare: GPT2Model = gpt2[1].transformer
    bare.save_pretrained(tmp_path)
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")  # no prefix
    near(logits(opened(tmp_path), TOKENS_BT), expected(gpt2[1]))


def test_names_of_old_files_are_read(gpt2: tuple[Path, Any], folder: Path) -> None:
    """As the hub's gpt2: no prefix, the masks stored, the tied output stored too."""
    stored = {name.removeprefix("transformer."): one for name, one in load_file(folder / "model.safetensors").items()}
    stored |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.uint8) for layer in range(2)}
    stored["lm_head.weight"] = stored["wte.weight"].clone()
    save_file(stored, folder / "model.safetensors")
    near(logits(opened(folder), TOKENS_BT), expected(gpt2[1]))


def test_a_copy_that_is_no_copy_is_refused(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "lm_head.weight": stored["transformer.wte.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and transformer\.wte\.weight differ"):
        opened(folder)
    configure(folder, tie_word_embeddings=False)
    assert "output.project.weight" in dict(opened(folder).named_parameters())


def test_old_spellings_of_rotary_settings_mean_the_same(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=48,
        rope_parameters={**rope, "original_max_position_embeddings": 16},
    )
    theirs = LlamaForCausalLM(config).eval()
    enliven(theirs, seed=1)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    table = json.loads(path.read_text())
    del table["rope_parameters"]
    old = {"type": rope.pop("rope_type"), **rope, "original_max_position_embeddings": 16}
    theta = old.pop("rope_theta")
    path.write_text(json.dumps({**table, "rope_theta": theta, "rope_scaling": old}))
    near(logits(opened(tmp_path), TOKENS_BT), expected(theirs))


def test_what_was_not_read_is_reported(folder: Path) -> None:
    configure(folder, favourite_colour="blue")
    said: list[str] = []
    found = open_folder(folder, say=said.append, tick=lambda what, done, whole: None)
    assert found.notes["ignored"] == ["favourite_colour"]
    assert "favourite_colour" in said[0]


def test_progress_ends_at_the_whole(folder: Path) -> None:
    ticks: list[tuple[int, int]] = []
    open_model(folder, tick=lambda what, done, whole: ticks.append((done, whole)))
    assert [done for done, _ in ticks] == sorted(done for done, _ in ticks)
    assert (
        ticks[-1][0] == ticks[-1][1] == 4 * sum(one.numel() for one in load_file(folder / "model.safetensors").values())
    )


def test_training_a_model_leaves_its_file_alone(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    module = opened(folder)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"activation_function": "quick_gelu"}, "activation_function is 'quick_gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "gpt3"}, "gpt3"),
        ({"model_type": ["gpt2"]}, "no model_type"),
        ({"n_embd": 13}, "width 13 is not divisible by 3"),
        ({"n_embd": "12"}, "n_embd is '12'"),
        ({"n_embd": 10**400}, "n_embd is 1000"),
        ({"n_layer": True}, "n_layer is True"),
        ({"n_layer": 9999}, "9999 layers"),
        ({"n_layer": 1}, "nobody reads the tensor transformer.h.1"),
        ({"n_layer": 3}, r"transformer\.h\.2\.\S+ is missing"),
        ({"vocab_size": 60}, r"transformer.wte.weight has shape \[61, 12\], not \[60, 12\]"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon is nan"),
        ({"layer_norm_epsilon": 0}, "eps"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight is missing"),
    ],
)
def test_a_setting_that_we_do_not_have_is_refused_by_name(folder: Path, change: dict[str, Any], named: str) -> None:
    configure(folder, **change)
    with pytest.raises(CheckpointError, match=named) as error:
        opened(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_shapes_are_refused_before_memory_is_taken(folder: Path) -> None:
    """A model of 240 GB in a file of 20 kB."""
    configure(folder, n_embd=30_000, n_head=3, vocab_size=1_000_000)
    with pytest.raises(CheckpointError, match="has shape"):
        opened(folder)


def test_numbers_that_are_not_floats_are_refused(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["transformer.wte.weight"] = stored["transformer.wte.weight"].to(torch.int8)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"transformer\.wte\.weight is stored as I8"):
        opened(folder)


class Canary:
    """Unpickling this makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_a_pickle_is_refused_and_never_run(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Canary(tmp_path / "sung")}, folder / name)
    with pytest.raises(CheckpointError, match=r"pickle that could run any code; fetch model\.safetensors"):
        opened(folder)
    assert not (tmp_path / "sung").exists()


def index(folder: Path, places: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("name", ["/etc/passwd", "../other.safetensors", "a/b.safetensors", ".hidden.safetensors", ""])
def test_an_index_cannot_name_a_file_elsewhere(folder: Path, name: str) -> None:
    os.rename(folder / "model.safetensors", folder.parent / "other.safetensors")
    index(folder, dict.fromkeys(load_file(folder.parent / "other.safetensors"), name))
    with pytest.raises(CheckpointError, match="not one beside it"):
        opened(folder)


def test_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    os.rename(folder / "model.safetensors", folder.parent / "other.safetensors")
    (folder / "part.safetensors").symlink_to(folder.parent / "other.safetensors")
    index(folder, dict.fromkeys(load_file(folder.parent / "other.safetensors"), "part.safetensors"))
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        opened(folder)


def test_the_cache_of_the_hub_opens_although_it_is_made_of_links(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in gpt2[0].iterdir():
        shutil.copy(path, blobs / path.name)
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / path.name)
    near(logits(opened(snapshot), TOKENS_BT), expected(gpt2[1]))


@pytest.mark.parametrize("places", [None, [], {"transformer.wte.weight": 3}, {"ghost": "part.safetensors"}])
def test_an_index_that_does_not_fit_is_refused(folder: Path, places: Any) -> None:
    os.rename(folder / "model.safetensors", folder / "part.safetensors")
    index(folder, places)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        opened(folder)


def test_a_folder_without_weights_says_what_to_fetch(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors; fetch"):
        opened(folder)


@pytest.mark.parametrize("name", ["empty", "model.onnx", "model.safetensors", "missing"])
def test_what_is_no_model_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    elif name != "missing":
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=str(path)):
        open_foreign(path, say=lambda text: None, tick=lambda what, done, whole: None)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, cut or doubled, mostly near the beginning where structure is."""
    result = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = min(int(draw.expovariate(1 / 400)), len(result) - 1)
        kind = draw.randrange(4)
        if kind == 0:
            result[at] = draw.randrange(256)
        elif kind == 1:
            result[at] = ord(draw.choice('0123456789-.,:[]{}"eE '))
        elif kind == 2:
            del result[at : at + draw.randint(1, 9)]
        else:
            result[at:at] = result[max(0, at - draw.randint(1, 30)) : at]
    return bytes(result[: draw.randrange(1, len(result))] if draw.random() < 0.1 else result)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_mutated_files_give_clean_errors_only(folder: Path, name: str, count: Callable[[int, int], int]) -> None:
    draw, refused = random.Random(0), list[str]()
    whole = (folder / name).read_bytes()
    for _ in range(count(150, 10_000)):
        (folder / name).write_bytes(mutated(whole, draw))
        try:
            opened(folder)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > count(50, 3000)
    assert not [sentence for sentence in refused if "\n" in sentence]


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(st.text(max_size=4), PLAIN, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4))
def test_any_table_gives_a_value_or_a_clean_error(table: dict[str, Any]) -> None:
    fields, refused = Fields({"a": 1, **table}, "file"), list[str]()
    for name in [*table, "absent"]:
        for ask in (
            lambda name: fields.integer(name, 3),
            lambda name: fields.number(name, 3.0),
            lambda name: fields.flag(name, True),
            lambda name: fields.choice(name, "x", {"x": 1}),
            fields.words,
            fields.table,
            fields.only,
        ):
            try:
                ask(name)
            except CheckpointError as error:
                refused.append(str(error))
    assert all(len(sentence) < 200 for sentence in refused)
    assert fields.ignored == (("a",) if "a" not in table else ())
