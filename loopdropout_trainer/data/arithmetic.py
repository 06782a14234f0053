"""Arithmetic word problems made on the spot: a task with several reasoning steps that needs no network.

The answers have GSM8K's form: one line of working for each step, then `#### N`. All numbers lie between 0 and 60.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random

from datasets import Dataset


NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Noah", "Omar", "Ruth", "Sam", "Zoe")
OBJECTS = ("apples", "books", "cards", "coins", "cookies", "pens", "shells", "stamps")
CONTAINERS = ("bags", "boxes", "jars", "baskets")
LARGEST = 60
STEPS = {"train": (2, 3), "test": (2, 3), "hard": (4, 5), "pretrain": (1, 2)}
"""Fewest and most steps of a split's problems; `hard` has more than any problem that is trained on."""


@dataclass(frozen=True)
class Step:
    """One operation, `left operator right = result`."""

    left: int
    operator: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left} {self.operator} {self.right} = {self.result}"


def arithmetic_problems(split: str, num_examples: int, seed: int = 0) -> Dataset:
    """Generate word problems.

    Args:
        split: `train` and `test` (2 to 3 steps, no question in both), or `hard` (4 to 5 steps, the same sentences).
        num_examples: number of problems; more of them start with the same ones.
        seed: of the draw.

    Returns:
        Columns `question`, `answer` (working and `#### N`) and `num_steps`.

    Raises:
        ValueError: for another split.
    """
    if split not in ("train", "test", "hard"):
        raise ValueError(f"`split` must be train, test or hard; got {split!r}.")
    return Dataset.from_list(_distinct(split, num_examples, seed))


def _distinct(split: str, num_examples: int, seed: int) -> list[dict]:
    rng = Random(f"arithmetic/{split}/{seed}")
    problems: dict[str, dict] = {}
    while len(problems) < num_examples:
        question, steps = _problem(rng, rng.randint(*STEPS[split]))
        # Each question belongs to one side for every seed, whichever split happens to draw it.
        is_test = zlib.crc32(question.encode()) % 8 == 0
        if split == "hard" or is_test == (split == "test"):
            answer = "\n".join(map(str, steps)) + f"\n#### {steps[-1].result}"
            problems[question] = {"question": question, "answer": answer, "num_steps": len(steps)}
    return list(problems.values())


def _problem(rng: Random, num_steps: int) -> tuple[str, list[Step]]:
    """Return the text of a problem of the given number of steps, and the steps."""
    return rng.choice((_changes, _comparisons, _containers))(rng, num_steps)


def _changes(rng: Random, num_steps: int) -> tuple[str, list[Step]]:
    name, friend = rng.sample(NAMES, 2)
    what = rng.choice(OBJECTS)
    start = rng.randint(2, 20)
    sentences = [f"{name} has {start} {what}."]
    steps = _walk(rng, start, num_steps, "+-*")
    for step in steps:
        sentences.append(_change(rng, name, friend, what, step))
    sentences.append(f"How many {what} does {name} have now?")
    return " ".join(sentences), steps


def _change(rng: Random, name: str, friend: str, what: str, step: Step) -> str:
    number = step.right
    if step.operator == "+":
        return rng.choice(
            (
                f"{name} finds {number} more {what}.",
                f"{name} buys {number} {what}.",
                f"{friend} gives {name} {number} {what}.",
            )
        )
    if step.operator == "-":
        return rng.choice(
            (
                f"{name} loses {number} {what}.",
                f"{name} gives {friend} {number} {what}.",
                f"{name} sells {number} {what}.",
            )
        )
    return f"Then {name} gets {number} times as many."


def _comparisons(rng: Random, num_steps: int) -> tuple[str, list[Step]]:
    people = rng.sample(NAMES, num_steps + 1)
    what = rng.choice(OBJECTS)
    start = rng.randint(2, 20)
    sentences = [f"{people[0]} has {start} {what}."]
    steps = _walk(rng, start, num_steps, "+-*")
    words = {"+": "{n} more {what} than", "-": "{n} fewer {what} than", "*": "{n} times as many {what} as"}
    for before, after, step in zip(people, people[1:], steps, strict=False):
        sentences.append(f"{after} has {words[step.operator].format(n=step.right, what=what)} {before}.")
    sentences.append(f"How many {what} does {people[-1]} have?")
    return " ".join(sentences), steps


def _containers(rng: Random, num_steps: int) -> tuple[str, list[Step]]:
    name, friend = rng.sample(NAMES, 2)
    what, container = rng.choice(OBJECTS), rng.choice(CONTAINERS)
    count, each = rng.randint(2, 6), rng.randint(2, 9)
    steps = [Step(count, "*", each, count * each)]
    sentences = [f"{name} has {count} {container} with {each} {what} each."]
    for step in _walk(rng, each * count, num_steps - 1, "+-"):
        sentences.append(_change(rng, name, friend, what, step))
        steps.append(step)
    sentences.append(f"How many {what} does {name} have now?")
    return " ".join(sentences), steps


def _walk(rng: Random, start: int, num_steps: int, operators: str) -> list[Step]:
    """Return random steps from `start` that stay between 0 and LARGEST."""
    steps: list[Step] = []
    value = start
    for _ in range(num_steps):
        possible = [op for op in operators if _largest(value, op) >= 2]
        operator = rng.choice(possible)
        number = rng.randint(2, min(_largest(value, operator), 9))
        result = {"+": value + number, "-": value - number, "*": value * number}[operator]
        steps.append(Step(value, operator, number, result))
        value = result
    return steps


def _largest(value: int, operator: str) -> int:
    """Return the largest second operand that keeps the result between 0 and LARGEST."""
    if operator == "+":
        return LARGEST - value
    if operator == "-":
        return value
    return min(3, LARGEST // value) if value else 0


def pretraining_texts(num_texts: int, seed: int = 0) -> list[str]:
    """Generate texts of a neighbouring distribution: the same sentences and sums in shorter problems of another form.

    Bare sums; stories that state the new number after each sentence; questions of 1 or 2 steps, answered at once or after
    working, by a sentence. No text has 3 steps of working or a `####`: that is left to fine-tuning.
    """
    rng = Random(f"arithmetic/pretrain/{seed}")
    kinds = (_sums, _story, _short_answer, _worked_answer)
    return [rng.choices(kinds, weights=(15, 20, 15, 50))[0](rng) for _ in range(num_texts)]


def _sums(rng: Random) -> str:
    sums = [_walk(rng, rng.randint(0, LARGEST), 1, "+-*")[0] for _ in range(rng.randint(3, 6))]
    for _ in range(2):
        left, right = rng.randint(2, 6), rng.randint(2, 9)
        sums.append(Step(left, "*", right, left * right))
    rng.shuffle(sums)
    return "\n".join(map(str, sums))


def _story(rng: Random) -> str:
    name, friend = rng.sample(NAMES, 2)
    what = rng.choice(OBJECTS)
    start = rng.randint(2, 20)
    sentences = [f"{name} has {start} {what}."]
    for step in _walk(rng, start, rng.randint(2, 4), "+-*"):
        sentences += [_change(rng, name, friend, what, step), f"Now {name} has {step.result} {what}."]
    return " ".join(sentences)


def _short_answer(rng: Random) -> str:
    question, steps = _training_problem(rng)
    return f"Question: {question}\nAnswer: The answer is {steps[-1].result}."


def _worked_answer(rng: Random) -> str:
    question, steps = _training_problem(rng)
    working = "\n".join(map(str, steps))
    return f"Question: {question}\nAnswer: {working}\nThe answer is {steps[-1].result}."


def _training_problem(rng: Random) -> tuple[str, list[Step]]:
    """Return a short problem that is no test problem."""
    while True:
        question, steps = _problem(rng, rng.randint(*STEPS["pretrain"]))
        if len(steps) == 1 or zlib.crc32(question.encode()) % 8:
            return question, steps
