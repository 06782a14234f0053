"""Reports: the paper's tables from folders as recipes and sweeps leave them, statistics, refusals, figures, the page."""

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from loopdropout_trainer.evaluation.results import BenchmarkResult, Prediction
from loopdropout_trainer.evaluation.statistics import paired_difference, summarize
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.reports import render
from loopdropout_trainer.reports.figures import make_figures
from loopdropout_trainer.reports.measures import CellSpec, evaluate_cell
from loopdropout_trainer.reports.records import ReportError, read_records
from loopdropout_trainer.reports.report import write_report
from loopdropout_trainer.reports.tables import build_table, load_table
from loopdropout_trainer.runs.result import RunResult, write_results
from loopdropout_trainer.settings.recipe import load_recipe


ROOT = Path(__file__).parents[1]
TABLES = sorted((ROOT / "recipes" / "tables").glob("*.yaml"))
PAPER = json.loads(gzip.decompress((ROOT / "tests/golden/eval_stats.json.gz").read_bytes()))["paper"]
TOTALS = {"metamath_gsm8k": 40, "metamath_math500": 50, "gsm8k": 40}


# --- stand-in runs: what sft.py, evaluate.py and diagnose.py leave, with numbers of a random generator ------------------


def write_training(folder, settings, **measured):
    folder.mkdir(parents=True, exist_ok=True)
    rule = settings.get("rule", "loop_dropout")
    fields = {"p": settings.get("p"), **(settings.get("rule_args") or {})}
    drawn = make_rule(rule, **{key: value for key, value in fields.items() if value is not None and rule != "lora"})
    p = getattr(drawn, "p", None)
    p = list(p) if isinstance(p, tuple) else p
    results = {
        "rule": rule,
        "p": p,
        "num_loops": settings.get("num_loops", 4),
        "trainable_parameters": 1000 * settings.get("lora_r", 16),
        "train_seconds": 60.0 + settings["seed"] % 7,
        "peak_memory_gb": 2.5,
        "benchmarks": {},
        "settings": settings,
        **measured,
    }
    (folder / "results.json").write_text(json.dumps(results))


def answers(name, total, right, missing=()):
    """Predictions on `total` problems, right where `right` says so."""
    return BenchmarkResult(
        name,
        [
            Prediction(
                f"{name} {i}", f"it is {i}", str(i), None if i in missing else str(i), bool(right[i]), id=str(i)
            )
            for i in range(total)
        ],
    )


def write_evaluation(folder, adapter, results, depth=4, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    row = {
        "meta_info": {
            "adapter_path": str(adapter),
            "num_loops": depth,
            "gates": None,
            "readout": None,
            "weights": "w",
        },
        "train_info": {},
        "benchmarks": {
            result.name: {**result.as_json(), "settings": {"problems": result.name, "max_new_tokens": 10, **fields}}
            for result in results
        },
    }
    (folder / "evaluation.json").write_text(json.dumps({"format": 2, "rows": {adapter.name: row}}))


def settings_of(recipe, rule=None):
    """A run's settings as results.json has them: the recipe's, without the fields of another rule."""
    settings = load_recipe(ROOT / recipe)
    if rule is not None:
        settings["rule"] = rule
        if rule == "lora":
            settings.pop("p", None)
    return settings


def run_sweep(path, outputs, rng, benchmarks=None):
    """Leave the folders of a sweep. Without `full_grid` the middle rate is the chosen one."""
    sweep = load_recipe(path)
    folder = outputs / Path(sweep["output_dir"]).name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text("{}")
    rates = sorted(map(float, sweep["learning_rates"]))
    for method in sweep.get("methods", ["lora", "loop_dropout"]):
        is_recipe = method.endswith(".yaml")
        settings = settings_of(method if is_recipe else sweep["recipe"], None if is_recipe else method)
        name = Path(method).stem if is_recipe else method
        factor = (sweep.get("rate_factors") or {}).get(name, 1.0)
        for rate in rates:
            chosen = sweep.get("full_grid") or rate == rates[len(rates) // 2]
            for seed in sweep["seeds"] if chosen else sweep["seeds"][:1]:
                run = folder / name / f"lr_{factor * rate:.6g}" / f"seed_{seed}"
                fields = {**settings, "learning_rate": factor * rate, "seed": seed, "output_dir": str(run)}
                development = {"correct": 3, "total": 9, "score": 100 / 3, "missing": 0}
                write_training(run, fields, benchmarks={"development": development})
                if not chosen:
                    continue
                for depth in sweep.get("test_depths", [fields.get("num_loops", 4)]):
                    results = [
                        answers(each, total := TOTALS.get(each, 30), rng.random(total) < 0.6, missing={0, 1})
                        for each in benchmarks or sweep["test_benchmarks"]
                    ]
                    own = depth == fields.get("num_loops", 4)
                    write_evaluation(run / ("test" if own else f"test_depth_{depth}"), run, results, depth)
    return folder


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """All sweeps of recipes/sweeps, and diagnostics of their runs."""
    folder, rng = tmp_path_factory.mktemp("outputs"), np.random.default_rng(0)
    nine = [
        "mmlu",
        "bbh",
        "truthfulqa_mc2",
        "ifeval_strict",
        "ifeval_loose",
        "humaneval",
        "humaneval_plus",
        "mbpp",
        "mbpp_plus",
    ]
    for path in sorted((ROOT / "recipes" / "sweeps").glob("*.yaml")):
        run_sweep(path, folder, rng, nine if path.stem == "tulu2" else None)
    for name in ("metamath_gsm", "gsm8k_single_loop"):
        write_diagnostics(folder / name, rng)
    return folder


def write_diagnostics(sweep, rng):
    runs = [path.parent for path in sorted(sweep.rglob("results.json")) if (path.parent / "test").is_dir()]
    subjects = ["Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra", "Number Theory", "Prealgebra",
                "Precalculus"]  # fmt: skip
    groups = {
        "subject": {name: {"correct": 3, "total": 9} for name in subjects},
        "level": {str(level): {"correct": 2, "total": 8} for level in range(1, 6)},
    }
    measured = {
        "single_loop": lambda: {"only": rng.random(4).tolist(), "reductions_percent": (100 * rng.random(4)).tolist()},
        "single_loop_generation": lambda: {
            "metamath_gsm8k": {
                "total": 40,
                "only": [{"correct": 4, "missing": 1, "score": 10.0 + i} for i in range(4)],
            }
        },
        "readouts": lambda: {"losses": rng.random(4).tolist()},
        "answers": lambda: {"metamath_math500": {"groups": groups}},
    }
    (sweep / "diagnostics").mkdir()
    for name, measure in measured.items():
        entries = [
            {"method": "x", "kind": "adapter", "path": str(run), "seed": 1, "rule": "lora", "measured": measure()}
            for run in runs
        ]
        (sweep / "diagnostics" / f"{name}.json").write_text(json.dumps({"diagnostic": name, "runs": entries}))


@pytest.fixture(scope="module")
def records(outputs):
    return read_records([outputs])


# --- the paper's tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_comes_out_of_what_its_sweeps_leave(path, records):
    table = build_table(load_table(path), records)
    assert table.missing == []
    # Each form holds every number and what the paper printed.
    texts = [render.markdown(table), render.comma_separated(table), render.json_text(table)]
    for row, paper in zip(table.cells, table.paper, strict=True):
        for cell, printed in zip(row, paper, strict=True):
            assert all(cell.text in text for text in texts)
            assert printed is None or all(printed in text for text in texts)
    tex = render.latex(table)
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 1
    assert rf"\label{{{table.spec.label}}}" in tex


def test_every_table_of_the_paper_has_a_file():
    labels = {load_table(path).label for path in TABLES}
    paper = {"recipes", "math_main", "tulu_main", "matched_expansion", "single_loop_generation", "mask_controls",
             "sharing_mask",
             "training_cost_seeds", "family_comparison", "control_seeds", "tulu_all", "variants", "rank_results",
             "answer_decomposition", "returned_seeds", "coto_seeds", "lora_dropout_seeds", "ouro26_tuned",
             "ouro26_tuned_seeds", "rank_tuned", "rank_tuned_seeds", "math_rank16_breakdown", "depth_matrix", "gsm8k_scale",
             "lr_curve", "transfer", "depth", "single_occurrence", "metamath_readouts"}  # fmt: skip
    assert labels >= {f"tab:{name}" for name in paper}
    for path in TABLES:  # and says which commands make its runs
        for command in filter(None, load_table(path).made_by.split(" ; ")):
            script, recipe = command.split()[1:3]
            assert (ROOT / script).name in ("sweep.py", "diagnose.py")
            assert (ROOT / recipe).is_file(), command


def test_minutes_and_gigabytes_are_those_that_training_runs_have_written(tmp_path):
    """tab:matched_expansion and tab:training_cost_seeds, from the results.json that a run writes when it ends."""
    sweep = load_recipe(ROOT / "recipes" / "sweeps" / "metamath_gsm.yaml")
    minutes = {"lora": (111, 106, 113), "loop_dropout": (130, 128, 127), "lora_dropout": (442, 438, 453)}
    outputs = tmp_path / "metamath_gsm"
    outputs.mkdir()
    (outputs / "sweep.json").write_text("{}")
    for method, times in minutes.items():
        recipe = next(
            (each for each in sweep["methods"] if Path(each).stem == method and "/" in each), sweep["recipe"]
        )
        for seed, time in zip(sweep["seeds"], times, strict=True):
            settings = {**settings_of(recipe, None if "/" in recipe[8:] else method), "seed": seed}
            outcome = RunResult(
                rule=settings["rule"],
                p=settings.get("p"),
                num_loops=4,
                trainable_parameters=15_138_816,
                steps=3125,
                examples=100_000,
                train_loss=0.2,
                train_seconds=60.0 * time,
                peak_memory_gb=45.36,
                benchmarks=[answers("metamath_gsm8k", 10, [True] * 10)],
            )
            write_results(outcome, settings, outputs / method / str(seed), run={})
    records = read_records([outputs])
    table = build_table(load_table(ROOT / "recipes" / "tables" / "matched_expansion.yaml"), records)
    found = {
        names[0]: [cell.text for cell in cells[2:]] for names, cells in zip(table.names, table.cells, strict=True)
    }
    assert found["LoRA"] == ["110.0 ± 3.6", "45.36 ± 0.00"]
    assert found["Loop Dropout"] == ["128.3 ± 1.5", "45.36 ± 0.00"]
    assert found["LoRA Dropout"] == ["444.3 ± 7.8", "45.36 ± 0.00"]
    seeds = build_table(load_table(ROOT / "recipes" / "tables" / "training_cost_seeds.yaml"), records)
    assert "111.00 / 106.00 / 113.00" in render.markdown(seeds)


@pytest.mark.parametrize("row", PAPER["mean_sd"])
def test_the_papers_counts_give_what_it_printed(row, tmp_path):
    """Through folders, a table's file and a cell: 86.53 ± 0.44 is 1148, 1139 and 1137 of 1319."""
    for seed, correct in enumerate(row["per_seed_correct"]):
        folder = tmp_path / f"seed_{seed}"
        write_training(folder, {"seed": seed, "rule": "lora"})
        right = np.arange(row["n"]) < correct
        write_evaluation(folder / "test", folder, [answers("b", row["n"], right)])
    cell = evaluate_cell(CellSpec(benchmark="b", where={"method": "LoRA"}), read_records([tmp_path]))
    printed = f"{row['mean_printed']} ± {row['sd_printed']}"
    decimals = len(row["mean_printed"].split(".")[1])
    assert summarize(cell.by_seed).text(decimals) == printed
    assert (cell.seeds, cell.missing) == ((0, 1, 2)[: len(row["per_seed_correct"])] or cell.seeds, "")


def test_a_difference_is_paired_by_seed_and_problem(tmp_path):
    rng = np.random.default_rng(1)
    shares = {"lora": 0.5, "loop_dropout": 0.7}
    right = {(rule, seed): rng.random(200) < share for rule, share in shares.items() for seed in (1, 2)}
    for (rule, seed), values in right.items():
        folder = tmp_path / rule / str(seed)
        write_training(folder, {"seed": seed, "rule": rule, "p": 0.5})
        write_evaluation(folder / "test", folder, [answers("b", 200, values)])
    spec = CellSpec(benchmark="b", where={"method": "Loop Dropout"}, minus={"method": "LoRA"})
    cell = evaluate_cell(spec, read_records([tmp_path]))
    by_seed = [100 * (right["loop_dropout", seed].mean() - right["lora", seed].mean()) for seed in (1, 2)]
    assert cell.by_seed == pytest.approx(by_seed)
    # A plain bootstrap over problems, written out.
    gains = 100 * np.mean([right["loop_dropout", s].astype(float) - right["lora", s] for s in (1, 2)], axis=0)
    draws = [gains[rng.integers(0, 200, 200)].mean() for _ in range(4000)]
    assert [cell.low, cell.high] == pytest.approx(np.percentile(draws, [2.5, 97.5]), abs=0.8)
    with pytest.raises(ValueError, match="not about the same problems"):
        paired_difference([answers("b", 3, [1, 1, 1])], [answers("c", 3, [1, 1, 1])])


# --- what is missing, and what cannot be compared -----------------------------------------------------------------------


LORA_2 = {"seed": 2, "rule": "lora", "model_name_or_path": "x/m", "learning_rate": 1e-3}


@pytest.fixture
def two_seeds(tmp_path):
    for rule in ("lora", "loop_dropout"):
        for seed in (1, 2):
            folder = tmp_path / "runs" / rule / str(seed)
            write_training(
                folder, {"seed": seed, "rule": rule, "p": 0.5, "model_name_or_path": "x/m", "learning_rate": 1e-3}
            )
            write_evaluation(folder / "test", folder, [answers("b", 30, np.arange(30) < 10 + seed)])
    return tmp_path / "runs"


def simple_table(
    tmp_path, text="rows: [{name: LoRA, where: {method: LoRA}}, {name: LD, where: {method: Loop Dropout}}]"
):
    path = tmp_path / "table.yaml"
    path.write_text(f"label: tab:x\ntitle: X\nmade_by: python y\ncolumns: [{{name: B, benchmark: b}}]\n{text}\n")
    return load_table(path)


def test_what_is_missing_is_named_and_not_invented(two_seeds, tmp_path):
    (two_seeds / "lora" / "2" / "test" / "evaluation.json").unlink()
    table = build_table(simple_table(tmp_path), read_records([two_seeds]))
    assert table.cells[0][0].text == "36.67"  # one seed is one seed
    shutil.rmtree(two_seeds / "lora")
    table = build_table(simple_table(tmp_path), read_records([two_seeds]))
    assert table.cells[0][0].text == "–"
    assert table.missing == ["LoRA, B: no run with method LoRA"]
    assert "no run with method LoRA" in render.markdown(table)
    assert "Made by: python y" in render.markdown(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: write_evaluation(run / "test", run, [answers("b", 30, [1] * 30)], max_new_tokens=99), "max_new_tokens"),
        (lambda run: write_evaluation(run / "test", run, [answers("b", 20, [1] * 20)]), "`total`"),
        (lambda run: write_training(run, {**LORA_2, "model_name_or_path": "x/other"}), "`model`"),
        (lambda run: write_training(run, {**LORA_2, "learning_rate": 2e-3}), "`learning_rate`"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_compared_are_refused_with_the_field(two_seeds, tmp_path, change, message):
    change(two_seeds / "lora" / "2")
    with pytest.raises(ReportError, match=message):
        build_table(simple_table(tmp_path), read_records([two_seeds]))


def test_rows_with_other_prompts_do_not_stand_in_one_column(two_seeds, tmp_path):
    for seed in (1, 2):
        run = two_seeds / "lora" / str(seed)
        write_evaluation(run / "test", run, [answers("b", 30, [1] * 30)], chat_template="other")
        run = two_seeds / "loop_dropout" / str(seed)
        write_evaluation(run / "test", run, [answers("b", 30, [1] * 30)], chat_template="own")
    with pytest.raises(ReportError, match="cannot stand in one column.*`chat_template`"):
        build_table(simple_table(tmp_path), read_records([two_seeds]))


def test_another_run_of_the_same_seed_is_refused(two_seeds, tmp_path):
    shutil.copytree(two_seeds / "lora" / "1", two_seeds / "lora" / "1_again")
    file = two_seeds / "lora" / "1_again" / "test" / "evaluation.json"
    file.write_text(file.read_text().replace("lora/1", "lora/1_again"))
    with pytest.raises(ReportError, match="Two runs of seed 1"):
        build_table(simple_table(tmp_path), read_records([two_seeds]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: [{name: a, wher: {}}]", "unknown field `wher`"),
        ("rows: [{name: a, measure: speed}]", "`measure`"),
        ("rows: [{name: a, paper: ['1', '2']}]", "2 numbers"),
    ],
)
def test_a_mistake_in_a_tables_file_is_one_sentence(tmp_path, text, message):
    with pytest.raises(ReportError, match=message):
        simple_table(tmp_path, text)


# --- the report ---------------------------------------------------------------------------------------------------------


def test_a_report_of_any_runs(two_seeds, tmp_path):
    written = write_report([two_seeds], [], tmp_path / "report", "My runs")
    accuracy = (tmp_path / "report" / "tables" / "accuracy.md").read_text()
    assert "| LoRA " in accuracy
    assert "38.33 ± 2.36" in accuracy
    assert "Correct answers by seed" in (tmp_path / "report" / "tables" / "seeds.md").read_text()
    assert "+0.00" in (tmp_path / "report" / "tables" / "differences.md").read_text()
    assert "1.0" in (tmp_path / "report" / "tables" / "costs.md").read_text()
    assert "4 runs read" in written.summary
    with pytest.raises(ReportError, match="There are no results"):
        write_report([tmp_path / "report"], [], tmp_path / "again")
    with pytest.raises(ReportError, match="There is no folder"):
        write_report([tmp_path / "nowhere"], [], tmp_path / "again")
    (two_seeds / "lora" / "1" / "results.json").write_text("{")
    with pytest.raises(ReportError, match="cannot be read"):
        write_report([two_seeds], [], tmp_path / "again")


def test_the_figures_have_the_runs_numbers(records, tmp_path):
    figures = {figure.name: figure for figure in make_figures(records)}
    assert set(figures) >= {"overview", "single_loop_activation", "early_adaptation", "rank_overview", "depth_accuracy",
                            "depth_gains", "learning_rates"}  # fmt: skip
    drawn = figures["overview"].panels[0].values
    assert {gate for row in drawn for gate in row} == {0.0, 2.0}
    matrix = build_table(load_table(ROOT / "recipes/tables/depth_matrix.yaml"), records)
    lora, loop_dropout = (matrix.cells[row][1] for row in (0, 3))  # trained at 4, evaluated at 6
    panel = next(panel for panel in figures["depth_gains"].panels if panel.title == "gsm8k")
    gain = panel.values[panel.rows.index("4")][panel.columns.index("6")]
    assert gain == pytest.approx(loop_dropout.value - lora.value)
    pytest.importorskip("matplotlib")
    from loopdropout_trainer.reports.drawing import draw_figure

    for figure in figures.values():
        for path in draw_figure(figure, tmp_path):
            assert path.stat().st_size > 5_000


HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture
def page(two_seeds, tmp_path):
    for rule, name in (("lora", "x"), ("loop_dropout", "y")):
        run = two_seeds / rule / "1"
        result = answers("b", 30, np.arange(30) < (10 if rule == "lora" else 20))
        result.predictions[0] = Prediction("b 0", HOSTILE, "0", "0", True, id="0")
        write_evaluation(run / "test", run, [result])
        write_training(
            run,
            {"seed": 1, "rule": rule, "p": 0.5, "model_name_or_path": "x/m", "learning_rate": 1e-3, "run_name": name},
            single_loop={"only": [1, 2, 3, 4], "reductions_percent": [10.0, 20.0, 30.0, 40.0]},
        )
    write_report([two_seeds], [], tmp_path / "report", "My runs")
    return tmp_path / "report" / "report.html"


def test_the_page_is_self_contained_and_holds_text_as_text(page):
    html = page.read_text()
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "https://" not in html
    assert HOSTILE not in html
    assert html.count("</script>") == 2
    data = json.loads(html.split('type="application/json">')[1].split("</script>")[0])
    assert data["answers"][0]["methods"]["LoRA"]["answers"][0][2] == HOSTILE


PROBE = """
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
addEventListener("load", async () => {
  const out = {};
  out.title = document.title;
  out.wide = document.documentElement.scrollWidth <= innerWidth;
  const cells = () => [...document.querySelectorAll("#tables table")][0].querySelectorAll("tbody tr td:first-child");
  const names = () => [...cells()].map((cell) => cell.textContent);
  const button = document.querySelector("#tables th button");
  button.click(); out.ascending = names();
  button.click(); out.descending = names();
  out.problems = document.querySelectorAll(".problem").length;
  const filter = document.querySelector('select[aria-label="Show"]');
  filter.value = "fixed"; filter.dispatchEvent(new Event("change"));
  out.fixed = document.querySelectorAll(".problem").length;
  const bar = document.querySelector("#figure-single_loop_activation rect[tabindex]");
  bar.dispatchEvent(new MouseEvent("mouseenter"));
  out.tip = document.getElementById("tip").textContent;
  document.body.replaceChildren();
  const pre = document.createElement("pre"); pre.id = "out"; pre.textContent = JSON.stringify(out);
  document.body.append(pre);
});
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_works_in_a_browser(page, tmp_path, width):
    """Sorting, filter, hover, no sideways scrolling; needs Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text().replace("</body>", f"<script>{PROBE}</script></body>"))
    dump = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
         f"--window-size={width},900", "--virtual-time-budget=3000", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=120,
    ).stdout  # fmt: skip
    out = json.loads(dump.split('<pre id="out">')[1].split("</pre>")[0])
    assert out["title"] == "My runs"
    assert out["wide"]
    assert (out["ascending"], out["descending"]) == (["Loop Dropout", "LoRA"], ["LoRA", "Loop Dropout"])
    assert out["problems"] == 30
    assert out["fixed"] == 10
    assert out["tip"].startswith("LoRA, active loop 1: 10") or out["tip"].startswith("Loop Dropout, active loop 1: 10")
