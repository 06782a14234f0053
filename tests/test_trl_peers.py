"""What TRL's own suites of SFT, GRPO and DPO ask of their trainers, asked of ours in their place: `pytest -m peer`.

TRL does not ship its tests; these are the same settings, written anew. With unit gates each of them must train exactly as
TRL's trainer does on the same completions, and with Loop Dropout it must train.
"""

import copy

import pytest
import torch
from conftest import tiny_ouro
from datasets import Dataset
from peft import get_peft_model_state_dict
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from loopdropout_trainer import (
    LoopDropoutConfig,
    LoopDropoutDPOConfig,
    LoopDropoutDPOTrainer,
    LoopDropoutGRPOConfig,
    LoopDropoutGRPOTrainer,
    LoopDropoutSFTTrainer,
    default_peft_config,
)


pytestmark = pytest.mark.peer
COMMON = {
    "max_steps": 2,
    "learning_rate": 1e-2,
    "report_to": "none",
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}
GRPO = {
    **COMMON,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 5,
    "temperature": 0.9,
}
DPO = {**COMMON, "per_device_train_batch_size": 2}
EXACT = {"rule": "lora", "remove_padding": False, "fused_lora": False}
PROMPTS = Dataset.from_list([{"prompt": f"{i}+{i % 7}=", "weight": i % 3} for i in range(8)])
TURNS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(8)])
PAIRS = Dataset.from_list(
    [{"prompt": f"{i}=", "chosen": "a" * (i % 3 + 1), "rejected": "b" * (i % 2 + 1)} for i in range(8)]
)
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


def codes(completions, **columns):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(map(ord, text)) % 13 / 3 for text in texts]


def of_a_column(completions, weight, **columns):
    return [len(text) * each for text, each in zip(completions, weight, strict=True)]


def sometimes(completions, **columns):
    return [None if index % 4 == 0 else float(len(text)) for index, text in enumerate(completions)]


async def asynchronous(completions, **columns):
    return codes(completions)


def with_log(completions, log_metric, log_extra, **columns):
    log_metric("mine", 1.0)
    log_extra("text", list(completions))
    return codes(completions)


def same_weights(ours, theirs):
    want = get_peft_model_state_dict(theirs.model)
    assert want.keys() == get_peft_model_state_dict(ours.model).keys()
    for name, weight in get_peft_model_state_dict(ours.model).items():
        torch.testing.assert_close(weight, want[name], rtol=0, atol=0, msg=name)


def has_trained(trainer):
    weights = get_peft_model_state_dict(trainer.model)
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())
    assert any(bool((weight != 0).any()) for name, weight in weights.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("fields", "rewards", "data"),
    [
        *(({"loss_type": kind}, codes, PROMPTS) for kind in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo")),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, codes, PROMPTS),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1}, codes, PROMPTS),
        ({"num_iterations": 2, "epsilon_high": 0.3, "delta": 1.5}, codes, PROMPTS),
        ({"steps_per_generation": 2, "beta": 0.05}, codes, PROMPTS),
        ({"scale_rewards": "batch", "top_entropy_quantile": 0.5}, codes, PROMPTS),
        ({"scale_rewards": "none", "mask_truncated_completions": True}, codes, PROMPTS),
        ({"entropy_coef": 0.01}, codes, PROMPTS),
        ({"off_policy_mask_threshold": 0.5, "num_iterations": 2}, codes, PROMPTS),
        ({"shuffle_dataset": False, "log_completions": False}, with_log, PROMPTS),
        ({"reward_weights": [0.7, 0.3]}, [codes, of_a_column], PROMPTS),
        ({"multi_objective_aggregation": "normalize_then_sum"}, [codes, of_a_column], PROMPTS),
        ({}, [sometimes], PROMPTS),
        ({}, [asynchronous, codes], PROMPTS),
        ({}, codes, TURNS),
        ({}, codes, PROMPTS.to_iterable_dataset()),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_grpo(tokenizer, tmp_path, fields, rewards, data):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    sampled = []

    class Keeping(LoopDropoutGRPOTrainer):
        def _sample(self, *args):
            sampled.append(super()._sample(*args))
            return sampled[-1]

    class Fed(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            return copy.deepcopy(sampled.pop(0)), None

    def train(cls, config, peft_config=None, **more):
        args = config(str(tmp_path), **{**GRPO, **fields, **more})
        given = list(rewards) if isinstance(rewards, list) else rewards
        model = tiny_ouro()
        model.generation_config.eos_token_id = list(range(2, 54))  # one token in five ends a completion
        trainer = cls(model, given, args, train_dataset=data, processing_class=tokenizer, peft_config=peft_config)
        trainer.train()
        return trainer

    ours = train(Keeping, LoopDropoutGRPOConfig, **EXACT)
    theirs = train(Fed, GRPOConfig, default_peft_config(tiny_ouro()))
    same_weights(ours, theirs)
    has_trained(train(LoopDropoutGRPOTrainer, LoopDropoutGRPOConfig))


@pytest.mark.parametrize(
    "fields",
    [
        *({"loss_type": kind} for kind in ("sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "sppo_hard")),
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]},
        {"beta": 0.3, "label_smoothing": 0.1},
        {"precompute_ref_log_probs": True},
        {"gradient_accumulation_steps": 2},
        {"max_length": 4},
    ],
    ids=str,
)
def test_dpo(tokenizer, tmp_path, fields):
    def train(cls, config, peft_config=None, **more):
        args = config(str(tmp_path), **{**DPO, **fields, **more})
        trainer = cls(tiny_ouro(), args=args, train_dataset=PAIRS, processing_class=tokenizer, peft_config=peft_config)
        trainer.train()
        return trainer

    ours = train(LoopDropoutDPOTrainer, LoopDropoutDPOConfig, **EXACT)
    same_weights(ours, train(DPOTrainer, DPOConfig, default_peft_config(tiny_ouro())))
    has_trained(train(LoopDropoutDPOTrainer, LoopDropoutDPOConfig))


CHAT = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
TURN = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
COMPLETIONS = Dataset.from_list([{"prompt": f"{i}+{i % 7}=", "completion": "x" * (i % 5 + 1)} for i in range(24)])
TEXTS = Dataset.from_list([{"text": f"{i} and " * (i % 4 + 1)} for i in range(24)])
DATA = {
    "prompt and completion": COMPLETIONS,
    "text": TEXTS,
    "messages": Dataset.from_list([{"messages": TURN}] * 24),
    "turns": Dataset.from_list([{"prompt": TURN[:1], "completion": TURN[1:]}] * 24),
    "token ids": Dataset.from_list([{"input_ids": list(range(5, 8 + i % 9))} for i in range(24)]),
    "stream": COMPLETIONS.to_iterable_dataset(),
}
OPTIMIZERS = ("adamw_torch", "sgd", "adafactor", "rmsprop", "adagrad", "adamw_torch_fused")
SCHEDULERS = (
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_restarts",
)
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
ADAPTERS = (
    {"r": 4, "lora_alpha": 4},
    {"lora_dropout": 0.2},
    {"use_rslora": True},
    {"init_lora_weights": "gaussian"},
    {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 2}},
    {"target_modules": ["q_proj", "down_proj"]},
)
SFT = [
    *(({}, name, {}) for name in DATA),
    *(({"optim": name}, "text", {}) for name in OPTIMIZERS),
    *(({"lr_scheduler_type": name, "warmup_steps": 1}, "text", {}) for name in SCHEDULERS),
    *(({}, "prompt and completion", fields) for fields in ADAPTERS),
    *(
        ({"packing": True, "max_length": 32, **more}, "text", {})
        for more in ({}, {"eval_packing": False, **EVALUATED})
    ),
    ({"padding_free": True, "max_length": None}, "text", {}),
    ({"max_length": 6}, "text", {}),
    ({"pad_to_multiple_of": 8}, "text", {}),
    ({"completion_only_loss": False}, "prompt and completion", {}),
    ({"assistant_only_loss": True}, "messages", {}),
    ({"loss_type": "dft"}, "text", {}),
    ({"label_smoothing_factor": 0.1}, "text", {}),
    ({"gradient_accumulation_steps": 2}, "text", {}),
    ({"gradient_checkpointing": True}, "text", {}),
    ({"neftune_noise_alpha": 5}, "text", {}),
    ({"max_grad_norm": 0.01}, "text", {}),
    ({"weight_decay": 0.1}, "text", {}),
    ({"adam_beta1": 0.5, "adam_epsilon": 1e-4}, "text", {}),
    ({"seed": 7, "data_seed": 3}, "text", {}),
    ({"max_steps": -1, "num_train_epochs": 0.5}, "text", {}),
    ({"dataloader_drop_last": True, "train_sampling_strategy": "sequential"}, "text", {}),
    ({"train_sampling_strategy": "group_by_length"}, "text", {}),
    ({**EVALUATED, "per_device_eval_batch_size": 2}, "text", {}),
    ({**EVALUATED, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}, "text", {}),
    ({"bf16": True}, "text", {}),
]


@pytest.mark.parametrize(("fields", "data", "adapter"), SFT, ids=str)
def test_sft(tokenizer, tmp_path, fields, data, adapter):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT

    def train(cls, config, **more):
        given = {**COMMON, "per_device_train_batch_size": 4, **fields, **more}
        args = config(str(tmp_path / cls.__name__), **given)
        rows = DATA[data] if data == "stream" else Dataset.from_list(DATA[data].to_list())
        evaluated = rows.select(range(4)) if "eval_strategy" in fields else None
        peft_config = default_peft_config(tiny_ouro(), **adapter)
        trainer = cls(
            tiny_ouro(),
            args=args,
            train_dataset=rows,
            eval_dataset=evaluated,
            processing_class=tokenizer,
            peft_config=peft_config,
        )
        trainer.train()
        return trainer

    ours = train(LoopDropoutSFTTrainer, LoopDropoutConfig, **EXACT)
    same_weights(ours, train(SFTTrainer, SFTConfig))
    has_trained(ours)
