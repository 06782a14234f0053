"""The results that a training script writes, derived from its recipe."""

from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.settings.arguments import SFTArguments
from loopdropout_trainer.settings.recipe import build
from loopdropout_trainer.training.config import LoopDropoutConfig


TRAINING = (
    "train_loss examples trainable_parameters num_tokens train_seconds step_seconds tokens_per_second peak_memory_gb"
)
SUBJECTS = "Algebra, Counting & Probability, Geometry, Intermediate Algebra, Number Theory, Prealgebra, Precalculus"
GROUPS = {"accuracy_by_subject": SUBJECTS.split(", "), "accuracy_by_level": "12345"}
CHOICES = {"mmlu", "truthfulqa_mc2"}
"""Tasks without a completion."""


def task_rows(task, **place):
    """Results of a task at one depth and under one set of gates."""
    metrics = ["accuracy"] if task in CHOICES else ["accuracy", "missing"]
    metrics += ["last_number", "accuracy_by_num_steps"] if task.startswith("arithmetic") else []
    rows = [{"metric": metric} for metric in metrics]
    groups = GROUPS if task == "metamath_math500" else {}
    rows += [{"metric": metric, "group": group} for metric, names in groups.items() for group in names]
    return [{"task": task, **place, **row} for row in rows]


def expected_results(recipe):
    """Rows of a run on a GPU, without `value`, `n` and `step`."""
    options, args = build((SFTArguments, LoopDropoutConfig), recipe)
    title, depth = Run(options, args, recipe).title, recipe.get("num_loops", 4)
    loops = [{"gates": f"loop {loop}", "loop": loop} for loop in range(1, depth + 1)]
    base = {"method": "base model", "gates": "none", "seed": None}
    rows = [{"task": "training", "metric": metric} for metric in TRAINING.split()]
    if args.rule != "lora":
        rows[0]["gates"] = "drawn"  # of the training loss
    if args.eval_strategy != "no" and options.evaluate_base:
        rows.append({"task": "training", "metric": "eval_loss", **base})
    for task in options.benchmarks or ():
        rows += [*task_rows(task), *(task_rows(task, **base) if options.evaluate_base else ())]
    first = (options.benchmarks or [None])[0]
    for num_loops in {*(options.eval_num_loops or ())} - {depth}:
        rows += task_rows(first, num_loops=num_loops)
        rows += task_rows(first, num_loops=num_loops, **base) if options.evaluate_base else ()
    for place in loops if options.single_loop_accuracy else ():
        rows += task_rows(first, **place)
    for task in filter(None, [options.diagnose_task, "development" if options.single_loop_batches else None]):
        rows.append({"task": task, "metric": "loss", **base})
        for place in [*loops, {}]:
            rows += [{"task": task, "metric": metric, **place} for metric in ("loss", "loss_reduction")]
        for place in loops:
            readout = {"task": task, "loop": place["loop"]}
            rows += [{**readout, "metric": f"readout_{name}"} for name in ("loss", "token_accuracy")]
    return [{"method": title, "seed": args.seed, "num_loops": depth, "gates": "unit", **row} for row in rows]
