"""A resumed run is the run: it ends where it ends, reports all of itself, takes no other's checkpoint, and stops in order."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import STEPS, Trainer, flat_weights, tiny_ouro
from datasets import Dataset
from peft import get_peft_model
from transformers import EarlyStoppingCallback

from loopdropout_trainer import default_peft_config
from loopdropout_trainer.saving.files import LOCK_FILE, LockedError, folder_lock
from loopdropout_trainer.training.checkpoints import CheckpointError, NonFiniteLossError, TrainingInterrupted
from loopdropout_trainer.training.checkpoints.sealing import MANIFEST, rotate, seal


def killed_before(step, make_trainer, **fields):
    trainer = make_trainer(**fields)
    trainer.dies_before = step
    with pytest.raises(SystemError):
        trainer.train(resume_from_checkpoint=fields.get("resume"))


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [{"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 0.4}, {"max_steps": 12}],
    ids=["max_steps inside an epoch", "part of an epoch", "whole epoch"],
)
def test_a_finished_run_that_is_resumed_trains_nothing_more(make_trainer, end):
    fields = {**end, "save_steps": 1, "save_total_limit": 1, "lr_scheduler_type": "constant"}
    trainer = make_trainer(**fields)
    trainer.train()
    for _ in range(2):
        again = make_trainer(**fields)
        again.train(resume_from_checkpoint=True)
        assert again.steps_taken == 0
        assert again.state.global_step == trainer.state.global_step
        assert torch.equal(flat_weights(again), flat_weights(trainer))


def test_a_checkpoint_beyond_the_end_is_refused(make_trainer):
    make_trainer().train()
    with pytest.raises(CheckpointError, match="step 6, beyond the 3 steps .*`max_steps`"):
        make_trainer(max_steps=3, resume_with_changed_settings=True).train(resume_from_checkpoint=True)


def test_a_resumed_run_reports_all_of_itself(make_trainer):
    straight = make_trainer(logging_steps=3).train()
    log = make_trainer(logging_steps=3)
    log.train()
    output = {"output_dir": log.args.output_dir + "-resumed", "logging_steps": 3}
    killed_before(3, make_trainer, **output)
    resumed = make_trainer(**output)
    report = resumed.train(resume_from_checkpoint=True)
    assert resumed.steps_taken == STEPS - 2
    assert report.training_loss == pytest.approx(straight.training_loss, rel=1e-6)
    assert report.metrics["train_loss"] == report.training_loss
    of = lambda trainer, key: [entry[key] for entry in trainer.state.log_history if key in entry]
    assert of(resumed, "loss") == pytest.approx(of(log, "loss"), rel=1e-6)  # also of the interval that was cut in two
    assert of(resumed, "num_tokens")[-1] == of(log, "num_tokens")[-1]
    saved = json.loads((Path(resumed.args.output_dir) / "checkpoint-2" / "progress.json").read_text())
    assert 0 < saved["seconds"] < report.metrics["train_runtime"]

    finished = make_trainer(**output).train(resume_from_checkpoint=True)
    assert finished.training_loss == pytest.approx(straight.training_loss, rel=1e-6)


# --- whose checkpoint -------------------------------------------------------------------------------------------------


def test_a_run_is_kept_out_of_another_runs_folder_before_it_trains(make_trainer, dataset, log):
    first = make_trainer()
    first.train()
    first.save_model()
    folder = Path(first.args.output_dir)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = {"rows": dataset.select(range(40)), "learning_rate": 2e-2, "save_steps": 1}
    for removed in ("nothing", "checkpoints"):  # what is left is the trained adapter
        if removed == "checkpoints":
            for checkpoint in folder.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
            before = {path: content for path, content in before.items() if path.parent == folder}
        for resume in (None, True):
            trainer = make_trainer(**other)
            with pytest.raises(CheckpointError, match="`learning_rate` was 0.01 and is 0.02"):
                trainer.train(resume_from_checkpoint=resume)
            assert trainer.steps_taken == 0
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    make_trainer().train()  # the same run may begin anew

    other["resume_with_changed_settings"] = True
    killed_before(4, make_trainer, **other)  # asked to: checkpoints 1 to 4, beside 6 of the first run
    resumed = make_trainer(**other)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.steps_taken == STEPS - 4
    assert "checkpoint-6: it belongs to another run" in log.text
    straight = make_trainer(**other, output_dir=resumed.args.output_dir + "-straight")
    straight.train()
    assert torch.equal(flat_weights(resumed), flat_weights(straight))


@pytest.mark.parametrize("saves", ["steps", "no"])
def test_a_complete_training_is_loaded_and_not_trained_again(make_trainer, log, saves):
    first = make_trainer(save_strategy=saves)
    report = first.train()
    first.save_model()
    again = make_trainer(save_strategy=saves, eval_strategy="steps", eval_steps=1)
    output = again.train(resume_from_checkpoint=True)
    assert again.steps_taken == 0 and torch.equal(flat_weights(again), flat_weights(first))
    assert (output.training_loss, output.global_step) == (report.training_loss, STEPS)
    assert output.metrics["train_runtime"] == report.metrics["train_runtime"]
    assert again.progress() == first.progress()
    assert again.state.log_history == first.state.log_history
    again.save_model()
    assert make_trainer(save_strategy=saves).train(resume_from_checkpoint=True).global_step == STEPS


@pytest.mark.parametrize("damage", ["truncated", "missing", "bit", "of another run"])
def test_a_damaged_adapter_is_not_a_complete_training(make_trainer, log, damage):
    first = make_trainer(save_strategy="no")
    first.train()
    first.save_model()
    file = Path(first.args.output_dir) / "adapter_model.safetensors"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "bit":
        file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif damage == "truncated":
        file.write_bytes(content[:-1])
    else:
        next(p for p in first.model.parameters() if p.requires_grad).data += 1
        first._complete = None  # saved by hand, in the middle of something
        first.save_model()
    again = make_trainer(save_strategy="no")
    again.train(resume_from_checkpoint=True)
    assert again.steps_taken == STEPS and "adapter_model.safetensors" in log.text


@pytest.mark.parametrize("end", [{"max_steps": 9}, {"max_steps": -1, "num_train_epochs": 1.0}], ids=str)
def test_a_run_goes_on_for_longer(make_trainer, log, end):
    """With a constant learning rate it is the longer run from the beginning; else it goes on by the new schedule."""
    shorter = {"max_steps": 6} if "num_train_epochs" not in end else {"max_steps": -1, "num_train_epochs": 0.5}
    constant = {"lr_scheduler_type": "constant", "save_total_limit": 1}
    first = make_trainer(**shorter, **constant)
    first.train()
    first.save_model()
    longer = make_trainer(**end, **constant)
    longer.train(resume_from_checkpoint=True)
    name = next(name for name in reversed(end))
    assert "goes on from" in log.text and f"`{name}` was" in log.text
    assert longer.steps_taken == longer.state.max_steps - 6 > 0
    straight = make_trainer(**end, **constant, output_dir=first.args.output_dir + "-straight")
    straight.train()
    assert torch.equal(flat_weights(longer), flat_weights(straight))
    assert len(list(Path(first.args.output_dir).glob("checkpoint-*"))) == 1
    longer.save_model()
    with pytest.raises(CheckpointError, match=f"`{name}` was"):  # and not back
        make_trainer(**shorter, **constant).train(resume_from_checkpoint=True)

    fields = {"lr_scheduler_type": "linear", "output_dir": first.args.output_dir + "-linear"}
    make_trainer(**shorter, **fields).train()
    longer = make_trainer(**end, **fields)
    longer.train(resume_from_checkpoint=True)
    rates = [entry["learning_rate"] for entry in longer.state.log_history if "learning_rate" in entry]
    total = longer.state.max_steps
    assert rates[6:] == pytest.approx([1e-2 * (total - step) / total for step in range(6, total)])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"learning_rate": 3e-2}, "`learning_rate` was 0.01 and is 0.03"),
        ({"p": 0.3}, "`p` was 0.5 and is 0.3"),
        ({"rule": "dose_control"}, "`rule` was 'loop_dropout' and is 'dose_control'"),
        ({"seed": 7}, "`seed` was 42 and is 7"),
        ({"gradient_accumulation_steps": 2}, "the examples in a step was 4 and is 8"),
        ({"max_steps": 5}, "`max_steps` was 6 and is 5"),
        ({"max_steps": -1, "num_train_epochs": 2}, "`max_steps` was 6 and is None"),
        ({"max_length": 5}, "`max_length` was .* the training data are others"),
        ({"packing": True}, "`packing` was False and is True"),
        ({"warmup_steps": 3}, "`warmup_steps`"),
        ({"rows": "reversed"}, "another run: the training data are others"),
        ({"model": "bfloat16"}, "`dtype` was 'float32' and is 'bfloat16'"),
        ({"model": "other weights"}, "another run: the base weights are others"),
        ({"peft_config": "dropout"}, "`lora_dropout` was 0.0 and is 0.1"),
    ],
    ids=str,
)
def test_settings_that_change_the_result_are_named_and_refused(make_trainer, dataset, change, words, tmp_path):
    make_trainer().train()
    change = dict(change)
    if "rows" in change:
        change["rows"] = dataset.select(range(len(dataset) - 1, -1, -1))
    if change.get("model") == "bfloat16":
        change["model"] = tiny_ouro().bfloat16()
    elif "model" in change:
        change["model"] = tiny_ouro()
        change["model"].model.layers[1].mlp.up_proj.weight.data += 1e-3
    if "peft_config" in change:
        change["peft_config"] = default_peft_config(tiny_ouro(), lora_dropout=0.1)
    trainer = make_trainer(**change)
    with pytest.raises(CheckpointError, match=words) as error:
        trainer.train(resume_from_checkpoint=True)
    assert "`resume_with_changed_settings: true`" in str(error.value)
    with pytest.raises(CheckpointError, match=words):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert trainer.steps_taken == 0


def test_settings_without_effect_do_not_stop_a_run(make_trainer, dataset, tokenizer):
    make_trainer().train()
    changed = {
        "logging_steps": 3,
        "per_device_eval_batch_size": 2,
        "save_steps": 3,
        "run_name": "x",
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
    }
    rebuilt = Dataset.from_list(dataset.to_list())  # the same rows in other memory
    trainer = make_trainer(get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro())), rows=rebuilt, **changed)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.steps_taken == 0 and trainer.state.global_step == STEPS


def test_asked_to_a_run_goes_on_with_changed_settings_which_count(make_trainer, log):
    fields = {"lr_scheduler_type": "constant", "weight_decay": 0.0}
    make_trainer(**fields).train()
    changed = {**fields, "learning_rate": 3e-2, "weight_decay": 0.1, "max_steps": 8}
    trainer = make_trainer(**changed, resume_with_changed_settings=True)
    trainer.train(resume_from_checkpoint=True)
    assert "Going on from" in log.text and "`learning_rate` was 0.01 and is 0.03" in log.text
    assert trainer.steps_taken == 2
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-2] * 6 + [3e-2] * 2)
    assert max(group["weight_decay"] for group in trainer.optimizer.param_groups) == 0.1


def test_a_checkpoint_that_does_not_say_whose_it_is_is_resumed_with_a_word(make_trainer, log):
    make_trainer().train()
    trainer = make_trainer(learning_rate=3e-2)
    for folder in Path(trainer.args.output_dir).glob("checkpoint-*"):
        facts = json.loads((folder / MANIFEST).read_text())
        del facts["run"]
        (folder / MANIFEST).write_text(json.dumps(facts))
    trainer.train(resume_from_checkpoint=True)
    assert "does not say which run it belongs to" in log.text
    assert trainer.state.global_step == STEPS


@pytest.mark.parametrize(
    ("steps", "limit", "keep", "left"),
    [
        (
            {2: None, 4: None, 6: None, 8: "unfinished"},
            2,
            2,
            [2, 6],
        ),  # unfinished ones first, never the one just written
        ({1: 1, 2: 1, 3: 1, 8: 2, 9: 2}, 1, 3, [3, 8, 9]),  # by the seed of their run: another run's are left alone
    ],
)
def test_rotation_deletes_what_a_run_needs_least(tmp_path, steps, limit, keep, left):
    runs = {seed: {"settings": {"seed": seed}} for seed in (1, 2)}
    for step, seed in steps.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        if seed != "unfinished":
            seal(tmp_path / f"checkpoint-{step}", runs.get(seed))
    rotate(tmp_path, limit, keep=[tmp_path / f"checkpoint-{keep}"], run=runs.get(min(steps)))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"checkpoint-{step}" for step in left]


def test_an_adapter_of_another_name_is_resumed(make_trainer):
    named = lambda: get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro()), adapter_name="mine")
    straight = make_trainer(named())
    straight.train()
    fields = {"output_dir": straight.args.output_dir + "-resumed"}
    trainer = make_trainer(named(), **fields)
    trainer.dies_before = 5
    with pytest.raises(SystemError):
        trainer.train()
    resumed = make_trainer(named(), **fields)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.steps_taken == 2
    assert torch.equal(flat_weights(resumed), flat_weights(straight))


# --- early stopping ---------------------------------------------------------------------------------------------------


class GetsWorse(Trainer):
    """Its evaluation loss grows with every step."""

    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_loss"] = 1.0 + self.state.global_step
        return output


def test_early_stopping_keeps_its_patience(make_trainer):
    fields = {
        "cls": GetsWorse,
        "max_steps": 10,
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
    }
    straight = make_trainer(**fields, callbacks=[EarlyStoppingCallback(4)])
    straight.train()
    assert straight.state.global_step == 5  # the first is the best, and four are worse
    fields["output_dir"] = straight.args.output_dir + "-resumed"
    for step in (2, 4):
        trainer = make_trainer(**fields, callbacks=[EarlyStoppingCallback(4)])
        trainer.dies_before = step
        with pytest.raises(SystemError):
            trainer.train(resume_from_checkpoint=True)
    for _ in range(2):  # and a stopped run is finished
        resumed = make_trainer(**fields, callbacks=[EarlyStoppingCallback(4)])
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 5
        assert torch.equal(flat_weights(resumed), flat_weights(straight))


# --- numbers ----------------------------------------------------------------------------------------------------------


class Spoiled(Trainer):
    """Its gradient, or after the step its weights, become infinite in step 5; the loss is finite all the while."""

    spoils = "gradient"

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == 4:
            parameter = next(p for p in self.model.parameters() if p.requires_grad)
            self.before = flat_weights(self).clone()
            if self.spoils == "gradient":
                parameter.grad.fill_(float("inf"))
            else:
                parameter.data.fill_(float("nan"))
        return loss


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_infinite_gradient_under_a_finite_loss_is_not_stepped_nor_sealed(make_trainer, accumulation):
    fields = {"save_steps": 1, "save_total_limit": 1, "gradient_accumulation_steps": accumulation}
    trainer = make_trainer(cls=Spoiled, **fields)
    with pytest.raises(NonFiniteLossError, match="gradient of step 5 is not finite .*not taken. .*checkpoint-4"):
        trainer.train()
    assert torch.equal(flat_weights(trainer), trainer.before)
    assert [folder.name for folder in Path(trainer.args.output_dir).glob("checkpoint-*")] == ["checkpoint-4"]


def test_weights_that_are_not_finite_are_never_saved(make_trainer):
    class Nan(Spoiled):
        spoils = "weights"

    trainer = make_trainer(cls=Nan, save_steps=1, save_total_limit=1, max_steps=5, stop_on_nan=False)
    with pytest.raises(NonFiniteLossError, match="weights after step 5 are not finite.*not saved. .*checkpoint-4"):
        trainer.train()
    folder = Path(trainer.args.output_dir)
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"]
    with pytest.raises(NonFiniteLossError, match="not saved"):
        trainer.save_model()
    assert not (folder / "adapter_model.safetensors").exists()


# --- asked to stop ----------------------------------------------------------------------------------------------------


class Interrupted(Trainer):
    """Gets a signal twice, as a launcher sends it, inside its third step, or in the evaluation after its last."""

    stop, step, sent = None, None, False

    def get_signal(self, step):
        if self.step == step and not self.sent:
            self.sent = True
            signal.raise_signal(self.stop)
            signal.raise_signal(self.stop)

    def compute_loss(self, *args, **kwargs):
        self.get_signal(self.state.global_step + 1)
        return super().compute_loss(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        self.get_signal("evaluation")
        return super().evaluation_loop(*args, **kwargs)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("when", "ends"), [(3, 3), ("evaluation", STEPS)])
def test_asked_to_stop_a_run_takes_its_step_saves_and_goes_on_later(make_trainer, stop, when, ends):
    straight = make_trainer(save_strategy="no")
    straight.train()
    before = signal.getsignal(stop)
    saves = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": STEPS} if ends == STEPS else {}
    trainer = make_trainer(cls=Interrupted, **saves)
    trainer.stop, trainer.step = stop, when
    with pytest.raises(TrainingInterrupted, match=f"after step {ends} of 6. .*checkpoint-{ends}. `resume_") as error:
        trainer.train()
    assert error.value.signal == stop.name and signal.getsignal(stop) is before
    resumed = make_trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.steps_taken == STEPS - ends
    assert torch.equal(flat_weights(resumed), flat_weights(straight))


SEVERAL = """
import sys
from conftest import tiny_ouro, tokenizer
from datasets import Dataset
from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer
rows = Dataset.from_list([{"text": "abc"}] * 64)
from loopdropout_trainer.settings.command import run_command

def train():
    for index in range(3):
        args = LoopDropoutConfig(f"{sys.argv[1]}/{index}", max_steps=10_000, use_cpu=True, bf16=False, report_to="none")
        args.logging_steps, args.save_strategy, args.save_steps, args.disable_tqdm = 1, sys.argv[2], 1, True
        make = getattr(tokenizer, "__wrapped__", None) or tokenizer._get_wrapped_function()
        LoopDropoutSFTTrainer(tiny_ouro(), args, train_dataset=rows, processing_class=make()).train()

run_command(train, "script")
"""


def start_script(folder, saves, **environment):
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(here), str(here.parent))), **environment}
    script = [sys.executable, "-u", "-c", SEVERAL, str(folder), saves]
    return subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_to_the_first_loss(process):
    for line in process.stdout:
        if "'loss'" in line:
            return
    pytest.fail("the script has ended")


def test_a_plain_kill_ends_a_script_that_trains_several_times(tmp_path):
    process = start_script(tmp_path, "no")
    read_to_the_first_loss(process)
    process.terminate()
    said = process.stdout.readlines()
    assert process.wait(120) == 143 and said[-1].startswith("script: Stopped after step")
    assert len(list(tmp_path.glob("0/checkpoint-*/manifest.json"))) == 1 and not (tmp_path / "1").exists()


# --- one process in a folder ------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from loopdropout_trainer.saving.files import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_keeps_a_run_out_until_it_is_killed(make_trainer):
    trainer = make_trainer(save_strategy="no", max_steps=1)
    folder = Path(trainer.args.output_dir)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match=rf"process {holder.pid} on .*`output_dir`"):
        trainer.train()
    holder.kill()
    holder.wait()
    assert (folder / LOCK_FILE).exists()  # what it left does not matter
    trainer.train()
    assert not (folder / LOCK_FILE).exists()


def test_one_process_may_ask_for_its_folder_several_times(tmp_path):
    with folder_lock(tmp_path):
        with folder_lock(tmp_path):
            pass
        again = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert "LockedError" in again.stderr
    assert not (tmp_path / LOCK_FILE).exists()
