"""Every position scheme against `transformers`."""

# B batch, T queries, S keys, H heads, E head size, D width

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as turn_neox
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as turn_gptj
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions as angles_gptj
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention, T5Config
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings

from tests.parts.drawing import random
from trivium.parts.options.positions import (
    AlibiOptions,
    BucketOptions,
    LearnedOptions,
    RotaryOptions,
    SinusoidalOptions,
)
from trivium.parts.options.scaling import LinearScaling, Llama3, NoScaling, Ntk, Scaling, Yarn
from trivium.parts.positions import BucketPositions, LearnedPositions
from trivium.parts.site import Site

# added to the embeddings


def added(options: SinusoidalOptions, rows: int, width: int) -> Tensor:
    part = options.build(Site(width=width, context=rows))
    return part.embed(torch.zeros(1, rows, width), torch.arange(rows)[None])[0]


def test_the_sinusoids_are_those_of_marian_xlm_and_m2m100() -> None:
    marian = MarianSinusoidalPositionalEmbedding(300, 32).create_weight()
    torch.testing.assert_close(added(SinusoidalOptions(layout="halves"), 300, 32), marian, atol=1e-6, rtol=0)
    xlm = create_sinusoidal_embeddings(300, 32, torch.empty(300, 32))
    torch.testing.assert_close(added(SinusoidalOptions(), 300, 32), xlm, atol=1e-6, rtol=0)
    # its angles are in float32, so it strays with the position
    m2m100 = M2M100SinusoidalPositionalEmbedding.get_embedding(300, 32)
    ours = added(SinusoidalOptions(layout="halves", spacing="tensor2tensor"), 300, 32)
    torch.testing.assert_close(ours, m2m100, atol=1e-4, rtol=0)
    assert (added(SinusoidalOptions(layout="halves"), 300, 32) - m2m100).abs().max() > 0.1


def test_an_offset_of_two_is_barts() -> None:
    theirs = BartLearnedPositionalEmbedding(10, 8)
    ours = LearnedOptions(offset=2).build(Site(width=8, context=10))
    assert isinstance(ours, LearnedPositions)
    ours.load_state_dict({"table": theirs.weight})
    expected = theirs(torch.zeros(1, 10, dtype=torch.long))
    assert torch.equal(ours.embed(torch.zeros(1, 10, 8), torch.arange(10)[None]), expected)


# rotary


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SHORT = {"factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 0.5}
SCALED: list[tuple[Scaling, dict[str, Any]]] = [
    (LinearScaling(factor=4), {"rope_type": "linear", "factor": 4.0}),
    (Llama3(), LLAMA3),
    (Llama3(factor=32), LLAMA3 | {"factor": 32.0}),
    (Yarn(), YARN),
    (Yarn(factor=40, attention=1.25), YARN | {"factor": 40.0, "attention_factor": 1.25}),
    (Yarn(factor=16, original=64, fast=8, slow=0.5), YARN | SHORT),
    (Yarn(original=200_000), YARN | {"original_max_position_embeddings": 200_000}),
    (Yarn(original=6), YARN | {"original_max_position_embeddings": 6}),
    (Yarn(factor=1), YARN | {"factor": 1.0}),
]


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head", [8, 64, 128])
@pytest.mark.parametrize(("scaling", "settings"), SCALED, ids=[repr(scaling) for scaling, _ in SCALED])
def test_scaled_frequencies_are_those_of_transformers(
    scaling: Scaling, settings: dict[str, Any], head: int, theta: float
) -> None:
    config = LlamaConfig(
        hidden_size=2 * head,
        num_attention_heads=2,
        head_dim=head,
        max_position_embeddings=131_072,
        rope_parameters=settings | {"rope_theta": theta},
    )
    expected, strength = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"))
    actual = torch.tensor(scaling.frequencies(theta, head), dtype=torch.float32)
    torch.testing.assert_close(actual, expected, rtol=5e-6, atol=0)
    assert scaling.strength == pytest.approx(strength)
    if settings["factor"] > 1:
        plain = torch.tensor(NoScaling().frequencies(theta, head))
        assert not torch.allclose(actual, plain, rtol=1e-2, atol=0)


@pytest.mark.parametrize("factor", [2.0, 5.0])
def test_ntk_is_the_dynamic_scaling_at_so_many_times_the_length(factor: float) -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=1000,
        rope_parameters={"rope_type": "dynamic", "factor": 1.0, "rope_theta": 10_000.0},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=int(factor * 1000))
    actual = torch.tensor(Ntk(factor=factor).frequencies(10_000.0, 64), dtype=torch.float32)
    torch.testing.assert_close(actual, expected, rtol=5e-6, atol=0)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_turning_is_that_of_gpt_neox_and_gpt_j(share: float) -> None:
    head, size, at = 32, int(32 * share), torch.tensor([[0, 1, 5, 100]])
    site = Site(width=64, context=128, heads=2, head=head)
    x_BHTE = random(1, 2, 4, head)

    halves = RotaryOptions(share=share).build(site)
    angles = at[..., None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
    whole = torch.cat((angles, angles), dim=-1)
    expected, _ = turn_neox(x_BHTE, x_BHTE, whole.cos(), whole.sin())
    torch.testing.assert_close(halves.rotate(x_BHTE, halves.prepare(at, at)), expected, atol=1e-5, rtol=1e-5)

    interleaved = RotaryOptions(share=share, layout="interleaved").build(site)
    sin, cos = angles_gptj(128, size)[at].chunk(2, dim=-1)
    turned = turn_gptj(x_BHTE[..., :size].transpose(1, 2), sin, cos).transpose(1, 2)
    expected = torch.cat((turned, x_BHTE[..., size:]), dim=-1)
    torch.testing.assert_close(interleaved.rotate(x_BHTE, interleaved.prepare(at, at)), expected, atol=1e-5, rtol=1e-5)


# T5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 64), (64, 256), (12, 48), (32, 1024), (8, 20)])
def test_every_distance_falls_into_the_bucket_of_t5(causal: bool, buckets: int, distance: int) -> None:
    part = BucketOptions(buckets=buckets, distance=distance).build(
        Site(width=8, context=4000, heads=1, head=8, causal=causal)
    )
    assert isinstance(part, BucketPositions)
    with torch.no_grad():
        part.table.copy_(torch.arange(buckets)[:, None])  # each bucket holds its number
    keys_at_1S = torch.arange(2001)[None]
    actual = part.bias(part.prepare(torch.tensor([[1000]]), keys_at_1S))[0, 0, 0]
    expected = T5Attention._relative_position_bucket(
        keys_at_1S[0] - 1000, bidirectional=not causal, num_buckets=buckets, max_distance=distance
    )
    assert actual.long().tolist() == expected.tolist()


@pytest.mark.parametrize("causal", [True, False])
def test_the_bias_is_that_of_t5(causal: bool) -> None:
    config = T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=causal)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = BucketOptions().build(Site(width=32, context=64, heads=4, head=8, causal=causal))
    assert isinstance(ours, BucketPositions)
    ours.load_state_dict({"table": theirs.relative_attention_bias.weight})
    at = torch.arange(40)[None]
    torch.testing.assert_close(ours.bias(ours.prepare(at, at)), theirs.compute_bias(40, 40))


# ALiBi


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 14, 16])
def test_alibi_is_blooms_after_the_softmax(heads: int) -> None:
    """BLOOM adds the slope times the key's position: another constant in every row."""
    length, at = 20, torch.arange(20)[None]
    part = AlibiOptions().build(Site(width=8, context=8, heads=heads, head=8))
    bias = part.bias(part.prepare(at, at))
    assert bias is not None
    theirs = build_alibi_tensor(torch.ones(1, length), heads, torch.float32).view(1, heads, 1, length)
    scores, seen = random(1, heads, length, length), torch.ones(length, length).tril() > 0
    for row in range(length):  # the same constant for all keys that a query sees
        gap = (bias - theirs)[0, :, row, : row + 1]
        torch.testing.assert_close(gap, gap[:, :1].expand_as(gap), atol=1e-5, rtol=0)
    ours, expected = ((scores + added).masked_fill(~seen, -torch.inf).softmax(-1) for added in (bias, theirs))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
