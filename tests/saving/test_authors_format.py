"""Adapters in the format of the paper authors' program.

`golden/authors` has a tiny Ouro, an adapter that the authors' program wrote, and the logits of that program (float32, unit
gates).
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.errors import user_error
from helpers.files import GOLDEN, TINY_OURO_PATH, load_script
from helpers.tiny import tiny_ouro, with_adapter
from loopdropout_trainer import load_adapter
from loopdropout_trainer.published_sizes import PUBLISHED
from loopdropout_trainer.saving.merging import export_authors_format
from loopdropout_trainer.saving.metadata import METADATA_FILE
from loopdropout_trainer.saving.source import find_source


AUTHORS = GOLDEN / "authors"
ADAPTER = AUTHORS / "adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
METADATA = {"rule": "loop_dropout", "p": 0.5, "num_loops": 4}


def base():
    return AutoModelForCausalLM.from_pretrained(AUTHORS / "model")


def assert_golden_logits(model):
    golden = load_file(AUTHORS / "logits.safetensors")
    with torch.no_grad():
        logits = model.eval()(golden["input_ids"], golden["attention_mask"]).logits
    torch.testing.assert_close(logits[:, golden["columns"]], golden["logits"], atol=1e-5, rtol=0)


def assert_golden_files(folder):
    assert (folder / CONFIG).read_text() == (ADAPTER / CONFIG).read_text()
    tensors, golden = load_file(folder / WEIGHTS), load_file(ADAPTER / WEIGHTS)
    assert tensors.keys() == golden.keys() and all(torch.equal(tensors[name], golden[name]) for name in golden)


def test_load_adapter_gives_logits_of_authors(tmp_path):
    model = load_adapter(base(), ADAPTER)
    assert_golden_logits(model)
    with pytest.raises(AssertionError), model.disable_adapter():
        assert_golden_logits(model)
    assert find_source(ADAPTER).metadata == METADATA
    damaged = shutil.copytree(ADAPTER, tmp_path / "adapter")
    (damaged / WEIGHTS).write_bytes(b"nothing")
    with user_error("does not fit this model"):
        load_adapter(base(), damaged)
    fields = json.loads((ADAPTER / "adapter_config.json").read_text())
    for name, value in {"rank": "4", "alpha": None, "model_id": 1}.items():
        (damaged / "adapter_config.json").write_text(json.dumps({**fields, name: value}))
        with user_error(f"`{name}` in .*adapter_config.json must be"):
            load_adapter(base(), damaged)


def test_merge_script_reads_authors_format(tmp_path):
    shutil.copytree(AUTHORS / "model", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_OURO_PATH / name, tmp_path / "model")
    words = ["--model_name_or_path", tmp_path / "model", "--adapter", ADAPTER, "--output_dir", tmp_path / "merged"]
    load_script("recipes/merge.py").main([*map(str, words)])
    assert_golden_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert "base_model: ByteDance/Ouro-1.4B" in (tmp_path / "merged" / "README.md").read_text()


def test_adapter_is_trained_further_and_exported(train, tmp_path):
    start = load_adapter(base(), ADAPTER, is_trainable=True)
    assert start.training and not start.get_base_model().training  # as `PeftModel.from_pretrained` leaves it
    train(start, p=0.25, max_steps=1, learning_rate=0.0).save_model()
    folder = export_authors_format(tmp_path / "run", tmp_path / "exported")
    fields = json.loads((folder / CONFIG).read_text())
    assert fields == {**json.loads((ADAPTER / CONFIG).read_text()), "dropout": 0.25}
    assert_golden_logits(load_adapter(base(), folder))  # the learning rate of 0 left the weights unchanged


def test_export_script_writes_files_of_authors(tmp_path, log):
    export = load_script("recipes/export.py").main
    export(["--adapter", str(ADAPTER), "--output_dir", str(tmp_path / "again")])
    assert_golden_files(tmp_path / "again")
    ours = tmp_path / "ours"
    load_adapter(base(), ADAPTER).save_pretrained(ours)
    (ours / METADATA_FILE).write_text(json.dumps(METADATA))
    base_folder, fields = tmp_path / "base", json.loads((ours / CONFIG).read_text())
    base_folder.mkdir()
    (ours / CONFIG).write_text(json.dumps({**fields, "base_model_name_or_path": str(base_folder)}))
    sizes = PUBLISHED["ByteDance/Ouro-1.4B"]
    (base_folder / "config.json").write_text(json.dumps({**sizes, "num_hidden_layers": 48}))
    with user_error(
        f"the base model {base_folder} is another one: `num_hidden_layers` in its config.json is 48, and not 24"
    ):
        export_authors_format(ours, tmp_path / "again")
    (base_folder / "config.json").write_text(json.dumps(sizes))
    assert_golden_files(export_authors_format(ours, tmp_path / "again"))
    assert f"That is right only if the folder {base_folder} holds this model." in log.text
    with user_error("`output_dir` must not hold an adapter in PEFT's format"):
        export_authors_format(ADAPTER, ours)


UNSUPPORTED = [  # fields of LoraConfig, training settings, message
    ({"use_rslora": True}, METADATA, "`use_rslora` False, got True"),
    ({"rank_pattern": {"q_proj": 2}}, METADATA, "`rank_pattern` {}, got {'q_proj': 2}"),
    ({"target_modules": ["q_proj"]}, METADATA, "the 7 projections of every layer"),
    ({"revision": "v2"}, METADATA, "`revision` '574fa66cb8bf5abdc979642d01cf2b79b16bfab1', got 'v2'"),
    ({"base_model_name_or_path": str(GOLDEN)}, METADATA, "`base_model_name_or_path` 'ByteDance/Ouro-1.4B', got '/"),
    (
        {"base_model_name_or_path": "tiny-ouro"},
        METADATA,
        "tiny_ouro is another one: `hidden_size` in its .* is 128, and not",
    ),
    ({}, {}, "`rule` 'lora', got None"),
    ({}, {**METADATA, "num_loops": 8}, "`num_loops` 4, got 8"),
    ({}, {**METADATA, "p": [0.1, 0.2, 0.3, 0.4]}, "a single `p`, got"),
]


@pytest.mark.parametrize(("lora", "metadata", "message"), UNSUPPORTED)
def test_export_raises_for_unsupported_adapter(tmp_path, lora, metadata, message):
    model = with_adapter(tiny_ouro(), **lora)
    config = model.peft_config["default"]
    config.base_model_name_or_path = lora.get("base_model_name_or_path", "ByteDance/Ouro-1.4B")
    model.save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / METADATA_FILE).write_text(json.dumps(metadata))
    with user_error(f"The authors' format requires .*{message}"):
        export_authors_format(tmp_path / "ours", tmp_path / "exported")
    assert not any((tmp_path / "exported").iterdir())


def test_export_raises_for_factors_of_each_loop(train, tmp_path):
    train(tiny_ouro(), rule="independent", p=None, max_steps=1).save_model()
    config = json.loads((tmp_path / "run" / CONFIG).read_text()) | {"base_model_name_or_path": "ByteDance/Ouro-1.4B"}
    (tmp_path / "run" / CONFIG).write_text(json.dumps(config))
    with user_error("one update for all loops"):
        export_authors_format(tmp_path / "run", tmp_path / "exported")
