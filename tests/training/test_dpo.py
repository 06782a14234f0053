"""`LoopDropoutDPOTrainer` against DPO computed from the model: pairs share gates, and the reference keeps unit gates."""

import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from torch.nn import functional as F
from transformers import set_seed
from trl import DPOTrainer

from helpers.errors import user_error
from helpers.tiny import DORY, TINY, tiny_hrm, tiny_ouro, trained_parameters, with_adapter
from helpers.trainers import Recording, assert_same_weights, logged, unlisted_metrics
from loopdropout_trainer import LoopDropoutDPOConfig, LoopDropoutDPOTrainer, default_peft_config, use_gates
from loopdropout_trainer.gates import Draw, LoopDropout, make_rule
from loopdropout_trainer.lora import add_gates
from loopdropout_trainer.results.training_results import describe_held_out_examples
from loopdropout_trainer.saving.source import find_source


BETA = 0.1
ROWS = [{"prompt": f"{i}+{i % 7}=", "chosen": "a" * (i % 4 + 1), "rejected": "b" * (i % 3 + 2)} for i in range(16)]
PAIRS = Dataset.from_list(ROWS)


class Recorder(Recording, LoopDropoutDPOTrainer):
    pass


@pytest.fixture
def make(config, tokenizer):
    """`make(model, cls, **fields)`: a trainer of the pairs."""

    def trainer(model=None, cls=Recorder, **fields):
        small = tiny_ouro(num_hidden_layers=1)
        more = {"peft_config": default_peft_config(small)} if cls is DPOTrainer else {}
        args = config(LoopDropoutDPOConfig, **{"max_steps": 1, "beta": BETA, "use_cpu": True, **fields})
        data = {"train_dataset": PAIRS, "eval_dataset": PAIRS, "processing_class": tokenizer}
        model = small if model is None else model
        set_seed(args.seed)  # older releases of TRL initialize the adapter before they set the seed
        return cls(model, args=args, **data, **more)

    return trainer


def log_probability(model, input_ids, attention_mask, completion_mask, **others):
    """Log probability of each row's completion, [2N]."""
    marks = {"token_type_ids": attention_mask - completion_mask} if "hrm" in model.config.model_type else {}
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **marks).logits[:, :-1]
    tokens = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return (tokens * completion_mask[:, 1:]).sum(-1)


def dpo_loss(policy, reference):
    chosen, rejected = (policy - reference).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


BASES = [(tiny_ouro, False), (tiny_ouro, True), (tiny_hrm, False), pytest.param(*DORY.values, False, marks=DORY.marks)]


def test_loss_outside_of_a_training_runs_its_reference(make):
    """The reference runs without gradient while the gates of the policy are set."""
    trainer = make(cls=LoopDropoutDPOTrainer)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model.train(), batch)
    assert loss.requires_grad and trainer.gate_state.is_drawn


@pytest.mark.parametrize(("base", "pretrained"), BASES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gated_policy_and_ungated_reference(make, base, pretrained, checkpointing):
    trainer = make(with_adapter(base()) if pretrained else base(), gradient_checkpointing=checkpointing)
    if not pretrained:  # a new adapter changes nothing
        trainer.model.load_state_dict(with_adapter(base()).state_dict())
    trainer.train()
    (seen,) = trainer.seen
    draw = Draw(seed=trainer.args.seed, step=0, example_ids=[(i, 0) for i in range(4)], num_loops=trainer.num_loops)
    gates = LoopDropout(0.5).sample(draw)
    assert torch.equal(seen.gates, torch.cat([gates, gates], dim=1))

    oracle, frozen = with_adapter(base()), with_adapter() if pretrained else base()
    with torch.no_grad():
        reference = log_probability(frozen.eval(), **seen.batch)
    with use_gates(oracle, seen.gates):
        expected = dpo_loss(log_probability(oracle.train(), **seen.batch), reference)
        expected.backward()
    torch.testing.assert_close(seen.loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in trained_parameters(oracle).items():
        torch.testing.assert_close(seen.gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


ACCUMULATED = {"gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize("fields", [{"loss_type": ["sigmoid", "sft"]}, ACCUMULATED], ids=str)
def test_unit_gates_train_as_trl(make, fields):
    fields = {**fields, "max_steps": 2, "rule": "lora", "remove_padding": False}
    ours, theirs = make(**fields), make(cls=DPOTrainer, **fields)
    ours.train()
    theirs.train()
    assert_same_weights(ours, theirs)
    assert logged(ours, "eval_loss") == logged(theirs, "eval_loss")
    assert unlisted_metrics(ours) == set()


def test_digest_of_held_out_pairs(make):
    """It does not depend on the size of the batches, and tells the chosen answer from the rejected one."""
    trainer = make()
    own = describe_held_out_examples(trainer)
    trainer.args.per_device_eval_batch_size = 3
    assert describe_held_out_examples(trainer) == own and own["n"] == len(PAIRS)
    trainer.eval_dataset = PAIRS.rename_columns({"chosen": "rejected", "rejected": "chosen"})
    assert describe_held_out_examples(trainer)["problems"] != own["problems"]


def test_split_into_micro_batches_keeps_weights(make):
    fields = {"max_steps": 3, "adam_epsilon": 1e-3}
    whole = make(**fields)
    split = make(per_device_train_batch_size=2, gradient_accumulation_steps=2, **fields)
    whole.train()
    split.train()
    assert_same_weights(whole, split, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("pretrained", [False, True], ids=["base model", "frozen adapter"])
def test_first_loss_of_huginn_is_ln_2(make, pretrained):
    model = with_adapter(TINY["huginn"](), scale=0.3) if pretrained else TINY["huginn"]()
    trainer = make(model, rule="lora", beta=1.0)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=2e-5)


def test_references_that_do_not_fit_raise(make):
    with user_error("`precompute_ref_log_probs` must be False"):
        make(precompute_ref_log_probs=True)
    for rule, name in [("learned", "default"), ("independent", "default"), ("lora", "math")]:
        model = get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro()), adapter_name=name)
        add_gates(model, rule=make_rule(rule))
        with user_error("adapter must .*, because TRL copies it .* Set `ref_model`, or"):
            make(model, rule=rule)


def test_prompts_longer_than_max_length_raise(config, tokenizer):
    rows = Dataset.from_list([{"prompt": "1" * 20, "chosen": "2", "rejected": "3"}] * 2)
    args = config(LoopDropoutDPOConfig, max_length=8)
    with user_error("`max_length` must be larger, because TRL leaves out all examples of `train_dataset`, got 8"):
        LoopDropoutDPOTrainer(tiny_ouro(), args=args, train_dataset=rows, processing_class=tokenizer)


def test_cut_and_repeated_pairs_are_counted(config, tokenizer, log):
    """TRL cuts them, leaves them out and trains on them twice without a word, as in SFT."""
    pairs = [("1+1=", "2"), ("1+1=", "2"), ("1", "2" * 20), ("1" * 20, "2")]
    rows = Dataset.from_list([{"prompt": prompt, "chosen": chosen, "rejected": "3"} for prompt, chosen in pairs])
    args = config(LoopDropoutDPOConfig, max_length=12, max_steps=1, use_cpu=True)
    trainer = LoopDropoutDPOTrainer(
        tiny_ouro(num_hidden_layers=1), args=args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer
    )
    for title in ("`train_dataset`", "`eval_dataset`"):
        left_out = "is left out, because it has a prompt of 12 tokens (`max_length`) or more.\n"
        assert f"1 example of the 4 in {title} {left_out}" in log.text
        assert f"1 of the 4 examples in {title} is cut, because it has more than 12 tokens (`max_length`)." in log.text
    trainer.train()
    assert "1 of the 3 examples in `train_dataset` repeats another one." in log.text
    held_out = (
        "3 of the 3 examples in `train_dataset` repeat a held-out example of `eval_dataset`, so the held-out loss is"
    )
    assert f"{held_out} too low." in log.text


def test_reference_does_not_change_between_trainings(make, log):
    """TRL would take the adapter "ref" of a later trainer as the reference of the first one, too."""
    first = make(max_steps=1)
    first.train()
    later = make(first.model, max_steps=1)
    with user_error(
        "reference of this trainer must stay the same, but the adapter 'ref' was added by another trainer"
    ):
        first.train()
    later.train()
    assert "trained before" in log.text and "stays unchanged" not in log.text  # no adapter of the user does
    with user_error("the adapter 'ref' was added"):
        first.evaluate()
    later.evaluate()
    later.model.delete_adapter("ref")
    with user_error("the adapter 'ref' was removed"):
        later.train()
    with user_error("the adapter 'ref' was removed"):
        later.evaluate()
    first.train()
    make(first.model)  # its reference has the same name
    with user_error("the adapter 'ref' was replaced"):
        later.train()
    with user_error("the adapter 'ref' was replaced"):
        later.predict(PAIRS)


def test_card_and_show_name_the_objective(make):
    trainer = make(eval_strategy="steps", eval_steps=1)
    trainer.train()
    trainer.save_model()
    folder = Path(trainer.args.output_dir)
    card = (folder / "README.md").read_text()
    assert "| Training objective | DPO |" in card and "- dpo\n" in card
    assert "| Held-out loss (per pair) |" in card and "nats" not in card
    assert find_source(folder).lines()["objective"] == "DPO"
