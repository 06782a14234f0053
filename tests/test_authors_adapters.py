"""Adapters of the paper authors' program: golden ones that it wrote, read wherever an adapter is, and ours written as it does.

`golden/authors`: a tiny Ouro, an adapter, and the logits (float32, all gates one) at some columns of two rows, from that
program with the hub's modeling code.
"""

import json
import shutil

import pytest
import torch
from conftest import GOLDEN, load_script, tiny_ouro, with_adapter
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from loopdropout_trainer import load_adapter
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.record.measurement import read_measurements
from loopdropout_trainer.saving.adapter_files import adapter_metadata, export_adapter
from loopdropout_trainer.recipe import TINY_OURO_PATH


AUTHORS = GOLDEN / "authors"
ADAPTER = AUTHORS / "adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def base():
    return AutoModelForCausalLM.from_pretrained(AUTHORS / "model")


def assert_golden_logits(model):
    golden = load_file(AUTHORS / "logits.safetensors")
    with torch.no_grad():
        logits = model.eval()(golden["input_ids"], golden["attention_mask"]).logits
    torch.testing.assert_close(logits[:, golden["columns"]], golden["logits"], atol=1e-5, rtol=0)


def assert_is_golden(folder):
    assert (folder / CONFIG).read_text() == (ADAPTER / CONFIG).read_text()
    tensors, golden = load_file(folder / WEIGHTS), load_file(ADAPTER / WEIGHTS)
    assert tensors.keys() == golden.keys() and all(torch.equal(tensors[name], golden[name]) for name in golden)


@pytest.fixture
def folder(tmp_path):
    """The golden model with a tokenizer."""
    shutil.copytree(AUTHORS / "model", tmp_path / "model")
    AutoTokenizer.from_pretrained(TINY_OURO_PATH).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_an_adapter_gives_the_logits_of_the_authors_program(log):
    model = load_adapter(base(), ADAPTER)
    assert_golden_logits(model)
    with pytest.raises(AssertionError), model.disable_adapter():
        assert_golden_logits(model)
    assert "was trained on ByteDance/Ouro-1.4B; it is put on" in log.text
    assert adapter_metadata(ADAPTER) == {"rule": "loop_dropout", "p": 0.5, "num_loops": 4}
    load_adapter(AutoModelForCausalLM.from_pretrained(AUTHORS / "model", num_loops=6), ADAPTER)
    assert "was trained at depth 4; the model runs 6 loops" in log.text


def test_the_commands_take_it(folder, tmp_path, capsys):
    model = ["--model_name_or_path", str(folder), "--dtype", "float32"]
    run = lambda script, *words: load_script(f"recipes/{script}.py").main([*model, *map(str, words)])
    run("merge", "--adapter", ADAPTER, "--merged_dir", tmp_path / "merged")
    assert_golden_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    card = (tmp_path / "merged" / "README.md").read_text()
    for stated in ("base_model: ByteDance/Ouro-1.4B", "Loop Dropout |", "probability p | 0.5 |", "alpha | 4 / 8 |"):
        assert stated in card

    limits = ["--benchmarks", "arithmetic_test", "--benchmark_limit", 2, "--max_new_tokens", 4]
    run("evaluate", "--adapter", ADAPTER, *limits, "--output_dir", tmp_path / "evaluation")
    rows, identities, _ = read_measurements(tmp_path / "evaluation")
    trained = identities[rows[0].run]
    assert (trained["settings"]["p"], trained["adapter"]["r"]) == (0.5, 4) and rows[0].total == 2

    rows = ["--preparation", "arithmetic", "--num_eval_examples", 2, "--num_train_examples", 2]
    run("diagnose", "--adapters", f"theirs={ADAPTER}", *rows, "--output_dir", tmp_path / "diagnosis")
    assert "theirs" in capsys.readouterr().out


def test_it_is_a_start_of_training_and_what_was_trained_goes_back(train, tmp_path, log):
    start = load_adapter(base(), ADAPTER, is_trainable=True)
    train(start, p=0.25, max_steps=1, learning_rate=0.0).save_model()
    theirs = export_adapter(tmp_path / "run", tmp_path / "theirs")
    fields = json.loads((theirs / CONFIG).read_text())
    assert fields.pop("dropout") == 0.25
    assert fields.items() <= json.loads((ADAPTER / CONFIG).read_text()).items()
    assert_golden_logits(load_adapter(base(), theirs))  # a rate of 0 left its weights alone


def test_the_command_writes_an_adapter_as_the_authors_program_does(tmp_path, capsys):
    export = load_script("recipes/export.py").main
    export(["--adapter", str(ADAPTER), "--export_dir", str(tmp_path / "again")])
    assert str(tmp_path / "again") in capsys.readouterr().out
    assert_is_golden(tmp_path / "again")

    ours = tmp_path / "ours"
    load_adapter(base(), ADAPTER).save_pretrained(ours)
    facts = {"rule": "loop_dropout", "p": 0.5, "num_loops": 4}
    (ours / "loop_dropout.json").write_text(json.dumps(facts))
    assert isinstance(PeftModel.from_pretrained(base(), ours), PeftModel)
    assert_is_golden(export_adapter(ours, tmp_path / "again"))
    with pytest.raises(UserError, match="holds an adapter in PEFT's format: choose another folder"):
        export_adapter(ADAPTER, ours)


FACTS = {"rule": "loop_dropout", "p": 0.5, "num_loops": 4}
REFUSED = [  # fields of LoraConfig, facts of training; what the sentence says
    ({"use_rslora": True}, FACTS, r"`use_rslora` gives this one alpha / sqrt\(r\)"),
    ({"rank_pattern": {"q_proj": 2}}, FACTS, "one rank and one alpha for all layers"),
    ({"alpha_pattern": {"q_proj": 2}}, FACTS, "one rank and one alpha for all layers"),
    (
        {"target_modules": ["q_proj", "v_proj"]},
        FACTS,
        "it has the 7 projections of every layer, and this one is on others",
    ),
    ({"revision": "v2"}, FACTS, "revision 574fa66cb8bf5abdc979642d01cf2b79b16bfab1 .* trained on v2"),
    ({"base_model_name_or_path": "ByteDance/Ouro-2.6B"}, FACTS, "for ByteDance/Ouro-1.4B, and .* ByteDance/Ouro-2.6B"),
    ({"base_model_name_or_path": str(GOLDEN)}, FACTS, "it is for ByteDance/Ouro-1.4B, and this one was trained on /"),
    ({}, None, "how this one was trained was not saved with it"),
    ({}, {**FACTS, "num_loops": 8}, "it is for 4 loops, and this one was trained with 8"),
    ({}, {**FACTS, "rule": "coto"}, "trained by the rule coto"),
    ({}, {**FACTS, "p": [0.1, 0.2, 0.3, 0.4]}, "it names one p of Loop Dropout"),
]


@pytest.mark.parametrize(("lora", "facts", "says"), REFUSED)
def test_what_the_format_cannot_hold_is_refused(tmp_path, lora, facts, says):
    model = with_adapter(tiny_ouro(), **lora)
    saved = {"base_model_name_or_path": "ByteDance/Ouro-1.4B", **lora}
    for name in ("base_model_name_or_path", "revision"):
        setattr(model.peft_config["default"], name, saved.get(name))
    model.save_pretrained(tmp_path / "ours")
    if facts is not None:
        (tmp_path / "ours" / "loop_dropout.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=f"The authors' format cannot hold this adapter: .*{says}"):
        export_adapter(tmp_path / "ours", tmp_path / "theirs")
    assert not any((tmp_path / "theirs").iterdir())


def test_factors_for_each_loop_are_refused(train, tmp_path):
    train(tiny_ouro(), rule="independent", p=None, max_steps=1).save_model()
    change = json.loads((tmp_path / "run" / CONFIG).read_text()) | {"base_model_name_or_path": "ByteDance/Ouro-1.4B"}
    (tmp_path / "run" / CONFIG).write_text(json.dumps(change))
    with pytest.raises(UserError, match="this one has factors or gates for each loop"):
        export_adapter(tmp_path / "run", tmp_path / "theirs")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": "4"}, "adapter_config.json cannot be read: .*rank"),
        ({"alpha": None}, "adapter_config.json cannot be read: .*alpha"),
        ({"rank": 0}, "`rank` is 0"),
        ({"rank": 5}, "cannot be put on this model"),
    ],
)
def test_a_damaged_one_is_refused(tmp_path, change, says):
    damaged = tmp_path / "adapter"
    shutil.copytree(ADAPTER, damaged)
    fields = {**json.loads((ADAPTER / CONFIG).read_text()), **change}
    (damaged / CONFIG).write_text(json.dumps(fields))
    with pytest.raises(UserError, match=says):
        load_adapter(base(), damaged)
    (damaged / CONFIG).write_text((ADAPTER / CONFIG).read_text())
    (damaged / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(UserError, match=rf"{damaged / WEIGHTS} cannot be read"):
        load_adapter(base(), damaged)
