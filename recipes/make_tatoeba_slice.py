"""Cut the English-German sentences of the T5 demo out of Tatoeba; the same file gives the same slice.

    python recipes/make_tatoeba_slice.py DATA/tatoeba/deu.txt.xz trivium/assets

The file (`English<TAB>German`, manythings.org/anki, CC BY 2.0) has 169,813 pairs in the version of 2018-05-13. Kept are
those whose English side has two to six words, all of them among the thousand most frequent: few enough to be learned
in a minute and a half on two CPU cores. A thousand English sentences, chosen by the hash of their words, are held out
with all their translations. Case and punctuation do not count, so that "Stop it!" is not learned from "stop it".
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

FREQUENT, HELD_OUT = 1000, 1000
SHORTEST, LONGEST = 2, 6
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")
Pair = tuple[str, str]


def words(sentence: str) -> list[str]:
    """The words of a sentence in lower case; two sentences with the same words count as one."""
    return _WORD.findall(sentence.replace("\u2019", "'").lower())


def split(pairs: Iterable[Pair]) -> tuple[list[Pair], list[Pair]]:
    """The pairs to learn from and those held out, in their order; no English sentence is on both sides."""
    every = list(dict.fromkeys(pairs))
    counts = Counter(word for sentence in dict.fromkeys(english for english, _ in every) for word in words(sentence))
    frequent = set(sorted(counts, key=lambda word: (-counts[word], word))[:FREQUENT])
    kept = [
        (english, german)
        for english, german in every
        if SHORTEST <= len(words(english)) <= LONGEST and german and frequent.issuperset(words(english))
    ]
    keys = {" ".join(words(english)) for english, _ in kept}
    held = set(sorted(keys, key=lambda key: hashlib.sha256(key.encode()).digest())[:HELD_OUT])
    train = [pair for pair in kept if " ".join(words(pair[0])) not in held]
    test = [pair for pair in kept if " ".join(words(pair[0])) in held]
    assert not {tuple(words(english)) for english, _ in train} & {tuple(words(english)) for english, _ in test}
    return train, test


def read(path: Path) -> list[Pair]:
    """Every pair of a file of two columns."""
    lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    rows = [line.split("\t") for line in lines if line]
    return [(english.strip(), german.strip()) for english, german, *_ in rows]


def main() -> None:
    source, folder = map(Path, sys.argv[1:])
    for name, pairs in zip(("train", "test"), split(read(source)), strict=True):
        text = "".join(f"{english}\t{german}\n" for english, german in pairs)
        path = folder / f"tatoeba-{name}.tsv.gz"
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        print(f"{path}: {len(pairs):,} pairs, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
