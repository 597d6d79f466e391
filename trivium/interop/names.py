"""The tensors of another program under our names and back: one table per architecture serves both directions."""

# d width, V vocabulary, H heads, E head size

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from torch import Tensor

from trivium.errors import CheckpointError, printable

_LAYER = re.compile(r"\.blocks\.(\d+)\.")
_ENDS = ("", ".weight", ".bias")  # a name that is no tensor is a module, whose weight and bias are meant


class Form(Protocol):
    """How one tensor of theirs holds one or more of ours; both directions also work on the meta device."""

    def read(self, theirs: Tensor) -> tuple[Tensor, ...]: ...
    def write(self, ours: Sequence[Tensor]) -> Tensor: ...


class Same:
    """The same tensor."""

    def read(self, theirs: Tensor) -> tuple[Tensor, ...]:
        return (theirs,)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0]


class Turned:
    """Matrices stored [in, out], as GPT-1 and GPT-2 do; a square one passes every check of shapes."""

    def read(self, theirs: Tensor) -> tuple[Tensor, ...]:
        return (theirs.T if theirs.ndim == 2 else theirs,)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0].T if ours[0].ndim == 2 else ours[0]


class Columns:
    """Queries, keys and values side by side in one [in, out] matrix: c_attn of GPT-1 and GPT-2."""

    def read(self, theirs: Tensor) -> tuple[Tensor, ...]:
        return tuple((theirs.T if theirs.ndim == 2 else theirs).chunk(3))

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        joined = _beside(ours, dim=0).flatten(0, 1)
        return joined.T if joined.ndim == 2 else joined


@dataclass(frozen=True, kw_only=True, slots=True)
class ByHead:
    """Query, key and value of the first head, then of the second, in one [out, in] matrix: GPT-NeoX and BLOOM."""

    heads: int

    def read(self, theirs: Tensor) -> tuple[Tensor, ...]:
        apart_H3Ed = theirs.reshape(self.heads, 3, -1, *theirs.shape[1:])
        return tuple(apart_H3Ed[:, index].flatten(0, 1) for index in range(3))

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        apart = [tensor.reshape(self.heads, -1, *tensor.shape[1:]) for tensor in ours]
        return _beside(apart, dim=1).flatten(0, 2)


def _beside(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.stack`, which on the meta device loads the whole compiler: a second and 75 MB for a shape."""
    first = parts[0]
    result = first.new_empty(*first.shape[:dim], len(parts), *first.shape[dim:])
    for part, place in zip(parts, result.unbind(dim), strict=True):
        place.copy_(part)
    return result


class Row:
    """A vector stored as a matrix of one row: `final_logits_bias` [1, V] of BART and Marian."""

    def read(self, theirs: Tensor) -> tuple[Tensor, ...]:
        return (theirs.flatten(),)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0][None]


SAME: Form = Same()


class Rule(NamedTuple):
    """Our tensors or modules, theirs that holds them, and how; a star is the layer."""

    ours: tuple[str, ...]
    theirs: str
    form: Form = SAME


def same(names: Mapping[str, str]) -> list[Rule]:
    """Rules for tensors that are alike on both sides, ours to theirs."""
    return [Rule((mine,), theirs) for mine, theirs in names.items()]


def attention(mine: str, theirs: str, names: str) -> dict[str, str]:
    """The four matrices of an attention under their names: query, key, value and output, with spaces between."""
    parts = ("query", "key", "value", "out")
    return {f"{mine}.{part}": f"{theirs}.{name}" for part, name in zip(parts, names.split(), strict=True)}


class Step(NamedTuple):
    """One tensor of a file and those of ours that it fills."""

    source: str
    ours: tuple[str, ...]
    form: Form


class Plan(NamedTuple):
    """How a file fills a model; `copies` are pairs of names in the file that must hold the same numbers."""

    steps: list[Step]
    copies: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The whole table of one architecture for one configuration."""

    table: Sequence[Rule]
    copies: Mapping[str, str]  # theirs that repeat another of theirs: read if present, never written
    ignored: Sequence[str] = ()  # patterns of theirs that are no weights, such as stored masks
    prefixes: Sequence[str] = ()  # what files may have or lack in front of a name

    def write(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Their names and tensors, one by one, from all of ours."""
        for name, ours, form in self._all(own):
            yield name, form.write([own[one] for one in ours])

    def names(self, own: Collection[str]) -> list[str]:
        """Theirs that would hold some of ours, of which others may have no place there."""
        return [step.source for step in self._pairs(own)]

    def match(
        self, shapes: Mapping[str, Sequence[int]], own: Mapping[str, Tensor], where: str, *, hint: str = ""
    ) -> Plan:
        """How tensors of these shapes fill `own`, which may be on the meta device; a CheckpointError if they do not.

        Every one of theirs must be used or known to be no weight, and every one of ours must be filled. `hint` says
        what to do where there is one too many or too few, if it is known why.
        """
        wanted = {step.source: step for step in self._all(own)}
        found: dict[str, str] = {}
        for name in shapes:
            known = self._known(name, wanted)
            if known is None:
                reason = hint or "this is another kind of model"
                raise CheckpointError(f"{where}: nobody reads the tensor {printable(name, 100)}; {reason}")
            if known in found:
                both = f"{printable(name, 100)} and {printable(found[known], 100)}"
                raise CheckpointError(f"{where}: {both} are the same tensor; remove one of them")
            found[known] = name
        copies = self._resolve(found, wanted)
        steps = []
        for name, (_, ours, form) in wanted.items():
            if name not in found:
                reason = hint or "fetch the whole checkpoint"
                raise CheckpointError(f"{where}: the tensor {name} is missing; {reason}")
            expected = form.write([own[one] for one in ours]).shape
            for source in (found[name], *(copy for copy, original in copies if original == found[name])):
                if tuple(shapes[source]) != tuple(expected):
                    raise CheckpointError(
                        f"{where}: {source} has shape {list(shapes[source])}, not {list(expected)} as config.json says"
                    )
            steps.append(Step(found[name], ours, form))
        return Plan(steps, copies)

    def _all(self, own: Collection[str]) -> list[Step]:
        """Every tensor of theirs with those of ours that are in it, all of ours being in one."""
        steps = self._pairs(own)
        covered = {name for step in steps for name in step.ours}
        assert covered == set(own), f"no rule for {sorted(set(own) - covered)}"
        return steps

    def _pairs(self, own: Collection[str]) -> list[Step]:
        layers = 1 + max((int(number) for name in own for number in _LAYER.findall(name)), default=-1)
        pairs = []
        for ours, theirs, form in self.table:
            for layer in range(layers if "*" in theirs else 1):
                for end in _ENDS:
                    names = tuple(name.replace("*", str(layer)) + end for name in ours)
                    if all(name in own for name in names):
                        pairs.append(Step(theirs.replace("*", str(layer)) + end, names, form))
        return pairs

    def _known(self, name: str, wanted: Mapping[str, Step]) -> str | None:
        """The name as the table spells it: files differ in prefixes, and old ones in the parts of a LayerNorm."""
        for old, new in (("gamma", "weight"), ("beta", "bias")):
            if name.endswith(f"LayerNorm.{old}"):
                name = name.removesuffix(old) + new
        spellings = [name, *(prefix + name for prefix in self.prefixes)]
        spellings += [name.removeprefix(prefix) for prefix in self.prefixes]
        for spelling in spellings:
            if spelling in wanted or spelling in self.copies:
                return spelling
        return next((one for one in spellings if any(fnmatchcase(one, pattern) for pattern in self.ignored)), None)

    def _resolve(self, found: dict[str, str], wanted: Mapping[str, Step]) -> list[tuple[str, str]]:
        """The copies that a file holds beside their originals; where it has only the copy, that is the original."""
        present = []
        for copy, original in self.copies.items():
            if copy not in found or copy in wanted:  # where a model is not tied, the copy is a tensor of its own
                continue
            if original in found:
                present.append((found[copy], found[original]))
            else:
                found[original] = found[copy]
        return present
