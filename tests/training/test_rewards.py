"""Test rewards on completions with known answers."""

import re

import pytest

from helpers.files import ROOT
from loopdropout_trainer.rewards import REWARDS


CASES = [  # completion, reference, gsm8k_strict, gsm8k_format, last_number
    ("2 + 3 = 5\n#### 5", "2 + 3 = 5\n#### 5", 1, 1, 1), ("#### 1,234", "so much\n#### 1234", 1, 1, 1),
    ("#### 1234.", "#### 1,234", 1, 1, 1), ("#### 7\nQuestion: 3?", "#### 7", 1, 1, 0), ("#### 7 #### 8", "#### 8", 0, 1, 1),
    ("####7", "#### 7", 0, 0, 1), ("The answer is 7.", "#### 7", 0, 0, 1), ("The answer is 17.", "#### 7", 0, 0, 0),
    ("#### -7", "#### 7", 0, 1, 0), ("#### 7.0", "#### 7", 0, 1, 0), ("none", "#### 7", 0, 0, 0), ("", "#### 7", 0, 0, 0),
]  # fmt: skip
MATHEMATICS = [
    ("so it is \\boxed{\\frac{1}{2}}", "we get $\\boxed{0.5}$.", 1), ("\\boxed{\\frac{1}{3}}", "\\boxed{0.5}", 0),
    ("The answer is $x = 3$.", "\\boxed{3}", 1), ("I think 42", "7 * 6 = 42\n#### 42", 1), ("no idea", "\\boxed{3}", 0),
    ("I think 41", "7 * 6 = 42\n#### 42", 0), ("\\boxed{\\{1, 2\\}}", "\\boxed{\\{2, 1\\}}", 1),
]  # fmt: skip


@pytest.mark.parametrize(("column", "name"), [(2, "gsm8k_strict"), (3, "gsm8k_format"), (4, "last_number")])
def test_rewards_compare_with_reference(column, name):
    completions, references = [row[0] for row in CASES], [row[1] for row in CASES]
    got = REWARDS[name](completions=completions, answer=references, prompts=["q"] * len(CASES), completion_ids=None)
    assert got == [float(row[column]) for row in CASES]
    turns = [[{"role": "assistant", "content": text}] for text in completions]
    assert REWARDS[name](completions=turns, answer=references) == got
    assert REWARDS[name](completions=completions, answer=[None] * len(CASES)) == [None] * len(CASES)


def test_math_verify_reads_latex():
    pytest.importorskip("math_verify")
    completions, references, right = map(list, zip(*MATHEMATICS, strict=True))
    assert REWARDS["math_verify"](completions=completions, answer=references) == right


def test_pages_name_all_scorers():
    own = {name for name, reward in REWARDS.items() if reward.__module__ == "loopdropout_trainer.rewards"}
    line = re.search(r"(?s)\n- `scorer` is (.*?)\. `--import", (ROOT / "docs/evaluation.md").read_text())[1]
    assert {*re.findall("`(.*?)`", line)} == own
    table = (ROOT / "docs/reinforcement.md").read_text().partition("| reward |")[2].partition("\n\n")[0]
    assert {*re.findall("(?m)^. `(.*?)`", table)} == own
