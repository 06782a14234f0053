"""Settings and messages without anything secret."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any


_SECRET_WORDS = {"token", "secret", "password", "passwd", "apikey", "tok", "tokn", "tokne", "toekn", "tken"}
# A word of text is a token, too: `eos_token`, `pad_token_id`, `include_num_input_tokens_seen`.
_WORDS_OF_TEXT = {"eos", "pad", "bos", "unk", "sep", "cls", "mask", "num", "input", "id", "ids", "type"}
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{6,}")
HIDDEN = "***"


def is_secret(field: str) -> bool:
    """Say whether a field of this name may hold a secret, such as `hub_token` or a misspelt `hub_tokn`."""
    words = set(re.split(r"[^a-z]+", str(field).lower()))
    return bool(words & _SECRET_WORDS) and not words & _WORDS_OF_TEXT


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without secret fields, and without Hub tokens inside of other values."""
    return {key: _public(value) for key, value in settings.items() if not is_secret(str(key))}


def public_words(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line with the values of secret options hidden."""
    words, hide_next = [], False
    for word in argv:
        option, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            words.append(HIDDEN)
        elif word.startswith("--") and is_secret(option.lstrip("-")) and equals:
            words.append(f"{option}={HIDDEN}")
        else:
            words.append(_HUB_TOKEN.sub(HIDDEN, word))
        hide_next = word.startswith("--") and not equals and is_secret(word.lstrip("-"))
    return words


def hide_secrets(text: str) -> str:
    """Return a message without Hub tokens, and without what this process was given as a secret."""
    given = [os.environ.get("HF_TOKEN", "")]
    for word, shown in zip(sys.argv, public_words(sys.argv), strict=True):
        if shown == HIDDEN:
            given.append(word)
        elif shown != word and shown.endswith(f"={HIDDEN}"):
            given.append(word.partition("=")[2])
    for secret in given:
        if len(secret) > 3:
            text = text.replace(secret, HIDDEN)
    return _HUB_TOKEN.sub(HIDDEN, text)


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return public_settings(value)
    if isinstance(value, str):
        return _HUB_TOKEN.sub(HIDDEN, value)
    if isinstance(value, (list, tuple)):
        return [_public(item) for item in value]
    return value
