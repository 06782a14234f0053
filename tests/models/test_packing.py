"""Passes over packed examples: the losses and gradients of plain passes, and when they apply."""

import itertools

import pytest
import torch

from helpers.errors import user_error
from helpers.tiny import TINY, tiny_ouro, trained_parameters, with_adapter
from loopdropout_trainer.gate_state import BatchOptions, GatedBatch
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.lora import add_gates, trained_lora_parameters
from loopdropout_trainer.models import packing
from loopdropout_trainer.models.passes import plan_loops


MIXED = torch.tensor([[0.0, 2, 0, 0], [0, 0, 2, 0], [2, 2, 0, 0], [0, 2, 2, 0]])  # first active loops 2, 0, 1, none
GATES = {
    "mixed": MIXED,
    "none active": MIXED * 0,
    "all active": MIXED * 0 + 2,
    "one column": torch.tensor([[0.0], [2], [0], [2]]),
    "by module": MIXED.unsqueeze(-1) * torch.tensor([1.0, 0] * 7),
}


def adapted(model, checkpointing=False, **config):
    """A float64 model in training with an adapter that changes the output."""
    peft_model = with_adapter(model.train().double(), scale=0.1, r=4, **config).double()
    if checkpointing:
        peft_model.gradient_checkpointing_enable({"use_reentrant": False})
        peft_model.enable_input_require_grads()  # as TRL does
    return peft_model


def make_batch(layout):
    """Return four examples of up to 9 tokens, padded or packed in one row, and the example of each packed token."""
    ids = torch.randint(2, 258, (4, 9), generator=torch.Generator().manual_seed(0))
    if layout == "packed":
        positions = torch.cat([torch.arange(length) for length in (9, 12, 5, 10)])[None]
        inputs = {"input_ids": ids.view(1, -1), "labels": ids.view(1, -1), "position_ids": positions}
        return inputs, (positions == 0).cumsum(-1) - 1
    mask = torch.ones_like(ids)
    padding = slice(4) if layout == "left" else slice(5, None)
    mask[0, padding] = mask[3, padding] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if layout == "left":
        labels[[0, 3], 4] = -100  # only padding predicts these tokens
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, None


def loss_and_gradients(peft_model, gates, inputs, token_examples, options):
    state = add_gates(peft_model, in_activation_dtype=True)
    peft_model.zero_grad()
    state.set(GatedBatch(gates, token_examples, options=options))
    state.ignores_padding = True
    loss = peft_model(**inputs).loss
    loss.backward()
    state.reset()
    gradients = {name: p.grad for name, p in trained_parameters(peft_model).items()}
    if options.lora_parameters and gates.dim() == 2:
        assert None not in gradients.values()  # otherwise DDP waits for them
    return loss.detach(), {name: torch.zeros(()) if g is None else g.clone() for name, g in gradients.items()}


def assert_packed_equals_plain(peft_model, gates, inputs, token_examples=None):
    sizes, num_tokens = set(), inputs.get("attention_mask", torch.ones(36)).sum()
    layer = list(find_looped_model(peft_model).recurrent_layers())[-1]
    hook = layer.register_forward_pre_hook(lambda module, args: sizes.add(args[0].shape[:2]))
    options = BatchOptions(True, trained_lora_parameters(peft_model))
    loss, gradients = loss_and_gradients(peft_model, gates, inputs, token_examples, options)
    hook.remove()
    assert max(sizes) <= (1, num_tokens)  # no padding
    want = loss_and_gradients(peft_model, gates, inputs, token_examples, BatchOptions())
    scale = max(1, *(gradient.abs().max().item() for gradient in want[1].values()))
    torch.testing.assert_close((loss, gradients), want, atol=1e-9 * scale, rtol=1e-9)


@pytest.mark.pairs
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", ["left", "right", "packed"])
@pytest.mark.parametrize("seconds", [packing.LAUNCH_SECONDS, 0], ids=["costly launches", "free launches"])
def test_packed_pass_equals_batch_pass(make_tiny, seconds, layout, checkpointing, monkeypatch):
    monkeypatch.setattr(packing, "LAUNCH_SECONDS", seconds)  # free: as for large models, frozen examples run apart
    inputs, token_examples = make_batch(layout)
    assert_packed_equals_plain(adapted(make_tiny(), checkpointing), MIXED, inputs, token_examples)


@pytest.mark.parametrize("name", GATES)
def test_packed_pass_is_exact_for_all_gates(name, monkeypatch):
    monkeypatch.setattr(packing, "LAUNCH_SECONDS", 0)
    assert_packed_equals_plain(adapted(tiny_ouro()), GATES[name], make_batch("left")[0])


def test_frozen_examples_run_apart():
    loops = lambda lengths: plan_loops((MIXED[:, :3] > 0).tolist(), lengths, min_frozen_tokens=5)
    plan = lambda lengths: [{group.examples: group.frozen for group in groups} for groups in loops(lengths)]
    every = {(0, 1, 2): False}
    assert plan([9, 9, 9]) == [{(0, 2): True, (1,): False}, {(0,): True, (1, 2): False}, every, every]
    assert plan([2, 9, 2]) == [every] * 4


def test_packed_pass_runs_the_model_s_loops():
    model, (inputs, _) = adapted(tiny_ouro()), make_batch("left")
    options, losses = BatchOptions(True, trained_lora_parameters(model)), {}
    state = add_gates(model, in_activation_dtype=True)
    state.ignores_padding = True
    for num_loops, is_packed in itertools.product([2, 4], [True, False]):
        model.config.num_loops = num_loops
        state.set(GatedBatch(MIXED, options=options if is_packed else BatchOptions()))
        losses[num_loops, is_packed] = model(**inputs).loss.item()
    assert losses[2, True] == pytest.approx(losses[2, False]) != pytest.approx(losses[4, True])
    model.config.num_loops = 6
    with user_error("one row for each loop, got 4 rows, but the model runs loop 6"):
        state.set(GatedBatch(MIXED, options=options))
        model(**inputs)


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_gates_and_inputs_with_gradients_run_every_loop(family):
    model, (inputs, _) = adapted(TINY[family]()), make_batch("left")
    state, options = add_gates(model, in_activation_dtype=True), BatchOptions(True, trained_lora_parameters(model))
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    gates = MIXED.double().requires_grad_()
    for given in (gates, MIXED):
        state.set(GatedBatch(given, options=options))
        model(inputs_embeds=embeddings, **inputs).loss.backward()
        hidden_states = model(inputs_embeds=embeddings, output_hidden_states=True, **inputs).hidden_states
        assert {len(hidden_state) for hidden_state in hidden_states} == {4}
    assert gates.grad.abs().min(dim=0).values.sum() > 0 and embeddings.grad.abs().sum() > 0


def test_packing_applies_only_where_it_is_exact(make_sft, train):
    frozen = lambda **fields: train(max_steps=1, **fields)._batch_options.lora_parameters
    assert len(frozen()) == 2 * 7  # factors of one layer
    assert not frozen(skip_frozen_loops=False) and not frozen(rule="learned", p=[0.5])
    assert trained_lora_parameters(adapted(tiny_ouro(), lora_dropout=0.1)) is None
    trainer = make_sft(max_steps=1)
    trainer.model.get_base_model().model.norm.weight.requires_grad_(True)
    trainer.train()
    assert trainer._batch_options == BatchOptions(True)
    assert train(tiny_ouro(attn_implementation="eager"), max_steps=1)._batch_options == BatchOptions()
