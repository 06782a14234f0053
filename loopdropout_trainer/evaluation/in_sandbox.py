"""The program inside the sandbox (see sandbox.py). It uses EvalPlus and nothing of this package.

    in_sandbox.py prepare FOLDER       read FOLDER/problems.pickle, and write FOLDER/N.pickle for each problem
    in_sandbox.py check FOLDER N USER  run the program in FOLDER/N.pickle as USER (0: the same user)

`prepare` runs EvalPlus's solutions, and parses the generated text. `check` runs the generated program. Its exit
code is the verdict. It has the expected outputs, but not the solution. The output of a program is never read.
"""

import multiprocessing
import os
import pickle
import resource
import signal
import sys


LIMITS = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 64 << 20, "RLIMIT_NOFILE": 256, "RLIMIT_AS": 4 << 30}
"""Limits of each process. The limit on memory is EvalPlus's."""

MOST_PROCESSES = 16
"""Maximum number of processes in a sandbox. Outside, the limit would count all processes of the user."""

VERDICTS = ("pass", "base: fail", "base: timeout", "plus: fail", "plus: timeout")
"""Verdicts with the problem's own tests (`base`) and the tests that EvalPlus adds (`plus`). Their exit codes begin at 10."""

SECONDS = 300
"""Maximum time to parse one answer and to run one of EvalPlus's solutions."""


def prepare(folder):
    """Parse the program in each answer, and compute the expected outputs, as EvalPlus's command line does."""
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.gen.util import trusted_exec
    from evalplus.sanitize import sanitize

    with open(f"{folder}/problems.pickle", "rb") as file:
        jobs = pickle.load(file)  # from run_programs
    for number, (dataset, problem, answer) in enumerate(jobs):
        child = os.fork()  # the parser may exhaust the memory or crash
        if child:
            os.waitpid(child, 0)
            continue
        signal.alarm(SECONDS)
        entry_point = problem["entry_point"]
        job = {"dataset": dataset, "code": sanitize(answer, entry_point), "entry_point": entry_point}
        parts = {}
        not_none = dataset == "mbpp" and entry_point in MBPP_OUTPUT_NOT_NONE_TASKS
        for part in ("base", "plus"):
            canonical = problem["prompt"] + problem["canonical_solution"]
            inputs = problem[f"{part}_input"]
            expected, seconds = trusted_exec(canonical, inputs, entry_point, True, not_none)
            parts[part] = {"inputs": inputs, "expected": expected, "ref_time": seconds, "atol": problem["atol"], **job}
        with open(f"{folder}/{number}.pickle", "wb") as file:
            pickle.dump(parts, file)
        os._exit(0)


def check(folder, number, user):
    """Run one program on the inputs of its problem, and exit with its verdict."""
    from evalplus.eval import untrusted_check

    with open(f"{folder}/{number}.pickle", "rb") as file:
        parts = pickle.load(file)
    limits = {**LIMITS, "RLIMIT_NPROC": MOST_PROCESSES} if user else LIMITS
    for name, most in limits.items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(getattr(resource, name), (most, most))
    if user and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)  # this drops all capabilities
    verdict = "pass"
    for part, arguments in parts.items():
        status, _ = untrusted_check(**arguments, fast_check=True)
        if status != "pass":
            verdict = f"{part}: {status}"
            break
    os._exit(10 + VERDICTS.index(verdict))


if __name__ == "__main__":
    del sys.path[0]  # programs must not import the files of this folder
    multiprocessing.set_start_method("fork")
    if sys.argv[1] == "prepare":
        prepare(sys.argv[2])
    else:
        check(sys.argv[2], sys.argv[3], int(sys.argv[4]))
