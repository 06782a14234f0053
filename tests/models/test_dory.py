"""Parts of Dory of transformers: its cache, the scores of completions, and the names of its weights."""

import json

import pytest
import torch
from safetensors.torch import load_file

from helpers.errors import user_error
from helpers.golden import assert_close, change_weights, golden_adapted, save_published
from helpers.tiny import FOREIGN, tiny_dory
from loopdropout_trainer import check_loops, load_model, merge_and_save
from loopdropout_trainer.looped import attach_looped_model


if FOREIGN["dory"] is None:
    pytest.skip("This transformers has no Dory.", allow_module_level=True)


IDS = torch.arange(2, 14).view(2, 6)


def test_caches_that_do_not_fit_raise():
    model = tiny_dory().eval()
    looped = attach_looped_model(model)
    looped.num_loops = 1
    cache = model(IDS).cache
    looped.num_loops = 2
    with user_error("`cache` must have 4 layers, got 3"):
        model(IDS[:, :1], cache=cache)
    with user_error("`recurrent_kv_cache_mode` must be 'per_loop', got 'last_loop'"):
        check_loops(tiny_dory(recurrent_kv_cache_mode="last_loop"), input_ids=IDS)


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
    with user_error('`layer_types` of .* must list "mlp" after each attention block'):
        load_model(tmp_path)
    save_published(golden("dory"), tmp_path)
    change_weights(tmp_path, **{"backbone.layers.3.mlp_alpha": None})
    with user_error("got 1 missing weights, such as `model.layers.1.lambda_2`"):
        load_model(tmp_path)
