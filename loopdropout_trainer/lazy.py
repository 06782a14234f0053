"""Importing late: `import loopdropout_trainer` and the light commands wait for neither torch nor transformers.

A package's public names are imported when they are first asked for. The model families register with transformers' Auto
classes as soon as transformers is there, whoever imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


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
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            run_transformers = spec.loader.exec_module

            def run_both(transformers: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                run_transformers(transformers)
                import_module(self.module)

            spec.loader.exec_module = run_both
        return spec
