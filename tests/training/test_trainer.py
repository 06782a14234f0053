"""`LoopDropoutSFTTrainer`: TRL's training with drawn gates inside of training passes and unit gates everywhere else."""

import functools
import inspect
import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback, set_seed
from trl import DPOTrainer, GRPOTrainer, SFTConfig, SFTTrainer

import loopdropout_trainer
from helpers.errors import user_error
from helpers.files import ROOT
from helpers.tiny import tiny_ouro, trained_parameters, with_adapter
from helpers.trainers import Recorder, assert_same_weights, logged, unlisted_metrics
from loopdropout_trainer import (
    LoopDropoutSFTTrainer,
    LoRADropoutSFTTrainer,
    default_peft_config,
    merge_and_save,
    use_gates,
)
from loopdropout_trainer.gates import Draw, LoopDropout
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.lora import adapted_layers
from loopdropout_trainer.training import adapter_files, adapter_pushes


PLAIN = {"remove_padding": False}
EXACT = {"adam_epsilon": 1e-3, "max_grad_norm": 0}  # float noise stays small in the weights


@dataclass
class OwnConfig(SFTConfig):
    nickname: str = "mine"


def test_no_examples_are_one_sentence(make_sft):
    with user_error("^`train_dataset` must have at least one example.$"):
        make_sft(rows=Dataset.from_list([]))


def test_trl_config_gets_paper_defaults(config, model, dataset, tokenizer):
    args = config(OwnConfig, max_steps=1)
    trainer = LoopDropoutSFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)
    assert (trainer.args.rule, trainer.args.p, trainer.args.nickname) == ("loop_dropout", 0.5, "mine")
    lora = trainer.model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (16, 32, 0)
    assert lora.target_modules == set(find_looped_model(model).recurrent_linears())
    assert {p.dtype for p in trained_parameters(trainer.model).values()} == {torch.float32}
    trainer.train()


@pytest.mark.parametrize("parent", [SFTTrainer, DPOTrainer, GRPOTrainer])
def test_signature_equals_parent(parent):
    cls = getattr(loopdropout_trainer, f"LoopDropout{parent.__name__}")
    assert list(inspect.signature(cls).parameters) == list(inspect.signature(parent).parameters)


SETTINGS = [
    {"gradient_checkpointing": True, "loss_type": "dft"}, {"packing": True, "max_length": 32}, {"bf16": True},
    {"gradient_accumulation_steps": 5, "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
    {"eval_strategy": "steps", "save_strategy": "best", "eval_steps": 1, "load_best_model_at_end": True},
    {"padding_free": True, "max_length": None}, {"rule": "loop_dropout", "p": 0.0, "lora_dropout": 0.1},
    {"remove_padding": True, "neftune_noise_alpha": 5.0},
]  # fmt: skip


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_unit_gates_train_as_trl_and_peft(train, fields):
    make = functools.partial(tiny_ouro, num_hidden_layers=1)
    adapter = default_peft_config(make(), lora_dropout=fields.get("lora_dropout", 0.0))
    fields = {"rule": "lora", "max_steps": 3, "peft_config": adapter, **PLAIN, **fields}
    fields.pop("lora_dropout", None)
    ours = train(make(), **fields)
    model = make()
    set_seed(ours.args.seed)  # older releases of TRL initialize the adapter before they set the seed
    theirs = train(model, cls=SFTTrainer, **fields)
    assert_same_weights(ours, theirs)
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert mine.get("loss") == other.get("loss")
        assert mine.get("eval_loss", 0) == pytest.approx(other.get("eval_loss", 0), rel=1e-6)
    assert unlisted_metrics(ours) == set()


def test_draws_depend_on_seed_step_and_row(train):
    trainer = train(cls=Recorder, gate_seed=7, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    for step in range(4):
        gates = torch.cat([seen.gates for seen in trainer.seen if seen.step == step], dim=1)
        draw = Draw(seed=7, step=step, example_ids=[(row, 0) for row in range(4)], num_loops=4)
        assert torch.equal(gates, LoopDropout(0.5).sample(draw))


def test_each_seed_fixes_what_its_page_says(train):
    """The page has a row for each seed, with "yes" under the things that change with it."""
    page = (ROOT / "docs/seeds.md").read_text()
    runs = {
        name: train(cls=Recorder, **{name: 7} if name else {}).seen for name in ("", "seed", "gate_seed", "data_seed")
    }
    parts = [
        lambda seen: [weight for name, weight in seen[0].weights.items() if "lora_A" in name],
        lambda seen: [micro_batch.batch["input_ids"] for micro_batch in seen],
        lambda seen: [micro_batch.gates for micro_batch in seen],
    ]
    for name in ("seed", "gate_seed", "data_seed"):
        says = re.search(rf"^\| `{name}` \|[^|]*\| (\w+) \| (\w+) \| (\w+) \|", page, re.MULTILINE).groups()
        for part, word in zip(parts, says, strict=True):
            pairs = zip(part(runs[name]), part(runs[""]), strict=True)
            is_same = all(torch.equal(one, other) for one, other in pairs)
            assert is_same == (word == "no"), (name, says)


def test_lora_dropout_split_keeps_weights(train):
    fields = {"cls": LoRADropoutSFTTrainer, "rule": "lora_dropout", "rule_args": {"num_masks": 2}, "max_steps": 2}
    split = train(per_device_train_batch_size=2, gradient_accumulation_steps=2, **fields, **EXACT)
    assert_same_weights(train(**fields, **EXACT), split, atol=1e-5, rtol=1e-3)


class GatesAtEvents(TrainerCallback):
    """Records the gates at each event, and evaluates at the end of a step."""

    after = ()

    def on_log(self, args, state, control, **kwargs):
        self.after = [*self.after, self.trainer.gate_state.gates]

    on_save = on_evaluate = on_substep_end = on_pre_optimizer_step = on_optimizer_step = on_log

    def on_step_end(self, *args, **kwargs):
        self.on_log(*args)
        self.trainer.evaluate()


def test_callbacks_see_unit_gates(make_sft, train):
    watch, fields = GatesAtEvents(), {"gradient_accumulation_steps": 2, "max_steps": 2}
    trainer = make_sft(callbacks=[watch], save_strategy="steps", save_steps=1, **fields)
    watch.trainer = trainer
    trainer.train()
    assert len(watch.after) >= 16 and all(gates is None for gates in watch.after)
    assert trainer.last_gates.gates is not None
    evaluated, plain = train(eval_strategy="steps", eval_steps=1, **fields), train(**fields)
    assert logged(trainer, "eval_loss") == logged(evaluated, "eval_loss")
    assert logged(evaluated, "eval_loss")[1] == plain.evaluate()["eval_loss"]
    assert_same_weights(trainer, plain)
    assert_same_weights(evaluated, plain)


def test_interrupted_training_leaves_unit_gates(make_sft):
    trainer = make_sft(depth_sampling="uniform", depth_sampling_args={"low": 2, "high": 2})
    trainer.accelerator.backward = lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.gate_state.gates is None and not trainer.gate_state.must_draw and trainer.num_loops == 4


def test_evaluation_keeps_the_gates_of_the_caller(train):
    trainer = train(per_device_eval_batch_size=4)
    (batch,) = trainer.get_eval_dataloader()
    losses = []
    for gates in (torch.zeros(4), torch.eye(4)[0], torch.ones(4)):
        with use_gates(trainer.model, gates), torch.no_grad():
            losses.append(trainer.evaluate()["eval_loss"])
            assert trainer.model(**batch).loss.item() == pytest.approx(losses[-1], rel=1e-6)
    assert len(set(losses)) == 3


class OwnLoss(LoopDropoutSFTTrainer):
    draws = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.draws:
            self.draw_gates(inputs)
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.parametrize("fields", [{}, PLAIN], ids=["optimized", "plain"])
def test_training_without_drawn_gates_raises(make_sft, fields):
    trainer = make_sft(cls=OwnLoss, **fields)
    with pytest.raises(RuntimeError, match=r"`super\(\).compute_loss.*or call `self.draw_gates\(inputs\)`"):
        trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_own_loss_trains_under_drawn_gates(train, monkeypatch):
    monkeypatch.setattr(OwnLoss, "draws", True)
    fields = {"padding_free": True, "max_length": None, **EXACT, "eval_strategy": "epoch"}
    own, plain = train(cls=OwnLoss, **fields), train(**fields)
    assert_same_weights(own, plain, atol=1e-5, rtol=1e-4)
    assert logged(own, "eval_loss") == pytest.approx(logged(plain, "eval_loss"), rel=1e-5)
    assert own.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


def test_lora_plus_scales_the_learning_rate_of_b(train):
    trainer = train(loraplus_lr_ratio=4.0, lr_scheduler_type="constant", max_steps=1)
    rates = {parameter: group["lr"] for group in trainer.optimizer.param_groups for parameter in group["params"]}
    for name, parameter in trained_parameters(trainer.model).items():
        assert rates[parameter] == 1e-2 * (4 if "lora_B" in name else 1), name


def test_saved_adapter_has_its_settings_and_card(train, tmp_path, monkeypatch):
    cards = Mock(wraps=adapter_files.write_model_card)
    for module in (adapter_files, adapter_pushes):
        monkeypatch.setattr(module, "write_model_card", cards)
    trainer = train(p=[0.1, 0.2, 0.3, 0.4], save_strategy="steps", save_steps=4)
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-4"):
        (metadata,) = (json.loads(path.read_text()) for path in folder.glob("*.json") if "loop" in path.name)
        assert (metadata["rule"], metadata["p"], metadata["depths"]) == ("loop_dropout", [0.1, 0.2, 0.3, 0.4], [4, 4])
        assert "Loop Dropout" in (folder / "README.md").read_text()
    assert cards.call_count == 2  # one for each save


def test_two_adapters_raise(make_sft):
    with user_error("Set either `peft_config` or a `model` with an adapter"):
        make_sft(with_adapter(), peft_config=LoraConfig(r=64))


def test_adapter_as_model_says_how_to_load_it(tmp_path):
    with_adapter().save_pretrained(tmp_path)
    with user_error(r"`load_adapter\(load_model\(base\), '.*', is_trainable=True\)`"):
        LoopDropoutSFTTrainer(str(tmp_path))


ON_PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"p": [0.1, 0.2]}, "`p`.*2 values.*4 loops"),
        ({"rule": "lora_dropout"}, "must have one draw for a micro-batch, .* Train it with `LoRADropoutSFTTrainer`"),
        (
            {"cls": LoRADropoutSFTTrainer},
            "`rule` must be 'lora_dropout' for a LoRADropoutSFTTrainer, got 'loop_dropout'",
        ),
        ({"rule": "learned", "depth_sampling": "uniform"}, "`depth_sampling` must be 'fixed'"),
        ({"packing": True, "packing_strategy": "wrapped"}, "`packing_strategy` must be 'bfd'"),
        ({"packing": True, "max_length": None}, "`max_length` must be set if `packing` is true"),
        (
            {"lr_scheduler_type": "cosine_with_min_lr"},
            "`lr_scheduler_kwargs` must fit .* cosine_with_min_lr, got None .One of",
        ),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"powr": 2}},
            "`lr_scheduler_kwargs` must fit .* polynomial, got {'powr': 2} .*unexpected keyword argument 'powr'",
        ),
        ({"depth_sampling": "poisson", "depth_sampling_args": {"rate": -1}}, "`rate` must be .* got -1"),
        ({"depth_sampling": "lognormal_poisson", "depth_sampling_args": {"rate": -1}}, "`rate` must be .* got -1"),
        ({"warmup_from_first_step": True, **ON_PLATEAU}, "`warmup_from_first_step` must be false"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_raise(make_sft, fields, message):
    with user_error(message):
        make_sft(**fields).train()


@pytest.mark.parametrize(
    ("before", "name", "value"),
    [
        ({}, "rule", "lora"),
        ({}, "depth_sampling", "uniform"),
        ({"cls": LoRADropoutSFTTrainer, "rule": "lora_dropout"}, "p", 0.1),
        ({"rule": "lora_dropout", "rule_args": {"num_masks": 1}}, "rule_args", {"num_masks": 2}),
    ],
)
def test_fixed_args_raise_after_a_change(make_sft, before, name, value):
    trainer = make_sft(**before)
    setattr(trainer.args, name, value)
    with user_error(f"`{name}` must keep its value .* got"):
        trainer.train()


def test_changed_p_and_adapter_take_effect(make_sft):
    trainer = make_sft(tiny_ouro(), max_steps=1, p=[0.9])
    trainer.args.p = 0.0
    trainer.model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    trainer.model.set_adapter("second")
    trainer.train()
    assert (trainer.last_gates.sampled == 1).all() and trainer.looped.trained_with["p"] == 0
    trainer.args.p = 0.9
    trainer.train()
    assert (trainer.last_gates.sampled != 1).any() and trainer.looped.trained_with["p"] == 0.9
    variants = [layer.lora_variant["second"] for layer in adapted_layers(trainer.model) if "second" in layer.lora_A]
    assert len(variants) == 2 and all(variant.rule is trainer.rule for variant in variants)
    with use_gates(trainer.model, [0, 2, 0, 2]):
        assert repr(trainer.gate_state) == "GateState(gates=[[0.0], [2.0], [0.0], [2.0]], loop=0)"


def test_settings_saved_are_those_of_the_training_of_the_weights(make_sft, tmp_path):
    """Two trainers of one model: the settings belong to the one that trained last, whichever of them saves."""
    first = make_sft(max_steps=1, p=0.25, output_dir=str(tmp_path / "first"))
    first.train()
    second = make_sft(model=first.model, max_steps=2, p=0.75, output_dir=str(tmp_path / "second"))

    def assert_saved(trainer):
        """Assert that both trainers, and merging, save the settings of a trainer."""
        merge_and_save(first.model, tmp_path / "merged")
        for saving in (first, second):
            saving.save_model()
        for folder in ("first", "second", "merged"):
            saved = json.loads((tmp_path / folder / "loop_dropout.json").read_text())
            steps, p = trainer.args.max_steps, trainer.args.p
            assert (saved["p"], saved["training_id"], saved["step"]) == (p, trainer.training_id, steps), folder

    assert_saved(first)
    second.train()
    assert_saved(second)


def test_optimizer_without_trained_weights_raises(config, dataset, tokenizer):
    def train_with(model, parameters, **fields):
        optimizers = torch.optim.AdamW(parameters, lr=1e-2), None
        data = {"train_dataset": dataset, "processing_class": tokenizer, "optimizers": optimizers}
        trainer = LoopDropoutSFTTrainer(model, config(**fields), **data)
        trainer.train()

    model = tiny_ouro()
    with user_error("`optimizers` must have an optimizer of trained weights"):
        train_with(model, model.parameters())
    model = with_adapter()
    with user_error("Set either `loraplus_lr_ratio` or `optimizers`"):
        train_with(model, model.parameters(), loraplus_lr_ratio=4)
    before = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
    train_with(model, model.parameters())
    assert all((p != before[name]).any() for name, p in trained_parameters(model).items())


def test_two_trainers_of_one_model_have_their_own_gates(make_sft):
    def loss_of(trainer):
        return trainer.compute_loss(trainer.model.train(), {**batch})

    def gradient_of(loss):
        return torch.autograd.grad(loss, [*trained_parameters(noisy.model).values()])

    noisy = make_sft(with_adapter(), rule="weight_noise")
    noisy.model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = noisy.data_collator([noisy.train_dataset[i] for i in range(4)])
    alone = gradient_of(loss_of(noisy))
    other = make_sft(noisy.model)
    torch.testing.assert_close(gradient_of(loss_of(noisy)), alone, rtol=0, atol=0)
    loss = loss_of(noisy)
    gated = loss_of(other)
    with user_error("prepared for another rule before the backward pass of 'weight_noise'"):
        gradient_of(loss)
    assert any((new != old).any() for new, old in zip(gradient_of(gated), alone, strict=True))
    with user_error("`model` must not have an adapter already"):
        make_sft(noisy.model.get_base_model())


MISSING = {
    "galore_torch": (
        {"optim": "galore_adamw", "optim_target_modules": ["q_proj"]},
        "`optim` galore_adamw needs a missing package. You need to install `galore_torch`",
    ),
    "liger_kernel": ({"use_liger_kernel": True}, "`use_liger_kernel` needs a missing package. Install it with `pip"),
}


@pytest.mark.parametrize("package", MISSING)
def test_missing_packages_are_named_before_training(make_sft, package):
    if find_spec(package) is not None:
        pytest.skip("It is installed.")
    fields, message = MISSING[package]
    with user_error(message):
        make_sft(**fields)
