"""Published tokenizers give the ids of the programs that made them, and ours open there."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.text.corpus import EDGES, passages, scrambled
from trivium.errors import DataError
from trivium.generation.fill import masked_ids
from trivium.text.adopt import Frame, Roles
from trivium.text.library import END, byte_alphabet
from trivium.text.published import byte_level_bpe, read_tokenizer, wordpiece
from trivium.text.stream import TextStream
from trivium.text.tokenizer import Tokenizer, open_tokenizer

transformers = pytest.importorskip("transformers")

FILES = {
    "gpt2": {"gpt2-bpe/encoder.json": "vocab.json", "gpt2-bpe/vocab.bpe": "merges.txt"},
    "bert": {"bert-vocab/vocab.txt": "vocab.txt"},
}


def opened(folder: Path) -> Tokenizer:
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def wrote(folder: Path, **files: Any) -> Path:
    """A folder with these JSON files."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module", params=FILES)
def real(request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name and a folder of a tokenizer that the world uses."""
    folder = tmp_path_factory.mktemp(request.param)
    for source, name in FILES[request.param].items():
        if not (shared / "data" / source).is_file():
            pytest.skip(f"needs {source} beside the project")
        shutil.copy(shared / "data" / source, folder / name)
    return request.param, folder


def test_real_files_give_the_ids_of_transformers(
    real: tuple[str, Path], shared: Path, count: Callable[[int, int], int]
) -> None:
    name, folder = real
    ours = opened(folder)
    kinds = {"gpt2": transformers.GPT2Tokenizer, "bert": transformers.BertTokenizer}
    oracle = kinds[name].from_pretrained(str(folder))
    texts = [*EDGES, *scrambled(random.Random(3), count(500, 10_000)), *passages(shared, count(200_000, 10_000_000))]
    assert ours.encode_many(texts) == oracle(texts, add_special_tokens=False)["input_ids"]
    assert [*ours.frame.before, *ours.encode("a b"), *ours.frame.after] == oracle("a b")["input_ids"]


def test_gpt2_merges_as_a_plain_reading_of_its_paper_does(shared: Path) -> None:
    regex = pytest.importorskip("regex")
    folder = shared / "data" / "gpt2-bpe"  # the original names: encoder.json and vocab.bpe
    ours = opened(folder)
    vocab = json.loads((folder / "encoder.json").read_text())
    ranks = {
        tuple(line.split(" ")): rank for rank, line in enumerate((folder / "vocab.bpe").read_text().split("\n")[1:])
    }
    words = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    alphabet = byte_alphabet()

    def plain(text: str) -> list[int]:
        ids = []
        for word in words.findall(text):
            pieces = [alphabet[byte] for byte in word.encode()]
            while len(pieces) > 1:
                pairs = list(pairwise(pieces))
                at = min(range(len(pairs)), key=lambda place: ranks.get(pairs[place], 1 << 30))
                if pairs[at] not in ranks:
                    break
                pieces[at : at + 2] = ["".join(pairs[at])]
            ids += [vocab[piece] for piece in pieces]
        return ids

    for text in [*EDGES, *passages(shared, 20_000)]:
        assert ours.encode(text) == plain(text), ascii(text)
        assert ours.decode(ours.encode(text)) == text


BYTES = {character: id for id, character in enumerate(byte_alphabet())}


@pytest.fixture
def roberta(tmp_path: Path) -> Path:
    """A folder as RoBERTa's: specials around the vocabulary, and merges."""
    names = ["<s>", "<pad>", "</s>", "<unk>", *byte_alphabet(), "Ġa", "he", "the", "Ġthe", "<mask>"]
    wrote(tmp_path, vocab={name: id for id, name in enumerate(names)}, config={"model_type": "roberta"})
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ a\nh e\nt he\nĠ the\n")
    return tmp_path


def test_roberta_frames_and_masks_as_transformers_does(roberta: Path) -> None:
    mask = transformers.AddedToken("<mask>", lstrip=True, special=True)  # as in the published tokenizer.json
    ours, oracle = opened(roberta), transformers.RobertaTokenizer.from_pretrained(str(roberta), mask_token=mask)
    for text in ("the hat", "a <mask> the", "The<mask>the", "<mask>", "é <mask>."):
        assert [*ours.frame.before, *masked_ids(ours, text), *ours.frame.after] == oracle(text)["input_ids"], text
    named = (ours.specials["[MASK]"], ours.specials["[CLS]"], ours.specials["[SEP]"], ours.specials["<pad>"])
    assert named == (oracle.mask_token_id, oracle.cls_token_id, oracle.sep_token_id, oracle.pad_token_id)
    assert (ours.begin, ours.end, ours.piece(ours.specials["[MASK]"])) == (0, 2, "<mask>")
    assert ours.decode([0, *ours.encode(" the"), 2]) == "<s> the</s>" == oracle.decode([0, *ours.encode(" the"), 2])
    assert masked_ids(ours, "the [MASK]<mask>")[-1] == ours.specials["<mask>"]
    assert masked_ids(ours, "the [MASK]<mask>").count(ours.specials["<mask>"]) == 1  # the other spelling is text


def test_a_tokenizer_can_be_extended_and_keeps_its_own_mask(roberta: Path) -> None:
    ours = opened(roberta)
    wider = ours.extended(["[MASK]", "[CLS]", "<extra_id_0>"])
    assert (wider.size, wider.specials["<extra_id_0>"]) == (ours.size + 1, ours.size)
    assert wider.specials["[MASK]"] == ours.specials["<mask>"]
    assert wider.encode("the <extra_id_0>") == ours.encode("the <extra_id_0>")
    with pytest.raises(DataError, match="a piece of text"):
        ours.extended(["the"])


def test_bert_and_mpnet_vocabularies_have_the_frames_of_transformers(tmp_path: Path) -> None:
    pieces = ["[UNK]", "the", "hat", "##s", "é", "e", "E"]
    for names, kind in (
        (["[PAD]", "[CLS]", "[SEP]", "[MASK]"], transformers.BertTokenizer),
        (["<s>", "<pad>", "</s>", "<mask>"], transformers.MPNetTokenizer),
    ):
        (tmp_path / "vocab.txt").write_text("\n".join([*names, *pieces]) + "\n")
        for lower in (True, False):
            wrote(tmp_path, tokenizer_config={"do_lower_case": lower})
            ours, oracle = opened(tmp_path), kind.from_pretrained(str(tmp_path))
            for text in ("The hats", "É e E", "the zebra [MASK]"):
                assert (
                    ours.encode(text)
                    == oracle(text.replace("[MASK]", "[ MASK ]"), add_special_tokens=False)["input_ids"]
                )
                framed = [*ours.frame.before, *ours.encode("hats"), *ours.frame.after]
                assert framed == oracle("hats")["input_ids"]
            assert ours.end == oracle.sep_token_id
            assert ours.specials["[MASK]"] == oracle.mask_token_id


@pytest.fixture(scope="module")
def spm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small SentencePiece models, a.model (Unigram) and b.model (BPE)."""
    spm = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    lines = ["to be or not to be that is the question", "sein oder nicht sein das ist hier die frage"] * 20
    for name, kind in (("a", "unigram"), ("b", "bpe")):
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_prefix=str(folder / name),
            vocab_size=60,
            model_type=kind,
            minloglevel=2,
            hard_vocab_limit=False,
        )
    return folder


def test_t5_has_its_sentinels_largest_first_and_an_end_behind(spm_folder: Path, tmp_path: Path) -> None:
    shutil.copy(spm_folder / "a.model", tmp_path / "spiece.model")
    wrote(tmp_path, config={"model_type": "t5", "decoder_start_token_id": 0}, tokenizer_config={"extra_ids": 3})
    ours = opened(tmp_path)
    size = len(pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(tmp_path / "spiece.model")))
    assert ours.size == size + 3
    assert [ours.specials[f"<extra_id_{place}>"] for place in range(3)] == [size + 2, size + 1, size]
    assert ours.frame == Frame((), (ours.specials["</s>"],), (0,))
    assert ours.size not in ours.encode("<extra_id_0>")


@pytest.mark.parametrize("begins", [True, False, None])
def test_llama_begins_with_its_begin_unless_it_is_told_not_to(
    begins: bool | None, spm_folder: Path, tmp_path: Path
) -> None:
    shutil.copy(spm_folder / "b.model", tmp_path / "tokenizer.model")
    wrote(tmp_path, config={"model_type": "llama"}, tokenizer_config={"add_bos_token": begins})
    ours = opened(tmp_path)
    assert (ours.begin, ours.end) == (1, 2)
    assert ours.frame.before == (() if begins is False else (1,))


def test_marian_finds_only_pieces_of_the_source_and_spells_both(spm_folder: Path, tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece")
    shutil.copy(spm_folder / "a.model", tmp_path / "source.spm")
    source = spm.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    pieces = [
        source.id_to_piece(id) for id in range(len(source)) if not (source.is_control(id) or source.is_unknown(id))
    ]
    names = ["</s>", "<unk>", *reversed(pieces), "▁to▁be", "or▁not", "☃", ">>fr<<", "<pad>"]
    wrote(
        tmp_path, vocab={name: id for id, name in enumerate(names)}, config={"decoder_start_token_id": len(names) - 1}
    )
    ours = opened(tmp_path)
    for text in ("to be or not", "sein ☃ sein", "</s> >>fr<< <pad>"):
        by_hand = [names.index(piece) if piece in names[2:-5] else 1 for piece in source.encode(text, out_type=str)]
        assert ours.encode(text) == by_hand, text
    assert ours.decode([names.index("▁to▁be"), names.index("☃")]) == "to be☃"
    assert ours.frame == Frame((), (0,), (len(names) - 1,))
    assert ours.size == len(names)


def _unigram_file() -> dict[str, Any]:
    """A tokenizer.json whose model would find special tokens in texts by itself, as those of T5 do."""
    vocab = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("a", -3.0),
        ("s", -3.0),
        ("/", -3.0),
        (">", -3.0),
    ]
    inner = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=2))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["<pad>", "</s>", "<unk>"])
    inner.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    contents: dict[str, Any] = json.loads(inner.to_str())
    return contents


def test_text_never_becomes_a_special_token_whatever_the_model_would_do(tmp_path: Path) -> None:
    contents = _unigram_file()
    library = tokenizers.Tokenizer.from_str(json.dumps(contents))
    library.encode_special_tokens = True
    assert 1 in library.encode("a</s>", add_special_tokens=False).ids  # the danger is real
    ours = opened(wrote(tmp_path, tokenizer=contents, tokenizer_config={"eos_token": {"content": "</s>"}}))
    assert [ours.piece(id) for id in ours.encode("a</s>a")] == ["▁", "a", "<unk>", "/", "s", ">", "a"]
    assert ours.encode("<unk>a") == ours.encode("<<<<<<a")[:1] + ours.encode("<unk>a")[1:]
    assert (ours.end, ours.frame.after) == (1, (1,))
    for text in ("a a", "aas/", "", " "):
        assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_added_pieces_that_are_no_marks_stay_pieces_of_text() -> None:
    tokenizer = byte_level_bpe(BYTES, [], specials={END: 256}, split="gpt2", added={"  ": 257, "é!": 258})
    assert tokenizer.encode("a  é!") == [BYTES["a"], 257, 258]
    assert tokenizer.decode([BYTES["a"], 257, 258]) == "a  é!"
    assert (tokenizer.size, list(tokenizer.specials)) == (259, [END])


SPLITS = {
    "gpt2": "I|'ll|Ġgo|Ġin|Ġ1234|ĠDON|'|T|ĊĊ|Ċ|ok",
    "llama3": "I|'ll|Ġgo|Ġin|Ġ|123|4|ĠDON|'T|ĊĊĊ|ok",
    "qwen2": "I|'ll|Ġgo|Ġin|Ġ|1|2|3|4|ĠDON|'T|ĊĊĊ|ok",
    "smollm": "I|'ll|Ġgo|Ġin|Ġ|1|2|3|4|ĠDON|'|T|ĊĊ|Ċ|ok",
    "none": "I'llĠgoĠinĠ1234ĠDON'TĊĊĊok",
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_text_is_split_as_its_family_does(split: str) -> None:
    tokenizer = byte_level_bpe(BYTES, [], specials={END: 256}, split=split)
    inner = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.shown()))
    words = inner.pre_tokenizer.pre_tokenize_str("I'll go in 1234 DON'T\n\n\nok")
    assert "|".join(word for word, _ in words) == SPLITS[split]


def test_an_unknown_split_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="'gpt5' of a byte-level BPE is none of gpt2, llama3"):
        byte_level_bpe(BYTES, [], specials={END: 256}, split="gpt5")


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    assert read_tokenizer(wrote(tmp_path, config={"model_type": "gpt2"})) is None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer.json": "{"}, "tokenizer.json is not JSON"),
        ({"tokenizer.json": "[]"}, "tokenizer.json is not a JSON object"),
        ({"tokenizer.json": "{}"}, "tokenizer.json cannot be used"),
        ({"tokenizer.json": '{"trivium": {}}'}, "tokenizer.json"),
        ({"tokenizer.json": "[" * 100_000}, "tokenizer.json is not JSON"),
        ({"tokenizer_config.json": "nothing", "vocab.txt": "[UNK]"}, "tokenizer_config.json is not JSON"),
        ({"vocab.txt": "a\nb"}, r"vocab.txt cannot be used: a WordPiece vocabulary needs the piece \[UNK\]"),
        ({"vocab.txt": "[UNK]\na"}, "vocab.txt cannot be used: it names no token that ends a text"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b c"}, "merges.txt has a line that is not two pieces"),
        ({"vocab.json": '{"a": 0, "</s>": 1}', "merges.txt": "a b"}, "vocab.json cannot be used"),
        ({"vocab.json": '{"a": 4000000000, "</s>": 1}', "merges.txt": ""}, "vocab.json cannot be used"),
        ({"spiece.model": "nonsense"}, "spiece.model is not a SentencePiece model"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(files: Mapping[str, str], reason: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=reason) as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_mutated_files_open_or_are_refused_in_a_sentence(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    written = {"tokenizer": _unigram_file(), "tokenizer_config": {"eos_token": "</s>", "add_bos_token": True}}
    written["config"] = {"model_type": "t5", "decoder_start_token_id": 0}
    wrote(folder, **written)
    for name in data.draw(st.sets(st.sampled_from(sorted(written)), min_size=1)):
        path = folder / f"{name}.json"
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.sampled_from(b'019{}[]",:\\ntruef\xff'))
        path.write_bytes(content)
    try:
        tokenizer = read_tokenizer(folder)
    except DataError:
        return
    assert tokenizer is not None
    tokenizer.decode(tokenizer.encode("a</s>"))


def test_a_saved_published_tokenizer_opens_as_the_same(roberta: Path, tmp_path: Path) -> None:
    ours = opened(roberta)
    ours.save(tmp_path / "saved.json")
    again = open_tokenizer(tmp_path / "saved.json")
    assert (again.digest, again.frame, again.specials) == (ours.digest, ours.frame, ours.specials)
    (tmp_path / "saved.json").write_text(
        (tmp_path / "saved.json").read_text().replace('"end": "</s>"', '"end": "</x>"')
    )
    with pytest.raises(DataError, match='its table "trivium" is damaged'):
        open_tokenizer(tmp_path / "saved.json")


def test_decoding_one_id_at_a_time_is_decoding(roberta: Path) -> None:
    ours = opened(roberta)
    ids = [0, *ours.encode("the é <mask> 😀"), ours.specials["<mask>"], 2]
    stream = TextStream(ours)
    assert "".join(map(stream.push, ids)) + stream.finish() == ours.decode(ids)
    assert ours.decode(ids, skip_specials=True) == "the é <mask> 😀"


def test_padding_that_is_the_end_is_not_banned_as_padding() -> None:
    roles = Roles(end=END, pad=END)
    tokenizer = byte_level_bpe(BYTES, [], specials={END: 256}, split="gpt2", roles=roles)
    assert "<pad>" not in tokenizer.specials  # padding is never generated, an end must be
    lower = wordpiece({"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4}, lower=True)
    assert (lower.specials["<pad>"], lower.frame) == (1, Frame((2,), (3,)))
