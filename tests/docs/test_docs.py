"""Test the links, snippets and commands of the README and the documentation, the notebook and the site."""

import csv
import dataclasses
import gzip
import json
import re
import shlex
import shutil
from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from matplotlib import pyplot
from scipy.ndimage import binary_dilation
from trl import SFTConfig

import loopdropout_trainer
from helpers.files import ROOT, write_lines
from helpers.processes import Program, python
from loopdropout_trainer.files import recipes_folder
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.looped import FAMILIES, SUPPORTED
from loopdropout_trainer.settings.recipe import load_recipe
from loopdropout_trainer.training.config import (
    GateConfig,
    LoopDropoutConfig,
    LoopDropoutDPOConfig,
    LoopDropoutGRPOConfig,
)


PAGES = sorted((ROOT / "docs").rglob("*.md"))
CARD = "loopdropout_trainer/tiny_ouro/README.md"
NAMES = [
    "README.md",
    "CONTRIBUTING.md",
    "recipes/README.md",
    CARD,
    *(page.relative_to(ROOT).as_posix() for page in PAGES),
]
REPOSITORY = "https://github.com/someone/loopdropout-trainer"
TESTED_ELSEWHERE = {"docs/own_data.md", "docs/training_loops.md", "docs/extending.md"}
"""Pages that test_data.py, test_loop_dropout.py and test_extending.py run."""
CODE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHORT = "--max_steps 2 --logging_steps 1"
CHEAP = {
    "sft": f"{SHORT} --benchmark_limit 2 --save_steps 2 --eval_num_loops 4",
    "dpo": f"{SHORT} --num_train_examples 16 --num_eval_examples 4",
    "grpo": f"{SHORT} --num_train_examples 16 --num_eval_examples 4 --max_completion_length 8",
    "evaluate": "--benchmark_limit 2",
    "diagnose": "--num_examples 4",
    "sweep": "--dry_run true",
}
"""Options that make commands cheap."""
COMMAND = re.compile(r"(?:recipes/((?!make_)\w+)\.py|loopdropout(?:_trainer)?) +(.*)")
LEFT_OUT = {
    r"pip |export |echo |git ": "they set up an environment, which .ci/run does",
    r"pytest|ruff ": "the checks themselves, which .ci/run runs",
    r"python -m loopdropout_trainer\.lm_eval ": "evaluation/test_lm_eval.py runs it",
    r"python benchmarks/": "they measure for minutes, and replication/test_benchmarks.py runs the parts of gpu.py",
    r"(for .*)?python docs/replication/": "they train for hours, and the tests of replication/ run the parts",
    r"for .* recipes/sweep\.py ": "they train for hours, and commands/test_sweep.py runs short sweeps",
    r"loopdropout serve ": "it does not end, and integrations/test_server.py and test_serving.py run it",
    r"vllm |lm_eval ": ".ci/serving runs vLLM",
    r"axolotl |swift ": ".ci/integrations runs both programs",
    r"python llama\.cpp|llama-cli ": "llama.cpp is not installed",
}
"""Commands of the pages that `test_commands_run` leaves out, with the reason."""
NEEDS_HUB = re.compile(r"cannot be (loaded|found)|offline|does not exist|there is no folder", re.IGNORECASE)


LOCAL = {
    "ByteDance/Ouro-1.4B": str(ROOT / "loopdropout_trainer/tiny_ouro"),
    'chat_template="ouro"': 'chat_template="tulu2"',
    "limit=100": "limit=2",
}
"""Replacements of models and tasks from the Hub in snippets."""
SETTINGS = {
    "docs/datasets.md": ["sft mine.yaml --dry_run true"] * 2,
    "docs/evaluation.md": ["evaluate mine.yaml none --benchmark_limit 2 --max_new_tokens 8"],
    "docs/reports.md": ["report outputs/quickstart --tables mine.yaml"],
    "docs/runs.md": ["sweep mine.yaml --dry_run true"],
    "docs/sft.md": ["sft mine.yaml --dry_run true"],
}
"""Commands that read the YAML blocks of each page. test_data.py reads the ones of docs/own_data.md."""
PRELUDE = """
import sys

sys.path.insert(0, "recipes")
from loopdropout_trainer import load_model, use_gates
from loopdropout_trainer.tokenizers import load_tokenizer

tokenizer, model = load_tokenizer("tiny-ouro"), load_model("outputs/quickstart")
batch = tokenizer("1 + 1 = 2", return_tensors="pt")
"""
"""Names that snippets use without a definition."""


def pages_with(language):
    return [name for name in NAMES if code(ROOT / name, language) and name not in TESTED_ELSEWHERE]


def commands_of(name):
    """Yield each command in the bash blocks of a page, and its script and words if `test_commands_run` runs it."""
    text = "".join(code(ROOT / name, "bash")).replace("\\\n", " ").replace(" && ", "\n")
    for line in text.splitlines():
        match = COMMAND.search(line)
        if not match or any(re.match(pattern, line) for pattern in LEFT_OUT):
            yield line, None, []
            continue
        words = shlex.split(match[2], comments=True)
        yield (line, match[1], words) if match[1] else (line, words[0], words[1:])


def code(page, language):
    return [text for name, text in CODE.findall(page.read_text(encoding="utf-8")) if name == language]


def anchors(page):
    """The anchors of the titles of a page, as on GitHub."""
    titles = re.findall(r"^#+ +(.*)", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", NAMES)
def test_links_exist(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert "://" in target or file.exists() and (not anchor or anchor in anchors(file)), target


@pytest.mark.parametrize("name", NAMES)
def test_no_marked_number_begins_a_line(name):
    """In standard Markdown, a comment at the start of a line ends its paragraph or list."""
    text = CODE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    lines = re.sub(r"(?<=\n\n)<!-- [\w ]+: (begin|end) -->(?=\n\n)", "", text).splitlines()  # of a written section
    assert [line for line in lines if re.match(r"[\s>]*(?:[-*] +)?<!--", line)] == []


def test_readme_begins_with_two_commands():
    """Each command does all of its set-up, so that it works on a fresh machine after `git clone`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    language, block = CODE.search(text).groups()
    commands = block.splitlines()
    assert language == "bash" and len(commands) == 2 and "git clone" in text[: text.index(block)]
    install = r'pip install -c constraints\.txt torch==[\d.]+ -e "\.\[\w+\]" && '
    for command, end in zip(commands, ("loopdropout sft quickstart.yaml", "pytest -n 2"), strict=True):
        assert re.fullmatch(install + re.escape(end), command)


def test_costs_are_those_of_the_sweeps():
    """The costs of the paper's tables are the sums of the head lines of the sweeps."""
    hours, trainings = defaultdict(float), defaultdict(int)
    for path in (ROOT / "recipes/sweeps").glob("*.yaml"):
        head = path.read_text(encoding="utf-8").replace("\n# ", " ")
        number, shared = re.search(r"Costs: (\d+) trainings(?:, (?:of which )?(\d+|all))?", head).groups()
        group = path.stem.split("_")[0] + "_2.6b" * path.stem.startswith("metamath_gsm_ouro_2.6b")
        trainings[group] += int(number) - int(number if shared == "all" else shared or 0)
        for amount, unit in re.findall(r"about ([\d.]+) (hours|minutes) of one (?:H100|GPU)", head):
            hours[group] += float(amount) / (60 if unit == "minutes" else 1)
    rows = re.findall(
        r"^\| `.*\| (\d+) \| (\d+) \| .*(?:paper's|assumed)", (ROOT / "recipes/README.md").read_text(), re.MULTILINE
    )
    groups = ("metamath", "metamath_2.6b", "gsm8k")
    assert rows == [(str(trainings[group]), f"{hours[group]:.0f}") for group in groups]
    assert sum(map(round, hours.values())) == 555 and sum(trainings.values()) - sum(int(n) for n, _ in rows) == 19


def read_seeds_of_studies():
    """Return the seeds that ran by study. A recipe may name more."""
    seeds = defaultdict(set)
    with gzip.open(ROOT / "docs/replication/runs.csv.gz", "rt", encoding="utf-8") as file:
        for run in csv.DictReader(file):
            study = run["study"]
            if run["method"].startswith("annealed@"):
                study = "map_annealed"
            seeds[study].add(int(run["seed"]))
    return seeds


def test_used_seeds_are_those_that_ran():
    """And README leads to them, and to how to cite, within two clicks."""
    ran = read_seeds_of_studies()
    section = (ROOT / "docs/seeds.md").read_text(encoding="utf-8").partition("## Which seeds were used")[2]
    rows = re.findall(r"^\| .* \| `(.*)` \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 11
    for name, text in rows:
        numbers = [int(number) for number in re.findall(r"\d+", text)]
        if name.endswith(".py"):
            text = (ROOT / name).read_text(encoding="utf-8")
            seeds, first = (re.search(rf"\b{field}=(.*)", text)[1] for field in ("seeds", "selection_seed"))
            assert numbers == [int(number) for number in re.findall(r"\d+", seeds + first)]
        else:
            recipe = load_recipe(ROOT / "recipes" / name)
            named = recipe["seeds"] if "seeds" in recipe else [recipe["seed"]]
            study = name.removesuffix(".yaml").rpartition("/")[2]
            assert numbers == sorted(ran.get(study, named)) and {*numbers} <= {*named}, name
    readme, index = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/README.md"))
    assert "(docs/README.md)" in readme and "(seeds.md#which-seeds-were-used)" in index and "(citing.md)" in index


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.png")), ids=lambda path: path.stem)
def test_figures_can_be_read_on_dark_pages(path):
    """The background is the page's own. So nothing black may touch it, but black text in a light cell may be."""
    pixels = pyplot.imread(path)
    is_clear = pixels[..., 3] == 0
    is_black = (pixels[..., :3].max(axis=-1) < 0.2) & (pixels[..., 3] > 0.8)
    assert is_clear[:8].all() and is_clear[:, :8].any()
    assert not (is_black & binary_dilation(is_clear, iterations=4)).any()


def test_search_splits_words_at_parentheses():
    separator = re.search(r"separator: '(.*)'", (ROOT / "mkdocs.yml").read_text())[1]
    for text, word in (("base model (QLoRA)", "QLoRA"), ("`deepspeed`", "deepspeed"), ("ZeRO, DDP", "DDP")):
        assert word in re.split(separator, text)
    section = (ROOT / "docs/sft.md").read_text().split("## Loss curve\n")[1].split("\n## ")[0]
    assert {"plot", "loss", "curve", "plot_loss"} <= {*re.split(separator, section)}


def test_reference_has_every_public_name_and_field():
    page = (ROOT / "docs/reference.md").read_text()
    names = re.findall(r"^::: loopdropout_trainer\.(\w+)$", page, re.MULTILINE)
    assert {*loopdropout_trainer.__all__} <= {*names}
    rows = re.findall(
        r"^\| \[(?:training|gates and depth|models)\](.*)\| `loopdropout_trainer` \|$", page, re.MULTILINE
    )
    assert len(rows) == 3 and {*re.findall(r"`(\w+)`", "".join(rows))} == {*loopdropout_trainer.__all__}
    importable = []
    for listed, module in re.findall(r"^\| .*?\| (`.*`) \| `(loopdropout_trainer[\w.]*)` \|$", page, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", listed):
            assert hasattr(import_module(module), name), f"{module}.{name}"
            importable.append(f"{module}.{name}")
    assert sorted(importable) == sorted(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    for config in (GateConfig, LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig):
        fields = {field.name for field in dataclasses.fields(config)}
        documented = re.findall(r"^    +(\w+) \(`.*\*optional\*.*\):$", config.__doc__, re.MULTILINE)
        names = dict.fromkeys(
            [*config.__annotations__, *GateConfig.__annotations__]
        )  # the own fields, and those of the gates
        assert documented == [name for name in names if name in fields]


def test_error_about_other_models_names_the_families():
    listed = re.search(r"run the same layers K times \((.*?)\)", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert set(re.split(r",\s", listed)) == {*FAMILIES}
    modules = {path.stem for path in (ROOT / "loopdropout_trainer/models").glob("*.py")}
    assert {name.lower().replace("-", "_") for name in FAMILIES} < modules
    assert SUPPORTED.startswith("The supported families are Ouro, Huginn") and SUPPORTED.endswith(" and HRM-Text.")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="TRL accepts its defaults on a GPU")
def test_trl_config_without_a_gpu_is_explained(tmp_path):
    """TRL's own class fails before this package sees it."""
    with pytest.raises(ValueError, match="bf16/gpu") as caught:
        SFTConfig(str(tmp_path))
    SFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    start = str(caught.value).partition(".")[0]
    assert start in (ROOT / "docs/troubleshooting.md").read_text()
    for page in ("docs/sft.md", "docs/troubleshooting.md"):
        assert "`use_cpu=True, bf16=False`" in (ROOT / page).read_text()


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder with the scripts and a short quickstart."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("recipes", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name)
    python("recipes/sft.py", "recipes/quickstart.yaml", *CHEAP["sft"].split(), cwd=folder)
    return folder


@pytest.mark.build
@pytest.mark.parametrize("name", pages_with("python"))
def test_snippets_run(clone, name):
    for snippet in code(ROOT / name, "python"):
        if "127.0.0.1:8000" in snippet:  # it needs a server, and integrations/test_server.py runs one
            continue
        for published, local in LOCAL.items():
            snippet = snippet.replace(published, local)
        python("-c", PRELUDE + snippet.replace("../outputs", "outputs"), cwd=clone)


@pytest.mark.build
@pytest.mark.parametrize("name", pages_with("bash"))
def test_commands_run(clone, name):
    """Commands that need the Hub run until they ask for it."""
    for line, script, words in commands_of(name):
        if script:
            is_local = re.search("quickstart|arithmetic", line)
            cheap = CHEAP.get(script, "").split() if is_local else []
            start = [f"recipes/{script}.py"]
            if script == "recipes":  # the list of recipes has no script of its own
                start = ["-m", "loopdropout_trainer", "recipes"]
            program = Program(*start, *words, *cheap, cwd=clone)
            is_done = program.wait() == 0 or not is_local and NEEDS_HUB.search(program.stderr)
            assert is_done, f"{line}\n{program.stderr[-3000:]}"


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_run_or_left_out_for_a_reason(name):
    """So that no command of a page goes untested unseen. Blocks without a language have outputs only."""
    lines = [line for line, script, _ in commands_of(name) if not script]
    assert [line for line in lines if not any(re.match(pattern, line) for pattern in LEFT_OUT)] == []
    text = (ROOT / name).read_text(encoding="utf-8")
    outputs = [*code(ROOT / name, ""), *re.findall(r"(?<=\n\n)(?: {4}.*\n)+", CODE.sub("", text))]
    assert re.findall(r"^ *(?:loopdropout|python|accelerate|pip) .*", "".join(outputs), re.MULTILINE) == []


def read_trainings(text):
    """Yield the folder and the other settings of each command in a text that trains a recipe of the package."""
    text = re.sub(r"\\+\n", " ", text)  # docstrings have two backslashes
    for recipe, rest in re.findall(r"loopdropout (?:sft|dpo|grpo) (\S+\.yaml)([^\n`#]*)", text):
        if not (recipes_folder() / recipe).is_file():
            continue
        settings = {}
        for option in rest.split("--")[1:]:
            name, *values = option.split()
            settings[name] = values
        folder = " ".join(settings.pop("output_dir", [load_recipe(recipe)["output_dir"]]))
        for name in ("dry_run", "preview", "resume_from_checkpoint"):  # the same training
            settings.pop(name, None)
        yield folder, settings


def test_commands_of_a_page_train_other_settings_in_other_folders():
    """A reader runs the commands of a page one after the other, after the quickstart. A folder takes one training."""
    pages = [ROOT / name for name in NAMES]
    for path in [*pages, *(ROOT / "recipes").rglob("*.py"), ROOT / "loopdropout_trainer/cli.py"]:
        settings_of = {"outputs/quickstart": {}}
        for folder, settings in read_trainings(path.read_text(encoding="utf-8")):
            assert settings_of.setdefault(folder, settings) == settings, f"{path}: {folder} has another training."


@pytest.mark.build
@pytest.mark.parametrize("name", [name for name in pages_with("yaml") if name != "docs/integrations.md"])
def test_yaml_blocks_are_read(clone, name):
    """.ci/integrations reads the blocks of docs/integrations.md."""
    questions = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(120)]
    roles = {"question": "user", "answer": "assistant"}
    chats = [{"messages": [{"role": roles[key], "content": row[key]} for key in row]} for row in questions]
    write_lines(clone / "my.jsonl", questions)
    write_lines(clone / "chats.jsonl", chats)
    for block, command in zip(code(ROOT / name, "yaml"), SETTINGS[name], strict=True):
        text = block.replace("ByteDance/Ouro-1.4B", LOCAL["ByteDance/Ouro-1.4B"]).replace(": ouro\n", ": tulu2\n")
        script, *words = command.split()
        if script in ("sft", "evaluate") and "model_name_or_path" not in text:
            text = f"extends: quickstart.yaml\noutput_dir: outputs/of_{(ROOT / name).stem}\n{text}"
        (clone / "mine.yaml").write_text(text, encoding="utf-8")
        shutil.rmtree(
            clone / "outputs" / "chat", ignore_errors=True
        )  # of the page's commands, by another name of the model
        python(f"recipes/{script}.py", *words, cwd=clone)


@pytest.mark.build
def test_quickstart_passes_mypy(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "quickstart.py").write_text(code(ROOT / "README.md", "python")[0])
    python("-m", "mypy", "--ignore-missing-imports", "quickstart.py", cwd=tmp_path, fresh=True)


def test_notebook_uses_one_thread():
    """Several threads take minutes instead of seconds on a CPU that other programs use, too."""
    cells = json.loads((ROOT / "recipes/quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    first = next(cell for cell in cells if cell["cell_type"] == "code")
    assert "torch.set_num_threads(1)\n" in first["source"]


def test_notebook_tables_have_units():
    tables = []
    for cell in json.loads((ROOT / "recipes/quickstart.ipynb").read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            lines = output.get("data", {}).get("text/plain", [])
            if len(lines) > 1:  # else the name of a figure
                tables.append("".join(lines))
    assert tables and all("(%)" in table for table in tables)


@pytest.mark.build
def test_notebook_runs(tmp_path):
    cells = json.loads((ROOT / "recipes/quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    parts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    python("-c", "\n".join(["import matplotlib", "matplotlib.use('agg')", *parts]), cwd=tmp_path)


@pytest.mark.build
def test_site_builds(tmp_path):
    pytest.importorskip("mkdocs")
    python("-m", "mkdocs", "build", "--strict", "-d", tmp_path, cwd=ROOT, fresh=True)
    text = re.sub("<[^>]+>", "", (tmp_path / "reference.html").read_text(encoding="utf-8"))
    assert "option(" not in text and "learning_rate=0.0001" in text
    questions, recipes = ((tmp_path / f"{name}.html").read_text(encoding="utf-8") for name in ("questions", "recipes"))
    assert 'href="recipes.html#the-papers-rows"' in questions and 'href="replication/plan.html"' in recipes
    assert 'href="questions.html">docs</a>' in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_quickstart_has_one_duration():
    """The README's first screen and the recipe's header say how long the same command takes."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "recipes/quickstart.yaml")]
    assert all("in 2 to 3 minutes" in re.sub(r"\s+", " ", text) for text in texts)


def test_page_of_sft_names_the_other_trainers_first():
    start, _, _ = (ROOT / "docs/sft.md").read_text().partition("```")
    assert "(reinforcement.md)" in start and "DPO and GRPO" in start


def test_site_has_no_links_to_programs(monkeypatch):
    """The site leaves programs out. A link to one would be dead there."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    hooks = import_module("site_hooks")
    links = {}
    for page in PAGES:
        source = page.relative_to(ROOT / "docs").as_posix()
        shown = SimpleNamespace(file=SimpleNamespace(src_uri=source))
        text = hooks.on_page_markdown(page.read_text(encoding="utf-8"), shown, {"repo_url": None})
        links[source] = re.findall(r"\]\((?!https?:)[^)#]*\.py[)#]", text)
    assert len(links) >= 30 and {source: found for source, found in links.items() if found} == {}


LINKS_OF_THE_SITE = [
    ("README.md", "[docs](docs/README.md)", "[docs](questions.md)", None),
    ("README.md", "[CONTRIBUTING.md](CONTRIBUTING.md)", "[CONTRIBUTING.md](REPO/CONTRIBUTING.md)", "`CONTRIBUTING.md`"),
    ("seeds.md", "[rows](../recipes/README.md#costs)", "[rows](recipes.md#costs)", None),
    ("replication/plan.md", "[start](../../README.md#x)", "[start](../README.md#x)", None),
    ("recipes.md", "[p](../docs/method.py)", "[p](REPO/docs/method.py)", "p (`docs/method.py`)"),
    ("sft.md", "```python\n[a](speed.md)[b](../ruff.toml)\n```", None, None),
    ("sft.md", "[a](speed.md#b), [b](https://c.de), [c](#d), rules[0](p)", None, None),
]  # fmt: skip


@pytest.mark.parametrize(("page", "text", "linked", "named"), LINKS_OF_THE_SITE)
def test_site_links_the_files_of_the_repository(page, text, linked, named, monkeypatch):
    """The index of questions and the recipes are pages, and other files are links if the repository has an address."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    hooks = import_module("site_hooks")
    linked = (linked or text).replace("REPO", f"{REPOSITORY}/blob/HEAD")
    shown = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    for repository, wanted in ((f"{REPOSITORY}/", linked), (None, named or linked)):
        converted = hooks.on_page_markdown(text, shown, {"repo_url": repository})
        if page == "README.md":  # whose text is that of the README
            assert text in (ROOT / page).read_text() and wanted in converted and text not in converted
        else:
            assert converted == wanted


def test_pages_name_every_rule_and_table():
    """Those of the package. Tables of the paper have a row in the page of the recipes, and figures do not."""
    page = (ROOT / "docs/sft.md").read_text(encoding="utf-8")
    table = re.search(r"\| `rule` \| gates in training \|\n(?:\|.*\n)+", page)[0]
    packaged = [name for name, rule in RULES.items() if rule.__module__.startswith("loopdropout_trainer.")]
    assert len(packaged) > 10 and [name for name in packaged if f"`{name}`" not in table] == []
    rows = "".join(re.findall(r"^\|.*\n", (ROOT / "recipes/README.md").read_text(encoding="utf-8"), re.MULTILINE))
    tables = [path.stem for path in ROOT.glob("recipes/tables/*.yaml") if not path.stem.startswith("figure_")]
    assert len(tables) > 10 and [name for name in tables if f"`{name}`" not in rows] == []
