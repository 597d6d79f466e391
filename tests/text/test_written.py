"""Tokenizers that we write open in transformers with the same ids, texts and frames."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.generation import tiny
from tests.text.corpus import EDGES
from tests.text.test_published import opened, roberta, wrote
from tests.text.trained import CORPUS, KINDS
from trivium.errors import RequestError
from trivium.generation.fill import fill
from trivium.generation.states import logits_of
from trivium.text.adopt import Frame
from trivium.text.kinds import Words
from trivium.text.library import END
from trivium.text.missing import MissingTokenizer
from trivium.text.published import write_tokenizer
from trivium.text.tokenizer import Tokenizer, open_tokenizer

transformers = pytest.importorskip("transformers")
__all__ = ["roberta"]  # a fixture

OWN = {**KINDS, "words": Words().build(CORPUS)}


@pytest.mark.parametrize("kind", OWN)
def test_transformers_reads_our_tokenizers_with_the_same_ids_and_texts(kind: str, tmp_path: Path) -> None:
    ours = OWN[kind]
    write_tokenizer(ours, tmp_path)
    oracle = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    texts = [text for text in [*CORPUS, *EDGES] if END not in text]
    ids = ours.encode_many(texts)
    assert oracle(texts, add_special_tokens=False)["input_ids"] == ids
    assert [oracle.decode(each) for each in ids] == list(map(ours.decode, ids))
    assert (len(oracle), oracle.eos_token_id) == (ours.size, ours.end)
    again = opened(tmp_path)
    assert (again.digest, again.kind) == (ours.digest, ours.kind)


def test_transformers_reads_a_published_tokenizer_that_we_write_again(roberta: Path, tmp_path: Path) -> None:
    ours = opened(roberta)
    folder = tmp_path / "out"
    folder.mkdir()
    write_tokenizer(ours, folder, template="{{ messages }}")
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert oracle("the hat")["input_ids"] == [*ours.frame.before, *ours.encode("the hat"), *ours.frame.after]
    assert (oracle.mask_token, oracle.bos_token, oracle.eos_token) == ("<mask>", "<s>", "</s>")
    assert oracle.chat_template == "{{ messages }}"
    again = opened(folder)
    assert (again.frame, again.specials, again.end) == (ours.frame, ours.specials, ours.end)


def test_there_is_nothing_to_write_of_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no tokenizer to export"):
        write_tokenizer(MissingTokenizer(10, tmp_path), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["[PAD]", "[CLS]", "[SEP]", "[MASK]"], "BertTokenizer"),
        (["<s>", "<pad>", "</s>", "<mask>"], "MPNetTokenizer"),
    ],
)
def test_two_texts_have_the_frame_of_their_family(names: list[str], kind: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*names, "[UNK]", "the", "hat", "##s"]) + "\n")
    oracle = getattr(transformers, kind).from_pretrained(str(tmp_path))
    again = transformers.AutoTokenizer.from_pretrained(_exported(opened(tmp_path), tmp_path / "out"))
    for texts in (("the hats",), ("the", "hats the")):
        assert again(*texts)["input_ids"] == oracle(*texts)["input_ids"]


def test_a_frame_that_settings_took_away_stays_away(roberta: Path) -> None:
    wrote(roberta, tokenizer_config={"add_bos_token": False})
    ours = opened(roberta)
    again = transformers.AutoTokenizer.from_pretrained(_exported(ours, roberta / "out"))
    assert again("the")["input_ids"] == [*ours.encode("the"), 2] == [*ours.encode("the"), *ours.frame.after]
    assert json.loads((roberta / "out" / "tokenizer_config.json").read_text())["eos_token"] == "</s>"


def test_fill_reads_a_published_text_in_its_frame_and_finds_its_own_mask(roberta: Path) -> None:
    ours = opened(roberta)
    oracle = transformers.AutoTokenizer.from_pretrained(_exported(ours, roberta / "out"))
    encoder = tiny.model("bert-mini", ours, spread=0.5)
    (fillings,) = fill(encoder, ours, ["the <mask> [MASK]"], top=3)[0]
    ids = oracle("the <mask> [MASK]")["input_ids"]
    logits_V = logits_of(encoder, ids, None, segments=None, padding=None)[ids.index(oracle.mask_token_id)]
    best = [id for id in logits_V[: ours.size].argsort(descending=True).tolist() if id not in ours.specials.values()]
    assert [filling.id for filling in fillings] == best[:3]
    with pytest.raises(RequestError, match="the text has no <mask> to fill"):
        fill(encoder, ours, ["the [MASK]"])


def test_the_name_of_the_unknown_survives_where_the_model_has_none(tmp_path: Path) -> None:
    """A byte-level BPE knows every byte, and a Unigram its unknown only by number; tokens have names all the same."""
    for kind, name in (("bpe", END), ("unigram", "<|unk|>")):
        source = tmp_path / kind
        source.mkdir()
        write_tokenizer(OWN[kind], source)
        settings = json.loads((source / "tokenizer_config.json").read_text())
        wrote(source, tokenizer_config=settings | {"unk_token": name, "eos_token": END, "pad_token": END})
        ours = opened(source)
        again = _exported(ours, tmp_path / f"{kind} again")
        assert transformers.AutoTokenizer.from_pretrained(again).unk_token == name
        ours.save(tmp_path / "saved.json")
        assert open_tokenizer(tmp_path / "saved.json").digest == ours.digest


@pytest.mark.parametrize("segments", [True, False])
def test_transformers_is_told_whether_there_are_segments(segments: bool, tmp_path: Path) -> None:
    end, ids = OWN["bpe"].end, OWN["bpe"].encode("a")
    frame = Frame((end,), (end,))
    write_tokenizer(OWN["bpe"], tmp_path, frame=frame, segments=segments)
    found = transformers.AutoTokenizer.from_pretrained(str(tmp_path))("a", "a")
    assert found["input_ids"] == [end, *ids, end, *ids, end]
    assert found.get("token_type_ids") == ([0, 0, 0, 1, 1] if segments else None)
    assert opened(tmp_path).frame == frame  # not the one that ours have by themselves, so it is kept


def _exported(tokenizer: Tokenizer, folder: Path) -> str:
    folder.mkdir()
    write_tokenizer(tokenizer, folder)
    return str(folder)
