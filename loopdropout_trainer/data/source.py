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
            DataError: if a file is missing or the dataset cannot be loaded.
        """
        eval_rows = read_files(args.eval_files) if args.eval_files else None
        eval_print = [_file_print(path) for path in args.eval_files or ()]
        if args.train_files:
            name = ", ".join(Path(path).name for path in args.train_files)
            files = [_file_print(path) for path in args.train_files]
            return cls(name, [files, eval_print], read_files(args.train_files), eval_rows)
        generated = preparation.rows()
        if generated is not None:
            return cls(preparation.title, [generated, eval_print], generated, eval_rows)
        dataset = _load_from_hub(args)
        name = "/".join(filter(None, (args.dataset_name, args.dataset_config, args.dataset_split)))
        rows = (Row(f"{name}, row {number}", row) for number, row in enumerate(dataset, start=1))
        return cls(name, [dataset._fingerprint, eval_print], rows, eval_rows)


def _file_print(path: str) -> list[Any]:
    """Return the name of a file and a hash of its bytes: size and time may stay the same when it is written again."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with Path(path).open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    except OSError as error:
        raise DataError(f"The data file {path} cannot be read: {error.strerror}.") from error
    return [str(Path(path).resolve()), digest.hexdigest()]


def _load_from_hub(args: DataArguments) -> Dataset:
    try:
        return load_dataset(
            args.dataset_name, args.dataset_config, revision=args.dataset_revision, split=args.dataset_split
        )
    except Exception as error:  # the Hub's client raises many kinds
        raise DataError(f"The dataset `{args.dataset_name}` cannot be loaded: {one_line(error)}") from error
