"""Importing late, so that `--help` and a misspelt field need not wait for torch and transformers.

Settings, which scripts read first, are imported alone. Anything else of this package, and transformers itself, brings the
model families with it, which register with transformers' Auto classes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


_ALONE = ("settings", "reports", "command_line", "__main__")  # parts of the package that need no model


def late_imports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports a public name, or one of its modules, when it is first asked for.

    Args:
        package: its `__name__`.
        homes: the module of each public name, below the package.
    """

    def __getattr__(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
            setattr(sys.modules[package], name, value)
            return value
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__


def import_models_in_time(package: str) -> None:
    """Import a package's `models` before any other part that needs them, and as soon as transformers is there."""
    if "transformers" in sys.modules:
        importlib.import_module(f"{package}.models")
    else:
        sys.meta_path.insert(0, _InTime(package))


class _InTime(MetaPathFinder, Loader):
    """Waits for the first import that calls for the models; it finds nothing itself."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.transformers: Loader | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "transformers":
            sys.meta_path.remove(self)
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None:
                self.transformers, spec.loader = spec.loader, self
            return spec
        if name.startswith(f"{self.package}.") and name.split(".")[1] not in _ALONE:
            sys.meta_path.remove(self)
            importlib.import_module(f"{self.package}.models")
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.transformers.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.transformers
        self.transformers.exec_module(module)
        importlib.import_module(f"{self.package}.models")
