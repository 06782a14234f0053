"""What a number depends on: its identity, in parts, made in one place and compared in one place.

A training, an evaluation and a diagnosis each have one, with the parts that apply; it is plain JSON, and lies beside what it
is about. Which parts must agree depends on the question: `ONE_RUN` for going on where a run stopped, `ONE_SETTING` for runs
whose results may be averaged, `ALIKE` for results that may be compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.saving.files import sha256_of_json


if TYPE_CHECKING:  # sweeps compare identities, and wait for no model to be imported
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedTokenizerBase

Identity = dict[str, dict[str, Any]]
"""Fields by part, as JSON values."""

PARTS = ("base", "adapter", "weights", "data", "settings", "loops", "seeds", "length", "versions")
"""The parts of an identity.

base: weights, every field of the configuration, tokenizer, chat template, what ends a completion.
adapter: PEFT's configuration of it. weights: the hash of what was trained, where something trained is measured.
data: the rows of a training, or the problems or rows of a measurement.
settings: all others with effect. loops: how many run, with which gates, read out after which.
seeds, length: of a training. versions: of libraries.
"""

ONE_RUN = ("base", "adapter", "weights", "data", "settings", "loops", "seeds")
"""What is the same before and after an interruption: not how long a run is, nor versions, which are worth a warning."""

ONE_MODEL = ("base", "adapter", "weights", "loops")
"""What results of one model share, whatever the benchmark."""

WHOLE_RUN = (*ONE_RUN, "length")
"""What a run shares with itself when it is complete."""

ONE_SETTING = ("base", "adapter", "data", "settings", "loops", "length", "versions")
"""What the seeds of one setting share: all but seeds, and the weights that came of them."""

ALIKE = ("settings", "data")
"""What results on one benchmark share that stand beside one another: problems, and how they are asked and scored."""

WITHOUT_EFFECT = {
    "where things are written, and their names": """
        output_dir run_name project logging_dir trackio_space_id trackio_bucket_id trackio_static_space_id""",
    "what is printed and logged": """
        logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica
        disable_tqdm report_to debug include_num_input_tokens_seen skip_memory_metrics log_completions
        num_completions_to_print log_unique_prompts log_multimodal log_completions_hub_repo""",
    "what is evaluated during the training, which leaves its weights as they are": """
        do_train do_eval do_predict eval_strategy eval_steps eval_delay eval_on_start eval_do_concat_batches eval_packing
        eval_use_gather_object eval_accumulation_steps per_device_eval_batch_size prediction_loss_only include_for_metrics
        batch_eval_metrics bf16_full_eval fp16_full_eval live_diagnostics_steps live_diagnostics_rows""",
    "what is measured and made of a trained adapter": """
        benchmarks benchmark_files benchmark_limit benchmark_batch_size decoding apply_chat_template system_instruction
        max_new_tokens confirm_run_unsafe_code compare_with evaluate_base single_loop_batches single_loop_accuracy depths
        merge push_merged_to_hub dry_run""",
    "when checkpoints are saved, and how a run is resumed from them": """
        save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint
        restore_callback_states_from_checkpoint resume_from_checkpoint resume_with_changed_settings""",
    "what is pushed": """
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision""",
    "how the work is spread over devices: any layout gives each example the same gates, and the same weights": """
        use_cpu local_rank parallelism_config deepspeed fsdp fsdp_config full_determinism auto_find_batch_size
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
        ds3_gather_for_generation""",
    "how rows are fetched": """
        dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
        dataloader_multiprocessing_context dataloader_in_order dataset_num_proc remove_unused_columns""",
    "memory and speed: the same numbers up to rounding": """
        torch_empty_cache_steps activation_offloading activation_checkpointing activation_checkpointing_kwargs use_cache
        gradient_checkpointing gradient_checkpointing_kwargs use_liger_kernel liger_kernel_config torch_compile
        torch_compile_backend torch_compile_mode steps_per_generation completion_slots remove_padding skip_frozen_loops
        fused_lora compile_layers""",
    "it can only end a run": "stop_on_nan",
    "counted as `examples_per_step`": "per_device_train_batch_size gradient_accumulation_steps",
    "counted in the part `base`, by what they make of the model": "model_init_kwargs trust_remote_code",
}
"""The settings that leave every result as it is, by the reason. All others count: what nobody thought of is compared."""

_WITHOUT_EFFECT = {name for names in WITHOUT_EFFECT.values() for name in names.split()}
_CHOOSING = {"eval_strategy", "eval_steps", "eval_delay", "save_strategy", "save_steps"}
"""What counts where a training ends with its best checkpoint (`load_best_model_at_end`): which there are to choose from."""
_SEEDS = ("seed", "data_seed", "gate_seed")
# Of a base's configuration: what says how it is stored and what it returns, labels of other tasks, and tokens, which count as
# the tokenizer's and as `end_tokens`.
_OF_NO_MODEL = (
    *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "return_dict", "problem_type"),
    *("output_hidden_states", "output_attentions", "id2label", "label2id", "chunk_size_feed_forward"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
)
_OF_NO_ADAPTER = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping", "task_type")
_NAMES = {
    ("data", "rows"): "the number of training rows",
    ("data", "sha256"): "the training data",
    ("data", "validation"): "the held-out rows",
    ("data", "problems"): "the problems",
    ("base", "weights"): "the base weights",
    ("base", "tokenizer"): "the tokenizer",
    ("base", "chat_template"): "the chat template",
    ("weights", "adapter"): "the adapter's weights",
    ("settings", "examples_per_step"): "the examples in a step",
    ("settings", "examples_per_micro_batch"): "the examples in a micro-batch",
}
"""What a sentence calls a field whose name says too little."""
_HASHES = {*(name for name in _NAMES if name[0] != "settings")} - {("data", "rows")}
_MAY_BE_UNKNOWN = {("base", "weights"), ("data", "sha256"), ("data", "rows"), ("data", "validation")}
_OF_FILES = ("base", "adapter")


class Difference(NamedTuple):
    """One field in which two identities differ; as a string the words for a sentence."""

    part: str
    field: str
    before: Any
    after: Any

    @property
    def name(self) -> str:
        return _NAMES.get((self.part, self.field), f"`{self.field}`")

    def __str__(self) -> str:
        if (self.part, self.field) in _HASHES:
            return f"{self.name} {'are others' if self.name.endswith(('s', 'data')) else 'is another'}"
        return f"{self.name} was {self.before!r} and is {self.after!r}"


def make_identity(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: Any = None,
    settings: Any = None,
    unsharded: bool = True,
    held_out: Any = None,
) -> Identity:
    """Return the identity of a training; or what a measurement shares with it, the model's parts of it.

    Args:
        model: looped model, before its first step, with its adapter if any: `base`, `adapter`, and of `loops` the depth.
        tokenizer: of the model.
        data: rows, whose content counts.
        settings: arguments of a training: `settings`, `seeds` and `length`.
        unsharded: whether this process holds all of the base's weights; they stay out of it otherwise.
        held_out: rows that a training is evaluated on: of its curves, and of what may choose its best checkpoint or its rate.
    """
    from peft import PeftModel

    from loopdropout_trainer.looped import find_looped_model

    looped = find_looped_model(model)
    identity = {
        "base": _base(looped, tokenizer, unsharded),
        "loops": {"num_loops": looped.config.num_loops},
        "versions": computing_versions(),
    }
    if isinstance(model, PeftModel):
        identity["adapter"] = _adapter(model.peft_config[model.active_adapters[0]])
    if data is not None:
        identity["data"] = _data(data)
    if held_out is not None:
        identity["data"]["validation"] = _data(held_out)["sha256"]
    if settings is not None:
        identity |= _settings(settings)
    return _as_json(identity)


def adapter_identity(config: PeftConfig) -> Identity:
    """Return the identity of an adapter of which nothing is known but PEFT's configuration."""
    return _as_json({"adapter": _adapter(config)})


def model_identity(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> Identity:
    """Return what all measurements of a model as it is share: base, adapter with its trained weights, versions."""
    identity = make_identity(model, tokenizer)
    identity.pop("loops")  # a measurement says itself which loops run
    return {**identity, "weights": trained_weights(model)}


def trained_weights(model: nn.Module | None) -> dict[str, str | None]:
    """Return the part `weights`: the hash of a model's adapter as it is now; None for the model alone."""
    from loopdropout_trainer.looped import find_looped_model

    named = () if model is None else find_looped_model(model).named_parameters()
    trained = {name: weight for name, weight in named if ".lora_" in name}
    return {"adapter": _weights_sha256(trained) if trained else None}


def identity_key(identity: Identity) -> str:
    """Return a short name of an identity: equal for equal ones."""
    return sha256_of_json(identity)[:16]


def read_identity(content: Any) -> Identity:
    """Return what `json.loads` has read as an identity; ValueError, one sentence without a subject, if it is none."""
    if not isinstance(content, dict) or not all(isinstance(fields, dict) for fields in content.values()):
        raise UserError("holds no identity: a mapping of parts with fields")
    if strange := [name for name in content if name not in PARTS]:
        raise UserError(f"was written by another version of this package (its identity has a part `{strange[0]}`)")
    return content


def differences(before: Identity | None, now: Identity | None, parts: Iterable[str] = PARTS) -> list[Difference]:
    """Return what two identities differ in, of these parts; nothing where one of them is not known.

    They are compared in the fields that both name, since a younger version of a library may know more; of what files say that
    anybody can edit, also in those that one of them leaves out, if the same libraries have read them. A hash that was not
    taken, as of sharded weights, says nothing.
    """
    before, now = before or {}, now or {}
    same_libraries = "versions" in before and before["versions"] == now.get("versions")
    changed = []
    for part in parts:
        if part not in before or part not in now:
            continue
        old, new = before[part], now[part]
        names = old.keys() | new.keys() if same_libraries and part in _OF_FILES else old.keys() & new.keys()
        for name in sorted(names):
            was, value = old.get(name), new.get(name)
            is_unknown = (part, name) in _MAY_BE_UNKNOWN and None in (was, value)
            if was != value and not is_unknown:
                changed.append(Difference(part, name, was, value))
    return changed


def continues(before: Identity | None, now: Identity | None) -> bool:
    """Return whether a run is an earlier one, or differs from it in nothing but that it trains for longer."""
    if before is None or now is None:
        return True
    old = before.get("length", {})
    new = now.get("length", {})
    lengths = [(old.get(name), number) for name, number in new.items()]
    grows = all(was == number or None not in (was, number) and number > was for was, number in lengths)
    return grows and not differences(before, now, ONE_RUN)


def _base(looped: nn.Module, tokenizer: PreTrainedTokenizerBase | None, unsharded: bool) -> dict[str, Any]:
    """Return what tells a base model and its tokenizer from any other, whatever adapter is on it."""
    from transformers.utils import flatten_dict

    from loopdropout_trainer.settings.tokenizer import end_tokens

    config = looped.config
    depth = type(config).attribute_map.get("num_loops", "num_loops")
    frozen = {name: weight for name, weight in looped.named_parameters() if ".lora_" not in name}
    own = getattr(looped, "generation_config", None)
    generation = {} if own is None else own.to_diff_dict()
    settings = flatten_dict({**config.to_dict(), "generation": generation})
    facts = {name: value for name, value in settings.items() if value != {} and _says_something(name)}
    facts.pop(depth, None)
    facts["dtype"] = str(next(iter(frozen.values())).dtype).removeprefix("torch.")
    facts["attn_implementation"] = getattr(config, "_attn_implementation", None)
    facts["weights"] = _weights_sha256(frozen) if unsharded else None
    facts["end_tokens"] = sorted(end_tokens(looped, tokenizer))
    if tokenizer is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        rules = json.loads(backend.to_str()) if backend is not None else {"vocabulary": tokenizer.get_vocab()}
        rules |= {"truncation": None, "padding": None}  # as the last call left them
        facts["tokenizer"] = sha256_of_json(rules)
        facts |= {name: str(text) for name, text in tokenizer.special_tokens_map.items() if name != "pad_token"}
        facts["chat_template"] = tokenizer.chat_template and sha256_of_json(tokenizer.chat_template)
        if tokenizer.split_special_tokens:  # which its rules do not say
            facts["split_special_tokens"] = True
    return facts


def _adapter(config: PeftConfig) -> dict[str, Any]:
    fields = config.to_dict().items()
    return {name: value for name, value in fields if name not in _OF_NO_ADAPTER and value is not None}


def _settings(settings: Any) -> Identity:
    """Return the parts `settings`, `seeds` and `length`."""
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings) if field.init}
    seeds = {name: given["seed"] if given.get(name) is None else given[name] for name in _SEEDS}
    facts = {"examples_per_step": settings.examples_per_step}
    if getattr(settings, "loss_average", "tokens") == "micro_batches":
        facts["examples_per_micro_batch"] = settings.train_batch_size
    by_steps = settings.max_steps > 0
    length = {  # of the two the one that does not count is None
        "max_steps": settings.max_steps if by_steps else None,
        "num_train_epochs": None if by_steps else float(settings.num_train_epochs),
    }
    without_effect = _WITHOUT_EFFECT - _CHOOSING if settings.load_best_model_at_end else _WITHOUT_EFFECT
    facts |= {name: value for name, value in given.items() if name not in {*without_effect, *length, *seeds}}
    return {"settings": facts, "seeds": seeds, "length": length}


def _says_something(name: str) -> bool:
    """Return whether a field of a configuration, under its dotted name, says something of a model."""
    return not any(part in _OF_NO_MODEL or part.startswith("_") for part in name.split("."))


def _as_json(identity: dict[str, Any]) -> Identity:
    return json.loads(json.dumps(identity, default=_plain, sort_keys=True))


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _weights_sha256(parameters: Mapping[str, nn.Parameter]) -> str:
    """Return a hash of the names, shapes and all numbers of weights."""
    import torch

    digest = hashlib.sha256()
    by_name = {name.replace(".base_layer.", "."): parameter for name, parameter in parameters.items()}
    for name, parameter in sorted(by_name.items()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def _data(rows: Any) -> dict[str, Any]:
    """Return the number of rows and a hash of all of them in their order; of streamed ones what they are called."""
    import datasets
    import pyarrow.compute

    if not isinstance(rows, datasets.Dataset):
        info = getattr(rows, "info", None)
        name = {"name": getattr(info, "dataset_name", None), "version": getattr(info, "version", None)}
        return {"rows": len(rows) if hasattr(rows, "__len__") else None, "sha256": None, **name}
    digest = hashlib.sha256()
    for table in rows.with_format("arrow").iter(batch_size=1000):
        for name in sorted(table.column_names):
            column = table.column(name)
            types = pyarrow.types
            digest.update(name.encode())
            if types.is_list(column.type) or types.is_large_list(column.type):
                digest.update(pyarrow.compute.list_value_length(column).to_numpy().tobytes())
                column = pyarrow.compute.list_flatten(column)
            is_plain = types.is_integer(column.type) and not column.null_count
            digest.update(column.to_numpy().tobytes() if is_plain else repr(column.to_pylist()).encode())
    return {"rows": len(rows), "sha256": digest.hexdigest()}


_COMPUTING = ("loopdropout-trainer", "torch", "transformers", "trl", "peft", "accelerate", "tokenizers")
LIBRARIES = (*_COMPUTING, "datasets", "evaluate", "lm-eval", "evalplus")


def library_versions() -> dict[str, str | None]:
    """Return the version of Python and of each library; None for one that is not installed."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def computing_versions() -> dict[str, str | None]:
    """Return the versions of what computes; scorers' are among the settings of their benchmarks."""
    versions = library_versions()
    return {name: versions[name] for name in _COMPUTING}
