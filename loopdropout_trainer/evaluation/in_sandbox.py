"""The programs inside the sandbox (see sandbox.py). They use EvalPlus and nothing of this package.

    in_sandbox.py prepare FOLDER     read FOLDER/problems.pickle, and write FOLDER/N.pickle and FOLDER/N/program.pickle
    in_sandbox.py run FOLDER USER    run FOLDER/program.pickle as USER (0: the same user), and print its outputs
    in_sandbox.py judge FOLDER       compare FOLDER/N.outputs with FOLDER/N.pickle, and print the verdicts

`prepare` runs EvalPlus's solutions, and parses the generated text. `run` has a sandbox of its own, with the program and the
inputs, but without the expected outputs. It prints plain values as JSON, so an object of the program never reaches `judge`.
"""

import json
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import types
from decimal import Decimal
from fractions import Fraction


LIMITS = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 16 << 20, "RLIMIT_NOFILE": 256, "RLIMIT_AS": 4 << 30}
"""Limits of each process. The limit on memory is EvalPlus's."""

MOST_PROCESSES = 16
"""Maximum number of processes in a sandbox. Outside, the limit would count all processes of the user."""

VERDICTS = ("pass", "base: fail", "base: timeout", "plus: fail", "plus: timeout")
"""Verdicts with the problem's own tests (`base`) and the tests that EvalPlus adds (`plus`). Their exit codes begin at 10."""

SECONDS = 300
"""Maximum time to parse one answer, to run one of EvalPlus's solutions, and to compare the outputs of one program."""

SIMPLE = {"str": str, "float": float, "complex": complex, "Fraction": Fraction, "Decimal": Decimal}
"""Types of outputs that a text describes exactly."""

SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def prepare(folder):
    """Parse the program in each answer, and compute the expected outputs, as EvalPlus's command line does."""
    from evalplus.config import DEFAULT_GT_TIME_LIMIT_FACTOR, DEFAULT_MIN_TIME_LIMIT
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS, MBPP_OUTPUT_SET_EQ_TASKS
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
        is_set = dataset == "mbpp" and entry_point in MBPP_OUTPUT_SET_EQ_TASKS
        program = {"code": sanitize(answer, entry_point), "entry_point": entry_point, "is_set": is_set, "parts": {}}
        checks = {}
        not_none = dataset == "mbpp" and entry_point in MBPP_OUTPUT_NOT_NONE_TASKS
        for part in ("base", "plus"):
            canonical = problem["prompt"] + problem["canonical_solution"]
            inputs = problem[f"{part}_input"]
            expected, seconds = trusted_exec(canonical, inputs, entry_point, True, not_none)
            limits = [max(DEFAULT_MIN_TIME_LIMIT, DEFAULT_GT_TIME_LIMIT_FACTOR * second) for second in seconds]
            program["parts"][part] = {"inputs": inputs, "seconds": limits}
            checks[part] = {"dataset": dataset, "entry_point": entry_point, "atol": problem["atol"]}
            checks[part] |= {"inputs": inputs, "expected": expected}
        write_job(folder, number, program, checks)
        os._exit(0)


def write_job(folder, number, program, checks):
    """Write a program for `run`, and the expected outputs for `judge`."""
    os.mkdir(f"{folder}/{number}")
    for name, content in ((f"{number}/program", program), (number, checks)):
        with open(f"{folder}/{name}.pickle", "wb") as file:
            pickle.dump(content, file)


def run(folder, user):
    """Run one program on the inputs of its problem, and print a line for each output."""
    from evalplus.eval import utils  # noqa: F401 (the processes of the parts share it)

    with open(f"{folder}/program.pickle", "rb") as file:
        program = pickle.load(file)
    output = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # text that the program prints is not an output
    _limit({**LIMITS, "RLIMIT_NPROC": MOST_PROCESSES} if user else LIMITS)
    if user and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)  # this drops all capabilities
    for part, job in program["parts"].items():
        with tempfile.TemporaryDirectory() as own_folder:
            process = multiprocessing.Process(target=_run_part, args=(output, own_folder, program, part, job))
            process.start()
            process.join(min(60, sum(job["seconds"])) + 2)  # as in EvalPlus
            if process.is_alive():
                process.kill()
                process.join()
        if process.exitcode != 0:  # it failed, so that no further output counts
            break
    os._exit(0)


def _run_part(output, own_folder, program, part, job):
    """Print the outputs of a program for the inputs of one part. Stop at the first error."""
    from evalplus.eval.utils import reliability_guard, swallow_io, time_limit

    os.chdir(own_folder)
    reliability_guard(LIMITS["RLIMIT_AS"])
    try:
        namespace = {}
        with swallow_io():
            exec(program["code"], namespace)  # noqa: S102
            function = namespace[program["entry_point"]]
        for inputs, seconds in zip(job["inputs"], job["seconds"], strict=True):
            with time_limit(seconds), swallow_io():
                value = function(*inputs)
                if program["is_set"]:
                    value = set(value)
                line = json.dumps([part, encode(value)])
            os.write(output, line.encode() + b"\n")
    except BaseException:
        os.write(output, json.dumps([part, ["error", None]]).encode() + b"\n")
        os._exit(1)
    os._exit(0)


def _limit(limits):
    for name, most in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))


def encode(value):
    """Return an output as plain data of JSON, [type, content]. An object of another class is only known to exist."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return ["numpy", [value.dtype.str, isinstance(value, numpy.ndarray), encode(value.tolist())]]
    if value is None or isinstance(value, bool):
        return ["constant", value]
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]
    for name, kind in SIMPLE.items():
        if isinstance(value, kind):
            return [name, str(kind(value))]
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return [name, [encode(item) for item in value]]
    return ["object", None]


class ProgramError(Exception):
    """The program ended with an error or printed something else than an output."""


def decode(pair):
    """Return the value that `encode` has described."""
    kind, content = pair
    match kind:
        case "constant":
            return content
        case "int":
            return int(content, 16)
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {decode(key): decode(item) for key, item in content}
        case "object":
            return object()
        case "numpy":
            return _decode_numpy(*content)
        case _ if kind in SIMPLE:
            return SIMPLE[kind](content)
        case _ if kind in SEQUENCES:
            return SEQUENCES[kind](decode(item) for item in content)
    raise ProgramError(kind)


def _decode_numpy(dtype, is_array, content):
    import numpy

    array = numpy.array(decode(content), dtype=numpy.dtype(dtype))
    return array if is_array else array[()]


def judge(folder):
    """Print the number and the verdict of each program."""
    numbers = sorted(int(name.removesuffix(".outputs")) for name in os.listdir(folder) if name.endswith(".outputs"))
    for number in numbers:
        child = os.fork()  # an output may exhaust the memory, or take long to compare
        if child == 0:
            signal.alarm(SECONDS)
            _limit(LIMITS)
            os._exit(10 + VERDICTS.index(_find_verdict(folder, number)))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 10
        verdict = VERDICTS[code] if 0 <= code < len(VERDICTS) else "base: fail"
        print(number, verdict, flush=True)


def _find_verdict(folder, number):
    """Return EvalPlus's verdict on the outputs of a program."""
    with open(f"{folder}/{number}.pickle", "rb") as file:
        checks = pickle.load(file)
    outputs = _read_outputs(f"{folder}/{number}.outputs")
    for part, check in checks.items():
        status = _compare(check, outputs[part])
        if status != "pass":
            return f"{part}: {status}"
    return "pass"


def _compare(check, outputs):
    """Return EvalPlus's verdict on the outputs of one part: `pass`, `fail` or `timeout`."""
    from evalplus.eval import untrusted_check

    total = len(check["inputs"])
    outputs = outputs[:total]
    if outputs:
        # EvalPlus runs a function in the place of the program, which returns its outputs, and compares them.
        values = iter(outputs)
        sys.modules["replay"] = types.SimpleNamespace(next_output=lambda *inputs: decode(next(values)))
        code = f"from replay import next_output as {check['entry_point']}"
        check = {**check, "inputs": check["inputs"][: len(outputs)], "expected": check["expected"][: len(outputs)]}
        status, _ = untrusted_check(code=code, ref_time=[SECONDS] * len(outputs), fast_check=True, **check)
        if status != "pass":
            return status
    return "pass" if len(outputs) == total else "timeout"  # the process has ended before its last output


def _read_outputs(path):
    """Return the encoded outputs of each part. A line that cannot be read is an error of the program."""
    outputs = {"base": [], "plus": []}
    with open(path, "rb") as file:
        for line in file:
            try:
                part, pair = json.loads(line)
                outputs[part].append(pair)
            except (ValueError, TypeError, KeyError, RecursionError):
                for pairs in outputs.values():
                    pairs.append(["error", None])
    return outputs


if __name__ == "__main__":
    del sys.path[0]  # programs must not import the files of this folder
    multiprocessing.set_start_method("fork")
    match sys.argv[1:]:
        case ["prepare", path]:
            prepare(path)
        case ["run", path, number]:
            run(path, int(number))
        case ["judge", path]:
            judge(path)
