"""A training is resumed only as it was: with the settings, the adapter and the data of its checkpoint."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from datasets import Dataset
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length
from transformers.utils import logging

from loopdropout_trainer.errors import UserError, count
from loopdropout_trainer.gates.rule import is_packaged
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.results.recipe_changes import CHOICE, RESUMABLE, Difference, compare_recipes, join_clauses
from loopdropout_trainer.results.training_results import count_examples
from loopdropout_trainer.saving.authors_format import WEIGHTS_FILE
from loopdropout_trainer.saving.base_model import check_base
from loopdropout_trainer.saving.checkpoints import (
    EARLY_STOPPING,
    RESUMPTION,
    Checkpoint,
    asks_for_newest,
    complete_checkpoints,
    find_changed_choice,
    find_checkpoint,
    find_shortening,
    list_checkpoints,
    load_state,
)
from loopdropout_trainer.saving.saved_adapter import adapter_folder
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.training.clock import StepClock


if TYPE_CHECKING:
    from loopdropout_trainer.gates import GateRule
    from loopdropout_trainer.training.config import GateConfig

logger = logging.get_logger(__name__)

_ADAPTER_FIELDS = ("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern")
"""Fields of a LoraConfig that the names of its tensors do not tell."""


class ResumptionCallback(TrainerCallback, ExportableState):
    """Keep in each checkpoint how it was trained.

    Attributes:
        settings: Settings from `training_settings`.
        data: Facts from `describe_data`.
        passes: Number of passes over the data since the training or its continuation began.
        training_number: Number of the training in its folder, from `number_training`.
        tokens_before: Number of tokens of earlier calls of `train`, which the logged `num_tokens` has, too.
        clock: Clock of the training, whose seconds a checkpoint keeps.
    """

    settings: Mapping[str, Any] = MappingProxyType({})
    data: Mapping[str, Any] = MappingProxyType({})
    passes = 0
    training_number = 0
    tokens_before = 0

    def __init__(self) -> None:
        self.clock = StepClock()

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        self.settings = training_settings(args, model)
        self.passes = 0
        self.clock.stop()  # of an interrupted training
        self.clock.seconds = 0.0
        if state.global_step:
            self.clock.seconds = saved_facts(state).get("step_seconds", math.nan)  # older checkpoints have none
            self.tokens_before = saved_facts(state).get("tokens_before", 0)
        # A resumed training skips as many batches of the epoch as the checkpoint has trained. Of other data it would skip
        # examples that were never trained, and train others twice, without an error.
        self.data = describe_data(train_dataloader.dataset)
        is_resumed = state.global_step > 0
        before = saved_facts(state).get("data")
        if is_resumed and before and self.data and before["digest"] != self.data["digest"]:
            raise UserError(
                f"The training data changed: the checkpoint was trained on {before['examples']:,} examples (digest "
                f"{before['digest']}), got {self.data['examples']:,} examples ({self.data['digest']}). Restore the data, or "
                "start a new training in another `output_dir`."
            )
        if is_resumed:
            # Else it is evaluated, saved and logged at the steps of the checkpoint.
            state.compute_steps(args, state.max_steps)
            self._begin_choice(args, state)
        if is_resumed and state.is_world_process_zero:
            text = f"Continuing from checkpoint-{state.global_step} of {state.max_steps}"
            if state.global_step >= state.max_steps:
                text = f"The training has ended at checkpoint-{state.global_step}, so nothing is left to train"
            tqdm.write(text)

    def _begin_choice(self, args: GateConfig, state: TrainerState) -> None:
        """Forget the best checkpoint so far if it was chosen by another metric, or none was chosen."""
        field = find_changed_choice(state, args)
        if field is None:
            return
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        stopping = state.stateful_callbacks.get(EARLY_STOPPING)
        if isinstance(stopping, dict):
            stopping["attributes"]["early_stopping_patience_counter"] = 0
        if args.metric_for_best_model is not None and state.is_world_process_zero:
            logger.warning(
                f"`{field}` changed, so only evaluations after step {state.global_step:,} count for the best checkpoint."
            )

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        # In several processes, the loader that skips trained batches does not pass the epoch on to every sampler.
        if hasattr(train_dataloader, "set_epoch"):
            train_dataloader.set_epoch(int(state.epoch))
        self.passes += 1
        if self.passes == 1:  # now the trackers have started, which take seconds
            self.clock.start()
        if self.passes == 2 and not has_length(train_dataloader):
            logger.warning(
                "The stream of training examples begins again. The training cannot be resumed from here on."
            )

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps."""
        facts = {
            "settings": dict(self.settings),
            "data": dict(self.data),
            "passes": self.passes,
            "training_number": self.training_number,
            "step_seconds": self.clock.seconds,
            "tokens_before": self.tokens_before,
        }
        return {"args": {}, "attributes": facts}


def saved_facts(state: TrainerState) -> dict[str, Any]:
    """Return the facts of `ResumptionCallback` in the state of a checkpoint, or an empty dict."""
    saved = state.stateful_callbacks.get(RESUMPTION)
    if isinstance(saved, dict):
        return saved["attributes"]
    return {}


def training_settings(args: GateConfig, model: PeftModel) -> dict[str, Any]:
    """Return the settings that must stay the same if a training is resumed, as JSON values.

    They are fields of `args` and of the adapter, the processes with the examples of a step in all of them, and how the base
    model runs. `check_base` compares its weights.
    """
    lora = model.peft_config[model.active_adapters[0]]
    base = model.get_base_model()
    settings = {
        **args.to_dict(),
        **process_settings(args),
        "base_dtype": str(base.dtype).removeprefix("torch."),
        "attn_implementation": base.config._attn_implementation,
        **{name: getattr(lora, name) for name in _ADAPTER_FIELDS},
        "num_loops": find_looped_model(model).num_loops,
        "rule_code": digest_rule(args.make_rule()),
    }
    # A checkpoint has the fields of the choice, because the best one so far depends on them.
    dropped = RESUMABLE - CHOICE
    kept = {name: value for name, value in settings.items() if name not in dropped}
    return json.loads(json.dumps(kept, default=str))


def digest_rule(rule: GateRule) -> str | None:
    """Return the name of the class of a user's rule with a digest of its code, if the code is known, or None for others."""
    cls = type(rule)
    if is_packaged(cls):
        return None
    code = _read_code(cls)
    if not code:  # of an interactive Python
        return cls.__qualname__
    return f"{cls.__qualname__} {hashlib.blake2b(code.encode(), digest_size=8).hexdigest()}"


def _read_code(cls: type) -> str:
    """Return the code of a class as far as it is known. Of a class in a notebook, Python finds only the functions."""
    errors = (OSError, TypeError)
    with suppress(*errors):
        return inspect.getsource(cls)
    texts = []
    for function in filter(inspect.isfunction, vars(cls).values()):
        with suppress(*errors):
            texts.append(inspect.getsource(function))
    return "".join(texts)


def process_settings(args: GateConfig) -> dict[str, int]:
    """Return the number of processes, each of which saves its random state, and the examples of a step in all of them."""
    return {"num_processes": args.world_size, "examples_per_step": args.examples_per_step}


def find_other_processes(checkpoint: Checkpoint, args: GateConfig) -> str | None:
    """Return why a training cannot continue from a checkpoint in these processes, as a message with the fix, or None."""
    return _find_other_settings(checkpoint, saved_facts(load_state(checkpoint)), process_settings(args))


def describe_data(dataset: Any) -> dict[str, Any]:
    """Return the numbers of examples and of packed rows, and a digest of their content in any order of columns.

    It is empty for a stream, and there is no number of packed rows without packing.
    """
    if not isinstance(dataset, Dataset):
        return {}
    digest = hashlib.blake2b(digest_size=8)
    for batch in dataset.with_format("arrow").iter(1000):
        # Equal examples must have equal bytes. So the columns are sorted, and the metadata and the division into chunks, which
        # depend on the history of the dataset, are removed.
        sink = pa.BufferOutputStream()
        table = batch.select(sorted(batch.column_names)).replace_schema_metadata(None).combine_chunks()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        digest.update(sink.getvalue())
    num_examples, num_packed_rows = count_examples(dataset)
    packed = {} if num_packed_rows is None else {"packed_rows": num_packed_rows}
    return {"examples": num_examples, **packed, "digest": digest.hexdigest()}


_NAMES_OF_FORMATS = ("arrow", "csv", "generator", "json", "pandas", "parquet", "sql", "text")
"""Names that `datasets` gives to data without a name."""


def describe_training_data(trainer: Trainer) -> str | None:
    """Return the name of the training data, if it has one, with the number of its examples and their digest.

    Commands have the names of their files instead, so it is None for them, and for a stream.
    """
    data = trainer.resumption.data
    if trainer.recipe is not None or not data:
        return None
    text = f"{count(data['examples'], 'example')} (digest {data['digest']})"
    name = trainer.train_dataset.info.dataset_name
    if name is None or name in _NAMES_OF_FORMATS:
        return text
    return f"{name}, {text}"


def describe_resuming(trainer: Trainer) -> str:
    """Return how a training is continued, in code: by an option of its command, or in Python."""
    is_command = trainer.recipe is not None  # which a command gives its trainer
    return "`--resume_from_checkpoint true`" if is_command else "`train(resume_from_checkpoint=True)`"


def find_resumable(trainer: Trainer, name: str | bool | None) -> Checkpoint | None:
    """Return the checkpoint that `resume_from_checkpoint` names, if a trainer can continue from it.

    With `True`, it is the newest one with the settings and the adapter of the trainer, in the order of `list_checkpoints`. A
    folder can also have checkpoints of other trainings, and a warning says so if they are passed over, or if a new training
    starts.

    Raises:
        UserError: If a training cannot continue from the checkpoint, is shorter, or belongs to other settings or another
            adapter. If there is no checkpoint although one is asked for, and the trainer has trained its model before.
    """
    folder = trainer.args.output_dir
    if asks_for_newest(name):
        checkpoint = _find_own_checkpoint(trainer)
    else:
        checkpoint = find_checkpoint(name, folder)
        if checkpoint is not None:
            _check_checkpoint(trainer, checkpoint)
    if checkpoint is None:
        if name and trainer.state.global_step:
            raise UserError(
                f"`resume_from_checkpoint` must be False, because {folder} has no checkpoint and the model is "
                f"already trained for {count(trainer.state.global_step, 'step')}. Call `train()` to train it further."
            )
        _warn_of_others(trainer)
        return None
    shortening = find_shortening(checkpoint, trainer.args)
    if shortening is not None:
        raise UserError(shortening)
    if trainer.is_deepspeed_enabled and trainer.is_world_process_zero():
        logger.warning(
            f"DeepSpeed unpickles the files of {checkpoint}, which can run code in them, so continue only from a "
            "checkpoint that you trust."
        )
    return checkpoint


def _warn_of_others(trainer: Trainer) -> None:
    """Warn before a new training begins in a folder with checkpoints of another training."""
    folder = trainer.args.output_dir
    others = list_checkpoints(folder)
    if not others or not trainer.is_world_process_zero():
        return
    if next(complete_checkpoints(folder), None) is None:  # as after a program that was killed in its first saving
        logger.warning(
            f"{folder} has no checkpoint that a training can continue from, so this training starts at its first step. It "
            "replaces the checkpoints of its own steps and keeps the others."
        )
    else:
        logger.warning(
            f"{folder} has checkpoints of an earlier training up to {others[-1].name}, which this training does not continue. "
            "It replaces the checkpoints of its own steps and keeps the others. To continue the earlier training, use "
            f"{describe_resuming(trainer)}. To keep all of its checkpoints, set another `output_dir`."
        )


def _find_own_checkpoint(trainer: Trainer) -> Checkpoint | None:
    """Return the newest complete checkpoint with the settings and the adapter of a trainer, or None without a checkpoint.

    Raises:
        UserError: If none of the checkpoints has them, which tells what differs in the newest one.
    """
    refusal = None
    for checkpoint in complete_checkpoints(trainer.args.output_dir):
        try:
            _check_checkpoint(trainer, checkpoint)
        except UserError as error:
            refusal = refusal or error
            continue
        if refusal is not None and trainer.is_world_process_zero():
            logger.warning(f"The training continues from {checkpoint}, not from the newest checkpoint. {refusal}")
        return checkpoint
    if refusal is not None:
        raise refusal
    return None


def _check_checkpoint(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Raise UserError unless a checkpoint belongs to a training with the settings, adapter and base model of a trainer.

    This is the only place that decides it. `ResumptionCallback` compares the data, as soon as transformers has prepared them.
    """
    facts = saved_facts(load_state(checkpoint))
    other_settings = _find_other_settings(checkpoint, facts, training_settings(trainer.args, trainer.model))
    if other_settings is not None:
        raise UserError(other_settings)
    _check_tensors(checkpoint, trainer.model)
    check_base(find_source(checkpoint), trainer.model)
    if facts.get("passes", 0) > 1 and not has_length(trainer.train_dataset):
        raise UserError(
            f"`resume_from_checkpoint` must be a checkpoint of the first pass over a stream, but {checkpoint} is in pass "
            f"{facts['passes']}. Load the dataset without `streaming`, or start a new training."
        )


def _find_other_settings(checkpoint: Checkpoint, facts: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the message about the settings that differ from a checkpoint with these facts, or None."""
    before = facts.get("settings") or {}
    known = [name for name in now if name in before]  # other versions of the libraries have other fields
    difference = compare_recipes(before, now, RESUMABLE, known)
    if difference is None:
        return None
    differences = [difference, *difference.others]
    if len(differences) > 1:  # the number of examples of a step follows from the others
        differences = [other for other in differences if other.field != "examples_per_step"]
    first = differences[0]
    changes = join_clauses([*map(_describe_change, differences)])
    kind, fix = "settings", "Restore the setting"
    if len(differences) > 1:
        fix = "Restore all of them"
    elif first.field == "num_processes":
        noun = "process" if first.saved == 1 else "processes"
        fix = f"Continue it with {first.saved} {noun}"
    elif first.field == "rule_code":
        kind, fix = "code", "Restore the code"
    return f"{checkpoint} was trained with other {kind}: {changes}. {fix}, or start a new training in another `output_dir`."


def _describe_change(difference: Difference) -> str:
    """Return the clause about one of the settings of `training_settings` that changed."""
    if difference.field == "base_dtype":  # which no field has as its name
        return f"the data type of the base model changed from {difference.saved} to {difference.new}"
    if difference.field == "rule_code":
        name = str(difference.saved).split()[0]  # before the digest
        return f"the code of the rule {name}, with its comments and docstrings, changed"
    return difference.describe()


def _check_tensors(checkpoint: Checkpoint, model: PeftModel) -> None:
    """Raise UserError if the adapter of a model has other tensors than the adapter of a checkpoint."""
    adapter = model.active_adapters[0]
    file = adapter_folder(checkpoint, adapter) / WEIGHTS_FILE
    if not file.is_file():  # DeepSpeed and FSDP have files of their own
        return
    with safe_open(file, "pt") as saved:
        before = set(saved.keys())
    now = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False).keys()
    has_lost_factors = any("lora_" in name for name in before - now)  # a checkpoint may have resized embeddings, too
    if now - before or has_lost_factors:
        differing = min(before ^ now, key=lambda name: ("lora_" not in name, name))  # the first factor, if one differs
        raise UserError(
            f"{checkpoint} has another adapter: only one of it and the model has the tensor `{differing}`. Restore "
            "the configuration of the adapter, or start a new training in another `output_dir`."
        )
