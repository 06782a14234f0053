"""The estimated memory of a training: published numbers of weights, and the page that prints it."""

import pytest

from helpers.files import ROOT, load_script
from loopdropout_trainer.costs import ASSUMED_SHARE, MEASURED_SHARE, PEAK_FLOPS
from loopdropout_trainer.memory import count_operations, estimate_memory


SHAPES = load_script("benchmarks/memory.py").SHAPES
WEIGHTS = {  # billions in the frozen model, millions in the paper's adapter
    "Ouro-1.4B": (1.4347, 15.139),
    "Ouro-2.6B": (2.6680, 30.278),
    "Nanbeige4.2-3B": (4.1698, 23.970),
    "Dory1.0-4B": (3.9752, 18.022),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_estimate_counts_published_weights(name):
    parts = estimate_memory(SHAPES[name], 0)
    assert parts["frozen weights"] / 2 == pytest.approx(WEIGHTS[name][0], rel=1e-3)
    assert parts["adapter and optimizer"] / 0.016 == pytest.approx(WEIGHTS[name][1], rel=1e-3)
    assert estimate_memory({"model_type": "llama"}, 4096) == estimate_memory({"model_type": "ouro"}, 4096) == {}


@pytest.mark.parametrize("name", SHAPES)
def test_memory_page_shows_estimates(name):
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    cells = next(line for line in page.splitlines() if line.startswith(f"| {name} |")).split(" | ")[2:]
    options = [{}, {"four_bit": True}, {"checkpointing": False}]
    totals = [estimate_memory(SHAPES[name], size, **chosen)["total"] for size in (4096, 16384) for chosen in options]
    assert [cell.strip("| ") for cell in cells] == [f"{total:.0f}" for total in totals]


@pytest.mark.parametrize("name", SHAPES)
def test_memory_page_shows_computed_hours(name):
    """The hours of 10,000 examples of 250 tokens are those that a plan computes."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").partition("## Time")[2]
    cells = next(line for line in page.splitlines() if line.startswith(f"| {name} |")).strip("| ").split(" | ")[1:]
    operations = count_operations(SHAPES[name])
    hours = []
    for card in ("RTX 4090", "L40S", "H100"):
        times = [operations * 2.5e6 / (share * PEAK_FLOPS[card]) / 3600 for share in (ASSUMED_SHARE, MEASURED_SHARE)]
        hours.append(" to ".join(f"{time:.1f}" for time in times))
    assert cells == [f"{operations / 1e9:.0f}", *hours]
    without = count_operations(SHAPES[name], checkpointing=False)
    assert without / operations == pytest.approx(2 / 3, abs=0.04)  # as the page says


def test_share_of_the_peak_is_that_of_the_papers_run():
    """100,000 examples of 250 tokens in 128.9 minutes of an H100, without checkpointing."""
    operations = count_operations(SHAPES["Ouro-1.4B"], checkpointing=False) * 25e6
    assert operations / (128.9 * 60) / PEAK_FLOPS["H100"] == pytest.approx(MEASURED_SHARE, abs=0.005)
    assert count_operations({"model_type": "llama"}) is None
