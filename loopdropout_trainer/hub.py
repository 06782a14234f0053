"""Repositories on the Hub: their names, their commits, and the files that tell what they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from loopdropout_trainer.errors import UserError, check_name, first_line, hint_at_login, is_unreachable
from loopdropout_trainer.files import model_path
from loopdropout_trainer.hints import model_hint


TOKENIZER_FILES = ("*.json", "*.jinja", "*token*")
"""Patterns of the files of a repository that a tokenizer and a chat template are read from."""
_LARGE_FILES = ["*checkpoint-*/*", "global_step*/*"]


def split_revision(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return a name without its revision, and the revision. `user/model@branch` is the branch of a repository on the Hub.

    Args:
        name: Folder, Hub name, or Hub name with `@` and a branch, tag or commit, as in `hf://` addresses.
        revision: Branch, tag or commit that is given apart from the name.

    Raises:
        UserError: If there are two revisions, or one of a folder.
    """
    repository, _, own = name.partition("@")
    if not own or Path(name).expanduser().is_dir():
        return name, revision
    if Path(model_path(repository)).expanduser().is_dir():
        raise UserError(f"Only a repository on the Hub has branches, and {repository} is a folder, got {name!r}.")
    if name.startswith(("/", ".", "~")):  # the path of a folder that does not exist
        return name, revision
    if revision not in (None, own):
        raise UserError(
            f"{repository} must have one revision, got {own!r} in its name and {revision!r}. Remove `@{own}` from the name, "
            f"and set `model_revision` (in Python `revision`) to {own!r}."
        )
    return repository, own


def download_files(name: str, revision: str | None, what: str, patterns: Sequence[str]) -> tuple[Path, str]:
    """Download files of a repository, and return their folder and the commit.

    Args:
        name: Name of the repository, as the user typed it.
        revision: Branch, tag or commit.
        what: Noun for the thing in messages.
        patterns: Patterns of the names of the files.

    Raises:
        UserError: If the repository cannot be read.
    """
    from huggingface_hub.errors import RevisionNotFoundError

    check_repository_name(name)
    try:
        folder = _download(name, revision, patterns)
    except RevisionNotFoundError:
        raise UserError(f"The repository {name} on the Hub has no branch, tag or commit {revision!r}.") from None
    except (OSError, ValueError) as error:
        raise _explain_missing(name, what, error, model_hint(name)) from None
    return Path(folder), Path(folder).name


def check_repository_name(name: str) -> None:
    """Raise UserError for a name that no repository can have, or one without an owner that is close to that of a known model.

    It asks no question to the Hub, which could take half a minute without a connection.
    """
    hint = partial(model_hint, name)  # which reads all recipes, so only for an error
    check_name(name, hint)
    if "/" not in name and not is_downloaded(name):
        meant = hint()
        if meant:
            raise UserError(f"There is no folder {name}, and a model on the Hub has a name such as user/model.{meant}")


def _explain_missing(name: str, what: str, error: Exception, hint: str) -> UserError:
    """Return the error about a name that is neither a folder nor a repository that can be read.

    Args:
        name: Name of the repository, as the user typed it.
        what: Noun for the thing in messages.
        error: Error of the Hub's client.
        hint: Sentence about the name that is meant, or "".
    """
    is_path = means_folder(name)
    if is_unreachable(error) and not ("/" in name and is_path):  # so nobody knows whether the repository is there
        cause = "the Hub cannot be reached"
    elif is_path:  # such as recipes/missing, next to which there are other files
        return UserError(f"There is no folder {name}, and no {what} of this name that can be read on the Hub.{hint}")
    else:
        cause = "no repository that can be read on the Hub"
        hint += hint_at_login(error)
    reason = first_line(error).rstrip(".")
    return UserError(
        f"The {what} {name} cannot be loaded: there is no folder of this name, and {cause} ({reason}).{hint}"
    )


def is_downloaded(name: str) -> bool:
    """Return whether the cache of the Hub has files of a repository."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model")).is_dir()


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> str:
    """Return the folder with files of a repository, from the cache if the Hub cannot be reached.

    Releases of the Hub's client before 2.0 read the cache only for a branch or a tag. For a commit they ask the Hub, and raise
    the errors of the library that connects.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RevisionNotFoundError

    download = partial(
        snapshot_download, name, revision=revision, allow_patterns=list(patterns), ignore_patterns=_LARGE_FILES
    )
    if is_downloaded(name) and not can_reach_hub():  # its client would try for half a minute before it reads the cache
        with suppress(OSError, ValueError):
            return download(local_files_only=True)
    try:
        return download()
    except RevisionNotFoundError:
        raise
    except Exception as error:
        with suppress(OSError, ValueError):
            return download(local_files_only=True)
        if isinstance(error, OSError | ValueError):
            raise
        raise ConnectionError(str(error)) from error


def resolve_commit(name: str | None, revision: str | None) -> str | None:
    """Return the commit of a model on the Hub that was loaded from a branch, tag or commit; None for a folder."""
    from transformers.utils import cached_file

    if not name or Path(name).is_dir():
        return None
    try:
        file = cached_file(name, "config.json", revision=revision or "main", local_files_only=True)
    except (OSError, ValueError):
        return None
    commit = re.search(r"/snapshots/([0-9a-f]{40})/", Path(file or "").as_posix())
    return commit[1] if commit else None


def means_folder(name: str) -> bool:
    """Return whether the name of a model or an adapter that is not there means a folder: the folder around it is there."""
    return Path(name).parent.is_dir()


def can_reach_hub() -> bool:
    """Return whether the Hub answers within seconds, or is not to be asked. Its client would try for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:  # a repository that is not downloaded is an error immediately
        return True
    return _answers(constants.ENDPOINT)


@cache
def _answers(endpoint: str) -> bool:
    """Return whether a Hub answers. It is asked once in a process, because the answer can take seconds."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=5)
    except Exception:  # of the library that connects, which has changed between the releases of the client
        return False
    return True


def is_hub_name(name: str | None) -> bool:
    """Return whether a name has the form `user/model` and is not a folder here."""
    return name is not None and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()
