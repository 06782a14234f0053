"""Fine-tune a looped language model with Loop Dropout, or with any other rule.

    accelerate launch recipes/sft.py recipes/quickstart.yaml
    python recipes/sft.py recipes/gsm8k.yaml --learning_rate 2e-4 --seed 302

A recipe sets the fields below; `--field value` overrides it. What was trained, its results and the settings that repeat
the run are printed at the end and saved in `output_dir`.
"""

from __future__ import annotations

import sys
import time
import warnings
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, default_peft_config, merge_and_save
from loopdropout_trainer.data import DataArguments, load_data, load_tokenizer
from loopdropout_trainer.diagnostics import single_loop_activation
from loopdropout_trainer.diagnostics.plots import plot_single_loop
from loopdropout_trainer.evaluation import Benchmark, BenchmarkResult, evaluate_benchmark, load_benchmark
from loopdropout_trainer.evaluation.development import DEVELOPMENT, development_benchmark
from loopdropout_trainer.runs.plan import plan_run
from loopdropout_trainer.runs.result import RunResult, print_report, show_log, write_results
from loopdropout_trainer.saving.cards import ModelCardFields
from loopdropout_trainer.saving.hub import PushError, push_merged_to_hub
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, RunArguments
from loopdropout_trainer.settings.recipe import RecipeError, build, parse_recipe, settings_yaml
from loopdropout_trainer.training.checkpoints import CheckpointError
from loopdropout_trainer.training.distributed import divides_weights
from loopdropout_trainer.training.fault_tolerance import NonFiniteLossError
from loopdropout_trainer.training.preflight import check_run


class Run:
    """The settings of one command, and the steps from them to trained, measured and saved adapters."""

    def __init__(self, argv: list[str] | None = None) -> None:
        types = (RunArguments, ModelArguments, AdapterArguments, DataArguments, LoopDropoutConfig)
        parsed, self.settings = parse_recipe(types, argv, description=__doc__)
        self.script, self.model, self.adapter, self.data_args, config = parsed
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
        if (self.script.merge or self.script.push_merged_to_hub) and divides_weights(config):
            raise RecipeError(
                "ZeRO-3 and FSDP divide the weights among the processes, which cannot be merged there: leave `merge` and "
                "`push_merged_to_hub` out, then merge the saved adapter with recipes/merge.py."
            )
        if self.script.push_merged_to_hub and not config.hub_model_id:
            raise RecipeError("`push_merged_to_hub` needs `hub_model_id`: the model's name on the Hub, `user/model`.")

    def config_for(self, rule: str, config: LoopDropoutConfig) -> LoopDropoutConfig:
        """Return the same arguments under another rule, at that rule's own defaults."""
        other = {"rule": rule, "p": None, "rule_args": None, "output_dir": f"{config.output_dir}/{rule}"}
        return build(LoopDropoutConfig, {**self.settings, **other})

    def load(self) -> None:
        """Load tokenizer, data and benchmarks."""
        self.tokenizer = load_tokenizer(self.model)
        config = self.configs[0]
        with config.main_process_first(desc="data preparation"):
            self.data = load_data(self.data_args, self.tokenizer, config.max_length)
        self.benchmarks = [self.load_benchmark(name) for name in self.script.benchmarks or ()]

    def load_benchmark(self, name: str) -> Benchmark:
        """Load a benchmark's problems; `development` means the held-out training rows."""
        limit = self.script.benchmark_limit
        if name == DEVELOPMENT:
            return development_benchmark(self.data.eval, self.data_args.preparation, limit)
        return load_benchmark(name, (self.script.benchmark_files or {}).get(name), limit)

    def announce(self) -> None:
        """Print what became of the data, and what is about to be done with it."""
        print(self.data.report)
        for config in self.configs:
            print(f"\n{plan_run(self.base, self.data, config, self.peft_config, self.model.base_name)}", flush=True)

    def train(self, config: LoopDropoutConfig, base_benchmarks: list[BenchmarkResult] | None) -> RunResult:
        """Train one adapter, measure it and save it.

        Args:
            config: rule and hyperparameters.
            base_benchmarks: results before training if they are known; they are the same for every rule.
        """
        trainer = LoopDropoutSFTTrainer(
            self.model.model_name_or_path,
            args=config,
            train_dataset=self.data.train,
            eval_dataset=self.data.eval,
            processing_class=self.tokenizer,
            peft_config=self.peft_config,
        )
        if base_benchmarks is None:  # a new adapter changes nothing yet
            base_benchmarks = self.evaluate(trainer) if self.script.evaluate_base else []
        began = time.perf_counter()
        result = trainer.train(resume_from_checkpoint=checkpoint_of(config))
        outcome = RunResult(
            rule=config.rule,
            p=config.p,
            num_loops=trainer.num_loops,
            trainable_parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            steps=trainer.state.global_step,
            examples=len(trainer.train_dataset),
            train_loss=result.training_loss,
            train_seconds=time.perf_counter() - began,
            base_benchmarks=base_benchmarks,
        )
        trainer.save_model()  # before anything else can go wrong
        outcome.saved["adapter"] = config.output_dir
        outcome.benchmarks = self.evaluate(trainer)
        if self.script.single_loop_batches and trainer.eval_dataset is not None:
            batches = list(islice(trainer.get_eval_dataloader(), self.script.single_loop_batches))
            outcome.single_loop = single_loop_activation(trainer.model, batches)
        if trainer.accelerator.is_main_process:
            Path(config.output_dir, "recipe.yaml").write_text(settings_yaml(self.settings), encoding="utf-8")
            if config is self.configs[0] and (self.script.merge or self.script.push_merged_to_hub):
                self.merge(trainer, outcome)
            write_results(outcome, self.settings, config.output_dir)
        return outcome

    def evaluate(self, trainer: LoopDropoutSFTTrainer) -> list[BenchmarkResult]:
        """Answer every benchmark by greedy generation at unit gates."""
        script = self.script
        return [
            evaluate_benchmark(
                trainer.model, self.tokenizer, each, script.benchmark_batch_size, decoding=script.decoding
            )
            for each in self.benchmarks
        ]

    def merge(self, trainer: LoopDropoutSFTTrainer, outcome: RunResult) -> None:
        """Save the merged model with its card."""
        facts = ModelCardFields(
            base_model=self.model.base_name,
            rule=outcome.rule,
            p=outcome.p,
            recipe=settings_yaml(self.settings),
            data=self.data.description,
            results=outcome.results,
        )
        folder = Path(trainer.args.output_dir) / "merged"
        merge_and_save(trainer.model, folder, self.tokenizer, facts, repo_id=trainer.args.hub_model_id)
        outcome.saved["merged model"] = str(folder)


def checkpoint_of(config: LoopDropoutConfig) -> str | bool | None:
    """Return the checkpoint to resume from; True: the newest whole one in `output_dir`, if there is one."""
    wanted = config.resume_from_checkpoint
    return {"true": True, "false": None}.get(str(wanted).lower(), wanted)


def main(argv: list[str] | None = None) -> None:
    run = Run(argv)
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
    if outcomes[0].single_loop is not None:
        if find_spec("matplotlib") is None:
            print('No chart of single-loop activation without matplotlib: pip install -e ".[plots]"')
        else:
            chart = Path(config.output_dir) / "single_loop.png"
            plot_single_loop({each.name: each.single_loop.reductions for each in outcomes}, chart)
            outcomes[0].saved["chart of single-loop activation"] = str(chart)
    print_report(outcomes)
    if run.script.push_merged_to_hub:
        address = push_merged_to_hub(Path(config.output_dir) / "merged", config.hub_model_id, token=config.hub_token)
        print(f"Pushed to {address}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of names that TRL still uses
    try:
        main()
    except (ValueError, PushError, CheckpointError, NonFiniteLossError) as error:  # one sentence, to be put right
        sys.exit(f"sft.py: {error}")
