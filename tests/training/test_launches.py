"""Signals to a launcher of several processes."""

import os
import signal
import time

import pytest

from helpers.files import ROOT
from helpers.processes import Program, free_port, wait_for
from loopdropout_trainer.results.run_files import read_run
from loopdropout_trainer.saving.checkpoints import newest_checkpoint


WORDS = (
    "--compare_with null --evaluate_base false --benchmarks null --eval_num_loops null --single_loop_accuracy false "
    "--merge false --single_loop_batches 0 --num_train_examples 64 --num_eval_examples 4 --max_steps 500 --save_steps 2 "
    "--save_total_limit 2 --use_cpu true --gradient_accumulation_steps 1 --per_device_train_batch_size 4"
)


def launch(*words, folder):
    """Start the quickstart in two processes."""
    options = ["--config_file", ROOT / "recipes/accelerate/ddp.yaml", "--num_processes", 2]
    script = [ROOT / "recipes/sft.py", "quickstart.yaml", *WORDS.split(), "--output_dir", folder, *words]
    launcher = ["-m", "accelerate.commands.accelerate_cli", "launch", *options, "--main_process_port", free_port()]
    return Program(*launcher, *script, fresh=True)


@pytest.mark.slow
def test_launcher_ends_with_our_sentence(tmp_path):
    program = launch("--p", 3, folder=tmp_path)
    assert program.wait() == 1
    lines = [line for line in program.stderr.splitlines() if line.strip(" =")]
    sentence = "loopdropout sft: `p` must be a number in [0, 1), got 3.0."
    assert lines.count(sentence) == 1 and lines[-1].endswith(sentence)


@pytest.mark.slow
def test_launcher_stops_within_seconds(tmp_path):
    """SLURM kills a job 30 seconds after SIGTERM. The status of the launcher is accelerate's."""
    program = launch(folder=tmp_path)
    wait_for(lambda: newest_checkpoint(tmp_path), program)
    began = time.monotonic()
    os.kill(program.pid, signal.SIGTERM)
    status = program.wait()
    seconds = time.monotonic() - began
    print(f"ended after {seconds:.1f} s")
    assert seconds < 28, program.stderr  # on a busy machine, else about 8
    assert status == 1 and "Training stopped after step" in program.stderr
    assert newest_checkpoint(tmp_path)
    assert read_run(tmp_path)["status"] == "stopped"
