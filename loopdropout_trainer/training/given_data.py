"""The data that a trainer's `evaluate`, `predict` and loaders get: checked and prepared as the data of its training."""

from __future__ import annotations

from typing import Any

from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.training.examples import (
    check_datasets,
    check_token_ids,
    hide_bars_of_few,
    hide_length_warnings,
    name_datasets,
    skips_preparation,
)


def prepare_given(trainer: Any, argument: str, dataset: Any) -> Any:
    """Return a dataset, or several by name, with tokens. TRL's `evaluate` prepares in newer releases, its `predict` in none.

    Args:
        trainer: Trainer of this package.
        argument: `eval_dataset` or `test_dataset`.
        dataset: Examples in the format of the training data, or with tokens. Also None and the name of one of the trainer's
            own held-out datasets, which stay unchanged.

    Raises:
        UserError: If the examples cannot be read, where the message names the row, or if there are none.
    """
    if dataset is None:
        _check_own(trainer, argument)
        return None
    if argument == "eval_dataset" and isinstance(dataset, str):
        own = trainer.eval_dataset
        if isinstance(own, dict) and dataset in own:
            return dataset
        known = f"the names {', '.join(map(repr, own))}" if isinstance(own, dict) else "no names"
        raise UserError(
            f"`eval_dataset` must be a `Dataset` or the name of a held-out dataset of the trainer, which has {known}, got "
            f"{short_repr(dataset)}."
        )
    tokenizer = trainer.processing_class  # which has the chat template of `chat_template_path` by now
    arguments = {argument: dataset, "args": trainer.args, "processing_class": tokenizer}
    arguments["formatting_func"] = trainer.formatting_func
    check_datasets(arguments)
    if skips_preparation(trainer.args):
        return dataset
    if trainer._reads_columns(arguments):
        trainer._check_rows_of(arguments, tokenizer)
    with trainer._explain_rows(arguments):
        prepared = _prepare(trainer, argument, arguments[argument])
    vocabulary = trainer.model.get_input_embeddings().num_embeddings
    for title, part in name_datasets({argument: prepared}):
        check_token_ids(title, part, vocabulary)
    return prepared


def _check_own(trainer: Any, argument: str) -> None:
    """Raise UserError if a trainer has no examples of its own to use instead of those that are not given."""
    if argument == "test_dataset":
        raise UserError("`test_dataset` must be given, as in `trainer.predict(dataset)`, got None.")
    module = type(trainer).get_eval_dataloader.__module__
    is_made_by_user = not module.startswith(("transformers.", "trl.", "loopdropout_trainer."))
    if trainer.eval_dataset is None and not is_made_by_user:
        raise UserError(
            "`eval_dataset` must be given, as in `trainer.evaluate(dataset)`, because this trainer was made without held-out "
            "examples."
        )


def _prepare(trainer: Any, argument: str, dataset: Any) -> Any:
    is_prediction = argument == "test_dataset"
    with hide_length_warnings(trainer.args), hide_bars_of_few({argument: dataset}):
        return _prepare_parts(trainer, argument, dataset, is_prediction)


def _prepare_parts(trainer: Any, argument: str, dataset: Any, is_prediction: bool) -> Any:
    if isinstance(dataset, dict):
        return {name: trainer._prepare_rows(part, name, is_prediction) for name, part in dataset.items()}
    return trainer._prepare_rows(dataset, argument.removesuffix("_dataset"), is_prediction)
