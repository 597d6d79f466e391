"""The model of all three families: plain tensors in, States out; the output part turns states into logits or loss."""

# B batch, T tokens, S keys (cached and new), D width

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from trivium.errors import ConfigError, RequestError, printable
from trivium.models.config import ModelConfig
from trivium.models.stack import PlainStack
from trivium.models.unwritten import tracked
from trivium.parts.cache import Cache, SlotMask
from trivium.parts.declared import undeclared
from trivium.parts.embeddings import TokenEmbedding
from trivium.parts.losses import Losses, merge, split
from trivium.parts.masks import AnyMask, Mask
from trivium.parts.output import Head
from trivium.parts.sharded import fill, own_shard, whole
from trivium.parts.site import NoPart

Lay = Callable[[nn.Module], None]  # what is done to a model between building and filling it: device and fast classes


class Shaped(Protocol):
    """A tensor, or what will be one."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype | None: ...


class States(NamedTuple):
    """What a forward pass gives: hidden states [B, T, D], and the losses of the parts that have some."""

    hidden: Tensor
    losses: Losses


class Transformer(nn.Module):
    """Encoder, decoder or both, built from one ModelConfig. Use `build` to get one with its weights drawn."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab < 1:
            raise ConfigError("model.vocab: the size of the vocabulary is not known yet; set it or give a tokenizer")
        self.config = config
        site = config.site()
        self.embedding = config.embedding.build(site)
        self.source_embedding: TokenEmbedding | None = None
        if config.family == "encoder-decoder":
            self.source_embedding = config.embedding.build(site)
            if config.one_input:
                self.source_embedding.weight = self.embedding.weight
        encoder = config.encoder.build(config, causal=False, encoder=None)
        self.encoder = cast("PlainStack | None", encoder)
        self.decoder = cast("PlainStack | None", config.decoder.build(config, causal=True, encoder=encoder))
        self.output = config.output.build(site, self.embedding.weight if config.tied else None)
        self.sentence = None if isinstance(config.sentence, NoPart) else config.sentence.build(site)
        self.boundary: nn.Module | None = None
        if not isinstance(config.boundary, NoPart):
            self.boundary = config.boundary.build(site, self.embedding.weight)

    @property
    def head(self) -> Head:
        """The output part, by what it can do."""
        return cast(Head, self.output)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        prefix: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        source: Tensor | None = None,
        source_padding: Tensor | None = None,
        source_positions: Tensor | None = None,
        source_documents: Tensor | None = None,
    ) -> States:
        """The states of `tokens` [B, T].

        `padding` [B, S] is True at real tokens, cached ones included; `positions` [B, T] default to the running
        index; `documents` [B, S] keeps packed documents apart; the first `prefix` [B] tokens of a decoder see each
        other; `segments` [B, T] number the parts of an input; `source` is the encoder's input where there are two,
        read when a cache is new and remembered there. Where it is packed too, a target sees only the document of
        `source_documents` [B, S] that has its own number.
        """
        if source_documents is not None and (documents is None or cache is not None):
            raise RequestError("packed sources need documents= of the targets too, and no cache")
        self._check_source(source, cache)
        memory = None if cache is None else cache.memory
        losses: Losses = {}
        if memory is not None and cache is not None:
            source_padding = cache.memory_padding
        elif source is not None:
            memory, losses = self._encode(source, source_padding, source_positions, source_documents)
            if cache is not None:
                cache.memory, cache.memory_padding = memory, source_padding
        side = self.decoder if self.decoder is not None else self.encoder
        assert side is not None
        mask: AnyMask = Mask(causal=self.decoder is not None, prefix=prefix, padding=padding, documents=documents)
        if cache is not None and cache.slots is not None:
            mask = SlotMask(slots=cache.slots)
        running = self._running(0 if cache is None else cache.length, tokens.shape[1], tokens.device)
        positions = running if positions is None else positions
        x_BTD = self.embedding(tokens, segments, lambda x: side.embed(x, positions))
        packed = source_documents is not None
        across = Mask(padding=source_padding, documents=source_documents, asking=documents if packed else None)
        hidden, more = split(side(x_BTD, positions, mask, cache, memory, across))
        return States(hidden, merge(losses, more) if losses else more)

    def encode(
        self,
        source: Tensor,
        padding: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """What the decoder of an encoder-decoder reads of its source [B, S]: the encoder's last states [B, S, D]."""
        return self._encode(source, padding, positions, documents)[0]

    def _encode(
        self, source: Tensor, padding: Tensor | None, positions: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Losses]:
        """The encoder's last states and the losses of its parts."""
        assert self.source_embedding is not None
        encoder = self.encoder
        assert encoder is not None
        running = self._running(0, source.shape[1], source.device)
        positions = running if positions is None else positions
        x_BSD = self.source_embedding(source, None, lambda x: encoder.embed(x, positions))
        return split(encoder(x_BSD, positions, Mask(padding=padding, documents=documents)))

    def _check_source(self, source: Tensor | None, cache: Cache | None) -> None:
        """An encoder-decoder needs a source, in the first pass at least; others take none."""
        if self.source_embedding is None and source is not None:
            raise RequestError(f"a model of the {self.config.family} family takes no source")
        if self.source_embedding is not None and source is None and (cache is None or cache.memory is None):
            raise RequestError("an encoder-decoder needs a source: pass source=")

    def _running(self, start: int, length: int, device: torch.device) -> Tensor:
        if start + length > self.config.context:
            raise RequestError(f"{start + length} tokens are more than the model's context of {self.config.context}")
        return torch.arange(start, start + length, device=device)[None]

    @property
    def recompute(self) -> bool:
        """Whether training keeps only the residual stream between blocks and computes the rest again: less memory."""
        return any(side is not None and side.recompute for side in (self.encoder, self.decoder))

    @recompute.setter
    def recompute(self, value: bool) -> None:
        for side in (self.encoder, self.decoder):
            if side is not None:
                side.recompute = value

    @property
    def residual_dtype(self) -> torch.dtype | None:
        """The dtype of the residual stream in training; None leaves it as the embedding gives it."""
        return next((side.residual_dtype for side in (self.encoder, self.decoder) if side is not None), None)

    @residual_dtype.setter
    def residual_dtype(self, value: torch.dtype | None) -> None:
        for side in (self.encoder, self.decoder):
            if side is not None:
                side.residual_dtype = value

    def cache(self, rows: int, longest: int) -> Cache:
        """An empty cache for `rows` sequences of at most `longest` tokens."""
        if self.decoder is None:
            raise RequestError("an encoder sees its whole input at once, so it cannot generate token by token")
        return self.decoder.cache(rows, longest, own_shard(self.embedding.weight))  # a cache is never sharded


def build(config: ModelConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> Transformer:
    """A new model with its weights drawn from `seed`; on the meta device it only has shapes.

    A parameter that neither the constructor of its module nor the init fills is refused.
    """
    meta = torch.device(device).type == "meta"
    # Drawn on the CPU whatever the device: the same seed gives the same weights everywhere.
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta") if meta else contextlib.nullcontext(), _seeded(seed), tracked() as unwritten:
        model = Transformer(config)
        _refuse_undeclared(model)
        _refuse_without_context(model)
        try:
            config.init.apply(model, width=config.width, layers=config.layers, generator=generator)
        except (NotImplementedError, RuntimeError):
            if not meta:
                raise
            return model  # an init that looks at values cannot show here what it would fill
    unwritten.refuse_in(model)
    return model.to(device)


def _refuse_undeclared(model: nn.Module) -> None:
    """Refuse a parameter that says nothing of itself: neither the init nor an optimizer would know what it is."""
    if names := undeclared(model):
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise ConfigError(
            f"model: nobody declares the parameter {names[0]}{more}; name it in `declares` of its module, as a matrix, "
            "a table or a vector (trivium.parts.declared), or make it a Linear"
        )


def _refuse_without_context(model: nn.Module) -> None:
    """Refuse a feed-forward part from outside that does not take the context."""
    for name, module in model.named_modules():
        if name.endswith(".feedforward"):
            try:
                inspect.signature(module.forward).bind(None, None)
            except TypeError:
                raise ConfigError(
                    f"model: {type(module).__name__} is called as forward(x, ctx), and its forward does not take two "
                    "arguments; add `ctx`, which says what is padding"
                ) from None


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """What the constructors of parts draw by themselves depends on the seed too; the process's own draws go on."""
    mixed = hashlib.sha256(f"parts {seed}".encode()).digest()  # other numbers than those of the init
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(mixed[:7], "big"))
        yield


def shapes_of(config: ModelConfig) -> Transformer:
    """A model on the meta device, to compare names and shapes with those of a file: who fills it does not matter."""
    with torch.device("meta"):
        return Transformer(config)


def empty(config: ModelConfig) -> Transformer:
    """A model whose weights are about to be loaded: memory that nobody has written takes no room yet."""
    return Transformer(config)


def weights(model: nn.Module, *, shards: Literal["kept", "gathered"] = "kept") -> dict[str, Tensor]:
    """The distinct tensors that a checkpoint holds, by name; a tied matrix appears once, under its first name.

    Those of a sharded model are DTensors, of which a process has a shard; `gathered` they are whole in every process,
    and all of them must ask.
    """
    saved = model.state_dict()  # before the parameters: FSDP2 then takes back what a forward pass has gathered
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    alias = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found = {**parameters, **{name: tensor for name, tensor in saved.items() if name not in alias}}
    return found if shards == "kept" else {name: whole(tensor) for name, tensor in found.items()}


def check_weights(model: nn.Module, tensors: Mapping[str, Shaped]) -> None:
    """Refuse a missing, extra or misshapen tensor; a model on the meta device costs no memory for that."""
    own = weights(model)
    wrong = [f"{name} is missing" for name in own if name not in tensors]
    wrong += [f"{printable(name, 100)} is not part of this model" for name in tensors if name not in own]
    wrong += [
        f"{name} has shape {list(tensors[name].shape)}, not {list(tensor.shape)}"
        for name, tensor in own.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(tensor.shape)
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ConfigError(f"the weights do not fit the configuration: {wrong[0]}{more}")


def load_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fill a model, sharded or not; tensors that do not fit are refused before any is copied."""
    check_weights(model, tensors)
    with torch.no_grad():
        for name, tensor in weights(model).items():
            fill(tensor, tensors[name])


def with_vocab(config: ModelConfig, size: int) -> ModelConfig:
    """The configuration with its vocabulary filled in from a tokenizer, if it left that open."""
    if config.vocab == 0:
        return replace(config, vocab=size)
    if config.vocab < size:
        raise ConfigError(f"model.vocab: {config.vocab} is smaller than the tokenizer's {size}; set it to 0")
    return config
