"""Adding one thing is adding one file: a rule, and a kind of adapter with parameters of its own, written out and counted."""

import pytest
import torch
from conftest import tiny_ouro
from peft.utils import get_peft_model_state_dict

from loopdropout_trainer import load_adapter
from loopdropout_trainer.adapters import ADAPTER_KINDS
from loopdropout_trainer.gates import RULES


RULE = '''
from dataclasses import dataclass

import torch

from loopdropout_trainer.gates import GateRule, register_rule


@register_rule
@dataclass(frozen=True)
class Alternating(GateRule):
    """Even steps use the first half of the loops, odd steps the second, at twice the strength."""

    name = "alternating"
    adapter = "module_strength"
    mergeable = False

    def sample(self, draw):
        late = torch.arange(draw.num_loops).unsqueeze(1) >= draw.num_loops // 2  # [K, 1]
        return 2.0 * (late == bool(draw.step % 2)).float()
'''

KIND = '''
import torch
from torch import nn

from loopdropout_trainer.adapters.gated import GatedLora, adapted_layers


class ModuleStrength(GatedLora, kind="module_strength"):
    """A gated layer whose update has a learned strength, one for each adapted module: `lora_module_strengths` [M]."""

    description = "learned strengths of its modules"

    @classmethod
    def prepare(cls, model, adapter, num_loops, seed):
        if not cls.is_on(model, adapter):
            strengths = nn.Parameter(torch.ones(len(adapted_layers(model))))
            model.base_model.lora_module_strengths = nn.ParameterDict({adapter: strengths})
        return model.base_model.lora_module_strengths, adapter

    @classmethod
    def is_on(cls, model, adapter):
        return adapter in dict(model.base_model.named_children()).get("lora_module_strengths", ())

    @classmethod
    def saved_num_loops(cls, shapes):
        return 4 if any(map(cls.is_own, shapes)) else None

    @classmethod
    def is_own(cls, name):
        return "lora_module_strengths" in name

    def gate(self, x):
        drawn, (strengths, adapter) = super().gate(x), self.shared
        return strengths[adapter][self.module] * (1 if drawn is None else drawn)
'''


def lines_of(source):
    return sum(bool(line.strip()) for line in source.splitlines())


@pytest.fixture
def registered():
    exec(RULE, {"__name__": "alternating"})
    exec(KIND, {"__name__": "module_strength"})
    yield
    del RULES["alternating"], ADAPTER_KINDS["module_strength"]


def test_a_rule_and_an_adapter_kind_are_a_file_each(registered, make_sft, train, tmp_path):
    assert lines_of(RULE) <= 14 and lines_of(KIND) <= 28  # docs/architecture.md tells these numbers
    trainer = train(rule="alternating", max_steps=3)
    assert [log["active_loop_1"] for log in trainer.state.log_history if "active_loop_1" in log] == [1, 0, 1]
    strengths = trainer.model.base_model.lora_module_strengths["default"]
    assert strengths.shape == (14,) and (strengths != 1).all()

    trainer.save_model(str(tmp_path / "adapter"))
    loaded = load_adapter(tiny_ouro(), tmp_path / "adapter")
    want, got = get_peft_model_state_dict(trainer.model), get_peft_model_state_dict(loaded)
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    ids = torch.arange(2, 42).view(4, 10)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits, atol=1e-6, rtol=1e-6)

    again = train(load_adapter(tiny_ouro(), tmp_path / "adapter", is_trainable=True), rule="alternating")
    with pytest.raises(ValueError, match="'lora' trains a shared adapter.*learned strengths of its modules"):
        make_sft(again.model, rule="lora")
