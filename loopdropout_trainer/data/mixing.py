"""Examples of several data sets, in one format or in several, which then become tokens with labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data.caching import step_key
from loopdropout_trainer.data.examples import Examples
from loopdropout_trainer.data.formats import TEXTS, find_format
from loopdropout_trainer.data.preparations import Row
from loopdropout_trainer.data.tokenizing import label_example, tokenize
from loopdropout_trainer.errors import UserError


OWN_COLUMNS = ("order", "content", "is_one_text", "source", "num_tokens", "mixed")
"""Columns of examples that no trainer reads."""


class Losses(NamedTuple):
    """Which tokens of an example are trained on, as in `SFTConfig`."""

    completion_only: bool | None = None
    assistant_only: bool = False

    @classmethod
    def of(cls, args: Any) -> Losses:
        """Return the losses of the settings of a training. Those of DPO and GRPO have no such fields."""
        return cls(getattr(args, "completion_only_loss", None), getattr(args, "assistant_only_loss", False))

    def describe(self, features: Mapping[str, Any], title: str, has_template: bool = False) -> str:
        """Return the trained tokens of the examples of a source.

        Args:
            features: Columns of the examples.
            title: Name of the source in a message.
            has_template: Whether there is a chat template, which pairs of texts do not get.

        Raises:
            UserError: If the examples have no format of SFT, or are texts without turns, and only the assistant's turns are to
                be trained on.
        """
        names = find_format(features, TEXTS)
        if not names:
            raise UserError(
                f"The examples of {title} must have a format of SFT, because those to train on have several ones, got "
                f"{', '.join(_name_columns(features))}."
            )
        if "text" in names:
            if self.assistant_only:
                raise UserError(
                    f"`assistant_only_loss` must be false for the examples of {title}, which are texts without turns."
                )
            return "all tokens"
        if "messages" in names:
            if self.assistant_only:
                return "the assistant's turns"
            return "all tokens (`assistant_only_loss: true`: the assistant's turns)"
        if _is_text(features["prompt"]):
            tokens = "all tokens" if self.completion_only is False else "the completion"
            if has_template:
                tokens += ", as plain text, without the chat template"
            return tokens
        return self._describe_turns()

    def _describe_turns(self) -> str:
        """Return the trained tokens of pairs of turns."""
        if self.assistant_only:
            part = "the prompt and the completion" if self.completion_only is False else "the completion"
            return f"the assistant's turns of {part}"
        return "all tokens" if self.completion_only is False else "the completion"


def concatenate(parts: Sequence[Examples]) -> Examples:
    """Return the examples of several sources with the same columns one behind the other."""
    from datasets import concatenate_datasets

    rows = concatenate_datasets([part.rows for part in parts])
    key = step_key(*[part.key for part in parts])
    sources, origins = [], []
    for part in parts:
        origins.append(part.origins + [len(sources), 0])  # [N, 2]: the index in `sources`, and the row there
        sources += part.sources
    return Examples(rows, key, sources, np.concatenate(origins))


def have_one_format(parts: Iterable[Examples]) -> bool:
    """Return whether all examples have the same columns with the same types."""
    first, *others = [part.rows.features for part in parts]
    return all(features == first for features in others)


def differ_in_format(first: Examples, other: Examples, formats: Sequence[Sequence[str]]) -> bool:
    """Return whether examples of SFT are of two formats, such as pairs and chats, or pairs of texts and of turns."""
    first_format, other_format = _format_of(first.rows.features), _format_of(other.rows.features)
    have_formats = bool(first_format and other_format)  # examples with `chosen` have none of SFT
    return _are_supervised(formats) and have_formats and first_format != other_format


def check_formats(parts: Sequence[Examples], titles: Sequence[str], formats: Sequence[Sequence[str]]) -> None:
    """Raise UserError if examples of several formats cannot become tokens, because the training is not SFT.

    Args:
        parts: Examples of several formats.
        titles: Names of their sources.
        formats: Columns of each format that the training reads.
    """
    features = [part.rows.features for part in parts]
    if _are_supervised(formats) and not any("chosen" in columns for columns in features):
        return
    for title, other in zip(titles, features, strict=True):
        if other != features[0]:
            names, other_names = ", ".join(_name_columns(features[0])), ", ".join(_name_columns(other))
            raise UserError(
                f"`datasets` must have the same columns, got {names} in {titles[0]}, and {other_names} in {title}."
            )


def _are_supervised(formats: Sequence[Sequence[str]]) -> bool:
    return {*TEXTS} <= {*formats}


def mix(examples: Examples, losses: Losses) -> Examples:
    """Put each example into one column, so that examples of all formats have the same columns. `add_labels` takes them out.

    Each example is trained on as in a training on its own format: of pairs the completion, of chats the turns that `losses`
    says. TRL would take the format of the first example for all of them.
    """
    return examples.replace(_mix, losses=losses)


def is_mixed(examples: Examples) -> bool:
    """Return whether examples were made by `mix`."""
    return "mixed" in examples.rows.column_names


def add_labels(examples: Examples, tokenizer: PreTrainedTokenizerBase) -> Examples:
    """Add the tokens and labels of examples that `mix` has made, and the numbers of their tokens."""
    return examples.add(_add_labels, tokenizer=tokenizer)


def _mix(row: Row, losses: Losses) -> Row:
    own = {name: row[name] for name in ("order", "content", "is_one_text", "source")}
    example = {name: value for name, value in row.items() if name not in own}
    return {"mixed": {"example": example, "losses": [*losses]}, **own}


def _add_labels(row: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    example, losses = row["mixed"]["example"], Losses(*row["mixed"]["losses"])
    tokens = tokenize(example, tokenizer, losses.assistant_only, row["is_one_text"])
    labeled = label_example(tokens, tokenizer, *losses)
    return {**labeled, "num_tokens": len(labeled["input_ids"])}


def _format_of(features: Mapping[str, Any]) -> list[tuple[str, bool]]:
    return [(name, _is_text(features[name])) for name in find_format(features, TEXTS)]


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) == "string"


def _name_columns(features: Mapping[str, Any]) -> list[str]:
    """Return the names of the columns of examples, with the kinds of their values."""
    names = []
    for name, feature in features.items():
        if name not in OWN_COLUMNS:
            kind = "text" if _is_text(feature) else getattr(feature, "dtype", "messages")
            names.append(f"{name} ({kind})")
    return names
