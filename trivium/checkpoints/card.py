"""The card of a saved model: its configuration, the hashes of its files and notes; read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivium.checkpoints.model_files import CARD, home_of
from trivium.errors import CheckpointError, shown
from trivium.files import read_inside
from trivium.renamed import update_model

PLAIN, FORMAT = 1, 2  # a quantised model has format 2, which a trivium that knows only floats refuses
_LARGEST = 64 << 20  # the most bytes that are read: configuration, chat template and 100,000 labels need less


def card(folder: Path) -> dict[str, Any]:
    """What `model.json` of a folder says, checked; old keys of its configuration by their new names."""
    path = folder / CARD
    try:
        facts = json.loads(read_inside(home_of(folder, CARD), CARD, _LARGEST).decode())
        version = facts["format"]
        wanted = {"config": dict, "weights": str, "tokenizer": str, "notes": dict}
        sound = type(version) is int and all(isinstance(facts[key], kind) for key, kind in wanted.items())
        sound = sound and (version != FORMAT or (type(facts["bits"]) is int and facts["bits"] in (8, 4)))
        sound = sound and _is_sound(facts["notes"])
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no model: {CARD} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; restore it from a copy") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        sound, version, facts = False, 0, {}
    if not sound:
        raise CheckpointError(f"{path} is not the card of a trivium model; restore it from a copy")
    if version > FORMAT:
        raise CheckpointError(f"{path} was written by a newer trivium (format {shown(version)}); upgrade trivium")
    return {**facts, "config": update_model(facts["config"])}


def _is_sound(notes: Mapping[str, Any]) -> bool:
    """Whether the notes that a model is used by are of their types; the others are only shown."""
    ids, labels, sentences = notes.get("ids", {}), notes.get("labels", []), notes.get("sentences", {})
    kinds = {"pooling": str, "normalize": bool, "longest": int, "unread": list}
    return (
        isinstance(ids, dict)
        and all(isinstance(each, list) and all(type(id) is int and id >= 0 for id in each) for each in ids.values())
        and isinstance(labels, list)
        and all(isinstance(label, str) for label in labels)
        and isinstance(sentences, dict)
        and all(name not in sentences or type(sentences[name]) is kind for name, kind in kinds.items())
        and isinstance(notes.get("chat_template", ""), str)
    )
