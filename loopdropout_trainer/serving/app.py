"""The endpoints of the server, and the function `serve` that runs them."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from peft import PeftModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import PreTrainedModel

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.generation import Ending, check_prompt_length, context_of
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.prompts import PromptFormat
from loopdropout_trainer.saving.facts import Source
from loopdropout_trainer.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    error_body,
    error_response,
    explain_errors,
)
from loopdropout_trainer.serving.scheduler import Completion, Event, Result, Sampling, Scheduler
from loopdropout_trainer.serving.streams import TextStream
from loopdropout_trainer.serving.variants import ModelNames, UnknownModelError


SECONDS_TO_STOP = 3
"""Time for running requests after Ctrl-C."""


class Server:
    """A model that answers requests.

    Args:
        source: Source of the model, whose name is the model's in requests.
        model: The loaded model, at the depth of the plain name.
        prompt_format: Format of conversations, with the tokenizer of the model.
        gates: Gates of the plain name, such as "1-0-0-0". Default: unit gates.
        batch_size: Largest number of completions that run together.
    """

    def __init__(
        self,
        source: Source,
        model: PreTrainedModel | PeftModel,
        prompt_format: PromptFormat,
        gates: str | None = None,
        batch_size: int = 32,
    ) -> None:
        self.looped = find_looped_model(model)
        self.names = ModelNames(source, self.looped.num_loops, gates)
        self.prompt_format, self.tokenizer = prompt_format, prompt_format.tokenizer
        self.num_tokens = len(self.looped.get_input_embeddings().weight)
        self.context = context_of(self.looped)
        self.started = int(time.time())
        self.scheduler = Scheduler(model, batch_size)

    def encode(self, request: CompletionRequest | ChatRequest) -> list[list[int]]:
        """Return the token ids of the prompts of a request."""
        if isinstance(request, ChatRequest):
            return [self.prompt_format.encode([turn.model_dump() for turn in request.messages])]
        prompts = request.prompt
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        rows = []
        for prompt in prompts:
            rows.append(self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
        largest = max(max(row) for row in rows)
        if largest >= self.num_tokens:
            raise UserError(f"`prompt` must have token ids below {self.num_tokens}, got {largest}.")
        return rows

    def make_completions(
        self, request: CompletionRequest | ChatRequest, send: Callable[[int, Event], None]
    ) -> list[Completion]:
        """Return the completions of a request, whose events go to `send` with their indices.

        Raises:
            UserError: If the request has a wrong value.
        """
        variant = self.names.find(request.model)
        if request.stream_options is not None and not request.stream:
            raise UserError("`stream_options` must be left out unless `stream` is true.")
        defaults = self.looped.generation_config
        sampling = Sampling(
            temperature=float(_first(request.temperature, defaults.temperature, 1.0)),
            top_p=float(_first(request.top_p, defaults.top_p, 1.0)),
            seed=request.seed,
        )
        ending = Ending(self.looped, self.tokenizer, request.stop_strings)
        completions = []
        for index, prompt in enumerate(self.encode(request)):
            completions.append(
                Completion(
                    prompt,
                    variant,
                    self.find_max_tokens(request, len(prompt)),
                    sampling,
                    ending,
                    TextStream(self.tokenizer, request.stop_strings) if request.stream else None,
                    lambda event, index=index: send(index, event),
                )
            )
        return completions

    def find_max_tokens(self, request: CompletionRequest | ChatRequest, num_prompt_tokens: int) -> int:
        """Return the largest number of tokens of a completion after a prompt."""
        if num_prompt_tokens == 0:
            raise UserError("The prompt must have at least one token.")
        name, given, default = "max_tokens", request.max_tokens, 16
        if isinstance(request, ChatRequest):
            default = None
            if request.max_completion_tokens is not None:
                if given is not None:
                    raise UserError("Set either `max_tokens` or `max_completion_tokens`, not both.")
                name, given = "max_completion_tokens", request.max_completion_tokens
        if self.context is None:
            return _first(given, default, 4096)
        free = self.context - num_prompt_tokens
        check_prompt_length(self.looped, num_prompt_tokens)
        if given is not None and given > free:
            raise UserError(
                f"`{name}` must be at most {free:,}, because the context of the model has {self.context:,} tokens and the "
                f"prompt {num_prompt_tokens:,}, got {given:,}."
            )
        return min(_first(given, default, free), free)


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


class ClientLeft(RuntimeError):
    """The client of a request has closed the connection."""


async def _wait_for_leaving(http: HTTPRequest, events: asyncio.Queue[tuple[int, Event]]) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    events.put_nowait((0, ClientLeft()))


def make_sender(events: asyncio.Queue[tuple[int, Event]]) -> Callable[[int, Event], None]:
    """Return a function that puts the events of the scheduler's thread into a queue of the running event loop."""
    loop = asyncio.get_running_loop()

    def send(index: int, event: Event) -> None:
        with suppress(RuntimeError):  # the event loop has ended with the server
            loop.call_soon_threadsafe(events.put_nowait, (index, event))

    return send


class Exchange:
    """One request and its completions.

    Args:
        server: Server that answers.
        request: Request of a client.
    """

    def __init__(self, server: Server, request: CompletionRequest | ChatRequest) -> None:
        self.server, self.request = server, request
        self.is_chat = isinstance(request, ChatRequest)
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model}
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.completions = server.make_completions(request, make_sender(self._events))
        self.results: dict[int, Result] = {}

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Start the completions, and yield their events with their indices until all have ended."""
        self.server.scheduler.add(self.completions)
        try:
            while len(self.results) < len(self.completions):
                index, event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Result):
                    self.results[index] = event
                yield index, event
        finally:
            self.cancel()
            self._watcher.cancel()

    def watch(self, http: HTTPRequest) -> None:
        """End the completions when the client leaves, whether or not it reads a stream."""
        self._watcher = asyncio.create_task(_wait_for_leaving(http, self._events))

    def cancel(self) -> None:
        """Free the places of the completions that have not ended."""
        for completion in self.completions:
            completion.cancel()

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens of the prompts and the completions."""
        prompt = sum(len(completion.prompt) for completion in self.completions)
        completion = sum(result.num_tokens for result in self.results.values())
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    async def answer(self) -> dict[str, Any]:
        """Return the answer without a stream."""
        async for _ in self.events():
            pass
        choices = [self._choice(index, self.results[index]) for index in range(len(self.completions))]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": self.usage()}

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": result.text}} if self.is_chat else {"text": result.text}
        return {"index": index, **content, "logprobs": None, "finish_reason": result.finish_reason}

    async def stream(self) -> AsyncIterator[str]:
        """Yield the lines of a stream, which ends with [DONE]."""
        try:
            if self.is_chat:
                yield self._line(0, {"delta": {"role": "assistant", "content": ""}})
            async for index, event in self.events():
                if isinstance(event, Result):
                    yield self._line(index, self._piece(None), event.finish_reason)
                elif event:
                    yield self._line(index, self._piece(event))
            options = self.request.stream_options
            if options is not None and options.include_usage:
                yield self._chunk([], usage=self.usage())
        except ClientLeft:
            return
        except RuntimeError as error:
            yield f"data: {json.dumps(error_body(str(error), 500))}\n\n"
        yield "data: [DONE]\n\n"

    def _piece(self, text: str | None) -> dict[str, Any]:
        if not self.is_chat:
            return {"text": text or ""}
        return {"delta": {} if text is None else {"content": text}}

    def _line(self, index: int, content: dict[str, Any], finish_reason: str | None = None) -> str:
        return self._chunk([{"index": index, **content, "logprobs": None, "finish_reason": finish_reason}])

    def _chunk(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return f"data: {json.dumps({**self.head, 'object': kind, 'choices': choices, **fields})}\n\n"


class KeyCheck:
    """Answer requests without the API key with 401, except for `/health`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app, self.expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        is_open = scope["type"] == "lifespan" or scope.get("path") == "/health"
        if is_open or secrets.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
        else:
            message = "The header `Authorization` must be `Bearer KEY` with the API key of this server."
            await error_response(message, 401)(scope, receive, send)


class Endpoints:
    """The functions that answer the paths of a server.

    Args:
        server: Model that answers.
    """

    def __init__(self, server: Server) -> None:
        self.server = server

    def add_to(self, app: FastAPI) -> None:
        """Add the paths to an application."""
        app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/models", self.list_models)
        app.add_api_route("/v1/models/{name:path}", self.find_model)
        app.add_api_route("/health", self.report_health)

    async def complete(self, request: CompletionRequest, http: HTTPRequest) -> Response:
        """Complete raw prompts."""
        return await self.respond(request, http)

    async def chat(self, request: ChatRequest, http: HTTPRequest) -> Response:
        """Answer a conversation."""
        return await self.respond(request, http)

    async def respond(self, request: CompletionRequest | ChatRequest, http: HTTPRequest) -> Response:
        """Answer a request, in pieces if it asks for a stream."""
        exchange = Exchange(self.server, request)
        exchange.watch(http)
        if request.stream:
            return StreamingResponse(exchange.stream(), media_type="text/event-stream")
        try:
            return JSONResponse(await exchange.answer())
        except ClientLeft:
            return Response(status_code=499)  # nobody reads it
        except RuntimeError as error:
            return error_response(str(error), 500)

    async def list_models(self) -> dict[str, Any]:
        """List names of the model with depths and gates."""
        return {"object": "list", "data": [self._describe(name) for name in self.server.names.listed()]}

    async def find_model(self, name: str) -> dict[str, Any]:
        """Describe the model of a name."""
        self.server.names.find(name)
        return self._describe(name)

    def _describe(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.server.started, "owned_by": "loopdropout-trainer"}

    async def report_health(self) -> Response:
        """Report whether the model can answer, and the numbers of running and waiting completions."""
        scheduler = self.server.scheduler
        if not scheduler.is_running:
            return error_response("The thread that decodes has ended. Start the server again.", 503)
        return JSONResponse({"status": "ok", "running": scheduler.num_running, "waiting": scheduler.num_waiting})


async def _explain_wrong_fields(http: HTTPRequest, error: RequestValidationError) -> Response:
    return error_response(explain_errors(list(error.errors())))


async def _explain_wrong_path(http: HTTPRequest, error: HTTPException) -> Response:
    if error.status_code == 400:
        return error_response("The body of the request must be JSON.")
    return error_response(f"{http.method} {http.url.path} is not an endpoint of this server.", error.status_code)


async def _explain_wrong_value(http: HTTPRequest, error: UserError) -> Response:
    return error_response(str(error), 404 if isinstance(error, UnknownModelError) else 400)


ERROR_HANDLERS = {
    RequestValidationError: _explain_wrong_fields,
    HTTPException: _explain_wrong_path,
    UserError: _explain_wrong_value,
}


def make_app(server: Server, api_key: str | None = None) -> FastAPI:
    """Return the application with the endpoints of a server.

    Args:
        server: Model that answers.
        api_key: Key that requests must have as `Authorization: Bearer KEY`, except for `/health`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.scheduler.stop()

    app = FastAPI(
        lifespan=lifespan,
        exception_handlers=ERROR_HANDLERS,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    Endpoints(server).add_to(app)
    if api_key is not None:
        app.add_middleware(KeyCheck, api_key=api_key)
    return app


def serve(server: Server, listener: socket.socket, api_key: str | None = None) -> None:
    """Answer requests on a socket until the process is interrupted.

    Args:
        server: Model that answers.
        listener: Socket that listens.
        api_key: Key that requests must have. None: all requests are answered.
    """
    config = uvicorn.Config(make_app(server, api_key), timeout_graceful_shutdown=SECONDS_TO_STOP)
    uvicorn.Server(config).run(sockets=[listener])
