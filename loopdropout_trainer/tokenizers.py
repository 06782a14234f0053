"""Tokenizers that split text as their `tokenizer.json` says, and chat templates.

`AutoTokenizer` of transformers 5 rebuilds some tokenizers from their vocabulary, by the class that `tokenizer_config.json`
names, such as `GPT2Tokenizer`. It silently drops the `pre_tokenizer` of `tokenizer.json` (huggingface/transformers issues
45812 and 45920), so that Ouro and OLMo-2 split digits differently. `load_tokenizer` reads `tokenizer.json` unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from transformers import BatchEncoding, GenerationConfig, PreTrainedTokenizerBase, TokenizersBackend
from transformers.utils import cached_file, logging

from loopdropout_trainer.errors import (
    UserError,
    as_path,
    closest_match,
    first_line,
    short_repr,
)
from loopdropout_trainer.files import checkpoint_step, is_checkpoint, model_path, public_name, read_text
from loopdropout_trainer.hints import file_hint
from loopdropout_trainer.hub import TOKENIZER_FILES, download_files, split_revision
from loopdropout_trainer.keywords import explain_unknown
from loopdropout_trainer.limits import bounded_rendering, check_length, end_rendering, render_chat


if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.get_logger(__name__)

_CHATML = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
CHAT_TOKENS = {
    "ouro": {**_CHATML, "pad_token": "<|endoftext|>"},
    "ouro_thinking": {**_CHATML, "pad_token": "<|endoftext|>"},
    "nanbeige": {**_CHATML, "pad_token": "<unk>"},
    "huginn": {"bos_token": "<|begin_text|>", "eos_token": "<|end_turn|>", "pad_token": "<|pad|>"},
}
"""Special tokens of a chat, by chat template. The published tokenizers name the special tokens of plain text."""

OTHER_NAMES = {"ouro": "ChatML"}
"""Names of chat templates elsewhere, by their names here."""

TOKENIZERS = {"SandyResearch/parcae-": "SandyResearch/parcae-tokenizer"}
"""Tokenizers that are not with their models, by the beginning of the models' names."""

PLAIN_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
"""Special tokens of a tokenizer that is published without its configuration, as Parcae's."""

CHAT_TEMPLATES = {path.stem: path for path in sorted(Path(__file__).with_name("chat_templates").glob("*.jinja"))}

_SAMPLES = ("  7", "In 2023,  7 + 12345 = 12352.", "Don't  stop", " Ünï\n\n\tcode ")


class PreTrainedTokenizerFast(TokenizersBackend):
    """A tokenizer that is read from `tokenizer.json` unchanged, also by transformers 4 after `save_pretrained`.

    Using it does not change it. Other tokenizers of transformers keep the padding and the truncation of their last call, and
    save them in `tokenizer.json`. Its chat template, which may be a stranger's, ends in bounded time and memory.
    """

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """Write a conversation as the chat template does. The limits end where the tokenizer gets the text."""
        with bounded_rendering(conversation):
            written = super().apply_chat_template(conversation, *args, **kwargs)
        if isinstance(written, str):
            check_length(written)
        return written

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> BatchEncoding:
        """Tokenize texts, and restore the padding and the truncation of `tokenizer.json`."""
        end_rendering([text] if isinstance(text, str) else text)
        padding, truncation = self.backend_tokenizer.padding, self.backend_tokenizer.truncation
        try:
            return super()._encode_plus(text, *args, **kwargs)
        finally:
            if padding is None:
                self.backend_tokenizer.no_padding()
            else:
                self.backend_tokenizer.enable_padding(**padding)
            if truncation is None:
                self.backend_tokenizer.no_truncation()
            else:
                self.backend_tokenizer.enable_truncation(**truncation)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Save the tokenizer with the field names that transformers 4 reads too."""
        files = super().save_pretrained(save_directory, *args, **kwargs)
        path = Path(save_directory, "tokenizer_config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
        config["model_input_names"] = self.model_input_names  # transformers 4 adds `token_type_ids` by default
        if "extra_special_tokens" in config:
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
        return files


def check_tokenizer(tokenizer: Any, name: str = "processing_class", *, is_optional: bool = False) -> None:
    """Raise UserError if a tokenizer is missing, a name or a number. Tokenizers and processors can be called.

    Args:
        tokenizer: Value of the argument.
        name: Name of the argument.
        is_optional: Whether None is accepted, because the caller finds a tokenizer then.
    """
    if tokenizer is None and is_optional:
        return
    if isinstance(tokenizer, str | Path):
        raise UserError(
            f"`{name}` must be a tokenizer, got the name {str(tokenizer)!r}. Load it by `load_tokenizer({str(tokenizer)!r})`."
        )
    if not callable(tokenizer):
        raise UserError(f"`{name}` must be a tokenizer, as from `load_tokenizer`, got {short_repr(tokenizer)}.")


@explain_unknown
def load_tokenizer(
    name_or_path: str | Path,
    revision: str | None = None,
    chat_template: str | None = None,
    eos_token: str | None = None,
) -> PreTrainedTokenizerFast:
    """Load a tokenizer from its `tokenizer.json`.

    The end token is the padding token if the tokenizer names none.

    Args:
        name_or_path: Hub name or folder of a model, or `tiny-ouro`.
        revision: Branch, tag or commit on the Hub. It can also follow the name after an `@`.
        chat_template: Chat template in place of the tokenizer's own, as in `set_chat_template`.
        eos_token: Token that ends answers. Default: the chat template's, else the tokenizer's own.

    Raises:
        UserError: if the tokenizer or the template cannot be loaded, or if no token ends answers.
    """
    as_path("name_or_path", name_or_path)
    name_or_path = model_path(name_or_path)
    if Path(name_or_path).is_dir() and not Path(name_or_path, "tokenizer.json").is_file():
        fix = _advise_saving(Path(name_or_path))
        raise UserError(f"{name_or_path} must have a tokenizer, but it has no tokenizer.json. {fix}")
    for beginning, tokenizer_name in TOKENIZERS.items():
        if str(name_or_path).startswith(beginning):  # the revision is one of the model's repository
            name_or_path, revision = tokenizer_name, None
    tokenizer = _read_tokenizer(name_or_path, revision)
    if tokenizer.eos_token is None and PLAIN_TOKENS["eos_token"] in tokenizer.get_vocab():
        for name, token in PLAIN_TOKENS.items():
            _set_token(tokenizer, name, token)
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    if eos_token is not None:
        _set_token(tokenizer, "eos_token", eos_token)
    check_end_token(tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _advise_saving(folder: Path) -> str:
    """Return how a folder gets a tokenizer. That of a training in Python has one after `save_model`."""
    checkpoints = [path for path in folder.glob("*") if is_checkpoint(path) and (path / "tokenizer.json").is_file()]
    if checkpoints:
        newest = max(checkpoints, key=checkpoint_step)
        return f"Call `trainer.save_model()`, which saves it with the adapter, or use {newest}."
    return (
        "Save a merged model with its tokenizer by `merge_and_save(model, folder, tokenizer)`, and another model's by "
        "`tokenizer.save_pretrained(folder)`."
    )


def _read_tokenizer(name_or_path: str | Path, revision: str | None) -> PreTrainedTokenizerFast:
    """Return the tokenizer in a folder or repository. Raise UserError if it cannot be loaded."""
    if not Path(name_or_path).is_dir():  # transformers would ask for each file for half a minute without a connection
        name_or_path, revision = split_revision(str(name_or_path), revision)
        _, revision = download_files(name_or_path, revision, "tokenizer", TOKENIZER_FILES)
    try:
        return PreTrainedTokenizerFast.from_pretrained(
            name_or_path, revision=revision or "main", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise UserError(f"The tokenizer of {name_or_path} cannot be loaded: {first_line(error)}") from None


def set_chat_template(tokenizer: PreTrainedTokenizerBase, name_or_path: str, field: str = "chat_template") -> None:
    """Set a tokenizer's chat template, and its special tokens if the template is one of `CHAT_TOKENS`.

    Args:
        tokenizer: Tokenizer to change.
        name_or_path: Name of one of the package's templates (`CHAT_TEMPLATES`), or path of a Jinja file.
        field: Field that names it, in messages.
    """
    path = CHAT_TEMPLATES.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise unknown_template(field, name_or_path, "a Jinja file")
    missing = _missing_tokens(tokenizer, name_or_path)
    if missing:
        raise UserError(
            f"`{field}` must be one whose tokens the tokenizer {_name_of(tokenizer)} has, got {name_or_path!r}, "
            f"which needs {', '.join(missing)}. The chat template tulu2 needs no tokens of its own."
        )
    tokenizer.chat_template = read_text(path)
    for name, token in CHAT_TOKENS.get(name_or_path, {}).items():
        setattr(tokenizer, name, token)


def _name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of a tokenizer in messages."""
    return public_name(tokenizer.name_or_path)


def _missing_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> list[str]:
    """Return the special tokens of a chat template that a tokenizer lacks."""
    tokens = CHAT_TOKENS.get(template, {})
    return sorted({*tokens.values()}.difference(tokenizer.get_vocab()))


def template_hint(name: str) -> str:
    """Return the end of a message about an unknown chat template: the one of the package that is meant, or "".

    It is meant by a mistyped name, or by the name that people know elsewhere.
    """
    known = {other.lower(): template for template, other in OTHER_NAMES.items()}
    return closest_match(known.get(name.lower(), name), CHAT_TEMPLATES)


def unknown_template(field: str, name: str, others: str) -> UserError:
    """Return the error about a chat template that does not exist.

    Args:
        field: Field that names it.
        name: Name as typed.
        others: What the field can be besides the names of the package's templates.
    """
    hint = template_hint(name)
    if not hint and Path(name).suffix:
        hint = file_hint(Path(name), is_readable=_is_jinja)
    return UserError(f"`{field}` must be {_list_templates()} or {others}, got {name!r}.{hint}")


def _is_jinja(file: str) -> bool:
    return file.endswith((".jinja", ".jinja2", ".j2"))


def _list_templates(templates: Iterable[str] = CHAT_TEMPLATES) -> str:
    """Return the names of chat templates of the package, with the names by which people know them elsewhere."""
    titles = []
    for name in templates:
        titles.append(f"{name} ({OTHER_NAMES[name]})" if name in OTHER_NAMES else name)
    return ", ".join(titles)


def check_chat_template(tokenizer: PreTrainedTokenizerBase, in_trainer: bool = False) -> None:
    """Raise UserError unless a tokenizer has a chat template, which conversations need.

    Args:
        tokenizer: Tokenizer of the examples.
        in_trainer: Whether it is the one of a trainer in Python, whose field has another name than the one of recipes.
    """
    if tokenizer.chat_template is None:
        fitting = [name for name in CHAT_TEMPLATES if not _missing_tokens(tokenizer, name)]
        # A template with tokens of its own is the one of the tokenizer's model.
        suggested = next((name for name in CHAT_TOKENS if name in fitting), fitting[0])
        field, other_way = "chat_template", ""
        if in_trainer:
            field = "chat_template_path"
            call = f'load_tokenizer(name, chat_template="{suggested}")'
            other_way = f" Or pass `processing_class={call}` from `loopdropout_trainer`."
        raise UserError(
            f"`{field}` must be set, because the examples are conversations and the tokenizer has no chat template. Its "
            f"value is a Jinja file, or one of the templates whose tokens the tokenizer has: {_list_templates(fitting)}."
            f"{other_way}"
        )


def check_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError unless a tokenizer has a token that ends answers."""
    if getattr(tokenizer, "eos_token", "") is None:
        raise UserError(f"`eos_token` must be set, because the tokenizer of {_name_of(tokenizer)} has no end token.")


def check_token(tokenizer: PreTrainedTokenizerBase, name: str, token: str | None) -> None:
    """Raise UserError if a special token that the user has set is not one of the tokenizer. `name`: the field."""
    if token is not None and token not in tokenizer.get_vocab():
        raise UserError(f"`{name}` must be a token of the tokenizer {_name_of(tokenizer)}, got {short_repr(token)}.")


def _set_token(tokenizer: PreTrainedTokenizerBase, name: str, token: str) -> None:
    check_token(tokenizer, name, token)
    setattr(tokenizer, name, token)


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that end answers: the end token, and the end of an assistant's turn in a chat."""
    ids = [tokenizer.eos_token_id]
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        rest = render_chat(tokenizer, turns).rpartition("answer")[2]
        special = [token for token in tokenizer.get_added_vocab() if token in rest]
        if special:
            ids.append(tokenizer.convert_tokens_to_ids(min(special, key=rest.find)))
    return list(dict.fromkeys(ids))


def warn_if_rebuilt(tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn once if a tokenizer splits text differently from its own `tokenizer.json`."""
    try:
        file = cached_file(tokenizer.name_or_path, "tokenizer.json", local_files_only=True)
    except (OSError, ValueError):  # a tokenizer without a file
        return
    published = Tokenizer.from_file(file)
    for text in _SAMPLES:
        tokens = tokenizer.tokenize(text)
        expected = published.encode(text, add_special_tokens=False).tokens
        if tokens != expected:
            logger.warning_once(
                f"{type(tokenizer).__name__} splits {text!r} into {short_repr(tokens)}, but {file} into "
                f"{short_repr(expected)}. Load it with `loopdropout_trainer.load_tokenizer`."
            )
            return


def end_tokens(model: PreTrainedModel | GenerationConfig) -> list[int]:
    """Return the ids of the tokens that end a generation of a model, or under its settings."""
    ids = _generation_config(model).eos_token_id
    if not isinstance(ids, list):
        ids = [ids]
    return [token for token in ids if token is not None]


def add_end_tokens(model: PreTrainedModel | GenerationConfig, ids: Iterable[int | None]) -> None:
    """Let generation end at further tokens."""
    before = end_tokens(model)
    new = [token for token in ids if token is not None and token not in before]
    if new:
        _generation_config(model).eos_token_id = [*before, *new]


def _generation_config(model: PreTrainedModel | GenerationConfig) -> GenerationConfig:
    return model if isinstance(model, GenerationConfig) else model.generation_config
