"""`final_logits_bias` of BART and Marian: a buffer in transformers, a buffer here; BERT's bias is a parameter."""

# B batch, S source tokens, T target tokens

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.interop.saved import alike, exactly, exported, opened
from tests.interop.test_two_sides import bart, bart_untied, marian, saved, text
from tests.oracle.copying import logits
from trivium.checkpoints.bundle import open_bundle, save
from trivium.errors import ConfigError
from trivium.interop.quantize import quantize
from trivium.models.config import ModelConfig
from trivium.models.presets import PRESETS
from trivium.models.transformer import Transformer, build, weights
from trivium.models.vocabulary import extend
from trivium.optim.groups import trainable
from trivium.parts.options.output import SoftmaxOptions
from trivium.text.kinds import Bytes

NAME = "output.project.bias"
MAKERS = [bart, bart_untied, marian]
makers = pytest.mark.parametrize("make", MAKERS)


def theirs_of(model: Any, source_BS: Tensor, real_BS: Tensor, target_BT: Tensor) -> Tensor:
    found = model(input_ids=source_BS, attention_mask=real_BS.long(), decoder_input_ids=target_BT).logits
    return cast(Tensor, found)


def ours_of(model: Transformer, source_BS: Tensor, real_BS: Tensor, target_BT: Tensor) -> Tensor:
    hidden = model(target_BT, source=source_BS, source_padding=real_BS).hidden
    return model.head.logits(hidden)


def bias_of(model: Transformer) -> Tensor:
    return weights(model)[NAME]


@pytest.mark.parametrize("make", [bart, marian])
def test_it_is_no_parameter_and_the_count_is_that_of_transformers(make: Any, tmp_path: Path) -> None:
    theirs, ours = saved(make, tmp_path, 1), opened(tmp_path)
    assert NAME in dict(ours.named_buffers())
    assert NAME not in dict(ours.named_parameters())
    assert NAME not in {weight.name for weight in trainable(ours)}
    assert torch.equal(bias_of(ours), theirs.final_logits_bias[0])
    sinusoids = {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")} if make is marian else set()
    count = sum(one.numel() for name, one in theirs.named_parameters() if name not in sinusoids)
    assert count == sum(one.numel() for one in ours.parameters()) == ours.config.parameters()


@makers
def test_a_step_of_training_leads_where_it_leads_transformers(make: Any, tmp_path: Path) -> None:
    """Also through the fused loss, whose gradient of the bias is not wanted."""
    theirs, ours = saved(make, tmp_path, 2).double(), opened(tmp_path).double()
    source_BS, real_BS, target_BT = text(ours.config.vocab, 2)
    target_BT = target_BT.clamp(max=ours.config.vocab - 2)  # their padding, the last id, learns nothing as an input
    bias = bias_of(ours).clone()
    scores = theirs_of(theirs, source_BS, real_BS, target_BT).flatten(0, 1)
    F.cross_entropy(scores, target_BT.flatten(), reduction="sum").backward()  # type: ignore[no-untyped-call]
    hidden = ours(target_BT, source=source_BS, source_padding=real_BS).hidden
    ours.head.loss(hidden.flatten(0, 1), target_BT.flatten()).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(theirs.parameters(), lr=1e-3).step()
    torch.optim.SGD([weight.parameter for weight in trainable(ours)], lr=1e-3).step()
    assert torch.equal(bias_of(ours), bias)
    with torch.no_grad():
        expected = theirs_of(theirs, source_BS, real_BS, target_BT)
        exactly(ours_of(ours, source_BS, real_BS, target_BT), expected)
    assert float((expected.flatten(0, 1) - scores.detach()).abs().max()) > 1e-2  # it did something


@makers
def test_it_is_saved_opened_and_exported(make: Any, tmp_path: Path) -> None:
    saved(make, tmp_path / "theirs", 3)
    ours = opened(tmp_path / "theirs")
    source_BS, real_BS, target_BT = text(ours.config.vocab, 3)
    expected = logits(ours, target_BT, source=source_BS, source_padding=real_BS)
    save(tmp_path / "own", ours.config, weights(ours), Bytes().build([]), {})
    again = open_bundle(tmp_path / "own").module
    assert torch.equal(bias_of(again), bias_of(ours))
    assert NAME in dict(again.named_buffers())
    assert torch.equal(logits(again, target_BT, source=source_BS, source_padding=real_BS), expected)
    exported(again, tmp_path / "back")
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")["final_logits_bias"][0], bias_of(ours))


def test_a_model_saved_before_there_were_fixed_biases_opens_and_exports(tmp_path: Path) -> None:
    """Its bias is a parameter, as it was when it was saved, under the same name."""
    saved(bart, tmp_path / "theirs", 4)
    ours = opened(tmp_path / "theirs")
    save(tmp_path / "own", ours.config, weights(ours), Bytes().build([]), {})
    card = json.loads((tmp_path / "own" / "model.json").read_text())
    del card["config"]["output"]["fixed"]
    (tmp_path / "own" / "model.json").write_text(json.dumps(card))
    old = open_bundle(tmp_path / "own").module
    assert old.config.output == SoftmaxOptions(bias=True)
    assert NAME in dict(old.named_parameters())
    source_BS, real_BS, target_BT = text(ours.config.vocab, 4)
    given = {"source": source_BS, "source_padding": real_BS}
    alike(logits(old, target_BT, **given), logits(ours, target_BT, **given))
    exported(old, tmp_path / "back")
    assert NAME in dict(opened(tmp_path / "back").named_buffers())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("make", [bart, bart_untied])
def test_it_stays_beside_quantised_weights(make: Any, bits: int, tmp_path: Path) -> None:
    saved(make, tmp_path / "theirs", 5)
    ours = opened(tmp_path / "theirs")
    before = bias_of(ours).clone()
    quantize(ours, bits)
    assert torch.equal(bias_of(ours), before)
    save(tmp_path / "own", ours.config, weights(ours), Bytes().build([]), {})
    again = open_bundle(tmp_path / "own").module
    assert torch.equal(bias_of(again), before)
    assert again.double().get_submodule("output.project").bias.dtype == torch.float64  # it follows the module


def test_it_grows_with_the_vocabulary() -> None:
    model = build(ModelConfig(width=16, context=16, vocab=20, output=SoftmaxOptions(bias=True, fixed=True)))
    assert torch.equal(bias_of(model), torch.zeros(20))
    model.get_buffer(NAME).fill_(0.5)
    larger = extend(model, 24)
    assert bias_of(larger).tolist() == [0.5] * 20 + [0.0] * 4
    assert NAME in dict(larger.named_buffers())


def test_a_bias_is_trained_unless_it_is_fixed() -> None:
    """BERT's is a parameter in transformers and here, and so is a configured one."""
    with pytest.raises(ConfigError, match="fixed: there is no bias to keep fixed"):
        SoftmaxOptions(fixed=True)
    for name in ("bert-base-uncased", "roberta-base"):
        names = {one for one, _ in build(PRESETS[name](), device="meta").named_parameters()}
        assert NAME in names
    model = build(ModelConfig(width=16, context=16, vocab=20, output=SoftmaxOptions(bias=True)))
    assert isinstance(model.get_parameter(NAME), nn.Parameter)
    assert NAME in {weight.name for weight in trainable(model)}
