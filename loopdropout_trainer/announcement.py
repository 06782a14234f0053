"""One line at once when a command of this package starts: importing torch, transformers and TRL takes seconds.

The package imports this module before any other. In a program of the user's own it says nothing.
"""

import os
import sys
from pathlib import Path


_package, _program = Path(__file__).parent, Path(sys.argv[0])
_is_script = _program.resolve().parent in (_package / "recipes", _package.parent / "recipes")
if (_is_script or _program.stem in ("loopdropout", "-m")) and os.environ.get("RANK", "0") == "0":
    print("Loading ...", file=sys.stderr, flush=True)
