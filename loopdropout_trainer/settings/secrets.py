"""Settings and messages without anything secret."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any


_SECRET_WORDS = ("token", "secret", "password", "passwd", "apikey")
# A word of text is a token, too: `eos_token`, `pad_token_id`, `include_num_input_tokens_seen`.
_WORDS_OF_TEXT = {"eos", "pad", "bos", "unk", "sep", "cls", "mask", "num", "input", "id", "ids", "type"}
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{6,}")
HIDDEN = "***"


def is_secret(field: str) -> bool:
    """Say whether a field of this name may hold a secret, such as `hub_token` or a misspelt `hub_tokn`."""
    words = set(re.split(r"[^a-z]+", str(field).lower()))
    suspicious = any(get_close_matches(word, _SECRET_WORDS, n=1, cutoff=0.74) for word in words - {"tokens"})
    return suspicious and not words & _WORDS_OF_TEXT


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without secret fields, and without Hub tokens inside of other values."""
    return {key: _public(value) for key, value in settings.items() if not is_secret(str(key))}


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return public_settings(value)
    if isinstance(value, str):
        return _HUB_TOKEN.sub(HIDDEN, value)
    return [_public(item) for item in value] if isinstance(value, (list, tuple)) else value


def public_words(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line with the values of secret options hidden."""
    words, hide = [], False
    for word in argv:
        option, equals, _ = word.partition("=")
        if word.startswith("--"):
            hide = is_secret(option)
            words.append(f"{option}={HIDDEN}" if hide and equals else _HUB_TOKEN.sub(HIDDEN, word))
        else:
            words.append(HIDDEN if hide else _HUB_TOKEN.sub(HIDDEN, word))
    return words


def hide_secrets(text: str) -> str:
    """Return a message without Hub tokens, and without what this process was given as a secret."""
    given = [os.environ.get("HF_TOKEN", "")]
    for word, shown in zip(sys.argv, public_words(sys.argv), strict=True):
        if shown != word and shown.endswith(HIDDEN):
            given.append(word.partition("=")[2] if shown != HIDDEN else word)
    for secret in given:
        if len(secret) > 3:
            text = text.replace(secret, HIDDEN)
    return _HUB_TOKEN.sub(HIDDEN, text)
