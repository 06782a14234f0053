"""Pushes to the Hub, whose errors become one sentence without tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects, validate_repo_id

from loopdropout_trainer.errors import UserError, first_line, hide_secrets, is_unreachable, join_command
from loopdropout_trainer.files import TEMPORARY_FILES
from loopdropout_trainer.results.failures import FAILED, LOG


if TYPE_CHECKING:
    from transformers import TrainingArguments


logger = logging.getLogger(__name__)


def find_repository(args: TrainingArguments) -> str:
    """Return the repository that a training pushes to. As in transformers, it has the name of `output_dir` by default."""
    return args.hub_model_id or Path(args.output_dir).absolute().name


def check_repository(name: str | None) -> None:
    """Raise UserError for a name of a repository that the Hub refuses. It needs no network."""
    if name is None:
        return
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(
            f"`hub_model_id` must be a name on the Hub such as user/model, got {name!r} ({first_line(error)})."
        ) from None


def find_command(folder: str | Path, repo_id: str, revision: str | None = None, private: bool | None = None) -> str:
    """Return the command that pushes a saved adapter. The arguments are those of `push_adapter`."""
    words = ["push", str(folder), "--hub_model_id", repo_id]
    if revision is not None:
        words += ["--hub_revision", revision]
    if private is not None:
        words += ["--hub_private_repo", str(private).lower()]
    return join_command(*words)


@contextmanager
def explain_push(
    repo_id: str, saved: str, token: str | None = None, retry: str = "push again", otherwise: str = ""
) -> Iterator[None]:
    """Raise UserError if a push inside of the block fails.

    Without a connection, the message also says if no token was found, which would be the next error.

    Args:
        repo_id: Repository.
        saved: Sentence on what is saved on this computer.
        token: Hub token of the push, which the message must not show.
        retry: What to do after the cause is fixed.
        otherwise: What to do else, as the end of a sentence.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the Hub's client raises the errors of several libraries
        reason = hide_secrets(first_line(error).replace(token or "\0", "***"))
        cause, fix, missing = "", f"{LOG_IN}, and {retry}", ""
        if is_unreachable(error):
            cause = ", because the Hub cannot be reached"
            fix = f"{retry[0].upper()}{retry[1:]} when there is a connection"
            missing = "" if has_token(token) else f" No token was found either. {LOG_IN}."
        if isinstance(error, HFValidationError):
            fix = f"Correct the name, and {retry}"
        raise UserError(
            f"The push to {repo_id} failed{cause} ({type(error).__name__}: {reason}). {saved} {fix}{otherwise}."
            f"{missing}"
        ) from None


@contextmanager
def name_on_card(folder: str | Path, repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Name a repository on the card of a folder for a push inside of the block, and restore the card if the push fails.

    The arguments are those of `name_repository`.
    """
    from loopdropout_trainer.saving.cards import name_repository

    with keep_card(folder):
        if not name_repository(folder, repo_id, revision):
            logger.warning(f"The model card does not name {repo_id}, because it was written for another repository.")
        yield


@contextmanager
def keep_card(folder: str | Path) -> Iterator[None]:
    """Restore the card of a folder if the block raises an exception or is interrupted."""
    before = read_card(folder)
    try:
        yield
    except BaseException:  # also for Ctrl-C
        _restore_card(folder, before)
        raise


def read_card(folder: str | Path) -> bytes | None:
    """Return the card of a folder, or None if it has none."""
    card = _locate_card(folder)
    return card.read_bytes() if card.is_file() else None


def _restore_card(folder: str | Path, before: bytes | None) -> None:
    card = _locate_card(folder)
    if before is None:
        card.unlink(missing_ok=True)
    else:
        card.write_bytes(before)


def _locate_card(folder: str | Path) -> Path:
    from loopdropout_trainer.saving.cards import CARD_FILE

    return Path(folder, CARD_FILE)


def push_in_background(push: Callable[[], CommitInfo], folder: str | Path, before: bytes | None) -> Future[CommitInfo]:
    """Push while the program continues. If the push fails later, the reason is logged, and the folder gets its old card.

    Args:
        push: Function that pushes, and explains its errors by `explain_push`.
        folder: Folder whose card names the repository.
        before: Card without the repository (`read_card`). It does not replace a card that was written during the push.
    """
    pushed = read_card(folder)

    def run_push() -> CommitInfo:
        try:
            return push()
        except Exception as error:
            if read_card(folder) == pushed:
                _restore_card(folder, before)
            logger.warning(str(error))
            raise

    return HfApi().run_as_future(run_push)


LOG_IN = "Log in with `hf auth login` or set HF_TOKEN"
"""Beginning of a sentence on how to get a token of the Hub."""


def has_token(token: str | None = None) -> bool:
    """Return whether a push has a token of the Hub: the one that is given, or that of the logged-in user."""
    from huggingface_hub import get_token

    return bool(token or get_token())


def describe_account() -> str:
    """Return the account that pushes, as far as it is known, or that no token was found."""
    if not has_token():
        return f"no token was found. {LOG_IN}"
    try:
        return HfApi().whoami()["name"]
    except Exception as error:  # the Hub's client raises the errors of several libraries
        cause = "the Hub cannot be reached"
        if not is_unreachable(error):
            cause = f"{type(error).__name__}: {hide_secrets(first_line(error))}"
        return f"a token was found, but its account is not known ({cause})"


def create_branch(repo_id: str, branch: str | None, token: str | None = None) -> None:
    """Create a branch of a repository unless it exists, because a push to a missing branch fails."""
    if branch is not None:
        HfApi(token=token).create_branch(repo_id, branch=branch, exist_ok=True)


def list_files(folder: str | Path, leave_out: Iterable[str] = ()) -> list[str]:
    """Return the paths of the files in a folder that `upload` uploads, relative to it.

    Args:
        folder: Folder.
        leave_out: Patterns of further files that stay on this computer.
    """
    paths = sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    ignored = [*DEFAULT_IGNORE_PATTERNS, *TEMPORARY_FILES, *leave_out]  # the first ones are those of the Hub's client
    return list(filter_repo_objects(paths, ignore_patterns=ignored))


def upload(
    folder: str | Path,
    repo_id: str,
    message: str,
    *,
    token: str | None = None,
    branch: str | None = None,
    leave_out: Iterable[str] = (),
    **options: Any,
) -> CommitInfo:
    """Upload a folder without the locks and temporary files of this package.

    Args:
        folder: Folder.
        repo_id: Repository, which exists.
        message: Message of the commit.
        token: Hub token. Default: the token of the logged-in user.
        branch: Branch, which exists. Default: `main`.
        leave_out: Patterns of further files that stay on this computer.
        **options: Further arguments of `HfApi.upload_folder`.
    """
    return HfApi(token=token).upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=message,
        revision=branch,
        ignore_patterns=[*TEMPORARY_FILES, *leave_out],
        **options,
    )


_OF_TRAINING = ("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "latest", "zero_to_fp32.py")
"""Patterns of the files of a checkpoint that only continue its training."""

_OF_SWEEP = ("*.lock", LOG, FAILED)
"""Patterns of the files that a sweep adds to the folder of a run. The log and a cause name folders of this computer."""


def patterns_left_out(folder: str | Path, adapters: Iterable[str] = ()) -> list[str]:
    """Return the patterns of files in the folder of a run that a push of its adapters leaves out. See `push_run`."""
    uploaded = {*adapters, "runs"}  # the Hub shows the curves of TensorBoard in `runs`
    others = [f"{path.name}/*" for path in Path(folder).iterdir() if path.is_dir() and path.name not in uploaded]
    return ["_*", "samples_*", *_OF_TRAINING, *_OF_SWEEP, *others]


def push_run(
    folder: str | Path,
    repo_id: str,
    adapters: Iterable[str] = (),
    *,
    message: str = "Upload adapter with its results",
    token: str | None = None,
    branch: str | None = None,
) -> CommitInfo:
    """Upload the adapter in the folder of a run, with its card, its settings and its results.

    Checkpoints, merged models, answers to problems and other runs in the folder stay on this computer.

    Args:
        folder: Folder of the run.
        repo_id: Repository, which exists.
        adapters: Names of the adapters. PEFT saves the adapter `x` in the subfolder `x`, and the adapter `default` in no
            subfolder.
        message: Message of the commit.
        token: Hub token. Default: the token of the logged-in user.
        branch: Branch, which exists. Default: `main`.
    """
    return upload(
        folder,
        repo_id,
        message,
        token=token,
        branch=branch,
        leave_out=patterns_left_out(folder, adapters),
    )
