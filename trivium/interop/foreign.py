"""What a file of another program holds, as ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trivium.models.transformer import Transformer
from trivium.text.tokenizer import Tokenizer

Say = Callable[[str], None]  # a sentence for whoever watches
Tick = Callable[[str, int, int], None]  # what is going on, how far, of how much


class Foreign(NamedTuple):
    """A model in evaluation mode, its tokenizer (None where the files have none), and where it comes from.

    The notes are plain values: `format` (hf, gguf, llama2.c), `architecture`, `ignored` (settings that were not read).
    """

    module: Transformer
    tokenizer: Tokenizer | None
    notes: Mapping[str, Any]
