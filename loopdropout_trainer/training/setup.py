"""The set-up of a trainer: its model, its adapter, the gates on the adapter, and the settings that are saved with it."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from peft import PeftModel
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import model_path
from loopdropout_trainer.gate_state import BatchOptions, GatedBatch, GateState
from loopdropout_trainer.gates import GateRule
from loopdropout_trainer.looped import LoopedModelMixin
from loopdropout_trainer.lora import adapted_layers, default_peft_config, is_default_target
from loopdropout_trainer.means import RuleFault
from loopdropout_trainer.models.external import external_skeleton, loading_fields
from loopdropout_trainer.models.looped_modeling import check_checkpoint, explain_imports, explain_loading
from loopdropout_trainer.renames import hide_library_warnings, renamed_attribute
from loopdropout_trainer.saving.base_model import describe_weights, digest_weights
from loopdropout_trainer.saving.facts import MODELS
from loopdropout_trainer.saving.loading import check_dtype, explain_keywords, load_skeleton
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.tokenizers import check_end_token, check_token, load_tokenizer, warn_if_rebuilt
from loopdropout_trainer.training.adapter_files import AdapterFilesMixin
from loopdropout_trainer.training.adapter_pushes import AdapterPushMixin
from loopdropout_trainer.training.argument_checks import check_kinds, check_names, check_output, check_trackers
from loopdropout_trainer.training.callbacks import PushCallback, UnitGatesCallback, make_step_callbacks
from loopdropout_trainer.training.chat_templates import choose_template, load_template_source
from loopdropout_trainer.training.config import GateConfig
from loopdropout_trainer.training.distributed import (
    OwnAcceleratorMixin,
    allow_another_deepspeed_trainer,
    check_devices,
    check_processes,
    float32_adapter,
    reset_accelerator,
)
from loopdropout_trainer.training.evaluations import EvaluationMixin
from loopdropout_trainer.training.examples import (
    check_assistant_loss,
    check_columns,
    check_conversations,
    check_datasets,
    check_given,
    check_token_ids,
    describe_prompts,
    explain_row,
    hide_bars_of_few,
    hide_length_warnings,
    make_text,
    name_datasets,
    skips_preparation,
    warn_of_unused_function,
)
from loopdropout_trainer.training.gating import GatingMixin
from loopdropout_trainer.training.optimizer import OptimizerMixin
from loopdropout_trainer.training.resuming import ResumptionCallback
from loopdropout_trainer.training.row_checks import RowReader, check_rows
from loopdropout_trainer.training.rule_checks import check_draws
from loopdropout_trainer.training.sampling import check_sampling, seed_lengths
from loopdropout_trainer.training.stopping import EarlyStopCallback, StopCallback
from loopdropout_trainer.training.unused_fields import UnreachedCallback


def _name_of(model: str | PreTrainedModel | PeftModel) -> str:
    return model if isinstance(model, str) else model.config.name_or_path


def _load_tokenizer_of(model: str | PreTrainedModel | PeftModel, revision: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model by the model's name. Raise UserError if it has no name."""
    name = _name_of(model)
    if not name:
        raise UserError(
            "`processing_class` must be set, because the model has no name of a folder or repository with its tokenizer."
        )
    return load_tokenizer(name, revision)


def with_gates(init: Callable[..., None]) -> Callable[..., None]:
    """Return the `__init__` of a TRL trainer for a class with `AdapterTrainingMixin`. It has the same signature."""

    @functools.wraps(init)
    def gated_init(self: AdapterTrainingMixin, *positional: Any, **keywords: Any) -> None:
        check_names(type(self), keywords, inspect.signature(init).parameters)
        bound = inspect.signature(init).bind(self, *positional, **keywords)
        bound.apply_defaults()
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        self._before_init(arguments)
        with (
            self._explain_rows(arguments),
            explain_imports(_name_of(arguments["model"])),
            explain_keywords(arguments["args"].model_init_kwargs or {}),
            hide_bars_of_few(arguments),
            hide_library_warnings(),
            hide_length_warnings(arguments["args"]),
        ):
            super(AdapterTrainingMixin, self).__init__(**arguments)
        self._after_init()
        self._keep_fields()

    return gated_init


class AdapterTrainingMixin(
    GatingMixin, EvaluationMixin, AdapterFilesMixin, AdapterPushMixin, OptimizerMixin, OwnAcceleratorMixin
):
    """Setup of a TRL trainer, whose `__init__` is made by `with_gates`.

    Attributes:
        config_class: Class of `args`.
        rule: Rule that draws the gates.
        _rule_fault: Fault of a user's rule that the last training has warned about, such as mean gates that are not 1.
        gate_state: Current gates of the model. They are one outside of training passes.
        last_gates: Gates that were drawn last.
        num_trained: Number of examples that they were drawn for, or 0 if no token of them is trained on.
        method: Name of the method in results. Default: the title of the rule.
        _unit_gates: Callback that sets the gates to one, and counts the micro-batches of the optimizer step.
        _step_metrics: Values of micro-batches since the last log of the training, whose means are logged.
        physical_layers: [M] index of the layer of each adapted module.
        _batch_options: Optimizations that training may use.
        _samples_start_states: Whether models with a random start state draw it for each step.
        runs_several_draws: Whether the trainer runs rules with several draws for a micro-batch.
        draw_index: Index of the running draw.
        _is_cut_off: Whether an exception has stopped the last training, so that the weights are those of its last step.
        objective: Kind of the training in texts, such as "SFT".
        recipe: Recipe of the training, which is saved with its results. Default: made of the arguments.
        training_id: Identifier of the training, which its checkpoints and its adapter keep.
        start: Settings of `find_start`, which say what the training starts from.
        _num_given: Numbers of examples of the datasets that TRL makes tokens of, by their names in messages.
        saved_facts: Further settings that are saved with the adapter for later commands: `prompt_template` (a text with a
            {field}), those of `describe_prompts`, and `base_weights` (a digest).
    """

    config_class: type[GateConfig]
    model: PeftModel
    processing_class: PreTrainedTokenizerBase
    rule: GateRule
    _rule_fault: RuleFault | None = None
    gate_state: GateState
    _unit_gates: UnitGatesCallback
    _step_metrics: dict[str, list[float]]
    physical_layers: list[int]
    last_gates: GatedBatch | None = None
    method: str | None = None
    _is_cut_off = False
    objective: str | None = None
    recipe: Mapping[str, Any] | None = None
    num_trained = 0
    _batch_options = BatchOptions()
    _samples_start_states = True
    runs_several_draws = False
    draw_index = 0
    training_id: str | None = None
    start: Mapping[str, Any] = MappingProxyType({})
    saved_facts: dict[str, Any]
    _num_given: dict[str, int]

    drawn = renamed_attribute("drawn", "last_gates")

    def _before_init(self, arguments: dict[str, Any]) -> None:
        """Complete the arguments of TRL's trainer, by default with the paper's adapter and the model's `tokenizer.json`."""
        check_kinds(arguments)
        check_datasets(arguments)
        model = arguments["model"]
        if isinstance(model, Path):
            model = str(model)
        args = self.config_class.from_trl(arguments["args"], model)
        check_devices(args)
        check_trackers(args.report_to)
        check_output(args)
        reset_accelerator(args)
        allow_another_deepspeed_trainer(args)
        model = model_path(model)
        arguments["args"], arguments["model"] = args, model
        revision = (args.model_init_kwargs or {}).get("revision") or "main"
        self.saved_facts = {}
        skeleton = model  # which has the projections that an adapter is put on
        if isinstance(model, str):
            skeleton = self._check_named_model(model, revision, args)
        check_given(args, arguments)
        set_seed(args.seed)  # the adapter is random, and TRL seeds it only since version 1.16
        self._make_rule(args)
        check_draws(args, self.rule, self.runs_several_draws)
        self._step_metrics = defaultdict(list)
        if arguments.get("formatting_func") is not None:
            arguments["formatting_func"] = functools.partial(make_text, arguments["formatting_func"])
        self.formatting_func = arguments.get("formatting_func")
        self._choose_adapter(arguments, skeleton, revision)
        if arguments["processing_class"] is None:
            arguments["processing_class"] = _load_tokenizer_of(model, revision)
        else:
            warn_if_rebuilt(arguments["processing_class"])
        self._check_examples(arguments)
        self.saved_facts |= describe_prompts(arguments["train_dataset"])
        self._add_callbacks(arguments)

    def _check_named_model(self, model: str, revision: str, args: GateConfig) -> nn.Module | None:
        """Check the files of a model that TRL loads by its name, and complete the fields of `args` for its loading.

        Returns:
            The skeleton from `external_skeleton`.
        """
        with explain_loading(model):
            self.saved_facts["base_revision"] = find_source(model, revision=revision, accept=MODELS).commit
            check_checkpoint(model, revision)
            if args.model_init_kwargs:
                check_dtype(args.model_init_kwargs.get("dtype"))
                args.model_init_kwargs = loading_fields(model, args.model_init_kwargs)
            return external_skeleton(model, revision)

    def _check_examples(self, arguments: dict[str, Any]) -> None:
        """Raise UserError if the examples lack columns, or their tokenizer a chat template. Set the template of `args`."""
        args, tokenizer = arguments["args"], arguments["processing_class"]
        self._template_path = getattr(args, "chat_template_path", None)
        if self._template_path is not None:
            args.chat_template_path = choose_template(args, tokenizer)
        if getattr(args, "chat_template_path", None) is None:  # else TRL copies another tokenizer's tokens
            for name in ("eos_token", "pad_token"):
                check_token(tokenizer, name, getattr(args, name, None))
        self._num_given = {}
        if self._reads_columns({**arguments, "formatting_func": None}):
            warn_of_unused_function(arguments)
        if not self._reads_columns(arguments):
            return
        for title, dataset in name_datasets(arguments):
            if isinstance(dataset, Sized):
                self._num_given[title] = len(dataset)
        if self._template_path is None and getattr(args, "eos_token", None) is None:
            check_end_token(tokenizer)
        writer = tokenizer
        if getattr(args, "chat_template_path", None) is not None:
            writer = load_template_source(args.chat_template_path)
        self._check_rows_of(arguments, writer)
        check_assistant_loss(args, name_datasets(arguments), tokenizer)

    def _check_rows_of(self, arguments: dict[str, Any], writer: PreTrainedTokenizerBase) -> None:
        """Raise UserError if the examples lack columns, their tokenizer a chat template, or TRL cannot read one of them.

        Args:
            arguments: Datasets by argument, and `args`. Datasets with conversations in another spelling are replaced.
            writer: Tokenizer whose chat template writes the conversations.
        """
        args = arguments["args"]
        check_columns(arguments, self.formats(args))
        check_conversations(arguments, writer)
        reader = RowReader(writer.chat_template, getattr(args, "assistant_only_loss", False))
        check_rows(arguments, self.formats(args), reader)

    @contextmanager
    def _explain_rows(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Name the row that the chat template cannot write, if a block that prepares examples raises an error about one.

        Args:
            arguments: Datasets by argument, `args`, `processing_class` and `formatting_func`.
        """
        try:
            yield
        except (TemplateError, UserError):  # mostly of a chat template
            if self._reads_columns(arguments):
                explain_row(arguments, self.formats(arguments["args"]), arguments["processing_class"])
            raise

    def formats(self, args: GateConfig) -> Collection[Sequence[str]]:
        """Return the columns of each format of examples that TRL's trainer reads. Without any, columns are not checked."""
        return ()

    def _reads_columns(self, arguments: dict[str, Any]) -> bool:
        """Return whether TRL makes tokens of the columns of the examples, and neither the user's function nor subclass."""
        prepares = getattr(type(self), "_prepare_dataset", None)
        is_own = prepares is not None and not prepares.__module__.startswith(("trl.", "loopdropout_trainer."))
        return not is_own and not skips_preparation(arguments["args"]) and arguments.get("formatting_func") is None

    def _choose_adapter(
        self, arguments: dict[str, Any], skeleton: LoopedModelMixin | nn.Module | None, revision: str
    ) -> None:
        """Keep the weights of a given adapter, or complete the configuration of a new one.

        Args:
            arguments: Arguments of TRL's trainer.
            skeleton: Looped model whose projections are adapted, with or without weights. None: PEFT finds them.
            revision: Revision of a model that is given by its name.
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
            lora = arguments["peft_config"]
            names_targets = not is_default_target(getattr(lora, "target_modules", None))
            if skeleton is None and names_targets:  # of a model by name, whose modules are not known yet
                skeleton = load_skeleton(model, revision)
            arguments["peft_config"] = default_peft_config(skeleton, lora)

    def _add_callbacks(self, arguments: dict[str, Any]) -> None:
        """Put the callbacks of this package before those of the user, which may evaluate and must see unit gates."""
        self._unit_gates = UnitGatesCallback()
        self._stop_callback = StopCallback()
        self.resumption = ResumptionCallback()
        self._step_callbacks = make_step_callbacks(arguments["args"], self.rule)
        # The first ones read the gates of a step, and the second one resets them.
        own = [*self._step_callbacks, self._unit_gates, self._stop_callback, self.resumption, PushCallback()]
        own.append(UnreachedCallback())
        self._early_stop_callback = None
        if arguments["args"].early_stopping_patience is not None:
            self._early_stop_callback = EarlyStopCallback(arguments["args"].early_stopping_patience)
            own.append(self._early_stop_callback)
        arguments["callbacks"] = [*own, *(arguments["callbacks"] or [])]

    def _after_init(self) -> None:
        """Put gates on the adapter."""
        if self._template_path is not None:
            self.args.chat_template_path = self._template_path
        vocabulary = self.model.get_input_embeddings().num_embeddings
        for title, dataset in name_datasets(vars(self)):
            check_token_ids(title, dataset, vocabulary)
        check_processes(self.accelerator, self.args)
        check_sampling(self.args, self.train_dataset)
        self._check_packages()
        float32_adapter(self.model, self._given_weights)
        self._record_base()
        self.looped.training_tokenizer = self.processing_class
        self._keep_head()
        self._prepare_gates()
        if self.optimizer is not None:
            self._check_optimizer()

    def _record_base(self) -> None:
        """Record the commit and the weights of the base model. PEFT's configuration saves the commit, too."""
        looped, config = self.looped, self.model.peft_config[self.model.active_adapters[0]]
        revision = self.saved_facts.pop("base_revision", None) or looped.base_revision or config.revision
        looped.base_revision = config.revision = revision
        self.saved_facts["base_weights"] = digest_weights(self.model)

    def _prepare_rows(self, dataset: Any, name: str, keeps_order: bool) -> Any:
        """Return examples as TRL's trainer prepares those of its own data. GRPO reads them unprepared.

        Args:
            dataset: Examples with the columns of one of TRL's formats, or tokens.
            name: Name of the dataset in progress bars.
            keeps_order: Whether each example stays a row of its own, at its place.
        """
        return dataset

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
            "objective": self.objective,
            "learning_rate": args.learning_rate,
            "seed": args.seed,
            "training_id": self.training_id,
            **self.saved_facts,
            **self.start,
        }

    def _report_early_stop(self, resuming: str) -> None:
        """Log that the training stopped early, if it did. `resuming`: code or option that continues it."""
        if self._early_stop_callback is not None:
            self._early_stop_callback.report_stop(
                self.args, self.state, resuming, self.recipe is not None, self._line_title
            )

    # The order of the examples

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return seed_lengths(super()._get_train_sampler(*args, **kwargs), self.args.seed)

    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return seed_lengths(super()._get_eval_sampler(*args, **kwargs), self.args.seed)
