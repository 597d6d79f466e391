"""One masked word in each sentence: ranks, sentences, draws, and what an encoder says, against plain versions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.generation import tiny
from trivium.errors import DataError, RequestError
from trivium.evaluation.words import Question, guess, questions, ranks, sentences
from trivium.text.kinds import Words

TRAIN = ["The cat sat. The dog sat! the CAT, 3 cats.", "Don't go; don\u2019t. o'clock"]
VALID = (
    '"Where is the cat?" asked the old dog. It sat\non the mat.  The end of\n\nA new paragraph! (Of words.) And more'
)


def test_words_are_ranked_by_count_in_lower_case() -> None:
    assert list(ranks(TRAIN)) == ["the", "cat", "sat", "cats", "dog", "don't", "don\u2019t", "go", "o'clock"]
    assert list(ranks(TRAIN).values()) == list(range(1, 10))
    assert list(ranks(TRAIN, most=2)) == ["the", "cat"]
    text = "b a c a b a " * 3
    expected = [word for word, _ in Counter(text.split()).most_common()]
    assert list(ranks([text])) == expected


def test_sentences_end_at_full_stops_and_paragraphs() -> None:
    assert list(sentences(VALID)) == [
        '"Where is the cat?"',
        "asked the old dog.",
        "It sat on the mat.",
        "The end of",
        "A new paragraph!",
        "(Of words.)",
        "And more",
    ]
    assert list(sentences(" \n\n ")) == []


def test_every_sentence_is_drawn_once_with_a_word_of_the_ranks() -> None:
    text = "\n\n".join(f"One two three number {'x' * n} the end of it." for n in range(1, 60)) + "\n\nthe the"
    ranked = {"the": 1, "end": 2, "two": 3}
    found = questions([text, text], ranked, count=0, seed=1)
    assert len(found) == len({question.text for question in found}) == 59  # the last one is too short
    for question in found:
        assert ranked[question.text[question.first : question.last].lower()] == question.rank
    assert questions([text], ranked, count=10, seed=1) == found[:10]
    assert questions([text], ranked, count=10, seed=2) != found[:10]


def test_a_word_is_drawn_as_often_as_it_occurs_in_its_sentence() -> None:
    text = "\n\n".join(f"a a a b {'x' * n}." for n in range(1, 2000))
    found = questions([text], {"a": 1, "b": 2}, count=0, seed=0)
    share = sum(question.rank == 1 for question in found) / len(found)
    assert share == pytest.approx(3 / 4, abs=0.04)


def test_a_word_is_right_if_every_piece_is_the_likeliest_with_all_masked() -> None:
    model, tokenizer = tiny.model("bert-mini", tiny.MASKED, spread=0.5), tiny.MASKED
    specials = tokenizer.specials
    texts = [f"{word} it is a {word} or so" for word in ("cat", "dog", "I", "ox", "a")]
    asked = [Question(text, 8 + len(text.split()[0]), 8 + 2 * len(text.split()[0]), 1) for text in texts]
    found = guess(model, tokenizer, asked, batch=2)
    right = 0
    for text, (question, said) in zip(texts, found.examples, strict=True):
        raw = list(text.encode())
        places = range(question.first, question.last)
        hidden = [specials["[MASK]"] if at in places else id for at, id in enumerate(raw)]
        row = torch.tensor([[specials["[CLS]"], *hidden, specials["[SEP]"]]])
        with torch.no_grad():
            logits = model.head.logits(model(row).hidden)[0, :, :256]  # the bytes: no special is ever said
        best = [int(logits[1 + at].argmax()) for at in places]
        assert said == bytes(best).decode("utf-8", "replace").strip()
        right += best == [raw[at] for at in places]
    assert (found.every.right, found.every.asked) == (right, 5)


def test_an_encoder_that_always_says_one_word_is_the_baseline() -> None:
    tokenizer = Words().build(["the cat of rare sat\n"]).extended(["[MASK]"])
    model = tiny.model("bert-mini", tokenizer)
    [the] = tokenizer.encode("the")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        bias = next(
            value
            for name, value in model.named_parameters()
            if name.startswith("output") and len(value) == tokenizer.size
        )
        bias[the] = 1.0
    asked = [Question("the cat sat", 0, 3, 1), Question("of the cat", 0, 2, 100), Question("rare cat", 0, 4, 101)]
    asked += [Question("cat of rare", 0, 3, 150), Question("sat the", 4, 7, 1)]
    found = guess(model, tokenizer, asked)
    assert (found.every.right, found.every.asked, found.every.unigram) == (2, 5, 2)
    assert found.every.accuracy == found.every.baseline == pytest.approx(0.4)
    assert (found.rarer.right, found.rarer.asked, found.rarer.unigram) == (0, 2, 1)
    assert [said for _, said in found.examples] == ["the"] * 5


def test_only_sentences_that_fit_are_asked_and_the_first_of_them() -> None:
    model = tiny.model("bert-mini", tiny.MASKED, context=16)
    short, long = Question("the cat", 0, 3, 1), Question("the cat sat on the mat", 0, 3, 1)
    assert guess(model, tiny.MASKED, [long, short, short, long]).every.asked == 2
    assert guess(model, tiny.MASKED, [long, short, short], count=1).every.asked == 1
    with pytest.raises(DataError, match="fits the context of 16"):
        guess(model, tiny.MASKED, [long])


def test_a_decoder_has_no_mask() -> None:
    with pytest.raises(RequestError, match="a gap is filled by an encoder"):
        guess(tiny.model("gpt-mini", tiny.MASKED), tiny.MASKED, [Question("the cat", 0, 3, 1)])
