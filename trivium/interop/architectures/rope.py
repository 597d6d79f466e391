"""Rotary positions as config.json spells them: `rope_parameters` today, `rope_theta` and `rope_scaling` before."""

from __future__ import annotations

from typing import Any

from trivium.interop.fields import Fields
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.options.scaling import LinearScaling, Llama3, NoScaling, Scaling, Yarn

_KINDS = {"default": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


def read(
    fields: Fields,
    context: int,
    *,
    theta: str = "rope_theta",
    share: str = "",
    part: float = 1.0,
) -> RotaryOptions:
    """The options of rotary positions; `theta` and `share` are spellings of older files, `part` is the default share.

    Without a `share` the architecture turns whole heads whatever a file says.
    """
    fields.skip("rope_scaling", "rope_parameters", theta)
    table = fields.table("rope_scaling" if "rope_scaling" in fields else "rope_parameters")  # as `transformers` 5 does
    base = table.number("rope_theta", fields.number(theta, 10_000.0))
    turned = 1.0
    if share:
        turned = table.number("partial_rotary_factor", fields.number(share, part, most=1), most=1)
    else:
        table.only("partial_rotary_factor", 1.0, 1)
        fields.only("partial_rotary_factor", 1.0, 1)
    kind = table.choice("rope_type", table.choice("type", "default", _KINDS), _KINDS)
    scaling = _scaling(table, kind, fields.integer("original_max_position_embeddings", context))
    if table.ignored:
        name = table.ignored[0]
        raise table.refusal(name, "set", "trivium does not have that; use another checkpoint")
    return RotaryOptions(theta=base, share=turned, scaling=scaling)


def _scaling(table: Fields, kind: str, context: int) -> Scaling:
    if kind == "default":
        table.skip("factor", "original_max_position_embeddings")
        return NoScaling()
    factor = table.number("factor", 1.0, least=1)
    if kind == "linear":
        return LinearScaling(factor=factor)
    original = table.integer("original_max_position_embeddings", context)
    if kind == "llama3":
        low, high = table.number("low_freq_factor", 1.0), table.number("high_freq_factor", 4.0)
        return Llama3(factor=factor, low=low, high=high, original=original)
    table.only("truncate", True)
    table.only("mscale")
    table.only("mscale_all_dim")
    table.skip("attention_factor")
    strength = "attention_factor" in table  # of 0 it would leave nothing of the scores, while our 0 means a rule
    return Yarn(
        factor=factor,
        original=original,
        fast=table.number("beta_fast", 32.0),
        slow=table.number("beta_slow", 1.0),
        attention=table.number("attention_factor", 1.0, least=1e-6) if strength else 0.0,
    )


def write(position: RotaryOptions, *, partial: bool = False) -> dict[str, Any]:
    """The table `rope_parameters`."""
    scaling = position.scaling
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": position.theta}
    if partial:
        table["partial_rotary_factor"] = position.share
    if isinstance(scaling, LinearScaling):
        table |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3):
        table |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original,
        }
    elif isinstance(scaling, Yarn):
        table |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original,
            "beta_fast": scaling.fast,
            "beta_slow": scaling.slow,
        }
        table |= {"attention_factor": scaling.attention} if scaling.attention else {}
    return table
