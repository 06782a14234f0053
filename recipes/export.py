"""Write a saved adapter in the format of the paper authors' program, which then evaluates it or generates with it.

    python recipes/export.py --adapter outputs/metamath_gsm --export_dir outputs/for_the_authors

The other way needs no command: where an adapter is asked for, one of theirs is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loopdropout_trainer.checks import check_folder
from loopdropout_trainer.errors import run_command
from loopdropout_trainer.saving.adapter_files import export_adapter
from loopdropout_trainer.settings.recipe import parse_recipe


@dataclass
class ExportArguments:
    """Which adapter to write, and where to."""

    adapter: str = field(metadata={"help": "Folder of the adapter, or its name on the Hub."})
    export_dir: str = field(metadata={"help": "Folder for the adapter in the authors' format."})


def main(argv: list[str] | None = None) -> None:
    (export,), _ = parse_recipe((ExportArguments,), argv, description=__doc__)
    check_folder("export_dir", export.export_dir)
    print(f"Adapter in the authors' format in {export_adapter(export.adapter, export.export_dir)}")


if __name__ == "__main__":
    run_command(main)
