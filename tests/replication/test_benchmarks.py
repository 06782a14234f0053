"""The GPU benchmark runs all of its parts at tiny sizes and does not measure a row twice."""

import sys

from helpers.files import ROOT, load_script, read_lines


sys.path.append(str(ROOT / "benchmarks"))  # its scripts import one another
gpu = load_script("benchmarks/gpu.py")


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
