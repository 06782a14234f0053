"""Greedy decoding with a cache over all loops and with continuous batching. It writes the texts of transformers' `generate`.

A fixed number of slots holds the running completions. Rows that end are evicted, and waiting prompts are admitted. Every row
counts its own columns: the keys and values of its token at position p are in column p of its slot. So a row attends to the
columns up to its own position, and a completion does not depend on the other rows. (In bfloat16 rounding may depend on the
number of rows.) An example with two slots (a letter: a token; .: free; *: left by a former row):

    slot 0   a b c d e . . .     5 tokens; the next token goes to column 5, and sees columns 0 to 5
    slot 1   x y z * * * . .     3 tokens, after a row of 6 that ended; the next token goes to column 3
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import attach_looped_model
from loopdropout_trainer.models.looped_modeling import CACHE
from loopdropout_trainer.tokenizers import end_tokens


COLUMN_BLOCK = 256
"""The allocated columns of a slot are a multiple of it, because growing copies the cache."""

PREFILL_TOKENS = 16384
"""Largest number of tokens of prompts that run together, with padding. A longer prompt runs alone."""

Finished = list[tuple[int, list[int]]]
"""Indices of prompts with the token ids of their completions."""


def generate_greedy(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    batch_size: int = 16,
    stop_strings: Sequence[str] = (),
    progress: bool | str = True,
    on_completion: Callable[[int, str], Any] | None = None,
    on_text: Callable[[str], Any] | None = None,
) -> list[str]:
    """Complete each prompt with the most probable tokens, at the model's depth and under the current gates.

    Args:
        model: Looped causal language model, with or without an adapter.
        tokenizer: Tokenizer of the model. Its padding is not used.
        prompts: Texts, or token ids.
        max_new_tokens: Largest number of tokens of a completion.
        batch_size: Number of completions that run together.
        stop_strings: Strings that end a completion. It also ends at an end token of the tokenizer or the model.
        progress: Whether to show a progress bar, or its description.
        on_completion: Function that gets the index of a prompt and its completion as soon as the completion ends. The longest
            prompts start first.
        on_text: Function that gets the completion of a single prompt after each of its tokens.

    Returns:
        The completions in the order of `prompts`, without prompts and special tokens.
    """
    token_ids = _tokenize(tokenizer, prompts)
    looped = attach_looped_model(model)
    gates = looped.gate_state.gates
    if gates is not None and gates.shape[1] > 1:
        raise UserError(f"`gates` must be the same for all prompts, got gates of {gates.shape[1]} examples.")
    ending = Ending(looped, tokenizer, stop_strings, on_text)
    decode = generate_in_batches
    if supports_slots(looped):
        decode = _decode_in_slots
    description = progress if isinstance(progress, str) else None
    hidden = {} if progress else {"disable": True}  # without a value, tqdm reads TQDM_DISABLE
    bar = tqdm(total=len(prompts), desc=description, unit=" prompts", **hidden)
    completions: dict[int, str] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), bar:
            for finished in decode(looped, token_ids, max_new_tokens, batch_size, ending.find_ended):
                for index, tokens in finished:
                    completions[index] = ending.to_text(tokens)
                    if on_completion is not None:
                        on_completion(index, completions[index])
                bar.update(len(finished))
    finally:
        model.train(was_training)
    return [completions[index] for index in range(len(prompts))]


def _tokenize(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """Return the token ids of prompts, which are texts or token ids. Raise UserError for a prompt without tokens."""
    token_ids = []
    for prompt in prompts:
        ids = prompt
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        token_ids.append(list(ids))
    if [] in token_ids:
        raise UserError(f"`prompts` must not be empty texts, got one at index {token_ids.index([])}.")
    return token_ids


class Ending:
    """End tokens and stop strings of completions."""

    def __init__(
        self, looped: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], on_text: Any = None
    ) -> None:
        self.on_text = on_text
        self.decode = partial(tokenizer.batch_decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        pattern = "|".join(map(re.escape, stops)) if stops else "(?!)"  # which matches nothing
        self.stops = re.compile(pattern)
        added = tokenizer.get_added_vocab()  # special tokens are not part of the decoded text
        stop_tokens = [added[stop] for stop in stops if stop in added]
        self.end_tokens = {*end_tokens(looped), tokenizer.eos_token_id, *stop_tokens} - {None}
        # Number of last tokens that are decoded to find a stop string. To decode all of a completion after each of its tokens
        # would take ever longer. A stop string has at most as many tokens as bytes. Some more tokens are read before it,
        # because a decoder may change the beginning of a text, as by removing its first space.
        self.window = max((len(stop.encode()) + 4 for stop in stops), default=0)

    def find_ended(self, completions: list[list[int]]) -> list[bool]:
        """Return whether each completion ends with its last token. An ended one may be asked again after further tokens."""
        if self.on_text is not None:
            self.on_text(self.to_text(completions[0]))
        ended = [tokens[-1] in self.end_tokens for tokens in completions]
        if not self.window:
            return ended
        tails = self.decode([tokens[-self.window :] for tokens in completions])
        return [end or bool(self.stops.search(tail)) for end, tail in zip(ended, tails, strict=True)]

    def to_text(self, tokens: list[int]) -> str:
        """Return the text of a completion up to its end."""
        (text,) = self.decode([list(takewhile(lambda token: token not in self.end_tokens, tokens))])
        return self.stops.split(text, maxsplit=1)[0]


def context_of(model: PreTrainedModel) -> int | None:
    """Return the largest number of tokens that a model was made for, or None if it names none."""
    return getattr(model.config, "max_position_embeddings", None)


def check_prompt_length(model: PreTrainedModel, num_tokens: int) -> None:
    """Raise UserError if a prompt leaves no room in the context of a model. A stranger's template can write any length."""
    context = context_of(model)
    if context is not None and num_tokens >= context:
        raise UserError(
            f"The prompt must have fewer tokens than the context of the model, {context:,}, got {num_tokens:,}."
        )


# Continuous batching.


def supports_slots(model: PreTrainedModel) -> bool:
    """Return whether a model can decode with a `SlotCache`, by attention with a given mask [B, 1, S, columns]."""
    takes_masks = model.config._attn_implementation in ("sdpa", "eager") and model._can_compile_fullgraph
    layers = DynamicCache(config=model.config).layers
    sees_all_columns = all(type(layer) is DynamicLayer for layer in layers)
    return takes_masks and not model.reads_prompts and sees_all_columns


class Places:
    """Where the next call of the model writes, and what it sees. The layers of a `SlotCache` share one object.

    They do not refer to the cache itself, because in a cycle of references the memory of a cache would stay allocated until
    Python's collector finds it.

    Attributes:
        num_slots: Number of allocated slots, which may grow.
        slots: [B, 1] slots of the rows that the next call computes. They are the first B slots, except in a prefill.
        positions: [B, S] positions of the tokens that the next call computes.
        num_columns: Number of columns that the next call attends to.
        is_prefill: Whether the rows begin, so that they attend only to the S tokens of the next call, in S columns.
    """

    slots: Tensor
    positions: Tensor
    num_columns: int
    is_prefill: bool

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots


class SlotCache(Cache):
    """Keys and values of slots, with one layer for each (loop, layer) of a looped model."""

    def __init__(self, num_slots: int) -> None:
        self.places = Places(num_slots)
        super().__init__(layer_class_to_replicate=partial(SlotLayer, self.places))

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows to other slots."""
        for layer in self.layers:
            for states in (layer.keys, layer.values):
                states[targets] = states[sources]


class SlotLayer(StaticLayer):
    """Keys and values of one layer in one loop, [slots, columns, heads, d]."""

    def __init__(self, places: Places) -> None:
        super().__init__(max_cache_len=0)
        self.places = places

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the states [B, heads, S, d] of the next tokens, and return all states that they may attend to."""
        if not self.is_initialized:  # here, because the number and the size of heads may differ from layer to layer
            self.keys = _no_columns(key_states, self.places.num_slots)
            self.values = _no_columns(value_states, self.places.num_slots)
            self.is_initialized = True
        slots, positions, num_columns = self.places.slots, self.places.positions, self.places.num_columns
        self._add_slots(self.places.num_slots)
        self._add_columns(num_columns)
        # Token s of row b goes to column positions[b, s] of slot slots[b]. Both indices broadcast to [B, S], and select places
        # [B, S, heads, d]. A slice of columns would not do, because rows differ in length.
        written = slots.to(key_states.device), positions.to(key_states.device)
        self.keys[written] = key_states.transpose(1, 2)
        self.values[written] = value_states.transpose(1, 2)
        if self.places.is_prefill:
            return key_states, value_states  # a prompt attends to itself, without older columns
        # The running rows are the first slots, so that one slice, a view, has all of their states. It also has old states of
        # rows that ended, in columns that the mask of `_next_logits` hides.
        num_rows = len(slots)
        keys, values = self.keys[:num_rows, :num_columns], self.values[:num_rows, :num_columns]
        return keys.transpose(1, 2), values.transpose(1, 2)  # [B, heads, columns, d]

    def _add_slots(self, num_slots: int) -> None:
        """Allocate slots until there are `num_slots`."""
        missing = num_slots - self.keys.shape[0]
        if missing <= 0:
            return
        padding = (0, 0, 0, 0, 0, 0, 0, missing)  # of d, heads, columns and slots, from the last dimension
        self.keys = nn.functional.pad(self.keys, padding)
        self.values = nn.functional.pad(self.values, padding)

    def _add_columns(self, num_columns: int) -> None:
        """Allocate blocks of columns until there are `num_columns`."""
        missing = num_columns - self.keys.shape[1]
        if missing <= 0:
            return
        num_blocks = math.ceil(missing / COLUMN_BLOCK)
        padding = (0, 0, 0, 0, 0, num_blocks * COLUMN_BLOCK)  # of d, heads and columns, from the last dimension
        # Zeros, because attention multiplies the values of masked columns by zero, and NaN times zero is NaN.
        self.keys = nn.functional.pad(self.keys, padding)
        self.values = nn.functional.pad(self.values, padding)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.places.num_columns, 0

    def get_seq_length(self) -> int:
        """Return 0. Rows differ in length, so that masks and positions are given in each call."""
        return 0


def _no_columns(states: Tensor, num_slots: int) -> Tensor:
    """Return an empty tensor [slots, 0, heads, d] for states [B, heads, S, d]."""
    return states.new_zeros(num_slots, 0, states.shape[1], states.shape[3])


class SlotBatch:
    """Completions that a model writes together, one row in each of the first slots of a cache.

    Args:
        model: Looped causal language model that supports slots.
        num_slots: Number of slots to begin with. It at least doubles when more rows are read.

    Attributes:
        lengths: Number of tokens of each row.
    """

    def __init__(self, model: PreTrainedModel, num_slots: int) -> None:
        self.model = model
        self.cache = SlotCache(num_slots)
        self.lengths: list[int] = []

    def read(self, prompts: Sequence[list[int]]) -> Tensor:
        """Put prompts into the next slots, and return the logits [B, V] of their next tokens in float32."""
        first_slot = len(self.lengths)
        starts = [0] * len(prompts)
        num_rows = first_slot + len(prompts)
        places = self.cache.places
        if num_rows > places.num_slots:
            places.num_slots = max(num_rows, 2 * places.num_slots)
        lengths = [len(prompt) for prompt in prompts]
        places.num_columns, places.is_prefill = max(lengths), True
        self.lengths += lengths
        return _next_logits(self.model, self.cache, prompts, starts, first_slot)

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each row, and return the logits [B, V] of the next tokens in float32."""
        starts = self.lengths
        self.lengths = [start + 1 for start in starts]
        places = self.cache.places
        places.num_columns, places.is_prefill = max(self.lengths), False
        return _next_logits(self.model, self.cache, [[token] for token in tokens], starts, first_slot=0)

    def remove(self, ended: Sequence[bool]) -> list[int]:
        """Remove the rows that ended. The other rows then fill the first slots again.

        Attention reads the first B slots as one slice, without a copy of the cache. So the last rows move to the free slots
        before them, which copies as few rows as possible: of rows [a, -, c, -, e], only e moves, to slot 1.

        Returns:
            The former slots of the other rows, in their new order.
        """
        kept = [slot for slot, end in enumerate(ended) if not end]
        sources = [slot for slot in kept if slot >= len(kept)]
        targets = [slot for slot in range(len(kept)) if ended[slot]]
        order = list(range(len(kept)))
        if targets:
            self.cache.move(sources, targets)
            for source, target in zip(sources, targets, strict=True):
                order[target] = source
        self.lengths = [self.lengths[slot] for slot in order]
        return order


def _decode_in_slots(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    num_slots: int,
    find_ended: Callable[[list[list[int]]], list[bool]],
) -> Iterator[Finished]:
    """Yield the completions that end together.

    A turn is one call of the model. It reads some new prompts [B, S], or the last token [B, 1] of every running completion.
    """
    num_slots = min(num_slots, len(prompts))
    batch = SlotBatch(model, num_slots)
    waiting = deque(sorted(range(len(prompts)), key=lambda index: -len(prompts[index])))
    rows: list[int] = []  # prompts of the slots in use, from the first slot
    answers: list[list[int]] = [[] for _ in prompts]
    while waiting or rows:
        num_free = num_slots - len(rows)
        # Reading prompts takes a call in which the running rows wait. So it pays only for a quarter of the slots.
        if waiting and 4 * num_free >= num_slots:
            longest = len(prompts[waiting[0]])
            num_fitting = max(1, PREFILL_TOKENS // longest)  # prompts that may run together
            num_new = min(num_free, len(waiting), num_fitting)
            in_turn = [waiting.popleft() for _ in range(num_new)]
            rows += in_turn
            logits = batch.read([prompts[index] for index in in_turn])
        else:
            in_turn = rows
            logits = batch.append([answers[index][-1] for index in rows])
        for index, token in zip(in_turn, logits.argmax(dim=-1).tolist(), strict=True):
            answers[index].append(token)

        ended = find_ended([answers[index] for index in rows])
        for slot, index in enumerate(rows):
            if len(answers[index]) >= max_new_tokens:
                ended[slot] = True
        if any(ended):
            finished = [(rows[slot], answers[rows[slot]]) for slot in range(len(rows)) if ended[slot]]
            rows = [rows[slot] for slot in batch.remove(ended)]
            yield finished


def _next_logits(
    model: PreTrainedModel, cache: SlotCache, new: Sequence[list[int]], starts: list[int], first_slot: int
) -> Tensor:
    """Return the float32 logits [B, V] after the new tokens of B rows.

    Args:
        model: Looped model.
        cache: Cache of the slots. The `slots` and `positions` of its places are set here, the other ones before.
        new: The new tokens of each row.
        starts: Position of the first new token of each row.
        first_slot: Slot of the first of these rows. The others follow.
    """
    places = cache.places
    ids = pad_sequence([torch.tensor(tokens) for tokens in new], batch_first=True).to(model.device)  # [B, S]
    places.slots = torch.arange(first_slot, first_slot + len(new), device=model.device).unsqueeze(1)  # [B, 1]
    # Shorter prompts are padded at the end, in the columns of their completions. A prompt does not attend to the columns after
    # it, and its completion overwrites them.
    places.positions = (torch.tensor(starts).unsqueeze(1) + torch.arange(ids.shape[1])).to(model.device)  # [B, S]
    # A token attends to the columns up to its own position. The mask is a number to add to the scores, because every
    # attention layer of every loop would have to convert a boolean mask.
    columns = torch.arange(places.num_columns, device=ids.device)
    unseen = columns > places.positions[:, None, :, None]  # [B, 1, S, columns]
    mask = torch.zeros_like(unseen, dtype=model.dtype).masked_fill_(unseen, torch.finfo(model.dtype).min)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": places.positions, CACHE: cache}
    hidden = model.base_model(**inputs, use_cache=True).last_hidden_state  # [B, S, H]
    ends = [len(tokens) - 1 for tokens in new]
    return model.get_output_embeddings()(hidden[torch.arange(len(hidden)), ends]).float()


# Other models.


def generate_in_batches(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    batch_size: int,
    find_ended: Callable[[list[list[int]]], list[bool]],
    logits_processors: Sequence[LogitsProcessor] = (),
) -> Iterator[Finished]:
    """Yield the completions of transformers' `generate`, in left-padded batches, the longest prompts first."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, pad_token_id=0)
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    for first in range(0, len(order), batch_size):
        indices = order[first : first + batch_size]
        rows = [torch.tensor(prompts[index]) for index in indices]
        ids = pad(rows).to(model.device)  # [B, S]
        stop = partial(_find_ended_rows, find_ended=find_ended, start=ids.shape[1])
        own_config = model.generation_config
        model.generation_config = GenerationConfig()  # `generate` takes unset fields from it, such as penalties
        try:
            answers = model.generate(
                input_ids=ids,
                attention_mask=pad([torch.ones_like(row) for row in rows]).to(model.device),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([stop]),
                logits_processor=LogitsProcessorList(logits_processors),
            )
        finally:
            model.generation_config = own_config
        yield list(zip(indices, answers[:, ids.shape[1] :].tolist(), strict=True))


def _find_ended_rows(
    ids: Tensor, scores: Tensor, find_ended: Callable[[list[list[int]]], list[bool]], start: int, **kwargs: Any
) -> Tensor:
    """Return whether each row of ids [B, S] ends, [B], for transformers' `generate`. Completions begin at column `start`."""
    return torch.tensor(find_ended(ids[:, start:].tolist()), device=ids.device)
