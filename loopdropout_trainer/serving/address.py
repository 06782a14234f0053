"""The address and the key of a server."""

from __future__ import annotations

import json
import socket

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.prompts import EXAMPLE_QUESTION


API_KEY_VARIABLE = "LOOPDROPOUT_API_KEY"
"""Environment variable with the API key."""


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Port 0 chooses a free port.

    Raises:
        UserError: If the address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Connections inherit it. Without it the body of an answer waits 40 ms, until the client confirms the headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        return listener
    except (OSError, OverflowError) as error:
        raise UserError(f"`host` and `port` must be a free address, got {host} and {port} ({error}).") from None


def describe_address(host: str, port: int, model: str, has_key: bool) -> str:
    """Return two lines for the start of a server: its address and a request."""
    netloc = f"[{host}]" if ":" in host else host
    address = f"http://{netloc}:{port}/v1"
    turn = {"role": "user", "content": EXAMPLE_QUESTION}
    body = json.dumps({"model": model, "messages": [turn], "max_tokens": 64, "temperature": 0})
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if has_key else ""
    request = f"curl {address}/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    return f"Address: {address}\nRequest: {request}"
