"""The one tokenisation of examples, with a boundary between prompt and completion: training sees a prompt as evaluation does.

Tokenised as one text, the end of a prompt may merge with the completion's start: of "Answer:" and "The" some tokenizers
make the token ":The", which no answer to the prompt can begin with. Where that is wanted all the same (`target_prefix`), such
a token is a target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from trl import get_training_chat_template
from trl.chat_template_utils import has_generation_markers

from loopdropout_trainer.data.rows import DataError
from loopdropout_trainer.data.templates import apply_chat_template
from loopdropout_trainer.settings.tokenizer import as_in_its_file


def tokenise(
    batch: Mapping[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
) -> dict[str, list[list[int]]]:
    """Return `input_ids` and `labels` (-100: no target) of rows in one of TRL's formats, as the SFT trainer makes them.

    Args:
        batch: columns: `prompt` and `completion` (texts or messages), `messages`, or `text`; texts get the end token. Where
            `is_one_text` is true, prompt and completion are not tokenised apart.
        tokenizer: with the chat template that training uses.
        completion_only_loss: whether targets are the completion alone; default: for rows that have one.
        assistant_only_loss: whether targets are what the chat template marks as the assistant's.
    """
    tokenizer, prompts = as_in_its_file(tokenizer), batch.get("prompt")
    texts = next(batch[name] for name in ("completion", "messages", "text") if name in batch)
    if prompts is not None and all(batch.get("is_one_text", [False])):
        ids, lengths = one_text_ids(tokenizer, prompts, texts)
        labels = ids
    elif isinstance(texts[0], str):
        texts = [text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token for text in texts]
        if prompts is None:
            ids = labels = tokenizer(texts, verbose=False)["input_ids"]
        else:
            ids, lengths = prompt_completion_ids(tokenizer, prompts, texts)
            labels = ids
    else:
        if tokenizer.chat_template is None:
            raise DataError("The rows are conversations, and the tokenizer has no chat template: set `chat_template`.")
        options: dict[str, Any] = {"return_dict": True, "tokenizer_kwargs": {"verbose": False}}
        if assistant_only_loss and not has_generation_markers(tokenizer.chat_template):
            options["chat_template"] = get_training_chat_template(tokenizer)
        turns = texts if prompts is None else [first + rest for first, rest in zip(prompts, texts, strict=True)]
        found = apply_chat_template(tokenizer, turns, return_assistant_tokens_mask=assistant_only_loss, **options)
        ids = labels = found["input_ids"]
        if assistant_only_loss:
            pairs = [zip(*pair, strict=True) for pair in zip(ids, found["assistant_masks"], strict=True)]
            labels = [[token if marked else -100 for token, marked in pair] for pair in pairs]
        if prompts is not None:
            of_prompts = apply_chat_template(tokenizer, prompts, add_generation_prompt=True, **options)["input_ids"]
            lengths = list(map(common_prefix, of_prompts, ids))
    if prompts is not None and completion_only_loss is not False:
        labels = [[-100] * length + row[length:] for row, length in zip(labels, lengths, strict=True)]
    return {"input_ids": ids, "labels": labels}


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


def one_text_ids(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], completions: Sequence[str]
) -> tuple[list[list[int]], list[int]]:
    """Return the token ids of each prompt and its completion as one text, then the end token; and how many are the prompt's.

    Those are the ones up to which the prompt alone has the same: a token that spans both is none of them.
    """
    of_prompts = tokenizer(list(prompts), verbose=False)["input_ids"]
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    ids = [[*row, tokenizer.eos_token_id] for row in tokenizer(texts, verbose=False)["input_ids"]]
    return ids, list(map(common_prefix, of_prompts, ids))


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    alike = [one == other for one, other in zip(first, second, strict=False)]
    return alike.index(False) if False in alike else len(alike)


def token_lengths(examples: Dataset, tokenizer: PreTrainedTokenizerBase, batch_size: int = 512) -> np.ndarray:
    """Return the number of tokens [N] of each example; of a preference pair, that of the longer of its two answers."""
    lengths: list[int] = []
    for start in tqdm(range(0, len(examples), batch_size), "Counting tokens", unit="batch", disable=None):
        batch = examples[start : start + batch_size]
        answers = [batch[name] for name in ("chosen", "rejected") if name in batch]
        batches = [{**batch, "completion": each} for each in answers] or [batch]
        found = [map(len, tokenise(each, tokenizer)["input_ids"]) for each in batches]
        lengths += map(max, *found) if answers else found[0]
    return np.array(lengths, dtype=np.int64)
