"""Pushes to the Hub, whose errors become one sentence without tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HFValidationError

from loopdropout_trainer.errors import UserError, first_line, hide_secrets, is_unreachable
from loopdropout_trainer.files import TEMPORARY_FILES


if TYPE_CHECKING:
    from transformers import TrainingArguments


def find_repository(args: TrainingArguments) -> str:
    """Return the repository that a training pushes to. As in transformers, it has the name of `output_dir` by default."""
    return args.hub_model_id or Path(args.output_dir).absolute().name


@contextmanager
def explain_push(
    repo_id: str, saved: str, token: str | None = None, retry: str = "push again", otherwise: str = ""
) -> Iterator[None]:
    """Raise UserError if a push inside of the block fails.

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
        cause, fix = "", f"Log in with `hf auth login` or set HF_TOKEN, and {retry}"
        if is_unreachable(error):
            cause, fix = ", because the Hub cannot be reached", f"{retry.capitalize()} when there is a connection"
        if isinstance(error, HFValidationError):
            fix = f"Correct the name, and {retry}"
        raise UserError(
            f"The push to {repo_id} failed{cause} ({type(error).__name__}: {reason}). {saved} {fix}{otherwise}."
        ) from None


def create_branch(repo_id: str, branch: str | None, token: str | None = None) -> None:
    """Create a branch of a repository unless it exists, because a push to a missing branch fails."""
    if branch is not None:
        HfApi(token=token).create_branch(repo_id, branch=branch, exist_ok=True)


def upload(
    folder: str | Path,
    repo_id: str,
    message: str,
    *,
    token: str | None = None,
    branch: str | None = None,
    leave_out: Iterable[str] = (),
    **options: Any,
) -> CommitInfo | Future[CommitInfo]:
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


def push_run(
    folder: str | Path,
    repo_id: str,
    adapters: Iterable[str] = (),
    *,
    message: str = "Upload adapter with its results",
    token: str | None = None,
    branch: str | None = None,
    background: bool = False,
) -> CommitInfo | Future[CommitInfo]:
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
        background: Whether to return before the upload has ended.
    """
    uploaded = {*adapters, "runs"}  # the Hub shows the curves of TensorBoard in `runs`
    others = [f"{path.name}/*" for path in Path(folder).iterdir() if path.is_dir() and path.name not in uploaded]
    return upload(
        folder,
        repo_id,
        message,
        token=token,
        branch=branch,
        leave_out=["_*", "samples_*", *_OF_TRAINING, *others],
        run_as_future=background,
    )
