"""Settings and messages without anything secret."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any


_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{6,}")


def is_secret(field: str) -> bool:
    """Say whether a field may hold a secret, by its name: `hub_token` or a misspelt `hub_tokn`, not `eos_token`."""
    name = str(field).lower()
    is_text = re.search(r"(eos|pad|bos|unk|sep|cls|mask)_token$", name)
    return not is_text and bool(re.search(r"to?ke?n$|secret|passw|api_?key", name))


def public_settings(settings: Any) -> Any:
    """Return settings without secret fields, and without Hub tokens inside of other values."""
    if isinstance(settings, Mapping):
        return {key: public_settings(value) for key, value in settings.items() if not is_secret(key)}
    if isinstance(settings, (list, tuple)):
        return [public_settings(item) for item in settings]
    return _HUB_TOKEN.sub("***", settings) if isinstance(settings, str) else settings


def hide_secrets(text: str) -> str:
    """Return a message without Hub tokens, and without what this process was given as a secret."""
    options = re.findall(r"--(\S+?)[= ](?!--)(\S+)", " ".join(sys.argv))
    secrets = [os.environ.get("HF_TOKEN", ""), *(value for option, value in options if is_secret(option))]
    for secret in secrets:
        text = text.replace(secret, "***") if len(secret) > 3 else text
    return _HUB_TOKEN.sub("***", text)
