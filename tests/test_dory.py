"""Dory of transformers: reference outputs, cache, losses of TRL, names of weights, adapters."""

import json

import pytest
import torch
from conftest import FOREIGN, golden_adapted, tiny_dory, trained_parameters, with_adapter
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_families import positions_of, token_logps
from test_models import assert_close, change_weights, save_published
from trl import SFTConfig, SFTTrainer

from loopdropout_trainer import (
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
from loopdropout_trainer.looped import attach_looped_model


if FOREIGN["dory"] is None:
    pytest.skip("This transformers has no Dory.", allow_module_level=True)


IDS = torch.arange(2, 14).view(2, 6)


def test_cache_of_another_depth_raises():
    model = tiny_dory().eval()
    looped = attach_looped_model(model)
    looped.num_loops = 1
    cache = model(IDS).cache
    looped.num_loops = 2
    with pytest.raises(UserError, match="`cache` must have 4 layers, got 3"):
        model(IDS[:, :1], cache=cache)


def test_cache_shared_by_the_loops_raises():
    model = tiny_dory(recurrent_kv_cache_mode="last_loop")
    with pytest.raises(UserError, match="`recurrent_kv_cache_mode` must be 'per_loop', got 'last_loop'"):
        check_loops(model, input_ids=IDS)


def test_batched_completions_equal_single_ones(tokenizer):
    model = with_adapter(tiny_dory(), scale=0.3).eval()
    prompts = ["1+1", "1+10", "2"]
    one_by_one = [generate_greedy(model, tokenizer, [prompt], 8, progress=False)[0] for prompt in prompts]
    assert generate_greedy(model, tokenizer, prompts, 8, progress=False) == one_by_one


# TRL's losses


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
    want = token_logps(tiny_dory(), ids, mask, 0.7, position_ids=positions_of(mask))[:, -3:]
    assert_close(scored, want)
    trainer.train()


# Checkpoints and adapters


def test_saved_models_have_the_published_names(golden, tmp_path):
    dory = golden("dory")
    save_published(dory, tmp_path)
    peft_model = golden_adapted(dory, load_model(tmp_path)).eval()
    merge_and_save(peft_model, tmp_path / "merged")
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    assert saved.keys() == dory.weights.keys()
    assert sum(not torch.equal(tensor, dory.weights[name]) for name, tensor in saved.items()) == 16
    fields = json.loads((tmp_path / "merged" / "config.json").read_text())
    counts = ("layer_types", "num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
    assert {name: fields[name] for name in counts} == {name: dory.meta["config"][name] for name in counts}
    assert_close(load_model(tmp_path / "merged")(IDS).logits, peft_model(IDS).logits)
    tiny_dory().save_pretrained(tmp_path / "new")  # never loaded
    names = load_file(tmp_path / "new" / "model.safetensors")
    assert {name.split(".")[0] for name in names} == {"backbone", "lm_head"}


def test_checkpoints_of_another_layout_raise(golden, tmp_path):
    save_published(golden("dory"), tmp_path, layer_types=["full_attention"] * 12)
    with pytest.raises(UserError, match='`layer_types` of .* must list "mlp" after each attention block'):
        load_model(tmp_path)
    save_published(golden("dory"), tmp_path)
    change_weights(tmp_path, **{"backbone.layers.3.mlp_alpha": None})
    with pytest.raises(UserError, match="got 1 missing weights, such as `model.layers.1.lambda_2`"):
        load_model(tmp_path)


@pytest.mark.parametrize(("targets", "number"), [(None, 16), (["q_proj", "gate_proj"], 6)])
def test_adapter_of_a_named_model_stays_in_the_block(golden, tmp_path, tokenizer, make_sft, targets, number):
    save_published(golden("dory"), tmp_path, vocab_size=96)
    tokenizer.save_pretrained(tmp_path)
    lora, kwargs = LoraConfig(target_modules=targets), {"num_loops": 4}
    trainer = make_sft(str(tmp_path), peft_config=lora, model_init_kwargs=kwargs)
    names = {name.rpartition(".lora_A")[0] for name in trained_parameters(trainer.model) if "lora_A" in name}
    assert len(names) == number and trainer.num_loops == 4 and all(name.split(".")[4] in ("2", "3") for name in names)
