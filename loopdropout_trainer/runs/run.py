"""One command that trains: from its settings to trained, measured and saved adapters.

`recipes/sft.py`, `dpo.py` and `grpo.py` are this with a trainer, its arguments and its data.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from tqdm.auto import tqdm

from loopdropout_trainer.data import DataArguments, load_data, load_tokenizer
from loopdropout_trainer.diagnostics import (
    LiveDiagnosticsCallback,
    evaluation_batches,
    readout_losses,
    single_loop_activation,
)
from loopdropout_trainer.evaluation import Benchmark, BenchmarkResult, Subject, evaluate_subject, load_benchmark
from loopdropout_trainer.evaluation.answer_log import SettingsChangedError
from loopdropout_trainer.evaluation.development import DEVELOPMENT, development_benchmark
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.runs.plan import plan_run
from loopdropout_trainer.runs.printing import plot_results, print_results
from loopdropout_trainer.runs.progress import SHORT, hide_short_bars, show_training
from loopdropout_trainer.runs.result import (
    DIVERGED_FILE,
    RunResult,
    first_and_last,
    read_results,
    show_log,
    write_results,
)
from loopdropout_trainer.saving.adapter_files import save_adapter_card
from loopdropout_trainer.saving.cards import CardScore, ModelCardFields
from loopdropout_trainer.saving.files import sha256, write_atomically
from loopdropout_trainer.saving.hub import check_merge_target, merge_and_save, push_merged_to_hub
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, RunArguments
from loopdropout_trainer.settings.command import user_supplied
from loopdropout_trainer.settings.ranges import shown
from loopdropout_trainer.settings.recipe import RecipeError, build, for_another_rule, parse_recipe, settings_yaml
from loopdropout_trainer.training.checkpoints import NonFiniteLossError
from loopdropout_trainer.training.config import LoopDropoutArguments, LoopDropoutConfig
from loopdropout_trainer.training.distributed import shards_weights
from loopdropout_trainer.training.gate_sampling import GateSamplingMixin
from loopdropout_trainer.training.memory import device_name, memory_advice
from loopdropout_trainer.training.preflight import check_run, default_peft_config
from loopdropout_trainer.training.sft_trainer import LoopDropoutSFTTrainer


BEFORE, AFTER = "before", "after"


class Run:
    """The settings of one command, and the steps from them to trained, measured and saved adapters.

    Class attributes, which a subclass replaces:
        config_class, trainer_class: what trains.
        more_arguments: further dataclasses of settings; their instances are `self.more`.

    Args:
        argv: the command line without the script's name; default: the process's.
        description: for `--help_all`.
    """

    config_class: ClassVar[type[LoopDropoutArguments]] = LoopDropoutConfig
    trainer_class: ClassVar[type[GateSamplingMixin]] = LoopDropoutSFTTrainer
    more_arguments: ClassVar[Sequence[type]] = ()

    def __init__(self, argv: list[str] | None = None, description: str | None = None) -> None:
        types = (RunArguments, ModelArguments, AdapterArguments, DataArguments, self.config_class)
        parsed, self.settings = parse_recipe((*types, *self.more_arguments), argv, description=description)
        self.script, self.model, self.adapter, self.data_args, config, *self.more = parsed
        self.configs = [config, *(self.config_for(rule, config) for rule in self.script.compare_with or ())]
        for each in self.configs:
            each.model_init_kwargs = {**self.model.init_kwargs, **(each.model_init_kwargs or {})}
            self.base = check_run(self.model.model_name_or_path, each)
        self.peft_config = default_peft_config(self.base, **self.adapter.lora_fields)
        check_run(self.model.model_name_or_path, config, self.peft_config)
        if (self.script.merge or self.script.push_merged_to_hub) and not config.make_rule().mergeable:
            raise RecipeError(
                f"The rule {config.rule!r} trains an update that differs from loop to loop, which cannot be merged into one "
                "weight: leave `merge` and `push_merged_to_hub` out."
            )
        if (self.script.merge or self.script.push_merged_to_hub) and shards_weights(config):
            raise RecipeError(
                "ZeRO-3 and FSDP shard the weights over the processes, which cannot be merged there: leave `merge` and "
                "`push_merged_to_hub` out, then merge the saved adapter with recipes/merge.py."
            )
        if self.script.depths and not (self.script.benchmarks and all(c.make_rule().mergeable for c in self.configs)):
            raise RecipeError(
                "`depths` needs `benchmarks`, and rules with one update for all loops: others run at their own depth only."
            )
        if self.script.single_loop_accuracy and not self.script.benchmarks:
            raise RecipeError("`single_loop_accuracy` needs `benchmarks`: it evaluates on the first of them.")
        if config.metric_for_best_model not in (None, "loss", "eval_loss"):
            raise RecipeError(
                "`metric_for_best_model` must be loss, the only metric that a training evaluates; got "
                f"{shown(config.metric_for_best_model)}."
            )
        if getattr(config, "dataset_kwargs", None):
            raise RecipeError("`dataset_kwargs` is for datasets that are prepared in Python: leave it out.")
        if config.rule in (self.script.compare_with or ()):
            raise RecipeError(f"`compare_with` must name other rules than `rule`; got {config.rule!r}.")
        if self.script.push_merged_to_hub and not config.hub_model_id:
            raise RecipeError("`push_merged_to_hub` needs `hub_model_id`: the model's name on the Hub, `user/model`.")
        self.check()

    def config_for(self, rule: str, config: LoopDropoutArguments) -> LoopDropoutArguments:
        """Return the same arguments under another rule, with those of `p` and `rule_args` that it has as well."""
        kept = for_another_rule(self.settings, rule)
        return build(self.config_class, {**kept, "rule": rule, "output_dir": f"{config.output_dir}/{rule}"})

    def check(self) -> None:
        """Refuse settings that this command cannot carry out."""

    def load(self) -> None:
        """Load tokenizer, data and benchmarks."""
        config = self.configs[0]
        template = getattr(config, "chat_template_path", None)  # SFT's
        self.tokenizer = load_tokenizer(self.model, config.trust_remote_code, template)
        hide_short_bars(self.data_args.num_train_examples or SHORT)
        with config.main_process_first(desc="data preparation"):
            self.data = load_data(self.data_args, self.tokenizer, getattr(config, "max_length", None))
        for name in ("eval_on_start", "single_loop_batches", "live_diagnostics_steps"):
            if self.data.eval is None and (getattr(config, name, 0) or getattr(self.script, name, 0)):
                raise RecipeError(f"`{name}` needs rows to evaluate on: give `num_eval_examples` or `eval_files`.")
        self.benchmarks = [self.load_benchmark(name) for name in self.script.benchmarks or ()]

    def load_benchmark(self, name: str) -> Benchmark:
        """Load a benchmark's problems; `development` means the held-out training rows."""
        limit = self.script.benchmark_limit
        if name == DEVELOPMENT:
            return development_benchmark(self.data.eval, self.data_args.preparation, limit)
        file = (self.script.benchmark_files or {}).get(name)
        return load_benchmark(name, file, limit, self.script.confirm_run_unsafe_code)

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

    def train(self, config: LoopDropoutArguments, base_benchmarks: list[BenchmarkResult] | None) -> RunResult:
        """Train one adapter, measure it and save it.

        Args:
            config: rule and hyperparameters.
            base_benchmarks: results before training if they are known; they are the same for every rule.
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
            if self.script.live_diagnostics_steps:
                every, rows = self.script.live_diagnostics_steps, self.script.live_diagnostics_rows
                trainer.add_callback(LiveDiagnosticsCallback(trainer, every, rows))
        checkpoint = self.checkpoint_for(config)
        if self.merges(config):  # before hours of training
            trainer.from_main_process(lambda: check_merge_target(Path(config.output_dir, "merged"), trainer.model))
        with trainer.only_run_in_output_dir():
            finished = trainer.from_main_process(lambda: self.finished(trainer)) if checkpoint else None
            if finished is not None:
                return finished
            if base_benchmarks is None:  # a new adapter changes nothing yet
                base_benchmarks = self.evaluate(trainer, BEFORE) if self.script.evaluate_base else []
            return self.train_and_measure(trainer, checkpoint, base_benchmarks)

    def finished(self, trainer: GateSamplingMixin) -> RunResult | None:
        """Return the results of this very run if it was finished before."""
        outcome = read_results(self.settings, trainer.args.output_dir, trainer.run_identity)
        if outcome is not None:
            print(f"{outcome.title} is finished: its results are read from {trainer.args.output_dir}.", flush=True)
        return outcome

    def train_and_measure(
        self, trainer: GateSamplingMixin, checkpoint: str | bool | None, base_benchmarks: list[BenchmarkResult]
    ) -> RunResult:
        config, is_main = trainer.args, trainer.accelerator.is_main_process
        diverged = Path(config.output_dir, DIVERGED_FILE)
        try:
            show_training(trainer, config.rule)
            result = trainer.train(resume_from_checkpoint=checkpoint)
            progress = trainer.progress()
            trainer.save_model()  # before anything else can go wrong
            trainer.save_state()  # the learning curve
        except NonFiniteLossError as error:
            if is_main:  # for a sweep: this rate is out, the others go on
                write_atomically(diverged, json.dumps({"error": str(error), "step": trainer.state.global_step}) + "\n")
            raise
        if is_main:
            diverged.unlink(missing_ok=True)
        on_gpu = device_name() != "cpu"
        outcome = RunResult(
            rule=config.rule,
            p=config.p,
            num_loops=trainer.num_loops,
            trainable_parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            steps=trainer.state.global_step,
            examples=len(trainer.train_dataset),
            train_loss=result.training_loss,
            train_seconds=result.metrics["train_runtime"],
            step_seconds=progress["step_seconds"],
            num_tokens=progress["num_tokens"],
            # On a CPU it is the process's, which holds what the rules before needed.
            peak_memory_gb=progress["peak_memory_gb"] if config is self.configs[0] or on_gpu else None,
            base_benchmarks=base_benchmarks,
            adapter={**self.adapter.lora_fields, **training_fields(trainer)},
            model=self.model_facts(trainer),
        )
        outcome.saved["adapter"] = config.output_dir
        outcome.rewards = first_and_last([log["reward"] for log in trainer.state.log_history if "reward" in log])
        outcome.benchmarks = self.evaluate(trainer, AFTER)
        outcome.by_depth = self.evaluate_depths(trainer, outcome.benchmarks)
        if self.script.single_loop_batches and trainer.eval_dataset is not None:
            num_rows = self.script.single_loop_batches * config.per_device_eval_batch_size
            batches = evaluation_batches(trainer, num_rows)
            outcome.single_loop = single_loop_activation(trainer.model, batches, over_processes=True)
            outcome.readout_losses = readout_losses(trainer.model, batches, over_processes=True)
        if self.script.single_loop_accuracy:
            outcome.single_loop_benchmarks = self.evaluate_single_loops(trainer)
        if is_main:
            save_adapter_card(trainer.model, config.output_dir, config.hub_model_id, self.card_fields(outcome))
            if self.merges(config):
                self.merge(trainer, outcome)
            processes = trainer.accelerator.num_processes
            write_results(outcome, self.settings, config.output_dir, trainer.run_identity, processes)  # the last file
        return outcome

    def model_facts(self, trainer: GateSamplingMixin) -> dict[str, Any]:
        """Return which model was trained, for the results."""
        config = trainer.model.get_base_model().config
        return {
            "model": self.model.base_name,
            "revision": self.model.model_revision,
            "model_type": config.model_type,
            "dtype": self.model.dtype,
            "attn_implementation": self.model.attn_implementation,
            "data": self.data.description,
        }

    def checkpoint_for(self, config: LoopDropoutArguments) -> str | bool | None:
        """Return the checkpoint to resume from; True: the newest complete one in `output_dir`, if there is one.

        A checkpoint that is given belongs to the rule in whose folder it lies; the other rules go on from their own.
        """
        wanted = {"true": True, "false": None}.get(
            str(config.resume_from_checkpoint).lower(), config.resume_from_checkpoint
        )
        if not isinstance(wanted, str):
            return wanted
        folders = Path(wanted).resolve().parents
        others = [each for each in self.configs[1:] if Path(each.output_dir).resolve() in folders]
        return wanted if config is (others or self.configs)[0] else True

    def evaluate(self, trainer: GateSamplingMixin, moment: str) -> list[BenchmarkResult]:
        """Answer every benchmark at unit gates; what a killed run answered is not asked again.

        Args:
            trainer: with the model.
            moment: `BEFORE` or `AFTER` the training.
        """
        return [self.answer(trainer, each, moment) for each in self.benchmarks]

    def evaluate_depths(
        self, trainer: GateSamplingMixin, at_own_depth: list[BenchmarkResult]
    ) -> dict[int, BenchmarkResult]:
        """Answer the first benchmark at other recurrence depths, without further training."""
        results: dict[int, BenchmarkResult] = {}
        config = find_looped_model(trainer.model).config
        own = config.num_loops
        try:
            for depth in tqdm(self.script.depths or (), desc="depths", disable=trainer.args.disable_tqdm or None):
                config.num_loops = depth
                results[depth] = (
                    at_own_depth[0]
                    if depth == own
                    else self.answer(trainer, self.benchmarks[0], f"{AFTER}/{depth}_loops", progress=False)
                )
        finally:
            config.num_loops = own
        return results

    def evaluate_single_loops(self, trainer: GateSamplingMixin) -> list[BenchmarkResult]:
        """Evaluate on the first benchmark with the adapter in one loop only, for each loop, at the training depth."""
        results = []
        loops = range(trainer.num_loops)
        for only in tqdm(loops, desc="adapter in one loop", disable=trainer.args.disable_tqdm or None):
            gates = [float(loop == only) for loop in loops]
            moment = f"{AFTER}/only_loop_{only + 1}"
            results.append(self.answer(trainer, self.benchmarks[0], moment, progress=False, gates=gates))
        return results

    def answer(
        self,
        trainer: GateSamplingMixin,
        benchmark: Benchmark,
        moment: str,
        progress: bool = True,
        gates: Sequence[float] | None = None,
    ) -> BenchmarkResult:
        """Evaluate on one benchmark, at unit gates or at these gates [K]."""
        folder = Path(trainer.args.output_dir, "answers", moment, benchmark.name.replace("/", "_"))
        for _ in range(2):
            try:
                settings = trainer.from_main_process(lambda: self.answers_depend_on(trainer, moment))
                subject = Subject.of(trainer.model, self.tokenizer, self.script, gates=gates)
                return evaluate_subject(subject, benchmark, folder, settings, progress)
            except SettingsChangedError:  # of a run that this one takes the place of
                if trainer.accelerator.is_main_process:
                    shutil.rmtree(folder)
                trainer.accelerator.wait_for_everyone()
        raise AssertionError("answers are for other settings, though the folder is new")

    def answers_depend_on(self, trainer: GateSamplingMixin, moment: str) -> dict[str, Any]:
        """Return what tells the evaluated weights from others."""
        adapter = Path(trainer.args.output_dir, "adapter_model.safetensors")
        return {
            "model": trainer.run_identity["model"],
            "adapter": sha256(adapter) if moment.startswith(AFTER) else None,
        }

    def card_fields(self, outcome: RunResult) -> ModelCardFields:
        """Return what the run's cards state beside what the model itself tells."""
        before = {result.name: result.score for result in outcome.base_benchmarks}
        return ModelCardFields(
            rule=outcome.rule,
            p=outcome.p,
            recipe=settings_yaml(self.settings),
            data=self.data.description,
            results={r.name: CardScore(r.score, r.total, before.get(r.name)) for r in outcome.benchmarks},
        )

    def merges(self, config: LoopDropoutArguments) -> bool:
        """Say whether the adapter of these arguments is to be merged: the recipe's own, not those it is compared with."""
        return config is self.configs[0] and (self.script.merge or self.script.push_merged_to_hub)

    def merge(self, trainer: GateSamplingMixin, outcome: RunResult) -> None:
        """Save the merged model with its card."""
        folder = Path(trainer.args.output_dir) / "merged"
        facts = self.card_fields(outcome)
        merge_and_save(trainer.model, folder, self.tokenizer, facts, repo_id=trainer.args.hub_model_id)
        outcome.saved["merged model"] = str(folder)


def training_fields(trainer: GateSamplingMixin) -> dict[str, Any]:
    """Return the settings that tables of results name."""
    args = trainer.args
    seeds = {"seed": args.seed, "gate_seed": args.seed if args.gate_seed is None else args.gate_seed}
    return {"rule_args": args.rule_args, "learning_rate": args.learning_rate, **seeds}


def run_all(run: Run) -> None:
    """Load what a run needs, say what it will do, do it, and print what came of it."""
    show_log()
    run.load()
    if run.configs[0].process_index == 0:
        run.announce()
    if run.script.dry_run:
        return
    outcomes: list[RunResult] = []
    for config in run.configs:
        outcomes.append(run.train(config, outcomes[0].base_benchmarks if outcomes else None))
    config = run.configs[0]
    if not config.should_save:  # the other processes
        return
    if outcomes[0].single_loop is not None or outcomes[0].by_depth:
        if find_spec("plotnine") is None:
            print('No figure without plotnine: pip install -e ".[reports]"')
        else:
            outcomes[0].saved["figure"] = str(plot_results(outcomes, Path(config.output_dir) / "figure.png"))
    print_results(outcomes)
    if run.script.push_merged_to_hub:
        address = push_merged_to_hub(Path(config.output_dir) / "merged", config.hub_model_id, token=config.hub_token)
        print(f"Pushed to {address}")
