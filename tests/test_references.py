"""With nothing trained yet and unit gates, policy and reference are one model: DPO's first loss is ln 2, GRPO's first KL 0."""

import math

import pytest
import torch
from conftest import randomise, tiny_huginn, tiny_ouro, with_adapter
from datasets import Dataset

from loopdropout_trainer import (
    LoopDropoutDPOConfig,
    LoopDropoutDPOTrainer,
    LoopDropoutGRPOConfig,
    LoopDropoutGRPOTrainer,
)
from loopdropout_trainer.lora import add_gates
from loopdropout_trainer.gates import make_rule


PAIRS = Dataset.from_list([{"prompt": f"{i}=", "chosen": "a" * (i % 3 + 1), "rejected": "b"} for i in range(8)])
PROMPTS = PAIRS.select_columns("prompt")
FRESH, LN_2 = None, pytest.approx(math.log(2), abs=2e-5)
CASES = [(base, rule) for base in (tiny_ouro, tiny_huginn) for rule in (FRESH, "lora", "learned", "independent")]


def start(base, rule):
    """A model without an adapter, or with one of the rule's kind that acts differently in each loop, if its kind can."""
    fields = {"p": 0.0} if rule in ("learned", "independent") else {}
    model = base()
    if rule is not FRESH:
        model = with_adapter(model, scale=0.3)
        add_gates(model, rule=make_rule(rule, **fields))
        randomise(model)
    return model, {"rule": rule or "lora", "use_cpu": True, "max_steps": 1, **fields}


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize(("base", "rule"), CASES)
def test_dpo_begins_at_ln_2(config, tokenizer, base, rule, precompute):
    model, fields = start(base, rule)
    args = config(LoopDropoutDPOConfig, **fields, beta=1.0, precompute_ref_log_probs=precompute)
    trainer = LoopDropoutDPOTrainer(model, args=args, train_dataset=PAIRS, processing_class=tokenizer)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == LN_2


def test_a_reference_that_was_computed_before_is_that_of_its_depth(config, tokenizer):
    """The cache is one for all runs on a dataset: another depth or start state must not read it."""
    seen = set()
    for base in (tiny_ouro(), tiny_ouro(total_ut_steps=2), tiny_huginn(), tiny_huginn(state_seed=5)):
        args = config(LoopDropoutDPOConfig, use_cpu=True, max_steps=1, rule="lora", precompute_ref_log_probs=True)
        trainer = LoopDropoutDPOTrainer(base, args=args, train_dataset=PAIRS, processing_class=tokenizer)
        seen.add(tuple(trainer.train_dataset["ref_chosen_logps"]))
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == LN_2
    assert len(seen) == 4


class Recorder(LoopDropoutGRPOTrainer):
    """Keeps the last batch and the log-probabilities of its completions."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.batch = inputs
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.scores


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("base", "rule"), CASES)
def test_grpo_begins_at_a_kl_of_0_and_ratios_of_1(config, tokenizer, base, rule, uses):
    model, fields = start(base, rule)
    fields |= {"beta": 0.5, "num_generations": 2, "max_completion_length": 5, "num_iterations": uses}
    rewards = lambda completions, **columns: [float(sum(map(ord, text)) % 7) for text in completions]
    args = config(LoopDropoutGRPOConfig, **fields)
    trainer = Recorder(model, rewards, args, train_dataset=PROMPTS, processing_class=tokenizer)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["kl"] == pytest.approx(0, abs=1e-5) and log["clip_ratio/region_mean"] == 0
    if uses == 2:
        mask = trainer.batch["completion_mask"].bool()
        ratio = (trainer.scores[0] - trainer.batch["old_per_token_logps"]).exp()[mask]
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)
