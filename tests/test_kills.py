"""SIGKILL at random, wherever a run may be: whatever is killed and continued ends with the same bits.

`KILLS=200 pytest -m slow tests/test_kills.py` kills more often than the 50 times that are the default, and `KILL_SEED`
chooses other moments.
"""

import collections
import itertools
import os
import random
import re
import shutil
import signal
import sys
import time

import pytest
import torch
import yaml
from conftest import ROOT, STEPS, save_tiny_model, tiny_ouro
from datasets import Dataset
from processes import SERVER, Program, ended, fork, ranks, wait_for
from test_runs import RECIPE, sft

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, default_peft_config
from loopdropout_trainer.runs.result import read_run


KILLS, SEED = int(os.environ.get("KILLS", "50")), int(os.environ.get("KILL_SEED", "0"))


def die_at(place, event):
    """Kill this process when for the nth time (`event`) a file is touched whose path holds `place`."""
    seen = itertools.count(1)

    def count(kind, args):
        is_file = kind in ("open", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree")
        if is_file and place in str(args[0]) and next(seen) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


# --- a training -------------------------------------------------------------------------------------------------------


def training(output_dir, rows, tokenizer, begun=None, event=None):
    """Train with a checkpoint after every step, resuming if there is one; optionally be killed at a file event."""
    torch.set_num_threads(1)
    if event is not None:
        die_at(output_dir, event)
    args = LoopDropoutConfig(
        output_dir, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        save_strategy="steps", save_steps=1, save_total_limit=2, report_to="none", bf16=False, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data, adapter = Dataset.from_list(rows), default_peft_config(tiny_ouro(), lora_dropout=0.1)
    trainer = LoopDropoutSFTTrainer(
        tiny_ouro(), args, train_dataset=data, processing_class=tokenizer, peft_config=adapter
    )
    if begun is not None:
        begun.set()
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model(os.path.join(output_dir, "final"))


def finish(folder, *given):
    assert ended(fork(training, str(folder), *given)) == 0
    return (folder / "final" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def given(dataset, tokenizer):
    return dataset.to_list(), tokenizer


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, given):
    return finish(tmp_path_factory.mktemp("uninterrupted"), *given)


def test_killed_again_and_again_at_random_a_training_ends_with_the_same_weights(tmp_path, given, uninterrupted):
    chance, killed = random.Random(0), 0
    while killed < 8:
        begun = SERVER.Event()
        process = fork(training, str(tmp_path), *given, begun)
        wait_for(begun.is_set)
        time.sleep(chance.uniform(0.02, 0.35))
        process.kill()
        if ended(process) == 0:  # it was faster
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
        killed += process.exitcode == -signal.SIGKILL
    assert finish(tmp_path, *given) == uninterrupted


@pytest.mark.parametrize("event", [3, 12, 19, 26, 33, 40])
def test_killed_at_any_file_of_a_checkpoint_a_training_ends_with_the_same_weights(
    tmp_path, given, uninterrupted, event
):
    assert ended(fork(training, str(tmp_path), *given, event=event)) == -signal.SIGKILL
    assert finish(tmp_path, *given) == uninterrupted


# --- a command --------------------------------------------------------------------------------------------------------

# Where a kill may strike: at one of the first files that are touched in a folder of this name, or at any time.
PLACES = {
    "at any time": (None, 0),  # first, where a new run has all of its time before it
    "training": ("checkpoint-", 160),
    "after the last checkpoint": ("run/_partial", 60),
    "evaluation": ("answers/after", 12),
    "merging": ("merged", 40),
    "results": ("run.json", 6),
}


def command(words, place=None, event=0, after=None):
    """Run the script, and kill it at an event in a place, or after some seconds."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if place is not None:
        die_at(place, event)
    if after is not None:  # the signal's default action ends the process as SIGKILL does: no handler runs
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, after)
    sft.main(words)


def exit_code(words, **kill):
    return ended(fork(command, words, **kill))


def ends(folder):
    """What a run leaves: weights and merged weights as bytes, and its measurements but for the times."""
    timed = ("seconds", "per_second", "gb", "runtime")
    rows = []
    for name in (".", "lora"):
        rows += [row for row in read_run(folder / name).result.rows if not row.metric.endswith(timed)]
    files = ("adapter_model.safetensors", "merged/model.safetensors", "lora/adapter_model.safetensors")
    return [(folder / name).read_bytes() for name in files], rows


def test_a_process_whose_peer_dies_says_so_in_one_sentence(tmp_path):
    save_tiny_model(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "max_steps": 10000, "save_total_limit": 2}))
    words = f"{tmp_path}/recipe.yaml --model_name_or_path {tmp_path}/model --output_dir {tmp_path}/run".split()
    survivor, killed = (Program(ROOT / "recipes" / "sft.py", *words, env=env) for env in ranks(2))
    wait_for((tmp_path / "run" / "checkpoint-1").exists, survivor)
    killed.end()
    said = survivor.wait() and survivor.stderr
    assert survivor.exit_code == 2, said
    assert re.search(r": Another process of this run ended .* from the newest checkpoint.*\n$", said)
    assert "Traceback" not in said


@pytest.mark.slow
def test_killed_anywhere_at_random_a_run_ends_with_the_same_bits(tmp_path):
    save_tiny_model(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    fields = {"model_name_or_path": str(tmp_path / "model"), "merge": True, "compare_with": ["lora"]}
    recipe.write_text(yaml.safe_dump({**RECIPE, **fields, "save_total_limit": 2, "lora_dropout": 0.1}))
    words = lambda name: f"{recipe} --output_dir {tmp_path / name}/run --resume_from_checkpoint true".split()
    began = time.monotonic()
    assert exit_code(words("straight")) == 0
    seconds = time.monotonic() - began
    straight = ends(tmp_path / "straight" / "run")

    chance, killed, runs = random.Random(SEED), collections.Counter(), 0
    while killed.total() < KILLS:
        name = list(PLACES)[(killed.total() + runs) % len(PLACES)]
        place, events = PLACES[name]
        if place:
            code = exit_code(words("killed"), place=place, event=chance.randint(1, events))
        else:
            code = exit_code(words("killed"), after=chance.uniform(0.1, seconds))
        if code in (-signal.SIGKILL, -signal.SIGALRM):
            killed[name] += 1
            print(f"kill {killed.total()}: {name}", flush=True)
            continue
        assert code == 0  # it was faster, or there was nothing left to do in that place
        runs += 1
        assert ends(tmp_path / "killed" / "run") == straight
        shutil.rmtree(tmp_path / "killed")
    assert exit_code(words("killed")) == 0
    assert ends(tmp_path / "killed" / "run") == straight
    print(f"\n{killed.total()} kills over {runs + 1} runs: {dict(killed)}")
    assert KILLS < 50 or set(killed) == set(PLACES)
