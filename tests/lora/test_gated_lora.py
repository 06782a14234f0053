"""Test gates on PEFT's LoRA layers: zero gates, several adapters, copies, and unsupported adapters.

`test_families.py` compares losses and gradients with brute force, `test_trainer.py` compares unit gates with PEFT.
"""

import copy
import functools
import math
import pickle
from dataclasses import field, make_dataclass

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from peft.tuners.lora import layer as lora_layer
from torch.utils.checkpoint import checkpoint

from helpers.errors import user_error
from helpers.tiny import randomise, tiny_hrm, tiny_ouro, trained_parameters, with_adapter
from helpers.trainers import Recorder
from loopdropout_trainer import default_peft_config, use_depth, use_gates
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.looped import attach_looped_model, find_looped_model
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
    with pytest.raises(KeyError), torch.no_grad(), use_gates(model, torch.zeros(4)):
        assert gated_layers(model)
        raise KeyError
    assert not gated_layers(model)
    state = add_gates(model)
    with use_gates(model, torch.full((4,), 2.0)):
        with use_gates(model, torch.zeros(4)):
            assert not state.gates.any()
        assert (state.gates == 2).all()
    assert state.gates is None and gated_layers(model)
    remove_gates(model)
    assert not gated_layers(model)


def test_blocks_in_another_order_restore_the_state():
    """As of two generators that run in turns. Without the error, the gates of the first block would stay."""
    model = adapted()
    state = add_gates(model)
    for begin, value in (
        (lambda number: use_gates(model, torch.full((4,), float(number))), lambda: state.gates),
        (lambda number: use_depth(model, 4 + number), lambda: model.config.num_loops),
    ):
        before = value()
        blocks = [begin(number) for number in (2, 3, 4)]
        for block in blocks:
            block.__enter__()
        last = value()
        for block in blocks[:2]:
            with user_error("reverse order of their beginnings"):
                block.__exit__(None, None, None)
            assert value() is last  # of the block that still runs
        blocks[2].__exit__(None, None, None)
        assert value() is before
    gates, depth = use_gates(model, torch.zeros(4)), use_depth(model, 2)
    gates.__enter__()
    depth.__enter__()
    assert not gates.__exit__(KeyError, KeyError(), None)  # so the error of the block itself is raised
    assert state.gates is None and model.config.num_loops == 2
    depth.__exit__(None, None, None)
    assert model.config.num_loops == 4 and state.reruns.due is None


def test_block_outside_of_a_statement_says_that_it_has_no_effect(log):
    """A notebook shows the last value of a cell. Elsewhere, the dropped block is warned of."""
    model = adapted()
    for use, value in ((use_gates, [1, 0, 0, 0]), (use_depth, 2)):
        name = use.__name__
        text = repr(use(model, value))
        assert text == f"`{name}(...)` has an effect inside of its block only. Write `with {name}(...):`."

    @use_depth(model, 2)
    def count_loops():
        return model.config.num_loops

    assert [count_loops(), count_loops(), model.config.num_loops] == [2, 2, 4]
    with use_depth(model, 2), pytest.raises(TypeError):
        use_gates()
    assert log.text == ""
    use_gates(model, [1, 0, 0, 0])
    assert "`use_gates(...)` has an effect inside of its block only. Write `with use_gates(...):`" in log.text


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_backward_after_the_block_recomputes_its_gates(use_reentrant, make_tiny):
    found = []
    for checkpointing in (False, True):
        model = with_adapter(make_tiny(), scale=0.1).train()
        if checkpointing:
            model.base_model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        with use_gates(model, torch.eye(model.config.num_loops)[0] * 2):
            loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in trained_parameters(model).values()]))
        assert torch.equal(logits(model.eval()), logits(model, torch.ones(model.config.num_loops)))
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("make", [tiny_ouro, tiny_hrm])
def test_checkpointed_model_has_its_gates_in_the_block(make, use_reentrant):
    def loss_of(embeds):
        return model(inputs_embeds=embeds, use_cache=False).logits.square().mean()

    model = with_adapter(make(), scale=0.1).train()
    num_loops = attach_looped_model(model).num_loops
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    found = []
    for run in (loss_of, functools.partial(checkpoint, loss_of, use_reentrant=use_reentrant)):
        model.zero_grad()
        with use_gates(model, torch.eye(num_loops)[1] * 2):
            run(embeds).backward()
        found.append(torch.cat([p.grad.flatten() for p in trained_parameters(model).values()]))
    assert torch.equal(*found)
    with use_gates(model, torch.eye(num_loops)[1] * 2):
        loss = checkpoint(loss_of, embeds, use_reentrant=use_reentrant)
    with user_error("`backward..` must be called inside of its block of `use_gates`"):
        loss.backward()
    checkpoint(loss_of, embeds, use_reentrant=use_reentrant).backward()  # at unit gates


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("is_nested", [True, False])
def test_checkpointed_model_does_not_take_the_gates_of_another_block(use_reentrant, is_nested):
    def loss_in_block():
        return checkpoint(lambda x: model(inputs_embeds=x).logits.square().mean(), embeds, use_reentrant=use_reentrant)

    model = with_adapter(tiny_ouro(), scale=0.1).train()
    model.config.use_cache = False
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    first, second = [2, 0, 0, 0], [0, 0, 0, 2]
    message = "`backward..` must be called inside of its block of `use_gates`"
    if is_nested:
        with use_gates(model, first):
            loss = loss_in_block()
            with use_gates(model, second), user_error(message):
                loss.backward()
    else:
        with use_gates(model, first):
            loss = loss_in_block()
        with use_gates(model, second):
            loss_in_block()  # has no backward pass
            with user_error(message):
                loss.backward()
        with use_gates(model, second):
            loss_in_block().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_unit_pass_raises_in_a_block(use_reentrant):
    """Its backward pass in a later block would run the model under other gates, which gave another gradient."""

    def loss():
        return checkpoint(lambda x: model(inputs_embeds=x).logits.square().mean(), embeds, use_reentrant=use_reentrant)

    model = with_adapter(tiny_ouro(), scale=0.1).train()
    model.config.use_cache = False
    add_gates(model)
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    before = loss()
    message = "`backward..` of a pass outside of `use_gates` must not be called inside of a block"
    with use_gates(model, [2, 0, 0, 0]), user_error(message):
        before.backward()
    before = loss()
    with use_gates(model, torch.ones(4)):
        before.backward()  # at unit gates
    with use_gates(model, [2, 0, 0, 0]):
        loss().backward()


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        (torch.ones(3), r"K = 4 loops, .* got the shape \[3\]"),
        (torch.full((4,), float("nan")), "finite"),
        (torch.full((4, 3), 0.5), "one column for each of the 4 examples or one column for all, got 3 columns. Run"),
        (torch.ones(4, 3), "one column for each of the 4 examples or one column for all, got 3 columns. Run"),
        (
            torch.full((4, 2), 0.5),
            r"got 2 columns. `num_beams` .* Repeat the columns, .* `gates.repeat_interleave\(2, dim=1\)`",
        ),
        ({"p": 1}, r"must be a list of numbers, .* such as \[1, 0, 0, 0\], got {'p': 1}"),
        ("1-0-0", r"one number for each loop \(K = 4\), such as 1-0-0-0, got '1-0-0'"),
        (
            "single_lop",
            r"one number for each loop \(K = 4\), such as 1-0-0-0, got 'single_lop'. The adapter in one .* 'loop 4'.$",
        ),
        (0.3, r"got 0.3. For one gate in all loops, write `\[0.3\] \* 4`. A drop probability belongs in"),
    ],
)
def test_use_gates_validates_gates(gates, message):
    with user_error(message), use_gates(model := adapted(), gates):
        model(IDS)


@pytest.mark.parametrize(
    ("token_examples", "message"),
    [
        ([0, 1], r"`token_examples` must be a tensor \[B, S\] of integers, got \[0, 1\]"),
        (torch.zeros(2, 4), "got torch.float32 of shape"),
        (torch.full((2, 4), 7), "`token_examples` must be from 0 to 1, .* got values from 7 to 7"),
    ],
)
def test_use_gates_validates_token_examples(token_examples, message):
    with user_error(message), use_gates(adapted(), torch.ones(4, 2), token_examples):
        pass


@pytest.mark.parametrize(
    ("text", "numbers"), [("1-0-0-0.5", [1, 0, 0, 0.5]), ("loop 2", [0, 1, 0, 0]), ("1-1-1-1", [1] * 4)]
)
def test_use_gates_takes_texts(text, numbers):
    """As the commands do."""
    model = adapted()
    logits = []
    for gates in (text, numbers):
        with use_gates(model, gates):
            logits.append(model(IDS).logits)
    assert torch.equal(*logits)


def test_use_gates_without_gates_changes_nothing():
    plain = tiny_ouro()
    with use_gates(plain, None):
        assert plain(IDS).logits.isfinite().all()
    model = adapted().eval()
    outside = [0.0, 1.0, 0.0, 2.0]
    with torch.no_grad(), use_gates(model, outside) as state:
        want = model(IDS).logits
        with use_gates(model, None) as inner:
            assert inner is state and inner.gates.flatten().tolist() == outside
            assert torch.equal(model(IDS).logits, want)
    assert not gated_layers(model)  # the inner block has not removed the gates of the outer one, which has


def two_adapters(gated_first=True, **fields):
    """Return a model with adapters `default` and `second`, where `second` adapts more modules."""
    model = adapted(target_modules=["q_proj", "v_proj"]).eval()
    if gated_first:
        add_gates(model)
    model.add_adapter("second", default_peft_config(model.get_base_model(), r=4, **fields))
    return randomise(model, 0.05).eval()


def logits(model, gates=None, **inputs):
    with torch.no_grad(), use_gates(model, gates):
        return model(IDS, **inputs).logits


BOTH = (["default", "second"], {"use_rslora": True, "lora_dropout": 0.5})


@pytest.mark.parametrize("gated_first", [True, False], ids=["added to a gated model", "added before"])
@pytest.mark.parametrize(("active", "fields"), [("second", {}), BOTH], ids=str)
def test_active_adapters_are_gated(active, gated_first, fields):
    model = two_adapters(gated_first, **fields).double()
    model.base_model.set_adapter(active)
    with model.disable_adapter():
        frozen = logits(model)
    assert torch.equal(logits(model, torch.zeros(4)), frozen)
    assert not torch.equal(logits(model, torch.eye(4)[3]), frozen)
    gated = logits(model, torch.full((4,), 1.75))
    assert bool(gated_layers(model)) == gated_first
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 1.75
    torch.testing.assert_close(logits(model), gated, atol=1e-5, rtol=1e-5)


def test_adapter_names_per_example_are_gated():
    model = two_adapters()
    names, gates = ["default", "second", "__base__", "second"], torch.eye(4)[2]
    mixed = logits(model, gates, adapter_names=names)
    torch.testing.assert_close(mixed[2], logits(model, torch.zeros(4))[2], atol=1e-5, rtol=1e-5)
    for row in (0, 1, 3):
        model.set_adapter(names[row])
        torch.testing.assert_close(mixed[row], logits(model, gates)[row], atol=1e-5, rtol=1e-5)


def test_rules_gate_their_own_adapter_only():
    model = two_adapters(gated_first=False)
    model.set_adapter("default")
    add_gates(model, rule=make_rule("loop_dropout"))
    frozen = logits(model, torch.zeros(4))
    assert not torch.equal(logits(model), frozen)
    model.set_adapter("second")
    second = logits(model)
    assert torch.equal(logits(model, torch.zeros(4)), second) and not torch.equal(second, frozen)


def test_later_adapters_are_checked(tmp_path):
    learned, model = adapted(), adapted()
    add_gates(learned, rule=make_rule("learned"))
    learned.save_pretrained(tmp_path)
    learned.load_adapter(str(tmp_path), "default")
    add_gates(model)
    with user_error("has learned gates .* PEFT's `load_adapter` does not read"):
        model.load_adapter(str(tmp_path), "other")
    with user_error("DoraLinearVariant has its own forward"):
        model.add_adapter("dora", LoraConfig(use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.add_adapter("mica", LoraConfig(init_lora_weights="mica", target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("mica")
    assert all("lora_A" in name for name in trained_parameters(model))


def test_use_gates_needs_an_unmerged_adapter(model):
    fix = r"Wrap it with peft.get_peft_model first, as in `get_peft_model\(model, default_peft_config\(model\)\)`"
    with user_error(fix), use_gates(model, torch.ones(4)):
        pass
    with (
        user_error(r"`gates` must be finite numbers, got \[1, 0, 0, nan\]"),
        use_gates(with_adapter(), [1, 0, 0, math.nan]),
    ):
        pass
    twice = get_peft_model(with_adapter(), LoraConfig(r=4, target_modules=["q_proj"]))
    with user_error("must be a PEFT model over a looped model, got one over another PEFT model"):
        add_gates(twice)
    for gated_first in (True, False):
        merged = two_adapters(gated_first)
        merged.merge_adapter()
        with user_error("merged into the weights"):
            logits(merged, torch.zeros(4))
        merged.unmerge_adapter()
        logits(merged, torch.zeros(4))


UNSUPPORTED = {  # fields of LoraConfig
    "use_dora": True, "modules_to_save": ["lm_head"], "trainable_token_indices": [3], "bias": "all",
    "init_lora_weights": "pissa_niter_4",
}  # fmt: skip
UNKNOWN_VARIANT = ("brand_new", bool, field(default=True, metadata={"is_lora_variant": True}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(({field: value}, field) for field, value in UNSUPPORTED.items()),
        ({"target_modules": ["q_proj", "lm_head"]}, "`lm_head` is not a linear projection of the recurrent block"),
        (PrefixTuningConfig(num_virtual_tokens=2), "PrefixTuningConfig"),
        (make_dataclass("FutureConfig", [UNKNOWN_VARIANT], bases=(LoraConfig,))(), "`brand_new`"),
    ],
    ids=str,
)
def test_unsupported_adapters_raise(model, config, message):
    if isinstance(config, dict):
        config = LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **config})
    with user_error(message):
        check_peft_config(config)
        add_gates(get_peft_model(model, config))


def test_add_gates_checks_adapters_and_layers():
    model = two_adapters(gated_first=False)
    model.base_model.set_adapter(["default", "second"])
    with user_error("Exactly one adapter must be active"):
        add_gates(model, rule=make_rule("loop_dropout"))
    # Some LoRA layers over quantized weights compute their own update.
    own_class = type("OwnForward", (lora_layer.Linear,), {"forward": lambda self, x: self.base_layer(x)})
    adapted_layers(model)[3].__class__ = own_class
    with user_error("`model.layers.0.self_attn.o_proj` .*OwnForward"):
        add_gates(model)


FACTORS = {True: {"B"}, False: {"A", "B"}, "gaussian": {"B"}, "orthogonal": {"A", "B"}, "mica": {"A"}}


@pytest.mark.parametrize("init", FACTORS)
def test_base_preserving_inits_train(init, model, train):
    frozen = model(IDS).logits
    peft_model = get_peft_model(model, default_peft_config(r=4, init_lora_weights=init))
    assert torch.equal(logits(peft_model, torch.zeros(4)), frozen)
    (first,) = train(peft_model, cls=Recorder, max_steps=1).seen
    changed = [name for name, gradient in first.gradients.items() if gradient.any()]
    assert {name.split(".lora_")[1][0] for name in changed} == FACTORS[init]


@pytest.mark.parametrize("make", [tiny_ouro, tiny_hrm], ids=["ouro", "hrm_text"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copied_models_have_separate_gates(train, make, duplicate):
    # TRL replaces `forward` on the instance. Copies of models of this package do not take it over.
    model = train(make(), max_steps=2).model.eval() if make is tiny_ouro else with_adapter(make(), scale=0.3).eval()
    again, gates = duplicate(model), torch.eye(find_looped_model(model).num_loops)[0]
    ungated, gated = logits(model), logits(model, gates)
    assert not torch.equal(gated, ungated)
    with use_gates(again, gates):
        assert torch.equal(logits(again), gated) and torch.equal(logits(model), ungated)
