"""Weights of other libraries' models in ours, for tests only, by the names that imports know."""

# B batch, T tokens, S source, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.interop.architectures import ARCHITECTURES
from trivium.interop.names import Rule, Rules, same
from trivium.models.transformer import Transformer, load_weights, weights


class Rows:
    """Queries, keys and values one below the other in one [out, in] matrix: in_proj of nn.MultiheadAttention."""

    def read(self, theirs: Tensor) -> tuple[Tensor, ...]:
        return theirs.chunk(3)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(ours))


def _torch(side: str, attentions: Mapping[str, str]) -> list[Rule]:
    """One side of nn.Transformer, whose norms are numbered in the order of the parts; `attentions` ours to theirs."""
    mine, theirs = f"{side}.blocks.*", f"body.{side}.layers.*"
    names = {
        **{f"{mine}.{part}.out": f"{theirs}.{name}.out_proj" for part, name in attentions.items()},
        f"{mine}.feedforward.up": f"{theirs}.linear1",
        f"{mine}.feedforward.down": f"{theirs}.linear2",
        **{
            f"{mine}.around_{part}.norm": f"{theirs}.norm{at}"
            for at, part in enumerate((*attentions, "feedforward"), 1)
        },
    }
    fused = [
        Rule(
            tuple(f"{mine}.{part}.{one}.{end}" for one in ("query", "key", "value")),
            f"{theirs}.{name}.in_proj_{end}",
            Rows(),
        )
        for part, name in attentions.items()
        for end in ("weight", "bias")
    ]
    return [*same(names), *fused]


TORCH = Rules(  # nn.Transformer with an embedding beside it
    table=[
        *same({"embedding": "embedding"}),
        *_torch("encoder", {"attention": "self_attn"}),
        *_torch("decoder", {"attention": "self_attn", "cross": "multihead_attn"}),
    ],
    copies={},
)


def copy(theirs: nn.Module, ours: Transformer, kind: str) -> None:
    """Copy all parameters of a model of `transformers`, whose architecture is `kind`."""
    # what is not trained is not a weight: Marian keeps its sinusoids as parameters
    found = {name: parameter for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    load_weights(ours, renamed(found, ours, ARCHITECTURES[kind].rules(ours.config)))


def renamed(found: Mapping[str, Tensor], ours: Transformer, rules: Rules) -> dict[str, Tensor]:
    """The tensors under our names: every one of theirs must be read, and every one of ours filled, once."""
    plan = rules.match({name: tensor.shape for name, tensor in found.items()}, weights(ours), "theirs")
    # stricter than for a file, which may hold copies of tied tensors, stored masks and computed positions besides
    read = [step.source for step in plan.steps]
    assert sorted(read) == sorted(found), f"nobody reads {sorted(found.keys() - set(read))}"
    pairs = [
        pair
        for source, names, form in plan.steps
        for pair in zip(names, form.read(found[source].detach()), strict=True)
    ]
    assert len(pairs) == len(dict(pairs)), "two of theirs fill one of ours"
    return dict(pairs)


def enliven(model: nn.Module, *, seed: int, spread: float = 0.15) -> None:
    """Redraw every weight, biases and gains too: fresh models have zeros and ones where a mix-up would not show.

    A wide `spread` makes a model that does not repeat itself.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim == 1 else spread)
            gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(noise + 1 if gain else noise)


def ids(rows: int, length: int, seed: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three rows of 9 ids that begin with 0, 2 and 5 of padding: the ids, which of them are real, their positions."""
    at_1T, pads_B1 = torch.arange(9)[None], torch.tensor([[0], [2], [5]])
    return ids(3, 9, 3, vocab), at_1T >= pads_B1, (at_1T - pads_B1).clamp(min=0)


def near(actual: Tensor, expected: Tensor, within: float = 1e-5) -> None:
    """Within 1e-5, relative where logits are large."""
    torch.testing.assert_close(actual, expected, atol=within, rtol=within)
    assert expected.std() > 0.1  # logits that say nothing would agree too easily


def logits(ours: Transformer, tokens_BT: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return ours.head.logits(ours(tokens_BT, **inputs).hidden)


def states(side: nn.Module | None, run: Callable[[], object]) -> list[Tensor]:
    """What every block of one side gives, and last what its final norm gives, while `run` runs."""
    assert side is not None
    found: list[Tensor] = []
    modules = [*side.get_submodule("blocks").children(), side.get_submodule("final")]
    hooks = [module.register_forward_hook(lambda _, __, result: found.append(result)) for module in modules]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return found


def near_states(found: list[Tensor], theirs: tuple[Tensor, ...], real_BT: Tensor | None = None) -> None:
    """Layer by layer; the last of theirs is after the final norm, the first is the input of the stack."""
    assert len(found) == len(theirs) > 2
    for mine, expected in zip([*found[:-2], found[-1]], theirs[1:], strict=True):
        near(mine if real_BT is None else mine[real_BT], expected if real_BT is None else expected[real_BT])


def near_sides(theirs: Any, ours: Transformer, source_BS: Tensor, real_BS: Tensor, target_BT: Tensor) -> None:
    """Layer by layer, both sides of an encoder-decoder."""
    inputs = {"input_ids": source_BS, "attention_mask": real_BS.long(), "decoder_input_ids": target_BT}
    with torch.no_grad():
        other = theirs(**inputs, output_hidden_states=True)

    def run() -> object:
        return ours(target_BT, source=source_BS, source_padding=real_BS)

    near_states(states(ours.encoder, run), other.encoder_hidden_states, real_BS)
    near_states(states(ours.decoder, run), other.decoder_hidden_states)


def same_text(theirs: Any, ours: Transformer, tokens_1T: Tensor, *, tokens: int = 32) -> list[int]:
    """The greedy continuation, in which both must agree."""
    with torch.no_grad():
        whole_1T = theirs.generate(
            tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    expected: list[int] = whole_1T[0, tokens_1T.shape[1] :].tolist()
    request = Request(ids=tuple(tokens_1T[0].tolist()), tokens=tokens, sampling=Sampling(temperature=0), seed=0)
    assert [token.id for token in stream(ours, [request], end=None)] == expected
    return expected


def near_gradients(theirs: nn.Module, ours: Transformer, kind: str) -> None:
    """The gradients of both, after a backward pass of each."""
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    expected = renamed(grads, ours, ARCHITECTURES[kind].rules(ours.config))
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)
