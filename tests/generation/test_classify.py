"""Classes of texts and pairs against `transformers`, tokenizers included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from tests.generation import tiny
from trivium import api
from trivium.errors import RequestError

transformers = pytest.importorskip("transformers")

TEXTS = ["a dog runs", "the cat", "a cat runs and the dog runs"]
PAIRS = [("a dog", "the cat runs"), ("the cat runs and runs", "a dog")]
SHAPE: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "initializer_range": 0.4,
    "id2label": {0: "bad", 1: "fair", 2: "good"},
}


def bert(folder: Path) -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "cat", "the", "run", "##s", "and"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = transformers.BertTokenizerFast.from_pretrained(folder)
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=32, **SHAPE)
    return tokenizer, transformers.BertForSequenceClassification(config)


def roberta(folder: Path) -> Any:
    trained = tokenizers.ByteLevelBPETokenizer()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(TEXTS * 5, vocab_size=280, min_frequency=2, special_tokens=specials)
    trained.save_model(str(folder))
    tokenizer = transformers.RobertaTokenizerFast.from_pretrained(folder)
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, **SHAPE
    )
    return tokenizer, transformers.RobertaForSequenceClassification(config)


@pytest.mark.parametrize("make", [bert, roberta])
def test_texts_and_pairs_get_the_probabilities_of_transformers(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    (tmp_path / "plain").mkdir()
    tokenizer, theirs = make(tmp_path / "plain")
    theirs.eval().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    m = api.load(tmp_path / "model", device="cpu", say=lambda text: None)
    for given in (TEXTS, PAIRS):
        found = m.classify(given)
        for text, verdict in zip(given, found, strict=True):
            both = (text,) if isinstance(text, str) else text
            with torch.no_grad():
                expected = theirs(**tokenizer(*both, return_tensors="pt")).logits[0].softmax(-1)
            assert verdict.probabilities == pytest.approx(dict(zip(m.labels, expected.tolist(), strict=True)), abs=1e-5)
            assert verdict == m.labels[int(expected.argmax())]
    assert m.labels == ["bad", "fair", "good"]
    assert m.classify(TEXTS[0]) == m.classify([TEXTS[0]])[0]
    first, second = (m.classify(pair).probabilities for pair in (PAIRS[0], PAIRS[0][::-1]))
    assert first != second  # the order of a pair matters
    m.export("hf", tmp_path / "again", say=lambda text: None)
    back = transformers.AutoConfig.from_pretrained(tmp_path / "again")
    assert back.id2label == {0: "bad", 1: "fair", 2: "good"}


def test_a_model_without_classes_says_so() -> None:
    m = api.Model(tiny.model("bert-mini", tiny.MASKED), tiny.MASKED, {})
    with pytest.raises(RequestError, match="no head that classifies"):
        m.classify("a")
