"""The answers of an evaluation in progress, on disk as soon as they are there, with the settings that they depend on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopdropout_trainer.saving.files import write_atomically


SETTINGS_FILE = "settings.json"


class SettingsChangedError(ValueError):
    """The answers on disk were made under other settings."""


class AnswerLog:
    """A folder with `settings.json` and one JSON Lines file for each process, `{"key": ..., "answer": ...}`.

    A line that a killed process left unfinished is ignored, and removed before the next one is written.

    Args:
        folder: of one benchmark's answers.
        process: index of this process, which writes its own file.
    """

    def __init__(self, folder: str | Path, process: int = 0) -> None:
        self.folder = Path(folder)
        self.path = self.folder / f"{process:05d}.jsonl"
        self.is_whole = False  # whether the file is known to end with a whole line

    def begin(self, settings: Mapping[str, Any]) -> dict[Any, Any]:
        """Return the answers that are there, by key, and note the settings if they are new.

        Raises:
            SettingsChangedError: if the answers were made under other settings; it names them.
        """
        settings = json.loads(json.dumps(settings))
        path = self.folder / SETTINGS_FILE
        if path.is_file():
            check_same(json.loads(path.read_text(encoding="utf-8")), settings, self.folder)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        return self.read()

    def read(self) -> dict[Any, Any]:
        """Return the answers of all processes."""
        answers = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    row = json.loads(line)
                    answers[row["key"]] = row["answer"]
        return answers

    def append(self, answers: Iterable[tuple[Any, Any]]) -> None:
        """Write (key, answer) pairs and flush them to the system."""
        lines = [json.dumps({"key": key, "answer": answer}) + "\n" for key, answer in answers]
        if not self.is_whole:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_unfinished_line(self.path)
            self.is_whole = True
        with self.path.open("ab") as file:
            file.write("".join(lines).encode())


@dataclass
class Answers:
    """The answers of one benchmark that are known, and where new ones are kept.

    Attributes:
        found: by key: a problem's index, or a hash of what was asked.
        log: where new ones are written; None: nowhere.
    """

    found: dict[Any, Any] = field(default_factory=dict)
    log: AnswerLog | None = None

    def keep(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Add (key, answer) pairs."""
        pairs = list(pairs)
        if self.log is not None:
            self.log.append(pairs)
        self.found.update(pairs)


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


def _remove_unfinished_line(path: Path) -> None:
    """Cut a file after its last newline."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
