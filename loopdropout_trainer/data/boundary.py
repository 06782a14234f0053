"""Token ids of a prompt and its completion with a boundary between them: training sees the prompt as evaluation does.

Tokenised as one text, the end of a prompt may merge with the completion's start: of "Answer:" and "The" some tokenizers
make the token ":The", which no answer to the prompt can begin with.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def prompt_completion_ids(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], completions: Sequence[str]
) -> tuple[list[list[int]], list[int]]:
    """Return the token ids of each prompt with its completion, and how many of them are the prompt's.

    Args:
        tokenizer: of the model, with its own special tokens.
        prompts: as evaluation gives them to the model.
        completions: with the end token's text, if one is trained on.

    Returns:
        Lists of ids, and the number of prompt ids at the start of each. Where both halves cannot be written one after the
        other (a tokenizer that begins every text with a space of its own), the ids are those of the joined text.
    """
    if not prompts:
        return [], []
    quiet = {"verbose": False}  # no warning that a text is longer than the model's
    of_prompts = tokenizer(list(prompts), **quiet)["input_ids"]
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    joined = tokenizer(texts, **quiet)["input_ids"]
    ids, lengths = [], []
    for prompt_ids, text_ids, completion in zip(of_prompts, joined, completions, strict=True):
        if text_ids[: len(prompt_ids)] != prompt_ids:
            apart = prompt_ids + tokenizer(completion, add_special_tokens=False, **quiet)["input_ids"]
            if _text(tokenizer, apart) == _text(tokenizer, text_ids):
                text_ids = apart
        ids.append(text_ids)
        lengths.append(common_prefix(prompt_ids, text_ids))
    return ids, lengths


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    return next(
        (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
