"""The two figures of docs/replication.md."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib import pyplot, rc_context
from plotnine import (
    aes,
    facet_grid,
    geom_text,
    geom_tile,
    geom_vline,
    ggplot,
    scale_color_manual,
    scale_fill_gradient2,
    theme,
)
from runs import METHODS, Study

from loopdropout_trainer.plots import COLORS, decorate, line_plot


HERE = Path(__file__).parent
_PANELS = {  # metric, column of x, values of x
    "accuracy (%) with K loops": ("accuracy", "depth", (1, 2, 3, 4, 6, 8, 10, 12)),
    "accuracy (%), only loop t": ("accuracy", "loop", (1, 2, 3, 4)),
    "loss reduction (%), only loop t": ("loss_reduction", "loop", (1, 2, 3, 4)),
}


def save(plot: ggplot, name: str, width: float, height: float) -> None:
    """Save a figure as PNG, PDF and SVG. The same numbers give the same files."""
    dates = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with rc_context({"backend": "agg", "svg.hashsalt": "loopdropout", "pdf.fonttype": 42}):
        figure = (plot + theme(figure_size=(width, height))).draw()
        for ending, date in dates.items():
            figure.savefig(HERE / f"{name}.{ending}", dpi=200, metadata=date)
        pyplot.close(figure)


def effect_figure(study: Study) -> None:
    """Draw the main comparison, mean ± SD over seeds: by depth, and with the adapter in one loop only."""
    points = []
    for panel, (metric, column, positions) in _PANELS.items():
        for method, label in METHODS.items():
            for x in positions:
                values = study.select(method, metric, **{column: x})["value"]
                points.append(
                    {"panel": panel, "label": label, "x": x, "mean": values.mean(), "sd": values.std(ddof=1)}
                )
    data = pd.DataFrame(points)
    data["panel"] = pd.Categorical(data["panel"], _PANELS)
    trained = data[data["panel"] == [*_PANELS][0]].head(1).assign(x=4)
    title = "LoRA and Loop Dropout on the tiny Ouro, mean ± SD over five seeds"
    plot = line_plot(
        data, "x", "number of loops K (dotted: in training), or the only loop t with the adapter", "%", title
    )
    plot += geom_vline(aes(xintercept="x"), trained, linetype="dotted", color="#777777")
    save(plot, "effect", 11, 4)


def map_figure(cells: pd.DataFrame) -> None:
    """Draw by how many points Loop Dropout is more accurate than LoRA, by examples, epochs, difficulty and depth."""
    table = cells.copy()
    for name in ("examples", "epochs"):
        in_order = map(str, sorted(table[name].unique()))
        table[name] = pd.Categorical(table[name].astype(str), list(in_order))
    table["shown"] = [f"{gain:+.1f}\n({lora:.0f})" for gain, lora in zip(table["gain"], table["lora"], strict=True)]
    table["difficulty"] = "problems of " + table["difficulty"] + " steps"
    table["depth"] = "K = " + table["depth"].astype(int).astype(str)
    plot = (
        ggplot(table, aes("examples", "epochs", fill="gain.clip(-20, 20)"))
        + geom_tile(color="white", size=1)
        + geom_text(aes(label="shown", color="word"), size=8)
        + scale_color_manual(values={"ahead": "black", "behind": "black", "level": "#909090"}, guide=None)
        + facet_grid("depth", "difficulty")
        + scale_fill_gradient2(
            low=COLORS["LoRA"], mid="#f4f4f4", high=COLORS["Loop Dropout"], limits=(-20, 20), guide=None
        )
    )
    title = "Accuracy of Loop Dropout minus LoRA, in points (accuracy of LoRA in %; gray: not significant)"
    save(decorate(plot, title, "training examples", "epochs"), "map", 11, 6)
