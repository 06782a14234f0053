"""Recipes: how YAML files and command lines become settings, and the settings of the package's recipes."""

import dataclasses
import json
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from helpers.errors import user_error
from helpers.files import ROOT, load_script
from loopdropout_trainer.cli import command_of
from loopdropout_trainer.data import PREPARATIONS, DataArguments
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import recipe_names, recipes_folder
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.results.imported_code import describe_imports
from loopdropout_trainer.rewards import REWARDS
from loopdropout_trainer.settings.arguments import (
    AdapterArguments,
    ModelArguments,
    RewardArguments,
    ScriptArguments,
    SFTArguments,
)
from loopdropout_trainer.settings.field_hints import USUAL_NAMES
from loopdropout_trainer.settings.recipe import (
    IMPORTED,
    dump_recipe,
    load_recipe,
    name_words,
    override,
    parse,
    read_settings,
    without_option,
)
from loopdropout_trainer.training.config import LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig


@dataclass
class Arguments:
    """Fields of every kind."""

    name: str
    seed: int = 0
    rate: float = 0.1
    flag: bool = False
    items: list[int] | None = None
    mapping: dict[str, Any] | None = None
    rule: str = "loop_dropout"
    p: list[float] | None = None
    rule_args: dict[str, Any] | None = None
    model_name_or_path: str = ""
    model_revision: str | None = None
    report_to: None | str | list[str] = None


@pytest.fixture
def write(tmp_path):
    """`write(text, name)`: write a recipe and return its path."""

    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        return str(path)

    return write


def read(*argv):
    return parse((Arguments,), argv)[0]


@pytest.mark.parametrize(
    ("yaml_text", "words", "value"),
    [
        ("rate: 1e-4", "--rate 1e-4", {"rate": 1e-4}),
        ("rate: 1", "--rate=1", {"rate": 1.0}),
        ("seed: -1", "--seed -1", {"seed": -1}),
        ("flag: true", "--flag true", {"flag": True}),
        ("flag: true", "--flag", {"flag": True}),
        ("items: [1, 2]", "--items 1 2", {"items": [1, 2]}),
        ("items: 3", "--items 3", {"items": [3]}),
        ("mapping: {a: {b: 1e-3}}", '--mapping {"a":{"b":0.001}}', {"mapping": {"a": {"b": 1e-3}}}),
        ("name: --x", "--name=--x", {"name": "--x"}),
        ("name: '{q}'", "--name {q}", {"name": "{q}"}),
        ("report_to: [~/a, b~/]", "--report_to ~/a b~/", {"report_to": [f"{Path.home()}/a", "b~/"]}),
        ("name: ~/a", "--name ~/a", {"name": f"{Path.home()}/a"}),
        ("report_to: [a, b]", "--report_to a b", {"report_to": ["a", "b"]}),
    ],
)
def test_parse_reads_yaml_like_options(write, yaml_text, words, value):
    base = write("name: x\n")
    from_yaml = read(write(f"extends: recipe.yaml\n{yaml_text}\n", "own.yaml"))
    from_options = read(base, *words.split())
    assert from_yaml == from_options == dataclasses.replace(read(base), **value)


def test_parse_prefers_the_command_line(write):
    words = write("name: x\nseed: 1\nitems: [1]\nmapping: null\n"), "--seed", "2"
    arguments = read(*words)
    assert (arguments.seed, arguments.items, arguments.mapping) == (2, [1], None)
    assert read_settings((Arguments,), words) == {"name": "x", "seed": 2, "items": [1], "mapping": None}


@pytest.mark.parametrize("name", ["seed", "items", "p", "mapping", "report_to"])
def test_null_resets_an_inherited_field(write, name):
    base = write("name: x\nseed: 1\nitems: [1]\np: 0.5\nmapping: {a: 1}\nreport_to: [a]\n")
    default = getattr(Arguments("x"), name)
    changed = read(write(f"extends: recipe.yaml\n{name}: null\n", "own.yaml"))
    assert changed == read(base, f"--{name}", "null") == dataclasses.replace(read(base), **{name: default})


def test_load_recipe_extends_relative_paths(write):
    write("name: x\nseed: 1\n", "base.yaml")
    write("extends: ../base.yaml\nseed: 2\n", "variants/second.yaml")
    path = write("extends: second.yaml\nflag: true\n", "variants/third.yaml")
    assert load_recipe(path) == {"name": "x", "seed": 2, "flag": True}


def test_parse_ignores_fields_of_other_scripts_in_recipes_only():
    assert parse((ModelArguments,), ["quickstart.yaml"], unread_types=SFT_TYPES)[0].dtype == "float32"
    with user_error("`p` is a field of trainings, which has no effect on this script"):
        parse((ModelArguments,), ["quickstart.yaml", "--p", "0.5"], unread_types=SFT_TYPES)


MODEL = {"model_name_or_path": "a", "model_revision": "b"}
NOISE = {"rule": "parallel_noise", "p": [0.3], "rule_args": {"c": 2.0}}


@pytest.mark.parametrize(
    ("recipe", "changes", "expected"),
    [
        (NOISE, {"rule": "lora"}, {"rule": "lora", "rule_args": {}}),
        (NOISE, {"rule": "weight_noise"}, {**NOISE, "rule": "weight_noise"}),
        (NOISE, {"seed": 1}, {**NOISE, "seed": 1}),
        ({"rule": "independent", "p": 0.0}, {"rule": "loop_dropout"}, {"rule": "loop_dropout"}),
        (MODEL, {"model_name_or_path": "a"}, MODEL),
        (MODEL, {"model_name_or_path": "c"}, {"model_name_or_path": "c"}),
    ],
)
def test_override_drops_what_describes_the_replaced(recipe, changes, expected):
    assert override(recipe, changes) == expected


def test_recipe_of_a_training_names_its_command(write):
    path = write("command: dpo\nlearning_rate: 1e-3\n")
    assert read_settings([LoopDropoutDPOConfig], [path]) == {"learning_rate": 1e-3}
    message = (
        f"The recipe .*{Path(path).name} must be used with `loopdropout dpo` .in a sweep: .script: dpo.*got `sft`."
    )
    for words in ([path], [write(f"extends: {path}\n", "own.yaml")]):
        with user_error(message):
            read_settings([LoopDropoutConfig], words)
    assert load_recipe(path) == {"learning_rate": 1e-3}  # of a run whose results are read


def test_dump_recipe_repeats_the_settings_without_secrets(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "null")  # a value of YAML and JSON
    settings = {"name": "x: y", "rate": 1e-4, "items": [1], "mapping": {"a": "no", "b": None}, "hub_token": "secret"}
    settings["allow_unsafe_code"] = True  # also then it is readable
    dump_recipe({**settings, "run_name": "hf_averysecrettoken"}, tmp_path / "saved.yaml")
    text = (tmp_path / "saved.yaml").read_text()
    assert "secret" not in text
    del settings["hub_token"]
    assert load_recipe(tmp_path / "saved.yaml") == {**settings, "run_name": "***"}


def test_help_puts_model_data_and_method_first(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(SFT_TYPES, ["--help"], "Fine-tune.")
    page = capsys.readouterr().out
    text = re.sub(r"\s+", " ", page)
    assert "Fine-tune." in text and "Rank of the adapter. At least 1 and at most 65,536. (default: 16)" in text
    titles = re.findall(r"^(\w.*):$", page, re.MULTILINE)
    assert titles == ["Model", "Data", "Method", "Adapter", "Training", "Evaluation and output"]
    assert "--learning_rate" in text and "--adam_beta1" not in text and "truncation_mode" not in text


def test_import_runs_a_file_once(write, tmp_path, monkeypatch):
    monkeypatch.setattr("loopdropout_trainer.settings.recipe.IMPORTED", [])
    path = write(f"open({str(tmp_path / 'count')!r}, 'a').write('x')\n", "mine.py")
    for _ in range(2):
        assert read("--name", "x", "--import", path).name == "x"
    assert (tmp_path / "count").read_text() == "x"
    must = r"`--import` must be given Python files \(.py\) or task files \(.yaml\)"
    where = re.escape(f"Relative paths start in the present folder, {Path.cwd()}.")
    with user_error(f"^{must}, and there is no file nowhere.py. {where}$"):
        read("--name", "x", "--import", "nowhere.py")
    with user_error(f"there is no file {tmp_path}/min.py. Did you mean '{tmp_path}/mine.py'?"):
        read("--name", "x", "--import", f"{tmp_path}/min.py")
    with user_error(f"{must}, and {tmp_path} is a folder."):
        read("--name", "x", "--import", str(tmp_path))


PARTS = """
from loopdropout_trainer.data import PREPARATIONS
from loopdropout_trainer.gates import LoRA, register_rule
from loopdropout_trainer.rewards import register_reward
from dataclasses import dataclass

PREPARATIONS["my_data"] = PREPARATIONS["gsm8k"]

@register_reward
def my_scorer(completion, reference):
    return True

@register_rule
@dataclass(frozen=True)
class Mine(LoRA):
    name = "my_rule"
"""


@pytest.mark.parametrize(("recipe", "is_used"), [
    ({"rule": "lora", "preparation": "gsm8k", "rewards": ["gsm8k_strict"]}, False),
    ({"rule": "lora", "compare_with": ["my_rule"]}, False),  # which trains in a run of its own
    ({"rule": "my_rule"}, True),
    ({"preparation": "my_data"}, True),
    ({"rewards": ["gsm8k_strict", "my_scorer"]}, True),
    ({"own_benchmarks": {"own": {"path": "a.jsonl", "scorer": "my_scorer"}}}, True),
])  # fmt: skip
def test_run_depends_on_the_imports_that_it_uses(write, monkeypatch, recipe, is_used):
    monkeypatch.setattr("loopdropout_trainer.settings.recipe.IMPORTED", [])
    monkeypatch.setattr("loopdropout_trainer.results.imported_code.IMPORTED", imported := [])
    path = write(PARTS, "mine.py")
    with patch.dict(PREPARATIONS), patch.dict(RULES), patch.dict(REWARDS):
        read("--name", "x", "--import", path)
        imported.append(path)
        facts = describe_imports(recipe, torch.nn.Linear(1, 1))
    assert [*facts["imports"]] == [path] and facts["used_imports"] == [path] * is_used


def test_run_depends_on_the_import_of_its_model(write, monkeypatch):
    monkeypatch.setattr("loopdropout_trainer.settings.recipe.IMPORTED", [])
    monkeypatch.setattr("loopdropout_trainer.results.imported_code.IMPORTED", imported := [])
    path = write("import torch\n\nclass Model(torch.nn.Linear):\n    pass\n", "my_model.py")
    read("--name", "x", "--import", path)
    imported.append(path)
    model = torch.nn.Sequential(sys.modules["imported_my_model"].Model(1, 1))
    assert describe_imports({}, model)["used_imports"] == [path]


@pytest.mark.parametrize(("words", "message"), [
    (["--datasets", '["a.jsonl"]'], "`datasets` must be a list of items such as `- path: chats.jsonl`, got ['a.jsonl']."),
    (["--datasets", "a.jsonl"], "`datasets` must be a list of items such as `- path: chats.jsonl`, got 'a.jsonl'."),
    (["--arithmetic_steps", "x"], "`arithmetic_steps` must be two numbers from 1 to 5, got 'x'."),
    (["--fractions", "0.5", "0.5"], "`fractions` is not a field of this script. Set `fraction` in each item of `datasets`."),
])  # fmt: skip
def test_messages_show_the_form_of_datasets(words, message):
    with user_error(re.escape(message)):
        parse((DataArguments,), words)


def test_import_adds_a_preparation(write, monkeypatch):
    monkeypatch.setattr("loopdropout_trainer.settings.recipe.IMPORTED", [])
    path = write("from loopdropout_trainer.data import PREPARATIONS as P\n\nP['mine'] = P['gsm8k']\n", "mine.py")
    with patch.dict(PREPARATIONS):
        (args,) = parse((DataArguments,), ["--preparation", "mine", "--import", path])
    assert args.preparation == "mine"
    with user_error("`preparation` must be one of arithmetic, .*, got 'mine'"):
        parse((DataArguments,), ["--preparation", "mine"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["quickstrt.yaml"], "does not exist. Did you mean 'quickstart.yaml'?"),
        (
            ["nofile.yaml"],
            "nofile.yaml does not exist. `loopdropout recipes` lists the recipes of the package, and docs/own_data.md in",
        ),
        (["--name", "x", "--sede", "1"], "`sede` is not a field of this script. Did you mean 'seed'?"),
        (
            ["--name", "x", "y z"],
            "`name` must have one value, got x 'y z'. Words without `--field` must come first, [RECIPE.yaml].",
        ),
        ("", "must be a mapping"),
        ("seed: [1\n", "is not readable: while parsing"),
        ("mapping:\n\ta: 1\n", "Indent lines by spaces instead of tabs."),
        ("seed: 1\nseed: 2\n", "`seed` is set twice"),
        ("seed: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("extends: recipe.yaml\n", "extends itself"),
        ("extends: [a.yaml]\n", "`extends` must be the name of one recipe, got ['a.yaml']"),
        ("name: x\nitems: [1, b]\n", "`items` must be an integer or a list of integers, got [1, 'b']."),
        (["--name", "x", "--mapping", "{a"], "`mapping` is not readable"),
        (["--name", "x", "--rate"], "`rate` must have a value."),
        (["--name", "x\udc80"], r"must be texts in UTF-8, got 'x\udc80'."),
        ("name: x\nflag: maybe\n", "`flag` must be true or false, got 'maybe'."),
        ("seed: 1\n", "`name` must be set."),
        ("name: x\ntrust_remote_code: true\n", "sets `trust_remote_code`, which can run code"),
        ("name: x\nmapping: {a: {use_safetensors: false}}\n", "sets `use_safetensors`, which can run code"),
        ("attn_implementation: kernels-community/flash\n", "sets `attn_implementation`, which can run code"),
        ("mapping: {_attn_implementation: a/b}\n", "sets `_attn_implementation`, which can run code"),
        ("launcher: sh\n", "sets `launcher`, which can run code"),
        ("script: /proc/self/cwd/sft\n", "sets `script`, which can run code"),
        (
            "name: x\nmapping: {1: {attn_implementation: a/b}}\n",
            "Set `mapping` on the command line instead, by `--mapping`.",
        ),
        (
            "name: x\nimport: [rule.py]\n",
            "sets `import`, which can run code. Set it on the command line instead, by `--import`.",
        ),
        ("name: x\non: 1\n", "must be texts, got True. Quote the name"),
    ],
)
def test_parse_explains_mistakes(write, given, message):
    words = given if isinstance(given, list) else [write(given)]
    with pytest.raises(UserError, match=re.escape(message)):
        read(*words)


def test_epochs_of_a_command_line_without_effect_are_named(write, log):
    path = str(write("max_steps: 40\nnum_train_epochs: 3\n"))
    for words in ((), ("--max_steps", "20"), ("--num_train_epochs", "2", "--max_steps", "-1")):
        read_settings((LoopDropoutConfig,), [path, *words])
    assert not log.messages
    read_settings((LoopDropoutConfig,), [path, "--num_train_epochs", "2"])
    begin, end = "`--num_train_epochs 2` has no effect, because", "to train for so many epochs."
    assert f"{begin} the recipe sets `max_steps: 40`. Add `--max_steps -1` {end}" in log.messages
    both = ["--num_train_epochs", "2", "--max_steps", "20"]
    read_settings((LoopDropoutConfig,), [path, *both])
    assert f"{begin} `--max_steps 20` counts instead. Set `--max_steps -1` {end}" in log.messages
    read_settings((LoopDropoutConfig,), both)
    assert f"{begin} `--max_steps 20` counts instead. Remove `--max_steps` {end}" in log.messages


def test_command_line_sets_what_a_recipe_must_not(write):
    path = write("name: x\nmapping: {attn_implementation: a/b, 0: 20GiB}\n")
    with user_error("can run code"):
        read(path)
    assert read(path, "--mapping", "{attn_implementation: a/b}").mapping == {"attn_implementation": "a/b"}
    assert read(path, "--mapping", "null").mapping is None


def test_repeated_options(tmp_path):
    files = [tmp_path / "first.py", tmp_path / "second.py"]
    for file in files:
        file.write_text("")
    assert read("--name", "x", "--items", "1", "2", "--items", "3").items == [3]
    read("--name", "x", "--import", str(files[0]), "--import", str(files[1]))
    assert [path in IMPORTED for path in map(str, files)] == [True, True]
    with user_error("`adapter` must be given once, by the first words or by `--adapter`"):
        name_words(["a", "--x", "1", "--adapter", "b"], "adapter")


def test_without_option_knows_each_spelling():
    """The commands of a plan do not have the option of the plan."""
    words = ["base.yaml", "--dry-run", "true", "--seeds", "1", "2", "--dry_run=true", "--dry-run", "--p", "0.5"]
    assert without_option(words, "dry_run") == ["base.yaml", "--seeds", "1", "2", "--p", "0.5"]


def test_folder_of_a_run_is_no_recipe(write, tmp_path):
    with user_error(re.escape(f"The recipe {tmp_path} must be a file, and it is a folder.") + "$"):
        load_recipe(tmp_path)
    path = write("p: 0.1\n")
    training = f"It is the recipe of a training, as for `loopdropout sft {path}`."
    with user_error(re.escape(f"and it is a folder. Did you mean {path}? {training}")):
        load_recipe(tmp_path)
    with user_error(f"Did you mean {str(path)!r}"):  # with the other ending of YAML
        load_recipe(Path(path).with_suffix(".yml"))


def test_other_folder_given_as_a_recipe_is_named(tmp_path):
    """That of a sweep, of results and of recipes. Each command reads its recipe by one function."""
    run = tmp_path / "mine/lora/lr_0.001/seed_1"
    run.mkdir(parents=True)
    (run / "sweep_recipe.yaml").touch()
    (run / "log.txt").touch()  # it has been started
    hint = f"It is a sweep of 1 run, which `loopdropout sweep` continues .* `loopdropout report {tmp_path}/mine` shows its"
    for types in ((Arguments,), (load_script("recipes/sweep.py").Sweep,)):
        with user_error(hint):
            read_settings(types, [str(tmp_path / "mine")])
    (run / "results.jsonl").touch()
    for folder in (tmp_path, tmp_path / "mine/lora", run):
        with user_error(f"and it is a folder. It is a folder of results, which `loopdropout report {folder}` shows.$"):
            load_recipe(folder)
    own = tmp_path / "own"
    own.mkdir()
    (own / "b.yaml").touch()
    with user_error(f"Did you mean {own}/b.yaml"):
        load_recipe(own)
    (own / "a.yml").touch()
    with user_error(f"Name one of the 2 recipes in it, such as {own}/a.yml.$"):
        load_recipe(own)


def test_load_recipe_finds_shipped_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart.yaml") == load_recipe("recipes/quickstart.yaml")
    Path("own.yaml").write_text("extends: gsm8k.yaml\nmodel_name_or_path: tiny-ouro\n")
    own = load_recipe("own.yaml")
    assert own["preparation"] == "gsm8k" and "model_revision" not in own
    Path("quickstart.yaml").write_text("p: 0.1\n")
    assert load_recipe("quickstart.yaml") == {"p": 0.1}  # a file of the user comes first


def test_extended_recipe_is_not_looked_for_in_the_current_folder(write, tmp_path, monkeypatch):
    write("p: 0.1\n", "elsewhere/quickstart.yaml")
    path = write("extends: quickstart.yaml\n", "mine/own.yaml")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_recipe(path)["preparation"] == "arithmetic"
    write("p: 0.1\n", "mine/base.yaml")
    path = write("extends: bsae.yaml\n", "mine/other.yaml")
    with user_error(re.escape(f"The recipe {tmp_path}/mine/bsae.yaml does not exist. Did you mean 'base.yaml'?")):
        load_recipe(path)


SFT_TYPES = (SFTArguments, ModelArguments, AdapterArguments, DataArguments, LoopDropoutConfig)
PAPER = ("metamath_gsm", "gsm8k", "tulu2", "huginn", "loopus")
OTHERS = ("nanbeige", "dory", "recurrent_llama", "recurrent_tinyllama", "recurrent_olmo", "parcae")
LOOPS = {"huginn": 32, "loopus": 8, "nanbeige": 2, "dory": 2, "parcae": 8}
RATES = {
    **dict.fromkeys(["metamath_gsm", "metamath_gsm/lora_plus"], 5e-5),
    "metamath_gsm/rank_128_lora": 2.5e-5,
    **dict.fromkeys([f"metamath_gsm/{name}" for name in ("coto", "lora", "ouro_2.6b_lora", "rank_64")], 2e-4),
}
"""Learning rates other than 1e-4, and other than 2e-4 of adapters for each loop."""
TRAINING = [name for name in recipe_names() if name.removesuffix(".yaml").split("/")[0] in (*PAPER, *OTHERS)]


@pytest.mark.parametrize(
    "name", [name for name in recipe_names() if not name.startswith(("accelerate/", "tables/", "sweeps/", "studies/"))]
)
def test_recipe_begins_with_its_command(name):
    """First for one process, as docs/runs.md advises, then for several GPUs."""
    text = (recipes_folder() / name).read_text()
    command = command_of(name, text)
    commands = re.findall(r"^# +((?:loopdropout|accelerate launch) .*)", text.split("\n\n")[0], re.MULTILINE)
    assert commands[0].startswith(f"loopdropout {command} {name}")
    for other in commands[1:]:
        assert other.startswith(f"accelerate launch recipes/{command}.py recipes/{name}")


@pytest.mark.parametrize("name", TRAINING)
def test_recipe_has_the_settings_of_the_paper(name):
    script, model, adapter, data, config = parse(SFT_TYPES, [name, "--use_cpu", "true"])
    stem = name.removesuffix(".yaml")
    header = (recipes_folder() / name).read_text().split("\n\n")[0]
    assert f"accelerate launch recipes/sft.py recipes/{name}" in header
    family = stem.split("/")[0]
    accumulation, epochs, length, warmup, num_examples = {
        "metamath_gsm": (4, 1, 1024, 0.03, 100_000),
        "gsm8k": (1, 2, 512, 0.05, 6_973),
        "tulu2": (16, 1, 2048, 0.03, 100_000),
    }[data.preparation]
    expected = {  # Table "Fine-tuning recipes" and Appendix "Hyperparameters"
        "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.0, "max_grad_norm": 1.0, "optim": "adamw_torch_fused",
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": warmup,
        "max_steps": -1, "num_train_epochs": epochs, "max_length": length, "packing": False,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": accumulation, "bf16": True, "dtype": "bfloat16",
        "num_train_examples": num_examples,
        "learning_rate": RATES.get(stem, 2e-4 if "metamath_gsm" in stem and config.rule == "independent" else 1e-4),
        "num_loops": LOOPS.get(family, 16 if family in OTHERS else None),
        "attn_implementation": "sdpa", "seed": {"huginn": 301, "loopus": 501}.get(family, 101), "gate_seed": None,
        "eval_strategy": "no", "load_best_model_at_end": False, "lora_alpha": 2 * adapter.lora_r, "lora_target_modules": None,
        "assistant_only_loss": data.preparation == "tulu2", "merge": False,
        "gradient_checkpointing": family in ("tulu2", "huginn", "loopus", *OTHERS),
        "output_dir": f"outputs/{stem}",  # no two runs share a folder
    }  # fmt: skip
    if config.rule == "loop_dropout":
        expected["p"] = {"loopus": 0.3, "nanbeige": 0.1, "dory": 0.1}.get(family, 0.5)
    settings = {**vars(script), **vars(model), **vars(adapter), **vars(data), **vars(config)}
    assert {field: settings[field] for field in expected} == expected


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith(("dpo/", "grpo/"))])
def test_recipe_of_dpo_and_grpo_parses(name):
    config_class = LoopDropoutDPOConfig if name.startswith("dpo") else LoopDropoutGRPOConfig
    rewards = RewardArguments
    config = parse((ScriptArguments, *SFT_TYPES[1:-1], config_class, rewards), [name, "--use_cpu", "true"])[4]
    assert config.output_dir == f"outputs/{name.removesuffix('.yaml')}"


def test_recipes_readme_lists_every_recipe():
    text = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(?:recipes/)?([\w./-]+\.yaml)`", text))
    assert {*TRAINING, *(name for name in recipe_names() if name.startswith("sweeps/"))} <= listed
    assert listed <= {*recipe_names()}


HABITS = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "dropout": "p",
    "K": "num_loops",
    "tasks": "benchmarks",
    "eval_tasks": "benchmarks",
    "plot_loss": "report_to",
    "resume": "resume_from_checkpoint",
    "drop_p": "p",
    "dropout_p": "p",
    "drop_prob": "p",
    "prob": "p",
    "rate": "p",
    "r": "lora_r",
    "lora_rank": "lora_r",  # LLaMA-Factory, which also has `lora_target`, `cutoff_len` and `val_size`
    "alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
    "lora_target": "lora_target_modules",
    "cutoff_len": "max_length",
    "val_size": "num_eval_examples",
    "warmup": "warmup_steps",
    "bs": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",  # axolotl, which also has the next three
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "base_model": "model_name_or_path",
    "seq_len": "max_length",
    "use_gradient_checkpointing": "gradient_checkpointing",  # Unsloth
}


@pytest.mark.parametrize("name", HABITS)
def test_habitual_field_has_a_hint(name):
    types = load_script("recipes/sft.py")
    classes = (types.SFTArguments, types.ModelArguments, types.AdapterArguments, types.SFTDataArguments)
    classes += (types.LoopDropoutConfig,)
    with user_error(f"`{name}`.* Did you mean '{HABITS[name]}'"):
        parse(classes, ["quickstart.yaml", f"--{name}", "1"])


def test_habitual_names_mean_fields_that_exist():
    """An entry of the table would otherwise be without an effect."""
    classes = [*load_script("recipes/sft.py").ARGUMENTS, load_script("recipes/push.py").PushArguments]
    names = {field.name for cls in classes for field in fields(cls)}
    assert {*USUAL_NAMES.values()} <= names and names.isdisjoint(USUAL_NAMES)


def test_field_of_a_rule_has_a_hint_at_its_mapping():
    with user_error("`m` is not a field .* Put fields of the rule exactly_m under `rule_args`: {m: 2}."):
        parse(SFT_TYPES, ["quickstart.yaml", "--rule", "exactly_m", "--m", "2"])
    with user_error("Put fields of the rules parallel_noise and weight_noise under `rule_args`: {c: 2}."):
        parse(SFT_TYPES, ["quickstart.yaml", "--c", "2"])


def test_probability_q_has_a_hint():
    with user_error("`q` is not a field of this script. Set `p` = 1 - q"):
        parse(SFT_TYPES, ["quickstart.yaml", "--q", "0.5"])


def test_recipes_of_another_script_name_it(write):
    with user_error(
        "`recipe` is not a field of this script. A recipe with this field is a sweep. Use `loopdropout sweep`."
    ):
        parse(SFT_TYPES, [write("recipe: quickstart.yaml\n")])
    with user_error("`model_name_or_path` is not .* whose recipe is the field `recipe` of a sweep"):
        parse((load_script("recipes/sweep.py").Sweep,), ["quickstart.yaml"])
    with user_error("`push_to_hub` is not .* Set `hub_model_id` to the name of the repository"):
        parse((load_script("recipes/push.py").PushArguments,), ["--push_to_hub", "true"])


def test_accepted_single_value_of_a_list_is_named():
    with user_error(r"`p` must be a number or a list of numbers, got 'abc'\."):
        parse(SFT_TYPES, ["quickstart.yaml", "--p", "abc"])
    (*_, config) = parse(SFT_TYPES, ["quickstart.yaml", "--p", "0.25"])
    assert config.p in (0.25, [0.25])


@pytest.mark.parametrize("words", [["--learning_rate", "1e-3", "2e-3"], ["--learning_rate", "[1e-3, 2e-3]"]])
def test_several_learning_rates_name_the_sweep(words):
    with user_error(r"`learning_rate` must be a number, got \[.*\]. To compare several, use `loopdropout sweep`."):
        parse(SFT_TYPES, ["quickstart.yaml", *words])


def test_several_rules_name_the_comparison(write):
    with user_error("`rule` must be a text, got .*'lora'.*. To compare several, set `compare_with`."):
        parse(SFT_TYPES, [write("extends: quickstart.yaml\nrule: [loop_dropout, lora]\n")])


@pytest.mark.parametrize(("words", "error"), [
    ("--compare_with []", r"`compare_with` must be .*, got '\[\]'. Write `null` to train one method only."),
    ("--compare_with None", "`compare_with` must be .*, got 'None'. Write `null` to train one method only."),
    ("--benchmarks none", "`benchmarks` must be .*, got 'none'. Write `null` to evaluate nothing."),
    ("--eval_num_loops none", "`eval_num_loops` must be .*, got 'none'. Write `null` for no value."),
])  # fmt: skip
def test_word_for_no_value_names_null(words, error):
    with user_error(error):
        parse(SFT_TYPES, ["quickstart.yaml", *words.split()])


def test_habitual_field_of_another_script_has_no_hint():
    """`diagnose` has a field `task` and no `benchmarks`, so a hint to a field like `own_benchmarks` would mislead."""
    with user_error("`tasks` is not a field of this script. Did you mean 'task'"):
        parse(load_script("recipes/diagnose.py").ARGUMENTS, ["--tasks", "gsm8k"])


def test_recipe_of_another_folder_has_its_paths_named(tmp_path, monkeypatch):
    """A run keeps the paths of its recipe as they are. From another folder, the errors name the recipe and its folder."""
    home = tmp_path / "home"
    run = home / "out/run"
    run.mkdir(parents=True)
    for name in ("rows.jsonl", "template.jinja", "problems.jsonl"):
        (home / name).touch()
    (home / "mine").mkdir()
    own = {"capitals": {"files": ["problems.jsonl"], "like": "gsm8k"}}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for recipe, start in (
        ({"train_files": ["rows.jsonl"]}, "The file rows.jsonl does not exist."),
        (
            {"preparation": "arithmetic", "model_name_or_path": "mine"},
            "There is no folder mine, and a model on the Hub",
        ),
        ({"preparation": "arithmetic", "chat_template": "template.jinja"}, "`chat_template` must be "),
        (
            {"benchmarks": ["capitals"], "own_benchmarks": own},
            "`files` of the benchmark `capitals` must be files, and ",
        ),
    ):
        (run / "recipe.yaml").write_text(json.dumps({"model_name_or_path": "tiny-ouro", **recipe}))
        hint = f" The recipe {run}/recipe.yaml has this path, which leads to it from {home}. Run the command there."
        script = "evaluate" if "benchmarks" in recipe else "sft"
        with user_error(f"^{re.escape(start)}.*{re.escape(hint)}$"):
            load_script(f"recipes/{script}.py").main([f"{run}/recipe.yaml", "--dry_run", "true"])
