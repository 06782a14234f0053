"""Show what a folder or Hub name is, and how commands run it.

    loopdropout show outputs/quickstart
    loopdropout show outputs/quickstart/merged user/model tiny-ouro

It prints the kind, the base model with its revision, the depth, the tokenizer and
the format of the prompts, which all commands use. It loads no weights. A wrong
name ends in an error after the other names are shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.saving.facts import ALL_KINDS
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.settings.arguments import option
from loopdropout_trainer.settings.recipe import name_words, parse


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
    texts, errors = [], []
    for name in args.names:
        try:
            texts.append(repr(find_source(name, accept=ALL_KINDS)))
        except UserError as error:
            errors.append(str(error))
    if texts:
        print("\n\n".join(texts))
    if errors:
        raise UserError(" ".join(errors))


if __name__ == "__main__":
    run_script(main)
