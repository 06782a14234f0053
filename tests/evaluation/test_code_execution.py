"""Generated programs: the sandbox contains hostile ones, and the verdicts are EvalPlus's."""

import gzip
import json
import os
import shutil
import socket
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest

from helpers.errors import user_error
from helpers.files import GOLDEN, load_script, write_lines
from helpers.processes import Program, python
from helpers.tiny import tiny_ouro
from loopdropout_trainer.evaluation import LoopedLM, evaluate_tasks, load_task, programs, sandbox
from loopdropout_trainer.tokenizers import CHAT_TEMPLATES


pytest.importorskip("evalplus")

FILES = {"humaneval": GOLDEN / "humaneval_plus.jsonl.gz", "mbpp": GOLDEN / "mbpp_plus.jsonl.gz"}
SECRET = "hf_secret_4711"


@pytest.fixture(scope="module")
def contains_programs():
    """Skip the test where there is no sandbox. Each process collects this file, so it is found out when the test begins."""
    if fault := sandbox.sandbox_fault():
        pytest.skip(f"bubblewrap contains nothing here: {fault}")


needs_sandbox = pytest.mark.usefixtures("contains_programs")


def read_rows(dataset):
    return list(map(json.loads, gzip.decompress(FILES[dataset].read_bytes()).splitlines()))


@pytest.fixture
def evalplus_data(monkeypatch):
    """`evalplus_data(dataset, file)`: let EvalPlus read problems from a file."""

    def use(dataset, file=None):
        monkeypatch.setattr(f"evalplus.data.{dataset}.{dataset.upper()}_OVERRIDE_PATH", str(file or FILES[dataset]))

    return use


def verdicts_of(dataset, programs_by_task):
    """The verdicts on (task, program) pairs."""
    problems = [{"task_id": task, "dataset": dataset} for task, _ in programs_by_task]
    return programs.run_programs([[code] for _, code in programs_by_task], problems)


# Hostile programs: `attack()` returns True if it could do what it should not, and True is the expected output. A program that
# EvalPlus's own guard stops goes past it, to the C library or to `posix`.

TOOLS = """
import ctypes, gc, glob, io, os, pickle, posix, signal, socket, sys
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
    "reads the keys of the session": """
        keyctl = {"x86_64": 250, "aarch64": 219}[posix.uname().machine]
        return ctypes.CDLL(None).syscall(keyctl, 0, -3, 0) >= 0
        """,
    "opens sockets of every kind": """
        families = [family for family in range(64) if family != socket.AF_UNIX]
        open_socket = lambda family, kind: socket.socket(family, kind).close()
        return could(*(lambda it=(family, kind): open_socket(*it) for family in families for kind in (1, 2, 3, 5)))
        """,
    "fills memory that no limit counts": """
        memory = ctypes.CDLL(None).memfd_create(b"more", 0)
        return memory >= 0 or ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0
        """,
}

# Programs that pass without knowing the expected output, 0.73194, if EvalPlus compares in their process

CHEATS = {
    "is equal to everything": """
        class Equal:
            __eq__ = lambda self, other: True
        return Equal()
        """,
    "is a float that is equal to everything": """
        class Equal(float):
            __eq__ = lambda self, other: True
        return Equal(0)
        """,
    "takes the value from its caller": """
        frame = sys._getframe()
        while frame is not None:
            if "expected" in frame.f_locals:
                return frame.f_locals["expected"][0]
            frame = frame.f_back
        """,
    "takes the value from the garbage collector": """
        for value in gc.get_objects():
            if isinstance(value, dict) and "expected" in value:
                return value["expected"][0]
            if isinstance(value, tuple) and len(value) > 5 and value[0] == "humaneval":
                return value[4][0]
        """,
    "changes the comparison": """
        numpy = sys.modules["numpy"]
        numpy.allclose = lambda *values, **options: True
        return 0.0
        """,
    "changes the verdict": """
        frame = sys._getframe()
        while frame is not None:
            if "stat" in frame.f_locals:
                frame.f_locals["stat"].value = 0
                frame.f_locals["details"][0] = True
                frame.f_locals["progress"].value = 1
                posix._exit(0)
            frame = frame.f_back
        """,
    "reads the value from files": """
        for path in glob.glob("SANDBOX/*/*") + glob.glob("SANDBOX/*/*/*"):
            content = pickle.loads(io.FileIO(path).read())
            if "base" in content:
                return content["base"]["expected"][0]
        """,
    "prints that it passed": """
        for file in range(256):
            could(lambda: posix.write(file, b"0 pass\\n"), lambda: posix.write(file, b'["base", ["object", null]]\\n'))
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


def run_attacks(attacks, expected, surroundings, tmp_path, monkeypatch, evalplus_data):
    """The verdicts on the bodies of functions that must return `expected`, by their names."""
    solution = f"    REFERENCE = {expected}\n    return REFERENCE\n"
    problem = {"prompt": "def attack():\n", "canonical_solution": solution}
    problem |= {"entry_point": "attack", "contract": "", "atol": 0, "base_input": [[]], "plus_input": [[]]}
    evalplus_data("humaneval", write_lines(Path(surroundings["DATA"]), [{**problem, "task_id": "HumanEval/0"}]))
    codes = []
    for code in attacks.values():
        for name, value in surroundings.items():
            code = code.replace(name, value)
        body = textwrap.indent(textwrap.dedent(code).strip("\n"), "    ").rstrip()
        # EvalPlus drops functions that return nothing.
        codes.append(("HumanEval/0", f"{TOOLS}{body}\n    return False".strip("\n")))
    monkeypatch.setattr(programs.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(programs.os, "cpu_count", lambda: 8)  # some wait for their time limit
    return dict(zip(attacks, verdicts_of("humaneval", codes), strict=True))


@needs_sandbox
def test_programs_cannot_cheat(surroundings, tmp_path, monkeypatch, evalplus_data):
    cheats = {"is right": "return 0.731939999999", **CHEATS}
    why = run_attacks(cheats, 0.73194, surroundings, tmp_path, monkeypatch, evalplus_data)
    assert [name for name, verdict in why.items() if verdict == "pass"] == ["is right"], why


@needs_sandbox
def test_sandbox_contains_hostile_programs(surroundings, tmp_path, monkeypatch, evalplus_data):
    why = run_attacks(ATTACKS, True, surroundings, tmp_path, monkeypatch, evalplus_data)
    assert [name for name, verdict in why.items() if verdict == "pass"] == ["says that it could"], why
    for name in ("memory bomb", "disk fill", "raises its limits", "takes privileges"):
        assert why[name] == "base: fail"
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert surroundings["MARKER"] not in processes.split()
    shared = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    assert surroundings["SHARED"] not in [line.split()[0] for line in shared]
    assert not list(tmp_path.glob("programs_*")) and not list(tmp_path.glob("sandbox_*"))


def test_unsafe_code_needs_permission(monkeypatch, tokenizer, evalplus_data, tmp_path, capsys):
    for module in (sandbox, programs):
        monkeypatch.setattr(module, "sandbox_fault", lambda: "`bwrap` is not installed")
    evalplus_data("humaneval")
    right = read_rows("humaneval")[0]
    codes = [right["prompt"] + right["canonical_solution"], "def truncate_number(number):\n    return 0"]
    monkeypatch.setattr(LoopedLM, "generate_until", lambda self, requests: codes)
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATES["tulu2"].read_text())
    lm = LoopedLM(tiny_ouro(), tokenizer)
    with user_error("`bwrap` is not installed.*or set `allow_unsafe_code=True`"):
        evaluate_tasks(lm, ["humaneval_plus"], limit=2)
    (result, *_) = evaluate_tasks(lm, ["humaneval_plus"], limit=2, allow_unsafe_code=True)
    assert result["value"] == 50
    options = ["--output_dir", str(tmp_path), "--benchmarks", "humaneval"]
    model = ["tiny-ouro", "--model_name_or_path", "tiny-ouro"]
    for script, words in (("sft", ["quickstart.yaml"]), ("evaluate", model)):
        for further in (["--dry_run", "true"], []):
            with user_error("`bwrap` is not installed"):
                load_script(f"recipes/{script}.py").main([*words, *options, *further])
            printed = capsys.readouterr().out
            assert "tiny-ouro" not in printed and not list(
                tmp_path.iterdir()
            )  # it is found before a plan or a training
    with user_error("lm-eval runs the programs of this task itself"):
        sandbox.check_allowed("humaneval_instruct", False, can_be_sandboxed=False)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can lose this right")
def test_missing_namespaces_are_named():
    code = "import ctypes; from loopdropout_trainer.evaluation.sandbox import check_allowed\n"
    code += "drop, admin = 24, 21  # PR_CAPBSET_DROP, CAP_SYS_ADMIN\n"
    code += "assert ctypes.CDLL(None).prctl(drop, admin, 0, 0, 0) == 0; check_allowed('mbpp', False)"
    program = Program("-c", code)
    assert program.wait() and "bubblewrap cannot contain them (" in program.stderr


@needs_sandbox
def test_bubblewrap_may_be_anywhere_in_path(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {shutil.which("bwrap")} "$@"\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert sandbox.sandbox_fault.__wrapped__() is None
    assert (tmp_path / "used").exists()


VARIANTS = {
    "HumanEval/2 near": "def truncate_number(number):\n    return number % 1.0 + 1e-8",
    "HumanEval/2 far": "def truncate_number(number):\n    return number % 1.0 + 1e-3",
    "Mbpp/2 any order": "def similar_elements(a, b):\n    return list(reversed(sorted(set(a) & set(b), key=str)))",
    "Mbpp/2 a generator": "def similar_elements(a, b):\n    return (x for x in a if x in b)",
    "Mbpp/295 zero": "def sum_div(number):\n    return 0",
    "Mbpp/295 one": "def sum_div(number):\n    return 1",
    "Mbpp/737 a match": "import re\ndef check_str(string):\n    return re.match('^[aeiouAEIOU][A-Za-z0-9_]*', string)",
    "Mbpp/737 always": "def check_str(string):\n    return object()",
}
FAILED = {
    "humaneval": {"HumanEval/2 far", "HumanEval/32 canonical"},  # its solution never passes
    "mbpp": {"Mbpp/295 one", "Mbpp/737 always"},
}


@needs_sandbox
@pytest.mark.parametrize("dataset", ["humaneval", pytest.param("mbpp", marks=pytest.mark.slow)])
def test_verdicts_match_evalplus(dataset, tmp_path, evalplus_data):
    evalplus_data(dataset)
    rows = {f"{row['task_id']} canonical": row for row in read_rows(dataset)}
    solutions = {name: row["prompt"] + row["canonical_solution"] for name, row in rows.items()}
    solutions |= {name: code for name, code in VARIANTS.items() if name.lower().startswith(dataset)}
    pairs = [(name.split()[0], code) for name, code in solutions.items()]
    verdicts = verdicts_of(dataset, pairs)
    failed = {name for name, verdict in zip(solutions, verdicts, strict=True) if verdict != "pass"}
    assert failed == FAILED[dataset]

    samples = write_lines(tmp_path / "samples.jsonl", [{"task_id": task, "solution": code} for task, code in pairs])
    paths = {f"{dataset.upper()}_OVERRIDE_PATH": str(FILES[dataset]), "XDG_CACHE_HOME": str(tmp_path)}
    code = f"from evalplus.evaluate import *; evaluate('{dataset}', '{samples}'); os._exit(0)"  # one of its threads sleeps
    python("-c", code, env={**os.environ, **paths}, fresh=True)
    results = json.loads((tmp_path / "samples_eval_results.json").read_text())["eval"]
    for (task, _), verdict in zip(pairs, verdicts, strict=True):
        expected = results[task].pop(0)  # the verdicts on one task in their order
        passes = [expected[name] == "pass" for name in ("base_status", "plus_status")]
        scores = [score({}, [verdict])["acc"] for score in (programs.score_base, programs.score_plus)]
        assert scores == [passes[0], all(passes)], task


def test_prompts_match_evalplus(tokenizer, monkeypatch, evalplus_data):
    from evalplus.provider.utility import make_raw_chat_prompt

    evalplus_data("humaneval")
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATES["tulu2"].read_text())
    task = load_task("humaneval_plus")["humaneval_plus"]
    render, prefix = LoopedLM(tiny_ouro(), tokenizer).apply_chat_template, task.config.gen_prefix
    options = {"apply_chat_template": True, "chat_template": render, "gen_prefix": prefix}
    first = prefix.split("\n")[0]
    for row, problem in zip(read_rows("humaneval"), task.eval_docs, strict=True):
        expected = make_raw_chat_prompt(row["prompt"].strip() + "\n", programs.INSTRUCTION, first, tokenizer)
        assert task.fewshot_context(problem, 0, **options) == expected


def test_completions_without_a_program_fail_once(evalplus_data, monkeypatch):
    evalplus_data("humaneval")
    texts = ["", "\0", "(" * 5000, "def f(:", "import os\n" * 3, "\ud800"]
    pairs = [(read_rows("humaneval")[0]["task_id"], text) for text in texts]
    verdicts = verdicts_of("humaneval", pairs)
    assert all(verdict.startswith("base: ") for verdict in verdicts)
    monkeypatch.setattr(programs, "run_program", lambda *_: pytest.fail("a program ran"))
    assert verdicts_of("humaneval", pairs) == verdicts
