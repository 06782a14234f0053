"""The memory of a training step is known before it is taken, and decides whether layers are computed twice."""

import logging

import pytest
import torch
from conftest import TINY, tiny_ouro
from peft import get_peft_model
from test_recomputation import Ledger
from trl import SFTConfig

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, default_peft_config
from loopdropout_trainer.adapters import add_gates
from loopdropout_trainer.looped import TrainingPolicy, costs
from loopdropout_trainer.training import memory
from loopdropout_trainer.training.distributed import CHECKPOINTING_FIELDS
from loopdropout_trainer.training.memory import ShapeModel, StepSettings, memory_advice, memory_bound


def held_bytes(make, settings):
    """What a real forward pass of a tiny model holds when it is over, weights left out."""
    model = make(num_loops=settings.num_loops).train()
    peft_model = get_peft_model(model, default_peft_config(model))
    add_gates(peft_model, in_activation_dtype=True, fused=True)
    model.training_policy = TrainingPolicy(settings.remove_padding)
    model.recompute_pointwise(settings.recompute_pointwise)
    if settings.checkpointing:
        peft_model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(2, 258, (settings.rows, settings.length))
    with Ledger(peft_model) as ledger:
        output = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    held = ledger.held()
    del output
    return held


CASES = [(family, {}) for family in TINY]
CASES += [("ouro", {"recompute_pointwise": True}), ("loopus", {"checkpointing": True})]


@pytest.mark.parametrize(("family", "fields"), CASES, ids=str)
def test_the_estimate_is_what_a_real_step_keeps(family, fields, config, monkeypatch):
    monkeypatch.setattr(costs, "LAUNCH_SECONDS", 0)  # as for models of a size that matters
    settings = StepSettings(rows=3, length=160, num_loops=5, **fields)
    model = TINY[family]()
    shapes = ShapeModel(model.config, torch.float32, default_peft_config(model), config(rule="lora"))
    estimate, measured = shapes.step(settings).kept, held_bytes(TINY[family], settings)
    # Of tiny models the copies of stacked weights are a part; whether there are any depends on the tokens.
    assert 0.93 * measured <= estimate <= (1.25 if settings.checkpointing else 1.07) * measured
    assert shapes.step(settings).total < memory_bound(shapes.model, settings)


@pytest.fixture
def make_trainer(config, dataset, tokenizer):
    def make(args=None, **fields):
        args = args or config(eval_strategy="no", **fields)
        return LoopDropoutSFTTrainer(tiny_ouro(), args, train_dataset=dataset, processing_class=tokenizer)

    return make


def test_layers_are_computed_twice_only_where_memory_does_not_suffice(make_trainer, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    off = make_trainer()
    assert "`gradient_checkpointing` is off: a step of 4 rows of 11 tokens takes at most" in caplog.text
    monkeypatch.setattr(memory, "usable_memory", lambda args: 2e5)
    on = make_trainer()
    assert "`gradient_checkpointing` is on: a step of 4 rows" in caplog.text
    for trainer, expected in ((off, False), (on, True)):
        assert all(getattr(trainer.args, name) == expected for name in CHECKPOINTING_FIELDS)
        trainer.train()
        assert trainer.model.base_model.model.is_gradient_checkpointing == expected
    for got, want in zip(on.model.parameters(), off.model.parameters(), strict=True):
        assert torch.equal(got, want)
    monkeypatch.setattr(memory, "usable_memory", lambda args: None)
    assert make_trainer().args.gradient_checkpointing
    assert "is on: how much memory it takes is not known" in caplog.text


def test_what_the_user_says_stays(make_trainer, monkeypatch, tmp_path):
    assert LoopDropoutConfig("out").gradient_checkpointing is None
    plain = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True, "report_to": "none"}
    given = {
        "said": make_trainer(gradient_checkpointing=True),
        "said by the newest name": make_trainer(**{CHECKPOINTING_FIELDS[0]: True}),
        "TRL's own arguments": make_trainer(SFTConfig(**plain)),
        "compiled": make_trainer(torch_compile=True),
    }
    for name, trainer in given.items():
        assert all(getattr(trainer.args, field) for field in CHECKPOINTING_FIELDS), name
    monkeypatch.setattr(memory, "usable_memory", lambda args: 1.0)
    assert not make_trainer(gradient_checkpointing=False).args.gradient_checkpointing
    assert not make_trainer(recompute_pointwise=True).args.gradient_checkpointing


def test_advice_names_the_first_change_that_fits(config, monkeypatch):
    model = tiny_ouro(num_hidden_layers=1, num_loops=2)
    shapes = ShapeModel(model.config, torch.float32, default_peft_config(model), config())
    monkeypatch.setattr(memory, "ShapeModel", lambda *arguments: shapes)

    def advice(usable, **fields):
        monkeypatch.setattr(memory, "usable_memory", lambda args: usable)
        args = config(per_device_train_batch_size=8, **fields)
        return memory_advice(model.config, "float32", None, args, longest=256)

    take = lambda **fields: shapes.step(StepSettings(8, 256, 2, **fields)).total
    plain, pointwise, layers = take(), take(recompute_pointwise=True), take(checkpointing=True)
    assert layers < pointwise < plain
    assert "8 rows of 256 tokens" in advice(plain)
    assert "so that `gradient_checkpointing` stays off" in advice(plain)
    assert advice(pointwise).endswith(f"`recompute_pointwise: true`: {pointwise / 1e6:.3g} MB, which fits")
    assert advice(layers).endswith(
        f"`gradient_checkpointing: true`, without `recompute_pointwise`: {layers / 1e6:.3g} MB, which fits"
    )
    assert "`per_device_train_batch_size: 4`" in advice(0.9 * layers)
