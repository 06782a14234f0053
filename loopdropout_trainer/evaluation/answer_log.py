"""The answers of an evaluation in progress, on disk as soon as they are there, with the settings that they depend on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import UserError, user_supplied, writing
from loopdropout_trainer.saving.files import write_atomically


SETTINGS_FILE = "settings.json"


class SettingsChangedError(ValueError):
    """The answers on disk were made under other settings."""


class AnswerLog:
    """What a model has answered, by key: completions by the problem's index, other requests by their hash.

    On disk it is a folder with `settings.json` and one JSON Lines file for each process, `{"key": ..., "answer": ...}`.

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

    def read(self, settings: Mapping[str, Any]) -> dict[Any, Any]:
        """Return the answers of all processes on disk; write the settings if there are none yet.

        It is called in one process before any writes: a line that a killed process left unfinished is removed.

        Raises:
            SettingsChangedError: if the answers were made under other settings; it names them.
            ValueError: if a file is damaged; it names the file and the line.
        """
        path = self.folder / SETTINGS_FILE
        if path.is_file():
            with user_supplied(f"{path} cannot be read"):
                check_same(json.loads(path.read_bytes()), json.loads(json.dumps(settings)), self.folder)
        elif any(self.folder.glob("*.jsonl")):
            raise SettingsChangedError(f"{self.folder} holds answers without {SETTINGS_FILE}: remove that folder.")
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        answers = {}
        for path in self.folder.glob("*.jsonl"):
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


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], where: Any) -> None:
    """Refuse to go on with answers of other settings: SettingsChangedError names every difference."""
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        differences = ", ".join(f"`{key}` was {before.get(key)!r} and is {now.get(key)!r}" for key in changed)
        raise SettingsChangedError(
            f"{where} holds answers of another evaluation ({differences}): give another `output_dir`, give the row a name of "
            "its own (`--adapter NAME=PATH`, or `NAME=none` for the model alone), or remove that folder."
        )
