"""Training arguments: the rule, TRL's own arguments, and tokens that are never written."""

import copy
import dataclasses
import inspect
import json
import pickle
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from trl import DPOConfig, GRPOConfig, SFTConfig

from helpers.errors import user_error
from helpers.tiny import tiny_ouro
from loopdropout_trainer import LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig, LoopDropoutSFTTrainer
from loopdropout_trainer.gates import ExactlyM, GateRule, LoopDropout, make_rule
from loopdropout_trainer.results.training_results import training_recipe
from loopdropout_trainer.training.unused_fields import describe_unreached


@pytest.mark.parametrize(("p", "same"), [(0.25, 0.25), ([0.25], 0.25), ([0.1, 0.2, 0.3, 0.4], (0.1, 0.2, 0.3, 0.4))])
def test_p_is_one_number_or_one_for_each_loop(config, p, same):
    args = config(p=p)
    assert args.make_rule() == LoopDropout(same) and config(p=args.p).p == args.p


class Unknown(GateRule):
    """A rule of a user who forgot to register it."""


@pytest.mark.parametrize("rule", [LoopDropout(0.25), LoopDropout((0.1, 0.2, 0.3, 0.4)), ExactlyM(2), LoopDropout])
def test_rule_can_be_an_object(config, rule):
    """The arguments keep its name and fields, as a recipe has them."""
    args = config(rule=rule)
    assert args.make_rule() == (rule() if rule is LoopDropout else rule)
    copied = config(**{name: json.loads(json.dumps(getattr(args, name))) for name in ("rule", "p", "rule_args")})
    assert copied.make_rule() == args.make_rule()
    assert rule is LoopDropout or {"rule", "p", "rule_args"} <= {*args.given_fields()}


def test_own_p_of_a_rule_gives_way_to_the_next_rule(config):
    """Nobody has given it. A given `p` stays, also if it is the own value of the former rule."""
    args = config()
    assert args.p == 0.5
    for rule, rule_args, p in (("lora", None, None), ("exactly_m", {"m": 2}, None), ("learned", None, 0)):
        args.rule, args.rule_args = rule, rule_args
        assert args.take_own_p().name == rule and args.p == p
        assert args.take_own_p() == args.make_rule()
    for rule, p in (("lora", None), ("learned", 0), ("adaptive", 0.5)):
        other = dataclasses.replace(config(), rule=rule)
        assert (other.p, other.make_rule()) == (p, make_rule(rule))
        other.rule = "loop_dropout"
        assert dataclasses.replace(other, seed=1).p == other.take_own_p().p == 0.5
    assert dataclasses.replace(config(), rule=LoopDropout(0.25)).p == 0.25
    args.rule, args.p = "lora", 0.5
    for given in (args, dataclasses.replace(config(), p=0.5), config(p=config().p)):
        given.rule, given.rule_args = "lora", None
        with user_error("`rule: lora` has no field 'p', got 0.5. Leave `p` out, or set it to None, also in"):
            given.make_rule()


def test_p_of_a_trainer_is_the_one_that_it_draws_with(config, dataset, tokenizer):
    """Also if it was set to None, or the rule was set, after the arguments were made."""
    args = config(p=0.25)
    args.p = None
    other = config(rule="lora")
    other.rule = "loop_dropout"
    for changed in (args, other):
        assert changed.p is None
        trainer = LoopDropoutSFTTrainer(tiny_ouro(), changed, train_dataset=dataset, processing_class=tokenizer)
        assert trainer.p == trainer.args.p == trainer.saved_settings()["p"] == trainer.rule.p == 0.5


@pytest.mark.parametrize("make", [np.float32, np.array, torch.tensor])
def test_numbers_of_numpy_and_torch_become_pythons(config, make):
    args = config(p=make(0.25), seed=make(3), learning_rate=make(0.5))
    assert [type(value) for value in (args.p, args.seed, args.learning_rate)] in ([float, int, float], [float] * 3)
    assert (args.p, args.seed, args.learning_rate) == (0.25, 3, 0.5)
    assert config(p=make([0.25, 0.5, 0.5, 0.5]) if make is not np.float32 else 0.5).p in ([0.25, 0.5, 0.5, 0.5], 0.5)


def test_checkpointing_by_default_gives_no_warning(config):
    """TRL's default and the documentation have the old names of two fields of transformers. Not all releases have the new."""
    for given in ({}, {"gradient_checkpointing": True}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            args = LoopDropoutConfig("out", bf16=False, **given)
        assert args.gradient_checkpointing and getattr(args, "activation_checkpointing", True)
        kwargs = given.get("gradient_checkpointing_kwargs")
        assert args.gradient_checkpointing_kwargs == kwargs
        assert getattr(args, "activation_checkpointing_kwargs", kwargs) == kwargs
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert not getattr(config(gradient_checkpointing=False), "activation_checkpointing", False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", 0.25, "`q` is not a field of LoopDropoutConfig. Set `p` = 1 - q"),
        ("dropout", 0.25, "Did you mean 'p'"),
        ("m", 2, r"Put fields of the rule exactly_m under `rule_args`: \{m: 2\}"),
        ("K", 2, r"Set `model_init_kwargs=\{'num_loops': 2\}`"),
        ("learning_rat", 0.1, "`learning_rat` is not a field of LoopDropoutConfig. Did you mean 'learning_rate'?"),
    ],
)
def test_wrong_field_that_is_set_later_raises(config, name, value, message):
    """It would have no effect."""
    args = config()
    with user_error(message):
        setattr(args, name, value)
    args.p = torch.tensor(0.25)
    assert args.p == 0.25 and type(args.p) is float
    args.note = "an attribute of the user"
    args.class_weights = torch.ones(2)
    assert torch.is_tensor(args.class_weights)  # not a field, which is saved as JSON
    again = copy.deepcopy(args)
    assert again.p == 0.25 and repr(again) == repr(args) and "p=0.25" in repr(args)
    again.max_steps = 7
    assert "max_steps=7" in repr(again) and "max_steps=7" not in repr(args)
    with user_error(message):
        setattr(again, name, value)
    assert repr(dataclasses.replace(args, max_steps=7)).count("=") < 40  # and not all fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule_args": {"p": 0.5}}, "Set the field `p`, not"),
        (
            {"eval_strategy": "step"},
            "`eval_strategy` must be one of no, steps, epoch, got 'step'. Did you mean 'steps'",
        ),
        ({"optim": "adamww"}, "`optim` must be .* Did you mean 'adamw_torch'"),
        ({"optim": "adafactr"}, "`optim` must be one of adamw_torch, .* got 'adafactr'. Did you mean 'adafactor'"),
        ({"train_sampling_strategy": "x"}, "`train_sampling_strategy` must be one of random, sequential, .* got 'x'"),
        (
            {"save_strategy": "best"},
            "`metric_for_best_model` must be set if `save_strategy` is best, .* Set it to loss",
        ),
        (
            {"save_strategy": "best", "metric_for_best_model": "loss"},
            "`eval_strategy` must be steps or epoch if `save_strategy` is best, got no",
        ),
        ({"rule_args": {"q": 0.5}}, "'q'"),
        ({"prob": 0.5}, "`prob` is not a field of LoopDropoutConfig. Did you mean 'p'?"),
        ({"rule_args": {"drop_prob": 0.5}}, "no field 'drop_prob'. It takes p. Did you mean 'p'?"),
        ({"rule_args": {"q": 0.5}}, "no field 'q'. It takes p. Set `p` = 1 - q, the probability that a loop is off."),
        ({"m": 2}, r"Put fields of the rule exactly_m under `rule_args`: \{m: 2\}"),
        ({"rule": "dropout"}, "`rule` must be one of .*, got 'dropout'. Did you mean 'loop_dropout'?"),
        ({"rule_args": 3}, "`rule_args` must be a mapping"),
        ({"loss_average": "rows"}, "`loss_average` must be"),
        ({"rule": "LoRA"}, "`rule` must be one of .*, got 'LoRA'. Did you mean 'lora'"),
        (
            {"rule": "schedule", "rule_args": {"p_strat": 0.3}},
            "no field 'p_strat'. It takes .* Did you mean 'p_start'",
        ),
        ({"depth_sampling": "unifrom"}, "Did you mean 'uniform'"),
        (
            {"num_loops": 2},
            r"`num_loops` is not a field of LoopDropoutConfig. Set `model_init_kwargs=\{'num_loops': 2\}`",
        ),
        ({"K": 2}, r"Set `model_init_kwargs=\{'num_loops': 2\}`"),
        ({"lora_r": 8}, "Give the trainer a `LoraConfig` as `peft_config`"),
        ({"max_seq_length": 8}, "Did you mean 'max_length'"),
        ({"group_by_length": True}, "Did you mean 'train_sampling_strategy'"),
        (
            {"rule": "lora", "p": 0.5},
            "`rule: lora` has no field 'p', got 0.5. Leave `p` out, or set it to None, also in",
        ),
        ({"rule": ExactlyM(2), "rule_args": {"m": 1}}, r"fields of a rule in one place: `rule=ExactlyM\(m=2\)`"),
        ({"rule": torch.ones}, "an instance of `GateRule`, got <built-in method ones .* method `sample` of a class"),
        ({"rule": ["lora"]}, r"`rule` must be a name, or a rule such as .*, got \['lora'\]"),
        ({"rule": Unknown()}, "`rule` must be a rule with `@register_rule`, got Unknown.$"),
    ],
)
def test_wrong_fields_raise(config, fields, message):
    with user_error(message):
        config(**fields)


def test_output_folder_that_is_a_file_raises(make_sft, tmp_path):
    (tmp_path / "run").write_text("x")
    for folder in (tmp_path / "run", tmp_path / "run" / "lora"):
        with user_error(f"`output_dir` must be a folder, got {folder}, but {tmp_path / 'run'} is a file"):
            make_sft(output_dir=str(folder))


def test_steps_without_evaluation_are_named(config, log):
    config(eval_steps=7)
    text = "`eval_steps` has no effect, because `eval_strategy` is no. Set it to steps to evaluate every 7 steps."
    assert text in log.text
    log.clear()
    config(eval_steps=8, eval_strategy="steps")
    config(eval_strategy="epoch")
    assert "no effect" not in log.text


BEST = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "load_best_model_at_end": True}
UNUSED = [
    ({"eval_delay": 3}, "`eval_delay` has no effect, because `eval_strategy` is no. Set it to steps or epoch"),
    ({"metric_for_best_model": "loss"}, "`metric_for_best_model` has no effect, because `eval_strategy` is no."),
    (
        {"greater_is_better": False, "eval_strategy": "epoch"},
        "`greater_is_better` has no effect, because `metric_for_best_model` is not set.",
    ),
    ({"save_total_limit": 2}, "`save_total_limit` has no effect, because `save_strategy` is no."),
    (
        {"logging_strategy": "epoch", "logging_steps": 3},
        "`logging_steps` has no effect, because `logging_strategy` is epoch. Set it to steps to log every 3 steps.",
    ),
    (
        {"lr_scheduler_type": "constant", "warmup_steps": 3},
        "`warmup_steps` has no effect, because `lr_scheduler_type` is constant. Set it to constant_with_warmup.",
    ),
    ({"warmup_from_first_step": True}, "`warmup_from_first_step` has no effect, because `warmup_steps` is 0."),
    ({"hub_strategy": "end"}, "`hub_strategy` has no effect, because `push_to_hub` is false. Set it to true to push"),
    (
        {**BEST, "greater_is_better": True, "metric_for_best_model": "short_loss"},
        "`greater_is_better` is true for the metric short_loss, so the checkpoint with the",
    ),
    (
        {**BEST, "greater_is_better": False, "metric_for_best_model": "eval_mean_token_accuracy"},
        "`greater_is_better` is false for the metric mean_token_accuracy, so the checkpoint with its smallest value",
    ),
    (
        {**BEST, "greater_is_better": False, "metric_for_best_model": "short_mean_token_accuracy"},
        "`greater_is_better` is false for the metric short_mean_token_accuracy, so the checkpoint with its smallest",
    ),
]
USED = [
    {"lr_scheduler_type": "constant", "warmup_steps": 3, "warmup_from_first_step": True},
    {**BEST, "greater_is_better": False},
    {**BEST, "greater_is_better": True, "metric_for_best_model": "mean_token_accuracy"},
    {**BEST, "eval_delay": 1, "save_total_limit": 1},
    {"hub_model_id": "me/x"},  # which `trainer.push_to_hub` reads
]


def test_fields_that_cannot_act_are_named(config, log):
    for fields, message in UNUSED:
        config(**fields)
        assert message in log.text, fields
    log.clear()
    for fields in USED:
        config(**fields)
    assert "no effect" not in log.text and "greater_is_better" not in log.text


@pytest.mark.parametrize(
    ("fields", "num_steps", "message"),
    [
        (
            {"early_stopping_patience": 2, "eval_steps": 1000},
            30,
            "`early_stopping_patience` has no effect, because `eval_steps` is 1,000 and the training has 30 steps, so it is "
            "evaluated only after its last step. Set `eval_steps` to a smaller number.",
        ),
        ({"load_best_model_at_end": True, "eval_steps": 31}, 30, "`load_best_model_at_end` has no effect, because"),
        (
            {"eval_steps": 31},
            30,
            "is evaluated only after its last step, because .* 30 steps. Set `eval_steps`",
        ),
        (
            {"eval_steps": 10, "eval_delay": 40},
            30,
            "`eval_delay` is 40 and the training has 30 steps, so it is never evaluated. Set `eval_delay`",
        ),
        (
            {"early_stopping_patience": 2, "eval_steps": 10},
            30,
            "`early_stopping_patience` 2 has no effect, because `eval_steps` is 10 and .*, so it cannot stop before its end",
        ),
        ({"early_stopping_patience": 2, "eval_steps": 0.4}, 30, "`early_stopping_patience` 2 has no effect"),
        (
            {"early_stopping_patience": 2, "eval_strategy": "epoch", "num_train_epochs": 3, "max_steps": -1},
            None,
            "`early_stopping_patience` 2 has no effect, because `eval_strategy` is epoch and the training has 3 epochs",
        ),
        ({"early_stopping_patience": 2, "eval_steps": 9}, 30, None),
        ({"early_stopping_patience": 2, "eval_strategy": "epoch", "num_train_epochs": 4, "max_steps": -1}, None, None),
        ({"early_stopping_patience": 2, "eval_steps": 9}, None, None),
        ({"eval_strategy": "no"}, 30, None),
    ],
)
def test_evaluations_after_the_end_are_named(config, fields, num_steps, message):
    """Also an early stop that would need more evaluations than the training has."""
    if "early_stopping_patience" in fields or "load_best_model_at_end" in fields:
        fields = {"save_strategy": "best", **fields}
    sentence = describe_unreached(config(**{"eval_strategy": "steps", **fields}), num_steps)
    assert (sentence is None) == (message is None)
    assert message is None or re.search(message, sentence)


def test_training_names_evaluations_after_its_end(make_sft, log):
    trainer = make_sft(eval_strategy="steps", eval_steps=17, max_steps=1)
    trainer.train()
    assert "evaluated only after its last step, because `eval_steps` is 17 and the training has 1 step." in log.text
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [1]


@pytest.mark.parametrize("cls", [LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig])
def test_unknown_fields_have_a_hint(config, cls):
    with user_error(f"`q` is not a field of {cls.__name__}. Set `p` = 1 - q"):
        config(cls, q=0.5)
    with user_error(f"`learing_rate` is not a field of {cls.__name__}. Did you mean 'learning_rate'?"):
        config(cls, learing_rate=1e-3)
    assert (
        "p" in inspect.signature(cls).parameters and copy.deepcopy(config(cls, per_device_train_batch_size=8)).p == 0.5
    )


def test_recipe_has_the_given_fields(train):
    """A value that the libraries choose for this machine, such as `use_cpu`, is not the user's."""
    trainer = train(max_length=None, max_steps=1)
    trainer.args.weight_decay = 0.5
    recipe = training_recipe(trainer)
    assert recipe["bf16"] is False and recipe["max_length"] is None and recipe["weight_decay"] == 0.5
    assert not {"use_cpu", "activation_checkpointing", "include_for_metrics", "output_dir"} & {*recipe}
    assert training_recipe(train(use_cpu=True, max_steps=1))["use_cpu"] is True
    trainer.args = dataclasses.replace(trainer.args, max_steps=2)
    copied = training_recipe(trainer)
    assert copied["max_steps"] == 2 and "adam_beta1" not in copied and len(copied) < 40
    assert Path(trainer.args.output_dir, "recipe.yaml").read_text().startswith("command: sft\n")


CLASSES = {LoopDropoutConfig: SFTConfig, LoopDropoutDPOConfig: DPOConfig, LoopDropoutGRPOConfig: GRPOConfig}


@pytest.mark.parametrize(("cls", "trl_class"), CLASSES.items())
def test_trl_arguments_keep_their_values(config, cls, trl_class, monkeypatch):
    trl_args = config(trl_class, learning_rate=3e-4, use_cpu=True, per_device_train_batch_size=8)
    args = cls.from_trl(trl_args, "user/model")
    assert (type(args), args.rule, args.learning_rate) == (cls, "loop_dropout", 3e-4)
    assert {"learning_rate", "max_steps", "bf16"} <= {*args.given_fields()}
    chosen = {"activation_checkpointing", "include_for_metrics", "debug", "pad_to_multiple_of", "use_cpu"}
    assert not chosen & {*args.given_fields()}  # by the libraries
    assert cls.from_trl(args, "user/model") is args  # trainers of one configuration share it, as in TRL
    made, own_init = [], cls.__post_init__
    monkeypatch.setattr(cls, "__post_init__", lambda args: made.append(args) or own_init(args))
    assert cls.from_trl(trl_args, "user/model") is made[-1]  # whose devices accelerate keeps
    assert cls.from_trl(None, "user/model").output_dir == "model-LoopDropout"


def test_defaults_are_the_papers_or_trls(config):
    assert LoopDropoutConfig("out").learning_rate == 1e-4
    for (
        cls,
        trl_class,
    ) in CLASSES.items():  # an `SFTConfig` keeps TRL's values, and only the learning rate is another one
        theirs, ours = trl_class("out", bf16=False, use_cpu=True), cls("out", bf16=False, use_cpu=True)
        kept = cls.from_trl(theirs, "user/model")
        names = [own.name for own in dataclasses.fields(trl_class)]
        assert [name for name in names if getattr(kept, name) != getattr(theirs, name)] == []
        other = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
        assert other == (["learning_rate"] if cls is LoopDropoutConfig else [])
    assert config(resume_from_checkpoint="false").resume_from_checkpoint is None
    with user_error("LoopDropoutDPOConfig or DPOConfig, got a LoopDropoutConfig"):
        LoopDropoutDPOConfig.from_trl(config(), "user/model")


def test_hub_tokens_are_not_written(config):
    args = config(hub_token="hf_secret123", model_init_kwargs={"token": "hf_secret123", "num_loops": 2})
    assert b"hf_secret123" not in pickle.dumps(args) and "hf_secret123" not in str(args.to_dict())
    assert args.hub_token == "hf_secret123" and args.model_init_kwargs["token"] == "hf_secret123"
    assert pickle.loads(pickle.dumps(args)).model_init_kwargs == {"num_loops": 2}


@pytest.mark.parametrize(("share", "steps"), [(0.25, 2), (0.01, 1), (3, 3)])
def test_warmup_is_rounded_down(config, share, steps):
    assert config(warmup_from_first_step=True, warmup_steps=share).get_warmup_steps(10) == steps
