"""Merging at unit gates, model cards, adapters of other bases, and pushes that lose nothing."""

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_ouro, with_adapter
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from peft import PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from loopdropout_trainer import (
    LoopDropoutSFTTrainer,
    default_peft_config,
    load_adapter,
    merge_and_save,
    push_merged_to_hub,
    use_gates,
)
from loopdropout_trainer.adapters import add_gates
from loopdropout_trainer.saving.adapter_files import base_sha256
from loopdropout_trainer.saving.cards import CardScore, ModelCardFields
from loopdropout_trainer.saving.hub import PushError


IDS = torch.arange(2, 42).view(4, 10)
TOKEN = "hf_averysecrettokenaverysecrettoken12"
ROOT = Path(__file__).resolve().parents[1]


def adapted(model=None, **lora):
    if not lora:
        return with_adapter(model).eval()
    model = get_peft_model(tiny_ouro(), default_peft_config(tiny_ouro(), **lora))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


@pytest.fixture
def base(tmp_path):
    """A folder with a tiny Ouro and a card that names its license."""
    tiny_ouro().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    return tmp_path / "base"


@pytest.fixture
def trained(base, config, dataset, tokenizer, tmp_path):
    """`trained(base)`: folder of an adapter that the trainer saved, on the base in a folder."""

    def make(folder=base, name="trained"):
        args = config(output_dir=str(tmp_path / name), max_steps=1, save_strategy="steps", save_steps=1)
        trainer = LoopDropoutSFTTrainer(str(folder), args, train_dataset=dataset, processing_class=tokenizer)
        trainer.train()
        trainer.save_model()
        return tmp_path / name

    return make


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}])
@pytest.mark.parametrize("gated", [False, True])
def test_merged_logits_are_those_of_unit_gates_and_the_model_stays_unmerged(tmp_path, lora, gated):
    model = adapted(**lora)
    if gated:
        add_gates(model)
    before = model(IDS).logits
    with use_gates(model, torch.full((4,), 3.0)):  # whatever gates are in force, merging is at unit gates
        merge_and_save(model, tmp_path)
    assert torch.equal(model(IDS).logits, before)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(merged(IDS).logits, before, atol=2e-5, rtol=1e-4)
    assert not torch.equal(merged(IDS).logits, tiny_ouro()(IDS).logits)


def test_bfloat16_weights_are_rounded_once_and_logits_stay_within_their_precision(tmp_path):
    model = adapted(tiny_ouro().to(torch.bfloat16))
    base = {name: tensor.float() for name, tensor in tiny_ouro().state_dict().items()}
    merge_and_save(model, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert merged.dtype == torch.bfloat16
    weight = merged.model.layers[0].self_attn.q_proj.weight
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    exact = (
        base["model.layers.0.self_attn.q_proj.weight"].bfloat16().float() + layer.get_delta_weight("default").float()
    )
    assert torch.equal(weight, exact.bfloat16())
    # Against the same sums in float32, the merged weights cost about as much as bfloat16 arithmetic itself does.
    adapted_logits = model(IDS).logits.float()
    reference = model.float()(IDS).logits
    error = lambda logits: ((logits - reference).norm() / reference.norm()).item()
    assert error(merged(IDS).logits.float()) < 3 * error(adapted_logits) < 0.1


def test_the_folder_is_a_checkpoint_of_the_base_with_tokenizer_and_card(tmp_path, tokenizer):
    facts = ModelCardFields("ByteDance/Ouro-1.4B", "loop_dropout", 0.5, recipe="p: 0.5\n", data="GSM8K")
    facts.results = {"gsm8k": CardScore(61.5, 1319, 40.25), "mine": CardScore(0.5)}
    folder = merge_and_save(adapted(), tmp_path / "merged", tokenizer, facts, repo_id="someone/ouro-gsm8k")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(tiny_ouro().state_dict())
    assert json.loads((folder / "config.json").read_text())["total_ut_steps"] == 4
    names = {path.name for path in folder.iterdir()}
    assert names >= {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert not [name for name in names if "adapter" in name or name.endswith((".bin", ".pt", ".py"))]
    card = (folder / "README.md").read_text()
    table = "Training rule | Loop Dropout;Drop probability p | 0.5;LoRA rank / alpha | 16 / 32;Recurrence depth K | 4;"
    table += "Training data | GSM8K;Benchmark | Score | n | Base model;gsm8k | 61.5 | 1319 | 40.25;mine | 0.5 |  | "
    rows = [f"| {row} |" for row in table.split(";")]
    for stated in (*rows, "base_model: ByteDance/Ouro-1.4B", "p: 0.5", 'from_pretrained("someone/ouro-gsm8k"'):
        assert stated in card


def code_of(folder):
    """The code of a card, with a last line that prints the sum of the logits."""
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    return code + "\nimport torch\nprint(model(torch.arange(2, 42).view(4, 10)).logits.double().sum().item())"


def test_the_code_of_cards_runs_in_a_fresh_process(tmp_path, trained, tokenizer):
    folder = trained()
    model = load_adapter(load(tmp_path / "base"), folder).eval()
    merged = merge_and_save(model, tmp_path / "merged", tokenizer, repo_id=str(tmp_path / "merged"))
    code = f"{code_of(merged)}\ndel model\n{code_of(folder)}"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    want = pytest.approx(model(IDS).logits.double().sum().item(), abs=1e-2)
    assert [float(line) for line in run.stdout.split()] == [want, want]
    for card in (merged / "README.md", folder / "README.md"):  # a local base is named without its path
        text = card.read_text()
        assert "license: apache-2.0" in text and "| Base model | base |" in text and "\nbase_model:" not in text
        assert str(tmp_path / "base") not in text


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_merge_never_overwrites_other_weights(tmp_path, base, trained, monkeypatch):
    folder = trained()
    model = load_adapter(load(base), folder)
    merged = merge_and_save(model, tmp_path / "merged")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pytorch_model.bin").write_bytes(b"weights")
    (tmp_path / "link").symlink_to(base)
    on_merged = adapted(load(merged))  # a model that was merged is a base like any other
    for each, target in [
        *((model, target) for target in (base, folder, tmp_path / "other", tmp_path / "link")),
        (on_merged, merged),
        (adapted(), merged),
    ]:
        before = contents(target)
        with pytest.raises(ValueError, match=r"holds (the base model|other weights) \(.*choose another folder"):
            merge_and_save(each, target)
        assert contents(target) == before
    script = ["merge.py", "--model_name_or_path", str(base), "--adapter", str(folder), "--merged_dir", str(base)]
    monkeypatch.setattr(sys, "argv", [*script, "--dtype", "float32"])
    before = contents(base)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "recipes/merge.py"), run_name="__main__")
    assert stopped.value.code == 2 and contents(base) == before

    base.rename(tmp_path / "renamed")  # the same base: merging again replaces what was merged before
    again = load_adapter(load(tmp_path / "renamed"), folder)
    for name, parameter in again.named_parameters():
        if "lora_B" in name:
            parameter.data += 1
    before = contents(merged)
    assert merge_and_save(again, merged) == merged and contents(merged) != before


def test_an_adapter_of_another_base_is_refused_and_a_moved_base_is_not(tmp_path, base, trained, caplog):
    folder = trained()
    saved = json.loads((folder / "loop_dropout.json").read_text())
    assert saved["base_sha256"] == base_sha256(load(base)) is not None
    assert base_sha256(tiny_ouro()) is None
    tiny_ouro().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert base_sha256(load(tmp_path / "sharded")) not in (None, saved["base_sha256"])
    shutil.copytree(base, tmp_path / "copy")
    (tmp_path / "copy" / "consolidated.safetensors").write_bytes(b"what transformers does not load")
    assert isinstance(load_adapter(load(tmp_path / "copy"), folder), PeftModel)
    assert "it is put on" not in caplog.text

    other = tiny_ouro()
    other.model.layers[0].mlp.up_proj.weight.data[7, 5] += 1e-4  # one number
    other.save_pretrained(tmp_path / "other")
    shutil.rmtree(base)
    shutil.copytree(tmp_path / "other", base)
    for changed in (base, tmp_path / "other"):
        with pytest.raises(ValueError, match="was trained on .*base.*another_base=True"):
            load_adapter(load(changed), folder)
        assert isinstance(load_adapter(load(changed), folder, another_base=True), PeftModel)

    (folder / "loop_dropout.json").unlink()  # PEFT's own adapters: only names are left to go by
    cases = [("x/y", "x/y", ""), ("x/y", "x/z", "refused"), ("x/y", "/no/folder", "warned"), ("a", "b", "warned")]
    for on, base_name, outcome in [*cases, ("x/y", "", ""), (None, "x/z", "")]:
        lora = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**lora, "base_model_name_or_path": on}))
        model = tiny_ouro()
        model.config.name_or_path = base_name
        caplog.clear()
        if outcome == "refused":
            with pytest.raises(ValueError, match="was trained on x/y, not on x/z"):
                load_adapter(model, folder)
        else:
            load_adapter(model, folder)
        assert ("it is put on" in caplog.text) == (outcome == "warned")


def test_weight_files_have_the_mode_of_their_neighbours(tmp_path, trained):
    folder = trained()
    merge_and_save(load_adapter(load(tmp_path / "base"), folder), tmp_path / "merged")
    (tmp_path / "new").touch()
    usual = (tmp_path / "new").stat().st_mode
    files = [path for path in (*folder.rglob("*"), *(tmp_path / "merged").rglob("*")) if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) == 3  # adapter, checkpoint, merged model
    assert {path.name for path in files if path.stat().st_mode != usual} == set()


def test_a_push_uploads_the_merged_folder(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        HfApi, "create_repo", lambda self, repo, **k: calls.append((repo, k)) or SimpleNamespace(repo_id=repo)
    )
    monkeypatch.setattr(
        HfApi, "upload_folder", lambda self, **k: calls.append(k) or SimpleNamespace(repo_url=f"hub/{k['repo_id']}")
    )
    folder = merge_and_save(adapted(), tmp_path / "merged")
    assert push_merged_to_hub(folder, "someone/model", private=True) == "hub/someone/model"
    assert calls[0] == ("someone/model", {"private": True, "exist_ok": True})
    assert (calls[1]["folder_path"], calls[1]["repo_id"]) == (folder, "someone/model")


def test_a_refused_push_is_one_sentence_without_the_token_and_the_model_is_safe(tmp_path, monkeypatch):
    def refuse(self, repo, **kwargs):
        response = SimpleNamespace(headers={}, request=None)
        raise HfHubHTTPError(f"403 Forbidden for {TOKEN}\nsome more lines", response=response)

    with pytest.raises(FileNotFoundError, match="merge_and_save"):
        push_merged_to_hub(tmp_path, "someone/model")
    folder = merge_and_save(adapted(), tmp_path / "merged")
    with pytest.raises(PushError, match="The merged model is safe"):  # tests run with HF_HUB_OFFLINE=1
        push_merged_to_hub(folder, "someone/model")
    monkeypatch.setattr(HfApi, "create_repo", refuse)
    with pytest.raises(PushError, match="403 Forbidden") as error:
        push_merged_to_hub(folder, "someone/model", token=TOKEN)
    said = str(error.value)
    assert TOKEN not in said and "\n" not in said and str(folder) in said
    load(folder)


HUB_CODE = Path(__file__).parent / "samples" / "modeling_plain_ouro.py"
AUTO_MAP = {
    "AutoConfig": "modeling_plain_ouro.PlainOuroConfig",
    "AutoModelForCausalLM": "modeling_plain_ouro.PlainOuroForCausalLM",
}


def saved_auto_map(folder):
    return json.loads((folder / "config.json").read_text()).get("auto_map")


def test_the_auto_map_names_the_base_repository_and_the_model_in_hand_keeps_its_own(tmp_path):
    model = adapted()
    config = model.get_base_model().config
    config.auto_map = dict(AUTO_MAP)
    folder = merge_and_save(model, tmp_path, facts=ModelCardFields("ByteDance/Ouro-1.4B"))
    assert saved_auto_map(folder) == {key: f"ByteDance/Ouro-1.4B--{value}" for key, value in AUTO_MAP.items()}
    assert config.auto_map == AUTO_MAP
    assert "trust_remote_code=True" in (folder / "README.md").read_text()
    # A model that was merged from a merged one still finds the first one's code.
    config.auto_map = saved_auto_map(folder)
    again = merge_and_save(model, tmp_path / "again", facts=ModelCardFields("someone/merged"))
    assert saved_auto_map(again) == saved_auto_map(folder)


@pytest.mark.parametrize("base", [None, "no-such-folder"])
def test_a_base_without_code_leaves_no_auto_map_and_the_card_says_so(tmp_path, base):
    model = adapted()
    model.get_base_model().config.auto_map = dict(AUTO_MAP)
    folder = merge_and_save(model, tmp_path, facts=ModelCardFields(base))
    assert saved_auto_map(folder) is None
    card = (folder / "README.md").read_text()
    assert "trust_remote_code" not in card
    assert "it needs the package" in card


def test_a_model_merged_from_a_folder_with_code_loads_without_this_package(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(HUB_CODE, base)
    model = adapted()
    model.get_base_model().config.auto_map = dict(AUTO_MAP)
    folder = merge_and_save(model, tmp_path / "merged", facts=ModelCardFields(str(base)))
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True).eval()
assert type(model).__name__ == "PlainOuroForCausalLM" and "loopdropout_trainer" not in sys.modules
torch.save(model(torch.arange(2, 42).view(4, 10)).logits, {str(tmp_path / "logits.pt")!r})
"""
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, check=True, timeout=120)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(IDS).logits, atol=2e-5, rtol=1e-4)


# What other programs read of an Ouro checkpoint. vLLM: `model_executor/models/ouro.py` of 0.25.0 (0.27 has none), read in
# November 2026; it stacks q/k/v and gate/up by these names, and its attention takes one cache for each (loop, layer).
VLLM_OURO_FIELDS = {
    "total_ut_steps", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "hidden_act", "rms_norm_eps", "vocab_size", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "torch_dtype",
}  # fmt: skip
OURO_TENSORS = {
    "model.embed_tokens.weight", "model.norm.weight", "model.early_exit_gate.weight", "model.early_exit_gate.bias",
    "lm_head.weight",
    *(f"model.layers.{{}}.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"model.layers.{{}}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"model.layers.{{}}.{name}.weight" for name in ("input_layernorm", "input_layernorm_2",
      "post_attention_layernorm", "post_attention_layernorm_2")),
}  # fmt: skip


def test_a_merged_ouro_has_the_tensors_and_fields_that_vllm_reads(tmp_path):
    folder = merge_and_save(adapted(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert set(config) >= VLLM_OURO_FIELDS
    assert config["architectures"] == ["OuroForCausalLM"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    layers = range(config["num_hidden_layers"])
    assert names == {name.format(layer) for name in OURO_TENSORS for layer in layers}
    assert "vllm serve" in (folder / "README.md").read_text()


def test_an_adapter_has_the_names_by_which_vllm_serves_it_unmerged(tmp_path):
    model = adapted()
    add_gates(model)
    model.save_pretrained(tmp_path)
    lora = json.loads((tmp_path / "adapter_config.json").read_text())
    assert lora["peft_type"] == "LORA"
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    modules = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert names == {
        f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight"
        for layer in range(2) for module in modules for factor in "AB"
    }  # fmt: skip


def test_a_trainers_cards_say_base_rule_and_p(tmp_path, config, dataset, tokenizer):
    base = tiny_ouro()
    base.config.name_or_path = base.name_or_path = "ByteDance/Ouro-1.4B"
    args = config(p=0.25, max_steps=1, save_strategy="steps", save_steps=1)
    trainer = LoopDropoutSFTTrainer(base, args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    merge_and_save(trainer.model, tmp_path / "merged", tokenizer)
    reloaded = load_adapter(tiny_ouro(), args.output_dir)
    merge_and_save(reloaded, tmp_path / "merged_later", tokenizer)
    for folder in (Path(args.output_dir), Path(args.output_dir, "checkpoint-1"), tmp_path / "merged"):
        card = (folder / "README.md").read_text()
        assert "base_model: ByteDance/Ouro-1.4B" in card
        assert "| Training rule | Loop Dropout |" in card
        assert "| Drop probability p | 0.25 |" in card
        assert "None" not in card and "Trained at depths" not in card and "Loops in the loss" not in card
    assert "| Drop probability p | 0.25 |" in (tmp_path / "merged_later" / "README.md").read_text()


def test_an_adapter_says_at_which_depths_and_with_which_loss_it_was_trained(
    tmp_path, config, dataset, tokenizer, caplog
):
    args = config(
        max_steps=1, depth_sampling="uniform", depth_sampling_args={"low": 2, "high": 6}, loop_loss="uniform"
    )
    trainer = LoopDropoutSFTTrainer(tiny_ouro(), args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    own, six, eight = ({}, {"num_loops": 6}, {"num_loops": 8})
    for depth, warned in ((own, False), (six, False), (eight, True)):
        caplog.clear()
        reloaded = load_adapter(tiny_ouro(**depth), args.output_dir)
        assert ("was trained at depths 2 to 6; the model runs 8 loops" in caplog.text) == warned
        card = (merge_and_save(reloaded, tmp_path / "merged") / "README.md").read_text()
        assert "| Trained at depths | 2 to 6 |" in card and "| Loops in the loss | uniform |" in card
    path = Path(args.output_dir, "loop_dropout.json")
    metadata = json.loads(path.read_text())
    for name, wrong in (("num_loops", "4"), ("depths", 4), ("depths", [2]), ("depths", ["2", "6"])):
        path.write_text(json.dumps({**metadata, name: wrong}))
        with pytest.raises(ValueError, match="loop_dropout.json is not what was saved with the adapter"):
            load_adapter(tiny_ouro(), args.output_dir)


def test_nothing_that_a_card_quotes_breaks_out_of_its_place(tmp_path):
    recipe = "a: 1\n```\n<script>alert(1)</script>\n````\n# Not a heading"
    facts = ModelCardFields("x/y", "<img src=x onerror=alert(2)>", data="[a](javascript:b)|c", recipe=recipe)
    facts.results = {"<b>acc</b>": CardScore("`1`", "<i>")}
    name = 'x/y"); import os  # ```'
    folder = merge_and_save(adapted(), tmp_path / "merged", facts=facts, repo_id=name)
    before, _, block = (folder / "README.md").read_text().partition("`````yaml\n")
    assert block.split("\n`````")[0] == recipe
    for harmful in ("<script", "<img", "<b>", "[a](javascript", 'y"); import os'):
        assert harmful not in before.partition("## Loading")[0].partition("# x/y")[2]
    assert "vllm serve MODEL" in before
    code = before.split("```python\n")[1].split("```")[0]
    names = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert names.count(name) == 2  # all of it is one string, twice
