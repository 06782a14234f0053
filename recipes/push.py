"""Push a saved adapter or a merged model to the Hub.

    loopdropout push outputs/gsm8k --hub_model_id user/name
    loopdropout push outputs/gsm8k/merged --hub_model_id user/name --hub_private_repo true

Of the folder of a run, it pushes the adapter with its card, its settings and its
results. Checkpoints, answers to problems and other runs stay on this computer.
"""

from __future__ import annotations

from dataclasses import dataclass

from loopdropout_trainer.arguments import option
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.recipe import name_words, parse
from loopdropout_trainer.saving.merging import push_adapter, push_merged_to_hub
from loopdropout_trainer.saving.source import find_source


@dataclass
class PushArguments:
    """The folder and the repository."""

    first_words = "FOLDER"

    folder: str = option(..., "Folder of an adapter or of a merged model.")
    hub_model_id: str = option(..., "Name on the Hub (`user/model`) to push to.")
    hub_private_repo: bool | None = option(None, "Whether a new repository is private.")
    hub_revision: str | None = option(None, "Branch to push to, which is created if it is missing. Default: `main`.")


ARGUMENTS = (PushArguments,)


def main(argv: list[str] | None = None) -> None:
    (args,) = parse(ARGUMENTS, name_words(argv, "folder"), __doc__)
    source = find_source(args.folder, accept=("adapter", "merged model", "standalone model"))
    if source.repository is not None:
        raise UserError(f"`folder` must be a folder on this computer, got the repository {args.folder}.")
    print(source.describe())
    place = {"private": args.hub_private_repo, "revision": args.hub_revision}
    if source.is_adapter:
        address = push_adapter(source, args.hub_model_id, **place)
    else:
        address = push_merged_to_hub(source.folder, args.hub_model_id, **place)
    print(f"Pushed to {address}")


if __name__ == "__main__":
    run_script(main)
