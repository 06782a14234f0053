"""Show answers of a base model and its adapter, at any depth and any gates.

    loopdropout chat outputs/quickstart "Ann has 9 coins and finds 7. How many?"
    loopdropout chat outputs/quickstart --eval_num_loops 1 2 4 8
    loopdropout chat outputs/quickstart --gates single_loop < prompts.txt
    loopdropout chat ByteDance/Ouro-1.4B-Thinking

The first word is the folder or Hub name of an adapter, a merged model or a base
model. Prompts have the form of the training, or are turns of a chat. Without a
prompt, each line that you enter continues the conversation, if prompts are turns
of a chat. `/new` begins another conversation, and an empty line ends the program.
Each column of a table is a conversation of its own, with its own answers. Lines
of a file or a pipe are single prompts, which begin a conversation each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import PeftModel
from rich.box import HORIZONTALS
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedModel

from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.gate_texts import expand_gates, parse_gates
from loopdropout_trainer.generation import check_prompt_length, generate_greedy
from loopdropout_trainer.looped import LoopedModelMixin, find_looped_model, use_depth
from loopdropout_trainer.lora import use_gates
from loopdropout_trainer.prompts import PLAIN_TEXT, PromptFormat, make_turns
from loopdropout_trainer.saving.facts import Source
from loopdropout_trainer.saving.loading import load
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.settings.arguments import DEPTH_BOUNDS, DepthArguments, option
from loopdropout_trainer.settings.recipe import name_words, parse
from loopdropout_trainer.terminal import print_sentences, raw_terminal, show_controls, terminal_columns
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
    print_sentences(source.describe(with_prompts=False))
    for num_loops in args.eval_num_loops or [None]:
        source.check_run(num_loops, *(args.gates or ()))
    model = load(source, device=torch.accelerator.current_accelerator(check_available=True))
    looped = find_looped_model(model)
    tokenizer = source.load_tokenizer(args.chat_template)
    add_end_tokens(looped, end_token_ids(tokenizer))

    # Format of the prompts
    prompt_format = source.choose_prompt_format(tokenizer, args.chat_template, args.prompt_template)
    print_sentences(*prompt_format.describe(args.system_instruction).splitlines())
    if prompt_format.text is None:
        print_left_out(source, args.system_instruction)

    # Answers
    prompts, is_session = read_prompts(), sys.stdin.isatty() and not args.prompt
    if args.prompt:
        prompts = [args.prompt]
    else:
        print_sentences(describe_lines(is_session, prompt_format))
    chats = Chats(args, source, model, looped, prompt_format)
    for prompt in prompts:
        print()
        if not is_session:
            chats.ask(prompt)
            chats.clear()
        elif prompt.strip() == NEW:
            chats.clear()
            print("A new conversation begins.\n")
        else:
            try:
                chats.ask(prompt)
            except UserError as error:
                # Such as a conversation that is too long. Another line can replace its last one.
                print_sentences(str(error), "")
            if prompt_format.text is not None:
                chats.clear()


def print_left_out(source: Source, system_instruction: str | None) -> None:
    """Print which prompts of the training the chat template leaves out, and the options that ask with them."""
    plain_texts, system_turn = source.describe_plain_texts(), source.describe_system_turn()
    if plain_texts:
        print_sentences(f'{plain_texts} Add `--prompt_template "{PLAIN_TEXT}"` to ask without it.')
    if system_turn and system_instruction is None:
        print_sentences(f"{system_turn} Add `--system_instruction` to ask with it.")


NEW = "/new"
"""Line that begins another conversation."""


def describe_lines(is_session: bool, prompt_format: PromptFormat) -> str:
    """Return how the lines that are read become conversations."""
    if not is_session:
        return "Each line begins a conversation of its own."
    if prompt_format.text is not None:
        return "Each line is a prompt of its own, because prompts are not turns of a chat. An empty line ends the program."
    return f"Each line continues the conversation. `{NEW}` begins another one, and an empty line ends the program."


class Chats:
    """A conversation for each depth, gates, and column of their table.

    Args:
        args: Depths, gates, the system turn and the length of answers.
        source: The model by its name.
        model: The model, with or without an adapter.
        looped: Its looped model.
        prompt_format: Format of the prompts.
    """

    def __init__(
        self,
        args: ChatArguments,
        source: Source,
        model: PreTrainedModel | PeftModel,
        looped: LoopedModelMixin,
        prompt_format: PromptFormat,
    ) -> None:
        self.args, self.source, self.model, self.looped = args, source, model, looped
        self.prompt_format = prompt_format
        self.turns: dict[tuple[str, str], list[dict[str, str]]] = {}  # by the title of the table and the column

    def clear(self) -> None:
        """Begin new conversations."""
        self.turns = {}

    def ask(self, prompt: str) -> None:
        """Ask in each conversation, print the answers and keep them.

        Raises:
            UserError: If the prompt is too long, or the format of the prompts cannot express a conversation.
        """
        tables = []
        for num_loops in self.args.eval_num_loops or [self.looped.num_loops]:
            for gates in expand_gates(self.args.gates, num_loops):
                title = f"K = {num_loops}" if gates is None else f"K = {num_loops}, {gates}"
                columns = gates_by_column(self.source, gates, num_loops)
                turns = {name: self._add_question(prompt, title, name) for name in columns}
                prompts = {name: self.prompt_format.encode(turns[name]) for name in columns}
                for prompt_ids in prompts.values():
                    check_prompt_length(self.looped, len(prompt_ids))
                tables.append((title, columns, num_loops, prompts, turns))
        for title, columns, num_loops, prompts, turns in tables:
            answers = print_answers(
                title, columns, num_loops, prompts, self.model, self.prompt_format, self.args.max_new_tokens
            )
            for name, answer in answers.items():
                self.turns[title, name] = [*turns[name], {"role": "assistant", "content": answer}]
            print()

    def _add_question(self, prompt: str, title: str, name: str) -> list[dict[str, str]]:
        """Return the turns of a conversation up to a prompt. A new one begins with the system turn, if there is one."""
        if (title, name) not in self.turns:
            return make_turns(prompt, self.args.system_instruction)
        return self.turns[title, name] + make_turns(prompt)


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
    # The folder of a repository is a snapshot, whose name is a commit.
    name = source.repository or source.folder.name
    return {name: numbers}


def print_answers(
    title: str,
    columns: dict[str, list[float] | None],
    num_loops: int,
    prompts: dict[str, list[int]],
    model: PreTrainedModel | PeftModel,
    prompt_format: PromptFormat,
    max_new_tokens: int,
) -> dict[str, str]:
    """Print the answer to a prompt under the gates of each column (`show_growing`), and return the answers.

    Args:
        title: Title of the table.
        columns: Gates of each column.
        num_loops: Recurrence depth.
        prompts: Token ids of the prompt of each column.
        model: Model, with or without an adapter.
        prompt_format: Format of the prompts.
        max_new_tokens: Largest number of tokens of an answer.
    """
    answers = dict.fromkeys(columns, "")
    with show_growing(title, answers), use_depth(model, num_loops):
        for name, gates in columns.items():

            def show(text: str, name: str = name) -> None:
                answers[name] = text

            with use_gates(model, gates):
                generate_greedy(
                    model,
                    prompt_format.tokenizer,
                    [prompts[name]],
                    max_new_tokens,
                    stop_strings=prompt_format.stop_strings,
                    progress=False,
                    on_text=show,
                )
    return answers


@contextmanager
def show_growing(title: str, answers: dict[str, str]) -> Iterator[None]:
    """Show answers that grow inside of a block.

    A terminal has a table. A file or a pipe has each answer as the model wrote it, without breaks, at the end of the block.
    """
    if terminal_columns() is None:
        yield
        print(list_answers(title, answers))
        return
    table = Live(
        get_renderable=lambda: make_table(title, answers),
        console=Console(file=raw_terminal()),
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with table:
        yield


def list_answers(title: str, answers: dict[str, str]) -> str:
    """Return a paragraph for each answer, whose first line is the title and the name of its column."""
    paragraphs = []
    for name, answer in answers.items():
        paragraphs.append(f"{title}, {name}:\n{answer.strip()}")
    return "\n\n".join(paragraphs)


def make_table(title: str, answers: dict[str, str]) -> Table:
    """Return a table with a column for each answer. A word that is longer than its column goes on in the next line."""
    columns = [Column(Text(show_controls(name)), ratio=1, overflow="fold") for name in answers]
    table = Table(*columns, title=title, title_justify="left", box=HORIZONTALS, expand=True)
    table.add_row(*(Text(show_controls(answer.strip())) for answer in answers.values()))
    return table


if __name__ == "__main__":
    run_script(main)
