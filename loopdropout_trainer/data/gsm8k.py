"""GSM8K and other questions with worked answers: prompts as lm-eval's `gsm8k` task asks them (Appendix B.1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from loopdropout_trainer.data.arithmetic import arithmetic_problems, with_a_mistake
from loopdropout_trainer.data.preparation import Preparation, random_order, target, text
from loopdropout_trainer.data.rows import Row


class GSM8K(Preparation):
    """6,973 of GSM8K's 7,473 training problems, and 500 held out.

    The target is the reference solution without its calculator annotations, with its last line `#### N`. Prompt, space
    and target make up the bytes that lm-eval's zero-shot task shows and expects.
    """

    title = "GSM8K"
    num_eval_examples = 500
    prompt_template = "question"
    columns = ("question", "answer")
    prompt_columns = ("question",)

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        question, answer = text(row, "question"), without_calculator(target(row, "answer"))
        example = self.prompted({"question": question}, f" {answer}")
        return {**example, "question": question, "answer": answer}

    def identity(self, row: Mapping[str, Any]) -> str:
        return text(row, "question")


class Arithmetic(GSM8K):
    """Generated arithmetic word problems in GSM8K's form; the first ones are held out."""

    title = "arithmetic"
    num_eval_examples = 200
    num_train_examples = 2000
    problems = "train"

    def rows(self) -> list[Row]:
        num_train = self.args.num_train_examples
        num_train = self.num_train_examples if num_train is None else num_train
        problems = arithmetic_problems(
            self.problems, self.num_held_out + num_train, self.args.split_seed, self.args.arithmetic_steps
        )
        return [Row(f"problem {number}", row) for number, row in enumerate(problems, start=1)]

    def split(self, examples, ranks, tokenizer, report):
        indices = np.arange(len(examples))
        return indices[self.num_held_out :], indices[: self.num_held_out]


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


def without_calculator(answer: str) -> str:
    """Remove GSM8K's calculator annotations `<<48/2=24>>` from a solution."""
    return re.sub(r"<<[^<>]*>>", "", answer)
