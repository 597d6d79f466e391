"""Presets against the published parameter counts, to the unit, whole and by place (spec: models)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from trivium.config import dump, flat, load
from trivium.models.config import ModelConfig, Stack
from trivium.models.presets import PRESETS, bart, bert, gpt, llama, t5, transformer
from trivium.models.transformer import build, with_vocab

ROOT = Path(__file__).resolve().parents[2]

COUNTS = {
    "transformer-base": 63_045_632,
    "transformer-big": 214_171_648,
    "gpt": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-small": 125_226_240,
    "gpt3-medium": 355_871_744,
    "gpt3-large": 760_300_032,
    "gpt3-xl": 1_315_723_264,
    "gpt3-2.7b": 2_651_553_280,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328,
    "opt-125m": 125_239_296,
    "opt-760m": 760_326_144,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
    "bert-base-uncased": 110_106_428,
    "bert-base-cased": 108_932_934,
    "bert-large-uncased": 336_226_108,
    "bert-large-cased": 334_661_958,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "spanbert-large-cased": 333_610_308,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5v1.1-small": 76_961_152,
    "t5v1.1-base": 247_577_856,
    "t5v1.1-large": 783_150_080,
    "t5v1.1-xl": 2_849_757_184,
    "t5v1.1-xxl": 11_135_332_352,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "marian": 73_886_208,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
OPEN = {"gpt-mini", "bert-mini", "t5-mini", "llama-mini", "transformer", "transformer-pp"}  # the tokenizer decides


def split(name: str) -> dict[str, int]:
    """The parameters of each place that has any."""
    return {place: cost.parameters for place, cost in PRESETS[name]().costs().items() if cost.parameters}


def test_every_preset_is_counted_or_leaves_its_vocabulary_open() -> None:
    assert set(COUNTS) | OPEN == set(PRESETS)
    assert {name for name in PRESETS if PRESETS[name]().vocab == 0} == OPEN


PLACES = {  # the first that fits
    r"^(source_)?embedding\.": "embedding",
    r"^output\.": "output",
    r"^sentence\.": "sentence",
    r"\.positions\.": "position",
    r"\.around_|\.final\.": "norm",
    r"\.attention\.": "attention",
    r"\.cross\.": "cross",
    r"\.feedforward\.": "feedforward",
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    config = PRESETS[name]()
    assert config.parameters() == COUNTS[name]
    found: dict[str, int] = {}
    for path, parameter in build(config, device="meta").named_parameters():
        assert parameter.is_meta
        place = next(place for pattern, place in PLACES.items() if re.search(pattern, path))
        found[place] = found.get(place, 0) + parameter.numel()
    assert found == split(name)
    assert sum(found.values()) == COUNTS[name]


@pytest.mark.parametrize("name", [*gpt.GPT, *gpt.GPT2, *gpt.GPT3, *gpt.OPT])
def test_the_count_of_a_gpt_splits_as_its_formula(name: str) -> None:
    layers, width, _ = {**gpt.GPT, **gpt.GPT2, **gpt.GPT3, **gpt.OPT}[name]
    family = name.split("-")[0]
    positions, vocab = {"gpt": (512, 40_478), "gpt2": (1024, 50_257), "gpt3": (2048, 50_257), "opt": (2050, 50_272)}[
        family
    ]
    assert split(name) == {
        "embedding": vocab * width,
        "position": positions * width,
        "attention": layers * (4 * width**2 + 4 * width),
        "feedforward": layers * (8 * width**2 + 5 * width),
        "norm": layers * 4 * width + (0 if name == "gpt" else 2 * width),
    }


@pytest.mark.parametrize("name", llama.PUBLISHED)
def test_the_count_of_a_llama_splits_as_its_formula(name: str) -> None:
    tables = (llama.LLAMA, llama.SCALED, llama.MISTRAL, llama.SMOLLM2, llama.TINYLLAMA, llama.QWEN3)
    shape = next(table[name] for table in tables if name in table)
    layers, width, hidden, heads, groups, head, vocab = shape[:7]
    normed = 2 * head if name.startswith("qwen3") else 0
    expected = {
        "embedding": vocab * width,
        "attention": layers * (width * head * (2 * heads + 2 * groups) + normed),
        "feedforward": layers * 3 * width * hidden,
        "norm": layers * 2 * width + width,
        "output": 0 if shape.tie == "all" else vocab * width,
    }
    assert split(name) == {place: number for place, number in expected.items() if number}


@pytest.mark.parametrize("name", [*bert.BERT, *bert.ROBERTA, *bert.SPANBERT])
def test_the_count_of_a_bert_splits_as_its_formula(name: str) -> None:
    layers, width, _, vocab = {**bert.BERT, **bert.ROBERTA, **bert.SPANBERT}[name]
    segments, positions = (1, 514) if name.startswith("roberta") else (2, 512)
    expected = {
        "embedding": (vocab + segments) * width + 2 * width,
        "position": positions * width,
        "attention": layers * (4 * width**2 + 4 * width),
        "feedforward": layers * (8 * width**2 + 5 * width),
        "norm": layers * 4 * width,
        "output": width**2 + width + 2 * width + vocab,
    }
    if name.startswith("bert"):
        expected["sentence"] = width**2 + width + 2 * width + 2
    assert split(name) == expected


@pytest.mark.parametrize("name", [*t5.V1_0, *t5.V1_1])
def test_the_count_of_a_t5_splits_as_its_formula(name: str) -> None:
    layers, width, hidden, heads, head = {**t5.V1_0, **t5.V1_1}[name]
    gated = name in t5.V1_1
    expected = {
        "embedding": 32_128 * width,
        "position": 2 * 32 * heads,  # one table on each side
        "attention": 2 * layers * 4 * width * heads * head,
        "cross": layers * 4 * width * heads * head,
        "feedforward": 2 * layers * (3 if gated else 2) * width * hidden,
        "norm": 5 * layers * width + 2 * width,
        "output": 32_128 * width if gated else 0,
    }
    assert split(name) == {place: number for place, number in expected.items() if number}


@pytest.mark.parametrize("name", [*transformer.VASWANI, *bart.BART, "marian"])
def test_the_count_of_a_post_norm_encoder_decoder_splits_as_its_formula(name: str) -> None:
    config = PRESETS[name]()
    shape = transformer.VASWANI.get(name) or bart.BART.get(name) or bart.Shape(6, 512, 8)
    layers, width, vocab = shape.layers, shape.width, config.vocab
    attention = 4 * width**2 + (0 if name in transformer.VASWANI else 4 * width)
    learned = name in bart.BART
    expected = {
        "embedding": vocab * width + (2 * 2 * width if learned else 0),
        "position": 2 * 1026 * width if learned else 0,
        "attention": 2 * layers * attention,
        "cross": layers * attention,
        "feedforward": 2 * layers * (8 * width**2 + 5 * width),
        "norm": 5 * layers * 2 * width,  # and none after the stacks
    }
    assert split(name) == {place: number for place, number in expected.items() if number}


@pytest.mark.parametrize("name", sorted(OPEN))
def test_an_open_preset_can_be_built_once_its_vocabulary_is_known(name: str) -> None:
    config = with_vocab(PRESETS[name](), 257)
    assert sum(p.numel() for p in build(config, device="meta").parameters()) == config.parameters()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_written_to_a_file_reads_back_as_itself(name: str) -> None:
    config = PRESETS[name]()
    assert load(ModelConfig, dump(config)) == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_in_a_sentence_what_it_is(name: str) -> None:
    about = PRESETS[name].about
    assert about.endswith(".")
    assert len(about) < 90
    assert re.fullmatch(r"[a-z0-9.-]+", name)


# The sentences of the specification, each with the presets it speaks of.
FACTS: list[tuple[str, dict[str, object]]] = [
    ("llama-(7|13|33)b|qwen3", {"norm.eps": 1e-6}),
    ("llama-65b|llama2|llama3|mistral|smollm2|tinyllama", {"norm.eps": 1e-5}),
    ("llama-|llama2|tinyllama|mistral-7b$", {"position.theta": 1e4, "position.scaling.kind": "none"}),
    ("llama3", {"position.theta": 5e5}),
    ("llama3-", {"position.scaling.kind": "none", "context": 8192}),
    ("llama3.1", {"position.scaling.kind": "llama3", "position.scaling.factor": 8.0}),
    ("llama3.2", {"position.scaling.kind": "llama3", "position.scaling.factor": 32.0}),
    (
        r"llama3\.",
        {
            "position.scaling.low": 1.0,
            "position.scaling.high": 4.0,
            "position.scaling.original": 8192,
            "context": 131_072,
        },
    ),
    ("mistral-7b-v0.3|qwen3", {"position.theta": 1e6}),
    ("smollm2-(135|360)m", {"position.theta": 1e5}),
    ("smollm2-1.7b", {"position.theta": 1.3e5}),
    ("llama-", {"context": 2048}),
    ("llama2", {"context": 4096}),
    ("smollm2", {"context": 8192}),
    ("qwen3", {"context": 40_960, "attention.norm": "rms"}),
    ("(llama|mistral|smollm2|tinyllama)", {"attention.norm": "none"}),
    ("mistral-7b$", {"attention.window": 4096}),
    ("mistral-7b-v0.3|llama|qwen3|smollm2", {"attention.window": 0}),
    (
        "llama|mistral|smollm2|tinyllama|qwen3",
        {"position.layout": "halves", "feedforward.activation": "silu", "residual.kind": "pre", "norm.kind": "rms"},
    ),
    ("gpt$|gpt2|gpt3", {"feedforward.activation": "gelu-tanh", "norm.eps": 1e-5, "attention.dropout": 0.1}),
    ("gpt$|bert|roberta|spanbert|bart|marian|transformer-(base|big)", {"residual.kind": "post"}),
    ("gpt2|gpt3|opt|t5-", {"residual.kind": "pre"}),
    ("gpt$|bert|roberta", {"init.kind": "gpt", "init.std": 0.02, "dropout": 0.1}),
    ("gpt2|gpt3", {"init.kind": "gpt2", "init.std": 0.02}),
    ("opt", {"feedforward.activation": "relu", "position.offset": 2, "context": 2048}),
    ("opt", {"init.kind": "gpt2", "init.std": 0.006, "dropout": 0.1, "attention.dropout": 0.0}),
    ("bert|spanbert", {"norm.eps": 1e-12, "feedforward.activation": "gelu", "embedding.norm.kind": "layer"}),
    ("roberta", {"norm.eps": 1e-5, "position.offset": 2, "context": 512, "embedding.segments": 1}),
    ("t5-|t5v1.1", {"norm.kind": "rms", "norm.eps": 1e-6, "attention.scale": "none", "init.kind": "t5"}),
    ("t5-(small|base|large|3b|11b)", {"output.scale": "root", "dropout": 0.1, "feedforward.activation": "relu"}),
    ("t5-(small|base|large|3b|11b)", {"attention.dropout": 0.1, "feedforward.dropout": 0.1, "embedding.dropout": 0.1}),
    ("t5v1.1", {"output.scale": "none", "dropout": 0.0, "feedforward.activation": "gelu-tanh"}),
    ("bart", {"feedforward.activation": "gelu", "position.offset": 2, "embedding.scale": "none"}),
    ("marian", {"feedforward.activation": "silu", "position.layout": "halves", "embedding.scale": "root"}),
    ("transformer-base", {"dropout": 0.1}),
    ("transformer-big", {"dropout": 0.3}),
    (
        "transformer-(base|big)",
        {"embedding.scale": "root", "position.layout": "interleaved", "attention.dropout": 0.0, "init.kind": "xavier"},
    ),
]


@pytest.mark.parametrize(("pattern", "facts"), FACTS, ids=[pattern for pattern, _ in FACTS])
def test_what_a_count_does_not_show_is_as_published(pattern: str, facts: dict[str, object]) -> None:
    named = [name for name in COUNTS if re.match(pattern, name)]
    assert named
    for name in named:
        settings = flat(PRESETS[name]())
        for side in (side for side in ("encoder", "decoder") if isinstance(getattr(PRESETS[name](), side), Stack)):
            inside = {key.removeprefix(f"{side}.block."): value for key, value in settings.items()}
            assert {key: inside[key] for key in facts} == facts, name


def test_both_sides_of_an_encoder_decoder_are_alike_but_for_the_cross_attention() -> None:
    for name in COUNTS:
        settings = flat(PRESETS[name]())
        if PRESETS[name]().family == "encoder-decoder":
            sides = [
                {
                    key.split(".", 1)[1]: value
                    for key, value in settings.items()
                    if key.startswith(f"{side}.") and ".cross" not in key
                }
                for side in ("encoder", "decoder")
            ]
            assert sides[0] == sides[1], name


def test_transformer_and_transformer_pp_differ_in_exactly_the_four_places() -> None:
    old, new = (flat(PRESETS[name]()) for name in ("transformer", "transformer-pp"))
    differing = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    block = "decoder.block."
    assert {key.removeprefix(block).split(".")[0] for key in differing} == {
        "residual",
        "norm",
        "feedforward",
        "position",
    }
    assert (old[f"{block}residual.kind"], new[f"{block}residual.kind"]) == ("post", "pre")
    assert (old[f"{block}norm.kind"], new[f"{block}norm.kind"]) == ("layer", "rms")
    assert (old[f"{block}position.kind"], new[f"{block}position.kind"]) == ("sinusoidal", "rotary")
    gates = [(options[f"{block}feedforward.kind"], options[f"{block}feedforward.activation"]) for options in (old, new)]
    assert gates == [("mlp", "relu"), ("glu", "silu")]
    # what the places have in common stays: eps, biases, dropout
    for key in ("norm.eps", "feedforward.bias", "feedforward.dropout"):
        assert old[block + key] == new[block + key]
    sizes = [with_vocab(PRESETS[name](), 8192).parameters() for name in ("transformer", "transformer-pp")]
    assert abs(sizes[0] / sizes[1] - 1) < 1e-3


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the tables under a heading, without their head."""
    section = (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]


def test_the_table_of_results_is_what_the_presets_say() -> None:
    places = ("embedding", "position", "attention", "cross", "feedforward", "norm", "output", "sentence")
    table = {row[0].strip("`"): row[1:] for row in rows("results.md", "Presets")}
    assert list(table) == list(COUNTS)
    for name, (total, *parts, _) in table.items():
        found = split(name)
        assert total == f"{COUNTS[name]:,}"
        assert parts == [f"{found[place]:,}" if place in found else "" for place in places], name


def test_every_check_that_the_results_name_exists() -> None:
    checks = {row[-1] for row in rows("results.md", "Presets")}
    named = {found for cell in checks for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)}
    assert all(re.search(r"`tests/", cell) for cell in checks)
    for path, test in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{test}"


def test_the_page_on_models_names_every_preset() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in PRESETS if f"`{name}`" not in page] == []
