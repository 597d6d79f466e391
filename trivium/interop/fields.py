"""Reading a stranger's table of settings: only what is asked for by name, with its type and its bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from trivium.config import finite
from trivium.errors import CheckpointError, shown
from trivium.parts.options.feedforward import Activation
from trivium.parts.site import MOST

T = TypeVar("T")

HEADS = 10_000  # the most heads, and the largest: what is computed for each must not take long before tensors are seen

# Settings that do not change what a model computes from ids: not worth a report.
# fmt: off
HARMLESS = frozenset({
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "model_type", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "sep_token_id", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript", "transformers_version",
    "use_bfloat16", "use_cache",
})
# fmt: on

# What `transformers` calls the activations that we have.
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu-tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "identity",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_python_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_accurate": "gelu-tanh",
    "gelu_python": "gelu",
    "swish": "silu",
}


def spelling(activation: str) -> str:
    """What `transformers` calls an activation of ours; one that it does not have gives the name of another."""
    return next((theirs for theirs, mine in ACTIVATIONS.items() if mine == activation), "gelu")


class Fields:
    """A table of settings that remembers what it was asked for; a wrong value is a CheckpointError that names it."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._table = table
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether there is a value other than null."""
        return self._table.get(name) is not None

    @property
    def ignored(self) -> tuple[str, ...]:
        """The settings that nobody asked for, in order."""
        unknown = self._table.keys() - self._asked - HARMLESS
        return tuple(sorted(name for name in unknown if isinstance(name, str)))

    def integer(
        self,
        name: str,
        default: int,
        *,
        also: str = "",
        null: int | None = None,
        least: int = 1,
        most: int = MOST,
    ) -> int:
        """A whole number; `null` (the default if not given) stands for a null, `also` is another spelling."""
        value = self._get(name, default, also, null)
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(name, value, f"it must be a whole number from {least} to {most}")
        return value

    def number(
        self,
        name: str,
        default: float,
        *,
        also: str = "",
        null: float | None = None,
        least: float = 0.0,
        most: float = math.inf,
    ) -> float:
        """A finite number."""
        value = self._get(name, default, also, null)
        good = type(value) in (int, float) and finite(value) and least <= value <= most
        if not good:
            raise self.refusal(name, value, f"it must be a number from {least} to {most}")
        return float(value)

    def flag(self, name: str, default: bool, *, also: str = "") -> bool:
        value = self._get(name, default, also, None)
        if type(value) is not bool:
            raise self.refusal(name, value, "it must be true or false")
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, T], *, also: str = "") -> T:
        """What one of some words stands for."""
        value = self._get(name, default, also, None)
        if not isinstance(value, str) or value not in choices:
            raise self.refusal(name, value, f"trivium knows {', '.join(choices)}")
        return choices[value]

    def words(self, name: str) -> list[str]:
        """A list of words, empty where there is none."""
        value = self._get(name, [], "", [])
        if not isinstance(value, list) or len(value) > MOST or not all(isinstance(word, str) for word in value):
            raise self.refusal(name, value, "it must be a list of words")
        return value

    def table(self, name: str) -> Fields:
        """A table within the table, empty where there is none."""
        value = self._get(name, {}, "", {})
        if not isinstance(value, dict):
            raise self.refusal(name, value, "it must be a table")
        return Fields(value, f"{self.where}: {name}")

    def only(self, name: str, *allowed: object, default: object = None) -> None:
        """Refuse a setting that would change what the model computes in a way that we do not have.

        Absent, null and `default` are allowed, and so is every value of `allowed`.
        """
        self._asked.add(name)
        value = self._table.get(name)
        accepted = (None, default, *allowed)
        if not any(type(value) is type(one) and value == one for one in accepted):
            raise self.refusal(name, value, "trivium does not have that; use another checkpoint")

    def skip(self, *names: str) -> None:
        """Names that are known to make no difference in use, such as dropout of heads that are not read."""
        self._asked.update(names)

    def refusal(self, name: str, value: object, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name} is {shown(value, 60)}; {reason}")

    def _get(self, name: str, default: Any, also: str, null: Any) -> Any:
        self._asked.add(name)
        if also:
            self._asked.add(also)
        key = also if also and name not in self._table else name
        if key not in self._table:
            return default
        value = self._table[key]
        if also in self and key != also and self._table[also] != value:
            raise self.refusal(name, value, f"{also} is another spelling of it and says otherwise; correct one of them")
        if value is None:
            return default if null is None else null
        return value
