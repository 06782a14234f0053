"""The references' scorers as `evaluate` metrics, one file each: `evaluate.load(str(METRICS / "NAME.py"))` loads one.

The folder of a running script comes first on `sys.path`, and scripts are called `evaluate.py`: the library is imported
here, around them.
"""

import re
import sys
from pathlib import Path


METRICS = Path(__file__).parent

_path = sys.path
sys.path = [folder for folder in _path if not Path(folder, "evaluate.py").is_file()]
try:
    import evaluate
finally:
    sys.path = _path


_NUMBER = re.compile(r"-?\d[\d,]*")


def last_integer(text: str) -> str | None:
    """Return the last integer of a text, without its commas; None if there is none."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Load one of this package's answer metrics: `gsm8k_strict`, `metamath_gsm8k` or `metamath_math`.

    Raises:
        ValueError: for another name.
    """
    valid = sorted({path.stem for path in METRICS.glob("*.py")} - {"__init__", "answer_metric"})
    if name not in valid:
        raise ValueError(f"`metric` must be one of {', '.join(valid)}; got {name!r}.")
    return evaluate.load(str(METRICS / f"{name}.py"), keep_in_memory=True)
