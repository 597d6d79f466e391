"""A published sentence encoder says how it makes a vector of a text, and `m.embed` does it so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.generation.test_classify import TEXTS, bert
from trivium import api

KIND = "sentence_transformers.models"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small BERT with the files that sentence-transformers keeps beside it: [CLS], then length 1."""
    torch.manual_seed(0)
    (tmp_path / "plain").mkdir()
    tokenizer, model = bert(tmp_path / "plain")
    home = tmp_path / "model"
    model.bert.save_pretrained(home)
    tokenizer.save_pretrained(home)
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"{KIND}.{kind}"} for at, (path, kind) in enumerate(steps)
    ]
    (home / "modules.json").write_text(json.dumps(modules))
    (home / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (home / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **modes}))
    return home


def test_its_own_pooling_and_length_are_used_unless_others_are_asked_for(folder: Path) -> None:
    m = api.load(folder, device="cpu", say=lambda text: None)
    auto, plain = m.embed(TEXTS), m.embed(TEXTS, pooling="cls", normalise=False)
    assert torch.allclose(auto.norm(dim=-1), torch.ones(3), atol=1e-6)
    assert torch.allclose(auto, torch.nn.functional.normalize(plain, dim=-1), atol=1e-6)
    assert not torch.allclose(plain.norm(dim=-1), torch.ones(3), atol=0.1)
    assert not torch.allclose(plain, m.embed(TEXTS, pooling="mean", normalise=False), atol=0.1)


def test_a_step_that_is_not_known_is_told(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": f"{KIND}.Dense", "path": "3_Dense"}]))
    said: list[str] = []
    api.load(folder, device="cpu", say=said.append)
    assert any("Dense" in sentence for sentence in said)
