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
from loopdropout_trainer.training.memory import memory_advice, step_memory


ATTENTION, POINTWISE = {"attn_implementation": "eager"}, {"recompute_pointwise": True}
CASES = [(family, fields) for family in TINY for fields in ({}, POINTWISE, {"checkpointing": True})]
CASES += [("ouro", ATTENTION), ("huginn", ATTENTION)]


@pytest.mark.parametrize(("family", "fields"), CASES, ids=str)
def test_the_estimate_is_at_least_what_a_real_step_keeps_and_not_much_more(family, fields, monkeypatch):
    monkeypatch.setattr(costs, "LAUNCH_SECONDS", 0)  # as for models of a size that matters
    fields, rows, length, loops = dict(fields), 3, 160, 5
    eager = {name: fields.pop(name) for name in ATTENTION if name in fields}
    model = TINY[family](num_loops=loops, intermediate_size=112, **eager).train()
    peft_model = get_peft_model(model, default_peft_config(model))
    add_gates(peft_model, in_activation_dtype=True, fused=True)
    model.training_policy = TrainingPolicy(packs=not eager)
    model.recompute_pointwise(fields.get("recompute_pointwise", False))
    if "checkpointing" in fields:
        peft_model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(2, 258, (rows, length))
    with Ledger(peft_model) as ledger:
        output = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    measured = ledger.held()
    del output
    estimate = step_memory(peft_model, rows, length, loops, **fields)
    assert 0.95 * measured <= estimate["kept"] <= 1.5 * measured


@pytest.fixture
def make_trainer(config, dataset, tokenizer):
    def make(args=None, **fields):
        return LoopDropoutSFTTrainer(
            tiny_ouro(), args or config(**fields), train_dataset=dataset, processing_class=tokenizer
        )

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


def test_what_the_user_says_stays(make_trainer, monkeypatch, tmp_path):
    assert LoopDropoutConfig("out").gradient_checkpointing is None
    plain = SFTConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    for fields in ({name: True} for name in (*CHECKPOINTING_FIELDS, "torch_compile", "args")):
        trainer = make_trainer(**{name: plain if name == "args" else value for name, value in fields.items()})
        assert all(getattr(trainer.args, field) for field in CHECKPOINTING_FIELDS), fields
    monkeypatch.setattr(memory, "usable_memory", lambda args: 1.0)
    assert not make_trainer(gradient_checkpointing=False).args.gradient_checkpointing
    assert not make_trainer(recompute_pointwise=True).args.gradient_checkpointing


def test_advice_names_the_first_change_that_fits(config, monkeypatch):
    model = tiny_ouro(num_loops=2)
    adapter = default_peft_config(model)
    peft_model = get_peft_model(model, adapter)

    def advice(usable):
        monkeypatch.setattr(memory, "usable_memory", lambda args: usable)
        return memory_advice(model.config, "float32", adapter, config(per_device_train_batch_size=8), longest=256)

    changes = ({}, {"recompute_pointwise": True}, {"checkpointing": True})
    plain, pointwise, layers = (sum(step_memory(peft_model, 8, 256, 2, **change).values()) for change in changes)
    assert layers < pointwise < plain
    assert "8 rows of 256 tokens" in advice(plain)
    assert "so that `gradient_checkpointing` stays off" in advice(plain)
    for usable, field in ((pointwise, "recompute_pointwise: true"), (layers, "gradient_checkpointing: true")):
        last = advice(usable).splitlines()[-1]
        assert field in last and last.endswith(f"{usable / 1e6:.3g} MB, which fits")
    assert "`per_device_train_batch_size: 4`" in advice(0.9 * layers)
