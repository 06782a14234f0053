"""How recipes and command lines become settings: strict, with errors that name the field."""

from dataclasses import fields, make_dataclass

import pytest
import yaml

from loopdropout_trainer import LoopDropoutConfig
from loopdropout_trainer.settings.arguments import TINY_OURO_PATH, AdapterArguments, ModelArguments, RunArguments
from loopdropout_trainer.settings.recipe import RecipeError, load_recipe, parse_recipe, settings_yaml


TYPES = (RunArguments, ModelArguments, AdapterArguments, LoopDropoutConfig)


@pytest.fixture
def recipe(tmp_path):
    """`recipe(text, name=...)`: write a recipe and return its path."""

    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        return str(path)

    return write


BASE = "model_name_or_path: some/model\noutput_dir: out\nbf16: false\nreport_to: none\n"


def test_the_command_line_overrides_the_recipe(recipe):
    path = recipe(
        BASE + "learning_rate: 1e-4\np: [0.1, 0.2]\nlora_r: 4\nsave_strategy: no\nlr_scheduler_kwargs: {a: 1e-3}\n"
    )
    argv = [path, "--learning_rate", "2e-4", "--rule", "unscaled", "--merge", "--compare_with", "lora", "loop_dropout"]
    (run, model, adapter, config), settings = parse_recipe(TYPES, argv)
    assert (config.learning_rate, config.rule, config.p) == (2e-4, "unscaled", [0.1, 0.2])
    assert (config.save_strategy, config.lr_scheduler_kwargs) == ("no", {"a": 1e-3})
    assert (adapter.lora_r, run.merge, run.compare_with) == (4, True, ["lora", "loop_dropout"])
    assert model.model_name_or_path == "some/model"
    tiny = ModelArguments("tiny-ouro")
    assert (tiny.model_name_or_path, tiny.base_name) == (str(TINY_OURO_PATH), "tiny_ouro")
    assert settings["learning_rate"] == 2e-4


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [(["--p", "0.3"], "p", 0.3), (["--p", "0.3", "0.4"], "p", [0.3, 0.4]), ([], "resume_from_checkpoint", "true")],
)
def test_a_field_of_several_types_takes_each(recipe, argv, name, value):
    path = recipe(BASE + "resume_from_checkpoint: true\n")
    assert getattr(parse_recipe(TYPES, [path, *argv])[0][3], name) == value


def test_a_recipe_builds_on_another_and_states_what_differs(recipe):
    recipe(BASE + "seed: 1\nlora_r: 4\n", "base.yaml")
    recipe("extends: ../base.yaml\nseed: 2\n", "variants/second.yaml")
    path = recipe("extends: second.yaml\nlora_r: 8\n", "variants/third.yaml")
    assert load_recipe(path) == {**yaml.safe_load(BASE), "seed": 2, "lora_r": 8}


def test_fields_of_other_scripts_may_be_passed_over_but_mistakes_not(recipe):
    small = make_dataclass("Small", [("seed", int, 0)])
    assert parse_recipe((small,), [recipe(BASE + "seed: 3\n")], unread_types=TYPES)[0] == [small(3)]
    with pytest.raises(RecipeError, match="unknown key `sede`; did you mean `seed`"):
        parse_recipe((small,), [recipe(BASE + "sede: 3\n")], unread_types=TYPES)


def test_saved_settings_repeat_the_run_without_secrets_and_read_back_as_they_were(recipe):
    path = recipe(BASE + "hub_token: hf_secret\nmodel_init_kwargs: {token: hf_secret}\nlearning_rate: 1e-4\n")
    text = settings_yaml(parse_recipe(TYPES, [path, "--p", "0.3"])[1])
    assert "hf_secret" not in text
    again = parse_recipe(TYPES, [recipe(text, "again.yaml")])[0][3]
    assert (again.p, again.learning_rate) == (0.3, 1e-4)
    values = {"run_name": "1e-4", "project": "no", "hub_revision": "12:30", "learning_rate": 1e-4, "p": [0.5, 1e-3]}
    values |= {"system_instruction": None, "prompt_end": "", "eos_token": "null", "lr_scheduler_kwargs": {"a": 1e-30}}
    assert load_recipe(recipe(settings_yaml(values))) == values


def test_help_lists_what_this_package_adds_and_help_all_everything(capsys, monkeypatch):
    listed = {}
    for option in ("--help", "--help_all"):
        monkeypatch.setattr("sys.argv", ["sft.py", option])
        with pytest.raises(SystemExit) as stop:
            parse_recipe(TYPES, description="Trains.")
        assert stop.value.code == 0
        listed[option] = capsys.readouterr().out
    assert "Rank r of the shared update. (default: 16)" in " ".join(listed["--help"].split())
    ours = {f.name for cls in TYPES[:3] for f in fields(cls)} | {"rule", "p", "skip_frozen_loops", "loop_loss"}
    assert all(f"  --{name} " in listed["--help"] for name in {*ours, "learning_rate", "output_dir"})
    assert "--torch_compile_mode" not in listed["--help"]
    assert all(f"  --{f.name} " in listed["--help_all"] for cls in TYPES for f in fields(cls) if f.init)
