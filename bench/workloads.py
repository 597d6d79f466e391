"""The workloads by name: a model without dropout, what it learns, how much a step sees, and the data for that."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np

from bench.formulas import Row
from trivium.data.bucketing import Pairs
from trivium.data.config import DataConfig
from trivium.data.packed import Examples, PackedPairs
from trivium.data.shards import Shards, Stream
from trivium.labels import IGNORED
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.presets import bart, bert, gpt, llama, t5, transformer
from trivium.objectives.denoise import DenoiseTask
from trivium.objectives.masked import MaskedTask
from trivium.objectives.objective import Task
from trivium.objectives.options import Causal, Denoise, Masked, Objective, Seq2Seq
from trivium.optim.options import AdamW
from trivium.optim.schedules import Constant
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.site import NoPart
from trivium.text.kinds import Bpe, Bytes
from trivium.training.context import RunContext
from trivium.training.device import settle
from trivium.training.recipe import BatchConfig, Budget, Recipe
from trivium.training.setup import create_run

T = TypeVar("T")

OPTIM = AdamW(rate=3e-4)
CLIP = 1.0
# nothing but the compiler's cache is ever written there, and that is where training keeps it too
FOLDER = Path("runs") / "bench"


def dry(part: T) -> T:
    """The same options without any dropout."""
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{field.name: _dry(part, field.name) for field in fields(part) if field.init})


def _dry(part: Any, name: str) -> Any:
    return 0.0 if name == "dropout" else dry(getattr(part, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model and what it learns; a batch is `rows` rows of random ids, or so many `tokens` a side of real pairs."""

    model: ModelConfig
    objective: Objective
    rows: int = 1
    tokens: int = 0
    pack: int = 0  # pairs go several to a row of so many tokens a side
    vocab: int = 8000  # of the tokenizer for pairs

    def recipe(
        self, *, device: str, precision: str = "auto", compiled: str = "auto", rows: int = 0, threads: int = 0
    ) -> Recipe:
        """What trivium is told; `rows` are tokens where the batch is counted in them, and 0 means as many as here."""
        tokens = (rows or self.tokens) if self.tokens else 0
        batch = BatchConfig(rows=rows or self.rows)
        if tokens:
            batch = BatchConfig(rows=max(1, tokens // self.pack)) if self.pack else BatchConfig(tokens=tokens)
        chosen: dict[str, Any] = {"precision": precision, "compile": compiled}
        for name, value in chosen.items():
            if value not in get_args(get_type_hints(Recipe)[name]):
                raise SystemExit(f"--{name}: trivium has no {value}")
        recipe = Recipe(
            name=FOLDER.name,
            model=self.model,
            objective=self.objective,
            device=device,
            **chosen,
            threads=threads,
            clip=CLIP,
            optim=OPTIM,
            schedule=Constant(),
            budget=Budget(steps=1),
            # as much at a time as a step has: a batch that does not fit is an error here, and not halved
            batch=replace(batch, micro=batch.size),
        )
        return settle(recipe)


def _gpt2(shape: gpt.Shape, *, vocab: int, context: int = 1024) -> ModelConfig:
    return dry(replace(gpt.gpt2(shape), vocab=vocab, context=context))


def _bert(shape: bert.Shape, *, context: int = 512) -> ModelConfig:
    """With the masked head alone: what is timed is learning masked tokens."""
    return dry(replace(bert.bert(shape), sentence=NoPart(), context=context))


def _t5(shape: t5.Shape, *, vocab: int = 32_128, context: int = 512) -> ModelConfig:
    return dry(replace(t5.v1_0(shape), vocab=vocab, context=context))


def _transformer(shape: transformer.Shape, *, vocab: int = 8000, context: int = 128) -> ModelConfig:
    """With the biases in attention that `torch.nn.Transformer` has, so that both compute the same."""
    model = transformer.vaswani(shape)
    sides = {"encoder": _biased(model.encoder), "decoder": _biased(model.decoder)}
    return dry(replace(model, vocab=vocab, context=context, encoder=sides["encoder"], decoder=sides["decoder"]))


def _biased(stack: Any) -> Stack:
    assert isinstance(stack, Stack)
    assert isinstance(stack.block, Block)
    block = stack.block
    changes: dict[str, Any] = {
        name: replace(part, bias="all")
        for name in ("attention", "cross")
        if isinstance(part := getattr(block, name), MultiHeadOptions)
    }
    return replace(stack, block=replace(block, **changes))


def marian(vocab: int, *, tiny: bool) -> ModelConfig:
    """The Transformer of 2017 as Marian has it, which Hugging Face has too: for translating side by side."""
    model = dry(replace(bart.marian(), vocab=vocab, context=128))
    if not tiny:
        return model
    assert isinstance(model.encoder, Stack)
    assert isinstance(model.decoder, Stack)
    return replace(model, width=64, encoder=replace(model.encoder, layers=2), decoder=replace(model.decoder, layers=2))


GPT2_10M = _gpt2(gpt.Shape(6, 320, 5), vocab=8192, context=256)
PADDED = 50_304  # GPT-2's 50,257 ids filled up to a multiple of 64, as nanoGPT does

WORKLOADS = {
    "gpt2-10m": Workload(model=GPT2_10M, objective=Causal(), rows=8),  # for two CPU cores
    "gpt2": Workload(model=_gpt2(gpt.GPT2["gpt2"], vocab=PADDED), objective=Causal(), rows=64),
    "gpt2-xl": Workload(model=_gpt2(gpt.GPT2["gpt2-xl"], vocab=PADDED), objective=Causal(), rows=16),
    "tinyllama": Workload(model=dry(llama.llama(llama.TINYLLAMA["tinyllama-1.1b"])), objective=Causal(), rows=16),
    "bert": Workload(model=_bert(bert.BERT["bert-base-uncased"]), objective=Masked(), rows=128),
    "t5": Workload(model=_t5(t5.V1_0["t5-base"]), objective=Denoise(), rows=128),
    "transformer": Workload(
        model=_transformer(transformer.VASWANI["transformer-base"]), objective=Seq2Seq(align=8), tokens=16_384, pack=128
    ),
}
# the same in everything but size, for tests and for trying a command
TINY = {
    "gpt2-10m": Workload(model=_gpt2(gpt.Shape(2, 64, 1), vocab=128, context=32), objective=Causal(), rows=2),
    "gpt2": Workload(model=_gpt2(gpt.Shape(2, 64, 2), vocab=128, context=32), objective=Causal(), rows=2),
    "gpt2-xl": Workload(model=_gpt2(gpt.Shape(3, 64, 2), vocab=128, context=32), objective=Causal(), rows=2),
    "tinyllama": Workload(
        model=llama.llama(llama.Shape(2, 64, 96, 4, 2, 16, vocab=128, context=32)), objective=Causal(), rows=2
    ),
    "bert": Workload(model=_bert(bert.Shape(2, 64, 2, vocab=300), context=32), objective=Masked(), rows=2),
    "t5": Workload(model=_t5(t5.Shape(2, 64, 96, 2, 32), vocab=384, context=32), objective=Denoise(), rows=2),
    "transformer": Workload(
        model=_transformer(transformer.Shape(2, 64, 2, 0.1), vocab=600),
        objective=Seq2Seq(align=8),
        tokens=256,
        pack=128,
        vocab=600,
    ),
}


def run_context(workload: Workload, recipe: Recipe, scratch: Path, *, data: str = "", batches: int = 64) -> RunContext:
    """The context of a run of the workload: random ids, or the pairs in `data`; `scratch` is a folder for shards."""
    return _pairs(workload, recipe, scratch, data) if workload.tokens else _random(recipe, batches)


def _random(recipe: Recipe, batches: int) -> RunContext:
    """Rows of random ids: nothing to learn, but speed does not depend on that."""
    model = recipe.model
    tokenizer = Bytes().build([]).extended(recipe.objective.specials)
    task = _over(recipe.objective.bind(tokenizer, model), model.vocab)
    size = batches * recipe.batch.rows * task.length + 1
    ids = np.random.default_rng(0).integers(0, model.vocab, size).astype(np.uint16)
    stream = Stream(ids=ids, starts=np.zeros(1, np.int64), text_bytes=len(ids))
    nothing = Stream(ids=ids[:0], starts=np.zeros(0, np.int64), text_bytes=0)
    shards = Shards(train=stream, valid=nothing, manifest={})
    return RunContext(folder=FOLDER, recipe=recipe, tokenizer=tokenizer, shards=shards, task=task)


def _over(task: Task, vocab: int) -> Task:
    """The task for ids that the tokenizer does not have: an objective that hides tokens asks which are special."""
    if not isinstance(task, MaskedTask):
        return task
    plain = np.zeros(vocab, np.bool_)
    own = task.vocabulary
    wide = replace(own, is_special=plain, starts_word=plain, ends_word=plain, random_ids=np.arange(vocab))
    return replace(task, vocabulary=wide)


def _pairs(workload: Workload, recipe: Recipe, scratch: Path, data: str) -> RunContext:
    """Real sentences: their lengths are what padding and packing are about."""
    with as_file(files("trivium") / "assets" / "tatoeba-train.tsv.gz") as asset:
        named = replace(
            recipe,
            data=_data(data or str(asset), workload.pack),
            tokenizer=Bpe(size=workload.vocab - len(recipe.objective.specials)),
            model=replace(recipe.model, vocab=0),
        )
        context = create_run(named, scratch, say=lambda text: None, tick=lambda what, done, whole: None)
    return replace(context, folder=FOLDER)


def _data(named: str, pack: int) -> DataConfig:
    """One file with tabs, or two separated by a comma."""
    source, _, target = named.partition(",")
    if target:
        return DataConfig(source=source, target=target, valid=0.0, pack=pack)
    return DataConfig(pairs=source, valid=0.0, pack=pack)


def pairs_of(examples: Examples) -> Pairs | None:
    """The pairs that rows are made of, packed or not; None where they are no pairs."""
    return examples.pairs if isinstance(examples, PackedPairs) else examples if isinstance(examples, Pairs) else None


def row(context: RunContext) -> Row:
    """The tokens of a row; of pairs, which have many lengths, those of the mean one."""
    task, examples = context.task, context.train
    if (pairs := pairs_of(examples)) is not None:
        source, target = (round(float(side)) for side in pairs.sizes.mean(axis=0))
        return Row(source, target, target)
    if isinstance(task, DenoiseTask):
        return Row(task.room.inputs, task.room.targets, task.room.targets)
    batch = task.inputs(examples.take(np.zeros(1, np.int64)), np.random.default_rng(0))
    looked = int((batch.targets["labels"] != IGNORED).sum())
    return Row(0, batch.inputs["tokens"].shape[1], looked)
