from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trivium.checkpoints import format, manifest
from trivium.errors import CheckpointError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A whole checkpoint of about 20 KB in five files."""
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path / "step-00000001"
    format.write(
        folder,
        step=1,
        tensors={
            "model": {"weight": torch.randn(40, 50, generator=generator), "bias": torch.randn(50, generator=generator)},
            "optimizer": {"mean": torch.randn(40, 50, generator=generator).bfloat16()},
        },
        documents={"state": {"losses": [i / 7 for i in range(300)]}, "config": {"width": 50}},
        notes={"score": 1.5},
    )
    return folder


def sealed(fields: Any) -> bytes:
    """A manifest of these fields with a right seal, made without the package."""
    body = json.dumps(fields, indent=2)
    head = (body.removesuffix("\n}") + ",\n").encode()
    return head + b'  "sha256": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    format.write(tmp_path / "c", step=0, tensors={"t": {"x": tensor}}, documents={}, notes={})
    format.verify(tmp_path / "c")
    loaded = format.tensors(tmp_path / "c", "t")["x"]
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert bytes(raw.tolist()) == bits(loaded)


def test_tied_strided_and_trained_tensors_are_saved_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    group = {
        "embedding": base,
        "output": base,
        "turned": base.T,
        "column": base[:, 1],
        "spread": torch.ones(1).expand(5),
        "trained": torch.nn.Parameter(base.clone()),
        "counter": torch.tensor(2**62 + 1),
    }
    format.write(tmp_path / "c", step=0, tensors={"t": group}, documents={}, notes={})
    loaded = format.tensors(tmp_path / "c", "t")
    assert loaded.keys() == group.keys()
    assert all(torch.equal(loaded[name], group[name]) for name in group)
    assert not loaded["trained"].requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_come_back_on_the_cpu(tmp_path: Path) -> None:
    tensor = torch.randn(7, 3, device="cuda").T
    format.write(tmp_path / "c", step=0, tensors={"t": {"x": tensor}}, documents={}, notes={})
    loaded = format.tensors(tmp_path / "c", "t")["x"]
    assert loaded.device.type == "cpu"
    assert torch.equal(loaded, tensor.cpu())


@settings(max_examples=40, deadline=None)
@given(step=st.integers(0, 10**12), notes=TABLES, content=TABLES)
def test_documents_notes_and_step_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, step: int, notes: dict[str, Any], content: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("round") / "c"
    written = format.write(folder, step=step, tensors={}, documents={"state": content}, notes=notes)
    assert format.verify(folder) == written
    assert (written.step, written.notes) == (step, notes)
    assert format.document(folder, "state") == content
    assert json.loads((folder / "state.json").read_text()) == content


def test_the_manifest_agrees_with_hashlib(small: Path) -> None:
    fields = json.loads((small / "manifest.json").read_bytes())
    on_disk = {path.name: path.read_bytes() for path in small.iterdir() if path.name != "manifest.json"}
    assert fields["files"] == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in on_disk.items()
    }
    unsealed = {name: value for name, value in fields.items() if name != "sha256"}
    assert (small / "manifest.json").read_bytes() == sealed(unsealed)


def test_every_flipped_byte_is_found(small: Path, count: Callable[[int, int], int]) -> None:
    dice = random.Random(5)
    paths = sorted(small.iterdir())
    assert len(paths) == 5
    for turn in range(count(300, 10_000)):
        path = paths[turn % len(paths)]
        data = path.read_bytes()
        place = dice.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ dice.randrange(1, 256)]) + data[place + 1 :])
        with pytest.raises(CheckpointError) as caught:
            format.verify(small)
        assert str(path) in str(caught.value)
        path.write_bytes(data)
    format.verify(small)


def test_every_truncation_is_found(small: Path, count: Callable[[int, int], int]) -> None:
    dice = random.Random(6)
    paths = sorted(small.iterdir())
    for turn in range(count(60, 1_000)):
        path = paths[turn % len(paths)]
        data = path.read_bytes()
        path.write_bytes(data[: dice.randrange(len(data))])
        with pytest.raises(CheckpointError) as caught:
            format.verify(small)
        assert str(path) in str(caught.value)
        path.write_bytes(data)
    format.verify(small)


def test_a_missing_or_an_extra_file_is_named(small: Path) -> None:
    for path in sorted(small.iterdir()):
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name} is damaged: it is missing"):
            format.verify(small)
        path.write_bytes(data)
    (small / "stray.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"stray\.bin does not belong"):
        format.verify(small)


def test_a_newer_format_is_refused_with_the_way_out(small: Path) -> None:
    fields = json.loads((small / "manifest.json").read_bytes())
    del fields["sha256"]
    (small / "manifest.json").write_bytes(sealed(fields | {"format": manifest.FORMAT + 1, "shape": "unknown"}))
    with pytest.raises(manifest.NewerFormat, match="written by a newer trivium"):
        format.verify(small)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", "..", ".hidden", "", "manifest.json"])
def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    folder = tmp_path / "c"
    folder.mkdir()
    entry = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    (folder / "manifest.json").write_bytes(sealed({"format": 1, "step": 0, "files": {name: entry}, "notes": {}}))
    with pytest.raises(CheckpointError, match="not the manifest of a checkpoint"):
        format.verify(folder)


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "format": JSON | st.just(1),
        "step": JSON | st.just(1),
        "files": JSON | st.dictionaries(st.sampled_from(["a.json", "b"]), JSON, max_size=2),
        "notes": JSON | TABLES,
    },
)


@settings(max_examples=150, deadline=None)
@given(fields=FIELDS)
def test_a_strangers_sealed_manifest_is_sound_or_a_clean_error(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "manifest.json").write_bytes(sealed(fields))
    plain = type(fields.get("format")) is int and type(fields.get("step")) is int
    empty = fields.get("files") == {} and isinstance(fields.get("notes"), dict)
    if plain and empty and fields["format"] == 1 and fields["step"] >= 0:
        assert format.verify(folder).notes == fields["notes"]
    else:
        with pytest.raises(CheckpointError, match=r"manifest\.json|a\.json|/b is"):
            format.verify(folder)


@settings(max_examples=50, deadline=None)
@given(raw=st.binary(max_size=200))
def test_random_bytes_are_never_a_manifest(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    folder = tmp_path_factory.mktemp("noise")
    (folder / "manifest.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        format.verify(folder)


def test_a_manifest_nested_without_end_is_a_clean_error(tmp_path: Path) -> None:
    head = b'{"notes": ' + b"[" * 200_000 + b",\n"
    tail = b'  "sha256": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'
    (tmp_path / "manifest.json").write_bytes(head + tail)
    with pytest.raises(CheckpointError, match="not the manifest"):
        format.verify(tmp_path)


def test_files_that_are_not_what_their_name_says_are_clean_errors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "list.json").write_bytes(b"[]")
    (tmp_path / "state.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        format.tensors(tmp_path, "model")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is damaged: it is missing"):
        format.tensors(tmp_path, "optimizer")
    for stem in ("list", "state", "absent"):
        with pytest.raises(CheckpointError, match=rf"{stem}\.json is damaged"):
            format.document(tmp_path, stem)


def test_an_existing_checkpoint_is_never_written_over(small: Path) -> None:
    before = format.verify(small)
    with pytest.raises(CheckpointError, match="already exists"):
        format.write(small, step=2, tensors={}, documents={}, notes={})
    assert format.verify(small) == before


def test_what_is_not_json_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        format.write(tmp_path / "c", step=0, tensors={}, documents={"state": {"x": object()}}, notes={})
    with pytest.raises(TypeError):
        format.write(tmp_path / "c", step=0, tensors={}, documents={}, notes={"x": object()})
    assert os.listdir(tmp_path) == []


def test_a_full_disk_under_the_tensors_is_an_oserror_and_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # the kernel's own refusal, without a full disk
    try:
        with pytest.raises(OSError, match=r"model\.safetensors") as caught:
            format.write(tmp_path / "c", step=0, tensors={"model": {"x": torch.zeros(100_000)}}, documents={}, notes={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []


def test_the_files_have_the_permissions_of_any_new_file(small: Path) -> None:
    plain = small.parent / "plain"
    plain.write_bytes(b"")
    expected = stat.S_IMODE(plain.stat().st_mode)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in small.iterdir()} == {
        path.name: expected for path in small.iterdir()
    }


def test_everything_is_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(descriptor: int) -> None:
        events.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def recording_rename(source: Path, target: Path) -> None:
        events.append(("name", os.stat(source).st_ino))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    folder = tmp_path / "c"
    format.write(folder, step=0, tensors={"t": {"x": torch.ones(3)}}, documents={"d": {}}, notes={})
    inside = {("sync", path.stat().st_ino) for path in folder.iterdir()}
    itself = folder.stat().st_ino
    assert set(events[:3]) == inside
    assert events[3:] == [("sync", itself), ("name", itself), ("sync", tmp_path.stat().st_ino)]


def headed(header: Any, size: int, extra: int = 0) -> bytes:
    """A safetensors file with this header, written by hand, followed by this many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) + extra).to_bytes(8, "little") + text + bytes(size)


PLACES = st.tuples(st.integers(-1, 12), st.integers(-1, 24)).map(list)
SIZES = st.lists(st.integers(-1, 4) | st.sampled_from([True, 1.0, None, 2**64]), max_size=3)
ENTRIES = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "C64", "F12", 3]), "shape": SIZES, "data_offsets": PLACES}
)
SOUND = {
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    "a": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [0, 4]},
}


@given(
    change=st.none() | st.tuples(st.sampled_from(["a", "b", "c"]), JSON | ENTRIES),
    field=st.none() | st.tuples(st.sampled_from(["dtype", "shape", "data_offsets"]), JSON | SIZES | PLACES),
    size=st.sampled_from([12, 12, 12, 11, 13, 0]),
    extra=st.sampled_from([0, 0, 0, 1, -1, 1000, 2**40]),
)
@settings(max_examples=300, deadline=None)
def test_a_header_is_read_where_the_library_reads_it_and_refused_where_it_refuses(
    tmp_path_factory: pytest.TempPathFactory, change: Any, field: Any, size: int, extra: int
) -> None:
    table: dict[str, Any] = {name: dict(entry) for name, entry in SOUND.items()}
    if field is not None:
        table["a"][field[0]] = field[1]
    if change is not None:
        table[change[0]] = change[1]
    path = tmp_path_factory.mktemp("headers") / "t.safetensors"
    path.write_bytes(headed(table, size, extra))
    try:
        with safe_open(path, framework="np") as file:
            wanted = {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
    except SafetensorError:
        with pytest.raises(SafetensorError):
            format.header(path)
    else:
        assert {name: entry.shape for name, entry in format.header(path).items()} == wanted


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff{}", b"[" * 100_000, b'{"\\ud800": 3}', '{"a": 1}'.encode("utf-16")]
)
def test_a_header_that_is_no_table_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(headed(text, 0))
    with pytest.raises(SafetensorError, match=r"^the header is not a table of tensors$"):
        format.header(path)


def test_the_entries_of_a_header_lie_where_the_library_puts_them(tmp_path: Path) -> None:
    tensors = {str(at): torch.arange(at + 2).to(kind) for at, kind in enumerate(DTYPES)}
    save_file(tensors, tmp_path / "t.safetensors")
    content = (tmp_path / "t.safetensors").read_bytes()
    found = format.header(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    for name, entry in found.items():
        assert content[entry.start : entry.start + entry.size] == bits(tensors[name])


def test_a_file_that_cannot_be_mapped_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "t.safetensors")

    def refuse(path: Path) -> dict[str, Tensor]:
        raise RuntimeError(f"unable to mmap 88 bytes from file <{path}>: Cannot allocate memory (12)")

    monkeypatch.setattr(format, "load_file", refuse)
    with pytest.raises(CheckpointError, match=r"t\.safetensors is larger than the memory that is free"):
        format.read_tensors(tmp_path / "t.safetensors")
