"""Evaluate a base model, a merged model or adapters on tasks, and print one table.

    loopdropout evaluate outputs/quickstart outputs/quickstart/merged tiny-ouro
    loopdropout evaluate outputs/quickstart --eval_num_loops 2 4 8
    loopdropout evaluate outputs/quickstart --gates 1-1-1-1 single_loop
    loopdropout evaluate evaluation/tulu2.yaml none lora=outputs/a outputs/b

Recipes of trainings are accepted too, and their training fields are ignored.
Without a recipe, the recipe of the first adapter is used. The results are added
to `results.jsonl` in `output_dir`. The same command continues an interrupted
evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from accelerate import PartialState

from loopdropout_trainer.arguments import AdapterArguments, BenchmarkArguments, ModelArguments, SFTArguments, option
from loopdropout_trainer.data import DataArguments
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.evaluation import LoopedLM, evaluate_tasks, load_benchmarks
from loopdropout_trainer.files import model_path
from loopdropout_trainer.gate_state import expand_gates
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.recipe import dump_recipe, name_folders, parse, recipe_dict
from loopdropout_trainer.results import RECIPE_FILE, UNCOMPARED, find_difference, write_results
from loopdropout_trainer.saving.cards import find_adapter
from loopdropout_trainer.saving.loading import is_adapter, load_model, load_saved_tokenizer
from loopdropout_trainer.training.config import LoopDropoutConfig


@dataclass
class EvaluationArguments(BenchmarkArguments):
    """The adapters, the depths and gates, and the tasks."""

    first_words = "[RECIPE.yaml] [MODEL ...]"

    benchmarks: list[str] = option([], "Tasks of the package or lm-eval, `own_benchmarks`, or task files (.yaml).")
    adapter: list[str] = option(
        ["none"], "Adapters and models as PATH or NAME=PATH, folders or Hub names. `none` is the base model."
    )
    eval_num_loops: list[int] | None = option(
        None, "Recurrence depths. Default: `num_loops`, or the depth of the training."
    )
    gates: list[str] | None = option(
        None, "Gates such as 1-0-0-0, or `single_loop` for each loop alone. Default: unit gates."
    )
    readout: int | None = option(None, "Loop (from 1) whose readout gives the logits. Default: the last loop.")
    apply_chat_template: bool | None = option(
        None, "Whether prompts are turns of a chat. Default: as each task defines."
    )
    system_instruction: str | None = option(None, "System turn of the chat.")
    max_new_tokens: int | None = option(None, "Maximum number of tokens of an answer. Default: as each task defines.")
    averages: dict[str, list[str]] | None = option(
        None, "Averages of tasks in the table, as a mapping name: [task, ...] (JSON)."
    )
    output_dir: str = option("outputs/evaluation", "Folder of the results.")
    use_cpu: bool = option(False, "Whether to run on the CPU only.")

    def __post_init__(self):
        super().__post_init__()
        if not self.benchmarks:
            raise UserError("`benchmarks` must name at least one task, such as gsm8k.")
        if len(self.adapters) < len(self.adapter):
            raise UserError(
                f"`adapter` must give each adapter its own name, as NAME=PATH, got {', '.join(self.adapter)}."
            )

    @property
    def adapters(self) -> dict[str, str]:
        """Path of each adapter by its name. The base model has the path `none`."""
        adapters = {}
        for text in self.adapter:
            name, _, path = text.rpartition("=")
            adapters[name or ("base" if path == "none" else Path(path).resolve().name)] = path
        return adapters


@dataclass
class BaseArguments(ModelArguments):
    """The base model."""

    model_name_or_path: str | None = option(
        None, "Hub name or folder of the base model. Default: as in adapter_config.json."
    )


def main(argv: list[str] | None = None) -> None:
    arguments = args, model_args = parse(
        (EvaluationArguments, BaseArguments),
        name_folders(argv, "adapter"),
        __doc__,
        unread_types=(SFTArguments, AdapterArguments, DataArguments, LoopDropoutConfig),
    )
    state = PartialState(cpu=args.use_cpu or not torch.accelerator.is_available())
    compared = ModelArguments.__dataclass_fields__
    if difference := find_difference(args.output_dir, recipe_dict(model_args), UNCOMPARED | {"num_loops"}, compared):
        raise UserError(f"{args.output_dir} holds results of another model: {difference}. Set another `output_dir`.")

    # Tasks, adapters and models
    tasks = load_benchmarks(args.benchmarks, args.own_benchmarks, args.benchmark_revisions, args.benchmark_limit)
    with state.main_process_first():
        models = {name: find_model(name, path) for name, path in args.adapters.items()}

    # Evaluation
    rows = []
    for name, (folder, facts) in models.items():
        base, options = facts.get("model", model_args.model_name_or_path or folder), model_args.load_kwargs
        if "model" in facts:
            options["revision"] = None
        model = load_model(base, adapter=folder, device=state.device, **options)
        looped = find_looped_model(model)
        tokenizer = load_saved_tokenizer(folder or base, model, options["revision"], model_args.chat_template)
        for num_loops in args.eval_num_loops or [looped.num_loops]:
            for gates in expand_gates(args.gates, num_loops) if folder else [None]:
                lm = LoopedLM(
                    model,
                    tokenizer,
                    batch_size=args.benchmark_batch_size,
                    num_loops=num_loops,
                    gates=gates,
                    readout=args.readout,
                )
                results = evaluate_tasks(
                    lm,
                    tasks,
                    limit=args.benchmark_limit,
                    cache_dir=Path(args.output_dir, "cache"),
                    output_dir=Path(args.output_dir, "samples", name),
                    allow_unsafe_code=args.allow_unsafe_code,
                    apply_chat_template=args.apply_chat_template,
                    system_instruction=args.system_instruction,
                    max_new_tokens=args.max_new_tokens,
                )
                results = [{**facts, **row} for row in results]
                for row in results:
                    if "samples" in row:
                        row["samples"] = f"samples/{name}/{row['samples']}"
                if state.is_main_process:
                    write_results(args.output_dir, results)
                rows += [{**row, "name": name} for row in results if "group" not in row]
        del model

    # Table
    if state.is_main_process:
        path = Path(args.output_dir, RECIPE_FILE)
        if not path.exists():
            dump_recipe(recipe_dict(*arguments), path)
        print_results(rows, args.averages or {})
        print(f"\nThe results are in {args.output_dir}")


def find_model(name: str, path: str) -> tuple[Path | None, dict]:
    """Return the folder of an adapter, or None for a model, and the columns of its results."""
    if path == "none":
        return None, {"method": "base model"}
    if is_adapter(model_path(path)):
        return find_adapter(path, name)
    return None, {"method": name, "model": path}


def print_results(rows: list[dict], averages: dict[str, list[str]]) -> None:
    """Print a table with a line for each task or average, and a column for each adapter, depth and gates."""
    from _tables import print_table

    results = pd.DataFrame(rows)
    lines = results["task"] + (", " + results["metric"]).replace(", accuracy", "")
    columns = results["name"] + ", K = " + results["num_loops"].astype(str)
    columns += (", " + results["gates"]).replace([", unit", ", none"], "")
    table = results.pivot_table("value", lines, columns, sort=False)
    for title, tasks in averages.items():
        table.loc[title] = table.reindex(tasks).mean(skipna=False)
    print_table("Results", table.rename_axis("task"), "{:.2f}")


if __name__ == "__main__":
    run_script(main)
