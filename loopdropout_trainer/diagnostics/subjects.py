"""What is diagnosed: the base model, adapters and merged models, and whether they can be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from loopdropout_trainer.diagnostics.style import BASE
from loopdropout_trainer.saving.adapter_files import adapter_metadata
from loopdropout_trainer.settings.recipe import RecipeError


_SAME = (
    "model_name_or_path",
    "model_revision",
    "preparation",
    "dataset_name",
    "dataset_config",
    "dataset_revision",
    "dataset_split",
    "train_files",
    "column_mapping",
    "num_train_examples",
    "split_seed",
    "prompt_template",
    "prompt_end",
    "chat_template",
    "max_length",
)
"""Settings of a training that two adapters must share to be compared."""


@dataclass(frozen=True)
class Subject:
    """A model that is diagnosed.

    Attributes:
        method: its name in tables and figures; several subjects of one name are one method's seeds.
        kind: `base`, `adapter` or `merged`.
        path: folder or Hub name; None for the base.
        seed, rule, p, train_num_loops: of its training, as far as its folder tells.
        settings: of its training, as far as its folder tells.
        evaluation: an `evaluation.json` whose answers are taken instead of generating them.
    """

    method: str
    kind: str
    path: str | None = None
    seed: int | None = None
    rule: str | None = None
    p: Any = None
    train_num_loops: int | None = None
    settings: Mapping[str, Any] | None = None
    evaluation: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What stands in the results beside the measurement."""
        names = ("method", "kind", "path", "seed", "rule", "p", "train_num_loops")
        return {name: getattr(self, name) for name in names}


def find_subjects(
    adapters: Sequence[str], models: Sequence[str] = (), evaluations: Sequence[str] = ()
) -> list[Subject]:
    """Return the base model, then the adapters and merged models that are given as `name=path`.

    A name whose adapters were trained at several depths becomes one method for each depth.

    Raises:
        RecipeError: for another form, a name of the base's, or an evaluation that belongs to none of them.
    """
    answers: dict[str, list[str]] = {}
    for given in evaluations:
        method, file = _pair("evaluations", given)
        answers.setdefault(method, []).append(file)
    subjects = [Subject(BASE, "base", evaluation=_next(answers, BASE))]
    for option, kind, listed in (("adapters", "adapter", adapters), ("models", "merged", models)):
        for given in listed:
            method, path = _pair(option, given)
            if method == BASE:
                raise RecipeError(f"`{option}` must not name one `{BASE}`: the base model is measured anyway.")
            subjects.append(_subject(method, kind, path, _next(answers, method)))
    kinds = {subject.method: subject.kind for subject in subjects}
    for subject in subjects:
        if kinds[subject.method] != subject.kind:
            raise RecipeError(f"`{subject.method}` names an adapter and a merged model: give them different names.")
    depths: dict[str, set[int | None]] = {}
    for subject in subjects:
        depths.setdefault(subject.method, set()).add(subject.train_num_loops)
    subjects = [
        replace(subject, method=with_depth(subject.method, subject.train_num_loops))
        if len(depths[subject.method]) > 1
        else subject
        for subject in subjects
    ]
    for method, files in answers.items():
        if files:
            raise RecipeError(
                f"`evaluations` names {files[0]} for `{method}`, which has no adapter left to belong to."
            )
    return subjects


def with_depth(method: str, num_loops: int | None) -> str:
    """Return a method's name with the depth that it was trained at."""
    depth = f" (K = {'unknown' if num_loops is None else num_loops})"
    return method if method.endswith(depth) else method + depth


def _pair(option: str, given: str) -> tuple[str, str]:
    name, equals, path = given.partition("=")
    if not (equals and name.strip() and path.strip()):
        raise RecipeError(f"`{option}` takes name=path; got {given!r}.")
    return name.strip(), path.strip()


def _next(answers: dict[str, list[str]], method: str) -> str | None:
    return answers[method].pop(0) if answers.get(method) else None


def _subject(method: str, kind: str, path: str, evaluation: str | None) -> Subject:
    folder = Path(path)
    facts = adapter_metadata(folder) if kind == "adapter" else {}
    settings = _training_settings(folder)
    return Subject(
        method,
        kind,
        path,
        seed=settings.get("seed"),
        rule=facts.get("rule", settings.get("rule")),
        p=facts.get("p", settings.get("p")),
        train_num_loops=facts.get("num_loops"),
        settings=settings,
        evaluation=evaluation,
    )


def _training_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that a training left beside its adapter, or {}."""
    if (folder / "recipe.yaml").is_file():
        return dict(yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8")) or {})
    if (folder / "results.json").is_file():
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        return dict(results.get("run_info", {}).get("settings") or {})
    return {}


def check_comparable(subjects: Sequence[Subject], model_name: str) -> None:
    """Refuse adapters of another base model, or that were trained on other data than the first one.

    What an adapter's folder does not tell is not compared.

    Raises:
        RecipeError: naming the setting that differs.
    """
    told = [subject for subject in subjects if subject.kind == "adapter" and subject.settings]
    for subject in told:
        base = subject.settings.get("model_name_or_path")
        if base is not None and _name(base) != _name(model_name):
            raise RecipeError(
                f"`{subject.method}` ({subject.path}) was trained on `model_name_or_path` {base}, and the recipe has "
                f"{model_name}: they cannot be compared."
            )
    for subject in told[1:]:
        for key in _SAME[1:]:
            first, other = told[0].settings.get(key), subject.settings.get(key)
            if _comparable(first) != _comparable(other):
                raise RecipeError(
                    f"`{told[0].method}` ({told[0].path}) and `{subject.method}` ({subject.path}) cannot be compared: "
                    f"`{key}` was {first!r} in one training and {other!r} in the other."
                )


def _name(path: Any) -> str:
    return Path(str(path)).name.replace("_", "-")


def _comparable(value: Any) -> Any:
    """Files are compared by their names, since folders move."""
    return [_name(each) for each in value] if isinstance(value, list) else value
