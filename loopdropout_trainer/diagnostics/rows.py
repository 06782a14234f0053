"""The rows that losses are measured on, tokenised and labelled as `LoopDropoutSFTTrainer` trains on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.checks import check_numbers
from loopdropout_trainer.data import DataArguments, DataError, load_data
from loopdropout_trainer.data.boundary import tokenise
from loopdropout_trainer.data.load import LossArguments
from loopdropout_trainer.data.preparations import without_calculator
from loopdropout_trainer.evaluation.benchmarks import load_from
from loopdropout_trainer.saving.files import sha256_of_json
from loopdropout_trainer.settings.arguments import BenchmarkSources, setting
from loopdropout_trainer.training.scores import Batch


HELD_OUT = "held_out"


@dataclass
class RowArguments(LossArguments, DataArguments, BenchmarkSources):
    """Which rows losses are measured on. The recipe's data settings are needed for held-out rows only."""

    rows: str = setting(
        HELD_OUT, "`held_out` for the recipe's held-out rows, or a benchmark for its prompts with reference solutions."
    )
    num_rows: int = setting(500, "At most so many rows, from the first on.")
    rows_batch_size: int = setting(8, "Rows that one process computes at a time.")

    def __post_init__(self):
        if self.rows == HELD_OUT:
            super().__post_init__()
        check_numbers(self)


def labelled_batches(
    rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, batch_size: int = 8, **losses: bool
) -> list[Batch]:
    """Return rows as batches with labels, padded on the right, for `single_loop_activation` and `readout_losses`.

    Args:
        rows: in one of TRL's formats.
        tokenizer, losses: see `data.boundary.tokenise`.
        batch_size: rows of a batch.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return batched(tokenise(columns, tokenizer, **losses), batch_size, tokenizer.pad_token_id)


def batched(columns: Mapping[str, list], batch_size: int, pad_token_id: int | None) -> list[Batch]:
    """Return columns `input_ids` and `labels` as batches in their order, padded on the right."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = Dataset.from_dict(columns).to_list()
    collate = DataCollatorForLanguageModeling(pad_token_id or 0)
    return [collate(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]


def facts_of_batches(batches: Sequence[Batch]) -> dict[str, Any]:
    """Return what tells rows in batches from others: their number, and a hash of all tokens and labels."""
    content = [{name: batch[name].tolist() for name in ("input_ids", "labels")} for batch in batches]
    return {"rows": sum(len(batch["input_ids"]) for batch in batches), "sha256": sha256_of_json(content)}


def load_rows_to_score(
    arguments: RowArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Batch], dict[str, Any]]:
    """Return the recipe's held-out rows, or a benchmark's prompts with their reference solutions, as batches padded right.

    Beside them what measurements depend on: `source`, `num_rows`, `num_tokens` (targets), `sha256` of all tokens and labels.
    """
    if arguments.rows == HELD_OUT:
        of_training = DataArguments(**{f.name: getattr(arguments, f.name) for f in fields(DataArguments)})
        rows = load_data(of_training, tokenizer, arguments.max_length).eval  # the same ones as in training
        if rows is None:
            raise DataError(
                "The recipe holds no rows out: set `num_eval_examples` or `eval_files`, or name a benchmark with `rows`."
            )
        rows = rows[: arguments.num_rows]
    else:
        benchmark = load_from(arguments, arguments.rows, arguments.num_rows)
        published = getattr(benchmark, "rows", [])
        columns = [name for name in ("solution", "answer") if published and isinstance(published[0].get(name), str)]
        if not columns:
            raise DataError(f"`rows: {arguments.rows}` has no string column `solution` or `answer`.")
        solutions = [f" {without_calculator(str(row[columns[0]]))}" for row in published]
        rows = {"prompt": benchmark.prompts, "completion": solutions}
    columns = tokenise(rows, tokenizer, arguments.completion_only_loss, arguments.assistant_only_loss)
    num_tokens = sum(label != -100 for labels in columns["labels"] for label in labels[1:])
    content = sha256_of_json(list(zip(*columns.values(), strict=True)))
    identity = {
        "source": arguments.rows,
        "num_rows": len(columns["labels"]),
        "num_tokens": num_tokens,
        "sha256": content,
    }
    return batched(columns, arguments.rows_batch_size, tokenizer.pad_token_id), identity
