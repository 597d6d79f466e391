"""Embeddings against a plain look-up."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from trivium.errors import ConfigError, RequestError
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import build, weights
from trivium.parts.embeddings import TokenEmbedding
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import Tie, TokenEmbeddingOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.output import SoftmaxOutput
from trivium.parts.site import Site

SITE = Site(width=4, context=8, vocab=9)


def leave(part: TokenEmbedding, x: Tensor) -> Tensor:
    """What the first block reads if vectors and positions add up to x."""
    result: Tensor = part(torch.zeros(x.shape[:-1], dtype=torch.long), None, lambda _: x)
    return result


def test_an_id_is_looked_up_as_its_row() -> None:
    part = TokenEmbeddingOptions().build(SITE)
    with torch.no_grad():
        part.weight.copy_(torch.arange(36.0).view(9, 4))
    ids = torch.tensor([[0, 8], [3, 3]])
    expected = [[[0.0, 1, 2, 3], [32, 33, 34, 35]], [[12, 13, 14, 15]] * 2]
    assert part.enter(ids).tolist() == expected


def test_an_id_outside_the_vocabulary_is_an_error() -> None:
    part = TokenEmbeddingOptions().build(SITE)
    for id in (9, -1):
        with pytest.raises(IndexError):
            part.enter(torch.tensor([[id]]))


def test_dropout_falls_on_the_sum_with_the_positions_in_training_only() -> None:
    part, x = TokenEmbeddingOptions(dropout=0.5).build(SITE), torch.ones(50, 4)
    torch.manual_seed(0)
    assert set(leave(part, x).flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(leave(part.eval(), x), x)


def test_cost_counts_the_table_and_no_arithmetic() -> None:
    assert tuple(TokenEmbeddingOptions().cost(SITE, tied=False)) == (36, 0, 0)
    assert TokenEmbeddingOptions().build(SITE).weight.numel() == 36


def test_a_dropout_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="dropout"):
        TokenEmbeddingOptions(dropout=1.0)


def test_the_scale_multiplies_before_positions_are_added() -> None:
    part = TokenEmbeddingOptions(scale="root").build(SITE)
    nn.init.ones_(part.weight)
    assert torch.equal(part.enter(torch.tensor([[1]])), torch.full((1, 1, 4), 2.0))  # the root of the width


def test_a_segment_adds_its_vector_and_all_are_of_the_first_unless_said() -> None:
    part = TokenEmbeddingOptions(segments=2).build(SITE)
    assert part.segments is not None
    with torch.no_grad():
        part.weight.zero_()
        part.segments.copy_(torch.tensor([[1.0], [2.0]]).expand(2, 4))
        assert part.enter(torch.tensor([[5, 6]]), torch.tensor([[0, 1]]))[0, :, 0].tolist() == [1.0, 2.0]
        assert part.enter(torch.tensor([[5, 6]]))[0, :, 0].tolist() == [1.0, 1.0]
    with pytest.raises(RequestError, match="this model has no segments"):
        TokenEmbeddingOptions().build(SITE).enter(torch.tensor([[5]]), torch.tensor([[0]]))


def test_the_norm_acts_on_the_sum_and_before_dropout() -> None:
    part = TokenEmbeddingOptions(norm=LayerNormOptions(), dropout=0.5).build(SITE)
    x = torch.randn(64, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = nn.functional.layer_norm(x, (4,))
    torch.testing.assert_close(leave(part.eval(), x), expected)
    dropped = leave(part.train(), x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * expected[kept])


def test_cost_counts_segments_and_norm_and_a_tied_table_not_again() -> None:
    options = TokenEmbeddingOptions(segments=2, norm=LayerNormOptions())
    assert options.cost(SITE, tied=False).parameters == 36 + 8 + 8
    assert options.cost(SITE, tied=True).parameters == 8 + 8


@pytest.mark.parametrize(("tie", "matrices"), [("all", 1), ("inputs", 2), ("output", 2), ("none", 3)])
def test_an_encoder_decoder_ties_its_three_matrices_as_it_says(tie: Tie, matrices: int) -> None:
    decoder = Stack(layers=1, block=Block(cross=MultiHeadOptions()))
    config = ModelConfig(
        width=16, context=8, vocab=9, embedding=TokenEmbeddingOptions(tie=tie), encoder=Stack(layers=1), decoder=decoder
    )
    model = build(config)
    assert model.source_embedding is not None
    source, target = model.source_embedding.weight, model.embedding.weight
    output = cast(SoftmaxOutput, model.output).project.weight
    assert len({id(source), id(target), id(output)}) == matrices
    assert (source is target) == (tie in ("all", "inputs"))
    assert (output is target) == (tie in ("all", "output"))
    assert sum(tensor.numel() for tensor in weights(model).values()) == config.parameters()


def test_a_dropped_word_is_missing_wherever_it_stands_and_only_in_training() -> None:
    site = Site(width=4, context=8, vocab=4000)
    part = TokenEmbeddingOptions(word_dropout=0.25).build(site)
    nn.init.ones_(part.weight)
    ids = torch.arange(4000).repeat(2, 1)
    torch.manual_seed(0)
    first, second = part.enter(ids)
    assert torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert torch.equal(first[:, 0], first[:, 3])  # a whole vector at a time
    # 4,000 coins: five standard deviations are 0.034
    assert abs((first[:, 0] == 0).float().mean().item() - 0.25) < 0.034
    assert not torch.equal(first, part.enter(ids)[0])  # others in the next step
    assert torch.equal(part.eval().enter(ids), torch.ones(2, 4000, 4))
    with pytest.raises(ConfigError, match="word_dropout"):
        TokenEmbeddingOptions(word_dropout=1.0)


def test_unigram_noise_reads_another_word_of_the_batch_and_only_in_training() -> None:
    part = TokenEmbeddingOptions(unigram_noise=0.3).build(Site(width=1, context=8, vocab=3))
    with torch.no_grad():
        part.weight.copy_(torch.tensor([[0.0], [1.0], [2.0]]))
    ids = torch.tensor([1, 1, 1, 2]).repeat(20, 1000)
    torch.manual_seed(0)
    read = part.enter(ids)[..., 0]
    # drawn from the batch's own words: id 0 is not among them, and the shares of the others stay (80,000 coins)
    assert not (read == 0).any()
    assert abs((read == 2).float().mean().item() - 0.25) < 0.01
    # of the noisy places 3 in 8 read the other word: 0.3 * 2 * 0.75 * 0.25
    assert abs((read != ids).float().mean().item() - 0.1125) < 0.01
    assert torch.equal(part.eval().enter(ids)[..., 0], ids.float())
    with pytest.raises(ConfigError, match="unigram_noise"):
        TokenEmbeddingOptions(unigram_noise=-0.1)


def test_variational_dropout_takes_a_feature_from_the_whole_row_and_only_in_training() -> None:
    part = TokenEmbeddingOptions(variational_dropout=0.5).build(Site(width=2000, context=8, vocab=9))
    x = torch.ones(2, 7, 2000)
    torch.manual_seed(0)
    first, second = leave(part, x)
    assert torch.equal(first, first[:1].expand_as(first))
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert abs((first[0] == 0).float().mean().item() - 0.5) < 0.06  # 2,000 coins: five standard deviations
    assert not torch.equal(first, second)  # each row its own
    assert torch.equal(leave(part.eval(), x), x)
    with pytest.raises(ConfigError, match="variational_dropout"):
        TokenEmbeddingOptions(variational_dropout=1.0)
