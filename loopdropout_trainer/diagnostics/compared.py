"""Which models are compared: the base model, adapters and merged models, and whether they can be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from loopdropout_trainer.diagnostics.arguments import DiagnosticArguments
from loopdropout_trainer.evaluation.loading import train_info
from loopdropout_trainer.evaluation.results import read_evaluation
from loopdropout_trainer.saving.adapter_files import adapter_folder
from loopdropout_trainer.saving.files import sha256
from loopdropout_trainer.settings.command import one_line
from loopdropout_trainer.settings.recipe import RecipeError


BASE = "base"
"""Name of the model without an adapter in every diagnostic."""

_DATA_SETTINGS = (
    *("model_revision", "preparation", "dataset_name", "dataset_config", "dataset_revision", "dataset_split"),
    *("train_files", "column_mapping", "num_train_examples", "split_seed", "prompt_template", "prompt_end"),
    *("chat_template", "max_length"),
)
"""Settings of a training, beside the base model, that two adapters must share to be compared."""


@dataclass(frozen=True)
class ComparedModel:
    """A model that is measured.

    Attributes:
        method: its name in tables; several models of one name are one method's seeds.
        kind: `base`, `adapter` or `merged`.
        path: folder or Hub name; None for the base.
        seed, rule, p, train_num_loops: of its training, as far as its folder tells.
        settings: of its training, as far as its folder tells.
        evaluation: results by benchmark, of an `evaluation.json`, that are taken instead of generating them.
        weights: hash of its own weight files; None for the base, and for a merged model on the Hub.
    """

    method: str
    kind: str
    path: str | None = None
    seed: int | None = None
    rule: str | None = None
    p: Any = None
    train_num_loops: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What stands in the results beside the measurement."""
        left_out = ("settings", "evaluation", "weights")
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def find_models(arguments: DiagnosticArguments, base: str) -> list[ComparedModel]:
    """Return the base model, then the adapters and merged models that are given as `name=path`.

    A name whose adapters were trained at several depths becomes one method for each depth.

    Args:
        arguments: what is given.
        base: name or folder of the base model.

    Raises:
        RecipeError: for another form, a name of the base's, something that is no adapter or is given twice, adapters that
            cannot be compared, or an evaluation that belongs to none of them.
    """
    evaluations = [_pair("evaluations", given) for given in arguments.evaluations]

    def of_evaluation(method: str) -> Mapping[str, Any]:
        place = next((place for place, (name, _) in enumerate(evaluations) if name == method), None)
        return {} if place is None else _evaluated(evaluations.pop(place)[1], method)

    found = [ComparedModel(BASE, "base", evaluation=of_evaluation(BASE))]
    for option, kind in (("adapters", "adapter"), ("models", "merged")):
        for given in getattr(arguments, option):
            method, path = _pair(option, given)
            if method == BASE:
                raise RecipeError(f"`{option}` must not name one `{BASE}`: the base model is measured anyway.")
            found.append(replace(_read(method, kind, path), evaluation=of_evaluation(method)))
    for method, file in evaluations:
        raise RecipeError(f"`evaluations` names {file} for `{method}`, which has no model left to belong to.")
    _check_different(found)
    _check_comparable([model for model in found if model.kind == "adapter" and model.settings], base)
    several = {one.method for one in found for other in found if one.train_num_loops != other.train_num_loops
               and one.method == other.method}  # fmt: skip
    return [
        replace(model, method=f"{model.method} (K = {model.train_num_loops or 'unknown'})")
        if model.method in several
        else model
        for model in found
    ]


def _pair(option: str, given: str) -> tuple[str, str]:
    name, _, path = (part.strip() for part in given.partition("="))
    if not (name and path):
        raise RecipeError(f"`{option}` takes name=path; got {given!r}.")
    return name, path


def _read(method: str, kind: str, path: str) -> ComparedModel:
    """Return what the folder of an adapter or a merged model tells."""
    folder, facts, weights = Path(path), {}, None
    if kind == "adapter":
        facts, folder = train_info(path), adapter_folder(path)
        weights = sha256(folder / "adapter_model.safetensors")
    elif folder.is_dir():
        weights = sha256(folder.glob("*.safetensors"))
    settings = _training_settings(folder)
    rule, p = (facts.get(name, settings.get(name)) for name in ("rule", "p"))
    depth = facts.get("num_loops")
    return ComparedModel(method, kind, path, settings.get("seed"), rule, p, depth, settings, weights=weights)


def _training_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that a training left beside its adapter in `results.json`, or {}."""
    path = folder / "results.json"
    try:
        return dict(json.loads(path.read_bytes())["run_info"]["settings"]) if path.is_file() else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise RecipeError(f"{path} is not the results file of a training: mend it, or remove it.") from None


def _evaluated(file: str, method: str) -> Mapping[str, Any]:
    """Return the benchmarks of the only row of an `evaluation.json`, or of the row that is named as the method is."""
    try:
        rows = read_evaluation(file)["rows"]
        return dict((next(iter(rows.values())) if len(rows) == 1 else rows[method])["benchmarks"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"`evaluations` names {file}, which has no results of `{method}`: {one_line(error)}."
        ) from error


def _check_different(models: Sequence[ComparedModel]) -> None:
    """Refuse one name for an adapter and a merged model, and weights that are given twice: they are no other seed."""
    kinds: dict[str, str] = {}
    seen: dict[str, ComparedModel] = {}
    for model in models:
        if kinds.setdefault(model.method, model.kind) != model.kind:
            raise RecipeError(f"`{model.method}` names an adapter and a merged model: give them different names.")
        other = seen.setdefault(model.weights or str(model.path), model)
        if other is not model:
            raise RecipeError(
                f"`{other.method}` ({other.path}) and `{model.method}` ({model.path}) hold the same weights: give each once."
            )


def _check_comparable(adapters: Sequence[ComparedModel], base: str) -> None:
    """Refuse adapters of another base model, or that were trained on other data than the first one.

    What an adapter's folder does not tell is not compared.
    """
    for model in adapters:
        trained_on = model.settings.get("model_name_or_path")
        if trained_on is not None and _last_part(trained_on) != _last_part(base):
            raise RecipeError(
                f"`{model.method}` ({model.path}) was trained on `model_name_or_path` {trained_on}, and the recipe has "
                f"{base}: they cannot be compared."
            )
        first = adapters[0]
        for key in _DATA_SETTINGS:
            before, now = first.settings.get(key), model.settings.get(key)
            if _last_part(before) != _last_part(now):
                raise RecipeError(
                    f"`{first.method}` ({first.path}) and `{model.method}` ({model.path}) cannot be compared: `{key}` was "
                    f"{before!r} in one training and {now!r} in the other."
                )


def _last_part(value: Any) -> Any:
    """Return files and folders, also in a list, by their names alone, since they move."""
    if isinstance(value, list):
        return [_last_part(each) for each in value]
    return Path(value).name.replace("_", "-") if isinstance(value, str) else value
