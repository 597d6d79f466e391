"""Presets against the published parameter counts, to the unit."""

from __future__ import annotations

import pytest

from trivium.models.presets import PRESETS
from trivium.models.transformer import build, with_vocab

COUNTS = {
    "gpt": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "smollm2-135m": 134_515_008,
}
# layers, width, positions, vocabulary, final norm
GPT_SHAPES = {
    "gpt": (12, 768, 512, 40_478, 0),
    "gpt2": (12, 768, 1024, 50_257, 1),
    "gpt2-medium": (24, 1024, 1024, 50_257, 1),
    "gpt2-large": (36, 1280, 1024, 50_257, 1),
    "gpt2-xl": (48, 1600, 1024, 50_257, 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    config = PRESETS[name]()
    assert config.parameters() == COUNTS[name]
    built = build(config, device="meta")
    assert all(parameter.is_meta for parameter in built.parameters())
    assert sum(parameter.numel() for parameter in built.parameters()) == COUNTS[name]
    assert sum(cost.parameters for cost in config.costs().values()) == COUNTS[name]


@pytest.mark.parametrize("name", GPT_SHAPES)
def test_the_count_of_a_gpt_splits_as_its_formula(name: str) -> None:
    layers, width, positions, vocab, final = GPT_SHAPES[name]
    split = {place: cost.parameters for place, cost in PRESETS[name]().costs().items()}
    assert split == {
        "embedding": vocab * width,
        "position": positions * width,
        "attention": layers * (4 * width**2 + 4 * width),
        "feedforward": layers * (8 * width**2 + 5 * width),
        "norm": layers * 4 * width + final * 2 * width,
        "output": 0,
    }


def test_the_count_of_smollm2_splits_as_the_llama_formula() -> None:
    layers, width, hidden, heads, groups, size, vocab = 30, 576, 1536, 9, 3, 64, 49_152
    split = {place: cost.parameters for place, cost in PRESETS["smollm2-135m"]().costs().items()}
    assert split == {
        "embedding": vocab * width,
        "position": 0,
        "attention": layers * width * size * (2 * heads + 2 * groups),
        "feedforward": layers * 3 * width * hidden,
        "norm": layers * 2 * width + width,
        "output": 0,
    }


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built_once_its_vocabulary_is_known(name: str) -> None:
    config = with_vocab(PRESETS[name](), 257)
    assert sum(p.numel() for p in build(config, device="meta").parameters()) == config.parameters()
