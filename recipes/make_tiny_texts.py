"""Texts to pretrain the tiny models on: the language of `loopdropout_trainer.arithmetic` in shorter problems and other forms.

Fine-tuning can then teach longer chains of steps and the form of the answers.
"""

from __future__ import annotations

from random import Random

from loopdropout_trainer.arithmetic import (
    LARGEST,
    NAMES,
    OBJECTS,
    OTHER_WORDING,
    WORDING,
    Split,
    Step,
    change_sentence,
    is_test_question,
    make_problem,
    random_steps,
)


def pretraining_texts(num_texts: int, seed: int = 0) -> list[str]:
    """Generate texts of a related distribution.

    - Questions of 1 to 3 steps with a solution in one of 36 styles, or with the answer alone. No style is the task's own.
    - Stories, also in the other wording, that state the new number after each sentence.
    - Sums under a heading, and chains of sums that end with `#### N`.

    No answer to a question ends with `#### N`, and no question is a test question.
    """
    rng = Random(f"arithmetic/pretrain/{seed}")
    kinds = (_worked_answer, _short_answer, _story, _sums, _chain)
    return [rng.choices(kinds, weights=(55, 20, 10, 8, 7))[0](rng) for _ in range(num_texts)]


_STEP_STYLES = (
    "{0.left} {0.operator} {0.right} = {0.result}",
    "{0.left} {0.operator} {0.right} is {0.result}",
    "{0.left} {word} {0.right} is {0.result}",
)
_WORDS = {"+": "plus", "-": "minus", "*": "times"}
_SEPARATORS = ("\n", ". ", ", then ")
_ENDINGS = ("The answer is {}.", "So the answer is {}.", "Answer: {}", "{} in all.")


def _worked_answer(rng: Random) -> str:
    question, steps = _pretraining_problem(rng, 3)
    style, separator, ending = rng.choice(_STEP_STYLES), rng.choice(_SEPARATORS), rng.choice(_ENDINGS)
    working = separator.join(style.format(step, word=_WORDS[step.operator]) for step in steps)
    before_ending = "\n" if separator == "\n" else ". "
    return f"Question: {question}\nAnswer: {working}{before_ending}{ending.format(steps[-1].result)}"


def _short_answer(rng: Random) -> str:
    question, steps = _pretraining_problem(rng, 2)
    return f"Question: {question}\nAnswer: The answer is {steps[-1].result}."


def _pretraining_problem(rng: Random, most_steps: int) -> tuple[str, list[Step]]:
    """Return a short problem that is not a test problem."""
    while True:
        question, steps = make_problem(rng, rng.randint(1, most_steps), Split())
        if not is_test_question(question):
            return question, steps


def _story(rng: Random) -> str:
    name, friend = rng.sample(NAMES, 2)
    what = rng.choice(OBJECTS)
    start = rng.randint(2, 40)
    words = rng.choice((WORDING, OTHER_WORDING))
    sentences = [words["start"][0].format(name=name, number=start, what=what)]
    for step in random_steps(rng, start, rng.randint(2, 4), "+-*"):
        sentences += [change_sentence(rng, name, friend, what, step, words), f"Now {name} has {step.result} {what}."]
    return " ".join(sentences)


def _sums(rng: Random) -> str:
    sums = [random_steps(rng, rng.randint(0, LARGEST), 1, "+-*")[0] for _ in range(rng.randint(3, 6))]
    for _ in range(2):
        left, right = rng.randint(2, 6), rng.randint(2, 9)
        sums.append(Step(left, "*", right, left * right))
    rng.shuffle(sums)
    return "\n".join(["#### Sums", *map(str, sums)])


def _chain(rng: Random) -> str:
    steps = random_steps(rng, rng.randint(0, LARGEST), rng.randint(1, 4), "+-*")
    return "\n".join(map(str, steps)) + f"\n#### {steps[-1].result}"
