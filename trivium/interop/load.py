"""One door for every file of another program."""

from __future__ import annotations

from pathlib import Path

from trivium.errors import CheckpointError
from trivium.interop.folder import CONFIG, open_folder
from trivium.interop.foreign import Foreign, Say, Tick
from trivium.interop.gguf import open_gguf
from trivium.interop.llama2c import open_llama2c
from trivium.models.transformer import Lay


def is_foreign(path: Path) -> bool:
    """Whether a path looks like a file or a folder of another program."""
    return path.is_file() or (path / CONFIG).is_file()


def open_foreign(path: Path, *, say: Say, tick: Tick, lay: Lay = lambda module: None, fill: bool = True) -> Foreign:
    """The model in a Hugging Face folder, a GGUF file or a llama2.c file; `lay` sees it before it is filled.

    Without `fill` its weights are checked but not read, and the module is on the meta device.
    """
    if path.is_dir():
        if (path / CONFIG).is_file():
            return open_folder(path, say=say, tick=tick, lay=lay, fill=fill)
        raise CheckpointError(f"{path} holds no model: there is neither a model.json nor a {CONFIG}")
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; name a folder or a file")
    if path.suffix.lower() == ".gguf":
        return open_gguf(path, say=say, tick=tick, lay=lay, fill=fill)
    if path.suffix == ".bin":
        return open_llama2c(path, say=say, tick=tick, lay=lay, fill=fill)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} holds tensors without their settings; name the folder with its {CONFIG}")
    raise CheckpointError(f"{path} is no model that trivium reads; name a folder, a .gguf file or a llama2.c .bin file")
