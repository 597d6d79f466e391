"""Small corpora in the shape of the real ones, for evaluations that look their files up by name."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

PTB = " the cat sat on the <unk> \n the dog sat \n"
BOOKS = "The cat sat on the mat of the old house.\n\fThe dog of the house ran to the old cat again.\n"
PAIRS = {"en": "A dog runs.\nTwo cats sit.\n", "de": "Ein Hund rennt.\nZwei Katzen sitzen.\n"}


def lay(folder: Path) -> Path:
    """Every corpus in a folder of its own, some of them compressed."""
    for name in ("ptb", "books", "multi30k", "tatoeba", "tinyshakespeare"):
        (folder / name).mkdir(parents=True)
    for split in ("valid", "test"):
        (folder / "ptb" / f"ptb.{split}.txt.xz").write_bytes(lzma.compress(PTB.encode()))
    (folder / "books" / "train.txt").write_text(BOOKS * 3)
    (folder / "books" / "valid.txt").write_text(BOOKS)
    for language, text in PAIRS.items():
        for split in ("val", "test_2016_flickr"):
            (folder / "multi30k" / f"{split}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    lines = [f"I have {number} cats.\tIch habe {number} Katzen.\n" for number in range(400)]
    lines += [f"I have {number} cats.\tIch hab {number} Katzen.\n" for number in range(400)]
    (folder / "tatoeba" / "deu.txt").write_text("".join(lines))
    (folder / "tinyshakespeare" / "input.txt").write_text("".join(map(chr, range(48, 98))) * 2)
    return folder
