"""External plugin for ms-swift, which adds the callback `loop_dropout`."""

from __future__ import annotations

import json
from typing import Any

from peft import PeftModel
from swift.callbacks import TrainerCallback, callbacks_map
from swift.utils import get_env_args
from transformers import TrainerControl, TrainerState, TrainingArguments

from loopdropout_trainer.handle import loop_dropout


class LoopDropoutCallback(TrainerCallback):
    """Apply Loop Dropout during a training.

    `--model_kwargs '{"loop_dropout_p": 0.5, "loop_dropout_rule": "loop_dropout"}'` sets its fields.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: PeftModel, **kwargs: Any
    ) -> None:
        """Draw gates in every training pass of the model, from ms-swift's `seed`."""
        p = get_env_args("loop_dropout_p", json.loads, 0.5)  # one number or a list
        rule = get_env_args("loop_dropout_rule", str, "loop_dropout")
        self.handle = loop_dropout(model, p, rule, seed=args.seed)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the model."""
        self.handle.remove()


callbacks_map["loop_dropout"] = LoopDropoutCallback
