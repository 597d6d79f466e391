"""A larger vocabulary: old ids mean what they meant, in all three families, tied or not."""

# B batch, T tokens, S source tokens, V ids before, W ids after

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.battery import lively
from trivium.errors import RequestError
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, weights
from trivium.models.vocabulary import extend
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.output import MaskedOutputOptions, SoftmaxOptions
from trivium.text.kinds import Bytes

V, W = 52, 59
PLAIN, CROSSED = Stack(layers=2), Stack(layers=2, block=Block(cross=MultiHeadOptions()))
FAMILIES: dict[str, dict[str, Any]] = {
    "decoder, tied": {"decoder": PLAIN},
    "decoder, untied with bias": {
        "decoder": PLAIN,
        "embedding": TokenEmbeddingOptions(tie="none"),
        "output": SoftmaxOptions(bias=True),
    },
    "encoder, BERT's head": {
        "encoder": PLAIN,
        "decoder": NoStack(),
        "embedding": TokenEmbeddingOptions(segments=2),
        "output": MaskedOutputOptions(),
    },
    "both, one matrix": {"encoder": PLAIN, "decoder": CROSSED},
    "both, three matrices": {"encoder": PLAIN, "decoder": CROSSED, "embedding": TokenEmbeddingOptions(tie="none")},
    "as many ids as the width": {"decoder": PLAIN, "width": V, "embedding": TokenEmbeddingOptions(tie="none")},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def small(family: str) -> Transformer:
    return lively(ModelConfig(**{"width": 32, "context": 16, "vocab": V, **FAMILIES[family]}))


def states(model: Transformer) -> Tensor:
    ids = torch.randint(V, (2, 3, 9), generator=torch.Generator().manual_seed(5))
    source = {"source": ids[1]} if model.config.family == "encoder-decoder" else {}
    with torch.no_grad():
        hidden: Tensor = model(ids[0], **source).hidden
    return hidden


@every_family
@pytest.mark.parametrize("rows", ["normal", "mean"])
def test_old_ids_keep_their_rows_states_and_logits(family: str, rows: Any) -> None:
    model = small(family)
    larger = extend(model, W, rows=rows)
    assert larger.config.vocab == W
    before, after = weights(model), weights(larger)
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert torch.equal(after[name][: len(tensor)], tensor), name
    assert torch.equal(states(larger), states(model))
    # a product with more columns is cut into other blocks, so that its last bit may differ
    logits, expected = larger.head.logits(states(larger)), model.head.logits(states(model))
    assert logits.shape[-1] == W
    torch.testing.assert_close(logits[..., :V], expected, rtol=1e-13, atol=1e-13)


@every_family
def test_exactly_the_tensors_with_a_row_per_id_grow_and_the_count_is_that_of_the_configuration(family: str) -> None:
    model, larger = small(family), extend(small(family), W)
    grown = {name for name, tensor in weights(larger).items() if tensor.shape != weights(model)[name].shape}
    assert (
        grown
        == {
            "decoder, tied": {"embedding.weight"},
            "decoder, untied with bias": {"embedding.weight", "output.project.weight", "output.project.bias"},
            "encoder, BERT's head": {"embedding.weight", "output.project.bias"},
            "both, one matrix": {"embedding.weight"},
            "both, three matrices": {"embedding.weight", "source_embedding.weight", "output.project.weight"},
            "as many ids as the width": {"embedding.weight", "output.project.weight"},
        }[family]
    )
    assert sum(tensor.numel() for tensor in larger.parameters()) == larger.config.parameters()


def test_tied_matrices_stay_one() -> None:
    larger = extend(small("both, one matrix"), W)
    assert larger.source_embedding is not None
    assert larger.source_embedding.weight is larger.embedding.weight
    assert larger.output.project.weight is larger.embedding.weight  # type: ignore[union-attr]


def test_new_rows_are_the_mean_of_the_old_or_normal_and_a_bias_begins_at_zero() -> None:
    model = small("decoder, untied with bias")
    mean = weights(extend(model, W, rows="mean"))
    for name in ("embedding.weight", "output.project.weight", "output.project.bias"):
        expected = torch.stack(list(weights(model)[name])).sum(0) / V
        torch.testing.assert_close(mean[name][V:], expected.expand_as(mean[name][V:]))
    drawn = weights(extend(model, V + 4000))
    rows = drawn["embedding.weight"][V:]
    assert abs(float(rows.mean())) < 0.02 * 4 / rows.numel() ** 0.5  # four standard errors
    assert abs(float(rows.std()) / 0.02 - 1) < 4 / (2 * rows.numel()) ** 0.5
    assert not torch.equal(rows, drawn["output.project.weight"][V:])
    assert not drawn["output.project.bias"][V:].any()


def test_the_same_seed_gives_the_same_rows_and_another_one_does_not() -> None:
    model = small("decoder, tied")
    first, again, other = (extend(model, W, seed=seed).embedding.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_model_itself_its_precision_and_its_mode_are_kept() -> None:
    model = small("decoder, tied").to(torch.bfloat16).eval()
    larger = extend(model, W)
    assert model.config.vocab == V
    assert larger.embedding.weight.dtype == torch.bfloat16
    assert not larger.training
    assert extend(model.train(), W).training
    same = extend(model, V)
    assert torch.equal(same.embedding.weight, model.embedding.weight)
    assert same.embedding.weight is not model.embedding.weight


def test_a_smaller_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="52 ids already: its vocabulary cannot become 51"):
        extend(small("decoder, tied"), V - 1)


def test_a_model_grows_with_its_tokenizer_and_learns_the_new_id() -> None:
    tokenizer = Bytes().build([])
    larger = tokenizer.extended(["[MASK]"])
    model = lively(ModelConfig(width=32, context=16, vocab=tokenizer.size, decoder=PLAIN))
    grown = extend(model, larger.size)
    ids = torch.tensor([[*larger.encode("to be"), larger.specials["[MASK]"]]])
    grown.head.nll(grown(ids).hidden[0], ids[0]).sum().backward()  # type: ignore[no-untyped-call]
    gradient = grown.embedding.weight.grad
    assert gradient is not None
    assert gradient[larger.specials["[MASK]"]].abs().max() > 0
