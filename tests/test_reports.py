"""Reports: the long table, what may be averaged, the paper's tables and figures from folders of sweeps, the page."""

import functools
import gzip
import itertools
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

from loopdropout_trainer.evaluation.results import BenchmarkResult, Metric, Prediction
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.reports import ReportError, load_table, specs
from loopdropout_trainer.reports.averaging import average, difference, select
from loopdropout_trainer.reports.plots import automatic_figures, looks, paper_figure, points, save_figure
from loopdropout_trainer.reports.report import numbers_by_method, summary_tables, write_report
from loopdropout_trainer.reports.specs import best, build_table, load_spec, missing_of
from loopdropout_trainer.reports.statistics import estimate
from loopdropout_trainer.runs.sweep import Sweep, SweepArguments
from loopdropout_trainer.settings.recipe import load_recipe


FILES = sorted((ROOT / "recipes" / "tables").glob("*.yaml"))
TABLES = [path for path in FILES if not path.stem.startswith("figure_")]
FIGURES = [path for path in FILES if path.stem.startswith("figure_")]
PAPER = json.loads(gzip.decompress((ROOT / "tests/golden/eval_stats.json.gz").read_bytes()))["paper"]
SUBJECTS = ("Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra", "Number Theory", "Prealgebra",
            "Precalculus")  # fmt: skip
COUNTS = {"correct": 3, "total": 10}
GROUPS = {"subject": dict.fromkeys(SUBJECTS, COUNTS), "level": dict.fromkeys("12345", COUNTS)}
TOTALS = {"metamath_gsm8k": 40, "metamath_math500": 50, "gsm8k": 40}


# --- stand-in runs: what sft.py, evaluate.py and diagnose.py leave, with numbers of a random generator ------------------


def write_training(folder, settings, **measured):
    folder.mkdir(parents=True, exist_ok=True)
    rule = settings.get("rule", "loop_dropout")
    given = {"p": settings.get("p"), **(settings.get("rule_args") or {})}
    p = getattr(make_rule(rule, **{k: v for k, v in given.items() if v is not None and rule != "lora"}), "p", None)
    train = {
        "rule": rule, "p": list(p) if isinstance(p, tuple) else p, "num_loops": settings.get("num_loops", 4),
        "seed": settings["seed"], "r": settings.get("lora_r", 16), "peak_memory_gb": 2.5, "tokens_per_second": 900.0,
        "train_seconds": 60.0 + settings["seed"] % 7, "trainable_parameters": 1000 * settings.get("lora_r", 16),
        **measured.pop("train_info", {}),
    }  # fmt: skip
    content = {"train_info": train, "run_info": {"settings": settings}, "benchmarks": {}, **measured}
    (folder / "results.json").write_text(json.dumps(content))


def answers(name, total, right, missing=()):
    """Predictions on `total` problems, correct where `right` says so."""
    made = lambda i: (f"{name} {i}", f"it is {i}", str(i), None if i in missing else str(i), bool(right[i]))
    return BenchmarkResult(name, [Prediction(*made(i), id=str(i)) for i in range(total)])


def measured(*results):
    return {each.name: each.as_json() for each in results}


def write_evaluation(folder, adapter, results, depth=4, gates=None, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model": "x/m", "adapter_path": str(adapter), "num_loops": depth, "gates": gates, "readout": None}
    of = {"settings": {"max_new_tokens": 10, "adapter": str(adapter), **settings}}
    row = {"meta_info": about, "train_info": {}, "benchmarks": {k: v | of for k, v in measured(*results).items()}}
    (folder / "evaluation.json").write_text(json.dumps({"format": 2, "rows": {adapter.name: row}}))


def run_sweep(path, outputs, rng, benchmarks=None):
    """Leave the folders of a sweep. Without `full_grid` the middle rate is the chosen one."""
    sweep, arguments = load_recipe(path), SweepArguments(**load_recipe(path))
    folder, measure = outputs / Path(sweep["output_dir"]).name, sweep["measure"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text("{}")
    rates = arguments.learning_rates
    for name, settings in Sweep(arguments).methods.items():
        settings = {key: value for key, value in settings.items() if key != "p" or settings.get("rule") != "lora"}
        factor = (sweep.get("rate_factors") or {}).get(name, 1.0)
        for rate in rates:
            chosen = sweep.get("full_grid") or rate == rates[len(rates) // 2]
            for seed in sweep["seeds"] if chosen else sweep["seeds"][:1]:
                run = folder / name / f"lr_{factor * rate:.6g}" / f"seed_{seed}"
                fields = {**settings, "learning_rate": factor * rate, "seed": seed, "output_dir": str(run)}
                result = lambda name, total: answers(name, total, rng.random(total) < 0.6, missing={0, 1})
                names = (benchmarks or measure["benchmarks"]) if chosen else ["development"]
                found = measured(*(result(each, TOTALS.get(each, 30)) for each in names))
                if "metamath_math500" in found:
                    found["metamath_math500"]["groups"] = GROUPS
                depths = {str(k): result(names[0], 40).as_json() for k in measure.get("depths", ()) if chosen}
                write_training(run, fields, benchmarks=found, by_depth=depths)
    return folder


def single_loop(frozen=2.0, only=(1.8, 1.6, 1.4, 1.0), all_on=0.5):
    reductions = [100 * (1 - loss / frozen) for loss in only]
    return {"frozen": frozen, "only": list(only), "all_on": all_on, "reductions_percent": reductions}


def write_diagnostics(sweep, rng):
    runs = [path.parent for path in sorted(sweep.rglob("results.json")) if "development" not in path.read_text()]
    for run, loop in itertools.product(runs, range(4)):
        only = answers("metamath_gsm8k", 40, rng.random(40) < 0.6)
        write_evaluation(run / f"loop_{loop}", run, [only], gates=[float(each == loop) for each in range(4)])
    entry = lambda run, measured: {"method": "x", "path": str(run), "seed": 1, "measured": measured}
    losses = [entry(run, single_loop(1.0, rng.random(4).tolist(), 0.4)) for run in runs]
    write_diagnostic(sweep, "single_loop", losses, source="metamath_math500")
    readouts = [entry(run, {"losses": rng.random(4).tolist()}) for run in runs]
    write_diagnostic(sweep, "readouts", readouts, source="metamath_math500")


def write_diagnostic(folder, name, runs, num_loops=4, source="held_out"):
    (folder / "diagnostics").mkdir(exist_ok=True)
    settings = {"model": "x/m", "num_loops": num_loops, "rows": {"source": source, "num_rows": 8}}
    content = {"diagnostic": name, "settings": settings, "runs": runs}
    (folder / "diagnostics" / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The long table of all sweeps of recipes/sweeps, and of diagnostics of their runs."""
    folder, rng = tmp_path_factory.mktemp("outputs"), np.random.default_rng(0)
    tulu = ["mmlu", "bbh", "truthfulqa_mc2", "ifeval_strict", "ifeval_loose", "humaneval", "humaneval_plus", "mbpp",
            "mbpp_plus"]  # fmt: skip
    for path in sorted((ROOT / "recipes" / "sweeps").glob("*.yaml")):
        run_sweep(path, folder, rng, tulu if path.stem == "tulu2" else None)
    for name in ("metamath_gsm", "gsm8k_single_loop"):
        write_diagnostics(folder / name, rng)
    found = load_table([folder])
    assert found.attrs["skipped"] == []
    return found


@pytest.fixture(scope="module")
def filled_table(table):
    """`filled_table(path)`: what a file makes of the long table, once for all tests."""
    return functools.cache(lambda path: build_table(load_spec(path), table))


# --- the paper's tables and figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_comes_out_of_what_its_sweeps_leave(path, filled_table):
    filled = filled_table(path)
    assert not filled["missing"].any()
    markdown, tex = specs.markdown(filled), specs.latex(filled)
    assert all(text in markdown for text in [*filled["text"], *filled["paper"]])
    assert tex.count(r"\begin{tabular}") == tex.count(r"\toprule") == 1
    assert rf"\label{{{load_spec(path).label}}}" in tex


def test_every_table_and_figure_of_the_paper_has_a_file():
    labels = {load_spec(path).label for path in FILES}
    tables = """recipes math_main tulu_main matched_expansion single_loop_generation mask_controls sharing_mask
        training_cost_seeds family_comparison control_seeds tulu_all variants rank_results answer_decomposition
        returned_seeds coto_seeds lora_dropout_seeds ouro26_tuned ouro26_tuned_seeds rank_tuned rank_tuned_seeds
        math_rank16_breakdown depth_matrix gsm8k_scale lr_curve transfer depth single_occurrence metamath_readouts"""
    figures = "teaser overview rank_overview depth_gains depth_accuracy early_adaptation"
    assert labels >= {f"tab:{name}" for name in tables.split()} | {f"fig:{name}" for name in figures.split()}
    for command in (command for path in FILES for command in load_spec(path).made_by):
        file = command.split()[2] if " " in command else command
        assert (ROOT / "recipes" / file).is_file(), command


BOLD = """
math_main: 86.53 88.73 47.53 47.20 | tulu_main: 69.92 68.91 48.19 46.46 61.51 | matched_expansion: 86.53 47.53
mask_controls: 87.57 44.00 | family_comparison: 85.52 60.11 40.80 13.80 | tulu_all: 71.00 61.51 63.20
ouro26_tuned: 88.73 47.20
gsm8k_scale: 81.8 81.9 81.2 89.0 88.1 | lr_curve: 82.2 | transfer: 83.8 60.0 83.1 59.4
"""  # what the paper prints in bold; all other tables have nothing of it


def test_bold_is_the_papers(filled_table):
    """Each table's rule of bold, applied to the paper's own means, gives the numbers that the paper prints in bold."""
    want = dict(entry.split(": ") for line in BOLD.strip().splitlines() for entry in line.split(" | "))
    for path in TABLES:
        filled = filled_table(path).copy()
        printed = filled["paper"].str.split().str[0]
        filled["mean"] = printed.where(filled["bold"].map(lambda bold: isinstance(bold, str))).astype(float)
        found = sorted(text.split()[0] for text in filled["paper"][best(filled)])
        assert found == sorted(want.pop(path.stem, "").split()), path.stem
    assert not want
    filled = filled_table(ROOT / "recipes/tables/mask_controls.yaml")
    text = filled["text"][best(filled)].iloc[0]
    assert rf"\textbf{{{text}}}".replace("±", r"$\pm$") in specs.latex(filled)
    assert f"**{text}**" in specs.markdown(filled)


def test_a_benchmark_with_two_metrics_gives_each_column_its_own(tmp_path):
    """HumanEval is not HumanEval+, and IFEval loose not strict, though one benchmark gives both."""
    pairs = {"humaneval_plus": "humaneval", "mbpp_plus": "mbpp", "ifeval_strict": "ifeval_loose"}
    (tmp_path / "tulu2").mkdir()
    (tmp_path / "tulu2" / "sweep.db").touch()
    for seed in (101, 102, 103):
        run = tmp_path / "tulu2" / str(seed)
        write_training(run, {"seed": seed, "rule": "lora"})
        results = [answers(name, 40, [True] * 40) for name in ("mmlu", "bbh", "truthfulqa_mc2")]
        for pair in pairs.items():
            values = [dict(zip(pair, (float(i < 10), float(i < 30)), strict=True)) for i in range(40)]
            rows = [Prediction(f"{i}", "", "", "x", i < 10, id=str(i), values=values[i]) for i in range(40)]
            metrics = {name: Metric.of([row.values[name] for row in rows]) for name in pair}
            results.append(BenchmarkResult(pair[0].removesuffix("_strict"), rows, metrics))
        write_evaluation(run / "test", run, results)
    filled = build_table(load_spec(ROOT / "recipes/tables/tulu_all.yaml"), load_table([tmp_path]))
    found = {row[0]: text for row, text in filled[filled["column"] == "LoRA"][["row", "text"]].values}
    assert found["HumanEval"] == found["MBPP"] == found["IFEval loose"] == "75.00 ± 0.00"
    assert found["HumanEval+"] == found["MBPP+"] == found["IFEval strict"] == "25.00 ± 0.00"
    assert found["Average (9 metrics)"] == f"{(3 * 100 + 3 * 75 + 3 * 25) / 9:.2f} ± 0.00"


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_every_figure_comes_out_of_what_its_sweeps_leave(path, table, filled_table, tmp_path):
    plot = paper_figure(load_spec(path), table)
    for file in save_figure(plot, tmp_path / path.stem):
        assert file.stat().st_size > 3_000
    if path.stem == "figure_depth_gains":
        matrix = filled_table(ROOT / "recipes/tables/depth_matrix.yaml")
        six = matrix[matrix["column"] == "Eval K = 6"].set_index("row")["mean"]
        lora, loop_dropout = six["LoRA", "4"], six["Loop Dropout", "4"]
        gain = plot.data[(plot.data["x"] == "6") & (plot.data["y"] == "4")]["mean"].item()
        assert gain == pytest.approx(loop_dropout - lora)
    if path.stem == "figure_early_adaptation":
        assert plot.data.groupby(["panel", "by"], observed=True).size().tolist() == [4] * 4
    if path.stem == "figure_overview":
        assert set(plot.data["mean"][plot.data["panel"] == "training"]) == {0.0, 2.0}


# --- what is averaged ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", PAPER["mean_sd"])
def test_the_papers_counts_give_what_it_printed(row, tmp_path):
    """Through folders, a table's file and a cell: 86.53 ± 0.44 is 1148, 1139 and 1137 of 1319."""
    for seed, correct in enumerate(row["per_seed_correct"]):
        write_training(tmp_path / str(seed), {"seed": seed, "rule": "lora"})
        result = answers("b", row["n"], np.arange(row["n"]) < correct)
        write_evaluation(tmp_path / str(seed) / "test", tmp_path / str(seed), [result])
    decimals = len(row["mean_printed"].split(".")[1])
    cell = only_cell(tmp_path, f"decimals: {decimals}")
    assert cell.text == f"{row['mean_printed']} ± {row['sd_printed']}"


def only_cell(folder, options="", method="LoRA"):
    path = folder / "one.yaml"
    path.write_text(f"label: tab:x\ntitle: X\ncolumns: {{B: {{metric: b, {options}}}}}\nrows: [[{method}]]\n")
    return build_table(load_spec(path), load_table([folder])).iloc[0]


TWO = "{label: tab:x, title: X, made_by: [sweeps/x.yaml], columns: {B: {metric: b}}, rows: [[LoRA], [Loop Dropout]]}"
BASIC = {"rule": "lora", "p": 0.5, "model_name_or_path": "x/m", "learning_rate": 1e-3}


@pytest.fixture
def two(tmp_path):
    (tmp_path / "two.yaml").write_text(TWO)
    return load_spec(tmp_path / "two.yaml")


@pytest.fixture
def runs(tmp_path):
    for rule in ("lora", "loop_dropout"):
        for seed in (1, 2):
            folder = tmp_path / "runs" / rule / str(seed)
            write_training(folder, {**BASIC, "seed": seed, "rule": rule})
            right = np.arange(30) < 10 + seed + 5 * (rule != "lora")
            write_evaluation(folder / "test", folder, [answers("b", 30, right)])
    return tmp_path / "runs"


def evaluate_again(run, total=30, **settings):
    write_evaluation(run / "test", run, [answers("b", total, [1] * total)], **settings)


def train_again(run, train_info=None, run_is=None, **settings):
    write_training(run, {**BASIC, "seed": 2, **settings}, train_info=train_info or {}, run=run_is or {})


OTHERWISE = {  # what the error names: how the run is changed
    "max_new_tokens": (evaluate_again, {"max_new_tokens": 99}),
    "system_instruction": (evaluate_again, {"system_instruction": "Be brief."}),
    "chat_template": (evaluate_again, {"chat_template": "tulu"}),
    "total": (evaluate_again, {"total": 20}),
    "model": (train_again, {"model_name_or_path": "x/other"}),
    "learning_rate": (train_again, {"learning_rate": 2e-3}),
    "a_setting_of_next_year": (train_again, {"a_setting_of_next_year": 1}),
    "p": (train_again, {"train_info": {"p": 0.3}}),
    "base_weights": (train_again, {"run_is": {"model": {"weights": "f" * 64}}}),  # of a folder of the same name
    "a_setting_of_" + 60 * "x": (train_again, {"a_setting_of_" + 60 * "x": 70 * "y" + "z"}),
    "seed 1": (train_again, {"seed": 1}),
}


@pytest.mark.parametrize("setting", OTHERWISE)
def test_runs_that_differ_in_more_than_their_seed_are_never_pooled(runs, setting):
    """A table of the paper's kind refuses them with the names; a summary and a figure show them apart."""
    change, fields = OTHERWISE[setting]
    change(runs / "lora" / "2", **fields)
    with pytest.raises(ReportError, match=setting):
        only_cell(runs)
    if setting != "seed 1":
        found = load_table([runs])
        accuracy = summary_tables(found)[0]
        ours = accuracy["row"].str[0].str.startswith("LoRA")
        assert set(accuracy[ours]["count"].dropna()) == {1}
        assert all(row[0] in specs.markdown(accuracy) for row in accuracy["row"])  # not cut
        with pytest.raises(ReportError, match=setting):
            points(found[found["metric"] == "b"], panel="benchmark", x="depth", by="method")


def test_figures_never_pool_and_name_what_differs(tmp_path):
    for p, seed in itertools.product((0.25, 0.75), (1, 2)):
        by_depth = {str(k): answers("b", 20, np.arange(20) < 10 + k + (p > 0.5)).as_json() for k in (2, 4)}
        settings = {**BASIC, "rule": "loop_dropout", "p": p, "seed": seed}
        write_training(tmp_path / f"{p}" / f"{seed}", settings, benchmarks={"b": by_depth["4"]}, by_depth=by_depth)
    plot = automatic_figures(load_table([tmp_path]))["depth_accuracy"]
    assert sorted(set(plot.data["by"])) == ["Loop Dropout, p = 0.25", "Loop Dropout, p = 0.75"]
    assert set(plot.data["seeds"]) == {2}


def test_results_that_were_evaluated_differently_are_not_compared(runs, two):
    for seed in (1, 2):
        evaluate_again(runs / "lora" / str(seed), chat_template="other")
    with pytest.raises(ReportError, match="chat_template"):
        build_table(two, load_table([runs]))
    accuracy = summary_tables(load_table([runs]))[0]
    assert accuracy["column"].nunique() == 2 and accuracy["column"].str.contains("chat_template = other").any()


def test_a_difference_is_paired_by_seed_and_its_interval_is_over_seeds_and_problems(tmp_path):
    rng = np.random.default_rng(1)
    shift = {1: 0.1, 2: 0.4, 3: 0.2}  # seeds differ far more than problems do
    rules = {"lora": 0, "loop_dropout": 1}
    right = {(m, s): rng.random(400) < 0.4 + shift[s] * rules[m] for m in rules for s in shift}
    for (rule, seed), values in right.items():
        folder = tmp_path / rule / str(seed)
        write_training(folder, {**BASIC, "seed": seed, "rule": rule})
        write_evaluation(folder / "test", folder, [answers("b", 400, values)])
    cell = only_cell(tmp_path, "minus: {method: LoRA}", "Loop Dropout")
    gains = 100.0 * np.stack([right["loop_dropout", s].astype(float) - right["lora", s] for s in (1, 2, 3)])
    assert list(map(float, cell["by_seed"].split())) == pytest.approx(gains.mean(axis=1))
    want = estimate(gains)
    assert [cell.low, cell.high] == pytest.approx([want.low, want.high])
    over_problems = [gains[:, rng.integers(0, 400, 400)].mean() for _ in range(1000)]
    assert cell.high - cell.low > 2 * np.ptp(np.percentile(over_problems, [2.5, 97.5]))
    ours, other = (select(load_table([tmp_path]), {"method": m, "metric": "b"}) for m in ("Loop Dropout", "LoRA"))
    with pytest.raises(ReportError, match="seeds"):
        difference(ours, other.iloc[:2], "x")


def test_a_method_looks_the_same_in_every_figure():
    every = looks(["LoRA", "Loop Dropout", "base", "CoTo", "LoRA+", "Loop Dropout, p = 0.25", "mine"])
    assert len(set(every.values())) == len({each[:2] for each in every.values()}) == 7
    for names in (["CoTo", "LoRA"], ["LoRA", "mine"], ["Loop Dropout"]):
        assert all(looks(names)[name] == every[name] for name in names if name != "mine")
    assert list(looks(["mine", "Loop Dropout", "LoRA", "base"]))[:3] == ["base", "LoRA", "Loop Dropout"]


# --- reading ------------------------------------------------------------------------------------------------------------


def test_a_run_is_read_with_all_that_it_measured(tmp_path):
    """The quickstart's form: the base, eight depths, single loops with their accuracy, readouts, the learning curve."""
    by_depth = {str(k): answers("b", 20, np.arange(20) < k).as_json() for k in range(1, 9)}
    for rule in ("lora", "loop_dropout"):
        run = tmp_path / rule
        write_training(
            run, {**BASIC, "rule": rule, "seed": 0, "max_new_tokens": 64}, by_depth=by_depth, benchmarks={"b": by_depth["4"]},
            base_benchmarks={"b": answers("b", 20, np.arange(20) < 1).as_json()}, readout_losses=[4.0, 3.0, 2.0, 1.0],
            single_loop=single_loop(),
            single_loop_benchmarks=[answers("b", 20, np.arange(20) < k).as_json() for k in range(4)],
        )  # fmt: skip
        log = [{"loss": 2.0, "step": 5, "epoch": 0.1}, {"loss": 1.9, "step": 10, "epoch": 0.2},
               {"eval_loss": 1.5, "step": 10, "epoch": 0.2}, {"train_loss": 1.0, "step": 10}]  # fmt: skip
        (run / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    table = load_table([tmp_path])
    lora = select(table, {"method": "LoRA"})
    value = lambda **wanted: select(lora, wanted)["value"].item()
    assert [value(metric="b", depth=k, gates="all") for k in range(1, 9)] == [5.0 * k for k in range(1, 9)]
    assert [value(metric="b", loop=k) for k in range(1, 5)] == [0.0, 5.0, 10.0, 15.0]
    assert [value(metric="loss_reduction", loop=k) for k in range(1, 5)] == pytest.approx([10, 20, 30, 50])
    assert [value(metric="readout_loss", readout=k) for k in range(1, 5)] == [4.0, 3.0, 2.0, 1.0]
    assert (value(metric="loss", step=5), value(metric="eval_loss", step=10)) == (2.0, 1.5)
    assert select(table, {"method": "base", "metric": "b"})["value"].item() == 5.0  # once, not beside each adapter
    assert set(select(lora, {"metric": "b"})["evaluation.max_new_tokens"]) == {64}
    accuracy = summary_tables(table)[0]
    assert {row[0] for row in accuracy["row"]} == {"base", "LoRA", "Loop Dropout"}
    assert accuracy["column"].nunique() == 8
    figures = automatic_figures(table)
    assert {"depth_accuracy", "single_loop", "single_loop_accuracy", "readouts", "learning_curves"} <= set(figures)
    # The same result evaluated again is there once, as the evaluation has it.
    write_evaluation(tmp_path / "lora" / "test", tmp_path / "lora", [answers("b", 20, np.arange(20) < 7)])
    again = lambda: select(load_table([tmp_path]), {"method": "LoRA", "metric": "b", "gates": "all", "depth": 4})
    assert set(again()["value"]) == {20.0, 35.0}  # another result: both are there, and a cell that meets both says so
    with pytest.raises(ReportError, match="max_new_tokens"):
        only_cell(tmp_path)
    assert "35.00" in specs.markdown(summary_tables(load_table([tmp_path]))[0])
    write_evaluation(tmp_path / "lora" / "test", tmp_path / "lora", [answers("b", 20, np.arange(20) < 4)])
    assert again()[["value", "evaluation.max_new_tokens"]].values.tolist() == [[20.0, 10]]


def test_gates_and_readout_of_an_evaluation_are_told_apart(runs):
    file = runs / "lora" / "1" / "test" / "evaluation.json"
    content = json.loads(file.read_text())
    row = content["rows"].pop("1")
    for name, change in {"a": {"gates": [0, 1, 0, 0]}, "b": {"readout": 2}, "c": {}}.items():
        content["rows"][name] = {**row, "meta_info": {**row["meta_info"], **change}}
    file.write_text(json.dumps(content))
    found = select(load_table([runs]), {"method": "LoRA", "metric": "b", "seed": 1})
    assert {(row["gates"], row["loop"], row["readout"]) for row in found.fillna(0).to_dict("records")} == {
        ("0-1-0-0", 2, 0), ("all", 0, 2), ("all", 0, 0),
    }  # fmt: skip
    assert only_cell(runs).text == "38.33 ± 2.36"


@pytest.mark.parametrize("adapter", ["lora/1/checkpoint-1", "loop_dropout/2", "gone/1", "gone/2"])
def test_a_measurement_belongs_to_the_adapter_that_it_names_wherever_its_file_is(runs, adapter):
    run, other = runs / "lora" / "1", runs / adapter
    if "gone" not in adapter:
        other.mkdir(parents=True, exist_ok=True)
    write_evaluation(run / "test", other, [answers("b", 30, [1] * 30)])
    write_diagnostic(run, "single_loop", [{"method": "x", "path": str(other), "measured": single_loop()}])
    table, wanted = load_table([runs]), run if adapter == "gone/1" else other  # which was moved
    for rows in (table[table["value"] == 100], table[table["metric"] == "loss_reduction"]):
        assert set(rows["run"].str.split("#").str[0]) == {str(wanted.resolve())}


def test_runs_in_folders_of_any_name_are_read_and_a_row_of_the_summary_is_one_setting(tmp_path):
    rates = {"answers": (1, "b"), "parts": (1, "b"), "checkpoint-best": (3, "development"), ".staged": (1, "b")}
    for folder, (rate, name) in rates.items():
        settings = {**BASIC, "seed": len(folder), "learning_rate": rate / 1000}
        write_training(tmp_path / folder / "run", settings, benchmarks=measured(answers(name, 20, [1] * 20)))
    (tmp_path / "parts" / "run" / "checkpoint-5").mkdir()  # which has no learning curve of its own
    log = tmp_path / "parts" / "run" / "checkpoint-5" / "trainer_state.json"
    log.write_text('{"log_history": [{"loss": 2.0, "step": 5}]}')
    table, method = load_table([tmp_path]), "LoRA, learning_rate = "
    assert table["run"].nunique() == 3 and "training" not in set(table["benchmark"])
    texts = specs.grid(summary_tables(table)[0]).values.tolist()
    assert texts == [[f"{method}0.001", "100.00 ± 0.00", "–"], [f"{method}0.003", "–", "100.00"]]


def test_any_diagnostic_is_in_the_table_and_drawn(tmp_path):
    """Of one's own, and of the states: numbers, lists by loop and matrices."""
    measures = {
        "last_two": lambda i: {"loss": 0.5 + i, "by_loop": [1.0, 2.0], "what": "x"},
        "settling": lambda i: {"states": "carried", "state_distances": [1.0 + i, 0.0], "agreements_percent": [9.0, 100.0]},
        "kinds": lambda i: {"by_kind": {"a": 1.0, "b": 2.0 + i}, "is_good": True},
        "updates": lambda i: {"relative_sizes": [0.1, 0.2], "cosines": [[1.0, 0.5], [0.5, 1.0]]},
    }  # fmt: skip
    for name, measure in measures.items():
        runs = [{"method": "mine", "path": None, "seed": None, "measured": measure(i)} for i in range(2)]
        write_diagnostic(tmp_path, name, runs, num_loops=2)
    table = load_table([tmp_path])
    loss = average(select(table, {"metric": "last_two.loss"}), "x")
    assert (loss.mean(), len(loss)) == (1.0, 2)
    assert set(select(table, {"metric": "last_two.by_loop", "loop": 2})["value"]) == {2.0}
    figures = automatic_figures(table)
    assert set(figures) == {"last_two", "settling", "updates", "updates_cosines", "kinds"}
    drawn = figures["settling"].data
    assert sorted(drawn["mean"][drawn["x"] == 1]) == [1.5, 9.0] and set(figures["updates"].data["mean"]) == {0.1, 0.2}
    assert figures["kinds"].data[["x", "mean"]].values.tolist() == [["a", 1.0], ["b", 2.5]]
    numbers = numbers_by_method(table)
    assert numbers.loc["settling.state_distances, loop 1", "mine"] == "1.5000 ± 0.7071"
    assert numbers.loc["last_two.loss", "mine"] == "1.0000 ± 0.7071"


entry = lambda key, value: lambda content: content["rows"]["1"].update({key: value})
result = lambda key, value: lambda content: content["rows"]["1"]["benchmarks"]["b"].update({key: value})
metric = lambda key, value: result("metrics", {"b": {"score": 110 / 3, "sum": 11, "total": 30, key: value}})
train = lambda key, value: lambda content: content["train_info"].update({key: value})
EVALUATION, TRAINING, DIAGNOSTIC = "test/evaluation.json", "results.json", "diagnostics/single_loop.json"
FAULTS = {  # what the sentence names: file, and its text or a change of its content
    "Expecting": (EVALUATION, "hello"),
    "decode": (EVALUATION, b"\xff\xfe\x00"),
    "the file": (EVALUATION, "[]"),
    "recursion": (EVALUATION, "[" * 100_000),
    "`rows.1`": (EVALUATION, '{"rows": {"1": 3}}'),
    "`rows.1.meta_info`": (EVALUATION, entry("meta_info", None)),
    "adapter_path": (EVALUATION, entry("meta_info", {"num_loops": 4, "adapter_path": 5})),
    "b.total": (EVALUATION, result("total", "many")),
    "total` must be an integer from 1; got 0": (EVALUATION, result("total", 0)),
    **{f"score` must be a number; got {str(value)[:9]}": (EVALUATION, metric("score", value))
       for value in (float("nan"), float("inf"), True, 10**400)},
    "`score` of b must be 11 of 30": (EVALUATION, metric("score", 90)), "`sum` of b": (EVALUATION, metric("correct", 12)),
    "of one or more": (EVALUATION, result("metrics", {})), "`missing` of b must be 0": (EVALUATION, result("missing", 99)),
    "`correct` of x": (EVALUATION, result("groups", {"level": {"x": {"correct": 9, "total": 2}}})),
    "`total` of b must be 30": (EVALUATION, result("total", 31)),
    "predictions.0.correct": (EVALUATION, result("predictions", [{"prompt": "", "correct": 7}])),
    **{f"{name}` must be": (TRAINING, train(name, value)) for name, value in
       {"learning_rate": "abc", "train_seconds": "abc", "peak_memory_gb": [1], "num_loops": 0, "p": 7}.items()},
    "b.predictions.0.prompt": (EVALUATION, result("predictions", [{"prompt": 3}])),
    "run_info.settings": (TRAINING, '{"run_info": {"settings": 3}, "train_info": {}}'),
    "two": (TRAINING, '{"run_info": {"settings": {}}, "train_info": {"num_loops": 4}, "by_depth": {"two": {}}}'),
    "loss of": (DIAGNOSTIC, '{"diagnostic": "single_loop", "settings": {"num_loops": 4}, "runs": '
                            '[{"method": "x", "measured": {"only": [1, "x"]}}]}'),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_cannot_be_read_is_named_with_its_fault_and_left_out(runs, fault):
    name, change = FAULTS[fault]
    file = runs / "lora" / "1" / name
    file.parent.mkdir(exist_ok=True)
    if callable(change):
        content = json.loads(file.read_text())
        change(content)
        change = json.dumps(content)
    file.write_bytes(change if isinstance(change, bytes) else change.encode())
    table = load_table([runs])
    (sentence,) = table.attrs["skipped"]
    assert str(file) in sentence and "\n" not in sentence and fault in sentence
    assert str(file) not in set(table["source"])
    assert len(select(table, {"metric": "b"})) == (3 if name == EVALUATION else 4)


# --- files of tables ----------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_and_not_invented(runs, two):
    (runs / "lora" / "2" / "test" / "evaluation.json").unlink()
    filled = build_table(two, load_table([runs]))
    assert filled["text"][0] == "36.67"  # one seed is one seed
    assert only_cell(runs, "seed: [1, 2]").missing == "no result of seed 2"
    shutil.rmtree(runs / "lora")
    filled = build_table(two, load_table([runs]))
    assert (filled["text"][0], len(missing_of(filled))) == ("–", 1)
    markdown = specs.markdown(filled)
    assert "no run with method LoRA" in markdown and "loopdropout sweep sweeps/x.yaml" in markdown


CELLS = {  # what a column says: what the sentence names
    "depht: 4": "`depht`", "filter.x: 1": "`filter.x`", "of: nonexistent": "`nonexistent`", "of: method": "`method.0` must",
    "of: verdicts": "`verdicts`", "part: missing_in_either": "`part` has no effect", "bold: [zzz]": "`zzz`",
    "minus: {method: LoRA}, scale: 2": "`scale` has no effect", "of: p, recipe: recipes/gsm8k.yaml, decimals: 1": "`decimals`",
    "of: rule x rule, recipe: recipes/gsm8k.yaml": "`rule x rule.0`", "minus: {of: p}": "`of`",
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), CELLS.items())
def test_a_cell_that_cannot_be_made_is_refused_by_name(runs, text, message):
    with pytest.raises(ReportError, match=re.escape(message)):
        only_cell(runs, text)
    assert [only_cell(runs, setting).text for setting in ("weight_decay: 0.5", "evaluation.x: 1")] == ["–", "–"]


LINE = "label: fig:x\ntitle: X\nfigure: line\nfilter: {metric: b, method: LoRA}\nx: {seed: s}\ny: {total: n}"
GATES = "label: fig:x\ntitle: X\nfigure: gates"
TABLE = "label: tab:x\ntitle: X\ncolumns: {A: {metric: a}, B: {metric: b}}"


def test_a_figure_draws_its_own_column(runs, tmp_path):
    for column, change in (("", ""), ("zzz", "total"), ("rule", "total"), ("rule", "seed"), ("zzz", "seed")):
        (tmp_path / "f.yaml").write_text(LINE.replace(change, column))
        with pytest.raises(ReportError, match=f"`{column}") if column else nullcontext():
            assert paper_figure(load_spec(tmp_path / "f.yaml"), load_table([runs])).data["mean"].tolist() == [30, 30]


CELL = "part: foo|part: both_extractible|decimals: x|decimals: -1|decimals: 2.5|decimals: true|scale: x|scale: [1]|minus: 5|"
CELL += "minus: [LoRA]|bold: 5|bold: column|recipe: 5|average_of: []|average_of: 3|show: speed|x: [{}]|scale: 1e999"
MISTAKES = {  # lines of a file, one of which is wrong; the sentence has the last name in it
    TABLE: """wher: {}|rows: [[a, '1', '2', '3']]|figure: pie|figure: line|figure: [line]|figure: table|label: tab:../../evil
label: tab:a}\\input{b|label: 5|label:|title: 5|columns: {4: {}}|heads: {Rank: 5}|rows: [[{Ours: 5}]]|rows: [[{}]]""",
    LINE: "x: {}|x: {a: b, c: d}|x:|y: {}|panels: {A: 5}|minus: {}|note: x|filter: {a: {}}",
    GATES: "filter: {num_loops: 0}|filter: {seed: x}|filter: {p: 2}|filter: {sweep: x}",
}
MISTAKES = [(file, line) for file, lines in MISTAKES.items() for line in lines.replace("\n", "|").split("|")]
MISTAKES += [(TABLE, f"columns: {{B: {{{each}}}}}") for each in CELL.split("|")]


@pytest.mark.parametrize(("file", "line"), MISTAKES)
def test_a_mistake_in_a_file_is_one_sentence(tmp_path, file, line):
    path = tmp_path / "t.yaml"
    path.write_text("\n".join({each.split(":")[0]: each for each in [*file.split("\n"), line]}.values()))
    with pytest.raises(ValueError, match=re.findall(r"(\w+):[^:]*$", line)[0]) as caught:
        load_spec(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


# --- the report ---------------------------------------------------------------------------------------------------------


HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">{{title}}"


def test_a_report_of_any_runs(runs, tmp_path):
    out = tmp_path / "report"
    (runs / "lora" / "x").mkdir()
    (runs / "lora" / "x" / "evaluation.json").write_text("{")
    for rule, seed in itertools.product(("lora", "loop_dropout"), (1, 2)):
        settings = {**BASIC, "seed": seed, "rule": rule, "a_note": HOSTILE}
        write_training(runs / rule / f"{seed}", settings, single_loop=single_loop())
    _, summary = write_report([runs], [], out, HOSTILE)
    assert "38.33 ± 2.36" in (out / "tables" / "accuracy.md").read_text()
    assert "+16.67 [" in (out / "tables" / "differences.md").read_text()
    assert "1.0" in (out / "tables" / "costs.md").read_text()
    assert "4 runs read" in summary and "Left out" in summary
    long = pd.read_csv(out / "long.csv")
    assert {"method", "seed", "learning_rate", "benchmark", "metric", "depth", "gates", "value"} <= set(long)
    assert len(long) == len(load_table([runs]))
    page = (out / "report.html").read_text()  # self-contained, and text is text
    without = re.sub(r"data:image/svg\+xml;base64,[^\"]*", "", page)
    assert "http://" not in without and "https://" not in without and "<script" not in without
    assert "taken" in page and "data:image/svg+xml" in page and 'id="figure-single_loop"' in page
    evil = tmp_path / "t.yaml"
    evil.write_text("label: tab:y\ntitle: '<script>&_#'\ncolumns: {'a|b': {metric: b}}\nrows: [[LoRA]]\n")
    write_report([runs], [evil], out)
    assert (out / "tables" / "t.tex").is_file() and "<script>&" not in (out / "report.html").read_text()
    again = (
        Path(shutil.copytree(tmp_path, tmp_path / "two", ignore=shutil.ignore_patterns("runs", "report"))) / "t.yaml"
    )
    faults = ((out, [], again.parent, "No results"), (tmp_path / "nowhere", [], again.parent, "There is no folder"),
              (runs, [evil, again], "x", "'t' twice"), *((runs, [], bad, "`output_dir`") for bad in ("", "a\0b")))  # fmt: skip
    for folder, files, to, fault in faults:
        with pytest.raises(ValueError, match=fault):
            write_report([folder], files, to)
