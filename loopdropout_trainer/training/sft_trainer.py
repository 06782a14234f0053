"""`LoopDropoutSFTTrainer`: TRL's `SFTTrainer` with a gate on every application of the adapter."""

from __future__ import annotations

import functools
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging
from trl import SFTTrainer

from loopdropout_trainer.data.boundary import tokenise
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.training.checkpoints import CheckpointsMixin
from loopdropout_trainer.training.config import LoopDropoutConfig
from loopdropout_trainer.training.depth import score_loops, step_uniforms
from loopdropout_trainer.training.distributed import EveryExampleOnceMixin
from loopdropout_trainer.training.gate_sampling import GateSamplingMixin
from loopdropout_trainer.training.preflight import check_labels
from loopdropout_trainer.training.scores import LiveDiagnosticsCallback


logger = logging.get_logger(__name__)


class LoopDropoutSFTTrainer(CheckpointsMixin, EveryExampleOnceMixin, GateSamplingMixin, SFTTrainer):
    """Supervised fine-tuning of a looped language model with a gate on every application of its LoRA adapter.

    Takes what `SFTTrainer` takes. In each training micro-batch it draws gates [K, B] by the rule of its config, applies
    them to the adapter, and trains on the final loop's loss (Algorithm 1), or as its `depth_sampling` and `loop_loss` say;
    evaluation, generation and saved models use unit gates: ordinary LoRA.

    Args:
        model: looped model, PEFT model over one, or the name or path of one.
        args: `LoopDropoutConfig`; a plain `SFTConfig` gets the paper's default rule.
        peft_config: LoRA adapter; default: the paper's (`default_peft_config`).
        others: all other arguments of `SFTTrainer`, under its names or in its order.

    Raises:
        NotLoopedError: for a model without loops.
        ValueError: for an adapter or a rule that cannot be trained so; before weights are loaded if `model` is a name.
    """

    _tag_names = ["trl", "sft", "loop-dropout"]
    args_class = LoopDropoutConfig

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        if self.padding_free:
            self.data_collator = functools.partial(_collate_with_example_ids, self.data_collator)
        args, looped = self.args, self.looped
        self.depth_sampler, self.loop_loss = args.make_depth_sampler(), args.make_loop_loss()
        self._draws_depth = args.depth_sampling != "fixed" or args.loop_loss == "random"
        if looped.trains_at_one_depth and (self._draws_depth or self.loop_loss.scores_all):
            raise UserError(
                f"{type(looped).__name__} trains at the depth that it was built for and on its final loop: leave "
                "`depth_sampling` at 'fixed' and `loop_loss` at 'final'."
            )
        if args.ddp_static_graph and self._draws_depth:
            raise UserError(
                "`ddp_static_graph` needs the same graph in every step, and the depth is drawn: leave it out."
            )
        if self.loop_loss.scores_all and self.compute_loss_func is not None:
            raise UserError(
                f"`compute_loss_func` is given one loop's logits: leave it out with `loop_loss: {args.loop_loss}`."
            )
        self.loop_loss.check_model(looped)
        if self.loop_loss.scores_all or args.remove_padding:
            score_loops(looped, self.loop_loss)
        if args.live_diagnostics_steps:
            self.add_callback(LiveDiagnosticsCallback(self))

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device):
        num_items = super()._get_num_items_in_batch(batch_samples, device)
        if self.args.loss_average == "micro_batches" and num_items is not None:
            trained = torch.tensor(sum(self.evaluated_weight(batch) > 0 for batch in batch_samples), device=device)
            is_shared = self.args.average_tokens_across_devices
            self._num_micro_batches = int(self.accelerator.gather(trained).sum() if is_shared else trained)
        return num_items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Let TRL divide a micro-batch's sum by the number that makes it its share of the step's loss (`loss_average`)."""
        if self.args.loss_average == "micro_batches" and model.training and num_items_in_batch is not None:
            num_items_in_batch = self.evaluated_weight(inputs) * self._num_micro_batches
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    def draw_depth(self, seed: int) -> tuple[int, int]:
        if not self._draws_depth:
            return super().draw_depth(seed)
        step = self.state.global_step
        num_loops = self.depth_sampler.sample(step_uniforms(seed, "depth", step), self.num_loops)
        loops_to_run = self.loop_loss.loops_to_run(step_uniforms(seed, "loop loss", step), num_loops)
        self._metrics["train"]["depth"].append(float(loops_to_run))
        return num_loops, loops_to_run

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        if formatting_func is None and isinstance(processing_class, PreTrainedTokenizerBase):
            dataset = _with_boundaries(dataset, processing_class, self.completion_only_loss)
        rows = super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        check_labels(rows, f"`{dataset_name}_dataset`")
        if isinstance(rows, Dataset) and args.max_length is not None:
            _warn_of_cut_rows(dataset, rows, dataset_name, args.max_length, self._tokenizer.eos_token_id)
        return rows

    @staticmethod
    def dataset_formats(args: LoopDropoutConfig) -> list[set[str]]:
        return [{args.dataset_text_field}, {"prompt", "completion"}, {"messages"}, {"conversations"}, {"input_ids"}]


def _warn_of_cut_rows(before: Dataset, rows: Dataset, name: str, max_length: int, end: int) -> None:
    """Say how many rows TRL has cut at `max_length`, so that they have lost their end token or all that is trained on.

    Args:
        before, rows: the dataset as it was given and as it was prepared, packed or not.
        end: id of the end token.
    """
    is_packed = "seq_lengths" in rows.column_names
    parts = rows["seq_lengths"] if is_packed else ([len(ids)] for ids in rows["input_ids"])
    # A template may write something after the end of the last turn, such as a new line.
    pairs = zip(rows["input_ids"], parts, strict=True)
    cut = sum(lengths == [max_length] and end not in ids[-3:] for ids, lengths in pairs)
    gone = 0 if is_packed else len(before) - len(rows)
    if cut or gone:
        logger.warning(
            f"Of {len(before):,} rows of `{name}_dataset`, {cut:,} are cut at `max_length`, {max_length:,}, and lose their "
            f"end token, so that they do not teach when to stop; {gone:,} are left out, as no target is left of them."
        )


def _collate_with_example_ids(collate, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate, and note which row (and which of the examples packed in it) each part of the flattened row comes from."""
    batch = collate(examples)
    batch["example_ids"] = torch.tensor(
        [(row, part) for row, example in enumerate(examples) for part in range(len(example.get("seq_lengths") or [0]))]
    )
    return batch


def _with_boundaries(dataset: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, completion_only: bool):
    """Tokenise a dataset of prompt and completion texts so that no token is part of both; TRL does the rest."""
    first = next(iter(dataset), {})
    if "input_ids" in first or not all(isinstance(first.get(name), str) for name in ("prompt", "completion")):
        return dataset
    options = {"tokenizer": tokenizer, "completion_only_loss": completion_only}
    return dataset.map(tokenise, batched=True, fn_kwargs=options)
