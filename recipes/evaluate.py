"""Evaluate a base model, a merged model or adapters on tasks, and print one table.

    loopdropout evaluate outputs/quickstart outputs/quickstart/merged tiny-ouro
    loopdropout evaluate outputs/quickstart --eval_num_loops 2 4 8
    loopdropout evaluate outputs/quickstart --gates 1-1-1-1 single_loop
    loopdropout evaluate outputs/quickstart --dry_run true
    loopdropout evaluate evaluation/tulu2.yaml none lora=outputs/a outputs/b

Recipes of trainings are accepted too, and their training fields are ignored. The
results then go to the first adapter, or to `--output_dir`.
Without a recipe, the recipe of the first adapter is used. The results are added
to `results.jsonl` in `output_dir`, or in its subfolder `evaluation` if it is the
folder of a training. The same command continues an interrupted evaluation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from loopdropout_trainer.data import DataArguments
from loopdropout_trainer.errors import UserError, count, join_command, run_script
from loopdropout_trainer.evaluation import LoopedLM, asks_in_chat, check_programs, evaluate_tasks, load_benchmarks
from loopdropout_trainer.evaluation.development import check_no_development
from loopdropout_trainer.evaluation.plan import (
    Setting,
    list_settings,
    load_planned_tasks,
    print_evaluation_plan,
    print_plan_without_models,
)
from loopdropout_trainer.gate_texts import expand_gates
from loopdropout_trainer.jobs.runs import TRAINING_TYPES
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.results.recipe_changes import UNCOMPARED, find_difference
from loopdropout_trainer.results.run_files import (
    BASE_MODEL,
    EVALUATION_FOLDER,
    RECIPE_FILE,
    measurement_folder,
    read_recipe,
    write_results,
)
from loopdropout_trainer.results.sweep_folder import name_in_sweep
from loopdropout_trainer.saving.command_line import name_sources, split_name
from loopdropout_trainer.saving.facts import Source
from loopdropout_trainer.saving.loading import ModelLoader
from loopdropout_trainer.saving.source import find_base, find_source
from loopdropout_trainer.settings.arguments import DEPTH_BOUNDS, BenchmarkArguments, SourceArguments, option
from loopdropout_trainer.settings.recipe import build, dump_recipe, read_settings, without_option
from loopdropout_trainer.terminal import print_sentences


@dataclass
class EvaluationArguments(BenchmarkArguments):
    """The adapters, the depths and gates, and the tasks."""

    first_words = "[RECIPE.yaml] [MODEL ...]"
    replaces = {"num_loops": "eval_num_loops"}  # a depth of the command line counts instead of those of the recipe

    benchmarks: list[str] = option([], "Tasks of the package or lm-eval, `own_benchmarks`, or task files (.yaml).")
    adapter: list[str] = option(
        ["none"],
        "Adapters and models as PATH or NAME=PATH, folders or Hub names (`user/name@branch`). `none` is "
        "the base model.",
    )
    eval_num_loops: list[int] | None = option(
        None, "Recurrence depths. Default: `num_loops`, or the depth of the training.", **DEPTH_BOUNDS
    )
    gates: list[str] | None = option(
        None, "Gates such as 1-0-0-0, or `single_loop` for each loop alone. Default: unit gates."
    )
    readout: int | None = option(
        None, "Loop (from 1) whose readout gives the logits. Default: the last loop.", at_least=1
    )
    apply_chat_template: bool | None = option(
        None, "Whether prompts are turns of a chat. Default: as each task defines."
    )
    system_instruction: str | None = option(None, "System turn of the chat.")
    max_new_tokens: int | None = option(
        None, "Maximum number of tokens of an answer. Default: as each task defines.", at_least=1
    )
    averages: dict[str, list[str]] | None = option(
        None, "Averages of tasks in the table, as a mapping name: [task, ...] (JSON)."
    )
    output_dir: str = option("outputs/evaluation", "Folder of the results.")
    use_cpu: bool = option(False, "Whether to run on the CPU only.")
    dry_run: bool = option(False, "Print the models, the depths, the problems and the existing results, and stop.")

    def __post_init__(self):
        super().__post_init__()
        if not self.benchmarks:
            raise UserError("`benchmarks` must name at least one task, such as gsm8k or one of `own_benchmarks`.")
        check_no_development(self.benchmarks)
        if len(self.adapters) < len(self.adapter):
            raise UserError(
                f"`adapter` must give each adapter its own name, as NAME=PATH, got {', '.join(self.adapter)}."
            )

    @property
    def adapters(self) -> dict[str, str]:
        """Path of each adapter by its name. The base model has the path `none`."""
        adapters = {}
        for text in self.adapter:
            name, path = split_name(text)
            if not name:
                name = "base" if path == "none" else name_in_sweep(Path(path).resolve()) or Path(path).resolve().name
            adapters[name] = path
        return adapters


ARGUMENTS = (EvaluationArguments, SourceArguments)


def main(argv: list[str] | None = None) -> None:
    # Settings
    unread = (*TRAINING_TYPES, DataArguments)
    settings = read_settings(ARGUMENTS, name_sources(argv, "adapter"), __doc__, unread)
    args, model_args = build(ARGUMENTS, settings)
    args.output_dir = settings["output_dir"] = measurement_folder(args.output_dir, EVALUATION_FOLDER)
    state = PartialState(cpu=args.use_cpu or not torch.accelerator.is_available())

    # Models and tasks
    sources = find_sources_or_plan(args, model_args, state)
    check_runs(args, sources.values(), model_args.num_loops)
    check_conversations(args, sources.values(), model_args.chat_template)
    settings |= describe_base(sources, settings)
    check_folder(args.output_dir, settings)
    tasks = load_benchmarks(args.benchmarks, args.own_benchmarks, args.benchmark_revisions, args.benchmark_limit)
    check_programs(tasks, args.allow_unsafe_code)  # before a model is loaded
    if args.dry_run:
        if state.is_main_process:
            planned = plan_settings(args, sources, model_args.num_loops)
            words = without_option(sys.argv[1:] if argv is None else argv, "dry_run")
            command = join_command("evaluate", *words)
            print_evaluation_plan(planned, tasks, args.benchmark_limit, args.max_new_tokens, args.output_dir, command)
        return

    # Evaluation, with the models over one base model in a row
    loader = ModelLoader(state.device, model_args.attn_implementation)
    rows, seconds = [], 0.0
    in_order = sorted(sources, key=lambda name: (sources[name].base, sources[name].revision or ""))
    for number, name in enumerate(in_order, start=1):
        source = sources[name]
        if state.is_main_process:
            place = f"{number} of {len(sources)}: " if len(sources) > 1 else ""
            print_sentences(f"{place}{source.describe()}")
            system_turn = source.describe_system_turn()
            is_chat = any(asks_in_chat(task, args.apply_chat_template) for task in tasks)
            if is_chat and args.system_instruction is None and system_turn:
                print_sentences(f"{system_turn} Add `--system_instruction` to evaluate with it.")
        model = loader.load(source, model_args.dtype or source.dtype or "bfloat16", model_args.num_loops)
        tokenizer = source.load_tokenizer(model_args.chat_template)
        start = time.monotonic()  # after the model is loaded
        for results in evaluate_source(name, source, model, tokenizer, tasks, args):
            if state.is_main_process:
                write_results(args.output_dir, results)
            rows += [{**row, "name": name} for row in results if "group" not in row]
        seconds += time.monotonic() - start
        del model

    # Table
    if state.is_main_process:
        save_recipe(args.output_dir, settings)
        rows.sort(key=lambda row: [*sources].index(row["name"]))
        from loopdropout_trainer.reports.printing import print_evaluation

        print_evaluation(rows, args.averages or {})
        print_sentences("", describe_time(rows, seconds), f"The results are in {args.output_dir}")


def evaluate_source(
    name: str,
    source: Source,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task | Group],
    args: EvaluationArguments,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the results of a model at each depth and under each of the gates."""
    columns = result_columns(name, args.adapters[name], source)
    for num_loops in find_depths(args, source, find_looped_model(model).num_loops):
        for gates in expand_gates(own_gates(args, source), num_loops):
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
            for row in results:
                if "samples" in row:
                    row["samples"] = f"samples/{name}/{row['samples']}"
            yield [{**columns, "limit": args.benchmark_limit, **row} for row in results]


def plan_settings(args: EvaluationArguments, sources: dict[str, Source], num_loops: int | None) -> list[Setting]:
    """Return the depths and gates of each model in the plan."""
    settings = []
    for name, source in sources.items():
        columns = {**result_columns(name, args.adapters[name], source), "readout": args.readout}
        depths = find_depths(args, source, num_loops)
        settings += list_settings(name, columns, depths, own_gates(args, source), source.is_adapter)
    return settings


def find_sources_or_plan(
    args: EvaluationArguments, model_args: SourceArguments, state: PartialState
) -> dict[str, Source]:
    """Return the source of each model. A dry run without one of them prints the rest of the plan before the error."""
    try:
        with state.main_process_first():
            return find_sources(args, model_args)
    except UserError:
        if args.dry_run and state.is_main_process:
            plan_without_models(args, model_args.num_loops)
        raise


def plan_without_models(args: EvaluationArguments, num_loops: int | None) -> None:
    """Print the part of the plan that needs no model. A task whose data cannot be loaded, either, has the reason."""
    tasks = load_planned_tasks(
        args.benchmarks, args.own_benchmarks or {}, args.benchmark_revisions, args.benchmark_limit
    )
    depths = args.eval_num_loops or [num_loops]
    print_plan_without_models(
        [*args.adapters],
        depths,
        args.gates or (),
        tasks,
        args.benchmark_limit,
        args.max_new_tokens,
        args.output_dir,
    )


def find_depths(args: EvaluationArguments, source: Source, num_loops: int | None) -> list[int | None]:
    """Return the depths that a model is measured at. `num_loops`: the option. None: only the loaded model tells its depth."""
    return args.eval_num_loops or [num_loops or source.num_loops]


def find_sources(args: EvaluationArguments, model_args: SourceArguments) -> dict[str, Source]:
    """Return the source of each model by its name in the table. `none` is the base model of the first adapter."""
    named = {name: find_source(path) for name, path in args.adapters.items() if path != "none"}
    adapters = [source for source in named.values() if source.is_adapter]
    base, revision = model_args.model_name_or_path, model_args.model_revision
    sources = {}
    for name, path in args.adapters.items():
        if path != "none":
            source = named[name]
            sources[name] = source.with_base(base, revision) if source.is_adapter else source
        elif base is not None:
            source = find_source(base, revision=revision)
            dtypes = [adapter.dtype for adapter in adapters if adapter.dtype]
            sources[name] = replace(source, dtype=source.dtype or next(iter(dtypes), None))  # as `find_base`
        elif adapters:
            sources[name] = find_base(adapters[0].with_base(None, revision))
        else:
            raise UserError(
                "`model_name_or_path` must be set, because `none` is the base model and no adapter names one."
            )
    return sources


def check_runs(args: EvaluationArguments, sources: Collection[Source], num_loops: int | None) -> None:
    """Raise UserError if a model does not run at one of the depths, or if `gates` are given and no model is an adapter."""
    for source in sources:
        gates = own_gates(args, source)
        for depth in find_depths(args, source, num_loops):
            source.check_run(depth, *gates, listed=args.eval_num_loops)
    if args.gates and not any(own_gates(args, source) for source in sources):
        first = next(iter(sources))
        first.check_run(None, *args.gates)  # raises the error about a model without an adapter


def own_gates(args: EvaluationArguments, source: Source) -> list[str]:
    """Return the gates that a source runs with. A model has none, so that it can stand next to adapters in one table."""
    if source.gates == "none" or args.gates is None:
        return []
    return args.gates


def result_columns(name: str, path: str, source: Source) -> dict[str, Any]:
    """Return the columns that identify the results of a model. A training that is not known has its name in the table."""
    if path == "none":
        return {"method": BASE_MODEL}
    is_known = source.is_adapter and source.columns["seed"] is not None
    return {**source.columns, "method": source.columns["method"] if is_known else name}


def describe_base(sources: dict[str, Source], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the base model, which all results in a folder share, as far as they are known."""
    first = next((source for source in sources.values() if source.is_adapter), next(iter(sources.values())))
    known = first.recipe or {"model_name_or_path": first.base, "model_revision": first.revision}
    base = {}
    for name in SourceArguments.__dataclass_fields__:
        value = settings.get(name)
        if value is None:
            value = known.get(name)
        if value is not None:
            base[name] = value
    return base


def save_recipe(folder: str, settings: dict[str, Any]) -> None:
    """Save the settings of the first evaluation in a folder, with the tasks of all evaluations there."""
    saved = read_recipe(folder)
    if not saved:
        dump_recipe(settings, Path(folder, RECIPE_FILE))
        return
    tasks = [*dict.fromkeys([*saved.get("benchmarks", ()), *settings["benchmarks"]])]
    own_tasks = {**(saved.get("own_benchmarks") or {}), **(settings.get("own_benchmarks") or {})}
    merged = {**saved, "benchmarks": tasks}
    if own_tasks:
        merged["own_benchmarks"] = own_tasks
    if merged != saved:
        dump_recipe(merged, Path(folder, RECIPE_FILE))


def describe_time(rows: list[dict], seconds: float) -> str:
    """Return the number of problems of some results, and the time that they took, from which the time of others follows."""
    numbers = {(row["name"], row["task"], row["num_loops"], row["gates"]): row["n"] for row in rows}
    duration = timedelta(seconds=round(seconds))
    return f"{count(sum(numbers.values()), 'problem')} in {duration}, without loading (kept answers take no time)"


def check_folder(folder: str, settings: dict[str, Any]) -> None:
    """Raise UserError if a folder holds results of another base model."""
    difference = find_difference(
        folder, settings, ignored=UNCOMPARED | {"num_loops"}, fields=SourceArguments.__dataclass_fields__
    )
    if difference:
        raise UserError(f"{folder} holds results of another model: {difference}. Set another `output_dir`.")


def check_conversations(args: EvaluationArguments, sources: Iterable[Source], chat_template: str | None) -> None:
    """Raise UserError if prompts shall be turns of a chat for a model that was trained on texts."""
    if not args.apply_chat_template:
        return
    for source in sources:
        tokenizer = source.load_tokenizer(chat_template)
        text = source.choose_prompt_format(tokenizer, chat_template).text
        if text is not None and tokenizer.chat_template:
            raise UserError(
                f"`apply_chat_template` must not be true for {source.name}, because it was trained on prompts {text!r}. Set "
                "`chat_template` to evaluate it with conversations anyway."
            )


if __name__ == "__main__":
    run_script(main)
