"""`LoopDropoutDPOTrainer` against DPO computed directly from the model: pairs share gates, the reference has none."""

import pytest
import torch
from conftest import Recording, assert_same_weights, tiny_ouro, trained_parameters, with_adapter
from datasets import Dataset
from peft import PeftModel
from torch.nn import functional as F
from trl import DPOConfig

from loopdropout_trainer import LoopDropoutDPOConfig, LoopDropoutDPOTrainer, use_gates
from loopdropout_trainer.gates import Draw, LoopDropout


BETA = 0.1
PAIRS = Dataset.from_list(
    [{"prompt": f"{i}+{i % 7}=", "chosen": "a" * (i % 4 + 1), "rejected": "b" * (i % 3 + 2)} for i in range(16)]
)


class Recorder(Recording, LoopDropoutDPOTrainer):
    pass


@pytest.fixture
def make(config, tokenizer):
    """`make(model, cls, **fields)`: a trainer of the pairs."""

    def trainer(model=None, cls=LoopDropoutDPOConfig, **fields):
        args = config(cls, **{"max_steps": 1, "beta": BETA, "use_cpu": True, **fields})
        data = {"train_dataset": PAIRS, "eval_dataset": PAIRS}
        return Recorder(tiny_ouro() if model is None else model, args=args, **data, processing_class=tokenizer)

    return trainer


def log_probability(model, input_ids, attention_mask, completion_mask, **others):
    """Log probability of each row's completion, [2N]."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
    tokens = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return (tokens * completion_mask[:, 1:]).sum(-1)


def dpo_loss(policy, reference):
    chosen, rejected = (policy - reference).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


@pytest.mark.parametrize("pretrained", [False, True], ids=["reference is the base", "reference is a frozen adapter"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_are_those_of_the_gated_policy_against_the_ungated_reference(
    make, pretrained, checkpointing
):
    trainer = make(with_adapter() if pretrained else None, gradient_checkpointing=checkpointing)
    if not pretrained:  # a fresh adapter changes nothing
        trainer.model.load_state_dict(with_adapter().state_dict())
    trainer.train()
    (seen,) = trainer.seen
    batch, gates = seen.batch, seen.gates
    draw = Draw(seed=trainer.args.seed, step=0, example_ids=[(i, 0) for i in range(4)], num_loops=4)
    want = LoopDropout(0.5).sample(draw)
    assert torch.equal(gates, torch.cat([want, want], dim=1))

    oracle, frozen = with_adapter(), with_adapter() if pretrained else tiny_ouro()
    with torch.no_grad():
        reference = log_probability(frozen.eval(), **batch)
    with use_gates(oracle, gates):
        expected = dpo_loss(log_probability(oracle.train(), **batch), reference)
        expected.backward()
    torch.testing.assert_close(seen.loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in trained_parameters(oracle).items():
        torch.testing.assert_close(seen.gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_evaluation_is_plain_dpo_at_unit_gates(make):
    trainer = make()
    trainer.train()
    model, total = trainer.model.eval(), 0.0
    for batch in trainer.get_eval_dataloader():
        with torch.no_grad():
            policy = log_probability(model, **batch)
            with model.disable_adapter():
                reference = log_probability(model, **batch)
        total += dpo_loss(policy, reference).item() * len(batch["input_ids"]) / 2
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / len(PAIRS), rel=1e-4)
    assert trainer.loop_state.gates is None


def test_accumulation_draws_the_gates_of_one_large_batch_and_gives_its_weights(make):
    one, other = (
        make(max_steps=3, per_device_train_batch_size=batch, gradient_accumulation_steps=4 // batch)
        for batch in (4, 2)
    )
    one.train()
    other.train()
    assert_same_weights(one, other, rtol=0, atol=1e-4)


def test_pairs_that_are_cut_are_counted(config, tokenizer, log):
    answers = {"chosen": "a" * 4, "rejected": "b"}
    pairs = Dataset.from_list([{"prompt": "x" * length, **answers} for length in (5, 12, 17, 40)])
    args = config(LoopDropoutDPOConfig, max_length=20, use_cpu=True)
    LoopDropoutDPOTrainer(tiny_ouro(), args=args, train_dataset=pairs, eval_dataset=PAIRS, processing_class=tokenizer)
    assert "Of 4 pairs of `train_dataset`, 1 are longer than `max_length`, 20, and are cut" in log.text
    assert "1 are left out" in log.text and "eval_dataset" not in log.text
    args.max_length = 3
    with pytest.raises(ValueError, match="No pair of `train_dataset` is left: raise `max_length`, 3"):
        LoopDropoutDPOTrainer(tiny_ouro(), args=args, train_dataset=pairs, processing_class=tokenizer)


def test_a_resumed_run_logs_what_the_run_logs(make):
    fields = {"max_steps": 4, "logging_steps": 3, "save_strategy": "steps", "save_steps": 2}
    logs = []
    for checkpoint in (None, "checkpoint-2"):
        trainer = make(**fields)
        trainer.train(resume_from_checkpoint=checkpoint and f"{trainer.args.output_dir}/{checkpoint}")
        logs.append(trainer.state.log_history)
    assert "rewards/margins" in logs[0][0] and logs[0][0] == logs[1][0]


def test_plain_dpo_arguments_get_the_papers_rule_and_other_arguments_are_refused(make, config, tokenizer):
    trainer = make(cls=DPOConfig)
    assert isinstance(trainer.model, PeftModel) and (trainer.rule, trainer.args.beta) == (LoopDropout(0.5), BETA)
    with pytest.raises(ValueError, match="LoopDropoutDPOConfig or DPOConfig; got LoopDropoutConfig"):
        LoopDropoutDPOTrainer(tiny_ouro(), args=config(), train_dataset=PAIRS, processing_class=tokenizer)
