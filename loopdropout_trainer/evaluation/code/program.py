"""Calls a generated function in a box (see containment.py) with one input after the other, as EvalPlus does.

Nothing here knows the right answers. The results are what each call returned, as data; another process compares.
"""

import json
import os
import sys


def main() -> None:
    del sys.path[0]  # this folder: its files are no modules for programs
    job = json.load(sys.stdin)
    sys.path += [folder for folder in job["folders"] if folder not in sys.path]
    from evalplus.eval.utils import reliability_guard, swallow_io, time_limit

    file, write, leave, dumps = int(os.environ.pop("RESULTS")), os.write, os._exit, json.dumps
    inputs = [decode(data) for data in job["inputs"]]
    write(file, b"R")
    results = dumps(_run(job, inputs, reliability_guard, swallow_io, time_limit)).encode()
    while results:
        results = results[write(file, results) :]
    leave(0)  # whatever the program has left to do at the end


def _run(job: dict, inputs: list, reliability_guard, swallow_io, time_limit) -> dict:
    """Return what the calls returned, up to the first that raised, and its error."""
    reliability_guard(maximum_memory_bytes=job["memory_bytes"])
    returned: list = []
    try:
        names: dict = {}
        with swallow_io():
            exec(job["solution"], names)
            function = names[job["entry_point"]]
        for given, seconds in zip(inputs, job["seconds"], strict=True):
            with time_limit(seconds), swallow_io():
                value = function(*given)
            returned.append(encode(value, items=job["items"]))
    except BaseException as error:
        return {"returned": returned, "error": type(error).__name__}
    return {"returned": returned, "error": None}


if __name__ == "__main__":
    from values import decode, encode

    main()
