"""Jobs side by side: on the GPUs of one machine, and over a Ray cluster that loses a machine."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from test_sweep import children_of

from loopdropout_trainer.runs.sweep import Sweep, SweepArguments
from loopdropout_trainer.runs.workers import Job, LocalWorkers, SweepError, do_jobs, visible_gpus


# Waits for its partner, which can only come while it runs itself; says which GPU it sees.
MEETING = """
import json, os, pathlib, sys, time
mine, partner = map(pathlib.Path, sys.argv[1:])
mine.parent.mkdir(exist_ok=True)
(mine.parent / "here").touch()
end = time.time() + 30
while not (partner.parent / "here").exists():
    if time.time() > end: sys.exit(3)
    time.sleep(0.01)
print("GPU", os.environ.get("CUDA_VISIBLE_DEVICES"))
mine.write_text(json.dumps({"benchmarks": {}}))
"""


def meeting(folder, *names):
    """Jobs of which each needs the next one beside it."""
    paths = [folder / name / "results.json" for name in names]
    partners = [*paths[1:], paths[0]]
    words = (sys.executable, "-c", MEETING)
    return [Job((*words, str(path), str(partner)), path) for path, partner in zip(paths, partners, strict=True)]


def unfinished(jobs):
    return lambda: (job for job in jobs if not job.done)


def test_two_jobs_run_side_by_side_each_on_its_gpu(tmp_path):
    jobs = meeting(tmp_path, "a", "b")
    ended = []
    do_jobs(unfinished(jobs), LocalWorkers(2, gpus=["5", "7"]), lambda: ended.append(sum(job.done for job in jobs)))
    assert ended[-1] == 2 and len(ended) == 2
    assert {job.results.with_name("log.txt").read_text() for job in jobs} == {"GPU 5\n", "GPU 7\n"}


def test_more_jobs_than_gpus_share_them_and_one_job_keeps_all(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    assert visible_gpus() == ["3", "4"]
    jobs = meeting(tmp_path, "a", "b", "c")
    do_jobs(unfinished(jobs), LocalWorkers(3), lambda: None)
    assert sorted(job.results.with_name("log.txt").read_text() for job in jobs) == ["GPU 3\n", "GPU 3\n", "GPU 4\n"]
    (alone,) = meeting(tmp_path, "alone")
    do_jobs(unfinished([alone]), LocalWorkers(1), lambda: None)
    assert "GPU 3,4" in capfd.readouterr().out


def test_a_job_that_fails_stops_the_one_beside_it(tmp_path):
    pid = tmp_path / "pid"
    slow = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    fails = f"import pathlib, sys, time\nwhile not pathlib.Path({str(pid)!r}).exists(): time.sleep(0.01)\nsys.exit(3)"
    commands = {name: (sys.executable, "-c", text) for name, text in {"slow": slow, "fails": fails}.items()}
    jobs = [Job(command, tmp_path / name / "results.json") for name, command in commands.items()]
    with pytest.raises(SweepError, match="failed with exit status 3"):
        do_jobs(unfinished(jobs), LocalWorkers(2), lambda: None)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


# Stands in for sft.py: the first one of all hangs, and what runs on another machine goes on.
TRAINING = """
import json, os, pathlib, sys, time
argv = sys.argv[1:]
out = pathlib.Path(argv[argv.index("--output_dir") + 1])
lab = pathlib.Path(__file__).parent
machine = os.environ["RAY_RAYLET_PID"]
with open(lab / "log", "a") as log:
    print(out.parent.parent.name, out.name, machine, os.getpid(), file=log)
try:
    (lab / "trap").unlink()
    time.sleep(600)
except FileNotFoundError:
    time.sleep(1)
(out / "results.json").write_text(json.dumps({"benchmarks": {"development": {"score": 1.0, "correct": 1, "total": 2}}}))
"""


@pytest.mark.slow
def test_a_cluster_that_loses_a_machine_does_every_run(tmp_path):
    ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    from ray.cluster_utils import Cluster

    (tmp_path / "sft.py").write_text(TRAINING)
    (tmp_path / "recipe.yaml").write_text("model_name_or_path: m\n")
    (tmp_path / "trap").touch()
    log = tmp_path / "log"

    def runs():
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    machines = [cluster.add_node(num_cpus=1) for _ in range(2)]
    raylets = {str(node.all_processes["raylet"][0].process.pid) for node in machines}
    lost = []

    def lose_a_machine():
        """Kill all of Ray on the machine that hangs; what Ray had started there must end with it."""
        while len(runs()) < 4:  # the other machine goes on
            time.sleep(0.05)
        lost.extend(run for run in runs() if os.path.exists(f"/proc/{run[3]}") and run[2] != runs()[-1][2])
        raylet = int(lost[0][2])
        for pid in [raylet, *children_of(raylet)]:
            os.kill(pid, signal.SIGKILL)

    threading.Thread(target=lose_a_machine, daemon=True).start()
    arguments = SweepArguments(
        recipe=str(tmp_path / "recipe.yaml"),
        learning_rates=[0.1, 0.2],
        seeds=[1, 2, 3],
        full_grid=True,
        test_benchmarks=[],
        output_dir=str(tmp_path / "out"),
        ray_address=cluster.address,
    )
    try:
        Sweep(arguments, tmp_path).run()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert len(list((tmp_path / "out").glob("*/*/*/results.json"))) == 12
    ((_, _, machine, pid),) = lost
    assert machine in raylets and not Path(f"/proc/{pid}").exists()  # its run has ended with it
    assert len({line[2] for line in runs()}) == 2
    folders = [p.parent for p in (tmp_path / "out").glob("*/*/*/log.txt")]
    assert len(folders) == 12 and len(runs()) == 13  # only the lost run was started twice
    assert json.loads((tmp_path / "out/summary.json").read_text())["methods"]["lora"]["runs"]
