"""A model as frozen dataclasses: sizes, an embedding, stacks of blocks, an output and an init."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, final

from trivium.config import accept, at_least, fraction, place, variants
from trivium.errors import ConfigError, shown
from trivium.models.options import BLOCKS, AnyBlock, Block
from trivium.parts.init import INITS, Gpt2, Init
from trivium.parts.options.boundary import BOUNDARIES, Boundary
from trivium.parts.options.embeddings import EMBEDDINGS, Embedding, TokenEmbeddingOptions
from trivium.parts.options.output import OUTPUTS, Output, SoftmaxOptions
from trivium.parts.options.sentence import SENTENCES, Sentence
from trivium.parts.site import MOST, Cost, NoPart, Site

if TYPE_CHECKING:
    from torch import nn


Place = tuple[str, Callable[[], Cost]]  # the dotted place of a part, and a function that gives its cost or refuses


class AnyStack(Protocol):
    """The options of one side of a model; no layers means that the model has no such side."""

    @property
    def layers(self) -> int: ...
    @property
    def reads_source(self) -> bool:
        """Whether its layers attend to the output of an encoder."""

    def build(self, config: ModelConfig, *, causal: bool, encoder: nn.Module | None) -> nn.Module | None:
        """The module, called as `models.stack.PlainStack`; None for a side that is not there.

        A decoder beside an encoder gets the encoder's module as `encoder`, to use its parts.
        """

    def costs(self, config: ModelConfig, *, causal: bool) -> Iterator[Place]:
        """Every part of the side: its place below the side, and its cost there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoStack:
    """The side that a decoder-only or encoder-only model does not have."""

    @property
    def layers(self) -> int:
        return 0

    @property
    def reads_source(self) -> bool:
        return False

    def build(self, config: ModelConfig, *, causal: bool, encoder: nn.Module | None) -> None:
        return None

    def costs(self, config: ModelConfig, *, causal: bool) -> Iterator[Place]:
        return iter(())


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockStack(ABC):
    """`layers` blocks; `pattern` names variants of the block, repeated over the depth ("" is the block itself)."""

    layers: int = 4
    block: AnyBlock = place(BLOCKS, Block())
    pattern: tuple[str, ...] = ()
    variants: Mapping[str, AnyBlock] = variants("block")
    variational_dropout: float = 0.0  # of the stack's output, with one mask for all tokens of a sequence (AWD-LSTM)

    def __post_init__(self) -> None:
        accept(self)
        at_least("layers", self.layers, 1, 10_000)
        fraction("variational_dropout", self.variational_dropout)
        unknown = [name for name in self.pattern if name and name not in self.variants]
        if unknown:
            raise ConfigError(f"pattern: {shown(unknown[0])} is not among the variants; add [variants.NAME] for it")

    def blocks(self) -> list[AnyBlock]:
        """The block of every layer, first to last."""
        names = self.pattern or ("",)
        chosen = (names[layer % len(names)] for layer in range(self.layers))
        return [self.variants[name] if name else self.block for name in chosen]

    @property
    def reads_source(self) -> bool:
        return any(not isinstance(block.cross, NoPart) for block in self.blocks())

    @abstractmethod
    def build(self, config: ModelConfig, *, causal: bool, encoder: nn.Module | None) -> nn.Module: ...

    def costs(self, config: ModelConfig, *, causal: bool) -> Iterator[Place]:
        names, shared = self.pattern or ("",), sharing(self, config.site())
        for layer, block in enumerate(self.blocks()):
            name = names[layer % len(names)]
            prefix = f"variants.{name}" if name else "block"
            site = config.site(layer=layer, depth=self.layers, causal=causal)
            own = shared[layer] == layer  # else it uses a module that is counted already
            yield f"{prefix}.position", partial(_position_cost, block, site) if own else partial(_kept, block, site)
            for part, cost in block.costs(site):
                yield f"{prefix}.{part}", cost
        yield "block.norm", partial(self.block.final_cost, config.site())


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Stack(BlockStack):
    """Blocks one after another, each with parameters of its own."""

    def build(self, config: ModelConfig, *, causal: bool, encoder: nn.Module | None = None) -> nn.Module:
        from trivium.models.stack import PlainStack

        return PlainStack(self, config, causal=causal)


TIED = ("attention", "feedforward")  # the modules that a tied decoder has in common with its encoder


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TiedStack(BlockStack):
    """A plain decoder except that the encoder's same layer gives it self-attention and feed-forward network.

    Norms, positions and cross-attention are its own (Raffel et al. 2020, §3.2.2: "encoder-decoder, shared").
    """

    def build(self, config: ModelConfig, *, causal: bool, encoder: nn.Module | None) -> nn.Module:
        from trivium.models.stack import PlainStack

        assert encoder is not None
        stack = PlainStack(self, config, causal=causal)
        for layer, block in enumerate(stack.blocks):
            for part in TIED:  # one storage, to which both uses add their gradients
                setattr(block, part, encoder.get_submodule(f"blocks.{layer}.{part}"))
        return stack

    def costs(self, config: ModelConfig, *, causal: bool) -> Iterator[Place]:
        for name, problem in self._unlike(config, causal=causal):
            yield name, partial(_refuse, problem)
        for name, cost in BlockStack.costs(self, config, causal=causal):
            yield name, without_parameters(cost) if name.rsplit(".", 1)[-1] in TIED else cost

    def _unlike(self, config: ModelConfig, *, causal: bool) -> Iterator[tuple[str, str]]:
        """What keeps this stack from using the encoder's modules: the key to change, and why."""
        encoder = config.encoder
        if not causal:
            yield "kind", "only a decoder is tied to the other side; set it to plain"
        elif not isinstance(encoder, BlockStack):
            yield "kind", "tied shares the blocks of an encoder, and there are none; set it to plain"
        elif encoder.layers != self.layers:
            yield "layers", f"it is tied to {encoder.layers} layers of the encoder, not {self.layers}; set both alike"
        else:
            for layer, pair in enumerate(zip(encoder.blocks(), self.blocks(), strict=True)):
                if part := _difference(*pair):
                    yield "kind", f"tied blocks are alike, but those of layer {layer} differ in {part}; set both alike"
                    return


def _difference(one: AnyBlock, other: AnyBlock) -> str:
    """The first place that keeps two blocks from having modules in common."""
    if type(one) is not type(other):
        return "kind"
    return next((part for part in TIED if not _is_same(getattr(one, part, None), getattr(other, part, None))), "")


def _is_same(one: object, other: object) -> bool:
    return one is not None and one == other


def _refuse(problem: str) -> Cost:
    raise ConfigError(problem)


STACKS: dict[str, type[AnyStack]] = {"none": NoStack, "plain": Stack, "tied": TiedStack}

Family = Literal["encoder", "decoder", "encoder-decoder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that decides a model's function except its weights."""

    width: int = 256
    context: int = 256  # the longest input
    vocab: int = 0  # 0 means as many as the tokenizer has
    embedding: Embedding = place(EMBEDDINGS, TokenEmbeddingOptions())
    encoder: AnyStack = place(STACKS, NoStack())
    decoder: AnyStack = place(STACKS, Stack())
    output: Output = place(OUTPUTS, SoftmaxOptions())
    sentence: Sentence | NoPart = place({"none": NoPart, **SENTENCES}, NoPart())
    boundary: Boundary | NoPart = place({"none": NoPart, **BOUNDARIES}, NoPart())
    init: Init = place(INITS, Gpt2())

    def __post_init__(self) -> None:
        accept(self)
        for name, value, least in (("width", self.width, 1), ("context", self.context, 1), ("vocab", self.vocab, 0)):
            at_least(name, value, least, MOST)
        if not self.layers:
            raise ConfigError("decoder.kind: a model needs an encoder, a decoder or both; try plain")
        _refusals(self)

    @property
    def family(self) -> Family:
        if self.decoder.layers:
            return "encoder-decoder" if self.encoder.layers else "decoder"
        return "encoder"

    @property
    def layers(self) -> int:
        return self.encoder.layers + self.decoder.layers

    @property
    def tied(self) -> bool:
        """Whether the output reads the matrix of the main embedding: that of the only side, or the decoder's."""
        return self.embedding.tie in ("all", "output")

    @property
    def one_input(self) -> bool:
        """Whether an encoder-decoder has one matrix for both of its inputs."""
        return self.embedding.tie in ("all", "inputs")

    def site(self, *, layer: int = 0, depth: int = 1, causal: bool = True) -> Site:
        return Site(width=self.width, context=self.context, vocab=self.vocab, layer=layer, depth=depth, causal=causal)

    def costs(self) -> dict[str, Cost]:
        """The cost of the whole model by place: embedding, position, attention, cross, feedforward, norm, output, …"""
        total: dict[str, Cost] = {}
        for place_name, cost in _costs(self):
            name = place_name.rsplit(".", 1)[-1]
            total[name] = total.get(name, Cost()).plus(cost())
        return total

    def kept(self, target: float = 1.0) -> int:
        """The elements per token that are kept for the backward pass.

        A decoder beside an encoder reads `target` tokens for each of the source.
        """
        share = target if self.family == "encoder-decoder" else 1.0
        return round(sum(cost().kept * (share if at.startswith("decoder") else 1) for at, cost in _costs(self)))

    def parameters(self) -> int:
        """The exact number of distinct parameters, tied ones once."""
        return sum(cost.parameters for cost in self.costs().values())


def inner(block: AnyBlock, site: Site) -> Site:
    """The site of a block's position part, which also knows the heads of its attention."""
    _, key, value = block.attention.cache_shape(site)
    return replace(site, heads=block.attention.heads, head=key, value=value)


def sharing(stack: BlockStack, site: Site) -> list[int]:
    """For every layer the first one whose position module it uses: its own, or that of equal options before it."""

    def same(one: AnyBlock, other: AnyBlock) -> bool:
        if one.position != other.position or one.position.scope == "layer":
            return False
        return one.position.scope == "stack" or _heads(one, site) == _heads(other, site)

    blocks, found = stack.blocks(), list[int]()
    for layer, block in enumerate(blocks):
        found.append(next((other for other in found if same(blocks[other], block)), layer))
    return found


def _heads(block: AnyBlock, site: Site) -> tuple[int, ...]:
    try:
        return (block.attention.heads, *block.attention.cache_shape(site)[1:])
    except ConfigError:  # the attention itself says what is wrong with it
        return ()


def _costs(config: ModelConfig) -> Iterator[Place]:
    """Every part of the model: its dotted place, and a function that gives its cost or refuses."""
    top = config.site()
    yield "embedding", lambda: config.embedding.cost(top, tied=False)
    if config.family == "encoder-decoder":
        yield "embedding", lambda: config.embedding.cost(top, tied=config.one_input)
    for side, causal in (("encoder", False), ("decoder", True)):
        stack: AnyStack = getattr(config, side)
        for name, cost in stack.costs(config, causal=causal):
            yield f"{side}.{name}", cost
    yield "output", lambda: config.output.cost(top, tied=config.tied)
    sentence = config.sentence
    if not isinstance(sentence, NoPart):
        yield "sentence", lambda: sentence.cost(top)
    boundary = config.boundary
    if not isinstance(boundary, NoPart):
        yield "boundary", lambda: boundary.cost(top)


def without_parameters(cost: Callable[[], Cost]) -> Callable[[], Cost]:
    """The cost of a part that uses the parameters of another."""
    return lambda: cost()._replace(parameters=0)


def _position_cost(block: AnyBlock, site: Site) -> Cost:
    return block.position.cost(inner(block, site))


def _kept(block: AnyBlock, site: Site) -> Cost:
    return Cost(kept=_position_cost(block, site).kept)


def _refusals(config: ModelConfig) -> None:
    """Ask every part for its cost, so that one that cannot stand where it is says so now, by its dotted key."""
    errors = [*_misplaced_cross(config), *_misplaced_heads(config)]
    for place_name, cost in _costs(config):
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
        crossed = stack.reads_source
        wanted = side == "decoder" and config.family == "encoder-decoder"
        if crossed and not wanted:
            yield ConfigError(
                f"{side}.block.cross: only the decoder of an encoder-decoder has a source; set it to none"
            )
        if wanted and not crossed:
            yield ConfigError(
                f"{side}.block.cross: without it the decoder never sees the encoder; set it to multi-head"
            )


def _misplaced_heads(config: ModelConfig) -> Iterator[ConfigError]:
    if config.family == "encoder":
        return
    if not isinstance(config.sentence, NoPart):
        yield ConfigError("sentence: only an encoder's first state has read the whole text; set it to none")
    if not isinstance(config.boundary, NoPart):
        yield ConfigError("boundary: only an encoder has read both sides of a span; set it to none")
