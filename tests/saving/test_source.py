"""One table of what names are: each kind of folder and repository, the fields of its source, and what every command prints."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from helpers.errors import user_error
from helpers.files import TINY_OURO_PATH, load_script
from helpers.tiny import DORY, TINY, tiny_hrm
from loopdropout_trainer import load_adapter, load_model, merge_and_save
from loopdropout_trainer.evaluation import LoopedLM
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.results.run_files import read_results
from loopdropout_trainer.saving import loading
from loopdropout_trainer.saving.facts import ALL_KINDS
from loopdropout_trainer.saving.loading import ModelLoader, load
from loopdropout_trainer.saving.source import find_base, find_source, find_source_of
from loopdropout_trainer.serving.variants import ModelNames
from loopdropout_trainer.tokenizers import load_tokenizer


BASE = "ByteDance/Ouro-1.4B"
"""Name of the base model, the only one that the authors' format knows. Its files are those of tiny-ouro."""
MAIN, ADAPTER, MERGED = "a" * 40, "c" * 40, "d" * 40
V1 = "574fa66cb8bf5abdc979642d01cf2b79b16bfab1"
"""Commit that the authors' format requires."""
PROMPT = "Question: {question}\nAnswer:"
SETTINGS = {
    "preparation": "arithmetic", "num_train_examples": 8, "num_eval_examples": 4, "max_length": 64, "max_steps": 2,
    "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2, "bf16": "false",
    "dtype": "float32", "use_cpu": "true", "report_to": "none", "disable_tqdm": "true", "num_threads": 1,
    "num_sample_completions": 0,
}  # fmt: skip
SHORT = [f"--{name}={value}" for name, value in SETTINGS.items()] + ["--arithmetic_steps", "1", "2"]


class Hub:
    """A cache of the Hub's client, in which repositories are read without a network."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def put(self, repository, branch, commit, folder):
        place = self.folder / f"models--{repository.replace('/', '--')}"
        shutil.copytree(folder, place / "snapshots" / commit)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / branch).write_text(commit)
        return place / "snapshots" / commit


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    patch = pytest.MonkeyPatch()
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub = Hub(folder)
    hub.put(BASE, "main", MAIN, TINY_OURO_PATH)
    weights = load_file(hub.put(BASE, "v1", V1, TINY_OURO_PATH) / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * 1.25
    save_file(
        weights, folder / "models--ByteDance--Ouro-1.4B" / "snapshots" / V1 / "model.safetensors", {"format": "pt"}
    )
    yield hub
    patch.undo()


def train(folder, *words):
    load_script("recipes/sft.py").main([*SHORT, "--output_dir", str(folder), *words])
    return folder


def copy(folder, name, *left_out):
    """A copy of a run, as it is after a move to another computer."""
    place = folder.with_name(name)
    shutil.copytree(folder, place)
    for pattern in left_out:
        for path in place.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return place


def edit(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture(scope="module")
def places(hub, tmp_path_factory):
    """All kinds of names. The trainings are real ones, of two steps."""
    root = tmp_path_factory.mktemp("places")
    base = ["--model_name_or_path", BASE]
    run = train(root / "run", *base, "--model_revision", "v1", "--merge", "true")
    places = {
        "base folder": TINY_OURO_PATH,
        "base at a tag": BASE,
        "run": run,
        "checkpoint": run / "checkpoint-1",
        "merged": run / "merged",
        "run of main": train(root / "main", *base, "--num_loops", "2"),
        "independent": train(root / "independent", *base, "--rule", "independent", "--num_loops", "3"),
        "moved": copy(run, "moved", "recipe.yaml", "checkpoint-*"),
        "stopped": copy(run, "stopped", "adapter_*", "loop_dropout.json", "merged", "checksums.json"),
        "authors": root / "authors",
        "standalone": root / "standalone",
        "named": root / "named",
        "added tokens": root / "added",
        "quantized": copy(run, "quantized", "checkpoint-*", "merged"),
        "old": copy(run, "old", "loop_dropout.json", "checkpoint-*", "merged", "checksums.json"),
        "adapter on the Hub": "user/adapter",
        "merged on the Hub": "user/merged",
    }
    load_script("recipes/export.py").main([str(run), "--output_dir", str(places["authors"])])
    merge_and_save(load_model(run), places["standalone"], load_tokenizer(str(run)), standalone=True)
    edit(places["quantized"] / "loop_dropout.json", quantization={"load_in_4bit": True}, dtype="bfloat16")
    edit(places["old"] / "adapter_config.json", revision=None)  # as PEFT wrote it without a commit

    named = places["named"] / "math"
    named.mkdir(parents=True)
    for file in ("adapter_config.json", "adapter_model.safetensors", "loop_dropout.json"):
        shutil.copy(run / file, named)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run / file, places["named"])

    model = load_model(run)
    tokenizer = load_tokenizer(str(run))
    tokenizer.add_tokens(["<step>"])
    model.get_base_model().resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(places["added tokens"], save_embedding_layers=True)
    tokenizer.save_pretrained(places["added tokens"])
    shutil.copy(run / "loop_dropout.json", places["added tokens"])

    hub.put("user/adapter", "main", ADAPTER, places["moved"])
    hub.put("user/merged", "main", MERGED, run / "merged")
    return places


TRAINED = {"base": BASE, "revision": V1, "num_loops": 4, "prompt_template": PROMPT, "dtype": "float32"}
IS_ADAPTER = {**TRAINED, "kind": "adapter", "rule": "loop_dropout", "gates": "at any depth"}
IS_BASE = {"kind": "base model", "num_loops": 4, "prompt_template": None, "training_id": None, "gates": "none"}
IS_MERGED = {"kind": "merged model", "num_loops": 4, "prompt_template": PROMPT, "gates": "none"}
TABLE = {
    "base folder": {**IS_BASE, "base": str(TINY_OURO_PATH), "revision": None},
    "base at a tag": {**IS_BASE, "base": BASE, "revision": V1, "commit": V1, "tokenizer": (BASE, V1)},
    "run": {**IS_ADAPTER, "tokenizer": ("{place}", None)},
    "checkpoint": {**IS_ADAPTER, "tokenizer": ("{place}", None)},
    "merged": {**IS_MERGED, "base": "{place}", "revision": None, "tokenizer": ("{place}", None)},
    "run of main": {**IS_ADAPTER, "revision": MAIN, "num_loops": 2, "depths": (2, 2)},
    "independent": {
        **IS_ADAPTER,
        "revision": MAIN,
        "rule": "independent",
        "num_loops": 3,
        "gates": "at its own depth",
    },
    "moved": {**IS_ADAPTER, "tokenizer": ("{place}", None)},
    "authors": {**IS_ADAPTER, "prompt_template": None, "dtype": None, "tokenizer": (BASE, V1)},
    "standalone": {**IS_MERGED, "kind": "standalone model", "base": "{place}"},
    "named": {**IS_ADAPTER, "tokenizer": ("{place}", None)},
    "added tokens": {**IS_ADAPTER, "tokenizer": ("{place}", None)},
    "quantized": {**IS_ADAPTER, "quantization": {"load_in_4bit": True}, "dtype": "bfloat16"},
    "old": {**IS_ADAPTER, "revision": "v1", "rule": None, "num_loops": None, "training_id": None},
    "adapter on the Hub": {**IS_ADAPTER, "repository": "user/adapter", "commit": ADAPTER},
    "merged on the Hub": {
        **IS_MERGED,
        "base": "user/merged",
        "revision": MERGED,
        "commit": MERGED,
        "tokenizer": ("user/merged", MERGED),
    },
}


OF_BASE = f"of {BASE} at {V1}, K = 4, runs at any depth, tokenizer: its own, prompts: {PROMPT!r}"
LINES = {
    "base folder": "tiny-ouro: base model, K = 4, runs at any depth, tokenizer: its own, prompts: the tokenizer's chat "
    "template, else plain text",
    "base at a tag": f"{BASE} at {V1}: base model, K = 4, runs at any depth, tokenizer: its own, prompts: the tokenizer's "
    "chat template, else plain text",
    "checkpoint": f"{{place}}: adapter {OF_BASE}",
    "named": f"{{place}}: adapter {OF_BASE}",
    "merged": f"{{place}}: merged model {OF_BASE}",
    "standalone": f"{{place}}: standalone model {OF_BASE}",
    "independent": f"{{place}}: adapter of {BASE} at {MAIN}, K = 3, runs at no other depth, tokenizer: its own, "
    f"prompts: {PROMPT!r}",
    "authors": f"{{place}}: adapter of {BASE} at {V1}, K = 4, runs at any depth, tokenizer: the base model's, prompts: the "
    "tokenizer's chat template, else plain text",
    "old": f"{{place}}: adapter of {BASE} at v1, the base model's depth, tokenizer: its own, prompts: {PROMPT!r}",
    "adapter on the Hub": f"user/adapter at {ADAPTER}: adapter {OF_BASE}",
    "merged on the Hub": f"user/merged at {MERGED}: merged model {OF_BASE}",
}
"""What each command prints, as a user reads it."""


def find(places, kind):
    return find_source(places[kind], revision="v1" if kind == "base at a tag" else None)


@pytest.mark.parametrize("kind", LINES)
def test_each_kind_of_name_is_described_in_plain_words(places, kind):
    assert find(places, kind).describe() == LINES[kind].replace("{place}", str(places[kind]))


def test_unfinished_run_shows_only_known_facts(places):
    shown = find_source(places["stopped"], accept=ALL_KINDS)
    assert shown.lines() == {
        "name": str(places["stopped"]),
        "kind": "unfinished run",
        "folder": str(places["stopped"]),
    }
    assert shown.run == places["stopped"]


def test_revision_is_part_of_a_name(hub, places, tmp_path, capsys):
    """All commands and functions read it, also of a base model, and a folder with such a name stays a folder."""
    hub.put("user/adapter", "try-1", "b" * 40, places["run of main"])
    expected = find_source("user/adapter", revision="try-1")
    assert expected.commit == "b" * 40 and expected.num_loops == 2
    name = "user/adapter@try-1"
    assert find_source(name).columns["adapter"] == name  # so that two branches differ in one table
    for command, words in COMMANDS.items():
        if command == "export":
            continue
        capsys.readouterr()
        load_script(f"recipes/{command}.py").main(words(name, tmp_path / command))
        assert f" at {expected.commit}" in capsys.readouterr().out
    assert ModelNames(expected, 2).find("user/adapter@K=4").num_loops == 4
    assert ModelNames(find_source(name), 2).find(f"{name}@K=4").num_loops == 4
    assert find_source(f"{BASE}@v1").base == BASE and find_source(f"{BASE}@v1").commit == V1
    load_script("recipes/merge.py").main(
        [str(places["run"]), "--model_name_or_path", f"{BASE}@v1", "--output_dir", str(tmp_path / "of v1")]
    )
    with user_error("the weights that it was trained on"):
        load_model(f"{BASE}@main", adapter="user/adapter")
    assert load_model(BASE, adapter=name).config.num_loops == 2
    assert find_source(copy(places["run"], "run@home")).repository is None


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("tiny-ouro@main", None, "Only a repository on the Hub has branches, and tiny-ouro is a folder"),
        (
            "user/adapter@main",
            "v1",
            "user/adapter must have one revision, got 'main' in its name and 'v1'. Remove `@main`",
        ),
        ("user/adapter@", None, "The folder user/adapter@ does not exist"),
        ("/nowhere/me@work/run", None, "The folder /nowhere/me@work/run does not exist"),
    ],
)
def test_wrong_revisions_of_names(places, name, revision, message):
    with user_error(message):
        find_source(name, revision=revision)


def test_trainings_take_the_revision_of_the_base_model_from_its_own_field(places, tmp_path, make_sft):
    message = f"{BASE} must have one revision, got 'v1' in its name and 'main'.* set `model_revision`"
    with user_error(message):
        train(tmp_path / "x", "--model_name_or_path", f"{BASE}@v1")
    with user_error(message):
        make_sft(model=f"{BASE}@v1")


@pytest.mark.parametrize("kind", TABLE)
def test_each_kind_of_name_has_its_fields(places, kind):
    source = find(places, kind)
    place = str(Path(places[kind]).resolve())
    for name, expected in TABLE[kind].items():
        if expected == "{place}" or expected == ("{place}", None):
            expected = place if isinstance(expected, str) else (place, None)
        assert getattr(source, name) == expected, name
    assert source.name == str(places[kind])
    for title, text in source.lines().items():
        assert f"{title:<14}{text}" in repr(source)


@pytest.mark.parametrize("kind", [kind for kind, fields in TABLE.items() if fields["kind"] == "adapter"])
def test_adapters_are_mergeable_if_all_loops_share_them(places, kind):
    with user_error(f"{places[kind]}: .* cannot be merged") if kind == "independent" else nullcontext():
        find(places, kind).check_mergeable()


def test_runs_in_a_folder_are_not_its_adapters(places, tmp_path, caplog):
    """Such as the run of `compare_with` in the folder of the first method, also before that one has an adapter."""
    both = tmp_path / "both"
    shutil.copytree(places["run"], both / "lora")
    with user_error(f"The folder {both} holds neither .* Name one of the runs in it, such as {both}/lora."):
        find_source(both)
    for name in ("recipe.yaml", "run.json"):
        shutil.copy(places["run"] / name, both)
    with user_error("The run in .* has no model yet"):
        find_source(both)
    shutil.copytree(places["run"], both, dirs_exist_ok=True)
    assert find_source(both).folder == both and find_source(both / "lora").folder == both / "lora"
    assert "holds the trained adapters" not in caplog.text
    in_sweep = tmp_path / "sweep/lora/lr_0.1/seed_1"
    shutil.copytree(both, in_sweep)
    with user_error(f"it is not a run. Name one of the runs in it, such as {in_sweep}."):
        find_source(tmp_path / "sweep/lora")


def test_adapter_of_another_program_is_not_that_of_its_run(places, tmp_path, caplog):
    """Such as one that `save_pretrained` has written into a subfolder: it was loaded without a word."""
    folder = tmp_path / "several"
    for place in (folder / "mine", places["stopped"] / "mine"):
        place.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(places["run"] / name, place)
    try:
        with user_error(f"The run in .* name its own folder {places['stopped'] / 'mine'}."):
            find_source(places["stopped"])
    finally:
        shutil.rmtree(places["stopped"] / "mine")
    assert not caplog.text
    assert find_source(folder).folder == folder / "mine"
    assert f"{folder} holds no trained adapter itself. The adapter in its subfolder mine is used." in caplog.text
    # A trainer of another program has saved a named adapter, next to its checkpoints.
    (folder / "checkpoint-1").mkdir()
    shutil.copy(places["run"] / "checkpoint-1/adapter_config.json", folder / "checkpoint-1")
    with user_error("has no model yet"):
        find_source(folder)
    (folder / "training_args.bin").touch()
    assert find_source(folder).folder == folder / "mine"
    shutil.rmtree(folder / "checkpoint-1")
    (folder / "training_args.bin").rename(folder / "mine/training_args.bin")  # of a training into the subfolder itself
    with user_error(f"The folder {folder} holds neither a model nor an adapter"):
        find_source(folder)
    (folder / "mine/training_args.bin").unlink()
    shutil.copytree(places["run"], folder / "of a sweep/seed_1")
    with user_error(f"`adapter` must be .*, got {folder} with the adapters mine, of a sweep/seed_1."):
        find_source(folder)


def test_copies_of_a_training_give_the_same_source(places):
    """The folder was renamed, copied without its recipe, or uploaded."""
    first = find(places, "run")
    for kind in ("moved", "named", "added tokens", "adapter on the Hub"):
        source = find(places, kind)
        for name in ("base", "revision", "rule", "num_loops", "depths", "prompt_template", "is_chat", "dtype"):
            assert getattr(source, name) == getattr(first, name), name
        assert source.training_id == first.training_id is not None
        for column in ("method", "seed", "step", "training"):
            assert source.columns[column] == first.columns[column], column


COMMANDS = {
    "show": lambda name, out: [name],
    "chat": lambda name, out: [name, "1 + 1", "--max_new_tokens", "1"],
    "evaluate": lambda name, out: [
        *[name, "--output_dir", str(out), "--benchmarks", "arithmetic_easy_test", "--benchmark_limit", "1"],
        *["--max_new_tokens", "1", "--use_cpu", "true"],
    ],
    "diagnose": lambda name, out: [
        *[name, "--output_dir", str(out), "--num_examples", "1", "--use_cpu", "true", "--diagnostics", "readouts"],
        *["--preparation", "arithmetic", "--num_train_examples", "8", "--num_eval_examples", "4"],
    ],
    "merge": lambda name, out: [name, "--output_dir", str(out / "merged")],
    "export": lambda name, out: [name, "--output_dir", str(out / "exported")],
}
OF_ADAPTERS = {"merge", "export"}
REFUSED = {
    ("merge", "independent"): "cannot be merged",
    ("export", "independent"): "authors",
    ("export", "run of main"): "requires `revision`",
    ("export", "added tokens"): "authors",
}
RUN_HERE = ["base folder", "run", "checkpoint", "merged", "run of main", "independent", "moved", "authors", "named"]
RUN_HERE += ["added tokens", "adapter on the Hub", "merged on the Hub"]


@pytest.mark.parametrize("kind", RUN_HERE)
def test_every_command_runs_a_name_in_the_same_way(places, tmp_path, capsys, kind):
    source = find(places, kind)
    for command, words in COMMANDS.items():
        capsys.readouterr()
        main = load_script(f"recipes/{command}.py").main
        if command in OF_ADAPTERS and not source.is_adapter:
            with user_error(f"must be an adapter, but it is a {source.kind}"):
                main(words(source.name, tmp_path / command))
            continue
        if (command, kind) in REFUSED:
            with user_error(REFUSED[command, kind]):
                main(words(source.name, tmp_path / command))
            continue
        main(words(source.name, tmp_path / command))
        printed = capsys.readouterr().out
        expected = source.describe(with_prompts=command not in ("chat", "serve"))
        if command == "show":
            expected = repr(source)
        assert expected in printed, command


def test_tiny_ouro_has_its_public_name():
    source = find_source(str(TINY_OURO_PATH))
    assert source.describe().startswith("tiny-ouro: base model") and source.lines()["name"] == "tiny-ouro"


def test_weights_are_those_of_the_training(places):
    """Also the embedding, which differs between the two revisions of the base model."""
    bases = {revision: load_model(BASE, revision=revision).state_dict() for revision in ("main", "v1")}
    name = "model.embed_tokens.weight"
    assert not torch.equal(bases["main"][name], bases["v1"][name])
    for kind, revision in {"run": "v1", "run of main": "main", "old": "v1", "adapter on the Hub": "v1"}.items():
        model = load(find(places, kind)).get_base_model()
        assert torch.equal(model.get_input_embeddings().weight, bases[revision][name]), kind
    for kind in ("merged", "merged on the Hub", "standalone"):
        assert torch.equal(load(find(places, kind)).state_dict()[name], bases["v1"][name].to(torch.float32)), kind


def test_loader_shares_a_base_model_and_changes_nothing(places):
    ids = torch.arange(2, 12).view(1, 10)
    kinds = ["run", "checkpoint", "added tokens", "run", "independent", "run of main", "merged"]
    loader = ModelLoader("cpu")
    loaded, bases = {}, []
    for kind in [*kinds, *reversed(kinds)]:
        source = find(places, kind)
        model = loader.load(source, "float32")
        bases.append(loader._base)
        expected = load(source, dtype="float32")
        assert torch.equal(model(ids).logits, expected(ids).logits), kind
        assert loaded.setdefault(kind, model.config.num_loops) == model.config.num_loops == expected.config.num_loops
    assert bases[0] is bases[1] and bases[4] is bases[5]
    run = find(places, "run")
    assert find_looped_model(loader.load(run, "float32")).run_folder
    base = find_looped_model(loader.load(find_base(run), "float32"))
    assert not base.trained_with and base.run_folder is None


def test_loader_has_bars_for_long_loading_only(monkeypatch, capfd):
    """The bars of many small models hide the lines about them. Another hook of the user stays, and is back afterwards."""
    source, seen = find_source("tiny-ouro"), []

    def hook(factory, args, kwargs):
        seen.append(kwargs)
        return factory(*args, **kwargs)

    for delay, is_shown in ((3.0, False), (0.0, True)):
        monkeypatch.setattr(loading, "BAR_DELAY", delay)
        ModelLoader("cpu").load(source, "float32")
        assert ("Loading weights" in capfd.readouterr().err) == is_shown
    logging.set_tqdm_hook(hook)
    ModelLoader("cpu").load(source, "float32")
    assert logging.set_tqdm_hook(None) is hook and seen[0]["delay"] == 0


def test_trained_base_model_has_its_commit_in_every_file(places):
    run = places["run"]
    assert json.loads((run / "adapter_config.json").read_text())["revision"] == V1
    metadata = json.loads((run / "loop_dropout.json").read_text())
    assert metadata["base_revision"] == V1 and metadata["version"] == 1
    assert json.loads((run / "run.json").read_text())["model_revision"] == V1
    merged = json.loads((run / "merged" / "loop_dropout.json").read_text())
    assert merged["base_revision"] == V1 and merged["kind"] == "merged model"


def test_merging_a_run_again_gives_the_merged_model_of_its_training(places, tmp_path):
    load_script("recipes/merge.py").main([str(places["run"]), "--output_dir", str(tmp_path / "again")])
    first, again = (load_file(folder / "model.safetensors") for folder in (places["merged"], tmp_path / "again"))
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_missing_folder_names_the_closest_one(tmp_path, monkeypatch):
    """Also if another folder of its path has the mistake. A path of two names could be one on the Hub."""
    monkeypatch.chdir(tmp_path)
    for name in ("sweep/lora/lr_0.001/seed_1", "sweep/lora/lr_0.004/seed_1/checkpoint-2", "sweep/lora/lr_0.1/other"):
        Path(name).mkdir(parents=True)
    meant = {
        "sweep/lora/lr_0.04/seed_1": "sweep/lora/lr_0.004/seed_1",
        f"{tmp_path}/swep/lroa/lr_0.001/seed_2": f"{tmp_path}/sweep/lora/lr_0.001/seed_1",
        "sweep/lora/lr_0.004/seed_1/checkpoint-3": "sweep/lora/lr_0.004/seed_1/checkpoint-2",
        "swep/lora": "sweep/lora",
        "swep": "sweep",
    }
    for name, folder in meant.items():
        for read in (find_source, read_results):
            with user_error(f"{name}.* Did you mean '{folder}'"):
                read(name)
    Path("sweep/lora/p2").mkdir()
    with user_error("Did you mean 'sweep/lora/p2'"):
        find_source("sweep/lora/p_2")
    with user_error(r"The folder sweep/lora/gpt2 does not exist\.$"):  # only half of its letters are the same
        find_source("sweep/lora/gpt2")
    with user_error(r"The folder nothing/like/it does not exist\.$"):
        find_source("./nothing/like/it")


WRONG = {
    "no folder": ("nowhere/at/all", "The folder nowhere/at/all does not exist"),
    "typo": ("tiny_ouro", "Did you mean 'tiny-ouro'"),
    "stopped": (
        "stopped",
        "has no model yet, because it is not finished. Its newest complete checkpoint is .*checkpoint-2",
    ),
    "nothing yet": ("empty run", "has no model yet, and no complete checkpoint"),
    "incomplete": ("incomplete", "The checkpoint .* is not complete"),
    "something else": ("other", "holds neither a model nor an adapter"),
    "sweep": (
        "sweep",
        "is a sweep of 1 run. Name one of them, such as .*lora/lr_0.1/seed_1. Whole sweeps are read by",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_names_end_in_the_same_sentence_in_all_commands(places, tmp_path, case):
    name, message = WRONG[case]
    folders = {
        "empty run": tmp_path / "empty",
        "incomplete": tmp_path / "run" / "checkpoint-1",
        "other": tmp_path / "x",
        "sweep": tmp_path / "sweep",
    }
    for folder in folders.values():
        folder.mkdir(parents=True)
    shutil.copy(places["run"] / "recipe.yaml", folders["empty run"])
    in_sweep = folders["sweep"] / "lora/lr_0.1/seed_1"
    in_sweep.mkdir(parents=True)
    (in_sweep / "sweep_recipe.yaml").touch()
    (in_sweep / "log.txt").touch()  # it has been started
    name = str({**folders, "stopped": places["stopped"]}.get(name, name))
    push = {"push": lambda name, out: [name, "--hub_model_id", "me/x"]}
    for command, words in {**COMMANDS, **push}.items():
        if command == "show" and case in ("stopped", "nothing yet", "incomplete"):
            assert "unfinished run" in repr(find_source(name, accept=ALL_KINDS))
            continue
        if case == "sweep" and command in ("show", "diagnose"):  # which read sweeps
            assert find_source(name, accept=ALL_KINDS).lines()["runs"] == "1."
            continue
        with user_error(message):
            load_script(f"recipes/{command}.py").main(words(name, tmp_path / command))
    with user_error(message):
        load_model(name)
    with user_error(message):
        load_adapter(load_model("tiny-ouro"), name)
    with user_error(message):
        load_script("recipes/sft.py").main(
            [*SHORT, "--model_name_or_path", name, "--output_dir", str(tmp_path / "out")]
        )


def test_training_in_python_without_a_saved_adapter(make_sft, tmp_path):
    trainer = make_sft(output_dir=str(tmp_path), max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    with user_error(
        f"{tmp_path} has no adapter of its own, although its training has ended. In Python, call `trainer.save_model..` "
        f"before the model is trained again, or use {tmp_path}/checkpoint-2.$"
    ):
        load(find_source(tmp_path))
    with user_error(
        f"no tokenizer.json. Call `trainer.save_model..`, which saves .* or use {tmp_path}/checkpoint-2.$"
    ):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path / "checkpoint-2").get_vocab() == trainer.processing_class.get_vocab()
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-3")  # of a later training, which was stopped
    with user_error("has no model yet, because it is not finished"):
        find_source(tmp_path)
    trainer.save_model()
    assert find_source(tmp_path).is_adapter


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (
            "stopped",
            "The run in .*stopped has no model yet, because it is not finished. Its newest complete checkpoint is",
        ),
        ("moved", ".*moved must be a model, but it is an adapter"),
        ("nowhere", "The folder .*nowhere does not exist. It is `base_model_name_or_path` in"),
    ],
)
def test_base_models_that_are_no_models_end_in_the_same_sentence(places, tmp_path, base, message):
    folder = shutil.copytree(places["run"], tmp_path / "run")
    edit(folder / "adapter_config.json", base_model_name_or_path=str(places.get(base, tmp_path / base)), revision=None)
    for command in ("chat", "evaluate", "diagnose", "merge"):
        with user_error(message):
            load_script(f"recipes/{command}.py").main(COMMANDS[command](str(folder), tmp_path / command))
    with user_error(message):
        load_model(folder)


def test_base_models_on_the_hub_are_told_by_their_weights(hub, places, tmp_path, log):
    """Another commit with other weights is another base model, and a mirror under another name and commit is none."""
    run = places["run"]
    message = f"the weights that it was trained on, of {BASE} at {V1}, got other weights, of {BASE} at {MAIN}"
    with user_error(message):
        load_model(run, revision="main")
    with user_error(message):
        load_script("recipes/merge.py").main(
            [str(run), "--model_revision", "main", "--output_dir", str(tmp_path / "x")]
        )
    snapshot = hub.folder / "models--ByteDance--Ouro-1.4B" / "snapshots" / V1
    hub.put("user/mirror", "main", "e" * 40, snapshot)
    for base in ("user/mirror", str(snapshot)):
        load_model(base, adapter=run)
    assert "was trained on" not in log.text


@pytest.mark.parametrize("name", ["tiny-oruo", "Ouro-1.4B"])
def test_short_name_close_to_a_model_does_not_ask_the_hub(monkeypatch, name):
    """Without a connection, the Hub's client would try for half a minute."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **fields: pytest.fail("the Hub is asked"))
    for read in (load_model, load_tokenizer, find_source):
        with user_error(f"There is no folder {name}, and a model on the Hub has .* user/model. Did you mean '.*uro"):
            read(name)


def test_tokenizer_of_an_unreachable_hub_is_one_question(monkeypatch):
    asked = []

    def fail(name, **fields):
        asked.append(name)
        raise ConnectionError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with user_error(
        "The tokenizer user/model cannot be loaded: there is no folder of this name, and the Hub cannot be reached .no conn"
    ):
        load_tokenizer("user/model@branch")
    assert {*asked} == {"user/model"} and len(asked) == 2  # the Hub, and then its cache


def test_hints_are_made_for_errors_only(hub, monkeypatch):
    """A hint reads all recipes of the package."""
    monkeypatch.setattr("loopdropout_trainer.hub.model_hint", lambda name: pytest.fail("a hint is made"))
    assert find_source(BASE, revision="v1").commit == V1


def test_adapters_of_one_depth_do_not_run_at_another(places, tmp_path):
    name = str(places["independent"])
    sentence = "`num_loops` must be 3 for .*independent"
    for main, words in {
        "chat": [name, "1", "--eval_num_loops", "2"],
        "evaluate": [
            name,
            "--benchmarks",
            "arithmetic_easy_test",
            "--eval_num_loops",
            "2",
            "--output_dir",
            str(tmp_path),
        ],
        "serve": [name, "--num_loops", "2"],
        "diagnose": [name, "--eval_num_loops", "1", "2", "--output_dir", str(tmp_path), "--use_cpu", "true"],
    }.items():
        with user_error(sentence):
            load_script(f"recipes/{main}.py").main(words)
    with user_error(sentence):
        load_model(name, num_loops=2)
    with user_error(sentence):
        LoopedLM(name, num_loops=2)


GATED = {
    "chat": lambda name, out: [name, "1", "--gates"],
    "serve": lambda name, out: [name, "--gates"],
    "evaluate": lambda name, out: [name, "--benchmarks", "arithmetic_easy_test", "--output_dir", str(out), "--gates"],
}


@pytest.mark.parametrize(
    ("kind", "gates", "message"),
    [
        ("merged", "1-0-0-0", "`gates` must be left out, because .*merged has no adapter to gate, got '1-0-0-0'"),
        ("base folder", "1-0-0-0", "`gates` must be left out, because .* has no adapter to gate, got '1-0-0-0'"),
        (
            "independent",
            "1-0-0-0",
            r"`gates` must have one number for each loop \(K = 3\), such as 1-0-0, got '1-0-0-0'",
        ),
        ("run", "loop 5", r"`gates` must have one number for each loop \(K = 4\), such as 1-0-0-0, got 'loop 5'"),
        ("run", "single_lop", "one loop alone is 'loop 1' to 'loop 4'. `single_loop` .* Did you mean 'single_loop'?"),
    ],
)
def test_gates_that_do_not_run_are_refused_before_loading(places, tmp_path, monkeypatch, kind, gates, message):
    name = str(places[kind])
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    for command, words in GATED.items():
        with user_error(message):
            load_script(f"recipes/{command}.py").main([*words(name, tmp_path), gates])
    with user_error(message):
        LoopedLM(name, gates=gates)


def test_gates_without_a_number_name_the_depth_of_the_model_first(places, tmp_path):
    """Before the listed depth that they fit, because a number was probably forgotten."""
    words = GATED["evaluate"](str(places["run"]), tmp_path)
    message = (
        "`gates` must have one number for each loop (K = 4), such as 1-0-0-0, got '1-0-0'. The model runs 4 loops. Also add "
        "`--eval_num_loops 4` instead of `eval_num_loops` (1, 3, 4), of the recipe or the command."
    )
    fix = " Or keep the `gates` and add `--eval_num_loops 3`, which all of them fit."
    for gates, end in ((["1-0-0"], fix), (["1-0-0", "1-0"], "")):
        with user_error(f"^{re.escape(message + end)}$"):
            load_script("recipes/evaluate.py").main([*words, *gates, "--eval_num_loops", "1", "3", "4"])
    with user_error(r"Did you mean 'single_loop'\?$"):  # which is no matter of the depth
        load_script("recipes/evaluate.py").main([*words, "single_lop", "--eval_num_loops", "1", "3", "4"])


def test_order_and_current_directory_change_nothing(places, tmp_path, monkeypatch):
    run, other = places["run"], places["run of main"]
    monkeypatch.chdir(run.parent)
    words = [
        "--benchmarks",
        "arithmetic_easy_test",
        "--benchmark_limit",
        "4",
        "--use_cpu",
        "true",
        "--max_new_tokens",
        "8",
    ]
    names = {"first": [str(run), str(other)], "second": ["main", "run"]}
    for place, order in names.items():
        load_script("recipes/evaluate.py").main([*order, *words, "--output_dir", str(tmp_path / place)])
    for name in ("run", "main"):
        (first,) = (tmp_path / "first" / "samples" / name).glob("*.jsonl")
        second = tmp_path / "second" / "samples" / name / first.name
        assert first.read_text() == second.read_text()
    assert "K2" in "".join(path.name for path in (tmp_path / "first" / "samples" / "main").iterdir())


def test_base_models_replace_those_of_an_adapter(places):
    source = find_source_of("tiny-ouro", places["run"])
    assert (source.base, source.revision) == (str(TINY_OURO_PATH), None)
    assert find_source_of(places["run"], revision="main").revision == "main"
    assert find_base(replace(source, name="x")).kind == "base model"


@pytest.mark.parametrize("make", [*TINY.values(), tiny_hrm, DORY], ids=[*TINY, "hrm_text", "dory"])
def test_own_depth_of_a_model_is_that_of_its_class(tmp_path, make):
    make().save_pretrained(tmp_path)
    assert find_source(tmp_path).num_loops == find_looped_model(load_model(tmp_path)).num_loops > 1


def test_unknown_kinds_in_settings_are_left_out(places, tmp_path):
    shutil.copytree(places["merged"], tmp_path / "merged")
    for kind in ("adapter", "unfinished run", "x"):
        edit(tmp_path / "merged" / "loop_dropout.json", kind=kind)
        assert find_source(tmp_path / "merged").kind == "merged model"


def test_newer_settings_ask_for_an_update(places, tmp_path):
    shutil.copytree(places["moved"], tmp_path / "newer")
    edit(tmp_path / "newer" / "loop_dropout.json", version=99)
    with user_error("has version 99, but this release reads versions up to 1. Update the package"):
        load_model(tmp_path / "newer")


def test_damaged_models_are_not_loaded(places, tmp_path):
    for kind, file in {"moved": "adapter_model.safetensors", "merged": "model.safetensors"}.items():
        folder = tmp_path / kind
        shutil.copytree(places[kind], folder)
        content = bytearray((folder / file).read_bytes())
        content[-64:] = bytes(64)
        (folder / file).write_bytes(content)
        with user_error(f"has a damaged {file}"):
            load_model(folder)


def test_finished_run_that_is_merged_later_has_the_facts_of_its_training(hub, tmp_path):
    run = train(tmp_path / "run", "--model_name_or_path", BASE)
    train(run, "--model_name_or_path", BASE, "--merge", "true")
    saved, merged = (json.loads((folder / "loop_dropout.json").read_text()) for folder in (run, run / "merged"))
    for name in ("training_id", "prompt_template", "method", "seed", "step", "base_revision"):
        assert merged[name] == saved[name] is not None, name


def test_adapter_that_a_later_training_did_not_replace_is_named(make_sft, tmp_path, log):
    def trainer(max_steps):
        fields = {"save_strategy": "steps", "save_steps": 2, "max_steps": max_steps}
        return make_sft(load_model("tiny-ouro"), output_dir=str(tmp_path), **fields)

    def warning():
        log.clear()
        find_source(tmp_path / "checkpoint-2")  # the adapter of a checkpoint has no results of its own
        find_source(tmp_path)
        return log.text

    advice = "After a training in Python, call `trainer.save_model()` before the model is trained again, or use"
    first = trainer(2)
    first.save_model()
    first.train()
    untrained = f"{tmp_path} holds the adapter of step 0, but the results there are of step 2."
    assert f"{untrained} {advice} {tmp_path}/checkpoint-2." in warning()
    first.save_model()
    assert warning() == ""
    second = trainer(4)
    second.train(resume_from_checkpoint=True)
    message = f"{tmp_path} holds the adapter of step 2, but the results there are of"
    assert f"{message} step 4. {advice} {tmp_path}/checkpoint-4." in warning()
    assert warning() == ""  # once in a process
    trainer(2).train()
    assert f"{message} another training. {advice}" in warning()
    second.save_model()
    second._record_training()
    assert warning() == ""
    repeated = trainer(4)  # its results replace those of another training of equal length
    repeated.train()
    repeated.save_model()
    assert warning() == ""


def test_saved_step_is_the_step_of_the_weights(make_sft, tmp_path):
    """Also when the trainer saves for a push, where transformers marks the save as its own."""
    fields = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "max_steps": 2,
        "load_best_model_at_end": True,
    }
    trainer = make_sft(output_dir=str(tmp_path), save_strategy="steps", greater_is_better=True, **fields)
    trainer.train()
    assert trainer.state.best_global_step == 1
    trainer.save_model(_internal_call=True)
    assert find_source(tmp_path).columns["step"] == 1
