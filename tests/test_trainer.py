"""`LoopDropoutSFTTrainer` as a drop-in for `SFTTrainer`: the same run but for the gates, which stay inside training steps."""

from dataclasses import dataclass

import pytest
import torch
from conftest import Recorder, assert_same_weights, tiny_ouro, trained_parameters
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from loopdropout_trainer import LoopDropoutSFTTrainer, default_peft_config, use_gates
from loopdropout_trainer.looped import NotLoopedError, find_looped_model


@dataclass
class OwnConfig(SFTConfig):
    nickname: str = "mine"


@pytest.mark.parametrize("cls", [SFTConfig, OwnConfig])
def test_a_plain_config_trains_by_the_papers_default(model, dataset, tokenizer, tmp_path, cls):
    args = cls(str(tmp_path), max_steps=1, report_to="none", bf16=False, use_cpu=True)
    trainer = LoopDropoutSFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    assert (trainer.args.rule, trainer.args.p) == ("loop_dropout", 0.5)
    assert getattr(trainer.args, "nickname", None) == getattr(args, "nickname", None)
    lora = trainer.model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (16, 32, 0)
    assert lora.target_modules == set(find_looped_model(model).recurrent_linears())
    assert {p.dtype for p in trained_parameters(trainer.model).values()} == {torch.float32}
    trainer.train()


def test_unit_gates_train_exactly_as_trl_and_peft_do(train):
    theirs = lambda **fields: train(
        cls=SFTTrainer, rule="lora", peft_config=default_peft_config(tiny_ouro()), **fields
    )
    ours, stock = train(rule="lora", remove_padding=False, fused_lora=False), theirs()
    assert_same_weights(ours, stock)
    assert_same_weights(train(rule="lora", adam_epsilon=1e-3), theirs(adam_epsilon=1e-3), atol=1e-6, rtol=1e-4)
    for mine, other in zip(ours.state.log_history, stock.state.log_history, strict=True):
        assert mine.get("loss") == other.get("loss")


def test_evaluating_in_the_middle_leaves_training_as_it_was(train):
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3}
    plain, evaluated = (train(cls=Recorder, **fields) for fields in ({}, evaluating))
    trained = [[each for each in trainer.seen if each.gradients is not None] for trainer in (plain, evaluated)]
    rows = [[(each.batch["input_ids"].tolist(), each.gates.tolist()) for each in steps] for steps in trained]
    assert rows[0] == rows[1]
    assert_same_weights(plain, evaluated)
    losses = [log["eval_loss"] for log in evaluated.state.log_history if "eval_loss" in log]
    assert len(losses) == 4 and evaluated.evaluate()["eval_loss"] == losses[-1]


def test_an_evaluation_is_under_the_gates_that_the_caller_applies(train):
    trainer = train(per_device_eval_batch_size=4)
    (batch,) = trainer.get_eval_dataloader()
    losses = []
    for gates in (torch.zeros(4), torch.eye(4)[0], torch.ones(4)):
        with use_gates(trainer.model, gates), torch.no_grad():
            losses.append(trainer.evaluate()["eval_loss"])
            assert trainer.model(**batch).loss.item() == pytest.approx(losses[-1], rel=1e-6)
    assert len(set(losses)) == 3


class OwnLoss(LoopDropoutSFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class OwnBatches(LoopDropoutSFTTrainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=self.data_collator)


@pytest.mark.parametrize("cls", [OwnLoss, OwnBatches])
@pytest.mark.parametrize(
    "fields",
    [{}, {"padding_free": True, "max_length": None}, {"rule": "lora_dropout", "rule_args": {"num_masks": 3}}],
    ids=str,
)
def test_a_subclass_with_a_loss_or_batches_of_its_own_is_trained_under_the_same_gates(train, cls, fields):
    fields |= {
        "train_sampling_strategy": "sequential",
        "adam_epsilon": 1e-3,
        "max_grad_norm": 0,
        "eval_strategy": "epoch",
    }
    own, plain = train(cls=cls, **fields), train(**fields)
    assert_same_weights(own, plain, atol=1e-6, rtol=1e-4)
    assert own.state.log_history[0]["loss"] == pytest.approx(plain.state.log_history[0]["loss"], rel=1e-5)


def test_rows_in_the_format_of_numpy_are_trained_on_alike(train, dataset):
    assert_same_weights(train(rows=dataset.with_format("numpy")), train())


class GatesAtEvents(TrainerCallback):
    """Looks at the gates at every event outside of a step."""

    def __init__(self, trainer):
        self.state, self.gates = trainer.loop_state, []

    def on_evaluate(self, *args, **kwargs):
        self.gates.append(self.state.gates)

    on_log = on_save = on_step_end = on_substep_end = on_evaluate


def test_no_sampled_gate_is_seen_outside_a_training_step(make_sft):
    events = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_sft(gradient_accumulation_steps=2, **events)
    watch = GatesAtEvents(trainer)
    trainer.add_callback(watch)
    trainer.train()
    assert len(watch.gates) > 12 and all(gates is None for gates in watch.gates)

    # An exception between forward and backward, as an interrupt from the keyboard would be.
    trainer.accelerator.backward = lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.loop_state.gates is None


@pytest.mark.parametrize("fields", [{"p": 0.999999, "rule": "unscaled"}, {"p": [0.999999] * 4}])
def test_micro_batches_without_any_active_loop_train_on(train, fields):
    trainer = train(**fields)
    weights = get_peft_model_state_dict(trainer.model)
    assert all(not tensor.any() for name, tensor in weights.items() if "lora_B" in name)
    assert [log["gate_mean"] for log in trainer.state.log_history if "loss" in log] == [0] * 4


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"p": [0.1, 0.2]}, ValueError, "`p` has 2 values, but the model runs 4 loops"),
        ({"model_init_kwargs": {"num_loops": 0}}, ValueError, "integer from 1 to 1,024; got 0"),
        ({"peft_config": LoraConfig(use_dora=True, target_modules=["q_proj"])}, ValueError, "use_dora"),
        ({"model": "llama"}, NotLoopedError, "`llama` model, which is not looped"),
    ],
)
def test_mistakes_are_found_before_any_weight_is_loaded(make_sft, tmp_path, monkeypatch, fields, error, message):
    tiny_ouro().save_pretrained(tmp_path / "ouro")
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1))
    llama.save_pretrained(tmp_path / "llama")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("loaded"))
    with pytest.raises(error, match=message) as caught:
        make_sft(**{**fields, "model": str(tmp_path / fields.get("model", "ouro"))})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("packing", [False, True])
def test_rows_that_are_cut_are_counted(make_sft, log, packing):
    rows = Dataset.from_list([{"prompt": "x" * length, "completion": "y" * 4} for length in (5, 16, 17, 40)])
    make_sft(rows=rows, max_length=20, packing=packing)
    cut, gone = (3, 0) if packing else (2, 1)  # the third row's end, the last one's completion; packed, both are cut
    assert f"Of 4 rows of `train_dataset`, {cut} are cut at `max_length`, 20, and lose their end token" in log.text
    assert f"{gone} are left out" in log.text and "eval_dataset" not in log.text
