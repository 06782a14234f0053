"""The methods of a sweep: their names, and the recipes of their runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from loopdropout_trainer.data.arguments import has_held_out
from loopdropout_trainer.errors import UserError, closest_match, find_own_error, hint_at_number, short_repr
from loopdropout_trainer.files import find_recipes_of_name
from loopdropout_trainer.gates import LoopDropout
from loopdropout_trainer.gates.rule import check_rule_name, find_probability
from loopdropout_trainer.results.run_files import DEVELOPMENT
from loopdropout_trainer.settings.arguments import BenchmarkArguments, names_of
from loopdropout_trainer.settings.command_fields import TRAININGS
from loopdropout_trainer.settings.recipe import check_names, load_recipe, override


SET_BY_SWEEP = {"output_dir", "run_name", "learning_rate", "seed", "resume_from_checkpoint", "compare_with", "dry_run"}
"""Settings of a run that the sweep makes. The list is made by hand, because the fields do not say so: a sweep averages over
`seed`, for example, but keeps `gate_seed`."""

_OF_TASKS = {field.name for field in fields(BenchmarkArguments)} - {"eval_num_loops"}
FINAL_ONLY = names_of("measurement", "output") - _OF_TASKS
"""Settings that the runs that choose a learning rate leave out. They are measured on a task, but not at other depths."""


LOSS_BATCHES = 16
"""Default of `single_loop_batches` in all runs of a sweep."""


class Recipes(NamedTuple):
    """The settings of a method's runs without learning rate and seed: of those that choose the rate, and of the final ones."""

    selecting: dict[str, Any]
    final: dict[str, Any]


def read_methods(definitions: list[Any]) -> dict[str, Any]:
    """Return the definition of each method by its name. Without a mapping, it is the rule or the name of the recipe.

    Args:
        definitions: The field `methods` of a sweep.

    Raises:
        UserError: If `methods` are not texts or one mapping, or two have the same name.
    """
    if len(definitions) == 1 and isinstance(definitions[0], dict):
        for name, definition in definitions[0].items():
            if not isinstance(definition, str | dict):
                raise UserError(f"`methods` must map {name} to a rule, a recipe or settings, got {definition!r}.")
            _check_name(name)
        return definitions[0]
    methods = {}
    for definition in definitions:
        if not isinstance(definition, str):
            hint = ""
            if isinstance(definition, float) and 0 <= definition < 1:
                hint = f" Write a drop probability as `methods: {{p_{definition}: {{p: {definition}}}}}`."
            raise UserError(f"`methods` must be texts or one mapping, got {definition!r} in a list.{hint}")
        name = definition
        if definition.endswith(".yaml"):
            name = Path(definition).stem
        if name in methods:
            raise UserError(
                f"`methods` must have different names, got {name!r} twice ({methods[name]} and {definition}). Give them "
                f"names in a mapping, such as `methods: {{first: {methods[name]}, second: {definition}}}`."
            )
        methods[name] = definition
    if not methods:
        raise UserError("`methods` must name at least one method, such as lora.")
    return methods


def _check_name(name: Any) -> None:
    """Raise UserError unless the name of a method can be the name of a folder in the sweep's folder."""
    is_folder = isinstance(name, str) and name.isprintable() and name.strip() == name and Path(name).name == name
    if not is_folder or name in ("", ".."):
        raise UserError(
            f"The names of `methods` must be names of folders without a slash, such as own_rule, got {name!r}."
        )


def _check_repetitions(sweep: Any) -> None:
    """Raise UserError if a sweep has a seed or a learning rate twice, whose trainings would share one folder.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    for field in ("seeds", "learning_rates"):
        seen = set()
        for value in getattr(sweep, field):
            name = f"{value:.6g}" if field == "learning_rates" else str(value)  # as in the name of the folder
            if name in seen:
                raise UserError(f"`{field}` must have different values, got {name} twice. Remove one of them.")
            seen.add(name)


def check_fields(sweep: Any, methods: dict[str, Any]) -> None:
    """Raise UserError if a setting of a sweep or of one of its methods is not a field of its training script.

    Otherwise a training would name it, after others have been trained. The fields of a user's own script are not known. A seed
    or a learning rate that is there twice, a mistyped `eval_loss` and a rule that does not exist are errors with any script.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        methods: Definition of each method, from `read_methods`.
    """
    _check_repetitions(sweep)
    for name, factor in sweep.rate_factors.items():
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or not 0 < factor < inf:
            raise UserError(
                f"`rate_factors` must map {name} to a number larger than 0, got {short_repr(factor)}.{hint_at_number(factor)}"
            )
    chosen_by = sweep.select_on
    usual = ("eval_loss", DEVELOPMENT)
    if chosen_by is not None and chosen_by not in usual:
        hint = closest_match(chosen_by, usual)
        if hint:
            raise UserError(f"`select_on` must be `eval_loss`, `{DEVELOPMENT}` or a task, got {chosen_by!r}.{hint}")
    for name, definition in methods.items():
        with naming_method(sweep, name):
            _check_rule(sweep, name, definition)
    if sweep.script not in TRAININGS:
        return
    places = [("in `settings`", sweep.settings), ("in `measure`", sweep.measure)]
    for name, definition in methods.items():
        path, own = _read_definition(sweep, definition)
        places.append((f"in the recipe {path}", load_recipe(path, command=sweep.script)))
        places.append((f"of the method {name} in `methods`", own))
    for place, settings in places:
        check_names(settings, sweep.script, place, sweep.__dataclass_fields__)


@contextmanager
def naming_method(sweep: Any, name: str) -> Iterator[None]:
    """Let an error about a field that a method itself sets, or of the user's own code, name the method.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        name: Name of the method in the sweep.
    """
    try:
        yield
    except Exception as error:
        own_error = find_own_error(error)
        if own_error is None and not _is_about_method(sweep, name, error):
            raise
        raise UserError(f"In the method {name} of `methods`: {own_error or error}") from None


def _is_about_method(sweep: Any, name: str, error: Exception) -> bool:
    """Return whether an error is a UserError about a field that a method itself sets. Arguments: `naming_method`."""
    definition = read_methods(sweep.methods)[name]
    if name == definition or not isinstance(error, UserError):
        return False
    _, own = _read_definition(sweep, definition)
    fields = {*own}
    if fields & {"p", "rule_args"}:  # the message about a field of a rule begins with the rule
        fields.add("rule")
    begin = re.match(r"`(\w+)", str(error))
    return begin is not None and begin[1] in fields


def _check_rule(sweep: Any, name: str, definition: str | dict) -> None:
    """Raise UserError if a method has no recipe to start from, or its rule does not exist.

    A method that is called as a recipe of the package without its ending gets a hint to this recipe.
    """
    path, own = _read_definition(sweep, definition)
    probability = find_probability(definition)
    if probability is not None:
        raise UserError(
            f"`methods` must be rules, recipes (.yaml) or settings, got {definition!r}. For the drop probability "
            f"{probability}, write `methods: {_write_mapping(sweep, definition, probability)}`."
        )
    try:
        check_rule_name("rule", own.get("rule", LoopDropout.name))
    except UserError:
        recipes = []
        if isinstance(definition, str):
            recipes = find_recipes_of_name(f"{definition}.yaml")
        if not recipes:
            raise
        raise UserError(
            f"`methods` must be rules, recipes (.yaml) or settings, got {definition!r}, which is no rule. Did you mean the "
            f"recipe {' or '.join(recipes)}?"
        ) from None
    if not path:
        raise UserError(
            f"`recipe` must be set, such as `--recipe gsm8k.yaml`, because the method {name} is not a recipe itself."
        )
    recipe = _make_final_recipe(sweep, *_read_method(sweep, definition))
    check_rule_name("rule", recipe.get("rule", LoopDropout.name))


def _write_mapping(sweep: Any, definition: str, probability: str) -> str:
    """Return the methods of a sweep as a mapping in YAML, with a drop probability instead of a wrong definition."""
    items = []
    for name, other in read_methods(sweep.methods).items():
        if other == definition:
            items.append(f"p_{probability}: {{p: {probability}}}")
        elif isinstance(other, str) and not other.endswith(".yaml") and find_probability(other) is None:
            items.append(f"{name}: {{rule: {other}}}")
        else:
            items.append(f"{name}: ...")
    return f"{{{', '.join(items)}}}"


def has_benchmarks(sweep: Any, methods: dict[str, Any]) -> bool:
    """Return whether the final runs of a method have a benchmark."""
    for definition in methods.values():
        if _make_final_recipe(sweep, *_read_method(sweep, definition)).get("benchmarks"):
            return True
    return False


def make_recipes(sweep: Any, methods: dict[str, Any]) -> dict[str, Recipes]:
    """Return the settings of the runs of each method by its name.

    Args:
        sweep: `Sweep` of recipes/sweep.py, which knows by now if the held-out loss chooses.
        methods: Definition of each method, from `read_methods`.

    Raises:
        UserError: If there are no held-out examples to choose by, the rule does not exist, or a field is set by the sweep.
    """
    loss_batches = _find_loss_batches(sweep, methods)
    return {name: _make_recipes(sweep, definition, loss_batches) for name, definition in methods.items()}


def _make_recipes(sweep: Any, definition: str | dict, loss_batches: int) -> Recipes:
    """Return the settings of a method's runs. `loss_batches`: default of `single_loop_batches`."""
    recipe, own = _read_method(sweep, definition)
    holds_out = has_held_out(override(recipe, own))
    if sweep.loss_chooses_by_default and not sweep.full_grid and not holds_out:
        raise UserError(
            "`num_eval_examples` or `eval_files` must be set, because without `benchmarks` the held-out loss chooses the "
            "learning rate."
        )
    if holds_out and (sweep.script == "dpo" or sweep.select_on == "eval_loss"):
        recipe.setdefault("eval_strategy", "epoch")  # the held-out loss chooses, or breaks ties, and is reported
    final = _make_final_recipe(sweep, recipe, own)
    for name in SET_BY_SWEEP & final.keys():
        raise UserError(f"`{name}` is set by the sweep. Remove it from `methods` and `settings`.")
    selecting = _make_selecting_recipe(sweep, override(recipe, own))
    if holds_out and _scores_loops(sweep):
        # All runs measure on the same examples: the held-out loss chooses, or breaks ties, and reports compare all seeds.
        number = _find_written_batches(sweep, recipe, own) or loss_batches
        selecting["single_loop_batches"] = number
        if final.get("single_loop_batches") is None:  # 0 leaves the losses out of the final runs
            final["single_loop_batches"] = number
    return Recipes(selecting, final)


def _find_loss_batches(sweep: Any, methods: dict[str, Any]) -> int:
    """Return the number of held-out batches for the losses of methods that write none: that of the others, if they agree.

    Losses on other examples do not compare, so all methods should measure on the same number of batches.
    """
    written = []
    for definition in methods.values():
        number = _find_written_batches(sweep, *_read_method(sweep, definition))
        if number is not None and number not in written:
            written.append(number)
    return written[0] if len(written) == 1 else LOSS_BATCHES


def _find_written_batches(sweep: Any, recipe: dict, own: dict) -> Any:
    """Return `single_loop_batches` of a method's final runs, or of its recipe if `measure` leaves them out, or None."""
    for settings in (_make_final_recipe(sweep, recipe, own), override(recipe, own)):
        if settings.get("single_loop_batches"):
            return settings["single_loop_batches"]
    return None


def _read_method(sweep: Any, definition: str | dict) -> tuple[dict, dict]:
    """Return the recipe that a method starts from, with the sweep's settings, and the method's own settings."""
    path, own = _read_definition(sweep, definition)
    command = sweep.script if sweep.script in TRAININGS else None  # else a user's own script
    read = load_recipe(path, command=command)
    recipe = {name: value for name, value in read.items() if name not in SET_BY_SWEEP}
    # Each final run would evaluate the same base model, so only who asks for it gets it.
    return override({**recipe, "evaluate_base": False}, _without_unset(sweep.settings)), _without_unset(own)


def _read_definition(sweep: Any, definition: str | dict) -> tuple[str, dict]:
    """Return the path of the recipe that a method starts from, and the method's own settings."""
    if isinstance(definition, dict):
        return sweep.recipe, definition
    if definition.endswith(".yaml"):
        return definition, {}
    return sweep.recipe, {"rule": definition}


def _without_unset(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without those of `SET_BY_SWEEP` that are null, which leave the field to the sweep."""
    return {name: value for name, value in settings.items() if value is not None or name not in SET_BY_SWEEP}


def _make_final_recipe(sweep: Any, recipe: dict, own: dict) -> dict:
    """Return the recipe of a method's final runs, by its recipe and own settings from `_read_method`."""
    return override({**recipe, **sweep.measure}, own)


def _make_selecting_recipe(sweep: Any, recipe: dict) -> dict:
    """Return the recipe of the runs that choose a learning rate, without the losses of each loop."""
    first = {name: value for name, value in recipe.items() if name not in FINAL_ONLY}
    first["evaluate_base"] = False
    first["benchmarks"] = [] if sweep.select_on == "eval_loss" else [sweep.select_on]
    if "own_benchmarks" in sweep.measure:
        first["own_benchmarks"] = sweep.measure["own_benchmarks"]
    return first


def _scores_loops(sweep: Any) -> bool:
    """Return whether the training script of a sweep can measure the held-out loss of each loop, which only `sft` does."""
    return sweep.script not in ("dpo", "grpo")
