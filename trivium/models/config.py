"""A model as frozen dataclasses: sizes, an embedding, stacks of blocks, an output and an init."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from trivium.config import at_least, fraction, place, variants
from trivium.errors import ConfigError
from trivium.parts.attention import ATTENTIONS, Attention, MultiHead
from trivium.parts.embeddings import EMBEDDINGS, Embedding, Tokens
from trivium.parts.feedforward import FEEDFORWARDS, FeedForward, Mlp
from trivium.parts.init import INITS, Gpt2, Init
from trivium.parts.norms import NORMS, LayerNorm, Norm
from trivium.parts.output import OUTPUTS, Output, Softmax
from trivium.parts.positions import POSITIONS, Learned, Position
from trivium.parts.residual import RESIDUALS, Pre, Residual
from trivium.parts.site import Cost, Site


@dataclass(frozen=True, kw_only=True, slots=True)
class NoPart:
    """An empty place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One layer: self-attention, cross-attention where there is a source, and a feed-forward network."""

    attention: Attention = place(ATTENTIONS, MultiHead())
    cross: Attention | NoPart = place({"none": NoPart, **ATTENTIONS}, NoPart())
    feedforward: FeedForward = place(FEEDFORWARDS, Mlp())
    norm: Norm = place(NORMS, LayerNorm())
    residual: Residual = place(RESIDUALS, Pre())
    position: Position = place(POSITIONS, Learned())
    dropout: float = 0.0  # of each sub-layer's output

    def __post_init__(self) -> None:
        fraction("dropout", self.dropout)

    def inner(self, site: Site) -> Site:
        """The site of the position part, which also knows the size of a head."""
        return replace(site, head=self.attention.head_size(site))

    def costs(self, site: Site) -> Iterator[tuple[str, Any]]:
        """Each part's name and a function that gives its cost here, or refuses."""
        yield "attention", lambda: self.attention.cost(site)
        if not isinstance(self.cross, NoPart):
            cross = self.cross
            yield "cross", lambda: cross.cost(replace(site, source=site.width))
        yield "feedforward", lambda: self.feedforward.cost(site)
        norms = 2 if isinstance(self.cross, NoPart) else 3
        for _ in range(norms):
            yield "norm", lambda: self.residual.cost(site, self.norm)


BLOCKS: dict[str, type[Block]] = {"standard": Block}


@dataclass(frozen=True, kw_only=True, slots=True)
class NoStack:
    """The side that a decoder-only or encoder-only model does not have."""

    @property
    def layers(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """`layers` blocks; `pattern` names variants of the block, repeated over the depth ("" is the block itself)."""

    layers: int = 4
    block: Block = place(BLOCKS, Block())
    pattern: tuple[str, ...] = ()
    variants: Mapping[str, Block] = variants("block")

    def __post_init__(self) -> None:
        at_least("layers", self.layers, 1)
        unknown = [name for name in self.pattern if name and name not in self.variants]
        if unknown:
            raise ConfigError(f"pattern: {unknown[0]!r} is not among the variants; add [variants.{unknown[0]}]")

    def blocks(self) -> list[Block]:
        """The block of every layer, first to last."""
        names = self.pattern or ("",)
        chosen = (names[layer % len(names)] for layer in range(self.layers))
        return [self.variants[name] if name else self.block for name in chosen]


class AnyStack(Protocol):
    @property
    def layers(self) -> int: ...


STACKS: dict[str, type[AnyStack]] = {"none": NoStack, "plain": Stack}

Family = Literal["encoder", "decoder", "encoder-decoder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that decides a model's function except its weights."""

    width: int = 256
    context: int = 256  # the longest input
    vocab: int = 0  # 0 means as many as the tokenizer has
    embedding: Embedding = place(EMBEDDINGS, Tokens())
    encoder: AnyStack = place(STACKS, NoStack())
    decoder: AnyStack = place(STACKS, Stack())
    output: Output = place(OUTPUTS, Softmax())
    init: Init = place(INITS, Gpt2())

    def __post_init__(self) -> None:
        for name, value, least in (("width", self.width, 1), ("context", self.context, 1), ("vocab", self.vocab, 0)):
            at_least(name, value, least)
        if not isinstance(self.encoder, Stack) and not isinstance(self.decoder, Stack):
            raise ConfigError("decoder.kind: a model needs an encoder, a decoder or both; try plain")
        _refusals(self)

    @property
    def family(self) -> Family:
        if isinstance(self.decoder, Stack):
            return "encoder-decoder" if isinstance(self.encoder, Stack) else "decoder"
        return "encoder"

    @property
    def layers(self) -> int:
        return self.encoder.layers + self.decoder.layers

    def site(self, *, layer: int = 0, depth: int = 1, causal: bool = True) -> Site:
        return Site(width=self.width, context=self.context, vocab=self.vocab, layer=layer, depth=depth, causal=causal)

    def costs(self) -> dict[str, Cost]:
        """The cost of the whole model, split into embedding, position, attention, cross, feedforward, norm, output."""
        total: dict[str, Cost] = {}
        for place_name, _, cost in _costs(self):
            name = place_name.rsplit(".", 1)[-1]
            total[name] = total.get(name, Cost()).plus(cost())
        return total

    def parameters(self) -> int:
        """The exact number of distinct parameters, tied ones once."""
        return sum(cost.parameters for cost in self.costs().values())


def _costs(config: ModelConfig) -> Iterator[tuple[str, Site, Any]]:
    """Every part of the model: its dotted place, its site, and a function that gives its cost or refuses."""
    top = config.site()
    yield "embedding", top, lambda: config.embedding.cost(top)
    for side, causal in (("encoder", False), ("decoder", True)):
        stack = getattr(config, side)
        if not isinstance(stack, Stack):
            continue
        names = stack.pattern or ("",)
        seen: list[Position] = []
        for layer, block in enumerate(stack.blocks()):
            name = names[layer % len(names)]
            prefix = f"{side}.variants.{name}" if name else f"{side}.block"
            site = config.site(layer=layer, depth=stack.layers, causal=causal)
            if block.position not in seen:
                seen.append(block.position)
                yield f"{prefix}.position", site, lambda b=block, s=site: b.position.cost(b.inner(s))
            for part, cost in block.costs(site):
                yield f"{prefix}.{part}", site, cost
        yield f"{side}.block.norm", top, lambda s=stack: s.block.residual.final_cost(top, s.block.norm)
    tied = config.embedding.tie == "output"
    yield "output", top, lambda: config.output.cost(top, tied=tied)


def _refusals(config: ModelConfig) -> None:
    """Ask every part for its cost, so that one that cannot stand where it is says so now, by its dotted key."""
    errors = list(_misplaced_cross(config))
    for place_name, _, cost in _costs(config):
        try:
            cost()
        except ConfigError as error:
            # positions ask attention for its head size: the complaint belongs to attention and is made there
            if not (place_name.endswith(".position") and error.problems[0].startswith("heads")):
                errors.append(error.under(place_name))
    ConfigError.gather(errors)


def _misplaced_cross(config: ModelConfig) -> Iterator[ConfigError]:
    """Cross-attention belongs to the decoder of an encoder-decoder, and must not be missing there."""
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        crossed = isinstance(stack, Stack) and any(not isinstance(block.cross, NoPart) for block in stack.blocks())
        wanted = side == "decoder" and config.family == "encoder-decoder"
        if crossed and not wanted:
            yield ConfigError(
                f"{side}.block.cross: only the decoder of an encoder-decoder has a source; set it to none"
            )
        if wanted and not crossed:
            yield ConfigError(
                f"{side}.block.cross: without it the decoder never sees the encoder; set it to multi-head"
            )
