"""The rows that losses are measured on, tokenised and labelled as `LoopDropoutSFTTrainer` trains on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Trainer
from trl import get_training_chat_template
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from loopdropout_trainer.data import DataArguments, DataError, load_data
from loopdropout_trainer.data.boundary import common_prefix, prompt_completion_ids
from loopdropout_trainer.data.preparations import without_calculator
from loopdropout_trainer.data.rows import read_files
from loopdropout_trainer.data.templates import apply_chat_template
from loopdropout_trainer.diagnostics.arguments import HELD_OUT, RowArguments
from loopdropout_trainer.diagnostics.scores import Batch
from loopdropout_trainer.evaluation.benchmarks import find_task, load_benchmark
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedBenchmark, GeneratedTask
from loopdropout_trainer.saving.files import sha256_of_json


LabelledRow = dict[str, list[int]]
"""`input_ids` and `labels` of one row, of one length; -100 where no target is."""


@dataclass(frozen=True)
class Rows:
    """Tokenised rows in fixed batches.

    Attributes:
        batches: model inputs with `labels` [B, S], padded on the right.
        identity: what measurements on these rows depend on: `source` (`held_out`, or a benchmark's name), `num_rows`,
            `num_tokens` (targets) and `sha256` of all tokens and labels.
    """

    batches: list[Batch]
    identity: dict[str, Any]

    @classmethod
    def make(cls, source: str, rows: Sequence[LabelledRow], batch_size: int, pad_token_id: int | None) -> Rows:
        """Batch labelled rows in their order.

        Raises:
            DataError: if there is none, or none has a target.
        """
        num_tokens = sum(label != -100 for row in rows for label in row["labels"][1:])
        if not num_tokens:
            raise DataError(f"`rows: {source}` gives {len(rows)} rows and no target token to measure a loss on.")
        content = sha256_of_json([[row["input_ids"], row["labels"]] for row in rows])
        identity = {"source": source, "num_rows": len(rows), "num_tokens": num_tokens, "sha256": content}
        return cls(_batches(rows, batch_size, pad_token_id), identity)


def labelled_batches(
    source: GeneratedBenchmark | Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int = 8,
    **losses: bool,
) -> list[Batch]:
    """Return rows as padded batches with labels, for `single_loop_activation` and `readout_losses`.

    Args:
        source: a benchmark, whose references (after a space) are the completions of its prompts; or rows in one of TRL's
            formats, such as a dataset with `prompt` and `completion`.
        tokenizer: of the model, with the chat template that training uses.
        batch_size: rows of a batch.
        losses: see `label`.
    """
    if isinstance(source, GeneratedBenchmark):
        pairs = zip(source.prompts, source.references, strict=True)
        source = [{"prompt": prompt, "completion": f" {reference}"} for prompt, reference in pairs]
    return _batches(label(source, tokenizer, **losses), batch_size, tokenizer.pad_token_id)


def evaluation_batches(trainer: Trainer, num_rows: int) -> list[Batch]:
    """Return this process's share of a trainer's first evaluation rows, collated as the trainer does.

    Together the processes hold each of these rows once, whatever their number: none is repeated to fill a last batch.

    Raises:
        ValueError: if the trainer has no evaluation rows.
    """
    rows = trainer.eval_dataset
    if isinstance(rows, Mapping):
        rows = next(iter(rows.values()), None)
    if rows is None:
        raise ValueError(
            "Diagnostics of a training need evaluation rows, and there are none: set `num_eval_examples` or `eval_files`."
        )
    rows, size = list(islice(iter(rows), num_rows)), trainer.args.per_device_eval_batch_size
    batches = [trainer.data_collator(rows[start : start + size]) for start in range(0, len(rows), size)]
    for batch in batches:
        batch.pop("example_ids", None)  # for the gates of training
    return batches[trainer.accelerator.process_index :: trainer.accelerator.num_processes]


def _batches(rows: Sequence[LabelledRow], batch_size: int, pad_token_id: int | None) -> list[Batch]:
    collate = DataCollatorForLanguageModeling(pad_token_id or 0)
    return [collate(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]


def label(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
) -> list[LabelledRow]:
    """Tokenise rows in one of TRL's formats, and label what `SFTTrainer` trains on.

    Args:
        rows: with `prompt` and `completion` (texts or messages), `messages`, or `text`.
        tokenizer: with the chat template that training uses.
        completion_only_loss: whether targets are the completion alone; default: for rows that have one.
        assistant_only_loss: whether targets are what the chat template marks as the assistant's.
    """
    rows = list(rows)
    if not rows:
        return []
    if isinstance(rows[0].get("prompt"), str):
        completions = [_ended(row["completion"], tokenizer) for row in rows]
        ids, starts = prompt_completion_ids(tokenizer, [row["prompt"] for row in rows], completions)
        tokenised = [(each, start, None) for each, start in zip(ids, starts, strict=True)]
    elif "text" in rows[0]:
        tokenised = [(tokenizer(_ended(row["text"], tokenizer))["input_ids"], 0, None) for row in rows]
    else:
        tokenised = [_conversation(row, tokenizer, assistant_only_loss) for row in rows]
    if completion_only_loss is False:
        tokenised = [(ids, 0, assistant) for ids, _, assistant in tokenised]
    return [
        {
            "input_ids": ids,
            "labels": [
                token if place >= start and (assistant is None or assistant[place]) else -100
                for place, token in enumerate(ids)
            ],
        }
        for ids, start, assistant in tokenised
    ]


def _ended(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    return text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token


def _conversation(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, assistant_only_loss: bool
) -> tuple[list[int], int, list[int] | None]:
    """Return token ids, where the completion starts, and (if asked for) which tokens are the assistant's, as TRL does."""
    marks = "generation" in (tokenizer.chat_template or "")
    template = get_training_chat_template(tokenizer) if assistant_only_loss and not marks else None
    prompt = row.get("prompt") or []
    turns = prompt + row["completion"] if "completion" in row else row["messages"]
    marked = {"return_dict": True, "return_assistant_tokens_mask": assistant_only_loss}
    found = apply_chat_template(tokenizer, turns, chat_template=template, **marked)
    start, ids = 0, found["input_ids"]
    if prompt:
        alone = apply_chat_template(tokenizer, prompt, chat_template=template, add_generation_prompt=True)
        start = common_prefix(alone["input_ids"], ids)
    return ids, start, found["assistant_masks"] if assistant_only_loss else None


def load_rows_to_score(arguments: RowArguments, tokenizer: PreTrainedTokenizerBase, files: str | None = None) -> Rows:
    """Load the recipe's held-out rows, or a benchmark's prompts with their reference solutions.

    Args:
        arguments: which rows, and how many.
        tokenizer: of the model, with the chat template that training uses.
        files: local file of the benchmark.

    Raises:
        DataError: if there are no such rows.
    """
    if arguments.rows == HELD_OUT:
        rows = held_out_rows(arguments, tokenizer)
        if rows is None:
            raise DataError(
                "The recipe holds no rows out: set `num_eval_examples` or `eval_files`, or take a benchmark's reference "
                "solutions with `rows`."
            )
        rows = rows.select(range(min(arguments.num_rows, len(rows))))
    else:
        rows = _solved(arguments.rows, files, arguments.num_rows)
    labelled = label(rows, tokenizer, arguments.completion_only_loss, arguments.assistant_only_loss)
    return Rows.make(arguments.rows, labelled, arguments.rows_batch_size, tokenizer.pad_token_id)


def held_out_rows(arguments: RowArguments, tokenizer: PreTrainedTokenizerBase) -> Dataset | None:
    """Return the rows that the recipe holds out; the same ones as in training."""
    of_training = DataArguments(**{f.name: getattr(arguments, f.name) for f in fields(DataArguments)})
    return load_data(of_training, tokenizer, arguments.max_length).eval


def _solved(name: str, files: str | None, limit: int) -> list[dict[str, str]]:
    """Return a benchmark's prompts with completions: a space and the reference solution."""
    benchmark = load_benchmark(name, files, limit)
    rows = raw_rows(name, files, limit)
    column = next((column for column in ("solution", "answer") if rows and isinstance(rows[0].get(column), str)), None)
    if column is None:
        raise DataError(f"`rows: {name}` has no reference solutions: no string column `solution` or `answer`.")
    return [
        {"prompt": prompt, "completion": f" {without_calculator(str(row[column]))}"}
        for prompt, row in zip(benchmark.prompts, rows, strict=True)
    ]


def raw_rows(name: str, files: str | None, limit: int | None) -> list[Mapping[str, Any]]:
    """Return the rows of a benchmark as they are published, after `load_benchmark` has checked them.

    A benchmark that is not evaluated by plain generation gives none.
    """
    task = find_task(name)
    if not isinstance(task, GeneratedTask):
        return []
    rows = task.rows(limit) if files is None else (row.value for row in read_files([files]))
    return list(islice(rows, limit))
