"""One command that trains: from its settings to trained, measured and saved adapters.

`recipes/sft.py`, `dpo.py` and `grpo.py` are this with a trainer, its arguments and its data.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import datasets
import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.utils.logging import disable_progress_bar

from loopdropout_trainer.checks import check_choice
from loopdropout_trainer.data import DataArguments, check_vocabulary, load_data, load_tokenizer
from loopdropout_trainer.diagnostics import Context
from loopdropout_trainer.diagnostics.losses import Readouts, SingleLoop
from loopdropout_trainer.diagnostics.rows import HELD_OUT, facts_of_batches
from loopdropout_trainer.errors import one_line, public_settings, user_supplied
from loopdropout_trainer.evaluation import Benchmark, Subject, evaluate_subject
from loopdropout_trainer.evaluation.benchmark import SettingsChangedError
from loopdropout_trainer.evaluation.benchmarks import DEVELOPMENT, check_development, development_benchmark, load_from
from loopdropout_trainer.evaluation.results import answers_folder
from loopdropout_trainer.evaluation.subject import run_as
from loopdropout_trainer.processes import from_main_process, show_log
from loopdropout_trainer.record.identity import (
    Identity,
    differences,
    identity_key,
    library_versions,
    read_identity,
    trained_weights,
)
from loopdropout_trainer.record.measurement import (
    BASE,
    DIVERGED_FILE,
    NONE,
    TRAINING,
    Measurement,
    read_measurements,
)
from loopdropout_trainer.runs.plan import plan_run
from loopdropout_trainer.runs.printing import TrainingProgress, print_results
from loopdropout_trainer.runs.result import (
    EXPECTED_FILE,
    FORMER_FILE,
    RUN_FILE,
    WRITER,
    Result,
    finished_result,
    is_of_former_version,
    write_result,
)
from loopdropout_trainer.saving.cards import ModelCardFields, save_card
from loopdropout_trainer.saving.files import read_json, write_json
from loopdropout_trainer.saving.hub import check_merge_target, merge_and_save, push_merged_to_hub
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
from loopdropout_trainer.training.scores import evaluation_batches


logger = logging.getLogger(__name__)

SHORT = 20_000  # examples; a bar over fewer of them is gone before anyone can read it
_NO_CURVES = ("step", "epoch", "total_flos")


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
        for of_rule in self.configs:
            of_rule.model_init_kwargs = {**self.model.init_kwargs, **(of_rule.model_init_kwargs or {})}
            self.base = check_run(self.model.model_name_or_path, of_rule)
        self.peft_config = default_peft_config(self.base, **self.adapter.lora_fields)
        check_run(self.model.model_name_or_path, config, self.peft_config)
        self.is_merged = self.script.merge or self.script.push_merged_to_hub
        if self.is_merged:
            self._check_merging(config)
        self._check_measuring(config)
        self._check_files(Path(config.output_dir))
        self.check()

    def _check_merging(self, config: LoopDropoutArguments) -> None:
        if not config.make_rule().mergeable:
            raise RecipeError(
                f"The updates of {config.rule!r} differ from loop to loop and cannot be merged: leave `merge` and "
                "`push_merged_to_hub` out."
            )
        if shards_weights(config):
            raise RecipeError(
                "`merge` and `push_merged_to_hub` need complete weights, which ZeRO-3 and FSDP shard over the processes: "
                "leave them out, then merge the saved adapter with recipes/merge.py."
            )
        if self.script.push_merged_to_hub and not config.hub_model_id:
            raise RecipeError("`push_merged_to_hub` needs `hub_model_id`: the model's name on the Hub, `user/model`.")

    def _check_measuring(self, config: LoopDropoutArguments) -> None:
        script = self.script
        rules = [of_rule.make_rule() for of_rule in self.configs]
        if DEVELOPMENT in (script.benchmarks or ()):  # before data are read, and a sweep before its first training
            data = self.data_args  # without a number each preparation has its own
            check_development(data.preparation, bool(data.eval_files) or data.num_eval_examples != 0)
        if script.depths and not (script.benchmarks and all(rule.mergeable for rule in rules)):
            raise RecipeError(
                "`depths` needs `benchmarks`, and rules with one update for all loops: others run at their own depth only."
            )
        if script.single_loop_accuracy and not script.benchmarks:
            raise RecipeError("`single_loop_accuracy` needs `benchmarks`: it evaluates on the first of them.")
        check_choice("metric_for_best_model", config.metric_for_best_model, (None, "loss", "eval_loss"))
        if getattr(config, "dataset_kwargs", None):
            raise RecipeError("`dataset_kwargs` is for datasets that are prepared in Python: leave it out.")
        if config.rule in (script.compare_with or ()):
            raise RecipeError(f"`compare_with` must name other rules than `rule`; got {config.rule!r}.")

    def _check_files(self, folder: Path) -> None:
        is_file = self.is_merged and (folder / "merged").is_file()
        if is_file or any((folder / name).is_dir() for name in (RUN_FILE, "recipe.yaml")):
            raise RecipeError(
                f"`output_dir` {folder} has a file in the place of the folder merged, or a folder in that of a file."
            )

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
        self.benchmarks = [self._benchmark(name) for name in self.script.benchmarks or ()]

    def _benchmark(self, name: str) -> Benchmark:
        limit = self.script.benchmark_limit
        if name == DEVELOPMENT:  # the held-out training rows
            return development_benchmark(self.data.eval, self.data_args.preparation, limit)
        return load_from(self.script, name, limit, self.script.confirm_run_unsafe_code)

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

    def train(self, config: LoopDropoutArguments, result: Result) -> Result:
        """Train one adapter, measure it and save it; return what was measured, complete in the first process.

        `result`: what was measured before training, if anything was; it is the same for every rule.
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
        folder = config.output_dir
        checkpoint = self.checkpoint_for(config)
        from_main_process(lambda: check_expected(folder, trainer.run_identity))
        if self.merges(config):  # before hours of training
            from_main_process(check_merge_target, Path(folder, "merged"), trainer.model)
        with trainer.only_run_in_output_dir(checkpoint):
            from_main_process(read_measurements, folder)  # beside what is damaged no row could be written
            if checkpoint:
                problems = [benchmark.data for benchmark in self.benchmarks]
                read = lambda: finished_result(self.settings, folder, trainer.run_identity, problems)
                finished = from_main_process(read)
                if finished is not None:
                    if config.should_save:
                        method = finished.training.method
                        print(f"{method} is finished: its results are read from {folder}.", flush=True)
                    return finished
            if self.script.evaluate_base and not result.rows:  # a new adapter changes nothing yet
                for benchmark in self.benchmarks:
                    self.evaluate(result, trainer, benchmark, "before")
            self.train_and_measure(result, trainer, checkpoint)
        return result

    def train_and_measure(self, result: Result, trainer: GateSamplingMixin, checkpoint: str | bool | None) -> None:
        """Train an adapter, save it, measure it, and write what came of it."""
        config = trainer.args
        is_main = trainer.accelerator.is_main_process
        diverged = Path(config.output_dir, DIVERGED_FILE)
        try:
            if not config.disable_tqdm:
                trainer.remove_callback(ProgressCallback)
                trainer.add_callback(TrainingProgress(config.rule))
            output = trainer.train(resume_from_checkpoint=checkpoint)
            progress = trainer.progress()
            trainer.save_model()  # before anything else can go wrong
            trainer.save_state()  # the learning curve
        except NonFiniteLossError as error:
            if is_main:  # for a sweep: this rate is out, the others go on
                run = {"run_name": config.run_name, "run": trainer.run_identity}
                report = {**run, "step": trainer.state.global_step, "error": str(error)}
                write_json(diverged, report)
            raise
        if is_main:
            diverged.unlink(missing_ok=True)
            result.keep(trainer.run_identity, self.rows_of_training(trainer, output.metrics, progress))
        self.measure(result, trainer)
        if is_main:
            self.save(result, trainer)

    def rows_of_training(
        self, trainer: GateSamplingMixin, metrics: dict[str, float], progress: dict[str, Any]
    ) -> list[Measurement]:
        """Return a row for each number that a training took, and for each number of its log."""
        config = trainer.args
        state = trainer.state
        own_memory = config is self.configs[0] or device_name() != "cpu"  # a CPU's holds what the rules before needed
        seconds = progress["step_seconds"]
        tokens = progress["num_tokens"]
        costs = [
            ("trainable_parameters", trainer.model.get_nb_trainable_parameters()[0], ""),
            ("examples", len(trainer.train_dataset), ""),
            ("num_tokens", tokens, "tokens"),
            ("train_loss", metrics["train_loss"], "nats"),
            ("train_seconds", metrics["train_runtime"], "s"),
            ("step_seconds", seconds / state.global_step, "s"),
            ("tokens_per_second", tokens / seconds if seconds else None, "tokens/s"),
            ("peak_memory_gb", progress["peak_memory_gb"] if own_memory else None, "GB"),
        ]
        rewards = [log["reward"] for log in state.log_history if "reward" in log]
        if rewards:
            tenth = max(1, len(rewards) // 10)
            costs += [("reward_first", mean(rewards[:tenth]), ""), ("reward_last", mean(rewards[-tenth:]), "")]
        facts = {**self.facts(trainer), "identity": identity_key(trainer.run_identity), "benchmark": TRAINING}
        rows = [
            Measurement(**facts, family="cost", metric=metric, value=value, unit=unit)
            for metric, value, unit in costs
            if is_finite(value)
        ]
        for log in state.log_history:
            for metric, value in sorted(log.items()):  # as a saved log has them
                if is_finite(value) and metric not in _NO_CURVES and not metric.startswith("train_"):
                    family = metric.split("/")[0] if "/" in metric else "curve"
                    rows.append(Measurement(**facts, family=family, metric=metric, value=value, step=log["step"]))
        return rows

    def measure(self, result: Result, trainer: GateSamplingMixin) -> None:
        """Evaluate a trained adapter on the benchmarks, at other depths and in one loop only, and score its loops."""
        script = self.script
        num_loops = trainer.num_loops
        quiet = trainer.args.disable_tqdm
        for benchmark in self.benchmarks:
            self.evaluate(result, trainer, benchmark, "after")
        more = [(f"after/{depth}_loops", depth, None) for depth in script.depths or () if depth != num_loops]
        if script.single_loop_accuracy and num_loops > 1:
            for loop, gates in enumerate(torch.eye(num_loops).tolist(), start=1):
                more.append((f"after/only_loop_{loop}", None, gates))
        hidden = quiet or not more or None  # None: without a terminal
        for moment, depth, gates in tqdm(more, desc="other depths, single loops", disable=hidden):
            with run_as(trainer.model, readout=depth):
                self.evaluate(result, trainer, self.benchmarks[0], moment, gates)
        if script.single_loop_batches and trainer.eval_dataset is not None:
            self.measure_losses(result, trainer)

    def measure_losses(self, result: Result, trainer: GateSamplingMixin) -> None:
        """Measure the losses of held-out rows with the adapter in one loop only, and of each loop's readout."""
        num_rows = self.script.single_loop_batches * trainer.args.per_device_eval_batch_size
        batches = evaluation_batches(trainer, num_rows)
        context = Context(trainer.model, "adapter", batches, depths=())
        model = from_main_process(self.identity_of_model, trainer)
        data = {"source": HELD_OUT, **facts_of_batches(batches)}
        identity = {**model, "data": data, "loops": {"num_loops": trainer.num_loops}}
        facts = {**self.facts(trainer), "benchmark": HELD_OUT, "identity": identity_key(identity)}
        for diagnostic in (SingleLoop(), Readouts()):
            rows = diagnostic.measure(context)
            result.keep(identity, [Measurement(**{**facts, "family": diagnostic.name, **row}) for row in rows])

    def save(self, result: Result, trainer: GateSamplingMixin) -> None:
        """Write the cards, the merged model if it is wanted, and what was measured."""
        config = trainer.args
        data = self.data.description
        recipe = settings_yaml(self.settings)
        card = ModelCardFields(recipe=recipe, data=data, results=result.card_scores())
        save_card(trainer.model, config.output_dir, config.hub_model_id, card)
        result.saved = {"adapter": config.output_dir}
        if self.merges(config):
            merged = str(Path(config.output_dir, "merged"))
            merge_and_save(trainer.model, merged, self.tokenizer, card, config.hub_model_id)
            result.saved["merged model"] = merged
        facts = {
            "run_name": config.run_name,
            "model": self.model.base_name,
            "model_type": trainer.model.get_base_model().config.model_type,
            "data": data,
            "settings": public_settings(self.settings),
            "versions": library_versions(),
            "device": device_name(),
            "num_processes": trainer.accelerator.num_processes,
        }
        if is_of_former_version(config.output_dir):
            logger.warning(
                "%s in %s is of an earlier version of this package, and is not read: the trained adapter was measured again. "
                "Delete that file.",
                FORMER_FILE,
                config.output_dir,
            )
        write_result(result, facts, trainer.run_identity, config.output_dir)  # the last file

    def checkpoint_for(self, config: LoopDropoutArguments) -> str | bool | None:
        """Return the checkpoint to resume from; True: the newest complete one in `output_dir`, if there is one.

        A checkpoint that is given belongs to the rule in whose folder it lies; the other rules go on from their own.
        """
        wanted = config.resume_from_checkpoint
        wanted = {"true": True, "false": None}.get(str(wanted).lower(), wanted)
        if not isinstance(wanted, str):
            return wanted
        folders = Path(wanted).resolve().parents
        others = [other for other in self.configs[1:] if Path(other.output_dir).resolve() in folders]
        return wanted if config is (others or self.configs)[0] else True

    def evaluate(
        self,
        result: Result,
        trainer: GateSamplingMixin,
        benchmark: Benchmark,
        moment: str,
        gates: Sequence[float] | None = None,
    ) -> None:
        """Evaluate on a benchmark, at unit gates or at these gates [K]; what a killed run evaluated is not evaluated again."""
        folder = answers_folder(trainer.args.output_dir, moment, benchmark.name)
        subject = Subject.of(trainer.model, self.tokenizer, self.script, gates=gates)
        untrained = moment == "before"
        progress = moment in ("before", "after")
        model = from_main_process(self.identity_of_model, trainer, untrained)
        try:
            answers = evaluate_subject(subject, benchmark, folder, model, progress)
        except SettingsChangedError:  # of a run that this one takes the place of
            if trainer.accelerator.is_main_process:
                shutil.rmtree(folder)
            trainer.accelerator.wait_for_everyone()
            answers = evaluate_subject(subject, benchmark, folder, model, progress)
        identity = benchmark.identity(subject, model)
        facts = {**self.facts(trainer), **subject.place, "identity": identity_key(identity)}
        if untrained:
            facts |= {"method": BASE, "gates": NONE, "run": None, "seed": None, "steps": None}
        result.keep(identity, answers.measurements(**facts))

    def identity_of_model(self, trainer: GateSamplingMixin, untrained: bool = False) -> Identity:
        """Return the parts of an identity that are the model's: as it is now, or before anything of it was trained."""
        parts = ("base", "versions") if untrained else ("base", "adapter", "versions")
        weights = trained_weights(None if untrained else trainer.model)
        return {**{part: trainer.run_identity[part] for part in parts}, "weights": weights}

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

    def merges(self, config: LoopDropoutArguments) -> bool:
        """Say whether the adapter of these arguments is to be merged: the recipe's own, not those it is compared with."""
        return self.is_merged and config is self.configs[0]


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def check_expected(folder: str | Path, run: Identity) -> None:
    """Refuse to train what could not be compared with the finished runs of its sweep, which has written down what it expects.

    Raises:
        RecipeError: it names what differs.
    """
    path = Path(folder, EXPECTED_FILE)
    if not path.is_file():
        return
    with user_supplied(f"{path} cannot be read"):
        content = read_json(path)
        other = content["run"]
        expected = read_identity(content["identity"])
    if changed := differences(expected, run):
        raise RecipeError(
            f"{folder} is not trained, since it could not stand beside {other}: {changed[0]}. Put it back, or choose another "
            "`output_dir`."
        )


def run_all(run: Run) -> None:
    """Load what a run needs, say what it will do, do it, and print what came of it."""
    show_log()
    run.load()
    config = run.configs[0]
    script = run.script
    if config.process_index == 0:
        run.announce()
    if script.dry_run:
        return
    results = []
    for of_rule in run.configs:
        results.append(run.train(of_rule, results[0].of_base() if results else Result()))
    if not config.should_save:  # the other processes
        return
    print_results(results, script.depths or ())
    if script.push_merged_to_hub:
        address = push_merged_to_hub(Path(config.output_dir) / "merged", config.hub_model_id, token=config.hub_token)
        print(f"Pushed to {address}")
    if script.depths or any(row.family == SingleLoop.name for row in results[0].rows):
        draw([result.saved["adapter"] for result in results], Path(config.output_dir) / "figure")


def draw(folders: Sequence[str], path: Path) -> None:
    """Save a figure of what runs have measured; whatever fails is a warning, since the results are there."""
    try:
        from loopdropout_trainer.reports.plots import overview_figure, save_figure
        from loopdropout_trainer.reports.reading import load_table

        figure = overview_figure(load_table(folders))
        if figure is not None:
            print(f"Figure: {save_figure(figure, path)[0]}")
    except ImportError:
        print('No figure without plotnine: pip install "loopdropout-trainer[reports]"')
    except Exception as error:
        logger.warning("No figure: %s.", one_line(error))
