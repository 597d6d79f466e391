"""What a caller may give wrongly, each answered by one sentence: no traceback, no endless work."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.generation import tiny
from trivium.errors import RequestError
from trivium.generation.beam import Beam
from trivium.generation.rows import Request
from trivium.generation.sampling import Sampling
from trivium.handle import Model

GPT = Model(tiny.model("gpt-mini", tiny.BYTES, context=40), tiny.BYTES, {})
BERT = Model(tiny.model("bert-mini", tiny.MASKED, context=40), tiny.MASKED, {})
T5 = Model(tiny.model("t5-mini", tiny.DENOISING, context=40), tiny.DENOISING, {})

NO_NUMBERS: list[Any] = ["x", None, math.nan, [1]]
SAMPLED: dict[str, list[Any]] = {
    "temperature": [*NO_NUMBERS, -1, 1e300, math.inf, 10**400],
    "top_k": [*NO_NUMBERS, -1, 2.5],
    "top_p": [*NO_NUMBERS, 0, 1.5],
    "min_p": [*NO_NUMBERS, -0.1, math.inf],
    "repetition_penalty": [*NO_NUMBERS, 1e-300, 1e300, 0, -1],
    "n": [*NO_NUMBERS, 0, 10**9, 1.5],
    "tokens": [*NO_NUMBERS, 0, -1, 10**12, 1.5],
    "seed": ["x", None, 1.5, [1]],
    "logprobs": [*NO_NUMBERS, -1, 1.5],
    "stop": [5, None, [""], "", [5], b"x", ["a", None]],
    "speculate": ["x", 5, 1.5],
}
SEARCHED: dict[str, list[Any]] = {
    "beams": [*NO_NUMBERS, 0, 10**6, 1.5],
    "alpha": [*NO_NUMBERS, -1, 1000, math.inf],
    "coverage": [*NO_NUMBERS, -1, 1e308],
    "n": [*NO_NUMBERS, 0, 5, 10**9, 1.5],
    "tokens": [*NO_NUMBERS, -1, 10**12, 1.5],
    "rows": [*NO_NUMBERS, -1, 1.5],
    "language": [5, None, "xx"],
}


def sentence(call: Callable[[], object]) -> str:
    with pytest.raises(RequestError) as caught:
        call()
    words = str(caught.value)
    assert "\n" not in words
    assert 10 < len(words) < 250
    return words


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r:.20}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(SAMPLED))
def test_a_wrong_setting_of_generate_is_named(name: str, value: Any) -> None:
    settings = {"tokens": 3, name: value}
    assert sentence(lambda: GPT.generate("ab", **settings)).startswith(f"{name}: ")
    if name not in ("n", "logprobs", "speculate"):
        assert sentence(lambda: list(GPT.stream("ab", **settings))).startswith(f"{name}: ")


@pytest.mark.parametrize(("name", "value"), cases(SEARCHED))
def test_a_wrong_setting_of_translate_is_named(name: str, value: Any) -> None:
    settings = {"tokens": 3, name: value}
    assert sentence(lambda: T5.translate("ab", **settings)).startswith(f"{name}: ")
    if name in ("beams", "alpha", "n", "tokens"):
        assert sentence(lambda: GPT.search("ab", **settings)).startswith(f"{name}: ")


def test_settings_at_their_bounds_are_taken() -> None:
    sampled: list[dict[str, Any]] = [
        {"temperature": 1e-300},
        {"temperature": 1e6},
        {"top_p": 1e-300},
        {"min_p": 1e-320},
        {"top_k": 10**12},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"seed": -1},
        {"seed": 2**70},
        {"logprobs": 10**9},
        {"tokens": 10**6},
        {"top_k": np.int64(3), "temperature": np.float32(0.5)},
    ]
    for options in sampled:
        found = GPT.generate("ab", **{"tokens": 3, **options})
        assert 0 < len(found.ids) <= 38
    searched: list[dict[str, Any]]
    searched = [{"alpha": 10}, {"alpha": 0, "coverage": 100}, {"tokens": 10**6}, {"beams": 30, "n": 30}]
    for options in searched:
        found = T5.translate("ab", **{"tokens": 3, **options})
        best = found if isinstance(found, list) else [found]
        assert all(math.isfinite(item.score) for item in best)
    assert math.isfinite(Beam(alpha=10).penalty(10**6))


TEXTS: dict[str, Callable[[Any], object]] = {
    "generate": GPT.generate,
    "stream": lambda text: list(GPT.stream(text, tokens=2)),
    "search": GPT.search,
    "score": GPT.score,
    "chat": GPT.chat,
    "translate": T5.translate,
    "fill": BERT.fill,
    "classify": BERT.classify,
    "embed": BERT.embed,
    "neighbours": BERT.neighbours,
    "neighbours among": lambda texts: BERT.neighbours("a", among=texts),
    "embed_word": lambda text: BERT.embed_word(text, "a"),
    "embed_word of": lambda word: BERT.embed_word("a b", word),
}
NO_TEXTS: list[Any] = [5, None, 3.5, b"x", [1, 2], ["a", None], [["a"]], {"a": 1}, torch.tensor([1]), object()]


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_text_is_refused(name: str) -> None:
    for given in NO_TEXTS:
        sentence(lambda given=given: TEXTS[name](given))  # type: ignore[misc]


def test_messages_and_pairs_are_looked_into() -> None:
    for wrong in ([{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "poet", "content": "a"}], ["a"]):
        sentence(lambda wrong=wrong: GPT.chat(wrong))  # type: ignore[misc]
    for pair in (("a", 5), ("a", "b", "c"), [("a",)]):
        assert "texts: " in sentence(lambda pair=pair: BERT.classify(pair))  # type: ignore[misc]


def test_ids_may_be_of_any_whole_dtype() -> None:
    expected = GPT.logits([1, 2, 3])
    whole = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    for dtype in whole:
        assert torch.equal(GPT.logits(torch.tensor([1, 2, 3], dtype=getattr(torch, dtype))), expected)
        assert torch.equal(GPT.logits(np.array([1, 2, 3], dtype)), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ids",
    [
        None,
        5,
        "ab",
        [],
        [[]],
        [None],
        [1.0],
        [True, False],
        [2**70],
        [[1, 2], [3]],
        {"a": 1},
        object(),
        torch.tensor(3),
        torch.tensor([True]),
        torch.tensor([1.0]),
        torch.tensor([1 + 0j]),
        torch.tensor([2**63 + 1], dtype=torch.uint64),
        torch.zeros(1, 1, 1, dtype=torch.long),
        torch.ones(1, 2, dtype=torch.long).to_sparse(),
        [-1],
        [10**6],
        [1] * 41,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_are_no_ids_is_refused(ids: Any) -> None:
    sentence(lambda: GPT.logits(ids))
    sentence(lambda: T5.logits(ids, [1]))


def test_what_stands_beside_ids_is_looked_at_too() -> None:
    for wrong in ("x", 5, [0], [0, None], [0, 0.5], [0, 7]):
        sentence(lambda wrong=wrong: BERT.logits([1, 2], segments=wrong))  # type: ignore[misc]
        sentence(lambda wrong=wrong: BERT.logits([1, 2], padding=wrong))  # type: ignore[misc]


def test_other_counts() -> None:
    assert sentence(lambda: BERT.fill("a [MASK]", top="x")).startswith("top: ")  # type: ignore[call-overload]
    assert sentence(lambda: BERT.neighbours("a", top=1.5)).startswith("top: ")  # type: ignore[arg-type]
    assert sentence(lambda: GPT.score("ab", stride=1.5)).startswith("stride: ")  # type: ignore[arg-type]
    assert sentence(lambda: GPT.score("ab", stride=41)).startswith("stride: ")
    wrong: Any = "x"
    assert sentence(lambda: BERT.embed_word("a b", "a", occurrence=wrong)).startswith("occurrence: ")


def test_library_requests_have_the_same_bounds() -> None:
    with pytest.raises(RequestError, match="tokens: 1000001 is more than 1,000,000"):
        Request(ids=(1,), tokens=10**6 + 1, sampling=Sampling(), seed=0)
    with pytest.raises(RequestError, match=r"repetition_penalty: 1e-300 is not from 0\.01 to 100; 1 is no penalty"):
        Sampling(repetition_penalty=1e-300)
    with pytest.raises(RequestError, match=r"alpha: 1000 is not from 0 to 10; 0 is no length penalty, try 0\.6"):
        Beam(alpha=1000)
