"""What is checked before weights are loaded or a step is taken: model, depth, rule, adapter, layout, data."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftConfig, PeftModel
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    get_scheduler,
)

from loopdropout_trainer.adapters import check_adapter, check_peft_config
from loopdropout_trainer.looped import NotLoopedError, check_num_loops, find_looped_model
from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin
from loopdropout_trainer.models.strict_loading import checkpoint_names
from loopdropout_trainer.settings.command import user_supplied
from loopdropout_trainer.settings.ranges import check_folder, check_integer, check_number, shown
from loopdropout_trainer.training.config import LoopDropoutArguments
from loopdropout_trainer.training.depth import check_rule_at_depths
from loopdropout_trainer.training.distributed import IGNORED, check_arguments


_REPORTS = (  # programs that a run can report to, each of which needs the Python package of its name
    *(
        "clearml",
        "codecarbon",
        "comet_ml",
        "dvclive",
        "mlflow",
        "neptune",
        "swanlab",
        "tensorboard",
        "trackio",
        "wandb",
    ),
)


def default_peft_config(model: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> LoraConfig:
    """Return the paper's adapter: rank 16, alpha 32, on all linear projections of the recurrent block.

    Args:
        model: looped model, or its config (nothing is loaded then).
        overrides: other fields of `LoraConfig`, or other values for these.
    """
    fields = {"r": 16, "lora_alpha": 32, "task_type": "CAUSAL_LM"}
    config = LoraConfig(**{**fields, **overrides})
    return config if "target_modules" in overrides else complete_peft_config(config, model)


def complete_peft_config(peft_config: PeftConfig | None, model: PreTrainedModel | PreTrainedConfig) -> PeftConfig:
    """Return the adapter that is asked for: the paper's if none is, and on the recurrent block if no layers are named.

    Args:
        peft_config: without `target_modules`, or with PEFT's "all-linear", it gets all linear projections of the recurrent
            block, the only ones that gates apply to.
        model: looped model, or its config.
    """
    if peft_config is None:
        return default_peft_config(model)
    if isinstance(peft_config, LoraConfig) and peft_config.target_modules in (None, "all-linear"):
        peft_config = copy.copy(peft_config)  # the user's own may go to another model
        names = _recurrent_linears(model)
        if peft_config.layers_to_transform is not None:  # which PEFT does not read for full names
            names = [name.rpartition(".")[2] for name in names]
        peft_config.target_modules = set(names)
    return peft_config


def _recurrent_linears(model: PreTrainedModel | PreTrainedConfig) -> list[str]:
    if isinstance(model, PreTrainedConfig):
        # By its class: `from_config` would let ZeRO-3 divide the meta tensors.
        with torch.device("meta"), user_supplied("The model's config.json describes no model that can be built"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(model)](model)
    return find_looped_model(model).recurrent_linears()


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
    _check_numbers(args)
    check_folder("output_dir", args.output_dir)
    _check_machine(args)
    _check_optimizer(args)
    _check_schedule(args)
    _check_loader_and_compiler(args)
    config = _looped_config(model, args)
    check_attention((args.model_init_kwargs or {}).get("attn_implementation"), args.use_cpu)
    check_rule_at_depths(args.make_rule(), args.depth_limits(config.num_loops), config.num_loops)
    check_arguments(args)
    if peft_config is not None:
        check_peft_config(peft_config)
        _check_targets(peft_config, config if isinstance(model, str) else model)
    elif isinstance(model, PeftModel):
        check_adapter(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("The adapter is frozen, so nothing would be trained: load it with `is_trainable=True`.")
    return config


def _check_targets(peft_config: LoraConfig, model: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise ValueError for a name in `target_modules` that is no linear projection of the recurrent block."""
    if not isinstance(peft_config.target_modules, (list, set, tuple)):
        return
    linears = _recurrent_linears(model)
    for target in sorted(peft_config.target_modules):
        if not any(name == target or name.endswith(f".{target}") for name in linears):
            valid = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            raise ValueError(
                f"`target_modules` (`lora_target_modules`) must name linear projections of the recurrent block ({valid}); got "
                f"{shown(target)}."
            )


def _check_numbers(args: TrainingArguments) -> None:
    """Raise ValueError for a number that nothing can be trained with; None is for the trainer to fill in."""
    for name, least in {
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_length": 1,
        "seed": 0,
        "data_seed": 0,
        "dataloader_num_workers": 0,
        "save_total_limit": 0,
        "dataset_num_proc": 1,
        "eval_accumulation_steps": 1,
        "ddp_bucket_cap_mb": 1,
        "ddp_timeout": 1,
    }.items():
        if getattr(args, name, None) is not None:
            check_integer(name, getattr(args, name), least, 2**32 - 1 if name.endswith("seed") else None)
    if args.max_steps != -1:  # which leaves it to `num_train_epochs`
        check_integer("max_steps", args.max_steps)
    check_number("learning_rate", args.learning_rate)
    check_number("weight_decay", args.weight_decay)
    check_number("warmup_steps", args.warmup_steps)
    if 0 < args.max_steps < args.warmup_steps:
        raise ValueError(
            f"`warmup_steps` must be at most `max_steps`, {args.max_steps}, or a share of the run below 1; got "
            f"{shown(args.warmup_steps)}."
        )
    check_number("max_grad_norm", args.max_grad_norm if args.max_grad_norm is not None else 0)
    check_number("adam_beta1", args.adam_beta1, most=1, below=True)
    check_number("adam_beta2", args.adam_beta2, most=1, below=True)
    check_number("adam_epsilon", args.adam_epsilon)
    check_number("label_smoothing_factor", args.label_smoothing_factor, most=1)
    check_number("num_train_epochs", args.num_train_epochs, above=True)
    check_number("neftune_noise_alpha", args.neftune_noise_alpha or 0, most=1e6)
    check_number("eval_delay", args.eval_delay)
    if isinstance(getattr(args, "pad_to_multiple_of", None), int):
        check_integer("pad_to_multiple_of", args.pad_to_multiple_of)
    for name in ("save_steps", "logging_steps", "eval_steps"):
        if getattr(args, name) is not None:
            check_number(name, getattr(args, name), above=True)
    if args.include_num_input_tokens_seen not in (True, False, "all", "non_padding", "no"):
        raise ValueError(
            "`include_num_input_tokens_seen` must be all, non_padding or no; got "
            f"{shown(args.include_num_input_tokens_seen)}."
        )


def _check_optimizer(args: TrainingArguments) -> None:
    """Raise ValueError for an optimizer that cannot be built, by building it for a single weight."""
    if args.optim_target_modules:  # GaLore and APOLLO find their parameters in the model
        if not str(args.optim.value).startswith(("galore", "apollo")):
            raise ValueError(f"`optim` {args.optim.value} has no use for `optim_target_modules`: leave it out.")
        return
    layer, without = nn.Linear(1, 1), copy.copy(args)
    without.optim_args = None
    with user_supplied(f"`optim` {args.optim.value} with `optim_args` {shown(args.optim_args)} cannot be used"):
        optimizer_class, keywords = Trainer.get_optimizer_cls_and_kwargs(args, layer)
        if args.optim_args and keywords == Trainer.get_optimizer_cls_and_kwargs(without, layer)[1]:
            raise ValueError(
                f"`optim` {args.optim.value} reads nothing from `optim_args` {shown(args.optim_args)}: leave it out."
            )
        optimizer_class(layer.parameters(), **keywords)


def _check_schedule(args: TrainingArguments) -> None:
    """Raise ValueError for a learning rate schedule that cannot be built, by building and running a short one."""
    name, keywords = (
        str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        args.lr_scheduler_kwargs or {},
    )
    if keywords and name in ("constant", "constant_with_warmup"):  # for which transformers drops them
        raise ValueError(f"`lr_scheduler_type` {name} takes no `lr_scheduler_kwargs`; got {shown(keywords)}.")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    with user_supplied(f"`lr_scheduler_type` {name} with `lr_scheduler_kwargs` {shown(keywords)} cannot be used"):
        scheduler = get_scheduler(name, optimizer, 2, 8, scheduler_specific_kwargs=dict(keywords))
        for _ in range(8):
            optimizer.step()
            scheduler.step(*[1.0] * (name in ("reduce_lr_on_plateau", "greedy")))  # which look at the loss
            rate = optimizer.param_groups[0]["lr"]
            if not 0 <= rate <= args.learning_rate * (1 + 1e-9):
                raise ValueError(
                    f"`lr_scheduler_kwargs` {shown(keywords)} take the learning rate to {rate:g}: it must stay between 0 and "
                    f"`learning_rate`, {args.learning_rate:g}."
                )


def _check_loader_and_compiler(args: TrainingArguments) -> None:
    """Raise ValueError for a data loader or a compilation that cannot be built, by building them around nothing."""
    with user_supplied("The `dataloader_...` fields describe no data loader"):
        DataLoader(
            [0],
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
        )
    if args.torch_compile:
        given = f"`torch_compile_backend` {args.torch_compile_backend}, `torch_compile_mode` {args.torch_compile_mode}"
        with user_supplied(f"{given} cannot be used"):
            torch.compile(nn.Identity(), backend=args.torch_compile_backend, mode=args.torch_compile_mode)


def _check_machine(args: TrainingArguments) -> None:
    """Raise ValueError for what this machine, or the Python packages on it, cannot do."""
    if args.use_cpu and args.fp16:
        raise ValueError("`fp16` needs a GPU, and this run is on a CPU: use `bf16: true`, or neither for float32.")
    names = [args.report_to] if isinstance(args.report_to, str) else args.report_to or ()
    for name in names:
        other = "tensorboardX" if name == "tensorboard" else name
        if name in _REPORTS and not (find_spec(name) or find_spec(other)):
            raise ValueError(f"`report_to` {name} needs the Python package `{name}`, which is not installed.")
    if args.use_liger_kernel and find_spec("liger_kernel") is None:
        raise ValueError("`use_liger_kernel` needs the Python package `liger_kernel`, which is not installed.")


def check_attention(kernel: str | None, on_cpu: bool) -> None:
    """Raise ValueError for an attention kernel that this machine, or the Python packages on it, cannot run."""
    if kernel == "flex_attention" and on_cpu:
        raise ValueError("`attn_implementation` flex_attention needs a GPU: use sdpa on a CPU.")
    if str(kernel).startswith("flash_attention") and on_cpu:
        raise ValueError(f"`attn_implementation` {kernel} needs a GPU: use sdpa on a CPU.")
    if kernel == "flash_attention_2" and not any(map(find_spec, ("flash_attn", "kernels"))):
        raise ValueError(
            "`attn_implementation` flash_attention_2 needs the Python package `flash_attn` (or `kernels`), which is not "
            "installed: use sdpa."
        )


def _looped_config(model: str | nn.Module, args: TrainingArguments) -> PreTrainedConfig:
    """Return the model's config with the depth that it will run at, without loading weights."""
    if not isinstance(model, str):
        return find_looped_model(model).config
    init_kwargs = dict(args.model_init_kwargs or {})
    for name in ("config", "state_dict"):
        if name in init_kwargs:
            raise ValueError(f"`model_init_kwargs` cannot hold `{name}`: the model's own is read; leave it out.")
    num_loops = init_kwargs.get("num_loops")
    if num_loops is not None:
        check_num_loops(num_loops)
    given = {key: value for key, value in init_kwargs.items() if key not in ("num_loops", "trust_remote_code")}
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
    """Refuse training data that is empty, cannot be read, or has none of the sets of columns in `formats`.

    Raises:
        ValueError: in one sentence.
    """
    if dataset is None:
        return
    try:
        columns = set(next(iter(dataset)))
    except StopIteration:
        raise ValueError("`train_dataset` is empty: there is no example to train on.") from None
    except Exception as error:  # whatever the file format's reader raises
        raise ValueError(f"`train_dataset` cannot be read ({type(error).__name__}: {error}).") from error
    if not any(wanted <= columns for wanted in formats):
        valid = " or ".join(" and ".join(map(repr, sorted(wanted))) for wanted in formats)
        found = ", ".join(map(repr, sorted(columns)))
        raise ValueError(f"`train_dataset` has the columns {found}; it needs {valid}.")


def check_labels(dataset: Any, name: str) -> None:
    """Refuse prepared data (token ids and labels) of which nothing would be trained on.

    Raises:
        ValueError: in one sentence.
    """
    if not isinstance(dataset, Dataset) or "labels" not in dataset.column_names:
        return
    if not any(label != IGNORED for labels in dataset["labels"] for label in labels):
        raise ValueError(
            f"{name} has no token to train on: every label is masked. Look at one example with "
            "`python -m loopdropout_trainer.data RECIPE.yaml`, and at `max_length`, `completion_only_loss` and "
            "`assistant_only_loss`."
        )
