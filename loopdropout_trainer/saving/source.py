"""What a name given to a command is, and what it runs with.

Every command takes a name: a folder, a repository on the Hub or `tiny-ouro`. `find_source` is the only function that finds out
what it is, by the files that `folders.find_files` looks at. It returns a `Source`, and `loading.load` loads it.

A training writes `loop_dropout.json` next to its adapter, and merging writes it next to the merged model. The file has all
that a later command needs, so that a folder that was renamed, copied or uploaded gives the same `Source`. Older folders
without the file, or with an older version of it, are read from `adapter_config.json` and from the recipe of their run.

To add a kind of folder, add it to `Kind` and `find_files`, with a row in `TABLE` of tests/saving/test_source.py. A kind that
no command can load also needs its sentence in `_refusal`, and a row in `WRONG` instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.errors import UserError, as_path, check_name, choose_advice, count, join_command
from loopdropout_trainer.files import checkpoint_step, is_checkpoint, model_path, read_json_object
from loopdropout_trainer.hub import TOKENIZER_FILES, download_files, split_revision
from loopdropout_trainer.memory import read_depth
from loopdropout_trainer.results.run_files import (
    RECIPE_FILE,
    RESULTS_FILE,
    RUN_FILE,
    is_of_training,
    read_own_results,
    read_recipe,
    recipe_path,
)
from loopdropout_trainer.saving.authors_format import CONFIG_FILE, to_metadata
from loopdropout_trainer.saving.checkpoints import STATE_FILE, list_checkpoints, newest_checkpoint, warn_once
from loopdropout_trainer.saving.facts import LOADABLE, MODELS, WITHOUT_MODEL, Kind, Source
from loopdropout_trainer.saving.folders import Files, find_files, find_named
from loopdropout_trainer.saving.metadata import read_metadata
from loopdropout_trainer.saving.saved_adapter import SavedAdapter, read_saved_adapter
from loopdropout_trainer.settings.recipe_folders import list_runs


if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_SMALL_FILES = (*TOKENIZER_FILES, "*adapter_*", "looped.py", RECIPE_FILE, RESULTS_FILE)
"""Files of a repository that tell what it is. The weights of an adapter are among them, a model's are not."""


def find_source(
    name: str | Path, *, revision: str | None = None, accept: Collection[Kind] = LOADABLE, what: str = "model"
) -> Source:
    """Find out what a name is and what it runs with.

    Args:
        name: Folder, Hub name, Hub name with its revision (`user/name@branch`), or `tiny-ouro`.
        revision: Branch, tag or commit of a Hub name without one.
        accept: Kinds that the caller can use.
        what: Noun for the thing in messages.

    Raises:
        UserError: If there is no such folder or repository, if it holds no model and no adapter, or one that the caller cannot
            use. An unfinished run names its newest complete checkpoint.
    """
    text = str(as_path(what, name))
    path = Path(model_path(text)).expanduser()
    if path.is_dir():
        repository, commit, folder = None, None, path
    else:
        repository, revision = split_revision(text, revision)
        folder, commit = download_files(repository, revision, what, _SMALL_FILES)
    metadata = read_metadata(folder)
    files = find_files(folder.resolve(), text, metadata)
    if files.kind not in accept:
        raise UserError(_refusal(files.kind, text, folder))
    if files.kind in WITHOUT_MODEL:
        run, recipe = recipe_path(folder).parent, read_recipe(folder)
        return Source(text, files.kind, folder.resolve(), repository, commit, run=run, recipe=recipe)
    if files.folder != folder.resolve():  # a named adapter
        metadata = read_metadata(files.folder) or metadata
    source = _read_source(text, files, folder.resolve(), repository, commit, metadata)
    source = replace(source, columns=_read_columns(source))
    if source.is_adapter and source.run == source.saved_in:
        _warn_of_later_results(source)
    return source


def find_source_of(name: str | Path, adapter: str | Path | None = None, revision: str | None = None) -> Source:
    """Find the source of a model or adapter, or of an adapter over a given base model.

    Args:
        name: Model or adapter, or the base model of `adapter`.
        adapter: Adapter over the base model `name`.
        revision: Branch, tag or commit of a repository `name`. For an adapter in a folder, of its base model. A revision of
            `adapter` is part of its name (`user/adapter@branch`).
    """
    if adapter is not None:
        return find_source(adapter, accept=("adapter",), what="adapter").with_base(str(name), revision)
    source = find_source(name, revision=revision)
    if source.is_adapter and source.repository is None:
        return source.with_base(None, revision)
    return source


def find_base(source: Source) -> Source:
    """Return the source of the base model of an adapter, or of a model itself.

    It is loaded with the data type of the adapter's training, so that both are measured alike.

    Raises:
        UserError: If the base model is not there, which says where its name comes from, or if it is not a model.
    """
    if not source.is_adapter:
        return source
    option = choose_advice("by `--model_name_or_path`", "as in `load_model(base, adapter=folder)`")
    hint = (
        f" It is `base_model_name_or_path` in {source.folder / CONFIG_FILE}, the base model of the adapter. Change it there, "
        f"or give the base model, {option}."
    )
    check_name(source.base, lambda: hint)
    base = find_source(source.base, revision=source.revision, accept=MODELS)
    return replace(base, dtype=source.dtype or base.dtype)


def _refusal(kind: Kind, name: str, folder: Path) -> str:
    """Return why a kind of source cannot be used."""
    if kind == "unfinished run":
        return f"{_refuse_unfinished(name, folder)}{_describe_other_adapter(name, folder)}"
    if kind == "sweep":
        runs = list_runs(folder)
        return (
            f"{name} is a sweep of {count(len(runs), 'run')}. Name one of them, such as {runs[0]}. Whole sweeps are read by "
            f"`{join_command('report', name)}` and `{join_command('diagnose', name)}`."
        )
    if kind == "adapter":
        return (
            f"{name} must be a model, but it is an adapter. To train it further, set `adapter_name_or_path` in a recipe, or "
            f"load it with `load_adapter(load_model(base), {name!r}, is_trainable=True)`."
        )
    return f"{name} must be an adapter, but it is a {kind}."


def _refuse_unfinished(name: str, folder: Path) -> str:
    """Return why a run or a checkpoint without an adapter of its own cannot be used, and what to do."""
    if is_checkpoint(folder):
        return f"The checkpoint {name} is not complete: it has no {CONFIG_FILE}. Use another checkpoint of the run."
    if _has_ended_in_python(folder):
        return (
            f"{name} has no adapter of its own, although its training has ended. In Python, {_advise_saving(folder)}"
        )
    newest = newest_checkpoint(folder)
    if newest is None:
        return f"The run in {name} has no model yet, and no complete checkpoint. Train it first."
    option = choose_advice("`--resume_from_checkpoint true`", "`train(resume_from_checkpoint=True)`")
    return (
        f"The run in {name} has no model yet, because it is not finished. Its newest complete checkpoint is {newest}. Use "
        f"that folder, or continue the training with {option}."
    )


def _describe_other_adapter(name: str, folder: Path) -> str:
    """Return a sentence about an adapter in the folder of a run that another program has saved there, or ""."""
    others = find_named(folder)
    if not others:
        return ""
    return f" To load the other adapter in it, name its own folder {Path(name, others[0].name)}."


def _advise_saving(run: Path) -> str:
    """Return the end of a sentence about a run in Python whose adapter was not saved at its end."""
    newest = newest_checkpoint(run)
    other = f", or use {newest}" if newest else ""
    return f"call `trainer.save_model()` before the model is trained again{other}."


def _has_ended_in_python(folder: Path) -> bool:
    """Return whether a training in Python has ended in a folder. It writes its state at the end, and no `run.json`."""
    if (folder / RUN_FILE).is_file():
        return False
    try:
        step = read_json_object(folder / STATE_FILE).get("global_step")
    except (OSError, ValueError):
        return False
    checkpoints = list_checkpoints(folder)  # a later training may have been stopped
    return isinstance(step, int) and (not checkpoints or step >= checkpoint_step(checkpoints[-1]))


def _warn_of_later_results(source: Source) -> None:
    """Warn if a training has ended in the folder of a run after the adapter there was saved.

    In Python, `train` writes the results and `save_model` the adapter, so a training that was continued can lack the second.
    """
    step = source.metadata.get("step")
    if step is None:  # of an older adapter, or one of another program
        return
    rows = [row for row in read_own_results(source.run) if is_of_training(row) and row.get("training") is not None]
    if not rows:
        return
    last = rows[-1]  # older versions kept the results of former trainings before it
    is_same = last["training"] == source.training_id
    if is_same and last["step"] <= step:
        return
    is_untrained = source.training_id is None  # as if a trainer saves its adapter before it trains
    results = "another training"
    if is_same or is_untrained:
        results = f"step {last['step']:,}"
    warn_once(
        f"{source.name} holds the adapter of step {step:,}, but the results there are of {results}. After a training in "
        f"Python, {_advise_saving(source.run)}"
    )


def _read_source(
    name: str,
    files: Files,
    given: Path,
    repository: str | None,
    commit: str | None,
    metadata: Mapping[str, Any],
) -> Source:
    """Return the source of a model or an adapter without the columns of its results."""
    run, recipe = recipe_path(given).parent, read_recipe(given)
    adapter = None
    if files.kind == "adapter":
        adapter = read_saved_adapter(files.folder)
        if adapter.is_authors and not metadata:  # the paper's authors save the settings in a format of their own
            metadata = to_metadata(adapter.fields)
    depths = metadata.get("depths")
    quantization = (recipe.get("model_init_kwargs") or {}).get("quantization_config")
    # An adapter's own metadata win over the recipe of its training, which a copy of the folder may lack.
    source = Source(
        name=name,
        kind=files.kind,
        folder=files.folder,
        repository=repository,
        commit=commit,
        saved_in=given,
        run=run,
        rule=metadata.get("rule"),
        depths=None if depths is None else (min(depths), max(depths)),
        prompt_template=metadata.get("prompt_template", _prompt_template(recipe)),
        is_chat=metadata.get("is_chat"),
        dtype=metadata.get("dtype", recipe.get("dtype")),
        quantization=metadata.get("quantization", quantization),
        recipe=recipe,
        training_id=metadata.get("training_id"),
        metadata=metadata,
        adapter=adapter,
    )
    if adapter is not None:
        source = _read_training(source, adapter)
    else:
        base = repository or str(files.folder)
        source = replace(source, base=base, revision=commit, num_loops=_read_own_depth(files.folder))
    return _with_tokenizer(source, [files.folder, given, run])


def _with_tokenizer(source: Source, folders: Sequence[Path]) -> Source:
    """Return a source with the place of its tokenizer: the first of some folders that has one, or the base model."""
    of_base = (source.base, source.revision)
    if source.repository is not None and not source.is_adapter:  # `source.base` is the repository itself
        return replace(source, tokenizer=of_base)
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return replace(source, tokenizer=(str(folder), None))
    if source.is_adapter:  # the tokenizer of the base model lacks the chat template of the training
        return replace(source, tokenizer=of_base, chat_template=source.recipe.get("chat_template"))
    return replace(source, tokenizer=of_base)


def _read_training(source: Source, adapter: SavedAdapter) -> Source:
    """Return the source of an adapter with the base model and the depth of its training."""
    recipe, revision = source.recipe, adapter.revision
    is_same_base = model_path(recipe.get("model_name_or_path")) == adapter.base
    if revision is None and is_same_base and recipe.get("model_revision") not in (None, "main"):
        revision = recipe["model_revision"]  # the base model of an adapter that was saved without its commit
    own_depth = adapter.find_own_depth()
    return replace(
        source,
        base=adapter.base,
        revision=revision,
        num_loops=source.metadata.get("num_loops") if own_depth is None else own_depth,
        gates="at any depth" if own_depth is None else "at its own depth",
    )


def _read_own_depth(folder: Path) -> int | None:
    """Return the depth that a model's configuration names, or None for a model that is not looped.

    The class of the configuration knows it. The field of a usual family is read from the file instead, because the import of
    the classes takes a second.
    """
    try:
        depth = read_depth(read_json_object(folder / "config.json"))
    except (OSError, UserError):  # loading it says what is wrong
        return None
    if depth is not None:
        return depth
    from loopdropout_trainer.looped import DESCRIPTIONS

    config = read_model_config(folder)
    if config is None:
        return None
    for model_class, description in DESCRIPTIONS.items():
        if isinstance(config, model_class.config_class):
            return getattr(config, description.depth_field, None)
    return getattr(config, "num_loops", None)


def read_model_config(name_or_path: str | Path, revision: str | None = None) -> PreTrainedConfig | None:
    """Return the configuration of a model, or None if it cannot be read, which loading the model explains."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name_or_path, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError):
        return None


def _prompt_template(recipe: Mapping[str, Any]) -> str | None:
    """Return the format of the prompts that a recipe describes, or None if its data have no template."""
    from loopdropout_trainer.data import DataArguments
    from loopdropout_trainer.settings.recipe import build

    if not recipe:
        return None
    try:
        (data,) = build([DataArguments], recipe)
    except UserError:  # a preparation of the user that is not imported here
        return None
    return data.prompt_format


def _read_columns(source: Source) -> dict[str, Any]:
    """Return the columns that identify results of a source, from its metadata or the results of its training."""
    place = source.name if source.repository else str(source.folder)  # with the branch of a repository
    name = Path(source.name).resolve().name
    if not source.is_adapter:
        return {"method": name, "model": place}
    metadata = source.metadata
    columns = {column: metadata.get(column) for column in ("method", "seed", "step")}
    if columns["method"] is None:  # an older adapter, or one of another program
        columns["method"] = name
        for row in read_own_results(source.run):
            if is_of_training(row):
                columns |= {column: row[column] for column in ("method", "seed", "step")}
        if is_checkpoint(source.folder):
            columns["step"] = checkpoint_step(source.folder)
    return {**columns, "adapter": place, "training": source.training_id}
