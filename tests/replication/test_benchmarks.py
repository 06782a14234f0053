"""The GPU benchmark runs all of its parts at tiny sizes and does not measure a row twice. A rehearsal marks its steps."""

import json
import sys

from helpers.files import ROOT, load_script, read_lines
from loopdropout_trainer.training import sft


sys.path.append(str(ROOT / "benchmarks"))  # its scripts import one another
gpu = load_script("benchmarks/gpu.py")
real_size = load_script("benchmarks/real_size.py")


def test_gpu_benchmark_runs_every_part(tmp_path, capsys):
    smoke = ["--smoke", "--out", str(tmp_path)]
    gpu.main([*smoke, "--minutes", "0"])
    assert "The next call continues with matrix products" in capsys.readouterr().out
    gpu.main(smoke)
    gpu.main(smoke)  # nothing is left to do
    records = read_lines(tmp_path / "gpu_smoke.jsonl")
    assert [(record["part"], record["row"]) for record in records] == [row[:2] for row in gpu.tasks(gpu.TINY, "")]
    assert {record["status"] for record in records} == {"ok"}
    assert "| Loop Dropout | ok |" in (tmp_path / "gpu_smoke.md").read_text()
    assert gpu.attempt(lambda: 1 / 0) == {"status": "ZeroDivisionError: division by zero"}


def test_rehearsal_marks_each_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sft, "LoopDropoutSFTTrainer", sft.LoopDropoutSFTTrainer)  # `train` replaces it
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "completion": " 2"}) + "\n")
    fields = {
        "model_name_or_path": "tiny-ouro",
        "train_files": tmp_path / "rows.jsonl",
        "output_dir": tmp_path / "run",
    }
    options = {**fields, "max_steps": 1, "bf16": "false", "report_to": "none"}
    real_size.train([f"--{name}={value}" for name, value in options.items()])
    marks = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith(real_size.MARK)]
    assert marks == ["load", "step_1", "checkpoint_1"]
