"""What a data preparation is: from a raw row to an example, and from all examples to training and held-out ones.

`Preparation` itself takes rows that are in one of TRL's formats already, or makes them with a prompt template; the named ones
say which rows of a data set become which examples, and which are held out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import has_generation_markers

from loopdropout_trainer.checks import check_choice, shown
from loopdropout_trainer.data.arithmetic import arithmetic_problems, with_a_mistake
from loopdropout_trainer.data.boundary import token_lengths
from loopdropout_trainer.data.rows import BadRow, DataError, DataReport, Row, fields_of, present, text
from loopdropout_trainer.errors import UserError


if TYPE_CHECKING:
    from loopdropout_trainer.data.load import DataArguments


PROMPT_TEMPLATES = {
    # Taori et al. 2023, the variant without an input field.
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:"
    ),
    # As in lm-eval's `gsm8k` task.
    "question": "Question: {question}\nAnswer:",
}
"""Prompts by name; {column} stands for a column of a row."""

_FIELD = re.compile(r"\{(\w+)\}")  # braces around anything but a plain name are text


class Unwanted(Exception):
    """A valid row that the preparation leaves out; the message is the reason."""


class Preparation:
    """Makes examples from rows; a subclass for each named preparation says what differs.

    An example has `prompt` and `completion`, or `messages`, or `text`. Subclasses may add the columns `question` and
    `answer`, which evaluation on held-out rows needs.

    Class attributes:
        title: for reports and model cards. columns: of a row, that examples are made of.
        num_train_examples, num_eval_examples, prompt_template: defaults of these settings.

    Attributes:
        report: counts the rows.

    Raises:
        ValueError: if `prompt_template` names no column, or `column_mapping` one that is not read.
    """

    title = ""
    columns = ("prompt", "completion", "chosen", "rejected", "messages", "conversations", "text")
    num_train_examples = None
    num_eval_examples = 0
    prompt_template = None

    def __init__(self, args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.report = DataReport()
        self.num_train = args.num_train_examples or self.num_train_examples
        self.num_held_out = self.num_eval_examples if args.num_eval_examples is None else args.num_eval_examples
        if args.eval_files:
            self.num_held_out = 0
        template = self.prompt_template if args.prompt_template is None else args.prompt_template
        self.template = PROMPT_TEMPLATES.get(template, template)
        if self.template is not None and not _FIELD.search(self.template):  # the same prompt for every row
            valid = f"{', '.join(PROMPT_TEMPLATES)}, or a text with fields such as {{column}}"
            raise UserError(f"`prompt_template` must be {valid}; got {shown(self.template)}.")
        for name in ("prompt_end", "target_prefix"):
            if getattr(args, name) and self.template is None:
                raise UserError(f"`{name}` follows a `prompt_template`: give one, or leave it out.")
        if type(self) is Preparation and self.template is not None:
            self.columns = (*_FIELD.findall(self.template), "completion")
        for name in args.column_mapping or ():
            check_choice("column_mapping", name, self.columns)

    def rows(self) -> list[Row] | None:
        """Return generated rows, for a preparation that reads none."""
        return None

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the example that a row gives; BadRow if it gives none, Unwanted if it is left out on purpose."""
        return standard_example(row) if self.template is None else self.prompted(row, target(row, "completion"))

    def prompted(self, columns: Mapping[str, Any], completion: str) -> dict[str, Any]:
        """Return the example whose prompt is the template filled from these columns; see `tokenise` for `is_one_text`."""
        prefix = self.args.target_prefix
        prompt = filled(self.template, columns) + self.args.prompt_end
        example = {"prompt": prompt, "completion": prefix + completion}
        return {**example, "is_one_text": True} if prefix else example

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return a string that two rows share exactly if they are duplicates."""
        return json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)

    def split(self, examples: Dataset, orders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return indices of training and of held-out examples, in source order, before any is dropped for its length.

        Rows that come first in this order are held out, so that the choice depends on the rows and `split_seed` alone: not on
        their order, the training seed, or the model. Duplicates of a held-out row are not trained on.

        Args:
            examples, orders: all N examples in source order; their `random_order` by identity and `split_seed`, [N] integers.
        """
        distinct, first = np.unique(orders, return_index=True)
        held_out = np.sort(first[: self.num_held_out])
        rest = np.setdiff1d(np.arange(len(orders)), held_out)
        return self.without_repeats(rest, orders, distinct[: self.num_held_out])[: self.num_train], held_out

    def without_repeats(self, rows: np.ndarray, orders: np.ndarray, held_out: np.ndarray) -> np.ndarray:
        """Return the rows whose `random_order` is none of the held-out ones'; the report counts the others."""
        is_repeated = np.isin(orders[rows], held_out)
        self.report.drop("repeats a held-out row", np.sum(is_repeated))
        return rows[~is_repeated]


def filled(template: str, row: Mapping[str, Any]) -> str:
    """Return a template with its {column} fields filled from a row; BadRow if one is not there, or neither text nor number."""
    for name in _FIELD.findall(template):
        value = present(row, name)
        if not isinstance(value, (str, int, float)):
            raise BadRow(f"field `{name}` is not text", f" (a {type(value).__name__})")
    return _FIELD.sub(lambda match: str(row[match[1]]), template)


def random_order(identity: str, seed: int) -> int:
    """Return a random integer in [0, 2^63) that depends on nothing but a row's identity and the seed."""
    digest = hashlib.blake2b(f"{seed}\n{identity}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# Columns of a row, checked; each raises BadRow.


def target(row: Mapping[str, Any], column: str) -> str:
    """Return a text column that will be trained on; it must not be empty."""
    value = text(row, column)
    if not value.strip():
        raise BadRow(f"empty target `{column}`")
    return value


def messages(row: Mapping[str, Any], column: str) -> list[dict[str, str]]:
    """Return a column of messages, each with `role` and `content` (or ShareGPT's `from` and `value`)."""
    turns = present(row, column)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise BadRow(f"field `{column}` is not a list of messages")
    return [_message(turn, f"{column}[{index}]") for index, turn in enumerate(turns)]


def _message(turn: Mapping[str, Any], place: str) -> dict[str, str]:
    if turn.get("tool_calls"):
        raise BadRow("tool calls are not supported", f" (in {place})")
    if "from" in turn and "role" not in turn:
        turn = {"role": turn["from"], "content": turn.get("value")}
    try:
        role = text(turn, "role")
        content = text(turn, "content")
    except BadRow as error:
        raise BadRow(f"{error.kind} in a message", f" ({place})") from None
    role = {"human": "user", "gpt": "assistant"}.get(role, role)
    if role not in ("system", "user", "assistant"):
        raise BadRow("a role is not system, user or assistant", f" ({role!r} in {place})")
    return {"role": role, "content": content}


def has_target(turns: list[dict[str, str]]) -> bool:
    """Say whether any assistant message has content to train on."""
    return any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns)


def conversation(row: Mapping[str, Any], column: str) -> list[dict[str, str]]:
    """Return a column of messages of which at least one assistant message can be trained on."""
    turns = messages(row, column)
    if not has_target(turns):
        raise BadRow("empty target: no assistant message with content")
    return turns


def standard_example(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row in one of TRL's formats, as texts or as messages."""
    is_chat = any(isinstance(row.get(name), list) for name in ("prompt", "completion", "chosen", "rejected"))
    prompt_of, target_of = (messages, conversation) if is_chat else (text, target)
    if "chosen" in row or "rejected" in row:  # DPO; the prompt may be part of both answers
        prompt = {} if row.get("prompt") is None else {"prompt": prompt_of(row, "prompt")}
        chosen, rejected = (target_of(row, name) for name in ("chosen", "rejected"))
        if is_chat and not prompt and chosen[0] != rejected[0]:
            raise BadRow("no `prompt`, and `chosen` and `rejected` begin with different turns")
        return {**prompt, "chosen": chosen, "rejected": rejected}
    if "prompt" in row or "completion" in row:
        return {"prompt": prompt_of(row, "prompt"), "completion": target_of(row, "completion")}
    for column in ("messages", "conversations"):
        if column in row:
            return {"messages": conversation(row, column)}
    if "text" in row:
        return {"text": target(row, "text")}
    raise BadRow("no `prompt` and `completion`, `messages`, `text`, or `chosen` and `rejected`", fields_of(row))


# The named preparations.


class GSM8K(Preparation):
    """6,973 of GSM8K's 7,473 training problems, and 500 held out, as lm-eval's `gsm8k` task asks them (Appendix B.1).

    The target is the reference solution without its calculator annotations, with its last line `#### N`. Prompt, space
    and target make up the bytes that lm-eval's zero-shot task shows and expects.
    """

    title = "GSM8K"
    columns = ("question", "answer")
    num_eval_examples = 500
    prompt_template = "question"

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        question = text(row, "question")
        answer = without_calculator(target(row, "answer"))
        example = self.prompted({"question": question}, f" {answer}")
        return {**example, "question": question, "answer": answer}

    def identity(self, row: Mapping[str, Any]) -> str:
        return text(row, "question")


def without_calculator(answer: str) -> str:
    """Remove GSM8K's calculator annotations `<<48/2=24>>` from a solution."""
    return re.sub(r"<<[^<>]*>>", "", answer)


class Arithmetic(GSM8K):
    """Generated arithmetic word problems in GSM8K's form; the first ones are held out."""

    title = "arithmetic"
    num_eval_examples = 200
    num_train_examples = 2000
    problems = "train"

    def rows(self) -> list[Row]:
        args = self.args
        number = self.num_held_out + self.num_train
        problems = arithmetic_problems(self.problems, number, args.split_seed, args.arithmetic_steps)
        return [Row(f"problem {place}", row) for place, row in enumerate(problems, start=1)]

    def split(self, examples, orders):
        return np.arange(self.num_held_out, len(examples)), np.arange(self.num_held_out)


class ArithmeticShort(Arithmetic):
    """Problems of two or three steps, of which the tiny Ouro solves some before any fine-tuning."""

    title = "short arithmetic"
    problems = "short"


class ArithmeticPairs(Arithmetic):
    """`Arithmetic` with two answers: the right one (chosen), and one with a wrong step and all that follows it (rejected)."""

    title = "arithmetic pairs"

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        example = super().example(row)
        wrong = with_a_mistake(row["answer"], random_order(row["question"], self.args.split_seed))
        return {
            "prompt": example["prompt"],
            "chosen": example["completion"],
            "rejected": f"{self.args.target_prefix} {wrong}",
        }


class MetaMathGSM(Preparation):
    """The first 100,000 rows of MetaMathQA, in source order, that are of GSM type and below `example_token_limit`.

    500 such rows that come after them are held out: the same 500 in every run, however many rows it trains on. The prompt
    is Alpaca's (Appendix "Models, Data and Splits").
    """

    title = "MetaMath-GSM"
    columns = ("type", "query", "response")
    num_eval_examples = 500
    prompt_template = "alpaca"
    num_training_rows = 100_000

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if "GSM" not in text(row, "type"):
            raise Unwanted("type without GSM")
        question = text(row, "query")
        answer = target(row, "response")
        return {**self.prompted({"instruction": question}, answer), "question": question, "answer": answer}

    def identity(self, row: Mapping[str, Any]) -> str:
        return f"{row['query']}\n{row['response']}"

    def split(self, examples, orders):
        training, rest = np.split(self._short_examples(examples), [self.num_training_rows])
        held_out = rest[~np.isin(orders[rest], orders[training])][: self.num_held_out]
        if len(held_out) < self.num_held_out:  # not all of MetaMathQA: hold the last rows out
            training, held_out = np.split(np.concatenate([training, held_out]), [-self.num_held_out])
            training = self.without_repeats(training, orders, orders[held_out])
        return training[: self.num_train], held_out

    def _short_examples(self, examples: Dataset) -> np.ndarray:
        """Return the indices of the examples below the token limit.

        As in LoRA-Pro, what counts is the prompt, a space, and the response without an end token; of what stands between
        prompt and response, only what is trained on.
        """
        limit = self.args.example_token_limit
        prefix = self.args.target_prefix
        if limit is None:
            return np.arange(len(examples))
        prompts = [prompt.removesuffix(self.args.prompt_end) for prompt in examples["prompt"]]
        pairs = zip(prompts, examples["answer"], strict=True)
        texts = Dataset.from_dict({"text": [f"{prompt}{prefix} {answer}" for prompt, answer in pairs]})
        is_short = token_lengths(texts, self.tokenizer) <= limit  # with the end token
        self.report.drop(f"{limit} tokens or more", np.sum(~is_short))
        return np.flatnonzero(is_short)


class Tulu2(Preparation):
    """Conversations drawn from the Tulu 2 mixture, in source order; the draw depends on `split_seed` alone.

    The tokenizer needs the `tulu2` chat template, whose generation marks leave only assistant content and its end token
    to the loss.
    """

    title = "Tulu 2"
    columns = ("messages", "conversations")

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        is_sharegpt = "messages" not in row and "conversations" in row
        turns = messages(row, "conversations" if is_sharegpt else "messages")
        if not has_target(turns):
            raise Unwanted("no assistant message with content")
        return {"messages": turns}

    def identity(self, row: Mapping[str, Any]) -> str:
        turns = self.example(row)["messages"]
        return json.dumps([list(turn.values()) for turn in turns], ensure_ascii=False)

    def split(self, examples, orders):
        if not has_generation_markers(self.tokenizer.chat_template or ""):
            raise DataError("The chat template does not mark what the assistant says: set `chat_template: tulu2`.")
        # Held out from the other end, so that the draw and the held-out rows do not depend on each other's number.
        drawn, held_out = np.split(np.argsort(orders, kind="stable"), [len(orders) - self.num_held_out])
        return np.sort(drawn[: self.num_train]), np.sort(held_out)


PREPARATIONS = {
    "arithmetic": Arithmetic,
    "arithmetic_pairs": ArithmeticPairs,
    "arithmetic_short": ArithmeticShort,
    "gsm8k": GSM8K,
    "metamath_gsm": MetaMathGSM,
    "tulu2": Tulu2,
}
