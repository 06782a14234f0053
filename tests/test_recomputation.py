"""Recomputing pointwise results keeps less, runs no matrix product twice, and changes no bit of a loss or gradient."""

from collections import Counter

import pytest
import torch
from conftest import TINY, flat_weights, tiny_ouro
from test_speed import MIXED, adapted, batch, loss_and_gradients
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer
from loopdropout_trainer.looped import LoopedModelMixin
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
    model = adapted(TINY[family]())
    inputs = {"input_ids": torch.randint(2, 258, (4, 32)), "labels": torch.randint(2, 258, (4, 32))}
    held, calls = [], []
    for recompute in (False, True):
        model.get_base_model().recompute_pointwise(recompute)
        with Ledger(model) as forward:
            loss = model(**inputs).loss
        held.append(forward.held())
        with Ledger(model) as backward:
            loss.backward()
        calls.append(backward.calls)
    assert held[1] < share * held[0]
    expensive = [op for op in calls[0] if "mm" in str(op) or "attention" in str(op)]
    assert expensive
    assert [calls[0][op] for op in expensive] == [calls[1][op] for op in expensive]
    assert calls[1][torch.ops.aten.linalg_vector_norm] > calls[0][torch.ops.aten.linalg_vector_norm] == 0


def test_what_several_places_read_is_computed_once_and_again_for_another_backward_pass():
    runs = []

    def double(x):
        runs.append(x.requires_grad)
        return x * 2

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with recomputation():
        y = recomputable(double, recomputable(double, x))
        loss = (y @ w).sum() + (y.unsqueeze(0) @ w).sum() + (y * w[0]).sum()
    del y
    assert runs == [True, True]
    for expected in (4, 6):
        w.grad = None
        loss.backward(retain_graph=True)
        assert len(runs) == expected
        torch.testing.assert_close(w.grad[1], 8 * x.sum(0)[1].expand(4))
    with torch.no_grad(), recomputation():
        recomputable(double, x)


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
        part = recomputable(torch.neg, x)
        w.grad = None
        (part[1:2] * w + (part.T[1:] * w.T[1:]).sum()).sum().backward()  # views of it are made from it
        want = 12 * -x
        want[:, 0] = 0
        torch.testing.assert_close(w.grad, want - x[1:2])


def test_training_is_the_same(config, dataset, tokenizer):
    def train(**fields):
        args = config(gradient_checkpointing=False, p=[0.5], gradient_accumulation_steps=2, **fields)
        trainer = LoopDropoutSFTTrainer(tiny_ouro(), args, train_dataset=dataset, processing_class=tokenizer)
        trainer.train()
        return flat_weights(trainer), trainer.model.base_model.model.model.recomputes_pointwise

    (got, on), (want, off) = train(recompute_pointwise=True), train()
    assert (on, off) == (True, False) and torch.equal(got, want)


def test_what_it_excludes_is_named(config, dataset, tokenizer, monkeypatch):
    def refuse(match, model=None, **fields):
        args = config(recompute_pointwise=True, **fields)
        with pytest.raises(ValueError, match=match):
            LoopDropoutSFTTrainer(model or tiny_ouro(), args, train_dataset=dataset, processing_class=tokenizer)

    assert not LoopDropoutConfig("out").recompute_pointwise
    refuse("cannot be combined with `gradient_checkpointing`", gradient_checkpointing=True)
    refuse("cannot be combined with compilation", gradient_checkpointing=False, torch_compile=True)
    refuse("cannot be combined with compilation", compile_layers=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    refuse("cannot be combined with ZeRO-3 and FSDP", gradient_checkpointing=False)
    with pytest.raises(ValueError, match="recompute_pointwise"):
        LoopedModelMixin().recompute_pointwise()
