"""The current gates of a looped model, and the loop that it runs.

A looped model runs h_t = F(h_{t-1}; W) for t = 1..K with the same weights W (Eq. 1). The gates of a micro-batch, g[t, b] for K
loops and N examples (Eq. 3), are a `GatedBatch`. While the model runs, it sets each loop in its `GateState` as a
`RunningLoop`: the tokens that run, and the multipliers of their updates. A gated LoRA layer reads them there. Models, LoRA
layers and gate rules never import one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from loopdropout_trainer.blocks import OpenBlocks
from loopdropout_trainer.errors import UserError, count, count_rows, short_repr
from loopdropout_trainer.reruns import Reruns, is_checkpointed


@dataclass(frozen=True)
class BatchOptions:
    """Optimizations of a training step that leave its result unchanged.

    Attributes:
        remove_padding: Whether the examples of a batch may run packed in one row, without their padding.
        lora_parameters: Trained parameters of the adapter, if nothing else is trained. Then the loops before an example's
            first active gate may run as the frozen model, without gradient. None: all loops run with gradient.
    """

    remove_padding: bool = False
    lora_parameters: tuple[nn.Parameter, ...] | None = None


@dataclass(frozen=True, eq=False)
class RunningLoop:
    """One loop of one forward pass, for some or all of its tokens.

    Attributes:
        batch: Gates of the forward pass. Recomputation reads them here, because another pass may have replaced the
            current gates.
        index: Index of the loop, from 0.
        token_examples: [n] index of each token's example, if examples are packed in one row [1, n]. None: row b is example b.
        gate: Gates of the packed tokens, [n, 1] or [n, M] for M adapted modules. Without packing, gates of the examples,
            [N, 1] or [N, M]. None: unit gates.
        frozen: Whether the tokens have no active gate up to this loop. They run without adapter and gradient.
        skips_updates: Whether no token has an active gate in this loop.
    """

    batch: GatedBatch
    index: int = 0
    token_examples: Tensor | None = None
    gate: Tensor | None = None
    frozen: bool = False
    skips_updates: bool = False


MOST_SHOWN = 8
"""Number of examples whose gates `repr` shows."""


@dataclass(eq=False, repr=False)
class GatedBatch:
    """The gates of one micro-batch, or of a block of `use_gates`.

    Attributes:
        gates: [K, N] multipliers of the adapter's update for N examples (N = 1: for all examples), or [K, N, M] with one for
            each of the M adapted modules. None: unit gates. Gates that are all exactly one are stored as None.
        token_examples: [B, S] index of each token's example, if rows hold several examples. None: row b is example b.
        seeds: int64 seeds of random factors that an adapter expands itself, in the adapter's shape, or None.
        draw: Key of the step's random draws, for models with a random start state: `seed`, `step` and `example_ids`, which
            are (row, segment) of the examples. None outside of a training step.
        options: Optimizations that the model may use.
        rule: Rule that drew the gates, or None.
        num_examples: Number of examples that the gates were drawn for, or None if they are for any number.
        of_block: Whether the gates are those of a block of `use_gates`. They must have one row for each loop that runs.
        sampled: The gates as they were given, also if all are one.
        active: [K][N], whether an example has an active gate in a loop. None for unit gates, and if an update can have an
            effect or a gradient although its gate is zero.
        unused_modules: [M], True for modules that no loop and no example uses. Empty for gates [K, N], and if all gates are
            zero.
    """

    gates: Tensor | None = None
    token_examples: Tensor | None = None
    seeds: Tensor | None = None
    draw: Any = None
    options: BatchOptions = BatchOptions()
    rule: Any = None
    num_examples: int | None = None
    of_block: bool = False
    sampled: Tensor | None = field(init=False, default=None)
    active: list[list[bool]] | None = field(init=False, default=None)
    unused_modules: list[bool] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.sampled = self.gates
        if self.gates is None or self.gates.requires_grad:
            return
        if bool((self.gates == 1).all()):
            self.gates = None
            return
        used = (self.gates != 0).cpu()  # [K, N] or [K, N, M]
        has_modules = used.dim() == 3
        if self.seeds is None:  # noise, which seeds expand, acts without a gate
            active = used.any(dim=2) if has_modules else used  # [K, N]
            self.active = active.tolist()
        # If all gates are zero, no module is left out, because the loss would have no graph.
        if has_modules and bool(used.any()):
            used_modules = used.flatten(0, 1).any(dim=0)  # [M]
            self.unused_modules = (~used_modules).tolist()

    def __repr__(self) -> str:
        """Return a line for each of the first `MOST_SHOWN` examples with the loops in which its gates are on.

        `sampled` has the gates of all examples.
        """
        if self.sampled is None:
            return "GatedBatch with unit gates"
        gates = self.sampled.detach().float().cpu()  # [K, N] or [K, N, M]
        num_loops, num_columns = gates.shape[:2]
        lowest, highest = f"{gates.min().item():.4g}", f"{gates.max().item():.4g}"
        values = f"gates {lowest}" if lowest == highest else f"gates from {lowest} to {highest}"
        is_for_all = num_columns == 1 and self.num_examples != 1
        size = "all examples" if is_for_all else count(num_columns, "example")
        lines = [f"GatedBatch of {size} in {count(num_loops, 'loop')}, {values}. Loops in which they are on:"]
        is_on = gates.reshape(num_loops, num_columns, -1).any(dim=2)  # [K, N], of any module
        for example in range(min(num_columns, MOST_SHOWN)):
            loops = [str(loop + 1) for loop in range(num_loops) if is_on[loop, example]]
            name = "all examples" if is_for_all else f"example {example + 1}"
            lines.append(f"  {name}: {', '.join(loops) or 'none'}")
        if num_columns > MOST_SHOWN:
            lines.append(f"  and {num_columns - MOST_SHOWN} more, see `sampled`")
        return "\n".join(lines)

    @property
    def is_set(self) -> bool:
        """Whether gates were given, also if all are one."""
        return self.sampled is not None

    def find_token_examples(self, shape: Sequence[int], num_examples: int | None = None) -> Tensor | None:
        """Return the [B, S] index of each token's example in a batch of shape (B, S). None: row b is example b.

        Args:
            shape: Shape of the batch.
            num_examples: Number of examples with a value each, or 1 for all. Default: the number of columns of the gates.

        Raises:
            UserError: If the examples are not those of the batch.
        """
        if num_examples is None:
            num_examples = 1 if self.gates is None else self.gates.shape[1]
        index = self.token_examples
        if index is not None and index.shape == shape:
            return index
        if index is not None and num_examples > 1:
            raise UserError(
                f"The current gates belong to a packed batch of shape {list(index.shape)}, but the model runs a batch of "
                f"shape {list(shape)}. {self._describe_way_out()}"
            )
        if num_examples not in (1, shape[0]):
            raise UserError(
                f"`gates` must have one column for each of the {shape[0]} examples or one column for all, got "
                f"{num_examples} columns. {self._describe_copies(shape[0], num_examples)}{self._describe_way_out()}"
            )
        return None

    def _describe_copies(self, num_rows: int, num_examples: int) -> str:
        """Return a sentence about the copies of each example that `generate` runs, if the numbers fit to them, else ""."""
        if self.rule is not None or num_rows % num_examples:
            return ""
        return (
            f"`num_beams` and `num_return_sequences` of `generate` run several copies of each example. Repeat the columns, as "
            f"by `gates.repeat_interleave({num_rows // num_examples}, dim=1)`. "
        )

    def _describe_way_out(self) -> str:
        """Return the end of an error about the gates of another batch."""
        if self.rule is None:
            return "Run batches with other examples inside `use_gates`."
        return (
            "`draw_gates` has set them for training. Return to unit gates by `trainer.gate_state.reset()`, or run batches "
            "with other examples inside `use_gates`."
        )

    def check_depth(self, num_loops: int) -> None:
        """Raise UserError if the gates of a block do not have one row for each of K loops."""
        if self.of_block and self.gates is not None and len(self.gates) != num_loops:
            raise UserError(
                f"`gates` of a block of `use_gates` must have one number for each of the {num_loops} loops that run, got "
                f"{len(self.gates)}. Begin a block of `use_depth` before it, or give a `LoopedLM` its own `gates`."
            )

    def check_columns(self, shape: Sequence[int] | None) -> None:
        """Raise UserError if the gates of a block have columns for other examples than those of a batch.

        Gates that are all one are checked, too, although no layer reads them. `shape`: (B, S), or None if it is unknown.
        """
        if self.of_block and self.sampled is not None and shape is not None:
            self.find_token_examples(shape, self.sampled.shape[1])

    def check_loop(self, index: int) -> None:
        """Raise UserError if the gates have no row for a loop."""
        if self.gates is not None and index >= len(self.gates):
            raise UserError(
                f"`gates` must have one row for each loop, got {len(self.gates)} rows, but the model runs loop {index + 1}. "
                "Call `use_depth` before `use_gates`."
            )

    def loop(
        self, index: int, device: torch.device | None = None, token_examples: Tensor | None = None, **attributes: Any
    ) -> RunningLoop:
        """Return the loop of this index with its gates.

        Args:
            index: Index of the loop, from 0.
            device: Device of the gates.
            token_examples: [n] index of each packed token's example, or None.
            **attributes: Other attributes of `RunningLoop`.
        """
        gate = None
        if self.gates is not None:
            self.check_loop(index)
            gate = self.gates[index].to(device, non_blocking=True)  # [N] or [N, M]
            gate = gate.reshape(len(gate), -1)  # [N, 1 or M]
            if token_examples is not None:
                places = token_examples
                if len(gate) == 1:  # one gate for all examples
                    places = torch.zeros_like(token_examples)
                gate = gate[places]  # [n, 1 or M]
        return RunningLoop(self, index, token_examples, gate, **attributes)


REMOVED_EARLY = (
    "The gates of a pass must not be removed before its backward pass, because gradient checkpointing still needs them. Call "
    "`remove()` after `backward()`."
)

UNIT_GATES = GatedBatch()
"""Ordinary LoRA: the gates outside of training steps and of `use_gates`."""


class GateState:
    """The current gates of one looped model, and its running loop.

    Gradient checkpointing is the reason for `batch` and `running`. It drops the activations of a layer after the forward
    pass, and runs the layer again in the backward pass, loop K first. By then `batch` may hold the gates of the next pass, so
    a `RunningLoop` keeps the gates of its own pass. On CUDA the layer runs again in a thread of autograd, so both are plain
    attributes and not thread-locals. For two passes with gates a and b, each [K, N]:

        pass               a, forward             b, forward             a, backward
        batch              a                      b                      b
        running            a[0] a[1] ... a[K-1]   b[0] b[1] ... b[K-1]   a[K-1] ... a[1] a[0]

    Attributes:
        batch: Gates of the next forward pass. The trainer sets them for a training step, `use_gates` for its block,
            `loop_dropout` for one pass.
        running: Running loop, with the gates of its pass. The recurrent layers set it inside their checkpointed `forward`, so
            that recomputation in the backward pass sets the right loop again, although loops run backwards there.
        blocks: Blocks of `use_gates` and `use_depth` that run.
        dropout: The handle of `loop_dropout`, which draws gates in each forward pass, or None.
        reruns: Passes that a checkpoint around the whole model runs again, and the error if their gates may be others.
        is_read: Whether gated layers read the gates. False once they are removed.
        rule: Rule that trains the gated layers, or None.
        must_draw: Whether training without drawn gates is an error. True inside `train()` of the package's trainers.
        ignores_padding: Whether the outputs of padding are never read. Then a pass may leave padding out.
        computes_loss: Whether a trainer computes a loss, whose passes may run under drawn gates without gradient.
        has_warned: Whether a warning has said that another trainer or loop trains without drawn gates.
    """

    must_draw = False
    is_read = True
    rule: Any = None
    ignores_padding = False
    computes_loss = False
    has_warned = False
    dropout: Any = None

    def __init__(self) -> None:
        self.blocks = OpenBlocks()
        self.reruns = Reruns(self.blocks)
        self.reset()

    def __repr__(self) -> str:
        gates = "unit gates" if self.gates is None else f"gates={short_repr(self.gates.tolist())}"
        return f"GateState({gates}, loop={self.loop})"

    @property
    def loop(self) -> int:
        """Index of the running loop, from 0."""
        return self.running.index

    @property
    def gates(self) -> Tensor | None:
        """The current gates, [K, N] or [K, N, M]; None for unit gates."""
        return self.batch.gates

    def set(self, batch: GatedBatch) -> None:
        """Apply the gates of `batch` from now on."""
        self.batch = batch
        self.running = batch.loop(0)

    def reset(self) -> None:
        """Return to unit gates, which is ordinary LoRA."""
        self.set(UNIT_GATES)

    @property
    def is_drawn(self) -> bool:
        """Whether a trainer has drawn the current gates, of which one differs from 1."""
        return self.batch.gates is not None and self.batch.rule is not None

    def begin_pass(self, num_loops: int, shape: Sequence[int] | None) -> None:
        """Note that a pass of K loops over a batch of shape (B, S), or None if it is unknown, begins.

        Raises:
            UserError: If the gates of a block are for another number of loops or for other examples. For a pass that runs
                again and may belong to other gates (`Reruns`), and for inference under the gates that a trainer has drawn,
                outside of `train()` and of a loss.
        """
        self.batch.check_depth(num_loops)
        self.batch.check_columns(shape)
        # The mode of the model tells nothing, because it stays in training mode after a training.
        is_inference = not (torch.is_grad_enabled() or self.must_draw or self.computes_loss)
        if is_inference and self.is_drawn and not is_checkpointed():  # whose first run may have no gradient
            raise UserError(
                "`draw_gates` has set gates for training, under which inference would run. Return to unit gates by "
                "`trainer.gate_state.reset()`, and run inference under chosen gates inside `use_gates`. `sample_gates` draws "
                "gates without setting them."
            )
        self.reruns.begin_pass(has_gates=self.batch.gates is not None)

    def set_loop(self, loop: RunningLoop) -> None:
        """Set the running loop, and the tokens that run in it.

        Raises:
            UserError: If the layers do not read gates any more, or were prepared for another rule than the loop's. Usually
                gradient checkpointing runs the loop again in the backward pass, and the layers were changed before it.
        """
        if not self.is_read and loop.gate is not None:
            raise UserError(REMOVED_EARLY)
        rule = loop.batch.rule
        if rule is not None and rule is not self.rule and not self._has_plain_layers(rule):
            raise UserError(
                f"The model's layers were prepared for another rule before the backward pass of {rule.name!r}. Call "
                "`backward()` before another trainer computes a loss."
            )
        self.running = loop

    def _has_plain_layers(self, rule: Any) -> bool:
        """Return whether the layers multiply their updates by gates only, under `self.rule` and under another rule.

        Such layers read no field of their rule, so that the passes of one rule can run again in layers of the other.
        """
        rules = [rule] if self.rule is None else [rule, self.rule]
        return all(own.lora_kind == "gated" for own in rules)

    def is_undrawn(self, layer: nn.Module) -> bool:
        """Return whether a layer runs in a pass that can train it, and nobody has set gates for the pass."""
        return not self.running.batch.is_set and layer.training and torch.is_grad_enabled()

    def check_drawn(self, layer: nn.Module) -> None:
        """Raise RuntimeError if a layer trains in `train()` before gates are drawn."""
        if self.must_draw and self.is_undrawn(layer):
            raise RuntimeError(
                "The model trains without drawn gates, which is plain LoRA. Call `super().compute_loss(...)` in your "
                "`compute_loss`, or call `self.draw_gates(inputs)` before the model runs. In a callback, run the model under "
                "`torch.no_grad()`."
            )

    def gate_for(self, hidden_states: Tensor, module: int = 0, factor: Tensor | None = None) -> Tensor | None:
        """Return the running loop's gate, shaped to multiply [B, S, r] activations, or `factor` for unit gates.

        Args:
            hidden_states: [B, S, H] input of an adapted linear map.
            module: Index of that map among the adapted maps.
            factor: Further factor of the gate, such as a learned gate.
        """
        gate = self.running.gate  # [N, 1 or M], or [n, 1 or M] of packed tokens
        if gate is None:
            return factor
        if gate.shape[1] > 1:
            gate = gate[:, module : module + 1]
        gate = gate.to(hidden_states.device)  # another device in a model that is spread over several devices
        is_packed = self.running.token_examples is not None
        index = None
        if not is_packed:
            index = self._token_index(len(gate), hidden_states)
        if is_packed:
            gate = gate.unsqueeze(0)  # [1, n, 1], one for each packed token
        elif index is not None:
            gate = gate[index]  # [B, S, 1], one for each token of rows that hold several examples
        else:
            ones = [1] * (hidden_states.dim() - 1)
            gate = gate.view(len(gate), *ones)  # [N, 1, 1], one for each row, or one for all
        if factor is None:
            return gate
        return gate * factor

    def per_token(self, values: Tensor, hidden_states: Tensor) -> Tensor:
        """Return values of each example, [N] or [N, E], shaped to multiply [B, S, r] or [B, S, E] activations."""
        values = values.reshape(len(values), -1)  # [N, E]
        index = self._token_index(len(values), hidden_states)
        if index is not None:
            return values[index]  # [B, S, E], or [1, n, E] of packed tokens
        middle = [1] * (hidden_states.dim() - 2)
        return values.view(len(values), *middle, -1)  # [N, 1, E]

    def _token_index(self, num_examples: int, hidden_states: Tensor) -> Tensor | None:
        """Return the [B, S] index of each token's example, or None if row b is example b or there is one for all."""
        packed = self.running.token_examples
        if packed is None:
            index = self.running.batch.find_token_examples(hidden_states.shape[:2], num_examples)
        else:
            index = packed.unsqueeze(0)
        if index is None or num_examples == 1:
            return None
        return index.to(hidden_states.device)

    def is_unused(self, module: int) -> bool:
        """Return whether the update of an adapted module is zero for all running tokens and need not be computed."""
        if self.running.skips_updates:
            return True
        unused = self.running.batch.unused_modules
        return bool(unused) and unused[module]


@contextmanager
def applied_gates(state: GateState, gates: Tensor | None, token_examples: Tensor | None = None) -> Iterator[None]:
    """Apply gates inside the block and restore the former gates after it."""
    batch = GatedBatch(gates, token_examples, of_block=True)
    with state.blocks.setting(state, batch=batch, running=batch.loop(0)):
        yield


@contextmanager
def cut_gates(state: GateState, num_loops: int) -> Iterator[None]:
    """Apply the first K gates of a block of `use_gates` inside this block, for passes with fewer loops. Others stay."""
    batch = state.batch
    if not batch.of_block or batch.gates is None:
        yield
        return
    with applied_gates(state, batch.gates[:num_loops], batch.token_examples):
        yield


def example_starts(position_ids: Tensor) -> Tensor:
    """Return whether an example begins at each token, [B, S]: its position is not the previous token's plus 1.

    transformers' attention masks have the same criterion.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    return starts


def find_examples(inputs: dict[str, Any]) -> tuple[list[tuple[int, int]], Tensor | None]:
    """Return (row, segment) of each example of a batch, and the [B, S] index of each token's example.

    Examples with the same id share their gates. The index is None if each row is one example. Packed rows without
    `example_ids`, as of another collator, count as one row: their examples are (0, 0), (0, 1), ...

    Raises:
        UserError: If the inputs are no batch, but an example of a dataset.
    """
    is_embedded = isinstance(inputs, Mapping) and "input_ids" not in inputs and "inputs_embeds" in inputs
    num_rows = count_rows(inputs, "inputs_embeds" if is_embedded else "input_ids")
    if "position_ids" not in inputs or "attention_mask" in inputs:
        return [(row, 0) for row in range(num_rows)], None
    starts = example_starts(inputs["position_ids"].expand(num_rows, -1))  # [B, S] of packed rows
    token_examples = (starts.flatten().cumsum(0) - 1).view_as(starts)
    if "example_ids" not in inputs:
        return [(0, segment) for segment in range(int(starts.sum()))], token_examples
    ids = inputs["example_ids"].tolist()
    return ids, token_examples.clamp(max=len(ids) - 1)  # padding counts as part of the last example
