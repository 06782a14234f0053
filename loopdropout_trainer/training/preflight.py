"""What is checked before weights are loaded or a step is taken: model, depth, rule, adapter, layout, data."""

from __future__ import annotations

import copy
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from huggingface_hub.utils import validate_repo_id
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.optimization import get_scheduler

from loopdropout_trainer.lora import add_gates, check_adapter, check_peft_config
from loopdropout_trainer.checks import check_folder, shown
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.gates import GateRule
from loopdropout_trainer.looped import NotLoopedError, check_num_loops, find_looped_model
from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin, checkpoint_names
from loopdropout_trainer.training.config import LoopDropoutArguments, check_choices
from loopdropout_trainer.training.depth import check_rule_at_depths
from loopdropout_trainer.training.distributed import CHECKPOINTING_FIELDS, IGNORED, check_arguments


_CHOICES = {"include_num_input_tokens_seen": ("all", "non_padding", "no", True, False)}


def default_peft_config(model: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> LoraConfig:
    """Return the paper's adapter: rank 16, alpha 32, on all linear projections of the recurrent block.

    Args:
        model: looped model, or its config (nothing is loaded then).
        overrides: other fields of `LoraConfig`, or other values for these.
    """
    config = LoraConfig(**{"r": 16, "lora_alpha": 32, "task_type": "CAUSAL_LM", **overrides})
    return complete_peft_config(config, model)


def complete_peft_config(peft_config: PeftConfig | None, model: PreTrainedModel | PreTrainedConfig) -> PeftConfig:
    """Return the adapter that is asked for: the paper's if none is, and on the recurrent block if no layers are named.

    Args:
        peft_config: without `target_modules`, or with PEFT's "all-linear", it gets all linear projections of the recurrent
            block, the only ones that gates apply to.
        model: looped model, or its config.
    """
    if peft_config is None:
        return default_peft_config(model)
    peft_config = copy.copy(peft_config)  # the user's own may go to another model
    if isinstance(peft_config, LoraConfig) and peft_config.target_modules in (None, "all-linear"):
        names = _recurrent_linears(model)
        if peft_config.layers_to_transform is not None:  # which PEFT does not read for full names
            names = map(_last_part, names)
        peft_config.target_modules = set(names)
    return peft_config


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _recurrent_linears(model: PreTrainedModel | PreTrainedConfig) -> list[str]:
    return find_looped_model(_on_meta(model) if isinstance(model, PreTrainedConfig) else model).recurrent_linears()


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    # By its class: `from_config` would let ZeRO-3 divide the meta tensors.
    with torch.device("meta"), user_supplied("The model's config.json describes no model that can be built"):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](copy.deepcopy(config))


def model_to_train(config: PreTrainedConfig, peft_config: PeftConfig, rule: GateRule) -> PeftModel:
    """Return a base model of this configuration with the adapter that a rule trains, on the meta device: without memory."""
    with torch.device("meta"):
        model = get_peft_model(_on_meta(config), copy.copy(peft_config))
        add_gates(model, in_activation_dtype=True, rule=rule)
    return model


def check_run(
    model: str | nn.Module, args: LoopDropoutArguments, peft_config: PeftConfig | None = None
) -> PreTrainedConfig:
    """Refuse what cannot be trained, before weights or data are loaded.

    Returns:
        The model's config, with the depth that it will run at.

    Raises:
        NotLoopedError: for a model without loops.
        ValueError: for a depth, rule, adapter or layout that cannot be trained.
    """
    args.check_numbers()
    check_choices(args, _CHOICES)
    if 0 < args.max_steps < args.warmup_steps:
        raise UserError(
            f"`warmup_steps` must be at most `max_steps`, {args.max_steps}, or a share of the run below 1; got "
            f"{shown(args.warmup_steps)}."
        )
    check_folder("output_dir", args.output_dir)
    with user_supplied("`hub_model_id` cannot be used"):
        validate_repo_id("model" if args.hub_model_id is None else args.hub_model_id)
    _check_parts(args)
    config = _looped_config(model, args)
    check_rule_at_depths(args.make_rule(), args.depth_limits(config.num_loops), config.num_loops)
    check_arguments(args)
    if peft_config is not None:
        check_peft_config(peft_config)
        _check_targets(peft_config, config if isinstance(model, str) else model)
    elif isinstance(model, PeftModel):
        check_adapter(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError("The adapter is frozen, so nothing would be trained: load it with `is_trainable=True`.")
    return config


def _check_targets(peft_config: LoraConfig, model: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise ValueError for a name in `target_modules` that is no linear projection of the recurrent block."""
    if not peft_config.target_modules or isinstance(peft_config.target_modules, str):
        return
    linears = _recurrent_linears(model)
    for target in sorted(peft_config.target_modules):
        if not any(f".{name}".endswith(f".{target}") for name in linears):
            valid = ", ".join(dict.fromkeys(map(_last_part, linears)))
            raise UserError(
                f"`target_modules` (`lora_target_modules`) must name linear projections of the recurrent block ({valid}); got "
                f"{shown(target)}."
            )


def _check_parts(args: TrainingArguments) -> None:
    """Raise ValueError for parts of a training that cannot be built here, by building them around a single weight."""
    layer, schedule = nn.Linear(1, 1), args.lr_scheduler_type.value
    optimizer, keywords = torch.optim.SGD(layer.parameters(), args.learning_rate), args.lr_scheduler_kwargs or {}
    if not args.optim_target_modules:  # GaLore and APOLLO find their parameters in the model
        with user_supplied(f"`optim` {args.optim.value} with `optim_args` {shown(args.optim_args)} cannot be used"):
            optimizer_class, fields = Trainer.get_optimizer_cls_and_kwargs(args, layer)
            optimizer = optimizer_class(layer.parameters(), **fields)
        _check_optimizer_arguments(args, layer)
    with user_supplied(f"`lr_scheduler_type` {schedule} with `lr_scheduler_kwargs` {shown(keywords)} cannot be used"):
        scheduler = get_scheduler(schedule, optimizer, 2, 8, scheduler_specific_kwargs=keywords)
        if args.warmup_from_first_step and not isinstance(scheduler, LambdaLR):
            raise UserError(f"`warmup_from_first_step` needs a schedule with a warm-up; {schedule} has none.")
        follows_loss = schedule in ("reduce_lr_on_plateau", "greedy")
        for _ in range(8):
            optimizer.step()
            scheduler.step(*[1.0] * follows_loss)
            rate = optimizer.param_groups[0]["lr"]  # None: the optimizer's own
            if rate is not None and not follows_loss and rate > 1.001 * args.learning_rate:
                raise UserError(
                    f"`lr_scheduler_kwargs` {shown(keywords)} raise the rate above `learning_rate`, {args.learning_rate:g}."
                )
    with user_supplied("The `dataloader_...` fields describe no data loader"):
        fields = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context")
        DataLoader([0], **{name: getattr(args, f"dataloader_{name}") for name in fields})
    backend, mode = args.torch_compile_backend, args.torch_compile_mode
    with user_supplied(f"`torch_compile_backend` {backend}, `torch_compile_mode` {mode} cannot be used"):
        torch.compile(nn.Identity(), backend=backend, mode=mode, disable=not args.torch_compile)
    with user_supplied(f"`report_to` {shown(args.report_to)} cannot be used"):
        for tracker in get_reporting_integration_callbacks(args.report_to):
            tracker()
    names = [f"{name}_kwargs" for name in CHECKPOINTING_FIELDS]  # transformers makes both the same
    keywords = getattr(args, names[0])
    with user_supplied(f"`{'` or `'.join(names)}` {shown(keywords)} cannot be used"):
        given = {**(keywords or {}), "use_reentrant": False}
        for name in ("every_n_layers", "offload"):  # transformers' own; TRL's `selective` does nothing over PEFT
            given.pop(name, None)
        checkpoint(nn.Identity(), torch.zeros(1), **given)
    kernel = str((args.model_init_kwargs or {}).get("attn_implementation"))
    for refused, reason in (
        (args.use_cpu and args.fp16,
         "`fp16` needs a GPU, and this run is on a CPU: use `bf16: true`, or neither for float32."),
        (args.use_cpu and getattr(args, "activation_offloading", False),
         "`activation_offloading` needs a GPU, and this run is on a CPU: leave it out."),
        (args.use_cpu and kernel.startswith(("flex_attention", "flash_attention")),
         f"`attn_implementation` {kernel} needs a GPU: use sdpa on a CPU."),
        (kernel == "flash_attention_2" and not any(map(find_spec, ("flash_attn", "kernels"))),
         f"`attn_implementation` {kernel} needs the Python package `flash_attn` (or `kernels`): use sdpa."),
    ):  # fmt: skip
        if refused:
            raise UserError(reason)


def _check_optimizer_arguments(args: TrainingArguments, layer: nn.Module) -> None:
    """Raise ValueError for a name in `optim_args` that nobody reads: with any value the optimizer's arguments are the same."""
    given = [argument.partition("=")[0].strip() for argument in (args.optim_args or "").split(",")]
    for name in filter(None, given):
        made = []
        for tried in ("", f"{name}=0", f"{name}=1"):
            changed = copy.copy(args)
            changed.optim_args = tried
            with suppress(Exception):  # a value that is refused was read
                made.append(Trainer.get_optimizer_cls_and_kwargs(changed, layer)[1])
        if made == 3 * made[:1]:
            raise UserError(
                f"`optim_args` has `{name}`, which `optim` {args.optim.value} does not read: leave it out."
            )


def _looped_config(model: str | nn.Module, args: TrainingArguments) -> PreTrainedConfig:
    """Return the model's config with the depth that it will run at, without loading weights."""
    if not isinstance(model, str):
        return find_looped_model(model).config
    given = {key: value for key, value in (args.model_init_kwargs or {}).items() if key != "trust_remote_code"}
    for name in {"config", "state_dict"} & given.keys():
        raise UserError(f"`model_init_kwargs` cannot hold `{name}`: the model's own is read; leave it out.")
    num_loops = given.pop("num_loops", None)
    with user_supplied(f"The model {model} cannot be loaded"):
        config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code is True, **given)
        if isinstance(config, LoopedConfigMixin):
            config.complete(lambda: checkpoint_names(model, **given))
    if not hasattr(config, "num_loops"):
        raise NotLoopedError(
            f"{model} is a `{config.model_type}` model, which is not looped: Loop Dropout needs a model that applies one "
            "block several times, such as `model_type: ouro`."
        )
    if num_loops is not None:
        config.num_loops = num_loops
    check_num_loops(config.num_loops)
    return config


def check_dataset(dataset: Any, formats: list[set[str]]) -> None:
    """Raise ValueError for training data that is empty, cannot be read, or has none of the sets of columns in `formats`."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return  # TRL says what it needs
    try:
        columns = set(next(iter(dataset)))
    except StopIteration:
        raise UserError("`train_dataset` is empty: there is no example to train on.") from None
    except Exception as error:  # whatever the file format's reader raises
        raise UserError(f"`train_dataset` cannot be read ({type(error).__name__}: {error}).") from error
    if not any(wanted <= columns for wanted in formats):
        quoted = lambda names: map(repr, sorted(names))
        valid = " or ".join(" and ".join(quoted(wanted)) for wanted in formats)
        raise UserError(f"`train_dataset` has the columns {', '.join(quoted(columns))}; it needs {valid}.")


def check_labels(dataset: Any, name: str) -> None:
    """Raise ValueError for prepared data (token ids and labels) of which nothing would be trained on."""
    if not isinstance(dataset, Dataset) or "labels" not in dataset.column_names:
        return
    if not any(label != IGNORED for labels in dataset["labels"] for label in labels):
        raise UserError(
            f"{name} has no token to train on: every label is masked. Look at one example with "
            "`python -m loopdropout_trainer.data RECIPE.yaml`, and at `max_length`, `completion_only_loss` and "
            "`assistant_only_loss`."
        )
