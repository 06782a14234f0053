"""Show what a recipe trains on, token for token: `python -m loopdropout_trainer.data RECIPE.yaml [--index N]`.

The example is tokenised as in training, so that what is marked is what the loss sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from loopdropout_trainer import LoopDropoutConfig
from loopdropout_trainer.data import DataArguments, load_data, load_tokenizer
from loopdropout_trainer.data.boundary import tokenise
from loopdropout_trainer.data.load import LossArguments
from loopdropout_trainer.errors import UserError, run_command, user_supplied
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, RunArguments, setting
from loopdropout_trainer.settings.recipe import parse_recipe


@dataclass
class ShowArguments:
    """Which example to show."""

    index: int = setting(0, "Number of the example, from 0.")
    held_out: bool = setting(False, "Show a held-out example instead.")


def main(argv: list[str] | None = None) -> None:
    types = (ShowArguments, ModelArguments, DataArguments, LossArguments)
    (show, model, data_args, loss), _ = parse_recipe(
        types, argv, description=__doc__, unread_types=(RunArguments, AdapterArguments, LoopDropoutConfig)
    )
    tokenizer = load_tokenizer(model, chat_template_path=loss.chat_template_path, eos_token=loss.eos_token)
    data = load_data(data_args, tokenizer, loss.max_length)
    examples = data.eval if show.held_out else data.train
    if examples is None or not 0 <= show.index < len(examples):
        raise UserError(f"`index` must be below {len(examples or ())}, the number of examples; got {show.index}.")
    with user_supplied("The example cannot be prepared"):
        one = examples[show.index : show.index + 1]
        tokenised = tokenise(one, tokenizer, loss.completion_only_loss, loss.assistant_only_loss)
    (tokens,) = tokenised["input_ids"]
    is_trained = [label != -100 for label in tokenised["labels"][0]]  # -100: no loss
    marked = Text()
    for trained, places in groupby(range(len(tokens)), key=is_trained.__getitem__):
        piece = tokenizer.decode([tokens[place] for place in places], clean_up_tokenization_spaces=False)
        marked.append(f"⟦{piece}⟧" if trained else piece, style="bold green" if trained else "dim")
    console = Console(highlight=False, soft_wrap=True)
    counts = f"{len(tokens)} tokens, of which {sum(is_trained)} are trained on, between ⟦ and ⟧"
    console.print(f"{data.report}\n\nExample {show.index} of {len(examples):,}: {counts}\n", markup=False)
    console.print(marked)


if __name__ == "__main__":
    run_command(main, "python -m loopdropout_trainer.data")
