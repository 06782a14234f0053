"""How many tokens TRL will train on for each example."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data.boundary import prompt_completion_ids
from loopdropout_trainer.data.rows import DataError
from loopdropout_trainer.data.templates import apply_chat_template


def token_lengths(examples: Dataset, tokenizer: PreTrainedTokenizerBase, batch_size: int = 512) -> np.ndarray:
    """Return the number of tokens [N] of each example, as `SFTTrainer` tokenises it, with the end token that it appends.

    Args:
        examples: in one of TRL's formats.
        tokenizer: with the chat template that training uses.
        batch_size: examples tokenised at once.

    Raises:
        DataError: if the examples are conversations and the tokenizer has no chat template.
    """
    lengths: list[int] = []
    names = ("prompt", "completion", "messages", "text", "chosen", "rejected")
    examples = examples.select_columns([name for name in names if name in examples.column_names])
    for start in tqdm(range(0, len(examples), batch_size), "Counting tokens", unit="batch", disable=None):
        lengths += _lengths(examples[start : start + batch_size], tokenizer)
    return np.array(lengths, dtype=np.int64)


def _lengths(batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if "chosen" in batch:  # a pair is as long as the longer of its two answers
        pairs = [_lengths(_answered(batch, name), tokenizer) for name in ("chosen", "rejected")]
        return list(map(max, *pairs))
    texts = batch.get("messages") or batch.get("text") or batch["completion"]
    if isinstance(texts[0], str):
        texts = [text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token for text in texts]
        if "prompt" in batch:
            return list(map(len, prompt_completion_ids(tokenizer, batch["prompt"], texts)[0]))
        return list(map(len, tokenizer(texts, verbose=False)["input_ids"]))
    if tokenizer.chat_template is None:
        raise DataError(
            "The rows are conversations, and the tokenizer has no chat template: name one with `chat_template`, such as "
            "`chat_template: tulu2`."
        )
    if "prompt" in batch:
        texts = [prompt + completion for prompt, completion in zip(batch["prompt"], texts, strict=True)]
    quiet = {"verbose": False}  # no warning that a length is beyond the model's: lengths are what is being looked for
    return list(map(len, apply_chat_template(tokenizer, texts, tokenizer_kwargs=quiet)["input_ids"]))


def _answered(batch: dict[str, list[Any]], name: str) -> dict[str, list[Any]]:
    """Return the prompts with one of their two answers."""
    if "prompt" in batch:
        return {"prompt": batch["prompt"], "completion": batch[name]}
    return {"text" if isinstance(batch[name][0], str) else "messages": batch[name]}
