"""Foreign looped classes, by the example of docs/extending.md: HRM-Text of transformers."""

import json
import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, HrmTextConfig, HrmTextForCausalLM, LlamaForCausalLM

from helpers.errors import user_error
from helpers.files import ROOT
from helpers.tiny import DECODER, DORY, tiny, tiny_hrm, trained_parameters, with_adapter
from loopdropout_trainer import LoopDescription, check_loops, load_model, register_looped, use_gates
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import DESCRIPTIONS, NotLoopedError, attach_looped_model, find_looped_model


EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)[1]


@pytest.fixture(autouse=True, scope="module")
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DESCRIPTIONS, HrmTextForCausalLM, DESCRIPTIONS[HrmTextForCausalLM])  # the package's own
        exec(EXAMPLE, {"__name__": "example"})
        yield


def test_description_sets_every_loop():
    assert len(EXAMPLE.splitlines()) <= 40
    model, ids = tiny_hrm().eval(), torch.tensor([[3, 4, 5]])
    looped = attach_looped_model(model)
    names = looped.recurrent_linears()
    assert len(names) == 2 * 8 and all(name.startswith(("model.L_module.", "model.H_module.")) for name in names)
    check_loops(model, input_ids=ids)
    looped.num_loops = 2
    peft_model = with_adapter(model)
    check_loops(peft_model, input_ids=ids)
    assert find_looped_model(peft_model) is looped and looped.recurrent_linears() == names


def test_detached_description_leaves_no_hooks():
    model = tiny_hrm()
    look = lambda: [(type(module), *module._forward_pre_hooks, *vars(module)) for module in model.modules()]
    before = look()
    assert find_looped_model(model).num_loops == 3 and look() == before
    description = attach_looped_model(model)
    assert look() != before and attach_looped_model(model) is description
    description.detach()
    assert look() == before


def logits_by_hand(ids, weights, gates):
    """Return the logits of one example under W + g Delta, without a description."""
    model, gates = tiny_hrm().train(), list(gates)
    for name, module in model.named_modules():
        a, b = (weights.get(f"base_model.model.{name}.lora_{factor}.default.weight") for factor in "AB")
        if a is not None:
            gated = lambda module, args, output, a=a, b=b: output + gates[0] * 2 * args[0] @ a.T @ b.T
            module.register_forward_hook(gated)
    model.model.H_module.register_forward_hook(lambda *_: gates.__delitem__(0))
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("checkpointing", [False, True])
def test_foreign_gradients_equal_weights_by_hand(checkpointing):
    gates = torch.tensor([[0.0, 2.0], [2.0, 0.0], [0.5, 2.0]])
    ids = torch.randint(2, 258, (2, 9))
    peft_model = with_adapter(tiny_hrm(), scale=0.1).train()
    if checkpointing:
        peft_model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = trained_parameters(peft_model)
    with use_gates(peft_model, gates):
        out = peft_model(ids, labels=ids, use_cache=False)
        gradients = torch.autograd.grad(out.loss, weights.values())
    logits = torch.cat([logits_by_hand(ids[row, None], weights, gates[:, row]) for row in range(2)])
    torch.testing.assert_close(out.logits, logits, atol=1e-5, rtol=1e-5)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(gradients, torch.autograd.grad(loss, weights.values()), atol=1e-5, rtol=1e-4)


def test_foreign_depth_and_readouts(tmp_path):
    model, ids = tiny_hrm().eval(), torch.tensor([[1, 1, 5, 6], [2, 3, 4, 5]])
    looped, states = attach_looped_model(model), []
    outputs = looped.loop_readouts(input_ids=ids)
    model.model.H_module.register_forward_hook(lambda module, args, output: states.append(output))
    model.model(ids)
    assert len(states) == looped.num_loops == 3
    torch.testing.assert_close(outputs, tuple(states), rtol=0, atol=0)
    with user_error("num_loops"):
        looped.num_loops = 0
    looped.num_loops = 5
    model.save_pretrained(tmp_path)
    assert find_looped_model(AutoModelForCausalLM.from_pretrained(tmp_path)).num_loops == 5
    assert find_looped_model(load_model(tmp_path, num_loops=2)).num_loops == 2


@pytest.mark.parametrize("make", [tiny_hrm, DORY])
@pytest.mark.parametrize("depth", [0, -1, 2.5, "deep"])
def test_configuration_without_loops_raises(tmp_path, make_sft, make, depth):
    make().save_pretrained(tmp_path)
    file, name = tmp_path / "config.json", DESCRIPTIONS[type(make())].depth_field
    file.write_text(json.dumps({**json.loads(file.read_text()), name: depth}))
    for load in (load_model, make_sft):
        with user_error(f"{name}.*{depth}"):
            load(str(tmp_path))


def test_trainer_loads_an_own_class_by_name(make_sft, monkeypatch, tmp_path):
    class OwnConfig(HrmTextConfig):
        model_type = "own_hrm"

    class OwnHrm(HrmTextForCausalLM):
        config_class = OwnConfig

    monkeypatch.setitem(DESCRIPTIONS, OwnHrm, None)
    register_looped(OwnHrm, DESCRIPTIONS[HrmTextForCausalLM])
    AutoConfig.register("own_hrm", OwnConfig)
    AutoModelForCausalLM.register(OwnConfig, OwnHrm)
    tiny(OwnHrm, **DECODER)().save_pretrained(tmp_path)
    trainer = make_sft(str(tmp_path), model_init_kwargs={"num_loops": 2})
    assert type(trainer.model.get_base_model()) is OwnHrm and trainer.num_loops == 2


def test_incomplete_descriptions_raise():
    with pytest.raises(TypeError, match="recurrent_layers.*running_loop"):
        LoopDescription(tiny_hrm())
    wrong = type("Wrong", (DESCRIPTIONS[HrmTextForCausalLM],), {"depth_field": "cycles"})(tiny_hrm())
    with pytest.raises(
        UserError, match="`depth_field` of Wrong must name the field of HrmTextConfig .*, got 'cycles'"
    ):
        wrong.num_loops  # noqa: B018


def test_wrong_descriptions_raise(monkeypatch):
    class OneLoop(LoopDescription):
        num_loops = 2
        recurrent_layers = lambda self: self.base_model.layers
        running_loop = lambda self, **kwargs: 0

    model, ids = tiny(LlamaForCausalLM, **DECODER)(), torch.tensor([[3]])
    with user_error("must be a causal language model, got LlamaModel"):
        register_looped(type(model.model), OneLoop)
    with pytest.raises(NotLoopedError):
        check_loops(model, input_ids=ids)
    monkeypatch.setitem(DESCRIPTIONS, LlamaForCausalLM, OneLoop)
    with pytest.raises(NotLoopedError, match=r"`model.layers.0.* each of the 2 loops.* \[0\]"):
        check_loops(model, input_ids=ids)
    forward = model.model.forward
    model.model.forward = lambda loop_gates, **inputs: forward(**inputs)
    with pytest.raises(NotLoopedError, match="`model.layers.0.* under the current gates.* pass unknown keywords on"):
        check_loops(model, input_ids=ids)
