"""Fields of the scripts' dataclasses that are not fields of a training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.errors import UserError


if TYPE_CHECKING:
    from peft import LoraConfig


LIBRARY_FIELDS = {
    "repetition": ("seed", "data_seed", "gate_seed"),
    "monitoring": (
        *("do_eval", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_packing"),
        *("save_strategy", "save_steps", "save_only_model", "restore_callback_states_from_checkpoint"),
    ),
    "output": (
        *("push_to_hub", "hub_model_id", "hub_private_repo", "hub_always_push", "hub_revision", "hub_strategy"),
        "hub_token",
    ),
    "never": (
        *("output_dir", "run_name", "resume_from_checkpoint", "report_to", "disable_tqdm", "project", "debug"),
        *("logging_steps", "logging_strategy", "logging_first_step", "logging_nan_inf_filter", "log_level"),
        *("log_level_replica", "log_on_each_node", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *(
            "log_completions",
            "log_unique_prompts",
            "log_multimodal",
            "num_completions_to_print",
            "skip_memory_metrics",
        ),
        *("log_completions_hub_repo", "include_num_input_tokens_seen", "include_for_metrics"),
        *("dataset_num_proc", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "torch_empty_cache_steps"),
        *("save_total_limit", "save_on_each_node", "enable_jit_checkpoint", "local_rank", "use_cpu"),
        *("ddp_backend", "ddp_timeout", "ddp_bucket_cap_mb", "vllm_server_base_url", "vllm_server_host"),
        *("vllm_server_port", "vllm_server_timeout", "per_device_eval_batch_size", "eval_accumulation_steps"),
        *("eval_do_concat_batches", "eval_use_gather_object", "prediction_loss_only", "batch_eval_metrics"),
    ),
}
"""When fields of the training configurations matter, as `option` defines. Other fields matter in the training."""


def option(default: Any, help: str, when: str = "training", **metadata: Any) -> Any:
    """Return a field of a script's dataclass.

    Args:
        default: Default value. `...` makes the field required.
        help: Text in `--help`.
        when: Moment at which the field matters. All comparisons of recipes are derived from it:

            - `training`: It changes the trained adapter. A run is not continued with another value.
            - `repetition`: It differs between trainings that are averaged. A run is not continued with another value.
            - `monitoring`: It says when a training is evaluated and saved. It may change if a run is resumed.
            - `score`: It changes the scores of tasks after the training. Results with other values are not averaged.
            - `measurement`: It says what is measured after the training.
            - `output`: It says what is saved after the training.
            - `never`: It changes no result.
        **metadata: Further metadata, such as `choices`.
    """
    metadata |= {"help": help, "when": when}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=MISSING if default is ... else default, metadata=metadata)


def names_of(*moments: str) -> set[str]:
    """Return the names of the fields that matter at one of the moments of `option`."""
    own = {f.name for cls in (SFTArguments, ModelArguments) for f in fields(cls) if f.metadata["when"] in moments}
    return own.union(*(LIBRARY_FIELDS.get(moment, ()) for moment in moments))


def check_depths(depths: Iterable[int] | None, name: str) -> None:
    """Raise UserError unless all recurrence depths are at least 1."""
    for depth in depths or ():
        if depth < 1:
            raise UserError(f"`{name}` must be at least 1, got {depth}.")


@dataclass(kw_only=True)
class DepthArguments:
    """The depths of measurements."""

    eval_num_loops: list[int] | None = option(
        None, "Recurrence depths at which to measure. Default: `num_loops`.", "measurement"
    )

    def __post_init__(self):
        check_depths(self.eval_num_loops, "eval_num_loops")


@dataclass
class ModelArguments:
    """The looped model, and the number of CPU threads, which it sets."""

    help_title = "Model"

    model_name_or_path: str = option(..., "Hub name or folder of a looped model, or `tiny-ouro`.")
    model_revision: str = option("main", "Branch, tag or commit on the Hub.")
    num_loops: int | None = option(None, "Recurrence depth K. Default: the model's own.")
    dtype: str = option(
        "bfloat16", "Data type of the frozen base weights.", choices=("bfloat16", "float16", "float32")
    )
    attn_implementation: str = option("sdpa", "sdpa, eager, flash_attention_2, ...")
    chat_template: str | None = option(
        None, "Name (`tulu2`, `ouro`, ...) or Jinja file. Default: the tokenizer's own."
    )
    num_threads: int | None = option(None, "CPU threads per process. Default: torch's own.", "never")

    def __post_init__(self):
        check_depths(None if self.num_loops is None else [self.num_loops], "num_loops")
        if self.num_threads is not None:
            import torch

            torch.set_num_threads(self.num_threads)

    @property
    def load_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `loopdropout_trainer.load_model`."""
        names = ("dtype", "attn_implementation", "num_loops")
        return {"revision": self.model_revision, **{name: getattr(self, name) for name in names}}


@dataclass
class AdapterArguments:
    """The LoRA adapter. The defaults are the paper's."""

    help_title = "Adapter"

    adapter_name_or_path: str | None = option(
        None, "Adapter to start from, with its own rank and layers. Default: a new adapter."
    )
    lora_r: int = option(16, "Rank of the adapter.")
    lora_alpha: int = option(32, "Scale of the update, (alpha / r) B A.")
    lora_dropout: float = option(0.0, "Dropout on the adapter's input.")
    lora_target_modules: list[str] | None = option(
        None, "Adapted layers. Default: all linear projections of the recurrent block."
    )
    use_rslora: bool = option(False, "Whether to scale the update by alpha / sqrt(r).")

    @property
    def peft_config(self) -> LoraConfig | None:
        """Configuration of a new adapter in PEFT."""
        from peft import LoraConfig

        if self.adapter_name_or_path is not None:
            return None
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=self.lora_target_modules,
            use_rslora=self.use_rslora,
            task_type="CAUSAL_LM",
        )


@dataclass
class TaskArguments:
    """Where tasks come from."""

    own_benchmarks: dict[str, Any] | None = option(
        None, "Own benchmarks by name, as mappings with files, prompt, target and scorer (JSON).", "measurement"
    )
    benchmark_revisions: dict[str, str] | None = option(
        None, "Revisions of the tasks' datasets on the Hub, as a mapping (JSON).", "score"
    )


@dataclass
class BenchmarkArguments(TaskArguments, DepthArguments):
    """How tasks are evaluated."""

    benchmark_limit: int | None = option(None, "Number of problems per task. Default: all.", "score")
    benchmark_batch_size: int = option(16, "Problems that a process decodes at a time.", "never")
    allow_unsafe_code: bool = option(
        False, "Whether to run generated programs without sandbox. Command line only.", "score"
    )


@dataclass
class ScriptArguments(BenchmarkArguments):
    """Steps around the training."""

    help_title = "Evaluation and output"

    compare_with: list[str] | None = option(
        None, "Other rules to train from the same initial adapter, in subfolders.", "never"
    )
    benchmarks: list[str] | None = option(
        None, "Tasks of the package or lm-eval, `own_benchmarks`, or task files (.yaml).", "measurement"
    )
    evaluate_base: bool = option(True, "Whether to evaluate the base model, too.", "measurement")
    eval_num_loops: list[int] | None = option(
        None, "Recurrence depths at which to evaluate the first task.", "measurement"
    )
    single_loop_accuracy: bool = option(
        False, "Whether to evaluate the first task with the adapter in one loop only.", "measurement"
    )
    merge: bool = option(False, "Whether to save the merged model in `output_dir`/merged.", "output")
    push_merged_to_hub: bool = option(
        False, "Whether to merge, and to push the merged model to `hub_model_id`.", "output"
    )
    dry_run: bool = option(False, "Print the plan and stop before the training.", "never")

    def __post_init__(self):
        super().__post_init__()
        if (self.eval_num_loops or self.single_loop_accuracy) and not self.benchmarks:
            raise UserError("`benchmarks` must be set if `eval_num_loops` or `single_loop_accuracy` is set.")
        self.merge = self.merge or self.push_merged_to_hub


@dataclass
class SFTArguments(ScriptArguments):
    """Steps around the supervised fine-tuning."""

    single_loop_batches: int = option(
        0, "Number of evaluation batches for the loss with the adapter in one loop only.", "measurement"
    )
    diagnose_task: str | None = option(
        None,
        "Task of which 500 reference solutions are scored with the adapter in one loop only, and by each readout.",
        "measurement",
    )
    preview: int | None = option(
        None, "Index of a training example to print, with its trained tokens marked.", "never"
    )
