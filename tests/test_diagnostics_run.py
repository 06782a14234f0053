"""recipes/diagnose.py: all diagnostics of two adapters, what it leaves on disk, what it refuses, and how it goes on."""

import copy
import json
import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import tiny_ouro
from test_diagnostics_measures import adapted

from loopdropout_trainer.data.arithmetic import arithmetic_problems
from loopdropout_trainer.diagnostics import DIAGNOSTICS, single_loop_activation
from loopdropout_trainer.diagnostics.arguments import DiagnosticArguments, RowArguments
from loopdropout_trainer.diagnostics.compared import find_models
from loopdropout_trainer.diagnostics.completions import compare_seeds
from loopdropout_trainer.diagnostics.losses import SingleLoop
from loopdropout_trainer.diagnostics.rows import load_rows_to_score
from loopdropout_trainer.evaluation.answer_log import SettingsChangedError
from loopdropout_trainer.saving.adapter_files import ADAPTER_METADATA
from loopdropout_trainer.settings.recipe import RecipeError


ROOT = Path(__file__).parents[1]
GENERATING = ("single_loop_generation", "depth_generation", "answers")
MEASURED = {
    "single_loop": {"frozen", "only", "all_on", "reductions_percent", "all_on_reduction_percent"},
    "patterns": {"frozen", "patterns"},
    "dose": {"doses", "losses", "reductions_percent"},
    "readouts": {"losses", "accuracies_percent"},
    "depth": {"depths", "losses", "accuracies_percent", "relative_compute"},
    "updates": {"states", "relative_sizes", "cosines"},
    "settling": {"states", "state_distances", "readout_divergences", "agreements_percent"},
    "similarity": {"states", "cka", "num_tokens"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """A base, its two adapters (one with two seeds), a merged model, and a recipe that holds 6 rows out."""
    folder = tmp_path_factory.mktemp("saved")
    base = tiny_ouro()
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    settings = f"model_name_or_path: {folder / 'base'}\npreparation: arithmetic\nnum_train_examples: 20\n"
    for seed, name in enumerate(("lora", "dropout_1", "dropout_2"), start=1):
        adapted(copy.deepcopy(base), seed).save_pretrained(folder / name)
        rule = "lora" if name == "lora" else "loop_dropout"
        facts = {"num_loops": 4, "rule": rule, "p": None if name == "lora" else 0.5}
        (folder / name / ADAPTER_METADATA).write_text(json.dumps(facts))
        trained = {**yaml.safe_load(settings), "seed": seed}
        (folder / name / "results.json").write_text(json.dumps({"run_info": {"settings": trained}}))
    adapted(copy.deepcopy(base), 1).merge_and_unload().save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder / "merged")
    (folder / "recipe.yaml").write_text(
        f"{settings}num_eval_examples: 6\nmax_length: 512\ndtype: float32\nuse_cpu: true\nlearning_rate: 1.0e-4\n"
        "benchmarks: [arithmetic_test]\nbenchmark_limit: 4\nbenchmark_batch_size: 4\nrows_batch_size: 4\n"
    )
    return folder


def script():
    spec = spec_from_file_location("diagnose_script", ROOT / "recipes" / "diagnose.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def diagnose(saved):
    """`diagnose(output_dir, *options)` runs the script on the recipe and its adapters."""

    def run(output_dir, *options, adapters=("LoRA=lora", "Loop Dropout=dropout_1", "Loop Dropout=dropout_2")):
        named = [adapter.replace("=", f"={saved}/") for adapter in adapters]
        script().main([str(saved / "recipe.yaml"), "--output_dir", str(output_dir), "--adapters", *named, *options])
        files = (Path(output_dir) / "diagnostics").glob("*.json")
        return {file.stem: json.loads(file.read_text()) for file in files}

    return run


@pytest.fixture(scope="module")
def everything(diagnose, saved, tmp_path_factory):
    """All that reads rows, once: folder, printed text, files by name."""
    from contextlib import redirect_stdout
    from io import StringIO

    folder, text = tmp_path_factory.mktemp("everything"), StringIO()
    with redirect_stdout(text):
        options = ("--models", f"Merged={saved / 'merged'}", "--diagnostics", *MEASURED, "--depths", "1", "4", "6")
        files = diagnose(folder, *options)
    return folder / "diagnostics", text.getvalue(), files


def test_every_diagnostic_leaves_what_is_documented(everything):
    folder, printed, files = everything
    assert set(files) == set(MEASURED) == set(DIAGNOSTICS) - set(GENERATING) - {"last_two"}
    documented = (ROOT / "docs" / "diagnostics.md").read_text()
    for name, content in files.items():
        assert content["schema"] == 1 and content["diagnostic"] == name and content["settings"]["num_loops"] == 4
        assert content["settings"]["rows"]["num_rows"] == 6
        gated = DIAGNOSTICS[name].needs_adapter
        methods = [run["method"] for run in content["runs"]]
        assert methods == ([] if gated else ["base"]) + ["LoRA"] + ["Loop Dropout"] * 2 + ([] if gated else ["Merged"])
        assert [each["method"] for each in content["left_out"]] == (["base", "Merged"] if gated else [])
        for run in content["runs"]:
            assert set(run["measured"]) == MEASURED[name]
        dropout = next(run for run in content["runs"] if run["method"] == "Loop Dropout")
        facts = [dropout[name] for name in ("seed", "rule", "p", "train_num_loops")]
        assert facts == [2, "loop_dropout", 0.5, 4]
        for field in MEASURED[name] | {name}:
            assert f"`{field}`" in documented
    assert {path.stem for path in (folder / "figures").glob("*.png")} >= {*MEASURED} - {
        "similarity",
        "readouts",
        "depth",
    }


def test_the_numbers_are_those_of_the_functions(everything, saved, tokenizer):
    """From the folders, without the run: losses of the first adapter, and equality of an adapter and its merged model."""
    _, _, files = everything
    data = {"preparation": "arithmetic", "num_train_examples": 20, "num_eval_examples": 6, "max_length": 512}
    rows = load_rows_to_score(RowArguments(**data, rows_batch_size=3), tokenizer)
    want = single_loop_activation(adapted(tiny_ouro(), 1), rows.batches)
    found = files["single_loop"]["runs"][0]["measured"]
    assert found["only"] == pytest.approx(want.only, abs=1e-5) and found["frozen"] == pytest.approx(want.frozen)
    for name in ("readouts", "depth", "settling", "similarity"):
        runs = {run["method"]: run["measured"] for run in files[name]["runs"]}
        for key, value in runs["Merged"].items():
            if key != "states":
                assert np.array(value) == pytest.approx(np.array(runs["LoRA"][key]), abs=2e-3)
    base = next(run for run in files["readouts"]["runs"] if run["kind"] == "base")
    assert base["measured"]["losses"][3] == pytest.approx(want.frozen, abs=1e-5)


def test_seeds_become_mean_and_sample_standard_deviation(everything):
    _, printed, files = everything
    a, b = (run["measured"]["all_on"] for run in files["single_loop"]["runs"][1:])
    mean, sd = (a + b) / 2, abs(a - b) / 2**0.5
    assert any(f"{mean:.4f} ± {sd:.4f}" in line for line in printed.splitlines() if line.startswith("loss, gates all"))


def test_a_killed_run_goes_on_and_other_rows_are_measured_anew(diagnose, tmp_path, monkeypatch):
    names = ("--diagnostics", "single_loop", "readouts")
    before = diagnose(tmp_path, *names)
    parts = tmp_path / "diagnostics" / "parts" / "single_loop"
    third = before["single_loop"]["runs"][2]["measured"]
    (lost,) = (part for part in parts.iterdir() if json.loads(part.read_text())["found"]["measured"] == third)
    lost.write_text("{")  # damaged
    (tmp_path / "diagnostics" / "single_loop.json").unlink()
    measured = []
    original = SingleLoop.measure
    monkeypatch.setattr(
        SingleLoop, "measure", lambda self, context: measured.append(context.rows.identity) or original(self, context)
    )
    assert _without_seconds(diagnose(tmp_path, *names)) == _without_seconds(before) and len(measured) == 1
    fewer = diagnose(tmp_path, *names, "--num_rows", "3")
    assert fewer["single_loop"]["settings"]["rows"]["num_rows"] == 3 and len(measured) == 4
    assert _without_seconds(diagnose(tmp_path, *names)) == _without_seconds(before) and len(measured) == 4


def _without_seconds(files):
    for content in files.values():
        for run in content["runs"]:
            run.pop("seconds", None)
    return files


@pytest.fixture
def other(saved):
    """`other(name, change)`: a copy of the first adapter, with changed settings of its training."""

    def copied(name, weights=True, **changed):
        shutil.copytree(saved / "lora", saved / name, dirs_exist_ok=True)
        results = json.loads((saved / name / "results.json").read_text())
        results["run_info"]["settings"] |= changed
        (saved / name / "results.json").write_text(json.dumps(results))
        if weights:
            adapted(tiny_ouro(), 9).save_pretrained(saved / name)
        return name

    return copied


@pytest.mark.parametrize(
    ("weights", "changed", "message"),
    [
        (True, {"num_train_examples": 40}, "`num_train_examples` was 20 .* 40 in the other"),
        (True, {"model_name_or_path": "ByteDance/Ouro-1.4B"}, "`model_name_or_path` ByteDance/Ouro-1.4B"),
        (False, {"seed": 7}, "`LoRA` .* and `LoRA` .* hold the same weights"),
    ],
)
def test_adapters_that_cannot_be_compared_are_refused(diagnose, other, tmp_path, weights, changed, message):
    with pytest.raises(RecipeError, match=message) as caught:
        diagnose(
            tmp_path / "out",
            "--diagnostics",
            "dose",
            adapters=("LoRA=lora", f"LoRA={other('copy', weights, **changed)}"),
        )
    assert "\n" not in str(caught.value)


def test_adapters_of_several_training_depths_are_methods_of_their_own(saved, tmp_path):
    paths = []
    for name, depth in (("lora", 4), ("dropout_1", 6), ("dropout_2", 6)):
        paths.append(f"LoRA={shutil.copytree(saved / name, tmp_path / name)}")
        (tmp_path / name / ADAPTER_METADATA).write_text(json.dumps({"num_loops": depth}))

    def methods(adapters):
        return [each.method for each in find_models(DiagnosticArguments(adapters=adapters), str(saved / "base"))]

    assert methods(paths) == ["base", "LoRA (K = 4)", "LoRA (K = 6)", "LoRA (K = 6)"]
    assert methods(paths[1:]) == ["base", "LoRA", "LoRA"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--diagnostics", "doses"], "`diagnostics` must be among .*dose.*; got 'doses'"),
        (["--import", "missing.py"], "`import` names missing.py, which cannot be imported"),
        (["--evaluations", "Other=x.json"], "`evaluations` names x.json for `Other`"),
        (["--evaluations", "LoRA=FILE", "--diagnostics", "answers"], "is not a results file"),
        (["--models", "Merged"], r"`models` takes name=path; got 'Merged'"),
        (["--models", "LoRA=x"], "`LoRA` names an adapter and a merged model"),
        (["--models", "base=x"], "`models` must not name one `base`"),
        (["--adapters", "LoRA=nowhere"], "adapter nowhere cannot be loaded"),
        (["--depths", "0"], "`depths` must be"),
        (["--depths", "100000"], "`depths` must be"),
        (["--num_rows", "0"], "`num_rows` must be"),
        (["--rows", "gsm9k"], "must be among"),
        (["--rows", "gsm8k", "--benchmark_files", '{"gsm8k": "nowhere.jsonl"}'], "nowhere.jsonl"),
        (["--rows", "gsm8k", "--benchmark_files", '{"gsm8k": "FILE"}'], "row 1"),
        (["--rows", "development"], "must be among"),
    ],
)
def test_mistakes_are_one_sentence(diagnose, tmp_path, options, message):
    (tmp_path / "bad.jsonl").write_text('{"question": 3, "rows": []}\n')
    options = [option.replace("FILE", str(tmp_path / "bad.jsonl")) for option in options]
    with pytest.raises(ValueError, match=message) as caught:
        diagnose(tmp_path / "out", *options)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").rglob("*.json"))


def test_a_broken_results_file_beside_an_adapter_is_one_sentence(diagnose, saved, other, tmp_path):
    for broken in ("{", "[]", '{"run_info": {"settings": 3}}'):
        (saved / other("broken") / "results.json").write_text(broken)
        with pytest.raises(RecipeError, match="results.json is not the results file of a training"):
            diagnose(tmp_path, "--diagnostics", "dose", adapters=("LoRA=broken",))


def test_a_recipe_runs_no_code(saved, tmp_path):
    (tmp_path / "code.py").write_text("raise SystemExit('run')")
    recipe = (saved / "recipe.yaml").read_text() + f"imports: [{tmp_path / 'code.py'}]\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    with pytest.raises(RecipeError, match="`imports`.*command line"):
        script().main([str(tmp_path / "recipe.yaml"), "--adapters", f"LoRA={saved / 'lora'}"])


def test_a_diagnostic_of_ones_own_is_one_file(diagnose, tmp_path, capsys):
    """The example of the documentation, saved in a folder of its own."""
    text = (ROOT / "docs" / "diagnostics.md").read_text()
    code = text.split("## A diagnostic of your own")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "my_diagnostic.py").write_text(code)
    try:
        options = ("--import", str(tmp_path / "my_diagnostic.py"), "--diagnostics", "last_two", "patterns")
        files = diagnose(tmp_path, *options, adapters=("LoRA=lora",))
    finally:
        DIAGNOSTICS.pop("last_two", None)
    patterns = {tuple(each["loops"]): each["loss"] for each in files["patterns"]["runs"][0]["measured"]["patterns"]}
    (run,) = files["last_two"]["runs"]
    assert run["measured"]["losses"] == pytest.approx([patterns[3, 4], patterns[1, 2, 3, 4]])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("last_two.losses"))
    assert f"{run['measured']['losses'][0]:.4f}" in line


def test_answers_are_generated_once_under_the_gates_that_are_asked_for(diagnose, saved, tokenizer, tmp_path):
    from loopdropout_trainer import use_gates
    from loopdropout_trainer.evaluation import evaluate_benchmark, load_benchmark

    files = diagnose(tmp_path, "--diagnostics", *GENERATING, "--depths", "2", "4", adapters=("LoRA=lora",))
    benchmark = load_benchmark("arithmetic_test", limit=4)
    model = adapted(tiny_ouro(), 1)
    of = {name: next(r for r in files[name]["runs"] if r["method"] == "LoRA")["measured"] for name in GENERATING}
    generated = tmp_path / "diagnostics" / "parts" / "generated" / "arithmetic_test"
    settings = {folder: json.loads((folder / "settings.json").read_text()) for folder in generated.iterdir()}
    gates = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    adapter = [(s["num_loops"], s["gates"]) for s in settings.values() if s["adapter"]]
    assert sorted(adapter, key=str) == sorted([(4, None), (2, None), *((4, each) for each in gates)], key=str)
    all_on = evaluate_benchmark(model, tokenizer, benchmark, progress=False)
    answers = of["answers"]["arithmetic_test"]
    assert [each["completion"] for each in answers["problems"]] == [p.completion for p in all_on.predictions]
    assert [answers[key] for key in ("correct", "missing", "total")] == [all_on.correct, all_on.missing, 4]
    with use_gates(model, [0.0, 1.0, 0.0, 0.0]):
        only_2 = evaluate_benchmark(model, tokenizer, benchmark, progress=False)
    (of_2,) = (folder for folder, s in settings.items() if s["gates"] == [0, 1, 0, 0])
    kept = [json.loads(line)["answer"] for line in (of_2 / "00000.jsonl").read_text().splitlines()]
    assert sorted(kept) == sorted(p.completion for p in only_2.predictions)
    assert only_2.predictions != all_on.predictions
    steps = [problem["num_steps"] for problem in arithmetic_problems("test", 4)]
    totals = {group: each["total"] for group, each in answers["groups"]["num_steps"].items()}
    assert totals == {str(step): steps.count(step) for step in set(steps)}


def run_of(seed, *problems):
    """A run's JSON: each problem is (extracted, correct)."""
    listed = [{"extracted": extracted, "correct": correct, "completion": ""} for extracted, correct in problems]
    return {"seed": seed, "measured": {"math": {"problems": listed}}}


def test_differences_split_and_flips_are_listed():
    a = [run_of(2, (1, True), (None, False), (2, False), (3, False)), run_of(1, *((i, True) for i in (1, 2, 3, 4)))]
    b = [
        run_of(1, (1, True), (2, True), (None, False), (9, False)),
        run_of(2, (5, False), *((i, True) for i in (4, 2, 3))),
    ]
    first, second = compare_seeds(a, b, "math")
    assert first["seeds"] == [1, 1] and second["seeds"] == [2, 2]
    assert (first["fixed"], first["broken"], first["difference"]) == ([], [2, 3], -50)
    assert (first["both_extractable"], first["missing_in_either"]) == (-25, -25)
    assert (second["fixed"], second["broken"], second["difference"]) == ([1, 2, 3], [0], 50)
    assert (second["both_extractable"], second["missing_in_either"]) == (25, 25)
    assert second["p_value"] == pytest.approx(2 * (1 + 4) / 16)  # at most 1 of 4, both sides
    base = run_of(None, *[(None, False)] * 4)
    assert [pair["seeds"] for pair in compare_seeds([base], b, "math")] == [[None, 1], [None, 2]]


def test_answers_of_an_evaluation_are_taken_if_they_are_to_the_same_problems(diagnose, saved, tmp_path, monkeypatch):
    from loopdropout_trainer.evaluation.run import EvaluationArguments, run_evaluation
    from loopdropout_trainer.settings.arguments import ModelArguments

    model = ModelArguments(str(saved / "base"), dtype="float32")
    for limit in (4, 3):
        of = {"adapter": str(saved / "lora"), "output_dir": str(tmp_path / str(limit))}
        run_evaluation(model, EvaluationArguments(benchmarks=["arithmetic_test"], benchmark_limit=limit, **of))
    file = tmp_path / "4" / "evaluation.json"
    generated = diagnose(tmp_path / "a", "--diagnostics", "answers", adapters=("LoRA=lora",))
    options = ("--diagnostics", "answers", "--evaluations")
    taken = diagnose(tmp_path / "b", *options, f"LoRA={file}", adapters=("LoRA=lora",))
    assert len(list((tmp_path / "b" / "diagnostics" / "parts" / "generated" / "arithmetic_test").iterdir())) == 1
    assert taken["answers"]["runs"][1]["measured"] == generated["answers"]["runs"][1]["measured"]
    with pytest.raises(SettingsChangedError, match="`problems_sha256` was"):
        other_problems = tmp_path / "3" / "evaluation.json"
        diagnose(tmp_path / "c", *options, f"LoRA={other_problems}", adapters=("LoRA=lora",))
    with pytest.raises(SettingsChangedError, match="`adapter` was"):
        diagnose(tmp_path / "c", *options, f"LoRA={file}", adapters=("LoRA=dropout_1",))


@pytest.mark.slow
def test_two_processes_find_what_one_finds(diagnose, saved, tmp_path):
    names = ["single_loop", "readouts", "updates", "similarity", "depth", "answers"]
    one = diagnose(tmp_path / "one", "--diagnostics", *names, "--depths", "1", "5")
    adapters = [f"{name}={saved / folder}" for name, folder in (("LoRA", "lora"), ("Loop Dropout", "dropout_1"))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "recipes" / "diagnose.py"), str(saved / "recipe.yaml"), "--adapters", *adapters]
    command += [f"Loop Dropout={saved / 'dropout_2'}", "--output_dir", str(tmp_path / "two"), "--depths", "1", "5"]
    subprocess.run(
        [*command, "--diagnostics", *names], check=True, timeout=540, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    for name in names:
        two = json.loads((tmp_path / "two" / "diagnostics" / f"{name}.json").read_text())
        assert two["num_processes"] == 2
        for mine, other in zip(one[name]["runs"], two["runs"], strict=True):
            assert mine["measured"] == other["measured"], name
