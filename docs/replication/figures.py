"""The two figures of docs/replication.md."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib import pyplot, rc_context
from plotnine import (
    aes,
    element_blank,
    element_line,
    element_rect,
    element_text,
    facet_grid,
    facet_wrap,
    geom_line,
    geom_point,
    geom_ribbon,
    geom_text,
    geom_tile,
    geom_vline,
    ggplot,
    labs,
    scale_color_manual,
    scale_fill_gradient2,
    scale_fill_manual,
    scale_x_continuous,
    theme,
    theme_minimal,
)
from runs import METHODS, Study


HERE = Path(__file__).parent
BLUE, ORANGE = "#0072B2", "#E69F00"
COLORS = {"LoRA": ORANGE, "Loop Dropout": BLUE}
AXIS = element_line(color="#555555", size=0.5)
THEME = theme_minimal(base_size=11) + theme(
    plot_title=element_text(size=13, ha="left", weight="bold"),
    plot_background=element_rect(fill="white", color="white"),
    legend_position="top",
    legend_title=element_blank(),
    legend_text=element_text(size=11),
    legend_key_width=34,
    panel_grid_minor=element_blank(),
    panel_grid_major_x=element_blank(),
    panel_grid_major_y=element_line(color="#e4e4e4", size=0.5),
    axis_line_x=AXIS,
    axis_ticks_major_x=AXIS,
    axis_text=element_text(color="#222222", size=10),
    strip_text=element_text(size=11, weight="bold", ha="left", linespacing=1.3),
    strip_background=element_blank(),
)
_PANELS = {  # metric, column of x, values of x
    "accuracy (%), K loops": ("accuracy", "depth", (1, 2, 3, 4, 6, 8, 10, 12)),
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
    """Draw what the main comparison measured, mean ± SD over seeds: by depth, and with the adapter in one loop only."""
    points = []
    for panel, (metric, column, positions) in _PANELS.items():
        for method, title in METHODS.items():
            for x in positions:
                values = study.select(method, metric, **{column: x})["value"]
                mean, sd = values.mean(), values.std(ddof=1)
                points.append(
                    {"panel": panel, "method": title, "x": x, "mean": mean, "low": mean - sd, "high": mean + sd}
                )
    panels = list(_PANELS)
    data = pd.DataFrame(points)
    data["panel"] = pd.Categorical(data["panel"], panels)
    trained = pd.DataFrame({"panel": pd.Categorical(panels[:1], panels), "x": [4]})
    plot = (
        ggplot(data, aes("x", "mean", color="method", fill="method"))
        + geom_vline(trained, aes(xintercept="x"), linetype="dotted", color="#777777")
        + geom_ribbon(aes(ymin="low", ymax="high"), alpha=0.25, color="none")
        + geom_line(size=1.1)
        + geom_point(size=2)
        + facet_wrap("panel", scales="free", ncol=3)
        + scale_color_manual(values=COLORS)
        + scale_fill_manual(values=COLORS)
        + scale_x_continuous(breaks=list(range(13)))
        + labs(x="", y="")
        + THEME
    )
    save(plot, "effect", 11, 3.6)


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
        + scale_fill_gradient2(low=ORANGE, mid="#f4f4f4", high=BLUE, limits=(-20, 20), guide=None)
        + labs(x="examples", y="epochs", fill="points")
        + THEME
    )
    save(plot, "map", 11, 6)
