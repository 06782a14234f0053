"""The start of a program: what is imported late, and the first line of a command, since importing torch takes seconds.

`import loopdropout_trainer` and the light commands wait for neither torch nor transformers: public names are imported when
they are first asked for, and the model families register with transformers' Auto classes as soon as transformers is there,
whoever imports it. The package imports this module before any other. In a program of the user's own it says nothing.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, util
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


_PACKAGE = Path(__file__).parent
_LIBRARIES = {"report": "pandas and plotnine"}  # of a command; the others train, or load what was trained


def late_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose public names are imported when they are asked for.

    Args:
        package: its `__name__`.
        modules: the modules below the package, each with the names that it defines, separated by spaces.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next time it is found without this function
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return __getattr__, __dir__, sorted(homes)


def import_with_transformers(module: str) -> None:
    """Import a module now if transformers is there, else at the end of the first `import transformers`."""
    if "transformers" in sys.modules:
        import_module(module)
    else:
        sys.meta_path.insert(0, _AfterTransformers(module))


class _AfterTransformers(MetaPathFinder):
    """Finds transformers as the other finders do, and has a module imported after it."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers":
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(name)
        sys.meta_path.insert(0, self)  # somebody may only ask whether transformers is installed
        if spec is None or spec.loader is None:
            return spec
        run_transformers = spec.loader.exec_module

        def run_both(transformers: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run_transformers(transformers)
            import_module(self.module)

        spec.loader.exec_module = run_both
        return spec


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
