"""`benchmarks/gpu.py` runs all its parts at tiny sizes, goes on after what fails, and measures nothing twice; `scaling.py`."""

import json
import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import generation
import gpu
import scaling
import speed


def test_every_part_runs_and_a_failure_is_a_row(tmp_path, monkeypatch, capsys):
    rows = [(part, row) for part, row, _ in gpu.tasks(gpu.TINY, "")]
    compile_, random_ouro = torch.compile, speed.random_ouro
    attempts = []

    def out_of_memory(name, *arguments):
        attempts.append(name)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(gpu, "kernel_profile", out_of_memory)
    smoke = ["--smoke", "--out", str(tmp_path)]
    gpu.main([*smoke, "--minutes", "0"])
    assert "0 minutes are over; the next call goes on with rate: 64 cubed." in capsys.readouterr().out
    gpu.main([*smoke, "--parts", "rate"])
    gpu.main(smoke)
    gpu.main(smoke)  # with nothing left to do
    assert torch.compile is compile_ and speed.random_ouro is generation.random_ouro is random_ouro

    records = [json.loads(line) for line in (tmp_path / "gpu_smoke.jsonl").read_text().splitlines()]
    assert [(record["part"], record["row"]) for record in records] == rows
    failed = {record["row"] for record in records if record["status"] not in ("ok", "out of memory")}
    assert failed <= {"attention for variable lengths", f"metamath_gsm: {gpu.LIGER}"}  # neither is there on a CPU
    assert [r["status"] for r in records if r["part"] == "profile"] == ["out of memory"] * len(attempts)
    found = {record["row"]: record for record in records}
    assert 0 < found["fused LoRA"]["off"] <= 2 * found["fused LoRA"]["plain_off"] + 1e-3
    assert len({record["tokens"] for record in records if record["part"] == "generation"}) == 1

    text = (tmp_path / "gpu_smoke.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"| {speed.STOCK} |"))
    assert line.split("|")[3:4] == [" 1.00 "] and "not measured" in line  # the memory: a CPU tells no peak
    assert f"| {speed.OURS} | out of memory |" in text
    gpu.main(["--report", "--out", str(tmp_path)])
    assert "| 8,192 cubed | not measured |" in (tmp_path / "gpu.md").read_text()


def test_a_profile_counts_operations_by_group():
    found = gpu.kernel_profile(speed.LORA, gpu.TINY.recipes["metamath_gsm"], "/tmp")
    assert found["counts"]["matrix products"] > 50 and found["counts"]["attention"] > 0
    assert found["seconds"].keys() <= {*gpu.KERNELS, "other"}


def test_points_lines_and_figure_of_scaling(tmp_path, monkeypatch):
    """Its lines are least squares, and what it counts grows as it must."""
    straight = scaling.line([1, 2, 4], [5.0, 7.0, 11.0])
    assert [straight[name] for name in ("slope", "intercept", "r_squared")] == pytest.approx([2, 3, 1])
    monkeypatch.setattr(scaling, "AXES", {"loops K": ("num_loops", (2, 4))})
    scaling.main(["--smoke", "--out", str(tmp_path)])
    axis = json.loads((tmp_path / "scaling.json").read_text())["axes"]["loops K"]
    two, four = axis[speed.LORA]["kept_bytes"]
    assert 1.5 * two < four < 2 * two  # twice the loops, and what is kept outside of them
    assert "| loops K | LoRA |" in (tmp_path / "scaling.md").read_text()
    assert (tmp_path / "scaling.png").stat().st_size > 5000
