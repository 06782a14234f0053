"""Show answers of a base model and its adapter, at any depth and any gates.

    loopdropout chat outputs/quickstart "Ann has 9 coins and finds 7. How many?"
    loopdropout chat outputs/quickstart --eval_num_loops 1 2 4 8
    loopdropout chat outputs/quickstart --gates single_loop < prompts.txt
    loopdropout chat ByteDance/Ouro-1.4B-Thinking

The first word is the folder or Hub name of an adapter, a merged model or a base
model. Without a prompt, each line that you enter is a prompt, and an empty line
ends the program. Empty lines of a file or a pipe are skipped. Prompts have the form of the training, or are turns of a chat.
Each one starts a new conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from peft import PeftModel
from rich.box import HORIZONTALS
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedModel

from loopdropout_trainer.arguments import DEPTH_BOUNDS, DepthArguments, option
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.gate_texts import expand_gates, parse_gates
from loopdropout_trainer.generation import check_prompt_length, generate_greedy
from loopdropout_trainer.looped import find_looped_model, use_depth
from loopdropout_trainer.lora import use_gates
from loopdropout_trainer.prompts import PromptFormat
from loopdropout_trainer.recipe import name_words, parse
from loopdropout_trainer.saving.facts import Source
from loopdropout_trainer.saving.loading import load
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.terminal import raw_terminal, show_controls
from loopdropout_trainer.tokenizers import add_end_tokens, end_token_ids


@dataclass(kw_only=True)
class ChatArguments(DepthArguments):
    """The model, its depths and gates, and the prompt."""

    first_words = "MODEL [PROMPT]"

    model: str = option(..., "Folder or Hub name (`user/name@branch`) of an adapter or a model, or `tiny-ouro`.")
    prompt: str | None = option(None, "Prompt. Default: each line of the standard input.")
    eval_num_loops: list[int] | None = option(
        None, "Recurrence depths. Default: the depth of the training.", **DEPTH_BOUNDS
    )
    gates: list[str] | None = option(
        None, "Gates such as 1-0-0-0, or `single_loop` for each loop alone. Default: unit gates."
    )
    system_instruction: str | None = option(
        None, "System turn before each prompt, for models that were trained with one."
    )
    prompt_template: str | None = option(
        None, "Text with a {field} for the prompt. Default: as in the training, else the chat template."
    )
    chat_template: str | None = option(
        None,
        "Name (`tulu2`, `ouro`, ...) or Jinja file. Default: the format of the training, else the tokenizer's own.",
    )
    max_new_tokens: int = option(256, "Maximum number of tokens of an answer.", at_least=1)


ARGUMENTS = (ChatArguments,)


def main(argv: list[str] | None = None) -> None:
    (args,) = parse(ARGUMENTS, name_words(argv, "model", "prompt"), __doc__)
    if args.chat_template is not None and args.prompt_template is not None:
        raise UserError("Set either `chat_template` or `prompt_template`, not both.")

    # Model and tokenizer
    source = find_source(args.model)
    print(source.describe())
    for num_loops in args.eval_num_loops or [None]:
        source.check_run(num_loops, *(args.gates or ()))
    model = load(source, device=torch.accelerator.current_accelerator(check_available=True))
    looped = find_looped_model(model)
    tokenizer = source.load_tokenizer(args.chat_template)
    add_end_tokens(looped, end_token_ids(tokenizer))

    # Format of the prompts
    prompt_format = source.choose_prompt_format(tokenizer, args.chat_template, args.prompt_template)
    print(prompt_format.describe(args.system_instruction))
    system_turn = source.describe_system_turn()
    if system_turn and args.system_instruction is None and prompt_format.text is None:
        print(f"{system_turn} Add `--system_instruction` to ask with it.")

    # Answers
    prompts = read_prompts()
    if args.prompt:
        prompts = [args.prompt]
    for prompt in prompts:
        print()
        prompt_ids = prompt_format.ask(prompt, args.system_instruction)
        check_prompt_length(looped, len(prompt_ids))
        for num_loops in args.eval_num_loops or [looped.num_loops]:
            for gates in expand_gates(args.gates, num_loops):
                title = f"K = {num_loops}" if gates is None else f"K = {num_loops}, {gates}"
                columns = gates_by_column(source, gates, num_loops)
                print_answers(title, columns, num_loops, prompt_ids, model, prompt_format, args.max_new_tokens)
                print()


def read_prompts() -> Iterator[str]:
    """Yield the prompts that the user enters until an empty line, or all lines of a file or a pipe that are not empty."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if line.strip():
                prompt = line.removesuffix("\n")
                print(f"> {prompt}")
                yield prompt
        return
    try:
        while prompt := input("> "):
            yield prompt
    except EOFError:  # Ctrl-D
        print()


def gates_by_column(source: Source, gates: str | None, num_loops: int) -> dict[str, list[float] | None]:
    """Return the gates of each column of a table: of an adapter and its base model, or of a model without gates."""
    numbers = parse_gates(gates, num_loops)
    if source.is_adapter:
        return {"base model": [0.0] * num_loops, "adapter": numbers}
    return {source.folder.name: numbers}


def print_answers(
    title: str,
    columns: dict[str, list[float] | None],
    num_loops: int,
    prompt_ids: list[int],
    model: PreTrainedModel | PeftModel,
    prompt_format: PromptFormat,
    max_new_tokens: int,
) -> None:
    """Print a table with the answer to a prompt under the gates of each column. It grows while the model answers."""
    answers = dict.fromkeys(columns, "")
    table = Live(
        get_renderable=lambda: make_table(title, answers),
        console=Console(file=raw_terminal()),
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with table, use_depth(model, num_loops):
        for name, gates in columns.items():

            def show(text: str, name: str = name) -> None:
                answers[name] = text

            with use_gates(model, gates):
                generate_greedy(
                    model,
                    prompt_format.tokenizer,
                    [prompt_ids],
                    max_new_tokens,
                    stop_strings=prompt_format.stop_strings,
                    progress=False,
                    on_text=show,
                )


def make_table(title: str, answers: dict[str, str]) -> Table:
    """Return a table with a column for each answer."""
    columns = [Column(Text(show_controls(name)), ratio=1) for name in answers]
    table = Table(*columns, title=title, title_justify="left", box=HORIZONTALS, expand=True)
    table.add_row(*(Text(show_controls(answer.strip())) for answer in answers.values()))
    return table


if __name__ == "__main__":
    run_script(main)
