"""The start of a program: what is imported late, and the first line of a command, since importing torch takes seconds.

`import loopdropout_trainer` and the light commands wait for neither torch nor transformers: the model families register with
transformers' Auto classes as soon as transformers is there, whoever imports it. The package imports this module before any
other. In a program of the user's own it says nothing.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path

from wrapt import register_post_import_hook


_PACKAGE = Path(__file__).parent
_LIBRARIES = {"report": "pandas and plotnine"}  # of a command; the others train, or load what was trained


def import_with_transformers(module: str) -> None:
    """Import a module now if transformers is there, else at the end of the first `import transformers`."""
    register_post_import_hook(lambda transformers: import_module(module), "transformers")


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
