"""Decide if a model is the base model that an adapter was trained on.

A training saves a digest of its base model's weights in `loop_dropout.json`. The digest decides for copies in other folders,
mirrors on the Hub and other revisions. Without it, as for adapters of other programs, only names and commits can be compared.
A difference is a warning then, because two names may have the same weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import public_name
from loopdropout_trainer.hub import resolve_commit
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving.facts import Source
from loopdropout_trainer.saving.metadata import METADATA_FILE


logger = logging.get_logger(__name__)

_COMMIT = re.compile("[0-9a-f]{40}")
_NUM_SAMPLES = 64
_COMPARABLE = (torch.bfloat16, torch.float32, torch.float64)
"""Data types that round to the same bfloat16 number. float16 and quantized weights have lost it."""


def digest_weights(model: nn.Module) -> str | None:
    """Return a digest of a model's weights without its adapters.

    It has the first 64 numbers of each weight in bfloat16, and no names. So it stays the same if the model is copied, if its
    files are divided otherwise, if it is loaded in float32, and if a library renames its modules.

    Returns:
        The digest, or None if weights are quantized, in float16, sharded or not loaded.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    samples = []
    for name, weight in base.named_parameters():
        if ".lora_" in name:
            continue
        is_whole = not (isinstance(weight, DTensor) or hasattr(weight, "ds_id") or weight.is_meta)
        if not is_whole or weight.dtype not in _COMPARABLE:
            return None
        sample = weight.detach().flatten()[:_NUM_SAMPLES].bfloat16()
        samples.append(sample.cpu().view(torch.int16).numpy().tobytes())
    return xxhash.xxh3_128_hexdigest(b"|".join(sorted(samples)))


def describe_weights(config: Any, dtype: Any) -> dict[str, Any]:
    """Return the data type and the quantization of a base model's weights, as JSON."""
    quantization = getattr(config, "quantization_config", None)
    if hasattr(quantization, "to_dict"):
        quantization = quantization.to_dict()
    as_json = json.loads(json.dumps(quantization, default=str))  # its data types become texts
    return {"dtype": str(dtype).removeprefix("torch."), "quantization": as_json}


def check_base(source: Source, model: nn.Module) -> None:
    """Raise UserError if an adapter was trained on other weights than a model's, and warn if only their names differ.

    Args:
        source: Adapter.
        model: Looped model, with or without adapters.
    """
    trained, given = source.metadata.get("base_weights"), digest_weights(model)
    if trained is None or given is None:
        if difference := describe_difference(source, model):
            logger.warning(f"{difference} Its answers are wrong unless both have the same weights.")
    elif trained != given:
        raise UserError(
            f"The adapter in {source.folder} must run on the weights that it was trained on, of {_trained_place(source)}, got "
            f"other weights, of {_place_of(model)}. Give that base model, or remove `base_weights` from "
            f"{source.folder / METADATA_FILE} to run it anyway."
        )


def describe_difference(source: Source, model: nn.Module) -> str | None:
    """Return a sentence that names the base model of an adapter and a given model, or None if both seem to be the same.

    They seem so by their commits if both are known, else by their names. A model without a name differs from no other.
    """
    trained, given = _trained_place(source), _place_of(model)
    if not trained.name or not given.name:
        return None
    is_same = trained.name == given.name
    if trained.commit and given.commit:
        is_same = trained.commit == given.commit
    if is_same:
        return None
    return f"The adapter in {source.folder} was trained on {trained}, but the model is {given}."


class _Place(NamedTuple):
    """Where a model comes from: its folder or its name on the Hub, and its commit if it is known."""

    name: str
    commit: str | None

    def __str__(self) -> str:
        name = public_name(self.name) or "a model without a name"
        return f"{name} at {self.commit}" if self.commit else name


def _trained_place(source: Source) -> _Place:
    name, revision = source.adapter.base, source.adapter.revision
    if revision is not None and not _COMMIT.fullmatch(revision):  # a branch or tag, as PEFT saves it
        revision = resolve_commit(name, revision)
    return _find_place(name, revision)


def _place_of(model: nn.Module) -> _Place:
    looped = find_looped_model(model)
    return _find_place(looped.config.name_or_path, looped.base_revision)


def _find_place(name: str, commit: str | None) -> _Place:
    """Return the place of a model. The folder of a snapshot in the Hub's cache is named by its commit."""
    if not Path(name).is_dir():
        return _Place(name, commit)
    folder = Path(name).resolve()
    is_snapshot = _COMMIT.fullmatch(folder.name) is not None
    return _Place(str(folder), folder.name if is_snapshot else commit)
