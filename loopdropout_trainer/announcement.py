"""One line at once when a command of this package starts: importing torch, transformers and TRL takes seconds.

The package imports this module before any other. In a program of the user's own it says nothing.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path


_PACKAGE = Path(__file__).parent
_LIBRARIES = {"report": "pandas and plotnine"}  # the others train, or load what was trained


def announce(script: Path) -> None:
    """Say, in the first of several launched processes, which libraries a script of the recipes folder loads.

    Until the script runs, no garbage is collected: imports make hundreds of thousands of objects and drop none. Looking for
    garbage takes a sixth of their time.
    """
    gc.disable()  # `run_command` turns it on again
    if os.environ.get("RANK", "0") == "0":
        libraries = _LIBRARIES.get(script.stem, "PyTorch, transformers and TRL")
        print(f"Loading {libraries} ...", file=sys.stderr, flush=True)


_program = Path(sys.argv[0])
_is_script = _program.resolve().parent in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes")
_is_module = {"loopdropout_trainer.data", "loopdropout_trainer.lm_eval"} & {*sys.orig_argv}
if _is_script or _is_module:  # the command `loopdropout` does it when it has found its script
    announce(_program)
