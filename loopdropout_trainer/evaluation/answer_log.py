"""The answers of an evaluation in progress, on disk as soon as they are there, with the identity of what they depend on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import UserError, user_supplied, writing
from loopdropout_trainer.record.identity import ONE_RUN, Identity, differences, read_identity
from loopdropout_trainer.saving.files import write_atomically


logger = logging.getLogger(__name__)

IDENTITY_FILE = "identity.json"
ANSWER_FILES = "[0-9]*.jsonl"


class SettingsChangedError(ValueError):
    """What is on disk was measured of another model, or under other settings."""


class AnswerLog:
    """What a model has answered, by key: completions by the problem's index, other requests by their hash.

    On disk it is a folder with `identity.json` and one JSON Lines file for each process, `{"key": ..., "answer": ...}`.

    Args:
        folder: of one benchmark's answers; None: nothing is written.
        process: index of this process, which writes its own file.

    Attributes:
        found: the answers that are known.
    """

    def __init__(self, folder: str | Path | None = None, process: int = 0) -> None:
        self.folder = None if folder is None else Path(folder)
        self.process = process
        self.found: dict[Any, Any] = {}

    def check(self, identity: Identity) -> bool:
        """Return whether there is anything on disk, after comparing what it depends on.

        Raises:
            SettingsChangedError: if the answers depend on something else; it names every difference.
        """
        path = self.folder / IDENTITY_FILE
        if path.is_file():
            with user_supplied(f"{path} cannot be read"):
                check_same(read_identity(json.loads(path.read_bytes())), identity, self.folder)
        elif any(self.folder.glob(ANSWER_FILES)):
            raise SettingsChangedError(f"{self.folder} holds answers without {IDENTITY_FILE}: remove that folder.")
        return path.is_file()

    def read(self, identity: Identity) -> dict[Any, Any]:
        """Return the answers of all processes on disk; write what they depend on if there are none yet.

        It is called in one process before any writes: a line that a killed process left unfinished is removed.

        Raises:
            SettingsChangedError: as `check`.
            ValueError: if a file is damaged; it names the file and the line.
        """
        if not self.check(identity):
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(identity, indent=1, ensure_ascii=False) + "\n"
            write_atomically(self.folder / IDENTITY_FILE, text)
        answers = {}
        for path in self.folder.glob(ANSWER_FILES):
            with path.open("r+b") as file:
                lines = file.read().split(b"\n")
                if unfinished := lines.pop():
                    file.truncate(file.tell() - len(unfinished))
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line)
                    answers[row["key"]] = row["answer"]
                except (ValueError, KeyError, TypeError):
                    raise UserError(f"{path}, line {number}, holds no answer: remove that line.") from None
        return answers

    def keep(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Add (key, answer) pairs, and write them to this process's file; ValueError for NaN or infinity."""
        pairs = list(pairs)
        lines = [json.dumps({"key": key, "answer": answer}, allow_nan=False) + "\n" for key, answer in pairs]
        self.found.update(pairs)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{self.process:05d}.jsonl"
            with writing(path), path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))


def check_same(before: Identity, now: Identity, where: Any, parts: Iterable[str] = ONE_RUN) -> None:
    """Refuse to go on with what was measured of something else: SettingsChangedError names every difference."""
    if changed := differences(before, now, parts):
        raise SettingsChangedError(
            f"{where} holds answers of another evaluation ({', '.join(dict.fromkeys(map(str, changed)))}): give another "
            "`output_dir`, give the row a name of its own (`--adapter NAME=PATH`, or `NAME=none` for the model alone), or "
            "remove that folder."
        )
    if changed := differences(before, now, ("versions",)):
        logger.warning("Going on in %s with other libraries: %s.", where, ", ".join(map(str, changed)))
