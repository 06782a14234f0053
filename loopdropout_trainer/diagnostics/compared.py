"""Which models are compared: the base model, adapters and merged models, and whether they can be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopdropout_trainer.diagnostics.arguments import BASE, DiagnosticArguments
from loopdropout_trainer.evaluation.loading import train_info
from loopdropout_trainer.evaluation.results import read_evaluation
from loopdropout_trainer.saving.adapter_files import adapter_folder
from loopdropout_trainer.saving.files import sha256
from loopdropout_trainer.settings.command import user_supplied
from loopdropout_trainer.settings.recipe import RecipeError


_TRAINED_ON = (
    *("model_name_or_path", "model_revision", "preparation", "dataset_name", "dataset_config", "dataset_revision"),
    *("dataset_split", "train_files", "column_mapping", "num_train_examples", "split_seed", "prompt_template"),
    *("prompt_end", "chat_template", "max_length"),
)
"""Settings of a training that two adapters must share to be compared; the first one also with the base model."""


@dataclass
class ComparedModel:
    """A model that is measured.

    Attributes:
        method: its name in tables; several models of one name are one method's seeds.
        kind: `base`, `adapter` or `merged`.
        path: folder or Hub name; None for the base.
        settings: of its training, as far as its folder tells.
        facts: what else stands in the results: seed, rule, p and train_num_loops.
        weights: hash of its own weight files, or its name where they are not here.
        evaluation: results by benchmark, of an `evaluation.json`, that are taken instead of generating them.
    """

    method: str
    kind: str
    path: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(("seed", "rule", "p", "train_num_loops")))
    weights: str | None = None
    evaluation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, method: str, kind: str, path: str) -> ComparedModel:
        """Return what the folder of an adapter or a merged model tells."""
        trained = train_info(path) if kind == "adapter" else {}
        folder = adapter_folder(path) if kind == "adapter" else Path(path)
        pattern = "adapter_model.safetensors" if kind == "adapter" else "*.safetensors"
        results, settings = folder / "results.json", {}
        if results.is_file():
            with user_supplied(f"{results} is not the results file of a training"):
                settings = dict(json.loads(results.read_bytes())["run_info"]["settings"])
        facts = {name: trained.get(name, settings.get(name)) for name in ("rule", "p")}
        facts |= {"seed": settings.get("seed"), "train_num_loops": trained.get("num_loops")}
        return cls(method, kind, path, settings, facts, sha256(folder.glob(pattern)) if folder.is_dir() else path)


def find_models(arguments: DiagnosticArguments, base: str) -> list[ComparedModel]:
    """Return the base model, then the adapters and merged models that are given as `name=path`.

    Args:
        arguments: what is given.
        base: name or folder of the base model.

    Raises:
        RecipeError, SetupError: for another form, a name of the base's, something that is no adapter or is given twice,
            adapters that cannot be compared, or an evaluation that belongs to none of them.
    """
    found = [ComparedModel(BASE, "base", settings={"model_name_or_path": base})]
    for option, kind in (("adapters", "adapter"), ("models", "merged")):
        for method, path in (_pair(option, given) for given in getattr(arguments, option)):
            if any(each.method == method and each.kind != kind for each in found):
                raise RecipeError(
                    f"`{option}` names a model `{method}`, which is the name of another kind: choose another."
                )
            found.append(ComparedModel.read(method, kind, path))
            _check_comparable(found)
    for method, file in (_pair("evaluations", given) for given in arguments.evaluations):
        model = next((each for each in found if each.method == method and not each.evaluation), None)
        if model is None:
            raise RecipeError(f"`evaluations` names {file} for `{method}`, which has no model left to belong to.")
        with user_supplied(f"`evaluations` names {file}, which has no results of `{method}`"):
            rows = read_evaluation(file)["rows"]
            model.evaluation = dict((next(iter(rows.values())) if len(rows) == 1 else rows[method])["benchmarks"])
    return found


def _pair(option: str, given: str) -> tuple[str, str]:
    name, _, path = (part.strip() for part in given.partition("="))
    if not (name and path):
        raise RecipeError(f"`{option}` takes name=path; got {given!r}.")
    return name, path


def _check_comparable(models: Sequence[ComparedModel]) -> None:
    """Refuse the last model if it was given before, or is an adapter of another base or other data than the one before.

    What an adapter's folder does not tell is not compared.
    """
    model = models[-1]
    for other in models[:-1]:
        names = f"`{other.method}` ({other.path}) and `{model.method}` ({model.path})"
        if model.weights == other.weights:
            raise RecipeError(f"{names} hold the same weights: give each once.")
        known = model.kind == "adapter" and model.settings and other.kind != "merged" and other.settings
        for key in _TRAINED_ON[: None if other.kind == "adapter" else 1] if known else ():
            before, now = other.settings.get(key), model.settings.get(key)
            if _last_part(before) != _last_part(now):
                raise RecipeError(
                    f"{names} cannot be compared: `{key}` was {before!r} for one and {now!r} for the other."
                )


def _last_part(value: Any) -> Any:
    """Return files and folders, also in a list, by their names alone, since they move."""
    if isinstance(value, list):
        return [_last_part(each) for each in value]
    return Path(value).name.replace("_", "-") if isinstance(value, str) else value
