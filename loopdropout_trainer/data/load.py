"""`DataArguments` and `load_data`: from the recipe's data settings to the datasets that the trainer takes."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
from datasets import Dataset, DatasetDict, load_dataset
from datasets.fingerprint import Hasher
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.checks import check_choice, check_list, check_numbers, shown
from loopdropout_trainer.data.arithmetic import MOST_TRAINED_STEPS
from loopdropout_trainer.data.boundary import token_lengths
from loopdropout_trainer.data.preparations import (
    PREPARATIONS,
    Preparation,
    Unwanted,
    random_order,
)
from loopdropout_trainer.data.rows import BadRow, DataError, DataReport, Row, present, read_files
from loopdropout_trainer.errors import UserError, user_supplied, writing
from loopdropout_trainer.settings.arguments import setting
from loopdropout_trainer.settings.tokenizer import as_in_its_file


_CACHE_VERSION = 7  # to be raised when the same settings give other examples


_HUB = ("dataset_name", "dataset_config", "dataset_revision", "dataset_split")


@dataclass
class DataArguments:
    """Which rows to train on, and how they become examples.

    Raises:
        ValueError: if no source of rows is named, or two settings exclude each other.
    """

    preparation: str | None = setting(
        None,
        "Named preparation of the rows. Default: rows in TRL's formats, or a `prompt_template` over their columns.",
        choices=list(PREPARATIONS),
    )
    dataset_name: str | None = setting(None, "Name of a dataset on the Hub, or its folder.")
    dataset_config: str | None = setting(None, "Configuration of the Hub dataset.")
    dataset_revision: str | None = setting(None, "Branch, tag or commit of the Hub dataset.")
    dataset_split: str = setting("train", "Split of the Hub dataset.")
    train_files: list[str] | None = setting(None, "Local JSONL, JSON, CSV (also .gz), Parquet files.")
    eval_files: list[str] | None = setting(None, "Local files to evaluate on, instead of held-out rows.")
    column_mapping: dict[str, str] | None = setting(None, "{expected name: name in rows} (JSON if typed).")
    num_train_examples: int | None = setting(None, "Rows to train on. Default: all that are left.")
    num_eval_examples: int | None = setting(
        None, "Number of rows to hold out, the same in every run. Default: the preparation's own, else 0."
    )
    split_seed: int = setting(0, "Seed of the choice of rows (held out, drawn); not the seed of training.")
    prompt_template: str | None = setting(None, "`alpaca`, `question`, or a text with {column} fields.")
    prompt_end: str = setting("", "Text between the prompt template and the target; part of the prompt.")
    target_prefix: str = setting(
        "",
        "Text before the target that is trained on. Prompt, prefix and target are then tokenised as one text; a token "
        "that spans prompt and target belongs to the target.",
    )
    example_token_limit: int | None = setting(
        512,
        "Of `preparation: metamath_gsm`: rows of so many tokens or more are left out, counted in the prompt, "
        "`target_prefix`, a space, and the response. null: none are.",
    )
    arithmetic_steps: list[int] | None = setting(
        None,
        "Fewest and most steps of a problem of `preparation: arithmetic` or `arithmetic_pairs`. Default: 3 5.",
        nargs=2,
    )
    bad_rows: Literal["error", "skip"] = setting("error", "Stop at a row that cannot be used, or count it.")

    def __post_init__(self):
        check_list("train_files", self.train_files)
        check_list("eval_files", self.eval_files)
        check_choice("preparation", self.preparation, (None, *PREPARATIONS))
        check_choice("bad_rows", self.bad_rows, ("error", "skip"))
        if self.dataset_name and Path(self.dataset_name).is_file():
            raise UserError(
                f"`dataset_name` must be a dataset of the Hub or its folder; {self.dataset_name} is a file: give it "
                "as `train_files`."
            )
        self._check_source()
        if self.eval_files and self.num_eval_examples:
            raise UserError("`eval_files` and `num_eval_examples` exclude each other: give one of them.")
        check_numbers(self)
        if self.preparation != "metamath_gsm" and self.example_token_limit != type(self).example_token_limit:
            raise UserError(
                "`example_token_limit` belongs to `preparation: metamath_gsm`; `max_length` drops the long examples of others."
            )
        if self.arithmetic_steps is None:
            return
        if self.preparation not in ("arithmetic", "arithmetic_pairs"):
            raise UserError("`arithmetic_steps` belongs to `preparation: arithmetic` or `arithmetic_pairs`.")
        steps = list(self.arithmetic_steps)
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= MOST_TRAINED_STEPS:
            valid = f"the fewest and the most steps, from 1 to {MOST_TRAINED_STEPS}, such as [1, 3]"
            raise UserError(f"`arithmetic_steps` must be {valid}; got {shown(steps)}.")

    def _check_source(self) -> None:
        """Raise UserError unless the rows come from one place."""
        if str(self.preparation).startswith("arithmetic"):
            source = f"preparation: {self.preparation}"
            unread = (*_HUB, "train_files", "eval_files", "column_mapping")
        elif self.train_files:
            source = "train_files"
            unread = _HUB
        elif self.dataset_name:
            source, unread = "dataset_name", ()
            if self.dataset_revision and Path(self.dataset_name).is_dir():
                raise UserError(
                    f"`dataset_revision` is of a dataset on the Hub; {self.dataset_name} is a folder: leave it out."
                )
        else:
            raise UserError("No training rows: give `dataset_name` (Hub) or `train_files` (local files).")
        for name in unread:
            if getattr(self, name) != getattr(type(self), name):
                raise UserError(f"`{name}` and `{source}` exclude each other: the rows come from one of them.")


@dataclass
class LossArguments:
    """The trainer's settings that decide what is trained on, for what shows or scores examples as training sees them."""

    max_length: int | None = setting(1024, "As in training: longer examples are dropped.")
    completion_only_loss: bool | None = setting(None, "As in training: whether only completions count.")
    assistant_only_loss: bool = setting(False, "As in training: whether only the assistant's turns count.")
    chat_template_path: str | None = setting(None, "As in training: another name for `chat_template`.")
    eos_token: str | None = setting(None, "As in training: the token that ends answers.")


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
        raise _refusal(f"Too few rows for {wanted}: {report.train:,} and {report.held_out:,} are left.", report)
    if not args.eval_files:
        held_out = examples.select(held_rows)
    train, report.lengths = _drop_long(examples.select(train_rows), preparation, max_length)
    held_out, _ = _drop_long(held_out, preparation, max_length)
    report.train = len(train)
    report.held_out = len(held_out)
    if not report.train:
        raise _refusal("No example is left to train on.", report)
    return DatasetDict({"train": train, "eval": held_out} if report.held_out else {"train": train})


def _refusal(sentence: str, report: DataReport) -> DataError:
    """Return the error that says why there is nothing to train on, with what became of the rows below it."""
    error = DataError(sentence)
    error.add_note(str(report))
    return error


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
        raise _refusal("No usable row was found.", preparation.report)
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
