"""A configuration as plain values, as dotted keys, as TOML and as a sha256; `trivium.config` reads it back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any


def dump(value: Any) -> dict[str, Any]:
    """Every setting of a configuration as nested plain values, kinds by their names."""
    table: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(value)}
    for field in fields.values():
        item = getattr(value, field.name)
        if "base" in field.metadata:
            meta = fields[field.metadata["base"]].metadata
            table[field.name] = {name: _dump_part(variant, meta) for name, variant in item.items()}
        elif "kinds" in field.metadata:
            table[field.name] = _dump_part(item, field.metadata)
        elif dataclasses.is_dataclass(item):
            table[field.name] = dump(item)
        else:
            table[field.name] = list(item) if isinstance(item, tuple) else item
    return table


def _dump_part(part: Any, meta: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": kind_of(part, meta["kinds"]), **dump(part)} if "kinds" in meta else dump(part)


def kind_of(part: Any, table: Mapping[str, type[Any]]) -> str:
    """The name under which a place knows this part; a part from outside goes by its class name."""
    return next((name for name, cls in table.items() if cls is type(part)), type(part).__name__)


def flat(value: Any) -> dict[str, Any]:
    """Every leaf of a configuration under its dotted key."""
    leaves: dict[str, Any] = {}

    def walk(table: Mapping[str, Any], prefix: str) -> None:
        for name, item in table.items():
            if isinstance(item, Mapping):
                walk(item, f"{prefix}{name}.")
            else:
                leaves[prefix + name] = item

    walk(value if isinstance(value, Mapping) else dump(value), "")
    return leaves


def digest(value: Any) -> str:
    """The sha256 of a configuration: equal exactly when every setting is equal."""
    return hashed(dump(value))


def hashed(table: Mapping[str, Any]) -> str:
    """The sha256 of plain nested values, whatever their order."""
    return hashlib.sha256(json.dumps(table, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def write(value: Any) -> str:
    """The TOML text of a configuration; `load` of it gives the same configuration back."""
    return _toml(value if isinstance(value, Mapping) else dump(value), "").lstrip("\n")


def _toml(table: Mapping[str, Any], path: str) -> str:
    lines = [f"{_key(name)} = {_scalar(item)}\n" for name, item in table.items() if not isinstance(item, Mapping)]
    header = f"\n[{path}]\n" if path and lines else ""
    text = header + "".join(lines)
    for name, item in table.items():
        if isinstance(item, Mapping):
            text += _toml(item, f"{path}.{_key(name)}" if path else _key(name))
    return text


def _key(name: str) -> str:
    plain = name and all(c.isascii() and (c.isalnum() or c in "-_") for c in name)
    return name if plain else _quote(name)


def _quote(text: str) -> str:
    # JSON's escapes are a subset of TOML's basic string, except that TOML wants DEL escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_scalar, value))}]"
    raise TypeError(f"a configuration holds no {type(value).__name__}")  # a bug: leaves are checked on the way in
