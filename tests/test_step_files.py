"""What a reader must open to follow one training step with the optimisations off: few of our files."""

import sys
from pathlib import Path

from transformers import TrainerCallback

import loopdropout_trainer


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
    models = ("forward_pass", "layers", "looped_modeling", "operations", "ouro")
    training = ("checkpoints/mixin", "gate_sampling", "sft_trainer")
    assert inside == {
        "adapters/gated.py", *(f"models/{name}.py" for name in models), *(f"training/{name}.py" for name in training)
    }  # fmt: skip
    assert len(seen) <= 14, sorted(seen)
