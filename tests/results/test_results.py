"""Results of a run, compared by their recipes, and the curves that experiment trackers show of them."""

import pandas as pd
import pytest

from helpers.errors import user_error
from helpers.files import load_script, read_lines, write_lines
from helpers.processes import ended, fork
from loopdropout_trainer.jobs.progress import finish_run
from loopdropout_trainer.reports.comparing import compare_folders, compare_runs
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.reports.loss_tables import make_loss_tables
from loopdropout_trainer.reports.progress import describe_runs
from loopdropout_trainer.reports.result_codes import number_codes
from loopdropout_trainer.results import run_files as results
from loopdropout_trainer.results.recipe_changes import MEASURED, UNCOMPARED, compare_recipes
from loopdropout_trainer.results.run_files import (
    is_finished,
    is_of_base,
    read_own_results,
    read_results,
    read_run,
    read_run_results,
    write_results,
    write_run,
)
from loopdropout_trainer.results.sweep_folder import update_summary
from loopdropout_trainer.saving.cards import _scores
from loopdropout_trainer.settings.recipe import dump_recipe
from loopdropout_trainer.settings.recipe_folders import SETTINGS_FILE, list_runs


ROW = {
    "metric": "accuracy", "value": 70.0, "unit": "%", "task": "gsm8k", "method": "LoRA", "seed": 1, "step": 10,
    "num_loops": 4, "gates": "unit", "n": 100,
}  # fmt: skip


@pytest.mark.parametrize("column", [column for column in ROW if column not in ("value", "n")])
def test_write_results_replaces_equal_keys_only(tmp_path, column):
    newer, other = {**ROW, "value": 71.0, "n": 200}, {**ROW, column: "other"}
    write_results(tmp_path / "new", [ROW])
    write_results(tmp_path / "new", [newer, other])
    assert read_lines(tmp_path / "new/results.jsonl") == [newer, other]  # one flat object per line


def test_losses_on_other_examples_stay(tmp_path):
    """`diagnose` on fewer examples adds its losses, also those of the base model. The same measurement is replaced."""
    loss = {**ROW, "metric": "depth_loss", "task": "development", "unit": "nats"}
    base = {**loss, "method": "base model", "gates": "none", "seed": None, "step": None}
    write_results(tmp_path, [base, loss, {**loss, "method": "CoTo"}])
    for value in (60.0, 61.0):
        for row in (base, loss):
            write_results(tmp_path, [{**row, "n": 40, "value": value}])
    found = [(row["method"], row["n"], row["value"]) for row in read_lines(tmp_path / "results.jsonl")]
    measured = [("base model", 100, 70.0), ("LoRA", 100, 70.0), ("CoTo", 100, 70.0)]
    assert found == [*measured, ("base model", 40, 61.0), ("LoRA", 40, 61.0)]
    tables = make_loss_tables(load_results(tmp_path))
    assert [[*table.texts.index] for table in tables] == [["base model", "LoRA", "CoTo"], ["base model", "LoRA"]]
    write_results(tmp_path, [{**loss, "n": 30}], step=10)  # of the training, which has one number for each
    assert [row["n"] for row in read_lines(tmp_path / "results.jsonl") if row["method"] == "LoRA"] == [30]


def test_accuracies_with_another_limit_stay(tmp_path, capsys):
    """A smaller `evaluate` keeps the larger result. Reports and comparisons use the one on the problems of the others."""
    for name, value, measured in (("a", 60.0, {100: 100, 12: 12}), ("b", 50.0, {12: 12})):
        folder = tmp_path / name
        write_results(folder, [{**ROW, "task": "training", "metric": "train_seconds", "training": name}])
        for limit, n in measured.items():
            row = {**ROW, "training": name, "adapter": str(folder), "value": value + n, "n": n, "limit": limit}
            row |= {"samples": "s.jsonl", "problems": f"first {n}", "seed": 1 if name == "a" else 2}
            write_results(folder / "evaluation", [{**row, "value": 0.0}])
            write_results(folder / "evaluation", [row])
        samples = [{"correct": name == "a", "answered": 1, "doc_id": number, "target": "x"} for number in range(100)]
        write_lines(folder / "evaluation/s.jsonl", samples)
    (tmp_path / "b/results.jsonl").write_text(
        (tmp_path / "b/results.jsonl").read_text().replace('"seed": 1', '"seed": 2')
    )
    found = [(row["n"], row["value"]) for row in read_own_results(tmp_path / "a/evaluation")]
    assert found == [(100, 160.0), (12, 72.0)]
    results_of_both = load_results(tmp_path)
    assert results_of_both.attrs["left_out"] == (
        f"Left out: 1 result in {tmp_path}/a/evaluation, because the same models are also measured on the number of problems "
        "that the tables show."
    )
    compared = compare_runs(tmp_path / "a", tmp_path / "b", "gsm8k")
    assert (compared.gain, compared.n) == (100, 12)
    table = compare_folders([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [*table["num_problems"]] == [12, 12] and table["comparison"].iloc[0].n == 12
    assert _scores(read_run_results(tmp_path / "a")) == [("gsm8k", 4, 160.0, 100, None)]
    write_results(
        tmp_path / "a/evaluation", [{**row, "training": "a", "seed": 1, "adapter": str(tmp_path / "a"), "limit": 50}]
    )
    assert [row["limit"] for row in read_own_results(tmp_path / "a/evaluation")] == [
        100,
        50,
    ]  # on the same 12 problems


@pytest.mark.parametrize("digest", ["former", None])
def test_card_compares_with_the_base_model_on_the_same_problems(digest):
    base = {**ROW, "method": "base model", "gates": "none", "value": 20.0, "problems": digest}
    scores = _scores([{**ROW, "problems": "present"}, base, {**ROW, "num_loops": 2}, {**base, "num_loops": 2, "n": 8}])
    of_base = 20.0 if digest is None else None
    assert scores == [("gsm8k", 4, 70.0, 100, of_base), ("gsm8k", 2, 70.0, 100, None)]


def write_rows(folder, method):
    for step in range(40):
        write_results(folder, [{**ROW, "method": method, "step": None, "seed": step}])


def test_write_results_keeps_rows_of_all_writers(tmp_path):
    writers = [fork(write_rows, str(tmp_path), method) for method in ("LoRA", "Loop Dropout")]
    assert [ended(writer) for writer in writers] == [0, 0]
    assert len(read_lines(tmp_path / "results.jsonl")) == 80


def test_read_results_joins_recipes(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b" / "lora"]
    row = {name: value for name, value in ROW.items() if name != "seed"}
    for folder in folders:
        write_results(folder, [{**row, "seed": None}])  # the same as a missing one
        write_results(folder, [row])
        (folder / "recipe.yaml").write_text("p: [0.1, 0.2]\ndepths: [2, 8]\n")  # a former name
    recipe = {"recipe_p": [0.1, 0.2], "recipe_eval_num_loops": [2, 8]}
    assert read_results(tmp_path) == [{**recipe, **row, "folder": str(folder)} for folder in folders]
    with user_error("nowhere does not exist"):
        read_results(tmp_path / "nowhere")
    (tmp_path / "results.jsonl").write_text('{"metric": \n')
    with user_error("results.jsonl is not a file of JSON lines"):
        read_results(tmp_path)


def test_runs_are_in_the_order_of_their_numbers(tmp_path):
    """As texts, seed 10 would be before seed 9, and the learning rate 1e-05 after 0.001."""
    names = [f"sweep_{number}/lora/lr_{rate}/seed_9" for number in (2, 10) for rate in ("1e-05", "0.0003", "0.001")]
    names.insert(1, "sweep_2/lora/lr_1e-05/seed_10")
    for name in names:
        write_rows(tmp_path / name, "LoRA")
        (tmp_path / name / SETTINGS_FILE).write_text("{}")
        write_run(tmp_path / name, status="training")
    runs = [tmp_path / name for name in names]
    assert list_runs(tmp_path / "sweep_2") == runs[:4]
    assert [*dict.fromkeys(row["folder"] for row in read_results(tmp_path))] == [str(run) for run in runs]
    sentences = describe_runs([tmp_path])
    assert [str(run) for run in runs] == [sentence.split()[3] for sentence in sentences]
    for program in (1, 2):
        write_run(runs[program - 1], imports={"/a.py": str(program)}, used_imports=["/a.py"])
    results = pd.DataFrame({"run": [str(run) for run in reversed(runs[:2])], "method": "LoRA"})
    assert [*number_codes(results)] == [2, 1]


def test_names_in_results_are_possible_names(tmp_path):
    write_results(tmp_path, [{**ROW, "adapter": "a\0b"}])
    for read in (read_results, results.read_own_results):
        with user_error(r"`adapter` in .*results.jsonl must not have the character NUL, got 'a\\x00b'"):
            read(tmp_path)


OF_TRAINING = {**ROW, "metric": "train_loss", "task": "training", "training": "t1"}
BASE = {"method": "base model", "seed": None, "step": None, "gates": "none"}


def test_run_results_after_a_longer_training(tmp_path):
    """The held-out loss of the base model stays in front of the results of the longer training."""
    base_loss = {**OF_TRAINING, **BASE, "metric": "eval_loss", "training": None}
    write_results(tmp_path, [OF_TRAINING, base_loss], step=10)
    write_results(tmp_path, [{**OF_TRAINING, "step": 20}], step=20)
    later = {**ROW, "training": "t1", "step": 20, "adapter": str(tmp_path)}
    others = [{**later, "step": 10}, {**later, "training": "t2"}, {**later, "readout": 2}]
    write_results(tmp_path / "evaluation", [later, {**ROW, **BASE}, *others])
    found = [{**row, "folder": None} for row in results.read_run_results(tmp_path)]
    own = [base_loss, {**OF_TRAINING, "step": 20}]
    assert found == [{**row, "folder": None} for row in (*own, later, {**ROW, **BASE})]
    assert not any(map(results.is_of_training, [base_loss, later])) and results.is_of_training(OF_TRAINING)


def test_results_of_a_checkpoint_have_no_readouts(tmp_path):
    (tmp_path / "recipe.yaml").write_text("seed: 3\n")
    checkpoint = tmp_path / "checkpoint-10"
    checkpoint.mkdir()
    later = {**ROW, "adapter": str(checkpoint)}
    others = [{**later, "readout": 2}, {**later, "adapter": str(tmp_path / "checkpoint-20")}]
    write_results(tmp_path / "evaluation", [later, *others, {**ROW, **BASE}])
    found = [{**row, "folder": None} for row in results.read_run_results(checkpoint)]
    assert found == [{**row, "folder": None} for row in (later, {**ROW, **BASE})]


def test_results_of_weights_are_of_their_training(tmp_path):
    """A former training had the same checkpoint, and the adapter of a later one may not have been saved."""
    (tmp_path / "recipe.yaml").write_text("seed: 3\n")
    checkpoint = tmp_path / "checkpoint-10"
    checkpoint.mkdir()
    evaluated = [{**ROW, "adapter": str(checkpoint), "training": name, "task": name} for name in ("t1", "t2")]
    later = {**ROW, "adapter": str(tmp_path), "training": "t1", "task": "t1 at its end"}
    write_results(tmp_path / "evaluation", [*evaluated, later, {**ROW, **BASE, "task": "base"}])
    tasks = lambda *place: [row["task"] for row in results.read_run_results(*place)]
    assert tasks(checkpoint, {"training": "t2", "step": 10}) == ["t2", "base"]
    assert tasks(checkpoint, {"training": None}) == tasks(checkpoint) == ["t1", "t2", "base"]  # an older adapter
    write_results(tmp_path, [{**OF_TRAINING, "training": "t2"}])
    assert tasks(tmp_path, {"training": "t1", "step": 10}) == ["t1", "t1 at its end", "base"]
    assert tasks(tmp_path, {"training": "t2", "step": 20}) == ["base"]
    assert tasks(tmp_path, {"training": "t2", "step": 10}) == tasks(tmp_path) == ["training", "t2", "base"]


def test_results_after_another_training_of_equal_length(tmp_path):
    base_loss = {**OF_TRAINING, **BASE, "metric": "eval_loss", "training": None}
    write_results(tmp_path, [OF_TRAINING, base_loss, {**ROW, "training": "t1"}], step=10, training="t1")
    write_results(tmp_path, [{**OF_TRAINING, "training": "t2"}], step=10, training="t2")
    assert [(row["metric"], row["training"]) for row in read_results(tmp_path)] == [
        ("eval_loss", None),
        ("train_loss", "t2"),
    ]


def test_write_run_marks_a_run_as_finished(tmp_path):
    assert not is_finished(tmp_path)
    write_run(tmp_path, status="trained", device="cpu")
    assert not is_finished(tmp_path)
    write_run(tmp_path, device="cpu")
    assert is_finished(tmp_path) and read_run(tmp_path)["device"] == "cpu"
    assert {"torch", "trl", "peft"} <= read_run(tmp_path)["versions"].keys()
    (tmp_path / "run.json").write_text("{")
    assert not is_finished(tmp_path)


def test_write_results_survives_a_failed_write(tmp_path, monkeypatch):
    write_results(tmp_path, [ROW])
    monkeypatch.setattr("pathlib.Path.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        write_results(tmp_path, [{**ROW, "value": 0.0}])
    assert read_results(tmp_path)[0]["value"] == 70.0


def test_compare_recipes_names_the_first_difference(tmp_path):
    assert compare_recipes({"seed": 1, "output_dir": "a"}, {"seed": 1, "output_dir": "b"}) is None
    assert str(compare_recipes({"p": [0.5]}, {})) == "`p` changed from [0.5] to the default"
    assert compare_recipes({}, {"rule": "lora"}).field == "rule"
    assert str(compare_recipes({}, {"rule": "lora"})) == "`rule` changed from the default to 'lora'"
    assert (
        str(compare_recipes({"num_train_epochs": 8}, {"num_train_epochs": 3.0}))
        == "`num_train_epochs` changed from 8 to 3"
    )
    assert str(compare_recipes({"p": 0.5}, {"p": 0.25})) == "`p` changed from 0.5 to 0.25"
    assert str(compare_recipes({}, {"num_loops": 3})) == "`num_loops` changed from the model's own to 3"
    saved, new = {"seed": 1, "p": 0.1}, {"p": 0.1, "seed": 2}
    assert str(compare_recipes(saved, new)) == "`seed` changed from 1 to 2"
    new = {"p": 0.2, "seed": 2, "rule": "lora", "max_steps": 5}
    named = "`seed` changed from 1 to 2, `p` changed from 0.1 to 0.2, `rule` changed from the default to 'lora'"
    assert str(compare_recipes(saved, new)) == f"{named} and `max_steps` changed from the default to 5"
    new |= {"lora_r": 8, "lora_alpha": 8}
    assert str(compare_recipes(saved, new)).startswith(f"{named}, `max_steps` changed")
    assert str(compare_recipes(saved, new)).endswith(" to 5 and 2 other fields changed")
    new = {"p": 0.1, "seed": 2}
    assert compare_recipes(saved, new, ignored={"seed"}) is compare_recipes(saved, new, fields=["p"]) is None
    (tmp_path / "recipe.yaml").write_text("depths: [2, 8]\n")  # a former name
    assert results.read_recipe(tmp_path) == {"eval_num_loops": [2, 8]}
    (run := tmp_path / "checkpoint-7").mkdir()
    assert results.read_recipe(run) == {"eval_num_loops": [2, 8]}
    (run / "recipe.yaml").write_text("seed: 3\n")  # a run whose folder has the name of a checkpoint
    assert results.read_recipe(run) == {"seed": 3}


def test_fields_declare_when_they_matter():
    assert {"output_dir", "preview", "num_threads", "benchmark_batch_size"} <= UNCOMPARED
    assert {"eval_num_loops", "single_loop_batches", "benchmark_limit", "merge", "push_to_hub"} <= MEASURED
    assert not UNCOMPARED & MEASURED and not {"seed", "num_loops", "lora_r"} & (UNCOMPARED | MEASURED)


def test_curves_are_logged_over_loops(make_sft, monkeypatch):
    logs, trainer = [], make_sft()
    log = lambda args, state, control, values: logs.append((state.global_step, values))
    monkeypatch.setattr(trainer.callback_handler, "on_log", log)
    rows = [
        ROW, {**ROW, "num_loops": 2, "value": 20.0}, {**ROW, "gates": "none", "method": "base model"},
        {**ROW, "metric": "loss_reduction"},
        {**ROW, "gates": "loop 3", "loop": 3, "value": 30.0},
        {**ROW, "metric": "loss_reduction", "gates": "loop 1", "loop": 1, "value": 5.0},
    ]  # fmt: skip
    finish_run(trainer, rows)
    assert logs == [
        (2, {"test_accuracy_by_depth/gsm8k": 20.0}),
        (4, {"test_accuracy_by_depth/gsm8k": 70.0}),
        (1, {"test_loss_reduction_by_loop/gsm8k": 5.0}),
        (3, {"test_accuracy_by_loop/gsm8k": 30.0}),
    ]


ANSWERS = {"metric": "accuracy", "unit": "%", "method": "LoRA", "seed": 1, "step": 10, "gates": "unit", "n": 12}


def write_answers(folder, task, num_loops, correct):
    """Write the training of a run, its accuracy on a task, and the answers to its problems."""
    name = f"{task} {num_loops}.jsonl"
    training = {**ANSWERS, "task": "training", "metric": "train_seconds", "num_loops": 4, "value": 1.0}
    row = {
        **ANSWERS,
        "task": task,
        "num_loops": num_loops,
        "samples": name,
        "n": len(correct),
        "value": 100 * sum(correct) / len(correct),
    }
    write_results(folder, [training, row])
    write_lines(folder / name, [{"correct": value, "target": f"{task} {n}"} for n, value in enumerate(correct)])


def test_runs_are_compared_on_one_task_and_depth(tmp_path):
    """Not on the first task of their results, such as the held-out examples that chose a learning rate."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder, solves in ((ours, 1), (other, 0)):
        row = {**ANSWERS, "task": "quiz", "num_loops": 4, "value": 1.0, "samples": "none"}
        others = [
            {**row, "readout": 2},
            {**row, "gates": "loop 1"},
            {**row, "task": "unknown answers", "samples": None},
        ]
        write_results(folder, others)
        write_answers(folder, "development", 4, [1 - solves] * 12)
        write_answers(folder, "quiz", 2, [1] * 12)
        write_answers(folder, "quiz", 4, [solves] * 11 + [0])
    found = compare_runs(ours, other, "quiz")
    assert (found.gain, found.n) == (pytest.approx(1100 / 12), 12) and found.p < 0.05 and found.low > 0
    assert compare_runs(ours, other, "quiz", num_loops=2).gain == 0
    measured = "It was measured on development at K = 4, quiz at K = 2, quiz at K = 4."
    command = f"`loopdropout evaluate {other} --benchmarks"
    with user_error(f"`task` must be one that {ours} was measured on at K = 4, got b. {measured}"):
        compare_runs(ours, other, "b")
    write_answers(ours, "quiz", 8, [1] * 12)
    with user_error(f"{other} was measured on at K = 8, got quiz. {measured} {command} quiz --eval_num_loops 8`"):
        compare_runs(ours, other, "quiz", num_loops=8)
    write_answers(other, "quiz", 8, [1] * 13)
    with user_error("Both runs must be measured on the same problems of quiz, .* 12 and .* 13 .* Evaluate both again"):
        compare_runs(ours, other, "quiz", num_loops=8)
    with user_error(r"quiz at K = 8. Did you mean 'quiz'\? If it is another task, `"):  # which may not exist
        compare_runs(ours, other, "quizz")
    (tmp_path / "empty").mkdir()
    with user_error(f"{tmp_path}/empty was measured on, got quiz. It was measured on no task."):
        compare_runs(ours, tmp_path / "empty", "quiz")
    with user_error("The folder nowhere does not exist"):
        compare_runs("nowhere", other, "quiz")


def test_comparison_on_the_problems_that_chose_warns(tmp_path, caplog):
    """As a report has no interval there. A task can choose, too, and a run of no sweep has no choice."""
    runs = [tmp_path / f"mine/{method}/lr_0.001/seed_1" for method in ("ours", "lora")]
    for run in [*runs, tmp_path / "alone"]:
        write_answers(run, "development", 4, [1] * 12)
        write_answers(run, "quiz", 4, [1] * 12)
    update_summary(tmp_path / "mine", choices={}, select_on={"ours": "development", "lora": "quiz"})
    compare_runs(*runs, "development")
    compare_runs(runs[0], tmp_path / "alone", "quiz")
    compare_runs(tmp_path / "alone", runs[1], "quiz")
    first, second = dict.fromkeys(caplog.messages)
    assert first.startswith(
        f"The problems of development chose the learning rate of {runs[0]}, so the difference is partly"
    )
    assert second.startswith(f"The problems of quiz chose the learning rate of {runs[1]}, so")


def test_report_compares_the_runs_that_it_is_given(tmp_path, capsys, monkeypatch):
    """With the last one, on the same problems of each task and depth, as `compare_runs` does. A run can be in another one."""
    report, ours = load_script("recipes/report.py"), tmp_path / "ours"
    other, third = ours / "lora", tmp_path / "third"
    for folder, solves, seed in ((ours, 1, 5), (other, 0, 6), (third, 1, 7)):
        monkeypatch.setitem(ANSWERS, "seed", seed)
        write_answers(folder, "development", 4, [1 - solves] * 12)
        write_answers(folder, "quiz", 4, [solves] * 11 + [0] * (1 if folder != third else 2))
    monkeypatch.setattr(report, "draw_figure", lambda plot, path: None)
    report.main([*map(str, (ours, third, other)), "--output_dir", str(tmp_path / "report")])
    table = pd.read_csv(tmp_path / "report/comparison.csv").set_index("run")
    assert {*table["task"]} == {"quiz"} and [*table["seed"]] == [5, 7, 6] and [*table["num_problems"]] == [12, 13, 12]
    assert read_results(ours, other) == read_results(ours)
    frame = load_results(ours, third)
    found = compare_runs(ours, other, "quiz")
    numbers = table.loc[str(ours), ["difference", "low", "high", "p"]]
    assert [*numbers] == pytest.approx([found.gain, found.low, found.high, found.p])
    assert table.loc[[str(third), str(other)], "difference"].isna().all()
    out = capsys.readouterr().out
    assert "Differences are in points on the same n problems." in out
    lines = out.split("Accuracy of the runs in %, and difference to ours/lora")[1].splitlines()
    assert lines[2].startswith("quiz  4  ours ") and lines[2].endswith(f" 5  12     91.67  {found}")
    assert lines[3].startswith("quiz  4  third ") and lines[3].rstrip().endswith("other problems")
    report.report_comparison([str(ours), str(tmp_path)], tmp_path / "report", frame)
    report.report_comparison([str(ours), str(tmp_path), str(other)], tmp_path / "report", frame)
    report.report_comparison([str(ours), f"{ours}/"], tmp_path / "report", frame)
    report.report_comparison([str(ours)], tmp_path / "report", frame)
    several = tmp_path / "several"  # adapters that one `evaluate` has measured
    for seed in (5, 6):
        monkeypatch.setitem(ANSWERS, "seed", seed)
        write_answers(several, "quiz", 4, [1] * 12)
    report.report_comparison([str(ours), str(several)], tmp_path / "report", frame)
    with user_error(f"must be folders of runs, but {several} has 2 accuracies on quiz at K = 4, of several adapters"):
        compare_runs(ours, several, "quiz")
    assert capsys.readouterr().out == ""
    report.report_comparison([str(ours), str(third)], tmp_path / "report", frame)
    assert "Differences are" not in capsys.readouterr().out  # on other problems
    for folder in (ours, third):
        write_answers(folder, "quiz", 2, [1] * 12)
    report.report_comparison([str(ours), str(third)], tmp_path / "report", frame)
    assert pd.read_csv(tmp_path / "report/comparison.csv")["K"].tolist() == [2, 2, 4, 4]


def test_report_says_why_a_run_is_not_compared(tmp_path, capsys, monkeypatch):
    """Runs that the user names are shown, also if a sweep has not chosen their learning rate. None is left out in silence."""
    report = load_script("recipes/report.py")
    monkeypatch.setattr(report, "draw_figure", lambda plot, path: None)
    runs = [tmp_path / f"mine/lora/lr_0.00{rate}/seed_1" for rate in (1, 2, 3)]
    first, second, third = runs
    update_summary(tmp_path / "mine", choices={"lora": {"rates": [0.001, 0.002], "best": None}})
    training = {"metric": "eval_loss", "unit": "nats", "task": "training", "method": "LoRA", "seed": 1, "n": 1}
    for rate, run in zip((0.001, 0.002, 0.003), runs, strict=True):
        write_results(run, [{**training, "value": rate, "step": 10, "num_loops": 4, "gates": "unit"}])
        dump_recipe({"run_name": f"mine/lora/lr_{rate}/seed_1", "learning_rate": rate}, run / "recipe.yaml")
        write_answers(run, "development" if run == second else "quiz", 8 if run == third else 4, [1] * 12)
    words = ["--output_dir", str(tmp_path / "report")]
    for named, reason in (
        ((first, second), f"The accuracies are not compared, because there is none of a benchmark for {second}. "),
        ((first, third), f"no task and depth was measured for all: {first}, {third}."),
    ):
        report.main([*map(str, named), *words])
        printed = capsys.readouterr().out
        assert reason in printed and "Left out: 2 runs" not in printed
        losses = pd.read_csv(tmp_path / "report/held_out_loss.csv")
        assert len(losses) == 2
    report.main([str(tmp_path / "mine"), *words])
    printed = capsys.readouterr().out
    assert "Left out: 3 runs of lora" in printed and "the results of all trainings are left out" in printed


def test_base_model_is_found_in_results_and_data_frames():
    """By its method. The gates of a merged model are "none", too, and a result of a training has no method yet."""
    rows = [
        {"method": "base model", "gates": "none"},
        {"method": "mine", "gates": "none"},
        {"method": "LoRA", "gates": "unit"},
    ]
    assert [is_of_base(row) for row in rows] == [*is_of_base(pd.DataFrame(rows))] == [True, False, False]
    assert is_of_base({"gates": "none"}) and not is_of_base({"gates": "unit"})
