"""Runs of experiment trackers: one for each training, with curves over loops, and Trackio's page in a browser."""

import re
import shutil
import subprocess

import pytest
from conftest import load_script
from transformers import TrainerCallback

from loopdropout_trainer.tracking import finish_run


class Logs(TrainerCallback):
    """Keeps the logs with their steps."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, logs))


def test_curves_are_logged_over_loops(make_sft):
    logs = Logs()
    trainer = make_sft(callbacks=[logs])
    accuracy = {"metric": "accuracy", "task": "gsm8k", "num_loops": 4, "gates": "unit", "value": 50.0}
    rows = [
        accuracy,
        {**accuracy, "num_loops": 2, "value": 20.0},
        {**accuracy, "gates": "none", "value": 0.0},
        {**accuracy, "gates": "loop 3", "loop": 3, "value": 30.0},
        {**accuracy, "metric": "loss_reduction", "gates": "loop 1", "loop": 1, "value": 5.0},
        {**accuracy, "metric": "loss_reduction", "value": 6.0},
    ]
    finish_run(trainer, rows)
    assert sorted((step, *log.items()) for step, log in logs.seen) == [
        (1, ("test_rho_by_loop/gsm8k", 5.0)),
        (2, ("test_accuracy_by_depth/gsm8k", 20.0)),
        (3, ("test_accuracy_by_loop/gsm8k", 30.0)),
        (4, ("test_accuracy_by_depth/gsm8k", 50.0)),
    ]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="a browser is needed")
def test_trackio_shows_both_methods(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read by the import
    pytest.importorskip("trackio")
    words = (
        "quickstart.yaml --max_steps 3 --num_train_examples 32 --num_eval_examples 4 --logging_steps 1 --merge false"
    )
    words += " --benchmark_limit 2 --depths 2 4 --report_to trackio"
    load_script("recipes/sft.py").main([*words.split(), "--output_dir", str(tmp_path / "run")])

    server = subprocess.Popen(["trackio", "show", "--project", "huggingface"], stdout=subprocess.PIPE, text=True)
    try:
        url = next(match[0] for line in server.stdout if (match := re.search(r"http://[\d.:]+", line)))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
        pages = [
            subprocess.run(
                ["chromium", *options, f"{url}/{page}?project=huggingface"], capture_output=True, text=True
            ).stdout
            for page in ("", "media")
        ]
    finally:
        server.kill()
    for text in ("Loop Dropout, seed 0", "LoRA, seed 0", "active_loop_1", "rho_by_loop", "accuracy_by_depth"):
        assert text in pages[0]
    assert pages[1].count("The answer is") >= 2
