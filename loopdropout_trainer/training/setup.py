"""Training of a gated adapter apart from the gates: the new adapter, its optimizer, and its files."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import is_liger_kernel_available

from loopdropout_trainer.errors import UserError, first_line
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
    find_active_adapter,
    is_gated_by,
    kind_of,
    physical_layers,
    trained_lora_parameters,
)
from loopdropout_trainer.models.external import external_skeleton, loading_fields
from loopdropout_trainer.models.looped_modeling import check_checkpoint, explain_imports, explain_loading
from loopdropout_trainer.renames import renamed_attribute
from loopdropout_trainer.results import result_columns, saved_step, training_results, write_results
from loopdropout_trainer.saving.base_model import digest_weights
from loopdropout_trainer.saving.cards import CARD_FILE, read_card_fields, write_model_card
from loopdropout_trainer.saving.checkpoints import delete_older_checkpoints
from loopdropout_trainer.saving.facts import MODELS
from loopdropout_trainer.saving.integrity import adapter_patterns, begin, record, saving
from loopdropout_trainer.saving.loading import save_adapter_metadata
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.tokenizers import load_tokenizer, warn_if_rebuilt
from loopdropout_trainer.training.callbacks import PushCallback, UnitGatesCallback, make_step_callbacks
from loopdropout_trainer.training.config import GateConfig
from loopdropout_trainer.training.distributed import check_devices, check_processes, float32_adapter, may_skip_loops
from loopdropout_trainer.training.resuming import ResumptionCallback
from loopdropout_trainer.training.sampling import check_sampling, seed_lengths
from loopdropout_trainer.training.stopping import StopCallback, check_finite


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
        bound = inspect.signature(init).bind(self, *positional, **keywords)
        bound.apply_defaults()
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        self.before_init(arguments)
        with explain_imports(_name_of(arguments["model"])):
            super(AdapterTrainingMixin, self).__init__(**arguments)
        self.after_init()

    return gated_init


def has_conversations(dataset: Any) -> bool | None:
    """Return whether the examples of a dataset are conversations, or None for tokens or without a dataset."""
    from trl.data_utils import is_conversational

    example = None if dataset is None else next(iter(dataset), None)
    if not isinstance(example, Mapping) or "input_ids" in example:
        return None
    return bool(is_conversational(example))


def describe_weights(config: Any, dtype: Any) -> dict[str, Any]:
    """Return the data type and the quantization of a base model's weights, as JSON."""
    quantization = getattr(config, "quantization_config", None)
    if hasattr(quantization, "to_dict"):
        quantization = quantization.to_dict()
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": None if quantization is None else json.loads(json.dumps(quantization, default=str)),
    }


class AdapterTrainingMixin:
    """Setup of a TRL trainer, whose `__init__` is made by `with_gates`.

    Attributes:
        config_class: Class of `args`.
        rule: Rule that draws the gates.
        gate_state: Gates in force in the model. They are one outside of training passes.
        last_gates: Gates that were drawn last.
        method: Name of the method in results. Default: the title of the rule.
        num_trained: Number of examples that they were drawn for, or 0 if no token of them is trained on.
        unit_gates: Callback that sets the gates to one, and counts the micro-batches of the optimizer step.
        tokens_before: Number of tokens of earlier calls of `train`.
        step_metrics: Values of micro-batches since the last log of the training, whose means are logged.
        physical_layers: [M] index of the layer of each adapted module.
        batch_options: Optimizations that training may use.
        samples_start_states: Whether models with a random start state draw it for each step.
        runs_several_draws: Whether the trainer runs rules with several draws for a micro-batch.
        draw_index: Index of the running draw.
        training_id: Identifier of the training, which its checkpoints and its adapter keep.
        saved_facts: Further settings that are saved with the adapter for later commands: `prompt_template` (a text with a
            {field}), `is_chat`, and `base_weights` (a digest).
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
    num_trained = 0
    tokens_before = 0
    batch_options = BatchOptions()
    samples_start_states = True
    runs_several_draws = False
    draw_index = 0
    training_id: str | None = None
    saved_facts: dict[str, Any]

    drawn = renamed_attribute("drawn", "last_gates")

    def before_init(self, arguments: dict[str, Any]) -> None:
        """Complete the arguments of TRL's trainer, by default with the paper's adapter and the model's `tokenizer.json`."""
        args = arguments["args"] = self.config_class.from_trl(arguments["args"], arguments["model"])
        check_devices(args)
        model = skeleton = arguments["model"] = model_path(arguments["model"])
        revision = (args.model_init_kwargs or {}).get("revision")
        if isinstance(model, str):
            with explain_loading(model):
                source = find_source(model, revision=revision, accept=MODELS)
                check_checkpoint(model, revision)
                if args.model_init_kwargs:
                    args.model_init_kwargs = loading_fields(model, args.model_init_kwargs)
                skeleton = external_skeleton(model, revision)
        set_seed(args.seed)  # the adapter is random, and TRL seeds it only since version 1.16
        self.rule = args.make_rule()
        self._made_with = _copy_fields(args)
        if self.rule.draws_per_batch > 1 and not self.runs_several_draws:
            raise UserError(f"`rule` {self.rule.name!r} must be trained with `LoRADropoutSFTTrainer`.")
        self.unit_gates = UnitGatesCallback()
        self.stop_callback = StopCallback()
        self.resumption = ResumptionCallback()
        self.step_callbacks = make_step_callbacks(args, self.rule)
        self.step_metrics = defaultdict(list)
        self.saved_facts = {"is_chat": has_conversations(arguments.get("train_dataset"))}
        if isinstance(model, str):
            self.saved_facts["base_revision"] = source.commit
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
        if arguments["processing_class"] is None:
            arguments["processing_class"] = load_tokenizer(_name_of(model), revision)
        else:
            warn_if_rebuilt(arguments["processing_class"])
        # The user's callbacks come last. They may evaluate, and must see unit gates.
        own = [*self.step_callbacks, self.unit_gates, self.stop_callback, self.resumption, PushCallback()]
        arguments["callbacks"] = [*own, *(arguments["callbacks"] or [])]

    def check_reference(self, model: str | PreTrainedModel | PeftModel) -> None:
        """Raise UserError if TRL cannot copy the adapter that will be trained to the frozen reference "ref"."""
        if not isinstance(model, PeftModel):
            return
        adapter = find_active_adapter(model)
        kind = kind_of(model, adapter)
        if adapter != "default" or kind.one_depth:
            raise UserError(
                "The trained adapter must be shared by all loops and be named 'default', because TRL copies it to the "
                f"reference, got {kind.description} named {adapter!r}. {self.without_reference}, or start from another one, "
                "which `load_adapter` names 'default'."
            )

    def after_init(self) -> None:
        """Put gates on the adapter."""
        check_processes(self.accelerator, self.args)
        check_sampling(self.args)
        self._check_packages()
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):  # new name, old name
            if (getattr(self.args, name, None) or {}).get("use_reentrant"):
                # TRL asks for it under ZeRO-3. A layer that runs K times would report its gradients K times.
                getattr(self.args, name)["use_reentrant"] = False
        float32_adapter(self.model, self._given_weights)
        self._record_base()
        self.prepare_gates()
        if self.optimizer is not None:
            self._check_optimizer()

    def _check_optimizer(self) -> None:
        """Raise UserError if a given optimizer would not train the adapter as the arguments say."""
        if self.args.loraplus_lr_ratio is not None:
            raise UserError("Set either `loraplus_lr_ratio` or `optimizers` with an optimizer of your own, not both.")
        given = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in given for parameter in self.model.parameters() if parameter.requires_grad):
            raise UserError(
                "`optimizers` must have an optimizer of trained weights, but it has none of the adapter. Give a model with "
                "its adapter (`get_peft_model`), and make the optimizer from its parameters."
            )

    def _check_packages(self) -> None:
        """Raise UserError if the optimizer or the fused kernels need a package that is not installed."""
        try:
            if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
                self.get_optimizer_cls_and_kwargs(self.args, self.model)
        except ImportError as error:
            raise UserError(f"`optim` {self.args.optim.value} needs a missing package. {first_line(error)}") from error
        if self.args.use_liger_kernel and not is_liger_kernel_available():
            raise UserError("`use_liger_kernel` needs a missing package. Install it with `pip install liger-kernel`.")

    def _record_base(self) -> None:
        """Record the commit and the weights of the base model. PEFT's configuration saves the commit, too."""
        looped, config = self.looped, self.model.peft_config[self.model.active_adapters[0]]
        revision = self.saved_facts.pop("base_revision", None) or looped.base_revision or config.revision
        looped.base_revision = config.revision = revision
        self.saved_facts["base_weights"] = digest_weights(self.model)

    def prepare_gates(self) -> None:
        """Put gates on the active adapter by the present values of `args`, which may have changed since `__init__`."""
        self._read_rule()
        check_trainable(self.model)
        depths = self.args.make_depth_sampler().limits(self.num_loops)
        for depth in depths:
            self.rule.check(depth)
        if depths != (self.num_loops, self.num_loops) and self._needs_one_depth():
            raise UserError(f"`depth_sampling` must be 'fixed' for {self._needs_one_depth()}.")
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
        return {
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
            **{name: value for name, value in self.looped.trained_with.items() if name == "initial_adapter"},
        }

    def _read_rule(self) -> None:
        """Make a new rule if `p` has changed, and raise UserError if another field of `_READ_ONCE` has."""
        fields, before = _copy_fields(self.args), self._made_with
        changed = [name for name in fields if fields[name] != before[name]]
        if not changed:
            return
        if changed != ["p"] or (rule := self.args.make_rule()).alpha_factor != self.rule.alpha_factor:
            name = changed[-1]
            raise UserError(
                f"`{name}` must keep its value {before[name]!r} after the trainer was made, got {fields[name]!r}. Make a new "
                "trainer."
            )
        self.rule, self._made_with = rule, fields

    def _needs_one_depth(self) -> str | None:
        if self.looped.trains_at_one_depth:
            return f"`model_type: {self.looped.config.model_type}`"
        is_bound = ADAPTER_KINDS[self.rule.lora_kind].one_depth or self.rule.wants_sensitivity
        return f"the rule {self.rule.name!r}" if is_bound else None

    def find_batch_options(self) -> BatchOptions:
        """Return the optimizations that training may use."""
        args = self.args
        has_noise = args.neftune_noise_alpha is not None  # which becomes smaller with the length of a row
        if not args.remove_padding or args.torch_compile or has_noise or not self.looped.can_pack:
            return BatchOptions()
        skips = args.skip_frozen_loops and may_skip_loops(self.accelerator, args)
        return BatchOptions(True, trained_lora_parameters(self.model) if skips else None)

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
        return self.args.seed if self.args.gate_seed is None else self.args.gate_seed

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log values, in training with the means of `step_metrics`."""
        if self.model.training:
            logs |= {name: sum(values) / len(values) for name, values in self.step_metrics.items()}
            self.step_metrics.clear()
        super().log(logs, start_time)

    def record_training(self, first_step: int) -> None:
        """Write the results of a training and its state with the logged losses, for reports, cards and plots.

        Args:
            first_step: Step that the training was continued from, or 0.
        """
        self.save_state()
        rows = training_results(self, first_step)
        if self.is_world_process_zero():
            columns = result_columns(self, self.method or self.rule.title)
            rows = [{"task": "training", **columns, **row} for row in rows]
            write_results(self.args.output_dir, rows, columns["step"])

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return seed_lengths(super()._get_train_sampler(*args, **kwargs), self.args.seed)

    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return seed_lengths(super()._get_eval_sampler(*args, **kwargs), self.args.seed)

    # LoRA+, the authors' warmup, and the files of an adapter.

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create the optimizer, with LoRA+ if `loraplus_lr_ratio` is set."""
        args = self.args
        if args.loraplus_lr_ratio is None or self.optimizer is not None:
            return super().create_optimizer(model)
        model = model or self.model
        optimizer_class, fields = self.get_optimizer_cls_and_kwargs(args, model)
        fields |= {"loraplus_lr_ratio": args.loraplus_lr_ratio, "loraplus_weight_decay": args.weight_decay}
        self.optimizer = create_loraplus_optimizer(model, optimizer_class, **fields)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Create the learning rate schedule, with its warmup one step ahead if `warmup_from_first_step` is set."""
        is_given = self.lr_scheduler is not None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.args.warmup_from_first_step and not is_given:
            if not isinstance(scheduler, LambdaLR):
                raise UserError(
                    f"`warmup_from_first_step` must be false for `lr_scheduler_type` {self.args.lr_scheduler_type}, which has "
                    "a warmup of its own."
                )
            num_warmup = self.args.get_warmup_steps(num_training_steps)
            warm_up = lambda step, after: (step + 1) / num_warmup if step < num_warmup else after(step)
            lambdas = [functools.partial(warm_up, after=after) for after in scheduler.lr_lambdas]
            self.lr_scheduler = scheduler = LambdaLR(scheduler.optimizer, lambdas)
        return scheduler

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the adapter with its training settings and its card. Weights that are not finite are not saved."""
        check_finite(self.model, self.state.global_step, self.args)
        folder = output_dir or self.args.output_dir
        is_checkpoint = _internal_call and output_dir is not None
        if not self.args.should_save:
            super().save_model(output_dir, _internal_call)
        elif is_checkpoint:  # `_save_checkpoint` marks the whole folder
            self._save_adapter(output_dir, _internal_call)
            card = Path(self.args.output_dir, CARD_FILE)
            if card.is_file():  # TRL has called `create_model_card` for this checkpoint
                shutil.copy2(card, output_dir)
        else:
            with saving(folder, adapter_patterns(self.model.peft_config)):
                self._save_adapter(output_dir, _internal_call)
            if not _internal_call:
                write_model_card(folder, self.model, repo_id=self.args.hub_model_id)

    def _save_adapter(self, output_dir: str | None, _internal_call: bool) -> None:
        folder = output_dir or self.args.output_dir
        step = self.state.global_step if _internal_call else saved_step(self)
        trained_last = self.looped.trained_with.get("training_id") == self.training_id  # and no other trainer since
        if trained_last:
            self.looped.trained_with = {**self.looped.trained_with, "step": step}
        settings = self.looped.trained_with
        save_adapter_metadata(self.model, folder, **settings)  # first: without it, an adapter runs at another depth
        super().save_model(output_dir, _internal_call)
        save_adapter_metadata(self.model, folder, **settings)  # again, with the new adapter_config.json

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, and delete older ones only after all of its files have reached the disk."""
        args, output_dir = self.args, self._get_output_dir(trial)
        folder = Path(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if args.should_save:
            begin(folder)
        limit, args.save_total_limit = args.save_total_limit, None  # transformers would delete them here
        try:
            super()._save_checkpoint(model, trial)
        finally:
            args.save_total_limit = limit
        self.accelerator.wait_for_everyone()  # every process writes its own state of the random numbers
        if args.should_save:
            record(folder)
            delete_older_checkpoints(folder, limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()  # a process that ends earlier would make the launcher end the first one

    def _load_best_model(self) -> None:
        """Load the best checkpoint. transformers does not find an adapter there that is not named "default"."""
        adapter = find_active_adapter(self.model)
        if adapter == "default" or self.is_deepspeed_enabled or self.is_fsdp_enabled:  # which have files of their own
            super()._load_best_model()
        else:
            self.model.load_adapter(str(Path(self.state.best_model_checkpoint, adapter)), adapter)

    def _load_callback_state(self) -> None:
        """Restore the user's callbacks, if `restore_callback_states_from_checkpoint` is set.

        Callbacks of this package restore themselves. transformers would replace them by new ones, which would not know the
        trainer, and would come after the callback that resets the gates.
        """
        saved = self.state.stateful_callbacks
        own = {type(callback).__name__ for callback in (*self.step_callbacks, self.resumption)}
        self.state.stateful_callbacks = {name: state for name, state in saved.items() if name not in own}
        super()._load_callback_state()
        self.state.stateful_callbacks = saved

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the card of the adapter, which names its base model and its rule, in place of TRL's."""
        if self.is_world_process_zero():
            card = read_card_fields(self.args.output_dir)
            if dataset_name is not None:
                card |= {"dataset": dataset_name, "data_description": None}
            write_model_card(self.args.output_dir, self.model, repo_id=self.args.hub_model_id, tags=tags or (), **card)
