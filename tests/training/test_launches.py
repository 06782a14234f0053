"""Signals to a launcher of several processes."""

import os
import signal
import time

import pytest

from helpers.files import ROOT
from helpers.processes import Program, free_port, wait_for
from loopdropout_trainer.results import read_run
from loopdropout_trainer.saving.checkpoints import newest_checkpoint


WORDS = (
    "--compare_with null --evaluate_base false --benchmarks null --eval_num_loops null --single_loop_accuracy false "
    "--merge false --single_loop_batches 0 --num_train_examples 64 --num_eval_examples 4 --max_steps 500 --save_steps 2 "
    "--save_total_limit 2 --use_cpu true --gradient_accumulation_steps 1 --per_device_train_batch_size 4"
)


@pytest.mark.slow
def test_launcher_stops_within_seconds(tmp_path):
    """SLURM kills a job 30 seconds after SIGTERM. The status of the launcher is accelerate's."""
    launch = ["launch", "--config_file", ROOT / "recipes/accelerate/ddp.yaml", "--num_processes", 2]
    script = [ROOT / "recipes/sft.py", "quickstart.yaml", *WORDS.split(), "--output_dir", tmp_path]
    program = Program(
        "-m", "accelerate.commands.accelerate_cli", *launch, "--main_process_port", free_port(), *script, fresh=True
    )
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
