"""Show what a recipe trains on, token for token: `python -m loopdropout_trainer.data RECIPE.yaml [--index N]`.

The example goes through the trainer's own preparation, so that what is marked is what the loss sees.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text
from transformers.hf_argparser import HfArg

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer
from loopdropout_trainer.data import DataArguments, load_data, load_tokenizer
from loopdropout_trainer.models import OuroConfig, OuroForCausalLM
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, RunArguments
from loopdropout_trainer.settings.command import run_command, user_supplied
from loopdropout_trainer.settings.recipe import parse_recipe


@dataclass
class ShowArguments:
    """Which example to show."""

    index: int = HfArg(default=0, help="Number of the example, from 0.")
    held_out: bool = HfArg(default=False, help="Show a held-out example instead.")


@dataclass
class LossArguments:
    """The trainer's settings that decide what is trained on."""

    max_length: int | None = HfArg(default=1024, help="Longer examples are dropped.")
    completion_only_loss: bool | None = HfArg(default=None, help="As in `SFTConfig`.")
    assistant_only_loss: bool = HfArg(default=False, help="As in `SFTConfig`.")
    chat_template_path: str | None = HfArg(default=None, help="As in `SFTConfig`.")


def main(argv: list[str] | None = None) -> None:
    types = (ShowArguments, ModelArguments, DataArguments, LossArguments)
    (show, model, data_args, loss), _ = parse_recipe(
        types, argv, description=__doc__, unread_types=(RunArguments, AdapterArguments, LoopDropoutConfig)
    )
    tokenizer = load_tokenizer(model, chat_template_path=loss.chat_template_path)
    data = load_data(data_args, tokenizer, loss.max_length)
    examples = data.eval if show.held_out else data.train
    if examples is None or not 0 <= show.index < len(examples):
        raise ValueError(f"`index` must be below {len(examples or ())}, the number of examples; got {show.index}.")
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    smallest = OuroForCausalLM(OuroConfig(vocab_size=len(tokenizer), **size))
    with tempfile.TemporaryDirectory() as folder, user_supplied("The example cannot be prepared"):
        args = LoopDropoutConfig(folder, use_cpu=True, bf16=False, report_to="none", **vars(loss))
        one = examples.select([show.index])
        row = LoopDropoutSFTTrainer(smallest, args, train_dataset=one, processing_class=tokenizer).train_dataset[0]
    marked, num_trained = Text(), 0
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[1] != -100):  # -100: no loss
        ids = [token for token, _ in run]
        piece = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        marked.append(f"⟦{piece}⟧" if trained else piece, style="bold green" if trained else "dim")
        num_trained += len(ids) if trained else 0
    console = Console(highlight=False, soft_wrap=True)
    counts = f"{len(row['input_ids'])} tokens, of which {num_trained} are trained on, between ⟦ and ⟧"
    console.print(f"{data.report}\n\nExample {show.index} of {len(examples):,}: {counts}\n", markup=False)
    console.print(marked)


if __name__ == "__main__":
    run_command(main, "data")
