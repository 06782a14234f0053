"""Gates on PEFT's LoRA layers: the brute-force oracle, bit-identity at unit gates, and what is refused."""

import copy

import pytest
import torch
from conftest import golden_adapted, golden_ouro, tiny_ouro
from peft import LoraConfig, PrefixTuningConfig, get_peft_model

from loopdropout_trainer import default_peft_config, use_gates
from loopdropout_trainer.adapters import add_gates, check_peft_config, has_gates, remove_gates
from loopdropout_trainer.looped import find_looped_model


def oracle_inputs(ouro, side):
    return {name: ouro.tensors[f"oracle/{side}/{name}"] for name in ("input_ids", "attention_mask", "labels")}


def example_losses(logits, labels):
    """Sum of each example's target losses and their number, [B]; written out, independent of the model's own loss."""
    log_probs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    targets = labels[:, 1:]
    kept = targets != -100
    nll = -log_probs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (nll * kept).sum(dim=1), kept.sum(dim=1)


def adapted(**config):
    model = tiny_ouro()
    peft_model = get_peft_model(model, default_peft_config(model, **{"r": 4, "lora_alpha": 8, **config}))
    torch.manual_seed(1)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return peft_model


IDS = torch.arange(2, 42).view(4, 10)


@pytest.mark.parametrize("reduction", ["token_mean", "example_mean"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "packed"])
def test_losses_and_gradients_equal_the_brute_force_oracle(ouro, side, checkpointing, reduction):
    model = golden_adapted(ouro).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    inputs = oracle_inputs(ouro, "left" if side == "packed" else side)
    gates = ouro.tensors["oracle/gates"].clone().requires_grad_()
    segments = None
    if side == "packed":  # the same examples in one row, told apart by their positions
        valid = inputs["attention_mask"].bool()
        lengths = valid.sum(dim=1)
        packed = {name: inputs[name][valid][None] for name in ("input_ids", "labels")}
        packed["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
        segments = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]
        inputs = packed

    with use_gates(model, gates, segments):
        labels = inputs.pop("labels")
        logits = model(**inputs, use_cache=False).logits
        if side == "packed":
            parts = zip(logits[0].split(lengths.tolist()), labels[0].split(lengths.tolist()), strict=True)
            sums, counts = zip(*(example_losses(x[None], y[None]) for x, y in parts), strict=True)
            nll, tokens = torch.cat(sums), torch.cat(counts)
        else:
            nll, tokens = example_losses(logits, labels)
        loss = nll.sum() / tokens.sum() if reduction == "token_mean" else (nll / tokens).mean()
        loss.backward()

    want = ouro.tensors
    torch.testing.assert_close(nll, want["oracle/example_nll"], atol=1e-4, rtol=0)
    torch.testing.assert_close(loss, want[f"oracle/loss_{reduction}"], atol=2e-5, rtol=0)
    got = {"gates": gates.grad}
    for name in ouro.meta["lora"]["modules"]:
        layer = find_looped_model(model).get_submodule(name)
        got[f"lora_A/{name}"] = layer.lora_A["default"].weight.grad
        got[f"lora_B/{name}"] = layer.lora_B["default"].weight.grad
    for name, gradient in got.items():
        reference = want[f"oracle/grad_{reduction}/{name}"]
        assert torch.norm(gradient - reference) <= 1e-4 * torch.norm(reference) + 1e-6, name


def test_unit_zero_and_single_loop_gates_equal_the_oracle(ouro):
    model = golden_adapted(ouro).eval()
    inputs = oracle_inputs(ouro, "left")
    labels = inputs.pop("labels")
    num_loops = model.config.num_loops

    def losses(gates):
        with torch.no_grad(), use_gates(model, gates):
            nll, tokens = example_losses(model(**inputs, use_cache=False).logits, labels)
        return nll / tokens

    want = ouro.tensors
    close = {"atol": 2e-5, "rtol": 0}
    torch.testing.assert_close(losses(torch.ones(num_loops)), want["oracle/unit_gate/example_loss"], **close)
    torch.testing.assert_close(losses(torch.zeros(num_loops)), want["oracle/zero_gate/example_loss"], **close)
    for loop, expected in enumerate(want["oracle/single_loop/example_loss"]):
        torch.testing.assert_close(losses(torch.eye(num_loops)[loop]), expected, **close)


def test_unit_gates_are_pefts_own_computation_bit_for_bit():
    plain, gated = adapted().train(), adapted().train()
    add_gates(gated)
    for model in (plain, gated):
        model(IDS, labels=IDS).loss.backward()
    assert torch.equal(plain(IDS).logits, gated(IDS).logits)
    for one, other in zip(plain.parameters(), gated.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_zero_gates_are_the_frozen_model_bit_for_bit_and_give_zero_gradients():
    model = adapted().train()
    with model.disable_adapter():
        frozen = model(IDS).logits
    with use_gates(model, torch.zeros(4, 4)):
        out = model(IDS, labels=IDS)
        out.loss.backward()
    assert torch.equal(out.logits, frozen)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters() if p.requires_grad)


def test_one_column_serves_all_examples_and_columns_belong_to_their_examples():
    model = adapted().eval()
    gates = torch.rand(4, 4) * 2
    with torch.no_grad():
        with use_gates(model, gates):
            together = model(IDS).logits
        for row in range(4):
            for form in (gates[:, row], gates[:, row : row + 1]):
                with use_gates(model, form):
                    alone = model(IDS[row : row + 1]).logits
                torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_factors_compute_in_the_activations_dtype(dtype):
    model = adapted().to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    add_gates(model, in_activation_dtype=True)
    with use_gates(model, torch.full((4,), 1.5)):
        out = model(IDS, labels=IDS)
        out.loss.backward()
    assert out.logits.dtype == dtype
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_the_gate_never_multiplies_a_full_width_activation():
    # What autograd saves besides PEFT's own computation must be of the rank's width.
    model, hidden = adapted().train(), 32
    widths = {}
    for gates in (torch.ones(4), torch.full((4, 4), 2.0)):
        saved = []
        pack = lambda tensor, saved=saved: saved.append(tuple(tensor.shape)) or tensor
        with use_gates(model, gates), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(IDS, labels=IDS)
        widths[len(widths)] = sum(len(shape) == 3 and shape[-1] >= hidden for shape in saved)
    assert widths[1] == widths[0]


def test_use_gates_puts_back_what_was_there_also_after_an_exception():
    model = adapted()
    state = find_looped_model(model).loop_state
    with pytest.raises(RuntimeError, match="stop"), use_gates(model, torch.zeros(4)):
        assert has_gates(model)
        raise RuntimeError("stop")
    assert state.gates is None
    assert not has_gates(model)
    add_gates(model)
    with use_gates(model, torch.full((4,), 2.0)):
        with use_gates(model, torch.zeros(4)):
            assert not state.gates.any()
        assert bool((state.gates == 2).all())
    assert state.gates is None
    assert has_gates(model)
    remove_gates(model)
    assert not has_gates(model)


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        (torch.ones(3), "K = 4 loops"),
        (torch.ones(4, 0), "K = 4 loops"),
        (torch.full((4,), float("nan")), "finite"),
        (torch.full((4, 3), 0.5), "3 examples, but the batch has 4"),
    ],
)
def test_gates_of_a_wrong_shape_are_refused(gates, message):
    model = adapted()
    with pytest.raises(ValueError, match=message), use_gates(model, gates):
        model(IDS)


def test_gates_need_an_adapter(model):
    with pytest.raises(ValueError, match="wrap it with peft.get_peft_model first"), use_gates(model, torch.ones(4)):
        pass


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "`bias` must be 'none'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_modules": ["q_proj", "lm_head"]}, "`lm_head` is not a linear projection of the recurrent block"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
    ],
)
def test_adapters_without_a_gated_meaning_are_refused_in_one_sentence(model, fields, message):
    config = LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **fields})
    with pytest.raises(ValueError, match=message) as error:
        check_peft_config(config)
        add_gates(get_peft_model(model, config))
    assert "\n" not in str(error.value)


def test_other_adapter_kinds_and_second_adapters_are_refused(model):
    with pytest.raises(ValueError, match="gates LoRA adapters; got a PrefixTuningConfig"):
        check_peft_config(PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    peft_model = get_peft_model(model, default_peft_config(model))
    peft_model.add_adapter("second", default_peft_config(model))
    peft_model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="Exactly one adapter must be active"):
        add_gates(peft_model)


@pytest.mark.parametrize("fields", [{"use_rslora": True}, {"lora_dropout": 0.5}, {"target_modules": ["q_proj"]}])
def test_what_keeps_the_meaning_is_allowed(fields):
    model = adapted(**fields).eval()
    reference = copy.deepcopy(model)
    for name, parameter in reference.named_parameters():
        if "lora_B" in name:
            parameter.data *= 1.7  # W + g Delta, with g folded into Delta by hand
    with torch.no_grad(), use_gates(model, torch.full((4,), 1.7)):
        torch.testing.assert_close(model(IDS).logits, reference(IDS).logits, atol=1e-5, rtol=1e-5)


def test_golden_model_is_not_changed_by_its_adapter_at_first(ouro):
    model = golden_ouro(ouro)
    ids = ouro.tensors["unpadded/input_ids"]
    before = model(ids).logits
    adapted_model = get_peft_model(model, default_peft_config(model))
    add_gates(adapted_model)
    assert torch.equal(adapted_model(ids).logits, before)
