"""What the code of one published architecture offers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

from trivium.interop.fields import Fields
from trivium.interop.names import Rules
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.parts.options.embeddings import Tie

T = TypeVar("T")


class Architecture(NamedTuple):
    """`read` turns settings and the names of a file's tensors into a configuration, refusing what we do not have.

    `write` gives the settings nearest to any configuration, without refusing: whoever reads them back sees what got
    lost. It holds `architectures`, the class of `transformers` that opens the export. `rules` are the names of tensors.
    """

    read: Callable[[Fields, Collection[str]], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    rules: Callable[[ModelConfig], Rules]


def like(part: object, kind: type[T]) -> T:
    """`part` if it is of this kind, else the kind's defaults, which differ from it when read back."""
    return part if isinstance(part, kind) else kind()


def first_block(stack: object) -> Block:
    """The block of a stack's first layer, or a plain one where it is of another kind."""
    return like(like(stack, Stack).blocks()[0], Block)


def tie(fields: Fields, default: bool) -> Tie:
    """Whether a decoder's output is its embedding."""
    return "all" if fields.flag("tie_word_embeddings", default) else "none"
