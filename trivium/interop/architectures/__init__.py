"""Published architectures by the name that config.json gives them; the table is what can be read and written."""

from __future__ import annotations

from trivium.interop.architectures import bart, bert, bloom, gpt, llama, mpnet, neox, opt, t5
from trivium.interop.architectures.architecture import Architecture

# In this order an export looks for one that can hold a model.
ARCHITECTURES: dict[str, Architecture] = {
    **llama.ARCHITECTURES,
    **gpt.ARCHITECTURES,
    **opt.ARCHITECTURES,
    **neox.ARCHITECTURES,
    **bloom.ARCHITECTURES,
    **bert.ARCHITECTURES,
    **mpnet.ARCHITECTURES,
    **t5.ARCHITECTURES,
    **bart.ARCHITECTURES,
}
