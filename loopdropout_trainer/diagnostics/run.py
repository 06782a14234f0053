"""One run of diagnostics: every diagnostic on every model, kept on disk as they come, then a file for each."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import runpy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from loopdropout_trainer.data import load_tokenizer
from loopdropout_trainer.diagnostics.compared import ComparedModel, DiagnosticArguments, find_models
from loopdropout_trainer.diagnostics.diagnostic import DIAGNOSTICS, Context, Diagnostic
from loopdropout_trainer.diagnostics.rows import RowArguments, load_rows_to_score
from loopdropout_trainer.errors import one_line, user_supplied
from loopdropout_trainer.evaluation.answer_log import AnswerLog
from loopdropout_trainer.evaluation.loading import load_model, model_identity
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.processes import all_processes, from_main_process
from loopdropout_trainer.saving.files import sha256_of_json, write_atomically
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.recipe import RecipeError
from loopdropout_trainer.settings.versions import library_versions
from loopdropout_trainer.training.memory import device_name


FOLDER = "diagnostics"


def run_diagnostics(model: ModelArguments, rows: RowArguments, arguments: DiagnosticArguments) -> None:
    """Run the diagnostics over all processes, and write a file for each; what an earlier run measured is not measured again.

    Raises:
        RecipeError, SetupError, DataError: if something that is named cannot be loaded or compared.
    """
    processes = all_processes(arguments.use_cpu)
    folder, diagnostics = Path(arguments.output_dir) / FOLDER, choose(arguments)
    with processes.main_process_first():
        models = find_models(arguments, model, rows)
        with user_supplied("The rows cannot be loaded"):
            tokenizer = load_tokenizer(model, chat_template_path=rows.chat_template_path, eos_token=rows.eos_token)
            batches, row_facts = load_rows_to_score(rows, tokenizer)
    log = AnswerLog(folder / "parts", processes.process_index)
    log.found = from_main_process(lambda: log.read({}))
    runs, left_out = ({each.name: [] for each in diagnostics} for _ in range(2))
    of_base: dict[str, Any] = {}
    for compared in tqdm(models, unit="model", disable=not processes.is_main_process):
        context, settings = _load(compared, model, arguments, batches, row_facts)
        of_base = of_base or settings  # which comes first
        for each in diagnostics:
            reason = each.skip_reason(context)
            key = sha256_of_json([each.name, settings, context.depths if each.runs_at_depths else None])
            if reason is None and key not in log.found:
                began, measured = time.perf_counter(), each.measure(context)
                try:
                    measured = json.loads(json.dumps(dict(measured), allow_nan=False))
                    log.keep([(key, {"seconds": round(time.perf_counter() - began, 2), "measured": measured})])
                except (TypeError, ValueError) as error:  # the other measurements are there
                    reason = f"it measured what no JSON file of finite numbers can hold ({one_line(error)})"
                    logging.getLogger(__name__).warning("%s of %s left out: %s.", each.name, compared.method, reason)
            if reason is None:
                runs[each.name].append({**compared.facts, **log.found[key]})
            else:
                left_out[each.name].append({**compared.facts, "reason": reason})
        del context
        gc.collect()
        torch.cuda.empty_cache()
    where = {"versions": library_versions(), "device": device_name(), "num_processes": processes.num_processes}
    for each in (each for each in diagnostics if runs[each.name] and processes.is_main_process):
        content = {"schema": 1, "diagnostic": each.name, "title": each.title, "settings": of_base}
        content |= {"runs": runs[each.name], "left_out": left_out[each.name], **where}
        write_atomically(folder / f"{each.name}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")


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
    compared: ComparedModel,
    base: ModelArguments,
    arguments: DiagnosticArguments,
    batches: list[dict[str, torch.Tensor]],
    row_facts: dict[str, Any],
) -> tuple[Context, dict[str, Any]]:
    """Return a model with what it is measured on, and all that a measurement depends on."""
    state, adapter = all_processes(), compared.path if compared.kind == "adapter" else None
    of_model = replace(base, model_name_or_path=compared.path) if compared.kind == "merged" else base
    with state.main_process_first():
        model, _ = load_model(of_model, adapter)
    identity = from_main_process(lambda: model_identity(of_model, model, adapter))
    num_loops = find_looped_model(model).config.num_loops
    depths = arguments.depths or list(range(1, 2 * num_loops + 1))
    context = Context(model.to(state.device), compared.kind, batches, depths)
    return context, {**identity, "num_loops": num_loops, "rows": row_facts}
