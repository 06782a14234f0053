"""The method on one page: gates are drawn in `compute_loss`, multiply the adapter's update, and are one everywhere else."""

from __future__ import annotations

import copy
import functools
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging
from trl import SFTTrainer

from loopdropout_trainer.files import lock_folder
from loopdropout_trainer.gate_state import GatedBatch, find_examples
from loopdropout_trainer.gate_values import as_gate_matrix
from loopdropout_trainer.gates import Draw
from loopdropout_trainer.means import find_fault
from loopdropout_trainer.renames import hide_library_warnings
from loopdropout_trainer.results.training_results import saved_step
from loopdropout_trainer.saving.checkpoints import Checkpoint, number_training
from loopdropout_trainer.saving.saved_adapter import check_adapter_folder
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.training.argument_checks import hint_at_arguments
from loopdropout_trainer.training.batches import (
    collate_with_example_ids,
    has_targets,
    reads_padding,
    score_targets_only,
)
from loopdropout_trainer.training.config import LoopDropoutConfig
from loopdropout_trainer.training.distributed import EveryExampleOnceMixin
from loopdropout_trainer.training.evaluation_fields import packs_evaluation
from loopdropout_trainer.training.example_counts import check_lengths, describe_repeated, warn_of_cut
from loopdropout_trainer.training.examples import check_train_dataset, hide_length_warnings, name_datasets, read_first
from loopdropout_trainer.training.resuming import describe_resuming, describe_training_data, find_resumable
from loopdropout_trainer.training.setup import AdapterTrainingMixin, with_gates
from loopdropout_trainer.training.start import describe_what_trains, find_start, log_start
from loopdropout_trainer.training.stopping import (
    TrainingInterrupted,
    check_metric,
    closing_bars,
    ended_early,
    explain_metrics,
    explain_write_errors,
    warn_of_unsaved_best,
)


logger = logging.get_logger(__name__)


class GateSamplingMixin(AdapterTrainingMixin):
    """Gate sampling for a TRL trainer. `AdapterTrainingMixin` lists its attributes."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Draw the gates of a training micro-batch and compute the loss under them. In evaluation, gates are one."""
        if model.training and self.is_in_train:
            self._check_adapter()
        self._restore_head()
        inputs = dict(self.looped.complete_batch(inputs))
        if model.training:
            self.draw_gates(inputs)
        else:
            self._forget_drawn_gates()
        inputs.pop("example_ids", None)
        with ExitStack() as stack:
            stack.enter_context(self._mark_loss())
            if self._hides_outputs(model, return_outputs):
                stack.enter_context(self.skip_unread_tokens(inputs))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    def _hides_outputs(self, model: nn.Module, return_outputs: bool) -> bool:
        """Return whether only TRL's own loss reads the outputs of a training micro-batch, and may do without padding."""
        if not model.training or not self._batch_options.remove_padding:
            return False
        is_own_loss = self.compute_loss_func is None and type(self.label_smoother) in (type(None), LabelSmoother)
        return is_own_loss and not return_outputs

    @contextmanager
    def _mark_loss(self) -> Iterator[None]:
        """Let the passes of a loss run under drawn gates, also those without gradient, such as a reference's."""
        before, self.gate_state.computes_loss = self.gate_state.computes_loss, True
        try:
            yield
        finally:
            self.gate_state.computes_loss = before

    @contextmanager
    def skip_unread_tokens(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Leave out the padding of a micro-batch inside the model, unless the loss reads it."""
        self.gate_state.ignores_padding = not reads_padding(inputs)
        try:
            yield
        finally:
            self.gate_state.ignores_padding = False

    def draw_gates(self, inputs: dict[str, Any]) -> None:
        """Draw the gates of a micro-batch and set them. In `train()`, they stay until its backward pass is done.

        `compute_loss` calls it. Call it yourself in a `compute_loss` that does not call `super().compute_loss`. In the passes
        of an evaluation, which are those without gradient of a model in evaluation mode, it draws nothing, and gates are one.
        To look at gates, use `sample_gates`, which does not set them. For inference under chosen gates, use `use_gates`.
        Outside of `train()`, the gates stay until `trainer.gate_state.reset()`, and inference under them raises an error.

        Args:
            inputs: Inputs of the model. `example_ids` is removed from them, which the model does not take.
        """
        if self.gate_state.rule is not self.rule:  # another trainer of this model has put its gates on it
            self._prepare_gates()
        if self.model.training or torch.is_grad_enabled():
            if self.is_in_train:
                self._check_unchanged()
            self.last_gates = self.sample_gates(inputs)
            self.num_trained = 0
            if has_targets(inputs):
                ids, _ = self.example_ids(inputs)
                self.num_trained = len(ids)
            self.gate_state.set(self.last_gates)
        else:
            self._forget_drawn_gates()
        inputs.pop("example_ids", None)

    def sample_gates(self, inputs: dict[str, Any]) -> GatedBatch:
        """Return gates for the examples of a micro-batch.

        A draw is a pure function of the seed, the optimizer step, and the example's row in the step's global batch. It does
        not depend on the number of processes or on the split into micro-batches.
        """
        ids, token_examples = self.example_ids(inputs)  # N ids (row, segment), and [B, S] or None
        # The global batch of a step has its micro-batches one after the other, and in each of them the processes in order. So
        # the first row of this micro-batch there is the number of rows of the micro-batches and the processes before it.
        processes, process = self.accelerator.num_processes, self.accelerator.process_index
        first_row = (self._unit_gates.micro_batch * processes + process) * self.args.rows_per_process
        draw = Draw(
            seed=self.gate_seed,
            step=self.state.global_step,
            example_ids=[(first_row + row, segment) for row, segment in ids],
            num_loops=self.num_loops,
            num_steps=self.state.max_steps,
            num_modules=len(self.physical_layers),
            layers=self.physical_layers,
            draw_index=self.draw_index,
        )
        self.rule.check(draw.num_loops)  # the depth may have changed since the trainer was made, as by `use_depth`
        sampled = self.rule.sample(draw)
        name = f"Gates of the rule {self.rule.name!r}"
        gates = as_gate_matrix(sampled, draw.num_loops, draw.num_modules, len(ids), name)  # [K, N] or [K, N, M]
        if self.rule.wants_sensitivity:
            gates = gates.detach().requires_grad_()
        return GatedBatch(
            gates,
            token_examples,
            seeds=self.rule.seeds(draw),
            draw=draw if self._samples_start_states else None,
            options=self._batch_options,
            rule=self.rule,
            num_examples=len(ids),
        )

    def example_ids(self, inputs: dict[str, Any]) -> tuple[list[tuple[int, int]], Tensor | None]:
        """Return the ids of the examples of a micro-batch and the index of each token's example, as `find_examples` does."""
        return find_examples(inputs)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Return no batch after the last step. transformers takes one more if it resumes there."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    @hint_at_arguments
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train. Gates are one again after the training, also after an exception.

        `resume_from_checkpoint=True` continues from the newest complete checkpoint in `output_dir` with the settings and the
        adapter of this trainer, or starts if there is no checkpoint, unless this trainer has trained its model before. The
        data must be the data of the checkpoint.
        """
        self._check_surroundings()
        check_train_dataset(self.train_dataset)
        check_adapter_folder(self.args.output_dir, "Make a trainer with another `output_dir`.")
        check_metric(self)
        num_loops = self.num_loops
        self._prepare_gates()  # the adapter and the arguments may have changed since `__init__`
        self._forget_drawn_gates()  # GRPO generates before its first loss
        self._forget_other_optimizer()
        checkpoint = find_resumable(self, resume_from_checkpoint)
        self._identify_training(checkpoint)
        if self.is_world_process_zero():
            self._log_beginning(checkpoint)
        self.looped.trained_adapter, self.looped.loaded_adapter = self.model.active_adapters[0], None
        self.looped.trained_with = self.saved_settings()
        self.gate_state.must_draw = self.rule.draws_gates
        self.resumption.tokens_before = self.num_tokens
        folder = self.args.output_dir
        self._runs_train = True
        try:
            with ExitStack() as stack:
                stack.enter_context(hide_library_warnings())
                stack.enter_context(closing_bars(self, ends_training=True))
                stack.enter_context(hide_length_warnings(self.args))  # of streams, whose texts become tokens now
                stack.enter_context(explain_write_errors(folder))
                if self.args.should_save:
                    stack.enter_context(lock_folder(folder))
                stack.enter_context(self._record_stop())
                with ended_early(self, checkpoint), explain_metrics(self):
                    output = super().train(checkpoint, trial, ignore_keys_for_eval)
                self._report_early_stop(describe_resuming(self))  # now the state has the planned number of steps again
                self._stop_callback.raise_if_stopped(self.args, self.state, describe_resuming(self))
                warn_of_unsaved_best(self.args, self.state, self._line_title)
                self._check_fields()  # a callback may have changed a field after the last draw
                self._record_training()
                self._record_facts()
                self.looped.run_folder = folder
            return output._replace(training_loss=output.metrics["train_loss"])  # which `log` has set
        finally:
            self._runs_train = False
            self._stop_callback.restore_handlers()
            self.gate_state.must_draw = self.gate_state.has_warned = False
            self.gate_state.reset()
            self._unit_gates.micro_batch = 0
            self.looped.num_loops = num_loops

    def _identify_training(self, checkpoint: Checkpoint | None) -> None:
        """Set the number, the identifier and the start of a training."""
        self.resumption.training_number = number_training(self.args.output_dir, checkpoint)
        self.start = find_start(self.model, self.saved_facts["base_weights"], checkpoint)
        if checkpoint is None:
            self.training_id = uuid.uuid4().hex
        else:
            self.training_id = find_source(checkpoint).training_id

    def _log_beginning(self, checkpoint: Checkpoint | None) -> None:
        """Log what the training trains, what it starts from, and a rule whose gates have another mean than one."""
        if self.recipe is None:  # else the plan of a command has said it
            tqdm.write(describe_what_trains(self.model, self.saved_settings(), checkpoint is not None))
            for sentence in describe_repeated(self):
                logger.warning(sentence)
        log_start(self.model, self.start, checkpoint, self._keeps_optimizer())
        rows = self.args.rows_per_process
        self._rule_fault = find_fault(self.rule, self.num_loops, self.physical_layers, rows, self.gate_seed)
        if self._rule_fault is not None:
            logger.warning(self._rule_fault.warning)

    def _record_facts(self, **further: Any) -> None:
        """Record in the settings of the adapter how far it was trained, and on which data."""
        facts = {"step": saved_step(self), "training_data": describe_training_data(self), **further}
        self.looped.trained_with = {**self.looped.trained_with, **facts}

    @contextmanager
    def _record_stop(self) -> Iterator[None]:
        """Record the step at which an error, Ctrl-C or a callback's exception stops the training in this block."""
        before = self.state
        self._is_cut_off = False
        try:
            yield
        except BaseException as error:
            state = self.state
            if state is not before and state.global_step < state.max_steps:  # else it has not begun, or has ended
                self._is_cut_off = not isinstance(error, TrainingInterrupted)  # which comes after a regular end
                self._record_facts(stopped=f"at step {state.global_step:,} of {state.max_steps:,}")
            raise


class LoopDropoutSFTTrainer(EveryExampleOnceMixin, GateSamplingMixin, SFTTrainer):
    r"""Trainer for supervised fine-tuning of a looped language model with Loop Dropout.

    A looped model runs one block of layers K times, h_t = F(h_{t-1}; W). LoRA adds one update to its weights for all loops.
    Loop Dropout gives each example b and loop t a gate, which multiplies that update (Eq. 3 and Algorithm 1 of the paper):

        for each training example (x, y) of the micro-batch:                   # compute_loss
            h_0 = Embed(x)
            for t = 1, ..., K:
                b_t ~ Bernoulli(q);  g_t = b_t / q                             # sample_gates, q = 1 - p
                h_t = F(h_{t-1}; W + g_t Delta)                                # the same gate for all modules and tokens
            loss = CE(Head(h_K), y)
        update the LoRA factors with the mean loss
        inference: g_t = 1 in every loop                                       # UnitGatesCallback

    The gates outlive `compute_loss`, because gradient checkpointing recomputes the forward pass under them in the backward
    pass. `UnitGatesCallback` sets them to one after each backward pass. So evaluation, generation and saved models are
    ordinary LoRA. The other rules (`args.rule`) draw other gates at the same place.

    It takes the arguments of [`~trl.SFTTrainer`] in the same order. The differences are:

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Looped model, PEFT model over a looped model, or the name of a looped model.
        args ([`LoopDropoutConfig`], *optional*):
            Configuration. A [`~trl.SFTConfig`] gets the fields of the method, with p = 0.5, and keeps its own values, also
            TRL's default learning rate of 2e-5. The default of [`LoopDropoutConfig`] is 1e-4.
        peft_config ([`~peft.LoraConfig`], *optional*):
            Configuration of the adapter. Defaults to the paper's adapter: rank 16 and alpha 32 on all linear projections of
            the recurrent block.

    Attributes:
        last_gates (`GatedBatch`, *optional*):
            Gates [K, N] of the last training micro-batch (`last_gates.sampled`). `print(trainer.last_gates)` lists the loops
            in which each of its N examples was on. It is None before the first training step.
    """

    config_class = LoopDropoutConfig
    objective = "SFT"
    if not TYPE_CHECKING:  # type checkers see the same signature in SFTTrainer
        __init__ = with_gates(SFTTrainer.__init__)

    def formats(self, args: LoopDropoutConfig) -> Collection[Sequence[str]]:
        return ("prompt", "completion"), ("messages",), (args.dataset_text_field,)

    def _before_init(self, arguments: dict[str, Any]) -> None:
        super()._before_init(arguments)
        self._assistant_only_loss = arguments["args"].assistant_only_loss
        examples = [read_first(dataset) for _, dataset in name_datasets(arguments) if dataset is not None]
        if all(example is not None and "labels" in example for example in examples):
            # Labels decide the loss, and TRL refuses the field without turns.
            arguments["args"].assistant_only_loss = False

    def _after_init(self) -> None:
        super()._after_init()
        self.args.assistant_only_loss = self._assistant_only_loss
        if self.padding_free:
            self.data_collator = functools.partial(collate_with_example_ids, self.data_collator)
        check_lengths(self)
        if self.looped.reads_prompts:
            self._check_prompts()

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        """Prepare examples as TRL does, but packed rows only once. TRL would pack them again and lose where examples begin."""
        if "seq_lengths" not in (dataset.column_names or ()):
            if isinstance(dataset, Dataset) and args.max_length is not None:
                # TRL makes tokens and cuts them in one call. The examples that it cuts are counted between the two.
                whole = copy.copy(args)
                whole.max_length, whole.shuffle_dataset = None, False
                dataset = super()._prepare_dataset(
                    dataset, processing_class, whole, False, formatting_func, dataset_name
                )
                warn_of_cut(dataset, args, packing, dataset_name)
                formatting_func = None  # which has made the texts already
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        if args.shuffle_dataset:
            return dataset.shuffle(seed=args.seed)
        return dataset

    def _prepare_rows(self, dataset, name, keeps_order):
        args = self.args
        packing = packs_evaluation(args)
        if keeps_order:
            packing = False
            args = copy.copy(args)
            args.shuffle_dataset = False
        return self._prepare_dataset(dataset, self.processing_class, args, packing, self.formatting_func, name)

    def _check_prompts(self) -> None:
        """Raise UserError, before the training, if the model cannot mark the prompt of an example. Streams are not read."""
        datasets = [self.train_dataset]
        if self.args.eval_strategy != "no":
            if isinstance(self.eval_dataset, dict):
                datasets += self.eval_dataset.values()
            else:
                datasets.append(self.eval_dataset)
        for dataset in datasets:
            if not isinstance(dataset, Dataset):
                continue
            for start in range(0, len(dataset), 64):
                rows = dataset.select(range(start, min(start + 64, len(dataset))))
                self.looped.complete_batch(self.data_collator(list(rows)))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.args.loss_average == "micro_batches" and model.training and num_items_in_batch is not None:
            # TRL divides a micro-batch's sum by this number, which makes the loss its share of the step's loss.
            num_items_in_batch = self._count_targets(inputs) * self._num_micro_batches
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @contextmanager
    def skip_unread_tokens(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Also score only the targets in TRL's fused head, which scores all tokens on other devices than GPUs."""
        with ExitStack() as stack:
            stack.enter_context(super().skip_unread_tokens(inputs))
            if self.label_smoother is None and not inputs["labels"].is_cuda:
                stack.enter_context(score_targets_only(self.looped.base_model, inputs))
            yield

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Also count the micro-batches of the step that have a target, over all processes."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.args.loss_average == "micro_batches" and num_items is not None:
            num_trained = torch.tensor(sum(self._count_targets(batch) > 0 for batch in batches), device=device)
            if self.args.average_tokens_across_devices:
                num_trained = self.accelerator.gather(num_trained).sum()
            self._num_micro_batches = int(num_trained)
        return batches, num_items
