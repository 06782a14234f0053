"""What TRL's own suites of SFT, GRPO and DPO ask of their trainers, asked of ours in their place: `pytest -m peer`.

TRL does not ship its tests; these are the same settings, written anew. With unit gates each of them must train exactly as
TRL's trainer does on the same completions, and with Loop Dropout it must train.
"""

import copy
import inspect
import json
import re

import pytest
import torch
import yaml
from conftest import assert_same_weights, tiny_ouro
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, initialize_lora_eva_weights
from torch.nn import functional as F
from transformers import EarlyStoppingCallback
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
    "max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no",
    "bf16": False, "use_cpu": True, "gradient_checkpointing": False,
}  # fmt: skip
GRPO = {**COMMON, "num_generations": 2, "max_completion_length": 5, "temperature": 0.9}
DPO = {**COMMON, "per_device_train_batch_size": 2}
EXACT = {"rule": "lora", "remove_padding": False, "fused_lora": False}
PROMPTS = Dataset.from_list([{"prompt": f"{i}+{i % 7}=", "weight": i % 3} for i in range(8)])
TURNS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(8)])
PAIRS = Dataset.from_list(
    [{"prompt": f"{i}=", "chosen": "a" * (i % 3 + 1), "rejected": "b" * (i % 2 + 1)} for i in range(8)]
)
CHAT = (
    "{{tools}}{{mood}}{% for m in messages %}{{m.role}}:{% generation %}{{m.content}}{% endgeneration %} {% endfor %}"
)


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


def has_trained(trainer):
    weights = get_peft_model_state_dict(trainer.model)
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())
    assert any(bool((weight != 0).any()) for name, weight in weights.items() if "lora_B" in name)


GRPO_FIELDS = [
    {"loss_type": "luspo", "importance_sampling_level": "sequence"}, {"steps_per_generation": 2, "beta": 0.05},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1}, {"entropy_coef": 0.01},
    {"num_iterations": 2, "epsilon_high": 0.3, "delta": 1.5}, {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
    {"scale_rewards": "batch", "top_entropy_quantile": 0.5}, {"scale_rewards": "none", "mask_truncated_completions": True},
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "rewards", "data"),
    [
        *(({"loss_type": kind}, codes, PROMPTS) for kind in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo")),
        *((fields, codes, PROMPTS) for fields in GRPO_FIELDS),
        ({"shuffle_dataset": False, "log_completions": False}, with_log, PROMPTS),
        ({"reward_weights": [0.7, 0.3]}, [codes, of_a_column], PROMPTS),
        ({"multi_objective_aggregation": "normalize_then_sum"}, [codes, of_a_column], PROMPTS),
        *(({}, rewards, PROMPTS) for rewards in ([sometimes], [asynchronous, codes])),
        *(({}, codes, data) for data in (TURNS, PROMPTS.to_iterable_dataset())),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_grpo(tokenizer, tmp_path, fields, rewards, data):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT
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
    assert_same_weights(ours, theirs)
    has_trained(train(LoopDropoutGRPOTrainer, LoopDropoutGRPOConfig))


DPO_FIELDS = [
    *({"loss_type": kind} for kind in ("sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "sppo_hard")),
    {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]}, {"beta": 0.3, "label_smoothing": 0.1},
    {"precompute_ref_log_probs": True}, {"gradient_accumulation_steps": 2}, {"max_length": 4},
]  # fmt: skip


@pytest.mark.parametrize("fields", DPO_FIELDS, ids=str)
def test_dpo(tokenizer, tmp_path, fields):
    def train(cls, config, peft_config=None, **more):
        args = config(str(tmp_path), **{**DPO, **fields, **more})
        trainer = cls(tiny_ouro(), args=args, train_dataset=PAIRS, processing_class=tokenizer, peft_config=peft_config)
        trainer.train()
        return trainer

    ours = train(LoopDropoutDPOTrainer, LoopDropoutDPOConfig, **EXACT)
    assert_same_weights(ours, train(DPOTrainer, DPOConfig, default_peft_config(tiny_ouro())))
    has_trained(train(LoopDropoutDPOTrainer, LoopDropoutDPOConfig))


TALKS = [[{"role": "user", "content": f"{i}+2"}, {"role": "assistant", "content": f"{i + 2}"}] for i in range(24)]
TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
COMPLETIONS = [{"prompt": f"{i}+{i % 7}=", "completion": "x" * (i % 5 + 1)} for i in range(24)]
TEXTS = [{"text": f"{i} and " * (i % 4 + 1), "body": f"{i}." * 9, "size": 24 - i} for i in range(24)]
IDS = [{"input_ids": list(range(5, 8 + i % 9))} for i in range(24)]
DATA = {
    "text": TEXTS,
    "prompt and completion": COMPLETIONS,
    "messages": [{"messages": talk} for talk in TALKS],
    "turns": [{"prompt": talk[:1], "completion": talk[1:]} for talk in TALKS],
    "from and value": [{"conversations": [{"from": m["role"], "value": m["content"]} for m in t]} for t in TALKS],
    "tools": [{"messages": talk, "tools": TOOLS} for talk in TALKS],
    "template words": [{"messages": talk, "chat_template_kwargs": {"mood": "calm"}} for talk in TALKS],
    "token ids": IDS,
    "ids and mask": [{**row, "completion_mask": [0] + [1] * (len(row["input_ids"]) - 1)} for row in IDS],
    "ids and labels": [{**row, "labels": [-100, -100, *row["input_ids"][2:]]} for row in IDS],
}
EVALUATED = {name: Dataset.from_list(TEXTS[start:9:4]) for name, start in (("one", 1), ("two", 2))}


def collated(examples):
    rows = torch.tensor([example["input_ids"][:4] for example in examples])
    return {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}


def own_optimizer(model):
    optimizer = torch.optim.NAdam([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def without_times(numbers):
    return {name: value for name, value in numbers.items() if not name.endswith(("_runtime", "_per_second"))}


def resume(trainer, again):
    again.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-1")
    return [weight.tolist() for weight in get_peft_model_state_dict(again.model).values()]


def save(trainer, again):
    trainer.save_model()
    return PeftModel.from_pretrained(tiny_ouro(), trainer.args.output_dir)(torch.arange(9).view(1, 9)).logits.tolist()


MADE = {
    **{made.__name__: made for made in (collated, own_optimizer, resume, save)},
    "both": EVALUATED,
    "formatted": lambda row: row["body"].replace(".", "!"),
    "likeliest": lambda logits, labels: logits.argmax(-1),
    "metrics": lambda found, compute_result=True: {"sum": float(sum((a % 7).sum() for a in found if a is not None))},
    "ninth": lambda found, labels, **_: F.cross_entropy(found.logits[:, :-1].mT, labels[:, 1:], reduction="sum") / 9,
    "stops_early": lambda model: [EarlyStoppingCallback(1, early_stopping_threshold=9.0)],
    "nadam": (torch.optim.NAdam, {"lr": 1e-2, "momentum_decay": 0.1}),
    "evaluate": lambda trainer, again: without_times(trainer.evaluate(EVALUATED["two"])),
    "predict": lambda trainer, again: trainer.predict(trainer.train_dataset).predictions.tolist(),
}
# By how they begin: fields of the configuration, the constructor and LoRA, `data`, and what is done and compared after it.
SFT = {
    "data:": """
        text | prompt and completion | messages | turns | from and value | tools | template words | token ids | ids and labels
        stream of text | stream of prompt and completion | prompt and completion, completion_only_loss: false
        ids and mask, completion_only_loss: true | turns, completion_only_loss: false | turns, assistant_only_loss: true
        messages, assistant_only_loss: true | prompt and completion, max_length: 6, truncation_mode: keep_end
        messages, chat_template_path: template.jinja | prompt and completion, max_length: 5
        ids and labels, dataset_kwargs: {skip_prepare_dataset: true}""",
    "packing: true, max_length: 32, data:": """
        text | stream of text | prompt and completion | text, shuffle_dataset: true
        text, eval_packing: false, eval_strategy: steps, eval_steps: 1""",
    "": """
        dataset_text_field: body | formatting_func: formatted | data_collator: collated | dataset_num_proc: 2 | eos_token: "!"
        shuffle_dataset: true | pad_token: "!" | max_length: 6 | pad_to_multiple_of: 8 | padding_free: true, max_length: null
        loss_type: dft | loss_type: chunked_nll | compute_loss_func: ninth | label_smoothing_factor: 0.1 | weight_decay: 0.1
        neftune_noise_alpha: 5 | max_grad_norm: 0.01 | max_grad_norm: 0 | bf16: true | seed: 7, data_seed: 3 | then: evaluate
        adam_beta1: 0.5, adam_beta2: 0.9, adam_epsilon: 1.0e-4 | max_steps: -1, num_train_epochs: 0.5 | then: save
        include_num_input_tokens_seen: non_padding | torch_compile: true, torch_compile_backend: eager
        accelerator_config: {use_seedable_sampler: false} | gradient_accumulation_steps: 2 | then: predict
        dataloader_num_workers: 1, dataloader_persistent_workers: true, dataloader_prefetch_factor: 3
        per_device_train_batch_size: 5, dataloader_drop_last: true, max_steps: 5
        gradient_accumulation_steps: 2, average_tokens_across_devices: false""",
    "save_strategy: steps, save_steps: 1, max_steps: 3, then: resume,": "seed: 42 | ignore_data_skip: true",
    "train_sampling_strategy:": """
        sequential | group_by_length | batch_rebalance, gradient_accumulation_steps: 2
        group_by_length, length_column_name: size, remove_unused_columns: false""",
    "gradient_checkpointing: true, gradient_checkpointing_kwargs:": """
        {} | {}, lora_dropout: 0.2 | {use_reentrant: false} | {every_n_layers: 2}""",
    "optim:": """
        adamw_torch | adafactor | rmsprop | sgd | adagrad | sgd, optim_args: "momentum=0.9,nesterov=true"
        rmsprop, optim_args: "momentum=0.5,centered=true" | adagrad, optim_args: lr_decay=0.3
        adamw_torch, optimizer_cls_and_kwargs: nadam | adamw_torch, optimizers: own_optimizer""",
    "max_steps: 4, warmup_steps: 1, lr_scheduler_type:": """
        linear | constant | constant_with_warmup | linear, warmup_steps: 0.5 | greedy, eval_strategy: steps, eval_steps: 1
        cosine, lr_scheduler_kwargs: {num_cycles: 0.7} | cosine_with_restarts, lr_scheduler_kwargs: {num_cycles: 2}
        polynomial, lr_scheduler_kwargs: {power: 2.0, lr_end: 1.0e-4} | inverse_sqrt, lr_scheduler_kwargs: {timescale: 3}
        cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.2}
        cosine_warmup_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.2, warmup_lr_rate: 0.1}
        warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 2, decay_type: cosine}
        reduce_lr_on_plateau, lr_scheduler_kwargs: {patience: 0}, eval_strategy: steps, eval_steps: 1""",
    "eval_strategy: steps, eval_steps: 1,": """
        per_device_eval_batch_size: 2 | eval_on_start: true, eval_delay: 2 | bf16_full_eval: true | eval_dataset: both
        eval_strategy: epoch, max_steps: -1, num_train_epochs: 1 | save_strategy: best, metric_for_best_model: loss
        save_strategy: steps, save_steps: 1, load_best_model_at_end: true, max_steps: 5, callbacks: stops_early""",
    "eval_strategy: steps, eval_steps: 1, compute_metrics: metrics,": """
        seed: 42 | batch_eval_metrics: true | prediction_loss_only: true | include_for_metrics: [inputs, loss]
        preprocess_logits_for_metrics: likeliest | eval_accumulation_steps: 1, per_device_eval_batch_size: 1""",
    "lora_alpha: 8,": """
        r: 4 | lora_dropout: 0.2 | use_rslora: true, rank_pattern: {q_proj: 4} | target_modules: [q_proj, down_proj]
        rank_pattern: {q_proj: 4}, alpha_pattern: {'.*[.]0[.].*_proj': 2} | target_modules: '.*[.]1[.]mlp[.](up|gate)_proj'
        exclude_modules: [o_proj, down_proj] | target_modules: all-linear, exclude_modules: [early_exit_gate]
        target_modules: [q_proj], layers_to_transform: [1], layers_pattern: layers | init_lora_weights: false
        init_lora_weights: gaussian | init_lora_weights: orthogonal | init_lora_weights: mica | peft_config: null
        init_lora_weights: eva, r: 4, peft_config: null""",
    "model: base, model_init_kwargs:": "{num_loops: 2}, processing_class: null | {dtype: bfloat16}, bf16: true",
}
FEATURES = [f"{begin} {end}" for begin, ends in SFT.items() for end in re.split(r"\s*\n\s*| \| ", ends.strip())]


@pytest.mark.parametrize("feature", FEATURES)
def test_sft(tokenizer, tmp_path, monkeypatch, feature):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").write_text(CHAT.replace("m.role", "m.role | upper"))
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained("base")
    tiny_ouro().save_pretrained("base")
    given = {name: MADE.get(str(value), value) for name, value in yaml.safe_load(f"{{{feature}}}").items()}
    data, then = given.pop("data", "text"), given.pop("then", None)
    lora = {name: given.pop(name) for name in [*given] if name in LoraConfig.__dataclass_fields__}
    of_trainer = {name: given.pop(name) for name in [*given] if name in inspect.signature(SFTTrainer).parameters}
    if "eval_strategy" in given:
        of_trainer.setdefault("eval_dataset", EVALUATED["one"])

    def make(cls, config, **more):
        args = config(cls.__name__, **{**COMMON, **given, **more})
        rows = Dataset.from_list(DATA[data.removeprefix("stream of ")])
        rows = rows.to_iterable_dataset() if data.startswith("stream") else rows
        own = {"processing_class": copy.deepcopy(tokenizer), "peft_config": default_peft_config(tiny_ouro(), **lora)}
        model = of_trainer.get("model") or tiny_ouro()
        if {"peft_config", "optimizers"} & of_trainer.keys():
            model = get_peft_model(model, own.pop("peft_config"))
        if lora.get("init_lora_weights") == "eva":
            batch = {"input_ids": torch.arange(2, 42).view(4, 10), "attention_mask": torch.ones(4, 10)}
            initialize_lora_eva_weights(model, [batch] * 2, show_progress_bar=False)
        for name, value in of_trainer.items():
            own[name] = value(model) if name in ("optimizers", "callbacks") else value
        return cls(**{**own, "model": model}, args=args, train_dataset=rows)

    def train(*args, **more):
        trainer = make(*args, **more)
        trainer.train()
        return trainer, trainer.state.log_history[:], then and then(trainer, make(*args, **more))

    ours, log, result = train(LoopDropoutSFTTrainer, LoopDropoutConfig, **EXACT)
    theirs, their_log, wanted = train(SFTTrainer, SFTConfig)
    assert_same_weights(ours, theirs)
    assert result == wanted
    for mine, other in zip(log, map(without_times, their_log), strict=True):
        assert {name: mine[name] for name in other} == pytest.approx(other, rel=1e-6)
    has_trained(ours)


def test_layers_to_transform_choose_among_all_linear_layers_of_the_block():
    model = get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro(), layers_to_transform=[1]))
    assert [".layers.1." in name for name in get_peft_model_state_dict(model)] == [True] * 14
