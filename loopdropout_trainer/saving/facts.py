"""The facts about the model or adapter that a name stands for: what it is, and what it runs with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import is_checkpoint, model_path, public_name
from loopdropout_trainer.gate_texts import check_gates, check_listed_depth
from loopdropout_trainer.hub import split_revision
from loopdropout_trainer.results.run_files import read_accepted_imports, read_imports
from loopdropout_trainer.results.sweep_folder import describe_progress
from loopdropout_trainer.saving import integrity
from loopdropout_trainer.saving.metadata import describe_plain_texts, describe_system_turn
from loopdropout_trainer.saving.saved_adapter import SavedAdapter
from loopdropout_trainer.settings.recipe_folders import list_runs


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from loopdropout_trainer.prompts import PromptFormat

Kind = Literal["base model", "merged model", "standalone model", "adapter", "unfinished run", "sweep"]
MODELS: tuple[Kind, ...] = ("base model", "merged model", "standalone model")
"""Kinds that are loaded without another model."""
LOADABLE: tuple[Kind, ...] = (*MODELS, "adapter")
WITHOUT_MODEL: tuple[Kind, ...] = ("unfinished run", "sweep")
"""Kinds that are not loaded."""
ALL_KINDS: tuple[Kind, ...] = get_args(Kind)

Gates = Literal["none", "at any depth", "at its own depth"]
"""Gates that a source runs with: none without an adapter, any at any depth if all loops share the update, and any at its own
depth if it has parameters for each loop."""


@dataclass(frozen=True, repr=False)
class Source:
    """What a name given to a command is, and what it runs with.

    Attributes:
        name: Name as typed.
        kind: "base model", "merged model", "standalone model" (merged, with the code of its class), "adapter",
            "unfinished run" (a run that has only checkpoints, or nothing yet), or "sweep" (a folder with the runs of a sweep).
        folder: Absolute folder of the model's or adapter's files, a snapshot for a repository on the Hub.
        repository: Name of the repository on the Hub, or None for a folder.
        commit: Resolved commit of `repository`.
        saved_in: Folder that was saved in one piece: `folder`, or the folder that contains it for a named adapter.
        run: Folder with the recipe and the results of the training.
        base: Folder or Hub name of the model that is loaded: the base model of an adapter, else the model itself.
        revision: Resolved commit of `base`, or the branch or tag of an older adapter, or None.
        rule: Name of the rule of the training.
        num_loops: Recurrence depth K that the source runs at unless another one is asked for: the depth of the training, or a
            model's own.
        depths: Smallest and largest depth of the training.
        gates: Gates that it runs with.
        tokenizer: Folder or Hub name of the tokenizer, and its revision.
        chat_template: Chat template of the training, if `tokenizer` does not have it.
        prompt_template: Format of the training's prompts, a text with a {field}.
        is_chat: Whether the training's examples were conversations, or None if unknown.
        dtype: Data type of the base weights in the training.
        quantization: Quantization of the base weights in the training.
        recipe: Settings of the training.
        columns: Columns that identify the results: `method` and `model`, or of an adapter `method`, `seed`, `step`, `adapter`
            and `training`.
        training_id: Identifier of the training, the same in all copies of its adapter.
        metadata: All fields of `loop_dropout.json`.
        adapter: Files of an adapter, or None for a model.
    """

    name: str
    kind: Kind
    folder: Path
    repository: str | None = None
    commit: str | None = None
    saved_in: Path = Path()
    run: Path = Path()
    base: str = ""
    revision: str | None = None
    rule: str | None = None
    num_loops: int | None = None
    depths: tuple[int, int] | None = None
    gates: Gates = "none"
    tokenizer: tuple[str, str | None] = ("", None)
    chat_template: str | None = None
    prompt_template: str | None = None
    is_chat: bool | None = None
    dtype: str | None = None
    quantization: Mapping[str, Any] | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    training_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    adapter: SavedAdapter | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter, which is loaded over a base model."""
        return self.kind == "adapter"

    @property
    def has_one_depth(self) -> bool:
        """Whether it runs at `num_loops` only."""
        return self.gates == "at its own depth"

    @property
    def results_folder(self) -> Path:
        """Folder with the results of this adapter or model: the run's, or the checkpoint's own."""
        return self.folder if is_checkpoint(self.folder) else self.run

    def check_run(self, num_loops: int | None = None, *gates: Any, listed: Sequence[int] | None = None) -> None:
        """Raise UserError if it does not run at a depth, or there under gates.

        Args:
            num_loops: Recurrence depth K. Default: its own.
            *gates: Gates such as "1-0-0-0", "loop 1" or "single_loop". None: unit gates, under which everything runs.
            listed: Depths of `eval_num_loops`, of which `num_loops` is one. The error about gates names those that they fit.
        """
        if num_loops is not None and self.has_one_depth and num_loops != self.num_loops:
            raise UserError(
                f"`num_loops` must be {self.num_loops} for {self.name}, whose rule {self.rule!r} has parameters for each "
                f"loop, got {num_loops}."
            )
        depth = num_loops or self.num_loops
        for text in gates:
            if text is None:
                continue
            if self.gates == "none":
                raise UserError(f"`gates` must be left out, because {self.name} has no adapter to gate, got {text!r}.")
            if depth is not None:  # which loading tells for an adapter without its settings
                if listed:
                    check_listed_depth(text, depth, gates, listed, self.num_loops)
                check_gates(text, depth)

    def check_mergeable(self) -> None:
        """Raise UserError if the update of an adapter differs between loops, so that it cannot be merged."""
        if not self.has_one_depth:  # whose loops share all parameters
            return
        try:
            self.adapter.check_mergeable()
        except UserError as error:
            raise UserError(f"{self.name}: {error} Serve and evaluate it as an adapter.") from None

    def check_files(self) -> None:
        """Raise UserError if files of a folder are damaged, or were not saved to the end."""
        if self.repository is None:  # the Hub's client compares the digests of what it downloads
            integrity.check(self.saved_in)

    def with_base(self, base: str | None, revision: str | None = None) -> Source:
        """Return the same adapter over another copy of its base model, such as a folder that has moved.

        Without another base model, only a given `revision` replaces the revision of the training.
        """
        if base is None:
            base = self.base
        else:
            base, revision = split_revision(str(model_path(base)), revision)
        if base == self.base:
            return replace(self, revision=revision or self.revision)
        own_tokenizer = self.tokenizer[0] != self.base
        tokenizer = self.tokenizer if own_tokenizer else (base, revision)
        return replace(self, base=base, revision=revision, tokenizer=tokenizer)

    def facts(self) -> dict[str, Any]:
        """Return the fields of `loop_dropout.json`, complete also for an adapter that was saved without some of them."""
        facts = {
            **self.metadata,
            "base_revision": self.revision,
            "num_loops": self.num_loops,
            "prompt_template": self.prompt_template,
            "is_chat": self.is_chat,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "training_id": self.training_id,
            **{name: self.columns.get(name) for name in ("method", "seed", "step")},
        }
        return {name: value for name, value in facts.items() if value is not None}

    def load_tokenizer(self, chat_template: str | None = None) -> PreTrainedTokenizerBase:
        """Load the tokenizer of the training, with another chat template if one is given."""
        from loopdropout_trainer.tokenizers import load_tokenizer

        return load_tokenizer(*self.tokenizer, chat_template or self.chat_template)

    def choose_prompt_format(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None, prompt_template: str | None = None
    ) -> PromptFormat:
        """Return the format of the prompts: the user's choice, else the training's, else the tokenizer's, else plain text.

        Args:
            tokenizer: Tokenizer from `load_tokenizer`.
            chat_template: The user's choice of a chat template, which `tokenizer` has.
            prompt_template: The user's choice of a text with a {field}.
        """
        from loopdropout_trainer.prompts import choose_prompt_format

        return choose_prompt_format(tokenizer, prompt_template or self.prompt_template, self.is_chat, chat_template)

    def describe_system_turn(self) -> str:
        """Return a sentence about the system turn of the conversations of the training, or "" if they have none."""
        return describe_system_turn(self.metadata)

    def describe_plain_texts(self) -> str:
        """Return a sentence about the plain texts of a training on conversations and texts, or "" for other trainings."""
        return describe_plain_texts(self.metadata)

    def lines(self) -> dict[str, str]:
        """Return the facts that `loopdropout show` prints, by title."""
        facts = {
            "name": public_name(self.name),
            "kind": self.kind,
            "folder": str(self.folder),
            "repository": _at(self.repository, self.commit),
            "run": str(self.run) if self.recipe and self.run != self.folder else None,
            "base model": self._base_text(),
        }
        if self.kind == "sweep":
            facts["runs"] = f"{len(list_runs(self.folder))}. {describe_progress(self.folder)}".rstrip()
        if self.kind not in WITHOUT_MODEL:  # of an unfinished run only the recipe is known
            facts |= {
                "objective": self.metadata.get("objective"),
                "rule": self.rule,
                "method": self._method_text(),
                "depth": self._depth_text(),
                "gates": self._gates_text(),
                "tokenizer": self._tokenizer_text(),
                "prompts": self._prompts_text(),
                "data type": self.dtype,
                "quantization": json.dumps(self.quantization) if self.quantization else None,
                "training": self.training_id,
                "imports": self._imports_text() if self.recipe else None,
            }
        return {title: text for title, text in facts.items() if text}

    def _imports_text(self) -> str:
        """Return the files of `--import` of the run, and which of them have changed since and were accepted."""
        accepted, texts = read_accepted_imports(self.run), []
        for path in read_imports(self.run):
            if path in accepted:
                texts.append(f"{path} (changed since the training, and accepted)")
            else:
                texts.append(path)
        return ", ".join(texts)

    def describe(self, with_prompts: bool = True) -> str:
        """Return the line that each command prints: what the name is, and what it runs with.

        Args:
            with_prompts: Whether to name the format of the prompts, which `chat` and `serve` print in a line of its own.
        """
        return f"{_at(public_name(self.name), self.commit)}: {self.describe_setup(with_prompts)}"

    def describe_setup(self, with_prompts: bool = True) -> str:
        """Return what the name is and what it runs with, without the name itself. `with_prompts`: as in `describe`."""
        facts = self.lines()
        kind = self.kind
        if "base model" in facts:
            kind += f" of {facts['base model']}"
        parts = [kind, facts["depth"], f"tokenizer: {facts['tokenizer']}"]
        if with_prompts:
            parts.append(f"prompts: {facts['prompts']}")
        return ", ".join(parts)

    def _base_text(self) -> str | None:
        """Return the base model of an adapter, or of a merged model that knows it."""
        if self.is_adapter:
            return _at(public_name(self.base), self.revision)
        return _at(self.metadata.get("base_model"), self.metadata.get("base_revision"))

    def _method_text(self) -> str | None:
        """Return the names of the training in tables of results."""
        facts = self.columns if self.is_adapter else self.metadata  # the columns of a model have no training
        names = [f"{name} {facts[name]}" for name in ("seed", "step") if facts.get(name) is not None]
        if names and facts.get("method") is not None:
            return ", ".join([facts["method"], *names])
        return None

    def _depth_text(self) -> str:
        if self.num_loops is None:
            return "the base model's depth" if self.is_adapter else "the model's own depth"
        if self.has_one_depth:
            return f"K = {self.num_loops}, runs at no other depth"
        has_other_depths = self.depths is not None and {*self.depths} != {self.num_loops}
        if has_other_depths:  # also of a model that was merged at another depth
            trained = " to ".join(map(str, dict.fromkeys(self.depths)))
            return f"K = {self.num_loops}, trained at {trained}, runs at any depth"
        return f"K = {self.num_loops}, runs at any depth"

    def _gates_text(self) -> str:
        if self.gates == "none":
            return "none, since it has no adapter"
        if self.has_one_depth:
            return f"any at K = {self.num_loops}, by default unit gates"
        return "any, by default unit gates"

    def _tokenizer_text(self) -> str:
        name, revision = self.tokenizer
        own_folders = {str(self.folder), str(self.saved_in)}
        if name in own_folders or not self.is_adapter and name == self.base:
            return "its own"
        if self.is_adapter and name == self.base:
            return "the base model's"
        return _at(public_name(name), revision) or "none"

    def _prompts_text(self) -> str:
        if self.prompt_template is not None:
            return repr(self.prompt_template)
        if self.is_chat is False:
            return "plain text"
        if self.metadata.get("has_plain_texts"):
            return "the tokenizer's chat template, and plain text"
        if self.chat_template is not None:
            return f"chat template {self.chat_template}"
        return "the tokenizer's chat template, else plain text"

    def __repr__(self) -> str:
        return "\n".join(f"{title:<14}{text}" for title, text in self.lines().items())


def _at(name: str | None, revision: str | None) -> str | None:
    if name and revision:
        return f"{name} at {revision}"
    return name
