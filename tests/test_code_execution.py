"""Programs that nobody has read: what bubblewrap keeps them from, and EvalPlus's own verdict on them."""

import copy
import gzip
import json
import os
import socket
import subprocess
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN
from processes import Program, python

from loopdropout_trainer.evaluation import load_benchmark, sandbox
from loopdropout_trainer.evaluation.benchmark import AnswerLog
from loopdropout_trainer.evaluation.benchmarks import programs
from loopdropout_trainer.settings.tokenizer import chat_template


pytest.importorskip("evalplus")

FILES = {"humaneval": GOLDEN / "humaneval_plus.jsonl.gz", "mbpp": GOLDEN / "mbpp_plus.jsonl.gz"}
SECRET = "hf_secret_4711"

needs_sandbox = pytest.mark.skipif(
    sandbox.sandbox_fault() is not None, reason=f"bubblewrap contains nothing here: {sandbox.sandbox_fault()}"
)


def rows(dataset):
    return list(map(json.loads, gzip.decompress(FILES[dataset].read_bytes()).splitlines()))


def completion(code):
    """Code as a model writes it after the beginning of its completion."""
    return textwrap.dedent(code).strip("\n") + "\n```\nThis works."


# Hostile programs: `attack()` returns True if it could do what it should not, and True is the expected output. A program that
# EvalPlus's own guard stops goes past it, to the C library or to `posix`.

TOOLS = """
import ctypes, glob, io, os, posix, signal, socket
def could(*calls):
    done = False
    for call in calls:
        try:
            call()
            done = True
        except OSError: pass
    return done
def read(paths):
    found = []
    could(*(lambda path=path: found.append(io.FileIO(path).read()) for path in paths))
    return b"".join(found)
def attack():
"""
ATTACKS = {
    "says that it could": "return True",  # the control: it passes
    "fork bomb": """
        for _ in range(200):
            if posix.fork() == 0:
                while True: pass
        return True
        """,
    "memory bomb": "return len(bytearray(1 << 33)) == 1 << 33",
    "disk fill": """
        files = [posix.open("/tmp/%d" % number, posix.O_CREAT | posix.O_WRONLY) for number in range(200)]
        return sum(posix.write(file, bytes(1 << 20)) for file in files) > 100 << 20
        """,
    "loop that catches its timeout, without signals": """
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                while True: pass
            except BaseException: pass
        """,
    "kills all that it can reach": """
        near = (posix.getppid(), posix.getpgid(posix.getppid()), posix.getpgid(0))
        others = [process for process in (-1, 1, *near, PARENT, SENTINEL) if process != posix.getpid()]
        for kill in (posix.kill, posix.killpg):
            could(*(lambda to=to, number=number: kill(to, number) for to in others for number in (9, 15)))
        """,
    "ends with success": "posix._exit(0)",
    "reads tokens": """
        found = read(glob.glob("/proc/*/environ") + ["HOME_FOLDER/token", "VICTIM"])
        return "SECRET" in str(dict(os.environ)) + str(found)
        """,
    "reads the reference solution": """
        paths = glob.glob("SANDBOX/*/*") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/fd/*")
        return b"REFERENCE" in read(paths + ["DATA"])
        """,
    "leaves shared memory behind": "ctypes.CDLL(None).shmget(SHARED, 1 << 20, 0o1666)",
    "calls the network": """
        internet, local = socket.socket(socket.AF_INET), socket.socket(socket.AF_UNIX)
        return could(lambda: internet.connect(("127.0.0.1", PORT)), lambda: local.connect("\\0ABSTRACT"))
        """,
    "deletes files": """
        empty = lambda: posix.open("VICTIM", posix.O_WRONLY | posix.O_TRUNC)
        return could(empty, lambda: posix.unlink("VICTIM"), lambda: posix.rmdir("VICTIM"))
        """,
    "writes into the libraries": """
        plant = lambda folder: posix.open(folder + "/planted.py", posix.O_CREAT | posix.O_WRONLY)
        return could(*(lambda to=to: plant(to) for to in ("LIBRARIES", "PACKAGE", "/usr", "/", "/etc")))
        """,
    "writes without end": "while True: posix.write(1, bytes(1 << 16))",
    "leaves a process behind": """
        if posix.fork() == 0:
            posix.setsid()
            if posix.fork() == 0:
                posix.execv("/bin/sleep", ["sleep", "MARKER"])
            posix._exit(0)
        """,
    "looks into its parent": """
        parents = (posix.getppid(), PARENT)
        look = lambda process: posix.open("/proc/%d/mem" % process, posix.O_RDWR)
        traced = [ctypes.CDLL(None).ptrace(16, process, 0, 0) == 0 for process in parents]
        return could(*(lambda process=process: look(process) for process in parents)) or any(traced)
        """,
    "crashes": "return ctypes.string_at(8)",
    "raises its limits": """
        class Limit(ctypes.Structure):
            _fields_ = [("soft", ctypes.c_ulong), ("hard", ctypes.c_ulong)]
        more = Limit(1 << 62, 1 << 62)
        return any(ctypes.CDLL(None).setrlimit(number, ctypes.byref(more)) == 0 for number in (1, 6, 7, 9))
        """,
    "takes privileges": """
        library = ctypes.CDLL(None)
        results = [library.unshare(flag) for flag in (0x20000, 0x40000000)]
        results += [library.mount(b"tmpfs", b"/box", b"tmpfs", 0, None), library.chroot(b".")]
        return could(lambda: posix.setuid(0)) or 0 in results
        """,
}


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    """What the attacks aim at, by the names that stand for it in their code."""
    victim = tmp_path / "victim"
    victim.write_text(SECRET)
    tmp_path.chmod(0o777)
    victim.chmod(0o666)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    sentinel = subprocess.Popen(["sleep", "600"])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"attack-{os.getpid()}"
        abstract.bind("\0" + name)
        abstract.listen()
        yield {
            "VICTIM": str(victim), "SECRET": SECRET, "PORT": str(server.getsockname()[1]), "ABSTRACT": name,
            "PARENT": str(os.getpid()), "SENTINEL": str(sentinel.pid), "MARKER": f"98765.{os.getpid()}",
            "SHARED": str(os.getpid()), "HOME_FOLDER": str(Path.home()), "LIBRARIES": str(Path(np.__file__).parent),
            "PACKAGE": str(Path(programs.__file__).parent), "SANDBOX": str(tmp_path),
            "DATA": str(tmp_path / "problems.jsonl"),
        }  # fmt: skip
        assert victim.read_text() == SECRET
    assert sentinel.poll() is None  # not killed
    sentinel.kill()
    sentinel.wait()


@needs_sandbox
def test_hostile_programs_reach_nothing(surroundings, tmp_path, monkeypatch):
    problem = {"prompt": "def attack():\n", "canonical_solution": "    REFERENCE = True\n    return REFERENCE\n"}
    problem |= {"entry_point": "attack", "contract": "", "atol": 0, "base_input": [[]], "plus_input": [[]]}
    lines = [json.dumps({**problem, "task_id": f"HumanEval/{number}"}) + "\n" for number in range(len(ATTACKS))]
    Path(surroundings["DATA"]).write_text("".join(lines))
    completions = []
    for code in ATTACKS.values():
        for name, value in surroundings.items():
            code = code.replace(name, value)
        body = textwrap.indent(textwrap.dedent(code).strip("\n"), "    ").rstrip()
        completions.append(completion(f"{TOOLS}{body}\n    return False"))  # EvalPlus drops what returns nothing
    monkeypatch.setattr(programs.tempfile, "tempdir", str(tmp_path))
    log = AnswerLog(tmp_path / "log")
    verdicts = load_benchmark("humaneval_plus", surroundings["DATA"]).verdicts(completions, log, progress=False)
    why = dict(zip(ATTACKS, verdicts, strict=True))
    assert [name for name, verdict in why.items() if verdict == "pass"] == ["says that it could"], why
    for name in ("memory bomb", "disk fill", "raises its limits", "takes privileges"):
        assert why[name] == "base: fail"
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert surroundings["MARKER"] not in processes.split()
    shared = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    assert surroundings["SHARED"] not in [line.split()[0] for line in shared]
    assert not list(tmp_path.glob("programs_*")) and not list(tmp_path.glob("sandbox_*"))


def test_without_bubblewrap_nothing_is_loaded_until_the_user_confirms(monkeypatch):
    monkeypatch.setattr(sandbox, "sandbox_fault", lambda: "`bwrap` is not installed")
    with pytest.raises(ValueError, match="`bwrap` is not installed.*confirm_run_unsafe_code true"):
        load_benchmark("humaneval_plus", FILES["humaneval"])
    benchmark = load_benchmark("humaneval_plus", FILES["humaneval"], 2, confirm_run_unsafe_code=True)
    assert not benchmark.sandboxed
    right = benchmark.rows[0]["prompt"] + benchmark.rows[0]["canonical_solution"]
    programs = [completion(right), completion("def truncate_number(number):\n    return 0")]
    assert benchmark.verdicts(programs, AnswerLog(), False) == ["pass", "base: fail"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root has the right to lose")
def test_root_without_the_right_to_make_namespaces_is_told_at_once():
    code = "import ctypes; from loopdropout_trainer.evaluation.sandbox import check_allowed\n"
    code += "drop, admin = 24, 21  # PR_CAPBSET_DROP, CAP_SYS_ADMIN: what this process starts has it no more\n"
    code += "assert ctypes.CDLL(None).prctl(drop, admin, 0, 0, 0) == 0; check_allowed('mbpp', False)"
    program = Program("-c", code)
    assert program.wait() and "bubblewrap cannot contain them here (" in program.stderr


VARIANTS = {
    "HumanEval/2": {
        "near": "def truncate_number(number):\n    return number % 1.0 + 1e-8",
        "far": "def truncate_number(number):\n    return number % 1.0 + 1e-3",
    },
    "Mbpp/2": {
        "any order": "def similar_elements(a, b):\n    return list(reversed(sorted(set(a) & set(b), key=str)))",
        "a generator": "def similar_elements(a, b):\n    return (x for x in a if x in b)",
    },
    "Mbpp/295": {"zero": "def sum_div(number):\n    return 0", "one": "def sum_div(number):\n    return 1"},
    "Mbpp/737": {
        "a match": "import re\ndef check_str(string):\n    return re.match('^[aeiouAEIOU][A-Za-z0-9_]*', string)",
        "always": "def check_str(string):\n    return object()",
    },
}


def evalplus_verdicts(dataset, solutions, folder):
    """What EvalPlus's own command says of (task, code) pairs: whether each passes, without its added tests and with them."""
    samples = folder / f"{dataset}.jsonl"
    samples.write_text("".join(json.dumps({"task_id": task, "solution": code}) + "\n" for task, code in solutions))
    paths = {f"{dataset.upper()}_OVERRIDE_PATH": str(FILES[dataset]), "XDG_CACHE_HOME": str(folder)}
    words = ("evalplus.evaluate", "--dataset", dataset, "--samples", samples)
    python("-m", *words, env={**os.environ, **paths}, fresh=True)
    found = json.loads((folder / f"{dataset}_eval_results.json").read_text())["eval"]
    verdicts = [found[task].pop(0) for task, _ in solutions]  # of one task in their order
    base = [verdict["base_status"] == "pass" for verdict in verdicts]
    return [[one, one and verdict["plus_status"] == "pass"] for one, verdict in zip(base, verdicts, strict=True)]


@needs_sandbox
@pytest.mark.parametrize("dataset", FILES)
def test_verdicts_are_those_of_evalplus(dataset, tmp_path):
    benchmark, solutions = load_benchmark(f"{dataset}_plus", FILES[dataset]), {}
    for row in rows(dataset):
        variants = {"canonical": row["prompt"] + row["canonical_solution"], **VARIANTS.get(row["task_id"], {})}
        solutions |= {f"{row['task_id']} {name}": (row["task_id"], code) for name, code in variants.items()}
    problems = {problem["task_id"]: problem for problem in benchmark.rows}
    benchmark = replace(benchmark, rows=[problems[task] for task, _ in solutions.values()])
    codes = [completion(code) for _, code in solutions.values()]
    verdicts = benchmark.verdicts(codes, AnswerLog(), progress=False)
    got = [[verdict == "pass" or verdict.startswith("plus"), verdict == "pass"] for verdict in verdicts]
    assert got == evalplus_verdicts(dataset, list(solutions.values()), tmp_path), list(solutions)
    passed = {name for name, verdict in zip(solutions, verdicts, strict=True) if verdict == "pass"}
    assert {name for name in solutions if "canonical" in name} - passed <= {"HumanEval/32 canonical"}  # never passes
    expected = {"HumanEval/2 near"} if dataset == "humaneval" else {"Mbpp/2 any order", "Mbpp/295 zero"}
    assert expected <= passed and len(passed) < len(solutions)


def test_prompts_are_those_of_evalplus(tokenizer):
    from evalplus.provider.utility import make_raw_chat_prompt

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = chat_template("tulu2")
    benchmark = load_benchmark("humaneval_plus", FILES["humaneval"], confirm_run_unsafe_code=True)
    beginning = programs.COMPLETION_BEGINNING
    for row, prompt in zip(rows("humaneval"), benchmark.prompts, strict=True):
        task, first = row["prompt"].strip() + "\n", beginning.split("\n")[0]
        want = make_raw_chat_prompt(task, programs.INSTRUCTION, first, tokenizer)
        turn = [{"role": "user", "content": prompt}]
        assert tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) + beginning == want


def test_verdicts_are_logged_and_completions_without_a_program_fail(tmp_path, monkeypatch):
    benchmark = load_benchmark("humaneval_plus", FILES["humaneval"], 1, confirm_run_unsafe_code=True)
    texts = ["", "\0", "(" * 5000, "def f(:", "import os\n" * 3, "\ud800"]
    benchmark = replace(benchmark, rows=list(benchmark.rows) * len(texts))
    log = AnswerLog(tmp_path)
    log.read({})
    log.keep([("verdict 0", "base: fail")])  # of a run that was killed
    real = programs.check_program
    monkeypatch.setattr(programs, "check_program", lambda *given: real(*given) if given[1] else pytest.fail("it ran"))
    verdicts = benchmark.verdicts(texts, log, progress=False)
    assert all(verdict.startswith("base: ") for verdict in verdicts)
    again = AnswerLog(tmp_path)
    again.read({})
    monkeypatch.setattr(programs, "check_program", lambda *_: pytest.fail("a program ran"))
    assert benchmark.verdicts(texts, again, progress=False) == verdicts
    easier = [{**row, "plus_input": row["plus_input"][:1]} for row in benchmark.rows]
    assert replace(benchmark, rows=easier).data != benchmark.data  # a verdict is of these tests
