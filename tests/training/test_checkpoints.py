"""Checkpoints and saved adapters: files that are missing or damaged are found, and older checkpoints are deleted last."""

import os
import shutil
import sys

import pytest

from helpers.errors import user_error
from helpers.processes import ended, fork, sync_disk
from helpers.trainers import Recorder
from loopdropout_trainer.saving.checkpoints import delete_older_checkpoints, list_checkpoints, newest_checkpoint
from loopdropout_trainer.saving.integrity import CHECKSUMS_FILE, begin, check, find_damage, record, saving


def blank_half(path):
    """Damage a file as a lost block does: its second half, or all after 64 KiB, becomes zeros."""
    content = path.read_bytes()
    kept = min(65536, len(content) // 2)
    path.write_bytes(content[:kept] + bytes(len(content) - kept))


@pytest.fixture
def saved(tmp_path):
    """A folder with recorded files."""
    with saving(tmp_path):
        (tmp_path / "global_step4").mkdir()
        for name in ("weights.safetensors", "rng_state_1.pth", "global_step4/rank_1_optim_states.pt", "README.md"):
            (tmp_path / name).write_bytes(name.encode() * 9)
        for name in ("tokenizer.json", "adapter_config.json"):
            (tmp_path / name).write_text('{"r": 16}')
        (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
        assert find_damage(tmp_path) == "was not saved completely"
    assert find_damage(tmp_path) is None
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "weights.safetensors",
        "rng_state_1.pth",
        "global_step4/rank_1_optim_states.pt",
        "tokenizer.json",
        "adapter_config.json",
    ],
)
def test_find_damage_names_the_file(saved, name):
    blank_half(saved / name)
    assert find_damage(saved) == f"has a damaged {name}"
    with user_error(f"folder {saved} has a damaged {name}"):
        check(saved)
    (saved / name).unlink()
    assert find_damage(saved) == f"has no {name}, which was saved with it"


def test_find_damage_accepts_edited_settings(saved, caplog):
    (saved / "adapter_config.json").write_text('{"r": 8}')
    (saved / "chat_template.jinja").write_text("{{ prompt }}")
    (saved / "README.md").unlink()
    assert find_damage(saved) is None
    assert "adapter_config.json has been edited" in caplog.text and "chat_template.jinja has" in caplog.text
    (saved / "chat_template.jinja").write_text("")
    assert find_damage(saved) == "has a damaged chat_template.jinja"


@pytest.mark.parametrize("content", ["", "[]", "null", '{"xxh3_128": 1}', "\0\0"])
def test_find_damage_of_checksums(saved, content):
    (saved / CHECKSUMS_FILE).write_text(content)
    assert find_damage(saved) == f"has a damaged {CHECKSUMS_FILE}"


def test_find_damage_without_checksums(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"x")
    assert find_damage(tmp_path) is None


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_damaged_checkpoint_is_not_used(tmp_path, make_sft, name, caplog):
    fields = {"cls": Recorder, "output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    make_sft(max_steps=4, **fields).train()
    blank_half(tmp_path / "checkpoint-4" / name)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert f"checkpoint-4 is not used, because it has a damaged {name}" in caplog.text
    resumed = make_sft(max_steps=4, **fields)
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.seen) == 2


@pytest.mark.parametrize("checksums", ["{}", None])
def test_unfinished_newest_checkpoint_is_named(tmp_path, make_sft, checksums, caplog):
    """A program that is killed while it saves leaves no state, so the number of the checkpoint's training is not known."""
    fields = {"cls": Recorder, "output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    make_sft(**fields).train()
    newest = tmp_path / "checkpoint-2"
    (newest / "trainer_state.json").unlink()
    (newest / CHECKSUMS_FILE).unlink()
    reason = "has no readable trainer_state.json"
    if checksums is not None:
        (newest / CHECKSUMS_FILE).write_text(checksums)
        reason = "was not saved completely"
    leftover = newest / f".{CHECKSUMS_FILE}.25914"
    leftover.touch()
    make_sft(**fields).train(resume_from_checkpoint=True)
    assert f"{newest} is not used, because it {reason}" in caplog.text
    assert newest_checkpoint(tmp_path) == str(newest) and not leftover.exists()
    for checkpoint in tmp_path.glob("checkpoint-*"):
        (checkpoint / CHECKSUMS_FILE).write_text("{}")
    caplog.clear()
    make_sft(**fields).train(resume_from_checkpoint=True)
    assert f"{tmp_path} has no checkpoint that a training can continue from" in caplog.text
    assert "use `train(resume_from_checkpoint=True)`" not in caplog.text  # it is used already


def test_leftovers_are_not_files_of_a_new_checkpoint(tmp_path, make_sft):
    """A resumed training saves again where a damaged checkpoint stands, also over files that nothing can read."""
    fields = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make_sft(cls=Recorder, **fields).train()
    newest = tmp_path / "checkpoint-4"
    # The card is next to an adapter that its code can load, and the folder has none before the training has ended.
    assert (newest / "README.md").is_file() and not (tmp_path / "README.md").exists()
    (newest / "adapter_config.json").write_bytes(b"\xff")
    (newest / "rng_state_1.pth").write_bytes(b"of another number of processes")
    make_sft(cls=Recorder, **fields).train(resume_from_checkpoint=True)
    assert find_damage(newest) is None and not (newest / "rng_state_1.pth").exists()
    (tmp_path / "adapter_config.json").write_bytes(b"\xff")
    make_sft(cls=Recorder, **fields).save_model()
    assert find_damage(tmp_path) is None


def slow_second_process(folder, rank, port):
    """Train in two processes, of which the second saves its random state late."""
    import time

    import torch
    from datasets import Dataset

    from helpers.tiny import tiny_ouro
    from helpers.tokenizer import make_tokenizer
    from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )

    class Late(LoopDropoutSFTTrainer):
        def _save_rng_state(self, output_dir):
            time.sleep(2 * rank)
            super()._save_rng_state(output_dir)

    args = LoopDropoutConfig(
        folder, max_steps=1, save_steps=1, report_to="none", bf16=False, use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=1, gradient_accumulation_steps=1,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": str(i), "completion": "x"} for i in range(8)])
    Late(tiny_ouro(), args, train_dataset=rows, processing_class=make_tokenizer()).train()


@pytest.mark.slow
def test_checkpoint_has_files_of_all_processes(tmp_path):
    from helpers.processes import free_port

    port = free_port()
    processes = [fork(slow_second_process, str(tmp_path), rank, port) for rank in range(2)]
    assert [ended(process) for process in processes] == [0, 0]
    checkpoint = tmp_path / "checkpoint-1"
    assert newest_checkpoint(tmp_path) == str(checkpoint)
    assert "rng_state_1.pth" in (checkpoint / CHECKSUMS_FILE).read_text()
    (checkpoint / "rng_state_1.pth").unlink()
    assert newest_checkpoint(tmp_path) is None


def test_older_checkpoint_is_deleted_last(tmp_path, make_sft, monkeypatch):
    """Each file reaches the disk before the digests get their name, and the digests before an older checkpoint is deleted."""
    events = []

    def note_fsync(descriptor):
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync_disk(descriptor)

    def note(kind, args):
        if kind == "os.rename" and str(args[1]).startswith(str(tmp_path)):
            events.append(("name", str(args[1])))
        elif kind == "shutil.rmtree" and str(args[0]).startswith(str(tmp_path)):
            events.append(("delete", str(args[0])))

    monkeypatch.setattr(os, "fsync", note_fsync)
    sys.addaudithook(note)
    make_sft(output_dir=str(tmp_path), save_strategy="steps", save_steps=1, max_steps=2, save_total_limit=1).train()
    newest = tmp_path / "checkpoint-2"
    assert list_checkpoints(tmp_path) == [newest]
    names = [place for place, event in enumerate(events) if event == ("name", str(newest / CHECKSUMS_FILE))]
    complete = names[-1]  # the first one marks the beginning
    synced = {path for kind, path in events[names[0] : complete] if kind == "sync"}
    files = {str(path) for path in newest.iterdir() if path.name not in ("README.md", CHECKSUMS_FILE)}
    assert {*files, str(newest), str(tmp_path)} <= synced and any(path.endswith("optimizer.pt") for path in files)
    after = events[complete:]
    assert after.index(("sync", str(newest))) < after.index(("delete", str(tmp_path / "checkpoint-1")))


def test_deletion_ignores_the_clock(tmp_path, make_sft):
    class GoBack(Recorder):
        def _save_checkpoint(self, model, trial):
            for folder in list_checkpoints(tmp_path):
                os.utime(folder, (2e9, 2e9))  # saved before the clock went back
            super()._save_checkpoint(model, trial)

    make_sft(
        cls=GoBack, output_dir=str(tmp_path), save_strategy="steps", save_steps=2, max_steps=6, save_total_limit=1
    ).train()
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["checkpoint-6"]


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [2, 4, 6, 100]),
        (1, None, [6]),
        (2, None, [4, 6]),
        (3, None, [2, 4, 6]),
        (1, 2, [2, 6]),
        (3, 2, [2, 4, 6]),
    ],
)
def test_delete_older_checkpoints(tmp_path, limit, best, kept):
    for step in (2, 4, 6, 100):  # the last one is of a former training
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-old").mkdir()
    delete_older_checkpoints(tmp_path / "checkpoint-6", limit, best and tmp_path / f"checkpoint-{best}")
    assert [folder.name for folder in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in kept]
    assert (tmp_path / "checkpoint-old").is_dir()


def test_interrupted_save_is_not_complete(tmp_path, make_sft):
    class Interrupted(Recorder):
        def _save(self, *args, **kwargs):  # of the adapter
            super()._save(*args, **kwargs)
            raise KeyboardInterrupt

    make_sft(output_dir=str(tmp_path)).save_model()
    assert find_damage(tmp_path) is None and (tmp_path / CHECKSUMS_FILE).is_file()
    with pytest.raises(KeyboardInterrupt):
        make_sft(output_dir=str(tmp_path), cls=Interrupted).save_model()
    assert find_damage(tmp_path) == "was not saved completely"


def test_record_after_copy(saved, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(saved, copy)
    assert find_damage(copy) is None
    begin(copy)
    record(copy)
    assert find_damage(copy) is None
