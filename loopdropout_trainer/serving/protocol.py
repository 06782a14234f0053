"""Fields of requests in OpenAI's protocol, and answers to wrong ones.

A field that the server does not know, or that would have no effect, is an error. It is accepted with its neutral value,
because clients send fields such as `n: 1` by default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from loopdropout_trainer.errors import short_repr


NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_k": (0, -1),
    "top_logprobs": (0,),
}
"""Values with which fields without effect are accepted. null is accepted, too."""

MUST_BE = {
    "model": "the name of a model",
    "prompt": "a text, a list of token ids, or a list of them, none of them empty",
    "messages": "a list of turns, each with a `role` and a text as `content`",
    "max_tokens": "an integer of at least 1",
    "max_completion_tokens": "an integer of at least 1",
    "temperature": "a finite number of at least 0",
    "top_p": "a number above 0 and at most 1",
    "seed": "an integer of 64 bits",
    "stop": "a text or a list of texts, none of them empty",
    "stream": "true or false",
    "stream_options": 'an object such as {"include_usage": true}',
    "user": "a text",
}
"""Values of each field, for messages."""

Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class TextPart(BaseModel):
    """A part of a turn's content."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Turn(BaseModel):
    """A turn of a conversation. The chat template may read further fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Text
    content: str | list[TextPart]


class Request(BaseModel):
    """Fields that both endpoints have.

    Attributes:
        model: Name of the model, with its depth and gates.
        max_tokens: Largest number of tokens of a completion.
        temperature: Divisor of the logits. 0 takes the most probable token.
        top_p: Smallest probability that the most probable tokens have together, from which a token is drawn.
        seed: Seed of the draws.
        stop: Strings that end a completion, which does not contain them.
        stream: Whether to send the text in pieces.
        user: Name of the user, which OpenAI's protocol has for statistics.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Text
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | list[Text] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_values(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if not _is_neutral(name, value)}

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a field of a request has a value that changes nothing, so that this server need not know the field."""
    if name not in NEUTRAL_VALUES:
        return False
    if value is None:
        return True
    for neutral in NEUTRAL_VALUES[name]:
        if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):  # False equals 0
            return True
    return False


class CompletionRequest(Request):
    """Request of `/v1/completions`. A prompt is a text or token ids."""

    prompt: Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1)]


class ChatRequest(Request):
    """Request of `/v1/chat/completions`."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


def error_body(message: str, status: int) -> dict[str, Any]:
    """Return the body of an error in OpenAI's protocol."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_response(message: str, status: int = 400) -> JSONResponse:
    """Return the response to a request that fails."""
    return JSONResponse(error_body(message, status), status)


def explain_errors(errors: list[dict[str, Any]]) -> str:
    """Return one sentence about the errors that pydantic found in a request."""
    by_field: dict[str, dict[str, Any]] = {}
    for error in errors:
        _, *place = error["loc"]  # after "body"
        if not place or error["type"] == "json_invalid":
            return "The body of the request must be a JSON object."
        by_field.setdefault(place[0], error)
    unknown = [f"`{name}`" for name in by_field if name not in MUST_BE]
    if unknown:
        these = "it" if len(unknown) == 1 else "them"
        return f"This server does not support {', '.join(unknown)}. Leave {these} out, or use vLLM."
    missing = []
    for name, error in by_field.items():
        if error["type"] == "missing" and len(error["loc"]) == 2:  # not a field of a message
            missing.append(f"`{name}`")
    if missing:
        return f"The request must have {' and '.join(missing)}."
    name, error = next(iter(by_field.items()))
    return f"`{name}` must be {MUST_BE[name]}, got {short_repr(error['input'])}."
