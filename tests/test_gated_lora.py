"""Test gates on PEFT's LoRA layers: zero gates, several adapters, copies, and unsupported adapters.

`test_families.py` compares losses and gradients with brute force, `test_trainer.py` compares unit gates with PEFT.
"""

import copy
import functools
import pickle
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from conftest import randomise, tiny_hrm, tiny_ouro, trained_parameters, with_adapter
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from peft.tuners.lora import layer as lora_layer
from peft.tuners.lora.config import KasaConfig

from loopdropout_trainer import default_peft_config, use_gates
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.lora import adapted_layers, add_gates, check_peft_config, gated_layers, remove_gates


adapted = functools.partial(with_adapter, r=4, lora_alpha=8)
IDS = torch.arange(2, 42).view(4, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_factors_use_activation_dtype(dtype):
    model = adapted().to(dtype)
    for parameter in trained_parameters(model).values():
        parameter.data = parameter.data.float()
    add_gates(model, in_activation_dtype=True)
    with use_gates(model, torch.full((4,), 1.5)):
        out = model(IDS, labels=IDS)
        out.loss.backward()
    assert out.logits.dtype == dtype
    assert {p.grad.dtype for p in trained_parameters(model).values()} == {torch.float32}


def test_gate_multiplies_rank_width_activations():
    # Gates must not make autograd save more full-width tensors than unit gates.
    model, widths = adapted().train(), []
    for gates in (torch.ones(4), torch.full((4, 4), 2.0)):
        saved = []
        pack = lambda tensor, saved=saved: saved.append(tuple(tensor.shape)) or tensor
        with use_gates(model, gates), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(IDS, labels=IDS)
        widths.append(sum(len(shape) == 3 and shape[-1] >= 32 for shape in saved))
    assert widths[1] == widths[0]


def test_use_gates_restores_state():
    model = adapted()
    state = find_looped_model(model).loop_state
    with pytest.raises(RuntimeError, match="stop"), use_gates(model, torch.zeros(4)):
        assert gated_layers(model)
        raise RuntimeError("stop")
    assert state.gates is None and not gated_layers(model)
    add_gates(model)
    with use_gates(model, torch.full((4,), 2.0)):
        with use_gates(model, torch.zeros(4)):
            assert not state.gates.any()
        assert bool((state.gates == 2).all())
    assert state.gates is None and gated_layers(model)
    remove_gates(model)
    assert not gated_layers(model)


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        (torch.ones(3), "K = 4 loops"),
        (torch.ones(4, 0), "K = 4 loops"),
        (torch.full((4,), float("nan")), "finite"),
        (torch.full((4, 3), 0.5), "one column for each of the 4 examples"),
        ("1-0-0-0", "`gates` must be numbers, got '1-0-0-0'"),
        (None, "`gates` must be numbers, got None"),
    ],
)
def test_use_gates_validates_gates(gates, message):
    with pytest.raises(ValueError, match=message), use_gates(model := adapted(), gates):
        model(IDS)


# Every adapter of every layer


def two_adapters(gated_first=True, **fields):
    """Return a model with adapters `default` and `second`, where `second` adapts more modules."""
    model = adapted(target_modules=["q_proj", "v_proj"]).eval()
    if gated_first:
        add_gates(model)
    model.add_adapter("second", default_peft_config(model.get_base_model(), r=4, **fields))
    return randomise(model, 0.05).eval()


def logits(model, gates=None, **inputs):
    with torch.no_grad(), nullcontext() if gates is None else use_gates(model, gates):
        return model(IDS, **inputs).logits


@pytest.mark.parametrize("gated_first", [True, False], ids=["added to a gated model", "added before"])
@pytest.mark.parametrize(
    ("active", "fields"), [("second", {}), (["default", "second"], {"use_rslora": True, "lora_dropout": 0.5})], ids=str
)
def test_active_adapters_are_gated(active, gated_first, fields):
    model = two_adapters(gated_first, **fields)
    plain = logits(model)
    model.base_model.set_adapter(active)
    with model.disable_adapter():
        frozen = logits(model)
    assert torch.equal(logits(model, torch.zeros(4)), frozen)
    assert not torch.equal(logits(model, torch.eye(4)[3]), frozen)
    assert bool(gated_layers(model)) == gated_first
    assert not torch.allclose(logits(model), plain)  # no gates outside the block

    scaled = copy.deepcopy(model.double())
    for name, parameter in scaled.named_parameters():
        if "lora_B" in name:
            parameter.data *= 1.75
    torch.testing.assert_close(logits(model, torch.full((4,), 1.75)), logits(scaled), atol=1e-6, rtol=1e-5)


def test_peft_load_adapter_refuses_learned_gates(tmp_path):
    learned = adapted()
    add_gates(learned, rule=make_rule("learned"))
    learned.save_pretrained(tmp_path)
    learned.load_adapter(str(tmp_path), "default")
    model = adapted()
    add_gates(model)
    with pytest.raises(ValueError, match="has learned gates .* PEFT's `load_adapter` does not read"):
        model.load_adapter(str(tmp_path), "other")


def test_adapter_names_per_example_are_gated():
    model = two_adapters()
    names = ["default", "second", "__base__", "second"]
    for gates in (torch.zeros(4), torch.eye(4)[2], torch.ones(4)):
        mixed = logits(model, gates, adapter_names=names)
        for row, name in enumerate(names):
            model.set_adapter(name if name != "__base__" else "default")
            alone = logits(model, gates if name != "__base__" else torch.zeros(4))
            torch.testing.assert_close(mixed[row], alone[row], atol=1e-5, rtol=1e-5)


def test_add_adapter_checks_gated_variants():
    model = adapted()
    add_gates(model)
    with pytest.raises(ValueError, match="DoraLinearVariant has its own forward"):
        model.add_adapter("dora", LoraConfig(use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.add_adapter("mica", LoraConfig(init_lora_weights="mica", target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("mica")
    assert {name.split(".lora_")[1][0] for name, p in model.named_parameters() if p.requires_grad} == {"A"}


def test_use_gates_needs_an_unmerged_adapter(model):
    with pytest.raises(ValueError, match="Wrap it with peft.get_peft_model first"), use_gates(model, torch.ones(4)):
        pass
    for gated_first in (True, False):
        merged = two_adapters(gated_first)
        merged.merge_adapter()
        with pytest.raises(ValueError, match="merged into the weights"), use_gates(merged, torch.zeros(4)):
            pass
        merged.unmerge_adapter()
        with use_gates(merged, torch.zeros(4)):
            pass


class OwnForward(lora_layer.Linear):
    """A LoRA layer that computes its own update, like some LoRA layers over quantized weights."""

    def forward(self, x, *args, **kwargs):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_layers_with_own_forward_raise():
    model = adapted()
    adapted_layers(model)[3].__class__ = OwnForward
    for apply in (add_gates, lambda model: use_gates(model, torch.ones(4)).__enter__()):
        with pytest.raises(ValueError, match="`model.layers.0.self_attn.o_proj` .*OwnForward"):
            apply(model)


UNSUPPORTED = {  # fields of LoraConfig
    "use_dora": True, "alora_invocation_tokens": [3], "kasa_config": KasaConfig(), "modules_to_save": ["lm_head"],
    "lora_bias": True, "trainable_token_indices": [3], "bias": "all", "init_lora_weights": "pissa_niter_4",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(({field: value}, field) for field, value in UNSUPPORTED.items()),
        ({"target_modules": ["q_proj", "lm_head"]}, "`lm_head` is not a linear projection of the recurrent block"),
        (PrefixTuningConfig(num_virtual_tokens=2), "PrefixTuningConfig"),
    ],
    ids=str,
)
def test_unsupported_adapters_raise(model, config, message):
    if isinstance(config, dict):
        config = LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **config})
    with pytest.raises(ValueError, match=message) as error:
        check_peft_config(config)
        add_gates(get_peft_model(model, config))
    assert "\n" not in str(error.value)


def test_unknown_variants_and_two_adapters_raise():
    @dataclass
    class Config(LoraConfig):
        brand_new: bool = field(default=True, metadata={"is_lora_variant": True})

    with pytest.raises(ValueError, match="`brand_new`"):
        check_peft_config(Config())
    peft_model = two_adapters()
    peft_model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="Exactly one adapter must be active"):
        add_gates(peft_model, rule=make_rule("loop_dropout"))


@pytest.mark.pairs
@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "mica"])
def test_base_preserving_inits_train(init, make_tiny, train):
    model = make_tiny().eval()
    frozen = model(IDS).logits
    peft_model = get_peft_model(model, default_peft_config(model, r=4, init_lora_weights=init))
    assert torch.equal(logits(peft_model.eval(), torch.zeros(4)), frozen)
    before = {name: p.detach().clone() for name, p in peft_model.named_parameters()}
    train(peft_model, max_steps=1)
    moved = [name for name, p in peft_model.named_parameters() if not torch.equal(p, before[name])]
    both = {"mica": {"A"}, False: {"A", "B"}, "orthogonal": {"A", "B"}}
    assert {name.split(".lora_")[1][0] for name in moved} == both.get(init, {"B"})


def test_default_targets_are_the_recurrent_block(make_tiny):
    peft_model = get_peft_model(make_tiny(), LoraConfig(r=2))
    looped = find_looped_model(peft_model)
    names = [name for name, module in looped.named_modules() if isinstance(module, lora_layer.LoraLayer)]
    assert names == looped.recurrent_linears()


@pytest.mark.parametrize("make", [tiny_ouro, tiny_hrm], ids=["ouro", "hrm_text"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copied_models_have_separate_gates(train, make, duplicate):
    # TRL replaces `forward` on the instance. Copies of models of this package do not take it over.
    model = (train(make(), max_steps=2).model if make is tiny_ouro else with_adapter(make(), scale=0.3)).eval()
    again, gates = duplicate(model), torch.eye(find_looped_model(model).num_loops)[0]
    ungated, gated = logits(model), logits(model, gates)
    assert not torch.equal(gated, ungated)
    with use_gates(again, gates):
        assert torch.equal(logits(again), gated) and torch.equal(logits(model), ungated)
