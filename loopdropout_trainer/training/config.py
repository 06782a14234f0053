"""Training arguments: TRL's configurations with the fields that this package adds."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from transformers import TrainingArguments
from transformers.utils import logging
from trl import DPOConfig, GRPOConfig, SFTConfig

from loopdropout_trainer.errors import UserError, as_path, hide_secrets, short_repr
from loopdropout_trainer.gates import RULES, GateRule, make_rule
from loopdropout_trainer.gates.depth import FixedDepth, make_depth_sampler
from loopdropout_trainer.gates.rule import fields_of, join_fields
from loopdropout_trainer.settings.field_hints import attribute_hint, python_field_hint
from loopdropout_trainer.settings.fields import check_fields, check_mappings, option
from loopdropout_trainer.training.argument_checks import wrong_args
from loopdropout_trainer.training.evaluation_fields import check_best_checkpoint, word_of
from loopdropout_trainer.training.field_warnings import warn_of_fields
from loopdropout_trainer.training.generation_fields import check_reuse, explain_generations


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Probabilities = float | Sequence[float] | None
else:
    Probabilities = list[float] | None  # HfArgumentParser accepts one type, and `__post_init__` also accepts a number

logger = logging.get_logger(__name__)

_CHECKPOINTING = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Names of fields before transformers 5.24, and since then."""


class OwnProbability(float):
    """Drop probability that is a rule's own value, which nobody has given. A copy with another rule takes that rule's own."""


class OwnProbabilities(list):
    """The same for a list with one drop probability for each loop."""


@dataclass(repr=False)
class GateConfig:
    r"""
    Fields of all trainers of this package. The defaults are the paper's method: Loop Dropout with p = 0.5.

    Args:
        rule (`str`, *optional*, defaults to `"loop_dropout"`):
            Rule that draws the gates in training, by its name, or in Python also as an instance such as `ExactlyM(m=2)`.
            `python -m loopdropout_trainer.gates` lists the rules and their fields.
        p (`float` or `list[float]`, *optional*):
            Drop probability of an adapter application, one number in [0, 1) or one for each loop. Defaults to the
            rule's own value, which is 0.5 for `loop_dropout`.
        rule_args (`dict[str, Any]`, *optional*):
            Further fields of the rule.
        gate_seed (`int`, *optional*):
            Seed of the gate draws, which never touch the global random state. Defaults to `seed`.
        remove_padding (`bool`, *optional*, defaults to `True`):
            Whether to run the examples of a training micro-batch packed in one row, without padding. Your own code
            always gets the padded batch and its outputs. With `lora_dropout`, the dropout masks then differ from TRL's, which
            draws them for padded rows. Their distribution is the same.
        skip_frozen_loops (`bool`, *optional*, defaults to `True`):
            Whether to run the loops before an example's first active gate without gradient and adapter. It needs
            `remove_padding`, one process or DDP, and an adapter without input dropout as the only trained weights.
        warmup_from_first_step (`bool`, *optional*, defaults to `False`):
            Whether the first step already trains: the warmup runs through 1/w, 2/w, ..., 1 of the learning rate instead
            of 0, 1/w, ..., with w rounded down.
        loraplus_lr_ratio (`float`, *optional*):
            LoRA+: learning rate of B as a multiple of A's learning rate, `learning_rate`. The paper uses 4.
        early_stopping_patience (`int`, *optional*):
            Number of evaluations in a row without a better `metric_for_best_model` (the held-out loss) after which the
            training stops. It needs `eval_strategy`. It sets `load_best_model_at_end`, and saves a checkpoint at each
            evaluation, unless you set these fields yourself.
    """

    rule: str = option(
        "loop_dropout", "Rule that draws the gates. `python -m loopdropout_trainer.gates` lists the rules."
    )
    p: Probabilities = option(
        None,
        "Drop probability, one number in [0, 1) or one for each loop. Default: the rule's own value, 0.5 for `loop_dropout`.",
        takes_one_number=True,
    )
    rule_args: dict[str, Any] | None = option(
        None, "Further fields of the rule, as a mapping (JSON on the command line)."
    )
    gate_seed: int | None = option(None, "Seed of the gate draws. Default: `seed`.", at_least=0, below=2**63)
    remove_padding: bool = option(True, "Whether to run training micro-batches packed in one row, without padding.")
    skip_frozen_loops: bool = option(
        True, "Whether to run the loops before an example's first active gate without gradient."
    )
    warmup_from_first_step: bool = option(False, "Whether the warmup starts at 1/w of the learning rate instead of 0.")
    loraplus_lr_ratio: float | None = option(
        None, "LoRA+: learning rate of B as a multiple of A's. The paper uses 4.", above=0
    )
    early_stopping_patience: int | None = option(
        None,
        "Evaluations in a row without a lower held-out loss after which the training stops. The best checkpoint is kept. "
        "It needs `eval_strategy`. Default: the training never stops early.",
        at_least=1,
        group="Training",
    )

    help_title = "Method"
    trl_class: ClassVar[type[TrainingArguments]]
    command: ClassVar[str]  # of `loopdropout`, which trains with these fields

    if not TYPE_CHECKING:  # type checkers read the fields from the dataclass

        def __new__(cls, *args: Any, **kwargs: Any) -> Self:
            """Keep the names of the given fields. Raise UserError for an unknown one, with a hint at the known one."""
            known = inspect.signature(cls.__init__).parameters
            kinds = [parameter.kind for parameter in known.values()]
            takes_all = inspect.Parameter.VAR_KEYWORD in kinds  # of a user's subclass
            for name in kwargs:
                if name not in known and not takes_all:
                    hint = python_field_hint(name, kwargs[name], known)
                    raise UserError(f"`{name}` is not a field of {cls.__name__}.{hint}")
            made = super().__new__(cls)
            made.given_names = {*kwargs, *list(known)[1 : len(args) + 1]}  # the first parameter is `self`
            return made

    def __post_init__(self):
        if self._has_own_p() and not self._is_copy():  # the own value of another configuration, as in `p=args.p`
            self.p = list(self.p) if isinstance(self.p, list) else float(self.p)
        self._take_rule()
        if self.output_dir is not None:
            as_path("output_dir", self.output_dir)
        check_fields(self)
        self.take_own_p()
        # TRL's default is bfloat16, which transformers accepts on a machine without accelerator only with `use_cpu`.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if str(self.resume_from_checkpoint).lower() in ("false", "none"):  # words of a command line
            self.resume_from_checkpoint = None
        if getattr(self, "activation_offloading", False) and self.use_cpu:
            raise UserError(
                "`activation_offloading` must be false on a CPU, because it frees the memory of a GPU, got True."
            )
        self._save_at_evaluations()
        check_best_checkpoint(self)
        # TRL's defaults and our documentation use the old names, which all releases of transformers know. Newer ones warn.
        for old, new in _CHECKPOINTING.items():
            if getattr(self, new, False) is None:
                setattr(self, new, getattr(self, old))
        super().__post_init__()
        check_mappings(self, ["model_init_kwargs", "dataset_kwargs"])
        warn_of_fields(self, self._find_changed())  # a copy is given all fields, also those with their defaults
        self._made = {own.name: getattr(self, own.name) for own in dataclasses.fields(self)}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field, to Python's numbers and lists instead of those of numpy and torch.

        A name that people mistake for a field's raises UserError later too, since it would have no effect.
        """
        if "_made" in vars(self) and not hasattr(self, name):
            hint = attribute_hint(name, value, vars(self))
            if hint is not None:
                raise UserError(f"`{name}` is not a field of {type(self).__name__}.{hint}")
        # Numbers of numpy and torch, which JSON and YAML do not know.
        if name in self.__dataclass_fields__ and hasattr(value, "tolist"):
            value = value.tolist()
        super().__setattr__(name, value)

    def _take_rule(self) -> None:
        """Take the name and the fields of a rule, as a recipe has them, if `rule` is a rule or its class."""
        rule = self.rule
        rule_class = rule if isinstance(rule, type) else type(rule)
        if not issubclass(rule_class, GateRule):
            return
        if RULES.get(getattr(rule_class, "name", None)) is not rule_class:
            raise UserError(f"`rule` must be a rule with `@register_rule`, got {rule_class.__name__}.")
        self.rule = rule_class.name
        if rule is rule_class:
            return
        is_given = self.p is not None and not self._has_own_p()
        if is_given or self.rule_args:
            raise UserError(
                f"Set the fields of a rule in one place: `rule={short_repr(rule)}`, or its name with `p` and `rule_args`."
            )
        fields = fields_of(rule)
        self.p, self.rule_args = fields["p"], fields["rule_args"]
        self.given_names |= {"p", "rule_args"}

    def _save_at_evaluations(self) -> None:
        """Save a checkpoint at each evaluation if the best one is to be kept, unless the user has set the steps of saving.

        Early stopping keeps the best one, too.
        """
        if self.early_stopping_patience is not None and "load_best_model_at_end" not in self.given_names:
            self.load_best_model_at_end = True
        if not self.load_best_model_at_end or word_of(self.eval_strategy) == "no":
            return
        if "save_strategy" not in self.given_names:
            self.save_strategy = self.eval_strategy
        if "save_steps" not in self.given_names:
            self.save_steps = self.eval_steps or self.logging_steps

    def check_changes(self) -> None:
        """Raise UserError for a wrong value of a field that was set after the configuration was made."""
        made = vars(self).get("_made", {})  # arguments of an older file have none
        check_fields(self, [name for name, value in made.items() if getattr(self, name) != value])

    def __repr__(self) -> str:
        """Return the fields that the user has given or changed and that differ from their defaults, without tokens."""
        return f"{type(self).__name__}({', '.join(self._describe(self._find_changed()))})"

    def _find_changed(self) -> list[str]:
        """Return the names of the given or changed fields with another value than the default, as in `dataclasses.replace`."""
        defaults = {own.name: own.default for own in dataclasses.fields(self)}
        return [name for name in self.given_fields() if getattr(self, name) != defaults[name]]

    def __str__(self) -> str:
        """Return the fields of `__repr__` and all fields of this package, one in each line."""
        names = dict.fromkeys([*self._find_changed(), *GateConfig.__annotations__, *type(self).__annotations__])
        fields = self._describe(name for name in names if name in self.to_dict())
        lines = [f"{type(self).__name__}(", *(f"    {field}," for field in fields), ")"]
        return "\n".join([*lines, "The other fields have their defaults. `to_dict()` has all fields."])

    def _describe(self, names: Iterable[str]) -> list[str]:
        """Return texts such as "p=0.5" of fields, without tokens."""
        values = {name: word_of(getattr(self, name)) for name in names}
        if values.get("hub_token") is not None:
            values["hub_token"] = "***"  # noqa: S105
        return [hide_secrets(f"{name}={value!r}") for name, value in _without_token(values).items()]

    def given_fields(self) -> list[str]:
        """Return the names of the fields that the user has given or changed. The libraries and this class set others.

        A copy by `dataclasses.replace` is given all fields, so its fields with their defaults do not count.
        """
        made = vars(self).get("_made", {})  # arguments of an older file have none
        names = []
        for own in dataclasses.fields(self):
            value = getattr(self, own.name)
            is_given = own.name in self.given_names and not (self._is_copy() and value == own.default)
            if is_given or value != made.get(own.name, value):
                names.append(own.name)
        return names

    def make_rule(self) -> GateRule:
        """Return the gate rule that these arguments describe."""
        p = None if self._has_own_p() else self.p
        return make_rule(self.rule, **join_fields(self.rule, p, self.rule_args))

    def take_own_p(self) -> GateRule:
        """Return the rule, and set `p` to the one that it draws with, which is its own value if nobody has given `p`."""
        rule = self.make_rule()
        is_given = self.p is not None and not self._has_own_p()
        self.p = fields_of(rule)["p"]
        if not is_given and self.p is not None:
            self.p = OwnProbabilities(self.p) if isinstance(self.p, list) else OwnProbability(self.p)
        return rule

    def _has_own_p(self) -> bool:
        """Return whether `p` is the own value of the present or a former rule."""
        return isinstance(self.p, OwnProbability | OwnProbabilities)

    def _is_copy(self) -> bool:
        """Return whether the configuration was made with all its fields, as by `dataclasses.replace`."""
        return {own.name for own in dataclasses.fields(self) if own.init} <= self.given_names

    @property
    def rows_per_process(self) -> int:
        """Number of rows of a full micro-batch in one process. With `split_batches`, all processes share a micro-batch."""
        if self.accelerator_config.split_batches:
            return self.per_device_train_batch_size // self.world_size
        return self.per_device_train_batch_size

    @property
    def examples_per_step(self) -> int:
        """Number of examples of an optimizer step in all processes. In GRPO, they are completions."""
        return self.rows_per_process * self.gradient_accumulation_steps * self.world_size

    def count_micro_batches(self, num_rows: int) -> int:
        """Return the number of micro-batches that a process trains on in an epoch of `num_rows` examples."""
        number = num_rows / (self.rows_per_process * self.world_size)
        if self.dataloader_drop_last:
            return math.floor(number)
        return math.ceil(number)

    @property
    def seed_of_gates(self) -> int:
        """Seed of the gate and depth draws, which is `seed` unless `gate_seed` is set."""
        return self.seed if self.gate_seed is None else self.gate_seed

    def make_depth_sampler(self) -> FixedDepth:
        """Return the sampler of the depths of training steps. Only supervised fine-tuning has others than the model's own."""
        return FixedDepth()

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the number of warmup steps, rounded down with `warmup_from_first_step`."""
        if self.warmup_from_first_step and self.warmup_steps < 1:
            return max(1, int(num_training_steps * self.warmup_steps))
        return super().get_warmup_steps(num_training_steps)

    @classmethod
    def from_trl(cls, args: TrainingArguments | None, model: str | PreTrainedModel) -> GateConfig:
        """Return arguments of this class. TRL's own arguments keep their values, and get the defaults of the added fields.

        Args:
            args: Arguments of the user.
            model: Model or its name, which names the default output folder.
        """
        if isinstance(args, cls):
            return args
        if args is None:
            name = model if isinstance(model, str) else model.config.name_or_path
            return cls(f"{name.rstrip('/').split('/')[-1]}-LoopDropout")
        if not isinstance(args, cls.trl_class) and type(args) is not TrainingArguments:
            raise wrong_args(args, cls)
        names = {f.name for f in dataclasses.fields(cls)}
        fields = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init}
        fields.pop("generation_batch_size", None)  # GRPOConfig derives it from `steps_per_generation`
        # With the values that the libraries choose for this machine. It comes first, because accelerate keeps the devices and
        # the kind of launch of the last arguments.
        usual = cls(args.output_dir)
        made = cls(**{name: value for name, value in fields.items() if name in names})
        made.given_names = set()
        for own in dataclasses.fields(args):
            values = (own.default, getattr(usual, own.name, own.default))
            if own.name in fields and fields[own.name] not in values:
                made.given_names.add(own.name)
        vars(made).update({name: value for name, value in fields.items() if name not in names})  # of a user's subclass
        return made

    # The Trainer pickles its arguments into every checkpoint and logs them: never with a token of the Hub.

    def __getstate__(self) -> dict[str, Any]:
        # `_sharing` is about the trainers of these arguments, and not about those of the copy.
        fields = _without_token({**self.__dict__, "hub_token": None, "_sharing": None})
        if "_made" in fields:  # so that a copy knows the fields that were set later, and mistyped ones
            fields["_made"] = _without_token({**self._made, "hub_token": None})
        return fields

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary without tokens of the Hub."""
        return _without_token(super().to_dict())


def _without_token(fields: dict[str, Any]) -> dict[str, Any]:
    kwargs = fields.get("model_init_kwargs")
    if isinstance(kwargs, dict):
        fields["model_init_kwargs"] = {name: value for name, value in kwargs.items() if name != "token"}
    return fields


def _with_gate_fields(cls: type[GateConfig]) -> type[GateConfig]:
    """Add the fields of `GateConfig` to the docstring of a configuration, which `help` prints."""
    if GateConfig.__doc__:  # `python -OO` removes docstrings
        own = inspect.cleandoc(cls.__doc__)
        fields = inspect.cleandoc(GateConfig.__doc__).partition("Args:\n")[2]
        cls.__doc__ = own + ("\n" if "Args:\n" in own else "\n\nArgs:\n") + fields
    return cls


@_with_gate_fields
@dataclass(repr=False)
class LoopDropoutConfig(GateConfig, SFTConfig):
    r"""
    Configuration class for the [`LoopDropoutSFTTrainer`]. It has all fields of [`~trl.SFTConfig`] and of [`GateConfig`].

    Args:
        learning_rate (`float`, *optional*, defaults to `1e-4`):
            Learning rate. The default is the learning rate of the paper's controlled comparisons. A [`~trl.SFTConfig`]
            keeps TRL's 2e-5.
        loss_average (`str`, *optional*, defaults to `"tokens"`):
            Loss of a step: the mean over its `"tokens"`, or the mean of the means of its `"micro_batches"`.
        depth_sampling (`str`, *optional*, defaults to `"fixed"`):
            Number of loops of a training step: the model's own K (`"fixed"`, as in the paper), or drawn for each
            optimizer step (`"uniform"`, `"lognormal_poisson"` or `"poisson"`).
        depth_sampling_args (`dict[str, Any]`, *optional*):
            Fields of the depth sampling: `low` and `high`, or `rate`, `sigma` and `most`.
    """

    trl_class = SFTConfig
    command = "sft"

    learning_rate: float = option(
        1e-4, "Learning rate. The default is the one of the paper's controlled comparisons.", at_least=0
    )
    loss_average: str = option(
        "tokens",
        "Average that is the loss of a step: over its `tokens` or its `micro_batches`.",
        choices=["tokens", "micro_batches"],
    )
    depth_sampling: str = option(
        "fixed", "Number of loops of a training step: `fixed`, `uniform`, `lognormal_poisson` or `poisson`."
    )
    depth_sampling_args: dict[str, Any] | None = option(
        None, "Fields of the depth sampling, as a mapping (JSON on the command line)."
    )

    def __post_init__(self):
        self.make_depth_sampler()
        if self.loss_average not in ("tokens", "micro_batches"):
            raise UserError(f"`loss_average` must be 'tokens' or 'micro_batches', got {self.loss_average!r}.")
        if self.packing and self.packing_strategy != "bfd":
            raise UserError(
                f"`packing_strategy` must be 'bfd', which does not cut examples in two, got {self.packing_strategy!r}."
            )
        if self.packing and self.max_length is None:
            raise UserError("`max_length` must be set if `packing` is true, because it is the length of a packed row.")
        super().__post_init__()

    def make_depth_sampler(self) -> FixedDepth:
        """Return the depth sampler that these arguments describe."""
        return make_depth_sampler(self.depth_sampling, self.depth_sampling_args)


@_with_gate_fields
@dataclass(repr=False)
class LoopDropoutDPOConfig(GateConfig, DPOConfig):
    r"""
    Configuration class for the [`LoopDropoutDPOTrainer`]. It has all fields of [`~trl.DPOConfig`] and of [`GateConfig`].
    """

    trl_class = DPOConfig
    command = "dpo"

    def __post_init__(self):
        super().__post_init__()
        self.check_reference_cache()

    def check_reference_cache(self) -> None:
        """Raise UserError if the log-probabilities of the reference are to be kept from one depth for all depths."""
        if self.precompute_ref_log_probs:
            raise UserError(
                "`precompute_ref_log_probs` must be False, because TRL's cache does not depend on `num_loops`."
            )


@_with_gate_fields
@dataclass(repr=False)
class LoopDropoutGRPOConfig(GateConfig, GRPOConfig):
    r"""
    Configuration class for the [`LoopDropoutGRPOTrainer`]. It has all fields of [`~trl.GRPOConfig`] and of [`GateConfig`].
    """

    trl_class = GRPOConfig
    command = "grpo"

    def __post_init__(self):
        with explain_generations(self):
            super().__post_init__()
        check_reuse(self)

    @property
    def prompts_per_generation(self) -> int:
        """Number of prompts in all processes whose completions are sampled together."""
        return self.generation_batch_size // self.num_generations

    def count_micro_batches(self, num_rows: int) -> int:
        """Return the number of micro-batches that a process trains on in an epoch of `num_rows` prompts.

        TRL leaves out the last prompts of an epoch if they are fewer than `prompts_per_generation`.
        """
        return num_rows // self.prompts_per_generation * self.steps_per_generation
