"""Models from and to other programs, from the command line and by `tv`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Call, refused
from tests.generation import tiny
from trivium import api
from trivium.errors import CheckpointError, RequestError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = tiny.BYTES.extended(["<|im_start|>", "<|im_end|>"])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small LLaMA, saved here and as others would have it, and one that talks."""
    module = tiny.model("llama-mini", tiny.BYTES, spread=0.5)
    api.Model(module, tiny.BYTES, {}).save(tmp_path / "own")
    api.Model(module, tiny.BYTES, {}).export("hf", tmp_path / "hf", say=lambda text: None)
    api.Model(tiny.model("llama-mini", MARKS, spread=0.5), MARKS, {"chat_template": CHATML}).save(tmp_path / "talks")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_export_opens_in_transformers_and_writes_the_same_text(home: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(home / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "hf")
    ours = api.load(home / "own", device="cpu").generate("the cat", tokens=12, temperature=0.0)
    ids = tokenizer("the cat", return_tensors="pt", add_special_tokens=False)
    written = theirs.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert len(ours.ids) == 12  # it ends nowhere before
    assert written.tolist() == ours.ids


def test_an_import_is_the_same_model(invoke: Call, home: Path) -> None:
    outcome = invoke("import", "hf", "brought")
    assert outcome.code == 0, outcome.err
    assert "decoder" in outcome.out
    ids = [[1, 2, 3, 4]]
    own, brought = (api.load(home / name, device="cpu").logits(ids) for name in ("own", "brought"))
    assert torch.equal(own, brought)


def test_names_left_out_have_places_of_their_own(invoke: Call, home: Path) -> None:
    outcome = invoke("import", "hf")
    assert outcome.code == 0, outcome.err
    assert (home / "models" / "hf" / "model.json").is_file()
    outcome = invoke("export", "own", "gguf", "out")
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip() == "out/model.gguf"
    assert (home / "out" / "model.gguf").is_file()


def test_an_export_says_how_near_it_came_and_where_it_is(invoke: Call, home: Path) -> None:
    outcome = invoke("export", "own", "gguf", "model.gguf", "--bits", 16)
    assert outcome.code == 0, outcome.err
    assert "logits differ by at most" in outcome.err
    assert outcome.out.strip() == "model.gguf"
    again = invoke("generate", "model.gguf", "the cat", "--tokens", 3, "--device", "cpu")
    assert again.code == 0, again.err


def test_fewer_bits_print_the_size_and_the_change_in_bits_per_byte(invoke: Call, home: Path) -> None:
    (home / "text.txt").write_text("the cat sat on the mat. " * 20)
    outcome = invoke("export", "own", "trivium", "small", "--bits", 8, "--text", "text.txt")
    assert outcome.code == 0, outcome.err
    assert "MB before" in outcome.out
    assert "bits per byte on text.txt" in outcome.out
    before, after = (
        api.load(home / name, device="cpu").score((home / "text.txt").read_text()).bits_per_byte
        for name in ("own", "small")
    )
    assert f"{before:.4f} before, {after:.4f} after" in outcome.out
    assert (home / "small" / "model.safetensors").stat().st_size < (home / "own" / "model.safetensors").stat().st_size


def test_a_folder_without_tokenizer_files_gives_logits_and_says_what_is_missing(invoke: Call, home: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (home / "hf" / name).unlink()
    m = api.load(home / "hf", device="cpu")
    assert m.logits([[1, 2]]).shape == (1, 2, m.config.vocab)
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        m.generate("a")
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        m.save(home / "saved")
    assert not (home / "saved").exists()
    refused(invoke("generate", "hf", "a"), "tokenizer.json")


def test_an_import_that_was_killed_can_be_repeated(invoke: Call, home: Path) -> None:
    left = home / "brought" / ".tmp-.new-model-4711"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    (home / "brought" / ".model-lock").touch()
    assert invoke("import", "hf", "brought").code == 0
    names = sorted(path.name for path in (home / "brought").iterdir())
    assert names == ["model.json", "model.safetensors", "tokenizer.json"]
    refused(invoke("import", "hf", "brought"), "already exists")


def test_an_import_without_a_tokenizer_writes_nothing(invoke: Call, home: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (home / "hf" / name).unlink()
    refused(invoke("import", "hf", "brought"), "hf has no tokenizer", "tokenizer.json")
    assert not (home / "brought").exists()


def test_a_conversation_is_answered_and_remembered(invoke: Call, home: Path) -> None:
    outcome = invoke("chat", "talks", "--tokens", 5, "--device", "cpu", piped="hello\nand again\n")
    assert outcome.code == 0, outcome.err
    m = api.load(home / "talks", device="cpu")
    first = "".join(m.chat("hello", tokens=5, seed=1))
    assert outcome.out.startswith(first + "\n")
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": first}]
    second = "".join(m.chat([*said, {"role": "user", "content": "and again"}], tokens=5, seed=3))
    assert outcome.out == f"{first}\n{second}\n"


def test_what_a_user_types_never_becomes_a_mark_of_the_template(home: Path) -> None:
    from trivium.generation.chat import chat_of
    from trivium.text.chat import Message

    m = api.load(home / "talks", device="cpu")
    ids = chat_of(m.tokenizer, m.notes).ids(m.tokenizer, [Message("user", "<|im_end|>")])
    assert ids.count(m.tokenizer.specials["<|im_end|>"]) == 1  # the template's own


def test_bad_requests_are_one_sentence(invoke: Call, home: Path) -> None:
    refused(invoke("chat", "own"), "no chat template")
    refused(invoke("export", "own", "pytorch", "x"), "hf, gguf, onnx")
    refused(invoke("export", "own", "trivium", "x"), "--bits")
    refused(invoke("export", "own", "gguf", "x.gguf", "--bits", 3), "32, 16 or 8")
    refused(invoke("import", "hf", "own"), "already exists")
    refused(invoke("import", "nowhere", "x"), "does not exist")
    with pytest.raises(RequestError, match="32"):
        api.load(home / "own", device="cpu").export("hf", home / "x", bits=8)
    with pytest.raises(RequestError, match="role"):
        api.load(home / "talks", device="cpu").chat([{"role": "nobody", "content": "?"}])
    table = json.loads((home / "hf" / "config.json").read_text())
    (home / "hf" / "config.json").write_text(json.dumps({**table, "model_type": "unheard-of"}))
    with pytest.raises(CheckpointError, match="unheard-of"):
        api.load(home / "hf", device="cpu")
