"""What a name given to a command is, and what it runs with.

Every command takes a name: a folder, a repository on the Hub or `tiny-ouro`. `find_source` is the only function that looks at
the files of a folder to find out what it is. It returns a `Source`, and `loading.load` loads it.

A training writes `loop_dropout.json` next to its adapter, and merging writes it next to the merged model. The file has all
that a later command needs, so that a folder that was renamed, copied or uploaded gives the same `Source`. Older folders
without the file, or with an older version of it, are read from `adapter_config.json` and from the recipe of their run.

To add a kind of folder, add it to `Kind` and `_find_files`, with a row in `TABLE` of tests/saving/test_source.py. A kind that
no command can load also needs its sentence in `_refusal`, and a row in `WRONG` instead.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from loopdropout_trainer.arguments import SourceArguments
from loopdropout_trainer.errors import UserError, check_name, check_type, closest_match, first_line
from loopdropout_trainer.files import (
    TINY_OURO_PATH,
    checkpoint_step,
    is_checkpoint,
    model_path,
    read_json_object,
    write_file,
)
from loopdropout_trainer.memory import read_depth
from loopdropout_trainer.recipe import name_words
from loopdropout_trainer.results import RECIPE_FILE, RESULTS_FILE, RUN_FILE, read_recipe, recipe_path
from loopdropout_trainer.saving import integrity
from loopdropout_trainer.saving.authors_format import CONFIG_FILE, WEIGHTS_FILE, read_authors_config, to_metadata
from loopdropout_trainer.saving.checkpoints import list_checkpoints, newest_checkpoint


if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from loopdropout_trainer.prompts import PromptFormat

Kind = Literal["base model", "merged model", "standalone model", "adapter", "unfinished run"]
MODELS: tuple[Kind, ...] = ("base model", "merged model", "standalone model")
"""Kinds that are loaded without another model."""
LOADABLE: tuple[Kind, ...] = (*MODELS, "adapter")
ALL_KINDS: tuple[Kind, ...] = get_args(Kind)

METADATA_FILE = "loop_dropout.json"
METADATA_VERSION = 1
"""Version of the fields of `METADATA_FILE`. A file without a version is older than version 1."""

_METADATA_TYPES = {
    "version": int | None,
    "kind": str | None,
    "rule": str | None,
    "num_loops": int | None,
    "depths": list[int] | None,
    "eos_token_id": list[int] | None,
    "prompt_template": str | None,
    "is_chat": bool | None,
    "base_revision": str | None,
    "dtype": str | None,
    "quantization": dict[str, Any] | None,
    "training_id": str | None,
}
_SMALL_FILES = ["*.json", "*.jinja", "*token*", "*adapter_*", "looped.py", RECIPE_FILE, RESULTS_FILE]
"""Files of a repository on the Hub that tell what it is. The weights of an adapter are among them, a model's are not."""
_LARGE_FILES = ["*checkpoint-*/*", "global_step*/*"]


@dataclass(frozen=True, repr=False)
class Source:
    """What a name given to a command is, and what it runs with.

    Attributes:
        name: Name as typed.
        kind: "base model", "merged model", "standalone model" (merged, with the code of its class), "adapter", or
            "unfinished run" (a run that has only checkpoints, or nothing yet).
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
        has_one_depth: Whether it runs at `num_loops` only, since it has parameters for each loop.
        tokenizer: Folder or Hub name of the tokenizer, and its revision.
        chat_template: Chat template of the training, if `tokenizer` does not have it.
        prompt_template: Format of the training's prompts, a text with a {field}.
        is_chat: Whether the training's examples were conversations, or None if unknown.
        dtype: Data type of the base weights in the training.
        quantization: Quantization of the base weights in the training.
        recipe: Settings of the training.
        columns: Columns that identify the results: `method`, `seed`, `step`, and `adapter` or `model`.
        training_id: Identifier of the training, the same in all copies of its adapter.
        metadata: All fields of `METADATA_FILE`.
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
    has_one_depth: bool = False
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

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter, which runs with gates. A model has none."""
        return self.kind == "adapter"

    @cached_property
    def is_mergeable(self) -> bool:
        """Whether every loop uses the same update."""
        return self.is_adapter and not self.has_one_depth

    @property
    def results_folder(self) -> Path:
        """Folder with the results of this adapter or model: the run's, or the checkpoint's own."""
        return self.folder if is_checkpoint(self.folder) else self.run

    def check_depth(self, num_loops: int) -> None:
        """Raise UserError if it does not run at a depth."""
        if self.has_one_depth and num_loops != self.num_loops:
            raise UserError(
                f"`num_loops` must be {self.num_loops} for {self.name}, whose rule {self.rule!r} has parameters for each "
                f"loop, got {num_loops}."
            )

    def check_gates(self, gates: str | None) -> None:
        """Raise UserError if gates are given, and it has no adapter that they could multiply."""
        if gates is not None and not self.is_adapter:
            raise UserError(f"`gates` must be left out, because {self.name} has no adapter to gate, got {gates!r}.")

    def check_mergeable(self) -> None:
        """Raise UserError if it cannot be merged."""
        if not self.is_mergeable:
            raise UserError(
                f"{self.name} cannot be merged, because the update of its rule {self.rule!r} differs between loops. Serve and "
                "evaluate it as an adapter."
            )

    def check_files(self) -> None:
        """Raise UserError if files of a folder are damaged, or were not saved to the end."""
        if self.repository is None:  # the Hub's client compares the digests of what it downloads
            integrity.check(self.saved_in)

    def with_base(self, base: str | None, revision: str | None = None) -> Source:
        """Return the same adapter over another copy of its base model, such as a folder that has moved.

        Without another base model, only a given `revision` replaces the revision of the training.
        """
        base = self.base if base is None else str(model_path(base))
        if base == self.base:
            return replace(self, revision=revision or self.revision)
        own_tokenizer = self.tokenizer[0] != self.base
        tokenizer = self.tokenizer if own_tokenizer else (base, revision)
        return replace(self, base=base, revision=revision, tokenizer=tokenizer)

    def as_base(self) -> Source:
        """Return the source of the base model of an adapter, or of a model itself."""
        return find_source(self.base, revision=self.revision, accept=MODELS) if self.is_adapter else self

    def facts(self) -> dict[str, Any]:
        """Return the fields of `METADATA_FILE`, complete also for an adapter that was saved without some of them."""
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

    def lines(self) -> dict[str, str]:
        """Return the facts that `loopdropout show` prints, by title."""
        facts = {
            "name": self.name,
            "kind": self.kind,
            "folder": str(self.folder),
            "repository": _at(self.repository, self.commit),
            "run": str(self.run) if self.recipe else None,
            "base model": _at(_public(self.base), self.revision) if self.is_adapter else None,
            "rule": self.rule,
            "depth": self._depth_text(),
            "gates": self._gates_text(),
            "tokenizer": _at(_public(self.tokenizer[0]), self.tokenizer[1]) if self.tokenizer[0] else None,
            "prompts": self._prompts_text(),
            "data type": self.dtype,
            "quantization": json.dumps(self.quantization) if self.quantization else None,
            "results": ", ".join(f"{name}={value}" for name, value in self.columns.items() if value is not None),
            "training": self.training_id,
        }
        return {title: text for title, text in facts.items() if text}

    def describe(self) -> str:
        """Return the line that each command prints: what the name is, and what it runs with."""
        facts = self.lines()
        base = facts.get("base model") or _at(_public(self.base), self.revision)
        parts = [
            f"base model {base}",
            facts["depth"],
            f"tokenizer {facts.get('tokenizer')}",
            f"prompts {facts['prompts']}",
        ]
        return f"{self.name}: {self.kind}, {', '.join(parts)}"

    def _depth_text(self) -> str:
        if self.num_loops is None:
            return "the model's own"
        text = f"K = {self.num_loops}"
        if self.has_one_depth:
            return f"{text} only"
        if self.depths and self.depths[0] != self.depths[1]:
            return f"{text}, trained at {self.depths[0]} to {self.depths[1]}, runs at any"
        return f"{text}, runs at any"

    def _gates_text(self) -> str:
        if not self.is_adapter:
            return "none, since it has no adapter"
        return "unit gates, or any"

    def _prompts_text(self) -> str:
        if self.prompt_template is not None:
            return repr(self.prompt_template)
        if self.is_chat is False:
            return "plain text"
        if self.chat_template is not None:
            return f"chat template {self.chat_template}"
        return "the tokenizer's chat template, else plain text"

    def __repr__(self) -> str:
        return "\n".join(f"{title:<14}{text}" for title, text in self.lines().items())


def _at(name: str | None, revision: str | None) -> str | None:
    return f"{name} at {revision}" if name and revision else name


def _public(name: str) -> str:
    return "tiny-ouro" if name == str(TINY_OURO_PATH) else name


# Finding a source


class Files(NamedTuple):
    """What the files of a folder are: the kind, and the folder that holds them, which is a subfolder for a named adapter."""

    kind: Kind
    folder: Path


def find_source(
    name: str | Path, *, revision: str | None = None, accept: Collection[Kind] = LOADABLE, what: str = "model"
) -> Source:
    """Find out what a name is and what it runs with.

    Args:
        name: Folder, Hub name or `tiny-ouro`.
        revision: Branch, tag or commit of a Hub name.
        accept: Kinds that the caller can use.
        what: Noun for the thing in messages.

    Raises:
        UserError: If there is no such folder or repository, if it holds no model and no adapter, or one that the caller cannot
            use. An unfinished run names its newest complete checkpoint.
    """
    text = str(name)
    given = Path(model_path(text)).expanduser()
    repository = commit = None
    if not given.is_dir():
        repository = text
        given, commit = _download(text, revision, what)
    files = _find_files(given.resolve(), text)
    if files.kind not in accept:
        raise UserError(_refusal(files.kind, text, given, accept))
    if files.kind == "unfinished run":
        run, recipe = recipe_path(given).parent, read_recipe(given)
        return Source(text, files.kind, given.resolve(), repository, commit, run, recipe=recipe)
    source = _read_source(text, files, given.resolve(), repository, commit)
    return replace(source, columns=_read_columns(source))


def find_source_of(name: str | Path, adapter: str | Path | None = None, revision: str | None = None) -> Source:
    """Find the source of a model or adapter, or of an adapter over a given base model.

    Args:
        name: Model or adapter, or the base model of `adapter`.
        adapter: Adapter over the base model `name`.
        revision: Branch, tag or commit of a repository `name`. For an adapter in a folder, of its base model.
    """
    if adapter is not None:
        return find_source(adapter, accept=("adapter",), what="adapter").with_base(str(name), revision)
    source = find_source(name, revision=revision)
    if source.is_adapter and source.repository is None:
        return source.with_base(None, revision)
    return source


def _find_files(folder: Path, name: str) -> Files:
    """Return what the files of a folder are.

    PEFT saves the adapter `default` in the folder itself, and another adapter in a subfolder with its name. If there are
    several, the trained one has the settings of a training.
    """
    named = [path.parent for path in sorted(folder.glob(f"*/{CONFIG_FILE}")) if not is_checkpoint(path.parent)]
    trained = [path for path in named if (path / METADATA_FILE).is_file()]
    if holds_adapter(folder):
        is_trained = (folder / METADATA_FILE).is_file() or len(trained) != 1
        return Files("adapter", folder if is_trained else trained[0])
    if (folder / "config.json").is_file():
        metadata = read_metadata(folder)
        old_kind = "base model"
        if (folder / "looped.py").is_file():
            old_kind = "standalone model"
        elif (folder / RECIPE_FILE).is_file():
            old_kind = "merged model"
        return Files(metadata.get("kind", old_kind), folder)
    trained = trained or named
    if len(trained) > 1:
        names = ", ".join(path.name for path in trained)
        raise UserError(f"`adapter` must be the folder of one adapter, got {name} with the adapters {names}.")
    if trained:
        return Files("adapter", trained[0])
    if is_checkpoint(folder):
        return Files("unfinished run", folder)
    is_run = any((folder / file).is_file() for file in (RECIPE_FILE, RUN_FILE, METADATA_FILE))
    if is_run or list_checkpoints(folder):
        return Files("unfinished run", folder)
    raise UserError(
        f"The folder {name} holds neither a model nor an adapter: it has no config.json and no {CONFIG_FILE}, and it is not a "
        "run."
    )


def _refusal(kind: Kind, name: str, folder: Path, accept: Collection[Kind]) -> str:
    """Return why a kind of source cannot be used."""
    if kind == "unfinished run":
        if is_checkpoint(folder):
            return (
                f"The checkpoint {name} is not complete: it has no {CONFIG_FILE}. Use another checkpoint of the run."
            )
        newest = newest_checkpoint(folder)
        if newest is None:
            return f"The run in {name} has no model yet, and no complete checkpoint. Train it first."
        return (
            f"The run in {name} has no model yet, because it is not finished. Its newest complete checkpoint is {newest}. Use "
            "that folder, or continue the training with `--resume_from_checkpoint true`."
        )
    if kind == "adapter":
        return (
            f"{name} must be a model, but it is an adapter. To train it further, set `adapter_name_or_path` in a recipe, or "
            f"load it with `load_adapter(load_model(base), {name!r}, is_trainable=True)`."
        )
    return f"{name} must be an adapter, but it is a {kind}."


def _download(name: str, revision: str | None, what: str) -> tuple[Path, str]:
    """Download the small files of a repository on the Hub, and return their folder and the commit."""
    from huggingface_hub import snapshot_download

    hint = closest_match(name, ["tiny-ouro"])
    check_name(name, hint)
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=_SMALL_FILES, ignore_patterns=_LARGE_FILES)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The {what} {name} cannot be loaded: there is no folder of this name, and no repository that can be read on the "
            f"Hub ({first_line(error)}).{hint}"
        ) from error
    return Path(folder), Path(folder).name


def _read_source(name: str, files: Files, given: Path, repository: str | None, commit: str | None) -> Source:
    """Return the source of a model or an adapter without the columns of its results."""
    run = recipe_path(given).parent
    recipe = read_recipe(given)
    metadata = read_metadata(files.folder) or read_metadata(given)
    source = Source(
        name=name,
        kind=files.kind,
        folder=files.folder,
        repository=repository,
        commit=commit,
        saved_in=given,
        run=run,
        rule=metadata.get("rule"),
        prompt_template=metadata.get("prompt_template", _prompt_template(recipe)),
        is_chat=metadata.get("is_chat"),
        dtype=metadata.get("dtype", recipe.get("dtype")),
        quantization=metadata.get("quantization", (recipe.get("model_init_kwargs") or {}).get("quantization_config")),
        recipe=recipe,
        training_id=metadata.get("training_id"),
        metadata=metadata,
    )
    if files.kind == "adapter":
        source = _read_adapter(source)
    else:
        base = repository or str(files.folder)
        source = replace(source, base=base, revision=commit, num_loops=config_depth(files.folder))
    folders = [folder for folder in (files.folder, given, run) if (folder / "tokenizer.json").is_file()]
    if folders and (repository is None or source.is_adapter):
        return replace(source, tokenizer=(str(folders[0]), None))
    if source.is_adapter:  # it has no tokenizer of its own, whose template would be the training's
        return replace(source, tokenizer=(source.base, source.revision), chat_template=recipe.get("chat_template"))
    return replace(source, tokenizer=(source.base, source.revision))


def _read_adapter(source: Source) -> Source:
    """Return the source of an adapter with its base model and its depths."""
    base, revision = read_base(source.folder)
    recipe, metadata = source.recipe, source.metadata
    is_same_base = model_path(recipe.get("model_name_or_path")) == base
    if revision is None and is_same_base and recipe.get("model_revision") not in (None, "main"):
        revision = recipe["model_revision"]  # the base model of an adapter that was saved without its commit
    num_loops = metadata.get("num_loops")
    own_depth = _depth_of_parameters(source.folder)
    if own_depth is not None:
        num_loops = own_depth
    depths = metadata.get("depths")
    return replace(
        source,
        base=base,
        revision=revision,
        num_loops=num_loops,
        depths=None if depths is None else (min(depths), max(depths)),
        has_one_depth=own_depth is not None,
    )


def holds_adapter(folder: Path) -> bool:
    """Return whether a folder itself holds an adapter, which other files must not be mixed with."""
    return (folder / CONFIG_FILE).is_file()


def read_base(folder: Path) -> tuple[str, str | None]:
    """Return the base model of a saved adapter and its revision, from `adapter_config.json`."""
    config = read_adapter_fields(folder)
    return str(model_path(config.get("base_model_name_or_path") or "")), config.get("revision")


def read_adapter_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of `adapter_config.json` in PEFT's format."""
    authors = read_authors_config(folder)
    if authors is None:
        file = folder / CONFIG_FILE
        fields = read_json_object(file)
        for name in ("base_model_name_or_path", "revision"):
            check_type(f"`{name}` in {file}", fields.get(name), str | None)
        return fields
    return {"base_model_name_or_path": authors["model_id"], "revision": authors["model_revision"]}


def read_adapter_config(folder: Path) -> LoraConfig:
    """Return the LoRA configuration of the adapter in a folder.

    Raises:
        UserError: If a file is missing.
    """
    from loopdropout_trainer.lora import parse_peft_config
    from loopdropout_trainer.saving.authors_format import to_peft_config

    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise UserError(f"{folder} must hold an adapter in safetensors, but it has no {file}.")
    file, authors = folder / CONFIG_FILE, read_authors_config(folder)
    config = parse_peft_config(read_json_object(file), file) if authors is None else to_peft_config(authors)
    config.base_model_name_or_path = model_path(config.base_model_name_or_path)
    return config


def _depth_of_parameters(folder: Path) -> int | None:
    """Return the depth of an adapter with parameters for each loop, or None for an adapter that all loops share."""
    import torch
    from safetensors import SafetensorError, safe_open

    from loopdropout_trainer.lora import ADAPTER_KINDS

    try:
        with safe_open(folder / WEIGHTS_FILE, "pt") as file:
            names = list(file.keys())  # of a file that is no dictionary
            weights = {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in names}
    except (OSError, SafetensorError):  # loading it says what is wrong
        return None
    depths = [kind.saved_num_loops(weights) for kind in ADAPTER_KINDS.values() if kind.one_depth]
    return next((depth for depth in depths if depth is not None), None)


def config_depth(folder: Path) -> int | None:
    """Return the depth that a model's configuration names, or None for a model that is not looped."""
    try:
        depth = read_depth(read_json_object(folder / "config.json"))
    except (OSError, UserError):  # loading it says what is wrong
        return None
    if depth is not None:  # without the import of modeling code, which takes seconds
        return depth
    from loopdropout_trainer.looped import DESCRIPTIONS

    config = read_model_config(folder)
    if config is None:
        return None
    for model_class, description in DESCRIPTIONS.items():
        if isinstance(config, model_class.config_class):
            return getattr(config, description.depth_field, None)
    return getattr(config, "num_loops", None)


def read_model_config(name_or_path: str | Path, revision: str | None = None) -> PreTrainedConfig | None:
    """Return the configuration of a model, or None if it cannot be read, which loading the model explains."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name_or_path, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError):
        return None


def _prompt_template(recipe: Mapping[str, Any]) -> str | None:
    """Return the format of the prompts that a recipe describes, or None if its data have no template."""
    from loopdropout_trainer.data import DataArguments
    from loopdropout_trainer.recipe import build

    if not recipe:
        return None
    try:
        (data,) = build([DataArguments], recipe)
    except UserError:  # a preparation of the user that is not imported here
        return None
    return data.prompt_format


def _read_columns(source: Source) -> dict[str, Any]:
    """Return the columns that identify results of a source, from its metadata or the results of its training."""
    from loopdropout_trainer.results import read_own_results

    place = source.repository or str(source.folder)
    name = Path(source.name).resolve().name
    if not source.is_adapter:
        return {"method": name, "model": place}
    metadata = source.metadata
    columns = {column: metadata.get(column) for column in ("method", "seed", "step")}
    if columns["method"] is None:  # an older adapter, or one of another program
        columns["method"] = name
        for row in read_own_results(source.run):
            if row["task"] == "training":
                columns |= {column: row[column] for column in ("method", "seed", "step")}
        if is_checkpoint(source.folder):
            columns["step"] = checkpoint_step(source.folder)
    return {**columns, "adapter": place, "training": source.training_id}


# Command lines


def name_sources(argv: Sequence[str] | None, field: str) -> list[str]:
    """Let a command line begin with `[RECIPE.yaml] NAME ...`.

    Without a recipe, the recipe of the first name's training gives the data and the tasks. Its model does not count, because
    each name has its own. The results of an adapter in a folder go to that folder.

    Args:
        argv: Command line without the script. Default: `sys.argv[1:]`.
        field: Field of the names.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0].startswith("-"):
        return argv
    if argv[0].endswith((".yaml", ".yml")):
        return [argv[0], *name_words(argv[1:], field)]
    words = name_words(argv, field)
    first = words[1].rpartition("=")[2]
    if first == "none":
        return words
    source = find_source(first)
    if not source.recipe:
        return words
    model = [f"--{name}=null" for name in SourceArguments.__dataclass_fields__ if name in source.recipe]
    output_dir = []
    if source.is_adapter and source.repository is None:
        output_dir = [f"--output_dir={first}"]
    elif "output_dir" in source.recipe:
        output_dir = ["--output_dir=null"]
    return [str(recipe_path(source.results_folder)), *output_dir, "--eval_num_loops=null", *model, *words]


# What a training writes


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the settings that were saved with an adapter or a merged model; an empty dict if there are none.

    Raises:
        UserError: If the file is damaged, or a newer release of this package wrote it.
    """
    path = folder / METADATA_FILE
    if not path.is_file():
        authors = read_authors_config(folder) if (folder / CONFIG_FILE).is_file() else None
        return {} if authors is None else to_metadata(authors)
    metadata = read_json_object(path)
    version = metadata.get("version") or 0
    check_type(f"`version` in {path}", version, int)
    if version > METADATA_VERSION:
        raise UserError(
            f"{path} has version {version}, but this release reads versions up to {METADATA_VERSION}. Update the package."
        )
    for name, hint in _METADATA_TYPES.items():
        check_type(f"`{name}` in {path}", metadata.get(name), hint)
    return metadata


def write_metadata(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write the settings of a training next to its adapter or merged model."""
    write_file(folder / METADATA_FILE, json.dumps({"version": METADATA_VERSION, **metadata}, indent=1) + "\n")


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


def is_hub_name(name: str | None) -> bool:
    """Return whether a name has the form `user/model` and is not a folder here."""
    return name is not None and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()
