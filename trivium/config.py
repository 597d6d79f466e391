"""The strict loader and its writer: TOML and `key=value` to frozen dataclasses, and back.

A configuration is a tree of frozen dataclasses. A field made with `place` takes one kind from a literal table,
a field made with `preset` may start from a named function; everything else is a plain leaf. All problems are found
before any work begins and reported at once, each with its dotted key and the nearest valid name. A value never names
code: kinds and presets are looked up in tables that the package wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from trivium.config_read import read as read
from trivium.config_read import read_of as read_of
from trivium.config_write import digest as digest
from trivium.config_write import dump as dump
from trivium.config_write import flat as flat
from trivium.config_write import hashed as hashed
from trivium.config_write import kind_of as kind_of
from trivium.config_write import write as write
from trivium.errors import ConfigError, shown
from trivium.layers import latest, only_path
from trivium.outside import lacks
from trivium.outside import outside as outside
from trivium.suggest import Unknown, nearest, setting

T = TypeVar("T")
Layer = Mapping[str, Any]

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1  # whole numbers, as in TOML
_KEY = 80  # characters of a key in a sentence
_HINTED = 100  # problems for which the nearest name is looked for


def place(table: Mapping[str, type[Any]], default: Any) -> Any:
    """A field that takes one kind of part from `table`; naming another kind resets it to that kind's defaults.

    Of kinds that extend one dataclass the settings of that one stay.
    """
    return dataclasses.field(default=default, metadata={"kinds": table})


def preset(table: Mapping[str, Callable[[], Any]], default: Any) -> Any:
    """A field that may start from a named preset before the file's own keys are laid over it."""
    return dataclasses.field(default=default, metadata={"presets": table})


def variants(base: str) -> Any:
    """A field of named variants, each laid over the sibling field `base`."""
    return dataclasses.field(default_factory=dict, metadata={"base": base})


def fraction(name: str, value: float) -> None:
    """Refuse a rate outside [0, 1)."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name}: {value} is not in [0, 1); try 0.1")


def at_least(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Refuse a number below `least`, or above `most`: a file must not ask for work without end."""
    if not value >= least:
        raise ConfigError(f"{name}: {value} is less than {least}")
    if value > most:
        raise ConfigError(f"{name}: {value} is more than {most:,}")


class Text(str):
    """A value typed on the command line: its meaning depends on the type of the leaf it lands on."""


def assignments(pairs: Iterable[str]) -> dict[str, Any]:
    """The layer that `key=value` arguments describe."""
    layer: dict[str, Any] = {}
    errors: list[ConfigError] = []
    # the short form of a place (`optim=muon`) before what is inside it, whatever the order they were typed in
    for pair in sorted(pairs, key=lambda pair: pair.partition("=")[0].count(".")):
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            errors.append(ConfigError(f"{shown(pair)} is not of the form key=value"))
            continue
        try:
            _nest(layer, key.strip(), Text(value.strip()))
        except ConfigError as error:
            errors.append(error)
    ConfigError.gather(errors)
    return layer


def overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """The layer that a mapping of dotted keys to Python values describes."""
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f'overrides: expects a mapping such as {{"optim.rate": 1e-3}}, not {shown(values)}')
    layer: dict[str, Any] = {}
    for key, value in sorted(values.items(), key=lambda item: item[0].count(".")):
        _nest(layer, key, value)
    return layer


def _nest(layer: dict[str, Any], key: str, value: Any) -> None:
    *path, leaf = key.split(".")
    for step in path:
        inner = layer.setdefault(step, {})
        if isinstance(inner, str):  # `norm=rms norm.eps=1e-6`: the short form names the kind
            inner = layer[step] = {"": inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"{_cut(key)}: {_cut(step)} is already set to a whole value")
        layer = inner
    layer[leaf] = value


def load(cls: type[T], *layers: Layer, parts: Sequence[type[Any]] = (), start: T | None = None) -> T:
    """`cls` with each layer laid over the ones before it, or a ConfigError that lists every problem.

    `parts` are classes from outside the package that a place may name by their class name.
    """
    if not isinstance(parts, list | tuple) or not all(isinstance(part, type) for part in parts):
        raise ConfigError(f"parts: expects a list of classes, not {shown(parts)}")
    loader = _Loader({part.__name__: part for part in parts})
    base = start if start is not None else cls()
    value = loader.node(cls, {}, base, list(layers), "")
    loader.suggest(base)
    ConfigError.gather(loader.errors)
    return typing.cast(T, value)


def _common(cls: type[Any], other: type[Any]) -> type[Any] | None:
    """The dataclass that two kinds extend."""
    if cls is other:
        return None
    return next((one for one in cls.__mro__[1:] if dataclasses.is_dataclass(one) and issubclass(other, one)), None)


def without(table: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A table without the settings of these dotted keys."""
    inner: dict[str, set[str]] = {}
    for key in keys:
        head, _, rest = key.partition(".")
        inner.setdefault(head, set()).add(rest)
    return {
        name: without(value, inner[name]) if name in inner and isinstance(value, Mapping) else value
        for name, value in table.items()
        if "" not in inner.get(name, ())
    }


def accept(instance: Any) -> None:
    """Let a configuration that Python code makes take all that a file may say: names of kinds, tables, lists.

    Called first in `__post_init__`; what a file would be refused for is refused here in the same sentence.
    """
    hints, loader = _hints(type(instance)), _Loader({})
    for field in dataclasses.fields(instance):
        value, meta = getattr(instance, field.name), field.metadata
        part = "kinds" in meta or "presets" in meta or dataclasses.is_dataclass(hints[field.name])
        if "base" in meta:
            if not isinstance(value, Mapping):
                loader.variants((None, {}, meta), [value], field.name)
            continue
        if part and not isinstance(value, _PLAIN):
            loader.part(hints[field.name], value, field.default, field.name)
            continue
        found = loader.node(hints[field.name], meta, field.default, [value], field.name)
        if found is not _FAILED and found is not value:
            object.__setattr__(instance, field.name, found)  # frozen for everybody else
    loader.suggest(instance)
    ConfigError.gather(loader.errors)


def explained(cls: type[T]) -> type[T]:
    """Let a configuration that Python code makes refuse an unknown name in the sentence that a file gets for it."""
    init, names = cls.__init__, {field.name for field in dataclasses.fields(typing.cast(Any, cls))}

    @functools.wraps(init)
    def checked(self: Any, *arguments: Any, **given: Any) -> None:
        if unknown := {name: value for name, value in given.items() if name not in names}:
            load(cls, unknown)
        init(self, *arguments, **given)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


_PLAIN = (str, int, float, Mapping, list, tuple, type(None))  # what is no part
_FAILED = object()


class _Loader:
    def __init__(self, parts: Mapping[str, type[Any]]) -> None:
        self.parts = parts
        self.errors: list[ConfigError] = []
        self.unknown: list[Unknown] = []
        self.bases: dict[str, Any] = {}  # what each table starts from: a preset or a kind, as the layers say
        self.kinds: dict[str, Mapping[str, type[Any]]] = {}  # of each place that the layers name

    def fail(self, key: str, message: str) -> Any:
        self.errors.append(ConfigError(f"{_cut(key)}: {message}" if key else message))
        return _FAILED

    def suggest(self, base: Any) -> None:
        """Turn the unknown names into errors, now that all tables are known."""
        keys = list(self.keys(base, "")) if self.unknown else []
        for number, unknown in enumerate(self.unknown):
            plain = f"{unknown.typed}: is not a setting"
            self.errors.append(ConfigError(setting(unknown, keys) if number < _HINTED else plain))

    def keys(self, base: Any, key: str) -> Iterator[str]:
        """The keys of every place and leaf at or below `key`."""
        if key:
            yield key
        base = self.bases.get(key, base)
        if dataclasses.is_dataclass(base):
            for field in dataclasses.fields(base):
                yield from self.keys(getattr(base, field.name), f"{key}.{field.name}".lstrip("."))

    def node(self, hint: Any, meta: Mapping[str, Any], base: Any, layers: list[Any], key: str) -> Any:
        """The value at `key`: `base` with `layers` laid over it."""
        if not layers:
            return base
        if "base" in meta:
            return self.variants(base, layers, key)
        if not ("kinds" in meta or "presets" in meta or dataclasses.is_dataclass(hint)):
            return self.leaf(hint, layers[-1], key)
        if "kinds" in meta:
            self.kinds[key] = meta["kinds"]
        start = self.start(meta, base, layers, key)
        return _FAILED if start is _FAILED else self.fields(start[0], start[1], key)

    def start(self, meta: Mapping[str, Any], base: Any, layers: list[Any], key: str) -> Any:
        """The object that a place or preset starts from, and the tables that remain to be laid over it."""
        short = "kind" if "kinds" in meta else "preset" if "presets" in meta else ""
        tables: list[dict[str, Any]] = []
        named: Any = None
        for layer in layers:
            if isinstance(layer, str) and short:
                layer = {short: layer}
            if not isinstance(layer, Mapping):
                if dataclasses.is_dataclass(layer) and not isinstance(layer, type):
                    base, tables, named = layer, [], None
                    continue
                return self.no_table(layer, base, key)
            table = dict(layer)
            if "" in table and short:
                table[short] = table.pop("")
            if "presets" in meta and "preset" in table:
                named = table.pop("preset")
            if "kinds" in meta and "kind" in table:
                cls = self.kind(meta["kinds"], table.pop("kind"), key)
                if cls is _FAILED:
                    return _FAILED
                common = _common(cls, type(base))
                if common is not None:
                    base = cls(**{field.name: getattr(base, field.name) for field in dataclasses.fields(common)})
                elif cls is not type(base):
                    base, tables = cls(), []
            tables.append(table)
        if named is not None:
            maker = meta["presets"].get(named) if isinstance(named, str) else None
            if maker is None:
                return self.fail(key, f"there is no preset {_show(named)}{_nearest(named, meta['presets'])}")
            base = maker()
        return base, tables

    def no_table(self, value: Any, base: Any, key: str) -> Any:
        first = "".join(f"; set {key}.{name}" for name in _names(type(base))[:1])
        return self.fail(key, f"expects a table of settings, not {_show(value)}{first}")

    def part(self, hint: Any, value: Any, base: Any, key: str) -> None:
        """Refuse an object that Python code puts into a place and that is no part for it."""
        if missing := lacks(value, hint):
            if len(missing) == len(lacks(object, hint)):  # nothing of a part
                self.no_table(value, base, key)
            else:
                own = type(value).__name__
                self.fail(key, f"{_cut(own)} has no {' and no '.join(missing)}, which every part has here; add it")

    def kind(self, table: Mapping[str, type[Any]], name: Any, key: str) -> Any:
        cls = (table.get(name) or self.parts.get(name)) if isinstance(name, str) else None
        own = isinstance(name, str) and name[:1].isupper() and name.isidentifier()
        hint = f"; a part of your own is passed as parts=[{name}]" if own and len(name) < _KEY else ""
        return cls or self.fail(f"{key}.kind", f"there is no kind {_show(name)}{hint or _nearest(name, table)}")

    def fields(self, base: Any, layers: list[dict[str, Any]], key: str) -> Any:
        cls = type(base)
        self.bases[key] = base
        base, layers = latest(base, layers)
        hints, fields = _hints(cls), {field.name: field for field in dataclasses.fields(cls)}
        for name, value in {name: layer[name] for layer in layers for name in layer if name not in fields}.items():
            kinds = {kind: _names(one) for kind, one in self.kinds.get(key, {}).items()}
            self.unknown.append(Unknown(_cut(key), _cut(str(name)), only_path(value), list(fields), kinds))
        values: dict[str, Any] = {}
        for name, field in fields.items():
            given = [layer[name] for layer in layers if name in layer]
            current = getattr(base, name)
            if "base" in field.metadata and given:
                sibling = field.metadata["base"]
                current = (values[sibling], current, fields[sibling].metadata)
            values[name] = self.node(hints[name], field.metadata, current, given, f"{key}.{name}".lstrip("."))
        if any(value is _FAILED for value in values.values()):
            return _FAILED
        try:
            return cls(**values)
        except ConfigError as error:
            self.errors.append(error.under(key) if key else error)
            return _FAILED

    def variants(self, base: Any, layers: list[Any], key: str) -> Any:
        model, current, meta = base
        if model is _FAILED:
            return _FAILED
        wrong = [layer for layer in layers if not isinstance(layer, Mapping)]
        if wrong:
            return self.fail(key, f"expects a table of named variants, not {_show(wrong[0])}")
        result = dict(current)
        for name in dict.fromkeys(name for layer in layers for name in layer):
            given = [layer[name] for layer in layers if name in layer]
            result[name] = self.node(type(model), meta, result.get(name, model), given, f"{key}.{name}")
        return _FAILED if any(value is _FAILED for value in result.values()) else result

    def leaf(self, hint: Any, value: Any, key: str) -> Any:
        try:
            return _convert(hint, value)
        except ValueError as error:
            return self.fail(key, str(error))


def _convert(hint: Any, value: Any) -> Any:
    """`value` as the type `hint`, or a ValueError that says what was expected."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_any(args, value)
    typed = value
    if isinstance(value, Text) and not (hint is str or (origin is Literal and isinstance(args[0], str))):
        value = _typed(value)
    if origin is Literal:
        value = str(value) if isinstance(value, Text) else value
        if value in args:
            return value
        raise ValueError(f"{_show(value)} is not one of {', '.join(map(str, args))}{_nearest(value, args)}")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            value = _items(typed) if isinstance(typed, Text) else [value]
        return tuple(_convert(args[0], item) for item in value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        if not _LOWEST <= value <= _HIGHEST:
            raise ValueError(f"{_show(value)} is {'more' if value > 0 else 'less'} than 64 bits hold")
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and finite(value):
        return float(value)
    if hint is str and isinstance(value, str | Path):
        return _unicode(_unquote(value) if isinstance(value, Text) else str(value))
    raise ValueError(f"expects {_NAMES.get(hint, hint)}, not {_show(value)}")


def finite(value: float) -> bool:
    """Whether it is a number that a float can be."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _items(text: Text) -> list[Text]:
    """The items of a list on the command line, parted by commas; a text in quotes is one item."""
    if text[:1] in ("'", '"') and isinstance(_typed(text), str):
        return [text]
    return [Text(item.strip()) for item in text.split(",") if item.strip()]


def _convert_any(hints: Sequence[Any], value: Any) -> Any:
    """`value` as the first of several types that takes it: `float | str` is a fraction or a path."""
    for hint in hints:
        try:
            return _convert(hint, value)
        except ValueError:
            continue
    raise ValueError(f"expects {' or '.join(str(_NAMES.get(hint, hint)) for hint in hints)}, not {_show(value)}")


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _typed(text: Text) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return str(text)


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expects text in Unicode, not {shown(text, 60)}") from None
    return text


def _unquote(text: Text) -> str:
    return str(_typed(text)) if text[:1] in ("'", '"') else str(text)


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(value, 60)


def _cut(key: str) -> str:
    """A key for a sentence: the end of a long one, where the misspelling is."""
    return key if len(key) <= _KEY else f"...{key[3 - _KEY :]}"


def _nearest(name: object, names: Iterable[Any]) -> str:
    return nearest(name[:_KEY] if isinstance(name, str) else "", names)


def unknown(what: str, name: str, names: Iterable[str]) -> ConfigError:
    """The error for a name that is in no table, with the nearest one that is."""
    return ConfigError(f"there is no {what} {shown(name)}{_nearest(name, names)}")


def _names(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _hints(cls: type[Any]) -> dict[str, Any]:
    found = _HINTS.get(cls)
    if found is None:
        found = _HINTS[cls] = typing.get_type_hints(cls)
    return found


_HINTS: dict[type[Any], dict[str, Any]] = {}  # what typing works out once for each class
