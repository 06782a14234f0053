"""Pushes of a trainer to the Hub, and the card of its adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress

from loopdropout_trainer.results.training_results import saved_step
from loopdropout_trainer.saving.cards import read_card_fields, read_card_of, write_model_card
from loopdropout_trainer.saving.pushing import (
    create_branch,
    explain_push,
    find_command,
    find_repository,
    keep_card,
    name_on_card,
    push_in_background,
    push_run,
    read_card,
    upload,
)
from loopdropout_trainer.training.argument_checks import hint_at_arguments


class AdapterPushMixin:
    """Cards and pushes of a TRL trainer with a gated adapter. `AdapterTrainingMixin` lists its attributes."""

    @hint_at_arguments
    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        *,
        revision: str | None = None,
    ) -> None:
        """Write the card of the adapter, which names its base model and its rule, in place of TRL's.

        Args:
            model_name: Title of the card, as in TRL. Default: `hub_model_id`, or the name of `output_dir`.
            dataset_name: Name of the training data. Default: as the training knows it.
            tags: Further tags of the card.
            revision: Branch in the commands of the card. Default: `hub_revision`.
        """
        if self.is_world_process_zero():
            repo_id = self.hub_model_id or self.args.hub_model_id  # the first one, of a push, has its user
            self._write_card(model_name, dataset_name, tags, repo_id, revision or self.args.hub_revision)

    def _write_card(
        self,
        title: str | None = None,
        dataset: str | None = None,
        tags: str | list[str] | None = None,
        repo_id: str | None = None,
        revision: str | None = None,
    ) -> None:
        """Write the card with the title, the training data, the tags and the repository of `CardFields`."""
        if self.recipe is None:  # the folder may have the recipe and the results of other weights
            card = read_card_of(self.model)
        else:  # a command has written its recipe before the training, and before the end there may be other results
            weights = {"training": self.training_id, "step": saved_step(self)}
            card = read_card_fields(self.args.output_dir, weights)
        if dataset is not None:
            card = replace(card, dataset=dataset, data_description=None)
        card = replace(card, title=title, tags=tags or (), repo_id=repo_id, revision=revision)
        write_model_card(self.args.output_dir, self.model, card)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository, and the branch that `hub_revision` names. transformers creates no branch."""
        token = token or self.args.hub_token
        # transformers calls it in `__init__` for `push_to_hub`, before it makes the state of the training.
        saved, fix = "No file was uploaded.", {}
        if not hasattr(self, "state"):
            later = f"`{find_command(self.args.output_dir, self._hub_id)}`"
            saved = "Nothing was trained."
            fix = {
                "retry": "start again",
                "otherwise": f", or train without `push_to_hub` and push later with {later}",
            }
        with explain_push(self._hub_name, saved, token, **fix):
            if private is not None and self.is_world_process_zero():
                # Releases of transformers before 5.24 have no `private` here. They accept a repository that exists.
                HfApi(token=token).create_repo(self._hub_id, private=private, exist_ok=True)
            super().init_hf_repo(token)
            if self.is_world_process_zero():
                create_branch(self.hub_model_id, self.args.hub_revision, token)

    @hint_at_arguments
    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        *,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Push the adapter with its card. The arguments are those of transformers' Trainer and of `create_model_card`.

        A branch `revision` is created if it does not exist. Folders of checkpoints and other runs are not pushed. The card
        names the repository, unless the push fails. If a push in the background fails, a warning says so.

        Raises:
            UserError: If the push fails. The adapter is saved then.
        """
        args = self.args
        token, revision = token or args.hub_token, revision or args.hub_revision
        self.callback_handler.on_push_begin(args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        if isinstance(tags, str):
            tags = [tags]
        tags = [*(tags or ()), *(getattr(self.model, "model_tags", None) or ())]
        self._finish_current_push()
        return self._push(
            [partial(self._push_adapter, commit_message, token, revision)],
            f"The adapter is saved in {args.output_dir}.",
            token,
            revision,
            background=not blocking,
            card={"model_name": model_name, "dataset_name": dataset_name, "tags": tags},
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the adapter of a checkpoint in the background, without the folders of other runs."""
        args = self.args
        is_busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if is_busy and not args.hub_always_push:
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        place = f"step {self.state.global_step}"
        if args.save_strategy == SaveStrategy.EPOCH:
            place = f"epoch {int(self.state.epoch)}"
        message = f"Training in progress, {place}"
        uploads = [partial(self._push_adapter, message, args.hub_token, args.hub_revision)]
        names = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: Path(checkpoint_folder).name}
        if args.hub_strategy in names:
            upload_checkpoint = partial(
                upload,
                checkpoint_folder,
                self.hub_model_id,
                f"{message}, checkpoint",
                token=args.hub_token,
                branch=args.hub_revision,
                path_in_repo=names[args.hub_strategy],
            )
            uploads.append(upload_checkpoint)
        saved = f"The adapter of {place} is saved in {checkpoint_folder}, and the training continues."
        jobs = [self._push(uploads, saved, args.hub_token, args.hub_revision, background=True)]
        if is_busy:
            jobs = [*self.push_in_progress.jobs, *jobs]
        self.push_in_progress = PushInProgress(jobs)

    def _push(
        self,
        uploads: Sequence[Callable[[], CommitInfo]],
        saved: str,
        token: str | None,
        revision: str | None,
        background: bool,
        card: Mapping[str, Any] = MappingProxyType({}),
    ) -> CommitInfo | Future[CommitInfo]:
        """Write the card and run uploads. If one of them fails, also later, the card does not name the repository.

        Args:
            uploads: Functions that upload, of which the result of the first one is returned.
            saved: Sentence on what is saved on this computer.
            token, revision: Token and branch of the push.
            background: Whether to return before the uploads have ended.
            card: Arguments of `create_model_card`.
        """
        folder = self.args.output_dir
        command = find_command(folder, self.hub_model_id, revision, self.args.hub_private_repo)
        retry = f"push again with `{command}`"
        explain = partial(explain_push, self._hub_name, saved, token, retry)

        def push() -> CommitInfo:
            with explain():
                commits = [run_upload() for run_upload in uploads]
            return commits[0]

        # The first card does not name the repository. If the push fails, it stays: `keep_card` restores it inside of the
        # block, and `push_in_background` later.
        self._write_card(card.get("model_name"), card.get("dataset_name"), card.get("tags"))
        card_without_repository = read_card(folder)
        with explain(), keep_card(folder):
            self.create_model_card(**card)  # a subclass may write a card of its own
            create_branch(self.hub_model_id, revision, token)
            with name_on_card(folder, self.hub_model_id, revision):
                if background:
                    return push_in_background(push, folder, card_without_repository)
                return push()

    def _push_adapter(self, message: str, token: str | None, branch: str | None) -> CommitInfo:
        return push_run(
            self.args.output_dir,
            self.hub_model_id,
            self.model.peft_config,
            message=message,
            token=token,
            branch=branch,
        )

    @property
    def _hub_id(self) -> str:
        """The repository to push to. As in transformers, it has the name of `output_dir` by default."""
        return find_repository(self.args)

    @property
    def _hub_name(self) -> str:
        """The repository in messages."""
        if self.args.hub_model_id:
            return self._hub_id
        return f"the repository {self._hub_id}, which has the name of `output_dir` because `hub_model_id` is not set,"
