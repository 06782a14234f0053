"""Pushes to a Hub, and another person who loads from it with an empty cache."""

import re
from pathlib import Path

import pytest

from helpers.files import ROOT
from helpers.hub import running_hub
from helpers.processes import ENVIRONMENT, TRAINING, Interpreter, python


TRAIN = """
from pathlib import Path
from datasets import Dataset
from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, load_model, merge_and_save, push_merged_to_hub

def leave(folder):  # as a command that was killed while it wrote
    Path(folder).mkdir(exist_ok=True)
    Path(folder, ".checksums.json.123").write_text("{")

rows = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(16)]
leave("run")
args = LoopDropoutConfig(
    "run", max_steps=2, save_steps=1, bf16=False, report_to="none", push_to_hub=True, hub_model_id="me/adapter",
    hub_private_repo=True, hub_always_push=True, num_train_epochs=1, hub_token="hf_mine",
)
trainer = LoopDropoutSFTTrainer("tiny-ouro", args, train_dataset=Dataset.from_list(rows))
trainer.train()
trainer.push_to_hub(tags=["sums"], dataset_name="me/sums")
for name, standalone in (("merged", False), ("alone", True)):
    folder = merge_and_save(trainer.model, name, trainer.processing_class, standalone=standalone)
    leave(folder)
    push_merged_to_hub(folder, f"me/{name}", token="hf_mine")
push_merged_to_hub("merged", "me/branched", token="hf_mine", revision="v1")
"""
PRIVATE_RUN = """
--max_steps 1 --num_train_examples 8 --num_eval_examples 8 --benchmarks null --eval_num_loops null
--single_loop_accuracy false --compare_with null --output_dir run
--num_sample_completions 0 --push_merged_to_hub true --hub_model_id me/secret --hub_private_repo true --hub_token hf_mine
"""
COMPARED = """
--max_steps 2 --save_steps 1 --num_train_examples 16 --num_eval_examples 8 --benchmark_limit 2 --eval_num_loops null
--single_loop_accuracy false --merge false --output_dir run --push_to_hub true --hub_model_id me/compared
--hub_revision try-1 --hub_always_push true --num_sample_completions 0
"""
READ = """
import sys
from loopdropout_trainer import load_model
from loopdropout_trainer.tokenizers import load_tokenizer

tokenizer = load_tokenizer("tiny-ouro")
ids = tokenizer("1 + 1 =", return_tensors="pt").input_ids
models = [load_model(name) for name in sys.argv[1:]] + [load_model("me/branched", revision="v1")]
texts = {model.generate(ids, max_new_tokens=4, do_sample=False).sum().item() for model in models}
assert len(texts) == 1
"""
ALONE = """
import re, sys
assert not {"transformers", "loopdropout_trainer"} & {*sys.modules}
sys.modules["loopdropout_trainer"] = None
from huggingface_hub import ModelCard
code = re.findall(r"(?ms)^```python\\n(.*?)^```", ModelCard.load("me/alone").text)[1]
exec(code)
assert model.config.num_loops == 4 and tokenizer("1")["input_ids"]
"""


LOGIN = " A private or gated repository needs `hf auth login` or HF_TOKEN."
REFUSED = """
from loopdropout_trainer import load_model
from loopdropout_trainer.data.files import load_rows
from loopdropout_trainer.data.sources import DataSource
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation.loading import load_task
from loopdropout_trainer.tokenizers import load_tokenizer

calls = {
    load_model: ["me/adapter", "me/branched@v2"], load_tokenizer: ["me/adapter"], load_task: ["gsm8k"],
    load_rows: [DataSource("me/sums")],
}
for function, names in calls.items():
    for name in names:
        try:
            function(name)
        except UserError as error:
            print(error)
"""


@pytest.fixture(scope="module")
def hub():
    with running_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def run(hub, tmp_path_factory):
    """`run(person, *words)`: run a program as a person, who has a token, and a cache that begins empty."""
    home, caches = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("caches")
    env = {**ENVIRONMENT, "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HOME": str(home / "huggingface")}  # a link, since its name and the endpoint are read at the import

    def run_as(person, *words, cwd, token="hf_mine", bare=False):
        (home / "huggingface").unlink(missing_ok=True)
        (caches / person).mkdir(exist_ok=True)
        (home / "huggingface").symlink_to(caches / person)
        own = {**env, "HF_TOKEN": token}
        return python(*words, cwd=cwd, env=own, bare=True) if bare else interpreter.run(*words, cwd=cwd, env=own)

    with Interpreter(*TRAINING, env=env) as interpreter:
        yield run_as


@pytest.fixture(scope="module")
def pushed(run, tmp_path_factory):
    done = run("me", "-c", TRAIN, cwd=tmp_path_factory.mktemp("hub"))
    assert done.returncode == 0, done.stderr[-5000:]


def test_pushes_have_settings_and_no_locks(hub, pushed):
    commits = [(message, files) for repository, _, message, files in hub.commits if repository == "me/adapter"]
    in_progress = [files for message, files in commits if message.startswith("Training in progress")]
    assert len(in_progress) == 2 and "private" in str(hub.repositories["me/adapter"])
    for files in in_progress:
        assert {"adapter_model.safetensors", "loop_dropout.json", "adapter_config.json"} <= {*files}
    for *_, files in hub.commits:
        assert not [name for name in files if "locks" in Path(name).parts or name.endswith((".lock", ".123"))]


@pytest.fixture
def sft(run, tmp_path):
    """`sft(words)`: train the quickstart with other words, and return what it prints."""

    def train(words):
        done = run("me", ROOT / "recipes/sft.py", ROOT / "recipes/quickstart.yaml", *words.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-5000:]
        return done.stdout

    return train


def test_merged_model_of_a_private_run_is_private(hub, sft):
    sft(PRIVATE_RUN)
    assert "model.safetensors" in hub.files("me/secret")
    assert hub.repositories["me/secret"]["visibility"] == "private"


def test_compared_runs_push_the_measured_adapter_to_a_branch(hub, sft):
    assert "Pushed to " in sft(COMPARED)
    files = hub.files("me/compared", "try-1")
    card = files["README.md"].decode()
    assert hub.files("me/compared", "main") == {} and b"accuracy" in files["results.jsonl"]
    assert 'load_model("me/compared@try-1")' in card and "loopdropout chat me/compared@try-1\n" in card
    assert "| arithmetic_easy_test | 4 |" in card and "| Training data | arithmetic |" in card
    sft(f"{COMPARED} --max_steps 3 --resume_from_checkpoint true")
    commits = [commit for commit in hub.commits if commit[0] == "me/compared"]
    messages = [message for _, branch, message, _ in commits if branch == "try-1"]
    assert "Training in progress, step 3" in messages and messages.count("Upload adapter with its results") == 2
    names = {name for *_, files in commits for name in files}
    assert {"adapter_model.safetensors", "loop_dropout.json", "checksums.json"} <= names
    assert not [name for name in names if "/" in name]  # checkpoints, answers, and the run of LoRA


def test_finished_run_is_pushed_later(hub, run, sft, tmp_path):
    """And the printed next command says how."""
    short = " ".join(PRIVATE_RUN.split("--push_merged_to_hub")[:1])
    assert "\n  loopdropout push run --hub_model_id USER/NAME   # " in sft(short)
    for words in (
        "push run --hub_model_id me/later --hub_private_repo true",
        "push run/merged --hub_model_id me/whole",
    ):
        plan = run("me", "-m", "loopdropout_trainer", *words.split(), "--dry_run", "true", cwd=tmp_path).stdout
        assert words.split()[3] not in hub.repositories and re.search(r"\naccount +me\n", plan)
        done = run("me", "-m", "loopdropout_trainer", *words.split(), cwd=tmp_path)
        sizes = {name: int(size.replace(",", "")) for name, size in re.findall(r"(\S+)  ([\d,]+)$", plan, re.M)}
        pushed = {name: len(text) for name, text in hub.files(words.split()[3]).items() if name != ".gitattributes"}
        own = {
            name: size for name, size in pushed.items() if name != "README.md"
        }  # the card names the repository since
        assert sizes.keys() == pushed.keys() and own.items() <= sizes.items()
        assert re.search(f"Pushed to .*{words.split()[3]}", done.stdout), done.stderr[-5000:]
    files = hub.files("me/later")
    assert {"adapter_model.safetensors", "loop_dropout.json", "recipe.yaml", "results.jsonl"} <= {*files}
    assert not [name for name in files if "/" in name or name.startswith("optimizer")]
    card = files["README.md"].decode()
    assert hub.repositories["me/later"]["visibility"] == "private" and "loopdropout chat me/later\n" in card
    assert "model.safetensors" in hub.files("me/whole")
    checkpoint = next(tmp_path.glob("run/checkpoint-*")).relative_to(tmp_path)
    words = f"push {checkpoint} --hub_model_id me/later --hub_revision step"
    assert "Pushed to " in run("me", "-m", "loopdropout_trainer", *words.split(), cwd=tmp_path).stdout
    assert "adapter_model.safetensors" in hub.files("me/later", "step")
    assert not {"optimizer.pt", "scheduler.pt", "rng_state.pth"} & {*hub.files("me/later", "step")}
    done = run("me", "-m", "loopdropout_trainer", *["push", "me/later", "--hub_model_id", "me/x"], cwd=tmp_path)
    assert "`folder` must be a folder on this computer, got the repository me/later." in done.stderr


def test_cards_name_their_repository(hub, pushed):
    card = hub.files("me/adapter")["README.md"].decode()
    assert "- sums\n" in card and "me/sums" in card and "loopdropout serve me/adapter" in card
    for name in ("merged", "alone"):
        card = hub.files(f"me/{name}")["README.md"].decode()
        assert f"# me/{name}\n" in card and f'from_pretrained("me/{name}"' in card and '"."' not in card
        assert f"vllm serve me/{name}\n" in card and f"loopdropout chat me/{name}\n" in card


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "chat me/adapter 1",
            "loopdropout chat: The model me/adapter cannot be loaded: .* no repository that can be read on the Hub .404 .*"
            + LOGIN,
        ),
        (
            f"sft quickstart.yaml {PRIVATE_RUN} --push_merged_to_hub false --push_to_hub true --hub_model_id me/adapter",
            "loopdropout sft: The push to me/adapter failed .* Nothing was trained. Log in with `hf auth login`",
        ),
    ],
)
def test_strangers_are_refused_in_one_sentence(hub, run, pushed, tmp_path, words, message):
    num_commits = len(hub.commits)
    words = words.replace("--hub_token hf_mine", "").split()
    done = run("stranger", "-m", "loopdropout_trainer", *words, cwd=tmp_path, token="hf_stranger")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.fullmatch(message + ".*", done.stderr.strip().splitlines()[-1]), done.stderr[-2000:]
    assert len(hub.commits) == num_commits


def test_messages_about_the_hub_say_how_to_log_in(run, pushed, tmp_path):
    done = run("stranger", "-c", REFUSED, cwd=tmp_path, token="hf_stranger")
    model, branch, tokenizer, task, rows = done.stdout.strip().splitlines()
    assert branch == "The repository me/branched on the Hub has no branch, tag or commit 'v2'."
    for line in (model, tokenizer, task, rows):
        assert line.endswith(LOGIN) and "cannot be loaded" in line


def test_merging_and_pushing_from_branch_to_branch(hub, run, pushed, tmp_path):
    command = "merge me/adapter@main --output_dir merged --hub_model_id me/merged --hub_revision try-2"
    done = run("me", "-m", "loopdropout_trainer", *command.split(), cwd=tmp_path)
    assert "me/adapter@main at " in done.stdout and "Pushed to " in done.stdout, done.stderr[-5000:]
    assert 'from_pretrained("me/merged", revision="try-2"' in hub.files("me/merged", "try-2")["README.md"].decode()
    assert hub.files("me/merged", "try-2")["model.safetensors"] == (tmp_path / "merged/model.safetensors").read_bytes()


def test_another_person_loads_pushed_models(run, pushed, tmp_path):
    """A friend, who may read my private repositories."""
    done = run("friend", "-c", READ, "me/adapter", "me/merged", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    run("friend", "-c", ALONE, cwd=tmp_path, bare=True)  # nothing may have imported this package
