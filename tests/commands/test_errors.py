"""User errors: the messages that scripts print, and the exit codes."""

import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from helpers.errors import user_error
from helpers.files import ROOT
from helpers.tokenizer import make_tokenizer
from loopdropout_trainer.errors import UserError, closest_match, hide_secrets, join_command, run_script, short_repr
from loopdropout_trainer.evaluation.loading import load_benchmarks
from loopdropout_trainer.evaluation.sandbox import check_allowed
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.saving.facts import Source
from loopdropout_trainer.saving.integrity import saving
from loopdropout_trainer.saving.source import find_base
from loopdropout_trainer.settings.recipe import import_files


TOKEN = "hf_averysecrettokenofsomeone"
Terminated = type("Terminated", (KeyboardInterrupt,), {"signal": signal.SIGTERM})
ENDINGS = [
    (UserError("`p` must be in [0, 1),\ngot 2."), 2, "`p` must be in [0, 1), got 2."),
    (UserError(f"The token {TOKEN} is not valid."), 2, "The token *** is not valid."),
    (PermissionError(13, "Permission denied", "run/cache"), 2, "[Errno 13] Permission denied: 'run/cache'"),
    (ImportError("`x` is not installed.\nInstall it."), 2, "A package is missing. `x` is not installed. Install it."),
    (KeyboardInterrupt(), 130, "interrupted."),
    (Terminated("Stopped after step 3."), 143, "Stopped after step 3."),
]


def raise_(error):
    raise error


OWN_CODE = """
import json
from loopdropout_trainer.errors import count

class Rule:
    def __init__(self, p):
        raise ValueError(f"p is\\n{p}")

    def sample(self):
        return 1

    @staticmethod
    def check(num_loops):
        return json.loads("x")

def prepare(row):
    return (lambda: row["question"])()

def score(answer):
    return count("one", "answer")
"""


@pytest.mark.parametrize(("call", "message"), [
    (lambda own: own.Rule(2), "`Rule.__init__` in {}, line 7, raised ValueError: p is 2"),
    (lambda own: own.Rule.sample(1, 2), "`Rule.sample` in {}, line 9, raised TypeError: Rule.sample() takes 1 positional a"),
    (lambda own: own.Rule.check(), "`Rule.check` in {}, line 12, raised TypeError: Rule.check() missing 1 required p"),
    (lambda own: own.Rule.check(4), "`Rule.check` in {}, line 14, raised json.decoder.JSONDecodeError: Expecting value"),
    (lambda own: own.prepare({}), "`<lambda>` in {}, line 17, raised KeyError: 'question'"),
    (lambda own: own.score("1"), None),
])  # fmt: skip
def test_error_of_own_code_has_its_function_and_line(monkeypatch, capsys, tmp_path, call, message):
    """A command needs no guard where it calls such code. An error of the package, which such code calls, has its traceback."""
    monkeypatch.setattr(sys, "argv", ["recipes/sft.py"])
    file = tmp_path / "own_errors.py"
    file.write_text(OWN_CODE)
    import_files([str(file)])
    own = sys.modules["imported_own_errors"]
    if message is None:
        with pytest.raises(ValueError, match="Cannot specify"):
            run_script(lambda: call(own))
        return
    with pytest.raises(SystemExit, match="2"):
        run_script(lambda: call(own))
    assert capsys.readouterr().err.startswith(f"loopdropout sft: {message.format(file)}")


@pytest.mark.parametrize(("code", "message"), [
    ("import torch\nx = 1 / 0\n", "{}, line 2, raised ZeroDivisionError: division by zero"),
    ("\nimport nothing_there\n", "{}, line 2, raised ModuleNotFoundError: No module named 'nothing_there'"),
    ("x = (1 /\n", "{}, line 1, raised SyntaxError: '(' was never closed"),
])  # fmt: skip
def test_error_of_an_imported_file_has_its_line(monkeypatch, capsys, tmp_path, code, message):
    monkeypatch.setattr(sys, "argv", ["recipes/sft.py"])
    file = tmp_path / "broken.py"
    file.write_text(code)
    with pytest.raises(SystemExit, match="2"):
        run_script(lambda: import_files([str(file)]))
    assert capsys.readouterr().err == f"loopdropout sft: {message.format(file)}\n"


def test_commands_in_messages_have_quotes():
    """A folder may have a space. So no text has a command with a folder that `join_command` has not quoted."""
    assert join_command("report", Path("my runs"), "--checkpoints", "true") == (
        "loopdropout report 'my runs' --checkpoints true"
    )
    texts = {
        path: path.read_text()
        for place in (ROOT / "loopdropout_trainer", ROOT / "recipes")
        for path in place.rglob("*.py")
    }
    assert len(texts) > 100
    pattern = re.compile(r"loopdropout (?!recipes)[a-z]+ [^`\n]*\{")
    assert {path: pattern.findall(text) for path, text in texts.items() if pattern.search(text)} == {}


def test_long_name_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["recipes/sft.py"])
    with pytest.raises(SystemExit, match="2"):
        run_script((tmp_path / ("a" * 300)).mkdir)
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"), ENDINGS, ids=["value", "token", "folder", "package", "Ctrl-C", "SIGTERM"]
)
def test_run_script_prints_one_line(monkeypatch, capsys, error, code, message):
    monkeypatch.setattr(sys, "argv", ["recipes/sft.py"])
    with pytest.raises(SystemExit) as stop:
        run_script(lambda: raise_(error))
    assert stop.value.code == code
    assert capsys.readouterr().err == f"loopdropout sft: {message}\n"


ADVICE = {
    "rule": (
        lambda folder: make_rule("my_rule"),
        "by `--import FILE`",
        "run or import the code that registers it first",
    ),
    "task file": (
        lambda folder: load_benchmarks(["my_task.yaml"]),
        "Add `--import my_task.yaml` to the command line",
        r"by `loopdropout_trainer.settings.recipe.import_files\(\['my_task.yaml'\]\)`",
    ),
    "unsafe": (
        lambda folder: check_allowed("ifeval", False, can_be_sandboxed=False),
        "set `--allow_unsafe_code true` on the command line",
        "set `allow_unsafe_code=True` to run",
    ),
    "base model": (
        lambda folder: find_base(Source("mine", "adapter", folder, base="no/such/folder")),
        "give the base model, by `--model_name_or_path`",
        "give the base model, as in `load_model",
    ),
}
"""Errors whose advice is an option of a command, or code."""


@pytest.mark.parametrize("name", ADVICE)
def test_advice_is_for_the_command_or_for_python(monkeypatch, capsys, tmp_path, name):
    action, option, code = ADVICE[name]
    monkeypatch.setattr(sys, "argv", ["recipes/sft.py"])
    with pytest.raises(SystemExit):
        run_script(lambda: action(tmp_path))
    assert option in capsys.readouterr().err
    with user_error(code):
        action(tmp_path)


WRITERS = {
    "torch": lambda file: torch.save(torch.zeros(4), file),
    "large": lambda file: torch.save(torch.zeros(1 << 20), file),
    "safetensors": lambda file: raise_(SafetensorError("I/O error: No space left on device (os error 28)")),
    "tokenizers": lambda file: make_tokenizer().backend_tokenizer.save(str(file)),
    "python": lambda file: file.write_text("x"),
}
"""Functions that write a file. safetensors would replace the full device itself, so its error is raised here."""


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="The system has no device that is always full.")
@pytest.mark.parametrize("name", WRITERS)
def test_full_disk_is_one_line(monkeypatch, capsys, tmp_path, name):
    file = tmp_path / "file"
    file.symlink_to("/dev/full")
    monkeypatch.setattr(sys, "argv", ["recipes/merge.py"])
    with pytest.raises(SystemExit, match="2"):
        run_script(lambda: WRITERS[name](file))
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line or "as on a full disk" in line
    folder = tmp_path / "folder"
    with user_error(f"folder {folder} cannot be written: "), saving(folder, ["*.json"]):
        WRITERS[name](file)


def test_run_script_lets_the_first_process_speak(monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            run_script(lambda: raise_(UserError("a")))
        with pytest.raises(SystemExit):
            run_script(lambda: raise_(KeyboardInterrupt()))
    # The launcher ends the other processes after the first one. After a signal, it waits for all of them for 30 seconds.
    assert waits == [30, 2]
    for error in (OSError("x"), ModuleNotFoundError("x", name="x")):  # errors that are not the user's
        with pytest.raises(type(error), match="x"):
            run_script(lambda error=error: raise_(error))


def test_interruption_is_printed_once(monkeypatch, capsys):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="130"):
            run_script(lambda: raise_(KeyboardInterrupt("Training stopped.")))
    assert capsys.readouterr().err.count("Training stopped.") == 1


def test_launcher_reports_the_sentence_last(monkeypatch, tmp_path):
    """The report of torch's launcher has 40 lines, and stands behind the sentence that the process has printed."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit, match="2"):
        run_script(lambda: raise_(UserError(f"`p` must be in [0, 1),\ngot {TOKEN}.")))
    report = str(
        ChildFailedError("sft.py", {0: ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))})
    )
    lines = [line for line in report.splitlines() if line.strip(" =")]
    assert lines[-1].endswith("`p` must be in [0, 1), got ***.") and "Traceback" not in report


def test_parts_of_messages(monkeypatch):
    assert closest_match("lorra", ["lora", "coto"]) == " Did you mean 'lora'?" and closest_match("xyz", ["lora"]) == ""
    assert max(len(short_repr(value)) for value in ("x" * 1000, list(range(1000)))) < 100
    monkeypatch.setenv("HF_TOKEN", "a-token")
    assert hide_secrets(f"a-token, {TOKEN}, eos_token") == "***, ***, eos_token"
