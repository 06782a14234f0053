"""Tulu 2 instruction tuning: a fixed draw of conversations from the mixture (Appendix "Models, Data and Splits")."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data.preparation import DataReport, Preparation, Unwanted, has_target, messages
from loopdropout_trainer.data.rows import DataError


class Tulu2(Preparation):
    """Conversations drawn from the Tulu 2 mixture, in source order; the draw depends on `split_seed` alone.

    The tokenizer needs the `tulu2` chat template, whose generation marks leave only assistant content and its end token
    to the loss.
    """

    title = "Tulu 2"
    columns = ("messages", "conversations")

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        turns = _turns(row)
        if not has_target(turns):
            raise Unwanted("no assistant message with content")
        return {"messages": turns}

    def identity(self, row: Mapping[str, Any]) -> str:
        return json.dumps([(turn["role"], turn["content"]) for turn in _turns(row)], ensure_ascii=False)

    def split(
        self, examples: Dataset, ranks: np.ndarray, tokenizer: PreTrainedTokenizerBase, report: DataReport
    ) -> tuple[np.ndarray, np.ndarray]:
        if "generation" not in (tokenizer.chat_template or ""):
            raise DataError(
                "The chat template does not mark what the assistant says: set `chat_template: tulu2` in the recipe."
            )
        order = np.argsort(ranks, kind="stable")
        num_drawn = len(order) if self.args.num_train_examples is None else self.args.num_train_examples
        num_drawn = min(num_drawn, len(order) - self.num_held_out)
        # Held out from the other end, so that the draw and the held-out rows do not depend on each other's number.
        return np.sort(order[:num_drawn]), np.sort(order[len(order) - self.num_held_out :])


def _turns(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a row, also one in ShareGPT's form."""
    return messages(row, "conversations" if "messages" not in row and "conversations" in row else "messages")
