"""The one place where tokenizers are read: a text becomes the tokens that the model's `tokenizer.json` says.

`AutoTokenizer` of transformers 5 builds some tokenizers anew from their vocabulary, by the class that tokenizer_config.json
names, such as `GPT2Tokenizer`. How the file splits texts before that (each digit alone, or three together) is lost then,
silently: huggingface/transformers issues 45812 and 45920.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend
from transformers.utils import logging
from transformers.utils.hub import cached_file

from loopdropout_trainer.checks import shown


logger = logging.get_logger(__name__)

_FILE = "tokenizer.json"
_PARTS = ("normalizer", "pre_tokenizer", "decoder", "model")
_EXAMPLES = ("  7", "In 2023, 12345 + 678 = 13023.", "x  = 3.14", "Don't  stop", " Ünï\n\n\tcode ", "The end")


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
