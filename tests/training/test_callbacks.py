"""Callbacks: logged gates, sampled depths, and the adaptive rule's estimate in checkpoints."""

import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import ProgressCallback, TrainerCallback, TrainerState

from helpers.errors import user_error
from helpers.trainers import Recorder, assert_same_weights, logged
from loopdropout_trainer import LoopDropoutSFTTrainer, load_model, merge_and_save, use_depth
from loopdropout_trainer.gates.depth import sample_depth
from loopdropout_trainer.jobs.progress import JobProgressCallback, SampleCompletionsCallback
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.results.run_files import read_results
from loopdropout_trainer.results.training_results import describe_held_out_examples, training_results
from loopdropout_trainer.saving.checkpoints import read_history
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.terminal import format_value
from loopdropout_trainer.tokenizers import load_tokenizer
from loopdropout_trainer.training import stopping
from loopdropout_trainer.training.stopping import TrainingInterrupted


EXACT = {"adam_epsilon": 1e-3, "max_grad_norm": 0}
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
DEPTHS = {"depth_sampling": "uniform", "depth_sampling_args": {"low": 1, "high": 6}}


class FailsOnce(TrainerCallback):
    has_failed = False

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and not self.has_failed:
            self.has_failed = True
            raise InterruptedError


@pytest.mark.parametrize("fields", [{}, SPLIT], ids=["whole", "split"])
def test_gates_are_logged(make_sft, fields):
    trainer = make_sft(cls=Recorder, p=[0.9, 0.5, 0.5, 0.1], callbacks=[FailsOnce()], **fields)
    with pytest.raises(InterruptedError):
        trainer.train()
    trainer.seen = ()
    trainer.train()  # without the gates of the failed step
    for step, log in enumerate(log for log in trainer.state.log_history if "loss" in log):
        gates = torch.cat([seen.gates for seen in trainer.seen if seen.step == step], dim=1)  # [K, B]
        values = [log["gate_mean"], *(log[f"active_loop_{loop}"] for loop in range(1, 5))]
        assert values == pytest.approx([gates.mean().item(), *(gates != 0).float().mean(dim=1).tolist()])


def test_depths_are_sampled_for_each_step(make_sft):
    fields = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4, **DEPTHS, **EXACT}
    whole, resumed, split = (make_sft(cls=Recorder, **fields, **more) for more in ({}, {}, SPLIT))
    whole.train()
    resumed.train(f"{whole.args.output_dir}/checkpoint-4")
    split.train()
    sampler, seed = whole.args.make_depth_sampler(), whole.args.seed
    depths = [sample_depth(sampler, seed, step, 4) for step in range(6)]
    assert [len(seen.gates) for seen in whole.seen] == [seen.depth for seen in whole.seen] == depths
    assert [seen.depth for seen in split.seen] == [depth for depth in depths for _ in range(2)]
    assert logged(whole, "depth") == depths
    assert len(set(depths)) > 2 and whole.num_loops == 4
    assert_same_weights(whole, split, atol=1e-5, rtol=1e-3)
    assert [seen.depth for seen in resumed.seen] == depths[4:]
    assert_same_weights(whole, resumed)


def test_sensitivity_is_summed_over_micro_batches(train):
    whole, split = (train(rule="adaptive", **EXACT, **fields) for fields in ({}, SPLIT))
    assert whole.rule.estimate.tolist() == pytest.approx(split.rule.estimate.tolist(), rel=2e-3)


def read_times(trainer):
    """Return the results in seconds of a training."""
    return {row["metric"]: row["value"] for row in training_results(trainer) if row["unit"] == "s"}


class LongStep(TrainerCallback):
    """Let the first step seem to take 1,000 s."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.trainer._step_clock.seconds += 1000


class TimedSamples(SampleCompletionsCallback):
    seconds = 0.0

    def on_evaluate(self, *args, **kwargs):
        start = time.monotonic()
        super().on_evaluate(*args, **kwargs)
        self.seconds += time.monotonic() - start


def test_time_of_steps_is_measured_over_all_sessions(make_sft, tmp_path):
    """Without evaluations, samples and checkpoints. A resumed training adds its seconds to those of its checkpoint."""
    fields = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    first = make_sft(**fields)
    first.add_callback(samples := TimedSamples(first))
    first.add_callback(callback := LongStep())
    callback.trainer = first
    first.train()
    times = read_times(first)
    others = samples.seconds + sum(log.get("eval_runtime", 0) for log in first.state.log_history)
    assert 1000 < times["train_seconds"] < 1000 + logged(first, "train_runtime")[0] - others
    assert times["step_seconds"] == times["train_seconds"] / 2
    for checkpoint in ("checkpoint-1", "checkpoint-2"):  # the second one has nothing left to train
        resumed = make_sft(**fields)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / checkpoint))
        assert 1000 < read_times(resumed)["train_seconds"] < 1900  # not an estimate from the last session


@pytest.mark.parametrize("strategy", ["steps", "epoch", "no"])
def test_each_step_has_one_sample(make_sft, capsys, strategy):
    """Also the last step, whose epoch is evaluated after it. Without bars, no evaluation shows one."""
    trainer = make_sft(eval_strategy=strategy, eval_steps=2, max_steps=4, per_device_train_batch_size=12)  # an epoch
    trainer.add_callback(SampleCompletionsCallback(trainer))
    JobProgressCallback().attach(trainer, "Loop Dropout")
    trainer.train()
    printed = capsys.readouterr()
    steps = re.findall(r"(?m)^step: (\d+)$", printed.out)
    assert steps == (["2", "4"] if strategy == "steps" else ["4"])
    assert "it/s" not in printed.err


@pytest.mark.parametrize("step", [2, 3])
def test_interrupted_training_ends_without_a_sample(make_sft, capsys, step):
    """Also if its last step is evaluated, as step 3 is."""

    class Interrupted(LoopDropoutSFTTrainer):
        def compute_loss(self, *args, **kwargs):
            if self.model.training and self.state.global_step == step - 1:
                signal.raise_signal(signal.SIGINT)
            return super().compute_loss(*args, **kwargs)

    trainer = make_sft(cls=Interrupted, eval_strategy="steps", eval_steps=3, max_steps=6)
    trainer.add_callback(SampleCompletionsCallback(trainer))
    with pytest.raises(TrainingInterrupted):
        trainer.train()
    assert "completion: " not in capsys.readouterr().out
    trainer.train(resume_from_checkpoint=True)
    assert re.findall(r"(?m)^step: (\d+)$", capsys.readouterr().out)[-1] == "6"


def test_loss_at_the_end_is_the_mean_over_all_steps(make_sft, tmp_path):
    """Of a continued training, too: the log, the output and the table have one number."""
    fields = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5, "logging_steps": 2}
    straight = make_sft(**fields)
    expected = straight.train()
    logs = [log for log in straight.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [2, 3, 4, 5]
    assert expected.training_loss == pytest.approx(np.average([log["loss"] for log in logs], weights=[2, 1, 1, 1]))
    shutil.rmtree(tmp_path / "run/checkpoint-5")
    resumed = make_sft(**fields)
    output = resumed.train(resume_from_checkpoint=True)
    losses = [row["value"] for row in training_results(resumed) if row["metric"] == "train_loss"]
    assert losses == logged(resumed, "train_loss") == [output.training_loss] == [output.metrics["train_loss"]]
    assert losses == [expected.training_loss]


def test_sample_ends_with_the_first_answer(make_sft):
    """A chat has further answers behind it."""
    trainer = make_sft()
    dataset = trainer.eval_dataset
    trainer.eval_dataset = {"first": dataset, "second": dataset}
    assert SampleCompletionsCallback(trainer).examples
    trainer.eval_dataset = None
    with user_error("`eval_dataset` must be given to the trainer, because `SampleCompletionsCallback` completes"):
        SampleCompletionsCallback(trainer)
    trainer.eval_dataset = dataset
    for labels, answer in (([-100, -100, 3, 4, -100, 6], [3, 4]), ([-100, -100, 3, 4, 5, 6], [3, 4, 5, 6])):
        batch = {"input_ids": torch.arange(1, 7)[None], "labels": torch.tensor([labels])}
        trainer.data_collator = lambda rows, batch=batch: batch
        samples = SampleCompletionsCallback(trainer)
        assert samples.examples == [([1, 2], answer)]


def test_sample_of_a_chat_begins_with_its_last_answer(config):
    """Also if all turns are trained. A text that is not a chat is divided in the middle."""
    turns = [
        ("user", "1+1"),
        ("assistant", "2"),
        ("user", "Write down the number that comes after 41"),
        ("assistant", "42"),
    ]
    chats = Dataset.from_list([{"messages": [{"role": role, "content": content} for role, content in turns]}])
    data = {"processing_class": load_tokenizer("tiny-ouro", chat_template="tulu2")}
    trainer = LoopDropoutSFTTrainer(
        load_model("tiny-ouro"), config(max_length=None), train_dataset=chats, eval_dataset=chats, **data
    )
    prompt, answer = map(trainer.processing_class.decode, SampleCompletionsCallback(trainer).examples[0])
    assert "after 41" in prompt and prompt.endswith("<|assistant|>\n")
    assert answer.startswith("42")
    trainer.eval_dataset = trainer.eval_dataset.map(lambda row: {"input_ids": row["input_ids"][:8]})
    assert [len(part) for part in SampleCompletionsCallback(trainer).examples[0]] == [4, 4]


def test_second_training_continues_the_count_of_tokens(make_sft):
    trainer = make_sft(max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    first = logged(trainer, "num_tokens")
    trainer.train()
    assert logged(trainer, "num_tokens") == [first[-1] + count for count in first]
    # The results are about the second training alone, also if another trainer has continued it.
    for is_resumed in (False, True):
        if is_resumed:
            trainer.num_tokens = 0  # as in a new process
            trainer.train(f"{trainer.args.output_dir}/checkpoint-1")
        results = {row["metric"]: row["value"] for row in read_results(trainer.args.output_dir)}
        assert results["num_tokens"] == first[-1]
        assert results["tokens_per_second"] == pytest.approx(first[-1] / results["train_seconds"])


def test_training_in_python_leaves_its_results(make_sft, dataset):
    """A report reads `results.jsonl`, and a plot of the loss reads `trainer_state.json`."""
    for rows in (dataset, dataset.to_iterable_dataset()):
        trainer = make_sft(
            rows=rows, max_steps=3, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=3
        )
        trainer.train()
        trainer.save_model()
        folder = trainer.args.output_dir
        losses = logged(trainer, "loss")
        history = TrainerState.load_from_json(f"{folder}/trainer_state.json").log_history
        assert [log["loss"] for log in history if "loss" in log] == losses and len(losses) == 3
        results = {row["metric"]: row for row in read_results(folder)}
        assert {(r["task"], r["method"], r["seed"], r["step"], r["num_loops"]) for r in results.values()} == {
            ("training", "Loop Dropout", 42, 3, 4)
        }
        assert results["train_loss"]["value"] == pytest.approx(sum(losses) / 3)
        # The training loss is measured under the gates of the rule, and the held-out loss at gates of 1.
        assert results["train_loss"]["gates"] == "drawn" and results["eval_loss"]["gates"] == "unit"
        assert results["eval_loss"]["value"] == logged(trainer, "eval_loss")[-1]
        held_out = {name: results["eval_loss"][name] for name in ("n", "problems")}
        assert held_out == describe_held_out_examples(trainer) and held_out["n"] == 4
        assert find_source(folder).columns["method"] == "Loop Dropout"


def test_digest_of_held_out_examples_depends_on_tokens_and_labels_only(make_sft, dataset):
    """So packing, the size and the order of batches do not matter, but other tokens and labels do."""

    def digest(trainer):
        return describe_held_out_examples(trainer).get("problems")

    trainer = make_sft()
    own, collate = digest(trainer), trainer.data_collator
    packed = {"packing": True, "eval_packing": True, "packing_strategy": "bfd", "max_length": 64}
    assert [digest(make_sft(**fields)) for fields in ({"padding_free": True, "max_length": None}, packed)] == [
        own,
        own,
    ]
    trainer.args.per_device_eval_batch_size = 3
    trainer.eval_dataset = dataset.select([3, 2, 1, 0])
    assert digest(trainer) == own
    trainer.eval_dataset = dataset.select([0, 1, 2, 4])
    others = [digest(trainer), digest(make_sft(completion_only_loss=False))]
    trainer.eval_dataset = dataset.select(range(4))
    state = torch.get_rng_state()
    for mask in (lambda labels: labels == labels[labels != -100].max(), lambda labels: torch.rand(labels.shape) < 0.5):

        def mask_labels(rows, mask=mask):
            batch = collate(rows)
            return {**batch, "labels": batch["labels"].masked_fill(mask(batch["labels"]), -100)}

        trainer.data_collator = mask_labels
        others.append(digest(trainer))
    assert others[-1] is None and torch.equal(torch.get_rng_state(), state)  # of random labels
    assert len({own, *others}) == 5
    trainer.data_collator, trainer.eval_dataset = collate, dataset.to_iterable_dataset()
    assert describe_held_out_examples(trainer) == {}


def test_logged_numbers_of_tokens_have_all_digits():
    assert [*map(format_value, (10990.0, 2.0, 0.123456, 1e-5, "0:01", float("inf")))] == [
        "10990", "2", "0.1235", "1e-05", "0:01", "inf",
    ]  # fmt: skip


@pytest.mark.parametrize("is_block", [True, False])
def test_callback_may_run_another_depth_in_a_block_only(train, is_block):
    """Otherwise the next steps would train at a depth that the settings of the adapter do not have."""

    class Measure(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if not is_block:
                find_looped_model(model).num_loops = 2
                return
            with use_depth(model, 7), torch.no_grad():
                model(input_ids=torch.tensor([[5, 6]]))

    if is_block:
        assert_same_weights(train(callbacks=[Measure()]), train())
        return
    with user_error(r"`num_loops` must stay 4 in the training, got 2. Measure .* `with use_depth\(model, 2\):`"):
        train(callbacks=[Measure()])


def test_records_name_the_depth_of_an_evaluation(make_sft, tmp_path, log):
    """An evaluation at another depth is not the held-out loss of the training, and changes no depth in its records."""

    class EvaluateDeeper(TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **kwargs):
            if find_looped_model(model).num_loops == 4:
                with use_depth(model, 7):
                    deeper.append(trainer.evaluate())

    deeper = []
    trainer = make_sft(max_steps=2, eval_strategy="steps", eval_steps=1, callbacks=[EvaluateDeeper()])
    trainer.train()
    folder, history = trainer.args.output_dir, trainer.state.log_history
    assert [(log["eval_num_loops"], log["eval_loss"]) for log in history if "eval_num_loops" in log] == [
        (7, metrics["eval_loss"]) for metrics in deeper
    ]
    own = [log["eval_loss"] for log in history if "eval_loss" in log and "eval_num_loops" not in log]
    assert len(own) == 2 and own[-1] != deeper[-1]["eval_loss"]
    assert [row["value"] for row in read_results(folder) if row["metric"] == "eval_loss"] == own[-1:]
    assert [log["eval_loss"] for log in read_history(folder) if "eval_loss" in log] == own
    with use_depth(trainer.model, 7):
        trainer.save_model()
        merge_and_save(trainer.model, tmp_path / "merged", trainer.processing_class)
    assert "merged runs K = 7 loops, the depth of a block of `use_depth`, but the model itself runs 4." in log.text
    log.clear()
    trainer.model.config.num_loops = 2  # on purpose
    merge_and_save(trainer.model, tmp_path / "two", trainer.processing_class)
    assert "block of `use_depth`" not in log.text
    assert (
        "two runs K = 2 loops, but the adapter was trained at 4. To give it the trained depth, merge inside"
        in log.text
    )
    with use_depth(trainer.model, 3):
        trainer.train()
    assert (
        "`train()` runs K = 3 loops, the depth of a block of `use_depth`, but the model itself runs 2, also"
        in log.text
    )
    trainer.model.config.num_loops = 4
    card = (Path(folder) / "README.md").read_text()
    assert "| Recurrence depth K | 4 |" in card and "Depths in training" not in card
    card = (tmp_path / "merged/README.md").read_text()
    assert "| Recurrence depth K | 7 |\n| Depths in training | 4 |" in card
    assert find_source(tmp_path / "merged").lines()["depth"] == "K = 7, trained at 4, runs at any depth"
    assert find_source(folder).lines()["depth"] == "K = 4, runs at any depth"
    assert f"| {own[-1]:.4f} (4 examples, at K = 4) |" in card


def test_signal_says_when_another_one_stops_immediately(monkeypatch, log):
    now = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    callback = stopping.StopCallback()
    callback._is_first_process = True
    callback._receive(signal.SIGINT, None)
    assert f"repeat the signal after {stopping.REPEATED_SECONDS} seconds" in log.text
    now[0] = stopping.REPEATED_SECONDS - 0.1
    callback._receive(signal.SIGTERM, None)  # of a launcher
    now[0] = stopping.REPEATED_SECONDS + 0.1
    with pytest.raises(KeyboardInterrupt):
        callback._receive(signal.SIGINT, None)


class InterruptEvaluation(TrainerCallback):
    """Press Ctrl-C in the second batch of each evaluation."""

    def on_prediction_step(self, args, state, control, **kwargs):
        self.number = getattr(self, "number", 0) + 1
        if self.number % 2 == 0:
            raise KeyboardInterrupt


def test_interrupted_evaluation_leaves_no_bars(make_sft):
    """The next evaluation would continue them."""
    fields = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
    trainer = make_sft(callbacks=[InterruptEvaluation()], max_steps=1, disable_tqdm=False, **fields)
    (progress,) = [own for own in trainer.callback_handler.callbacks if isinstance(own, ProgressCallback)]
    for call in (trainer.evaluate, trainer.train, lambda: trainer.predict(trainer.eval_dataset)):
        with pytest.raises(KeyboardInterrupt):
            call()
        assert progress.prediction_bar is None and progress.training_bar is None
    assert trainer.gate_state.gates is None
    trainer.remove_callback(InterruptEvaluation)
    trainer.train()
    assert trainer.state.global_step == 1
