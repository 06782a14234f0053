"""Generated arithmetic word problems: a task with several reasoning steps that needs no network.

The answers have GSM8K's form, with one line for each step and `#### N` at the end. All numbers are between 0 and 60.
"""

from __future__ import annotations

import math
import operator as operators
import zlib
from collections.abc import Mapping
from itertools import product
from random import Random
from typing import TYPE_CHECKING, NamedTuple


if TYPE_CHECKING:
    from datasets import Dataset

NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Noah", "Omar", "Ruth", "Sam", "Zoe")
OBJECTS = ("apples", "books", "cards", "coins", "cookies", "pens", "shells", "stamps")
CONTAINERS = ("bags", "boxes", "jars", "baskets")
LARGEST = 60
OPERATIONS = {"+": operators.add, "-": operators.sub, "*": operators.mul}

WORDING = {  # the first sentence of a story, and the sentences for each operator
    "start": ("{name} has {number} {what}.",),
    "+": (
        "{name} finds {number} more {what}.",
        "{name} buys {number} {what}.",
        "{friend} gives {name} {number} {what}.",
    ),
    "-": ("{name} loses {number} {what}.", "{name} gives {friend} {number} {what}.", "{name} sells {number} {what}."),
    "*": ("Then {name} gets {number} times as many.",),
}
COMPARISONS = {
    "+": "{number} more {what} than",
    "-": "{number} fewer {what} than",
    "*": "{number} times as many {what} as",
}
OTHER_WORDING = {
    "start": ("At first {name} keeps {number} {what}.",),
    "+": ("{number} {what} arrive for {name}.", "{friend} adds {number} {what} to those of {name}."),
    "-": ("{number} {what} of {name} break.", "{friend} takes {number} {what} from {name}."),
    "*": ("{name} then makes it {number} times the number.",),
}


class Split(NamedTuple):
    """A kind of problems.

    Attributes:
        steps: Fewest and most steps.
        start: Smallest and largest number that a problem starts from.
        words: Sentences. Default: the sentences of all kinds of training problems.
        is_test: Whether the questions are test questions (`is_test_question`). Default: both.
    """

    steps: tuple[int, int] = (3, 5)
    start: tuple[int, int] = (2, 20)
    words: dict[str, tuple[str, ...]] | None = None
    is_test: bool | None = None


SPLITS = {
    "train": Split(is_test=False),
    "short": Split(steps=(2, 3), is_test=False),
    "test": Split(is_test=True),
    "easy_test": Split(steps=(1, 3), is_test=True),
    "medium_test": Split(steps=(2, 4), is_test=True),
    "hard": Split(steps=(6, 7)),
    "larger": Split(start=(21, 40)),
    "wording": Split(words=OTHER_WORDING),
}
"""Splits by name. The tiny Ouro solves some problems of `short`, as learning by reward needs, most of `easy_test`, some of
`medium_test` and few of `test`. The problems of `hard` have more steps than the training problems, `larger` has larger
numbers, and `wording` has other sentences."""


class Step(NamedTuple):
    """An operation, `left operator right = result`."""

    left: int
    operator: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left} {self.operator} {self.right} = {self.result}"


def arithmetic_problems(split: str, num_examples: int, seed: int = 0, steps: tuple[int, int] | None = None) -> Dataset:
    """Generate word problems without repeated questions.

    Args:
        split: Name from `SPLITS`. No question of `train` or `short` is in a split whose name ends in `test`.
        num_examples: Number of problems. A larger number starts with the same problems.
        seed: Seed of the draw.
        steps: Fewest and most steps. Default: the split's.

    Returns:
        Columns `question`, `answer` (steps and `#### N`) and `num_steps`.
    """
    from datasets import Dataset

    kind = SPLITS[split]
    fewest, most = steps or kind.steps
    own_steps = "" if (fewest, most) == kind.steps else f"/{fewest} to {most} steps"
    rng = Random(f"arithmetic/{split}/{seed}{own_steps}")
    problems: dict[str, dict] = {}
    while len(problems) < num_examples:
        question, solution = make_problem(rng, rng.randint(fewest, most), kind)
        if kind.is_test in (None, is_test_question(question)):
            lines = [*map(str, solution), f"#### {solution[-1].result}"]
            problems[question] = {"question": question, "answer": "\n".join(lines), "num_steps": len(solution)}
    return Dataset.from_list(list(problems.values()))


def is_test_question(question: str) -> bool:
    """Return whether a question is a test question. The answer depends on its text alone, not on seed or split."""
    return zlib.crc32(question.encode()) % 8 == 0


def make_problem(rng: Random, num_steps: int, split: Split) -> tuple[str, list[Step]]:
    """Return the question of a problem with `num_steps` steps, and the steps.

    A problem tells how the objects of a person change, or compares each person's objects with those of the person before.
    With `containers`, the first number of the objects is a product.
    """
    kind = "changes" if split.words is not None else rng.choice(("changes", "comparisons", "containers"))
    name, *others = people = rng.sample(NAMES, num_steps + 1 if kind == "comparisons" else 2)
    what, words = rng.choice(OBJECTS), split.words or WORDING
    first_steps, operators = [], "+-*"
    if kind == "containers":
        container = rng.choice(CONTAINERS)
        counts = [pair for pair in product(range(2, 7), range(2, 10)) if math.prod(pair) >= split.start[0]]
        count, size = rng.choice(counts)
        number = count * size
        start = f"{name} has {count} {container} with {size} {what} each."
        first_steps, operators = [Step(count, "*", size, number)], "+-"
    else:
        number = rng.randint(*split.start)
        start = words["start"][0].format(name=name, number=number, what=what)
    steps = random_steps(rng, number, num_steps - len(first_steps), operators)
    if kind == "comparisons":
        comparisons = [COMPARISONS[step.operator].format(number=step.right, what=what) for step in steps]
        sentences = [
            f"{one} has {text} {other}." for one, text, other in zip(others, comparisons, people, strict=False)
        ]
        question = f"How many {what} does {others[-1]} have?"
    else:
        sentences = [change_sentence(rng, name, others[0], what, step, words) for step in steps]
        question = f"How many {what} does {name} have now?"
    return " ".join([start, *sentences, question]), [*first_steps, *steps]


def change_sentence(rng: Random, name: str, friend: str, what: str, step: Step, words: Mapping = WORDING) -> str:
    """Return a sentence that tells a step of a story."""
    return rng.choice(words[step.operator]).format(name=name, friend=friend, what=what, number=step.right)


def random_steps(rng: Random, start: int, num_steps: int, operators: str) -> list[Step]:
    """Return random steps from `start` whose results are between 0 and `LARGEST`."""
    steps: list[Step] = []
    value = start
    for _ in range(num_steps):
        most_times = min(3, LARGEST // value) if value else 0
        largest = {"+": LARGEST - value, "-": value, "*": most_times}
        operator = rng.choice([name for name in operators if largest[name] >= 2])
        number = rng.randint(2, min(largest[operator], 9))
        result = OPERATIONS[operator](value, number)
        steps.append(Step(value, operator, number, result))
        value = result
    return steps


def add_mistake(answer: str, seed: int) -> str:
    """Return an answer of `arithmetic_problems` with a wrong result in one step. The later steps continue from it."""
    rng = Random(f"arithmetic/mistake/{seed}")
    *steps, _ = answer.splitlines()
    wrong_step = rng.randrange(len(steps))
    mistake = rng.choice((-2, -1, 1, 2))
    value = int(steps[0].split()[0])
    for index, step in enumerate(steps):
        _, operator, right, *_ = step.split()
        result = OPERATIONS[operator](value, int(right))
        if index == wrong_step:
            result += mistake
        steps[index] = f"{value} {operator} {right} = {result}"
        value = result
    return "\n".join([*steps, f"#### {value}"])
