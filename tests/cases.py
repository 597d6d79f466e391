"""Small models of every part in every family, and the presets made tiny: what the battery runs over.

A new part adds a case; `test_battery.py` fails if a kind of any place has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from trivium.config import digest
from trivium.models.config import AnyStack, ModelConfig, NoStack, Stack
from trivium.models.options import AnyBlock, Block, Parallel
from trivium.models.presets import PRESETS
from trivium.parts.init import T5, FanIn, Gpt, Gpt2, Xavier
from trivium.parts.options.attention import Attention, MultiHead
from trivium.parts.options.boundary import SpanBoundary
from trivium.parts.options.embeddings import Tokens
from trivium.parts.options.feedforward import Activation, Glu, Mlp
from trivium.parts.options.norms import LayerNorm, RMSNorm
from trivium.parts.options.output import MaskedHead, NoOutput, Softmax
from trivium.parts.options.positions import (
    Alibi,
    Both,
    Buckets,
    Learned,
    NoPositions,
    Position,
    Rotary,
    Shaw,
    Sinusoidal,
)
from trivium.parts.options.residual import Post, Sandwich
from trivium.parts.options.scaling import LinearScaling, Llama3, Ntk, Scaling, Yarn
from trivium.parts.options.sentence import Pooler
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
        return [block for side in sides if isinstance(side, Stack) for block in side.blocks()]


Family = Literal["decoder", "encoder", "encoder-decoder"]
FAMILIES: tuple[Family, ...] = ("decoder", "encoder", "encoder-decoder")

# What a family has no use for, by the beginning of the case's name; the configuration refuses it in a sentence.
OUT_OF_PLACE: dict[str, tuple[tuple[Family, ...], str]] = {
    "parallel": (("encoder-decoder",), "nobody has published where a source would join a parallel block"),
    "sentence": (("decoder", "encoder-decoder"), "only an encoder's first state has read the whole text"),
    "tied": (("decoder", "encoder"), "a model with one side has no second input to tie"),
    "shared": (("decoder", "encoder"), "a model with one side has no other stack to share with"),
    "boundary": (("decoder", "encoder-decoder"), "what a decoder writes has no token to its right"),
}


def _model(family: Family, **places: Any) -> ModelConfig:
    """A small model of a family with these places of its blocks or of the model changed."""
    top = {
        name: places.pop(name)
        for name in ("embedding", "output", "sentence", "boundary", "share", "init")
        if name in places
    }
    block: AnyBlock = places.pop("block") if "block" in places else Block(**places)
    side = Stack(layers=LAYERS, block=block)
    sides: dict[str, AnyStack] = {"encoder": NoStack(), "decoder": NoStack()}
    if family != "decoder":
        sides["encoder"] = side
    if family == "decoder":
        sides["decoder"] = side
    if family == "encoder-decoder":
        crossed = block  # only a standard block has a place for a source; the configuration refuses the others
        if isinstance(block, Block):
            assert isinstance(block.attention, MultiHead)
            crossed = replace(block, cross=replace(block.attention, window=0))
        sides["decoder"] = replace(side, block=crossed)
    return ModelConfig(
        width=WIDTH, context=CONTEXT, vocab=VOCAB, encoder=sides["encoder"], decoder=sides["decoder"], **top
    )


def _mixed() -> ModelConfig:
    """Kinds of block in turn, each with positions and a window of its own."""
    turned = Block(attention=MultiHead(heads=4, groups=2, window=4), position=Rotary(), feedforward=Glu(hidden=40))
    wide = replace(turned, attention=MultiHead(heads=2, head=10))  # the same positions in heads of another size
    biased = Block(attention=MultiHead(heads=2), position=Buckets(buckets=8, distance=12))
    parallel = Parallel(position=Shaw(distance=3))
    named: dict[str, AnyBlock] = {"turned": turned, "wide": wide, "biased": biased, "parallel": parallel}
    stack = Stack(layers=5, block=Block(), pattern=("", *named), variants=named)
    return ModelConfig(width=WIDTH, context=CONTEXT, vocab=VOCAB, decoder=stack)


def shrunk(config: ModelConfig) -> ModelConfig:
    """A preset made tiny; what makes it itself stays, its ratio of heads to groups included."""
    encoder, decoder = _shrunk_side(config.encoder), _shrunk_side(config.decoder)
    return replace(config, width=WIDTH, context=CONTEXT, vocab=VOCAB, encoder=encoder, decoder=decoder)


def _shrunk_side(stack: AnyStack) -> AnyStack:
    return replace(stack, layers=LAYERS, block=_shrunk_block(stack.block)) if isinstance(stack, Stack) else stack


def _shrunk_block(block: AnyBlock) -> AnyBlock:
    assert isinstance(block, Block | Parallel)
    feedforward = block.feedforward
    if isinstance(feedforward, Mlp | Glu) and feedforward.hidden:
        feedforward = replace(feedforward, hidden=40)
    small = replace(block, attention=_shrunk_attention(block.attention), feedforward=feedforward)
    if isinstance(small, Block) and not isinstance(small.cross, NoPart):
        small = replace(small, cross=_shrunk_attention(small.cross))
    return small


def _shrunk_attention(attention: Attention) -> Attention:
    assert isinstance(attention, MultiHead)
    groups = 2 if attention.groups else 0
    heads = groups * attention.heads // attention.groups if groups else 4
    return replace(attention, heads=heads, groups=groups, head=8, window=5 if attention.window else 0)


def _parts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kind and option of every place, by a name and the places that it changes."""
    yield "plain", {}
    yield "biases", {"attention": MultiHead(bias="all")}
    yield "biases of inputs", {"attention": MultiHead(bias="inputs")}
    yield "biases turned", {"attention": MultiHead(bias="all"), "position": Rotary()}
    yield "grouped", {"attention": MultiHead(heads=4, groups=2)}
    yield "multi-query", {"attention": MultiHead(heads=4, groups=1)}
    yield "qk-norm", {"attention": MultiHead(norm="rms", bias="all"), "position": Rotary()}
    yield "free head sizes", {"attention": MultiHead(heads=3, head=10, value=6)}
    yield "free head sizes grouped", {"attention": MultiHead(heads=4, groups=2, head=6, value=10), "position": Rotary()}
    yield "unscaled", {"attention": MultiHead(scale="none")}
    yield "window", {"attention": MultiHead(window=3)}
    yield "window turned", {"attention": MultiHead(window=4, groups=2), "position": Rotary()}
    yield from ((f"positions {name}", {"position": position}) for name, position in _positions())
    yield "shaw grouped", {"position": Shaw(distance=3), "attention": MultiHead(heads=4, groups=2, value=6, window=5)}
    yield "t5 window", {"position": Buckets(), "attention": MultiHead(heads=4, groups=2, window=5)}
    yield "layer norm without bias", {"norm": LayerNorm(bias=False)}
    yield "rms norm", {"norm": RMSNorm()}
    yield "post-norm", {"residual": Post()}
    yield "post-norm rms", {"residual": Post(), "norm": RMSNorm()}
    yield "sandwich", {"residual": Sandwich()}
    yield "parallel", {"block": Parallel(attention=MultiHead(bias="all"))}
    yield "parallel two norms", {"block": Parallel(norms="two", position=Rotary(share=0.5), norm=RMSNorm())}
    activations = get_args(Activation)
    yield from ((f"mlp {activation}", {"feedforward": Mlp(activation=activation)}) for activation in activations)
    yield from (
        (f"glu {activation}", {"feedforward": Glu(hidden=40, activation=activation)}) for activation in activations
    )
    yield "mlp without bias", {"feedforward": Mlp(hidden=40, bias=False)}
    yield "glu with bias", {"feedforward": Glu(hidden=40, activation="gelu", bias=True)}
    yield "untied", {"embedding": Tokens(tie="none")}
    yield "tied inputs", {"embedding": Tokens(tie="inputs")}
    yield "tied output", {"embedding": Tokens(tie="output")}
    yield "scaled embedding", {"embedding": Tokens(scale="root"), "position": Sinusoidal()}
    yield "normed embedding", {"embedding": Tokens(norm=LayerNorm())}
    yield "segments", {"embedding": Tokens(segments=2, norm=RMSNorm())}
    yield "soft cap", {"output": Softmax(cap=5.0)}
    yield "scaled output", {"output": Softmax(scale="root", bias=True)}
    yield "masked head", {"output": MaskedHead()}
    yield "masked head untied", {"output": MaskedHead(norm=RMSNorm()), "embedding": Tokens(tie="none")}
    yield "no output", {"output": NoOutput()}
    yield "no output untied", {"output": NoOutput(), "embedding": Tokens(tie="none")}
    yield "sentence head", {"sentence": Pooler()}
    yield "sentence head relu", {"sentence": Pooler(classes=3, activation="relu"), "output": NoOutput()}
    yield "sentence pooled only", {"sentence": Pooler(classes=0)}
    yield "boundary head", {"boundary": SpanBoundary(rows=4, size=6)}
    yield "shared stacks", {"share": "stacks", "position": Buckets()}
    yield from ((f"init {type(init).__name__}", {"init": init}) for init in (Gpt(), Gpt2(), FanIn(), Xavier(), T5()))


def _positions() -> Iterator[tuple[str, Position]]:
    yield "none", NoPositions()
    yield "learned with offset", Learned(offset=2)
    yield "sinusoidal", Sinusoidal()
    yield "sinusoidal halves", Sinusoidal(layout="halves", spacing="tensor2tensor")
    yield "shaw", Shaw(distance=4)
    yield "shaw keys per head", Shaw(distance=4, values="none", tables="per-head")
    yield "t5", Buckets()
    yield "alibi", Alibi()
    yield "both", Both(absolute=Learned(offset=2))
    yield "both computed", Both(absolute=Sinusoidal(), relative=Alibi())
    yield "both turned", Both(relative=Rotary())
    yield "rotary halves", Rotary()
    yield "rotary interleaved", Rotary(layout="interleaved")
    yield "rotary partial", Rotary(share=0.5)
    scalings: dict[str, Scaling] = {
        "linear": LinearScaling(factor=4.0),
        "ntk": Ntk(factor=4.0),
        "yarn": Yarn(),
        "llama3": Llama3(),
    }
    yield from ((f"rotary {name}", Rotary(scaling=scaling)) for name, scaling in scalings.items())


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
