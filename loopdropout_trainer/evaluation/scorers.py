"""Find the answer metrics of this package."""

from __future__ import annotations

from pathlib import Path

import evaluate


METRICS = Path(__file__).parent / "metrics"
"""Folder of the `evaluate` metrics; `evaluate.load(str(METRICS / name))` loads one."""


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Load one of this package's answer metrics: `gsm8k_strict`, `metamath_gsm8k` or `metamath_math`.

    Raises:
        ValueError: for another name.
    """
    if not (METRICS / name / f"{name}.py").is_file():
        valid = sorted(path.parent.name for path in METRICS.glob("*/*.py") if path.stem == path.parent.name)
        raise ValueError(f"`metric` must be one of {', '.join(valid)}; got {name!r}.")
    return evaluate.load(str(METRICS / name), keep_in_memory=True)
