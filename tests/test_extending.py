"""Foreign looped classes, by the example of docs/extending.md: HRM-Text of transformers."""

import re

import pytest
import torch
from conftest import ROOT, tiny_hrm, trained_parameters, with_adapter
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HrmTextConfig,
    HrmTextForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from loopdropout_trainer import LoopDescription, check_loops, load_model, merge_and_save, register_looped, use_gates
from loopdropout_trainer.diagnostics import readouts, single_loop
from loopdropout_trainer.looped import DESCRIPTIONS, NotLoopedError, find_looped_model


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
    looped = find_looped_model(model)
    names = looped.recurrent_linears()
    assert len(names) == 2 * 8 and all(name.startswith(("model.L_module.", "model.H_module.")) for name in names)
    check_loops(model, input_ids=ids)
    looped.num_loops = 2
    peft_model = with_adapter(model)
    check_loops(peft_model, input_ids=ids)
    assert find_looped_model(peft_model) is looped and looped.recurrent_linears() == names


def test_detached_description_leaves_no_hooks():
    model = tiny_hrm()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    find_looped_model(model).detach()
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert not hooks and before.keys() == {name for name, _ in model.named_modules()}
    assert vars(model).keys() == before[""].keys() and type(model) is HrmTextForCausalLM


@pytest.mark.parametrize("checkpointing", [False, True])
def test_foreign_gradients_equal_weights_by_hand(checkpointing):
    gates = torch.tensor([[0.0, 2.0], [2.0, 0.0], [0.5, 2.0]])
    ids = torch.randint(2, 258, (2, 9))
    peft_model = with_adapter(tiny_hrm(), scale=0.1).train()
    if checkpointing:
        peft_model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    with use_gates(peft_model, gates):
        out = peft_model(ids, labels=ids, use_cache=False)
        out.loss.backward()
    named = trained_parameters(peft_model)
    weights = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    for row in range(2):  # W + g Delta, one example at a time, without a description
        model, loop = tiny_hrm().train(), [0]
        for name, module in model.named_modules():
            if f"base_model.model.{name}.lora_A.default.weight" in weights:
                a, b = (weights[f"base_model.model.{name}.lora_{factor}.default.weight"] for factor in "AB")

                def forward(x, module=module, a=a, b=b, row=row, loop=loop):
                    return nn.functional.linear(x, module.weight + gates[loop[0], row] * 2 * b @ a)

                module.forward = forward
        model.model.H_module.register_forward_hook(lambda *_, loop=loop: loop.__setitem__(0, loop[0] + 1))
        logits = model(ids[row : row + 1], use_cache=False).logits
        torch.testing.assert_close(out.logits[row], logits[0], atol=1e-5, rtol=1e-5)
        (nn.functional.cross_entropy(logits[0, :-1], ids[row, 1:]) / 2).backward()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.grad, weights[name].grad, atol=1e-5, rtol=1e-4)


def test_foreign_depth_and_readouts(tmp_path):
    model, ids = tiny_hrm().eval(), torch.tensor([[1, 1, 5, 6], [2, 3, 4, 5]])
    looped, states = find_looped_model(model), []
    hook = model.model.H_module.register_forward_hook(lambda module, args, output: states.append(output))
    model.model(ids)
    hook.remove()
    assert all(map(torch.equal, looped.loop_readouts(input_ids=ids), states)) and len(states) == looped.num_loops == 3
    with pytest.raises(ValueError, match="num_loops"):
        looped.num_loops = 0
    looped.num_loops = 5
    model.save_pretrained(tmp_path)
    assert find_looped_model(AutoModelForCausalLM.from_pretrained(tmp_path)).num_loops == 5
    assert find_looped_model(load_model(tmp_path, num_loops=2)).num_loops == 2


def test_foreign_model_trains_and_merges(train, tokenizer, tmp_path):
    tiny_hrm().save_pretrained(tmp_path / "base")
    fields = {"gradient_checkpointing": True, "max_steps": 3, "model_init_kwargs": {"num_loops": 4}}
    trainer = train(str(tmp_path / "base"), **fields)
    active = [entry["active_loop_4"] for entry in trainer.state.log_history if "active_loop_4" in entry]
    assert len(active) == 3 and any(0 < share < 1 for share in active)
    assert trainer.num_loops == 4 and trainer.evaluate()["eval_loss"] > 0
    batches = [trainer.data_collator([trainer.eval_dataset[i] for i in range(4)])]
    losses = {row["gates"]: row["value"] for row in single_loop(trainer.model, batches) if row["metric"] == "loss"}
    assert losses["unit"] < losses["none"] and len(losses) == 6
    last = [row["value"] for row in readouts(trainer.model, batches) if row["metric"] == "readout_loss"][-1]
    assert last == pytest.approx(losses["unit"], abs=1e-4)
    merge_and_save(trainer.model, tmp_path / "merged", tokenizer)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.arange(2, 14).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, trainer.model.eval()(ids).logits, atol=1e-5, rtol=1e-5)


def test_trainer_loads_an_own_class_by_name(make_sft, monkeypatch, tmp_path):
    class OwnConfig(HrmTextConfig):
        model_type = "own_hrm"

    class OwnHrm(HrmTextForCausalLM):
        config_class = OwnConfig

    monkeypatch.setitem(DESCRIPTIONS, OwnHrm, None)
    register_looped(OwnHrm, DESCRIPTIONS[HrmTextForCausalLM])
    AutoConfig.register("own_hrm", OwnConfig)
    AutoModelForCausalLM.register(OwnConfig, OwnHrm)
    fields = tiny_hrm().config.to_dict()
    OwnHrm(OwnConfig(**{name: fields[name] for name in fields.keys() - {"model_type"}})).save_pretrained(tmp_path)
    trainer = make_sft(str(tmp_path), model_init_kwargs={"num_loops": 2})
    assert type(trainer.model.get_base_model()) is OwnHrm and trainer.num_loops == 2


def test_description_of_a_backbone_raises():
    with pytest.raises(ValueError, match="must be a causal language model, got HrmTextModel"):
        register_looped(type(tiny_hrm().model), LoopDescription)


def test_check_loops_finds_a_wrong_loop(monkeypatch):
    class OneLoop(LoopDescription):
        num_loops = 2
        recurrent_layers = lambda self: self.base_model.layers
        running_loop = lambda self, **kwargs: 0

    sizes = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model, ids = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), torch.tensor([[3]])
    with pytest.raises(NotLoopedError):
        check_loops(model, input_ids=ids)
    monkeypatch.setitem(DESCRIPTIONS, LlamaForCausalLM, OneLoop)
    with pytest.raises(NotLoopedError, match=r"`model.layers.0.* each of the 2 loops.* \[0\]"):
        check_loops(model, input_ids=ids)
