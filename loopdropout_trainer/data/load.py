"""`load_data`: from the recipe's data settings to the datasets that the trainer takes."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, Value
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from loopdropout_trainer.data.arguments import DataArguments
from loopdropout_trainer.data.lengths import token_lengths
from loopdropout_trainer.data.preparation import Preparation, Unwanted, preparation_class, random_order
from loopdropout_trainer.data.report import DataReport
from loopdropout_trainer.data.rows import BadRow, DataError, Row
from loopdropout_trainer.data.source import Source
from loopdropout_trainer.settings.command import one_line
from loopdropout_trainer.settings.ranges import check_integer


logger = logging.get_logger(__name__)

_CACHE_VERSION = 3  # to be raised when the same settings give other examples


@dataclass
class LoadedData:
    """Examples ready for the trainer.

    Attributes:
        train: examples in one of TRL's formats: `prompt` and `completion`, `messages`, or `text`.
        eval: held-out examples or None; the named preparations add `question` and `answer`.
        report: rows kept and dropped, with the reasons; print it.
        description: one line for a model card.
    """

    train: Dataset
    eval: Dataset | None
    report: DataReport
    description: str


def load_data(args: DataArguments, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None) -> LoadedData:
    """Read rows, make examples, hold some out, and drop those that are too long; never cut one.

    The result is cached on disk: the next run with the same settings, files and tokenizer reads it from there.

    Args:
        args: which rows, and how.
        tokenizer: of the model, with the chat template that training uses.
        max_length: examples with more tokens than this (end token included) are dropped; None keeps all.

    Raises:
        DataError: if the data cannot be used; it names the file and row.
    """
    if max_length is not None:
        check_integer("max_length", max_length)
    preparation = preparation_class(args.preparation)(args)
    source = Source.open(args, preparation)
    key = _cache_key(args, source, tokenizer, max_length)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "loopdropout_trainer" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # the processes of one machine prepare the data once
        loaded = _load_from(folder, preparation) if folder.is_dir() else None
        if loaded is None:
            _prepare_into(folder, preparation, source, tokenizer, max_length)
            loaded = _load_from(folder, preparation)
    if loaded is None:
        raise DataError(f"The prepared data in {folder} cannot be read back: is the disk full or damaged?")
    return loaded


def _load_from(folder: Path, preparation: Preparation) -> LoadedData | None:
    """Return the examples in a folder that `_prepare_into` wrote; None, and the folder is removed, if it is damaged."""
    try:
        report = DataReport(**json.loads((folder / "report.json").read_text(encoding="utf-8")))
        train = Dataset.load_from_disk(folder / "train")
        held_out = Dataset.load_from_disk(folder / "eval") if report.held_out else None
        if len(train) != report.train or len(held_out or ()) != report.held_out:
            raise ValueError(f"{len(train)} and {len(held_out or ())} examples")
    except Exception as error:  # pyarrow and datasets raise many kinds
        logger.warning(f"The prepared data in {folder} is damaged ({one_line(error)}); it is prepared again.")
        shutil.rmtree(folder, ignore_errors=True)
        return None
    source = f" ({report.source})" if preparation.title not in ("", report.source) else ""
    held = f", {report.held_out:,} held out" if report.held_out else ""
    description = f"{preparation.title or report.source}{source}: {report.train:,} examples{held}"
    return LoadedData(train, held_out, report, description)


def _cache_key(args: DataArguments, source: Source, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> str:
    state: Any = tokenizer.get_vocab()
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        passing = ("padding", "truncation")  # a fast tokenizer's state, which changes from call to call
        state = {key: value for key, value in json.loads(backend.to_str()).items() if key not in passing}
    parts = [_CACHE_VERSION, asdict(args), source.fingerprint, state, tokenizer.chat_template, tokenizer.eos_token]
    text = json.dumps([*parts, max_length], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _prepare_into(
    folder: Path, preparation: Preparation, source: Source, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> None:
    """Write `train`, `eval` and `report.json` into a folder that appears only when it is complete."""
    report = DataReport(source.name)
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        examples = _write_examples(source.train, preparation, report, work / "all.arrow")
        train, held_out = _split(examples, preparation, tokenizer, report)
        if source.eval is not None:
            held_out = _write_examples(source.eval, preparation, report, work / "eval.arrow").remove_columns("rank")
        train, lengths = _drop_long(train, tokenizer, max_length, report)
        held_out, _ = _drop_long(held_out, tokenizer, max_length, report)
        report.train_tokens, report.longest = int(lengths.sum()), int(lengths.max(initial=0))
        report.train, report.held_out = len(train), len(held_out)
        if not len(train):
            raise DataError(f"No example is left to train on.\n{report}")
        train.save_to_disk(work / "ready" / "train")
        if len(held_out):
            held_out.save_to_disk(work / "ready" / "eval")
        (work / "ready" / "report.json").write_text(json.dumps(vars(report)), encoding="utf-8")
        (work / "ready").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_examples(rows: Iterable[Row], preparation: Preparation, report: DataReport, path: Path) -> Dataset:
    """Write the examples of all usable rows to an Arrow file, one at a time: they need not fit into memory."""
    examples = _examples(tqdm(rows, "Reading rows", unit="row", disable=None), preparation, report)
    first = next(examples, None)
    if first is None:
        raise DataError(f"No usable row was found.\n{report}")
    turns = [{"role": Value("string"), "content": Value("string")}]
    features = {str: Value("string"), list: turns, int: Value("int64")}
    kind = _kind(first)
    with ArrowWriter(
        path=str(path), features=Features({k: features[type(value)] for k, value in first.items()})
    ) as writer:
        for example in chain([first], examples):
            if _kind(example) != kind:
                raise DataError(f"The rows differ in kind: the first has {kind}, a later one has {_kind(example)}.")
            writer.write(example)
        writer.finalize()
    return Dataset.from_file(str(path))


def _kind(example: dict[str, Any]) -> str:
    names = ("prompt", "completion", "messages", "text", "chosen", "rejected")
    named = {name: " as messages" if isinstance(example[name], list) else "" for name in names if name in example}
    return " and ".join(name + form for name, form in named.items())


def _examples(rows: Iterable[Row], preparation: Preparation, report: DataReport) -> Iterator[dict[str, Any]]:
    """Yield the example of each usable row, with its `rank` in the choice of rows; count the others."""
    args = preparation.args
    for place, row in rows:
        report.read += 1
        try:
            if isinstance(row, BadRow):
                raise row
            for name in (args.column_mapping or {}).values():
                if name not in row:
                    raise BadRow(f"missing field `{name}`", " (named by `column_mapping`)")
            row = {**row, **{expected: row[name] for expected, name in (args.column_mapping or {}).items()}}
            yield {**preparation.example(row), "rank": random_order(preparation.identity(row), args.split_seed)}
        except Unwanted as reason:
            report.dropped[str(reason)] += 1
        except BadRow as error:
            if args.bad_rows == "error":
                raise DataError(
                    f"{place}: {error}. Mend the row, or set `bad_rows: skip` to leave such rows out."
                ) from error
            report.dropped[error.kind] += 1
            if len(report.bad_rows) < 5:
                report.bad_rows.append(f"{place}: {error}")


def _split(
    examples: Dataset, preparation: Preparation, tokenizer: PreTrainedTokenizerBase, report: DataReport
) -> tuple[Dataset, Dataset]:
    ranks = examples.data.column("rank").to_numpy()
    examples = examples.remove_columns("rank")
    dropped_before = report.dropped.total()
    train, held_out = preparation.split(examples, ranks, tokenizer, report)
    asked = preparation.args.num_train_examples
    if asked is not None and len(train) < asked or len(held_out) < preparation.num_held_out:
        report.train, report.held_out = len(train), len(held_out)
        raise DataError(
            f"Too few rows for `num_train_examples: {asked}` and `num_eval_examples: {preparation.num_held_out}`: "
            f"{len(train):,} and {len(held_out):,} are left; ask for fewer.\n{report}"
        )
    report.unused = len(examples) - len(train) - len(held_out) - (report.dropped.total() - dropped_before)
    return examples.select(train), examples.select(held_out)


def _drop_long(
    examples: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None, report: DataReport
) -> tuple[Dataset, np.ndarray]:
    """Return the examples of at most `max_length` tokens, and their numbers of tokens."""
    lengths = token_lengths(examples, tokenizer)
    keep = np.flatnonzero(lengths <= (np.inf if max_length is None else max_length))
    if len(keep) < len(examples):
        report.dropped[f"more than {max_length:,} tokens"] += len(examples) - len(keep)
    return examples.select(keep), lengths[keep]
