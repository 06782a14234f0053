"""One thread that decodes all running completions of a server together.

Completions of one `Variant` run in the slots of one `SlotBatch`. A completion is admitted as soon as a slot is free, and
leaves with its last token or when its client has left. Batches of several variants take turns, one token each. Models that do
not support slots run in batches of transformers' `generate`, each of which ends before the next one starts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from loopdropout_trainer.errors import first_line
from loopdropout_trainer.generation import PREFILL_TOKENS, Ending, SlotBatch, generate_in_batches, supports_slots
from loopdropout_trainer.looped import attach_looped_model
from loopdropout_trainer.serving.streams import TextStream
from loopdropout_trainer.serving.variants import Variant


logger = logging.getLogger(__name__)

LEAST_TEMPERATURE = 1e-5
"""Lower temperatures take the most probable token, as 0 does."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: Divisor of the logits. 0 takes the most probable token.
        top_p: Smallest probability that the most probable tokens have together, from which a token is drawn.
        seed: Seed of the draws. None: a random seed.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True)
class Result:
    """The end of a completion.

    Attributes:
        text: The whole text.
        num_tokens: Number of its tokens.
        finish_reason: "stop" or "length".
    """

    text: str
    num_tokens: int
    finish_reason: str


Event = str | Result | Exception
"""A piece of text, the end, or the error that ended a completion."""


class Completion:
    """A completion that waits, runs or has ended.

    Args:
        prompt: Token ids of the prompt.
        variant: Depth and gates.
        max_tokens: Largest number of tokens.
        sampling: How tokens are drawn.
        ending: End tokens and stop strings.
        stream: Makes pieces of the text. None: the text is sent at the end.
        send: Function that gets the events, in the thread of the scheduler.
    """

    def __init__(
        self,
        prompt: list[int],
        variant: Variant,
        max_tokens: int,
        sampling: Sampling,
        ending: Ending,
        stream: TextStream | None,
        send: Callable[[Event], None],
    ) -> None:
        self.prompt, self.variant, self.max_tokens, self.sampling = prompt, variant, max_tokens, sampling
        self.send = send
        self.tokens: list[int] = []
        self.has_ended = False
        self._ending, self._stream = ending, stream
        self._is_cancelled = threading.Event()
        self._warpers: list[LogitsProcessor] = []
        self._generator = torch.Generator()
        if sampling.temperature >= LEAST_TEMPERATURE:
            self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most probable one."""
        return not self._warpers

    @property
    def is_cancelled(self) -> bool:
        """Whether its client has left."""
        return self._is_cancelled.is_set()

    def cancel(self) -> None:
        """End the completion before its next token, from any thread."""
        self._is_cancelled.set()

    def draw(self, logits: Tensor) -> int:
        """Return a token drawn from logits [V]."""
        scores = logits.unsqueeze(0).cpu()
        for warper in self._warpers:
            scores = warper(None, scores)
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator))

    def receive(self, token: int) -> bool:
        """Append a token, send its text or the end, and return whether the completion has ended."""
        if self.is_cancelled:
            self.has_ended = True
            return True
        self.tokens.append(token)
        (stops,) = self._ending.find_ended([self.tokens])
        self.has_ended = stops or len(self.tokens) >= self.max_tokens
        if self.has_ended:
            text = self._ending.to_text(self.tokens)
            if self._stream is not None:
                self.send(self._stream.finish(text))
            self.send(Result(text, len(self.tokens), "stop" if stops else "length"))
        elif self._stream is not None:
            self.send(self._stream.push(token))
        return self.has_ended

    def fail(self, error: Exception) -> None:
        """End the completion with an error, unless it has ended."""
        if not self.has_ended:
            self.has_ended = True
            self.send(error)


def choose_tokens(completions: Sequence[Completion], logits: Tensor) -> list[int]:
    """Return the next token of each completion, from logits [B, V]."""
    tokens = logits.argmax(dim=-1).tolist()
    for index, (completion, row) in enumerate(zip(completions, logits, strict=True)):
        if not completion.is_greedy:
            tokens[index] = completion.draw(row)
    return tokens


class SlotRows:
    """Running completions of one variant in slots."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.batch = SlotBatch(model, num_slots=1)
        self.rows: list[Completion] = []

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, new: list[Completion]) -> None:
        """Read the prompts of completions, and decode their first tokens."""
        self.rows += new
        self._receive(new, self.batch.read([completion.prompt for completion in new]))

    def step(self) -> None:
        """Decode the next token of each completion."""
        self._receive(self.rows, self.batch.append([completion.tokens[-1] for completion in self.rows]))

    def remove_cancelled(self) -> None:
        """Free the slots of completions whose clients have left."""
        self._remove([completion.is_cancelled for completion in self.rows])

    def _receive(self, completions: Sequence[Completion], logits: Tensor) -> None:
        for completion, token in zip(completions, choose_tokens(completions, logits), strict=True):
            completion.receive(token)
        self._remove([completion.has_ended for completion in self.rows])

    def _remove(self, ended: list[bool]) -> None:
        if any(ended):
            self.rows = [self.rows[slot] for slot in self.batch.remove(ended)]


class _ChooseTokens(LogitsProcessor):
    """Let a greedy `generate` take the tokens that `choose_tokens` chooses."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.completions = completions

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = choose_tokens(self.completions, scores.float())
        chosen = torch.full_like(scores, float("-inf"))
        chosen[range(len(tokens)), tokens] = 0
        return chosen


def _group(completions: Sequence[Completion]) -> list[list[Completion]]:
    """Return groups of one variant each whose prompts fit into one pass."""
    groups: list[list[Completion]] = []
    for completion in sorted(completions, key=lambda completion: hash(completion.variant)):
        if groups and _fits(completion, groups[-1]):
            groups[-1].append(completion)
        else:
            groups.append([completion])
    return groups


def _fits(completion: Completion, group: Sequence[Completion]) -> bool:
    """Return whether the prompt of a completion can run in one pass with those of a group, padded to the longest one."""
    if completion.variant != group[0].variant:
        return False
    longest = max(len(other.prompt) for other in [completion, *group])
    return longest * (len(group) + 1) <= PREFILL_TOKENS


class Scheduler:
    """The thread that decodes.

    Args:
        model: Looped model, with or without an adapter.
        batch_size: Largest number of completions that run together.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, batch_size: int) -> None:
        self.model, self.batch_size = model.eval(), batch_size
        self._looped = attach_looped_model(model)
        self._waiting: list[Completion] = []
        self._running: dict[Variant, SlotRows] = {}
        self._num_in_batch = 0
        self._has_changed = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def add(self, completions: Sequence[Completion]) -> None:
        """Let completions wait for their turn, from any thread."""
        with self._has_changed:
            self._waiting.extend(completions)
            self._has_changed.notify()

    def stop(self) -> None:
        """End the thread and all completions."""
        with self._has_changed:
            self._is_stopping = True
            self._has_changed.notify()
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Number of completions that are decoded now."""
        return self._num_in_batch + sum(map(len, list(self._running.values())))

    @property
    def num_waiting(self) -> int:
        """Number of completions that wait."""
        return len(self._waiting)

    @torch.no_grad()
    def _run(self) -> None:
        supported = supports_slots(self._looped)
        while True:
            with self._has_changed:
                self._has_changed.wait_for(lambda: self._waiting or self._running or self._is_stopping)
            if self._is_stopping:
                self._fail_all(RuntimeError("The server stops."))
                return
            if supported:
                self._decode_in_slots()
            else:
                self._decode_in_batches()

    def _fail_all(self, error: Exception) -> None:
        """End all completions with an error."""
        for completion in self._waiting:
            completion.fail(error)
        for rows in self._running.values():
            for completion in rows.rows:
                completion.fail(error)

    def _decode_in_slots(self) -> None:
        """Admit completions, and decode one token of each running completion."""
        for variant, rows in list(self._running.items()):
            rows.remove_cancelled()
            self._forget_empty(variant)
        for new in _group(self._take(self.batch_size - self.num_running)):
            variant = new[0].variant
            if variant not in self._running:
                self._running[variant] = SlotRows(self._looped)
            self._guard(variant, new, partial(self._running[variant].read, new))
        for variant, rows in list(self._running.items()):
            self._guard(variant, rows.rows, rows.step)

    def _take(self, number: int, variant: Variant | None = None) -> list[Completion]:
        """Remove completions from the waiting ones, all or those of one variant, and those whose clients have left."""
        taken: list[Completion] = []
        left: list[Completion] = []
        with self._has_changed:
            for completion in self._waiting:
                if completion.is_cancelled:
                    continue
                if len(taken) < number and variant in (None, completion.variant):
                    taken.append(completion)
                else:
                    left.append(completion)
            self._waiting = left
        return taken

    def _guard(self, variant: Variant, completions: list[Completion], decode: Callable[[], object]) -> None:
        """Decode under the gates of a variant. An error ends all its completions, and the server goes on."""
        failing = list(completions)  # here, because decoding removes those that end
        try:
            with variant.applied(self.model):
                decode()
        except Exception as error:  # such as too little memory
            logger.exception("A batch of completions ended with an error.")
            if variant in self._running:
                failing += self._running.pop(variant).rows
            for completion in failing:
                completion.fail(RuntimeError(f"The model failed: {first_line(error)}"))
        self._forget_empty(variant)

    def _forget_empty(self, variant: Variant) -> None:
        """Free the cache of a variant without completions."""
        if variant in self._running and not self._running[variant]:
            del self._running[variant]

    def _decode_in_batches(self) -> None:
        """Decode the next waiting completions to their ends."""
        with self._has_changed:
            variant = self._waiting[0].variant
        completions = self._take(self.batch_size, variant)
        if not completions:
            return

        def find_ended(rows: list[list[int]]) -> list[bool]:
            return [
                completion.has_ended or completion.receive(tokens[-1])
                for completion, tokens in zip(completions, rows, strict=True)
            ]

        completions.sort(key=lambda completion: -len(completion.prompt))  # in the order of the rows
        decode = partial(
            generate_in_batches,
            self._looped,
            [completion.prompt for completion in completions],
            max(completion.max_tokens for completion in completions),
            len(completions),
            find_ended,
            [_ChooseTokens(completions)],
        )
        self._num_in_batch = len(completions)
        self._guard(variant, completions, lambda: list(decode()))
        self._num_in_batch = 0
