"""The code that answers depend on, which is a part of the key of their files, so that a change of the code can be named.

A key is "MODEL-SETTINGS-PACKAGE-IMPORTS-LIBRARIES": a digest of the weights with the depth and the gates, one of all other
settings, and one of each kind of code.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from torch import nn

from loopdropout_trainer.errors import count
from loopdropout_trainer.files import PACKAGE
from loopdropout_trainer.results.imported_code import list_imported_files


_LIBRARIES = ("torch", "transformers", "tokenizers", "peft", "lm-eval")

_NAMES = ("this package", "a file of `--import`", "a library or the model's code")
"""Names of the kinds of code in the order of a key."""

NUM_DIGITS = 16


def digest_code(model: nn.Module) -> list[str]:
    """Return the digests of the kinds of code: the package, the imported files, and the libraries with the model's classes."""
    return [*_digest_known_code(), _digest_libraries(model)]


def _digest_known_code() -> list[str]:
    """Return the digests that need no model: of the package, and of the imported files with the files that they import."""
    return [_digest_files(PACKAGE.rglob("*.py")), _digest_files(list_imported_files())]


def _digest_libraries(model: nn.Module) -> str:
    """Return a digest of the versions of the libraries, and of the files with the model's classes outside of the package."""
    files = set()
    for cls in {type(module) for module in model.modules()}:
        try:
            files.add(Path(inspect.getfile(cls)))
        except (TypeError, OSError):  # a class of a notebook
            continue
    outside = [path for path in files if not path.is_relative_to(PACKAGE)]
    versions = [f"{name} {version(name)}" for name in _LIBRARIES]
    return _digest_files(outside, versions)


def _digest_files(files: Iterable[Path], texts: Iterable[str] = ()) -> str:
    """Return a digest of files by their names and contents, because the folder of an installation may move, and of texts."""
    digest = hashlib.sha256("\n".join(texts).encode())
    for path in sorted(path for path in files if path.is_file()):
        digest.update(f"{path.name}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:NUM_DIGITS]


def describe_unused(folder: Path, key: str) -> str | None:
    """Return a sentence about the answers of the same model in a folder that other code has given, or None without any.

    Args:
        folder: Folder of the files `answers_KEY_rankR.jsonl`.
        key: Key of the present answers.
    """
    model, code = key.split("-")[0], key.split("-")[2:]
    files = sorted(folder.glob(f"answers_{model}-*_rank*.jsonl"), key=lambda path: path.stat().st_mtime)
    codes = [_key_of(path).split("-")[2:] for path in files]
    if not files or code in codes:  # other settings, such as a system turn, have other answers
        return None
    former = _key_of(files[-1])
    number = _count_lines(folder.glob(f"answers_{former}_rank*.jsonl"))
    if not number:
        return None
    changed = [name for name, before, now in zip(_NAMES, codes[-1], code, strict=True) if before != now]
    return (
        f"The {count(number, 'kept answer')} of this model in {folder} cannot be used, because {' and '.join(changed)} "
        "changed since. So all answers are generated again."
    )


def count_kept(folder: Path) -> tuple[int, int]:
    """Return the number of kept answers in a folder that the present code may have given, and of those of other code.

    Only a loaded model tells which of the first ones are its own, and whether a library has changed.
    """
    known = _digest_known_code()
    num_kept, num_other = 0, 0
    for path in folder.glob("answers_*.jsonl"):
        number = _count_lines([path])
        if _key_of(path).split("-")[2:4] == known:
            num_kept += number
        else:
            num_other += number
    return num_kept, num_other


def _key_of(file: Path) -> str:
    return file.name.removeprefix("answers_").partition("_rank")[0]


def _count_lines(files: Iterable[Path]) -> int:
    number = 0
    for path in files:
        with open(path, "rb") as file:
            number += sum(1 for _ in file)
    return number
