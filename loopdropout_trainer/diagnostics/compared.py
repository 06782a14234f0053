"""Which models are compared: the base model, adapters and merged models, and whether they can be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from loopdropout_trainer.checks import check_folder, check_list
from loopdropout_trainer.data import DataArguments
from loopdropout_trainer.data.arguments import LossArguments
from loopdropout_trainer.diagnostics.rows import HELD_OUT, RowArguments
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.evaluation.loading import training_of
from loopdropout_trainer.record.identity import ONE_SETTING, Identity, differences, identity_key
from loopdropout_trainer.saving.adapter_files import WEIGHTS_FILE, adapter_folder
from loopdropout_trainer.saving.files import sha256_of_weights
from loopdropout_trainer.settings.arguments import ModelArguments, check_depths
from loopdropout_trainer.settings.recipe import RecipeError


TRAINED_ON = (
    *("model_name_or_path", "model_revision", "preparation", "dataset_name", "dataset_config", "dataset_revision"),
    *("dataset_split", "train_files", "column_mapping", "num_train_examples", "num_eval_examples", "split_seed"),
    *("arithmetic_steps", "prompt_template", "prompt_end", "chat_template", "max_length"),
)
"""Settings that the trainings of all adapters and the recipe must share; on a benchmark's rows the recipe the first two."""

_DEFAULTS = {f.name: f.default for each in (ModelArguments, DataArguments, LossArguments) for f in fields(each)}


@dataclass
class DiagnosticArguments:
    """What is diagnosed, how, and where the results go."""

    adapters: list[str] = HfArg(
        default_factory=list,
        help="Adapters as name=folder or name=Hub name; a name that comes again is another seed of that method.",
    )
    models: list[str] = HfArg(default_factory=list, help="Merged models, likewise as name=folder.")
    diagnostics: list[str] | None = HfArg(default=None, help="Names of the diagnostics to run. Default: all.")
    imports: list[str] = HfArg(
        default_factory=list,
        aliases=["--import"],
        help="Files (or module names) with diagnostics of your own; from the command line only.",
    )
    depths: list[int] | None = HfArg(default=None, help="Depths to run at. Default: 1 to twice the model's own.")
    use_cpu: bool = HfArg(default=False, help="Measure on the CPU, also where there is an accelerator.")
    output_dir: str = HfArg(default="outputs", help="Results go to its subfolder `diagnostics`.")

    def __post_init__(self):
        check_folder("output_dir", self.output_dir)
        for name in ("adapters", "models", "diagnostics", "imports"):
            check_list(name, getattr(self, name))
        if not self.adapters and not self.models:
            raise UserError("`adapters` must name one or more as name=path, or `models` a merged model.")
        check_depths("depths", self.depths)


@dataclass
class ComparedModel:
    """A model that is measured.

    Attributes:
        method: its name in tables; several models of one name are one method's seeds.
        kind: `base`, `adapter` or `merged`.
        model: name of the base.
        path: folder or Hub name; None for the base.
        identity: of its training, as far as its folder tells.
        seed, steps: of its training, as far as they are known.
        trained_on: `TRAINED_ON` of its training, or of the recipe.
        weights: hash of its own weight files, or its name where they are not here.
    """

    method: str
    kind: str
    model: str
    path: str | None = None
    identity: Identity | None = None
    seed: int | None = None
    steps: int | None = None
    trained_on: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of its measurements."""
        facts = {name: getattr(self, name) for name in ("method", "model", "seed", "steps")}
        return {**facts, "run": self.identity and identity_key(self.identity)}


def find_models(arguments: DiagnosticArguments, base: ModelArguments, rows: RowArguments) -> list[ComparedModel]:
    """Return the base model of a recipe, then the adapters and merged models that are given as `name=path`."""
    names = TRAINED_ON[: None if rows.rows == HELD_OUT else 2]
    name = base.base_name
    found = [ComparedModel("base", "base", name, trained_on=_trained_on({**asdict(base), **asdict(rows)}, names))]
    for option, kind in (("adapters", "adapter"), ("models", "merged")):
        for given in getattr(arguments, option):
            method, _, path = (part.strip() for part in given.partition("="))
            if not (method and path) or any(each.method == method and each.kind != kind for each in found):
                raise RecipeError(f"`{option}` takes name=path, with a name that no other kind has; got {given!r}.")
            model = _find_model(ComparedModel(method, kind, name, path))
            for other in found:
                _check_comparable(other, model)
            found.append(model)
    return found


def _find_model(model: ComparedModel) -> ComparedModel:
    """Fill in what the folder of an adapter or of a merged model tells."""
    folder, pattern = Path(model.path), "*.safetensors"
    if model.kind == "adapter":
        folder, pattern = adapter_folder(model.path), WEIGHTS_FILE
        trained = training_of(model.path)
        model.identity, model.seed, model.steps = (trained[name] for name in ("identity", "seed", "steps"))
    results = folder / "results.json"
    if results.is_file():
        with user_supplied(f"{results} is not the results file of a training"):
            model.trained_on = _trained_on(dict(json.loads(results.read_bytes())["run_info"]["settings"]))
    model.weights = sha256_of_weights(folder.glob(pattern)) if folder.is_dir() else model.path
    return model


def _check_comparable(other: ComparedModel, model: ComparedModel) -> None:
    """Refuse what was given before, another base model or other data; in one name, other settings or a seed's second run.

    What an adapter's folder does not tell is not compared.
    """
    names = f"`{other.method}` ({other.path or 'the recipe'}) and `{model.method}` ({model.path})"
    if model.weights == other.weights:
        raise RecipeError(f"{names} hold the same weights: give each once.")
    if found := differences({"data": other.trained_on}, {"data": model.trained_on}, ("data",)):
        raise RecipeError(f"{names} cannot be compared: {found[0]}.")
    if other.method == model.method:
        found = differences(other.identity, model.identity, ONE_SETTING)
        found += [f"the seed of both is {model.seed}"] if other.seed == model.seed is not None else []
        if found:
            raise RecipeError(f"{names} are no two seeds of one method ({found[0]}): give each a name of its own.")


def _trained_on(settings: Mapping[str, Any], names: Sequence[str] = TRAINED_ON) -> dict[str, Any]:
    return {name: _last_part(settings.get(name, _DEFAULTS[name])) for name in names}


def _last_part(value: Any) -> Any:
    """Return files and folders, also in a list, by their names alone, since they move."""
    if isinstance(value, list):
        return [_last_part(each) for each in value]
    return Path(value).name.replace("_", "-") if isinstance(value, str) else value
