"""One line at once when a command of this package starts: importing torch, transformers and TRL takes seconds.

The package imports this module before any other. In a program of the user's own it says nothing.
"""

import os
import sys
from pathlib import Path


PACKAGE = Path(__file__).parent


def is_command(program: str) -> bool:
    """Say whether the running program, `sys.argv[0]`, is a script or the command of this package."""
    path = Path(program)
    is_script = path.resolve().parent in (PACKAGE / "recipes", PACKAGE.parent / "recipes")
    return is_script or path.stem == "loopdropout" or program == "-m"  # `python -m loopdropout_trainer`


if is_command(sys.argv[0]) and os.environ.get("RANK", "0") == "0":
    print("Loading ...", file=sys.stderr, flush=True)
