"""MetaMath-GSM-100k: the GSM part of MetaMathQA under the Alpaca template (Appendix "Models, Data and Splits")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data.preparation import DataReport, Preparation, Unwanted, target, text


class MetaMathGSM(Preparation):
    """The first 100,000 rows of MetaMathQA, in source order, that are of GSM type and shorter than 512 tokens.

    500 such rows that come after them are held out: the same 500 in every run, however many rows it trains on.
    """

    title = "MetaMath-GSM"
    num_eval_examples = 500
    prompt_template = "alpaca"
    columns = ("type", "query", "response")
    prompt_columns = ("instruction",)
    num_training_rows = 100_000
    token_limit = 512

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if "GSM" not in text(row, "type"):
            raise Unwanted("type without GSM")
        question, answer = text(row, "query"), target(row, "response")
        return {**self.prompted({"instruction": question}, answer), "question": question, "answer": answer}

    def identity(self, row: Mapping[str, Any]) -> str:
        return f"{row['query']}\n{row['response']}"

    def split(
        self, examples: Dataset, ranks: np.ndarray, tokenizer: PreTrainedTokenizerBase, report: DataReport
    ) -> tuple[np.ndarray, np.ndarray]:
        short = self._short_examples(examples, tokenizer, report)
        training = list(islice(short, self.num_training_rows))
        trained = set(ranks[training])
        held_out = list(islice((index for index in short if ranks[index] not in trained), self.num_held_out))
        if len(held_out) < self.num_held_out:  # not all of MetaMathQA: hold the last rows out
            rows = training + held_out
            training, held_out = rows[: -self.num_held_out], rows[-self.num_held_out :]
            num_training = len(training)
            training = [index for index in training if ranks[index] not in set(ranks[held_out])]
            if len(training) < num_training:
                report.dropped["repeats a held-out row"] += num_training - len(training)
        return np.array(training[: self.args.num_train_examples], dtype=int), np.array(held_out, dtype=int)

    def _short_examples(
        self, examples: Dataset, tokenizer: PreTrainedTokenizerBase, report: DataReport, batch_size: int = 1024
    ) -> Iterator[int]:
        """Yield the indices of the examples below the token limit, tokenising only as many as are asked for.

        As in LoRA-Pro, what counts is the prompt, a space, and the response without an end token.
        """
        for start in tqdm(range(0, len(examples), batch_size), "Counting tokens", unit="batch", disable=None):
            batch = examples[start : start + batch_size]
            prompts = [prompt[: len(prompt) - len(self.args.prompt_end)] for prompt in batch["prompt"]]
            texts = [f"{prompt} {response}" for prompt, response in zip(prompts, batch["completion"], strict=True)]
            for index, ids in enumerate(tokenizer(texts, verbose=False)["input_ids"], start=start):
                if len(ids) < self.token_limit:
                    yield index
                else:
                    report.dropped[f"{self.token_limit} tokens or more"] += 1
