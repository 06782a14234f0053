"""One run of diagnostics: every diagnostic on every model, each written as soon as it is measured."""

from __future__ import annotations

import gc
import importlib
import logging
import runpy
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from loopdropout_trainer.checks import check_choice, check_distinct, check_folder, check_list, check_numbers
from loopdropout_trainer.data import DataArguments, load_tokenizer
from loopdropout_trainer.data.load import LossArguments
from loopdropout_trainer.diagnostics.diagnostic import DIAGNOSTICS, Context, Diagnostic
from loopdropout_trainer.diagnostics.rows import HELD_OUT, RowArguments, load_rows_to_score
from loopdropout_trainer.errors import UserError, one_line, user_supplied
from loopdropout_trainer.evaluation.subject import Training, load_in_all_processes, training_of
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.processes import all_processes, from_main_process
from loopdropout_trainer.record.identity import ONE_SETTING, Identity, differences, identity_key
from loopdropout_trainer.record.measurement import ALL, NONE, Measurement, read_measurements, write_measurements
from loopdropout_trainer.saving.adapter_files import WEIGHTS_FILE, adapter_folder
from loopdropout_trainer.saving.files import folder_lock_for_all, read_json, sha256, sha256_of_weights
from loopdropout_trainer.settings.arguments import ModelArguments, setting
from loopdropout_trainer.settings.recipe import RecipeError
from loopdropout_trainer.training.scores import Batch


logger = logging.getLogger(__name__)

WRITER = "diagnostics"
"""Of measurements: `diagnostics/NAME/IDENTITY`."""

FOLDER = "diagnostics"


TRAINED_ON = (
    *("model_name_or_path", "model_revision", "preparation", "dataset_name", "dataset_config", "dataset_revision"),
    *("dataset_split", "train_files", "column_mapping", "num_train_examples", "num_eval_examples", "split_seed"),
    *("arithmetic_steps", "prompt_template", "prompt_end", "chat_template", "max_length"),
)
"""Settings that the trainings of all adapters and the recipe must share; on a benchmark's rows the recipe the first two."""

_DEFAULTS = {f.name: f.default for kind in (ModelArguments, DataArguments, LossArguments) for f in fields(kind)}


@dataclass
class DiagnosticArguments:
    """What is diagnosed, how, and where the results go."""

    adapters: list[str] = setting(
        help="Adapters as name=folder or name=Hub name; a name that comes again is another seed of that method.",
        default_factory=list,
    )
    models: list[str] = setting(help="Merged models, likewise as name=folder.", default_factory=list)
    diagnostics: list[str] | None = setting(None, "Names of the diagnostics to run. Default: all.")
    imports: list[str] = setting(
        help="Files (or module names) with diagnostics of your own; from the command line only.",
        default_factory=list,
        aliases=["--import"],
    )
    depths: list[int] | None = setting(None, "Depths to run at. Default: 1 to twice the model's own.")
    use_cpu: bool = setting(False, "Measure on the CPU, also where there is an accelerator.")
    output_dir: str = setting("outputs", "Results go to its subfolder `diagnostics`.")

    def __post_init__(self):
        check_folder("output_dir", self.output_dir)
        for name in ("adapters", "models", "diagnostics", "imports"):
            check_list(name, getattr(self, name))
        if not self.adapters and not self.models:
            raise UserError("`adapters` must name one or more as name=path, or `models` a merged model.")
        check_numbers(self)
        check_distinct("depths", self.depths or [])


@dataclass
class ComparedModel:
    """A model that is measured.

    Attributes:
        method: its name in tables; several models of one name are one method's seeds.
        kind: `base`, `adapter` or `merged`.
        model: name of the base.
        path: folder or Hub name; None for the base.
        training: what is known of it.
        trained_on: `TRAINED_ON` of its training, or of the recipe.
        weights: hash of its own weight files, or its name where they are not here.
    """

    method: str
    kind: str
    model: str
    path: str | None = None
    training: Training = Training()
    trained_on: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of its measurements."""
        return {"method": self.method, "model": self.model, **self.training.facts}


def find_models(arguments: DiagnosticArguments, base: ModelArguments, rows: RowArguments) -> list[ComparedModel]:
    """Return the base model of a recipe, then the adapters and merged models that are given as `name=path`."""
    names = TRAINED_ON[: None if rows.rows == HELD_OUT else 2]
    name = base.base_name
    models = [ComparedModel("base", "base", name, trained_on=_trained_on({**asdict(base), **asdict(rows)}, names))]
    for option, kind in (("adapters", "adapter"), ("models", "merged")):
        for given in getattr(arguments, option):
            method, _, path = (part.strip() for part in given.partition("="))
            if not (method and path) or any(other.method == method and other.kind != kind for other in models):
                raise RecipeError(f"`{option}` takes name=path, with a name that no other kind has; got {given!r}.")
            model = _find_model(ComparedModel(method, kind, name, path))
            for other in models:
                _check_comparable(other, model)
            models.append(model)
    return models


def _find_model(model: ComparedModel) -> ComparedModel:
    """Fill in what the folder of an adapter or of a merged model tells."""
    folder = Path(model.path)
    pattern = "*.safetensors"
    if model.kind == "adapter":
        folder = adapter_folder(model.path)
        pattern = WEIGHTS_FILE
        model.training = training_of(model.path)
    run = folder / "run.json"
    if run.is_file():
        with user_supplied(f"{run} is not the file of a training"):
            model.trained_on = _trained_on(dict(read_json(run)["settings"]))
    model.weights = sha256_of_weights(folder.glob(pattern)) if folder.is_dir() else model.path
    return model


def _check_comparable(other: ComparedModel, model: ComparedModel) -> None:
    """Refuse what was given before, another base model or other data; in one name, other settings or a seed's second run.

    What an adapter's folder does not tell is not compared.
    """
    names = f"`{other.method}` ({other.path or 'the recipe'}) and `{model.method}` ({model.path})"
    if model.weights == other.weights:
        raise RecipeError(f"{names} hold the same weights: give each once.")
    if changed := differences({"data": other.trained_on}, {"data": model.trained_on}, ("data",)):
        raise RecipeError(f"{names} cannot be compared: {changed[0]}.")
    if other.method == model.method:
        reasons = differences(other.training.identity, model.training.identity, ONE_SETTING)
        if other.training.seed == model.training.seed is not None:
            reasons.append(f"the seed of both is {model.training.seed}")
        if reasons:
            raise RecipeError(f"{names} are no two seeds of one method ({reasons[0]}): give each a name of its own.")


def _trained_on(settings: Mapping[str, Any], names: Sequence[str] = TRAINED_ON) -> dict[str, Any]:
    return {name: _last_part(settings.get(name, _DEFAULTS[name])) for name in names}


def _last_part(value: Any) -> Any:
    """Return files and folders, also in a list, by their names alone, since they move."""
    if isinstance(value, list):
        return [_last_part(part) for part in value]
    return Path(value).name.replace("_", "-") if isinstance(value, str) else value


def run_diagnostics(model: ModelArguments, rows: RowArguments, arguments: DiagnosticArguments) -> None:
    """Run the diagnostics over all processes, and write what they measure; what an earlier run measured is not measured again.

    Raises:
        RecipeError, SetupError, DataError: if something that is named cannot be loaded or compared.
        LockedError: if another run of diagnostics is at work in the folder.
    """
    processes = all_processes(arguments.use_cpu)
    folder = Path(arguments.output_dir) / FOLDER
    diagnostics = choose(arguments)
    with processes.main_process_first():
        models = find_models(arguments, model, rows)
        with user_supplied("The rows cannot be loaded"):
            tokenizer = load_tokenizer(model, chat_template_path=rows.chat_template_path, eos_token=rows.eos_token)
            batches, row_facts = load_rows_to_score(rows, tokenizer)
    with folder_lock_for_all(folder):
        before = from_main_process(_measured_before, folder)
        written = set()
        for compared in tqdm(models, unit="model", disable=not processes.is_main_process):
            context, of_model = _load(compared, model, arguments, batches)
            for diagnostic in diagnostics:
                settings = {"diagnostic": diagnostic.name, **_own_code(diagnostic, arguments.imports)}
                if diagnostic.runs_at_depths:
                    settings["depths"] = list(context.depths)
                identity = {**of_model, "data": row_facts, "settings": settings}
                measured = _measure(diagnostic, context, compared, identity, before)
                written.update(row.writer for row in measured)
                if processes.is_main_process:
                    write_measurements(folder, measured, [identity, compared.training.identity])
            del context
            gc.collect()
            torch.cuda.empty_cache()
        names = {diagnostic.name for diagnostic in diagnostics}
        for writer in before.keys() - written:
            if processes.is_main_process and writer.split("/")[1] in names:  # of other models, rows or settings
                write_measurements(folder, [], [], writer)


def _measured_before(folder: Path) -> dict[str, list[Measurement]]:
    """Return what earlier runs have measured in the folder, by writer."""
    measured, _, faults = read_measurements(folder)
    for fault in faults:
        logger.warning("Left out: %s", fault)
    before = defaultdict(list)
    for row in measured:
        before[row.writer].append(row)
    return before


def _measure(
    diagnostic: Diagnostic,
    context: Context,
    compared: ComparedModel,
    identity: Identity,
    before: Mapping[str, list[Measurement]],
) -> list[Measurement]:
    """Return what a diagnostic measures of a model, or has measured; none of what it cannot, with the reason in the log."""
    key = identity_key(identity)
    who = f"{diagnostic.name} of {compared.method}"
    if reason := diagnostic.skip_reason(context):
        logger.info("Left out: %s: %s.", who, reason)
        return []
    writer = f"{WRITER}/{diagnostic.name}/{key}"
    if writer in before:
        return [replace(row, **compared.facts) for row in before[writer]]
    facts = {
        "writer": writer,
        "family": diagnostic.name,
        "benchmark": identity["data"]["source"],
        "identity": key,
        "depth": context.num_loops,
        "gates": ALL if compared.kind == "adapter" else NONE,
        **compared.facts,
    }
    try:
        return [Measurement(**{**facts, **row}) for row in diagnostic.measure(context)]
    except (TypeError, ValueError) as error:  # the other measurements are there
        logger.warning("%s left out: it measured what no row can hold (%s).", who, one_line(error))
        return []


def choose(arguments: DiagnosticArguments) -> list[Diagnostic]:
    """Import the user's own files, and return the diagnostics that are asked for."""
    for given in arguments.imports:
        with user_supplied(f"`import` names {given}, which cannot be imported"):
            runpy.run_path(given) if given.endswith(".py") else importlib.import_module(given)
    for name in arguments.diagnostics or ():
        check_choice("diagnostics", name, list(DIAGNOSTICS))
    return [DIAGNOSTICS[name]() for name in arguments.diagnostics or DIAGNOSTICS]


def _own_code(diagnostic: Diagnostic, imports: Sequence[str]) -> dict[str, list[str]]:
    """Return the hashes of the files that a user's own diagnostic may come from; of this package's its version says enough."""
    if type(diagnostic).__module__.startswith("loopdropout_trainer."):
        return {}
    files = [given if given.endswith(".py") else sys.modules[given].__file__ for given in imports]
    return {"code": [sha256(Path(file)) for file in files]}


def _load(
    compared: ComparedModel, base: ModelArguments, arguments: DiagnosticArguments, batches: list[Batch]
) -> tuple[Context, Identity]:
    """Return a model with what it is measured on, and those parts of the identity that are the model's."""
    adapter = compared.path if compared.kind == "adapter" else None
    of_model = replace(base, model_name_or_path=compared.path) if compared.kind == "merged" else base
    model, _, identity = load_in_all_processes(of_model, adapter)
    num_loops = find_looped_model(model).config.num_loops
    depths = arguments.depths or list(range(1, 2 * num_loops + 1))
    return Context(model, compared.kind, batches, depths), identity | {"loops": {"num_loops": num_loops}}
