"""Loading, merging, model cards and pushes."""

import copy
import errno
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from datasets import Dataset
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from helpers.errors import user_error
from helpers.files import load_script
from helpers.hub import running_hub
from helpers.processes import ENVIRONMENT, python
from helpers.tiny import TINY, tiny_hrm, tiny_ouro, with_adapter
from helpers.tokenizer import byte_tokenizer
from loopdropout_trainer import LoopDropoutSFTTrainer, default_peft_config, load_adapter, load_model, use_gates
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.jobs.plan import describe_push
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.models import OuroForCausalLM
from loopdropout_trainer.results.run_files import write_results
from loopdropout_trainer.saving.cards import name_repository, write_model_card
from loopdropout_trainer.saving.command_line import name_sources
from loopdropout_trainer.saving.integrity import find_damage
from loopdropout_trainer.saving.loading import save_adapter_metadata
from loopdropout_trainer.saving.merging import describe_unusual_scale, merge_and_save, push_merged_to_hub
from loopdropout_trainer.saving.pushing import explain_push, keep_card, list_files, patterns_left_out
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.saving.standalone import write_code
from loopdropout_trainer.tokenizers import end_tokens, load_tokenizer


IDS = torch.arange(2, 42).view(4, 10)
OURO = "ByteDance/Ouro-1.4B"
TOKEN = "hf_averysecrettokenaverysecrettoken12"
ROWS = Dataset.from_list([{"prompt": "1 + 1 =", "completion": " 2"}])
FOUR_BIT = {"load_in_4bit": True}
load = AutoModelForCausalLM.from_pretrained


def adapted(model=None, base=None, **trained_with):
    """A model with an adapter that was trained on `base`."""
    model = with_adapter(model).eval()
    model.peft_config["default"].base_model_name_or_path = base
    find_looped_model(model).trained_with = trained_with
    return model


def card_of(folder):
    return Path(folder, "README.md").read_text()


def assert_close(logits, expected, atol=2e-5, rtol=1e-4):
    torch.testing.assert_close(logits, expected, atol=atol, rtol=rtol)


def code_of(folder, language="python"):
    return re.findall(rf"(?ms)^```{language}\n(.*?)\n```", card_of(folder))


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def base(tmp_path, tokenizer):
    """A folder with a tiny Ouro and a card that names its license."""
    tiny_ouro().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    return tmp_path / "base"


@pytest.fixture
def trained(base, train):
    """The folder of an adapter that the trainer saved."""
    trainer = train(str(base), max_steps=1, p=0.25)
    trainer.save_model()
    return Path(trainer.args.output_dir)


def test_load_model_loads_base_adapter_and_merged(base, trained, tmp_path):
    adapter = load_model(trained)
    assert isinstance(adapter, PeftModel) and not adapter.training
    assert not any(parameter.requires_grad for parameter in adapter.parameters())
    merged = load_model(merge_and_save(adapter, tmp_path / "merged"))
    assert not torch.equal(load_model(base)(IDS).logits, adapter(IDS).logits)
    assert_close(merged(IDS).logits, adapter(IDS).logits)
    assert torch.equal(load_model(base, adapter=trained)(IDS).logits, adapter(IDS).logits)
    assert load_model("tiny-ouro", num_loops=2, dtype="bfloat16").dtype == torch.bfloat16
    for name in (trained, base):
        with user_error("^`num_loops` must be an integer from 1"):
            load_model(name, num_loops=0)


def test_load_model_uses_depth_of_training(base, tmp_path, log):
    adapted().save_pretrained(tmp_path)
    save_adapter_metadata(adapted(), tmp_path, num_loops=6, depths=[2, 6])
    assert load_model(base, adapter=tmp_path).config.num_loops == 6 and "was trained at" not in log.text
    assert load_model(base, adapter=tmp_path, num_loops=8).config.num_loops == 8
    assert "was trained at depths 2 to 6, but the model runs 8 loops" in log.text


def test_load_model_explains_missing_files(base, tmp_path):
    adapted(base=str(tmp_path / "moved")).save_pretrained(tmp_path / "adapter")
    for load in (load_model, LoopDropoutSFTTrainer):
        with user_error("The folder .*nowhere does not exist"):
            load(str(tmp_path / "nowhere"))
        with user_error("The model some/model cannot be"):
            load("some/model")
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    with user_error("run has no model yet, and no complete checkpoint. Train it first"):
        LoopDropoutSFTTrainer(str(tmp_path / "run"))
    with user_error("run has no model yet, and no complete checkpoint. Train it first"):
        load_model(tmp_path / "run")
    with user_error("moved does not exist. It is `base_model_name_or_path` in .*adapter_config"):
        load_model(tmp_path / "adapter")
    with user_error(
        "^The adapter nowhere cannot be loaded: .* the Hub cannot be reached .Cannot find .*HF_HUB_OFFLINE.*"
    ):
        load_model(base, adapter="nowhere")


def test_pickled_weights_are_not_read(base, tmp_path):
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with user_error("cannot be loaded"):
        load_model(base)
    adapted().save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with user_error("must hold an adapter in safetensors"):
        load_adapter(tiny_ouro(), tmp_path / "adapter")


def test_load_adapter_warns_about_another_base(base, tmp_path, log):
    adapted(base=OURO).save_pretrained(tmp_path / "adapter")
    load_adapter(load(base), tmp_path / "adapter")
    assert f"was trained on {OURO}, but the model is {base}" in log.text
    with user_error("does not fit this model"):
        load_adapter(tiny_ouro(hidden_size=48), tmp_path / "adapter")
    with user_error("does not fit this model: .* not found in the base model"):
        load_adapter(TINY["huginn"](), tmp_path / "adapter")


@pytest.mark.parametrize(("names", "size"), [(["math"], 258), (["default", "second"], 258), (["default"], 300)])
def test_trained_adapters_of_any_name_and_vocabulary_load(base, train, names, size):
    model = load(base)
    model.resize_token_embeddings(size)
    model = get_peft_model(model, default_peft_config(model), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, model.peft_config[names[0]])
        model.set_adapter(name)
    trainer = train(model, max_steps=2)
    trainer.save_model()
    folder, want = trainer.args.output_dir, trainer.model.eval()(IDS).logits
    loaded = load_model(folder)
    assert torch.equal(loaded(IDS).logits, want) and want.shape[-1] == size
    with loaded.disable_adapter():
        assert not torch.allclose(loaded(IDS).logits, want, atol=1e-3)
    assert_close(load_model(merge_and_save(loaded, f"{folder}/merged"))(IDS).logits, want)


def test_folders_without_one_whole_adapter_raise(tmp_path):
    for name in "ab":
        with_adapter().save_pretrained(tmp_path / name)
    with user_error("must be the folder of one adapter, got .* with the adapters a, b"):
        load_adapter(tiny_ouro(), tmp_path)
    for name in "ab":  # also next to an untrained `default`
        (tmp_path / name / "loop_dropout.json").write_text("{}")
    with_adapter().save_pretrained(tmp_path)
    with user_error("must be the folder of one adapter, got .* with the adapters a, b"):
        load_adapter(tiny_ouro(), tmp_path)
    for file in ("adapter_config.json", "loop_dropout.json"):
        for text in ("{", "[" * 100_000, "\0"):
            (tmp_path / "a" / file).write_text(text)
            with user_error(f"{file} is not a JSON file"):
                load_adapter(tiny_ouro(), tmp_path / "a")
        for text in ("[]", "null"):
            (tmp_path / "a" / file).write_text(text)
            with user_error(f"{file} must hold a JSON object, got"):
                load_adapter(tiny_ouro(), tmp_path / "a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": "16"}, "`r` in .*adapter_config.json must be an integer, got '16'"),
        ({"r": 0}, "does not fit this model: `r` should be a positive"),
        ({"lora_alpha": None}, r"`lora_alpha` in .* must be a number, got None"),
        ({"alpha_pattern": {"q_proj": "x"}}, "`alpha_pattern` in .* must be a mapping"),
        ({"target_modules": 3}, "`target_modules` in .* must be a list of texts or a text"),
        ({"target_modules": "("}, "does not fit this model: missing"),
        ({"base_model_name_or_path": 3}, "`base_model_name_or_path` in .* must be a text, got 3"),
        ({"peft_type": "UNKNOWN"}, "`peft_type` in .* must be 'LORA', got 'UNKNOWN'"),
        ({"peft_type": None}, "`peft_type` in .* must be 'LORA', got None"),
        ({"task_type": "X"}, "adapter_config.json does not describe an adapter: Invalid task type"),
        ({"eva_config": 3}, "adapter_config.json does not describe an adapter: `EvaConfig` must be"),
    ],
    ids=str,
)
def test_wrong_fields_of_an_adapter_raise(tmp_path, fields, message):
    with_adapter().save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with user_error(message):
        load_adapter(tiny_ouro(), tmp_path)


def test_wrong_training_settings_of_an_adapter_raise(tmp_path):
    with_adapter().save_pretrained(tmp_path)
    for name, value in {"num_loops": "4", "depths": 4, "eos_token_id": ["x"]}.items():
        (tmp_path / "loop_dropout.json").write_text(json.dumps({name: value}))
        with user_error(f"`{name}` in .*loop_dropout.json must be"):
            load_adapter(tiny_ouro(), tmp_path)


def test_load_adapter_needs_a_model_with_a_head(tmp_path):
    with_adapter().save_pretrained(tmp_path)
    for model in (tiny_ouro().model, with_adapter(), "tiny-ouro"):
        with user_error(f"`model` must be a looped base model with its head .* got a {type(model).__name__}"):
            load_adapter(model, tmp_path)


@pytest.mark.parametrize(
    "fields", [{"attn_implementation": "flash_attention_2"}, {"quantization_config": FOUR_BIT}], ids=str
)
def test_missing_packages_are_named(fields, config):
    with user_error("tiny-ouro cannot be loaded: .* Install the package, or remove the setting"):
        load_model("tiny-ouro", **fields)
    with user_error("cannot be loaded: .* Install the package, or remove the setting"):
        LoopDropoutSFTTrainer("tiny-ouro", config(model_init_kwargs=fields), train_dataset=ROWS)


def test_adapters_of_tiny_ouro_load_in_another_installation(tmp_path):
    model = with_adapter(load_model("tiny-ouro")).eval()
    model.save_pretrained(tmp_path)
    save_adapter_metadata(model, tmp_path)
    file = tmp_path / "adapter_config.json"
    fields = json.loads(file.read_text())
    assert fields["base_model_name_or_path"] == "tiny-ouro"
    for name in ("tiny-ouro", "/venv/loopdropout_trainer/tiny_ouro"):
        file.write_text(json.dumps({**fields, "base_model_name_or_path": name}))
        assert torch.equal(load_model(tmp_path)(IDS).logits, model(IDS).logits)


def test_end_tokens_are_saved_and_loaded(tmp_path):
    model = adapted()
    model.generation_config.eos_token_id = [0, 7]
    model.save_pretrained(tmp_path)
    save_adapter_metadata(model, tmp_path)
    loaded = load_adapter(tiny_ouro(), tmp_path)
    assert end_tokens(loaded) == [0, 7]
    merge_and_save(loaded, tmp_path / "merged", byte_tokenizer(["<eos>", "<pad>"], eos_token="<pad>"))
    assert load(tmp_path / "merged").generation_config.eos_token_id == [0, 7, 1]


@pytest.mark.parametrize(
    ("lora", "scale"), [({}, 0.3), ({"use_rslora": True}, 1.0), ({"target_modules": ["q_proj", "down_proj"]}, 1.0)]
)
def test_merged_logits_equal_gates_of_the_scale(tmp_path, lora, scale):
    model = with_adapter(None, **lora).eval()
    before = model(IDS).logits
    with use_gates(model, torch.full((4,), 3.0)):
        card = card_of(merge_and_save(model, tmp_path, scale=scale))
    assert torch.equal(model(IDS).logits, before)  # it stays unmerged
    with use_gates(model, torch.full((4,), scale)):
        assert_close(load(tmp_path)(IDS).logits, model(IDS).logits)
    said = ("the update scaled by 0.3", "merged update | 0.3 |", "scaled")
    assert [text for text in said if text in card] == [text for text in said if scale < 1]


@pytest.mark.parametrize(
    ("scale", "said"),
    [(0, "is the base model"), (-1, "is subtracted from the base model"), (5, "merged 5 times"), (0.3, ""), (1, "")],
)
def test_unusual_scale_of_a_merge_is_named(scale, said):
    sentence = describe_unusual_scale(scale) or ""
    assert said in sentence and bool(sentence) == bool(said)


def test_merge_names_weights_that_are_not_finite(tmp_path, log):
    with user_error(
        r"The merged weights of `.*q_proj` must be finite, .* set `scale`, which is 1e\+60, to a smaller number"
    ):
        merge_and_save(with_adapter(None), tmp_path, scale=1e60)
    assert "no training has seen it so large" in log.text and not list(tmp_path.iterdir())


def test_merged_bfloat16_weights_are_rounded_once(tmp_path):
    model = adapted(tiny_ouro().to(torch.bfloat16))
    name = "model.layers.0.self_attn.q_proj"
    before = tiny_ouro().get_submodule(name).weight.bfloat16().float()
    merged = load(merge_and_save(model, tmp_path), dtype="auto")
    exact = before + model.get_base_model().get_submodule(name).get_delta_weight("default").float()
    assert torch.equal(merged.get_submodule(name).weight, exact.bfloat16())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("independent", "Independent adapters cannot be merged, since each loop has a different update"),
        (
            "learned",
            "An adapter with learned gates .* cannot be merged, since each loop scales the update differently",
        ),
    ],
)
def test_unmergeable_adapters_raise(train, tmp_path, rule, message):
    trainer = train(rule=rule, p=None, max_steps=2)
    with user_error(message):
        merge_and_save(trainer.model, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    trainer.save_model()
    with user_error(f"{message}.* Serve and evaluate it as an adapter."):
        load_script("recipes/merge.py").main([trainer.args.output_dir])
    card = card_of(trainer.args.output_dir)
    assert "parameters of its own for each loop" in card and "merge_and_save" not in card
    assert (
        "Load it with `load_model` or `load_adapter` of loopdropout-trainer, because plain PEFT loads it without"
        in card
    )


def test_equal_learned_gates_are_merged(make_sft, tmp_path, base, capsys):
    """In Python and by the command, which read the same rule."""
    trainer = make_sft(load_model(base), rule="learned", p=None, max_steps=1)
    trainer.train()
    gates = trainer.model.base_model.lora_loop_gates["default"]
    torch.nn.init.constant_(gates, 0.5)
    trainer.save_model()
    merged = load(merge_and_save(trainer.model, tmp_path / "merged"))
    find_source(trainer.args.output_dir).check_mergeable()
    for end in ("", ", and replaces the one that was there"):
        load_script("recipes/merge.py").main([trainer.args.output_dir, "--output_dir", str(tmp_path / "again")])
        assert f"The merged model is in {tmp_path / 'again'}{end}\n" in capsys.readouterr().out
    again = load(tmp_path / "again")
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in merged.state_dict().items())


@pytest.mark.parametrize("is_offline", [True, False])
def test_push_without_a_connection_says_so(saved, monkeypatch, is_offline):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    folder = re.escape(str(saved / "merged"))
    with user_error(
        f"The push to me/x failed, because the Hub cannot be reached .* is saved in {folder}. Push again when"
    ) as e:
        push_merged_to_hub(saved / "merged", "me/x", token=TOKEN)
    assert "log" not in str(e.value).lower() and TOKEN not in str(e.value)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with user_error("there is a connection. No token was found either. Log in with `hf auth login` or set HF_TOKEN.$"):
        push_merged_to_hub(saved / "merged", "me/x")


def test_push_of_a_run_has_no_locks_and_logs_of_its_sweep(tmp_path):
    for name in (
        "adapter_model.safetensors",
        "results.jsonl",
        "sweep.lock",
        "log.txt",
        "sweep.failed",
        "optimizer.pt",
        "other/a.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list_files(tmp_path, patterns_left_out(tmp_path)) == ["adapter_model.safetensors", "results.jsonl"]


@pytest.mark.parametrize(
    ("token", "account"), [(None, "no token was found. Log in"), ("hf_x", "a token was found, but")]
)
def test_dry_push_needs_no_network(saved, monkeypatch, capsys, token, account):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    words = ["--hub_model_id", "me/calc", "--hub_private_repo", "true", "--hub_revision", "try-1", "--dry_run", "true"]
    load_script("recipes/push.py").main([str(saved / "merged"), *words])
    plan = capsys.readouterr().out
    lines = ["repository  me/calc\n", "branch      try-1\n", "visibility  private, if", f"account     {account}"]
    assert all(f"\n{line}" in plan for line in lines)
    size = (saved / "merged/model.safetensors").stat().st_size
    assert f"\n            model.safetensors  {size:,}\n" in plan
    assert f"\ncard        {saved / 'merged/README.md'}, in which the push names" in plan


def test_push_takes_the_repository_of_the_training(trained, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    push = load_script("recipes/push.py").main
    words = [str(trained), "--dry_run", "true"]
    push(words)
    assert "\nrepository  not set (`--hub_model_id USER/NAME`)\n" in capsys.readouterr().out
    with user_error("`hub_model_id` must be a name on the Hub such as user/model, got 'me/my chat' .*"):
        push([*words, "--hub_model_id", "me/my chat"])
    with open(trained / "recipe.yaml", "a") as recipe:
        recipe.write("hub_model_id: me/calc\nhub_private_repo: true\nhub_revision: v1\n")
    for option, place in (([], ["me/calc", "v1", "private"]), (TO_ME, ["me/x", "main", "private"])):
        push([*words, *option])
        plan = capsys.readouterr().out
        repository, branch, visibility = place
        assert f"\nrepository  {repository}\nbranch      {branch}\nvisibility  {visibility}" in plan


def test_merge_never_replaces_base_or_adapter(base, trained):
    model = load_model(trained)
    for folder in (base, trained):
        files = [path for path in folder.rglob("*") if path.is_file()]
        before = {path: path.read_bytes() for path in files}
        with user_error(
            "`output_dir` must not be the folder of an adapter or of the base model, .* such as .*/merged"
        ):
            merge_and_save(model, folder)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")], ids=str)
def test_stopped_merge_keeps_the_former_model(tmp_path, tokenizer, error):
    """Ctrl-C and a full disk between the files of the new model. Parts that a killed process left are deleted."""
    folder, answers = tmp_path / "merged", tmp_path / "merged" / "samples.json"
    tiny_ouro().save_pretrained(folder, max_shard_size="20KB")  # by another program
    answers.write_text("{}")
    (folder / ".new.1").mkdir()
    merge_and_save(adapted(), folder, tokenizer)
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"] and find_damage(
        folder
    ) is None
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    assert answers in before
    stopping = copy.deepcopy(tokenizer)
    stopping.save_pretrained = Mock(side_effect=error)
    with pytest.raises((KeyboardInterrupt, UserError), match="merged cannot be written|^$"):
        merge_and_save(adapted(), folder, stopping, scale=0.5)
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before
    assert f"# {folder.name}\n" in card_of(merge_and_save(adapted(), folder, tokenizer, scale=0.5))
    assert (folder / "model.safetensors").read_bytes() != before[folder / "model.safetensors"]
    assert {*folder.rglob("*")} == {*before} and find_damage(folder) is None


def test_model_that_is_replaced_in_part_is_not_complete(tmp_path, tokenizer):
    """A folder with the name of a file stops the moves of the new files, as a killed process does."""
    merge_and_save(adapted(), tmp_path, tokenizer)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises((OSError, UserError)):
        merge_and_save(adapted(), tmp_path, tokenizer, scale=0.5)
    assert find_damage(tmp_path) == "was not saved completely" and not list(tmp_path.glob(".new*"))


AUTO_MAP = {"AutoConfig": "configuration_ouro.OuroConfig", "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"}


def test_auto_map_names_the_code_on_the_hub(tmp_path, log):
    model = adapted(base=OURO)
    model.get_base_model().config.auto_map = dict(AUTO_MAP)
    on_hub = {key: f"{OURO}--{value}" for key, value in AUTO_MAP.items()}
    folder = merge_and_save(model, tmp_path / "merged")
    assert config_of(folder)["auto_map"] == on_hub and "trust_remote_code=True" in card_of(folder)
    assert model.get_base_model().config.auto_map == AUTO_MAP
    model.peft_config["default"].base_model_name_or_path = "no-such-folder"
    folder = merge_and_save(model, tmp_path / "without")
    assert "auto_map" not in config_of(folder)
    assert "has no `auto_map` for AutoConfig, AutoModelForCausalLM, because" in log.text
    assert "transformers alone does not load the model" in card_of(folder)
    model.get_base_model().config.auto_map = {**AUTO_MAP, "AutoConfig": on_hub["AutoConfig"]}
    folder = merge_and_save(model, tmp_path / "part")
    assert config_of(folder)["auto_map"] == {"AutoConfig": on_hub["AutoConfig"]}
    assert "has no `auto_map` for AutoModelForCausalLM, because" in log.text


RUN_CARDS = """import os, runpy, sys, torch
assert not {"transformers", "loopdropout_trainer"} & {*sys.modules}
for name in ("loopdropout_trainer", "peft", "trl"):
    sys.modules[name] = None  # importing it fails
ids = torch.arange(2, 42).view(4, 10)
for folder in sys.argv[1:]:
    os.chdir(folder)
    card = runpy.run_path("card.py")
    model, text = card["model"].eval(), card["tokenizer"]("1 + 1")
    tokens = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    torch.save((model(ids).logits, tokens), "result.pt")
    model.save_pretrained("again")
"""


def test_merged_models_load_without_this_package(tmp_path, tokenizer):
    (tmp_path / "base").mkdir()
    with_code = adapted(base=str(tmp_path / "base"))  # a base model with its own code
    with_code.get_base_model().config.auto_map = write_code(with_code.get_base_model(), tmp_path / "base")
    families = [adapted(TINY[name]()) for name in ("ouro", "huginn", "loopus", "nanbeige", "parcae")]
    models = {tmp_path / str(i): model for i, model in enumerate([with_code, *families])}
    for folder, model in models.items():
        merge_and_save(model, folder, tokenizer, standalone=model is not with_code)
        (folder / "card.py").write_text(code_of(folder)[1])
    env = {**ENVIRONMENT, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    printed = python("-c", RUN_CARDS, *models, env=env, bare=True)
    assert "Do you wish to run the custom code" not in printed
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for folder, model in models.items():
        logits, tokens = torch.load(folder / "result.pt")
        assert_close(logits, model(IDS).logits)
        assert torch.equal(tokens, load(folder).generate(IDS, **greedy))
        assert torch.equal(logits, load(folder / "again")(IDS).logits)
        assert "With the code in this repository" in card_of(folder)
    assert "auto_map" not in config_of(merge_and_save(adapted(tiny_hrm()), tmp_path / "hrm", standalone=True))


def test_code_of_an_own_class_is_not_written(tmp_path):
    own_class = type("OwnOuro", (OuroForCausalLM,), {})
    with user_error("`standalone` must be false for OwnOuro of .*test_hub"):
        merge_and_save(adapted(own_class(tiny_ouro().config)), tmp_path / "own", standalone=True)
    assert not (tmp_path / "own").exists()


def test_merge_script_merges_with_the_run_of_the_adapter(base, trained):
    (trained / "recipe.yaml").write_text(f"preparation: gsm8k\ntrain_files: [{base}/rows.jsonl]\n")
    row = {"metric": "accuracy", "task": "gsm8k", "unit": "%", "num_loops": 4, "n": 1319}
    rows = [{**row, "value": 61.5, "gates": "unit"}, {**row, "value": 40.25, "gates": "none"}]
    rows += [{**rows[0], "value": 30.0, "num_loops": 2}, {**row, "value": 50.0, "gates": "loop 1"}]
    write_results(trained, rows)
    load_script("recipes/merge.py").main([str(trained)])
    card = card_of(trained / "merged")
    assert "| gsm8k | 4 | 61.50 | 1319 | 40.25 |" in card and "| gsm8k | 2 | 30.00 |" in card and "50.0" not in card
    assert "preparation: gsm8k" in card and "[rows.jsonl]" in card and str(base) not in card
    assert_close(load(trained / "merged")(IDS).logits, load_model(trained)(IDS).logits, atol=2e-5, rtol=1e-4)
    assert "preparation: gsm8k" in (trained / "merged" / "recipe.yaml").read_text()
    words = [f"{trained}/recipe.yaml", f"--output_dir={trained}", "--eval_num_loops=null", "--adapter", str(trained)]
    assert name_sources([str(trained), "--gates", "1-0"], "adapter") == [*words, "--gates", "1-0"]
    for model in ("none", "first=tiny-ouro"):  # a base model has no recipe
        assert name_sources([model, str(trained)], "adapter") == [*words[:-1], model, str(trained)]
    assert name_sources(["none", "tiny-ouro"], "adapter") == ["--adapter", "none", "tiny-ouro"]
    words = [f"{trained}/merged/recipe.yaml", "--eval_num_loops=null", "--adapter", str(trained / "merged")]
    assert name_sources([str(trained / "merged")], "adapter") == words


def test_results_of_an_adapter_do_not_go_to_the_folder_of_a_recipe(trained):
    """The folder in the recipe of a training is its own. An evaluation's recipe has a folder for its results."""
    names = ["none", f"mine={trained}"]
    words = ["--adapter", *names, "--use_cpu", "true"]
    own = f"--output_dir={trained}"
    assert name_sources(["quickstart.yaml", *names, "--use_cpu", "true"], "adapter") == [
        "quickstart.yaml",
        own,
        *words,
    ]
    for recipe, others in (
        ("evaluation/gsm8k.yaml", names),
        ("quickstart.yaml", ["none"]),
        ("quickstart.yaml", ["tiny-ouro"]),
    ):
        assert name_sources([recipe, *others], "adapter") == [recipe, "--adapter", *others]


def test_cards_state_the_training(base, trained, tmp_path):
    merged = merge_and_save(load_model(trained), tmp_path / "merged", card={"dataset": "GSM8K"})
    for card in (card_of(trained), card_of(merged)):
        for stated in ("Training rule | Loop Dropout", "probability p | 0.25", "alpha | 16 / 32", "depth K | 4"):
            assert f"{stated} |" in card
        assert "license: apache-2.0" in card and "| Base model | base |" in card and "arXiv 2609.34218" in card
        assert "None" not in card and "base_model:" not in card and str(base) not in card
    assert "| Training data | GSM8K |" in card_of(merged)
    card = write_model_card(tmp_path, adapted(base=OURO, depths=[2, 6])).read_text()
    assert f"base_model: {OURO}\n" in card and "| Depths in training | 2 to 6 |" in card


def test_code_of_cards_runs(trained, tmp_path, tokenizer, monkeypatch):
    model = load_model(trained)
    merged = merge_and_save(model, tmp_path / "merged", tokenizer)
    for folder in (merged, trained):
        names = {}
        monkeypatch.chdir(folder)
        exec(code_of(folder)[0], names)
        assert_close(names["model"](IDS).logits, model(IDS).logits)
    assert config_of(trained / "merged") == config_of(merged)  # the code of the adapter merges


VLLM, MLX, OWN = "vllm serve .", "mlx_lm.generate --model . ", "loopdropout chat ."
SERVED = [  # family, with the base's code, with a tokenizer, the beginnings of the card's commands
    ("ouro", True, True, [VLLM, OWN]),
    ("ouro", True, False, []),
    ("nanbeige", False, True, [VLLM, MLX, "python llama.cpp/convert_hf_to_gguf.py . --outfile", OWN]),
    ("huginn", True, True, [VLLM, OWN]),
    ("parcae", False, True, [VLLM, OWN]),
]


@pytest.mark.parametrize(("family", "has_code", "has_tokenizer", "commands"), SERVED)
def test_card_names_programs_that_run_the_model(tmp_path, tokenizer, family, has_code, has_tokenizer, commands):
    model = adapted(TINY[family]())
    if has_code:
        model.get_base_model().config.auto_map = {key: f"x/y--{name}" for key, name in AUTO_MAP.items()}
    code = code_of(merge_and_save(model, tmp_path, tokenizer if has_tokenizer else None), "bash")
    assert len(code) == len(commands) and all(map(str.startswith, code, commands))


def test_card_of_a_branch_loads_the_branch(tmp_path, tokenizer):
    merge_and_save(adapted(TINY["nanbeige"]()), tmp_path, tokenizer, repo_id="someone/model")
    of_main = card_of(tmp_path)
    for revision in ("try-1", "try-1", "other/2", None, "try-1"):  # pushes of one folder to several branches
        assert name_repository(tmp_path, "someone/model", revision)
        assert (card_of(tmp_path) == of_main) == (revision is None)
    model, tokens = (line for line in code_of(tmp_path, "python")[0].splitlines() if "from_pretrained" in line)
    assert model.endswith('from_pretrained("someone/model", revision="try-1", dtype="auto")')
    assert tokens.endswith('from_pretrained("someone/model", revision="try-1")')
    download = "hf download someone/model --revision try-1 --local-dir model"
    vllm, mlx, llama, own = (block.splitlines() for block in code_of(tmp_path, "bash"))
    assert vllm == ["vllm serve someone/model --revision try-1"]
    assert mlx == [download, "mlx_lm.generate --model model --prompt 'What is 7 times 8?'"]
    assert llama[:2] == [download, "python llama.cpp/convert_hf_to_gguf.py model --outfile model.gguf"]
    assert own == ["loopdropout chat someone/model@try-1", "loopdropout serve someone/model@try-1"]


def test_card_of_another_repository_does_not_name_that_of_its_recipe(tmp_path):
    merge_and_save(adapted(), tmp_path, card={"recipe": "hub_model_id: someone/model\n"}, repo_id="another/model")
    before = card_of(tmp_path)
    assert "hub_model_id: someone/model" in before
    assert not name_repository(tmp_path, "someone/model") and card_of(tmp_path) == before
    assert name_repository(tmp_path, "another/model")


def test_push_uploads_the_merged_folder(tmp_path, monkeypatch):
    folder = merge_and_save(adapted(), tmp_path / "merged", repo_id="someone/model")
    create = Mock(return_value=SimpleNamespace(repo_id="someone/model"))
    upload = Mock(return_value=SimpleNamespace(repo_url="hub/someone/model"))
    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert push_merged_to_hub(folder, "someone/model", private=True) == "hub/someone/model"
    create.assert_called_once_with("someone/model", private=True, exist_ok=True)
    assert upload.call_args.kwargs["folder_path"] == folder
    assert "# someone/model\n" in card_of(folder) and '_pretrained("someone/model", ' in card_of(folder)


def test_push_that_the_hub_refuses_is_not_one_without_a_connection(saved, monkeypatch):
    """The Hub's Xet client has the same error for both. This Hub has no Xet, so that it answers with 404."""
    with running_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
        with user_error(r"^The push to me/x failed \(.*404 .* Log in with `hf auth login`"):
            push_merged_to_hub(saved / "merged", "me/x", token=TOKEN)


def test_failed_push_keeps_the_model_and_hides_the_token(tmp_path, monkeypatch):
    with user_error("merge_and_save"):
        push_merged_to_hub(tmp_path, "someone/model")
    folder = merge_and_save(adapted(), tmp_path / "merged")
    nothing = SimpleNamespace(headers={}, request=None)
    refusal = HfHubHTTPError(f"403 Forbidden for {TOKEN} and mine\nmore lines", response=nothing)
    monkeypatch.setattr(HfApi, "create_repo", Mock(side_effect=refusal))
    with user_error("403 Forbidden .* The merged model is saved in ") as error:
        push_merged_to_hub(folder, "someone/model", token="mine")
    with user_error("`repo_id` must be the name of a repository, such as `user/name`, got ''"):
        push_merged_to_hub(folder, "")
    message = str(error.value)
    assert TOKEN not in message and "mine" not in message and str(folder) in message
    assert error.value.__cause__ is None and error.value.__suppress_context__
    load(folder)


def test_push_to_a_wrong_name_asks_for_another_one():
    message = r"The push to a b failed \(HFValidationError: .*\). It is saved. Correct the name, and push again.$"
    with user_error(message), explain_push("a b", "It is saved."):
        HfApi().create_repo("a b")


def test_failed_push_of_a_trainer_says_how_to_name_the_repository(make_sft, tmp_path):
    """Without `hub_model_id`, transformers names the repository after the folder. There is no Hub here."""
    trainer = make_sft(output_dir=str(tmp_path / "mine"))
    with user_error(
        "^The push to the repository mine, which has the name of `output_dir` because `hub_model_id` is not set,"
    ):
        trainer.push_to_hub()


def test_failed_push_before_a_training_says_that_nothing_was_trained(make_sft, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
    folder = tmp_path / "mine"
    with user_error(
        "The push to me/try failed, because the Hub cannot be reached .* Nothing was trained. Start again when there is a "
        f"connection, or train without `push_to_hub` and push later with `loopdropout push {folder} --hub_model_id me/try`.$"
    ):
        make_sft(output_dir=str(folder), push_to_hub=True, hub_model_id="me/try")


def test_plan_names_the_repository_and_a_missing_token(config, tmp_path, monkeypatch):
    unnamed, named = config(output_dir=str(tmp_path / "mine")), config(hub_model_id="me/try")
    for token, note in (("hf_mine", ""), (None, " (no token was found: log in with `hf auth login` or set HF_TOKEN)")):
        monkeypatch.setattr(huggingface_hub, "get_token", lambda token=token: token)
        place = "push to mine, the name of `output_dir`, because `hub_model_id` is not set"
        assert describe_push(unnamed) == place + note
        assert describe_push(named) == f"push to me/try{note}"
    private = config(hub_model_id="me/try", hub_revision="v1", hub_private_repo=True, hub_token="hf_given")
    assert describe_push(private) == "push to me/try, to the branch v1, private if the repository is new"
    assert describe_push(config(hub_model_id="me/try", hub_token="hf_given")) == "push to me/try"


def test_private_repository_has_the_name_of_the_folder(make_sft, tmp_path, monkeypatch):
    create = Mock(return_value=SimpleNamespace(repo_id="someone/mine"))
    monkeypatch.setattr(HfApi, "create_repo", create)
    trainer = make_sft(output_dir=str(tmp_path / "mine"))
    trainer.init_hf_repo(private=True)
    assert {call.args for call in create.call_args_list} == {("mine",)} and trainer.hub_model_id == "someone/mine"
    assert create.call_args_list[0].kwargs["private"] is True


def test_merged_model_has_the_tokenizer_of_its_adapter(train, tokenizer, tmp_path, log):
    """Without it, `chat` and servers cannot use the model."""
    trainer = train(load_model("tiny-ouro"), max_steps=1)
    trainer.save_model()
    samples = {"trained": trainer.model, "loaded": load_model(trainer.args.output_dir)}
    for name, model in samples.items():
        folder = merge_and_save(model, tmp_path / name)
        assert load_tokenizer(folder).get_vocab() == tokenizer.get_vocab()
    new = get_peft_model(load_model("tiny-ouro"), default_peft_config())
    folder = merge_and_save(new, tmp_path / "base's")
    assert load_tokenizer(folder).get_vocab() == load_tokenizer("tiny-ouro").get_vocab()
    assert "has no tokenizer" not in log.text
    folder = merge_and_save(adapted(), tmp_path / "without")  # of a model without a name
    assert "has no tokenizer, which `loopdropout chat` and servers need. Give it" in log.text
    with user_error(r"without must have a tokenizer, .* by `merge_and_save\(model, folder, tokenizer\)`"):
        load_tokenizer(folder)


@pytest.fixture(params=[KeyboardInterrupt, OSError])
def broken_uploads(request, monkeypatch):
    """Cards that were about to be uploaded when the upload failed."""
    cards = []

    def upload_folder(self, *, folder_path, **options):
        cards.append(card_of(folder_path))
        raise request.param("no space is left")

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **options: SimpleNamespace(repo_id=name))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return cards


TO_ME = ["--hub_model_id", "me/x"]


def assert_only_upload_names_repository(cards, *folders):
    (uploaded,) = cards
    assert "\n# me/x\n" in uploaded and "loopdropout chat me/x\n" in uploaded
    for folder in folders:
        card = card_of(folder)
        assert "# me/x\n" not in card and "loopdropout chat .\n" in card


def test_failed_push_leaves_the_card(trained, broken_uploads):
    before = card_of(trained)
    with pytest.raises((KeyboardInterrupt, UserError)):
        load_script("recipes/push.py").main([str(trained), *TO_ME])
    with user_error(r"`hub_model_id` must be set. Name on the Hub \(`user/model`\) to push to."):
        load_script("recipes/push.py").main([str(trained)])
    assert_only_upload_names_repository(broken_uploads, trained)
    assert card_of(trained) == before


@pytest.mark.parametrize("repository", [None, "x", "me/x"])
@pytest.mark.parametrize("saves", [False, True])
def test_failed_push_of_a_trainer_leaves_its_card(make_sft, broken_uploads, tmp_path, monkeypatch, repository, saves):
    """Also with a name in `hub_model_id`, which does not mean that the repository has the adapter."""
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **options: SimpleNamespace(repo_id="me/x"))
    monkeypatch.setattr(HfApi, "create_branch", lambda self, name, **options: None)
    trainer = make_sft(output_dir=str(tmp_path / "x"), hub_model_id=repository)
    if saves:
        trainer.save_model()
    with pytest.raises((KeyboardInterrupt, UserError)):
        trainer.push_to_hub(tags="sums", revision="v1")
    (uploaded,) = broken_uploads
    assert "\n# me/x\n" in uploaded and "loopdropout chat me/x@v1\n" in uploaded
    assert "- sums\n" in uploaded and "loopdropout chat .\n" in card_of(trainer.args.output_dir)
    assert "me/x" not in card_of(trainer.args.output_dir)
    trainer.save_model()
    assert "me/x" not in card_of(trainer.args.output_dir)
    trainer.create_model_card()  # which the user asks for, with the whole name from the push
    assert "loopdropout chat me/x\n" in card_of(trainer.args.output_dir)


@pytest.fixture
def late_failures(monkeypatch):
    """An event that lets the uploads fail that wait for it."""
    may_fail = threading.Event()

    def upload_folder(self, **options):
        assert may_fail.wait(timeout=30)
        raise OSError("no space is left")

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **options: SimpleNamespace(repo_id=name))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return may_fail


def test_push_that_fails_later_leaves_the_card(make_sft, late_failures, tmp_path, log):
    folder = tmp_path / "x"
    trainer = make_sft(output_dir=str(folder), hub_model_id="me/x", hub_private_repo=True)
    job = trainer.push_to_hub(blocking=False)
    assert "loopdropout chat me/x\n" in card_of(folder)
    late_failures.set()
    message = (
        r"The push to me/x failed \(OSError: no space is left\). The adapter is saved in .*x. Log in with `hf auth login` or "
        f"set HF_TOKEN, and push again with `loopdropout push {folder} --hub_model_id me/x --hub_private_repo true`.$"
    )
    with user_error(message):
        job.result()
    assert re.search(message, log.text.strip()) and "me/x" not in card_of(folder)
    job = trainer.push_to_hub(blocking=False)
    with pytest.raises(UserError):
        job.result()
    late_failures.clear()
    job = trainer.push_to_hub(blocking=False)
    (folder / "README.md").write_text("Mine")  # during the push
    late_failures.set()
    with pytest.raises(UserError):
        job.result()
    assert card_of(folder) == "Mine"


def test_failed_push_of_a_checkpoint_is_reported(make_sft, late_failures, tmp_path, log):
    late_failures.set()
    options = {"push_to_hub": True, "hub_model_id": "me/x", "hub_strategy": "checkpoint"}
    trainer = make_sft(output_dir=str(tmp_path / "x"), max_steps=1, save_strategy="steps", save_steps=1, **options)
    trainer.train()
    assert re.search("The push to me/x failed .* The adapter of step 1 is saved in .*checkpoint-1, and", log.text)
    assert "me/x" not in card_of(tmp_path / "x")


class OwnCard(LoopDropoutSFTTrainer):
    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        Path(self.args.output_dir, "README.md").write_text(
            f"Mine: {self.hub_model_id}, {model_name}, {dataset_name}, {tags}"
        )


def test_push_uploads_the_card_of_a_subclass(make_sft, broken_uploads, tmp_path):
    trainer = make_sft(cls=OwnCard, output_dir=str(tmp_path / "x"), hub_model_id="me/x")
    with pytest.raises((KeyboardInterrupt, UserError)):
        trainer.push_to_hub(model_name="Sums", dataset_name="me/sums", tags="add")
    assert [card[:34] for card in broken_uploads] == ["Mine: me/x, Sums, me/sums, ['add',"]


def test_card_of_a_failed_push_goes_where_none_was(tmp_path):
    with pytest.raises(KeyboardInterrupt), keep_card(tmp_path):
        (tmp_path / "README.md").write_text("# me/x")
        raise KeyboardInterrupt
    assert [*tmp_path.iterdir()] == []


def test_failed_push_of_a_merged_model_leaves_its_card(trained, broken_uploads):
    with pytest.raises((KeyboardInterrupt, UserError)):
        load_script("recipes/merge.py").main([str(trained), *TO_ME])
    assert_only_upload_names_repository(broken_uploads, trained, trained / "merged")
