"""A model ready for use: `model.safetensors`, `model.json` and `tokenizer.json` in one folder, tied by hashes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trivium import config as settings
from trivium.checkpoints import format
from trivium.checkpoints.card import FORMAT, PLAIN, card
from trivium.checkpoints.format import Stored
from trivium.checkpoints.manifest import Manifest, NewerFormat
from trivium.checkpoints.model_files import CARD as CARD
from trivium.checkpoints.model_files import TOKENIZER as TOKENIZER
from trivium.checkpoints.model_files import WEIGHTS as WEIGHTS
from trivium.checkpoints.model_files import home_of, identity, replace_model
from trivium.checkpoints.store import Store
from trivium.distributed import world
from trivium.errors import CheckpointError, ConfigError, DataError
from trivium.files import json_line, regular_inside, sha256, write_synced
from trivium.models.config import ModelConfig
from trivium.models.transformer import Lay, Shaped, Transformer, check_weights, empty, shapes_of, weights
from trivium.parts.quantized import (
    LEVELS,
    TABLE,
    Bits,
    Packed,
    QuantizedLinear,
    bits_of,
    blank,
    embeddings,
    hollow,
    pack,
    unpack_into,
)
from trivium.parts.sharded import fill
from trivium.text.tokenizer import Tokenizer, open_tokenizer

_TRIES = 5  # readings beside a process that saves again and again

Tick = Callable[[str, int, int], None]  # what is going on, how far, of how much


class Bundle(NamedTuple):
    """What a folder holds: a model in evaluation mode, its tokenizer, and notes on where it comes from."""

    module: Transformer
    tokenizer: Tokenizer
    notes: Mapping[str, Any]


def save(
    folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor], tokenizer: Tokenizer, notes: Mapping[str, Any]
) -> None:
    """Write a bundle in the place of the one that is there: whatever happens, one of the two is there, whole.

    The weights of a quantised model are written as they are, its embeddings as 8-bit levels. Of sharded weights all
    processes call this, and the first writes.
    """
    if world.any_sharded({WEIGHTS: tensors}):
        whole = world.gather_on_first({WEIGHTS: tensors})[WEIGHTS]
        world.first_only(lambda: save(folder, config, whole, tokenizer, notes))
        return
    bits, digest = _bits(tensors), tokenizer.digest  # a model without a tokenizer is refused before a file is made
    kept = stored(config, tensors) if bits else tensors

    def write(staged: Path) -> None:
        format.write_tensors(staged / WEIGHTS, kept)
        write_synced(staged / TOKENIZER, tokenizer.serialise().encode())
        facts = {
            "format": FORMAT if bits else PLAIN,
            **({"bits": bits} if bits else {}),
            "config": settings.dump(config),
            "weights": sha256(staged / WEIGHTS),
            "tokenizer": digest,
            "notes": dict(notes),
        }
        write_synced(staged / CARD, json_line(facts, indent=2))

    replace_model(folder, write)


def open_bundle(
    folder: Path,
    *,
    parts: Sequence[type[Any]] = (),
    require: Callable[[int], None] = lambda size: None,
    lay: Lay = lambda module: None,
    tick: Tick = lambda what, done, of: None,
) -> Bundle:
    """The model in a folder, every byte checked before a tensor is used; `lay` sees it before it is filled.

    `require` hears the bytes of its weights before they are hashed. If a save replaces it in the meantime it is read
    again.
    """
    for _ in range(_TRIES):
        before = identity(folder)
        try:
            found = _open(folder, parts, require, lay, tick)
        except (CheckpointError, DataError):
            if identity(folder) == before:
                raise
            continue
        if identity(folder) == before:
            return found
    raise CheckpointError(f"{folder} was saved again {_TRIES} times while it was read; load it when that is over")


def _open(folder: Path, parts: Sequence[type[Any]], require: Callable[[int], None], lay: Lay, tick: Tick) -> Bundle:
    facts = card(folder)
    try:
        config = settings.load(ModelConfig, facts["config"], parts=parts)
        with contextlib.suppress(OSError):  # what is missing is named below
            size = (home_of(folder, WEIGHTS) / WEIGHTS).stat().st_size
            _check_layers(config, size // 50)  # the name and the place of a tensor alone take more than 50 bytes
            if size <= _most_bytes(config):
                require(size)
        file = checked_weights(folder, facts, most=_most_bytes(config))
    except ConfigError as error:
        raise CheckpointError(f"{folder} cannot be opened: {error.sentence}") from None
    tokenizer = open_tokenizer(home_of(folder, TOKENIZER))
    if tokenizer.digest != facts["tokenizer"]:
        raise CheckpointError(f"{folder / TOKENIZER} is not the tokenizer this model was trained with; restore it")
    found = format.stored(file)
    try:
        _check_layers(config, len(found))
        shape = shapes_of(config)
        if facts["format"] == FORMAT:
            module = _quantized(shape, found, facts["bits"], lay, tick)
        else:
            module = _filled(shape, found, lay, tick)
    except ConfigError as error:
        raise CheckpointError(f"{folder} cannot be opened: {error.sentence}") from None
    return Bundle(module, tokenizer, facts["notes"])


def _most_bytes(config: ModelConfig) -> int:
    """More than any file of weights for this model has: float64, buffers and names."""
    return 16 * config.parameters() + (64 << 20)


def checked_weights(folder: Path, facts: Mapping[str, Any], *, most: int = 1 << 62) -> Path:
    """Where the weights of a model lie, once their sha256 is the one in the card; a larger file is not even hashed."""
    home = home_of(folder, WEIGHTS)
    try:
        if regular_inside(home, WEIGHTS).stat().st_size > most:
            why = "it is larger than the model in model.json"
        elif sha256(home / WEIGHTS) == facts["weights"]:
            return home / WEIGHTS
        else:
            why = "its sha256 is not the one in model.json"
    except OSError as error:
        why = error.strerror or str(error)
    raise CheckpointError(f"{folder / WEIGHTS} is missing or damaged ({why}); restore it from a copy or a checkpoint")


def model_from(
    table: Mapping[str, Any],
    tensors: Mapping[str, Tensor | Stored],
    where: str,
    parts: Sequence[type[Any]],
    lay: Lay = lambda module: None,
) -> Transformer:
    """A model of the configuration in `table`, filled with `tensors`; `lay` sees it before that."""
    try:
        config = settings.load(ModelConfig, table, parts=parts)
        _check_layers(config, len(tensors))
        return _filled(shapes_of(config), tensors, lay, tick=lambda what, done, of: None)
    except ConfigError as error:
        raise CheckpointError(f"{where} cannot be opened: {error.sentence}") from None


def _check_layers(config: ModelConfig, tensors: int) -> None:
    """Refuse more layers than there are tensors, before the time of building so many is spent."""
    if config.layers > max(tensors, 100):  # a layer of another package may have none
        raise ConfigError(f"the configuration has {config.layers} layers, more than the file has tensors")


def _filled(shape: Transformer, tensors: Mapping[str, Tensor | Stored], lay: Lay, tick: Tick) -> Transformer:
    check_weights(shape, tensors)  # shapes before memory
    module = empty(shape.config)
    lay(module)
    for name, target in _told(module, tick):
        source = tensors[name]
        if isinstance(source, Stored):
            source.pour(target)
        else:
            fill(target, source)
    return module.eval()


def _told(module: Transformer, tick: Tick) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model that is being filled."""
    own = weights(module)
    done, whole = 0, sum(target.nbytes for target in own.values())
    for name, target in own.items():
        yield name, target
        done += target.nbytes
        tick("reading weights", done, whole)


def stored(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a quantised model as a file has them: embeddings too as levels, which are float in use."""
    tables = embeddings(shapes_of(config))
    result = {name: tensor for name, tensor in tensors.items() if name not in tables}
    for name in tables:
        result |= dict(zip(_packed(name), pack(tensors[name], TABLE), strict=True))
    return result


def _quantized(shape: Transformer, tensors: Mapping[str, Stored], bits: Bits, lay: Lay, tick: Tick) -> Transformer:
    """A quantised model of this shape; its embeddings go from levels to their place, a chunk at a time."""
    hollow(shape, bits)
    levels = {f"{name}.levels" for name, part in shape.named_modules() if isinstance(part, QuantizedLinear)}
    own, given, tables = weights(shape), dict[str, Shaped](tensors), set[str]()
    for name, table in embeddings(shape).items():
        wanted = blank(table.shape, TABLE, table.device)
        found = [given.pop(part, table) for part in _packed(name)]
        if all(_alike(there, here) for there, here in zip(found, wanted, strict=True)):
            given[name] = table  # else it is missing
            tables.add(name)
    check_weights(shape, given)
    for name in sorted(levels):
        if not _alike(tensors[name], own[name]):
            raise ConfigError(f"the weights do not fit the configuration: {name} is no {own[name].dtype}")
    module = empty(shape.config)
    hollow(module, bits)
    lay(module)
    for name, target in _told(module, tick):
        if name in tables:
            unpack_into(target, Packed(*(tensors[part].read() for part in _packed(name))))
        else:
            tensors[name].pour(target)
    return module.eval()


def _packed(name: str) -> tuple[str, str]:
    """What the two tensors of a table of levels are called in a file."""
    return f"{name}.levels", f"{name}.scales"


def _alike(there: Shaped, here: Tensor) -> bool:
    return tuple(there.shape) == tuple(here.shape) and there.dtype == here.dtype


def _bits(tensors: Mapping[str, Tensor]) -> int:
    """How many bits the levels among these tensors have; 0 if there are none."""
    levels = (tensor for name, tensor in tensors.items() if name.endswith(".levels"))
    return min((bits_of(tensor) for tensor in levels if tensor.dtype in LEVELS.values()), default=0)


def mean_weights(store: Store, count: int, *, say: Callable[[str], None]) -> tuple[dict[str, Tensor], list[int]]:
    """The mean of the weights in a run's newest `count` checkpoints, and their steps.

    Damaged ones are named through `say` and not counted; fewer whole ones than `count` are refused.
    """
    listed = {item.step: item.path for item in store.checkpoints()}  # of a step saved twice the newer one stands later
    newest: dict[str, Tensor] = {}
    total: dict[str, Tensor] = {}
    steps: list[int] = []
    for step in sorted(listed, reverse=True):
        try:
            found = weights_in(listed[step], format.verify(listed[step]))
        except NewerFormat:
            raise  # it is whole, and its steps must not be lost in silence
        except CheckpointError as error:
            say(f"skipped a checkpoint: {error}")
            continue
        if steps and {name: tensor.shape for name, tensor in found.items()} != {n: t.shape for n, t in newest.items()}:
            raise CheckpointError(f"{listed[step]} holds other weights than {listed[steps[0]]}; they have no mean")
        newest = newest or found
        for name, tensor in found.items():  # summed in float64: the mean of equal weights is exactly that weight
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
        steps.append(step)
        if len(steps) == count:
            mean = {name: _like(newest[name], total[name] / count) for name in total}
            return mean, steps[::-1]
    raise CheckpointError(
        f"{store.folder} has {len(steps)} whole checkpoints, not {count}; average fewer, or train with "
        f"checkpoint.keep={count}"
    )


def weights_in(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The weights of a checkpoint for use: where the run keeps a moving average, that one."""
    return {name: tensor for file in _files(folder, manifest) for name, tensor in format.read_tensors(file).items()}


def stored_in(folder: Path, manifest: Manifest) -> dict[str, Stored]:
    """The same, still in their files."""
    return {name: entry for file in _files(folder, manifest) for name, entry in format.stored(file).items()}


def _files(folder: Path, manifest: Manifest) -> list[Path]:
    """Where the weights for use lie; a later file has the better ones."""
    return [folder / name for name in (WEIGHTS, "average.safetensors") if name == WEIGHTS or name in manifest.files]


def _like(newest: Tensor, mean: Tensor) -> Tensor:
    return mean.to(newest.dtype) if newest.is_floating_point() else newest  # a count has no mean
