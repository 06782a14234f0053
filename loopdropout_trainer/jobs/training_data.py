"""The examples of trainings before they begin: loaded and checked in one way for the plans of a training and of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loopdropout_trainer.data import (
    DataArguments,
    DPODataArguments,
    GRPODataArguments,
    LeftOut,
    LoadedExamples,
    Losses,
    SFTDataArguments,
    label_example,
    load_examples,
)
from loopdropout_trainer.data.files import check_files, error_in_row
from loopdropout_trainer.data.preparations import PREPARATIONS
from loopdropout_trainer.errors import UserError, is_unreachable
from loopdropout_trainer.files import model_path
from loopdropout_trainer.hub import can_reach_hub, check_repository_name, is_downloaded, means_folder
from loopdropout_trainer.jobs.example_plan import add_counts, count_rows, list_examples
from loopdropout_trainer.jobs.starts import read_config
from loopdropout_trainer.published_sizes import PUBLISHED
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.recipe import build_part
from loopdropout_trainer.training.config import (
    LoopDropoutConfig,
    LoopDropoutDPOConfig,
    LoopDropoutGRPOConfig,
    word_of,
)


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from loopdropout_trainer.costs.trainings import Training
    from loopdropout_trainer.looped import LoopedModelMixin
    from loopdropout_trainer.training.config import GateConfig


CONFIGS = {config.command: config for config in (LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig)}
"""Settings of the trainings by the training script."""

_DATA = {"sft": SFTDataArguments, "dpo": DPODataArguments, "grpo": GRPODataArguments}
"""Fields about the examples by the training script."""

_READ = ("eos_token", "pad_token", "max_length", "completion_only_loss", "assistant_only_loss", "eval_strategy")
"""Settings of a training that its examples and their checks depend on. The others may need a GPU or several processes."""


def load_training_tokenizer(model: ModelArguments, args: GateConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a base model, with the recipe's chat template and end token."""
    from loopdropout_trainer.saving.facts import MODELS
    from loopdropout_trainer.saving.source import find_source
    from loopdropout_trainer.tokenizers import check_token, load_tokenizer

    source = find_source(model.model_name_or_path, revision=model.model_revision, accept=MODELS)
    tokenizer = load_tokenizer(*source.tokenizer, model.chat_template, getattr(args, "eos_token", None))
    check_token(tokenizer, "pad_token", getattr(args, "pad_token", None))
    return tokenizer


def load_training_examples(
    model: ModelArguments,
    data: DataArguments,
    args: GateConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    left_out: list[LeftOut],
) -> LoadedExamples:
    """Load the examples of a training and check that it can train and be evaluated on them. Other arguments: `load_examples`.

    Raises:
        UserError: As `load_datasets` does, and if an evaluation has no example, the assistant's turns are not marked, or the
            model cannot mark the prompt of an example.
    """
    from loopdropout_trainer.training.examples import check_assistant_loss

    loaded = load_examples(data, tokenizer, max_length, left_out, Losses.of(args))
    if word_of(args.eval_strategy) != "no" and "eval" not in loaded.datasets:
        raise UserError(
            "`num_eval_examples` must be at least 1, or `eval_files` must be set, if `eval_strategy` is "
            f"{word_of(args.eval_strategy)}, because there is no held-out example."
        )
    datasets = {"the training data": loaded.datasets["train"], "the held-out data": loaded.datasets.get("eval")}
    check_assistant_loss(args, datasets.items(), tokenizer)
    _check_prompts(model, args, loaded, tokenizer)
    return loaded


def _check_prompts(
    model: ModelArguments, args: GateConfig, loaded: LoadedExamples, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise UserError for the first example whose prompt the model cannot mark. The trainer does it, too, with its weights.

    Only models whose prompts attend in both directions read them, such as HRM-Text. Pairs of DPO and GRPO have a prompt.
    """
    if not isinstance(args, LoopDropoutConfig):
        return
    import torch

    looped = _find_described_model(model)
    if looped is None or not looped.reads_prompts:
        return
    names = ["train"]
    if word_of(args.eval_strategy) != "no":
        names.append("eval")
    for name in names:
        for number, example in enumerate(loaded.datasets[name]):
            labels = label_example(example, tokenizer, args.completion_only_loss, args.assistant_only_loss)["labels"]
            batch = {"labels": torch.tensor([labels])}
            if args.packing or args.padding_free:
                batch["position_ids"] = torch.arange(len(labels))[None]
            try:
                looped.complete_batch(batch)
            except UserError as error:
                place = f"example {number} (`--preview {number}`)" if name == "train" else f"held-out example {number}"
                raise error_in_row(place, error) from None


def _find_described_model(model: ModelArguments) -> LoopedModelMixin | None:
    """Return a model of transformers that this package describes, without weights, or None for another one.

    The modules of the models, which take seconds to import, stay out of the dry run of another one.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if read_config(model).get("model_type") not in CONFIG_MAPPING_NAMES:
        return None
    from loopdropout_trainer.looped import DESCRIPTIONS, find_looped_model
    from loopdropout_trainer.saving.loading import load_skeleton
    from loopdropout_trainer.saving.source import read_model_config

    config = read_model_config(model_path(model.model_name_or_path), model.model_revision)
    if not isinstance(config, tuple(cls.config_class for cls in DESCRIPTIONS)):
        return None
    return find_looped_model(load_skeleton(model.model_name_or_path, model.model_revision))


class TrainingExamples(NamedTuple):
    """The examples of a training: the fields about them, the loaded ones, which are left out, and their tokenizer."""

    data: DataArguments
    loaded: LoadedExamples
    left_out: list[LeftOut]
    tokenizer: PreTrainedTokenizerBase


class NotLoaded(NamedTuple):
    """The reason why a plan has no examples of a training, as the end of "not checked, because"."""

    reason: str

    @property
    def text(self) -> str:
        """The text of the line `examples` of a plan."""
        return f"not checked, because {self.reason}"


def load_sweep_examples(sweep: Any) -> dict[str, TrainingExamples | NotLoaded]:
    """Load and check the examples of each method of a sweep, once for all methods with the same ones.

    Args:
        sweep: `Sweep` of recipes/sweep.py with a training script of the package, which is in `CONFIGS`.

    Returns:
        The examples by method. Those that would need the Hub while it cannot be reached, or a folder of a model that is not
        there yet, are not loaded: each training needs them later, but a plan does not.

    Raises:
        UserError: As in a training, which names the mistake in the data.
    """
    examples, loaded_before = {}, {}
    for method, recipes in sweep.recipes.items():
        recipe = {**recipes.selecting, "num_threads": None}  # which would set the threads of the sweep itself
        read = {name: recipe[name] for name in _READ if name in recipe}
        model, data = build_part((ModelArguments, _DATA[sweep.script]), recipe)
        (args,) = build_part((CONFIGS[sweep.script],), {**read, "output_dir": sweep.output_dir, "use_cpu": True})
        key = repr((data, model.model_name_or_path, model.model_revision, model.chat_template, read))
        if key not in loaded_before:
            loaded_before[key] = load_examples_of_plan(model, data, args, [])
        examples[method] = loaded_before[key]
    return examples


def load_training(
    model: ModelArguments, data: DataArguments, args: GateConfig, left_out: list[LeftOut]
) -> TrainingExamples:
    """Load the tokenizer and the examples of a training.

    Args:
        model, data, args: As in `load_training_examples`.
        left_out: Empty list, to which the examples that are left out are added, also before an error.

    Raises:
        UserError: As `load_training_tokenizer` and `load_training_examples` do.
    """
    tokenizer = load_training_tokenizer(model, args)
    loaded = load_training_examples(model, data, args, tokenizer, getattr(args, "max_length", None), left_out)
    return TrainingExamples(data, loaded, left_out, tokenizer)


def load_examples_of_plan(
    model: ModelArguments, data: DataArguments, args: GateConfig, left_out: list[LeftOut]
) -> TrainingExamples | NotLoaded:
    """Load the examples of a training for its plan, unless they or the model are on the Hub, which cannot be reached.

    Arguments and errors: as in `load_training`. This decides for a training and for a sweep that a plan needs no network.
    """
    check_files(data.files)
    name = model_path(model.model_name_or_path)
    if not Path(name).is_dir():
        check_repository_name(name)
    if not _is_local(model, data) and not can_reach_hub():
        return NotLoaded(_explain_unreachable(model))
    try:
        return load_training(model, data, args, left_out)
    except UserError as error:
        if is_unreachable(error):
            return NotLoaded(_explain_unreachable(model))
        raise


def _is_local(model: ModelArguments, data: DataArguments) -> bool:
    """Return whether the tokenizer and the data of a training are on this computer, by their names."""
    name = model_path(model.model_name_or_path)
    if not Path(name).is_dir() and not is_downloaded(name):
        return False
    if PREPARATIONS[data.preparation].problems:  # it generates its examples
        return True
    return all(source.files or Path(source.path).is_dir() for source in data.train_sources)


def _explain_unreachable(model: ModelArguments) -> str:
    """Return why examples cannot be loaded without the Hub. The name of a model may mean a folder that is not there."""
    name = model_path(model.model_name_or_path)
    if Path(name).is_dir() or name in PUBLISHED:
        return "the Hub cannot be reached"
    if means_folder(name):
        return f"there is no folder {name}"
    return f"there is no folder {name}, and the Hub cannot be reached"


def are_all_loaded(examples: Mapping[str, TrainingExamples | NotLoaded]) -> bool:
    """Return whether `load_sweep_examples` has loaded and checked the examples of all methods."""
    return not any(isinstance(own, NotLoaded) for own in examples.values())


def count_sweep_examples(
    examples: Mapping[str, TrainingExamples | NotLoaded], trainings: Mapping[str, Training]
) -> dict[str, Training]:
    """Return the training of each method of a sweep, with its numbers of rows and tokens if its examples are loaded."""
    counted = dict(trainings)
    for method, own in examples.items():
        if isinstance(own, TrainingExamples):
            num_rows = count_rows(own.loaded, trainings[method].args)
            counted[method] = add_counts(trainings[method], own.loaded, num_rows)
    return counted


def describe_sweep_examples(
    examples: Mapping[str, TrainingExamples | NotLoaded], trainings: Mapping[str, Training]
) -> dict[str, dict[str, str]]:
    """Return the lines of a sweep's plan about the examples and what is left out, by title and method.

    Args:
        examples: From `load_sweep_examples`.
        trainings: From `count_sweep_examples`.
    """
    lines: dict[str, dict[str, str]] = {"examples": {}, "left out": {}}
    for method, training in trainings.items():
        own = examples[method]
        if isinstance(own, NotLoaded):
            lines["examples"][method] = own.text
            continue
        texts = list_examples(own.loaded, training.num_rows, own.data, training.args)
        lines["examples"][method] = "\n".join(texts)
        lines["left out"][method] = "\n".join(map(str, own.left_out))
    return lines
