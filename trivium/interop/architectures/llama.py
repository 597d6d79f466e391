"""LLaMA 1 to 3, Mistral, Qwen2, Qwen3 and their descendants: pre-norm with RMSNorm, gated, rotary."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from trivium.interop.architectures import rope
from trivium.interop.architectures.architecture import Architecture, first_block, like, tie
from trivium.interop.fields import ACTIVATIONS, HEADS, Fields, spelling
from trivium.interop.names import Rules, attention, same
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.parts.init import Gpt
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.options.norms import RMSNormOptions
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.options.residual import PreOptions

QK_EPS = 1e-6  # of our norm of queries and keys; theirs has that of all norms


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One architecture of the line: its name, its defaults in `transformers` and what it adds to LLaMA."""

    kind: str
    model: str  # the class of `transformers`
    vocab: int
    hidden: int
    context: int
    groups: int = 0  # 0: as many as heads
    head: int = 0  # 0: width / heads
    eps: float = 1e-6
    whole: bool = False  # the width must be a multiple of the heads, whatever the size of a head
    rope: Literal["optional", "needed"] = "optional"  # needed: without settings it is one that we do not have
    bias: Literal["setting", "inputs", "none"] = "none"  # of attention; inputs: always of queries, keys and values
    mlp_bias: bool = False  # whether a setting can give the feed-forward network one
    window: Literal["none", "all", "layers"] = "none"  # which layers may have one
    norm: Literal["none", "rms"] = "none"  # of queries and keys
    gated: bool = True
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")  # the second is before the feed-forward

    def read(self, fields: Fields, found: Collection[str]) -> ModelConfig:
        width, context = fields.integer("hidden_size", 4096), fields.integer("max_position_embeddings", self.context)
        eps = fields.number("rms_norm_eps", self.eps)
        if self.norm == "rms" and eps != QK_EPS:
            raise fields.refusal("rms_norm_eps", eps, f"the norm of queries and keys has {QK_EPS} in trivium")
        if self.whole and width % fields.integer("num_attention_heads", 32, most=HEADS):
            raise fields.refusal("hidden_size", width, "it must be a multiple of num_attention_heads")
        if self.rope == "needed" and "rope_parameters" not in fields and "rope_scaling" not in fields:
            raise fields.refusal("rope_parameters", None, "it must be a table")
        fields.skip("pretraining_tp", "is_llama_config")  # how it was trained
        for name in ("rope_interleaved", "use_mrope"):
            fields.only(name, False)
        block = Block(
            attention=self._attention(fields),
            feedforward=self._feedforward(fields),
            norm=RMSNormOptions(eps=eps),
            residual=PreOptions(),
            position=rope.read(fields, context),
        )
        layers = fields.integer("num_hidden_layers", 32, most=10_000)
        return ModelConfig(
            width=width,
            context=context,
            vocab=fields.integer("vocab_size", self.vocab),
            embedding=TokenEmbeddingOptions(tie=tie(fields, False)),
            decoder=self._stack(fields, block, layers, context),
            init=Gpt(),
        )

    def _attention(self, fields: Fields) -> MultiHeadOptions:
        heads = fields.integer("num_attention_heads", 32, most=HEADS)
        biased = self.bias == "setting" and fields.flag("attention_bias", False)
        fields.skip("attention_bias")  # `transformers` does not read it either where it is no setting
        return MultiHeadOptions(
            heads=heads,
            groups=fields.integer("num_key_value_heads", self.groups or heads, null=heads, most=HEADS),
            head=fields.integer("head_dim", self.head, least=0, most=HEADS),
            bias="inputs" if self.bias == "inputs" else "all" if biased else "none",
            norm=self.norm,
            dropout=fields.number("attention_dropout", 0.0, most=1),
        )

    def _feedforward(self, fields: Fields) -> GluOptions | MlpOptions:
        hidden = fields.integer("intermediate_size", self.hidden)
        activation = fields.choice("hidden_act", "silu" if self.gated else "xielu", ACTIVATIONS)
        if not self.gated:
            return MlpOptions(hidden=hidden, activation=activation, bias=False)
        bias = self.mlp_bias and fields.flag("mlp_bias", False)
        return GluOptions(hidden=hidden, activation=activation, bias=bias)

    def _stack(self, fields: Fields, block: Block, layers: int, context: int) -> Stack:
        """All layers alike, or some with a window."""
        windows = self._windows(fields, layers, context)
        if len(set(windows)) == 1:
            return Stack(layers=layers, block=_narrowed(block, windows[0]))
        return Stack(
            layers=layers,
            block=block,
            pattern=tuple("window" if window else "" for window in windows),
            variants={"window": _narrowed(block, max(windows))},
        )

    def _windows(self, fields: Fields, layers: int, context: int) -> list[int]:
        kinds = fields.words("layer_types")
        if self.window == "all":
            fields.only("layer_types", ["sliding_attention"] * layers)
            return [fields.integer("sliding_window", 4096, null=0, least=0)] * layers
        if self.window == "none":
            fields.only("layer_types", ["full_attention"] * layers)
            # `transformers` has no mask for it, but a cache that forgets what lies before it: two models in one
            if fields.integer("sliding_window", context, least=0) < context:
                fields.only("sliding_window")
            return [0] * layers
        window = fields.integer("sliding_window", 4096, null=0, least=0)
        first = fields.integer("max_window_layers", 28, least=0)
        if not fields.flag("use_sliding_window", False):
            window = 0
        names = {"full_attention": 0, "sliding_attention": window}
        if kinds and (len(kinds) != layers or not names.keys() >= set(kinds)):
            raise fields.refusal("layer_types", kinds, f"it must name {' or '.join(names)} for each layer")
        return [names[kind] for kind in kinds] or [window if layer >= first else 0 for layer in range(layers)]

    def write(self, config: ModelConfig) -> dict[str, Any]:
        block = first_block(config.decoder)
        heads = like(block.attention, MultiHeadOptions)
        site = config.site()
        feedforward = like(block.feedforward, GluOptions) if self.gated else like(block.feedforward, MlpOptions)
        table: dict[str, Any] = {
            "model_type": self.kind,
            "architectures": [self.model],
            "vocab_size": config.vocab,
            "hidden_size": config.width,
            "intermediate_size": feedforward.size(site),
            "num_hidden_layers": config.decoder.layers,
            "num_attention_heads": heads.heads,
            "num_key_value_heads": heads.groups or heads.heads,
            "head_dim": heads.head_size(site),
            "hidden_act": spelling(feedforward.activation),
            "max_position_embeddings": config.context,
            "rms_norm_eps": like(block.norm, RMSNormOptions).eps if self.norm == "none" else QK_EPS,
            "rope_parameters": rope.write(like(block.position, RotaryOptions)),
            "attention_dropout": heads.dropout,
            "tie_word_embeddings": config.tied,
        }
        if self.bias == "setting":
            table["attention_bias"] = heads.bias == "all"
        if self.mlp_bias:
            table["mlp_bias"] = feedforward.bias
        return table | self._written_windows(config)

    def _written_windows(self, config: ModelConfig) -> dict[str, Any]:
        windows = [block.attention.window for block in like(config.decoder, Stack).blocks()]
        widest = max(windows)
        if self.window == "all":
            return {"sliding_window": widest or None}
        if self.window == "none" or not widest:
            return {}
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        return {"use_sliding_window": True, "sliding_window": widest, "max_window_layers": 0, "layer_types": kinds}

    def rules(self, config: ModelConfig) -> Rules:
        mine, theirs = "decoder.blocks.*", "model.layers.*"
        names = {
            "embedding": "model.embed_tokens",
            **attention(f"{mine}.attention", f"{theirs}.self_attn", "q_proj k_proj v_proj o_proj"),
            f"{mine}.attention.query_norm": f"{theirs}.self_attn.q_norm",
            f"{mine}.attention.key_norm": f"{theirs}.self_attn.k_norm",
            **{f"{mine}.feedforward.{part}": f"{theirs}.mlp.{part}_proj" for part in ("gate", "up", "down")},
            f"{mine}.around_attention.norm": f"{theirs}.{self.norms[0]}",
            f"{mine}.around_feedforward.norm": f"{theirs}.{self.norms[1]}",
            "decoder.final": "model.norm",
            "output.project": "lm_head",
        }
        return Rules(
            table=same(names),
            copies={"lm_head.weight": "model.embed_tokens.weight"},
            ignored=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
            prefixes=("model.",),
        )


def _narrowed(block: Block, window: int) -> Block:
    return replace(block, attention=replace(like(block.attention, MultiHeadOptions), window=window))


LLAMA = Line(
    kind="llama",
    model="LlamaForCausalLM",
    vocab=32_000,
    hidden=11_008,
    context=2048,
    whole=True,
    bias="setting",
    mlp_bias=True,
)
MISTRAL = Line(
    kind="mistral",
    model="MistralForCausalLM",
    vocab=32_000,
    hidden=14_336,
    context=131_072,
    groups=8,
    window="all",
)
QWEN2 = Line(
    kind="qwen2",
    model="Qwen2ForCausalLM",
    vocab=151_936,
    hidden=22_016,
    context=32_768,
    groups=32,
    bias="inputs",
    window="layers",
)
QWEN3 = Line(
    kind="qwen3",
    model="Qwen3ForCausalLM",
    vocab=151_936,
    hidden=22_016,
    context=32_768,
    groups=32,
    head=128,
    bias="setting",
    window="layers",
    norm="rms",
)
# With squared ReLU in place of its own activation, this is what our small decoders are.
APERTUS = Line(
    kind="apertus",
    model="ApertusForCausalLM",
    vocab=131_072,
    hidden=14_336,
    context=65_536,
    eps=1e-5,
    rope="needed",
    bias="setting",
    norm="rms",
    gated=False,
    norms=("attention_layernorm", "feedforward_layernorm"),
)

ARCHITECTURES = {
    line.kind: Architecture(line.read, line.write, line.rules) for line in (LLAMA, MISTRAL, QWEN2, QWEN3, APERTUS)
}
