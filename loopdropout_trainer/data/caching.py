"""The key of cached examples: one place for everything that examples are a function of.

`datasets` keeps the result of a function on the disk, under a key made of the function's *name* and arguments. The code of a
function in a file is not part of that key, so an edited preparation would get its old examples. `examples_key` replaces it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import pkgutil
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from loopdropout_trainer.data.preparations import PREPARATIONS
from loopdropout_trainer.files import PACKAGE
from loopdropout_trainer.own_code import is_of_libraries


if TYPE_CHECKING:
    from datasets import Dataset

    from loopdropout_trainer.data.arguments import DataArguments

logger = logging.get_logger(__name__)

LIBRARIES = ("datasets", "jinja2", "tokenizers", "transformers")
"""Libraries that make examples of rows. The key has their versions."""


def examples_key(rows: Dataset, args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short text that changes whenever anything changes from which examples are made.

    A preparation may also read a file or the environment while it makes an example, which the key cannot know. It does know
    the texts and numbers that the preparation's file stored in its global names when it was imported.

    Args:
        rows: Rows from `load_rows`. The folder of their cache is named by the contents of local files, or by the commit of a
            data set on the Hub. It is the same for all parts of them, such as `train[:100]` and `train[100:]`.
        args: All fields are part of the key, because a preparation can read each of them.
        tokenizer: Tokenizer. The key has its vocabulary, special tokens and chat template, but not the padding that a batch
            sets.
    """
    preparation = PREPARATIONS[args.preparation]
    functions = (preparation.make_example, preparation.keep)
    try:
        return step_key(
            [file["filename"] for file in rows.cache_files],
            (str(rows.split), rows.column_names),
            [getattr(args, field.name) for field in fields(args)],
            args.formats,
            tokenizer,
            [version(name) for name in LIBRARIES],
            package_code(),
            preparation,
            [code_of(function) for function in functions],
            [global_values(function) for function in functions],
        )
    except Exception as error:  # code that cannot be read or pickled can raise anything
        logger.warning(f"The examples are not cached, because the code of `preparation` cannot be compared: {error!r}")
        return uuid.uuid4().hex


def step_key(*inputs: Any) -> str:
    """Return a short text that is the same for the same inputs. It is a fingerprint of `datasets`."""
    from datasets.fingerprint import Hasher

    return Hasher.hash(inputs)


def digest_files(paths: Iterable[str | Path]) -> str:
    """Return a digest of the contents of files, in their order."""
    whole = hashlib.blake2b(digest_size=16)
    for path in paths:
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, "blake2b").digest())
    return whole.hexdigest()


def package_code() -> str:
    """Return a digest of the package's code that makes examples. `limits.py` renders conversations."""
    return digest_files([*sorted((PACKAGE / "data").glob("*.py")), PACKAGE / "arithmetic.py", PACKAGE / "limits.py"])


def code_of(function: Callable[..., Any]) -> str | None:
    """Return a digest of the file of a function and of the user's files that this file imports.

    Installed libraries are left out. A function without a file, as in a notebook, needs none: `datasets` hashes its code.
    """
    file = own_file(module_of(function))
    if file is None:
        return None
    return digest_files(sorted(own_files(file)))


def own_files(file: Path) -> set[Path]:
    """Return a Python file and the user's files that it imports, directly or not. They are found without running them.

    Installed libraries and this package are left out, and so are names that a program computes.
    """
    importlib.invalidate_caches()  # a file may be new
    found, unread = {file}, [file]
    while unread:
        path = unread.pop()
        if path.suffix == ".py":  # not a compiled extension
            new = set(_imported_files(path)) - found
            found |= new
            unread += new
    return found


def knows_imports(file: Path) -> bool:
    """Return whether Python finds all modules that a Python file imports. It may not with another `PYTHONPATH`."""
    packages = {names[0] for names, level in _find_imports(file) if not level}
    return all(name in sys.builtin_module_names or PathFinder.find_spec(name) is not None for name in packages)


def _imported_files(file: Path) -> Iterator[Path]:
    """Yield the user's files that the import statements of a Python file name."""
    search_path = [folder for folder in sys.path if not is_of_libraries(folder)]
    for names, level in _find_imports(file):
        folders = [str(file.parents[level - 1])] if level else search_path
        yield from _module_files(names, folders)


def _find_imports(file: Path) -> Iterator[tuple[list[str], int]]:
    """Yield the parts of each name that a Python file imports, and by how many dots it is relative to the file's folder.

    Those of `from a.b import c` are a, b and c, because c may be a module, too.
    """
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split("."), 0
        elif isinstance(node, ast.ImportFrom):
            names = node.module.split(".") if node.module else []
            for alias in node.names:
                yield [*names, alias.name], node.level


def _module_files(names: Sequence[str], folders: Sequence[str]) -> Iterator[Path]:
    """Yield the files of the module `names` and of the packages that hold it. Folders without `__init__.py` are packages, too.

    Args:
        names: Parts of the name, of which the last one may be a name in a module or `*`.
        folders: Folders with the first part.
    """
    if names[0] == PACKAGE.name:
        return
    for name in names:
        if name == "*":
            for module in pkgutil.iter_modules(folders):
                yield from _module_files([module.name], folders)
            return
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            return
        if spec.origin is not None:
            yield Path(spec.origin)
        folders = list(spec.submodule_search_locations or ())


def global_values(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the plain values among the global names of a function's file: texts, numbers, patterns and containers of them."""
    module = module_of(function)
    if own_file(module) is None:
        return {}
    return {name: value for name, value in vars(module).items() if name[:2] != "__" and _is_plain(value)}


def own_file(module: ModuleType | None) -> Path | None:
    """Return the file of a module that is not part of this package, whose code `package_code` has."""
    file = getattr(module, "__file__", None)
    if file is None or Path(file).is_relative_to(PACKAGE):
        return None
    return Path(file)


def module_of(function: Callable[..., Any]) -> ModuleType | None:
    """Return the module of a function or a class, or None if it is not known."""
    while isinstance(function, functools.partial):
        function = function.func
    return sys.modules.get(function.__module__)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a text, a number or the like, or a container of such values."""
    if isinstance(value, dict):
        return all(_is_plain(item) for item in [*value.keys(), *value.values()])
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | bytes | int | float | re.Pattern)
