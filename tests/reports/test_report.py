"""recipes/report.py: means, differences, and the paper's tables and figures from the results of its sweeps."""

import functools
import gzip
import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text
from scipy import stats
from transformers import TrainerCallback

from helpers.errors import user_error
from helpers.files import ROOT, load_script, write_lines
from helpers.results import expected_results
from loopdropout_trainer.diagnostics import compare_answers
from loopdropout_trainer.files import lock_folder
from loopdropout_trainer.reports import (
    figure_files,
    figures,
    frames,
    loss_tables,
    plots,
    printing,
    recipe_texts,
    saved_tables,
    table_files,
    tables,
)
from loopdropout_trainer.reports.figures import average_windows, points
from loopdropout_trainer.reports.final_results import describe_left_out_runs, final_results
from loopdropout_trainer.reports.hidden_lines import describe_hidden_lines
from loopdropout_trainer.reports.labels import labelled, name_methods
from loopdropout_trainer.reports.loss_tables import make_loss_tables
from loopdropout_trainer.reports.plots import GRAY, heat_plot, line_plot, save_figure, space_ticks
from loopdropout_trainer.reports.progress import describe_runs
from loopdropout_trainer.reports.result_choice import split_repeated
from loopdropout_trainer.reports.saved_tables import TableText
from loopdropout_trainer.results.run_files import read_results, write_results, write_run
from loopdropout_trainer.results.sweep_folder import SweepRun, update_summary
from loopdropout_trainer.results.sweep_scores import name_score
from loopdropout_trainer.saving.checkpoints import load_state
from loopdropout_trainer.saving.metadata import write_metadata
from loopdropout_trainer.settings.recipe import dump_recipe, load_recipe, parse
from loopdropout_trainer.settings.recipe_folders import SETTINGS_FILE
from loopdropout_trainer.sweeps.summary import print_lowest
from loopdropout_trainer.terminal import format_fixed


report, sweep = load_script("recipes/report.py"), load_script("recipes/sweep.py")
PAPER = json.loads(gzip.decompress((ROOT / "tests/golden/eval_stats.json.gz").read_bytes()))["paper"]
FILES = {*(ROOT / "recipes/tables").glob("*.yaml")}
FIGURES = sorted((ROOT / "recipes/tables").glob("figure_*.yaml"))
TABLES = sorted(FILES.difference(FIGURES))
SAVED = ("rule", "p", "lora_r", "num_loops", "learning_rate", "seed", "run_name", "max_length")
LABELS = ["LoRA, p = 1", "LoRA, p = 2", "Loop Dropout", "Mine"]


@pytest.fixture(autouse=True)
def few_figure_files(monkeypatch):
    """Figures are drawn, but not written as PNG, PDF and SVG, except where a test looks at these files."""
    monkeypatch.setattr(plots, "save_figure", draw_once)


DRAWN = set()
"""The numbers and texts of the figures that `draw_once` has drawn."""


def draw_once(plot, path):
    """Draw a figure, unless one with the same numbers and texts has been drawn, as by an earlier report of the same runs."""
    content = []
    for panel in getattr(plot, "items", [plot]):
        geoms = [layer.geom for layer in panel.layers]
        tables = [panel.data, *(geom.data for geom in geoms if geom.data is not None)]
        content.append((vars(panel.labels), [type(geom) for geom in geoms], [table.to_csv() for table in tables]))
    if str(content) not in DRAWN:
        DRAWN.add(str(content))
        pyplot.close(plot.draw())


@pytest.fixture
def write_figures(few_figure_files, monkeypatch):
    monkeypatch.setattr(plots, "save_figure", save_figure)


def write(folder, rows, recipe=None, **columns):
    """Write results with default columns, and the recipe of their run."""
    shared = {"unit": "%", "task": "b", "metric": "accuracy", "method": "LoRA", "seed": 1, "step": 10, "num_loops": 4,
              "gates": "unit", "n": 20}  # fmt: skip
    write_results(folder, [{**shared, **columns, **row} for row in rows])
    if recipe is not None:
        dump_recipe(recipe, folder / "recipe.yaml")


def write_sweep(path, folder):
    """Write the results that the final runs of a sweep write, with values that depend on the run and the row alone.

    The middle learning rate is the chosen one.
    """
    (made,) = parse((sweep.Sweep,), [str(path)])
    base = load_recipe(made.recipe)
    for method in made.recipes:
        rates = made.choice(method).rates
        for rate in rates if made.full_grid else [rates[len(rates) // 2]]:
            for seed in made.seeds:
                recipe = made.run_settings(SweepRun(method, rate, seed, False))
                run = folder / recipe["run_name"]
                run.mkdir(parents=True)
                rows = expected_results(recipe)
                for row in rows:
                    rng = random.Random(f"{recipe['run_name']} {row}")
                    row["value"] = rng.random()
                    if row["metric"] == "accuracy":
                        row["samples"] = f"samples {row['task']} {row['num_loops']} {row['gates']}.jsonl"
                        lines = [
                            {"correct": float(rng.random() < 0.6), "answered": rng.random() < 0.9} for _ in range(9)
                        ]
                        row["value"] = 100 / 9 * sum(line["correct"] for line in lines)
                        write_lines(run / row["samples"], lines)
                names = {*SAVED, *(name for name in recipe if recipe[name] != base.get(name))} & recipe.keys()
                write(run, rows, {name: recipe[name] for name in names})
    return frames.load_results(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each sweep of the paper."""
    paths = sorted((ROOT / "recipes/sweeps").glob("*.yaml"))
    return {path.stem: write_sweep(path, tmp_path_factory.mktemp(path.stem)) for path in paths}


def results_of(spec, results):
    """Results of the sweeps that a table or figure names."""
    return pd.concat(
        [results[name] for name in re.findall(r"sweeps/([\w.-]+)\.yaml", str(spec.get("made_by"))) or results]
    )


@pytest.fixture(scope="module")
def built(results):
    """`built(path)`: the content of a table's file, and its table from the sweeps that it names."""

    @functools.cache
    def build(path):
        spec = load_recipe(path)
        return spec, *table_files.build_table(spec, results_of(spec, results))

    return build


@pytest.fixture(scope="module")
def all_results(results):
    return pd.concat(results.values())


# The paper's tables and figures


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_table_of_the_paper_is_filled(path, built):
    spec, table, missing = built(path)
    empty = table[table["here"] == "–"]
    minus_itself = [("LoRA", "Platinum vs LoRA"), ("LoRA", "GSM-Plus vs LoRA")] * 2 if path.stem == "transfer" else []
    assert missing == [], f"The sweeps of {path.name}, or of `made_by` in it, do not measure {missing}."
    assert [*zip(empty.get("Method", []), empty["column"], strict=False)] == minus_itself
    assert len(empty) == len(minus_itself)
    papers = [str(number) for row in spec["rows"] for number in row[len(spec["heads"]) :] if number is not None]
    assert [number for number in table.get("paper", []) if number != "–"] == papers
    shown = table_files.lay_out(spec, table, saved_tables.bold_in_markdown)
    sources = [name for name in ("paper", "here") if name in table]
    assert shown.shape == (len(spec["rows"]), len(spec["columns"]) * len(sources))
    assert shown.to_numpy().ravel()[-1].strip("*") == table[sources[-1]].iloc[-1]
    if path.stem == "recipes":
        assert table.set_index(["Setting", "column"]).loc[("Optimizer steps", "Tulu 2-100k"), "here"] == "769"
    if path.stem == "answer_decomposition":
        gains = table.set_index(["Rank", "column"])["here"].str.extract("^([-+.0-9]+)")[0].astype(float).unstack()
        assert np.allclose(gains["Both extractable"] + gains["Missing in either"], gains["Total"], atol=0.011)


@pytest.mark.parametrize(
    "rows", [slice(-1, None), pytest.param(slice(None), marks=pytest.mark.slow)], ids=["last", "all"]
)
@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_other_sweeps_change_no_table_of_the_paper(path, rows, built, all_results):
    spec, table, _ = built(path)
    part, missing = table_files.build_table({**spec, "rows": spec["rows"][rows]}, all_results)
    want = table.iloc[-len(part) :].reset_index(drop=True)[part.columns]
    assert missing == []
    pd.testing.assert_frame_equal(part, want, check_dtype=False)  # a column can have a missing number in another row


def test_final_runs_of_the_papers_sweeps_are_not_left_out(all_results):
    assert len(final_results(all_results)) == len(all_results)


def test_texts_of_results_are_in_one_block(results):
    """Each selection of rows would copy as many blocks as there are columns of texts."""
    kinds = results["gsm8k_depths"].dtypes.astype(str)
    assert {*kinds[["task", "method", "sweep", "recipe_rule", "recipe_run_name"]]} == {"object"}


def assert_readable(plot):
    """The title and the axes have labels, and no text is cut. Return the drawn figure."""
    panels = getattr(plot, "items", [plot])
    assert panels[0].labels.title and all(panel.labels.x and panel.labels.y for panel in panels)
    figure = plot.draw()
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in figure.findobj(Text) if text.get_text().strip()]
    assert all(figure.bbox.padded(2).count_contains(box.get_points()) == 2 for box in boxes if box.width > 1)
    return figure


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_figure_of_the_paper_is_drawn(path, results):
    spec = load_recipe(path)
    plot = figure_files.build_figure(spec, results_of(spec, results))
    figure = assert_readable(plot)
    texts = [text.get_text() for text in figure.findobj(Text)]
    if path.stem == "figure_overview":
        assert {*plot.data["mean"][plot.data["panel"] == "during training"]} == {0.0, 2.0}
    if path.stem == "figure_depth_gains":
        wanted = {**spec["filter"], "trained_loops": 4, "num_loops": 6, "method": "Loop Dropout"}
        gain = plot.data.set_index(["num_loops", "trained_loops"])["mean"][6, 4]
        text, _ = table_files.fill_cell(results["gsm8k_depths"], minus=spec["minus"], **wanted)
        assert text.startswith(f"{gain:+.2f} [")
        assert f"{gain:+.2f}" in texts
        edges = [own.get_edgecolor() for own in figure.findobj(PolyCollection)]
        outlines = [len(own) for own in edges if own.size and to_hex(own[0]) == GRAY]
        assert outlines == [3]  # trained and evaluated at the same depth
    if path.stem == "figure_depth_accuracy":
        wanted = {**spec["filter"], "trained_loops": 4, "num_loops": 6, "method": "Loop Dropout"}
        gain, _ = table_files.fill_cell(results["gsm8k_depths"], minus={"method": "LoRA"}, **wanted)
        assert gain.split()[0] in texts


def test_best_accuracy_among_methods_is_bold():
    spec = {
        "heads": {"Method": "method", "LR": "recipe_learning_rate"},
        "columns": {"A & B": {"task": "a"}, "Minutes": {"task": "a", "of": "train_seconds"}},
        "rows": [["LoRA", 1e-4], ["LoRA+", 1e-4], ["LoRA", 2e-4]],
    }
    numbers = ["85.3 ± 0.6", "110.6", "86.5 ± 0.4", "112.8", "90.1 ± 0.1", "100.0"]
    lines = [
        {"Method": row[0], "LR": str(row[1]), "column": column} for row in spec["rows"] for column in spec["columns"]
    ]
    table = pd.DataFrame(lines).assign(here=numbers, paper=numbers, chose=False, num_seeds=3)
    shown = table_files.lay_out(spec, table, saved_tables.bold_in_markdown)
    assert [*shown.columns] == ["A & B, paper", "A & B, here", "Minutes, paper", "Minutes, here"]
    assert shown["A & B, here"].tolist() == [
        "85.3 ± 0.6",
        "**86.5 ± 0.4**",
        "90.1 ± 0.1",
    ]  # the last one has another LR
    assert shown["Minutes, here"].tolist() == ["110.6", "112.8", "100.0"]
    table.loc[2, "num_seeds"] = 1  # as after a failed run
    shown = table_files.lay_out(spec, table, saved_tables.bold_in_markdown)
    assert shown["A & B, here"].iloc[1] == "86.5 ± 0.4" and shown["A & B, paper"].iloc[1] == "**86.5 ± 0.4**"
    tied = table.assign(here="86.5 ± 0.4", num_seeds=3)
    assert "**" not in "".join(table_files.lay_out(spec, tied, saved_tables.bold_in_markdown)["A & B, here"])
    table.loc[0, "here"] = "–"  # then the best one is not known
    shown = table_files.lay_out(spec, table, saved_tables.bold_in_latex)
    assert shown["A & B, here"].tolist() == ["–", "86.5 ± 0.4", "90.1 ± 0.1"]
    assert saved_tables.escape_latex(shown["A & B, paper"].iloc[1]) == r"\textbf{86.5 $\pm$ 0.4}"
    assert (
        saved_tables.escape_latex("A & B, 5% ~ -0.2, 1e-4, Ouro-1.4B") == r"A \& B, 5\% $\sim$ $-$0.2, 1e-4, Ouro-1.4B"
    )


@pytest.mark.parametrize("head", [{}, {"Ours": {"method": "LoRA"}, "Rank": {"recipe_lora_r": 16}}])
def test_head_of_a_row_has_one_text(head):
    with user_error("A head in `rows` must be a column's value or `{text: {column: value}}`, got {"):
        [*table_files.read_numbers({"rows": [[head]], "heads": {"Method": "method"}, "columns": {}})]


@pytest.mark.parametrize("num_titles", [1, 5])
def test_latex_has_the_papers_number_next_to_ours(num_titles, tmp_path):
    titles = [f"GSM8K_{number}" for number in range(num_titles)]
    columns = pd.MultiIndex.from_product([titles, ["paper", "here"]], names=[None, "numbers"])
    numbers = [["85.3 ± 0.6", "+1.0 [-0.5, +2.5], not significant"] * num_titles]
    table = pd.DataFrame(numbers, pd.Index(["LoRA"], name="Method"), columns)
    if len(columns) > saved_tables.WIDEST:
        table = table.stack("numbers", future_stack=True)
    saved_tables.save_latex(table, TableText("Accuracy in %"), tmp_path / "a")
    text = (tmp_path / "a.tex").read_text()
    family = " Each difference is a test of its own" if num_titles > 1 else ")"
    assert rf"\caption{{Accuracy in \% (n.s.: not significant.{family}" in text
    if num_titles == 1:
        assert r" & \multicolumn{2}{c}{GSM8K\_0} \\" in text and r"\cmidrule(lr){2-3}" in text
        assert r"LoRA & 85.3 $\pm$ 0.6 & +1.0 [$-$0.5, +2.5], n.s. \\" in text
    else:
        assert r"LoRA & paper & 85.3 $\pm$ 0.6 & 85.3" in text and r"LoRA & here & +1.0 [$-$0.5, +2.5], n.s. &" in text


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
def test_tables_compile_with_latex(built, tmp_path, capsys):
    names = []
    for path in TABLES:
        spec, table, _ = built(path)
        saved_tables.save_layout(spec, table, tmp_path / path.stem)
        names.append(path.stem)
    lora = {"task": "a", "num_loops": 4, "gates": "unit", "seed": 1, "method": "LoRA", "metric": "accuracy"}
    lora = pd.DataFrame([lora]).set_index("task")
    saved_tables.save_table(lora, lora, TableText(tables.ACCURACY_TITLE), tmp_path / "accuracy")
    inputs = "".join(rf"\input{{{name}}}\clearpage" for name in [*names, "accuracy"])
    head = r"\documentclass{article}\usepackage{booktabs,graphicx}"
    (tmp_path / "all.tex").write_text(rf"{head}\begin{{document}}{inputs}\end{{document}}")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all"]
    log = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=120)
    assert log.returncode == 0, log.stdout[-2000:]
    assert b"Overfull" not in log.stdout


def test_tables_and_figures_name_existing_files():
    labels = [load_recipe(path)["label"] for path in FILES]
    assert len(labels) >= 39 and [label for label in labels if labels.count(label) > 1] == []
    files = set(re.findall(r"recipes/[\w./-]+\.(?:yaml|py)", "".join(path.read_text() for path in FILES)))
    assert files and [file for file in files if not (ROOT / file).is_file()] == []


# Averages and differences


def accuracy_table(folder):
    return tables.accuracy_table(tables.accuracy_numbers(frames.load_results(folder)))


def cell(folder, **options):
    return numbered_cell(folder, **options)[0]


def numbered_cell(folder, **options):
    return table_files.fill_cell(frames.load_results(folder), **{"task": "b", "method": "LoRA", **options})


@pytest.mark.parametrize("row", PAPER["mean_sd"])
def test_mean_sd_matches_the_paper(row, tmp_path):
    """86.53 ± 0.44 is 1148, 1139 and 1137 of 1319."""
    for seed, correct in enumerate(row["per_seed_correct"]):
        write(tmp_path / str(seed), [{"value": 100 * correct / row["n"]}], seed=seed)
    decimals = len(row["mean_printed"].split(".")[1])
    assert cell(tmp_path, decimals=decimals) == f"{row['mean_printed']} ± {row['sd_printed']}"


def test_average_rejects_other_settings_and_results(tmp_path):
    recipe = {"learning_rate": 0.001, "output_dir": "a", "eval_num_loops": [2]}
    write(tmp_path / "1", [{"value": 50.0}], recipe)
    write(tmp_path / "copy", [{"value": 50.0}], recipe)
    write(tmp_path / "2", [{"value": 60.0}], {**recipe, "output_dir": "b", "eval_num_loops": [3], "seed": 2}, seed=2)
    assert cell(tmp_path) == "55.00 ± 7.07"
    write(tmp_path / "3", [{"value": 51.0}], recipe)
    first, third = (f"{tmp_path}/{name}/results.jsonl" for name in "13")
    two = f"One seed has two results, .*`accuracy` of LoRA on b in {first} and 1 more .50. and {third} .51.. Report their"
    with user_error(two):
        cell(tmp_path)
    write(tmp_path / "3", [{"value": 50.0}], {**recipe, "learning_rate": 0.002})
    with user_error(
        f"`recipe_learning_rate` differs .* in {first} and 2 more .0.001. and {third} .0.002.*one at a time"
    ):
        cell(tmp_path)


def test_a_mean_takes_the_last_weights_and_names_checkpoints(tmp_path):
    """The best step of an early stop differs between seeds, and a checkpoint that `evaluate` measured is apart."""
    for seed in (1, 2):
        rows = [{"value": 50.0 + seed}, {"task": "training", "metric": "train_seconds", "value": 9.0}]
        write(tmp_path / str(seed), rows, {"learning_rate": 0.001}, seed=seed, step=10 * seed, training=f"id {seed}")
    at = {"adapter": str(tmp_path / "1/checkpoint-5"), "training": "id 1"}
    write(tmp_path / "later", [{"value": 20.0, **at, "step": 5}, {"value": 51.0, **at, "step": 10}])
    table = accuracy_table(tmp_path).reset_index()
    assert table.set_index("method")["accuracy"].to_dict() == {"LoRA": "51.50 ± 0.71", "LoRA, checkpoint = 5": "20.00"}


@pytest.mark.parametrize("change", [{"step": 20}, {"training": "id 2"}], ids=["longer", "begun again"])
def test_results_of_replaced_weights_are_left_out(change, tmp_path):
    at, adapter = {"training": "id 1"}, {"adapter": str(tmp_path / "run")}
    checkpoint = {"adapter": str(tmp_path / "run/checkpoint-5"), "step": 5}
    write(tmp_path / "run/evaluation", [{"value": 40.0, **at, **adapter}, {"value": 20.0, **at, **checkpoint}])
    write(tmp_path / "run", [{"task": "training", "metric": "train_seconds", "value": 9.0}], **{**at, **change})
    place = f"Left out: 1 result in {tmp_path}/run/evaluation, because later trainings replaced the measured weights."
    results = frames.load_results(tmp_path)
    assert results.attrs["left_out"].startswith(place) and 40.0 not in {*results["value"]} >= {20.0}
    write(tmp_path / "run/evaluation", [{"value": 50.0, **at, **adapter, **change}])
    table = accuracy_table(tmp_path).reset_index().set_index("method")["accuracy"]
    assert table["LoRA"] == "50.00"
    # In a copy of the folder, the former weights are the present ones.
    write(tmp_path / "copy", [{"task": "training", "metric": "train_seconds", "value": 9.0}], **at)
    assert 40.0 in {*frames.load_results(tmp_path)["value"]}


@pytest.mark.parametrize("gains", [[2.0, 1.0, 6.0], [5.0, 6.0, 5.0], [0.0, 0.1, 0.0]])
def test_difference_is_paired_by_seed(gains, tmp_path):
    write(tmp_path / "lora", [{"seed": seed, "value": 50.0 + 10 * seed} for seed in range(4)])
    rows = [{"seed": seed, "value": 50.0 + 10 * seed + gain} for seed, gain in enumerate(gains)]
    write(tmp_path / "ours", rows, method="Loop Dropout")
    test = stats.ttest_1samp(gains, 0)
    low, high = test.confidence_interval()
    remark = "" if test.pvalue < 0.05 else ", not significant"
    options = {"method": "Loop Dropout", "minus": {"method": "LoRA"}, "decimals": 3}
    assert cell(tmp_path, **options) == f"{np.mean(gains):+.3f} [{low:+.3f}, {high:+.3f}]{remark}"
    _, numbers = numbered_cell(tmp_path, **options)
    expected = [np.mean(gains), low, high, test.pvalue]
    assert [numbers[name] for name in ("difference", "low", "high", "p")] == pytest.approx(expected, nan_ok=True)
    assert (numbers["num_seeds"], numbers["test"]) == (len(gains), "t test over seeds")
    assert cell(tmp_path, **{**options, "minus": {"method": "Loop Dropout"}}) == "–"  # itself
    assert cell(tmp_path, **options, seed=0) == f"{gains[0]:+.3f}"
    assert cell(tmp_path, **options, show="seeds") == " / ".join(f"{gain:+.3f}" for gain in gains)


@pytest.mark.parametrize("gain", [0.0, 10 / 3])
def test_equal_differences_of_all_seeds_have_no_interval(gain, tmp_path, capsys):
    """Student's t would give an interval of width zero and p < 0.001, also if only rounding tells them apart."""
    write(tmp_path / "runs/lora", [{"seed": seed, "value": 100 * seed / 7} for seed in (1, 2)])
    rows = [{"seed": seed, "value": 100 * seed / 7 + gain} for seed in (1, 2)]
    write(tmp_path / "runs/ours", rows, method="Loop Dropout")
    options = {"method": "Loop Dropout", "minus": {"method": "LoRA"}}
    text, numbers = numbered_cell(tmp_path / "runs", **options)
    assert text == f"{gain:+.2f}, the same for each seed"
    assert numbers["difference"] == pytest.approx(gain) and numbers["test"] == "the same for each seed"
    assert all(math.isnan(numbers[name]) for name in ("low", "high", "p"))
    report.main([str(tmp_path / "runs"), "--output_dir", str(tmp_path / "report")])
    table, saved = capsys.readouterr().out, (tmp_path / "report/accuracy.md").read_text()
    for text in (table, saved):
        assert "A difference that is the same for each seed has no interval" in " ".join(text.split())
        assert "not significant" not in text and "<0.001" not in text


def test_cell_shows_seeds_costs_and_averages(tmp_path):
    for seed in (1, 2):
        rows = [{"value": 50.0 + seed}, {"task": "c", "value": 10.0 * seed}]
        rows.append({"task": "training", "metric": "train_seconds", "value": 60.0 * seed})
        write(tmp_path / str(seed), rows, {"learning_rate": 0.001}, seed=seed)
    write(tmp_path / "unmeasured", [{**rows[-1], "value": 1e6}], seed=3)
    assert cell(tmp_path, show="seeds", decimals=1) == "51.0 / 52.0"
    assert cell(tmp_path, of="train_seconds", scale=1 / 60) == "1.50 ± 0.71"
    assert cell(tmp_path, task=["b", "c"]) == "33.25 ± 3.89"
    assert cell(tmp_path, show="recipe_learning_rate") == "0.001"
    for option in ({"of": "train_seconds"}, {"scale": 2.0}):
        with user_error("`minus` must not be set together with `of` or `scale`"):
            cell(tmp_path, minus={"method": "LoRA"}, **option)
    with user_error(
        "`task` must be one with accuracies next to `of`, got training. Leave it out, or set `metric: examples`"
    ):
        cell(tmp_path, task="training", of="examples")
    assert cell(tmp_path, task="training", metric="train_seconds", seed=2) == "120.00"
    heads, columns = {"method": "method"}, {"b": {"task": "b"}}
    spec = {"title": "Mine", "heads": heads, "columns": columns, "rows": [["LoRA", 51.5, 52.0]]}
    with user_error("A row must have at most one number for each of the 1 columns, got .*52.0"):
        table_files.build_table(spec, frames.load_results(tmp_path))


# Reading


def test_select_defaults_to_trained_depth_and_gates(tmp_path):
    alone = {"gates": "loop 1", "loop": 1, "value": 3.0}
    rows = [{"value": 1.0}, {"num_loops": 8, "value": 2.0}, alone]
    write(tmp_path, [*rows, {"task": "training", "metric": "train_seconds", "value": 9.0}])
    results = frames.load_results(tmp_path)
    value = lambda **wanted: frames.select(results, {"task": "b", **wanted})["value"].tolist()
    assert (value(), value(num_loops=8), value(loop=1)) == ([1.0], [2.0], [3.0])
    assert value(recipe_rule="lora") == []


def test_load_results_joins_evaluation_and_training(tmp_path):
    with user_error("There are no results below .* Train or evaluate first"):
        frames.load_results(tmp_path)
    answers = tmp_path / "killed/cache/answers_1_rank0.jsonl"
    answers.parent.mkdir(parents=True)
    answers.touch()
    with user_error("There are no results below .*/killed. An evaluation there was stopped before its first result."):
        frames.load_results(tmp_path / "killed")
    with user_error(f"in the folder of its run: `loopdropout report {tmp_path} --checkpoints true`"):
        (tmp_path / "checkpoint-2").mkdir()
        frames.load_results(tmp_path / "checkpoint-2")
    training, evaluation = tmp_path / "s/lora/lr_0.001/seed_1", tmp_path / "evaluation"
    recipe = {"learning_rate": 0.001, "run_name": "s/lora/lr_0.001/seed_1"}
    write(training, [{"task": "training", "metric": "train_seconds", "value": 9.0}], recipe)
    write(evaluation, [{"value": 50.0, "num_loops": 8}], {"learning_rate": 1.0, "p": 0.5}, adapter=str(training))
    (row,) = frames.load_results(tmp_path).query("metric == 'accuracy'").to_dict("records")
    assert (row["sweep"], row["variant"], row["recipe_learning_rate"], row["trained_loops"]) == ("s", "lora", 0.001, 4)
    assert pd.isna(row["recipe_p"])


def test_base_model_has_no_settings_of_the_adapter_next_to_it(tmp_path):
    """`diagnose` names the adapter in the loss of the base model, which depends on the examples only."""
    base = {
        "task": "development",
        "metric": "loss",
        "method": "base model",
        "gates": "none",
        "seed": None,
        "step": None,
    }
    for number, rate in enumerate((0.001, 0.002, 0.004)):
        recipe = {"learning_rate": rate, "rule": "lora", "split_seed": number // 2}
        write(tmp_path / f"{rate}", [{"task": "training", "metric": "train_seconds", "value": 9.0}], recipe)
        row = {**base, "value": 2.0 + number // 2, "adapter": str(tmp_path / f"{rate}")}
        write(tmp_path / f"{rate}/diagnostics", [row])
    rows = frames.load_results(tmp_path).query("method == 'base model'")
    assert rows[["recipe_learning_rate", "recipe_rule"]].isna().all(axis=None)
    assert [*labelled(rows)["label"].unique()] == [f"base model, split_seed = {seed}" for seed in (0, 1)]


# The command


@pytest.fixture
def quickstart(tmp_path):
    """Folders of two methods with the results of the quickstart, and two learning rates of LoRA."""
    for method, rate in (("Loop Dropout", 0.001), ("LoRA", 0.001), ("LoRA", 0.002)):
        rows = [{"num_loops": depth, "value": 10.0 * depth} for depth in (2, 4, 10)]
        for loop in (1, 2, 3, 4):
            alone = {"gates": f"loop {loop}", "loop": loop, "value": 5.0 * loop}
            rows += [alone, {**alone, "task": "development", "metric": "loss_reduction"}]
        rows.append({"task": "training", "metric": "train_seconds", "value": 9.0})
        rows.append({"method": "base model", "gates": "none", "seed": None, "step": None, "value": 1.0})
        write(tmp_path / "runs" / f"{method} {rate}", rows, {"learning_rate": rate}, method=method)
    return tmp_path / "runs"


def test_report_summarizes_runs(quickstart, tmp_path, capsys, write_figures):
    report.main([str(quickstart), "--output_dir", str(tmp_path / "report")])
    printed = capsys.readouterr().out
    table = pd.read_csv(tmp_path / "report/accuracy.csv")
    rows = table.groupby("method")["mean"].agg(list)
    assert rows["LoRA, lr 0.001"] == [20, 40, 100] and rows["base model"] == [1]
    assert table["difference"].isna().all()  # there are two of LoRA
    assert "interval" not in printed and "test of its own" not in printed
    costs = pd.read_csv(tmp_path / "report/costs.csv")
    assert {*costs["train_seconds"]} == {9} and [*costs][0] == "method"
    text = (tmp_path / "report/costs.md").read_text()
    assert "training in s" in text and "train_seconds" not in text and "label" not in text
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {
        f"{name}.{ending}" for name in ("accuracy", "costs", "loss_reduction") for ending in ("csv", "md", "tex")
    } | {f"overview.{ending}" for ending in ("png", "pdf", "svg")}


def test_reports_of_different_folders_do_not_replace_each_other(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("a", 10.0), ("b", 20.0)):
        write(tmp_path / name / "run", [{"value": value}], method=name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").touch()  # not a report, so none is replaced
    in_notes = ["a", "b", "--output_dir", "notes"], "notes"
    for words, folder in (["a"], "a/report"), (["b"], "b/report"), (["a", "b"], "report_a_b"), in_notes:
        for replaced in ("", ", and has replaced the report there"):
            report.main(words)
            assert capsys.readouterr().out.endswith(f"\nThe report is written to {folder}{replaced}.\n")
        assert {*pd.read_csv(f"{folder}/accuracy.csv")["method"]} == {*words} & {"a", "b"}
    for name in ("x/seed_1", "y/seed_1"):
        write(tmp_path / name, [{"value": 1.0}])
    report.main(["x/seed_1", "y/seed_1"])
    assert Path("report_x_seed_1_y_seed_1/accuracy.csv").is_file()
    former = [f"depth_loss_2.{ending}" for ending in ("csv", "md", "tex")]
    own = ["comparison.csv", "table.csv", "table.md", "table.tex"]  # of the user, and of `--tables table.yaml`
    for name in former + own:
        Path("report_x_seed_1_y_seed_1", name).touch()
    report.main(["x/seed_1", "y/seed_1"])
    files = {path.name for path in Path("report_x_seed_1_y_seed_1").iterdir()}
    assert {*own} <= files and files.isdisjoint(former) and "accuracy.tex" in files
    (tmp_path / "file").touch()
    with user_error("`output_dir` must be a folder that can be written, got file/x .Not a directory."):
        report.main(["a", "--output_dir", "file/x"])


def test_missing_costs_are_dashes(tmp_path, capsys):
    """A training that took no step has no time."""
    row = {"task": "training", "metric": "train_seconds", "value": 9.0}
    write(tmp_path / "a", [row, {**row, "metric": "tokens_per_second"}], method="LoRA")
    write(tmp_path / "b", [{**row, "metric": "tokens_per_second"}], method="Loop Dropout")
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    costs = pd.read_csv(tmp_path / "report/costs.csv", dtype=str, keep_default_na=False).set_index("method")
    assert costs["train_seconds"].to_dict() == {"LoRA": "9.0", "Loop Dropout": ""}
    text = (tmp_path / "report/costs.md").read_text()
    assert re.search(r"\| Loop Dropout +\| +– +\| +9 +\|", text) and "nan" not in capsys.readouterr().out + text


def test_report_shows_the_held_out_loss_of_the_base_model(tmp_path):
    """It is one number on the same examples, also after evaluations in batches of other sizes, which round differently."""
    loss = {"task": "training", "metric": "eval_loss"}
    base = {**loss, "method": "base model", "gates": "none", "seed": None, "step": None}
    for name, value, rate in (("a", 3.1, 0.1), ("b", 3.1000001, 0.2)):
        rows = [{**loss, "value": value - 1}, {**base, "value": value}]
        write(tmp_path / name, rows, {"learning_rate": rate, "train_files": ["x.jsonl"]})
    table = tables.loss_numbers(frames.load_results(tmp_path))
    assert table["mean"].to_dict() == {
        "base model": 3.1,
        "LoRA, lr 0.1": pytest.approx(2.1),
        "LoRA, lr 0.2": pytest.approx(2.1),
    }
    write(tmp_path / "c", [{**base, "value": 4.0}], {"train_files": ["y.jsonl"]})
    table = tables.loss_numbers(frames.load_results(tmp_path))
    assert table["mean"]['base model, train_files = "x.jsonl"'] == 3.1
    assert table["mean"]['base model, train_files = "y.jsonl"'] == 4.0
    for name, recipe in (("d", {"train_files": ["x.jsonl"], "max_length": 64}), ("e", {"train_files": ["y.jsonl"]})):
        rows = [{**loss, "problems": "digest"}, {**base, "value": 4.0, "problems": "digest"}]
        write(tmp_path / "same_tokens" / name, rows, recipe)
    table = tables.loss_numbers(frames.load_results(tmp_path / "same_tokens"))
    assert [name for name in table["mean"].index if "base" in name] == ["base model"]


@pytest.mark.parametrize(("setting", "n"), [
    ({"assistant_only_loss": False}, 60),
    ({"eval_files": ["other.jsonl"]}, 60),
    ({}, 35),
    ({"train_files": ["more.jsonl"], "num_train_epochs": 3.0}, 60),
])  # fmt: skip
def test_losses_on_other_held_out_examples_have_no_difference(setting, n, tmp_path):
    """Other masks count other tokens. Other training examples leave the held-out ones of an own file as they are."""
    loss = {"task": "training", "metric": "eval_loss"}
    recipe = {"train_files": ["x.jsonl"], "eval_files": ["held.jsonl"], "assistant_only_loss": True}
    write(tmp_path / "lora", [{**loss, "value": 2.0, "n": 60}], recipe, method="LoRA")
    write(tmp_path / "ld", [{**loss, "value": 3.0, "n": n}], {**recipe, **setting}, method="Loop Dropout")
    numbers = tables.loss_numbers(frames.load_results(tmp_path))
    sentences = " ".join(tables.explain_differences(numbers))
    is_other = "train_files" not in setting
    expected = "other held-out examples" if is_other else "+1.0000"
    assert [*tables.loss_table(numbers)["minus LoRA"]] == ["", expected]
    assert ("Losses on other held-out examples than those of LoRA" in sentences) == is_other
    assert numbers["difference"].isna().iloc[1] == is_other


@pytest.mark.parametrize(("digests", "changed", "is_other"), [
    (("a", "b"), {}, True),  # a changed file
    (("a", "a"), {"train_files": ["y.jsonl"], "max_length": 64}, False),  # the same tokens in another way
    (("a", None), {}, False),  # of an older version
    (("a", None), {"max_length": 64}, True),
])  # fmt: skip
def test_digests_tell_held_out_examples_apart(digests, changed, is_other, tmp_path, capsys):
    """Those of the losses of two methods, and of the loss of the base model next to one of them."""
    recipe = {"train_files": ["x.jsonl"], "split_seed": 1}
    loss = {"task": "training", "metric": "eval_loss", "n": 60, "value": 2.0}
    base = {**loss, "method": "base model", "gates": "none", "seed": None, "step": None, "problems": digests[0]}
    write(tmp_path / "lora", [{**loss, "problems": digests[0]}, base], recipe, method="LoRA")
    write(tmp_path / "ld", [{**loss, "problems": digests[1]}], {**recipe, **changed}, method="Loop Dropout")
    numbers = tables.loss_numbers(frames.load_results(tmp_path))
    texts = tables.loss_table(numbers)["minus LoRA"]
    assert [text for name, text in texts.items() if "Loop" in name] == [
        "other held-out examples" if is_other else "+0.0000"
    ]
    sentence = (
        f"The losses of 1 training such as {tmp_path}/ld are on other held-out examples than the loss of the base model, or "
        "on other tokens of them, so they do not compare with it."
    )
    assert (sentence in report_on(tmp_path, capsys)[0]) == is_other


def test_seeds_on_changed_held_out_examples_are_left_out(tmp_path, capsys):
    """As after an edit of the data between the trainings of two seeds. Loss reductions have a table of each set instead."""
    loss = {"task": "training", "metric": "eval_loss", "n": 60}
    reduction = {"task": "development", "metric": "loss_reduction", "gates": "loop 1", "loop": 1, "n": 900}
    depth = {"task": "development", "metric": "depth_loss", "n": 900}
    for method in ("LoRA", "Loop Dropout"):
        for seed in (1, 2, 3):
            facts = {"seed": seed, "value": seed, "problems": f"digest {seed == 3}"}
            write(tmp_path / method / str(seed), [{**row, **facts} for row in (loss, reduction, depth)], method=method)
    results = frames.load_results(tmp_path)
    assert results.attrs["left_out"] == (
        f"Left out: 2 results in 2 folders such as {tmp_path}/LoRA/3, because other held-out losses of the same method are on "
        "other held-out examples, or on other tokens of them, so they have no common mean. The files or data sets have "
        "changed between the trainings. Train all seeds on the same ones."
    )
    assert [*tables.loss_numbers(results)["mean"]] == [1.5, 1.5]
    examples = ["held-out examples (900 tokens)", "held-out examples, set 2 (900 tokens)"]
    assert [*tables.split_reductions(results)] == [f"{name} at K = 4" for name in examples]
    for name, table in zip(examples, make_loss_tables(results), strict=True):
        assert table.title.startswith(f"Loss on {name} with K loops")
    losses = results.query("metric == 'depth_loss' and method == 'LoRA'")
    others = losses[losses["problem_set"] == "900 digest True"]
    assert tables.compare(losses.drop(others.index), others).text() == "other held-out examples"


def test_report_compares_problems_of_a_single_seed(tmp_path):
    samples = {}
    for method, correct in (("LoRA", [0, 0, 1, 1]), ("Loop Dropout", [1, 1, 1, 0])):
        write(tmp_path / method, [{"value": 25.0 * sum(correct), "samples": "s.jsonl"}], method=method)
        samples[method] = [{"correct": value} for value in correct * 3]
        write_lines(tmp_path / method / "s.jsonl", samples[method])
    found = compare_answers(samples["Loop Dropout"], samples["LoRA"])
    table = accuracy_table(tmp_path)
    assert [*table["minus LoRA"]] == ["", str(found)] and [*table["p"]] == ["", f"{found.p:.3f}"]
    numbers = tables.accuracy_numbers(frames.load_results(tmp_path)).iloc[1]
    assert tuple(numbers[["difference", "low", "high", "p", "test"]]) == (*found[:4], "McNemar over problems")


def test_different_numbers_of_problems_have_a_column(tmp_path):
    """Also if only the base model, which counts for no number of seeds, was measured on fewer."""
    base = {"method": "base model", "gates": "none", "seed": None, "value": 0.0, "n": 10}
    write(tmp_path / "LoRA", [{"value": 50.0}, base, {"value": 40.0, "num_loops": 2}])
    table = accuracy_table(tmp_path)
    assert [*table.columns] == ["n", "accuracy"] and [*table["n"]] == ["20", "10", "20"]
    assert saved_tables.describe_sizes(tables.accuracy_numbers(frames.load_results(tmp_path))) == [
        "Problems: b 10 or 20. Seeds: 1."
    ]
    write(tmp_path / "LoRA", [{**base, "n": 20}])
    assert [*accuracy_table(tmp_path).columns] == ["accuracy"]


def test_seeds_on_another_number_of_problems_are_left_out(tmp_path):
    """As after `evaluate` of one seed with another `benchmark_limit`. The number that most results have stays."""
    for method in ("LoRA", "Loop Dropout"):
        for seed in (1, 2):
            write(tmp_path / method / str(seed), [{"value": 50.0 + seed}], method=method, seed=seed)
    changed = {"method": "LoRA", "seed": 2, "value": 90.0, "n": 10}
    rows = [changed, {**changed, "gates": "loop 1", "loop": 1}]
    write(tmp_path / "LoRA/2", rows, {"benchmark_limit": 10})
    write(tmp_path / "LoRA/1", [{"method": "LoRA", "value": 7.0, "gates": "loop 1", "loop": 1}])
    results = frames.load_results(tmp_path)
    assert results.attrs["left_out"] == (
        f"Left out: 2 results in {tmp_path}/LoRA/2, because other results of the same method are on another number of "
        "problems of the task, so they have no common mean. Evaluate all seeds with the same `benchmark_limit`."
    )
    figures.overview_figure(results)  # ended in an error, as the table did
    table = accuracy_table(tmp_path).reset_index().set_index("method")
    assert [*table["accuracy"]] == ["51.00", "51.50 ± 0.71"]
    for n, expected in ((10, "90.00"), ([20], "51.00")):
        assert cell(tmp_path, method="LoRA", n=n) == expected
    write(tmp_path / "LoRA/3", [{**changed, "seed": 3, "n": 40}])  # a tie in the task
    write(tmp_path / "LoRA/1", [{"value": 7.0, "n": 10, "seed": 1}])
    assert cell(tmp_path, method="LoRA", show="seeds") == "7.00 / 90.00"


@pytest.mark.parametrize("has_digest", [True, False])
def test_seeds_on_changed_problems_are_left_out(has_digest, tmp_path):
    """As after an edit of a benchmark's file between two starts of a sweep, whose number of problems may stay the same."""
    for method in ("LoRA", "Loop Dropout"):
        for seed in (1, 2, 3):
            row = {"value": 50.0 + seed, "n": 12, "seed": seed, "samples": "s.jsonl", "method": method}
            is_changed = seed == 3
            if has_digest:
                row["problems"] = f"digest {is_changed}"
            folder = tmp_path / method / str(seed)
            write(folder, [row, {**row, "num_loops": 2}])
            targets = [f"answer {is_changed} {number}" for number in range(12)]
            write_lines(folder / "s.jsonl", [{"correct": 1, "target": target} for target in targets])
            if has_digest:
                (folder / "s.jsonl").unlink()
    sentence = (
        f"Left out: 4 results in 2 folders such as {tmp_path}/LoRA/3, because other results of the same method are on other "
        "problems of the task, so they have no common mean. The limit is the same, so the file or data set of the task has "
        "changed between the measurements. Measure all seeds again on the same one."
    )
    assert frames.load_results(tmp_path).attrs["left_out"] == sentence
    assert accuracy_table(tmp_path).loc[("b", "4", "LoRA"), "accuracy"] == "51.50 ± 0.71"
    more = {"method": "LoRA", "seed": 4, "value": 9.0, "n": 14, "problems": "more"}
    write(tmp_path / "LoRA/4", [more, {**more, "num_loops": 2}])  # a changed file, although the number tells it
    results = frames.load_results(tmp_path)
    assert "6 results in 3 folders" in results.attrs["left_out"]
    with user_error("`problem_set` differs between .* so they have no common mean"):
        cell(tmp_path, method="LoRA", n=12, num_loops=4)
    mean = {"method": "LoRA", "num_loops": 4, "problem_set": results["problem_set"].mode()[0]}
    assert cell(tmp_path, **mean) == "51.50 ± 0.71"


def test_copies_of_a_base_model_have_one_name(tmp_path):
    """Their trainings ran in different places. Without the same digest of the weights, their seeds have no common mean."""
    base = {"method": "base model", "gates": "none", "seed": None, "value": 20.0}
    for seed, place in ((1, "/home/base"), (2, "/scratch/base")):
        recipe = {"model_name_or_path": place}
        write(tmp_path / str(seed), [{"value": 50.0 + seed}, base], recipe, seed=seed, training=f"id {seed}")
        write_metadata(tmp_path / str(seed), {"base_weights": "abc"})
    assert accuracy_table(tmp_path)["accuracy"].to_dict() == {
        ("b", "4", "base model"): "20.00",
        ("b", "4", "LoRA"): "51.50 ± 0.71",
    }
    write_metadata(tmp_path / "2", {"base_weights": "other"})
    assert len(accuracy_table(tmp_path)) == 4


@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
@pytest.mark.parametrize("problems", [range(12, 24), range(11)])
def test_accuracies_on_other_problems_have_no_difference(problems, seeds, tmp_path):
    """As after another `benchmark_limit` or a changed file of problems. A copy without the answers has the means only."""
    for method, numbers in (("LoRA", range(12)), ("Loop Dropout", problems)):
        for seed in seeds:
            row = {"value": seed, "samples": f"{seed}.jsonl", "n": len(numbers), "seed": seed}
            write(tmp_path / method, [row], method=method)
            samples = [{"correct": 1, "target": f"answer {number}"} for number in numbers]
            write_lines(tmp_path / method / f"{seed}.jsonl", samples)
    assert [*accuracy_table(tmp_path)["minus LoRA"]] == ["", "other problems"]
    text, numbers = numbered_cell(tmp_path, method="Loop Dropout", minus={"method": "LoRA"}, show="seeds")
    assert text == "other problems" and math.isnan(numbers["difference"])
    numbers = tables.accuracy_numbers(frames.load_results(tmp_path))
    (sentence,) = tables.explain_differences(numbers)
    assert sentence.startswith(
        "Accuracies on other problems than those of LoRA have no difference. Evaluate both again"
    )
    expected = "other problems" if len(problems) == 11 else "+0.0"
    for path in tmp_path.glob("LoRA/*[0-9].jsonl"):
        write_lines(path, samples)  # evaluated again in the same program, on the same problems
    assert accuracy_table(tmp_path)["minus LoRA"].iloc[1].startswith(expected)
    for path in tmp_path.glob("LoRA/*[0-9].jsonl"):
        path.unlink()
    assert accuracy_table(tmp_path)["minus LoRA"].iloc[1].startswith(expected)


def test_differences_of_a_column_have_the_same_decimals(tmp_path):
    """Those of a single seed, over problems, have as many as those over seeds."""
    for method, correct in (("LoRA", [0, 0, 1, 1]), ("Loop Dropout", [1, 1, 1, 0])):
        rows = [{"task": "a", "seed": seed, "value": 25.0 * sum(correct) + seed} for seed in (1, 2)]
        write(tmp_path / method, [*rows, {"value": 25.0 * sum(correct), "samples": "s.jsonl"}], method=method)
        write_lines(tmp_path / method / "s.jsonl", [{"correct": value} for value in correct * 3])
    for task, begin in (("a", "+25.00, the same"), ("b", "+25.00 [")):
        assert cell(tmp_path, task=task, method="Loop Dropout", minus={"method": "LoRA"}).startswith(begin)


def test_columns_of_costs_have_equal_digits_and_their_seeds(tmp_path, capsys):
    for method, seconds in (("LoRA", [5006.03]), ("Loop Dropout", [5623.8, 5624.0])):
        costs = [("train_seconds", second) for second in seconds] + [("trainable_parameters", 39424)] * len(seconds)
        for seed in range(len(seconds)):
            rows = [
                {"task": "training", "metric": metric, "value": value} for metric, value in costs[seed :: len(seconds)]
            ]
            write(tmp_path / method / str(seed), rows, method=method, seed=seed)
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    assert "Costs of the training, mean over seeds\n" in capsys.readouterr().out
    latex = (tmp_path / "report/costs.tex").read_text()
    assert r"\caption{Costs of the training, mean over seeds}" in latex
    assert r"39424 & 5006.03 & 1 \\" in latex and r"39424 & 5623.90 & 2 \\" in latex
    shutil.rmtree(tmp_path / "LoRA")
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    assert "Costs of the training, mean over 2 seeds\n" in capsys.readouterr().out


def test_two_results_of_one_seed_are_no_mean_of_costs(tmp_path, capsys):
    """As those of two folders with sweeps of one name. The sentence comes before any table."""
    for folder in ("a", "b"):
        costs = {"task": "training", "metric": "train_seconds", "value": float(ord(folder))}
        write(tmp_path / folder, [costs, {"value": 50.0}])
    with user_error("One seed has two results, the results `train_seconds` of LoRA on training in "):
        report.main([str(tmp_path)])
    assert "Costs" not in capsys.readouterr().out and not (tmp_path / "report").exists()


@pytest.mark.parametrize("has_summary", [True, False])
def test_tables_and_legends_have_one_order_of_methods(tmp_path, has_summary):
    """It is the order of the sweep's recipe after the base model and LoRA, or by name without a sweep."""
    titles = {"rslora": "rsLoRA", "loop_dropout": "Loop Dropout", "lora": "LoRA", "coto": "CoTo"}
    for rule, title in titles.items():
        run_name = f"mine/{rule}/lr_0.1/seed_1"
        rows = [{"metric": "accuracy", "value": 50.0}, {"task": "training", "metric": "eval_loss", "value": 2.0}]
        rows += [{"task": "training", "metric": "train_seconds", "value": 9.0}]
        rows += [{"metric": "loss_reduction", "gates": f"loop {loop}", "loop": loop, "value": 5.0} for loop in (1, 2)]
        base = {**rows[1], "method": "base model", "gates": "none", "seed": None}
        write(tmp_path / run_name, [*rows, base], {"run_name": run_name, "rule": rule}, method=title)
    if has_summary:
        update_summary(tmp_path / "mine", full_grid=dict.fromkeys(titles, True))
    others = ["rsLoRA", "Loop Dropout", "CoTo"] if has_summary else ["CoTo", "Loop Dropout", "rsLoRA"]
    results = frames.load_results(tmp_path)
    accuracy, reductions = tables.accuracy_numbers(results), results[results["metric"] == "loss_reduction"]
    found = [
        [*tables.cost_numbers(results[results["metric"] == "train_seconds"]).index],
        [*accuracy.index.get_level_values("method")],
        [*loss_tables.reduction_numbers(reductions).index.get_level_values("method").unique()],
        [*figures.overview_figure(results).items[0].data["label"].unique()],
    ]
    assert found == [["LoRA", *others]] * len(found)
    assert [*tables.loss_numbers(results).index] == ["base model", "LoRA", *others]


@pytest.mark.parametrize(("num_seeds", "title", "seeds"), [
    ((1, 1), "x, adapter in one loop only, in %", None),
    ((2, 2), "in %, mean ± SD over 2 seeds", None),
    ((1, 2), "in %, mean ± SD over seeds", ["1", "2"]),
])  # fmt: skip
def test_title_of_loss_reductions_has_equal_numbers_of_seeds(tmp_path, num_seeds, title, seeds):
    """As those of losses. Different numbers have a column."""
    for method, number in zip(("LoRA", "Loop Dropout"), num_seeds, strict=True):
        row = {"metric": "loss_reduction", "gates": "loop 1", "loop": 1, "value": 5.0}
        write(tmp_path / method, [{**row, "seed": seed} for seed in range(number)], method=method)
    results = frames.load_results(tmp_path)
    made, texts = loss_tables.make_reduction_table("x", loss_tables.reduction_numbers(results))
    assert made.endswith(title)
    assert texts.get("seeds", pd.Series(dtype=object)).tolist() == (seeds or [])


def test_base_model_of_an_own_table_has_no_seeds(tmp_path, capsys):
    """So a method with several seeds can be the best one."""
    rows = [{"seed": seed, "value": 60.0 + seed} for seed in (1, 2)]
    base = {"method": "base model", "gates": "none", "seed": None, "step": None, "value": 10.0}
    write(tmp_path / "runs", [*rows, base])
    text, folder = report_on(tmp_path / "runs", capsys, rows=[["base model"], ["LoRA"]], columns={"all": {}})
    assert "Seeds: 2. A number with ± is mean ± SD over 2 seeds." in text
    assert "**61.50 ± 0.71**" in (folder / "own.md").read_text()


def test_report_of_few_problems_has_no_interval(tmp_path):
    for method, correct in (("LoRA", 0), ("Loop Dropout", 1)):
        write(tmp_path / method, [{"value": 100.0 * correct, "samples": "s.jsonl"}], method=method)
        write_lines(tmp_path / method / "s.jsonl", [{"correct": correct}] * 9)
    table = accuracy_table(tmp_path)
    assert [*table["minus LoRA"]] == ["", "+100.0, too few problems"] and "p" not in table


def test_saved_tables_have_numbers(tmp_path, capsys):
    """A program reads numbers in the CSV files, and the LaTeX files have the label of the table's own file."""
    for method, shift in (("LoRA", 0), ("Loop Dropout", 5)):
        rows = [{"seed": seed, "value": 50.0 + seed * (1 + shift)} for seed in (1, 2, 3)]
        losses = [{**row, "task": "training", "metric": "eval_loss"} for row in rows]
        rows += [*losses, *({**row, "metric": "last_number", "n": 30} for row in rows)]
        write(tmp_path / "runs" / method, rows, method=method)
    spec = {
        "label": "tab:mine", "title": "Mine", "made_by": ["x"], "filter": {"task": "b"}, "heads": {"Method": "method"},
        "columns": {
            "trainable_parameters of it": {},
            "Gain": {"minus": {"method": "LoRA"}},
            "last": {"metric": "last_number"},
            "loss": {"task": "training", "metric": "eval_loss"},
        },
        "rows": [["LoRA"], ["Loop Dropout"]],
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    words = [str(tmp_path / "runs"), "--output_dir", str(tmp_path)]
    report.main(words)
    report.main([*words, "--tables", str(tmp_path / "mine.yaml")])
    test = stats.ttest_1samp([5, 10, 15], 0)
    accuracy = pd.read_csv(tmp_path / "accuracy.csv").set_index("method").loc["Loop Dropout"]
    assert [*accuracy[["num_problems", "mean", "sd", "num_seeds", "difference"]]] == pytest.approx([20, 62, 6, 3, 10])
    sizes = "Problems: b 20. Seeds: 3."
    assert sizes in (tmp_path / "accuracy.md").read_text() and f". {sizes}" in (tmp_path / "accuracy.tex").read_text()
    assert [*accuracy[["low", "high", "p"]]] == pytest.approx([*test.confidence_interval(), test.pvalue])
    losses = pd.read_csv(tmp_path / "held_out_loss.csv").set_index("method").loc["LoRA"]
    assert [*losses[["mean", "sd", "num_seeds"]]] == [52, 1, 3] and pd.isna(losses["difference"])
    mine = pd.read_csv(tmp_path / "mine.csv").set_index(["Method", "column"])
    assert mine.loc[("Loop Dropout", "Gain"), "p"] == pytest.approx(test.pvalue)
    assert mine.loc[("LoRA", "trainable_parameters of it"), ["mean", "sd"]].tolist() == [52, 1]
    assert mine.loc[("LoRA", "Gain"), "here"] == "–" and pd.isna(mine.loc[("LoRA", "Gain"), "difference"])
    assert mine["num_problems"].value_counts().to_dict() == {20: 3, 30: 2}  # a missing number and a loss have none
    for name in ("accuracy", "mine"):
        counts = pd.read_csv(tmp_path / f"{name}.csv", dtype=str)[["num_problems", "num_seeds"]]
        assert counts.apply(lambda own: own.dropna().str.fullmatch(r"\d+").all()).all()
    latex = (tmp_path / "mine.tex").read_text()
    tested = "The 95\\% intervals and tests are over seeds (t test)."
    assert "A number with $\\pm$ is mean $\\pm$ SD over 3 seeds." in latex
    assert tested in latex and tested in (tmp_path / "accuracy.tex").read_text()
    assert (
        "Mine. Problems: 20 or 30. Seeds: 3." in latex
        and "\nProblems: 20 or 30. Seeds: 3.\n" in (tmp_path / "mine.md").read_text()
    )
    assert r"\label{tab:mine}" in latex and r"trainable\_parameters \\ of it" in latex
    printed = capsys.readouterr().out
    assert "Missing" not in printed and f"Wrote {tmp_path / 'mine'}.md, .tex and .csv" in printed


@pytest.mark.parametrize("minus", [{"method": "LoRA"}, {"variant": "lora"}, {"method": "LoRA", "variant": "lora"}])
@pytest.mark.parametrize("head", [{"variant": "mine"}, {"method": "Mine", "variant": "mine"}], ids=str)
def test_cell_subtracts_a_method_or_a_variant(tmp_path, head, minus):
    """A method that contradicts the variant of the row replaces it."""
    for variant, method, value in (("lora", "LoRA", 50.0), ("mine", "Mine", 56.0)):
        run = {"run_name": f"sweep/{variant}/lr_0.1/seed_1"}
        write(tmp_path / variant, [{"value": value, "seed": seed} for seed in (1, 2)], run, method=method)
    _, numbers = table_files.fill_cell(frames.load_results(tmp_path), **head, minus=minus)
    assert numbers["difference"] == 6


def test_summary_has_tasks_together_and_no_rejected_rates(tmp_path, capsys):
    """The runs that only chose a learning rate are in the sweep's own list."""
    for rate, tasks in ((0.001, ["development"]), (0.002, ["development", "b", "a"])):
        run_name = f"mine/lora/lr_{rate}/seed_1"
        rows = [{"task": task, "num_loops": depth, "value": 50.0} for task in tasks for depth in (4, 8)]
        rows.append({"task": "training", "metric": "train_seconds", "value": 1.0})
        write(tmp_path / run_name, rows, {"run_name": run_name, "learning_rate": rate})
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    printed = capsys.readouterr().out
    assert "Left out: 1 run that only chose a learning rate." in printed and "0.001" not in printed
    for name, tasks in (("accuracy", ("b", "a")), ("choice", ("development",))):
        table = pd.read_csv(tmp_path / f"report/{name}.csv")
        places = [(task, depth, "LoRA") for task in tasks for depth in (4, 8)]
        assert [*table[["task", "K", "method"]].itertuples(index=False, name=None)] == places


def write_runs(folder, rates_and_seeds, sweep="mine", **settings):
    """Write the held-out losses of runs of a sweep with some settings, by learning rate and seed."""
    for rate, seeds in rates_and_seeds.items():
        for seed in seeds:
            run_name = f"{sweep}/lora/lr_{rate:g}/seed_{seed}"
            row = {"metric": "eval_loss", "task": "training", "value": 1000 * rate + seed, "seed": seed}
            base = {
                **row,
                "metric": "loss",
                "task": "development",
                "method": "base model",
                "gates": "none",
                "seed": None,
            }
            write(folder / run_name, [row, base], {"run_name": run_name, "learning_rate": rate, **settings})


def test_sweeps_are_reported_next_to_each_other(tmp_path, capsys):
    """Each with its number of seeds, if they differ, and with its settings, which the name of the sweep replaces in labels."""
    write_runs(tmp_path, {0.001: [1, 2]}, max_steps=20)
    write_runs(tmp_path, {0.001: [1]}, "other", max_steps=40)
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    printed = capsys.readouterr().out
    assert re.search(r"LoRA, sweep = mine +2.5000 ± 0.7071 +2 *\n", printed)
    assert re.search(r"LoRA, sweep = other +2.0000 +1 *\n", printed)
    text = (
        "Other settings between the sweeps, from which a difference can come, too: max_steps (mine: 20, other: 40).\n"
    )
    assert text in printed
    report.main([str(tmp_path / "mine"), "--output_dir", str(tmp_path / "report")])
    column = r"(?m)^method +loss +seeds *$"
    of_one = capsys.readouterr().out
    assert re.search(column, printed) and not re.search(column, of_one) and "between the sweeps" not in of_one
    losses = tables.loss_numbers(frames.load_results(tmp_path))
    print_lowest(losses)
    text = "The held-out losses are not compared, because the methods have different seeds"
    assert f"{text} (LoRA, sweep = mine: 1, 2; LoRA, sweep = other: 1).\n" in capsys.readouterr().out


def test_methods_of_two_sweeps_are_compared_in_each_one(tmp_path):
    """Also a method of only one of them, and if only the sweep and its settings tell both LoRAs apart."""
    for sweep_name, other, limit in (("a", "Taper", 20), ("b", "taper", 40)):
        for variant, rule, title, gain in (("lora", "lora", "LoRA", 0.0), (other, "mine", "Mine", 2.0)):
            for seed in (1, 2):
                name = f"{sweep_name}/{variant}/lr_0.001/seed_{seed}"
                recipe = {"run_name": name, "rule": rule, "max_steps": limit, "learning_rate": 0.001}
                row = {"value": 50.0 + limit + seed + gain * seed, "task": f"of_{sweep_name}"}
                write(tmp_path / name, [row, {**row, "task": "of_both"}], recipe, method=title, seed=seed)
    numbers = tables.accuracy_numbers(frames.load_results(tmp_path))["difference"]
    assert [*numbers.loc["of_a"].reset_index("K", drop=True).dropna().items()] == [("Taper, sweep = a", 3.0)]
    of_one = frames.load_results(tmp_path).query("sweep == 'a'")  # as a table that only one sweep has results for
    assert {*labelled(of_one)["label"]} == {"LoRA, sweep = a", "Taper, sweep = a"}
    differences = numbers.loc["of_both"].reset_index("K", drop=True)
    assert [*differences.dropna().items()] == [("Taper, sweep = a", 3.0), ("taper, sweep = b", 3.0)]
    assert [*differences[differences.isna()].index] == ["LoRA, sweep = a", "LoRA, sweep = b"]


def test_report_shows_the_rates_of_a_sweep(tmp_path, capsys):
    write_runs(tmp_path, {0.001: [1], 0.002: [1, 2]})
    remark = "The best rate is the largest of the grid."
    update_summary(tmp_path / "mine", choices={"lora": {"rates": [0.001, 0.002], "best": 0.002, "remark": remark}})
    report.main([str(tmp_path / "mine")])
    chosen = f"The sweep in {tmp_path}/mine has chosen:\n  lora: learning rate 0.002. {remark}\n"
    assert chosen in capsys.readouterr().out
    others = {name: {"rates": [0.001], "best": 0.001, "remark": remark} for name in ("coto", "taper")}
    update_summary(tmp_path / "mine", choices={**others, "plain": {"rates": [0.001], "best": 0.001, "remark": ""}})
    report.main([str(tmp_path / "mine")])
    out = capsys.readouterr().out  # a remark that methods share is there once
    assert out.count(remark) == 1 and f"\n  lora, coto, taper: {remark}\n" in out
    assert "\n  lora: learning rate 0.002.\n  coto: learning rate 0.001.\n" in out
    table = (tmp_path / "mine/report/held_out_loss.md").read_text()
    assert "Learning rate: 0.002." in table and "Learning rate: 0.002.\n" in out
    for run in tmp_path.glob("mine/lora/lr_0.002/seed_*"):
        row = {"metric": "eval_loss", "task": "training", "value": 1.0, "seed": int(run.name[-1])}
        recipe = {"run_name": f"mine/coto/lr_0.001/{run.name}", "learning_rate": 0.001, "rule": "coto"}
        write(tmp_path / recipe["run_name"], [row], recipe, method="CoTo")
    report.main([str(tmp_path / "mine")])
    out = capsys.readouterr().out
    assert out.count("\nLearning rates: LoRA 0.002, CoTo 0.001.\n") == 1
    report.main(
        [str(tmp_path / "mine"), str(tmp_path / "mine/lora/lr_0.001"), "--output_dir", str(tmp_path / "rates")]
    )
    assert "Learning rate" not in capsys.readouterr().out  # the labels have them


def test_own_table_leaves_out_runs_that_only_chose(tmp_path, capsys):
    """As the summary does, so that the mean over seeds is one of final runs."""
    write_runs(tmp_path, {0.001: [1], 0.002: [1, 2], 0.004: [1]})
    spec = {
        "label": "tab:mine", "title": "Mine", "made_by": ["x"], "filter": {"task": "training", "metric": "eval_loss"},
        "heads": {"Method": "method"}, "columns": {"loss": {}}, "rows": [["LoRA"]],
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    report.main([str(tmp_path), "--output_dir", str(tmp_path), "--tables", str(tmp_path / "mine.yaml")])
    assert "Left out: 2 runs that only chose a learning rate." in capsys.readouterr().out
    assert pd.read_csv(tmp_path / "mine.csv")["here"].to_list() == ["3.50 ± 0.71"]
    only_left_out = {
        **spec,
        "filter": {**spec["filter"], "recipe_learning_rate": 0.001},
        "made_by": ["loopdropout sweep x"],
    }
    figure = {**DEPTHS, "filter": only_left_out["filter"], "panels": {"all": {}}, "gain_over": {}}
    for file in (only_left_out, figure):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
        report.main([str(tmp_path), "--output_dir", str(tmp_path), "--tables", str(tmp_path / "mine.yaml")])
        printed = " ".join(capsys.readouterr().out.split())
        assert "The report leaves out results that have it. Its last lines say how to include them." in printed
        assert "Name their folders, too" in printed and "loopdropout sweep" not in printed


@pytest.mark.parametrize(
    ("summary", "num_seeds", "said"),
    [
        (
            {"full_grid": {"lora": True}, "trainings": {"lora": [3, 4]}},
            [1, 2],
            "is not finished: 3 of 4 trainings have",
        ),
        (
            {"choices": {"lora": {"best": 0.001}}, "trainings": {"lora": [4, 4]}},
            [1],
            "Left out: 2 runs that only chose",
        ),
        ({}, [2], "Left out: 1 run that only chose a learning rate."),  # of an older version
    ],
    ids=["grid", "chosen", "without a summary"],
)
def test_report_knows_which_runs_only_chose(tmp_path, capsys, summary, num_seeds, said):
    """By the sweep's own summary. Missing runs of an unfinished grid do not make the others runs of a choice."""
    write_runs(tmp_path, {0.001: [1], 0.002: [1, 2]})
    if summary:
        (tmp_path / "mine/summary.json").write_text(json.dumps(summary))
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    out = capsys.readouterr().out
    assert said in out and ("Left out" in out) == said.startswith("Left out")
    assert [*pd.read_csv(tmp_path / "report/held_out_loss.csv")["num_seeds"]] == num_seeds


@pytest.fixture
def finished_sweep(tmp_path):
    """Folder of a sweep of two methods with two seeds. `development` chose the rate 0.002, and a checkpoint was evaluated."""
    choices = {method: {"rates": [0.001, 0.002], "best": 0.002} for method in ("lora", "loop_dropout")}
    for method, rule in (("LoRA", "lora"), ("Loop Dropout", "loop_dropout")):
        for rate, seed in ((0.001, 1), (0.002, 1), (0.002, 2)):
            run_name = f"mine/{rule}/lr_{rate:g}/seed_{seed}"
            run, place = tmp_path / run_name, {"method": method, "seed": seed, "training": run_name}
            tasks = ["development", "b"] if rate == 0.002 else ["development"]
            rows = [{"task": task, "value": 50.0 + len(task) + seed * len(rule)} for task in tasks]
            rows += [{**row, "num_loops": 8, "value": 20.0 + seed * len(rule)} for row in rows]
            rows.append({"task": "training", "metric": "train_seconds", "value": 9.0})
            write(run, rows, {"run_name": run_name, "learning_rate": rate, "rule": rule}, **place)
    checkpoint = {"task": "b", "value": 7.0, "adapter": str(run / "checkpoint-5"), "step": 5}
    base = {**checkpoint, "method": "base model", "gates": "none", "seed": None, "step": None, "training": None}
    write(run / "evaluation", [checkpoint], **place)
    write(run / "evaluation", [{**base, "value": 1.0}])
    update_summary(tmp_path / "mine", choices=choices, select_on=dict.fromkeys(choices, "development"))
    return tmp_path / "mine"


def test_report_of_an_evaluation_has_the_models_that_it_names(finished_sweep, tmp_path):
    """At its own `benchmark_limit`, whatever those of the trainings are, which are no property of their results."""
    evaluation = tmp_path / "own"
    for number, (rate, seed) in enumerate(((0.001, 1), (0.002, 1), (0.002, 2)), start=1):
        run = finished_sweep / f"lora/lr_{rate}/seed_{seed}"
        recipe = yaml.safe_load((run / "recipe.yaml").read_text())
        dump_recipe({**recipe, "benchmark_limit": 10 * number}, run / "recipe.yaml")
        row = {
            "num_loops": 6,
            "value": 30.0 + seed,
            "limit": 7,
            "n": 7,
            "training": f"mine/lora/lr_{rate}/seed_{seed}",
        }
        write(evaluation, [{**row, "seed": seed}], {"benchmark_limit": 5}, adapter=str(run))
    means = {"LoRA, lr 0.001": 31.0, "LoRA, lr 0.002": 31.5}
    results = frames.load_results(evaluation)
    final = final_results(results, named=[evaluation])
    assert len(final) == 3 and not any("Left out" in line for line in describe_left_out_runs(results, final))
    assert tables.accuracy_numbers(final).loc[("b", "6"), "mean"].to_dict() == means
    results = frames.load_results(tmp_path)  # with the sweep, which decides
    assert {*results.query("num_loops == 6")["recipe_benchmark_limit"]} == {7}
    final = final_results(results, named=[tmp_path])
    (sentence,) = [line for line in describe_left_out_runs(results, final) if "only chose" in line]
    assert sentence.startswith(
        "Left out: 2 runs that only chose a learning rate. The sweep prints their scores. Name their "
    )
    numbers = tables.accuracy_numbers(final).loc["b"]
    assert numbers.loc[("6", "LoRA"), "mean"] == 31.5 and {*numbers.loc["4"].index} >= {"LoRA", "Loop Dropout"}
    for name in ("seed_1", ""):
        final = final_results(results, named=[tmp_path, finished_sweep / "lora/lr_0.001" / name])
        (sentence,) = [line for line in describe_left_out_runs(results, final) if "only chose" in line]
        assert (
            "1 run that only chose a learning rate. The sweep prints its score. Name its folder, too, to show"
            in sentence
        )
        assert tables.accuracy_numbers(final).loc[("b", "6"), "mean"].to_dict() == means
    final = final_results(results, named=[finished_sweep / "lora"])  # of a method, with all learning rates
    assert {*final.query("variant == 'lora'")["recipe_learning_rate"]} == {0.002}


def report_on(folder, capsys, *words, **spec):
    """Print the report of a folder, or its own table of a YAML file, and return the text and the folder of the report."""
    output_dir = folder.parent / "report"
    if spec:
        (folder.parent / "own.yaml").write_text(yaml.safe_dump({**OWN, **spec}, sort_keys=False))
        words = ("--tables", str(folder.parent / "own.yaml"), *words)
    report.main([str(folder), "--output_dir", str(output_dir), *words])
    return " ".join(capsys.readouterr().out.split()), output_dir


OWN = {
    "title": "Mine", "made_by": ["x"], "heads": {"Method": "method"}, "rows": [["LoRA"], ["Loop Dropout"]],
    "columns": {"all": {}, "gain": {"minus": {"method": "LoRA"}}},
}  # fmt: skip


def test_evaluated_checkpoints_are_left_out(finished_sweep, capsys):
    """Of all tables and figures, with a sentence, unless they are asked for."""
    text, folder = report_on(finished_sweep, capsys)
    checkpoint = finished_sweep / "loop_dropout/lr_0.002/seed_2/checkpoint-5"
    assert f"Left out: 1 result of {checkpoint}, because a checkpoint does not have the final weights" in text
    assert "`--checkpoints true` to include them" in text
    assert sorted(pd.read_csv(folder / "accuracy.csv").query("task == 'b' and K == 4")["mean"]) == [1.0, 57.0, 69.0]
    assert "checkpoint = 5" not in "".join(path.read_text() for path in folder.glob("*.md"))
    text, _ = report_on(finished_sweep, capsys, filter={"task": "b"})
    assert "57.00 ± 2.83" in text and "69.00 ± 8.49" in text and "NA" not in text
    text, _ = report_on(finished_sweep, capsys, "--checkpoints", "true")
    assert "Left out: 1 result" not in text
    assert "Loop Dropout, checkpoint = 5" in {*pd.read_csv(folder / "accuracy.csv")["method"]}
    spec = {"filter": {"task": "b"}, "rows": [["Loop Dropout"]]}
    text, _ = report_on(
        finished_sweep, capsys, "--checkpoints", "true", columns={"end": {}, "5": {"checkpoint": 5}}, **spec
    )
    assert "69.00 ± 8.49 7.00" in text


def test_problems_that_chose_a_rate_are_no_result(finished_sweep, capsys):
    """They have a table of their own without tests, and say so in a table or figure that names them."""
    text, folder = report_on(finished_sweep, capsys)
    note = "partly chance, so these accuracies are not a test of the methods."
    step = (
        "For a test, train other seeds with one learning rate per method, or evaluate on problems that did not choose."
    )
    assert f"{note} They are not in the other tables." in text and step not in text
    assert {*pd.read_csv(folder / "accuracy.csv")["task"]} == {"b"}
    numbers = pd.read_csv(folder / "choice.csv")
    assert {*numbers["task"]} == {"development"} and numbers[["difference", "p"]].isna().all(axis=None)
    assert "minus LoRA" not in (folder / "choice.tex").read_text()
    assert figures.overview_figure(frames.load_results(finished_sweep)).labels.title == "Results on b"
    text, _ = report_on(finished_sweep, capsys, filter={})  # without a task
    assert "57.00 ± 2.83" in text and note not in text
    text, _ = report_on(finished_sweep, capsys, filter={"task": "development"})
    saved = (folder / "own.tex").read_text()
    assert f"{note} {step}" in text and note in " ".join(saved.split()) and "+12.00, not a test" in text
    assert "textbf" not in saved and "not significant" not in text
    chosen = {**DEPTHS, "filter": {"task": "development"}}
    rows = figure_files.panel_rows(chosen, final_results(frames.load_results(finished_sweep)))
    data = points(rows, ["panel", "label", "num_loops"])
    assert figures.describe_points(data).endswith("not a test, because these problems chose the learning rates.")
    update_summary(finished_sweep, full_grid={"lora": True, "loop_dropout": True})
    _, folder = report_on(finished_sweep, capsys)  # nothing was chosen
    assert {*pd.read_csv(folder / "accuracy.csv")["task"]} == {"b", "development"}


def test_only_problems_that_chose_a_rate_are_drawn_as_such(finished_sweep):
    results = final_results(frames.load_results(finished_sweep))
    caption = " ".join(figures.overview_figure(results[results["task"] != "b"]).labels.caption.split())
    assert "not a test, because these problems chose the learning rates" in caption


@pytest.mark.parametrize("remark", ["Not every learning rate has a score.", ""])
def test_method_without_a_chosen_rate_is_left_out(finished_sweep, capsys, remark):
    choices = {"lora": {"rates": [0.001, 0.002], "best": 0.002}, "loop_dropout": {"best": None, "remark": remark}}
    update_summary(finished_sweep, choices=choices, trainings={"loop_dropout": [1, 2]})
    text, folder = report_on(finished_sweep, capsys)
    sentence = f"Left out: 3 runs of loop_dropout in {finished_sweep}, because no learning rate is chosen. {remark}"
    assert sentence.strip() in text and "1 run that only chose" in text and "is not finished: 1 of 2" in text
    assert text.index("Left out") > text.rindex("Wrote ")  # after the tables
    assert "loop_dropout/lr_0.001/seed_1: accuracy 73.00% on development" in text
    for name in ("accuracy", "costs", "choice"):
        assert {*pd.read_csv(folder / f"{name}.csv")["method"]} <= {"LoRA", "base model"}
    text, _ = report_on(finished_sweep, capsys, filter={"task": "b"})
    assert "Missing" in text and "69" not in text


def test_scores_after_the_end_of_a_sweep_count(finished_sweep, capsys):
    """A run can outlive its sweep, whose last word is that a score is missing."""
    remark = "Not every learning rate has a score."
    choices = {"loop_dropout": {"rates": [0.001, 0.002], "best": None, "remark": remark}}
    waiting = {"loop_dropout": ["loop_dropout/lr_0.002/seed_1"]}
    update_summary(finished_sweep, choices=choices, waiting=waiting, trainings={"loop_dropout": [1, 3]})
    text, _ = report_on(finished_sweep, capsys)
    assert remark not in text
    assert "Every learning rate has a score now, and the same `loopdropout sweep` command compares them." in text
    for missing in ({"other_code": waiting}, {"waiting": {"loop_dropout": ["loop_dropout/lr_0.002/seed_3"]}}):
        update_summary(finished_sweep, other_code={"loop_dropout": []}, waiting=waiting)
        update_summary(finished_sweep, **missing)
        assert remark in report_on(finished_sweep, capsys)[0]


def test_own_table_without_papers_numbers_has_plain_heads(finished_sweep, capsys):
    text, folder = report_on(finished_sweep, capsys, filter={"task": "b"})
    files = [(folder / f"own.{ending}").read_text() for ending in ("md", "tex")]
    assert " here" not in text and all("here" not in file for file in files)
    text, folder = report_on(finished_sweep, capsys, filter={"task": "b"}, rows=[["LoRA", 55.0]])
    assert (
        "all, paper" in text and "all, here" in text and r"\multicolumn{2}{c}{all}" in (folder / "own.tex").read_text()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"heads": None},
            "`heads` must be set for a table. The file has title, made_by, rows, columns.* `loopdropout recipes "
            "tables/p_study.yaml` prints an example",
        ),
        ({"rows": {"LoRA": 1}}, "`rows` of a table must be a list, got {'LoRA': 1}"),
        ({"columns": ["a"]}, r"`columns` of a table must be a mapping, got \['a'\]"),
        ({"figure": "line"}, "`x_label` must be set for a figure"),
        ({"columns": {"a": {"num_lops": 2}}}, "The results have no column `num_lops`. Did you mean 'num_loops'?"),
        ({"columns": {"a": {"decimal": 2}}}, "The results have no column `decimal`. Did you mean 'decimals'?"),
        ({"columns": {"a": {"minus": {"varaint": "b"}}}}, "no column `varaint`. Did you mean 'variant'?"),
        (
            {"heads": {"Rank": "recipe_learning_rat"}},
            "No training has the setting of the column `recipe_learning_rat`. Did you mean 'recipe_learning_rate'",
        ),
        ({"columns": {"a": {"recipe_lora_rr": 16}}}, "the column `recipe_lora_rr`. Did you mean 'recipe_lora_r'?"),
        ({"columns": {"a": {"lora_r": 16}}}, "no column `lora_r`. The setting has the column `recipe_lora_r`."),
        ({"columns": {"a": {"show": "lora_r"}}}, "got lora_r. The setting has the column `recipe_lora_r`."),
        ({"columns": {"a": {"part": "gain"}}}, "`part` of a cell needs `minus`"),
        (
            {"columns": {"a": {"minus": {"method": "LoRA"}, "part": "b"}}},
            "`part` of a cell must be one of gain, .* 'b'",
        ),
        (
            {"columns": {"a": {"recipe": "quickstart.yaml", "show": "stepss"}}},
            "a setting of quickstart.yaml, .* 'steps'?",
        ),
        (
            {"columns": {"a": {"colour": 1}}},
            "The results have no column `colour`. The page docs/reports.md in the repository lists",
        ),
        ({"filter": {"task": "b"}, "columns": {"a": {"recipe_p": 1}}}, "Missing"),
        ({"columns": {"a": {"decimals": "one"}}}, "`decimals` of a cell must be a whole number, got 'one'"),
        ({"columns": {"a": {"decimals": -1}}}, "`decimals` of a cell must be a whole number, got -1"),
        ({"columns": {"a": {"scale": True}}}, "`scale` of a cell must be a number, got True"),
        ({"columns": {"a": {"minus": "LoRA"}}}, "`minus` of a cell must be a mapping, .* got 'LoRA'"),
        (
            {"columns": {"a": {"task": "b", "show": "sed"}}},
            "`show` must be .* or a column of the results, got sed. Did you",
        ),
        ({"columns": {"a": 4}}, "`a` of a table must be a mapping, such as {num_loops: 4}, got 4"),
        ({"filter": "mine"}, "`filter` of a table must be a mapping"),
        ({"rows": ["LoRA"]}, r"Each item of `rows` must be a list, such as \[LoRA\], got 'LoRA'"),
    ],
    ids=str,
)
def test_wrong_own_table_is_one_sentence(finished_sweep, capsys, change, message):
    spec = {name: value for name, value in {**OWN, **change}.items() if value is not None}
    (finished_sweep / "own.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    words = [
        str(finished_sweep),
        "--tables",
        str(finished_sweep / "own.yaml"),
        "--output_dir",
        str(finished_sweep / "report"),
    ]
    if message == "Missing":
        report.main(words)
        assert "Missing: 2 numbers" in capsys.readouterr().out
    else:
        with user_error(message):
            report.main(words)


def test_own_table_selects_settings_at_their_defaults(finished_sweep, capsys):
    """Also where only some recipes name them, or name the default. A number says which values there are."""
    path = finished_sweep / "lora/lr_0.002/seed_2/recipe.yaml"
    path.write_text(path.read_text() + "lora_r: 16\nnum_train_epochs: 3\n")
    heads, rows = {"Method": "method", "Rank": "recipe_lora_r"}, [["LoRA", 16], ["Loop Dropout", 16]]
    columns = {"all": {}, "epochs": {"show": "recipe_num_train_epochs"}, "rank": {"show": "recipe_lora_r"}}
    text, _ = report_on(finished_sweep, capsys, filter={"task": "b"}, heads=heads, rows=rows, columns=columns)
    assert "LoRA 16 57.00 ± 2.83 3 16 Loop Dropout 16 69.00 ± 8.49 3 16" in text
    columns = {"rule": {"show": "recipe_rule"}, "p": {"recipe_p": 0.5, "decimals": 1}}
    path = finished_sweep / "loop_dropout/lr_0.002/seed_2/recipe.yaml"
    text, _ = report_on(finished_sweep, capsys, filter={"task": "b"}, columns=columns)
    path.write_text(path.read_text() + "p: [0.5]\n")  # as trainings write it
    assert report_on(finished_sweep, capsys, filter={"task": "b"}, columns=columns)[0] == text
    assert "LoRA lora – Loop Dropout loop_dropout 69.0 ± 8.5 " in text
    path.write_text(path.read_text().replace("0.5", "0.25"))
    with user_error(r"`recipe_p` differs .*\(0.5\) and .*\(0.25\), .* such as `recipe_p: 0.5`."):
        report_on(finished_sweep, capsys, filter={"task": "b"}, columns={"all": {}})
    path.write_text(path.read_text().replace("0.25", "0.5"))
    text, _ = report_on(finished_sweep, capsys, filter={"task": "b", "recipe_lora_r": 8}, columns={"all": {}})
    assert "no result with task = b, recipe_lora_r = 8" in text and "The results have recipe_lora_r = 16." in text
    selection = {"task": "b", "metric": "train_seconds", "sweep": "mine"}
    text, _ = report_on(finished_sweep, capsys, filter=selection, columns={"all": {}})
    assert "method = LoRA. The results with all other conditions have task = training." in text
    text, _ = report_on(finished_sweep, capsys, filter={"task": "b", "num_loops": 6}, columns={"all": {}})
    assert "The results with all other conditions have num_loops = 4, 8." in text
    for path in finished_sweep.rglob("recipe.yaml"):  # a column of floats, because the base model has no `max_steps`
        path.write_text(path.read_text() + "max_steps: 30\n")
    selection = {"task": "b", "recipe_max_steps": 31}
    text, _ = report_on(finished_sweep, capsys, filter=selection, columns={"gain": {"minus": {"method": "LoRA"}}})
    assert "The results have recipe_max_steps = 30." in text and "30.0" not in text
    assert "Missing: Loop Dropout, gain: no result" in text and "numbers" not in text  # LoRA has no difference to LoRA
    text, _ = report_on(finished_sweep, capsys)  # no line for the recipe that names the default
    assert "lora_r" not in text


def test_differences_of_a_figure_name_methods_as_cells_do(finished_sweep):
    """By the rule or the name in the sweep, too."""
    results = final_results(frames.load_results(finished_sweep))
    spec = {**DEPTHS, "gain_over": {"loop_dropout": "lora"}}
    drawn = figure_files.build_figure(spec, results)
    expected = figure_files.build_figure(DEPTHS, results)
    tables = [[str(layer.geom.data) for layer in plot.layers] for plot in (drawn, expected)]
    assert tables[0] == tables[1] and len(tables[0]) > 2


def test_misspelled_task_of_an_own_table_is_not_measured(finished_sweep, capsys):
    """There is no command for it, but one for a task that was not measured, and for a benchmark of similar name."""
    for path in finished_sweep.rglob("results.jsonl"):
        path.write_text(path.read_text().replace('"b"', '"gsm8k"'))
    text, _ = report_on(finished_sweep, capsys, filter={"task": "gsm8kk"}, made_by=["loopdropout sweep x"])
    assert "no task `gsm8kk`. The results have the tasks " in text and "Did you mean 'gsm8k'?" in text
    assert "loopdropout sweep x" not in text
    text, _ = report_on(finished_sweep, capsys, filter={"sweep": "minne"})
    assert "no result with sweep = minne, method = LoRA. The results have the sweeps mine." in text
    for task in ("gsm8k_platinum", "other"):
        text, _ = report_on(finished_sweep, capsys, filter={"task": task}, made_by=["loopdropout sweep x"])
        assert "no result with" in text and "loopdropout sweep x" in text


def test_unknown_table_is_named_before_anything_is_printed(tmp_path, capsys):
    write(tmp_path / "run", [{"value": 50.0}])
    with user_error("`tables` must be names in recipes/tables, .* got math_man. Did you mean 'math_main'?"):
        report.main([str(tmp_path), "--tables", "math_man"])
    assert capsys.readouterr().out == ""


MISTAKES = [
    (
        ["--figures"],
        "`figures` is not a field of this script. The summary has its figures without an option. `--tables` also",
    ),
    (["--csv"], "`csv` is not a field of this script. Each table is written as Markdown, LaTeX and CSV"),
    (
        ["--task", "b"],
        "`task` is not a field of this script. The summary has all results. `--tables my_table.yaml` makes",
    ),
    (["--dry_run", "true"], "Its fields are `folders`, `tables`, `checkpoints`, `output_dir`."),
    (
        ["--tables", "accuracy"],
        "got accuracy, which is a part of the summary. `loopdropout report FOLDER` without `--tables`",
    ),
]


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=[words[0][2:] for words, _ in MISTAKES])
def test_natural_mistakes_have_a_hint(tmp_path, words, says):
    write(tmp_path / "run", [{"value": 50.0}])
    with user_error(re.escape(says)):
        report.main([str(tmp_path), *words])


def test_file_of_a_run_names_its_folder(tmp_path):
    """Also the recipe of a training, which names its folder, and a mistyped one."""
    write(tmp_path / "run", [{"value": 50.0}], {"output_dir": "elsewhere"})
    (tmp_path / "mine.yaml").write_text("output_dir: outputs/mine")
    meant = {"run/results.jsonl": f"{tmp_path}/run", "run/recipe.yaml": f"{tmp_path}/run", "mine.yaml": "outputs/mine"}
    for file, folder in meant.items():
        with user_error(f"{tmp_path}/{file} is a file. Give the folder of its results, {folder}."):
            report.main([f"{tmp_path}/{file}"])
    with user_error(f"The folder {tmp_path}/rum does not exist. Did you mean '{tmp_path}/run'?"):
        report.main([f"{tmp_path}/rum"])


def test_results_are_rounded_as_by_hand(tmp_path, capsys):
    """A half goes away from zero in all tables and figures, as 33 of 80 problems are 41.25%."""
    for method, value in (("LoRA", 40.0), ("Loop Dropout", 41.25)):
        write(tmp_path / f"run/{method}", [{"value": value}], method=method)
    text, _ = report_on(tmp_path / "run", capsys)
    assert "+1.3" in text and "+1.2" not in text
    text, _ = report_on(tmp_path / "run", capsys, columns={"all": {"decimals": 1}})
    assert "41.3" in text
    assert format_fixed(-0.01, 1, sign=True) == "+0.0" and format_fixed(-0.01, 1) == "0.0"
    assert format_fixed(-1.25, 1) == "-1.3" and format_fixed(math.nan, 1) == "nan" and format_fixed(1e30, 0)[0] == "1"
    plot = heat_plot(pd.DataFrame({"x": [1, 2], "y": [1, 2], "mean": 0.25, "panel": ""}), "x", "y", "", "x", "y")
    assert {*plot.data["text"]} == {"0.3"}


def test_missing_file_of_a_table_is_no_recipe(tmp_path):
    """Its name is close to that of another file, or of a table of the package."""
    write(tmp_path / "run", [{"value": 50.0}])
    (tmp_path / "mine.yaml").write_text("title: Mine")
    for name, meant in {"mien.yaml": f"{tmp_path}/mine.yaml", "math_man.yaml": "math_main"}.items():
        with user_error(f"or `all`, but there is no file {tmp_path}/{name}. Did you mean '{meant}'?"):
            report.main([f"{tmp_path}/run", "--tables", f"{tmp_path}/{name}"])


def test_readouts_and_chosen_gates_are_not_the_answer(tmp_path, capsys):
    """`evaluate` measures them next to it: readouts have lines of their own, and other gates are in no table or figure."""
    for method, value in (("LoRA", 50.0), ("Loop Dropout", 60.0)):
        rows = [{"value": value}, {"value": 5.0, "gates": "1-1-0-0"}, {"value": value / 2, "readout": 2, "n": 10}]
        write(tmp_path / f"run/{method}", rows if method == "LoRA" else rows[:1], method=method)
    write(tmp_path / "gated", [{"value": 5.0, "gates": "1-1-0-0"}])  # alone, it was a traceback
    text, _ = report_on(tmp_path / "gated", capsys)
    assert "only with the gates 1-1-0-0. A table of your own selects them, by `gates: 1-1-0-0`" in text
    text, folder = report_on(tmp_path / "run", capsys)
    numbers = pd.read_csv(folder / "accuracy.csv").set_index("method")
    assert {**numbers["mean"]} == {"LoRA": 50.0, "LoRA, readout of loop 2": 25.0, "Loop Dropout": 60.0}
    sentence = (
        "Left out of the tables: accuracies on b (20 problems) at K = 4 with the gates 1-1-0-0. A table of your own selects "
        "them, such as by `gates: 1-1-0-0`"
    )
    assert sentence in text
    write(tmp_path / "loops", [{"value": 5.0, "gates": f"loop {loop}", "loop": loop} for loop in (1, 2)])
    text, _ = report_on(tmp_path / "loops", capsys)  # which had a figure without a number of problems
    assert "accuracies on b (20 problems) at K = 4 with the gates loop 1, loop 2. The overview has those" in text
    assert numbers["difference"]["Loop Dropout"] == 10.0  # from the LoRA that is read out after the last loop
    text, _ = report_on(tmp_path / "run", capsys, columns={"end": {}, "2": {"readout": 2}}, rows=[["LoRA"]])
    assert "LoRA 50.00 25.00" in text


def test_own_table_of_two_sweeps_says_how_to_select_one(finished_sweep, capsys):
    other = shutil.copytree(finished_sweep, finished_sweep.parent / "other")
    for path in other.rglob("recipe.yaml"):
        path.write_text(path.read_text().replace("mine/", "other/"))
    with user_error("`sweep` differs between .* a cell can also select one value, such as `sweep: mine`."):
        report_on(finished_sweep.parent, capsys, filter={"task": "b"})
    text, _ = report_on(finished_sweep.parent, capsys, filter={"task": "b", "sweep": "mine"})
    assert "57.00 ± 2.83" in text


def test_results_of_a_copied_folder_count_once(finished_sweep, capsys):
    """Those that only the copy has are shown. Alone, it is reported as the sweep, with its own places."""
    alone, folder = report_on(finished_sweep, capsys)
    table = (folder / "accuracy.csv").read_text()
    copy = shutil.copytree(finished_sweep, finished_sweep.parent / "z" / "mine")
    both = frames.load_results(finished_sweep, copy)
    assert len(both) == len(frames.load_results(finished_sweep))
    reason = "they are those of the same trainings in another folder, of which this is a copy"
    text, _ = report_on(finished_sweep.parent, capsys)
    assert f"Left out: 28 results in 7 folders such as {copy}/loop_dropout/lr_0.001/seed_1, because {reason}" in text
    assert (folder / "accuracy.csv").read_text() == table
    run = "loop_dropout/lr_0.002/seed_1"
    later = {"seed": 1, "training": f"mine/{run}", "method": "Loop Dropout", "adapter": str(finished_sweep / run)}
    write(copy / run / "evaluation", [{"task": "later", "value": 90.0}], **later)
    assert 90.0 in {*frames.load_results(finished_sweep, copy)["value"]}
    shutil.rmtree(finished_sweep)
    text, _ = report_on(copy, capsys)
    place = copy / "loop_dropout/lr_0.002/seed_2/checkpoint-5"
    assert f"Left out: 1 result of {place}, because a checkpoint" in text and reason not in text
    assert f"{finished_sweep}/" not in text


def test_report_explains_the_tests_that_it_has(finished_sweep, capsys):
    text, _ = report_on(finished_sweep, capsys)
    family = "Each difference is a test of its own, without correction for their number."
    sentence = "The 95% intervals and tests are over seeds (t test)."
    assert f"{sentence} {family} An interval over two seeds reaches 12.7 standard errors to each side" in text
    assert "McNemar" not in text
    text, _ = report_on(finished_sweep, capsys, filter={"task": "b"})  # one difference
    assert sentence in text and family not in text
    shutil.rmtree(finished_sweep / "lora/lr_0.002/seed_2")
    text, _ = report_on(finished_sweep, capsys)
    assert "A difference of one seed has no interval" in text and "t test" not in text
    shutil.rmtree(finished_sweep / "lora")
    text, _ = report_on(finished_sweep, capsys)
    assert "interval" not in text and "test of its own" not in text


def test_differences_name_the_seeds_that_they_leave_out(finished_sweep, capsys):
    """As after a failed run: of the summary, of a table of your own, and of the lowest held-out loss."""
    text, _ = report_on(finished_sweep, capsys)
    assert "common seed" not in text
    sentence = "A difference is over the seeds that both methods have: Loop Dropout"
    path = finished_sweep / "lora/lr_0.002/seed_2/results.jsonl"
    path.write_text(
        "".join(line for line in path.open() if '"num_loops": 8' not in line)
    )  # as in the middle of its evaluation
    text, _ = report_on(finished_sweep, capsys)
    assert f"{sentence} at K = 8 over 1 common seed, without seed 2." in text
    shutil.rmtree(path.parent)
    text, folder = report_on(finished_sweep, capsys)
    assert f"{sentence} over 1 common seed, without seed 2." in text
    numbers = pd.read_csv(folder / "accuracy.csv").query("method == 'Loop Dropout'")
    assert {*numbers["num_pairs"]} == {1} and {*numbers["unpaired"]} == {2}
    text, _ = report_on(finished_sweep, capsys, filter={"task": "b"})
    assert f"{sentence}, gain over 1 common seed, without seed 2." in text
    shutil.rmtree(finished_sweep / "loop_dropout/lr_0.002/seed_1")
    for spec in ({}, {"filter": {"task": "b"}}):
        text, _ = report_on(finished_sweep, capsys, **spec)
        assert "has none, because no seed is common (seeds 1, 2)." in text


@pytest.mark.parametrize("kind", ["line", "heat"])
def test_differences_in_figures_are_paired_by_seed(tmp_path, kind):
    """Seed 2 of LoRA is missing, so the means are over other seeds than the difference."""
    for method, values in (("LoRA", {1: 10.0}), ("Loop Dropout", {1: 13.0, 2: 50.0})):
        for seed, value in values.items():
            rows = [{"num_loops": depth, "value": value + depth} for depth in (2, 4)]
            rows.append({"task": "training", "metric": "train_seconds", "value": 9.0})
            write(tmp_path / f"{method}_{seed}", rows, method=method, seed=seed)
    results = frames.load_results(tmp_path)
    spec = {**DEPTHS, "figure": kind}
    if kind == "heat":
        spec |= {"y": "trained_loops", "y_label": "trained at K", "minus": {"method": "LoRA"}, "filter": {"task": "b"}}
        spec["panels"] = {"": {"method": "Loop Dropout"}}
    plot = figure_files.build_figure(spec, results)
    texts = [text.get_text() for text in assert_readable(plot).findobj(Text)]
    assert texts.count("+3.00") == 2
    caption = " ".join(plot.labels.caption.split())
    assert caption.endswith("A difference is over the seeds that both methods have. Some leave out seed 2.")
    if kind == "heat":
        unpaired = results[(results["method"] == "LoRA") | (results["seed"] == 2)]
        with pytest.raises(table_files.Missing, match="^no seed has both results of any difference.$"):
            figure_files.build_figure(spec, unpaired)


def test_figures_say_what_their_bands_are(finished_sweep, capsys):
    text, folder = report_on(finished_sweep, capsys)
    sentence = "Bands: ± one standard deviation over 2 seeds."
    assert f"overview.png, .pdf and .svg {sentence}" in text
    plot = figures.overview_figure(final_results(frames.load_results(finished_sweep)))
    assert sentence in " ".join(getattr(plot, "items", [plot])[0].labels.caption.split())
    for seeds, said in (
        ([1, 1], "One seed."),
        ([1, 3], "over 1 to 3 seeds. A point of one seed has no bar."),
    ):
        data = pd.DataFrame({"label": ["LoRA", "base model"], "num_seeds": [3, 1]}).assign(num_seeds=seeds)
        data["label"] = ["LoRA", "Loop Dropout"]
        assert figures.describe_points(data).endswith(said)
    run = finished_sweep / "lora/lr_0.002/seed_1"
    write(
        run / "evaluation",
        [{"value": 40.0, "num_loops": 6, "adapter": str(run), "training": "mine/lora/lr_0.002/seed_1"}],
    )
    plot = figures.overview_figure(final_results(frames.load_results(finished_sweep)))
    caption = " ".join(getattr(plot, "items", [plot])[0].labels.caption.split())
    assert (
        "Points over fewer seeds than the rest of their line, which are not comparable with it: LoRA at K = 6 (1 seed)."
        in caption
    )
    results = final_results(frames.load_results(finished_sweep))
    fewer = results[(results["seed"] != 2) | (results["method"] != "Loop Dropout")]
    own = figure_files.build_figure(
        {**DEPTHS, "panels": {"all": {}}, "gain_over": {}, "x": "num_loops", "filter": {"task": "b"}}, fewer
    )
    caption = " ".join(own.labels.caption.split())
    assert "The lines have different numbers of seeds: LoRA 2, Loop Dropout 1." in caption
    assert "LoRA at num_loops = 6 (1 seed)." in caption


def test_equal_lines_of_a_figure_are_named():
    """Two values that differ by less than the width of a line are at one place. Lines of other places do not count."""
    values = {"LoRA": [0.0, 0.0], "CoTo": [0.0, 0.004], "Mine": [1.0, 0.0], "base model": [0.0, np.nan]}
    lines = [["a", name, x, own[x]] for name, own in values.items() for x in (0, 1) if own[x] == own[x]]
    data = pd.DataFrame(lines, columns=["panel", "label", "x", "mean"])
    data["label"] = pd.Categorical(data["label"], [*values])
    start = "Lines with equal or nearly equal values hide each other: LoRA and CoTo"
    assert describe_hidden_lines(data, "x") == f"{start}."
    other = data.assign(panel="b", mean=[*range(len(data))])
    assert describe_hidden_lines(pd.concat([data, other]), "x") == f"{start} (a)."
    assert describe_hidden_lines(other, "x") == ""


def test_single_points_of_a_figure_have_bars(tmp_path):
    """A band of one point has no width, as of the losses of one logged step. The caption says "Bars"."""
    for seed in (1, 2):
        run = tmp_path / f"{seed}"
        write(run, [{"task": "training", "metric": "eval_loss", "value": 1.0, "seed": seed}])
        (run / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 5, "loss": 1.0 * seed}]}))
    plot = figures.loss_figure(figures.loss_curves(frames.load_results(tmp_path)))
    assert plot.labels.caption.startswith("Bars: ± one standard deviation over 2 seeds.")
    drawn = plot.draw()
    (bar,) = (line for line in drawn.axes[0].collections if isinstance(line, LineCollection))
    assert [*bar.get_segments()[0][:, 1]] == pytest.approx([1.5 - 0.5**0.5, 1.5 + 0.5**0.5])
    pyplot.close(drawn)
    lines = pd.DataFrame({"panel": "a", "label": ["LoRA", "LoRA", "Mine"], "num_seeds": 2})
    assert figures.describe_points(lines).startswith("Bands and bars: ")


def test_report_says_how_to_evaluate_the_base_model(tmp_path, capsys):
    """At all depths of the table, and with a command for each set of depths, because tasks can be measured at other ones."""
    recipe = {"benchmarks": ["b", "c"], "rule": "lora", "model_name_or_path": "tiny-ouro", "benchmark_limit": 20}
    write(tmp_path / "run", [{"value": 50.0}, {"value": 20.0, "num_loops": 8}, {"value": 1.0, "task": "c"}], recipe)
    write(tmp_path / "run", [{"task": "training", "metric": "train_seconds", "value": 1.0}])
    text, _ = report_on(tmp_path / "run", capsys)
    for task, depths, words in (("b", "4, 8", "4 8"), ("c", "4", "4")):
        command = (
            f"`loopdropout evaluate {tmp_path}/run/recipe.yaml none --benchmarks {task} --eval_num_loops {words}`"
        )
        assert f"The base model was not evaluated on {task} at K = {depths}. {command} does so" in text
    base = {"method": "base model", "gates": "none", "seed": None, "step": None, "value": 1.0}
    write(
        tmp_path / "run/evaluation", [base, {**base, "num_loops": 8}, {**base, "task": "c"}], {**recipe, "rule": None}
    )
    text, folder = report_on(tmp_path / "run", capsys)
    assert "was not evaluated" not in text and "base model" in {*pd.read_csv(folder / "accuracy.csv")["method"]}
    write(tmp_path / "other", [{"value": 30.0, "task": "d"}], {**recipe, "benchmarks": ["d"]})
    text, _ = report_on(tmp_path, capsys)
    command = f"`loopdropout evaluate {tmp_path}/other/recipe.yaml none --eval_num_loops 4` does so"
    assert (
        f"The base model was not evaluated on d at K = 4. {command}" in text and text.count("was not evaluated") == 1
    )


def test_report_says_that_several_versions_trained_the_results(tmp_path, capsys):
    """A run without a readable version is not counted."""
    for seed, version in enumerate(("0.1.0", "0.1.0", "0.2.0", None), 1):
        run = tmp_path / f"{seed}"
        write(run, [{"value": 50.0, "seed": seed}])
        (run / "run.json").write_text(json.dumps({"versions": {"loopdropout-trainer": version}}))
    text, _ = report_on(tmp_path, capsys)
    versions = "2 versions of loopdropout-trainer: 0.1.0 trained 2 runs (LoRA); 0.2.0 trained 1 run (LoRA)."
    assert f"The results are of {versions} A difference between them can come from the versions." in text
    shutil.rmtree(tmp_path / "3")
    assert "versions of loopdropout" not in report_on(tmp_path, capsys)[0]


def test_command_for_the_base_model_is_on_the_same_problems(tmp_path, capsys):
    """As another sweep, with another limit, and `evaluate`, whose recipe in a folder can have the limit of an earlier one."""
    recipe = {"benchmarks": ["b"], "rule": "lora", "benchmark_limit": 20}
    base = {"method": "base model", "gates": "none", "seed": None, "step": None, "value": 1.0}
    write(tmp_path / "runs/a", [{"value": 50.0}, base], recipe)
    write(tmp_path / "runs/b", [{"value": 60.0, "n": 30}], {**recipe, "benchmark_limit": 30}, method="Mine")
    text, _ = report_on(tmp_path / "runs", capsys)
    command = f"`loopdropout evaluate {tmp_path}/runs/b/recipe.yaml none --eval_num_loops 4`"
    assert f"evaluated on the same 30 problems of b at K = 4. {command} does so" in text
    assert text.count("was not evaluated") == 1
    write(tmp_path / "later", [{"value": 60.0, "n": 25}], {**recipe, "gates": ["unit"]}, adapter="/run", limit=25)
    text, _ = report_on(tmp_path / "later", capsys)
    options = "--eval_num_loops 4 --benchmark_limit 25 --gates null"
    assert f"`loopdropout evaluate {tmp_path}/later/recipe.yaml none {options}` does so" in text


def test_base_model_on_other_problems_is_named(tmp_path, capsys):
    """As after an edit of a benchmark's file, whose number of problems stays the same. Its row shows no difference."""
    base = {"method": "base model", "gates": "none", "seed": None, "step": None, "value": 1.0, "problems": "former"}
    run = tmp_path / "run"
    write(run, [{"value": 50.0, "problems": "present"}, base], {"benchmarks": ["b"], "rule": "lora"})
    text, _ = report_on(run, capsys)
    changed = (
        "The accuracies of the base model on b at K = 4 are on other problems than those of trained models, although on as "
        "many. The file or data set of the task has changed between the measurements. Measure all models again on the same "
        "one."
    )
    command = f"`loopdropout evaluate {run}/recipe.yaml none --eval_num_loops 4` measures the base model."
    assert f"{changed} {command}" in text and "was not evaluated" not in text
    dump_recipe({"rule": "lora"}, run / "recipe.yaml")  # of a task that was given in Python
    text, _ = report_on(run, capsys)
    assert changed in text and "measures the base model" not in text
    write(run, [{**base, "problems": "present"}])
    assert changed not in report_on(run, capsys)[0]


def test_report_says_how_to_measure_the_loss_of_the_base_model(tmp_path, capsys):
    """If the recipe has left it out: `sft` measures a finished run further. A recipe of Python does not have the examples.

    In DPO it is known: the loss of the base model compares it with itself.
    """
    run = tmp_path / "run"
    loss = {"task": "training", "metric": "eval_loss", "value": 1.0}
    write(run, [loss], {"command": "sft", "rule": "lora", "evaluate_base": False})
    (run / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.0}]}))
    command = f"`loopdropout sft {run}/recipe.yaml --evaluate_base true --output_dir {run}` adds it."
    assert f"The held-out loss of the base model is missing. {command}" in report_on(run, capsys)[0]
    of_python = {"command": "sft", "rule": "lora"}
    dpo = {"command": "dpo", "evaluate_base": False, "loss_type": ["sigmoid"]}
    for recipe, text in ((of_python, "is missing, because a training in Python"), (dpo, "is ln 2 = 0.6931")):
        dump_recipe(recipe, run / "recipe.yaml")
        report, _ = report_on(run, capsys)
        title = "Held-out loss per pair" if recipe is dpo else "Held-out loss in nats per token"
        assert f"The held-out loss of the base model {text}" in report and f"{title} method" in report
        unit = "per pair" if recipe is dpo else "nats per token"
        assert name_score((-1.0, -1.0), "eval_loss", run) == f"held-out loss 1.0000 {unit}"
        plot = figures.loss_figure(figures.loss_curves(frames.load_results(run)))
        assert plot.labels.y == f"loss ({unit})"
    others = ({**dpo, "loss_type": "ipo"}, {**dpo, "adapter_name_or_path": "a"}, {**dpo, "command": "grpo"})
    for recipe in others:
        dump_recipe(recipe, run / "recipe.yaml")
        assert "The held-out loss of the base model" not in report_on(run, capsys)[0]
    dump_recipe(of_python, run / "recipe.yaml")
    write_run(run)  # of a command, under ZeRO-3
    assert "is missing" not in report_on(run, capsys)[0]
    base = {"method": "base model", "gates": "none", "seed": None, "step": None}
    write(run, [{**loss, **base}], {"command": "sft", "rule": "lora", "evaluate_base": False})
    assert "is missing" not in report_on(run, capsys)[0]


def test_report_of_checkpoints_names_the_recipe_of_their_run(tmp_path, capsys, caplog):
    """The checkpoint has no recipe of its own. Its run chose nothing, although no final weights were measured."""
    recipe = {"benchmarks": ["b"], "rule": "lora", "run_name": "mine/lora/lr_0.1/seed_1", "learning_rate": 0.1}
    write(tmp_path / "run", [{"value": 9.0}], recipe)
    write(tmp_path / "measured", [{"value": 50.0, "adapter": str(tmp_path / "run/checkpoint-5"), "step": 5}])
    (tmp_path / "measured/samples/run/checkpoint-5").mkdir(parents=True)
    caplog.clear()
    text, _ = report_on(tmp_path / "measured", capsys)
    assert caplog.text == "" and "trainer_state" not in text
    assert "only chose" not in text and "because a checkpoint does not have the final weights" in text
    assert "the results of all trainings are left out" in text
    text, _ = report_on(tmp_path / "measured", capsys, "--checkpoints", "true")
    assert f"`loopdropout evaluate {tmp_path}/run/recipe.yaml none --eval_num_loops 4`" in text


def test_command_for_the_base_model_has_all_depths_and_imports(tmp_path, capsys):
    """Each depth of a training, and the files that the tasks of the recipe may need."""
    for name, depth in (("a", 8), ("b", 2)):
        rows = [{"value": 50.0}, {"task": "training", "metric": "train_seconds", "value": 1.0}]
        write(tmp_path / f"runs/{name}", rows, {"benchmarks": ["b"], "rule": "lora"}, num_loops=depth)
    imports = dict.fromkeys(["/my/unused.py", "/my/scorer.py", "/my/task.yaml"], "digest")
    write_run(tmp_path / "runs/a", imports=imports, used_imports=["/my/scorer.py"])
    options = "none --eval_num_loops 8 --import /my/scorer.py /my/task.yaml"
    command = f"`loopdropout evaluate {tmp_path}/runs/a/recipe.yaml {options}` does so"
    text, _ = report_on(tmp_path / "runs", capsys)
    assert f"The base model was not evaluated on b at K = 8. {command}" in text
    command = f"`loopdropout evaluate {tmp_path}/runs/b/recipe.yaml none --eval_num_loops 2` does so"
    assert f"The base model was not evaluated on b at K = 2. {command}" in text
    dump_recipe({"benchmarks": ["b"], "output_dir": str(tmp_path / "original")}, tmp_path / "runs/a/recipe.yaml")
    here = f"--eval_num_loops 8 --output_dir {tmp_path}/runs/a/evaluation --import"
    assert here in report_on(tmp_path / "runs", capsys)[0]  # of a copied folder


def test_command_for_the_base_model_names_a_file_that_is_not_here(tmp_path, capsys, monkeypatch):
    """A recipe's paths belong to the folder in which it is run, and a report may be made in another one or of a copy."""
    monkeypatch.chdir(tmp_path)
    own = {"mine": {"files": "my/q.jsonl", "like": "gsm8k"}}
    of_benchmark = {"benchmarks": ["mine"], "own_benchmarks": own, "rule": "lora", "output_dir": "run"}
    loss = {"task": "training", "metric": "eval_loss", "value": 1.0}
    of_loss = {"command": "sft", "evaluate_base": False, "train_files": ["train.jsonl"], "eval_files": ["my/q.jsonl"]}
    write(tmp_path / "run", [{"value": 50.0, "task": "mine"}], of_benchmark)
    write(tmp_path / "trained", [loss], of_loss)
    (tmp_path / "my").mkdir()
    for name in ("my/q.jsonl", "train.jsonl"):
        write_lines(tmp_path / name, [{"question": "1", "answer": "2"}])
    needs = "The command needs the file"
    text, _ = report_on(Path("run"), capsys)
    assert f"`loopdropout evaluate {tmp_path}/run/recipe.yaml none --eval_num_loops 4` does so" in text
    assert needs not in text and needs not in report_on(Path("trained"), capsys)[0]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for run, words, file in (
        ("run", "evaluate {}/recipe.yaml none --eval_num_loops 4 --output_dir {}` does so", "my/q.jsonl"),
        ("trained", "sft {}/recipe.yaml --evaluate_base true --output_dir {}` adds it.", "train.jsonl"),
    ):
        shutil.copytree(tmp_path / run, run)
        here = tmp_path / "elsewhere" / run
        text, _ = report_on(Path(run), capsys)
        assert f"`loopdropout {words.format(here, here)}" in text
        assert f"{needs} {file} of {here}/recipe.yaml, which does not exist here. Run it where this path leads" in text


def test_results_of_changed_code_have_lines_of_their_own(tmp_path, capsys):
    """And as settings, codes are compared with the LoRA that has the same one. A training in Python has none."""
    for method, seeds in (("LoRA", (1, 2)), ("Mine", (1, 2, 3))):
        for seed in seeds:
            run = tmp_path / f"runs/{method}_{seed}"
            rows = [{"value": 50.0 + seed}, {"task": "training", "metric": "train_seconds", "value": 1.0}]
            write(run, rows, {"rule": method}, method=method, seed=seed, training=str(run))
            if seed < 3:
                write_run(run, imports={"/my/prepare.py": "digest 1"}, used_imports=["/my/prepare.py"])
    write(tmp_path / "runs/base", [{"value": 1.0}], method="base model", gates="none", seed=None, step=None)
    text, _ = report_on(tmp_path / "runs", capsys)
    assert "code 1" not in text and "Mine 52.00 ± 1.00" in text
    for run in ("LoRA_2", "Mine_2"):
        write_run(tmp_path / "runs" / run, imports={"/my/prepare.py": "digest 2"})
    shutil.rmtree(tmp_path / "runs/Mine_3")
    text, folder = report_on(tmp_path / "runs", capsys)
    for method in ("LoRA", "Mine"):
        places = f"(code 1: {tmp_path}/runs/{method}_1; code 2: {tmp_path}/runs/{method}_2)"
        start = f"A file of `--import` changed between the trainings of {method}"
        assert f"{start}, so their results have no common mean {places}. Train the runs of one code again. " in text
    numbers = pd.read_csv(folder / "accuracy.csv").set_index("method")
    labels = ["base model", "LoRA, code 1", "LoRA, code 2", "Mine, code 1", "Mine, code 2"]
    assert [*numbers.index] == labels and {*numbers["difference"].dropna()} == {0.0}
    with user_error("`code` differs between the results `accuracy` of LoRA"):
        report_on(tmp_path / "runs", capsys, filter={"task": "b"})
    text, _ = report_on(tmp_path / "runs", capsys, filter={"task": "b", "code": 2})
    assert "52.00" in text
    write(tmp_path / "runs/Mine_3", [{"value": 53.0}], {"rule": "Mine"}, method="Mine", seed=3, training="3")
    text, _ = report_on(tmp_path / "runs", capsys)
    assert (
        f"Mine_2; without a code, because `imports` is missing in `run.json`: {tmp_path}/runs/Mine_3). Train" in text
    )


def test_tables_of_readouts_at_several_depths_have_them_in_the_title(tmp_path, capsys):
    title = "Loss on held-out examples (20 tokens), read out after each loop, in nats per token"
    for depth in (2, 4):
        rows = [{"loop": loop, "value": 1.0 / loop} for loop in range(1, depth + 1)]
        shared = {"metric": "readout_loss", "task": "development", "unit": "nats", "num_loops": depth}
        write(tmp_path / f"runs/{depth}", rows, {"num_loops": depth}, **shared)
    text, folder = report_on(tmp_path / "runs", capsys)
    assert f"{title}, at K = 2 method loop 1 loop 2 LoRA" in text
    assert f"{title}, at K = 4 method loop 1 loop 2 loop 3 loop 4 LoRA" in text
    assert (folder / "readout_loss.md").is_file() and (folder / "readout_loss_2.md").is_file()
    alone, _ = report_on(tmp_path / "runs/2", capsys)
    assert f"{title} method loop 1 loop 2 LoRA" in alone


def test_differences_have_the_decimals_of_the_means(finished_sweep, capsys):
    columns = {"all": {"decimals": 1}, "gain": {"minus": {"method": "LoRA"}}}
    text, _ = report_on(finished_sweep, capsys, filter={"task": "b"}, columns=columns)
    assert "Loop Dropout 69.0 ± 8.5 +12.0 [" in text
    columns["gain"]["decimals"] = 2
    assert "+12.00 [" in report_on(finished_sweep, capsys, filter={"task": "b"}, columns=columns)[0]


def test_rows_of_a_table_may_leave_out_the_last_heads(finished_sweep, capsys):
    heads = {"Method": "method", "rate": "recipe_learning_rate"}
    text, folder = report_on(finished_sweep, capsys, filter={"task": "b"}, heads=heads)
    assert "Method rate all gain" in text and "LoRA – 57.00" in text
    assert [*pd.read_csv(folder / "own.csv")["Method"]] == ["LoRA", "LoRA", "Loop Dropout", "Loop Dropout"]


def test_numbers_in_printed_tables_are_whole(capsys):
    gain = "+13.2 [-9.5, +116.7], not significant"
    table = pd.DataFrame(
        {"accuracy": ["73.40 ± 11.20"], "minus LoRA": [gain], "p": ["0.09"]}, ["arithmetic_easy_test" * 2]
    )
    printing.print_table("Results", table)
    out = capsys.readouterr().out
    assert (
        "73.40 ± 11.20" in out and "+13.2 [-9.5, +116.7]," in out and all(len(line) <= 80 for line in out.splitlines())
    )


def test_report_of_an_evaluation_has_no_costs(tmp_path, capsys):
    write(tmp_path / "evaluation", [{"value": 50.0}])
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    assert "Costs" not in capsys.readouterr().out and not (tmp_path / "report/costs.csv").exists()
    write(tmp_path / "diagnostics", [{"value": 50.0, "metric": "curvature"}])
    report.main([str(tmp_path / "diagnostics"), "--output_dir", str(tmp_path / "report")])
    out = capsys.readouterr().out
    assert "There is no accuracy, held-out loss or cost of a training to report, only curvature.\n" in out
    sentence = "A table of your own selects it for each loop, such as by `metric: curvature, loop: 1`"
    assert sentence in out
    write(tmp_path / "own", [{"value": 2.5, "metric": "curvature", "loop": 1, "seed": 1}, {"value": 50.0}])
    assert sentence in report_on(tmp_path / "own", capsys)[0]
    columns = {"first loop": {"task": "b", "metric": "curvature", "loop": 1}}
    assert "LoRA 2.50" in report_on(tmp_path / "own", capsys, rows=[["LoRA"]], columns=columns)[0]
    write(tmp_path / "diagnostics", [{"value": 50.0, "metric": "loss_reduction"}])
    report.main([str(tmp_path / "diagnostics"), "--output_dir", str(tmp_path / "report")])
    assert "There is no" not in capsys.readouterr().out and (tmp_path / "report/loss_reduction.csv").is_file()


def test_all_tables_of_a_report_name_trainings_alike(tmp_path, capsys):
    """Also a table that only one of two trainings has measurements for."""
    loss, reduction = {"task": "training", "metric": "eval_loss"}, {"metric": "loss_reduction", "gates": "loop 1"}
    few = {"max_steps": 4}
    write(
        tmp_path / "a",
        [{**loss, "value": 1.0}, {**reduction, "loop": 1, "value": 5.0}],
        {**few, "learning_rate": 0.001},
    )
    write(tmp_path / "b", [{**loss, "value": 2.0}], {"max_steps": 8, "learning_rate": 0.003})
    write(tmp_path / "c", [{**loss, "value": 3.0}], {"learning_rate": 0.003}, method="Loop Dropout")
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    names = {}
    for table in ("held_out_loss", "loss_reduction"):
        names[table] = [*pd.read_csv(tmp_path / f"report/{table}.csv")["method"].unique()]
    assert names["held_out_loss"] == [
        "LoRA, lr 0.001, max_steps = 4",
        "LoRA, lr 0.003, max_steps = 8",
        "Loop Dropout, lr 0.003",
    ]
    assert names["loss_reduction"] == ["LoRA, lr 0.001, max_steps = 4"]
    missing = "No loss reduction is measured yet of"
    assert missing not in capsys.readouterr().out  # no adapter is there
    (tmp_path / "b/adapter_config.json").write_text("{}")
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    command = f"`loopdropout diagnose {tmp_path}/b` measures it on all held-out examples."
    assert f"{missing} {tmp_path}/b. {command}" in " ".join(capsys.readouterr().out.split())
    with open(tmp_path / "b/recipe.yaml", "a") as recipe:
        recipe.write("command: dpo\n")  # whose data have no completions to measure
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    assert missing not in capsys.readouterr().out


def test_figures_name_two_methods_of_one_rule(tmp_path, capsys):
    """By their names in the sweep, in its order. A line over settings with names of their own has the title of their rule."""
    for name, p in (("lora", None), ("weak", 0.25), ("strong", 0.75)):
        run_name = f"mine/{name}/lr_0.001/seed_1"
        rows = [{"num_loops": depth, "value": 50.0 + depth} for depth in (2, 4)]
        rows.append({"task": "training", "metric": "train_seconds", "value": 1.0})
        method = "LoRA" if p is None else "Loop Dropout"
        write(tmp_path / run_name, rows, {"run_name": run_name, "p": p}, method=method)
    results = frames.load_results(tmp_path)
    rows = figure_files.panel_rows(DEPTHS, results)
    assert [*rows["label"].unique()] == ["LoRA", "strong", "weak"]
    update_summary(tmp_path / "mine", full_grid={"weak": True, "strong": True, "lora": True})
    rows = figure_files.panel_rows(DEPTHS, results)
    assert [*rows["label"].unique()] == ["LoRA", "weak", "strong"]
    rows = figure_files.panel_rows(DEPTHS, results[results["variant"] != "weak"])
    assert [*rows["label"].unique()] == ["LoRA", "strong"]
    rows = figure_files.panel_rows({**DEPTHS, "x": "recipe_p", "filter": {"task": "b"}}, results)
    assert {*rows["label"]} == {"Loop Dropout"}  # one line over p


def test_printed_table_has_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    heads = [f"adapter, K = {depth}" for depth in range(1, 10)]
    table = pd.DataFrame([range(9)], ["arithmetic_easy_test, lr 0.001, lora_dropout = 0.1"], heads).rename_axis("task")
    printing.print_table("Results", table, "{:.1f}".format)
    printing.print_table("Some", table[heads[:4]].astype(str))
    parts = capsys.readouterr().out.split("\n\n")
    assert [part.count(" K =") for part in parts] == [3, 3, 3, 4]
    assert all(len(line) <= 80 for part in parts for line in part.splitlines())
    assert re.search("arithmetic_easy_test, +6.0 +7.0 +8.0 *\nlr 0.001, *\nlora_dropout = 0.1", parts[2])
    monkeypatch.setenv("COLUMNS", "200")
    printing.print_table("Results", table, "{:.1f}".format)
    assert 80 < max(map(len, capsys.readouterr().out.splitlines())) <= 120


@pytest.mark.parametrize("columns", [120, 80, 60, 40, 20])
def test_printed_table_keeps_numbers_and_labels_in_a_narrow_terminal(columns, capsys, monkeypatch):
    """A label has as few lines as fit, a task that all lines share is in the title, and no number is cut."""
    monkeypatch.setenv("COLUMNS", str(columns))
    labels = ["Keep two, lr 0.001", "Loop Dropout, lr 0.003"]
    keys = pd.MultiIndex.from_product([["arithmetic_easy_test"], ["4"], labels], names=["task", "K", "method"])
    gain = "-17.5 [-139.3, +124.3]"
    table = pd.DataFrame({"accuracy": "40.00 ± 13.25", "minus LoRA": f"{gain}, not significant", "p": "0.205"}, keys)
    printing.print_table("Accuracy", table)
    title, *lines = capsys.readouterr().out.strip().splitlines()
    assert title == ("Accuracy" if columns == 120 else "Accuracy, for task = arithmetic_easy_test, K = 4")
    text = "\n".join(lines)
    for number in (
        "40.00 ± 13.25",
        gain,
        "0.205",
        "lr 0.001",
        "lr 0.003",
        "Keep two,",
        "Loop Dropout,",
        "not significant",
    ):
        assert text.count(number) >= 1
    assert max(map(len, lines)) <= max(columns, 40)
    if columns == 80:
        assert len(lines) == 5 and "Keep two, lr 0.001" in text


def test_printed_table_of_two_rates_has_one_part(capsys, monkeypatch):
    """A label takes one line and the last columns stay in the table, which is as wide as the terminal up to 120 columns."""
    gain = "+13.2 [-9.5, +116.7], not significant"
    table = pd.DataFrame(
        {"accuracy": ["73.40 ± 11.20"], "minus LoRA": [gain], "p": ["0.090"], "seeds": ["2"]},
        pd.MultiIndex.from_tuples(
            [("arithmetic_easy_test", "4", "Loop Dropout, lr 0.001")], names=["task", "K", "method"]
        ),
    )
    for columns, num_lines in ((100, 4), (120, 3), (300, 3)):
        monkeypatch.setenv("COLUMNS", str(columns))
        printing.print_table("Results", table)
        lines = capsys.readouterr().out.strip().splitlines()
        assert len(lines) <= num_lines and "seeds" in lines[1] and "lr 0.001" in "".join(lines)
        assert all(len(line) <= min(columns, 120) for line in lines)


def test_report_compares_methods_at_equal_settings(tmp_path):
    for rate, p in ((0.001, None), (0.001, [0.25]), (0.002, None)):
        for method in ["LoRA"] * (p is None) + ["Loop Dropout"]:
            rows = [{"value": 1000 * rate * seed + 10 * (method != "LoRA"), "seed": seed} for seed in (1, 2)]
            write(tmp_path / f"{method} {rate} {p}", rows, {"learning_rate": rate, "p": p}, method=method)
    table = accuracy_table(tmp_path).reset_index("method")
    assert {method: gain for method, gain in table[["method", "minus LoRA"]].to_numpy() if gain} == dict.fromkeys(
        [f"Loop Dropout, lr {text}" for text in ("0.001", "0.001, p = 0.25", "0.002")],
        "+10.0, the same for each seed",
    )


def test_report_names_other_settings_than_those_of_lora(tmp_path, capsys):
    """Fields of the rule and settings without an effect are not among them, nor is one that is set to its default."""
    ours = {"rule": "loop_dropout", "p": 0.5, "max_steps": 8, "lora_r": 16, "logging_steps": 5}
    recipes = {
        "lora": {"rule": "lora", "max_steps": 4, "lora_r": 8, "learning_rate": 0.001},
        "ours": {**ours, "learning_rate": 0.002, "gradient_accumulation_steps": 1},
    }
    for name, recipe in recipes.items():
        rows = [{"value": 50.0, "samples": "answers.jsonl"}, {"metric": "eval_loss", "task": "training", "value": 1.0}]
        method = "LoRA" if name == "lora" else "Loop Dropout"
        write(tmp_path / "runs" / name, rows, recipe, method=method)
        write_lines(tmp_path / "runs" / name / "answers.jsonl", [{"correct": 1.0}] * 20)
    text, folder = report_on(tmp_path / "runs", capsys)
    settings = "learning_rate = 0.002 instead of 0.001, lora_r = 16 instead of 8, max_steps = 8 instead of 4"
    sentence = f"Other settings than those of LoRA, from which a difference can come, too: Loop Dropout: {settings}."
    assert text.count(sentence) == 1  # although it is true of both tables, whose files have it
    for name in ("accuracy", "held_out_loss"):
        assert sentence in " ".join((folder / f"{name}.md").read_text().split())
    assert pd.read_csv(folder / "accuracy.csv")["other_settings"].dropna().tolist() == [settings]


@pytest.mark.parametrize("is_chosen", [True, False])
def test_chosen_learning_rates_are_no_other_settings(finished_sweep, capsys, is_chosen):
    (finished_sweep / "lora/lr_0.002").rename(finished_sweep / "lora/lr_0.004")
    for recipe in finished_sweep.glob("lora/lr_0.004/seed_*/recipe.yaml"):
        dump_recipe({**load_recipe(recipe), "learning_rate": 0.004}, recipe)
    shutil.rmtree(finished_sweep / "lora/lr_0.001")
    shutil.rmtree(finished_sweep / "loop_dropout/lr_0.001")
    if is_chosen:
        update_summary(finished_sweep, choices={"lora": {"rates": [0.001, 0.004], "best": 0.004}})
    else:
        update_summary(finished_sweep, full_grid={"lora": True, "loop_dropout": True})
    text, _ = report_on(finished_sweep, capsys)
    assert ("Loop Dropout: learning_rate = 0.002 instead of 0.004." in text) != is_chosen


def test_report_says_which_learning_rates_a_sweep_did_not_choose(finished_sweep, tmp_path, capsys):
    """In the sentence, the CSV file and the lines below, where a choice must not seem to be that of another run."""
    ours, lora = (finished_sweep / name for name in ("loop_dropout/lr_0.001/seed_1", "lora/lr_0.002/seed_1"))
    for run, method in ((ours, "Loop Dropout"), (lora, "LoRA")):
        place = {"training": run.relative_to(tmp_path).as_posix(), "adapter": str(run)}
        write(tmp_path / "own" / method, [{"value": 50.0}], method=method, **place)
    update_summary(finished_sweep, choices={"not_here": {"rates": [0.001], "best": 0.001}})
    setting = "learning_rate = 0.001, which its sweep did not choose, instead of 0.002"
    text, folder = report_on(tmp_path / "own", capsys)
    assert f"Loop Dropout: {setting}." in text
    assert pd.read_csv(folder / "accuracy.csv")["other_settings"].dropna().tolist() == [setting]
    about = "The results of loop_dropout/lr_0.001/seed_1 are of a learning rate that this sweep has not chosen."
    assert f" loop_dropout: learning rate 0.002. {about}" in text and "not_here" not in text
    update_summary(finished_sweep, choices={"lora": {"rates": [0.001, 0.002], "best": 0.001}})
    text, _ = report_on(tmp_path / "own", capsys)
    assert f"{setting}, which its sweep did not choose." in text
    update_summary(finished_sweep, full_grid={"loop_dropout": True})  # a former choice of it no longer counts
    text, _ = report_on(tmp_path / "own", capsys)
    assert "learning_rate = 0.001 instead of 0.002, which its sweep did not choose." in text
    assert "loop_dropout: learning rate" not in text


def test_report_has_the_names_of_the_sweep(tmp_path, capsys):
    """A difference is still to LoRA with the same settings, and the name of a rule is its title."""
    methods = {
        "plain": (None, 8),
        "plain_16": (None, 16),
        "weak": (0.25, 8),
        "weak_16": (0.25, 16),
        "loop_dropout": (0.5, 8),
    }
    for name, (p, rank) in methods.items():
        method = "LoRA" if p is None else "Loop Dropout"
        run_name = f"mine/{name}/lr_0.001/seed_1"
        rows = [{"value": 10.0 * rank + (p or 0)}, {"task": "training", "metric": "train_seconds", "value": 1.0}]
        rows.append({"task": "training", "metric": "eval_loss", "value": 2.0})
        rows.append({"gates": "loop 1", "loop": 1, "value": 5.0})
        write(tmp_path / run_name, rows, {"run_name": run_name, "p": p, "lora_r": rank}, method=method)
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    capsys.readouterr()
    names = {*methods} - {"loop_dropout"} | {"Loop Dropout"}
    for file in ("costs", "held_out_loss"):
        lines = (tmp_path / "report" / f"{file}.md").read_text().splitlines()
        assert {line.split("|")[1].strip() for line in lines if line.startswith("|")} >= names
    results = frames.load_results(tmp_path)
    gains = (
        tables.accuracy_table(tables.accuracy_numbers(results)).reset_index("method").set_index("method")["minus LoRA"]
    )
    assert gains.to_dict() == {
        "plain": "",
        "plain_16": "",
        "weak": "+0.3",
        "weak_16": "+0.3",
        "Loop Dropout": "+0.5",
    }
    plot = figures.overview_figure(results)
    panels = plot.items if hasattr(plot, "items") else [plot]
    assert all({*panel.data["label"]} == names for panel in panels)
    runs = [str(tmp_path / f"mine/{name}/lr_0.001/seed_1") for name in ("weak", "loop_dropout", "plain")]
    for run in runs:
        row = {"value": 100.0, "samples": "s.jsonl", "n": 12}
        write(Path(run), [row], method="LoRA" if run == runs[-1] else "Loop Dropout")
        write_lines(Path(run, "s.jsonl"), [{"correct": 1, "target": "x"}] * 12)
    report.main([*runs, "--output_dir", str(tmp_path / "report")])
    compared = pd.read_csv(tmp_path / "report/comparison.csv")
    assert [*compared["method"]] == ["weak", "Loop Dropout", "plain"]


def test_rule_that_is_not_imported_has_its_title(tmp_path):
    """As in the sweep, which has imported it."""
    for variant in ("drop_last", "my_name"):
        run = {"run_name": f"sweep/{variant}/lr_0.1/seed_1", "rule": "drop_last"}
        write(tmp_path / variant, [{"value": 50.0}], run, method="Drop last")
    names = name_methods(frames.load_results(tmp_path))
    assert sorted(names) == ["Drop last", "my_name"]


def test_own_methods_of_a_figure_differ_in_color():
    labels = [f"p_{number}" for number in range(8)]
    data = pd.DataFrame({"label": labels, "panel": "", "loop": 1, "mean": 1.0, "sd": 0.0})
    plot = line_plot(data, "loop", pd.DataFrame({"x_label": "x", "y_label": "y"}, [""]), "")
    (scale,) = (scale for scale in plot.scales if scale.aesthetics == ["color"])
    assert len({*scale.palette(8)}) == 8


def test_overview_figure_has_three_panels(quickstart):
    folder = quickstart / "LoRA 0.001"
    again = {"gates": "loop 1", "loop": 1, "metric": "loss_reduction", "task": "development", "n": 50, "value": 77.0}
    write(folder, [{**again, "adapter": str(folder)}])  # of diagnose.py
    of_base = {"gates": "none", "method": "base model", "seed": None, "num_loops": 4}
    strict = {**of_base, "metric": "accuracy", "value": 0.0}
    write(folder, [strict, {**strict, "metric": "last_number", "value": 73.2}])
    results = frames.load_results(quickstart)
    plot = figures.overview_figure(results)
    assert_readable(plot)
    panels = [panel.data.set_index(["label", "loop"])["mean"] for panel in plot.items]
    assert [len(panel["Loop Dropout, lr 0.001"]) for panel in panels] == [3, 4, 4]
    assert panels[2]["LoRA, lr 0.001", 1] == 5  # the training's own
    (base,) = [label for label, _ in panels[0].index if label.startswith("base model")]
    assert base.startswith("base model, last number") and panels[0][base, 4] == 73.2  # not 0 by its format
    caption = " ".join(plot.items[0].labels.caption.split())
    assert caption.endswith("In their format, as in the table, its accuracy is 0.00 to 1.00%.")
    write(quickstart / "LoRA 0.002/evaluation", [{"num_loops": 8, "n": 5, "value": 50.0}], training="of 0.002")
    (figure, *_) = figures.overview_figure(frames.load_results(quickstart)).items
    assert (
        "problems differ: 20 at K = 2, 20 at K = 4, 5 at K = 8, 20 at K = 10, 20 with the adapter in one loop."
        in " ".join(figure.labels.caption.split())
    )
    is_line = [type(layer.geom).__name__ == "geom_vline" for layer in plot.items[0].layers]
    assert any(is_line) == (results.query("task == 'training'")["num_loops"].nunique() == 1)
    axes = [(panel.labels.x, panel.labels.y) for panel in plot.items]
    single = "only loop t with the adapter"
    assert axes == [
        ("loops K (dotted: in training)", "accuracy (%)"),
        (single, "accuracy (%)"),
        (single, "loss reduction (%)"),
    ]


def test_settings_of_a_method_differ_in_their_line():
    """They share the color of the method, and the legend has both."""
    axes = pd.DataFrame({"x_label": "x", "y_label": "y"}, [""])
    data = pd.DataFrame({"label": LABELS, "panel": "", "loop": 1, "mean": 1.0, "sd": 0.0})
    plot = line_plot(data, "loop", axes, "")
    (scale,) = (scale for scale in plot.scales if scale.aesthetics == ["linetype"])
    assert dict(zip(LABELS, scale.palette(4), strict=True)) == {
        "LoRA, p = 1": "solid",
        "LoRA, p = 2": "dashed",
        "Loop Dropout": "solid",
        "Mine": "solid",
    }
    plot = line_plot(data.query("label != 'LoRA, p = 2'"), "loop", axes, "")
    assert not [scale for scale in plot.scales if scale.aesthetics == ["linetype"]]


def test_band_of_accuracies_stays_between_0_and_100(tmp_path):
    """A loss reduction can be negative."""
    for seed, value in ((1, 0.0), (2, 9.0)):
        rows = [{"value": value}, {"value": 100 - value, "num_loops": 2}]
        rows.append({"metric": "loss_reduction", "value": value, "gates": "loop 1"})
        write(tmp_path / str(seed), rows, seed=seed)
    data = points(frames.load_results(tmp_path), ["metric", "num_loops"]).set_index(["metric", "num_loops"])
    sd = 9 / math.sqrt(2)
    for place, band in {
        ("accuracy", 4): [0, 4.5 + sd],
        ("accuracy", 2): [95.5 - sd, 100],
        ("loss_reduction", 4): [4.5 - sd, 4.5 + sd],
    }.items():
        assert [*data.loc[place, ["low", "high"]]] == pytest.approx(band)


def test_training_depth_is_wider_than_the_grid(quickstart):
    panel = figures.overview_figure(frames.load_results(quickstart)).items[0]
    (line,) = (layer.geom for layer in panel.layers if type(layer.geom).__name__ == "geom_vline")
    assert line.aes_params["size"] > 1 and line.aes_params["linetype"] == "dotted"
    assert to_hex(line.aes_params["color"]) == GRAY  # without the transparency of the grid


@pytest.mark.parametrize("num_steps", [4, 40])
def test_report_draws_the_losses_of_trainings(tmp_path, capsys, num_steps, write_figures):
    """Mean and SD over seeds at each step, also of runs without a benchmark."""
    for method, shift in (("LoRA", 0.0), ("Loop Dropout", 0.5)):
        for seed in (1, 2):
            run = tmp_path / f"{method} {seed}"
            write(run, [{"task": "training", "metric": "eval_loss", "value": 1.0, "seed": seed}], method=method)
            history = [{"step": step, "loss": step + seed + shift} for step in range(1, num_steps + 1)]
            history += [{"step": num_steps, "eval_loss": 3.0 * seed}, {"step": num_steps, "train_loss": 9.0}]
            (run / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    assert f"Wrote {tmp_path}/report/losses.png, .pdf and .svg\n" in capsys.readouterr().out
    assert (tmp_path / "report/losses.png").is_file() and not (tmp_path / "report/overview.png").exists()
    curves = figures.loss_curves(frames.load_results(tmp_path))
    of_lora = curves.query("label == 'LoRA'").set_index(["panel", "step"])[["mean", "sd"]]
    assert [*of_lora.loc["training loss", "mean"]] == pytest.approx([step + 1.5 for step in range(1, num_steps + 1)])
    assert [*of_lora.loc["held-out loss", num_steps]] == pytest.approx([4.5, 3 / math.sqrt(2)])
    plot = figures.loss_figure(curves)
    assert_readable(plot)
    has_markers = any(type(layer.geom).__name__ == "geom_point" for layer in plot.items[0].layers)
    assert has_markers == (num_steps == 4) and [*curves["panel"].unique()] == ["training loss", "held-out loss"]


def test_lines_of_a_loss_curve_have_readable_names(tmp_path, monkeypatch):
    """The lines of docs/sft.md."""
    write(tmp_path / "out", [{"task": "training", "metric": "eval_loss", "value": 1.0, "seed": 1}], method="LoRA")
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "eval_loss": 3.0}]
    (tmp_path / "out/trainer_state.json").write_text(json.dumps({"log_history": history}))
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/sft.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"(?ms)^```python\n(.*?)^```", page) if "loss.png" in block)
    exec(block, {})
    axes, legend = pyplot.gca(), pyplot.gca().get_legend()
    names = [text.get_text() for text in legend.get_texts()]
    last = {name: line.get_ydata()[-1] for name, line in zip(names, axes.get_lines(), strict=True)}
    assert last == {"LoRA, held-out loss": 3.0, "LoRA, training loss": 1.0}
    assert legend.get_title().get_text() == "" and (tmp_path / "loss.png").is_file()


def test_training_losses_are_means_of_equal_numbers_of_steps(tmp_path):
    """The loss is logged every 10 steps, at evaluations every 4 steps, and at the end."""
    of_steps = pd.Series(np.random.default_rng(0).normal(size=22), range(1, 23))  # the loss of each step
    logged = [4, 8, 10, 12, 16, 20, 22]
    means = of_steps.groupby(np.searchsorted(logged, of_steps.index)).mean()
    drawn = average_windows(pd.Series(means.to_numpy(), logged))
    assert [*drawn.index] == [4, 8, 12, 16, 20, 22]
    for step in (4, 8, 12, 16, 20):
        assert drawn[step] == pytest.approx(of_steps.loc[step - 3 : step].mean())
    assert drawn[22] == pytest.approx(of_steps.loc[21:22].mean())
    write(tmp_path, [{"task": "training", "metric": "eval_loss", "value": 1.0}])
    history = [{"step": step, "loss": loss} for step, loss in zip(logged, means, strict=True)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    curves = figures.loss_curves(frames.load_results(tmp_path)).set_index("step")
    assert curves["mean"].to_dict() == pytest.approx(drawn.to_dict())


def test_single_run_has_no_words_about_seeds_and_lora(tmp_path, capsys):
    """The columns of differences to LoRA would be empty, and the spread over seeds is not known."""
    row = {"metric": "eval_loss", "task": "training", "value": 1.5}
    accuracy = {"metric": "accuracy", "task": "b", "value": 50.0}
    write(tmp_path / "a", [row, accuracy], {"rule": "loop_dropout"}, method="Loop Dropout")
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    printed = capsys.readouterr().out
    assert "\nHeld-out loss in nats per token\n" in printed and "\nAccuracy in %\n" in printed
    assert "minus LoRA" not in printed
    write(tmp_path / "b", [{**row, "seed": seed} for seed in (1, 2)], {"rule": "lora"})
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    assert f"\n{tables.LOSS_TITLE}\n" in capsys.readouterr().out


@pytest.mark.parametrize("num_panels", [1, 2, 3])
def test_texts_of_figures_fit_their_canvas(num_panels):
    """Titles, captions and legends are wrapped to the width, which captions of several sentences and long names exceed."""
    long = "a method with a long name, max_train_steps = 100000, split_seed = 1, in_a_word_that_is_wider_than_a_panel_of_it"
    labels = ["LoRA, lr 0.001", *(f"{long} {number}" for number in range(6))]
    panels = [f"problems of arithmetic_hard_and_long_test_{number}" for number in range(num_panels)]
    lines = [[panel, label, x, 90.0 + x, 1, True] for panel in panels for label in labels for x in (1, 2)]
    data = pd.DataFrame(lines, columns=["panel", "label", "x", "mean", "num_seeds", "chose"]).assign(sd=1.0)
    axes = pd.DataFrame({"x_label": "a long label of a horizontal axis " * 3, "y_label": "accuracy in % " * 2}, panels)
    seeds = data.assign(num_seeds=np.where(data["x"] == 1, 1, 3))
    plot = line_plot(data, "x", axes, "A long title of a figure " * 9, caption=figures.describe_points(seeds))
    figure = assert_readable(plot)
    texts = [text.get_text() for text in figure.findobj(Text)]
    for told in (figures.describe_points(seeds), *labels):
        assert told.replace(" ", "").replace("\n", "") in [re.sub(r"\s", "", text) for text in texts]
    (caption,) = (text for text in figure.findobj(Text) if text.get_text().startswith("Bands"))
    legend = [text for text in figure.findobj(Text) if "max_train_steps" in text.get_text()]
    assert not any(text.get_window_extent().overlaps(caption.get_window_extent()) for text in legend)
    assert all("max_train_steps = 100000" in text.get_text() for text in legend)
    heat = data.drop_duplicates(["panel", "x"]).assign(y=1)
    assert_readable(heat_plot(pd.concat([heat, heat.assign(y=2)]), "x", "y", "A long title " * 9, "long " * 30, "y"))


def test_legend_has_no_band():
    """It would have one also for a method of a single seed, which has none."""
    data = pd.DataFrame({"label": LABELS, "panel": "", "loop": 1, "mean": 1.0, "sd": 0.0})
    plot = line_plot(data, "loop", pd.DataFrame({"x_label": "x", "y_label": "y"}, [""]), "")
    (ribbon,) = (layer for layer in plot.layers if type(layer.geom).__name__ == "geom_ribbon")
    assert ribbon.show_legend is False


def test_tick_labels_have_room():
    assert space_ticks([5, 10, 15, 20, 21]) == [5, 10, 15, 20]
    assert space_ticks([*range(1, 13)]) == [*range(1, 13)]
    assert space_ticks([1, 2, 4, 8, 16, 32], is_log=True) == [1, 2, 4, 8, 16, 32]
    assert space_ticks([4]) == [4]


def test_figures_are_transparent(tmp_path):
    data = pd.DataFrame({"label": "LoRA", "panel": "x", "loop": [1, 2], "mean": [1.0, 2.0], "sd": 0.0})
    save_figure(
        line_plot(data, "loop", pd.DataFrame({"x_label": "loop", "y_label": "%"}, ["x"]), "title"), tmp_path / "a"
    )
    pixels = pyplot.imread(tmp_path / "a.png")
    assert pixels.shape[-1] == 4 and pixels[0, 0, 3] == 0 and "fill: #ffffff" not in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("values", "begin"), [([0.0, 0.0], 0), ([30.0, 70.0], 0), ([85.0, 87.0], 85), ([-5.0, 9.0], -5)]
)
def test_axis_begins_at_zero_or_says_so(values, begin):
    data = pd.DataFrame({"label": "LoRA", "panel": "GSM8K", "loop": [1, 2], "mean": values, "sd": 0.0})
    plot = line_plot(data, "loop", pd.DataFrame({"x_label": "loop", "y_label": "%"}, ["GSM8K"]), "title")
    assert ("does not begin at 0" in plot.labels.y) == (begin > 0)
    low, high = plot.draw().axes[0].get_ylim()
    assert low == pytest.approx(begin, abs=0.06 * (high - low)) and high >= 0.5


def test_method_has_one_color():
    colors = []
    axes = pd.DataFrame({"x_label": "x", "y_label": "y"}, [""])
    for labels in (LABELS, LABELS[::-1]):
        data = pd.DataFrame({"label": labels, "panel": "", "loop": 1, "mean": 1.0, "sd": 0.0})
        (scale,) = (scale for scale in line_plot(data, "loop", axes, "").scales if scale.aesthetics == ["color"])
        colors.append(dict(zip(labels, scale.palette(4), strict=True)))
    assert colors[0] == colors[1] and len({*colors[0].values()}) == 3
    assert colors[0]["LoRA, p = 1"] == colors[0]["LoRA, p = 2"]


def test_report_lists_missing_runs(quickstart, tmp_path, capsys):
    names = ["math_main", "figure_teaser", "recipes"]
    report.main([str(quickstart), "--tables", *names, "--output_dir", str(tmp_path / "report")])
    text = (tmp_path / "report/math_main.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("Missing: ")]
    assert [line.split(". The first is ")[0] for line in lines] == [
        f"Missing: 6 numbers of the sweep {name}" for name in ("metamath_gsm", "metamath_gsm_ouro_2.6b")
    ]
    assert (
        "The first is GSM8K, Ouro-1.4B LoRA: no result with" in text
        and "loopdropout sweep sweeps/metamath_gsm.yaml" in text
    )
    assert text.count("–") == 12 and "86.53 ± 0.44" in text
    printed = capsys.readouterr().out
    assert "Missing: Loss reduction with the adapter in one loop only" in printed
    text = (tmp_path / "report/recipes.md").read_text()
    assert "Maximum sequence length" in text and "1024" in text and "101, 102, 103" in text


DEPTHS = {
    "title": "Depth", "made_by": ["loopdropout sweep mine.yaml"], "figure": "line", "x": "num_loops", "x_label": "K",
    "y_label": "accuracy (%)", "filter": {"task": "b", "method": ["LoRA", "Loop Dropout"]},
    "panels": {"trained at K = 4": {"trained_loops": 4}}, "gain_over": {"Loop Dropout": "LoRA"},
}  # fmt: skip
WANTED = "Missing: Depth: no result with trained_loops = 4, num_loops = 2 or 4, method = "
METHODS = ", task = b. The results have the methods LoRA, Loop Dropout"


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["LoRA", "Loop Dropout"], "Wrote "),
        (["LoRA", "CoTo"], f"{WANTED}LoRA or CoTo{METHODS}.\nloopdropout sweep mine.yaml\n"),
        (
            ["lora", "CoTo"],
            f"{WANTED}lora or CoTo{METHODS}, and lora is the rule of the method LoRA. Did you mean 'LoRA'?",
        ),
    ],
)
def test_missing_method_of_a_figure_is_one_sentence(tmp_path, capsys, methods, message):
    for method in ("LoRA", "Loop Dropout"):
        rows = [{"num_loops": depth, "value": 10.0 * depth} for depth in (2, 4)]
        write(tmp_path / method, [*rows, {"task": "training", "metric": "train_seconds", "value": 9.0}], method=method)
    spec = {**DEPTHS, "filter": {**DEPTHS["filter"], "method": methods}}
    (tmp_path / "depths.yaml").write_text(yaml.safe_dump(spec))
    words = [str(tmp_path), "--tables", str(tmp_path / "depths.yaml"), "--output_dir", str(tmp_path / "report")]
    report.main(words)
    assert capsys.readouterr().out.startswith(message)
    for change, error in (
        ({"gain_over": {"late_half": "LoRA"}}, r"`gain_over` must name lines of the figure \(LoRA, Loop Dropout\)"),
        (
            {"x_label": None},
            "`x_label` must be set .* `loopdropout recipes tables/figure_teaser.yaml` prints an example",
        ),
        ({"figure": "lines"}, "`figure` must be one of line, heat, gates, got 'lines'. Did you mean 'line'?"),
        ({"figure": ["heat"]}, r"`figure` must be one of line, heat, gates, got \['heat'\]"),
        (
            {"figure": "heat"},
            "`y` must be set for a figure.* `loopdropout recipes tables/figure_depth_gains.yaml` prints",
        ),
        ({"figure": "heat", "y": "trained_loops"}, "`minus` must be set for a figure"),
        ({"figure": "gates"}, "`num_loops` must be set for a figure's `filter`"),
        ({"panels": {"all": "b"}}, "`all` of a figure must be a mapping, .* got 'b'"),
    ):
        changed = {name: value for name, value in {**DEPTHS, **change}.items() if value is not None}
        (tmp_path / "depths.yaml").write_text(yaml.safe_dump(changed))
        with user_error(error):
            report.main(words)


def test_report_shows_held_out_losses_and_its_files(tmp_path, capsys):
    folder = tmp_path / "run"
    for method, seed, value in [("LoRA", 1, 0.5), ("LoRA", 2, 0.7), ("Loop Dropout", 1, 0.25)]:
        row = {
            "metric": "eval_loss",
            "value": value,
            "unit": "nats",
            "task": "training",
            "method": method,
            "seed": seed,
        }
        cost = {**row, "metric": "train_seconds"}
        write_results(folder / f"{method}{seed}", [{**each, "num_loops": 4, "gates": "unit"} for each in (row, cost)])
    report.main([str(folder), "--output_dir", str(tmp_path / "report")])
    printed = capsys.readouterr().out
    assert re.search(r"LoRA +0\.6000 ± 0\.1414 +2 *\n", printed) and re.search(
        r"Loop Dropout +0\.2500 +-0\.2500 +1 *\n", printed
    )
    assert f"Wrote {tmp_path}/report/held_out_loss.md, .tex and .csv\n" in printed
    assert (tmp_path / "report/held_out_loss.md").is_file()


def test_held_out_losses_of_a_sweep_are_compared_by_seed(tmp_path, capsys):
    """Runs that only chose a learning rate do not count, also in a sweep without a benchmark."""
    losses = {"lora": {1: 2.1, 2: 2.3, 3: 2.2}, "p_0.5": {1: 2.3, 2: 2.4, 3: 2.5}}
    for name, rule, method in (("lora", "lora", "LoRA"), ("p_0.5", "loop_dropout", "Loop Dropout")):
        for rate, seeds in ((1e-3, [1]), (2e-3, [1, 2, 3])):
            for seed in seeds:
                run_name = f"mine/{name}/lr_{rate}/seed_{seed}"
                value = losses[name][seed] + (rate == 1e-3)
                row = {"metric": "eval_loss", "unit": "nats", "task": "training", "value": value, "seed": seed}
                recipe = {"run_name": run_name, "learning_rate": rate, "rule": rule}
                write(tmp_path / run_name, [row], recipe, method=method)
    report.main([str(tmp_path / "mine"), "--output_dir", str(tmp_path / "report")])
    test = stats.ttest_1samp([0.2, 0.1, 0.3], 0)
    low, high = test.confidence_interval()
    numbers = pd.read_csv(tmp_path / "report/held_out_loss.csv").set_index("method")
    assert [*numbers["num_seeds"]] == [3, 3] and numbers["mean"].to_list() == pytest.approx([2.2, 2.4])
    gain = numbers.loc["p_0.5", ["difference", "low", "high", "p"]].astype(float).to_list()
    assert gain == pytest.approx([0.2, low, high, test.pvalue])
    assert f"+0.2000 [{low:+.4f}, {high:+.4f}]" in (tmp_path / "report/held_out_loss.md").read_text()
    print_lowest(tables.loss_numbers(final_results(frames.load_results(tmp_path))))
    lowest = "Lowest held-out loss (mean over 3 seeds): LoRA 2.2000 nats per token (p_0.5: +0.2000)\n"
    assert capsys.readouterr().out.endswith(lowest)


@pytest.mark.parametrize(
    "rates", [{"LoRA": (0.001, 0.002), "Late half": (0.001,)}, {"LoRA": (0.002,), "Late half": (0.001,)}]
)
def test_all_methods_have_a_rate_in_their_label_if_one_has(tmp_path, rates):
    """In an unfinished sweep. Without two learning rates of one method, as after the choice, labels have none."""
    for method, own in rates.items():
        for rate in own:
            rows = [{"value": 50.0}, {"task": "training", "metric": "eval_loss", "value": 1.0}]
            write(tmp_path / f"{method} {rate}", rows, {"learning_rate": rate}, method=method)
            history = [{"step": step, "loss": 1.0, "eval_loss": 1.0} for step in (1, 2)]
            (tmp_path / f"{method} {rate}/trainer_state.json").write_text(json.dumps({"log_history": history}))
    results = frames.load_results(tmp_path)
    wanted = {"LoRA, lr 0.001", "LoRA, lr 0.002", "Late half, lr 0.001"}
    if len(rates["LoRA"]) == 1:
        wanted = {"LoRA", "Late half"}
    assert {*tables.accuracy_numbers(results).reset_index()["method"]} == wanted
    assert {*tables.loss_numbers(results).index} == {*figures.loss_curves(results)["label"]} == wanted
    assert {*figures.overview_figure(results).data["label"]} == wanted


@pytest.mark.parametrize("name", ["Late half", "late_half", "mine"])
def test_own_table_finds_a_method_by_each_of_its_names(tmp_path, capsys, name):
    """The title of its rule, the name of the rule, and its name in a sweep, also as the other side of a difference."""
    for variant, method, rule in (("lora", "LoRA", "lora"), ("mine", "Late half", "late_half")):
        for seed in (1, 2):
            run_name = f"s/{variant}/lr_0.001/seed_{seed}"
            row = {"value": 40.0 + len(rule) * seed, "seed": seed}
            write(tmp_path / run_name, [row], {"run_name": run_name, "rule": rule}, method=method)
    write(tmp_path, [{"method": "base model", "gates": "none", "value": 1.0}], {"rule": "late_half"})
    columns = {
        "all": {},
        "minus": {"minus": {"method": "lora"}},
        "back": {"method": "LoRA", "minus": {"method": name}},
    }
    text, _ = report_on(tmp_path / "s", capsys, rows=[[name]], columns=columns)
    assert "53.50 ± 6.36 +7.50 [" in text and "-7.50 [" in text and "Missing" not in text
    names = r"The results have the methods base model, LoRA, Late half \(in sweeps lora, mine\). Did you mean 'Late half'\?"
    with user_error(names):
        table_files.find(frames.load_results(tmp_path), {"method": "Late halves"})


STARTED = {
    "failed": lambda run: write_run(run, status="failed"),
    "in a sweep": lambda run: dump_recipe({"rule": "lora"}, run / "sweep_recipe.yaml"),
    "of a command": lambda run: dump_recipe({"command": "sft", "rule": "lora"}, run / "recipe.yaml"),
}
"""How a folder becomes one of a run, before or without a training."""


@pytest.mark.parametrize("start", STARTED)
def test_base_model_before_a_training_is_not_measured_again(tmp_path, start):
    """A run that measures the base model, before its training or until it failed, has no other results and leaves none out."""
    base = {"method": "base model", "gates": "none", "seed": None, "value": 1.0}
    write(tmp_path / "a", [{"metric": "eval_loss", "task": "training", "value": 2.0}, base], {"rule": "lora"})
    write(tmp_path / "b", [base], {"rule": "lora"})
    shown, repeated = split_repeated(read_results(tmp_path / "a", tmp_path / "b"))
    assert (len(shown), len(repeated)) == (2, 1)  # without a status, it is another measurement
    STARTED[start](tmp_path / "b")
    shown, repeated = split_repeated(read_results(tmp_path / "a", tmp_path / "b"))
    assert (len(shown), len(repeated)) == (3, 0)


@pytest.mark.parametrize("depths", [(4, 4), (2, 4)])
def test_base_model_is_the_same_next_to_any_training(tmp_path, capsys, depths):
    """Next to trainings of several depths, a failed training, and one of a sweep that has not begun yet."""
    base = {"method": "base model", "gates": "none", "seed": None, "step": None, "value": 1.0}
    of_base = [{**base, "num_loops": depth} for depth in (1, 2, 4)]
    folders = [tmp_path / f"s/lora/lr_0.001/seed_{seed}" for seed in range(4)]
    recipe = {"model_name_or_path": "tiny-ouro", "rule": "lora"}
    for folder, depth in zip(folders, depths, strict=False):
        rows = [
            {"metric": "train_seconds", "task": "training", "value": 2.0, "num_loops": depth},
            {"num_loops": depth},
        ]
        write(folder, [*of_base, *rows], {**recipe, "num_loops": depth}, value=3.0)
    write(folders[2], of_base, recipe)
    write_run(folders[2], status="failed")
    write(folders[3], of_base)
    dump_recipe(recipe, folders[3] / SETTINGS_FILE)
    text, folder = report_on(tmp_path / "s", capsys)
    accuracy = pd.read_csv(folder / "accuracy.csv")
    of_base = accuracy[accuracy["method"].str.startswith("base model")]
    assert of_base[["K", "method", "mean"]].to_numpy().tolist() == [[depth, "base model", 1] for depth in (1, 2, 4)]
    results = frames.load_results(tmp_path)
    found = frames.select(results, {"method": "base model", "metric": "accuracy"})
    assert {*found["num_loops"]} == {*depths}


def test_losses_of_the_base_model_alone_are_left_out(tmp_path):
    """`diagnose` has measured one of two runs again on more examples, and the base model on these only."""
    losses = {"metric": "readout_loss", "task": "development", "unit": "nats", "loop": 1, "value": 3.0}
    base = {**losses, "method": "base model", "gates": "none", "n": 82}
    for name in ("lora", "loop_dropout"):
        trained = {"metric": "eval_loss", "task": "training", "value": 2.0}
        write(tmp_path / name, [trained, {**losses, "n": 16}], {"rule": name}, method=name)
        write_run(tmp_path / name, status="finished")
    again = {**losses, "n": 82, "adapter": str(tmp_path / "lora")}
    write(
        tmp_path / "lora" / "diagnostics",
        [again, {**base, "adapter": again["adapter"]}],
        {"rule": "lora"},
        method="lora",
    )
    results = frames.load_results(tmp_path)
    assert {*results.query("metric == 'readout_loss'")["n"]} == {16}
    assert results.attrs["left_out"].startswith(f"Left out: 2 results in {tmp_path}/lora/diagnostics, ")


def test_trainings_of_several_depths_have_their_own_lines(tmp_path, capsys):
    """Also the loss of the base model, and trainings at the model's own depth, which their recipes may not name."""
    for name, depth, seed in (("a", None, 1), ("b", 4, 2), ("c", 2, 1)):
        rows = [
            {"metric": metric, "task": "training", "value": float(depth or 4)}
            for metric in ("eval_loss", "train_seconds")
        ]
        base = {"method": "base model", "gates": "none", "seed": None, "step": None, "value": 9.0 - (depth or 4)}
        recipe = {"rule": "lora"} if depth is None else {"rule": "lora", "num_loops": depth}
        write(tmp_path / name, [*rows, {**rows[0], **base}], recipe, seed=seed, num_loops=depth or 4)
    text, folder = report_on(tmp_path, capsys)
    losses = pd.read_csv(folder / "held_out_loss.csv").set_index("method")
    assert losses["mean"].to_dict() == {
        "LoRA, K = 4": 4,
        "LoRA, K = 2": 2,
        "base model, K = 4": 5,
        "base model, K = 2": 7,
    }
    assert losses.loc["LoRA, K = 4", "num_seeds"] == 2
    assert {*pd.read_csv(folder / "costs.csv")["method"]} == {"LoRA, K = 2", "LoRA, K = 4"}


def test_recipe_of_a_training_is_read_once_for_all_its_results(tmp_path, monkeypatch):
    rows = [{"metric": "eval_loss", "task": "training", "value": 4.0}]
    write(tmp_path / "run", rows, {"rule": "lora", "p": 0.25}, training="a")
    measured = [{"metric": "loss", "task": "quiz", "gates": f"loop {loop}", "value": 4.0} for loop in range(9)]
    write(tmp_path / "diagnostics", measured, {"p": None}, adapter="run", training="a")
    read, own_read = [], frames.read_recipe
    monkeypatch.setattr(frames, "read_recipe", lambda folder: read.append(folder) or own_read(folder))
    results = frames.load_results(tmp_path)
    assert results["recipe_p"].tolist() == [0.25] * 10 and len(read) == 1


def test_seeds_of_one_depth_have_one_line_if_one_recipe_names_it(tmp_path, capsys):
    """The other recipe leaves it out, because it is the model's own depth."""
    for seed, recipe in ((1, {"rule": "lora"}), (2, {"rule": "lora", "num_loops": 4})):
        write(
            tmp_path / str(seed),
            [{"metric": "eval_loss", "task": "training", "value": 4.0}],
            recipe,
            seed=seed,
            num_loops=4,
        )
    _, folder = report_on(tmp_path, capsys)
    losses = pd.read_csv(folder / "held_out_loss.csv").set_index("method")
    assert losses["num_seeds"].to_dict() == {"LoRA": 2}


def test_held_out_losses_that_chose_the_rates_are_no_test(tmp_path, capsys):
    """As accuracies on the problems that chose them: no differences, and a sentence in each table and figure."""
    for rule, method in (("lora", "LoRA"), ("loop_dropout", "Loop Dropout")):
        for seed in (1, 2):
            run_name = f"mine/{rule}/lr_0.001/seed_{seed}"
            row = {"metric": "eval_loss", "task": "training", "value": seed * len(rule) / 9, "seed": seed}
            write(tmp_path / run_name, [row], {"run_name": run_name, "rule": rule}, method=method)
            history = [{"step": step, "eval_loss": 1.0 * seed} for step in (1, 2)]
            (tmp_path / run_name / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    choices = {method: {"rates": [0.001, 0.002], "best": 0.001} for method in ("lora", "loop_dropout")}
    note = (
        "partly chance, so these losses are not a test of the methods. For a test, train other seeds with one learning"
    )
    spec = {"filter": {"metric": "eval_loss"}}
    text, folder = report_on(tmp_path / "mine", capsys)
    assert note not in text and pd.read_csv(folder / "held_out_loss.csv")["p"].notna().any()
    update_summary(tmp_path / "mine", choices=choices, select_on=dict.fromkeys(choices, "eval_loss"))
    text, folder = report_on(tmp_path / "mine", capsys)
    assert note in text and "minus LoRA" not in text and note in (folder / "held_out_loss.md").read_text()
    assert "The held-out losses are not a test, because they chose the learning rates." in text
    assert pd.read_csv(folder / "held_out_loss.csv")[["difference", "p"]].isna().all(axis=None)
    text, _ = report_on(tmp_path / "mine", capsys, **spec)
    assert note in text and "not a test" in text.split("gain")[1] and "[" not in text
    print_lowest(tables.loss_numbers(frames.load_results(tmp_path)))
    assert note in capsys.readouterr().out


def test_tables_do_not_need_plotnine(quickstart, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotnine", None)
    monkeypatch.delitem(sys.modules, "loopdropout_trainer.reports.plots", raising=False)
    report.main([str(quickstart), "--tables", "recipes", "--output_dir", str(tmp_path / "report")])
    assert (tmp_path / "report/recipes.md").exists()


def test_readme_describes_the_recipes():
    lines = re.findall(r"\| `(\w+\.yaml)` \| (.*\d%.*) \|\n", (ROOT / "recipes/README.md").read_text())
    assert len(lines) == 3
    for name, line in lines:
        examples, steps, *cells = line.replace("`", "").split(" | ")
        drawn, *fitting = map(int, re.findall(r"\d+", examples.replace(",", "")))
        recipe = recipe_texts.describe_recipe(f"recipes/{name}")
        assert drawn == recipe["num_train_examples"]
        batches = math.ceil((fitting or [drawn])[0] / recipe["batch"])
        assert steps == f"{recipe['num_train_epochs'] * batches:,}"
        seeds = recipe["seeds"].replace("0, 1, 2, 3, 4", "0-4").replace("101, 102, 103", "101-103")
        settings = (
            recipe["batch"],
            f"{recipe['max_length']:,}",
            f"{recipe['warmup_steps']:.0%}",
            seeds,
            recipe["benchmarks"],
        )
        assert cells == [*map(str, settings)]


def test_trainings_in_python_are_reported(tmp_path, make_sft, capsys):
    """Their settings tell them apart, and nothing else is needed for a report."""
    for name, fields in (("a", {}), ("b", {"learning_rate": 2e-4, "p": 0.25}), ("c", {"seed": 7})):
        make_sft(output_dir=str(tmp_path / name), max_steps=2, eval_strategy="epoch", **fields).train()
    recipe = load_recipe(tmp_path / "b" / "recipe.yaml")
    assert (recipe["learning_rate"], recipe["p"], recipe["rule"], recipe["lora_r"]) == (2e-4, 0.25, "loop_dropout", 16)
    assert "output_dir" not in recipe and "accelerator_config" not in recipe
    report.main([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    assert "learning_rate" in capsys.readouterr().out
    text = " ".join((tmp_path / "report/held_out_loss.md").read_text().split())
    assert re.search(r"Loop Dropout, lr 0.01, p = 0.5 \| \d+\.\d+ ± \d[.\d]* \| 2 \|", text), text
    assert re.search(r"Loop Dropout, lr 0.0002, p = 0.25 \| \d+\.\d+ \| 1 \|", text), text
    losses = load_state(tmp_path / "a").log_history
    assert any("loss" in log for log in losses) and any("eval_loss" in log for log in losses)


class StopAfterTwoSteps(TrainerCallback):
    """Stop before the checkpoint of step 3, as a kill does."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_losses_of_a_stopped_training_are_drawn(tmp_path, make_sft, capsys):
    folder = tmp_path / "run"
    fields = {"output_dir": str(folder), "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        make_sft(callbacks=[StopAfterTwoSteps()], **fields).train()
    shutil.copytree(
        folder / "checkpoint-2",
        tmp_path / "foreign/checkpoint-2",
        ignore=shutil.ignore_patterns("loop_dropout.json", "checksums.json"),
    )
    (tmp_path / "empty/checkpoint-9").mkdir(parents=True)
    dump_recipe({"p": 0.5}, folder / "recipe.yaml")  # as a command does at the beginning
    write(tmp_path / "evaluated", [{"value": 50.0}])
    results = frames.load_results(tmp_path)
    assert [*results["metric"]] == ["accuracy", "unfinished_at"]
    assert figures.loss_curves(results)["step"].tolist() == [1, 2]
    found = results.iloc[1]
    assert (found["method"], found["trained_loops"], found["recipe_p"]) == ("Loop Dropout", 4, 0.5)
    report.main([str(folder)])
    text = capsys.readouterr().out
    assert (
        f"The training in {folder} has not ended, so it has no results. Its newest checkpoint is checkpoint-2, of 3"
        in text
    )
    assert "Wrote" in text and "There is no" not in text
    make_sft(**fields).train(resume_from_checkpoint=True)
    shutil.rmtree(folder / "checkpoint-3")  # an ended training needs none
    results = frames.load_results(tmp_path)
    assert "unfinished_at" not in {*results["metric"]} and results.attrs["left_out"] == ""
    assert figures.loss_curves(results)["step"].tolist() == [1, 2, 3]


def test_report_says_which_runs_are_not_finished(tmp_path, capsys):
    """Also without any result, while the first run trains. The runs of a sweep are in the sentence about the sweep."""
    sweep_folder, run = tmp_path / "sweep", tmp_path / "sweep/lora/lr_0.001/seed_1"
    update_summary(sweep_folder, ["lora"], trainings={"lora": [0, 2]}, finished={"lora": False})
    run.mkdir(parents=True)
    dump_recipe({"rule": "lora"}, run / "sweep_recipe.yaml")
    with user_error(f"The sweep in {sweep_folder} is not finished: 0 of 2 trainings have ended. The same"):
        frames.load_results(run)
    with lock_folder(run), lock_folder(tmp_path / "begun"), user_error("report again when the first") as caught:
        frames.load_results(tmp_path)
    text = str(caught.value)
    assert re.search(rf"A process trains or measures in {tmp_path}/begun now, since \d\d:\d\d\. The", text), text
    assert re.search(r"running: 1 run is .* \(lora/lr_0.001/seed_1 since \d\d:\d\d\)", text)
    assert str(run) not in text


STATES = {
    "finished": "",
    "trained": " has ended, but measurements are missing. The same command adds them, without training again.",
    "training": " has not ended. The same command with `--resume_from_checkpoint true` continues it.",
    "non-finite": " has stopped, because a gradient was not finite.",
}
"""What a report says about a training of its own by the status in its `run.json`."""


@pytest.mark.parametrize("status", STATES)
def test_report_says_that_measurements_are_missing(tmp_path, capsys, status):
    loss = {"metric": "eval_loss", "task": "training", "value": 1.0}
    folder = tmp_path / "run"
    write(folder, [loss], {"command": "sft", "evaluate_base": False, "rule": "lora"})
    write_run(folder, status=status)
    text, _ = report_on(folder, capsys)
    assert f"The training in {folder}{STATES[status]}" in text or status == "finished", text
    assert ("The training in" in text) == (status != "finished")
    words = f"sft {folder}/recipe.yaml --output_dir {folder} --resume_from_checkpoint true"
    own = STATES[status].replace("The same command with `--resume_from_checkpoint true`", f"`loopdropout {words}`")
    own = own.replace("The same command", f"`loopdropout {words}`")
    for place, sentence in (("outputs/former/run", own), ("run", STATES[status]), (folder, STATES[status])):
        recipe = {"command": "sft", "output_dir": str(place)}  # of a copy, and of the run that was not moved
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        assert "".join(describe_runs([folder])) == (f"The training in {folder}{sentence}" if sentence else "")
    # The missing measurements may have the base model, too.
    assert ("loss of the base model is missing" in text) == (status != "trained"), text


def test_report_names_trainings_of_trained_weights(tmp_path, make_sft, capsys):
    """As far as an adapter or a checkpoint of the training is saved."""
    first = make_sft(output_dir=str(tmp_path / "first"), max_steps=1)
    first.train()
    first.save_model()
    second = make_sft(first.model, output_dir=str(tmp_path / "second"), max_steps=1, p=0.25)
    second.train()
    second.save_model()
    capsys.readouterr()
    report.report_costs(frames.load_results(tmp_path), tmp_path)
    text = " ".join(capsys.readouterr().out.split())
    line = (
        "second started from weights that were trained before: SFT with Loop Dropout (p = 0.5, K = 4, 1 step, learning rate "
        "0.01, seed 42)"
    )
    assert line in text and text.count("trained before") == 1
    make_sft(output_dir=second.args.output_dir).save_model()  # another adapter than the one of the results
    report.report_costs(frames.load_results(tmp_path), tmp_path)
    assert "trained before" not in capsys.readouterr().out


def test_recipes_of_python_have_no_code_and_no_tokens(tmp_path, make_sft):
    trainer = make_sft(output_dir=str(tmp_path), max_steps=1, hub_token="hf_averysecrettoken")
    trainer.args.model_init_kwargs = {"trust_remote_code": True, "token": "hf_averysecrettoken"}
    trainer.train()
    text = (tmp_path / "recipe.yaml").read_text()
    assert "hf_" not in text and "trust_remote_code" not in text
