"""Versions of Python and of the libraries that numbers depend on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


LIBRARIES = (
    *("loopdropout-trainer", "torch", "transformers", "trl", "peft", "accelerate"),
    *("datasets", "evaluate", "tokenizers", "lm-eval", "evalplus"),
)


def library_versions() -> dict[str, str | None]:
    """Return the version of Python and of each library; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions
