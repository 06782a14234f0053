"""Push a saved adapter or a merged model to the Hub.

    loopdropout push outputs/gsm8k --hub_model_id user/name
    loopdropout push outputs/gsm8k --hub_model_id user/name --dry_run true
    loopdropout push outputs/gsm8k/merged --hub_model_id user/name --hub_private_repo true

Of the folder of a run, it pushes the adapter with its card, its settings and its
results. Checkpoints, answers to problems and other runs stay on this computer. The
repository, the branch and the visibility are by default those of the training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from loopdropout_trainer.errors import UserError, count, run_script
from loopdropout_trainer.saving.cards import CARD_FILE
from loopdropout_trainer.saving.facts import Source
from loopdropout_trainer.saving.merging import list_pushed_files, push_adapter, push_merged_to_hub
from loopdropout_trainer.saving.pushing import check_repository, describe_account
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.settings.arguments import option
from loopdropout_trainer.settings.recipe import name_words, parse
from loopdropout_trainer.terminal import print_sentences, titled


_REPOSITORY = "Name on the Hub (`user/model`) to push to."


@dataclass
class PushArguments:
    """The folder and the repository."""

    first_words = "FOLDER"

    folder: str = option(..., "Folder of an adapter or of a merged model.")
    hub_model_id: str | None = option(None, f"{_REPOSITORY} Default: the training's.")
    hub_private_repo: bool | None = option(None, "Whether a new repository is private. Default: as in the training.")
    hub_revision: str | None = option(
        None, "Branch to push to, which is created if it is missing. Default: the training's, else `main`."
    )
    dry_run: bool = option(False, "Print the files, the repository and the account, and stop.")


def complete_from_training(args: PushArguments, source: Source) -> PushArguments:
    """Return the arguments, completed by the visibility, the repository and the branch of the training.

    The repository is the training's only if the training pushed such weights: its adapter, or its merged model.
    """
    recipe = source.recipe
    if args.hub_private_repo is None:
        args = replace(args, hub_private_repo=recipe.get("hub_private_repo"))
    pushes_adapter = not recipe.get("push_merged_to_hub", False)
    if args.hub_model_id is None and pushes_adapter == source.is_adapter:
        args = replace(args, hub_model_id=recipe.get("hub_model_id"))
        if args.hub_revision is None:
            args = replace(args, hub_revision=recipe.get("hub_revision"))
    return args


def print_push(args: PushArguments, source: Source) -> None:
    """Print what a push would do. Only the name of the account is asked from the Hub, if there is a token."""
    files = list_pushed_files(source)
    visibility = "the default of the account, if the repository is new"
    if args.hub_private_repo is not None:
        word = "private" if args.hub_private_repo else "public"
        visibility = f"{word}, if the repository is new"
    repository = args.hub_model_id or "not set (`--hub_model_id USER/NAME`)"
    card = "none"
    if CARD_FILE in files:
        folder = source.saved_in if source.is_adapter else source.folder
        card = f"{Path(folder, CARD_FILE)}, in which the push names the repository"
    plan = {
        "repository": [repository],
        "branch": [args.hub_revision or "main"],
        "visibility": [visibility],
        "account": [describe_account()],
        "card": [card],
        "files": [f"{count(len(files), 'file')}, {sum(files.values()):,} bytes"],
    }
    plan["files"] += [f"{name}  {size:,}" for name, size in files.items()]
    for title, lines in plan.items():
        print(titled(title, lines))


ARGUMENTS = (PushArguments,)


def main(argv: list[str] | None = None) -> None:
    (args,) = parse(ARGUMENTS, name_words(argv, "folder"), __doc__)
    source = find_source(args.folder, accept=("adapter", "merged model", "standalone model"))
    if source.repository is not None:
        raise UserError(f"`folder` must be a folder on this computer, got the repository {args.folder}.")
    print_sentences(source.describe())
    args = complete_from_training(args, source)
    check_repository(args.hub_model_id)
    if args.dry_run:
        print_push(args, source)
        return
    if args.hub_model_id is None:
        raise UserError(f"`hub_model_id` must be set. {_REPOSITORY}")
    place = {"private": args.hub_private_repo, "revision": args.hub_revision}
    if source.is_adapter:
        address = push_adapter(source, args.hub_model_id, **place)
    else:
        address = push_merged_to_hub(source.folder, args.hub_model_id, **place)
    print(f"Pushed to {address}")


if __name__ == "__main__":
    run_script(main)
