"""The example of a mixer with a state of its own: it trains, caches, batches and beams rightly."""

from __future__ import annotations

import torch

from examples.convolution import Convolution
from tests.generation.outside import made
from tests.generation.test_mixers import LENGTHS, greedily, ids_of, prompts, requests, scores
from trivium.generation.beam import Beam, Search, search
from trivium.generation.engine import stream
from trivium.models.transformer import Transformer


def model() -> Transformer:
    return made(Convolution(kernel=3))


def test_it_learns_which_token_came_two_before() -> None:
    learner = model().train()
    ids = torch.randint(3, 12, (16, 20), generator=torch.Generator().manual_seed(0))
    ids[:, 2:] = ids[:, :2].repeat(1, 9)  # every token is the one two before it
    optimizer, losses = torch.optim.Adam(learner.parameters(), 0.01), []
    for _ in range(60):
        loss = learner.head.nll(learner(ids[:, :-1]).hidden.flatten(0, 1), ids[:, 1:].flatten()).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_its_cache_gives_what_a_whole_pass_gives() -> None:
    reader = model()
    ids = torch.tensor([[1, 5, 2, 7, 3, 9, 4], [4, 4, 1, 2, 8, 8, 3]])
    with torch.no_grad():
        whole, cache = reader(ids).hidden, reader.cache(2, 7)
        parts = [reader(part, cache=cache).hidden for part in torch.split(ids, [3, 1, 2, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_batch_writes_what_each_text_alone_would() -> None:
    writer = model()
    wishes = requests(writer, LENGTHS)
    found = ids_of(stream(writer, wishes, end=None), len(wishes))
    assert found == [greedily(writer, wish.prompt, wish.tokens) for wish in wishes]


def test_beams_have_the_log_probabilities_of_whole_passes() -> None:
    writer = model()
    wishes = [Search(prompt=prompt, tokens=5) for prompt in prompts(writer, (4, 4, 7))]
    for wish, found in zip(wishes, search(writer, wishes, Beam(beams=3, n=3), end=None), strict=True):
        assert len(found) == 3
        for one in found:
            parts = [scores(writer, wish.prompt, one.ids[:at])[token] for at, token in enumerate(one.ids)]
            torch.testing.assert_close(torch.tensor(one.logprob), torch.stack(parts).sum(), rtol=1e-4, atol=1e-4)
