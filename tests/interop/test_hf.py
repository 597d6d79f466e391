"""Exports that `transformers` opens: our own models there, what is refused, and that nothing is half-written."""

# B batch, T tokens

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.oracle.copying import enliven, ids, logits, near
from trivium.errors import CheckpointError, RequestError
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.interop import proof, shards
from trivium.interop.folder import open_folder
from trivium.interop.hf import export_folder, find
from trivium.models.config import ModelConfig, Stack, TiedStack
from trivium.models.options import Block, Parallel
from trivium.models.presets import PRESETS
from trivium.models.transformer import Transformer, build
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.options.norms import LayerNormOptions, RMSNormOptions
from trivium.parts.options.output import SoftmaxOptions
from trivium.parts.options.positions import AlibiOptions, Position, RotaryOptions, ShawOptions
from trivium.parts.options.residual import SandwichOptions
from trivium.parts.options.scaling import LinearScaling, Ntk, Yarn
from trivium.text.kinds import Bpe

VOCAB, CONTEXT = 83, 40


def small(block: Block | Parallel, **options: Any) -> ModelConfig:
    settings = {"width": 24, "context": CONTEXT, "vocab": VOCAB, "decoder": Stack(layers=3, block=block), **options}
    return ModelConfig(**settings)


def demo() -> ModelConfig:
    """The model of the demo, smaller."""
    preset = PRESETS["gpt-mini"]()
    assert isinstance(preset.decoder, Stack)
    assert isinstance(preset.decoder.block, Block)
    block = replace(
        preset.decoder.block,
        feedforward=MlpOptions(hidden=60, activation="relu2", bias=False),
        position=RotaryOptions(theta=1000.0),
    )
    return replace(preset, width=32, context=CONTEXT, vocab=VOCAB, decoder=Stack(layers=3, block=block))


def llama(position: Position, **attention: Any) -> ModelConfig:
    heads = MultiHeadOptions(**{"heads": 4, "groups": 2, "head": 12, **attention})
    block = Block(attention=heads, feedforward=GluOptions(hidden=30), norm=RMSNormOptions(), position=position)
    return small(block, embedding=TokenEmbeddingOptions(tie="none"))


def lively(config: ModelConfig) -> Transformer:
    module = build(config).eval()
    enliven(module, seed=0)
    return module


def exported(module: Transformer, folder: Path) -> Any:
    export_folder(module, None, folder, say=lambda text: None)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def continued(theirs: Any, tokens_1T: torch.Tensor) -> list[int]:
    with torch.no_grad():
        whole = theirs.generate(
            tokens_1T, attention_mask=torch.ones_like(tokens_1T), max_new_tokens=32, do_sample=False, pad_token_id=0
        )
    result: list[int] = whole[0, tokens_1T.shape[1] :].tolist()
    return result


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (demo(), "apertus"),
        (llama(RotaryOptions(scaling=LinearScaling(factor=3.0))), "llama"),
        (llama(RotaryOptions(scaling=Ntk(factor=3.0))), "llama"),  # as a larger theta
        (llama(RotaryOptions(theta=500.0, scaling=Yarn(factor=3.0, original=16))), "llama"),
        (llama(RotaryOptions(), window=6), "mistral"),
        (llama(RotaryOptions(), heads=7, groups=7, head=4), "mistral"),  # 7 heads in a width of 24 are no LLaMA there
        (llama(RotaryOptions(), bias="inputs", head=6), "qwen2"),
        (llama(RotaryOptions(), norm="rms"), "qwen3"),
        (
            small(
                Parallel(
                    attention=MultiHeadOptions(heads=3, bias="all"), norms="two", position=RotaryOptions(share=0.5)
                )
            ),
            "gpt_neox",
        ),
        (
            small(
                Block(attention=MultiHeadOptions(bias="all"), position=AlibiOptions()),
                embedding=TokenEmbeddingOptions(norm=LayerNormOptions()),
            ),
            "bloom",
        ),
        (small(Block(attention=MultiHeadOptions(bias="all"))), "gpt2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_made_here_gives_the_same_logits_and_text_there(config: ModelConfig, kind: str, tmp_path: Path) -> None:
    module = lively(config)
    theirs = exported(module, tmp_path / "out")
    assert theirs.config.model_type == kind
    tokens_BT = ids(2, CONTEXT, 1, VOCAB)
    with torch.no_grad():
        near(logits(module, tokens_BT), theirs(tokens_BT).logits)
    request = Request(ids=tuple(tokens_BT[0, :5].tolist()), tokens=32, sampling=Sampling(temperature=0), seed=0)
    assert [token.id for token in stream(module, [request], end=None)] == continued(theirs, tokens_BT[:1, :5])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2", "gpt2"),
        ("gpt", "openai-gpt"),
        ("opt-125m", "opt"),
        ("smollm2-135m", "llama"),
        ("mistral-7b", "mistral"),
        ("qwen3-0.6b", "qwen3"),
        ("llama3.2-1b", "llama"),
    ],
)
def test_a_published_system_exports_as_itself(name: str, kind: str) -> None:
    assert find(PRESETS[name]()).kind == kind


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            small(Block(attention=MultiHeadOptions(bias="all"), feedforward=MlpOptions(activation="softplus"))),
            "feedforward.activation",
        ),
        (llama(ShawOptions()), "position.kind = 'shaw'"),
        (
            small(Block(attention=MultiHeadOptions(bias="all"), residual=SandwichOptions())),
            "residual.kind = 'sandwich'",
        ),
        (small(Block(attention=MultiHeadOptions(bias="all")), output=SoftmaxOptions(cap=30.0)), "output.cap = 30.0"),
        (
            small(Block(attention=MultiHeadOptions(bias="all")), embedding=TokenEmbeddingOptions(scale="root")),
            "embedding.scale = 'root'",
        ),
        (llama(RotaryOptions(layout="interleaved")), "position.layout = 'interleaved'"),
        (llama(RotaryOptions(), value=4), "attention.value = 4"),
    ],
)
def test_a_part_that_nobody_else_has_is_named(config: ModelConfig, named: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"no architecture of Hugging Face has model\\.\\S*{named}"):
        export_folder(build(config), None, tmp_path / "out", say=lambda text: None)
    assert not list(tmp_path.iterdir())


def test_a_decoder_that_is_tied_to_its_encoder_is_named() -> None:
    config = PRESETS["t5-small"]()
    assert isinstance(config.decoder, Stack)
    tied = TiedStack(layers=config.decoder.layers, block=config.decoder.block)
    with pytest.raises(RequestError, match=r"has model\.decoder\.kind = 'tied'; the nearest is t5"):
        find(replace(config, decoder=tied))


def test_noise_that_only_training_reads_does_not_change_the_architecture() -> None:
    noisy = TokenEmbeddingOptions(dropout=0.1, word_dropout=0.1, unigram_noise=0.1, variational_dropout=0.1)
    feedforward = MlpOptions(dropout=0.1, variational_dropout=0.1)
    block = Block(attention=MultiHeadOptions(bias="all", dropout=0.1), feedforward=feedforward, variational_dropout=0.1)
    stack = Stack(layers=3, block=block, variational_dropout=0.1)
    assert find(small(block, embedding=noisy, decoder=stack)).kind == "gpt2"


def test_layers_that_differ_are_not_exported_as_if_alike(tmp_path: Path) -> None:
    block = Block(attention=MultiHeadOptions(bias="all"))
    other = replace(block, feedforward=MlpOptions(activation="relu"))
    stack = Stack(layers=3, block=block, pattern=("", "odd"), variants={"odd": other})
    with pytest.raises(RequestError, match="layer 1"):
        find(small(block, decoder=stack))


def test_the_whole_folder_opens_with_its_tokenizer(tmp_path: Path) -> None:
    text = "to be or not to be that is the question " * 20
    tokenizer = Bpe(size=300).build([text])
    module = lively(replace(demo(), vocab=tokenizer.size))
    said: list[str] = []
    export_folder(module, tokenizer, tmp_path / "out", say=said.append, chat="{{ messages }}")
    assert "differ by at most" in said[-1]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    other = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert other.encode("to be!", add_special_tokens=False) == tokenizer.encode("to be!")
    assert theirs.generation_config.eos_token_id == tokenizer.end
    assert theirs.config.bos_token_id == tokenizer.end
    back = open_folder(tmp_path / "out", say=said.append, tick=lambda what, done, whole: None)
    assert back.tokenizer is not None
    assert back.tokenizer.encode("to be!") == tokenizer.encode("to be!")
    assert back.notes["chat_template"] == "{{ messages }}"
    assert back.notes["ids"]["eos"] == [tokenizer.end]
    assert back.notes["ignored"] == []
    assert "ApertusForCausalLM" in (tmp_path / "out" / "README.md").read_text()


def test_several_ends_of_a_text_survive(tmp_path: Path) -> None:
    special = {"bos": [1], "eos": [2, 5], "pad": [0]}
    export_folder(lively(demo()), None, tmp_path / "out", say=lambda text: None, ids=special)
    back = open_folder(tmp_path / "out", say=lambda text: None, tick=lambda what, done, whole: None)
    assert back.notes["ids"] == special
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [2, 5]


def test_an_existing_folder_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(CheckpointError, match="already exists"):
        export_folder(build(demo()), None, tmp_path / "out", say=lambda text: None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_export_that_does_not_match_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(path: Path, shapes: Any, tensors: Any, tick: Any) -> None:
        original(path, shapes, ((name, tensor * 1.01) for name, tensor in tensors), tick)

    original = shards.write
    monkeypatch.setattr(shards, "write", spoiled)
    with pytest.raises(proof.Mismatch, match="differ by"):
        export_folder(lively(demo()), None, tmp_path / "out", say=lambda text: None)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *rest: Any, **more: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "write", full)
    with pytest.raises(OSError, match="No space left"):
        export_folder(build(demo()), None, tmp_path / "out", say=lambda text: None)
    assert not list(tmp_path.iterdir())


def test_an_exported_configuration_says_nothing_of_other_models(tmp_path: Path) -> None:
    """Ids that a file leaves out would be those of the architecture's first checkpoint."""
    exported(lively(demo()), tmp_path / "out")
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {table[f"{role}_token_id"] for role in ("bos", "eos", "pad")} == {None}
