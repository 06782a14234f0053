"""Sweeps: what runs in which order, which rate is chosen, what is refused, and that nothing is done twice, whatever dies."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import optuna
import pytest
import yaml
from conftest import ROOT, load_script
from processes import ENVIRONMENT, Program, fork, wait_for

from loopdropout_trainer.runs.queue import Queue, SweepError
from loopdropout_trainer.runs.summary import load_runs
from loopdropout_trainer.runs.sweep import Sweep, SweepArguments
from loopdropout_trainer.settings.arguments import TINY_OURO_PATH
from loopdropout_trainer.settings.recipe import RecipeError, load_recipe, parse_recipe, settings_yaml


RECIPE = {
    "model_name_or_path": "tiny-ouro", "dtype": "float32", "preparation": "arithmetic", "num_train_examples": 8,
    "num_eval_examples": 2, "max_length": 256, "max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True,
    "bf16": False, "report_to": "none", "benchmarks": ["arithmetic_test"], "benchmark_limit": 2, "single_loop_batches": 1,
    "compare_with": ["lora"],
}  # fmt: skip
# Stands in for sft.py, and imports nothing of the package: it notes what it did, then writes what a training writes, with a
# score that peaks at the rate 0.02. `RUN` is the real one where that is imported already.
SCRIPT = """
import hashlib, json, os, pathlib, sys, time, yaml
LAB = pathlib.Path(__file__).parent
REAL = sys.modules.get("loopdropout_trainer.runs.run")
RUN = REAL.Run if REAL else type("RUN", (), {"read": print, "__init__": print})

def told(name, default):
    return json.loads((LAB / name).read_text()) if (LAB / name).exists() else default

def main(argv):
    recipe, out = yaml.safe_load(open(argv[0])), pathlib.Path(argv[argv.index("--output_dir") + 1])
    rate, seed = recipe["learning_rate"], recipe["seed"]
    did = "measured" if (out / "trained").exists() else "trained"
    note = [did, "/".join(out.parts[-3:]), recipe["benchmarks"], os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")]
    with open(LAB / "log", "a") as log:
        print(json.dumps(note), file=log)
    while (LAB / "hold").exists():
        time.sleep(0.02)
    if told("trap", None) in ("fail", str(out)):
        (LAB / "trap").unlink()
        (out / "run.json").write_text('{"run_name": ')  # cut off
        print("It is broken.", file=sys.stderr)
        sys.exit(3)
    out.mkdir(parents=True, exist_ok=True)
    identity = {"settings": {"rule": recipe["rule"], "learning_rate": rate}, "seeds": {"seed": seed}, **told("world", {})}
    if rate in told("diverging", []):
        error = {"run_name": recipe["run_name"], "run": identity, "error": "The loss of step 3 is not finite (nan)."}
        (out / "diverged.json").write_text(json.dumps(error))
        sys.exit(2)
    (out / "trained").touch()
    correct = told("scores", {"0.01": 5, "0.02": 7, "0.04": 7}).get(str(rate), 1)
    scores = {name: correct if name == "development" else seed % 10 for name in recipe["benchmarks"]}
    digest = lambda value: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    known = {"writer": "training", "identity": digest(identity)[:16], "method": recipe["rule"], "depth": 4}
    costs = {"train_seconds": 90.0, "peak_memory_gb": 2.5}
    rows = [{**known, "family": "cost", "metric": name, "value": value} for name, value in costs.items()]
    for name, n in scores.items():
        rows.append({**known, "family": "accuracy", "metric": name, "benchmark": name, "value": 10.0 * n})
    (out / "measurements.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    (out / "identities.json").write_text(json.dumps({known["identity"]: identity}))
    (out / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (out / "writers.json").write_text(json.dumps({"training": digest(rows)}))
    run = {"run_name": recipe["run_name"], "identity": known["identity"], "saved": {}, "files": {}}
    (out / "run.json").write_text(json.dumps({**run, "settings": recipe}))

if __name__ == "__main__":
    main(sys.argv[1:])
"""


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    """All trainings of this process are forks of one that has imported what the real script imports."""
    fork(print).join()


class Lab:
    """A folder with a script that stands in for sft.py, a recipe, and the log of what ran."""

    def __init__(self, folder):
        self.folder, self.out = folder, folder / "out"
        folder.mkdir(exist_ok=True)
        (folder / "sft.py").write_text(SCRIPT)
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(RECIPE))

    def tell(self, **values):
        """Tell the script at which rates it diverges, which scores it gives, ...; see there."""
        for name, value in values.items():
            (self.folder / name).write_text(json.dumps(value))

    def arguments(self, **fields):
        defaults = {"recipe": str(self.recipe), "learning_rates": [0.04, 0.01, 0.02], "seeds": [101, 102]}
        return {"methods": ["lora"], "output_dir": str(self.out), **defaults, **fields}

    def sweep(self, **fields):
        (self.folder / "sweep.yaml").write_text(yaml.safe_dump(self.arguments(**fields), sort_keys=False))
        (arguments,), _ = parse_recipe([SweepArguments], [str(self.folder / "sweep.yaml")])
        return Sweep(arguments)

    def queue(self, **fields):
        return Queue(self.sweep(**fields), self.folder)

    def run(self, **fields):
        queue = self.queue(**fields)
        queue.run()
        return queue

    def ran(self):
        """(trained or measured, METHOD/lr_X/seed_S, benchmarks, process, GPU) of each start of the script."""
        return [json.loads(line) for log in self.folder.glob("log") for line in log.read_text().splitlines()]

    def did(self):
        return [(did, run) for did, run, *_ in self.ran()]

    def rates(self, method="lora"):
        """The rates that a method was trained at, in this order."""
        trained = [run for did, run in self.did() if did == "trained" and run.startswith(f"{method}/")]
        return list(dict.fromkeys(float(run.split("/")[1].removeprefix("lr_")) for run in trained))


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def test_grid_then_choice_then_every_seed_at_the_chosen_rate(lab):
    queue = lab.run(methods=["lora", "loop_dropout"])
    # The score peaks at 0.02 and is the same at 0.04: the smaller one is chosen. Its run is measured, not trained again.
    lora = [(did, run) for did, run in lab.did() if run.startswith("lora/")]
    assert lora == [
        *(("trained", f"lora/lr_{rate}/seed_101") for rate in (0.01, 0.02, 0.04)),
        ("measured", "lora/lr_0.02/seed_101"),
        ("trained", "lora/lr_0.02/seed_102"),
    ]
    # Seed by seed, so that what is compared when a sweep is stopped has the same seeds.
    assert [run for _, run in lab.did()][-2:] == [f"{method}/lr_0.02/seed_102" for method in ("lora", "loop_dropout")]
    measured = [names for _, run, names, *_ in lab.ran() if run == "lora/lr_0.02/seed_101"]
    assert measured == [["development"], ["arithmetic_test"]]
    cells = [line.split() for line in queue.table().splitlines() if "lora" in line]
    assert cells == [
        ["lora", "0.01", "50.00"],
        ["lora", "0.02", "70.00*", "1.50", "2.50", "15.00", "±", "7.07", "(2)"],
        ["lora", "0.04", "70.00"],
    ]
    assert (lab.out / "summary.txt").read_text() == queue.table() + "\n"

    runs = load_runs(lab.out)
    assert {(r["method"], r["learning_rate"], r["seed"]) for r in runs if r["final"]} == {
        (method, 0.02, seed) for method in ("lora", "loop_dropout") for seed in (101, 102)
    }
    choices = [(r["learning_rate"], r["chosen"], r["selection_score"]) for r in runs if r["method"] == "lora"]
    assert choices == [(0.01, False, 50.0), (0.02, True, 70.0), (0.02, True, None), (0.04, False, 70.0)]
    assert all(load_recipe(lab.out / r["folder"] / "recipe.yaml")["seed"] == r["seed"] for r in runs)
    frame = queue.study.trials_dataframe()
    assert len(frame) == len(lab.ran()) == 10 and set(frame["state"]) == {"COMPLETE"}

    queue.run()
    assert len(lab.ran()) == 10  # nothing is done twice
    lab.run(methods=["lora"], seeds=[101, 102, 103])  # a sweep may grow
    assert lab.did()[10:] == [("trained", "lora/lr_0.02/seed_103")]


def test_what_is_measured_may_change_on_a_finished_sweep(lab):
    lab.run()
    count = len(lab.ran())
    queue = lab.run(measure={"benchmarks": ["arithmetic_test", "arithmetic_hard"]})
    assert lab.did()[count:] == [("measured", f"lora/lr_0.02/seed_{seed}") for seed in (101, 102)]
    assert all("arithmetic_hard" in run["result"].scores() for run in load_runs(lab.out) if run["final"])
    queue.run()
    assert len(lab.ran()) == count + 2
    queue = lab.run(output_dir=str(lab.folder / "two"), selection_seeds=2, measure={"benchmark_limit": 1})
    assert Counter(did for did, _ in lab.did()[count + 2 :]) == {"trained": 6, "measured": 2}
    settings = queue.sweep.settings("lora", selects=True)
    assert settings["benchmark_limit"] == 2 and "single_loop_batches" not in settings  # whatever is measured


SCORES = {"0.0025": 6, "0.005": 8, "0.01": 7, "0.02": 6, "0.04": 5}
ROW = ["0.005", "80.00*"]


def test_a_grid_is_extended_until_its_best_rate_is_inside(lab):
    lab.tell(scores=SCORES, trap=str(lab.out / "lora/lr_0.0025/seed_101"))
    grid = {"methods": ["lora", "loop_dropout"], "extend_grid": True, "rate_factors": {"loop_dropout": 2}}
    with pytest.raises(SweepError, match="lr_0.0025"):
        lab.run(**grid)
    queue = lab.run(**grid)  # goes on where it was
    assert lab.rates() == [0.01, 0.02, 0.04, 0.005, 0.0025]
    assert lab.rates("loop_dropout") == [0.02, 0.04, 0.08, 0.01, 0.005, 0.0025]
    done = Counter(run for did, run in lab.did() if did == "trained")
    assert done.pop("lora/lr_0.0025/seed_101") == 2 and set(done.values()) == {1}
    final = {(run["method"], run["learning_rate"], run["seed"]) for run in load_runs(lab.out) if run["final"]}
    assert final == {(method, 0.005, seed) for method in grid["methods"] for seed in (101, 102)}
    assert "smallest" not in queue.table()
    assert queue.sweep.plan().split()[-1] == "8"


def test_a_rate_that_stays_at_the_edge_of_its_grid_is_named(lab):
    lab.tell(scores={**SCORES, "0.0025": 9, "0.00125": 10})
    queue = lab.run(extend_grid=True, max_extensions=2)
    assert lab.rates() == [0.01, 0.02, 0.04, 0.005, 0.0025]
    (sentence,) = [line for line in queue.table().splitlines() if "smallest" in line]
    assert sentence.startswith("lora in `all`: the best rate, 0.0025, is the smallest of the 5 that were tried")
    (choice,) = json.loads((lab.out / "summary.json").read_text())["choices"]
    assert choice["edge"] == "smallest" and choice["rates"] == [0.0025, 0.005, 0.01, 0.02, 0.04]
    lab.run(extend_grid=True, max_extensions=4)  # a limit may be raised
    assert lab.rates()[5:] == [0.00125, 0.000625]


def test_a_grid_is_extended_upwards_to_the_first_rate_that_diverges(lab):
    lab.tell(scores={"0.01": 1, "0.02": 2, "0.04": 3, "0.08": 4}, diverging=[0.16])
    queue = lab.run(extend_grid=True)
    assert lab.rates() == [0.01, 0.02, 0.04, 0.08, 0.16] and "largest" not in queue.table()
    lab.tell(scores={"0.01": 3, "0.02": 3, "0.04": 3, "0.005": 2})  # of equal rates the smallest, which is then inside
    out = str(lab.folder / "equal")
    lab.run(extend_grid=True, output_dir=out)
    assert {run["learning_rate"] for run in load_runs(out) if run["chosen"]} == {0.01}


WORLD = {"base": {"rms_norm_eps": 1e-6}, "data": {"sha256": "a"}, "versions": {"torch": version("torch")}}
CHANGES = [("data", "sha256", "b", "the training data"), ("base", "rms_norm_eps", 0.5, "rms_norm_eps")]


@pytest.mark.parametrize("part, field, value, words", CHANGES)
@pytest.mark.parametrize("method", ["lora", "unscaled"])
def test_runs_on_other_data_or_another_base_are_not_compared(lab, part, field, value, words, method):
    lab.tell(world=WORLD)
    lab.run(learning_rates=[0.01], seeds=[101])
    before = (lab.out / "summary.json").read_text()
    lab.tell(world={**WORLD, part: {field: value}})
    for grown in ({"learning_rates": [0.01], "seeds": [102]}, {"learning_rates": [0.02], "seeds": [101]}):
        for _ in range(2):  # nor is it counted when it is found
            with pytest.raises(SweepError, match=f"cannot stand beside lora/lr_0.01/seed_101: .*{words}") as refused:
                lab.run(**grown, methods=[method])
            assert len(str(refused.value).splitlines()) == 1
        assert (lab.out / "summary.json").read_text() == before


def test_a_run_whose_folder_is_gone_is_trained_anew(lab):
    """What its earlier trial noted is void, its score and its data: one of two ways out for who has changed his data."""
    lab.tell(world=WORLD)
    fields = {"learning_rates": [0.01, 0.02], "seeds": [101]}
    lab.run(**fields)
    lab.tell(world={**WORLD, "data": {"sha256": "b"}}, scores={"0.01": 9})
    for rate in ("0.01", "0.02"):
        shutil.rmtree(lab.out / f"lora/lr_{rate}/seed_101")
    lab.run(**fields)
    assert [(run["learning_rate"], run["chosen"], run["selection_score"]) for run in load_runs(lab.out)] == [
        (0.01, True, 90.0),
        (0.02, False, 10.0),
    ]
    lab.tell(world=WORLD)
    with pytest.raises(SweepError, match="lora/lr_0.01/seed_102 cannot stand"):
        lab.run(**{**fields, "seeds": [101, 102]})
    shutil.rmtree(lab.out / "lora/lr_0.01/seed_102")
    lab.tell(world={**WORLD, "data": {"sha256": "b"}})
    lab.run(**{**fields, "seeds": [101, 102]})
    assert len([run for run in load_runs(lab.out) if run["final"]]) == 2


def test_a_run_that_is_measured_again_is_compared_with_what_it_was(lab):
    lab.tell(world=WORLD)
    fields = {"learning_rates": [0.01], "seeds": [101]}
    lab.run(**fields)
    lab.tell(world={**WORLD, "data": {"sha256": "b"}})
    words = "lora/lr_0.01/seed_101 cannot stand beside its own earlier results: the training data are others"
    with pytest.raises(SweepError, match=words):
        lab.run(**fields, measure={"benchmarks": ["arithmetic_hard"]})


def test_a_run_whose_rows_were_changed_is_measured_again(lab):
    fields = {"learning_rates": [0.01, 0.02], "seeds": [101]}
    lab.run(**fields)
    before, count = load_runs(lab.out), len(lab.ran())
    file = lab.out / "lora/lr_0.02/seed_101" / "measurements.jsonl"
    file.write_text(file.read_text().replace("90.0", "91.0"))
    with pytest.raises(ValueError, match="rows of `training` were changed or deleted"):
        load_runs(lab.out)
    lab.run(**fields)
    assert lab.did()[count:] == [("measured", "lora/lr_0.02/seed_101")] * 2  # to choose, and to compare
    assert load_runs(lab.out) == before


def test_runs_of_an_earlier_version_are_named(lab):
    lab.run(learning_rates=[0.01], seeds=[101])
    folder = lab.out / "lora/lr_0.01/seed_101"
    (folder / "run.json").rename(folder / "results.json")
    with pytest.raises(SweepError, match="seed_101 holds the results.json of an earlier version .*delete that file"):
        lab.run(learning_rates=[0.01], seeds=[101])
    (folder / "results.json").unlink()
    lab.run(learning_rates=[0.01], seeds=[101])
    assert lab.did() == [("trained", "lora/lr_0.01/seed_101"), ("measured", "lora/lr_0.01/seed_101")]


def test_other_packages_are_refused_before_anything_runs(lab):
    lab.tell(world={**WORLD, "versions": {"torch": "0.1"}})
    lab.run(learning_rates=[0.01], seeds=[101])
    with pytest.raises(SweepError, match="`torch` was '0.1' and is"):
        lab.run(learning_rates=[0.01], seeds=[101, 102])
    assert len(lab.ran()) == 1


def test_two_sweeps_of_one_folder_keep_both_their_runs(lab):
    """Also where both have the same method; a sweep that has grown replaces its own choice."""
    lab.run(methods=["loop_dropout"])
    for rates, seeds in (([0.01], [101, 102]), ([0.02], [101])):
        lab.run(learning_rates=rates, seeds=seeds, full_grid=True)
    runs = load_runs(lab.out)
    lora = {(run["learning_rate"], run["seed"]) for run in runs if run["method"] == "lora"}
    assert lora == {(0.01, 101), (0.01, 102), (0.02, 101)} and all(run["result"].rows for run in runs)
    assert [run["seed"] for run in runs if run["method"] == "loop_dropout" and run["final"]] == [101, 102]
    assert "0.02 70.00*" in " ".join((lab.out / "summary.txt").read_text().split())
    for rates, chosen in (([0.01, 0.02], {0.02}), ([0.01, 0.04], {0.04})):
        lab.run(learning_rates=rates)
        lora = [run for run in load_runs(lab.out) if run["method"] == "lora"]
        assert {run["learning_rate"] for run in lora if run["chosen"]} == chosen


def test_parts_share_runs_and_have_settings_of_their_own(lab):
    methods = {"lora": "lora", "half": {"rule": "loop_dropout", "p": 0.5}}
    deep = {"settings": {"num_loops": 6}, "learning_rates": [0.02], "measure": {"depths": [2]}}
    rates = {"full_grid": True, "measure": {"benchmarks": ["arithmetic_hard"]}}
    parts = {"rates": {"methods": ["lora"], **rates}, "main": {}, "deep": {"methods": ["half"], **deep}}
    fields = {"methods": methods, "parts": parts, "measure": {"benchmarks": ["arithmetic_test"]}}
    lab.run(**fields)
    trained = [run for did, run in lab.did() if did == "trained"]
    assert len(trained) == len(set(trained)) == 6 + 4 + 2
    finals = Counter((r["method"], r["learning_rate"], r["chosen"]) for r in load_runs(lab.out) if r["final"])
    assert finals["lora", 0.02, True] == finals["lora", 0.04, False] == finals["half", 0.02, True] == 2
    assert finals["half@deep", 0.02, False] == 2
    # A run that two parts share is measured as the first one says; what chose a rate is known although it was measured.
    measured = [list(r["result"].scores()) for r in load_runs(lab.out) if r["method"] == "lora" and r["final"]]
    assert measured == [["arithmetic_hard"]] * 6
    settings = load_recipe(lab.out / "half@deep/lr_0.02/seed_101/recipe.yaml")
    assert settings["num_loops"] == 6 and settings["depths"] == [2] and settings["rule"] == "loop_dropout"
    plan = lab.sweep(**fields).plan()
    assert [int(line.split()[1]) for line in plan.splitlines()[1:]] == [6, 5, 2, 13]
    count = len(lab.ran())
    lab.run(**fields, only=["main"])
    assert len(lab.ran()) == count


def test_a_failure_stops_with_the_log_and_is_done_again(lab):
    lab.tell(trap="fail")
    with pytest.raises(SweepError, match=r"(?s)lora/lr_0.01/seed_101 failed with exit status 3;.*It is broken"):
        lab.run()
    assert len(lab.ran()) == 1
    lab.run()  # the first run's run.json is there, but cut off
    assert lab.did()[0] == lab.did()[1] and len(lab.ran()) == 1 + 5


def test_a_rate_that_diverges_is_out(lab):
    lab.tell(diverging=[0.02])
    queue = lab.run()
    assert [line.split()[2] for line in queue.table().splitlines()[1:4]] == ["50.00", "diverged", "70.00*"]
    count = len(lab.ran())
    queue.run()
    assert len(lab.ran()) == count  # nor is it tried again
    lab.tell(diverging=[0.01, 0.02, 0.04])
    lab.run(output_dir=str(lab.folder / "none"))
    assert len(lab.ran()) == count + 3  # nothing to choose from
    lab.run(output_dir=str(lab.folder / "full"), full_grid=True)
    assert [run["diverged"] for run in load_runs(lab.folder / "full")] == [True] * 6


def test_a_run_waits_for_what_still_works_in_its_folder(lab):
    code = "import pathlib, time; from loopdropout_trainer.saving.files import folder_lock\n"
    code += f"with folder_lock({str(lab.out / 'lora/lr_0.01/seed_101')!r}): print(1, flush=True); time.sleep(1.5); "
    code += f"pathlib.Path({str(lab.folder / 'left')!r}).touch()"
    holder = Program("-c", code)
    wait_for(lambda: holder.stdout, holder)
    lab.run(learning_rates=[0.01], seeds=[101])
    assert holder.wait() == 0
    assert (lab.folder / "log").stat().st_mtime_ns >= (lab.folder / "left").stat().st_mtime_ns


def test_what_a_running_job_reads_is_never_written_again(lab):
    lab.run()
    before = {path: path.read_bytes() for path in (lab.out / "recipes").iterdir()}
    lab.recipe.write_text(yaml.safe_dump({**RECIPE, "max_steps": 5}))
    for fields in ({}, {"print_commands": True}):
        queue = lab.queue(**fields)
        with pytest.raises(SweepError, match="made with `lora: max_steps` 1, and now it is 5: .*another `output_dir`"):
            queue.commands() if fields else queue.run()
    with pytest.raises(SweepError, match="made with `select_on` 'development'"):
        lab.run(select_on="arithmetic_hard")
    assert {path: path.read_bytes() for path in (lab.out / "recipes").iterdir()} == before


def test_commands_for_a_scheduler(lab):
    commands = lambda: lab.queue(print_commands=True).commands()
    finish = lambda commands: [subprocess.run(shlex.split(command), check=True) for command in commands]
    grid = commands()
    assert len(grid) == 3 and all(str(lab.folder / "sft.py") in command for command in grid)
    finish(grid[1:])
    assert commands() == grid[:1]  # the choice waits for the whole grid
    finish(grid[:1])
    final = commands()
    assert len(final) == 2 and all("lr_0.02" in command for command in final)
    finish(final)
    assert commands() == []
    lab.run()
    assert len(lab.ran()) == 5  # a worker takes over what a scheduler has done
    (lab.out / "sweep.db").unlink()
    lab.run()  # and what was done before the storage was lost, but for the score of the run that was measured
    assert lab.did()[5:] == [("measured", "lora/lr_0.02/seed_101")] * 2


def test_a_launcher_starts_the_script(lab):
    words = f"--recipe {lab.recipe} --learning_rates 0.01 --methods lora --seeds 101 --output_dir {lab.out} --launcher"
    parse = lambda launcher: parse_recipe([SweepArguments], [*words.split(), launcher])[0][0]
    Queue(Sweep(parse(f"env CUDA_VISIBLE_DEVICES=7 {sys.executable}")), lab.folder).run()
    assert [gpu for *_, gpu in lab.ran()] == ["7"]
    with pytest.raises(RecipeError, match="`launcher`"):
        parse("'")


def test_methods_are_rules_recipes_or_fields(lab):
    sweep = lab.sweep(methods=["lora", "unscaled"], settings={"p": 0.1})
    assert sweep.methods["unscaled"]["p"] == 0.1 and "p" not in sweep.methods["lora"]
    (lab.folder / "plus.yaml").write_text("extends: recipe.yaml\nlora_r: 4\n")
    sweep = lab.sweep(methods=["lora", str(lab.folder / "plus.yaml")], rate_factors={"plus": 0.5})
    assert sweep.rates(sweep.parts["all"], "plus") == [0.005, 0.01, 0.02]
    assert (sweep.methods["plus"]["lora_r"], "rule" in sweep.methods["plus"]) == (4, False)


def test_a_method_is_trained_with_the_text_that_its_recipe_has(lab):
    """Quoted text that looks like a number stays text, in what a training reads and in what is refused as another's."""
    texts = {"prompt_end": "1e3", "project": "86e1234", "system_instruction": "12:30"}
    lab.recipe.write_text(settings_yaml({**RECIPE, **texts}))
    lab.queue(methods={"x": {"rule": "lora", "hub_revision": "null"}}, print_commands=True).commands()
    written = [load_recipe(path) for path in (lab.out / "recipes").iterdir()]
    expected = {**texts, "hub_revision": "null"}
    assert len(written) == 3 and all({name: recipe[name] for name in expected} == expected for recipe in written)


NO_PATH = "must have names of letters"
REFUSALS = [  # fields, the field that is named, the fault
    ({"methods": ["a/x.yaml", "b/x.yaml"]}, "methods", "different names"),
    ({"methods": {"../../x": "lora"}}, "methods", NO_PATH),
    ({"methods": {"x": 3}}, "methods", "type"),
    ({"methods": ["no_rule"]}, "no_rule", "rule"),
    ({"methods": ["nowhere.yaml"]}, "nowhere.yaml", "cannot be read"),
    ({"learning_rates": [0.0]}, "learning_rates", "above 0"),
    ({"learning_rates": [0.01], "extend_grid": True}, "extend_grid", "two or more `learning_rates`"),
    ({"parts": {"x": {"learning_rates": [0.01], "extend_grid": True}}}, "extend_grid", "part `x`"),
    ({"seeds": []}, "seeds", "one or more"),
    ({"seeds": [1, 5000000000]}, "seeds", "from 0 to 4,294,967,295"),
    ({"methods": {"x": {"rule": "lora", "learning_rate": 0.05}}}, "learning_rate", "is the sweep's"),
    ({"settings": {"seed": 77}}, "seed", "is the sweep's"),
    ({"rate_factors": {"x": 2.0}}, "rate_factors", "'x'"),
    ({"select_on": "--adapter=/x"}, "select_on", "--adapter=/x"),
    ({"selection_seeds": 0}, "selection_seeds", "at least 1"),
    ({"measure": {"benchmarks": ["no_benchmark"]}}, "measure", "no_benchmark"),
    ({"measure": {"benchmarks": []}}, "measure", "must name `benchmarks`"),
    ({"measure": {"lora_r": 4}}, "measure", "lora_r"),
    ({"settings": {"num_eval_examples": 0}}, "development", "needs held-out rows"),
    ({"settings": {"preparation": "arithmetic_pairs"}}, "development", "got 'arithmetic_pairs'"),
    ({"measure": {"depths": [0]}}, "depths", "0"),
    ({"settings": {"lora_rank": 4}}, "lora_rank", "did you mean"),
    ({"settings": {"hub_token": "hf_secretsecret"}}, "hub_token", "secret"),
    ({"parts": {"../x": {}}}, "parts", NO_PATH),
    ({"parts": {"x": [1]}}, "parts", "type"),
    ({"parts": {"x": {"seed": [1]}}}, "part `x`", "seed"),
    ({"parts": {"x": {"seeds": [1, 1]}}}, "seeds", "part `x`"),
    ({"parts": {"x": {"methods": ["coto"]}}}, "methods", "coto"),
    ({"only": ["x"]}, "only", "x"),
    ({"output_dir": "recipe.yaml/out"}, "output_dir", "is a file"),
]


@pytest.mark.parametrize("fields, field, fault", REFUSALS, ids=lambda value: str(value)[:40])
def test_refused_before_the_first_training(lab, monkeypatch, fields, field, fault):
    monkeypatch.chdir(lab.folder)
    with pytest.raises((ValueError, SweepError)) as refused:
        lab.run(**fields)
    text = str(refused.value)
    assert field in text and fault in text and len(text.splitlines()) == 1 and "hf_secret" not in text
    assert not lab.ran() and not lab.out.exists()


def start(lab, *options, **fields):
    """Start the real script, beside the one that stands in for sft.py."""
    (lab.folder / "sweep.py").write_text((ROOT / "recipes/sweep.py").read_text())
    (lab.folder / "sweep.yaml").write_text(yaml.safe_dump(lab.arguments(**fields), sort_keys=False))
    command = [lab.folder / "sweep.py", lab.folder / "sweep.yaml", *options]
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "5,7"}
    return Program(
        *command, env=environment, output=lab.folder / f"said{len(list(lab.folder.iterdir()))}.txt", fresh=True
    )


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def under_way(lab):
    """Return (run, worker, training) for each run that a worker does, and whose training has begun."""
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{lab.out / 'sweep.db'}")
    trainings = {run: pid for _, run, _, pid, _ in lab.ran() if is_running(pid)}
    jobs = [trial.user_attrs.get("job") for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING])]
    running = {job["run"]: job for job in jobs if job}
    worker = lambda run: int(running[run]["worker"].rpartition(":")[2])
    return [(run, worker(run), trainings[run]) for run in trainings if run in running]


def test_two_workers_of_which_one_is_killed_do_everything_once(lab):
    """SIGKILL of a worker and of its training: the other one finishes everything."""
    (lab.folder / "hold").touch()
    fields = {"methods": ["lora", "loop_dropout"]}
    process = start(lab, "--workers", "2", **fields)
    run, *pids = wait_for(lambda: len({gpu for *_, gpu in lab.ran()}) == 2 and under_way(lab), process)[0]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    (lab.folder / "hold").unlink()
    assert process.wait() == 0, process.stdout
    output = process.stdout
    assert len({gpu for *_, gpu in lab.ran()}) == 2  # one GPU each, while there were two
    done = Counter(run for _, run in lab.did())
    lost = done.pop(run)
    assert sum(done.values()) + lost == 10 + 1  # only what was lost was begun again
    assert "10 of at most 10" in output and len(load_runs(lab.out)) == 8


@pytest.mark.slow
def test_a_failure_stops_all_workers(lab):
    lab.run(methods=["lora", "loop_dropout"])
    lab.tell(trap=str(lab.out / "lora/lr_0.02/seed_103"))
    (lab.folder / "hold").touch()
    process = start(lab, "--workers", "2", methods=["lora", "loop_dropout"], seeds=[101, 102, 103, 104])
    wait_for(lambda: len(lab.ran()) == 10 + 2, process)
    (lab.folder / "hold").unlink()
    code, output = process.wait(), process.stdout
    assert code == 2 and "It is broken" in output and "goes on from there" in output.splitlines()[-1]
    assert ("trained", "loop_dropout/lr_0.02/seed_103") in lab.did()  # what ran beside it was finished
    assert (lab.out / "loop_dropout/lr_0.02/seed_103/run.json").exists()


@pytest.mark.parametrize(
    "stop", [signal.SIGKILL, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGTERM, signal.SIGINT))]
)
def test_a_sweep_that_is_stopped_takes_its_run_with_it_and_goes_on(lab, stop):
    (lab.folder / "hold").touch()
    process = start(lab)
    wait_for(lambda: lab.ran(), process)
    training = lab.ran()[0][3]
    code = process.end(stop)
    if stop != signal.SIGKILL:
        assert code == 130 and "the same command continues" in process.stdout
    wait_for(lambda: not is_running(training))
    (lab.folder / "hold").unlink()
    lab.run()
    assert lab.did()[0] == lab.did()[1] and len(lab.ran()) == 1 + 5


def test_a_real_sweep(tmp_path):
    """The real script, two rules, one at two rates, on the packaged model: the run of the chosen rate is not trained again."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "save_strategy": "no", "max_new_tokens": 8}))
    deep = {"methods": ["lora"], "settings": {"num_loops": 2}, "learning_rates": [0.001]}
    parts = {"main": {"methods": ["loop_dropout"]}, "deep": deep}
    fields = {"recipe": str(recipe), "learning_rates": [0.001, 0.002], "seeds": [1], "output_dir": str(tmp_path / "out"),
              "parts": parts, "measure": {"benchmarks": ["arithmetic_easy_test"], "depths": [2, 4]}}  # fmt: skip
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    load_script("recipes/sweep.py").main([str(tmp_path / "sweep.yaml")])
    runs = [run for run in load_runs(tmp_path / "out") if run["final"]]
    assert [run["method"] for run in runs] == ["loop_dropout", "lora@deep"]
    for run in runs:
        result, depth = run["result"], 2 if run["method"] == "lora@deep" else 4
        assert result.scores(2) and result.scores(4) and result.value("frozen_loss") > 0
        assert result.training.depth == depth
        log = (tmp_path / "out" / run["folder"] / "log.txt").read_text()
        assert ("nothing is trained" in log) == (run["method"] != "lora@deep")


UNTRAINED = {"log.txt", "expected.json", "_run.lock"}


def test_a_real_sweep_goes_on_only_with_its_own_data_and_base(tmp_path, capsys):
    """Real trainings: between two starts the data, a field of the base's config.json, or the problems are changed."""
    base, rows = shutil.copytree(TINY_OURO_PATH, tmp_path / "base"), tmp_path / "train.jsonl"
    config, problems = json.loads((base / "config.json").read_text()), tmp_path / "problems.jsonl"

    def write(answer=5, problem=1, **changed):
        (base / "config.json").write_text(json.dumps({**config, **changed}))
        problems.write_text(json.dumps({"question": f"{problem} + 1?", "answer": f"#### {problem + 1}"}) + "\n")
        lines = [
            json.dumps({"prompt": f"{number} + {answer} = ", "completion": f"{number + answer}"})
            for number in range(8)
        ]
        rows.write_text("\n".join(lines))

    recipe = {name: value for name, value in RECIPE.items() if name not in ("preparation", "num_train_examples")}
    recipe |= {
        "model_name_or_path": str(base),
        "train_files": [str(rows)],
        "single_loop_batches": 0,
        "max_new_tokens": 4,
    }
    recipe |= {"benchmarks": ["gsm8k"], "benchmark_files": {"gsm8k": str(problems)}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    fields = {"recipe": str(tmp_path / "recipe.yaml"), "learning_rates": [0.001], "output_dir": str(tmp_path / "out")}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({**fields, "methods": ["lora"]}))
    sweep = lambda *seeds: load_script("recipes/sweep.py").main([str(tmp_path / "sweep.yaml"), "--seeds", *seeds])
    write()
    sweep("1")
    for changed, words in (({"answer": 6}, "the training data"), ({"rms_norm_eps": 0.5}, "`rms_norm_eps` was")):
        write(**changed)
        refused = f"seed_2 is not trained, since it could not stand beside lora/lr_0.001/seed_1: {words}"
        with pytest.raises(SweepError, match=refused):
            sweep("1", "2")
        assert [run["seed"] for run in load_runs(tmp_path / "out")] == [1]
        assert {file.name for file in (tmp_path / "out/lora/lr_0.001/seed_2").iterdir()} <= UNTRAINED
    write(problem=2)
    with pytest.raises(SweepError, match="seed_2 cannot stand beside lora/lr_0.001/seed_1: the problems are others"):
        sweep("1", "2")
    write()
    shutil.rmtree(tmp_path / "out/lora/lr_0.001/seed_2")
    capsys.readouterr()
    sweep("1", "2")
    assert "(2)" in capsys.readouterr().out
