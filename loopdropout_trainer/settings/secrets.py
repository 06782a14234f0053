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


def public_settings(settings: Any) -> Any:
    """Return settings without secret fields, and without Hub tokens inside of other values."""
    if isinstance(settings, Mapping):
        return {key: public_settings(value) for key, value in settings.items() if not is_secret(key)}
    if isinstance(settings, (list, tuple)):
        return [public_settings(item) for item in settings]
    return _HUB_TOKEN.sub(HIDDEN, settings) if isinstance(settings, str) else settings


def _secret_words(argv: Sequence[str]) -> list[str]:
    """Return the values of secret options on a command line."""
    found, hide = [], False
    for word in argv:
        option, equals, value = word.partition("=")
        if word.startswith("--"):
            hide = is_secret(option)
            found += [value] if hide and equals else []
        elif hide:
            found.append(word)
    return found


def hide_secrets(text: str) -> str:
    """Return a message without Hub tokens, and without what this process was given as a secret."""
    for secret in (os.environ.get("HF_TOKEN", ""), *_secret_words(sys.argv)):
        text = text.replace(secret, HIDDEN) if len(secret) > 3 else text
    return _HUB_TOKEN.sub(HIDDEN, text)
