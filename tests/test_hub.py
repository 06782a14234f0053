"""Merging at unit gates, model cards, adapters of other bases, and pushes that lose nothing."""

import json
import runpy
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import (
    ENVIRONMENT,
    ROOT,
    SAMPLES,
    contents,
    load_script,
    python,
    randomise,
    tiny_huginn,
    tiny_nanbeige,
    tiny_ouro,
    with_adapter,
)
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from loopdropout_trainer import load_adapter, merge_and_save, push_merged_to_hub, use_gates
from loopdropout_trainer.lora import add_gates
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving.adapter_files import base_sha256
from loopdropout_trainer.saving.cards import CardScore, ModelCardFields
from loopdropout_trainer.saving.hub import PushError, merged_state_dict


IDS = torch.arange(2, 42).view(4, 10)
TOKEN = "hf_averysecrettokenaverysecrettoken12"
load = AutoModelForCausalLM.from_pretrained


def adapted(model=None, base=None, **trained_with):
    """A model with an adapter on it that was trained on `base`."""
    model = with_adapter(model).eval()
    model.peft_config["default"].base_model_name_or_path = base
    find_looped_model(model).trained_with = trained_with
    return model


def card_of(folder):
    return Path(folder, "README.md").read_text()


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def tensors_of(file):
    with safe_open(file, "pt") as weights:
        return set(weights.keys())


@pytest.fixture
def base(tmp_path):
    """A folder with a tiny Ouro and a card that names its license."""
    tiny_ouro().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    return tmp_path / "base"


@pytest.fixture
def train(train):
    """`train(model, **fields)`: one step, after which trainer and adapter are saved; a trainer."""

    def make(model, **fields):
        trainer = train(model, **{"max_steps": 1, "save_strategy": "steps", "save_steps": 1, **fields})
        trainer.save_model()
        return trainer

    return make


@pytest.fixture
def trained(base, train):
    """The folder of an adapter that the trainer saved, on the base in a folder."""
    return Path(train(str(base)).args.output_dir)


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}])
@pytest.mark.parametrize("gated", [False, True])
def test_merged_logits_are_those_of_unit_gates_and_the_model_stays_unmerged(tmp_path, lora, gated):
    model = with_adapter(None, **lora).eval()
    if gated:
        add_gates(model)
    before = model(IDS).logits
    with use_gates(model, torch.full((4,), 3.0)):  # whatever gates are in force, merging is at unit gates
        merge_and_save(model, tmp_path)
    assert torch.equal(model(IDS).logits, before)
    torch.testing.assert_close(load(tmp_path)(IDS).logits, before, atol=2e-5, rtol=1e-4)
    assert not torch.equal(load(tmp_path)(IDS).logits, tiny_ouro()(IDS).logits)


def test_bfloat16_weights_are_rounded_once(tmp_path):
    model = adapted(tiny_ouro().to(torch.bfloat16))
    name = "model.layers.0.self_attn.q_proj"
    before = tiny_ouro().get_submodule(name).weight.bfloat16().float()
    merge_and_save(model, tmp_path)
    merged = load(tmp_path, dtype="auto")
    assert merged.dtype == torch.bfloat16
    exact = before + model.get_base_model().get_submodule(name).get_delta_weight("default").float()
    assert torch.equal(merged.get_submodule(name).weight, exact.bfloat16())


# What other programs read of an Ouro checkpoint. vLLM: `model_executor/models/ouro.py` of 0.25.0 (0.27 has none), read in
# November 2026; it stacks q/k/v and gate/up by these names, and its attention takes one cache for each (loop, layer).
VLLM_OURO_FIELDS = {
    "total_ut_steps", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "hidden_act", "rms_norm_eps", "vocab_size", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "torch_dtype",
}  # fmt: skip
MODULES = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
OUTSIDE = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
OUTSIDE |= {f"model.early_exit_gate.{name}" for name in ("weight", "bias")}


def test_a_merged_ouro_has_the_tensors_and_fields_that_vllm_reads(tmp_path, tokenizer):
    facts = ModelCardFields(recipe="p: 0.5\n", data="GSM8K")
    facts.results = {"gsm8k": CardScore(61.5, 1319, 40.25), "mine": CardScore(0.5)}
    model = adapted(base="ByteDance/Ouro-1.4B", rule="loop_dropout", p=0.5)
    folder = merge_and_save(model, tmp_path / "merged", tokenizer, facts, repo_id="someone/ouro-gsm8k")
    layers = [f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in (*MODULES, *NORMS)]
    assert tensors_of(folder / "model.safetensors") == {*OUTSIDE, *layers} == set(tiny_ouro().state_dict())
    config = config_of(folder)
    assert set(config) >= VLLM_OURO_FIELDS and "rope_parameters" not in config  # vllm-rlt stops at that
    assert (config["architectures"], config["total_ut_steps"]) == (["OuroForCausalLM"], 4)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert not [name for name in names if "adapter" in name or name.endswith((".bin", ".pt", ".py"))]
    table = "Training rule | Loop Dropout;Drop probability p | 0.5;LoRA rank / alpha | 16 / 32;Recurrence depth K | 4;"
    table += "Training data | GSM8K;Benchmark | Score | n | Base model;gsm8k | 61.5 | 1319 | 40.25;mine | 0.5 |  | "
    rows = [f"| {row} |" for row in table.split(";")]
    for stated in (
        *rows,
        "base_model: ByteDance/Ouro-1.4B",
        "    p: 0.5",
        '("someone/ouro-gsm8k"',
        "arXiv 2609.34218",
    ):
        assert stated in card_of(folder)


def test_an_adapter_has_the_names_by_which_vllm_serves_it_unmerged(tmp_path):
    model = adapted()
    add_gates(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
    modules = [f"base_model.model.model.layers.{layer}.{module}" for layer in range(2) for module in MODULES]
    factors = {f"{module}.lora_{factor}.weight" for module in modules for factor in "AB"}
    assert tensors_of(tmp_path / "adapter_model.safetensors") == factors


def blocks_of(folder, language="python"):
    """The blocks of code in a card."""
    return [part.split("\n```")[0] for part in card_of(folder).split(f"```{language}\n")[1:]]


def run_in(folder, code):
    """Lines that run a card's code in its folder, and print the sum of the model's logits."""
    logits = "model(torch.arange(2, 42).view(4, 10)).logits"
    return f"import os, torch\nos.chdir({str(folder)!r})\n{code}\nprint({logits}.double().sum().item())\n"


def test_the_code_of_cards_runs_in_a_fresh_process(tmp_path, base, trained, tokenizer):
    model = load_adapter(load(base), trained).eval()
    merged = merge_and_save(model, tmp_path / "merged", tokenizer)
    bare = merge_and_save(model, tmp_path / "bare")
    (adapter,) = blocks_of(trained)
    printed = python(
        "-c", "".join(run_in(*each) for each in [(merged, *blocks_of(merged)), (trained, adapter)]), fresh=True
    )
    want = pytest.approx(model(IDS).logits.double().sum().item(), abs=1e-2)
    assert [float(line) for line in printed.split()] == [want, want]
    assert config_of(trained / "merged") == config_of(merged)  # the adapter's card merges
    assert "AutoTokenizer" in card_of(merged) and "AutoTokenizer" not in card_of(bare)
    for card in map(card_of, (merged, trained)):  # a local base is named without its path
        assert "license: apache-2.0" in card and "| Base model | base |" in card and "\nbase_model:" not in card
        assert str(base) not in card
    (tmp_path / "new").touch()  # safetensors writes files that only their owner may read
    files = [path for folder in (trained, merged) for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / "new").stat().st_mode}


def test_an_adapter_is_merged_whatever_became_of_what_was_measured_of_it(tmp_path, base, trained, tokenizer, log):
    tokenizer.save_pretrained(base)
    folder = shutil.copytree(trained, tmp_path / "adapter")
    (folder / "identities.json").write_text("5")
    words = ["--model_name_or_path", str(base), "--adapter", str(folder), "--dtype", "float32"]
    load_script("recipes/merge.py").main(words)
    assert (folder / "merged" / "model.safetensors").is_file()
    assert "The card states no accuracies:" in log.text and "identities.json cannot be read as JSON" in log.text


def test_a_merge_never_overwrites_other_weights(tmp_path, base, trained, monkeypatch):
    model = load_adapter(load(base), trained)
    merged = merge_and_save(model, tmp_path / "merged")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pytorch_model.bin").write_bytes(b"weights")
    (tmp_path / "link").symlink_to(base)
    on_merged = adapted(load(merged))  # a model that was merged is a base like any other
    targets = [(model, target) for target in (base, trained, tmp_path / "other", tmp_path / "link")]
    for each, target in [*targets, (on_merged, merged), (adapted(), merged)]:
        before = contents(target)
        with pytest.raises(ValueError, match=r"holds other weights \(.*choose another folder"):
            merge_and_save(each, target)
        assert contents(target) == before
    script = ["merge.py", "--model_name_or_path", str(base), "--adapter", str(trained), "--merged_dir", str(base)]
    monkeypatch.setattr(sys, "argv", [*script, "--dtype", "float32"])
    before = contents(base)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "recipes/merge.py"), run_name="__main__")
    assert contents(base) == before

    base.rename(tmp_path / "renamed")  # the same base: merging again replaces what was merged before
    again = randomise(load_adapter(load(tmp_path / "renamed"), trained))
    before = contents(merged)
    assert merge_and_save(again, merged) == merged and contents(merged) != before


def test_an_adapter_of_another_base_is_refused_and_a_moved_base_is_not(tmp_path, base, trained, caplog):
    saved = json.loads((trained / "loop_dropout.json").read_text())
    assert saved["base_sha256"] == base_sha256(load(base)) is not None
    assert base_sha256(tiny_ouro()) is None
    tiny_ouro().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert base_sha256(load(tmp_path / "sharded")) not in (None, saved["base_sha256"])
    shutil.copytree(base, tmp_path / "copy")
    (tmp_path / "copy" / "consolidated.safetensors").write_bytes(b"what transformers does not load")
    assert isinstance(load_adapter(load(tmp_path / "copy"), trained), PeftModel)
    assert "it is put on" not in caplog.text

    other = tiny_ouro()
    other.model.layers[0].mlp.up_proj.weight.data[7, 5] += 1e-4  # one number
    other.save_pretrained(tmp_path / "other")
    shutil.rmtree(base)
    shutil.copytree(tmp_path / "other", base)
    for changed in (base, tmp_path / "other"):
        with pytest.raises(ValueError, match="was trained on .*base.*another_base=True"):
            load_adapter(load(changed), trained)
        assert isinstance(load_adapter(load(changed), trained, another_base=True), PeftModel)

    (trained / "loop_dropout.json").unlink()  # PEFT's own adapters: only names are left to go by
    lora = json.loads((trained / "adapter_config.json").read_text())
    cases = [("x/y", "x/y", ""), ("x/y", "x/z", "refused"), ("x/y", "/no/folder", "warned"), ("a", "b", "warned")]
    for on, base_name, outcome in [*cases, ("x/y", "", ""), (None, "x/z", "")]:
        (trained / "adapter_config.json").write_text(json.dumps({**lora, "base_model_name_or_path": on}))
        model = tiny_ouro()
        model.config.name_or_path = base_name
        caplog.clear()
        expected = pytest.raises(ValueError, match="was trained on x/y, not on x/z")
        with expected if outcome == "refused" else nullcontext():
            load_adapter(model, trained)
        assert ("it is put on" in caplog.text) == (outcome == "warned")


def test_a_push_uploads_the_merged_folder_and_a_refused_one_says_why_without_the_token(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="merge_and_save"):
        push_merged_to_hub(tmp_path, "someone/model")
    folder, calls = merge_and_save(adapted(), tmp_path / "merged"), []
    with pytest.raises(PushError, match="The merged model is safe"):  # tests run with HF_HUB_OFFLINE=1
        push_merged_to_hub(folder, "someone/model")

    def answer(name, **found):
        say = lambda self, *given, **fields: calls.append((given, fields)) or SimpleNamespace(**found)
        monkeypatch.setattr(HfApi, name, say)

    answer("create_repo", repo_id="someone/model")
    answer("upload_folder", repo_url="hub/someone/model")
    answer("upload_file")
    card = folder / "README.md"
    card.write_text(card_of(folder).replace("## Loading", "Mine, too.\n\n## Loading"))
    before = card_of(folder)
    assert push_merged_to_hub(folder, "someone/model", private=True) == "hub/someone/model"
    created, (_, uploaded), (_, rewritten) = calls
    assert created == (("someone/model",), {"private": True, "exist_ok": True})
    assert (
        (uploaded["repo_id"], uploaded["folder_path"]) == (rewritten["repo_id"], folder) == ("someone/model", folder)
    )
    assert uploaded["ignore_patterns"] == rewritten["path_in_repo"] == "README.md"
    on_hub = rewritten["path_or_fileobj"].decode()
    assert "# someone/model\n" in on_hub and '_pretrained("someone/model", ' in on_hub and "Mine, too." in on_hub
    assert '"."' in before and '"."' not in on_hub and card_of(folder) == before
    nothing = SimpleNamespace(headers={}, request=None)
    refusal = HfHubHTTPError(f"403 Forbidden for {TOKEN}\nsome more lines", response=nothing)
    monkeypatch.setattr(HfApi, "upload_folder", Mock(side_effect=refusal))
    with pytest.raises(PushError, match="403 Forbidden") as error:
        push_merged_to_hub(folder, "someone/model", token=TOKEN)
    said = str(error.value)
    assert TOKEN not in said and "\n" not in said and str(folder) in said
    load(folder)


HUB_CODE = SAMPLES / "modeling_plain_ouro.py"
CLASSES = {"AutoConfig": "PlainOuroConfig", "AutoModelForCausalLM": "PlainOuroForCausalLM"}
AUTO_MAP = {key: f"{HUB_CODE.stem}.{name}" for key, name in CLASSES.items()}


def test_the_auto_map_finds_the_code_of_the_base_and_the_model_in_hand_keeps_its_own(tmp_path, log):
    model = adapted()
    config = model.get_base_model().config
    config.auto_map = dict(AUTO_MAP)

    def merge(name, base):
        model.peft_config["default"].base_model_name_or_path = base
        return merge_and_save(model, tmp_path / name)

    on_hub = merge("on_hub", "ByteDance/Ouro-1.4B")
    found = {key: f"ByteDance/Ouro-1.4B--{value}" for key, value in AUTO_MAP.items()}
    assert config_of(on_hub)["auto_map"] == found and config.auto_map == AUTO_MAP
    assert "trust_remote_code=True" in card_of(on_hub) and "does not load it" not in card_of(on_hub)
    assert "beside the base" not in log.text
    for base in (None, "no-such-folder"):
        log.clear()
        folder = merge(f"of {base}", base)
        assert "auto_map" not in config_of(folder)
        assert "trust_remote_code" not in card_of(folder) and "transformers alone does not load it" in card_of(folder)
        assert (
            "names modeling_plain_ouro.PlainOuroConfig for AutoConfig, whose file is not beside the base" in log.text
        )
    config.auto_map = found  # a model that was merged from a merged one still finds the first one's code
    assert config_of(merge("again", "someone/merged"))["auto_map"] == found


def test_a_model_merged_from_a_folder_with_code_loads_without_this_package(tmp_path):
    (tmp_path / "base").mkdir()
    shutil.copy(HUB_CODE, tmp_path / "base")
    model = adapted(base=str(tmp_path / "base"))
    model.get_base_model().config.auto_map = dict(AUTO_MAP)
    folder = merge_and_save(model, tmp_path / "merged")
    code = f"""{run_in(folder, blocks_of(folder)[1])}
import sys
assert type(model).__name__ == "PlainOuroForCausalLM" and "loopdropout_trainer" not in sys.modules
torch.save(model.eval()(torch.arange(2, 42).view(4, 10)).logits, {str(tmp_path / "logits.pt")!r})
"""
    python("-c", code, env={**ENVIRONMENT, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}, fresh=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(IDS).logits, atol=2e-5, rtol=1e-4)


VLLM, MLX = "vllm serve . --trust-remote-code", "mlx_lm.generate --model . "
SERVED = [  # family, with the base's code, with a tokenizer; what the card's lines begin with
    (tiny_ouro, True, True, [VLLM]),
    (tiny_ouro, True, False, []),
    (tiny_ouro, False, True, []),
    (tiny_nanbeige, False, True, [MLX, "python llama.cpp/convert_hf_to_gguf.py . --outfile"]),
    (tiny_nanbeige, False, False, []),
    (tiny_huginn, True, True, []),
]


@pytest.mark.parametrize(("make", "with_code", "with_tokenizer", "lines"), SERVED)
def test_a_card_has_a_line_for_another_program_only_where_it_runs(
    tmp_path, tokenizer, make, with_code, with_tokenizer, lines
):
    model = adapted(make())
    if with_code:
        model.get_base_model().config.auto_map = {key: f"x/y--{name}" for key, name in AUTO_MAP.items()}
    folder = merge_and_save(model, tmp_path / "merged", tokenizer if with_tokenizer else None)
    found = blocks_of(folder, "bash")
    assert len(found) == len(lines) and all(map(str.startswith, found, lines))
    assert ("does not load it" in card_of(folder)) == (not with_code)


def test_the_card_of_an_adapter_that_cannot_be_merged_or_has_no_named_base_says_so(tmp_path, train):
    train(tiny_ouro(), rule="independent", p=None)
    card = card_of(tmp_path / "run")
    assert "parameters of its own for each loop" in card and "merge_and_save" not in card
    assert "Load the base model with transformers" in card and "```" not in card


def test_cards_say_base_rule_p_depths_and_loss(tmp_path, train, tokenizer, caplog):
    base = tiny_ouro()
    base.config.name_or_path = base.name_or_path = "ByteDance/Ouro-1.4B"
    trainer = train(base, p=0.25)
    merge_and_save(trainer.model, tmp_path / "merged", tokenizer)
    later = merge_and_save(load_adapter(tiny_ouro(), tmp_path / "run"), tmp_path / "merged_later", tokenizer)
    assert "| Drop probability p | 0.25 |" in card_of(later)
    for folder in ("run", "run/checkpoint-1", "merged"):
        card = card_of(tmp_path / folder)
        for stated in ("base_model: ByteDance/Ouro-1.4B", "Training rule | Loop Dropout |", "probability p | 0.25 |"):
            assert stated in card
        assert "None" not in card and "Trained at depths" not in card and "Loops in the loss" not in card

    depths = {"depth_sampling": "uniform", "depth_sampling_args": {"low": 2, "high": 6}, "loop_loss": "uniform"}
    folder = tmp_path / "deep"
    train(tiny_ouro(), output_dir=str(folder), save_strategy="no", **depths)
    for depth, is_warned in ((4, False), (6, False), (8, True)):
        caplog.clear()
        reloaded = load_adapter(tiny_ouro(num_loops=depth), folder)
        assert ("was trained at depths 2 to 6; the model runs 8 loops" in caplog.text) == is_warned
        card = card_of(merge_and_save(reloaded, tmp_path / "merged_deep"))
        assert "| Trained at depths | 2 to 6 |" in card and "| Loops in the loss | uniform |" in card
    metadata = json.loads((folder / "loop_dropout.json").read_text())
    for name, wrong in (
        ("num_loops", "4"),
        ("depths", 4),
        ("depths", [2]),
        ("depths", ["2", "6"]),
        ("eos_token_id", "0"),
    ):
        (folder / "loop_dropout.json").write_text(json.dumps({**metadata, name: wrong}))
        with pytest.raises(ValueError, match="loop_dropout.json is not what was saved with the adapter"):
            load_adapter(tiny_ouro(), folder)


def test_nothing_that_a_card_quotes_breaks_out_of_its_place(tmp_path):
    recipe = "a: 1\n```\n<script>alert(1)</script>\n\n# Not a heading"
    facts = ModelCardFields(data="[a](javascript:b)|c", recipe=recipe)
    facts.results = {"<b>acc</b>": CardScore("`1`", "<i>")}
    name = 'x/y"); import os  # ```'
    model = adapted(base="x/y", rule="<img src=x onerror=alert(2)>")
    folder = merge_and_save(model, tmp_path / "merged", facts=facts, repo_id=name)
    before, _, block = card_of(folder).partition("## Recipe\n")
    assert block.strip("\n") == recipe.replace("\n", "\n    ").replace("    \n", "\n").join(("    ", ""))
    for harmful in ("<script", "<img", "<b>", "[a](javascript", 'y"); import os'):
        assert harmful not in before.partition("## Loading")[0].partition("# x/y")[2]
    assert name not in "".join(blocks_of(folder))  # which is no name on the Hub


def test_a_card_has_no_local_paths(tmp_path):
    recipe = (
        "model_name_or_path: /home/me/models/Ouro-1.4B\ndata: ~/rows/a.jsonl\nurl: https://a.b/c/d\nname: user/model\n"
    )
    facts = ModelCardFields(data="/home/me/rows.jsonl", recipe=recipe)
    card = card_of(merge_and_save(adapted(base="/home/me/models/Ouro-1.4B"), tmp_path / "merged", facts=facts))
    assert "/home" not in card and "~" not in card and str(tmp_path) not in card
    for kept in (
        "name_or_path: Ouro-1.4B",
        "data: a.jsonl",
        "url: https://a.b/c/d",
        "name: user/model",
        "| rows.jsonl |",
    ):
        assert kept in card


def test_merged_weights_need_no_memory_of_their_own(tmp_path):
    model = adapted()
    merged, files = merged_state_dict(model, tmp_path), {file.name for file in tmp_path.iterdir()}
    assert files == set(find_looped_model(model).recurrent_linears())
    for name in files:
        tensor = merged[f"{name}.weight"]
        assert (tmp_path / name).read_bytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert torch.equal(tensor, merged_state_dict(model)[f"{name}.weight"])
