"""The model and the adapter that trainings start from, as far as a plan knows them, and the checks that need no training.

A training loads them. A plan reads the fields of config.json and the names and shapes of a saved adapter, or builds the
modules of the model without weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from loopdropout_trainer.costs.trainings import Sizes, Training
from loopdropout_trainer.errors import UserError, is_unreachable
from loopdropout_trainer.files import model_path
from loopdropout_trainer.hub import can_reach_hub, is_hub_name, means_folder
from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.memory import count_parameters, find_smallest_projection, list_layers, read_depth, read_shape
from loopdropout_trainer.published_sizes import PUBLISHED
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments
from loopdropout_trainer.training.config import LoopDropoutConfig


if TYPE_CHECKING:
    from loopdropout_trainer.saving.saved_adapter import SavedAdapter
    from loopdropout_trainer.training.config import GateConfig


class Start(NamedTuple):
    """Base model and adapter that trainings start from, as far as a plan knows them.

    Attributes:
        model: Base model.
        config: Content of the base model's config.json, or an empty mapping.
        rank: Rank of the adapter, or None if it is not known.
        sizes: Sizes of the base model and of the adapter.
        saved: Files of the adapter that the training starts from. None: it is new, or on the Hub, which cannot be reached.
    """

    model: ModelArguments
    config: Mapping[str, Any]
    rank: int | None
    sizes: Sizes
    saved: SavedAdapter | None = None


def read_start(model: ModelArguments, adapter: AdapterArguments) -> Start:
    """Return what a plan knows of a model and an adapter. It can ask the Hub, and build the model's modules.

    Raises:
        UserError: If the adapter does not fit the model, or there is no adapter to start from.
    """
    config = read_config(model)
    if adapter.adapter_name_or_path is None:
        rank = adapter.lora_r
        return Start(model, config, rank, _find_sizes(model, adapter, config, rank))
    saved, rank = _find_saved_adapter(adapter.adapter_name_or_path), None
    if saved is not None:
        rank = saved.read_config().r
    sizes = _find_sizes(model, AdapterArguments(), config, rank)
    return Start(model, config, rank, _replace_adapter(sizes, saved), saved)


def read_trainings(runs: Sequence[Run], model: ModelArguments, adapter: AdapterArguments) -> list[Training]:
    """Return what the costs of each run depend on. The model and the adapter are read once for all runs."""
    start = read_start(model, adapter)
    return [make_training(run.args, run.recipe, start) for run in runs]


def make_training(args: GateConfig, recipe: Mapping[str, Any], start: Start) -> Training:
    """Return what the cost of a training depends on.

    Raises:
        UserError: If the training would refuse its settings, its rule, its adapter or its depths.
    """
    from loopdropout_trainer.training.rule_checks import check_depths
    from loopdropout_trainer.training.setting_checks import check_settings

    rule = args.make_rule()
    check_settings(args, rule, runs_several_draws=isinstance(args, LoopDropoutConfig))
    training = Training(args, recipe, start.model, start.config, start.rank, start.sizes)
    if training.depth is not None:
        check_depths(args, rule, training.depth, training.sizes.one_depth_type)
    if start.saved is not None:
        _check_saved_adapter(start.saved, training)
    return training


def describe_gates(training: Training) -> str:
    """Return the warning about gates of a user's rule, which the training logs at its beginning, too, or "" without one.

    A plan has it, because the log of a sweep's run is a file that nobody reads while all goes well.
    """
    from loopdropout_trainer.means import find_fault

    args = training.args
    if training.depth is None or not training.sizes.layers:
        return ""
    layers, rows = training.sizes.layers, args.rows_per_process
    fault = find_fault(args.make_rule(), training.depth, layers, rows, args.seed_of_gates)
    return "" if fault is None else fault.warning


def _check_saved_adapter(saved: SavedAdapter, training: Training) -> None:
    """Raise UserError if a training cannot start from a saved adapter, because of its rule, its depth or its reference."""
    from loopdropout_trainer.lora import check_kind, check_saved_depth
    from loopdropout_trainer.training.reference import check_copied, find_reference_fix

    args = training.args
    kind, depth = saved.find_kind_and_depth()
    if depth is not None and training.depth is not None:
        check_saved_depth(saved.folder, depth, training.depth)
    fix = find_reference_fix(args)
    if fix is not None:
        check_copied(kind, "default", fix)
    check_kind(kind, args.make_rule())


def read_config(model: ModelArguments) -> dict[str, Any]:
    """Return the content of a model's config.json, or an empty dict without a network.

    Of a published model that is not downloaded, it has only the fields that decide its sizes, so that a plan needs no network.
    """
    from transformers import PreTrainedConfig

    path, revision = model_path(model.model_name_or_path), model.model_revision
    with suppress(OSError):  # not downloaded
        return PreTrainedConfig.get_config_dict(path, revision=revision, local_files_only=True)[0]
    if path in PUBLISHED:
        return PUBLISHED[path]
    if not can_reach_hub():
        return {}
    with suppress(OSError):
        return PreTrainedConfig.get_config_dict(path, revision=revision)[0]
    return {}


def _find_saved_adapter(name: str) -> SavedAdapter | None:
    """Return the files of the adapter that a training starts from, or None if it is on the Hub, which cannot be reached.

    Raises:
        UserError: If there is no adapter to start from.
    """
    from loopdropout_trainer.saving.source import find_source

    try:
        return find_source(name, accept=("adapter",), what="adapter").adapter
    except UserError as error:
        is_on_hub = is_hub_name(name) and not means_folder(name)
        if is_on_hub and is_unreachable(error):  # a plan needs no network
            return None
        raise


def _find_sizes(
    model: ModelArguments, adapter: AdapterArguments, config: Mapping[str, Any], rank: int | None
) -> Sizes:
    """Return the sizes of a model and a new adapter: from config.json if its fields tell them, else from the modules.

    Raises:
        UserError: If the model has no modules `lora_target_modules`, or they are not in the recurrent block.
    """
    if adapter.lora_target_modules:
        return measure_sizes(model, adapter)
    if read_shape(config) is not None:  # families that train at any depth
        num_parameters = None
        if rank is not None:
            num_parameters = count_parameters(config, rank)
        return Sizes(read_depth(config), num_parameters, find_smallest_projection(config), list_layers(config))
    if not config or rank is None:
        return Sizes()
    return measure_sizes(model, AdapterArguments(lora_r=rank))


def _replace_adapter(sizes: Sizes, saved: SavedAdapter | None) -> Sizes:
    """Return the sizes of a model with those of a saved adapter, which can be on other modules than a new one."""
    shapes = None if saved is None else saved.read_shapes()
    if not shapes:  # then loading it says why
        return sizes._replace(num_parameters=None)
    from loopdropout_trainer.lora import index_layers

    num_parameters, dimensions, names = 0, [], []
    for name, weight in shapes.items():
        if weight.dim() < 2:  # learned gates
            continue
        rows, columns = weight.shape[-2:]
        num_parameters += rows * columns  # an adapter for each loop counts once, as a shared one
        if ".lora_A." in name:
            dimensions.append(columns)
            names.append(name)
        elif ".lora_B." in name:
            dimensions.append(rows)
    layers = tuple(index_layers(names))
    return sizes._replace(num_parameters=num_parameters, smallest_projection=min(dimensions), layers=layers)


def measure_sizes(model: ModelArguments, adapter: AdapterArguments) -> Sizes:
    """Return the sizes of a model and of a new adapter on it, from the model's modules without weights.

    Raises:
        UserError: If the model has no modules `lora_target_modules`, or they are not in the recurrent block.
    """
    from peft import get_peft_model

    from loopdropout_trainer.looped import find_looped_model
    from loopdropout_trainer.lora import default_peft_config, physical_layers
    from loopdropout_trainer.lora.compatibility import check_layers, find_smallest_dimension
    from loopdropout_trainer.renames import hide_library_warnings
    from loopdropout_trainer.saving.loading import load_skeleton
    from loopdropout_trainer.training.rule_checks import find_one_depth_type

    skeleton = load_skeleton(model.model_name_or_path, model.model_revision)
    with hide_library_warnings():
        adapted = get_peft_model(skeleton, default_peft_config(skeleton, adapter.peft_config), low_cpu_mem_usage=True)
    check_layers(adapted)
    looped = find_looped_model(skeleton)
    return Sizes(
        num_loops=looped.num_loops,
        num_parameters=adapted.get_nb_trainable_parameters()[0],
        smallest_projection=find_smallest_dimension(adapted),
        layers=tuple(physical_layers(adapted)),
        one_depth_type=find_one_depth_type(looped),
    )
