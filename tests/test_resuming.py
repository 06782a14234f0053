"""Interrupted trainings continue to the bits of an uninterrupted training: after a kill, a signal, or a damaged checkpoint."""

import functools
import itertools
import os
import signal
import sys

import pytest
import torch
from conftest import Recorder, assert_same_weights, byte_tokenizer, tiny_ouro, trained_parameters
from datasets import Dataset
from processes import ended, fork

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, default_peft_config
from loopdropout_trainer.training.stopping import NonFiniteGradientError, TrainingInterrupted, newest_checkpoint


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
    data = {
        "train_dataset": rows,
        "processing_class": byte_tokenizer(["<eos>", "<pad>"], eos_token="<eos>", pad_token="<pad>"),
    }
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


def test_incomplete_checkpoint_is_not_used(tmp_path):
    for step in (2, 4, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"best_')
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert newest_checkpoint(tmp_path / "checkpoint-2") is None


@pytest.fixture
def make_trainer(make_sft):
    return functools.partial(make_sft, cls=Recorder, save_strategy="steps", save_steps=2, max_steps=6)


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
    with pytest.raises(TrainingInterrupted, match="after step 3 of 6") as error:
        trainer.train()
    assert error.value.signal == stop and signal.getsignal(stop) is handler
    assert trainer.gate_state.gates is None
    resumed = make_trainer()
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.seen) == 3
    assert_same_weights(resumed, straight)


def test_non_finite_gradient_stops_before_the_step(make_trainer):
    class Spoiled(Recorder):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("inf") if self.state.global_step == 4 else loss

    trainer = make_trainer(cls=Spoiled)
    with pytest.raises(NonFiniteGradientError, match="optimizer step 5"):
        trainer.train()
    torch.testing.assert_close(trained_parameters(trainer.model), trainer.seen[-1].weights, rtol=0, atol=0)
    assert newest_checkpoint(trainer.args.output_dir).endswith("checkpoint-4")
