"""Whether a fused computation may take the place of a module's `forward`.

A hook, a wrapper, a parametrisation or a patched `forward` sees or changes what the module computes, so a fast path
that reads only its weights would be wrong. All of them can be added at any time, so fast paths ask per call; decoding
with CUDA graphs asks once, when a decode state is acquired (`fingerprint`).
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn
from torch.nn.modules import module as _global


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs more than the `forward` of its class: hooks, global ones too, or a patch."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or _global._global_forward_hooks
        or _global._global_forward_pre_hooks
        or _global._global_backward_hooks
        or _global._global_backward_pre_hooks
    )


def any_hooks(*models: nn.Module) -> bool:
    """Whether any module of the models has hooks: a CUDA graph would call them only while it is captured."""
    return any(has_hooks(module) for model in models for module in model.modules())


def fingerprint(model: nn.Module) -> Hashable:
    """What a captured graph assumes of the modules beside their weights: their classes, and whether there are hooks."""
    return (any_hooks(model), *map(type, model.modules()))
