"""Greedy generation in left-padded batches, at unit gates, with a cache over all loops.

A completion does not depend on its batch: rows are padded on the left, masked, and cut at their own end. (In bfloat16 two
nearly equal logits may change places with the batch's shape.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from tqdm.auto import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from loopdropout_trainer.looped import applied_gates, find_looped_model


def generate_greedy(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
    batch_size: int = 16,
    stop_strings: Sequence[str] = (),
    progress: bool = True,
) -> list[str]:
    """Complete each prompt with the most probable tokens, at unit gates and at the depth `model.config.num_loops`.

    Args:
        model: looped causal language model, with or without an adapter. It is put back into training if it was in it.
        tokenizer: of the model; it is not changed, whatever its padding side, with or without a padding token.
        prompts: tokenized as the tokenizer does by default, as in training.
        max_new_tokens: most tokens of a completion.
        batch_size: rows that are generated together; prompts of similar length are.
        stop_strings: a completion ends before the earliest of them, and at an end token of the tokenizer or the model.
        progress: show a bar.

    Returns:
        The completions without prompts and special tokens, in the order of `prompts`.

    Raises:
        ValueError: if a prompt has no tokens.
    """
    completions = [""] * len(prompts)
    batches = generate_batches(model, tokenizer, prompts, max_new_tokens, batch_size, stop_strings, progress)
    for batch in batches:
        for index, completion in batch:
            completions[index] = completion
    return completions


def generate_batches(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
    batch_size: int = 16,
    stop_strings: Sequence[str] = (),
    progress: bool = True,
) -> Iterator[list[tuple[int, str]]]:
    """Do the same as `generate_greedy`, batch by batch: yield (index of the prompt, completion) pairs, longest first."""
    token_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for index, ids in enumerate(token_ids):
        if not ids:
            raise ValueError(f"Prompt {index} has no tokens; there is nothing to continue.")
    order = sorted(range(len(prompts)), key=lambda index: -len(token_ids[index]))  # a batch that fills memory is first
    with tqdm(total=len(prompts), unit=" prompts", disable=not progress) as bar:
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch = [token_ids[index] for index in indices]
            completions = _complete(model, tokenizer, batch, max_new_tokens, tuple(stop_strings))
            yield list(zip(indices, completions, strict=True))
            bar.update(len(indices))


def cut_before(text: str, stop_strings: Iterable[str]) -> str:
    """Return `text` up to the earliest occurrence of any of `stop_strings`."""
    return text[: min((text.find(stop) for stop in stop_strings if stop in text), default=len(text))]


class _StopStringsSeen(StoppingCriteria):
    """Ends a row when a stop string has appeared in its new text. Each token holds a byte or more of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: tuple[str, ...], prompt_length: int) -> None:
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.prompt_length = prompt_length
        self.window = max(len(stop.encode()) for stop in stop_strings) + 4

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        start = max(self.prompt_length, input_ids.shape[1] - self.window)
        tails = _decode(self.tokenizer, input_ids[:, start:].tolist())
        seen = [any(stop in tail for stop in self.stop_strings) for tail in tails]
        return torch.tensor(seen, device=input_ids.device)


@torch.no_grad()
def _complete(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    batch: list[list[int]],
    max_new_tokens: int,
    stop_strings: tuple[str, ...],
) -> list[str]:
    """Complete one batch of token lists."""
    looped = find_looped_model(model)
    end_ids = _end_ids(looped, tokenizer, stop_strings)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(end_ids), 0)
    length = max(map(len, batch))
    input_ids = torch.tensor([[pad_id] * (length - len(ids)) + ids for ids in batch], device=looped.device)  # [B, S]
    mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in batch], device=looped.device)
    criteria = [_StopStringsSeen(tokenizer, stop_strings, length)] if stop_strings else []
    with _inference(model, looped):
        rows = looped.generate(
            input_ids=input_ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=pad_id,
                eos_token_id=end_ids or None,
            ),
            stopping_criteria=StoppingCriteriaList(criteria),
        )[:, length:].tolist()
    rows = [row[: next((place for place, token in enumerate(row) if token in end_ids), len(row))] for row in rows]
    return [cut_before(text, stop_strings) for text in _decode(tokenizer, rows)]


def _decode(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_strings: tuple[str, ...]) -> list[int]:
    """Return the tokens that end a completion; a stop string that is a special token never shows in decoded text."""
    of_model = model.generation_config.eos_token_id
    added = tokenizer.get_added_vocab()
    ids = [tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])]
    ids += [added[stop] for stop in stop_strings if stop in added]
    return sorted({token for token in ids if token is not None})


@contextmanager
def _inference(model: torch.nn.Module, looped: PreTrainedModel) -> Iterator[None]:
    """Generate with unit gates, without dropout, and without what a checkpoint's generation config adds to greedy."""
    was_training, generation_config = model.training, looped.generation_config
    model.eval()
    looped.generation_config = GenerationConfig()  # `generate` fills unset fields from it: penalties, minimum lengths
    try:
        with applied_gates(looped.loop_state, torch.ones(looped.config.num_loops, 1)):
            yield
    finally:
        looped.generation_config = generation_config
        model.train(was_training)
