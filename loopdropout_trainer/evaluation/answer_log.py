"""The answers of an evaluation in progress, on disk as soon as they are there, with the settings that they depend on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loopdropout_trainer.saving.files import write_atomically


SETTINGS_FILE = "settings.json"


class SettingsChangedError(ValueError):
    """The answers on disk were made under other settings."""


class AnswerLog:
    """What a model has answered, by key: completions by the problem's index, other requests by their hash.

    On disk it is a folder with `settings.json` and one JSON Lines file for each process, `{"key": ..., "answer": ...}`. A
    line that a killed process left unfinished is ignored, and removed before the next one is written.

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
        self._ends_with_newline = False  # whether this process's file is known to

    def read(self, settings: Mapping[str, Any]) -> dict[Any, Any]:
        """Return the answers of all processes on disk; write the settings if there are none yet.

        Raises:
            SettingsChangedError: if the answers were made under other settings; it names them.
            ValueError: if a file is damaged; it names the file and the line.
        """
        path = self.folder / SETTINGS_FILE
        if path.is_file():
            check_same(_parsed(path.read_text(encoding="utf-8"), path), json.loads(json.dumps(settings)), self.folder)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        answers = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
                if line.endswith(b"\n"):
                    row = _parsed(line, f"{path}, line {number},")
                    try:
                        answers[row["key"]] = row["answer"]
                    except (KeyError, TypeError):
                        raise ValueError(f"{path}, line {number}, holds no answer: remove that line.") from None
        return answers

    def keep(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Add (key, answer) pairs, and write them to this process's file.

        Raises:
            ValueError: for NaN or infinity, which are no answers.
        """
        pairs = list(pairs)
        lines = [json.dumps({"key": key, "answer": answer}, allow_nan=False) + "\n" for key, answer in pairs]
        self.found.update(pairs)
        if self.folder is None or not pairs:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.process:05d}.jsonl").open("a+b") as file:
            if not self._ends_with_newline:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)  # after the last complete line
                self._ends_with_newline = True
            file.write("".join(lines).encode())


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], where: Any) -> None:
    """Refuse to go on with answers of other settings.

    Raises:
        SettingsChangedError: if the two differ; it names every difference.
    """
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        differences = ", ".join(f"`{key}` was {before.get(key)!r} and is {now.get(key)!r}" for key in changed)
        raise SettingsChangedError(
            f"{where} holds answers of another evaluation ({differences}): give another `output_dir`, give the row a name of "
            "its own (`--adapter NAME=PATH`, or `NAME=none` for the model alone), or remove that folder."
        )


def _parsed(text: str | bytes, where: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # broken JSON, or no text
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{where} is damaged: remove it, and what it held is evaluated again.")
    return value
