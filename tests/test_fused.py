"""Fused projections follow whatever changes between two forward passes, and step aside where they would be wrong."""

import copy
from contextlib import ExitStack

import pytest
import torch
from conftest import randomise, trained_parameters, with_adapter

from loopdropout_trainer import default_peft_config, use_gates
from loopdropout_trainer.lora import adapted_layers, add_gates
from loopdropout_trainer.lora import fused as fused_module
from loopdropout_trainer.looped import find_looped_model


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
    # q, k and v have one scaling at different ranks; those of gate and up differ, so that they are not fused.
    patterns = {"alpha_pattern": {"k_proj": 16, "up_proj": 3}, "rank_pattern": {"k_proj": 2}}
    model = with_adapter(scale=0.2, r=4, **patterns).train()
    for name in adapters:
        model.add_adapter(name, default_peft_config(model.get_base_model(), r=4))
    fused = randomise(model, 0.2).double()
    plain = copy.deepcopy(fused)
    add_gates(fused, fused=True)
    add_gates(plain)
    return fused, plain


def assert_same_loss_and_gradients(fused, plain):
    results = []
    for model in (fused, plain):
        model.zero_grad()
        loss = model(IDS, labels=IDS).loss
        if loss.requires_grad:
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    torch.testing.assert_close(*results, atol=1e-9, rtol=1e-6)


def step(model):
    """One step of a loop of one's own."""
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(trained_parameters(model).values(), lr=0.5).step()
    model.zero_grad()


def overwrite(model):
    """Change weights behind autograd's back, as loading a checkpoint does."""
    for layer in adapted_layers(model):
        layer.lora_A["default"].weight.data.mul_(3)


def replace(model):
    """Put other parameters in the place of the old ones, as sharding does."""
    for layer in adapted_layers(model):
        for linear in (*layer.lora_A.values(), *layer.lora_B.values()):
            linear.weight = torch.nn.Parameter(linear.weight.detach() * 2)


CHANGES = {
    "an optimizer's step": step,
    "weights written in place": overwrite,
    "other parameters": replace,
    "another adapter": lambda model: model.set_adapter("other"),
    "merged": lambda model: model.merge_adapter(),
    "merged and unmerged": lambda model: (model.merge_adapter(), model.unmerge_adapter()),
    "another scaling": lambda model: [layer.set_scale("default", 0.25) for layer in adapted_layers(model)],
}


@pytest.mark.parametrize("gates", [None, GATES], ids=["unit gates", "inside use_gates"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_passes_is_followed(change, gates, num_fused):
    models = twins("other")
    with ExitStack() as stack:
        for model in models if gates is not None else ():
            stack.enter_context(use_gates(model, gates))
        assert_same_loss_and_gradients(*models)
        assert num_fused() == 4 * 2 * 3  # loops, layers, and what is fused in each: q, k, v together; o; down
        with torch.no_grad():
            before = models[0](IDS, labels=IDS).loss
        for model in models:
            CHANGES[change](model)
        with torch.no_grad():
            changed = abs(models[1](IDS, labels=IDS).loss - before) > 1e-3
        assert changed or change in ("merged", "merged and unmerged")
        assert_same_loss_and_gradients(*models)


def test_nothing_outlives_a_forward_pass_and_gates_of_single_modules_are_not_fused(num_fused):
    models = twins()
    by_module = torch.rand(4, 4, 14, generator=torch.Generator().manual_seed(0)) * 2
    with use_gates(models[0], by_module), use_gates(models[1], by_module):
        assert_same_loss_and_gradients(*models)
    assert num_fused() == 0
    state = find_looped_model(models[0]).loop_state
    with use_gates(models[0], GATES):
        models[0](IDS, labels=IDS).loss.backward()
        assert num_fused() > 0 and (state.running.prepared, state.running.tokens) == (None, None)
        state.announce(state.batch.loop(3, frozen=True))
        with use_gates(models[0], torch.zeros(4)):
            assert state.gates.tolist() == [[0.0]] * 4 and not state.running.frozen
        assert state.gates is GATES and state.running.frozen and state.loop == 3
    assert state.gates is None and state.loop == 0
