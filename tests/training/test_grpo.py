"""`LoopDropoutGRPOTrainer`: completions at unit gates, a policy under drawn gates, and a reference at unit gates."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import set_seed
from trl import GRPOTrainer

from helpers.errors import user_error
from helpers.tiny import DORY, tiny_hrm, tiny_ouro, trained_parameters, with_adapter
from helpers.trainers import Recording, assert_same_weights, logged, unlisted_metrics
from loopdropout_trainer import LoopDropoutGRPOConfig, LoopDropoutGRPOTrainer, default_peft_config, use_gates
from loopdropout_trainer.costs.trainings import count_steps
from loopdropout_trainer.gates import Draw, LoopDropout
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.rewards import REWARDS
from loopdropout_trainer.training.example_counts import describe_repeated


BETA, TEMPERATURE = 0.2, 0.8
PROMPTS = Dataset.from_list([{"prompt": f"{i}+{i % 7}="} for i in range(12)])


def reward(completions, **columns):
    """Return rewards that differ between most texts."""
    return [sum(map(ord, text)) % 17 / 4 for text in completions]


class Recorder(Recording, LoopDropoutGRPOTrainer):
    """Also keeps the gates at the start of each generation."""

    gates_of_generation = ()

    def _generate_single_turn(self, *args, **kwargs):
        assert self.model.training
        self.gates_of_generation = [*self.gates_of_generation, self.gate_state.gates]
        return super()._generate_single_turn(*args, **kwargs)


@pytest.fixture
def make(config, tokenizer):
    def trainer(model=None, cls=Recorder, **fields):
        defaults = {
            "max_steps": 1, "per_device_train_batch_size": 6, "num_generations": 3, "max_completion_length": 7,
            "temperature": TEMPERATURE, "use_cpu": True, "gradient_checkpointing": False, "max_grad_norm": 0,
        }  # fmt: skip
        args = config(LoopDropoutGRPOConfig, **{**defaults, **fields})
        model = tiny_ouro(num_hidden_layers=1) if model is None else model
        find_looped_model(model).generation_config.eos_token_id = list(range(2, 54))  # one token in five
        more = {"peft_config": default_peft_config(model)} if cls is GRPOTrainer else {}
        set_seed(args.seed)  # older releases of TRL initialize the adapter before they set the seed
        return cls(model, reward, args, train_dataset=PROMPTS, processing_class=tokenizer, **more)

    return trainer


def log_probabilities(model, batch):
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].shape[1]
    prompts = torch.cat([batch["prompt_mask"], torch.zeros_like(batch["completion_mask"])], dim=1)
    marks = {"token_type_ids": prompts} if "hrm" in model.config.model_type else {}
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **marks).logits[:, -length - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


CAST = {"cast_lm_head_to_fp32": True}
BASES = [(tiny_ouro, False, {}), (tiny_ouro, True, {}), (tiny_hrm, False, {})]
BASES += [pytest.param(*DORY.values, False, more, marks=DORY.marks) for more in ({}, CAST)]


@pytest.mark.parametrize(("base", "pretrained", "more"), BASES)
def test_gated_policy_and_ungated_reference(make, base, pretrained, more):
    fields = {"beta": BETA, "loss_type": "grpo", "use_bias_correction_kl": True, **more}
    trainer = make(with_adapter(base()) if pretrained else base(), **fields)
    if not pretrained:
        is_same = not more  # TRL wraps a head that it casts
        trainer.model.load_state_dict(with_adapter(base()).state_dict(), strict=is_same)
    trainer.train()
    (seen,) = trainer.seen
    assert trainer.gates_of_generation == [None]
    draw = Draw(seed=trainer.args.seed, step=0, example_ids=[(i, 0) for i in range(6)], num_loops=trainer.num_loops)
    assert torch.equal(seen.gates, LoopDropout(0.5).sample(draw))

    oracle, frozen = with_adapter(base()), with_adapter() if pretrained else base()
    batch, mask = seen.batch, seen.batch["completion_mask"]
    with torch.no_grad():
        reference = log_probabilities(frozen.eval(), batch)
    with use_gates(oracle, seen.gates):
        policy = log_probabilities(oracle.train(), batch)
        difference = reference - policy
        kl = difference.exp() - difference - 1
        ratio = (policy - policy.detach()).exp()
        tokens = ratio * (BETA * kl - batch["advantages"].unsqueeze(1))  # TRL corrects the KL by the ratio
        loss = ((tokens * mask).sum(dim=1) / mask.sum(dim=1)).mean()
        loss.backward()
    torch.testing.assert_close(seen.loss, loss.detach(), rtol=1e-4, atol=1e-5)
    for name, parameter in trained_parameters(oracle).items():
        assert (seen.gradients[name] - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name


@pytest.mark.parametrize("fields", [{"beta": 0.1}, {"gradient_accumulation_steps": 2}], ids=str)
def test_unit_gates_train_as_trl(make, fields):
    fields = {**fields, "max_steps": 2, "rule": "lora", "remove_padding": False}
    trainers = []
    for cls in (LoopDropoutGRPOTrainer, GRPOTrainer):
        trainers.append(make(cls=cls, **fields))
        trainers[-1].train()  # before the other trainer sets the seed
    assert_same_weights(*trainers)


def test_steps_under_gates_do_not_clip(make):
    trainer = make(max_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    assert logged(trainer, "clip_ratio/region_mean") == [0, 0]


UNEVEN = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 1}


@pytest.mark.parametrize("fields", [{"max_steps": 3}, UNEVEN], ids=["even", "uneven last step"])
def test_num_tokens_continues(make, fields):
    """TRL begins again in a second call of `train`."""
    fields = {
        "rule": "lora",
        "remove_padding": False,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        **fields,
    }
    theirs = make(cls=GRPOTrainer, **fields)
    theirs.train()
    if fields["max_steps"] < 0:
        assert count_steps(make(**fields).args, len(PROMPTS)) == theirs.state.max_steps == 2
    counts = logged(theirs, "num_tokens")
    trainer = make(**fields)
    trainer.train()
    assert logged(trainer, "num_tokens") == counts and counts == sorted(set(counts))
    resumed = make(**fields)
    resumed.train(f"{trainer.args.output_dir}/checkpoint-1")
    assert logged(resumed, "num_tokens") == counts and min(seen.step for seen in resumed.seen) == 1
    trainer.train()
    again = logged(trainer, "num_tokens")
    assert len(again) == len(counts) and min(again) > max(counts) and again == sorted(again)


def test_repeated_prompts_are_counted(make):
    trainer = make()
    rows = [{"prompt": prompt, "answer": "2", "id": number} for number, prompt in enumerate(("1+1=", "1+1=", "3-1="))]
    trainer.train_dataset, trainer.eval_dataset = Dataset.from_list(rows), Dataset.from_list(rows[:1])
    place = "of the 3 examples in `train_dataset`"
    assert describe_repeated(trainer) == [
        f"1 {place} repeats another one.",
        f"2 {place} repeat a held-out example of `eval_dataset`, so the held-out reward is too high. A recipe leaves such "
        "examples out.",
    ]


@pytest.mark.parametrize("cls", [LoopDropoutGRPOTrainer, Recorder])
def test_generation_after_drawn_gates_is_at_unit_gates(make, cls):
    """TRL generates before the loss, under the gates of that moment."""
    trainer = make(cls=cls)
    trainer.draw_gates({"completion_ids": torch.zeros(6, 1), "input_ids": torch.zeros(6, 1)})
    assert trainer.gate_state.is_drawn
    if cls is Recorder:
        trainer.train()
        assert trainer.gates_of_generation == [None]
    else:
        trainer.evaluate(PROMPTS.select(range(2)))
        assert unlisted_metrics(trainer) == set()
        rewards = iter([None, 1.0])  # of the two batches
        trainer.reward_funcs[0] = lambda completions, rewards=rewards, **columns: [next(rewards)] * len(completions)
        trainer.args.per_device_eval_batch_size = 3
        metrics = trainer.evaluate({"a": PROMPTS.select(range(2))})
        assert metrics["eval_a_rewards/reward/mean"] == 1, "of the batch that has rewards"
        assert "eval_a_reward" in metrics and "eval_reward" not in metrics
    assert not trainer.gate_state.batch.is_set


def test_settings_that_do_not_fit_raise(make):
    model = get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro()), adapter_name="math")
    with user_error("adapter must .*, because TRL copies it .* Set `beta` to 0, or"):
        make(model, beta=0.1)
    make(model).train()
    trainer = make(get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro())), beta=0.1)
    trainer.model.delete_adapter("ref")
    with user_error("reference of this trainer must stay the same, but the adapter 'ref' was removed"):
        trainer.evaluate(PROMPTS.select(range(2)))
    for fields in ({"num_iterations": 2}, {"steps_per_generation": 2}):  # which reuse completions
        with user_error("`num_iterations` must be 1, and `steps_per_generation` must divide"):
            make(**fields)


def test_prompts_of_an_epoch_are_counted_as_in_trl(make):
    """TRL leaves out two of twelve prompts if five of them fill a batch of completions."""
    trainer = make(max_steps=-1, num_train_epochs=1, per_device_train_batch_size=15)
    trainer.train()
    assert trainer.state.global_step == count_steps(trainer.args, len(PROMPTS)) == 2
    with user_error(
        r"`generation_batch_size` must be at most 36, .* got 39. Set a lower `per_device_train_batch_size`"
    ):
        make(max_steps=-1, per_device_train_batch_size=39)


@pytest.fixture
def make_rewarded(config, tokenizer):
    """`make_rewarded(rewards, data)`: a trainer of two steps with these rewards."""

    def trainer(rewards, data=PROMPTS, max_steps=1, eval_dataset=None, **more):
        fields = {"num_generations": 3, "per_device_train_batch_size": 6, "use_cpu": True, "max_completion_length": 7}
        args = config(LoopDropoutGRPOConfig, max_steps=max_steps, logging_steps=1, **fields, **more)
        model = tiny_ouro(num_hidden_layers=1)
        data = {"train_dataset": data, "eval_dataset": eval_dataset, "processing_class": tokenizer}
        return LoopDropoutGRPOTrainer(model, rewards, args, **data)

    return trainer


def with_answers(answers):
    return Dataset.from_list([{"prompt": f"{n}+1=", "answer": answer} for n, answer in enumerate(answers)])


def test_rewards_may_be_names(make_rewarded):
    rows = with_answers([str(number) for number in range(12)])
    named = make_rewarded(["last_number", reward], rows)
    assert named.reward_funcs == [REWARDS["last_number"], reward]
    named.train()
    assert "rewards/last_number/mean" in named.state.log_history[0]
    assert named.reward_funcs == [REWARDS["last_number"], reward]
    assert make_rewarded("exact_match", rows).reward_funcs == [REWARDS["exact_match"]]
    with user_error("`reward_funcs` must be .* or names such as gsm8k.*got 'last_numbr'. Did you mean 'last_number'?"):
        make_rewarded("last_numbr", rows)
    with user_error("`train_dataset` must have the column `answer`, .* got the columns prompt. Rename one"):
        make_rewarded("last_number")


def test_answers_are_texts_or_numbers(make_rewarded, caplog):
    trainer = make_rewarded([name for name in REWARDS if name != "math_verify"], with_answers(range(12)))
    trainer.train()
    assert not caplog.messages
    with user_error("`eval_dataset` must have the column `answer`"):
        trainer.evaluate(PROMPTS)
    with user_error(r"Row 2 of `train_dataset`: `answer` must be a text or a number, got \['7'\]"):
        make_rewarded("last_number", with_answers([None, ["7"]]))
    with user_error("`answer` must be a text or a number, got nan"):
        make_rewarded("last_number", with_answers([1.0, float("nan")]))
    with user_error("`train_dataset` must have a text or a number as `answer`, .* got None in all of its 3 examples"):
        make_rewarded("gsm8k_format", with_answers([None] * 3))
    for name in ("last_number", "gsm8k_strict", "exact_match"):  # a column of floats can have whole numbers
        completions = ["#### 4", "#### 0"] if name == "gsm8k_strict" else ["4", "0"]
        assert REWARDS[name](completions, answer=[4.0, 4.0]) == [1, 0]
        assert REWARDS[name](completions, answer=[np.float64(4), 4]) == [1, 0]
    partly = with_answers([4, None, 6])
    make_rewarded(["exact_match", reward], partly)
    assert not caplog.messages
    make_rewarded("exact_match", partly)
    assert "1 of the 3 examples in `train_dataset` has no `answer`, so that" in caplog.text
    assert "The first one is row 2." in caplog.text


def test_missing_rewards_leave_results(make_rewarded):
    """TRL logs None for a step without rewards."""

    def first_only(completions, trainer_state, **columns):
        return [1.0 if trainer_state.global_step == 0 else None] * len(completions)

    trainer = make_rewarded(first_only, max_steps=2)
    trainer.train()
    assert logged(trainer, "reward") == [1.0, None]
    rows = [json.loads(line) for line in Path(trainer.args.output_dir, "results.jsonl").read_text().splitlines()]
    assert {row["metric"]: row["value"] for row in rows}["reward_last"] == 1.0

    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "per_device_eval_batch_size": 3}
    best = {
        "save_strategy": "steps",
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
        "greater_is_better": True,
    }
    trainer = make_rewarded(first_only, eval_dataset=PROMPTS.select([0]), **evaluates, **best)
    with user_error("`metric_for_best_model` must be a number in each evaluation, but reward is None at step 1"):
        trainer.train()

    async def nothing(completions, **columns):
        return [None] * len(completions)

    with user_error(
        "`reward_funcs` must give rewards, but `nothing` returned None for all 6 completions of the first"
    ):
        make_rewarded(nothing).train()
    # Some examples have a reference, so a batch of the others is no mistake.
    trainer = make_rewarded(["exact_match", nothing], with_answers([None] * 11 + [5]))
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (0.5, "got 0.5"),
        (torch.tensor(2.0), r"got tensor\(2"),
        ("good", "got 'good'"),
        ([1.0], "got 1 of them for 6 completions"),
        ([1.0, None, "1", 1, 1, 1], "got '1' for completion 3"),
    ],
)
def test_results_of_reward_functions_are_checked(make_rewarded, result, got):
    def rate(**inputs):
        return result

    with user_error(f"reward function `rate` must return a list with a number or None for each completion, {got}"):
        make_rewarded(rate).train()


def test_rewards_may_be_numbers_of_libraries(make_rewarded):
    def rate(completions, **columns):
        return torch.arange(len(completions))

    async def rate_later(completions, **columns):
        return (np.float32(len(text)) for text in completions)

    trainer = make_rewarded([rate, rate_later])
    trainer.train()
    assert logged(trainer, "rewards/rate/mean") == [2.5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_generations": 3},
            r"`num_generations` must divide .*, 8 \(`per_device_train_batch_size` 8\), got 3. Set "
            "`per_device_train_batch_size`, which counts completions, to a multiple of 3, or `num_generations` to 2, 4 or 8",
        ),
        (
            {"gradient_accumulation_steps": 2, "num_generations": 5},
            "16 .*8 and `gradient_accumulation_steps` or `steps_per",
        ),
        ({"per_device_train_batch_size": 1}, "to a multiple of 8."),
        (
            {"generation_batch_size": 12},
            "`generation_batch_size` must be a multiple of 8, the `per_device_train_.* got 12",
        ),
        (
            {"generation_batch_size": 16, "num_generations": 5},
            r"must be a multiple of `num_generations` \(5\).* got 16",
        ),
        (
            {"eval_strategy": "epoch", "num_generations_eval": 3},
            "`num_generations_eval` must divide .* 8 .*got 3. Set `per_device_eval_batch_size`.* to 2, 4 or 8",
        ),
    ],
    ids=str,
)
def test_batches_that_do_not_fit_name_the_fields_to_set(config, fields, message):
    with user_error(message):
        config(LoopDropoutGRPOConfig, **{"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, **fields})
