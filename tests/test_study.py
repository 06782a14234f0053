"""Studies: what they plan, in which order they do it, and a whole small one."""

import json
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from loopdropout_trainer.evaluation import BenchmarkResult, Prediction, load_benchmark
from loopdropout_trainer.runs.measuring import answer_batches, verdicts
from loopdropout_trainer.runs.replication import Results, claims_table, interval, marks, write_document
from loopdropout_trainer.runs.study import Study, StudyArguments
from loopdropout_trainer.settings.arguments import TINY_OURO_PATH
from loopdropout_trainer.settings.recipe import RecipeError, load_recipe


ROOT = Path(__file__).parents[1]


def arguments(folder, **changes):
    given = {
        "recipe": str(ROOT / "recipes/quickstart.yaml"),
        "methods": {"lora": {"rule": "lora", "p": None}, "ours": {}, "plus": {"rule": "lora", "p": None}},
        "parts": {
            "first": {"methods": ["lora", "ours"], "seeds": [1, 2]},
            "second": {"methods": ["lora", "plus"], "seeds": [1, 2, 3]},
            "grid": {"methods": ["ours"], "seeds": [1, 2], "full_grid": True, "learning_rates": [0.1, 0.2]},
        },
        "learning_rates": [0.1, 0.2],
        "rate_factors": {"plus": 0.5},
        "measure": {"benchmarks": ["arithmetic_test"]},
        "minutes": {"default": 60, "plus": 30},
        "output_dir": str(folder),
    }
    return StudyArguments(**{**given, **changes})


def finish(job, score=1, **more):
    job.results.parent.mkdir(parents=True, exist_ok=True)
    counts = {"score": score, "correct": score, "total": 100}
    job.results.write_text(json.dumps({"benchmarks": {"development": counts}, **more}))


def test_a_plan_counts_each_run_once(tmp_path):
    study = Study(arguments(tmp_path), ROOT / "recipes")
    first, second, grid = (study.planned_runs(part) for part in study.parts.values())
    assert (len(first), len(second), len(grid)) == (6, 8, 4)
    assert (
        len(second - first) == 5
    )  # LoRA's grid and its second seed are there; ("lora", "chosen", "3") and plus are new
    assert ("plus", "0.05", "1") in second
    assert study.hours(first) == 6 and study.hours(second) == 4 + 2
    assert study.hours({("lora", "0.1", "1")}) == 1


def test_it_goes_on_seed_by_seed(tmp_path):
    study = Study(arguments(tmp_path, only=["first"]), ROOT / "recipes", ("python", "study.py", "x.yaml"))
    study.write_recipes()
    ((_, sweep),) = study.sweeps()
    order = []
    while (job := next(sweep.ready_jobs(), None)) is not None:
        order.append(str(job.results.relative_to(tmp_path)))
        if job.results.name == "measured.json":
            assert job.command[:3] == ("python", "study.py", "x.yaml")
            assert job.command[-2:] == ("--measure_adapter", str(job.results.parent))
        finish(job, score=2 if "lr_0.2" in str(job.results) else 1)
    assert order == [
        *(f"lora/lr_{rate}/seed_1/results.json" for rate in (0.1, 0.2)),
        "lora/lr_0.2/seed_1/measured.json",
        *(f"ours/lr_{rate}/seed_1/results.json" for rate in (0.1, 0.2)),
        "ours/lr_0.2/seed_1/measured.json",
        *(f"{name}/lr_0.2/seed_2/{file}.json" for name in ("lora", "ours") for file in ("results", "measured")),
    ]


def test_a_methods_recipe_is_whole(tmp_path):
    given = {"lora": {"rule": "lora", "p": None}, "table": str(ROOT / "recipes/gsm8k/lora_plus.yaml")}
    parts = {"all": {"methods": ["lora", "table"], "seeds": [1]}}
    study = Study(
        arguments(tmp_path, methods=given, parts=parts, rate_factors=None, settings={"max_length": 99}),
        ROOT / "recipes",
    )
    study.write_recipes()
    lora, table = (load_recipe(study.recipe_path(name)) for name in given)
    assert (lora["rule"], lora["p"], lora["max_length"], lora["preparation"]) == ("lora", None, 99, "arithmetic")
    assert (table["loraplus_lr_ratio"], table["preparation"], table["max_length"]) == (4, "gsm8k", 99)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": {"x": {"methods": ["lroa"], "seeds": [1]}}}, "names `lroa`, which is not among the methods lora"),
        ({"parts": {"x": {"methods": ["lora"]}}}, "The part `x` must have `methods` and `seeds`"),
        (
            {"parts": {"x": {"methods": ["lora"], "seeds": [1], "rate": 2}}},
            "may have `full_grid`, `learning_rates`, `measure`",
        ),
        ({"scale": "huge"}, "`scale` must be among none; got 'huge'"),
        ({"scale": "a", "scales": {"a": {"sedes": 1}}}, "`scales`, a:"),
        ({"only": ["third"]}, "`only` must be among first, second, grid; got 'third'"),
        ({"measure": {"depths": [1]}}, "`measure` must name one or more `benchmarks`"),
        ({"measure": {"benchmark": ["x"]}}, "`measure`:"),
    ],
)
def test_a_mistake_is_named(changes, message, tmp_path):
    with pytest.raises(RecipeError) as error:
        Study(arguments(tmp_path, **changes), ROOT / "recipes")
    assert message in str(error.value)


def test_a_method_is_measured_as_its_first_part_says(tmp_path):
    parts = {
        "whole": {"methods": ["lora"], "seeds": [1]},
        "brief": {"methods": ["lora", "ours"], "seeds": [1], "measure": {"depths": [], "limit": 5}},
    }
    measure = {"benchmarks": ["arithmetic_test"], "depths": [1, 2], "limit": 9}
    study = Study(arguments(tmp_path, parts=parts, measure=measure, rate_factors=None), ROOT / "recipes")
    found = {method: (m.benchmarks, m.depths, m.limit) for method, m in study.measure.items()}
    assert found == {"lora": (["arithmetic_test"], [1, 2], 9), "ours": (["arithmetic_test"], [], 5)}


def test_verdicts_keep_every_problem():
    right = [True, False, False, True, True, False]
    result = BenchmarkResult("x", [Prediction("", "", "", None, correct) for correct in right])
    kept = verdicts(result)
    assert kept["right"] == "98"  # 1001 10(00)
    assert (kept["correct"], kept["total"]) == (3, 6)


def test_labels_stand_on_the_answers():
    tokenizer = AutoTokenizer.from_pretrained(TINY_OURO_PATH)
    problems = load_benchmark("arithmetic_test", limit=5)
    first, last = answer_batches(tokenizer, problems, batch_size=4)
    assert last["input_ids"].shape[0] == 1
    for row, (prompt, answer) in enumerate(zip(problems.prompts[:4], problems.references[:4], strict=True)):
        kept = first["labels"][row] != -100
        assert (first["labels"][row][kept] == first["input_ids"][row][kept]).all()
        assert tokenizer.decode(first["labels"][row][kept]) == f" {answer}{tokenizer.eos_token}"
        assert tokenizer.decode(first["input_ids"][row][first["attention_mask"][row].bool() & ~kept]) == prompt


def test_a_small_study_is_killed_and_continued_and_writes_its_document(tmp_path, monkeypatch):
    """Two methods trained and measured by the study's own command; what was done before the kill is not done again."""
    command = [sys.executable, "recipes/study.py", "recipes/studies/small.yaml", "--scale", "smoke"]
    command += ["--output_dir", str(tmp_path / "study"), "--results", str(tmp_path / "small.json")]
    with (tmp_path / "log").open("w") as log:
        killed = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        deadline = time.time() + 300
        while "loop_dropout.yaml" not in (tmp_path / "log").read_text():  # its training has begun
            assert killed.poll() is None and time.time() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    before = commands_in((tmp_path / "log").read_text())
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    after = commands_in(done.stdout)
    assert len(before) == 3 and len(after) == 2 and after[0] == before[2]
    document = (tmp_path / "study_smoke/replication.md").read_text()
    assert "| Loop Dropout answers more at the training depth | +1.90 |" in document
    collected = json.loads((tmp_path / "small.json").read_text())
    assert [run["method"] for run in collected["runs"]] == ["lora", "loop_dropout"]
    assert collected["chosen_rates"] == {"lora": 0.004, "loop_dropout": 0.004}
    for run in collected["runs"]:
        measured = run["measured"]
        assert measured["benchmarks"]["arithmetic_test"]["total"] == 8
        assert {depth: counts["total"] for depth, counts in measured["by_depth"].items()} == {"2": 4, "4": 4}
        assert [counts["total"] for counts in measured["single_loop_answers"]] == [4] * 4
        assert {dose: counts["total"] for dose, counts in measured["by_dose"].items()} == {"2": 4}
        assert len(measured["readouts"]) == len(measured["single_loop"]["only"]) == 4
        assert measured["readouts"][-1] == pytest.approx(measured["single_loop"]["all_on"], rel=1e-4)
    (tmp_path / "small.json").unlink()
    monkeypatch.chdir(ROOT)
    runpy.run_path("recipes/study.py")["main"]([*command[2:], "--collect_only", "true"])
    assert json.loads((tmp_path / "small.json").read_text()) == collected


def commands_in(printed):
    return [line for line in printed.splitlines() if line.startswith("$ ")]


def test_the_full_size_study_says_what_it_takes_and_what_can_start(tmp_path, monkeypatch, capsys):
    main = runpy.run_path(str(ROOT / "recipes/study.py"))["main"]
    words = [str(ROOT / "recipes/studies/ouro_1.4b.yaml"), "--output_dir", str(tmp_path)]
    main([*words, "--dry_run", "true"])
    table = capsys.readouterr().out
    assert "hours of one H100" in table
    rows = {line.split()[1]: line.split()[-2] for line in table.splitlines() if line.startswith("│")}
    # LoRA, LoRA+, rsLoRA, CoTo, LoRA Dropout, input dropout, Loop Dropout: 5 rates and 2 seeds each, the paper's minutes
    minutes = 110.6 + 112.8 + 128.9 + 94.1 + 444.9 + 128.9 + 128.9
    assert float(rows["main"]) == pytest.approx(7 * minutes / 60, abs=0.1)
    assert float(rows["all"]) > float(rows["main"])
    assert not list(tmp_path.iterdir())
    main([*words, "--print_commands", "true", "--only", "main"])
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(commands) == 7 * 5  # one seed at five rates; the others wait for the choice
    assert all(Path(command[1]).name == "sft.py" and Path(command[2]).exists() for command in commands)
    assert len({command[command.index("--output_dir") + 1] for command in commands}) == 35


@pytest.mark.parametrize("study, runs", [("small", 213), ("depth", 20), ("larger", 15)])
def test_the_tiny_studies_say_what_they_take(study, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    main = runpy.run_path("recipes/study.py")["main"]
    main([f"recipes/studies/{study}.yaml", "--output_dir", str(tmp_path), "--dry_run", "true"])
    last = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ all")]
    assert last and int(last[0].split()[-4]) == runs


def test_a_document_without_a_place_for_the_tables_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.md").write_text("# Mine\n")
    words = ["recipes/studies/small.yaml", "--scale", "smoke", "--output_dir", str(tmp_path / "study")]
    with pytest.raises(ValueError, match="must have the marks <!-- paper: begin -->"):
        runpy.run_path("recipes/study.py")["main"]([*words, "--document", str(tmp_path / "mine.md")])
    assert not (tmp_path / "study_smoke").exists() and (tmp_path / "mine.md").read_text() == "# Mine\n"


# The document


def run_of(method, seed, right, by_depth=None, only=(1.0, 1.0), readouts=(1.0, 1.0), rate=0.1):
    counts = {"total": 8, "right": f"{right:02x}", "score": 12.5 * right.bit_count()}
    measured = {
        "benchmarks": {"arithmetic_test": counts},
        "by_depth": {str(depth): {**counts, "right": f"{value:02x}"} for depth, value in (by_depth or {}).items()},
        "single_loop": {"frozen": 2.0, "only": list(only), "all_on": 0.1},
        "readouts": list(readouts),
    }
    return {"method": method, "seed": seed, "rate": rate, "measured": measured}


def results(*runs, chosen=None):
    measure = {"benchmarks": ["arithmetic_test"]}
    return Results.of({"runs": list(runs), "chosen_rates": chosen or {}, "measure": measure})


def rows(of_study):
    lines = [line.strip("| ").split(" | ") for line in claims_table(of_study).splitlines()[2:]]
    return {cells[0]: cells for cells in lines}


def test_claims_say_what_the_numbers_show():
    runs = []
    for seed in (1, 2, 3):  # Loop Dropout answers 8 of 8 problems, LoRA 4; alone, LoRA's update does more in loop 1
        runs.append(run_of("lora", seed, 0xF0, {4: 0xF0, 8: 0xF0}, only=(1.0, 1.8), readouts=(1.0, 0.5)))
        runs.append(run_of("loop_dropout", seed, 0xFF, {4: 0xFF, 8: 0x0F}, only=(1.2, 1.3), readouts=(0.9, 0.5)))
    table = rows(results(*runs))
    claim = table["Loop Dropout answers more at the training depth"]
    assert claim[2].startswith("+50.00 [") and claim[4] == "seen"
    late = table["LoRA's update does more in the last loop than in the first: rho_K - rho_1"]
    assert late[2:] == ["-40.00 [-40.00, -40.00] points", "3, 0.00", "not seen"]
    assert table["Loop Dropout levels it: LoRA's max - min of rho_t, less its own"][2].startswith("+35.00")
    assert table["It answers more at twice the training depth"][4] == "undecided"  # 4 of 8 each, other problems
    assert table["The readout of loop 1 has less loss"][2:] == ["+0.100 [+0.100, +0.100] nats", "3, 0.000", "seen"]
    assert table["The readout of loop 2 has less loss"][4] == "not seen"
    assert table["Against CoTo"][2:] == ["-", "-", "not run"]


def test_two_seeds_decide_nothing():
    runs = [run_of(method, seed, right) for seed in (1, 2) for method, right in (("lora", 0), ("loop_dropout", 0xFF))]
    claim = rows(results(*runs))["Loop Dropout answers more at the training depth"]
    assert claim[2:] == ["+100.00 [+100.00, +100.00] points", "2, 0.00", "undecided"]


def test_the_chosen_rate_counts_and_seeds_are_paired():
    runs = [run_of("lora", seed, 0x0F, rate=0.1) for seed in (1, 2, 3)]
    runs += [run_of("lora", seed, 0xFF, rate=0.2) for seed in (1, 2)]
    runs += [run_of("loop_dropout", seed, 0xFF, rate=0.2) for seed in (2, 3)]
    claim = "Loop Dropout answers more at the training depth"
    assert rows(results(*runs, chosen={"lora": 0.2}))[claim][2:4] == ["+0.00 [+0.00, +0.00] points", "1, -"]
    assert rows(results(*runs))[claim][3].startswith("2, ")  # the rate with most seeds: seeds 2 and 3


def test_methods_are_compared_at_each_common_rate():
    runs = [run_of("lora", seed, 0x0F, rate=rate) for seed in (1, 2, 3) for rate in (0.002, 0.008)]
    runs += [run_of("loop_dropout", seed, 0x1F, rate=0.002) for seed in (1, 2, 3)]
    table = rows(results(*runs, chosen={"lora": 0.008, "loop_dropout": 0.002}))
    assert table["It answers more when both train at the rate 0.002"][2].startswith("+12.50 [")
    assert table["It answers more when both train at the rate 0.008"][4] == "not run"


def test_a_bootstrap_interval_is_the_normal_one():
    rng = np.random.default_rng(1)
    values = rng.normal(2.0, 1.0, (1, 400))
    low, high = interval(values)
    error = values.std() / 20
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.3 * error)


def test_the_document_keeps_what_is_around_the_results(tmp_path):
    document, file = tmp_path / "doc.md", tmp_path / "small.json"
    (begin, end), (other, _) = marks("paper"), marks("depths")
    document.write_text(f"# Title\n\n{begin}\nold\n{end}\n\nThe end.\n")
    runs = [run_of("lora", 1, 0xF0), run_of("loop_dropout", 1, 0xFF)]
    runs[0]["measured"]["benchmarks"]["more"] = {"score": 30.0}  # the other method was not asked
    runs[0]["measured"]["by_dose"] = {"2": {"score": 40.0}}
    scores = (("lora", 0.1, 40.0), ("loop_dropout", 0.1, 20.0), ("loop_dropout", 0.2, 30.0))
    only_chosen = {"method": "loop_dropout", "seed": 1, "rate": 0.2}
    for run, (_, _, score) in zip([*runs, only_chosen], scores, strict=True):
        run["development"] = {"development": {"score": score}}
    runs.append(only_chosen)
    file.write_text(
        json.dumps(
            {
                "claims": "paper",
                "runs": runs,
                "chosen_rates": {"loop_dropout": 0.2},
                "measure": {"benchmarks": ["arithmetic_test"]},
            }
        )
    )
    for _ in range(2):
        write_document(file, document)
        text = document.read_text()
        assert text.startswith("# Title\n\n") and text.endswith("\n\nThe end.\n") and "old" not in text
        assert "| loop_dropout | 0.1 | 1 | 100.0 | - |" in text and "| lora | 0.1 | 1 | 50.0 | 30.0 |" in text
        assert "| method | seeds | 2 in all loops |\n|---|---|---|\n| lora | 1 | 40.0 |\n" in text
        assert "| loop_dropout | 0.1: 20.0, 0.2: **30.0** |" in text
        assert "3 of at most 3 trainings have run, and 2 of their adapters are measured." in text
    write_document(file, tmp_path / "new.md")
    assert "| loop_dropout | 0.1 | 1 | 100.0 | - |" in (tmp_path / "new.md").read_text()
    document.write_text(other)
    with pytest.raises(ValueError, match="must have the marks"):
        write_document(file, document)
