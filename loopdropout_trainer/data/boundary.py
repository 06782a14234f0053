"""The one tokenisation of examples, with a boundary between prompt and completion: training sees a prompt as evaluation does.

Tokenised as one text, the end of a prompt may merge with the completion's start: of "Answer:" and "The" some tokenizers
make the token ":The", which no answer to the prompt can begin with. Where that is wanted all the same (`target_prefix`), such
a token is a target.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from trl import get_training_chat_template
from trl.chat_template_utils import has_generation_markers

from loopdropout_trainer.data.rows import DataError
from loopdropout_trainer.settings.tokenizer import apply_chat_template, as_in_its_file


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
    tokenizer = as_in_its_file(tokenizer)
    batch = {name: list(column) for name, column in batch.items()}  # a dataset in numpy's format has arrays
    prompts = batch.get("prompt")
    texts = next(batch[name] for name in ("completion", "messages", "text") if name in batch)
    is_chat = not isinstance(texts[0], str)
    is_one_text = prompts is not None and all(batch.get("is_one_text", [False]))
    if not (is_chat or is_one_text):
        end = tokenizer.eos_token
        texts = [text if text.endswith(end) else text + end for text in texts]
    whole = texts if prompts is None else [first + rest for first, rest in zip(prompts, texts, strict=True)]
    if is_chat:
        ids, labels = _chat_ids(tokenizer, whole, assistant_only_loss)
    else:
        ids = labels = _text_ids(tokenizer, whole)
    if prompts is None:
        return {"input_ids": ids, "labels": labels}

    if is_chat:
        of_prompts, _ = _chat_ids(tokenizer, prompts, assistant_only_loss, add_generation_prompt=True)
    else:
        of_prompts = _text_ids(tokenizer, prompts)
    if is_one_text:
        ids = labels = [[*row, tokenizer.eos_token_id] for row in ids]
    elif not is_chat:
        rows = zip(of_prompts, texts, ids, strict=True)
        ids = labels = [_parted(tokenizer, *row) for row in rows]
    if completion_only_loss is not False:
        lengths = map(_common_prefix, of_prompts, ids)
        labels = [[-100] * length + row[length:] for row, length in zip(labels, lengths, strict=True)]
    return {"input_ids": ids, "labels": labels}


def _text_ids(tokenizer: PreTrainedTokenizerBase, texts: str | list[str], **options: Any) -> list:
    return tokenizer(texts, verbose=False, **options)[
        "input_ids"
    ]  # verbose: of texts that are longer than the model's


def _chat_ids(
    tokenizer: PreTrainedTokenizerBase, turns: list, assistant_only_loss: bool, **options: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of conversations, and the labels: those of the assistant's turns, or of everything."""
    if tokenizer.chat_template is None:
        raise DataError("The rows are conversations, and the tokenizer has no chat template: set `chat_template`.")
    if assistant_only_loss and not has_generation_markers(tokenizer.chat_template):
        options["chat_template"] = get_training_chat_template(tokenizer)
    options |= {"return_dict": True, "tokenizer_kwargs": {"verbose": False}}
    encoded = apply_chat_template(tokenizer, turns, return_assistant_tokens_mask=assistant_only_loss, **options)
    ids = encoded["input_ids"]
    if not assistant_only_loss:
        return ids, ids
    masks = encoded["assistant_masks"]
    return ids, [np.where(mask, row, -100).tolist() for row, mask in zip(ids, masks, strict=True)]


def _parted(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], completion: str, joined: list[int]
) -> list[int]:
    """Return the token ids of a prompt followed by those of its completion.

    Where these cannot be written one after the other (a tokenizer that begins every text with a space of its own), they are
    those of the joined text.
    """
    if joined[: len(prompt_ids)] == prompt_ids:
        return joined
    parted = prompt_ids + _text_ids(tokenizer, completion, add_special_tokens=False)
    text, joined_text = tokenizer.batch_decode([parted, joined], clean_up_tokenization_spaces=False)
    return parted if text == joined_text else joined


def _common_prefix(first: list[int], second: list[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    return len(os.path.commonprefix([first, second]))  # of any lists, item by item


def token_lengths(examples: Dataset, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the number of tokens [N] of each example; of a preference pair, that of the longer of its two answers."""
    lengths: list[int] = []
    for start in tqdm(range(0, len(examples), 512), "Counting tokens", unit="batch", disable=None):
        batch = examples[start : start + 512]
        answers = [batch[name] for name in ("chosen", "rejected") if name in batch]
        batches = [{**batch, "completion": answer} for answer in answers] or [batch]
        counts = [list(map(len, tokenise(part, tokenizer)["input_ids"])) for part in batches]
        lengths += np.max(counts, axis=0).tolist()
    return np.array(lengths, dtype=np.int64)
