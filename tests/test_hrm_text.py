"""HRM-Text as the package describes it: its prompts attend in both directions, in training as in generation."""

import pytest
import torch
from conftest import tiny_hrm, with_adapter
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, HrmTextForCausalLM

from loopdropout_trainer import LoopDropoutDPOConfig, LoopDropoutDPOTrainer
from loopdropout_trainer.evaluation import generate_greedy
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.models.looped_modeling import WrongWeightsError


def sharp_hrm(**config):
    """One whose attention is far from even, so that it matters who sees whom."""
    model = tiny_hrm(**config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name:
                parameter.mul_(20)
    return model


def test_it_is_described_by_itself_and_its_checkpoints_are_checked(tmp_path):
    model = tiny_hrm()
    assert find_looped_model(model) is model and model.config.num_loops == 3
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.H_module.extra.weight"] = weights.pop(next(name for name in weights if "H_module" in name))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WrongWeightsError, match="it lacks `model.H_module.*it holds `model.H_module.extra.weight`"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_training_batches_mark_the_prompt_and_score_as_transformers_does(make_sft):
    model = sharp_hrm()
    reference = HrmTextForCausalLM(model.config).eval()  # no description, no adapter
    reference.load_state_dict(model.state_dict())
    trainer = make_sft(model)
    collated = trainer.data_collator([trainer.train_dataset[i] for i in (0, 5, 20)])
    batch = model.complete_batch(collated)
    for labels, kinds in zip(batch["labels"], batch["token_type_ids"], strict=True):
        first = int((labels != -100).nonzero()[0])
        assert first > 1 and kinds.tolist() == [1] * first + [0] * (len(labels) - first)
    with torch.no_grad():
        want = reference(**batch).loss
        causal = reference(**{**batch, "token_type_ids": None}).loss
        got = trainer.compute_loss(trainer.model.eval(), trainer._prepare_inputs(collated))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert abs(causal - want) > 1e-4
    trainer.train()


def test_preferences_are_scored_behind_the_prefix_mask(config, tokenizer):
    pairs = [{"prompt": f"{i}+{i % 7}=", "chosen": "a" * (i % 4 + 1), "rejected": "b" * (i % 3 + 2)} for i in range(8)]
    data = {"train_dataset": Dataset.from_list(pairs), "processing_class": tokenizer}
    trainer = LoopDropoutDPOTrainer(sharp_hrm(), args=config(LoopDropoutDPOConfig, max_steps=1), **data)
    collated = trainer.data_collator([trainer.train_dataset[i] for i in (0, 3, 5)])
    batch = trainer.looped.complete_batch(collated)
    answer, mask = batch["completion_mask"].bool(), batch["attention_mask"].bool()
    assert torch.equal(batch["token_type_ids"].bool(), mask & ~answer)  # answers end each row
    scored = {}
    for name, kinds in (("prefix", batch["token_type_ids"]), ("causal", None)):
        with torch.no_grad():
            logits = sharp_hrm().eval()(batch["input_ids"], attention_mask=mask.long(), token_type_ids=kinds).logits
        tokens = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
        scored[name] = (tokens * answer[:, 1:]).sum(dim=1)[:3].mean().item()
    trainer.model.eval()
    with torch.no_grad():
        trainer.compute_loss(trainer.model, trainer._prepare_inputs(collated))
    assert trainer._metrics["eval"]["logps/chosen"][-1] == pytest.approx(scored["prefix"], abs=1e-3)
    assert abs(scored["prefix"] - scored["causal"]) > 0.01
    trainer.train()


def test_several_examples_in_a_row_are_refused(train):
    batch = {"input_ids": torch.tensor([[3, 4]]), "labels": torch.tensor([[-100, 4]])}
    assert tiny_hrm(prefix_lm=False).complete_batch(batch) is batch  # without the prefix mask nothing is marked
    with pytest.raises(ValueError, match="set `packing` and `padding_free` to false"):
        train(tiny_hrm(), padding_free=True, max_length=None)


def test_generation_takes_its_input_for_the_prompt(tokenizer):
    model = find_looped_model(sharp_hrm().eval())
    ids = torch.tensor([[1, 1, 5, 6, 9], [2, 3, 4, 5, 8]])
    options = {"attention_mask": (ids != 1).long(), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    tokens = model.generate(ids, **options)
    assert torch.equal(tokens, model.generate(ids, use_cache=False, **options))
    rows = ids  # by hand: the prompt's columns see each other, later ones what is before them
    for _ in range(6):
        kinds, mask = torch.zeros_like(rows), torch.ones_like(rows)
        kinds[:, :5] = mask[:, :5] = ids != 1
        inputs = {"attention_mask": mask, "token_type_ids": kinds, "use_cache": False}
        logits = HrmTextForCausalLM.forward(model, rows, **inputs).logits
        rows = torch.cat([rows, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(tokens, rows)
    assert not torch.equal(tokens, model.generate(ids, token_type_ids=torch.zeros_like(ids), **options))

    prompts, one_by_one = ["1+1", "1+10", "2"], []
    for prompt in prompts:
        one_by_one += generate_greedy(model, tokenizer, [prompt], max_new_tokens=5, progress=False)
    assert generate_greedy(model, tokenizer, prompts, max_new_tokens=5, progress=False) == one_by_one

    peft_model = with_adapter(model, scale=0.1).eval()
    adapted = peft_model.generate(input_ids=ids, **options)
    assert torch.equal(adapted, peft_model.merge_and_unload().generate(ids, **options))
