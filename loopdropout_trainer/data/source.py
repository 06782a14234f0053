"""Where rows come from: local files, a preparation that generates them, or the Hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from loopdropout_trainer.data.arguments import DataArguments
from loopdropout_trainer.data.preparation import Preparation
from loopdropout_trainer.data.rows import DataError, Row, read_files
from loopdropout_trainer.settings.command import one_line


@dataclass
class Source:
    """Where rows come from.

    Attributes:
        name: for reports and model cards.
        fingerprint: changes whenever the rows do.
        train, eval: the rows, to be read once; no `eval` unless it has files of its own.
    """

    name: str
    fingerprint: Any
    train: Iterable[Row]
    eval: Iterable[Row] | None

    @classmethod
    def open(cls, args: DataArguments, preparation: Preparation) -> Source:
        """Find the rows that the settings name: local files first, then generated ones, then the Hub's.

        Raises:
            DataError: if a file is missing or named twice, or the dataset cannot be loaded.
        """
        files = _fingerprints(args)
        eval_rows = read_files(args.eval_files) if args.eval_files else None
        if args.train_files:
            name = ", ".join(Path(path).name for path in args.train_files)
            return cls(name, files, read_files(args.train_files), eval_rows)
        generated = preparation.rows()
        if generated is not None:
            return cls(preparation.title, [generated, files], generated, eval_rows)
        try:
            dataset: Dataset = load_dataset(
                args.dataset_name, args.dataset_config, revision=args.dataset_revision, split=args.dataset_split
            )
        except Exception as error:  # the Hub's client raises many kinds
            raise DataError(f"The dataset `{args.dataset_name}` cannot be loaded: {one_line(error)}") from error
        name = "/".join(filter(None, (args.dataset_name, args.dataset_config, args.dataset_split)))
        rows = (Row(f"{name}, row {number}", row) for number, row in enumerate(dataset, start=1))
        return cls(name, [dataset._fingerprint, files], rows, eval_rows)


def _fingerprints(args: DataArguments) -> dict[str, list[str]]:
    """Return the path of each file of `train_files` and `eval_files` by the hash of its bytes: none may come twice.

    Size and time may stay the same when a file is written again, and one file may have several names.
    """
    found: dict[str, list[str]] = {}
    for field in ("train_files", "eval_files"):
        for path in getattr(args, field) or ():
            try:
                with Path(path).open("rb") as file:
                    digest = hashlib.file_digest(file, "blake2b").hexdigest()
            except OSError as error:
                raise DataError(f"The data file {path} cannot be read: {error.strerror}.") from error
            if digest in found:
                before, other = found[digest]
                raise DataError(f"`{field}` names {path}, which holds the same rows as {other} in `{before}`.")
            found[digest] = [field, str(path)]
    return found
