"""`benchmarks/scaling.py`: its lines are least squares, and what it counts grows as it must."""

import json
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import scaling
import speed


def test_points_lines_and_figure(tmp_path, monkeypatch):
    straight = scaling.line([1, 2, 4], [5.0, 7.0, 11.0])
    assert [straight[name] for name in ("slope", "intercept", "r_squared")] == pytest.approx([2, 3, 1])
    monkeypatch.setattr(scaling, "AXES", {"loops K": ("num_loops", (2, 4))})
    scaling.main(["--smoke", "--out", str(tmp_path)])
    axis = json.loads((tmp_path / "scaling.json").read_text())["axes"]["loops K"]
    two, four = axis[speed.LORA]["kept_bytes"]
    assert 1.5 * two < four < 2 * two  # twice the loops, and what is kept outside of them
    assert "| loops K | LoRA |" in (tmp_path / "scaling.md").read_text()
    assert (tmp_path / "scaling.png").stat().st_size > 5000
