"""The command `loopdropout`: from a clone, and from a wheel that is installed far away from it."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from processes import python

from loopdropout_trainer import command_line
from loopdropout_trainer.command_line import commands, main
from loopdropout_trainer.settings.recipe import RecipeError, load_recipe, recipe_path, recipes_folder


def test_every_script_is_a_command_and_help_says_what_it_does(capsys):
    main(["--help"])
    out = capsys.readouterr().out
    scripts = {path.stem: path for path in (ROOT / "recipes").glob("*.py") if not path.stem.startswith("make_")}
    assert commands() == scripts
    assert all(f"  {name} " in out and command_line.summary(script) in out for name, script in scripts.items())
    with pytest.raises(SystemExit, match="2"):
        main(["train", "x.yaml"])
    assert capsys.readouterr().err.startswith("loopdropout: There is no command `train x.yaml`; valid are ")


def test_the_recipes_are_listed_and_copied_once(tmp_path, capsys):
    main(["recipes"])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert not [text for text in lines.values() if "pip install" in text or "recipes/sweep.py" in text]
    listed = set(lines)
    shipped = {path.relative_to(recipes_folder()).as_posix() for path in recipes_folder().rglob("*.yaml")}
    assert listed == shipped
    assert {"quickstart.yaml", "metamath_gsm/lora.yaml"} <= listed
    main(["--words"])  # for the shell's completion
    assert set(capsys.readouterr().out.split()) == {*commands(), "recipes", *shipped}
    main(["recipes", "copy", str(tmp_path / "mine")])
    assert (tmp_path / "mine" / "metamath_gsm" / "lora.yaml").is_file()
    (tmp_path / "mine" / "sft.py").write_text("changed")
    with pytest.raises(SystemExit, match="2"):
        main(["recipes", "copy", str(tmp_path / "mine")])
    assert (tmp_path / "mine" / "sft.py").read_text() == "changed"


def run(command):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


IMPORTS = {
    "before transformers": "import loopdropout_trainer, transformers",
    "after transformers": "import transformers, loopdropout_trainer",
    "after somebody looked for it": "from importlib.util import find_spec; find_spec('transformers')\n"
    "import loopdropout_trainer; find_spec('transformers')\nimport trl",
}


@pytest.mark.parametrize("order", IMPORTS)
def test_the_families_are_registered_in_whatever_order_packages_are_imported(order):
    code = f"{IMPORTS[order]}\nfrom transformers import AutoModelForCausalLM, AutoConfig\n"
    code += "for name in ('ouro', 'lds'): print(type(AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **tiny))))"
    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    done = run([sys.executable, "-c", f"tiny = {tiny}\n{code}"])
    assert "OuroForCausalLM" in done.stdout and "LoopusForCausalLM" in done.stdout
    assert not done.stderr  # in a user's program it is silent


def imported_by(*arguments):
    """The modules that a command line of `loopdropout` has imported when it ends, and its exit code."""
    code = "import sys, atexit\natexit.register(lambda: print(*sys.modules, sep='\\n'))\n"
    code += "from loopdropout_trainer.command_line import main; main()"
    done = run([sys.executable, "-c", code, *arguments])
    return set(done.stdout.splitlines()), done.returncode


@pytest.mark.parametrize("words", ["--help", "--version", "--words", "recipes", "no such command", "report --help"])
def test_light_commands_import_neither_torch_nor_transformers(words):
    modules, _ = imported_by(*words.split())
    assert "loopdropout_trainer.errors" in modules
    assert not modules & {"torch", "transformers", "trl", "datasets", "pandas", "numpy"}


MORE = [pytest.param(command, marks=pytest.mark.slow) for command in ("dpo", "grpo")]  # which read recipes as sft does


@pytest.mark.parametrize("command", ["sft", "evaluate", *MORE])
def test_a_mistake_in_a_recipe_is_found_before_what_only_training_needs_is_imported(command, tmp_path):
    (tmp_path / "recipe.yaml").write_text("learning_rat: 1\n")
    modules, code = imported_by(command, str(tmp_path / "recipe.yaml"))
    assert code == 2 and "loopdropout_trainer.settings.parser" in modules
    assert not modules & {f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "grpo")}
    assert not modules & {"evaluate", "scipy.stats", "requests", "plotnine", "optuna", "lm_eval"}


def test_public_names_come_when_they_are_asked_for():
    code = "import pickle, pydoc, sys, loopdropout_trainer as package\n"
    code += "assert 'torch' not in sys.modules and 'LoopDropoutConfig' in dir(package)\n"
    code += "from loopdropout_trainer import *\nassert LoopDropoutConfig is package.LoopDropoutConfig\n"
    code += "assert pickle.loads(pickle.dumps(LoopDropoutConfig)) is LoopDropoutConfig\n"
    code += "assert 'class LoopDropoutSFTTrainer' in pydoc.render_doc(package, renderer=pydoc.plaintext)\n"
    code += "print(hasattr(package, 'nonsense'))"
    assert run([sys.executable, "-c", code]).stdout == "False\n"


def test_a_reader_may_stop_early():
    done = run(["bash", "-c", f"{sys.executable} -m loopdropout_trainer recipes | head -1; exit ${{PIPESTATUS[0]}}"])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_recipe_is_found_from_any_folder_and_a_file_of_the_users_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart.yaml", "recipes/quickstart.yaml"):
        assert recipe_path(name) == str(recipes_folder() / "quickstart.yaml")
        assert load_recipe(name)["p"] == 0.5
    for name in ("./quickstart.yaml", "recipes/../quickstart.yaml", str(tmp_path / "quickstart.yaml"), "missing.yaml"):
        assert recipe_path(name) == name  # a path is the user's own file, or none
    Path("quickstart.yaml").write_text("p: 0.1\n")
    assert recipe_path("quickstart.yaml") == "quickstart.yaml"
    assert load_recipe("quickstart.yaml") == {"p": 0.1}

    sweep = load_recipe("recipes/sweeps/metamath_gsm_sharing.yaml")  # a sweep finds what it names from any folder
    for name in (sweep["recipe"], *(method for method in sweep["methods"] if method.endswith(".yaml"))):
        assert load_recipe(name)["preparation"] == "metamath_gsm"
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe("recipes/no_such.yaml")


@pytest.mark.build
def test_a_wheel_works_outside_of_the_clone(tmp_path):
    """Build and install it with the standard tools, without their isolation, which would need a network."""
    pytest.importorskip("setuptools")
    run = functools.partial(python, fresh=True)
    source, site = tmp_path / "source", tmp_path / "site"
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    files = subprocess.run(listed, check=True, capture_output=True, text=True, cwd=ROOT).stdout.split("\n")
    for name in filter(None, files):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    run(*pip, "install", "--no-deps", "--target", str(site), str(wheel))
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    elsewhere = {"env": env, "cwd": tmp_path}
    assert "quickstart.yaml" in run(site / "bin/loopdropout", "recipes", **elsewhere)
    command = ("-m", "loopdropout_trainer")
    plan = run(*command, "sft", "quickstart.yaml", "--dry_run", "true", **elsewhere)
    assert "tiny_ouro" in plan and "trainable parameters" in plan
    sweep = ("sweep", "sweeps/metamath_gsm_sharing.yaml", "--print_commands", "true")
    jobs = run(*command, *sweep, **elsewhere).splitlines()
    assert len(jobs) == 30 and all("recipes/sft.py" in job for job in jobs)  # six methods at five rates
