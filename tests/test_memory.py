"""The memory of a training step is known before it is taken, and decides whether layers are computed twice."""

import logging

import pytest
import torch
from conftest import TINY, tiny_ouro
from peft import get_peft_model
from test_speed import GATES, MIXED, adapted, optimised
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from trl import SFTConfig
from trl.trainer.utils import add_fused_lm_head

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, default_peft_config
from loopdropout_trainer.lora import add_gates, trained_lora_parameters
from loopdropout_trainer.looped import GatedBatch, Optimisations, applied_gates, costs
from loopdropout_trainer.training import memory
from loopdropout_trainer.training.distributed import CHECKPOINTING_FIELDS
from loopdropout_trainer.training.memory import KEPT_PART, WORK_PART, memory_advice, step_memory


class Ledger(TorchDispatchMode):
    """Knows the bytes that were made in the block and are still held, weights left out, and the most that were."""

    def __init__(self, model):
        super().__init__()
        self.peak = 0
        self.storages = {StorageWeakRef(weight.untyped_storage()): 0 for weight in model.parameters()}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                self.storages.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.held())
        return result

    def held(self):
        return sum(size for storage, size in self.storages.items() if not storage.expired())


ATTENTION = {"attn_implementation": "eager"}
CASES = [(family, fields) for family in TINY for fields in ({}, {"checkpointing": True})]
CASES += [("ouro", ATTENTION), ("huginn", ATTENTION)]


@pytest.mark.parametrize(("family", "fields"), CASES, ids=str)
def test_the_estimate_is_at_least_what_a_real_step_keeps_and_not_much_more(family, fields, monkeypatch):
    monkeypatch.setattr(costs, "LAUNCH_SECONDS", 0)  # as for models of a size that matters
    fields, rows, length, loops = dict(fields), 3, 160, 5
    eager = {name: fields.pop(name) for name in ATTENTION if name in fields}
    model = TINY[family](num_loops=loops, intermediate_size=112, **eager).train()
    peft_model = get_peft_model(model, default_peft_config(model))
    add_gates(peft_model, in_activation_dtype=True, fused=True)
    model.loop_state.apply(GatedBatch(optimisations=Optimisations(packs=not eager)))
    if "checkpointing" in fields:
        peft_model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(2, 258, (rows, length))
    with Ledger(peft_model) as ledger:
        output = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    measured = ledger.held()
    del output
    estimate = step_memory(peft_model, rows, length, loops, **fields)
    assert 0.95 * measured <= estimate[KEPT_PART] <= 1.5 * measured


def test_the_head_of_a_large_vocabulary_is_in_the_estimate(monkeypatch):
    monkeypatch.setattr(costs, "LAUNCH_SECONDS", 0)
    model = tiny_ouro(vocab_size=40_000).train()  # wider than TRL's tile
    add_fused_lm_head(model)
    peft_model = get_peft_model(model, default_peft_config(model))
    add_gates(peft_model, in_activation_dtype=True, fused=True)
    ids = torch.randint(2, 258, (3, 60))
    with Ledger(peft_model) as ledger:
        peft_model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
    estimate = step_memory(peft_model, 3, 60, model.config.num_loops)
    assert 0.95 * ledger.peak <= estimate[KEPT_PART] + estimate[WORK_PART] <= 2 * ledger.peak


def test_frozen_layers_after_the_loop_keep_what_they_pass_gradients_through(monkeypatch):
    monkeypatch.setattr(costs, "LAUNCH_SECONDS", 0)
    held, estimates = {}, {}
    for coda in (1, 9):
        model = TINY["raven_llama"](num_loops=2, n_layers_in_coda=coda).train()
        peft_model = get_peft_model(model, default_peft_config(model))
        add_gates(peft_model, in_activation_dtype=True, fused=True)
        ids = torch.randint(2, 258, (3, 60))
        with Ledger(peft_model) as ledger:
            output = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        held[coda], estimates[coda] = ledger.held(), step_memory(peft_model, 3, 60, 2)[KEPT_PART]
        del output
    assert held[9] - held[1] <= estimates[9] - estimates[1] <= 1.6 * (held[9] - held[1])


def test_what_frozen_loops_hold_is_saved_by_their_share(monkeypatch):
    monkeypatch.setattr(costs, "LAUNCH_SECONDS", 0)
    model, held = adapted(tiny_ouro()), {}
    state, ids = add_gates(model, in_activation_dtype=True), torch.randint(2, 258, (4, 32))
    for name, gates in GATES.items():
        with applied_gates(state, gates), optimised(model, True, trained_lora_parameters(model)):
            with Ledger(model) as ledger:
                loss = model(ids, labels=ids).loss
            held[name] = ledger.held()
            del loss
    frozen = ((MIXED.cumsum(dim=0) == 0).sum() / MIXED.numel()).item()  # 7 of 16 loops
    share = (held["mixed"] - held["none active"]) / (held["all active"] - held["none active"])
    assert 1 - share == pytest.approx(frozen, abs=0.02)


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


def test_advice_names_the_first_change_that_fits(config, monkeypatch):
    model = tiny_ouro(num_loops=2)
    adapter = default_peft_config(model)
    peft_model = get_peft_model(model, adapter)

    def advice(usable):
        monkeypatch.setattr(memory, "usable_memory", lambda args: usable)
        return memory_advice(model.config, "float32", adapter, config(per_device_train_batch_size=8), longest=256)

    plain, layers = (
        sum(step_memory(peft_model, 8, 256, 2, checkpointing).values()) for checkpointing in (False, True)
    )
    assert layers < plain
    assert "8 rows of 256 tokens" in advice(plain)
    assert "so that `gradient_checkpointing` stays off" in advice(plain)
    last = advice(layers).splitlines()[-1]
    assert "gradient_checkpointing: true" in last and last.endswith(f"{layers / 1e6:.3g} MB, which fits")
    assert "`per_device_train_batch_size: 4`" in advice(0.9 * layers)
