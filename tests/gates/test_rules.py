"""Test rules in training: gradients against full matrices, resuming, saving, loading and merging."""

import math
import re
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.conversion import convert_to_lora
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from helpers.errors import user_error
from helpers.files import ROOT, load_script
from helpers.tiny import randomise, tiny_ouro, trained_parameters, with_adapter
from helpers.trainers import assert_same_weights, example_nll, logged
from loopdropout_trainer import LoRADropoutSFTTrainer, default_peft_config, load_adapter, loop_dropout, merge_and_save
from loopdropout_trainer.gates import RULES, Draw, make_rule
from loopdropout_trainer.gates.loop_dropout import LoopDropout
from loopdropout_trainer.lora import adapted_layers, add_gates, physical_layers
from loopdropout_trainer.means import find_fault
from loopdropout_trainer.reports.final_results import describe_left_out_runs, final_results
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.training.callbacks import SensitivityCallback


K, N, M = 4, 4, 14
PROFILE = [0.75, 0.6, 0.4, 0.25]
CASES = {  # config fields; the rules that differ from these in `sample` alone are tested in test_gates.py
    "loop_dropout": {"p": PROFILE}, "module_wise": {"p": PROFILE}, "coto": {"rule_args": {"keep_start": 0.3}},
    "weight_noise": {"p": PROFILE, "rule_args": {"noise_rank": 3}}, "learned": {"p": [0.5]},
    "adaptive": {"rule_args": {"direction": "less", "decay": 0.5}}, "independent": {"p": [0.5]},
    "lora_dropout": {"rule_args": {"num_masks": 2}},
}  # fmt: skip


@pytest.fixture
def make_trainer(make_sft):
    def make(case, **fields):
        if case == "lora_dropout":
            fields["cls"] = LoRADropoutSFTTrainer
        peft_config = default_peft_config(r=4, lora_alpha=8)
        trainer = make_sft(tiny_ouro(), peft_config=peft_config, seed=101, rule=case, **{**CASES[case], **fields})
        trainer.state.max_steps = trainer.args.max_steps
        return trainer

    return make


def batch_of(trainer):
    batch = next(iter(trainer.get_train_dataloader()))
    return batch, (batch["labels"] != -100).sum()


def oracle_loss(model, batch, num_items, update):
    """Return the batch's loss under full matrices W + update(module, layer, loop, example), one example and loop at a time.

    `update` gets the module's index and LoRA layer, and returns an [out, in] matrix.
    """
    ouro, backbone = model.get_base_model(), tiny_ouro(num_loops=1).to(model.dtype).model
    layers = [(name, layer) for name, layer in ouro.model.named_modules() if isinstance(layer, LoraLayer)]
    total = 0
    for example, length in enumerate(batch["attention_mask"].sum(dim=1)):
        ids, labels = (batch[key][example, None, :length] for key in ("input_ids", "labels"))
        x = backbone.embed_tokens(ids)
        for loop in range(K):
            weights = {
                f"{name}.weight": layer.base_layer.weight + update(module, layer, loop, example)
                for module, (name, layer) in enumerate(layers)
            }
            x = functional_call(backbone, weights, (), {"inputs_embeds": x}).last_hidden_state
        total = total + example_nll(ouro.lm_head(x), labels).sum()
    return total / num_items


def full_update(layer, loop):
    """Return (alpha / r) B A, of the loop's pair if factors differ between loops."""
    a, b = (factor["default"].weight.expand(K, -1, -1)[loop] for factor in (layer.lora_A, layer.lora_B))
    return layer.scaling["default"] * b @ a


def gated_update(gates, learned=(1,) * K):
    gates = gates.reshape(*gates.shape[:2], -1).expand(K, N, M)
    return lambda module, layer, loop, example: gates[loop, example, module] * learned[loop] * full_update(layer, loop)


def noisy_update(seeds, p, noise_rank):
    def update(module, layer, loop, example):
        delta, seed = full_update(layer, loop), int(seeds[loop, example, module])
        drawn = torch.randn(noise_rank, sum(delta.shape), generator=torch.Generator().manual_seed(seed)).double()
        g_in, g_out = drawn.split(delta.shape[::-1], dim=1)
        scale = delta.detach().norm() / math.sqrt((1 - p[loop]) * delta.numel() * noise_rank)
        return delta + (seed != 0) * scale * g_out.T @ g_in

    return update


def sparse_update(seeds, p):
    def update(module, layer, loop, example):
        delta, generator = full_update(layer, loop), torch.Generator().manual_seed(int(seeds[module]))
        kept = torch.rand(sum(delta.shape), generator=generator) >= p
        mask_in, mask_out = (kept / (1 - p)).split(delta.shape[::-1])
        return mask_out[:, None] * delta * mask_in

    return update


def draw_of(trainer, draw_index=0):
    layers, ids = physical_layers(trainer.model), [(row, 0) for row in range(N)]
    return Draw(101, 0, ids, K, num_steps=4, num_modules=M, layers=layers, draw_index=draw_index)


def oracle_update(trainer, draw):
    rule = trainer.rule
    if rule.name == "weight_noise":
        return noisy_update(rule.seeds(draw), PROFILE, 3)
    if rule.name == "lora_dropout":
        return sparse_update(rule.seeds(draw), 0.5)
    learned = trainer.model.base_model.lora_loop_gates["default"] if rule.name == "learned" else (1,) * K
    return gated_update(rule.sample(draw), learned)


RUNS = [*((case, case not in ("loop_dropout", "coto")) for case in CASES), ("weight_noise", False)]


@pytest.mark.parametrize(("case", "checkpointing"), RUNS)
def test_gradients_equal_full_matrices(case, checkpointing, make_trainer):
    trainer = make_trainer(case)
    model = randomise(trainer.model.double())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch, num_items = batch_of(trainer)
    loss = trainer.training_step(model, dict(batch), num_items)
    parameters = list(trained_parameters(model).values())
    # An adapter that is switched off for the step is left out; its gradient is zero.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]

    updates = [oracle_update(trainer, draw_of(trainer, index)) for index in range(trainer.rule.draws_per_batch)]
    expected = sum(oracle_loss(model, batch, num_items, update) for update in updates) / len(updates)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = torch.autograd.grad(expected, parameters, materialize_grads=True)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert (gradient - want).norm() <= 1e-5 * want.norm().clamp(min=1)


@pytest.mark.parametrize("case", ["weight_noise", "learned", "adaptive", "independent", "lora_dropout"])
def test_rule_trains_resumes_and_loads(case, make_trainer):
    trainer, resumed = (make_trainer(case, save_strategy="steps", save_steps=2, max_steps=3) for _ in range(2))
    folder = trainer.args.output_dir
    trainer.train()
    assert any(p.any() for name, p in trained_parameters(trainer.model).items() if "lora_B" in name)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert_same_weights(resumed, trainer)
    assert resumed.rule.state_dict() == trainer.rule.state_dict()

    # The saved adapter at unit gates is the evaluated model.
    loaded = load_adapter(tiny_ouro(), f"{folder}/checkpoint-3")
    weights = [get_peft_model_state_dict(model) for model in (loaded, trainer.model)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    (batch,) = trainer.get_eval_dataloader()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loaded(**batch).loss.item(), rel=1e-5)


@pytest.mark.parametrize("case", ["weight_noise", "module_wise"])
def test_packed_examples_keep_their_draws(case, make_trainer):
    # One padding-free row of four examples has the loss of four rows, since the example ids agree.
    losses = []
    for fields in ({}, {"padding_free": True, "max_length": None}):
        trainer = make_trainer(case, **fields)
        losses.append(trainer.training_step(randomise(trainer.model), *batch_of(trainer)))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


def test_lora_dropout_scales_alpha_once(make_sft, tmp_path):
    # Rescaled masks at alpha q^2 equal the original masks at alpha; q^2 applies to a new adapter only.
    asked = default_peft_config(r=4, lora_alpha=32, alpha_pattern={"q_proj": 16})
    fields = {"cls": LoRADropoutSFTTrainer, "rule": "lora_dropout", "p": [0.2]}
    trainer = make_sft(tiny_ouro(), peft_config=asked, **fields)
    trainer.save_model(tmp_path)
    again = make_sft(load_adapter(tiny_ouro(), tmp_path, is_trainable=True), **fields)
    for model in (trainer.model, again.model):
        strengths = [layer.scaling["default"] for layer in adapted_layers(model)]
        assert strengths == pytest.approx([4 * 0.8**2, *[8 * 0.8**2] * 6] * 2)
    assert (asked.lora_alpha, asked.alpha_pattern) == (32, {"q_proj": 16})


def test_coto_skips_inactive_layers(make_trainer):
    trainer = make_trainer("coto", rule_args={"keep_start": 0.0})
    calls = []
    for index, layer in zip([0] * 7 + [1] * 7, adapted_layers(trainer.model), strict=True):
        layer.lora_A["default"].register_forward_hook(lambda *_, index=index: calls.append(index))
    trainer.training_step(trainer.model, *batch_of(trainer))
    assert calls in ([0] * 7 * K, [1] * 7 * K)


def test_independent_loops_start_differently():
    model = get_peft_model(tiny_ouro(), default_peft_config(r=4))
    layer = adapted_layers(model)[0]
    shared, before = layer.lora_A["default"].weight.clone(), torch.get_rng_state()
    add_gates(model, rule=make_rule("independent"), seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    factors = layer.lora_A["default"].weight
    assert torch.equal(factors[0], shared) and len(factors.unique(dim=0)) == K
    assert (factors.abs() <= 1 / math.sqrt(factors.shape[-1])).all()


def test_equal_learned_gates_are_merged(make_trainer, tmp_path):
    trainer = make_trainer("learned")
    model = randomise(trainer.model).eval()
    with user_error("each loop"):
        model.merge_and_unload()
    model.base_model.lora_loop_gates["default"].data.fill_(0.5)
    ids = torch.arange(2, 14).view(2, 6)
    merged = AutoModelForCausalLM.from_pretrained(merge_and_save(model, tmp_path / "merged"))
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_independent_adapter_needs_its_depth(make_trainer, tmp_path):
    make_trainer("independent").save_model(tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(tiny_ouro(), str(tmp_path))
    with user_error("`num_loops` must be 4 for .*, got 6"):
        load_adapter(tiny_ouro(num_loops=6), tmp_path)
    loaded = load_adapter(tiny_ouro(), tmp_path, is_trainable=True)
    with user_error("'loop_dropout' trains a shared adapter"):
        add_gates(loaded, rule=make_rule("loop_dropout"))


@pytest.mark.parametrize("case", ["loop_dropout", "learned", "independent"])
def test_only_shared_updates_convert_and_combine(case):
    model = with_adapter(scale=0.3)
    add_gates(model, rule=make_rule(case))
    assert model.supports_lora_conversion() == (case == "loop_dropout")
    refused = lambda *error: nullcontext() if case == "loop_dropout" else pytest.raises(error[0], match=error[1])
    with refused(TypeError, "do not support LoRA conversion"):
        convert_to_lora(model, 4)
    with refused(ValueError, "'default' has"):
        model.add_weighted_adapter(["default"], [1.0], "other")


def test_trainers_of_one_model_keep_their_rules(make_trainer, make_sft):
    alone, shared = (make_trainer("lora_dropout", max_steps=2) for _ in range(2))
    alone.train()
    make_sft(shared.model, seed=101)  # which also seeds the order of examples
    shared.train()
    assert_same_weights(alone, shared)


@pytest.mark.parametrize(
    ("make_gates", "message"),
    [
        (
            lambda k, n: torch.zeros(n, k),
            r"\[K, N, M\] with K = 4 loops, N = 2 examples and M = 14 .* got the shape \[2, 4\]",
        ),
        (lambda k, n: torch.zeros(k, n + 1), r"got the shape \[4, 3\]"),
        (lambda k, n: torch.zeros(k, n, 3), r"got the shape \[4, 2, 3\]"),
        (lambda k, n: torch.full((k, n), torch.inf), "must be finite numbers, got tensor"),
        (lambda k, n: torch.zeros(k, n, dtype=torch.complex64), "must be real numbers, got torch.complex64"),
        (lambda k, n: torch.zeros(k, n, device="meta"), "on the device meta"),
    ],
)
def test_wrong_samples_raise(make_gates, message, make_sft, monkeypatch):
    trainer = make_sft(tiny_ouro(), per_device_train_batch_size=2)
    monkeypatch.setattr(LoopDropout, "sample", lambda self, draw: make_gates(K, len(draw.example_ids)))
    with user_error(f"Gates of the rule 'loop_dropout' .*{message}"):
        trainer.train()
    model = with_adapter().train()
    loop_dropout(model)
    with user_error(f"Gates of `sample` .*{message}"):
        model(torch.arange(2, 12).view(2, 5))


def test_adaptive_sensitivity_is_gate_gradient(make_trainer):
    trainer = make_trainer("adaptive")
    batch, num_items = batch_of(trainer)
    trainer.training_step(randomise(trainer.model), dict(batch), num_items)
    (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, SensitivityCallback))
    callback.on_step_end(trainer.args, trainer.state, trainer.control)

    gates = make_rule("loop_dropout").sample(draw_of(trainer)).requires_grad_()
    oracle_loss(trainer.model, batch, num_items, gated_update(gates)).backward()
    share = gates.grad.abs().sum(dim=1).double()
    torch.testing.assert_close(trainer.rule.estimate, share * K / share.sum(), rtol=1e-4, atol=0)


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
    with patch.dict(RULES):
        exec(ALTERNATING, {"__name__": "alternating"})
        trainer = train(rule="alternating", max_steps=2)
    assert [logged(trainer, f"active_loop_{t}") for t in range(1, 5)] == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert logged(trainer, "gate_mean") == [1, 1]


@pytest.mark.parametrize("field", ["q", "p"])
def test_own_rule_without_a_default_names_its_field(field):
    fix = {"q": r"`rule_args=\{'q': ...\}`", "p": "`p`"}[field]
    code = ALTERNATING.replace("def sample", f"{field}: float\n\n    def sample")
    with patch.dict(RULES):
        exec(code, {"__name__": "alternating"})
        with user_error(f"`rule: alternating` must have a value of its field '{field}', got none. Set {fix}"):
            make_rule("alternating")
        assert getattr(make_rule("alternating", **{field: 0.5}), field) == 0.5
        if field == "p":  # which an own rule can call the probability of something else
            with user_error("`rule: alternating` has no field 'q'. It takes p.$"):
                make_rule("alternating", q=0.5)


def test_example_of_own_rule_trains(train):
    file = ROOT / "recipes" / "examples" / "drop_one_loop.py"
    code = file.read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```" in (ROOT / "docs" / "extending.md").read_text()
    with patch.dict(RULES):
        rule = load_script(file.relative_to(ROOT)).DropOneLoop(p=0.75)
        gates = rule.sample(Draw(seed=0, step=0, example_ids=[(row, 0) for row in range(4000)], num_loops=K))
        assert ((gates == 0).sum(dim=0) <= 1).all() and torch.allclose(gates.mean(dim=1), torch.ones(K), atol=0.03)
        trainer = train(rule="drop_one_loop", p=0.5, max_steps=1)
    assert trainer.last_gates.sampled.dtype == torch.float32


HALVED = """
from dataclasses import dataclass
import torch
from loopdropout_trainer.gates import GateRule, register_rule

@register_rule
@dataclass(frozen=True)
class Halved(GateRule):
    name = "halved"
    factor: float = 0.5

    def sample(self, draw):
        return self.factor * 2 * (draw.uniforms("halved", draw.num_loops).T < 0.5).float() + 0 * torch.rand(1)
"""


@pytest.mark.parametrize(("factor", "has_unit_mean"), [(0.5, True), (1, True), (0.5, False)])
def test_mean_gate_of_own_rule_is_measured(train, log, factor, has_unit_mean):
    """The measurement does not change torch's random state."""
    says = (
        r"rule 'halved' must have the mean 1, .* over 2,048 examples it is 0\.\d+ in loop 1, .*`has_unit_mean = False`"
    )
    with patch.dict(RULES):
        exec(HALVED, {"__name__": "halved"})
        RULES["halved"].has_unit_mean = has_unit_mean
        trainer = train(rule="halved", rule_args={"factor": factor}, max_steps=1)
    rule = trainer.rule
    is_wrong = factor == 0.5 and has_unit_mean
    final = final_results(load_results(trainer.args.output_dir))
    in_report = r"The gates of Halved do not have the mean 1 .* \(it is 0\.\d+ in loop 1, .* in loop 4\), but all"
    assert bool(re.search(in_report, " ".join(describe_left_out_runs(final, final)))) is is_wrong
    assert bool(re.search(says, log.text)) is is_wrong
    log.clear()
    loop_dropout(with_adapter(), rule=rule)
    assert ("must have the mean 1" in log.text) is is_wrong
    log.clear()
    handle = loop_dropout(with_adapter())
    handle.rule = rule
    assert ("must have the mean 1" in log.text) is is_wrong
    log.clear()
    handle.rule = rule  # as a training loop that sets it at each step
    assert log.text == ""
    assert is_wrong is (find_fault(rule, K, physical_layers(with_adapter())) is not None)
    assert is_wrong is (find_fault(rule, K, [0], batch_size=5000) is not None)  # one batch has enough examples
    torch.manual_seed(0)
    state = torch.get_rng_state()
    find_fault(rule, K, [0])
    assert torch.equal(torch.get_rng_state(), state)


def test_rule_of_a_global_random_state_warns(make_sft, log):
    """It is not registered either, so a trainer could not save its name."""

    class Global(LoopDropout):
        name = "global"

        def sample(self, draw):
            return 2 * torch.randint(2, (draw.num_loops, len(draw.example_ids)))

    loop_dropout(with_adapter(), rule=Global())
    says = "The rule 'global' must draw the same gates for the same `draw`, but two calls of `sample` differ"
    assert says in log.text and "`draw.uniforms`" in log.text and "the mean 1" not in log.text
    Global.sample = lambda self, draw: (torch.rand(draw.num_loops, len(draw.example_ids)) < 0.5).float()
    fault = find_fault(Global(), K, [0])
    assert says in fault.warning and "The gates of the rule 'global' must have the mean 1" in fault.warning
    assert fault.means == pytest.approx([0.5] * K, abs=0.05)
    with user_error("`rule` must be a rule with `@register_rule`, got "):
        make_sft().rule = Global()
