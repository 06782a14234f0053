"""The versions of the libraries that a result was made with."""

import platform
from importlib.metadata import PackageNotFoundError, version


LIBRARIES = (
    *(
        "loopdropout-trainer",
        "torch",
        "transformers",
        "trl",
        "peft",
        "accelerate",
        "datasets",
        "evaluate",
        "tokenizers",
    ),
    *("lm-eval", "evalplus"),
)


def library_versions() -> dict[str, str | None]:
    """Return the version of Python and of each library; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
