"""The named preparations: which rows of a data set become which examples, and which are held out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm

from loopdropout_trainer.data.arithmetic import arithmetic_problems, with_a_mistake
from loopdropout_trainer.data.preparation import (
    DataReport,
    Preparation,
    Unwanted,
    has_target,
    messages,
    random_order,
    target,
    text,
)
from loopdropout_trainer.data.rows import DataError, Row


class GSM8K(Preparation):
    """6,973 of GSM8K's 7,473 training problems, and 500 held out, as lm-eval's `gsm8k` task asks them (Appendix B.1).

    The target is the reference solution without its calculator annotations, with its last line `#### N`. Prompt, space
    and target make up the bytes that lm-eval's zero-shot task shows and expects.
    """

    title = "GSM8K"
    num_eval_examples = 500
    prompt_template = "question"

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        question, answer = text(row, "question"), without_calculator(target(row, "answer"))
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
        num_train = self.num_train_examples if args.num_train_examples is None else args.num_train_examples
        number = self.num_held_out + num_train
        problems = arithmetic_problems(self.problems, number, args.split_seed, args.arithmetic_steps)
        return [Row(f"problem {place}", row) for place, row in enumerate(problems, start=1)]

    def split(self, examples, ranks, tokenizer, report):
        return np.arange(self.num_held_out, len(examples)), np.arange(self.num_held_out)


class ArithmeticShort(Arithmetic):
    """Problems of two or three steps, of which the tiny Ouro solves some before any fine-tuning."""

    title = "short arithmetic"
    problems = "short"


class ArithmeticPairs(Arithmetic):
    """The same problems, each with its answer (chosen) and one in which a step is wrong, with all that follows (rejected)."""

    title = "arithmetic pairs"

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        example = super().example(row)
        wrong = with_a_mistake(row["answer"], random_order(row["question"], self.args.split_seed))
        return {"prompt": example["prompt"], "chosen": example["completion"], "rejected": f" {wrong}"}


class MetaMathGSM(Preparation):
    """The first 100,000 rows of MetaMathQA, in source order, that are of GSM type and shorter than 512 tokens.

    500 such rows that come after them are held out: the same 500 in every run, however many rows it trains on. The prompt
    is Alpaca's (Appendix "Models, Data and Splits").
    """

    title = "MetaMath-GSM"
    num_eval_examples = 500
    prompt_template = "alpaca"
    num_training_rows = 100_000
    token_limit = 512

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if "GSM" not in text(row, "type"):
            raise Unwanted("type without GSM")
        question, answer = text(row, "query"), target(row, "response")
        return {**self.prompted({"instruction": question}, answer), "question": question, "answer": answer}

    def identity(self, row: Mapping[str, Any]) -> str:
        return f"{row['query']}\n{row['response']}"

    def split(self, examples, ranks, tokenizer, report):
        short = self._short_examples(examples, tokenizer, report)
        training = list(islice(short, self.num_training_rows))
        trained = set(ranks[training])
        held_out = list(islice((index for index in short if ranks[index] not in trained), self.num_held_out))
        if len(held_out) < self.num_held_out:  # not all of MetaMathQA: hold the last rows out
            rows = training + held_out
            training, held_out = rows[: -self.num_held_out], rows[-self.num_held_out :]
            repeated = set(ranks[held_out])
            report.dropped["repeats a held-out row"] += sum(ranks[index] in repeated for index in training)
            training = [index for index in training if ranks[index] not in repeated]
        return np.array(training[: self.args.num_train_examples], dtype=int), np.array(held_out, dtype=int)

    def _short_examples(self, examples: Dataset, tokenizer, report: DataReport) -> Iterator[int]:
        """Yield the indices of the examples below the token limit, tokenising only as many as are asked for.

        As in LoRA-Pro, what counts is the prompt, a space, and the response without an end token.
        """
        for start in tqdm(range(0, len(examples), 1024), "Counting tokens", unit="batch", disable=None):
            batch = examples[start : start + 1024]
            prompts = [prompt[: len(prompt) - len(self.args.prompt_end)] for prompt in batch["prompt"]]
            texts = [f"{prompt} {response}" for prompt, response in zip(prompts, batch["completion"], strict=True)]
            for index, ids in enumerate(tokenizer(texts, verbose=False)["input_ids"], start=start):
                if len(ids) < self.token_limit:
                    yield index
                else:
                    report.dropped[f"{self.token_limit} tokens or more"] += 1


class Tulu2(Preparation):
    """Conversations drawn from the Tulu 2 mixture, in source order; the draw depends on `split_seed` alone.

    The tokenizer needs the `tulu2` chat template, whose generation marks leave only assistant content and its end token
    to the loss.
    """

    title = "Tulu 2"

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        turns = messages(row, "conversations" if "messages" not in row and "conversations" in row else "messages")
        if not has_target(turns):
            raise Unwanted("no assistant message with content")
        return {"messages": turns}

    def identity(self, row: Mapping[str, Any]) -> str:
        turns = self.example(row)["messages"]
        return json.dumps([(turn["role"], turn["content"]) for turn in turns], ensure_ascii=False)

    def split(self, examples, ranks, tokenizer, report):
        if "generation" not in (tokenizer.chat_template or ""):
            raise DataError("The chat template does not mark what the assistant says: set `chat_template: tulu2`.")
        order, num_drawn = np.argsort(ranks, kind="stable"), self.args.num_train_examples
        num_left = len(order) - self.num_held_out
        # Held out from the other end, so that the draw and the held-out rows do not depend on each other's number.
        return np.sort(order[: num_left if num_drawn is None else min(num_drawn, num_left)]), np.sort(order[num_left:])


PREPARATIONS = {
    "arithmetic": Arithmetic,
    "arithmetic_pairs": ArithmeticPairs,
    "arithmetic_short": ArithmeticShort,
    "gsm8k": GSM8K,
    "metamath_gsm": MetaMathGSM,
    "tulu2": Tulu2,
}
