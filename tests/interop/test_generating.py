"""Whole folders, model and tokenizer: what they write here is what they write in `transformers`, both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.generation import tiny
from tests.oracle.copying import enliven
from trivium import api
from trivium.generation.fill import Filling
from trivium.models.transformer import build
from trivium.text.adopt import Frame
from trivium.text.kinds import Bpe
from trivium.text.tokenizer import Tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog. To be, or not to be: that is the question.",
    "A dog runs in the park; children sing songs about trains and ships and shoes.",
] * 20
TEXTS = ("To be", "A dog runs in the park.", "shoes and ships")
LONG = 20
MARKS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def byte_level(frame: tokenizers.processors.PostProcessor, **named: str) -> Any:
    """A byte-level BPE of transformers' with <s> 0, <pad> 1, </s> 2, <unk> 3."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=300, special_tokens=marks, initial_alphabet=alphabet, show_progress=False),
    )
    inner.post_processor = frame
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **MARKS, **named)


def unigram(ends: str) -> Any:
    """A Unigram with <pad> 0, </s> 1 and <unk> 2, as T5's."""
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    marks = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=marks, unk_token="<unk>", show_progress=False)
    inner.train_from_iterator(LINES, trainer)
    inner.post_processor = processors.TemplateProcessing(f"$A {ends}", special_tokens=[("</s>", 1)])
    named = {role: mark for role, mark in MARKS.items() if role != "bos_token"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **named)


def saved(model: Any, tokenizer: Any, folder: Path, **generating: Any) -> Any:
    """A lively model in a folder; `generating` are generation settings that its configuration does not have."""
    enliven(model, seed=3, spread=0.5)
    for name, value in generating.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


class Written(NamedTuple):
    """Ids and their log-probabilities."""

    ids: list[int]
    logprobs: list[float]


def theirs(model: Any, tokenizer: Any, text: str, *, never: Sequence[int] = ()) -> Written:
    """What transformers writes greedily, without the end."""
    told: dict[str, Any] = {"suppress_tokens": list(never)} if never else {}
    told |= {"max_new_tokens": LONG, "do_sample": False, "num_beams": 1}
    with torch.no_grad():
        made = model.generate(
            **tokenizer(text, return_tensors="pt"), **told, output_logits=True, return_dict_in_generate=True
        )
    ids: list[int] = made.sequences[0, -len(made.logits) :].tolist()
    shares = [logits[0].log_softmax(-1)[id].item() for logits, id in zip(made.logits, ids, strict=True)]
    end = model.generation_config.eos_token_id
    last = ids.index(end) if end in ids else len(ids)
    return Written(ids[:last], shares[:last])


def agree(model: Any, tokenizer: Any, folder: Path, *, forced: Sequence[int] = (), pad: int) -> Frame:
    """Every text gives the same ids here; `forced` are the first that both write, which ours take for the start."""
    ours = api.load(folder, device="cpu", say=lambda text: None)
    # ours never write padding, nor what the tokenizer does not know
    never = [pad, *range(ours.tokenizer.size, model.config.vocab_size)]
    for text in TEXTS:
        expected = theirs(model, tokenizer, text, never=never)
        assert expected.ids[: len(forced)] == list(forced)
        ids, logprobs = (each[len(forced) :] for each in expected)
        assert len(ids) > 2
        mine = ours.generate(text, tokens=LONG - len(forced), temperature=0, logprobs=1)
        assert mine.ids == ids, text
        assert mine.logprobs == pytest.approx(logprobs, abs=1e-4), text  # random models say the same often: how surely?
        if ours.config.family == "encoder-decoder":
            assert ours.translate(text, beams=1, tokens=LONG - len(forced)).ids == ids, text
    return ours.tokenizer.frame


T5 = {"d_model": 24, "d_kv": 6, "d_ff": 36, "num_layers": 2, "num_heads": 4, "eos_token_id": 1, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("start", "generating", "expected"),
    [
        (0, {}, (0,)),
        (0, {"forced_bos_token_id": 17}, (0, 17)),
        (0, {"decoder_start_token_id": 7}, (7,)),  # where both files name one, the generation settings win
        (None, {"decoder_start_token_id": 7, "forced_bos_token_id": 9}, (7, 9)),
        (None, {"bos_token_id": 5}, (5,)),
    ],
)
def test_t5_writes_what_transformers_writes(
    start: int | None, generating: Mapping[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    tokenizer = unigram("</s>")
    ids = {} if start is None else {"decoder_start_token_id": start}
    config = transformers.T5Config(**T5, **ids, vocab_size=len(tokenizer) + 5)
    model = saved(transformers.T5ForConditionalGeneration(config), tokenizer, tmp_path, **generating)
    assert agree(model, tokenizer, tmp_path, forced=expected[1:], pad=0) == Frame((), (1,), expected)


BART = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 30,
    "decoder_ffn_dim": 34,
    "max_position_embeddings": 64,
    "forced_eos_token_id": None,
}


@pytest.mark.parametrize("forced", [None, 0])
def test_bart_writes_what_transformers_writes(forced: int | None, tmp_path: Path) -> None:
    tokenizer = byte_level(processors.RobertaProcessing(("</s>", 2), ("<s>", 0)), cls_token="<s>", sep_token="</s>")
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.BartConfig(**BART, **ids, vocab_size=len(tokenizer))
    model = saved(transformers.BartForConditionalGeneration(config), tokenizer, tmp_path, forced_bos_token_id=forced)
    first = () if forced is None else (forced,)
    assert agree(model, tokenizer, tmp_path, forced=first, pad=1) == Frame((0,), (2,), (2, *first))


def test_what_bart_is_forced_to_begin_with_survives_an_export(tmp_path: Path) -> None:
    test_bart_writes_what_transformers_writes(0, tmp_path / "in")
    ours = api.load(tmp_path / "in", device="cpu", say=lambda text: None)
    ours.export("hf", tmp_path / "out", say=lambda text: None)
    model = transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert agree(model, tokenizer, tmp_path / "out", forced=(0,), pad=1) == Frame((0,), (2,), (2, 0))
    assert tokenizer.unk_token == "<unk>"


def test_marian_writes_what_transformers_writes(tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece")
    vocab = {"</s>": 0, "<unk>": 1}
    for name in ("source", "target"):
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES[:2]),
            model_prefix=str(tmp_path / name),
            vocab_size=60,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (tmp_path / f"{name}.model").rename(tmp_path / f"{name}.spm")
        pieces = spm.SentencePieceProcessor(str(tmp_path / f"{name}.spm"))
        for piece in map(pieces.id_to_piece, range(3, len(pieces))):
            vocab.setdefault(piece, len(vocab))
    vocab["<pad>"] = last = len(vocab)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "de"}))
    tokenizer = marian(tmp_path)
    ids = {"pad_token_id": last, "eos_token_id": 0, "decoder_start_token_id": last}
    config = transformers.MarianConfig(**BART, **ids, vocab_size=len(vocab), scale_embedding=True)
    model = saved(transformers.MarianMTModel(config), tokenizer, tmp_path)
    assert agree(model, tokenizer, tmp_path, pad=last) == Frame((), (0,), (last,))


@pytest.mark.filterwarnings("ignore:Recommended")  # that a package for punctuation be installed
def marian(folder: Path) -> Any:
    with pytest.warns(UserWarning, match="sacremoses"):
        return transformers.MarianTokenizer.from_pretrained(folder)


def test_llama_writes_what_transformers_writes(tmp_path: Path) -> None:
    tokenizer = byte_level(processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)]))
    config = transformers.LlamaConfig(
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        vocab_size=len(tokenizer) + 10,
        bos_token_id=0,
        eos_token_id=2,
    )
    model = saved(transformers.LlamaForCausalLM(config), tokenizer, tmp_path)
    assert agree(model, tokenizer, tmp_path, pad=1) == Frame((0,))


def test_bert_fills_as_transformers_does_and_keeps_its_segments(tmp_path: Path) -> None:
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted({word.lower().strip(".,:;") for line in LINES for word in line.split()})
    (tmp_path / "vocab.txt").write_text("\n".join([*marks, *words]) + "\n")
    tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path)
    shape = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**shape, max_position_embeddings=64, vocab_size=len(tokenizer))
    model = saved(transformers.BertForMaskedLM(config), tokenizer, tmp_path / "in")
    ours = api.load(tmp_path / "in", device="cpu", say=lambda text: None)
    filled(ours, model, tokenizer, "the quick [MASK] runs")
    ours.export("hf", tmp_path / "out", say=lambda text: None)
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out").eval()
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    filled(ours, again, other, "the quick [MASK] runs")
    pairs = [(one, names("a dog", "runs", return_tensors="pt")) for one, names in ((model, tokenizer), (again, other))]
    with torch.no_grad():
        torch.testing.assert_close(*(one(**pair).logits for one, pair in pairs), atol=1e-5, rtol=1e-5)


def filled(ours: api.Model, model: Any, tokenizer: Any, text: str) -> None:
    """The three likeliest pieces behind the mask of a text are the same, and as likely."""
    inputs = tokenizer(text, return_tensors="pt")
    at = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    with torch.no_grad():
        shares_V = model(**inputs)[0 if model.config.architectures != ["BertForPreTraining"] else "prediction_logits"]
    shares_V = shares_V[0, at].softmax(-1)
    marks = [*ours.tokenizer.specials.values()] + [tokenizer.unk_token_id] * (tokenizer.unk_token_id is not None)
    best = shares_V.index_fill(0, torch.tensor(marks), -1.0).topk(3)
    guesses = cast("list[Filling]", ours.fill(text, top=4))
    found = [filling for filling in guesses if filling.id != tokenizer.unk_token_id][:3]
    assert [filling.id for filling in found] == best.indices.tolist()
    assert [filling.probability for filling in found] == pytest.approx(best.values.tolist(), abs=1e-5)


OWN = Bpe(size=300).build(LINES)


def own(name: str, tokenizer: Tokenizer, folder: Path, width: int = 32) -> tuple[api.Model, Any]:
    """A model of ours, and the tokenizer of its export."""
    module = build(tiny.shrunk(name, tokenizer.size, width=width))
    enliven(module, seed=5, spread=0.5)
    model = api.Model(module.eval(), tokenizer, {})
    model.export("hf", folder, say=lambda text: None)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "marks", "auto"),
    [
        ("gpt-mini", [], "AutoModelForCausalLM"),
        ("llama-mini", [], "AutoModelForCausalLM"),
        ("t5-small", ["<pad>", "<extra_id_0>"], "AutoModelForSeq2SeqLM"),
        ("t5-small", ["[CLS]", "[SEP]", "<pad>"], "AutoModelForSeq2SeqLM"),  # not the frame of a source
    ],
)
def test_a_model_made_here_writes_the_same_there_and_when_it_comes_back(
    name: str, marks: list[str], auto: str, tmp_path: Path
) -> None:
    ours, tokenizer = own(name, OWN.extended(marks), tmp_path / "out")
    model = getattr(transformers, auto).from_pretrained(tmp_path / "out").eval()
    back = api.load(tmp_path / "out", device="cpu", say=lambda text: None)
    assert back.tokenizer.digest == ours.tokenizer.digest
    for text in TEXTS:
        mine = ours.generate(text, tokens=LONG, temperature=0, logprobs=1)
        again = back.generate(text, tokens=LONG, temperature=0, logprobs=1)
        assert again.ids == mine.ids
        assert again.logprobs == pytest.approx(mine.logprobs, abs=1e-4)
        ids, logprobs = theirs(model, tokenizer, text)
        assert mine.ids == ids
        assert mine.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_an_encoder_made_here_fills_the_same_there_and_when_it_comes_back(tmp_path: Path) -> None:
    marks = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    ours, tokenizer = own("bert-base-uncased", OWN.extended(marks), tmp_path / "out", width=48)
    model = transformers.BertForPreTraining.from_pretrained(tmp_path / "out").eval()
    first, last = (ours.tokenizer.specials[mark] for mark in ("[CLS]", "[SEP]"))
    assert tokenizer("A dog")["input_ids"] == [first, *ours.tokenizer.encode("A dog"), last]
    pair = tokenizer("A dog", "runs")
    assert pair["token_type_ids"] == [0] * (2 + len(ours.tokenizer.encode("A dog"))) + [1] * (
        1 + len(ours.tokenizer.encode("runs"))
    )
    filled(ours, model, tokenizer, "A dog[MASK] in")
    back = api.load(tmp_path / "out", device="cpu", say=lambda text: None)
    assert back.tokenizer.digest == ours.tokenizer.digest
    assert back.fill("A dog[MASK] in") == ours.fill("A dog[MASK] in")
