"""The text of a completion in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


class TextStream:
    """Pieces of a text that grows by tokens.

    A piece never has half of a character, or the beginning of a stop string.

    Args:
        tokenizer: Tokenizer of the text.
        stop_strings: Strings that end the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str]) -> None:
        self._tokenizer, self._stop_strings = tokenizer.backend_tokenizer, stop_strings
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._num_sent = 0
        self._held_back = ""

    def push(self, token: int) -> str:
        """Append a token that does not end the text, and return the new piece."""
        text = self._held_back + (self._decoder.step(self._tokenizer, token) or "")
        num_held_back = 0  # characters at the end that may be the beginning of a stop string
        for stop in self._stop_strings:
            for length in range(1, len(stop) + 1):
                if text.endswith(stop[:length]):
                    num_held_back = max(num_held_back, length)
        end = len(text) - num_held_back
        self._held_back = text[end:]
        self._num_sent += end
        return text[:end]

    def finish(self, text: str) -> str:
        """Return the last piece of the whole text."""
        return text[self._num_sent :]
