"""Generated arithmetic problems: their numbers, their splits, and answers with a mistake."""

import hashlib
import json
import runpy
from collections import Counter

import pytest

from helpers.files import ROOT
from loopdropout_trainer.arithmetic import add_mistake, arithmetic_problems


TEST_SPLITS = {"easy_test": (1, 3), "medium_test": (2, 4), "test": (3, 5)}


def test_problems_keep_their_bytes():
    splits = ("train", "short", "test", "hard", "larger", "wording")
    text = json.dumps([arithmetic_problems(split, 200, seed).to_list() for split in splits for seed in (0, 3)])
    text += json.dumps(runpy.run_path(str(ROOT / "docs/replication/make_tiny_base.py"))["pretraining_texts"](200))
    expected = "a7c1226f9b1d89c662948e54c02d702cc2f707b1af870cd7b492b6442ab3d801"
    assert hashlib.sha256(text.encode()).hexdigest() == expected


@pytest.mark.parametrize("steps", TEST_SPLITS.values())
def test_training_problems_are_balanced_and_not_tested(steps):
    problems = arithmetic_problems("train", 1500, steps=steps)
    questions, counts = problems["question"][:], Counter(problems["num_steps"])
    assert len({*questions}) == 1500
    assert {*counts} == {*range(steps[0], steps[1] + 1)} and min(counts.values()) > 430  # 500 on average
    assert arithmetic_problems("train", 30, steps=steps)["question"][:] == questions[:30]
    for split, limits in TEST_SPLITS.items():
        test = arithmetic_problems(split, 500)
        assert (min(test["num_steps"]), max(test["num_steps"])) == limits
        assert {*test["question"]}.isdisjoint(questions)


def test_mistake_changes_one_step_and_the_answer():
    for seed, answer in enumerate(arithmetic_problems("train", 50)["answer"]):
        wrong = add_mistake(answer, seed)
        assert wrong == add_mistake(answer, seed) != answer
        *steps, final = wrong.splitlines()
        assert sum(eval(step.replace("=", "!=")) for step in steps) == 1
        results = [step.split()[-1] for step in steps]
        assert [step.split()[0] for step in steps[1:]] == results[:-1] and final == f"#### {results[-1]}"
