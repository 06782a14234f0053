"""The figures of docs/replication.md and docs/replication/transfer.md."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import plotnine as p9
from runs import METHODS, Study

from loopdropout_trainer.reports.plots import COLORS, GRAY, decorate, line_plot, save_figure


HERE = Path(__file__).parent
_PANELS = pd.DataFrame(
    [
        ["accuracy", "depth", (1, 2, 3, 4, 6, 8, 10, 12), "number of loops K (dotted: in training)", "accuracy (%)"],
        ["accuracy", "loop", (1, 2, 3, 4), "only loop t with the adapter", "accuracy (%)"],
        ["loss_reduction", "loop", (1, 2, 3, 4), "only loop t with the adapter", "loss reduction (%)"],
    ],
    ["K loops at inference", "accuracy with the adapter in one loop", "loss reduction, adapter in one loop"],
    ["metric", "column", "positions", "x_label", "y_label"],
)


def effect_figure(study: Study) -> None:
    """Draw the main comparison, mean ± SD over seeds: by depth, and with the adapter in one loop only."""
    points = []
    for panel in _PANELS.itertuples():
        for method, label in METHODS.items():
            for x in panel.positions:
                values = study.select(method, panel.metric, **{panel.column: x})["value"]
                points.append([panel.Index, label, x, values.mean(), values.std(ddof=1)])
    data = pd.DataFrame(points, columns=["panel", "label", "x", "mean", "sd"])
    plot = line_plot(data, "x", _PANELS, "LoRA and Loop Dropout on the tiny Ouro, mean ± SD over five seeds")
    plot.items[0] += p9.geom_vline(xintercept=4, linetype="dotted", color=GRAY)
    save_figure(plot & p9.theme(figure_size=(11, 4), legend_direction="horizontal"), HERE / "effect")


def forest_figure(gains: pd.DataFrame) -> None:
    """Draw the gain of Loop Dropout on every base model, at K and 2K loops.

    Args:
        gains: From `evidence.forest_table`.
    """
    table = gains.assign(kind=gains["base"].str.startswith("mean").map({True: "mean", False: "base model"}))
    for name in ("group", "place"):
        table[name] = pd.Categorical(table[name], table[name].unique())
    is_mean = table["kind"] == "mean"
    from_top = [*table.loc[~is_mean, "base"].unique(), *table.loc[is_mean, "base"].unique()]
    table["base"] = pd.Categorical(table["base"], from_top[::-1])
    plot = (
        p9.ggplot(table, p9.aes("mean", "base", color="kind", shape="kind"))
        + p9.geom_vline(xintercept=0, color=GRAY)
        + p9.geom_errorbarh(p9.aes(xmin="low", xmax="high"), height=0)
        + p9.geom_point(size=2)
        + p9.facet_grid("group", "place", scales="free_y", space="free_y")
        + p9.scale_color_manual({"base model": COLORS["Loop Dropout"], "mean": COLORS["LoRA Dropout"]})
        + p9.scale_shape_manual({"base model": "o", "mean": "D"})
        + p9.scale_x_continuous(breaks=range(-20, 41, 10))
        + p9.coord_cartesian(xlim=(-20, 42))
    )
    title = "Loop Dropout minus LoRA on all base models, 95% intervals"
    x_label = "difference in accuracy, in points (right of 0: Loop Dropout is more accurate)"
    plot = decorate(plot, title, x_label, "", width=9, height=7.5)
    layout = p9.theme(legend_position="none", panel_grid_major_y=p9.element_blank())
    save_figure(plot + layout, HERE / "forest")


def map_figure(cells: pd.DataFrame) -> None:
    """Draw by how many points Loop Dropout is more accurate than LoRA, by examples, epochs, difficulty and depth."""
    table = cells.copy()
    for name in ("examples", "epochs"):
        in_order = map(str, sorted(table[name].unique()))
        table[name] = pd.Categorical(table[name].astype(str), list(in_order))
    table["shown"] = [f"{gain:+.1f}\n({lora:.0f})" for gain, lora in zip(table["gain"], table["lora"], strict=True)]
    table["excludes_zero"] = table["gain"].clip(-20, 20).where(table["word"] != "level")
    table["difficulty"] = "problems of " + table["difficulty"] + " steps"
    table["depth"] = table["depth"].map({4: "K = 4\n(training\ndepth)", 8: "K = 8"})
    plot = (
        p9.ggplot(table, p9.aes("examples", "epochs"))
        + p9.geom_tile(p9.aes(fill="excludes_zero"), width=0.95, height=0.95)
        + p9.geom_text(p9.aes(label="shown"), color="#000000", size=8)
        + p9.facet_grid("depth", "difficulty")
        + p9.scale_fill_gradient2(
            COLORS["LoRA"], "#ffffff", COLORS["Loop Dropout"], limits=(-20, 20), na_value="#d9d9d9"
        )
        + p9.guides(fill=p9.guide_colorbar(display="rectangles", nbin=21))  # a gradient makes an SVG of 2 MB
    )
    title = "Loop Dropout minus LoRA after equal epochs, in points of accuracy"
    remark = "In parentheses: LoRA's accuracy in %. Gray: the interval includes 0, without correction"
    plot = decorate(plot, title, "training examples", "epochs", panel=remark, width=11, height=6)
    plot += p9.labs(fill="gain\nin points")
    layout = p9.theme(
        legend_position="right",
        legend_title=p9.element_text(),
        panel_grid=p9.element_blank(),
        strip_text_y=p9.element_text(rotation=0),
    )
    save_figure(plot + layout, HERE / "map")


def transfer_figures(problems: pd.DataFrame, bases: pd.DataFrame, state: str) -> None:
    """Draw the gains of study A by kind of problem, and by base model against LoRA's late bias.

    Args:
        problems: from `transfer_page.gains_by_problem`.
        bases: from `transfer_page.gains_by_base`, with the categorical column `kind`.
        state: `interim, n of 300 runs`, or an empty text if all runs are finished. Only then there is a regression line.
    """
    remark = f" ({state})" if state else ""
    methods = {"p = 0.5": COLORS["Loop Dropout"], "p = 0.25": "#56B4E9", "dose control": "#D55E00"}
    data = problems.melt(["problems", "K"], [*methods], "method", "gain")
    data = data.join(pd.DataFrame([*data["gain"]])).assign(K=data["K"].map({4: "K = 4 (training depth)", 8: "K = 8"}))
    for name, values in {"problems": data["problems"].str.replace(" ", "\n"), "method": data["method"]}.items():
        data[name] = pd.Categorical(values, values.unique())
    side_by_side = p9.position_dodge(width=0.6)
    plot = (
        p9.ggplot(data, p9.aes("problems", "mean", color="method", shape="method"))
        + p9.geom_hline(yintercept=0, color=GRAY)
        + p9.geom_linerange(p9.aes(ymin="low", ymax="high"), data.dropna(), position=side_by_side)
        + p9.geom_point(position=side_by_side, size=2.5)
        + p9.facet_wrap("K")
        + p9.scale_color_manual([*methods.values()])
        + p9.scale_y_continuous(breaks=range(-5, 16, 5))
    )
    title = f"Gain over LoRA, mean of {len(bases)} base models with 95% interval{remark}"
    plot = decorate(plot, title, "kind of problem", "gain in points", width=9)
    save_figure(plot + p9.theme(legend_direction="horizontal"), HERE / "transfer_gains")

    gain = "gain, in distribution"
    plot = p9.ggplot(bases, p9.aes("late bias", gain)) + p9.geom_hline(yintercept=0, color=GRAY)
    if not state:
        plot += p9.geom_smooth(method="lm", color=GRAY, fill=GRAY, alpha=0.25, linetype="dashed", size=0.9)
    plot += p9.geom_point(p9.aes(color="kind", shape="kind"), size=3)
    plot += p9.scale_color_manual([*COLORS.values()][1:6], drop=False)
    plot += p9.scale_shape_discrete(drop=False)
    title = f"Gain of Loop Dropout (p = 0.5) in distribution at K = 4{remark}"
    plot = decorate(plot, title, "late bias of LoRA in points", "gain over LoRA in points", width=7.5)
    plot += p9.labs(color="loss in pretraining", shape="loss in pretraining")
    layout = p9.theme(legend_position="right", legend_title=p9.element_text())
    save_figure(plot + layout, HERE / "transfer_bias")
