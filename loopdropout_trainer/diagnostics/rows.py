"""The rows that losses are measured on: held-out rows of the recipe, or a benchmark's problems with reference solutions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data import DataArguments, DataError, load_data
from loopdropout_trainer.data.gsm8k import without_calculator
from loopdropout_trainer.data.rows import BadRow, read_files
from loopdropout_trainer.diagnostics.scores import Batch
from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS, find_task
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedTask
from loopdropout_trainer.saving.files import sha256_of_json


HELD_OUT = "held_out"
_SOLUTIONS = ("solution", "answer")


@dataclass(frozen=True)
class Example:
    """The tokens of one row, and which of them are targets (`labels`, -100 elsewhere)."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Rows:
    """Tokenized rows in fixed batches.

    Attributes:
        source: `held_out`, or the benchmark's name.
        batches: model inputs with `labels` [B, S], padded on the right.
        num_rows, num_tokens: of all batches; the tokens are targets.
        sha256: of all tokens and targets.
    """

    source: str
    batches: list[Batch]
    num_rows: int
    num_tokens: int
    sha256: str

    @classmethod
    def make(cls, source: str, examples: Iterable[Example], batch_size: int, pad_id: int) -> Rows:
        """Batch examples in their order.

        Raises:
            DataError: if there is none, or none has a target.
        """
        examples = list(examples)
        num_tokens = sum(label != -100 for each in examples for label in each.labels[1:])
        if not num_tokens:
            raise DataError(f"`rows: {source}` gives {len(examples)} rows and no target token to measure a loss on.")
        digest = sha256_of_json([[each.input_ids, each.labels] for each in examples])
        batches = [
            _padded(examples[start : start + batch_size], pad_id) for start in range(0, len(examples), batch_size)
        ]
        return cls(source, batches, len(examples), num_tokens, digest)

    @property
    def identity(self) -> dict[str, Any]:
        """What measurements on these rows depend on."""
        return {
            "source": self.source,
            "num_rows": self.num_rows,
            "num_tokens": self.num_tokens,
            "sha256": self.sha256,
        }


def _padded(examples: list[Example], pad_id: int) -> Batch:
    length = max(len(each.input_ids) for each in examples)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for each in examples:
        padding = length - len(each.input_ids)
        batch["input_ids"].append(each.input_ids + [pad_id] * padding)
        batch["attention_mask"].append([1] * len(each.input_ids) + [0] * padding)
        batch["labels"].append(each.labels + [-100] * padding)
    return {name: torch.tensor(values) for name, values in batch.items()}


def load_rows(
    arguments: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    num_rows: int,
    batch_size: int,
    max_length: int | None = None,
    files: str | None = None,
) -> Rows:
    """Load and tokenize the rows that losses are measured on.

    Args:
        arguments: the recipe's data settings, for `held_out`.
        tokenizer: of the model, with the chat template that training uses.
        source: `held_out`, or the name of a benchmark whose problems have solutions.
        num_rows: most rows, from the first on.
        batch_size: rows that are run at a time.
        max_length: as in training: longer held-out rows are dropped.
        files: local file of the benchmark's problems.

    Raises:
        DataError: if there are no such rows.
    """
    if source == HELD_OUT:
        plain = DataArguments(**{f.name: getattr(arguments, f.name) for f in fields(DataArguments)})
        held_out = load_data(plain, tokenizer, max_length).eval
        if held_out is None:
            raise DataError(
                "The recipe holds no rows out: set `num_eval_examples` or `eval_files`, or take a benchmark's reference "
                "solutions with `rows`."
            )
        rows = held_out.select(range(min(num_rows, len(held_out))))
    else:
        rows = Dataset.from_list(list(islice(_solved(source, files), num_rows)))
    examples = tokenize(rows, tokenizer)
    return Rows.make(source, examples, batch_size, tokenizer.pad_token_id or 0)


def _solved(name: str, files: str | None) -> Iterable[dict[str, str]]:
    """Yield a benchmark's problems as `prompt` and `completion`: a space and the reference solution."""
    if not isinstance(BENCHMARKS.get(name), GeneratedTask):
        valid = ", ".join(known for known, task in BENCHMARKS.items() if isinstance(task, GeneratedTask))
        raise DataError(f"`rows` must be {HELD_OUT} or among {valid}; got {name!r}.")
    for row in raw_problems(name, files):
        column = next((column for column in _SOLUTIONS if isinstance(row.get(column), str)), None)
        if column is None:
            raise DataError(
                f"The problems of `{name}` have no text column {' or '.join(_SOLUTIONS)}, so no reference solution."
            )
        yield {"prompt": BENCHMARKS[name].prompt(row), "completion": f" {without_calculator(row[column])}"}


def raw_problems(name: str, files: str | None, limit: int | None = None) -> Iterable[Mapping[str, Any]]:
    """Yield a benchmark's rows as they are published, from local files or from where the benchmark has them.

    Nothing comes of a benchmark that is not answered by plain generation.

    Raises:
        DataError: for a row that cannot be read.
    """
    task = find_task(name)
    if not isinstance(task, GeneratedTask):
        return
    if files is None:
        yield from islice(task.rows(limit), limit)
        return
    for row in islice(read_files([files]), limit):
        if isinstance(row.value, BadRow):
            raise DataError(f"{row.place}: {row.value}.")
        yield row.value


def tokenize(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Tokenize rows in one of TRL's formats with the targets that `SFTTrainer` trains on.

    Targets are the completion with its end token, what the chat template marks as the assistant's (everything, where it
    marks nothing), or all of a text.
    """
    if "messages" in rows.column_names:
        return [_conversation([], turns, tokenizer) for turns in rows["messages"]]
    if "text" in rows.column_names:
        return [_text("", text, tokenizer) for text in rows["text"]]
    pairs = zip(rows["prompt"], rows["completion"], strict=True)
    form = _text if isinstance(rows[0]["prompt"], str) else _conversation
    return [form(prompt, completion, tokenizer) for prompt, completion in pairs]


def _text(prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase) -> Example:
    ended = completion if completion.endswith(tokenizer.eos_token) else completion + tokenizer.eos_token
    ids = tokenizer(prompt + ended)["input_ids"]
    before = len(tokenizer(prompt)["input_ids"]) if prompt else 0
    return Example(ids, [-100] * before + ids[before:])


def _conversation(prompt: list[dict], turns: list[dict], tokenizer: PreTrainedTokenizerBase) -> Example:
    marks = "generation" in (tokenizer.chat_template or "")
    found = tokenizer.apply_chat_template(
        prompt + turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=marks and not prompt
    )
    ids = found["input_ids"]
    if prompt:
        before = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
        return Example(ids, [-100] * before + ids[before:])
    mask = found["assistant_masks"] if marks else [1] * len(ids)
    return Example(ids, [token if kept else -100 for token, kept in zip(ids, mask, strict=True)])
