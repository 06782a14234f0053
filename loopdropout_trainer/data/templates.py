"""Prompt templates by name, chat templates by name, and the tokenizer that a recipe asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from loopdropout_trainer.data.rows import BadRow
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.command import user_supplied


PROMPT_TEMPLATES = {
    # Taori et al. 2023, the variant without an input field.
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:"
    ),
    # How lm-eval's `gsm8k` task asks.
    "question": "Question: {question}\nAnswer:",
}


CHAT_TOKENS = {
    # The tokens that a chat needs, by chat template. What their tokenizers name is for text without turns: Ouro's, for
    # example, has <|endoftext|> as all three, and would not stop at the end of a turn.
    "ouro": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "ouro_thinking": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "nanbeige": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<unk>"},
    "huginn": {"bos_token": "<|begin_text|>", "eos_token": "<|end_turn|>", "pad_token": "<|pad|>"},
}


def render_prompt(template: str, row: Mapping[str, Any]) -> str:
    """Fill the {column} fields of a template (a name from `PROMPT_TEMPLATES`, or its text) from a row.

    Braces around anything but a plain name are text.

    Raises:
        BadRow: if the row lacks a column that the template names, or the column is not text or a number.
    """
    return re.sub(r"\{(\w+)\}", lambda match: _cell(row, match[1]), PROMPT_TEMPLATES.get(template, template))


def _cell(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        raise BadRow(f"missing field `{column}`", f" (it has {', '.join(f'`{key}`' for key in row)})")
    if not isinstance(value, (str, int, float)):
        raise BadRow(f"field `{column}` is not text", f" (a {type(value).__name__})")
    return str(value)


def chat_template(name_or_path: str) -> str:
    """Return the text of a chat template: one of this package, by its name, or a Jinja file.

    Raises:
        ValueError: if there is neither.
    """
    packaged = Path(__file__).with_name("chat_templates") / f"{name_or_path}.jinja"
    path = packaged if packaged.is_file() else Path(name_or_path)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in packaged.parent.glob("*.jinja")))
        raise ValueError(f"`chat_template` must be {names}, or the path of a Jinja file; got {name_or_path!r}.")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`chat_template` {name_or_path} cannot be read: {error}.") from None


def load_tokenizer(model: ModelArguments, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with the recipe's chat template if it names one, and with a padding token.

    Ouro's configuration names no padding token: the end token serves, since labels and attention mask tell them apart.
    A chat template of this package brings its special tokens with it.

    Args:
        model: whose tokenizer.
        trust_remote_code: whether the tokenizer may run code of its own; nobody is asked.

    Raises:
        ValueError: if there is none, it cannot be read, it names no end token, or the template's turns do not end with it.
    """
    with user_supplied(f"The tokenizer of {model.model_name_or_path} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(
            model.model_name_or_path, revision=model.model_revision, trust_remote_code=trust_remote_code
        )
    if model.chat_template is not None:
        set_chat_template(tokenizer, model.chat_template)
    if tokenizer.eos_token is None:
        raise ValueError(f"The tokenizer of {model.model_name_or_path} names no `eos_token`, which ends every answer.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def set_chat_template(tokenizer: PreTrainedTokenizerBase, name_or_path: str) -> None:
    """Give a tokenizer a chat template, and the special tokens that belong to it; both are saved with the tokenizer.

    Args:
        name_or_path: a template of this package, or a Jinja file.

    Raises:
        ValueError: if the tokenizer lacks a token of the template, or its turns do not end with the end token.
    """
    tokenizer.chat_template = chat_template(name_or_path)
    known = tokenizer.get_vocab()
    for role, token in CHAT_TOKENS.get(name_or_path, {}).items():
        if token not in known:
            raise ValueError(
                f"`chat_template: {name_or_path}` needs the token {token}, which the tokenizer of "
                f"{tokenizer.name_or_path or 'the model'} does not have."
            )
        setattr(tokenizer, role, token)
    check_turn_end(tokenizer)


def check_turn_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the last token that a chat template trains in an assistant's turn is the one that generation stops at.

    A template without generation marks is left unchecked.

    Raises:
        ValueError: naming both tokens.
    """
    if "generation" not in (tokenizer.chat_template or ""):
        return
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    encoded = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    trained = [id for id, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    if not trained or trained[-1] != tokenizer.eos_token_id:
        last = tokenizer.decode(trained[-1:]) if trained else "nothing"
        raise ValueError(
            f"The chat template ends an assistant's turn with {last!r}, and generation stops at {tokenizer.eos_token!r}: set "
            "`eos_token` in the recipe to the template's."
        )
