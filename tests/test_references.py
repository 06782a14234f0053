"""With nothing trained yet and unit gates, policy and reference are one model: DPO's first loss is ln 2, GRPO's first KL 0."""

import math

import pytest
import torch
from conftest import tiny_huginn, tiny_ouro, with_adapter
from datasets import Dataset

from loopdropout_trainer import (
    LoopDropoutDPOConfig,
    LoopDropoutDPOTrainer,
    LoopDropoutGRPOConfig,
    LoopDropoutGRPOTrainer,
)
from loopdropout_trainer.adapters import add_gates
from loopdropout_trainer.gates import make_rule


PAIRS = Dataset.from_list([{"prompt": f"{i}=", "chosen": "a" * (i % 3 + 1), "rejected": "b"} for i in range(8)])
PROMPTS = Dataset.from_list([{"prompt": f"{i}="} for i in range(8)])


def pretrained(base, rule):
    """An adapter of the rule's kind that acts differently in each loop, if its kind can."""
    model = with_adapter(base, scale=0.3)
    add_gates(model, rule=make_rule(rule, **({"p": 0.0} if rule != "lora" else {})))
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_loop_gates" in name:
            parameter.data = torch.tensor([0.2, 1.7, 0.6, 2.5])
        elif "lora_B" in name and parameter.dim() == 3:
            torch.manual_seed(index)
            parameter.data = torch.randn_like(parameter) * 0.3
    return model


CASES = [
    (base, rule, trained)
    for base in (tiny_ouro, tiny_huginn)
    for rule in ("lora", "learned", "independent")
    for trained in (True, False)
    if trained or rule == "lora"
]


def fields_of(rule):
    return {"rule": rule, "p": 0.0} if rule != "lora" else {"rule": rule}


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize(("base", "rule", "trained"), CASES)
def test_dpo_begins_at_ln_2(config, tokenizer, base, rule, trained, precompute):
    args = config(
        LoopDropoutDPOConfig,
        use_cpu=True,
        max_steps=1,
        beta=1.0,
        precompute_ref_log_probs=precompute,
        **fields_of(rule),
    )
    model = pretrained(base(), rule) if trained else base()
    trainer = LoopDropoutDPOTrainer(model, args=args, train_dataset=PAIRS, processing_class=tokenizer)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=2e-5)


def test_a_reference_that_was_computed_before_is_that_of_its_depth(config, tokenizer):
    """The cache is one for all runs on a dataset: another depth or start state must not read it."""
    seen = []
    for base in (tiny_ouro(), tiny_ouro(total_ut_steps=2), tiny_huginn(), tiny_huginn(state_seed=5)):
        args = config(LoopDropoutDPOConfig, use_cpu=True, max_steps=1, rule="lora", precompute_ref_log_probs=True)
        trainer = LoopDropoutDPOTrainer(base, args=args, train_dataset=PAIRS, processing_class=tokenizer)
        seen.append(tuple(trainer.train_dataset["ref_chosen_logps"]))
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=2e-5)
    assert len(set(seen)) == 4


class Recorder(LoopDropoutGRPOTrainer):
    """Keeps the first ratio of new to old log-probabilities."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.batch = inputs
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.scores


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("base", "rule", "trained"), CASES)
def test_grpo_begins_at_a_kl_of_0_and_ratios_of_1(config, tokenizer, base, rule, trained, uses):
    args = config(
        LoopDropoutGRPOConfig,
        use_cpu=True,
        max_steps=1,
        beta=0.5,
        num_generations=2,
        max_completion_length=5,
        num_iterations=uses,
        **fields_of(rule),
    )
    model = pretrained(base(), rule) if trained else base()
    rewards = lambda completions, **columns: [float(sum(map(ord, text)) % 7) for text in completions]
    trainer = Recorder(model, rewards, args, train_dataset=PROMPTS, processing_class=tokenizer)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["kl"] == pytest.approx(0, abs=1e-5)
    assert log["clip_ratio/region_mean"] == 0
    if uses == 2:
        mask = trainer.batch["completion_mask"].bool()
        ratio = (trainer.scores[0] - trainer.batch["old_per_token_logps"]).exp()[mask]
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)
