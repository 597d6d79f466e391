"""Named systems, one function each; the table is what `tv.presets()` lists."""

from __future__ import annotations

from collections.abc import Callable

from trivium.models.config import ModelConfig
from trivium.models.presets import gpt, llama

PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "gpt": gpt.gpt,
    "gpt2": gpt.gpt2,
    "gpt2-medium": gpt.gpt2_medium,
    "gpt2-large": gpt.gpt2_large,
    "gpt2-xl": gpt.gpt2_xl,
    "gpt-mini": gpt.gpt_mini,
    "llama-mini": llama.llama_mini,
    "smollm2-135m": llama.smollm2_135m,
}
