"""The rows that losses are measured on, tokenised and labelled as `LoopDropoutSFTTrainer` trains on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import islice
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Trainer
from trl import get_training_chat_template
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from loopdropout_trainer.data import DataArguments, DataError, load_data
from loopdropout_trainer.data.preparations import without_calculator
from loopdropout_trainer.diagnostics.arguments import HELD_OUT, RowArguments
from loopdropout_trainer.diagnostics.scores import Batch
from loopdropout_trainer.evaluation.benchmarks import load_benchmark
from loopdropout_trainer.saving.files import sha256_of_json
from loopdropout_trainer.training.sft_trainer import LoopDropoutSFTTrainer


def labelled_batches(
    rows: Iterable[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, batch_size: int = 8, **losses: bool
) -> list[Batch]:
    """Return rows as padded batches with labels, for `single_loop_activation` and `readout_losses`.

    Args:
        rows, tokenizer, losses: see `labelled`.
        batch_size: rows of a batch.
    """
    return batched(labelled(rows, tokenizer, **losses), batch_size, tokenizer.pad_token_id)


def evaluation_batches(trainer: Trainer, num_rows: int) -> list[Batch]:
    """Return a trainer's first evaluation rows, each once, collated as the trainer does; the same in each process.

    Raises:
        ValueError: if the trainer has no evaluation rows.
    """
    rows = trainer.eval_dataset
    if isinstance(rows, Mapping):
        rows = next(iter(rows.values()), None)
    if rows is None:
        raise ValueError("Diagnostics of a training need evaluation rows: set `num_eval_examples` or `eval_files`.")
    rows, size = list(islice(iter(rows), num_rows)), trainer.args.per_device_eval_batch_size
    batches = [trainer.data_collator(rows[start : start + size]) for start in range(0, len(rows), size)]
    for batch in batches:
        batch.pop("example_ids", None)  # for the gates of training
    return batches


def labelled(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
) -> Dataset:
    """Return rows in one of TRL's formats with the `input_ids` and `labels` (-100: no target) that the trainer makes.

    Args:
        rows: with `prompt` and `completion` (texts or messages), `messages`, or `text`.
        tokenizer: with the chat template that training uses.
        completion_only_loss: whether targets are the completion alone; default: for rows that have one.
        assistant_only_loss: whether targets are what the chat template marks as the assistant's.

    Raises:
        ValueError: if there is no target.
    """
    rows = Dataset.from_list([dict(row) for row in rows])
    trainer = object.__new__(LoopDropoutSFTTrainer)  # for its preparation of rows alone, which asks for no model
    trainer._tokenizer, trainer.chat_template = tokenizer, None
    if assistant_only_loss and "generation" not in (tokenizer.chat_template or ""):
        trainer.chat_template = get_training_chat_template(tokenizer)
    trainer.completion_only_loss = (
        "completion" in rows.column_names if completion_only_loss is None else completion_only_loss
    )
    args = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=assistant_only_loss,
        max_length=None,
        shuffle_dataset=False,
    )
    return trainer._prepare_dataset(rows, tokenizer, args, False, None, "eval")


def load_rows_to_score(
    arguments: RowArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Batch], dict[str, Any]]:
    """Load the recipe's held-out rows, or a benchmark's prompts with their reference solutions.

    Returns:
        Batches padded on the right, and what measurements on them depend on: `source`, `num_rows`, `num_tokens` (targets)
        and `sha256` of all tokens and labels.

    Raises:
        DataError, ValueError: if there are no such rows.
    """
    if arguments.rows == HELD_OUT:
        of_training = DataArguments(**{f.name: getattr(arguments, f.name) for f in fields(DataArguments)})
        rows = load_data(of_training, tokenizer, arguments.max_length).eval  # the same ones as in training
        if rows is None:
            raise DataError(
                "The recipe holds no rows out: set `num_eval_examples` or `eval_files`, or name a benchmark with `rows`."
            )
        rows = islice(rows, arguments.num_rows)
    else:
        files = arguments.benchmark_files or {}
        benchmark = load_benchmark(arguments.rows, files.get(arguments.rows), arguments.num_rows)
        published = getattr(benchmark, "rows", [])
        columns = [name for name in ("solution", "answer") if published and isinstance(published[0].get(name), str)]
        if not columns:
            raise DataError(f"`rows: {arguments.rows}` has no string column `solution` or `answer`.")
        solutions = [f" {without_calculator(str(row[columns[0]]))}" for row in published]
        rows = [{"prompt": p, "completion": c} for p, c in zip(benchmark.prompts, solutions, strict=True)]
    rows = labelled(rows, tokenizer, arguments.completion_only_loss, arguments.assistant_only_loss)
    num_tokens = sum(label != -100 for labels in rows["labels"] for label in labels[1:])
    content = sha256_of_json([[row["input_ids"], row["labels"]] for row in rows])
    identity = {"source": arguments.rows, "num_rows": len(rows), "num_tokens": num_tokens, "sha256": content}
    return batched(rows, arguments.rows_batch_size, tokenizer.pad_token_id), identity


def batched(rows: Iterable[dict[str, Any]], batch_size: int, pad_token_id: int | None) -> list[Batch]:
    """Return labelled rows in their order, padded on the right."""
    rows, collate = list(rows), DataCollatorForLanguageModeling(pad_token_id or 0)
    return [collate(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]
