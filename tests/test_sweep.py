"""Sweeps: what runs in which order, which rate is chosen, and that nothing is done twice, whatever interrupts it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import tiny_ouro
from rich.console import Console

from loopdropout_trainer.runs.sweep import Sweep, SweepArguments, SweepError, sweep_command_line
from loopdropout_trainer.saving.lock import LockedError
from loopdropout_trainer.settings.recipe import RecipeError, parse_recipe


RECIPES = Path(__file__).parents[1] / "recipes"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(RECIPES.parent)}
# Stands in for sft.py and evaluate.py: notes its command, then writes results with a score that peaks at rate 0.02.
SCRIPT = """
import json, pathlib, sys, time
argv = sys.argv[1:]
def option(name, default=None):
    return argv[-argv[::-1].index(name)] if name in argv else default
out = pathlib.Path(option("--output_dir"))
with open({log!r}, "a") as log:
    print(pathlib.Path(sys.argv[0]).name, *argv, file=log)
if pathlib.Path({trap!r}).exists():
    pathlib.Path({trap!r}).unlink()
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text('{{"benchmarks": ')  # cut off in the middle
    time.sleep(60) if {hang} else sys.exit(3)
out.mkdir(parents=True, exist_ok=True)
if option("--learning_rate") in {diverging}:
    (out / "diverged.json").write_text(json.dumps({{"error": "The loss of step 3 is not finite (nan)."}}))
    sys.exit(2)
correct = {{"0.01": 5, "0.02": 7, "0.04": 7}}.get(option("--learning_rate"), 1)
if option("--adapter"):
    correct = int(option("--adapter")[-1])
names = [option("--benchmarks")]
name = "evaluation.json" if option("--adapter") else "results.json"
result = {{"score": 10.0 * correct, "correct": correct, "total": 10, "missing": 0}}
cost = {{"train_seconds": 90.0, "peak_memory_gb": 2.5}}
(out / name).write_text(json.dumps({{"benchmarks": {{each: result for each in names}}, "train_info": cost}}))
"""


class Lab:
    """A folder with stand-in scripts, a recipe, and the log of the commands that ran."""

    def __init__(self, folder, hang=False, diverging=()):
        self.folder, self.log, self.trap = folder, folder / "log", folder / "trap"
        folder.mkdir(exist_ok=True)
        for name in ("sft.py", "evaluate.py"):
            text = SCRIPT.format(log=str(self.log), trap=str(self.trap), hang=hang, diverging=diverging)
            (folder / name).write_text(text)
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text("model_name_or_path: m\nbenchmarks: [test]\n")

    def sweep(self, passed_on=(), **fields):
        defaults = {
            "recipe": str(self.recipe),
            "learning_rates": [0.04, 0.01, 0.02],
            "seeds": [101, 102],
            "output_dir": str(self.folder / "out"),
        }
        return Sweep(SweepArguments(**{**defaults, **fields}), self.folder, passed_on)

    def ran(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def words(line):
    argv = line.split()
    return argv[0], dict(zip(argv[2::2], argv[3::2], strict=True))


def tables(sweep):
    console = Console(width=200)
    with console.capture() as capture:
        for each in sweep.tables():
            console.print(each)
    return capture.get()


def test_grid_then_choice_then_seeds_then_tests(lab):
    sweep = lab.sweep()
    sweep.run()
    trained = [words(line)[1] for line in lab.ran() if line.startswith("sft.py")]
    lora = [(w["--learning_rate"], w["--seed"]) for w in trained if w["--rule"] == "lora"]
    # The score peaks at 0.02 and is the same at 0.04: the smaller one is chosen.
    assert lora == [("0.01", "101"), ("0.02", "101"), ("0.04", "101"), ("0.02", "102")]
    assert [w["--rule"] for w in trained] == ["lora"] * 4 + ["loop_dropout"] * 4
    assert all(w["--benchmarks"] == "development" for w in trained)
    assert len({w["--output_dir"] for w in trained}) == 8
    tested = [words(line)[1] for line in lab.ran() if line.startswith("evaluate.py")]
    assert [Path(w["--adapter"]).parts[-3:] for w in tested] == [
        (method, "lr_0.02", f"seed_{seed}") for method in ("lora", "loop_dropout") for seed in (101, 102)
    ]
    assert sweep.chosen_rate("lora") == 0.02
    assert "0.01: 50.00  0.02: 70.00*  0.04: 70.00" in tables(sweep)
    # 1 and 2 of 10 correct on the test, 7 of 10 on development
    row = next(line for line in tables(sweep).splitlines() if "lora" in line and "±" in line)
    assert "15.00 ± 7.07 (2)" in row and "70.00 ± 0.00 (2)" in row

    sweep.run()
    assert len(lab.ran()) == 12  # nothing is done twice
    lab.sweep(seeds=[101, 102, 103], methods=["lora"]).run()  # a sweep may grow
    assert [words(line)[1].get("--seed") for line in lab.ran()[12:]] == ["103", None]


def test_failed_and_cut_off_runs_are_done_again(lab):
    lab.trap.touch()
    with pytest.raises(SweepError, match="sft.py .* failed with exit status 3; the same sweep command goes on"):
        lab.sweep().run()
    assert len(lab.ran()) == 1
    lab.sweep().run()  # results.json of the first run is there, but cut off
    assert lab.ran()[0] == lab.ran()[1]
    assert len(set(lab.ran())) == len(lab.ran()) - 1


def test_an_interrupted_run_ends_with_the_sweep_and_is_done_again(tmp_path, monkeypatch):
    lab = Lab(tmp_path, hang=True)
    lab.trap.touch()
    children = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **fields: children.append(popen(*args, **fields)) or children[-1]
    )

    def interrupt():
        while not lab.ran():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        lab.sweep().run()
    assert children[0].poll() is not None
    assert len(lab.ran()) == 1
    lab.sweep().run()
    assert lab.ran()[0] == lab.ran()[1]


def test_a_sweep_that_is_killed_takes_its_run_with_it(tmp_path):
    lab = Lab(tmp_path, hang=True)
    lab.trap.touch()
    sweep = os.fork()
    if sweep == 0:
        lab.sweep().run()
        os._exit(0)
    deadline = time.time() + 60
    while not lab.ran() and time.time() < deadline:
        time.sleep(0.02)
    with pytest.raises(LockedError, match=f"process {sweep} on .* is at work in"):
        lab.sweep().run()
    run = children_of(sweep)
    assert len(run) == 1
    os.kill(sweep, signal.SIGKILL)
    os.waitpid(sweep, 0)
    while any(Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid) for pid in run) and time.time() < deadline:
        time.sleep(0.02)
    assert time.time() < deadline
    lab.sweep().run()
    assert lab.ran()[0] == lab.ran()[1]


def children_of(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_a_rate_that_diverges_is_out_and_the_sweep_goes_on(tmp_path):
    lab = Lab(tmp_path, diverging=("0.02",))
    sweep = lab.sweep(methods=["lora"])
    sweep.run()
    assert sweep.chosen_rate("lora") == 0.04  # 0.02 had been the best
    assert "0.01: 50.00  0.02: diverged  0.04: 70.00*" in tables(sweep)
    ran = len(lab.ran())
    sweep.run()
    assert len(lab.ran()) == ran  # nor is it tried again

    other = Lab(tmp_path / "all", diverging=("0.01", "0.02", "0.04"))
    other.sweep(methods=["lora", "loop_dropout"]).run()
    assert len(other.ran()) == 6  # nothing to choose from: the other method is tried all the same
    assert other.sweep().chosen_rate("lora") is None


def test_table_and_choice_are_saved(lab):
    sweep = lab.sweep(methods=["lora"])
    sweep.run()
    summary = json.loads((lab.folder / "out" / "summary.json").read_text())
    lora = summary["methods"]["lora"]
    assert lora["chosen_learning_rate"] == 0.02
    assert [row["score"] for row in lora["grid"]] == [50.0, 70.0, 70.0]
    assert [(run["seed"], run["benchmarks"]["test"]["correct"]) for run in lora["runs"]] == [(101, 1), (102, 2)]
    written = (lab.folder / "out" / "summary.md").read_text()
    assert "| lora | 0.02 | 70.00 ± 0.00 (2) | 15.00 ± 7.07 (2) | 1.5 | 2.50 |" in written
    assert "0.02: 70.00*" in written


def test_what_trains_at_other_settings_is_tested_at_them(lab):
    passed_on = [
        "--num_loops",
        "6",
        "--max_steps",
        "3",
        "--dtype",
        "float32",
        "--benchmark_files={}",
        "--warmup_steps",
        "2",
    ]
    lab.sweep(passed_on, methods=["lora"]).run()
    for line in lab.ran():
        trains = line.startswith("sft.py")
        expected = passed_on if trains else ["--num_loops", "6", "--dtype", "float32", "--benchmark_files={}"]
        assert line.endswith(" " + " ".join(expected))
        assert trains or "--max_steps" not in line


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_script_is_stopped_and_continues(tmp_path, stop):
    lab = Lab(tmp_path, hang=True)
    command = [sys.executable, str(tmp_path / "sweep.py"), str(lab.recipe), "--learning_rates", "0.01", "0.02"]
    command += ["--methods", "lora", "--seeds", "1", "2", "--output_dir", str(tmp_path / "out")]
    (tmp_path / "sweep.py").write_text((RECIPES / "sweep.py").read_text())  # the real one, beside the stand-ins
    lab.trap.touch()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    deadline = time.time() + 120
    while not lab.ran() and process.poll() is None and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(stop)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (130 if stop == signal.SIGINT else 1)
    assert "the same command continues" in errors
    assert len(lab.ran()) == 1

    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=ENVIRONMENT)
    assert len(lab.ran()) == 1 + 3 + 2
    assert "0.01: 50.00  0.02: 70.00*" in done.stdout


def test_commands_for_a_scheduler(lab):
    def commands():
        return [list(job.command) for job in lab.sweep(methods=["lora"], launcher="accelerate launch").ready_jobs()]

    def finish(command):
        subprocess.run([sys.executable, *command[2:]], check=True)

    grid = commands()
    assert [command[:3] for command in grid] == [["accelerate", "launch", str(lab.folder / "sft.py")]] * 3
    for command in grid[1:]:
        finish(command)
    assert commands() == grid[:1]  # the choice waits for the whole grid
    finish(grid[0])
    second, test = commands()
    assert "102" in second and "--adapter" in test
    finish(second)
    finish(test)
    (test,) = commands()
    finish(test)
    assert commands() == []


def test_final_runs_are_tested_at_other_depths_too(lab):
    sweep = lab.sweep(methods=["lora"], seeds=[101], test_depths=[2, 6])
    sweep.run()
    tested = [words(line)[1] for line in lab.ran() if line.startswith("evaluate.py")]
    assert [w.get("--num_loops") for w in tested] == [None, "2", "6"]
    assert [Path(w["--output_dir"]).name for w in tested] == ["test", "test_depth_2", "test_depth_6"]
    assert len({w["--adapter"] for w in tested}) == 1
    count = len(lab.ran())
    lab.sweep(methods=["lora"], seeds=[101], test_depths=[2, 6]).run()
    assert len(lab.ran()) == count
    for wrong, found in (([0], "from 1 to 1,024"), (6, "list of depths")):
        with pytest.raises(ValueError, match=f"`test_depths`.*{found}"):
            lab.sweep(test_depths=wrong)


def test_full_grid_chooses_nothing(lab):
    lab.sweep(methods=["lora"], full_grid=True, test_benchmarks=[]).run()
    assert len(lab.ran()) == 6
    assert tables(lab.sweep(methods=["lora"], full_grid=True, test_benchmarks=[])).count("(2)") == 3


def test_methods_as_recipes_with_their_own_rates(lab):
    variant = lab.folder / "lora_plus.yaml"
    variant.write_text("extends: recipe.yaml\nlora_r: 4\n")
    sweep = lab.sweep(["--max_steps", "3"], methods=["lora", str(variant)], rate_factors='{"lora_plus": 0.5}')
    first = next(job for job in sweep.ready_jobs() if str(variant) in job.command)
    assert "--rule" not in first.command
    assert shlex.join(first.command).endswith("--max_steps 3")
    assert sweep.rates(str(variant)) == [0.005, 0.01, 0.02]
    assert sweep.rates("lora") == [0.01, 0.02, 0.04]


def test_refusals(lab):
    lab.sweep(methods=["lora"]).claim()
    with pytest.raises(SweepError, match="made with `passed_on` .*another `output_dir`"):
        lab.sweep(["--max_steps", "3"]).run()
    lab.recipe.write_text("model_name_or_path: n\n")
    with pytest.raises(SweepError, match="`lora: benchmarks` ..test.., and now it is None"):
        lab.sweep().run()
    lab.recipe.write_text("model_name_or_path: m\nbenchmarks: [test]\n")
    with pytest.raises(SweepError, match="no benchmark `test` to choose by; they have development"):
        lab.sweep(["--benchmarks", "development"], select_on="test", output_dir=str(lab.folder / "other")).run()
    for message, fields in {
        "`seeds` must be one or more different values": {"seeds": [1, 1]},
        "`learning_rates` must be a number above 0; got 0.0": {"learning_rates": [0.0, 1.0]},
        "`methods` must have different names": {"methods": ["a/x.yaml", "b/x.yaml"]},
        "`rate_factors` names `x`": {"rate_factors": {"x": 2.0}},
    }.items():
        with pytest.raises(ValueError, match=message):
            lab.sweep(**fields)


def test_command_line(lab):
    argv, passed_on = sweep_command_line([str(lab.recipe), "--learning_rates", "1e-4", "--", "--max_steps", "3"])
    (arguments,), _ = parse_recipe([SweepArguments], argv)
    assert (arguments.recipe, arguments.learning_rates, passed_on) == (str(lab.recipe), [1e-4], ["--max_steps", "3"])
    (lab.folder / "sweep.yaml").write_text(f"recipe: {lab.recipe}\nlearning_rates: [1e-4, 5e-5]\n")
    argv, _ = sweep_command_line([str(lab.folder / "sweep.yaml"), "--seeds", "1", "2"])
    (arguments,), _ = parse_recipe([SweepArguments], argv)
    assert (arguments.learning_rates, arguments.seeds) == ([5e-5, 1e-4], [1, 2])
    with pytest.raises(RecipeError):
        parse_recipe([SweepArguments], ["--recipe", "x.yaml"])


@pytest.mark.slow
def test_a_real_sweep(tmp_path, tokenizer):
    """Two rules, two rates, two seeds on the tiny model, killed in the middle: the real scripts from first to last."""
    tiny_ouro().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        f"model_name_or_path: {tmp_path / 'model'}\ndtype: float32\npreparation: arithmetic\nnum_train_examples: 16\n"
        "num_eval_examples: 4\nmax_length: 400\nmax_steps: 2\nper_device_train_batch_size: 4\nbf16: false\n"
        "report_to: none\nbenchmarks: [arithmetic_test]\nbenchmark_limit: 4\n"
    )
    command = [sys.executable, str(RECIPES / "sweep.py"), str(recipe), "--learning_rates", "1e-3", "2e-3"]
    command += ["--seeds", "1", "2", "--output_dir", str(tmp_path / "out")]
    process = subprocess.Popen(command, env=ENVIRONMENT)
    first = tmp_path / "out" / "lora" / "lr_0.001" / "seed_1" / "results.json"
    deadline = time.time() + 600
    while not first.exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.2)
    time.sleep(8)  # well into the second run
    process.terminate()
    process.wait(timeout=120)
    stamp = first.stat().st_mtime_ns

    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900, env=ENVIRONMENT)
    assert first.stat().st_mtime_ns == stamp
    assert len(list((tmp_path / "out").glob("*/*/*/results.json"))) == 6
    assert len(list((tmp_path / "out").glob("*/*/*/test/evaluation.json"))) == 4
    assert "arithmetic_test" in done.stdout
    settings = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert settings["recipes"]["lora"]["max_steps"] == 2
