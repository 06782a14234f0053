"""Gate sampling for any TRL trainer: every training micro-batch gets its gates, everything else gets unit gates."""

from __future__ import annotations

import copy
import functools
import inspect
import time
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from peft import PeftModel
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.utils import logging

from loopdropout_trainer.lora import add_gates, physical_layers, trained_lora_parameters
from loopdropout_trainer.lora.reference import references_like_the_policy
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.gates import Draw
from loopdropout_trainer.gates.streams import ExampleId
from loopdropout_trainer.looped import GatedBatch, LoopedModelMixin, Optimisations, find_looped_model
from loopdropout_trainer.saving.cards import save_card
from loopdropout_trainer.settings.tokenizer import (
    add_end_tokens,
    answer_end,
    as_in_its_file,
    check_template_source,
    check_vocabulary,
    read_tokenizer,
)
from loopdropout_trainer.training import distributed
from loopdropout_trainer.training.config import LoopDropoutArguments
from loopdropout_trainer.training.memory import choose_checkpointing, leaves_checkpointing_open
from loopdropout_trainer.training.preflight import check_dataset, check_run, complete_peft_config


logger = logging.get_logger(__name__)


class GateSamplingMixin:
    """Draws gates [K, N] in each training micro-batch of the TRL trainer that it stands before in the list of bases.

    They are drawn right before `compute_loss`, which stays the trainer's own, or a subclass's. All forward passes of one
    micro-batch see the same gates, and so does the backward pass; evaluation, generation and saving see unit gates, unless
    `use_gates` applies others. A subclass names its arguments class in `args_class` and the columns of its data in
    `dataset_formats`, and overrides `example_ids_of` if the rows of its batches are not its examples.

    Raises:
        NotLoopedError: for a model without loops.
        ValueError: for an adapter, a rule or a launch that cannot be trained so; before weights are loaded if `model` is a
            name.
    """

    args_class: type[LoopDropoutArguments]
    _own_depth: int | None = None  # the model's, while a training step runs it at another
    _is_in_step = False  # whether a micro-batch is trained on

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        call = inspect.signature(super().__init__).bind(*positional, **keywords)
        given = call.arguments
        model, peft_config = given["model"], given.get("peft_config")
        formats = not given.get("formatting_func")  # else what the rows become is the user's own affair
        name = model if isinstance(model, str) else model.config.name_or_path
        args = self.args_class.from_arguments(given.get("args"), f"{name.rstrip('/').split('/')[-1]}-LoopDropout")
        config = check_run(model, args, peft_config)
        self.rule, before = args.make_rule(), {}
        if isinstance(model, PeftModel):
            before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        else:
            peft_config = complete_peft_config(peft_config, config if isinstance(model, str) else model)
            if (factor := self.rule.alpha_factor) != 1:
                peft_config.lora_alpha *= factor
                peft_config.alpha_pattern = {name: alpha * factor for name, alpha in peft_config.alpha_pattern.items()}
        if formats:
            check_dataset(given.get("train_dataset"), self.dataset_formats(args))
        tokenizer = given.get("processing_class")
        if tokenizer is None:
            revision = (args.model_init_kwargs or {}).get("revision")
            with user_supplied(f"The tokenizer of {name} cannot be loaded"):
                tokenizer = read_tokenizer(name, revision, trust_remote_code=args.trust_remote_code)
        is_text = isinstance(tokenizer, PreTrainedTokenizerBase)
        if is_text:
            tokenizer = as_in_its_file(tokenizer)
            check_vocabulary(tokenizer, config)
            check_template_source(getattr(args, "chat_template_path", None), tokenizer, config)  # of SFT
        given.update(args=args, peft_config=peft_config, processing_class=tokenizer)
        chooses_checkpointing = leaves_checkpointing_open(args)
        with references_like_the_policy(model, self.rule, getattr(args, "reference_gates", "unit") == "same"):
            super().__init__(*call.args, **call.kwargs)

        distributed.check_processes(self.accelerator)
        if hasattr(self.train_dataset, "__len__"):
            self.args.num_steps(len(self.train_dataset))  # there must be one
        distributed.float32_adapter(self.model, before)
        if self.rule.passes > 1 and self.is_deepspeed_enabled:
            raise UserError(
                f"The rule {self.rule.name!r} runs {self.rule.passes} backward passes per micro-batch, and DeepSpeed steps "
                "after each: use DDP or FSDP."
            )
        fused = args.fused_lora and distributed.has_unsharded_weights(self.accelerator)
        self.loop_state = add_gates(self.model, in_activation_dtype=True, rule=self.rule, seed=args.seed, fused=fused)
        self.looped.trained_with = {
            "rule": args.rule,
            "p": args.p,
            "depths": list(args.depth_limits(self.num_loops)),
            "loop_loss": getattr(args, "loop_loss", "final"),  # preferences are scored by the final loop
            "rule_args": args.rule_args,
        }
        if is_text and formats:
            row, masked = next(iter(given["train_dataset"])), getattr(args, "assistant_only_loss", False)
            add_end_tokens(self.looped, [answer_end(self.processing_class, row, masked)])
        self.physical_layers = physical_layers(self.model)  # [M]
        self.step_callback = StepCallback(self)
        self.add_callback(self.step_callback)
        if chooses_checkpointing:
            choose_checkpointing(self.model, self.train_dataset, args)
        self._pass_index = 0
        self.optimisations = self._find_optimisations()
        self._compile_layers()

    @property
    def looped(self) -> LoopedModelMixin:
        """The looped model below adapters and wrappers."""
        return find_looped_model(self.model)

    @property
    def num_loops(self) -> int:
        """Recurrence depth K of the model."""
        return self.looped.config.num_loops

    @staticmethod
    def dataset_formats(args: TrainingArguments) -> list[set[str]]:
        """Return sets of columns; a training dataset must have all columns of one of them."""
        raise NotImplementedError

    def example_ids_of(self, inputs: dict[str, Tensor]) -> list[ExampleId]:
        """Return (row, segment) of each example of a micro-batch; rows are counted from the micro-batch's first.

        Examples with the same id get the same gates.
        """
        return [(row, 0) for row in range(len(inputs["input_ids"]))]

    def _prepare_inputs(self, inputs):
        return self._with_gates(super()._prepare_inputs(inputs))

    def _with_gates(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return what the model reads of a micro-batch, whose gates are from now on in force if it is trained on.

        TRL asks its users to override `compute_loss`, which is therefore not the place to draw them.
        """
        inputs = dict(self.looped.complete_batch(inputs))
        packed_ids = inputs.pop("example_ids", None)
        if not self._is_in_step:
            return inputs
        if packed_ids is None and "position_ids" in inputs:
            distributed.check_rows(inputs)
        if getattr(self.looped, "is_loaded_in_4bit", False):
            distributed.check_quantised_base(self.model, self.accelerator)
        self._draw_gates(inputs, packed_ids)
        return inputs

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Run the rule's passes over one micro-batch; nearly every rule has one."""
        passes, tokens, loss = self.rule.passes, self._total_train_tokens, 0.0
        for self._pass_index in range(passes):
            self._total_train_tokens = tokens  # which TRL counts in every pass
            is_last = self._pass_index == passes - 1
            with nullcontext() if is_last else self.accelerator.no_sync(model):
                loss = loss + self._run_pass(model, copy.copy(inputs), num_items_in_batch)
        loss = loss / passes
        self.step_callback.losses.append(loss)
        return loss

    def _run_pass(self, *args) -> Tensor:
        # The gates must outlive compute_loss, since checkpointing recomputes under them in the backward pass, and must
        # not outlive the step, not even when it is interrupted.
        self._is_in_step = True
        divisor = self.accelerator.gradient_accumulation_steps  # of any loss, one's own too
        self.accelerator.gradient_accumulation_steps = divisor * self.rule.passes
        try:
            loss = super().training_step(*args)
            if self.rule.wants_sensitivity:
                self.step_callback.sensitivity += self._drawn.grad.abs().sum(dim=1)  # d loss / d g, [K]
            return loss
        finally:
            self._is_in_step = False
            self.accelerator.gradient_accumulation_steps = divisor
            self._unit_gates()

    def draw_depth(self, seed: int) -> tuple[int, int]:
        """Return the number of loops that this micro-batch's gates are drawn for, and how many of these loops run.

        The same on all processes, and for all micro-batches of an optimizer step. By default: the model's own depth.
        """
        return self.num_loops, self.num_loops

    def _unit_gates(self) -> None:
        """Return to ordinary LoRA at the model's own depth, run as outside of training."""
        if self._own_depth is not None:
            self.looped.config.num_loops, self._own_depth = self._own_depth, None
        self.loop_state.unit_gates()

    def train(self, *args, **kwargs):
        self.optimisations = self._find_optimisations()  # again: what is trained may have changed
        trained = super().train(*args, **kwargs)
        if self.state.global_step == 0:  # a stream, whose length nobody knew
            raise UserError("No step was taken: `train_dataset` has not a single batch.")
        return trained

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Keep the adapter's own card: TRL's knows neither its base model nor its rule."""
        if self.is_world_process_zero():
            save_card(self.model, self.args.output_dir, self.hub_model_id or self.args.hub_model_id)

    def create_optimizer(self, model=None):
        args = self.args
        if args.loraplus_lr_ratio is None or self.optimizer is not None:
            return super().create_optimizer(model)
        model = model or self.model
        optimizer_class, fields = self.get_optimizer_cls_and_kwargs(args, model)
        fields |= {"loraplus_lr_ratio": args.loraplus_lr_ratio, "loraplus_weight_decay": args.weight_decay}
        self.optimizer = create_loraplus_optimizer(model, optimizer_class, **fields)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None):
        is_given = self.lr_scheduler is not None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.args.warmup_from_first_step and not is_given:
            num_warmup = self.args.get_warmup_steps(num_training_steps)
            warm_up = lambda step, after: (step + 1) / num_warmup if step < num_warmup else after(step)
            lambdas = [functools.partial(warm_up, after=after) for after in scheduler.lr_lambdas]
            self.lr_scheduler = scheduler = LambdaLR(scheduler.optimizer, lambdas)
        return scheduler

    def _draw_gates(self, inputs: dict[str, Tensor], packed_ids: Tensor | None) -> None:
        if packed_ids is None:
            ids, segments = self.example_ids_of(inputs), None
        else:
            ids = packed_ids.tolist()
            segments = distributed.example_index(inputs["position_ids"], len(ids))  # [B, S]
        first_row = self._next_row()
        num_loops, loops_to_run = self.draw_depth(self.gate_seed)
        draw = self._draw([(first_row + row, segment) for row, segment in ids], num_loops)
        self._drawn = self.rule.sample(draw).requires_grad_(self.rule.wants_sensitivity)  # [K, N] or [K, N, M]
        states = draw if self.redraws_states else None
        self.loop_state.apply(GatedBatch(self._drawn, segments, self.rule.seeds(draw), states, self.optimisations))
        if loops_to_run != self.num_loops:  # until the training step has ended
            self._own_depth, self.looped.config.num_loops = self.num_loops, loops_to_run
        self._log_gates(self._drawn.detach())

    redraws_states = True
    """Whether models that start from a random state draw it anew in each step, as the reference does with the policy."""

    @property
    def gate_seed(self) -> int:
        """Seed of all draws of gates and depths."""
        return self.args.seed if self.args.gate_seed is None else self.args.gate_seed

    @property
    def gate_step(self) -> int:
        """Optimizer step that gates are drawn for."""
        return self.state.global_step

    def _draw(self, example_ids: list[ExampleId], num_loops: int) -> Draw:
        return Draw(
            seed=self.gate_seed,
            step=self.gate_step,
            num_steps=self.state.max_steps,
            example_ids=example_ids,
            num_loops=num_loops,
            num_modules=len(self.physical_layers),
            layers=self.physical_layers,
            pass_index=self._pass_index,
        )

    def _find_optimisations(self) -> Optimisations:
        """Return how micro-batches may run in training, and say so if they cannot run as they were asked to."""
        args = self.args
        packs = args.remove_padding and not args.torch_compile and self.looped.can_pack
        if not packs or not args.skip_frozen_loops:
            return Optimisations(packs)
        may_skip = distributed.may_skip_loops(self.accelerator, args)
        parameters = trained_lora_parameters(self.model) if may_skip else None
        if parameters is None:
            logger.warning_once(
                "`skip_frozen_loops` is off: it needs a single process or DDP, and an adapter without dropout as all that is "
                "trained."
            )
        return Optimisations(packs, parameters)

    def _compile_layers(self) -> None:
        """Compile what is to be compiled, and say which optimisations are in use."""
        args, looped, allowed = self.args, self.looped, self.optimisations
        unsharded = distributed.has_unsharded_weights(self.accelerator)
        used = {
            "remove_padding": allowed.packs,
            "skip_frozen_loops": allowed.lora_parameters is not None,
            "fused_lora": args.fused_lora and unsharded and looped.can_pack,
            "compile_layers": args.compile_layers and allowed.packs and unsharded and looped.compile_layers(),
        }
        if args.compile_layers and not used["compile_layers"]:
            logger.warning(
                "`compile_layers` is off: it needs `remove_padding`, a single process or DDP, a model of this package, and no "
                "`torch_compile`."
            )
        logger.info(f"Optimisations in use: {', '.join(name for name, is_used in used.items() if is_used) or 'none'}.")

    def _next_row(self) -> int:
        """Return the index of this micro-batch's first row in the optimizer step's global batch."""
        world, micro_batch = self.accelerator.num_processes, self.step_callback.micro_batch
        rows = self._train_batch_size // (world if self.accelerator.split_batches else 1)
        self.step_callback.micro_batch += self._pass_index == self.rule.passes - 1
        # Accelerate deals micro-batches to the processes in turn, so that the order of examples is the same for
        # every layout: here it is counted in rows.
        return (micro_batch * world + self.accelerator.process_index) * rows

    def _log_gates(self, gates: Tensor) -> None:
        active = (gates != 0).float().flatten(1).mean(dim=1)  # [K]
        means = torch.stack([gates.mean(), *active]).to(self.accelerator.device)
        names = ["gate_mean", *(f"active_loop_{loop}" for loop in range(1, len(means)))]
        for name, mean in zip(names, self.accelerator.reduce(means, "mean").tolist(), strict=True):
            self._metrics["train"][name].append(mean)


class StepCallback(TrainerCallback):
    """Counts within and between training steps, and tells the rule how sensitive the loss was to its gates.

    Attributes:
        micro_batch: micro-batches of the running optimizer step that have drawn their gates.
        losses: of the running step, by micro-batch.
        train_seconds: wall time spent in training steps so far, evaluation and saving left out.
        sensitivity: sum over the running step's examples of |d loss / d g|, by loop, [K].
    """

    micro_batch = 0
    train_seconds = 0.0
    sensitivity: Tensor | float = 0.0
    _step_began = 0.0

    def __init__(self, trainer: GateSamplingMixin) -> None:
        self.trainer = trainer
        self.losses: list[Tensor] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.micro_batch, self.losses = 0, []
        self._step_began = time.perf_counter()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        # A parameter that the step did not use gets a gradient of zero instead of None, so that momentum moves it as in
        # distributed runs, where every parameter has a gradient.
        if self.trainer.accelerator.distributed_type != DistributedType.NO:
            return
        for parameter in self.trainer.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def on_step_end(self, args, state, control, **kwargs):
        self.train_seconds += time.perf_counter() - self._step_began
        rule, accelerator = self.trainer.rule, self.trainer.accelerator
        if rule.wants_sensitivity:
            rule.observe(accelerator.reduce(self.sensitivity.to(accelerator.device), "sum").cpu())
            self.sensitivity = 0.0
