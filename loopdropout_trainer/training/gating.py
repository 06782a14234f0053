"""The gates on the adapter of a trainer, by the present values of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.files import public_name
from loopdropout_trainer.gate_labels import label_gates
from loopdropout_trainer.gate_state import BatchOptions
from loopdropout_trainer.gates import RULES, GateRule
from loopdropout_trainer.gates.rule import as_rule, check_has_p, fields_of, has_same_code, is_packaged
from loopdropout_trainer.looped import LoopedModelMixin, find_looped_model
from loopdropout_trainer.lora import (
    adapted_layers,
    add_gates,
    check_trainable,
    is_gated_by,
    physical_layers,
    trained_lora_parameters,
)
from loopdropout_trainer.results.training_results import OTHER_DEPTH, OTHER_GATES
from loopdropout_trainer.training.argument_checks import checking_metrics, is_callback
from loopdropout_trainer.training.config import GateConfig
from loopdropout_trainer.training.distributed import float32_adapter, may_skip_loops
from loopdropout_trainer.training.fixed_fields import (
    RULE_FIELDS,
    check_attribute,
    copy_fields,
    find_changed,
)
from loopdropout_trainer.training.given_data import prepare_given
from loopdropout_trainer.training.rule_checks import check_depths, find_one_depth_type
from loopdropout_trainer.training.shared_args import changed_since_made, sharing_of
from loopdropout_trainer.training.start import find_start


logger = logging.get_logger(__name__)


def _forbid_reentrant_checkpoints(args: GateConfig, model: nn.Module) -> None:
    """Let gradient checkpointing run without a second backward pass inside of the first one.

    TRL asks for the reentrant kind under ZeRO-3, and a program can ask for it in `args` or on its model. It would report the
    gradients of a layer that runs K times K times. It would also lose the gradient of a layer whose input has none, such as
    the first one after loops that run as the frozen model.
    """
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):  # new name, old name
        options = getattr(args, name, None)
        if options and options.get("use_reentrant"):
            options["use_reentrant"] = False
    for module in model.modules():
        run = getattr(module, "_gradient_checkpointing_func", None)  # a partial of torch's `checkpoint`
        if run is not None and getattr(run, "keywords", {}).get("use_reentrant"):
            module._gradient_checkpointing_func = functools.partial(run, use_reentrant=False)


def _describe_kind(rule: GateRule) -> tuple[Any, ...]:
    """Return the options of a rule that an adapter and the callbacks of a trainer are made for."""
    return rule.lora_kind, rule.alpha_factor, rule.wants_sensitivity, rule.draws_per_batch


def _changed_in_training(name: str, before: Any, now: Any) -> UserError:
    """Return the error about a field of the rule or the depths that a callback sets while `train` runs."""
    advice = "Set it before `train()`, or use the rule 'schedule', which changes p in the training."
    if name.startswith("depth_sampling"):
        advice = "Make a new trainer."
    return UserError(
        f"`{name}` must keep its value {short_repr(before)} in the training, got {short_repr(now)}. {advice}"
    )


class GatingMixin:
    """Gates on the adapter of a TRL trainer. `AdapterTrainingMixin` lists its attributes."""

    _has_read_fields = False
    _runs_train = False
    """Whether `train` runs, also its callbacks at the end. `is_in_train` of transformers stays true after an exception."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self._has_read_fields:  # before, the libraries set attributes of their own
            check_attribute(self, name, value)
            if name == "eval_dataset" and value is not None:
                value = prepare_given(self, name, value)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        if not self._has_read_fields:  # while it is made
            return super().__repr__()
        name = public_name(self.model.config.name_or_path) or "a model"
        progress = "not trained yet"
        if self.state.max_steps:  # of a training that has begun
            progress = f"step {self.state.global_step:,} of {self.state.max_steps:,}"
        return f"{type(self).__name__} of {name} with {self.rule}, {progress}"

    @property
    def rule(self) -> GateRule:
        """Rule that draws the gates. The fields of `args` make it, which also name it in results and cards.

        Setting another rule, also by its name, sets these fields. The name of the present rule, or of one that the trainer had
        before, keeps its fields. Another rule must train the same kind of adapter. A new `args.p` applies outside
        of a training, whose rule stays the same.
        """
        if self._has_read_fields and not self._runs_train:
            with suppress(TypeError, UserError):  # the rule has no `p`, or its value is wrong, as `train` says
                self._take_p()
        return self._rule

    @rule.setter
    def rule(self, rule: str | GateRule) -> None:
        if self._runs_train:
            raise _changed_in_training("rule", self._rule.name, rule)
        self._known_rules[self._rule.name] = self.rule  # with a new `args.p`
        rule = as_rule(rule, self._known_rules)
        if not isinstance(rule, RULES.get(rule.name, ())):
            raise UserError(f"`rule` must be a rule with `@register_rule`, got {short_repr(rule)}.")
        if _describe_kind(rule) != _describe_kind(self._rule):
            raise UserError(
                f"`rule` must train the adapter as {self._rule.name!r} does, which this trainer was made for, got "
                f"{short_repr(rule)}. Make a new trainer."
            )
        self._check_depths(rule)
        self._set_rule(rule)
        sharing_of(self.args).note_setter(self)

    def _set_rule(self, rule: GateRule) -> None:
        """Set the rule, and the fields of `args` that describe it, also its own `p` if that was None."""
        for name, value in fields_of(rule).items():
            setattr(self.args, name, value)
            self._made_with[name] = value
        self._rule = rule

    @property
    def p(self) -> float | list[float] | None:
        """Drop probability, `args.p`. Setting it applies to the next training."""
        return self.args.p

    @p.setter
    def p(self, p: float | Sequence[float]) -> None:
        if self._runs_train:
            raise _changed_in_training("p", self.args.p, p)
        sharing = sharing_of(self.args)
        if sharing.is_set_by_another(self):
            self._set_rule(self._rule)  # of which only `p` becomes another one
        before, self.args.p = self.args.p, p
        sharing.note_setter(self)
        try:
            self._read_rule()
            self._check_depths()
        except UserError:
            self.args.p = before
            self._take_p()
            raise
        finally:
            sharing.note_setter(self)  # `p` may have been None, the rule's own value

    def _make_rule(self, args: GateConfig) -> None:
        """Make the rule by `args`, which may have changed since they were made, and keep the values that it is made of."""
        self._rule = args.take_own_p()
        self._known_rules: dict[str, GateRule] = {}
        self._made_with = copy_fields(args, RULE_FIELDS)

    def _keep_fields(self) -> None:
        """Keep the values of all fields that this trainer has read by now, and will not read again."""
        self._made_with = copy_fields(self.args)
        self._has_read_fields = True
        sharing_of(self.args).num_trainers += 1

    def _prepare_gates(self) -> None:
        """Put gates on the active adapter by the present values of `args`, which may have changed since `__init__`."""
        self.args.check_changes()
        self._read_rule()
        _forbid_reentrant_checkpoints(self.args, self.model)
        check_trainable(self.model)
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):  # which keep the weights themselves
            float32_adapter(self.model, {})  # a program may have called `model.to(torch.bfloat16)`
        self._check_depths()
        if not is_gated_by(self.model, self.rule):  # another adapter, trainer or handle may have replaced the gates
            add_gates(self.model, in_activation_dtype=True, rule=self.rule, seed=self.args.seed)
        self.gate_state = self._unit_gates.gate_state = self.looped.gate_state
        self.gate_state.rule = self.rule
        self.physical_layers = physical_layers(self.model)  # [M]
        self._adapted_layers = adapted_layers(self.model)
        self._batch_options = self._find_batch_options()
        for callback in self._step_callbacks:
            callback.trainer, callback.rule = self, self.rule
        if self.looped.trained_with.get("training_id") is None:  # else the weights still come from that training
            self.start = find_start(self.model)
            own_loop = self.looped.trained_with.get("own_loop")
            # This trainer may have trained another adapter of the model before.
            self.looped.trained_with = {**self.saved_settings(), "training_id": None, "own_loop": own_loop}

    def _check_depths(self, rule: GateRule | None = None) -> None:
        """Raise UserError if the model or a rule, by default the present one, cannot train at the depths of `args`."""
        rule = self._rule if rule is None else rule
        check_depths(self.args, rule, self.num_loops, find_one_depth_type(self.looped))

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback, as transformers' Trainer does, which fails hours later for another value."""
        if not is_callback(callback):
            raise UserError(f"`callback` must be a `TrainerCallback`, got {short_repr(callback)}.")
        super().add_callback(callback)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as transformers' Trainer does. A wrong result of `compute_metrics` is named.

        The metrics at another depth than that of the training have this depth, such as `eval_num_loops`, and those under other
        gates than 1 have the gates, such as `eval_gates`. By these names, `as_trained` leaves them out of the results of the
        training.
        """
        gates = label_gates(self.model, self.num_loops)
        with checking_metrics(self):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
            )
        if self.num_loops != self.looped.trained_with.get("num_loops", self.num_loops):
            output.metrics[f"{metric_key_prefix}{OTHER_DEPTH}"] = self.num_loops
        if gates != "unit":
            output.metrics[f"{metric_key_prefix}{OTHER_GATES}"] = gates
        return output

    def _check_surroundings(self) -> None:
        """Raise UserError if `train` runs inside of a block that it would ignore, or in which nothing would train.

        It keeps the depth of a block of `use_depth`, which a warning names, because the model has another one afterwards.
        """
        if not torch.is_grad_enabled():
            raise UserError("`train()` must run outside of `torch.no_grad()` and `torch.inference_mode()`.")
        if self.gate_state.batch.of_block:
            raise UserError(
                "`train()` must run outside of `use_gates`, because it draws gates of its own. Register a rule to train under "
                "other gates."
            )
        own_depth = self.looped.own_num_loops
        if self.num_loops != own_depth:
            logger.warning(
                f"`train()` runs K = {self.num_loops} loops, the depth of a block of `use_depth`, but the model itself runs "
                f"{own_depth}, also with the trained adapter after the block. To train it at its own depth, leave the block. "
                f"To give it the other depth for good, load it with `num_loops={self.num_loops}`."
            )

    def _check_adapter(self) -> None:
        """Raise UserError if a callback has merged, switched off, frozen or replaced the adapter that trains."""
        adapter = self.looped.trained_adapter
        layers = self._adapted_layers
        is_used = all(
            adapter in layer.active_adapters and not layer.merged and not layer.disable_adapters for layer in layers
        )
        if is_used and any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
            return
        raise UserError(
            f"The adapter {adapter!r} must stay active, trainable and unmerged in the training, which would change nothing "
            "otherwise. Undo the change at the end of the callback that makes it, for example by `model.unmerge_adapter()`."
        )

    def _forget_drawn_gates(self) -> None:
        """Return to unit gates, if a trainer of this model has drawn the current gates. Those of `use_gates` stay."""
        if self.gate_state.is_drawn:
            self.gate_state.reset()

    def _keep_head(self) -> None:
        """Keep the `forward` with the fused head that TRL's trainer has put on the model, for `_restore_head`."""
        self._forward = vars(self.model.get_base_model()).get("forward")

    def _restore_head(self) -> None:
        """Put this trainer's fused head on the model again, which another trainer of the model may have replaced.

        The heads of SFT, DPO and GRPO return other values, and the one of GRPO divides the logits by its temperature.
        """
        base = self.model.get_base_model()
        if vars(base).get("forward") is self._forward:
            return
        if self._forward is None:
            del base.forward  # the one of the class applies again
        else:
            base.forward = self._forward

    def _take_p(self) -> None:
        """Make a new rule if only `p` has changed of the fields that describe the rule, and not by another trainer."""
        rule_fields = {name: self._made_with[name] for name in RULE_FIELDS}
        if find_changed(self.args, rule_fields) != ["p"] or sharing_of(self.args).is_set_by_another(self):
            return
        if self.args.p is not None:
            check_has_p(self._rule)
        rule = self.args.make_rule()
        if rule.alpha_factor == self._rule.alpha_factor:  # which the adapter was made with
            self._set_rule(rule)

    def _read_rule(self) -> None:
        """Make a new rule if `p` has changed, and raise UserError if another field has that is not read again."""
        self._take_p()
        changed = find_changed(self.args, self._made_with)
        if changed:
            raise changed_since_made(self, self._made_with, changed)
        self._check_own_rule()

    def _check_own_rule(self) -> None:
        """Raise UserError if a user's rule is not the one that the saved settings name, which has other fields or new code."""
        registered = RULES.get(self._rule.name)
        if registered is None or is_packaged(type(self._rule)):  # whose fields cannot be set
            return
        is_registered = isinstance(self._rule, registered) or has_same_code(type(self._rule), registered)
        if not is_registered:  # as when an edited notebook cell runs again
            raise UserError(
                f"The rule {self._rule.name!r} was registered again after this trainer was made, which has other code. "
                f"Make a new trainer, or set it by `trainer.rule = {registered.__name__}(...)`."
            )
        made, now = fields_of(self.args.make_rule()), fields_of(self._rule)
        if made != now:
            raise UserError(
                f"The fields of `trainer.rule` must stay {made['rule_args'] or made['p']}, got "
                f"{now['rule_args'] or now['p']}. Set a new rule by `trainer.rule = {type(self._rule).__name__}(...)`."
            )

    def _check_fields(self) -> None:
        """Raise UserError if a callback has changed the fields of the rule or the depths since the training began."""
        for name in find_changed(self.args, {name: self._made_with[name] for name in RULE_FIELDS}):
            raise _changed_in_training(name, self._made_with[name], getattr(self.args, name))

    def _check_unchanged(self) -> None:
        """Raise UserError if somebody has changed the rule's fields or the depth since the training began, which read them."""
        self._check_fields()
        low, high = self.looped.trained_with["depths"]
        if low <= self.num_loops <= high:
            return
        wanted = str(low) if low == high else f"from {low} to {high}"
        raise UserError(
            f"`num_loops` must stay {wanted} in the training, got {self.num_loops}. Measure at another depth inside of "
            f"`with use_depth(model, {self.num_loops}):`."
        )

    def _find_batch_options(self) -> BatchOptions:
        """Return the optimizations that training may use."""
        args = self.args
        has_noise = args.neftune_noise_alpha is not None  # which becomes smaller with the length of a row
        if not args.remove_padding or args.torch_compile or has_noise or not self.looped.can_pack:
            return BatchOptions()
        trained = None
        if args.skip_frozen_loops and may_skip_loops(self.accelerator, args):
            trained = trained_lora_parameters(self.model)
        return BatchOptions(remove_padding=True, lora_parameters=trained)

    @property
    def looped(self) -> LoopedModelMixin:
        """The looped model inside adapters and wrappers."""
        return find_looped_model(self.model)

    @property
    def num_loops(self) -> int:
        """Recurrence depth K that the model runs at. Setting it sets that of the model."""
        return self.looped.num_loops

    @num_loops.setter
    def num_loops(self, num_loops: int) -> None:
        self.looped.num_loops = num_loops

    @property
    def gate_seed(self) -> int:
        """Seed of the gate and depth draws."""
        return self.args.seed_of_gates
