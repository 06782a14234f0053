"""The fields of a recipe about training data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from loopdropout_trainer.data.formats import FORMATS, PAIRS, PREFERENCES, TEXTS
from loopdropout_trainer.data.preparations import FIELD, PREPARATIONS, PROMPT_TEMPLATES
from loopdropout_trainer.data.sources import DataSource, read_sources
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.settings.fields import NamedFieldsMixin, check_fields, option


@dataclass
class DataArguments(NamedFieldsMixin):
    """The fields of a recipe about training data.

    Args:
        preparation: Named preparation of the examples, such as "gsm8k". Default: the examples have one of TRL's formats.
        dataset_name, dataset_config, dataset_revision, dataset_split: A dataset of the Hub or in a folder.
        train_files, eval_files: JSONL, JSON, CSV or Parquet files to train and to evaluate on.
        datasets: Several data sets or files, as mappings with `path`, `split`, `fraction` and others.
        column_mapping: Columns of the dataset by the names that the examples need.
        num_train_examples, num_eval_examples, split_seed: Numbers of examples, and the seed of their choice.
        prompt_template, prompt_end, target_prefix: Texts around the columns of an example.
        example_token_limit: Number of tokens from which `metamath_gsm` leaves out an example.
        arithmetic_steps: Fewest and most steps of generated arithmetic problems.

    Attributes:
        formats: Columns of each format of examples that the training reads.

    Raises:
        UserError: If a field is unknown or wrong, or if two fields describe the same.
    """

    help_title = "Data"
    formats = FORMATS

    preparation: str | None = option(
        None,
        "Named preparation of the examples. Default: TRL's formats, or `prompt_template` over the columns.",
        choices=PREPARATIONS,
    )
    dataset_name: str | None = option(None, "Name or folder of a dataset.")
    dataset_config: str | None = option(None, "Configuration of the dataset.")
    dataset_revision: str | None = option(None, "Branch, tag or commit of the dataset on the Hub.")
    dataset_split: str = option("train", "Split of the dataset.")
    train_files: list[str] | None = option(None, "JSONL, JSON, CSV (also compressed) or Parquet files to train on.")
    datasets: list[dict[str, Any]] | None = option(
        None,
        "Several data sets or files, as in TRL: mappings with `path` (a name, a folder or a file), and if needed `name`, "
        "`revision`, `split`, `data_dir`, `data_files`, `columns`, `column_mapping` and `fraction`, the share in the mixture.",
        kinds="a list of items such as `- path: chats.jsonl`",
    )
    eval_files: list[str] | None = option(None, "Files to evaluate on, instead of held-out examples.")
    column_mapping: dict[str, str] | None = option(
        None, "{expected column: column of the dataset}, of all `datasets` without a `column_mapping` of their own."
    )
    num_train_examples: int | None = option(None, "Number of training examples. Default: all.", at_least=1)
    num_eval_examples: int | None = option(
        None, "Number of held-out examples, the same in each run. Default: the preparation's, else 0.", at_least=0
    )
    split_seed: int = option(0, "Seed of the choice of examples, independent of `seed`.")
    prompt_template: str | None = option(None, "`alpaca`, `question`, or a text with {column} fields.")
    prompt_end: str = option("", "Text at the end of the prompt.")
    target_prefix: str = option(
        "",
        "Text before the target that is trained on. Prompt and target are then tokenized as one text, and a token that "
        "spans both belongs to the target.",
    )
    example_token_limit: int | None = option(
        512,
        "`preparation: metamath_gsm` leaves out examples of so many tokens or more, counted in the prompt, `target_prefix`, "
        "a space, and the response. null: none.",
        at_least=1,
    )
    arithmetic_steps: list[int] | None = option(
        None,
        "Fewest and most steps of generated arithmetic problems. Default: 3 5, or 2 3 for `arithmetic_short`.",
        nargs=2,
        kinds="two numbers from 1 to 5",
    )

    def __post_init__(self):
        check_fields(self)
        sources = {name: getattr(self, name) for name in ("dataset_name", "train_files", "datasets")}
        if PREPARATIONS[self.preparation].problems:  # it generates its examples
            sources["preparation"] = self.preparation
        given = [f"`{name}: {value}`" for name, value in sources.items() if value]
        if len(given) > 1:
            raise UserError(f"Set either {' or '.join(given)}, not both.")
        read_sources(vars(self))  # raises UserError for wrong ones
        if self.eval_files and self.num_eval_examples:
            raise UserError("Set either `eval_files` or `num_eval_examples`, not both.")
        if self.template is not None and not FIELD.search(self.template):
            names = ", ".join(PROMPT_TEMPLATES)
            raise UserError(
                f"`prompt_template` must be {names} or a text with {{column}} fields, got {self.template!r}."
            )
        steps = self.arithmetic_steps or [1, 5]
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= 5:  # longer problems are the evaluation split `hard`
            raise UserError(f"`arithmetic_steps` must be two numbers from 1 to 5, got {self.arithmetic_steps}.")

    @property
    def train_sources(self) -> list[DataSource]:
        """Data sets and files to train on.

        Raises:
            UserError: If there is none.
        """
        sources = read_sources(vars(self))
        if not sources:
            raise UserError(
                "`dataset_name` or `train_files` must be set, or `datasets` for several, because there is no data to train on."
            )
        return sources

    @property
    def files(self) -> list[str]:
        """Files on this computer to train on and to hold out."""
        of_sources = [file for source in read_sources(vars(self)) for file in source.files]
        return [*of_sources, *(self.eval_files or ())]

    def of_source(self, source: DataSource) -> DataArguments:
        """Return the arguments by which the rows of a source become examples, with the names of its columns."""
        if source.column_mapping is None:
            return self
        return replace(self, column_mapping=source.column_mapping)

    @property
    def num_held_out(self) -> int:
        """Number of examples to hold out from the source of the training examples."""
        return count_held_out(vars(self))

    @property
    def prompt_format(self) -> str | None:
        """Text of a whole prompt with a {field}, or None if the examples have their own prompts."""
        return None if self.template is None else self.template + self.prompt_end

    @property
    def template(self) -> str | None:
        """Text of the prompt template."""
        name = self.prompt_template or PREPARATIONS[self.preparation].prompt_template
        return PROMPT_TEMPLATES.get(name, name)


def count_held_out(recipe: Mapping[str, Any]) -> int:
    """Return the number of examples to hold out from the training examples of a recipe. Without one, the preparation's."""
    if recipe.get("eval_files"):
        return 0  # the files hold them
    if recipe.get("num_eval_examples") is not None:
        return recipe["num_eval_examples"]
    for name, preparation in PREPARATIONS.items():  # compared, because a wrong value may not be hashable
        if name == recipe.get("preparation"):
            return preparation.num_eval_examples
    return 0  # the training raises an error for an unknown preparation


def has_held_out(recipe: Mapping[str, Any]) -> bool:
    """Return whether a training with a recipe has held-out examples. Some preparations hold out examples by default."""
    return bool(recipe.get("eval_files") or count_held_out(recipe))


class SFTDataArguments(DataArguments):
    """The fields of a recipe about the examples of SFT."""

    formats = TEXTS


class DPODataArguments(DataArguments):
    """The fields of a recipe about the examples of DPO."""

    formats = PREFERENCES


class GRPODataArguments(DataArguments):
    """The fields of a recipe about the examples of GRPO."""

    formats = PAIRS
