"""The fields of a recipe that are no trainer's own: model, adapter, benchmarks, and what happens around a training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopdropout_trainer.looped.model import MOST_LOOPS
from loopdropout_trainer.settings.ranges import check_distinct, check_integer, check_list, check_number, shown


TINY_OURO_PATH = Path(__file__).parent.parent / "tiny_ouro"
"""A small pretrained Ouro with its tokenizer, for trying things out without a network (`recipes/make_tiny_base.py`)."""


@dataclass
class ModelArguments:
    """Which looped model to train."""

    model_name_or_path: str = field(
        metadata={
            "help": "Hub name or local folder of a looped model; `tiny-ouro` is the small one inside this package."
        }
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the Hub."})
    num_loops: int | None = field(
        default=None, metadata={"help": "Recurrence depth K to train at. Default: the model's own."}
    )
    dtype: str = field(
        default="bfloat16",
        metadata={
            "help": "Dtype of the frozen weights; adapters are float32.",
            "choices": ["bfloat16", "float16", "float32"],
        },
    )
    attn_implementation: str = field(
        default="sdpa", metadata={"help": "Attention kernel: sdpa, eager, flex_attention, flash_attention_2, ..."}
    )
    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "Chat template instead of the tokenizer's own: a name such as tulu2, ouro or nanbeige, or a Jinja file."
        },
    )

    def __post_init__(self):
        if not isinstance(self.model_name_or_path, str) or not self.model_name_or_path.strip():
            raise ValueError(
                f"`model_name_or_path` must be a Hub name or a folder; got {shown(self.model_name_or_path)}."
            )
        if self.num_loops is not None:
            check_integer("num_loops", self.num_loops, 1, MOST_LOOPS)
        if self.model_name_or_path == "tiny-ouro":
            self.model_name_or_path = str(TINY_OURO_PATH)

    @property
    def base_name(self) -> str:
        """The model's name for a card: its hub name, or the name of its folder."""
        path = Path(self.model_name_or_path)
        return path.name if path.is_dir() else self.model_name_or_path

    @property
    def init_kwargs(self) -> dict[str, Any]:
        """The keywords of `from_pretrained`; pickled weights are refused, since they can run code."""
        fields = {
            "revision": self.model_revision,
            "dtype": self.dtype,
            "attn_implementation": self.attn_implementation,
            "num_loops": self.num_loops,
            "use_safetensors": True,
        }
        return {key: value for key, value in fields.items() if value is not None}


def check_depths(depths: list[int] | None) -> None:
    """Raise ValueError unless recurrence depths, if there are any, are different integers from 1 to MOST_LOOPS."""
    for depth in depths or ():
        check_integer("depths", depth, 1, MOST_LOOPS)
    check_distinct("depths", depths or [])


@dataclass
class AdapterArguments:
    """The LoRA adapter. The defaults are the paper's."""

    lora_r: int = field(default=16, metadata={"help": "Rank r of the shared update."})
    lora_alpha: int = field(default=32, metadata={"help": "alpha; the update is (alpha / r) B A."})
    lora_dropout: float = field(default=0.0, metadata={"help": "PEFT's dropout on the adapter's input."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Linear layers to adapt. Default: all in the recurrent block."}
    )
    use_rslora: bool = field(default=False, metadata={"help": "Scale the update by alpha / sqrt(r)."})

    def __post_init__(self):
        check_integer("lora_r", self.lora_r, 1, 65_536)
        check_number("lora_alpha", self.lora_alpha, above=True)
        check_number("lora_dropout", self.lora_dropout, most=1, below=True)
        check_list("lora_target_modules", self.lora_target_modules)
        if self.lora_target_modules is not None and not self.lora_target_modules:
            raise ValueError("`lora_target_modules` must name one or more linear layers; got [].")

    @property
    def lora_fields(self) -> dict[str, Any]:
        """The fields of PEFT's `LoraConfig`."""
        fields = {
            "r": self.lora_r,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "target_modules": self.lora_target_modules,
            "use_rslora": self.use_rslora,
        }
        return {key: value for key, value in fields.items() if value is not None}


@dataclass
class BenchmarkArguments:
    """Which benchmarks to evaluate on, by greedy generation, and how."""

    benchmarks: list[str] | None = field(
        default=None,
        metadata={
            "help": "Benchmarks to evaluate on, such as `metamath_gsm8k`; `lm_eval:TASK` for any task of lm-eval."
        },
    )
    benchmark_files: dict[str, str] | None = field(
        default=None,
        metadata={"help": "Local files or folders of benchmarks, as a mapping name: path (JSON on the command line)."},
    )
    benchmark_limit: int | None = field(
        default=None, metadata={"help": "Number of problems of each benchmark. Default: all."}
    )
    benchmark_batch_size: int = field(
        default=16, metadata={"help": "Problems that one process decodes at a time; no completion depends on it."}
    )
    decoding: str = field(
        default="eager",
        metadata={
            "help": "How completions are decoded: `eager`, `compiled` (the same, with compiled steps) or `generate` "
            "(transformers' own).",
            "choices": ["eager", "compiled", "generate"],
        },
    )
    apply_chat_template: bool | None = field(
        default=None,
        metadata={"help": "Pose every problem in the chat template. Default: as each benchmark's protocol has it."},
    )
    system_instruction: str | None = field(
        default=None, metadata={"help": "Text of a system turn, with `apply_chat_template: true`."}
    )
    max_new_tokens: int | None = field(
        default=None,
        metadata={"help": "Greatest length of a completion in tokens. Default: as each benchmark's protocol has it."},
    )

    confirm_run_unsafe_code: bool = field(
        default=False,
        metadata={
            "help": "Run the programs that the model writes for code benchmarks also where bubblewrap cannot contain them. "
            "Command line only."
        },
    )

    def __post_init__(self):
        check_list("benchmarks", self.benchmarks)
        check_integer("benchmark_batch_size", self.benchmark_batch_size)
        if self.benchmark_limit is not None:
            check_integer("benchmark_limit", self.benchmark_limit)
        if self.max_new_tokens is not None:
            check_integer("max_new_tokens", self.max_new_tokens)
        if self.decoding not in ("eager", "compiled", "generate"):
            raise ValueError(f"`decoding` must be eager, compiled or generate; got {self.decoding!r}.")


@dataclass
class RunArguments(BenchmarkArguments):
    """What happens around the training; the benchmarks are evaluated before and after it."""

    compare_with: list[str] | None = field(
        default=None,
        metadata={"help": "Other rules to train from the same initial adapter, data order and seed, for comparison."},
    )
    evaluate_base: bool = field(
        default=True, metadata={"help": "Evaluate on the benchmarks before training, too: the base model."}
    )
    single_loop_batches: int = field(
        default=0,
        metadata={
            "help": "Evaluation batches on which the adapter is activated in one loop at a time; 0: leave it out."
        },
    )
    single_loop_accuracy: bool = field(
        default=False,
        metadata={"help": "Evaluate on the first benchmark with the adapter in one loop only, too, for each loop."},
    )
    depths: list[int] | None = field(
        default=None,
        metadata={
            "help": "Recurrence depths at which the first benchmark is evaluated after training, beside the training depth.",
            "nargs": "+",
        },
    )
    merge: bool = field(default=False, metadata={"help": "Save the merged model in `output_dir`/merged."})
    push_merged_to_hub: bool = field(
        default=False, metadata={"help": "Merge, and push the merged model to `hub_model_id`."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Check everything, say what would be done, and stop."})

    def __post_init__(self):
        super().__post_init__()
        check_list("compare_with", self.compare_with)
        check_integer("single_loop_batches", self.single_loop_batches, 0)
        check_depths(self.depths)


@dataclass
class RewardArguments:
    """What completions are rewarded for, in reinforcement learning."""

    rewards: list[str] = field(
        default_factory=lambda: ["gsm8k_strict"],
        metadata={
            "help": "Rewards, which are added by `reward_weights`: `gsm8k_strict`, `gsm8k_format`, `last_number` or "
            "`math_verify`, each 1 or 0 (docs/reinforcement.md).",
            "nargs": "+",
        },
    )

    def __post_init__(self):
        check_list("rewards", self.rewards)
        if not self.rewards:
            raise ValueError("`rewards` must name one or more rewards; got [].")
