"""Every extension point of TRL's `SFTTrainer` gives the same training with the rule `lora`, and sees the same batches."""

import functools
import re
from importlib.metadata import version

import pytest
import torch
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import TrainerCallback, set_seed
from trl import SFTTrainer

from helpers.tiny import tiny_ouro
from helpers.trainers import assert_same_weights
from loopdropout_trainer import LoopDropoutSFTTrainer, default_peft_config


TEXTS = Dataset.from_list([{"question": f"{i}+", "answer": "=" + "x" * (1 + i % 4 + i % 2 * 9)} for i in range(24)])
IDS = [[5 + i, 7, *[20 + i % 3] * (2 + i % 4 + i % 2 * 9), 0] for i in range(24)]
ROWS = Dataset.from_list([{"input_ids": ids, "labels": [-100, -100, *ids[2:]]} for ids in IDS])
EVAL = [0, 4, 8, 12]  # rows of one length, whose mean loss does not depend on the batches
FIELDS = {"rule": "lora", "max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "adam_epsilon": 1e-3}
MODES = {
    "default": {"gradient_checkpointing": False},
    "accumulation": {"gradient_checkpointing": False, "gradient_accumulation_steps": 2},
    "packing": {"gradient_checkpointing": False, "packing": True, "max_length": 32, "eval_packing": False},
    "checkpointing": {"gradient_checkpointing": True},
    "padding_free": {"gradient_checkpointing": False, "padding_free": True, "max_length": None},
}


def example_losses(logits, labels):
    """Mean loss of each row, and a term that also reads the logits of padding."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1) + 1e-3 * logits.logsumexp(-1).mean(1)


def second_forward(base, self, model, inputs, return_outputs=False, num_items_in_batch=None):
    result = base.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
    logits = model(**inputs).logits
    with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
        frozen = model(**inputs).logits
    divergence = F.kl_div(logits.log_softmax(-1), frozen.log_softmax(-1), log_target=True, reduction="batchmean")
    return (result[0] + divergence, result[1]) if return_outputs else result + divergence


def outputs_of_super(base, self, model, inputs, return_outputs=False, num_items_in_batch=None):
    loss, outputs = base.compute_loss(self, model, inputs, True, num_items_in_batch)
    loss = loss * example_losses(outputs.logits, inputs["labels"]).mean().detach()
    return (loss, outputs) if return_outputs else loss


def own_loss(base, self, model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
    return (outputs.loss, outputs) if return_outputs else outputs.loss


def example_weights(base, self, model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(**inputs)
    losses = example_losses(outputs.logits, inputs["labels"])
    loss = (losses * torch.arange(1, len(losses) + 1)).mean()
    return (loss, outputs) if return_outputs else loss


def training_step(base, self, model, inputs, num_items_in_batch=None):
    self.shapes = {name: tuple(inputs[name].shape) for name in ("input_ids", "labels")}
    loss = base.training_step(self, model, inputs, num_items_in_batch)
    (0.1 * model(**inputs).logits.square().mean()).backward()
    return loss * 2


def prediction_step(base, self, model, inputs, prediction_loss_only, ignore_keys=None):
    loss, *others = base.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
    return loss * 2, *others


def get_train_dataloader(base, self):
    self.shapes = [tuple(batch["labels"].shape) for batch in base.get_train_dataloader(self)]
    return base.get_train_dataloader(self)


METHODS = {f"compute_loss: {f.__name__}": f for f in (second_forward, outputs_of_super, own_loss, example_weights)}
METHODS |= {f.__name__: f for f in (training_step, prediction_step, get_train_dataloader)}


class Changes(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model(input_ids=torch.tensor([[5, 6]]))  # a pass outside of the steps

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.param_groups[0]["lr"] *= 0.5
        control.should_evaluate = True


def collate(examples, trains_padding=False):
    """Pad on the left, with labels of the first tokens and on demand of padding.

    The padding has an embedding: the one of the configuration is zero, and would give the outputs that padding has if it is
    left out.
    """
    pad = lambda ids: [2] * (18 - len(ids)) + ids
    batch = {"input_ids": torch.tensor([pad(x["input_ids"]) for x in examples])}
    batch["attention_mask"] = (batch["input_ids"] != 2).long()
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == -trains_padding, -100)}


def token_loss(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, targets, reduction="sum") / (num_items_in_batch or (targets != -100).sum())


def sgd(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


METRICS = {"compute_metrics": lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}}
ARGUMENTS = {
    "compute_loss_func of tokens": {"compute_loss_func": token_loss},
    "of examples": {"compute_loss_func": lambda out, labels, **kwargs: example_losses(out.logits, labels).mean()},
    "compute_metrics": METRICS,
    "preprocess_logits": {**METRICS, "preprocess_logits_for_metrics": lambda logits, labels: logits.roll(1, 1)},
    "left padding": {"data_collator": collate},
    "callbacks": {"callbacks": [Changes()]},
    "trained padding": {"data_collator": functools.partial(collate, trains_padding=True)},
    "optimizers": {"optimizers": sgd},
    "optimizer class": {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.05})},
    "formatting_func": {"formatting_func": lambda row: row["question"] + row["answer"]},
}


NO_LOGITS = () if Version(version("trl")) >= Version("1.16") else (AttributeError, TypeError)


def train(cls, config, tokenizer, point, fields):
    """Return a trained trainer of a class with one extension point."""
    arguments = dict(ARGUMENTS.get(point, {}))
    if point in METHODS:
        base, name, function = cls, point.split(":")[0], METHODS[point]
        cls = type("Own", (cls,), {name: lambda self, *args, **kwargs: function(base, self, *args, **kwargs)})
    model = tiny_ouro(num_hidden_layers=1, num_loops=2)
    arguments["peft_config"] = default_peft_config(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM"))
    set_seed(42)
    if "optimizers" in arguments:
        model = get_peft_model(model, arguments.pop("peft_config"))
        arguments["optimizers"] = arguments["optimizers"](model)
    rows = TEXTS if "formatting_func" in arguments else ROWS
    data = {"train_dataset": rows, "eval_dataset": rows.select(EVAL), "processing_class": tokenizer}
    trainer = cls(model, config(**{**FIELDS, **fields}), **data, **arguments)
    trainer.train()
    return trainer


def cases():
    """Each extension point in one mode, and each mode with at least three points. The other pairs are slow.

    Those that read padding have a mode with padding.
    """
    modes = [*MODES]
    for number, point in enumerate([*METHODS, *ARGUMENTS]):
        for mode in MODES:
            is_fast = mode == modes[number % len(modes)]
            yield pytest.param(point, mode, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(("point", "mode"), [*cases()])
def test_extension_point_equals_trl(config, tokenizer, point, mode):
    """Both trainers have the same logs and weights, raise the same errors, and show user code the same shapes."""
    try:
        theirs = train(SFTTrainer, config, tokenizer, point, MODES[mode])
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            train(LoopDropoutSFTTrainer, config, tokenizer, point, MODES[mode])
        return
    except NO_LOGITS:
        pytest.skip("Before TRL 1.16, TRL's own trainer gives this extension point no logits.")
    ours = train(LoopDropoutSFTTrainer, config, tokenizer, point, MODES[mode])
    assert getattr(ours, "shapes", None) == getattr(theirs, "shapes", None)
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        want = {name: x for name, x in other.items() if not name.endswith(("runtime", "per_second", "total_flos"))}
        assert {name: mine.get(name) for name in want} == pytest.approx(want, rel=1e-4, abs=1e-5)
    assert_same_weights(ours, theirs, atol=2e-5, rtol=1e-3)
