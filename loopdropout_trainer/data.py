"""Training data: from the rows of a dataset to examples in TRL's formats, with held-out examples and exact loss masks."""

from __future__ import annotations

import hashlib
import json
import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from accelerate import PartialState
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from loopdropout_trainer import __version__
from loopdropout_trainer.arguments import option
from loopdropout_trainer.arithmetic import add_mistake, arithmetic_problems
from loopdropout_trainer.errors import UserError, short_repr


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

logger = logging.get_logger(__name__)

Row = Mapping[str, Any]
Example = tuple[str, Row]
"""Identity and columns of an example. Rows with the same identity are duplicates."""
Indices = tuple[np.ndarray, np.ndarray]
"""Training examples, in order of preference, and held-out examples."""

PROMPT_TEMPLATES = {
    # Taori et al. 2023, the variant without an input field.
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:"
    ),
    # As in lm-eval's `gsm8k` task.
    "question": "Question: {question}\nAnswer:",
}
"""Prompts by name, with {column} fields."""

FIELD = re.compile(r"\{(\w[\w .-]*)\}")
"""A {column} field of a prompt template."""
_FORMATS = (
    ("prompt", "chosen", "rejected"),
    ("chosen", "rejected"),
    ("prompt", "completion"),
    ("messages",),
    ("conversations",),
    ("text",),
)
_TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns of conversations that the chat template reads, as in TRL."""
_TARGETS = {"chosen", "rejected", "completion", "messages", "conversations", "text", "answer", "response"}


def fill(template: str, row: Row) -> str:
    """Fill the {column} fields of a prompt template from a row."""
    return FIELD.sub(lambda match: str(row[match[1]]), template)


def remove_calculations(solution: str) -> str:
    """Remove GSM8K's calculator annotations `<<48/2=24>>` from a solution."""
    return re.sub(r"<<[^<>]*>>", "", solution)


def make_pair(row: Row, completion: str, args: DataArguments) -> Row:
    """Return a prompt and a completion."""
    prompt = fill(args.template or "{prompt}", row) + args.prompt_end
    return {"prompt": prompt, "completion": args.target_prefix + completion}


def make_gsm8k_example(row: Row, args: DataArguments) -> Example:
    """Ask the question as lm-eval's `gsm8k` task does. The target is the solution without calculator annotations."""
    columns = {"question": row["question"], "answer": remove_calculations(row["answer"])}
    return row["question"], {**make_pair(columns, f" {columns['answer']}", args), **columns}


def make_arithmetic_pair(row: Row, args: DataArguments) -> Example:
    """Pair the answer of an arithmetic problem (chosen) with an answer that has a mistake (rejected)."""
    question, example = make_gsm8k_example(row, args)
    rejected = make_pair(example, " " + add_mistake(row["answer"], random_order(question, args.split_seed)), args)
    return question, {"prompt": example["prompt"], "chosen": example["completion"], "rejected": rejected["completion"]}


def make_metamath_example(row: Row, args: DataArguments) -> Example:
    """Ask the question in Alpaca's template. The target is the response."""
    columns = {"question": row["query"], "answer": row["response"]}
    return "\n".join(columns.values()), {**make_pair({"instruction": row["query"]}, row["response"], args), **columns}


def make_tulu2_example(row: Row, args: DataArguments) -> Example:
    """Return the conversation."""
    _, example = make_own_example(row, args)
    turns = [[turn["role"], turn["content"]] for turn in example["messages"]]
    return json.dumps(turns, ensure_ascii=False), example


def make_own_example(row: Row, args: DataArguments) -> Example:
    """Return the columns of one of TRL's formats."""
    identity = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
    columns = find_columns(args, row)
    if isinstance(row.get("completion"), str):
        return identity, make_pair(row, row["completion"], args)
    example = {name: to_messages(row[name]) for name in columns}
    example |= {name: row[name] or {} for name in _TEMPLATE_COLUMNS if name in row}
    return identity, {name.replace("conversations", "messages"): value for name, value in example.items()}


def find_columns(args: DataArguments, names: Sequence[str] | Row) -> tuple[str, ...]:
    """Return the columns that examples are made of."""
    if columns := PREPARATIONS[args.preparation].columns:
        return columns
    if args.template is not None:
        return (*FIELD.findall(args.template), "completion")
    return next((columns for columns in _FORMATS if {*columns} <= {*names}), ())


def to_messages(value: Any) -> Any:
    """Rename the keys and roles of ShareGPT conversations. Return other values unchanged."""
    if not isinstance(value, list) or not all("from" in turn for turn in value):
        return value
    roles = {"human": "user", "gpt": "assistant"}
    return [{"role": roles.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in value]


def _has_text(target: Any) -> bool:
    if isinstance(target, list):
        turns = to_messages(target)
        if wrong := [turn for turn in turns if not isinstance(turn, dict) or "role" not in turn]:
            raise UserError(f"A turn must have a `role` and a text as `content`, got {short_repr(wrong[0])}.")
        turns = (turn for turn in turns if turn["role"] == "assistant")
        return any(turn.get("tool_calls") or _has_text(turn.get("content")) for turn in turns)
    return isinstance(target, str) and bool(target.strip())


def is_short_gsm(row: Row, args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a row of MetaMathQA is of GSM type and below `example_token_limit`.

    As in LoRA-Pro, the limit counts the prompt, a space, and the response without an end token.
    """
    text = f"{fill(args.template, {'instruction': row['query']})}{args.target_prefix} {row['response']}"
    limit = args.example_token_limit
    return "GSM" in row["type"] and (limit is None or len(_encode(tokenizer, text)["input_ids"]) < limit)


def random_order(identity: str, seed: int) -> int:
    """Return a random integer in [0, 2^63) that depends on the identity of a row and the seed alone."""
    digest = hashlib.blake2b(f"{seed}\n{identity}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def hold_out_random(orders: np.ndarray, num_eval: int) -> Indices:
    """Hold out the examples that come first in `orders` [N]: the same examples for each order of the rows."""
    held_out = np.sort(np.unique(orders, return_index=True)[1][:num_eval])
    return np.setdiff1d(np.arange(len(orders)), held_out), held_out


def hold_out_first(orders: np.ndarray, num_eval: int) -> Indices:
    """Hold out the first examples."""
    return hold_out_random(np.arange(len(orders)), num_eval)


def hold_out_after_100k(orders: np.ndarray, num_eval: int) -> Indices:
    """Train on the first 100,000 examples and hold out the next ones, or the last ones of a smaller dataset."""
    train, rest = np.split(np.arange(len(orders)), [100_000])
    rest = rest[~np.isin(orders[rest], orders[train])][:num_eval]
    examples = np.concatenate([train, rest])
    return tuple(np.split(examples, [len(examples) - num_eval]))


def draw_random(orders: np.ndarray, num_eval: int) -> Indices:
    """Draw training examples by `orders`, and hold out the examples that come last."""
    train, held_out = np.split(np.argsort(orders, kind="stable"), [len(orders) - num_eval])
    return train, np.sort(held_out)


class Preparation(NamedTuple):
    """How the rows of a dataset become examples.

    Attributes:
        make_example: Function that makes an example of a row.
        columns: Columns that it reads. Default: the columns of one of TRL's formats.
        split: Function from the random order [N] of the examples and the number of held-out examples to `Indices`.
        keep: Function that returns whether to keep a row.
        problems: Split of the arithmetic problems that are generated.
        num_train_examples, num_eval_examples, prompt_template: Defaults of `DataArguments`.
    """

    make_example: Callable[..., Example] = make_own_example
    columns: tuple[str, ...] = ()
    split: Callable[..., Indices] = hold_out_random
    keep: Callable[..., bool] = lambda row, args, tokenizer: True
    problems: str | None = None
    num_train_examples: int | None = None
    num_eval_examples: int = 0
    prompt_template: str | None = None


_GSM8K = Preparation(make_gsm8k_example, ("question", "answer"), num_eval_examples=500, prompt_template="question")
_ARITHMETIC = _GSM8K._replace(split=hold_out_first, problems="train", num_train_examples=2000, num_eval_examples=200)
PREPARATIONS = {
    None: Preparation(),
    "arithmetic": _ARITHMETIC,
    "arithmetic_pairs": _ARITHMETIC._replace(make_example=make_arithmetic_pair),
    "arithmetic_short": _ARITHMETIC._replace(problems="short"),
    "gsm8k": _GSM8K,
    "metamath_gsm": Preparation(
        make_metamath_example,
        ("type", "query", "response"),
        hold_out_after_100k,
        is_short_gsm,
        num_eval_examples=500,
        prompt_template="alpaca",
    ),
    "tulu2": Preparation(make_tulu2_example, split=draw_random),
}
"""Preparations by name. None takes rows in TRL's formats."""


@dataclass
class DataArguments:
    """The fields of a recipe about training data."""

    help_title = "Data"

    preparation: str | None = option(
        None,
        "Named preparation of the examples. Default: TRL's formats, or `prompt_template` over the columns.",
        choices=PREPARATIONS,
    )
    dataset_name: str | None = option(None, "Name or folder of a dataset.")
    dataset_config: str | None = option(None, "Configuration of the dataset.")
    dataset_revision: str | None = option(None, "Branch, tag or commit of the dataset on the Hub.")
    dataset_split: str = option("train", "Split of the dataset.")
    train_files: list[str] | None = option(None, "JSONL, JSON, CSV (also .gz) or Parquet files to train on.")
    eval_files: list[str] | None = option(None, "Files to evaluate on, instead of held-out examples.")
    column_mapping: dict[str, str] | None = option(None, "{expected column: column of the dataset}.")
    num_train_examples: int | None = option(None, "Number of training examples. Default: all.")
    num_eval_examples: int | None = option(
        None, "Number of held-out examples, the same in each run. Default: the preparation's, else 0."
    )
    split_seed: int = option(0, "Seed of the choice of examples, independent of `seed`.")
    prompt_template: str | None = option(None, "`alpaca`, `question`, or a text with {column} fields.")
    prompt_end: str = option("", "Text at the end of the prompt.")
    target_prefix: str = option(
        "",
        "Text before the target that is trained on. Prompt and target are then tokenized as one text, and a token that "
        "spans both belongs to the target.",
    )
    example_token_limit: int | None = option(
        512,
        "`preparation: metamath_gsm` leaves out examples of so many tokens or more, counted in the prompt, `target_prefix`, "
        "a space, and the response. null: none.",
    )
    arithmetic_steps: list[int] | None = option(
        None,
        "Fewest and most steps of generated arithmetic problems. Default: 3 5, or 2 3 for `arithmetic_short`.",
        nargs=2,
    )

    def __post_init__(self):
        self.made_by = __version__  # `datasets` caches the results of a function by its name and arguments
        problems = self.preparation if PREPARATIONS[self.preparation].problems else None
        sources = {"dataset_name": self.dataset_name, "train_files": self.train_files, "preparation": problems}
        given = [f"`{name}: {value}`" for name, value in sources.items() if value]
        if len(given) > 1:
            raise UserError(f"Set either {' or '.join(given)}, not both.")
        if self.eval_files and self.num_eval_examples:
            raise UserError("Set either `eval_files` or `num_eval_examples`, not both.")
        if self.template is not None and not FIELD.search(self.template):
            names = ", ".join(PROMPT_TEMPLATES)
            raise UserError(
                f"`prompt_template` must be {names} or a text with {{column}} fields, got {self.template!r}."
            )
        fewest, most = self.arithmetic_steps or (1, 5)
        if not 1 <= fewest <= most <= 5:  # problems with more steps are the evaluation split `hard`
            raise UserError(f"`arithmetic_steps` must be two numbers from 1 to 5, got {self.arithmetic_steps}.")

    @property
    def template(self) -> str | None:
        """Text of the prompt template."""
        name = self.prompt_template or PREPARATIONS[self.preparation].prompt_template
        return PROMPT_TEMPLATES.get(name, name)


def load_datasets(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> DatasetDict:
    """Return training examples in source order (`train`) and held-out examples (`eval`, if there are any).

    The choice of held-out examples depends on the rows and `split_seed` alone. Training examples that repeat a held-out
    example are left out. Examples have the columns of one of TRL's formats: `prompt` and `completion`, `messages`, `text`, or
    `chosen` and `rejected`. Pairs of texts are also tokenized, with `input_ids` and `completion_mask` of `tokenize`.

    Args:
        args: Source of the rows, and how they become examples.
        tokenizer: Tokenizer with the chat template of the training.
        max_length: Longest example in tokens, end token included. Longer examples are left out, not cut.

    Raises:
        UserError: if the data cannot be loaded, or if too few examples are left.
    """
    from datasets import DatasetDict

    preparation = PREPARATIONS[args.preparation]
    num_eval = preparation.num_eval_examples if args.num_eval_examples is None else args.num_eval_examples
    num_eval *= not args.eval_files
    num_train = args.num_train_examples or preparation.num_train_examples
    with PartialState().local_main_process_first():  # the other processes read the cache of `datasets`
        if preparation.problems:
            rows = arithmetic_problems(
                preparation.problems, num_train + num_eval, args.split_seed, args.arithmetic_steps
            )
        else:
            rows = _load_rows(args, args.train_files)
        examples = _make_examples(rows, args, tokenizer)
        orders = np.array(examples["order"])
        train, held_out = preparation.split(orders, num_eval)
        eval_examples = examples.select(held_out)
        if args.eval_files:
            eval_examples = _make_examples(_load_rows(args, args.eval_files), args, tokenizer)
        is_repeated = np.isin(orders[train], eval_examples["order"])
        _log_left_out(np.sum(is_repeated), "they repeat a held-out example")
        train = train[~is_repeated]
        if len(train) < (args.num_train_examples or 1) or len(held_out) < num_eval:
            raise UserError(
                f"`num_train_examples` and `num_eval_examples` must be at most {len(train):,} and {len(held_out):,}, the "
                f"numbers of usable examples, got {args.num_train_examples} and {num_eval:,}."
            )
        datasets = DatasetDict(train=examples.select(np.sort(train[:num_train])), eval=eval_examples)
        datasets = datasets.remove_columns("order")
        if isinstance(examples[0].get("completion"), str):
            options = {"tokenizer": tokenizer, "is_one_text": args.target_prefix != ""}
            datasets = datasets.map(tokenize, fn_kwargs=options)
        if max_length is not None:
            options = {"tokenizer": tokenizer, "max_length": max_length}
            reason = f"they have more than {max_length:,} tokens"
            datasets = {name: _keep(split, _fits, reason, **options) for name, split in datasets.items()}
    datasets = DatasetDict({name: split for name, split in datasets.items() if len(split)})
    if "train" not in datasets:
        raise UserError(f"`max_length` must be larger, because no example has {max_length} tokens or fewer.")
    return datasets


def _load_rows(args: DataArguments, files: list[str] | None) -> Dataset:
    from datasets import load_dataset, load_dataset_builder
    from datasets.exceptions import DatasetsError

    if not files and not args.dataset_name:
        raise UserError("`dataset_name` or `train_files` must be set, because there is no data to train on.")
    try:
        if files:
            return read_files(files)
        options = {"revision": args.dataset_revision, "split": args.dataset_split}
        if Path(args.dataset_name).is_dir():
            builder = load_dataset_builder(args.dataset_name, args.dataset_config)
            if builder.name == "csv":
                options |= _csv_options(next(iter(builder.config.data_files.values()))[0])
        return load_dataset(args.dataset_name, args.dataset_config, **options)
    except (OSError, ValueError, DatasetsError, StopIteration) as error:  # the last one from an empty JSON file
        reason = str(error.__cause__ or error) or "a file is empty"
        raise UserError(f"{files or args.dataset_name} cannot be loaded: {reason}") from error


def read_files(files: str | Sequence[str]) -> Dataset:
    """Return the rows of JSONL, JSON, CSV (also .gz) or Parquet files."""
    from datasets import load_dataset

    files = [files] if isinstance(files, str) else files
    suffix = Path(files[0].removesuffix(".gz")).suffix
    kind = {".csv": "csv", ".parquet": "parquet"}.get(suffix, "json")
    options = _csv_options(files[0]) if kind == "csv" else {}
    return load_dataset(kind, data_files=files, split="train", **options)


def _csv_options(file: str) -> dict[str, Any]:
    """Return the options of `load_dataset` that make all cells texts, also numbers and the word "None"."""
    import pandas as pd
    from datasets import Features, Value

    columns = pd.read_csv(file, nrows=0).columns
    return {"features": Features(dict.fromkeys(columns, Value("string"))), "keep_default_na": False}


def _make_examples(rows: Dataset, args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return the examples of the usable rows, with their `order` in random choices."""
    mapping = args.column_mapping or {}
    columns = find_columns(args, [*rows.column_names, *mapping])
    missing = [name for name in columns if name not in mapping] + [*mapping.values()]
    missing = sorted({*missing} - {*rows.column_names})
    if missing or not columns:
        expected = ", ".join(missing) or ", or ".join(" and ".join(names) for names in _FORMATS)
        raise UserError(
            f"The data must have {expected}, got the columns {', '.join(rows.column_names)}. `column_mapping` renames "
            "columns, and `prompt_template` makes prompts from them."
        )
    reason = "they have no text to train on, or `preparation` excludes them"
    rows = _keep(rows, _is_usable, reason, args=args, columns=columns, tokenizer=tokenizer)
    if not len(rows):
        raise UserError(f"The data must have an example with text in {columns[-1]}.")
    return rows.map(_make_example, fn_kwargs={"args": args}, remove_columns=rows.column_names)


def _map_columns(row: Row, args: DataArguments) -> Row:
    return {**row, **{name: row[column] for name, column in (args.column_mapping or {}).items()}}


def _is_usable(row: Row, args: DataArguments, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> bool:
    row = _map_columns(row, args)
    keep = PREPARATIONS[args.preparation].keep
    has_text = all(_has_text(row[name]) if name in _TARGETS else row[name] is not None for name in columns)
    return has_text and keep(row, args, tokenizer)


def _make_example(row: Row, args: DataArguments) -> Row:
    identity, example = PREPARATIONS[args.preparation].make_example(_map_columns(row, args), args)
    return {**example, "order": random_order(identity, args.split_seed)}


def _fits(example: Row, tokenizer: PreTrainedTokenizerBase, max_length: int) -> bool:
    """Return whether an example is short enough: of a preference pair, both answers."""
    answers = [{**example, "completion": example[name]} for name in ("chosen", "rejected") if name in example]
    ids = [(part if "input_ids" in part else tokenize(part, tokenizer))["input_ids"] for part in answers or [example]]
    return max(map(len, ids)) <= max_length


def _keep(dataset: Dataset, function: Callable[..., bool], reason: str, **options: Any) -> Dataset:
    kept = dataset.filter(function, fn_kwargs=options)
    _log_left_out(len(dataset) - len(kept), reason)
    return kept


def _log_left_out(number: int, reason: str) -> None:
    if number and PartialState().is_main_process:
        logger.warning(f"{number:,} examples are left out, because {reason}.")


# Tokens and labels.


def tokenize(
    example: Row, tokenizer: PreTrainedTokenizerBase, assistant_only_loss: bool = False, is_one_text: bool = False
) -> dict[str, list[int]]:
    """Tokenize an example in one of TRL's formats so that no token is part of both prompt and completion.

    The end of a prompt can merge with the start of the completion. Some tokenizers make the token ":The" of "Answer:" and
    "The", and no answer to the prompt alone begins with that token. Use it as a function of `Dataset.map`.

    Args:
        example: Columns `prompt` and `completion` (texts or messages), `messages` or `text`. Texts get an end token.
            Messages may have `tools` (a list or JSON) and `chat_template_kwargs`, which their chat template reads.
        tokenizer: Tokenizer with the chat template of the training.
        assistant_only_loss: Whether to return `assistant_masks` for messages.
        is_one_text: Whether to tokenize prompt and completion together. A token that spans both is then part of the
            completion.

    Returns:
        `input_ids`, and the masks of `SFTTrainer` (1 for a target): `completion_mask` if there is a prompt, and
        `assistant_masks`.
    """
    prompt = example.get("prompt")
    target = next(example[name] for name in ("completion", "messages", "text") if name in example)
    is_chat, template = isinstance(target, list), {}
    if is_chat:
        tools = example.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools or None
        template = {"tools": tools, **(example.get("chat_template_kwargs") or {})}
    options = dict(template)
    if assistant_only_loss:  # None if the tokenizer's own template marks the assistant's text
        from trl import get_training_chat_template  # takes seconds

        options |= {"chat_template": get_training_chat_template(tokenizer), "return_assistant_tokens_mask": True}
    if not is_chat and (is_one_text or not target.endswith(tokenizer.eos_token)):
        target += tokenizer.eos_token
    encoded = _encode(tokenizer, target if prompt is None else prompt + target, **options)
    columns = {name: encoded[name] for name in ("input_ids", "assistant_masks") if name in encoded}
    if prompt is None:
        return columns
    ids = columns["input_ids"]
    options = {"add_generation_prompt": True, **template} if is_chat else {}
    start = _encode(tokenizer, prompt, **options)["input_ids"]
    if not is_chat and not is_one_text and ids[: len(start)] != start:
        parted = start + _encode(tokenizer, target, add_special_tokens=False)["input_ids"]
        if tokenizer.decode(parted) == tokenizer.decode(ids):  # some tokenizers begin each text with a space
            ids = parted
    length = len(os.path.commonprefix([start, ids]))  # of any lists
    return {**columns, "input_ids": ids, "completion_mask": [0] * length + [1] * (len(ids) - length)}


def _encode(tokenizer: PreTrainedTokenizerBase, value: str | list[Row], **options: Any) -> Mapping[str, list[int]]:
    if isinstance(value, str):
        return tokenizer(value, verbose=False, **options)  # no warnings about long texts
    if tokenizer.chat_template is None:
        raise UserError("`chat_template` must be set, because the examples are conversations.")
    try:
        return tokenizer.apply_chat_template(value, return_dict=True, tokenizer_kwargs={"verbose": False}, **options)
    except TemplateError as error:
        raise UserError(f"`chat_template` cannot render the conversation {short_repr(value)}: {error}") from error


def label_example(
    example: Row,
    tokenizer: PreTrainedTokenizerBase,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
) -> dict[str, list[int]]:
    """Return `input_ids` and `labels` (-100 for tokens without loss) of an example, as in training.

    Args:
        example: Example from `load_datasets`, or columns that `tokenize` takes.
        tokenizer: Tokenizer with the chat template of the training.
        completion_only_loss: As in `SFTConfig`. Default: for examples with a prompt.
        assistant_only_loss: As in `SFTConfig`.
    """
    columns = example if "input_ids" in example else tokenize(example, tokenizer, assistant_only_loss)
    used = {"completion_mask": completion_only_loss is not False, "assistant_masks": assistant_only_loss}
    masks = [columns[name] for name in used if used[name] and name in columns]
    tokens = zip(columns["input_ids"], *masks, strict=True)
    return {"input_ids": columns["input_ids"], "labels": [token if all(mask) else -100 for token, *mask in tokens]}


def preview(example: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of an example as the model sees it, with the trained tokens between ⟦ and ⟧.

    Args:
        example: `input_ids` and `labels`, from `label_example` or from the dataset of a trainer.
        tokenizer: Tokenizer of the training.
    """
    text = ""
    pairs = zip(example["input_ids"], example["labels"], strict=True)
    for is_trained, tokens in groupby(pairs, lambda pair: pair[1] != -100):
        piece = tokenizer.decode([token for token, _ in tokens])
        text += f"⟦{piece}⟧" if is_trained else piece
    return text
