"""Small models of every part in every family, and the presets made tiny: what the battery runs over.

A new part adds a case; `test_battery.py` fails if a kind of any place has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from trivium.config import digest
from trivium.models.config import AnyStack, BlockStack, ModelConfig, NoStack, Stack, TiedStack
from trivium.models.options import AnyBlock, Block, Parallel
from trivium.models.presets import PRESETS
from trivium.parts.init import T5, FanIn, Gpt, Gpt2, Xavier
from trivium.parts.options.attention import Attention, MultiHeadOptions
from trivium.parts.options.boundary import SpanBoundaryOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import Activation, GluOptions, MlpOptions
from trivium.parts.options.norms import LayerNormOptions, RMSNormOptions
from trivium.parts.options.output import MaskedOutputOptions, NoOutputOptions, SoftmaxOptions
from trivium.parts.options.positions import (
    AlibiOptions,
    BothOptions,
    BucketOptions,
    LearnedOptions,
    NoPositionOptions,
    Position,
    RotaryOptions,
    ShawOptions,
    SinusoidalOptions,
)
from trivium.parts.options.residual import PostOptions, SandwichOptions
from trivium.parts.options.scaling import LinearScaling, Llama3, Ntk, Scaling, Yarn
from trivium.parts.options.sentence import PoolerOptions
from trivium.parts.site import NoPart

WIDTH, CONTEXT, VOCAB, LAYERS = 32, 16, 50, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small model by the name of what is special about it."""

    name: str
    config: ModelConfig

    @property
    def causal(self) -> bool:
        return self.config.family != "encoder"

    @property
    def crossed(self) -> bool:
        return self.config.family == "encoder-decoder"

    def blocks(self) -> list[AnyBlock]:
        sides = (self.config.encoder, self.config.decoder)
        return [block for side in sides if isinstance(side, BlockStack) for block in side.blocks()]


Family = Literal["decoder", "encoder", "encoder-decoder"]
FAMILIES: tuple[Family, ...] = ("decoder", "encoder", "encoder-decoder")

# What a family has no use for, by the beginning of the case's name; the configuration refuses it in a sentence.
OUT_OF_PLACE: dict[str, tuple[tuple[Family, ...], str]] = {
    "parallel": (("encoder-decoder",), "nobody has published where a source would join a parallel block"),
    "sentence": (("decoder", "encoder-decoder"), "only an encoder's first state has read the whole text"),
    "tied": (("decoder", "encoder"), "a model with one side has no second input to tie"),
    "stack tied": (("decoder", "encoder"), "a model with one side has no encoder to be tied to"),
    "boundary": (("decoder", "encoder-decoder"), "what a decoder writes has no token to its right"),
}


def _model(family: Family, **places: Any) -> ModelConfig:
    """A small model of a family with these places of its blocks or of the model changed."""
    top = {name: places.pop(name) for name in ("embedding", "output", "sentence", "boundary", "init") if name in places}
    last: type[Stack | TiedStack] = places.pop("last", Stack)  # the kind of the decoder, or of the only side
    block: AnyBlock = places.pop("block") if "block" in places else Block(**places)
    sides: dict[str, AnyStack] = {"encoder": NoStack(), "decoder": NoStack()}
    if family != "encoder-decoder":
        sides[family] = last(layers=LAYERS, block=block)
    else:
        sides["encoder"] = Stack(layers=LAYERS, block=block)
        crossed = block  # only a standard block has a place for a source; the configuration refuses the others
        if isinstance(block, Block):
            assert isinstance(block.attention, MultiHeadOptions)
            crossed = replace(block, cross=replace(block.attention, window=0))
        sides["decoder"] = last(layers=LAYERS, block=crossed)
    return ModelConfig(
        width=WIDTH, context=CONTEXT, vocab=VOCAB, encoder=sides["encoder"], decoder=sides["decoder"], **top
    )


def _mixed() -> ModelConfig:
    """Kinds of block in turn, each with positions and a window of its own."""
    turned = Block(
        attention=MultiHeadOptions(heads=4, groups=2, window=4),
        position=RotaryOptions(),
        feedforward=GluOptions(hidden=40),
    )
    wide = replace(turned, attention=MultiHeadOptions(heads=2, head=10))  # the same positions in heads of another size
    biased = Block(attention=MultiHeadOptions(heads=2), position=BucketOptions(buckets=8, distance=12))
    parallel = Parallel(position=ShawOptions(distance=3))
    named: dict[str, AnyBlock] = {"turned": turned, "wide": wide, "biased": biased, "parallel": parallel}
    stack = Stack(layers=5, block=Block(), pattern=("", *named), variants=named)
    return ModelConfig(width=WIDTH, context=CONTEXT, vocab=VOCAB, decoder=stack)


def shrunk(config: ModelConfig) -> ModelConfig:
    """A preset made tiny; what makes it itself stays, its ratio of heads to groups included."""
    encoder, decoder = _shrunk_side(config.encoder), _shrunk_side(config.decoder)
    return replace(config, width=WIDTH, context=CONTEXT, vocab=VOCAB, encoder=encoder, decoder=decoder)


def _shrunk_side(stack: AnyStack) -> AnyStack:
    return replace(stack, layers=LAYERS, block=_shrunk_block(stack.block)) if isinstance(stack, BlockStack) else stack


def _shrunk_block(block: AnyBlock) -> AnyBlock:
    assert isinstance(block, Block | Parallel)
    feedforward = block.feedforward
    if isinstance(feedforward, MlpOptions | GluOptions) and feedforward.hidden:
        feedforward = replace(feedforward, hidden=40)
    small = replace(block, attention=_shrunk_attention(block.attention), feedforward=feedforward)
    if isinstance(small, Block) and not isinstance(small.cross, NoPart):
        small = replace(small, cross=_shrunk_attention(small.cross))
    return small


def _shrunk_attention(attention: Attention) -> Attention:
    assert isinstance(attention, MultiHeadOptions)
    groups = 2 if attention.groups else 0
    heads = groups * attention.heads // attention.groups if groups else 4
    return replace(attention, heads=heads, groups=groups, head=8, window=5 if attention.window else 0)


def _parts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kind and option of every place, by a name and the places that it changes."""
    yield "plain", {}
    yield "biases", {"attention": MultiHeadOptions(bias="all")}
    yield "biases of inputs", {"attention": MultiHeadOptions(bias="inputs")}
    yield "biases turned", {"attention": MultiHeadOptions(bias="all"), "position": RotaryOptions()}
    yield "grouped", {"attention": MultiHeadOptions(heads=4, groups=2)}
    yield "multi-query", {"attention": MultiHeadOptions(heads=4, groups=1)}
    yield "qk-norm", {"attention": MultiHeadOptions(norm="rms", bias="all"), "position": RotaryOptions()}
    yield "free head sizes", {"attention": MultiHeadOptions(heads=3, head=10, value=6)}
    yield (
        "free head sizes grouped",
        {"attention": MultiHeadOptions(heads=4, groups=2, head=6, value=10), "position": RotaryOptions()},
    )
    yield "unscaled", {"attention": MultiHeadOptions(scale="none")}
    yield "window", {"attention": MultiHeadOptions(window=3)}
    yield "window turned", {"attention": MultiHeadOptions(window=4, groups=2), "position": RotaryOptions()}
    yield from ((f"positions {name}", {"position": position}) for name, position in _positions())
    yield (
        "shaw grouped",
        {"position": ShawOptions(distance=3), "attention": MultiHeadOptions(heads=4, groups=2, value=6, window=5)},
    )
    yield "t5 window", {"position": BucketOptions(), "attention": MultiHeadOptions(heads=4, groups=2, window=5)}
    yield "layer norm without bias", {"norm": LayerNormOptions(bias=False)}
    yield "rms norm", {"norm": RMSNormOptions()}
    yield "post-norm", {"residual": PostOptions()}
    yield "post-norm rms", {"residual": PostOptions(), "norm": RMSNormOptions()}
    yield "sandwich", {"residual": SandwichOptions()}
    yield "parallel", {"block": Parallel(attention=MultiHeadOptions(bias="all"))}
    yield (
        "parallel two norms",
        {"block": Parallel(norms="two", position=RotaryOptions(share=0.5), norm=RMSNormOptions())},
    )
    activations = get_args(Activation)
    yield from ((f"mlp {activation}", {"feedforward": MlpOptions(activation=activation)}) for activation in activations)
    yield from (
        (f"glu {activation}", {"feedforward": GluOptions(hidden=40, activation=activation)})
        for activation in activations
    )
    yield "mlp without bias", {"feedforward": MlpOptions(hidden=40, bias=False)}
    yield "glu with bias", {"feedforward": GluOptions(hidden=40, activation="gelu", bias=True)}
    yield "untied", {"embedding": TokenEmbeddingOptions(tie="none")}
    yield "tied inputs", {"embedding": TokenEmbeddingOptions(tie="inputs")}
    yield "tied output", {"embedding": TokenEmbeddingOptions(tie="output")}
    yield "scaled embedding", {"embedding": TokenEmbeddingOptions(scale="root"), "position": SinusoidalOptions()}
    yield "normed embedding", {"embedding": TokenEmbeddingOptions(norm=LayerNormOptions())}
    yield "segments", {"embedding": TokenEmbeddingOptions(segments=2, norm=RMSNormOptions())}
    yield "soft cap", {"output": SoftmaxOptions(cap=5.0)}
    yield "scaled output", {"output": SoftmaxOptions(scale="root", bias=True)}
    yield "masked head", {"output": MaskedOutputOptions()}
    yield (
        "masked head untied",
        {"output": MaskedOutputOptions(norm=RMSNormOptions()), "embedding": TokenEmbeddingOptions(tie="none")},
    )
    yield "no output", {"output": NoOutputOptions()}
    yield "no output untied", {"output": NoOutputOptions(), "embedding": TokenEmbeddingOptions(tie="none")}
    yield "sentence head", {"sentence": PoolerOptions()}
    yield "sentence head relu", {"sentence": PoolerOptions(classes=3, activation="relu"), "output": NoOutputOptions()}
    yield "sentence pooled only", {"sentence": PoolerOptions(classes=0)}
    yield "boundary head", {"boundary": SpanBoundaryOptions(rows=4, size=6)}
    yield "stack tied", {"last": TiedStack, "position": BucketOptions()}
    yield from ((f"init {type(init).__name__}", {"init": init}) for init in (Gpt(), Gpt2(), FanIn(), Xavier(), T5()))


def _positions() -> Iterator[tuple[str, Position]]:
    yield "none", NoPositionOptions()
    yield "learned with offset", LearnedOptions(offset=2)
    yield "sinusoidal", SinusoidalOptions()
    yield "sinusoidal halves", SinusoidalOptions(layout="halves", spacing="tensor2tensor")
    yield "shaw", ShawOptions(distance=4)
    yield "shaw keys per head", ShawOptions(distance=4, values="none", tables="per-head")
    yield "t5", BucketOptions()
    yield "alibi", AlibiOptions()
    yield "both", BothOptions(absolute=LearnedOptions(offset=2))
    yield "both computed", BothOptions(absolute=SinusoidalOptions(), relative=AlibiOptions())
    yield "both turned", BothOptions(relative=RotaryOptions())
    yield "rotary halves", RotaryOptions()
    yield "rotary interleaved", RotaryOptions(layout="interleaved")
    yield "rotary partial", RotaryOptions(share=0.5)
    scalings: dict[str, Scaling] = {
        "linear": LinearScaling(factor=4.0),
        "ntk": Ntk(factor=4.0),
        "yarn": Yarn(),
        "llama3": Llama3(),
    }
    yield from ((f"rotary {name}", RotaryOptions(scaling=scaling)) for name, scaling in scalings.items())


def _fits(name: str, family: Family) -> bool:
    return not any(name.startswith(start) and family in families for start, (families, _) in OUT_OF_PLACE.items())


PARTS = [
    Case(name=f"{family}: {name}", config=_model(family, **dict(places)))
    for name, places in _parts()
    for family in FAMILIES
    if _fits(name, family)
] + [Case(name="decoder: mixed", config=_mixed())]
SHRUNK = [Case(name=name, config=shrunk(maker())) for name, maker in PRESETS.items()]


def _distinct(cases: list[Case]) -> list[Case]:
    """The sizes of a system shrink to one model; the first stands for all."""
    first: dict[str, Case] = {}
    for case in cases:
        first.setdefault(digest(case.config), case)
    return list(first.values())


CASES = PARTS + _distinct(SHRUNK)
