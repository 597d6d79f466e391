"""Weights of other libraries' models in ours, for tests only: the names and transposes of spec models §8."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from trivium.models.transformer import Transformer, load_weights

# Ours to theirs; a star is the layer. A name that is no tensor is a module, whose weight and bias are meant.
Names = Mapping[str, str]

_QKVO = ("query", "key", "value", "out")


def _attention(mine: str, theirs: str, names: str) -> dict[str, str]:
    return {f"{mine}.{part}": f"{theirs}.{name}" for part, name in zip(_QKVO, names.split(), strict=True)}


GPT2 = {
    "embedding": "transformer.wte",
    "decoder.positions.0.table": "transformer.wpe.weight",
    **_attention("decoder.blocks.*.attention", "transformer.h.*.attn", "query key value c_proj"),
    "decoder.blocks.*.feedforward.up": "transformer.h.*.mlp.c_fc",
    "decoder.blocks.*.feedforward.down": "transformer.h.*.mlp.c_proj",
    "decoder.blocks.*.around_attention.norm": "transformer.h.*.ln_1",
    "decoder.blocks.*.around_feedforward.norm": "transformer.h.*.ln_2",
    "decoder.final": "transformer.ln_f",
}
GPT = {
    **{mine: name for mine, name in GPT2.items() if mine != "decoder.final"},
    "embedding": "transformer.tokens_embed",
    "decoder.positions.0.table": "transformer.positions_embed.weight",
}
LLAMA = {  # and Mistral, SmolLM2, TinyLlama
    "embedding": "model.embed_tokens",
    **_attention("decoder.blocks.*.attention", "model.layers.*.self_attn", "q_proj k_proj v_proj o_proj"),
    **{f"decoder.blocks.*.feedforward.{part}": f"model.layers.*.mlp.{part}_proj" for part in ("gate", "up", "down")},
    "decoder.blocks.*.around_attention.norm": "model.layers.*.input_layernorm",
    "decoder.blocks.*.around_feedforward.norm": "model.layers.*.post_attention_layernorm",  # before the feed-forward
    "decoder.final": "model.norm",
}
QWEN3 = {
    **LLAMA,
    "decoder.blocks.*.attention.query_norm": "model.layers.*.self_attn.q_norm",
    "decoder.blocks.*.attention.key_norm": "model.layers.*.self_attn.k_norm",
}
OPT = {
    "embedding": "model.decoder.embed_tokens",
    "decoder.positions.0.table": "model.decoder.embed_positions.weight",
    **_attention("decoder.blocks.*.attention", "model.decoder.layers.*.self_attn", "q_proj k_proj v_proj out_proj"),
    "decoder.blocks.*.around_attention.norm": "model.decoder.layers.*.self_attn_layer_norm",
    "decoder.blocks.*.feedforward.up": "model.decoder.layers.*.fc1",
    "decoder.blocks.*.feedforward.down": "model.decoder.layers.*.fc2",
    "decoder.blocks.*.around_feedforward.norm": "model.decoder.layers.*.final_layer_norm",
    "decoder.final": "model.decoder.final_layer_norm",
}
NEOX = {
    "embedding": "gpt_neox.embed_in",
    **_attention("decoder.blocks.*.attention", "gpt_neox.layers.*.attention", "query key value dense"),
    "decoder.blocks.*.feedforward.up": "gpt_neox.layers.*.mlp.dense_h_to_4h",
    "decoder.blocks.*.feedforward.down": "gpt_neox.layers.*.mlp.dense_4h_to_h",
    "decoder.blocks.*.norm": "gpt_neox.layers.*.input_layernorm",
    "decoder.blocks.*.feedforward_norm": "gpt_neox.layers.*.post_attention_layernorm",
    "decoder.final": "gpt_neox.final_layer_norm",
    "output.project": "lm_head",
}
BLOOM = {
    "embedding": "transformer.word_embeddings",
    "embedding.norm": "transformer.word_embeddings_layernorm",
    **_attention("decoder.blocks.*.attention", "transformer.h.*.self_attention", "query key value dense"),
    "decoder.blocks.*.feedforward.up": "transformer.h.*.mlp.dense_h_to_4h",
    "decoder.blocks.*.feedforward.down": "transformer.h.*.mlp.dense_4h_to_h",
    "decoder.blocks.*.around_attention.norm": "transformer.h.*.input_layernorm",
    "decoder.blocks.*.around_feedforward.norm": "transformer.h.*.post_attention_layernorm",
    "decoder.final": "transformer.ln_f",
}


def _bert(body: str) -> dict[str, str]:
    embeddings, layer = f"{body}.embeddings", f"{body}.encoder.layer.*"
    return {
        "embedding": f"{embeddings}.word_embeddings",
        "embedding.segments": f"{embeddings}.token_type_embeddings.weight",
        "embedding.norm": f"{embeddings}.LayerNorm",
        "encoder.positions.0.table": f"{embeddings}.position_embeddings.weight",
        **_attention("encoder.blocks.*.attention", f"{layer}.attention", "self.query self.key self.value output.dense"),
        "encoder.blocks.*.around_attention.norm": f"{layer}.attention.output.LayerNorm",
        "encoder.blocks.*.feedforward.up": f"{layer}.intermediate.dense",
        "encoder.blocks.*.feedforward.down": f"{layer}.output.dense",
        "encoder.blocks.*.around_feedforward.norm": f"{layer}.output.LayerNorm",
    }


BERT = {
    **_bert("bert"),
    "output.transform": "cls.predictions.transform.dense",
    "output.norm": "cls.predictions.transform.LayerNorm",
    "output.project.bias": "cls.predictions.bias",
    "sentence.dense": "bert.pooler.dense",
    "sentence.classify": "cls.seq_relationship",
}
ROBERTA = {
    **_bert("roberta"),
    "output.transform": "lm_head.dense",
    "output.norm": "lm_head.layer_norm",
    "output.project.bias": "lm_head.bias",
}


def _t5(side: str, feed: int, parts: Names) -> dict[str, str]:
    block = f"{side}.block.*.layer"
    return {
        f"{side}.positions.0.table": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        **_attention(f"{side}.blocks.*.attention", f"{block}.0.SelfAttention", "q k v o"),
        f"{side}.blocks.*.around_attention.norm": f"{block}.0.layer_norm",
        **{f"{side}.blocks.*.feedforward.{mine}": f"{block}.{feed}.DenseReluDense.{it}" for mine, it in parts.items()},
        f"{side}.blocks.*.around_feedforward.norm": f"{block}.{feed}.layer_norm",
        f"{side}.final": f"{side}.final_layer_norm",
    }


def t5(parts: Names) -> dict[str, str]:
    """The names of T5; `parts` are those of its feed-forward network."""
    return {
        "embedding": "shared",
        **_t5("encoder", 1, parts),
        **_t5("decoder", 2, parts),
        **_attention("decoder.blocks.*.cross", "decoder.block.*.layer.1.EncDecAttention", "q k v o"),
        "decoder.blocks.*.around_cross.norm": "decoder.block.*.layer.1.layer_norm",
    }


T5_V1_0 = t5({"up": "wi", "down": "wo"})
T5_V1_1 = {**t5({"gate": "wi_0", "up": "wi_1", "down": "wo"}), "output.project": "lm_head"}


def _bart(side: str) -> dict[str, str]:
    layer = f"model.{side}.layers.*"
    return {
        **_attention(f"{side}.blocks.*.attention", f"{layer}.self_attn", "q_proj k_proj v_proj out_proj"),
        f"{side}.blocks.*.around_attention.norm": f"{layer}.self_attn_layer_norm",
        f"{side}.blocks.*.feedforward.up": f"{layer}.fc1",
        f"{side}.blocks.*.feedforward.down": f"{layer}.fc2",
        f"{side}.blocks.*.around_feedforward.norm": f"{layer}.final_layer_norm",
    }


MARIAN = {
    "embedding": "model.shared",
    **_bart("encoder"),
    **_bart("decoder"),
    **_attention("decoder.blocks.*.cross", "model.decoder.layers.*.encoder_attn", "q_proj k_proj v_proj out_proj"),
    "decoder.blocks.*.around_cross.norm": "model.decoder.layers.*.encoder_attn_layer_norm",
}
BART = {
    **MARIAN,
    "source_embedding.norm": "model.encoder.layernorm_embedding",
    "embedding.norm": "model.decoder.layernorm_embedding",
    "encoder.positions.0.table": "model.encoder.embed_positions.weight",
    "decoder.positions.0.table": "model.decoder.embed_positions.weight",
}


def _torch(mine: str, theirs: str, *, cross: bool) -> dict[str, str]:
    norms = ("attention", "cross", "feedforward") if cross else ("attention", "feedforward")
    return {
        **_attention(f"{mine}.*.attention", f"{theirs}.layers.*.self_attn", "query key value out_proj"),
        **(
            _attention(f"{mine}.*.cross", f"{theirs}.layers.*.multihead_attn", "query key value out_proj")
            if cross
            else {}
        ),
        f"{mine}.*.feedforward.up": f"{theirs}.layers.*.linear1",
        f"{mine}.*.feedforward.down": f"{theirs}.layers.*.linear2",
        **{f"{mine}.*.around_{part}.norm": f"{theirs}.layers.*.norm{index}" for index, part in enumerate(norms, 1)},
    }


TORCH = {  # nn.Transformer with an embedding beside it
    "embedding": "embedding",
    **_torch("encoder.blocks", "body.encoder", cross=False),
    **_torch("decoder.blocks", "body.decoder", cross=True),
}


def copy(theirs: nn.Module, ours: Transformer, names: Names, *, untied: bool = False, heads: int = 0) -> None:
    """Copy all parameters by name: every one of theirs must be read and every one of ours filled.

    `untied` adds the output matrix of a causal model; `heads` says that queries, keys and values are fused by head.
    """
    # what is not trained is not a weight: Marian keeps its sinusoids as parameters
    found = {name: parameter for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    load_weights(ours, renamed(found, names, untied=untied, heads=heads))


def renamed(found: Mapping[str, Tensor], names: Names, *, untied: bool = False, heads: int = 0) -> dict[str, Tensor]:
    """The tensors under our names."""
    source = dict(_split(found, heads))
    if untied:
        names = {**names, "output.project": "lm_head"}
    result: dict[str, Tensor] = {}
    for mine, name in names.items():
        for layer in count():
            own, other = mine.replace("*", str(layer)), name.replace("*", str(layer))
            pairs = [(own + end, other + end) for end in ("", ".weight", ".bias") if other + end in source]
            result |= {to: source.pop(tensor).detach() for to, tensor in pairs}
            if not pairs or "*" not in mine:
                assert pairs or layer, f"they have no {other}"
                break
    assert not source, f"nobody reads {sorted(source)}"
    return result


def _split(found: Mapping[str, Tensor], heads: int) -> Mapping[str, Tensor]:
    """The tensors with fused queries, keys and values taken apart, and GPT's [in, out] matrices turned."""
    result: dict[str, Tensor] = {}
    for name, tensor in found.items():
        stem, end = name.rsplit(".", 1)
        turned = tensor.T if stem.rsplit(".", 1)[-1] in ("c_attn", "c_fc", "c_proj") and tensor.ndim == 2 else tensor
        if stem.endswith("c_attn"):
            parts = turned.chunk(3)
        elif stem.endswith("query_key_value"):  # per head, three blocks of its size
            apart = turned.reshape(heads, 3, -1, *turned.shape[1:])
            parts = tuple(apart[:, index].flatten(0, 1) for index in range(3))
        elif end.startswith("in_proj_"):
            parts, stem, end = turned.chunk(3), f"{stem}.in_proj", end.removeprefix("in_proj_")
        else:
            result[name] = turned
            continue
        for part, piece in zip(_QKVO, parts, strict=False):
            result[f"{stem.rsplit('.', 1)[0]}.{part}.{end}"] = piece
    return result


def enliven(model: nn.Module, *, seed: int, spread: float = 0.15) -> None:
    """Redraw every weight, biases and gains too: fresh models have zeros and ones where a mix-up would not show.

    A wide `spread` makes a model that does not repeat itself.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim == 1 else spread)
            gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(noise + 1 if gain else noise)


def ids(rows: int, length: int, seed: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def near(actual: Tensor, expected: Tensor, within: float = 1e-5) -> None:
    """Within 1e-5, relative where logits are large."""
    torch.testing.assert_close(actual, expected, atol=within, rtol=within)
    assert expected.std() > 0.1  # logits that say nothing would agree too easily


def logits(ours: Transformer, tokens_BT: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return ours.head.logits(ours(tokens_BT, **inputs).hidden)


def states(side: nn.Module | None, run: Callable[[], object]) -> list[Tensor]:
    """What every block of one side gives, and last what its final norm gives, while `run` runs."""
    assert side is not None
    found: list[Tensor] = []
    modules = [*side.get_submodule("blocks").children(), side.get_submodule("final")]
    hooks = [module.register_forward_hook(lambda _, __, result: found.append(result)) for module in modules]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return found


def near_states(found: list[Tensor], theirs: tuple[Tensor, ...], real_BT: Tensor | None = None) -> None:
    """Layer by layer; the last of theirs is after the final norm, the first is the input of the stack."""
    assert len(found) == len(theirs) > 2
    for mine, expected in zip([*found[:-2], found[-1]], theirs[1:], strict=True):
        near(mine if real_BT is None else mine[real_BT], expected if real_BT is None else expected[real_BT])


def near_gradients(theirs: nn.Module, ours: Transformer, names: Names) -> None:
    """The gradients of both, after a backward pass of each."""
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    expected = renamed(grads, names)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)
