"""Answers questions about one EvalPlus data set, in a process of its own: a line of JSON in, a line of JSON out.

All that decides a score is EvalPlus's own: it reads the data, takes the code out of an answer, computes the right answers
from its own solutions, and compares. No generated program runs here. EvalPlus compares where it runs a program, so here it
runs a replay: a function that returns, call by call, what the program returned in its box.

The environment names the data: EvalPlus reads HUMANEVAL_OVERRIDE_PATH and MBPP_OVERRIDE_PATH when it is imported.
"""

import json
import multiprocessing
import os
import signal
import sys
import types


def main() -> None:
    del sys.path[0]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what EvalPlus prints is no answer
    multiprocessing.set_start_method("fork")
    judge = Judge(sys.argv[1])
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"answer": getattr(judge, name)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Judge:
    """The questions.

    Args:
        dataset: `humaneval` or `mbpp`.
    """

    def __init__(self, dataset: str) -> None:
        self.dataset = dataset
        self._problems: dict | None = None
        self._expected: dict[str, dict] = {}

    @property
    def problems(self) -> dict:
        if self._problems is None:
            from evalplus.data import get_human_eval_plus, get_mbpp_plus

            self._problems = get_human_eval_plus() if self.dataset == "humaneval" else get_mbpp_plus()
        return self._problems

    def describe(self) -> dict:
        """Return what is asked, [(task id, prompt)], and what identifies the data."""
        from evalplus.data import get_human_eval_plus_hash, get_mbpp_plus_hash

        prompts = [[task_id, problem["prompt"]] for task_id, problem in self.problems.items()]
        of_file = get_human_eval_plus_hash() if self.dataset == "humaneval" else get_mbpp_plus_hash()
        return {"prompts": prompts, "hash": of_file}

    def canonical(self, task_id: str) -> str:
        """Return EvalPlus's own solution."""
        problem = self.problems[task_id]
        return problem["prompt"] + problem["canonical_solution"]

    def prepare(self, task_id: str, answer: str, seconds: float) -> dict:
        """Return the program in an answer, and how to run it on the `base` and the `plus` inputs."""
        from evalplus.eval._special_oracle import MBPP_OUTPUT_SET_EQ_TASKS
        from evalplus.sanitize import sanitize

        problem = self.problems[task_id]
        solution = _in_child(lambda: sanitize(answer, problem["entry_point"]), seconds)
        job = {
            "solution": solution,
            "entry_point": problem["entry_point"],
            "items": self.dataset == "mbpp" and problem["entry_point"] in MBPP_OUTPUT_SET_EQ_TASKS,
        }
        expected = self._expected_of(task_id)
        return {part: {**job, **self._calls(problem, expected, part)} for part in ("base", "plus")}

    def compare(self, task_id: str, part: str, returned: list, seconds: float) -> dict:
        """Return EvalPlus's verdict about what a program returned, `pass` or another; and how many inputs were right."""
        from evalplus.eval import untrusted_check

        problem, expected = self.problems[task_id], self._expected_of(task_id)
        inputs = problem[f"{part}_input"]

        def check() -> list:
            values = iter([decode(data) for data in returned])
            sys.modules["replay"] = types.ModuleType("replay")
            sys.modules["replay"].call = lambda *inputs: next(values)
            status, details = untrusted_check(
                self.dataset,
                f"from replay import call as {problem['entry_point']}",
                inputs,
                problem["entry_point"],
                expected=expected[part],
                atol=problem["atol"],
                ref_time=[seconds] * len(inputs),  # the replay takes no time; that of the program was limited
                fast_check=True,
            )
            return [status, sum(map(bool, details))]

        status, right = _in_child(check, 2 * seconds)
        return {"status": status, "right": right, "inputs": len(inputs)}

    def _expected_of(self, task_id: str) -> dict:
        """Return what EvalPlus's own solution returns, and in which time."""
        if task_id not in self._expected:
            from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
            from evalplus.gen.util import trusted_exec

            problem, expected = self.problems[task_id], {}
            not_none = self.dataset == "mbpp" and problem["entry_point"] in MBPP_OUTPUT_NOT_NONE_TASKS
            for part in ("base", "plus"):
                expected[part], expected[f"{part}_time"] = trusted_exec(
                    self.canonical(task_id),
                    problem[f"{part}_input"],
                    problem["entry_point"],
                    record_time=True,
                    output_not_none=not_none,
                )
            self._expected = {task_id: expected}  # one at a time: they are large
        return self._expected[task_id]

    def _calls(self, problem: dict, expected: dict, part: str) -> dict:
        """Return inputs and time limits, by EvalPlus's rules."""
        from evalplus.config import DEFAULT_GT_TIME_LIMIT_FACTOR, DEFAULT_MIN_TIME_LIMIT

        limits = [
            max(DEFAULT_MIN_TIME_LIMIT, DEFAULT_GT_TIME_LIMIT_FACTOR * time) for time in expected[f"{part}_time"]
        ]
        # EvalPlus waits a second more for its process to end, and one for the end of that wait.
        return {
            "inputs": [encode(given) for given in problem[f"{part}_input"]],
            "seconds": limits,
            "all_seconds": min(60, sum(limits)) + 2,
        }


def _in_child(function, seconds: float):
    """Return what a function returns, computed in a child, since texts and values of strangers may exhaust a process.

    Raises:
        RuntimeError: if it raises or crashes.
        TimeoutError: if it takes longer.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        signal.alarm(max(1, round(seconds)))
        try:
            result = {"result": function()}
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        with os.fdopen(writer, "w", encoding="utf-8") as file:
            json.dump(result, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        text = file.read()
    status = os.waitpid(child, 0)[1]
    if not text:
        took_long = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        raise TimeoutError(f"more than {seconds:g} seconds") if took_long else RuntimeError("the process broke off")
    result = json.loads(text)
    if "error" in result:
        raise RuntimeError(result["error"])
    return result["result"]


if __name__ == "__main__":
    from values import decode, encode

    main()
