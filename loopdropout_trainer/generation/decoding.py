"""Decoding with continuous batching: a fixed number of slots, from which rows that end are evicted, and to which waiting
prompts are admitted. Tokens are the most probable ones, or drawn by a `Sampler`.

Every row counts its own columns: the keys and values of its token at position p lie in column p of its slot, whatever the
other rows hold. So a row attends to the columns up to its own position, and no row depends on when others are admitted or
evicted. What a former row left in a slot lies after that, and is written over before it is ever read.

An example with two slots, the cache as it lies in memory (a letter: a token; .: free; *: left behind by a former row):

    slot 0   a b c d e . . .     5 tokens; its next one is at position 5, goes to column 5, and sees columns 0 to 5
    slot 1   x y z * * * . .     3 tokens, after a row of 6 that ended; its next one goes to column 3, over what is there
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

from loopdropout_trainer.models.keywords import CACHE


COLUMNS = {False: 16, True: 256}
"""By whether steps are compiled: the cache's length is a multiple of it, since each length costs a view or a CUDA graph."""

ALLOCATED_COLUMNS = 256
"""The cache's allocated length is a multiple of it, since growing copies the cache."""

PREFILL_TOKENS = 16384
"""Prompts are read in batches: batch size times the longest one's length is at most this, unless one alone is longer."""


def rounded_up(size: int, block: int) -> int:
    """Return the least multiple of `block` that is at least `size`."""
    return -(-size // block) * block


class SlotCache(Cache):
    """Keys and values [slots, heads, columns, d] of every layer; a looped model has a layer here for each (loop, layer).

    Attributes:
        allocated_slots: number of slots that memory is allocated for.
        dtype: of the model.
        num_slots: number of slots in use, from the first.
        columns: indices of the columns in use, [columns].
        allocated_columns: number of columns allocated in each slot.
        slots: of the rows that the next call computes, [B, 1].
        positions: of their tokens, [B, S], which are the columns that keys and values go to.
        is_prefill: whether these rows begin with that call, and attend to nothing but its tokens.
    """

    slots: Tensor
    positions: Tensor

    def __init__(self, allocated_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(layer_class_to_replicate=partial(SlotLayer, self))
        self.allocated_slots = allocated_slots
        self.dtype = dtype
        self.num_slots = self.allocated_columns = 0
        self.columns = torch.arange(0, device=device)
        self.is_prefill = False

    def resize(self, num_slots: int, num_columns: int) -> None:
        """Use the first slots and columns."""
        if (num_slots, num_columns) != (self.num_slots, len(self.columns)):
            self.num_slots = num_slots
            # Allocated in steps of ALLOCATED_COLUMNS, used in steps of COLUMNS: with 256 and 16, a cache for 300 columns holds
            # 512 and attends over 304.
            if num_columns > self.allocated_columns:
                self.allocated_columns = rounded_up(num_columns, ALLOCATED_COLUMNS)
            self.columns = torch.arange(num_columns, device=self.columns.device)
            torch._dynamo.maybe_mark_dynamic(self.columns, 0)  # one compiled step for caches of any length
            for layer in self.layers:
                layer.resize()

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows to other slots."""
        device = self.columns.device
        from_rows = torch.tensor(sources, device=device)
        to_rows = torch.tensor(targets, device=device)
        for layer in self.layers:
            for states in (layer.keys, layer.values):
                states[to_rows.to(states.device)] = states[from_rows.to(states.device)]


class SlotLayer(StaticLayer):
    """One layer of one loop. `keys` and `values` are the part in use of what is allocated, which grows but never shrinks.

    Allocated are [slots, columns, heads, d], so that the states of a token lie in one piece.
    """

    def __init__(self, cache: SlotCache) -> None:
        super().__init__(max_cache_len=0)
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Called with the first keys [B, heads, S, d]: only they tell heads and d, which may differ from layer to layer.
        self.allocated = [
            states.new_zeros(self.cache.allocated_slots, 0, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        ]
        self.resize()
        self.is_initialized = True

    def resize(self) -> None:
        num_slots = self.cache.num_slots
        num_columns = len(self.cache.columns)
        more = self.cache.allocated_columns - self.allocated[0].shape[1]
        if more > 0:  # zeros, since what a mask leaves out is multiplied by zero, and must be finite
            self.allocated = [torch.nn.functional.pad(states, (0, 0, 0, 0, 0, more)) for states in self.allocated]
        self.keys, self.values = (states[:num_slots, :num_columns].transpose(1, 2) for states in self.allocated)
        # What the others are views of comes first: one compiled step for caches of any length.
        for dimension, views in ((1, self.allocated), (2, (self.keys, self.values))):
            for states in views:
                torch._dynamo.mark_static_address(states, guard=False)  # CUDA graphs then read and write it in place
                torch._dynamo.maybe_mark_dynamic(states, dimension)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the states [B, heads, S, d] of the current rows; return all that these may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self.cache.slots.to(key_states.device)
        positions = self.cache.positions.to(key_states.device)
        for allocated, states in zip(self.allocated, (key_states, value_states), strict=True):
            allocated[slots, positions] = states.transpose(1, 2)  # all rows of the call at once
        # A prompt attends to itself alone, so that its own states, without the rest of the cache, are all that it needs.
        return (key_states, value_states) if self.cache.is_prefill else (self.keys, self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.cache.is_prefill else len(self.cache.columns)), 0

    def get_seq_length(self) -> int:
        """Return 0: rows differ in length, so that masks and positions are given with every call."""
        return 0


class _Row:
    """Prompt `index` with what it is continued by so far."""

    def __init__(self, index: int, prompt: list[int]) -> None:
        self.index = index
        self.tokens = list(prompt)
        self.start = len(prompt)

    @property
    def completion(self) -> list[int]:
        return self.tokens[self.start :]


_FREE = _Row(-1, [0])
"""What a free slot holds, and compiled steps compute there: token 0 at position 0, which the next prompt writes over."""


class Sampler:
    """Draws tokens from softmax(logits / temperature), cut by top-k, top-p and min-p in this order, as transformers does.

    A token is the one at which the cumulative probability, in the order of the vocabulary, passes a uniform number that
    belongs to its row and its place. So a row has the same completion in any batch, process and order, and again after a
    resume, up to the rounding of its logits.

    Args:
        uniforms: [N, tokens of a completion] of the rows, in [0, 1).
        temperature: above 0. top_k: number of tokens that may be drawn, 0 for all. top_p: their least joint probability.
        min_p: least probability relative to the most probable token, or None.
    """

    def __init__(
        self,
        uniforms: Tensor,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float | None = None,
    ) -> None:
        self.uniforms = uniforms
        warpers = (
            (temperature != 1, transformers.TemperatureLogitsWarper, float(temperature)),
            (top_k, transformers.TopKLogitsWarper, top_k),
            (top_p < 1, transformers.TopPLogitsWarper, top_p),
            (min_p, transformers.MinPLogitsWarper, min_p),
        )
        self.warpers = transformers.LogitsProcessorList([make(value) for wanted, make, value in warpers if wanted])

    def __call__(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Return the tokens [B] that rows of `uniforms` draw at positions from logits [B, V]."""
        probabilities = self.warpers(None, logits).softmax(dim=-1)
        cumulated = probabilities.double().cumsum(dim=-1)
        u = self.uniforms[list(rows), list(positions)].to(logits.device)  # [B]
        # The first token whose cumulative probability is above u: never one of probability 0.
        wanted = (u * cumulated[:, -1]).unsqueeze(1)
        return torch.searchsorted(cumulated, wanted, right=True).squeeze(1)


@dataclass(eq=False)
class Decoder:
    """Continues every prompt token by token.

    Attributes:
        model: causal language model in evaluation mode that is supported, see `why_unsupported`.
        prompts: token ids, none of them empty; the longest are started first.
        max_new_tokens: maximum number of tokens of a completion.
        num_slots: maximum number of rows at a time.
        have_ended: returns for each of some completions, as token ids, whether it has ended.
        compiled: run the steps compiled, with all slots computed to the end.
        choose: gives the next tokens [B] from logits [B, V], the prompts' indices and the places in their completions: the
            most probable ones, or those that a `Sampler` draws.
    """

    model: PreTrainedModel
    prompts: Sequence[list[int]]
    max_new_tokens: int
    num_slots: int
    have_ended: Callable[[list[list[int]]], list[bool]]
    compiled: bool = False
    choose: Callable[[Tensor, list[int], list[int]], Tensor] = lambda logits, rows, places: logits.argmax(dim=-1)

    def __post_init__(self) -> None:
        self.device = self.model.device  # found by a walk through the modules: once
        rows = (_Row(index, prompt) for index, prompt in enumerate(self.prompts))
        self.waiting = deque(sorted(rows, key=lambda row: -row.start))  # what fills memory comes first
        self.num_slots = min(self.num_slots, len(self.prompts))
        self.slots = [_FREE] * self.num_slots  # fewer when compacted, up to as many when admitting
        self.cache = SlotCache(self.num_slots, self.device, self.model.dtype)

    @torch.no_grad()
    def __iter__(self) -> Iterator[list[tuple[int, list[int]]]]:
        """Yield the completions that end together, with their prompts' indices."""
        # Each turn admits what fits, then adds one token to every row. A completion is handed on as soon as it has ended, so
        # that the caller can write it down before anything else can go wrong.
        while self.waiting or self._used():
            ended = self._evict() if self._admit() else []  # a completion may end with its first token
            if not ended:
                self._step()
                ended = self._evict()
            if ended:
                yield [(row.index, row.completion) for row in ended]

    def _used(self) -> list[int]:
        """Return the slots that hold a row."""
        return [slot for slot, row in enumerate(self.slots) if row is not _FREE]

    def _admit(self) -> bool:
        """Admit waiting prompts to free slots, with the first token of their completions; return whether there were any."""
        waiting = len(self.waiting)
        self.slots += [_FREE] * (self.num_slots - len(self.slots))
        free = [slot for slot, row in enumerate(self.slots) if row is _FREE]
        if 4 * len(free) < self.num_slots:
            free = []  # not to each one alone, since reading a prompt takes a call of its own
        while free and self.waiting:
            # The first prompt's length is the batch's width, since the longest come first.
            size = min(len(self.waiting), max(1, PREFILL_TOKENS // self.waiting[0].start))
            self._prefill(free[:size])
            free = free[size:]
        if not self.compiled:
            self._compact()
        return len(self.waiting) < waiting

    def _compact(self) -> None:
        """Move the last rows to the free slots before them, and leave out the slots behind."""
        # Slots [a, -, c, -, e]: three rows, so that e moves to slot 1, and slots 3 and 4 are left out.
        used = self._used()
        size = len(used)
        targets = [slot for slot in range(size) if slot not in used]
        sources = [slot for slot in used if slot >= size]
        if targets:
            self.cache.move(sources, targets)
            for source, target in zip(sources, targets, strict=True):
                self.slots[target] = self.slots[source]
        del self.slots[size:]

    def _fit(self) -> None:
        """Make the cache as large as the rows."""
        # Rounded up, so that a cache is not resized with every token: each length costs a new view, or a new CUDA graph.
        longest = max(len(row.tokens) for row in self.slots)
        num_columns = rounded_up(longest, COLUMNS[self.compiled])
        if self.compiled:
            num_columns = max(num_columns, len(self.cache.columns))
        self.cache.resize(len(self.slots), num_columns)

    def _prefill(self, slots: list[int]) -> None:
        """Read the next waiting prompts into these slots of the cache, and begin their completions."""
        rows = [self.waiting.popleft() for _ in slots]
        for slot, row in zip(slots, rows, strict=True):
            self.slots[slot] = row
        self._fit()
        prompts = [torch.tensor(row.tokens) for row in rows]
        ids = pad_sequence(prompts, batch_first=True).to(self.device)  # [B, S]
        # Padding comes after the prompt, which does not see it; its columns are those of the completion. Prompts ab and x:
        # ids [[a, b], [x, 0]], positions [[0, 1], [0, 1]], and the logits are read at `ends` [1, 0].
        self._set(slots, torch.arange(ids.shape[1]).expand(len(rows), -1), is_prefill=True)
        ends = torch.tensor([row.start - 1 for row in rows])
        self._extend(rows, _logits(self.model, self.cache, ids, ends))

    def _set(self, slots: list[int], positions: Tensor, is_prefill: bool) -> None:
        """Tell the cache which tokens the next call computes: `positions` [B, S] of the rows in these slots."""
        self.cache.slots = torch.tensor(slots, device=self.device).unsqueeze(1)
        self.cache.positions = positions.to(self.device)
        self.cache.is_prefill = is_prefill

    def _step(self) -> None:
        """Add a token to every row."""
        self._fit()
        ids = torch.tensor([[row.tokens[-1]] for row in self.slots], device=self.device)  # [B, 1]
        positions = torch.tensor([[len(row.tokens) - 1] for row in self.slots])
        self._set(list(range(len(self.slots))), positions, is_prefill=False)
        step = _compiled(self.device.type) if self.compiled else _logits
        logits = step(self.model, self.cache, ids)  # [B, V]
        used = self._used()
        rows = [self.slots[slot] for slot in used]
        self._extend(rows, logits[used])

    def _extend(self, rows: list[_Row], logits: Tensor) -> None:
        """Add a token to the completion of each row, by its logits [B, V]."""
        indices = [row.index for row in rows]
        places = [len(row.tokens) - row.start for row in rows]
        tokens = self.choose(logits, indices, places)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.tokens.append(token)

    def _evict(self) -> list[_Row]:
        """Evict the rows whose completions have ended, and return them."""
        used = self._used()
        completions = [self.slots[slot].completion for slot in used]
        ended = []
        for slot, completion, has_ended in zip(used, completions, self.have_ended(completions), strict=True):
            if has_ended or len(completion) >= self.max_new_tokens:
                ended.append(self.slots[slot])
                self.slots[slot] = _FREE
        return ended


def _logits(model: PreTrainedModel, cache: SlotCache, ids: Tensor, ends: Tensor | None = None) -> Tensor:
    """Return the logits [B, V], in float32, after the tokens [B, S] of the cache's rows: the last ones, or those at `ends`."""
    # A token attends to the columns up to its own position: at position 2 of 5 columns [0, 0, 0, -inf, -inf]. A prompt's
    # columns are its own tokens, a step's all that are in use.
    columns = cache.columns[: cache.positions.shape[1]] if cache.is_prefill else cache.columns
    unseen = columns > cache.positions[:, None, :, None]  # [B, 1, S, columns]
    # As a number to add to the scores: each attention layer of each loop would have to convert a boolean mask.
    mask = torch.zeros_like(unseen, dtype=cache.dtype).masked_fill_(unseen, torch.finfo(cache.dtype).min)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": cache.positions}
    hidden = model.base_model(**given, **{CACHE: cache}, use_cache=True).last_hidden_state  # ready for the head
    last = hidden[:, -1] if ends is None else hidden[torch.arange(len(hidden)), ends]
    return model.get_output_embeddings()(last).float()


@cache
def _compiled(device_type: str) -> Callable:
    # Triton's kernels then round where the separate operations do, so that bfloat16 gives the same tokens.
    options = {"triton.cudagraphs": device_type == "cuda", "emulate_precision_casts": True}
    return torch.compile(_logits, options=options)


def why_unsupported(model: PreTrainedModel) -> str | None:
    """Return why `Decoder` cannot run a model, or None if it can.

    It needs what transformers' static caches need too, attention with a given mask [B, 1, S, columns], in all layers.
    """
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"attention by {attention!r} takes no mask of its own"
    if not model._can_compile_fullgraph:
        return f"{type(model).__name__} does not support static caches"
    if getattr(model.config, "prefix_lm", False):
        return "prompts attend in both directions"
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config).layers):
        return "some layers do not attend to all tokens"
    return None
