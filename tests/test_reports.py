"""Reports: the long table, what may be averaged, the paper's tables and figures from folders of sweeps, the page."""

import functools
import gzip
import itertools
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, load_script

from loopdropout_trainer.diagnostics.losses import readout_rows, single_loop_rows
from loopdropout_trainer.evaluation.results import BenchmarkResult, Metric, Prediction
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.record.identity import identity_key
from loopdropout_trainer.record.measurement import IDENTITIES_FILE, MEASUREMENTS_FILE, Measurement, write_measurements
from loopdropout_trainer.reports import ReportError, load_table, specs
from loopdropout_trainer.reports.averaging import average, difference, select
from loopdropout_trainer.reports.plots import automatic_figures, looks, paper_figure, points, save_figure
from loopdropout_trainer.reports.report import numbers_by_method, summary_tables, write_report
from loopdropout_trainer.reports.specs import best, build_table, load_spec, missing_of
from loopdropout_trainer.reports.statistics import estimate
from loopdropout_trainer.runs.sweep import Sweep, SweepArguments
from loopdropout_trainer.settings.recipe import load_recipe, method_title
from loopdropout_trainer.training.scores import Scores, SingleLoopActivation


FILES = sorted((ROOT / "recipes" / "tables").glob("*.yaml"))
TABLES = [path for path in FILES if not path.stem.startswith("figure_")]
FIGURES = [path for path in FILES if path.stem.startswith("figure_")]
PAPER = json.loads(gzip.decompress((ROOT / "tests/golden/eval_stats.json.gz").read_bytes()))["paper"]
SUBJECTS = ("Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra", "Number Theory", "Prealgebra",
            "Precalculus")  # fmt: skip
TOTALS = {"metamath_gsm8k": 40, "metamath_math500": 50, "gsm8k": 40}


# --- stand-in runs: the measurements that sft.py, evaluate.py and diagnose.py leave, with numbers of a random generator --


def identity_of(settings):
    """The identity of a training with these settings of a recipe."""
    given = {"p": settings.get("p"), **(settings.get("rule_args") or {})}
    rule = settings.get("rule", "loop_dropout")
    p = getattr(make_rule(rule, **{k: v for k, v in given.items() if v is not None and rule != "lora"}), "p", None)
    of_adapter = {"r": settings.get("lora_r", 16), "use_rslora": settings.get("use_rslora", False)}
    of_adapter["lora_dropout"] = settings.get("lora_dropout", 0.0)
    names = ("learning_rate", "weight_decay", "rule_args", "loraplus_lr_ratio", *settings.get("more", ()))
    arguments = {name: settings.get(name) for name in names}
    arguments |= {"rule": rule, "p": list(p) if isinstance(p, tuple) else p}
    return {
        "base": {"rms_norm_eps": 1e-6, "weights": "a" * 64, **settings.get("base", {})},
        "adapter": {**of_adapter, **settings.get("adapter", {})},
        "data": {"rows": 100, "sha256": "b" * 64},
        "settings": arguments,
        "loops": {"num_loops": settings.get("num_loops", 4)},
        "seeds": {"seed": settings["seed"]},
        "length": {"max_steps": None, "num_train_epochs": settings.get("num_train_epochs", 1.0)},
        "versions": {"torch": settings.get("torch", "2.13")},
    }


def facts_of(settings):
    """The fields that all rows of a training share, and its identity."""
    run = identity_of(settings)
    method = method_title({**run["adapter"], **run["settings"]})
    model = str(settings.get("model_name_or_path", "x/m")).split("/")[-1]
    facts = {"run": identity_key(run), "method": method, "model": model, "seed": settings["seed"]}
    return {**facts, "steps": settings.get("steps", 10), "depth": settings.get("num_loops", 4)}, run


def of_number(run, name, weights=0, **settings):
    """The identity of a measurement on `name` of what a training has made."""
    data = {"benchmark": name, "problems": settings.pop("problems", "c" * 64)}
    model = {part: run[part] for part in ("base", "adapter", "versions")} if run else {"base": {}, "versions": {}}
    weights = {"adapter": f"{weights} {run and run['seeds']}"}
    return {**model, "weights": weights, "data": data, "settings": {"max_new_tokens": 10, **settings}}


def answers(name, total, right, missing=()):
    """Predictions on `total` problems, correct where `right` says so."""
    made = lambda i: (f"{name} {i}", f"it is {i}", str(i), None if i in missing else str(i), bool(right[i]))
    divided = name == "metamath_math500"
    groups = lambda i: {"subject": SUBJECTS[i % 7], "level": str(1 + i % 5)} if divided else None
    return BenchmarkResult(name, [Prediction(*made(i), id=str(i), groups=groups(i)) for i in range(total)])


def write_results(folder, settings, results, writer="training", how=None, weights=0, **place):
    """Measure benchmarks of a training, at a place: depth, gates, loop or readout."""
    facts, run = facts_of(settings)
    for each in results:
        how_of = {"problems": f"{each.total}", **(how or {})}
        number = of_number(run, each.name, weights, **how_of)
        number["loops"] = {"num_loops": place.get("depth", facts["depth"]), "gates": place.get("gates")}
        number["loops"]["readout"] = place.get("readout")
        rows = each.measurements(**{**facts, **place}, writer=f"{writer}/{each.name}", identity=identity_key(number))
        write_measurements(folder, rows, [number, run])


def write_rows(folder, settings, family, rows, benchmark="held_out", num_loops=4, writer=None, **facts_too):
    """Measure single numbers of a training, as diagnostics and trainings do."""
    facts, run = facts_of(settings)
    number = of_number(run, benchmark) if family != "cost" else run
    fields = {
        **facts,
        "writer": writer or f"diagnostics/{family}",
        "family": family,
        "benchmark": benchmark,
        **facts_too,
    }
    found = [Measurement(**{**fields, "identity": identity_key(number), **row}) for row in rows]
    write_measurements(folder, found, [number, run])


def write_training(folder, settings):
    """What a training costs."""
    costs = {"train_seconds": 60.0 + settings["seed"] % 7, "trainable_parameters": 1000 * settings.get("lora_r", 16)}
    costs |= {"peak_memory_gb": 2.5, "tokens_per_second": 900.0}
    rows = [{"metric": name, "value": value} for name, value in costs.items()]
    write_rows(folder, settings, "cost", rows, "training", writer="training")


def run_sweep(path, outputs, rng, benchmarks=None):
    """Leave the folders of a sweep, and return their settings. Without `full_grid` the middle rate is the chosen one."""
    sweep, arguments, runs = load_recipe(path), SweepArguments(**load_recipe(path)), {}
    folder, measure = outputs / Path(sweep["output_dir"]).name, sweep["measure"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text("{}")
    rates = arguments.learning_rates
    for method, settings in Sweep(arguments).methods.items():
        settings = {key: value for key, value in settings.items() if key != "p" or settings.get("rule") != "lora"}
        factor = (sweep.get("rate_factors") or {}).get(method, 1.0)
        for rate in rates:
            chosen = sweep.get("full_grid") or rate == rates[len(rates) // 2]
            for seed in sweep["seeds"] if chosen else sweep["seeds"][:1]:
                run = folder / method / f"lr_{factor * rate:.6g}" / f"seed_{seed}"
                fields = {**settings, "learning_rate": factor * rate, "seed": seed, "output_dir": str(run)}
                fields["more"] = ()
                names = (benchmarks or measure["benchmarks"]) if chosen else ["development"]
                found = [
                    answers(each, n := TOTALS.get(each, 30), rng.random(n) < 0.6, missing={0, 1}) for each in names
                ]
                write_training(run, fields)
                write_results(run, fields, found)
                for depth in measure.get("depths", ()) if chosen else ():
                    if depth != fields.get("num_loops", 4):
                        again = [answers(names[0], 40, rng.random(40) < 0.6)]
                        write_results(run, fields, again, f"depth {depth}", depth=depth)
                if chosen:
                    runs[run] = fields
    return runs


def single_loop(frozen=2.0, only=(1.8, 1.6, 1.4, 1.0), all_on=0.5):
    return single_loop_rows(SingleLoopActivation(frozen, tuple(only), all_on))


def readouts(losses):
    return readout_rows([Scores(loss, 50.0) for loss in losses])


def write_diagnostics(runs, rng):
    for run, settings in runs.items():
        for loop in range(4):
            gates = "-".join(str(int(each == loop)) for each in range(4))
            only = answers("metamath_gsm8k", 40, rng.random(40) < 0.6)
            write_results(run / "loops", settings, [only], f"loop {loop}", gates=gates, loop=loop + 1)
        rows = single_loop(1.0, rng.random(4).tolist(), 0.4)
        write_rows(run / "diagnostics", settings, "single_loop", rows, "metamath_math500")
        write_rows(run / "diagnostics", settings, "readouts", readouts(rng.random(4).tolist()), "metamath_math500")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The long table of all sweeps of recipes/sweeps, and of diagnostics of their runs."""
    folder, rng = tmp_path_factory.mktemp("outputs"), np.random.default_rng(0)
    tulu = ["mmlu", "bbh", "truthfulqa_mc2", "ifeval_strict", "ifeval_loose", "humaneval", "humaneval_plus", "mbpp",
            "mbpp_plus"]  # fmt: skip
    with patch("loopdropout_trainer.saving.files.flush_to_disk"):  # thousands of files
        for path in sorted((ROOT / "recipes" / "sweeps").glob("*.yaml")):
            runs = run_sweep(path, folder, rng, tulu if path.stem == "tulu2" else None)
            if path.stem in ("metamath_gsm", "gsm8k_single_loop"):
                write_diagnostics(runs, rng)
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
        results = [answers(name, 40, [True] * 40) for name in ("mmlu", "bbh", "truthfulqa_mc2")]
        for pair in pairs.items():
            values = [dict(zip(pair, (float(i < 10), float(i < 30)), strict=True)) for i in range(40)]
            rows = [Prediction(f"{i}", "", "", "x", i < 10, id=str(i), values=values[i]) for i in range(40)]
            metrics = {name: Metric.of([row.values[name] for row in rows]) for name in pair}
            results.append(BenchmarkResult(pair[0].removesuffix("_strict"), rows, metrics))
        write_results(run, {"seed": seed, "rule": "lora"}, results)
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
        result = answers("b", row["n"], np.arange(row["n"]) < correct)
        write_results(tmp_path / str(seed), {"seed": seed, "rule": "lora"}, [result])
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
            measure(tmp_path / "runs" / rule / str(seed), 10 + seed + 5 * (rule != "lora"), rule=rule, seed=seed)
    return tmp_path / "runs"


def measure(folder, correct=12, total=30, how=None, **settings):
    write_results(folder, {**BASIC, "seed": 2, **settings}, [answers("b", total, np.arange(total) < correct)], how=how)


OTHERWISE = {  # what the error names: how the run is changed
    "max_new_tokens": {"how": {"max_new_tokens": 99}},
    "system_instruction": {"how": {"system_instruction": "Be brief."}},
    "chat_template": {"how": {"chat_template": "tulu"}},
    "total": {"total": 20},
    "the problems": {"how": {"problems": "d" * 64}},
    "model": {"model_name_or_path": "x/other"},
    "learning_rate": {"learning_rate": 2e-3},
    "a_setting_of_next_year": {"a_setting_of_next_year": 1, "more": ["a_setting_of_next_year"]},
    "weight_decay": {"weight_decay": 0.3},
    "the base weights": {"base": {"weights": "f" * 64}},  # of a folder of the same name
    "rms_norm_eps": {"base": {"rms_norm_eps": 0.5}},
    "target_modules": {"adapter": {"target_modules": ["q_proj"]}},
    "alpha_pattern": {"adapter": {"alpha_pattern": {"q_proj": 3}}},
    "init_lora_weights": {"adapter": {"init_lora_weights": "gaussian"}},
    "torch": {"torch": "1.0"},
    "steps": {"steps": 9},
    "num_train_epochs": {"num_train_epochs": 3.0},
    "seed 1": {"seed": 1},
}
EVERYWHERE = {
    "more": ["a_setting_of_next_year"],
    "adapter": {"target_modules": ["v_proj"], "alpha_pattern": {}, "init_lora_weights": True},
}
PROTOCOL = {"system_instruction": None, "chat_template": None}


@pytest.mark.parametrize("setting", OTHERWISE)
def test_runs_that_differ_in_more_than_their_seed_are_never_pooled(tmp_path, setting):
    """A table of the paper's kind refuses them with the names; a summary and a figure show them apart."""
    change = dict(OTHERWISE[setting])
    change["adapter"] = {**EVERYWHERE["adapter"], **change.get("adapter", {})}
    measure(tmp_path / "1", **{**EVERYWHERE, "seed": 1, "rule": "lora"}, how=PROTOCOL)
    measure(tmp_path / "2", **{**EVERYWHERE, "rule": "lora", **change, "how": {**PROTOCOL, **change.get("how", {})}})
    if setting == "seed 1":  # other weights, or it would be the same number
        measure(tmp_path / "2", 13, **{**EVERYWHERE, "rule": "lora", "seed": 1, "how": PROTOCOL | {"problems": "30"}})
        return
    with pytest.raises(ReportError, match=setting):
        only_cell(tmp_path)
    found = load_table([tmp_path])
    accuracy = summary_tables(found)["accuracy"]
    assert set(accuracy["count"].dropna()) == {1}
    assert all(row[0] in specs.markdown(accuracy) for row in accuracy["row"])  # not cut
    with pytest.raises(ReportError, match=setting):
        points(found[found["metric"] == "b"], panel="benchmark", x="depth", by="method")


def test_seeds_of_one_setting_have_a_mean_and_one_seed_twice_has_none(runs):
    assert only_cell(runs).text == "38.33 ± 2.36"
    write_results(runs / "again", {**BASIC, "seed": 1, "rule": "lora"}, [answers("b", 30, [1] * 30)], weights=1)
    with pytest.raises(ReportError, match="two results of seed 1 .*again"):
        only_cell(runs)


def test_figures_never_pool_and_name_what_differs(tmp_path):
    for p, seed in itertools.product((0.25, 0.75), (1, 2)):
        settings = {**BASIC, "rule": "loop_dropout", "p": p, "seed": seed}
        for k in (2, 4):
            result = answers("b", 20, np.arange(20) < 10 + k + (p > 0.5))
            write_results(tmp_path / f"{p}" / f"{seed}", settings, [result], f"depth {k}", depth=k)
    plot = automatic_figures(load_table([tmp_path]))["accuracy_depth"]
    assert sorted(set(plot.data["by"])) == ["Loop Dropout, p = 0.25", "Loop Dropout, p = 0.75"]
    assert set(plot.data["seeds"]) == {2}


def test_a_difference_to_lora_is_to_the_lora_that_is_equal_in_all_else(tmp_path):
    for packing, (lora, ours) in {False: (10, 13), True: (20, 16)}.items():
        settings = {"packing": packing, "more": ["packing"]}
        for seed in (1, 2):
            measure(tmp_path / f"lora {packing} {seed}", lora, rule="lora", seed=seed, **settings)
            measure(tmp_path / f"ours {packing} {seed}", ours, rule="loop_dropout", seed=seed, **settings)
    differences = summary_tables(load_table([tmp_path]))["differences"].set_index("row")["mean"]
    assert differences["Loop Dropout, packing = False",] == pytest.approx(10)
    assert differences["Loop Dropout, packing = True",] == pytest.approx(-400 / 30)


def test_results_that_were_evaluated_differently_are_not_compared(runs, two):
    for rule, seed in itertools.product(("lora", "loop_dropout"), (1, 2)):
        measure(
            runs / rule / str(seed), rule=rule, seed=seed, how={"chat_template": "other" if rule == "lora" else None}
        )
    with pytest.raises(ReportError, match="chat_template"):
        build_table(two, load_table([runs]))
    accuracy = summary_tables(load_table([runs]))["accuracy"]
    assert accuracy["column"].nunique() == 2 and accuracy["column"].str.contains("chat_template = other").any()


def test_a_difference_is_paired_by_seed_and_its_interval_is_over_seeds_and_problems(tmp_path):
    rng = np.random.default_rng(1)
    shift = {1: 0.1, 2: 0.4, 3: 0.2}  # seeds differ far more than problems do
    rules = {"lora": 0, "loop_dropout": 1}
    right = {(m, s): rng.random(400) < 0.4 + shift[s] * rules[m] for m in rules for s in shift}
    for (rule, seed), values in right.items():
        write_results(tmp_path / rule / str(seed), {**BASIC, "seed": seed, "rule": rule}, [answers("b", 400, values)])
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
    base = {"method": "base", "run": None, "seed": None, "steps": None, "gates": "none"}
    for rule in ("lora", "loop_dropout"):
        run, settings = tmp_path / rule, {**BASIC, "rule": rule, "seed": 0}
        for k in range(1, 9):
            write_results(run, settings, [answers("b", 20, np.arange(20) < k)], f"depth {k}", depth=k)
        for k in range(1, 5):
            gates = "-".join(str(int(each == k)) for each in range(1, 5))
            write_results(run, settings, [answers("b", 20, np.arange(20) < k - 1)], f"loop {k}", gates=gates, loop=k)
        number = of_number(None, "b", problems="20")
        of_base = answers("b", 20, np.arange(20) < 1).measurements(
            **{**facts_of(settings)[0], **base}, writer="base", identity=identity_key(number)
        )
        write_measurements(run, of_base, [number])
        write_rows(run, settings, "single_loop", single_loop())
        write_rows(run, settings, "readouts", readouts([4.0, 3.0, 2.0, 1.0]))
        log = [{"metric": "loss", "value": 2.0, "step": 5}, {"metric": "loss", "value": 1.9, "step": 10}]
        write_rows(run, settings, "curve", log, "training")
    table = load_table([tmp_path])
    lora = select(table, {"method": "LoRA"})
    value = lambda **wanted: select(lora, wanted)["value"].item()
    assert [value(metric="b", depth=k, gates="all") for k in range(1, 9)] == [5.0 * k for k in range(1, 9)]
    assert [value(metric="b", loop=k) for k in range(1, 5)] == [0.0, 5.0, 10.0, 15.0]
    assert [value(metric="loss_reduction", loop=k) for k in range(1, 5)] == pytest.approx([10, 20, 30, 50])
    assert [value(metric="readout_loss", readout=k) for k in range(1, 5)] == [4.0, 3.0, 2.0, 1.0]
    assert value(metric="loss", step=5) == 2.0
    assert select(table, {"method": "base", "metric": "b"})["value"].item() == 5.0  # once, not beside each adapter
    accuracy = summary_tables(table)["accuracy"]
    assert {row[0] for row in accuracy["row"]} == {"base", "LoRA", "Loop Dropout"}
    assert accuracy["column"].nunique() == 8
    figures = automatic_figures(table)
    assert {"accuracy_depth", "single_loop_loop", "accuracy_loop", "readouts_loop", "curve_step"} <= set(figures)
    # The same number measured again is there once; under other settings both are there, and a cell that meets both says so.
    write_results(
        tmp_path / "again", {**BASIC, "rule": "lora", "seed": 0}, [answers("b", 20, np.arange(20) < 4)], depth=4
    )
    assert len(load_table([tmp_path])) == len(table)
    how = {"max_new_tokens": 99}
    write_results(
        tmp_path / "again", {**BASIC, "rule": "lora", "seed": 0}, [answers("b", 20, [1] * 20)], how=how, depth=4
    )
    with pytest.raises(ReportError, match="max_new_tokens"):
        only_cell(tmp_path)
    assert "100.00" in specs.markdown(summary_tables(load_table([tmp_path]))["accuracy"])


def test_a_measurement_belongs_to_its_training_wherever_its_file_is(tmp_path):
    (tmp_path / "sweeps" / "x").mkdir(parents=True)
    (tmp_path / "sweeps" / "x" / "sweep.db").touch()
    measure(tmp_path / "sweeps" / "x" / "run", rule="lora")
    write_rows(tmp_path / "elsewhere", {**BASIC, "seed": 2, "rule": "lora"}, "single_loop", single_loop())
    table = load_table([tmp_path])
    assert set(table["sweep"]) == {"x"} and table["run"].nunique() == 1
    assert set(table["learning_rate"]) == {1e-3} and set(table["rank"]) == {16}


def test_runs_in_folders_of_any_name_are_read_and_a_row_of_the_summary_is_one_setting(tmp_path):
    rates = {"answers": (1, "b"), "parts": (1, "b"), "checkpoint-best": (3, "development"), ".staged": (1, "b")}
    for folder, (rate, name) in rates.items():
        settings = {**BASIC, "rule": "lora", "seed": len(folder), "learning_rate": rate / 1000}
        write_results(tmp_path / folder / "run", settings, [answers(name, 20, [1] * 20)])
    table, method = load_table([tmp_path]), "LoRA, learning_rate = "
    assert table["run"].nunique() == 3
    texts = specs.grid(summary_tables(table)["accuracy"]).values.tolist()
    assert sorted(texts) == [[f"{method}0.001", "100.00 ± 0.00", "–"], [f"{method}0.003", "–", "100.00"]]


def test_any_diagnostic_is_in_the_table_and_drawn(tmp_path):
    """Of one's own, and of the states: numbers, lists by loop and matrices."""
    measures = {
        "last_two": lambda i: [{"metric": "last_two_loss", "value": 0.5 + i}, {"metric": "all_loss", "value": 1.0}],
        "settling": lambda i: [{"metric": "distance", "value": 1.0 + i, "loop": t} for t in (1, 2)],
        "kinds": lambda i: [{"metric": "by_kind", "value": 2.0 + i, "group": kind} for kind in "ab"],
        "updates": lambda i: [
            {"metric": "cosine", "value": 0.5, "loop": s, "other_loop": t} for s in (1, 2) for t in (1, 2)
        ],
    }
    for seed, (name, measured) in itertools.product((1, 2), measures.items()):
        settings = {**BASIC, "seed": seed, "num_loops": 2}
        write_rows(tmp_path / str(seed), settings, name, measured(seed - 1), method="mine")
    table = load_table([tmp_path])
    loss = average(select(table, {"metric": "last_two_loss"}), "x")
    assert (loss.mean(), len(loss)) == (1.0, 2)
    figures = automatic_figures(table)
    assert set(figures) == {"last_two", "settling_loop", "updates_other_loop", "kinds_group"}
    assert set(figures["settling_loop"].data["mean"]) == {1.5} and set(figures["updates_other_loop"].data["mean"]) == {
        0.5
    }
    assert figures["kinds_group"].data[["x", "mean"]].values.tolist() == [["a", 2.5], ["b", 2.5]]
    assert figures["last_two"].data[["x", "mean"]].values.tolist() == [["last_two_loss", 1.0], ["all_loss", 1.0]]
    numbers = numbers_by_method(table)
    assert numbers.loc["distance, loop 1", "mine"] == "1.5000 ± 0.7071"
    assert numbers.loc["last_two_loss", "mine"] == "1.0000 ± 0.7071"


def test_a_row_or_file_that_cannot_be_read_is_named_and_left_out(runs):
    file = runs / "lora" / "1" / MEASUREMENTS_FILE
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0].replace('"value": ', '"value": 1'), *lines[1:]]) + "\n")
    (runs / "diverged").mkdir()
    (runs / "diverged" / "diverged.json").write_text("{}")
    (runs / "lora" / "2" / IDENTITIES_FILE).write_text("{")
    for name in ("old", "empty"):  # an empty file is no fault: nothing was measured yet
        (runs / name).mkdir()
    (runs / "empty" / MEASUREMENTS_FILE).touch()
    old = runs / "old"
    (old / "results.json").write_text("{}")
    table = load_table([runs])
    faults = sorted(table.attrs["skipped"])
    assert [fault.startswith(f"{runs}/") for fault in faults] == [True] * 5
    for fault, words in zip(
        faults,
        (
            "/diverged holds a training that diverged.",
            "/lora/1/measurements.jsonl, line 1: `value` must be",
            "/lora/1/measurements.jsonl: rows of `training/b` were changed or deleted",
            "/lora/2/identities.json cannot be read as JSON",
            "/old has results, but no measurements.jsonl, as another version",
        ),
        strict=True,
    ):
        assert fault.startswith(f"{runs}{words}")
    assert set(table[table["metric"] == "b"]["method"]) == {"Loop Dropout"}
    with pytest.raises(ReportError, match="No measurements .*another version of this package.*run the command"):
        write_report([old], [], runs / "report")


def test_a_number_that_was_measured_again_with_another_value_is_named(runs):
    for correct, name in ((11, "alike"), (9, "other")):
        measure(runs.parent / name, correct, rule="lora", seed=1)
    assert load_table([runs, runs.parent / "alike"]).attrs["skipped"] == []
    table = load_table([runs, runs.parent / "other"])
    assert len(table) == len(load_table([runs])) and only_cell(runs.parent, "seed: 1")["mean"] == pytest.approx(
        100 * 11 / 30
    )
    (fault,) = table.attrs["skipped"]
    assert fault == (
        f"{runs.parent / 'other'}: `b` of LoRA is 30, and 36.6667 in a folder read before, though both depend on the same "
        "(numbers that differ so: 1)."
    )


# --- files of tables ----------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_and_not_invented(runs, two):
    shutil.rmtree(runs / "lora" / "2")
    filled = build_table(two, load_table([runs]))
    assert filled["text"][0] == "36.67"  # one seed is one seed
    assert only_cell(runs, "seed: [1, 2]").missing == "no result of seed 2"
    shutil.rmtree(runs / "lora")
    filled = build_table(two, load_table([runs]))
    assert (filled["text"][0], len(missing_of(filled))) == ("–", 1)
    markdown = specs.markdown(filled)
    assert "no run with method LoRA" in markdown and "loopdropout sweep sweeps/x.yaml" in markdown


def test_tables_of_the_paper_are_dashes_where_nothing_was_trained(tmp_path):
    """An evaluation of the base alone has none of the columns that tell methods apart."""
    number = of_number(None, "arithmetic_test")
    facts = {
        "writer": "evaluation/base",
        "identity": identity_key(number),
        "method": "base",
        "depth": 4,
        "gates": "none",
    }
    write_measurements(tmp_path, answers("arithmetic_test", 4, [1] * 4).measurements(**facts), [number])
    table = load_table([tmp_path])
    for path in {*TABLES} - {ROOT / "recipes/tables/recipes.yaml"}:
        assert set(build_table(load_spec(path), table)["text"]) == {"–"}, path
    for path in {*FIGURES} - {ROOT / "recipes/tables/figure_overview.yaml"}:
        assert paper_figure(load_spec(path), table) is None, path


CELLS = {  # what a column says: what the sentence names
    "depht: 4": "`depht`", "filter.x: 1": "`filter.x`", "of: nonexistent": "`nonexistent`", "of: method": "`method` must",
    "of: verdicts": "`verdicts`", "part: missing_in_either": "`part` has no effect", "bold: [zzz]": "`zzz`",
    "minus: {method: LoRA}, scale: 2": "`scale` has no effect", "of: p, recipe: recipes/gsm8k.yaml, decimals: 1": "`decimals`",
    "of: rule x rule, recipe: recipes/gsm8k.yaml": "`rule x rule`", "minus: {of: p}": "`of`",
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), CELLS.items())
def test_a_cell_that_cannot_be_made_is_refused_by_name(runs, text, message):
    with pytest.raises(ReportError, match=re.escape(message)):
        only_cell(runs, text)
    assert only_cell(runs, "weight_decay: 0.5").text == "–"


LINE = "label: fig:x\ntitle: X\nfigure: line\nfilter: {metric: b, method: LoRA}\nx: {seed: s}\ny: {total: n}"
GATES = "label: fig:x\ntitle: X\nfigure: gates"
TABLE = "label: tab:x\ntitle: X\ncolumns: {A: {metric: a}, B: {metric: b}}\nrows: [[LoRA]]"


def test_a_figure_draws_its_own_column(runs, tmp_path):
    """At the depth of the training, unless it names another one: those that were measured beside it are not there."""
    for seed in (1, 2):
        settings = {**BASIC, "rule": "lora", "seed": seed}
        write_results(runs / "lora" / str(seed), settings, [answers("b", 40, [1] * 40)], "depth 2", depth=2)
    (tmp_path / "f.yaml").write_text(LINE.replace("x: {seed: s}", "x: {depth: K}"))
    assert paper_figure(load_spec(tmp_path / "f.yaml"), load_table([runs])).data["x"].tolist() == [4, 2]
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
    GATES: "filter: {num_loops: 0}|filter: {seed: x}|filter: {p: 2}|filter: {p: [0.5, 2]}|filter: {sweep: x}",
}
MISTAKES = [(file, line) for file, lines in MISTAKES.items() for line in lines.replace("\n", "|").split("|")]
MISTAKES += [(TABLE, f"columns: {{B: {{{each}}}}}") for each in CELL.split("|")]


@pytest.mark.parametrize(("file", "line"), MISTAKES)
def test_a_mistake_in_a_file_is_one_sentence(tmp_path, file, line):
    path = tmp_path / "t.yaml"
    path.write_text("\n".join({each.split(":")[0]: each for each in [*file.split("\n"), line]}.values()))
    with pytest.raises(ValueError, match=re.findall(r"(\w+):[^:]*$", line)[0]) as caught:
        load_spec(path)
    said = str(caught.value)
    assert "\n" not in said and str(path) in said and "constrained" not in said  # a type's name


# --- the report ---------------------------------------------------------------------------------------------------------


def test_the_command_prints_whole_words_on_a_narrow_screen(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    load_script("recipes/report.py").main(
        [str(runs), "--tables", "math_main", "--output_dir", str(tmp_path / "report")]
    )
    printed = capsys.readouterr().out
    assert "Dropout" in printed and "MATH-500" in printed and "…" not in printed
    assert "Made by: loopdropout sweep sweeps/metamath_gsm.yaml" in " ".join(printed.split())


HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">{{title}}"


def test_a_report_of_any_runs(runs, tmp_path):
    out = tmp_path / "report"
    (runs / "x").mkdir()
    (runs / "x" / MEASUREMENTS_FILE).write_text("{\n")
    for rule, seed in itertools.product(("lora", "loop_dropout"), (1, 2)):
        settings = {**BASIC, "seed": seed, "rule": rule}
        write_training(runs / rule / f"{seed}", settings)
        write_rows(runs / rule / f"{seed}", settings, "single_loop", single_loop(), benchmark=HOSTILE)
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
    assert "taken" in page and "data:image/svg+xml" in page and 'id="figure-single_loop_loop"' in page
    evil = tmp_path / "t.yaml"
    evil.write_text("label: tab:y\ntitle: '<script>&_#'\ncolumns: {'a|b': {metric: b}}\nrows: [[LoRA]]\n")
    write_report([runs], [evil], out)
    assert (out / "tables" / "t.tex").is_file() and "<script>&" not in (out / "report.html").read_text()
    again = (
        Path(shutil.copytree(tmp_path, tmp_path / "two", ignore=shutil.ignore_patterns("runs", "report"))) / "t.yaml"
    )
    faults = ((out, [], again.parent, "No measurements"), (tmp_path / "nowhere", [], again.parent, "There is no folder"),
              (runs, [evil, again], "x", "'t' twice"), *((runs, [], bad, "`output_dir`") for bad in ("", "a\0b")))  # fmt: skip
    for folder, files, to, fault in faults:
        with pytest.raises(ValueError, match=fault):
            write_report([folder], files, to)
