"""Programs that nobody has read: what they are kept from, and EvalPlus's own verdict on what they return."""

import copy
import gzip
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loopdropout_trainer.evaluation.code import (
    ANSWER_BEGINNING,
    CodeExecutionError,
    ContainmentError,
    Limits,
    containment,
    containment_report,
    prompts,
    score,
    scoring,
)
from loopdropout_trainer.evaluation.code.values import Opaque, decode, encode


pytest.importorskip("evalplus")

GOLDEN = Path(__file__).parent / "golden"
HUMANEVAL, MBPP = GOLDEN / "humaneval_plus.jsonl.gz", GOLDEN / "mbpp_plus.jsonl.gz"
SECRET = "hf_secret_4711"
SMALL = Limits(memory_bytes=1 << 30, disk_bytes=8 << 20, processes=10, result_bytes=4 << 20)

needs_namespaces = pytest.mark.skipif(
    not containment.has_namespaces(), reason="the system allows no namespaces; the report says what that leaves open"
)


def rows(file):
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def answer(code):
    """Code as a model writes it after the beginning of its answer."""
    return textwrap.dedent(code).strip("\n") + "\n```\nThis works."


@pytest.fixture
def copies_of(tmp_path):
    """A file of one problem under many ids."""

    def write(row, number):
        file = tmp_path / "copies.jsonl"
        file.write_text(
            "".join(json.dumps({**row, "task_id": f"HumanEval/{index}"}) + "\n" for index in range(number))
        )
        return file

    return write


def run(answers, file, dataset="humaneval", **arguments):
    arguments = {"limits": SMALL, "allow_code_execution": True, "progress": False, "workers": 2, **arguments}
    return score(dataset, answers, file, **arguments)


# Hostile programs: `attack()` returns True if it could do what it should not, and True is the right answer. A program that
# EvalPlus's own guard stops goes past it, to the C library or to `posix`.

ATTACKS = {
    "says that it could": "def attack():\n    return True",  # the control: it passes
    "fork bomb": """
        import posix
        def attack():
            forked = 0
            for _ in range(2000):
                if posix.fork() == 0:
                    while True:
                        pass
                forked += 1
            return forked == 2000
        """,
    "memory bomb": """
        def attack():
            return len(bytearray(1 << 31)) == 1 << 31
        """,
    "disk fill": """
        import posix
        def attack():
            written = 0
            for number in range(100):
                file = posix.open(str(number), posix.O_CREAT | posix.O_WRONLY)
                written += posix.write(file, bytes(1 << 20))
            return written > 20 << 20
        """,
    "infinite loop": "def attack():\n    while True: pass",
    "loop that catches its timeout, without signals": """
        import signal
        def attack():
            for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            while True:
                try:
                    while True: pass
                except BaseException: pass
        """,
    "kills all that it can reach": """
        import posix, ctypes
        def attack():
            for kill in (posix.kill, posix.killpg):
                for process in (-1, 1, posix.getppid(), posix.getpgid(posix.getppid()), posix.getpgid(0), PARENT, SENTINEL):
                    for number in (9, 15):
                        if process != posix.getpid():
                            try: kill(process, number)
                            except OSError: pass
            return False
        """,
    "ends with success": "import posix\ndef attack():\n    posix._exit(0)",
    "exits": "import sys\ndef attack():\n    sys.exit(0)",
    "prints success": """
        import posix
        def attack():
            print("pass")
            posix.write(1, b"pass\\n"); posix.write(2, b'{"base": true}\\n')
            return False
        """,
    "writes results of its own": """
        import posix
        def attack():
            for file in range(256):
                try: posix.write(file, b'{"returned": ["x"], "error": null, "status": "pass", "base": true}')
                except OSError: pass
            posix._exit(0)
        """,
    "changes the builtins": """
        import builtins, json
        def attack():
            for name in ("all", "any", "bool", "isinstance", "type", "len", "zip"):
                setattr(builtins, name, lambda *_: True)
            json.dumps = lambda *_, **__: '{"returned": [false], "error": null}'
            return False
        """,
    "equals everything": """
        class Equal:
            __hash__ = lambda self: 0
            __eq__ = lambda self, other: True
            __bool__ = lambda self: True
        def attack():
            return Equal()
        """,
    "equals everything, as a kind of integer": """
        class Equal(int):
            __hash__ = lambda self: 0
            __eq__ = lambda self, other: True
        def attack():
            return Equal(0)
        """,
    "runs code when it is unpickled": """
        class Reduced:
            def __reduce__(self):
                import os
                return os.system, ("touch VICTIM.pickled",)
        def attack():
            return Reduced()
        """,
    "looks for the right answers": """
        import gc, sys
        def attack():
            frame, seen = sys._getframe(), []
            while frame:
                seen += list(frame.f_locals) + list(frame.f_globals)
                frame = frame.f_back
            seen += [key for held in gc.get_objects() if type(held) is dict for key in held if type(key) is str]
            return any(name in seen for name in ("expected", "canonical_solution", "expected_output", "details"))
        """,
    "reads tokens": """
        import os, glob, io
        def attack():
            found = [str(dict(os.environ))]
            for path in glob.glob("/proc/*/environ") + ["HOME_FOLDER/token", "VICTIM"]:
                try: found.append(io.FileIO(path).read().decode())
                except OSError: pass
            return "SECRET" in "".join(found)
        """,
    "calls the network": """
        import socket
        def attack():
            for family, address in ((socket.AF_INET, ("127.0.0.1", PORT)), (socket.AF_UNIX, "\\0ABSTRACT")):
                try:
                    socket.socket(family).connect(address)
                    return True
                except OSError: pass
            return False
        """,
    "deletes files": """
        import posix
        def attack():
            done = False
            for change in (posix.unlink, posix.rmdir, lambda path: posix.open(path, posix.O_WRONLY | posix.O_TRUNC)):
                try:
                    change("VICTIM")
                    done = True
                except OSError: pass
            return done
        """,
    "writes into the libraries": """
        import posix
        def attack():
            for folder in ("LIBRARIES", "PACKAGE", "/usr", "/", "/etc"):
                try:
                    posix.open(folder + "/planted.py", posix.O_CREAT | posix.O_WRONLY)
                    return True
                except OSError: pass
            return False
        """,
    "writes without end": "import posix\ndef attack():\n    while True: posix.write(1, bytes(1 << 16))",
    "fills its results": """
        import posix
        def attack():
            while True:
                for file in range(3, 64):
                    try: posix.write(file, bytes(1 << 16))
                    except OSError: pass
        """,
    "returns more than memory holds": "def attack():\n    return [bytes(1 << 20)] * 500",
    "leaves a process behind": """
        import posix
        def attack():
            if posix.fork() == 0:
                posix.setsid()
                if posix.fork() == 0:
                    posix.execv("/bin/sleep", ["sleep", "MARKER"])
                posix._exit(0)
            return False
        """,
    "looks into its parent": """
        import ctypes, posix
        def attack():
            done = False
            for process in (posix.getppid(), PARENT):
                done = done or ctypes.CDLL(None).ptrace(16, process, 0, 0) == 0
                try:
                    posix.open("/proc/%d/mem" % process, posix.O_RDWR)
                    done = True
                except OSError: pass
            return done
        """,
    "recurs without end": """
        import sys
        def attack():
            sys.setrecursionlimit(10 ** 9)
            return attack() or [attack()]
        """,
    "crashes": "import ctypes\ndef attack():\n    return ctypes.string_at(8)",
    "raises its limits": """
        import ctypes, posix
        def attack():
            class Limit(ctypes.Structure):
                _fields_ = [("soft", ctypes.c_ulong), ("hard", ctypes.c_ulong)]
            more = Limit(1 << 62, 1 << 62)
            return any(ctypes.CDLL(None).setrlimit(number, ctypes.byref(more)) == 0 for number in (0, 1, 6, 9))
        """,
    "takes privileges": """
        import ctypes, posix
        def attack():
            done, library = False, ctypes.CDLL(None)
            for flag in (0x10000000, 0x20000, 0x40000000):
                done = done or library.unshare(flag) == 0
            done = done or library.mount(b"tmpfs", b"/box", b"tmpfs", 0, None) == 0 or library.chroot(b".") == 0
            try:
                posix.setuid(0)
                done = done or posix.getuid() == 0
            except OSError: pass
            return done
        """,
    "becomes another program": """
        import posix
        def attack():
            posix.execv("/bin/sh", ["sh", "-c", 'for f in 3 4 5 6 7; do echo \\'{"returned": [true]}\\' >&$f; done'])
        """,
    "contains itself": "def attack():\n    deep = []\n    deep.append(deep)\n    return deep",
}


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    """What the attacks aim at, by the names that stand for it in their code."""
    victim = tmp_path / "victim"
    victim.write_text(SECRET)
    os.chmod(tmp_path, 0o777)
    os.chmod(victim, 0o666)
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    sentinel = subprocess.Popen(["sleep", "600"])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"attack-{os.getpid()}"
        abstract.bind("\0" + name)
        abstract.listen()
        yield {
            "VICTIM": str(victim),
            "SECRET": SECRET,
            "PORT": str(server.getsockname()[1]),
            "ABSTRACT": name,
            "PARENT": str(os.getpid()),
            "SENTINEL": str(sentinel.pid),
            "MARKER": f"98765.{os.getpid()}",
            "HOME_FOLDER": str(Path.home()),
            "LIBRARIES": str(Path(np.__file__).parent),
            "PACKAGE": str(Path(scoring.__file__).parent),
        }
        assert victim.read_text() == SECRET and not Path(f"{victim}.pickled").exists()
    assert sentinel.poll() is None  # not killed
    sentinel.kill()
    sentinel.wait()


def filled(code, surroundings):
    for name, value in surroundings.items():
        code = code.replace(name, value)
    return answer(textwrap.dedent(code).rstrip() + "\n    return False")  # EvalPlus leaves out what returns nothing


def running(marker):
    """Whether a process with this argument runs."""
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return any(marker in line.split() for line in found.splitlines())


@needs_namespaces
def test_hostile_programs_reach_nothing_and_change_no_score(surroundings, copies_of, tmp_path, monkeypatch):
    problem = {"prompt": "def attack():\n", "entry_point": "attack", "canonical_solution": "    return True\n"}
    problem |= {"contract": "", "base_input": [[]], "plus_input": [[]], "atol": 0}
    ids = {f"HumanEval/{number}": name for number, name in enumerate(ATTACKS)}
    file = copies_of(problem, len(ids))
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    monkeypatch.setattr(containment.tempfile, "tempdir", str(boxes))
    found = run({task_id: filled(ATTACKS[name], surroundings) for task_id, name in ids.items()}, file)
    passed = [ids[task_id] for task_id, result in found.items() if result["base"] or result["plus"]]
    assert passed == ["says that it could"], {ids[task_id]: result for task_id, result in found.items()}
    assert len(ids) >= 30 and not any("KeyError" in result["why"] for result in found.values())  # each one ran
    why = {ids[task_id]: result["why"] for task_id, result in found.items()}
    assert "MemoryError" in why["memory bomb"] and "OSError" in why["disk fill"]
    assert "BlockingIOError" in why["fork bomb"] or "timeout" in why["fork bomb"]
    assert "TimeoutException" in why["infinite loop"]
    assert "timeout" in why["loop that catches its timeout, without signals"]
    assert not running(surroundings["MARKER"])
    assert not list(boxes.iterdir())


# Without namespaces: what limits, a session and root's spare user still do.

SYSTEM_PYTHON = "/usr/bin/python3"  # one that a user without rights can read


@pytest.mark.skipif(not os.access(SYSTEM_PYTHON, os.X_OK), reason="no interpreter for all users")
@pytest.mark.parametrize(
    "name, allowed",
    [("memory bomb", None), ("infinite loop", None), ("reads tokens", "VICTIM"), ("raises its limits", None)]
    + [("leaves a process behind", None), ("fork bomb", None), ("looks into its parent", None)]
    + [("kills all that it can reach", None), ("writes into the libraries", None)],
)
def test_without_namespaces_limits_hold_and_nothing_stays_behind(surroundings, name, allowed):
    if os.getuid() != 0 and name in ("kills all that it can reach", "looks into its parent", "reads tokens"):
        pytest.skip("open without namespaces, as the report says")
    code = filled(ATTACKS[name], {**surroundings, "VICTIM": "/nowhere"}).split("```")[0]
    program = f"import os\nos.write(int(os.environ['RESULTS']), b'R')\n{code}\ndone = attack()\n"
    program += "os.write(int(os.environ['RESULTS']), b'reached' if done else b'kept out')\n"
    began = time.monotonic()
    outcome = containment.run_contained([SYSTEM_PYTHON, "-c", program], b"", 3, SMALL, namespaces=False)
    assert outcome.results in (None, b"kept out")
    assert time.monotonic() - began < 30
    assert not running(surroundings["MARKER"])


# What is said


def test_nothing_runs_without_the_flag_and_what_is_not_contained_is_said_before(monkeypatch, tmp_path):
    monkeypatch.setattr(scoring, "run_contained", lambda *_: pytest.fail("a program ran"))
    with pytest.raises(CodeExecutionError, match="give --allow_code_execution"):
        run({"HumanEval/0": "x"}, HUMANEVAL, allow_code_execution=False)
    said = []
    monkeypatch.setattr(scoring.logger, "warning", said.append)
    monkeypatch.setattr(scoring, "run_contained", lambda *_: said.append("ran") or containment.Outcome(None, "no"))
    assert run({"HumanEval/0": answer("x = 1")}, HUMANEVAL)["HumanEval/0"]["base"] is False
    assert said == [containment_report(), "ran"]


@pytest.mark.skipif(not os.access(SYSTEM_PYTHON, os.X_OK), reason="no interpreter for all users")
def test_the_report_says_what_is_open_without_namespaces(monkeypatch):
    monkeypatch.setattr(containment, "has_namespaces", lambda: False)
    monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON)
    assert "NOT contained here" in containment_report() and "the network" in containment_report()


def test_a_box_that_cannot_be_set_up_runs_nothing():
    with pytest.raises(ContainmentError, match="cannot be set up: FileNotFoundError"):
        containment.run_contained(["/nowhere/python"], b"", 1)


def test_what_is_missing_is_said_in_a_sentence(monkeypatch):
    with pytest.raises(CodeExecutionError, match="no problem 'HumanEval/999'"):
        run({"HumanEval/999": ""}, HUMANEVAL)
    with pytest.raises(CodeExecutionError, match="The code data sets are humaneval, mbpp; got 'apps'"):
        prompts("apps")
    with pytest.raises(CodeExecutionError, match="is not there: nowhere.jsonl"):
        prompts("mbpp", "nowhere.jsonl")
    monkeypatch.setattr(scoring.util, "find_spec", lambda name: None)
    with pytest.raises(
        CodeExecutionError, match=r"needs EvalPlus, which is not installed: `pip install 'loop.*\[eval\]'`"
    ):
        prompts("mbpp")


# Values


def test_values_come_back_as_they_were():
    values = [None, True, "ä\ud800", -0.0, 7, 1 << 70, (1, [2.5]), {1, 2}, frozenset("a"), {(1, 2): {"x": b"\0"}}]
    values += [complex(1, -2), np.float32(0.1), np.int64(5), float("inf"), bytearray(b"a")]
    for value in values:
        back = decode(json.loads(json.dumps(encode(value))))
        assert back == value and type(back) is type(value)
    array = decode(encode(np.arange(6.0).reshape(2, 3)))
    assert isinstance(array, np.ndarray) and array.tolist() == [[0, 1, 2], [3, 4, 5]]
    counted = decode(encode(Counter("aab")))
    assert counted == {"a": 2, "b": 1} and type(counted) is not dict
    opaque = decode(encode(iter([1, 2]), items=True))
    assert isinstance(opaque, Opaque) and set(opaque) == {1, 2} and opaque != iter([1, 2])
    for bad in ({"system": "true"}, {"numpy": ["O", [1], "00" * 8, True]}, {}, {"int": "x"}):
        with pytest.raises(Exception):  # noqa: B017
            decode(bad)


# EvalPlus

VARIANTS = {
    "HumanEval/0": {"wrong": "def has_close_elements(numbers, threshold):\n    return False"},
    "HumanEval/2": {
        "near": "def truncate_number(number):\n    return number % 1.0 + 1e-8",
        "far": "def truncate_number(number):\n    return number % 1.0 + 1e-3",
        "numpy": "import numpy as np\ndef truncate_number(number):\n    return np.float64(number % 1.0 + 1e-8)",
    },
    "HumanEval/99": {"half": "def closest_integer(value):\n    return round(float(value))"},
    "Mbpp/2": {
        "any order": "def similar_elements(a, b):\n    return list(reversed(sorted(set(a) & set(b), key=str)))",
        "a generator": "def similar_elements(a, b):\n    return (x for x in a if x in b)",
        "a union": "def similar_elements(a, b):\n    return set(a) | set(b)",
    },
    "Mbpp/164": {"anything": "def are_equivalent(a, b):\n    return 'x'"},
    "Mbpp/295": {"zero": "def sum_div(number):\n    return 0", "one": "def sum_div(number):\n    return 1"},
    "Mbpp/581": {
        "slant": "def surface_Area(b, s):\n    return 2 * b * s + b ** 2",
        "raises": "def surface_Area(b, s):\n    raise KeyError",
    },
    "Mbpp/558": {"other": "def digit_distance_nums(n1, n2):\n    return abs(n1 - n2)"},
    "Mbpp/124": {"no pi": "def angle_complex(a, b):\n    return 0.0"},
    "Mbpp/63": {"of lists": "def max_difference(t):\n    return max(abs(b - a) for a, b in t)"},
    "Mbpp/737": {
        "a match": "import re\ndef check_str(string):\n    return re.match('^[aeiouAEIOU][A-Za-z0-9_]*', string)",
        "always": "def check_str(string):\n    return object()",
    },
}

OF_EVALPLUS = """
import json, sys
from evalplus.data import get_human_eval_plus, get_mbpp_plus
from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS as not_none
from evalplus.evaluate import check_correctness, trusted_exec
dataset, found = sys.argv[1], {}
problems = get_human_eval_plus() if dataset == "humaneval" else get_mbpp_plus()
for name, task_id, solution in json.load(sys.stdin):
    problem, expected = problems[task_id], {}
    for part in ("base", "plus"):
        expected[part], expected[part + "_time"] = trusted_exec(
            problem["prompt"] + problem["canonical_solution"], problem[part + "_input"], problem["entry_point"], True,
            problem["entry_point"] in not_none)
    result = check_correctness(dataset, 0, problem, solution, expected, fast_check=True)
    base = result["base"][0] == "pass"
    found[name] = [base, base and result["plus"][0] == "pass"]
print(json.dumps(found))
"""


@pytest.mark.parametrize("dataset, file", [("humaneval", HUMANEVAL), ("mbpp", MBPP)])
def test_scores_are_those_of_evalplus(dataset, file, tmp_path):
    solutions = []  # (name, task, code)
    for row in rows(file):
        canonical = row["prompt"] + row["canonical_solution"]
        solutions.append((f"{row['task_id']} canonical", row["task_id"], canonical))
        for name, code in VARIANTS.get(row["task_id"], {}).items():
            solutions.append((f"{row['task_id']} {name}", row["task_id"], code))
    environment = {**os.environ, scoring.DATASETS[dataset]: str(file)}
    process = subprocess.run(
        [sys.executable, "-c", OF_EVALPLUS, dataset],
        input=json.dumps(solutions),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    want = json.loads(process.stdout.splitlines()[-1])
    with scoring._JudgeProcess(dataset, file) as judge:
        found = [scoring._score(judge, task_id, answer(code), Limits()) for _, task_id, code in solutions]
    got = {name: [one["base"], one["plus"]] for (name, *_), one in zip(solutions, found, strict=True)}
    assert got == want
    passed = {name for name, (_, plus) in got.items() if plus}
    assert {name for name in got if "canonical" in name} - passed <= {"HumanEval/32 canonical"}  # which never passes
    assert "HumanEval/2 near" in passed if dataset == "humaneval" else {"Mbpp/2 any order", "Mbpp/295 zero"} <= passed
    assert 3 <= len(passed) <= len(got) - 3


def test_prompts_ask_as_evalplus_asks(tokenizer):
    from evalplus.provider.utility import make_raw_chat_prompt

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content.strip() }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    asked = dict(prompts("humaneval", HUMANEVAL))
    assert list(asked) == [row["task_id"] for row in rows(HUMANEVAL)]
    for row in rows(HUMANEVAL):
        of_evalplus = make_raw_chat_prompt(
            row["prompt"].strip() + "\n", scoring.INSTRUCTION, ANSWER_BEGINNING.split("\n")[0], tokenizer
        )
        turn = [{"role": "user", "content": asked[row["task_id"]]}]
        ours = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) + ANSWER_BEGINNING
        assert ours == of_evalplus


def test_scores_in_the_log_are_kept_and_a_changed_answer_is_scored_again(tmp_path, monkeypatch):
    log = tmp_path / "scores.jsonl"
    answers = {row["task_id"]: answer(row["prompt"] + row["canonical_solution"]) for row in rows(HUMANEVAL)[:2]}
    first = run(answers, HUMANEVAL, log=log)
    with log.open("a") as file:
        file.write('{"task_id": "HumanEval/0", "ke')  # killed while it wrote
    ran = []
    real = scoring.run_contained
    monkeypatch.setattr(scoring, "run_contained", lambda *arguments: ran.append(1) or real(*arguments))
    assert run(answers, HUMANEVAL, log=log) == first and not ran
    answers["HumanEval/0"] = answer(VARIANTS["HumanEval/0"]["wrong"])
    again = run(answers, HUMANEVAL, log=log)
    assert not again["HumanEval/0"]["base"] and again["HumanEval/2"] == first["HumanEval/2"] and len(ran) == 1
    assert run(answers, HUMANEVAL, log=log) == again and len(ran) == 1


def test_answers_without_a_program_are_wrong_and_nothing_breaks(copies_of):
    texts = ["", "\0", "(" * 5000, "def f(:", "import os\n" * 3, "\ud800"]
    found = run(
        {f"HumanEval/{number}": text for number, text in enumerate(texts)}, copies_of(rows(HUMANEVAL)[0], len(texts))
    )
    for result in found.values():
        assert (result["base"], result["plus"]) == (False, False) and result["why"]


@pytest.mark.slow
@pytest.mark.parametrize("dataset, ceiling", [("humaneval", -1), ("mbpp", 0)])
def test_all_of_evalplus_own_solutions_pass(dataset, ceiling):
    """On the file that EvalPlus's own variable names; HumanEval/32 passes nowhere."""
    file = os.environ.get(scoring.DATASETS[dataset])
    if file is None:
        pytest.skip(f"{scoring.DATASETS[dataset]} names no file")
    with scoring._JudgeProcess(dataset, file) as judge:
        ids = [task_id for task_id, _ in judge.ask("describe")["prompts"]]
        answers = {task_id: answer(judge.ask("canonical", task_id)) for task_id in ids}
    found = score(dataset, answers, file, allow_code_execution=True)
    failed = [task_id for task_id, result in found.items() if not result["plus"]]
    assert len(failed) == -ceiling, {task_id: found[task_id] for task_id in failed}
