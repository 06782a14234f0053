"""The references' scorers as `evaluate` metrics, one file each: `evaluate.load(str(METRICS / "NAME.py"))` loads one.

The folder of a running script comes first on `sys.path`, and scripts are called `evaluate.py`: the library is imported
here, around them.
"""

import sys
from pathlib import Path


METRICS = Path(__file__).parent

_path = sys.path
sys.path = [folder for folder in _path if not Path(folder, "evaluate.py").is_file()]
try:
    import evaluate  # noqa: F401
finally:
    sys.path = _path
