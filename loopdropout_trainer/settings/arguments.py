"""Fields of the scripts' dataclasses that are not fields of a training."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.bounds import ADAPTER_BOUNDS
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import MOST_LOOPS, find_looped_model
from loopdropout_trainer.rewards import REWARDS
from loopdropout_trainer.settings.fields import check_fields, option
from loopdropout_trainer.settings.library_fields import LIBRARY_FIELDS


if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


def attention_option() -> Any:
    """Return the field `attn_implementation` of a dataclass that loads models."""
    return option("sdpa", "sdpa, eager, flash_attention_2, ...")


def threads_option() -> Any:
    """Return the field `num_threads` of a dataclass that loads models."""
    return option(None, "CPU threads per process. Default: torch's own.", "never", at_least=1, at_most=1024)


def set_threads(num_threads: int | None) -> None:
    """Set the number of CPU threads of this process, if one is given."""
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)


def names_of(*moments: str) -> set[str]:
    """Return the names of the fields that matter at one of the moments of `option`."""
    own = {field.name: field.metadata for cls in (SFTArguments, ModelArguments) for field in fields(cls)}
    return {name for name, metadata in {**LIBRARY_FIELDS, **own}.items() if metadata["when"] in moments}


DEPTH_BOUNDS = {"at_least": 1, "at_most": MOST_LOOPS}
"""Bounds of a recurrence depth."""

DTYPES = ("bfloat16", "float16", "float32")
"""Data types of base weights."""


@dataclass(kw_only=True)
class DepthArguments:
    """The depths of measurements."""

    eval_num_loops: list[int] | None = option(
        None, "Recurrence depths at which to measure. Default: `num_loops`.", "measurement", **DEPTH_BOUNDS
    )

    def __post_init__(self):
        check_fields(self)


@dataclass
class ModelArguments:
    """The looped model, and the number of CPU threads. Creating an instance sets torch's threads."""

    help_title = "Model"

    model_name_or_path: str = option(..., "Hub name or folder of a looped model, or `tiny-ouro`.")
    model_revision: str = option("main", "Branch, tag or commit on the Hub.")
    num_loops: int | None = option(None, "Recurrence depth K. Default: the model's own.", **DEPTH_BOUNDS)
    dtype: str = option("bfloat16", "Data type of the frozen base weights.", choices=DTYPES)
    attn_implementation: str = attention_option()
    chat_template: str | None = option(
        None, "Name (`tulu2`, `ouro`, ...) or Jinja file. Default: the tokenizer's own."
    )
    num_threads: int | None = threads_option()

    def __post_init__(self):
        check_fields(self)
        set_threads(self.num_threads)

    @property
    def load_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `loopdropout_trainer.load_model`."""
        names = ("dtype", "attn_implementation", "num_loops")
        return {"revision": self.model_revision, **{name: getattr(self, name) for name in names}}


@dataclass
class SourceArguments:
    """How models and adapters are loaded that were trained before. By default each is loaded as its training did."""

    help_title = "Model"

    model_name_or_path: str | None = option(
        None, "Hub name or folder of the base model. Default: as each adapter names it."
    )
    model_revision: str | None = option(
        None, "Branch, tag or commit of the base model. Default: the commit of each training."
    )
    num_loops: int | None = option(None, "Recurrence depth K. Default: the depth of each training.", **DEPTH_BOUNDS)
    dtype: str | None = option(
        None,
        "Data type of the base weights. Default: as in each training, else bfloat16.",
        choices=DTYPES,
    )
    attn_implementation: str = attention_option()
    chat_template: str | None = option(
        None, "Name (`tulu2`, `ouro`, ...) or Jinja file. Default: as in each training."
    )
    num_threads: int | None = threads_option()

    def __post_init__(self):
        check_fields(self)
        set_threads(self.num_threads)


LORA_FIELDS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "use_rslora": "use_rslora",
}
"""Fields of `AdapterArguments`, and the fields of PEFT's LoraConfig that they set. A recipe has no others."""


@dataclass
class AdapterArguments:
    """The LoRA adapter. The defaults are the paper's."""

    help_title = "Adapter"

    adapter_name_or_path: str | None = option(
        None,
        "Adapter (folder or `user/name@branch`) to start from, with its own rank and layers. Default: a new adapter.",
    )
    lora_r: int = option(16, "Rank of the adapter.", **ADAPTER_BOUNDS["r"])
    lora_alpha: int = option(32, "Scale of the update, (alpha / r) B A.", **ADAPTER_BOUNDS["lora_alpha"])
    lora_dropout: float = option(0.0, "Dropout on the adapter's input.", **ADAPTER_BOUNDS["lora_dropout"])
    lora_target_modules: list[str] | None = option(
        None, "Adapted layers. Default: all linear projections of the recurrent block."
    )
    use_rslora: bool = option(False, "Whether to scale the update by alpha / sqrt(r).")

    def __post_init__(self):
        check_fields(self)

    @property
    def peft_config(self) -> LoraConfig | None:
        """Configuration of a new adapter in PEFT."""
        from peft import LoraConfig

        if self.adapter_name_or_path is not None:
            return None
        values = {field: getattr(self, name) for name, field in LORA_FIELDS.items()}
        return LoraConfig(**values, task_type="CAUSAL_LM")


_NOT_CHOSEN = {
    "task_type",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
}
"""Fields of a LoraConfig that a recipe does without: the last three choose modules, which `lora_target_modules` names."""


def describe_adapter(model: PeftModel) -> dict[str, Any]:
    """Return the fields of `AdapterArguments` that make a new adapter like the active one of a model.

    `lora_target_modules` is missing if all projections are adapted that are adapted by default.
    """
    from peft.tuners.lora import LoraLayer

    adapter = model.active_adapters[0]
    config, looped = model.peft_config[adapter], find_looped_model(model)
    values = {name: getattr(config, field) for name, field in LORA_FIELDS.items()}
    layers = {name: module for name, module in looped.named_modules() if isinstance(module, LoraLayer)}
    adapted = {name for name, module in layers.items() if adapter in module.lora_A}
    targets = config.target_modules
    is_pattern = isinstance(targets, str) or config.exclude_modules or config.layers_to_transform is not None
    values["lora_target_modules"] = sorted(adapted if is_pattern else targets)
    if adapted == set(looped.default_targets()):
        del values["lora_target_modules"]
    return values


def find_unsaved_fields(config: LoraConfig) -> list[str]:
    """Return the fields of a LoraConfig that have other values than by default, and that a recipe cannot hold."""
    default = type(config)()
    names = []
    for field in fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        is_known = field.name in _NOT_CHOSEN or field.name in LORA_FIELDS.values()
        if not is_known and value != usual and (value or usual):
            names.append(field.name)
    return names


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

    benchmark_limit: int | None = option(None, "Number of problems per task. Default: all.", "score", at_least=1)
    benchmark_batch_size: int = option(16, "Problems that a process decodes at a time.", "never", at_least=1)
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
    evaluate_base: bool = option(
        True,
        "Whether to evaluate the base model, too, also at `eval_num_loops`, and to measure its held-out loss.",
        "measurement",
    )
    eval_num_loops: list[int] | None = option(
        None, "Recurrence depths at which to evaluate the first task.", "measurement", **DEPTH_BOUNDS
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
        if not self.benchmarks:
            self._check_no_first_task()
        self.merge = self.merge or self.push_merged_to_hub

    def _check_no_first_task(self) -> None:
        """Raise UserError if a field evaluates the first task of `benchmarks`, which has none."""
        off = {}  # the value of each such field that switches it off
        if self.eval_num_loops:
            off["eval_num_loops"] = "null"
        if self.single_loop_accuracy:
            off["single_loop_accuracy"] = "false"
        if off:
            names = " and ".join(f"`{name}`" for name in off)
            options = " ".join(f"--{name} {value}" for name, value in off.items())
            of_sweep = ", ".join(f"{name}: {value}" for name, value in off.items())
            raise UserError(
                f"`benchmarks` must be set, because the recipe or the command line sets {names}. To evaluate nothing, also "
                f"set `{options}` (in a sweep: `measure: {{{of_sweep}}}`)."
            )


@dataclass
class SFTArguments(ScriptArguments):
    """Steps around the supervised fine-tuning."""

    single_loop_batches: int = option(
        0, "Number of evaluation batches for the loss with the adapter in one loop only.", "measurement", at_least=0
    )
    diagnose_task: str | None = option(
        None,
        "Task of which 500 reference solutions are scored with the adapter in one loop only, and by each readout.",
        "measurement",
    )
    num_sample_completions: int = option(
        1,
        "Number of held-out prompts whose completions are printed at each evaluation and after the last step. 0: none.",
        "never",
        at_least=0,
    )
    preview: int | None = option(
        None,
        "Index of a training example to print, with its trained tokens marked. With `datasets`: one of each.",
        "never",
        at_least=0,
    )


@dataclass
class RewardArguments:
    """Rewards of completions."""

    rewards: list[str] = option(["gsm8k_strict"], "Rewards, which are added by `reward_weights`.", choices=REWARDS)
