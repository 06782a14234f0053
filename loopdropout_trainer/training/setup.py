"""The set-up of a trainer: its model, its adapter, the gates on the adapter, and the settings that are saved with it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from peft import PeftModel
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed
from transformers.trainer_utils import PredictionOutput

from loopdropout_trainer.data.bars import hide_short_bars
from loopdropout_trainer.errors import UserError, closest_match, short_repr
from loopdropout_trainer.files import model_path
from loopdropout_trainer.gate_state import BatchOptions, GatedBatch, GateState
from loopdropout_trainer.gates import GateRule
from loopdropout_trainer.looped import LoopedModelMixin, find_looped_model
from loopdropout_trainer.lora import (
    ADAPTER_KINDS,
    adapted_layers,
    add_gates,
    check_trainable,
    default_peft_config,
    is_gated_by,
    physical_layers,
    trained_lora_parameters,
)
from loopdropout_trainer.models.external import external_skeleton, loading_fields
from loopdropout_trainer.models.looped_modeling import check_checkpoint, explain_imports, explain_loading
from loopdropout_trainer.recipe import USUAL_NAMES
from loopdropout_trainer.renames import renamed_attribute
from loopdropout_trainer.saving.base_model import digest_weights
from loopdropout_trainer.saving.facts import MODELS
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.tokenizers import check_end_token, check_token, load_tokenizer, warn_if_rebuilt
from loopdropout_trainer.training.adapter_files import AdapterFilesMixin
from loopdropout_trainer.training.callbacks import PushCallback, UnitGatesCallback, make_step_callbacks
from loopdropout_trainer.training.config import GateConfig
from loopdropout_trainer.training.distributed import check_devices, check_processes, float32_adapter, may_skip_loops
from loopdropout_trainer.training.examples import (
    check_assistant_loss,
    check_columns,
    check_containers,
    check_conversations,
    check_rows,
    check_token_ids,
    choose_template,
    explain_row,
    find_system_turn,
    has_conversations,
    name_datasets,
    read_first,
)
from loopdropout_trainer.training.optimizer import OptimizerMixin
from loopdropout_trainer.training.resuming import ResumptionCallback
from loopdropout_trainer.training.sampling import check_sampling, seed_lengths
from loopdropout_trainer.training.stopping import EarlyStopCallback, StopCallback


_READ_ONCE = ("p", "rule", "rule_args", "depth_sampling", "depth_sampling_args")
"""Fields that a trainer reads when it is made."""


def _copy_fields(args: GateConfig) -> dict[str, Any]:
    return {name: copy.deepcopy(getattr(args, name, None)) for name in _READ_ONCE}


def _name_of(model: str | PreTrainedModel | PeftModel) -> str:
    return model if isinstance(model, str) else model.config.name_or_path


def with_gates(init: Callable[..., None]) -> Callable[..., None]:
    """Return the `__init__` of a TRL trainer for a class with `AdapterTrainingMixin`. It has the same signature."""

    @functools.wraps(init)
    def gated_init(self: AdapterTrainingMixin, *positional: Any, **keywords: Any) -> None:
        _check_names(type(self), keywords, inspect.signature(init).parameters)
        bound = inspect.signature(init).bind(self, *positional, **keywords)
        bound.apply_defaults()
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        self.before_init(arguments)
        try:
            with explain_imports(_name_of(arguments["model"])), hide_short_bars(num_rows=_count_examples(arguments)):
                super(AdapterTrainingMixin, self).__init__(**arguments)
        except (TemplateError, UserError):  # mostly of a chat template
            if self.reads_columns(arguments):
                explain_row(arguments, self.formats(arguments["args"]), arguments["processing_class"])
            raise
        self.after_init()

    return gated_init


_USUAL_ARGUMENTS = {
    "tokenizer": "processing_class",
    "dataset": "train_dataset",
    "config": "args",
    "lora_config": "peft_config",
}
"""Names of arguments that people type by habit, and the names that they have now."""


def _check_names(trainer: type, given: Iterable[str], arguments: Collection[str]) -> None:
    """Raise UserError for an unknown argument of a trainer, which names the argument or the field that helps."""
    config = trainer.config_class
    fields = {own.name for own in dataclasses.fields(config)}
    for name in given:
        if name in arguments:
            continue
        hint = closest_match(_USUAL_ARGUMENTS.get(name, name), arguments)
        meant = name if name in fields else USUAL_NAMES.get(name)
        if meant in fields:
            hint = f" Set `{meant}` in a `{config.__name__}`, which is the argument `args`."
        raise UserError(f"`{name}` is not an argument of {trainer.__name__}.{hint}")


def _check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raise UserError for a model, a list of callbacks or an adapter's configuration of another type."""
    model, callbacks = arguments["model"], arguments["callbacks"]
    for name, value in arguments.items():
        if name != "args" and isinstance(value, TrainingArguments):
            raise UserError(f"`{name}` must not be a {type(value).__name__}. Pass it as `args=...`.")
    if not isinstance(model, str | Path | nn.Module):
        raise UserError(f"`model` must be a looped model, a PEFT model over one, or a name, got {short_repr(model)}.")
    if hasattr(model, "_orig_mod"):
        raise UserError("`model` must not be compiled. Give the model itself, and set `torch_compile=True` in `args`.")
    if callbacks is not None and not isinstance(callbacks, list | tuple):
        raise UserError(f"`callbacks` must be a list of callbacks, got {short_repr(callbacks)}.")


def _count_examples(arguments: Mapping[str, Any]) -> float:
    """Return the number of the examples that a trainer prepares, which is infinite for streams."""
    datasets = [dataset for _, dataset in name_datasets(arguments) if dataset is not None]
    return sum(len(dataset) if isinstance(dataset, Sized) else math.inf for dataset in datasets)


def describe_weights(config: Any, dtype: Any) -> dict[str, Any]:
    """Return the data type and the quantization of a base model's weights, as JSON."""
    quantization = getattr(config, "quantization_config", None)
    if hasattr(quantization, "to_dict"):
        quantization = quantization.to_dict()
    as_json = json.loads(json.dumps(quantization, default=str))  # its data types become texts
    return {"dtype": str(dtype).removeprefix("torch."), "quantization": as_json}


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


class AdapterTrainingMixin(AdapterFilesMixin, OptimizerMixin):
    """Setup of a TRL trainer, whose `__init__` is made by `with_gates`.

    Attributes:
        config_class: Class of `args`.
        rule: Rule that draws the gates.
        gate_state: Current gates of the model. They are one outside of training passes.
        last_gates: Gates that were drawn last.
        num_trained: Number of examples that they were drawn for, or 0 if no token of them is trained on.
        method: Name of the method in results. Default: the title of the rule.
        unit_gates: Callback that sets the gates to one, and counts the micro-batches of the optimizer step.
        tokens_before: Number of tokens of earlier calls of `train`.
        step_metrics: Values of micro-batches since the last log of the training, whose means are logged.
        physical_layers: [M] index of the layer of each adapted module.
        batch_options: Optimizations that training may use.
        samples_start_states: Whether models with a random start state draw it for each step.
        runs_several_draws: Whether the trainer runs rules with several draws for a micro-batch.
        draw_index: Index of the running draw.
        recipe: Recipe of the training, which is saved with its results. Default: made of the arguments.
        training_id: Identifier of the training, which its checkpoints and its adapter keep.
        num_given: Numbers of examples of the datasets that TRL makes tokens of, by their names in messages.
        saved_facts: Further settings that are saved with the adapter for later commands: `prompt_template` (a text with a
            {field}), `is_chat`, `system_turn` (of all conversations), and `base_weights` (a digest).
    """

    config_class: type[GateConfig]
    model: PeftModel
    processing_class: PreTrainedTokenizerBase
    rule: GateRule
    gate_state: GateState
    unit_gates: UnitGatesCallback
    step_metrics: dict[str, list[float]]
    physical_layers: list[int]
    last_gates: GatedBatch | None = None
    method: str | None = None
    recipe: Mapping[str, Any] | None = None
    num_trained = 0
    tokens_before = 0
    batch_options = BatchOptions()
    samples_start_states = True
    runs_several_draws = False
    draw_index = 0
    training_id: str | None = None
    saved_facts: dict[str, Any]
    num_given: dict[str, int]

    drawn = renamed_attribute("drawn", "last_gates")

    def before_init(self, arguments: dict[str, Any]) -> None:
        """Complete the arguments of TRL's trainer, by default with the paper's adapter and the model's `tokenizer.json`."""
        check_containers(arguments)
        for title, dataset in name_datasets(arguments):
            if isinstance(dataset, Sized) and len(dataset) == 0:
                raise UserError(f"{title} must have at least one example.")
        dataset = arguments.get("train_dataset")
        _check_kinds(arguments)
        args = arguments["args"] = self.config_class.from_trl(arguments["args"], arguments["model"])
        check_devices(args)
        model = skeleton = arguments["model"] = model_path(arguments["model"])
        revision = (args.model_init_kwargs or {}).get("revision") or "main"
        self.saved_facts = {}
        if isinstance(model, str):
            with explain_loading(model):
                self.saved_facts["base_revision"] = find_source(model, revision=revision, accept=MODELS).commit
                check_checkpoint(model, revision)
                if args.model_init_kwargs:
                    args.model_init_kwargs = loading_fields(model, args.model_init_kwargs)
                skeleton = external_skeleton(model, revision)
        set_seed(args.seed)  # the adapter is random, and TRL seeds it only since version 1.16
        self.rule = args.make_rule()
        self._made_with = _copy_fields(args)
        if self.rule.draws_per_batch > 1 and not self.runs_several_draws:
            raise UserError(f"`rule` {self.rule.name!r} must be trained with `LoRADropoutSFTTrainer`.")
        self.step_metrics = defaultdict(list)
        self.saved_facts["is_chat"] = has_conversations(read_first(dataset))
        self._choose_adapter(arguments, skeleton)
        if arguments["processing_class"] is None:
            if not _name_of(model):
                raise UserError(
                    "`processing_class` must be set, because the model has no name of a folder or repository with its "
                    "tokenizer."
                )
            arguments["processing_class"] = load_tokenizer(_name_of(model), revision)
        else:
            warn_if_rebuilt(arguments["processing_class"])
        self._check_examples(arguments)
        if system_turn := find_system_turn(dataset):
            self.saved_facts["system_turn"] = system_turn
        self._add_callbacks(arguments)

    def _check_examples(self, arguments: dict[str, Any]) -> None:
        """Raise UserError if the examples lack columns, or their tokenizer a chat template. Set the template of `args`."""
        args, tokenizer = arguments["args"], arguments["processing_class"]
        self._template_path = getattr(args, "chat_template_path", None)
        if self._template_path is not None:
            args.chat_template_path = choose_template(args, tokenizer)
        if getattr(args, "chat_template_path", None) is None:  # else TRL copies another tokenizer's tokens
            for name in ("eos_token", "pad_token"):
                check_token(tokenizer, name, getattr(args, name, None))
        self.num_given = {}
        if not self.reads_columns(arguments):
            return
        for title, dataset in name_datasets(arguments):
            if isinstance(dataset, Sized):
                self.num_given[title] = len(dataset)
        if self._template_path is None and getattr(args, "eos_token", None) is None:
            check_end_token(tokenizer)
        check_columns(arguments, self.formats(args))
        check_assistant_loss(args, read_first(arguments.get("train_dataset")))
        if getattr(args, "chat_template_path", None) is None:  # else TRL copies another tokenizer's template
            check_conversations(arguments, tokenizer)
            check_rows(arguments, self.formats(args), tokenizer.chat_template)

    def formats(self, args: GateConfig) -> Collection[Sequence[str]]:
        """Return the columns of each format of examples that TRL's trainer reads. Without any, columns are not checked."""
        return ()

    def reads_columns(self, arguments: dict[str, Any]) -> bool:
        """Return whether TRL makes tokens of the columns of the examples, and neither the user's function nor subclass."""
        prepares = getattr(type(self), "_prepare_dataset", None)
        is_own = prepares is not None and not prepares.__module__.startswith("trl.")
        skips = (getattr(arguments["args"], "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
        return not is_own and not skips and arguments.get("formatting_func") is None

    def _choose_adapter(self, arguments: dict[str, Any], skeleton: LoopedModelMixin | nn.Module | None) -> None:
        """Keep the weights of a given adapter, or complete the configuration of a new one.

        Args:
            arguments: Arguments of TRL's trainer.
            skeleton: Looped model whose projections are adapted, with or without weights. None: PEFT finds them.
        """
        model = arguments["model"]
        self._given_weights = {}
        if isinstance(model, PeftModel):
            if arguments["peft_config"] is not None:
                raise UserError(
                    "Set either `peft_config` or a `model` with an adapter, not both, because `peft_config` describes a new "
                    "adapter."
                )
            self._given_weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        elif isinstance(model, nn.Module) and adapted_layers(model):
            raise UserError(
                "`model` must not have an adapter already, which a second one would replace. Give the PEFT model "
                "(`trainer.model` of the first trainer), or load the base model again."
            )
        else:
            arguments["peft_config"] = default_peft_config(skeleton, arguments["peft_config"])

    def _add_callbacks(self, arguments: dict[str, Any]) -> None:
        """Put the callbacks of this package before those of the user, which may evaluate and must see unit gates."""
        self.unit_gates = UnitGatesCallback()
        self.stop_callback = StopCallback()
        self.resumption = ResumptionCallback()
        self.step_callbacks = make_step_callbacks(arguments["args"], self.rule)
        # The first ones read the gates of a step, and the second one resets them.
        own = [*self.step_callbacks, self.unit_gates, self.stop_callback, self.resumption, PushCallback()]
        if arguments["args"].early_stopping_patience is not None:
            own.append(EarlyStopCallback(arguments["args"].early_stopping_patience))
        arguments["callbacks"] = [*own, *(arguments["callbacks"] or [])]

    def after_init(self) -> None:
        """Put gates on the adapter."""
        if self._template_path is not None:
            self.args.chat_template_path = self._template_path
        vocabulary = self.model.get_input_embeddings().num_embeddings
        for title, dataset in name_datasets(vars(self)):
            check_token_ids(title, dataset, vocabulary)
        check_processes(self.accelerator, self.args)
        check_sampling(self.args, self.train_dataset)
        self.check_packages()
        float32_adapter(self.model, self._given_weights)
        self._record_base()
        self.prepare_gates()
        if self.optimizer is not None:
            self.check_optimizer()

    def _record_base(self) -> None:
        """Record the commit and the weights of the base model. PEFT's configuration saves the commit, too."""
        looped, config = self.looped, self.model.peft_config[self.model.active_adapters[0]]
        revision = self.saved_facts.pop("base_revision", None) or looped.base_revision or config.revision
        looped.base_revision = config.revision = revision
        self.saved_facts["base_weights"] = digest_weights(self.model)

    def restore_accelerator(self) -> None:
        """Make the accelerator again if its state is gone. Each new configuration resets it for all trainers of a process."""
        if not hasattr(self.accelerator.state, "distributed_type"):
            self.create_accelerator_and_postprocess()

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate with all gates at 1, as transformers' Trainer does."""
        self.restore_accelerator()
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict with all gates at 1, as transformers' Trainer does."""
        self.restore_accelerator()
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def prepare_gates(self) -> None:
        """Put gates on the active adapter by the present values of `args`, which may have changed since `__init__`."""
        self._read_rule()
        _forbid_reentrant_checkpoints(self.args, self.model)
        check_trainable(self.model)
        depths = self.args.make_depth_sampler().limits(self.num_loops)
        for depth in depths:
            self.rule.check(depth)
        bound = self._needs_one_depth()
        if depths != (self.num_loops, self.num_loops) and bound is not None:
            raise UserError(f"`depth_sampling` must be 'fixed' for {bound}.")
        if not is_gated_by(self.model, self.rule):  # another adapter, trainer or handle may have replaced the gates
            add_gates(self.model, in_activation_dtype=True, rule=self.rule, seed=self.args.seed)
        self.gate_state = self.unit_gates.gate_state = self.looped.gate_state
        self.gate_state.rule = self.rule
        self.physical_layers = physical_layers(self.model)  # [M]
        self.batch_options = self.find_batch_options()
        for callback in self.step_callbacks:
            callback.trainer, callback.rule = self, self.rule
        if self.looped.trained_with.get("training_id") in (None, self.training_id):
            self.looped.trained_with = self.saved_settings()  # else the weights still come from another training

    def saved_settings(self) -> dict[str, Any]:
        """Return the settings that are saved with an adapter which this trainer has trained."""
        args = self.args
        depths = args.make_depth_sampler().limits(self.num_loops)
        settings = {
            "rule": args.rule,
            "p": args.p,
            "rule_args": args.rule_args,
            "gate_seed": self.gate_seed,
            "num_loops": self.num_loops,
            "depths": list(depths),
            "base_revision": self.looped.base_revision,
            **describe_weights(self.looped.config, self.looped.dtype),
            "method": self.method or self.rule.title,
            "seed": args.seed,
            "training_id": self.training_id,
            **self.saved_facts,
        }
        if "initial_adapter" in self.looped.trained_with:  # of the adapter that the training starts from
            settings["initial_adapter"] = self.looped.trained_with["initial_adapter"]
        return settings

    def _read_rule(self) -> None:
        """Make a new rule if `p` has changed, and raise UserError if another field of `_READ_ONCE` has."""
        fields, before = _copy_fields(self.args), self._made_with
        changed = [name for name in fields if fields[name] != before[name]]
        if not changed:
            return
        if changed == ["p"]:
            rule = self.args.make_rule()
            if rule.alpha_factor == self.rule.alpha_factor:  # which the adapter was made with
                self.rule, self._made_with = rule, fields
                return
        name = changed[-1]
        raise UserError(
            f"`{name}` must keep its value {before[name]!r} after the trainer was made, got {fields[name]!r}. Make a new "
            "trainer."
        )

    def _needs_one_depth(self) -> str | None:
        """Return the model or the rule that cannot train at several depths, or None."""
        if self.looped.trains_at_one_depth:
            return f"`model_type: {self.looped.config.model_type}`"
        if ADAPTER_KINDS[self.rule.lora_kind].one_depth or self.rule.wants_sensitivity:
            return f"the rule {self.rule.name!r}"
        return None

    def find_batch_options(self) -> BatchOptions:
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
        """Recurrence depth K that the model runs at."""
        return self.looped.num_loops

    @property
    def gate_seed(self) -> int:
        """Seed of the gate and depth draws."""
        if self.args.gate_seed is None:
            return self.args.seed
        return self.args.gate_seed

    # The order of the examples

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return seed_lengths(super()._get_train_sampler(*args, **kwargs), self.args.seed)

    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return seed_lengths(super()._get_eval_sampler(*args, **kwargs), self.args.seed)
