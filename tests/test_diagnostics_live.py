"""Diagnostics while training: they tell what the adapter does, and training does not notice them."""

import json
import random
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import flat_weights, tiny_ouro

from loopdropout_trainer import LoopDropoutSFTTrainer
from loopdropout_trainer.diagnostics import LiveDiagnosticsCallback, readout_losses, single_loop_activation
from loopdropout_trainer.settings.recipe import RecipeError


@pytest.fixture
def train(tokenizer, dataset, config, tmp_path):
    def run(model, every_steps=None, num_rows=16, **fields):
        trainer = LoopDropoutSFTTrainer(
            model,
            config(output_dir=str(tmp_path / "run"), **fields),
            train_dataset=dataset.select(range(32)),
            eval_dataset=dataset.select(range(32, 48)),
            processing_class=tokenizer,
        )
        if every_steps is not None:
            trainer.add_callback(LiveDiagnosticsCallback(trainer, every_steps, num_rows))
        trainer.train()
        return trainer

    return run


def live_logs(trainer):
    return [logs for logs in trainer.state.log_history if "live/seconds" in logs]


@pytest.mark.parametrize(
    "fields", [{}, {"padding_free": True, "max_length": None}, {"gradient_accumulation_steps": 2}]
)
def test_training_is_the_same_to_the_last_bit(train, make_tiny, fields):
    if fields and make_tiny is not tiny_ouro:
        pytest.skip("one family is enough for the layouts of a batch")
    runs = []
    for every in (None, 2):
        trainer = train(make_tiny(), max_steps=5, **fields, every_steps=every)
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
    trainer = train(tiny_ouro(), max_steps=3, every_steps=3, num_rows=6, learning_rate=0.05)
    (log,) = live_logs(trainer)  # the end falls on a step that was measured
    batch = trainer.data_collator([trainer.eval_dataset[index] for index in range(6)])
    activation = single_loop_activation(trainer.model, [batch])
    assert [log[f"live/rho_loop_{t}"] for t in (1, 2, 3, 4)] == pytest.approx(activation.reductions, abs=1e-3)
    readouts = [log[f"live/readout_loop_{t}"] for t in (1, 2, 3, 4)]
    assert readouts == pytest.approx(readout_losses(trainer.model, [batch]), rel=1e-5)
    assert log["live/loss_dose_0"] == pytest.approx(activation.frozen, rel=1e-5)
    assert log["live/loss_dose_1"] == pytest.approx(activation.all_on, rel=1e-5)
    assert log["live/loss_dose_2"] != log["live/loss_dose_0.5"]
    assert max(map(abs, activation.reductions)) > 0.1


def test_what_it_cannot_measure_is_refused(tokenizer, dataset, config):
    trainer = LoopDropoutSFTTrainer(tiny_ouro(), config(), train_dataset=dataset, processing_class=tokenizer)
    with pytest.raises(ValueError, match="evaluation rows.*`num_eval_examples`"):
        LiveDiagnosticsCallback(trainer)
    for name in ("every_steps", "num_rows"):
        with pytest.raises(ValueError, match=f"`{name}`"):
            LiveDiagnosticsCallback(trainer, **{name: 0})


def test_a_recipe_asks_for_it(tmp_path, monkeypatch):
    """`live_diagnostics_steps` of a recipe, and the same without evaluation rows."""
    monkeypatch.chdir(tmp_path)
    sft = runpy.run_path(str(Path(__file__).parents[1] / "recipes" / "sft.py"))["main"]
    recipe = {
        "model_name_or_path": "tiny-ouro", "preparation": "arithmetic", "num_train_examples": 8, "num_eval_examples": 4,
        "max_steps": 2, "per_device_train_batch_size": 2, "max_length": 256, "dtype": "float32",
        "bf16": False, "use_cpu": True, "live_diagnostics_steps": 1, "live_diagnostics_rows": 4,
        "report_to": "none", "single_loop_batches": 1,
        "save_strategy": "steps", "save_steps": 2, "output_dir": "out", "disable_tqdm": True,
    }  # fmt: skip
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    sft(["recipe.yaml"])
    history = json.loads(Path("out/checkpoint-2/trainer_state.json").read_text())["log_history"]
    logs = [log for log in history if "live/seconds" in log]
    assert [log["step"] for log in logs] == [1, 2]
    found = json.loads(Path("out/results.json").read_text())["single_loop"]["reductions_percent"]
    assert [logs[-1][f"live/rho_loop_{t}"] for t in (1, 2, 3, 4)] == pytest.approx(found, abs=1e-4)
    with pytest.raises(RecipeError, match="needs rows to evaluate on: give `num_eval_examples` or `eval_files`"):
        sft(["recipe.yaml", "--num_eval_examples", "0", "--output_dir", "other"])
