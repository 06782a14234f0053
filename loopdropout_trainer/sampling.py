"""Gate sampling for any TRL trainer: every training micro-batch gets its gates, everything else gets unit gates."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)

from loopdropout_trainer.adapters import adapted_layers, add_gates, check_adapter, check_peft_config
from loopdropout_trainer.callbacks import UnitGatesCallback
from loopdropout_trainer.config import GateArguments
from loopdropout_trainer.gates import Draw
from loopdropout_trainer.gates.streams import Place
from loopdropout_trainer.layouts import (
    check_arguments,
    check_packed_batch,
    check_processes,
    check_quantised_base,
    float32_adapter,
    non_reentrant_checkpointing,
)
from loopdropout_trainer.looped import NotLoopedError, check_num_loops, find_looped_model


def default_peft_config(model: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> LoraConfig:
    """Return the paper's adapter: rank 16, alpha 32, on all linear projections of the recurrent block.

    Args:
        model: looped model, or its config (nothing is loaded then).
        overrides: other fields of `LoraConfig`, or other values for these.
    """
    if isinstance(model, PreTrainedConfig):
        with torch.device("meta"):  # by its class: `from_config` would let ZeRO-3 divide the meta tensors
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(model)](model)
    fields = {"r": 16, "lora_alpha": 32, "task_type": "CAUSAL_LM"}
    fields["target_modules"] = find_looped_model(model).recurrent_linears()
    return LoraConfig(**{**fields, **overrides})


class GateSamplingMixin:
    """Draws gates [K, N] in each training micro-batch of the TRL trainer that it stands before in the list of bases.

    The trainer keeps its own loss. All forward passes of one micro-batch see the same gates, and so does the backward
    pass; evaluation, generation and saving see unit gates. A subclass names its arguments class in `args_class` and the
    columns of its data in `dataset_formats`, and overrides `places_of` if the rows of its batches are not its examples.

    Raises:
        NotLoopedError: for a model without loops.
        ValueError: for an adapter, a rule or a launch that cannot be trained so; before weights are loaded if `model` is a
            name.
    """

    args_class: type[GateArguments]

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        call = inspect.signature(super().__init__).bind(*positional, **keywords)
        given = call.arguments
        model, peft_config = given["model"], given.get("peft_config")
        args = self.args_class.from_arguments(given.get("args"), _output_dir(model))
        config = _looped_config(model, args)
        self.rule = args.make_rule()
        self.rule.check(config.num_loops)
        check_arguments(args)
        if not given.get("formatting_func"):
            check_dataset(given.get("train_dataset"), self.dataset_formats(args))
        given["args"] = args
        given["peft_config"] = _checked_adapter(model, peft_config, config)
        before = _trained_weights(model) if isinstance(model, PeftModel) else {}

        super().__init__(*call.args, **call.kwargs)

        check_processes(self.accelerator)
        non_reentrant_checkpointing(self.args)
        float32_adapter(self.model, before)
        self.loop_state = add_gates(self.model, in_activation_dtype=True)
        self.num_modules = len(adapted_layers(self.model))
        self.unit_gates_callback = UnitGatesCallback(self.loop_state)
        self.add_callback(self.unit_gates_callback)
        self._logged = (0, 0.0)  # tokens and seconds at the last log

    @property
    def num_loops(self) -> int:
        """Recurrence depth K of the model."""
        return find_looped_model(self.model).config.num_loops

    @staticmethod
    def dataset_formats(args: TrainingArguments) -> list[set[str]]:
        """Return the sets of columns of which a training dataset must have one."""
        raise NotImplementedError

    def places_of(self, inputs: dict[str, torch.Tensor]) -> list[Place]:
        """Return (row, segment) of each example of a micro-batch; rows are counted from the micro-batch's first.

        What has the same place has the same gates.
        """
        return [(row, 0) for row in range(len(inputs["input_ids"]))]

    def compute_loss(self, model, inputs, *args, **kwargs):
        """Draw this micro-batch's gates in training, and leave the rest to TRL."""
        packed_places = inputs.pop("gate_places", None)
        if self.model.training:
            check_packed_batch(inputs, packed_places)
            check_quantised_base(self.model, self.accelerator)
            self._draw_gates(inputs, packed_places)
        else:
            self.loop_state.unit_gates()
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args, **kwargs):
        # The gates must outlive compute_loss, since checkpointing recomputes under them in the backward pass, and must
        # not outlive the step, not even when it is interrupted.
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self.loop_state.unit_gates()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            now = (self._total_train_tokens, self.unit_gates_callback.train_seconds)
            tokens, seconds = (new - old for new, old in zip(now, self._logged, strict=True))
            self._logged = now
            if tokens > 0 and seconds > 0:
                logs["tokens_per_second"] = round(tokens / seconds, 1)
        super().log(logs, start_time)

    def _draw_gates(self, inputs: dict[str, torch.Tensor], packed_places: torch.Tensor | None) -> None:
        segments = None
        if packed_places is None:
            places = self.places_of(inputs)
        else:
            places = packed_places.tolist()
            # Positions start again at 0 with each example of the row; padding after the last one counts as its part.
            segments = ((inputs["position_ids"] == 0).cumsum(-1) - 1).clamp(max=len(places) - 1)  # [B, S]
        first_row = self._next_row()
        draw = Draw(
            seed=self.args.seed if self.args.gate_seed is None else self.args.gate_seed,
            step=self.state.global_step,
            num_steps=self.state.max_steps,
            places=[(first_row + row, segment) for row, segment in places],
            num_loops=self.num_loops,
            num_modules=self.num_modules,
        )
        gates = self.rule.sample(draw)  # [K, N]
        self.loop_state.set_gates(gates, segments)
        self._log_gates(gates)

    def _next_row(self) -> int:
        """Return the place of this micro-batch's first row in the optimizer step's global batch."""
        rows = self._train_batch_size
        world = self.accelerator.num_processes
        if self.accelerator.split_batches:
            rows //= world
        micro_batch = self.unit_gates_callback.micro_batch
        self.unit_gates_callback.micro_batch += 1
        # Accelerate deals whole micro-batches to the processes in turn, so that the order of examples is the same for
        # every layout: here it is counted in rows.
        return (micro_batch * world + self.accelerator.process_index) * rows

    def _log_gates(self, gates: torch.Tensor) -> None:
        active = (gates != 0).float().mean(dim=1)  # [K]
        stats = torch.cat([gates.mean().view(1), active]).to(self.accelerator.device)
        mean_gate, *active = self.accelerator.reduce(stats, "mean").tolist()
        metrics = self._metrics["train"]
        metrics["gate_mean"].append(mean_gate)
        for loop, fraction in enumerate(active, start=1):
            metrics[f"active_loop_{loop}"].append(fraction)


def check_dataset(dataset: Any, formats: list[set[str]]) -> None:
    """Refuse training data that is empty, cannot be read, or has none of the sets of columns in `formats`.

    Raises:
        ValueError: in one sentence.
    """
    if dataset is None:
        return
    try:
        columns = set(next(iter(dataset)))
    except StopIteration:
        raise ValueError("`train_dataset` is empty: there is no example to train on.") from None
    except Exception as error:  # whatever the file format's reader raises
        raise ValueError(f"`train_dataset` cannot be read ({type(error).__name__}: {error}).") from error
    if not any(wanted <= columns for wanted in formats):
        valid = " or ".join(" and ".join(map(repr, sorted(wanted))) for wanted in formats)
        found = ", ".join(map(repr, sorted(columns)))
        raise ValueError(f"`train_dataset` has the columns {found}; it needs {valid}.")


def _trained_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def _output_dir(model: str | nn.Module) -> str:
    name = model if isinstance(model, str) else model.config.name_or_path
    return f"{name.rstrip('/').split('/')[-1]}-LoopDropout"


def _checked_adapter(
    model: str | nn.Module, peft_config: PeftConfig | None, config: PreTrainedConfig
) -> PeftConfig | None:
    """Return the adapter to attach: the given one, none for a model that has one, or the paper's."""
    if peft_config is not None:
        check_peft_config(peft_config)
    elif isinstance(model, PeftModel):
        check_adapter(model)
    else:
        peft_config = default_peft_config(config if isinstance(model, str) else model)
    return peft_config


def _looped_config(model: str | nn.Module, args: TrainingArguments) -> PreTrainedConfig:
    """Return the model's config with the depth that it will run at, without loading weights."""
    if not isinstance(model, str):
        return find_looped_model(model).config
    init_kwargs = dict(args.model_init_kwargs or {})
    num_loops = init_kwargs.get("num_loops")
    if num_loops is not None:
        check_num_loops(num_loops)
    known = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
    config = AutoConfig.from_pretrained(
        model,
        trust_remote_code=args.trust_remote_code,
        **{key: init_kwargs[key] for key in known if key in init_kwargs},
    )
    if not hasattr(config, "num_loops"):
        raise NotLoopedError(
            f"{model} is a `{config.model_type}` model, which is not looped: Loop Dropout needs a model that applies one "
            "block several times, such as `model_type: ouro`."
        )
    if num_loops is not None:
        config.num_loops = num_loops
    return config
