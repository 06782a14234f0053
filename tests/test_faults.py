"""Kills, broken files, a full disk, NaN, wrong adapters and a refusing Hub: one clear error, and nothing trained is lost."""

import json
import logging
import pickle
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import STEPS, flat_weights, randomise, tiny_ouro, trained_parameters
from datasets import Dataset, DatasetDict, load_dataset
from peft import get_peft_model

from loopdropout_trainer import LoopDropoutSFTTrainer, default_peft_config
from loopdropout_trainer.saving.adapter_files import load_adapter
from loopdropout_trainer.saving.hub import PushError
from loopdropout_trainer.training.checkpoints import CheckpointError
from loopdropout_trainer.training.checkpoints.sealing import fault_of_checkpoint, run_of, seal


@pytest.fixture
def finished(make_trainer):
    """A finished run: its output folder, with checkpoints 2, 4 and 6, and its weights."""
    trainer = make_trainer()
    trainer.train()
    return Path(trainer.args.output_dir), flat_weights(trainer)


# --- broken checkpoints -----------------------------------------------------------------------------------------------


def cut(file):
    file.write_bytes(file.read_bytes()[:-2])  # of JSON the last byte is a line's end


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name, damage, reason",
    [
        ("adapter_model.safetensors", flip_a_bit, "has changed since it was written"),
        ("optimizer.pt", Path.unlink, "optimizer.pt is missing"),
        ("trainer_state.json", lambda file: file.write_text("{"), "has changed since it was written"),
        ("manifest.json", Path.unlink, "saving it was interrupted"),
        ("manifest.json", cut, "manifest.json cannot be read"),
    ],
)
def test_a_broken_checkpoint_is_passed_over_with_the_reason(finished, make_trainer, log, name, damage, reason):
    folder, straight = finished
    damage(folder / "checkpoint-6" / name)
    trainer = make_trainer()
    trainer.train(resume_from_checkpoint=True)
    assert f"Passing over {folder / 'checkpoint-6'}" in log.text and reason in log.text
    assert trainer.first_step == 4 and torch.equal(flat_weights(trainer), straight)


def test_a_broken_checkpoint_given_by_name_is_refused_also_without_a_manifest(finished, make_trainer):
    checkpoint = finished[0] / "checkpoint-4"
    (checkpoint / "manifest.json").unlink()
    assert fault_of_checkpoint(checkpoint, sealed=False) is None
    cut(checkpoint / "adapter_model.safetensors")
    for given, fault in ((checkpoint, "a file in it is damaged"), ("nowhere", "it does not exist")):
        with pytest.raises((ValueError, CheckpointError), match=fault):
            make_trainer().train(resume_from_checkpoint=str(given))


def test_a_checkpoint_without_optimizer_state_is_not_resumed_from(make_trainer, log):
    make_trainer(save_only_model=True).train()
    trainer = make_trainer(save_strategy="no")
    trainer.train(resume_from_checkpoint=True)
    assert trainer.first_step == 0 and "no optimizer state" in log.text


# --- disk, data -------------------------------------------------------------------------------------------------------


class Fills(LoopDropoutSFTTrainer):
    """The disk is full at the checkpoint of step 4."""

    limit = 100_000  # the adapter fits, the optimizer's state does not

    def _save_checkpoint(self, model, trial):
        if self.state.global_step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        super()._save_checkpoint(model, trial)


@pytest.mark.parametrize("limit", [20_000, 100_000], ids=["adapter does not fit", "optimizer does not fit"])
def test_a_full_disk_is_one_error_and_leaves_the_newest_complete_checkpoint(make_trainer, limit):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = make_trainer(cls=Fills)
    trainer.limit = limit
    try:
        with pytest.raises(CheckpointError, match="step 4 could not be written .*checkpoint-2"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [folder.name for folder in Path(trainer.args.output_dir).glob("checkpoint-*")] == ["checkpoint-2"]
    resumed, straight = make_trainer(), make_trainer(save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    straight.train()
    assert torch.equal(flat_weights(resumed), flat_weights(straight))


def test_data_that_cannot_be_trained_on_is_one_error(make_trainer, dataset, tmp_path):
    file = tmp_path / "data.parquet"
    dataset.to_parquet(file)
    streamed = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
    cut(file)
    other = Dataset.from_list([{"question": "1+1", "answer": "2"}])
    empty = Dataset.from_list([])
    for rows, fault in ((empty, "is empty"), (other, "columns 'answer'"), (streamed, "cannot be read")):
        with pytest.raises(ValueError, match=f"`train_dataset` .*{fault}"):
            make_trainer(rows=rows)
    with pytest.raises(TypeError, match="`train_dataset` must be .*, got `DatasetDict`"):
        make_trainer(rows=DatasetDict(train=dataset))


def test_a_run_without_a_single_step_is_refused(make_trainer, dataset):
    few = dataset.select(range(3))
    with pytest.raises(
        ValueError, match="No step would be taken: `dataloader_drop_last` drops 3 rows, fewer than 1 batch"
    ):
        make_trainer(rows=few, dataloader_drop_last=True)
    with pytest.raises(ValueError, match="No step was taken: `train_dataset` has not a single batch"):
        long = Dataset.from_list([{"prompt": "x" * 40, "completion": "y"}])  # cut to its prompt
        make_trainer(rows=long.to_iterable_dataset(), max_length=20).train()


# --- the wrong adapter ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, lora, message",
    [
        ({}, {"r": 8}, "`r` 16, this run's has 8"),
        ({}, {"lora_alpha": 16}, "`lora_alpha` 32, this run's has 16"),
        ({"hidden_size": 48}, {}, "size mismatch for .*q_proj"),
        ({"total_ut_steps": 3}, {}, "trains at depth 4, but the model runs 3 loops"),
    ],
)
def test_resuming_with_another_adapter_base_or_depth_is_refused(finished, make_trainer, sizes, lora, message):
    model = tiny_ouro(**sizes)
    trainer = make_trainer(model, peft_config=default_peft_config(model, **lora), resume_with_changed_settings=True)
    with pytest.raises((ValueError, CheckpointError), match=message):
        trainer.train(resume_from_checkpoint=True)


def test_an_adapter_loads_at_another_depth_with_a_word(finished, log):
    folder, straight = finished
    model = load_adapter(tiny_ouro(total_ut_steps=6), folder / "checkpoint-6", is_trainable=True)
    assert "trained at depth 4; the model runs 6 loops" in log.text
    assert torch.equal(torch.cat([p.detach().flatten() for p in trained_parameters(model).values()]), straight)


# --- the Hub ----------------------------------------------------------------------------------------------------------


TOKEN = "hf_averysecrettokenofsomeone"


def test_without_a_token_a_run_that_should_be_pushed_is_refused_before_training(make_trainer, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(PushError, match="did not take 'someone/model' .* Nothing was trained yet; log in with"):
        make_trainer(push_to_hub=True, hub_model_id="someone/model")
    with pytest.raises(PushError, match="The adapter is safe in") as error:
        make_trainer().push_to_hub()  # which makes the repository first
    assert str(error.value).count("did not take") == 1 and "Nothing was trained" not in str(error.value)


def test_a_refused_push_leaves_the_adapter_on_disk_and_never_tells_the_token(
    make_trainer, monkeypatch, tmp_path, caplog, capfd
):
    def refuse(self, *args, **kwargs):
        raise PermissionError(f"403 Forbidden for {kwargs.get('token')}")

    monkeypatch.setattr(
        "huggingface_hub.HfApi.create_repo", lambda *args, **kwargs: SimpleNamespace(repo_id="someone/model")
    )
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", refuse)
    trainer = make_trainer(push_to_hub=True, hub_model_id="someone/model", hub_token=TOKEN)
    broken = logging.StreamHandler(SimpleNamespace(write=None, flush=lambda: None))  # its failure prints a traceback
    monkeypatch.setattr(logging.getLogger("loopdropout_trainer"), "handlers", [broken])
    trainer.train()  # every checkpoint's push is refused, and training goes on
    assert trainer.state.global_step == STEPS
    with pytest.raises(PushError, match=r"403 Forbidden for \*\*\*\). The adapter is safe in") as error:
        trainer.push_to_hub()
    folder = Path(trainer.args.output_dir)
    files = [each / "adapter_model.safetensors" for each in (folder, folder / "checkpoint-6")]
    assert files[0].read_bytes() == files[1].read_bytes()

    output = capfd.readouterr()
    assert TOKEN not in output.out + output.err + caplog.text + str(error.value)
    for file in folder.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file
    assert TOKEN not in json.dumps(trainer.args.to_dict(), default=str)
    assert TOKEN.encode() not in pickle.dumps(trainer.args)
    assert trainer.args.hub_token == TOKEN


class Evil:
    def __init__(self, proof):
        self.proof = str(proof)

    def __reduce__(self):
        return (open, (self.proof, "w"))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_a_crafted_file_of_a_checkpoint_is_one_sentence_and_runs_nothing(finished, make_trainer, tmp_path, name):
    checkpoint, proof = finished[0] / "checkpoint-4", tmp_path / "ran"
    pickles = [Evil(proof), [1, 2], {"state": 1}]
    for content in ("", "\x80", "{", "[1]", '{"a": 1}') if name.endswith("json") else ("", "#!/bin/sh", *pickles):
        if isinstance(content, str):
            (checkpoint / name).write_text(content)
        else:
            torch.save(content, checkpoint / name)
        seal(checkpoint, run_of(checkpoint))
        with pytest.raises(CheckpointError, match="checkpoint-4 cannot be used: a file in it is damaged") as error:
            make_trainer().train(resume_from_checkpoint=str(checkpoint))
        assert not proof.exists() and "\n" not in str(error.value)


CRAFTED = {
    "manifest.json": [
        {"run": 5}, {"run": [1]}, {"run": {"settings": 3}}, {"run": {"length": {"max_steps": "x"}}}, {"files": ["a"]},
    ],
    "trainer_state.json": [
        {"global_step": -1}, {"global_step": "x"}, {"global_step": None}, {"log_history": [5]}, {"train_batch_size": "x"},
        {"stateful_callbacks": {"RunState": {"attributes": {"totals": 5}}}},
        {"stateful_callbacks": {"RunState": {"attributes": {"metrics": {"entropy": 0.5}}}}},
        {"stateful_callbacks": {"RunState": {"attributes": {"totals": dict.fromkeys(["seconds", "num_tokens"], "x")}}}},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_values_of_another_type_in_a_checkpoints_json_are_one_sentence(finished, make_trainer, log, name):
    checkpoint = finished[0] / "checkpoint-4"
    before = json.loads((checkpoint / name).read_text())
    for values in CRAFTED[name]:
        (checkpoint / name).write_text(json.dumps({**before, **values}))
        if name != "manifest.json":
            seal(checkpoint, run_of(checkpoint))
        with pytest.raises(
            CheckpointError, match="checkpoint-4 cannot be used: (its manifest|a file in it is damaged)"
        ):
            make_trainer().train(resume_from_checkpoint=str(checkpoint))
    cut(finished[0] / "checkpoint-6" / "manifest.json")
    if name == "manifest.json":  # an older one is taken
        trainer = make_trainer()
        trainer.train(resume_from_checkpoint=True)
        assert trainer.first_step == 2 and "its manifest.json cannot be read" in log.text


def test_an_adapter_over_a_trained_one_keeps_every_bit(make_trainer, tmp_path):
    randomise(get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro())), 1e-4).save_pretrained(
        tmp_path / "adapter"
    )
    model = load_adapter(tiny_ouro().bfloat16(), tmp_path / "adapter", is_trainable=True)
    before = torch.cat([p.detach().flatten() for p in trained_parameters(model).values()])
    trainer = make_trainer(model)
    assert flat_weights(trainer).dtype == torch.float32
    assert torch.equal(flat_weights(trainer), before)
