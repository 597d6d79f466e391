"""The comparisons can fail: with any setting of a published model changed, the same weights give other logits."""

# B batch, S source tokens, T target tokens, V vocabulary

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.oracle import test_bart, test_bert, test_gpt2, test_llama, test_opt, test_t5, test_transformer2017
from tests.oracle.copying import ids, logits
from trivium.config import dump, flat, load, overrides
from trivium.models.config import ModelConfig
from trivium.models.presets import transformer
from trivium.models.transformer import Transformer, build, load_weights, weights

MODELS: dict[str, Callable[[], Transformer]] = {
    "transformer": lambda: test_transformer2017.pair(transformer.Shape(2, 36, 4, 0.1), seed=0, biases=False)[1],
    "gpt": lambda: test_gpt2.pair(first=True)[1],
    "gpt2": lambda: test_gpt2.pair(first=False)[1],
    "opt": lambda: test_opt.pair(test_opt.SHAPES[0], seed=0)[1],
    "llama": lambda: test_llama.pair(test_llama.small())[1],
    "bert": lambda: test_bert.bert_pair(test_bert.SHAPES[0], 0)[1],
    "roberta": lambda: test_bert.roberta_pair(test_bert.SHAPES[0], 0)[1],
    "t5": lambda: test_t5.pair("v1.0", test_t5.SHAPES[0])[1],
    "t5v1.1": lambda: test_t5.pair("v1.1", test_t5.SHAPES[0])[1],
    "bart": lambda: test_bart.bart_pair(0)[1],
    "marian": lambda: test_bart.marian_pair(0)[1],
}
# Other values for a setting, wherever a model has it; all of them leave the weights their shapes.
OTHERS: dict[str, tuple[object, ...]] = {
    "feedforward.activation": ("relu", "gelu", "gelu-tanh", "silu"),
    "norm.eps": (1e-3,),
    "attention.scale": ("root", "none"),
    "cross.scale": ("root", "none"),
    "attention.window": (3,),
    "position.layout": ("halves", "interleaved"),
    "position.spacing": ("tensor2tensor",),
    "position.theta": (9_000.0,),
    "position.distance": (64,),
    "embedding.scale": ("root", "none"),
    "output.scale": ("root", "none"),
    "output.activation": ("relu", "gelu-tanh"),
}


def wrong(config: ModelConfig) -> dict[str, ModelConfig]:
    """The configuration with one setting changed, in every way above."""
    settings, result = flat(config), {}
    for ending, values in OTHERS.items():
        for key in (key for key in settings if key == ending or key.endswith(f".block.{ending}")):
            for value in values:
                if settings[key] != value:
                    result[f"{key}={value}"] = load(ModelConfig, dump(config), overrides({key: value}))
    return result


@pytest.mark.parametrize("name", MODELS)
def test_any_wrong_setting_shows_in_the_logits(name: str) -> None:
    ours = MODELS[name]()
    inputs = {"source": ids(1, 25, 1, 60) + 3} if ours.config.family == "encoder-decoder" else {}
    tokens_BT = ids(1, 20, 0, 60) + 3
    right = logits(ours, tokens_BT, **inputs)
    mutants = wrong(ours.config)
    assert len(mutants) > 5
    for change, config in mutants.items():
        other = build(config).eval()
        load_weights(other, weights(ours))
        gap = (logits(other, tokens_BT, **inputs) - right).abs().max()
        assert gap > 3e-5, f"{change} is not seen"
