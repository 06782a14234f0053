"""`benchmarks/scaling.py`: its lines are least squares, and what it counts grows as it must."""

import json
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import scaling
import speed


def test_a_line_and_how_straight_it_is():
    straight = scaling.line([1, 2, 4], [5.0, 7.0, 11.0])
    assert [straight[name] for name in ("slope", "intercept", "r_squared")] == pytest.approx([2, 3, 1])
    assert scaling.line([0, 1, 2], [0.0, 1.0, 0.0])["r_squared"] == pytest.approx(0)


def test_points_lines_and_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "AXES", {"loops K": ("num_loops", (2, 4))})
    scaling.main(["--smoke", "--out", str(tmp_path)])
    details = json.loads((tmp_path / "scaling.json").read_text())
    kept = {rule: details["axes"]["loops K"][rule]["kept_bytes"] for rule in scaling.RULES}
    two, four = kept[speed.LORA]
    assert 1.5 * two < four < 2 * two  # twice the loops, and what is kept outside of them
    assert all(ours <= lora for ours, lora in zip(kept[speed.OURS], kept[speed.LORA], strict=True))
    assert "| loops K | LoRA |" in (tmp_path / "scaling.md").read_text()
    assert (tmp_path / "scaling.png").stat().st_size > 5000
