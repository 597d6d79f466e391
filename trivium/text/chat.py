"""Chat templates as data: what stands before and after the words of each role, recognised from published text.

A published template is a program in Jinja. It is never run: its text is searched for the marks of the families below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from trivium.errors import DataError, RequestError, shown
from trivium.text.template import EVERYONE, canonical, quoted
from trivium.text.tokenizer import Tokenizer

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")
_LARGEST = 1 << 16  # characters of a template; published ones have a few thousand


class Message(NamedTuple):
    """What one side says."""

    role: Role
    text: str


class Turn(NamedTuple):
    """What stands before and after the words of a role."""

    prefix: str
    suffix: str


class Span(NamedTuple):
    """A stretch of a rendered conversation: a mark of the template, or words that are text whatever they spell."""

    text: str
    mark: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """How a conversation is written for a model."""

    name: str
    turns: Mapping[Role, Turn]
    stop: tuple[str, ...]  # the special tokens that end an answer
    begin: str = ""  # before everything
    answer: str | None = None  # what the model's answer begins with, where that is not the assistant's prefix
    system: Literal["turn", "first user", "refused"] = "turn"  # where a system message goes
    default: str | None = None  # the system message of a conversation that has none
    strip: bool = False  # white space around the words is dropped
    template: str = ""  # the published text

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> list[Span]:
        """The conversation in stretches; with `answer` up to where the model's answer begins."""
        spans = [Span(self.begin, True)]
        held = ""  # the system's message, until the first question comes
        for role, text in self._complete(messages):
            turn = self.turns[role]
            words = [
                Span(turn.prefix, True),
                Span(text.strip() if self.strip else text, False),
                Span(turn.suffix, True),
            ]
            if role == "system" and self.system == "first user":
                held = text
                continue
            if held:
                around = self.turns["system"]
                question = Span(text.rstrip() if self.strip else text, False)
                words[1:2] = [Span(around.prefix, True), Span(held, False), Span(around.suffix, True), question]
                held = ""
            spans += words
        if answer:
            spans.append(Span(self.turns["assistant"].prefix if self.answer is None else self.answer, True))
        return [span for span in spans if span.text]

    def ids(self, tokenizer: Tokenizer, messages: Sequence[Message], *, answer: bool = True) -> list[int]:
        """The conversation as ids: marks that are special tokens become them, the words of a message never do."""
        specials = tokenizer.specials
        longest = sorted(map(re.escape, specials), key=len, reverse=True)
        cut = re.compile(f"({'|'.join(longest)})")
        ids: list[int] = []
        run = ""  # between two special tokens marks and words are one text, as in training
        for span in self.render(messages, answer=answer):
            parts = cut.split(span.text) if span.mark else [span.text]
            for place, part in enumerate(parts):
                if place % 2:
                    ids += [*tokenizer.encode(run), specials[part]]
                    run = ""
                else:
                    run += part
        return [*ids, *tokenizer.encode(run)]

    def stop_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The ids that end an answer, the end of a text among them."""
        known = {tokenizer.specials[spelling] for spelling in self.stop if spelling in tokenizer.specials}
        return frozenset(known | {tokenizer.end})

    def _complete(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with a system message where this template has one by default; a RequestError if they are odd."""
        if not messages or messages[-1].role == "system":
            raise RequestError("the conversation has no question; say something")
        for place, message in enumerate(messages):
            if message.role not in ROLES:
                raise RequestError(f"message {place + 1} is by {shown(message.role)}; roles are {', '.join(ROLES)}")
            if message.role == "system" and place:
                raise RequestError(f"message {place + 1} is by the system; its message comes first, and once")
        if messages[0].role != "system":
            return [*([] if self.default is None else [Message("system", self.default)]), *messages]
        if self.system == "refused":
            raise RequestError(f"the template of {self.name} has no system message; put it into the first question")
        if self.system == "first user" and messages[1].role != "user":
            raise RequestError(f"with {self.name} a system message stands in the first question; ask one")
        return list(messages)


def recognise(template: str, *, begin: str = "<s>", end: str = "</s>") -> Chat:
    """The chat of a published template; `begin` and `end` are the tokenizer's own. A DataError if it is unknown."""
    if len(template) <= _LARGEST:
        plain = canonical(template)
        bos = begin if "bos_token" in plain else ""
        for make in (_chatml, _llama3, _llama2, _mistral, _zephyr, _gemma):
            if (chat := make(plain, bos, end)) is not None and _sound(plain, chat):
                return replace(chat, template=template)
    raise DataError(
        "the chat template is not one that trivium knows (ChatML, Llama 2 and 3, Mistral, Zephyr, Gemma), and "
        "templates are never run; give the conversation as a prompt with its marks written out"
    )


def _sound(plain: str, chat: Chat) -> bool:
    """Whether nothing else in a template changes what a conversation becomes."""
    if _CHANGES.search(plain):
        return False
    if plain.count("bos_token") > 1 or ("bos_token" in plain and not any(mark in plain for mark in _BEGINS)):
        return False
    asked = plain.replace(_UNASKED, "")
    answer = re.escape(quoted(chat.turns["assistant"].prefix if chat.answer is None else chat.answer))
    prompt = rf"\{{%if (?:loop\.last and )?add_generation_prompt%\}}\{{\{{{answer}\}}\}}\{{%endif%\}}"
    if chat.name == "Zephyr":  # it ends in a line end of its own
        prompt = r"\{%if loop\.last and add_generation_prompt%\}\{\{'<\|assistant\|>\n?'\}\}\n?\{%endif%\}"
    return asked.count("add_generation_prompt") == len(re.findall(prompt, asked)) == (chat.answer != "")


# what changes the words of a message, or puts others before an answer
_CHANGES = re.compile(
    r"\.(?:split|replace|lstrip|rstrip|upper|lower|title|capitalize|format|join)\(|think|reasoning"
    r"|\|(?:replace|upper|lower|title|capitalize|truncate|format|join|default)\b"
)
# a template's begin, once and always
_BEGINS = (
    "{{bos_token}}{%",
    "{%if loop.index0==0%}{%set content=bos_token+content%}{%endif%}",
    "{{bos_token+'[INST] '",
)
_UNASKED = "{%if not add_generation_prompt is defined%}{%set add_generation_prompt=false%}{%endif%}"
_TURN = "{{'<|im_start|>'+message['role']+'\n'+message['content']+'<|im_end|>\n'}}"
_SYSTEM = "{{'<|im_start|>system\nSAID<|im_end|>\n'}}"
_CHATML = (
    "{%for message in messages%}" + _TURN + "{%endfor%}",
    "{%for message in messages%}{%if loop.first and messages[0]['role']!='system'%}" + _SYSTEM + "{%endif%}"
    f"{_TURN}{{%endfor%}}",
    "{%if messages[0]['role']=='system'%}{{'<|im_start|>system\n'+messages[0]['content']+'<|im_end|>\n'}}"
    "{%else%}"
    + _SYSTEM
    + "{%endif%}{%for message in messages%}{%if "
    + EVERYONE
    + "%}"
    + _TURN
    + "{%endif%}{%endfor%}",
)


def _chatml(plain: str, begin: str, end: str) -> Chat | None:
    body = plain.removeprefix("{{bos_token}}").removeprefix(_UNASKED)
    body, asked, after = body.partition("{%if add_generation_prompt%}{{'<|im_start|>assistant\n'}}{%endif%}")
    if not asked or after:
        return None
    forms = (re.escape(form).replace("SAID", r"(?P<said>(?:[^'\\]|\\.)*?)") for form in _CHATML)
    found = next((match for form in forms if (match := re.fullmatch(form, body, re.DOTALL))), None)
    if found is None:
        return None
    said = found.groupdict().get("said")
    default = None if said is None else re.sub(r"\\(.)", r"\1", said)
    turns = {role: Turn(f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ROLES}
    return Chat(name="ChatML", turns=turns, begin=begin, stop=("<|im_end|>",), default=default)


def _llama3(plain: str, begin: str, end: str) -> Chat | None:
    if (
        "'<|start_header_id|>'+message['role']+'<|end_header_id|>\n\n'+message['content']|trim+'<|eot_id|>'"
        not in plain
    ):
        return None
    turns = {role: Turn(f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>") for role in ROLES}
    default = None
    if "Cutting Knowledge Date" in plain:
        # Llama 3.1 says when it learned and what day it is: here the day that its template falls back to, so that
        # equal conversations are equal
        day = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
        turns["system"] = Turn(turns["system"].prefix + day, "<|eot_id|>")
        default = ""
    stop = ("<|eot_id|>", "<|end_of_text|>")
    return Chat(name="Llama 3", turns=turns, begin=begin, stop=stop, default=default, strip=True)


def _llama2(plain: str, begin: str, end: str) -> Chat | None:
    marks: tuple[str, ...] = ("'<<SYS>>\n'", "'\n<</SYS>>\n\n'", "bos_token+'[INST] '+content|trim+' [/INST]'")
    marks += ("' '+content|trim+' '+eos_token", "{%set content=message['content']%}")
    if not all(mark in plain for mark in marks):
        return None
    turns: dict[Role, Turn] = {
        "system": Turn("<<SYS>>\n", "\n<</SYS>>\n\n"),
        "user": Turn(f"{begin}[INST] ", " [/INST]"),
        "assistant": Turn(" ", f" {end}"),
    }
    return Chat(name="Llama 2", turns=turns, stop=(end,), answer="", system="first user", strip=True)


def _mistral(plain: str, begin: str, end: str) -> Chat | None:
    asked = re.search(r"\{\{'( ?\[INST\] ?)'\+message\['content'\]\+'( ?\[/INST\])'\}\}", plain)
    said = re.search(r"\{\{(?:'( ?)'\+)?message\['content'\]\+(?:'( ?)'\+)?eos_token(?:\+'( ?)')?\}\}", plain)
    if not asked or not said:
        return None
    before, between, behind = (text or "" for text in said.groups())
    turns: dict[Role, Turn] = {
        "user": Turn(asked[1], asked[2]),
        "assistant": Turn(before, between + end + behind),
    }
    return Chat(name="Mistral", turns=turns, begin=begin, stop=(end,), answer="", system="refused")


def _zephyr(plain: str, begin: str, end: str) -> Chat | None:
    said = re.search(r"\{\{'<\|user\|>\n'\+message\['content'\]\+eos_token(\+'\n')?\}\}(\n)?", plain)
    asked = re.search(r"\{\{'<\|assistant\|>(\n)?'\}\}(\n)?", plain)
    if not said or not asked or "'<|assistant|>\n'+message['content']+eos_token" not in plain:
        return None
    behind = "\n" if said[1] or said[2] else ""
    answer = "<|assistant|>" + ("\n" if asked[1] or asked[2] else "")
    turns = {role: Turn(f"<|{role}|>\n", end + behind) for role in ROLES}
    return Chat(name="Zephyr", turns=turns, begin=begin, stop=(end,), answer=answer)


def _gemma(plain: str, begin: str, end: str) -> Chat | None:
    if "'<start_of_turn>'+role+'\n'+message['content']|trim+'<end_of_turn>\n'" not in plain:
        return None
    turns: dict[Role, Turn] = {
        "user": Turn("<start_of_turn>user\n", "<end_of_turn>\n"),
        "assistant": Turn("<start_of_turn>model\n", "<end_of_turn>\n"),
    }
    return Chat(name="Gemma", turns=turns, begin=begin, stop=("<end_of_turn>",), system="refused", strip=True)
