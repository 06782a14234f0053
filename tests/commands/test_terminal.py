"""Control characters of strangers: no command lets a terminal obey them."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import termios

import pytest
from rich.console import Console
from tqdm import tqdm

from helpers.files import ROOT, load_script, write_lines
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.files import TINY_OURO_PATH
from loopdropout_trainer.terminal import show_controls


HOSTILE = "a\x1b]0;title\x07b\x1b[2J\x9bc\r\x1b[1A\x1b[31md\u202ee\ud800"
SHOWN = r"a\x1b]0;title\x07b\x1b[2J\x9bc\r\x1b[1Ad\u202ee\ud800"
LOGGER = logging.getLogger("loopdropout_trainer.test_terminal")


def log_by_the_handler_of_an_import():
    LOGGER.warning(HOSTILE.removesuffix("\ud800"))  # pytest captures logs, and its plugin for processes cannot send it


def fail():
    raise UserError(f"`p` must be a number, got {HOSTILE}.")


def show_bars():
    for _ in tqdm(range(2), desc=HOSTILE):
        for _ in tqdm(range(2), desc="inner", leave=False):
            pass


PRINTERS = {
    "print": lambda: print("name:", HOSTILE),
    "lines": lambda: sys.stdout.writelines(["x\n", HOSTILE]),
    "a table": lambda: Console(width=200).print(HOSTILE, markup=False),
    "a log": log_by_the_handler_of_an_import,
    "standard error": lambda: print("name:", HOSTILE, file=sys.stderr),
    "an error": fail,
    "a bar": show_bars,
}


def run(main, monkeypatch, capsys, *words):
    """The output of a command. The handlers of loggers are older than the command, as in a script that imports libraries."""
    monkeypatch.setattr(sys, "argv", ["command", *words])
    handler = logging.StreamHandler()
    LOGGER.addHandler(handler)
    try:
        run_script(main)
    except SystemExit:
        pass
    finally:
        LOGGER.removeHandler(handler)
    return capsys.readouterr()


@pytest.mark.parametrize("name", PRINTERS)
def test_control_characters_are_shown(name, monkeypatch, capsys):
    out, err = run(PRINTERS[name], monkeypatch, capsys)
    text = out + err
    for part in (r"a\x1b]0;title", r"b\x1b[2J\x9bc", r"\x1b[1Ad\u202ee"):  # rich leaves two of them out
        assert part in text
    if name == "a bar":
        assert text.startswith("\r" + SHOWN) and "\n\rinner" in text and "\x1b[A" in text
        text = re.sub(r"\r(?=a|inner| )|\r\Z|\x1b\[A", "", text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)


COMMAND = """
import sys
from loopdropout_trainer.errors import run_script

def main():
    from tqdm.auto import tqdm
    list(tqdm(range(2), desc="Loading weights"))

run_script(main)
"""


def test_bars_are_for_terminals_only():
    """A log would have each of them as a long line."""
    master, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))  # a bar without a width is empty
    command, environment = [sys.executable, "-c", COMMAND], {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TQDM_DISABLE", None)
    subprocess.run(command, env=environment, stderr=terminal, check=True)
    os.close(terminal)
    assert b"Loading weights: 100%" in os.read(master, 10_000)
    os.close(master)
    assert subprocess.run(command, env=environment, capture_output=True, check=True).stderr == b""


def test_plans_are_wrapped_in_terminals_only():
    """Between words, and not inside of numbers and settings. Other programs find whole lines in a file."""
    line = "  at most 12,902,400 tokens, so 4.0 to 17 hours at K = 4"
    sentence = "Nobody has measured it. `loopdropout evaluate outputs/quickstart none --eval_num_loops 4` does so."
    code = (
        "from loopdropout_trainer.terminal import print_sentences, titled\n"
        f"print(titled('tokens', [{line!r}], 8))\n"
        f"print_sentences({sentence!r})\n"
        "from loopdropout_trainer.errors import UserError, run_script\n"
        "def fail():\n"
        "    import logging\n"
        f"    logging.getLogger('loopdropout_trainer.jobs').warning({sentence!r})\n"
        f"    raise UserError({sentence!r})\n"
        "run_script(fail)"
    )
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("COLUMNS", None)
    master, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 40))
    subprocess.run(command, env=environment, stdout=terminal, stderr=terminal)
    os.close(terminal)
    printed = os.read(master, 10_000).decode()
    os.close(master)
    assert printed.splitlines() == [
        "tokens    at most 12,902,400 tokens, so",
        "            4.0 to 17 hours at K = 4",
        "Nobody has measured it.",
        "`loopdropout evaluate outputs/quickstart none --eval_num_loops 4`",  # one line, which can be copied
        "does so.",
        "Nobody has measured it.",  # a warning
        "`loopdropout evaluate outputs/quickstart none --eval_num_loops 4`",
        "does so.",
        "-c: Nobody has measured it.",  # an error
        "`loopdropout evaluate outputs/quickstart none --eval_num_loops 4`",
        "does so.",
    ]
    in_pipe = subprocess.run(command, env=environment, capture_output=True)
    assert in_pipe.stdout == f"tokens  {line}\n{sentence}\n".encode()
    assert in_pipe.stderr == f"{sentence}\n-c: {sentence}\n".encode() and in_pipe.returncode == 2


def test_pieces_form_no_new_sequence():
    assert show_controls("\x1b\x1b[0m[2J") == r"\x1b[2J"
    assert show_controls("tab\tline\nمرحبا 👩‍🚀 é") == "tab\tline\nمرحبا 👩‍🚀 é"


ROW = {"value": 1.0, "unit": "%", "seed": 0, "step": 1, "num_loops": 4, "gates": "unit", "n": 1, "metric": "accuracy"}


@pytest.mark.filterwarnings("ignore:Glyph")  # figures have no glyph for them
def test_commands_show_names_of_strangers(tmp_path, monkeypatch, capsys):
    hostile = HOSTILE.replace("\ud800", "").replace("/", "")
    shown = SHOWN.removesuffix(r"\ud800")
    folder = shutil.copytree(TINY_OURO_PATH, tmp_path / hostile)
    (tmp_path / "run").mkdir()
    write_lines(tmp_path / "run" / "results.jsonl", [{**ROW, "task": hostile, "method": hostile}])
    (tmp_path / "run" / "recipe.yaml").write_text(json.dumps({"rule": hostile}))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps({"model_name_or_path": "tiny-ouro", "rule": hostile, "output_dir": str(tmp_path / "new")})
    )
    commands = {
        "chat": [str(folder), "x", "--max_new_tokens", "1"],
        "report": [str(tmp_path / "run"), "--output_dir", str(tmp_path / "report")],
        "sft": [str(recipe), "--dry_run", "true"],
    }
    for name, words in commands.items():
        out, err = run(load_script(f"recipes/{name}.py").main, monkeypatch, capsys, *words)
        assert shown[:12] in out + err, (name, out, err)
        text = out + err.replace("\rLoading weights", "")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text), name
