"""How many tokens TRL will train on for each example."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data.boundary import prompt_completion_ids
from loopdropout_trainer.data.rows import DataError


def token_lengths(examples: Dataset, tokenizer: PreTrainedTokenizerBase, batch_size: int = 512) -> np.ndarray:
    """Return the number of tokens [N] of each example, as `SFTTrainer` tokenises it, with the end token that it appends.

    Args:
        examples: in one of TRL's formats.
        tokenizer: with the chat template that training uses.
        batch_size: examples tokenised at once.

    Raises:
        DataError: if the examples are conversations and the tokenizer has no chat template.
    """
    lengths = np.empty(len(examples), dtype=np.int64)
    names = ("prompt", "completion", "messages", "text", "chosen", "rejected")
    examples = examples.select_columns([name for name in names if name in examples.column_names])
    for start in tqdm(range(0, len(examples), batch_size), "Counting tokens", unit="batch", disable=None):
        batch = examples[start : start + batch_size]
        lengths[start : start + batch_size] = [len(ids) for ids in _token_ids(batch, tokenizer)]
    return lengths


def _token_ids(batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if "chosen" in batch:  # a pair is as long as the longer of its two
        both = [_token_ids(_answered(batch, name), tokenizer) for name in ("chosen", "rejected")]
        return [max(pair, key=len) for pair in zip(*both, strict=True)]
    if "messages" in batch:
        conversations = batch["messages"]
    elif "text" in batch:
        return tokenizer([_ended(text, tokenizer) for text in batch["text"]], verbose=False)["input_ids"]
    elif isinstance(batch["prompt"][0], str):
        completions = [_ended(completion, tokenizer) for completion in batch["completion"]]
        return prompt_completion_ids(tokenizer, batch["prompt"], completions)[0]
    else:
        pairs = zip(batch["prompt"], batch["completion"], strict=True)
        conversations = [prompt + completion for prompt, completion in pairs]
    if tokenizer.chat_template is None:
        raise DataError(
            "The rows are conversations, and the tokenizer has no chat template: name one with `chat_template`, such as "
            "`chat_template: tulu2`."
        )
    quiet = {"verbose": False}  # no warning that a length is beyond the model's: lengths are what is being looked for
    return tokenizer.apply_chat_template(conversations, tokenizer_kwargs=quiet)["input_ids"]


def _answered(batch: dict[str, list[Any]], name: str) -> dict[str, list[Any]]:
    """Return the prompts with one of their two answers."""
    if "prompt" in batch:
        return {"prompt": batch["prompt"], "completion": batch[name]}
    return {"text" if isinstance(batch[name][0], str) else "messages": batch[name]}


def _ended(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    return text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token
