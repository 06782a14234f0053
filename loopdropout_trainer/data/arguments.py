"""`DataArguments`: which rows to train on, and how they become examples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers.hf_argparser import HfArg

from loopdropout_trainer.checks import Range, check_choice, check_list, check_numbers, shown
from loopdropout_trainer.data.arithmetic import MOST_TRAINED_STEPS
from loopdropout_trainer.data.preparations import PREPARATIONS
from loopdropout_trainer.errors import UserError


_HUB = ("dataset_name", "dataset_config", "dataset_revision", "dataset_split")


@dataclass
class DataArguments:
    """Which rows to train on, and how they become examples.

    Raises:
        ValueError: if no source of rows is named, or two settings exclude each other.
    """

    preparation: str | None = HfArg(
        default=None,
        help="Named preparation of the rows. Default: rows in TRL's formats, or a `prompt_template` over their columns.",
        metadata={"choices": list(PREPARATIONS)},
    )
    dataset_name: str | None = HfArg(default=None, help="Name of a dataset on the Hub, or its folder.")
    dataset_config: str | None = HfArg(default=None, help="Configuration of the Hub dataset.")
    dataset_revision: str | None = HfArg(default=None, help="Branch, tag or commit of the Hub dataset.")
    dataset_split: str = HfArg(default="train", help="Split of the Hub dataset.")
    train_files: list[str] | None = HfArg(default=None, help="Local JSONL, JSON, CSV (also .gz), Parquet files.")
    eval_files: list[str] | None = HfArg(default=None, help="Local files to evaluate on, instead of held-out rows.")
    column_mapping: dict[str, str] | None = HfArg(default=None, help="{expected name: name in rows} (JSON if typed).")
    num_train_examples: int | None = HfArg(default=None, help="Rows to train on. Default: all that are left.")
    num_eval_examples: int | None = HfArg(
        default=None, help="Number of rows to hold out, the same in every run. Default: the preparation's own, else 0."
    )
    split_seed: int = HfArg(default=0, help="Seed of the choice of rows (held out, drawn); not the seed of training.")
    prompt_template: str | None = HfArg(default=None, help="`alpaca`, `question`, or a text with {column} fields.")
    prompt_end: str = HfArg(default="", help="Text between the prompt template and the target; part of the prompt.")
    target_prefix: str = HfArg(
        default="",
        help="Text before the target that is trained on. Prompt, prefix and target are then tokenised as one text; a token "
        "that spans prompt and target belongs to the target.",
    )
    example_token_limit: int | None = HfArg(
        default=512,
        help="Of `preparation: metamath_gsm`: rows of so many tokens or more are left out, counted in the prompt, "
        "`target_prefix`, a space, and the response. null: none are.",
    )
    arithmetic_steps: list[int] | None = HfArg(
        default=None,
        help="Fewest and most steps of a problem of `preparation: arithmetic` or `arithmetic_pairs`. Default: 3 5.",
        metadata={"nargs": 2},
    )
    bad_rows: Literal["error", "skip"] = HfArg(default="error", help="Stop at a row that cannot be used, or count it.")

    def __post_init__(self):
        check_list("train_files", self.train_files)
        check_list("eval_files", self.eval_files)
        check_choice("preparation", self.preparation, (None, *PREPARATIONS))
        check_choice("bad_rows", self.bad_rows, ("error", "skip"))
        if self.dataset_name and Path(self.dataset_name).is_file():
            raise UserError(
                f"`dataset_name` must be a dataset of the Hub or its folder; {self.dataset_name} is a file: give it "
                "as `train_files`."
            )
        self._check_source()
        if self.eval_files and self.num_eval_examples:
            raise UserError("`eval_files` and `num_eval_examples` exclude each other: give one of them.")
        seeds = Range(-(2**63), 2**63 - 1)
        check_numbers(self, num_train_examples=Range(1), example_token_limit=Range(1), split_seed=seeds)
        if self.preparation != "metamath_gsm" and self.example_token_limit != type(self).example_token_limit:
            raise UserError(
                "`example_token_limit` belongs to `preparation: metamath_gsm`; `max_length` drops the long examples of others."
            )
        if self.arithmetic_steps is None:
            return
        if self.preparation not in ("arithmetic", "arithmetic_pairs"):
            raise UserError("`arithmetic_steps` belongs to `preparation: arithmetic` or `arithmetic_pairs`.")
        steps = list(self.arithmetic_steps)
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= MOST_TRAINED_STEPS:
            valid = f"the fewest and the most steps, from 1 to {MOST_TRAINED_STEPS}, such as [1, 3]"
            raise UserError(f"`arithmetic_steps` must be {valid}; got {shown(steps)}.")

    def _check_source(self) -> None:
        """Raise UserError unless the rows come from one place."""
        if str(self.preparation).startswith("arithmetic"):
            source = f"preparation: {self.preparation}"
            unread = (*_HUB, "train_files", "eval_files", "column_mapping")
        elif self.train_files:
            source = "train_files"
            unread = _HUB
        elif self.dataset_name:
            source, unread = "dataset_name", ()
            if self.dataset_revision and Path(self.dataset_name).is_dir():
                raise UserError(
                    f"`dataset_revision` is of a dataset on the Hub; {self.dataset_name} is a folder: leave it out."
                )
        else:
            raise UserError("No training rows: give `dataset_name` (Hub) or `train_files` (local files).")
        for name in unread:
            if getattr(self, name) != getattr(type(self), name):
                raise UserError(f"`{name}` and `{source}` exclude each other: the rows come from one of them.")


@dataclass
class LossArguments:
    """The trainer's settings that decide what is trained on, for what shows or scores examples as training sees them."""

    max_length: int | None = HfArg(default=1024, help="As in training: longer examples are dropped.")
    completion_only_loss: bool | None = HfArg(default=None, help="As in training: whether only completions count.")
    assistant_only_loss: bool = HfArg(default=False, help="As in training: whether only the assistant's turns count.")
    chat_template_path: str | None = HfArg(default=None, help="As in training: another name for `chat_template`.")
    eos_token: str | None = HfArg(default=None, help="As in training: the token that ends answers.")
