"""Every optimisation gives the losses and gradients of the plain path, and says when it does not apply."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from conftest import TINY, assert_same_weights, tiny_ouro, trained_parameters, with_adapter
from peft import get_peft_model
from test_layouts import forked, layouts

from loopdropout_trainer import LoopDropoutSFTTrainer, default_peft_config
from loopdropout_trainer.lora import add_gates, trained_lora_parameters
from loopdropout_trainer.looped import Optimisations, applied_gates, costs, find_looped_model
from loopdropout_trainer.models.speed import packed_attention
from loopdropout_trainer.distributed import has_unsharded_weights, may_skip_loops


MIXED = torch.tensor([[0.0, 2, 0, 0], [0, 0, 2, 0], [2, 2, 0, 0], [0, 2, 2, 0]])  # first active loops 2, 0, 1, none
GATES = {
    "mixed": MIXED,
    "none active": MIXED * 0,
    "all active": MIXED * 0 + 2,
    "one column": torch.tensor([[0.0], [2], [0], [2]]),
}


def adapted(model, checkpointing=False, **config):
    """A float64 model with an adapter that is not zero, in training."""
    peft_model = with_adapter(model.train().double(), scale=0.1, r=4, **config).double()
    if checkpointing:
        peft_model.gradient_checkpointing_enable({"use_reentrant": False})
        peft_model.enable_input_require_grads()  # as TRL does
    return peft_model


def batch(layout):
    """Four examples of 9 tokens, or fewer beside padding, or packed in one row; and the tokens' examples if packed."""
    ids = torch.randint(2, 258, (4, 9), generator=torch.Generator().manual_seed(0))
    if layout == "packed":
        positions = torch.cat([torch.arange(length) for length in (9, 12, 5, 10)])[None]
        inputs = {"input_ids": ids.view(1, -1), "labels": ids.view(1, -1), "position_ids": positions}
        return inputs, (positions == 0).cumsum(-1) - 1
    mask = torch.ones_like(ids)
    kept = slice(4) if layout == "left" else slice(5, None)
    mask[0, kept] = mask[3, kept] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if layout == "left":
        labels[[0, 3], 4] = -100  # nothing predicts a row's first token but padding
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, None


@contextmanager
def optimised(peft_model, packs, lora_parameters):
    """The gates in force, by these optimisations."""
    state = find_looped_model(peft_model).loop_state
    batch, state.batch = state.batch, replace(state.batch, optimisations=Optimisations(packs, lora_parameters))
    yield
    state.batch = batch


def loss_and_gradients(peft_model, gates, inputs, segments=None, pack=False, skip=False, fused=False):
    state = add_gates(peft_model, in_activation_dtype=True, fused=fused)
    peft_model.zero_grad()
    with applied_gates(state, gates, segments):
        with optimised(peft_model, pack or skip, trained_lora_parameters(peft_model) if skip else None):
            loss = peft_model(**inputs).loss
        loss.backward()
    grads = {name: p.grad for name, p in trained_parameters(peft_model).items()}
    if skip and gates.dim() == 2:
        assert all(grad is not None for grad in grads.values())  # else DDP waits for them for ever
    return loss.detach(), {name: torch.zeros(1) if grad is None else grad.clone() for name, grad in grads.items()}


def assert_same(got, want, tolerance=1e-9):
    torch.testing.assert_close(got[0], want[0], atol=tolerance, rtol=tolerance)
    scale = max(grad.abs().max().item() for grad in want[1].values())
    for name, grad in want[1].items():
        assert (got[1][name] - grad).abs().max() <= tolerance * max(scale, 1), name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", ["left", "right", "packed"])
@pytest.mark.parametrize("seconds", [costs.LAUNCH_SECONDS, 0], ids=["costly launches", "free launches"])
def test_optimisations_give_the_plain_losses_and_gradients(make_tiny, seconds, layout, checkpointing, monkeypatch):
    # Where launches are free, as for large tensors, nothing is computed twice or together to launch fewer operations.
    monkeypatch.setattr(costs, "LAUNCH_SECONDS", seconds)
    peft_model = adapted(make_tiny(), checkpointing)
    inputs, segments = batch(layout)
    for name in GATES if layout == "left" else ["mixed"]:
        want = loss_and_gradients(peft_model, GATES[name], inputs, segments)
        assert_same(loss_and_gradients(peft_model, GATES[name], inputs, segments, skip=True, fused=True), want)
    assert_same(
        loss_and_gradients(peft_model, MIXED, inputs, segments),
        loss_and_gradients(peft_model, MIXED, inputs, segments, fused=True),
    )


def test_optimisations_are_exact_with_a_float_mask_gates_for_each_module_and_truncated_backpropagation():
    by_module = MIXED.unsqueeze(-1) * torch.tensor([1.0, 0] * 7)  # every other module is off
    for attention, layout, gates, depth, tolerance in (
        ("eager", "right", MIXED, None, 1e-5),  # this kernel's softmax is float32
        ("eager", "packed", MIXED, None, 1e-5),
        ("sdpa", "left", by_module, None, 1e-9),
        ("sdpa", "left", MIXED, 2, 1e-9),
    ):
        model, (inputs, segments) = adapted(tiny_ouro(attn_implementation=attention)), batch(layout)
        model.get_base_model().config.backprop_depth = depth
        want = loss_and_gradients(model, gates, inputs, segments)
        got = loss_and_gradients(model, gates, inputs, segments, skip=True, fused=True)
        assert_same(got, want, tolerance)


def test_a_kernel_that_is_not_there_or_not_supported_is_not_used(make_sft):
    assert not packed_attention._at_once_agrees(torch.device("cpu"), torch.bfloat16, 8)  # a CPU has none
    model = tiny_ouro(attn_implementation="eager")
    assert model.can_pack
    model.config._attn_implementation = "flex_attention"
    assert not model.can_pack
    assert make_sft(model).optimisations == Optimisations()


def test_inference_stays_peft_bit_for_bit_and_bfloat16_stays_close():
    inputs, _ = batch("left")
    model = tiny_ouro().train()
    peft_model = get_peft_model(model, default_peft_config(model))
    with torch.no_grad():
        want = peft_model(**inputs).logits
        add_gates(peft_model, in_activation_dtype=True, fused=True)
        assert torch.equal(peft_model(**inputs).logits, want)
    model.to(torch.bfloat16)
    for parameter in trained_parameters(peft_model).values():
        parameter.data = torch.randn_like(parameter, dtype=torch.float32) * 0.1
    state = add_gates(peft_model, in_activation_dtype=True, fused=True)
    with applied_gates(state, MIXED):
        fused = peft_model(**inputs).logits
        add_gates(peft_model, in_activation_dtype=True)
        plain = peft_model(**inputs).logits
        assert not torch.equal(fused, plain)
        torch.testing.assert_close(fused, plain, atol=3e-2, rtol=3e-2)


# Through the trainer


FIELDS = {
    "padded": {},
    "padded, huginn": {},  # each example starts from its own random state
    "padded, checkpointing": {"gradient_checkpointing": True},
    "padding-free": {"padding_free": True, "max_length": None},
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_training_run_is_the_same_with_and_without_optimisations(name, train):
    fields = {"optim": "sgd", "learning_rate": 0.05, "p": [0.7], "max_grad_norm": 0.0, **FIELDS[name]}
    fields |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    model = TINY["huginn" if "huginn" in name else "ouro"]
    on, off = train(model(), **fields), train(model(), **fields, remove_padding=False)
    for trainer in (on, off):  # not after training, where other parameters may be trained
        assert trainer.loop_state.batch.optimisations == Optimisations()
    assert on.optimisations.lora_parameters and not off.optimisations.lora_parameters
    assert_same_weights(on, off, atol=1e-5, rtol=1e-4)


@pytest.fixture
def compiles(monkeypatch):
    """`compiles(backend)`: forget all programs, and compile by this backend from now on."""
    compile_ = torch.compile

    def by(backend):
        monkeypatch.setattr(
            torch, "compile", lambda *args, **options: compile_(*args, **{**options, "backend": backend})
        )
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()

    return by


class Compiled(LoopDropoutSFTTrainer):
    """Notes how many programs there are after each step."""

    programs = ()

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.programs += (torch._dynamo.utils.counters["stats"]["unique_graphs"],)
        return loss


SLOW = [
    ("huginn", True, "eager"),
    ("loopus", False, "eager"),
    ("ouro", True, "inductor"),
]  # half a minute in a compiler
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("family", "checkpointing", "backend"), [("ouro", False, "eager"), *SLOW])
def test_the_repeated_layer_is_compiled_once(family, checkpointing, backend, train, compiles):
    compiles(backend)
    fields = {"max_steps": 9, "per_device_train_batch_size": 3, "gradient_checkpointing": checkpointing or None}
    fields |= {"p": [0.6], "adam_epsilon": 1e-3, "cls": Compiled}
    on = train(TINY[family](num_loops=3), compile_layers=True, **fields)
    assert 0 < on.programs[4] == on.programs[-1] < 30  # whatever lengths and gates
    assert_same_weights(on, train(TINY[family](num_loops=3), **fields), atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_each_training_of_a_process_is_compiled(train, compiles):
    compiles("eager")
    programs = [0]
    for fields in ({"rule": "lora"}, {"p": 0.5}, {"rule": "module_wise"}):  # more kinds of gates than torch allows
        fields |= {"max_steps": 6, "per_device_train_batch_size": 3, "compile_layers": True}
        programs.append(train(tiny_ouro(num_loops=3), cls=Compiled, **fields).programs[-1])
    assert programs == sorted(set(programs))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_train_as_one_although_some_have_no_active_example(compiled, tmp_path):
    fields = {"p": [0.9], "ddp_find_unused_parameters": False, "compile_layers": compiled}
    off = {"remove_padding": False}
    layouts.save_model(tmp_path / "model")
    record = layouts.train(tmp_path, "plain", per_device_train_batch_size=8, p=[0.9], **off)
    plain = layouts.Run([record], layouts._adapter(tmp_path / "plain"))
    ddp = forked(layouts.LAYOUTS["ddp, accumulation"], tmp_path / "two", ["plain", "checkpointing"], **fields)
    for run in ddp.values():
        assert [record["world_size"] for record in run.records] == [2, 2]
        assert run.gates == plain.gates
        assert run.distance(plain) < (5e-3 if compiled else 1e-3)  # compiled sums round otherwise
    examples = list(plain.gates.values())
    assert sum(not any(gates) for gates in examples) > len(examples) / 3


# Where they do not apply


def test_optimisations_are_off_where_processes_share_parameters():
    args = SimpleNamespace(ddp_static_graph=None, torch_compile=False)
    for kind in DistributedType:
        accelerator = SimpleNamespace(distributed_type=kind)
        plain = kind == DistributedType.NO or kind.name.startswith("MULTI_")
        assert has_unsharded_weights(accelerator) == may_skip_loops(accelerator, args) == plain
    args.ddp_static_graph = True
    assert not may_skip_loops(SimpleNamespace(distributed_type=DistributedType.MULTI_GPU), args)


def test_loops_are_skipped_only_where_the_adapter_alone_is_trained(make_sft):
    skipping = lambda trainer: trainer.optimisations.lora_parameters
    assert trained_lora_parameters(adapted(tiny_ouro(), lora_dropout=0.1)) is None
    assert skipping(make_sft(rule="learned", p=[0.5])) is None and not skipping(make_sft(skip_frozen_loops=False))
    skips = make_sft()
    assert len(skipping(skips)) == 28
    skips.model.get_base_model().model.norm.weight.requires_grad_(True)
    skips.train()
    assert skipping(skips) is None


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_gates_and_inputs_that_need_gradients_run_every_loop(family):
    model, (inputs, _) = adapted(TINY[family]()), batch("left")
    state, lora_parameters = add_gates(model, in_activation_dtype=True, fused=True), trained_lora_parameters(model)
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    gates = MIXED.double().requires_grad_()
    for given in (gates, MIXED):
        with applied_gates(state, given), optimised(model, True, lora_parameters):
            model(inputs_embeds=embeddings, **inputs).loss.backward()
            states = model(inputs_embeds=embeddings, output_hidden_states=True, **inputs).hidden_states
            assert {len(state) for state in states} == {4}
    assert gates.grad.abs().min(dim=0).values.sum() > 0 and embeddings.grad.abs().sum() > 0
