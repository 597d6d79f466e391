"""Files of a tokenizer that are not plain files of its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.text.test_published import opened, wrote
from trivium.errors import DataError
from trivium.text import published, sentencepiece
from trivium.text.published import read_tokenizer

BERT = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"])


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "config.json", "spiece.model", "merges.txt"])
@pytest.mark.parametrize("sort", ["link", "device", "pipe", "folder", "loop", "large"])
def test_a_file_that_is_no_file_of_the_folder_is_refused(
    name: str, sort: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "in", tmp_path / "in" / name
    folder.mkdir()
    wrote(folder, vocab={"a": 0, "</s>": 1})
    (folder / "vocab.txt").write_text(BERT)
    file.unlink(missing_ok=True)
    if sort == "link":
        (tmp_path / "outside").write_text(BERT)
        file.symlink_to(tmp_path / "outside")
    elif sort == "pipe":
        os.mkfifo(file)
    elif sort == "folder":
        file.mkdir()
    elif sort == "large":
        file.write_text(" " * 2000)
        monkeypatch.setattr(published, "LARGEST", 1000)
        monkeypatch.setattr(sentencepiece, "_LARGEST", 1000)
    else:
        file.symlink_to("/dev/zero" if sort == "device" else file)
    with pytest.raises(DataError, match=f"{name} cannot be (read|used)"):
        read_tokenizer(folder)


def test_the_links_of_the_hub_to_its_own_blobs_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "1a2b"
    blobs.mkdir()
    folder.mkdir(parents=True)
    (blobs / "3c4d").write_text(BERT)
    (folder / "vocab.txt").symlink_to("../../blobs/3c4d")
    assert opened(folder).size == 6
    (folder / "vocab.txt").unlink()
    (tmp_path / "3c4d").write_text(BERT)
    (folder / "vocab.txt").symlink_to("../../3c4d")
    with pytest.raises(DataError, match=r"vocab\.txt cannot be read: it leads out of its folder"):
        read_tokenizer(folder)
