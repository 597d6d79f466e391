"""BERT, RoBERTa (with XLM-R and CamemBERT) and DistilBERT: post-norm encoders with heads, or bare."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Literal, NamedTuple

from trivium.interop.architectures.architecture import Architecture, first_block, like, tie
from trivium.interop.fields import ACTIVATIONS, HEADS, Fields, spelling
from trivium.interop.names import Rules, attention, same
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.parts.init import Gpt
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import Activation, MlpOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.output import MaskedOutputOptions, NoOutputOptions, Output
from trivium.parts.options.positions import LearnedOptions, Position
from trivium.parts.options.residual import PostOptions
from trivium.parts.options.sentence import PoolerOptions
from trivium.parts.site import NoPart

_BLOCK = "encoder.blocks.*"
# Settings of old files that nothing reads, and rates of dropout that act in training alone.
_UNREAD = (
    "classifier_dropout",
    "cross_attention_hidden_size",
    "directionality",
    "num_labels",
    "output_past",
    *(f"pooler_{name}" for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")),
)


class Heads(NamedTuple):
    """Where files keep what stands beside the encoder."""

    body: str  # in front of the encoder's own names, missing where the encoder is alone
    transform: str
    norm: str
    decoder: str
    bias: str  # of the decoder
    dense: str  # of the classifier
    classify: str
    pair: str = ""  # another name of a classifier, which tells whether two texts belong together
    activation: Literal["tanh", "relu"] = "tanh"  # of the classifier
    pooler: str = "pooler.dense"  # of the bare encoder


BERT = Heads(
    body="bert.",
    transform="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    bias="cls.predictions.bias",
    dense="bert.pooler.dense",
    classify="classifier",
    pair="cls.seq_relationship",
)
ROBERTA = Heads(
    body="roberta.",
    transform="lm_head.dense",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    bias="lm_head.bias",
    dense="classifier.dense",
    classify="classifier.out_proj",
)
DISTILBERT = Heads(
    body="distilbert.",
    transform="vocab_transform",
    norm="vocab_layer_norm",
    decoder="vocab_projector",
    bias="vocab_projector.bias",
    dense="pre_classifier",
    classify="classifier",
    activation="relu",
)


# what every descendant of BERT shares


def encoder(
    fields: Fields, block: Block, *, layers: int, segments: int, width: int, context: int, vocab: int
) -> ModelConfig:
    """An encoder of such blocks without heads, whose embeddings are normed and dropped as the blocks are."""
    return ModelConfig(
        width=width,
        context=context,
        vocab=vocab,
        embedding=TokenEmbeddingOptions(
            tie=tie(fields, True), segments=segments, norm=block.norm, dropout=block.dropout
        ),
        encoder=Stack(layers=layers, block=block),
        decoder=NoStack(),
        output=NoOutputOptions(),
        init=Gpt(),
    )


def usual(fields: Fields, *, vocab: int, position: Position, offset: int, segments: int) -> ModelConfig:
    """An encoder by the names that BERT, RoBERTa and MPNet give its settings."""
    fields.skip(*_UNREAD)
    fields.only("is_decoder", False)
    fields.only("add_cross_attention", False)
    fields.only("pruned_heads", {})
    fields.only("position_embedding_type", "absolute")
    heads = MultiHeadOptions(
        heads=fields.integer("num_attention_heads", 12, most=HEADS),
        bias="all",
        dropout=fields.number("attention_probs_dropout_prob", 0.1, most=1),
    )
    feedforward = MlpOptions(
        hidden=fields.integer("intermediate_size", 3072), activation=fields.choice("hidden_act", "gelu", ACTIVATIONS)
    )
    block = Block(
        attention=heads,
        feedforward=feedforward,
        norm=LayerNormOptions(eps=fields.number("layer_norm_eps", 1e-12)),
        residual=PostOptions(),
        position=position,
        dropout=fields.number("hidden_dropout_prob", 0.1, most=1),
    )
    return encoder(
        fields,
        block,
        layers=fields.integer("num_hidden_layers", 12, most=10_000),
        segments=segments,
        width=fields.integer("hidden_size", 768),
        context=fields.integer("max_position_embeddings", 512, least=offset + 1) - offset,
        vocab=fields.integer("vocab_size", vocab),
    )


def headed(config: ModelConfig, fields: Fields, found: Collection[str], heads: Heads, act: Activation) -> ModelConfig:
    """The encoder with the heads whose tensors a file has: its `architectures` may promise others."""

    def has(*modules: str) -> bool:
        return all(f"{module}.weight" in found for module in modules)

    output: Output = config.output
    if has(heads.transform):
        output = MaskedOutputOptions(activation=act, norm=first_block(config.encoder).norm)
    sentence: PoolerOptions | NoPart = NoPart()
    if has(heads.dense, heads.classify):
        sentence = PoolerOptions(classes=_classes(fields), activation=heads.activation)
    elif heads.pair and has(heads.dense, heads.pair):
        sentence = PoolerOptions()
    elif has(heads.pooler) or has(heads.body + heads.pooler):
        sentence = PoolerOptions(classes=0)
    return replace(config, output=output, sentence=sentence)


def _classes(fields: Fields) -> int:
    """As many as have a label; files leave the table out where there are two."""
    labels = fields.table("id2label")
    return next(number for number in count() if str(number) not in labels) or fields.integer("num_labels", 2)


def written(config: ModelConfig, name: str) -> dict[str, Any]:
    """The settings that belong to the heads, and the class of `transformers` that has them."""
    masked, sentence = isinstance(config.output, MaskedOutputOptions), config.sentence
    classes = sentence.classes if isinstance(sentence, PoolerOptions) else 0
    suffix = "ForMaskedLM" if masked else "ForSequenceClassification" if classes else "Model"
    if masked and classes == 2 and name == "Bert":
        suffix = "ForPreTraining"
    result: dict[str, Any] = {"architectures": [name + suffix], "tie_word_embeddings": config.tied}
    if classes:
        labels = [f"LABEL_{number}" for number in range(classes)]
        result["id2label"] = {str(number): label for number, label in enumerate(labels)}
        result["label2id"] = {label: number for number, label in enumerate(labels)}
    return result


def write_usual(config: ModelConfig, *, offset: int) -> dict[str, Any]:
    """The settings of `usual`."""
    block = first_block(config.encoder)
    heads, feedforward = like(block.attention, MultiHeadOptions), like(block.feedforward, MlpOptions)
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.encoder.layers,
        "num_attention_heads": heads.heads,
        "intermediate_size": feedforward.size(config.site()),
        "hidden_act": spelling(feedforward.activation),
        "hidden_dropout_prob": block.dropout,
        "attention_probs_dropout_prob": heads.dropout,
        "max_position_embeddings": config.context + offset,
        "layer_norm_eps": like(block.norm, LayerNormOptions).eps,
    }


def rules(config: ModelConfig, heads: Heads, body: Mapping[str, str]) -> Rules:
    """The names of an encoder, `body` after its prefix, and of its heads."""
    sentence, masked = config.sentence, isinstance(config.output, MaskedOutputOptions)
    classes = sentence.classes if isinstance(sentence, PoolerOptions) else 0
    prefix = heads.body if masked or classes else ""
    names = {mine: prefix + theirs for mine, theirs in body.items()}
    tokens = f"{names['embedding']}.weight"
    copies: dict[str, str] = {}
    ignored = ["embeddings.position_ids"]
    if masked:
        names |= {"output.transform": heads.transform, "output.norm": heads.norm}
        if config.tied:
            names["output.project.bias"] = heads.bias
            copies[f"{heads.decoder}.weight"] = tokens
        else:  # then the bias beside the decoder is one that nothing reads
            names["output.project"] = heads.decoder
            ignored.append(heads.bias)
        if config.tied and heads.bias != f"{heads.decoder}.bias":
            copies[f"{heads.decoder}.bias"] = heads.bias
    classify, other = heads.classify, heads.pair
    if heads.pair and masked and classes == 2:  # as pretrained; alone it is any classifier of two classes
        classify, other = other, classify
    if classes:
        names |= {"sentence.dense": heads.dense, "sentence.classify": classify}
        copies |= {f"{other}.{end}": f"{classify}.{end}" for end in ("weight", "bias") if other}
        ignored.append("pooler.dense.*")  # RoBERTa's classifier does not use it, old files have it
    else:
        names["sentence.dense"] = prefix + heads.pooler
    return Rules(table=same(names), copies=copies, ignored=ignored, prefixes=(heads.body,))


# BERT and RoBERTa

_BODY = {
    "embedding": "embeddings.word_embeddings",
    "embedding.segments": "embeddings.token_type_embeddings.weight",
    "embedding.norm": "embeddings.LayerNorm",
    "encoder.positions.0.table": "embeddings.position_embeddings.weight",
    **attention(f"{_BLOCK}.attention", "encoder.layer.*.attention", "self.query self.key self.value output.dense"),
    f"{_BLOCK}.around_attention.norm": "encoder.layer.*.attention.output.LayerNorm",
    f"{_BLOCK}.feedforward.up": "encoder.layer.*.intermediate.dense",
    f"{_BLOCK}.feedforward.down": "encoder.layer.*.output.dense",
    f"{_BLOCK}.around_feedforward.norm": "encoder.layer.*.output.LayerNorm",
}


def _read(fields: Fields, found: Collection[str]) -> ModelConfig:
    segments = fields.integer("type_vocab_size", 2)
    config = usual(fields, vocab=30_522, position=LearnedOptions(), offset=0, segments=segments)
    return headed(config, fields, found, BERT, fields.choice("hidden_act", "gelu", ACTIVATIONS))


def _write(config: ModelConfig) -> dict[str, Any]:
    segments = like(config.embedding, TokenEmbeddingOptions).segments
    return {
        "model_type": "bert",
        **written(config, "Bert"),
        **write_usual(config, offset=0),
        "type_vocab_size": segments,
    }


def _read_roberta(fields: Fields, found: Collection[str]) -> ModelConfig:
    offset = fields.integer("pad_token_id", 1, least=0) + 1  # positions are counted from the id of the padding on
    segments = fields.integer("type_vocab_size", 2)
    config = usual(fields, vocab=50_265, position=LearnedOptions(offset=offset), offset=offset, segments=segments)
    return headed(config, fields, found, ROBERTA, "gelu")


def _write_roberta(config: ModelConfig) -> dict[str, Any]:
    offset = like(first_block(config.encoder).position, LearnedOptions).offset
    return {
        "model_type": "roberta",
        **written(config, "Roberta"),
        **write_usual(config, offset=offset),
        "type_vocab_size": like(config.embedding, TokenEmbeddingOptions).segments,
        "pad_token_id": max(offset - 1, 0),
    }


# DistilBERT

_DISTILLED = {
    **{mine: theirs for mine, theirs in _BODY.items() if not mine.startswith(_BLOCK) and "segments" not in mine},
    **attention(f"{_BLOCK}.attention", "transformer.layer.*.attention", "q_lin k_lin v_lin out_lin"),
    f"{_BLOCK}.around_attention.norm": "transformer.layer.*.sa_layer_norm",
    f"{_BLOCK}.feedforward.up": "transformer.layer.*.ffn.lin1",
    f"{_BLOCK}.feedforward.down": "transformer.layer.*.ffn.lin2",
    f"{_BLOCK}.around_feedforward.norm": "transformer.layer.*.output_layer_norm",
}


def _read_distilbert(fields: Fields, found: Collection[str]) -> ModelConfig:
    # sinusoids are stored as a table too, so that it makes no difference where its numbers come from
    fields.skip(*_UNREAD, "sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")
    fields.only("pruned_heads", {})
    activation = fields.choice("activation", "gelu", ACTIVATIONS)
    heads = MultiHeadOptions(
        heads=fields.integer("n_heads", 12, also="num_attention_heads", most=HEADS),
        bias="all",
        dropout=fields.number("attention_dropout", 0.1, most=1),
    )
    block = Block(
        attention=heads,
        feedforward=MlpOptions(hidden=fields.integer("hidden_dim", 3072), activation=activation),
        norm=LayerNormOptions(eps=1e-12),
        residual=PostOptions(),
        position=LearnedOptions(),
        dropout=fields.number("dropout", 0.1, most=1),
    )
    config = encoder(
        fields,
        block,
        layers=fields.integer("n_layers", 6, also="num_hidden_layers", most=10_000),
        segments=0,
        width=fields.integer("dim", 768, also="hidden_size"),
        context=fields.integer("max_position_embeddings", 512),
        vocab=fields.integer("vocab_size", 30_522),
    )
    return headed(config, fields, found, DISTILBERT, activation)


def _write_distilbert(config: ModelConfig) -> dict[str, Any]:
    usual = write_usual(config, offset=0)
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "max_position_embeddings": "max_position_embeddings",
    }
    own = {theirs: usual[name] for name, theirs in names.items()}
    return {"model_type": "distilbert", **written(config, "DistilBert"), **own}


_ROBERTA = Architecture(_read_roberta, _write_roberta, lambda config: rules(config, ROBERTA, _BODY))

ARCHITECTURES = {
    "bert": Architecture(_read, _write, lambda config: rules(config, BERT, _BODY)),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Architecture(
        _read_distilbert, _write_distilbert, lambda config: rules(config, DISTILBERT, _DISTILLED)
    ),
}
