"""Load looped models and their adapters."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from loopdropout_trainer.errors import UserError, as_path, first_line, short_repr
from loopdropout_trainer.files import TINY_OURO_PATH, write_file
from loopdropout_trainer.hints import USUAL_DTYPES, closest_known
from loopdropout_trainer.keywords import explain_unknown
from loopdropout_trainer.looped import NotLoopedError, attach_looped_model, check_num_loops
from loopdropout_trainer.lora import adapted_layers, add_gates, attach_adapter, check_peft_config, remove_gates
from loopdropout_trainer.models.external import loading_fields
from loopdropout_trainer.models.looped_modeling import check_checkpoint, check_weights, explain_loading
from loopdropout_trainer.renames import hide_library_warnings
from loopdropout_trainer.saving.authors_format import CONFIG_FILE
from loopdropout_trainer.saving.base_model import check_base, describe_difference
from loopdropout_trainer.saving.facts import MODELS, Source
from loopdropout_trainer.saving.metadata import write_metadata
from loopdropout_trainer.saving.saved_adapter import adapter_folder
from loopdropout_trainer.saving.source import find_base, find_source, find_source_of
from loopdropout_trainer.settings.field_hints import USUAL_NAMES
from loopdropout_trainer.tokenizers import add_end_tokens, end_tokens


logger = logging.get_logger(__name__)


def load_model(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    num_loops: int | None = None,
    device: str | torch.device | None = None,
    adapter: str | Path | None = None,
    **kwargs: Any,
) -> PreTrainedModel | PeftModel:
    """Load a base model, a merged model or an adapter for inference.

    Weights are read from safetensors files only, and code in a checkpoint is never run.

    Args:
        name_or_path: Folder or Hub name, or `tiny-ouro`. For an adapter, the base model is the model that its
            `adapter_config.json` names.
        revision: Branch, tag or commit of a model or an adapter on the Hub. For an adapter in a folder, of its base model.
            Default: the base model's commit of the training.
        dtype: Data type of the weights. "auto" is the data type of the checkpoint.
        attn_implementation: "sdpa", "eager", "flash_attention_2", ...
        num_loops: Recurrence depth K. Default: the depth that the adapter was trained at, else the model's own depth.
        device: Device of the model. Default: the CPU.
        adapter: Folder or Hub name of an adapter, in PEFT's format or in the format of the paper authors' program.
        **kwargs: Further keyword arguments of `AutoModelForCausalLM.from_pretrained`.

    Returns:
        The model in evaluation mode. With an adapter it is a `PeftModel` with gated layers.

    Raises:
        UserError: If the model or the adapter does not exist, or the adapter does not fit the model.
    """
    check_dtype(dtype)
    _check_device(device)
    as_path("name_or_path", name_or_path)
    source = find_source_of(name_or_path, adapter, revision)
    return load(
        source, dtype=dtype, attn_implementation=attn_implementation, num_loops=num_loops, device=device, **kwargs
    )


_QUANTIZATIONS = ("load_in_4bit", "load_in_8bit")
_KEYWORDS = (
    "num_loops",
    "dtype",
    "attn_implementation",
    "revision",
    "device",
    "device_map",
    "adapter",
    "quantization_config",
)
"""Arguments of `load_model` and of transformers that people mistype."""


def check_dtype(dtype: Any) -> None:
    """Raise UserError for a data type that the weights of a model cannot be loaded in, such as an integer or 8 bits."""
    if dtype in ("auto", None):
        return
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(known, torch.dtype) and known.is_floating_point and known.itemsize >= 2:
        return
    meant = USUAL_DTYPES.get(str(dtype))
    hint = "" if meant is None else f" Did you mean {meant!r}?"
    raise UserError(f"`dtype` must be auto, bfloat16, float16, float32 or float64, got {short_repr(dtype)}.{hint}")


def _check_device(device: Any) -> None:
    """Raise UserError for a device that torch does not have, before the weights are read."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise UserError(
            f"`device` must be a device of this computer, such as 'cpu', got {short_repr(device)} ({first_line(error)})."
        ) from None


@contextmanager
def explain_keywords(keywords: Mapping[str, Any]) -> Iterator[None]:
    """Turn transformers' error about an argument that neither it nor the model's configuration knows into one sentence."""
    try:
        yield
    except TypeError as error:
        unknown = [name for name in keywords if f"unexpected keyword argument {name!r}" in str(error)]
        if not unknown:
            raise
        hint = ""
        if unknown[0] in _QUANTIZATIONS:
            hint = f" Give `quantization_config=BitsAndBytesConfig({unknown[0]}=True)` of transformers."
        elif unknown[0] == "is_trainable":
            hint = (
                " To train an adapter further, load it by `load_adapter(load_model(base), folder, is_trainable=True)`."
            )
        else:
            hint = closest_known(unknown[0], _KEYWORDS, USUAL_NAMES)
        raise UserError(
            f"`{unknown[0]}` is not an argument of `from_pretrained`, nor a field of the model's configuration.{hint}"
        ) from None


def load(
    source: Source,
    *,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    num_loops: int | None = None,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> PreTrainedModel | PeftModel:
    """Load the model of a source for inference, with its adapter if it is one. The arguments are those of `load_model`.

    Its tokenizer is `source.load_tokenizer()`.
    """
    with explain_loading(source.name), explain_keywords(kwargs):
        model = load_base(source, dtype=dtype, attn_implementation=attn_implementation, num_loops=num_loops, **kwargs)
    if source.is_adapter:
        model = put_adapter(model, source)
        add_gates(model, in_activation_dtype=True)  # the same arithmetic as in training
    return model.eval() if device is None else model.eval().to(device)


def load_base(source: Source, *, num_loops: int | None = None, **kwargs: Any) -> PreTrainedModel:
    """Load the model of a source, without its adapter, at a depth that the source accepts.

    Args:
        source: Model or adapter.
        num_loops: Recurrence depth K. Default: the source's.
        **kwargs: Keyword arguments of `AutoModelForCausalLM.from_pretrained`.
    """
    if num_loops is None and source.is_adapter:
        num_loops = source.num_loops
    if num_loops is not None:
        check_num_loops(num_loops)
        source.check_run(num_loops)
    base = find_base(source)
    base.check_files()
    revision = base.revision or "main"
    check_checkpoint(source.base, revision)
    if num_loops is not None:
        kwargs = loading_fields(source.base, {**kwargs, "num_loops": num_loops, "revision": revision})
    model, info = AutoModelForCausalLM.from_pretrained(
        source.base,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        **{"revision": revision, **kwargs},
    )
    check_weights(model, source.base, info)
    with suppress(NotLoopedError):
        attach_looped_model(model).base_revision = base.commit
    return model


def load_skeleton(name_or_path: str, revision: str = "main") -> PreTrainedModel:
    """Return a base model without weights, on the meta device, which has the names and the sizes of its modules."""
    source = find_source(name_or_path, revision=revision, accept=MODELS)
    with explain_loading(name_or_path):
        check_checkpoint(source.base, revision)
        config = AutoConfig.from_pretrained(source.base, revision=revision, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    attach_looped_model(model)
    return model


BAR_DELAY = 3.0
"""Seconds after which the loading of one of several models shows a progress bar."""


@contextmanager
def delay_bars() -> Iterator[None]:
    """Show progress bars of transformers inside the block only if they take longer than `BAR_DELAY`.

    The bars of many small models would push the lines about the models off the screen.
    """

    def make_bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {"delay": BAR_DELAY, **kwargs}
        return factory(*args, **kwargs) if previous is None else previous(factory, args, kwargs)

    previous = logging.set_tqdm_hook(make_bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


class ModelLoader:
    """Load sources one after the other, and keep a base model that the next source shares.

    A model must not be used after the next call of `load`, which removes its adapter.

    Args:
        device: Device of the models.
        attn_implementation: "sdpa", "eager", "flash_attention_2", ...
    """

    def __init__(self, device: str | torch.device | None = None, attn_implementation: str | None = None) -> None:
        self.device = device
        self.attn_implementation = attn_implementation
        self._key: tuple | None = None
        self._base: PreTrainedModel | None = None
        self._adapted: PeftModel | None = None

    def load(self, source: Source, dtype: str = "auto", num_loops: int | None = None) -> PreTrainedModel | PeftModel:
        """Load the model of a source in evaluation mode, as the function `load` does."""
        key = (source.base, source.revision, dtype)
        if key == self._key:
            self._restore()
        if key != self._key:  # another base model, or one that could not be restored
            self._load_base(source, dtype)
            self._key = key
        looped = attach_looped_model(self._base)
        depth = num_loops or source.num_loops or self._own_depth
        check_num_loops(depth)
        source.check_run(depth)
        looped.num_loops = depth
        if not source.is_adapter:
            return self._base
        self._adapted = put_adapter(self._base, source).to(self.device)
        add_gates(self._adapted, in_activation_dtype=True)
        return self._adapted.eval()

    def _load_base(self, source: Source, dtype: str) -> None:
        self._key = self._base = self._adapted = None  # frees the memory first
        with explain_loading(source.name), delay_bars():
            base = load_base(find_base(source), dtype=dtype, attn_implementation=self.attn_implementation)
        self._base = base.to(self.device).eval()
        self._own_depth = attach_looped_model(base).num_loops
        self._own_end_tokens = copy.deepcopy(base.generation_config.eos_token_id)
        self._vocabulary_size = len(base.get_input_embeddings().weight)

    def _restore(self) -> None:
        """Remove the adapter of the last source, and what it changed in the base model."""
        if self._adapted is None:
            return
        remove_gates(self._adapted)
        self._base = self._adapted.unload()
        self._adapted = None
        self._base.generation_config.eos_token_id = copy.deepcopy(self._own_end_tokens)
        looped = attach_looped_model(self._base)
        looped.trained_with, looped.run_folder, looped.loaded_adapter = {}, None, None
        looped.adapter_source = None
        if len(self._base.get_input_embeddings().weight) != self._vocabulary_size:
            self._key = None  # the embeddings were resized


@explain_unknown
def load_adapter(model: PreTrainedModel, adapter: str | Path, is_trainable: bool = False) -> PeftModel:
    """Put a saved adapter on its base model, at the depth that the model is set to.

    A shared update runs at any depth. An adapter with factors or gates for each loop runs at its own depth only.

    Args:
        model: Looped base model.
        adapter: Folder or Hub name of the adapter, in PEFT's format or in the format of the paper authors' program.
        is_trainable: Whether to train the adapter further.

    Returns:
        The PEFT model over `model`, with gated layers. All of it is in evaluation mode unless `is_trainable` is true. Then
        `model` keeps its mode, so call `train()` of the PEFT model before a training loop of your own. Trainers do it.

    Raises:
        UserError: If the folder does not hold an adapter in safetensors, or the adapter does not fit the model.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise UserError(
            "`model` must be a looped base model with its head and without an adapter, as `load_model` and "
            f"`AutoModelForCausalLM` load it, got a {type(model).__name__}."
        )
    if adapted_layers(model):
        raise UserError(
            "`model` must not have an adapter already, which a second one would replace. Load the base model again, or add "
            "the adapter to the PEFT model by its `load_adapter`."
        )
    return put_adapter(model, find_source(adapter, accept=("adapter",), what="adapter"), is_trainable)


def put_adapter(model: PreTrainedModel, source: Source, is_trainable: bool = False) -> PeftModel:
    """Put the adapter of a source on its base model, as `load_adapter` does."""
    source.check_files()
    folder, metadata = source.folder, source.facts()
    with explain_loading(str(folder)):
        config = source.adapter.read_config()
    check_peft_config(config)
    check_base(source, model)
    looped = attach_looped_model(model)
    looped.adapter_source, looped.training_tokenizer = source, None
    add_end_tokens(looped, metadata.get("eos_token_id") or [])
    num_loops = looped.num_loops
    source.check_run(num_loops)
    low, high = source.depths or [source.num_loops or num_loops] * 2
    if not low <= num_loops <= high:
        depths = f"depth {low}" if low == high else f"depths {low} to {high}"
        logger.warning(f"The adapter in {folder} was trained at {depths}, but the model runs {num_loops} loops.")
    try:
        weights = source.adapter.read_weights()
        _fit_vocabulary(model, weights)
        with hide_library_warnings():
            adapted = attach_adapter(model, folder, is_trainable, config, weights)
    except UserError:
        raise
    except (RuntimeError, ValueError, SafetensorError, re.error) as error:  # `target_modules` may be a pattern
        hint = describe_difference(source, model) or ""
        raise UserError(
            f"The adapter in {folder} does not fit this model: {first_line(error)} {hint}".strip()
        ) from error
    # They belong to this adapter, and to no later one, because it is active now.
    looped.trained_with, looped.run_folder = metadata, str(source.results_folder)
    looped.loaded_adapter = source.name if is_trainable else None
    return adapted


def _fit_vocabulary(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Resize the embeddings to the saved ones, which PEFT saves with an adapter after `resize_token_embeddings`."""
    embeddings = model.get_input_embeddings()
    saved = weights.get(
        next(f"base_model.model.{name}.weight" for name, x in model.named_modules() if x is embeddings)
    )
    if saved is not None and len(saved) != len(embeddings.weight):
        with torch.random.fork_rng():  # new rows are random before they are loaded
            model.resize_token_embeddings(len(saved), mean_resizing=False)


def save_adapter_metadata(model: PeftModel, folder: str | Path, **settings: Any) -> None:
    """Save training settings next to the active adapter, and the name of `tiny-ouro` instead of its folder here.

    Args:
        model: Trained model, whose end tokens are saved as well.
        folder: Folder in which PEFT has saved the adapters.
        **settings: `num_loops`, `rule`, `p`, ...
    """
    settings["eos_token_id"] = end_tokens(model.get_base_model())
    for adapter in model.peft_config:
        own = adapter_folder(folder, adapter)
        if adapter == model.active_adapters[0]:
            write_metadata(own, settings)
        config = own / CONFIG_FILE
        if config.is_file():
            text = config.read_text(encoding="utf-8", errors="replace")  # a former file may be damaged
            if str(TINY_OURO_PATH) in text:
                write_file(config, text.replace(json.dumps(str(TINY_OURO_PATH)), '"tiny-ouro"'))
