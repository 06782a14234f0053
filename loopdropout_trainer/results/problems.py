"""Which problems of a task, or which held-out examples, a result was measured on.

A result has a digest of them in the column `problems`: of the problems and their answers for an evaluation, and of the tokens
and their labels for a loss. An older result does not have it. Then the answers in the file of its samples tell its problems,
and the settings of the data its held-out examples. `have_other_problems` and `name_problems` decide which results compare.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from loopdropout_trainer.results.run_files import read_samples


def digest_problems(problems: Iterable[tuple[Mapping[str, Any], Any]]) -> str:
    """Return a digest of problems in their order: the columns of each one, and its reference answer."""
    digest = hashlib.sha256()
    for columns, answer in problems:
        text = json.dumps([columns, str(answer)], sort_keys=True, default=str)
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()[:16]


def digest_examples(batches: Iterable[Any]) -> str:
    """Return a digest of the tokens and labels of examples, which does not depend on how they are divided into batches.

    So packed and padded examples in any order have the same digest. Examples without a label do not count, because no loss
    reads them.

    Args:
        batches: Model inputs with `input_ids`, and `labels` or the `completion_mask` of preferences, [B, S] each. A batch of
            another kind, such as prompts whose answers are generated, is a list of examples.
    """
    digests = []
    for batch in batches:
        if isinstance(batch, Mapping) and "input_ids" in batch:
            digests += _digest_rows(batch)
        else:
            digests += [digest_problems([(example, None)]).encode() for example in batch]
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16]


IGNORED_LABEL = -100
"""Label of a token that no loss reads."""


def _digest_rows(batch: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a digest of each example of a batch with a label."""
    tokens = _read_column(batch, "input_ids")  # [B, S]
    mask, positions = _read_column(batch, "attention_mask"), _read_column(batch, "position_ids")
    labels, completions = _read_column(batch, "labels"), _read_column(batch, "completion_mask")
    is_preference = labels is None and completions is not None
    if is_preference:
        labels = tokens * completions + IGNORED_LABEL * (1 - completions)
    examples = []
    for row in range(len(tokens)):
        own_labels = tokens[row] if labels is None else labels[row]
        is_start = tokens[row] != tokens[row]  # nowhere
        if positions is not None:  # of packed examples
            is_start = positions[row] == 0
        is_token = tokens[row] == tokens[row]
        if mask is not None:
            is_token = mask[row] != 0
        examples += _split_row(tokens[row][is_token], own_labels[is_token], is_start[is_token])
    if is_preference and len(examples) % 2 == 0:  # the chosen answers of all examples come first
        half = len(examples) // 2
        examples = [chosen + rejected for chosen, rejected in zip(examples[:half], examples[half:], strict=True)]
    for content in examples:
        if content:
            yield hashlib.sha256(content).digest()


def _read_column(batch: Mapping[str, Any], name: str) -> Any:
    """Return a tensor of a batch as an array of int64, or None if it has no such tensor."""
    import torch

    values = batch.get(name)
    if values is None:
        return None
    return torch.as_tensor(values).cpu().long().numpy()


def _split_row(tokens: Any, labels: Any, is_start: Any) -> list[bytes]:
    """Return the bytes of each example in a row [S] of packed examples, which are empty for an example without a label.

    The label of the first token never counts, because no token before it predicts it.
    """
    starts = [place for place in is_start.nonzero()[0].tolist() if place > 0]
    edges = [0, *starts, len(tokens)]
    examples = []
    for start, end in pairwise(edges):
        content = b""
        if (labels[start + 1 : end] != IGNORED_LABEL).any():
            length = (end - start).to_bytes(8, "little")
            content = length + tokens[start:end].tobytes() + labels[start + 1 : end].tobytes()
        examples.append(content)
    return examples


def have_other_problems(result: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether it is known that two results of a task were measured on different problems or held-out examples."""
    if result.get("n") != other.get("n") and None not in (result.get("n"), other.get("n")):
        return True
    ours, others = name_problems([result, other])
    return None not in (ours, others) and ours != others


def find_comparable(result: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the last of some results at the same task and depth as a result that compares with it, or None."""
    found = None
    for other in others:
        is_of_place = (other["task"], other["num_loops"]) == (result["task"], result["num_loops"])
        if is_of_place and not have_other_problems(result, other):
            found = other
    return found


def name_problems(results: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Return a text for each result of a task that is the same for the same problems, or None where it is not known.

    It is the digest of a result that has one. An older result has that of a result with the same evidence, such as the
    answers in its samples, or else this evidence. A result without a digest and without evidence, as in a copy without the
    files of samples, does not count, and neither does older evidence if it cannot be compared.

    Args:
        results: Results with their column `folder`. `SETTINGS` is the evidence of a held-out loss.
    """
    digests = [result["problems"] if _has_text(result, "problems") else None for result in results]
    if None not in digests:
        return digests
    evidence = [_find_evidence(result) for result in results]
    digests_of: dict[str | None, Counter] = {}  # of the results with each evidence
    for digest, own in zip(digests, evidence, strict=True):
        if digest is not None:
            digests_of.setdefault(own, Counter())[digest] += 1
    is_comparable = None not in digests_of
    names = []
    for digest, own in zip(digests, evidence, strict=True):
        name = digest
        if digest is None and own in digests_of and own is not None:
            name = digests_of[own].most_common(1)[0][0]
        elif digest is None and is_comparable:
            name = own
        names.append(name)
    return names


SETTINGS = "held_out_settings"
"""Column with the settings that decide about the held-out examples of a loss, as a text."""


def _find_evidence(result: Mapping[str, Any]) -> str | None:
    """Return a text that is the same for two results without digests on the same problems, or None if it is not known."""
    if _has_samples(result):
        return f"answers {_digest_targets(result)}"
    if _has_text(result, SETTINGS):
        return result[SETTINGS]
    return None


class Problems:
    """The problems of a task, whose digests are made once for all results that are compared with them.

    Args:
        problems: Columns and reference answer of each problem.
    """

    def __init__(self, problems: Iterable[tuple[Mapping[str, Any], Any]]) -> None:
        self.problems = [*problems]

    @cached_property
    def digest(self) -> str:
        """Digest as in the column `problems` of a result."""
        return digest_problems(self.problems)

    @cached_property
    def digest_of_answers(self) -> str:
        """Digest as of the answers in the samples of a result."""
        return digest_problems(({}, answer) for _, answer in self.problems)

    def are_those_of(self, result: Mapping[str, Any]) -> bool:
        """Return whether a result can be one on these problems, as far as an older result without samples tells it.

        Args:
            result: Result of an evaluation, with its column `folder`.
        """
        if result["n"] != len(self.problems):
            return False
        if _has_text(result, "problems"):
            return result["problems"] == self.digest
        if _has_samples(result):
            return _digest_targets(result) == self.digest_of_answers
        return True


def _has_text(result: Mapping[str, Any], column: str) -> bool:
    return isinstance(result.get(column), str)  # a missing cell of a data frame is a number


def _has_samples(result: Mapping[str, Any]) -> bool:
    return _has_text(result, "samples") and Path(result["folder"], result["samples"]).is_file()


def _digest_targets(result: Mapping[str, Any]) -> str:
    """Return a digest of the answers in the samples of a result. An unchanged file is read once for a report."""
    folder, name = result["folder"], result["samples"]
    return _digest_file(folder, name, result.get("n"), Path(folder, name).stat().st_mtime_ns)


@cache
def _digest_file(folder: str, name: str, num_problems: int | None, changed: int) -> str:
    """Return the digest of the answers in a file of samples. `changed`: time of its last change, in ns."""
    samples = read_samples({"folder": folder, "samples": name, "n": num_problems})
    return digest_problems(({}, sample.get("target")) for sample in samples)
