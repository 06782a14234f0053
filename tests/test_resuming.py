"""A resumed run is the run: it ends where it ends, reports all of itself, takes no other's checkpoint, and stops in order."""

import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from conftest import STEPS, Trainer, contents, flat_weights, tiny_ouro
from datasets import Dataset
from peft import get_peft_model
from processes import Program, wait_for
from transformers import EarlyStoppingCallback

from loopdropout_trainer import default_peft_config
from loopdropout_trainer.saving.files import LOCK_FILE, LockedError, folder_lock
from loopdropout_trainer.training.checkpoints import CheckpointError, NonFiniteLossError, TrainingInterrupted
from loopdropout_trainer.training.checkpoints.sealing import MANIFEST, rotate, seal


@pytest.fixture
def run(make_trainer):
    """`run(*model, dies=None, resume=None, **fields)`: train, to the end or to a step; return the trainer."""

    def train(*model, dies=None, resume=None, **fields):
        trainer = make_trainer(*model, **fields)
        trainer.dies_before = dies
        if dies is None:
            trainer.report = trainer.train(resume_from_checkpoint=resume)
        else:
            with pytest.raises(SystemError):
                trainer.train(resume_from_checkpoint=resume)
        return trainer

    return train


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def timeless(trainer):
    """The log, without what depends on the clock."""
    clock = ("runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(clock)} for entry in trainer.state.log_history]


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [{"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 0.4}, {"max_steps": 12}])
def test_a_finished_run_that_is_resumed_trains_nothing_more(run, end):
    """Inside an epoch, after a part of one, and after all of one."""
    fields = {**end, "save_steps": 1, "save_total_limit": 1, "lr_scheduler_type": "constant"}
    first = run(**fields)
    for _ in range(2):
        again = run(**fields, resume=True)
        assert (again.steps_taken, again.state.global_step) == (0, first.state.global_step)
        assert torch.equal(flat_weights(again), flat_weights(first))
    with pytest.raises(CheckpointError, match="beyond the 3 steps .*`max_steps`"):
        run(**{**fields, "max_steps": 3}, resume_with_changed_settings=True, resume=True)


def test_a_resumed_run_reports_all_of_itself(run, tmp_path):
    straight = run(logging_steps=3)
    fields = {"output_dir": str(tmp_path / "resumed"), "logging_steps": 3}
    run(**fields, dies=3)
    resumed = run(**fields, resume=True)
    assert resumed.steps_taken == STEPS - 2
    assert resumed.report.training_loss == pytest.approx(straight.report.training_loss, rel=1e-6)
    assert resumed.report.metrics["train_loss"] == resumed.report.training_loss
    assert timeless(resumed) == timeless(straight)  # also of the divided interval
    state = json.loads((tmp_path / "resumed" / "checkpoint-2" / "trainer_state.json").read_text())
    seconds = state["stateful_callbacks"]["RunState"]["attributes"]["totals"]["seconds"]
    assert 0 < seconds < resumed.report.metrics["train_runtime"]
    finished = run(**fields, resume=True).report
    assert finished.training_loss == pytest.approx(straight.report.training_loss, rel=1e-6)


# --- whose checkpoint -------------------------------------------------------------------------------------------------


def test_a_run_is_kept_out_of_another_runs_folder_before_it_trains(run, make_trainer, dataset, log, tmp_path):
    first = run()
    first.save_model()
    folder = Path(first.args.output_dir)
    other = {"rows": dataset.select(range(40)), "learning_rate": 2e-2, "save_steps": 1}
    for removed in (False, True):
        for checkpoint in folder.glob("checkpoint-*") if removed else ():  # what is left is the trained adapter
            shutil.rmtree(checkpoint)
        before = contents(folder)
        for resume in (None, True):
            trainer = make_trainer(**other)
            with pytest.raises(CheckpointError, match="`learning_rate` was 0.01 and is 0.02"):
                trainer.train(resume_from_checkpoint=resume)
            assert trainer.steps_taken == 0 and contents(folder) == before
    with pytest.raises(CheckpointError, match="`max_steps` was 6 and is 9.*`resume_from_checkpoint: true`"):
        run(max_steps=9)
    assert contents(folder) == before
    run()  # the same run may begin anew

    other["resume_with_changed_settings"] = True
    run(**other, dies=4)  # asked to: checkpoints 1 to 4, beside 6 of the first run
    resumed = run(**other, resume=True)
    assert resumed.steps_taken == STEPS - 4 and "checkpoint-6: it belongs to another run" in log.text
    straight = run(**other, output_dir=str(tmp_path / "straight"))
    assert torch.equal(flat_weights(resumed), flat_weights(straight))


@pytest.mark.parametrize("place", ["adapter_model.safetensors", "pytorch_model.bin"])
def test_weights_that_no_run_of_this_package_has_left_are_not_replaced(make_trainer, place):
    trainer = make_trainer()
    file = Path(trainer.args.output_dir) / place
    file.write_text("somebody's")
    for resume in (None, True):
        with pytest.raises(CheckpointError, match=f"{place} is of no run of this package.*another `output_dir`"):
            trainer.train(resume_from_checkpoint=resume)
    assert trainer.steps_taken == 0 and file.read_text() == "somebody's"


@pytest.mark.parametrize("saves", ["steps", "no"])
def test_a_complete_training_is_loaded_and_not_trained_again(run, saves):
    first = run(save_strategy=saves)
    first.save_model()
    for _ in range(2):
        again = run(save_strategy=saves, eval_strategy="steps", eval_steps=1, resume=True)
        assert again.steps_taken == 0 and torch.equal(flat_weights(again), flat_weights(first))
        assert (again.report.training_loss, again.report.global_step) == (first.report.training_loss, STEPS)
        assert again.report.metrics["train_runtime"] == first.report.metrics["train_runtime"]
        assert again.progress() == first.progress() and again.state.log_history == first.state.log_history
        again.save_model()


@pytest.mark.parametrize("damage", ["missing", "bit", "of another run"])
def test_a_damaged_adapter_is_not_a_complete_training(run, log, damage):
    first = run(save_strategy="no")
    first.save_model()
    file = Path(first.args.output_dir) / "adapter_model.safetensors"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "bit":
        file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    else:
        next(p for p in first.model.parameters() if p.requires_grad).data += 1
        first._complete = False  # saved by hand, in the middle of something
        first.save_model()
    assert run(save_strategy="no", resume=True).steps_taken == STEPS and file.name in log.text


@pytest.mark.parametrize("field", ["max_steps", "num_train_epochs"])
def test_a_run_goes_on_for_longer(run, log, field, tmp_path):
    """With a constant learning rate it is the longer run from the beginning; else it goes on by the new schedule."""
    steps = {"max_steps": ({"max_steps": 6}, {"max_steps": 9})}
    epochs = [{"max_steps": -1, "num_train_epochs": number} for number in (0.5, 1.0)]
    shorter, end = steps.get(field, epochs)
    constant = {"lr_scheduler_type": "constant", "save_total_limit": 1}
    run(**shorter, **constant).save_model()
    longer = run(**end, **constant, resume=True)
    assert f"`{field}` was" in log.text and longer.steps_taken == longer.state.max_steps - 6 > 0
    straight = run(**end, **constant, output_dir=str(tmp_path / "straight"))
    assert torch.equal(flat_weights(longer), flat_weights(straight))
    assert len(list(Path(longer.args.output_dir).glob("checkpoint-*"))) == 1
    longer.save_model()
    with pytest.raises(CheckpointError, match=f"`{field}` was"):  # and not back
        run(**shorter, **constant, resume=True)

    fields = {"lr_scheduler_type": "linear", "output_dir": str(tmp_path / "linear")}
    run(**shorter, **fields)
    longer = run(**end, **fields, resume=True)
    total = longer.state.max_steps
    rates = logged(longer, "learning_rate")[6:]
    assert rates == pytest.approx([1e-2 * (total - step) / total for step in range(6, total)])


def other_weights():
    model = tiny_ouro()
    model.model.layers[1].mlp.up_proj.weight.data += 1e-3
    return model


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
        ({"max_length": 5}, "the training data are others.* `max_length` was"),
        ({"packing": True}, "`packing` was False and is True"),
        ({"warmup_steps": 3}, "`warmup_steps`"),
        ({"rows": lambda rows: rows.select([*range(47, -1, -1)])}, "another run: the training data are others"),
        ({"model": lambda rows: tiny_ouro().bfloat16()}, "`dtype` was 'float32' and is 'bfloat16'"),
        ({"model": lambda rows: tiny_ouro(rope_theta=5.0)}, "`rope_parameters.rope_theta` was 1000000.0 and is 5.0"),
        ({"model": lambda rows: other_weights()}, "another run: the base weights are others"),
        ({"peft_config": lambda rows: default_peft_config(tiny_ouro(), lora_dropout=0.1)}, "`lora_dropout` was 0.0"),
    ],
)
def test_settings_that_change_the_result_are_named_and_refused(run, make_trainer, dataset, change, words, tmp_path):
    run()
    trainer = make_trainer(**{name: each(dataset) if callable(each) else each for name, each in change.items()})
    for resume in (True, str(tmp_path / "run" / "checkpoint-4")):
        with pytest.raises(CheckpointError, match=f"{words}.*`resume_with_changed_settings: true`"):
            trainer.train(resume_from_checkpoint=resume)
    assert trainer.steps_taken == 0


def test_settings_without_effect_do_not_stop_a_run(run, dataset):
    run()
    changed = {
        "logging_steps": 3, "per_device_eval_batch_size": 2, "save_steps": 3, "run_name": "x", "disable_tqdm": True,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": False,
    }  # fmt: skip
    changed["rows"] = Dataset.from_list(dataset.to_list())  # the same rows in other memory
    trainer = run(get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro())), **changed, resume=True)
    assert trainer.steps_taken == 0 and trainer.state.global_step == STEPS


def test_asked_to_a_run_goes_on_with_changed_settings_which_count(run, log):
    fields = {"lr_scheduler_type": "constant", "weight_decay": 0.0}
    run(**fields)
    changed = {**fields, "learning_rate": 3e-2, "weight_decay": 0.1, "max_steps": 8}
    trainer = run(**changed, resume_with_changed_settings=True, resume=True)
    assert "`learning_rate` was 0.01 and is 0.03" in log.text and trainer.steps_taken == 2
    assert logged(trainer, "learning_rate") == pytest.approx([1e-2] * 6 + [3e-2] * 2)
    assert max(group["weight_decay"] for group in trainer.optimizer.param_groups) == 0.1


def test_a_run_goes_on_with_other_libraries_with_a_word_and_not_from_another_format(run, log, tmp_path):
    run(dies=5)
    manifest = tmp_path / "run" / "checkpoint-4" / MANIFEST
    content = json.loads(manifest.read_text())
    content["run"]["versions"]["torch"] = "1.0"
    manifest.write_text(json.dumps(content))
    assert run(resume=True).steps_taken == 2
    assert "other libraries: `torch` was '1.0' and is" in log.text and "changed settings" not in log.text
    content["run"] = {"settings": {"seed": 42}, "model": {"rms_norm_eps": 1e-6}}
    manifest.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match="checkpoint-4.*another version of this package .*`model`.*another `output_dir`"
    ):
        run(resume=True)


def test_a_checkpoint_that_does_not_say_whose_it_is_is_resumed_with_a_word(run, log, tmp_path):
    run()
    for manifest in (tmp_path / "run").glob(f"checkpoint-*/{MANIFEST}"):
        manifest.write_text(json.dumps({"files": json.loads(manifest.read_text())["files"]}))
    assert run(learning_rate=3e-2, resume=True).state.global_step == STEPS
    assert "does not say which run it belongs to" in log.text


@pytest.mark.parametrize(
    ("steps", "limit", "keep", "left"),
    [  # checkpoints by the seed of their run
        ({2: 1, 4: 1, 6: 1, 8: None}, 2, 2, [2, 6]),  # unfinished ones first, never the one just written
        ({1: 1, 2: 1, 3: 1, 8: 2, 9: 2}, 1, 3, [3, 8, 9]),  # another run's are left alone
    ],
)
def test_rotation_deletes_what_a_run_needs_least(tmp_path, steps, limit, keep, left):
    for step, seed in steps.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        if seed is not None:
            seal(tmp_path / f"checkpoint-{step}", {"seeds": {"seed": seed}})
    rotate(tmp_path, limit, keep=[tmp_path / f"checkpoint-{keep}"], run={"seeds": {"seed": 1}})
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"checkpoint-{step}" for step in left]


def test_an_adapter_of_another_name_is_resumed(run, tmp_path):
    named = lambda: get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro()), adapter_name="mine")
    run(named(), dies=5)
    resumed = run(named(), resume=True)
    assert resumed.steps_taken == 2
    assert torch.equal(flat_weights(resumed), flat_weights(run(named(), output_dir=str(tmp_path / "straight"))))


class GetsWorse(Trainer):
    """Its evaluation loss grows with every step."""

    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_loss"] = 1.0 + self.state.global_step
        return output


def test_early_stopping_keeps_its_patience(run, tmp_path):
    fields = {
        "cls": GetsWorse, "max_steps": 10, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
        "metric_for_best_model": "loss", "greater_is_better": False,
    }  # fmt: skip
    patient = lambda **more: run(**fields, **more, callbacks=[EarlyStoppingCallback(4)])
    straight = patient(output_dir=str(tmp_path / "straight"))
    assert straight.state.global_step == 5  # the first is the best, and four are worse
    for step in (2, 4, None, None):  # and a stopped run is finished
        resumed = patient(dies=step, resume=True)
    assert resumed.state.global_step == 5 and torch.equal(flat_weights(resumed), flat_weights(straight))


# --- numbers ----------------------------------------------------------------------------------------------------------


class Spoiled(Trainer):
    """Its loss, or else its gradient, or after the step its weights, are not finite in step 5."""

    spoils, before = "loss", None

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * math.nan if (self.spoils, self.state.global_step) == ("loss", 4) else loss

    def training_step(self, *args, **kwargs):
        if self.state.global_step == 4:
            self.before = flat_weights(self).clone()
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == 4 and self.spoils != "loss":
            parameter = next(p for p in self.model.parameters() if p.requires_grad)
            (parameter.grad if self.spoils == "gradient" else parameter.data).fill_(float("inf"))
        return loss


@pytest.mark.parametrize(
    ("spoils", "fields", "fault"),
    [
        ("loss", {}, "loss of step 5 is not finite.*"),
        ("gradient", {}, "gradient of step 5 is not finite.*not taken"),
        ("gradient", {"gradient_accumulation_steps": 2}, "gradient of step 5 is not finite.*not taken"),
        ("weights", {"max_steps": 5, "stop_on_nan": False}, "weights after step 5 are not finite.*not saved"),
    ],
)
def test_what_is_not_finite_is_neither_stepped_nor_saved(make_trainer, spoils, fields, fault):
    trainer = make_trainer(cls=Spoiled, save_steps=1, save_total_limit=1, **fields)
    trainer.spoils = spoils
    with pytest.raises(NonFiniteLossError, match=f"{fault}. .*checkpoint-4"):
        trainer.train()
    folder = Path(trainer.args.output_dir)
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"]
    assert trainer.loop_state.gates is None
    if spoils != "weights":
        assert torch.equal(flat_weights(trainer), trainer.before)
        make_trainer(cls=Spoiled, **fields, stop_on_nan=False, save_strategy="no").train()  # as was asked for
    else:
        with pytest.raises(NonFiniteLossError, match="not saved"):
            trainer.save_model()
        assert not (folder / "adapter_model.safetensors").exists()


# --- asked to stop ----------------------------------------------------------------------------------------------------


class Interrupted(Trainer):
    """Gets a signal twice, as a launcher sends it, inside its third step, or in the evaluation after its last."""

    stop, step = None, None

    def get_signal(self, step):
        if self.step == step:
            self.step = None
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
def test_asked_to_stop_a_run_takes_its_step_saves_and_goes_on_later(run, make_trainer, stop, when, ends):
    straight, before = run(save_strategy="no"), signal.getsignal(stop)
    saves = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": STEPS} if ends == STEPS else {}
    trainer = make_trainer(cls=Interrupted, **saves)
    trainer.stop, trainer.step = stop, when
    with pytest.raises(TrainingInterrupted, match=f"after step {ends} of 6. .*checkpoint-{ends}. `resume_") as error:
        trainer.train()
    assert error.value.signal == stop.name and signal.getsignal(stop) is before
    resumed = run(resume=True, restore_callback_states_from_checkpoint=True)
    saved = json.loads((Path(trainer.args.output_dir) / f"checkpoint-{ends}" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"] == (ends == STEPS)
    assert resumed.steps_taken == STEPS - ends and torch.equal(flat_weights(resumed), flat_weights(straight))


def test_a_plain_kill_ends_a_command_that_trains_several_times(tmp_path):
    fields = {
        "model_name_or_path": "tiny-ouro", "preparation": "arithmetic", "num_train_examples": 8, "output_dir": "out",
        "compare_with": ["lora"], "max_steps": 10_000, "logging_steps": 1, "save_strategy": "no", "dtype": "float32",
        "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 1,
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    program = Program("-m", "loopdropout_trainer", "sft", "recipe.yaml", cwd=tmp_path)
    wait_for(lambda: "'loss'" in program.stdout + program.stderr, program)
    assert program.end(signal.SIGTERM) == 143
    assert program.stderr.splitlines()[-1].startswith("loopdropout sft: Stopped after step")
    assert len(list(tmp_path.glob("out/checkpoint-*/manifest.json"))) == 1 and not (tmp_path / "out/lora").exists()


# --- one process in a folder ------------------------------------------------------------------------------------------

HOLD = """
import signal, sys
from loopdropout_trainer.saving.files import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    signal.pause()
"""


def test_another_process_keeps_a_run_out_until_it_is_killed(make_trainer):
    trainer = make_trainer(save_strategy="no", max_steps=1)
    folder = Path(trainer.args.output_dir)
    holder = Program("-c", HOLD, folder)
    wait_for(lambda: holder.stdout == "held\n", holder)
    with pytest.raises(LockedError, match=rf"process {holder.pid} on .*`output_dir`"):
        trainer.train()
    holder.end()
    assert (folder / LOCK_FILE).exists()  # what it left does not matter
    with folder_lock(folder):  # one process may ask for its folder several times
        trainer.train()
        again = Program("-c", HOLD, folder)
        assert again.wait() and "LockedError" in again.stderr
    assert not (folder / LOCK_FILE).exists()
