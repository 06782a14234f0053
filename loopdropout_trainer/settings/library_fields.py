"""Inherited fields of the training configurations: their help, their bounds, and when they matter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from loopdropout_trainer.bounds import Bounds


def _inherited(
    help: str | None = None,
    when: str = "training",
    not_empty: bool = False,
    words: tuple[str, ...] = (),
    **bounds: Any,
) -> dict[str, Any]:
    """Return the metadata of an inherited field.

    Args:
        help: Text in `--help`, "" for the library's text, or None if `--help` leaves the field out.
        when: Moment at which the field matters, as in `option`.
        not_empty: Whether an empty text is an error.
        words: Texts that a field takes instead of a number.
        **bounds: Fields of `Bounds`.
    """
    return {"help": help, "when": when, "not_empty": not_empty, "words": words, "bounds": Bounds(**bounds)}


SEED_BOUNDS = {"at_least": 0, "below": 2**32}
"""Bounds of a seed, which NumPy keeps in 32 bits."""

_SHARE = {"at_least": 0, "at_most": 1}
_PORT = {"at_least": 1, "at_most": 65535}

LIBRARY_FIELDS: dict[str, dict[str, Any]] = {
    # Fields that `--help` shows, in the order of the libraries
    "output_dir": _inherited("Folder of the run. Default: trainer_output, as in TRL.", "never", not_empty=True),
    "per_device_train_batch_size": _inherited("", at_least=1),
    "num_train_epochs": _inherited("", above=0, at_most=1e6),
    "max_steps": _inherited(
        "Number of optimizer steps, instead of `num_train_epochs`. -1: by epochs.", at_least=1, also=(-1,)
    ),
    "learning_rate": _inherited("", at_least=0),
    "lr_scheduler_type": _inherited(""),
    "warmup_steps": _inherited("", at_least=0),
    "gradient_accumulation_steps": _inherited("", at_least=1),
    "bf16": _inherited("Whether to compute in bfloat16. Default: True, unless `fp16` is set."),
    "gradient_checkpointing": _inherited(
        "Whether to compute the layers again in the backward pass, which takes more time and less memory."
    ),
    "assistant_only_loss": _inherited(""),
    "logging_steps": _inherited("", "never", above=0),
    "report_to": _inherited("", "never"),
    "eval_strategy": _inherited(
        "When to measure the loss of the held-out examples: `no`, `steps` or `epoch`.", "monitoring"
    ),
    "save_steps": _inherited("", "monitoring", above=0),
    "push_to_hub": _inherited("", "output"),
    "hub_model_id": _inherited("", "output", not_empty=True),
    "seed": _inherited("", "repetition", **SEED_BOUNDS),
    "use_cpu": _inherited("", "never"),
    "resume_from_checkpoint": _inherited(
        "`true` continues the run from the newest complete checkpoint in `output_dir`, or starts it, and `false` begins it "
        "again. A folder names the checkpoint to continue from.",
        "never",
        not_empty=True,
    ),
    "max_length": _inherited(
        "Longest example in tokens, and the length of packed rows. Longer examples are left out, not cut.", at_least=1
    ),
    "packing": _inherited("Whether to put several examples into one row of `max_length` tokens."),
    "beta": _inherited("", at_least=0),
    "num_generations": _inherited("", at_least=2),
    "max_completion_length": _inherited("", at_least=1),
    # Fields of transformers' Trainer that matter at another moment than the training, or have bounds
    "data_seed": _inherited(when="repetition", **SEED_BOUNDS),
    "eval_steps": _inherited(when="monitoring", above=0),
    "save_strategy": _inherited(when="monitoring"),
    "hub_private_repo": _inherited(when="output"),
    "run_name": _inherited(when="never"),
    "disable_tqdm": _inherited(when="never"),
    "dataset_num_proc": _inherited(when="never", at_least=1),
    "dataloader_num_workers": _inherited(when="never", at_least=0),
    "save_total_limit": _inherited(when="never", at_least=1),
    "weight_decay": _inherited(at_least=0),
    "adam_beta1": _inherited(at_least=0, below=1),
    "adam_beta2": _inherited(at_least=0, below=1),
    "adam_epsilon": _inherited(at_least=0),
    "max_grad_norm": _inherited(at_least=0, at_most=math.inf),
    "label_smoothing_factor": _inherited(at_least=0, below=1),
    "neftune_noise_alpha": _inherited(at_least=0),
    "torch_empty_cache_steps": _inherited(when="never", at_least=1),
    "eval_delay": _inherited(when="monitoring", at_least=0),
    "per_device_eval_batch_size": _inherited(when="never", at_least=1),
    "eval_accumulation_steps": _inherited(when="never", at_least=1),
    "dataloader_prefetch_factor": _inherited(when="never", at_least=1),
    "ddp_bucket_cap_mb": _inherited(when="never", at_least=1),
    "ddp_timeout": _inherited(when="never", at_least=1),
    "local_rank": _inherited(when="never", at_least=0, also=(-1,)),
    "router_aux_loss_coef": _inherited(at_least=0),
    # TRL's supervised fine-tuning and DPO
    "pad_to_multiple_of": _inherited(at_least=1, words=("auto",)),
    "precompute_ref_batch_size": _inherited(at_least=1),
    "ld_alpha": _inherited(**_SHARE),
    "label_smoothing": _inherited(at_least=0, below=0.5),
    "discopop_tau": _inherited(above=0),
    "ref_model_mixup_alpha": _inherited(**_SHARE),
    "ref_model_sync_steps": _inherited(at_least=1),
    # TRL's GRPO
    "num_generations_eval": _inherited(at_least=1),
    "generation_batch_size": _inherited(at_least=1),
    "steps_per_generation": _inherited(at_least=1),
    "num_iterations": _inherited(at_least=1),
    "temperature": _inherited(above=0),
    "top_p": _inherited(above=0, at_most=1),
    "top_k": _inherited(at_least=0),
    "min_p": _inherited(**_SHARE),
    "repetition_penalty": _inherited(above=0),
    "epsilon": _inherited(at_least=0),
    "epsilon_high": _inherited(at_least=0),
    "delta": _inherited(above=0),
    "sapo_temperature_neg": _inherited(above=0),
    "sapo_temperature_pos": _inherited(above=0),
    "vespo_k_pos": _inherited(at_least=0),
    "vespo_k_neg": _inherited(at_least=0),
    "vespo_lambda_pos": _inherited(at_least=0),
    "vespo_lambda_neg": _inherited(at_least=0),
    "top_entropy_quantile": _inherited(**_SHARE),
    "entropy_coef": _inherited(at_least=0),
    "entropy_coef_min": _inherited(at_least=0),
    "entropy_coef_max": _inherited(at_least=0),
    "entropy_coef_delta": _inherited(at_least=0),
    "entropy_target": _inherited(at_least=0),
    "max_tool_calling_iterations": _inherited(at_least=1),
    "off_policy_mask_threshold": _inherited(at_least=0),
    "num_completions_to_print": _inherited(when="never", at_least=1),
    "vllm_server_port": _inherited(when="never", **_PORT),
    "vllm_group_port": _inherited(**_PORT),
    "vllm_server_timeout": _inherited(when="never", above=0),
    "vllm_gpu_memory_utilization": _inherited(above=0, at_most=1),
    "vllm_max_model_length": _inherited(at_least=1),
    "vllm_tensor_parallel_size": _inherited(at_least=1),
    "vllm_importance_sampling_cap": _inherited(above=0),
    "vllm_importance_sampling_clip_min": _inherited(at_least=0),
    "vllm_importance_sampling_clip_max": _inherited(above=0),
    # Other fields that matter at another moment than the training
    "gate_seed": _inherited(when="repetition"),
    **dict.fromkeys(
        ("do_eval", "eval_on_start", "eval_packing", "save_only_model", "restore_callback_states_from_checkpoint"),
        _inherited(when="monitoring"),
    ),
    **dict.fromkeys(("hub_always_push", "hub_revision", "hub_strategy", "hub_token"), _inherited(when="output")),
    **dict.fromkeys(
        (
            "project",
            "debug",
            "logging_strategy",
            "logging_first_step",
            "logging_nan_inf_filter",
            "log_level",
            "log_level_replica",
            "log_on_each_node",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
            "log_completions",
            "log_unique_prompts",
            "log_multimodal",
            "skip_memory_metrics",
            "log_completions_hub_repo",
            "include_num_input_tokens_seen",
            "include_for_metrics",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_multiprocessing_context",
            "save_on_each_node",
            "enable_jit_checkpoint",
            "ddp_backend",
            "vllm_server_base_url",
            "vllm_server_host",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "prediction_loss_only",
            "batch_eval_metrics",
        ),
        _inherited(when="never"),
    ),
}
"""Metadata, as of `option`, of fields that the training configurations inherit from transformers and TRL.

The table is made by hand, because the libraries have hundreds of fields, do not rank them, and declare no bounds. Fields that
it leaves out matter in the training, take every finite number, and are not shown by `--help`.
"""

SAFE_VALUES = {
    "trust_remote_code": False,
    "custom_generate": None,
    "use_kernels": False,
    "kernel_config": None,
    "allow_all_kernels": False,
    "use_safetensors": True,
    "weights_only": True,
    "allow_unsafe_code": False,
    "launcher": "",
    "import": None,
}
"""Names that can run code of other people, with their safe values. Other values are accepted on the command line only. The
list is made by hand, because no library marks such names. Most of them are keys in a mapping, such as `model_init_kwargs`."""


def unsafe_names(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that can run code, also of nested ones. A recipe must not set them."""
    names = []
    for name, value in _nested(settings):
        names_file = ("attn_implementation" in name or name == "script") and "/" in str(value)
        is_safe = name not in SAFE_VALUES or value in (None, SAFE_VALUES[name])
        if names_file or not is_safe:
            names.append(name)
    return names


def _nested(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        yield str(name), value
        if isinstance(value, dict):
            yield from _nested(value)
