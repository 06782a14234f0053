"""The fields of a recipe that are no trainer's own: model, adapter, benchmarks, and what happens around a training."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

from loopdropout_trainer.checks import check_distinct, check_integer, check_list, check_numbers
from loopdropout_trainer.errors import UserError


TINY_OURO_PATH = Path(__file__).parent.parent / "tiny_ouro"
"""A small pretrained Ouro with its tokenizer, for trying things out without a network (`recipes/make_tiny_base.py`)."""


def setting(default: Any = MISSING, help: str = "", default_factory: Any = MISSING, **metadata: Any) -> Any:
    """Return a field of a dataclass that recipes and command lines set.

    Args:
        default, default_factory: as for a dataclass's field; without either the setting is required.
        help: what `--help` says of it.
        metadata: what else transformers' parser reads: `choices`, `nargs`, `aliases`, ...
    """
    return field(default=default, default_factory=default_factory, metadata={"help": help, **metadata})


@dataclass
class ModelArguments:
    """Which looped model, and on how many threads."""

    model_name_or_path: str = setting(help="Hub name or folder of a looped model; `tiny-ouro` is in this package.")
    model_revision: str = setting("main", "Branch, tag or commit on the Hub.")
    num_loops: int | None = setting(None, "Recurrence depth K to train at. Default: the model's own.")
    dtype: Literal["bfloat16", "float16", "float32"] = setting("bfloat16", "Of the frozen weights.")
    attn_implementation: str = setting("sdpa", "sdpa, eager, flex_attention, flash_attention_2, ...")
    chat_template: str | None = setting(None, "Name (tulu2, ouro ...) or Jinja file; else the tokenizer's.")
    num_threads: int | None = setting(None, "CPU threads of each process. Default: torch's own choice.")

    def __post_init__(self):
        if not str(self.model_name_or_path).strip():
            raise UserError("`model_name_or_path` must be a Hub name or a folder; got ''.")
        check_numbers(self)
        if self.model_name_or_path == "tiny-ouro":
            self.model_name_or_path = str(TINY_OURO_PATH)
        if self.model_revision != "main" and Path(self.model_name_or_path).is_dir():
            raise UserError(
                f"`model_revision` is of a model on the Hub; {self.model_name_or_path} is a folder: leave it out."
            )

    @property
    def base_name(self) -> str:
        """The model's name for a card: its hub name, or the name of its folder."""
        path = Path(self.model_name_or_path)
        return path.name if path.is_dir() else self.model_name_or_path

    @property
    def init_kwargs(self) -> dict[str, Any]:
        """The keywords of `from_pretrained`; pickled weights are refused, since they can run code."""
        keywords = {
            "revision": self.model_revision,
            "use_safetensors": True,
            "dtype": self.dtype,
            "attn_implementation": self.attn_implementation,
        }
        return keywords if self.num_loops is None else {**keywords, "num_loops": self.num_loops}


@dataclass
class AdapterArguments:
    """The LoRA adapter. The defaults are the paper's."""

    lora_r: int = setting(16, "Rank r of the shared update.")
    lora_alpha: int = setting(32, "alpha; the update is (alpha / r) B A.")
    lora_dropout: float = setting(0.0, "PEFT's dropout on the adapter's input.")
    lora_target_modules: list[str] | None = setting(None, "Default: all layers of the recurrent block.")
    use_rslora: bool = setting(False, "Scale the update by alpha / sqrt(r).")

    def __post_init__(self):
        check_integer("lora_r", self.lora_r, 1, 65_536)
        check_list("lora_target_modules", self.lora_target_modules)

    @property
    def lora_fields(self) -> dict[str, Any]:
        """The fields of PEFT's `LoraConfig`."""
        names = ("lora_alpha", "lora_dropout", "use_rslora")
        fields = {"r": self.lora_r} | {name: getattr(self, name) for name in names}
        targets = self.lora_target_modules
        return fields if targets is None else {**fields, "target_modules": targets}


@dataclass
class BenchmarkSources:
    """Where the problems of benchmarks come from, if not from the newest revision of their datasets on the Hub."""

    benchmark_files: dict[str, str] | None = setting(None, "{benchmark: local file} (JSON when typed).")
    benchmark_revisions: dict[str, str] | None = setting(
        None, "{benchmark: branch, tag or commit of its dataset on the Hub} (JSON when typed)."
    )


@dataclass
class BenchmarkArguments(BenchmarkSources):
    """Which benchmarks to evaluate on, by greedy generation, and how."""

    benchmarks: list[str] | None = setting(None, "Names such as `gsm8k`; `lm_eval:TASK`: one of lm-eval's.")
    benchmark_limit: int | None = setting(None, "Number of problems of each benchmark. Default: all.")
    benchmark_batch_size: int = setting(16, "Problems that one process decodes at a time.")
    decoding: Literal["eager", "compiled", "generate"] = setting(
        "eager", "`eager`, `compiled` (the same, with compiled steps) or `generate` (transformers' own)."
    )
    apply_chat_template: bool | None = setting(None, "Pose problems as chat turns. Default: per benchmark.")
    system_instruction: str | None = setting(None, "System turn, with `apply_chat_template: true`.")
    max_new_tokens: int | None = setting(None, "At most N tokens in a completion. Default: per benchmark.")
    confirm_run_unsafe_code: bool = setting(False, "Run programs without bubblewrap. Command line only.")

    def __post_init__(self):
        check_list("benchmarks", self.benchmarks)
        check_numbers(self)


@dataclass
class RunArguments(BenchmarkArguments):
    """What happens around the training; the benchmarks are evaluated before and after it."""

    compare_with: list[str] | None = setting(None, "Other rules to train from the same adapter and seed.")
    evaluate_base: bool = setting(True, "Evaluate on the benchmarks before training, too: the base model.")
    single_loop_batches: int = setting(0, "Evaluation batches with the adapter in one loop at a time.")
    single_loop_accuracy: bool = setting(False, "Evaluate with the adapter in one loop only, too.")
    depths: list[int] | None = setting(None, "Other depths to evaluate the first benchmark at.")
    merge: bool = setting(False, "Save the merged model in `output_dir`/merged.")
    push_merged_to_hub: bool = setting(False, "Merge, and push the merged model to `hub_model_id`.")
    dry_run: bool = setting(False, "Check everything, say what would be done, and stop.")

    def __post_init__(self):
        super().__post_init__()
        check_list("compare_with", self.compare_with)
        check_distinct("depths", self.depths or [])
