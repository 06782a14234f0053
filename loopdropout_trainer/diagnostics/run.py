"""One run of diagnostics: every diagnostic on every model, kept on disk as they come, then written as measurements."""

from __future__ import annotations

import gc
import importlib
import logging
import runpy
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from loopdropout_trainer.data import load_tokenizer
from loopdropout_trainer.diagnostics.compared import ComparedModel, DiagnosticArguments, find_models
from loopdropout_trainer.diagnostics.diagnostic import DIAGNOSTICS, Context, Diagnostic
from loopdropout_trainer.diagnostics.rows import RowArguments, load_rows_to_score
from loopdropout_trainer.errors import one_line, user_supplied
from loopdropout_trainer.evaluation.answer_log import AnswerLog
from loopdropout_trainer.evaluation.loading import load_model
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.processes import all_processes, from_main_process
from loopdropout_trainer.record.identity import Identity, identity_key, model_identity
from loopdropout_trainer.record.measurement import ALL, NONE, Measurement, write_measurements
from loopdropout_trainer.saving.files import folder_lock
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.recipe import RecipeError
from loopdropout_trainer.training.scores import Batch


logger = logging.getLogger(__name__)

WRITER = "diagnostics"
"""Of measurements: `diagnostics/NAME`."""

FOLDER = "diagnostics"


def run_diagnostics(model: ModelArguments, rows: RowArguments, arguments: DiagnosticArguments) -> None:
    """Run the diagnostics over all processes, and write what they measure; what an earlier run measured is not measured again.

    Raises:
        RecipeError, SetupError, DataError: if something that is named cannot be loaded or compared.
        LockedError: if another run of diagnostics is at work in the folder.
    """
    processes = all_processes(arguments.use_cpu)
    folder, diagnostics = Path(arguments.output_dir) / FOLDER, choose(arguments)
    with processes.main_process_first():
        models = find_models(arguments, model, rows)
        with user_supplied("The rows cannot be loaded"):
            tokenizer = load_tokenizer(model, chat_template_path=rows.chat_template_path, eos_token=rows.eos_token)
            batches, row_facts = load_rows_to_score(rows, tokenizer)
    with ExitStack() as lock:
        from_main_process(lambda: lock.enter_context(folder_lock(folder)))
        log = AnswerLog(folder / "parts", processes.process_index)
        log.found = from_main_process(lambda: log.read({}))
        measured: dict[str, list[Measurement]] = {each.name: [] for each in diagnostics}
        identities: list[Identity] = []
        for compared in tqdm(models, unit="model", disable=not processes.is_main_process):
            context, of_model = _load(compared, model, arguments, batches)
            for each in diagnostics:
                identity = {**of_model, "data": row_facts, "settings": {"diagnostic": each.name}}
                identity["settings"] |= {"depths": list(context.depths)} if each.runs_at_depths else {}
                identities.append(identity)
                measured[each.name] += _measure(each, context, compared, identity, log)
            del context
            gc.collect()
            torch.cuda.empty_cache()
        if processes.is_main_process:
            identities += [compared.identity for compared in models]
            for name, found in measured.items():
                write_measurements(folder, found, identities, f"{WRITER}/{name}")


def _measure(
    diagnostic: Diagnostic, context: Context, compared: ComparedModel, identity: Identity, log: AnswerLog
) -> list[Measurement]:
    """Return what a diagnostic measures of a model, or has measured; none of what it cannot, with the reason in the log."""
    key, who = identity_key(identity), f"{diagnostic.name} of {compared.method}"
    if reason := diagnostic.skip_reason(context):
        logger.info("Left out: %s: %s.", who, reason)
        return []
    facts = {
        "writer": f"{WRITER}/{diagnostic.name}",
        "family": diagnostic.name,
        "benchmark": identity["data"]["source"],
        "identity": key,
        "depth": context.num_loops,
        "gates": ALL if compared.kind == "adapter" else NONE,
        **compared.facts,
    }
    if key in log.found:
        return [Measurement(**{**facts, **row}) for row in log.found[key]]
    try:
        rows = [dict(row) for row in diagnostic.measure(context)]
        found = [Measurement(**{**facts, **row}) for row in rows]
    except (TypeError, ValueError) as error:  # the other measurements are there
        logger.warning("%s left out: it measured what no row can hold (%s).", who, one_line(error))
        return []
    log.keep([(key, rows)])
    return found


def choose(arguments: DiagnosticArguments) -> list[Diagnostic]:
    """Import the user's own files, and return the diagnostics that are asked for."""
    for given in arguments.imports:
        with user_supplied(f"`import` names {given}, which cannot be imported"):
            runpy.run_path(given) if given.endswith(".py") else importlib.import_module(given)
    for name in arguments.diagnostics or ():
        if name not in DIAGNOSTICS:
            raise RecipeError(f"`diagnostics` must be among {', '.join(DIAGNOSTICS)}; got {name!r}.")
    return [DIAGNOSTICS[name]() for name in arguments.diagnostics or DIAGNOSTICS]


def _load(
    compared: ComparedModel, base: ModelArguments, arguments: DiagnosticArguments, batches: list[Batch]
) -> tuple[Context, Identity]:
    """Return a model with what it is measured on, and those parts of the identity that are the model's."""
    state, adapter = all_processes(), compared.path if compared.kind == "adapter" else None
    of_model = replace(base, model_name_or_path=compared.path) if compared.kind == "merged" else base
    with state.main_process_first():
        model, tokenizer = load_model(of_model, adapter)
    num_loops = find_looped_model(model).config.num_loops
    identity = from_main_process(lambda: model_identity(model, tokenizer)) | {"loops": {"num_loops": num_loops}}
    depths = arguments.depths or list(range(1, 2 * num_loops + 1))
    return Context(model.to(state.device), compared.kind, batches, depths), identity
