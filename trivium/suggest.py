"""What a misspelt or unknown name was probably meant to be: other spellings, other places, other libraries' words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from trivium.renamed import explain_old_key, new_names

_SHOWN = 5  # suggestions in one sentence
_FEW = 12  # names that are listed when none of them is near


class Unknown(NamedTuple):
    """A key that is no setting: the table that it was looked up in, the name there, and what was typed behind it."""

    table: str  # dotted key of the table; "" is the root
    name: str
    rest: str  # dotted path below the name; "" if the name itself has the value
    siblings: Sequence[str]  # the settings that the table has
    kinds: Mapping[str, Sequence[str]]  # settings of every kind that could fill this place

    @property
    def typed(self) -> str:
        """The whole key."""
        return ".".join(part for part in (self.table, self.name, self.rest) if part)


def nearest(name: str, names: Iterable[object]) -> str:
    """The end of a sentence about a name that is in no table: the nearest ones, or all of them if they are few."""
    known = [str(known) for known in names]
    if close := _close(name, known):
        return _ask(close)
    return f"; it is one of {', '.join(known)}" if 0 < len(known) <= _FEW else ""


def setting(unknown: Unknown, keys: Sequence[str]) -> str:
    """The sentence about a key that is no setting; `keys` are all settings and places of the configuration."""
    if told := explain_old_key(unknown.table, unknown.name, unknown.siblings):
        return told
    said = f"{unknown.typed}: is not a setting"
    if other := _other_side(unknown.typed, keys):
        return f"{said}{_ask([other])}"
    for name in (unknown.name, *new_names(unknown.name)):
        if having := [kind for kind, names in unknown.kinds.items() if name in names]:
            renamed = f" (it is called {name} now)" if name != unknown.name else ""
            first = _either([f"{unknown.table}={kind}" for kind in having])
            return f"{said} of its present kind{renamed}; first set {first}"
    leaf = unknown.typed.rsplit(".", 1)[-1]
    if found := _renamed(unknown, keys):
        return f"{said}{_ask(found)}"
    if found := _longest_tail(unknown.typed, [key for key in keys if _leaf(key) == leaf]):
        return f"{said}{_ask(_inside(unknown.table, found))}"
    if found := _synonyms(leaf, keys):
        return f"{said}{_ask(_inside(unknown.table, found))}"
    if close := _close(unknown.name, unknown.siblings):
        at, *full = [".".join(part for part in (unknown.table, name) if part) for name in (unknown.name, *close)]
        return f"{at}: is not a setting{_ask(full)}"
    if close := _close(leaf, sorted({_leaf(key) for key in keys})):
        return f"{said}{_ask(_inside(unknown.table, [key for key in keys if _leaf(key) in close]))}"
    if 0 < len(unknown.siblings) <= _FEW:
        return f"{said}; {unknown.table or 'it'} has {', '.join(unknown.siblings)}"
    return f"{said}; `trivium config RECIPE` prints all of them"


def _leaf(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _ask(names: Sequence[str]) -> str:
    more = f", … ({len(names) - _SHOWN} more)" if len(names) > _SHOWN else ""
    return f"; did you mean {', '.join(names[:_SHOWN])}{more}?" if more else f"; did you mean {_either(names)}?"


def _either(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _other_side(typed: str, keys: Sequence[str]) -> str:
    """The same setting of the encoder for one of the decoder, and the other way round, if the model has it."""
    swap = {"encoder": "decoder", "decoder": "encoder"}
    other = ".".join(swap.get(part, part) for part in typed.split("."))
    return other if other != typed and other in keys else ""


def _renamed(unknown: Unknown, keys: Sequence[str]) -> list[str]:
    """What was typed with another name for the table that does not exist: evaluate.every for eval.every."""
    tables = [*_close(unknown.name, unknown.siblings), *_synonyms(unknown.name, unknown.siblings)]
    full = [".".join(part for part in (unknown.table, table, unknown.rest) if part) for table in tables]
    return [key for key in dict.fromkeys(full) if unknown.rest and key in keys]


def _longest_tail(typed: str, keys: Sequence[str]) -> list[str]:
    """Of several keys those that share the longest end with what was typed."""
    tails = {key: _common(typed.split(".")[::-1], key.split(".")[::-1]) for key in keys}
    return [key for key in keys if tails[key] == max(tails.values())]


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def _inside(table: str, keys: Sequence[str]) -> list[str]:
    """The keys below a table if there are any, else all of them; short keys first."""
    below = [key for key in keys if table and key.startswith(f"{table}.")]
    return sorted(below or keys, key=lambda key: key.count("."))


def _synonyms(leaf: str, keys: Sequence[str]) -> list[str]:
    """The settings that another library calls by this name."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", leaf).replace("-", "_").lower()
    patterns = _SYNONYMS.get(plain, ())
    # a model configuration alone has the keys of a recipe without their first word
    wanted = [form for pattern in patterns for form in (pattern, pattern.removeprefix("model."))]
    return [key for key in keys if any(fnmatchcase(key, form) for form in wanted)]


def _close(name: str, known: Sequence[str]) -> list[str]:
    """The names that differ from this one by a slip of the finger, else those of which one begins with the other."""
    allowed = 0 if len(name) < 3 else 1 if len(name) < 6 else 2 if len(name) < 10 else 3
    distances = {other: _distance(name.lower(), other.lower()) for other in known}
    best = min(distances.values(), default=allowed + 1)
    if best <= allowed:
        return [other for other in known if distances[other] == best]
    if len(name) < 3:
        return []
    return [other for other in known if other.startswith(name) or (len(other) > 3 and name.startswith(other))]


def _distance(one: str, other: str) -> int:
    """How many letters have to be added, left out, replaced or exchanged with their neighbour (Damerau)."""
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, start=1):
        row = [i]
        for j, wanted in enumerate(other, start=1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


_LAYERS, _HEADS = "model.*coder.layers", "model.*.attention.heads"
# What Hugging Face, nanoGPT, Lightning, fairseq and PyTorch call a setting: the keys (with *) that it has here.
_WORDS: dict[tuple[str, ...], str] = {
    ("optim.rate",): "lr learning_rate max_lr peak_lr base_lr max_learning_rate",
    ("schedule.floor",): "min_lr end_lr final_lr min_learning_rate",
    ("optim.decay",): "weight_decay wd",
    ("optim.beta1", "optim.beta2"): "betas adam_betas",
    ("optim.beta1",): "adam_beta1 beta_1",
    ("optim.beta2",): "adam_beta2 beta_2",
    ("optim.eps",): "epsilon adam_eps adam_epsilon",
    ("optim",): "optimizer optimiser opt",
    ("schedule",): "scheduler lr_scheduler lr_scheduler_type lr_schedule decay_lr",
    ("schedule.warmup",): "warmup_steps warmup_ratio warmup_iters num_warmup_steps lr_warmup warmup_epochs",
    ("clip",): "grad_clip gradient_clip clip_grad clip_norm clip_grad_norm max_grad_norm max_norm gradient_clip_val",
    ("batch.rows",): "batch_size bs train_batch_size per_device_train_batch_size global_batch_size batchsize",
    ("batch.tokens",): "max_tokens tokens_per_batch batch_tokens",
    ("batch.micro",): "micro_batch_size gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps "
    "accumulation_steps accumulate_grad_batches accumulation",
    ("budget.steps",): "max_steps max_iters iters iterations train_steps training_steps num_steps n_steps total_steps "
    "num_train_steps num_iterations max_iterations",
    ("budget.steps", "budget.tokens", "budget.minutes"): "epochs epoch num_epochs n_epochs max_epochs num_train_epochs",
    ("budget.minutes",): "time max_time hours seconds time_limit",
    ("budget.tokens",): "train_tokens total_tokens num_tokens",
    (_LAYERS,): "n_layer n_layers num_layers num_hidden_layers depth layer n_blocks num_blocks",
    ("model.encoder.layers",): "encoder_layers num_encoder_layers",
    ("model.decoder.layers",): "decoder_layers num_decoder_layers",
    (_HEADS,): "n_head n_heads num_heads nhead num_attention_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads nheads",
    ("model.*.attention.groups",): "n_kv_head n_kv_heads num_key_value_heads kv_heads num_kv_heads query_groups",
    ("model.*.attention.head",): "head_dim head_size d_kv d_head d_key d_k",
    ("model.*.attention.window",): "sliding_window attention_window",
    ("model.*.attention.dropout",): "attn_dropout attention_dropout attn_pdrop attention_probs_dropout_prob",
    ("model.*.block.dropout",): "resid_pdrop resid_dropout residual_dropout hidden_dropout hidden_dropout_prob "
    "dropout_rate",
    ("model.embedding.dropout",): "embd_pdrop embedding_dropout embd_dropout emb_dropout",
    ("model.embedding.tie",): "tie_word_embeddings tie_embeddings tied_embeddings weight_tying tie_weights",
    ("model.*.feedforward.hidden",): "d_ff intermediate_size ffn_dim n_inner mlp_dim dim_feedforward ffn_hidden_size "
    "feedforward_dim hidden_dim",
    ("model.*.feedforward.activation",): "activation_function hidden_act act act_fn",
    ("model.*.position.theta",): "rope_theta rope_base rotary_base",
    ("model.*.block.norm.eps",): "layer_norm_eps rms_norm_eps norm_eps layer_norm_epsilon",
    ("model.width",): "hidden_size d_model n_embd dim embed_dim embedding_dim emb_dim model_dim embedding_size",
    ("model.context",): "seq_len seq_length sequence_length block_size max_length max_len max_seq_len max_seq_length "
    "n_ctx ctx ctx_len n_positions max_position_embeddings context_length context_size",
    ("tokenizer.size",): "vocab_size n_vocab vocabulary vocabulary_size",
    ("tokenizer",): "tokeniser",
    ("precision",): "dtype fp16 bf16 amp mixed_precision torch_dtype",
    ("device",): "gpu gpus cuda use_cuda no_cuda cpu use_cpu mps n_gpu n_gpus num_gpus accelerator",
    # and its own names of before, where they are typed in another place
    ("model.*.variational_dropout",): "lock locked_dropout lockdrop variational",
    ("model.embedding.word_dropout",): "omit wdrop dropoute",
    ("model.embedding.unigram_noise",): "swap",
    ("residual_dtype",): "stream",
    ("recompute",): "gradient_checkpointing activation_checkpointing checkpointing grad_checkpointing",
    ("evaluate",): "eval evaluation validation",
    ("evaluate.every",): "eval_interval eval_every eval_steps evaluation_steps val_check_interval valid_every",
    ("evaluate.patience",): "early_stopping early_stop early_stopping_patience early_stopping_rounds",
    ("evaluate.rows",): "eval_iters eval_batches limit_val_batches",
    ("checkpoint.every",): "save_steps save_every save_interval checkpoint_interval checkpoint_every",
    ("checkpoint.keep",): "save_total_limit keep_checkpoints keep_last",
    ("sample.every",): "sample_every sample_interval",
    ("log",): "log_interval log_every logging_steps log_every_n_steps log_steps print_every",
    ("track",): "wandb tensorboard logger report_to loggers",
    ("objective.smoothing",): "label_smoothing label_smoothing_factor",
    ("objective.rate",): "mlm_probability mask_prob mask_rate mlm_prob masking_rate mask_ratio",
    ("objective",): "loss task",
    ("average",): "ema ema_decay",
    ("start",): "init_from resume resume_from pretrained from_pretrained load finetune_from",
    ("data.paths",): "train_file train_data dataset dataset_path data_path data_dir text input file files corpus",
    ("data.valid",): "val_data valid_file validation_file val val_split validation_split valid_split",
    ("data.source", "data.target"): "source_lang target_lang src tgt train_src train_tgt",
    ("name",): "out out_dir output_dir run_name run exp_name experiment",
    ("seed",): "random_seed manual_seed random_state",
    ("compile",): "torch_compile compile_model",
    ("threads",): "num_threads n_threads cpu_threads torch_threads",
}
_SYNONYMS: dict[str, tuple[str, ...]] = {word: keys for keys, words in _WORDS.items() for word in words.split()}
