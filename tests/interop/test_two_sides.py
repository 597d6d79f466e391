"""Encoder-decoders that `transformers` made and saved: opened here, compared, exported, opened there again."""

# B batch, S source tokens, T target tokens, V vocabulary

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartModel,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests.interop.saved import alike, alike_layers, exactly, exported, opened
from tests.oracle.copying import enliven, ids, logits
from trivium.errors import CheckpointError
from trivium.interop.hf import find
from trivium.models.presets import PRESETS
from trivium.models.transformer import Transformer, weights
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.output import SoftmaxOptions

Draw = random.Random
ACTIVATIONS = ["gelu", "relu", "gelu_new", "silu"]


def t5(draw: Draw) -> PreTrainedModel:
    """v1.0: one matrix for all, or with any feed-forward network."""
    proj = draw.choice([*ACTIVATIONS, "gated-relu", "gated-silu", "gated-gelu"])
    return T5ForConditionalGeneration(t5_config(draw, feed_forward_proj=proj))


def t5v1_1(draw: Draw) -> PreTrainedModel:
    """v1.1 and Flan-T5: gated, and the output has a matrix of its own."""
    model = T5ForConditionalGeneration(t5_config(draw, feed_forward_proj="gated-gelu", tie_word_embeddings=False))
    # transformers 5 ties a fresh v1.1 all the same, and unties what it loads
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    return model


def t5_unscaled(draw: Draw) -> PreTrainedModel:
    """As transformers 5 builds a fresh v1.1: tied, yet not scaled."""
    return T5ForConditionalGeneration(t5_config(draw, feed_forward_proj="gated-silu", tie_word_embeddings=False))


def t5_config(draw: Draw, **more: Any) -> T5Config:
    return T5Config(
        vocab_size=draw.randint(40, 99),
        d_model=draw.randint(9, 40),
        d_kv=draw.randint(3, 9),
        d_ff=draw.randint(5, 80),
        num_layers=draw.randint(2, 3),
        num_decoder_layers=draw.randint(2, 4),
        num_heads=draw.randint(1, 5),
        relative_attention_num_buckets=draw.choice([32, 8]),
        relative_attention_max_distance=draw.choice([128, 20]),
        layer_norm_epsilon=draw.choice([1e-6, 1e-3]),
        decoder_start_token_id=0,
        **more,
    )


def both(draw: Draw) -> dict[str, Any]:
    """Two sides that differ in everything in which they may."""
    one, other, vocab = draw.randint(1, 4), draw.randint(1, 4), draw.randint(40, 99)
    return {
        "vocab_size": vocab,
        "d_model": 2 * one * other * draw.randint(1, 2),
        "encoder_layers": draw.randint(2, 3),
        "decoder_layers": draw.randint(2, 4),
        "encoder_attention_heads": one,
        "decoder_attention_heads": other,
        "encoder_ffn_dim": draw.randint(5, 80),
        "decoder_ffn_dim": draw.randint(5, 80),
        "max_position_embeddings": draw.randint(36, 50),
        "activation_function": draw.choice([*ACTIVATIONS, "swish"]),
        "scale_embedding": draw.random() < 0.5,
        "pad_token_id": vocab - 1,
        "decoder_start_token_id": vocab - 1,
    }


def bart(draw: Draw) -> PreTrainedModel:
    return biased(BartForConditionalGeneration(BartConfig(**both(draw))), draw)


def bart_untied(draw: Draw) -> PreTrainedModel:
    return biased(BartForConditionalGeneration(BartConfig(**both(draw), tie_word_embeddings=False)), draw)


def marian(draw: Draw) -> PreTrainedModel:
    return biased(MarianMTModel(MarianConfig(**both(draw))), draw)


def marian_two_inputs(draw: Draw) -> PreTrainedModel:
    shared = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": draw.random() < 0.5}
    return biased(MarianMTModel(MarianConfig(**both(draw), **shared)), draw)


def biased(model: Any, draw: Draw) -> PreTrainedModel:
    """Fresh models add zeros to their logits, published ones of Marian do not."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape, generator=generator))
    found: PreTrainedModel = model
    return found


MADE = [t5, t5v1_1, t5_unscaled, bart, bart_untied, marian, marian_two_inputs]


def saved(make: Callable[[Draw], PreTrainedModel], folder: Path, seed: int) -> Any:
    model = make(random.Random(seed)).eval()
    enliven(model, seed=seed)
    model.save_pretrained(folder)
    return model


def text(vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sources, which of their tokens are real, and targets."""
    source_BS = ids(3, 30, seed, vocab - 1)
    return source_BS, torch.arange(30)[None] < torch.tensor([[30], [17], [4]]), ids(3, 26, seed + 100, vocab)


@pytest.fixture
def _wide_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their norm rounds to float32 whatever it is given; without that two models of float64 can be compared."""

    def forward(self: Any, x: Tensor) -> Tensor:
        result: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
        return result

    monkeypatch.setattr(T5LayerNorm, "forward", forward)


@pytest.mark.usefixtures("_wide_norms")
@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_saved_model_gives_the_same_numbers_here_and_there_again(
    make: Callable[[Draw], PreTrainedModel], tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    first = 0 if count(0, 1) == 0 else random.SystemRandom().randrange(1 << 30)
    for seed in range(first, first + count(1, 20)):
        print("seed", seed)  # pytest shows it when something below fails
        folder = tmp_path / str(seed)
        theirs = saved(make, folder / "theirs", seed)
        ours = opened(folder / "theirs")
        source_BS, real_BS, target_BT = text(theirs.config.vocab_size, seed)
        inputs = {"input_ids": source_BS, "attention_mask": real_BS.long(), "decoder_input_ids": target_BT}
        with torch.no_grad():
            expected = theirs(**inputs, output_hidden_states=True)
        alike(logits(ours, target_BT, source=source_BS, source_padding=real_BS), expected.logits)
        layers(ours, inputs, expected)
        greedy(theirs, ours, source_BS, real_BS)
        assert f"as {theirs.config.model_type};" in exported(ours, folder / "ours")
        returned(theirs, folder, inputs, expected.logits)
        with torch.no_grad():
            expected = theirs.double()(**inputs).logits
        exactly(logits(ours.double(), target_BT, source=source_BS, source_padding=real_BS), expected)


def layers(ours: Transformer, inputs: dict[str, Tensor], expected: Any) -> None:
    """Every layer of both sides."""
    real_BS = inputs["attention_mask"].bool()

    def run() -> object:
        return ours(inputs["decoder_input_ids"], source=inputs["input_ids"], source_padding=real_BS)

    alike_layers(ours.encoder, run, expected.encoder_hidden_states, real_BS)
    alike_layers(ours.decoder, run, expected.decoder_hidden_states)


def greedy(theirs: Any, ours: Transformer, source_BS: Tensor, real_BS: Tensor) -> None:
    """32 tokens, theirs without a cache and ours with one."""
    rows = len(source_BS)
    written_BT = expected_BT = torch.full((rows, 1), theirs.config.decoder_start_token_id)
    cache = ours.cache(rows, 33)
    with torch.no_grad():
        for _ in range(32):
            other = theirs(input_ids=source_BS, attention_mask=real_BS.long(), decoder_input_ids=expected_BT).logits
            expected_BT = torch.cat((expected_BT, other[:, -1:].argmax(-1)), dim=1)
            hidden = ours(written_BT[:, -1:], source=source_BS, source_padding=real_BS, cache=cache).hidden
            written_BT = torch.cat((written_BT, ours.head.logits(hidden)[:, -1:].argmax(-1)), dim=1)
    assert written_BT.tolist() == expected_BT.tolist()


def returned(theirs: PreTrainedModel, folder: Path, inputs: dict[str, Tensor], expected: Tensor) -> None:
    """What was exported is what was saved: the same tensors bit for bit, and the same logits from them."""
    before = load_file(folder / "theirs" / "model.safetensors")
    after = load_file(folder / "ours" / "model.safetensors")
    unread = {"model.shared.weight"} - after.keys()  # where each side has a matrix of its own
    assert before.keys() - unread == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    again = type(theirs).from_pretrained(folder / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, expected)


def changed(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    table = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({name: value for name, value in table.items() if value != "gone"}))


@pytest.mark.parametrize("version", [t5, t5v1_1], ids=lambda make: make.__name__)
def test_a_t5_as_the_hub_has_it_is_the_same_model(version: Callable[[Draw], PreTrainedModel], tmp_path: Path) -> None:
    """Older files have no setting for the scale, and hold the shared matrix several times and a stray table."""
    theirs = saved(version, tmp_path, 1)
    new = opened(tmp_path)
    changed(tmp_path, scale_decoder_outputs="gone", tie_word_embeddings=version is t5)
    tensors = load_file(tmp_path / "model.safetensors")
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"] + ["lm_head.weight"] * (version is t5)
    tensors |= {name: tensors["shared.weight"].clone() for name in copies}
    stray = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[stray] = torch.zeros(theirs.config.relative_attention_num_buckets, theirs.config.num_heads)
    save_file(tensors, tmp_path / "model.safetensors")
    old = opened(tmp_path)
    assert old.config == new.config
    assert all(torch.equal(tensor, weights(new)[name]) for name, tensor in weights(old).items())
    del tensors["shared.weight"]  # then a copy stands for it
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(opened(tmp_path).embedding.weight, new.embedding.weight)


def test_a_bare_bart_writes_with_its_embedding(tmp_path: Path) -> None:
    """The published base model calls itself BartModel, and everybody writes texts with it."""
    config = BartConfig(**both(random.Random(0)))
    bare = BartModel(config).eval()
    enliven(bare, seed=0)
    bare.save_pretrained(tmp_path)
    ours, whole = opened(tmp_path), BartForConditionalGeneration.from_pretrained(tmp_path).eval()
    source_BS, real_BS, target_BT = text(config.vocab_size, 0)
    with torch.no_grad():
        other = whole(input_ids=source_BS, attention_mask=real_BS.long(), decoder_input_ids=target_BT).logits
    alike(logits(ours, target_BT, source=source_BS, source_padding=real_BS), other)


def test_the_stored_sinusoids_of_marian_are_not_read(tmp_path: Path) -> None:
    theirs = saved(marian, tmp_path, 2)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {
        f"model.{side}.embed_positions.weight": theirs.model.encoder.embed_positions.weight.detach().clone()
        for side in ("encoder", "decoder")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert opened(tmp_path).config.output == SoftmaxOptions(bias=True, fixed=True)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (t5, {"feed_forward_proj": "gated-geglu"}, "feed_forward_proj is 'gated-geglu'"),
        (t5, {"is_decoder": True}, "is_decoder is True"),
        (t5, {"num_decoder_layers": 40}, r"decoder\.block\.\d+\..* is missing"),
        (t5, {"num_layers": 10_000}, "more than there are tensors"),
        (t5v1_1, {"scale_decoder_outputs": True}, r"lm_head\.weight and shared\.weight differ"),
        (t5, {"feed_forward_proj": "relu", "dense_act_fn": "silu"}, "dense_act_fn is 'silu'"),
        (t5v1_1, {"is_gated_act": False}, "is_gated_act is False"),
        (t5v1_1, {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}, "dense_act_fn is 'gelu'"),
        (t5, {"relative_attention_max_distance": 100_001}, "relative_attention_max_distance is 100001"),
        (bart, {"activation_function": "gelu_10"}, "activation_function is 'gelu_10'"),
        (
            bart,
            {"num_attention_heads": 1_000},
            "encoder_attention_heads is .*; num_attention_heads is another spelling",
        ),
        (marian, {"max_position_embeddings": 16_385}, "max_position_embeddings is 16385"),
        (bart, {"normalize_before": True}, "normalize_before is True"),
        (bart, {"max_position_embeddings": 7}, r"embed_positions\.weight has shape"),
        (bart, {"tie_word_embeddings": False}, "is missing"),
        (marian, {"decoder_vocab_size": 12}, "decoder_vocab_size is 12"),
        (marian, {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        (marian, {"static_position_embeddings": False}, "static_position_embeddings is False"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(
    make: Callable[[Draw], PreTrainedModel], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(make, tmp_path, 3)
    changed(tmp_path, **change)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("t5-small", "T5ForConditionalGeneration"),
        ("t5v1.1-small", "T5ForConditionalGeneration"),
        ("bart-base", "BartForConditionalGeneration"),
        ("marian", "MarianMTModel"),
    ],
)
def test_our_preset_is_what_transformers_publishes(name: str, kind: str) -> None:
    config = PRESETS[name]()
    target = find(config)
    assert target.table["architectures"] == [kind]
    with torch.device("meta"):
        theirs = getattr(transformers, kind)(getattr(transformers, kind).config_class(**target.table))
    untied = (
        config.vocab * config.width
        if isinstance(config.embedding, TokenEmbeddingOptions) and config.embedding.tie == "inputs"
        else 0
    )
    trained = sum(one.numel() for one in theirs.parameters() if one.requires_grad)
    assert trained + untied == config.parameters()  # a fresh v1.1 of theirs is tied
