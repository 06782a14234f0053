"""The rows of files and data sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.errors import UserError


if TYPE_CHECKING:
    from datasets import Dataset

    from loopdropout_trainer.data.arguments import DataArguments


def load_rows(args: DataArguments, files: list[str] | None) -> Dataset:
    """Return the rows of files, or of the data set that `args` names.

    Raises:
        UserError: If there are neither files nor a data set, or if they cannot be loaded.
    """
    from datasets.exceptions import DatasetsError

    if not files and not args.dataset_name:
        raise UserError("`dataset_name` or `train_files` must be set, because there is no data to train on.")
    try:
        return read_files(files) if files else _read_dataset(args)
    except (OSError, ValueError, DatasetsError, StopIteration) as error:  # the last one from an empty JSON file
        reason = str(error.__cause__ or error) or "a file is empty"
        raise UserError(f"{files or args.dataset_name} cannot be loaded: {reason}") from error


def read_files(files: str | Sequence[str]) -> Dataset:
    """Return the rows of JSONL, JSON, CSV (also .gz) or Parquet files."""
    from datasets import load_dataset

    if isinstance(files, str):
        files = [files]
    suffix = Path(files[0].removesuffix(".gz")).suffix
    kind = {".csv": "csv", ".parquet": "parquet"}.get(suffix, "json")
    options = _csv_options(files[0]) if kind == "csv" else {}
    return load_dataset(kind, data_files=files, split="train", **options)


def _read_dataset(args: DataArguments) -> Dataset:
    """Return the rows of a data set on the Hub or in a folder."""
    from datasets import load_dataset, load_dataset_builder

    options = {"revision": args.dataset_revision, "split": args.dataset_split}
    if Path(args.dataset_name).is_dir():
        builder = load_dataset_builder(args.dataset_name, args.dataset_config)
        if builder.name == "csv":
            first_files = next(iter(builder.config.data_files.values()))
            options |= _csv_options(first_files[0])
    return load_dataset(args.dataset_name, args.dataset_config, **options)


def _csv_options(file: str) -> dict[str, Any]:
    """Return the options of `load_dataset` that make all cells texts, also numbers and the word "None"."""
    import pandas as pd
    from datasets import Features, Value

    columns = pd.read_csv(file, nrows=0).columns
    return {"features": Features(dict.fromkeys(columns, Value("string"))), "keep_default_na": False}
