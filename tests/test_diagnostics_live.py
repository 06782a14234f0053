"""Diagnostics while training: they tell what the adapter does, and training does not notice them."""

import random

import numpy as np
import pytest
import torch
from conftest import tiny_ouro

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer
from loopdropout_trainer.diagnostics import readout_losses, single_loop_activation


@pytest.fixture
def train(tokenizer, dataset, config, tmp_path):
    def run(model, **fields):
        trainer = LoopDropoutSFTTrainer(
            model,
            config(output_dir=str(tmp_path / "run"), **fields),
            train_dataset=dataset.select(range(32)),
            eval_dataset=dataset.select(range(32, 48)),
            processing_class=tokenizer,
        )
        trainer.train()
        return trainer

    return run


def trained(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def live_logs(trainer):
    return [logs for logs in trainer.state.log_history if "live/seconds" in logs]


@pytest.mark.parametrize(
    "fields", [{}, {"padding_free": True, "max_length": None}, {"gradient_accumulation_steps": 2}]
)
def test_training_is_the_same_to_the_last_bit(train, make_tiny, fields):
    if fields and make_tiny is not tiny_ouro:
        pytest.skip("one family is enough for the layouts of a batch")
    runs = []
    for every in (0, 2):
        trainer = train(make_tiny(), max_steps=5, **fields, live_diagnostics_steps=every)
        losses = [
            {k: v for k, v in log.items() if "time" not in k and "second" not in k}
            for log in trainer.state.log_history
        ]
        losses = [log for log in losses if "live/loss_dose_0" not in log]
        states = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        runs.append((trained(trainer), losses, states, live_logs(trainer)))
    (without, losses, states, none), (with_it, other_losses, other_states, logs) = runs
    assert all(torch.equal(without[name], with_it[name]) for name in without)
    assert losses == other_losses
    assert torch.equal(states[0], other_states[0]) and states[1:] == other_states[1:]
    assert not none and [log["step"] for log in logs] == [2, 4, 5]


def test_what_is_logged_is_what_the_saved_adapter_shows(train):
    trainer = train(tiny_ouro(), max_steps=3, live_diagnostics_steps=3, live_diagnostics_rows=6, learning_rate=0.05)
    (log,) = live_logs(trainer)  # the end falls on a step that was measured
    rows = [trainer.eval_dataset[index] for index in range(6)]
    batch = trainer.data_collator(rows)
    activation = single_loop_activation(trainer.model, [batch])
    assert [log[f"live/rho_loop_{t}"] for t in (1, 2, 3, 4)] == pytest.approx(activation.reductions, abs=1e-3)
    assert [log[f"live/readout_loop_{t}"] for t in (1, 2, 3, 4)] == pytest.approx(
        readout_losses(trainer.model, [batch]), rel=1e-5
    )
    assert log["live/loss_dose_0"] == pytest.approx(activation.frozen, rel=1e-5)
    assert log["live/loss_dose_1"] == pytest.approx(activation.all_on, rel=1e-5)
    assert log["live/loss_dose_2"] != log["live/loss_dose_0.5"]
    assert max(map(abs, activation.reductions)) > 0.1


def test_its_cost_is_told(train, caplog):
    with caplog.at_level("INFO", logger="loopdropout_trainer"):
        trainer = train(tiny_ouro(), max_steps=2, live_diagnostics_steps=1)
    (line,) = [record.getMessage() for record in caplog.records if "Live diagnostics took" in record.getMessage()]
    seconds = sum(log["live/seconds"] for log in live_logs(trainer))
    assert float(line.split()[3]) == pytest.approx(seconds, abs=0.06) and "% of the training's time" in line


def test_it_is_off_by_default_and_bad_numbers_are_refused(tmp_path):
    assert LoopDropoutConfig(str(tmp_path), bf16=False).live_diagnostics_steps == 0
    with pytest.raises(ValueError, match="`live_diagnostics_rows` must be at least 1; got 0"):
        LoopDropoutConfig(str(tmp_path), bf16=False, live_diagnostics_rows=0)
