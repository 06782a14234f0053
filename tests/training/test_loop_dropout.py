"""Loop Dropout in other training loops, and the examples of docs/training_loops.md."""

import copy
import dataclasses
import re
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
import trl
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from trl import SFTTrainer

from helpers.errors import user_error
from helpers.files import ROOT
from helpers.tiny import DORY, tiny_hrm, tiny_ouro, trained_parameters, with_adapter
from helpers.trainers import Recorder
from loopdropout_trainer import default_peft_config, handle, loop_dropout, merge_and_save, use_gates
from loopdropout_trainer.gates import ExactlyM, LoopDropout, make_rule
from loopdropout_trainer.looped import find_looped_model, use_depth
from loopdropout_trainer.lora import gated_layers
from loopdropout_trainer.saving.metadata import read_metadata


IDS = torch.arange(2, 20).view(2, 9)


def tiny_causal_hrm():
    return tiny_hrm(prefix_lm=False)


FAMILIES = pytest.mark.parametrize("make", [tiny_ouro, tiny_causal_hrm, DORY])
PAGE = (ROOT / "docs" / "training_loops.md").read_text()
EXAMPLES = dict(re.findall(r"## ([^\n]*)\n\n```python\n(.*?)```", PAGE, re.DOTALL))


def gradients(model):
    return torch.cat([p.grad.flatten() for p in trained_parameters(model).values()])


class Plain(SFTTrainer):
    """Keeps the gradients of its last micro-batch."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.batch = {name: x.clone() for name, x in inputs.items()}
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.gradients = gradients(model)
        return loss


@FAMILIES
def test_all_trainers_have_the_same_gradients(make, train, make_sft):
    fields = {"max_steps": 1, "gradient_checkpointing": True, "seed": 7}
    (ours,) = train(with_adapter(make(), scale=0.1), cls=Recorder, p=0.3, **fields).seen
    want = torch.cat([gradient.flatten() for gradient in ours.gradients.values()])

    trainer = make_sft(with_adapter(make(), scale=0.1), cls=Plain, **fields)
    dropout = loop_dropout(trainer.model, p=0.3, seed=7)
    trainer.train()
    assert repr(dropout) == "LoopDropoutHandle of LoopDropout(p=0.3), seed 7, 1 draw so far"
    assert torch.equal(trainer.batch["input_ids"], ours.batch["input_ids"])
    assert torch.equal(dropout.last_gates.sampled, ours.gated.sampled)
    torch.testing.assert_close(trainer.gradients, want, atol=1e-6, rtol=1e-4)

    peft_model = with_adapter(make(), scale=0.1).train()
    dropout = loop_dropout(peft_model, p=0.3, seed=7)
    loss = peft_model(**trainer.batch).loss
    loss.backward()
    assert torch.equal(dropout.last_gates.sampled, ours.gated.sampled)
    torch.testing.assert_close(loss, ours.loss, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradients(peft_model), want, atol=1e-6, rtol=1e-4)


@FAMILIES
def test_recomputation_keeps_the_gates_of_its_pass(make):
    """Two forward passes come before the backward pass, which recomputes each of them."""
    losses, found = [], []
    for checkpointing in (False, True):
        peft_model = with_adapter(make(), scale=0.1).train()
        loop_dropout(peft_model, seed=1)
        if checkpointing:
            peft_model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        passes = [peft_model(ids, labels=ids).loss for ids in (IDS, IDS + 20)]
        sum(passes).backward()
        losses.append(torch.stack(passes))
        found.append(gradients(peft_model))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


@FAMILIES
def test_gates_are_one_outside_of_training_passes(make):
    peft_model = with_adapter(make(), scale=0.1).eval()
    unit = peft_model(IDS).logits
    with torch.no_grad(), use_depth(peft_model, 2), use_gates(peft_model, [1, 0]):
        peft_model(IDS)
    dropout = loop_dropout(peft_model)
    assert torch.equal(peft_model(IDS).logits, unit)
    peft_model.train()
    with torch.no_grad():
        assert torch.equal(peft_model(IDS).logits, unit)
    with use_gates(peft_model, torch.ones(find_looped_model(peft_model).num_loops)):
        assert torch.equal(peft_model(IDS).logits, unit)
    assert dropout.num_draws == 0
    assert not torch.equal(peft_model(IDS).logits, peft_model(IDS).logits)
    assert torch.equal(peft_model.eval()(IDS).logits, unit)


@FAMILIES
def test_packed_examples_have_their_own_gates(make):
    peft_model = with_adapter(make(), scale=0.1).train()
    gates = torch.rand(find_looped_model(peft_model).num_loops, 2)
    with use_gates(peft_model, gates):
        want = peft_model(IDS).logits
    dropout = loop_dropout(peft_model)
    dropout.sample = lambda example_ids: gates[:, : len(example_ids)]
    embeds, positions = peft_model.get_input_embeddings()(IDS), torch.arange(9)[None]
    assert torch.equal(peft_model(inputs_embeds=embeds, position_ids=positions).logits, want)
    packed = peft_model(IDS.view(1, -1), position_ids=positions.repeat(1, 2), use_cache=False).logits
    torch.testing.assert_close(packed.view_as(want), want, atol=1e-5, rtol=1e-5)


def test_frozen_adapters_raise(make_sft):
    frozen, trainer = with_adapter().requires_grad_(False), make_sft(with_adapter())
    trainer.model.requires_grad_(False)
    in_inference = lambda model: make_sft(peft_config=LoraConfig(inference_mode=True))
    for make in (loop_dropout, make_sft, in_inference, lambda model: trainer.train()):
        with user_error("must not be frozen.* `is_trainable=True`.* set `inference_mode=False`"):
            make(frozen)
    disabled = make_sft()
    disabled.model.disable_adapter_layers()
    with user_error("must not be disabled, because nothing would train. .* `model.enable_adapter_layers"):
        disabled.train()


def test_rules_that_do_not_fit_another_depth_raise():
    peft_model = with_adapter().train()
    dropout = loop_dropout(peft_model, p=[0, 0.5, 0.5, 0.5])
    with use_depth(peft_model, 6), user_error("`p` has 4 values, but the model runs 6 loops. Set one value for each"):
        peft_model(IDS)
    dropout.rule = ExactlyM(m=2)
    with use_depth(peft_model, 1), user_error("`m` must be an integer from 1 to 1, got 2"):
        peft_model(IDS)
    peft_model(IDS)  # at its own depth
    assert dropout.num_draws == 1


def test_draws_depend_on_seed_pass_and_process(monkeypatch):
    ids, peft_model = [(row, 0) for row in range(64)], with_adapter()
    torch.manual_seed(5)
    dropout = loop_dropout(peft_model)
    first = dropout.sample(ids)
    assert torch.equal(loop_dropout(with_adapter(), seed=5).sample(ids), first)
    dropout.num_draws = 1
    assert not torch.equal(dropout.sample(ids), first)
    dropout.num_draws = 0
    monkeypatch.setattr(handle, "_process_index", lambda: 1)
    assert not torch.equal(dropout.sample(ids), first)


@FAMILIES
def test_remove_restores_the_model(make):
    peft_model = with_adapter(make())
    modules = [module for name, module in peft_model.named_modules() if name != "base_model"]
    look = lambda: [(type(m), *m._forward_pre_hooks, *m._forward_hooks, *vars(m)) for m in modules]
    before = look()
    dropout = loop_dropout(peft_model)
    assert look() != before and gated_layers(peft_model)
    dropout.remove()
    assert look() == before and not gated_layers(peft_model)
    newer = loop_dropout(peft_model)
    dropout.remove()
    assert gated_layers(peft_model) and newer.gate_state.dropout is newer
    for name in ("p", "rule"):
        with user_error(f"`{name}` must be set before `remove..`, .* Call `loop_dropout` on the model again"):
            setattr(dropout, name, 0.1)
    for model in (peft_model, copy.deepcopy(peft_model)):
        with user_error(
            r"Call `remove.*, or load the model again. .* `find_looped_model.model..gate_state.dropout.remove\(\)`"
        ):
            loop_dropout(model)
        find_looped_model(model).gate_state.dropout.remove()  # of a handle that nobody kept
        again = loop_dropout(model)
        model.train()(input_ids=torch.arange(1, 5)[None])
        assert again.num_draws == 1


@pytest.mark.parametrize("is_added_before", [True, False])
def test_later_active_adapter_has_gates(is_added_before):
    peft_model = with_adapter(target_modules=["q_proj"]).train()
    second = "second", LoraConfig(target_modules=["v_proj", "down_proj"], init_lora_weights=False)
    if is_added_before:
        peft_model.add_adapter(*second)
    dropout = loop_dropout(peft_model, p=0.9, seed=1)
    if not is_added_before:
        peft_model.add_adapter(*second)
    peft_model.set_adapter("second")
    loss = peft_model(IDS, labels=IDS).loss
    assert len(gated_layers(peft_model)) == len(dropout.physical_layers) == 6
    gates = dropout.last_gates.sampled
    dropout.remove()
    assert not gated_layers(peft_model)
    with use_gates(peft_model, gates):
        assert torch.equal(peft_model(IDS, labels=IDS).loss, loss) and not (gates == 1).all()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("make", [tiny_ouro, tiny_hrm, DORY])
def test_recomputation_without_its_gates_raises(make, use_reentrant):
    peft_model = with_adapter(make(), scale=0.1).train()
    dropout = loop_dropout(peft_model, seed=1)
    embeds = peft_model.get_input_embeddings()(IDS).detach().requires_grad_()
    with user_error("whole model must not be checkpointed"):
        checkpoint(lambda x: peft_model(inputs_embeds=x).logits, embeds, use_reentrant=use_reentrant)
    peft_model.base_model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    peft_model.enable_input_require_grads()
    loss = peft_model(IDS, labels=IDS, use_cache=False).loss
    dropout.remove()
    with user_error("must not be removed before its backward pass"):
        loss.backward()
    again = loop_dropout(peft_model, seed=1)  # on layers that know that gates were removed
    again_loss = peft_model(IDS, labels=IDS, use_cache=False).loss
    torch.testing.assert_close(again_loss, loss, rtol=0, atol=0)
    again_loss.backward()
    again.remove()


@pytest.mark.parametrize("name", ["schedule", "adaptive", "lora_dropout"])
def test_rules_of_trainers_raise(name):
    with user_error("`rule` must only draw gates"):
        loop_dropout(with_adapter(), rule=make_rule(name))


@pytest.mark.parametrize(
    "progress",
    [
        lambda draw: draw.step / draw.num_steps,
        lambda draw: draw.step / max(draw.num_steps - 1, 1),
        lambda draw: 0.5 if draw.num_steps and draw.num_steps > 9 else 0,
    ],
)
def test_rule_that_does_not_say_that_it_uses_steps_is_named(progress):
    """It would divide by zero, or have the p of its last step from the second pass on."""

    class Late(LoopDropout):
        name = "late"
        has_unit_mean = False

        def sample(self, draw):
            assert "num_steps=unknown" in repr(dataclasses.replace(draw, seed=1))
            return super().sample(draw) * progress(draw)

    handle = loop_dropout(with_adapter().train(), rule=Late())
    with user_error(
        "The rule 'late' must not use `draw.num_steps` .* Write `uses_steps = True` in the class Late, and"
    ):
        handle.model(IDS)


def test_rule_of_two_draws_raises():
    class TwoDraws(LoopDropout):
        name = "two_draws"
        draws_per_batch = 2

    with user_error("`rule` must only draw gates"):
        loop_dropout(with_adapter(), rule=TwoDraws())


@pytest.mark.parametrize("title", EXAMPLES)
def test_examples_of_the_page_draw_gates(title, dataset, tokenizer, tmp_path, monkeypatch):
    assert len(EXAMPLES) == 4 and len(EXAMPLES[title].splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    handles = []
    limits = {"max_steps": 2, "bf16": False, "report_to": "none", "save_strategy": "no", "use_cpu": True}
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    names = {
        "model": tiny_ouro(), "tokenizer": tokenizer, "torch": torch, "get_peft_model": get_peft_model,
        "default_peft_config": default_peft_config, "Accelerator": lambda: accelerate.Accelerator(cpu=True),
        "loop_dropout": lambda *args, **kwargs: handles.append(loop_dropout(*args, **kwargs)) or handles[-1],
        "Trainer": transformers.Trainer, "TrainingArguments": lambda out: transformers.TrainingArguments(out, **limits),
        "SFTTrainer": SFTTrainer, "SFTConfig": lambda out: trl.SFTConfig(out, **limits),
        "loader": torch.utils.data.DataLoader(rows, batch_size=2), "collator": transformers.default_data_collator,
        "dataset": dataset if "SFT" in EXAMPLES[title] else rows,
    }  # fmt: skip
    exec(EXAMPLES[title], names)
    assert handles[0].num_draws > 0
    assert any(p.any() for name, p in names["model"].named_parameters() if "lora_B" in name)


def test_wrong_arguments_of_a_handle_raise(make_sft):
    with user_error("an instance of `GateRule`, got <class .* Make an instance, `LoopDropout"):
        loop_dropout(with_adapter(), rule=LoopDropout)
    with user_error("got <function .* Write the function as the method `sample` of a class with `@register_rule`"):
        loop_dropout(with_adapter(), rule=lambda draw: [1, 1, 1, 1])
    with user_error("`model` must be a looped model, .* Pass its `model`"):
        loop_dropout(make_sft(), p=0.5)
    with user_error("DataParallel has no adapter to gate. Give the PEFT model that it wraps, which is its `module`"):
        loop_dropout(torch.nn.DataParallel(with_adapter()))
    with user_error("`seed` must be an integer, got 1.5"):
        loop_dropout(with_adapter(), seed=1.5)
    with user_error("Set the fields of a rule in one place"):
        loop_dropout(with_adapter(), p=0.25, rule=LoopDropout(p=0.5))


def test_handle_takes_another_p_and_rule():
    model = with_adapter().train()
    handle = loop_dropout(model, torch.tensor(0.5))
    handle.p = 0.75
    model(torch.arange(40).view(8, 5))
    assert handle.p == 0.75 and {*handle.last_gates.sampled.unique().tolist()} == {0.0, 4.0}
    handle.rule = make_rule("exactly_m", m=1)
    model(torch.arange(40).view(8, 5))
    assert (handle.last_gates.sampled > 0).sum(dim=0).tolist() == [1] * 8
    with user_error("`p` must not be set, because the rule 'exactly_m' has no such field"):
        handle.p = 0.5
    handle.rule = "exactly_m"  # its present name
    assert handle.rule == make_rule("exactly_m", m=1)
    handle.rule = "random_prefix"
    assert handle.rule == make_rule("random_prefix")
    handle.rule = "loop_dropout"  # the name of an earlier rule
    assert handle.p == 0.75
    with user_error("`rule` must be one of .*, got 'loop_dropuot'"):
        handle.rule = "loop_dropuot"
    with user_error("`rule` must be a name, or a rule .*, got 0.5"):
        handle.rule = 0.5
    for name, value, message in (
        ("P", 0.1, "`P` is not an attribute of the handle. Did you mean 'p'"),
        ("prob", 0.1, "`prob` is not an attribute of the handle. Did you mean 'p'"),
        ("drop_p", 0.1, "`drop_p` is not an attribute of the handle. Did you mean 'p'"),
        ("q", 3, "`q` is not an attribute of the handle. Set `p` = 1 - q"),
        ("ruel", "lora", "`ruel` is not an attribute of the handle. Did you mean 'rule'"),
        ("sample", [1, 1, 1, 1], "`sample` must be a function of `example_ids` that returns gates"),
        ("seed", "7", "`seed` must be an integer, got '7'"),
    ):
        with user_error(message):
            setattr(handle, name, value)
    assert loop_dropout(with_adapter(), rule="lora").p is None


def test_card_names_the_gates_of_a_handle(train, make_sft, tmp_path, log):
    """Also after a training of a trainer, which a later training names with the loop."""
    model = with_adapter()
    handle = loop_dropout(model.train(), p=0.25)
    model.eval()(torch.arange(40).view(8, 5))
    assert "own_loop" not in find_looped_model(model).trained_with
    model.train()(torch.arange(40).view(8, 5))
    handle.remove()
    card = (merge_and_save(model, tmp_path / "merged") / "README.md").read_text()
    assert "| Gates of another training loop | Loop Dropout (p = 0.25) |" in card and "Training rule" not in card
    assert read_metadata(tmp_path / "merged")["own_loop"] == {"rule": "loop_dropout", "p": 0.25, "rule_args": None}
    trainer = train(model, max_steps=1, p=0.5)
    earlier = trainer.looped.trained_with["earlier_trainings"]
    assert earlier == ["in another training loop with Loop Dropout (p = 0.25)"]
    handle = loop_dropout(trainer.model, rule=make_rule("exactly_m", m=1))
    trainer.model.train()(torch.arange(40).view(8, 5))
    handle.sample = lambda example_ids: torch.ones(4, len(example_ids))
    trainer.model(torch.arange(40).view(8, 5))
    trainer.save_model()
    card = Path(trainer.args.output_dir, "README.md").read_text()
    assert "| Training rule | Loop Dropout |" in card and "training loop | gates of the program |" in card
    handle.remove()
    later = make_sft(trainer.model, max_steps=1)
    later.train()
    assert "and then in another training loop with gates of the program. For a fresh start" in log.text
    assert "own_loop" not in later.looped.trained_with


def test_rules_are_imported_without_their_files():
    names = {}
    exec("from loopdropout_trainer.gates import *", names)
    assert "make_rule" in names and "loop_dropout" not in names


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_merged_adapter_of_a_handle_raises(merge):
    model = with_adapter().train()
    loop_dropout(model)
    merged = getattr(model, merge)() or model
    with user_error("The adapter must not be merged in a training pass"):
        merged(torch.arange(10).view(2, 5))
    merged.eval()(torch.arange(10).view(2, 5))


NO_GATES = "The adapter now trains at unit gates, which is plain LoRA, although 'loop_dropout' is its rule."


def test_other_trainer_of_a_gated_model_warns(make_sft, tmp_path, log):
    """It would train plain LoRA without a word. Passes that do not train, or have another rule, give no warning."""
    is_warned = lambda: len({id(record) for record in log.records if NO_GATES in record.getMessage()})
    model = make_sft(rule="lora").model.train()

    def step():
        model(IDS, labels=IDS).loss.backward()

    step()
    trainer = make_sft(model, max_steps=1)
    trainer.evaluate()
    model.train()(IDS, labels=IDS)  # a look at the loss
    with use_gates(model, [1, 1, 1, 1]):
        step()
    model.eval()
    step()
    handle = loop_dropout(model.train())
    step()
    handle.remove()
    step()  # plain LoRA is meant
    trainer.train()
    assert not is_warned()
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    args = transformers.TrainingArguments(tmp_path, max_steps=2, save_strategy="no", use_cpu=True, report_to="none")
    collate = transformers.default_data_collator
    other = transformers.Trainer(model, args, train_dataset=rows, data_collator=collate)
    other.train()
    assert is_warned() == 1
    transformers.Trainer(model, args, train_dataset=rows, data_collator=collate).train()  # with its own optimizer
    assert is_warned() == 2
    trainer.train()  # after which the other one may not know the warning
    other.train()
    assert is_warned() == 3 and "call `loop_dropout(model)` first" in log.text


@pytest.mark.parametrize("is_base_only", [True, False])
def test_training_loop_in_evaluation_mode_warns(is_base_only, log):
    """As after `load_model` or an evaluation. PEFT's model around a model in evaluation mode is in training mode."""
    model = get_peft_model(tiny_ouro().eval(), default_peft_config())
    if not is_base_only:
        model.eval()
    handle = loop_dropout(model)
    loss = model(IDS, labels=IDS).loss  # a look at the loss
    assert NO_GATES not in log.text
    loss.backward()
    assert NO_GATES in log.text and "Call `model.train()` before" in log.text and "first" not in log.text
    assert handle.num_draws == 0


@pytest.mark.parametrize("rule", ["loop_dropout", "learned", "weight_noise"])
def test_checkpointed_layers_warn_without_gates(make_sft, log, rule):
    trainer = make_sft(rule=rule)
    trainer.model.train().base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.model(IDS, labels=IDS).loss.backward()
    assert f"although {rule!r} is its rule" in log.text
