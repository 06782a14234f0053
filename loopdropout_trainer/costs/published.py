"""Published numbers: the costs in the paper and the sizes of tasks, so that a plan needs no network."""

from __future__ import annotations

from typing import NamedTuple


class PaperCost(NamedTuple):
    """The measured cost of a training in the paper, without the choice of a learning rate and without evaluation.

    Attributes:
        shortest, longest: Range of the minutes.
        gigabytes: Peak memory, or None if the paper does not give it.
        place: The device, and the part of the paper.
    """

    shortest: float
    longest: float
    gigabytes: float | None
    place: str


_H100 = "on an H100 80GB, as the paper measured (Tables 3 and 8)"
_COMPUTE = "on an H100, H200 or B200, as the paper says (section Compute)"
PAPER_COSTS = {
    "metamath_gsm.yaml": PaperCost(128.9, 128.9, 45.36, _H100),
    "metamath_gsm/lora.yaml": PaperCost(110.6, 110.6, 45.36, _H100),
    "metamath_gsm/lora_plus.yaml": PaperCost(112.8, 112.8, 45.40, _H100),
    "metamath_gsm/coto.yaml": PaperCost(94.1, 94.1, 45.28, _H100),
    "metamath_gsm/lora_dropout.yaml": PaperCost(444.9, 444.9, 45.37, _H100),
    "gsm8k.yaml": PaperCost(12, 14, None, _COMPUTE),
    "gsm8k/lora.yaml": PaperCost(12, 14, None, _COMPUTE),
    "gsm8k/ouro_2.6b.yaml": PaperCost(25, 32, None, _COMPUTE),
}
"""Costs by the name of the recipe in the package."""


class PublishedTask(NamedTuple):
    """The size of a task.

    Attributes:
        num_problems: Number of problems.
        max_new_tokens: Largest number of tokens of an answer, or 0 if the task compares log-likelihoods.
        num_parts: Number of tasks in a group.
        runs_programs: Whether the answers are programs, which need a sandbox.
    """

    num_problems: int
    max_new_tokens: int
    num_parts: int = 1
    runs_programs: bool = False


PUBLISHED_TASKS = {
    "gsm8k": PublishedTask(1319, 256),
    "gsm8k_platinum": PublishedTask(1209, 256),
    "gsm_plus_mini": PublishedTask(2400, 256),
    "metamath_gsm8k": PublishedTask(1319, 512),
    "metamath_math500": PublishedTask(500, 2048),
    "humaneval": PublishedTask(164, 1024, runs_programs=True),
    "humaneval_plus": PublishedTask(164, 1024, runs_programs=True),
    "mbpp": PublishedTask(378, 1024, runs_programs=True),
    "mbpp_plus": PublishedTask(378, 1024, runs_programs=True),
    "ifeval_strict": PublishedTask(541, 2048),
    "ifeval_loose": PublishedTask(541, 2048),
    "mmlu": PublishedTask(14042, 0, num_parts=57),
    "bbh": PublishedTask(6511, 1024, num_parts=27),
    "truthfulqa_mc2": PublishedTask(817, 0),
    "arithmetic_easy_test": PublishedTask(500, 80),
    "arithmetic_medium_test": PublishedTask(500, 80),
    "arithmetic_test": PublishedTask(500, 80),
    "arithmetic_hard": PublishedTask(500, 80),
    "arithmetic_larger": PublishedTask(500, 80),
    "arithmetic_wording": PublishedTask(500, 80),
}
"""Sizes of the tasks of the package and of the paper, by their names."""
