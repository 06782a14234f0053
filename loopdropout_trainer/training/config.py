"""TRL's `SFTConfig` and `DPOConfig` with the gate rule and its fields."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import pyarrow
import torch
from datasets import Dataset
from transformers import TrainingArguments
from trl import DPOConfig, SFTConfig, pack_dataset

from loopdropout_trainer.checks import Range, check_choice, check_numbers
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.gates import GateRule, make_rule
from loopdropout_trainer.settings.arguments import setting
from loopdropout_trainer.training.depth import (
    DEPTH_SAMPLERS,
    LOOP_LOSSES,
    DepthLimits,
    DepthSampler,
    LoopLoss,
    make_choice,
)
from loopdropout_trainer.training.distributed import CHECKPOINTING_FIELDS


def check_choices(args: Any, choices: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for a field that is not among its valid values, nor, where it holds a list, each of its items."""
    for name, valid in choices.items():
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value]
        if not values or any(value not in valid for value in values):
            raise UserError(f"`{name}` must be among {', '.join(map(str, valid))}; got {value!r}.")


@dataclass
class LoopDropoutArguments:
    """How gates are drawn: the fields that this package adds to TRL's training arguments.

    The defaults are the paper's method: Loop Dropout with p = 0.5 and inverse-survival rescaling.

    Raises:
        ValueError: for an unknown rule, a field that it does not take, or a value that it refuses.
    """

    rule: str = setting(
        "loop_dropout",
        "How gates are drawn in training; `python -m loopdropout_trainer.gates` lists the rules with their fields.",
    )
    p: list[float] | None = setting(
        None,
        "Drop probability of an adapter application: one number in [0, 1), or one for each loop. Default: the rule's "
        "own (0.5 for `loop_dropout`).",
        nargs="+",
    )
    rule_args: dict[str, Any] | None = setting(
        None, "Further fields of the rule, as a mapping (JSON on the command line)."
    )
    gate_seed: int | None = setting(
        None, "Seed of the gate draws, which never touch the global random stream. Default: `seed`."
    )
    remove_padding: bool = setting(
        True,
        "In training, run the examples of a micro-batch packed in one row, without padding, each attending to itself.",
    )
    skip_frozen_loops: bool = setting(
        True,
        "Run an example's loops before its first active gate without gradient and adapter. Needs `remove_padding`; off "
        "by itself under ZeRO and FSDP, and where more than the adapter is trained.",
    )
    fused_lora: bool = setting(
        True,
        "Compute adapted projections of one input in one function that keeps little. Off by itself under ZeRO and FSDP.",
    )
    gradient_checkpointing: bool | None = setting(
        None,
        "Whether to compute layers again in the backward pass: less memory, about 1.4 of the time. Default: only if a "
        "step would not fit the device, by an estimate; under DeepSpeed, FSDP and `torch_compile`: yes.",
        nargs="?",
        const=True,
    )
    compile_layers: bool = setting(
        False,
        "In training, compile the repeated layer, once for all layers, loops and lengths. For GPUs; needs "
        "`remove_padding` and a single process or DDP.",
    )
    warmup_from_first_step: bool = setting(
        False,
        "Warm up at the rates 1/w, 2/w, ..., 1 of the peak, w steps rounded down but at least one. By default they are "
        "0, 1/w, ..., rounded up, so that the first step changes nothing.",
    )
    stop_on_nan: bool = setting(
        True, "Stop, before the step is taken, when the loss or a gradient is NaN or infinite."
    )
    resume_with_changed_settings: bool = setting(
        False,
        "Go on from a checkpoint of other settings, data or weights, or in its folder, which is refused otherwise.",
    )
    loraplus_lr_ratio: float | None = setting(
        None, "LoRA+: learning rate of B as a multiple of A's, which is `learning_rate`. The paper uses 4."
    )

    def __post_init__(self):
        # Here already: transformers keeps an incomplete DeepSpeed configuration, which would fail the process's next model.
        if self.deepspeed and find_spec("deepspeed") is None:
            raise UserError("`deepspeed` needs the Python package `deepspeed`, which is not installed.")
        p = getattr(self.make_rule(), "p", None)
        self.p = list(p) if isinstance(p, tuple) else p
        self.check_numbers()  # before TRL calculates with them
        # TRL asks for bfloat16 by default, which transformers refuses on a machine without an accelerator unless told so.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        unsaid = [name for name in CHECKPOINTING_FIELDS if getattr(self, name) is None]
        super().__post_init__()
        if len(unsaid) == len(CHECKPOINTING_FIELDS):  # transformers takes that for no; the trainer will know
            for name in unsaid:
                setattr(self, name, None)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        if self.warmup_from_first_step and self.warmup_steps < 1:
            return max(1, int(num_training_steps * self.warmup_steps))
        return super().get_warmup_steps(num_training_steps)

    def make_rule(self) -> GateRule:
        """Build the gate rule that these arguments describe."""
        fields = self.rule_args or {}
        if not isinstance(fields, Mapping):
            raise UserError(f"`rule_args` must be a mapping of the rule's fields; got {fields!r}.")
        if "p" in fields:
            raise UserError("Give `p` as a field of its own, not inside `rule_args`.")
        if self.p is not None:
            fields = {"p": self.p, **fields}
        return make_rule(self.rule, **fields)

    def check_numbers(self) -> None:
        """Raise ValueError for a number with which nothing can be trained."""
        check_numbers(self)

    def num_rows(self, lengths: Sequence[int]) -> int:
        """Return how many rows the trainer makes of examples of these lengths in tokens."""
        return len(lengths)

    @property
    def batches_at_once(self) -> int:
        """Micro-batches that all processes take together, each one of them; with `split_batches` each a part of one."""
        return 1 if self.accelerator_config.split_batches else self.world_size

    @property
    def examples_per_step(self) -> int:
        """Rows of an optimizer step in all processes."""
        return self.train_batch_size * self.gradient_accumulation_steps * self.batches_at_once

    def micro_batches(self, num_rows: int) -> int:
        """Return the number of micro-batches of an epoch in each process, as accelerate deals them out."""
        rounded = math.floor if self.dataloader_drop_last else math.ceil
        return rounded(rounded(num_rows / self.train_batch_size) / self.batches_at_once)

    def num_steps(self, num_rows: int) -> tuple[int, int]:
        """Return the optimizer steps of one epoch and of the whole run, as transformers' Trainer counts them.

        Raises:
            ValueError: if there would be none.
        """
        batches = self.micro_batches(num_rows)
        if batches == 0:
            raise UserError(
                f"No step would be taken: `dataloader_drop_last` drops {num_rows:,} rows, fewer than {self.batches_at_once:,} "
                f"batches of {self.train_batch_size:,}: leave it out, or lower `per_device_train_batch_size`."
            )
        steps_per_epoch = math.ceil(batches / self.gradient_accumulation_steps)
        return steps_per_epoch, max(self.max_steps, 0) or math.ceil(self.num_train_epochs * steps_per_epoch)

    def depth_limits(self, num_loops: int) -> DepthLimits:
        """Return the least and the greatest depth of a training step, for a model whose own depth is `num_loops`."""
        return num_loops, num_loops

    @classmethod
    def from_arguments(cls, args: TrainingArguments | None, output_dir: str) -> LoopDropoutArguments:
        """Return `args` as an instance of this class; TRL's own arguments get the paper's defaults.

        Raises:
            ValueError: if they are the arguments of another kind of trainer.
        """
        if args is None:
            return cls(output_dir)
        if isinstance(args, cls):
            return args
        trl_class = next(base for base in cls.__mro__ if base.__module__.startswith("trl."))
        if not isinstance(args, trl_class) and type(args) is not TrainingArguments:
            raise UserError(f"`args` must be a {cls.__name__} or {trl_class.__name__}; got {type(args).__name__}.")
        # Not `to_dict`, which puts words such as <PAD_TOKEN> in the place of all tokens.
        given = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init}
        names = {f.name for f in dataclasses.fields(cls)}
        made = cls(**{name: value for name, value in given.items() if name in names})
        own = {name: value for name, value in given.items() if name not in names}  # of the user's subclass
        vars(made).update(own)
        return made

    def __getstate__(self) -> dict[str, Any]:
        # Trainer pickles its arguments into every checkpoint, which may be pushed: never with a secret.
        return _without_token({**self.__dict__, "hub_token": None})

    def to_dict(self) -> dict[str, Any]:
        # What loggers such as W&B are given.
        return _without_token(super().to_dict())


def _without_token(fields: dict[str, Any]) -> dict[str, Any]:
    if isinstance(kwargs := fields.get("model_init_kwargs"), dict):
        fields["model_init_kwargs"] = {key: value for key, value in kwargs.items() if key != "token"}
    return fields


@dataclass
class LoopLossArguments:
    """Which loops are trained on: fields of every trainer that may score more than the final loop."""

    loop_loss: str = setting(
        "final",
        f"Which loops' readouts the training loss scores, one of {', '.join(LOOP_LOSSES)} (docs/depth.md); the paper "
        "scores the final loop, as evaluation does.",
    )
    loop_loss_args: dict[str, Any] | None = setting(
        None, "Fields of the loop loss, as a mapping (JSON on the command line)."
    )

    def make_loop_loss(self) -> LoopLoss:
        """Build the loop loss that these arguments describe."""
        return make_choice("loop_loss", LOOP_LOSSES, self.loop_loss, self.loop_loss_args)


@dataclass
class LoopDropoutConfig(LoopLossArguments, LoopDropoutArguments, SFTConfig):
    """Training arguments of `LoopDropoutSFTTrainer`: what `SFTConfig` has, how gates are drawn, how deep training runs."""

    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "rule_args", "depth_sampling_args", "loop_loss_args"]

    loss_average: str = setting(
        "tokens",
        "What the loss of a step is a mean over: its `tokens`, or its `micro_batches`, each of which counts as its mean "
        "over its own tokens.",
        choices=["tokens", "micro_batches"],
    )
    depth_sampling: str = setting(
        "fixed",
        f"How many loops a training step runs, one of {', '.join(DEPTH_SAMPLERS)} (docs/depth.md): the model's own depth "
        "K, as in the paper, or a depth that is drawn for each optimizer step.",
    )
    depth_sampling_args: dict[str, Any] | None = setting(
        None, "Fields of the depth sampling, as a mapping (JSON on the command line)."
    )

    live_diagnostics_steps: int = setting(0, "Log diagnostics every N steps and at the end; 0: never.")
    live_diagnostics_rows: int = setting(16, "Evaluation rows that the live diagnostics measure on.")

    def __post_init__(self):
        self.make_depth_sampler()
        check_choice("loss_average", self.loss_average, ("tokens", "micro_batches"))
        scores_all = self.make_loop_loss().scores_all
        for name, usual in (("loss_type", "nll"), ("label_smoothing_factor", 0)):
            if scores_all and getattr(self, name) != usual:
                raise UserError(
                    f"`{name}` {getattr(self, name)!r} is defined for one loop's loss: set it to {usual!r}, or `loop_loss` to "
                    "'final' or 'random'."
                )
        super().__post_init__()

    def num_rows(self, lengths: Sequence[int]) -> int:
        if not self.packing:
            return len(lengths)
        tokens, ends = pyarrow.nulls(sum(lengths), pyarrow.int8()), list(accumulate(lengths, initial=0))
        rows = Dataset(pyarrow.table({"input_ids": pyarrow.LargeListArray.from_arrays(ends, tokens)}))
        rows = rows.shuffle(seed=self.seed) if self.shuffle_dataset else rows
        return len(pack_dataset(rows, self.max_length, self.packing_strategy, {"num_proc": self.dataset_num_proc}))

    def make_depth_sampler(self) -> DepthSampler:
        """Build the depth sampler that these arguments describe."""
        return make_choice("depth_sampling", DEPTH_SAMPLERS, self.depth_sampling, self.depth_sampling_args)

    def depth_limits(self, num_loops: int) -> DepthLimits:
        limits = self.make_depth_sampler().limits(num_loops)
        self.make_loop_loss().check(limits)
        return limits


# What TRL finds out in the first step, or not at all.
_DPO_CHOICES = {
    "loss_type": (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
        *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    ),
    "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
}


@dataclass
class LoopDropoutDPOConfig(LoopDropoutArguments, DPOConfig):
    """Training arguments of `LoopDropoutDPOTrainer`: everything that `DPOConfig` has, and how gates are drawn."""

    _VALID_DICT_FIELDS = [*DPOConfig._VALID_DICT_FIELDS, "rule_args"]

    def __post_init__(self):
        super().__post_init__()
        check_choices(self, _DPO_CHOICES)  # TRL makes `loss_type` a list

    def check_numbers(self) -> None:
        check_numbers(self, beta=Range(above=True))  # at 0 no answer is preferred
