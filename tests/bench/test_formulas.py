"""The formulas of the benchmarks, against counts by hand and against the figures of the peers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.formulas import Applied, Row, applied, decoding_bytes, needed_flops, training_bytes, training_flops
from bench.workloads import TINY, WORKLOADS


# tokens/s and TFLOP/s of nanoGPT (twice), litgpt and Hugging Face's BERT, measured on one H200
@pytest.mark.parametrize(
    ("name", "length", "speed", "teraflops"),
    [
        ("gpt2", 1024, 536_700, 459),
        ("gpt2", 1024, 519_900, 444),
        ("gpt2", 1024, 417_400, 357),
        ("gpt2-xl", 1024, 44_200, 454),
        ("tinyllama", 2048, 71_100, 520),
        ("tinyllama", 2048, 57_600, 421),
        ("bert", 512, 390_600, 278),
    ],
)
def test_the_peers_come_out_with_their_own_figures(name: str, length: int, speed: float, teraflops: int) -> None:
    flops = training_flops(WORKLOADS[name].model, Row(0, length, length)) / length
    # the published 444 is a little below what the rounded speed gives
    assert flops * speed / 1e12 == pytest.approx(teraflops, abs=0.8)


def test_the_parameters_of_a_gpt2_that_are_multiplied_by() -> None:
    # per layer 12 d² + 13 d, the final norm, and the tied output; no table of tokens or positions
    assert applied(WORKLOADS["gpt2"].model) == Applied(0, 12 * (12 * 768**2 + 13 * 768) + 2 * 768, 50_304 * 768)


def test_the_parameters_of_an_encoder_decoder_by_who_is_multiplied() -> None:
    # t5-base: 4 d² of attention, 2 x 3072 d of feed-forward; the decoder's keys and values across are the source's
    d, layers = 768, 12
    encoder = layers * (4 * d * d + 2 * 3072 * d + 2 * d) + d
    decoder = layers * (6 * d * d + 2 * 3072 * d + 3 * d) + d
    assert applied(WORKLOADS["t5"].model) == Applied(encoder + layers * 2 * d * d, decoder, 32_128 * d)


def test_a_small_gpt2_by_hand() -> None:
    model = TINY["gpt2"].model  # 2 layers, width 64, 128 ids
    block = 12 * 64**2 + 13 * 64
    matrices = 2 * block + 128 + 128 * 64
    row = Row(0, 32, 32)
    assert training_flops(model, row) == 32 * (6 * matrices + 12 * 2 * 64 * 32)
    assert needed_flops(model, row) == 32 * (6 * matrices + 12 * 2 * 64 * 16)  # half of the scores is masked


def test_what_is_needed_leaves_out_the_output_where_nobody_looks() -> None:
    model = WORKLOADS["bert"].model
    every, some = needed_flops(model, Row(0, 512, 512)), needed_flops(model, Row(0, 512, 77))
    assert every == training_flops(model, Row(0, 512, 512))  # both ways: nothing is masked
    assert every - some == 6 * (512 - 77) * applied(model).output


def test_the_attentions_of_an_encoder_decoder() -> None:
    model = TINY["t5"].model  # 2 + 2 layers, 2 heads of 32
    source, target, output = applied(model)
    scores = 2 * 64 * (32 * 32 + 8 * 8 + 8 * 32)
    assert training_flops(model, Row(32, 8, 8)) == 6 * (32 * source + 8 * (target + output)) + 12 * scores


def test_the_bytes_of_a_step() -> None:
    model = TINY["gpt2"].model
    assert training_bytes(model, Row(0, 32, 32), 2) == 36 * model.parameters() + 2 * 32 * 64 * 2 * 32 * 2
    both = TINY["t5"].model  # 32 tokens through 2 layers, 8 through 2 others
    assert training_bytes(both, Row(32, 8, 8), 1) == 36 * both.parameters() + 2 * 32 * 64 * 2 * (32 + 8)


def test_the_bytes_of_a_decoded_token() -> None:
    model = TINY["tinyllama"].model  # 2 layers, 2 groups of 16
    _, target, output = applied(model)
    assert decoding_bytes(model, batch=0, length=0) == 2 * (target + output)
    cache = 2 * 2 * (16 + 16)  # layers x groups x (key + value)
    assert decoding_bytes(model, batch=3, length=10) == 2 * (target + output + 3 * cache * 10)
    assert decoding_bytes(model, batch=3, length=10, size=4) == 2 * decoding_bytes(model, batch=3, length=10)


def test_reading_the_weights_once_gives_the_known_bound() -> None:
    # 17,100 tokens/s for 124M, 1,940 for 1.1B, at 4.26 TB/s; these counted every parameter
    for name, bound in (("gpt2", 17_100), ("tinyllama", 1_940)):
        model = replace(WORKLOADS[name].model)
        rate = 4.26e12 / decoding_bytes(model, batch=1, length=0)
        assert rate == pytest.approx(bound, rel=0.07)
