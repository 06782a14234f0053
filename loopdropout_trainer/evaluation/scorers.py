"""Find the answer metrics of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopdropout_trainer.evaluation.metrics import METRICS, evaluate


if TYPE_CHECKING:
    from evaluate import EvaluationModule


def load_metric(name: str) -> EvaluationModule:
    """Load one of this package's answer metrics: `gsm8k_strict`, `metamath_gsm8k` or `metamath_math`.

    Raises:
        ValueError: for another name.
    """
    if not (METRICS / name / f"{name}.py").is_file():
        valid = sorted(path.parent.name for path in METRICS.glob("*/*.py") if path.stem == path.parent.name)
        raise ValueError(f"`metric` must be one of {', '.join(valid)}; got {name!r}.")
    return evaluate.load(str(METRICS / name), keep_in_memory=True)
