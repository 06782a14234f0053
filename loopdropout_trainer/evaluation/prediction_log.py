"""The answers of an evaluation in progress, on disk as soon as they are there, with the settings that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loopdropout_trainer.evaluation.benchmarks import Benchmark


SETTINGS_FILE = "settings.json"


class SettingsChangedError(ValueError):
    """The answers on disk were made under other settings."""


class PredictionLog:
    """A folder with `settings.json` and one JSON Lines file for each process, `{"index": ..., "completion": ...}`.

    A line that a killed process left unfinished is ignored, and removed before the next one is written.

    Args:
        folder: of one benchmark's answers.
        process: index of this process, which writes its own file.
    """

    def __init__(self, folder: str | Path, process: int = 0) -> None:
        self.folder = Path(folder)
        self.path = self.folder / f"{process:05d}.jsonl"

    def begin(self, settings: Mapping[str, Any]) -> dict[int, str]:
        """Return the answers that are there, by index of the problem, and note the settings if they are new.

        Raises:
            SettingsChangedError: if the answers were made under other settings; it names them.
        """
        settings = json.loads(json.dumps(settings))
        path = self.folder / SETTINGS_FILE
        if path.is_file():
            _check_same(json.loads(path.read_text(encoding="utf-8")), settings, self.folder)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        return self.read()

    def read(self) -> dict[int, str]:
        """Return the answers of all processes."""
        answers = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    row = json.loads(line)
                    answers[row["index"]] = row["completion"]
        return answers

    def append(self, answers: Iterable[tuple[int, str]]) -> None:
        """Write (index of the problem, completion) pairs and flush them to the system."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"index": index, "completion": completion}) + "\n" for index, completion in answers]
        with self.path.open("a+b") as file:
            _remove_unfinished_line(file)
            file.write("".join(lines).encode())


def settings_of(benchmark: Benchmark) -> dict[str, Any]:
    """Return what answers depend on in a benchmark, texts as a hash."""
    return {
        "benchmark": benchmark.name,
        "problems_sha256": hashlib.sha256(json.dumps([benchmark.prompts, benchmark.references]).encode()).hexdigest(),
        "max_new_tokens": benchmark.max_new_tokens,
        "stop_strings": list(benchmark.stop_strings),
    }


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _remove_unfinished_line(file) -> None:
    """Cut a file, open for reading and appending, after its last newline."""
    file.seek(0)
    content = file.read()
    if content and not content.endswith(b"\n"):
        file.truncate(content.rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)


def _check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        differences = ", ".join(f"`{key}` was {before.get(key)!r} and is {now.get(key)!r}" for key in changed)
        raise SettingsChangedError(
            f"{folder} holds answers of another evaluation ({differences}): "
            "give another `output_dir`, or remove that folder."
        )
