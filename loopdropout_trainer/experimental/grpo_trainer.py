"""`LoopDropoutGRPOTrainer`: TRL's `GRPOTrainer` with a gate on every application of the adapter."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.experimental.grpo_config import LoopDropoutGRPOConfig
from loopdropout_trainer.gates.streams import ExampleId, Streams
from loopdropout_trainer.generation.decoding import Sampler, why_unsupported
from loopdropout_trainer.generation.generation import sample_completions
from loopdropout_trainer.looped import GatedBatch
from loopdropout_trainer.record.identity import Identity
from loopdropout_trainer.training.checkpoints import CheckpointsMixin
from loopdropout_trainer.training.depth import score_loops
from loopdropout_trainer.training.distributed import shards_weights
from loopdropout_trainer.training.gate_sampling import GateSamplingMixin


logger = logging.get_logger(__name__)


class LoopDropoutGRPOTrainer(CheckpointsMixin, GateSamplingMixin, GRPOTrainer):
    """Reinforcement learning of a looped language model with a gate on every application of its LoRA adapter.

    Takes what `GRPOTrainer` takes. Completions are sampled at unit gates, as the trained model will be used, by continuous
    batching. Their log-probabilities are computed under gates, which are drawn when they are sampled and kept as long as
    they are trained on. docs/reinforcement.md says what that does to the importance ratio.

    Args:
        reward_funcs: as for `GRPOTrainer`; `loopdropout_trainer.experimental.rewards` has some.
        args: `LoopDropoutGRPOConfig`; a plain `GRPOConfig` gets the paper's default rule.
        others: as for `LoopDropoutSFTTrainer`, which raises the same errors; or under `GRPOTrainer`'s names or in its order.
    """

    _tag_names = ["trl", "grpo", "loop-dropout"]
    args_class = LoopDropoutGRPOConfig

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self._check_model()
        loop_loss = self.args.make_loop_loss()
        loop_loss.check_model(self.looped)
        if loop_loss.scores_all:
            score_loops(self.looped, loop_loss)
        self._scores_new = False  # whether new completions are being scored, before any step is taken on them
        self._decoding = self._choose_decoding()
        self._eval_batch = 0

    def _check_model(self) -> None:
        """Refuse a model or rule whose old, new and reference log-probabilities could not be compared."""
        looped = self.looped
        args = self.args
        rule = self.rule
        name = type(looped).__name__
        for refused, reason in (
            (getattr(looped.config, "prefix_lm", False),
             f"{name} reads its prompts in both directions (`prefix_lm`), which GRPO's scores of completions do not: use "
             "SFT or DPO."),
            (looped.trains_at_one_depth and args.loop_loss != "final",
             f"{name} trains on its final loop: leave `loop_loss` at 'final'."),
            (args.scores_old and args.old_gates == "same" and (rule.passes > 1 or rule.wants_sensitivity),
             f"The rule {rule.name!r} changes a completion's gates while it is trained on, so that none are those of its old "
             "log-probabilities: set `old_gates: unit`, or generate anew for each optimizer step (`num_iterations: 1`, and "
             "`steps_per_generation` as `gradient_accumulation_steps`)."),
            ("ref" in self.model.peft_config and args.reference_gates == "same" and rule.adapter != "gated",
             f"The rule {rule.name!r} has an adapter of its own kind, whose frozen copy takes no gates: set "
             "`reference_gates: unit`."),
        ):  # fmt: skip
            if refused:
                raise UserError(reason)

    def _choose_decoding(self) -> str:
        """Return the form of decoding that is used without vLLM, and say why if it is not the one that was asked for."""
        args = self.args
        needs_generate = bool(args.generation_kwargs) or args.repetition_penalty != 1
        reason = (
            why_unsupported(self.looped)
            or (shards_weights(args) and "ZeRO-3 and FSDP shard the weights")
            or (needs_generate and "`repetition_penalty` and `generation_kwargs` are its own")
        )
        if reason and not args.use_vllm and args.completion_decoding != "generate":
            logger.warning(f"Completions are decoded by transformers' `generate`: {reason} (`completion_decoding`).")
        return "generate" if reason else args.completion_decoding

    @staticmethod
    def dataset_formats(args: LoopDropoutGRPOConfig) -> list[set[str]]:
        return [{"prompt"}]

    # Completions

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        mode = "train" if self.model.training else "eval"
        began = time.perf_counter()
        if self.use_vllm or self._decoding == "generate":
            completions, log_probs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        else:
            completions = self._sample(prompt_ids, mode)
            log_probs = None
        seconds = time.perf_counter() - began
        tokens = sum(map(len, completions))
        self._metrics[mode]["completions/tokens_per_second"].append(tokens / seconds)  # of this process
        return completions, log_probs

    def _sample(self, prompt_ids: list[list[int]], mode: str) -> list[list[int]]:
        """Sample a completion of each prompt at unit gates; neither the number of processes nor a resume changes the draws."""
        length = self.max_completion_length
        generation = self._round if mode == "train" else self._eval_batch
        self._eval_batch += mode == "eval"
        cut = (self.temperature, self.top_k, self.top_p, self.min_p)
        rows = [(row, 0) for row in self._new_rows(len(prompt_ids)).tolist()]
        uniforms = Streams(self.args.seed, generation, rows).uniforms(f"completions, {mode}", length)
        sampler = Sampler(uniforms, *cut)
        slots = self.args.completion_slots or len(prompt_ids)
        model = self.accelerator.unwrap_model(self.model)
        compiled = self._decoding == "compiled"
        return sample_completions(model, prompt_ids, sampler, length, self.eos_token_ids, slots, compiled)

    def evaluation_loop(self, *args, **kwargs):
        self._eval_batch = 0  # every evaluation samples with the same random numbers
        return super().evaluation_loop(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._scores_new = True
        try:
            batch = super()._generate_and_score_completions(inputs)
            if self.args.old_gates == "unit" and not self.args.scores_old:  # TRL takes the current ones: gated
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
                mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
                length = batch["completion_ids"].shape[1]
                size = self.args.per_device_train_batch_size
                with torch.no_grad():
                    old, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, length, size)
                batch["old_per_token_logps"] = old
        finally:
            self._scores_new = False
            self._unit_gates()
        return {**batch, "rows": self._new_rows(len(batch["prompt_ids"]))}

    def _new_rows(self, rows: int) -> Tensor:
        """Return the indices of this process's completions in the generation batch of all processes, [rows]."""
        first = self.accelerator.process_index * rows
        return torch.arange(first, first + rows, device=self.accelerator.device)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kw
    ):
        """Score new completions, for the old policy and the reference, as the step that trains on them will.

        That is with the same gates, unless unit gates are asked for, and the same random start states; both depend on the row.
        """
        score = super()._get_per_token_logps_and_entropies
        if not self._scores_new:
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size, **kw)
        is_reference = "ref" in self.accelerator.unwrap_model(self.model).active_adapters
        gated = (self.args.reference_gates if is_reference else self.args.old_gates) == "same"
        ids = self.example_ids_of({"rows": self._new_rows(len(input_ids))})
        parts = []
        size = batch_size or len(input_ids)
        for first in range(0, len(input_ids), size):
            rows = slice(first, first + size)
            draw = self._draw(ids[rows], self.num_loops)
            gates, seeds = (self.rule.sample(draw), self.rule.seeds(draw)) if gated else (None, None)
            self.loop_state.apply(GatedBatch(gates, None, seeds, draw, self.optimisations))
            parts.append(score(model, input_ids[rows], attention_mask[rows], logits_to_keep, **kw))
        self._unit_gates()
        return tuple(None if tensors[0] is None else torch.cat(tensors) for tensors in zip(*parts, strict=True))

    # Gates

    @property
    def _round(self) -> int:
        """Index of the current generation batch."""
        return self._step // self.args.generates_every

    @property
    def gate_step(self) -> int:
        """Optimizer step in which the completions that are trained on were sampled: they keep their gates."""
        return self._round * self.args.generates_every // self.args.gradient_accumulation_steps

    def _next_row(self) -> int:
        return 0  # `rows` are counted in the whole generation batch

    def example_ids_of(self, inputs: dict[str, Tensor]) -> list[ExampleId]:
        """Return the ids of completions, or of their prompts' groups, counted over the whole run."""
        group = self.num_generations if self.args.gates_per == "prompt" else 1
        first = self._round * self.args.generation_batch_size
        return [((first + row) // group * group, 0) for row in inputs["rows"].tolist()]

    # Loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.model.training:
            tokens = inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
            self._total_train_tokens += int(self.accelerator.reduce(tokens.to(self.accelerator.device), "sum"))
        return super().compute_loss(model, inputs, *args, **kwargs)

    # Rules with several passes over a micro-batch

    def _run_pass(self, *args) -> Tensor:
        step = self._step
        loss = super()._run_pass(*args)
        if self._pass_index < self.rule.passes - 1:
            self._step = step  # TRL counts micro-batches
        return loss

    def _prepare_inputs(self, generation_batch):
        if self._is_in_step and self._pass_index > 0:
            return self._with_gates(self._buffered_inputs[self._step % self.args.steps_per_generation])
        return super()._prepare_inputs(generation_batch)

    # Resuming

    @functools.cached_property
    def run_identity(self) -> Identity:
        identity = super().run_identity
        identity["settings"]["reward_funcs"] = list(self.reward_func_names)
        return identity

    def _get_train_sampler(self, *args, **kwargs):
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, RepeatSampler) and sampler.shuffle and sampler.seed is not None:
            # TRL draws the order of each epoch from one generator, which a resumed run would start at the first epoch again.
            def restart_at_epoch(epoch: int) -> None:
                sampler.generator.manual_seed(sampler.seed)
                for _ in range(epoch):
                    torch.randperm(sampler.num_samples, generator=sampler.generator)

            sampler.set_epoch = restart_at_epoch
        return sampler

    def _completions_file(self, folder: str | Path) -> Path:
        place = f"{self.accelerator.process_index}_of_{self.accelerator.num_processes}"
        return Path(folder) / f"completions_{place}.safetensors"

    def _save_rng_state(self, output_dir: str) -> None:
        """Also write the micro-batches so far, and the completions that are still to be trained on, if there are any."""
        super()._save_rng_state(output_dir)
        is_in_use = self._step % self.args.generates_every != 0
        tensors = {
            f"{index}.{name}": tensor.contiguous().clone()
            for index, batch in enumerate(self._buffered_inputs if is_in_use else ())
            for name, tensor in batch.items()
            if torch.is_tensor(tensor)
        }
        save_file(tensors, self._completions_file(output_dir), {"micro_batches": str(self._step)})

    def _init_training_state(self, max_steps, steps_per_epoch, num_train_epochs, checkpoint, trial):
        place = super()._init_training_state(max_steps, steps_per_epoch, num_train_epochs, checkpoint, trial)
        self._step = 0
        self._buffered_inputs = None
        if checkpoint is None:
            return place
        file = self._completions_file(checkpoint)
        if not file.is_file():  # also with another number of processes
            logger.warning(f"There is no {file}: completions in use are generated again, by the checkpoint's weights.")
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
            return place
        with safe_open(file, "pt", device=str(self.accelerator.device)) as saved:
            self._step = int(saved.metadata()["micro_batches"])
            batches = defaultdict(dict)
            for key in saved.keys():  # noqa: SIM118 - not a dictionary
                index, name = key.split(".", 1)
                batches[int(index)][name] = saved.get_tensor(key)
        self._buffered_inputs = [batches[index] for index in sorted(batches)] or None
        return place
