"""The examples that adapters and models are diagnosed on: held-out ones of their training, or reference answers of a task."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data import SFTDataArguments, load_datasets
from loopdropout_trainer.data.arguments import has_held_out
from loopdropout_trainer.data.sources import read_sources
from loopdropout_trainer.diagnostics import Batch, label_batches, reference_examples
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation import load_benchmarks
from loopdropout_trainer.evaluation.answers import describe_tokenizer
from loopdropout_trainer.results.recipe_changes import compare_recipes
from loopdropout_trainer.results.run_commands import complete_command
from loopdropout_trainer.results.run_files import DEVELOPMENT, RECIPE_FILE
from loopdropout_trainer.saving.facts import Source


def check_data(args: Any, sources: list[Source], settings: dict[str, Any]) -> None:
    """Raise UserError if a model was trained on other data, whose held-out examples are others."""
    if args.task != DEVELOPMENT:
        return
    for source in sources:
        if not source.recipe:
            continue
        fields = [*SFTDataArguments.__dataclass_fields__]
        if not has_held_out(source.recipe):
            fields.remove("eval_files")  # the only examples that the training has not seen
        difference = compare_recipes(source.recipe, settings, fields=fields)
        if difference:
            words = ["diagnose", str(source.run / RECIPE_FILE), source.name]
            command = complete_command(words, str(source.run))
            raise UserError(
                f"The recipe must have the data of the adapter in {source.name}, but {difference}. Measure it with its own "
                f"recipe, `{command}`. To score other examples, describe them in `own_benchmarks` and name them in `task`."
            )


class DiagnosedData:
    """The examples of all models, as each model's own tokenizer reads them.

    Args:
        args: Options of recipes/diagnose.py.
        data_args: Data of the training.
        chat_template: Chat template instead of the trainings'.
        sources: All models. One without a chat template, such as the base model, reads chats as the first one that has it.
        batches: Batches of earlier measurements, `Shared.batches`. The runs of a sweep have equal data and tokenizers, each
            with files of its own.
    """

    def __init__(
        self,
        args: Any,
        data_args: SFTDataArguments,
        chat_template: str | None,
        sources: list[Source],
        batches: dict[str, list[Batch]],
    ) -> None:
        self.args, self.data_args, self.chat_template, self.sources = args, data_args, chat_template, sources
        self._batches = batches
        self._digests: dict[tuple, str] = {}

    def batches(self, source: Source) -> list[Batch]:
        """Return the batches of a model."""
        key = (source.tokenizer, source.chat_template)
        if key not in self._digests:
            tokenizer = self._load_tokenizer(source)
            digest = self._digest(tokenizer)
            if digest not in self._batches:
                self._batches[digest] = self._read_batches(tokenizer)
            self._digests[key] = digest
        return self._batches[self._digests[key]]

    def _digest(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the digest of everything that the batches depend on."""
        options = {name: value for name, value in vars(self.args).items() if name not in ("adapters", "output_dir")}
        facts = [options, vars(self.data_args), describe_tokenizer(tokenizer)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def _load_tokenizer(self, source: Source) -> PreTrainedTokenizerBase:
        tokenizer = source.load_tokenizer(self.chat_template)
        if not tokenizer.chat_template:
            templates = (other.load_tokenizer().chat_template for other in self.sources if other.is_adapter)
            tokenizer.chat_template = next(filter(None, templates), None)
        return tokenizer

    def _read_batches(self, tokenizer: PreTrainedTokenizerBase) -> list[Batch]:
        return label_batches(
            islice(self._examples(tokenizer), self.args.num_examples),
            tokenizer,
            self.args.per_device_eval_batch_size,
            self.args.completion_only_loss,
            self.args.assistant_only_loss,
        )

    def _examples(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        args = self.args
        if args.task != DEVELOPMENT:
            (task,) = load_benchmarks([args.task], args.own_benchmarks, args.benchmark_revisions)
            return reference_examples(task, args.num_examples)
        if self.data_args.preparation is None and not read_sources(vars(self.data_args)):
            raise UserError("`task` must be set, or a recipe given with held-out examples, because no data is named.")
        with PartialState().main_process_first():
            losses = args.completion_only_loss, args.assistant_only_loss
            examples = load_datasets(self.data_args, tokenizer, args.max_length, *losses).get("eval")
        if examples is None:
            raise UserError("`eval_files` or `task` must be set, because no example is held out.")
        return examples
