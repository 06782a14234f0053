"""Prompt templates by name, chat templates by name, and the tokenizer that a recipe asks for."""

from __future__ import annotations

import re
from itertools import compress
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from trl import get_training_chat_template
from trl.chat_template_utils import has_generation_markers

from loopdropout_trainer.checks import shown
from loopdropout_trainer.data.rows import BadRow, Columns, present
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.tokenizer import read_tokenizer


PROMPT_TEMPLATES = {
    # Taori et al. 2023, the variant without an input field.
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:"
    ),
    # As in lm-eval's `gsm8k` task.
    "question": "Question: {question}\nAnswer:",
}

_CHATML = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
_OURO = {**_CHATML, "pad_token": "<|endoftext|>"}
CHAT_TOKENS = {
    # The tokens that a chat needs, by chat template. What their tokenizers name is for text without turns: Ouro's, for
    # example, has <|endoftext|> as all three, and would not stop at the end of a turn.
    "ouro": _OURO,
    "ouro_thinking": _OURO,
    "nanbeige": {**_CHATML, "pad_token": "<unk>"},
    "huginn": {"bos_token": "<|begin_text|>", "eos_token": "<|end_turn|>", "pad_token": "<|pad|>"},
}

_TEMPLATES = Path(__file__).with_name("chat_templates")
_TURNS = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]  # to look at templates

_FIELD = re.compile(r"\{(\w+)\}")  # braces around anything but a plain name are text


def prompt_fields(template: str) -> list[str]:
    """Return the columns that a prompt template (a name from `PROMPT_TEMPLATES`, or its text) is filled from."""
    return _FIELD.findall(PROMPT_TEMPLATES.get(template, template))


def render_prompt(template: str, row: Columns) -> str:
    """Fill the {column} fields of a template (a name from `PROMPT_TEMPLATES`, or its text) from a row.

    Raises:
        BadRow: if the row lacks a column that the template names, or the column is not text or a number.
    """

    for name in prompt_fields(template):
        value = present(row, name)
        if not isinstance(value, (str, int, float)):
            raise BadRow(f"field `{name}` is not text", f" (a {type(value).__name__})")
    return _FIELD.sub(lambda match: str(row[match[1]]), PROMPT_TEMPLATES.get(template, template))


def load_tokenizer(
    model: ModelArguments,
    trust_remote_code: bool = False,
    chat_template_path: str | None = None,
    eos_token: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with the recipe's chat template if it names one, and with a padding token.

    Ouro's configuration names no padding token: the end token serves, since labels and attention mask tell them apart.
    A chat template of this package brings its special tokens with it.

    Args:
        model: whose tokenizer.
        trust_remote_code: whether the tokenizer may run code of its own; nobody is asked.
        chat_template_path, eos_token: of `SFTConfig`: another name for `chat_template`; the token that ends answers.

    Raises:
        OSError, ValueError: if there is no such tokenizer or template, or no token that ends answers.
    """
    with user_supplied(f"The tokenizer of {model.model_name_or_path} cannot be loaded"):
        tokenizer = read_tokenizer(model.model_name_or_path, model.model_revision, trust_remote_code=trust_remote_code)
        tokenizer("a")  # it may read a field of its configuration only now
    if model.chat_template and chat_template_path:
        raise UserError("`chat_template` and `chat_template_path` exclude each other: give one of them.")
    template = chat_template_path if model.chat_template is None else model.chat_template
    if template is None:
        _set_end_token(tokenizer, eos_token)
    else:
        set_chat_template(tokenizer, template, eos_token)
    if tokenizer.eos_token is None:
        raise UserError(f"The tokenizer of {model.model_name_or_path} names no `eos_token`, which ends every answer.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _set_end_token(tokenizer: PreTrainedTokenizerBase, eos_token: str | None) -> None:
    if eos_token is None:
        return
    if eos_token not in tokenizer.get_vocab():
        raise UserError(f"`eos_token` {eos_token} is no token of the tokenizer of {_owner(tokenizer)}.")
    tokenizer.eos_token = eos_token


def _owner(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or "the model"


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedConfig) -> None:
    """Raise ValueError for a tokenizer with a token that a model of this configuration has no embedding of."""
    vocabulary = tokenizer.get_vocab()
    token = max(vocabulary, key=vocabulary.get)
    index = vocabulary[token]
    if index >= model.vocab_size:
        raise UserError(
            f"The tokenizer's token {token!r} has the id {index:,}, and the model's embedding has {model.vocab_size:,} rows: "
            "give the tokenizer that belongs to the model, or first resize the model's embedding and save it."
        )


def check_template_source(path: str | None, tokenizer: PreTrainedTokenizerBase, model: PreTrainedConfig) -> None:
    """Raise ValueError for a tokenizer, named by `chat_template_path`, for whose tokens TRL would change the embedding.

    TRL adds the tokens that the model's tokenizer lacks, and others until their number divides by 64; their embeddings would
    have to be trained, and only the adapter is.
    """
    if path is None or path.endswith((".jinja", ".j2")):
        return
    with user_supplied(f"`chat_template_path` {path} cannot be loaded"):
        added = {str(token) for token in read_tokenizer(path).added_tokens_decoder.values()}
    vocabulary = tokenizer.get_vocab()
    missing = sorted(added - vocabulary.keys())
    if missing or len(vocabulary) != model.vocab_size or model.vocab_size % 64:
        what = f"its {', '.join(missing[:3])}" if missing else "as many tokens as divide by 64"
        raise UserError(
            f"`chat_template_path` {path} is a tokenizer, and TRL would give the model {what}, untrained, since only the "
            "adapter is trained. Give a Jinja file with a template of tokens that the model has, or first extend the model by "
            "these tokens and train it."
        )


def set_chat_template(tokenizer: PreTrainedTokenizerBase, name_or_path: str, eos_token: str | None = None) -> None:
    """Give a tokenizer a chat template, and the special tokens that belong to it; both are saved with the tokenizer.

    Args:
        tokenizer: to be changed.
        name_or_path: of the template; see `chat_template`.
        eos_token: that ends its turns, if neither the template's nor the tokenizer's own.

    Raises:
        ValueError: if the template is broken, the tokenizer lacks a token of it, or its turns do not end with the end token.
    """
    tokenizer.chat_template = chat_template(name_or_path)
    for role, token in CHAT_TOKENS.get(name_or_path, {}).items():
        if token not in tokenizer.get_vocab():
            owner = _owner(tokenizer)
            raise UserError(f"`chat_template: {name_or_path}` needs {token}, which the tokenizer of {owner} lacks.")
        setattr(tokenizer, role, token)
    _set_end_token(tokenizer, eos_token)
    check_turn_end(tokenizer)


def chat_template(name_or_path: str) -> str:
    """Return the text of a chat template: one of this package, by its name, or a Jinja file."""
    packaged = {file.stem: file for file in sorted(_TEMPLATES.glob("*.jinja"))}
    path = packaged.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        names = ", ".join(packaged)
        raise UserError(f"A chat template must be {names}, or the path of a Jinja file; got {name_or_path!r}.")
    with user_supplied(f"`chat_template` {name_or_path} cannot be read"):
        return path.read_text(encoding="utf-8")


def apply_chat_template(tokenizer: PreTrainedTokenizerBase, turns: list, **options: Any) -> Any:
    """Return `tokenizer.apply_chat_template(turns, ...)` of a template that may be anybody's.

    It runs in transformers' sandbox, Jinja's `ImmutableSandboxedEnvironment`: it reaches no file, module or attribute of
    Python's own, and changes nothing that it is given. It can still take its time and memory, as any computation can.

    Raises:
        SetupError: if it is broken, refuses these turns, or tries any of that; one sentence.
    """
    with user_supplied(f"The chat template of {_owner(tokenizer)} cannot be applied"):
        return tokenizer.apply_chat_template(turns, **options)


def check_turn_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError unless a template shows both turns, and trains the token that generation stops at in the second.

    Of a template without generation marks the end is left to `answer_end`.
    """
    text = apply_chat_template(tokenizer, _TURNS, tokenize=False)
    if not re.search("question.*answer", text, re.DOTALL):
        raise UserError(f"The chat template does not show what is said: {shown(_TURNS)} becomes {shown(text)}.")
    if not has_generation_markers(tokenizer.chat_template):
        return
    end = _trained_ids(tokenizer)[-1:]
    if end != [tokenizer.eos_token_id]:
        raise UserError(
            f"The chat template ends an assistant's turn with {tokenizer.decode(end)!r}, and generation stops at "
            f"{tokenizer.eos_token!r}: set `eos_token` to the template's."
        )


def answer_end(tokenizer: PreTrainedTokenizerBase, row: Columns, assistant_only_loss: bool = False) -> int | None:
    """Return the id of the token that ends every answer of rows like this one, so that generation can stop there.

    In conversations that is the first special token which the template writes after what the assistant says; elsewhere the
    end token, which is put after every text (None: the tokenizer names none).

    Args:
        tokenizer: with the chat template that training uses.
        row: in one of TRL's formats.
        assistant_only_loss: whether targets are what the template marks as the assistant's.

    Raises:
        ValueError: if the template ends no turn with such a token, or does not mark it as a target.
    """
    answer = next((row[name] for name in ("messages", "conversations", "completion", "chosen") if name in row), None)
    if not (isinstance(answer, list) and tokenizer.chat_template):
        return tokenizer.eos_token_id
    _, _, rest = apply_chat_template(tokenizer, _TURNS, tokenize=False).rpartition("answer")
    special = [token for token in (tokenizer.eos_token, *tokenizer.get_added_vocab()) if token in rest]
    end = min(special, key=rest.find, default=None)
    if end is None:
        raise UserError(
            f"The chat template ends an assistant's turn with {shown(rest)}, without a special token at which generation "
            "could stop: let it write `eos_token` there, or choose another one (`chat_template`)."
        )
    end_id = tokenizer.convert_tokens_to_ids(end)
    if assistant_only_loss and end_id not in _trained_ids(tokenizer):
        raise UserError(
            f"The chat template's generation marks leave out {end}, so that answers would be trained without an end: put it "
            "inside of them, or choose another template (`chat_template`)."
        )
    return end_id


def _trained_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a conversation that the template, or TRL's variant of one without marks, marks as targets."""
    own = tokenizer.chat_template
    template = own if has_generation_markers(own) else get_training_chat_template(tokenizer)
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": template}
    encoded = apply_chat_template(tokenizer, _TURNS, **options)
    return list(compress(encoded["input_ids"], encoded["assistant_masks"]))
