"""Show answers of a base model and its adapter, at any depth and any gates.

    loopdropout chat outputs/quickstart "Ann has 9 coins and finds 7. How many?"
    loopdropout chat outputs/quickstart --eval_num_loops 1 2 4 8
    loopdropout chat outputs/quickstart --gates single_loop < prompts.txt
    loopdropout chat ByteDance/Ouro-1.4B-Thinking

The first word is the folder or Hub name of an adapter, a merged model or a base
model. Without a prompt, each line that you enter is a prompt, and an empty line
ends the program. Prompts have the form of the training, or are turns of a chat.
Each one starts a new conversation.
"""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from rich.box import HORIZONTALS
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from loopdropout_trainer.arguments import DepthArguments, option
from loopdropout_trainer.data import FIELD, DataArguments
from loopdropout_trainer.errors import run_script
from loopdropout_trainer.gate_state import expand_gates, parse_gates
from loopdropout_trainer.generation import generate_greedy
from loopdropout_trainer.looped import find_looped_model, use_depth
from loopdropout_trainer.lora import use_gates
from loopdropout_trainer.recipe import build, name_words, parse
from loopdropout_trainer.results import read_recipe
from loopdropout_trainer.saving.loading import adapter_folder, load_model, load_saved_tokenizer
from loopdropout_trainer.terminal import raw_terminal, show_controls
from loopdropout_trainer.tokenizers import add_end_tokens, end_token_ids


@dataclass(kw_only=True)
class ChatArguments(DepthArguments):
    """The model, its depths and gates, and the prompt."""

    first_words = "MODEL [PROMPT]"

    model: str = option(..., "Folder or Hub name of an adapter or a model, or `tiny-ouro`.")
    prompt: str | None = option(None, "Prompt. Default: each line of the standard input.")
    eval_num_loops: list[int] | None = option(None, "Recurrence depths. Default: the depth of the training.")
    gates: list[str] | None = option(
        None, "Gates such as 1-0-0-0, or `single_loop` for each loop alone. Default: unit gates."
    )
    prompt_template: str | None = option(
        None, "Text with a {field} for the prompt. Default: as in the training, else the chat template."
    )
    max_new_tokens: int = option(256, "Maximum number of tokens of an answer.")


def main(argv: list[str] | None = None) -> None:
    (args,) = parse([ChatArguments], name_words(argv, "model", "prompt"), __doc__)

    # Model and tokenizer
    model = load_model(args.model, device=torch.accelerator.current_accelerator(check_available=True))
    looped, is_adapter = find_looped_model(model), isinstance(model, PeftModel)
    folder = adapter_folder(args.model) if is_adapter else Path(args.model)
    tokenizer = load_saved_tokenizer(folder, model)
    add_end_tokens(looped, end_token_ids(tokenizer))

    # Format of the prompts
    template = args.prompt_template or read_prompt_template(folder)
    is_chat = not template and tokenizer.chat_template
    if is_chat:
        turns = [{"role": "user", "content": "{prompt}"}]
        template = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    template = template or "{prompt}"
    print(f"Format of the prompts: {template!r}")
    stops = re.findall(r"\w+:", template)[:1]  # a base model may go on with the next question

    # Answers
    prompts = [args.prompt] if args.prompt else iter(partial(input, "> "), "")
    with suppress(EOFError):
        for prompt in prompts:
            print("" if args.prompt or sys.stdin.isatty() else prompt)
            text = FIELD.sub(lambda field, prompt=prompt: prompt, template)
            ids = tokenizer(text, add_special_tokens=not is_chat)["input_ids"]
            for num_loops in args.eval_num_loops or [looped.num_loops]:
                for gates in expand_gates(args.gates, num_loops):
                    columns = {"base model": [0.0] * num_loops} if is_adapter else {}
                    columns["adapter" if is_adapter else folder.name] = parse_gates(gates, num_loops)
                    answers = dict.fromkeys(columns, "")
                    title = ", ".join(filter(None, [f"K = {num_loops}", gates]))
                    with Live(
                        get_renderable=partial(make_table, title, answers),
                        console=Console(file=raw_terminal()),
                        redirect_stdout=False,
                        redirect_stderr=False,
                    ):
                        for name, numbers in columns.items():
                            with use_depth(model, num_loops), use_gates(model, numbers) if numbers else nullcontext():
                                generate_greedy(
                                    model,
                                    tokenizer,
                                    [ids],
                                    args.max_new_tokens,
                                    stop_strings=stops,
                                    progress=False,
                                    on_text=partial(answers.__setitem__, name),
                                )
                    print()


def read_prompt_template(folder: Path) -> str | None:
    """Return the format of the prompts of a training, a text with a {field}, from the recipe in its folder."""
    (data_args,) = build([DataArguments], read_recipe(folder))
    return data_args.template and data_args.template + data_args.prompt_end


def make_table(title: str, answers: dict[str, str]) -> Table:
    """Return a table with a column for each answer."""
    columns = [Column(Text(show_controls(name)), ratio=1) for name in answers]
    table = Table(*columns, title=title, title_justify="left", box=HORIZONTALS, expand=True)
    table.add_row(*(Text(show_controls(answer.strip())) for answer in answers.values()))
    return table


if __name__ == "__main__":
    run_script(main)
