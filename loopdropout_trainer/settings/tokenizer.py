"""Tokenizers: the one place where they are read, so that a text becomes the tokens that the model's `tokenizer.json` says;
their chat templates, and the tokens that end answers.

`AutoTokenizer` of transformers 5 builds some tokenizers anew from their vocabulary, by the class that tokenizer_config.json
names, such as `GPT2Tokenizer`. How the file splits texts before that (each digit alone, or three together) is lost then,
silently: huggingface/transformers issues 45812 and 45920.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TokenizersBackend
from transformers.utils import logging
from transformers.utils.hub import cached_file
from trl import get_training_chat_template
from trl.chat_template_utils import has_generation_markers

from loopdropout_trainer.checks import shown
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.settings.arguments import ModelArguments


logger = logging.get_logger(__name__)

_FILE = "tokenizer.json"
_PARTS = ("normalizer", "pre_tokenizer", "decoder", "model")
_EXAMPLES = ("  7", "In 2023, 12345 + 678 = 13023.", "x  = 3.14", "Don't  stop", " Ünï\n\n\tcode ", "The end")

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


class PreTrainedTokenizerFast(TokenizersBackend):
    """A tokenizer that is what its `tokenizer.json` says, here and in every program that reads what it saves.

    `save_pretrained` writes the name of the class, and this is the one that all releases of transformers take as a reason to
    read the file as it is.
    """

    def save_pretrained(self, save_directory: str | Path, **keywords: Any) -> tuple[str, ...]:
        saved = super().save_pretrained(save_directory, **keywords)
        path = Path(save_directory, "tokenizer_config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
        config["model_input_names"] = self.model_input_names  # transformers 4 adds `token_type_ids` by default
        if tokens := config.pop("extra_special_tokens", None):  # a list, which transformers 4 has under this name:
            config["additional_special_tokens"] = tokens
        path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
        return saved


def read_tokenizer(name: str | Path, revision: str | None = None, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or of a model on the Hub, as its `tokenizer.json` says where there is one.

    Args:
        name: hub name or folder.
        revision: branch, tag or commit on the Hub.
        options: further keywords of `AutoTokenizer.from_pretrained`.

    Raises:
        OSError, ValueError: as `AutoTokenizer` does.
    """
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, **options)
    if _is_built_anew(tokenizer):
        file = cached_file(name, _FILE, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            return PreTrainedTokenizerFast.from_pretrained(name, revision=revision, **options)
    return _saved_as_read(tokenizer)


def as_in_its_file(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Let a tokenizer that somebody hands over split texts as the `tokenizer.json` says that it comes from; return it.

    What transformers left out of the file is put back, in place. What its owner has changed stays as it is. In either case
    one warning names a text with both tokenisations.
    """
    if not _is_transformers_own(tokenizer):
        return tokenizer
    file = _file_of(tokenizer)
    if file is not None:
        _mend(tokenizer, file)
    return _saved_as_read(tokenizer)


def _mend(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    backend = tokenizer.backend_tokenizer
    published = Tokenizer.from_file(str(file))
    parts = _parts(backend)
    if parts == _parts(published):
        return
    before = [tokenizer.tokenize(text) for text in _EXAMPLES]
    outcome = "it is used as it is"
    # Whether its class makes the same of the file again: then nobody has asked for it.
    if _is_built_anew(tokenizer) and parts == _parts(type(tokenizer).from_pretrained(file.parent)._tokenizer):
        outcome = f"transformers' {type(tokenizer).__name__} leaves a part of that file out; it is put back"
        for part in _PARTS:
            setattr(backend, part, getattr(published, part))
    for text, tokens in zip(_EXAMPLES, before, strict=True):
        in_file = published.encode(text, add_special_tokens=False).tokens
        if tokens != in_file:
            logger.warning(
                f"The tokenizer differs from its own file {file}: {text!r} becomes {shown(tokens)}, by the file "
                f"{shown(in_file)}; {outcome}."
            )
            return


def _is_transformers_own(tokenizer: PreTrainedTokenizerBase) -> bool:
    return isinstance(tokenizer, TokenizersBackend) and type(tokenizer).__module__.startswith("transformers.")


def _is_built_anew(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer's class builds it from the vocabulary, instead of reading the file as it is."""
    return _is_transformers_own(tokenizer) and type(tokenizer) is not TokenizersBackend


def _saved_as_read(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    if _is_transformers_own(tokenizer):
        tokenizer.__class__ = PreTrainedTokenizerFast  # the object may be its owner's, who uses and saves it, too
    return tokenizer


def _file_of(tokenizer: PreTrainedTokenizerBase) -> Path | None:
    """Return the `tokenizer.json` that a tokenizer comes from: in its folder, or in the Hub's cache; None if there is none."""
    name = tokenizer.name_or_path
    if not name:
        return None
    places = [Path(name, _FILE)]
    if not Path(name).exists():
        cache = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "snapshots")
        places = sorted(cache.glob(f"*/{_FILE}"), key=lambda place: place.lstat().st_mtime, reverse=True)
        # Of the revision that it was read from, if that is known; else the one that was downloaded last.
        if vocabulary := tokenizer.init_kwargs.get("vocab_file"):
            places.insert(0, Path(vocabulary).with_name(_FILE))
    return next((place for place in places if place.is_file()), None)


def _parts(backend: Tokenizer) -> dict[str, Any]:
    described = json.loads(backend.to_str())
    return {part: described[part] for part in _PARTS}


# The tokenizer that a recipe asks for, and its chat template.


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


def answer_end(
    tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], assistant_only_loss: bool = False
) -> int | None:
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


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Return the ids of the tokens at which generation stops: those of a model's `generation_config`, and its tokenizer's.

    Raises:
        ValueError: if `generation_config` has something else than ids there.
    """
    given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = list(given) if isinstance(given, list) else [given]
    if not all(isinstance(token, int | None) for token in ids):
        raise UserError(
            f"`eos_token_id` in the model's generation_config.json must be one id or a list; got {shown(given)}."
        )
    if tokenizer is not None:
        ids.append(tokenizer.eos_token_id)
    return [token for token in dict.fromkeys(ids) if token is not None]


def add_end_tokens(model: PreTrainedModel, ids: Iterable[int | None]) -> None:
    """Let generation stop at these tokens, too: those that the answers of a training end with."""
    before = end_tokens(model)
    if new := [token for token in ids if token not in (None, *before)]:
        model.generation_config.eos_token_id = [*before, *new]
