"""Show what a folder or Hub name is, and how commands run it.

    loopdropout show outputs/quickstart
    loopdropout show outputs/quickstart/merged user/model tiny-ouro

It prints the kind, the base model with its revision, the depth, the tokenizer and
the format of the prompts, which all commands use. It loads no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from loopdropout_trainer.arguments import option
from loopdropout_trainer.errors import run_script
from loopdropout_trainer.recipe import name_words, parse
from loopdropout_trainer.saving.facts import ALL_KINDS
from loopdropout_trainer.saving.source import find_source


@dataclass
class ShowArguments:
    """The folders or names to show."""

    first_words = "NAME [NAME ...]"

    names: list[str] = option(
        ..., "Folders or Hub names (`user/name@branch`) of runs, adapters and models, or `tiny-ouro`."
    )


ARGUMENTS = (ShowArguments,)


def main(argv: list[str] | None = None) -> None:
    (args,) = parse(ARGUMENTS, name_words(argv, "names"), __doc__)
    texts = [repr(find_source(name, accept=ALL_KINDS)) for name in args.names]
    print("\n\n".join(texts))


if __name__ == "__main__":
    run_script(main)
