"""recipes/diagnose.py: all diagnostics of two adapters, what it refuses, how it goes on; and diagnostics while training."""

import copy
import json
import random
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, flat_weights, load_script, tiny_ouro
from processes import python
from test_generation import adapted
from test_sweep import RECIPE

from loopdropout_trainer import LoopDropoutSFTTrainer
from loopdropout_trainer.diagnostics import (
    DIAGNOSTICS,
    readout_losses,
    single_loop_activation,
)
from loopdropout_trainer.diagnostics.losses import SingleLoop
from loopdropout_trainer.diagnostics.rows import RowArguments, load_rows_to_score
from loopdropout_trainer.record.measurement import MEASUREMENTS_FILE, read_measurements
from loopdropout_trainer.saving.adapter_files import ADAPTER_METADATA
from loopdropout_trainer.training.checkpoints.sealing import seal


def trained_with(rule="lora", seed=1, **settings):
    settings = {"rule": rule, "p": None if rule == "lora" else 0.5, "learning_rate": 1e-3, **settings}
    return {"settings": settings, "seeds": {"seed": seed}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """A base, its two adapters (one with two seeds), a merged model, and a recipe that holds 6 rows out."""
    folder = tmp_path_factory.mktemp("saved")
    base = tiny_ouro()
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    settings = f"model_name_or_path: {folder / 'base'}\npreparation: arithmetic\nnum_train_examples: 20\n"
    settings += "num_eval_examples: 6\nmax_length: 512\n"
    for seed, name in enumerate(("lora", "dropout_1", "dropout_2"), start=1):
        adapted(copy.deepcopy(base), seed).save_pretrained(folder / name)
        rule = "lora" if name == "lora" else "loop_dropout"
        facts = {"num_loops": 4, "rule": rule, "p": None if name == "lora" else 0.5}
        (folder / name / ADAPTER_METADATA).write_text(json.dumps(facts))
        trained = {**yaml.safe_load(settings), "seed": seed}
        (folder / name / "run.json").write_text(json.dumps({"settings": trained}))
        seal(folder / name, trained_with(rule, seed=seed), ["adapter_model.safetensors"])
    adapted(copy.deepcopy(base), 1).merge_and_unload().save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder / "merged")
    (folder / "recipe.yaml").write_text(
        f"{settings}dtype: float32\nuse_cpu: true\nlearning_rate: 1.0e-4\n"
        "benchmarks: [arithmetic_test]\nrows_batch_size: 4\n"
    )
    return folder


@pytest.fixture(scope="module")
def diagnose(saved):
    """`diagnose(output_dir, *options)` runs the script on the recipe and its adapters, by default without its figures."""
    three = ("LoRA=lora", "Loop Dropout=dropout_1", "Loop Dropout=dropout_2")

    def run(output_dir, *options, adapters=three, draws=False):
        named = [adapter.replace("=", f"={saved}/") for adapter in adapters]
        words = [saved / "recipe.yaml", "--output_dir", output_dir, "--adapters", *named, *options]
        with nullcontext() if draws else patch("loopdropout_trainer.reports.save_figure"):
            load_script("recipes/diagnose.py").main(list(map(str, words)))
        rows, identities, faults = read_measurements(Path(output_dir) / "diagnostics")
        assert not faults and {row.identity for row in rows} <= identities.keys()
        return rows

    return run


def values(rows, **where):
    """The values of rows with these fields."""
    return [row.value for row in rows if all(getattr(row, name) == value for name, value in where.items())]


def test_every_diagnostic_leaves_what_is_documented(diagnose, saved, tokenizer, tmp_path, capsys):
    rows = diagnose(tmp_path, "--models", f"Merged={saved / 'merged'}", "--depths", "1", "4", "6", draws=True)
    printed = capsys.readouterr().out
    assert {row.family for row in rows} == set(DIAGNOSTICS) and len(DIAGNOSTICS) == 9
    documented = (ROOT / "docs" / "diagnostics.md").read_text()
    for name, diagnostic in DIAGNOSTICS.items():
        of_it = [row for row in rows if row.family == name]
        methods = {"LoRA", "Loop Dropout"} | (set() if diagnostic.needs_adapter else {"base", "Merged"})
        assert {row.method for row in of_it} == methods and {Path(row.writer).parent for row in of_it} == {
            Path("diagnostics", name)
        }
        assert {row.seed for row in of_it if row.method == "Loop Dropout"} == {2, 3}
        for metric in {name, *(row.metric for row in of_it)}:
            assert f"`{metric}`" in documented
    drawn = {path.stem for path in (tmp_path / "diagnostics/figures").glob("*.png")}
    assert len(drawn) >= len(DIAGNOSTICS)

    # From the folders, without the run: losses of the first adapter, and equality of an adapter and its merged model.
    data = {"preparation": "arithmetic", "num_train_examples": 20, "num_eval_examples": 6, "max_length": 512}
    batches, _ = load_rows_to_score(RowArguments(**data, rows_batch_size=3), tokenizer)
    want = single_loop_activation(adapted(tiny_ouro(), 1), batches)
    of_lora = {"family": "single_loop", "method": "LoRA"}
    assert values(rows, **of_lora, metric="loss") == pytest.approx([*want.only, want.all_on], abs=1e-5)
    assert values(rows, **of_lora, metric="frozen_loss") == pytest.approx([want.frozen])
    for name in ("readouts", "depth", "settling", "agreement", "similarity"):
        found, other = (values(rows, family=name, method=method) for method in ("Merged", "LoRA"))
        assert found and found == pytest.approx(other, abs=2e-3)
    assert values(rows, method="base", metric="readout_loss", loop=4) == pytest.approx([want.frozen], abs=1e-5)

    a, b = values(rows, method="Loop Dropout", metric="loss", loop=None)
    mean, sd = (a + b) / 2, abs(a - b) / 2**0.5
    assert any(
        f"{mean:.4f} ± {sd:.4f}" in line
        for line in printed.splitlines()
        if line.startswith("loss, depth 4, gates all")
    )


def test_a_killed_run_goes_on_and_other_rows_or_another_base_are_measured_anew(diagnose, saved, tmp_path, monkeypatch):
    names = ("--diagnostics", "single_loop", "readouts")
    before = diagnose(tmp_path, *names)
    file = tmp_path / "diagnostics" / MEASUREMENTS_FILE
    of_adapters = [row.identity for row in before if row.family == "single_loop"]
    assert (
        len(set(of_adapters)) == 3 and len({row.writer for row in before}) == 7
    )  # three of an adapter alone, and four
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if of_adapters[-1] not in line))  # killed before the last of them
    measured, original = [], SingleLoop.measure
    monkeypatch.setattr(SingleLoop, "measure", lambda *args: measured.append(args) or original(*args))
    assert diagnose(tmp_path, *names) == before and len(measured) == 1
    file.write_text("".join(line for line in lines if line != lines[0]))
    assert diagnose(tmp_path, *names) == before  # a row that somebody has deleted
    measured.clear()
    fewer = diagnose(tmp_path, *names, "--num_rows", "3")
    assert len(fewer) == len(before) and values(fewer) != values(before) and len(measured) == 3
    assert diagnose(tmp_path, *names) == before and len(measured) == 6
    config = json.loads((saved / "base" / "config.json").read_text())
    (saved / "base" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    try:
        other = diagnose(tmp_path, *names)
    finally:
        (saved / "base" / "config.json").write_text(json.dumps(config))
    assert len(measured) == 9 and not {row.identity for row in other} & {row.identity for row in before}
    assert values(other, metric="loss") != pytest.approx(values(before, metric="loss"), abs=1e-3)


NO_RUN = "run.json is not the file of a training"
INCOMPARABLE = [
    (9, {"num_train_examples": 40}, "`num_train_examples` was 20 .* 40"),
    (9, {"model_name_or_path": "ByteDance/Ouro-1.4B"}, "`model_name_or_path`.*Ouro-1.4B"),
    (9, {"learning_rate": 3e-3, "seed": 9}, "no two seeds of one method .`learning_rate` was 0.001 and is 0.003"),
    (9, {}, "the seed of both is 1"),
    (1, {"seed": 7}, "`LoRA` .* and `LoRA` .* hold the same weights"),
    *((9, content, NO_RUN) for content in ("{", '{"settings": 3}')),
]


@pytest.mark.parametrize(("seed", "results", "message"), INCOMPARABLE)
def test_adapters_that_cannot_be_compared_are_refused(diagnose, saved, tmp_path, seed, results, message):
    shutil.copytree(saved / "lora", saved / "copy", dirs_exist_ok=True)
    adapted(tiny_ouro(), seed).save_pretrained(saved / "copy")
    if isinstance(results, dict):
        trained = json.loads((saved / "lora" / "run.json").read_text())["settings"]
        seal(saved / "copy", trained_with(**{"seed": 1, **results}), ["adapter_model.safetensors"])
        results = json.dumps({"settings": trained | results})
    (saved / "copy" / "run.json").write_text(results)
    with pytest.raises(ValueError, match=message) as caught:
        diagnose(tmp_path / "out", "--diagnostics", "dose", adapters=("LoRA=lora", "LoRA=copy"))
    assert "\n" not in str(caught.value)


MISTAKES = {  # words: what the sentence names
    **{f"--{name} 7": f"the recipe.*`{name}`" for name in ("num_train_examples", "num_eval_examples", "split_seed")},
    "--diagnostics doses": "`diagnostics` .*'doses'",
    "--import missing.py": "`import` names missing.py",
    **{f"--models {model}": f"`models` .*'{model}'" for model in ("Merged", "LoRA=x", "base=x")},
    "--adapters LoRA=nowhere": "adapter nowhere",
    "--depths 0": "`depths`",
    "--num_rows 0": "`num_rows`",
    "--rows gsm9k": "gsm9k",
    '--rows gsm8k --benchmark_files {"gsm8k":"nowhere.jsonl"}': "nowhere.jsonl",
    '--rows gsm8k --benchmark_files {"gsm8k":"FILE"}': "row 1",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_one_sentence(diagnose, tmp_path, words):
    (tmp_path / "bad.jsonl").write_text('{"question": 3, "rows": []}\n')
    with pytest.raises(ValueError, match=MISTAKES[words]) as caught:
        diagnose(tmp_path / "out", *words.replace("FILE", str(tmp_path / "bad.jsonl")).split())
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").rglob("*.json"))


def test_a_diagnostic_of_ones_own_is_one_file(diagnose, tmp_path, capsys):
    """The example of the documentation, saved in a folder of its own."""
    text = (ROOT / "docs" / "diagnostics.md").read_text()
    code = text.split("## A diagnostic of your own")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "my_diagnostic.py").write_text(code)
    options = ("--import", str(tmp_path / "my_diagnostic.py"), "--diagnostics", "last_two", "patterns")
    with patch.dict(DIAGNOSTICS):
        files = diagnose(tmp_path, *options, adapters=("LoRA=lora",))
    patterns = {row.gates: row.value for row in files if row.metric == "pattern_loss"}
    found = values(files, family="last_two")
    assert found == pytest.approx([patterns["0-0-1-1"], patterns["all"]])
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("last_two") and f"{found[0]:.4f}" in line for line in printed)
    (tmp_path / "my_diagnostic.py").write_text(
        code.replace("[0.0] * (context.num_loops - 2) + [1.0, 1.0]", "[1, 0, 0, 1]")
    )
    with patch.dict(DIAGNOSTICS):
        rows = diagnose(tmp_path, *options, adapters=("LoRA=lora",))
    assert values(rows, family="last_two")[0] == pytest.approx(patterns["1-0-0-1"])


NO_ROWS = {
    "finite": [{"metric": "a", "value": float("nan")}], "type": [{"metric": "a", "value": object()}], "iterable": 3,
    "unexpected keyword": [{"metric": "a", "value": 1.0, "depht": 3}],
}  # fmt: skip


@pytest.mark.parametrize("reason", NO_ROWS)
def test_what_no_row_can_hold_is_left_out_with_the_reason(diagnose, tmp_path, reason, log):
    measured = [NO_ROWS[reason], [{"metric": "a", "value": 1.0}]]
    with patch.dict(DIAGNOSTICS), patch.object(SingleLoop, "measure", side_effect=measured):
        rows = diagnose(tmp_path, "--diagnostics", "single_loop", adapters=("LoRA=lora", "B=dropout_1"))
    assert [(row.method, row.value) for row in rows] == [("B", 1.0)]
    assert "single_loop of LoRA left out: it measured what no row can hold" in log.text and reason in log.text
    with pytest.raises(ValueError, match="`name` of a diagnostic"):
        type("Evil", (SingleLoop,), {"name": "../../evil"})


@pytest.mark.slow
def test_two_processes_find_what_one_finds(diagnose, saved, tmp_path):
    names = ["single_loop", "readouts", "updates", "similarity", "depth"]
    one = diagnose(tmp_path / "one", "--diagnostics", *names, "--depths", "1", "5")
    adapters = [f"{name}={saved / folder}" for name, folder in (("LoRA", "lora"), ("Loop Dropout", "dropout_1"))]
    adapters += [f"Loop Dropout={saved / 'dropout_2'}", "--output_dir", tmp_path / "two", "--depths", "1", "5"]
    words = (saved / "recipe.yaml", "--adapters", *adapters, "--diagnostics", *names)
    python(ROOT / "recipes" / "diagnose.py", *words, processes=2)
    two = read_measurements(tmp_path / "two" / "diagnostics")[0]
    assert two == one


@pytest.fixture
def train(make_trainer):
    def run(model, **fields):
        trainer = make_trainer(model, save_strategy="no", **fields)
        trainer.train()
        return trainer

    return run


def live_logs(trainer):
    return [logs for logs in trainer.state.log_history if "live/seconds" in logs]


LAYOUTS = [{}, {"padding_free": True, "max_length": None}, {"gradient_accumulation_steps": 2}]


@pytest.mark.parametrize("fields", LAYOUTS)
def test_training_is_the_same_to_the_last_bit(train, make_tiny, fields):
    if fields and make_tiny is not tiny_ouro:
        pytest.skip("one family is enough for the layouts of a batch")
    runs = []
    for every in (0, 2):
        trainer = train(make_tiny(), max_steps=5, **fields, live_diagnostics_steps=every)
        losses = [
            {k: v for k, v in log.items() if "time" not in k and "second" not in k}
            for log in trainer.state.log_history
            if "live/seconds" not in log
        ]
        states = torch.random.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        runs.append((flat_weights(trainer).tolist(), losses, states))
    assert runs[0] == runs[1]
    assert [log["step"] for log in live_logs(trainer)] == [2, 4, 5]


def test_what_is_logged_is_what_the_saved_adapter_shows(train):
    trainer = train(tiny_ouro(), max_steps=3, live_diagnostics_steps=3, learning_rate=0.05)
    (log,) = live_logs(trainer)  # the end falls on a step that was measured
    batch = trainer.data_collator([trainer.eval_dataset[index] for index in range(4)])
    activation = single_loop_activation(trainer.model, [batch])
    assert [log[f"live/rho_loop_{t}"] for t in (1, 2, 3, 4)] == pytest.approx(activation.reductions, abs=1e-3)
    readouts = [log[f"live/readout_loop_{t}"] for t in (1, 2, 3, 4)]
    assert readouts == pytest.approx(readout_losses(trainer.model, [batch]), rel=1e-5)
    assert log["live/loss_dose_0"] == pytest.approx(activation.frozen, rel=1e-5)
    assert log["live/loss_dose_1"] == pytest.approx(activation.all_on, rel=1e-5)
    assert log["live/loss_dose_2"] != log["live/loss_dose_0.5"]
    assert max(map(abs, activation.reductions)) > 0.1


def test_what_it_cannot_measure_is_refused(tokenizer, dataset, config):
    args = config(live_diagnostics_steps=1)
    with pytest.raises(ValueError, match="evaluation rows.*`num_eval_examples`"):
        LoopDropoutSFTTrainer(tiny_ouro(), args, train_dataset=dataset, processing_class=tokenizer)
    for fields in ({"live_diagnostics_steps": -1}, {"live_diagnostics_rows": 0}):
        with pytest.raises(ValueError, match=f"`{next(iter(fields))}`"):
            config(**fields)


def test_a_recipe_asks_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {"live_diagnostics_steps": 1, "live_diagnostics_rows": 2, "max_steps": 2, "save_steps": 2}
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **asked, "learning_rate": 1e-3, "output_dir": "out"}))
    load_script("recipes/sft.py").main(["recipe.yaml"])
    history = json.loads(Path("out/checkpoint-2/trainer_state.json").read_text())["log_history"]
    assert [log["step"] for log in history if "live/seconds" in log] == [1, 2]
