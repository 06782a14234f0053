"""docs/replication: the pages have the numbers of runs.csv.gz, and its intervals, against other code and simulations."""

import json
import re
import sys
from random import Random

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from helpers.files import ROOT, write_lines
from helpers.processes import Program
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.results.run_files import write_results
from loopdropout_trainer.settings.recipe import dump_recipe


sys.path.insert(0, str(ROOT / "docs/replication"))
import depth_pays  # noqa: E402
import evidence  # noqa: E402
import figures  # noqa: E402
import make  # noqa: E402
import runs  # noqa: E402
import serving_depth  # noqa: E402
import tiny_study  # noqa: E402
import transfer  # noqa: E402
import transfer_page  # noqa: E402
from intervals import estimate, estimate_two_way, holm  # noqa: E402


@pytest.fixture(scope="module")
def rows():
    return pd.read_csv(make.RUNS)


@pytest.fixture(scope="module")
def decided(rows):
    """The claims with their tests, and the claims whose differences equal another claim's."""
    return make.decide(make.parts(rows)[0])


def test_pages_are_written_from_the_file(rows, decided, monkeypatch):
    monkeypatch.setattr(make, "decide", lambda studies: decided)  # of the same rows
    tables, numbers, appendix = make.make_texts(*make.parts(rows))
    assert make.APPENDIX.read_text(encoding="utf-8") == appendix
    assert transfer_page.PAGE.read_text(encoding="utf-8") == transfer_page.make_page(transfer.DESIGN.read_lines())
    pages = [page.read_text(encoding="utf-8") for page in make.PAGES]
    assert [make.fill(page, tables, numbers) for page in pages] == pages
    marks = [*(f"<!-- {name}: begin -->" for name in tables), *(f"<!--{name}-->" for name in numbers)]
    assert [mark for mark in marks if mark not in "".join(pages)] == []
    assert make.fill(pages[0], dict.fromkeys(tables, "another"), {}).count("another") > 5


def test_comparisons_have_one_adjusted_p(decided):
    table = pd.read_csv(make.CSV)
    claims, same = decided
    assert table["adjusted_p"].tolist() == pytest.approx(claims["adjusted"].tolist()) and len(same) == 4
    stricter = table[["adjusted_p", "adjusted_p_without_selection_seed"]].max(axis=1)
    assert ((stricter < 0.05) == (table["verdict"] != "not significant")).all()
    assert table["verdict"].value_counts().tolist() == [56, 14, 1]


def test_families_are_adjusted_alone(decided):
    from statsmodels.stats.multitest import multipletests

    table = pd.read_csv(make.CSV)
    claims = decided[0]
    assert claims["family_p"].tolist() == pytest.approx(table["family_p"].tolist())
    assert claims["family_verdict"].tolist() == table["family_verdict"].tolist()
    for question, part in table.groupby("question"):
        adjusted = multipletests(part["p"], method="holm")[1]
        without = multipletests(part["p_without_selection_seed"], method="holm")[1]
        assert part["family_p"].tolist() == pytest.approx(adjusted.tolist(), rel=1e-6), question
        is_clear = np.maximum(adjusted, without) < 0.05
        assert (is_clear == (part["family_verdict"] != "not significant")).all()
    assert (table["question"] == "accuracy").sum() == 7
    page = (ROOT / "docs/replication.md").read_text(encoding="utf-8")
    for question in make.QUESTIONS:
        assert f"verdict among {(claims['question'] == question).sum()} tests" in page


def test_forest_has_every_base_model(decided):
    table = evidence.forest_table(decided[0])
    assert len(table) == 4 + 3 + 2 * 2 * 16 and (table["low"] <= table["mean"]).all()
    results = transfer.Results(transfer.DESIGN.read_lines())
    own = table[(table["group"] == "study A") & (table["base"] != evidence.MEAN)].set_index(["place", "base"])["mean"]
    for place, depth in (("at the trained depth K", 4), ("at 2K loops", 8)):
        gain = results.gain(f"in_distribution@{depth}")
        assert own[place][gain.index].tolist() == pytest.approx(gain.tolist())
    assert table.loc[table["base"] == evidence.MEAN, "mean"].round(1).tolist() == [0.2, 9.4, 0.4, 12.6]


def test_pages_say_significant_with_its_family():
    for name in ("README.md", "docs/choosing_a_method.md", "docs/diagnostics.md"):
        assert "significant" not in (ROOT / name).read_text(encoding="utf-8").lower(), name
    page = (ROOT / "docs/replication.md").read_text(encoding="utf-8")
    prose = [part for part in page.split("\n\n") if not part.startswith("|")]
    silent = [part for part in prose if "significant" in part and not re.search("famil|tests", part)]
    assert silent == []


def test_training_steps_needs_compared_runs():
    program = Program("docs/replication/training_steps.py", cwd=ROOT)
    assert program.wait() == 1 and program.stderr.startswith("Study B was withdrawn before any compared run")


def test_marked_numbers_do_not_begin_a_line():
    for page in make.PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if re.match(r"\s*<!--\w+-->", line)] == []  # Markdown would take it for HTML


def test_collect_reads_the_results_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs.csv.gz")
    folder = tmp_path / "small/lora@depth_2/lr_0.001/seed_0"
    shared = {"unit": "%", "method": "LoRA", "seed": 0, "step": 150, "num_loops": 2, "gates": "unit", "n": 5}
    accuracy = {"task": "arithmetic_easy_test", "metric": "accuracy", "samples": "samples.jsonl"}
    rows = [
        {"task": "training", "metric": "examples"},
        {"task": "development", "metric": "accuracy"},
        {**accuracy, "num_loops": 4},
        {**accuracy, "gates": "loop 1", "loop": 1},
        {"task": "development", "metric": "loss", "gates": "none", "method": "base model"},
        {"task": "development", "metric": "loss_reduction", "gates": "loop 2", "loop": 2},
    ]
    write_results(folder, [{**shared, "value": 60.0, **row} for row in rows])
    recipe = {"learning_rate": 0.001, "arithmetic_steps": [1, 3], "run_name": "small/lora@depth_2/lr_0.001/seed_0"}
    dump_recipe(recipe, folder / "recipe.yaml")
    write_lines(folder / "samples.jsonl", [{"correct": value} for value in (1.0, 1.0, 0.0, 0.0, 1.0)])
    choosing = tmp_path / "small/lora@depth_2/lr_0.002/seed_0"  # only its accuracy on held-out problems is kept
    write_results(choosing, [{**shared, "value": 70.0, **row} for row in (*rows[:2], rows[4])])
    dump_recipe({**recipe, "learning_rate": 0.002}, choosing / "recipe.yaml")
    table = runs.collect([str(tmp_path / "small")])
    assert table[table["learning_rate"] == 0.002]["metric"].tolist() == ["development"]
    table = table[table["learning_rate"] == 0.001]
    facts = {"study": "small", "method": "depth_2_lora", "difficulty": "1 to 3", "steps": 150, "examples": 60}
    assert table[[*facts]].drop_duplicates().to_dict("records") == [facts]
    assert table["metric"].tolist() == ["development", "accuracy", "accuracy", "frozen_loss", "loss_reduction"]
    counted = table[table["loop"] == 1].iloc[0]
    assert runs.verdicts(counted).tolist() == [1, 1, 0, 0, 1] and counted["verdicts"] == "c8"


def test_runs_of_a_study_have_one_base(rows):
    runs.check_bases(rows)
    of_another = (rows["study"] == "huginn") & (rows["metric"] == "frozen_loss") & (rows["method"] == "lora")
    assert of_another.any()
    mixed = rows.assign(value=rows["value"].where(~of_another, 0.7))
    with pytest.raises(ValueError, match="The runs of huginn at 8 loops must have one base model"):
        runs.check_bases(mixed)


def make_transfer_runs():
    """Runs of all base models with random accuracies, of which the last base model has one seed less."""
    rng = np.random.default_rng(7)
    tasks = ("training", transfer.TEST, *transfer.SHIFTED)
    places = [f"{task}@{depth}" for task in tasks for depth in transfer.DESIGN.depths]
    for base in transfer.DESIGN.bases:
        for method in transfer.DESIGN.methods:
            shared = {"base": base, "method": method, "learning_rate": 1e-3}
            for seed in transfer.DESIGN.seeds[: 4 if base == transfer.DESIGN.bases[-1] else 5]:
                yield {**shared, "seed": seed, "accuracy": {place: rng.uniform(20, 80) for place in places}}
            for rate, solved, loss in ((5e-4, 60, 0.2), (1e-3, 70, 0.1), (2e-3, 70, 0.2)):
                facts = {"learning_rate": rate, "seed": transfer.DESIGN.selection_seed, "held_out_loss": loss}
                rho = rng.uniform(0, 90, 4).tolist()
                yield {**shared, **facts, "accuracy": {"development@4": solved}, "rho": rho}


def test_registered_tests_agree_with_statsmodels():
    import statsmodels.api as sm
    from statsmodels.stats.multitest import multipletests

    lines = [*make_transfer_runs(), {"base": "late_1", "sha256": ""}]
    results = transfer.Results(lines)
    assert not results.is_complete and results.num_seeds[transfer.DESIGN.bases[-1]] == 4
    runs = pd.DataFrame(lines[:-1])
    accuracy = pd.json_normalize(runs["accuracy"]).join(runs[["base", "method", "seed"]])
    means = accuracy[runs["seed"] > 20].groupby(["method", "base"], sort=False)
    easy, larger, wording = (
        means[f"{task}@4"].mean()["p_0.5"] - means[f"{task}@4"].mean()["lora"]
        for task in ("in_distribution", "larger_numbers", "other_wording")
    )
    chosen = runs[(runs["method"] == "lora") & (runs["held_out_loss"] == 0.1)].set_index("base")["rho"]
    slope = sm.OLS(easy, sm.add_constant(chosen.str[3] - chosen.str[0])).fit()
    shift = sm.OLS((larger + wording) / 2 - easy, np.ones(15)).fit()
    adjusted = multipletests([slope.pvalues.iloc[1], shift.pvalues.iloc[0]], method="holm")[1]
    estimates = [[fit.params.iloc[-1], *fit.conf_int().iloc[-1]] for fit in (slope, shift)]
    found = transfer.registered_tests(results)
    assert np.array([found[name] for name in ("slope", "shift")]) == pytest.approx(np.c_[estimates, adjusted])


def test_page_of_transfer_follows_the_runs(tmp_path, monkeypatch):
    lines = [*make_transfer_runs()]
    assert "No base model has a seed with all four methods yet." in transfer_page.make_page([])
    page = transfer_page.make_page(lines)
    assert "**Interim, 296 of 300 runs.**" in page and page.count("| after all runs |") == 2
    results = transfer.Results(lines)
    over = results.gain("more_steps@8") - results.gain("more_steps@8", "dose_control")
    low, high = stats.ttest_1samp(over, 0).confidence_interval(0.9)
    assert f" | {over.mean():+.1f} [{low:+.1f}, {high:+.1f}] |\n\n## Gain by base model" in page
    assert f"early_2 | mostly early readouts | 5 | {results.bias['early_2']:+.1f} |" in page
    lines += [
        {**line, "seed": 25} for line in lines if line["base"] == transfer.DESIGN.bases[-1] and line["seed"] == 21
    ]
    page = transfer_page.make_page(lines)
    slope, low, high, p = transfer.registered_tests(transfer.Results(lines))["slope"]
    assert f"{10 * slope:+.1f} [{10 * low:+.1f}, {10 * high:+.1f}] | {p:.3f}" in page and "Spearman" in page
    monkeypatch.setattr(transfer_page, "PAGE", tmp_path / "transfer.md")
    monkeypatch.setattr(figures, "HERE", tmp_path)
    transfer_page.write(lines)
    assert len([*tmp_path.iterdir()]) == 7
    title = "<!-- Gain over LoRA, mean of 15 base models with 95% interval -->"  # in one line, as the figure is wide
    assert title in (tmp_path / "transfer_gains.svg").read_text()


def make_gains(seed, seeds, problems, by_seed=0.5, by_problem=1.0):
    """Gains [seeds, problems] with a mean of 0.3 and a residual of one."""
    rng = np.random.default_rng(seed)
    parts = by_seed * rng.normal(size=(seeds, 1)) + by_problem * rng.normal(size=(1, problems))
    return 0.3 + parts + rng.normal(size=(seeds, problems))


def test_estimate_of_one_number_a_seed_is_students_t():
    values = np.array([4.9, 0.3, 0.2])
    expected = stats.ttest_1samp(values, 0)
    found = estimate(values[:, None])
    assert (found.mean, found.p) == pytest.approx((1.8, expected.pvalue))
    assert [found.low, found.high] == pytest.approx(list(expected.confidence_interval()))


@pytest.mark.parametrize("p_values", [[0.04, 0.01, 0.03, 0.5], [0.6, 0.9, 0.6], [0.02]])
def test_holm_matches_statsmodels(p_values):
    from statsmodels.stats.multitest import multipletests

    assert holm(p_values).tolist() == multipletests(p_values, method="holm")[1].tolist()


@pytest.mark.parametrize("by_seed", [0.5, 0.0])
def test_estimate_two_way_is_an_analysis_of_variance(by_seed):
    import statsmodels.api as sm
    from statsmodels.formula.api import ols

    gains = make_gains(3, 4, 30, by_seed)
    cells = [(s, p, gains[s, p]) for s in range(4) for p in range(30)]
    model = ols("gain ~ C(seed) + C(problem)", pd.DataFrame(cells, columns=["seed", "problem", "gain"])).fit()
    anova = sm.stats.anova_lm(model)
    seeds, problems, rest = anova["sum_sq"] / anova["df"]
    assert (seeds > rest) == (by_seed > 0)
    variance = problems + max(seeds - rest, 0)
    freedom = variance**2 / (seeds**2 / 3 + problems**2 / 29 + rest**2 / 87)
    error = np.sqrt(variance / 120)
    found = estimate_two_way(gains)
    assert [found.low, found.high] == pytest.approx(stats.t(freedom, gains.mean(), error).ppf([0.025, 0.975]))
    assert found.p == pytest.approx(2 * stats.t.sf(gains.mean() / error, freedom))


def test_estimate_of_few_or_equal_numbers():
    gains = make_gains(5, 3, 50, by_seed=0, by_problem=0)  # by less than chance
    gains = gains - gains.mean(axis=0) + gains.mean() + 1e-3 * np.arange(50)
    found = estimate_two_way(gains)
    assert np.isfinite(found.p) and found.high - found.low < 2 * stats.t(2).ppf(0.975) * gains.std() / np.sqrt(150)
    gains = np.ones((2, 3))
    assert estimate(gains[:1]) is None and estimate(gains * [1, np.nan, 1]) is None
    for same in (gains, gains[:, :1]):
        assert estimate(same) == (1, 1, 1, 0) and estimate(0 * same).p == 1


def draw_gains(rng, draws, seeds, problems, by_method, by_seed, shift):
    """Gains [draws, seeds, problems] in points between two methods on problems of all difficulties."""
    difficulty = rng.normal(1, 2, (draws, 1, 1, problems)) + rng.normal(0, by_method, (draws, 2, 1, problems))
    odds = difficulty + rng.normal(0, by_seed, (draws, 2, seeds, 1))
    odds[:, 0] += shift
    correct = rng.random(odds.shape) < 1 / (1 + np.exp(-odds))
    return 100 * (correct[:, 0].astype(float) - correct[:, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "problems"), [(3, 500), (3, 1000), (5, 1000), (10, 1000)])
@pytest.mark.parametrize("kind", [(0.4, 0.0, 0.2), (0.4, 0.15, 0.2), (1.0, 0.5, 0.2), (0.5, 1.5, -1.0)])
def test_intervals_cover_the_truth(seeds, problems, kind):
    rng = np.random.default_rng(seeds + problems)
    truth = draw_gains(rng, 400_000, 1, 5, *kind).mean()
    found = [estimate(gains) for _ in range(40) for gains in draw_gains(rng, 50, seeds, problems, *kind)]
    assert 0.915 <= np.mean([each.low <= truth <= each.high for each in found]) <= 0.99


def write_selection(folder, rates, best):
    for rate in rates:
        path = tiny_study.Run("late_4", "lora", rate, serving_depth.DESIGN.selection_seed).file(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        accuracy = 50.0 - abs(np.log2(rate / best))
        line = {"learning_rate": rate, "accuracy": {"development@4": accuracy}, "held_out_loss": 1.0}
        path.write_text(json.dumps(line))


def test_grid_grows_while_best_rate_is_at_its_edge(tmp_path):
    rates = lambda: tiny_study.selection_rates(serving_depth.DESIGN, tmp_path, "late_4", "lora")
    assert rates() == [5e-4, 1e-3, 2e-3, 4e-3]
    write_selection(tmp_path, rates(), best=4e-3)
    assert rates() == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
    write_selection(tmp_path, rates(), best=8e-3)
    assert rates() == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3]
    write_selection(tmp_path, rates(), best=16e-3)
    assert rates() == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3]  # at most two extensions
    write_selection(tmp_path, rates(), best=1e-3)
    assert rates() == [5e-4, 1e-3, 2e-3, 4e-3]


def test_runs_reject_another_base_model(tmp_path):
    target = tmp_path / "bases" / "late_4"
    target.mkdir(parents=True)
    (target / "tokenizer.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"weights")
    known = {"late_4": tiny_study.describe_base(target)}
    tiny_study.check_base(tmp_path, "late_4", known)
    (target / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(UserError, match=r"SHA-256 of its weights is .* copy the folder from the machine"):
        tiny_study.check_base(tmp_path, "late_4", known)


def test_tests_of_serving_depth_match_scipy():
    rng = np.random.default_rng(0)
    lines, lora, loop_dropout = [], rng.normal(60, 5, 15), rng.normal(60, 5, 15)
    for base, at_four, at_three in zip(serving_depth.DESIGN.bases, lora, loop_dropout, strict=True):
        for seed in serving_depth.DESIGN.seeds:
            for method, shift in (("lora", at_four), ("p_0.5", at_three)):
                accuracy = {f"in_distribution@{depth}": shift + depth for depth in serving_depth.DESIGN.depths}
                lines.append({"base": base, "method": method, "seed": seed, "accuracy": accuracy})
    tests = serving_depth.registered_tests(serving_depth.mean_accuracies(lines))
    difference = loop_dropout - lora
    deeper = stats.ttest_1samp(difference, 0).pvalue
    statistic = (difference.mean() - 1 + serving_depth.MARGIN) / (difference.std(ddof=1) / 15**0.5)
    shallower = 2 * stats.t.sf(statistic, 14)
    assert tests["deeper"][0] == pytest.approx(difference.mean())
    assert tests["shallower"][0] == pytest.approx(difference.mean() - 1)
    smaller, larger = sorted((deeper, shallower))
    adjusted = sorted((min(1, 2 * smaller), max(min(1, 2 * smaller), min(1, larger))))
    assert sorted((tests["deeper"][3], tests["shallower"][3])) == pytest.approx(adjusted)
    assert len(serving_depth.mean_accuracies(lines[:-1])) == 14  # a base model without all seeds has no row


@pytest.mark.parametrize("task", ["known", *depth_pays.TASKS])
def test_programs_of_the_depth_pilot_have_their_results(task):
    rng, lines = Random(0), set()
    for _ in range(200):
        ids, results = depth_pays.make_program(rng, 12, task)
        words, results = [[depth_pays.WORDS[number] for number in row] for row in (ids, results)]
        ends = depth_pays.LETTERS if task == "letters" or words[0] in depth_pays.LETTERS else depth_pays.DIGITS
        value = "abcdefg".find(words[0]) if words[0].isalpha() else int(words[0])
        for word, result in zip(words[1:], results[1:], strict=True):
            value = eval(f"({value} {word}) % 7") if word != "not" else 6 - value
            assert result == ends[value]
        lines.update(words[1:])
    assert ("not" in lines) == (task == "negation") and len(lines - {"not"}) == 11


def test_plan_has_the_numbers_of_the_depth_pilot():
    plan = (ROOT / "docs/replication/plan.md").read_text(encoding="utf-8")
    assert depth_pays.make_table(depth_pays.read_lines()) in plan
    bases = [line for line in depth_pays.read_lines() if "seed" not in line]
    for line in bases:  # 8 loops help before any fine-tuning
        at_four, at_eight = (depth_pays.mean_over(line["accuracy"], depth, depth_pays.DEEP_LINES) for depth in (4, 8))
        assert at_eight > at_four + 50
    assert len(bases) == 2
