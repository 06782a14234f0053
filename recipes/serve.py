"""Serve a model over HTTP by OpenAI's protocol, at any depth and any gates.

    loopdropout serve outputs/quickstart
    loopdropout serve outputs/quickstart --num_loops 8 --gates 1-1-1-1-0-0-0-0
    loopdropout serve outputs/quickstart --engine vllm -- --max-model-len 2048

The first word is the `model` of each request. The engine is vLLM if it is
installed and can serve the model, and otherwise a small server of this package,
which needs `pip install fastapi uvicorn`. Options after `--` are
vLLM's. Conversations get the format of the training, unless you set
`--chat_template`. Only this computer can connect unless you set `--host`.
No code of the model's repository runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.prompts import PromptFormat
from loopdropout_trainer.saving.facts import Source
from loopdropout_trainer.saving.loading import load
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.serving.address import API_KEY_VARIABLE, describe_address, open_socket
from loopdropout_trainer.serving.vllm_command import check_start, find_obstacle, vllm_command
from loopdropout_trainer.settings.arguments import DEPTH_BOUNDS, option
from loopdropout_trainer.settings.recipe import name_words, parse
from loopdropout_trainer.tokenizers import add_end_tokens, end_token_ids


@dataclass
class ServeArguments:
    """The model, its depth and gates, and the address."""

    first_words = "MODEL"

    model: str = option(..., "Folder or Hub name (`user/name@branch`) of an adapter or a model, or `tiny-ouro`.")
    num_loops: int | None = option(None, "Recurrence depth. Default: the depth of the training.", **DEPTH_BOUNDS)
    gates: str | None = option(None, "Gates of the adapter such as 1-0-0-0, or `loop 1`. Default: unit gates.")
    chat_template: str | None = option(
        None,
        "Name (`tulu2`, `ouro`, ...) or Jinja file. Default: the format of the training, else the tokenizer's own.",
    )
    host: str = option("127.0.0.1", "Address to listen on. 0.0.0.0 lets other computers connect.")
    port: int = option(8000, "Port to listen on. 0 takes a free one.", at_least=0, at_most=65535)
    api_key: str | None = option(
        None, f"Key that requests must have. Default: the environment variable {API_KEY_VARIABLE}, else none."
    )
    engine: str | None = option(
        None,
        "Server. Default: vLLM if it is installed and can serve the model, else transformers.",
        choices=("transformers", "vllm"),
    )


ARGUMENTS = (ServeArguments,)


def main(argv: list[str] | None = None) -> None:
    own, options = split_options(sys.argv[1:] if argv is None else argv)
    (args,) = parse(ARGUMENTS, name_words(own, "model"), __doc__)
    source = find_source(args.model)
    print(source.describe(with_prompts=False), flush=True)
    source.check_run(args.num_loops, args.gates)
    engine = choose_engine(args, source, options)
    tokenizer = source.load_tokenizer(args.chat_template)
    prompt_format = source.choose_prompt_format(tokenizer, args.chat_template)
    print(f"Engine: {engine}\n{prompt_format.describe()}", flush=True)
    if prompt_format.text is None:
        plain_texts, system_turn = source.describe_plain_texts(), source.describe_system_turn()
        if plain_texts:
            print(f"{plain_texts} Send such prompts to `/v1/completions`.", flush=True)
        if system_turn:
            print(f"{system_turn} Send it as the first turn.", flush=True)
    api_key = args.api_key or os.environ.get(API_KEY_VARIABLE) or None
    if engine == "vllm":
        start_vllm(args, source, prompt_format, api_key, options)
    else:
        start_own_server(args, source, prompt_format, api_key)


def split_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after `--`."""
    words = [*argv]
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def choose_engine(args: ServeArguments, source: Source, options: Sequence[str]) -> str:
    """Return the engine that serves a source. Options of vLLM ask for vLLM, too."""
    if args.engine == "transformers":
        if options:
            raise UserError("`engine` must be vllm, because options after `--` are vLLM's, got transformers.")
        return args.engine
    obstacle = find_obstacle(source, args.gates)
    if obstacle is None:
        check_start(options)
        return "vllm"
    if args.engine == "vllm" or options:
        raise UserError(f"vLLM cannot serve {args.model}, because {obstacle}. Use `--engine transformers`.")
    return "transformers"


def start_vllm(
    args: ServeArguments, source: Source, prompt_format: PromptFormat, api_key: str | None, options: Sequence[str]
) -> None:
    """Replace this process by vLLM's server."""
    with open_socket(args.host, args.port) as listener:  # is the address free, and which port is it
        port = listener.getsockname()[1]
    command = vllm_command(source, prompt_format, host=args.host, port=port, num_loops=args.num_loops, options=options)
    if api_key is not None:
        os.environ["VLLM_API_KEY"] = api_key  # other users of this computer can read command lines
    print(describe_address(args.host, port, source.name, api_key is not None), flush=True)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # else the start waits where transformers asks a question at a terminal
    os.execv(sys.executable, command)


def start_own_server(args: ServeArguments, source: Source, prompt_format: PromptFormat, api_key: str | None) -> None:
    """Serve by the decoding of this package until the process is interrupted."""
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise UserError("The server needs other packages: pip install fastapi uvicorn")
    from loopdropout_trainer.serving.app import Server, serve

    with open_socket(args.host, args.port) as listener:
        model = load(
            source, num_loops=args.num_loops, device=torch.accelerator.current_accelerator(check_available=True)
        )
        add_end_tokens(find_looped_model(model), end_token_ids(prompt_format.tokenizer))
        server = Server(source, model, prompt_format, args.gates)
        print(f"Models: {', '.join(server.names.listed())}")
        print(describe_address(args.host, listener.getsockname()[1], source.name, api_key is not None), flush=True)
        serve(server, listener, api_key)


if __name__ == "__main__":
    run_script(main)
