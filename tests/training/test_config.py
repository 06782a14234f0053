"""Training arguments: the rule, TRL's own arguments, and tokens that are never written."""

import copy
import inspect
import pickle

import pytest
from trl import DPOConfig, GRPOConfig, SFTConfig

from helpers.errors import user_error
from loopdropout_trainer import LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig
from loopdropout_trainer.gates import LoopDropout
from loopdropout_trainer.results import training_recipe


@pytest.mark.parametrize(("p", "same"), [(0.25, 0.25), ([0.25], 0.25), ([0.1, 0.2, 0.3, 0.4], (0.1, 0.2, 0.3, 0.4))])
def test_p_is_one_number_or_one_for_each_loop(config, p, same):
    args = config(p=p)
    assert args.make_rule() == LoopDropout(same) and config(p=args.p).p == args.p


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule_args": {"p": 0.5}}, "Set the field `p`, not"),
        ({"rule_args": {"q": 0.5}}, "'q'"),
        ({"rule_args": 3}, "`rule_args` must be a mapping"),
        ({"loss_average": "rows"}, "`loss_average` must be"),
        ({"depth_sampling": "unifrom"}, "Did you mean 'uniform'"),
        (
            {"num_loops": 2},
            r"`num_loops` is not a field of LoopDropoutConfig. Set `model_init_kwargs=\{'num_loops': 2\}`",
        ),
        ({"K": 2}, r"Set `model_init_kwargs=\{'num_loops': 2\}`"),
        ({"lora_r": 8}, "Give the trainer a `LoraConfig` as `peft_config`"),
    ],
)
def test_wrong_fields_raise(config, fields, message):
    with user_error(message):
        config(**fields)


@pytest.mark.parametrize("cls", [LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig])
def test_unknown_fields_have_a_hint(config, cls):
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


CLASSES = {LoopDropoutConfig: SFTConfig, LoopDropoutDPOConfig: DPOConfig, LoopDropoutGRPOConfig: GRPOConfig}


@pytest.mark.parametrize(("cls", "trl_class"), CLASSES.items())
def test_trl_arguments_keep_their_values(config, cls, trl_class):
    trl_args = config(trl_class, learning_rate=3e-4, use_cpu=True, per_device_train_batch_size=8)
    args = cls.from_trl(trl_args, "user/model")
    assert (type(args), args.rule, args.learning_rate) == (cls, "loop_dropout", 3e-4)
    assert cls.from_trl(args, "user/model") is args
    assert cls.from_trl(None, "user/model").output_dir == "model-LoopDropout"


def test_defaults_are_the_papers_or_trls(config):
    assert LoopDropoutConfig("out").learning_rate == 1e-4
    assert LoopDropoutConfig.from_trl(SFTConfig("out", use_cpu=True), "user/model").learning_rate == 2e-5
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
