"""Study C of plan.md: at which depth an adapter may be served, on 15 new tiny base models.

    python docs/replication/serving_depth.py COMMAND   # pretrain, run, collect, restore or analyze, as in tiny_study.py

The results are in serving_depth.jsonl.gz, and `analyze` prints the registered tests and the accuracies.
"""

from __future__ import annotations

from pathlib import Path

from tiny_study import Design, Problems, main


HERE = Path(__file__).parent
KINDS = ("late", "uniform", "last", "early", "random")
TEST = "in_distribution"
MARGIN = 2.0
"""Points of accuracy that Loop Dropout may lose with 3 loops and still count as not worse than LoRA with 4."""
DESIGN = Design(
    results=HERE / "serving_depth.jsonl.gz",
    bases=[f"{kind}_{seed}" for seed in (4, 5, 6) for kind in KINDS],
    methods={"lora": {"rule": "lora"}, "p_0.5": {"rule": "loop_dropout", "p": 0.5}},
    learning_rates=(5e-4, 1e-3, 2e-3, 4e-3),
    selection_seed=40,
    seeds=(41, 42, 43),
    problems={TEST: Problems("easy_test", first=300, number=500)},  # study A used the problems before them
    depths=(2, 3, 4, 8),
    most_extensions=2,
)


def mean_accuracies(lines: list[dict]):
    """Return the accuracy in percent by base model (rows), and by method and depth (columns): the means over seeds.

    Only base models with all seeds of both methods have a row.
    """
    import pandas as pd

    compared = [line for line in lines if line.get("seed") in DESIGN.seeds]
    table = pd.DataFrame(
        [
            {
                "base": line["base"],
                "method": line["method"],
                "depth": depth,
                "accuracy": line["accuracy"][f"{TEST}@{depth}"],
            }
            for line in compared
            for depth in DESIGN.depths
        ]
    )
    means = table.pivot_table("accuracy", "base", ["method", "depth"])
    counts = table.pivot_table("accuracy", "base", ["method", "depth"], aggfunc="count")
    is_complete = (counts == len(DESIGN.seeds)).all(axis=1) & means.notna().all(axis=1)
    return means[is_complete].reindex([base for base in DESIGN.bases if is_complete.get(base, False)])


def registered_tests(means) -> dict[str, tuple[float, float, float, float]]:
    """Return estimate, 95% interval and p-value of the two registered tests, the p-values adjusted by Holm's method.

    `deeper`: the mean over base models of Loop Dropout's accuracy at 8 loops minus LoRA's at 8 loops, two-sided against zero.
    `shallower`: the mean of Loop Dropout's accuracy at 3 loops minus LoRA's at 4 loops, against `-MARGIN` or less. Its p-value
    is twice the one-sided p-value, so that it is below 5% when the 95% interval is above `-MARGIN`.
    """
    from scipy import stats

    deeper = means["p_0.5", 8] - means["lora", 8]
    shallower = means["p_0.5", 3] - means["lora", 4]
    deeper_test = stats.ttest_1samp(deeper, 0)
    shallower_test = stats.ttest_1samp(shallower, -MARGIN, alternative="greater")
    p_values = {"deeper": deeper_test.pvalue, "shallower": min(1.0, 2 * shallower_test.pvalue)}
    smaller = min(p_values, key=p_values.get)
    larger = "shallower" if smaller == "deeper" else "deeper"
    adjusted = {smaller: min(1.0, 2 * p_values[smaller])}
    adjusted[larger] = max(adjusted[smaller], p_values[larger])
    interval = stats.ttest_1samp(shallower, -MARGIN).confidence_interval(0.95)
    return {
        "deeper": (deeper.mean(), *deeper_test.confidence_interval(0.95), adjusted["deeper"]),
        "shallower": (shallower.mean(), *interval, adjusted["shallower"]),
    }


def analyze() -> None:
    """Print the accuracies, and the registered tests if all runs are finished."""
    lines = DESIGN.read_lines()
    means = mean_accuracies(lines)
    print(means.round(1).to_string())
    if len(means) < len(DESIGN.bases):
        print(f"Interim: {len(means)} of {len(DESIGN.bases)} base models are finished, so no test is computed.")
        return
    for name, (estimate, low, high, p) in registered_tests(means).items():
        print(f"{name}: {estimate:+.1f} points [{low:+.1f}, {high:+.1f}], adjusted p = {p:.3g}")


if __name__ == "__main__":
    main(DESIGN, __doc__, Path("outputs/serving_depth"), analyze)
