"""What a linear layer is for, by name: the initialisation, fp8 and adapters choose layers by it."""

from __future__ import annotations

from typing import Literal

Role = Literal["query", "key", "value", "attention-out", "up", "gate", "down", "transform", "pooler", "head"]

# Layers that write into the residual stream: GPT-2 scales their init by depth.
WRITERS: frozenset[Role] = frozenset({"attention-out", "down"})
# Layers whose products may be in fp8: most of the work, and their outputs are normed, added up or softmaxed soon.
NARROW: frozenset[Role] = frozenset({"query", "key", "value", "attention-out", "up", "gate", "down", "head"})
