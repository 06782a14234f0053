"""`load_data`: from the recipe's data settings to the datasets that the trainer takes."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, DatasetDict, load_dataset
from datasets.fingerprint import Hasher
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data.arguments import DataArguments
from loopdropout_trainer.data.boundary import token_lengths
from loopdropout_trainer.data.preparations import (
    PREPARATIONS,
    Preparation,
    Unwanted,
    random_order,
)
from loopdropout_trainer.data.rows import BadRow, DataError, DataReport, Row, present, read_files
from loopdropout_trainer.errors import user_supplied, writing
from loopdropout_trainer.settings.tokenizer import as_in_its_file


_CACHE_VERSION = 7  # to be raised when the same settings give other examples


@dataclass
class LoadedData:
    """Examples ready for the trainer."""

    train: Dataset  # in one of TRL's formats: `prompt` and `completion`, `messages`, or `text`
    eval: Dataset | None  # held-out examples; the named preparations add `question` and `answer`
    report: DataReport  # rows kept and dropped, with the reasons; print it
    description: str  # one line for a model card


def load_data(args: DataArguments, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None) -> LoadedData:
    """Read rows, make examples, hold some out, and drop those that are too long; never cut one.

    The result is cached on disk: the next run with the same settings, files and tokenizer reads it from there.

    Args:
        args: which rows, and how.
        tokenizer: of the model, with the chat template that training uses.
        max_length: examples with more tokens than this (end token included) are dropped; None keeps all.

    Raises:
        OSError, ValueError: if the data cannot be used; it names the file and row.
    """
    preparation = PREPARATIONS.get(args.preparation, Preparation)(args, tokenizer)
    report = preparation.report
    report.source, fingerprint, rows = _source(args, preparation)
    backend = getattr(as_in_its_file(tokenizer), "backend_tokenizer", None)
    tokens = (backend.to_str() if backend else tokenizer.get_vocab(), tokenizer.chat_template, tokenizer.eos_token)
    key = Hasher.hash([_CACHE_VERSION, asdict(args), fingerprint, tokens, max_length])
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "loopdropout_trainer" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # the processes of one machine prepare the data once
        if not folder.is_dir():
            prepared = _prepare(rows, preparation, max_length)
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                ready = Path(work) / "ready"
                with writing(folder):
                    prepared.save_to_disk(ready)
                    (ready / "report.json").write_text(json.dumps(vars(report)), encoding="utf-8")
                    ready.rename(folder)  # it is there only when it is complete
    with user_supplied(f"The prepared data in {folder} cannot be read: remove that folder"):
        report = DataReport(**json.loads((folder / "report.json").read_text(encoding="utf-8")))
        prepared = DatasetDict.load_from_disk(folder)
    source = f" ({report.source})" if preparation.title not in ("", report.source) else ""
    held = f", {report.held_out:,} held out" if report.held_out else ""
    description = f"{preparation.title or report.source}{source}: {report.train:,} examples{held}"
    return LoadedData(prepared["train"], prepared.get("eval"), report, description)


def _source(args: DataArguments, preparation: Preparation) -> tuple[str, Any, Iterable[Row]]:
    """Return the name of the training rows, what changes whenever any row does, and the rows, to be read once.

    Local files go first, then generated rows, then the Hub's.
    """
    digests = []  # of the bytes: size and time may stay when a file is written again
    for path in (*(args.train_files or ()), *(args.eval_files or ())):
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "blake2b").hexdigest())
    if args.train_files:
        return ", ".join(Path(path).name for path in args.train_files), digests, read_files(args.train_files)
    generated = preparation.rows()
    if generated is not None:
        return preparation.title, generated, generated
    with user_supplied(f"The dataset `{args.dataset_name}` cannot be loaded"):
        dataset = load_dataset(
            args.dataset_name, args.dataset_config, revision=args.dataset_revision, split=args.dataset_split
        )
    name = "/".join(filter(None, (args.dataset_name, args.dataset_config, args.dataset_split)))
    rows = (Row(f"{name}, row {number}", row) for number, row in enumerate(dataset, start=1))
    return name, [dataset._fingerprint, digests], rows


def _prepare(rows: Iterable[Row], preparation: Preparation, max_length: int | None) -> DatasetDict:
    """Return the examples, `train` and `eval` if there are any, and fill in the preparation's report."""
    args = preparation.args
    report = preparation.report
    examples, orders = _examples(rows, preparation)
    if args.eval_files:
        held_out, held_orders = _examples(read_files(args.eval_files), preparation)
        kept = preparation.without_repeats(np.arange(len(orders)), orders, held_orders)
        examples = examples.select(kept)
        orders = orders[kept]
    train_rows, held_rows = preparation.split(examples, orders)
    asked = args.num_train_examples
    if len(train_rows) < (asked or 0) or len(held_rows) < preparation.num_held_out:
        report.train = len(train_rows)
        report.held_out = len(held_rows)
        wanted = f"`num_train_examples: {asked}` and `num_eval_examples: {preparation.num_held_out}`"
        raise DataError(f"Too few rows for {wanted}: {report.train:,} and {report.held_out:,} are left.\n{report}")
    if not args.eval_files:
        held_out = examples.select(held_rows)
    train, report.lengths = _drop_long(examples.select(train_rows), preparation, max_length)
    held_out, _ = _drop_long(held_out, preparation, max_length)
    report.train = len(train)
    report.held_out = len(held_out)
    if not report.train:
        raise DataError(f"No example is left to train on.\n{report}")
    return DatasetDict({"train": train, "eval": held_out} if report.held_out else {"train": train})


def _examples(rows: Iterable[Row], preparation: Preparation) -> tuple[Dataset, np.ndarray]:
    """Return the example of each usable row, and its `random_order` in the choice of rows; count the others."""
    args = preparation.args
    report = preparation.report
    mapping = args.column_mapping or {}
    examples, orders = [], []
    kinds = {}
    for place, row in tqdm(rows, "Reading rows", unit="row", disable=None):
        report.read += 1
        try:
            if isinstance(row, BadRow):
                raise row
            row = {**row, **{expected: present(row, name) for expected, name in mapping.items()}}
            example = preparation.example(row)
            orders.append(random_order(preparation.identity(row), args.split_seed))
        except Unwanted as reason:
            report.dropped[str(reason)] += 1
        except BadRow as error:
            if args.bad_rows == "error":
                raise DataError(f"{place}: {error}. Mend it, or leave such rows out: `bad_rows: skip`.") from error
            report.dropped[error.kind] += 1
            report.bad_rows = [*report.bad_rows, f"{place}: {error}"][:5]
        else:
            examples.append(example)
            columns = [f"{name} as messages" if isinstance(value, list) else name for name, value in example.items()]
            kinds[" and ".join(columns)] = None
    if not examples:
        raise DataError(f"No usable row was found.\n{report}")
    if len(kinds) > 1:
        raise DataError(f"The rows differ in kind: {', others '.join(kinds)}.")
    return Dataset.from_list(examples), np.array(orders, dtype=np.int64)


def _drop_long(examples: Dataset, preparation: Preparation, max_length: int | None) -> tuple[Dataset, list[int]]:
    """Return the examples of at most `max_length` tokens, and their numbers of tokens."""
    lengths = token_lengths(examples, preparation.tokenizer)
    if max_length is not None and np.any(is_long := lengths > max_length):
        preparation.report.drop(f"more than {max_length:,} tokens", np.sum(is_long))
        examples = examples.select(np.flatnonzero(~is_long))
        lengths = lengths[~is_long]
    return examples, lengths.tolist()
