"""Fused projections follow whatever changes between two forward passes, and step aside where they would be wrong."""

import copy
from contextlib import contextmanager

import pytest
import torch
from conftest import tiny_ouro
from peft import get_peft_model

from loopdropout_trainer import LoopDropoutSFTTrainer, default_peft_config, use_gates
from loopdropout_trainer.adapters import add_gates
from loopdropout_trainer.adapters import fused as fused_module
from loopdropout_trainer.looped import GatePlan, find_looped_model


IDS = torch.arange(2, 42).view(4, 10)
GATES = torch.tensor([[0.0, 2, 0, 1], [1, 0, 2, 0], [2, 2, 0, 0], [0, 2, 2, 0]])


@pytest.fixture
def num_fused(monkeypatch):
    """Counts fused projections, so that no test passes because nothing is fused."""
    calls = []
    apply = fused_module.FusedUpdate.apply
    monkeypatch.setattr(fused_module.FusedUpdate, "apply", lambda *given: (calls.append(1), apply(*given))[1])
    return lambda: len(calls)


def twins(*adapters):
    """Two equal models in training, with fused projections and without."""
    model = tiny_ouro().train()
    model = get_peft_model(model, default_peft_config(model, r=4))
    for name in adapters:
        model.add_adapter(name, default_peft_config(model.get_base_model(), r=4))
    model = model.double()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    plain = copy.deepcopy(model)
    add_gates(model, fused=True)
    add_gates(plain)
    return model, plain


def assert_same_loss_and_gradients(fused, plain):
    losses, gradients = [], []
    for model in (fused, plain):
        model.zero_grad()
        loss = model(IDS, labels=IDS).loss
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*losses, atol=1e-9, rtol=1e-9)
    assert len(gradients[0]) == len(gradients[1])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-6)


def step(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()


def overwrite(model):
    """Change weights behind autograd's back, as loading a checkpoint does."""
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data.mul_(3)


def replace(model):
    """Put other parameters in the place of the old ones, as sharding does."""
    for module in model.modules():
        for linear in (*getattr(module, "lora_A", {}).values(), *getattr(module, "lora_B", {}).values()):
            linear.weight = torch.nn.Parameter(linear.weight.detach() * 2)


CHANGES = {
    "an optimizer's step": step,
    "weights written in place": overwrite,
    "other parameters": replace,
    "another adapter": lambda model: model.set_adapter("other"),
    "merged": lambda model: model.merge_adapter(),
    "merged and unmerged": lambda model: (model.merge_adapter(), model.unmerge_adapter()),
    "another scaling": lambda model: [
        m.set_scale("default", 0.25) for m in model.modules() if hasattr(m, "set_scale")
    ],
}


@contextmanager
def gates_of(models, gates):
    if gates is None:
        yield
        return
    with use_gates(models[0], gates), use_gates(models[1], gates):
        yield


@pytest.mark.parametrize("gates", [None, GATES], ids=["unit gates", "inside use_gates"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_passes_is_followed(change, gates, num_fused):
    models = twins("other")
    with gates_of(models, gates):
        assert_same_loss_and_gradients(*models)
        assert num_fused() > 0
        with torch.no_grad():
            before = models[0](IDS, labels=IDS).loss
        for model in models:
            CHANGES[change](model)
        with torch.no_grad():
            changed = abs(models[1](IDS, labels=IDS).loss - before) > 1e-3
        assert changed or change in ("merged", "merged and unmerged")
        assert_same_loss_and_gradients(*models)


def test_a_loop_of_one_s_own_over_a_trainer_s_model_sees_true_losses(config, dataset, tokenizer, num_fused):
    def losses(fused_lora):
        trainer = LoopDropoutSFTTrainer(
            tiny_ouro(), config(fused_lora=fused_lora), train_dataset=dataset, processing_class=tokenizer
        )
        model, seen = trainer.model.train(), []
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(4):
            loss = model(IDS, labels=IDS).loss
            seen.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    fused = losses(True)
    assert num_fused() > 0 and max(fused) - min(fused) > 0.02
    assert fused == pytest.approx(losses(False), abs=1e-4)


@pytest.mark.parametrize("known", [True, False], ids=["", "derived from nothing"])
def test_modules_with_gates_of_their_own_run_one_by_one(known, monkeypatch, num_fused):
    # Gates on an accelerator used to be passed on as they are, so that which modules they leave out was not known.
    fused, plain = twins()
    gates = torch.rand(4, 4, 14, generator=torch.Generator().manual_seed(0)) * 2
    if not known:
        derive = GatePlan.__post_init__

        def forget(plan):
            derive(plan)
            object.__setattr__(plan, "active", None)
            object.__setattr__(plan, "unused_modules", [])

        monkeypatch.setattr(GatePlan, "__post_init__", forget)
    with use_gates(fused, gates), use_gates(plain, gates):
        assert_same_loss_and_gradients(fused, plain)
    assert num_fused() == 0


def test_nothing_outlives_a_forward_pass():
    model, _ = twins()
    state = find_looped_model(model).loop_state
    for gates in (torch.ones(4), GATES):
        with use_gates(model, gates):
            model(IDS, labels=IDS).loss.backward()
            assert (state.step.prepared, state.step.tokens) == (None, None)
    with use_gates(model, GATES):
        state.announce(state.plan.step(3, frozen=True))
        inner = torch.zeros(4)
        with use_gates(model, inner):
            assert state.gates.tolist() == [[0.0]] * 4 and not state.step.frozen
        assert state.gates is GATES and state.step.frozen and state.loop == 3
    assert state.gates is None and state.loop == 0
