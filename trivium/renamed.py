"""Settings that had another name: the files of runs and saved models may hold it, and users may still type it.

`update` reads old keys as new ones; `restore_old_keys` writes them back, so that the identity of an old run stays what
it was.
Another rename is one more line in a table.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Renamed(NamedTuple):
    """Keys of the tables in one place that have new names."""

    place: str  # dotted, from the root of a recipe; * is any name
    kinds: tuple[str, ...]  # that have the keys, where the place takes several: a part from outside keeps its own
    names: dict[str, str]  # old to new


_DROPOUT = {"lock": "variational_dropout"}
RENAMED = (
    Renamed("", (), {"stream": "residual_dtype"}),
    Renamed("model.embedding", ("tokens",), {"omit": "word_dropout", "swap": "unigram_noise", **_DROPOUT}),
    Renamed("model.*coder", ("plain",), _DROPOUT),
    Renamed("model.*coder.block", ("standard",), _DROPOUT),
    Renamed("model.*coder.variants.*", ("standard",), _DROPOUT),
    Renamed("model.*coder.block.feedforward", ("mlp", "glu"), _DROPOUT),
    Renamed("model.*coder.variants.*.feedforward", ("mlp", "glu"), _DROPOUT),
)


class KeyToKind(NamedTuple):
    """A key that was a choice of two and is a kind of a part beside it now."""

    place: str  # of the table that had the key
    key: str
    values: tuple[str, str]  # the one without a meaning now, and the one that the kind says
    part: str
    kinds: tuple[str, str]  # of the part that had the key beside it, and now


KEYS_TO_KINDS = (KeyToKind("model", "share", ("none", "stacks"), "decoder", ("plain", "tied")),)


def update(recipe: dict[str, Any]) -> dict[str, Any]:
    """Replace every old key in the tables of a recipe by its new name, in place."""
    for entry in RENAMED:
        _rename(recipe, entry, entry.names)
    for became in KEYS_TO_KINDS:
        for table in _tables(recipe, became.place.split(".")):
            part, value = table.get(became.part), table.get(became.key)
            if value == became.values[1] and isinstance(part, dict) and part.get("kind") == became.kinds[0]:
                part["kind"], value = became.kinds[1], became.values[0]
            if value == became.values[0]:
                table.pop(became.key, None)
    return recipe


def update_model(model: dict[str, Any]) -> dict[str, Any]:
    """The same for the table of a model alone."""
    update({"model": model})
    return model


def restore_old_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """Replace every key that was renamed by its first name, in place."""
    for became in KEYS_TO_KINDS:
        for table in _tables(recipe, became.place.split(".")):
            part = table[became.part]
            is_new = part["kind"] == became.kinds[1]
            table[became.key] = became.values[is_new]
            part["kind"] = became.kinds[0] if is_new else part["kind"]
    for entry in reversed(RENAMED):
        _rename(recipe, entry, {new: old for old, new in entry.names.items()})
    return recipe


def new_names(key: str) -> list[str]:
    """What a key that was renamed is called now, in one place or another."""
    return [*dict.fromkeys(entry.names[key] for entry in RENAMED if key in entry.names)]


def explain_old_key(table: str, key: str, names: Container[str]) -> str:
    """The sentence about an old key of a table that has these names; nothing of another key."""
    prefix = f"{table}." if table else ""
    for entry in RENAMED:
        if (name := entry.names.get(key)) in names:
            return f"{prefix}{key}: is called {prefix}{name} now"
    for became in KEYS_TO_KINDS:
        if key == became.key and became.part in names:
            kind = became.kinds[1]
            return (
                f"{prefix}{key}: is a kind of {became.part} now; leave it out, or set {prefix}{became.part}.kind={kind}"
            )
    return ""


def _rename(recipe: dict[str, Any], entry: Renamed, names: Mapping[str, str]) -> None:
    for table in _tables(recipe, entry.place.split(".") if entry.place else []):
        if not entry.kinds or table.get("kind", entry.kinds[0]) in entry.kinds:
            for before, after in names.items():
                if before in table and after not in table:  # both: the loader says which one is no setting
                    table[after] = table.pop(before)


def _tables(table: dict[str, Any], path: list[str]) -> Iterator[dict[str, Any]]:
    """The tables in a place, which takes as many steps as its path: files may be nested deep."""
    if not path:
        yield table
        return
    for name, inner in table.items():
        if isinstance(inner, dict) and fnmatchcase(name, path[0]):
            yield from _tables(inner, path[1:])
