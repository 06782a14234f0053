"""What a reader must open to follow one plain training step, or one problem of a benchmark: few of our files."""

import sys
from pathlib import Path

from transformers import TrainerCallback

import loopdropout_trainer
from loopdropout_trainer import cli as command_line


PACKAGE = Path(loopdropout_trainer.__file__).parent
OFF = {"remove_padding": False, "skip_frozen_loops": False, "fused_lora": False, "gradient_checkpointing": False}


def test_a_plain_training_step_passes_through_few_files(train):
    seen = set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            seen.add(Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix())

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:  # the second step: the first logs what holds for all
                sys.setprofile(note)

        def on_step_end(self, args, state, control, **kwargs):
            sys.setprofile(None)

    train(callbacks=[Watch()], max_steps=2, logging_steps=10, **OFF)
    inside = {file for file in seen if file.startswith(("training/", "adapters/", "models/"))}
    models = ("backbone", "layers", "looped_modeling", "ouro")
    training = ("checkpoints/mixin", "gate_sampling", "sft_trainer")
    assert inside == {
        "adapters/gated.py", *(f"models/{name}.py" for name in models), *(f"training/{name}.py" for name in training)
    }  # fmt: skip
    assert len(seen) <= 12, sorted(seen)


def is_importing(frame):
    """Whether a file of the package is being imported: what runs then belongs to no way through it."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            return True
        frame = frame.f_back
    return False


def test_one_problem_of_a_benchmark_passes_through_few_files(tmp_path, monkeypatch):
    """From the command line to the row: one greedy completion of a generated problem."""
    seen = set()

    def note(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)) and file not in seen and not is_importing(frame):
            seen.add(file)

    options = {"model_name_or_path": "tiny-ouro", "dtype": "float32", "benchmarks": "arithmetic_test"}
    options |= {"benchmark_limit": "1", "max_new_tokens": "4", "output_dir": str(tmp_path)}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.setprofile(note)
    try:
        command_line.run(["evaluate", *words])
    finally:
        sys.setprofile(None)
    assert (tmp_path / "measurements.jsonl").is_file()
    assert len(seen) <= 30, sorted(seen)
