"""`LoopDropoutDPOTrainer` against DPO computed directly from the model: pairs share gates, the reference has none."""

import pytest
import torch
from conftest import tiny_ouro, with_adapter
from datasets import Dataset
from peft import PeftModel
from torch.nn import functional as F
from trl import DPOConfig

from loopdropout_trainer import LoopDropoutDPOConfig, LoopDropoutDPOTrainer, use_gates
from loopdropout_trainer.gates import Draw, LoopDropout


BETA = 0.1


@pytest.fixture(scope="module")
def pairs():
    return Dataset.from_list(
        [{"prompt": f"{i}+{i % 7}=", "chosen": "a" * (i % 4 + 1), "rejected": "b" * (i % 3 + 2)} for i in range(16)]
    )


@pytest.fixture
def dpo_config(config, tmp_path):
    def make(cls=LoopDropoutDPOConfig, **fields):
        defaults = {"output_dir": str(tmp_path), "max_steps": 1, "beta": BETA, "use_cpu": True}
        return config(cls, **{**defaults, **fields})

    return make


def log_probability(model, input_ids, attention_mask, completion_mask):
    """Log probability of each row's completion, [2N]."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
    tokens = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return (tokens * completion_mask[:, 1:]).sum(-1)


def dpo_loss(policy, reference):
    chosen, rejected = (policy - reference).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


class Recorder(LoopDropoutDPOTrainer):
    """Keeps the first micro-batch, its gates, loss and gradients."""

    seen = None

    def training_step(self, model, inputs, *args, **kwargs):
        batch = {name: tensor.clone() for name, tensor in inputs.items()}
        drawn = []
        apply = self.loop_state.apply
        self.loop_state.apply = lambda plan: (drawn.append(plan.gates), apply(plan))[1]
        loss = super().training_step(model, inputs, *args, **kwargs)
        del self.loop_state.apply
        if self.seen is None:
            gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.requires_grad}
            self.seen = (batch, [gates for gates in drawn if gates is not None], loss, gradients)
        return loss


@pytest.mark.parametrize("pretrained", [False, True], ids=["reference is the base", "reference is a frozen adapter"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_are_those_of_the_gated_policy_against_the_ungated_reference(
    dpo_config, pairs, tokenizer, pretrained, checkpointing
):
    model = with_adapter() if pretrained else tiny_ouro()
    args = dpo_config(gradient_checkpointing=checkpointing)
    trainer = Recorder(model, args=args, train_dataset=pairs, processing_class=tokenizer)
    if not pretrained:  # a fresh adapter changes nothing
        for (_, new), (_, old) in zip(
            trainer.model.named_parameters(), with_adapter().named_parameters(), strict=True
        ):
            new.data.copy_(old.data)
    trainer.train()
    batch, drawn, loss, gradients = trainer.seen

    assert len(drawn) == 1, "the gates are drawn once in a micro-batch"
    want = LoopDropout(0.5).sample(Draw(seed=args.seed, step=0, example_ids=[(i, 0) for i in range(4)], num_loops=4))
    torch.testing.assert_close(drawn[0], torch.cat([want, want], dim=1), rtol=0, atol=0)

    oracle = with_adapter()
    frozen = with_adapter() if pretrained else tiny_ouro()
    with torch.no_grad():
        reference = log_probability(frozen.eval(), **batch)
    with use_gates(oracle, drawn[0]):
        expected = dpo_loss(log_probability(oracle.train(), **batch), reference)
        expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in oracle.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_evaluation_is_plain_dpo_at_unit_gates(dpo_config, pairs, tokenizer):
    trainer = LoopDropoutDPOTrainer(
        tiny_ouro(), args=dpo_config(), train_dataset=pairs, eval_dataset=pairs, processing_class=tokenizer
    )
    trainer.train()
    model = trainer.model.eval()
    total = 0.0
    for batch in trainer.get_eval_dataloader():
        batch = {
            name: tensor
            for name, tensor in batch.items()
            if name in ("input_ids", "attention_mask", "completion_mask")
        }
        with torch.no_grad():
            policy = log_probability(model, **batch)
            with model.disable_adapter():
                reference = log_probability(model, **batch)
        total += dpo_loss(policy, reference).item() * len(batch["input_ids"]) / 2
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / len(pairs), rel=1e-4)
    assert trainer.loop_state.gates is None


def test_accumulation_draws_the_gates_of_one_large_batch_and_gives_its_weights(dpo_config, pairs, tokenizer):
    weights = []
    for batch, accumulation in ((4, 1), (2, 2)):
        args = dpo_config(max_steps=3, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
        trainer = LoopDropoutDPOTrainer(tiny_ouro(), args=args, train_dataset=pairs, processing_class=tokenizer)
        trainer.train()
        weights.append([p.detach() for p in trainer.model.parameters() if p.requires_grad])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_plain_dpo_arguments_get_the_papers_rule_and_other_arguments_are_refused(dpo_config, pairs, tokenizer, config):
    args = dpo_config(DPOConfig)
    trainer = LoopDropoutDPOTrainer(tiny_ouro(), None, args, train_dataset=pairs, processing_class=tokenizer)
    assert isinstance(trainer.model, PeftModel)
    assert (trainer.rule, trainer.args.beta) == (LoopDropout(0.5), BETA)
    with pytest.raises(ValueError, match="LoopDropoutDPOConfig or DPOConfig; got LoopDropoutConfig"):
        LoopDropoutDPOTrainer(tiny_ouro(), args=config(), train_dataset=pairs, processing_class=tokenizer)
