"""The code of `--import`: the files that a run depends on, and whether they have changed since its training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.data.caching import digest_files, knows_imports, module_of, own_file, own_files
from loopdropout_trainer.data.preparations import PACKAGED_PREPARATIONS, PREPARATIONS
from loopdropout_trainer.files import lock_file, write_file
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.gates.depth import DEPTH_SAMPLERS
from loopdropout_trainer.looped import DESCRIPTIONS
from loopdropout_trainer.own_code import IMPORTED
from loopdropout_trainer.results.recipe_changes import UNCOMPARED
from loopdropout_trainer.results.run_files import (
    RUN_FILE,
    read_accepted_imports,
    read_imports,
    read_run,
    read_used_imports,
)
from loopdropout_trainer.rewards import REWARDS
from loopdropout_trainer.settings.recipe import imported_name


if TYPE_CHECKING:
    from torch import nn


UNKNOWN = "any file"
"""Place of a preparation of the user, which can be made of the package's functions alone, so that its file is not known."""


def list_imported_files() -> list[Path]:
    """Return the files of `--import`, and the user's files that they import, in the order of their paths."""
    files: set[Path] = set()
    for path in IMPORTED:
        files |= own_files(Path(path))
    return sorted(files)


def digest_imports() -> dict[str, str]:
    """Return the digest of each file of `--import`, with the user's files that it imports, by its absolute path."""
    return {path: digest_files(sorted(own_files(Path(path)))) for path in IMPORTED}


def describe_imports(recipe: Mapping[str, Any], model: nn.Module, trained: str | Path | None = None) -> dict[str, Any]:
    """Return the facts of `run.json` about `--import`: the digests of all files, and the files that the run depends on.

    A run depends on the Python file of its model, rule, depth sampler, preparation, rewards and scorers. A task file (.yaml)
    does not change a training.

    Args:
        recipe: Settings of the run that can change its results. Each text is looked up among the registered names.
        model: Model of the run.
        trained: Folder of the run if it is trained already and only measured further, so that its files are added.
    """
    compared = {name: value for name, value in recipe.items() if name not in UNCOMPARED}
    parts = [*_find_registered(compared), *_find_classes(model)]
    used = [path for path in IMPORTED if path.endswith(".py") and _holds_any(path, parts)]
    imports = digest_imports()
    if trained is None:
        return {"imports": imports, "used_imports": used, "accepted_imports": {}}
    of_training, accepted = read_imports(trained), read_accepted_imports(trained)
    imports = {**of_training, **imports}
    for path in accepted:  # it has changed since, and its digest stays that of the training
        imports[path] = of_training[path]
    used = [*dict.fromkeys([*read_used_imports(trained), *used])]  # each file once
    return {"imports": imports, "used_imports": used, "accepted_imports": accepted}


def _holds_any(path: str, parts: Sequence[Any]) -> bool:
    """Return whether a class or a function of a run may be in a file of `--import`, or in a file that it imports."""
    if UNKNOWN in parts:
        return True
    files, name = own_files(Path(path)), imported_name(path)
    # Of two files of one name, Python knows only the last one. So the name of the module decides, too.
    return any(part.__module__ == name or own_file(module_of(part)) in files for part in parts)


def find_other_code(folder: str | Path, accepts_changes: bool = False) -> str | None:
    """Return a clause about the first file that the run in a folder depends on and that is another one now, or None.

    Args:
        folder: Folder of the run.
        accepts_changes: Whether to look at the run as it is after `accept_other_code`.
    """
    changed = _find_changed(folder, read_used_imports(folder))
    if accepts_changes:
        changed = [path for path in changed if path not in IMPORTED]
    return _describe_change(changed[0]) if changed else None


def find_acceptable_changes(folder: str | Path) -> list[str]:
    """Return the changed files that the run in a folder depends on and that the user can accept, which no missing one is."""
    return [path for path in _find_changed(folder, read_used_imports(folder)) if path in IMPORTED]


def can_accept_other_code(folder: str | Path) -> bool:
    """Return whether all changed files that the run in a folder depends on are there, so that the user can accept them."""
    return find_other_code(folder, accepts_changes=True) is None


def find_unused_changes(folder: str | Path) -> list[str]:
    """Return a clause about each changed file that the run in a folder was given, but as far as is known does not use."""
    used = read_used_imports(folder)
    unused = [path for path in read_imports(folder) if path.endswith(".py") and path not in used and path in IMPORTED]
    return [_describe_change(path) for path in _find_changed(folder, unused)]


def find_edited(folder: str | Path) -> list[str]:
    """Return the files that the run in a folder depends on and that have changed since, for a command without `--import`.

    The run has their paths. A file that is missing, as on another machine, is not known to have changed, and neither is a file
    whose own imports are not found.
    """
    return [path for path, is_same in _compare_present(folder).items() if is_same is False]


def has_code_of_run(folder: str | Path) -> bool:
    """Return whether the files that the run in a folder depends on are known to be there, as it was trained with them."""
    comparison = _compare_present(folder)
    return bool(comparison) and all(comparison.values())


def _compare_present(folder: str | Path) -> dict[str, bool | None]:
    """Return whether each file that a run depends on is as it was trained with or accepted it. None: that is not known."""
    former, accepted = read_imports(folder), read_accepted_imports(folder)
    comparison: dict[str, bool | None] = {}
    for path in read_used_imports(folder):
        present = _digest_present(Path(path))
        comparison[path] = None if present is None else present in (former.get(path), accepted.get(path))
    return comparison


def _digest_present(file: Path) -> str | None:
    """Return the digest of a file of `--import` with the user's files that it imports, or None if it is not known."""
    if not file.is_file():
        return None
    try:
        files = own_files(file)
        if not all(knows_imports(path) for path in files if path.suffix == ".py"):
            return None
        return digest_files(sorted(files))
    except SyntaxError:  # it has changed since, because it has run before
        return digest_files([file])
    except OSError:
        return None


def describe_accepted(paths: Iterable[str]) -> list[str]:
    """Return sentences about changed files of `--import` that the user accepted for the results of a run."""
    return [f"{path} has changed since the training, and the user accepted the results." for path in paths]


def code_of(folder: str | Path) -> tuple[str, ...]:
    """Return the digests of the files of `--import` that a run depends on, as they count for it, without their places."""
    digests = {**read_imports(folder), **read_accepted_imports(folder)}
    return tuple(sorted(digests[path] for path in read_used_imports(folder) if path in digests))


def accept_other_code(folder: str | Path) -> bool:
    """Let the results of a run count for the changed files of `--import` that it depends on. Return whether it has any.

    `imports` of its `run.json` keeps the digests of the training, and `accepted_imports` has those of the present files. A
    file that is missing cannot be accepted.
    """
    changed = find_acceptable_changes(folder)
    if not changed:
        return False
    digests = digest_imports()
    accepted = dict(read_accepted_imports(folder))
    for path in changed:
        accepted[path] = digests[path]
    path = Path(folder, RUN_FILE)
    with lock_file(path):
        write_file(path, json.dumps({**read_run(folder), "accepted_imports": accepted}, indent=2) + "\n")
    return True


def _find_changed(folder: str | Path, paths: list[str]) -> list[str]:
    """Return those of some files of a run that are missing now, or others than those that it was trained with or accepted."""
    if not paths:
        return []
    former, accepted, digests = read_imports(folder), read_accepted_imports(folder), digest_imports()
    changed = []
    for path in paths:
        if {former.get(path), accepted.get(path)}.isdisjoint(digests.values()):  # the file may have moved
            changed.append(path)
    return changed


def _describe_change(path: str) -> str:
    change = "has changed since" if path in IMPORTED else "is missing"
    return f"its `--import` {path} {change}"


def _find_registered(value: Any) -> Iterator[Any]:
    """Yield the classes and functions that the texts of a recipe name, or `UNKNOWN`, also inside of lists and mappings."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _find_registered(item)
    if not isinstance(value, str):
        return
    for registry in (RULES, DEPTH_SAMPLERS):
        if value in registry:
            yield from registry[value].__mro__
    if value in REWARDS:
        yield REWARDS[value]
    if value in PREPARATIONS.keys() - PACKAGED_PREPARATIONS:
        yield UNKNOWN


def _find_classes(model: nn.Module) -> Iterator[type]:
    """Yield the classes of a model and its parts, and of their descriptions."""
    for cls in {type(module) for module in model.modules()}:
        for base in cls.__mro__:
            yield base
            if base in DESCRIPTIONS:
                yield DESCRIPTIONS[base]
