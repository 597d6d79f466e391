"""A conversation with a model: its own template, its answer piece by piece."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from trivium.errors import RequestError
from trivium.generation.sampling import Sampling
from trivium.generation.scorer import Prompt
from trivium.generation.text import Completion, stream_text
from trivium.models.transformer import Transformer
from trivium.text.chat import Chat, Message, recognise
from trivium.text.tokenizer import Tokenizer


def chat_of(tokenizer: Tokenizer, notes: Mapping[str, Any]) -> Chat:
    """How a model's conversations are written, by the template that came with it."""
    template = notes.get("chat_template", "")
    if not template:
        raise RequestError(
            "this model has no chat template, so it was not made for conversations; `trivium generate` continues texts"
        )
    return recognise(template, begin=tokenizer.piece(tokenizer.begin), end=tokenizer.piece(tokenizer.end))


def answer(
    model: Transformer,
    tokenizer: Tokenizer,
    chat: Chat,
    messages: Sequence[Message],
    *,
    ends: frozenset[int],
    tokens: int,
    sampling: Sampling,
    seed: int,
) -> Generator[str, None, Completion]:
    """The model's next message; `ends` are the ids that end a text beside those of the template."""
    ids = chat.ids(tokenizer, messages)
    if len(ids) >= model.config.context:
        raise RequestError(
            f"the conversation has {len(ids)} tokens and the model's context {model.config.context}; start a new one"
        )
    return stream_text(
        model,
        tokenizer,
        Prompt(ids=tuple(ids)),
        tokens=min(tokens, model.config.context - len(ids)),
        sampling=sampling,
        seed=seed,
        stop_ids=chat.stop_ids(tokenizer) | ends,
    )
