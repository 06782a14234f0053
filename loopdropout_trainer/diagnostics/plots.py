"""Charts of the diagnostics. Needs matplotlib (`pip install loopdropout-trainer[plots]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_single_loop(reductions: Mapping[str, Sequence[float]], path: str | Path, title: str | None = None) -> Path:
    """Save a bar chart of rho_t by loop, one group of bars for each loop and one colour for each method.

    Args:
        reductions: method -> rho_t in percent for t = 1..K.
        path: of the picture; its ending says the format.
        title: above the chart.

    Returns:
        The path.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    num_loops = len(next(iter(reductions.values())))
    width = 0.8 / len(reductions)
    figure, axes = plt.subplots(figsize=(1.4 + 1.1 * num_loops, 3.2), layout="constrained")
    for index, (method, values) in enumerate(reductions.items()):
        offset = (index - (len(reductions) - 1) / 2) * width
        bars = axes.bar([loop + offset for loop in range(1, num_loops + 1)], values, width, label=method)
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(1, num_loops + 1))
    axes.set_xlabel("Only active adapter loop")
    axes.set_ylabel("Loss reduction (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=len(reductions))
    if title:
        axes.set_title(title, pad=22)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return Path(path)
