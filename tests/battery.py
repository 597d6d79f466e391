"""The battery that every part and every shrunk preset passes: what must hold whatever a model is made of.

Weights are drawn anew, all of them lively: an init may leave layers at zero, and zeros would pass most checks.
"""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tests.cases import CONTEXT, VOCAB, WIDTH, Case
from trivium.checkpoints.bundle import open_bundle, save
from trivium.config import flat, load, overrides
from trivium.fast.choose import for_inference
from trivium.models.config import AnyStack, BlockStack, ModelConfig
from trivium.models.options import AnyBlock
from trivium.models.transformer import Transformer, build, load_weights, weights
from trivium.objectives.causal import restarting
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.output import NoOutputOptions
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.site import NoPart
from trivium.text.kinds import Bytes


@dataclass(frozen=True, kw_only=True)
class Exemption:
    """A parameter whose gradient is zero by nature, where it is so, and why."""

    parameter: str  # the end of its name
    when: Callable[[AnyBlock], bool]
    reason: str


def _plain(attention: object) -> bool:
    return isinstance(attention, MultiHeadOptions) and attention.norm == "none"


EXEMPT = (
    Exemption(
        parameter=".attention.key.bias",
        when=lambda block: _plain(block.attention) and not isinstance(block.position, RotaryOptions),
        reason="it adds the same number to all scores of a query, which softmax ignores, unless keys are turned "
        "by their position or normed",
    ),
    Exemption(
        parameter=".cross.key.bias",
        when=lambda block: _plain(block.cross),
        reason="as in self-attention, and keys from a source are never turned",
    ),
)


def lively(config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Transformer:
    """A model in evaluation mode whose every weight matters; in float64 what differs is more than dust."""
    model = build(config, seed=seed).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            gain = parameter.ndim == 1 and bool((parameter == 1).all())  # of a norm: spread around 1
            spread = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread
            parameter.copy_(noise + 1 if gain else noise)
        for module in model.modules():
            if isinstance(module, MultiHeadAttention) and module.scale == 1.0:
                module.query.weight.mul_(module.size**-0.5)  # as T5 folds the missing scale into its queries
    return model


def some_ids(rows: int, length: int, *, seed: int = 0) -> Tensor:
    """Rows of ids that are all different, so that each position has an embedding of its own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(VOCAB, generator=generator)[:length] for _ in range(rows)])


def read(case: Case, rows: int) -> dict[str, Tensor]:
    """What the model reads besides its tokens: the source of an encoder-decoder."""
    return {"source": some_ids(rows, 7, seed=99)} if case.crossed else {}


def logits(model: Transformer, tokens_BT: Tensor, **inputs: Any) -> Tensor:
    """What the model says after every token: its states where it has no vocabulary to say them in."""
    inputs = {**read(Case(name="", config=model.config), len(tokens_BT)), **inputs}
    hidden = model(tokens_BT, **inputs).hidden
    return hidden if mute(model.config) else model.head.logits(hidden)


def mute(config: ModelConfig) -> bool:
    return isinstance(config.output, NoOutputOptions)


def close(actual: Tensor, expected: Tensor, within: float) -> None:
    assert actual.shape == expected.shape
    worst = (actual - expected).abs().max().item()
    assert worst <= within, f"differs by {worst:.3g}"


def check_shape(case: Case) -> None:
    """States are [B, T, D], logits [B, T, V], for one token and for a full context."""
    model = lively(case.config)
    for rows, length in ((1, 1), (2, 5), (1, CONTEXT)):
        tokens_BT = some_ids(rows, length)
        assert model(tokens_BT, **read(case, rows)).hidden.shape == (rows, length, WIDTH)
        assert logits(model, tokens_BT).shape == (rows, length, WIDTH if mute(case.config) else VOCAB)


def check_dtype(case: Case) -> None:
    """States and logits come in the dtype of the weights, the loss in float32, all finite."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = lively(case.config, dtype=dtype)
        result = logits(model, some_ids(2, 5))
        assert result.dtype == dtype
        assert bool(result.isfinite().all())
        if mute(case.config):
            continue
        hidden = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert model.head.nll(hidden, torch.tensor([1, -100, 2])).dtype == torch.float32


def check_count(case: Case) -> None:
    """The configuration's own count is that of the distinct tensors of the model."""
    model = build(case.config, device="meta")
    assert case.config.parameters() == sum(parameter.numel() for parameter in model.parameters())


def check_gradients(case: Case) -> None:
    """A step reaches every parameter, except those that EXEMPT names: theirs is zero up to round-off."""
    model = lively(case.config)
    tokens_BT = some_ids(3, 10)
    hidden_BTD: Tensor = model(tokens_BT[:, :-1], **read(case, 3)).hidden
    if mute(case.config):
        loss = hidden_BTD.pow(3).sum()  # not a square: a norm makes the sum of squares nearly constant
    else:
        loss = model.head.nll(hidden_BTD.flatten(0, 1), tokens_BT[:, 1:].flatten()).sum()
    if model.sentence is not None:
        loss = loss + cast(Any, model.sentence).logits(hidden_BTD).square().sum()
    if model.boundary is not None:
        left, right = (side.flatten(0, 1) for side in (hidden_BTD[:, :-2], hidden_BTD[:, 2:]))
        places = torch.arange(len(left)) % 4
        loss = loss + cast(Any, model.boundary).nll(left, right, places, tokens_BT[:, 1:-2].flatten()).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        size = parameter.grad.abs().max().item()
        if any(name.endswith(exempt.parameter) and _applies(exempt, case) for exempt in EXEMPT):
            assert size < 1e-5, f"{name} is exempt, but has a gradient of {size:.3g}: strike the exemption"
        else:
            assert size > 1e-4, f"{name} has a gradient of {size:.3g}"


def _applies(exempt: Exemption, case: Case) -> bool:
    place = exempt.parameter.split(".")[1]
    return all(exempt.when(block) for block in case.blocks() if not isinstance(getattr(block, place), NoPart))


def check_no_leak_by_gradient(case: Case) -> None:
    """The state at i has a gradient of exactly zero from every later token, and one from every token up to i."""
    model, length = lively(case.config), 8
    source, table = read(case, 1), model.embedding.weight
    # the source reads the same table: only ids that it does not have tell something
    taken = source["source"].flatten().tolist() if source else []
    tokens_1T = torch.tensor([[id for id in range(VOCAB) if id not in taken][:length]])
    direction_D = torch.randn(WIDTH, dtype=table.dtype, generator=torch.Generator().manual_seed(5))
    for i in range(length):
        out = model(tokens_1T, **source).hidden[0, i] @ direction_D
        (gradient_VD,) = torch.autograd.grad(out, table)
        reach_T = gradient_VD[tokens_1T[0]].abs().amax(-1)
        assert bool((reach_T[i + 1 :] == 0).all()), f"position {i} sees a later token"
        first = max(0, i - _reach(case))
        assert bool((reach_T[first : i + 1] > 0).all()), f"position {i} does not see all tokens that it may"
        assert bool((reach_T[:first] == 0).all()), f"position {i} sees beyond its windows"


def _reach(case: Case) -> int:
    """How far back a token can see through all layers of the decoder."""
    assert isinstance(case.config.decoder, BlockStack)
    windows = [block.attention.window or CONTEXT for block in case.config.decoder.blocks()]
    return sum(window - 1 for window in windows)


def check_no_leak_by_perturbation(case: Case) -> None:
    """Another token at j changes nothing before j, bit for bit, and something from j on."""
    model, length = lively(case.config), 8
    tokens_1T = some_ids(1, length)
    with torch.no_grad():
        before = logits(model, tokens_1T)
        for j in range(length):
            changed_1T = tokens_1T.clone()
            changed_1T[0, j] = (changed_1T[0, j] + 1) % VOCAB
            after = logits(model, changed_1T)
            assert torch.equal(before[:, :j], after[:, :j]), f"a token before {j} sees it"
            assert not torch.equal(before[:, j:], after[:, j:])


def check_cache(case: Case) -> None:
    """With a cache, token by token and in chunks of any size, the logits are those of one full pass."""
    model, length = lively(case.config), 11
    tokens_BT = some_ids(2, length)
    with torch.no_grad():
        whole = logits(model, tokens_BT)
        for sizes in ([1] * length, [4, 1, 1, 5], [length], [1, 10]):
            cache = model.cache(2, length)
            pieces = [logits(model, piece_BT, cache=cache) for piece_BT in torch.split(tokens_BT, sizes, dim=1)]
            close(torch.cat(pieces, dim=1), whole, 1e-9)
            assert cache.length == length


def check_padding(case: Case) -> None:
    """Padding on either side, with positions that skip it, changes nothing at the real tokens."""
    model, tokens_BT, length, pads = lively(case.config), some_ids(2, 6), 6, 3
    filler, at = torch.full((2, pads), 7), torch.arange(length + pads).expand(2, -1)
    with torch.no_grad():
        expected = logits(model, tokens_BT)
        shifted = torch.cat((filler, tokens_BT), 1)
        left = logits(model, shifted, padding=at >= pads, positions=(at - pads).clamp(min=0))
        right = logits(model, torch.cat((tokens_BT, filler), 1), padding=at < length)
    assert bool(left.isfinite().all())
    close(left[:, pads:], expected, 1e-9)
    close(right[:, :length], expected, 1e-9)


def check_source_padding(case: Case) -> None:
    """Padding of the source changes nothing; the same ids without the mask do."""
    model, tokens_BT, source_BS = lively(case.config), some_ids(2, 5), some_ids(2, 6, seed=3)
    padded_BS = torch.cat((source_BS, torch.full((2, 2), 7)), 1)
    real_BS = torch.arange(8).expand(2, -1) < 6
    with torch.no_grad():
        expected = logits(model, tokens_BT, source=source_BS)
        close(logits(model, tokens_BT, source=padded_BS, source_padding=real_BS), expected, 1e-9)
        assert (logits(model, tokens_BT, source=padded_BS) - expected).abs().max() > 1e-3


def check_batch(case: Case) -> None:
    """Each row of a batch gets what it gets alone."""
    model, tokens_BT = lively(case.config), some_ids(5, 7)
    with torch.no_grad():
        source = read(case, 5)
        together = logits(model, tokens_BT, **source)
        rows = [{name: tensor[row, None] for name, tensor in source.items()} for row in range(5)]
        alone = [logits(model, tokens_BT[row, None], **rows[row]) for row in range(5)]
    close(together, torch.cat(alone), 1e-9)


def check_packed(case: Case) -> None:
    """Documents packed into one row, kept apart, get what they get alone; without the mask they would not."""
    model = lively(case.config)
    documents_1T = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 0, 0]])
    tokens_1T = some_ids(1, documents_1T.shape[1])
    at_1T = restarting(documents_1T)
    with torch.no_grad():
        packed = logits(model, tokens_1T, documents=documents_1T, positions=at_1T)
        joined = logits(model, tokens_1T, positions=at_1T)
        assert bool(packed.isfinite().all())
        for number in (1, 2, 3):
            here = documents_1T[0] == number
            alone = logits(model, tokens_1T[:, here])
            close(packed[:, here], alone, 1e-5)
            if number > 1 or not case.causal:
                assert (joined[:, here] - alone).abs().max() > 1e-3, "the mask makes no difference"


def check_half_precision(case: Case) -> None:
    """Arithmetic in bfloat16 stays within 2 % of float32 with the same weights, over the whole context."""
    half, tokens_BT = lively(case.config, dtype=torch.bfloat16), some_ids(4, CONTEXT)
    whole = deepcopy(half).float()
    with torch.no_grad():
        expected, actual = logits(whole, tokens_BT), logits(half, tokens_BT).float()
    assert ((actual - expected).norm() / expected.norm()).item() < 2e-2


def check_dropout(case: Case, place: str) -> None:
    """The dropout of one place (a dotted key) makes two passes in training differ, and none in evaluation."""
    model = lively(load(ModelConfig, overrides({place: 0.5}), start=case.config))
    tokens_BT = some_ids(2, 6)
    torch.manual_seed(0)

    def twice() -> bool:
        with torch.no_grad():
            return torch.equal(logits(model, tokens_BT), logits(model, tokens_BT))

    assert twice()
    model.train()
    assert not twice(), f"{place} does nothing"


def dropouts(case: Case) -> list[str]:
    """Every dropout of a model, by its dotted key."""
    return [key for key in flat(case.config) if key.endswith("dropout")]


def check_determinism(case: Case) -> None:
    """The same seed gives the same weights and outputs, whatever was drawn before; another seed does not."""
    tokens_BT, models = some_ids(2, 6), []
    for noise, seed in ((1, 3), (2, 3), (1, 4)):
        torch.manual_seed(noise)
        models.append(build(case.config, seed=seed).eval())
    first, again, other = (weights(model) for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    with torch.no_grad():
        assert torch.equal(logits(models[0], tokens_BT), logits(models[1], tokens_BT))


def check_saved(case: Case, folder: Path) -> None:
    """A saved model comes back with its configuration, its weights and its outputs, bit for bit."""
    model = lively(case.config, dtype=torch.float32)
    save(folder, case.config, weights(model), Bytes().build([]), {})
    again = open_bundle(folder).module
    assert again.config == case.config
    mine, read = weights(model), weights(again)
    assert mine.keys() == read.keys()
    assert all(torch.equal(mine[name], read[name]) for name in mine)
    with torch.no_grad():
        assert torch.equal(logits(model, some_ids(2, 6)), logits(again, some_ids(2, 6)))


def check_arranged(case: Case, folder: Path) -> None:
    """Fast and laid out for decoding a model is the same: its outputs, its file, and after weights change in place."""
    model, other = lively(case.config), lively(case.config, seed=7)
    tokens_BT = some_ids(2, 6)
    with torch.no_grad():
        before, after = logits(model, tokens_BT), logits(other, tokens_BT)
        for_inference(model)
        close(logits(model, tokens_BT), before, 1e-10)
        load_weights(model, weights(other))
        close(logits(model, tokens_BT), after, 1e-10)
    save(folder, case.config, weights(model), Bytes().build([]), {})
    again, kept = weights(open_bundle(folder).module), weights(other)
    assert all(torch.equal(again[name], kept[name].float()) for name in kept)


def check_compiled(case: Case, backend: str) -> None:
    """One graph without a break, and the outputs and gradients of eager mode."""
    config = replace(case.config, encoder=_shallow(case.config.encoder), decoder=_shallow(case.config.decoder))
    model = lively(config, dtype=torch.float32)
    tokens_BT = some_ids(2, 6)
    # every model here runs the same code: kept graphs would count as recompilations, of which few are allowed
    torch._dynamo.reset()
    compiled = cast(nn.Module, torch.compile(model, backend=backend, fullgraph=True))
    results = []
    for way in (model, compiled):
        model.zero_grad(set_to_none=True)
        hidden = way(tokens_BT, **read(case, 2)).hidden
        hidden.square().sum().backward()
        results.append((hidden.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    (eager, eager_gradients), (graph, graph_gradients) = results
    close(graph, eager, 1e-5)
    for expected, actual in zip(eager_gradients, graph_gradients, strict=True):
        close(actual, expected, 1e-4 * max(1.0, expected.abs().max().item()))


def _shallow(stack: AnyStack) -> AnyStack:
    """As few layers as show all blocks: compiling costs a second per layer."""
    return replace(stack, layers=max(1, len(stack.pattern))) if isinstance(stack, BlockStack) else stack
