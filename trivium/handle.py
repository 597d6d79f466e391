"""The object `m`: a model with its tokenizer, ready for use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import torch.nn.functional as F
from torch import Tensor

from trivium.checkpoints import bundle
from trivium.checkpoints.model_files import require_place
from trivium.errors import RequestError, shown, with_file_errors
from trivium.evaluation.likelihood import Score, score_text
from trivium.files import as_path
from trivium.generation import chat as conversation
from trivium.generation import embed as vectors
from trivium.generation.beam import Beam
from trivium.generation.checks import items_of, require_whole, text_of, texts_of
from trivium.generation.classify import Text, Verdict, classify, pairs_of
from trivium.generation.embed import Neighbour, Pooling, neighbours
from trivium.generation.fill import Filling, fill
from trivium.generation.sampling import Sampling
from trivium.generation.scorer import Scorer
from trivium.generation.states import Ids, logits_of
from trivium.generation.text import Completion, complete, stream_text
from trivium.generation.translation import Hypothesis, search_texts
from trivium.interop.foreign import Say
from trivium.interop.gguf_write import export_gguf
from trivium.interop.hf import export_folder
from trivium.interop.onnx import export_onnx
from trivium.models.config import ModelConfig
from trivium.models.transformer import Transformer, weights
from trivium.text.chat import Message, Role
from trivium.text.missing import MissingTokenizer
from trivium.text.tokenizer import Tokenizer

Many = list[str] | tuple[str, ...]  # not any sequence: a string is one too


class Generating(TypedDict, total=False):
    """How a text is generated, beside the number of samples."""

    tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str]
    logprobs: int
    slide: bool
    speculate: Model | Literal["lookup"] | None


class Translating(TypedDict, total=False):
    """How a text is translated, beside the number of hypotheses."""

    beams: int
    alpha: float
    coverage: float
    tokens: int
    language: str
    ensemble: Sequence[Model]
    rows: int
    tick: Callable[[int, int], None]
    each: Callable[[list[Hypothesis]], None] | None


class Model:
    """A model with its tokenizer, ready for use."""

    def __init__(self, module: Transformer, tokenizer: Tokenizer, notes: Mapping[str, Any]) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.notes = notes

    def __repr__(self) -> str:
        config, origin = self.config, self.notes.get("run") or self.notes.get("architecture") or ""
        parts = [
            str(origin)[:40],
            config.family,
            f"{config.parameters():,} parameters",
            f"context {config.context:,}",
            repr(self.tokenizer),
            str(self.module.device),
        ]
        return f"<Model {', '.join(part for part in parts if part)}>"

    @property
    def config(self) -> ModelConfig:
        return self.module.config

    @property
    def _ends(self) -> frozenset[int]:
        """The ids that end a text beside the tokenizer's END, as a published model's settings say."""
        return frozenset(self.notes.get("ids", {}).get("eos", []))

    def logits(
        self, ids: Ids, target: Ids | None = None, *, segments: Ids | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """The scores [B, T, V] that follow each of the ids [B, T], or stand there (encoder); one row needs no batch.

        An encoder-decoder takes a source and a target as it is fed to the decoder, already shifted. `padding` is True
        at the real ones of `ids`.
        """
        return logits_of(self.module, ids, target, segments=segments, padding=padding)

    @overload
    def generate(self, prompt: str, *, n: Literal[1] = 1, **how: Unpack[Generating]) -> Completion: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: str, *, n: int, **how: Unpack[Generating]) -> list[Completion]: ...
    @overload
    def generate(self, prompt: Many, *, n: Literal[1] = 1, **how: Unpack[Generating]) -> list[Completion]: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: Many, *, n: int, **how: Unpack[Generating]) -> list[list[Completion]]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        tokens: int = 100,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        n: int = 1,
        stop: str | Sequence[str] = (),
        logprobs: int = 0,
        slide: bool = False,
        speculate: Model | Literal["lookup"] | None = None,
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """The continuation of a prompt: a string that also has `.ids`, `.reason` and `.logprobs`.

        An encoder-decoder reads the prompt as its source and writes from it. With n > 1 a list of n; for a list of
        prompts a list with one entry per prompt. Temperature 0 is greedy. `speculate` guesses several tokens at once,
        by earlier places of the text ("lookup") or by a smaller model of the same tokenizer: greedy texts stay the
        same, drawn ones keep their distribution.
        """
        sampling = _sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        prompts = texts_of("prompt", prompt)
        found = complete(
            self.module,
            self.tokenizer,
            prompts,
            tokens=tokens,
            sampling=sampling,
            seed=seed,
            n=n,
            stop=_strings(stop),
            stop_ids=self._ends,
            logprobs=logprobs,
            slide=slide,
            speculate=speculate.module if isinstance(speculate, Model) else speculate,
        )
        if isinstance(prompt, str):
            return found[0] if n > 1 else found[0][0]
        return found if n > 1 else [samples[0] for samples in found]

    def stream(
        self,
        prompt: str,
        *,
        tokens: int = 100,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        slide: bool = False,
    ) -> Generator[str, None, Completion]:
        """The same continuation piece by piece, never half a character."""
        return stream_text(
            self.module,
            self.tokenizer,
            text_of("prompt", prompt),
            tokens=tokens,
            sampling=_sampling(temperature, top_k, top_p, min_p, repetition_penalty),
            seed=seed,
            stop=_strings(stop),
            stop_ids=self._ends,
            slide=slide,
        )

    def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        *,
        tokens: int = 512,
        temperature: float = 0.7,
        top_k: int = 0,
        top_p: float = 0.9,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
    ) -> Generator[str, None, Completion]:
        """The answer to a conversation, piece by piece: `[{"role": "user", "content": "..."}]`, or one question.

        It is written as the template that came with the model says; special spellings in a message stay text.
        """
        given = [Message("user", messages)] if isinstance(messages, str) else _messages(messages)
        return conversation.answer(
            self.module,
            self.tokenizer,
            conversation.chat_of(self.tokenizer, self.notes),
            given,
            ends=self._ends,
            tokens=tokens,
            sampling=_sampling(temperature, top_k, top_p, min_p, repetition_penalty),
            seed=seed,
        )

    @overload
    def translate(self, texts: str, *, n: Literal[1] = 1, **how: Unpack[Translating]) -> Hypothesis: ...  # type: ignore[overload-overlap]
    @overload
    def translate(self, texts: str, *, n: int, **how: Unpack[Translating]) -> list[Hypothesis]: ...
    @overload
    def translate(self, texts: Many, *, n: Literal[1] = 1, **how: Unpack[Translating]) -> list[Hypothesis]: ...  # type: ignore[overload-overlap]
    @overload
    def translate(self, texts: Many, *, n: int, **how: Unpack[Translating]) -> list[list[Hypothesis]]: ...

    def translate(
        self,
        texts: str | Sequence[str],
        *,
        beams: int = 4,
        alpha: float = 0.6,
        coverage: float = 0.0,
        n: int = 1,
        tokens: int = 0,
        language: str = "",
        ensemble: Sequence[Model] = (),
        rows: int = 0,
        tick: Callable[[int, int], None] = lambda done, of: None,
        each: Callable[[list[Hypothesis]], None] | None = None,
    ) -> Hypothesis | list[Hypothesis] | list[list[Hypothesis]]:
        """The best translation of each text by beam search: a string with `.score`, `.logprob`, `.ids` and `.reason`.

        With n > 1 a list of the n best; one text gives one answer, a list a list. `ensemble` names other models of the
        same tokenizer that vote with this one. At most `tokens` tokens, 0 means 50 more than the source. `language` is
        the code of the target for a model that was trained on several, as "fra" for Marian's >>fra<<. `each` is called
        with the n best of every text, in order and before the last one is done.
        """
        if self.config.family != "encoder-decoder":
            raise RequestError(f"a model of the {self.config.family} family cannot translate; load an encoder-decoder")
        for other in ensemble:
            if other.tokenizer.digest != self.tokenizer.digest:
                raise RequestError("models with different tokenizers cannot vote together; train them with one")
        scorer = Scorer(self.module, *(other.module for other in ensemble))
        beam = Beam(beams=beams, alpha=alpha, coverage=coverage, n=n)
        given = texts_of("texts", texts)
        found = search_texts(
            scorer,
            self.tokenizer,
            given,
            beam=beam,
            tokens=tokens,
            language=language,
            stop_ids=self._ends,
            rows=rows,
            tick=tick,
            each=each,
        )
        if isinstance(texts, str):
            return found[0] if n > 1 else found[0][0]
        return found if n > 1 else [best[0] for best in found]

    def search(
        self, prompt: str, *, tokens: int = 100, beams: int = 4, alpha: float = 0.6, n: int = 1
    ) -> list[Hypothesis]:
        """The n best continuations of a prompt by beam search; of an encoder-decoder, what it writes from a source."""
        beam = Beam(beams=beams, alpha=alpha, n=n)
        given = [text_of("prompt", prompt)]
        return search_texts(self.module, self.tokenizer, given, beam=beam, tokens=tokens, stop_ids=self._ends)[0]

    @overload
    def fill(self, text: str, *, top: int = 5) -> list[Filling] | list[list[Filling]]: ...
    @overload
    def fill(self, text: Many, *, top: int = 5) -> list[list[Filling] | list[list[Filling]]]: ...

    def fill(
        self, text: str | Sequence[str], *, top: int = 5
    ) -> list[Filling] | list[list[Filling]] | list[list[Filling] | list[list[Filling]]]:
        """The likeliest pieces behind each [MASK], best first: strings with `.probability` and `.id`.

        A text with one mask gives a list, one with several a list for each, filled independently while the others stay
        masked; a list of texts gives a list. If the tokenizer has [CLS] and [SEP] the text is framed by them, as in
        training; spelled out in the text they are text.
        """
        found = fill(self.module, self.tokenizer, texts_of("text", text), top=top)
        each = [masks if len(masks) > 1 else masks[0] for masks in found]
        return each[0] if isinstance(text, str) else each

    @property
    def labels(self) -> list[str]:
        """The names of the classes that `classify` tells apart, as the model's own files have them."""
        return [str(label) for label in self.notes.get("labels", [])]

    @overload
    def classify(self, texts: Text) -> Verdict: ...
    @overload
    def classify(self, texts: list[Text] | list[str] | list[tuple[str, str]]) -> list[Verdict]: ...

    def classify(self, texts: Text | Sequence[Text]) -> Verdict | list[Verdict]:
        """The class of a text, or of each of several: a string that also has `.probabilities`.

        A pair of texts, as in (premise, hypothesis), is a tuple of two.
        """
        given = pairs_of(texts)
        found = classify(self.module, self.tokenizer, given, self.labels)
        return found[0] if isinstance(texts, str | tuple) else found

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Pooling | Literal["auto"] = "auto",
        normalise: bool | Literal["auto"] = "auto",
        tick: Callable[[int, int], None] = lambda done, of: None,
    ) -> Tensor:
        """A vector per text, [N, D] ([D] for one text): the mean of its last states, or with "cls" that of [CLS].

        Left at "auto" both are what a published sentence encoder says of itself, else the mean as it is. An encoder's
        text is framed as for `fill`; an encoder-decoder gives the states of its encoder.
        """
        given = texts_of("texts", texts)
        if not isinstance(pooling, str):
            raise RequestError(f"pooling: {shown(pooling)} is neither mean nor cls")
        if not isinstance(normalise, bool) and not (isinstance(normalise, str) and normalise == "auto"):
            raise RequestError(f"normalise: {shown(normalise)} is neither true nor false (nor auto)")
        told = self.notes.get("sentences", {})
        how = told.get("pooling", "mean") if pooling == "auto" else pooling
        found = vectors.embed(self.module, self.tokenizer, given, pooling=how, tick=tick)
        scaled = told.get("normalize", False) if normalise == "auto" else normalise
        found = F.normalize(found, dim=-1) if scaled else found
        return found[0] if isinstance(texts, str) else found

    def embed_word(self, text: str, word: str, *, occurrence: int = 0) -> Tensor:
        """The vector [D] of a word where it stands in a text: "bank" by a river is not "bank" with money."""
        given = (text_of("text", text), text_of("word", word))
        return vectors.embed_word(self.module, self.tokenizer, *given, occurrence=occurrence)

    def neighbours(self, text: str, *, among: Sequence[str] = (), top: int = 10) -> list[Neighbour]:
        """What lies nearest by cosine, best first: strings with `.similarity` and `.number`.

        With `among`, these texts by their `embed`; without, the tokenizer's pieces by the embeddings in front of the
        first layer, in which a word is the same wherever it stands.
        """
        require_whole("top", top, 1, None, "ask for at least one neighbour")
        text, others = text_of("text", text), texts_of("among", among)
        if others:
            both = self.embed([text, *others])
            return neighbours(both[:1], both[1:], others, top=top)[0]
        names, candidates = vectors.static_words(self.module, self.tokenizer)
        own = vectors.static_word(self.module, self.tokenizer, text)
        found = neighbours(own[None], candidates, names, top=len(names))[0]
        return [piece for piece in found if piece.strip() != text.strip()][:top]

    def score(self, text: str, *, stride: int = 0) -> Score:
        """How probable the text is: `.nll`, `.perplexity`, `.bits_per_byte`, every token scored once."""
        return score_text(self.module, self.tokenizer, text_of("text", text), stride=stride)

    @with_file_errors
    def save(self, folder: str | Path) -> Path:
        """Write `model.safetensors`, `model.json` and `tokenizer.json`; `tv.load` opens the folder again."""
        path = as_path(folder)
        require_place(path)
        bundle.save(path, self.config, weights(self.module), self.tokenizer, self.notes)
        return path

    @with_file_errors
    def export(
        self, kind: Literal["hf", "gguf", "onnx"], path: str | Path, *, bits: int = 32, say: Say | None = None
    ) -> Path:
        """Write the model for other programs and read it back; it appears only if that is the same model.

        The logits are compared, and of a GGUF with fewer bits every weight, within its rounding; the largest difference
        is told through `say`, which prints it if it is not given. hf is a folder for `transformers`, gguf a file
        (`bits` 32, 16 or 8; in a folder it is model.gguf), onnx a folder for ONNX Runtime. Gives where it is.
        """
        if not isinstance(kind, str) or kind not in ("hf", "gguf", "onnx"):
            raise RequestError(f"export: {shown(kind)} is none of hf, gguf and onnx")
        if type(bits) is not int:
            raise RequestError(f"bits: {shown(bits)} is not a whole number; gguf can have 32, 16 or 8")
        told, where = say or printed, as_path(path)
        tokenizer = None if isinstance(self.tokenizer, MissingTokenizer) else self.tokenizer
        template = self.notes.get("chat_template", "")
        if bits != 32 and kind != "gguf":
            raise RequestError(f"bits: an export to {kind} has 32; gguf can have 16 or 8")
        if kind == "hf":
            ids = self.notes.get("ids")
            export_folder(self.module, tokenizer, where, say=told, chat=template, ids=ids, labels=self.labels)
        elif kind == "gguf":
            where = where if where.suffix == ".gguf" else where / "model.gguf"
            export_gguf(self.module, tokenizer, where, say=told, bits=_gguf_bits(bits), template=template)
        else:
            export_onnx(self.module, tokenizer, where, say=told)
        return where


def printed(text: str) -> None:
    """Tell it on standard error: what `say` means where it is not given."""
    print(text, file=sys.stderr)


def _gguf_bits(bits: int) -> Literal[32, 16, 8]:
    for known in (32, 16, 8):
        if bits == known:
            return known
    raise RequestError(f"bits: a GGUF file can have 32, 16 or 8, not {shown(bits)}")


def _messages(given: object) -> list[Message]:
    return [_message(each) for each in items_of("messages", given, "a string or a list of messages")]


def _message(given: object) -> Message:
    if not isinstance(given, Mapping) or not {"role", "content"} <= given.keys():
        raise RequestError('a message is {"role": "user", "content": "..."}; give both')
    role, text = given["role"], given["content"]
    if role not in ("system", "user", "assistant"):
        raise RequestError(f"role: {shown(role)} is none of system, user and assistant")
    return Message(cast(Role, role), text_of("content", text))


def _sampling(temperature: float, top_k: int, top_p: float, min_p: float, penalty: float) -> Sampling:
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)


def _strings(stop: Sequence[str] | str) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop
