"""Published models, where TRIVIUM_MODELS names a folder that has them; never downloaded by a test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from trivium import api

SUBJECTS = ("A dog", "The old sailor", "Nobody", "My neighbour's daughter", "The committee of ministers")
DEEDS = (
    "runs across the field.",
    "sold 3,000 shares on Monday!",
    "wrote a letter to the newspaper, but it was never printed.",
    "is tired",
    "can't find the key (again).",
)
PLACES = ("", " In winter.", " It happened in München.", " Then it rained for forty days and forty nights.")
SENTENCES = [f"{subject} {deed}{place}" for subject in SUBJECTS for deed in DEEDS for place in PLACES]


def test_minilm_embeds_as_sentence_transformers_does() -> None:
    home = Path(os.environ.get("TRIVIUM_MODELS", "/nonexistent"))
    found = sorted(path.parent for path in home.glob("**/modules.json") if "minilm" in str(path).lower())
    if not found:
        pytest.skip("needs TRIVIUM_MODELS, a folder with all-MiniLM-L6-v2")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    theirs = torch.tensor(sentence_transformers.SentenceTransformer(str(found[0]), device="cpu").encode(SENTENCES))
    ours = api.load(found[0], device="cpu", say=lambda text: None).embed(SENTENCES)
    assert len(SENTENCES) == 100
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-5
    assert (ours - theirs.roll(1, 0)).abs().max() > 0.1  # the sentences are told apart
