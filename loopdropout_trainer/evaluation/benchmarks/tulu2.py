"""The benchmarks of instruction tuning (Table "All downstream metrics"): knowledge, reasoning, truthfulness, instructions."""

from __future__ import annotations

import random
from typing import Any

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation.benchmarks.lm_eval_tasks import LmEvalTask


def score_ifeval(doc: dict[str, Any], responses: list[str]) -> dict[str, Any]:
    """Score a response to IFEval as the official scorer does, with scoring seed 0 for each prompt.

    Two of the prompts draw a random letter, and one of the checks guesses languages: seeded anew, a verdict does not depend
    on which prompts came before.
    """
    from langdetect import DetectorFactory
    from lm_eval.tasks.ifeval.utils import process_results

    DetectorFactory.seed = 0
    random.seed(0)
    return process_results(doc, responses)


def check_punkt() -> None:
    """Raise ValueError if IFEval's scorer lacks the data that it splits sentences by; lm-eval has tried to download it."""
    import lm_eval.tasks.ifeval.instructions_util  # noqa: F401 (which does)
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise UserError(
            "`ifeval` needs NLTK's data `punkt_tab`, which is not on this machine: get it with `python -m nltk.downloader "
            "punkt_tab`, or let NLTK_DATA name the folder that has it."
        ) from None


BENCHMARKS = {
    "mmlu": LmEvalTask(
        "mmlu", "mmlu/default", {"mmlu": "acc,none"}, num_fewshot=0, task_of=lambda row: f"mmlu_{row['subject']}"
    ),
    # Three examples are part of lm-eval's task.
    "bbh": LmEvalTask(
        "bbh_cot_fewshot",
        "bbh/cot_fewshot",
        {"bbh": "exact_match,get-answer"},
        task_of=lambda row: f"bbh_cot_fewshot_{row['task']}",
    ),
    "truthfulqa_mc2": LmEvalTask("truthfulqa_mc2", "truthfulqa", {"truthfulqa_mc2": "acc,none"}, num_fewshot=0),
    "ifeval": LmEvalTask(
        "ifeval",
        "ifeval",
        {"ifeval_strict": "prompt_level_strict_acc,none", "ifeval_loose": "prompt_level_loose_acc,none"},
        num_fewshot=0,
        generation={"max_gen_toks": 2048},
        in_turns=True,
        overrides={"process_results": score_ifeval},
        check_scorer=check_punkt,
    ),
}
