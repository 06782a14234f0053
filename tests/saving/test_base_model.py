"""An adapter runs on the weights that it was trained on, in every command and wherever they are."""

import json
import shutil

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from helpers.errors import user_error
from helpers.files import TINY_OURO_PATH, load_script
from helpers.tiny import TINY, tiny_ouro
from loopdropout_trainer import default_peft_config, load_adapter, load_model, merge_and_save
from loopdropout_trainer.evaluation import LoopedLM
from loopdropout_trainer.saving.base_model import digest_weights
from loopdropout_trainer.saving.source import find_source


SETTINGS = {
    "preparation": "arithmetic", "num_train_examples": 8, "num_eval_examples": 4, "max_length": 64, "max_steps": 2,
    "per_device_train_batch_size": 4, "learning_rate": 1e-2, "bf16": "false", "dtype": "float32", "use_cpu": "true",
    "save_strategy": "steps", "save_steps": 1, "report_to": "none", "disable_tqdm": "true", "num_threads": 1,
    "num_sample_completions": 0,
}  # fmt: skip
SHORT = [f"--{name}={value}" for name, value in SETTINGS.items()] + ["--arithmetic_steps", "1", "2"]


def train(folder, base, *words):
    load_script("recipes/sft.py").main(
        [*SHORT, "--model_name_or_path", str(base), "--output_dir", str(folder), *words]
    )
    return folder


def change(path, **fields):
    """Change fields of a JSON file. None removes a field."""
    fields = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A base model, copies of it, other models, and an adapter that was trained on it."""
    root = tmp_path_factory.mktemp("bases")
    base = shutil.copytree(TINY_OURO_PATH, root / "base")
    places = {"base": base, "moved": shutil.copytree(base, root / "moved")}
    snapshot = root / "hub" / "models--user--base" / "snapshots" / ("a" * 40)
    places["snapshot"] = shutil.copytree(base, snapshot)

    places["other weights"] = shutil.copytree(base, root / "other")
    weights = load_file(base / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.0.self_attn.q_proj.weight"))
    weights[name] = weights[name] * 1.25
    save_file(weights, places["other weights"] / "model.safetensors", {"format": "pt"})

    places["other shapes"] = root / "shapes"
    size = json.loads((base / "config.json").read_text())["vocab_size"]
    tiny_ouro(hidden_size=48, vocab_size=size).save_pretrained(root / "shapes")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / file, root / "shapes")

    places["run"] = train(root / "run", base)
    places["without digest"] = shutil.copytree(places["run"], root / "old")
    change(root / "old" / "loop_dropout.json", base_weights=None)
    return places


def merge(adapter, base, out):
    load_script("recipes/merge.py").main([str(adapter), "--model_name_or_path", str(base), "--output_dir", str(out)])


def evaluate(adapter, base, out):
    words = ["--benchmarks", "arithmetic_easy_test", "--benchmark_limit", "1", "--max_new_tokens", "1"]
    words += ["--use_cpu", "true", "--output_dir", str(out)]
    load_script("recipes/evaluate.py").main([str(adapter), "--model_name_or_path", str(base), *words])


def diagnose(adapter, base, out):
    words = ["--num_examples", "1", "--use_cpu", "true", "--diagnostics", "readouts", "--output_dir", str(out)]
    load_script("recipes/diagnose.py").main([str(adapter), "--model_name_or_path", str(base), *words])


def name_other_base(adapter, base, out):
    """Name the base model in `adapter_config.json`, as after a move."""
    folder = shutil.copytree(adapter, out)
    change(folder / "adapter_config.json", base_model_name_or_path=str(base), revision=None)
    return folder


def chat(adapter, base, out):
    folder = name_other_base(adapter, base, out)
    load_script("recipes/chat.py").main([str(folder), "1 + 1", "--max_new_tokens", "1"])


def serve(adapter, base, out):
    load_script("recipes/serve.py").main(
        [str(name_other_base(adapter, base, out)), "--engine", "transformers", "--port=0"]
    )


COMMANDS = {
    "load_adapter": lambda adapter, base, out: load_adapter(load_model(base), adapter),
    "load_model": lambda adapter, base, out: load_model(base, adapter=adapter),
    "lm-eval": lambda adapter, base, out: LoopedLM(str(base), adapter=str(adapter)),
    "sft": lambda adapter, base, out: train(out, base, "--adapter_name_or_path", str(adapter)),
    "merge": merge,
    "evaluate": evaluate,
    "diagnose": diagnose,
    "chat": chat,
}


@pytest.mark.parametrize("other", ["other weights", "other shapes"])
@pytest.mark.parametrize("command", [*COMMANDS, "serve"])
def test_other_base_models_end_in_one_sentence(places, tmp_path, command, other):
    run = {**COMMANDS, "serve": serve}[command]
    adapter = tmp_path / "out" if command in ("chat", "serve") else places["run"]
    trained_on = places[other] if command in ("chat", "serve") else places["base"]
    with user_error(
        f"The adapter in {adapter} must run on the weights that it was trained on, of {trained_on}, got other weights, of "
        f"{places[other]}. Give that base model, or remove `base_weights` from {adapter}/loop_dropout.json"
    ):
        run(places["run"], places[other], tmp_path / "out")


@pytest.mark.parametrize("command", COMMANDS)
def test_copies_of_a_base_model_are_accepted(places, tmp_path, log, command):
    COMMANDS[command](places["run"], places["moved"], tmp_path / "moved")
    assert "was trained on" not in log.text


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "chat"])
def test_unknown_weights_are_one_warning(places, tmp_path, log, command):
    """As of an adapter that another program saved, or that was trained on quantized weights."""
    COMMANDS[command](places["without digest"], places["other weights"], tmp_path / "out")
    assert (
        f"The adapter in {places['without digest']} was trained on {places['base']}, but the model is "
        f"{places['other weights']}. Its answers are wrong unless both have the same weights."
    ) in log.text


def test_unknown_weights_of_other_shapes_name_both_models(places):
    with user_error(
        f"does not fit this model: .* was trained on {places['base']}, but the model is {places['other shapes']}"
    ):
        load_model(places["other shapes"], adapter=places["without digest"])


def test_commits_tell_that_unknown_weights_are_the_same(places, tmp_path, log):
    """An adapter of a commit on the Hub, over the snapshot of this commit in the cache, and of another one."""
    adapter = shutil.copytree(places["without digest"], tmp_path / "adapter")
    for revision, is_warned in {"a" * 40: False, "b" * 40: True}.items():
        change(adapter / "adapter_config.json", base_model_name_or_path="user/base", revision=revision)
        log.clear()
        load_model(places["snapshot"], adapter=adapter)
        assert (f"was trained on user/base at {revision}, but the model is" in log.text) == is_warned


def test_digest_is_the_same_for_a_model_in_any_form(places, tmp_path):
    model = load_model(places["base"], dtype="float32")
    digest = digest_weights(model)
    assert digest == digest_weights(load_model(places["base"], dtype="bfloat16"))
    assert digest != digest_weights(load_model(places["other weights"]))
    model.resize_token_embeddings(len(model.get_input_embeddings().weight) + 8, mean_resizing=False)
    assert digest == digest_weights(model) == digest_weights(get_peft_model(model, default_peft_config(model)))
    load_model(places["base"], dtype="float32").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1 and digest == digest_weights(load_model(tmp_path))
    assert digest_weights(load_model(places["base"], dtype="float16")) is None


@pytest.mark.parametrize("family", TINY)
def test_digest_survives_saving_of_all_families(tmp_path, family):
    model = TINY[family]().float()
    model.save_pretrained(tmp_path)
    assert digest_weights(load_model(tmp_path, dtype="float32")) == digest_weights(model) is not None


def test_changed_weights_of_the_same_folder_are_found(places, tmp_path):
    base = shutil.copytree(places["base"], tmp_path / "base")
    run = train(tmp_path / "run", base)
    shutil.copy(places["other weights"] / "model.safetensors", base)
    with user_error(f"of {base}, got other weights, of {base}. Give that base model"):
        load_model(run)
    with user_error("got other weights, of"):
        train(run, base, "--merge", "true")  # the finished run
    with user_error("got other weights, of"):
        train(run, base, "--max_steps", "4", "--resume_from_checkpoint", "true")


def test_merged_weights_are_another_base_model(places, tmp_path):
    merged = merge_and_save(load_model(places["run"]), tmp_path / "merged")
    with user_error("got other weights, of .*merged"):
        load_model(merged, adapter=places["run"])


def test_removed_digest_runs_the_adapter_anyway(places, tmp_path, log):
    adapter = shutil.copytree(places["run"], tmp_path / "adapter")
    assert find_source(adapter).metadata["base_weights"] is not None
    change(adapter / "loop_dropout.json", base_weights=None)
    model = load_model(places["other weights"], adapter=adapter)
    assert "was trained on" in log.text
    assert torch.isfinite(model(torch.arange(2, 12).view(1, 10)).logits).all()
