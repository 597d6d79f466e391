"""Chat templates in one way of writing, so that one can be told from another; nothing of them is ever run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_OPENS = re.compile(r"\{([%{#])(-?)")
_CLOSES = {"%": "%}", "{": "}}", "#": "#}"}
_LONGEST = 4096  # characters of a tag that is looked into
_TEXT = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t"}
# a conversation here has no tools, so that these are never true
_ABSENT = re.compile(r"tools(?: and (?!.* or ).*)?|message\['role'\]=='tool'(?: or message\['role'\]=='ipython')?")
EVERYONE = (  # Qwen's way to say that every message is meant, but for the system's first
    "(message['role']=='user') or (message['role']=='system' and not loop.first) or (message['role']=='assistant')"
)


def canonical(template: str) -> str:
    """A template with single quotes, message['role'], joined texts, and without blanks that Jinja drops and tools.

    White space around tags goes as under trim_blocks and lstrip_blocks, which is how transformers sets Jinja up.
    """
    return "".join(_without_tools(_tags(template.removesuffix("\n"))))


def quoted(text: str) -> str:
    """A text as `canonical` writes it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _tags(template: str) -> Iterator[str]:
    """Tags in one way of writing, and the texts between them; no comments."""
    at, left = 0, ""  # where the last tag ended, and what it does to the text behind it
    while tag := _OPENS.search(template, at):
        end = template.find(_CLOSES[tag[1]], tag.end())
        if end < 0:
            break
        block = tag[1] != "{"
        text, line = _behind(template[at : tag.start()], left)
        if tag[2]:
            text = text.rstrip()
        elif block and not (rest := text[text.rfind("\n") + 1 :]).strip(" \t") and ("\n" in text or line or not at):
            text = text.removesuffix(rest)
        yield text
        body = template[tag.end() : end]
        left = "-" if body.endswith("-") else "line" if block else ""
        if tag[1] != "#":
            yield f"{{{tag[1]}{_body(body.removesuffix('-'))}{_CLOSES[tag[1]]}"
        at = end + 2
    yield _behind(template[at:], left)[0]


def _behind(text: str, left: str) -> tuple[str, bool]:
    """A text behind a tag, and whether it begins a line because the tag took the line's end away."""
    if left == "-":
        return text.lstrip(), False
    cut = left == "line" and text.startswith("\n")
    return text[cut:], cut


def _body(body: str) -> str:
    """The inside of a tag."""
    if len(body) > _LONGEST:  # of nothing that is known; and what follows is slow on what was made to be slow
        return body
    parts = _TEXT.split(body.strip())
    for place, part in enumerate(parts):
        if place % 2:
            escaped = re.sub(r"\\(.)", lambda found: _ESCAPED.get(found[1], found[1]), part[1:-1], flags=re.DOTALL)
            parts[place] = quoted(escaped)
            continue
        part = re.sub(r"\s+", " ", part).replace(".strip()", "|trim").replace(" and not message.tool_calls", "")
        part = re.sub(r" ?(==|!=|[+|=]) ?", r"\1", part)
        parts[place] = re.sub(r"\b(message|messages\[0\])\.(role|content)\b", r"\1['\2']", part)
    return "".join(parts).replace("'+'", "")


def _without_tools(tags: Iterable[str]) -> Iterator[str]:
    """The tags without the branches that only tools reach, and without those that nothing reaches."""
    chains: list[_Chain] = []
    for tag in tags:
        word, _, rest = tag[2:-2].partition(" ") if tag.startswith("{%") else ("", "", "")
        here = chains[-1] if chains else _Chain(False, False)
        if word == "if":
            chains.append(_Chain(here.hidden, _ABSENT.fullmatch(rest) is not None, rest == EVERYONE))
            if not chains[-1].hidden:
                chains[-1].shown = True
                yield tag
        elif word in ("elif", "else") and chains and not here.outside:
            here.gone = here.complete or (word == "elif" and _ABSENT.fullmatch(rest) is not None)
            if not here.gone and here.shown:
                yield tag
            elif not here.gone and word == "elif":  # the first that is left
                here.shown = True
                yield f"{{%if {rest}%}}"
        elif word == "endif" and chains:
            if chains.pop().shown:
                yield tag
        elif not here.hidden:
            yield tag


@dataclass(slots=True)
class _Chain:
    """An `if` and what belongs to it, where the walk through the tags is."""

    outside: bool  # all of it lies in a branch that is never taken
    gone: bool  # the branch at hand is never taken
    complete: bool = False  # every message takes a branch that came already
    shown: bool = False  # some branch and its condition were passed on

    @property
    def hidden(self) -> bool:
        return self.outside or self.gone
