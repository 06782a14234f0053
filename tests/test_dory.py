"""Dory of transformers: reference outputs, cache, losses of TRL, names of weights, adapters."""

import json

import pytest
import torch
from conftest import (
    FOREIGN,
    example_nll,
    golden_adapted,
    golden_inputs,
    golden_model,
    tiny_dory,
    trained_parameters,
    with_adapter,
)
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_models import assert_close, change_weights, check_trainer_loss
from trl import SFTConfig, SFTTrainer

from loopdropout_trainer import (
    LoopDropoutDPOConfig,
    LoopDropoutDPOTrainer,
    LoopDropoutGRPOConfig,
    LoopDropoutGRPOTrainer,
    check_loops,
    default_peft_config,
    load_model,
    loop_dropout,
    merge_and_save,
)
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.generation import generate_greedy
from loopdropout_trainer.looped import find_looped_model


if FOREIGN["dory"] is None:
    pytest.skip("This transformers has no Dory.", allow_module_level=True)


IDS = torch.arange(2, 14).view(2, 6)


@pytest.fixture(scope="module")
def dory(golden):
    return golden("dory")


@pytest.mark.parametrize(("batch", "attention"), [("unpadded", "sdpa"), ("padded", "sdpa"), ("padded", "eager")])
@torch.no_grad()
def test_forward_matches_reference_without_positions(dory, batch, attention):
    model, inputs = golden_model(dory, attn_implementation=attention), golden_inputs(dory, batch)
    looped, valid = find_looped_model(model), inputs["attention_mask"].bool()
    check_loops(model, input_ids=inputs["input_ids"])
    ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    assert_close(torch.stack(looped.loop_readouts(**ids))[:, valid], dory.tensors[f"{batch}/loop_hidden"][:, valid])
    for looped.num_loops, prefix in ((dory.meta["deep_loops"], f"{batch}/deep"), (dory.meta["loops"], batch)):
        out = model(**inputs)
        assert_close(out.logits[valid], dory.tensors[f"{prefix}/logits"][valid])
        assert_close(out.loss, dory.tensors[f"{prefix}/loss"], atol=2e-5)


def test_cache_of_another_depth_raises():
    model = tiny_dory().eval()
    looped = find_looped_model(model)
    looped.num_loops = 1
    cache = model(IDS).cache
    for looped.num_loops in (2, 3):
        with pytest.raises(UserError, match=f"`cache` must have {looped.num_loops + 2} layers, got 3"):
            model(IDS[:, :1], cache=cache)


def test_cache_shared_by_the_loops_raises():
    model = tiny_dory(recurrent_kv_cache_mode="last_loop")
    assert model(IDS).logits.shape == (2, 6, 258)  # transformers' own
    with pytest.raises(UserError, match="`recurrent_kv_cache_mode` must be 'per_loop', got 'last_loop'"):
        check_loops(model, input_ids=IDS)


@torch.no_grad()
def test_packed_rows_are_separate_examples():
    model = tiny_dory().eval()
    find_looped_model(model)
    packed = model(IDS.view(1, 12), position_ids=torch.arange(6).repeat(2)[None]).logits
    torch.testing.assert_close(packed.view(2, 6, -1), model(IDS).logits, atol=1e-5, rtol=1e-5)


def test_batched_completions_equal_single_ones(tokenizer):
    model = with_adapter(tiny_dory(), scale=0.3).eval()
    prompts = ["1+1", "1+10", "2"]
    one_by_one = [generate_greedy(model, tokenizer, [prompt], 8, progress=False)[0] for prompt in prompts]
    assert generate_greedy(model, tokenizer, prompts, 8, progress=False) == one_by_one


# TRL's losses


@pytest.mark.parametrize("loss", ["nll", "dft", "smoothed"])
def test_trainer_has_every_loss_of_the_model(make_sft, loss):
    check_trainer_loss(tiny_dory(), loss, make_sft)


def test_trl_has_the_loss_of_a_model_with_gates(config, dataset, tokenizer):
    model = get_peft_model(tiny_dory(), default_peft_config(tiny_dory()))
    handle = loop_dropout(model)
    args = config(SFTConfig, use_cpu=True)
    trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    with torch.no_grad():
        assert_close(trainer.compute_loss(model.eval(), dict(batch)), tiny_dory().eval()(**batch).loss, atol=1e-5)
    handle.remove()
    assert type(model.get_output_embeddings()).__name__ == "DoryLMHead"


def own_logps(model, ids, mask, temperature=1.0):
    """Log-probabilities of tokens after the first, by the model's own forward."""
    with torch.no_grad():
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = FOREIGN["dory"].forward(model, ids, mask, position_ids=positions, use_cache=False).logits
    return (logits[:, :-1] / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def test_preferences_are_scored_with_the_scale(config, tokenizer):
    pairs = [{"prompt": f"{i}+{i % 7}=", "chosen": "a" * (i % 4 + 1), "rejected": "b" * (i % 3 + 2)} for i in range(8)]
    data = {"train_dataset": Dataset.from_list(pairs), "processing_class": tokenizer}
    trainer = LoopDropoutDPOTrainer(tiny_dory(), tiny_dory(), config(LoopDropoutDPOConfig, max_steps=1), **data)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in (0, 3, 5)])
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model.eval(), trainer._prepare_inputs(batch))
    assert loss.item() == pytest.approx(torch.tensor(2.0).log().item())  # the reference equals the policy
    scored = own_logps(tiny_dory().eval(), batch["input_ids"], batch["attention_mask"])
    want = (scored * batch["completion_mask"][:, 1:]).sum(dim=1)[:3].mean().item()
    assert trainer._metrics["eval"]["logps/chosen"][-1] == pytest.approx(want, abs=1e-3)
    trainer.train()


@pytest.mark.parametrize("cast", [False, True])
def test_completions_are_scored_with_the_scale(config, tokenizer, cast):
    fields = {"max_steps": 1, "num_generations": 2, "max_completion_length": 4, "temperature": 0.7}
    fields |= {"cast_lm_head_to_fp32": cast}
    rows = Dataset.from_list([{"prompt": f"{i}+{i % 7}="} for i in range(8)])
    length = lambda completions, **kwargs: [float(len(text)) for text in completions]
    args, data = config(LoopDropoutGRPOConfig, **fields), {"train_dataset": rows, "processing_class": tokenizer}
    trainer = LoopDropoutGRPOTrainer(tiny_dory(), length, args, **data)
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    mask[0, :2] = 0  # a prompt is padded on the left
    scored = trainer._get_per_token_logps_and_entropies(trainer.model.eval(), ids, mask, logits_to_keep=3)[0]
    torch.testing.assert_close(scored, own_logps(tiny_dory().eval(), ids, mask, 0.7)[:, -3:], atol=1e-4, rtol=1e-4)
    trainer.train()


# Checkpoints and adapters


def save_golden(dory, folder, **config):
    golden_model(dory).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**dory.meta["config"], **config}))


def test_saved_models_have_the_published_names(dory, tmp_path):
    save_golden(dory, tmp_path)
    published = {name[8:]: tensor for name, tensor in dory.tensors.items() if name.startswith("weights/")}
    merge_and_save(golden_adapted(dory, load_model(tmp_path)), tmp_path / "merged")
    tiny_dory().save_pretrained(tmp_path / "new")  # never loaded
    for folder in (tmp_path, tmp_path / "merged"):
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == published.keys()
        same = {name for name, tensor in saved.items() if torch.equal(tensor, published[name])}
        assert len(published) - len(same) == (16 if folder.name == "merged" else 0)
        fields = json.loads((folder / "config.json").read_text())
        counts = ("layer_types", "num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
        assert {name: fields[name] for name in counts} == {name: dory.meta["config"][name] for name in counts}
    assert all(
        name.startswith(("backbone.", "lm_head.")) for name in load_file(tmp_path / "new" / "model.safetensors")
    )
    inputs = golden_inputs(dory, "oracle/left")
    losses = example_nll(load_model(tmp_path / "merged")(**inputs).logits, inputs["labels"])
    want = dory.tensors["oracle/unit_gate/example_loss"] * dory.tensors["oracle/example_tokens"]
    assert_close(losses, want, atol=2e-4)


def test_checkpoints_of_another_layout_raise(dory, tmp_path):
    save_golden(dory, tmp_path, layer_types=["full_attention"] * 12)
    with pytest.raises(UserError, match='`layer_types` of .* must list "mlp" after each attention block'):
        load_model(tmp_path)
    save_golden(dory, tmp_path)
    change_weights(tmp_path, **{"backbone.layers.3.mlp_alpha": None})
    with pytest.raises(UserError, match="got 1 missing weights, such as `model.layers.1.lambda_2`"):
        load_model(tmp_path)


@pytest.mark.parametrize("targets", [None, "all-linear", ["q_proj", "gate_proj"]])
def test_adapter_of_a_named_model_stays_in_the_block(dory, tmp_path, tokenizer, make_sft, targets):
    save_golden(dory, tmp_path, vocab_size=96)
    tokenizer.save_pretrained(tmp_path)
    trainer = make_sft(
        str(tmp_path), peft_config=LoraConfig(target_modules=targets), model_init_kwargs={"num_loops": 4}
    )
    names = {name.rpartition(".lora_A")[0] for name in trained_parameters(trainer.model) if "lora_A" in name}
    assert len(names) == {None: 16, "all-linear": 16}.get(targets if not isinstance(targets, list) else 0, 6)
    assert trainer.num_loops == 4 and all(name.split(".")[4] in ("2", "3") for name in names)
