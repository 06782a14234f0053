"""Recomputing pointwise results keeps less, runs no matrix product twice, and changes no bit of a loss or gradient."""

from collections import Counter

import pytest
import torch
from conftest import TINY, assert_same_weights, tiny_ouro
from test_speed import GATES, MIXED, adapted, batch, loss_and_gradients, training_policy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from loopdropout_trainer.adapters import add_gates, trained_lora_parameters
from loopdropout_trainer.looped import LoopedModelMixin, applied_gates, costs, first_active_loops
from loopdropout_trainer.models.operations import recomputable
from loopdropout_trainer.models.speed.recomputation import recomputation


class Ledger(TorchDispatchMode):
    """Counts operations, and knows the bytes that were made in the block and are still held, weights left out."""

    def __init__(self, model):
        super().__init__()
        self.calls = Counter()
        self.storages = {StorageWeakRef(weight.untyped_storage()): 0 for weight in model.parameters()}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.calls[operation.overloadpacket] += 1
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                self.storages.setdefault(StorageWeakRef(storage), storage.nbytes())
        return result

    def held(self):
        return sum(size for storage, size in self.storages.items() if not storage.expired())


def forward(model):
    """Return the loss of a batch, and the bytes that are held for its backward pass."""
    ids = torch.randint(2, 258, (4, 32))
    with Ledger(model) as ledger:
        loss = model(ids, labels=ids).loss
    return loss, ledger.held()


@pytest.mark.parametrize("optimisations", [{}, {"skip": True, "fused": True}], ids=["plain", "optimisations"])
@pytest.mark.parametrize("layout", ["left", "packed"])
def test_no_bit_of_loss_and_gradients_changes(make_tiny, layout, optimisations):
    model = adapted(make_tiny())
    inputs, segments = batch(layout)
    want = loss_and_gradients(model, MIXED, inputs, segments, **optimisations)
    model.get_base_model().recompute_pointwise()
    loss, grads = loss_and_gradients(model, MIXED, inputs, segments, **optimisations)
    assert torch.equal(loss, want[0])
    for name, grad in want[1].items():
        assert torch.equal(grads[name], grad), name


@pytest.mark.parametrize(("family", "share"), [("ouro", 0.75), ("huginn", 0.75), ("loopus", 0.8)])
def test_less_is_held_and_no_matrix_product_or_attention_runs_twice(family, share):
    model, held, calls = adapted(TINY[family]()), [], []
    for recompute in (False, True):
        model.get_base_model().recompute_pointwise(recompute)
        loss, size = forward(model)
        held.append(size)
        with Ledger(model) as backward:
            loss.backward()
        calls.append(backward.calls)
    assert held[1] < share * held[0]
    expensive = [op for op in calls[0] if "mm" in str(op) or "attention" in str(op)]
    assert expensive
    assert [calls[0][op] for op in expensive] == [calls[1][op] for op in expensive]
    assert calls[1][torch.ops.aten.linalg_vector_norm] > calls[0][torch.ops.aten.linalg_vector_norm] == 0


def test_what_frozen_loops_hold_is_saved_by_their_share(monkeypatch):
    monkeypatch.setattr(costs, "LAUNCH_SECONDS", 0)
    model, held = adapted(tiny_ouro()), {}
    state = add_gates(model, in_activation_dtype=True)
    for name, gates in GATES.items():
        with applied_gates(state, gates), training_policy(model, True, trained_lora_parameters(model)):
            held[name] = forward(model)[1]
    frozen = sum(first_active_loops(MIXED)) / MIXED.numel()  # 7 of 16 loops
    share = (held["mixed"] - held["none active"]) / (held["all active"] - held["none active"])
    assert 1 - share == pytest.approx(frozen, abs=0.02)


def test_a_result_that_changes_or_dies_is_not_made_from_its_recipe():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    with recomputation():
        y = recomputable(torch.neg, x)
        y.mul_(3)
        (y * w).sum().backward()
        torch.testing.assert_close(w.grad, -3 * x)
        for _ in range(20):  # whose address the next tensor may get
            recomputable(torch.neg, x)
            other, w.grad = torch.randn(3, 4), None
            (other * w).sum().backward()
            assert torch.equal(w.grad, other)


def test_what_it_excludes_is_named_and_training_is_the_same(make_sft, train, monkeypatch):
    assert_same_weights(*(train(recompute_pointwise=on, gradient_checkpointing=False) for on in (True, False)))
    for excluded in ("gradient_checkpointing", "torch_compile", "compile_layers"):
        with pytest.raises(ValueError, match="recompute_pointwise"):
            make_sft(recompute_pointwise=True, **{"gradient_checkpointing": False, excluded: True})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="ZeRO-3 and FSDP"):
        make_sft(recompute_pointwise=True, gradient_checkpointing=False)
    with pytest.raises(ValueError, match="recompute_pointwise"):
        LoopedModelMixin().recompute_pointwise()
