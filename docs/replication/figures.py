"""The two figures of docs/replication.md."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from plotnine import (
    aes,
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
)
from runs import METHODS, Study

from loopdropout_trainer.reports import save_figure
from loopdropout_trainer.reports.plots import BLUE, LOOKS, ORANGE, theme


HERE = Path(__file__).parent
_PANELS = {  # metric, column of x, values of x
    "accuracy (%), K loops": ("accuracy", "depth", (1, 2, 3, 4, 6, 8, 10, 12)),
    "accuracy (%), only loop t": ("accuracy", "loop", (1, 2, 3, 4)),
    "loss reduction (%), only loop t": ("loss_reduction", "loop", (1, 2, 3, 4)),
}


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
    colours = {title: LOOKS[title][0] for title in METHODS.values()}
    plot = (
        ggplot(data, aes("x", "mean", color="method", fill="method"))
        + geom_vline(trained, aes(xintercept="x"), linetype="dotted", color="#777777")
        + geom_ribbon(aes(ymin="low", ymax="high"), alpha=0.25, color="none")
        + geom_line(size=1.1)
        + geom_point(size=2)
        + facet_wrap("panel", scales="free", ncol=3)
        + scale_color_manual(values=colours)
        + scale_fill_manual(values=colours)
        + scale_x_continuous(breaks=list(range(13)))
        + labs(x="", y="")
        + theme()
    )
    save_figure(plot, HERE / "effect", width=11, height=3.6)


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
        + theme()
    )
    save_figure(plot, HERE / "map", width=11, height=6)
