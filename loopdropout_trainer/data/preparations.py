"""Preparations: how the rows of a dataset become examples, by name. This is the page to extend.

A file that you pass with `--import` adds a preparation of your own, which a recipe names as `preparation: mine`:

    from loopdropout_trainer.data import PREPARATIONS, Preparation

    def make_example(row, args):
        return row["q"], {"prompt": f"Q: {row['q']} A:", "completion": f" {row['a']}"}

    PREPARATIONS["mine"] = Preparation(make_example, columns=("q", "a"))
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.arithmetic import add_mistake
from loopdropout_trainer.data.formats import find_format, to_messages, to_trl_name
from loopdropout_trainer.data.holding_out import (
    Indices,
    draw_random,
    hold_out_after_100k,
    hold_out_first,
    hold_out_random,
    random_order,
)


if TYPE_CHECKING:
    from loopdropout_trainer.data.arguments import DataArguments

Row = Mapping[str, Any]
Example = tuple[str, Row]
"""Identity and columns of an example. Rows with the same identity are duplicates."""

PROMPT_TEMPLATES = {
    # Taori et al. 2023, the variant without an input field. `make_pair` takes the other one for rows with an `input`.
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:"
    ),
    # As in lm-eval's `gsm8k` task.
    "question": "Question: {question}\nAnswer:",
}
"""Prompts by name, with {column} fields."""

_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
"""Alpaca's prompt for rows with an input."""

FIELD = re.compile(r"\{(\w[\w .-]*)\}")
"""A {column} field of a prompt template."""


def fill(template: str, row: Row) -> str:
    """Fill the {column} fields of a prompt template from a row."""
    return FIELD.sub(lambda match: str(row[match[1]]), template)


def remove_calculations(solution: str) -> str:
    """Remove GSM8K's calculator annotations `<<48/2=24>>` from a solution."""
    return re.sub(r"<<[^<>]*>>", "", solution)


# Functions that make an example of a row


def make_pair(row: Row, completion: str, args: DataArguments) -> Row:
    """Return a prompt and a completion."""
    template = args.template or "{prompt}"
    if template == PROMPT_TEMPLATES["alpaca"] and str(row.get("input") or "").strip():
        template = _ALPACA_WITH_INPUT
    prompt = fill(template, row) + args.prompt_end
    return {"prompt": prompt, "completion": args.target_prefix + completion}


def make_gsm8k_example(row: Row, args: DataArguments) -> Example:
    """Ask the question as lm-eval's `gsm8k` task does. The target is the solution without calculator annotations."""
    columns = {"question": row["question"], "answer": remove_calculations(row["answer"])}
    return row["question"], {**make_pair(columns, f" {columns['answer']}", args), **columns}


def make_arithmetic_pair(row: Row, args: DataArguments) -> Example:
    """Pair the answer of an arithmetic problem (chosen) with an answer that has a mistake (rejected)."""
    question, example = make_gsm8k_example(row, args)
    wrong_answer = add_mistake(row["answer"], random_order(question, args.split_seed))
    rejected = make_pair(example, f" {wrong_answer}", args)
    return question, {"prompt": example["prompt"], "chosen": example["completion"], "rejected": rejected["completion"]}


def make_metamath_example(row: Row, args: DataArguments) -> Example:
    """Ask the question in Alpaca's template. The target is the response."""
    columns = {"question": row["query"], "answer": row["response"]}
    pair = make_pair({"instruction": row["query"]}, row["response"], args)
    return f"{row['query']}\n{row['response']}", {**pair, **columns}


def make_tulu2_example(row: Row, args: DataArguments) -> Example:
    """Return the conversation."""
    _, example = make_own_example(row, args)
    turns = [[turn["role"], turn["content"]] for turn in example["messages"]]
    return json.dumps(turns, ensure_ascii=False), example


def make_own_example(row: Row, args: DataArguments) -> Example:
    """Return the columns of one of TRL's formats."""
    identity = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
    if isinstance(row.get("completion"), str):
        return identity, make_pair(row, row["completion"], args)
    example = {}
    for name in find_columns(args, row):
        example[to_trl_name(name)] = to_messages(row[name])
    if "tools" in row:
        example["tools"] = row["tools"] or None
    if "chat_template_kwargs" in row:
        example["chat_template_kwargs"] = row["chat_template_kwargs"] or {}  # TRL unpacks it
    return identity, example


def find_columns(args: DataArguments, names: Iterable[str]) -> tuple[str, ...]:
    """Return the columns that examples are made of, if the rows have columns with these names."""
    if columns := PREPARATIONS[args.preparation].columns:
        return columns
    if args.template is not None:
        return (*FIELD.findall(args.template), "completion")
    return find_format(names, args.formats)


# Functions that say whether to keep a row


def keep_all(row: Row, args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Keep every row."""
    return True


def is_short_gsm(row: Row, args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a row of MetaMathQA is of GSM type and below `example_token_limit`.

    As in LoRA-Pro, the limit counts the prompt, a space, and the response without an end token.
    """
    if "GSM" not in row["type"]:
        return False
    if args.example_token_limit is None:
        return True
    text = f"{fill(args.template, {'instruction': row['query']})}{args.target_prefix} {row['response']}"
    return len(tokenizer(text, verbose=False)["input_ids"]) < args.example_token_limit


class Preparation(NamedTuple):
    """How the rows of a dataset become examples.

    Attributes:
        make_example: Function that makes an example of a row.
        columns: Columns that it reads. Default: the columns of one of TRL's formats.
        split: Function from the random order [N] of the examples and the number of held-out examples to `Indices`.
        keep: Function that returns whether to keep a row.
        problems: Split of the arithmetic problems that are generated.
        num_train_examples, num_eval_examples, prompt_template: Defaults of `DataArguments`.
    """

    make_example: Callable[..., Example] = make_own_example
    columns: tuple[str, ...] = ()
    split: Callable[..., Indices] = hold_out_random
    keep: Callable[..., bool] = keep_all
    problems: str | None = None
    num_train_examples: int | None = None
    num_eval_examples: int = 0
    prompt_template: str | None = None


_GSM8K = Preparation(make_gsm8k_example, ("question", "answer"), num_eval_examples=500, prompt_template="question")
_ARITHMETIC = _GSM8K._replace(split=hold_out_first, problems="train", num_train_examples=2000, num_eval_examples=200)
PREPARATIONS = {
    None: Preparation(),
    "arithmetic": _ARITHMETIC,
    "arithmetic_pairs": _ARITHMETIC._replace(make_example=make_arithmetic_pair),
    "arithmetic_short": _ARITHMETIC._replace(problems="short"),
    "gsm8k": _GSM8K,
    "metamath_gsm": Preparation(
        make_metamath_example,
        ("type", "query", "response"),
        hold_out_after_100k,
        is_short_gsm,
        num_eval_examples=500,
        prompt_template="alpaca",
    ),
    "tulu2": Preparation(make_tulu2_example, split=draw_random),
}
"""Preparations by name. None takes rows in TRL's formats."""

PACKAGED_PREPARATIONS = frozenset(PREPARATIONS)
"""Names of the preparations of this package. A file of the user can add others."""

SCORED_LIKE = {
    "arithmetic": "arithmetic_test",
    "arithmetic_short": "arithmetic_test",
    "gsm8k": "gsm8k",
    "metamath_gsm": "metamath_gsm8k",
}
"""Task that asks and scores the held-out examples of a preparation, as the task `development`."""
