"""Token ids of a prompt and its completion with a boundary between them: training sees the prompt as evaluation does.

Tokenised as one text, the end of a prompt may merge with the completion's start: of "Answer:" and "The" some tokenizers
make the token ":The", which no answer to the prompt can begin with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data.rows import DataError
from loopdropout_trainer.data.templates import apply_chat_template


def prompt_completion_ids(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], completions: Sequence[str]
) -> tuple[list[list[int]], list[int]]:
    """Return the token ids of each prompt with its completion (and its end token's text), and how many are the prompt's.

    Where both halves cannot be written one after the other (a tokenizer that begins every text with a space of its own),
    the ids are those of the joined text.
    """
    if not prompts:
        return [], []
    # verbose: no warning that a text is longer than the model's
    of_prompts = tokenizer(list(prompts), verbose=False)["input_ids"]
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    joined = tokenizer(texts, verbose=False)["input_ids"]
    decode = lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    ids, lengths = [], []
    for prompt_ids, text_ids, completion in zip(of_prompts, joined, completions, strict=True):
        if text_ids[: len(prompt_ids)] != prompt_ids:
            apart = prompt_ids + tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]
            if decode(apart) == decode(text_ids):
                text_ids = apart
        ids.append(text_ids)
        lengths.append(common_prefix(prompt_ids, text_ids))
    return ids, lengths


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    alike = [one == other for one, other in zip(first, second, strict=False)]
    return alike.index(False) if False in alike else len(alike)


def token_lengths(examples: Dataset, tokenizer: PreTrainedTokenizerBase, batch_size: int = 512) -> np.ndarray:
    """Return the number of tokens [N] of each example, as `SFTTrainer` tokenises it, with the end token that it appends."""
    lengths: list[int] = []
    for start in tqdm(range(0, len(examples), batch_size), "Counting tokens", unit="batch", disable=None):
        batch = examples[start : start + batch_size]
        if "chosen" in batch:  # a pair is as long as the longer of its two answers
            pairs = [_lengths(batch.get("prompt"), batch[name], tokenizer) for name in ("chosen", "rejected")]
            lengths += map(max, *pairs)
        else:
            texts = next(batch[name] for name in ("completion", "messages", "text") if name in batch)
            lengths += _lengths(batch.get("prompt"), texts, tokenizer)
    return np.array(lengths, dtype=np.int64)


def _lengths(prompts: list[Any] | None, texts: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if isinstance(texts[0], str):
        texts = [text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token for text in texts]
        if prompts is None:
            return list(map(len, tokenizer(texts, verbose=False)["input_ids"]))
        return list(map(len, prompt_completion_ids(tokenizer, prompts, texts)[0]))
    if tokenizer.chat_template is None:
        raise DataError("The rows are conversations, and the tokenizer has no chat template: set `chat_template`.")
    if prompts is not None:
        texts = [prompt + completion for prompt, completion in zip(prompts, texts, strict=True)]
    return list(map(len, apply_chat_template(tokenizer, texts, tokenizer_kwargs={"verbose": False})["input_ids"]))
