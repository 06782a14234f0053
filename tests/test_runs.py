"""The training script around its trainer: pairs are paired, what is finished is kept, a full disk breaks nothing."""

import json
import os
import pty
import re
import resource
import termios
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, contents, load_script, tiny_ouro
from processes import Program, wait_for
from safetensors.torch import load_file

from loopdropout_trainer import LoopDropoutSFTTrainer, default_peft_config, merge_and_save
from loopdropout_trainer.record.identity import identity_key
from loopdropout_trainer.record.measurement import BASE, Measurement, RecordError
from loopdropout_trainer.reports import load_table
from loopdropout_trainer.reports.report import summary_tables
from loopdropout_trainer.runs.result import Result, finished_result, is_finished, read_run, write_result
from loopdropout_trainer.saving.files import WriteError
from loopdropout_trainer.training.checkpoints import NonFiniteLossError
from loopdropout_trainer.training.checkpoints.sealing import seal


sft = load_script("recipes/sft.py")
RECIPE = {
    "dtype": "float32", "use_cpu": True, "bf16": False, "preparation": "arithmetic", "num_train_examples": 8,
    "num_eval_examples": 2, "max_length": 400, "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
    "report_to": "none", "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1, "benchmarks": ["development"],
    "benchmark_limit": 2,
}  # fmt: skip


@pytest.fixture
def command(tiny_folder, tmp_path):
    """`command(recipe lines, *words)`: a command line of the script."""

    def make(*words, **fields):
        recipe, own = (
            tmp_path / "recipe.yaml",
            {"model_name_or_path": str(tiny_folder), "output_dir": str(tmp_path / "out")},
        )
        recipe.write_text(yaml.safe_dump({**RECIPE, **own, **fields}))
        return [str(recipe), *words]

    return make


@pytest.mark.parametrize("given, expected", [
    ("true", [True, True]),
    ("false", [None, None]),
    ("{out}/checkpoint-2", ["{out}/checkpoint-2", True]),
    ("{out}/dose_control/checkpoint-2", [True, "{out}/dose_control/checkpoint-2"]),
    ("{out}-elsewhere/checkpoint-2", ["{out}-elsewhere/checkpoint-2", True]),
])  # fmt: skip
def test_each_rule_resumes_from_its_own_folder(command, tmp_path, given, expected):
    fill = lambda text: text.format(out=tmp_path / "out") if isinstance(text, str) else text
    run = sft.Run(command("--resume_from_checkpoint", fill(given), compare_with=["dose_control"]))
    assert [run.checkpoint_for(config) for config in run.configs] == [fill(text) for text in expected]


def test_what_was_finished_is_read_back_and_the_rest_is_done(command, tmp_path, capsys, monkeypatch):
    fields = {"compare_with": ["lora"], "evaluate_base": True}
    words = command(**fields)
    sft.main(words)
    out = tmp_path / "out"
    folders = (out, out / "lora")
    first, second = (read_run(folder) for folder in folders)
    tensors = load_file(out / "lora" / "adapter_model.safetensors")
    adapter = (out / "adapter_model.safetensors").read_bytes()
    result = first.result
    assert (result.training.method, result.training.steps, result.training.depth) == ("Loop Dropout", 3, 4)
    assert result.value("train_loss") > 1 and result.value("tokens_per_second") > 0
    assert 0.1 < result.value("peak_memory_gb") < 100
    lines = (out / "answers/after/development/predictions.jsonl").read_text().splitlines()
    known = {"prompt", "completion", "reference", "extracted", "correct", "error"}
    assert len(lines) == 2 and all(known <= set(json.loads(line)) for line in lines)
    base = [row for row in result.rows if row.method == BASE]
    assert base and [row for row in second.result.rows if row.method == BASE] == base

    # As if the run had been killed in the evaluation of its second rule.
    for name in ("run.json", "measurements.jsonl", "identities.json"):
        (folders[1] / name).unlink()
    stamp, printed = (out / "run.json").stat().st_mtime_ns, capsys.readouterr().out
    sft.main([*words, "--resume_from_checkpoint", "true"])
    assert (out / "run.json").stat().st_mtime_ns == stamp
    again, timed = read_run(folders[1]), {"train_seconds", "step_seconds", "tokens_per_second", "peak_memory_gb"}
    rows, before = ([row for row in run.result.rows if row.metric not in timed] for run in (again, second))
    assert rows == before and [row for row in rows if row.method == BASE] == base
    assert again.result.value("train_seconds") >= 0.5 * second.result.value("train_seconds")
    torch.testing.assert_close(load_file(out / "lora" / "adapter_model.safetensors"), tensors, rtol=0, atol=0)
    table = lambda text: [line for line in text.splitlines() if "%" in line]
    resumed = capsys.readouterr().out
    assert "Loop Dropout is finished: its results are read from" in resumed
    assert table(resumed) == table(printed)

    before = contents(out)
    for other, changed in (
        ("--learning_rate=2e-2", "0.01 and is 0.02"),
        ("--num_loops=2", "`num_loops` was 4 and is 2"),
    ):
        for resume in ("true", "false"):
            with pytest.raises(Exception, match=changed):
                sft.main([*words, "--resume_from_checkpoint", resume, other])
    assert contents(out) == before and (out / "run.json").stat().st_mtime_ns == stamp

    # More measurements of a complete run train nothing: what a sweep does with the run that it chose.
    answers = {file: file.stat().st_mtime_ns for file in (out / "answers").rglob("0*.jsonl")}
    monkeypatch.setattr(LoopDropoutSFTTrainer, "training_step", lambda *given: pytest.fail("a step is taken"))
    more = {"depths": [2, 4], "single_loop_batches": 1, "merge": True}
    sft.main(command("--resume_from_checkpoint", "true", **fields, **more))
    after = read_run(out).result
    assert all(after.scores(depth)["development"].total == 2 for depth in (2, 4))
    assert all(after.value("loss_reduction", loop) < 100 for loop in (1, 2, 3, 4, None))
    assert [row for row in after.rows if row in result.rows] == result.rows
    assert answers and {file: file.stat().st_mtime_ns for file in answers} == answers
    assert (out / "adapter_model.safetensors").read_bytes() == adapter
    assert (out / "merged" / "model.safetensors").is_file()


FILES = ("adapter_model.safetensors", "adapter_config.json", "merged/config.json", "answers/after/b/predictions.jsonl")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "missing", "bit"])
def test_results_of_other_weights_are_not_those_of_a_finished_run(tmp_path, name, damage):
    out, run = tmp_path / "out", {"settings": {"seed": 1}}
    for file in FILES:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_bytes(bytes(range(100)))
    seal(out, run, ["adapter_model.safetensors", "adapter_config.json"])
    row = Measurement(writer="training", family="cost", metric="train_seconds", value=1.5, identity=identity_key(run))
    saved = {"adapter": str(out), "merged model": str(out / "merged")}
    result, facts = Result([row], {identity_key(run): run}, saved), {"settings": {"seed": 1}}
    write_result(result, facts, run, out)
    assert finished_result({"seed": 1}, out, run) == result
    out = out.rename(tmp_path / "elsewhere")  # a run is finished wherever its folder lies
    saved |= {"adapter": str(out), "merged model": str(out / "merged")}
    assert finished_result({"seed": 1}, out, run) == result
    assert finished_result({"seed": 1}, out, {"settings": {"seed": 2}}) is None
    assert finished_result({"seed": 1, "depths": [2]}, out, run) is None
    assert finished_result({"seed": 1}, out, run, [{"benchmark": "b", "problems": "others"}]) is None
    if damage == "missing":
        (out / name).unlink()
    else:
        (out / name).write_bytes(bytes(range(99)) if damage == "truncated" else bytes(range(99)) + b"x")
    assert finished_result({"seed": 1}, out, run) is None


def test_a_finished_run_is_measured_again_on_other_problems(command, tmp_path, monkeypatch):
    file = tmp_path / "problems.jsonl"
    problems = [json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(2)]
    file.write_text(problems[0])
    fields = {"benchmarks": ["gsm8k"], "benchmark_files": {"gsm8k": str(file)}, "max_new_tokens": 4}
    words = command("--resume_from_checkpoint", "true", **fields)
    sft.main(words)
    monkeypatch.setattr(LoopDropoutSFTTrainer, "training_step", lambda *given: pytest.fail("a step is taken"))
    file.write_text("".join(problems))
    sft.main(words)
    assert read_run(tmp_path / "out").result.scores()["gsm8k"].total == 2


def test_a_run_of_an_earlier_version_is_measured_again_and_named(command, tmp_path, log, monkeypatch):
    sft.main(command())
    out = tmp_path / "out"
    rows = [row for row in read_run(out).result.rows if row.family == "accuracy"]
    (out / "run.json").unlink()
    (out / "results.json").write_text('{"benchmarks": {}}')
    monkeypatch.setattr(LoopDropoutSFTTrainer, "training_step", lambda *given: pytest.fail("a step is taken"))
    sft.main(command("--resume_from_checkpoint", "true"))
    assert f"results.json in {out} is of an earlier version of this package, and is not read" in log.text
    assert [row for row in read_run(out).result.rows if row.family == "accuracy"] == rows


@pytest.mark.parametrize("damage", ["a number", "a line", "half of a line", "identities", "all but run.json"])
def test_damaged_rows_are_not_those_of_a_finished_run(tmp_path, damage):
    run = {"settings": {"seed": 1}}
    row = Measurement(writer="training", family="cost", metric="train_seconds", value=1.5, identity=identity_key(run))
    rows = [row, replace(row, metric="examples", value=8)]
    write_result(Result(rows, {identity_key(run): run}), {"settings": {}}, run, tmp_path)
    assert read_run(tmp_path).result.rows == rows and is_finished(tmp_path)
    file = tmp_path / ("identities.json" if damage == "identities" else "measurements.jsonl")
    text = file.read_text()
    if damage == "all but run.json":
        for name in ("measurements.jsonl", "identities.json", "writers.json"):
            (tmp_path / name).unlink()
    elif damage == "a line":
        file.write_text(text.splitlines(keepends=True)[0])
    else:
        file.write_text(text.replace("1.5", "2.5") if damage == "a number" else text[: len(text) // 2])
    assert read_run(tmp_path) is None and not is_finished(tmp_path)


@pytest.mark.parametrize("name", ["identities.json", "measurements.jsonl"])
def test_rows_could_be_written_beside_those_that_are_there_or_nothing_is_trained(command, tmp_path, monkeypatch, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(b"{\xff")
    monkeypatch.setattr(LoopDropoutSFTTrainer, "training_step", lambda *given: pytest.fail("a step is taken"))
    with pytest.raises(RecordError, match=f"{name} .*; remove it"):
        sft.main(command())


@pytest.mark.parametrize("field", ["settings", "saved", "files"])
def test_a_run_json_that_somebody_changed_is_not_that_of_a_finished_run(tmp_path, field):
    run = {"settings": {"seed": 1}}
    row = Measurement(writer="training", family="cost", metric="train_seconds", value=1.5, identity=identity_key(run))
    write_result(Result([row], {identity_key(run): run}), {"settings": {}}, run, tmp_path)
    facts = json.loads((tmp_path / "run.json").read_text())
    for damage in (facts | {field: 3}, facts | {field: [1]}, [facts]):
        (tmp_path / "run.json").write_text(json.dumps(damage))
        assert read_run(tmp_path) is None and finished_result({}, tmp_path, run) is None


def test_a_run_that_diverges_says_so_in_its_folder(command, tmp_path):
    words = command("--learning_rate", "1e30", max_grad_norm=1e30)
    with pytest.raises(NonFiniteLossError):
        sft.main(words)
    diverged = json.loads((tmp_path / "out" / "diverged.json").read_text())
    assert "not finite" in diverged["error"] and diverged["step"] < 3
    assert not (tmp_path / "out" / "run.json").exists()


@pytest.fixture
def disk():
    """`disk(bytes)`: no file may grow beyond that; `disk(None)`: any may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if limit is None else limit, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_last_adapter_and_the_last_merged_model(disk, config, dataset, tokenizer):
    args, peft_config = config(max_steps=1), default_peft_config(tiny_ouro(), r=4)
    given = {"train_dataset": dataset, "processing_class": tokenizer, "peft_config": peft_config}
    trainer = LoopDropoutSFTTrainer(tiny_ouro(), args, **given)
    trainer.save_model()
    merge_and_save(trainer.model, Path(args.output_dir, "merged"), tokenizer)
    before = contents(args.output_dir)
    trainer.train()
    for limit in (5_000, 15_000):  # the tokenizer does not fit; the weights do not
        disk(limit)
        with pytest.raises(WriteError, match="The adapter could not be written to .* untouched. There is no earlier"):
            trainer.save_model()
        with pytest.raises(WriteError, match="The merged model could not be written to .*merged .* untouched"):
            merge_and_save(trainer.model, Path(args.output_dir, "merged"), tokenizer)
        disk(None)
        assert contents(args.output_dir) == before
    trainer.save_model()
    assert before.items() - contents(args.output_dir).items() and before.keys() <= contents(args.output_dir).keys()


def test_a_figure_never_costs_a_run(command, tmp_path, capsys, log, monkeypatch):
    words = command(depths=[4])  # the training depth alone: there is nothing to draw
    sft.main(words)
    assert "Accuracy on development" in capsys.readouterr().out and "No figure" not in log.text
    (tmp_path / "out" / "run.json").unlink()

    def fail(*given):
        assert "Accuracy on development" in capsys.readouterr().out  # after the tables
        raise KeyError("broken")

    monkeypatch.setattr("loopdropout_trainer.reports.plots.overview_figure", fail)
    sft.main([*words, "--resume_from_checkpoint", "true"])
    assert "No figure: 'broken'" in log.text and (tmp_path / "out" / "run.json").is_file()


def test_seeds_that_differ_in_nothing_with_effect_have_a_mean_and_others_have_none(command, tmp_path):
    runs = {"a": {}, "b": {"dataloader_pin_memory": False, "fused_lora": False, "logging_first_step": True},
            "c": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}}  # fmt: skip
    for seed, (name, fields) in enumerate(runs.items()):
        sft.main(command(output_dir=str(tmp_path / "runs" / name), seed=seed, evaluate_base=False, **fields))
    accuracy = summary_tables(load_table([tmp_path / "runs"]))["accuracy"]
    assert accuracy["count"].tolist() == [3] and accuracy["text"].str.contains("±").all()
    sft.main(command(output_dir=str(tmp_path / "runs" / "d"), seed=3, evaluate_base=False, lora_alpha=8))
    accuracy = summary_tables(load_table([tmp_path / "runs"]))["accuracy"]
    assert sorted(accuracy["count"]) == [1, 3] and accuracy["row"].str[0].str.contains("lora_alpha = 8").any()


def test_on_a_terminal_of_80_columns_lines_and_bars_do_not_break_into_each_other(command):
    words = [ROOT / "recipes" / "sft.py", *command(disable_tqdm=False, logging_steps=1)]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 80))
    os.set_blocking(ours, False)
    program, written = Program(*words, output=os.ttyname(theirs)), bytearray()

    def has_ended():
        over = program.exit_code is not None
        with suppress(BlockingIOError):  # nothing new
            written.extend(os.read(ours, 65536))
        return over

    wait_for(has_ended)
    assert program.exit_code == 0, written.decode()
    shown = []
    for line in written.decode().split("\n"):
        row = ""
        for part in line.split("\r"):  # what is written over what stood there
            row = part + row[len(part) :]
        shown.append(row.rstrip())
    steps = [row for row in shown if " of 3: " in row]
    assert len(steps) == 3 and all(re.fullmatch(r"step \d of 3: loss \S+, learning rate \S+", row) for row in steps)
    assert sum("100%" in row for row in shown) >= 3  # bars of two evaluations and the training
    assert all(len(row) <= 80 and "INFO" not in row for row in shown if "%|" in row)
    assert len([row for row in shown if row.startswith("steps  ")]) == 1  # the plan
