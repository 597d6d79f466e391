"""Named systems; the table is what `tv.presets()` lists."""

from __future__ import annotations

from trivium.models.presets import bart, bert, gpt, llama, t5, transformer
from trivium.models.presets.preset import Preset

PRESETS: dict[str, Preset] = {
    **gpt.MINI,
    **bert.MINI,
    **t5.MINI,
    **llama.MINI,
    **transformer.PUBLISHED,
    **gpt.PUBLISHED,
    **bert.PUBLISHED,
    **t5.PUBLISHED,
    **bart.PUBLISHED,
    **llama.PUBLISHED,
}
