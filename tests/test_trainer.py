"""`LoopDropoutSFTTrainer` as a drop-in for `SFTTrainer`: the same run but for the gates, which stay inside training steps."""

import pytest
import torch
from conftest import tiny_ouro
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from loopdropout_trainer import LoopDropoutSFTTrainer, default_peft_config
from loopdropout_trainer.looped import NotLoopedError, find_looped_model


class Watch(LoopDropoutSFTTrainer):
    """Notes the gates of each micro-batch with the rows that they belong to."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        rows = inputs["input_ids"].tolist()
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training:
            self.seen += zip(rows, self.loop_state.gates.T.tolist(), strict=True)
        return loss


@pytest.fixture
def train(config, dataset, tokenizer):
    """`train(cls=..., model=..., **fields)`: run a short training and return the trainer."""

    def run(cls=LoopDropoutSFTTrainer, model=None, train_dataset=dataset, callbacks=None, peft_config=None, **fields):
        trainer = cls(
            tiny_ouro() if model is None else model,
            args=config(**fields),
            train_dataset=train_dataset,
            eval_dataset=dataset.select(range(8)),
            processing_class=tokenizer,
            callbacks=callbacks,
            peft_config=peft_config,
        )
        trainer.train()
        return trainer

    return run


def weights(trainer):
    return get_peft_model_state_dict(trainer.model)


def assert_same(one, other, **close):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], **close)


EXACT = {"atol": 0, "rtol": 0}


def test_a_plain_config_trains_by_the_papers_default(model, dataset, tokenizer, tmp_path):
    args = SFTConfig(str(tmp_path), max_steps=1, report_to="none", bf16=False, use_cpu=True)
    trainer = LoopDropoutSFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    assert (trainer.args.rule, trainer.args.p) == ("loop_dropout", 0.5)
    lora = trainer.model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (16, 32, 0)
    assert lora.target_modules == set(find_looped_model(model).recurrent_linears())
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    trainer.train()


def test_unit_gates_train_exactly_as_trl_and_peft_do(train):
    ours = train(rule="lora", remove_padding=False, fused_lora=False)
    theirs = train(cls=SFTTrainer, rule="lora", peft_config=default_peft_config(tiny_ouro()))
    assert_same(weights(ours), weights(theirs), **EXACT)
    faster = train(rule="lora", adam_epsilon=1e-3)
    slower = train(cls=SFTTrainer, rule="lora", peft_config=default_peft_config(tiny_ouro()), adam_epsilon=1e-3)
    assert_same(weights(faster), weights(slower), atol=1e-6, rtol=1e-4)
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert mine.get("loss") == other.get("loss")


def test_evaluating_in_the_middle_leaves_training_as_it_was(train):
    plain = train(cls=Watch)
    evaluated = train(cls=Watch, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=3)
    assert plain.seen == evaluated.seen
    assert_same(weights(plain), weights(evaluated), **EXACT)
    losses = [log["eval_loss"] for log in evaluated.state.log_history if "eval_loss" in log]
    assert len(losses) == 4
    assert evaluated.evaluate()["eval_loss"] == losses[-1]


class Interrupt(TrainerCallback):
    """Looks at the gates at every event, and stops the second step in its middle."""

    def __init__(self, trainer_state):
        self.state, self.at_events = trainer_state, []

    def on_evaluate(self, *args, **kwargs):
        self.at_events.append(self.state.gates)

    on_log = on_save = on_step_end = on_substep_end = on_evaluate


def test_no_sampled_gate_is_seen_outside_a_training_step(model, config, dataset, tokenizer):
    args = config(
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1
    )
    trainer = LoopDropoutSFTTrainer(
        model, args, train_dataset=dataset, eval_dataset=dataset.select(range(4)), processing_class=tokenizer
    )
    watch = Interrupt(trainer.loop_state)
    trainer.add_callback(watch)
    trainer.train()
    assert len(watch.at_events) > 12
    assert all(gates is None for gates in watch.at_events)

    # An exception between forward and backward, as an interrupt from the keyboard would be.
    backward = trainer.accelerator.backward
    trainer.accelerator.backward = lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.accelerator.backward = backward
    assert trainer.loop_state.gates is None


@pytest.mark.parametrize("fields", [{"p": 0.999999, "rule": "unscaled"}, {"p": [0.999999] * 4}])
def test_micro_batches_without_any_active_loop_train_on(train, fields):
    trainer = train(**fields)
    assert trainer.state.global_step == 4
    assert all(not tensor.any() for name, tensor in weights(trainer).items() if "lora_B" in name)
    assert all(log["gate_mean"] == 0 for log in trainer.state.log_history if "loss" in log)


def test_gate_statistics_and_speed_are_logged_with_the_loss(train):
    trainer = train(p=[0.0, 0.5, 0.5, 0.9], max_steps=3)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 3
    for log in logs:
        assert log["tokens_per_second"] > 0
        assert log["active_loop_1"] == 1
        assert 0 <= log["active_loop_4"] <= 1
        active = torch.tensor([log[f"active_loop_{loop}"] for loop in range(1, 5)])
        assert log["gate_mean"] == pytest.approx(float((active / torch.tensor([1, 0.5, 0.5, 0.1])).mean()), abs=1e-3)


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": "two and two"}] * 4,
        [{"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]}] * 4,
        [{"prompt": [{"role": "user", "content": "2"}], "completion": [{"role": "assistant", "content": "4"}]}] * 4,
    ],
)
def test_dataset_formats_are_trls(train, tokenizer, rows):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert train(train_dataset=Dataset.from_list(rows), max_steps=1).state.global_step == 1


def test_a_peft_model_with_an_adapter_of_its_own_is_trained_as_it_is(train):
    torch.manual_seed(3)
    peft_model = get_peft_model(tiny_ouro(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer = train(model=peft_model)
    assert all("q_proj" in name for name in weights(trainer))
    assert any(tensor.any() for name, tensor in weights(trainer).items() if "lora_B" in name)


def test_a_model_is_loaded_by_name_at_the_depth_asked_for(train, tmp_path, tokenizer):
    tiny_ouro().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    trainer = train(model=str(tmp_path / "base"), model_init_kwargs={"num_loops": 2}, p=[0.1, 0.2])
    assert trainer.num_loops == 2
    assert trainer.model.get_base_model().config.num_loops == 2


def llama(folder):
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"p": [0.1, 0.2]}, ValueError, "`p` has 2 values, but the model runs 4 loops"),
        ({"model_init_kwargs": {"num_loops": 0}}, ValueError, "integer from 1 to 1,024; got 0"),
        ({"packing": True, "packing_strategy": "wrapped"}, ValueError, "packing_strategy"),
        ({"peft": LoraConfig(use_dora=True, target_modules=["q_proj"])}, ValueError, "use_dora"),
        ({"model": "llama"}, NotLoopedError, "`llama` model, which is not looped"),
    ],
)
def test_mistakes_are_found_before_any_weight_is_loaded(
    config, dataset, tmp_path, monkeypatch, fields, error, message
):
    tiny_ouro().save_pretrained(tmp_path / "base")
    fields = dict(fields)
    name = llama(tmp_path / "llama") if fields.pop("model", None) else str(tmp_path / "base")
    peft_config = fields.pop("peft", None)

    def load(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(error, match=message) as caught:
        LoopDropoutSFTTrainer(name, config(**fields), train_dataset=dataset, peft_config=peft_config)
    assert "\n" not in str(caught.value)
