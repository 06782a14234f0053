"""Write a saved adapter in the format of the paper authors' program.

    loopdropout export outputs/metamath_gsm --output_dir for_the_authors

Adapters in that format need no conversion: every command reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from loopdropout_trainer.errors import run_script
from loopdropout_trainer.saving.merging import export_authors_format
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.settings.arguments import option
from loopdropout_trainer.settings.recipe import name_words, parse
from loopdropout_trainer.terminal import print_sentences


@dataclass
class ExportArguments:
    """The adapter and the folder of the export."""

    first_words = "ADAPTER"

    adapter: str = option(..., "Folder or Hub name (`user/name@branch`) of the adapter.")
    output_dir: str = option(..., "Folder for the adapter in the authors' format.")


ARGUMENTS = (ExportArguments,)


def main(argv: list[str] | None = None) -> None:
    (args,) = parse(ARGUMENTS, name_words(argv, "adapter"), __doc__)
    source = find_source(args.adapter, accept=("adapter",), what="adapter")
    print_sentences(source.describe())
    folder = export_authors_format(source, args.output_dir)
    print_sentences(f"The adapter in the authors' format is in {folder}")


if __name__ == "__main__":
    run_script(main)
