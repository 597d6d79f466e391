"""Mixed text for comparing tokenizers: languages, Unicode at random, and the cases that break them."""

from __future__ import annotations

import gzip
import lzma
import random
from pathlib import Path

_SOURCES = (
    "books/valid.txt.xz",
    "wikitext-2/wiki.test.raw.xz",
    "multi30k/train.de.gz",
    "multi30k/train.fr.gz",
    "tatoeba/deu.txt.xz",
    "tatoeba/fra.txt.xz",
    "mt-eval/newstest2016.de.gz",
)
EDGES = [
    *(
        "",
        "\n",
        "\n\n",
        " ",
        "   ",
        "\t",
        " a",
        "a ",
        "  a  b  ",
        "a\n",
        "a\tb",
        "\r\n",
        "a" + " " * 33 + "b",
        " " * 50,
    ),
    *(
        "ﬁne ①②",
        "\uff21 \uff22",
        "é é",
        "e\u0301",
        "a\u0300\u0301\u0302",
        "e\u0302\u0301",
        "Å Å",
        "ſßİǆ½㎏",
        "ﾊﾟ ｶﾞ",
        "か\u3099",
    ),
    *("\u200b", "\u200ba", "a\u200bb", "a\u200d", "\u2060", "\u00ad", "\ufeffabc", "\u180e", "a ̈", "\uff1b\u031c"),
    *(
        "😀",
        "👨‍👩‍👧‍👦",
        "🇩🇪🇫🇷",
        "🏳️‍🌈",
        "नमस्ते",
        "สวัสดี",
        "한국어",
        "\u1112\u1161\u11ab",
        "日本語テキスト",
        "ﷺ",
        "\u0e33",
        "\u0f77",
    ),
    *(
        "\x00",
        "a\x00b",
        "\x01\x02",
        "\x7f",
        "\x85",
        "\u00a0",
        "a\u00a0b",
        "\u2028",
        "\u3000a",
        "\ufffd",
        "\U0010ffff",
        "\ue000",
    ),
    *(
        "▁",
        "▁a",
        "a▁b",
        "▁▁",
        "…“quoted”\u2018s\u2019",
        "1234567890",
        "x" * 300,
        "don't I'LL we've",
        "def f(x):\n\treturn x",
    ),
]


def passages(shared: Path, characters: int, *, size: int = 2000) -> list[str]:
    """About so many characters of the shared corpora, in pieces of `size`."""
    result = []
    for source in _SOURCES:
        path = shared / "data" / source
        opened = lzma.open if path.suffix == ".xz" else gzip.open
        with opened(path, "rt", encoding="utf-8") as file:
            text = str(file.read(characters // len(_SOURCES)))
        result += [text[start : start + size] for start in range(0, len(text), size)]
    return result


def scrambled(rng: random.Random, count: int) -> list[str]:
    """Texts of words, numbers and characters from all of Unicode."""
    return ["".join(_scrap(rng) for _ in range(rng.randrange(1, 12))) for _ in range(count)]


def _scrap(rng: random.Random) -> str:
    blocks = [(0x20, 0x3000), (0x1F300, 0x1FAFF), (0x300, 0x36F), (0xFB00, 0xFEFF), (0, 0x20), (0x2000, 0x2070)]
    blocks += [(0x3040, 0x30FF), (0x900, 0xFFF), (0xFF00, 0xFFFF), (0xE000, 0x110000)]
    choice = rng.randrange(4)
    if choice == 0:
        return chr(rng.randrange(*rng.choice(blocks)))
    if choice == 1:
        return rng.choice([" ", "  ", "\n", "\t", "the", " of", "\u200d", "\u200b"])
    if choice == 2:
        return "".join(rng.choices("etaoin shrdu", k=6))  # no l: runs of it tie in T5's model
    return str(rng.randrange(10 ** rng.randrange(1, 12)))
