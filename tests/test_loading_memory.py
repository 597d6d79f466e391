"""Loading holds the weights once: a model is laid out while it is empty and filled from its file piece by piece."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import trivium as tv
from tests.generation import tiny
from tests.oracle.copying import enliven
from trivium.checkpoints import bundle, format
from trivium.checkpoints.format import Stored, stored
from trivium.config import dump
from trivium.errors import CheckpointError, RequestError
from trivium.fast.attention import FastAttention
from trivium.fast.choose import for_inference
from trivium.files import sha256
from trivium.interop.gguf_write import export_gguf
from trivium.interop.load import open_foreign
from trivium.interop.quantize import quantize
from trivium.models.presets.llama import Shape, llama
from trivium.models.transformer import Transformer, build, empty, weights
from trivium.parts.linear import Linear

MEASURE = """
import sys, torch
import trivium as tv
from trivium.models.transformer import weights
torch.set_num_threads(1)

def asked(what):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(what)).split()[1])

small, large = sys.argv[1:]
tv.load(small, device="cpu", say=lambda text: None)  # what the libraries themselves take
before = asked("VmRSS")
model = tv.load(large, device="cpu", say=lambda text: None)
tensors = weights(model.module).values()
total = sum(float(tensor.float().sum()) for tensor in tensors)  # touches every page
peak = asked("VmHWM") - before
wrong = [tensor.shape for tensor in tensors if tensor.min() != tensor.max() or not tensor.max()]
print(peak, sum(tensor.nbytes for tensor in tensors), len(wrong))
"""


def halves(module: Transformer) -> Transformer:
    """Every weight 0.5, which every format can say, without the time of drawing them."""
    for tensor in weights(module).values():
        tensor.fill_(0.5)
    return module.eval()


def gpt2(width: int, layers: int) -> GPT2Config:
    sizes = {"vocab_size": 26 * width, "n_positions": 64, "n_embd": width, "n_layer": layers, "n_head": 4}
    return GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)


def hub(path: Path, width: int, layers: int, dtype: torch.dtype = torch.float32) -> None:
    config = gpt2(width, layers)
    with torch.device("meta"):
        names = GPT2LMHeadModel(config).state_dict()
    path.mkdir()
    kept = {name: tensor.shape for name, tensor in names.items() if name != "lm_head.weight"}
    save_file({name: torch.full(shape, 0.5, dtype=dtype) for name, shape in kept.items()}, path / "model.safetensors")
    config.save_pretrained(path)


def half(path: Path, width: int, layers: int) -> None:
    hub(path, width, layers, torch.bfloat16)


def llama_like(width: int, layers: int) -> Transformer:
    return halves(empty(llama(Shape(layers, width, 3 * width, 4, 2, width // 4, 26 * width, 64, tie="all"))))


def own(path: Path, width: int, layers: int) -> None:
    module = llama_like(width, layers)
    bundle.save(path, module.config, weights(module), tiny.BYTES, {})


def own_8(path: Path, width: int, layers: int) -> None:
    module = llama_like(width, 4 * layers)
    quantize(module, 8)
    bundle.save(path, module.config, weights(module), tiny.BYTES, {})


def gguf(path: Path, width: int, layers: int) -> None:
    export_gguf(llama_like(width, layers), None, path, say=lambda text: None)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak of memory")
@pytest.mark.parametrize(
    ("write", "ending"),
    [
        pytest.param(hub, "", id="folder"),
        pytest.param(own, "", id="own"),
        pytest.param(half, "", id="folder in bfloat16", marks=pytest.mark.full),
        pytest.param(own_8, "", id="own in 8 bits", marks=pytest.mark.full),
        pytest.param(gguf, ".gguf", id="gguf", marks=pytest.mark.full),
    ],
)
def test_weights_are_never_held_twice(write: Callable[[Path, int, int], None], ending: str, tmp_path: Path) -> None:
    """The peak of a process that loads 200 MB of weights for use is at most 1.2 times that, though many are turned."""
    small, large = tmp_path / f"small{ending}", tmp_path / f"large{ending}"
    write(small, 64, 1)
    write(large, 768, 5)
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    peak, size, wrong = (int(number) for number in asked.stdout.split()[-3:])
    assert not wrong
    assert size > 180e6
    assert peak < 1.2 * size, f"{peak / size:.3f}"


def model() -> Transformer:
    made = build(llama(Shape(2, 32, 48, 4, 2, 8, tiny.BYTES.size, 64, tie="all")))
    enliven(made, seed=1)
    return made.eval()


@pytest.mark.parametrize("kind", ["folder", "gguf", "own", "own in 8 bits", "llama2.c"])
def test_a_model_is_the_same_laid_out_before_and_after_it_is_filled(kind: str, tmp_path: Path, shared: Path) -> None:
    path = tmp_path / "model.gguf" if kind == "gguf" else tmp_path / "model"
    module = model()
    if kind == "folder":
        GPT2LMHeadModel(gpt2(32, 2)).save_pretrained(path)
    elif kind == "gguf":
        export_gguf(module, None, path, say=lambda text: None)
    elif kind == "llama2.c":
        path = shared / "weights" / "stories260K" / "stories260K.bin"
    else:
        if kind == "own in 8 bits":
            quantize(module, 8)
        bundle.save(path, module.config, weights(module), tiny.BYTES, {})
    before = tv.load(path, device="cpu", say=lambda text: None).module
    after = (
        bundle.open_bundle(path).module
        if path.is_dir() and (path / bundle.CARD).exists()
        else open_foreign(path, say=lambda text: None, tick=lambda what, done, of: None).module
    )
    assert not any(isinstance(part, FastAttention) for part in after.modules())
    for_inference(after)
    mine, theirs = weights(before), weights(after)
    assert {name: tensor.stride() for name, tensor in mine.items()} == {
        name: tensor.stride() for name, tensor in theirs.items()
    }
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    tokens_BT = torch.tensor([tiny.draw(3, 12, 100)])
    with torch.no_grad():
        assert torch.equal(before(tokens_BT).hidden, after(tokens_BT).hidden)
    if kind == "folder":
        assert before.get_parameter("output.project.weight") is before.embedding.weight
    attentions = [part for part in before.modules() if isinstance(part, FastAttention)]
    assert attentions
    assert all((part.fused is None) == (kind == "own in 8 bits") for part in attentions)


def places(model: Transformer) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in weights(model).items()}


def test_laying_out_again_moves_nothing_but_what_was_put_in_its_place() -> None:
    model = tiny.model("gpt-mini", tiny.BYTES)
    for_inference(model)
    before = places(model)
    fused = [part.fused for part in model.modules() if isinstance(part, FastAttention)]
    for_inference(model)
    assert places(model) == before
    parts = [part for part in model.modules() if isinstance(part, FastAttention)]
    assert all(part.fused is old for part, old in zip(parts, fused, strict=True))
    query = parts[0].query
    assert isinstance(query, Linear)
    query.weight.data = query.weight.data + 1
    tokens_BT = torch.tensor([tiny.draw(3, 12, 100)])
    with torch.no_grad():
        wanted = model(tokens_BT).hidden
        for_inference(model)
        assert parts[0].fused is not fused[0]
        assert parts[1].fused is fused[1]
        assert torch.allclose(model(tokens_BT).hidden, wanted, atol=1e-5)


def test_a_model_is_filled_wherever_and_as_whatever_it_lies(tmp_path: Path) -> None:
    """Not only as it was built: here in another dtype, as on a GPU in another memory."""
    module = model()
    bundle.save(tmp_path / "own", module.config, weights(module), tiny.BYTES, {})
    export_gguf(module, None, tmp_path / "model.gguf", say=lambda text: None)
    quiet: dict[str, Any] = {"say": lambda text: None, "tick": lambda what, done, of: None}

    def lay(empty: torch.nn.Module) -> None:
        empty.double()

    for found in (
        bundle.open_bundle(tmp_path / "own", lay=lay).module,
        open_foreign(tmp_path / "model.gguf", lay=lay, **quiet).module,
    ):
        assert all(tensor.dtype == torch.float64 for tensor in weights(found).values())
        assert all(torch.equal(weights(found)[name], tensor.double()) for name, tensor in weights(module).items())


@pytest.mark.parametrize("bits", [0, 8])
def test_progress_of_our_own_folder_ends_at_the_whole(bits: int, tmp_path: Path) -> None:
    module = model()
    if bits:
        quantize(module, bits)
    bundle.save(tmp_path, module.config, weights(module), tiny.BYTES, {})
    ticks: list[tuple[int, int]] = []
    tv.load(tmp_path, device="cpu", tick=lambda what, done, whole: ticks.append((done, whole)))
    assert [done for done, _ in ticks] == sorted(done for done, _ in ticks)
    assert ticks[-1][0] == ticks[-1][1] == sum(tensor.nbytes for tensor in weights(module).values())


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)


@settings(max_examples=60, deadline=None)
@given(shapes=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=4), chunk=st.integers(1, 200))
def test_pieces_make_the_tensors_that_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[tuple[int, ...], torch.dtype]], chunk: int
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "t.safetensors"
    generator = torch.Generator().manual_seed(0)
    drawn = {str(at): (9 * torch.rand(shape, generator=generator)).to(kind) for at, (shape, kind) in enumerate(shapes)}
    save_file(drawn, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format, "_CHUNK", chunk)
        for name, wanted in load_file(path).items():
            entry = stored(path)[name]
            assert torch.equal(entry.read(), wanted)
            assert entry.read().dtype == wanted.dtype
            turned = torch.empty(wanted.shape[::-1], dtype=torch.float64).permute(tuple(range(wanted.ndim))[::-1])
            entry.pour(turned)
            assert torch.equal(turned, wanted.double())


def saved(folder: Path) -> dict[str, Tensor]:
    module = model()
    bundle.save(folder, module.config, weights(module), tiny.BYTES, {})
    return load_file(folder / "model.safetensors")


def sealed(folder: Path, tensors: dict[str, Tensor]) -> None:
    """The tensors with a card that knows them: what a stranger could make."""
    save_file(tensors, folder / "model.safetensors")
    facts = json.loads((folder / "model.json").read_text())
    facts["weights"] = sha256(folder / "model.safetensors")
    (folder / "model.json").write_text(json.dumps(facts))


def test_numbers_of_a_kind_that_we_do_not_have_are_refused(tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    tensors["embedding.weight"] = tensors["embedding.weight"].to(torch.float8_e4m3fn)
    sealed(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*'embedding\.weight' is stored as 'F8_E4M3'"):
        tv.load(tmp_path, device="cpu")


def test_a_file_that_shrinks_while_it_is_read_is_a_clean_error(tmp_path: Path) -> None:
    save_file({"one": torch.ones(5, 4)}, tmp_path / "t.safetensors")
    entry: Stored = stored(tmp_path / "t.safetensors")["one"]
    (tmp_path / "t.safetensors").write_bytes((tmp_path / "t.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"t\.safetensors became shorter"):
        entry.read()


def sparse(path: Path, shapes: dict[str, list[int]], kind: str, size: int) -> None:
    """A whole safetensors file of zeros that takes no room on the disk."""
    table, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + size * math.prod(shape)
        table[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def large_width(vocab: int) -> int:
    """A width at which an embedding in bfloat16 has more bytes than this machine has memory and swap."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    whole = sum(1024 * int(rows[name].split()[0]) for name in ("MemTotal", "SwapTotal"))
    return 64 * (1 + whole // (2 * 64 * vocab))


def too_large(folder: Path, kind: str) -> None:
    """A model of more bytes than this machine has memory, in one tensor or in many."""
    vocab, layers, width = 8_000_000, 1, large_width(8_000_000)
    if kind == "many tensors":
        vocab, layers, width = 1024, 1 + width // 16, 1024  # 400 MB each
    hidden = 64 * 1024 if kind == "many tensors" else 1024
    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=8, tie_word_embeddings=True)
    if kind == "own":
        shape = Shape(layers, width, hidden, 8, 8, width // 8, vocab, 64, tie="all")
        with torch.device("meta"):
            own = Transformer(llama(shape))
        bundle.save(folder, model().config, weights(model()), tiny.BYTES, {})
        sparse(folder / "model.safetensors", {n: list(t.shape) for n, t in weights(own).items()}, "F32", 4)
        card = json.loads((folder / "model.json").read_text())
        (folder / "model.json").write_text(json.dumps(card | {"config": dump(own.config)}))
        return
    with torch.device("meta"):
        names = {n: list(t.shape) for n, t in LlamaForCausalLM(config).state_dict().items() if n != "lm_head.weight"}
    config.save_pretrained(folder)
    sparse(folder / "model.safetensors", names, "BF16", 2)


@pytest.mark.skipif(sys.platform != "linux", reason="fills no disk where files can have holes")
@pytest.mark.parametrize("kind", ["many tensors", "one tensor", "own"])
def test_a_model_larger_than_the_memory_is_not_called_damaged(kind: str, tmp_path: Path) -> None:
    too_large(tmp_path / "large", kind)
    with pytest.raises(RequestError, match=r"large needs (more than )?[\d.,]+ GB for its weights.*GB are free"):
        tv.load(tmp_path / "large", device="cpu", say=lambda text: None)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the size of the memory")
def test_an_allocation_that_the_system_refuses_is_a_sentence() -> None:
    with pytest.raises(RequestError, match=r"^gpt-mini needs more than [\d,.]+ GB for its weights on cpu, and"):
        tv.build("gpt-mini", vocab=8_000_000, width=large_width(8_000_000), memory="try")
