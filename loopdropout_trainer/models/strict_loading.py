"""Strict loading: a checkpoint that lacks a weight, or has one too many or in another shape, is an error that says so.

transformers fills in what is missing with fresh weights, and logs it. Of a looped model that is never what was meant: a
checkpoint of another architecture under the same `model_type` would train and answer, wrongly.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.loading_report import LoadStateDictInfo


DOWNLOAD_FIELDS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class WrongWeightsError(ValueError):
    """A checkpoint's weights are not those of the model that its configuration describes."""


def check_weights(model: PreTrainedModel, report: LoadStateDictInfo, source: str, may_reshape: bool = False) -> None:
    """Raise WrongWeightsError, naming weights, if a checkpoint holds others than the model by transformers' `report`, or NaN.

    Tied and ignorable weights are taken out of the report; `may_reshape`: the caller gave `ignore_mismatched_sizes`.
    """
    model._adjust_missing_and_unexpected_keys(report)
    if model.base_model is model:  # a backbone, of whose checkpoint the head is a part
        report.unexpected_keys -= {name for name in report.unexpected_keys if name.startswith("lm_head.")}
    tied = getattr(model, "all_tied_weights_keys", {})
    either = {**tied, **{source: target for target, source in tied.items()}}
    wrong = []
    if absent := {name for name in report.missing_keys if name not in either or either[name] in report.missing_keys}:
        wrong.append(f"it lacks {_listed(absent)}")
    if report.unexpected_keys:
        wrong.append(f"it holds {_listed(report.unexpected_keys)}, which the model does not have")
    if report.mismatched_keys and not may_reshape:
        name, held, wanted = min(report.mismatched_keys)
        wrong.append(f"its `{name}` is {list(held)} instead of {list(wanted)}")
    if wrong:
        raise WrongWeightsError(
            f"The weights of {source} are not those of the {type(model).__name__} that its configuration describes: "
            f"{'; '.join(wrong)}."
        )
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.is_meta and not torch.isfinite(weight).all():
            raise WrongWeightsError(f"{source} holds NaN or infinity in `{name}`.")


def load_strictly(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Let a model class refuse, from now on, checkpoints that do not hold exactly its weights; return the class."""
    finish = model_class._finalize_model_loading

    # Here, since the loading report of `from_pretrained` comes after fresh weights, and not for every way to load.
    def checked(model, load_config, loading_info):
        source = load_config.pretrained_model_name_or_path or "the state dict"
        check_weights(model, loading_info, source, load_config.ignore_mismatched_sizes)
        return finish(model, load_config, loading_info)

    model_class._finalize_model_loading = staticmethod(checked)
    return model_class


def _listed(names: Collection[str]) -> str:
    """Return names with their numbers as stars, and how many each stands for."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in sorted(names))
    listed = [f"`{name}` ({count} times)" if count > 1 else f"`{name}`" for name, count in counts.items()]
    more = f" and {len(listed) - 6} others" if len(listed) > 6 else ""
    return ", ".join(listed[:6]) + more


def checkpoint_names(name_or_path: str, **init_kwargs: Any) -> list[str] | None:
    """Return the names of the tensors in a safetensors checkpoint, without loading them; None if there is none.

    From the Hub the index is read, or the file itself if there is only one; by those keywords in `DOWNLOAD_FIELDS`.
    """
    download = {key: init_kwargs[key] for key in DOWNLOAD_FIELDS if key in init_kwargs}
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    index = cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME, **optional, **download)
    if index is not None:
        return list(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"])
    file = cached_file(name_or_path, SAFE_WEIGHTS_NAME, **optional, **download)
    if file is None:
        return None
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())
