"""Arithmetic word problems made on the spot: a task with several reasoning steps that needs no network.

The answers have GSM8K's form: one line of working for each step, then `#### N`. All numbers lie between 0 and 60.
"""

from __future__ import annotations

import math
import operator as operators
import zlib
from collections.abc import Mapping
from itertools import product
from random import Random
from typing import NamedTuple

from datasets import Dataset

from loopdropout_trainer.checks import check_choice


NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Noah", "Omar", "Ruth", "Sam", "Zoe")
OBJECTS = ("apples", "books", "cards", "coins", "cookies", "pens", "shells", "stamps")
CONTAINERS = ("bags", "boxes", "jars", "baskets")
LARGEST = 60
OPERATIONS = {"+": operators.add, "-": operators.sub, "*": operators.mul}

WORDING = {  # the sentences of a story: its first one, and those for each operator
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
    """What the problems of a split are like."""

    steps: tuple[int, int] = (3, 5)  # fewest and most
    start: tuple[int, int] = (2, 20)  # smallest and largest number that a problem starts from
    words: dict[str, tuple[str, ...]] | None = None  # None: the sentences of all kinds of problems that are trained on
    is_test: bool | None = None  # whether its questions are those kept for testing (`is_test_question`); None: either


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
"""`short`: problems that the tiny Ouro solves sometimes, as learning by reward needs; `easy_test`: problems that it can solve,
as `medium_test` in part and `test` hardly; `hard`: more steps than any problem that is trained on; `larger`: larger numbers;
`wording`: other sentences."""

MOST_TRAINED_STEPS = 5  # beyond them lies `hard`, whose questions are not told apart by `is_test_question`


class Step(NamedTuple):
    """One operation, `left operator right = result`."""

    left: int
    operator: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left} {self.operator} {self.right} = {self.result}"


def arithmetic_problems(split: str, num_examples: int, seed: int = 0, steps: tuple[int, int] | None = None) -> Dataset:
    """Generate word problems, as many of each number of steps, and no question twice.

    Args:
        split: a name from `SPLITS`; no question of `train` or `short`, of whatever steps, is in one that ends in `test`.
        num_examples: number of problems; more of them start with the same ones.
        seed: of the draw.
        steps: fewest and most, if other than the split's.

    Returns:
        Columns `question`, `answer` (working and `#### N`) and `num_steps`.

    Raises:
        ValueError: for another split.
    """
    check_choice("split", split, list(SPLITS))
    kind = SPLITS[split]
    fewest, most = kind.steps if steps is None else steps
    own_steps = "" if (fewest, most) == kind.steps else f"/{fewest} to {most} steps"
    rng = Random(f"arithmetic/{split}/{seed}{own_steps}")
    problems: dict[str, dict] = {}
    while len(problems) < num_examples:
        question, worked = make_problem(rng, rng.randint(fewest, most), kind)
        if kind.is_test in (None, is_test_question(question)):
            lines = [*map(str, worked), f"#### {worked[-1].result}"]
            problems[question] = {"question": question, "answer": "\n".join(lines), "num_steps": len(worked)}
    return Dataset.from_list(list(problems.values()))


def is_test_question(question: str) -> bool:
    """Say on which side a question belongs: for every seed, whichever split happens to draw it."""
    return zlib.crc32(question.encode()) % 8 == 0


def make_problem(rng: Random, num_steps: int, split: Split) -> tuple[str, list[Step]]:
    """Return the text of a problem of the given number of steps, and the steps."""
    kind = _changes if split.words is not None else rng.choice((_changes, _comparisons, _containers))
    sentences, steps = kind(rng, num_steps, split)
    return " ".join(sentences), steps


def _changes(rng: Random, num_steps: int, split: Split) -> tuple[list[str], list[Step]]:
    name, friend = rng.sample(NAMES, 2)
    what = rng.choice(OBJECTS)
    start = rng.randint(*split.start)
    words = split.words or WORDING
    steps = random_steps(rng, start, num_steps, "+-*")
    first = words["start"][0].format(name=name, number=start, what=what)
    changes = [change_sentence(rng, name, friend, what, step, words) for step in steps]
    return [first, *changes, f"How many {what} does {name} have now?"], steps


def change_sentence(rng: Random, name: str, friend: str, what: str, step: Step, words: Mapping = WORDING) -> str:
    return rng.choice(words[step.operator]).format(name=name, friend=friend, what=what, number=step.right)


def _comparisons(rng: Random, num_steps: int, split: Split) -> tuple[list[str], list[Step]]:
    people = rng.sample(NAMES, num_steps + 1)
    what = rng.choice(OBJECTS)
    start = rng.randint(*split.start)
    steps = random_steps(rng, start, num_steps, "+-*")
    sentences = [WORDING["start"][0].format(name=people[0], number=start, what=what)]
    for index, step in enumerate(steps):
        words = COMPARISONS[step.operator].format(number=step.right, what=what)
        sentences.append(f"{people[index + 1]} has {words} {people[index]}.")
    return [*sentences, f"How many {what} does {people[-1]} have?"], steps


def _containers(rng: Random, num_steps: int, split: Split) -> tuple[list[str], list[Step]]:
    name, friend = rng.sample(NAMES, 2)
    what = rng.choice(OBJECTS)
    container = rng.choice(CONTAINERS)
    smallest, _ = split.start
    counts = product(range(2, 7), range(2, 10))
    count, size = rng.choice([pair for pair in counts if math.prod(pair) >= smallest])
    first = Step(count, "*", size, count * size)
    steps = random_steps(rng, first.result, num_steps - 1, "+-")
    start = f"{name} has {count} {container} with {size} {what} each."
    changes = [change_sentence(rng, name, friend, what, step) for step in steps]
    return [start, *changes, f"How many {what} does {name} have now?"], [first, *steps]


def random_steps(rng: Random, start: int, num_steps: int, operators: str) -> list[Step]:
    """Return random steps from `start` that stay between 0 and LARGEST."""
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


def with_a_mistake(answer: str, seed: int) -> str:
    """Return a worked answer of `arithmetic_problems` with one wrong result, and every later step worked out from it."""
    rng = Random(f"arithmetic/mistake/{seed}")
    *working, _ = answer.splitlines()  # left operator right = result
    wrong_line = rng.randrange(len(working))
    mistake = rng.choice((-2, -1, 1, 2))
    lines = []
    value = int(working[0].split()[0])
    for number, line in enumerate(working):
        _, operator, right, *_ = line.split()
        result = OPERATIONS[operator](value, int(right))
        if number == wrong_line:
            result += mistake
        lines.append(f"{value} {operator} {right} = {result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])
