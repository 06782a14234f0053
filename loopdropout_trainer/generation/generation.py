"""Generation with a cache over all loops: greedily, the texts that transformers' `generate` gives, sooner; or sampled.

The gates are those in force: unit gates, or what `use_gates` applies around the call. A completion does not depend on the
rows beside it. (In bfloat16 two nearly equal logits may change places with the batch's shape and with the form of decoding.)

What it keeps in memory is estimated by arithmetic, `decoding_memory`:

    weights + copies of projections + libraries + keys and values of every (loop, layer) + work

The work is that of reading prompts: a few tensors as wide as the widest projection, and the logits of a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, takewhile
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.utils import logging

from loopdropout_trainer.lora import PreparedProjections
from loopdropout_trainer.checks import check_choice, shown_parts
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.generation.decoding import (
    ALLOCATED_COLUMNS,
    PREFILL_TOKENS,
    Decoder,
    Sampler,
    rounded_up,
    why_unsupported,
)
from loopdropout_trainer.hub import end_tokens
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.processes import LIBRARY_BYTES


logger = logging.get_logger(__name__)

WIDEST_TENSORS = 4
"""Tensors as wide as the widest projection that one layer holds at a time."""

LOGITS_BYTES = 12
"""Of a logit: as the head gives it, in float32, and while the most probable one is looked for."""


def decoding_memory(
    model: PreTrainedModel, lengths: Sequence[int], max_new_tokens: int, num_slots: int, copied_bytes: int = 0
) -> dict[str, int]:
    """Return the bytes that continuing prompts takes at most: of `libraries`, `weights`, `copies`, `keys and
    values` and `work`.

    Args:
        model: looped model, with its adapter if it has one.
        lengths: tokens of each prompt.
        max_new_tokens: most tokens of a completion.
        num_slots: rows that are decoded together.
        copied_bytes: of projections that are made ready for many calls (`PreparedProjections.copied_bytes`).
    """
    config = model.config
    itemsize = model.dtype.itemsize
    slots = min(num_slots, len(lengths))
    longest = max(lengths, default=0)
    columns = rounded_up(longest + max_new_tokens, ALLOCATED_COLUMNS)
    layers = getattr(config, "num_layer_runs", config.num_loops * config.num_hidden_layers)  # of each loop its own
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    linears = [model.get_submodule(name) for name in model.recurrent_linears()]
    widest = max(max(linear.in_features, linear.out_features) for linear in linears)
    read_together = max(longest, min(slots * longest, PREFILL_TOKENS))
    return {
        "libraries": int(LIBRARY_BYTES) if model.device.type == "cpu" else 0,
        "weights": sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        "copies": copied_bytes,
        "keys and values": 2 * layers * slots * columns * heads * width * itemsize,
        "work": read_together * widest * WIDEST_TENSORS * itemsize + slots * config.vocab_size * LOGITS_BYTES,
    }


def generate_greedy(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    batch_size: int = 16,
    stop_strings: Sequence[str] = (),
    progress: bool = True,
    decoding: str = "eager",
    keep: Callable[[int, str], Any] = lambda index, completion: None,
) -> list[str]:
    """Complete each prompt with the most probable tokens, at the depth `model.config.num_loops` and under the gates in force.

    Args:
        model: looped causal language model, with or without an adapter. It is put back into training if it was in it.
        tokenizer: of the model, whatever its padding side, with or without a padding token, neither of which is changed.
        prompts: texts, tokenized as the tokenizer does by default, as in training; or token ids.
        max_new_tokens: most tokens of a completion.
        batch_size: rows that are generated together.
        stop_strings: a completion ends before the earliest of them, and at an end token of the tokenizer or the model.
        progress: show a bar, and log before it how much memory decoding takes.
        decoding: `eager` (see `Decoder`), `compiled` (the same with compiled steps), or `generate` (transformers' own, which
            takes any model: one that does not support the first two gets it, and a line in the log says why).
        keep: is given the index of a prompt and its completion as soon as it is there; the longest prompts come first.

    Returns:
        The completions without prompts and special tokens, in the order of `prompts`.

    Raises:
        ValueError: if a prompt has no tokens, for another `decoding`, or under gates that differ between examples.
    """
    check_choice("decoding", decoding, DECODINGS)
    token_ids = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    if [] in token_ids:
        raise UserError(f"Prompt {token_ids.index([])} has no tokens; there is nothing to continue.")
    looped = find_looped_model(model)
    reason = None if decoding == "generate" else why_unsupported(looped)
    form = decoding if reason is None else "generate"
    prepared = None if form == "compiled" else PreparedProjections(looped)
    copied_bytes = 0 if prepared is None else prepared.copied_bytes
    if progress:
        sizes = decoding_memory(looped, list(map(len, token_ids)), max_new_tokens, batch_size, copied_bytes)
        logger.info(f"Memory of decoding: about {shown_parts(sizes)}.")
    logger.info(f"Decoding: {form}{f', because {reason}' if reason else ''} (`decoding`).")
    ends = _Ends(looped, tokenizer, stop_strings)
    decoder = DECODINGS[form](looped, token_ids, max_new_tokens, batch_size, ends)
    completions: dict[int, str] = {}
    with tqdm(total=len(prompts), unit=" prompts", disable=not progress) as bar:
        for finished in _advancing(decoder, model, looped, prepared):
            for index, tokens in finished:
                completions[index] = ends.text(tokens)
                keep(index, completions[index])
            bar.update(len(finished))
    return [completions[index] for index in range(len(prompts))]


def sample_completions(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    max_new_tokens: int,
    end_ids: Sequence[int],
    num_slots: int,
    compiled: bool = False,
) -> list[list[int]]:
    """Return the token ids of a sampled completion of each prompt, by continuous batching, under the gates in force.

    Args:
        model, prompts: as for `generate_greedy`; a model that continuous batching supports (`decoding.why_unsupported`).
        sampler: draws the tokens; its row i is prompt i.
        max_new_tokens: most tokens of a completion.
        end_ids: tokens that end a completion, and are its last one.
        num_slots, compiled: rows that are decoded together, and whether by compiled steps; see `Decoder`.
    """
    looped = find_looped_model(model)
    ends = frozenset(end_ids)
    have_ended = lambda rows: [tokens[-1] in ends for tokens in rows]
    decoder = Decoder(looped, list(map(list, prompts)), max_new_tokens, num_slots, have_ended, compiled, sampler)
    prepared = None if compiled else PreparedProjections(looped)
    finished = chain.from_iterable(_advancing(decoder, model, looped, prepared))
    return [tokens for _, tokens in sorted(finished)]


def _advancing(
    decoder: Iterable[list[tuple[int, list[int]]]],
    model: torch.nn.Module,
    looped: PreTrainedModel,
    prepared: PreparedProjections | None,
):
    """Yield lists of (index of the prompt, completion) as they come; while the caller has them, the model is as it was.

    `prepared` is None for compiled steps, which read the weights where they are, and join the products by themselves.
    """
    gates = looped.loop_state.gates
    if gates is not None and gates.shape[1] > 1:
        raise UserError(f"Generation applies the same gates to all prompts; those of {gates.shape[1]} are in force.")
    batches = iter(decoder)
    while True:
        was_training = model.training
        model.eval()
        try:
            with nullcontext() if prepared is None else prepared.in_use():
                finished = next(batches, None)
        finally:
            model.train(was_training)
        if finished is None:
            return
        yield finished


class _Ends:
    """Where completions end: at an end token, or before a stop string."""

    def __init__(self, looped: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stops = re.compile("|".join(map(re.escape, stops))) if stops else None
        added = tokenizer.get_added_vocab()  # a stop string that is a special token never shows in decoded text
        stopping = [added[stop] for stop in stops if stop in added]
        self.end_ids = sorted({*end_tokens(looped), tokenizer.eos_token_id, *stopping} - {None})
        # Each token holds a byte or more of the text.
        self.window = max((len(stop.encode()) for stop in stops), default=0) + 4

    def __call__(self, completions: list[list[int]]) -> list[bool]:
        """Tell which of these completions, not empty and not ended before their last token, have ended."""
        ended = [tokens[-1] in self.end_ids for tokens in completions]
        if self.stops is None:
            return ended
        tails = self._decode([tokens[-self.window :] for tokens in completions])
        return [end or bool(self.stops.search(tail)) for end, tail in zip(ended, tails, strict=True)]

    def text(self, completion: list[int]) -> str:
        """Return the completion's text, up to the earliest end."""
        answer = list(takewhile(lambda token: token not in self.end_ids, completion))
        text = self._decode([answer])[0]
        return text if self.stops is None else self.stops.split(text, maxsplit=1)[0]

    def _decode(self, rows: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@torch.no_grad()
def _generate(
    looped: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, batch_size: int, ends: _Ends
) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield transformers' own greedy completions, in left-padded batches: arguments and results as of `Decoder`."""
    # Padding is masked before a prompt, and cut off behind a completion: any token will do.
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": ends.end_ids or None}
    config = GenerationConfig(max_new_tokens=max_new_tokens, **options)
    device = looped.device
    left = {"batch_first": True, "padding_side": "left"}
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    for first in range(0, len(order), batch_size):
        indices = order[first : first + batch_size]
        rows = [torch.tensor(prompts[index]) for index in indices]
        ids = pad_sequence(rows, **left)  # [B, S]
        mask = pad_sequence([torch.ones_like(row) for row in rows], **left)
        length = ids.shape[1]
        ended = lambda ids, *_, start=length, **kwargs: torch.tensor(ends(ids[:, start:].tolist()), device=device)
        own = looped.generation_config
        looped.generation_config = GenerationConfig()  # `generate` fills unset fields from it, such as penalties
        try:
            answers = looped.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([ended]),
            )
        finally:
            looped.generation_config = own
        yield list(zip(indices, answers[:, length:].tolist(), strict=True))


DECODINGS = {"eager": Decoder, "compiled": partial(Decoder, compiled=True), "generate": _generate}
