"""The import of the package, its dependencies, and the command `loopdropout`, from a clone and from a wheel."""

import configparser
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trl
from packaging.requirements import Requirement
from packaging.version import Version

from helpers.errors import user_error
from helpers.files import ROOT, load_script
from helpers.processes import Interpreter, python
from loopdropout_trainer import __version__, cli, files
from loopdropout_trainer.files import recipe_names, recipes_folder
from loopdropout_trainer.hints import recipe_hint


@pytest.fixture(scope="module")
def run():
    """`run("-c", CODE)`: a program in a process that has imported the configuration of trainers, but not its models."""
    with Interpreter("loopdropout_trainer.training.config") as interpreter:
        yield interpreter.run


def test_help_lists_every_script(capsys):
    cli.run(["--help"])
    out = capsys.readouterr().out
    assert {"sft", "evaluate"} <= cli.scripts().keys() and all(f"\n  {name} " in out for name in cli.scripts())
    with user_error("Unknown command 'stf'. Did you mean 'sft'"):
        cli.run(["stf", "x.yaml"])


def test_show_prints_valid_names_before_the_error_of_a_wrong_one(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    wrong = f"The folder {tmp_path}/empty holds neither a model nor an adapter.* The folder nowhere/x/y does not exist"
    with user_error(wrong):
        load_script("recipes/show.py").main(["tiny-ouro", f"{tmp_path}/empty", "tiny-ouro", "nowhere/x/y"])
    assert capsys.readouterr().out.count("kind          base model\n") == 2


def test_recipes_are_listed_by_command(capsys):
    cli.run(["recipes", "--help"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("`loopdropout recipes gsm8k sweep` lists those with these words, and ")
    assert lines[0] == "loopdropout sft" and re.match("  quickstart.yaml +Loop Dropout against LoRA", lines[1])
    assert sorted(line.split()[0] for line in lines if line.startswith("  ")) == recipe_names()
    commands = [line.removeprefix("loopdropout ") for line in lines if not line.startswith("  ")]
    assert {"dpo", "grpo", "sweep", "evaluate", "report --tables"} <= {*commands}
    sweeps = lines[lines.index("loopdropout sweep") :]
    assert "  sweeps/metamath_gsm.yaml" in {line[:27].rstrip() for line in sweeps}


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_begins_with_a_sentence_about_it(name):
    sentence = cli.find_description((ROOT / "recipes" / name).read_text())
    assert re.fullmatch(r"[A-Z][^;]* .* .*\.", sentence.replace(";", ",")) and len(sentence) < 200, sentence
    assert not sentence.startswith("For ") and not re.search(r"\.(py|sh) |docs/own_data|\bdo\b", sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# loopdropout sft a.yaml\n# A b\n# c in d.yaml. The rest.\n", "A b c in d.yaml."),
        ("# for sweep in *; do python x; done\n#\n# A b:\n#     loopdropout chat\n# More.\n", "A b."),
        ("rule: lora  # not it\n", ""),
    ],
)
def test_description_is_the_first_sentence(text, sentence):
    assert cli.find_description(text) == sentence


def test_recipe_is_printed_by_its_name(capsys):
    for name in ("quickstart", "quickstart.yaml"):
        cli.run(["recipes", name])
        assert capsys.readouterr() == ((ROOT / "recipes/quickstart.yaml").read_text(), "")
    cli.run(["recipes", "gsm8k"])
    printed, hint = capsys.readouterr()
    assert printed == (ROOT / "recipes/gsm8k.yaml").read_text()
    assert hint.startswith("More recipes have gsm8k in their names (") and "`loopdropout recipes gsm8k sweep`" in hint
    cli.run(["recipes", "gsm8k.yaml"])
    assert capsys.readouterr() == (printed, "")
    cli.run(["recipes", "small.yaml"])
    assert capsys.readouterr() == ((ROOT / "recipes/studies/small.yaml").read_text(), "")
    with user_error("The package has no recipe 'quckstart'. Did you mean 'quickstart.yaml'"):
        cli.run(["recipes", "quckstart"])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("small.yaml", "Did you mean 'studies/small.yaml'?"),
        ("recipes/small.yaml", "Did you mean 'studies/small.yaml'?"),
        ("smal.yaml", "Did you mean 'studies/small.yaml'?"),
        ("gsm8k", "Did you mean 'gsm8k.yaml'?"),
        ("gsm8k_p.yaml", "Did you mean 'sweeps/gsm8k_p.yaml'?"),
        ("sweeps.yaml", "Did you mean the folder 'sweeps'? `loopdropout recipes sweeps` lists its recipes."),
        ("lora.yaml", "`loopdropout recipes lora.yaml` lists the recipes of this name."),
        ("studdies", "Did you mean the folder 'studies'? `loopdropout recipes studies` lists its recipes."),
    ],
)
def test_wrong_name_of_a_recipe_has_a_hint(name, hint):
    """It may lack the folder or the ending, or be a folder."""
    assert recipe_hint(name) == f" {hint}"


def test_wrong_name_of_a_file_means_a_file():
    assert recipe_hint("swep.yaml", ["sweep.yaml"]) == " Did you mean 'sweep.yaml'?"  # and not the folder 'sweeps'


def test_recipes_are_listed_by_words(capsys):
    """Of a model, data, a method or a command, also if a recipe has them by `extends` or by the recipe of a sweep."""

    def listed(words):
        cli.run(["recipes", *words.split()])
        *lines, last = capsys.readouterr().out.splitlines()
        names = [line.split()[0] for line in lines if line.startswith("  ")]
        assert last.startswith(f"{len(names)} of {len(recipe_names())} recipes match {shlex.join(words.split())}. ")
        return {*names}

    assert listed("DPO") == listed("dpo") and "grpo/arithmetic.yaml" not in listed("dpo")
    assert {"gsm8k.yaml", "gsm8k/lora.yaml", "sweeps/gsm8k_p.yaml"} <= listed("openai/gsm8k")
    of_sweeps = listed("gsm8k sweep")
    assert {name.split("/")[0] for name in of_sweeps} == {
        "studies",
        "sweeps",
    } and "sweeps/gsm8k_ouro_2.6b.yaml" in of_sweeps
    assert "sweeps/gsm8k_ouro_2.6b.yaml" in listed("ouro-2.6b")
    assert {name.rpartition("/")[2] for name in listed("lora.yaml")} == {"lora.yaml"}
    assert listed("loop_dropout huginn") == listed("Loop-Dropout huginn")
    with user_error("The package has no recipe 'gsm8k nothing'. `loopdropout recipes` lists"):
        cli.run(["recipes", "gsm8k", "nothing"])
    with user_error("The package has no recipe 'studdies'. Did you mean the folder 'studies'"):
        cli.run(["recipes", "studdies"])


@pytest.mark.parametrize(("words", "meant"), [("train", "sft"), ("finetune", "sft"), ("generate", "chat")])
def test_habitual_command_has_a_hint(words, meant):
    with user_error(f"Unknown command '{words}'. Did you mean '{meant}'"):
        cli.run([words, "quickstart.yaml"])


def test_version_has_all_libraries(capsys):
    cli.run(["--version"])
    (line,) = capsys.readouterr().out.splitlines()
    for name in ("loopdropout-trainer", "Python", "torch", "transformers", "trl", "peft", "accelerate", "datasets"):
        assert re.search(rf"(^|, ){name} \d", line)


def test_version_has_the_commit_of_a_clone(tmp_path, monkeypatch):
    """Also of a detached head, of packed references and of a further worktree. Without git there is the version alone."""
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "package")
    describe = files.describe_version.__wrapped__
    assert describe() == __version__
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").touch()
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "One"], ["worktree", "add", "-q", "other"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert describe() == f"{__version__}, commit {commit}"
    (tmp_path / "file").write_text("changed")
    assert describe() == f"{__version__}, commit {commit}, with changes"
    assert files._read_commit(tmp_path / "other/.git") == commit
    subprocess.run([*git, "pack-refs", "--all"], check=True)
    assert files._read_commit(tmp_path / ".git") == files._read_commit(tmp_path / "other/.git") == commit
    subprocess.run([*git, "checkout", "-q", "--detach"], check=True)
    monkeypatch.setenv("PATH", "")
    assert describe() == f"{__version__}, commit {commit}"
    (tmp_path / ".git/HEAD").unlink()
    assert describe() == __version__


def test_command_runs_its_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["loopdropout"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit, match="0"):
        cli.run(["merge", "--help"])
    assert "usage: loopdropout merge ADAPTER" in capsys.readouterr().out


MODELING = "loopdropout_trainer.models lm_eval transformers.trainer"
LIGHT = {
    "--help": "torch transformers trl datasets pandas",
    "recipes": "torch transformers trl datasets pandas",
    "sft --help": f"datasets pandas {MODELING}",
    "sft quickstart.yaml --learning_rat 1": f"datasets pandas {MODELING}",
    "sft quickstart.yaml --dry_run true": MODELING,
}
"""Modules that commands do without, since their imports take seconds.

Nothing keeps PEFT and transformers' modeling code out of `sft`: `transformers.trainer_utils`, which TRL's configuration needs,
imports PEFT if it is installed.
"""


IMPORTS = """
import json, sys
from loopdropout_trainer.cli import main
steps = []
for words in sys.argv[1:]:
    sys.argv[1:] = words.split()
    try:
        main()
        exit_code = 0
    except SystemExit as exit:
        exit_code = exit.code
    steps.append([exit_code, [*sys.modules]])
print(json.dumps(steps))
"""


@pytest.fixture(scope="module")
def imports():
    """Of each command of `LIGHT`: its exit code, and all modules after it. Since the lightest come first, one process does."""
    lines = python("-c", IMPORTS, *LIGHT, cwd=ROOT, fresh=True).splitlines()
    return dict(zip(LIGHT, json.loads(lines[-1]), strict=True))


@pytest.mark.parametrize("words", LIGHT)
def test_commands_import_only_what_they_use(imports, words):
    exit_code, modules = imports[words]
    assert exit_code == (2 if "learning_rat " in words else 0)
    unneeded = {*LIGHT[words].split()}
    if Version(trl.__version__) < Version("1.10"):
        unneeded -= {"pandas"}  # TRL's configuration of a training imports it
    assert not {*modules} & unneeded


def test_families_are_there_when_they_are_used(run):
    code = """
import sys
from loopdropout_trainer import LoopDropoutConfig
from transformers import AutoConfig
assert "loopdropout_trainer.models" not in sys.modules
print(AutoConfig.for_model("ouro").model_type)
"""
    done = run("-c", code)
    assert (done.stdout, done.stderr) == ("ouro\n", "")


def test_importing_the_package_changes_no_library(run):
    """Also before PEFT is imported, its classes in transformers are its own."""
    code = """
import loopdropout_trainer.training.config, sys
from transformers import integrations, trainer_utils
import peft
assert trainer_utils.PeftModel is peft.PeftModel and trainer_utils.PeftMixedModel is peft.PeftMixedModel
assert integrations.is_kubeflow_available.__module__.startswith("transformers.")
"""
    done = run("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_foreign_class_is_described_when_imported(run):
    code = "import sys\nassert 'loopdropout_trainer.models' not in sys.modules\n"
    code += "from loopdropout_trainer.looped import DESCRIPTIONS\nfrom transformers import HrmTextForCausalLM\n"
    assert run("-c", f"{code}print(HrmTextForCausalLM in DESCRIPTIONS)").stdout == "True\n"


def test_import_warns_about_untested_version(tmp_path):
    folder = tmp_path / "transformers-99.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", "import loopdropout_trainer"]
    (line,) = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env).stderr.splitlines()
    assert "transformers 99.0 is installed" in line and "transformers>=5.16.1,<5.25" in line


def test_constraints_pin_every_direct_dependency():
    lines = (ROOT / "constraints.txt").read_text().replace("_", "-").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "evaluate", "deepspeed", "lm-eval"):
        assert Version(pins[name])


def test_lowest_versions_are_the_bounds_of_setup_cfg():
    done = subprocess.run([ROOT / ".ci/lowest"], capture_output=True, text=True, check=True)
    pins = dict(line.split("==") for line in done.stdout.split())
    assert pins.keys() == {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "evaluate"}
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for requirement in map(Requirement, config["options"]["install_requires"].split("\n")[1:]):
        if requirement.name in pins:
            assert f">={pins[requirement.name]}" in str(requirement.specifier).split(",")
    assert not re.search(r"==\d", (ROOT / ".ci/latest").read_text())


@pytest.mark.build
def test_wheel_works_outside_of_the_clone(tmp_path):
    pytest.importorskip("setuptools")
    build = functools.partial(python, fresh=True)
    clone, site = tmp_path / "clone", tmp_path / "site"
    ignored = shutil.ignore_patterns("outputs", "build", "*.egg-info", "__pycache__", ".[!c]*")
    shutil.copytree(ROOT, clone, ignore=ignored)
    build("setup.py", "--quiet", "sdist", "-d", str(tmp_path), cwd=clone)
    shutil.unpack_archive(*tmp_path.glob("*.tar.gz"), tmp_path)
    (source,) = tmp_path.glob("loopdropout_trainer-*/")
    files = [path.relative_to(clone) for path in clone.rglob("*") if "egg-info" not in str(path)]
    assert [file for file in files if not (source / file).exists()] == []
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    build(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    build(*pip, "install", "--no-deps", "--target", str(site), str(wheel))
    elsewhere = {"env": {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}, "cwd": tmp_path}
    assert "quickstart.yaml" in build(site / "bin/loopdropout", "recipes", **elsewhere)
    plan = build("-m", "loopdropout_trainer", "sft", "quickstart.yaml", "--dry_run", "true", **elsewhere)
    assert "tiny-ouro" in plan and "150 steps" in plan


@pytest.mark.build
def test_mypy_finds_an_editable_installation(tmp_path):
    """The installation of the README, without the libraries: mypy reads the paths of the environment's interpreter."""
    pytest.importorskip("mypy")
    clone, wheels, environment = tmp_path / "clone", tmp_path / "wheels", tmp_path / "venv"
    shutil.copytree(
        ROOT, clone, ignore=shutil.ignore_patterns("outputs", "build", "*.egg-info", "__pycache__", ".[!c]*")
    )
    wheels.mkdir()
    build = "from setuptools.build_meta import build_editable; build_editable('../wheels')"
    python("-c", build, cwd=clone, fresh=True)
    python("-m", "venv", "--without-pip", environment, fresh=True)
    (site,) = environment.glob("lib/python*/site-packages")
    shutil.unpack_archive(*wheels.glob("*.whl"), site, format="zip")
    code = "from loopdropout_trainer import LoopDropoutSFTTrainer\nreveal_type(LoopDropoutSFTTrainer.draw_gates)\n"
    (tmp_path / "example.py").write_text(code)
    words = ["--python-executable", environment / "bin/python", "--cache-dir", tmp_path / "cache"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    out = python(
        "-m",
        "mypy",
        *words,
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "example.py",
        cwd=tmp_path,
        env=env,
        fresh=True,
    )
    assert "def (self: loopdropout_trainer.training" in out  # the type of a method, instead of Any


@pytest.mark.parametrize("name", [name for name in recipe_names() if not name.startswith("accelerate/")])
def test_commands_in_recipes_work_without_a_clone(name):
    """A recipe's first line for `loopdropout` has its own command and name. Only launchers need the scripts of a clone."""
    text = (recipes_folder() / name).read_text(encoding="utf-8")
    assert "python recipes/" not in text
    own = name
    if name.startswith("tables/"):
        own = f"outputs --tables {Path(name).stem}"
    command = cli.command_of(name, text).removesuffix(" --tables")
    lines = [line.lstrip("# ") for line in text.splitlines() if re.match(rf"# *loopdropout {command} ", line)]
    assert not lines or lines[0].startswith(f"loopdropout {command} {own}"), lines
    assert lines or not name.startswith(("sweeps/", "tables/", "studies/"))
