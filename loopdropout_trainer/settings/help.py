"""`--help` in a fraction of a second: fields are read from the source of their dataclasses, which nothing imports.

Importing torch, transformers and TRL takes seconds. `--help_all` waits for them, and lists TRL's own fields too.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


PACKAGE = Path(__file__).parents[1]

TRAINER_FIELDS = {
    "output_dir": "Folder of checkpoints, adapter and results.",
    "learning_rate": "Peak learning rate.",
    "lr_scheduler_type": "Schedule of the learning rate, such as `cosine_with_min_lr`; `lr_scheduler_kwargs` are its fields.",
    "warmup_steps": "Steps of warm-up; below 1: a fraction of all steps.",
    "num_train_epochs": "Passes over the data; `max_steps`, if given, counts optimizer steps instead.",
    "per_device_train_batch_size": "Examples in a micro-batch of one process.",
    "gradient_accumulation_steps": "Micro-batches in an optimizer step.",
    "max_length": "Longer examples are dropped.",
    "completion_only_loss": "Whether only the completion is trained on.",
    "assistant_only_loss": "Whether only what the assistant says is trained on.",
    "packing": "Whether several examples share a row.",
    "bf16": "Whether to train in bfloat16.",
    "optim": "Optimizer, such as `adamw_torch_fused`.",
    "weight_decay": "Weight decay.",
    "max_grad_norm": "Gradients are clipped to this norm.",
    "seed": "Seed of initial adapter, order of examples and gates.",
    "logging_steps": "Optimizer steps between two lines of the log.",
    "eval_strategy": "When to evaluate on held-out rows: no, steps or epoch.",
    "save_strategy": "When to save checkpoints: no, steps, epoch or best; see `save_steps` and `save_total_limit`.",
    "resume_from_checkpoint": "Folder of a checkpoint, or `true`: the newest whole one in `output_dir`, if there is one.",
    "report_to": "Programs that get the log, such as `wandb`; or `none`.",
    "use_cpu": "Whether to leave a GPU alone.",
    "hub_model_id": "Name on the Hub, `user/model`; with `push_to_hub` the adapter goes there.",
}
"""The fields of TRL's `SFTConfig` and transformers' `TrainingArguments` that recipes use most."""

_OF_SFT = ("max_length", "completion_only_loss", "assistant_only_loss", "packing")
OTHER_TRAINER_FIELDS = {
    "sft": {},
    "dpo": {
        "beta": "Strength with which the policy is held to the reference.",
        "loss_type": "Loss on the pairs, such as `sigmoid` (DPO), `ipo` or `hinge`.",
        "max_length": "Longer answers, with their prompts, are cut.",
        "precompute_ref_log_probs": "Whether to score the reference once, before the training.",
    },
    "grpo": {
        "num_generations": "Completions of each prompt, which are compared with one another.",
        "max_completion_length": "Most tokens of a completion.",
        "temperature": "Of the sampling; `top_p`, `top_k` and `min_p` cut it.",
        "beta": "Weight of the KL divergence from the reference; 0: no reference.",
        "loss_type": "How token losses are summed, such as `dapo` or `grpo`.",
        "num_iterations": "Passes over each set of completions.",
        "steps_per_generation": "Micro-batches for which completions are sampled at once.",
        "epsilon": "The importance ratio is clipped to 1 +- this.",
        "scale_rewards": "Whether rewards are divided by their deviation in a `group`, a `batch`, or not (`none`).",
        "reward_weights": "Weight of each reward.",
        "log_completions": "Whether to print some completions.",
        "use_vllm": "Whether vLLM samples; see TRL's `vllm_...` fields.",
    },
}
"""What trainers of TRL other than `SFTTrainer` have instead of the fields of supervised fine-tuning alone."""


@dataclass(frozen=True)
class Field:
    """A field of a settings dataclass as its source states it."""

    name: str
    type: str
    default: str | None
    help: str


def answer_help(
    description: str,
    groups: Sequence[tuple[str, str, str]],
    trains: str | bool = False,
    recipe: str = "[RECIPE.yaml]",
    argv: list[str] | None = None,
) -> None:
    """Print a script's fields and end the process, if its command line asks for that; to be called before other imports.

    Args:
        description: the script's docstring.
        groups: (title, source file, name of the dataclass in it); files are relative to the package.
        trains: whose of TRL's trainers' fields the script takes, too: `sft` (or True), `dpo` or `grpo`.
        recipe: what the first word of the command line may be.
        argv: the process's `sys.argv`.
    """
    argv = sys.argv if argv is None else argv
    words = argv[1 : argv.index("--") if "--" in argv else None]
    if "--help_all" in words:  # for the parser that knows everything
        argv[1:] = ["--help"]
    elif {"--help", "-h"} & set(words):
        print(help_text(description, groups, trains, recipe, Path(argv[0]).name))
        sys.exit(0)


def help_text(
    description: str, groups: Sequence[tuple[str, str, str]], trains: str | bool, recipe: str, script: str = "SCRIPT"
) -> str:
    """Return the text that `--help` prints; see `answer_help`."""
    parts = [f"usage: {script} {recipe} [--field value ...]", description.strip()]
    for title, file, name in groups:
        parts.append("\n".join([f"{title}:", *map(_entry, fields_of(PACKAGE / file, name))]))
    if trains:
        method = "sft" if trains is True else trains
        shared = {name: text for name, text in TRAINER_FIELDS.items() if method == "sft" or name not in _OF_SFT}
        texts = {**shared, **OTHER_TRAINER_FIELDS[method]}
        fields = [Field(name, "", None, text) for name, text in texts.items()]
        parts.append("\n".join([f"Training (TRL's `{method.upper()}Config`; those used most):", *map(_entry, fields)]))
        parts.append("`--help_all` lists all fields, with TRL's and transformers' own; it takes some seconds.")
    return "\n\n".join(parts)


def fields_of(file: Path, name: str) -> list[Field]:
    """Return the fields of the dataclass `name`, without those that it inherits.

    Raises:
        LookupError: if the file has no such class.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [
                _field(line, constants)
                for line in node.body
                if isinstance(line, ast.AnnAssign) and _is_field_call(line.value)
            ]
    raise LookupError(f"{file} has no class {name}")


def _is_field_call(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field"


def _field(line: ast.AnnAssign, constants: dict[str, ast.expr]) -> Field:
    given = {keyword.arg: keyword.value for keyword in line.value.keywords}
    metadata = given.get("metadata", ast.Dict([], []))
    about = {key.value: value for key, value in zip(metadata.keys, metadata.values, strict=True)}
    default = given.get("default", given.get("default_factory"))
    if isinstance(default, ast.Lambda):
        default = default.body
    shown = None
    if default is not None and not (isinstance(default, ast.Constant) and default.value in (None, "")):
        shown = str(_text(default, constants)).strip("'")
    return Field(line.target.id, ast.unparse(line.annotation), shown, _text(about.get("help"), constants))


def _text(node: ast.expr | None, constants: dict[str, ast.expr]) -> str:
    """Return a literal's text; names in an f-string are looked up among the file's constants."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name) and node.id in constants:
        return _text(constants[node.id], constants)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants)
    return ast.unparse(node)


def _entry(field: Field) -> str:
    text = field.help + (f" (default: {field.default})" if field.default is not None else "")
    required = (
        field.default is None and field.type and "None" not in field.type and "default" not in field.help.lower()
    )
    text += " Required." if required and field.type != "str" else ""
    return f"  --{field.name}\n" + textwrap.fill(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
