"""What a workload must compute and move, by formula: the floor under every measured time."""

# S source tokens, T tokens, d width of attention (heads x head), L layers, N parameters

from __future__ import annotations

from typing import NamedTuple

from trivium.models.config import BlockStack, ModelConfig
from trivium.models.transformer import build

# Bytes a parameter: gradient w, r for its norm, r (bf16: 6), p, m, v r+w (float32: 24), a bf16 copy w, r twice (6).
ADAM = 36
BLOCK = 32  # bytes a token, layer and width that a backward pass finds again (Korthikanti et al. 2022, no dropout)


class Row(NamedTuple):
    """The tokens of one row: of the source, of what the model writes or reads, and where the output is looked at."""

    source: int
    target: int
    looked: float

    @property
    def tokens(self) -> int:
        return self.source + self.target

    def __str__(self) -> str:
        return f"{self.source}+{self.target}" if self.source else str(self.target)


class Applied(NamedTuple):
    """How many parameters each source token, each token and each position of the output is multiplied by."""

    source: int
    target: int
    output: int


def applied(config: ModelConfig) -> Applied:
    """Counted from the model itself: embeddings and tables of positions are looked up, not multiplied by."""
    counts = {"source": 0, "target": 0, "output": 0}
    two = config.family == "encoder-decoder"
    for name, parameter in build(config, device="meta").named_parameters(remove_duplicate=False):
        side, *rest = name.split(".")
        if side == "output":
            counts["output"] += parameter.numel()
        elif side in ("encoder", "decoder") and rest[0] != "positions":
            # keys and values of cross-attention are made from the source
            across = "cross" in rest and ("key" in rest or "value" in rest)
            counts["source" if two and (side == "encoder" or across) else "target"] += parameter.numel()
    return Applied(**counts)


def training_flops(config: ModelConfig, row: Row) -> float:
    """Of one row, as the peers are counted: 6 N + 12 L d T a token, whole attention, the output at every position."""
    source, target, output = applied(config)
    matrices = 6 * (source * row.source + (target + output) * row.target)
    return matrices + 12.0 * sum(_scores(config, row, halved=False))


def needed_flops(config: ModelConfig, row: Row) -> float:
    """Of one row, what cannot be left out: no masked half of causal attention, the output only where it is needed."""
    source, target, output = applied(config)
    matrices = 6 * (source * row.source + target * row.target + output * row.looked)
    return matrices + 12.0 * sum(_scores(config, row, halved=True))


def _scores(config: ModelConfig, row: Row, *, halved: bool) -> list[float]:
    """For every attention: its width times the pairs of a query and a key."""
    found: list[float] = []
    for stack, causal in ((config.encoder, False), (config.decoder, True)):
        if not isinstance(stack, BlockStack):
            continue
        own = row.source if config.family == "encoder-decoder" and not causal else row.target
        for block in stack.blocks():
            _, head, _ = block.attention.cache_shape(config.site())
            width = block.attention.heads * head
            found.append(width * own * own * (0.5 if causal and halved else 1))
            if causal and config.family == "encoder-decoder":
                found.append(width * own * row.source)
    return found


def training_bytes(config: ModelConfig, row: Row, rows: int) -> float:
    """Of one step: the optimizer and the weights' copies, and every block's states out in forward and in again."""
    tokens = rows * (row.source * config.encoder.layers + row.target * config.decoder.layers)
    if config.family != "encoder-decoder":
        tokens = rows * row.target * config.layers
    return ADAM * config.parameters() + 2.0 * BLOCK * config.width * tokens


def decoding_bytes(config: ModelConfig, *, batch: int, length: float, size: int = 2, source: float = 0) -> float:
    """Of one new token for each row: every weight once, and the cached keys and values of `length` tokens before it.

    `size` is the bytes of a number. Keys and values of a source are read anew for every token too.
    """
    _, target, output = applied(config)
    assert isinstance(config.decoder, BlockStack)
    cached = 0.0
    for block in config.decoder.blocks():
        groups, key, value = block.attention.cache_shape(config.site())
        cached += groups * (key + value) * (length + (source if config.family == "encoder-decoder" else 0))
    return size * (target + output + batch * cached)
