"""Test rules in training: gradients against full matrices, resuming, saving, loading and merging."""

import json
import math
import warnings
from unittest.mock import patch

import pytest
import torch
from conftest import Recorder, Recording, randomise, tiny_ouro, trained_parameters
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from torch.func import functional_call
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from loopdropout_trainer import LoRADropoutSFTTrainer, default_peft_config, load_adapter, merge_and_save
from loopdropout_trainer.callbacks import SensitivityCallback
from loopdropout_trainer.gates import RULES, Draw, make_rule
from loopdropout_trainer.lora import ADAPTER_KINDS, adapted_layers, add_gates, physical_layers


K = 4
PROFILE = [0.75, 0.6, 0.4, 0.25]
CASES = {  # config fields; the rules that differ from these in `sample` alone are tested in test_gates.py
    "loop_dropout": {"p": PROFILE}, "module_wise": {"p": PROFILE}, "coto": {"rule_args": {"keep_start": 0.3}},
    "weight_noise": {"p": PROFILE, "rule_args": {"noise_rank": 3}}, "learned": {"p": [0.5]},
    "adaptive": {"rule_args": {"direction": "less", "decay": 0.5}}, "independent": {"p": [0.5]},
    "lora_dropout": {"rule_args": {"num_masks": 2}},
}  # fmt: skip


class PassRecorder(Recording, LoRADropoutSFTTrainer):
    pass


@pytest.fixture
def make_trainer(make_trainer):
    def make(case, **fields):
        peft_config = default_peft_config(tiny_ouro(), r=4, lora_alpha=8)
        fields = {"seed": 101, "rule": case, "max_steps": 4, "save_strategy": "no", **CASES.get(case, {}), **fields}
        cls = PassRecorder if case == "lora_dropout" else Recorder
        trainer = make_trainer(cls=cls, peft_config=peft_config, **fields)
        trainer.model.to("cpu")
        return trainer

    return make


def adapter_of(model):
    return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}


def batch_of(trainer):
    batch = next(iter(trainer.get_train_dataloader()))
    return batch, (batch["labels"][:, 1:] != -100).sum()


# --- Oracles: the explicit loop with a full matrix for every adapted weight ------------------------------


def oracle_loss(model, batch, num_items, update):
    """Return the batch's loss under W + update(module, loop, example), one example and one loop at a time.

    `update` gets the module's index and LoRA layer, and returns an [out, in] matrix.
    """
    ouro, plain = model.get_base_model(), tiny_ouro(num_hidden_layers=1).model.layers[0]
    layers = {id(layer): index for index, layer in enumerate(adapted_layers(model))}
    total = 0.0
    for example in range(len(batch["input_ids"])):
        length = int(batch["attention_mask"][example].sum())
        ids, labels = (batch[key][example : example + 1, :length] for key in ("input_ids", "labels"))
        positions = torch.arange(length).unsqueeze(0)
        x = ouro.model.embed_tokens(ids)
        rotary = ouro.model.rotary_emb(x, positions)
        for loop in range(K):
            for block in ouro.model.layers:
                weights = dict(block.state_dict())
                for name, layer in block.named_modules():
                    if id(layer) in layers:
                        base = weights.pop(f"{name}.base_layer.weight")
                        weights[f"{name}.weight"] = base + update(layers[id(layer)], layer, loop, example)
                weights = {name: weight for name, weight in weights.items() if "lora_" not in name}
                inputs = {"attention_mask": None, "position_embeddings": rotary}
                x = functional_call(plain, weights, (x,), inputs, strict=True)
            x = ouro.model.norm(x)
        logits = ouro.lm_head(x)[0, :-1]
        total = total + F.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum")
    return total / num_items


def full_update(layer, loop):
    """Return (alpha / r) B A, of the loop's pair if factors differ between loops."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    a, b = (a[loop], b[loop]) if a.dim() == 3 else (a, b)
    return b @ a * layer.scaling["default"]


def gated_update(gates, learned=None):
    def update(module, layer, loop, example):
        gate = gates[loop, min(example, gates.shape[1] - 1)]
        gate = gate[module] if gate.dim() else gate
        gate = gate if learned is None else gate * learned[loop]
        return gate * full_update(layer, loop)

    return update


def noisy_update(seeds, p, noise_rank, c=1.0):
    def update(module, layer, loop, example):
        delta = full_update(layer, loop)
        seed = int(seeds[loop, example, module])
        if seed == 0:
            return delta
        d_out, d_in = delta.shape
        drawn = torch.randn(noise_rank, d_in + d_out, generator=torch.Generator().manual_seed(seed)).to(delta.dtype)
        g_in, g_out = drawn[:, :d_in], drawn[:, d_in:].T
        norm = torch.linalg.matrix_norm(delta).detach()
        return delta + c * norm / math.sqrt((1 - p[loop]) * d_out * d_in * noise_rank) * (g_out @ g_in)

    return update


def sparse_update(seeds, p):
    def update(module, layer, loop, example):
        d_out, d_in = layer.out_features, layer.in_features
        kept = torch.rand(d_in + d_out, generator=torch.Generator().manual_seed(int(seeds[module]))) >= p
        delta = full_update(layer, loop)
        masks = (kept / (1 - p)).to(delta.dtype)
        return torch.diag(masks[d_in:]) @ delta @ torch.diag(masks[:d_in])

    return update


def draw_of(trainer, num_examples, **fields):
    layers, ids = physical_layers(trainer.model), [(row, 0) for row in range(num_examples)]
    common = {"seed": 101, "step": 0, "num_steps": trainer.state.max_steps, "num_loops": K}
    return Draw(**common, example_ids=ids, num_modules=len(layers), layers=layers, **fields)


RUNS = [*((case, case not in ("loop_dropout", "coto")) for case in CASES), ("weight_noise", False)]


@pytest.mark.parametrize(("case", "checkpointing"), RUNS)
def test_gradients_equal_full_matrices(case, checkpointing, make_trainer):
    trainer = make_trainer(case)
    model, rule = trainer.model.double(), trainer.rule
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    randomise(model)
    batch, num_items = batch_of(trainer)
    parameters = trained_parameters(model)
    trainer.state.max_steps = 4
    loss = trainer.training_step(model, dict(batch), num_items)
    # An adapter that is switched off for the step is left out; its gradient is zero.
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    model.zero_grad()

    updates = []
    for pass_index in range(rule.passes):
        draw = draw_of(trainer, len(batch["input_ids"]), pass_index=pass_index)
        if rule.name == "weight_noise":
            updates.append(noisy_update(rule.seeds(draw), PROFILE, 3))
        elif rule.name == "lora_dropout":
            updates.append(sparse_update(rule.seeds(draw), 0.5))
        else:
            learned = dict(model.named_parameters()).get("base_model.lora_loop_gates.default")
            updates.append(gated_update(rule.sample(draw), learned))
    expected = sum(oracle_loss(model, batch, num_items, update) for update in updates) / len(updates)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, p in parameters.items():
        wanted = torch.zeros_like(p) if p.grad is None else p.grad
        assert (gradients[name] - wanted).norm() <= 1e-5 * max(1.0, float(wanted.norm())), name


# --- Complete runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_rule_trains_resumes_and_loads(case, make_trainer, tmp_path):
    out = str(tmp_path / "run")
    fields = {"save_strategy": "steps", "save_steps": 2, "output_dir": out, "max_steps": 3}
    trainer = make_trainer(case, **fields)
    initial = adapter_of(trainer.model)
    trainer.train()
    final = adapter_of(trainer.model)
    assert any(not torch.equal(final[name], initial[name]) for name in final)

    resumed = make_trainer(case, **fields)
    resumed.train(resume_from_checkpoint=f"{out}/checkpoint-2")
    again = adapter_of(resumed.model)
    assert all(torch.allclose(again[name], final[name], rtol=0, atol=1e-7) for name in final)
    assert json.dumps(resumed.rule.state_dict()) == json.dumps(trainer.rule.state_dict())

    # The saved adapter at unit gates is the evaluated model.
    loss = trainer.evaluate()["eval_loss"]
    loaded = load_adapter(tiny_ouro(), f"{out}/checkpoint-3")
    weights = adapter_of(loaded)
    assert weights.keys() == final.keys() and all(torch.equal(weights[name], final[name]) for name in final)
    (batch,) = trainer.get_eval_dataloader()
    assert loss == pytest.approx(loaded(**batch).loss.item(), rel=1e-5)


def test_every_adapter_kind_has_a_case():
    assert {RULES[case].adapter for case in CASES} == {rule.adapter for rule in RULES.values()} == set(ADAPTER_KINDS)


# --- Single rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["weight_noise", "module_wise"])
def test_packed_examples_keep_their_draws(case, make_trainer):
    # One padding-free row of four examples has the loss of four rows, since the example ids agree.
    losses = []
    for fields in ({}, {"padding_free": True, "max_length": None}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = make_trainer(case, **fields)
        randomise(trainer.model)
        batch, num_items = batch_of(trainer)
        num_items = (batch["labels"] != -100).sum()
        losses.append(trainer.training_step(trainer.model, dict(batch), num_items).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("p", [0.5, 0.2])
def test_lora_dropout_scales_alpha_once(p, make_sft, tmp_path):
    # Rescaled masks at alpha q^2 equal the original masks at alpha; q^2 applies to a new adapter only.
    asked = default_peft_config(tiny_ouro(), r=4, lora_alpha=32, alpha_pattern={"q_proj": 16})
    trainer = make_sft(cls=LoRADropoutSFTTrainer, peft_config=asked, rule="lora_dropout", p=[p])
    layers = adapted_layers(trainer.model)
    strengths = [layer.scaling["default"] for layer in layers]
    assert strengths == pytest.approx([4 * (1 - p) ** 2, *[8 * (1 - p) ** 2] * 6] * (len(layers) // 7))
    assert (asked.lora_alpha, asked.alpha_pattern) == (32, {"q_proj": 16})
    trainer.save_model(tmp_path)
    assert [layer.scaling["default"] for layer in adapted_layers(load_adapter(tiny_ouro(), tmp_path))] == strengths

    given = load_adapter(tiny_ouro(), tmp_path, is_trainable=True)
    again = make_sft(given, cls=LoRADropoutSFTTrainer, rule="lora_dropout", p=[p])
    assert [layer.scaling["default"] for layer in adapted_layers(again.model)] == strengths


def test_coto_skips_inactive_layers(make_trainer):
    trainer = make_trainer("coto", rule_args={"keep_start": 0.0, "ramp": 1.0})
    batch, num_items = batch_of(trainer)
    calls = []
    for module, layer in enumerate(adapted_layers(trainer.model)):
        layer.lora_A["default"].register_forward_hook(lambda *_, module=module: calls.append(module))
    trainer.state.max_steps = 10**6
    trainer.training_step(trainer.model, batch, num_items)
    layers = physical_layers(trainer.model)
    assert layers == [0] * 7 + [1] * 7
    assert len({layers[module] for module in calls}) == 1 and len(calls) == 7 * K


def test_independent_loops_start_differently():
    model = get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro(), r=4))
    shared = adapted_layers(model)[0].lora_A["default"].weight.clone()
    before = torch.get_rng_state()
    add_gates(model, rule=make_rule("independent"), seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    factors = adapted_layers(model)[0].lora_A["default"].weight
    assert torch.equal(factors[0], shared) and len(factors.unique(dim=0)) == K
    assert (factors.abs() <= 1 / math.sqrt(factors.shape[-1])).all()


def test_merging_loop_specific_adapters_raises(make_trainer, tmp_path):
    for case in ("independent", "learned"):
        trainer = make_trainer(case)
        randomise(trainer.model)
        with pytest.raises(ValueError, match="each loop"):
            trainer.model.merge_and_unload()

    trainer.model.base_model.lora_loop_gates["default"].data.fill_(0.5)
    batch, _ = batch_of(trainer)
    expected = trainer.model.eval()(**batch).logits
    merged = AutoModelForCausalLM.from_pretrained(merge_and_save(trainer.model, tmp_path / "merged"))
    assert torch.allclose(merged(**batch).logits, expected, atol=1e-5)


def test_independent_adapter_needs_its_depth(make_trainer, tmp_path):
    trainer = make_trainer("independent", max_steps=1)
    trainer.save_model(tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(tiny_ouro(), str(tmp_path))
    with pytest.raises(ValueError, match="belongs to 4 loops, but the model runs 6"):
        load_adapter(tiny_ouro(num_loops=6), tmp_path)
    loaded = load_adapter(tiny_ouro(), tmp_path, is_trainable=True)
    with pytest.raises(ValueError, match="'loop_dropout' trains a shared adapter"):
        add_gates(loaded, rule=make_rule("loop_dropout"))


def test_adaptive_sensitivity_is_gate_gradient(make_trainer):
    trainer = make_trainer("adaptive")
    randomise(trainer.model)
    batch, num_items = batch_of(trainer)
    trainer.training_step(trainer.model, dict(batch), num_items)
    callbacks = [each for each in trainer.callback_handler.callbacks if isinstance(each, SensitivityCallback)]
    callbacks[0].on_step_end(trainer.args, trainer.state, trainer.control)

    gates = make_rule("loop_dropout").sample(draw_of(trainer, len(batch["input_ids"]))).requires_grad_()
    oracle_loss(trainer.model, batch, num_items, gated_update(gates)).backward()
    share = gates.grad.abs().sum(dim=1).double()
    assert torch.allclose(trainer.rule.estimate, share * K / share.sum(), rtol=1e-4)


# --- A new rule -------------------------------------------------------------------------------------------------------

ALTERNATING = '''
from dataclasses import dataclass

import torch

from loopdropout_trainer.gates import GateRule, register_rule


@register_rule
@dataclass(frozen=True)
class Alternating(GateRule):
    """Even steps use the first half of the loops, odd steps the second, at twice the strength."""

    name = "alternating"

    def sample(self, draw):
        late = torch.arange(draw.num_loops).unsqueeze(1) >= draw.num_loops // 2  # [K, 1]
        return 2.0 * (late == bool(draw.step % 2)).float()
'''


def test_new_rule_is_one_class(train):
    assert sum(map(bool, ALTERNATING.splitlines())) == 11  # docs/architecture.md states this number
    with patch.dict(RULES):
        exec(ALTERNATING, {"__name__": "alternating"})
        trainer = train(rule="alternating", max_steps=3)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [[log[f"active_loop_{t}"] for t in range(1, 5)] for log in logs] == [
        [1, 1, 0, 0],
        [0, 0, 1, 1],
        [1, 1, 0, 0],
    ]
    assert [log["gate_mean"] for log in logs] == [1, 1, 1]
