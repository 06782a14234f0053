"""Study A of plan.md: 15 tiny base models that differ in their pretraining, four methods, and shifted test problems.

    python docs/replication/transfer.py COMMAND   # pretrain, run, collect, restore or analyze, as in tiny_study.py

The results are in transfer.jsonl.gz, and `analyze` writes transfer.md and its figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_study import Design, Problems, choose, main


HERE = Path(__file__).parent
KINDS = ("late", "uniform", "last", "early", "random")
TEST = "in_distribution"
SHIFTED = {
    "larger_numbers": Problems("larger"),
    "other_wording": Problems("wording"),
    "more_steps": Problems("test", steps=(4, 5)),
}
REGISTERED = ("larger_numbers", "other_wording")
"""Shifted problems of the registered test. LoRA on the packaged base model solves only 5% of the third kind."""
DESIGN = Design(
    results=HERE / "transfer.jsonl.gz",
    bases=[f"{kind}_{seed}" for seed in (1, 2, 3) for kind in KINDS],
    methods={
        "lora": {"rule": "lora"},
        "p_0.5": {"rule": "loop_dropout", "p": 0.5},
        "p_0.25": {"rule": "loop_dropout", "p": 0.25},
        "dose_control": {"rule": "dose_control", "p": 0.5},
    },
    learning_rates=(5e-4, 1e-3, 2e-3),
    selection_seed=20,
    seeds=(21, 22, 23, 24, 25),
    problems={TEST: Problems("easy_test"), **SHIFTED},
    depths=(4, 8),
    measures_training=True,
)


# The registered analysis


class Results:
    """The runs of one or several seeds, each with all four methods on one base model.

    A seed of a base model counts once all its four methods are finished. The late bias comes from the run that chose LoRA's
    learning rate, so that it shares no noise with the gains.

    Attributes:
        gains: Gains over LoRA in points, by base model, method, and task and depth: the means over seeds.
        bias: LoRA's rho_4 - rho_1 in points, by base model.
        lora: LoRA's accuracies in percent, by base model, and task and depth.
        num_seeds: Number of complete seeds by base model.
    """

    def __init__(self, lines: list[dict]) -> None:
        import pandas as pd

        runs = [line for line in lines if "seed" in line]
        compared = [run for run in runs if run["seed"] in DESIGN.seeds]
        columns = ["base", "method", "seed"]
        accuracy = pd.DataFrame([{**{name: run[name] for name in columns}, **run["accuracy"]} for run in compared])
        groups = accuracy.groupby(["base", "seed"])["method"]
        complete = accuracy[groups.transform("nunique") == len(DESIGN.methods)].set_index(columns)
        means = complete.groupby(["base", "method"]).mean()
        self.lora = means.xs("lora", level="method")
        self.gains = means.drop("lora", level="method").sub(self.lora, level="base")
        self.num_seeds = complete.xs("lora", level="method").groupby("base").size()
        selection = [run for run in runs if run["seed"] == DESIGN.selection_seed and run["method"] == "lora"]
        chosen = {base: choose([run for run in selection if run["base"] == base]) for base in self.lora.index}
        self.bias = pd.Series({base: run["rho"][3] - run["rho"][0] for base, run in chosen.items()})

    @property
    def is_complete(self) -> bool:
        return list(self.num_seeds.reindex(DESIGN.bases)) == [len(DESIGN.seeds)] * len(DESIGN.bases)

    def gain(self, place: str, method: str = "p_0.5") -> Any:
        """Return a method's gain by base model at a place such as `more_steps@4`. `shifted@4` is the mean of `REGISTERED`."""
        gains = self.gains.xs(method, level="method")
        task, depth = place.split("@")
        return gains[[f"{name}@{depth}" for name in REGISTERED]].mean(axis=1) if task == "shifted" else gains[place]


def registered_tests(results: Results) -> dict[str, tuple[float, float, float, float]]:
    """Return estimate, 95% interval and p-value of the two registered tests, the p-values adjusted by Holm's method.

    `slope`: of the gain of p = 0.5 in distribution at K = 4 on LoRA's late bias, by least squares over base models.
    `shift`: the mean over base models of the gain on shifted problems minus the gain in distribution, at K = 4.
    """
    from scipy import stats

    gain = results.gain(f"{TEST}@4")
    fit = stats.linregress(results.bias[gain.index], gain)
    half = stats.t.ppf(0.975, len(gain) - 2) * fit.stderr
    test = stats.ttest_1samp(results.gain("shifted@4") - gain, 0)
    smaller, larger = sorted((fit.pvalue, test.pvalue))
    adjusted = {smaller: min(1.0, 2 * smaller), larger: min(1.0, max(2 * smaller, larger))}
    mean = (results.gain("shifted@4") - gain).mean()
    return {
        "slope": (fit.slope, fit.slope - half, fit.slope + half, adjusted[fit.pvalue]),
        "shift": (mean, *test.confidence_interval(0.95), adjusted[test.pvalue]),
    }


def analyze() -> None:
    """Write the page and the figures."""
    import transfer_page  # it imports this file

    transfer_page.write(DESIGN.read_lines())


if __name__ == "__main__":
    main(DESIGN, __doc__, Path("outputs/transfer"), analyze)
