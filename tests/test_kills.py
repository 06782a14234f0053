"""SIGKILL at random, wherever a run may be: whatever is killed and continued ends with the same bits.

`KILLS=200 pytest -m slow tests/test_kills.py` kills more often than the 50 times that are the default, and `KILL_SEED`
chooses other moments.
"""

import collections
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import save_tiny_model
from test_runs import RECIPE, sft


KILLS, SEED = int(os.environ.get("KILLS", "50")), int(os.environ.get("KILL_SEED", "0"))
os.environ["OMP_NUM_THREADS"] = "1"
here = Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), str(here.parent), os.environ.get("PYTHONPATH")]))
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["test_kills"])  # imports once, so that a real process starts in milliseconds

# Where a kill may strike: at one of the first files that are touched in a folder of this name, or at any time.
PLACES = {
    "at any time": (None, 0),  # first, where a new run has all of its time before it
    "training": ("checkpoint-", 160),
    "after the last checkpoint": ("run/_partial", 60),
    "evaluation": ("answers/after", 12),
    "merging": ("merged", 40),
    "results": ("results.json", 6),
}


def child(words, place=None, event=0, after=None):
    """Run the script, and kill it at an event in a place, or after some seconds."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    seen = 0

    def count(kind, args):
        nonlocal seen
        if kind in ("open", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree") and place in str(args[0]):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    if place is not None:
        sys.addaudithook(count)
    if after is not None:  # the signal's default action ends the process as SIGKILL does: no handler runs
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, after)
    sft.main(words)


def start(words, **kill):
    process = processes.Process(target=child, args=(words,), kwargs=kill)
    process.start()
    process.join(1800)
    return process.exitcode


def ends(folder):
    """What a run leaves: weights and merged weights as bytes, and its measurements but for the times."""
    results = json.loads((folder / "results.json").read_text())
    timed = ("seconds", "per_second", "gb")
    timeless = {key: value for key, value in results["train_info"].items() if not key.endswith(timed)}
    files = ("adapter_model.safetensors", "merged/model.safetensors", "lora/adapter_model.safetensors")
    measured = results["benchmarks"], results["base_benchmarks"]
    return [(folder / name).read_bytes() for name in files], timeless, *measured


@pytest.mark.slow
def test_killed_anywhere_at_random_a_run_ends_with_the_same_bits(tmp_path):
    save_tiny_model(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    fields = {"model_name_or_path": str(tmp_path / "model"), "merge": True, "compare_with": ["lora"]}
    recipe.write_text(yaml.safe_dump({**RECIPE, **fields, "save_total_limit": 2, "lora_dropout": 0.1}))
    words = lambda name: [
        str(recipe),
        "--output_dir",
        str(tmp_path / name / "run"),
        "--resume_from_checkpoint",
        "true",
    ]
    began = time.monotonic()
    assert start(words("straight")) == 0
    seconds = time.monotonic() - began
    straight = ends(tmp_path / "straight" / "run")

    chance, killed, runs = random.Random(SEED), collections.Counter(), 0
    while killed.total() < KILLS:
        name = list(PLACES)[(killed.total() + runs) % len(PLACES)]
        place, events = PLACES[name]
        kill = (
            {"place": place, "event": chance.randint(1, events)} if place else {"after": chance.uniform(0.1, seconds)}
        )
        code = start(words("killed"), **kill)
        if code in (-signal.SIGKILL, -signal.SIGALRM):
            killed[name] += 1
            print(f"kill {killed.total()}: {name}", flush=True)
            continue
        assert code == 0  # it was faster, or there was nothing left to do in that place
        runs += 1
        assert ends(tmp_path / "killed" / "run") == straight
        shutil.rmtree(tmp_path / "killed")
    assert start(words("killed")) == 0
    assert ends(tmp_path / "killed" / "run") == straight
    print(f"\n{killed.total()} kills over {runs + 1} runs: {dict(killed)}")
    assert KILLS < 50 or set(killed) == set(PLACES)
