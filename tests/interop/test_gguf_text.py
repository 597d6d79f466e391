"""Tokenizers in GGUF files: ids equal to those of `sentencepiece` and `transformers`, there and back."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf import convert_gguf_tokenizer

from tests.interop.gguf_models import opened_by_transformers, quiet, written_text
from tests.oracle.copying import logits
from trivium.errors import DataError, RequestError
from trivium.interop.gguf import open_gguf
from trivium.interop.gguf_text import read_text, write_text
from trivium.interop.gguf_write import export_gguf
from trivium.models.presets.llama import Shape, llama
from trivium.models.transformer import build
from trivium.text.kinds import Bpe, Bytes, Chars, Unigram, WordPiece
from trivium.text.library import END
from trivium.text.tokenizer import Tokenizer

TEXT = (
    "Once upon a time there was a small house; it's old, isn't it? I'LL pay 12,345.67 for 3 of them!\n\n"
    "  def f(x):\n\t\treturn {'a': x ** 2}  # äöü ß 日本語 é 🙂👍🏽\r\nthe end of the theme   "
)
TEXTS = [
    TEXT,
    "",
    " ",
    "   \n \n\n",
    "1234567",
    "we'll WE'LL",
    "x" * 40,
    "<s> </s> <unk>",
    "²³ ½ ٣٤٥",
    "\x00\x7f\u200b",
]


def reread(tokenizer: Tokenizer, vocab: int = 0) -> Tokenizer:
    settings = write_text(tokenizer, vocab or tokenizer.size)
    back, _ = read_text(settings, vocab or tokenizer.size, "model.gguf", say=quiet)
    assert back is not None
    return back


def same_ids(one: Tokenizer, other: Tokenizer) -> None:
    for text in TEXTS:
        assert one.encode(text) == other.encode(text), text
        assert one.decode(one.encode(text)) == other.decode(one.encode(text))


@pytest.mark.parametrize("kind", [Bpe(size=400), Bytes()], ids=["bpe", "bytes"])
def test_our_tokenizer_comes_back_with_the_same_ids(kind: Any) -> None:
    ours = kind.build([TEXT]).extended(["<|im_end|>"])
    back = reread(ours, ours.size + 5)
    same_ids(ours, back)
    assert back.size == ours.size
    assert (back.begin, back.end) == (ours.end, ours.end)
    assert {name: back.specials[name] for name in ours.specials} == dict(ours.specials)


def test_transformers_reads_the_ids_of_our_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Bpe(size=400).build([TEXT])
    model = build(llama(Shape(1, 16, 24, 2, 1, 8, ours.size + 3, 32))).eval()
    path = tmp_path / "model.gguf"
    export_gguf(model, ours, path, say=quiet, template="{{ messages }}")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.bos_token_id == theirs.eos_token_id == ours.end
    assert theirs.chat_template == "{{ messages }}"
    assert theirs(END)["input_ids"] == [ours.end]
    assert opened_by_transformers(path, monkeypatch).config.eos_token_id == ours.end
    found = open_gguf(path, say=quiet, tick=quiet)
    assert found.notes["chat_template"] == "{{ messages }}"
    assert found.notes["ids"] == {"bos": [ours.end], "eos": [ours.end]}
    assert found.tokenizer is not None
    same_ids(ours, found.tokenizer)


@pytest.mark.parametrize(
    "kind", [Chars(), WordPiece(size=120), Unigram(size=120)], ids=["chars", "wordpiece", "unigram"]
)
def test_a_tokenizer_that_the_format_lacks_is_refused(kind: Any, tmp_path: Path) -> None:
    ours = kind.build([TEXT] * 3)
    model = build(llama(Shape(1, 16, 24, 2, 1, 8, ours.size, 32)))
    with pytest.raises(RequestError, match=f"a tokenizer of the kind {ours.kind}"):
        export_gguf(model, ours, tmp_path / "model.gguf", say=quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_every_way_of_splitting_is_that_of_transformers(pre: str) -> None:
    settings = write_text(Bpe(size=600).build([TEXT * 3, "WE'LL 12 123 1234\n\n\n x"]), 700)
    settings["tokenizer.ggml.pre"] = pre
    ours, _ = read_text(settings, 700, "model.gguf", say=quiet)
    assert ours is not None
    table = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": pre,
        "tokens": settings["tokenizer.ggml.tokens"],
        "merges": settings["tokenizer.ggml.merges"],
    }
    theirs, _ = convert_gguf_tokenizer("llama", table)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text
    same_ids(ours, reread(ours))


def test_digits_of_smollm_stand_alone() -> None:
    settings = write_text(Bpe(size=600).build([TEXT * 3, "12 123 1234 ²³ ٣٤٥ " * 9]), 700)
    ours, _ = read_text(settings | {"tokenizer.ggml.pre": "smollm"}, 700, "model.gguf", say=quiet)
    assert ours is not None
    # as its published tokenizer.json has it: `transformers` forgets the digits of a GGUF file
    model = tokenizers.models.BPE(
        {piece: id for id, piece in enumerate(settings["tokenizer.ggml.tokens"])},
        [tuple(pair.split(" ")) for pair in settings["tokenizer.ggml.merges"]],
    )
    theirs = tokenizers.Tokenizer(model)
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids, text


def sentencepiece_settings(model: bytes) -> tuple[Any, dict[str, Any]]:
    """The `sentencepiece` package's own tokenizer, and its pieces as llama.cpp's converter writes them."""
    spm = pytest.importorskip("sentencepiece")
    theirs = spm.SentencePieceProcessor(model_proto=model)
    ids = range(theirs.vocab_size())

    def type_of(id: int) -> int:
        if theirs.is_unknown(id):
            return 2
        return 3 if theirs.is_control(id) else 5 if theirs.is_unused(id) else 6 if theirs.is_byte(id) else 1

    return theirs, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": np.array([theirs.get_score(id) for id in ids], np.float32),
        "tokenizer.ggml.token_type": np.array([type_of(id) for id in ids], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def trained_sentencepiece() -> bytes:
    spm = pytest.importorskip("sentencepiece")
    held = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter((TEXT.replace("\x00", "") + "\n").splitlines() * 9),
        model_writer=held,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return held.getvalue()


def test_pieces_with_scores_give_the_ids_of_sentencepiece() -> None:
    theirs, settings = sentencepiece_settings(trained_sentencepiece())
    ours, notes = read_text(settings, 420, "model.gguf", say=quiet)
    assert ours is not None
    for text in (text for text in TEXTS if "\x00" not in text):
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == text
    assert (ours.begin, ours.end, ours.frame.before) == (1, 2, (1,))
    assert notes["ids"] == {"bos": [1], "eos": [2]}
    same_ids(ours, reread(ours, 425))


def test_the_pieces_of_llama_2_give_its_ids(shared: Path, count: Callable[[int, int], int]) -> None:
    theirs, settings = sentencepiece_settings((shared / "data/llama-spm/tokenizer.model").read_bytes())
    ours, _ = read_text(settings, 32_000, "model.gguf", say=quiet)
    assert ours is not None
    book = (shared / "data/wikitext-2").glob("*")
    whole = "".join(path.read_text(errors="ignore") for path in sorted(book) if path.is_file())[:2_000_000]
    for start in range(0, count(40, 2000) * 1000, 1000):
        text = whole[start : start + 1000]
        assert ours.encode(text) == theirs.encode(text)
    if count(0, 1):
        same_ids(ours, reread(ours, 32_003))


def test_tokenizers_that_are_not_known_are_said_and_left_out() -> None:
    plain = {key: np.array(value) if key.endswith("type") else value for key, value in written_text(300).items()}
    for change, reason in (
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "splits texts by 'deepseek-llm'"),
    ):
        said: list[str] = []
        found, notes = read_text(plain | change, 300, "model.gguf", say=said.append)
        assert found is None
        assert reason in said[0]
        assert notes["ids"] == {"bos": [256], "eos": [257]}
    said = []
    del plain["tokenizer.ggml.pre"]
    assert read_text(plain, 300, "model.gguf", say=said.append)[0] is not None
    assert "does not say how its tokenizer splits" in said[0]
    assert read_text({}, 300, "model.gguf", say=quiet) == (None, {"ids": {}})


def test_damaged_tokenizers_are_refused() -> None:
    plain = {key: np.array(value) if key.endswith("type") else value for key, value in written_text(300).items()}
    pieces = plain["tokenizer.ggml.tokens"]
    for change, reason in (
        ({"tokens": [*pieces[:-1], pieces[0]]}, "two of its pieces are the same"),
        ({"tokens": [*pieces[:-1], ""]}, "one is empty"),
        ({"tokens": [*pieces[:-1], "a" * 2000]}, "too long"),
        ({"tokens": pieces[:-1]}, "a number to each piece"),
        ({"tokens": [*pieces, "more"], "token_type": np.ones(301, np.int32)}, "301 pieces for a model of 300 ids"),
        ({"token_type": np.full(300, 9, np.int32)}, "unknown types"),
        ({"scores": np.full(300, np.nan, np.float32)}, "a number to each piece"),
        ({"merges": ["a b c"]}, "not pairs of pieces"),
        ({"merges": ["a zzz"]}, "cannot be used"),
    ):
        changed = plain | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        with pytest.raises(DataError, match=reason) as caught:
            read_text(changed, 300, "model.gguf", say=quiet)
        assert "model.gguf" in str(caught.value)


PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "2 + 2 =", "The quick brown fox",
    "In the beginning", "Water boils at", "import numpy as np", "Dear Sir or Madam,", "user\nHi there! ",
    "Die Hauptstadt von", "La vie est", "1, 2, 3, 4,", "It's a truth universally", "To be, or not to be",
    "Roses are red", "E = mc", "The 3 laws of", "SELECT name FROM", "She said: \"I'll",
]  # fmt: skip


def test_smollm2_computes_and_reads_as_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sorted(Path(os.environ.get("TRIVIUM_MODELS", "/nonexistent")).glob("**/SmolLM2-135M-Instruct*.gguf"))
    if not found:
        pytest.skip("needs TRIVIUM_MODELS, a folder with SmolLM2-135M-Instruct as GGUF")
    ours = open_gguf(found[0], say=quiet, tick=quiet)
    theirs = opened_by_transformers(found[0], monkeypatch)
    texts = AutoTokenizer.from_pretrained(found[0].parent, gguf_file=found[0].name)
    assert ours.tokenizer is not None
    assert "<|im_start|>" in ours.notes["chat_template"]
    worst = 0.0
    for prompt in PROMPTS:
        tokens = ours.tokenizer.encode(prompt)
        assert tokens == texts(prompt)["input_ids"]
        tokens_BT = torch.tensor([tokens])
        with torch.no_grad():
            other = theirs(tokens_BT).logits
        gap = (logits(ours.module, tokens_BT) - other).abs().max() / other.abs().max()
        worst = max(worst, float(gap))
    print(f"largest relative difference of logits: {worst:.1e}")
    assert worst < 1e-4
