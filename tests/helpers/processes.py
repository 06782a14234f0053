"""Programs that tests start: as forks of a server, which has imported everything.

A new interpreter spends seven seconds of a core on imports before it does anything. A fork of the server is a process of its
own as well - it has its own streams, folder, environment and signals, and can be killed - and begins at once. Programs that
import in an environment of their own, or without this package, are forks of a second server, which has imported neither the
package nor a library that reads variables of the Hub. They share an `Interpreter` if they need the same environment. What only
a new interpreter shows asks for one: `fresh=True`.

The servers are forks of the process of the tests themselves, made before the first test. Later the threads of torch and Arrow
run there, and a fork in the middle of their work could wait for a lock that nobody in the fork holds.
"""

import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Client, Listener, wait
from pathlib import Path

from helpers.files import ROOT


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NLTK_DATA", str(ROOT / "tests" / "nltk_data"))  # IFEval's sentences and words
# DeepSpeed prints a line where it has to look for the CPU.
CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
ENVIRONMENT = {**os.environ, **CPU, "PYTHONPATH": str(ROOT)}

# Interpreters find what they import by this variable.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [f"{ROOT}/tests", str(ROOT), os.environ.get("PYTHONPATH")]))
# Tests and their programs do not wait for the disk, which takes a tenth of a short training. Only a power failure could tell:
# a killed program loses nothing that it has written. The test about the order of these calls makes them by `sync_disk`.
sync_disk, os.fsync = os.fsync, lambda descriptor: None
FORK = multiprocessing.get_context("fork")
# What a training imports.
TRAINING = [
    "helpers.trainers",
    "loopdropout_trainer.diagnostics",
    "loopdropout_trainer.evaluation",
    "loopdropout_trainer.jobs.job",
    "loopdropout_trainer.jobs.progress",
    "loopdropout_trainer.jobs.shown_results",
    "loopdropout_trainer.training.sft",
    "deepspeed",
]

# Two thirds of the time of these imports. No library of Hugging Face is among them.
LIBRARIES = ["torch._dynamo", "torch.distributed.tensor", "pandas", "scipy.stats", "sklearn.metrics", "requests"]

PATIENCE = 900  # seconds, for a busy machine

_started = []


class Server:
    """A process that forks others, and tells their exit codes."""

    def __init__(self):
        self._exit_codes = {}  # by the process's number

    def begin(self, modules):
        """Import modules, and become two processes. No test may have run."""
        for module in modules:
            importlib.import_module(module)
        self._connection, of_server = FORK.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # xdist has a thread, which waits for the next test
            number = os.fork()
        if number == 0:
            self._connection.close()
            try:
                _serve(of_server)
            finally:
                os._exit(0)
        of_server.close()

    def start(self, function, given, keywords):
        """Call a function in a new process, and return the process's number."""
        self._connection.send((sys.path, pickle.dumps((function, given, keywords))))
        while (message := self._connection.recv())[1] is not None:
            self._exit_codes.update([message])
        return message[0]

    def exit_code(self, number):
        """The exit code of a process, or None while it runs."""
        while self._connection.poll():
            self._exit_codes.update([self._connection.recv()])
        return self._exit_codes.get(number)


def _serve(connection):
    """Be the server until the process of the tests ends.

    It answers each call with `(number, None)`, and tells `(number, exit code)` when the process has ended.
    """
    gc.freeze()
    gc.enable()  # the process of the tests does it after its collection
    running = {}  # processes by their sentinels, which are ready when they end
    while True:
        for ready in wait([connection, *running]):
            if ready is connection:
                try:
                    path, call = connection.recv()
                except EOFError:
                    return
                process = FORK.Process(target=_call, args=(path, call))
                process.start()
                running[process.sentinel] = process
                connection.send((process.pid, None))
            else:
                process = running.pop(ready)
                process.join()
                connection.send((process.pid, process.exitcode))


def _call(path, call):
    sys.path[:] = path  # pytest adds folders while it collects
    _renew_threads()
    function, given, keywords = pickle.loads(call)
    function(*given, **keywords)


def _renew_threads():
    """Let torch make its threads in a fork, which has none of the parent's. Two threads that begin it at a time fail."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _renew_bars():
    """Let tqdm show no bars if its variable says so, which it has read when the server imported it."""
    if "tqdm.std" in sys.modules and "TQDM_DISABLE" in os.environ:
        bar = sys.modules["tqdm.std"].tqdm
        bar.__init__ = functools.partialmethod(bar.__init__, disable=True)


SERVER, BARE_SERVER = Server(), Server()


class Fork:
    """A process of a server."""

    def __init__(self, server, function, given, keywords):
        self._server, self.pid = server, server.start(function, given, keywords)
        _started.append(self)

    def poll(self):
        """Return the exit code, or None while it runs."""
        return self._server.exit_code(self.pid)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


def fork(function, *given, **keywords):
    """Start a function in a process of its own, a fork of the server; return the process."""
    return Fork(SERVER, function, given, keywords)


def kill_all():
    """Kill what a test has started and not waited for, since it has failed."""
    while _started:
        process = _started.pop()
        if process.poll() is None:  # else its number may be another one's by now
            process.kill()


def wait_for(condition, program=None):
    """Wait until `condition()` holds, and return its value. Fail when `program` has ended before."""
    began = time.monotonic()
    while not (met := condition()):
        assert program is None or program.exit_code is None, f"it has ended:\n{program.stdout}{program.stderr}"
        assert time.monotonic() - began < PATIENCE, "" if program is None else f"{program.stdout}{program.stderr}"
        time.sleep(0.01)
    return met


def ended(process):
    """Wait for the end of a process of `fork`, and return its exit code."""
    wait_for(lambda: process.poll() is not None)
    return process.poll()


class Program:
    """A Python program that was started: `-c CODE`, `-m MODULE` or a script, each with its arguments.

    Args:
        bare: in a fork that has imported nothing of this package and of Hugging Face.
        fresh: in a new interpreter, instead of a fork.
        output: a file or terminal that gets both streams; by default each goes into a file of its own.
    """

    def __init__(self, *words, env=ENVIRONMENT, cwd=None, bare=False, fresh=False, output=None):
        words = list(map(str, words))
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [str(output or os.path.join(self._folder.name, name)) for name in ("stdout", "stderr")]
        if fresh:
            out, err = (open(path, "a") for path in self._streams)  # noqa: SIM115
            with out, err:
                self._process = subprocess.Popen([sys.executable, *words], stdout=out, stderr=err, env=env, cwd=cwd)
            _started.append(self._process)
        else:
            given = words, dict(env), str(cwd or os.getcwd()), self._streams
            self._process = Fork(BARE_SERVER if bare else SERVER, _become, given, {})
        self.pid = self._process.pid

    @property
    def exit_code(self):
        """None while it runs."""
        return self._process.poll()

    def _read(self, stream):
        path = Path(self._streams[stream])
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    stdout = property(lambda self: self._read(0))
    stderr = property(lambda self: self._read(1))

    def end(self, signal_number=signal.SIGKILL):
        """Send a signal, and wait for the end; return the exit code."""
        os.kill(self.pid, signal_number)
        return self.wait()

    def wait(self):
        """Wait for the end, and return the exit code."""
        wait_for(lambda: self.exit_code is not None)
        return self.exit_code


def _become(words, env, cwd, streams):
    """Be the program, in a fork."""
    _renew_threads()
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    text = {"mode": "w", "buffering": 1, "encoding": "utf-8", "closefd": False}
    sys.stdout, sys.stderr = (open(number, **text) for number in (1, 2))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    _renew_bars()
    os.chdir(cwd)
    match words:
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest]:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(script, run_name="__main__")


class ForkedPopen:
    """`subprocess.Popen` of a Python program that writes into a file, as a fork of the server."""

    def __init__(self, command, *, stdout, stderr, env, pass_fds=(), start_new_session=False):
        assert command[0] == sys.executable and stdout is stderr
        self._program = Program(*command[1:], env={**env, **CPU}, output=stdout.name)
        self.args, self.pid = command, self._program.pid
        self.poll, self.wait = lambda: self._program.exit_code, self._program.wait


class Interpreter:
    """A process that imports modules in an environment of its own, and then runs programs as forks of itself.

    The Hub's address and cache, for example, are read when its library is imported, so the common server has other ones.

    Args:
        modules: names of the modules that the programs share.
        env: the environment in which they are imported.
    """

    def __init__(self, *modules, env=ENVIRONMENT):
        with Listener() as listener:
            BARE_SERVER.start(_run_forks, (listener.address, modules, dict(env)), {})
            self._connection = listener.accept()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._connection.close()  # the end of the process

    def run(self, *words, env=ENVIRONMENT, cwd=ROOT):
        """Run a program to its end, as `Program` does, and return its exit code and streams."""
        with tempfile.TemporaryDirectory() as folder:
            streams = [os.path.join(folder, name) for name in ("stdout", "stderr")]
            self._connection.send(([*map(str, words)], dict(env), str(cwd), streams))
            exit_code = self._connection.recv()
            texts = [Path(path).read_text(encoding="utf-8", errors="replace") for path in streams]
        return subprocess.CompletedProcess(words, exit_code, *texts)


def _run_forks(address, modules, env):
    """Be an `Interpreter`: run each program that comes over the connection, and send its exit code."""
    os.environ.clear()
    os.environ.update(env)
    with Client(address) as connection:
        gc.disable()
        for module in modules:
            importlib.import_module(module)
        gc.freeze()
        gc.enable()
        while True:
            try:
                program = connection.recv()
            except EOFError:
                return
            process = FORK.Process(target=_become, args=program)
            process.start()
            process.join(PATIENCE)
            process.kill()
            process.join()
            connection.send(process.exitcode)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def ranks(count, env=ENVIRONMENT):
    """The environment of each of several processes, as a launcher sets it."""
    if count == 1:
        return [env]
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**env, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def python(*words, processes=1, env=ENVIRONMENT, **options):
    """Run a program on the CPU, in several processes if there are several; return what the first one printed."""
    programs = [Program(*words, env=each, **options) for each in ranks(processes, env)]
    for program in programs:
        assert program.wait() == 0, f"{program.stdout[-1000:]}\n{program.stderr[-5000:]}"
    return programs[0].stdout
