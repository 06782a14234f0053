"""What makes a run the run that it is: every setting that changes its result, its data, its adapter and its base model.

Checkpoints and results carry it, so that none of another run is taken for this one's. Two identities are compared in what
both of them name: a younger version of a library may know more fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import datasets
import pyarrow
import pyarrow.compute
import torch
from peft import PeftModel
from torch import nn
from transformers import TrainingArguments

from loopdropout_trainer.looped import find_looped_model


# Fields of training arguments that leave the trained weights as they are: what is logged, evaluated, saved, pushed, and
# how fast things go. All others count, so that a field that nobody thought of is compared rather than overlooked.
_WITHOUT_EFFECT = """
output_dir run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica
disable_tqdm report_to debug include_num_input_tokens_seen skip_memory_metrics
do_train do_eval do_predict eval_strategy eval_steps eval_delay eval_on_start eval_do_concat_batches eval_packing
eval_use_gather_object eval_accumulation_steps per_device_eval_batch_size prediction_loss_only include_for_metrics
batch_eval_metrics bf16_full_eval fp16_full_eval
save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint
restore_callback_states_from_checkpoint resume_from_checkpoint resume_with_changed_settings
push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
use_cpu local_rank parallelism_config deepspeed fsdp fsdp_config full_determinism auto_find_batch_size
ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
dataloader_multiprocessing_context dataloader_in_order dataset_num_proc remove_unused_columns
torch_empty_cache_steps activation_offloading activation_checkpointing activation_checkpointing_kwargs use_cache
gradient_checkpointing gradient_checkpointing_kwargs use_liger_kernel liger_kernel_config
torch_compile torch_compile_backend torch_compile_mode
log_completions num_completions_to_print log_unique_prompts log_multimodal log_completions_hub_repo
steps_per_generation completion_slots ds3_gather_for_generation
remove_padding skip_frozen_loops fused_lora compile_layers stop_on_nan
"""
# These count in another way: by what they make of the model, and by the examples in a step.
_WITHOUT_EFFECT += "model_init_kwargs trust_remote_code per_device_train_batch_size gradient_accumulation_steps"
_NOT_COMPARED = {*_WITHOUT_EFFECT.split(), "max_steps", "num_train_epochs"}
_OF_NO_RUN = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping", "task_type")
_OF_NO_MODEL = ("transformers_version", "dtype", "torch_dtype", "use_cache")
_NAMES = {
    "rows": "the number of training rows",
    "sha256": "the training data",
    "weights": "the base weights",
    "examples_per_step": "the examples in a step",
    "examples_per_micro_batch": "the examples in a micro-batch",
}


def run_identity(args: TrainingArguments, model: PeftModel, dataset: Any, unsharded: bool) -> dict[str, Any]:
    """Return the identity of a run as plain JSON, before its first step.

    Args:
        args: of the trainer.
        model: with its adapter.
        dataset: prepared rows.
        unsharded: whether this process holds all of the base's weights; they stay out of it otherwise.
    """
    base, by_steps = find_looped_model(model), args.max_steps > 0
    frozen = {name: p for name, p in base.named_parameters() if ".lora_" not in name}
    lora, config = model.peft_config[model.active_adapters[0]].to_dict(), base.config.to_dict()
    fields = {name for name, field in type(args).__dataclass_fields__.items() if field.init} - _NOT_COMPARED
    parts_count = getattr(args, "loss_average", "tokens") == "micro_batches"
    identity = {
        "settings": {
            **{name: getattr(args, name) for name in fields},
            "data_seed": args.seed if args.data_seed is None else args.data_seed,
            "gate_seed": args.seed if args.gate_seed is None else args.gate_seed,
            "examples_per_step": args.examples_per_step,
            **({"examples_per_micro_batch": args.train_batch_size} if parts_count else {}),
        },
        # How long the run is; of the two fields the one that does not count is None.
        "length": {
            "max_steps": args.max_steps if by_steps else None,
            "num_train_epochs": None if by_steps else float(args.num_train_epochs),
        },
        "adapter": {key: value for key, value in lora.items() if key not in _OF_NO_RUN and value is not None},
        "model": {
            **{key: value for key, value in config.items() if _describes_the_model(key, value)},
            "dtype": str(next(iter(frozen.values())).dtype).removeprefix("torch."),
            "weights": _weights_sha256(frozen) if unsharded else None,
        },
        "data": _data_facts(dataset),
    }
    return json.loads(json.dumps(identity, default=_plain, sort_keys=True))


def differences(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> list[str]:
    """Return what two identities differ in, as words for a sentence; nothing where one of them is not known."""
    found = []
    for part in ("settings", "length", "adapter", "model", "data"):
        old, new = (before or {}).get(part) or {}, (now or {}).get(part) or {}
        for key in sorted(key for key in {*old} & {*new} if old[key] != new[key]):
            name, is_measured = _NAMES.get(key, f"`{key}`"), key in ("weights", "sha256", "rows")
            if is_measured and None in (old[key], new[key]):
                continue  # it is not known
            is_hash = is_measured and key != "rows"
            found.append(f"{name} are others" if is_hash else f"{name} was {old[key]!r} and is {new[key]!r}")
    return found


def continues(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> bool:
    """Return whether a run is an earlier one, or differs from it in nothing but that it trains for longer."""
    if before is None or now is None or not differences(before, now):
        return True
    old, new = before.get("length") or {}, now.get("length") or {}
    fields = [(old.get(name), number) for name, number in new.items()]
    grows = all(was == number or None not in (was, number) and number > was for was, number in fields)
    return grows and not differences(before, {**now, "length": old})


def _describes_the_model(key: str, value: Any) -> bool:
    plain = value is None or isinstance(value, (bool, int, float, str))
    return plain and key not in _OF_NO_MODEL and not key.startswith("_") and not key.endswith("token_id")


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _weights_sha256(parameters: Mapping[str, nn.Parameter]) -> str:
    """Return a hash of the names, shapes and all numbers of weights."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        name = name.replace(".base_layer.", ".")
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def _data_facts(dataset: Any) -> dict[str, Any]:
    """Return the number of rows and a hash of all of them in their order; None where they are not known beforehand."""
    if not isinstance(dataset, datasets.Dataset):
        return {"rows": len(dataset) if hasattr(dataset, "__len__") else None, "sha256": None}
    digest = hashlib.sha256()
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        for name in sorted(table.column_names):
            column, types = table.column(name), pyarrow.types
            digest.update(name.encode())
            if types.is_list(column.type) or types.is_large_list(column.type):
                digest.update(pyarrow.compute.list_value_length(column).to_numpy().tobytes())
                column = pyarrow.compute.list_flatten(column)
            is_plain = types.is_integer(column.type) and not column.null_count
            digest.update(column.to_numpy().tobytes() if is_plain else repr(column.to_pylist()).encode())
    return {"rows": len(dataset), "sha256": digest.hexdigest()}
