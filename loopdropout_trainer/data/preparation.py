"""What a data preparation is: from a raw row to an example, and from all examples to training and held-out ones.

`Preparation` itself takes rows that are in one of TRL's formats already, or makes them with a prompt template.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data.rows import BadRow, Row, fields_of, present
from loopdropout_trainer.data.templates import PROMPT_TEMPLATES, prompt_fields, render_prompt
from loopdropout_trainer.settings.ranges import shown


if TYPE_CHECKING:
    from loopdropout_trainer.data.arguments import DataArguments


class Unwanted(Exception):
    """A sound row that the preparation leaves out; the text is the reason."""


@dataclass
class DataReport:
    """What became of the rows; `print` shows the counts as a table."""

    source: str = ""
    read: int = 0
    train: int = 0
    held_out: int = 0
    train_tokens: int = 0  # of the training examples, each counted once
    longest: int = 0  # most tokens of one of them
    unused: int = 0  # usable rows beyond the number to train on
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    bad_rows: list[str] = field(default_factory=list)  # the first few that were skipped, with their places

    def __str__(self) -> str:
        counts = {"read": self.read, "  to train on": self.train, "  held out": self.held_out}
        counts |= {"  not used": self.unused} if self.unused else {}
        counts |= {f"  dropped: {reason}": count for reason, count in sorted(self.dropped.items())}
        width = max(map(len, counts))
        lines = [f"{name:<{width}} {count:>11,}" for name, count in counts.items()]
        return "\n".join([f"Rows of {self.source}", *lines, *(f"    {bad}" for bad in self.bad_rows)])


class Preparation:
    """Makes examples from rows; a subclass for each named preparation says what differs.

    An example has `prompt` and `completion`, or `messages`, or `text`. Subclasses may add the columns `question` and
    `answer`, which evaluation on held-out rows needs.

    Class attributes:
        title: for reports and model cards.
        num_eval_examples, prompt_template: where the settings do not say.

    Raises:
        ValueError: if `prompt_template` names no column.
    """

    title: ClassVar[str] = ""
    num_eval_examples: ClassVar[int] = 0
    prompt_template: ClassVar[str | None] = None

    def __init__(self, args: DataArguments) -> None:
        self.args = args
        self.num_held_out = self.num_eval_examples if args.num_eval_examples is None else args.num_eval_examples
        if args.eval_files:
            self.num_held_out = 0
        self.template = self.prompt_template if args.prompt_template is None else args.prompt_template
        if self.template is not None and not prompt_fields(self.template):  # the same prompt for every row
            valid = f"{', '.join(PROMPT_TEMPLATES)}, or a text with fields such as {{column}}"
            raise ValueError(f"`prompt_template` must be {valid}; got {shown(self.template)}.")

    def rows(self) -> list[Row] | None:
        """Return generated rows, for a preparation that reads none."""
        return None

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the example that a row gives; BadRow if it gives none, Unwanted if it is left out on purpose."""
        return standard_example(row) if self.template is None else self.prompted(row, target(row, "completion"))

    def prompted(self, columns: Mapping[str, Any], completion: str) -> dict[str, Any]:
        """Return the example whose prompt is the template filled from these columns."""
        return {"prompt": render_prompt(self.template, columns) + self.args.prompt_end, "completion": completion}

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return what makes two rows the same row, wherever they stand in the source."""
        return json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)

    def split(
        self, examples: Dataset, ranks: np.ndarray, tokenizer: PreTrainedTokenizerBase, report: DataReport
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return indices of training and of held-out examples, in source order, before any is dropped for its length.

        Rows with the smallest ranks are held out, so that the choice depends on the rows and `split_seed` alone: not on
        their order, the training seed, or the model. Repetitions of a held-out row are not trained on.

        Args:
            examples, ranks: all N examples in source order; random numbers [N], of a row's identity and `split_seed`.
            report: to note dropped examples.
        """
        distinct, first = np.unique(ranks, return_index=True)
        held_out = np.sort(first[: self.num_held_out])
        rest = np.flatnonzero(~np.isin(ranks, distinct[: self.num_held_out]))
        repeated = len(ranks) - len(rest) - len(held_out)
        report.dropped += Counter({"repeats a held-out row": repeated})
        return rest[: self.args.num_train_examples], held_out


def random_order(identity: str, seed: int) -> int:
    """Return a number in [0, 2^63) that depends on nothing but a row's identity and the seed."""
    digest = hashlib.blake2b(f"{seed}\n{identity}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# Columns of a row, checked; each raises BadRow.


def text(row: Mapping[str, Any], column: str) -> str:
    """Return a text column of a row."""
    value = present(row, column)
    if not isinstance(value, str):
        raise BadRow(f"field `{column}` is not text", f" (a {type(value).__name__})")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"field `{column}` is not valid Unicode") from None
    return value


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
    found = []
    for index, turn in enumerate(turns):
        if turn.get("tool_calls"):
            raise BadRow("tool calls are not supported", f" (in {column}[{index}])")
        if "from" in turn and "role" not in turn:
            turn = {"role": turn["from"], "content": turn.get("value")}
        try:
            role, content = text(turn, "role"), text(turn, "content")
        except BadRow as error:
            raise BadRow(f"{error.kind} in a message", f" ({column}[{index}])") from None
        role = {"human": "user", "gpt": "assistant"}.get(role, role)
        if role not in ("system", "user", "assistant"):
            raise BadRow("a role is not system, user or assistant", f" ({role!r} in {column}[{index}])")
        found.append({"role": role, "content": content})
    return found


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
        return {**prompt, **{name: target_of(row, name) for name in ("chosen", "rejected")}}
    if "prompt" in row or "completion" in row:
        return {"prompt": prompt_of(row, "prompt"), "completion": target_of(row, "completion")}
    for column in ("messages", "conversations"):
        if column in row:
            return {"messages": conversation(row, column)}
    if "text" in row:
        return {"text": target(row, "text")}
    raise BadRow("no `prompt` and `completion`, `messages`, `text`, or `chosen` and `rejected`", fields_of(row))
