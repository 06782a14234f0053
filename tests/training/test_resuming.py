"""Interrupted trainings continue to the bits of an uninterrupted training: after a kill, a signal, or a damaged checkpoint."""

import functools
import importlib
import itertools
import linecache
import logging
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from helpers.errors import user_error
from helpers.processes import ended, fork
from helpers.tiny import tiny_ouro, trained_parameters
from helpers.tokenizer import make_tokenizer
from helpers.trainers import SHORT_RUN, Recorder, assert_same_weights
from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, default_peft_config, load_model
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import lock_folder
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.results.training_results import saved_step
from loopdropout_trainer.saving.cards import describe_kept_checkpoint
from loopdropout_trainer.saving.checkpoints import list_checkpoints, newest_checkpoint
from loopdropout_trainer.saving.integrity import record
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.training.evaluation_fields import word_of
from loopdropout_trainer.training.resuming import digest_rule
from loopdropout_trainer.training.stopping import NonFiniteGradientError, TrainingInterrupted, first_signal


def die_at(place, event):
    """Kill this process when the nth file event (`event`) has a path that contains `place`."""
    seen = itertools.count(1)

    def count(kind, args):
        is_file = kind in ("open", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree")
        if is_file and place in str(args[0]) and next(seen) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def training(output_dir, event=None):
    """Train with a checkpoint after every step, resume if there is one, and be killed at a file event."""
    torch.set_num_threads(1)
    if event is not None:
        die_at(output_dir, event)
    args = LoopDropoutConfig(
        output_dir, max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        save_strategy="steps", save_steps=1, save_total_limit=2, report_to="none", bf16=False, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": str(i), "completion": "x" * (i % 5 + 1)} for i in range(48)])
    data = {"train_dataset": rows, "processing_class": make_tokenizer()}
    adapter = default_peft_config(tiny_ouro(), lora_dropout=0.1)
    trainer = LoopDropoutSFTTrainer(tiny_ouro(), args, peft_config=adapter, **data)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model(os.path.join(output_dir, "final"))


def finish(folder):
    assert ended(fork(training, str(folder))) == 0
    return (folder / "final" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.parametrize("event", [9, 21, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 60, 4))])
def test_killed_training_resumes_bit_for_bit(tmp_path, uninterrupted, event):
    assert ended(fork(training, str(tmp_path), event)) == -signal.SIGKILL
    assert finish(tmp_path) == uninterrupted


@pytest.fixture
def make_trainer(make_sft):
    return functools.partial(make_sft, cls=Recorder, save_strategy="steps", save_steps=2, max_steps=6)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory, tokenizer, dataset):
    """The folder of a training of two steps, with a checkpoint."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    fields = {**SHORT_RUN, "gradient_checkpointing": False, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    args = LoopDropoutConfig(str(folder), **fields)
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    LoopDropoutSFTTrainer(tiny_ouro(num_hidden_layers=1), args, **data).train()
    return folder


@pytest.fixture
def stopped(stopped_run, tmp_path):
    """A copy of that folder, in which `make_trainer` trains."""
    return shutil.copytree(stopped_run, tmp_path / "run")


FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.safetensors")


def test_incomplete_checkpoint_is_not_used(tmp_path, make_trainer):
    trainer = make_trainer(output_dir=str(tmp_path), max_steps=4)
    trainer.train()
    newest, older = str(tmp_path / "checkpoint-4"), str(tmp_path / "checkpoint-2")
    assert newest_checkpoint(tmp_path) == newest and newest_checkpoint(newest) is None
    for name, cut in itertools.product(FILES, (40, None)):
        file = tmp_path / "checkpoint-4" / name
        content = file.read_bytes()
        file.unlink()
        if cut:
            file.write_bytes(content[:-cut])
        assert newest_checkpoint(tmp_path) == older
        with user_error(rf"has .*({name[:5]}|safetensors).*checkpoint is {older}"):
            trainer.train(resume_from_checkpoint=newest)
        file.write_bytes(content)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_with_a_checkpoint(make_trainer, stop):
    class Interrupted(Recorder):
        def compute_loss(self, *args, **kwargs):
            if self.state.global_step == 2:
                signal.raise_signal(stop)
                signal.raise_signal(stop)  # launchers may send it more than once
            return super().compute_loss(*args, **kwargs)

    straight, handler = make_trainer(save_strategy="no"), signal.getsignal(stop)
    straight.train()
    trainer = make_trainer(cls=Interrupted, save_strategy="no")
    advice = r"after step 3 of 6. Continue with `train\(resume_from_checkpoint=True\)`"
    with pytest.raises(TrainingInterrupted, match=advice) as error:
        trainer.train()
    assert error.value.signal == stop and signal.getsignal(stop) is handler
    assert trainer.gate_state.gates is None
    trainer.train(resume_from_checkpoint=True)  # as in a notebook
    assert_same_weights(trainer, straight)
    resumed = make_trainer()
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.seen) == 3
    assert_same_weights(resumed, straight)


def test_stop_keeps_its_checkpoint_next_to_the_best_one(make_trainer):
    """With `save_total_limit: 1`, transformers would keep the best one alone, and lose the steps since."""

    class Interrupted(Recorder):
        def compute_loss(self, *args, **kwargs):
            if self.model.training and self.state.global_step == 2:
                signal.raise_signal(signal.SIGTERM)
            return super().compute_loss(*args, **kwargs)

    fields = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(cls=Interrupted, load_best_model_at_end=True, save_total_limit=1, **fields)
    with pytest.raises(TrainingInterrupted, match="after step 3 of 6"):
        trainer.train()
    names = {Path(checkpoint).name for checkpoint in list_checkpoints(trainer.args.output_dir)}
    assert names == {"checkpoint-2", "checkpoint-3"} and trainer.args.save_total_limit == 1


def test_stop_without_a_full_checkpoint_promises_nothing(make_trainer):
    class Interrupted(Recorder):
        def compute_loss(self, *args, **kwargs):
            signal.raise_signal(signal.SIGTERM)
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(TrainingInterrupted, match="of 6. It cannot be continued, because with `save_only_model`"):
        make_trainer(cls=Interrupted, save_only_model=True).train()


@pytest.mark.parametrize("rule", ["loop_dropout", "adaptive"])
def test_restored_callbacks_resume_bit_for_bit(tmp_path, make_trainer, rule):
    """transformers makes the user's callbacks again from a checkpoint, and leaves the callbacks of this package alone."""
    fields = {"rule": rule, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    fields |= {"output_dir": str(tmp_path), "restore_callback_states_from_checkpoint": True}
    make_trainer(callbacks=[EarlyStoppingCallback(5)], **fields).train()
    last = tmp_path / "checkpoint-6"
    weights = (last / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(last)
    resumed = make_trainer(callbacks=[EarlyStoppingCallback(9)], **fields)
    places = [type(callback) for callback in resumed.callback_handler.callbacks]
    resumed.train(resume_from_checkpoint=True)
    assert resumed.seen[0].step == 4 and (last / "adapter_model.safetensors").read_bytes() == weights
    (stopping,) = (x for x in resumed.callback_handler.callbacks if isinstance(x, EarlyStoppingCallback))
    assert stopping.early_stopping_patience == 5
    kept = [type(callback) for callback in resumed.callback_handler.callbacks if callback is not stopping]
    assert kept == [place for place in places if place is not EarlyStoppingCallback]


@pytest.mark.parametrize("strategy", ["steps", pytest.param("epoch", marks=pytest.mark.slow)])
def test_early_stop_is_at_the_same_step_after_a_kill(tmp_path, make_trainer, log, capsys, strategy):
    """The first evaluation counts as the best one. With a patience of 2, the third one stops the training."""
    fields = {"early_stopping_patience": 2, "eval_strategy": strategy, "eval_steps": 2, "greater_is_better": True}
    steps = 2 if strategy == "steps" else 3  # of an epoch of 48 examples
    fields |= {"max_steps": 20, "save_steps": 2, "save_strategy": strategy, "lr_scheduler_type": "constant"}
    make = functools.partial(make_trainer, output_dir=str(tmp_path), per_device_train_batch_size=16, **fields)
    whole = make()
    whole.train()
    assert whole.state.global_step == 3 * steps and whole.state.best_global_step == steps
    assert f"stopped early, at step {3 * steps} of 20, after 2 evaluations without a better held-out loss" in log.text
    assert "make a new trainer with `early_stopping_patience=4`, for example, and continue with `train(" in log.text
    logged = whole.state.log_history
    for steps_left in ({*range(2 * steps, 3 * steps + 1)}, set()):  # killed before the last checkpoint, and behind it
        if steps_left:
            shutil.rmtree(tmp_path / f"checkpoint-{3 * steps}")
        resumed = make()
        log.clear()
        resumed.train(resume_from_checkpoint=True)
        assert f"Training stopped early, at step {3 * steps} of 20, after 2 evaluations" in log.text
        assert {gates.step for gates in resumed.seen} == steps_left  # of training steps and the evaluation
        assert resumed.args.max_steps == resumed.state.max_steps == 20
        assert_same_weights(resumed, whole)
        losses = [
            [log["eval_loss"] for log in history if "eval_loss" in log]
            for history in (logged, resumed.state.log_history)
        ]
        assert losses[0] == losses[1]
    assert f"The training has ended at checkpoint-{3 * steps}, so nothing is left to train" in capsys.readouterr().out
    further = make(early_stopping_patience=3, save_total_limit=1).train(resume_from_checkpoint=True)
    assert further.global_step > 3 * steps and [saved.name for saved in list_checkpoints(tmp_path)] == [
        f"checkpoint-{steps}"
    ]
    assert f"`, from step {steps}, whose checkpoint is the newest one that was kept." in log.messages[-1]


def test_early_stopping_saves_at_evaluations(tmp_path, config):
    """Fields that the user has set stay, so a wrong one is an error."""
    args = config(early_stopping_patience=2, eval_strategy="epoch", save_strategy="epoch")
    assert args.load_best_model_at_end
    made = LoopDropoutConfig(str(tmp_path), bf16=False, early_stopping_patience=2, eval_strategy="steps", eval_steps=7)
    assert (made.save_strategy, made.save_steps) == ("steps", 7) and made.load_best_model_at_end
    assert not {"save_steps", "load_best_model_at_end"} & {*made.given_fields()}
    for fields, message in {
        ("load_best_model_at_end", False): "`load_best_model_at_end` must be true if `early_stopping_patience` is set",
        ("eval_strategy", "no"): "`eval_strategy` must be steps or epoch if `early_stopping_patience` is set, got no.",
        (
            "save_strategy",
            "epoch",
        ): "`save_strategy` must be steps, as `eval_strategy`, if `early_st.* is set, got epoch.",
        ("save_steps", 4): r"`save_steps` must equal `eval_steps` \(2\) if `early_stopping_patience` is set, got 4.",
        ("early_stopping_patience", 0): "`early_stopping_patience` must be at least 1, got 0.",
    }.items():
        given = {"early_stopping_patience": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
        with user_error(message):
            config(**{**given, "save_steps": 2, fields[0]: fields[1]})


def test_best_checkpoint_is_saved_at_evaluations(tmp_path, log):
    """The default of `save_steps` would save nothing in a short training, whose last weights were then kept."""
    best = functools.partial(LoopDropoutConfig, str(tmp_path), bf16=False, load_best_model_at_end=True)
    made = best(eval_strategy="steps", eval_steps=5)
    assert (word_of(made.save_strategy), made.save_steps) == ("steps", 5)
    assert not {"save_strategy", "save_steps"} & {*made.given_fields()}
    assert word_of(best(eval_strategy="epoch").save_strategy) == "epoch"
    assert best(eval_strategy="steps", eval_steps=5, save_steps=10).save_steps == 10
    assert LoopDropoutConfig(str(tmp_path), bf16=False, eval_strategy="steps", eval_steps=5).save_steps == 500
    with user_error("`save_strategy` must be epoch, as `eval_strategy`"):
        best(eval_strategy="epoch", save_strategy="steps")
    logging.Logger.warning_once.cache_clear()  # of another test
    replace(
        LoopDropoutConfig(str(tmp_path), bf16=False), save_strategy="no"
    )  # which copies the default of `save_steps`
    assert "no effect" not in log.text
    best(eval_strategy="epoch", save_steps=7)
    best(eval_strategy="epoch", save_steps=7, save_strategy="best", metric_for_best_model="loss")
    unused = "`save_steps` has no effect, because `save_strategy` is"
    why = "`load_best_model_at_end` keeps the best checkpoint, and so each evaluation saves one."
    assert {*log.messages} == {f"{unused} epoch. {why}", f"{unused} best."}


def test_best_checkpoint_needs_evaluations_in_our_words(config):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 4}
    for changes, message in {
        (
            ("eval_strategy", "no"),
        ): "`eval_strategy` must be steps or epoch if `load_best_model_at_end` is true, got no.",
        (("eval_strategy", "epoch"),): "`save_strategy` must be epoch, as `eval_strategy`, if .* is true, got steps.",
        (("save_steps", 6),): r"`save_steps` must be a multiple of `eval_steps` \(4\) if .* is true, got 6.",
        (("save_steps", 2),): r"`save_steps` must be a multiple of `eval_steps` \(4\) if .* is true, got 2.",
        (("save_steps", 0.5),): r"`save_steps` must be a multiple of `eval_steps` \(4\) if .* is true, got 0.5.",
    }.items():
        with user_error(message):
            config(**{**best, **dict(changes)})
    for save_steps, eval_steps in ((8, 4), (0.3, 0.1), (4, None)):
        config(**{**best, "save_steps": save_steps, "eval_steps": eval_steps})
    config(**{**best, "save_strategy": "best", "save_steps": 6})


def test_unmeasured_metric_is_explained(make_trainer):
    fields = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    with user_error(
        "`metric_for_best_model` must be one of loss, .*mean_token_accuracy, .*got 'entropyy'. Did you mean 'entropy'?"
    ):
        make_trainer(metric_for_best_model="entropyy", **fields).train()  # a class of the user's can add metrics
    trainer = make_trainer(cls=LoopDropoutSFTTrainer, metric_for_best_model="mean_token_acuracy", **fields)
    with user_error("`metric_for_best_model` must be one of loss, .*Did you mean 'mean_token_accuracy'"):
        trainer.train()
    for cost in ("eval_runtime", "num_tokens"):  # which every evaluation measures
        trainer.args.metric_for_best_model = cost
        with user_error("`metric_for_best_model` must be one of loss, mean_token_accuracy, entropy, got"):
            trainer.train()
    trainer.args.metric_for_best_model = "loss"
    trainer.eval_dataset = {"short": trainer.eval_dataset, "long": trainer.eval_dataset}
    with user_error("`metric_for_best_model` must be one of short_loss, .*long_loss, .*got 'loss'."):
        trainer.train()
    trainer.args.metric_for_best_model = "entropy"  # of which dataset?
    with user_error(
        "`metric_for_best_model` must be one of short_loss, .*short_entropy, .*got 'entropy'. Did you mean"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


def test_results_name_the_checkpoint_that_is_kept(make_trainer, log):
    """The best evaluation can have no checkpoint, so its step is not the step of the weights, and the run says so."""
    fields = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}
    trainer = make_trainer(lr_scheduler_type="constant", **fields)
    trainer.train()
    assert trainer.state.best_global_step == 1 and trainer.state.best_model_checkpoint is None
    assert saved_step(trainer) == 6
    folder, history = trainer.args.output_dir, trainer.state.log_history
    losses = {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row}
    unsaved = f"The best step 1 (held-out loss {trainer.state.best_metric:.4g}) was not saved"
    assert f"{unsaved}, because checkpoints are saved at other steps." in log.text
    assert describe_kept_checkpoint(folder) == f"the last step, 6 (held-out loss {losses[6]:.4g}). {unsaved}"
    trainer.state.best_model_checkpoint = "run/checkpoint-4"
    assert saved_step(trainer) == 4
    trainer.save_state()
    assert describe_kept_checkpoint(folder).endswith(f"trained 6 steps. {unsaved}")
    trainer.state.best_model_checkpoint = "run/checkpoint-1"
    trainer.save_state()
    assert describe_kept_checkpoint(folder).endswith("trained 6 steps")


def test_finished_training_is_not_continued(make_trainer):
    fields = {"lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 2, "greater_is_better": True}
    for load_best in (False, True):
        make = functools.partial(make_trainer, cls=LoopDropoutSFTTrainer, load_best_model_at_end=load_best, **fields)
        trainer, resumed = make(), make()
        trainer.train()
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 6
        assert_same_weights(resumed, trainer)
    assert not trainer.state.best_model_checkpoint.endswith("-6")


@pytest.mark.parametrize("adapter", ["default", "second"])
def test_best_checkpoint_of_any_adapter_is_loaded(make_trainer, adapter):
    model = get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro()), adapter_name=adapter)
    fields = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    trainer = make_trainer(model, lr_scheduler_type="constant", **fields)  # whose first evaluation counts as the best
    trainer.train()
    folder = Path(trainer.args.output_dir, "checkpoint-2")
    best = load_file((folder if adapter == "default" else folder / adapter) / "adapter_model.safetensors")
    now = get_peft_model_state_dict(trainer.model, adapter_name=adapter)
    assert trainer.state.best_global_step == 2
    torch.testing.assert_close(now, best, rtol=0, atol=0)


@pytest.mark.parametrize(("micro_batches", "size"), [(1, 16), (5, 4)])
def test_training_is_not_continued_to_fewer_steps(make_trainer, micro_batches, size):
    """An epoch of 48 examples has 3 steps of 16 examples, or 3 steps of 5 micro-batches of which the last one is short."""
    fields = {"gradient_accumulation_steps": micro_batches, "per_device_train_batch_size": size}
    fields |= {"max_steps": -1, "save_steps": 1}
    steps = 3
    trainer = make_trainer(num_train_epochs=1, **fields)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    for changes, message in {
        (
            ("num_train_epochs", 0.6),
        ): rf"`num_train_epochs` must be at least 1, .*-{steps} is at step {steps}, got 0.6, which",
        (("max_steps", steps - 1),): rf"`max_steps` must be at least {steps}, .* is at step {steps}, got {steps - 1}",
    }.items():
        shorter = make_trainer(**{"num_train_epochs": 1, **fields, **dict(changes)})
        with user_error(message):
            shorter.train(resume_from_checkpoint=True)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    for step in {1, steps - 1, steps}:  # to the same length
        resumed = make_trainer(num_train_epochs=(steps - 0.5) / steps, **fields)
        resumed.train(str(folder / f"checkpoint-{step}"))
        assert resumed.state.global_step == steps


def test_non_finite_gradient_stops_before_the_step(make_trainer):
    class Spoiled(Recorder):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("inf") if self.state.global_step == 4 else loss

    trainer = make_trainer(cls=Spoiled)
    with pytest.raises(NonFiniteGradientError, match="optimizer step 5 .* or `max_grad_norm`[.]$"):
        trainer.train()
    torch.testing.assert_close(trained_parameters(trainer.model), trainer.seen[-1].weights, rtol=0, atol=0)
    assert newest_checkpoint(trainer.args.output_dir).endswith("checkpoint-4")
    model = trainer.model.to(torch.bfloat16)
    with pytest.raises(NonFiniteGradientError, match="`max_grad_norm`, or train in float32"):
        trainer._stop_callback.on_pre_optimizer_step(trainer.args, trainer.state, None, model)


def test_non_finite_weights_are_not_saved(make_trainer):
    trainer = make_trainer(learning_rate=1e38, max_grad_norm=0, save_steps=1)
    with pytest.raises(NonFiniteGradientError, match="weights after optimizer step 1"):
        trainer.train()
    assert not [*Path(trainer.args.output_dir).rglob("*.safetensors")]


def test_interrupted_save_is_not_loaded(make_sft):
    class Interrupted(LoopDropoutSFTTrainer):
        def _save(self, *args, **kwargs):  # of the adapter
            super()._save(*args, **kwargs)
            raise KeyboardInterrupt

    trainer = make_sft(load_model("tiny-ouro", num_loops=3), cls=Interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.save_model()
    with user_error("was not saved completely"):
        load_model(trainer.args.output_dir)


def test_other_data_is_not_continued(make_trainer, stopped):
    trainer = make_trainer()
    trainer.train_dataset = trainer.train_dataset.select(range(8, 4, -1))
    with user_error(r"trained on \d+ examples \(digest \w+\), got 4 examples"):
        trainer.train(resume_from_checkpoint=True)


def test_columns_in_another_order_are_continued(make_trainer, stopped, dataset):
    rows = dataset.select_columns(["completion", "prompt"]).add_column("source", range(len(dataset)))
    trainer = make_trainer(rows=rows)
    trainer.train_dataset = trainer.train_dataset.select_columns(
        sorted(trainer.train_dataset.column_names, reverse=True)
    )
    trainer.train(resume_from_checkpoint=True)
    assert len(trainer.seen) == 4


CHANGES = [
    ({"seed": 7}, "`seed` changed from 42 to 7"),
    ({"p": 0.25}, "`p` changed from 0.5 to 0.25"),
    ({"rule": "unscaled"}, "`rule` changed from .loop_dropout. to .unscaled."),
    ({"learning_rate": 0.02}, "`learning_rate` changed from 0.01 to 0.02"),
    ({"per_device_train_batch_size": 2}, "`per_device_train_batch_size` changed from 4 to 2"),
    ({"gradient_accumulation_steps": 2}, "`gradient_accumulation_steps` changed from 1 to 2"),
    ({"lora_alpha": 8}, "`lora_alpha` changed from 32 to 8"),
    ({"r": 8}, "`r` changed from 16 to 8"),
    ({"lora_dropout": 0.1}, "`lora_dropout` changed from 0 to 0.1"),
    ({"num_loops": 3}, "`num_loops` changed from 4 to 3"),
    (
        {"target_modules": ["q_proj"]},
        "has another adapter: only one of it and the model has the tensor `.*lora_A.weight`",
    ),
    ({"gate_seed": 1}, "`gate_seed` changed from the default to 1"),
    (
        {"seed": 7, "p": 0.25, "per_device_train_batch_size": 2},
        "`per_device_train_batch_size` changed from 4 to 2, `seed` changed from 42 to 7 and `p` changed from 0.5 to 0.25. "
        "Restore all of them, or",
    ),
]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            tiny_ouro(num_hidden_layers=1).to(torch.bfloat16),
            "the data type of the base model changed from float32 to bfloat16. Restore",
        ),
        (
            tiny_ouro(num_hidden_layers=1, attn_implementation="eager"),
            "`attn_implementation` changed from 'sdpa' to 'eager'",
        ),
    ],
    ids=["data type", "attention"],
)
def test_other_base_models_are_not_continued(make_trainer, stopped, model, message):
    with user_error(f"checkpoint-2 was trained with other settings: {message}"):
        make_trainer(model).train(resume_from_checkpoint=True)


def test_other_number_of_processes_is_not_continued(make_trainer, stopped):
    """With `split_batches`, no other setting differs, but each process has its own random state in the checkpoint."""
    state = stopped / "checkpoint-2" / "trainer_state.json"
    assert '"num_processes": 1' in state.read_text()
    state.write_text(state.read_text().replace('"num_processes": 1', '"num_processes": 2'))
    record(state.parent)
    with user_error("`num_processes` changed from 2 to 1"):
        make_trainer().train(resume_from_checkpoint=True)


def test_callbacks_that_begin_again_are_named(make_trainer, log):
    fields = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    make_trainer(callbacks=[EarlyStoppingCallback(5)], max_steps=2, **fields).train()
    assert "begins again" not in log.text
    make_trainer(callbacks=[EarlyStoppingCallback(5)], **fields).train(resume_from_checkpoint=True)
    assert "EarlyStoppingCallback begins again, because `restore_callback_states_from_checkpoint` is false" in log.text


def test_checkpoints_of_another_training_are_passed_over(make_trainer, log):
    first = make_trainer(save_steps=1, max_steps=3)
    first.train()
    assert "checkpoints of an earlier training" not in log.text
    folder = first.args.output_dir
    second = make_trainer(save_steps=1, max_steps=2, learning_rate=1e-4)
    second.train()
    assert f"{folder} has checkpoints of an earlier training up to checkpoint-3, which this" in log.text
    assert "use `train(resume_from_checkpoint=True)`" in log.text
    assert "present weights" not in log.text
    log.clear()
    resumed = make_trainer(max_steps=3, learning_rate=1e-4)
    resumed.train(resume_from_checkpoint=True)
    assert [seen.step for seen in resumed.seen] == [2] and resumed.training_id == second.training_id
    assert "continues from" not in log.text  # the first training's checkpoint-3 was older
    make_trainer(save_steps=1, max_steps=1, learning_rate=1e-3).train()
    again = make_trainer(save_strategy="no", max_steps=5, learning_rate=1e-4)
    again.train(resume_from_checkpoint=True)
    assert [seen.step for seen in again.seen] == [3, 4] and again.training_id == second.training_id
    assert "continues from" in log.text and "checkpoint-1 was trained with other settings: `learning_rate`" in log.text


def test_second_stop_is_continued_where_it_stopped(make_trainer, log):
    """Checkpoints of the first training have later steps, and the same settings."""

    class Interrupted(Recorder):
        last = 5

        def compute_loss(self, *args, **kwargs):
            if self.state.global_step == self.last - 1:
                signal.raise_signal(signal.SIGINT)
            return super().compute_loss(*args, **kwargs)

    trainer = make_trainer(cls=Interrupted, save_strategy="no")
    folder = Path(trainer.args.output_dir)
    for last in (5, 3):
        trainer.last = last
        with pytest.raises(TrainingInterrupted, match=f"after step {last} of 6. Continue with"):
            trainer.train()
    assert "starts from present weights of the model, which were trained before: SFT with Loop Dropout" in log.text
    assert "make a new trainer" in log.text
    assert newest_checkpoint(folder) == str(folder / "checkpoint-3")
    with user_error(f"newest complete checkpoint is {folder / 'checkpoint-3'}"):
        find_source(folder)
    other = make_trainer(save_strategy="no")  # as a command does in a new process
    other.train(resume_from_checkpoint=True)
    trainer.last, trainer.seen = 0, ()
    trainer.train(resume_from_checkpoint=True)
    for resumed in (other, trainer):
        assert [seen.step for seen in resumed.seen] == [3, 4, 5]
    assert_same_weights(other, trainer)


def test_branch_from_an_older_checkpoint_is_newer(make_trainer):
    first = make_trainer(save_steps=1, max_steps=4)
    first.train()
    folder = Path(first.args.output_dir)
    branch = make_trainer(save_steps=1, max_steps=3)
    branch.train(str(folder / "checkpoint-2"))
    assert [path.name for path in list_checkpoints(folder)] == [f"checkpoint-{step}" for step in (1, 2, 4, 3)]
    state = folder / "checkpoint-3" / "trainer_state.json"
    state.write_text(state.read_text().replace('"training_number": 2', '"training_number": "2"'))  # of a stranger
    assert newest_checkpoint(folder) != str(folder / "checkpoint-3")


@pytest.mark.parametrize(("changes", "message"), CHANGES, ids=str)
def test_other_settings_are_not_continued(make_trainer, stopped, changes, message):
    lora = {name: changes[name] for name in ("r", "lora_alpha", "lora_dropout", "target_modules") if name in changes}
    model = tiny_ouro(num_hidden_layers=1, **{name: changes[name] for name in ("num_loops",) if name in changes})
    fields = {name: value for name, value in changes.items() if name not in (*lora, "num_loops")}
    trainer = make_trainer(model, peft_config=default_peft_config(model, **lora), **fields)
    with user_error(f"checkpoint-2 .*{message}"):
        trainer.train(resume_from_checkpoint=True)


RULE = """
class OwnRule(LoopDropout):
    name = "own_rule"
    SCALE = {}
"""


def test_other_code_of_a_rule_is_not_continued(tmp_path, make_trainer, monkeypatch):
    """The class of the rule counts, and not the rest of its file."""
    monkeypatch.syspath_prepend(tmp_path)
    for number, (scale, rest) in enumerate([(1, ""), (1, "# a comment"), (2, "")], start=1):
        text = f"from loopdropout_trainer.gates import LoopDropout\n{RULE.format(scale)}\n{rest}"
        (tmp_path / f"own_rule_{number}.py").write_text(text)
        rule = importlib.import_module(f"own_rule_{number}").OwnRule
        monkeypatch.setitem(RULES, "own_rule", rule)
        trainer = make_trainer(rule=rule(p=0.5), max_steps=number, save_steps=1)
        if number < 3:
            trainer.train(resume_from_checkpoint=number > 1)
    with user_error(
        "was trained with other code: the code of the rule OwnRule, with its comments and docstrings, changed. Restore the "
        "code, or start a new training"
    ):
        trainer.train(resume_from_checkpoint=True)


def test_code_of_a_rule_in_a_notebook_is_known():
    """Python finds the source of a cell's functions, but not of its classes."""
    digests = set()
    for number, scale in enumerate((1, 1, 2)):
        cell, name = f"<cell {number}>", "__main__"
        text = "class Own(LoopDropout):\n    def sample(self, draw):\n        return super().sample(draw) * {}\n"
        linecache.cache[cell] = (0, None, text.format(scale).splitlines(keepends=True), cell)
        names = {"__name__": name, "LoopDropout": RULES["loop_dropout"]}
        exec(compile(text.format(scale), cell, "exec"), names)
        digests.add(digest_rule(names["Own"](p=0.5)))
    assert len(digests) == 2 and all(" " in digest for digest in digests)


def test_settings_of_saving_and_evaluation_may_change(make_trainer, log):
    """Early stopping that is added chooses among the steps of the continuation. Without it, all steps are taken."""
    straight = make_trainer()
    straight.train()
    folder = straight.args.output_dir
    fields = {"eval_strategy": "steps", "eval_steps": 2, "greater_is_better": True, "early_stopping_patience": 2}
    ends = (
        "`early_stopping_patience` changed, and chooses the best checkpoint among the steps after .*checkpoint-6, but "
    )
    with user_error(ends):
        make_trainer(**fields).train(f"{folder}/checkpoint-6")
    best = make_trainer(**fields)
    best.train(f"{folder}/checkpoint-2")
    assert (
        "`early_stopping_patience` changed, so only evaluations after step 2 count for the best checkpoint."
        in log.text
    )
    losses = {row["step"]: row["eval_loss"] for row in best.state.log_history if "eval_loss" in row}
    assert {*losses} == {4, 6} and best.state.best_metric == max(losses.values())
    log.clear()
    last = make_trainer()
    last.train(f"{folder}/checkpoint-4")
    assert last.state.best_metric is None and "changed" not in log.text
    assert_same_weights(last, straight)
    fields = {"save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 2, "save_total_limit": 1}
    resumed = make_trainer(per_device_eval_batch_size=2, **fields)
    resumed.train(f"{folder}/checkpoint-2")
    assert min(seen.step for seen in resumed.seen) == 2
    assert_same_weights(resumed, straight)
    evaluated = [row["step"] for row in resumed.state.log_history if "eval_loss" in row]
    assert evaluated == [3, 4, 5, 6]


def test_trained_model_is_not_trained_again_by_a_resume(make_trainer):
    trainer = make_trainer(save_strategy="no", max_steps=1)
    trainer.train(resume_from_checkpoint=True)  # a first start
    with user_error("has no checkpoint and the model is already trained for 1 step. Call"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    assert len(trainer.seen) == 2


def test_streams_are_continued_in_their_first_pass(make_trainer, dataset, log):
    make = functools.partial(make_trainer, rows=dataset.select(range(16)).to_iterable_dataset(), save_steps=1)
    trainer = make()
    trainer.train()  # four steps for each pass
    assert "The training cannot be resumed from here on" in log.text
    for step in (3, 4):
        resumed = make()
        resumed.train(f"{trainer.args.output_dir}/checkpoint-{step}")
        assert_same_weights(resumed, trainer)
    with user_error("must be a checkpoint of the first pass over a stream, but .*checkpoint-5 is in pass 2"):
        make().train(f"{trainer.args.output_dir}/checkpoint-5")


def enter_locked_folder(folder):
    with user_error("Another process writes"), lock_folder(folder):
        pass


def enter_free_folder(folder):
    with lock_folder(folder), lock_folder(folder):
        pass


def hold_folder(folder, rounds):
    """Lock a folder many times, and raise if another process has it at the same time."""
    holder = Path(folder, "holder")
    for _ in range(rounds):
        try:
            with lock_folder(folder):
                holder.touch(exist_ok=False)
                holder.unlink()
        except UserError:  # another process was in it for long
            pass


def test_folder_is_locked_once(tmp_path):
    processes = [fork(hold_folder, str(tmp_path), 300) for _ in range(4)]
    assert [ended(process) for process in processes] == [0] * 4


def test_folder_is_locked_while_training(make_trainer):
    class Intruder(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            assert ended(fork(enter_locked_folder, args.output_dir)) == 0

    trainer = make_trainer(callbacks=[Intruder()], max_steps=1)
    trainer.train()
    assert ended(fork(enter_free_folder, trainer.args.output_dir)) == 0


def test_full_disk_names_newest_checkpoint(make_trainer, monkeypatch):
    class Full(Recorder):
        def save_model(self, *args, **kwargs):
            if self.state.global_step == 4:
                raise OSError(28, "No space left on device")
            super().save_model(*args, **kwargs)

    with user_error("No space left on device. The newest complete checkpoint is .*checkpoint-2"):
        make_trainer(cls=Full).train()


@pytest.mark.parametrize(
    ("received", "expected"),
    [([0, 0], 0), ([0, 15], 15), ([15, 15], 15), ([2] * 15, 2), ([15, 2], 2)],
)
def test_signal_of_several_processes(received, expected):
    """Fifteen times SIGINT (2) is no SIGTERM (15)."""
    assert first_signal(received) == expected
