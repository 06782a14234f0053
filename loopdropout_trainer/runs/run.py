"""One command that trains: from its settings to trained, measured and saved adapters.

`recipes/sft.py`, `dpo.py` and `grpo.py` are this with a trainer, its arguments and its data.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import datasets
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.utils.logging import disable_progress_bar

from loopdropout_trainer import diagnostics
from loopdropout_trainer.checks import shown
from loopdropout_trainer.data import DataArguments, check_vocabulary, load_data, load_tokenizer
from loopdropout_trainer.diagnostics.diagnostic import Row
from loopdropout_trainer.diagnostics.losses import Readouts, SingleLoop, readout_rows, single_loop_rows
from loopdropout_trainer.diagnostics.rows import HELD_OUT, facts_of_batches
from loopdropout_trainer.errors import one_line, user_supplied
from loopdropout_trainer.evaluation import Benchmark, Subject, evaluate_subject, load_benchmark
from loopdropout_trainer.evaluation.answer_log import SettingsChangedError
from loopdropout_trainer.evaluation.benchmarks import DEVELOPMENT, development_benchmark
from loopdropout_trainer.evaluation.subject import run_as
from loopdropout_trainer.processes import from_main_process
from loopdropout_trainer.record.identity import (
    Identity,
    identity_key,
    library_versions,
    make_identity,
    trained_weights,
)
from loopdropout_trainer.record.measurement import BASE, NONE, TRAINING, Measurement, write_measurements
from loopdropout_trainer.runs.plan import plan_run
from loopdropout_trainer.runs.printing import TrainingProgress, print_results, show_log, title_of
from loopdropout_trainer.runs.result import (
    DIVERGED_FILE,
    RESULTS_FILE,
    WRITER,
    read_results,
    rows_of_training,
    write_results,
)
from loopdropout_trainer.saving.cards import CardScore, ModelCardFields, save_card
from loopdropout_trainer.saving.files import write_atomically
from loopdropout_trainer.saving.hub import check_merge_target, merge_and_save, push_merged_to_hub
from loopdropout_trainer.secrets import public_settings
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, RunArguments
from loopdropout_trainer.settings.recipe import (
    RecipeError,
    build,
    for_another_rule,
    method_title,
    parse_recipe,
    settings_yaml,
)
from loopdropout_trainer.training.checkpoints import NonFiniteLossError
from loopdropout_trainer.training.config import LoopDropoutArguments, LoopDropoutConfig
from loopdropout_trainer.training.distributed import shards_weights
from loopdropout_trainer.training.gate_sampling import GateSamplingMixin
from loopdropout_trainer.training.memory import device_name, memory_advice
from loopdropout_trainer.training.preflight import check_run, default_peft_config
from loopdropout_trainer.training.scores import Batch, score_readouts


logger = logging.getLogger(__name__)

SHORT = 20_000  # examples; a bar over fewer of them is gone before anyone can read it


class Run:
    """The settings of one command, and the steps from them to trained, measured and saved adapters.

    A subclass replaces what trains; the instances of its `more_arguments` are `self.more`.

    Args:
        argv: the command line without the script's name; default: the process's.
        description: for `--help_all`.
    """

    config_class: ClassVar[type[LoopDropoutArguments]] = LoopDropoutConfig
    more_arguments: ClassVar[Sequence[type]] = ()

    @property
    def trainer_class(self) -> type[GateSamplingMixin]:
        """What trains; it is imported when a training begins."""
        from loopdropout_trainer import LoopDropoutSFTTrainer

        return LoopDropoutSFTTrainer

    def __init__(self, argv: list[str] | None = None, description: str | None = None) -> None:
        parsed, self.settings = self.read(argv, description)
        self.script, self.model, self.adapter, self.data_args, config, *self.more = parsed
        self.configs = [config, *(self.config_for(rule, config) for rule in self.script.compare_with or ())]
        for each in self.configs:
            each.model_init_kwargs = {**self.model.init_kwargs, **(each.model_init_kwargs or {})}
            self.base = check_run(self.model.model_name_or_path, each)
        self.peft_config = default_peft_config(self.base, **self.adapter.lora_fields)
        check_run(self.model.model_name_or_path, config, self.peft_config)
        script, mergeable = self.script, [each.make_rule().mergeable for each in self.configs]
        merges = script.merge or script.push_merged_to_hub
        for refused, reason in (
            (merges and not mergeable[0],
             f"The updates of {config.rule!r} differ from loop to loop and cannot be merged: leave `merge` and "
             "`push_merged_to_hub` out."),
            (merges and shards_weights(config),
             "`merge` and `push_merged_to_hub` need complete weights, which ZeRO-3 and FSDP shard over the processes: leave "
             "them out, then merge the saved adapter with recipes/merge.py."),
            (script.depths and not (script.benchmarks and all(mergeable)),
             "`depths` needs `benchmarks`, and rules with one update for all loops: others run at their own depth only."),
            (script.single_loop_accuracy and not script.benchmarks,
             "`single_loop_accuracy` needs `benchmarks`: it evaluates on the first of them."),
            (config.metric_for_best_model not in (None, "loss", "eval_loss"),
             f"`metric_for_best_model` must be loss; got {shown(config.metric_for_best_model)}."),
            (getattr(config, "dataset_kwargs", None),
             "`dataset_kwargs` is for datasets that are prepared in Python: leave it out."),
            (config.rule in (script.compare_with or ()),
             f"`compare_with` must name other rules than `rule`; got {config.rule!r}."),
            (merges and Path(config.output_dir, "merged").is_file()
             or any(Path(config.output_dir, name).is_dir() for name in (RESULTS_FILE, "recipe.yaml")),
             f"`output_dir` {config.output_dir} has a file in the place of the folder merged, or a folder in that of a file."),
            (script.push_merged_to_hub and not config.hub_model_id,
             "`push_merged_to_hub` needs `hub_model_id`: the model's name on the Hub, `user/model`."),
        ):  # fmt: skip
            if refused:
                raise RecipeError(reason)
        self.check()

    @classmethod
    def read(cls, argv: list[str] | None = None, description: str | None = None) -> tuple[list[Any], dict[str, Any]]:
        """Return the dataclasses of a command line, and its settings."""
        types = (RunArguments, ModelArguments, AdapterArguments, DataArguments, cls.config_class, *cls.more_arguments)
        return parse_recipe(types, argv, description=description)

    def config_for(self, rule: str, config: LoopDropoutArguments) -> LoopDropoutArguments:
        """Return the same arguments under another rule, with those of `p` and `rule_args` that it has as well."""
        kept = for_another_rule(self.settings, rule)
        return build(self.config_class, {**kept, "rule": rule, "output_dir": f"{config.output_dir}/{rule}"})

    def check(self) -> None:
        """Refuse settings that this command cannot carry out."""

    def load(self) -> None:
        """Load tokenizer, data and benchmarks."""
        self.identities: list[Identity] = []
        self.rows: list[Measurement] = []
        self.rows_of_base: list[Measurement] = []
        config = self.configs[0]
        of_sft = {name: getattr(config, name, None) for name in ("chat_template_path", "eos_token")}
        self.tokenizer = load_tokenizer(self.model, config.trust_remote_code, **of_sft)
        check_vocabulary(self.tokenizer, self.base)
        disable_progress_bar()  # of loading weights
        if (self.data_args.num_train_examples or SHORT) < SHORT:
            datasets.disable_progress_bars()
        with config.main_process_first(desc="data preparation"):
            self.data = load_data(self.data_args, self.tokenizer, getattr(config, "max_length", None))
        for name in ("eval_on_start", "single_loop_batches", "live_diagnostics_steps"):
            if self.data.eval is None and (getattr(config, name, 0) or getattr(self.script, name, 0)):
                raise RecipeError(f"`{name}` needs rows to evaluate on: give `num_eval_examples` or `eval_files`.")
        self.benchmarks = []
        for name in self.script.benchmarks or ():
            limit, file = self.script.benchmark_limit, (self.script.benchmark_files or {}).get(name)
            if name == DEVELOPMENT:  # the held-out training rows
                self.benchmarks.append(development_benchmark(self.data.eval, self.data_args.preparation, limit))
            else:
                revision = (self.script.benchmark_revisions or {}).get(name)
                confirmed = self.script.confirm_run_unsafe_code
                self.benchmarks.append(load_benchmark(name, file, limit, confirmed, revision))

    def announce(self) -> None:
        """Print what became of the data, and what is about to be done with it."""
        print(self.data.report)
        for config in self.configs:
            plan = plan_run(self.base, self.data, config, self.peft_config, self.model.base_name)
            print(f"\n{plan}" if config is self.configs[0] else f"then   {plan.rule_and_adapter}", flush=True)
            longest = self.longest_row(config)
            if self.script.dry_run and longest and not shards_weights(config):
                advice = memory_advice(self.base, self.model.dtype, self.peft_config, config, longest)
                print(f"\nMemory: {advice}", flush=True)

    def longest_row(self, config: LoopDropoutArguments) -> int | None:
        """Return the most tokens of a row of a micro-batch; None if its rows are not its examples."""
        return self.data.report.longest or config.max_length

    def examples(self, rows: Dataset | None) -> Dataset | None:
        """Return prepared rows as the trainer takes them."""
        return rows

    def trainer_arguments(self) -> dict[str, Any]:
        """Return what the trainer takes beside model, data, tokenizer and adapter."""
        return {}

    def train(self, config: LoopDropoutArguments, base_benchmarks: dict[str, Any] | None) -> dict[str, Any]:
        """Train one adapter, measure it and save it; return its results as results.json has them, in the first process.

        `base_benchmarks` are the results before training if they are known; they are the same for every rule.
        """
        with user_supplied("The training cannot begin"):
            trainer = self.trainer_class(
                self.model.model_name_or_path,
                args=config,
                train_dataset=self.examples(self.data.train),
                eval_dataset=self.examples(self.data.eval),
                processing_class=self.tokenizer,
                peft_config=self.peft_config,
                **self.trainer_arguments(),
            )
        self.rows, checkpoint = [], self.checkpoint_for(config)
        if self.merges(config):  # before hours of training
            from_main_process(lambda: check_merge_target(Path(config.output_dir, "merged"), trainer.model))
        with trainer.only_run_in_output_dir(checkpoint):
            read = lambda: read_results(self.settings, config.output_dir, trainer.run_identity)
            results = from_main_process(read) if checkpoint else None
            if results is not None:
                if config.should_save:
                    title = title_of(results)
                    print(f"{title} is finished: its results are read from {config.output_dir}.", flush=True)
                return results
            if base_benchmarks is None:  # a new adapter changes nothing yet
                benchmarks = self.benchmarks if self.script.evaluate_base else ()
                base_benchmarks = {each.name: self.evaluate(trainer, each, "before") for each in benchmarks}
            return self.train_and_measure(trainer, checkpoint, base_benchmarks)

    def train_and_measure(
        self, trainer: GateSamplingMixin, checkpoint: str | bool | None, base_benchmarks: dict[str, Any]
    ) -> dict[str, Any]:
        config, is_main = trainer.args, trainer.accelerator.is_main_process
        diverged = Path(config.output_dir, DIVERGED_FILE)
        try:
            if not config.disable_tqdm:
                trainer.remove_callback(ProgressCallback)
                trainer.add_callback(TrainingProgress(config.rule))
            trained = trainer.train(resume_from_checkpoint=checkpoint)
            progress = trainer.progress()
            trainer.save_model()  # before anything else can go wrong
            trainer.save_state()  # the learning curve
        except NonFiniteLossError as error:
            if is_main:  # for a sweep: this rate is out, the others go on
                run = {"run_name": config.run_name, "run": trainer.run_identity}
                report = {**run, "step": trainer.state.global_step, "error": str(error)}
                write_atomically(diverged, json.dumps(report) + "\n")
            raise
        if is_main:
            diverged.unlink(missing_ok=True)
        own_memory = config is self.configs[0] or device_name() != "cpu"  # a CPU's holds what the rules before needed
        seconds, tokens = progress["step_seconds"], progress["num_tokens"]
        train_info = {
            "rule": config.rule,
            "p": config.p,
            "num_loops": trainer.num_loops,
            "steps": trainer.state.global_step,
            "examples": len(trainer.train_dataset),
            "num_tokens": tokens,
            "train_loss": trained.training_loss,
            "train_seconds": trained.metrics["train_runtime"],
            "step_seconds": seconds / trainer.state.global_step,
            "tokens_per_second": tokens / seconds if seconds else None,
            "peak_memory_gb": progress["peak_memory_gb"] if own_memory else None,
            "trainable_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            **self.adapter.lora_fields,
            **{name: getattr(config, name) for name in ("rule_args", "learning_rate", "seed")},
            "gate_seed": config.seed if config.gate_seed is None else config.gate_seed,
        }
        if rewards := [log["reward"] for log in trainer.state.log_history if "reward" in log]:
            tenth = max(1, len(rewards) // 10)
            train_info["rewards"] = [mean(rewards[:tenth]), mean(rewards[-tenth:])]
        measured = {"base_benchmarks": base_benchmarks, **self.measure(trainer)}
        if not is_main:
            return measured
        before, saved = base_benchmarks, {"adapter": config.output_dir}
        scores = {
            name: CardScore(result["score"], result["total"], before[name]["score"] if name in before else None)
            for name, result in measured["benchmarks"].items()
        }
        recipe, data = settings_yaml(self.settings), self.data.description
        card = ModelCardFields(rule=config.rule, p=config.p, recipe=recipe, data=data, results=scores)
        save_card(trainer.model, config.output_dir, config.hub_model_id, card)
        if self.merges(config):
            saved["merged model"] = str(Path(config.output_dir, "merged"))
            merge_and_save(trainer.model, saved["merged model"], self.tokenizer, card, config.hub_model_id)
        results = {
            "meta_info": {
                "model": self.model.base_name,
                "revision": self.model.model_revision,
                "model_type": trainer.model.get_base_model().config.model_type,
                "dtype": self.model.dtype,
                "attn_implementation": self.model.attn_implementation,
                "data": data,
                "num_loops": trainer.num_loops,
                "adapter_path": config.output_dir,
            },
            "train_info": train_info,
            "run_info": {
                "settings": public_settings(self.settings),
                "versions": library_versions(),
                "device": device_name(),
                "num_processes": trainer.accelerator.num_processes,
            },
            "run": trainer.run_identity,
            **measured,
            "saved": saved,
        }
        of_training = {**self.facts(trainer), "identity": identity_key(trainer.run_identity), "benchmark": TRAINING}
        self.keep(trainer.run_identity, rows_of_training(train_info, trainer.state.log_history, of_training))
        write_measurements(config.output_dir, [*self.rows_of_base, *self.rows], self.identities, WRITER)
        return write_results(results, config.output_dir)  # the last file

    def measure(self, trainer: GateSamplingMixin) -> dict[str, Any]:
        """Evaluate a trained adapter on the benchmarks, at other depths and in one loop only, and score its loops."""
        num_loops, depths = trainer.num_loops, self.script.depths or ()
        measured = {"benchmarks": {each.name: self.evaluate(trainer, each, "after") for each in self.benchmarks}}
        measured |= {"by_depth": {}, "single_loop_benchmarks": [], "readout_losses": []}
        quiet = trainer.args.disable_tqdm
        for depth in tqdm(depths, desc="depths", disable=quiet or not depths or None):  # None: without a terminal
            moment = "after" if depth == num_loops else f"after/{depth}_loops"
            with run_as(trainer.model, readout=depth):
                measured["by_depth"][str(depth)] = self.evaluate(trainer, self.benchmarks[0], moment)
        loops = range(num_loops if self.script.single_loop_accuracy else 0)
        for only in tqdm(loops, desc="adapter in one loop", disable=quiet or not loops or None):
            gates, moment = [float(loop == only) for loop in loops], f"after/only_loop_{only + 1}"
            measured["single_loop_benchmarks"].append(self.evaluate(trainer, self.benchmarks[0], moment, gates))
        if self.script.single_loop_batches and trainer.eval_dataset is not None:
            rows = self.script.single_loop_batches * trainer.args.per_device_eval_batch_size
            batches = diagnostics.evaluation_batches(trainer, rows)
            losses = diagnostics.single_loop_activation(trainer.model, batches)
            readouts = score_readouts(trainer.model, batches)
            measured["single_loop"] = {**asdict(losses), "reductions_percent": losses.reductions}
            measured["readout_losses"] = [each.loss for each in readouts]
            found = {SingleLoop.name: single_loop_rows(losses), Readouts.name: readout_rows(readouts)}
            self.keep_losses(trainer, batches, found)
        return measured

    def keep_losses(self, trainer: GateSamplingMixin, batches: list[Batch], found: dict[str, list[Row]]) -> None:
        """Keep what diagnostics have found on held-out rows, which stand in batches."""
        model = from_main_process(lambda: self.identity_of_model(trainer))
        data, loops = {"source": HELD_OUT, **facts_of_batches(batches)}, {"num_loops": trainer.num_loops}
        identity = make_identity(data=data, loops=loops) | model
        facts = {**self.facts(trainer), "benchmark": HELD_OUT, "identity": identity_key(identity)}
        for name, rows in found.items():
            self.keep(identity, [Measurement(**{**facts, "family": name, **row}) for row in rows])

    def checkpoint_for(self, config: LoopDropoutArguments) -> str | bool | None:
        """Return the checkpoint to resume from; True: the newest complete one in `output_dir`, if there is one.

        A checkpoint that is given belongs to the rule in whose folder it lies; the other rules go on from their own.
        """
        wanted = config.resume_from_checkpoint
        wanted = {"true": True, "false": None}.get(str(wanted).lower(), wanted)
        if not isinstance(wanted, str):
            return wanted
        folders = Path(wanted).resolve().parents
        others = [each for each in self.configs[1:] if Path(each.output_dir).resolve() in folders]
        return wanted if config is (others or self.configs)[0] else True

    def evaluate(
        self, trainer: GateSamplingMixin, benchmark: Benchmark, moment: str, gates: Sequence[float] | None = None
    ) -> dict[str, Any]:
        """Evaluate on a benchmark, at unit gates or at these gates [K]; what a killed run evaluated is not evaluated again."""
        folder = Path(trainer.args.output_dir, "answers", moment, benchmark.name.replace("/", "_"))
        subject, bar = (
            Subject.of(trainer.model, self.tokenizer, self.script, gates=gates),
            moment in ("before", "after"),
        )
        model = from_main_process(lambda: self.identity_of_model(trainer, moment == "before"))
        run = lambda: evaluate_subject(subject, benchmark, folder, model, progress=bar)
        try:
            result = run()
        except SettingsChangedError:  # of a run that this one takes the place of
            if trainer.accelerator.is_main_process:
                shutil.rmtree(folder)
            trainer.accelerator.wait_for_everyone()
            result = run()
        of_base = {"method": BASE, "gates": NONE, "run": None, "seed": None, "steps": None}
        identity = benchmark.identity(subject, model)
        facts = {**self.facts(trainer), **subject.place, **(of_base if moment == "before" else {})}
        self.keep(identity, result.measurements(**facts, identity=identity_key(identity)), moment == "before")
        return result.as_json()

    def identity_of_model(self, trainer: GateSamplingMixin, untrained: bool = False) -> Identity:
        """Return the parts of an identity that are the model's: as it is now, or before anything of it was trained."""
        known = {part: trainer.run_identity[part] for part in ("base", "adapter", "versions")}
        if untrained:
            return {"base": known["base"], "versions": known["versions"], "weights": trained_weights(None)}
        return {**known, "weights": trained_weights(trainer.model)}

    def facts(self, trainer: GateSamplingMixin) -> dict[str, Any]:
        """Return the fields that all measurements of a training share."""
        run = trainer.run_identity
        return {
            "writer": WRITER,
            "method": method_title({**run["adapter"], **run["settings"]}),
            "model": self.model.base_name,
            "seed": trainer.args.seed,
            "steps": trainer.state.global_step,
            "run": identity_key(run),
            "depth": trainer.num_loops,
        }

    def keep(self, identity: Identity, rows: list[Measurement], of_base: bool = False) -> None:
        """Keep measurements until the run is complete; the base's for all runs of this command."""
        self.identities.append(identity)
        (self.rows_of_base if of_base else self.rows).extend(rows)

    def merges(self, config: LoopDropoutArguments) -> bool:
        """Say whether the adapter of these arguments is to be merged: the recipe's own, not those it is compared with."""
        return config is self.configs[0] and (self.script.merge or self.script.push_merged_to_hub)


def run_all(run: Run) -> None:
    """Load what a run needs, say what it will do, do it, and print what came of it."""
    show_log()
    run.load()
    if run.configs[0].process_index == 0:
        run.announce()
    if run.script.dry_run:
        return
    results: list[dict[str, Any]] = []
    for config in run.configs:
        results.append(run.train(config, results[0]["base_benchmarks"] if results else None))
    config = run.configs[0]
    if not config.should_save:  # the other processes
        return
    print_results(results)
    if run.script.push_merged_to_hub:
        address = push_merged_to_hub(Path(config.output_dir) / "merged", config.hub_model_id, token=config.hub_token)
        print(f"Pushed to {address}")
    if "single_loop" in results[0] or results[0]["by_depth"]:
        draw([each["saved"]["adapter"] for each in results], Path(config.output_dir) / "figure")


def draw(folders: Sequence[str], path: Path) -> None:
    """Save a figure of what runs have measured; whatever fails is a warning, since the results are there."""
    try:
        from loopdropout_trainer.reports.plots import overview_figure, save_figure
        from loopdropout_trainer.reports.reading import load_table

        figure = overview_figure(load_table(folders))
        if figure is not None:
            print(f"Figure: {save_figure(figure, path)[0]}")
    except ImportError:
        print('No figure without plotnine: pip install -e ".[reports]"')
    except Exception as error:
        logger.warning("No figure: %s.", one_line(error))
