"""The chat template that `chat_template_path` names: a file, one of the package's, or the one of another tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import cached_file

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.tokenizers import CHAT_TEMPLATES, set_chat_template, template_hint, unknown_template


def choose_template(args: TrainingArguments, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Set the chat template that `chat_template_path` names, if it is a file or one of the package's templates.

    Returns:
        The name of a tokenizer or a model, whose template and tokens TRL copies, or None.
    """
    name = getattr(args, "chat_template_path", None)
    if name is None:
        return None
    if name in CHAT_TEMPLATES or Path(name).is_file():
        set_chat_template(tokenizer, name, "chat_template_path")
        return None
    others = "a Jinja file, or the name of a tokenizer with a chat template"
    is_mistyped = "/" not in name and template_hint(name) != ""
    if is_mistyped and not Path(name).exists():  # without a network, asking the Hub would take long
        raise unknown_template("chat_template_path", name, others)
    try:
        cached_file(name, "tokenizer_config.json")
    except (OSError, ValueError):
        raise unknown_template("chat_template_path", name, others) from None
    return name


def load_template_source(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer whose chat template TRL copies, because `chat_template_path` names it. TRL loads it so, too."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.chat_template is None:
        raise UserError(
            f"`chat_template_path` must name a tokenizer with a chat template, got {name!r}, which has none."
        )
    return tokenizer
