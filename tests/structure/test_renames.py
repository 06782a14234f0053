"""Old names work for one release, with a warning that names the new one."""

from dataclasses import dataclass

import pytest
import torch
from peft import get_peft_model

from helpers.tiny import tiny_ouro
from loopdropout_trainer import LoopDropoutSFTTrainer, default_peft_config, loop_dropout, looped
from loopdropout_trainer.gates import RULES, Draw, LoRA, make_rule, register_rule


def test_old_function_warns():
    model = tiny_ouro()
    own_depth = model.num_loops
    with pytest.warns(DeprecationWarning, match="`set_depth` is now `use_depth`"), looped.set_depth(model, 2):
        assert model.num_loops == 2
    assert model.num_loops == own_depth


def test_old_attributes_of_a_rule_warn():
    rule = make_rule("lora_dropout", num_masks=3)
    with pytest.warns(DeprecationWarning, match="`passes` is now `draws_per_batch`"):
        assert rule.passes == 3
    with pytest.warns(DeprecationWarning, match="`adapter` is now `lora_kind`"):
        assert rule.adapter == "sparse"
    with pytest.warns(DeprecationWarning, match="`pass_index` is now `draw_index`"):
        assert Draw(0, 0, [(0, 0)], 2, draw_index=1).pass_index == 1


def test_old_attributes_of_an_own_rule_are_taken():
    @dataclass(frozen=True)
    class Own(LoRA):
        name = "own"
        adapter = "sparse"
        passes = 2

    with pytest.warns(DeprecationWarning) as warnings:
        register_rule(Own)
    del RULES["own"]
    assert {warning.filename for warning in warnings} == {__file__}
    assert (Own().lora_kind, Own().draws_per_batch) == ("sparse", 2)


def test_last_gates_have_their_old_name():
    model = get_peft_model(tiny_ouro(), default_peft_config()).train()
    handle = loop_dropout(model, seed=1)
    model(torch.tensor([[1, 2, 3]]))
    with pytest.warns(DeprecationWarning, match="`drawn` is now `last_gates`"):
        assert handle.drawn is handle.last_gates is not None
    assert isinstance(LoopDropoutSFTTrainer.drawn, property)  # of the trainer, by the same function
