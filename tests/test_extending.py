"""Foreign looped classes, by the example of docs/extending.md: HRM-Text of transformers."""

import copy
import re
from unittest.mock import patch

import pytest
import torch
from conftest import ROOT, tiny_hrm, trained_parameters, with_adapter
from peft import LoraConfig, get_peft_model
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers import AutoModelForCausalLM, HrmTextForCausalLM, LlamaConfig, LlamaForCausalLM

from loopdropout_trainer import LoopDescription, check_loops, merge_and_save, register_looped, use_gates
from loopdropout_trainer.described import DESCRIPTIONS
from loopdropout_trainer.diagnostics import readouts, single_loop
from loopdropout_trainer.looped import NotLoopedError, find_looped_model
from loopdropout_trainer.lora import adapted_layers
from loopdropout_trainer.models import OuroForCausalLM


EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)[1]


@pytest.fixture(autouse=True, scope="module")
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DESCRIPTIONS, HrmTextForCausalLM, DESCRIPTIONS[HrmTextForCausalLM])  # the package's own
        exec(EXAMPLE, {"__name__": "example"})
        yield


def test_described_model_sets_every_loop(monkeypatch):
    assert len(EXAMPLE.splitlines()) <= 40
    monkeypatch.delitem(TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, "hrm_text", raising=False)
    model, ids = tiny_hrm().eval(), torch.tensor([[3, 4, 5]])
    names = find_looped_model(model).recurrent_linears()
    assert len(names) == 2 * 8 and all(name.startswith(("model.L_module.", "model.H_module.")) for name in names)
    twin = copy.deepcopy(model)
    twin.config.num_loops = 2
    for looped in (model, twin, model):
        check_loops(looped, input_ids=ids)
    peft_model = get_peft_model(model, LoraConfig())
    assert len(adapted_layers(peft_model)) == len(names)
    assert find_looped_model(peft_model).recurrent_linears() == names


@pytest.mark.parametrize("checkpointing", [False, True])
def test_described_gradients_equal_weights_by_hand(checkpointing):
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


def test_described_depth_is_num_loops(tmp_path):
    model, ids = tiny_hrm().eval(), torch.tensor([[1, 1, 5, 6], [2, 3, 4, 5]])
    looped, slow = find_looped_model(model), model.model.H_module
    by_loop = looped.loop_readouts(input_ids=ids)
    before_norm = {"readout_module": lambda: slow.layers[-1], "readout": lambda output: slow.final_norm(output)}
    with patch.multiple(looped, **before_norm):
        assert all(map(torch.equal, looped.loop_readouts(input_ids=ids), by_loop))
    for num_loops in (1, 2, 3):
        model.config.num_loops = num_loops
        assert torch.equal(model.model(ids, use_cache=False).last_hidden_state, by_loop[num_loops - 1])
    with pytest.raises(ValueError, match="num_loops"):
        model.config.num_loops = 0
    model.config.num_loops = 5
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_loops == 5
    assert AutoModelForCausalLM.from_pretrained(tmp_path, num_loops=2).config.num_loops == 2


def test_described_model_trains_and_merges(train, tokenizer, tmp_path):
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


def test_wrong_descriptions_raise(train):
    model = tiny_hrm()
    model.config.num_loops = 4
    with pytest.raises(ValueError, match="to train at another depth, load it with `num_loops`"):
        train(model)
    for cls, message in ((OuroForCausalLM, "looped by itself"), (type(model.model), "not a causal language model")):
        with pytest.raises(ValueError, match=message):
            register_looped(cls, LoopDescription)


def test_check_loops_finds_a_wrong_loop():
    class OneLoop(LoopDescription):
        get_num_loops = staticmethod(lambda config: 2)
        recurrent_layers = lambda self: self.model.layers
        running_loop = lambda self, layer, *args, **kwargs: 0
        readout_module = lambda self: self.model.norm

    sizes = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config, ids = LlamaConfig(**sizes, num_attention_heads=2), torch.tensor([[3]])
    built_before = LlamaForCausalLM(config)
    register_looped(LlamaForCausalLM, OneLoop)
    try:
        with pytest.raises(NotLoopedError):
            check_loops(built_before, input_ids=ids)
        model = LlamaForCausalLM(config)
        with pytest.raises(NotLoopedError, match=r"`model.layers.0.* each of the 2 loops.* \[0\]"):
            check_loops(model, input_ids=ids)
        with pytest.raises(ValueError, match="it ran 1 times"):
            find_looped_model(model).loop_readouts(input_ids=ids)
    finally:
        del DESCRIPTIONS[LlamaForCausalLM], LlamaConfig.num_loops
