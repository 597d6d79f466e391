"""A process killed while it exports leaves a hidden folder or file; the next export to that name removes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.generation import tiny
from trivium.files import sweep_prepared
from trivium.handle import Model
from trivium.interop import gguf_write, onnx, shards

WRITERS: dict[str, tuple[Any, str]] = {
    "hf": (shards, "write"),
    "gguf": (gguf_write, "_write"),
    "onnx": (onnx, "_write"),
}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", WRITERS)
def test_what_a_killed_export_left_goes_with_the_next(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    model = Model(tiny.model("llama-mini", tiny.BYTES), tiny.BYTES, {})
    out = tmp_path / ("out.gguf" if kind == "gguf" else "out")

    def export(then: Callable[[], Any]) -> None:
        monkeypatch.setattr(*WRITERS[kind], lambda *args, **more: then())
        model.export(kind, out, say=lambda text: None)

    child = os.fork()
    if not child:
        try:
            export(lambda: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [f".tmp-{out.name}-{child}"]

    def there() -> None:
        assert [path.name for path in tmp_path.iterdir()] == [f".tmp-{out.name}-{os.getpid()}"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        export(there)
    assert not list(tmp_path.iterdir())


def test_only_what_a_dead_process_prepared_for_this_name_goes(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive = ended.pid, os.getppid()
    for name in (f".tmp-out-{dead}", f".tmp-out-{alive}", f".tmp-other-{dead}", f".tmp-out-2-{dead}", "out-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / f".tmp-out-{dead}" / f".tmp-tokenizer.json-{dead}").touch()
    (tmp_path / f".tmp-out-0{dead}").mkdir()
    (tmp_path / f".tmp-out-0{dead}" / "mine").touch()
    (tmp_path / f".tmp-out-00{dead}").symlink_to(tmp_path / "out-1")
    (tmp_path / f".tmp-out-000{dead}").touch()
    before = {path.name for path in tmp_path.iterdir()}
    sweep_prepared(tmp_path / "out", ("config.json",))
    assert before - {path.name for path in tmp_path.iterdir()} == {f".tmp-out-{dead}"}
    sweep_prepared(tmp_path / "out")
    assert before - {path.name for path in tmp_path.iterdir()} == {f".tmp-out-{dead}", f".tmp-out-000{dead}"}
    sweep_prepared(tmp_path / "none" / "out")
