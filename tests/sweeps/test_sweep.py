"""recipes/sweep.py: order, choice of learning rates, finished runs, locks, and continuation after a kill."""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import yaml
from huggingface_hub import get_session
from safetensors.torch import save_file
from torch.nn import Identity

from helpers.errors import user_error
from helpers.files import ROOT, load_script, read_lines, write_lines
from helpers.hub import running_hub
from helpers.processes import PATIENCE, ForkedPopen, Program, python, wait_for
from loopdropout_trainer import hub
from loopdropout_trainer.costs.evaluations import HOW_TO_TIME
from loopdropout_trainer.errors import run_script
from loopdropout_trainer.evaluation import loading, sandbox
from loopdropout_trainer.files import TINY_OURO_PATH, lock_folder, lock_path
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.jobs import training_data
from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.own_code import IMPORTED
from loopdropout_trainer.reports.final_results import describe_left_out_runs, final_results
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.results.imported_code import (
    accept_other_code,
    describe_imports,
    digest_imports,
    find_edited,
    find_other_code,
)
from loopdropout_trainer.results.run_files import read_run, write_results, write_run
from loopdropout_trainer.results.sweep_folder import (
    SweepRun,
    describe_choices,
    describe_interruption,
    describe_progress,
    read_summary,
    update_summary,
)
from loopdropout_trainer.results.sweep_processes import SweepProcess, find_processes, working_on_sweep
from loopdropout_trainer.results.sweep_scores import read_score
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.settings.recipe import dump_recipe, import_files, load_recipe, parse
from loopdropout_trainer.sweeps.code import (
    can_accept_other_results,
    describe_other_results,
    find_incomparable,
    find_kept_choices,
    has_other_results,
)
from loopdropout_trainer.sweeps.own_runs import list_own_folders
from loopdropout_trainer.sweeps.run_times import RunKind
from loopdropout_trainer.sweeps.stopping import stopping_on_signals
from loopdropout_trainer.sweeps.summary import print_summary
from loopdropout_trainer.sweeps.workers import _describe_start, _find_checkpoint, read_message
from loopdropout_trainer.training.config import LoopDropoutConfig


sweep = load_script("recipes/sweep.py")
RECIPE = {
    "model_name_or_path": "tiny-ouro", "preparation": "arithmetic", "num_train_examples": 16, "num_eval_examples": 2,
    "max_steps": 1, "benchmarks": ["arithmetic_test"], "single_loop_batches": 1, "compare_with": ["lora"],
}  # fmt: skip
# A training script without a training. It logs its start, waits while a file `hold` exists, and writes results with the scores
# of the file `world`.
SCRIPT = """
import json, os, pathlib, sys, time, yaml
lab = pathlib.Path(__file__).parent
world = json.loads((lab / "world").read_text())
settings, out = yaml.safe_load(open(sys.argv[1])), pathlib.Path(sys.argv[3])
with open(lab / "log", "a") as log:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    print(json.dumps(["/".join(out.parts[-3:]), settings["benchmarks"], gpu]), file=log)
while (lab / "hold").exists():
    time.sleep(0.02)
(out / "recipe.yaml").write_text(yaml.safe_dump({**settings, "command": "sft", "output_dir": str(out)}))
if any(name in str(out) for name in world["fails"]):
    sys.exit(f"ValueError: it is broken in {out}")
rate, seed = settings["learning_rate"], settings["seed"]
row = {"unit": "%", "method": settings["rule"], "seed": seed, "step": 1, "num_loops": 4, "gates": "unit", "n": 10}
rows = [{**row, "task": "training", "metric": "train_seconds", "value": 60.0}]
for task in settings["benchmarks"]:
    value = world["scores"].get(str(rate), 1) if task == "development" else seed % 10
    rows.append({**row, "task": task, "metric": "accuracy", "value": 10.0 * value})
if str(rate) in world["losses"]:
    rows.append({**row, "task": "development", "metric": "loss", "value": world["losses"][str(rate)]})
with open(out / "results.jsonl", "a") as file:
    file.writelines(json.dumps(row) + "\\n" for row in rows)
status = "non-finite" if rate in world["diverging"] else "finished"
(out / "run.json").write_text(json.dumps({"status": status, "imports": world["imports"]}))
sys.exit(status != "finished")
"""


class Lab:
    """A folder with the script, a recipe and the log of all starts."""

    def __init__(self, folder):
        self.folder, self.out, self.file = folder, folder / "out", str(folder / "sweep.yaml")
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(RECIPE))
        (folder / "lab.py").write_text(SCRIPT)
        self.set_world()

    def set_world(self, scores=None, losses=None, diverging=(), fails=(), imports=None):
        """Set scores and losses by learning rate, the rates with a non-finite loss, and parts of the names of failing runs.

        `imports`: digests of `--import` that the runs note.
        """
        scores = scores or {"0.01": 5, "0.02": 7, "0.04": 6}
        world = {"scores": scores, "losses": losses or {}, "diverging": diverging, "fails": fails}
        (self.folder / "world").write_text(json.dumps({**world, "imports": imports or {}}))

    def sweep(self, script=None, **fields):
        defaults = {"methods": ["lora"], "learning_rates": [0.04, 0.01, 0.02], "seeds": [101, 102]}
        paths = {"recipe": self.recipe, "output_dir": self.out}
        fields = {**defaults, **{name: str(path) for name, path in paths.items()}, **fields}
        Path(self.file).write_text(yaml.safe_dump(fields, sort_keys=False))
        (made,) = parse((sweep.Sweep,), [self.file, "--script", script or f"{self.folder}/lab"])
        return made

    def run(self, **fields):
        made = self.sweep(**fields)
        made.train_all()
        return made

    @property
    def log(self):
        """(METHOD/lr_X/seed_S, benchmarks, GPU) of each start of the script."""
        return [json.loads(line) for file in self.folder.glob("log") for line in file.read_text().splitlines()]

    @property
    def runs(self):
        return [name for name, *_ in self.log]


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def test_sweep_chooses_on_first_seed_then_trains_all(lab):
    lab.run(methods=["lora", "loop_dropout"])
    lora = [(name, tasks) for name, tasks, _ in lab.log if name.startswith("lora/")]
    assert lora == [
        *((f"lora/lr_{rate}/seed_101", ["development"]) for rate in (0.01, 0.02, 0.04)),
        ("lora/lr_0.02/seed_101", ["arithmetic_test"]),
        ("lora/lr_0.02/seed_102", ["arithmetic_test"]),
    ]
    assert lab.runs[-2:] == [f"{method}/lr_0.02/seed_102" for method in ("lora", "loop_dropout")]
    recipe = load_recipe(lab.out / "lora/lr_0.02/seed_102/recipe.yaml")
    assert recipe["run_name"] == "out/lora/lr_0.02/seed_102" and recipe["resume_from_checkpoint"] == "true"
    assert recipe["single_loop_batches"] == 1 and "compare_with" not in recipe
    assert load_recipe(lab.out / "lora/lr_0.01/seed_101/recipe.yaml")["single_loop_batches"] == 1


def test_sweep_prepares_runs_of_each_method(lab):
    own = {"benchmarks": ["arithmetic_hard"], "eval_num_loops": [2], "eval_files": ["held.jsonl"]}
    measure = {"benchmarks": ["arithmetic_test"], "eval_num_loops": [4]}
    made = lab.sweep(methods={"hard": own}, measure=measure, select_on="eval_loss", rate_factors={"hard": 0.5})
    assert made.choice("hard").rates == [0.005, 0.01, 0.02]
    first, final = (made.run_settings(SweepRun("hard", 0.01, 101, selects)) for selects in (True, False))
    measured = lambda run: [run.get(name) for name in ("benchmarks", "single_loop_batches", "eval_num_loops")]
    assert measured(first) == [[], 1, None] and measured(final) == [["arithmetic_hard"], 1, [2]]
    lab.recipe.write_text(yaml.safe_dump({name: RECIPE[name] for name in RECIPE if name != "single_loop_batches"}))
    made = lab.sweep(script="dpo")  # ties are broken by its own held-out loss
    first, final = (made.run_settings(SweepRun("lora", 0.01, 101, selects)) for selects in (True, False))
    assert first["eval_strategy"] == final["eval_strategy"] == "epoch" and "single_loop_batches" not in first


@pytest.mark.parametrize("rates", [[0.01, 0.02], [0.01]])
def test_all_final_runs_of_a_sweep_measure_the_same_losses(lab, capsys, rates):
    """The run that chooses the learning rate has losses of each loop, so the other seeds have them, too."""
    recipe = {**RECIPE, "benchmarks": None, "compare_with": None}
    del recipe["single_loop_batches"]
    lab.recipe.write_text(yaml.safe_dump(recipe))
    made = lab.sweep(learning_rates=rates, measure={})
    final = made.recipes["lora"].final
    assert final["single_loop_batches"] == 16 == made.recipes["lora"].selecting["single_loop_batches"]
    sweep.print_sweep_plan(made, "loopdropout sweep x.yaml")
    assert re.search(
        r"evaluation .* final runs of each method:\n +measure losses on held-out ex", capsys.readouterr().out
    )
    numbers = lambda made, method="lora": [recipe["single_loop_batches"] for recipe in made.recipes[method]]
    assert numbers(lab.sweep(measure={"single_loop_batches": 0})) == [16, 0]  # the loss chooses nevertheless
    assert numbers(lab.sweep(settings={"single_loop_batches": 3})) == [3, 3]
    assert numbers(lab.sweep(settings={"single_loop_batches": 3}, measure={"single_loop_batches": 0})) == [3, 0]
    made = lab.sweep(settings={"single_loop_batches": 3}, measure={"single_loop_batches": 4})
    assert numbers(made) == [4, 4]
    own = {"a": {"single_loop_batches": 3}, "b": "lora"}
    assert numbers(lab.sweep(methods=[own]), "a") == numbers(lab.sweep(methods=[own]), "b") == [3, 3]
    made = lab.sweep(methods=[{**own, "c": {"single_loop_batches": 4}}])
    assert [numbers(made, method) for method in "abc"] == [[3, 3], [16, 16], [4, 4]]
    assert (
        "single_loop_batches" not in lab.sweep(settings={"num_eval_examples": 0}, full_grid=True).recipes["lora"].final
    )
    assert "single_loop_batches" not in lab.sweep(script="dpo").recipes["lora"].final


def test_plan_says_on_how_many_examples_the_chosen_losses_are(lab, capsys):
    """And warns of few of them, with the remedy: to measure on more of them, or to hold out more."""
    few = {"num_eval_examples": 120, "eval_strategy": "no", "per_device_eval_batch_size": 8}
    enough = {"single_loop_batches": 13}
    methods = {"few": {"single_loop_batches": 2}, "enough": enough, "all": {**enough, "num_eval_examples": 20}}
    methods["one"] = {"single_loop_batches": 1, "num_eval_examples": 20}
    lab.sweep("sft", settings=few, methods=[methods], select_on="eval_loss")
    sweep.main([lab.file, "--dry_run", "true"])
    indent = "\n" + 16 * " "
    out = capsys.readouterr().out
    assert (
        f"\nchoice          held-out losses of 12 runs"
        f"{indent}few: each on the first 2 batches (16 of 120 held-out examples), as `single_loop_batches` says"
        f"{indent}enough: each on the first 13 batches (104 of 120 held-out examples), as `single_loop_batches` says"
        f"{indent}all: each on the first 13 batches (20 of 20 held-out examples), as `single_loop_batches` says"
        f"{indent}one: each on the first batch (8 of 20 held-out examples), as `single_loop_batches` says"
        f"{indent}few: Losses on 16 examples differ mostly by chance, so raise `single_loop_batches` until the runs "
        "measure at least 100 examples."
        f"{indent}all: Losses on 20 examples differ mostly by chance, so hold out at least 100 examples "
        "(`num_eval_examples`)."
        f"{indent}one: Losses on 8 examples differ mostly by chance, so hold out at least 100 examples "
        "(`num_eval_examples`) and raise `single_loop_batches` until the runs measure all of them.\nevaluation "
    ) in out
    for settings, line in (
        (
            {**few, "eval_strategy": "epoch"},
            "held-out losses of 3 runs{}each on all 120 held-out examples, during the training\n",
        ),
        (
            {**few, "eval_packing": True},
            "held-out losses of 3 runs{}each on the first batch (at most 8 packed rows), as",
        ),
    ):
        lab.sweep("sft", settings=settings, select_on="eval_loss")
        sweep.main([lab.file, "--dry_run", "true"])
        out = capsys.readouterr().out
        assert f"\nchoice          {line.format(indent)}" in out and "by chance" not in out
    lab.sweep("sft", settings={**few, "eval_strategy": "epoch", "num_eval_examples": 1}, select_on="eval_loss")
    sweep.main([lab.file, "--dry_run", "true"])
    assert f"{indent}each on the only held-out example, during the training" in capsys.readouterr().out
    lab.sweep("sft", settings={**few, "eval_strategy": "epoch", "num_eval_examples": 8}, select_on="eval_loss")
    sweep.main([lab.file, "--dry_run", "true"])
    warning = "Losses on 8 examples differ mostly by chance, so hold out at least 100 examples (`num_eval_examples`)."
    assert (
        f"{indent}each on all 8 held-out examples, during the training{indent}{warning}\n" in capsys.readouterr().out
    )


def test_losses_on_other_batches_choose_no_learning_rate(lab, capsys):
    """A sweep that goes on with another `single_loop_batches` measures its runs again, so that it never mixes losses."""
    fields = {"select_on": "eval_loss", "seeds": [101]}
    lab.set_world(losses={"0.01": 2.0, "0.02": 1.0, "0.04": 3.0})
    made = lab.run(**fields, measure={"single_loop_batches": 2})
    assert made.choice("lora").best == 0.02 and not made.pending() and len(lab.log) == 4
    write_run(
        lab.out / "lora/lr_0.04/seed_101", loss_batches=3
    )  # which it was measured on since, unlike its recipe says
    lab.set_world(losses={"0.01": 0.5, "0.02": 1.5, "0.04": 3.5})
    made = lab.sweep(**fields, measure={"single_loop_batches": 3})
    assert made.choice("lora").best is None
    assert [run.name for run in made.pending()] == [f"lora/lr_{rate}/seed_101" for rate in (0.01, 0.02)]
    sweep.main([lab.file, "--script", f"{lab.folder}/lab", "--dry_run", "true"])
    assert "\ndone            3 of 3 trainings, 2 of them still to be measured, about 0:00:" in capsys.readouterr().out
    made.train_all()
    assert made.choice("lora").best == 0.01 and made.choice("lora", with_other_code=True).best == 0.01
    again = lab.sweep(**fields, measure={"single_loop_batches": 0})  # the recipe of the choice has 1 batch
    assert len(again.pending()) == 3
    for folder in lab.out.glob("lora/*/*"):
        write_results(folder, [{**read_lines(folder / "results.jsonl")[0], "metric": "eval_loss", "value": 1.0}])
    assert again.choice("lora").best == 0.01  # the losses of a training itself are on all examples


def test_sweep_continues_finished_runs(lab):
    lab.set_world(diverging=[0.02])
    for _ in range(2):
        lab.run()
        assert lab.runs[-1] == "lora/lr_0.04/seed_102" and len(lab.log) == 5
    measure = {"benchmarks": ["arithmetic_hard"]}
    more = [[f"lora/lr_0.04/seed_{seed}", ["arithmetic_hard"]] for seed in (101, 102, 103)]
    for further in ({"eval_num_loops": [2]}, {}):  # without it, nothing is measured again
        lab.run(measure={**measure, **further}, seeds=[101, 102, 103])
        assert [entry[:2] for entry in lab.log[5:]] == more


def test_sweep_summary_has_means_and_choices(lab, capsys):
    for method in ("lora", "loop_dropout"):
        print_summary(lab.run(methods=[method]))
        if method == "lora":
            (lab.folder / "kept").hardlink_to(lab.out / "summary.json")
    assert [*json.loads((lab.folder / "kept").read_text())["choices"]] == ["lora"]  # a file is replaced, not rewritten
    text = capsys.readouterr().out
    assert (
        "lora: learning rate 0.02.\n  0.01       accuracy 50.00% on development\n" in text and "15.00 ± 7.07" in text
    )
    summary = json.loads((lab.out / "summary.json").read_text())
    choice = {"rates": [0.01, 0.02, 0.04], "best": 0.02, "remark": ""}
    assert summary["choices"] == {"lora": choice, "loop_dropout": choice}
    rows = [row for row in summary["accuracy"] if row["task"] == "arithmetic_test"]
    assert [row["accuracy"] for row in rows] == ["15.00 ± 7.07"] * 2
    path = lab.out / "lora/lr_0.02/seed_101/results.jsonl"
    of_depth = [{**row, "num_loops": 3} for row in read_lines(path) if row["task"] == "arithmetic_test"]
    with path.open("a") as file:  # as after `loopdropout evaluate` of one run
        file.writelines(f"{json.dumps(row)}\n" for row in of_depth)
    print_summary(lab.sweep(methods=["lora"]))
    text = capsys.readouterr().out
    assert re.search(r" 3  lora +10\.00 +1\n.* 4  lora +15\.00 ± 7\.07 +2\n", text)
    assert "\nProblems: arithmetic_test 10. Seeds: 1 or 2.\n" in text
    assert "\nProblems: development 10. Seeds: 1.\nThe best of several learning rates" in text
    for method, name, shift in (("lora", "LoRA", 0), ("loop_dropout", "Loop Dropout", 5)):  # which have a difference
        for file in lab.out.glob(f"{method}/lr_0.02/*/results.jsonl"):
            rows = [
                {**row, "method": name, "value": row["value"] + shift * (row["seed"] - 100)}
                for row in read_lines(file)
            ]
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print_summary(lab.sweep(methods=["lora"]))
    text = capsys.readouterr().out
    assert "+7.5 [-24.3, +39.3]" in text and "The 95% intervals and tests are over seeds (t test)." in text


def test_unfinished_sweep_says_how_far_it_is_in_its_summary(lab):
    lab.set_world(fails=["lr_0.04"])
    lab.run()
    summary = json.loads((lab.out / "summary.json").read_text())
    assert (summary["choices"]["lora"]["best"], summary["trainings"]["lora"]) == (None, [2, 4])
    grid = lab.run(full_grid=True, output_dir=str(lab.folder / "grid"))
    summary = json.loads((lab.folder / "grid/summary.json").read_text())
    assert (summary["full_grid"], summary["trainings"]) == ({"lora": True}, {"lora": [4, 6]}) and grid.pool.failures


def test_unfinished_sweep_names_the_runs_that_failed(lab):
    """With their causes and logs, also if the failures stop it. A later start forgets those that it trains."""
    lab.set_world(fails=["seed_101"])
    with user_error("two runs in a row failed"):
        lab.run()
    names = "lora/lr_0.01/seed_101, lora/lr_0.02/seed_101"
    text = f"is not finished: 0 of 4 trainings have ended (failed: {names}). The same"
    progress = describe_progress(lab.out)
    assert text in progress
    for rate in (0.01, 0.02):
        run = lab.out / f"lora/lr_{rate}/seed_101"
        cause = (
            f"lora/lr_{rate}/seed_101 ended with exit code 1: ValueError: it is broken in {run} (log: {run}/log.txt)."
        )
        assert cause in progress
    assert "was trained" not in progress
    lab.set_world(fails=["lr_0.02/seed_101"])
    lab.run()
    (run / "sweep.failed").write_text("")  # of an older version
    assert f" continues it. lora/lr_0.02/seed_101 failed (log: {run}/log.txt)." in describe_progress(lab.out)
    assert "2 of 4 trainings have ended (failed: lora/lr_0.02/seed_101). The same" in describe_progress(lab.out)
    copied = shutil.copytree(lab.out, lab.out.parent / "my copy")  # the command itself writes to the former folder
    command = f"The same `loopdropout sweep` command with `--output_dir '{copied}'` continues it."
    assert command in describe_progress(copied) and "--output_dir" not in describe_progress(lab.out)
    lab.set_world()
    lab.run()
    assert describe_progress(lab.out) == ""


def test_progress_has_the_present_sweep_of_a_folder(lab, capsys):
    """Runs of a method or a seed that were removed from a sweep do not count. Another sweep in the folder does."""
    lab.set_world(fails=["adaptive/lr_0.01/seed_1"])
    grid = {"learning_rates": [0.01], "seeds": [1, 2]}
    lab.run(methods=["lora", "adaptive"], **grid)
    failed = "3 of 4 trainings have ended (failed: adaptive/lr_0.01/seed_1). The same"
    assert failed in describe_progress(lab.out)
    other = lab.sweep(methods=["coto"], **grid)
    other.save_progress()
    texts = describe_progress(lab.out).split(" command continues it.")
    assert f"The sweep of lora, adaptive in {lab.out} is not finished: {failed[:-4]}" in texts[0]
    assert f" The sweep of coto in {lab.out} is not finished: 0 of 2 trainings have ended. The same" in texts[1]
    assert "is not finished: 0 of 2 trainings" in describe_interruption(lab.out, other.recipes)
    other.train_all()
    assert describe_progress(lab.out).startswith(
        f"The sweep of lora, adaptive in {lab.out} is not finished: {failed[:-4]}"
    )
    grid["seeds"] = [1, 3]
    made = lab.sweep(methods=["lora"], **grid)
    made.save_progress()
    assert made.count() == (1, 2)
    text = "1 of 2 trainings have ended. The same"
    assert text in describe_progress(lab.out) and text in describe_interruption(lab.out, made.recipes)
    made.train_all()
    print_summary(made)
    assert "The folder has 5 runs of other methods, learning rates or seeds," in capsys.readouterr().out
    assert describe_progress(lab.out) == ""
    shutil.rmtree(lab.out / "lora/lr_0.01/seed_3")  # although two folders of the method are there
    assert "1 of 2 trainings have ended (1 folder removed since)" in describe_progress(lab.out)


def test_sweep_itself_says_if_it_is_finished(lab, capsys):
    """Also if no learning rate can be chosen, and not yet if a training has ended whose measurement has failed."""
    lab.set_world(diverging=[0.01, 0.02, 0.04])
    print_summary(lab.run())
    summary = read_summary(lab.out)
    assert (summary["trainings"], summary["finished"]) == ({"lora": [3, 3]}, {"lora": True})
    assert describe_progress(lab.out) == "" and not lab.sweep().pending()
    assert "lora: no learning rate is chosen. No learning rate has a finite score.\n" in capsys.readouterr().out
    lab.set_world()
    other = str(lab.folder / "other")
    print_summary(lab.sweep(output_dir=other))
    assert "lora: no learning rate is chosen. Not every learning rate has a score.\n" in capsys.readouterr().out
    lab.set_world(fails=["lr_0.02/seed_101"])
    made = lab.sweep(output_dir=other)
    for rate in (0.01, 0.02, 0.04):
        path = Path(other, f"lora/lr_{rate}/seed_101")
        path.mkdir(parents=True)
        run = SweepRun("lora", rate, 101, True)
        dump_recipe(made.run_settings(run), path / "sweep_recipe.yaml")
        row = {"metric": "accuracy", "task": "development", "gates": "unit", "value": 60.0 - abs(rate - 0.02)}
        write_results(path, [row])
    made.train_all()
    assert made.count() == (4, 4) and read_summary(other)["finished"] == {"lora": False}
    text = "4 of 4 trainings have ended, but measurements are missing (failed: lora/lr_0.02/seed_101). The same"
    assert text in describe_progress(other)
    lab.set_world()
    made = lab.run(output_dir=other)
    assert describe_progress(other) == ""
    run = SweepRun("lora", 0.02, 101, False)
    write_run(made.folder(run), status="trained")  # as after a kill in a later measurement
    text = "4 of 4 trainings have ended, but measurements of lora/lr_0.02/seed_101 are missing. The same"
    assert text in describe_progress(other) and made.count() == (4, 4)


def test_progress_names_runs_that_lack_measurements(lab):
    """Between the choice and the measurement of the chosen run, and in the measurement of a run that chooses."""
    made = lab.sweep()
    for run in made.pending():
        subprocess.run(made.command(run), check=True)
    made.save_progress()
    chosen = SweepRun("lora", 0.02, 101, False)
    text = "3 of 4 trainings have ended, but measurements of lora/lr_0.02/seed_101 are missing. The same"
    assert text in describe_progress(lab.out)
    with patch.object(sweep, "dump_recipe", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        made.command(chosen)  # killed before the recipe of the measurement is there
    assert text in describe_progress(lab.out) and chosen in lab.sweep().pending()
    subprocess.run(made.command(chosen), check=True)
    assert "3 of 4 trainings have ended. The same" in describe_progress(lab.out)
    first = lab.out / "lora/lr_0.01/seed_101"
    write_run(first, status="trained")
    assert "3 of 4 trainings have ended. The same" in describe_progress(lab.out)  # it has its score
    summary = read_summary(lab.out)
    update_summary(lab.out, choices={"lora": {**summary["choices"]["lora"], "best": None}})
    (first / "results.jsonl").unlink()
    assert "but measurements of lora/lr_0.01/seed_101 are missing" in describe_progress(lab.out)


def test_plan_bounds_the_tokens_that_are_not_counted(lab, capsys, monkeypatch):
    """A launcher's processes and the learning rates of an extended grid are not known before."""
    lab.sweep(extend_grid=True)
    sweep.main([lab.file, "--dry_run", "true", "--launcher", "accelerate launch"])
    printed = capsys.readouterr().out
    assert "1 step, 8 examples per step and process\n" in printed
    text = (
        "478 in each training, 1,912 in these trainings, without those of further learning rates, for each process\n"
    )
    assert f"tokens          about {text}" in printed
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    lab.sweep(methods=[{"lora": "lora", "far": {"model_name_or_path": "ByteDance/Ouro-1.4B"}}])
    sweep.main([lab.file, "--dry_run", "true"])
    text = "as if each example had `max_length` tokens where they are not counted"
    assert (
        f"tokens          at most 34,680 in all trainings, {text}\n" in capsys.readouterr().out
    )  # 4 x 478 + 4 x 8 x 1,024


@pytest.mark.parametrize("fields", [{"select_on": "eval_loss"}, {}], ids=["asked", "default"])
def test_sweep_without_benchmarks_chooses_by_held_out_loss(lab, capsys, fields):
    lab.recipe.write_text(yaml.safe_dump({**RECIPE, "benchmarks": []}))
    lab.set_world(losses={"0.01": 0.3, "0.02": 0.2, "0.04": 0.4})
    print_summary(lab.run(**fields))
    out = capsys.readouterr().out
    assert out.endswith(
        "lora: learning rate 0.02.\n  0.01       held-out loss 0.3000 nats per token\n"
        "  0.02       held-out loss 0.2000 nats per token\n  0.04       held-out loss 0.4000 nats per token\n"
        f"\nNext:\n  loopdropout report {lab.out}   # tables of losses, accuracies and costs\n"
        f"  loopdropout chat {lab.out}/lora/lr_0.02/seed_101   # ask the best adapter of seed 101: held-out loss 0.2000 nats "
        "per token\n"
    )
    settings = load_recipe(lab.out / "lora/lr_0.02/seed_102/recipe.yaml")
    assert settings["eval_strategy"] == "epoch"  # so that each run has a held-out loss to report
    assert ("because no `benchmarks` are set" in out) is not bool(fields)
    assert json.loads((lab.out / "summary.json").read_text())["accuracy"] == []
    remark = "The held-out losses are on different examples, so they do not compare. The data have changed between"
    for rate, digest in (("0.01", "a"), ("0.02", "a"), ("0.04", "b")):
        assert remark not in lab.sweep(**fields).choice("lora").remark
        file = lab.out / f"lora/lr_{rate}/seed_101/results.jsonl"
        file.write_text(file.read_text().replace('"metric": "loss"', f'"metric": "loss", "problems": "{digest}"'))
    made = lab.sweep(**fields)
    assert remark in made.choice("lora").remark
    file.unlink()  # the files are read once, although every worker asks each second
    assert remark in made.choice("lora").remark


def test_sweep_names_the_best_adapter_and_the_chance_of_one_seed(lab, capsys):
    """It is the best one by the score that chooses the learning rates, whatever the other seeds and later measurements say."""
    losses = {("lora", 101): 0.5, ("loop_dropout", 101): 0.4, ("lora", 102): 0.5, ("loop_dropout", 102): 0.8}
    lab.recipe.write_text(yaml.safe_dump({**RECIPE, "benchmarks": []}))
    lab.set_world(losses={"0.01": 2.0, "0.02": 0.2, "0.04": 3.0})
    caution = "With one seed, the spread over seeds is not known, so the order of the methods can be chance.\n"
    for seeds in ([101], [101, 102]):
        fields = {"methods": ["lora", "loop_dropout"], "seeds": seeds}
        lab.run(**fields)
        for (method, seed), value in losses.items():
            row = {"metric": "eval_loss", "task": "training", "value": value, "seed": seed, "method": method}
            row |= {"step": 1, "gates": "unit", "num_loops": 4, "unit": "nats", "n": 1}
            if seed in seeds:
                write_results(lab.out / f"{method}/lr_0.02/seed_{seed}", [row])
        capsys.readouterr()
        print_summary(lab.sweep(**fields))
        out = capsys.readouterr().out
        score = "ask the best adapter of seed 101: held-out loss 0.4000 nats per token"
        assert out.endswith(f"  loopdropout chat {lab.out}/loop_dropout/lr_0.02/seed_101   # {score}\n")
        assert (caution in out) == (len(seeds) == 1)
    assert describe_choices(lab.out) == ["lora: learning rate 0.02.", "loop_dropout: learning rate 0.02."]
    assert describe_choices(lab.folder) == []


def test_sweep_whose_settings_remove_the_benchmarks_chooses_by_loss(lab):
    """The recipes of the runs decide, and not the one that they start from. A message names what else is switched off."""
    assert lab.sweep(settings={"benchmarks": None}).select_on == "eval_loss"
    on = {"eval_num_loops": [2], "single_loop_accuracy": True}
    off = {"eval_num_loops": None, "single_loop_accuracy": False}
    advice = "(in a sweep: `measure: {eval_num_loops: null, single_loop_accuracy: false}`)."
    settings = {"benchmarks": None, **on}
    with user_error(re.escape(advice)):
        sweep.print_sweep_plan(lab.sweep(settings=settings))
    sweep.print_sweep_plan(lab.sweep(settings=settings, measure=off))
    assert lab.sweep(methods={"a": {"rule": "lora", "benchmarks": []}}).select_on == "eval_loss"
    assert lab.sweep().select_on == "development"


def test_sweep_without_any_score_asks_for_held_out_examples(lab):
    recipe = {name: value for name, value in RECIPE.items() if name not in ("benchmarks", "num_eval_examples")}
    lab.recipe.write_text(yaml.safe_dump(recipe))
    message = "`num_eval_examples` or `eval_files` must be set, because without `benchmarks` the held-out loss"
    for settings in ({"num_eval_examples": 0}, {"preparation": None, "train_files": ["a.jsonl"]}):
        with user_error(message):
            lab.sweep(settings=settings)
    recipes = lab.sweep().recipes["lora"]  # `preparation: arithmetic` holds out 200 examples
    assert recipes.selecting["single_loop_batches"]


def test_sweep_names_the_best_adapter_by_the_task_that_chooses(lab, capsys):
    """And not by the mean over all depths and tasks. In a full grid nothing is chosen, so that none is named."""
    fields = {"methods": [{"lora": "lora", "own method": "loop_dropout"}], "measure": {"eval_num_loops": [2, 8]}}
    lab.run(**fields)
    row = read_lines(lab.out / "lora/lr_0.02/seed_101/results.jsonl")[-1] | {"task": "arithmetic_test"}
    write_results(lab.out / "lora/lr_0.02/seed_101", [{**row, "num_loops": depth, "value": 99.0} for depth in (2, 8)])
    chosen = {**row, "task": "development", "value": 71.0, "method": "loop_dropout"}
    write_results(lab.out / "own method/lr_0.02/seed_101", [chosen])
    capsys.readouterr()
    print_summary(lab.sweep(**fields))
    command = (
        f"  loopdropout chat '{lab.out}/own method/lr_0.02/seed_101'   # ask the best adapter of seed 101: accuracy 71"
    )
    assert command in capsys.readouterr().out
    print_summary(lab.run(full_grid=True, output_dir=str(lab.folder / "grid")))
    assert "loopdropout chat" not in capsys.readouterr().out


TIES = [
    ({"0.01": 0, "0.02": 0, "0.04": 0}, {}, 0.01, "0.01 and 0.02 and 0.04"),
    ({"0.02": 7, "0.04": 7}, {"0.02": 0.2, "0.04": 0.1}, 0.04, "0.02 and 0.04"),
]


@pytest.mark.parametrize(("scores", "losses", "best", "names"), TIES, ids=["size", "loss"])
def test_sweep_breaks_ties_by_held_out_loss(lab, scores, losses, best, names):
    lab.set_world(scores, losses)
    choice = lab.run().choice("lora")
    assert choice.best == best and f"The selection was uninformative. {names} have equal scores" in choice.remark


EDGE = "The best rate is the smallest of the grid. Add a smaller one to `--learning_rates`."
GRIDS = {  # scores: the learning rates in the order of their runs, the choice, the remark
    "inside": ({"0.0025": 6, "0.005": 8, "0.01": 7}, [0.01, 0.02, 0.04, 0.005, 0.0025], 0.005, ""),
    "limit": ({"0.000625": 9, "0.00125": 8, "0.0025": 7, "0.005": 6, "0.01": 5},
              [0.01, 0.02, 0.04, 0.005, 0.0025, 0.00125, 0.000625], 0.000625, EDGE),
    "above": ({"0.02": 2, "0.04": 3, "0.08": 4}, [0.01, 0.02, 0.04, 0.08, 0.16], 0.08, ""),
}  # fmt: skip


@pytest.mark.parametrize(("scores", "rates", "best", "remark"), GRIDS.values(), ids=GRIDS)
def test_sweep_extends_grid_at_its_edge(lab, scores, rates, best, remark):
    lab.set_world(scores, diverging=[0.16])
    made = lab.run(extend_grid=True)
    assert list(dict.fromkeys(float(name.split("/")[1][3:]) for name in lab.runs)) == rates
    assert made.choice("lora")[1:] == (best, remark)


def test_sweep_chooses_by_the_results_of_its_trainings(lab):
    """And not by those of `evaluate`, which are in subfolders of the runs."""
    lab.run()
    row = read_lines(lab.out / "lora/lr_0.01/seed_101/results.jsonl")[-1]
    later = {**row, "task": "development", "metric": "accuracy", "value": 99.0, "adapter": "a"}
    write_results(lab.out / "lora/lr_0.01/seed_101/shifted", [later])
    assert lab.sweep().choice("lora").best == 0.02


def add_times(made, method="lora", **seconds):
    """Add a run of a method that has taken some seconds, for each kind."""
    for kind, value in seconds.items():
        made.pool.times.add(RunKind(method, kind), value)


def test_time_left_has_the_mean_of_each_method(lab, capsys):
    """A slow rule does not make the others slow. Before a run of a method has ended, the others' mean counts."""
    fields = {"methods": ["lora", "loop_dropout", "exactly_m"], "seeds": [101]}
    made = lab.sweep(**fields)
    subprocess.run(made.command(made.pending()[0]), check=True)
    made = lab.sweep(**fields)
    add_times(made, "lora", choosing=100)
    add_times(made, "loop_dropout", choosing=300)
    made.save_progress()
    sweep.main([lab.file, "--dry_run", "true"])
    lines = capsys.readouterr().out
    # Two runs of lora, three of loop_dropout, and three of exactly_m at the mean of both, 200 s.
    assert "done            1 of 9 trainings, about 0:28:20 left, not counting measurements" in lines
    assert "0:01:40 (lora), 0:05:00 (loop_dropout) for a run that chooses a learning rate\n" in lines


def test_progress_leaves_out_removed_runs(lab):
    """A report says then that the sweep is not finished, and the same command trains them again."""
    lab.run()
    assert describe_progress(lab.out) == ""
    shutil.rmtree(lab.out / "lora/lr_0.02/seed_102")
    text = f"The sweep in {lab.out} is not finished: 3 of 4 trainings have ended (1 folder removed since). The same"
    assert describe_progress(lab.out).startswith(text)
    lab.run()
    assert describe_progress(lab.out) == ""


def test_stopped_measurement_counts_its_training(lab):
    """As after SIGTERM during the evaluation of a run, whose training has ended."""
    made = lab.sweep()
    run = made.pending()[0]
    subprocess.run(made.command(run), check=True)
    (made.folder(run) / "run.json").write_text('{"status": "trained"}')
    (made.folder(run) / "results.jsonl").unlink()
    made.save_progress()
    text = "1 of 4 trainings have ended"
    assert made.pool._describe_end(run, False).endswith(
        f"stopped after its training, the time left is not known yet ({text})"
    )
    assert text in describe_progress(lab.out)


def test_time_left_has_the_mean_of_each_kind_of_run(lab):
    """A measurement, a start of its own after the four trainings, can take ten times as long as the choice of the rate."""
    assert lab.sweep(full_grid=True, output_dir=str(lab.folder / "grid")).count_left() == {("lora", "final"): 6}
    made = lab.sweep()
    assert made.count_left() == {("lora", "choosing"): 3, ("lora", "measuring"): 1, ("lora", "final"): 1}
    runs = [made.pending()[0]]
    subprocess.run(made.command(runs[0]), check=True)
    add_times(made, choosing=100)
    end = made.pool._describe_end(runs[0], False)
    untimed = "final trainings and measurements"
    assert end.endswith(f"development, about 0:03:20 left, not counting {untimed} (none has ended yet)"), end
    stopped = made.pool._describe_end(made.pending()[0], False)
    assert re.search(r"^lora/.* stopped, about 0:03:20 left, .* \(1 of 4 trainings have ended\)$", stopped), stopped
    add_times(made, final=1200, measuring=1000)
    assert made.pool._describe_end(runs[0], False).endswith("development, about 0:40:00 left")  # 2 * 100 + 1000 + 1200
    made.pool.number = 2
    assert made.pool._describe_end(runs[0], False).endswith("development, about 0:20:00 left")
    made.pool.done_before, made.pool.num_ended = -3, 2  # another machine has ended as many runs
    assert made.pool._describe_end(runs[0], False).endswith("development, about 0:10:00 left")
    made.pool.failures[made.pending()[0]] = "is broken"  # so that no learning rate is chosen now
    assert made.count_left() == {("lora", "choosing"): 1}
    made = lab.run()
    assert (made.count_left(), made.count_done(), made.count()) == ({}, 5, (4, 4))


def test_continued_sweep_has_the_times_of_its_plan(lab, capsys):
    """A start of a sweep begins with the mean times of the start before it."""
    made = lab.sweep()
    add_times(made, choosing=100, final=1000, measuring=500)
    made.save_progress()
    first, *_ = made.pending()
    made = lab.sweep()
    made.pool._train_unless_locked(first, {})  # it takes a few seconds at most
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.search("on development, about 0:25:[0-9]{2} left$", line), line
    sweep.main([lab.file, "--dry_run", "true"])
    assert re.search("1 of 4 trainings, about 0:25:[0-9]{2} left", capsys.readouterr().out)


def test_lines_of_workers_count_each_training_once(lab, capsys):
    """Two trainings that end together have two numbers."""
    made = lab.sweep()
    first, second, _ = made.pending()
    made.pool.unreported.add(second)  # another worker has not said yet that it has ended
    subprocess.run(made.command(second), check=True)
    made.pool._train_unless_locked(first, {})
    assert f"\n1 of 4: {first.name} trained" in capsys.readouterr().out
    made.pool.unreported.remove(second)
    assert made.pool._describe_end(second, False).startswith(f"2 of 4: {second.name} trained")


def test_time_of_a_continued_run_is_not_that_of_its_kind(lab):
    """A part of it belongs to another start of the sweep."""
    made = lab.sweep()
    checkpoint = made.folder(made.pending()[0]) / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    save_file({}, checkpoint / "adapter_model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, checkpoint / name)
    made.train_all()
    numbers = {kind.kind: len(seconds) for kind, seconds in made.pool.times.seconds.items()}
    assert numbers == {"choosing": 2, "final": 1, "measuring": 1}
    means = {kind.kind: seconds for kind, seconds in made.pool.times.means().items()}
    assert made.pool.num_ended == 5 and read_summary(lab.out)["run_seconds"]["lora"] == means


def test_sweep_says_how_far_it_is(lab, capsys):
    """Each line has the number of ended trainings as in the plan, the step, the score and the time that is left.

    The third and the fourth line say that the time is not known, because no run of the kinds that are left then has ended.
    """
    lab.set_world(diverging=[0.04])
    lab.run()
    left = r", about 0:\d\d:\d\d left, not counting final trainings and measurements \(none has ended yet\)"
    unknown_final = r"the time of final trainings is not known yet \(none has ended\)"
    unknown = unknown_final.replace("trainings", "trainings and measurements")
    names = {"lora/lr_0.01/seed_101", "lora/lr_0.02/seed_101", "lora/lr_0.04/seed_101", "lora/lr_0.02/seed_102"}
    starts = {name: rf"{name} starts \(log: {lab.out}/{name}/log.txt\)" for name in names}
    measured = starts["lora/lr_0.02/seed_101"].replace("starts", "is being measured")
    lines = [
        starts["lora/lr_0.01/seed_101"],
        rf"1 of 4: lora/lr_0.01/seed_101 trained, accuracy 50.00% on development{left}",
        starts["lora/lr_0.02/seed_101"],
        rf"2 of 4: lora/lr_0.02/seed_101 trained, accuracy 70.00% on development{left}",
        starts["lora/lr_0.04/seed_101"],
        rf"3 of 4: lora/lr_0.04/seed_101 non-finite, loss not finite, {unknown}",
        measured,
        rf"3 of 4: lora/lr_0.02/seed_101 measured, accuracy 10.00% on arithmetic_test at K = 4, {unknown_final}",
        starts["lora/lr_0.02/seed_102"],
        r"4 of 4: lora/lr_0.02/seed_102 trained, accuracy 20.00% on arithmetic_test at K = 4",
    ]
    assert re.fullmatch("\n".join(lines) + "\n", capsys.readouterr().out)


def test_sweep_prints_accuracies_that_choose_nothing(lab, capsys):
    """A final run may be measured on the task that chooses, too."""
    measure = {"benchmarks": ["arithmetic_hard", "arithmetic_test"]}
    lab.run(select_on="arithmetic_hard", learning_rates=[0.01, 0.02], seeds=[101], measure=measure)
    first, second, final = capsys.readouterr().out.splitlines()[1::2]
    assert all("% on arithmetic_hard" in line for line in (first, second)) and "% on arithmetic_test at K" in final


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seeds": [1]}, "1, with every learning rate. The one that is best on development is then measured"),
        ({"seeds": [1], "full_grid": True}, "1, with every learning rate"),
        ({"seeds": [1, 2], "full_grid": True}, "1, 2, each with every learning rate"),
        ({"seeds": [1, 2], "learning_rates": [0.01]}, "1, 2"),
    ],
    ids=str,
)
def test_dry_run_says_what_each_seed_trains(lab, capsys, options, text):
    lab.sweep(**options)
    sweep.main([lab.file, "--dry_run", "true"])
    assert f"\nseeds           {text}\n" in capsys.readouterr().out


def test_dry_run_prints_the_plan_of_a_sweep(lab, capsys):
    lab.sweep(measure={"benchmarks": ["arithmetic_hard"]}, methods=["lora", "loop_dropout"], extend_grid=True)
    sweep.main([lab.file, "--dry_run", "true", "--workers", "2"])
    assert not lab.out.exists()
    out = capsys.readouterr().out
    start, end = out.index("time  "), out.index("choice  ")  # the costs, which other tests read
    assert "H100" in out[start:end] and out[:start] + out[end:] == (
        "8 trainings\n"
        "model           tiny-ouro, K = 4 loops\n"
        "methods         lora, loop_dropout\n"
        "rules           loop_dropout: loop_dropout (p = 0.5)\n"
        "learning rates  0.01, 0.02, 0.04 (and more at the edge of the grid)\n"
        "seeds           101 with every learning rate, then 102 with the one that is best on development\n"
        "                two seeds: a 95% interval reaches 12.7 standard errors to each side, with three 4.3, with five 2.8\n"
        f"folder          {lab.out}/METHOD/lr_X/seed_S\n"
        "each training   1 step, 8 examples per step\n"
        "examples        16, 2 held out, 1 optimizer step, 0.5 epochs\n"
        "tokens          about 478 in each training, 3,824 in these trainings, without those of further learning rates\n"
        "choice          6 evaluations of development\n"
        "evaluation      2 final runs of each method:\n"
        "                  evaluate arithmetic_hard\n"
        "                  measure losses on held-out examples (`single_loop_batches`: 1)\n"
        "answers         at most 2,012 problems and 160,960 generated tokens, without further learning rates\n"
        f"                {HOW_TO_TIME}\n"
        f"\nNext:\n  loopdropout sweep {lab.file} --workers 2\n  loopdropout report {lab.out}   # after the sweep\n"
    )


def test_plan_of_a_sweep_has_the_settings_of_each_method(lab, capsys):
    """The name of a method does not say them, unless it is the rule's with its own fields."""
    deep = {"rule": "lora", "depth_sampling": "uniform"}
    two, fast = {"rule": "exactly_m", "rule_args": {"m": 2}}, {"rule": "lora", "loraplus_lr_ratio": 4}
    lab.sweep(methods=[{"lora": "lora", "two": two, "deep": deep, "fast": fast}], settings={"weight_decay": 0.1})
    sweep.main([lab.file, "--dry_run", "true"])
    out = capsys.readouterr().out
    assert "\nrules           two: exactly_m (m = 2)\n                deep, fast: lora\nlearning rates " in out
    assert "\ndepth           deep: each step runs 1 to 4 loops, drawn at random (depth_sampling: uniform)\n" in out
    assert (
        "\nsettings        lora, two, deep: weight_decay: 0.1\n" in out
        and "\n                fast: weight_decay: 0.1, loraplus_lr_ratio: 4\n" in out
    )


def test_sweep_takes_a_rule_whose_field_has_no_default(lab, capsys):
    """The name of the method alone does not make the rule. Its settings do."""
    needed = HALVED_RULE.replace('    name = "halved"', '    p: float\n    name = "halved"')
    with patch.dict(RULES):
        exec(needed, {"__name__": "halved"})
        lab.sweep(methods=["halved"], settings={"p": 0.25})
        sweep.main([lab.file, "--dry_run", "true"])
    assert "\nrules           halved (p = 0.25)\n" in capsys.readouterr().out


def test_sweep_checks_the_data_once_before_its_first_run(lab, capsys):
    """By the code of a training. Methods with the same data have one line."""
    path = lab.folder / "chats.jsonl"
    rows = [[{"role": "user", "content": "Hi" * i}, {"role": "assistant", "content": "Yes"}] for i in (1, 2, 3, 90)]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = {"train_files": [str(path)], "preparation": None, "num_train_examples": None, "num_eval_examples": 1}
    data |= {"chat_template": "tulu2"}
    methods = [{"lora": "lora", "short": {"max_length": 60}, "loop_dropout": "loop_dropout"}]
    lab.sweep("sft", settings=data, methods=methods, select_on="eval_loss")
    with patch("loopdropout_trainer.jobs.training_data.load_examples", wraps=training_data.load_examples) as load:
        sweep.main([lab.file, "--dry_run", "true"])
    assert load.call_count == 2  # of three methods
    out = capsys.readouterr().out
    assert "examples        lora, loop_dropout: 3, 1 held out, 1 optimizer step, 1 epoch\n" in out
    assert re.search(r"\ntokens          about [\d,]+ to [\d,]+ in each training, [\d,]+ in all trainings\n", out)
    assert "\nleft out        short: 1 example, because it has more than 60 tokens. The longest one is row " in out
    with open(path, "a") as file:
        file.write(json.dumps({"messages": [rows[0][0], {"role": "asistant", "content": "Yes"}]}))
    for options in (["--dry_run", "true"], ["--print_commands", "true"], []):
        with user_error(r"Row 5 of .*chats.jsonl: A role must be .*, got 'asistant'. Did you mean 'assistant'\?"):
            sweep.main([lab.file, *options])
    assert not [*lab.out.glob("*/lr_*")]


def test_sweep_measures_the_base_model_if_it_is_asked_to(lab):
    """In its final runs, by `measure` or `settings`. Reports then have the base model, as those of a single run."""
    for asked, measures in (
        ({}, False),
        ({"measure": {"evaluate_base": True}}, True),
        ({"settings": {"evaluate_base": True}}, True),
    ):
        recipes = lab.sweep(**asked).recipes["lora"]
        assert (recipes.selecting["evaluate_base"], recipes.final["evaluate_base"]) == (False, measures)


def test_plan_names_an_early_stop(lab, capsys):
    """As the plan of a training does."""
    lab.sweep(settings={"early_stopping_patience": 2, "eval_strategy": "steps", "load_best_model_at_end": True})
    sweep.main([lab.file, "--dry_run", "true"])
    line = "each training   1 step, 8 examples per step, early stop after 2 evaluations without a better one\n"
    assert line in capsys.readouterr().out


def test_plan_has_the_costs_of_a_published_model_without_a_network(capsys):
    """Ouro-1.4B on Tulu 2: at most 6 x 100,000 examples of 2,048 tokens, by the sizes that the package knows."""
    sweep.main(["sweeps/tulu2.yaml", "--dry_run", "true"])
    out = capsys.readouterr().out
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    lines = out[out.index("tokens  ") : out.index("evaluation  ")]
    assert (
        lines in page and "at most 1,228,800,000 in all trainings" in lines and "35 to 148 hours of one H100" in lines
    )
    assert "\nexamples        not checked, because the Hub cannot be reached\n" in out
    assert "not computed" not in lines and [line.split()[0] for line in lines.splitlines()] == [
        *("tokens", "time", "computed,", "memory", "(2.9", "8.5", "disk")
    ]


@pytest.mark.parametrize("methods", [
    {"long": "lora", "short": {"max_length": 64}},
    {"of_the_package": {"model_name_or_path": "tiny-ouro"}},
    {"on_own_data": {"train_files": ["rows.jsonl"], "preparation": None}},
])  # fmt: skip
def test_plan_asks_once_whether_the_hub_answers(capsys, monkeypatch, tmp_path, methods):
    """Each answer can take five seconds. The model or the examples of a method are on the Hub."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1 =", "completion": " 1"}\n' * 600)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    words = ["--recipe", "gsm8k.yaml", "--methods", json.dumps(methods), "--learning_rates", "1e-4", "--seeds", "1"]
    hub._answers.cache_clear()
    with patch("huggingface_hub.get_session", wraps=get_session) as ask:
        sweep.main([*words, "--dry_run", "true"])
    assert "\nexamples        not checked, because the Hub cannot be reached\n" in capsys.readouterr().out
    assert ask.call_count == 1
    sweep.main([*words, "--output_dir", str(tmp_path / "runs"), "--print_commands", "true"])
    printed, note = capsys.readouterr()
    assert "not checked, because the Hub cannot be reached" in note and "not checked" not in printed


def test_plan_names_the_missing_folder_of_a_model(lab, capsys, monkeypatch):
    """As of a base model that another command makes first. Before, only the Hub was named."""
    monkeypatch.chdir(lab.folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    line = "\nexamples        not checked, because there is no folder models/mine"
    lab.sweep("sft", settings={"model_name_or_path": "models/mine"})
    sweep.main([lab.file, "--dry_run", "true"])
    assert f"{line}, and the Hub cannot be reached\n" in capsys.readouterr().out
    Path("models").mkdir()
    sweep.main([lab.file, "--dry_run", "true"])
    assert f"{line}\n" in capsys.readouterr().out
    with running_hub() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.endpoint)
        with user_error("There is no folder models/mine, and no model of this name that can be read on the Hub."):
            sweep.main([lab.file, "--dry_run", "true"])
    Path("models/mine").symlink_to(TINY_OURO_PATH)
    sweep.main([lab.file, "--dry_run", "true"])
    assert "\nexamples        16, 2 held out, 1 optimizer step" in capsys.readouterr().out


def test_plan_counts_the_passes_of_a_rule(capsys):
    """LoRA Dropout takes four passes for a micro-batch, so as many hours, as the paper's 444.9 and 110.6 minutes."""
    hours = {}
    for methods in (["lora"], ["lora_dropout"], ["lora", "lora_dropout"]):
        words = ["--recipe", "metamath_gsm.yaml", "--learning_rates", "1e-4", "--seeds", "101", "--methods", *methods]
        sweep.main([*words, "--dry_run", "true"])
        out = capsys.readouterr().out
        hours[len(hours)] = float(re.search(r"at most ([\d.]+) to ([\d.]+) hours", out)[1])
    assert hours[1] / hours[0] == pytest.approx(4, rel=0.03) and hours[2] / hours[0] == pytest.approx(5, rel=0.03)
    assert "20.1 to 80.5 GFLOP for a token in 1 to 4 passes" in out
    assert "\npaper           1.84 hours in 1 of the 2 trainings: 110.6 minutes each, 45.36 GB on an H100" in out
    memory = re.search(r"memory +at most about ([\d.]+) GB on a GPU in bfloat16, as if each example had", out)[1]
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    assert f"the bound is {memory} GB" in page
    for recipe, minutes in re.findall(r"\| `(metamath_gsm/\w+.yaml)` \| ([\d.]+) \|", page):
        assert f"Costs: {float(minutes):.0f} minutes" in (ROOT / "recipes" / recipe).read_text(encoding="utf-8")


def test_settings_that_save_memory_give_the_printed_bound(capsys):
    words = ["--recipe", "metamath_gsm.yaml", "--methods", "lora", "--learning_rates", "1e-4", "--seeds", "101"]
    sweep.main([*words, "--dry_run", "true"])
    savings = re.findall(r"(?m)^ +([\d.]+) GB with (`.*`)$", capsys.readouterr().out)
    assert len(savings) == 2
    for size, text in savings:
        settings = yaml.safe_load("\n".join(re.findall("`(.*?)`", text)))
        sweep.main([*words, "--settings", json.dumps(settings), "--dry_run", "true"])
        assert f"at most about {size} GB on a GPU" in capsys.readouterr().out


def test_plan_has_the_costs_of_the_paper(capsys):
    """Next to the bounds, with the reason of the difference, which the page has, too."""
    sweep.main(["sweeps/metamath_gsm.yaml", "--dry_run", "true"])
    assert (
        "\npaper           104 hours in 35 trainings: 94.1 to 444.9 minutes each, 45.28 to 45.40 GB on an H100 80GB, as the "
        "paper measured (Tables 3 and 8)\n                the bound is for examples of 1,024 tokens, and the estimate for "
        "454 is 45.40 GB\n" in capsys.readouterr().out
    )
    load_script("recipes/sft.py").main(["metamath_gsm/lora_dropout.yaml", "--dry_run", "true"])
    out = capsys.readouterr().out
    assert "on all linear projections of the looped layers, 15,138,816 parameters\n" in out
    assert "\npaper       444.9 minutes, 45.37 GB on an H100 80GB" in out
    methods = '{"a": "gsm8k/lora.yaml", "b": "metamath_gsm/lora.yaml", "c": "metamath_gsm/rank_4.yaml"}'
    words = ["--recipe", "gsm8k.yaml", "--methods", methods, "--learning_rates", "1e-4", "--seeds", "1"]
    sweep.main([*words, "--dry_run", "true"])
    assert (
        "0.2 to 0.233 hours in 1 of the 3 trainings: 12 to 14 minutes each on an H100, H2" in capsys.readouterr().out
    )
    lora = ["--recipe", "metamath_gsm.yaml", "--methods", "lora", "--learning_rates", "1e-4", "--seeds", "1"]
    sweep.main([*lora, "--settings", '{"use_cpu": true}', "--dry_run", "true"])
    out = capsys.readouterr().out
    assert "paper           110.6 minutes, 45.36 GB on an H100 80GB" in out and "the bound is" not in out
    indent = "\n                "
    way = "`loopdropout sft` with `--max_steps 20 --output_dir outputs/try` measures it"
    assert f"time            not computed, because `use_cpu` is set{indent}{way}" in out
    sweep.main([*lora, "--launcher", "accelerate launch", "--dry_run", "true"])
    assert "\npaper " not in capsys.readouterr().out  # of one GPU
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    assert "45.36 GB for 8 examples of 454 tokens" in page.replace("\n", " ")


@pytest.mark.slow
def test_answers_of_the_papers_sweeps_are_those_of_the_page(capsys):
    numbers = []
    for path in (ROOT / "recipes/sweeps").glob("*.yaml"):
        sweep.main([f"sweeps/{path.name}", "--dry_run", "true"])
        pattern = r"\nanswers +at most ([\d,]+) problems and ([\d,]+) generated tokens\n"
        numbers.append(re.search(pattern, capsys.readouterr().out).groups())
    problems, tokens = (
        sum(int(number.replace(",", "")) for number in column) for column in zip(*numbers, strict=True)
    )
    page = (ROOT / "recipes/README.md").read_text(encoding="utf-8")
    assert f"at most {problems:,} problems with {tokens:,} generated tokens" in page


ALL_KEPT = " (set `save_total_limit` to keep fewer)"
BEST = {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "eval_loss"}


@pytest.mark.parametrize(("settings", "checkpoints"), [
    ({"save_strategy": "epoch"}, f"0.5 GB for 3 checkpoints{ALL_KEPT}"),
    ({"save_strategy": "epoch", "save_total_limit": 2}, "0.4 GB for 2 checkpoints (`save_total_limit: 2`)"),
    ({"save_strategy": "epoch", "max_steps": 20}, "0.2 GB for 1 checkpoint"),  # which ends in the first epoch
    (
        {"save_strategy": "epoch", "max_steps": 20, "num_train_examples": None},
        f"0.2 GB for each checkpoint{ALL_KEPT}",
    ),
    ({"save_strategy": "steps", "save_steps": 7, "max_steps": 20}, f"0.5 GB for 3 checkpoints{ALL_KEPT}"),
    ({"save_strategy": "steps", "save_steps": 0.25}, f"0.7 GB for 4 checkpoints{ALL_KEPT}"),
    (
        {"save_strategy": "steps", "save_steps": 7, "num_train_examples": None},
        f"0.2 GB for each checkpoint{ALL_KEPT}",
    ),
    ({"save_strategy": "no"}, "no checkpoints"),
    ({**BEST, "save_steps": 7}, f"0.2 GB for each checkpoint{ALL_KEPT}"),  # no `save_steps` in this strategy
    ({**BEST, "save_total_limit": 2}, "0.4 GB for 2 checkpoints (`save_total_limit: 2`)"),
])  # fmt: skip
def test_plan_counts_the_checkpoints_that_are_kept(capsys, settings, checkpoints):
    """An adapter of 60.6 MB has checkpoints of 181.7 MB, with the two moments of AdamW."""
    settings = {"num_train_epochs": 3, "save_total_limit": None, **settings}
    words = ["--recipe", "metamath_gsm.yaml", "--learning_rates", "1e-4", "--seeds", "101", "--methods", "lora"]
    sweep.main([*words, "--settings", json.dumps(settings), "--dry_run", "true"])
    assert f"\ndisk            about 60.6 MB for adapters, {checkpoints}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("settings", "checkpoints"), [
    ({}, f"1.1 GB for 6 checkpoints{ALL_KEPT}"),
    ({"save_total_limit": 1}, "0.4 GB for 2 checkpoints (`save_total_limit: 1`)"),
    ({"max_steps": 20, "num_train_examples": None}, f"0.4 GB for a checkpoint of each training{ALL_KEPT}"),
])  # fmt: skip
def test_plan_counts_the_checkpoints_of_all_trainings(capsys, settings, checkpoints):
    settings = {"num_train_epochs": 3, "save_total_limit": None, "save_strategy": "epoch", **settings}
    words = ["--recipe", "metamath_gsm.yaml", "--learning_rates", "1e-4", "--seeds", "101", "102", "--methods", "lora"]
    sweep.main([*words, "--settings", json.dumps(settings), "--dry_run", "true"])
    assert f", {checkpoints}\n" in capsys.readouterr().out


def test_plan_measures_the_trainings_that_have_ended(lab, capsys):
    """As the running sweep does, by the time of whole runs of each kind. `train_seconds` is 60 s, and each run takes 100 s."""
    made = lab.sweep()
    run = made.pending()[0]
    subprocess.run(made.command(run), check=True)
    words = [lab.file, "--dry_run", "true", "--workers"]
    sweep.main([*words, "1"])
    done, indent = "\ndone            1 of 4 trainings", "\n                "
    out = capsys.readouterr().out
    measured = "measured: 0:01:00 on average for a training without its start and evaluation"
    assert f"{done}, the time left is not known yet{indent}{measured}\n" in out
    assert "not computed" not in out and HOW_TO_TIME not in out
    add_times(made, choosing=100)
    made.save_progress()
    made = lab.sweep()  # another start, which keeps the times of the other kinds
    add_times(made, final=1000)
    made.save_progress()
    sweep.main([*words, "1"])
    left = ", about 0:20:00 left, not counting measurements (none has ended yet)"
    means = "measured on average, with the start of a run: 0:01:40 for a run that chooses a learning rate, 0:16:40 for a final"
    assert f"{done}{left}{indent}{means} training\n" in capsys.readouterr().out
    sweep.main([*words, "2"])
    assert f"{done}, about 0:10:00 left" in capsys.readouterr().out
    sweep.main([*words, "1", "--seeds", "7"])  # of which no run is done
    assert (
        "\ndone            0 of 3 trainings, about 0:05:00 left, not counting measurements" in capsys.readouterr().out
    )
    (run_seconds,) = read_summary(lab.out)["run_seconds"].values()
    update_summary(lab.out, run_seconds={"lora": {"final": run_seconds["final"]}})  # as of a grid without a choice
    sweep.main([*words, "1"])
    lines = capsys.readouterr().out
    assert f"{done}, about 0:16:40 left, not counting runs that choose a learning rate and measurements (none" in lines
    sweep.main([*words, "1", "--seeds", "101"])
    remark = "the time of runs that choose a learning rate and measurements is not known yet (none has ended)"
    lines = capsys.readouterr().out
    assert (
        f"\ndone            1 of 3 trainings, {remark}{indent}measured on average" in lines and "no test" not in lines
    )
    lab.sweep(select_on="arithmetic_test", output_dir=str(lab.folder / "other"))
    sweep.main([lab.file, "--dry_run", "true"])
    remark = "the report then has no test on arithmetic_test, because its problems choose the learning rates"
    assert f"\nchoice          3 evaluations of arithmetic_test{indent}{remark}\n" in capsys.readouterr().out


def test_changed_benchmark_is_measured_again(lab, capsys):
    """Also if its number of problems stays the same, and by a training that starts again. One run has samples."""
    problems = [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in range(10)]
    file = lab.folder / "mine.jsonl"
    write_lines(file, problems)
    measure = {"benchmarks": ["mine"], "own_benchmarks": {"mine": {"files": str(file), "like": "gsm8k"}}}
    made = lab.run(learning_rates=[0.01], measure=measure)
    (row,) = [row for row in read_lines(lab.out / "lora/lr_0.01/seed_102/results.jsonl") if row["task"] == "mine"]
    write_lines(lab.out / "lora/lr_0.01/seed_102/s.jsonl", [{"target": problem["answer"]} for problem in problems])
    write_results(lab.out / "lora/lr_0.01/seed_102", [{**row, "samples": "s.jsonl"}])
    assert lab.sweep(learning_rates=[0.01], measure=measure).pending() == []
    write_lines(file, [*problems[:9], {**problems[9], "answer": "#### 7"}])
    made = lab.sweep(learning_rates=[0.01], measure=measure)
    (run,) = made.pending()
    assert run.name == "lora/lr_0.01/seed_102"
    args = LoopDropoutConfig(output_dir=str(made.folder(run)), use_cpu=True)
    assert Run(None, args, made.run_settings(run)).changed_benchmarks == ["mine"]
    write_lines(file, problems * 2)
    sweep.main([lab.file, "--dry_run", "true"])
    assert (
        "\nmeasured again  2 runs on the present problems of mine, because its files have changed since: "
        "lora/lr_0.01/seed_101, lora/lr_0.01/seed_102\n"
    ) in capsys.readouterr().out
    made = lab.sweep(learning_rates=[0.01, 0.02], measure=measure, select_on="mine")
    assert made.choice("lora").best is None  # the score is one on other problems
    file.unlink()  # as in a copy of the sweep
    assert lab.sweep(learning_rates=[0.01], measure=measure).pending() == []


def test_plan_warns_of_gates_with_another_mean(lab, capsys, forks):
    """Only the log of a run has the warning otherwise. The plans of a training and of a sweep have it, and the commands."""
    exec(HALVED_RULE, {"__name__": "halved"})
    lab.sweep(methods=["lora", "halved"])
    sweep.main([lab.file, "--dry_run", "true"])
    warning = (
        r"halved: The gates of the rule 'halved' must have the mean 1, .* over 4,096 examples it is 0\.\d+ in loop 1, "
    )
    out = capsys.readouterr().out
    assert re.search(rf"\ngates           {warning}.*\n", out), out
    sweep.main([lab.file, "--print_commands", "true"])
    printed = capsys.readouterr()
    assert re.search(rf"^gates       {warning}", printed.err) and "mean" not in printed.out
    sft = load_script("recipes/sft.py")
    sft.main([str(lab.recipe), "--rule", "halved", "--dry_run", "true", "--benchmarks", "arithmetic_test"])
    assert "\ngates       The gates of the rule 'halved' must have" in capsys.readouterr().out


def test_plan_names_runs_that_the_sweep_does_not_have(lab, capsys, monkeypatch):
    """As after a method was renamed, or a learning rate removed. A moved folder is the method's of the new name."""
    made = lab.run()
    print_summary(made)
    assert "The folder has" not in capsys.readouterr().out
    lab.sweep(learning_rates=[0.02])
    sweep.main([lab.file, "--dry_run", "true"])
    text = (
        "also there      2 runs of other methods, learning rates or seeds, which a report can show, too: lora/lr_0.01/"
    )
    out = capsys.readouterr().out
    assert text in out and "renaming" not in out
    with lock_folder(lab.out / "lora/lr_0.04/seed_101"):  # its run works, so nobody should remove it
        sweep.main([lab.file, "--dry_run", "true"])
    working = (
        "lora/lr_0.01/seed_101, lora/lr_0.04/seed_101. Another sweep or command trains or measures lora/lr_0.04/seed_101 now. "
        "Remove the folders of the other runs if you do not need them.\n"
    )
    assert working in capsys.readouterr().out
    with lock_folder(lab.out / "lora/lr_0.04/seed_101"):
        lab.sweep(learning_rates=[0.01, 0.02])
        sweep.main([lab.file, "--dry_run", "true"])
    assert "measures lora/lr_0.04/seed_101 now.\n" in capsys.readouterr().out
    print_summary(lab.run(learning_rates=[0.02]))
    assert "The folder has 2 runs of other methods, learning rates or seeds," in capsys.readouterr().out
    print_summary(lab.run(learning_rates=[0.02], seeds=[102]))  # whose table has the runs of this sweep only
    out = capsys.readouterr().out
    assert "The folder has 3 runs of other" in out and "Accuracy in %\n" in out
    with monkeypatch.context() as patch:
        patch.setattr("loopdropout_trainer.terminal.terminal_columns", lambda stream: 60)
        print_summary(lab.run(learning_rates=[0.02]))
    lines = capsys.readouterr().out.splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith("The folder has")]
    assert len(lines[start]) <= 60 and len(lines[start + 1]) <= 60
    lab.sweep(methods=[{"plain": "lora"}])
    sweep.main([lab.file, "--dry_run", "true"])
    assert "After renaming a method, rename its folder, so that its runs count." in capsys.readouterr().out
    (lab.out / "lora").rename(lab.out / "plain")
    sweep.main([lab.file, "--dry_run", "true"])
    out = capsys.readouterr().out
    assert "also there" not in out and "done            4 of 4 trainings" in out


def test_plan_names_existing_runs_of_later_seeds(lab, capsys):
    """A further learning rate can be better than that of these runs, and then they have no effect."""
    lab.run(learning_rates=[0.01, 0.02], seeds=[101, 102, 103])
    fields = {"learning_rates": [0.01, 0.02, 0.04], "seeds": [101, 102, 103]}
    names = "lora/lr_0.02/seed_102, lora/lr_0.02/seed_103"
    for score, text in (
        (None, "\nexisting runs   2 runs may count after the choice of the learning rates: {}\n"),
        (9, "\nexisting runs   2 runs of learning rates that are not chosen, without effect: {}\n"),
        (1, None),
    ):
        lab.set_world(scores={"0.04": score})
        made = lab.sweep(**fields)
        if score is not None:
            shutil.rmtree(lab.out / "lora/lr_0.04", ignore_errors=True)
            subprocess.run(made.command(SweepRun("lora", 0.04, 101, True)), check=True)
        capsys.readouterr()
        sweep.main([lab.file, "--dry_run", "true"])
        out = capsys.readouterr().out
        assert (text.format(names) in out) if text else ("existing runs" not in out)
        end = "left, or less if existing runs count"
        assert (end in out) == made.pool._describe_left().endswith(end) == (score is None)


@pytest.mark.parametrize(("own", "error"), [
    ({"p": 1.5}, r"In the method x of `methods`: `p` must be a number in \[0, 1\), got 1.5."),
    ({"rule_args": {"a": 1}}, "In the method x of `methods`: `rule: loop_dropout` has no field 'a'. It takes p."),
    ({"benchmark_limit": 0}, "In the method x of `methods`: `benchmark_limit` must be at least 1"),
    ({"lora_r": 4}, "^`learning_rates`|^`num_loops` must be"),
])  # fmt: skip
def test_errors_of_fields_of_a_method_name_it(lab, own, error):
    """A wrong field of the recipe or of `settings` concerns all methods, and its error names none."""
    lab.sweep("sft", methods=[{"lora": "lora", "x": own}], settings={"num_loops": 0} if "lora_r" in own else {})
    with user_error(error):
        sweep.main([lab.file, "--dry_run", "true"])


def test_mapping_of_a_command_line_replaces_that_of_the_recipe(lab, log):
    lab.sweep("sft", settings={"max_steps": 3, "lora_r": 4}, measure={"benchmark_limit": 5})
    for settings, is_warned in (({"max_steps": 2, "lora_r": 2}, False), ({"max_steps": 2}, True)):
        words = ["--settings", json.dumps(settings), "--measure", '{"benchmark_limit": 6}']
        (made,) = parse((sweep.Sweep,), [lab.file, *words])
        assert made.settings == settings
        warning = "`--settings` replaces the whole mapping of the recipe, so its fields lora_r are no longer set."
        assert (warning in log.text) == is_warned and "--measure" not in log.text


def test_plan_reads_values_as_a_training_does(lab, capsys):
    """A field of a list takes one value."""
    lab.sweep(settings={"eval_num_loops": 8, "benchmarks": "arithmetic_hard"})
    sweep.main([lab.file, "--dry_run", "true"])
    assert "evaluate arithmetic_hard\n                  evaluate arithmetic_hard at K = 8\n" in capsys.readouterr().out


def test_plan_counts_the_problems_of_the_base_model(lab, capsys):
    """Each of the two final runs measures the base model."""
    for is_measured, number in ((False, 20), (True, 40)):
        measure = {"benchmarks": ["arithmetic_test"], "benchmark_limit": 10, "evaluate_base": is_measured}
        lab.sweep(measure=measure, learning_rates=[0.01])
        sweep.main([lab.file, "--dry_run", "true"])
        out = capsys.readouterr().out
        assert f"answers         at most {number} problems" in out
        assert ("                  evaluate the base model on the same problems\n" in out) == is_measured


def test_plan_has_the_learning_rates_of_each_method(lab, capsys):
    """With its factor. A grid without a choice is not extended."""
    fields = {"methods": ["lora", "loop_dropout"], "rate_factors": {"lora": 2}, "learning_rates": [0.01, 0.02]}
    extended = {"extend_grid": True, "learning_rates": [0.01]}
    more, none = (
        " (and more at the edge of the grid)",
        " (`extend_grid` adds none, because no learning rate is chosen)",
    )
    for changes, text in (
        ({}, "lora: 0.02, 0.04\n                loop_dropout: 0.01, 0.02\n"),
        ({"extend_grid": True, "rate_factors": {}}, f"0.01, 0.02{more}\n"),
        ({**extended, "rate_factors": {}}, f"0.01{none}\n"),
    ):
        lab.sweep(**{**fields, **changes})
        sweep.main([lab.file, "--dry_run", "true"])
        assert f"\nlearning rates  {text}" in capsys.readouterr().out


def test_plan_of_methods_with_their_own_evaluations_has_a_line_for_each(lab, capsys):
    methods = [{"lora": "lora", "deep": {"eval_num_loops": [8]}}]
    lab.sweep(methods=methods)
    sweep.main([lab.file, "--dry_run", "true"])
    printed = capsys.readouterr().out
    assert "of each method" not in printed
    assert re.search(r"evaluation +lora: 2 final runs:\n +eval.*\n +measure.*\n +deep: 2 final runs:\n", printed), (
        printed
    )


@pytest.mark.parametrize(
    ("scores", "remedy"),
    [
        ({"0.01": 9}, "smallest of the grid. Add `--extend_grid true`, or a smaller one to `--learning_rates`."),
        ({"0.04": 9}, "largest of the grid. Add `--extend_grid true`, or a larger one to `--learning_rates`."),
    ],
)
def test_choice_at_the_edge_names_the_remedy(lab, capsys, scores, remedy):
    """Once for all methods with the same remedy."""
    lab.set_world(scores)
    made = lab.run(methods=["lora", "loop_dropout"], seeds=[101])
    remark = f"The best rate is the {remedy}"
    assert made.choice("lora").remark == remark
    with patch.object(sweep, "read_score") as read:  # the folders of a grid that is not extended need no file
        assert len(list_own_folders(made)) == 6
    read.assert_not_called()
    capsys.readouterr()
    print_summary(made)
    printed = capsys.readouterr().out
    assert printed.count(remark) == 1 and f"on development\nlora, loop_dropout: {remark}\n" in printed


def test_sweep_names_a_changed_setting(lab):
    lab.run(learning_rates=[0.01])
    lab.recipe.write_text(yaml.safe_dump({**RECIPE, "max_steps": 5}))
    with user_error("seed_101: `max_steps` changed from 1 to 5"):
        lab.run(learning_rates=[0.01], seeds=[101, 103])
    assert len(lab.log) == 2


def test_failed_run_does_not_end_its_sweep(lab, capsys):
    """The sweep lists it with the last line of its log, and the next sweep trains only what is missing."""
    lab.set_world(fails=["lora/lr_0.01"])
    lab.sweep(methods=["lora", "loop_dropout"])
    words, handler = [lab.file, "--script", f"{lab.folder}/lab"], signal.getsignal(signal.SIGTERM)
    with user_error("^1 run failed. Fix the cause. The same command then trains what is missing.$"):
        sweep.main(words)
    out = capsys.readouterr().out
    folder = lab.out / "lora/lr_0.01/seed_101"
    failure = (
        f"lora/lr_0.01/seed_101 ended with exit code 1: ValueError: it is broken in {folder} (log: {folder}/log.txt)"
    )
    start = f"\n\nlora/lr_0.01/seed_101 starts (log: {folder}/log.txt)\n"
    assert (
        out.startswith("8 trainings\nmodel  ")
        and f"{start}{failure} (0 of 8 trainings have ended, the time left is not known yet)\n" in out
        and out.count("it is broken in") == 1
    )
    assert out.endswith(f"\nFailed, with the errors above:\n  lora/lr_0.01/seed_101 (log: {folder}/log.txt)\n")
    assert "lora: no learning rate is chosen" in out and "loop_dropout: learning rate 0.02" in out
    assert (
        f"\n  0.01       no score, because the run failed (log: {folder}/log.txt)\n  0.02       accuracy 70.00%" in out
    )
    command = " ".join(["loopdropout sweep", *words])
    assert (
        f"\nNext:\n  {command}   # completes the sweep, after you have fixed the cause of the failures\n  loop" in out
    )
    assert len(lab.log) == 3 + 5
    lab.set_world()
    sweep.main(words)
    assert sorted(lab.runs[8:]) == ["lora/lr_0.01/seed_101", "lora/lr_0.02/seed_101", "lora/lr_0.02/seed_102"]
    out = capsys.readouterr().out
    assert f"\nlora/lr_0.01/seed_101 starts, after it failed before (log: {folder}/log.txt)\n" in out
    assert out.count("failed before") == 1 and "Failed" not in out and not (folder / "sweep.failed").exists()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_sweep_stops_after_two_equal_failures(lab):
    """A mistake in a recipe would end every run. Their messages may name their own folders."""
    lab.set_world(fails=["lora"])
    with user_error(
        r"The sweep has stopped, because two runs in a row failed with the same message: lora/lr_0.02/seed_101 "
        r"ended with exit code 1: ValueError: it is broken"
    ):
        lab.run()
    assert len(lab.log) == 2
    lab.set_world()
    lab.run()
    assert len(lab.log) == 2 + 5


BROKEN_RULE = """
import os
from dataclasses import dataclass
import torch
from loopdropout_trainer.gates import GateRule, register_rule

@register_rule
@dataclass(frozen=True)
class Broken(GateRule):
    name = "broken"
    has_unit_mean = False  # not drawn from before the training

    def sample(self, draw):
        if draw.step == 2:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Process {os.getpid()} has 9.12 GiB in use.")
        return torch.ones(draw.num_loops, len(draw.example_ids))
"""


HALVED_RULE = """
from dataclasses import dataclass
from loopdropout_trainer.gates import GateRule, register_rule

@register_rule
@dataclass(frozen=True)
class Halved(GateRule):
    name = "halved"

    def sample(self, draw):
        return (draw.uniforms("halved", draw.num_loops).T < 0.5).float()
"""


@pytest.fixture
def forks(monkeypatch):
    """Let a sweep of this process train in forks, which have imported everything. `--import` adds its rules for this test."""
    monkeypatch.setattr("loopdropout_trainer.sweeps.workers.subprocess", SimpleNamespace(Popen=ForkedPopen))
    with patch.dict(RULES):
        yield


def test_errors_inside_of_trainings_stop_a_sweep(lab, forks, monkeypatch, capsys):
    """The bar of a training does not hide its error, whose numbers may differ. The steps before it take different times."""
    rule = lab.folder / "broken.py"
    rule.write_text(BROKEN_RULE)
    lab.recipe.write_text(yaml.safe_dump({**RECIPE, "max_steps": 4, "num_train_examples": 8, "compare_with": None}))
    fields = {"recipe": str(lab.recipe), "output_dir": str(lab.out), "seeds": [1]}
    Path(lab.file).write_text(yaml.safe_dump({**fields, "methods": ["broken"], "learning_rates": [0.01, 0.02]}))
    monkeypatch.setattr(sys, "argv", ["loopdropout sweep", lab.file, "--import", str(rule)])
    with pytest.raises(SystemExit, match="2"):
        run_script(sweep.main)
    printed = capsys.readouterr()
    place = rf"loopdropout sft: `Broken\.sample` in {re.escape(str(rule))}, line 15, raised "
    message = rf"{place}torch\.OutOfMemoryError: CUDA out of memory\. Process \d+ has 9\.12 GiB in use\. \(log: "
    stopped = "The sweep has stopped, because two runs in a row failed with the same message: "
    assert re.search(f"{stopped}broken/lr_0.02/seed_1 ended with exit code 2: {message}", printed.err)
    log = (lab.out / "broken/lr_0.01/seed_1/log.txt").read_text()
    assert "2/4" not in log and re.match(place, log.splitlines()[-1])  # a file has no bar
    assert re.search(f"broken/lr_0.01/seed_1 ended with exit code 2: {message}", printed.out)


def test_plan_names_the_method_whose_own_rule_fails(lab):
    """Of a rule that cannot be made, and of one whose draws fail."""
    rule = lab.folder / "own.py"
    for old, new, message in (
        ("def sample(self, draw):", "def __post_init__(self):\n        raise ValueError(1)\n", "__post_init__` in"),
        ("has_unit_mean = False", "has_unit_mean = True", "sample` in"),
    ):
        rule.write_text(BROKEN_RULE.replace(old, f"{new}\n    {old}" if new[0] == "d" else new))
        import_files([str(rule)])
        lab.sweep("sft", methods=[{"lora": "lora", "x": {"rule": "broken"}}])
        for words in (["--dry_run", "true"], []):
            IMPORTED.clear()
            with user_error(f"^In the method x of `methods`: `Broken.{message} {rule}, line 1[0-9], raised "):
                sweep.main([lab.file, "--import", str(rule), *words])
    assert not lab.out.exists()


def test_changed_code_of_an_import_is_named(lab, forks, capsys):
    """The results of a rule are not averaged with the results of its edited file, which may move. Other methods go on."""
    rule = lab.folder / "own.py"
    rule.write_text(BROKEN_RULE.replace("== 2", "== 9"))
    recipe = {"benchmarks": None, "single_loop_batches": 0, "compare_with": None, "num_train_examples": 8}
    recipe["num_sample_completions"] = 0
    lab.recipe.write_text(yaml.safe_dump({**RECIPE, **recipe}))
    fields = {"recipe": str(lab.recipe), "output_dir": str(lab.out), "seeds": [1], "methods": ["broken", "lora"]}
    fields |= {"learning_rates": [0.01], "select_on": "eval_loss"}
    Path(lab.file).write_text(yaml.safe_dump(fields))
    run, lora, script = lab.out / "broken/lr_0.01/seed_1", lab.out / "lora/lr_0.01/seed_1", ROOT / "recipes/sweep.py"
    sweep.main([lab.file, "--import", str(rule)])
    facts = read_run(run)
    assert [*facts["imports"]] == facts["used_imports"] == [str(rule)]
    assert [*read_run(lora)["imports"]] == [str(rule)] and read_run(lora)["used_imports"] == []
    assert "--import" not in (lora / "recipe.yaml").read_text() + (lora / "README.md").read_text()
    assert (run / "recipe.yaml").read_text().startswith(f"# It needs `--import {rule}`.\n")
    assert find_source(run).lines()["imports"] == str(rule)
    rule.rename(lab.folder / "moved.py")
    python(script, lab.file, "--import", lab.folder / "moved.py")
    rule.write_text(BROKEN_RULE)
    trained = Program(ROOT / "recipes/sft.py", run / "recipe.yaml", "--output_dir", run, "--import", rule)
    change = f"its `--import` {rule} has changed since"
    message = (
        f"{run} holds another run: {change}. Restore the code, set another `output_dir`, or remove the folder (its"
    )
    assert trained.wait() == 2 and message in trained.stderr, trained.stderr
    # A run that does not use the file is measured further, with one warning.
    trained = Program(ROOT / "recipes/sft.py", lora / "recipe.yaml", "--output_dir", lora, "--import", rule)
    assert trained.wait() == 0 and trained.stderr.count(change) == 1, trained.stderr
    # The others go on.
    fields |= {"learning_rates": [0.01, 0.02], "methods": ["broken", "lora"], "full_grid": True}
    Path(lab.file).write_text(yaml.safe_dump(fields))
    capsys.readouterr()
    text = (
        f"1 run cannot be compared with new ones, because {change}: {run}. Count the results with `--accept_changed_imports "
        "true` if the change does not concern them, remove these folders to train them again (their results are lost), "
        "restore the code, or give the method another name."
    )
    with user_error(f"^{re.escape(text)}$"):
        sweep.main([lab.file, "--import", str(rule)])
    out = capsys.readouterr().out
    start = f"\n\nThe sweep trains the other runs. {text}\nbroken/lr_0.02/seed_1 starts"
    assert start in out and out.count(text) == 1 and "\n2 of 4: broken/lr_0.02/seed_1 trained" in out, out
    assert "3 of 4: lora/lr_0.02/seed_1 trained" in out
    assert "not finished: 3 of 4 trainings" in describe_progress(lab.out)
    assert accept_other_code(run)
    assert find_source(run).lines()["imports"] == f"{rule} (changed since the training, and accepted)"
    shutil.rmtree(run)
    sweep.main([lab.file, "--import", str(rule)])
    assert describe_progress(lab.out) == ""


def test_results_of_changed_code_count_after_they_are_accepted(lab, capsys):
    """Before, the tables keep them and their choice, nothing new is trained next to them, and no message promises it."""
    rule = lab.folder / "own.py"
    rule.write_text("x = 1\n")
    import_files([str(rule)])
    former = digest_imports()
    lab.set_world(fails=["lora/lr_0.02/seed_102"], imports=former)
    lab.sweep(learning_rates=[0.01, 0.02])
    words = [lab.file, "--script", f"{lab.folder}/lab"]
    warning = (
        "If you change a file of `--import`, its finished runs then count only after `--accept_changed_imports true`"
    )
    with user_error(f"1 run failed. Fix the cause. The same command then trains what is missing. {warning}"):
        sweep.main(words)
    assert len(lab.log) == 4
    rule.write_text("x = 2\n")
    lab.set_world(imports=digest_imports())
    capsys.readouterr()
    with user_error("^2 runs cannot be compared with new ones, because their `--import` "):
        sweep.main(words)
    out = capsys.readouterr().out
    remark = "It was chosen before a file of `--import` changed."
    assert f"lora: learning rate 0.02. {remark}\n  0.01       accuracy 50.00% on development\n" in out
    assert re.search("arithmetic_test +4 +lora +10.00", out) and len(lab.log) == 4
    assert read_summary(lab.out)["choices"]["lora"]["best"] == 0.02
    sweep.main([*words, "--dry_run", "true"])
    command = (
        f"loopdropout sweep {' '.join(words)} --accept_changed_imports true   # if the change of the code does not"
    )
    assert f"\nNext:\n  {command} concern the results\n" in capsys.readouterr().out
    others = "lora/lr_0.01/seed_101, lora/lr_0.02/seed_101"
    assert lab.sweep(learning_rates=[0.01, 0.02]).count_left() == {}  # nothing of the method starts before a decision
    before = (lab.out / "lora/lr_0.02/seed_101/run.json").read_text()
    sweep.main([*words, "--accept_changed_imports", "true", "--dry_run", "true"])
    planned = capsys.readouterr().out
    runs = f"{lab.out}/lora/lr_0.01/seed_101, {lab.out}/lora/lr_0.02/seed_101"
    accepted = "2 runs of other `--import` code, which the sweep accepts, then count as results of the present code: "
    assert f"\nother code      {accepted}{runs}.\n" in planned and "cannot be compared" not in planned
    assert (
        "\ndone            2 of 3 trainings, the time of final trainings is not known yet (none has ended)\n"
        in planned
    )
    failure = "\nfailed          lora/lr_0.02/seed_102 ended with exit code 1: ValueError: it is broken in "
    assert failure in planned and "\n                The same command starts failed runs again.\n" in planned
    assert (lab.out / "lora/lr_0.02/seed_101/run.json").read_text() == before
    progress = describe_progress(lab.out)
    assert (
        f" ended. Not counted, because of an earlier `--import` file: {others}. Count the results with `--accept"
        in progress
    )
    assert progress.endswith("another name. The same `loopdropout sweep` command then continues it.")
    rule.write_text("x = 1\n")  # the file of the trainings, which only a sweep has not seen yet
    assert describe_progress(lab.out) == (
        f"The sweep in {lab.out} is not finished: 2 of 3 trainings have ended, with {others}, which the sweep has not counted "
        "yet. The same `loopdropout sweep` command continues it."
    )
    rule.unlink()  # as beside a copy of the results on another machine
    assert describe_progress(lab.out) == progress
    rule.write_text("x = 2\n")
    sweep.main([*words, "--accept_changed_imports", "true"])
    out = capsys.readouterr().out
    assert out.startswith(
        "2 runs of other `--import` code, which `run.json` records, from now on count as results of the"
    )
    assert lab.runs[4:] == ["lora/lr_0.02/seed_102"] and describe_progress(lab.out) == ""
    sweep.main([*words, "--accept_changed_imports", "true"])
    assert "so `accept_changed_imports` accepts nothing.\n" in capsys.readouterr().out and len(lab.runs) == 5
    run = lab.out / "lora/lr_0.02/seed_101"
    facts = read_run(run)
    assert facts["imports"] == former and facts["accepted_imports"] == digest_imports() != former
    results = load_results(lab.out)
    (line,) = [line for line in describe_left_out_runs(results, final_results(results)) if "_changed_imports" in line]
    assert line.startswith("2 runs of the sweep in ") and line.endswith(f"`--accept_changed_imports`: {others}.")
    rule.write_text("x = 3\n")
    edited = (
        f"{rule} has changed since the training of 2 runs (lora), so their results are those of the earlier file. The"
    )
    with patch("loopdropout_trainer.results.imported_code.IMPORTED", []):  # a report needs no `--import`
        assert any(line.startswith(edited) for line in describe_left_out_runs(results, final_results(results)))
        own = results[results["run"] == str(run)]
        (line,) = [line for line in describe_left_out_runs(own, own) if "has changed since" in line]
        assert (
            "the training of 1 run (lora), so its results are" in line and "after you have removed its folder." in line
        )
        for text, found in (("def\n", [str(rule)]), ("import json, not_here\n", []), ("import json\n", [str(rule)])):
            rule.write_text(text)
            assert find_edited(run) == found  # what an unknown file imports may have the digest of the training
        rule.rename(lab.folder / "moved.py")
        assert find_edited(run) == []
    rule.write_text("x = 3\n")
    made = lab.sweep(learning_rates=[0.01, 0.02])
    assert describe_other_results(made).startswith("3 runs cannot be compared with new ones") and made.pending() == []
    with lock_folder(run):  # as while it is measured
        assert describe_other_results(made).endswith(f" Do not remove a folder in which a process works now: {run}.")
    assert find_incomparable(made) == [] and [*find_kept_choices(made)] == ["lora"]  # all have the code of `x = 2`
    other = lab.out / "lora/lr_0.02/seed_102/run.json"
    text = other.read_text()
    other.write_text(json.dumps({**json.loads(text), "imports": former}))
    assert len(find_incomparable(made)) == 3 and find_kept_choices(made) == {}
    other.write_text(text)
    with patch("loopdropout_trainer.results.imported_code.IMPORTED", []):  # the command lacks `--import`
        fix = "is missing: .*. Give the missing file by `--import`, remove these folders"
        assert re.search(fix, describe_other_results(made)) and not can_accept_other_results(made)
    for text in ("x = 2\n", "x = 1\n"):  # accepted, and that of the training
        rule.write_text(text)
        assert has_other_results(made, run) is False


def test_lines_plan_and_report_of_a_sweep_count_the_same_trainings(lab, capsys):
    """Also if a file of `--import` changes while the sweep runs, and if a training lacks its measurement."""
    rule = lab.folder / "own.py"
    rule.write_text("x = 1\n")
    import_files([str(rule)])
    lab.set_world(imports=digest_imports())
    made = lab.run(learning_rates=[0.01, 0.02])
    assert made.count() == (3, 3) and len(lab.log) == 4
    rule.write_text("x = 23\n")
    chosen, last = (SweepRun("lora", 0.02, seed, False) for seed in (101, 102))
    for run, status in ((chosen, "finished"), (last, "trained")):
        facts = {"status": status, "imports": digest_imports()}
        (made.folder(run) / "run.json").write_text(json.dumps(facts))
    made.pool.failures[last] = "was stopped"
    made.save_progress()
    text = describe_progress(lab.out)
    assert "2 of 3 trainings have ended (trained, and failed in the measurement: lora/lr_0.02/seed_102). Not" in text
    assert "of an earlier `--import` file: lora/lr_0.01/seed_101." in text
    line = made.pool._describe_end(SweepRun("lora", 0.02, 101, True), False)
    assert line.startswith("2 of 3: lora/lr_0.02/seed_101 trained"), line
    assert line.endswith("on development, not counting 1 of other `--import` code"), line
    made.pool._record_failure(last, -signal.SIGKILL, made.folder(last) / "log.txt", 0)
    assert " lora/lr_0.02/seed_102 was trained, but its measurement was stopped by SIGKILL, " in describe_progress(
        lab.out
    )
    assert "\nlora/lr_0.02/seed_102 was trained, but its measurement was stopped by SIGKILL" in capsys.readouterr().out
    capsys.readouterr()
    with user_error(r"^1 run failed after the training, in the measurement\. Fix .*other gates\.$"):
        made.check_failures()
    assert "\n\n1 run cannot be compared with new ones, because its `--import` " in capsys.readouterr().out
    sweep.main([lab.file, "--script", f"{lab.folder}/lab", "--dry_run", "true"])
    assert re.search("done +2 of 3 trainings, not counting 1 of other `--import` code\n", capsys.readouterr().out)
    rule.write_text("def\n")  # as during an edit
    assert made.code.digests() == facts["imports"]
    rule.write_text("x = 23\n")
    assert accept_other_code(lab.out / "lora/lr_0.01/seed_101")
    assert made.count() == (3, 3) and made.pending() == [last]
    (made.folder(last) / "run.json").write_text('{"status": "finished", "imports": {"own.py": "of another one"}}')
    assert describe_other_results(made)
    assert describe_other_results(lab.sweep(learning_rates=[0.01, 0.02], seeds=[101])) == ""  # which does not have it
    (made.folder(last) / "run.json").write_text(json.dumps(facts))
    with user_error(
        r"^1 run failed after the training, in the measurement\. .* command then measures what is missing"
    ):
        made.check_failures()


def test_accepted_change_of_a_file_lasts_when_another_one_changes(tmp_path):
    """A run can depend on several files of `--import`. A later measurement of it keeps what was accepted."""
    rules = [tmp_path / "first.py", tmp_path / "second.py"]
    for rule in rules:
        rule.write_text(f"{rule.stem} = 1\n")
    import_files(map(str, rules))
    former = digest_imports()
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished", "imports": former}))
    for rule in rules:
        rule.write_text(f"{rule.stem} = 2\n")
        assert find_other_code(tmp_path) and find_other_code(tmp_path, accepts_changes=True) is None
        assert accept_other_code(tmp_path) and find_other_code(tmp_path) is None
    assert not accept_other_code(tmp_path)
    facts = describe_imports({}, Identity(), trained=tmp_path)
    assert facts["imports"] == former and facts["accepted_imports"] == digest_imports() != former


def test_failed_training_begins_again_with_changed_code(lab, forks, capsys):
    """It has no results to lose. Nothing continues from its checkpoints, which are of the former code."""
    rule = lab.folder / "own.py"
    rule.write_text(BROKEN_RULE)
    recipe = {
        "benchmarks": None,
        "single_loop_batches": 0,
        "compare_with": None,
        "max_steps": 3,
        "save_steps": 1,
        "logging_steps": 1,
        "num_train_examples": 8,
        "num_sample_completions": 0,
    }
    lab.recipe.write_text(yaml.safe_dump({**RECIPE, **recipe}))
    fields = {"recipe": str(lab.recipe), "output_dir": str(lab.out), "seeds": [1], "methods": ["broken"]}
    Path(lab.file).write_text(yaml.safe_dump({**fields, "learning_rates": [0.01], "select_on": "eval_loss"}))
    run = lab.out / "broken/lr_0.01/seed_1"
    with user_error("^1 run failed"):
        sweep.main([lab.file, "--import", str(rule)])
    assert (run / "checkpoint-2").is_dir()
    assert _describe_start(False, _find_checkpoint(run)) == "continues from step 2"
    assert f"\nbroken/lr_0.01/seed_1 starts (log: {run}/log.txt)\n" in capsys.readouterr().out
    rule.write_text(BROKEN_RULE.replace("== 2", "== 9"))
    sweep.main([lab.file, "--import", str(rule)])
    out = capsys.readouterr().out
    assert (
        "1 of 1: broken/lr_0.01/seed_1 trained" in out
        and "broken/lr_0.01/seed_1 starts, after it failed before (log" in out
    )
    log = (run / "log.txt").read_text()
    assert f"begins again without its checkpoints, because its `--import` {rule} has changed since" in log
    assert "begins again" not in log.partition("Error")[0] and "Error" not in log.rpartition("begins again")[2]
    steps = [
        row["step"] for row in json.loads((run / "trainer_state.json").read_text())["log_history"] if "loss" in row
    ]
    assert steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ValueError: bug\n\rDrop last:  38%|###7   | 15/40 [00:08<00:13,  1.85it/s, 0:00:13 left]\n", "ValueError: bug"),
        ("\r15it [00:08,  1.85it/s]\nValueError: [bug]\n=====\n\r16it [00:08,  1.85it/s]", "ValueError: [bug]"),
        ("\r 0%|  | 0/4 [00:00<?, ?it/s]\r 25%|#  | 1/4 [00:01<00:03, 1.0s/it]", "25%|#  | 1/4 [00:01<00:03, 1.0s/it]"),
        ("loopdropout sft: `p` must be below 1.\nsubprocess.CalledProcessError: Command [...] returned non-zero exit status",
         "loopdropout sft: `p` must be below 1."),
        ("KeyError: 'x'\n/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There "
         "appear to be 1 leaked semaphore objects\n  warnings.warn('resource_tracker: There appear to be')", "KeyError: 'x'"),
        ("ValueError: a long\nsecond line of it\n[2026-11-29] shutting down", "ValueError: a long"),
        ("", ""),
    ],
)  # fmt: skip
def test_message_of_a_log_is_not_a_bar(tmp_path, text, message):
    former = "Error of a former start\n"
    (tmp_path / "log.txt").write_text(former + text)
    assert read_message(tmp_path / "log.txt", len(former)) == message


def test_killed_trainings_do_not_end_their_sweep(lab, monkeypatch):
    """Also two in a row with the same last line, because a signal says nothing about the other runs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    (lab.folder / "hold").touch()
    made = lab.sweep(workers=2)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(made.train_all)
        wait_for(lambda: len(lab.log) == 2)
        try:
            for number in (1, 2):
                (killed, *_) = (name for name, _, gpu in lab.log[::-1] if gpu == "7")
                next(process for process in made.pool.processes.values() if killed in process.args[2]).kill()
                wait_for(lambda number=number: len(made.pool.failures) == number)
                wait_for(lambda number=number: len(lab.log) == min(3, 2 + number))
        finally:
            (lab.folder / "hold").unlink()
        ending.result(PATIENCE)
    cause = "seed_101 was stopped by SIGKILL, often because the memory was full (log: "
    assert all(cause in text for text in made.pool.failures.values())
    with user_error("2 runs failed"):
        made.check_failures()
    assert lab.run().choice("lora").best == 0.02 and len(lab.log) == 3 + 2 + 2


def test_sweep_prints_commands_of_ready_runs(lab, monkeypatch):
    made = lab.sweep()
    grid = [made.command(run) for run in made.pending()]
    assert len(grid) == 3
    for command in grid:
        subprocess.run(command, check=True)
    monkeypatch.setattr(sweep, "IMPORTED", ["/my_rule.py"])
    final = [made.command(run) for run in made.pending()]
    assert len(final) == 2 and all("/lr_0.02/" in command[2] for command in final)
    assert all(command[-2:] == ["--import", "/my_rule.py"] for command in final)


def test_printed_commands_are_no_runs(lab, capsys):
    """Their recipes are there before a run starts. Other learning rates or settings then have nothing to lose."""
    lab.sweep()
    words = [lab.file, "--script", f"{lab.folder}/lab"]
    sweep.main([*words, "--print_commands", "true"])
    assert len([*lab.out.rglob("sweep_recipe.yaml")]) == 3
    capsys.readouterr()
    lab.sweep(learning_rates=[0.01, 0.03], settings={"max_steps": 7})
    sweep.main([*words, "--dry_run", "true"])
    assert "also there" not in capsys.readouterr().out
    with user_error("holds neither a model nor an adapter"):
        find_source(lab.out)
    # The sweep locks each run before it looks at its recipe.
    lab.run(learning_rates=[0.01, 0.03], settings={"max_steps": 7})
    assert lab.runs[:2] == ["lora/lr_0.01/seed_101", "lora/lr_0.03/seed_101"]


def test_commands_leave_out_runs_that_other_processes_train(lab, capsys):
    first, second, third = lab.sweep().pending()
    words = [lab.file, "--script", f"{lab.folder}/lab", "--print_commands", "true"]
    (lab.out / first.name).mkdir(parents=True)
    with open(lab.out / first.name / "sweep.lock", "w") as lock, lock_folder(lab.out / second.name):
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep.main(words)
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1 and f"out/{third.name} " in printed.out.replace("/sweep_recipe.yaml", " ")
    assert printed.err == f"2 runs without a command, being trained now: {first.name}, {second.name}\n"
    assert [path.name for path in (lab.out / first.name).iterdir()] == ["sweep.lock"]  # looking for a lock makes none
    with lock_folder(lab.out / second.name):
        sweep.main([*words[:-2], "--dry_run", "true"])
    running = rf"\nrunning +1 run is being trained or measured now \({second.name} since \d\d:\d\d\)\n"
    assert re.search(running, capsys.readouterr().out)
    with lock_folder(lab.out / second.name):  # a further task of an array does not print the plan again
        sweep.print_sweep_plan(lab.sweep())
    joins = (
        "This process joins the sweep in {}: 0 of 4 trainings have ended, and 1 run is being trained or measured now. "
        "Still to do: 3 runs that choose a learning rate, 1 final training and 1 measurement, the time left is not known yet. "
        "`--dry_run true` prints the plan.\n"
    )
    out = re.sub(rf" \({second.name} since \d\d:\d\d\)", "", capsys.readouterr().out)
    assert out == joins.format(lab.out)
    other = SweepProcess("process 12 on node7 (SLURM job 5_2)", 3, ["lora"])
    path = lock_path(lab.out, "sweep_node7_12")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(other))
    assert find_processes(lab.out, ["lora"]) == []  # it was killed
    with open(path) as lock:  # between two runs of the other process
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = lab.sweep()
        add_times(made, choosing=60)
        made.save_progress()
        sweep.print_sweep_plan(made)
        joins = joins.replace(", and 1 run is being trained or measured now", "")
        joins = joins.replace(
            "the time left is not known yet",
            "about 0:01:00 left, not counting final trainings and measurements (none has ended yet)",
        )
        assert capsys.readouterr().out == joins.format(f"{lab.out}, on which {other.name} works")
        sweep.main([*words[:-2], "--dry_run", "true"])
        planned = capsys.readouterr().out
        assert f"\nrunning         {other.name} works on this sweep\n" in planned
        # Three learning rates by the three workers of the other process. The dry run itself would have one.
        assert "\ndone            0 of 4 trainings, about 0:01:00 left, " in planned
        assert f"ended. The sweep is running: {other.name} works on it." in describe_progress(lab.out)
        assert find_processes(lab.out, ["loop_dropout"]) == []  # another sweep in the folder
        with working_on_sweep(lab.out, ["lora"], 2):
            assert find_processes(lab.out, ["lora"]) == [other]
    assert [*path.parent.glob("sweep_*")] == [path]
    sweep.main(words)
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 3 and not printed.err
    lab.run()
    capsys.readouterr()
    sweep.main(words)
    assert capsys.readouterr().out == ""


def test_fields_of_the_sweep_may_be_unset_in_its_methods(lab):
    """`null` is what the sweep sets, or no value that it could contradict."""
    made = lab.sweep(settings={"compare_with": None}, methods={"x": {"learning_rate": None}})
    for recipe in made.recipes["x"]:
        assert "compare_with" not in recipe and "learning_rate" not in recipe


def test_sweep_passes_settings_that_can_run_code_as_options(lab):
    lab.sweep()
    settings = '{"model_init_kwargs": {"attn_implementation": "me/kernel"}}'
    (made,) = parse((sweep.Sweep,), [lab.file, "--script", f"{lab.folder}/lab", "--settings", settings])
    (first, *_) = made.pending()
    assert '--model_init_kwargs={"attn_implementation": "me/kernel"}' in made.command(first)


ERRORS = [
    ({"learning_rates": []}, "`learning_rates` must have at least one value, such as `--learning_rates 1e-4 3e-4`."),
    (
        {"select_on": "eval_los"},
        "`select_on` must be `eval_loss`, `development` or a task, got 'eval_los'. Did you mean 'eval_loss'?",
    ),
    (
        {"select_on": "developmnt"},
        "`select_on` must be `eval_loss`, `development` or a task, got 'developmnt'. Did you mean 'development'?",
    ),
    ({"seeds": "1,2,3"}, "got '1,2,3'. Separate the numbers by spaces: `--seeds 1 2 3`."),
    ({"learning_rates": ["1e-3,2e-3"]}, "Separate the numbers by spaces: `--learning_rates 1e-3 2e-3`."),
    (
        {"methods": {"x": {"rule": "loop_dropuot"}}},
        "In the method x of `methods`: `rule` must be one of adaptive, ",
    ),
    (
        {"methods": ["lora", "p_0.9"]},
        "got 'p_0.9'. For the drop probability 0.9, write `methods: {lora: {rule: lora}, p_0.9: {p: 0.9}}`.",
    ),
    ({"seeds": []}, "`seeds` must have at least one value, such as `--seeds 101 102 103`."),
    ({"learning_rates": [], "seeds": [], "methods": ["lora", "loop_dropuot"]}, "Did you mean 'loop_dropout'?"),
    ({"learning_rates": [], "recipe": "", "methods": ["loop_dropuot"]}, "Did you mean 'loop_dropout'?"),
    (
        {"recipe": ""},
        "`recipe` must be set, such as `--recipe gsm8k.yaml`, because the method lora is not a recipe itself.",
    ),
    ({"learning_rates": [], "recipe": "quickstrt.yaml"}, "Did you mean 'quickstart.yaml'?"),
    ({"learning_rates": [], "settings": {"max_stepss": 6}, "script": "sft"}, "Did you mean 'max_steps'?"),
    (
        {"methods": ["lora_plus"]},
        "got 'lora_plus', which is no rule. Did you mean the recipe metamath_gsm/lora_plus.yaml?",
    ),
    ({"seeds": [1, 2, 1]}, "`seeds` must have different values, got 1 twice. Remove one of them."),
    ({"learning_rates": [1e-3, 0.01, 0.001]}, "`learning_rates` must have different values, got 0.001 twice"),
    ({"script": "sftt"}, "`script` must be sft, dpo or grpo, got 'sftt'. Did you mean 'sft'?"),
    ({"methods": {"x": {"learning_rate": 0.05}}}, "`learning_rate` is set by the sweep"),
    ({"rate_factors": {"lora": "x"}}, "`rate_factors` must map lora to a number larger than 0, got 'x'."),
    ({"rate_factors": {"lora": 0}}, "`rate_factors` must map lora to a number larger than 0, got 0."),
    ({"rate_factors": {"lorra": 2.0}}, "Did you mean 'lora'?"),
    ({"measure": {"lora_r": 4}}, "`measure` has no 'lora_r'"),
    (
        {"measure": {"max_new_tokens": 16}},
        "`measure` has no 'max_new_tokens'. It takes allow_unsafe_code, benchmark_batch",
    ),
    ({"methods": ["lorra"]}, "got 'lorra'. Did you mean 'lora'?"),
    ({"methods": []}, "`methods` must name at least one method"),
    (
        {"methods": ["lora", 0.25]},
        "got 0.25 in a list. Write a drop probability as `methods: {p_0.25: {p: 0.25}}`.",
    ),
    ({"methods": ["lora", {"x": {"p": 0.25}}]}, "`methods` must be texts or one mapping, got {'x': {'p': 0.25}}"),
    ({"methods": {"x": 0.25}}, "`methods` must map x to a rule, a recipe or settings, got 0.25"),
    (
        {"methods": ["gsm8k/lora.yaml", "metamath_gsm/lora.yaml"]},
        "`methods` must have different names, got 'lora' twice",
    ),
]


def test_signal_after_the_last_run_says_that_all_are_finished(lab, monkeypatch):
    """As while the sweep loads the results that it prints."""
    lab.sweep()
    monkeypatch.setattr(
        "loopdropout_trainer.sweeps.summary.load_results", lambda folder: signal.raise_signal(signal.SIGTERM)
    )
    text = f"All runs of the sweep in {lab.out} are finished. Print the results with `loopdropout report {lab.out}`."
    with pytest.raises(KeyboardInterrupt, match=re.escape(text)):
        sweep.main([lab.file, "--script", f"{lab.folder}/lab"])


@pytest.mark.parametrize(("field", "text"), [
    ("max_steps: 20", "`max_steps` is not a field of this script. Put fields of trainings under `settings`: {max_steps: 20}."),
    ("steps: 20", "`steps` is not a field of this script. Put fields of trainings under `settings`: {max_steps: 20}."),
    ("benchmarks: [gsm8k, x]", "Put fields of the evaluation under `measure`: {benchmarks: [gsm8k, x]}."),
    ("lora_r: 8", "Put fields of trainings under `settings`: {lora_r: 8}."),
    ("eval_num_loops: null", "Put fields of the evaluation under `measure`: {eval_num_loops: null}."),
    ("single_loop_accuracy: false", "Put fields of the evaluation under `measure`: {single_loop_accuracy: false}."),
    ("learning_rate: 0.1", "Did you mean 'learning_rates'?"),  # the sweep sets it
    ("method: lora", "Did you mean 'methods'?"),  # which people also write for `rule`
])  # fmt: skip
def test_fields_of_trainings_are_put_under_settings(tmp_path, field, text):
    path = tmp_path / "fields.yaml"
    path.write_text(f"{field}\nlearning_rates: [0.1]\n")
    with user_error(f"{re.escape(text)}$"):
        parse((sweep.Sweep,), [str(path)])
    name, _, value = field.partition(": ")
    with user_error(f"{re.escape(text)}$"):
        parse((sweep.Sweep,), ["--learning_rates", "0.1", f"--{name}", *value.strip("[]").split(", ")])


@pytest.mark.parametrize(("fields", "message"), ERRORS, ids=lambda value: str(value)[:40])
def test_sweep_rejects_invalid_fields(lab, fields, message):
    with user_error(re.escape(message)):
        lab.sweep(**fields)


def test_plan_of_a_sweep_checks_its_measurements(lab, monkeypatch):
    """As each of its trainings does, which would fail after others. Runs that choose no learning rate are not checked."""
    load_manager = loading._load_manager  # lm-eval's index takes 10 seconds
    monkeypatch.setattr(loading, "_load_manager", lambda folder, include_defaults: load_manager(folder, False))
    monkeypatch.setattr(sandbox, "sandbox_fault", lambda: "`bwrap` is not installed")
    own = {"files": str(lab.folder / "none.jsonl"), "like": "gsm8k"}
    revisions = {"gsm8": "main", "mmlu": "v1"}  # the second one is a task, which is not measured
    unknown, compared = "must be a task of lm-eval or one of ", ["lora", "independent"]
    for fields, error in (
        ({"measure": {"benchmarks": ["gsm8k"], "own_benchmarks": {"gsm8k": own}}}, "must not have the name of a task"),
        ({"measure": {"benchmarks": ["mine"], "own_benchmarks": {"mine": own}}}, "none.jsonl does not exist"),
        ({"measure": {"benchmarks": ["gsm8k", "gsm9k"]}}, f"`gsm9k` {unknown}.* Did you mean 'gsm8k'"),
        (
            {"measure": {"benchmarks": ["gsm9k"], "own_benchmarks": {"gsm_k": own}}},
            f"`gsm9k` {unknown}gsm_k, arith.* Did you mean 'gsm_k'",
        ),
        ({"measure": {"diagnose_task": "gsm9k"}}, f"`gsm9k` {unknown}"),
        ({"select_on": "gsm9k"}, f"`gsm9k` {unknown}"),
        ({"measure": {"benchmarks": ["gsm8k", "mbpp_plus"]}}, "`mbpp_plus` runs programs .*`bwrap` is not installed"),
        (
            {"measure": {"benchmarks": ["gsm8k"], "benchmark_revisions": revisions}},
            "`benchmark_revisions` must map tasks to revisions, got 'gsm8', which is not a task. Did you mean 'gsm8k'",
        ),
        (
            {"methods": compared, "measure": {"eval_num_loops": [2]}},
            "`eval_num_loops` must not be set for 'independent'",
        ),
    ):
        lab.sweep(**fields)
        for words in (["--dry_run", "true"], ["--print_commands", "true"], []):
            with user_error(error):
                sweep.main([lab.file, *words])
    assert not any(lab.out.rglob("log.txt"))
    settings = {"num_eval_examples": 0, "single_loop_batches": 0}
    lab.sweep(learning_rates=[0.01], settings=settings)
    sweep.main([lab.file, "--dry_run", "true"])


@pytest.mark.parametrize(("fields", "message"), [
    (
        {"methods": {"p_0.25": {"pp": 0.25}}},
        "`pp` of the method p_0.25 in `methods` is not a field of `loopdropout sft`. Did you mean 'p'?",
    ),
    ({"methods": {"x": {"r": 8}}}, "Did you mean 'lora_r'?"),
    (
        {"settings": {"max_stepss": 6}},
        "`max_stepss` in `settings` is not a field of `loopdropout sft`. Did you mean 'max_steps'?",
    ),
    ({"settings": {"beta": 0.1}}, "It is a field of `loopdropout dpo` and `loopdropout grpo`."),
    ({"settings": {"seeds": [1]}}, "It is a field of the sweep, outside of `methods` and `settings`."),
    ({"measure": {"single_loop_batches": 1}, "script": "dpo"}, "`single_loop_batches` in `measure` is not a field of"),
    ({"recipe": "typo.yaml"}, "typo.yaml is not a field of `loopdropout sft`. Did you mean 'max_steps'?"),
])  # fmt: skip
def test_sweep_names_mistyped_fields_of_its_trainings(lab, monkeypatch, fields, message):
    """It does so before a dry run prints a plan, before the first training, and before it compares finished runs."""
    monkeypatch.chdir(lab.folder)
    Path("typo.yaml").write_text("extends: recipe.yaml\nmax_stepps: 2\n")
    methods = {"p_0.25": {"p": 0.25}}
    made = lab.sweep(methods=[methods], script="sft")
    made.command(made.pending()[0])
    with user_error(f"{re.escape(message)}"):
        lab.sweep(**{"methods": [methods], "script": "sft", **fields}).pending()


def test_sweep_must_have_the_command_of_its_recipe(lab, tmp_path):
    recipe = tmp_path / "dpo.yaml"
    recipe.write_text("command: dpo\n")
    with user_error("with `loopdropout dpo` .in a sweep: `script: dpo`., as its line `command` says, got `sft`"):
        lab.sweep(script="sft", recipe=str(recipe))
    lab.sweep(recipe=str(recipe), select_on="mine")  # a script of one's own reads each recipe


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "/tmp/x", "a\nb", " a", 1])
def test_names_of_methods_are_names_of_folders(lab, name):
    with user_error("The names of `methods` must be names of folders without a slash"):
        lab.sweep(methods=[{name: "lora"}])
    assert lab.sweep(methods=[{"own method": "lora"}]).recipes.keys() == {"own method"}


def test_run_that_fails_after_its_score_says_so(lab, capsys):
    lab.run()
    folder = lab.out / "lora/lr_0.01/seed_101"
    (folder / "run.json").write_text('{"status": "training"}')
    made = lab.sweep()
    line = made.pool._describe_end(made.runs("lora")[0], False)
    assert (
        "lora/lr_0.01/seed_101 has its score, but did not end as it should (see its log.txt), accuracy 50.00%" in line
    )


def test_sweep_workers_train_each_run_once(lab, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    fields = {"methods": ["lora", "loop_dropout"], "workers": 2}
    with ThreadPoolExecutor(2) as machines:
        for result in [machines.submit(lab.sweep(**fields).train_all) for _ in range(2)]:
            result.result()
    assert len(lab.log) == 10 and {gpu for *_, gpu in lab.log} == {"5", "7"}
    twice = {name for name, number in Counter(lab.runs).items() if number == 2}  # the choice, and its final evaluation
    assert twice == {f"{method}/lr_0.02/seed_101" for method in fields["methods"]}


def test_lines_of_workers_fit_a_terminal(lab):
    """Those of two workers, with a failed run, are wrapped between words. A path can be longer."""
    lab.set_world(fails=["loop_dropout/lr_0.02"])
    lab.sweep(methods=["lora", "loop_dropout"], workers=2, learning_rates=[0.02], seeds=[101])
    master, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    os.set_blocking(master, False)
    words = [lab.file, "--script", lab.folder / "lab"]
    program = Program(ROOT / "recipes/sweep.py", *words, output=os.ttyname(terminal))
    parts = []

    def has_ended():
        exit_code = program.exit_code  # before the last read, so that nothing is left in the terminal
        with suppress(BlockingIOError):
            while True:
                parts.append(os.read(master, 10_000))
        return exit_code is not None

    wait_for(has_ended)
    os.close(terminal)
    os.close(master)
    lines = b"".join(parts).decode().splitlines()
    starts = [lines.index(f"{method}/lr_0.02/seed_101 starts (log:") for method in ("lora", "loop_dropout")]
    start, end = min(starts), lines.index("Next:")  # either worker can be the first
    assert program.exit_code == 2 and max(starts) < end
    assert [line for line in lines[start:end] if len(line) > 80 and " " in line] == []
    failed = lines.index("Failed, with the errors above:")
    assert lines[failed + 1] == "  loop_dropout/lr_0.02/seed_101 (log:"
    assert lines[failed + 3].startswith("loopdropout sweep: ") and max(map(len, lines[failed + 3 :])) <= 80  # an error


def end_sweep(lab, signal_number):
    """Start the sweep in another process, and end it during its first training."""
    (lab.folder / "hold").touch()
    lab.sweep()
    program = Program(ROOT / "recipes/sweep.py", lab.file, "--script", str(lab.folder / "lab"))
    wait_for(lambda: lab.log, program)
    program.end(signal_number)
    return program


def test_killed_sweep_continues(lab, capsys):
    """The training of a killed sweep goes on with its lock, and the next sweep waits for it."""
    end_sweep(lab, signal.SIGKILL)
    assert "0 of 4 trainings have ended. The sweep is running: 1 run is being" in describe_progress(lab.out)
    worker = threading.Thread(target=lab.sweep().train_all)
    worker.start()
    wait_for(lambda: len(lab.log) == 2)  # it starts with the next run
    (lab.folder / "hold").unlink()
    worker.join()
    assert len(lab.log) == 5 and Counter(lab.runs)["lora/lr_0.01/seed_101"] == 1
    assert "Waiting" not in capsys.readouterr().out


def test_sweep_says_once_that_it_waits_for_other_processes(lab, capsys):
    made = lab.sweep(learning_rates=[0.02], seeds=[101])
    (run,) = made.pending()
    made.folder(run).mkdir(parents=True)
    with open(made.folder(run) / "sweep.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        worker = threading.Thread(target=made.train_all)
        worker.start()
        wait_for(lambda: made.pool.is_waiting)
        made.pool._say_that_it_waits([run])
    made.pool.stopped.set()
    worker.join()
    line = f"Waiting, because other processes train all runs that can start now: {run.name} (the time left is not known yet)\n"
    assert capsys.readouterr().out.count(line) == 1


def test_sweep_does_not_take_its_own_training_for_another_process(lab, capsys, monkeypatch):
    """Also if a second worker asks before the process of the first one has started."""
    made = lab.sweep(workers=2, learning_rates=[0.02], seeds=[101])
    command = made.command

    def start_slowly(run):
        time.sleep(0.3)
        return command(run)

    monkeypatch.setattr(made, "command", start_slowly)
    made.train_all()
    assert len(lab.runs) == 1 and "Waiting" not in capsys.readouterr().out


def test_progress_counts_a_training_that_ended_after_its_sweep(lab):
    """As after a kill, or on another machine. It has not failed then, either."""
    lab.set_world(fails=["lr_0.04"])
    made = lab.run()
    assert "2 of 4 trainings have ended (failed: lora/lr_0.04/seed_101). The same" in describe_progress(lab.out)
    lab.set_world()
    (run,) = made.pending()
    subprocess.run(made.command(run), check=True)
    text = "3 of 4 trainings have ended, with lora/lr_0.04/seed_101, which the sweep has not counted yet. The same"
    assert text in describe_progress(lab.out)
    with lock_folder(made.folder(run)):  # another process trains or measures it
        text = describe_progress(lab.out)
        stop = describe_interruption(lab.out, ["lora"])
        second_stop = describe_interruption(lab.out, ["lora"], stopping=[run.name])
    running = r"1 run is being trained or measured now \(lora/lr_0.04/seed_101 since \d\d:\d\d\)\."
    assert re.search(rf"3 of 4 trainings have ended\. The sweep is running: {running}$", text), text
    assert re.search(rf"Other processes go on: {running} The same `loopdropout sweep`", stop)
    assert "Other" not in describe_interruption(lab.out, ["lora"])
    ours = (
        "It still waits for the checkpoint or the end of lora/lr_0.04/seed_101. The same `loopdropout sweep` command"
    )
    assert ours in second_stop and "Other" not in second_stop
    lab.run()
    assert describe_progress(lab.out) == ""


@pytest.mark.parametrize(("code", "submitted"), [(0, ""), (2, ""), (143, "--array=3 job.sh\n")])
def test_job_of_an_array_ends_as_its_sweep(tmp_path, code, submitted):
    """The script of the page, with stand-ins for SLURM. Only a stopped sweep is submitted again."""
    page = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    (script,) = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "#SBATCH --array" in block]
    (tmp_path / "job.sh").write_text(script)
    stand_ins = {
        "srun": '"$@"',
        "sbatch": 'echo "$@" >> submitted',
        "loopdropout": f'echo "$@" > command; exit {code}',
    }
    for name, line in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "3"}
    job = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, check=False)
    assert job.returncode == code and (tmp_path / "command").read_text() == "sweep mine.yaml\n"
    assert "".join(path.read_text() for path in tmp_path.glob("submitted")) == submitted


@pytest.mark.parametrize(("status", "is_submitted"), [("stopped", True), ("finished", False), ("training", False)])
def test_job_of_a_training_ends_as_its_launcher(tmp_path, status, is_submitted):
    """Also if the training has finished, whose status does not submit the job again."""
    page = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    (script,) = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "tulu2.started" in block]
    (tmp_path / "outputs/tulu2").mkdir(parents=True)
    code = 0 if status == "finished" else 1
    run = f"""echo '{{"status": "{status}"}}' > outputs/tulu2/run.json; sh -c 'exit {code}'"""
    (tmp_path / "job.sh").write_text(
        "sbatch() { touch submitted; }\n" + script.replace("srun ...", f"sleep 0.02; {run}")
    )
    job = subprocess.run(["bash", "job.sh"], cwd=tmp_path, check=False)
    assert job.returncode == code and (tmp_path / "submitted").exists() == is_submitted


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_file_system_without_locks_is_named(lab, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with user_error(r"`output_dir` must be on a file system with `flock`, .*, got .* \(Function not implemented\)"):
        lab.run()
    assert lab.log == []


def test_full_disk_ends_a_sweep_in_one_sentence(lab, monkeypatch):
    def write(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    lab.sweep(script="sft")
    monkeypatch.setattr("loopdropout_trainer.results.sweep_folder.write_file", write)
    message = (
        f"`output_dir` {lab.out} cannot be written: No space left on device. Free space there. The same command then"
    )
    with user_error(message):
        sweep.main([lab.file])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_sweep_stops_its_training(lab, number, code):
    program = end_sweep(lab, number)
    assert program.exit_code == code
    sentence = f"loopdropout sweep: The sweep in {lab.out} is not finished: 0 of 4 trainings have ended. The same "
    assert program.stderr == f"{sentence}`loopdropout sweep` command continues it.\n"
    start = f"\n\nlora/lr_0.01/seed_101 starts (log: {lab.out}/lora/lr_0.01/seed_101/log.txt)\n"
    assert program.stdout.endswith(
        f"{start}lora/lr_0.01/seed_101 stopped, the time left is not known yet (0 of 4 trainings have ended)\n"
    )
    (lab.folder / "hold").unlink()
    lab.run()
    assert lab.runs[0] == lab.runs[1] and len(lab.log) == 1 + 5


def test_two_signals_of_one_stop_interrupt_a_sweep_once(monkeypatch):
    """Else the second one could interrupt the stop of the trainings. A later one interrupts the wait for them."""
    former = signal.getsignal(signal.SIGTERM)
    with stopping_on_signals():
        with pytest.raises(KeyboardInterrupt) as stop:
            signal.raise_signal(signal.SIGTERM)
        assert stop.value.signal == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr("loopdropout_trainer.sweeps.stopping._SECONDS_OF_ONE_STOP", 0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.parametrize("path", [*(ROOT / "recipes").glob("s[tw]*s/**/*.yaml")], ids=lambda path: path.stem)
def test_sweep_recipe_names_its_number_of_trainings(path):
    (made,) = parse((sweep.Sweep,), [str(path)])
    _, total = made.count()
    assert re.search(rf"\b{total} trainings", path.read_text()), total


def test_sweep_runs_the_training_script(lab, forks):
    """The real script on the tiny model: a run that chooses the learning rate, and its final evaluation."""
    recipe = load_recipe("recipes/quickstart.yaml")
    recipe |= {"max_steps": 1, "num_train_examples": 4, "num_eval_examples": 2, "per_device_train_batch_size": 2}
    recipe |= {"benchmark_limit": 1, "eval_num_loops": None, "single_loop_accuracy": False, "merge": False}
    lab.recipe.write_text(yaml.safe_dump(recipe))
    made = lab.sweep(seeds=[1], script="sft")
    first = made.pending()[0]
    assert made.pool._train_unless_locked(first, {})
    log = (made.folder(first) / "log.txt").read_text()
    assert re.search(r"LoRA, 0:\d\d:\d\d left.*: {'train_runtime'", log)  # a line, and not a bar
    assert "\r" not in log and "it/s" not in log
    assert "\nNext:\n" in log and "loopdropout evaluate" not in log  # which cannot load `development`
    for run in first, SweepRun("lora", 0.01, 1, False):
        python(*made.command(run)[1:])
        assert made.is_done(run) and all(map(math.isfinite, made.score(run)))
    assert "\n# out/lora/lr_0.01/seed_1\n" in (made.folder(run) / "README.md").read_text()
    rows = [(row["task"], row["metric"]) for row in read_lines(made.folder(run) / "results.jsonl")]
    assert rows.index(("development", "loss")) < rows.index(("development", "accuracy"))
    print_summary(made)
    _check_documented_columns(read_lines(made.folder(run) / "results.jsonl"), load_results(lab.out))


def _check_documented_columns(rows, results):
    """The page tells the columns of `results.jsonl` from those that `load_results` adds to them."""
    page = (ROOT / "docs/reports.md").read_text().split("\n## A table of your own")[0]
    lists = re.split(r"\| column in the file \||\| further column of `load_results` \|", page)[1:]
    in_file, added = [{*re.findall(r"`(\w+)`(?=.*? \| .* \|$)", text, re.MULTILINE)} for text in lists]
    added = {name for name in added if not name.startswith("recipe_")}  # which depend on the recipe
    in_frame = {name for name in results if not name.startswith("recipe_")}
    saved = {name for row in rows for name in row}
    # Only results of `loopdropout evaluate` have the first three, and only one of a part of a task has `group`.
    assert in_file == saved | {"adapter", "readout", "limit", "group"}
    assert added == in_frame - in_file


def test_score_of_a_run_is_at_the_depth_of_its_training(tmp_path):
    """A final run can measure the task that chose the learning rate at other depths, too."""
    row = {"gates": "unit", "task": "development", "metric": "accuracy"}
    rows = [{**row, "num_loops": depth, "value": value} for depth, value in ((4, 50.0), (8, 20.0), (2, 10.0))]
    write_results(tmp_path, [*rows, {**row, "task": "training", "metric": "eval_loss", "num_loops": 4, "value": 1.0}])
    assert read_score(tmp_path, "development") == (50.0, -1.0)
